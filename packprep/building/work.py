"""One shard's work: a pure function of (plan, shard number). Read → tokenize → cut and draw tasks → pack → render."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from packprep.buffers import Buffers
from packprep.building import ledger
from packprep.building.inputs import Inputs, token_dtype
from packprep.building.job import Job
from packprep.building.layout import Layout, arrange
from packprep.building.packing import pack
from packprep.building.render import render, rounded_up
from packprep.building.segments import FORMAT_MAX_SEGMENTS, SegmentTable, cut, cut_at_row_ends, slots_of
from packprep.clock import Clock
from packprep.corpus.finding import seen_again
from packprep.corpus.planning import Extent, PlannedSource
from packprep.corpus.readers import Decoders
from packprep.corpus.reading import UNTRAINED, Documents, Reading, read_documents
from packprep.dataset.shard import compacted
from packprep.errors import SourceError
from packprep.objectives.objective import Task
from packprep.recipe import Recipe

TOO_LONG = "too_long"
UNTRAINED_SEGMENT = "untrained_segment"
LEAST_BOUND, BEYOND_PLAN = 1 << 30, 16
"""Text bytes at which a shard is refused: what it may always have, and how many times what the plan gives it."""
MOST_EXPECTED = 1 << 27
"""Tokens for which memory is asked for before they are there: a plan estimates."""


class Made(NamedTuple):
    """A shard before it is written."""

    arrays: dict[str, np.ndarray]  # as dataset/shard.py lists them
    reading: Reading
    ledger: dict[str, Any]
    segments: SegmentTable  # in the shard's order


def read_shard(
    job: Job,
    shard: int,
    decoders: Decoders | None = None,
    progress: Callable[[int, int, int, int], None] | None = None,
    clock: Clock | None = None,
    buffers: Buffers | None = None,
) -> Reading:
    """The documents of shard number `shard`; arguments as in `make_shard`."""
    expected_tokens = sum(source["tokens"] for source in job.plan["sources"]) // job.shards
    seen = job.seen or [None] * len(job.sources)
    extents = (
        (source, extent)
        for source, own in zip(job.sources, seen, strict=True)
        for extent in unchanged_extents(source, shard, job.shards, own)
    )
    return read_documents(
        job.recipe, job.sources, extents, job.engine, job.vocabulary, job.token_dtype, decoders, progress,
        marks=job.marks, clock=clock, buffers=buffers, expected_tokens=min(expected_tokens, MOST_EXPECTED),
        most_bytes=max(LEAST_BOUND, BEYOND_PLAN * job.plan["shard_text_bytes"]),
    )  # fmt: skip


def unchanged_extents(source: PlannedSource, shard: int, shards: int, seen: np.ndarray | None) -> Iterator[Extent]:
    """What a shard takes from a source; each file is looked at before and after. seen: as `Files.seen`; None: nothing known.

    SourceError for a file that changes while the build runs.
    """
    for extent in source.extents(shard, shards):
        _check_unchanged(source, extent, seen)
        yield extent
        _check_unchanged(source, extent, seen)


def _check_unchanged(source: PlannedSource, extent: Extent, seen: np.ndarray | None) -> None:
    if seen is None:
        return
    for part in source.parts(extent):
        now = seen_again(part.path, part.format)
        if now is not None and now.modified != seen[part.file - source.first_file, 1]:
            raise SourceError(
                f"{part.path}: it was written to while the build reads it. Leave the inputs alone, and run the same command "
                "again: it compares what it read of the file with what stands there now"
            )


class LaidOut(NamedTuple):
    """Where each segment goes. [m] each, in document order; `layout` as `arrange` gives it."""

    segments: SegmentTable
    untrained: np.ndarray  # int64[documents]: tokens of a document that are in no segment, for none there is trained
    slots: np.ndarray  # int64: by the length law
    physical: np.ndarray  # int64: rounded up to pad_seq_to_mult
    row: np.ndarray  # int64
    layout: Layout


class Begun(NamedTuple):
    """A shard whose documents have their places in rows that are not there yet."""

    number: int
    reading: Reading
    laid: LaidOut


def make_shard(
    job: Job,
    shard: int,
    decoders: Decoders | None = None,
    progress: Callable[[int, int, int, int], None] | None = None,
    clock: Clock | None = None,
    buffers: Buffers | None = None,
) -> Made:
    """Everything of shard number `shard`. `decoders` only saves time; `progress` as in `read_documents`.

    clock: gets the seconds of the stages read, tokenize, cut, pack, render and ledger.
    buffers: memory to go on with, by which the shard made before ends; None: memory of its own.
    """
    clock, buffers = clock or Clock(), buffers or Buffers()
    return finish_shard(job, begin_shard(job, shard, decoders, progress, clock, buffers), clock, buffers)


def begin_shard(
    job: Job,
    shard: int,
    decoders: Decoders | None,
    progress: Callable[[int, int, int, int], None] | None,
    clock: Clock,
    buffers: Buffers,
) -> Begun:
    """The first part of `make_shard`, after which the arrays of the shard made before are still what they were."""
    reading = read_shard(job, shard, decoders, progress, clock, buffers)
    laid = lay_out(job.recipe, job.tasks, reading.documents, clock)
    _note_untrained(job, reading, laid.untrained)
    _note_left_out(job, reading, laid.segments)
    return Begun(shard, reading, laid)


def finish_shard(job: Job, begun: Begun, clock: Clock, buffers: Buffers) -> Made:
    """The second part of `make_shard`: rows and ledger."""
    recipe, (shard, reading, laid) = job.recipe, begun
    with clock.stage("render"):
        arrays = render(
            job.tasks, reading.documents, laid.segments, laid.slots, laid.layout, recipe.seq_length,
            recipe.packing.pad_seq_to_mult, buffers,
        )  # fmt: skip
    with clock.stage("ledger"):
        balance = _ledger(job, reading, laid, arrays, shard)
    if recipe.output.columns == "compact":
        arrays = compacted(arrays)
    return Made(arrays, reading, balance, SegmentTable(*(column[laid.layout.order] for column in laid.segments)))


def lay_out(recipe: Recipe, tasks: Sequence[Task], documents: Documents, clock: Clock) -> LaidOut:
    """Cut documents into segments and give each its place. clock: gets the seconds of the stages cut and pack."""
    with clock.stage("cut"):
        if recipe.packing.algorithm == "concat":
            segments, row, _ = cut_at_row_ends(recipe, tasks, documents)
            untrained = np.zeros(len(documents.position), np.int64)
        else:
            segments, untrained = cut(recipe, tasks, documents)
        slots = slots_of(tasks, segments)
        physical = rounded_up(slots, recipe.packing.pad_seq_to_mult)
    with clock.stage("pack"):
        if recipe.packing.algorithm != "concat":
            most = recipe.packing.max_segments_per_row or FORMAT_MAX_SEGMENTS
            row, _ = pack(physical, recipe.seq_length, recipe.packing.algorithm, most)
        layout = arrange(segments.key, physical, row, recipe.packing.algorithm == "next_fit")
    return LaidOut(segments, untrained, slots, physical, row, layout)


def rehearse(inputs: Inputs) -> None:
    """Load the kernels of a recipe's shards, or compile them, by making one of a few tokens.

    Whoever is forked from this process need not. Whatever goes wrong comes up again where it matters.
    """
    documents, tokens = 64, 16
    zeros, offsets = np.zeros(documents, np.int64), np.arange(documents + 1, dtype=np.int64) * tokens
    recipe = inputs.recipe
    with contextlib.suppress(Exception):
        ids = np.zeros(documents * tokens, token_dtype(recipe, inputs.vocabulary.vocab_size))
        of_zeros = Documents(ids, offsets, offsets[:-1], zeros, zeros, zeros, zeros.astype(np.uint64))
        laid = lay_out(recipe, inputs.tasks, of_zeros, Clock())
        mult = recipe.packing.pad_seq_to_mult
        render(inputs.tasks, of_zeros, laid.segments, laid.slots, laid.layout, recipe.seq_length, mult)


def _note_untrained(job: Job, reading: Reading, untrained: np.ndarray) -> None:
    """Tokens of supervised documents' segments without a trained token are dropped."""
    for d in np.flatnonzero(untrained):
        dropped = reading.dropped_tokens[job.sources[reading.documents.source[d]].name]
        dropped[UNTRAINED_SEGMENT] = dropped.get(UNTRAINED_SEGMENT, 0) + int(untrained[d])


def _note_left_out(job: Job, reading: Reading, segments: SegmentTable) -> None:
    """Documents without a segment are rejects: too long under long = "drop", their tokens dropped; or under long =
    "truncate" without a trained token in what is kept."""
    documents = reading.documents
    if job.recipe.documents.long == "split":
        return
    count = len(documents.position)
    left_out = np.flatnonzero(np.bincount(segments.document, minlength=count) == 0)
    for d in left_out:
        source = job.sources[documents.source[d]]
        n = int(documents.offsets[d + 1] - documents.offsets[d])
        place = source, int(documents.repeat[d]), int(documents.file[d]), int(documents.position[d])
        if job.recipe.documents.long == "truncate":
            detail = 'none of the tokens that documents.long = "truncate" keeps is trained'
            reading.rejected.add(*place, UNTRAINED, detail)
            continue
        reading.rejected.add(*place, TOO_LONG, f'{n} tokens do not fit in one segment; documents.long = "drop"')
        dropped = reading.dropped_tokens[source.name]
        dropped[TOO_LONG] = dropped.get(TOO_LONG, 0) + n


def _ledger(job: Job, reading: Reading, laid: LaidOut, arrays: dict[str, np.ndarray], shard: int) -> dict[str, Any]:
    documents, segments, row, order = reading.documents, laid.segments, laid.row, laid.layout.order
    in_last = row == row.max() if len(row) else np.zeros(0, np.bool_)
    last_row_padding = job.recipe.seq_length - int(laid.slots[in_last].sum()) if len(row) else 0
    truncated = np.zeros(len(job.sources), np.int64)
    if job.recipe.documents.long == "truncate":
        used = np.bincount(segments.document, segments.n, len(documents.position)).astype(np.int64)
        cut_off = np.diff(documents.offsets) - used - laid.untrained
        np.add.at(truncated, documents.source, cut_off)
    balance = ledger.shard_ledger(
        reading,
        [source.name for source in job.sources],
        job.tasks,
        arrays,
        segments.bos[order],
        segments.eos[order],
        segments.copy[order],
        laid.slots[order],
        laid.physical[order],
        truncated,
        last_row_padding,
        job.recipe.seq_length,
    )
    ledger.check(balance, f"shard {shard}")
    return balance
