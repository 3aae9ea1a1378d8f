"""Compare two datasets: their recipes, totals, and the first slot that differs."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.plan import stored_plan
from packprep.dataset.manifest import Manifest
from packprep.dataset.shard import Shard
from packprep.errors import ArgumentError
from packprep.inspection.opened import OpenedDataset, opened
from packprep.inspection.terminal import DIM, HEAD, Page, page
from packprep.messages import counted, visible
from packprep.objectives.tasks import whole_recipe
from packprep.storage import Folder, folder_at

MOST_FILES = 5  # Maximum number of files named per source.
MOST_SHARDS = 3  # Maximum number of differing shards that are examined.
AROUND = 8  # Number of tokens shown on each side of a slot.
_ROWS_AT_ONCE = 256
# These keys of the manifest describe how a dataset was made.
MADE_BY = ("plan", "engine", "made_with")
# These keys of the manifest are compared separately, or follow from others.
_ELSEWHERE = ("shards", "ledger", "recipe", "digest")


def describe_difference(
    directory: str | os.PathLike | Folder, other_directory: str | os.PathLike | Folder
) -> dict[str, Any]:
    """Return the differences between two datasets, `here` and `there`, as JSON-compatible values.

    Args:
        directory: Directory or URL of the dataset `here`.
        other_directory: Directory or URL of the dataset `there`.

    Returns:
        A dict with the keys `directory`, `other`, `equal`, `recipe`, `manifest`, `plan`,
        `files`, `totals`, `tasks`, `sources`, `shards`, `rows` and `rows_not_compared`. The values
        of `recipe`, `manifest` and `plan` are lists of {key, here, there}, with None for a missing
        key. Differences of the recipe are not repeated in `manifest` and `plan`. `equal` is true if
        a trainer reads the same data from both datasets. Differences in the digests of receipts,
        and in the manifest's keys `plan`, `engine` and `made_with`, do not affect `equal`.

    Raises:
        ArgumentError: If both are the same dataset.
        DatasetError: If a dataset cannot be read.
    """
    if _location(directory) == _location(other_directory):
        raise ArgumentError(
            f"--diff {other_directory}: this is the same dataset\nhint: give another one"
        )
    with opened(directory, {}) as here_data, opened(other_directory, {}) as there_data:
        here_manifest, there_manifest = here_data.dataset.manifest, there_data.dataset.manifest
        shards, differing = _shards(here_manifest["shards"], there_manifest["shards"])
        # Keys that an older version did not store get their defaults.
        recipe = list(
            _differences(
                whole_recipe(here_manifest["recipe"]), whole_recipe(there_manifest["recipe"])
            )
        )
        # A difference of the recipe also changes the manifest and the plan, but is listed only
        # once.
        asked = {difference["key"] for difference in recipe}

        def beside_recipe(here_value: Any, there_value: Any) -> list[dict[str, Any]]:
            return [
                difference
                for difference in _differences(here_value, there_value)
                if difference["key"] not in asked
            ]

        manifest = beside_recipe(
            _without(here_manifest, _ELSEWHERE), _without(there_manifest, _ELSEWHERE)
        )
        plans = (
            stored_plan(here_data.local.folder) or {},
            stored_plan(there_data.local.folder) or {},
        )
        # A trainer reads the same data, no matter which plan, engine or version made it.
        same = all(difference["key"].split(".")[0] in MADE_BY for difference in manifest)
        why_not = None
        if here_manifest["seq_length"] != there_manifest["seq_length"]:
            why_not = (
                f"rows of {here_manifest['seq_length']} and of {there_manifest['seq_length']}"
                " slots cannot be compared slot by slot"
            )
            differing = []
        return {
            "directory": str(here_data.local.out),
            "other": str(there_data.local.out),
            "equal": (
                same
                and not recipe
                and shards["equal"] == len(here_manifest["shards"]) == len(there_manifest["shards"])
            ),
            "manifest": manifest,
            "recipe": recipe,
            "plan": beside_recipe(*map(_own_of_plan, plans)),
            "files": _files(*plans),
            **_totals(here_manifest["ledger"], there_manifest["ledger"]),
            "shards": shards,
            "rows": [
                _first_difference(here_data, there_data, number)
                for number in differing[:MOST_SHARDS]
            ],
            "rows_not_compared": why_not,
        }


def _location(place: str | os.PathLike | Folder) -> str:
    location = folder_at(place).location
    return location.rstrip("/") if isinstance(location, str) else os.path.realpath(location)


def _without(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _own_of_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of plan.json, without `files` and the keys that the manifest also has.

    The result contains `sources`, although the manifest has this key, because the values differ.
    """
    return {
        **_without(plan, (*Manifest.__annotations__, "files")),
        "sources": plan.get("sources", []),
    }


def _differences(here_value: Any, there_value: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """Yield {key, here, there} for each difference between two JSON values.

    The key is a path such as sources[web].repeat. A missing value is None. Lists of named objects
    are compared by name. An object that is in only one list is one difference.
    """
    if isinstance(here_value, Mapping) and isinstance(there_value, Mapping):
        for key in dict.fromkeys([*here_value, *there_value]):
            yield from _differences(
                here_value.get(key), there_value.get(key), f"{path}.{key}" if path else str(key)
            )
    elif _are_named(here_value) and _are_named(there_value):
        here_by_name, there_by_name = (
            {entry["name"]: entry for entry in entries} for entries in (here_value, there_value)
        )
        for name in dict.fromkeys([*here_by_name, *there_by_name]):
            yield from _differences(
                here_by_name.get(name), there_by_name.get(name), f"{path}[{name}]"
            )
        if [*here_by_name] != [*there_by_name] and {*here_by_name} == {*there_by_name}:
            yield {"key": f"{path}: order", "here": [*here_by_name], "there": [*there_by_name]}
    elif here_value != there_value or type(here_value) is not type(there_value):
        yield {"key": path, "here": here_value, "there": there_value}


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, Mapping) and "name" in entry for entry in value
    )


def _files(here_plan: Mapping[str, Any], there_plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare the files of two plans by name and size, and return one entry per source.

    An entry is {"source": "web", "same": 7, "changed": {"count": 1, "names": ["a.jsonl"]},
    "only_here": …, "only_there": …}. Each list of names has at most MOST_FILES names.
    """
    files_of_plans = [_files_by_source(plan) for plan in (here_plan, there_plan)]
    entries = []
    for name in dict.fromkeys([*files_of_plans[0], *files_of_plans[1]]):
        here_files, there_files = (files.get(name, {}) for files in files_of_plans)
        changed = [file for file, size in here_files.items() if there_files.get(file, size) != size]
        only_here, only_there = (
            [f for f in here_files if f not in there_files],
            [f for f in there_files if f not in here_files],
        )
        entries.append(
            {
                "source": name,
                "same": len(here_files) - len(changed) - len(only_here),
                **{
                    key: {"count": len(files), "names": files[:MOST_FILES]}
                    for key, files in (
                        ("changed", changed),
                        ("only_here", only_here),
                        ("only_there", only_there),
                    )
                },
            }
        )
    return entries


def _files_by_source(plan: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    names = [source["name"] for source in plan.get("sources", ())]
    sizes_by_source: dict[str, dict[str, int]] = {name: {} for name in names}
    for file in plan.get("files", ()):
        sizes_by_source[names[file["source"]]][file["name"]] = file["size"]
    return sizes_by_source


def _totals(
    here_ledger: Mapping[str, Any], there_ledger: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Return a dict with the keys `totals`, `tasks` and `sources`, each with [{name, here, there}].

    `totals` has the numbers of rows, segments, documents, tokens and padding slots. `tasks` and
    `sources` have the numbers of segments and tokens per task and per source.
    """
    ledgers = here_ledger, there_ledger

    def summed(ledger: Mapping[str, Any], *keys: str) -> int:
        total = 0
        for source in ledger["sources"].values():
            for key in keys:
                source = source[key]
            total += source
        return total

    # A ledger has most counts by source, so they are summed over the sources.
    totals = {
        "rows": [ledger["rows"] for ledger in ledgers],
        "segments": [summed(ledger, "segments") for ledger in ledgers],
        "documents": [summed(ledger, "documents", "used") for ledger in ledgers],
        "tokens": [summed(ledger, "tokens", "used") for ledger in ledgers],
        "row_padding": [ledger["row_padding"] for ledger in ledgers],
    }

    def by_name(pair: Sequence[Mapping[str, tuple[int, int]]]) -> list[dict[str, Any]]:
        names = dict.fromkeys([*pair[0], *pair[1]])
        return [
            {"name": name, "here": _counts(pair[0].get(name)), "there": _counts(pair[1].get(name))}
            for name in names
        ]

    # A task or a source may be in only one dataset. Its counts are then missing for the other.
    tasks = [
        {name: (t["segments"], t["tokens"]) for name, t in ledger["tasks"].items()}
        for ledger in ledgers
    ]
    sources = [
        {name: (s["segments"], s["tokens"]["used"]) for name, s in ledger["sources"].items()}
        for ledger in ledgers
    ]
    return {
        "totals": [
            {"name": name, "here": here_total, "there": there_total}
            for name, (here_total, there_total) in totals.items()
        ],
        "tasks": by_name(tasks),
        "sources": by_name(sources),
    }


def _counts(counts: tuple[int, int] | None) -> dict[str, int] | None:
    return None if counts is None else {"segments": counts[0], "tokens": counts[1]}


def _shards(
    here_shards: Sequence[Any], there_shards: Sequence[Any]
) -> tuple[dict[str, int], list[int]]:
    """Compare the digests of shards with the same number.

    Return the counts {equal, differing, only_here, only_there}, and the list of the numbers of the
    differing shards. A shard can be missing from one dataset only if the datasets have different
    shard counts.
    """
    count = min(len(here_shards), len(there_shards))
    differing = [i for i in range(count) if here_shards[i]["digest"] != there_shards[i]["digest"]]
    return {
        "equal": count - len(differing),
        "differing": len(differing),
        "only_here": len(here_shards) - count,
        "only_there": len(there_shards) - count,
    }, differing


def _first_difference(
    here_data: OpenedDataset, there_data: OpenedDataset, number: int
) -> dict[str, Any]:
    """Return the first difference between the shards with the same number in two datasets.

    Returns:
        A dict with these keys:

        - shard, rows: name of the shard, and its numbers of rows [here, there]
        - arrays_of_one: names of arrays that only one shard has
        - array: name of the array, or None if all common values are equal
        - row, slot, segment: location of the difference in the shard
        - here, there: the values
        - here_text, there_text: the tokens around the location
    """
    with here_data.shard(number) as here_shard, there_data.shard(number) as there_shard:
        # The difference in the earliest row is the first. In the same row, the order of arrays
        # decides.
        best: tuple[int, int, str, int, int] | None = None
        for order, name in enumerate(here_shard.arrays):
            difference = (
                _difference_of(here_shard, there_shard, name)
                if name in there_shard.arrays
                else None
            )
            if difference and (best is None or (difference[0], order) < best[:2]):
                best = difference[0], order, name, difference[1], difference[2]
        described = {
            "shard": here_data.dataset.manifest["shards"][number]["file"],
            "rows": [here_shard.rows, there_shard.rows],
            "arrays_of_one": sorted(here_shard.arrays.keys() ^ there_shard.arrays.keys()),
            "array": None, "row": None, "slot": None, "segment": None, "here": None, "there": None,
            "here_text": None, "there_text": None,
        }  # fmt: skip
        if best is None:
            return described
        row, _, name, in_row, value_index = best
        # Only arrays with one value per slot give a slot. For others, the segment's first slot is
        # shown.
        in_slots = here_shard.arrays[name].ndim == 2 and name != "trained_ranges"
        values = [
            shard.arrays[name][row, in_row] if in_slots else shard.arrays[name][value_index]
            for shard in (here_shard, there_shard)
        ]
        begin = in_row if in_slots else _begin_of(here_shard, row, in_row)
        for key, data, shard, value in zip(
            ("here", "there"),
            (here_data, there_data),
            (here_shard, there_shard),
            values,
            strict=True,
        ):
            described[key] = json.loads(json.dumps(value.tolist()))
            described[f"{key}_text"] = _around(data, shard, row, begin)
        return {
            **described,
            "array": name,
            "row": row,
            "slot" if in_slots else "segment": in_row + (not in_slots),
        }


def _difference_of(here_shard: Shard, there_shard: Shard, name: str) -> tuple[int, int, int] | None:
    """Find the first value of the array `name` that differs between two shards.

    Return its location as `_row_of` does, or None if all values that both arrays have are equal.
    """
    a, b = here_shard.arrays[name], there_shard.arrays[name]
    count = min(len(a), len(b))
    # The slots of a large shard are compared in parts, up to the first difference.
    for begin in range(0, count, _ROWS_AT_ONCE if a.ndim == 2 else max(count, 1)):
        end = min(begin + (_ROWS_AT_ONCE if a.ndim == 2 else count), count)
        differs = a[begin:end] != b[begin:end]
        if a.dtype.kind == "f":
            # Two NaN are equal here, although NaN differs from itself.
            differs &= ~(np.isnan(a[begin:end]) & np.isnan(b[begin:end]))
        if differs.any():
            place = np.unravel_index(int(np.argmax(differs)), differs.shape)
            return _row_of(here_shard, name, begin + int(place[0]), int(place[-1]))
    return None


def _row_of(shard: Shard, name: str, value_index: int, slot: int) -> tuple[int, int, int]:
    """Return the location of a value of the array `name`: (row, slot or segment, `value_index`).

    `value_index` is the value's index on the first axis of the array. The second result is the slot
    in the row for arrays with one value per slot. For other arrays, it is the index of the segment
    in the row.
    """
    offsets = shard.arrays["row_offsets"]
    if shard.arrays[name].shape == (shard.rows, shard.seq_length):
        return value_index, slot, value_index
    # Entry i of row_offsets ends row i − 1.
    if name == "row_offsets":
        return max(value_index - 1, 0), 0, value_index
    if name.startswith("cu_seqlens"):
        # cu_seqlens has one more entry per row than the row has segments.
        row = int(np.searchsorted(offsets + np.arange(len(offsets)), value_index, "right")) - 1
        return row, max(value_index - int(offsets[row]) - row - 1, 0), value_index
    # Blocks, ranges, media spans and records belong to the segment whose offsets contain their
    # index. A byte of a media reference belongs to a media span in the same way.
    segment = value_index
    for offsets_name in ("media_ref_offsets", f"{name.split('_')[0]}_offsets"):
        if offsets_name == name:
            segment = max(segment - 1, 0)
        elif offsets_name in shard.arrays and (
            offsets_name != "media_ref_offsets" or name == "media_ref"
        ):
            segment = int(np.searchsorted(shard.arrays[offsets_name], segment, "right")) - 1
    row = int(np.searchsorted(offsets, segment, "right")) - 1
    return row, segment - int(offsets[row]), value_index


def _begin_of(shard: Shard, row: int, segment: int) -> int:
    """Return the first slot of a segment in a row. `segment` counts from 0 in this row.

    If the row does not have this segment, the result is any slot of the row.
    """
    first_index = int(shard.arrays["row_offsets"][row]) + row
    physical = shard.arrays.get("cu_seqlens_padded", shard.arrays["cu_seqlens"])
    return min(int(physical[min(first_index + segment, len(physical) - 1)]), shard.seq_length - 1)


def _around(data: OpenedDataset, shard: Shard, row: int, slot: int) -> str | None:
    """Return the tokens around a slot as text, with a bar before the slot.

    Return None if the row does not exist.
    """
    if row >= shard.rows:
        return None
    ids = shard.arrays["tokens"][row].tolist()
    ids_before, ids_after = ids[max(slot - AROUND, 0) : slot], ids[slot : slot + AROUND]
    return "│".join(
        "".join(piece.text for piece in data.texts.pieces(part_ids))
        for part_ids in (ids_before, ids_after)
    )


MOST_KEYS = 40
LONGEST_VALUE = 32  # Maximum number of characters of a value.


def print_difference(described: Mapping[str, Any]) -> None:
    """Print the differences as text.

    In a terminal, the output has colours and the terminal's width. Otherwise it is plain and 100
    columns wide.
    """
    with page() as drawn:
        _draw(drawn, described)


def _draw(page: Page, d: Mapping[str, Any]) -> None:
    page.put(f"here   {d['directory']}")
    page.put(f"there  {d['other']}")
    page.put()
    page.put(_verdict(d), HEAD)
    # The recipe explains most other differences, so it comes first.
    for name, title in (("recipe", "recipe"), ("manifest", "dataset.json"), ("plan", "plan.json")):
        if d[name]:
            page.put()
            lines = [
                (entry["key"], _value(entry["here"]), _value(entry["there"]))
                for entry in d[name][:MOST_KEYS]
            ]
            page.table((title, "here", "there"), lines, text_columns=3)
            if len(d[name]) > MOST_KEYS:
                page.put(f"… and {counted(len(d[name]) - MOST_KEYS, 'more key')}; --json lists all")
    for files in d["files"]:
        _draw_files(page, files)
    page.put()
    page.table(
        ("total", "here", "there", "change"),
        [
            (t["name"], f"{t['here']:,}", f"{t['there']:,}", _change(t["here"], t["there"]))
            for t in d["totals"]
        ],
        text_columns=1,
    )
    # Equal counts would only repeat the totals.
    for name in ("tasks", "sources"):
        if any(entry["here"] != entry["there"] for entry in d[name]):
            page.put()
            _draw_mix(page, name.removesuffix("s"), d[name])
    page.put()
    shards = d["shards"]
    page.wrap(
        f"shards: {shards['equal']:,} equal, {shards['differing']:,} differ,"
        f" {shards['only_here']:,} only here, {shards['only_there']:,} only there"
    )
    if d["rows_not_compared"]:
        page.wrap(f"  {d['rows_not_compared']}", indent=2)
    for entry in d["rows"]:
        _draw_row(page, entry)


def _verdict(d: Mapping[str, Any]) -> str:
    differences = d["manifest"] or d["plan"]
    if d["equal"]:
        return "equal: a trainer reads the same data" + (
            "; the datasets were made differently" if differences else ""
        )
    return "they differ"


def _draw_files(page: Page, files: Mapping[str, Any]) -> None:
    for key, words in (
        ("changed", "with another size"),
        ("only_here", "only here"),
        ("only_there", "only there"),
    ):
        group = files[key]
        if group["count"]:
            names = ", ".join(map(visible, group["names"])) + (
                " …" if group["count"] > len(group["names"]) else ""
            )
            page.wrap(f"files of {files['source']} {words}: {group['count']:,} ({names})", indent=2)


def _draw_mix(page: Page, title: str, entries: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    for entry in entries:
        here_counts, there_counts = entry["here"], entry["there"]
        columns = []
        for unit in ("segments", "tokens"):
            here_count, there_count = (
                side[unit] if side else None for side in (here_counts, there_counts)
            )
            columns += [
                "–" if count is None else f"{count:,}" for count in (here_count, there_count)
            ]
            columns.append(_change(here_count or 0, there_count or 0))
        lines.append((entry["name"], *columns))
    head = (title, "segments here", "there", "change", "tokens here", "there", "change")
    page.table(head, lines, text_columns=1)


def _draw_row(page: Page, difference: Mapping[str, Any]) -> None:
    where = difference["shard"].removeprefix("shards/").removesuffix(".safetensors")
    if difference["array"] is None:
        row_counts = f"{difference['rows'][0]:,} and {difference['rows'][1]:,} rows"
        lacking = (
            f"; only one has {', '.join(difference['arrays_of_one'])}"
            if difference["arrays_of_one"]
            else ""
        )
        page.wrap(f"  {where}: all common values are equal: {row_counts}{lacking}", indent=2)
        return
    place = (
        f"slot {difference['slot']:,}"
        if difference["slot"] is not None
        else f"segment {difference['segment']:,}"
    )
    values = f"{_value(difference['here'])} here, {_value(difference['there'])} there"
    page.wrap(
        f"  {where}: first difference in row {difference['row']:,}: {difference['array']} at"
        f" {place}: {values}",
        indent=2,
    )
    for name in ("here", "there"):
        text = difference[f"{name}_text"]
        page.put(f"    {name:<5}  {'' if text is None else visible(text)}", DIM)


def _change(here_value: int, there_value: int) -> str:
    return "" if here_value == there_value else f"{there_value - here_value:+,}"


def _value(value: Any) -> str:
    text = (
        "–"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )
    text = visible(text)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
