"""`python -m packprep`."""

from packprep.cli import entry

if __name__ == "__main__":  # workers import it under another name
    entry()
