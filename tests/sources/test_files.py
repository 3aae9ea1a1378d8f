"""Files and pieces as columns, against the plain way: a list of files, and one of pieces."""

import os
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.building.plan import Plan
from packprep.building.planning import make_plan
from packprep.format.json_files import decode, encode
from packprep.sources.files import Files, Pieces, SourceFile, _is_one
from packprep.sources.formats import PIECE_BYTES, detect_format
from tests.test_benchmarks import script

ENDINGS = (
    ".jsonl",
    ".JSONL",
    ".jsonl.gz",
    ".json.zst",
    ".parquet",
    ".arrow",
    ".txt",
    ".txt.gz",
    "",
    ".v1.jsonl",
    ".zst",
)


def plain_pieces(files, formats):
    """[(first file, files, part, bytes)] of each piece, one by one."""
    pieces = []
    group = None  # (index of the piece, its last file)
    for i, (file, (format, compression)) in enumerate(zip(files, formats, strict=True)):
        if format == "text":
            if group and group[1] == i - 1 and pieces[group[0]][3] + file.size <= PIECE_BYTES:
                first, many, _, size = pieces[group[0]]
                pieces[group[0]] = (first, many + 1, 0, size + file.size)
            else:
                pieces.append((i, 1, 0, file.size))
            group = len(pieces) - 1, i
        elif format == "jsonl" and not compression:
            left = file.size
            for part in range(file.pieces):
                pieces.append((i, 1, part, min(PIECE_BYTES, left)))
                left -= PIECE_BYTES
        else:
            for part in range(file.pieces):
                pieces.append(
                    (
                        i,
                        1,
                        part,
                        (part + 1) * file.size // file.pieces - part * file.size // file.pieces,
                    )
                )
    return pieces


@st.composite
def listings(draw):
    names, sizes, counts = [], [], []
    for i in range(draw(st.integers(1, 25))):
        ending = draw(st.sampled_from(ENDINGS))
        size = draw(
            st.sampled_from(
                [0, 0, 1, 100, PIECE_BYTES - 1, PIECE_BYTES, 5 * PIECE_BYTES + 7, 10**12]
            )
        )
        format, compression = detect_format(f"{i}{ending}")
        count = draw(st.integers(0, 3)) if format in ("parquet", "arrow") else 1
        if format == "jsonl":
            size = min(size, 10**9)
            count = min(size, 1) if compression else -(-size // PIECE_BYTES)
        names.append(f"d.{i % 3}/{i:03d}{ending}")
        sizes.append(size)
        counts.append(count)
    return names, sizes, counts


@given(listings())
@settings(max_examples=200)
def test_files_and_pieces_are_those_of_the_plain_way(listing):
    names, sizes, counts = listing
    files = Files(3, names, np.array(sizes, np.int64), "auto", "/", np.array(counts, np.int64))
    plain = [SourceFile(3, *values) for values in zip(*listing, strict=True)]
    assert (
        list(files) == plain
        and [files[i] for i in range(len(files))] == plain
        and files[1:] == plain[1:]
    )
    assert files.formats == [detect_format(name) for name in names]
    pieces, expected = Pieces(files), plain_pieces(plain, files.formats)
    assert len(pieces) == len(expected)
    found = pieces.at(np.arange(len(pieces)))
    assert list(zip(*(column.tolist() for column in found), strict=True)) == expected
    for i in range(len(files)):
        own = [p for p, (first, many, _, _) in enumerate(expected) if first <= i < first + many]
        assert list(pieces.of_file(i)) == own


@pytest.mark.parametrize("format", ["jsonl", "text"])
def test_a_format_that_the_recipe_names_holds_for_all_files(format):
    files = Files(
        0, ["a.txt", "b.jsonl.gz"], np.ones(2, np.int64), format, "/", np.ones(2, np.int64)
    )
    assert files.formats == [(format, ""), (format, "gzip")]


def test_counting_pieces_of_lines_and_texts_opens_no_file():
    names = ["a.jsonl", "b.jsonl.zst", "c.jsonl.zst", "d.txt"]
    files = Files(0, names, np.array([9 << 20, 5, 0, 0]), "auto", "/nowhere")
    assert files.pieces.tolist() == [3, 1, 0, 1]


@pytest.mark.long
@pytest.mark.alike(1)
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst"])
def test_a_hundred_thousand_files_are_planned_in_little_memory(monkeypatch, ending):
    scale = script("scale")
    count, size = 100_000, 60_000_000
    monkeypatch.setattr("packprep.building.planning.find_files", scale.listing(count, size, ending))
    monkeypatch.setattr(
        "packprep.building.planning.first_look", lambda *of_files_that_are_not_there: None
    )
    inputs = scale.inputs_of()
    tracemalloc.start()
    with scale.simulated():
        stored = decode(encode(make_plan(inputs)), "plan.json")
    made_in = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made_in < 200e6
    assert len(stored["files"]) == count and stored["files"][-1]["size"] == size
    tracemalloc.start()
    plan = Plan(stored, inputs.vocabulary.tokenizer_json, plan_digest="0")
    (source,) = plan.sources
    first = list(source.taken(0, plan.shards, source.places(0, plan.shards)))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 60e6 and peak < 100e6
    per_file = -(-size // PIECE_BYTES) if ending == ".jsonl" else 1
    assert len(source.pieces) == count * per_file
    whole = Counter(piece for piece, *_ in first)
    assert max(whole.values()) == 1 and {use for _, use, *_ in first} == {0}
    assert sum(hi - lo for _, _, lo, hi, _ in first) == source.weight // plan.shards
    assert sorted(source.order(range(1))[0].tolist()) == list(range(len(source.pieces)))


@pytest.mark.long
def test_paths_are_of_one_file_if_they_resolve_to_it_or_it_has_hard_links(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link").symlink_to("a")
    path = str(tmp_path) + "/"
    assert _is_one(path + "a", path + "link") and _is_one(path + "link", path + "a")
    assert not _is_one(path + "a", path + "b")
    os.link(tmp_path / "a", tmp_path / "hard")
    assert _is_one(path + "a", path + "hard") and not _is_one(path + "b", path + "a")
