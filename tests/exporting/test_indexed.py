"""The .bin and .idx that are written are, byte by byte, those that Megatron-core itself writes, and it reads them."""

import numpy as np
import pytest

from packprep.errors import DatasetError
from packprep.exporting import indexed
from packprep.exporting.indexed import Pair, dtype_for
from tests import made
from tests.exporting.plain import documents_of

DOCUMENTS = [np.arange(1, n + 1) for n in (3, 1, 700, 2, 40)]


def write(prefix, dtype):
    pair = Pair(prefix, np.dtype(dtype))
    for some in (DOCUMENTS[:2], [], DOCUMENTS[2:]):
        pair.add(np.concatenate([np.zeros(0, np.int64), *some]), np.array([len(d) for d in some], np.int64))
    return pair, pair.commit()


@pytest.fixture(scope="module")
def megatron():
    reason = "megatron-core is not installed (extra: trainers)"
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason)


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
@pytest.mark.parametrize("at_once", [1, 2, 1 << 20])
def test_what_is_written_is_read_again(tmp_path, dtype, at_once, monkeypatch):
    monkeypatch.setattr(indexed, "_AT_ONCE", at_once)
    pair, files = write(tmp_path / "p", dtype)
    assert documents_of(tmp_path / "p") == [document.tolist() for document in DOCUMENTS]
    assert (pair.documents, pair.tokens) == (5, 746)
    assert [(file["file"], file["bytes"]) for file in files] == [
        (name, len(data)) for name, data in made.contents(tmp_path).items()
    ]


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_megatron_writes_the_same_bytes(megatron, tmp_path, dtype):
    import torch

    write(tmp_path / "ours", dtype)
    kind = np.dtype(dtype).type
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=kind)
    for document in DOCUMENTS:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()


@pytest.mark.parametrize("kind", ["repeated", "large_vocabulary", "mixed"])
def test_megatron_reads_an_exported_dataset(megatron, known, tmp_path, kind):
    receipt = known(kind).export(tmp_path, "megatron")
    for prefix in receipt["data_path"][1::2]:
        dataset = megatron.IndexedDataset(prefix)
        assert dataset.index.dtype is np.dtype(receipt["dtype"]).type
        assert [dataset[i].tolist() for i in range(len(dataset))] == documents_of(prefix)
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))


@pytest.mark.parametrize("vocab_size", [528, 65499, 65500, 65536, 200_000])
def test_the_dtype_is_megatrons(megatron, vocab_size):
    assert dtype_for(vocab_size) == megatron.DType.optimal_dtype(vocab_size)


def test_a_document_longer_than_the_format_can_say_is_refused(tmp_path):
    pair = Pair(tmp_path / "p", np.dtype("<u2"))
    with pytest.raises(DatasetError, match="a document of 2147483648 tokens"):
        pair.add(np.zeros(0, np.uint16), np.array([1 << 31]))
    pair.discard()
    assert made.contents(tmp_path) == {}
