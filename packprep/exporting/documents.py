"""Segments → the documents that they were made of: [bos]? content [eos]?, without what objectives put in between.

A document's segments lie in one shard, so a shard gives whole documents:

    rows of a shard      │ b₂ sentinel … │ a₁ … │ b₁ … │      segments in keyed order, corrupted
    inverted and sorted    a₁  b₁  b₂                          content tokens, by source, file, document, use and start
    documents              a₁ eos │ b₁ b₂ eos

What the recipe cut off or left out is not in the dataset. A segment that does not begin where the one before it ended begins
a document of its own, so that no two tokens meet that did not stand together.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from packprep.building.job import Job
from packprep.building.replay import restore, stored_segments
from packprep.errors import DatasetError


class Restored(NamedTuple):
    """The documents of a shard in order of source, file, position and use."""

    tokens: np.ndarray  # of the dataset's dtype: one document after the other
    lengths: np.ndarray  # int64[d]: tokens of each, bos and eos among them
    source: np.ndarray  # int64[d], ascends


def restored_documents(job: Job, arrays: Mapping[str, np.ndarray], place: str) -> Restored:
    """The documents of a shard's arrays. DatasetError, naming `place`, where they do not have their tasks' form."""
    stored = stored_segments(job, arrays)
    source, file, document, use, start = (
        arrays[f"segment_{name}"].astype(np.int64) for name in ("source", "file", "doc", "repeat", "start")
    )
    order = np.lexsort((start, use, document, file, source))
    content, offsets, fits = restore(job, arrays, stored, order)
    eos = stored.eos[order]
    if not fits.all() or not np.isin(eos, (0, 1)).all():
        wrong = int(order[np.argmin(fits & np.isin(eos, (0, 1)))])
        raise DatasetError(f"{place}: segment {wrong} has not the form of its task; `packprep verify` says where else")
    bos, n = stored.bos[order], np.diff(offsets)
    begins = np.ones(len(order), np.bool_)
    continues = start[order][1:] == start[order][:-1] + n[:-1]
    for column in (source, file, document, use):
        continues &= column[order][1:] == column[order][:-1]
    begins[1:] = ~continues
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(order)) - 1 if len(order) else first
    starts, ends = bos[first], eos[last]
    lengths = offsets[last + 1] - offsets[first] + starts + ends if len(order) else np.zeros(0, np.int64)
    tokens = _with_specials(job, content, lengths, starts, ends)
    return Restored(tokens, lengths, source[order][first])


def _with_specials(job: Job, content: np.ndarray, lengths: np.ndarray, bos: np.ndarray, eos: np.ndarray) -> np.ndarray:
    """The content of documents with bos before and eos behind each that has it. lengths: with them; bos, eos: 0 or 1."""
    if not bos.any() and not eos.any():
        return content
    ends = np.cumsum(lengths)
    tokens = np.empty(int(ends[-1]), content.dtype)
    is_content = np.ones(len(tokens), np.bool_)
    for role, at in (("bos", (ends - lengths)[bos == 1]), ("eos", (ends - 1)[eos == 1])):
        if len(at):
            tokens[at] = job.vocabulary.roles[role]
            is_content[at] = False
    tokens[is_content] = content
    return tokens
