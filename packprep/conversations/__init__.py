"""Read conversations and other supervised documents into texts, trained characters, places of media
and trained tokens.

```
record ─► layouts ─► messages ─► turns, parts (chat_template renders) ─► supervision ─► text, trained spans
          supervision: loss_spans, weights ─────────────────────────────────┘                  │
                                                             trained tokens, cuts ◄─ training ◄┘
```
"""
