"""Find the slots of rows that belong to an image, audio or video.

    row 0    … <begin> <slot> <slot> <slot> <end> …   row 1   … <slot> <slot> …
    offsets  0  1  2        slot  5 17        tokens  3 2        refs  cat.jpg  dog.png

A trainer requests the column "media" and loads the file that each reference names. It puts the
embeddings into slots `slot` … `slot + tokens − 1` of the row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packprep.dataset.boundaries import descents, owners, ranks
from packprep.errors import DatasetError

if TYPE_CHECKING:
    from packprep.dataset.shard import Shard


@dataclass(frozen=True, eq=False)
class Media:
    """The media spans of one or more rows, as flat arrays in the order of rows and slots.

    A Media is also a sequence of rows: media[i] is a Media with only the spans of row i.

    Attributes:
        offsets: int64[rows + 1]. The spans of row i are offsets[i] … offsets[i + 1] − 1.
        slot: int32[k], the first slot of each span in its row.
        tokens: int32[k], the number of slots of each span.
        kind: uint16[k], the kind of each span as an index into `names`.
        ref_offsets: int64[k + 1]. The reference of span i is bytes ref_offsets[i] …
            ref_offsets[i + 1] − 1 of `ref`.
        ref: uint8[r], all references in UTF-8, joined. `refs` has them as strings.
        names: The names of the kinds of media.

    Example:
        >>> media = ds.batch([0, 1], columns=["tokens", "media"])["media"]
        >>> media.refs, media.kinds
        (['cat.jpg', 'dog.png'], ['image', 'image'])
    """

    offsets: np.ndarray  # int64[rows + 1]
    slot: np.ndarray  # int32[k]
    tokens: np.ndarray  # int32[k]
    kind: np.ndarray  # uint16[k]
    ref_offsets: np.ndarray  # int64[k + 1]
    ref: np.ndarray  # uint8[r]
    names: tuple[str, ...]

    @property
    def refs(self) -> list[str]:
        """The reference of each span, as written in its document, such as a file name."""
        data, bounds = self.ref.tobytes(), self.ref_offsets.tolist()
        return [
            data[begin:end].decode(errors="replace")
            for begin, end in zip(bounds, bounds[1:], strict=False)
        ]

    @property
    def row(self) -> np.ndarray:
        """The row of each span as an index among the rows of this Media, int64[k]."""
        return owners(np.diff(self.offsets))

    @property
    def kinds(self) -> list[str]:
        """The name of each span's kind, such as "image"."""
        return [self.names[kind] for kind in self.kind.tolist()]

    def flat_slots(self, seq_length: int) -> np.ndarray:
        """Return all slots of the spans in the flat rows, int64[Σ tokens], in ascending order.

        Each row has `seq_length` slots. In a batch, tokens.reshape(-1) has placeholder tokens at
        these indices. A model replaces the embeddings of the placeholder tokens with the embeddings
        of the media.
        """
        return np.repeat(self.row * seq_length + self.slot, self.tokens) + ranks(self.tokens)

    def __repr__(self) -> str:
        counts = np.bincount(self.kind, minlength=len(self.names)).tolist()
        kinds = [f"{n} {name}" for n, name in zip(counts, self.names, strict=True) if n]
        return f"Media({', '.join(kinds) or 'none'} in {len(self)} rows)"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> "Media":
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of the media of {len(self)} rows")
        begin, end = self.offsets[row % len(self) :][:2].tolist()
        begin_byte, end_byte = self.ref_offsets[[begin, end]].tolist()
        slot, tokens, kind = (column[begin:end] for column in (self.slot, self.tokens, self.kind))
        # The references of the result count from its own first byte.
        bounds = self.ref_offsets[begin : end + 1] - begin_byte
        return Media(
            np.array([0, end - begin]),
            slot,
            tokens,
            kind,
            bounds,
            self.ref[begin_byte:end_byte],
            self.names,
        )

    def __iter__(self) -> Iterator["Media"]:
        return (self[row] for row in range(len(self)))


def kinds_of(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the kinds of media in a dataset, such as ("audio", "image").

    The array media_kind of a shard has indices into this tuple.
    """
    specials = manifest["recipe"].get("specials")
    media = specials.get("media") if isinstance(specials, dict) else None
    return tuple(sorted(media)) if isinstance(media, dict) else ()


def media_of(places: Sequence[tuple["Shard", int]], names: tuple[str, ...]) -> Media:
    """Return the media spans of rows.

    Args:
        places: A tuple for each row: its shard, and the row's index in the shard.
        names: The names of the dataset's kinds of media.

    Returns:
        The `Media` of these rows.

    Raises:
        DatasetError: If the arrays are damaged. The message names file and row.
    """
    return joined([_of_row(shard, row, names) for shard, row in places], names)


def _of_row(shard: "Shard", row: int, names: tuple[str, ...]) -> Media:
    if "media_offsets" not in shard.layout:
        # A row without spans has the offsets 0 0.
        return replace(joined([], names), offsets=np.zeros(2, np.int64))
    begin, end = shard.segment_range(row)
    own_offsets = shard.part("media_offsets", row, begin, end + 1)
    # The offsets are checked first, because they decide which spans are read.
    begin_span, end_span, span_count = (
        int(own_offsets[0]),
        int(own_offsets[-1]),
        shard.layout["media_slot"][1][0],
    )
    is_valid = 0 <= begin_span <= end_span <= span_count and not descents(own_offsets).any()
    if is_valid:
        slot, tokens, kind = (
            shard.part(f"media_{name}", row, begin_span, end_span)
            for name in ("slot", "tokens", "kind")
        )
        bounds = shard.part("media_ref_offsets", row, begin_span, end_span + 1)
        # Damaged slots could overflow int32, so ends are computed in int64.
        ends = slot.astype(np.int64) + tokens
        is_valid = not (
            (slot < 0) | (tokens < 1) | (ends > shard.seq_length) | (kind >= len(names))
        ).any()
        # Spans do not overlap, and are in slot order (P25).
        is_valid &= not (ends[:-1] > slot[1:]).any()
        # The references must be inside media_ref, because the bounds select its bytes.
        is_valid &= (
            bounds[0] >= 0
            and not descents(bounds).any()
            and bounds[-1] <= shard.layout["media_ref"][1][0]
        )
    if not is_valid:
        problem = "its media spans are not inside the row, in order, with their refs"
        raise DatasetError(
            f"{shard.path}: row {row}: {problem}\nhint: run `packprep verify` to find all faults"
        )
    # Spans and references of the result count from this row, not from the shard.
    refs = shard.part("media_ref", row, int(bounds[0]), int(bounds[-1]))
    return Media(
        np.array([0, end_span - begin_span]), slot, tokens, kind, bounds - bounds[0], refs, names
    )


def joined(
    parts: Sequence[Media], names: tuple[str, ...], order: np.ndarray | None = None
) -> Media:
    """Join several `Media` objects into one.

    Args:
        parts: The objects to join.
        names: The names of all kinds of media in the parts.
        order: int64[rows]. Row i, counted through the parts in their order, gets the index order[i]
            in the result. None keeps the rows in order.

    Returns:
        The `Media` of all rows.
    """
    if order is not None:
        # Row i gets the index order[i], so argsort gives the row at each index.
        rows = [row for media in parts for row in media]
        parts = [rows[i] for i in np.argsort(order).tolist()]
    # Datasets of a mixture may have different kinds, so the kinds are numbered again.
    number = {name: i for i, name in enumerate(names)}
    kinds = [
        np.array([number[name] for name in media.names], np.uint16)[media.kind] for media in parts
    ]
    # A leading 0 makes the running sums offsets.
    span_counts = np.concatenate(
        [np.zeros(1, np.int64), *(np.diff(media.offsets) for media in parts)]
    )
    bytes_of = np.concatenate(
        [np.zeros(1, np.int64), *(np.diff(media.ref_offsets) for media in parts)]
    )
    slot, tokens = (
        np.concatenate([np.zeros(0, np.int32), *(getattr(media, name) for media in parts)])
        for name in ("slot", "tokens")
    )
    ref = np.concatenate([np.zeros(0, np.uint8), *(media.ref for media in parts)])
    kind = np.concatenate([np.zeros(0, np.uint16), *kinds])
    return Media(np.cumsum(span_counts), slot, tokens, kind, np.cumsum(bytes_of), ref, names)
