"""One segment, whole: its header, its slots as text, and beside them the document's tokens that it was made of."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.building.output import Output
from packprep.errors import ArgumentError, PackprepError
from packprep.inspection.opened import Opened, opened
from packprep.inspection.originals import originals, slots_of_tokens, stored_of
from packprep.inspection.row import place_of, row_number, segment_of


def describe_segment(
    directory: str | os.PathLike | Output, row: int, number: int, moved: Mapping[str, str], from_plan: bool = False
) -> dict[str, Any]:
    """Segment `number` of a row as plain values; it counts from 1, as segment_ids do. row, moved, from_plan: as in
    `describe_row`.

    Gives the row's place, `segment` as in a row with `original` (the document's tokens as pieces {text, ids, slots, kind};
    null where the dataset's plan cannot be used here, and `not_restored` says why), `fits` (whether what stands between
    them is what the header says) and `spans` of span corruption: [{sentinel, tokens: [begin, end) of the document,
    input_slot, target_slot, text}].
    Raises ArgumentError for a row or a segment that there is not, DatasetError for a damaged shard.
    """
    with opened(directory, moved, from_plan) as data:
        row = row_number(data, row)
        in_shard = data.place(row)
        with data.shard(in_shard[0]) as shard:
            view = data.dataset.row(row)
            if not 1 <= number <= view.n_segments:
                raise ArgumentError(
                    f"segment {number}: row {row} of {data.near.out} has {view.n_segments} segments; "
                    f"give 1 … {view.n_segments}, as segment_ids and `packprep inspect --row {row}` number them"
                )
            chosen = shard.segment_range(in_shard[1])[0] + number - 1
            described = segment_of(data, view, number - 1, data.rebuilt(in_shard[0], np.array([chosen]))[0])
            restored = _restored(data, shard, chosen, described)
            return {**place_of(data, row), "segments": view.n_segments, "segment": {**described, **restored}}


def _restored(data: Opened, shard: Any, chosen: int, described: Mapping[str, Any]) -> dict[str, Any]:
    job = data.job
    if isinstance(job, PackprepError):
        return {"original": None, "not_restored": str(job), "fits": None, "spans": []}
    arrays, stored = shard.arrays, stored_of(job, shard)
    found = originals(job, arrays, stored, np.array([chosen]))
    if (
        not found.fits[0] and described["objective"] == "fill_in_the_middle"
    ):  # the rest is where its role tokens are not
        return {"original": None, "not_restored": "its role tokens are not there", "fits": False, "spans": []}
    slots = slots_of_tokens(job, arrays, stored, chosen, found.ids)
    pieces, at = [], 0
    for piece in data.texts.pieces(found.ids.tolist()):
        end = at + len(piece.ids)
        pieces.append({"text": piece.text, "ids": piece.ids, "slots": slots[at:end].tolist(), "kind": piece.kind})
        at = end
    spans = []
    if described["objective"] == "span_corruption":
        row = int(stored.row[chosen])
        inputs_end = described["begin"] + described["prefix"]
        body = described["begin"] + int(stored.bos[chosen]) + job.tasks[arrays["segment_task"][chosen]].mode
        spans = _spans(data, arrays["tokens"][row], found.ids, slots, inputs_end, body, described["start"])
    return {"original": pieces, "not_restored": None, "fits": bool(found.fits[0]), "spans": spans}


def _spans(
    data: Opened, row: np.ndarray, ids: np.ndarray, slots: np.ndarray, inputs_end: int, body: int, start: int
) -> list[dict[str, Any]]:
    """The runs of tokens that stand in the targets, each with its sentinel's two slots. row: [seq_length] tokens."""
    noise = slots >= inputs_end
    bounds = [0, *(np.flatnonzero(np.diff(noise)) + 1).tolist(), len(noise)]
    spans = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        if noise[begin]:
            input_slot = int(slots[begin - 1]) + 1 if begin else body
            target_slot = int(slots[begin]) - 1
            (sentinel,) = data.texts.pieces([int(row[target_slot])])
            text = "".join(piece.text for piece in data.texts.pieces(ids[begin:end].tolist()))
            spans.append(
                {
                    "sentinel": sentinel.text,
                    "tokens": [start + begin, start + end],
                    "input_slot": input_slot,
                    "target_slot": target_slot,
                    "text": text,
                }
            )
    return spans
