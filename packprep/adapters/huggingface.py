"""Prepare masks and shifted labels for Transformers models and their Trainer.

    Trainer(model, train_dataset=Rows(dir), data_collator=Collator(dir, model), …)
    model(**model_inputs(batch, dir, model))
    check_tokenizer(dir, tokenizer)

`Rows` and the batches come from `adapters.torch`. `check_tokenizer` checks that a tokenizer gives
ids the same meaning as the dataset. A causal model of Transformers shifts `labels`. packprep's
labels are already shifted, so they are passed as `shift_labels`, which such a model uses unchanged:

    tokens                  a   b   c | d   e   f     two segments
    shift_labels            b   c   . | e   f   .     . is -100
    labels                  .   b   c | .   e   f     the same targets for the model's own shift

Both are given, because a model computes a loss only if `labels` is present. If a task predicts the
token of a noised slot at this slot, which a shift cannot express, `labels` is -100 everywhere.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from packprep.adapters import opened, tasks_of, weighted_tasks, weights_spans
from packprep.adapters.tokenizer_match import check_tokenizer
from packprep.adapters.torch_attention import flex_block_mask, sdpa_mask, transformers_kwargs
from packprep.dataset.loader import Dataset
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError

__all__ = ["Collator", "check_tokenizer", "model_inputs"]
IGNORE_INDEX = -100
ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")
LABELS = ("shift_labels", "shifted_by_model")
_NEEDED = ("tokens", "labels", "loss_mask", "position_ids")


class Collator:
    """A data_collator for Trainer. Its method `inputs` computes a model's inputs from a batch.

    The constructor checks the tasks of the dataset, or of all datasets of a mixture.

    Args:
        directory: Dataset folder, or an open `Dataset` or `Mixture`.
        attention: The model, or the name of the attn_implementation that the model uses. Another
            name raises no error, but the model is trained wrongly. A model that would not pass
            shift_labels to its loss is refused.
        labels: "shift_labels", or "shifted_by_model" for a model whose loss does not support
            shift_labels. "shifted_by_model" refuses same-position tasks.
        loss_weights: "refuse" or "ignore". Transformers' loss has no weights. "refuse" raises an
            error if tasks or documents weight their loss.
        prefix_bidirectional: Pass False for causal attention also in prefixes and in segments of
            same-position tasks. With flash attention, only causal attention is supported.

    Attributes:
        attention: The attn_implementation.
        labels: As given.
        prefix_bidirectional: As given.
        predicts_in_place: Whether a task predicts the tokens of noised slots at these slots.

    Raises:
        ArgumentError: If an argument is invalid, or if a task or a weight does not suit the model.
        DatasetError: If the dataset is missing or damaged.

    Example:
        Trainer(model, args, train_dataset=Rows("packed"), data_collator=Collator("packed", model))
    """

    def __init__(
        self,
        directory: str | os.PathLike | Dataset | Mixture,
        attention: Any,
        labels: str = "shift_labels",
        loss_weights: str = "refuse",
        prefix_bidirectional: bool = True,
    ):
        dataset = opened(directory)
        tasks = tasks_of(dataset)
        named = attention if isinstance(attention, str) else _attention_of(attention, labels)
        for name, value, known_values in (
            ("attention", named, ATTENTIONS),
            ("labels", labels, LABELS),
            ("loss_weights", loss_weights, ("refuse", "ignore")),
        ):
            if value not in known_values:
                raise ArgumentError(
                    f"{name} is {value!r} and should be one of {', '.join(map(repr, known_values))}"
                )
        self.attention, self.labels, self.prefix_bidirectional = named, labels, prefix_bidirectional
        in_place = [task for task in tasks if task["label_alignment"] == "same_slot"]
        self.predicts_in_place = bool(in_place)
        if in_place and labels == "shifted_by_model":
            raise ArgumentError(
                f"task {_names(in_place)} predicts the same position, so a model that shifts its"
                " labels would train it on the next position\n"
                "hint: use labels='shift_labels' with a model whose loss supports them, or"
                " another loss"
            )
        weighted = weighted_tasks(dataset)
        if weighted and loss_weights == "refuse":
            raise ArgumentError(
                f"task {_names(weighted)} weights its loss, which Transformers' loss does not"
                " support\n"
                "hint: use masked_loss of packprep.adapters.torch_loss, build with weighting ="
                " 'none', or set loss_weights='ignore'"
            )
        if loss_weights == "refuse" and weights_spans(dataset):
            raise ArgumentError(
                "documents of this dataset have loss weights, which Transformers' loss does not"
                " support\n"
                "hint: use masked_loss of packprep.adapters.torch_loss, or set"
                " loss_weights='ignore'"
            )

    def __call__(self, rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        """Return the model's inputs from rows of adapters.torch.Rows.

        For FlexAttention the inputs are on the accelerator, if there is one. A BlockMask works only
        on the device where it was made, and worker processes cannot send it. So FlexAttention needs
        a Trainer with dataloader_pin_memory=False and no workers.

        Raises:
            ArgumentError: If the rows come from another dataset class, or if a worker process makes
                a BlockMask.
        """
        if not rows or not all(
            isinstance(row, Mapping) and torch.is_tensor(row.get("tokens")) for row in rows
        ):
            raise ArgumentError(
                "the rows to collate are not from packprep.adapters.torch.Rows\n"
                "hint: give Rows(directory) as train_dataset, and set"
                " remove_unused_columns=False"
            )
        batch = {
            name: torch.stack([row[name] for row in rows])
            for name in rows[0]
            if torch.is_tensor(rows[0][name])
        }
        if self.attention == "flex_attention":
            if get_worker_info() is not None:
                raise ArgumentError(
                    "a BlockMask cannot be sent from a worker process\n"
                    "hint: use dataloader_num_workers=0"
                )
            if torch.accelerator.is_available():
                batch = {
                    name: values.to(torch.accelerator.current_accelerator())
                    for name, values in batch.items()
                }
        return self.inputs(batch)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's inputs from a batch.

        For flash attention, the inputs have FlashAttentionKwargs, and all rows are joined into one,
        [1, B · T]. They also have use_cache=False. With a cache, the model would take another
        attention path, which ignores the boundaries of segments without an error.

        Args:
            batch: A batch with tokens, labels, loss_mask and position_ids [B, T], and the columns
                that the attention needs.

        Returns:
            input_ids, position_ids, labels and perhaps shift_labels (int64[B, T] each), and the
            arguments of the attention. For "sdpa", "eager" and "flex_attention" the only such
            argument is attention_mask, which the model uses unchanged. It is bool[B, 1, T, T] for
            "sdpa", and a BlockMask for "flex_attention". For "eager" it is float32: 0 for allowed
            pairs, and the lowest finite number for all other pairs.

        Raises:
            ArgumentError: If the batch misses a column, or if the model's attention cannot compute
                the pattern of a segment.
        """
        if lacking := [name for name in _NEEDED if name not in batch]:
            raise ArgumentError(
                f"the batch has no {', '.join(lacking)}\n"
                "hint: read all columns, or name these columns too, and set"
                " remove_unused_columns=False"
            )
        inputs = {
            "input_ids": batch["tokens"],
            "position_ids": batch["position_ids"],
            **self._labels(batch),
        }
        if self.attention == "flex_attention":
            inputs["attention_mask"] = flex_block_mask(
                batch, prefix_bidirectional=self.prefix_bidirectional
            )
        elif self.attention in ("sdpa", "eager"):
            seen = sdpa_mask(batch, self.prefix_bidirectional)
            least = torch.finfo(torch.float32).min
            inputs["attention_mask"] = (
                seen if self.attention == "sdpa" else torch.where(seen, 0.0, least)
            )
        else:
            # Flash attention reads one row of segments, so the rows are joined.
            inputs = {name: values.reshape(1, -1) for name, values in inputs.items()}
            inputs |= transformers_kwargs(batch, self.prefix_bidirectional) | {"use_cache": False}
        return inputs

    def _labels(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        trained = batch["loss_mask"].bool()
        at_prediction = torch.where(trained, batch["labels"].long(), IGNORE_INDEX)
        # A model that shifts `labels` moves each label one slot to the left, so here it is one slot
        # to the right.
        at_target = torch.full_like(at_prediction, IGNORE_INDEX)
        if not self.predicts_in_place:
            at_target[..., 1:] = at_prediction[..., :-1]
        if self.labels == "shifted_by_model":
            return {"labels": at_target}
        return {"labels": at_target, "shift_labels": at_prediction}


def _attention_of(model: Any, labels: str) -> str:
    """Return the model's attn_implementation.

    Raises:
        ArgumentError: If the object is not a Transformers model, or if the model does not take
            shift_labels.
    """
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(implementation, str):
        raise ArgumentError(
            f"attention is a {type(model).__name__} without a config with attn_implementation\n"
            "hint: give its name, as 'sdpa'"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    if labels == "shift_labels" and not any(
        p.kind is p.VAR_KEYWORD or p.name == "shift_labels" for p in parameters
    ):
        raise ArgumentError(
            f"{type(model).__name__}.forward does not take shift_labels\n"
            "hint: use labels='shifted_by_model'"
        )
    return implementation


def _names(tasks: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(task["name"] for task in tasks))


def model_inputs(
    batch: Mapping[str, Any],
    directory: str | os.PathLike | Dataset | Mixture,
    attention: Any,
    **options: Any,
) -> dict[str, Any]:
    """Return the keyword arguments of a model for one batch.

    Each call creates a `Collator`. To avoid that cost, create one `Collator` and call its `inputs`.

    Args:
        batch: A batch of adapters.torch.loader.
        directory: As in `Collator`.
        attention: As in `Collator`.
        options: Further arguments of `Collator`.

    Returns:
        The inputs, as from `Collator.inputs`.

    Raises:
        ArgumentError: As in `Collator` and `Collator.inputs`.

    Example:
        outputs = model(**model_inputs(batch, "packed", model))
    """
    return Collator(directory, attention, **options).inputs(batch)
