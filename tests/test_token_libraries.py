"""What Megatron's own builder and Hugging Face `datasets` write is read token by token."""

import numpy as np
import pytest

from packprep.errors import SourceError
from tests import made
from tests.test_token_sources import CAUSAL, EOS, contents, holds, in_order
from tests.tokens_made import ids_of, save_dataset, write_megatron

pytestmark = pytest.mark.long

TEXTS = made.texts(120, 21)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("append_eod", [True, False])
def test_megatron_s_own_files(tmp_path, dtype, append_eod):
    """As tools/preprocess_data.py makes them: sequences are sentences, documents have one or
    several."""
    torch = pytest.importorskip("torch")
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=dtype)
    lists = ids_of(TEXTS, append_eod)
    for i, ids in enumerate(lists):
        cut = len(ids) // 3 if i % 2 else 0
        for sequence in filter(None, (ids[:cut], ids[cut:])):
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    made.build(made.table("*.idx", **CAUSAL), tmp_path, tmp_path / "out")
    found = contents(tmp_path / "out")
    assert found == {("a.bin", i): list(text.encode()) for i, text in enumerate(TEXTS)}
    holds(tmp_path / "out")
    both = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=dtype)
    both.add_index(str(tmp_path / "a"))
    both.add_index(str(tmp_path / "a"))
    both.finalize(str(tmp_path / "b.idx"))
    made.build(made.table("b.bin", **CAUSAL), tmp_path, tmp_path / "merged")
    assert in_order(contents(tmp_path / "merged")) == in_order(found) * 2


def test_the_tests_files_are_megatron_s(tmp_path):
    """What tests/tokens_made.py writes, Megatron reads."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    lists = ids_of(TEXTS)
    write_megatron(tmp_path / "a.bin", lists, "<i4", [1 + i % 3 for i in range(len(lists))])
    dataset = indexed_dataset.IndexedDataset(str(tmp_path / "a"))
    bounds = dataset.document_indices
    assert [
        [int(id) for s in range(bounds[i], bounds[i + 1]) for id in dataset[s]]
        for i in range(len(bounds) - 1)
    ] == lists


def test_folders_of_hugging_face_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    lists = ids_of(TEXTS)
    whole = datasets.Dataset.from_dict(
        {"input_ids": lists, "attention_mask": [[1] * len(ids) for ids in lists]}
    )
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    made.build(
        made.table([{"paths": ["one"], "format": "tokens"}], **CAUSAL), tmp_path, tmp_path / "out"
    )
    expected = [list(text.encode()) for text in TEXTS]
    assert in_order(contents(tmp_path / "out")) == expected
    holds(tmp_path / "out")
    splits = datasets.DatasetDict(
        {"train": whole.select(range(100)), "test": whole.select(range(100, 120))}
    )
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(
        SourceError,
        match="splits is a folder of several splits\nhint: name one split, as in splits/train",
    ):
        made.build(
            made.table([{"paths": ["splits"], "format": "tokens"}]), tmp_path, tmp_path / "none"
        )
    made.build(
        made.table([{"paths": ["splits/train"], "format": "tokens"}], **CAUSAL),
        tmp_path,
        tmp_path / "train",
    )
    assert in_order(contents(tmp_path / "train")) == expected[:100]
    chosen = whole.shuffle(seed=1).filter(lambda row: len(row["input_ids"]) > 50)
    chosen.save_to_disk(tmp_path / "chosen")  # which writes the rows that are left, in their order
    made.build(
        made.table([{"paths": ["chosen"], "format": "tokens"}], **CAUSAL),
        tmp_path,
        tmp_path / "of_chosen",
    )
    assert in_order(contents(tmp_path / "of_chosen")) == [
        ids[:-1] if ids[-1] == EOS else ids for ids in chosen["input_ids"]
    ]


def test_the_tests_folders_are_hugging_face_s(tmp_path):
    """What tests/tokens_made.py writes, `datasets` loads."""
    datasets = pytest.importorskip("datasets")
    lists = ids_of(TEXTS)
    folder = save_dataset(tmp_path / "saved", lists, 3)
    assert datasets.load_from_disk(str(folder))["input_ids"][:] == lists
