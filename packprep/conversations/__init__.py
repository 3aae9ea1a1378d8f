"""Conversations and other supervised documents: a record becomes texts, their trained characters
and places of media, and then trained tokens.

```
record ─► layouts ─► messages ─► turns (chat_template renders) ─► supervision ─► text, trained spans
          supervision: loss_spans, weights ─────────────────────────────┘                  │
                                                         trained tokens, cuts ◄─ training ◄┘
```
"""
