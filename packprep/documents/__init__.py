"""Documents: slices of sources ─► token documents, as columns, with what of them is trained.

```
texts, messages, ids ─► supervision ─► tokens ─► reading: documents, counts, rejects
                        trained ranges           sample: how many there will be
```
"""
