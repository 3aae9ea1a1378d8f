"""Find source files, divide them among shards and read their documents.

```
files ─► slices ─► formats ─► columns of texts, messages or ids
pieces   shards
```
"""
