"""Documents: slices of sources become token documents, as columns, with what of them is trained.

```
texts, Conversations, ids ─► tokens ─► reading: documents, counts, rejects
                                       sample: how many there will be
```
"""
