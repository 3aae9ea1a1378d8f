"""What packprep is compared with, one file for each kind of work.

These files run in other environments too: at import they need the standard library alone.
"""
