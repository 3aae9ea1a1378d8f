"""Summarize a dataset: its size, packing efficiency, mixture and lengths."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.ledger import (
    APART,
    ENCODER,
    FILTERED,
    HISTORY,
    MEDIA,
    PASSES,
    add_ledgers,
    is_ledger,
    of_sides,
)
from packprep.building.run import Outcome
from packprep.dataset.loader import segments_of
from packprep.dataset.manifest import Manifest, encoder_length, read_manifest
from packprep.dataset.shard import shard_in
from packprep.documents.joining import GROUP_WORDS
from packprep.errors import DatasetError
from packprep.format.json_files import MANIFEST_NAME, shard_name
from packprep.inspection.terminal import HEAD, Page, page
from packprep.inspection.text import sides_in_words, size_of
from packprep.messages import counted
from packprep.storage import Folder, LocalCopy, folder_at, local_copy

SEVERAL = "several"
"""Value of `kind` in the summary of a folder with several datasets."""
MOST_SHARDS = 32  # Maximum number of shards read for lengths and loss.


def describe_dataset(directory: str | os.PathLike | Folder) -> dict[str, Any]:
    """Return a summary of a published dataset or token store as JSON-compatible values.

    The result has the keys of `describe_manifest` and, for a dataset, of `_lengths`.
    """
    with local_copy(folder_at(directory)) as local:
        local.fetch(MANIFEST_NAME)
        manifest = read_manifest(local.folder, stores=True)
        if "kind" in manifest:
            return describe_manifest(str(local.out), manifest)
        return {**describe_manifest(str(local.out), manifest), **_lengths(local, manifest)}


def describe_several(directory: str, summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a summary of several datasets in one folder as JSON-compatible values.

    The result has sums over all datasets, and a few numbers per dataset.

    Args:
        directory: The folder, or its URL.
        summaries: The result of `describe_dataset` for each dataset.
    """
    slots = sum(summary["row_slots"] for summary in summaries)
    tokens = sum(summary["tokens"]["used"] for summary in summaries)
    return {
        "directory": directory,
        "kind": SEVERAL,
        "published": True,
        **{
            key: sum(summary[key] for summary in summaries)
            for key in ("shards", "bytes", "rows", "segments")
        },
        "row_slots": slots,
        "tokens": {"used": tokens},
        "datasets": [
            {
                **{key: summary[key] for key in ("directory", "seq_length", "rows", "segments")},
                "documents": summary["documents"]["used"],
                "tokens": summary["tokens"]["used"],
                "token_share": _share(summary["tokens"]["used"], tokens),
                "slot_share": _share(summary["row_slots"], slots),
            }
            for summary in summaries
        ],
    }


def describe_build(outcome: Outcome) -> dict[str, Any]:
    """Return the result of a build as JSON-compatible values.

    For a published dataset, the result is `describe_manifest` with the key `made`. For an
    unfinished build, it has the numbers of finished and missing shards, and the next step.
    """
    if outcome.manifest is not None:
        summary = describe_manifest(str(outcome.out), outcome.manifest)  # type: ignore[arg-type]
        return {**summary, "made": outcome.made}
    shards = outcome.plan.shards
    return {
        "directory": str(outcome.out),
        "published": False,
        "shards": shards,
        "done": shards - outcome.missing,
        "missing": outcome.missing,
        "made": outcome.made,
        "next": (
            "The other array tasks make the missing shards, and the last task publishes the"
            " dataset. If no task is running, run the same command again to make the missing"
            f" shards. `packprep status {outcome.out}` lists them."
        ),
    }


def describe_manifest(directory: str, manifest: Manifest) -> dict[str, Any]:
    """Return the counts in a manifest and its ledger as JSON-compatible values.

    No shard is read.

    Raises:
        DatasetError: If the ledger is damaged.
    """
    sources, tasks = (
        [entry["name"] for entry in entries] for entries in (manifest["sources"], manifest["tasks"])
    )
    try:
        if not is_ledger(manifest["ledger"], sources, tasks):
            raise TypeError("not the keys and counts of a ledger")
        return _figures(directory, manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            f"{directory}/dataset.json: invalid ledger ({error}); the file is damaged"
            "\nhint: run `packprep verify` to find all damage"
        ) from error


def _figures(directory: str, manifest: Manifest) -> dict[str, Any]:
    ledger, seq_length = manifest["ledger"], manifest["seq_length"]
    sources = ledger["sources"]
    # The ledger counts by source. A count that is absent is 0.
    total = add_ledgers(sources.values())
    documents, slots = total["documents"], total["slots"]
    tokens = {APART: 0, HISTORY: 0} | total["tokens"]
    weights = sum(task["weight"] for task in manifest["tasks"])
    wanted_shares = _wanted_shares(manifest)
    # Each shard fills its last row last, so few rows per shard lower the packing efficiency.
    padding, last_rows = ledger["row_padding"], ledger["last_rows"]
    content = ledger["row_slots"] - padding - slots["padding"]
    content_of_last_rows = last_rows * seq_length - ledger["last_row_padding"]
    # Shares of tokens refer to the used tokens, because rejected and dropped tokens are in no row.
    return {
        "directory": directory,
        "kind": manifest.get("kind", "dataset"),
        "published": True,
        "shards": len(manifest["shards"]),
        "bytes": sum(entry["bytes"] for entry in manifest["shards"]),
        "rows": ledger["rows"],
        "seq_length": seq_length,
        "row_slots": ledger["row_slots"],
        "segments": total["segments"],
        "documents": {
            FILTERED: documents.get(FILTERED, 0),
            **{
                key: documents[key]
                for key in ("read", "used", "rejected", *GROUP_WORDS)
                if key in documents
            },
        },
        "tokens": {
            key: tokens[key] for key in ("read", "used", "truncated", "dropped", APART, HISTORY)
        },
        "slots": {
            "total": ledger["row_slots"] - padding,
            "used": slots["used"],
            "added": slots["added"],
            "padding_inside": slots["padding"],
            MEDIA: slots.get(MEDIA, 0),
            "row_padding": padding,
        },
        "utilisation": {
            "all_rows": _share(content, ledger["row_slots"]),
            "without_last_rows": _share(
                content - content_of_last_rows, ledger["row_slots"] - last_rows * seq_length
            ),
            **of_sides(ledger.get(ENCODER, 0), content, ledger["rows"], _sides(manifest)),
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
                "token_share": _share(ledger["tasks"][task["name"]]["tokens"], tokens["used"]),
            }
            for task in manifest["tasks"]
        ],
        "sources": [
            {
                "name": source["name"],
                "repeat": source["repeat"],
                **_documents_of(sources[source["name"]]["documents"]),
                "segments": sources[source["name"]]["segments"],
                "tokens": sources[source["name"]]["tokens"]["used"],
                "token_share": _share(sources[source["name"]]["tokens"]["used"], tokens["used"]),
                "wanted_share": wanted_shares.get(source["name"]),
            }
            for source in manifest["sources"]
        ],
    }


def _documents_of(documents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a source's documents, from its ledger."""
    return {
        "documents": documents["used"],
        FILTERED: documents.get(FILTERED, 0),
        PASSES: documents.get(PASSES, {}),
    }


def _sides(manifest: Manifest) -> tuple[int, int] | None:
    """Return the lengths of encoder and decoder sequences, or None if rows have one sequence."""
    length = encoder_length(manifest)
    return (length, manifest["seq_length"] - length) if length else None


def _wanted_shares(manifest: Manifest) -> dict[str, float]:
    """Return the share of all tokens that each source should have, such as {"web": 0.75}.

    The recipe's `share` keys determine the result. It is empty if sources have no `share`, or if
    the recipe has several row lengths.
    """
    if manifest["recipe"].get("seq_lengths"):
        return {}
    asked = {
        source["name"]: source.get("share") for source in manifest["recipe"].get("sources", ())
    }
    total_share = sum(share or 0.0 for share in asked.values())
    return {name: share / total_share for name, share in asked.items() if share}


def _share(numerator: float, denominator: float) -> float | None:
    """Return numerator / denominator, or None if the denominator is 0."""
    return numerator / denominator if denominator else None


def _lengths(local: LocalCopy, manifest: Manifest) -> dict[str, Any]:
    """Count lengths and trained slots in at most MOST_SHARDS evenly spaced shards.

    Only one shard at a time has a local copy.

    Returns:
        A dict with these keys:

        - looked_at: {shards, segments}, the numbers of shards and segments that were read
        - trained: task → {slots, trained, share}, the numbers of its slots and trained slots
        - segment_slots: histogram [{from, to, count}] by powers of two, with inclusive ends
        - row_segments: {mean, most, histogram} of the segments per row
    """
    numbers = evenly(len(manifest["shards"]), MOST_SHARDS)
    n_tasks = len(manifest["tasks"])
    trained, slots = np.zeros(n_tasks, np.int64), np.zeros(n_tasks, np.int64)
    by_slots, by_segments = np.zeros(32, np.int64), np.zeros(32, np.int64)
    rows = most_segments = 0
    for number in numbers:
        with local.fetched(shard_name(number)):
            shard = shard_in(local.folder, manifest, number)
            if not shard.segments:
                continue
            segments, flat = segments_of(shard, manifest), shard.arrays.get("loss_mask")
            if flat is None:
                flat = segments.next_token_loss_mask()
            # Sum the mask from the start of a segment to the start of the next segment. Slots
            # between two segments are padding, where the mask is 0.
            by_segment = np.add.reduceat(flat.reshape(-1), segments.at, dtype=np.int64)
            np.add.at(trained, segments.task, by_segment)
            np.add.at(slots, segments.task, segments.slots)
            per_row = np.diff(shard.arrays["row_offsets"])
            by_slots += _powers(segments.slots)
            by_segments += _powers(per_row)
            rows, most_segments = rows + shard.rows, max(most_segments, int(per_row.max()))
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
        "row_segments": {
            "mean": _share(segment_count, rows),
            "most": most_segments,
            "histogram": _histogram(by_segments),
        },
    }


def evenly(count: int, limit: int) -> Sequence[int]:
    """Return the numbers 0 … count − 1, or `limit` evenly spaced ones if there are more."""
    return range(count) if count <= limit else [i * count // limit for i in range(limit)]


def _powers(values: np.ndarray) -> np.ndarray:
    """Return how many values are in the range [2^i, 2^(i+1)) for each i, int64[32].

    Values must be at least 1 and less than 2³¹.
    """
    exponents = np.frexp(values.astype(np.float64))[1] - 1
    return np.bincount(exponents[values > 0], minlength=32)


def _histogram(counts: np.ndarray) -> list[dict[str, int]]:
    filled = np.flatnonzero(counts)
    if not len(filled):
        return []
    powers = range(int(filled[0]), int(filled[-1]) + 1)
    return [{"from": 1 << i, "to": (2 << i) - 1, "count": int(counts[i])} for i in powers]


FAR = 0.01
"""Print a warning if a source's share differs from the requested share by more than this."""


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print the summary as text.

    In a terminal, the output has colours and the terminal's width. Otherwise it is plain and 100
    columns wide.
    """
    with page() as drawn:
        _draw(drawn, summary)


def _draw_store(page: Page, s: Mapping[str, Any]) -> None:
    documents = counted(s["documents"]["used"], "document")
    where = f"{s['directory']}: a token store of {documents} in {counted(s['shards'], 'shard')}"
    page.wrap(f"{where}, {size_of(s['bytes'])}", HEAD)
    page.put(
        f"{s['tokens']['used']:,} tokens of {', '.join(source['name'] for source in s['sources'])}"
    )
    for reason, count in s["documents"]["rejected"].items():
        page.put(f"{count:,} rejected: {reason}")
    page.wrap(f'to build from it: [[sources]] paths = ["{s["directory"]}"], format = "store"')


def _draw_several(page: Page, s: Mapping[str, Any]) -> None:
    where = (
        f"{s['directory']}: {counted(len(s['datasets']), 'dataset')} of {counted(s['rows'], 'row')}"
    )
    page.wrap(f"{where} in {counted(s['shards'], 'shard')}, {size_of(s['bytes'])}", HEAD)
    page.put()
    columns = (
        "dataset",
        "row slots",
        "rows",
        "share of slots",
        "documents",
        "segments",
        "tokens",
        "share of tokens",
    )
    page.table(
        columns,
        [
            (
                summary["directory"].removeprefix(s["directory"]).lstrip("/"),
                *(f"{summary[key]:,}" for key in ("seq_length", "rows")),
                percent(summary["slot_share"]),
                *(f"{summary[key]:,}" for key in ("documents", "segments", "tokens")),
                percent(summary["token_share"]),
            )
            for summary in s["datasets"]
        ],
        text_columns=1,
    )


_OTHERS = {"store": _draw_store, SEVERAL: _draw_several}
"""Value of `kind` → function that draws the summary. The kind of a single dataset is not a key."""


def _draw(page: Page, s: Mapping[str, Any]) -> None:
    if not s["published"]:
        progress = (
            f"{s['done']:,} of {counted(s['shards'], 'shard')} done, {s['missing']:,} missing"
        )
        page.put(f"{s['directory']}: not published yet; {progress}")
        page.put(s["next"])
        return
    if s["kind"] in _OTHERS:
        _OTHERS[s["kind"]](page, s)
        return
    rows = counted(s["rows"], "row")
    where = (
        f"{s['directory']}: {rows} of {s['seq_length']:,} slots in {counted(s['shards'], 'shard')}"
    )
    page.wrap(f"{where}, {size_of(s['bytes'])}", HEAD)
    page.put()
    page.facts(_totals(s))
    page.put()
    # Only a summary that read shards has trained slots and lengths.
    trained = ("trained",) if "trained" in s else ()
    page.table(
        ("task", "objective", "drawn", "segments", "tokens", "share", "slots", *trained),
        [
            (
                task["name"],
                task["objective"],
                percent(task["drawn"]),
                f"{task['segments']:,}",
                f"{task['tokens']:,}",
                percent(task["token_share"]),
                f"{task['slots']:,}",
                *((percent(s["trained"][task["name"]]["share"]),) if "trained" in s else ()),
            )
            for task in s["tasks"]
            if task["drawn"] or task["segments"]
        ],
        text_columns=2,
    )
    page.put()
    # Most recipes ask for no shares, so the column would be empty.
    wanted_column = ("wanted",) if any(source["wanted_share"] for source in s["sources"]) else ()
    page.table(
        ("source", "repeat", "documents", "segments", "tokens", "share", *wanted_column),
        [
            (
                source["name"],
                repeat_in_words(source),
                f"{source['documents']:,}",
                f"{source['segments']:,}",
                f"{source['tokens']:,}",
                percent(source["token_share"]),
                *((percent(source["wanted_share"]),) if wanted_column else ()),
            )
            for source in s["sources"]
        ],
        text_columns=1,
    )
    _draw_passes(page, s["sources"])
    for source in s["sources"]:
        # Shares are planned from estimates, so only a large difference is worth a warning.
        got, asked = source["token_share"] or 0.0, source["wanted_share"]
        if asked is not None and abs(got - asked) > FAR:
            page.wrap(
                f"warning: source {source['name']} has {percent(got)} of the tokens, but the"
                f" recipe asks for {percent(asked)}. Check the rejected, dropped and truncated"
                " tokens, or whether the source has only a few long documents"
            )
    if "segment_slots" in s:
        _draw_lengths(page, s)


MOST_GROUPS = 16
"""Maximum number of numbers of passes that are shown one by one."""


def repeat_in_words(source: Mapping[str, Any]) -> str:
    """Return a source's repeat in a summary as text. For an expression, this is its upper limit."""
    return f"{'≤ ' if source[PASSES] else ''}{source['repeat']:g}"


def _draw_passes(page: Page, sources: Sequence[Mapping[str, Any]]) -> None:
    """Show how many documents of each source have how many passes, if expressions decide."""
    for source in sources:
        if source[PASSES]:
            page.wrap(f"documents of {source['name']} by number of passes: {_by_passes(source)}")


def _by_passes(source: Mapping[str, Any]) -> str:
    """Return the number of documents by number of passes, such as "1: 9, 2: 4".

    With more than MOST_GROUPS numbers, the numbers 2ⁿ … 2ⁿ⁺¹ − 1 are together, as in "4 … 7: 9".
    """
    counts = sorted((int(number), count) for number, count in source[PASSES].items())
    if len(counts) <= MOST_GROUPS:
        return ", ".join(f"{number}: {count:,}" for number, count in counts)
    groups: dict[int, int] = {}
    for number, count in counts:
        groups[number.bit_length()] = groups.get(number.bit_length(), 0) + count
    return ", ".join(
        f"{1 << bits - 1} … {(1 << bits) - 1}: {count:,}" for bits, count in groups.items()
    )


def _totals(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    documents, tokens, slots, fill = s["documents"], s["tokens"], s["slots"], s["utilisation"]
    rejected, dropped = documents["rejected"], tokens["dropped"]
    engine = s["engine"]
    engine_name = (
        f"{engine.get('name')} {engine.get('version')}" if isinstance(engine, Mapping) else engine
    )
    # Each of these texts is empty if its count is 0, so the lines of most datasets are short.
    left_out = _listed(", dropped: ", dropped) + (
        f", {tokens['truncated']:,} truncated" if tokens["truncated"] else ""
    )
    apart = (
        f"; {tokens[APART]:,} of answers not trained, because their question is in another chunk"
        if tokens[APART]
        else ""
    )
    history = f"; {tokens[HISTORY]:,} of history also in an earlier text" if tokens[HISTORY] else ""
    inside = (
        f", {slots['padding_inside']:,} padding inside segments" if slots["padding_inside"] else ""
    )
    grouped = "".join(
        f", {documents[kind]:,} {words}" for kind, words in GROUP_WORDS.items() if kind in documents
    )
    of_media = f", including {slots[MEDIA]:,} of media" if slots[MEDIA] else ""
    filtered = f", {documents[FILTERED]:,} filtered" if documents[FILTERED] else ""
    # With one row per shard, no row is left without the last ones.
    without = fill["without_last_rows"]
    last_note = "" if without is None else f"; {percent(without)} without each shard's last row"
    return [
        (
            "documents",
            (
                f"{documents['read']:,} read, {documents['used']:,}"
                f" used{grouped}{_listed(', rejected: ', rejected)}{filtered}"
            ),
        ),
        (
            "tokens",
            (
                f"{tokens['used']:,} used{left_out}, in"
                f" {counted(s['segments'], 'segment')}{apart}{history}"
            ),
        ),
        (
            "slots",
            (
                f"{slots['total']:,}: {slots['used']:,}"
                f" tokens{of_media}{_listed(', added: ', slots['added'])}{inside}"
            ),
        ),
        (
            "utilisation",
            (
                f"{percent(fill['all_rows'])} of {s['row_slots']:,} slots in"
                f" rows{last_note}{sides_in_words(fill)}"
            ),
        ),
        ("ids", f"{s['token_dtype']}, below {s['vocab_size']:,}, by engine {engine_name}"),
        ("fingerprint", s["fingerprint"]),
    ]


def _draw_lengths(page: Page, s: Mapping[str, Any]) -> None:
    read = s["looked_at"]["shards"]
    sample_note = (
        "" if read == s["shards"] else f" (these and trained slots: from {counted(read, 'shard')})"
    )
    page.put()
    page.put(f"slots per segment{sample_note}", HEAD)
    page.bars(s["segment_slots"])
    per_row = s["row_segments"]
    if per_row["histogram"]:
        page.put()
        page.put(
            f"segments per row: {per_row['mean']:.1f} on average, at most {per_row['most']:,}",
            HEAD,
        )
        page.bars(per_row["histogram"])


def _listed(prefix: str, counts: Mapping[str, int]) -> str:
    """Return `prefix` and the counts, largest first: ", rejected: empty 2, invalid_utf8 1".

    Return an empty text if all counts are 0.
    """
    counted = sorted(((n, name) for name, n in counts.items() if n), key=lambda c: (-c[0], c[1]))
    return prefix + ", ".join(f"{name} {n:,}" for n, name in counted) if counted else ""


def percent(share: float | None) -> str:
    """Return a share as in "12.50%", or "–" for None."""
    return "–" if share is None else f"{share:.2%}"
