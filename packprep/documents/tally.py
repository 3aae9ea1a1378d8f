"""How many documents of a plan's sample are bad, and how many of all documents that lets expect.

Documents near each other are often alike. So the bound counts windows or pieces as independent, and
not documents.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from packprep.documents.reading import is_bad
from packprep.sources.formats import Reject

UNLIKELY = 1e-4
"""The probability that a sample has as many bad documents by chance as its bound says."""


@dataclass
class Tally:
    """The documents of a source that were looked at.

    looked_at: how many. reasons: why some are bad. units: (places, those in bad documents) of each
    window or piece. totals: (all documents of the source, bad ones), about. is_whole: whether all
    were looked at. first_path, example: the file of the first bad one, and what is wrong there.
    """

    looked_at: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    units: list[tuple[int, int]] = field(default_factory=list)
    totals: tuple[float, float] = (0.0, 0.0)
    is_whole: bool = True
    first_path: str = ""
    example: str = ""

    def count(self, documents: int, rejects: Sequence[Reject], path: str) -> int:
        """Count documents, the rejects among them, and return how many of these are bad."""
        bad = [reject for reject in rejects if is_bad(reject.reason)]
        self.looked_at += documents
        self.reasons.update(reject.reason for reject in bad)
        if bad and not self.example:
            first = bad[0]
            place = f": document at {first.position}" if first.position >= 0 else ""
            self.first_path = path
            self.example = f"{path}{place}: {first.reason}: {first.detail}"
        return len(bad)

    def add_unit(self, places: int, bad: int, documents: float, bad_documents: float) -> None:
        """Add a window or piece, and what its places stand for."""
        self.units.append((places, bad))
        self.totals = self.totals[0] + documents, self.totals[1] + bad_documents

    def join(self, kind: "Tally", used: float) -> None:
        """Add the files of one kind, which have about `used` documents that are not bad."""
        documents, bad = kind.totals
        scale = used / (documents - bad) if documents > bad and not kind.is_whole else 1.0
        self.totals = self.totals[0] + scale * documents, self.totals[1] + scale * bad
        self.units += kind.units
        self.looked_at += kind.looked_at
        self.reasons += kind.reasons
        self.is_whole &= kind.is_whole
        self.first_path = self.first_path or kind.first_path
        self.example = self.example or kind.example

    def least_bad(self, by_chance: bool) -> float:
        """Return how many documents are bad at least, but for a probability of UNLIKELY.

        by_chance: whether chance decides which of all documents a build reads.
        """
        if self.is_whole and not by_chance:
            return self.totals[1]
        sizes, bad = np.array(self.units, np.float64).reshape(-1, 2).T
        if not bad.any():
            return 0.0
        part = bad.sum() / sizes.sum()
        independent = sizes.sum() if self.is_whole else sizes.sum() ** 2 / (sizes**2).sum()
        bound = self.totals[1] * lower_bound(float(part), float(independent)) / float(part)
        # There may be twice as many documents as it seems.
        met = 0.0 if by_chance else self.reasons.total() / 2
        return max(bound, met)


def lower_bound(part: float, count: float) -> float:
    """Return the least part of all where `count` independent ones have `part`, by Chernoff's
    bound."""
    low, high = 0.0, part
    for _ in range(50):
        middle = (low + high) / 2
        others = (1 - part) * math.log((1 - part) / (1 - middle)) if part < 1 else 0.0
        far = part > 0 and count * (part * math.log(part / middle) + others) > -math.log(UNLIKELY)
        low, high = (middle, high) if far else (low, middle)
    return low
