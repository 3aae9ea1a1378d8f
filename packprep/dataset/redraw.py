"""Redraw: the in-place segments of rows noised anew from their labels, in every epoch but 0, by the law of `noise.py`.

    stored rows ─ labels ─► tokens of in-place segments ─ noise.LAWS[objective](…, epoch) ─► tokens, loss_mask, weights

Keys are the segments', so that what an epoch gives depends neither on the batch nor on the rank that asks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from packprep.dataset import noise
from packprep.dataset.laws import Law, Laws
from packprep.dataset.segments import Place, Segments, spread
from packprep.errors import DatasetError

_EPOCHS = 1 << 32  # chance repeats after so many
_COLUMNS = ("task", "key", "start", "tokens", "loss_weight")


class Redrawn(NamedTuple):
    """Rows of one epoch each, [B, T]."""

    tokens: np.ndarray  # token_dtype
    loss_mask: np.ndarray  # uint8
    loss_weights: np.ndarray | None  # float32: the weight of each slot's segment or block, whether it is trained or not


class _Segments(NamedTuple):
    """The segments of a batch's rows, [m] each."""

    row: np.ndarray  # int64: place in the batch
    at: np.ndarray  # int64: first slot in the flat batch
    slots: np.ndarray  # int64
    task: np.ndarray
    key: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    weight: np.ndarray

    def at_slots(self, values: np.ndarray, elsewhere, size: int) -> np.ndarray:
        """[size]: each slot's value of its segment, and `elsewhere` between them."""
        return spread(self.at, self.slots, values, elsewhere, size)


def redrawn(
    laws: Laws,
    places: Sequence[Place],
    epochs: np.ndarray,
    seq_length: int,
    weighted: bool,
    out: Mapping[str, np.ndarray] | None = None,
) -> Redrawn:
    """Rows (shard, row in it), at least one, each in its epoch: int64[B].

    weighted: whether loss_weights are wanted. out: arrays to write tokens and loss_mask into, C-contiguous and of the
    stored dtypes. DatasetError where a row's header does not fit the row.
    """
    shape = (len(places), seq_length)
    segments = _segments(places, seq_length)
    if segments.task.max(initial=0) >= len(laws.by_task):
        raise DatasetError(
            f"redraw: segment_task {segments.task.max()} is beyond the manifest's {len(laws.by_task)} tasks"
        )
    in_place = laws.in_place[segments.task]
    out = out or {}
    tokens = out["tokens"] if "tokens" in out else np.empty(shape, places[0][0].layout["tokens"][0])
    loss_mask = out["loss_mask"] if "loss_mask" in out else np.empty(shape, np.uint8)
    if in_place.all():  # padding is the same in both
        for i, (shard, row) in enumerate(places):
            tokens[i] = shard.row("labels", row)
        loss_mask[...] = 0
    else:
        labels = np.empty_like(tokens)
        for i, (shard, row) in enumerate(places):
            labels[i], tokens[i] = shard.row("labels", row), shard.row("tokens", row)
            loss_mask[i] = shard.row("loss_mask", row)
        anew = segments.at_slots(in_place, False, tokens.size).reshape(shape)
        np.copyto(tokens, labels, where=anew)
        np.copyto(loss_mask, 0, where=anew)
    weight, by_block = segments.weight.copy(), []
    may = _may(places, segments, tokens.size)
    for t in np.unique(segments.task[in_place]):
        law = laws.by_task[t]
        assert law is not None
        of_task = np.flatnonzero(segments.task == t)
        epoch_of = epochs[segments.row[of_task]] % _EPOCHS
        for epoch in np.unique(epoch_of):
            which = of_task[epoch_of == epoch]
            target = _target(laws, law, segments, which, may, tokens, loss_mask)
            if law.objective == "uniform_diffusion":
                _check_labels(places, tokens, len(laws.ids.rank))
            noised = noise.LAWS[law.objective](int(t), law.parameters, law.resolved, laws.ids, target, int(epoch))
            weight[which] = noised.weight
            if noised.blocks is not None:
                by_block.append((which, law, noised.blocks[0], noised.blocks[2]))
    if not weighted:
        return Redrawn(tokens, loss_mask, None)
    weights = segments.at_slots(weight, 0, tokens.size)
    for which, law, count, values in by_block:
        _put_block_weights(weights, segments, which, law.parameters["block_length"], count, values)
    return Redrawn(tokens, loss_mask, weights.reshape(shape))


def _check_labels(places: Sequence[Place], labels: np.ndarray, vocab_size: int) -> None:
    """DatasetError for a label that is no id: flips look it up."""
    wrong = (labels < 0) | (labels >= vocab_size)
    if wrong.any():
        i, slot = (int(n) for n in np.argwhere(wrong)[0])
        shard, row = places[i]
        raise DatasetError(
            f"{shard.path}: row {row}, slot {slot}: {labels[i, slot]} is no id below vocab_size {vocab_size}; "
            "`packprep verify` says where else"
        )


def _segments(places: Sequence[Place], seq_length: int) -> _Segments:
    """The header of the rows' segments."""
    segments = Segments(places, seq_length)
    return _Segments(segments.row, segments.at, segments.slots, *(segments.column(name) for name in _COLUMNS))


def _may(places: Sequence[Place], segments: _Segments, size: int) -> np.ndarray | None:
    """uint8[size]: the slots inside trained ranges; None where shards have none."""
    with_ranges = ["trained_ranges" in shard.layout for shard, _ in places]
    if not any(with_ranges):
        return None
    many, ranges = [], []
    for has, (shard, row) in zip(with_ranges, places, strict=True):
        if not has:
            raise DatasetError(f"{shard.path}: it has no trained_ranges, though other shards have")
        begin, end = shard.segment_range(row)
        offsets = shard.part("trained_offsets", row, begin, end + 1)
        n_ranges = shard.layout["trained_ranges"][1][0]
        if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > n_ranges:
            raise DatasetError(
                f"{shard.path}: row {row}: trained_offsets do not ascend; `packprep verify` says where else"
            )
        many.append(np.diff(offsets))
        ranges.append(shard.part("trained_ranges", row, int(offsets[0]), int(offsets[-1])))
    of_segment = np.repeat(np.arange(len(segments.at)), np.concatenate(many))
    found = np.concatenate(ranges).astype(np.int64)
    begins, ends = found[:, 0], found[:, 1]
    if ((begins < 0) | (ends <= begins) | (ends > segments.slots[of_segment])).any():
        raise DatasetError("redraw: a trained range lies outside its segment; `packprep verify` says which")
    edges = np.zeros(size + 1, np.int8)
    edges[segments.at[of_segment] + begins] += 1
    edges[segments.at[of_segment] + ends] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8).view(np.uint8)


def _target(
    laws: Laws,
    law: Law,
    segments: _Segments,
    which: np.ndarray,
    may: np.ndarray | None,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
) -> noise.Target:
    """The candidates of one task's segments, as render finds them: the body and, unless noise_eos is off, eos."""
    half = segments.slots[which] // law.copies
    before = ((segments.start[which] == 0) & laws.prepend_bos).astype(np.int64) + law.mode
    count = half - before
    if not law.parameters.get("noise_eos", True) and (may is None or law.copies > 1):
        count = np.minimum(count, segments.tokens[which])  # where ranges say what may be noised, they leave eos out
    if (count < 0).any():
        raise DatasetError(
            "redraw: a segment has fewer slots than its bos and mode token; `packprep verify` says which"
        )
    own = noise.Candidates(segments.key[which], segments.at[which] + before, count, segments.row[which])
    return noise.Target(own, before, half, may, tokens.reshape(-1), loss_mask.reshape(-1))


def _put_block_weights(weights, segments: _Segments, which, block_length: int, count, values) -> None:
    """Put each block's weight on its slots of x_t."""
    length = segments.slots[which] // 2
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    slots = np.minimum(np.repeat(length, count) - number * block_length, block_length)
    at = np.repeat(segments.at[which] - (np.cumsum(length) - length), length) + np.arange(int(length.sum()))
    weights[at] = np.repeat(values, slots)
