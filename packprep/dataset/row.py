"""Define `Row`, one row of a dataset: stored columns, and columns derived at their first use."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from packprep.dataset import attention
from packprep.dataset.batches import public_names
from packprep.dataset.boundaries import read_only
from packprep.dataset.row_media import Media, media_of
from packprep.dataset.rows import (
    AHEAD,
    MADE_FROM,
    SLOTS,
    RowSegments,
    fill,
    look_ahead,
    own_dtype,
)
from packprep.dataset.segments import HEADER
from packprep.dataset.shard import Shard
from packprep.forking import lazy

if TYPE_CHECKING:
    from packprep.dataset.loader import Dataset


class Row:
    """A row of a dataset. `Dataset.row` creates it.

    Its arrays are read-only. With io "mmap", a stored column is a view of the mapped shard. With io
    "pread", it is read from the file. All other columns are derived at their first use. If the
    shard is damaged, access to a column raises DatasetError, which names file and row.

        tokens        token_dtype[T]    loss_mask     uint8[T]     prefix_ends   int32[T]
        labels        token_dtype[T]    loss_weights  float32[T]   block_lengths int32[T]
        segment_ids   uint16[T]         position_ids  int32[T]     block_starts  int32[T]
        seq_idx       int32[T]
        labels_k, loss_mask_k, loss_weights_k     as in `Dataset.batch`
        cu_seqlens    int32[n_segments + 1]
        cu_seqlens_padded  int32[n_segments + 1], or None if the recipe's pad_seq_to_mult is 1
        segments      a dict of arrays [n_segments]: the columns of the segment header, such as
                      "task" and "prefix". "begin" has the first slot of each segment, and "end"
                      the slot after the segment
        media         a Media with the media spans of this row

    Attributes:
        dataset: The `Dataset` of the row.
        index: Index of the row in `dataset`.

    Example:
        >>> row = ds.row(0)
        >>> row.tokens[row.segments["begin"]]  # the first token of each segment
        >>> row.cu_seqlens, row.max_seqlen
    """

    # Derived columns are stored in `__dict__`.
    __slots__ = ("__dict__", "_opened", "_row", "dataset", "index", "tokens")
    dataset: "Dataset"
    index: int
    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    position_ids: np.ndarray
    loss_mask: np.ndarray
    loss_weights: np.ndarray
    prefix_ends: np.ndarray
    block_lengths: np.ndarray
    block_starts: np.ndarray
    seq_idx: np.ndarray
    labels_2: np.ndarray
    labels_3: np.ndarray
    labels_4: np.ndarray
    labels_5: np.ndarray
    labels_6: np.ndarray
    labels_7: np.ndarray
    labels_8: np.ndarray
    loss_mask_2: np.ndarray
    loss_mask_3: np.ndarray
    loss_mask_4: np.ndarray
    loss_mask_5: np.ndarray
    loss_mask_6: np.ndarray
    loss_mask_7: np.ndarray
    loss_mask_8: np.ndarray
    loss_weights_2: np.ndarray
    loss_weights_3: np.ndarray
    loss_weights_4: np.ndarray
    loss_weights_5: np.ndarray
    loss_weights_6: np.ndarray
    loss_weights_7: np.ndarray
    loss_weights_8: np.ndarray
    # (tokens of the shard, index of the shard's first row in the dataset, shard)
    _opened: tuple[Any, int, Shard]
    _row: int  # Index of the row in its shard.

    def __repr__(self) -> str:
        return f"Row({self.index} of {self.dataset!r})"

    if not TYPE_CHECKING:  # Type checkers know the columns by the declarations above.

        def __getattr__(self, name: str) -> np.ndarray:
            if name not in SLOTS:
                raise AttributeError(f"a Row has no {name!r}", name=name, obj=self)
            values = self._column(name)
            setattr(self, name, values)
            return values

    def __dir__(self) -> list[str]:
        return public_names({*super().__dir__(), *SLOTS})

    def _column(self, name: str) -> np.ndarray:
        """Return a slot column as a read-only array [T]: stored in the shard, or derived."""
        facts, shard = self.dataset.facts, self._shard
        if name in shard.layout and (name != "loss_mask" or facts.loss_on is None):
            return shard.row(name, self._row)
        self.dataset.checked_columns((name,))
        column = np.empty((1, facts.seq_length), own_dtype(name, facts.token_dtype))
        if name in AHEAD:
            look_ahead(self._segments, name, getattr(self, MADE_FROM[name])[None], column)
        else:
            fill(self._segments, name, column)
        return read_only(column[0])

    @property
    def _shard(self) -> Shard:
        return self._opened[2]

    @lazy
    def _segments(self) -> RowSegments:
        return RowSegments(self.dataset.facts, [(self._shard, self._row)])

    def _offsets(self, name: str) -> np.ndarray:
        # The access checks the boundaries.
        _ = self._segments.at
        return self._segments.parts(name, 1, 1)[0]

    @lazy
    def cu_seqlens(self) -> np.ndarray:
        return self._offsets("cu_seqlens")

    @lazy
    def cu_seqlens_padded(self) -> np.ndarray | None:
        return (
            self._offsets("cu_seqlens_padded")
            if "cu_seqlens_padded" in self._shard.layout
            else None
        )

    @property
    def n_segments(self) -> int:
        begin, end = self._shard.segment_range(self._row)
        return end - begin

    @property
    def n_tokens(self) -> int:
        """The number of slots of all segments, without padding."""
        return int(self.cu_seqlens[-1])

    @property
    def max_seqlen(self) -> int:
        """The number of slots of the longest segment, or 0 without segments."""
        return int(np.diff(self.cu_seqlens).max(initial=0))

    @property
    def cost(self) -> int:
        """The attention cost of the row, Σn² over its segments of n slots: the column row_cost."""
        return int(self._segments.costs()[0])

    @lazy
    def segments(self) -> dict[str, np.ndarray]:
        columns = {name: self._segments.column(name) for name in HEADER}
        physical = self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded
        return {
            **columns,
            "begin": physical[:-1],
            "end": read_only(physical[:-1] + np.diff(self.cu_seqlens)),
        }

    @lazy
    def media(self) -> Media:
        return media_of([(self._shard, self._row)], self.dataset.kinds)

    @lazy
    def weighted_ranges(self) -> list[tuple[int, int, int, float]]:
        """Return the trained ranges with a weight other than 1.

        Each range is a tuple (segment, first slot, end slot, weight). The end slot is the first
        slot after the range. The slots of a range contain the tokens that are predicted. In
        next-token tasks, each token is predicted at the slot before.
        """
        if "trained_weights" not in self._shard.layout:
            return []
        segment, ranges, parts = self._segments.trained()
        weights = self._segments.weights_of_ranges(parts)
        begins = self._segments.at[segment]
        columns = (segment, begins + ranges[:, 0], begins + ranges[:, 1], weights)
        return [
            entry
            for entry in zip(*(column.tolist() for column in columns), strict=True)
            if entry[3] != 1
        ]

    def micro_sequences(self, size: int) -> Iterator[tuple[slice, attention.MicroSequence]]:
        """Split the row into windows of at most `size` slots, in order.

        No window ends inside a two-way prefix, see `attention.cut_points`.

        Args:
            size: Maximum number of slots of a window.

        Yields:
            The slots of a window as a slice, and its `MicroSequence`. The queries are the slots of
            the window. The keys are the slots from `first_document_begin` to the window's end.

        Raises:
            ArgumentError: If a two-way prefix has more than `size` slots.
        """
        begin, prefix = 0, self.segments["prefix"]
        for end in attention.cut_points(self, size).tolist():
            yield (
                slice(begin, end),
                attention.micro_sequence(
                    self.cu_seqlens, begin, end, prefix, self.cu_seqlens_padded
                ),
            )
            begin = end
