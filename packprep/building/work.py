"""Make one shard, as a pure function of the plan and the shard number.

The steps are read, tokenize, cut and draw tasks, pack, and render.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from packprep.building.ledger import check, shard_ledger, store_ledger
from packprep.building.packing import place
from packprep.building.plan import Plan
from packprep.building.removal import Removed, note_removed, store_without, without
from packprep.building.render import render_shard
from packprep.building.segments import LeftOut, cut, uncut_tokens
from packprep.clock import Clock
from packprep.dataset.manifest import stores_labels
from packprep.dataset.segments import Segments
from packprep.dataset.shard import compacted
from packprep.documents.reading import (
    UNTRAINED,
    Documents,
    DocumentsBuilder,
    TextReader,
    read_documents,
)
from packprep.documents.store import StoredDocuments, stored
from packprep.errors import SourceError
from packprep.objectives.tasks import in_place_rules
from packprep.sources.files import seen as seen_file
from packprep.sources.formats import FORMATS, Decoders, Slice
from packprep.sources.slices import PlannedSource

TOO_LONG = "too_long"
UNTRAINED_SEGMENT = "untrained_segment"
OTHER_LENGTH = "other_length"
PLACE_TOO_LONG = "place_too_long"
LEAST_BOUND, BEYOND_PLAN = 1 << 30, 16
"""A shard is refused if it has more than LEAST_BOUND bytes of text, and more than BEYOND_PLAN times
the plan's shard_text_bytes."""


class Made(NamedTuple):
    """A shard before it is written."""

    arrays: dict[str, np.ndarray]  # arrays by name, as listed in dataset/shard.py
    documents: Documents
    ledger: dict[str, Any]
    segments: Segments  # in row order; `document` is an index into `documents`


class StoreShard(NamedTuple):
    """A shard of a token store before it is written."""

    arrays: dict[str, np.ndarray]  # arrays by name, as listed in documents/store.py
    documents: StoredDocuments
    ledger: dict[str, Any]


def read_shard(
    plan: Plan,
    shard: int,
    decoders: Decoders | None = None,
    progress: Callable[[int, int, int, int], None] | None = None,
    clock: Clock | None = None,
) -> Documents:
    """Return the documents of shard number `shard`. The arguments are as in `make_shard`."""
    reader = text_reader(plan, decoders, clock)
    builder = documents_builder(plan, most_bytes(plan))
    return read_documents(builder, reader, slices_of(plan, shard), progress=progress)


def text_reader(
    plan: Plan, decoders: Decoders | None = None, clock: Clock | None = None
) -> TextReader:
    """Return a `TextReader` with the settings of a plan."""
    return TextReader(
        plan.recipe.documents,
        plan.vocabulary,
        plan.text_engine,
        plan.stored["chat_template"],
        uncut_tokens(plan.recipe, plan.cut_limits),
        decoders,
        clock or Clock(),
    )


def documents_builder(plan: Plan, most_bytes: int | None = None) -> DocumentsBuilder:
    """Return an empty `DocumentsBuilder`, which collects the documents that a build reads.

    `most_bytes` is the maximum number of text bytes, or None for no limit.
    """
    return DocumentsBuilder(plan.recipe, plan.sources, plan.token_dtype, plan.marks, most_bytes)


def slices_of(plan: Plan, shard: int) -> Iterator[tuple[PlannedSource, Slice]]:
    """Yield (source, work range) for each work range of a shard, in reading order."""
    seen = plan.seen or [None] * len(plan.sources)
    for source, seen_files in zip(plan.sources, seen, strict=True):
        for work_range in unchanged_slices(source, shard, plan.shards, seen_files):
            yield source, work_range


def unchanged_slices(
    source: PlannedSource, shard: int, shards: int, seen: np.ndarray | None
) -> Iterator[Slice]:
    """Yield the work ranges of a source for one shard. Check each file before and after it is read.

    Args:
        source: The source.
        shard: Shard number.
        shards: Number of shards.
        seen: `Files.seen` of the source; None skips the checks.

    Raises:
        SourceError: If a file changes while the build runs.
    """
    for work_range in source.slices(shard, shards):
        with file_unchanged(source, work_range, seen):
            yield work_range


@contextlib.contextmanager
def file_unchanged(
    source: PlannedSource, work_range: Slice, seen: np.ndarray | None
) -> Iterator[None]:
    """Check before and after the `with` block that the file of a work range has not changed.

    The arguments and the error are as in `unchanged_slices`.
    """

    def check_file() -> None:
        file_now = None if seen is None else seen_file(work_range.path, FORMATS[work_range.format])
        if (
            file_now is not None
            and seen is not None
            and file_now.modified != seen[work_range.file - source.first_file, 1]
        ):
            raise SourceError(
                f"{work_range.path}: this file was written to while the build reads it\n"
                "hint: leave the inputs unchanged, and run the same command again. It compares"
                " the file with the text that was read"
            )

    check_file()
    yield
    check_file()


def most_bytes(plan: Plan) -> int:
    """Return the maximum number of text bytes in a shard. A shard with more text is refused."""
    return max(LEAST_BOUND, BEYOND_PLAN * int(plan.stored["shard_text_bytes"]))


def make_store_shard(
    plan: Plan,
    shard: int,
    decoders: Decoders | None = None,
    progress: Callable[[int, int, int, int], None] | None = None,
    clock: Clock | None = None,
) -> StoreShard:
    """Make shard number `shard` of a token store. The arguments are as in `make_shard`."""
    parts = slices_of(plan, shard)
    documents = stored(
        plan, parts, decoders or Decoders(), progress, clock or Clock(), most_bytes(plan)
    )
    balance = store_ledger(documents, plan.tasks)
    # A rebuild reads the files again, so it erases removed documents again.
    if plan.removed:
        arrays, balance, uses = store_without(plan, documents.arrays, Removed(()), balance)
        documents = documents._replace(arrays=arrays)
        note_removed(plan, documents.rejected, uses)
    check(balance, f"shard {shard}")
    return StoreShard(documents.arrays, documents, balance)


def make_shard(
    plan: Plan,
    shard: int,
    decoders: Decoders | None = None,
    progress: Callable[[int, int, int, int], None] | None = None,
    clock: Clock | None = None,
    epoch: int = 0,
) -> Made:
    """Make shard number `shard`.

    Args:
        plan: The plan.
        shard: Shard number.
        decoders: Decoders of earlier shards. Reusing them only saves time.
        progress: As in `read_documents`.
        clock: Receives the seconds of the stages read, tokenize, cut, pack, render and ledger.
        epoch: The epoch whose random numbers are used. Shards store epoch 0. Resampling uses later
            epochs.
    """
    clock = clock or Clock()
    documents = read_shard(plan, shard, decoders, progress, clock)
    return shard_of(plan, shard, documents, clock, epoch)


def shard_of(plan: Plan, shard: int, documents: Documents, clock: Clock, epoch: int = 0) -> Made:
    """Make shard number `shard` from its documents. The other arguments are as in `make_shard`."""
    recipe = plan.recipe
    with clock.stage("cut"):
        cut_segments, lost = cut(recipe, plan.tasks, documents, plan.cut_limits)
    with clock.stage("pack"):
        placed, last_row_padding = place(cut_segments, recipe, plan.tasks)
    _note_left_out(plan, documents, placed, lost)
    with clock.stage("render"):
        weighting = recipe.documents.loss_weighting
        slots, segments = render_shard(
            plan.tasks, documents, placed, recipe.seq_length, epoch, weighting
        )
    with clock.stage("ledger"):
        names = [source.name for source in plan.sources]
        balance = shard_ledger(
            documents, names, plan.tasks, segments, lost, last_row_padding, recipe
        )
        # A rebuild reads the source text, so it erases removed documents again (P23).
        if (listed := plan.removed.segments(segments)).any():
            slots, segments, balance, passes = without(plan, slots, segments, listed, balance)
            note_removed(plan, documents.rejected, passes)
        check(balance, f"shard {shard}")
    # Compact shards omit arrays that the loader can compute. The ledger is already complete here.
    arrays = slots | segments.header_arrays(recipe.packing.pad_seq_to_mult)
    if recipe.output.columns != "full":
        arrays = compacted(arrays, stores_labels(recipe.output.columns, in_place_rules(plan.tasks)))
    return Made(arrays, documents, balance, segments)


def _note_left_out(plan: Plan, documents: Documents, segments: Segments, lost: LeftOut) -> None:
    """For each reason, count the tokens that `cut` left out. Reject documents without a segment.

    The counts are added to `documents.dropped_tokens`, and the rejects to `documents.rejected`.
    """
    sources = [source.name for source in plan.sources]
    # The ledger counts these tokens by reason, so that no token disappears (P16).
    left_out = {
        UNTRAINED_SEGMENT: lost.untrained,
        OTHER_LENGTH: lost.elsewhere,
        TOO_LONG: lost.too_long,
    }
    for reason, tokens in left_out.items():
        counts = np.bincount(documents.source, tokens, len(sources)).astype(np.int64)
        for name, count in zip(sources, counts.tolist(), strict=True):
            if count:
                _drop(documents, name, reason, count)
    # Every document without a segment is listed in the rejects (P21).
    counts = np.bincount(segments.document, minlength=len(documents.position))
    for d in np.flatnonzero(counts == 0).tolist():
        source = plan.sources[documents.source[d]]
        length = int(documents.offsets[d + 1] - documents.offsets[d])
        reason, detail = _why_left_out(plan, lost, d, length)
        location = int(documents.repeat[d]), int(documents.file[d])
        for position in documents.positions_of(d):
            documents.rejected.add(source, *location, position, reason, detail)
        # Tokens of these documents are in no count of `cut`, so they are added here.
        if reason in (PLACE_TOO_LONG, TOO_LONG) and not lost.too_long[d]:
            _drop(documents, source.name, reason, length)


def _drop(documents: Documents, source: str, reason: str, tokens: int) -> None:
    """Add dropped tokens to the count of a source and a reason."""
    dropped = documents.dropped_tokens[source]
    dropped[reason] = dropped.get(reason, 0) + tokens


def _why_left_out(plan: Plan, lost: LeftOut, d: int, tokens: int) -> tuple[str, str]:
    """Return (reason, detail) for the reject of document number `d`, which has no segment.

    `tokens` is the length of the document.
    """
    long = plan.recipe.documents.long
    if lost.elsewhere[d]:
        return OTHER_LENGTH, f"{tokens} tokens"
    if lost.unfit[d]:
        return PLACE_TOO_LONG, (
            f"a place of media of up to {int(lost.unfit[d])} tokens fits into no segment that may"
            " be cut there"
        )
    if lost.too_long[d] or (long == "drop" and not lost.untrained[d]):
        return TOO_LONG, f'{tokens} tokens do not fit in one segment; documents.long = "drop"'
    if long == "truncate":
        return UNTRAINED, 'none of the tokens that documents.long = "truncate" keeps is trained'
    if lost.apart[d]:
        return UNTRAINED, "each of its answers is in another piece than what it answers"
    return UNTRAINED, "nothing predicts what is trained of it"
