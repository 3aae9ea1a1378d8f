"""Conversations and other supervised documents: a record becomes a text, its trained characters
and its places of media.

```
record ─► layouts ─► messages ─► turns (chat_template renders) ─► supervision ─► text, trained spans
          supervision: loss_spans, weights ──────────────────────────┘
```
"""
