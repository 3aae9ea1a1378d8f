"""Select the documents of a calibration sample by the expressions of their source."""

from collections.abc import Sequence
from functools import partial
from importlib import import_module

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.sources.formats.jsonl import Lines, fields_of
from packprep.sources.passes import ByFields, FieldColumns, Passes, ReadFields

FEW_KEPT = 200
"""If the expressions of a source keep fewer sampled documents, a precise sample uses all it keeps.

If a precise sample has fewer too, a warning says so.
"""


class SampledPasses(ByFields):
    """A `ByFields` that keeps each sampled document that a pass may use, and counts documents.

    Attributes:
        few: Whether an earlier sample kept few documents, so that this one uses all that it keeps.
        judged: Number of sampled documents.
        kept: Number of sampled documents with a number above 0.
        empty: The fields that were null or missing in every sampled record.
        unjudged: Number of sampled documents that cannot be judged.
        fault: Why the first of them cannot be judged, or "".
        known: Maps a position in the file that is read to the number of passes of its document.
    """

    def __init__(self, passes: Passes, few: bool = False):
        """Create a selector for the expressions of a source. `few` is as the attribute."""
        # Loading pyarrow takes long, and must not count as reading time.
        import_module("packprep.sources.formats.line_fields")
        super().__init__(passes, 0, lambda file: np.uint64(0))
        self.few = few
        self.judged = self.kept = self.unjudged = 0
        self.fault = ""
        self.empty = set(passes.fields)
        self.known: dict[int, float] = {}

    def __call__(
        self, file: int, positions: np.ndarray, read_fields: ReadFields, is_own: np.ndarray
    ) -> np.ndarray:
        """Return which documents a pass may use, bool[n]. The arguments are as in `ByFields`."""

        def noted(names: Sequence[str]) -> Sequence[FieldColumns]:
            every = read_fields(names)
            for _, columns in every:
                names_with_values = [
                    name for name, column in columns.items() if column.null_count < len(column)
                ]
                self.empty.difference_update(names_with_values)
            return every

        numbers = self.numbers(positions, noted)
        is_kept = numbers > 0
        self.judged += int(is_own.sum())
        self.kept += int((is_own & is_kept).sum())
        self.unjudged += len(self.bad)
        self.fault = self.fault or next(iter(self.bad.values()), "")
        chosen = zip(positions[is_kept].tolist(), numbers[is_kept].tolist(), strict=True)
        self.known.update(chosen)
        return is_kept

    def leave_out(self, file: int, positions: np.ndarray) -> None:
        """Count documents that no pass uses. The arguments are as in `ByFields`."""
        self.judged += len(positions)
        self.empty.clear()  # The fields were not read.

    def of_lines(self, lines: Sequence[bytes], positions: Sequence[int]) -> np.ndarray:
        """Return the number of passes of each JSON line, float64[n]. `bad` is set, as in a call."""
        sizes = np.array([len(line) for line in lines], np.int64)
        starts = offsets_of(sizes)[:-1]
        line_positions = np.array(positions, np.int64)
        sampled_lines = Lines(b"".join(lines), line_positions, starts, sizes)
        # Positions are numbers of lines here, so positions of an earlier call are forgotten.
        self.known.clear()
        self(
            0,
            line_positions,
            partial(fields_of, sampled_lines),
            np.ones(len(line_positions), np.bool_),
        )
        return np.array([self.known.get(position, 0.0) for position in positions])
