"""Readers of conversations and other supervised documents.

They return a document's text, trained characters and media spans, and then its trained tokens.

```
record ─► layouts ─► messages ─► turns, parts ─► supervision ─► text, trained spans
          supervision: loss_spans, weights ─────────┘                  │
                                     trained tokens, cuts ◄─ training ◄┘
```
"""
