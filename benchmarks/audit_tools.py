"""Audit datasets that other tools' own code packed, sound ones and ones with a planted fault.

    python benchmarks/audit_tools.py FOLDER [TOOL ...]

Each tool packs and writes the same documents, once without a fault and once for each kind of fault
that it can store. Faults of documents are in the documents that the tool packs. Faults of rows are
written into the tool's files afterwards. A sound dataset has to be without findings, and each fault
has to be named. `requirements-audit.txt` has the packages. A tool that is not installed is skipped,
and named.

| tool | its own code |
| --- | --- |
| trl, trl_wrapped | `trl.data_utils.pack_dataset`, `datasets.save_to_disk` |
| axolotl | `process_datasets_for_packing`, `save_to_disk`: one document per row |
| axolotl_packed | `encode_packed_streaming`, `to_parquet` |
| llamafactory, llamafactory_plain | `PackedSupervisedDatasetProcessor`, `save_to_disk` |
| bridge | `megatron.bridge.data.datasets.packing_utils`, `numpy.save` |
| mds, mds_zstd | `streaming.MDSWriter` |
| megatron | `megatron.core.datasets.indexed_dataset` |

ms-swift 4.6 stores conversations and their lengths, but no token ids, so it is not in this list.
"""

import copy
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1"}
os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}

from tests.audit import faults_made as made
from tests.audit.readers.layouts_made import found

ROW_LENGTH = 512
Documents = list[tuple[list[int], list[int]]]
"""The ids and the labels of each document. A label is the token itself, or -100."""


class Tool(NamedTuple):
    """A tool, its package, and the faults that its files can contain.

    Attributes:
        package: Name of the package, for its version.
        write: Function of (folder, documents) that packs and writes them, and returns the path.
        of_documents: Kinds of faults in documents.
        of_rows: Kinds of faults that are written into the tool's files.
    """

    package: str
    write: Callable[[Path, Documents], Path]
    of_documents: set[str]
    of_rows: set[str] = set()


def documents_of(packed: made.Packed) -> Documents:
    """Return the documents in rows."""
    return [
        (ids[segments == k].tolist(), labels[segments == k].tolist())
        for ids, labels, segments in zip(packed.ids, packed.labels, packed.segments, strict=True)
        for k in range(1, segments.max() + 1)
    ]


def _table(documents: Documents, **more):
    from datasets import Dataset

    ids, labels = map(list, zip(*documents, strict=True))
    return Dataset.from_dict({"input_ids": ids, "labels": labels, **more})


def _saved(dataset, folder: Path) -> Path:
    dataset.save_to_disk(str(folder))
    return folder


def trl(folder: Path, documents: Documents, strategy: str = "bfd") -> Path:
    """Write TRL's packed dataset."""
    from trl.data_utils import pack_dataset

    return _saved(pack_dataset(_table(documents), ROW_LENGTH, strategy), folder)


def trl_wrapped(folder: Path, documents: Documents) -> Path:
    """Write TRL's dataset of rows that cut documents."""
    return trl(folder, documents, "wrapped")


def axolotl(folder: Path, documents: Documents) -> Path:
    """Write the dataset that Axolotl's sample_packing prepares."""
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.trainer import process_datasets_for_packing

    config = DictDefault(sample_packing=True, dataset_num_proc=None, model_config_type="llama")
    masks = [[1] * len(ids) for ids, _ in documents]
    prepared, _ = process_datasets_for_packing(
        config, _table(documents, attention_mask=masks), None
    )
    return _saved(prepared, folder)


def axolotl_packed(folder: Path, documents: Documents) -> Path:
    """Write the rows that Axolotl packs from a stream."""
    from axolotl.utils.collators import PretrainingBatchSamplerDataCollatorForSeq2Seq
    from axolotl.utils.data.streaming import encode_packed_streaming
    from datasets import Dataset

    collate = PretrainingBatchSamplerDataCollatorForSeq2Seq(
        _tokenizer(), return_tensors="pt", padding=True, multipack_attn=True
    )
    rows = encode_packed_streaming(
        collate,
        lambda dataset: (dataset, None),
        _table(documents, attention_mask=[[1] * len(ids) for ids, _ in documents]).to_dict(),
        bin_size=200,
        max_seq_length=ROW_LENGTH,
        batch_size=1,
    )
    path = folder.with_suffix(".parquet")
    Dataset.from_dict({key: [row.tolist() for row in of] for key, of in rows.items()}).to_parquet(
        str(path)
    )
    return path


def llamafactory(folder: Path, documents: Documents, neat: bool = True) -> Path:
    """Write the dataset that LLaMA-Factory's packing saves to tokenized_path."""
    if importlib.util.find_spec("torchaudio") is None:  # It is imported and not used.
        spec = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = types.ModuleType("torchaudio")
        sys.modules["torchaudio"].__spec__ = spec
    from datasets import Dataset, DatasetDict
    from llamafactory.data.processor.supervised import PackedSupervisedDatasetProcessor

    class Given(PackedSupervisedDatasetProcessor):
        def _encode_data_example(self, prompt, **_):
            return documents[int(prompt[0])]

    arguments = types.SimpleNamespace(neat_packing=neat, cutoff_len=ROW_LENGTH)
    packer = Given(None, _tokenizer(), None, arguments)
    count = len(documents)
    nothing = dict.fromkeys(("_system", "_tools", "_images", "_videos", "_audios"), [None] * count)
    columns = packer.preprocess_dataset(
        {"_prompt": [[i] for i in range(count)], "_response": [[""]] * count, **nothing}
    )
    return _saved(DatasetDict({"train": Dataset.from_dict(columns)}), folder)


def llamafactory_plain(folder: Path, documents: Documents) -> Path:
    """Write LLaMA-Factory's packing without neat_packing."""
    return llamafactory(folder, documents, False)


def bridge(folder: Path, documents: Documents) -> Path:
    """Write the packed .npy of Megatron-Bridge.

    Its package imports all of its models, so only the file of the packing is loaded.
    """
    name = "megatron/bridge/data/datasets/packing_utils.py"
    path = next(
        file.locate() for file in importlib.metadata.files("megatron-bridge") if str(file) == name
    )
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    data = [
        {"input_ids": ids, "loss_mask": [label != made.IGNORED for label in labels]}
        for ids, labels in documents
    ]
    sequences, histogram = packing.create_hist(data, ROW_LENGTH)
    assigned, _ = packing.create_packing_strategy(histogram, ROW_LENGTH, "first_fit_decreasing")
    rows = packing.fill_packing_strategy(assigned, sequences, ROW_LENGTH, made.EOS)
    np.save(folder.with_suffix(".npy"), rows)
    return folder.with_suffix(".npy")


def mds(folder: Path, documents: Documents, compression: str | None = None) -> Path:
    """Write rows of concatenated documents with MosaicML's writer."""
    if importlib.util.find_spec("torchvision") is None:  # It is imported and not used.
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            module = sys.modules[f"torchvision{name}"] = types.ModuleType(f"torchvision{name}")
            module.__spec__ = importlib.machinery.ModuleSpec(f"torchvision{name}", None)
            module.VisionDataset, module.to_tensor = object, None
    from streaming import MDSWriter

    ids = np.array(sum((ids for ids, _ in documents), []), np.int32)
    with MDSWriter(
        columns={"tokens": "ndarray:int32"}, out=str(folder), compression=compression
    ) as out:
        for row in ids[: len(ids) // ROW_LENGTH * ROW_LENGTH].reshape(-1, ROW_LENGTH):
            out.write({"tokens": row})
    return folder


def mds_zstd(folder: Path, documents: Documents) -> Path:
    """Write compressed shards."""
    return mds(folder, documents, "zstd")


def megatron(folder: Path, documents: Documents) -> Path:
    """Write Megatron's .bin and .idx."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{folder}.bin", dtype=np.int32)
    for ids, _ in documents:
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{folder}.idx")
    return folder


def _tokenizer():
    """A tokenizer of which the tools use only the padding."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {f"t{i}": i for i in range(made.VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t3"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1")


def _rows_changed(path: Path, kind: str) -> Path:
    """Write a fault of rows into a copy of a tool's files, and return the copy."""
    changed_path = path.with_name(f"{kind}_of_{path.name}")
    if path.suffix == ".npy":
        rows = np.load(path, allow_pickle=True).tolist()
        np.save(changed_path, _changed(rows, kind))
        return changed_path
    from datasets import Dataset, DatasetDict, load_from_disk

    if path.suffix == ".parquet":
        changed = _changed(Dataset.from_parquet(str(path)).to_list(), kind)
        Dataset.from_list(changed).to_parquet(str(changed_path))
        return changed_path
    dataset = load_from_disk(str(path))
    if isinstance(dataset, DatasetDict):
        changed = Dataset.from_list(_changed(dataset["train"].to_list(), kind))
        return _saved(DatasetDict({"train": changed}), changed_path)
    return _saved(Dataset.from_list(_changed(dataset.to_list(), kind)), changed_path)


def _changed(rows: list[dict], kind: str) -> list[dict]:
    row = rows[1]
    count = len(row["input_ids"])
    if kind == "duplicate_rows":
        return [*rows, *copy.deepcopy(rows[:3])]
    if kind == "untrained_rows":
        if "labels" in row:
            row["labels"] = [made.IGNORED] * count
        else:
            row["loss_mask"] = [False] * count
    elif kind == "trained_padding":
        row["labels"][-1] = made.PAD
    elif kind == "padding":
        for some in rows[::2]:
            half = max(i for i in range(count // 2) if some["position_ids"][i] == 0)
            some["input_ids"][half:] = [made.PAD] * (count - half)
            some["labels"][half:] = [made.IGNORED] * (count - half)
            some["attention_mask"][half:] = [0] * (count - half)
            some["position_ids"][half:] = [0] * (count - half)
    elif kind == "unreset_positions":
        row["position_ids"] = list(range(1, count + 1))
    elif kind == "broken_positions":
        at = next(i for i in range(9, count) if row["position_ids"][i - 4] < row["position_ids"][i])
        row["position_ids"][at] += 5
    return rows


STREAM = {"duplicate_documents", "empty_documents", "two_bos", "beyond_vocabulary"} | {
    "unknown_tokens"
}
WHOLE = STREAM | {"no_eos", "inner_eos"}
LOSS = {"wrong_labels", "untrained_documents"}
ROWS = {"duplicate_rows", "untrained_rows"}
POSITIONS = {"unreset_positions", "broken_positions"}
TOOLS = {
    "trl": Tool("trl", trl, WHOLE | LOSS, ROWS),
    "trl_wrapped": Tool("trl", trl_wrapped, STREAM | {"wrong_labels"}, ROWS),
    "axolotl": Tool("axolotl", axolotl, WHOLE | {"wrong_labels"}, POSITIONS),
    "axolotl_packed": Tool(
        "axolotl",
        axolotl_packed,
        WHOLE | LOSS | {"crossing_labels"},
        ROWS | {"broken_positions"},
    ),
    "llamafactory": Tool(
        "llamafactory",
        llamafactory,
        WHOLE | LOSS | {"crossing_labels"},
        ROWS | POSITIONS | {"padding", "trained_padding"},
    ),
    "llamafactory_plain": Tool(
        "llamafactory",
        llamafactory_plain,
        WHOLE | LOSS | {"crossing_labels"},
        ROWS | {"broken_positions", "trained_padding"},
    ),
    "bridge": Tool("megatron-bridge", bridge, WHOLE | {"untrained_documents"}, ROWS),
    "mds": Tool("mosaicml-streaming", mds, STREAM),
    "mds_zstd": Tool("mosaicml-streaming", mds_zstd, STREAM),
    "megatron": Tool("megatron-core", megatron, WHOLE),
}


def outcomes(folder: Path, name: str) -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield (kind, kinds that are expected, kinds that were found), the sound dataset first."""
    tool = TOOLS[name]
    sound = tool.write(folder / name, documents_of(made.clean()))
    yield "no fault", set(), found(sound)
    for kind in sorted(tool.of_documents):
        path = tool.write(folder / f"{name}_{kind}", documents_of(made.FAULTS[kind]()))
        yield kind, {kind}, found(path)
    for kind in sorted(tool.of_rows):
        path = _rows_changed(sound, kind)
        yield kind, {kind} | made.IMPLIED.get(kind, set()), found(path)


def main(folder: Path, names: list[str]) -> int:
    """Audit the datasets of some tools, and return the number of wrong outcomes."""
    wrong = 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or TOOLS:
        try:
            version = importlib.metadata.version(TOOLS[name].package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: {TOOLS[name].package} is not installed")
            continue
        named = 0
        for kind, expected, seen in outcomes(folder, name):
            if seen == expected:
                named += 1
            else:
                wrong += 1
                print(f"{name}: {kind}: found {sorted(seen)}, expected {sorted(expected)}")
        print(f"{name} ({TOOLS[name].package} {version}): {named} datasets as expected")
    return wrong


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]) > 0)
