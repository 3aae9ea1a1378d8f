"""Count the bad documents of a calibration sample, and estimate how many a build will read.

Nearby documents are often similar. Therefore the estimate treats windows or splits as independent
samples, but not the documents within a window or split.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from packprep.documents.reading import is_bad
from packprep.sources.formats import Reject

UNLIKELY = 1e-4
"""The probability that a lower bound exceeds the true value."""


@dataclass
class Tally:
    """Counts of a source's sampled documents, and of the bad documents among them.

    Attributes:
        looked_at: Number of sampled documents.
        reasons: Number of bad documents per reason.
        units: (places, bad) for each sampled window or split. `places` is the number of sampled
            positions of a window, or of sampled documents of a split. `bad` is the number of
            positions in bad documents, or of bad documents.
        totals: (documents, bad): the estimated numbers of all documents and of all bad documents in
            the source.
        is_whole: Whether all documents of the source were sampled.
        first_path: Path or URL of the file with the first bad document, or "".
        example: Message part about the first bad document, with its location and reason, or "".
        grouped: Number of sampled records with a value to group by.
    """

    looked_at: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    units: list[tuple[int, int]] = field(default_factory=list)
    totals: tuple[float, float] = (0.0, 0.0)
    is_whole: bool = True
    first_path: str = ""
    example: str = ""
    grouped: int = 0

    def count(self, documents: int, rejects: Sequence[Reject], path: str) -> int:
        """Count documents, and return how many of their rejects are bad.

        Args:
            documents: Number of sampled documents, including the rejects.
            rejects: The rejected documents among them.
            path: Path or URL of the file.
        """
        bad = [reject for reject in rejects if is_bad(reject.reason)]
        self.looked_at += documents
        self.reasons.update(reject.reason for reject in bad)
        if bad and not self.example:
            first_reject = bad[0]
            place = f": document at {first_reject.position}" if first_reject.position >= 0 else ""
            self.first_path = path
            self.example = f"{path}{place}: {first_reject.reason}: {first_reject.detail}"
        return len(bad)

    def add_unit(self, places: int, bad: int, documents: float, bad_documents: float) -> None:
        """Add the counts of a window or split.

        Args:
            places: Number of sampled positions or documents.
            bad: Number of these positions that are in bad documents, or of bad documents.
            documents: Number of documents that the sampled documents represent.
            bad_documents: Number of bad documents that the sampled bad documents represent.
        """
        self.units.append((places, bad))
        self.totals = self.totals[0] + documents, self.totals[1] + bad_documents

    def join(self, kind: "Tally", used: float) -> None:
        """Add the counts in `kind`, which is the tally for files of one format.

        `used` is the estimated number of usable documents in the source's files of this format. If
        only a part of the documents was sampled, the totals of `kind` are scaled so that they agree
        with `used`.
        """
        documents, bad = kind.totals
        scale = used / (documents - bad) if documents > bad and not kind.is_whole else 1.0
        self.totals = self.totals[0] + scale * documents, self.totals[1] + scale * bad
        self.units += kind.units
        self.looked_at += kind.looked_at
        self.reasons += kind.reasons
        self.is_whole &= kind.is_whole
        self.first_path = self.first_path or kind.first_path
        self.example = self.example or kind.example
        self.grouped += kind.grouped

    def least_bad(self, by_chance: bool) -> float:
        """Return a lower bound for the number of bad documents that a build reads.

        The bound is too high with a probability of about UNLIKELY at most. If all documents were
        sampled, it is the exact number. `by_chance` says whether the build reads only a random
        subset of the documents. The result is then only a bound.
        """
        if self.is_whole and not by_chance:
            return self.totals[1]
        sizes, bad = np.array(self.units, np.float64).reshape(-1, 2).T
        if not bad.any():
            return 0.0
        fraction = bad.sum() / sizes.sum()
        # Units of unequal size count as fewer independent samples, as in Kish's effective sample
        # size.
        independent = sizes.sum() if self.is_whole else sizes.sum() ** 2 / (sizes**2).sum()
        bound = self.totals[1] * lower_bound(float(fraction), float(independent)) / float(fraction)
        # The real number of documents may be twice the estimate, so only half of the sampled bad
        # documents count.
        met = 0.0 if by_chance else self.reasons.total() / 2
        return max(bound, met)


def lower_bound(fraction: float, count: float) -> float:
    """Return a lower bound for a fraction that was estimated as `fraction`.

    The estimate is from `count` independent samples. The result is Chernoff's bound, which is too
    high with a probability of at most UNLIKELY.
    """
    low, high = 0.0, fraction
    # The divergence grows as `middle` falls below `fraction`, so bisection finds the bound.
    for _ in range(50):
        middle = (low + high) / 2
        other_term = (
            (1 - fraction) * math.log((1 - fraction) / (1 - middle)) if fraction < 1 else 0.0
        )
        far = fraction > 0 and count * (
            fraction * math.log(fraction / middle) + other_term
        ) > -math.log(UNLIKELY)
        low, high = (middle, high) if far else (low, middle)
    return low
