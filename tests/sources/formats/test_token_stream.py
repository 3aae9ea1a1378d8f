"""packprep.sources.formats.token_stream: one array of ids, with eos after each document."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.errors import SourceError
from packprep.sources.formats import Choice, IdStream, Slice, count_pieces, read, token_stream
from packprep.sources.formats import batch as limits
from packprep.sources.formats.token_stream import bytes_per_token
from tests.tokens_made import write_stream

EOS = 3


def part_of(path, piece=0, lo=0, hi=1, weight=1, piece_bytes=limits.PIECE_BYTES, **stream):
    facts = {"dtype": "auto", "vocab_size": 60_000, "eos": EOS} | stream
    size = path.stat().st_size
    place = str(path), 7, size, "token_stream", "", piece, lo, hi, weight, 1, piece_bytes
    return Slice(*place, stream=IdStream(**facts))


def read_all(part, **options):
    """([(position, ids)], [(position, reason, detail)]) of a part."""
    found, rejects = [], []
    for batch in read(part, "text", **options):
        ids, offsets = batch.tokens
        assert len(offsets) == len(batch.positions) + 1 and offsets[-1] == len(ids)
        assert len(batch.positions) or batch.rejects
        found += [
            (int(p), ids[a:b].tolist())
            for p, a, b in zip(batch.positions, offsets[:-1], offsets[1:], strict=True)
        ]
        rejects += [tuple(reject[1:]) for reject in batch.rejects]
    return found, rejects


def divided(ids, header, itemsize, most=None):
    """The same of a whole file, id by id."""
    found, rejects, own = [], [], []
    for i, id in enumerate(ids):
        own.append(id)
        if id == EOS or i == len(ids) - 1:
            position = header + (i + 1 - len(own)) * itemsize
            if most and len(own) > most:
                rejects.append((position, "too_large", f"more than {most} tokens"))
            else:
                found.append((position, own))
            own = []
    return found, rejects


HEADS = {"raw": ("<u2", 0), "gpt-2": ("<u2", 1024), "llama-3": ("<u4", 1024), "numpy": (">i4", 128)}
cut_points = st.lists(st.integers(0, 40), max_size=6).map(lambda cuts: [0, *sorted(cuts), 40])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=80),
    st.sampled_from(sorted(HEADS)),
    cut_points,
    st.integers(30, 1500),
    st.integers(1, 200),
    st.integers(1, 9),
    st.booleans(),
)
def test_fault_17_each_document_is_in_exactly_one_part(
    ids, head, cuts, piece_bytes, batch_bytes, at_once, is_choice
):
    (dtype, header), most = HEADS[head], 7
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits, "MAX_DOCUMENT_TOKENS", most)
        patched.setattr(token_stream, "_IDS_AT_ONCE", at_once)
        patched.setattr(token_stream, "_LEAST_IDS", at_once)
        path = write_stream(Path(folder) / "a.npy", ids, dtype, head)
        found, rejects = [], []
        for piece in range(
            count_pieces(str(path), "token_stream", "", path.stat().st_size, piece_bytes)
        ):
            for lo, hi in zip(cuts[:-1], cuts[1:], strict=True):
                # A Choice that takes everything counts the documents before the part.
                keep = Choice(np.uint64(9), (1 << 32) - 1) if is_choice else None
                part = part_of(path, piece, lo, hi, cuts[-1], piece_bytes)
                some, refused = read_all(part, keep=keep, batch_bytes=batch_bytes)
                found, rejects = found + some, rejects + refused
    expected = divided(ids, header, np.dtype(dtype).itemsize, most)
    if is_choice:
        assert set(map(repr, found)) <= set(map(repr, expected[0]))
    else:
        assert (found, rejects) == expected


def test_the_dtype_of_a_raw_file_follows_from_the_vocabulary_as_its_writers_choose_it(tmp_path):
    ids = [1, 2, EOS, 5] * 8
    for name, vocab_size, asked, dtype in (
        ("a.npy", 256, "auto", "u1"),
        ("a.npy", 257, "auto", "<u2"),
        ("a.npy", 1 << 16, "auto", "<u2"),
        ("a.npy", (1 << 16) + 1, "auto", "<u4"),
        ("a.bin", 256, "auto", "<u2"),
        ("a.bin", 1 << 18, "uint32", "<u4"),
        ("a.npy", 256, "uint64", "<u8"),
    ):
        part = part_of(
            write_stream(tmp_path / name, ids, dtype), vocab_size=vocab_size, dtype=asked
        )
        assert [own for _, own in read_all(part)[0]] == [[1, 2, EOS], *[[5, 1, 2, EOS]] * 7, [5]]
        assert bytes_per_token(part, "text") == np.dtype(dtype).itemsize
    for count, lower, upper, is_wider in (
        (8, 1, 0, True),
        (7, 1, 0, False),
        (8, 0, 0, False),
        (32, 256, 15, True),
        (31, 256, 15, False),
        (32, 255, 15, False),
        (32, 256, 16, False),
    ):
        begin = np.array([lower, upper] * count, "<u2").tobytes()
        for rest in (b"", b"\xff\xff"):
            assert token_stream._is_wider(begin + rest, np.dtype("<u2")) == is_wider


REFUSED = [
    (
        np.arange(6, dtype="<u4").tobytes()[:-1],
        {},
        "it has 23 bytes, but an id of the dtype uint16",
    ),
    (
        np.arange(40, dtype="<u4").tobytes(),
        {},
        "every second id is less than 16, so the ids are probably wider",
    ),
    (
        np.arange(128_000, 128_064, dtype="<u4").tobytes(),
        {},
        "every second id is less than 16, so the ids are probably wider",
    ),
    (bytes(8), {"vocab_size": 70_000}, "would be read as uint16, but the vocabulary has 70000 ids"),
    (bytes(8), {"eos": None}, "the tokenizer has no known eos"),
    (np.array([20240522, 1, 9, *[0] * 253], "<i4").tobytes(), {}, "llm.c's file of an evaluation"),
    (
        np.array([20240520, 1, 9, *[0] * 253], "<i4").tobytes() + bytes(16),
        {},
        "its header says 9 ids of the dtype uint16, which need 1042 bytes, but it has 1040",
    ),
    (b"MMIDIDX\0\0" + bytes(31), {}, "not an array of token ids, but Megatron's index"),
    (b"\x93NUMPY\1\0\x40\0{'descr'", {}, "its NumPy header is not readable"),
    (b"\x93NUMPY\1\0\x10\0{'descr': \0\0\0\0\0\0\n", {}, "its NumPy header is not readable"),
]


def test_files_that_are_no_array_of_ids_are_refused_by_name(tmp_path):
    path = tmp_path / "a.bin"
    for data, stream, said in REFUSED:
        path.write_bytes(data)
        with pytest.raises(SourceError) as error:
            read_all(part_of(path, **stream))
        assert said in str(error.value) and str(error.value).startswith(str(path))
        assert "\nhint: " in str(error.value)
    for array, said in (
        (np.zeros((2, 3), "<u2"), "a NumPy array of shape (2, 3) and dtype <u2"),
        (np.zeros(3, "<f4"), "dtype <f4, but token ids are a one-dimensional array of integers"),
    ):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(SourceError) as error:
            read_all(part_of(tmp_path / "a.npy"))
        assert said in str(error.value)
