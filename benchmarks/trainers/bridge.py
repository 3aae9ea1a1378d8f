"""Megatron-Bridge's reader of packed Parquet on what `export --to parquet --columns nemo` writes.

Run from a checkout, which PACKPREP_BRIDGE names: its package imports all of its models, for which
there is nothing here. So the packages are left empty, and the tokenizer's type stands for itself;
the reader and its collator are as they are.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from trainers import made

COMMIT = made.checkout("PACKPREP_BRIDGE", "src")
STUBS = {
    "megatron.bridge.training.tokenizers.tokenizer": "MegatronTokenizer",
    "megatron.bridge.utils.common_utils": "get_local_rank_preinit",
}


def stub() -> None:
    root = Path(sys.path[0])
    for package in ("", "data", "data.datasets", "utils", "training", "training.tokenizers"):
        name = ".".join(("megatron.bridge", package)).rstrip(".")
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
    for name, what in STUBS.items():
        module = sys.modules[name] = ModuleType(name)
        setattr(module, what, SimpleNamespace)


stub()

import numpy as np
from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset

from packprep.dataset.loader import Dataset, open_dataset


def reader(export: Path, dataset: Dataset, multiple: int) -> GPTSFTPackedParquetDataset:
    eos = dataset.manifest["specials"]["eos"]
    tokenizer = SimpleNamespace(eos_id=eos, eod=eos, pad_id=dataset.pad_id)
    return GPTSFTPackedParquetDataset(
        str(export),
        tokenizer,
        max_seq_length=2 * dataset.seq_length,
        pad_seq_to_mult=multiple,
        answer_only_loss=True,
        prompt_template="{input}{answer}",  # it is asked for, and not used
        truncation_field="input",
    )


def rows_read(dataset: Dataset, export: Path, multiple: int) -> tuple[int, int, int]:
    """(rows, segments, trained slots) of its batches, each compared with what is stored."""
    its = reader(export, dataset, multiple)
    assert len(its) == len(dataset)
    segments = trained = 0
    for first in range(0, len(its), made.BATCH):
        numbers = range(first, min(first + made.BATCH, len(its)))
        batch = its.collate_fn([its[number] for number in numbers])
        bounds = batch["cu_seqlens_q_padded" if multiple > 1 else "cu_seqlens_q"].numpy()
        for i, number in enumerate(numbers):
            documents = made.documents(dataset, number)
            for begin, end, document in zip(bounds[i], bounds[i][1:], documents, strict=False):
                # its last is a label
                n, at = (len(document.tokens) - 1, slice(begin, begin + len(document.tokens) - 1))
                assert end - begin == -(-n // multiple) * multiple
                assert np.array_equal(batch["tokens"][i][at], document.tokens[:-1])
                assert np.array_equal(batch["labels"][i][at], document.tokens[1:])
                on = batch["loss_mask"][i][begin:end].numpy() > 0
                assert np.array_equal(on[:n], document.trained[:-1]) and not on[n:].any()
                assert np.array_equal(batch["labels"][i][at][on[:n]], document.labels[:-1][on[:n]])
                assert np.array_equal(batch["position_ids"][i][begin:end], np.arange(end - begin))
                segments += 1
                trained += int(on.sum())
            assert batch["loss_mask"][i].sum() == sum(
                int(document.trained.sum()) for document in documents
            )
    return len(its), segments, trained


def check(folder: Path) -> str:
    made.say("stubbed", ", ".join(sorted(STUBS)))
    for name, multiple in (("plain", 1), ("padded", 8)):
        packed = made.causal(folder / name, "--set", f"packing.pad_seq_to_mult={multiple}")
        export = made.exported(packed, "parquet", folder / name / "export", "--columns", "nemo")
        figures = "{:,}, {:,}, {:,}".format(*rows_read(open_dataset(packed), export, multiple))
        made.say(f"{name}: rows, segments and trained slots that equal what is stored", figures)
    return made.READ


if __name__ == "__main__":
    made.main("megatron-bridge", check, commit=COMMIT)
