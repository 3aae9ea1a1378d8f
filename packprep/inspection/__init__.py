"""What a dataset looks like, for the people who train on it.

```
manifest ─► summary      totals, utilisation, mixes, lengths
shard ─► row ─► lines    one row: its segments as text, the loss marked under each token
         ▲
         decoding        token ids → pieces of text
```
"""
