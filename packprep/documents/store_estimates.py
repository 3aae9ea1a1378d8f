"""Estimate what a source's expressions use of a token store.

A store has the length and the kept fields of every document. So these estimates need no sample, and
their only error is the build's random choice.
"""

from dataclasses import replace

import numpy as np

from packprep.dataset.segments import Arrays
from packprep.documents.calibration import Estimates, highest_ratio
from packprep.documents.kept_fields import reader_of_part
from packprep.documents.sample_notes import SampleNotes
from packprep.documents.store import TokenStore
from packprep.sources.slices import PlannedSource, format_name

MOST_LENGTHS = 1 << 16
"""Maximum number of documents whose lengths represent those of a source."""


class _Lengths:
    """The lengths of a regular choice of documents: document 0, `step`, 2 · `step`, …"""

    def __init__(self) -> None:
        self.step, self._seen = 1, 0
        self._rows = np.zeros((0, 3))  # tokens, size, number of passes

    def add(self, rows: np.ndarray) -> None:
        """Add documents, float64[n, 3] with the columns tokens, size and number of passes."""
        numbers = np.arange(self._seen, self._seen + len(rows))
        self._seen += len(rows)
        self._rows = np.concatenate((self._rows, rows[numbers % self.step == 0]))
        while len(self._rows) > MOST_LENGTHS:
            self._rows, self.step = self._rows[::2], 2 * self.step

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (tokens, sizes, numbers of passes) of the chosen documents."""
        tokens, sizes, numbers = self._rows.T
        return tokens.astype(np.int64), sizes.astype(np.int64), numbers


def chosen_estimates(store: TokenStore, source: PlannedSource, estimates: Estimates) -> Estimates:
    """Return the estimates of the documents that a source's expressions use.

    Args:
        store: The token store of the source.
        source: The source, which has expressions.
        estimates: The stored estimates of all documents of the source.
    """
    passes = source.passes
    assert passes is not None
    store.check_fields(source)
    uses = passes.uses
    # Text bytes are summed per format, because each format has its own ratio.
    of_passes = {name: np.zeros(uses) for name in estimates.ratios}
    every, lengths = dict.fromkeys(estimates.ratios, 0.0), _Lengths()
    tokens = documents = 0.0
    judged = used_count = 0
    empty = set(passes.fields)
    for file, arrays, k in store.parts_of(source):
        begin, end = arrays["part_offsets"][k : k + 2].tolist()
        names = store.kept_fields(source.name)
        read_fields = reader_of_part(arrays, k, names, slice(0, end - begin))
        # A field that is null in every document is probably misspelled, so the notes report it.
        for _, columns in read_fields(passes.fields):
            empty -= {name for name, column in columns.items() if column.null_count < len(column)}
        numbers, bad = passes.numbers(end - begin, read_fields)
        # Documents that a build rejects are in no pass, so their number is 0.
        numbers[list(bad)] = 0
        numbers[_rejected(arrays, begin, end)] = 0
        n_tokens = np.diff(arrays["document_offsets"][begin : end + 1])
        n_bytes = arrays["text_bytes"][begin:end].astype(np.float64)
        name = format_name(*source.formats[file])
        every[name] += float(n_bytes.sum())
        # Pass p reads document d with probability min(max(r − p, 0), 1), where r is its number.
        of_passes[name] += np.clip(numbers - np.arange(uses)[:, None], 0, 1) @ n_bytes
        tokens, documents = tokens + float(numbers @ n_tokens), documents + float(numbers.sum())
        judged, used_count = judged + len(numbers), used_count + int((numbers > 0).sum())
        rows = np.stack((n_tokens, arrays["size"][begin:end], numbers), axis=1).astype(np.float64)
        # Documents without tokens are in no segment, so they have no length.
        lengths.add(rows[(numbers > 0) & (n_tokens > 0)])
    # The stored ratios describe all documents. Scale them to the documents that pass 0 reads.
    ratios, planned = {}, 0.0
    for name, ratio in estimates.ratios.items():
        used_fraction = of_passes[name][0] / every[name] if every[name] else 1.0
        ratios[name] = min(max(round(ratio * used_fraction), 1), highest_ratio(source))
        # The plan computes text bytes with the rounded ratios, so the rates use the same text
        # bytes.
        planned += every[name] * ratios[name] / ratio
    total = sum(of_passes.values(), np.zeros(uses))
    pass_shares = passes.shares(total)
    if pass_shares is not None:
        planned *= sum(pass_shares)
    of_lengths, sizes, of_numbers = lengths.columns
    return replace(
        estimates,
        ratios=ratios,
        tokens_per_byte=tokens / planned if tokens and planned else 1.0,
        document_bytes=float(total.sum()) / documents if documents else 0.0,
        sampling_error=0.0,
        lengths=of_lengths,
        length_weights=of_numbers * lengths.step,
        sizes=sizes,
        numbers=of_numbers,
        pass_shares=pass_shares,
        notes=SampleNotes(
            keys_keep=passes.keys_keep, judged=judged, kept=used_count, empty=frozenset(empty)
        ),
    )


def _rejected(arrays: Arrays, begin: int, end: int) -> np.ndarray:
    """Return the rejected documents in [begin, end), counted from `begin`."""
    low, high = np.searchsorted(arrays["rejected"], [begin, end]).tolist()
    rejected: np.ndarray = arrays["rejected"][low:high].astype(np.int64) - begin
    return rejected
