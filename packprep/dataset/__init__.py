"""Read datasets: the manifest, shards, rows, batches and mixtures.

This subpackage needs only NumPy and the standard library.

```
manifest.py                     read and check dataset.json
shard.py                        map or read the arrays of a shard
segments.py                     the columns that describe a shard's segments
rows.py, row.py                 the columns of several rows or of one row, stored or derived
batches.py ─► loader.py         batches and resumable iteration; datasets with their open shards
order.py                        the order of rows, and of the datasets in a mixture
epochs/                         resample the noise, spans and pivots of rows for another epoch
mixture.py                      read several datasets as one dataset, in given shares
row_media.py                    the slots of images, audio and video in rows
boundaries.py                   compute the slots of segments from cu_seqlens or segment ids
attention.py                    attention patterns, and layouts for attention kernels
encoder_decoder.py              split rows into encoder and decoder sequences
```
"""

# np.unique would import numpy.ma at its first call. If another thread forks at that moment, the
# import stays locked in the child process.
import numpy.ma  # noqa: F401
