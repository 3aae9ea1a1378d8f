"""The loss that packprep's labels are made for."""

import jax
import jax.numpy as jnp


def masked_loss(
    logits: jax.Array, labels: jax.Array, loss_mask: jax.Array, loss_weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(sum of the trained slots' cross entropies, number of trained slots), float32 and int32 scalars.

    logits: [B, T, vocabulary]; labels, loss_mask, loss_weights: [B, T]. The prediction made at a slot is trained where
    its loss_mask is not 0, times its loss_weights if given: nothing is shifted. What to divide by is the trainer's
    choice. Logits of other slots take part in neither the sum nor its gradient, whatever they are, NaN too: they are
    replaced before anything is computed from them, since 0 · NaN is NaN.
    """
    trained = loss_mask != 0
    logits = jnp.where(trained[..., None], logits.astype(jnp.float32), 0)
    chosen = jnp.take_along_axis(logits, labels[..., None].astype(jnp.int32), axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    if loss_weights is not None:
        losses = losses * loss_weights
    return jnp.where(trained, losses, 0).sum(), trained.sum(dtype=jnp.int32)
