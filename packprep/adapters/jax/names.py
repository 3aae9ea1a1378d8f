"""Which attention path can train which task, and the names under which trainers want a batch's columns."""

from collections.abc import Sequence

from packprep.adapters.jax.columns import TRAINED_SEGMENT_IDS
from packprep.dataset.manifest import StoredTask
from packprep.errors import ArgumentError

ATTENTION = {
    "causal": frozenset({"causal"}),
    "splash": frozenset({"causal", "prefix", "bidirectional"}),
    "dense": frozenset({"causal", "prefix", "bidirectional", "block_diffusion"}),
}
"""Attention path → the attention rules of tasks that it can do. "causal": a kernel that is told segments alone."""

NAMES = {
    # It trains where targets_segmentation is not 0, and reads no weights.
    "maxtext": {
        "inputs": "tokens",
        "inputs_position": "position_ids",
        "inputs_segmentation": "segment_ids",
        "targets": "labels",
        "targets_position": "position_ids",
        "targets_segmentation": TRAINED_SEGMENT_IDS,
    },
    # The fields of GrugLmExample, whose loss_weight stands at the predicting slot; the ids go into its attn_mask.
    "levanter": {
        "tokens": "tokens",
        "loss_weight": "loss_weights",
        "segment_ids": "segment_ids",
        "position_ids": "position_ids",
    },
}
"""Trainer → its name → the column. Columns that it has no name for keep their own."""


def check_attention(tasks: Sequence[StoredTask], attention: str, prefix_bidirectional: bool) -> None:
    """ArgumentError, by the task's name, if the path cannot do the attention rule of one of the tasks."""
    if attention not in ATTENTION:
        raise ArgumentError(f"attention is {attention!r} and should be one of {', '.join(map(repr, ATTENTION))}")
    for task in tasks:
        rule = task["attention"]
        if rule == "prefix" and not prefix_bidirectional:
            rule = "causal"
        if rule not in ATTENTION[attention]:
            ways = [f"attention={name!r}" for name, rules in ATTENTION.items() if rule in rules]
            if rule == "prefix":
                ways.append("prefix_bidirectional=False, which reads prefixes causally")
            raise ArgumentError(
                f"{attention} attention cannot do task {task['name']!r}, whose attention rule is {rule}; "
                f"use {' or '.join(ways) or 'a model of your own'}"
            )


def check_names(tasks: Sequence[StoredTask], names: str) -> None:
    """ArgumentError if there is no such trainer, or if it cannot train one of the tasks."""
    if names not in ("packprep", *NAMES):
        raise ArgumentError(f"names is {names!r} and should be 'packprep', {', '.join(map(repr, NAMES))}")
    if names == "levanter":
        for task in tasks:
            if task["label_alignment"] == "same_slot":
                raise ArgumentError(
                    f"Levanter's target is the next slot's token, but task {task['name']!r} predicts in place"
                )
