"""packprep.sources.formats.datatrove: a .ds file with ids and the files next to it."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.sources.files import find_files
from packprep.sources.formats import Decoders, Fields, Slice, count_pieces, read
from packprep.sources.formats import batch as limits
from packprep.sources.formats.datatrove import (
    bytes_per_token,
    mistake_of_notes,
    numbers,
    pieces_at,
    tokenizer_in_notes,
)
from tests.tokens_made import write_datatrove


def size_of(path):
    names = [path, *(path.with_name(f"{path.name}{more}") for more in (".index", ".loss"))]
    return sum(name.stat().st_size for name in names if name.exists())


def part_of(path, piece=0, lo=0, hi=1, weight=1, piece_bytes=limits.PIECE_BYTES):
    place = str(path), 7, size_of(path), "datatrove", "", piece, lo, hi, weight, 1, piece_bytes
    return Slice(*place)


def read_all(part, fields=None, **options):
    """([(position, ids, weights)], [(position, reason, detail)]) of a part."""
    found, rejects = [], []
    for batch in read(part, "text", fields=fields, **options):
        ids, offsets = batch.tokens
        weights = np.ones(len(ids)) if batch.token_weights is None else batch.token_weights
        for p, a, b in zip(batch.positions, offsets[:-1], offsets[1:], strict=True):
            found.append((int(p), ids[a:b].tolist(), weights[a:b].tolist()))
        rejects += [tuple(reject[1:]) for reject in batch.rejects]
    return found, rejects


cut_points = st.lists(st.integers(0, 40), max_size=6).map(lambda cuts: [0, *sorted(cuts), 40])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60_000), max_size=9), max_size=30),
    st.sampled_from(["<u2", "<u4"]),
    cut_points,
    st.integers(30, 500),
    st.integers(1, 200),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_fault_17_each_document_is_in_exactly_one_part(
    lists, dtype, cuts, piece_bytes, batch_bytes, has_loss, chance
):
    flags = [[chance.randrange(2) for _ in ids] for ids in lists]
    with tempfile.TemporaryDirectory() as folder:
        loss = sum(flags, []) if has_loss else None
        path = write_datatrove(Path(folder) / "a.ds", lists, dtype, loss)
        found, decoders = [], Decoders()
        for piece in range(count_pieces(str(path), "datatrove", "", size_of(path), piece_bytes)):
            for lo, hi in zip(cuts[:-1], cuts[1:], strict=True):
                part = part_of(path, piece, lo, hi, cuts[-1], piece_bytes)
                options = {"batch_bytes": batch_bytes, "decoders": decoders}
                some, rejects = read_all(part, Fields(), **options)
                found += some
                assert rejects == []
    expected = flags if has_loss and sum(map(len, lists)) else [[1] * len(ids) for ids in lists]
    assert found == [
        (i, ids, weights) for i, (ids, weights) in enumerate(zip(lists, expected, strict=True))
    ]


def test_masks_are_ignored_where_nothing_says_to_read_them_and_long_documents_are_rejects(
    tmp_path, monkeypatch
):
    path = write_datatrove(tmp_path / "a.ds", [[1, 2], [3, 4, 5]], loss=[1, 0, 0, 1, 1])
    assert read_all(part_of(path))[0] == [(0, [1, 2], [1, 1]), (1, [3, 4, 5], [1, 1, 1])]
    keep = {"keep": lambda file, positions: positions == 1}
    assert read_all(part_of(path), Fields(), **keep)[0] == [(1, [3, 4, 5], [0, 1, 1])]
    assert pieces_at(str(path), size_of(path), np.array([0, 1])).tolist() == [0]
    pieces = [part_of(path, piece, piece_bytes=20) for piece in range(2)]
    assert [numbers(part, Decoders()) for part in pieces] == [range(1), range(1, 2)]
    assert bytes_per_token(part_of(path), "text") == size_of(path) / 5
    for ids in ([7], []):
        other = write_datatrove(tmp_path / f"{len(ids)}.ds", [ids])
        assert bytes_per_token(part_of(other), "text") == size_of(other)
    monkeypatch.setattr(limits, "MAX_DOCUMENT_TOKENS", 2)
    assert read_all(part_of(path))[1] == [(1, "too_large", "3 tokens; at most 2")]


@pytest.mark.parametrize("remote", [False, True])
def test_the_files_of_one_ds_are_one_file_and_a_missing_index_is_an_error(tmp_path, remote):
    path = write_datatrove(tmp_path / "a.ds", [[1, 2], [3]], loss=[1, 1, 1])
    root = f"file://{tmp_path}/" if remote else ""
    for pattern in ("*", "*.ds", "a.ds.*"):
        source = Source(paths=(f"{root}{pattern}",), name="web")
        _, files = find_files(source, 0, tmp_path, None)
        assert (list(files.names), files.sizes.tolist()) == (["a.ds"], [6 + 16 + 3])
        assert files.kinds == [("datatrove", "")]
    (tmp_path / "a.ds.index").unlink()
    with pytest.raises(SourceError, match=r"a\.ds\.index is missing, and datatrove files are"):
        find_files(Source(paths=(f"{root}{path.name}",), name="web"), 0, tmp_path, None)


def test_damaged_files_are_errors_that_name_the_file_and_the_place(tmp_path):
    path = tmp_path / "a.ds"
    for change, said in (
        ({".index": b"1234567"}, "it has 7 bytes, but each document end takes 8"),
        ({".index": b""}, "its last document ends at id 0, but the .ds has 10 bytes"),
        ({"": bytes(9)}, "its last document ends at id 5, but the .ds has 9 bytes"),
        ({".loss": bytes(4)}, "it has 4 bytes, but the .ds has 5 ids"),
        ({".loss": bytes([2] * 5)}, "it has the value 2, which is neither 0 nor 1"),
        (
            {".index": np.array([9, 5], "<u8").tobytes()},
            "document 0 has the ids from 0 to 9, and there are 5",
        ),
        (
            {".index": np.array([4, 3, 5], "<u8").tobytes()},
            "document 1 has the ids from 4 to 3, and there are 5",
        ),
    ):
        write_datatrove(path, [[1, 2], [3, 4, 5]], loss=[1, 0, 0, 1, 1])
        for ending, data in change.items():
            path.with_name(f"a.ds{ending}").write_bytes(data)
        with pytest.raises(SourceError) as error:
            read_all(part_of(path), Fields())
        assert said in str(error.value) and str(error.value).startswith(str(path))
    (tmp_path / "a.ds.loss").unlink()
    write_datatrove(path, [[1, 2]])
    assert tokenizer_in_notes(str(path)) == "bytes" and mistake_of_notes(str(path)) == ""
    (tmp_path / "a.ds.metadata").write_text("bytes|4\n2\n2T")
    assert "its .metadata says 2 ids of 4 bytes, but it has 4" in mistake_of_notes(str(path))
    (tmp_path / "a.ds.metadata").write_text("?")
    assert tokenizer_in_notes(str(path)) == mistake_of_notes(str(path)) == ""
    part = part_of(path)
    with pytest.raises(SourceError, match="fewer than when the plan was made"):
        read_all(part._replace(piece=1))
    with pytest.raises(SourceError, match="12 bytes together, but had 13"):
        read_all(part._replace(size=part.size + 1))
