"""packprep.sources.formats.jsonl: every line in exactly one part, with its position."""

import json
import random
import tempfile
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.errors import SourceError
from packprep.sources.formats import Decoders
from packprep.sources.formats import batch as limits
from packprep.sources.formats.compressed import Block
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import Cursor, Lines, line_bytes, take_lines
from tests.sources.formats.parts import COMPRESS, part_of, pieces_of, read_all, read_cut, write

ENDINGS = {"": "", "gzip": ".gz", "zstd": ".zst"}

texts = st.text(max_size=12) | st.sampled_from(["é" * 40, "\U0001f600x" * 30, "a" * 300, ""])
some_lines = st.one_of(
    texts.map(lambda text: json.dumps({"id": 1, "text": text}, ensure_ascii=False).encode()),
    st.sampled_from(
        [b"", b" ", b"\t ", b"{", b'{"text": null}', b'{"text": "\xff"}', b"\xef\xbb\xbf"]
    ),
)
files = st.builds(
    lambda lines, bom, final: b"\xef\xbb\xbf" * bom + b"".join(lines)[: None if final else -1],
    st.lists(
        st.builds(lambda line, end: line + end, some_lines, st.sampled_from([b"\n", b"\r\n"])),
        max_size=12,
    ),
    st.booleans(),
    st.booleans(),
)
cut_points = st.lists(st.integers(0, 40), max_size=6).map(lambda cuts: [0, *sorted(cuts), 40])


def by_hand(data):
    """(documents, rejects) of a file's bytes, by position; reasons left out."""
    found, rejects = [], []
    at = 0
    for line in data.split(b"\n"):
        content = line[3:] if at == 0 and line.startswith(b"\xef\xbb\xbf") else line
        if content.strip():
            try:
                found.append((at, json.loads(content.decode())["text"]))
                assert isinstance(found[-1][1], str)
            except AssertionError:
                rejects.append(found.pop()[0])
            except ValueError:
                rejects.append(at)
        at += len(line) + 1
    return found, rejects


@pytest.mark.long
@settings(max_examples=250, deadline=None)
@given(files, cut_points, st.sampled_from([1, 7, 64, 4096]), st.sampled_from([1, 100, 1 << 20]))
def test_fault_17_each_line_is_in_exactly_one_part_of_a_line_file(
    data, cuts, piece_bytes, batch_bytes
):
    with tempfile.TemporaryDirectory() as folder:
        path = write(folder, "a.jsonl", data)
        found, rejects = read_cut(path, cuts, piece_bytes=piece_bytes, batch_bytes=batch_bytes)
    assert (found, [position for position, _ in rejects]) == by_hand(data)


@pytest.mark.long
@settings(max_examples=250, deadline=None)
@given(
    st.lists(files, min_size=1, max_size=3),
    cut_points,
    st.sampled_from(["gzip", "zstd"]),
    st.sampled_from([1, 16, 50, 1 << 20]),
    st.booleans(),
    st.none() | st.integers(0, 1000),
)
def test_fault_17_each_line_is_in_exactly_one_part_of_a_compressed_file(
    members, cuts, compression, step_bytes, remembers, seed
):
    data = b"".join(members)
    decoders = Decoders() if remembers else None

    def order(n):  # any order, some parts twice
        return range(n) if seed is None else random.Random(seed).sample(list(range(n)) * 2, 2 * n)

    with tempfile.TemporaryDirectory() as folder:
        path = write(
            folder, "a.jsonl" + ENDINGS[compression], b"".join(map(COMPRESS[compression], members))
        )
        found, rejects = read_cut(path, cuts, order, step_bytes=step_bytes, decoders=decoders)
    assert (found, [position for position, _ in rejects]) == by_hand(data)


def test_parts_of_a_compressed_file_depend_on_the_step_alone(tmp_path):
    rng = random.Random(0)
    data = b"".join(
        b'{"text": "%d"}\n' % rng.getrandbits(rng.randrange(1, 2000)) for _ in range(300)
    )
    for compression in ("gzip", "zstd"):
        path = write(tmp_path, "a.jsonl" + ENDINGS[compression], COMPRESS[compression](data))
        n = -(-path.stat().st_size // 1024)
        steps = [read_all(part_of(path, 0, i, i + 1, n, 1024))[0] for i in range(n)]
        assert [document for step in steps for document in step] == by_hand(data)[0]
        for lo, hi in [(0, n), (1, n), (n // 3, n // 2), (n - 1, n)]:
            assert read_all(part_of(path, 0, lo, hi, n, 1024))[0] == sum(steps[lo:hi], [])


def test_neighbouring_parts_of_a_compressed_file_cost_one_pass(tmp_path, monkeypatch):
    from packprep.sources.formats import compressed

    data = b"".join(b'{"text": "%d"}\n' % random.Random(i).getrandbits(600) for i in range(5000))
    path = write(tmp_path, "a.jsonl.gz", COMPRESS["gzip"](data))
    fed = []
    feed = compressed.Gzip.feed
    monkeypatch.setattr(
        compressed.Gzip, "feed", lambda self, data: fed.append(len(data)) or feed(self, data)
    )
    decoders = Decoders()
    for i in range(10):
        read_all(part_of(path, 0, i, i + 1, 10, 4096), decoders=decoders)
    assert sum(fed) == path.stat().st_size
    read_all(part_of(path, 0, 0, 1, 10, 4096))
    # a part's end is not passed further than its last line needs
    assert sum(fed) < 1.2 * path.stat().st_size


def test_a_compressed_file_that_was_replaced_is_begun_anew(tmp_path):
    decoders = Decoders()
    old, new = (
        b"".join(b'{"text": "%s%d"}\n' % (name, i) for i in range(1000, 4000))
        for name in (b"a", b"b")
    )
    path = write(tmp_path, "a.jsonl.gz", COMPRESS["gzip"](old))
    read_all(part_of(path, 0, 0, 1, 2, 1024), decoders=decoders)
    padded = COMPRESS["gzip"](new)
    write(tmp_path, "b", padded + b"\0" * (path.stat().st_size - len(padded))).replace(path)
    found = read_all(part_of(path, 0, 1, 2, 2, 1024), decoders=decoders)[0]
    assert len(found) > 1000 and found == by_hand(new)[0][-len(found) :]


def test_decoders_hold_few_files_open(tmp_path):
    decoders = Decoders(capacity=2)
    data = COMPRESS["gzip"](b'{"text": "a"}\n' * 5000)
    paths = [write(tmp_path, f"{i}.jsonl.gz", data) for i in range(5)]
    whole = [read_cut(path, [0, 1, 2], step_bytes=64) for path in paths]
    halves = [
        [read_all(part_of(path, 0, i, i + 1, 2, 64), decoders=decoders)[0] for path in paths]
        for i in range(2)
    ]
    assert [(first + second, []) for first, second in zip(*halves, strict=True)] == whole
    assert len(decoders._cursors) <= 2


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([b"\n", b"a", b"aaaa", b"aaaaa", b"a\nb", b"", b"\n\n"]), max_size=20),
    st.lists(st.integers(0, 2), max_size=20),
    cut_points,
)
def test_lines_of_any_blocks_are_taken_once_and_long_ones_are_not_held(datas, advances, cuts):
    """Against a line-by-line twin: blocks of any size and label, lines of more than 4 bytes too
    large."""
    blocks, label, at = [], 0, 0
    for i, data in enumerate(datas):
        label += advances[i] if i < len(advances) else 1
        blocks.append(Block(label, at, data))
        at += len(data)
    stream = b"".join(datas)
    expected, at = [], 0
    for line in stream.split(b"\n"):
        if line:
            owner = next(
                block.label
                for block in blocks
                if block.position <= at < block.position + len(block.data)
            )
            expected.append((owner, at, line if len(line) <= 4 else None))
        at += len(line) + 1
    kept = Cursor(iter(blocks))
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        wanted = [(at, line) for owner, at, line in expected if begin <= owner < end]
        for cursor in (kept, Cursor(iter(blocks))):
            found = take_lines(cursor, begin, end, 4)
            assert [
                (at, some.line(i)) for some in found for i, at in enumerate(some.positions.tolist())
            ] == wanted


@pytest.mark.parametrize("compression", ENDINGS)
def test_a_line_of_33_mib_is_rejected_in_bounded_memory(tmp_path, compression):
    data = b'{"text": "' + b"a" * (33 << 20) + b'"}\n{"text": "b"}\n'
    path = write(tmp_path, "a.jsonl" + ENDINGS[compression], COMPRESS[compression](data))
    tracemalloc.start()
    results = [read_all(part_of(path, piece)) for piece in range(pieces_of(path))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = [document for documents, _ in results for document in documents]
    assert found == [(len(data) - 14, "b")]
    assert [reject for _, rejects in results for reject in rejects] == [(0, "too_large")]
    assert peak < (94 if compression == "zstd" else 62) << 20  # one call of zstd can give 16 MiB


def test_a_line_of_exactly_the_limit_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_LINE_BYTES", 40)
    lines = [b'{"text": "%s"}' % (b"a" * n) for n in (28, 29)]
    path = write(tmp_path, "a.jsonl", b"\n".join(lines))
    assert read_all(part_of(path)) == ([(0, "a" * 28)], [(41, "too_large")])


@pytest.mark.parametrize("fields", [None, Fields()])
def test_the_limit_of_a_document_counts_its_text_and_not_the_line(tmp_path, monkeypatch, fields):
    monkeypatch.setattr(limits, "MAX_DOCUMENT_BYTES", 12)
    texts = ["数" * 4, "数" * 4 + "!", "a" * 12, "a" * 13]
    lines = [json.dumps({"text": text, "url": "x" * 50}).encode() for text in texts]
    path = write(tmp_path, "a.jsonl", b"\n".join(lines))
    starts = [sum(len(line) + 1 for line in lines[:i]) for i in range(4)]
    found = read_all(part_of(path), fields=fields)
    assert found == (
        [(starts[0], texts[0]), (starts[2], texts[2])],
        [(starts[1], "too_large"), (starts[3], "too_large")],
    )


def test_a_fraction_chooses_lines_longer_than_a_text_as_those_just_above_the_limit(monkeypatch):
    monkeypatch.setattr(limits, "MAX_DOCUMENT_BYTES", 12)
    four = np.arange(4)
    assert Lines(b"", four, four, np.array([3, 12, 40, -1])).stored_sizes().tolist() == [
        3,
        12,
        13,
        13,
    ]


def test_documents_that_are_not_kept_leave_no_trace(tmp_path):
    data = b'{"text": "a"}\nbad\n{"text": "b"}\nbad\n'
    asked = []

    def keep(file, positions):
        assert positions.dtype == np.int64
        asked.extend((file, position) for position in positions.tolist())
        return positions >= 18

    for compression, ending in ENDINGS.items():
        path = write(tmp_path, "a.jsonl" + ending, COMPRESS[compression](data))
        asked.clear()
        assert read_all(part_of(path), keep=keep) == ([(18, "b")], [(32, "malformed_json")])
        assert asked == [(7, 0), (7, 14), (7, 18), (7, 32)]


def test_batches_are_bounded(tmp_path):
    from packprep.sources.formats import read

    path = write(tmp_path, "a.jsonl", b'{"text": "%s"}\n' % (b"a" * 100) * 1000)
    sizes = [len(batch.texts) for batch in read(part_of(path), "text", batch_bytes=1120)]
    assert sizes == [10] * 100


@pytest.mark.parametrize("line", [b'{"text": ""}\n', b"[]\n"])
def test_a_batch_of_empty_texts_or_rejects_is_bounded_too(tmp_path, line):
    """Each is some objects in memory, however few its bytes are."""
    from packprep.sources.formats import read

    path = write(tmp_path, "a.jsonl", line * 1000)
    sizes = [
        len(batch.texts) + len(batch.rejects)
        for batch in read(part_of(path), "text", batch_bytes=6400)
    ]
    assert sum(sizes) == 1000 and max(sizes) <= 100


def test_a_part_reads_only_what_it_needs(tmp_path):
    """A line file is entered directly: what lies elsewhere does not matter."""
    path = write(tmp_path, "a.jsonl", b"x" * 5000 + b"\n" + b'{"text": "a"}\n' * 10 + b"x" * 5000)
    assert len(read_all(part_of(path, 0, 5001, 5001 + 140, 10_141))[0]) == 10


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_an_empty_file_has_no_pieces_and_no_documents(tmp_path, ending):
    path = write(tmp_path, "a.jsonl" + ending, b"")
    assert pieces_of(path) == 0
    assert read_all(part_of(path)) == ([], [])


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_file_that_changed_its_size_stops_the_build(tmp_path, ending):
    path = write(
        tmp_path,
        "a.jsonl" + ending,
        COMPRESS[{"": "", ".gz": "gzip", ".zst": "zstd"}[ending]](b"{}\n"),
    )
    part = part_of(path)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(SourceError, match=r"a\.jsonl.*bytes, but had"):
        read_all(part)


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl"])
def test_the_bytes_of_the_lines_of_adjacent_parts_are_those_of_the_file(
    tmp_path, ending, monkeypatch
):
    lines = [b'{"text": "%s"}\n' % (b"ab" * n) for n in (3, 40, 500, 7, 0, 90, 2000, 1)]
    data = b"".join(lines)
    is_compressed = ending.endswith("gz")
    path = write(tmp_path, f"a.{ending}", COMPRESS["gzip"](data) if is_compressed else data)
    for weight in range(1, 12):
        parts = [part_of(path, 0, i, i + 1, weight, 16) for i in range(weight)]
        found = list(map(line_bytes, parts))
        assert sum(found) == path.stat().st_size and min(found) >= 0
    monkeypatch.setattr(limits, "MAX_LINE_BYTES", 1500)
    if not is_compressed:
        expected = sum(min(len(line), 1500) for line in lines)
        assert line_bytes(part_of(path, 0, 0, 1, 1, 16)) == expected
