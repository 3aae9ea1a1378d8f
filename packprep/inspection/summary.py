"""What a person who trains wants to know first of a dataset: its size, utilisation, mixes and lengths."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from packprep.building.job import Job
from packprep.building.output import Nearby, Output, nearby, output_of
from packprep.building.run import Outcome
from packprep.corpus.planning import PlannedSource
from packprep.corpus.readers import Batch, Reject, read
from packprep.corpus.reading import keeper
from packprep.corpus.token_documents import take_tokens
from packprep.corpus.tokenization import tokenize
from packprep.dataset.manifest import MANIFEST_NAME, Manifest, read_manifest, shard_name
from packprep.dataset.segments import next_token_loss_mask
from packprep.errors import DatasetError
from packprep.inspection.columns import segments_of, shard_of, spread
from packprep.inspection.decoding import SPECIAL, Piece, TokenTexts
from packprep.inspection.lines import counted, special, visible

MOST_SHARDS = 32  # that are read for lengths and loss
SHOWN_TOKENS = 8  # at either end of document 1
BAR = 40


def describe_dataset(directory: str | os.PathLike | Output) -> dict[str, Any]:
    """A published dataset as plain values: the manifest's and ledger's figures, and what `_lengths` reads from shards."""
    with nearby(output_of(directory)) as near:
        near.bring(MANIFEST_NAME)
        manifest = read_manifest(near.folder)
        return {**_describe(str(near.out), manifest), **_lengths(near, manifest)}


def describe_build(outcome: Outcome) -> dict[str, Any]:
    """What a build came to, as plain values: the dataset, without reading a shard, or what is done and what to do next."""
    if outcome.manifest is not None:
        return {**_describe(str(outcome.out), outcome.manifest), "made": outcome.made}  # type: ignore[arg-type]
    shards = outcome.job.shards
    return {
        "directory": str(outcome.out),
        "published": False,
        "shards": shards,
        "done": shards - outcome.missing,
        "missing": outcome.missing,
        "made": outcome.made,
        "next": (
            "Other array tasks make the missing shards, and the last of them publishes the dataset. If none runs any more, "
            f"run the same command again: it makes what is missing. `packprep status {outcome.out}` says which shards that is."
        ),
    }


def _describe(directory: str, manifest: Manifest) -> dict[str, Any]:
    try:
        return _figures(directory, manifest)
    except (KeyError, TypeError) as error:
        raise DatasetError(
            f"{directory}/dataset.json: its ledger does not have what it should ({error!r}); "
            "the file is damaged: `packprep verify` says where else"
        ) from error


def _figures(directory: str, manifest: Manifest) -> dict[str, Any]:
    ledger, seq_length = manifest["ledger"], manifest["seq_length"]
    sources = ledger["sources"]
    tokens = sum(source["tokens"]["used"] for source in sources.values())
    weights = sum(task["weight"] for task in manifest["tasks"])
    rows, last_rows = ledger["rows"], ledger["last_rows"]
    padding = ledger["row_padding"]
    return {
        "directory": directory,
        "published": True,
        "shards": len(manifest["shards"]),
        "bytes": sum(entry["bytes"] for entry in manifest["shards"]),
        "rows": rows,
        "seq_length": seq_length,
        "row_slots": ledger["row_slots"],
        "segments": sum(source["segments"] for source in sources.values()),
        "documents": {
            "read": sum(source["documents"]["read"] for source in sources.values()),
            "used": sum(source["documents"]["used"] for source in sources.values()),
            "rejected": _summed(source["documents"]["rejected"] for source in sources.values()),
        },
        "tokens": {
            "read": sum(source["tokens"]["read"] for source in sources.values()),
            "used": tokens,
            "truncated": sum(source["tokens"]["truncated"] for source in sources.values()),
            "dropped": _summed(source["tokens"]["dropped"] for source in sources.values()),
        },
        "slots": {
            "total": ledger["row_slots"] - padding,
            "used": sum(source["slots"]["used"] for source in sources.values()),
            "added": _summed(source["slots"]["added"] for source in sources.values()),
            "padding_inside": sum(source["slots"]["padding"] for source in sources.values()),
            "row_padding": padding,
        },
        "utilisation": {
            "all_rows": _share(ledger["row_slots"] - padding, ledger["row_slots"]),
            "without_last_rows": _share(
                ledger["row_slots"] - last_rows * seq_length - (padding - ledger["last_row_padding"]),
                ledger["row_slots"] - last_rows * seq_length,
            ),
        },
        "vocab_size": manifest["vocab_size"],
        "token_dtype": manifest["token_dtype"],
        "engine": manifest["engine"],
        "fingerprint": manifest["fingerprint"],
        "tasks": [
            {
                "name": task["name"],
                "objective": task["objective"],
                "drawn": _share(task["weight"], weights),
                **ledger["tasks"][task["name"]],
                "token_share": _share(ledger["tasks"][task["name"]]["tokens"], tokens),
            }
            for task in manifest["tasks"]
        ],
        "sources": [
            {
                "name": source["name"],
                "repeat": source["repeat"],
                "documents": sources[source["name"]]["documents"]["used"],
                "segments": sources[source["name"]]["segments"],
                "tokens": sources[source["name"]]["tokens"]["used"],
                "token_share": _share(sources[source["name"]]["tokens"]["used"], tokens),
            }
            for source in manifest["sources"]
        ],
    }


def _summed(parts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for key, count in part.items():
            total[key] = total.get(key, 0) + count
    return total


def _share(part: float, whole: float) -> float | None:
    """part / whole; None of nothing."""
    return part / whole if whole else None


def _lengths(near: Nearby, manifest: Manifest) -> dict[str, Any]:
    """Lengths and trained slots, of at most MOST_SHARDS shards at even distances, one at a time.

    looked_at: {shards, segments}. trained: task → {slots, trained, share}. segment_slots and row_segments: histograms
    [{from, to, count}] by powers of two, both ends included; segments per row with their mean and most.
    """
    numbers = spread(len(manifest["shards"]), MOST_SHARDS)
    n_tasks = len(manifest["tasks"])
    trained, slots = np.zeros(n_tasks, np.int64), np.zeros(n_tasks, np.int64)
    by_slots, by_segments = np.zeros(32, np.int64), np.zeros(32, np.int64)
    rows = most = 0
    for number in numbers:
        with near.brought(shard_name(number)):
            shard = shard_of(near.folder, manifest, number)
            segments = segments_of(shard, manifest)
            if not shard.segments:
                continue
            flat, at = shard.arrays.get("loss_mask"), segments.row * shard.seq_length + segments.begin
            if flat is None:
                prefix, size = shard.arrays["segment_prefix"], shard.rows * shard.seq_length
                flat = next_token_loss_mask(at, segments.slots, prefix, size)
            # From one segment's begin to the next: what lies between is padding, where the mask is 0.
            own = np.add.reduceat(flat.reshape(-1), at, dtype=np.int64)
            np.add.at(trained, segments.task, own)
            np.add.at(slots, segments.task, segments.slots)
            per_row = np.diff(shard.arrays["row_offsets"])
            by_slots += _powers(segments.slots)
            by_segments += _powers(per_row)
            rows, most = rows + shard.rows, max(most, int(per_row.max()))
    segment_count = int(by_slots.sum())
    return {
        "looked_at": {"shards": len(numbers), "segments": segment_count},
        "trained": {
            task["name"]: {
                "slots": int(slots[t]),
                "trained": int(trained[t]),
                "share": _share(int(trained[t]), int(slots[t])),
            }
            for t, task in enumerate(manifest["tasks"])
        },
        "segment_slots": _histogram(by_slots),
        "row_segments": {"mean": _share(segment_count, rows), "most": most, "histogram": _histogram(by_segments)},
    }


def _powers(values: np.ndarray) -> np.ndarray:
    """int64[32]: how many of the values (1 ≤ v < 2³¹) lie in [2^i, 2^(i+1))."""
    exponents = np.frexp(values.astype(np.float64))[1] - 1
    return np.bincount(exponents[values > 0], minlength=32)


def _histogram(counts: np.ndarray) -> list[dict[str, int]]:
    filled = np.flatnonzero(counts)
    if not len(filled):
        return []
    powers = range(int(filled[0]), int(filled[-1]) + 1)
    return [{"from": 1 << i, "to": (2 << i) - 1, "count": int(counts[i])} for i in powers]


def print_summary(summary: Mapping[str, Any]) -> None:
    """The summary as text of at most 100 columns, names and numbers aligned."""
    for line in _lines(summary):
        print(line)


def _lines(s: Mapping[str, Any]) -> Iterator[str]:
    if not s["published"]:
        done = f"{s['done']:,} of {counted(s['shards'], 'shard')} done, {s['missing']:,} missing"
        yield f"{s['directory']}: not published yet; {done}"
        yield s["next"]
        return
    documents, tokens, slots, fill = s["documents"], s["tokens"], s["slots"], s["utilisation"]
    rejected, dropped = documents["rejected"], tokens["dropped"]
    engine = s["engine"]
    engine_name = f"{engine['name']} {engine['version']}" if isinstance(engine, Mapping) else engine
    rows = counted(s["rows"], "row")
    yield f"{s['directory']}: {rows} of {s['seq_length']:,} slots in {counted(s['shards'], 'shard')}, {_size(s['bytes'])}"
    yield ""
    yield f"documents    {documents['read']:,} read, {documents['used']:,} used{_listed(', rejected: ', rejected)}"
    left_out = _listed(", dropped: ", dropped) + (f", {tokens['truncated']:,} truncated" if tokens["truncated"] else "")
    yield f"tokens       {tokens['used']:,} used{left_out}, in {counted(s['segments'], 'segment')}"
    inside = f", {slots['padding_inside']:,} padding inside segments" if slots["padding_inside"] else ""
    yield f"slots        {slots['total']:,}: {slots['used']:,} tokens{_listed(', added: ', slots['added'])}{inside}"
    without = fill["without_last_rows"]
    last = "" if without is None else f"; {_percent(without)} without each shard's last row"
    yield f"utilisation  {_percent(fill['all_rows'])} of {s['row_slots']:,} slots in rows{last}"
    yield f"ids          {s['token_dtype']}, below {s['vocab_size']:,}, by engine {engine_name}"
    yield f"fingerprint  {s['fingerprint']}"
    yield ""
    trained = ("trained",) if "trained" in s else ()
    yield from _table(
        ("task", "objective", "drawn", "segments", "tokens", "share", "slots", *trained),
        [
            (
                task["name"],
                task["objective"],
                _percent(task["drawn"]),
                f"{task['segments']:,}",
                f"{task['tokens']:,}",
                _percent(task["token_share"]),
                f"{task['slots']:,}",
                *((_percent(s["trained"][task["name"]]["share"]),) if "trained" in s else ()),
            )
            for task in s["tasks"]
            if task["drawn"] or task["segments"]
        ],
        text_columns=2,
    )
    yield ""
    yield from _table(
        ("source", "repeat", "documents", "segments", "tokens", "share"),
        [
            (
                source["name"],
                f"{source['repeat']:g}",
                f"{source['documents']:,}",
                f"{source['segments']:,}",
                f"{source['tokens']:,}",
                _percent(source["token_share"]),
            )
            for source in s["sources"]
        ],
        text_columns=1,
    )
    if "segment_slots" in s:
        yield from _length_lines(s)


def _length_lines(s: Mapping[str, Any]) -> Iterator[str]:
    read = s["looked_at"]["shards"]
    of = "" if read == s["shards"] else f" (these and trained slots: of {counted(read, 'shard')})"
    yield ""
    yield f"slots of a segment{of}"
    yield from _bars(s["segment_slots"])
    per_row = s["row_segments"]
    if per_row["histogram"]:
        yield ""
        yield f"segments of a row: {per_row['mean']:.1f} on average, at most {per_row['most']:,}"
        yield from _bars(per_row["histogram"])


def _bars(histogram: Sequence[Mapping[str, int]]) -> Iterator[str]:
    names = [f"{h['from']:,}" if h["from"] == h["to"] else f"{h['from']:,} … {h['to']:,}" for h in histogram]
    counts = [f"{h['count']:,}" for h in histogram]
    most = max((h["count"] for h in histogram), default=1)
    name_width, count_width = max(map(len, names), default=0), max(map(len, counts), default=0)
    for name, count, h in zip(names, counts, histogram, strict=True):
        bar = "█" * -(-h["count"] * BAR // most)
        yield f"  {name:>{name_width}}  {count:>{count_width}}  {bar}".rstrip()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> Iterator[str]:
    """The rows under their head, columns two spaces apart; the first `text_columns` to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    for line in [head, *rows]:
        aligned = (cell.ljust if i < text_columns else cell.rjust for i, cell in enumerate(line))
        yield "  ".join(put(width) for put, width in zip(aligned, widths, strict=True)).rstrip()


def _listed(before: str, counts: Mapping[str, int]) -> str:
    """The counts after `before`, the greatest first, as in ", rejected: empty 2, invalid_utf8 1"; nothing for none."""
    some = sorted(((n, name) for name, n in counts.items() if n), key=lambda c: (-c[0], c[1]))
    return before + ", ".join(f"{name} {n:,}" for n, name in some) if some else ""


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"


def _size(n_bytes: int) -> str:
    size, unit = float(n_bytes), 0
    while size >= 1024 and unit < 5:
        size, unit = size / 1024, unit + 1
    return f"{n_bytes} bytes" if not unit else f"{size:.3g} {('', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


def first_document(job: Job) -> str:
    """How document 1 was read, in a line: the first of shard 0 that has tokens, its first and last tokens one by one.

        document 1: web a.jsonl at 0: 1,234 tokens: The│ cat│ sat … on│ the│ mat│.│‹eos›

    Raises SourceError if its file cannot be read.
    """
    first_reject: tuple[PlannedSource, Reject] | None = None
    documents, vocabulary = job.recipe.documents, job.vocabulary
    for source in job.sources:
        for extent in source.extents(0, job.shards):
            keep = keeper(source, extent.use)
            for part in source.parts(extent):
                for batch in read(part, source.source.text_key, keep, batch_bytes=1 << 16):
                    if batch.rejects and first_reject is None:
                        first_reject = source, batch.rejects[0]
                    for i, ids in enumerate(_contents(job, batch)):
                        if ids:
                            where = f"{source.name} {_name_of(source, part.file)} at {batch.positions[i]}"
                            head = [vocabulary.roles["bos"]] if documents.prepend_bos else []
                            tail = [vocabulary.roles["eos"]] if documents.append_eos else []
                            texts = TokenTexts(vocabulary.tokenizer_json, vocabulary.special_ids)
                            return f"document 1: {where}: {len(ids):,} tokens: {_ends(texts, [*head, *ids, *tail])}"
    if first_reject is None:
        return "document 1: shard 0 has no document with tokens"
    source, reject = first_reject
    where = f"{source.name} {_name_of(source, reject.file)} at {reject.position}"
    return (
        f"document 1: shard 0 has no document that can be used; the first is {where}: {reject.reason}: {reject.detail}"
    )


def _contents(job: Job, batch: Batch) -> Iterator[list[int]]:
    """The ids of each document of a batch, one after the other; none of those that are rejected."""
    if batch.tokens is not None:
        tokens = take_tokens(batch.tokens, job.recipe.documents, job.vocabulary)
        yield from (tokens.ids[a:b].tolist() for a, b in pairwise(tokens.offsets.tolist()))
    for text in batch.texts:
        yield tokenize(job.engine, [text], job.recipe.documents.special_text, job.vocabulary).ids.tolist()


def _name_of(source: PlannedSource, file: int) -> str:
    return visible(source.files[file - source.first_file].name)


def _ends(texts: TokenTexts, ids: Sequence[int]) -> str:
    """The ids' texts, a bar between two tokens; only the first and last SHOWN_TOKENS of many."""
    if len(ids) <= 2 * SHOWN_TOKENS:
        return "│".join(map(_shown, texts.one_by_one(ids)))
    return " … ".join("│".join(map(_shown, texts.one_by_one(end))) for end in (ids[:SHOWN_TOKENS], ids[-SHOWN_TOKENS:]))


def _shown(piece: Piece) -> str:
    return special(piece.text) if piece.kind == SPECIAL else visible(piece.text)
