"""A second way to every byte: plain Python, written from the design's text, that shares no code
with what it checks.

```
plan.json, tokenizer.json, source files
  reading     which parts of which files belong to a shard, in which order, and their documents' texts or ids
  tokens      the texts' ids, and which of them are trained
  cutting     where documents are cut, which task a segment draws, which row and slot it gets
  objectives  its slots, by a file for each objective             chance     what is drawn
  shard       all of a shard's arrays          comparison what of them is not what is stored
```
Kernels, the compiled and the vectorised randomness, readers, length laws, cutting, packing,
rendering and noise are made and replayed by the same code: a fault in it is in both. Nothing of it
is imported here (a test holds that), so that such a fault shows. One thing is taken over: the text
that a chat template gives for messages.
"""
