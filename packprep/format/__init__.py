"""What all files of a dataset share: names, versions and canonical JSON, how they are opened, and digests.

It lies below the loader: json_files and opening run inside a trainer, with the standard library alone; digests needs xxhash.
"""
