"""Read a dataset in JAX: global arrays of fixed shapes, and attention that separates segments.

```
loader ──► Loader ──► batch: name → jax.Array [B, T] ──► attention mask ──► masked_loss
           loading.py                                    attention.py       loading.py
```
grain_source.py gives the same rows as a Grain dataset. Import it explicitly, since it needs Grain.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "packprep.adapters.jax needs JAX, which is not installed\nhint: pip install 'packprep[jax]'"
    ) from error

from packprep.adapters.jax.attention import (
    block_masks,
    dense_mask,
    splash_attention,
    splash_kernel,
    splash_segment_ids,
)
from packprep.adapters.jax.loading import Loader, data_rank, loader, masked_loss

__all__ = [
    "Loader",
    "block_masks",
    "data_rank",
    "dense_mask",
    "loader",
    "masked_loss",
    "splash_attention",
    "splash_kernel",
    "splash_segment_ids",
]
