"""Read the documents of sources, tokenize them, and keep them as arrays.

```
texts, conversations or ids ─► tokens ─► reading: documents, counts and rejects of one shard
                                         sample:  estimates of a source's totals, for the plan
```
"""
