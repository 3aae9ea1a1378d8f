"""Where a document went, as text."""

from collections.abc import Mapping
from typing import Any

from packprep.building.progress import visible
from packprep.inspection.lines import counted
from packprep.inspection.terminal import DIM, HEAD, Page, page

SHOWN = 160  # characters of the document's beginning
MOST_SEGMENTS = 50  # of one use


def print_document(described: Mapping[str, Any]) -> None:
    """The answer as text: in a terminal as wide as that and with colour, else plain, 100 columns wide."""
    with page() as drawn:
        _draw(drawn, described)


def _draw(page: Page, described: Mapping[str, Any]) -> None:
    position = described["position"]
    for file in described["files"]:
        where = f"{described['source']} {visible(file['file'])} at {position:,}"
        size = "" if file["tokens"] is None else f" · {counted(file['tokens'], 'token')}"
        page.wrap(f"{where}{size}", HEAD)
        if file["text"] is not None:
            more = " …" if len(file["text"]) > SHOWN else ""
            page.wrap(f"  {visible(file['text'][:SHOWN])}{more}", indent=2)
        elif file["not_read"]:
            page.wrap(f"  its source was not read: {file['not_read']}", DIM, indent=2)
        for use in file["uses"]:
            _draw_use(page, use)
        near = [f"{word} {file[word]:,}" for word in ("before", "after") if file[word] is not None]
        if near:
            page.put(f"  the nearest documents known: {', '.join(near)}")
        page.put()
    if not described["files"]:
        page.wrap(
            f"{described['source']}: no file has a document at {position:,}, used or rejected; give --doc FILE:POSITION"
        )
        page.put()
    if described["more_files"]:
        page.wrap(
            f"… and {counted(described['more_files'], 'more file')} with a document there; give --doc FILE:POSITION for one"
        )
    page.put(f"{described['shards_searched']:,} of {counted(described['shards'], 'shard')} searched", DIM)


def _draw_use(page: Page, use: Mapping[str, Any]) -> None:
    what = f": {visible(use['why'])}" if use["why"] else f" in {counted(len(use['segments']), 'segment')}"
    page.wrap(f"  use {use['use']}: {use['outcome']}{what}", indent=2)
    segments = use["segments"]
    if segments:
        page.table(
            ("  task", "tokens", "row", "segment", "slots", "trained", "shard"),
            [
                (
                    f"  {segment['task']}",
                    _range(segment["tokens"]),
                    f"{segment['row']:,}",
                    f"{segment['segment']:,}",
                    _range(segment["slots"]),
                    f"{segment['trained']:,}",
                    segment["shard"].removeprefix("shards/").removesuffix(".safetensors"),
                )
                for segment in segments[:MOST_SEGMENTS]
            ],
            text_columns=1,
        )
    if len(segments) > MOST_SEGMENTS:
        page.put(f"  … and {counted(len(segments) - MOST_SEGMENTS, 'more segment')}; --json gives all")
    for left_out in use["left_out"]:
        begin, end = left_out["tokens"]
        tokens = f"tokens from {begin:,}" if end is None else f"tokens {_range([begin, end])}"
        page.wrap(f"  {tokens} {left_out['why']}", indent=2)


def _range(bounds: list[int]) -> str:
    return f"{bounds[0]:,} … {bounds[1] - 1:,}"
