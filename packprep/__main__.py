"""The entry point of `python -m packprep`."""

from packprep.cli import entry

if __name__ == "__main__":  # Workers import this module under another name.
    entry()
