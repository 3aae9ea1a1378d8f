"""A tokenizer: its file, its special tokens, and the engines that encode texts.

The engines nanotoken, gigatoken and fastokens are compared with the library `tokenizers` before
their first use and during the build.

```
tokenizer.json ─► roles: which id is pad, eos, a sentinel
               ─► engines ─► encoding: texts ─► (flat ids, offsets)
```
"""
