"""Files of object stores and other file systems, by URL: listed, read in ranges, written whole, all of it retried.

Credentials, regions and endpoints come from the environment alone, never from a recipe or a URL: one that holds a secret is
refused. A URL is taken as it is written: nothing in it is percent-decoded.
"""

from packprep.storage.remote import Remote, expanded, is_url, locate, without_secrets

__all__ = ["Remote", "expanded", "is_url", "locate", "without_secrets"]
