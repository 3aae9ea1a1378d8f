"""A dataset in the formats of other tools: Megatron-core's .bin and .idx, Parquet.

```
export ─► folder      what may stand in --out; the note of an export that began, the receipt of one that is whole
   │ ├──► megatron ─► documents    segments → the documents that they were made of
   │ │        └─────► indexed      documents → .bin and .idx
   │ └──► parquet  ─► columns      rows → Arrow tables
   └────► shards      a dataset's shards, each compared with its digest before anything is read from it
```
"""
