"""What differs between two datasets, as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from packprep.building.progress import visible
from packprep.inspection.lines import counted
from packprep.inspection.terminal import DIM, HEAD, Page, page

MOST_KEYS = 40
LONGEST_VALUE = 32  # characters of a value


def print_difference(described: Mapping[str, Any]) -> None:
    """The differences as text: in a terminal in colour and as wide as that, else plain."""
    with page() as drawn:
        _draw(drawn, described)


def _draw(page: Page, d: Mapping[str, Any]) -> None:
    page.put(f"here   {d['directory']}")
    page.put(f"there  {d['other']}")
    page.put()
    page.put(_verdict(d), HEAD)
    for name, title in (("recipe", "recipe"), ("manifest", "dataset.json"), ("plan", "plan.json")):
        if d[name]:
            page.put()
            lines = [(each["key"], _value(each["here"]), _value(each["there"])) for each in d[name][:MOST_KEYS]]
            page.table((title, "here", "there"), lines, text_columns=3)
            if len(d[name]) > MOST_KEYS:
                page.put(f"… and {counted(len(d[name]) - MOST_KEYS, 'more key')}; --json gives all")
    for files in d["files"]:
        _draw_files(page, files)
    page.put()
    page.table(
        ("total", "here", "there", "change"),
        [(t["name"], f"{t['here']:,}", f"{t['there']:,}", _change(t["here"], t["there"])) for t in d["totals"]],
        text_columns=1,
    )
    for name in ("tasks", "sources"):
        if any(each["here"] != each["there"] for each in d[name]):
            page.put()
            _draw_mix(page, name.removesuffix("s"), d[name])
    page.put()
    shards = d["shards"]
    page.wrap(
        f"shards: {shards['equal']:,} equal, {shards['differing']:,} differ, {shards['only_here']:,} only here, "
        f"{shards['only_there']:,} only there"
    )
    if d["rows_not_compared"]:
        page.wrap(f"  {d['rows_not_compared']}", indent=2)
    for each in d["rows"]:
        _draw_row(page, each)


def _verdict(d: Mapping[str, Any]) -> str:
    made = d["manifest"] or d["plan"]
    if d["equal"]:
        return "equal: a trainer reads the same" + ("; what made them differs" if made else "")
    return "they differ"


def _draw_files(page: Page, files: Mapping[str, Any]) -> None:
    for key, words in (("changed", "of another size"), ("only_here", "only here"), ("only_there", "only there")):
        some = files[key]
        if some["count"]:
            names = ", ".join(map(visible, some["names"])) + (" …" if some["count"] > len(some["names"]) else "")
            page.wrap(f"files of {files['source']} {words}: {some['count']:,} ({names})", indent=2)


def _draw_mix(page: Page, title: str, entries: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    for each in entries:
        here, there = each["here"], each["there"]
        columns = []
        for what in ("segments", "tokens"):
            one, two = (side[what] if side else None for side in (here, there))
            columns += ["–" if count is None else f"{count:,}" for count in (one, two)]
            columns.append(_change(one or 0, two or 0))
        lines.append((each["name"], *columns))
    head = (title, "segments here", "there", "change", "tokens here", "there", "change")
    page.table(head, lines, text_columns=1)


def _draw_row(page: Page, each: Mapping[str, Any]) -> None:
    where = each["shard"].removeprefix("shards/").removesuffix(".safetensors")
    if each["array"] is None:
        more = f"{each['rows'][0]:,} and {each['rows'][1]:,} rows"
        lacking = f"; only one has {', '.join(each['arrays_of_one'])}" if each["arrays_of_one"] else ""
        page.wrap(f"  {where}: every value that both have is the same: {more}{lacking}", indent=2)
        return
    place = f"slot {each['slot']:,}" if each["slot"] is not None else f"segment {each['segment']:,}"
    values = f"{_value(each['here'])} here, {_value(each['there'])} there"
    page.wrap(
        f"  {where}: row {each['row']:,} is the first that differs: {each['array']} at {place}: {values}", indent=2
    )
    for name in ("here", "there"):
        text = each[f"{name}_text"]
        page.put(f"    {name:<5}  {'' if text is None else visible(text)}", DIM)


def _change(here: int, there: int) -> str:
    return "" if here == there else f"{there - here:+,}"


def _value(value: Any) -> str:
    text = "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = visible(text)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
