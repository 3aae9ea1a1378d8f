"""Readers of conversations and other supervised documents.

They find a document's text, its trained characters and its media spans. After tokenization, they
find its trained tokens.

```
record ─► layouts ─► messages ─► turns, parts ─► supervision ─► text, trained spans
          supervision: loss_spans, weights ─────────┘                  │
                                     trained tokens, cuts ◄─ training ◄┘
```
"""
