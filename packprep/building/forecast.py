"""Forecast a build from its plan: shards, rows, bytes, memory, shares and span lengths.

Rows and bytes are estimated by cutting and packing made-up documents. Their lengths follow the
plan's calibration sample, and their random keys differ from the build's.
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
from packprep.dataset.manifest import stores_labels
from packprep.dataset.shard import DATA_ALIGNMENT, layout
from packprep.documents.calibration import Estimates
from packprep.documents.reading import Documents
from packprep.documents.store import DOCUMENT_BYTES
from packprep.documents.tally import Tally
from packprep.errors import PackprepError
from packprep.kernel import compiling
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
"""Relative difference between a wanted and a realised figure that causes a warning."""
FULL = 0.98
"""Packing efficiency below which a warning is given."""
PROCESS_BYTES = 220 << 20
"""Memory of a worker before it reads data: Python, numpy, numba, pyarrow and tokenizers."""
FEWEST, MOST, MOST_SHARDS = 20_000, 200_000, 32
"""Minimum and maximum segments, and maximum shards, that are cut and packed for a forecast. A small
corpus is repeated; a large one is reduced to some of its shards."""
ROWS_MB_S = 150
"""MB/s of output that one core packs, renders and writes (docs/scale.md), given a fast disk."""
STORE_MB_S = 1000
"""MB/s of text whose tokens one core reads from a token store."""
START_S = 1
"""Seconds to start the command and its workers."""


class Packed(NamedTuple):
    """The result of packing made-up documents, as totals over all shards."""

    segments: float
    rows: float
    slots: float  # slots of segments, with the padding inside them
    content: float  # slots of segments, without padding
    # fraction of content in all rows except each shard's last; None if there are no others
    without_last: float | None
    file_bytes: float
    inputs: float  # slots of prefixes; 0 if rows have one sequence


def forecast(plan: dict[str, Any], inputs: Inputs, samples: Sequence[Estimates]) -> dict[str, Any]:
    """Return the forecast figures as plain values.

    Args:
        plan: The plan.
        inputs: The recipe and its inputs.
        samples: The estimates of each source, as `make_plan` returns them.
    """
    recipe = inputs.recipe
    tasks = [task for task in inputs.tasks if task.name != TOO_SHORT]
    item = np.dtype(plan["token_dtype"]).itemsize
    slot_bytes = item * (1 + any(task.in_place for task in tasks)) + 3
    tokens = sum(source["tokens"] for source in plan["sources"])
    documents = sum(source["documents"] for source in plan["sources"])
    weights = sum(task.weight for task in tasks)
    packed = _packed(plan, inputs, samples)
    row_slots = packed.rows * recipe.seq_length
    per_shard, slots_per_shard = tokens // plan["shards"] + 1, row_slots / plan["shards"]
    total = tokens or 1
    task_rows, warnings = [], [*unequal_weights(tasks), *_emptiness(packed, recipe)]
    for task in tasks:
        longest = capacity(recipe, task, 0, int(recipe.documents.eos_after_segment))
        inner = inner_capacity(recipe, task, 0)
        figures = task.objective.forecast(task, inner) if task.objective.forecast else {}
        task_rows.append(
            {
                "name": task.name,
                "objective": task.objective.name,
                "weight": task.weight / weights,
                "longest_inner": inner,
                "longest_last": capacity(recipe, task, 0, int(recipe.documents.eos_after_document)),
                "pieces_of_a_row": pieces_of_a_row(recipe, task),
                "figures": {
                    name: {"wanted": wanted, "realised": real}
                    for name, (wanted, real) in figures.items()
                },
            }
        )
        for name, (wanted, real) in figures.items():
            if abs(real - wanted) > FAR * wanted:
                few = task.objective.sentinels and task.objective.sentinels(
                    task.parameters, inner
                ) > len(task.ids.sentinels)
                warnings.append(
                    f"task {task.name}: {name} will be {real:.3g} at full length, not {wanted:g}."
                    " Use"
                    f" {'more sentinels' if few else 'longer rows'} to come closer"
                )
        if task.objective.most_tokens and task.objective.most_tokens(task) <= longest:
            fill = task.most_body_slots(longest) / recipe.seq_length
            if fill < 1 - FAR:
                warnings.append(
                    f"task {task.name}: {len(task.ids.sentinels)} sentinels limit its segments to"
                    f" {longest} tokens, {fill:.0%} of a row. More sentinels allow longer segments"
                )
    read_s, tokenize_s, renders = 0.0, 0.0, False  # seconds of one core
    for source, sample in zip(plan["sources"], samples, strict=True):
        in_store = source["name"] in inputs.stores
        read_s += source["text_bytes"] * (1e-6 / STORE_MB_S if in_store else sample.read_s_per_byte)
        tokenize_s += source["text_bytes"] * sample.tokenize_s_per_byte
        renders |= sample.chat and not in_store
    sources = []
    # These are standard errors in tokens.
    errors = [source["tokens"] * source["relative_error"] for source in plan["sources"]]
    all_errors = sum(error**2 for error in errors)
    for source, error in zip(plan["sources"], errors, strict=True):
        share = source["tokens"] / total
        # This is the first-order error of a / (a + b) for independent a and b.
        others = math.sqrt(max(all_errors - error**2, 0.0))
        if source["repeat"] > 4:
            warnings.append(
                f"source {source['name']}: each document is used {source['repeat']:g} times"
            )
        sources.append(
            {
                "name": source["name"],
                "repeat": source["repeat"],
                "text_bytes": source["text_bytes"],
                "tokens": source["tokens"],
                "documents": source["documents"],
                "share": share,
                "share_error": math.hypot((1 - share) * error, share * others) / total,
            }
        )
    for source, sample in zip(plan["sources"], samples, strict=True):
        warnings += [f"source {source['name']}: {note}" for note in sample.notes.warnings()]
    bad, is_certain = bad_in_samples(plan, inputs, samples)
    if bad:
        warnings.append(f"a build {'fails' if is_certain else 'may fail'}: {bad}")
    if twice := named_twice(recipe.sources, inputs.files):
        warnings.append(twice)
    warnings += odd_files(recipe.sources, inputs.files)
    shares = [source.share for source in recipe.sources if source.share is not None]
    if shares and abs(sum(shares) - 1) > 1e-6:
        parts = ", ".join(
            f"{source.name} {(source.share or 0) / sum(shares):.1%}" for source in recipe.sources
        )
        warnings.append(
            f"the shares of the sources sum to {sum(shares):g}, not 1, and are scaled to {parts}"
        )
    return {
        "shards": plan["shards"],
        "shard_text_bytes": plan["shard_text_bytes"],
        "files": len(plan["files"]),
        "documents": documents,
        "text_bytes": sum(source["text_bytes"] for source in plan["sources"]),
        "tokens": tokens,
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
        "worker_bytes": (
            PROCESS_BYTES + round(per_shard * 3 * item + slots_per_shard * slot_bytes * 2)
        ),
        "sampled": inputs.has_text,
        "renders": renders,
        "read_s": read_s,
        "tokenize_s": tokenize_s,
        "engine": plan["engine"],
        "fingerprint": plan["fingerprint"],
        "sources": sources,
        "tasks": task_rows,
        "warnings": warnings,
    }


def bad_in_samples(
    plan: Mapping[str, Any], inputs: Inputs, samples: Sequence[Estimates]
) -> tuple[str, bool]:
    """Return a message if the samples have too many bad documents, and whether the build must fail.

    The message is "" if they do not have too many, or if bad_documents = "fail".
    """
    read = bad = least = 0.0
    whole, advice = Tally(), ""
    for i, (sample, source, planned) in enumerate(
        zip(samples, inputs.recipe.sources, plan["sources"], strict=True)
    ):
        if sample.tally is None:
            continue
        low, high = source.sample
        uses = planned["repeat"] * (high - low)
        documents, of_source = sample.tally.totals
        read, bad = read + uses * documents, bad + uses * of_source
        least += uses * sample.tally.least_bad(high - low < 1 or planned["repeat"] % 1 > 0)
        whole.join(sample.tally, 0)
        if not advice and of_source > documents / 2:
            advice = _advice_on(sample.tally, inputs.prefixes[i], inputs.files[i])
    documents_keys = inputs.recipe.documents
    limit = documents_keys.max_bad_fraction
    too_many = too_many_bad(round(bad), round(read), round(read - bad), limit)
    if not too_many or documents_keys.bad_documents == "fail":  # The build reports the first one.
        return "", False
    count = whole.reasons.total()
    found = f"{count} of {whole.looked_at} documents are bad"
    if not whole.is_whole:
        found = (
            f"about {bad / read:.1%} of the documents are bad, {count} of a sample of"
            f" {whole.looked_at}"
        )
    message = (
        f"{found} ({listed_reasons(whole.reasons)}), more than {limit_in_words(round(bad), limit)}."
        f" {whole.example}"
    )
    certain = too_many_bad(math.floor(least), math.ceil(read), math.ceil(read - least), limit)
    return message + advice, certain


def _advice_on(tally: Tally, prefix: str, files: Files) -> str:
    """Return advice about a source that is mostly bad, based on the start of its first bad file."""
    places = [os.path.join(prefix, name) for name in files.names]
    if tally.first_path not in places:
        return ""
    i = places.index(tally.first_path)
    begin = b""
    with contextlib.suppress(PackprepError):  # The file may be one of a pair, or have changed.
        begin, _ = begin_of(tally.first_path, int(files.sizes[i]), files.kinds[files.kind[i]][1])
    advice = advice_on(tally.reasons.most_common(1)[0][0], tally.first_path, begin)
    return f". {advice[0].upper()}{advice[1:]}"


def _of_store(plan: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the size of a token store of the plan's sources, with each document once.

    The keys are documents, tokens, token_error and bytes.
    """
    uses = [
        s["repeat"] * (one.sample[1] - one.sample[0])
        for s, one in zip(plan["sources"], recipe.sources, strict=True)
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


def outlook(found: Mapping[str, Any], missing: int, workers: int) -> dict[str, Any]:
    """Return the remaining work of a build and its estimated seconds.

    The estimate uses these rates:

    - read_mb_s and tokenize_mb_s, the MB/s of text of one core in the calibration sample; None if
      there is nothing to read or tokenize. Token stores are read at STORE_MB_S.
    - rows_mb_s, the MB/s of output.
    - compile_s, the seconds to compile kernels that are not cached.

    Args:
        found: The figures that `forecast` returned.
        missing: Number of shards that are not done.
        workers: Number of processes.
    """
    text_bytes, output_bytes = (
        found[key] * missing // found["shards"] for key in ("text_bytes", "output_bytes")
    )
    seconds = found["read_s"], found["tokenize_s"]
    read_mb_s, tokenize_mb_s = (
        found["text_bytes"] / 1e6 / of_all if of_all else None for of_all in seconds
    )
    workers = max(1, min(workers, missing))
    compile_s = 0 if is_kept("packprep.building.render.*") else compiling.seconds
    of_one_shard = sum(seconds) / found["shards"] + output_bytes / ROWS_MB_S / 1e6 / max(missing, 1)
    return {
        "missing": missing,
        "output_bytes": output_bytes,
        "seconds": (
            START_S + compile_s + of_one_shard * math.ceil(missing / workers) if missing else 0.0
        ),
        "workers": workers,
        "text_bytes": text_bytes,
        "read_mb_s": read_mb_s,
        "tokenize_mb_s": tokenize_mb_s,
        "sampled": found["sampled"],
        "renders": found["renders"],
        "rows_mb_s": ROWS_MB_S,
        "compile_s": compile_s,
    }


def _packed(plan: dict[str, Any], inputs: Inputs, samples: Sequence[Estimates]) -> Packed:
    recipe, tasks, shards = inputs.recipe, inputs.tasks, plan["shards"]
    tokens, documents = (
        sum(source[name] for source in plan["sources"]) for name in ("tokens", "documents")
    )
    piece = min(inner_capacity(recipe, task, 1) for task in tasks)
    segments = documents + tokens // piece + 1
    at_once = min(shards, MOST_SHARDS, max(1, shards * MOST // segments))
    part = min(at_once / shards, MOST / segments)
    runs = max(1, min(FEWEST // segments, MOST_SHARDS // at_once))
    drawn = [
        _drawn(estimate, source, part, at_once, run, text_key(recipe.seed, "forecast", s, run))
        for run in range(runs)
        for s, (estimate, source) in enumerate(zip(samples, plan["sources"], strict=True))
    ]
    lengths, shard = (np.concatenate(columns) for columns in zip(*drawn, strict=True))
    source = np.tile(np.arange(len(samples)), runs).repeat([len(own) for own, _ in drawn])
    kept = np.flatnonzero(lengths >= max(1, recipe.documents.min_tokens))
    kept = kept[np.argsort(shard[kept], kind="stable")]
    zeros, offsets = np.zeros(len(kept), np.int64), np.concatenate(([0], np.cumsum(lengths[kept])))
    keys = np.full(len(kept), text_key(recipe.seed, "forecast"))
    made_up = Documents(
        np.zeros(0, np.uint16), offsets, np.arange(len(kept)), zeros, source[kept], zeros, keys
    )
    supervised = np.array([estimate.supervised for estimate in samples], np.uint8)[source[kept]]
    if supervised.any():
        made_up = replace(made_up, training=_all_trained(supervised, lengths[kept]))
    sums = sum(_shards(plan, inputs, made_up, shard[kept]), np.zeros(8)) / (runs * part)
    made, rows, slots, content, in_others, others, size, of_prefixes = sums.tolist()
    return Packed(
        made, rows, slots, content, in_others / others if others else None, size, of_prefixes
    )


def _drawn(
    estimate: Estimates, source: dict[str, Any], part: float, shards: int, run: int, key: np.uint64
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths in tokens of a run's made-up documents, and their shards, int64 each.

    The lengths are spread evenly over the sample's distribution. For a small corpus, each length is
    therefore as frequent as in the sample.

    Args:
        estimate: The source's estimates.
        source: The source in the plan.
        part: Fraction of the source's documents to draw.
        shards: Number of shards of one run.
        run: Index of the run. Its shard numbers continue after the previous run's.
        key: Random key of the order.
    """
    count, wanted = max(1, round(source["documents"] * part)), source["tokens"] * part
    order = np.argsort(estimate.lengths, kind="stable")
    below = np.cumsum(estimate.length_weights[order])
    if not len(order) or not wanted:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    places = np.searchsorted(below, (np.arange(count) + 0.5) * (below[-1] / count), side="right")
    even = estimate.lengths[order[np.minimum(places, len(order) - 1)]].astype(np.float64)
    even *= wanted / max(even.sum(), 1.0)
    lengths = np.rint(even).astype(np.int64)[permute(np.arange(count), count, key)]
    ends = np.cumsum(lengths)
    return lengths, run * shards + (ends - lengths) * shards // max(int(ends[-1]), 1)


def _all_trained(supervised: np.ndarray, lengths: np.ndarray) -> Training:
    """Return a Training with one range over each supervised document and no message boundaries."""
    zeros, own = np.zeros(len(lengths), np.int64), np.flatnonzero(supervised)
    spans = np.stack((zeros[own], lengths[own]), 1)
    offsets, none = (
        np.concatenate(([0], np.cumsum(supervised, dtype=np.int64))),
        np.zeros(len(lengths) + 1, np.int64),
    )
    return Training(
        supervised=supervised,
        span_offsets=offsets,
        spans=spans,
        weights=np.ones(len(spans), np.float32),
        turn=np.arange(len(spans)),
        turns=np.repeat(spans[:, 1:], 2, 1),
        cut_offsets=none,
        cuts=np.zeros(0, np.int64),
        ranks=np.zeros(0, np.uint8),
        system=zeros,
        eos_weight=supervised.astype(np.float32),
        document_weight=np.ones(len(lengths), np.float32),
        place_offsets=none,
        places=NO_PLACES,
    )


def _shards(
    plan: dict[str, Any], inputs: Inputs, documents: Documents, shard: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the packing totals of each shard, float64[8].

    They are segments, rows, slots with padding, content, content of all rows except the one filled
    last, slots of those rows, bytes, and slots of prefixes.

    Args:
        plan: The plan.
        inputs: The recipe and its inputs.
        documents: The made-up documents.
        shard: int64[D], ascending: shard of each document.
    """
    recipe, tasks, numbers = inputs.recipe, inputs.tasks, np.unique(shard)
    is_concat = recipe.packing.algorithm == "concat"  # It cuts where a shard's rows end.
    if not is_concat:
        whole, _ = cut(recipe, tasks, documents)
        shard = shard[whole.document]
    for begin, end in zip(
        *(np.searchsorted(shard, numbers, side) for side in ("left", "right")), strict=True
    ):
        if is_concat:
            names = ("position", "file", "source", "repeat", "file_key")
            own = {name: getattr(documents, name)[begin:end] for name in names}
            table, _ = cut(
                recipe, tasks, replace(documents, offsets=documents.offsets[begin : end + 1], **own)
            )
        else:
            table = whole.select(slice(begin, end))
        task, slots, row = table.task, table.slots, rows_of(table, recipe, tasks)
        physical = slots + -slots % recipe.packing.pad_seq_to_mult
        rows, content = int(row.max(initial=-1)) + 1, int(slots.sum())
        others, in_last = max(rows - 1, 0) * recipe.seq_length, int(slots[row == rows - 1].sum())
        lengths = {
            t: found.parameters["block_length"]
            for t, found in enumerate(tasks)
            if found.objective.copies == 2
        }
        blocks = sum(
            int((-(-slots[task == t] // 2 // length)).sum()) for t, length in lengths.items()
        )
        arrays = layout(
            rows,
            len(slots),
            recipe.seq_length,
            plan["token_dtype"],
            labels=stores_labels(recipe.output.columns, in_place_rules(tasks)),
            padded=recipe.packing.pad_seq_to_mult > 1,
            blocks=blocks if lengths else None,
            trained=None if documents.training is None else len(slots),
            compact=recipe.output.columns != "full",
        )
        size = DATA_ALIGNMENT + sum(
            dtype.itemsize * math.prod(shape) for dtype, shape in arrays.values()
        )
        in_others = content - in_last if others else 0
        of_prefixes = 0 if recipe.packing.sides is None else inputs_of(tasks, table).sum()
        yield np.array(
            [len(slots), rows, physical.sum(), content, in_others, others, size, of_prefixes],
            np.float64,
        )


def _emptiness(packed: Packed, recipe: Recipe) -> list[str]:
    """Return a warning if rows are less full than FULL, ignoring each shard's last row.

    If rows have two sequences, the fuller one decides.
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
