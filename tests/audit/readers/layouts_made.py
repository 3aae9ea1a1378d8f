"""The columns of trainers' packed datasets, made from columns without a fault or with one.

Each function writes the layout that the tool's own code writes, as `benchmarks/audit_tools.py`
shows: the names of the columns, padding, and how boundaries and labels are stored.
"""

from collections.abc import Callable, Mapping

import numpy as np

from packprep.audit.report import Request, describe_audit
from packprep.audit.rows import Choices
from tests.audit import faults_made as made
from tests.audit.faults_made import IGNORED, PAD, Packed

Columns = dict[str, list]
"""Name of a column → its value in each row."""


def described(path, **options):
    """The audit of a path, in small batches."""
    ids = {"eos": made.EOS, "bos": made.BOS, "pad": PAD, "unk": made.UNK}
    return describe_audit(
        Request(
            path,
            special_ids={**ids, "vocab_size": made.VOCAB_SIZE},
            choices=Choices(batch_tokens=1 << 10),
            **options,
        )
    )


def found(path) -> set[str]:
    """The kinds of findings in a path."""
    return {one["kind"] for one in described(path)["checks"] if one["state"] == "finding"}


def _content(packed: Packed, values: np.ndarray) -> list[list[int]]:
    """The values of each row without its padding."""
    return [row[own > 0].tolist() for row, own in zip(values, packed.segments, strict=True)]


def _lengths(packed: Packed) -> list[list[int]]:
    return [np.bincount(row)[1:].tolist() for row in packed.segments]


def trl(packed: Packed) -> Columns:
    """TRL's packing bfd."""
    return {
        "input_ids": _content(packed, packed.ids),
        "labels": _content(packed, packed.labels),
        "seq_lengths": _lengths(packed),
    }


def wrapped(packed: Packed) -> Columns:
    """TRL's packing wrapped, which cuts the concatenated documents."""
    ids, labels = (sum(_content(packed, of), []) for of in (packed.ids, packed.labels))
    begins = range(0, len(ids), made.ROW_LENGTH)
    return {
        "input_ids": [ids[at : at + made.ROW_LENGTH] for at in begins],
        "labels": [labels[at : at + made.ROW_LENGTH] for at in begins],
    }


def llamafactory(packed: Packed) -> Columns:
    """LLaMA-Factory's neat_packing, which pads each row by at least one token."""

    def filled(values: np.ndarray, value: int) -> list[list[int]]:
        return np.pad(values, ((0, 0), (0, 1)), constant_values=value).tolist()

    nothing = dict.fromkeys(("images", "videos", "audios"), [None] * len(packed.ids))
    return {
        "input_ids": filled(packed.ids, PAD),
        "attention_mask": filled(packed.segments, 0),
        "position_ids": filled(np.where(packed.segments > 0, packed.positions, 0), 0),
        "labels": filled(packed.labels, IGNORED),
        **nothing,
    }


def llamafactory_plain(packed: Packed) -> Columns:
    """LLaMA-Factory's packing without neat_packing, whose mask is 1 at padding too."""
    columns = llamafactory(packed)
    return columns | {"attention_mask": [[1] * len(row) for row in columns["input_ids"]]}


def axolotl(packed: Packed) -> Columns:
    """Axolotl's packing of a streamed dataset."""
    return {
        "input_ids": _content(packed, packed.ids),
        "labels": _content(packed, packed.labels),
        "position_ids": _content(packed, packed.positions),
    }


def axolotl_documents(packed: Packed) -> Columns:
    """Axolotl's prepared dataset, whose rows are documents that its sampler packs later."""
    parts = [
        np.split(of[own > 0], np.flatnonzero(np.diff(own[own > 0])) + 1)
        for values in (packed.ids, packed.labels, packed.positions)
        for of, own in zip(values, packed.segments, strict=True)
    ]
    count = len(packed.ids)
    ids, labels, positions = (
        [part.tolist() for row in parts[i * count : (i + 1) * count] for part in row]
        for i in range(3)
    )
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": [[1] * len(row) for row in ids],
        "position_ids": positions,
        "length": [len(row) for row in ids],
    }


def axolotl_pretraining(packed: Packed) -> Columns:
    """Axolotl's concatenation for pretraining, with an unattended pad after each document."""
    columns: Columns = {"input_ids": [], "labels": [], "attention_mask": []}
    for ids, labels, segments in zip(packed.ids, packed.labels, packed.segments, strict=True):
        row = [np.empty(0, np.int64)] * 3
        for k in range(1, segments.max() + 1):
            own = segments == k
            of = ids[own], labels[own], np.ones(own.sum(), np.int64)
            pads = PAD, IGNORED, 0
            row = [np.concatenate((*pair, [pad])) for pair, pad in zip(
                zip(row, of, strict=True), pads, strict=True)]  # fmt: skip
        rest = segments == 0
        tail = ids[rest], labels[rest], np.zeros(rest.sum(), np.int64)
        for name, values, last in zip(columns, row, tail, strict=True):
            columns[name].append(np.concatenate((values, last)).astype(np.int64).tolist())
    return columns


def bridge(packed: Packed) -> Columns:
    """Packed rows of NeMo and Megatron-Bridge, whose mask is of the next token."""
    mask = packed.next_labels != IGNORED
    mask[:, :-1] &= packed.segments[:, 1:] == packed.segments[:, :-1]
    return {
        "input_ids": _content(packed, packed.ids),
        "loss_mask": [list(map(int, row)) for row in _content(packed, mask)],
        "seq_start_id": [np.cumsum([0, *of[:-1]]).tolist() for of in _lengths(packed)],
    }


def tokens(packed: Packed) -> Columns:
    """The samples of llm-foundry."""
    return {"tokens": wrapped(packed)["input_ids"]}


_STREAM = {"duplicate_documents", "empty_documents", "two_bos"} | {
    "beyond_vocabulary", "unknown_tokens",
}  # fmt: skip
_DOCUMENTS = _STREAM | {"no_eos", "inner_eos"}
_LOSS = {"wrong_labels", "untrained_documents"}
_POSITIONS = {"unreset_positions", "broken_positions"}
_ROWS = {"duplicate_rows", "untrained_rows"}
_PADDED = {"padding", "trained_padding"}
LAYOUTS: Mapping[str, tuple[Callable[[Packed], Columns], set[str]]] = {
    "trl": (trl, _DOCUMENTS | _LOSS | _ROWS),
    "wrapped": (wrapped, _STREAM | {"wrong_labels"}),
    "llamafactory": (llamafactory, set(made.FAULTS)),
    "llamafactory_plain": (llamafactory_plain, set(made.FAULTS) - {"unreset_positions"}),
    "axolotl": (
        axolotl,
        _DOCUMENTS | _LOSS | _ROWS | {"crossing_labels", "broken_positions"},
    ),
    "axolotl_documents": (axolotl_documents, _DOCUMENTS | _LOSS | _POSITIONS),
    "axolotl_pretraining": (
        axolotl_pretraining,
        _DOCUMENTS | _LOSS | _ROWS | _PADDED | {"crossing_labels"},
    ),
    "bridge": (bridge, _DOCUMENTS | _ROWS | {"untrained_documents"}),
}
"""Layout of a table → its columns, and the kinds of faults that it can contain."""


def check_faults(write: Callable[[str, Columns], object], name: str) -> None:
    """Check that a sound dataset has no finding, and that each fault is named.

    `write` takes a name and columns, and returns the path that it wrote.
    """
    layout, kinds = LAYOUTS[name]
    assert found(write("clean", layout(made.clean()))) == set(), name
    for kind in sorted(kinds):
        planted = found(write(kind, layout(made.FAULTS[kind]())))
        assert kind in planted and planted <= {kind} | made.IMPLIED.get(kind, set()), (name, kind)
