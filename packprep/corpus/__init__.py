"""Text to token documents: which bytes of which files, what a document is, which ids it has.

```
sources ─► planning ─► readers ─► conversations ─► tokenization ─► (flat ids, offsets)
           pieces      columns    trained ranges   ▲
           shards      of text                     vocabulary: which id plays which role
```
"""
