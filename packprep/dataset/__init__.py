"""ON DISK ↔ TRAINER: the files of a dataset and what reads them; numpy and the standard library
only.

```
manifest.py                     dataset.json
shard.py                        a shard's arrays, mapped or read
rows.py                         segments of some rows; their columns, stored or derived; a Row is a batch of one
batches.py ─► loader.py         what a trainer reads: rows, batches, an iteration with a state; which shards are open
order.py                        which row of which dataset comes when
epochs/                         the noise, spans and pivots of an epoch
mixture.py                      several datasets as one, by share
row_media.py                    which slots of rows belong to which picture, sound or film
boundaries.py                   where segments lie, by cu_seqlens or by ids
attention.py                    attention rules, layouts for attention kernels
encoder_decoder.py              a row as an encoder's and a decoder's
```
"""

# np.unique imports it at its first call. A fork at that moment leaves the import locked in the
# child.
import numpy.ma  # noqa: F401
