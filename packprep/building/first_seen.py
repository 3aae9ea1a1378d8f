"""Source files as a build first saw them: the times of their last changes, in a note beside the plan; sizes are in the plan.

    another time ─► what done shards read of the file is read again ─► the same: noted anew  ·  another: SourceError

Within a process no file may change any more: `work.unchanged_extents` looks before and after a piece is read.
The note is no part of a dataset: publication removes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packprep.building.commit import done_receipt
from packprep.building.job import Job
from packprep.building.output import Output
from packprep.corpus.files import Files
from packprep.corpus.readers import Decoders
from packprep.corpus.reading import text_digest
from packprep.dataset.json_files import FIRST_SEEN_NAME, decode, encode
from packprep.errors import DatasetError, SourceError

_SHOWN = 3


class DoneShard(NamedTuple):
    """A done shard whose sources are read again: digests of their text, as its receipt has them, by source's index."""

    number: int
    digests: Mapping[int, str]

    def __str__(self) -> str:
        return f"shard {self.number}"


def note_of(files: Sequence[Files]) -> bytes:
    """The note: for each source the times of its files in ns, in the plan's order; null for files at URLs."""
    return encode({"modified": [None if own.seen is None else own.seen[:, 1].tolist() for own in files]})


def changed_files(out: Output, files: Sequence[Files]) -> list[np.ndarray]:
    """By source, int64: the files that are not known to be as they were first seen. Without a note that are all local ones."""
    try:
        note = decode(out.read(FIRST_SEEN_NAME), out.place(FIRST_SEEN_NAME))
    except (OSError, DatasetError):
        note = None
    times = note.get("modified") if isinstance(note, dict) else None
    if not isinstance(times, list) or len(times) != len(files):
        times = [None] * len(files)
    return [_changed(own, before) for own, before in zip(files, times, strict=True)]


def _changed(files: Files, before: Any) -> np.ndarray:
    if files.seen is None:
        return np.zeros(0, np.int64)
    try:
        known = np.array(before, np.int64)
    except (TypeError, ValueError, OverflowError):
        known = np.zeros(0, np.int64)
    return np.flatnonzero(known != files.seen[:, 1]) if known.shape == (len(files),) else np.arange(len(files))


def done_shards_of(out: Output, job: Job, changed: Sequence[np.ndarray]) -> list[DoneShard]:
    """The done shards that read something of these files, by source."""
    sources: dict[int, list[int]] = {}
    for source, files in zip(job.sources, changed, strict=True):
        own: Iterable[int] = range(job.shards)
        if len(files) < len(source.files):
            pieces = [np.asarray(source.pieces.of_file(i), np.int64) for i in files.tolist()]
            own = source.shards_of(np.unique(np.concatenate([*pieces, np.zeros(0, np.int64)])), job.shards).tolist()
        for b in own:
            sources.setdefault(b, []).append(source.index)
    shards = sorted(sources)
    found = out.each(lambda near, b: done_receipt(near, b, job.digest), shards)
    receipts = {b: receipt[0] for b, receipt in zip(shards, found, strict=True) if receipt is not None}
    return [
        DoneShard(b, {s: str(receipt["text_digests"].get(job.sources[s].name)) for s in sources[b]})
        for b, receipt in receipts.items()
    ]


def differing(job: Job, item: DoneShard, decoders: Decoders) -> list[int]:
    """The sources of a done shard whose text is another than it read, by index."""
    return [
        s
        for s, digest in item.digests.items()
        if digest
        != text_digest(
            job.recipe,
            job.sources[s],
            job.sources[s].extents(item.number, job.shards),
            job.vocabulary,
            decoders,
            job.marks,
        )
    ]


def refuse(job: Job, item: DoneShard, source: int, changed: np.ndarray) -> None:
    """SourceError that names the files of a done shard whose text is another than it read."""
    own = job.sources[source]
    parts = (part for extent in own.extents(item.number, job.shards) for part in own.parts(extent))
    paths = {part.path: None for part in parts if part.file - own.first_file in set(changed.tolist())}
    more = f" or {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    raise SourceError(
        f"{' or '.join(list(paths)[:_SHOWN])}{more}: its bytes changed since {item} read it, though not its size: some of its "
        "documents would be in the dataset as they were, others as they are. Put the file back as it was, or build into "
        "another folder"
    )
