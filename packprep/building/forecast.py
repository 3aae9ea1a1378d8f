"""Forecast a build from its plan: shards, rows, bytes, memory, shares and span lengths.

To estimate rows and bytes, made-up documents are cut and packed. The lengths of these documents
follow the plan's calibration sample. Their random keys differ from the keys in the build.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from packprep.building.commit import limit_in_words, listed_reasons, too_many_bad
from packprep.building.ledger import of_sides
from packprep.building.packing import rows_of
from packprep.building.planning import Inputs
from packprep.building.segments import cut, inputs_of
from packprep.cache import is_kept
from packprep.conversations.media import NO_PLACES
from packprep.conversations.training import Training
from packprep.dataset.boundaries import offsets_of
from packprep.dataset.manifest import stores_labels
from packprep.dataset.segments import Segments
from packprep.dataset.shard import DATA_ALIGNMENT, layout
from packprep.documents.calibration import Estimates
from packprep.documents.reading import Documents
from packprep.documents.store import DOCUMENT_BYTES
from packprep.documents.tally import Tally
from packprep.errors import PackprepError
from packprep.kernel import compiling
from packprep.objectives.objective import Task
from packprep.objectives.tasks import (
    TOO_SHORT,
    capacity,
    in_place_rules,
    inner_capacity,
    pieces_of_a_row,
    unequal_weights,
)
from packprep.randomness import permute, text_key
from packprep.recipe import Recipe
from packprep.sources.files import Files, named_twice, odd_files
from packprep.sources.first_look import advice_on, begin_of

FAR = 0.1
"""A figure that differs from the recipe's value by more than this fraction causes a warning."""
FULL = 0.98
"""A packing efficiency below this value causes a warning."""
PROCESS_BYTES = 220 << 20
"""Memory of a worker before it reads data: Python, numpy, numba, pyarrow and tokenizers."""
FEWEST, MOST, MOST_SHARDS = 20_000, 200_000, 32
"""A forecast cuts and packs about FEWEST … MOST segments in at most MOST_SHARDS shards.

If the corpus is small, its documents are repeated. If it is large, only some shards are packed.
"""
ROWS_MB_S = 150
"""MB/s of output that one core packs, renders and writes (docs/scale.md), given a fast disk."""
STORE_MB_S = 1000
"""MB/s at which one core reads a token store, in MB of the text that the tokens come from."""
START_S = 1
"""Seconds to start the command and its workers."""


class Packed(NamedTuple):
    """The result of packing made-up documents, as totals over all shards."""

    segments: float
    rows: float
    slots: float  # slots of all segments, including padding inside segments
    content: float  # slots of all segments, without padding
    early_content: float  # like `content`, but without each shard's last row
    early_slots: float  # slots of all rows, without each shard's last row
    file_bytes: float
    inputs: float  # slots of all prefixes; 0 if rows have one sequence

    @property
    def without_last(self) -> float | None:
        """Return the filled fraction of all rows except each shard's last row.

        Return None if there are no such rows.
        """
        return self.early_content / self.early_slots if self.early_slots else None


class _Excerpt(NamedTuple):
    """The numbers of documents and shards that a forecast makes up and packs."""

    fraction: float  # fraction of each source's documents that one run packs
    shards: int  # number of shards in one run
    runs: int  # repetitions with other random keys; 1 unless the corpus is small


def forecast(plan: dict[str, Any], inputs: Inputs, samples: Sequence[Estimates]) -> dict[str, Any]:
    """Return the forecast figures as a dict of plain values.

    Args:
        plan: The plan.
        inputs: The recipe and its inputs.
        samples: The estimates of each source, from the argument `samples` of `make_plan`.
    """
    recipe, sources, shards = inputs.recipe, plan["sources"], plan["shards"]
    tasks = [task for task in inputs.tasks if task.name != TOO_SHORT]
    all_weights = sum(task.weight for task in tasks)
    task_figures = [_figures_of_task(recipe, task, all_weights) for task in tasks]
    packed = _packed(plan, inputs, samples)
    row_slots = packed.rows * recipe.seq_length
    # A worker holds three copies of a shard's tokens, and two copies of each array of the shard's
    # rows.
    item = np.dtype(plan["token_dtype"]).itemsize
    slot_bytes = item * (1 + any(task.in_place for task in tasks)) + 3
    shard_tokens, shard_slots = _total(plan, "tokens") // shards + 1, row_slots / shards
    # The documents of a token store are neither rendered nor tokenized again.
    in_store = [source["name"] in inputs.stores for source in sources]
    read_s, tokenize_s = 0.0, 0.0  # seconds of one core
    for source, sample, is_stored in zip(sources, samples, in_store, strict=True):
        read_s += source["text_bytes"] * (
            1e-6 / STORE_MB_S if is_stored else sample.read_s_per_byte
        )
        tokenize_s += source["text_bytes"] * sample.tokenize_s_per_byte
    # Warnings are printed in this order, so those about all rows come first.
    warnings = [*unequal_weights(tasks), *_emptiness(packed, recipe)]
    for task, figures in zip(tasks, task_figures, strict=True):
        warnings += _warnings_of_task(recipe, task, figures)
    warnings += _warnings_of_sources(plan, inputs, samples)
    return {
        "shards": shards,
        "shard_text_bytes": plan["shard_text_bytes"],
        "files": len(plan["files"]),
        "documents": _total(plan, "documents"),
        "text_bytes": _total(plan, "text_bytes"),
        "tokens": _total(plan, "tokens"),
        "slots": round(packed.slots),
        "segments": round(packed.segments),
        "rows": round(packed.rows),
        "seq_length": recipe.seq_length,
        "utilisation": {
            "all_rows": packed.content / row_slots if row_slots else None,
            "without_last_rows": packed.without_last,
            **of_sides(packed.inputs, packed.content, packed.rows, recipe.packing.sides),
        },
        "output_bytes": round(packed.file_bytes),
        "store": None if inputs.stores else _of_store(plan, recipe),
        "worker_bytes": PROCESS_BYTES
        + round(shard_tokens * 3 * item + shard_slots * slot_bytes * 2),
        "sampled": inputs.has_text,
        "renders": any(
            sample.chat and not is_stored
            for sample, is_stored in zip(samples, in_store, strict=True)
        ),
        "read_s": read_s,
        "tokenize_s": tokenize_s,
        "engine": plan["engine"],
        "fingerprint": plan["fingerprint"],
        "sources": _figures_of_sources(plan),
        "tasks": task_figures,
        "warnings": warnings,
    }


def _total(plan: Mapping[str, Any], column: str) -> int:
    """Return the sum of the key `column`, such as "tokens", over the plan's sources."""
    return sum(source[column] for source in plan["sources"])


def _figures_of_task(recipe: Recipe, task: Task, all_weights: float) -> dict[str, Any]:
    """Return the forecast of one task as a dict. `all_weights` is the sum of all tasks' weights."""
    inner_tokens = inner_capacity(recipe, task, 0)
    figures = task.objective.forecast(task, inner_tokens) if task.objective.forecast else {}
    return {
        "name": task.name,
        "objective": task.objective.name,
        "weight": task.weight / all_weights,
        "longest_inner": inner_tokens,
        "longest_last": capacity(recipe, task, 0, int(recipe.documents.eos_after_document)),
        "pieces_of_a_row": pieces_of_a_row(recipe, task),
        "figures": {
            name: {"wanted": target, "realised": realised}
            for name, (target, realised) in figures.items()
        },
    }


def _warnings_of_task(recipe: Recipe, task: Task, figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings if a task will differ from its settings in the recipe.

    One warning says that the task's noise differs from the recipe's value. Another says that the
    task's segments are much shorter than a row, because the vocabulary has too few sentinels.
    """
    objective, sentinels = task.objective, len(task.ids.sentinels)
    lacks_sentinels = (
        objective.sentinels
        and objective.sentinels(task.parameters, figures["longest_inner"]) > sentinels
    )
    # The length formula rounds and limits these figures, so they can differ from the recipe's.
    for name, figure in figures["figures"].items():
        target, realised = figure["wanted"], figure["realised"]
        if abs(realised - target) > FAR * target:
            yield (
                f"task {task.name}: {name} will be {realised:.3g} at full length, not {target:g}."
                f" Use {'more sentinels' if lacks_sentinels else 'longer rows'} to come closer"
            )
    # Too few sentinels can limit segments to a part of a row.
    longest = capacity(recipe, task, 0, int(recipe.documents.eos_after_segment))
    if objective.most_tokens and objective.most_tokens(task) <= longest:
        filled_share = task.most_body_slots(longest) / recipe.seq_length
        if filled_share < 1 - FAR:
            yield (
                f"task {task.name}: {sentinels} sentinels limit its segments to {longest} tokens,"
                f" {filled_share:.0%} of a row. More sentinels allow longer segments"
            )


def _figures_of_sources(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one dict of figures per source.

    The figures include the source's share of the tokens, and the standard error of this share.
    """
    total = _total(plan, "tokens") or 1
    # Standard error of each source's tokens.
    errors = [source["tokens"] * source["relative_error"] for source in plan["sources"]]
    sum_of_squares = sum(error**2 for error in errors)
    columns = ("name", "repeat", "text_bytes", "tokens", "documents")
    figures = []
    for source, error in zip(plan["sources"], errors, strict=True):
        share = source["tokens"] / total
        # The first-order error of a / (a + b), for independent a and b.
        error_of_others = math.sqrt(max(sum_of_squares - error**2, 0.0))
        share_error = math.hypot((1 - share) * error, share * error_of_others) / total
        figures.append(
            {column: source[column] for column in columns}
            | {"share": share, "share_error": share_error}
            | {"pass_shares": source.get("pass_shares")}
        )
    return figures


def _warnings_of_sources(
    plan: Mapping[str, Any], inputs: Inputs, samples: Sequence[Estimates]
) -> list[str]:
    """Return warnings about the sources, their files, bad documents and shares."""
    recipe = inputs.recipe
    # An expression sets the passes of each document, so only a number or a share can surprise.
    warnings = [
        f"source {source['name']}: each document is used {source['repeat']:g} times"
        for source in plan["sources"]
        if source["repeat"] > 4 and source.get("pass_shares") is None
    ]
    for source, sample in zip(plan["sources"], samples, strict=True):
        warnings += [f"source {source['name']}: {note}" for note in sample.notes.warnings()]
    bad, is_certain = bad_in_samples(plan, inputs, samples)
    if bad:
        warnings.append(f"a build {'fails' if is_certain else 'may fail'}: {bad}")
    if twice := named_twice(recipe.sources, inputs.files):
        warnings.append(twice)
    warnings += odd_files(recipe.sources, inputs.files)
    shares = {source.name: source.share for source in recipe.sources if source.share is not None}
    total = sum(shares.values())
    if shares and abs(total - 1) > 1e-6:
        scaled = ", ".join(f"{name} {share / total:.1%}" for name, share in shares.items())
        warnings.append(
            f"the shares of the sources sum to {total:g}, not 1, and are scaled to {scaled}"
        )
    return warnings


def bad_in_samples(
    plan: Mapping[str, Any], inputs: Inputs, samples: Sequence[Estimates]
) -> tuple[str, bool]:
    """Return (message, must fail) if samples have too many bad documents, otherwise ("", False).

    "Must fail" is True if the samples prove that too many documents are bad. The result is ("",
    False) too if bad_documents = "fail", because the build then stops at the first bad document.
    """
    read = bad = least_bad = 0.0
    joined, advice = Tally(), ""
    for i, (sample, source, planned) in enumerate(
        zip(samples, inputs.recipe.sources, plan["sources"], strict=True)
    ):
        if sample.tally is None:
            continue
        low, high = source.sample
        # With an expression, a bad document counts once.
        by_fields = isinstance(source.repeat, str)
        uses = (1.0 if by_fields else planned["repeat"]) * (high - low)
        # A sample counts a document once, but a build counts it in each pass.
        documents, bad_documents = sample.tally.totals
        read, bad = read + uses * documents, bad + uses * bad_documents
        by_chance = by_fields or high - low < 1 or planned["repeat"] % 1 > 0
        least_bad += uses * sample.tally.least_bad(by_chance)
        joined.join(sample.tally, 0)
        if not advice and bad_documents > documents / 2:
            advice = _advice_on(sample.tally, inputs.prefixes[i], inputs.files[i])
    documents_keys = inputs.recipe.documents
    limit = documents_keys.max_bad_fraction
    too_many = too_many_bad(round(bad), round(read), round(read - bad), limit)
    # With "fail", the build stops at the first bad document.
    if not too_many or documents_keys.bad_documents == "fail":
        return "", False
    count = joined.reasons.total()
    counts = f"{count} of {joined.looked_at} documents are bad"
    if not joined.is_whole:
        counts = (
            f"about {bad / read:.1%} of the documents are bad, {count} of a sample of"
            f" {joined.looked_at}"
        )
    message = (
        f"{counts} ({listed_reasons(joined.reasons)}), more than"
        f" {limit_in_words(round(bad), limit)}. {joined.example}"
    )
    # Failure is certain only if the fewest bad documents that the samples prove exceed the limit.
    is_certain = too_many_bad(
        math.floor(least_bad), math.ceil(read), math.ceil(read - least_bad), limit
    )
    return message + advice, is_certain


def _advice_on(tally: Tally, prefix: str, files: Files) -> str:
    """Return advice for a source with mostly bad documents.

    The advice follows from the most frequent reason, and from the first bytes of the first file
    with a bad document. Return "" if this file is not in `files`.
    """
    places = [os.path.join(prefix, name) for name in files.names]
    if tally.first_path not in places:
        return ""
    i = places.index(tally.first_path)
    begin = b""
    with contextlib.suppress(PackprepError):  # The file may be one of a pair, or have changed.
        begin, _ = begin_of(tally.first_path, int(files.sizes[i]), files.kinds[files.kind[i]][1])
    advice = advice_on(tally.reasons.most_common(1)[0][0], tally.first_path, begin)
    return f". {advice[0].upper()}{advice[1:]}"


def _of_store(plan: Mapping[str, Any], recipe: Recipe) -> dict[str, Any] | None:
    """Return the forecast of a token store. The store has each document of the plan's sources once.

    The result is a dict with the keys documents, tokens, token_error and bytes. It is None if
    expressions leave out documents, because the store also has these, and they are not estimated.
    """
    if any(source.where is not None or isinstance(source.repeat, str) for source in recipe.sources):
        return None
    # The plan counts tokens of all passes, but a store has each document once.
    uses = [
        s["repeat"] * (recipe_source.sample[1] - recipe_source.sample[0])
        for s, recipe_source in zip(plan["sources"], recipe.sources, strict=True)
    ]
    tokens = [source["tokens"] / use for source, use in zip(plan["sources"], uses, strict=True)]
    documents = sum(
        source["documents"] / use for source, use in zip(plan["sources"], uses, strict=True)
    )
    size = np.dtype(plan["token_dtype"]).itemsize * sum(tokens) + DOCUMENT_BYTES * documents
    errors = [
        source["relative_error"] * count
        for source, count in zip(plan["sources"], tokens, strict=True)
    ]
    counts = {"documents": round(documents), "tokens": round(sum(tokens)), "bytes": round(size)}
    return {**counts, "token_error": math.hypot(*errors) / max(1, sum(tokens))}


def built_together(
    forecasts: Sequence[dict[str, Any]], missing: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the forecasts of row lengths that one command builds.

    Documents are read and tokenized once. Only the first forecast with missing shards therefore has
    `read_s` and `tokenize_s`. A worker also keeps the documents of the other row lengths.

    Args:
        forecasts: The results of `forecast`, one per row length.
        missing: Number of missing shards of each.
    """
    reader = next((i for i, count in enumerate(missing) if count), 0)
    documents = [_TOKEN_BYTES * figures["tokens"] // figures["shards"] for figures in forecasts]
    return [
        figures
        | {"worker_bytes": figures["worker_bytes"] + sum(documents) - document_bytes}
        | ({} if i == reader else {"read_s": 0.0, "tokenize_s": 0.0})
        for i, (figures, document_bytes) in enumerate(zip(forecasts, documents, strict=True))
    ]


_TOKEN_BYTES = 4  # at most, of a token in memory


def outlook(figures: Mapping[str, Any], missing: int, workers: int) -> dict[str, Any]:
    """Return a dict with the work that remains in a build, and the estimated seconds for this work.

    The dict also has the rates that the estimate uses:

    - read_mb_s and tokenize_mb_s: the MB/s of text that one core reads and tokenizes, from the
      calibration sample. None if there is nothing to read or tokenize. Token stores are read at
      STORE_MB_S.
    - rows_mb_s: the MB/s of output that one core makes.
    - compile_s: the seconds to compile kernels that are not cached.

    Args:
        figures: The figures that `forecast` returned.
        missing: Number of shards that are not done.
        workers: Number of processes.
    """
    text_bytes, output_bytes = (
        figures[key] * missing // figures["shards"] for key in ("text_bytes", "output_bytes")
    )
    core_seconds = figures["read_s"], figures["tokenize_s"]
    read_mb_s, tokenize_mb_s = (
        figures["text_bytes"] / 1e6 / seconds if seconds else None for seconds in core_seconds
    )
    workers = max(1, min(workers, missing))
    compile_s = 0 if is_kept("packprep.building.render.*") else compiling.seconds
    # Shards are not divided. With 3 shards and 2 workers, one worker makes 2.
    shard_s = sum(core_seconds) / figures["shards"]
    shard_s += output_bytes / ROWS_MB_S / 1e6 / max(missing, 1)
    return {
        "missing": missing,
        "output_bytes": output_bytes,
        "seconds": (
            START_S + compile_s + shard_s * math.ceil(missing / workers) if missing else 0.0
        ),
        "workers": workers,
        "text_bytes": text_bytes,
        "read_mb_s": read_mb_s,
        "tokenize_mb_s": tokenize_mb_s,
        "sampled": figures["sampled"],
        "renders": figures["renders"],
        "rows_mb_s": ROWS_MB_S,
        "compile_s": compile_s,
    }


def _packed(plan: dict[str, Any], inputs: Inputs, samples: Sequence[Estimates]) -> Packed:
    """Cut and pack made-up documents, and scale the totals to the whole corpus."""
    shards = plan["shards"]
    # Estimate the number of segments. A large corpus is packed in part, and a small one several
    # times.
    chunk_tokens = min(inner_capacity(inputs.recipe, task, 1) for task in inputs.tasks)
    segments = _total(plan, "documents") + _total(plan, "tokens") // chunk_tokens + 1
    shards_per_run = min(shards, MOST_SHARDS, max(1, shards * MOST // segments))
    excerpt = _Excerpt(
        fraction=min(shards_per_run / shards, MOST / segments),
        shards=shards_per_run,
        runs=max(1, min(FEWEST // segments, MOST_SHARDS // shards_per_run)),
    )
    documents, shard = _made_up(plan, inputs.recipe, samples, excerpt)
    totals = sum(_totals_of_shards(plan, inputs, documents, shard), np.zeros(len(Packed._fields)))
    return Packed(*(totals / (excerpt.runs * excerpt.fraction)).tolist())


def _made_up(
    plan: Mapping[str, Any], recipe: Recipe, samples: Sequence[Estimates], excerpt: _Excerpt
) -> tuple[Documents, np.ndarray]:
    """Return made-up documents in the order of their shards, and each document's shard, int64[D].

    The documents have lengths, but no token ids.
    """
    columns = []
    # Each run makes the documents again in another order, as if the corpus were larger.
    for run in range(excerpt.runs):
        for s, (sample, source) in enumerate(zip(samples, plan["sources"], strict=True)):
            key = text_key(recipe.seed, "forecast", s, run)
            lengths, shard = _drawn(sample, source, excerpt, run, key)
            columns.append((lengths, shard, np.full(len(lengths), s)))
    lengths, shard, source = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    # A build rejects documents below min_tokens, so they take no part in packing.
    used = np.flatnonzero(lengths >= max(1, recipe.documents.min_tokens))
    used = used[np.argsort(shard[used], kind="stable")]
    lengths, source = lengths[used], source[used]
    supervised = np.array([sample.supervised for sample in samples], np.uint8)[source]
    zeros = np.zeros(len(used), np.int64)
    documents = Documents(
        ids=np.zeros(0, np.uint16),
        offsets=offsets_of(lengths),
        position=np.arange(len(used)),
        file=zeros,
        source=source,
        repeat=zeros,
        file_key=np.full(len(used), text_key(recipe.seed, "forecast")),
        training=_all_trained(supervised, lengths) if supervised.any() else None,
    )
    return documents, shard[used]


def _drawn(
    sample: Estimates, source: Mapping[str, Any], excerpt: _Excerpt, run: int, key: np.uint64
) -> tuple[np.ndarray, np.ndarray]:
    """Return the made-up documents of one source: their lengths in tokens and their shards.

    Both arrays are int64, with one entry per document. The lengths are the evenly spaced quantiles
    of the sample's distribution. Even in a small corpus, each length is therefore as frequent as in
    the sample.

    Args:
        sample: The source's estimates.
        source: The plan's entry of the source.
        excerpt: The part of the source to make up.
        run: Index of the repetition, 0 … excerpt.runs − 1. Shard numbers start at run ·
            excerpt.shards.
        key: Random key that determines the order of the documents.
    """
    count = max(1, round(source["documents"] * excerpt.fraction))
    tokens = source["tokens"] * excerpt.fraction
    order = np.argsort(sample.lengths, kind="stable")
    below = np.cumsum(sample.length_weights[order])
    if not len(order) or not tokens:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # Take the quantiles at the middle of `count` equal parts, then scale them to the planned
    # tokens.
    ranks = np.searchsorted(below, (np.arange(count) + 0.5) * (below[-1] / count), side="right")
    lengths = sample.lengths[order[np.minimum(ranks, len(order) - 1)]].astype(np.float64)
    lengths *= tokens / max(lengths.sum(), 1.0)
    # Shuffle, so that each shard has documents of all lengths. A document is in the shard where it
    # starts.
    shuffled = np.rint(lengths).astype(np.int64)[permute(np.arange(count), count, key)]
    ends = np.cumsum(shuffled)
    shard = (ends - shuffled) * excerpt.shards // max(int(ends[-1]), 1)
    return shuffled, run * excerpt.shards + shard


def _all_trained(supervised: np.ndarray, lengths: np.ndarray) -> Training:
    """Return a `Training` that trains each supervised document as one range, without messages.

    Both arguments have one entry per document. `supervised` is 1 if the document is supervised,
    otherwise 0. `lengths` has the number of tokens.
    """
    # Messages are unknown before a build, so each document counts as one trained range.
    zeros, no_offsets = np.zeros(len(lengths), np.int64), np.zeros(len(lengths) + 1, np.int64)
    ends = lengths[supervised != 0]
    spans = np.stack((np.zeros_like(ends), ends), 1)
    return Training(
        supervised=supervised,
        span_offsets=offsets_of(supervised),
        spans=spans,
        weights=np.ones(len(spans), np.float32),
        turn=np.arange(len(spans)),
        turns=np.repeat(spans[:, 1:], 2, 1),
        cut_offsets=no_offsets,
        cuts=np.zeros(0, np.int64),
        ranks=np.zeros(0, np.uint8),
        system=zeros,
        eos_weight=supervised.astype(np.float32),
        document_weight=np.ones(len(lengths), np.float32),
        place_offsets=no_offsets,
        places=NO_PLACES,
    )


def _totals_of_shards(
    plan: dict[str, Any], inputs: Inputs, documents: Documents, shard: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the totals of each shard as float64[8], with the fields of `Packed` in order.

    Args:
        plan: The plan.
        inputs: The recipe and its inputs.
        documents: The made-up documents.
        shard: int64[D], ascending: shard of each document.
    """
    recipe, tasks = inputs.recipe, inputs.tasks
    for segments in _segments_of_shards(inputs, documents, shard):
        slots, row = segments.slots, rows_of(segments, recipe, tasks)
        rows, padding = int(row.max(initial=-1)) + 1, -slots % recipe.packing.pad_seq_to_mult
        # The last row of a shard is usually emptier, so the fields `early_…` leave it out.
        totals = Packed(
            segments=len(slots),
            rows=rows,
            slots=(slots + padding).sum(),
            content=slots.sum(),
            early_content=slots[row < rows - 1].sum(),
            early_slots=max(rows - 1, 0) * recipe.seq_length,
            file_bytes=_file_bytes(plan, inputs, segments, rows, documents.training is not None),
            inputs=0 if recipe.packing.sides is None else inputs_of(tasks, segments).sum(),
        )
        yield np.array(totals, np.float64)


def _segments_of_shards(
    inputs: Inputs, documents: Documents, shard: np.ndarray
) -> Iterator[Segments]:
    """Cut made-up documents, and yield the segments of each shard that has documents."""
    recipe, tasks, numbers = inputs.recipe, inputs.tasks, np.unique(shard)
    is_concat = recipe.packing.algorithm == "concat"  # Cuts depend on the rows of each shard.
    if not is_concat:
        # A cut depends only on its document here, so all documents are cut at once.
        segments, _ = cut(recipe, tasks, documents)
        shard = shard[segments.document]
    begins, ends = (np.searchsorted(shard, numbers, side) for side in ("left", "right"))
    for begin, end in zip(begins, ends, strict=True):
        if not is_concat:
            yield segments.select(slice(begin, end))
            continue
        names = ("position", "file", "source", "repeat", "file_key")
        columns = {name: getattr(documents, name)[begin:end] for name in names}
        offsets = documents.offsets[begin : end + 1]
        yield cut(recipe, tasks, replace(documents, offsets=offsets, **columns))[0]


def _file_bytes(
    plan: Mapping[str, Any], inputs: Inputs, segments: Segments, rows: int, is_supervised: bool
) -> int:
    """Return the size in bytes of the file of a shard with these segments in `rows` rows."""
    output, pad_seq_to_mult = inputs.recipe.output, inputs.recipe.packing.pad_seq_to_mult
    # Only tasks of block diffusion, which have two copies of each body, store noise per block.
    blocks = None
    for t, task in enumerate(inputs.tasks):
        if task.objective.copies == 2:
            bodies = segments.slots[segments.task == t] // 2
            of_task = int((-(-bodies // task.parameters["block_length"])).sum())
            blocks = (blocks or 0) + of_task
    # The arrays of media and records are not estimated.
    arrays = layout(
        rows,
        len(segments),
        inputs.recipe.seq_length,
        plan["token_dtype"],
        labels=stores_labels(output.columns, in_place_rules(inputs.tasks)),
        padded=pad_seq_to_mult > 1,
        blocks=blocks,
        trained=len(segments) if is_supervised else None,
        compact=output.columns != "full",
    )
    sizes = (dtype.itemsize * math.prod(shape) for dtype, shape in arrays.values())
    return DATA_ALIGNMENT + sum(sizes)


def _emptiness(packed: Packed, recipe: Recipe) -> list[str]:
    """Return a list with a warning if rows are less full than FULL, otherwise [].

    If rows have one sequence, the last row of each shard is ignored. If rows have an encoder and a
    decoder sequence, all rows count, and there is a warning only if both sequences are less full
    than FULL.
    """
    if filled := of_sides(packed.inputs, packed.content, packed.rows, recipe.packing.sides):
        if max(filled.values()) >= FULL:
            return []
        return [
            f"rows are only {filled['encoder']:.1%} full of inputs and {filled['decoder']:.1%} of"
            " targets: the segment lengths do not fill them. Choose other lengths, or set"
            " documents.max_tokens"
        ]
    if packed.without_last is None or packed.without_last >= FULL:
        return []
    packing = recipe.packing
    # Name the padding inside segments if it exceeds the padding at the ends of rows.
    if packed.slots - packed.content > packed.rows * recipe.seq_length - packed.slots:
        why = (
            f"packing.pad_seq_to_mult = {packing.pad_seq_to_mult} pads segments. Set it no higher"
            " than the trainer needs"
        )
    elif packing.algorithm != "best_fit":
        why = f'packing.algorithm = "{packing.algorithm}" leaves gaps that "best_fit" would fill'
    elif packing.max_segments_per_row:
        why = f"packing.max_segments_per_row = {packing.max_segments_per_row} limits them. Raise it"
    elif recipe.seq_lengths and recipe.documents.long != "decompose":
        why = (
            "the documents of one length leave gaps that shorter documents would fill."
            ' documents.long = "decompose" avoids gaps'
        )
    else:
        why = (
            "the segment lengths do not fill them. Choose another seq_length, or set"
            " documents.max_tokens"
        )
    return [f"rows are only {packed.without_last:.1%} full: {why}"]
