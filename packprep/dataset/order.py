"""Which row comes when: shuffling and splitting over ranks as index arithmetic, in O(1) memory.

    global sample   g = rows + s·B·W + r·B + j     step s, rank r of W, place j of B
    epoch           e = g div n
    row             permutation(seed, e)(g mod n)

`rows` are the rows delivered over all ranks before the state was loaded: nothing else is remembered, so a state goes on
at any world size and batch size, and no row is dropped or repeated within an epoch.
"""

import numpy as np

from packprep import randomness


def permutation(seed: int, epoch: int | np.ndarray, n_rows: int, index: np.ndarray) -> np.ndarray:
    """int64: the rows at the places `index` (0 … n_rows − 1) of an epoch, or of one for each, shaped as `index`.

    seed: 0 … 2⁶⁴ − 1. epoch: chance repeats after 2³² of them.
    """
    key = randomness.bits64(np.uint64(seed), randomness.SHUFFLE, 0, epoch & 0xFFFFFFFF)
    return randomness.permute(index, n_rows, key)


def rows_of_samples(samples: np.ndarray, n_rows: int, seed: int, shuffle: bool) -> np.ndarray:
    """int64, shaped as `samples`: the rows of global samples g ≥ 0; n_rows > 0."""
    epochs, places = np.divmod(np.asarray(samples, np.int64), n_rows)
    if not shuffle:
        return places
    one = epochs.size and epochs.min() == epochs.max()  # then one key does for all
    return permutation(seed, int(epochs.flat[0]) if one else epochs, n_rows, places)


def samples_of_step(rows: int, step: int, batch_size: int, rank: int, world_size: int) -> range:
    """The global samples of one rank's step, as if there were no end."""
    begin = rows + step * batch_size * world_size + rank * batch_size
    return range(begin, begin + batch_size)


def n_steps(rows: int, end: int, batch_size: int, world_size: int) -> int:
    """ceil((end − rows) / (B·W)): the steps that every rank makes until sample `end`, E·n; the last may be short."""
    return max(0, -(-(end - rows) // (batch_size * world_size)))
