"""Sources: which bytes of which files a shard reads, and what a document is.

```
files ─► slices ─► formats ─► columns of texts, messages or ids
pieces   shards
```
"""
