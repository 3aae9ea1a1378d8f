"""Compare a dataset with the independent implementation.

    python -m tests.twin DIR [--source NAME=FOLDER] [--epoch E] [--segments N]

Exit status: 0 if nothing differs, 1 if something does, 2 if the comparison cannot be made.
"""

import argparse
import sys
from pathlib import Path

from packprep.errors import PackprepError
from packprep.verification.faults import line_of
from tests.twin.check import compare_dataset


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.twin", description=__doc__.split("\n")[0]
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--epoch", type=int, default=0, metavar="E")
    parser.add_argument("--segments", type=int, metavar="N", help="compare N random segments")
    options = parser.parse_args()
    moved = dict(source.split("=", 1) for source in options.source)
    try:
        found = compare_dataset(options.directory, moved, options.epoch, options.segments)
    except (PackprepError, OSError) as error:
        print(f"tests.twin: error: {error}", file=sys.stderr)
        return 2
    for fault in found["listed"]:
        print(line_of(fault))
    taken = f", {found['twin_taken']:,} places in conversations taken from packprep"
    verdict = f"{len(found['listed']):,} differences" if found["listed"] else "nothing differs"
    print(
        f"{options.directory}: {verdict} ({found['twin']:,} segments{taken if found['twin_taken'] else ''})"
    )
    return 1 if found["listed"] else 0


if __name__ == "__main__":
    sys.exit(main())
