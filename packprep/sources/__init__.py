"""Find source files, divide them among shards and read their documents.

```
files: splits ─► slices: shards ─► formats: columns of texts, messages or token ids
```
"""
