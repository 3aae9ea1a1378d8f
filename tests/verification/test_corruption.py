"""Random single-byte corruptions over all files of three datasets, a thousand in a campaign:
`verify` finds each, and no loader breaks."""

import random
import time
from collections import Counter

import pytest

from packprep.errors import PackprepError
from tests.verification.damage import copied, made, report_of
from tests.verification.hostile import in_child, read_all

CORRUPTIONS, ALL = 150, 1000
RECIPES = {
    "causal and ul2r": {},
    "in place": {"tasks": [{"preset": p} for p in ("mlm", "mdlm", "duo", "bd3", "causal")]},
    "compact": {
        "tasks": [{"preset": p} for p in ("ul2r", "fim", "causal")],
        "output": {"shard_text_bytes": 12_000, "columns": "compact"},
        "packing": {"pad_seq_to_mult": 8},
    },
}
REFUSED = {"causal and ul2r": 5, "in place": 40, "compact": 5}
"""Calls that are refused on the good dataset: redraw of what cannot be drawn anew, prefix_ends of
block diffusion, seq_idx of tasks that see ahead."""
IN_A_JSON = b'0123456789-.eE"\\{}[]:, truefalsnN\xff\x00'


def kind_of(name):
    """Files of one kind share their part of the corruptions, however many and large they are."""
    return name.split("/")[0]


def places(directory, chance, count):
    """(file, byte, another value for it), `count` of them: as many in each kind of file."""
    files = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    kinds = sorted({kind_of(name) for name in files})
    for i in range(count):
        name = chance.choice([name for name in files if kind_of(name) == kinds[i % len(kinds)]])
        data = (directory / name).read_bytes()
        if name.endswith(".safetensors") and chance.random() < 0.4:
            at = chance.randrange(len(data[8:].split(b"  ")[0]) + 16)  # its length and its header
        else:
            at = chance.randrange(len(data))
        new = (
            chance.choice(IN_A_JSON)
            if chance.random() < 0.5
            else data[at] ^ (1 << chance.randrange(8))
        )
        yield name, at, new if new != data[at] else data[at] ^ 1


def corrupted(directory, seed, count, usual):
    """{outcome: how often} of corruptions made one after the other; AssertionError at one that is
    not found.

    usual: the calls that are refused on the good dataset, as prefix_ends of block diffusion.
    """
    chance, outcomes = random.Random(seed), Counter()
    for name, at, new in list(places(directory, chance, count)):
        path = directory / name
        good = path.read_bytes()
        path.write_bytes(good[:at] + bytes([new]) + good[at + 1 :])
        try:
            try:
                report = report_of(directory)
                assert report["faults"], f"unseen: {name}, byte {at}: {good[at]} → {new}"
                outcomes["promise"] += 1
            except PackprepError as error:
                assert str(error), (name, at)
                outcomes["error"] += 1
            refused = read_all(directory, chance.choice(["mmap", "pread"]))
            outcomes["refused by the loader" if refused > usual else "read by the loader"] += 1
        except Exception as error:
            raise AssertionError(f"{name}, byte {at}: {good[at]} → {new}") from error
        finally:
            path.write_bytes(good)
    return outcomes


@pytest.mark.long
@pytest.mark.parametrize("total", [CORRUPTIONS, pytest.param(ALL, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("kind", RECIPES)
def test_a_thousand_corruptions(kind, total, tmp_path_factory, tmp_path):
    directory = copied(made(tmp_path_factory.mktemp("dataset"), **RECIPES[kind]), tmp_path)
    assert not report_of(directory)["faults"]
    usual = read_all(directory)
    assert usual == REFUSED[kind]
    begin, count = time.perf_counter(), -(-total // len(RECIPES))
    outcomes = in_child(lambda: corrupted(directory, kind, count, usual), seconds=600)
    print(f"{kind}: {count} corruptions in {time.perf_counter() - begin:.0f} s: {outcomes}")
    assert outcomes["promise"] + outcomes.get("error", 0) == count
