"""A row of prefix tasks as two rows, an encoder's and a decoder's: the arrays of seqio and T5X.

slots          a  b  c  x  y  d  e  z  .         segments  a b c → x y  and  d e → z
segment_ids    1  1  1  1  1  2  2  2  0
prefix_ends    3  3  3  3  3  7  7  7  0         T = 9, encoder_length 5

encoder_input_tokens    a  b  c  d  e            decoder_target_tokens   x  y  z  .
encoder_segment_ids     1  1  1  2  2            decoder_input_tokens    0  x  0  .
encoder_positions       0  1  2  0  1            decoder_segment_ids     1  1  2  0
                                                 decoder_positions       0  1  0  0
                                                 decoder_loss_weights    1  1  1  0
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.dataset.boundaries import runs
from packprep.dataset.rows import MEDIA
from packprep.errors import DatasetError

READ = ("tokens", "segment_ids", "prefix_ends", "loss_mask")
"""The columns that `split` needs; it reads loss_weights where there are some."""
NAMES = (
    *(f"encoder_{name}" for name in ("input_tokens", "segment_ids", "positions")),
    *(
        f"decoder_{name}"
        for name in ("target_tokens", "input_tokens", "segment_ids", "positions", "loss_weights")
    ),
)


def check_length(encoder_length: int | None) -> None:
    """DatasetError if this, of a dataset, mixture or batch, says that it has no encoder's side."""
    if not encoder_length:
        raise DatasetError(
            "there is no encoder_length, so where the encoder's side ends is not known: build the"
            " dataset with packing.encoder_length and packing.decoder_length; datasets of a mixture"
            " have to have the same"
        )


def split(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """seqio's arrays of a batch of numpy arrays: encoder_… int32[B, E], decoder_… int32[B, T − E],
    E its encoder_length.

    The encoder gets the slots of each segment's prefix, the decoder those behind it, both without
    the gaps of padding between segments. decoder_input_tokens are the targets shifted right inside
    each segment, 0 where one begins, and so is all padding. Segments keep their ids; positions
    count from 0 in each segment on either side. decoder_loss_weights, float32: loss_mask, times
    loss_weights where the batch has them, at the slot before the target. Raises DatasetError for a
    batch without encoder_length or one of the columns of READ, for one with places of media, for a
    segment of no prefix task, and for a row that has more inputs or targets than fit.
    """
    check_length(batch.get("encoder_length"))
    if lacking := [name for name in READ if name not in batch]:
        raise DatasetError(
            f"the batch has no {', '.join(lacking)}, which an encoder and a decoder need: name"
            " these, too"
        )
    if MEDIA in batch:
        raise DatasetError(
            "the batch has media, whose slots count along whole rows, and an encoder and a decoder"
            " have others: leave media out"
        )
    tokens, ids, ends, trained = (np.asarray(batch[name]) for name in READ)
    slot = np.arange(ids.shape[1])
    begin, end = runs(ids, slot, np, lambda values: np.maximum.accumulate(values, axis=-1))
    wrong = (ids > 0) & ((ends <= begin) | (ends >= end))
    if wrong.any():
        row, at = (int(i[0]) for i in np.nonzero(wrong))
        raise DatasetError(
            f"row {row} of the batch, segment {ids[row, at]}: its prefix ends at slot"
            f" {ends[row, at]} of [{begin[row, at]}, {end[row, at]}), so it has not inputs and then"
            " targets, as prefix tasks have; build a dataset of prefix tasks alone"
        )
    made = {}
    for side, of_side, length in (
        ("encoder", (ids > 0) & (slot < ends), batch["encoder_length"]),
        ("decoder", (ids > 0) & (slot >= ends), ids.shape[1] - batch["encoder_length"]),
    ):
        many = of_side.sum(axis=1)
        if many.max(initial=0) > length:
            row = int(np.argmax(many > length))
            raise DatasetError(
                f"row {row} of the batch has {many[row]} slots for the {side}, which takes"
                f" {length}: the rows were not packed for encoder_length ="
                f" {batch['encoder_length']}; build them with it"
            )
        rows, slots = np.nonzero(of_side)
        place = rows, (np.cumsum(of_side, axis=1) - 1)[rows, slots]
        first = (begin if side == "encoder" else ends)[rows, slots]
        columns = {"segment_ids": ids[rows, slots], "positions": slots - first}
        if side == "encoder":
            columns["input_tokens"] = tokens[rows, slots]
        else:
            columns["target_tokens"] = tokens[rows, slots]
            columns["input_tokens"] = np.where(slots > first, tokens[rows, slots - 1], 0)
            columns["loss_weights"] = trained[rows, slots - 1] != 0
            if "loss_weights" in batch:
                columns["loss_weights"] = (
                    columns["loss_weights"] * np.asarray(batch["loss_weights"])[rows, slots - 1]
                )
        for name, values in columns.items():
            array = np.zeros((len(ids), length), np.float32 if name == "loss_weights" else np.int32)
            array[place] = values
            made[f"{side}_{name}"] = array
    return {name: made[name] for name in NAMES}
