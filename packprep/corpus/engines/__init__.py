"""Texts → flat ids, by an engine.

The reference engine is the `tokenizers` library. Every other engine gives the same ids, only faster; a recipe's
fingerprint does not know which one ran.

```
engine        what an engine is, and how one fails
reference     `tokenizers`: any tokenizer.json
byte_ids      the built-in vocabulary of bytes, without a library
fast          `fastokens`: byte-level BPE
native        its library's tokenizer, which loads in a thread, and may begin before all else
registry      which engines there are; those that a recipe's `engine` may mean; the one of a plan
```
"""
