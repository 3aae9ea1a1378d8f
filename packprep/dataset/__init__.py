"""ON DISK ↔ TRAINER: the files of a dataset and what reads them; numpy and the standard library only.

```
manifest.py ─► shard.py ─► row.py ─► loader.py ─► a trainer
dataset.json   arrays      a view    batches, state
                           │         order.py       which row comes when
                           attention.py             layouts for attention kernels
```
"""
