"""The loss that packprep's labels are made for: the prediction at slot t is scored against
labels[t], nothing is shifted."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as functional


def automodel_loss_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch in the words of NeMo Automodel's losses of diffusion: target_ids, noise_mask, p_mask,
    loss_mask [B, T] and num_diffusion_tokens, for `loss_fn(logits, **these)` of
    MDLMCrossEntropyLoss, HybridDiffusionLLMLoss and BlockDiffusionCrossEntropyLoss.

    logits are of all slots, as the mask of `torch_attention` gives them: what is trained, its
    weight and its label stand at their slots already. p_mask is 1 / loss_weights, 1 where nothing
    is trained.
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
    """Σ cross_entropy(logits[t], labels[t]) · loss_weights[t] over the trained slots, divided by
    `denominator`.

    logits: float[B, T, vocab], or [n, vocab] of the n trained slots alone, in order (what a head
    that is applied to `hidden[loss_mask]` gives, which saves its work on the rest). loss_weights: 1
    where the batch has none.
    denominator: by default the trained slots of this batch. Over ranks and accumulated batches
    give the sum of all their `n_trained`; then add the losses up. Where it is 0, as on a rank
    without rows, the loss is 0 and has a gradient.

    Slots that are not trained are left out before the cross entropy: 0 · NaN is NaN, and kernels
    may leave anything in a slot outside every segment. Their gradient is exactly 0.
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
