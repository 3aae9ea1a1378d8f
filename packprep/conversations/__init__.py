"""Readers of conversations and other supervised documents.

The readers find a document's text, its trained characters and its media spans. After tokenization,
they find the trained tokens of the document.

```
record ─► layouts ─► messages ─► turns, parts ─► supervision ─► text, trained spans
          supervision: loss_spans, weights ─────────┘                  │
                                     trained tokens, cuts ◄─ training ◄┘
```
"""
