"""Split rows of prefix tasks into encoder and decoder sequences, as the arrays of seqio and T5X.

In this row, the inputs a b c have the targets x y, the inputs d e have the target z, and a dot is
padding:

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
"""The columns that `split` needs. `split` also reads loss_weights if the batch has them."""
NAMES = (
    *(f"encoder_{name}" for name in ("input_tokens", "segment_ids", "positions")),
    *(
        f"decoder_{name}"
        for name in ("target_tokens", "input_tokens", "segment_ids", "positions", "loss_weights")
    ),
)


def check_length(encoder_length: int | None) -> None:
    """Check that a dataset, mixture or batch has an encoder_length.

    Raises:
        DatasetError: If encoder_length is 0 or None.
    """
    if not encoder_length:
        raise DatasetError(
            "there is no encoder_length, so the end of the encoder sequence is unknown\n"
            "hint: build the dataset, or all datasets of a mixture, with the same"
            " packing.encoder_length and packing.decoder_length"
        )


def split(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Split a batch of rows into the encoder and decoder arrays of seqio.

    The encoder sequence gets the slots of each segment's prefix, and the decoder sequence gets all
    later slots of the segment. The padding between segments is removed. In both sequences, segments
    keep their ids, and the positions of each segment count from 0.

    decoder_input_tokens are the targets of the same segment, shifted right by one. They are 0 at
    the start of a segment and on padding. In a row, a target is predicted at the slot before the
    target. So decoder_loss_weights of a target are the loss_mask at that slot, multiplied by the
    loss_weights at that slot if the batch has this column.

    Args:
        batch: A batch with encoder_length E and the columns of READ, [B, T] each.

    Returns:
        The arrays of NAMES by name: encoder_… [B, E] and decoder_… [B, T − E]. They are int32,
        except decoder_loss_weights, which are float32.

    Raises:
        DatasetError: If the batch has no encoder_length, misses a column, or has media. It is also
            raised if a segment is not from a prefix task, or a row has too many inputs or targets.

    Example:
        >>> batch = ds.batch([0, 1], columns=encoder_decoder.READ)
        >>> arrays = encoder_decoder.split(batch)
    """
    check_length(batch.get("encoder_length"))
    if lacking := [name for name in READ if name not in batch]:
        raise DatasetError(
            f"the batch has no {', '.join(lacking)}, which an encoder and a decoder need\n"
            "hint: add these columns"
        )
    if MEDIA in batch:
        raise DatasetError(
            "the batch has media, whose positions refer to whole rows, not to encoder and"
            " decoder sequences\n"
            "hint: leave media out"
        )
    tokens, ids, ends, trained = (np.asarray(batch[name]) for name in READ)
    # Each slot gets the bounds of its segment. A segment needs at least one input and one target
    # (P24).
    position = np.arange(ids.shape[1])
    begin, end = runs(ids, position, np, lambda values: np.maximum.accumulate(values, axis=-1))
    is_wrong = (ids > 0) & ((ends <= begin) | (ends >= end))
    if is_wrong.any():
        row, slot = (int(i[0]) for i in np.nonzero(is_wrong))
        raise DatasetError(
            f"row {row} of the batch, segment {ids[row, slot]}: its prefix ends at position"
            f" {ends[row, slot]} of [{begin[row, slot]}, {end[row, slot]}), so it does not have"
            " inputs and then targets\n"
            "hint: build a dataset with only prefix tasks"
        )
    # The encoder sequence gets the prefixes of all segments, without the padding between them.
    length, is_input = batch["encoder_length"], position < ends
    rows, slots, column = _places_in("encoder", (ids > 0) & is_input, length, length)
    arrays = {
        "encoder_input_tokens": tokens[rows, slots],
        "encoder_segment_ids": ids[rows, slots],
        "encoder_positions": slots - begin[rows, slots],
    }
    encoder_arrays = _filled(arrays, rows, column, (len(ids), length))
    # The decoder sequence gets all other slots. Their positions count from the end of the prefix.
    decoder_length = ids.shape[1] - length
    rows, slots, column = _places_in("decoder", (ids > 0) & ~is_input, decoder_length, length)
    positions = slots - ends[rows, slots]
    # The slot before a target predicts the target, so that slot has the loss.
    weights = trained[rows, slots - 1] != 0
    if "loss_weights" in batch:
        weights = weights * np.asarray(batch["loss_weights"])[rows, slots - 1]
    # A decoder reads the target before the current one. The first target of a segment is predicted
    # from 0.
    arrays = {
        "decoder_target_tokens": tokens[rows, slots],
        "decoder_input_tokens": np.where(positions > 0, tokens[rows, slots - 1], 0),
        "decoder_segment_ids": ids[rows, slots],
        "decoder_positions": positions,
        "decoder_loss_weights": weights,
    }
    return encoder_arrays | _filled(arrays, rows, column, (len(ids), decoder_length))


def _places_in(
    side: str, belongs: np.ndarray, length: int, encoder_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the old and the new position of each slot that is copied to a new array.

    `belongs`, bool[B, T], is True at the k slots that are copied. `side` is "encoder" or "decoder",
    for error messages. The new array has `length` columns.

    Returns:
        For each copied slot its row, its slot in the row, and its column in the new array, int64[k]
        each. The row is the same in the new array.

    Raises:
        DatasetError: If more than `length` slots of a row are copied.
    """
    counts = belongs.sum(axis=1)
    if counts.max(initial=0) > length:
        row = int(np.argmax(counts > length))
        raise DatasetError(
            f"row {row} of the batch has {counts[row]} positions for the {side}, which fits"
            f" {length}, so the rows were not packed for encoder_length = {encoder_length}\n"
            "hint: build them with this encoder_length"
        )
    rows, slots = np.nonzero(belongs)
    return rows, slots, (np.cumsum(belongs, axis=1) - 1)[rows, slots]


def _filled(
    arrays: Mapping[str, np.ndarray], rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Return a dict that maps each name in `arrays` to a new array of the given shape.

    A new array has the values of `arrays`[name] at the indices (rows, columns), and 0 elsewhere.
    """
    new_arrays = {}
    for name, values in arrays.items():
        new_arrays[name] = np.zeros(
            shape, np.float32 if name == "decoder_loss_weights" else np.int32
        )
        new_arrays[name][rows, columns] = values
    return new_arrays
