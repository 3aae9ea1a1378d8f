"""An independent implementation in plain Python, which cross-checks what packprep builds.

```
plan.json, tokenizer.json, source files
  reading     which parts of which files belong to a shard, in which order, and their documents
  tokens      the texts' ids, and which of them are trained
  cutting     where documents are cut, which task a segment draws, which row and slot it gets
  objectives  a segment's slots, one file per objective          chance      what is drawn
  shard       all arrays of a shard                              comparison  what differs
  check       opens a dataset and compares it                    __main__    python -m tests.twin
```

A build and its rebuild by `verify --replay` run the same kernels, readers and length formulas, so
a fault in these is in both. Except for `check` and `__main__`, nothing here imports more of packprep
than its errors (tests/test_layers.py), so that such a fault shows. The text that a chat template
gives for messages is taken from packprep.
"""
