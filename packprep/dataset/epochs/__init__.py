"""Draw the noise, spans and pivots of an epoch, with NumPy and the standard library only.

```
candidates.py ─► noise.py        same-position tasks: which slots are noised, and their new tokens
candidates.py ─► token_slots.py  next-token tasks: which slots a segment's tokens take
noise.py, token_slots.py ─► resampling.py  the segments of some rows, drawn again for another epoch
```
"""
