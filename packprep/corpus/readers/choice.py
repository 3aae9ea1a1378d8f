"""Which documents of a piece a fraction of its documents is: evenly by length, each with the same probability.

    size        0     1    2…3   4…7   8…15  …      stored bytes (line, text) or tokens; of messages, how many
    class       0     1     2     3     4    …      bits of the size
    taken       iff ⌊(j + 1) · f + u⌋ > ⌊j · f + u⌋, for the j-th document of its class in the piece

u is uniform, keyed by piece, use and class. So each document is taken with probability f, whatever its length; and what is
taken of a piece has f of its bytes but for about a document of each class, where tossing a coin for each lets few long
documents decide. A part that begins inside a piece is chosen from as the whole is: what lies before it is counted.
"""

import numpy as np

from packprep.randomness import REPEAT, words

_CLASSES = 64
_32 = np.uint64(32)


class Choice:
    """The documents of one piece that one use takes. It is asked for all of them in order, and remembers how many it saw.

    key: of the piece in that use. fraction: in 2⁻³², below 2³². sample: (file, positions) → bool[n]: the documents among
    which is chosen, or None for all.
    """

    def __init__(self, key: np.uint64, fraction: int, sample=None):
        self.key, self.fraction, self.sample = key, np.uint64(fraction), sample
        self.seen = np.zeros(_CLASSES, np.int64)
        """int64[classes]: documents so far. Who goes on with a piece hands it on."""
        self._shift = words(key, REPEAT, np.arange(_CLASSES)).astype(np.uint64)

    def __call__(self, file: int, positions: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """bool[n]: which of the next documents are taken. positions, sizes: int64[n], sizes ≥ 0."""
        taken = np.zeros(len(positions), np.bool_)
        among = np.arange(len(positions)) if self.sample is None else np.flatnonzero(self.sample(file, positions))
        of_class = np.frexp(sizes[among].astype(np.float64))[1]
        order = np.argsort(of_class, kind="stable")
        sorted_class, count = of_class[order], np.bincount(of_class, minlength=_CLASSES)
        number = np.arange(len(order)) - (np.cumsum(count) - count)[sorted_class] + self.seen[sorted_class]
        self.seen += count
        before = number.astype(np.uint64) * self.fraction + self._shift[sorted_class]
        taken[among[order]] = (before + self.fraction) >> _32 > before >> _32
        return taken
