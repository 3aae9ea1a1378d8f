"""The drawings of the docs, made from what the package does, its calls on small inputs, and from
the table of builds.

Written by docs/make.py into docs/drawings/. They take the colour of the text around them; where a
drawing stands alone, its colour follows the reader's light or dark scheme.
"""

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from xml.sax.saxutils import escape

import numpy as np

COLOURS = ("#3b82f6", "#f97316", "#22c55e", "#a855f7", "#ef4444", "#14b8a6", "#eab308")
SEQ_LENGTH, EOS, FIRST_SENTINEL = 72, 258, 266
TEXTS = (
    "Packing fills rows.",
    "A receipt says that a shard is done, and a shard without one is made.",
    "Chance is keyed, so a killed build goes on.",
    "Lengths are exact before anything is rendered.",
    "Rows are mapped, not parsed.",
    "Every token is used once, or counted.",
)
SHORT = (
    "Rows are full.",
    "Chance is keyed.",
    "No token is lost.",
    "Lengths are exact.",
    "Files are mapped.",
)
RECIPE = {
    "seed": 3,
    "seq_length": SEQ_LENGTH,
    "tokenizer": "bytes",
    "tasks": [
        {
            "name": "r",
            "objective": "span_corruption",
            "noise_density": 0.25,
            "mean_span_length": 4.0,
        },
        {"name": "s", "objective": "prefix_lm", "mode_token": "[S2S]"},
        {"name": "causal", "objective": "causal"},
    ],
}


# A small build


class _Silent:
    def begin(self, text_bytes: int, shards: int, missing: int) -> None: ...
    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None: ...
    def say(self, message: str) -> None: ...
    def done(self, item: object) -> None: ...
    def end(self) -> None: ...


@contextlib.contextmanager
def _built(
    table: dict[str, Any], files: dict[str, Sequence[str]]
) -> Iterator[tuple[Path, list[str]]]:
    """(output of a build of some files, names in the order in which they appeared in it)."""
    from packprep.building.run import build
    from packprep.recipe import read_recipe

    with tempfile.TemporaryDirectory() as folder:
        base, out = Path(folder), Path(folder) / "packed"
        for name, texts in files.items():
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_text(
                "".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8"
            )
        appeared: list[str] = []

        def noting(function: Callable) -> Callable:
            @functools.wraps(function)
            def call(source, target, *rest, **more):
                function(source, target, *rest, **more)
                if out in Path(os.fspath(target)).parents:
                    appeared.append(Path(os.fspath(target)).relative_to(out).as_posix())

            return call

        with mock.patch("os.rename", noting(os.rename)), mock.patch("os.link", noting(os.link)):
            build(read_recipe(table, base), out, _Silent())
        yield out, appeared


# Marks


def _cell(
    x: float, y: float, w: float, h: float, text: str = "", colour: str = "", more: str = ""
) -> str:
    """A box with a text in its middle."""
    fill = f'fill="{colour}" fill-opacity=".32"' if colour else 'fill="none"'
    box = (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" {fill} stroke="currentColor"'
        f' stroke-opacity=".35" {more}/>'
    )
    size = 10.5 if len(text) > 2 and w < 24 else 13
    return box + (_text(x + w / 2, y + h / 2 + size / 3, text, "middle", size) if text else "")


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: float = 13, more: str = ""
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}"'
        f" {more}>{escape(text)}</text>"
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str = "currentColor", more: str = ""
) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" {more}/>'


def _svg(width: float, height: float, says: str, marks: Sequence[str]) -> str:
    body = "\n".join(marks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}" height="{height:g}" '
        'role="img" font-family="ui-monospace, Menlo, Consolas, monospace" fill="currentColor">\n'
        f"<title>{escape(says)}</title>\n"
        "<style>:root{color:#1f2328}@media(prefers-color-scheme:dark){:root{color:#e6edf3}}</style>\n"
        f"{body}\n</svg>\n"
    )


def _shown(token: int) -> str:
    """One slot of the vocabulary of bytes, in one or two characters."""
    if token < 256:
        return "␣" if token == 32 else chr(token)
    if token >= FIRST_SENTINEL:
        return f"‹{token - FIRST_SENTINEL}›"
    return {256: "", EOS: "‹/›", 262: "‹S›"}[token]


# The drawings


def row() -> str:
    """A packed row, slot by slot."""
    from packprep import open_dataset

    with _built({**RECIPE, "sources": [{"paths": ["a.jsonl"]}]}, {"a.jsonl": SHORT}) as (out, _):
        dataset = open_dataset(out)
        rows = [dataset.row(i) for i in range(len(dataset))]
        row = max(
            rows,
            key=lambda row: (len(set(row.segments["task"].tolist())), row.n_segments, -row.index),
        )
        columns = {
            name: np.array(getattr(row, name))
            for name in ("tokens", "segment_ids", "position_ids", "loss_mask")
        }
        tasks = [dataset.tasks[task]["name"] for task in row.segments["task"]]
        begins = row.segments["begin"].tolist()
        labels = np.array(row.labels)
    across, w, h, left = 24, 29, 24, 104
    trained = columns["loss_mask"] == 1
    assert (labels[:-1] == columns["tokens"][1:])[trained[:-1]].all()
    marks = []
    for line, begin in enumerate(range(0, SEQ_LENGTH, across)):
        top = line * 140 + 26
        for k, name in enumerate(("tokens", "segment_ids", "position_ids", "loss_mask")):
            marks.append(_text(left - 10, top + k * h + 16, name, "end", 12))
            for j, slot in enumerate(range(begin, begin + across)):
                segment = int(columns["segment_ids"][slot])
                colour = COLOURS[(segment - 1) % len(COLOURS)] if segment else ""
                value = columns[name][slot]
                shown = _shown(int(value)) if name == "tokens" else str(int(value))
                if name == "loss_mask":
                    colour = colour if value else ""
                marks.append(_cell(left + j * w, top + k * h, w, h, shown, colour))
                if k == 0 and slot in begins:
                    marks.append(
                        _text(
                            left + j * w + 1,
                            top - 7,
                            tasks[begins.index(slot)],
                            size=12,
                            more='font-weight="bold"',
                        )
                    )
    return _svg(
        left + across * w + 2,
        3 * 140 + 4,
        "A row of 72 slots with its segments, positions and loss mask",
        marks,
    )


def corruption() -> str:
    """A document, and the segment that span corruption makes of it."""
    from packprep import open_dataset

    text = TEXTS[2]
    table = {**RECIPE, "tasks": RECIPE["tasks"][:1], "sources": [{"paths": ["a.jsonl"]}]}  # type: ignore[index]
    with _built(table, {"a.jsonl": [text]}) as (out, _):
        row = open_dataset(out).row(0)
        (prefix,), (end,) = row.segments["prefix"].tolist(), row.segments["end"].tolist()
        slots, mask = np.array(row.tokens[:end]).tolist(), np.array(row.loss_mask[:end]).tolist()
    # the spans as they stand among the targets: each behind its sentinel
    spans: dict[int, list[int]] = {}
    for token in slots[prefix : end - 1]:
        if token >= FIRST_SENTINEL:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    document, of = [], []
    for token in slots[:prefix]:
        for one in spans.get(token, [token]):
            document.append(one)
            of.append(token if token in spans else -1)
    assert bytes(document).decode() == text, "the drawing does not give the text back"
    colour_of = {token: COLOURS[i % len(COLOURS)] for i, token in enumerate(spans)}
    colours, last = [], -1
    for j, token in enumerate(slots):
        last = token if token in spans else last if j > prefix and token != EOS else -1
        colours.append(colour_of.get(last, ""))
    w, h, left, per_line = 20, 26, 84, 34
    says = f"{len(document)} tokens, {len(spans)} spans: {end} slots"
    assert end == len(document) + 2 * len(spans) + 1
    marks, top = [_text(left, 14, f"{says} = tokens + 2 · spans + eos", size=12)], 24
    lines = (
        ("document", document, [colour_of.get(span, "") for span in of], []),
        ("slots", slots, colours, mask),
    )
    for name, tokens, fills, trained in lines:
        for begin in range(0, len(tokens), per_line):
            marks.append(_text(left - 10, top + 18, name, "end", 12))
            if trained:
                marks.append(_text(left - 10, top + h + 16, "trained", "end", 12))
            for j, slot in enumerate(range(begin, min(begin + per_line, len(tokens)))):
                marks.append(_cell(left + j * w, top, w, h, _shown(tokens[slot]), fills[slot]))
                if trained:
                    marks.append(
                        _text(
                            left + j * w + w / 2,
                            top + h + 16,
                            "▲" if trained[slot] else "·",
                            "middle",
                            10,
                        )
                    )
            top += h + (28 if trained else 6)
        top += 14
    return _svg(left + per_line * w + 2, top - 20, f"Span corruption: {says}", marks)


def packing() -> str:
    """Segments of given lengths in rows, in the order in which they come and by best fit."""
    from packprep.building.packing import pack
    from packprep.randomness import integers, text_key

    capacity, count = 100, 22
    lengths = 6 + integers(text_key(0, "drawing"), 1, np.arange(count), 60).astype(np.int64)
    lengths[::5] = np.minimum(lengths[::5] + 34, capacity)
    marks, top, scale, left = [], 0.0, 5.6, 8
    for algorithm in ("next_fit", "best_fit"):
        row, offset = pack(lengths, capacity, algorithm)
        rows = int(row.max()) + 1
        used = lengths.sum() / (rows * capacity)
        marks.append(
            _text(
                left, top + 18, f"{algorithm}: {rows} rows, {used:.1%} of the slots used", size=13
            )
        )
        for r in range(rows):
            marks.append(
                _cell(left, top + 28 + r * 22, capacity * scale, 18, more='stroke-dasharray="3 3"')
            )
        for i in range(count):
            x, y = left + offset[i] * scale, top + 28 + row[i] * 22
            marks.append(
                _cell(x, y, lengths[i] * scale, 18, str(lengths[i]), COLOURS[i % len(COLOURS)])
            )
        top += 28 + rows * 22 + 14
    return _svg(
        left + capacity * scale + 8, top, "The same segments in rows by two algorithms", marks
    )


def attention() -> str:
    """Who sees whom: the rules of attention on small rows."""
    from packprep.dataset.attention import block_mask, dense_mask, position_ids, prefix_ends

    length, cu = 16, [0, 9, 14]
    ids = np.repeat([1, 2, 0], [9, 5, 2])
    half = np.repeat([0, 1], 8)
    panels = {
        "causal": (ids, dense_mask(ids, prefix_ends(cu, [0, 0], length))),
        "prefix of 5, of 3": (ids, dense_mask(ids, prefix_ends(cu, [5, 3], length))),
        "in place": (ids, dense_mask(ids, prefix_ends(cu, [9, 5], length))),
        "block diffusion": (
            np.ones(16, int),
            block_mask(np.ones(16), np.tile(np.arange(8), 2), half, 4),
        ),
    }
    assert position_ids(cu, length)[9] == 0
    size, marks = 10.5, []
    for n, (name, (segments, mask)) in enumerate(panels.items()):
        left, top = 8 + n * (length * size + 18), 30
        marks.append(_text(left, 18, name, size=12))
        side = size - 1.5
        cells: dict[str, str] = {}
        for q, k in np.ndindex(length, length):
            colour = (
                COLOURS[(int(segments[q]) - 1) % len(COLOURS)] if mask[q, k] and segments[q] else ""
            )
            cells[colour] = (
                f"{cells.get(colour, '')}M{left + k * size:g}"
                f" {top + q * size:g}h{side:g}v{side:g}h-{side:g}z"
            )
        for colour, path in cells.items():
            fill = (
                f'fill="{colour}" fill-opacity=".7"'
                if colour
                else 'fill="currentColor" fill-opacity=".07"'
            )
            marks.append(f'<path d="{path}" {fill}/>')
    return _svg(
        8 + 4 * (length * size + 18),
        30 + length * size + 8,
        "Attention: rows are queries, columns are keys",
        marks,
    )


def shards() -> str:
    """Two sources, their pieces in keyed order, and what each shard and each array task takes of
    them."""
    from packprep.building.array_tasks import share_of
    from packprep.building.plan import open_plan

    sizes = {"web": (9, 4, 6, 2, 7), "code": (3, 5, 2)}
    files = {
        f"{source}/{i}.jsonl": ["a line of text"] * 10 * n
        for source, ns in sizes.items()
        for i, n in enumerate(ns)
    }
    table = {
        **RECIPE,
        "tasks": [{"objective": "causal"}],
        "sources": [{"name": name, "paths": [f"{name}/*.jsonl"]} for name in sizes],
        "output": {"shard_text_bytes": 1000},
    }
    with _built(table, files) as (out, _):
        plan = open_plan(out)
        count, tasks = plan.shards, 3
        taken = {
            source.name: [
                list(source.taken(b, count, source.places(b, count))) for b in range(count)
            ]
            for source in plan.sources
        }
    task_of = {b: task for task in range(tasks) for b in share_of(task, tasks, count)}
    width, left, marks = 620, 60, []
    for n, (name, by_shard) in enumerate(taken.items()):
        top, x = 8 + n * 62, 0.0
        total = sum(hi - lo for shard in by_shard for _, _, lo, hi, _ in shard)
        marks.append(_text(left - 8, top + 19, name, "end"))
        for b, shard in enumerate(by_shard):
            for piece, _, lo, hi, _ in shard:
                w = (hi - lo) / total * width
                box = f'x="{left + x:g}" y="{top}" width="{w:g}" height="28"'
                marks.append(f'<rect {box} fill="{COLOURS[task_of[b]]}" fill-opacity=".32"/>')
                if lo == 0:
                    marks.append(_line(left + x, top, left + x, top + 28, more='stroke-width="2"'))
                    marks.append(_text(left + x + 5, top + 19, str(piece), size=11))
                x += w
        marks.append(_cell(left, top, width, 28))
        for b in range(1, count):
            marks.append(
                _line(
                    left + b * width / count,
                    top - 4,
                    left + b * width / count,
                    top + 60,
                    more='stroke-dasharray="3 3"',
                )
            )
    top = 8 + 2 * 62
    marks.append(_text(left - 8, top + 19, "shards", "end"))
    for b in range(count):
        marks.append(
            _cell(left + b * width / count, top, width / count, 28, str(b), COLOURS[task_of[b]])
        )
    marks.append(_text(left - 8, top + 57, "tasks", "end"))
    for task in range(tasks):
        own = share_of(task, tasks, count)
        w = len(own) * width / count
        marks.append(
            _cell(
                left + own.start * width / count,
                top + 38,
                w,
                28,
                f"array task {task}",
                COLOURS[task],
            )
        )
    return _svg(
        left + width + 8,
        top + 74,
        "Pieces of two sources, cut into shards, shared by three array tasks",
        marks,
    )


def commit() -> str:
    """The order in which the files of a dataset appear."""
    words = {
        "tokenizer.json": "the exact tokenizer",
        "plan.json": "what was resolved; all tasks read it",
        "first-seen.json": "the sources' times, until publication",
        "shards": "the rows",
        "rejects": "what could not be used, and why",
        "receipts": "only now shard {b} counts as done",
        "dataset.json": "once all receipts are there: the dataset",
    }
    table = {**RECIPE, "sources": [{"paths": ["a.jsonl"]}], "output": {"shard_text_bytes": 150}}
    with _built(table, {"a.jsonl": [*TEXTS[:3], "", *TEXTS[3:]]}) as (_, appeared):
        pass
    assert appeared[-1] == "dataset.json" and appeared.index("plan.json") < 2
    marks = []
    for n, name in enumerate(appeared):
        top = 8 + n * 34
        kind, number = name.split("/")[0], name.rpartition("/")[2].split(".")[0]
        group = int(number) + 1 if number.isdigit() else 0
        marks.append(_cell(30, top, 330, 26, name, COLOURS[group % len(COLOURS)] if group else ""))
        marks.append(_text(376, top + 18, words[kind].format(b=group - 1), size=12))
        if n:
            marks.append(_line(16, top - 20, 16, top + 12, more='stroke-opacity=".5"'))
        marks.append(f'<circle cx="16" cy="{top + 13}" r="4"/>')
    return _svg(
        700,
        8 + len(appeared) * 34,
        "The order in which files appear; each whole or not at all",
        marks,
    )


def rates() -> str:
    """Tokens a second from text to disk, a bar for each line of the table of builds in
    benchmarks.md."""
    page = (Path(__file__).parent / "benchmarks.md").read_text("utf-8")
    table = page.split("<!-- measured: builds -->")[1].split("<!-- /measured -->")[0]
    cells = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    names, at = [row[0] for row in cells[2:]], cells[0].index("tokens/s")
    found = {
        name: int(row[at].replace(",", "")) for name, row in zip(names, cells[2:], strict=True)
    }
    found.pop("packprep ul2r, one document")  # what starting costs
    most, left, wide, high = max(found.values()), 230, 380, 22
    marks = []
    for i, (name, rate) in enumerate(found.items()):
        y, length = 8 + i * high, wide * rate / most
        marks.append(_text(left - 8, y + 14, name, "end"))
        marks.append(
            _cell(
                left,
                y,
                length,
                high - 5,
                colour=COLOURS[0] if name.startswith("packprep") else COLOURS[1],
            )
        )
        marks.append(_text(left + length + 8, y + 14, f"{rate / 1e6:.1f} M tokens/s"))
    says = (
        "Tokens a second on two cores: packprep's builds, a bare loop, and tools that only tokenize"
    )
    return _svg(left + wide + 130, 16 + len(found) * high, says, marks)


DRAWINGS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (row, corruption, packing, attention, shards, commit, rates)
}
