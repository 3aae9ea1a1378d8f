"""Readers of conversations and other supervised documents.

They return texts, trained characters, media spans and trained tokens.

```
record ─► layouts ─► messages ─► turns, parts ─► supervision ─► text, trained spans
          supervision: loss_spans, weights ─────────┘                  │
                                     trained tokens, cuts ◄─ training ◄┘
```
"""
