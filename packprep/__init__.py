"""packprep turns text corpora into training rows, once, offline, so that a trainer only maps files
and reads.

```
text ─► documents ─► token documents ─► planned segments ─► packed rows ─► shard ─► dataset
        readers      tokenization       task + exact length   (row, offset)   render    manifest
```

What a trainer types:

    import packprep
    ds = packprep.open_dataset("packed/")
    for batch in ds.batches(batch_size=8, seed=0, rank=0, world_size=1): ...

`import packprep` itself imports no library; `open_dataset` brings numpy and `packprep.dataset`, no
more.
"""

from packprep.forking import unforked

TYPE_CHECKING = False  # typing's, which takes as long to import as all else of this package
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
