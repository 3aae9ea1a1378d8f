"""A tokenizer: its file, its special tokens, and proven engines that encode texts.

```
tokenizer.json ─► roles: which id is pad, eos, a sentinel
               ─► engines ─► encoding: texts ─► (flat ids, offsets)
```
"""
