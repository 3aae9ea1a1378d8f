"""ON DISK ↔ TRAINER: the files of a dataset and what reads them; numpy and the standard library only.

```
manifest.py ─► shard.py ─► loader.py ─► a trainer
dataset.json   arrays      rows, batches, state
                           order.py      which row comes when
                           attention.py  layouts for attention kernels
```
"""
