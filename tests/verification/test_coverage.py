"""P21: documents that were lost, used twice or moved, with everything signed again as well as can
be."""

import json
import random
from collections import Counter
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.building.ledger import add_ledgers
from packprep.building.plan import open_plan
from packprep.documents.reading import in_sample
from packprep.format.digests import digest_of
from packprep.format.json_files import encode, receipt_name, rejects_name
from packprep.verification import coverage, verify_dataset
from packprep.verification.coverage import Locations, used_documents
from tests.made import Silent, uses_of, write
from tests.verification.damage import (
    arrays_of,
    copied,
    edit_manifest,
    edit_receipt,
    faults_of,
    made,
    manifest_of,
    places_of,
    promises_of,
    read_json,
    resigned,
    text,
    write_corpus,
)

ALL = -1
SOURCES = ["web", "books", "table", "notes"]
PAD = 256


def write_sources(folder):
    """`web`: line files with bad lines; `books`: a compressed one; `table`: row groups, with nulls;
    `notes`: text files."""
    write_corpus(folder)
    chance = random.Random(3)
    texts = [text(chance, chance.choice([3, 40, 150, 400])) for _ in range(90)]
    texts[17] = texts[50] = None
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), folder / "t.parquet", row_group_size=11
    )
    (folder / "notes").mkdir()
    for i in range(30):
        (folder / f"notes/{i:02d}.txt").write_text(
            "" if i == 11 else text(chance, chance.choice([2, 90, 300]))
        )


def sources_table(**changes):
    paths = {
        "web": "web/*.jsonl",
        "books": "books.jsonl.zst",
        "table": "t.parquet",
        "notes": "notes/*.txt",
    }
    return [{"name": name, "paths": [paths[name]], **changes} for name in SOURCES]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    write_sources(folder / "in")
    return made(folder, sources=sources_table(), tasks=[{"preset": "causal"}])


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    write_sources(folder / "in")
    return made(
        folder, sources=sources_table(repeat=1.5, sample=[0.2, 0.8]), tasks=[{"preset": "causal"}]
    )


@pytest.fixture
def directory(dataset, tmp_path):
    return copied(dataset, tmp_path)


def test_what_a_shard_reads_is_worked_out_by_columns_as_part_by_part(sampled, monkeypatch):
    """Files of all kinds, some uses of each; also a few at a time."""
    plan = open_plan(sampled)
    for at_once, fewest in ((1 << 18, 1), (2, 2)):
        monkeypatch.setattr(coverage, "_AT_ONCE", at_once)
        for b in range(plan.shards):
            parts = [coverage._in_part(source.slices(b, plan.shards)) for source in plan.sources]
            expected = sorted(map(tuple, np.concatenate(parts, axis=1).T.tolist()))
            some = list(coverage._extents(plan, b))
            assert (
                sorted(tuple(row) for own in some for row in np.array(own).T.tolist()) == expected
            )
            assert len(some) >= fewest
            for own in some:
                assert np.array(own).T.tolist() == sorted(np.array(own).T.tolist())


# A shard as rows of segments, to be packed again


class Piece(NamedTuple):
    """One segment: its slots and its header."""

    tokens: np.ndarray
    header: dict

    @property
    def place(self):
        return tuple(int(self.header[f"segment_{name}"]) for name in ("file", "repeat", "doc"))


def rows_of(arrays):
    """The segments of each row, of a shard of causal segments."""
    row, begin, end = places_of(arrays)
    names = [name for name in arrays if name.startswith("segment_") and name != "segment_ids"]
    rows = [[] for _ in range(len(arrays["row_offsets"]) - 1)]
    for g in range(len(row)):
        tokens = np.array(arrays["tokens"][row[g], begin[g] : end[g]])
        rows[row[g]].append(Piece(tokens, {name: arrays[name][g] for name in names}))
    return rows


def packed(rows, like):
    """The arrays of rows of causal segments."""
    length = like["tokens"].shape[1]
    whole = (len(rows), length)
    arrays = {"tokens": np.full(whole, PAD, like["tokens"].dtype)}
    arrays |= {"segment_ids": np.zeros(whole, np.uint16), "loss_mask": np.zeros(whole, np.uint8)}
    cu = []
    for r, row in enumerate(rows):
        at = 0
        cu.append(at)
        for k, piece in enumerate(row):
            end = at + len(piece.tokens)
            assert end <= length
            arrays["tokens"][r, at:end], arrays["segment_ids"][r, at:end] = piece.tokens, k + 1
            arrays["loss_mask"][r, at : end - 1] = 1
            at = end
            cu.append(at)
    arrays["cu_seqlens"] = np.array(cu, np.int32)
    arrays["row_offsets"] = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    pieces = [piece for row in rows for piece in row]
    for name in rows_header(like):
        arrays[name] = np.array([piece.header[name] for piece in pieces], like[name].dtype)
    return {name: arrays[name] for name in like}


def rows_header(arrays):
    return [name for name in arrays if name.startswith("segment_") and name != "segment_ids"]


def test_a_shard_packed_again_is_the_same(dataset):
    arrays = arrays_of(dataset)
    again = packed(rows_of(arrays), arrays)
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)


def counts_of(arrays):
    """(documents, segments, tokens, slots) of each source."""
    _, begin, end = places_of(arrays)
    found = {}
    for s, name in enumerate(SOURCES):
        own = arrays["segment_source"] == s
        places = {
            tuple(p)
            for p in np.stack(
                [arrays[f"segment_{n}"][own] for n in ("file", "repeat", "doc")]
            ).T.tolist()
        }
        tokens = int(arrays["segment_tokens"][own].sum())
        found[name] = np.array([len(places), own.sum(), tokens, (end - begin)[own].sum()])
    return found


def change(directory, rows_changed, shard=0, documents=True):
    """Put `rows_changed(rows)` in a shard's place; receipts, ledger and manifest agree with it, and
    with each other.

    documents: whether the ledger's documents read and used change, too.
    """
    with resigned(directory, shard) as arrays:
        before = counts_of(arrays)
        arrays.update(packed(rows_changed(rows_of(arrays)), arrays))
        after, rows = counts_of(arrays), len(arrays["row_offsets"]) - 1

    def count(receipt):
        ledger = receipt["ledger"]
        whole = np.zeros(4, np.int64)
        for name in SOURCES:
            more = after[name] - before[name]
            whole += more
            n_documents, n_segments, n_tokens, n_slots = map(int, more)
            source = ledger["sources"][name]
            for key in ("read", "used"):
                source["documents"][key] += n_documents if documents else 0
                source["tokens"][key] += n_tokens
            source["segments"] += n_segments
            source["slots"]["total"] += n_slots
            source["slots"]["used"] += n_tokens
            source["slots"]["added"]["eos"] += n_slots - n_tokens
        for short in (False, True):
            own = [
                p for row in rows_of(arrays) for p in row if bool(p.header["segment_task"]) is short
            ]
            name = "too_short" if short else next(n for n in ledger["tasks"] if n != "too_short")
            ledger["tasks"][name] = {
                "segments": len(own),
                "tokens": sum(int(p.header["segment_tokens"]) for p in own),
                "slots": sum(len(p.tokens) for p in own),
            }
        ledger["rows"], ledger["row_slots"] = rows, rows * arrays["tokens"].shape[1]
        ledger["row_padding"] = ledger["row_slots"] - sum(
            s["slots"]["total"] for s in ledger["sources"].values()
        )
        receipt["tokens"] += int(whole[2])

    edit_receipt(directory, count, shard)
    tokens = read_json(directory / receipt_name(shard))["tokens"]
    edit_manifest(directory, lambda manifest: manifest["shards"][shard].update(tokens=tokens))
    sum_ledgers(directory)


def sum_ledgers(directory):
    """The manifest's ledger is the sum of the receipts'."""
    shards = range(len(manifest_of(directory)["shards"]))
    ledgers = [read_json(directory / receipt_name(b))["ledger"] for b in shards]
    edit_manifest(directory, lambda manifest: manifest.update(ledger=add_ledgers(ledgers)))


def files_of(directory):
    """The files of the plan."""
    return read_json(directory / "plan.json")["files"]


def a_document(directory, source, shard=0):
    """(place, pieces) of a document of one segment, of a source, in the middle of what the shard
    has of its file."""
    found = {}
    for row in rows_of(arrays_of(directory, shard)):
        for piece in row:
            if piece.header["segment_source"] == SOURCES.index(source):
                found.setdefault(piece.place, []).append(piece)
    places = sorted(found)
    for before, place, after in zip(places, places[1:], places[2:], strict=False):
        alone = source == "notes" or before[0] == place[0] == after[0]
        if alone and len(found[place]) == 1 and len(found[place][0].tokens) > 5:
            return place, found[place]
    raise AssertionError("no such document")


def shard_of(directory, source):
    """The first shard with documents of a source."""
    shards = range(len(manifest_of(directory)["shards"]))
    return next(
        b
        for b in shards
        if (arrays_of(directory, b)["segment_source"] == SOURCES.index(source)).sum() > 4
    )


def another_shard(directory, shard):
    return shard + 1 if shard + 1 < len(manifest_of(directory)["shards"]) else shard - 1


def without(place):
    return lambda rows: [[piece for piece in row if piece.place != place] for row in rows]


def with_another(pieces):
    """The rows with the pieces in a row of their own at the end."""
    return lambda rows: [*rows, list(pieces)]


def p21(faults):
    return [fault for fault in faults if fault["promise"] == "P21"]


# Good datasets


def test_a_good_dataset_has_all_its_documents(dataset, sampled):
    for good in (dataset, sampled):
        assert faults_of(good) == [] and faults_of(good, ALL) == []
        assert len(list(good.glob("rejects/*/*"))) >= 2


@pytest.mark.long
def test_each_share_of_an_array_has_its_documents(dataset):
    for index in range(3):
        assert verify_dataset(dataset, ALL, {}, (index, 3), 1, Silent())["faults"] == 0


@pytest.mark.long
def test_a_shard_signed_again_is_good(directory):
    change(directory, lambda rows: rows)
    assert faults_of(directory) == [] and faults_of(directory, ALL) == []


# Lost documents


@pytest.mark.parametrize("source", SOURCES)
def test_p21_a_document_that_is_lost(directory, source):
    """The ledger still counts it."""
    shard = shard_of(directory, source)
    place, _ = a_document(directory, source, shard)
    change(directory, without(place), shard, documents=False)
    faults = faults_of(directory)
    assert promises_of(faults) == {"P21"}
    assert (receipt_name(shard), True) in {
        (f["file"], f"source {source}: the ledger counts" in f["message"]) for f in faults
    }


@pytest.mark.parametrize("source", SOURCES)
def test_p21_a_document_that_is_lost_and_no_longer_counted(directory, source):
    """Of a text file or a table the plan tells that it lacks; of a line the source alone."""
    shard = shard_of(directory, source)
    place, _ = a_document(directory, source, shard)
    change(directory, without(place), shard)
    faults = faults_of(directory)
    assert promises_of(faults) == ({"P21"} if source in ("table", "notes") else set()), faults
    faults = faults_of(directory, ALL)
    assert {"P17", "P21"} == promises_of(faults)
    words = [fault["message"] for fault in p21(faults)]
    assert any(
        f"the document at {place[2]} of " in w and "should be in its segments, but is not" in w
        for w in words
    )


def test_p21_a_row_between_two_shards_that_is_lost(directory):
    """The last row that a shard reads of a row group, of which the next shard has the next rows."""
    shards = range(len(manifest_of(directory)["shards"]))
    file = next(i for i, f in enumerate(files_of(directory)) if f["name"] == "t.parquet")
    owner = {}
    for b in shards:
        used = used_documents(arrays_of(directory, b))
        owner |= dict.fromkeys(used.position[used.file == file].tolist(), b)
    row = next(
        r
        for r in sorted(owner)
        if r + 1 in owner and owner[r + 1] != owner[r] and owner.get(r - 1) == owner[r]
    )
    change(directory, without((file, 0, row)), owner[row])
    (fault,) = faults_of(directory)
    assert fault["promise"] == "P21" and f"the document at {row} of 't.parquet'" in fault["message"]
    assert "is in no shard and in no rejects file" in fault["message"]


# Documents twice


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("documents", [True, False])
def test_a_document_in_another_row_too(directory, source, documents):
    """Its segments do not tile it."""
    shard = shard_of(directory, source)
    _, pieces = a_document(directory, source, shard)
    change(directory, with_another(pieces), shard, documents)
    assert "P15" in promises_of(faults_of(directory))


@pytest.mark.parametrize("source", SOURCES)
def test_p21_a_document_in_another_shard_too(directory, source):
    shard = shard_of(directory, source)
    place, pieces = a_document(directory, source, shard)
    change(directory, with_another(pieces), another_shard(directory, shard))
    faults = faults_of(directory)
    assert promises_of(faults) == {"P21"}
    words = " ".join(fault["message"] for fault in faults)
    if source in ("web", "notes"):
        assert (
            f"the document at {place[2]} of " in words
            and "is not in the part of the plan for this shard" in words
        )
    else:
        assert "is also in shards/000/0" in words or "or another row of the file" in words
    assert {"P17", "P21"} == promises_of(faults_of(directory, ALL))


@pytest.mark.parametrize("source", SOURCES)
def test_p21_a_document_that_changed_its_shard(directory, source):
    shard = shard_of(directory, source)
    place, pieces = a_document(directory, source, shard)
    change(directory, without(place), shard)
    change(directory, with_another(pieces), another_shard(directory, shard))
    faults = faults_of(directory)
    # to whose turn a row belongs a table says
    assert promises_of(faults) == {"P21"} or (source == "table" and not faults)
    words = [fault["message"] for fault in p21(faults_of(directory, ALL))]
    for what in ("should be in its segments, but is not", "is in its segments, but should not be"):
        assert any(f"the document at {place[2]} of " in w and what in w for w in words)


# Rejects


def records_of(directory, shard=0):
    path = directory / rejects_name(shard)
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def put_rejects(directory, records, shard=0):
    """A shard's rejects, with receipt, ledger and manifest."""
    before = Counter((r["source"], r["reason"]) for r in records_of(directory, shard))
    data = b"".join(encode(record) for record in records)
    write(directory / rejects_name(shard), data)
    after = Counter((r["source"], r["reason"]) for r in records)

    def count(receipt):
        signed = {"bytes": len(data), "digest": digest_of(data), "documents": len(records)}
        receipt["rejects"] = {"file": rejects_name(shard), **signed}
        for name, source in receipt["ledger"]["sources"].items():
            rejected = {reason: n for (owner, reason), n in after.items() if owner == name}
            more = sum(rejected.values()) - sum(
                n for (owner, _), n in before.items() if owner == name
            )
            source["documents"]["rejected"] = rejected
            source["documents"]["read"] += more

    edit_receipt(directory, count, shard)
    sum_ledgers(directory)


def of_source(records, source):
    return next(i for i, record in enumerate(records) if record["source"] == source)


def shard_with_rejects(directory, source):
    for b in range(len(manifest_of(directory)["shards"])):
        if (directory / rejects_name(b)).exists() and any(
            r["source"] == source for r in records_of(directory, b)
        ):
            return b
    raise AssertionError("no such shard")


@pytest.mark.parametrize("source", ["web", "table", "notes"])
def test_p21_a_reject_that_is_lost(directory, source):
    shard = shard_with_rejects(directory, source)
    records = records_of(directory, shard)
    lost = records.pop(of_source(records, source))
    put_rejects(directory, records, shard)
    faults = faults_of(directory)
    assert promises_of(faults) == ({"P21"} if source != "web" else set()), faults
    faults = faults_of(directory, ALL)
    assert {"P17", "P21"} == promises_of(faults)
    words = (
        f"the document at {lost['position']} of {lost['file']!r} of {source} (pass 0) should be"
        " in the rejects"
    )
    assert any(words in fault["message"] for fault in faults)


def test_p21_a_reject_that_moved_to_another_shard(directory):
    shard = shard_with_rejects(directory, "web")
    other = next(b for b in range(9) if b != shard and (directory / rejects_name(b)).exists())
    records = records_of(directory, shard)
    moved = records.pop(of_source(records, "web"))
    put_rejects(directory, records, shard)
    put_rejects(directory, [*records_of(directory, other), moved], other)
    (fault,) = faults_of(directory)
    assert (
        fault["promise"] == "P21"
        and "is not in the part of the plan for this shard" in fault["message"]
    )


def test_p21_a_reject_that_is_listed_twice(directory):
    records = records_of(directory)
    put_rejects(directory, [records[0], *records])
    (fault,) = faults_of(directory)
    assert (fault["promise"], fault["file"]) == (
        "P21",
        rejects_name(0),
    ) and "is listed twice" in fault["message"]


@pytest.mark.parametrize("source", SOURCES)
def test_p21_a_document_that_is_used_and_rejected(directory, source):
    shard = shard_of(directory, source)
    (file, use, position), _ = a_document(directory, source, shard)
    name = files_of(directory)[file]["name"]
    record = {
        "source": source,
        "file": name,
        "position": position,
        "repeat": use,
        "reason": "empty",
        "detail": "",
    }
    put_rejects(directory, [*records_of(directory, shard), record], shard)
    (fault,) = faults_of(directory)
    assert (
        fault["promise"] == "P21" and "is both in segments and in the rejects" in fault["message"]
    )


def test_p21_a_reject_at_another_place_of_its_file(directory):
    records = records_of(directory)
    records[of_source(records, "web")]["position"] += 1
    put_rejects(directory, records)
    assert faults_of(directory) == []  # whether a line begins there the source knows
    words = [fault["message"] for fault in p21(faults_of(directory, ALL))]
    assert sum("should be in the rejects, but is not" in w for w in words) == 1
    assert sum("is in the rejects, but should not be" in w for w in words) == 1


@pytest.mark.parametrize(
    "key, value",
    [
        ("source", "wep"), ("file", "c.jsonl"), ("repeat", 1), ("repeat", -1), ("position", -1), ("position", 2**63),
        ("reason", "because"), ("position", 3.0), ("detail", None), ("repeat", True),
    ],
)  # fmt: skip
def test_p21_a_reject_that_names_nothing(directory, key, value):
    records = records_of(directory)
    records[0][key] = value
    put_rejects(directory, records)
    faults = p21(faults_of(directory))
    assert faults and faults[0]["file"] == rejects_name(0) and "record 0" in faults[0]["message"]


def test_p21_what_the_sample_leaves_out(sampled, tmp_path):
    directory = copied(sampled, tmp_path)
    source = open_plan(directory).sources[0]
    shard = next(b for b in range(9) if any(r["source"] == "web" for r in records_of(directory, b)))
    records = records_of(directory, shard)
    record = next(r for r in records if r["source"] == "web")
    file = [f.name for f in source.files].index(record["file"])
    while in_sample(source, file, np.array([record["position"]]))[0]:
        record["position"] += 1
    put_rejects(directory, records, shard)
    words = [fault["message"] for fault in p21(faults_of(directory))]
    assert any("is excluded by the source's sample or repeat" in w for w in words)


@pytest.mark.parametrize("name", ["notes", "web"])
def test_p21_what_a_fraction_does_not_take(tmp_path, name):
    """Which text files a use takes follows from their sizes, which the plan has; which lines, only
    their file tells."""
    write_sources(tmp_path / "in")
    for i in range(0, 30, 3):
        (tmp_path / f"in/notes/{i:02d}.txt").write_text("")
    directory = made(tmp_path, sources=sources_table(repeat=1.5), tasks=[{"preset": "causal"}])
    assert faults_of(directory, ALL) == []
    source = next(source for source in open_plan(directory).sources if source.name == name)
    shard = next(
        b
        for b in range(9)
        if any((r["source"], r["repeat"]) == (name, 1) for r in records_of(directory, b))
    )
    records = records_of(directory, shard)
    record = next(r for r in records if (r["source"], r["repeat"]) == (name, 1))
    taken = {(file, at) for file, at, use in uses_of(source) if use == 1}
    folder = tmp_path / "in/web"
    every = [
        (f.name, at)
        for f in source.files
        for at in (lines_of(folder / f.name) if name == "web" else [0])
    ]
    record["file"], record["position"] = next(place for place in every if place not in taken)
    put_rejects(directory, records, shard)
    words = [fault["message"] for fault in p21(faults_of(directory))]
    assert any("is excluded by the source's sample or repeat" in w for w in words) == (
        name == "notes"
    )
    assert any(
        "is in the rejects, but should not be" in fault["message"]
        for fault in p21(faults_of(directory, ALL))
    )


def lines_of(path):
    """Where the lines of a file begin."""
    return np.cumsum([0, *(len(line) for line in path.read_bytes().splitlines(keepends=True))])[
        :-1
    ].tolist()


# Under long = "truncate" a document may keep no trained token


def test_a_document_of_which_no_trained_token_is_kept_is_a_reject(tmp_path):
    write_corpus(tmp_path / "in")
    records = [{"text": "a long question " * 60, "loss_spans": [[900, 910]]} for _ in range(5)]
    (tmp_path / "in/spans.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    sources = [{"name": "all", "paths": ["spans.jsonl", "web/*.jsonl"]}]
    directory = made(
        tmp_path, sources=sources, tasks=[{"preset": "causal"}], documents={"long": "truncate"},
        output={"shard_text_bytes": 8000},
    )  # fmt: skip
    assert faults_of(directory) == [] and faults_of(directory, ALL) == []
    documents = manifest_of(directory)["ledger"]["sources"]["all"]["documents"]
    assert documents["rejected"]["untrained"] == 5
    assert documents["read"] == documents["used"] + sum(documents["rejected"].values())


# The parts


PLACES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 20)), max_size=30)
EXTENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 20), st.integers(1, 6)),
    max_size=12,
)


@given(PLACES, EXTENTS)
def test_a_place_is_inside_of_an_extent_that_holds_it(places, extents):
    apart = []
    for file, use, begin, size in sorted(extents):  # extents of one file do not overlap
        if not apart or apart[-1][:2] != (file, use) or apart[-1][3] <= begin:
            apart.append((file, use, begin, begin + size))
    table = np.array(apart, np.int64).reshape(-1, 4)
    sorted_places = sorted(places)
    found = coverage._inside(
        Locations(*np.array(sorted_places, np.int64).reshape(-1, 3).T), coverage._Extents(*table.T)
    )
    assert found.tolist() == [
        any((f, u) == (file, use) and b <= p < e for file, use, b, e in apart)
        for f, u, p in sorted_places
    ]
