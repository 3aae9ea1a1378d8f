"""What trainers type: batches and attention in their library's own words, each module imported only on demand.

```
jax/ ──── loader, splash_attention, dense_mask, masked_loss       JAX, MaxText, Levanter, TransformerEngine, Grain
```
Nothing here is imported by the rest of packprep, and only `packprep.dataset` is imported from it.
"""
