"""`python -m packprep`."""

from packprep.cli import main

main()
