"""packprep builds training rows from text corpora once, offline. A trainer then only reads files.

```
text ─► documents ─► token documents ─► planned segments ─► packed rows ─► shard ─► dataset
        readers      tokenization       task + exact length   (row, offset)   render    manifest
```

A trainer needs three lines:

    import packprep
    ds = packprep.open_dataset("packed/")
    for batch in ds.batches(batch_size=8, seed=0, rank=0, world_size=1): ...

`import packprep` imports no third-party library. `open_dataset` imports numpy and
`packprep.dataset`, nothing more.
"""

from packprep.forking import unforked

TYPE_CHECKING = False  # Importing typing takes as long as the rest of this package.
if TYPE_CHECKING:
    from packprep.dataset.loader import open_dataset

__all__ = ["open_dataset"]


def __getattr__(name: str):
    if name == "open_dataset":
        with unforked():
            from packprep.dataset.loader import open_dataset
        return open_dataset
    raise AttributeError(f"module 'packprep' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
