"""Find the rows that contain a text, by decoding the original tokens of every segment.

```
shard ─► original tokens ─► bytes ─► matches ─► segment, tokens, slots, a snippet
```
`restore` undoes the objectives to get the original tokens. A table gives the bytes of each token
id.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from packprep.dataset.segments import Segments
from packprep.errors import ArgumentError, DatasetError
from packprep.inspection.opened import OpenedDataset, opened
from packprep.inspection.terminal import DIM, HEAD, Page, page
from packprep.messages import counted, visible
from packprep.restoring import restore, slots_of_tokens, sound_segments
from packprep.storage import Folder
from packprep.tokenizer.texts import ByteTable

TOKENS_AT_ONCE = 1 << 19
SNIPPET = 48  # Number of characters on each side of a match.
_CHARACTER_BYTES = 4


class _Find(NamedTuple):
    """A match of the text in a segment.

    Attributes:
        segment: Index of the segment in the shard.
        begin: Index in the segment of the first token of the match.
        end: Index in the segment of the token after the match.
        before: The text before the match.
        after: The text after the match.
        ids: The segment's original tokens.
    """

    segment: int
    begin: int
    end: int
    before: str
    after: str
    ids: np.ndarray


def describe_matches(
    directory: str | os.PathLike | Folder, text: str, limit: int
) -> dict[str, Any]:
    """Find the rows that contain a text, and return the matches as JSON-compatible values.

    The search is exact, in the text of each segment's original tokens. A text that continues in
    another segment is not found.

    Args:
        directory: Directory or URL of the dataset.
        text: The text to search for.
        limit: Maximum number of matches to describe. The counts include all matches.

    Returns:
        A dict with these keys:

        - directory, text, shards
        - segments, tokens: numbers of searched segments and tokens
        - found, matching_segments, matching_rows: numbers of matches, and of segments and rows with
          a match
        - matches: [{row, segment, shard, task, source, file, document, repeat, tokens: [begin, end)
          of the document, slots: [[begin, end)] of the row, before, match, after}]

    Raises:
        ArgumentError: If the text is empty or invalid Unicode.
        DatasetError: If a shard is damaged.
    """
    if not text:
        raise ArgumentError("--grep: the text is empty\nhint: give the text to search for")
    try:
        needle = text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(
            f"--grep {text!r}: not valid Unicode, so no document contains it"
        ) from None
    with opened(directory, {}) as data:
        manifest = data.dataset.manifest
        table = ByteTable(data.texts, manifest["vocab_size"])
        matches: list[dict[str, Any]] = []
        match_count = segments = rows = tokens = 0
        for number, entry in enumerate(manifest["shards"]):
            if not entry["segments"]:
                continue
            with data.shard(number) as shard:
                stored = sound_segments(data.usable_plan, shard)
                # Matches come in segment order, so a change of segment or row is counted once.
                last_segment = last_row = -1
                for find in _finds(data, shard, stored, table, needle):
                    match_count += 1
                    segments += find.segment != last_segment
                    rows += int(stored.row[find.segment]) != last_row
                    last_segment, last_row = find.segment, int(stored.row[find.segment])
                    if len(matches) < limit:
                        matches.append(_match(data, number, shard, stored, find, text))
                tokens += int(stored.tokens.sum())
        return {
            "directory": str(data.local.out),
            "text": text,
            "shards": len(manifest["shards"]),
            "segments": sum(entry["segments"] for entry in manifest["shards"]),
            "tokens": tokens,
            "found": match_count,
            "matching_segments": segments,
            "matching_rows": rows,
            "matches": matches,
        }


def _finds(
    data: OpenedDataset, shard: Any, stored: Segments, table: ByteTable, needle: bytes
) -> Iterator[_Find]:
    """Yield all matches of a shard in segment order. Matches in one segment do not overlap."""
    # Restoring takes memory per token, so a shard is searched in parts that consist of whole
    # segments.
    ends = np.cumsum(stored.tokens)
    bounds = np.unique(
        np.append(np.searchsorted(ends, np.arange(0, int(ends[-1]), TOKENS_AT_ONCE)), len(ends))
    )
    for first_segment, end_segment in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        restored = restore(
            data.usable_plan, shard.arrays, stored, np.arange(first_segment, end_segment)
        )
        if not restored.fits.all():
            raise DatasetError(
                f"{shard.path}: segment {first_segment + int(np.argmin(restored.fits))}: the"
                " tokens between its text do not match its header; the file is damaged"
                "\nhint: run `packprep verify` to find all damage"
            )
        if int(restored.ids.max()) >= table.size:
            raise DatasetError(
                f"{shard.path}: token {restored.ids.max()} is not below the vocabulary size"
                f" {table.size}; the file is damaged"
                "\nhint: run `packprep verify` to find all damage"
            )
        # All texts of a part are one byte string, so a single search covers them.
        flat, offsets = table.decode(restored.ids)
        begins = offsets[restored.offsets]
        text = flat.tobytes()
        match_begin = text.find(needle)
        while match_begin >= 0:
            end = match_begin + len(needle)
            segment = int(np.searchsorted(begins, match_begin, "right")) - 1
            low, high = int(begins[segment]), int(begins[segment + 1])
            if end <= high:
                # A match may start and end inside tokens. These tokens are part of it.
                tokens = (
                    np.searchsorted(offsets, [match_begin, end - 1], "right")
                    - 1
                    - restored.offsets[segment]
                )
                text_before, text_after = _around(text, low, match_begin, end, high)
                ids = restored.ids[restored.offsets[segment] : restored.offsets[segment + 1]]
                yield _Find(
                    first_segment + segment,
                    int(tokens[0]),
                    int(tokens[1]) + 1,
                    text_before,
                    text_after,
                    ids,
                )
                match_begin = text.find(needle, end)
            else:  # The match crosses segments. The next match may begin inside it.
                match_begin = text.find(needle, match_begin + 1)


def _around(text: bytes, low: int, match_begin: int, end: int, high: int) -> tuple[str, str]:
    """Return at most SNIPPET characters on each side of text[match_begin:end].

    The characters come from the segment text[low:high].
    """
    begin = max(low, match_begin - _CHARACTER_BYTES * SNIPPET)
    stop = min(high, end + _CHARACTER_BYTES * SNIPPET)
    # A snippet may be cut inside a character, so both cuts move to the edge of one.
    while begin > low and begin < match_begin and text[begin] & 0xC0 == 0x80:
        begin += 1
    while stop < high and stop > end and text[stop] & 0xC0 == 0x80:
        stop -= 1
    text_before = text[begin:match_begin].decode("utf-8", "backslashreplace")
    return text_before[-SNIPPET:], text[end:stop].decode("utf-8", "backslashreplace")[:SNIPPET]


def _match(
    data: OpenedDataset, number: int, shard: Any, stored: Segments, find: _Find, text: str
) -> dict[str, Any]:
    arrays, g, manifest = shard.arrays, find.segment, data.dataset.manifest
    in_shard = int(stored.row[g])
    start = int(stored.start[g])
    slots = slots_of_tokens(data.usable_plan, arrays, stored, np.array([g]), find.ids)[
        find.begin : find.end
    ]
    return {
        "row": int(data.first_rows[number]) + in_shard,
        "segment": g - int(np.searchsorted(stored.row, in_shard)) + 1,
        "shard": manifest["shards"][number]["file"],
        "task": data.dataset.tasks[int(stored.task[g])]["name"],
        "source": data.source_name(int(stored.source[g])),
        "file": data.file_name(int(stored.file[g])),
        "document": int(stored.doc[g]),
        "repeat": int(stored.repeat[g]),
        "tokens": [start + find.begin, start + find.end],
        "slots": _ranges(slots),
        "before": find.before,
        "match": text,
        "after": find.after,
    }


def _ranges(slots: np.ndarray) -> list[list[int]]:
    """Return slots as half-open ranges: [3 4 5 9] becomes [[3, 6], [9, 10]].

    Slots of −1 are skipped.
    """
    slots = slots[slots >= 0]
    if not len(slots):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [
        [int(slots[a]), int(slots[b - 1]) + 1] for a, b in zip(bounds, bounds[1:], strict=False)
    ]


MARKED = "bold black on yellow"
OPEN, CLOSE = "»", "«"


def print_matches(described: Mapping[str, Any]) -> None:
    """Print the matches as text.

    In a terminal, the output has colours and the terminal's width. Otherwise it is plain, and each
    match is between » and «.
    """
    with page() as drawn:
        _draw(drawn, described)


def _draw(page: Page, described: Mapping[str, Any]) -> None:
    text, match_count = visible(described["text"]), described["found"]
    for match in described["matches"]:
        use = f" · pass {match['repeat']}" if match["repeat"] else ""
        origin = f"{match['source']} {visible(match['file'])} at {match['document']:,}"
        page.wrap(
            Text()
            .append(f"row {match['row']:,} segment {match['segment']:,}", HEAD)
            .append(f" · {match['task']} · {origin}{use}"),
            indent=2,
        )
        # An objective may move the tokens of a match to several places of the row.
        slots = ", ".join(
            f"{begin:,} … {end - 1:,}" if end > begin + 1 else f"{begin:,}"
            for begin, end in match["slots"]
        )
        page.wrap(
            f"  tokens {match['tokens'][0]:,} … {match['tokens'][1] - 1:,} of the document · slots"
            f" {slots}",
            DIM,
            2,
        )
        page.put(_snippet(page, match))
    if described["matches"]:
        page.put()
    # The counts cover all matches, and --limit only the listed ones.
    left_out = match_count - len(described["matches"])
    if left_out:
        page.put(
            f"… and {left_out:,} more; a higher --limit shows more than"
            f" {len(described['matches']):,}"
        )
    where = f"{counted(described['segments'], 'segment')}, {counted(described['tokens'], 'token')}"
    times = (
        "not found"
        if not match_count
        else (
            f"found {match_count:,} {'time' if match_count == 1 else 'times'}, in"
            f" {counted(described['matching_segments'], 'segment')} of"
            f" {counted(described['matching_rows'], 'row')}"
        )
    )
    page.wrap(
        f"{text!r} {times}; searched: {where} in {counted(described['shards'], 'shard')}", indent=2
    )


def _snippet(page: Page, match: Mapping[str, Any]) -> Text:
    """Return one line with the match and the text around it, cut to the width of the page."""
    marked = visible(match["match"])
    room = max((page.width - 2 - len(marked) - 2) // 2, 12)
    text_before, text_after = visible(match["before"])[-room:], visible(match["after"])[:room]
    if page.in_colour:
        return Text("  ").append(text_before).append(marked, MARKED).append(text_after)
    return Text(f"  {text_before}{OPEN}{marked}{CLOSE}{text_after}")
