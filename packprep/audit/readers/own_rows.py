"""Read packprep's own datasets with its loader."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from packprep.audit.rows import NEXT, Choices, PackedData, PackedRows
from packprep.building.ledger import add_ledgers
from packprep.building.plan import stored_plan
from packprep.dataset.loader import Dataset, open_dataset
from packprep.dataset.manifest import Manifest, encoder_length
from packprep.dataset.shard import CAN_PREAD
from packprep.errors import DatasetError
from packprep.format.json_files import MANIFEST_NAME, TOKENIZER_NAME


def recognizes(path: Path) -> bool:
    """Return whether a path is the folder of a dataset of packprep."""
    return (path / MANIFEST_NAME).is_file()


def open_rows(path: Path, choices: Choices) -> PackedData:
    """Open a dataset of packprep.

    Raises:
        DatasetError: If the dataset cannot be read, or is a mixture.
    """
    dataset = open_dataset(path, io="pread" if CAN_PREAD else "mmap")
    if not isinstance(dataset, Dataset):
        raise DatasetError(f"{path}: a mixture\nhint: audit each of its datasets")
    manifest = dataset.manifest
    specials, where = manifest["specials"], MANIFEST_NAME
    ids = {role: specials[role] for role in ("eos", "bos") if isinstance(specials.get(role), int)}
    ids |= {"pad": manifest["pad_id"], "vocab_size": manifest["vocab_size"]}
    plan = stored_plan(path)
    columns = {
        "segments": "segment_ids",
        "positions": "position_ids",
        "labels": "labels",
        "trained": "loss_mask",
    }
    return PackedData(
        "packprep",
        lambda: _batches(dataset, choices),
        columns=columns,
        labels_at=NEXT,
        row_length=manifest["seq_length"],
        special_ids={name: (id, where) for name, id in ids.items()},
        tokenizer=str(path / TOKENIZER_NAME),
        chat_template=None if plan is None else plan["chat_template"],
        impossible=_impossible(dataset, manifest),
    )


def _impossible(dataset: Dataset, manifest: Manifest) -> dict[str, str]:
    """Return the checks that the dataset's objectives or settings do not allow."""
    reasons: dict[str, str] = {}
    if any(dataset.facts.in_place) or encoder_length(manifest):
        reason = "the objective does not predict the next token. `packprep verify` checks it"
        loss_kinds = ("wrong_labels", "crossing_labels", "trained_padding", "untrained_documents")
        boundary_kinds = ("broken_positions", "unreset_positions", "inner_eos", "empty_documents")
        reasons |= dict.fromkeys((*loss_kinds, *boundary_kinds), reason)
    total = add_ledgers(manifest["ledger"]["sources"].values())
    if not manifest["recipe"].get("documents", {}).get("append_eos", True):
        reasons["no_eos"] = "the recipe appends no eos"
    elif total["segments"] != total["documents"]["used"]:
        reasons["no_eos"] = "documents were cut into chunks, and only the last chunk has eos"
    return reasons


def _batches(dataset: Dataset, choices: Choices) -> Iterator[PackedRows]:
    length = dataset.facts.seq_length
    at_once = max(choices.batch_tokens // length, 1)
    names = ("tokens", "labels", "segment_ids", "position_ids", "loss_mask")
    for first_row in range(0, len(dataset), at_once):
        count = min(at_once, len(dataset) - first_row)
        batch = dataset.batch(range(first_row, first_row + count), columns=names)
        columns = {name: batch[name].reshape(-1) for name in names}
        yield PackedRows(
            columns["tokens"],
            np.arange(count + 1, dtype=np.int64) * length,
            labels=columns["labels"],
            trained=columns["loss_mask"] != 0,
            positions=columns["position_ids"],
            segments=columns["segment_ids"],
        )
