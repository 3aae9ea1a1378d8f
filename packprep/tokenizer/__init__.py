"""A tokenizer: its file, which id plays which role, and texts → ids by an engine that is proven.

```
tokenizer.json ─► roles: which id is pad, eos, a sentinel
               ─► engines ─► encoding: texts ─► (flat ids, offsets)
```
"""
