"""The loader and the files of a dataset, with NumPy and the standard library only.

```
manifest.py                     dataset.json
shard.py                        the arrays of a shard, mapped or read
rows.py                         the segments of rows, and their columns, stored or derived
batches.py ─► loader.py         rows, batches, an iteration with a state; which shards are open
order.py                        which row of which dataset comes when
epochs/                         the noise, spans and pivots of an epoch
mixture.py                      several datasets as one, by share
row_media.py                    which slots of rows belong to which image, audio or video
boundaries.py                   where segments are, by cu_seqlens or by ids
attention.py                    attention patterns, layouts for attention kernels
encoder_decoder.py              a row as an encoder row and a decoder row
```
"""

# np.unique imports this module at its first call. A fork at that moment would leave the import
# locked in the child.
import numpy.ma  # noqa: F401
