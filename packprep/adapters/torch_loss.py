"""Compute the loss that packprep's labels are made for.

The logits of slot t are scored against labels[t], without another shift.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as functional


def automodel_loss_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch in the terms of NeMo Automodel's diffusion losses.

    Pass the result as `loss_fn(logits, **inputs)` to MDLMCrossEntropyLoss, HybridDiffusionLLMLoss
    or BlockDiffusionCrossEntropyLoss. Compute the logits of all slots, with a mask of
    `torch_attention`. Labels, loss mask and weights are already aligned with the logits.

    Args:
        batch: A batch of `packprep.adapters.torch`, with or without loss_weights.

    Returns:
        target_ids, noise_mask, p_mask and loss_mask, [B, T] each, and num_diffusion_tokens. p_mask
        is 1 / loss_weights, and 1 where nothing is trained.
    """
    mask = torch.as_tensor(batch["loss_mask"]).bool()
    weights = torch.as_tensor(batch.get("loss_weights", mask)).float()
    return {
        "target_ids": torch.as_tensor(batch["labels"]).long(),
        "noise_mask": mask,
        "p_mask": 1 / torch.where(mask, weights, 1.0),
        "loss_mask": mask,
        "num_diffusion_tokens": max(1, int(mask.sum())),
    }


def masked_loss(
    logits: torch.Tensor, batch: Mapping[str, Any], denominator: Any = None
) -> torch.Tensor:
    """Return the weighted cross entropy of the trained slots, divided by `denominator`.

    The loss is Σ cross_entropy(logits[t], labels[t]) · loss_weights[t] / denominator. labels[t] is
    the target of logits[t]: do not shift labels again. Untrained slots are removed before the cross
    entropy, since 0 · NaN is NaN and kernels may leave any value in a slot outside every segment.
    The gradient of untrained slots is exactly 0.

    Args:
        logits: float[B, T, vocab], or float[n, vocab] of only the n trained slots, in order. A head
            that is applied to `hidden[loss_mask]` gives the second form and saves work.
        batch: A batch with labels and loss_mask [B, T]. Without loss_weights, each weight is 1.
        denominator: By default the number of trained slots of this batch. For several ranks or
            accumulated batches, pass the sum of all their `n_trained` and add up the losses. If the
            denominator is 0, as on a rank without rows, the loss is 0 and has a gradient.

    Returns:
        A scalar, at least float32.

    Example:
        loss = masked_loss(model(batch["tokens"], batch["position_ids"]), batch)
    """
    mask = torch.as_tensor(batch["loss_mask"], device=logits.device).bool()
    labels = torch.as_tensor(batch["labels"], device=logits.device)[mask].long()
    chosen = logits[mask] if logits.ndim == 3 else logits
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    losses = functional.cross_entropy(chosen, labels, reduction="none")
    if "loss_weights" in batch:
        losses = losses * torch.as_tensor(batch["loss_weights"], device=logits.device)[mask]
    divisor = len(labels) if denominator is None else denominator
    if torch.is_tensor(divisor):
        return losses.sum() / torch.where(divisor == 0, 1, divisor)
    return losses.sum() / (divisor or 1)
