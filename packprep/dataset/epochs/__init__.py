"""Draw the noise, spans and pivots of an epoch, with NumPy and the standard library only.

```
candidates.py ─► noise.py        same-position tasks: which slots are noised, and their new tokens
candidates.py ─► token_slots.py  next-token tasks: in which slots a segment's tokens are
noise.py, token_slots.py ─► resampling.py  draw the segments of some rows again for another epoch
```
"""
