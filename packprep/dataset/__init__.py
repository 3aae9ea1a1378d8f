"""ON DISK ↔ TRAINER: the files of a dataset and what reads them; numpy and the standard library only.

```
manifest.py ─► shard.py ─► loader.py ─┬─► row.py                     a row as a view
dataset.json   arrays      opens,     └─► gathering.py ─► batches.py ─► a trainer
                           locates        [B, T] arrays   order, state
                                          segments.py     what boundaries imply, slot by slot
                                          redraw.py       noise anew in later epochs
attention.py, thd.py       layouts for attention kernels
```
"""
