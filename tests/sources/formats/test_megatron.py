"""packprep.sources.formats.megatron: pairs of .bin and .idx files."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.errors import SourceError
from packprep.sources.formats import Decoders, Slice, count_pieces, read
from packprep.sources.formats import batch as limits
from packprep.sources.formats.megatron import bytes_per_token, pieces_at
from tests.tokens_made import write_index, write_megatron

DTYPES = {"u1": 2**8, "i1": 2**7, "<i2": 2**15, "<i4": 2**31, "<i8": 2**63, "<u2": 2**16}


def size_of(path):
    return path.stat().st_size + path.with_suffix(".idx").stat().st_size


def part_of(path, piece=0, lo=0, hi=1, weight=1, piece_bytes=limits.PIECE_BYTES):
    return Slice(str(path), 7, size_of(path), "megatron", "", piece, lo, hi, weight, 1, piece_bytes)


def read_all(part, **options):
    """([(position, ids)], [(position, reason, detail)]) of a part."""
    found, rejects = [], []
    for batch in read(part, "text", **options):
        assert (
            batch.texts == []
            and batch.supervision == {}
            and batch.files.tolist() == [7] * len(batch.positions)
        )
        ids, offsets = batch.tokens
        assert len(offsets) == len(batch.positions) + 1 and offsets[-1] == len(ids)
        found += [
            (int(p), ids[a:b].tolist())
            for p, a, b in zip(batch.positions, offsets[:-1], offsets[1:], strict=True)
        ]
        rejects += [(r.position, r.reason, r.detail) for r in batch.rejects]
    return found, rejects


@st.composite
def pairs(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    lists = draw(st.lists(st.lists(st.integers(0, DTYPES[dtype] - 1), max_size=9), max_size=30))
    sequences = [draw(st.integers(0 if not ids else 1, 3)) for ids in lists]
    return dtype, lists, sequences, draw(st.booleans())


cut_points = st.lists(st.integers(0, 40), max_size=6).map(lambda cuts: [0, *sorted(cuts), 40])


@settings(max_examples=150, deadline=None)
@given(pairs(), cut_points, st.integers(30, 500), st.integers(1, 200), st.booleans())
def test_fault_17_each_document_is_in_exactly_one_part(
    pair, cuts, piece_bytes, batch_bytes, remembers
):
    dtype, lists, sequences, with_modes = pair
    with tempfile.TemporaryDirectory() as folder:
        modes = [0] * sum(sequences) if with_modes else None
        path = write_megatron(Path(folder) / "a.bin", lists, dtype, sequences, modes)
        found = []
        pieces = count_pieces(str(path), "megatron", "", size_of(path), piece_bytes)
        assert pieces == min(len(lists), -(-size_of(path) // piece_bytes))
        decoders = Decoders() if remembers else None
        for piece in range(pieces):
            for lo, hi in zip(cuts[:-1], cuts[1:], strict=True):
                part = part_of(path, piece, lo, hi, cuts[-1], piece_bytes)
                some, rejects = read_all(part, batch_bytes=batch_bytes, decoders=decoders)
                found += some
                assert rejects == []
    assert found == list(enumerate(lists))


def test_a_middle_is_entered_by_the_index_alone(tmp_path, monkeypatch):
    lists = [[i % 7, i % 251] * 500 for i in range(3000)]
    path = write_megatron(tmp_path / "a.bin", lists)
    read_bytes = []
    from packprep.sources.formats import flat_ids

    plain = flat_ids.read_into
    monkeypatch.setattr(
        flat_ids,
        "read_into",
        lambda f, p, at, to: (read_bytes.append(len(to)), plain(f, p, at, to)),
    )
    pieces = count_pieces(str(path), "megatron", "", size_of(path), 1 << 20)
    assert pieces == 6
    found, _ = read_all(part_of(path, 4, 1, 2, 10, 1 << 20))
    assert found == [(i, lists[i]) for i in range(2050, 2100)]
    assert sum(read_bytes) < 50 * 2000 + 50 * 20 + 1000


def test_documents_that_are_not_kept_are_not_read(tmp_path):
    lists = [[i] * 3 for i in range(100)]
    path = write_megatron(tmp_path / "a.bin", lists, sequences=[1 + i % 3 for i in range(100)])
    found, _ = read_all(part_of(path), keep=lambda file, positions: positions % 7 == file - 5)
    assert found == [(i, lists[i]) for i in range(2, 100, 7)]


def test_sequences_may_lie_anywhere_in_the_bin(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    write_index(tmp_path / "a.idx", [2, 3, 2], [0, 2, 3], pointers=[8, 0, 16])
    assert read_all(part_of(tmp_path / "a.bin"))[0] == [(0, [4, 5, 0, 1, 2]), (1, [8, 9])]


def test_a_document_beyond_the_limit_is_a_reject_and_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_DOCUMENT_TOKENS", 10)
    path = write_megatron(tmp_path / "a.bin", [[1] * 10, [2] * 11, [3] * 10])
    found, rejects = read_all(part_of(path))
    assert found == [(0, [1] * 10), (2, [3] * 10)] and rejects == [
        (1, "too_large", "11 tokens; at most 10")
    ]


def test_the_pieces_of_positions_and_the_bytes_of_a_token(tmp_path):
    path = write_megatron(tmp_path / "a.bin", [[1] * (i % 5) for i in range(1000)], "<i4")
    assert pieces_at(str(path), size_of(path), np.array([0, 999])).tolist() == [0]
    assert bytes_per_token(part_of(path), "text") == size_of(path) / 2000


def broken(index=None, data=None, **head):
    def damage(path):
        if head:
            write_index(path.with_suffix(".idx"), [3, 4], [0, 1, 2], **head)
        if index:
            path.with_suffix(".idx").write_bytes(index(path.with_suffix(".idx").read_bytes()))
        if data:
            path.write_bytes(data(path.read_bytes()))

    return damage


HUGE = 2**63 + 5


@pytest.mark.parametrize(
    "damage, said",
    [
        (broken(index=lambda b: b[:20]), "it has 20 bytes, but its header needs 34"),
        (
            broken(index=lambda b: b[:-1]),
            "it lists 2 sequences and 3 document indices, which need 82 bytes",
        ),
        (broken(index=lambda b: b + b"x"), "but has 83"),
        (broken(index=lambda b: b""), "it has 0 bytes"),
        (broken(magic=b"MMIDIDX\0\1"), "not a Megatron index"),
        (broken(version=2), "Megatron index version 2 is unknown; only version 1"),
        (broken(code=6), "ids of float64, which cannot be token ids"),
        (broken(code=7), "ids of float32"),
        (broken(code=9), "an unknown dtype code, 9"),
        (broken(code=0), "an unknown dtype code, 0"),
        (broken(sequences=HUGE), f"it lists {HUGE} sequences"),
        (broken(count=HUGE), f"{HUGE} document indices"),
        (broken(sequences=HUGE, count=2**64 - HUGE), f"it lists {HUGE} sequences"),
        (
            broken(code=4),
            "its last sequence ends at byte 22 of the .bin, which has 14: the files are not a pair",
        ),
        (
            broken(data=lambda b: b[:-1]),
            "its last sequence ends at byte 14 of the .bin, which has 13",
        ),
        (
            broken(data=lambda b: b + b"xx"),
            "its last sequence ends at byte 14 of the .bin, which has 16",
        ),
        (broken(pointers=[0, 2**62]), "the files are not a pair"),
        (
            broken(pointers=[9, 6]),
            "sequence 0 has 3 ids from byte 9 on, but the .bin has only 14 bytes",
        ),
        (broken(pointers=[-2, 6]), "sequence 0 has 3 ids from byte -2 on"),
        (broken(modes=[0, 1]), "sequence 1 has a mode other than 0, so the data are multimodal"),
    ],
)
def test_damaged_pairs_are_errors_that_name_the_file_and_the_place(tmp_path, damage, said):
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5, 6, 7]])
    damage(path)
    with pytest.raises(SourceError) as error:
        count_pieces(str(path), "megatron", "", size_of(path))
        read_all(part_of(path))
    assert said in str(error.value) and str(error.value).startswith(str(tmp_path / "a.idx"))


@pytest.mark.parametrize(
    "lengths, bounds, said",
    [
        ([1, 1, 5], [0, 2, 1, 3], "document 1 has the sequences from 2 to 1"),
        ([1, 1, 5], [0, 9, 3], "document 1 has the sequences from 9 to 3"),
        ([1, 1, 5], [0, -1, 3], "document 0 has the sequences from 0 to -1"),
        ([1, 1, 5], [0, 1, 2], "its documents go from sequence 0 to 2, but there are 3"),
        ([1, 1, 5], [1, 2, 3], "its documents go from sequence 1 to 3, but there are 3"),
        ([1, 1, 5], [], "its documents go from sequence 0 to 0, but there are 3"),
        ([3, -1, 5], [0, 2, 3], "sequence 1 has -1 ids from byte 6 on"),
        ([2**31 - 1, -(2**31 - 1), 7], [0, 2, 3], "sequence 0 has 2147483647 ids"),
    ],
)
def test_indices_that_cannot_be_are_errors(tmp_path, lengths, bounds, said):
    (tmp_path / "a.bin").write_bytes(bytes(14))
    write_index(tmp_path / "a.idx", lengths, bounds)
    with pytest.raises(SourceError) as error:
        read_all(part_of(tmp_path / "a.bin"))
    assert said in str(error.value)


def test_a_file_that_changed_or_went_since_the_plan_is_an_error(tmp_path):
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5, 6, 7]])
    part = part_of(path)
    with pytest.raises(
        SourceError, match="have 96 bytes together, but had 97 when the plan was made"
    ):
        read_all(part._replace(size=part.size + 1))
    with pytest.raises(
        SourceError, match="it lists 2 documents, fewer than when the plan was made"
    ):
        read_all(part._replace(piece=1))
    path.with_suffix(".idx").unlink()
    with pytest.raises(SourceError, match=r"a\.idx: the file is missing"):
        read_all(part)


def test_pairs_without_documents_have_no_pieces(tmp_path):
    for bounds in ([0], []):
        write_index(tmp_path / "a.idx", [], bounds)
        (tmp_path / "a.bin").write_bytes(b"")
        assert (
            count_pieces(str(tmp_path / "a.bin"), "megatron", "", size_of(tmp_path / "a.bin")) == 0
        )


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 255), st.integers(0, 10**9))
def test_any_byte_may_be_any_other(at, value, cut):
    with tempfile.TemporaryDirectory() as folder:
        path = write_megatron(
            Path(folder) / "a.bin",
            [[1, 2, 3], [], [4, 5, 6, 7]],
            sequences=[2, 0, 1],
            modes=[0] * 3,
        )
        index = path.with_suffix(".idx")
        data = bytearray(index.read_bytes())
        data[at % len(data)] = value
        index.write_bytes(data if cut % 3 else data[: cut % len(data)])
        try:
            for piece in range(count_pieces(str(path), "megatron", "", size_of(path))):
                read_all(part_of(path, piece))
        except SourceError:
            pass
