"""Read the slices of sources into tokenized documents, stored as columns with their trained spans.

```
texts, Conversations, ids ─► tokens ─► reading: documents, counts, rejects
                                       sample: how many there will be
```
"""
