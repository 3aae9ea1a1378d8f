"""How full rows are of documents far longer than a row, by preset, number of sentinels and
seq_length.

python benchmarks/utilisation.py                        docs/benchmarks.md has each preset's least
python benchmarks/utilisation.py --seq-length 512 4096 --sentinels 100

Documents of 100 to 130 rows each are cut and packed as a build does it, from their lengths alone.
All rows count but the one that was filled last and those that hold a document's last piece. Where
the longest piece of a task takes more than 15/16 of a row, and so has one to itself, its row counts
as what that piece takes. Exit status 1 if less than 99.5 % is filled anywhere.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.packing import pack
from packprep.building.segments import FORMAT_MAX_SEGMENTS, cut
from packprep.documents.reading import Documents
from packprep.objectives.objective import Ids, Task
from packprep.objectives.tasks import complete, inner_capacity, pieces_of_a_row, resolve
from packprep.randomness import integers, text_key
from packprep.recipe import Recipe, read_recipe

LEAST = 0.995
DOCUMENTS, ROWS = 16, (100, 130)
VOCABULARY, SENTINELS = 2048, 1024  # ids; the first of the sentinels
MODE_TOKENS = {"[NLU]": 260, "[NLG]": 261, "[S2S]": 262}
WITH_SENTINELS = {name: {"preset": name} for name in ("t5", "ul2", "ul2r")}
WITHOUT = {
    "causal": {"preset": "causal"},
    "llada": {"preset": "llada"},
    "llada, random_length 0": {"objective": "masked_diffusion"},
    "bd3": {"preset": "bd3"},
}


def resolved(task: dict[str, Any], sentinels: int, seq_length: int) -> tuple[Recipe, list[Task]]:
    """A recipe of one task or preset, and its tasks."""
    table = {
        "tokenizer": "bytes",
        "sources": [{"paths": ["x"]}],
        "seq_length": seq_length,
        "tasks": [task],
    }
    recipe = complete(read_recipe(table, Path()))
    names = np.arange(SENTINELS, SENTINELS + sentinels, dtype=np.int32)
    return recipe, resolve(recipe, Ids(VOCABULARY, 256, 257, 258, 259, names), MODE_TOKENS)


def longest_slots(recipe: Recipe, task: Task) -> int:
    """The slots that an inner piece has: its own where it stands alone in a row, else the row's."""
    if pieces_of_a_row(recipe, task) > 1:
        return recipe.seq_length
    return task.objective.copies * (
        task.most_body_slots(inner_capacity(recipe, task, 0)) + task.mode
    )


def filled(recipe: Recipe, tasks: list[Task]) -> tuple[float, int]:
    """(what is filled of the rows that count, all rows)."""
    few, most = (rows * recipe.seq_length for rows in ROWS)
    lengths = few + integers(text_key("utilisation"), 0, np.arange(DOCUMENTS), most - few).astype(
        np.int64
    )
    zeros, offsets = np.zeros(DOCUMENTS, np.int64), np.concatenate(([0], np.cumsum(lengths)))
    keys = np.full(DOCUMENTS, text_key("documents"))
    documents = Documents(
        np.zeros(0, np.uint16), offsets, np.arange(DOCUMENTS), zeros, zeros, zeros, keys
    )
    segments, _ = cut(recipe, tasks, documents)
    row, _ = pack(segments.slots, recipe.seq_length, recipe.packing.algorithm, FORMAT_MAX_SEGMENTS)
    rows = int(row.max()) + 1
    last = np.append(segments.document[1:] != segments.document[:-1], True)
    counts = np.ones(rows, np.bool_)
    counts[row[last]] = False
    counts[rows - 1] = False
    slots = np.bincount(row, segments.slots, rows)
    room = np.zeros(rows, np.int64)
    np.maximum.at(
        room, row, np.array([longest_slots(recipe, task) for task in tasks])[segments.task]
    )
    return float(slots[counts].sum() / room[counts].sum()), rows


def table(seq_lengths: list[int], sentinels: list[int]) -> list[dict[str, Any]]:
    """One line for each preset and number of sentinels: seq_length → what is filled."""
    lines = [(name, count, task) for name, task in WITH_SENTINELS.items() for count in sentinels]
    lines += [(name, 0, task) for name, task in WITHOUT.items()]
    found = []
    for name, count, task in lines:
        cells = {length: filled(*resolved(task, count, length)) for length in seq_lengths}
        found.append({
            "preset": name,
            "sentinels": count,
            "filled": {length: share for length, (share, _) in cells.items()},
            "fewest_rows": min(rows for _, rows in cells.values()),
        })  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-length", type=int, nargs="+", default=[512 << i for i in range(7)])
    parser.add_argument("--sentinels", type=int, nargs="+", default=[64, 100, 245, 256])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    lines = table(given.seq_length, given.sentinels)
    if given.json:
        print(json.dumps(lines))
    else:
        print(f"| preset | sentinels | {' | '.join(map(str, given.seq_length))} |")
        print(f"| --- | ---: | {' | '.join('---:' for _ in given.seq_length)} |")
        for line in lines:
            cells = " | ".join(f"{100 * share:.2f}" for share in line["filled"].values())
            print(f"| {line['preset']} | {line['sentinels'] or '–'} | {cells} |")
    return int(any(share < LEAST for line in lines for share in line["filled"].values()))


if __name__ == "__main__":
    sys.exit(main())
