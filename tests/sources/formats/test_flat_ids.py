"""packprep.sources.formats.flat_ids: runs of documents, batches of ids and reads of files."""

import io
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.errors import SourceError
from packprep.sources.formats import batch
from packprep.sources.formats.flat_ids import Runs, id_batches, joined_runs


class SlowFile(io.BytesIO):
    """A file that gives at most three bytes at a time, and remembers its seeks."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self.seeks: list[int] = []

    def seek(self, at: int, *whence: int) -> int:
        self.seeks.append(at)
        return super().seek(at, *whence)

    def readinto(self, target) -> int:
        return super().readinto(target[:3])


@given(st.integers(0, 60), st.integers(1, 500), st.integers(1, 90))
def test_pieces_have_each_document_once_and_a_piece_beyond_them_is_an_error(documents, size, most):
    runs = Runs.of(documents, size, most)
    found = [list(runs.checked(piece, "a.bin")) for piece in range(runs.pieces)]
    assert sum(found, []) == list(range(documents))
    wanted = np.arange(0, documents + 3, 7)
    holding = [piece for piece, own in enumerate(found) if any(i % 7 == 0 for i in own)]
    assert runs.pieces_at(wanted).tolist() == holding
    assert runs.pieces == min(documents, -(-size // most))
    with pytest.raises(SourceError, match=f"a.bin: it lists {documents} documents, fewer than"):
        runs.checked(runs.pieces, "a.bin")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=9))
def test_runs_next_to_each_other_are_read_at_once(steps):
    values, begins, ends, at = np.arange(100, dtype="<u2"), [], [], 4
    for is_apart, count in steps:
        begins.append(at + 2 * is_apart)
        ends.append(begins[-1] + 2 * count)
        at = ends[-1]
    file = SlowFile(values.tobytes())
    bounds = np.array(begins, np.int64), np.array(ends, np.int64)
    found = joined_runs(file, "a.bin", np.dtype("<u2"), *bounds)
    expected = [values[a // 2 : b // 2] for a, b in zip(begins, ends, strict=True)]
    assert found.tolist() == np.concatenate([np.zeros(0, "<u2"), *expected]).tolist()
    apart = [begin for k, begin in enumerate(begins) if not k or begin != ends[k - 1]]
    assert file.seeks == apart
    short = SlowFile(values.tobytes()[: at - 1])
    if begins and ends[-1] > begins[-1]:
        with pytest.raises(SourceError, match="a.bin: damaged: it ends 1 bytes too early"):
            joined_runs(short, "a.bin", np.dtype("<u2"), *bounds)


@given(st.lists(st.integers(0, 12), max_size=20), st.integers(1, 60))
def test_documents_come_in_batches_of_some_bytes_and_long_ones_are_rejected(lengths, batch_bytes):
    sizes, read = np.array(lengths, np.int64), []

    def ids_of(own: np.ndarray) -> tuple[np.ndarray, None]:
        read.extend(own.tolist())
        return np.repeat(own, sizes[own]), None

    with mock.patch.object(batch, "MAX_DOCUMENT_TOKENS", 9):
        found = list(id_batches(7, 100 + np.arange(len(sizes)), sizes, batch_bytes, ids_of))
    long = [i for i, length in enumerate(lengths) if length > 9]
    assert read == [i for i in range(len(lengths)) if i not in long]
    rejects = [reject for each in found for reject in each.rejects]
    assert [(reject.file, reject.position) for reject in rejects] == [(7, 100 + i) for i in long]
    for each in found:
        own = (each.positions - 100).tolist()
        assert each.files.tolist() == [7] * len(own)
        for k, i in enumerate(own):
            begin, end = each.tokens.offsets[k : k + 2]
            assert each.tokens.ids[begin:end].tolist() == [i] * lengths[i]
        counted = [max(4 * lengths[i], 1) for i in own]
        assert len(own) + len(each.rejects) == 1 or sum(counted) <= batch_bytes
