"""ON DISK ↔ TRAINER: the files of a dataset and what reads them; numpy and the standard library only.

```
json_files.py  shard.py ─────► loader.py ─┬─► row.py                     a row as a view
encoding ─►    arrays, mapped  opens,     └─► gathering.py ─► batches.py ─► a trainer
manifest.py ─► or read by      locates        [B, T] arrays   order.py: order, state
dataset.json   reading.py                     segments.py     what boundaries imply, slot by slot
                                              redraw.py       noise anew in later epochs
mixture.py, shares.py      several datasets as one, by share
attention.py, thd.py       layouts for attention kernels
```
"""
