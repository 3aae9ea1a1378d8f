"""Writes the parts of the docs that follow from the code, between `<!-- made: NAME -->` and `<!--
/made -->`, and whole
files: drawings, the JSON schema of the recipe.

python docs/make.py            rewrites what is out of date
python docs/make.py --check    changes nothing; exit status 1 and a line for each part that is out of date

Run by `nox -s docs`; tests/docs/test_made_parts.py holds that nothing is out of date.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).resolve().parent
_PART = re.compile(r"(<!-- made: (?P<name>[a-z0-9 _-]+) -->\n)(?P<text>.*?)(<!-- /made -->)", re.S)


# cli.md


def help_of(*command: str) -> str:
    """What `packprep COMMAND --help` prints, 80 columns wide."""
    from typer.testing import CliRunner

    from packprep.cli.application import app

    environment = {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [*command, "--help"], prog_name="packprep", env=environment)
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.output.strip().splitlines()]
    return _fenced("\n".join(lines))


def _fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```\n"


# guides/slurm.md


def slurm_script() -> str:
    """The script of an array, as `packprep slurm` writes it in /data with Python in /data/venv."""
    from packprep.building.slurm import ArrayJob, scripts

    options = ("--time=4:00:00", "--cpus-per-task=2", "--mem=8G")
    job = ArrayJob(
        "build", ("/data/recipe.toml",), Path("/data/packed"), count=8, at_once=4, options=options
    )
    text = scripts(job, Path("/data/packed.slurm"))["build.sh"]
    for ours, theirs in (
        (f"cd -- {shlex.quote(os.getcwd())} ", "cd -- /data "),
        (sys.executable, "/data/venv/bin/python"),
    ):
        assert ours in text
        text = text.replace(ours, theirs)
    return _fenced(text.rstrip("\n"), "bash")


# guides/cluster.md


def schedulers() -> str:
    """The table of the array variables, from building/array_tasks.py."""
    from packprep.building.array_tasks import SCHEDULERS

    rows = []
    for scheduler in SCHEDULERS:
        first = scheduler.first if isinstance(scheduler.first, int) else f"`{scheduler.first}`"
        counting = [name for name in (scheduler.count, scheduler.last, scheduler.step) if name]
        counts = ", ".join(f"`{name}`" for name in counting) or "`--array-count N`"
        rows.append((scheduler.name, f"`{scheduler.index}`", str(first), counts))
    return _table(("scheduler", "number of the task", "first number", "number of tasks"), rows)


# recipe.md


def keys(section: str) -> str:
    """The table of a section's keys, from recipe/schema.py."""
    from packprep.recipe import KEYS

    rows = []
    for name, key in KEYS[section].items():
        if section == "specials" and name == "mode_tokens":
            name, default = '"[NLU]", …', "none"
        else:
            default = _toml(key.default)
        rows.append((f"`{name}`", key.kind, default, key.meaning))
    return _table(("key", "type and range", "default", "meaning"), rows)


def audit_kinds() -> str:
    """The table of what an audit looks for, from audit/kinds.py."""
    from packprep.audit.kinds import KINDS

    rows = [
        (f"`{name}`", kind.title, f"{kind.most:.0%} of {kind.unit}") for name, kind in KINDS.items()
    ]
    return _table(("kind", "what it counts", "finding above"), rows)


def parameters(objective: str) -> str:
    """The table of the keys of `[[tasks]]` that an objective reads."""
    from packprep.objectives import REGISTRY

    kinds = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        tuple: "",
    }
    rows = []
    for parameter in REGISTRY[objective].parameters:
        kind, limits = kinds[type(parameter.default)], parameter.range_text()
        if parameter.choices or isinstance(parameter.default, (bool, tuple)):
            kind = limits
        elif limits:
            kind += f" in {limits}"
        rows.append((f"`{parameter.name}`", kind, _toml(parameter.default), parameter.meaning))
    return (
        _table(("key", "type and range", "default", "meaning"), rows)
        if rows
        else "It reads no keys of its own.\n"
    )


def presets() -> str:
    """The table of presets, from presets.toml."""
    from packprep.recipe import presets as read_presets

    rows = []
    for preset, tasks in read_presets().items():
        whole = sum(task.get("weight", 1.0) for task in tasks)
        for i, task in enumerate(tasks):
            settings = [
                f"{k} = {_toml(v, quote='')}" for k, v in task.items() if k not in _TASK_KEYS
            ]
            share = f"{task.get('weight', 1.0) / whole:.4g}"
            mode = f"`{task['mode_token']}`" if "mode_token" in task else ""
            rows.append(
                (
                    "" if i else f"`{preset}`",
                    task["name"],
                    task["objective"],
                    share,
                    mode,
                    ", ".join(settings),
                )
            )
    return _table(("preset", "task", "objective", "share", "mode token", "parameters"), rows)


_TASK_KEYS = ("name", "objective", "weight", "mode_token")


def _toml(value: Any, quote: str = "`") -> str:
    if value is ...:
        return "**required**"
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, tuple):
        text = "[" + ", ".join(_toml(item, "") for item in value) + "]"
    else:
        text = f"{value:g}" if isinstance(value, float) and value != int(value) else str(value)
    return f"{quote}{text}{quote}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


# objectives.md

EOS, MASK, MODE, FIRST_SENTINEL = 2, 3, 90, 100
FIM = (91, 92, 93)


def example(
    objective: str,
    n: int,
    key: int,
    mode: bool = True,
    spans: Sequence[tuple[int, int]] = (),
    fill: int = 0,
    **given: Any,
) -> str:
    """One segment of an objective, slot by slot: what render writes and what `restore` gives back.

    spans: the trained tokens of a supervised document; none: all are. fill: number of eos that fill
    up the last block.
    """
    from packprep.building.render import Texts, render_rows
    from packprep.conversations.supervision import Conversation
    from packprep.conversations.training import trained_tokens, training_columns
    from packprep.dataset.blocks import answers_of_ranges, blocks_of
    from packprep.dataset.segments import Bodies, Segments
    from packprep.objectives.objective import BodySlots

    task = _task(objective, mode, given)
    record, settings = task.objective, task.parameters
    tokens = np.arange(10, 10 + n, dtype=np.uint16)
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    training = None
    if spans:
        marked = trained_tokens(Conversation("x" * n, spans), np.arange(n))
        training = training_columns({0: marked}, 1)
    bodies = Bodies(
        one * n, np.array([key], np.uint64), one * (spans[0][0] if spans else -1), one * fill
    )
    slots = task.slots(bodies, none, one)
    segments = Segments.create(
        1,
        document=none,
        tokens=bodies.n,
        eos=one,
        key=bodies.key,
        first_trained=bodies.first_trained,
        fill=bodies.fill,
        slots=slots,
    )
    width = int(slots[0])
    made, rendered = render_rows([task], segments, Texts(none, tokens, training), width)
    row, loss = made["tokens"][0], made["loss_mask"][0]
    targets = made["labels"][0] if task.in_place else np.append(row[1:], 0)
    restored = np.zeros(n, np.uint16)
    if task.in_place:
        half = width // record.copies if record.copies > 1 else 0  # where x_0 lies
        restored[:] = (row if half else targets)[half + task.mode : half + task.mode + n]
    else:
        assert record.restore is not None
        assert record.restore(task, BodySlots(none, bodies, one * task.mode), row, restored).all()
    assert np.array_equal(restored, tokens)

    def line(name: str, cells: Sequence[Any]) -> str:
        return f"{name:<11}" + "".join(f"{cell:>4}" for cell in cells)

    prefix = int(rendered.prefix[0])
    noise = set(row[prefix:].tolist())  # span corruption's: the tokens that are among the targets
    trained = [f"{label}" if on else "." for label, on in zip(targets, loss, strict=True)]
    named = ", ".join(
        f"{name} = {_toml(value, '')}" for name, value in settings.items() if name in given
    )
    head = f"{objective}{': ' + named if named else ''}   ({n} tokens, key {key})"
    lines = [head, "", line("document", tokens)]
    if objective == "span_corruption":
        lines.append(line("noise", [int(token in noise) for token in tokens]))
    if spans:
        lines.append(line("in spans", [int(any(a <= i < b for a, b in spans)) for i in range(n)]))
    lines.append(line("slots", row))
    if prefix >= 0:
        lines.append(line("prefix", ["P" if i < prefix else "." for i in range(width)]))
    blocks = rendered.blocks
    if blocks is not None:
        ranges, answers = rendered.trained, None
        if ranges is not None:
            answers = answers_of_ranges(ranges.segment, ranges.ranges)
        bounds = blocks_of(settings, slots // 2, one * task.mode, answers)
        half = ["."] * (width // 2)
        for b, (begin, end) in enumerate(zip(bounds.begin, bounds.end, strict=True)):
            half[begin:end] = [str(b)] * (end - begin)
        lines += [line("half", ["t"] * len(half) + ["0"] * len(half)), line("block", half * 2)]
    lines += [line("trained on", trained), line("loss_mask", loss), ""]
    if blocks is not None:
        levels = ", ".join(
            f"{level:.3f} (weight {weight:.3f})"
            for level, weight in zip(blocks.noise, blocks.loss_weight, strict=True)
        )
        lines.append(f"levels of the blocks {levels}")
    elif task.in_place:
        lines.append(f"level {rendered.noise[0]:.3f}, loss weight {rendered.loss_weight[0]:.3f}")
    lines.append(f"{width} slots, prefix {prefix}, restored: {' '.join(map(str, restored))}")
    return _fenced("\n".join(line.rstrip() for line in lines))


def _task(objective: str, mode: bool, given: Mapping[str, Any]) -> Any:
    """A task of the examples."""
    from packprep.objectives import REGISTRY
    from packprep.objectives.objective import Ids, Task

    record = REGISTRY[objective]
    settings = {parameter.name: parameter.default for parameter in record.parameters} | given
    sentinels = np.arange(FIRST_SENTINEL, FIRST_SENTINEL + 20, dtype=np.int32)
    ids = Ids(128, 0, 1, EOS, MASK, sentinels, FIM, (*range(10), *range(MODE, 128)))
    resolved = record.resolve(settings, ids) if record.resolve else {}
    return Task(objective, record, 1.0, settings, MODE if mode else -1, ids, resolved)


def block_laws() -> str:
    """x_t of one segment under each law of block diffusion, and what is trained there."""
    from packprep.building.render import Texts, render_rows
    from packprep.dataset.segments import Segments

    n, key, one, none = 11, 7, np.ones(1, np.int64), np.zeros(1, np.int64)
    tokens, lines = np.arange(10, 10 + n, dtype=np.uint16), []
    for given, epochs in (
        ({}, (0,)),
        ({"noise": "all", "shift": True}, (0,)),
        ({"noise": "position"}, (0,)),
        ({"canvas": "uniform", "weighting": "none"}, (0,)),
        ({"complementary": True, "shift": True}, (0, 1)),
    ):
        task = _task("block_diffusion", False, {"block_length": 6, **given})
        segments = Segments.create(
            1,
            tokens=one * n,
            eos=one,
            key=np.array([key], np.uint64),
            slots=one * 2 * (n + 1),
        )
        for epoch in epochs:
            texts = Texts(none, tokens)
            made, rendered = render_rows([task], segments, texts, 2 * (n + 1), epoch)
            named = (
                ", ".join(f"{name} = {_toml(value, '')}" for name, value in given.items())
                or "as above"
            )
            row, labels, loss = (
                made[name][0][: n + 1] for name in ("tokens", "labels", "loss_mask")
            )
            trained = [f"{label}" if on else "." for label, on in zip(labels, loss, strict=True)]
            blocks = rendered.blocks
            noised = blocks if blocks is not None and len(blocks.noise) else rendered
            levels, weights = (
                ", ".join(f"{number:.3f}" for number in numbers)
                for numbers in (noised.noise, noised.loss_weight)
            )
            in_epoch = f", epoch {epoch}" if len(epochs) > 1 else ""
            lines += [f"{named}{in_epoch}: levels {levels}, weights {weights}"]
            lines += [f"{name:<11}" + "".join(f"{cell:>4}" for cell in cells) for name, cells in (
                ("x_t", row), ("trained on", trained)
            )]  # fmt: skip
            lines.append("")
    return _fenced("\n".join(line.rstrip() for line in lines[:-1]))


def block_attention() -> str:
    """Which slots each slot of a conversation with two answers sees: a mask of block diffusion."""
    from packprep.dataset.attention import block_mask
    from packprep.dataset.blocks import Answers, block_starts, blocks_of

    words = ("ask", "ans", "ans", "ans", "ask", "ans", "ans")
    half, none = np.array([len(words)]), np.zeros(1, np.int64)
    answers = Answers(np.zeros(2, np.int64), np.array([1, 5]), np.array([4, 7]))
    settings = {"block_length": 2, "block_origin": "answer"}
    blocks = blocks_of(settings, half, none, answers)
    starts = np.tile(block_starts(blocks, half), 2)
    in_x0 = np.repeat([0, 1], len(words))
    positions = np.tile(np.arange(len(words)), 2)
    sees = block_mask(np.ones(2 * len(words)), positions, in_x0, 2, starts)
    numbers = ["·"] * len(words)
    for b, (begin, end) in enumerate(zip(blocks.begin, blocks.end, strict=True)):
        numbers[begin:end] = [str(b)] * (end - begin)
    names = [f"{'0' if clean else 't'}{i}" for clean, i in zip(in_x0, positions, strict=True)]
    lines = [" " * 15 + "sees " + " ".join(names)]
    for q, name in enumerate(names):
        i = q % len(words)
        cells = "".join(f"{'■' if seen else '·':>3}" for seen in sees[q])
        lines.append(f"{name}  {words[i]}  block {numbers[i]}    {cells}")
    return _fenced("\n".join(lines))


def lengths(objective: str, sizes: Sequence[int], settings: Sequence[Mapping[str, float]]) -> str:
    """For span corruption: what a segment of n tokens becomes."""
    from packprep.objectives.span_corruption import span_counts

    assert objective == "span_corruption"
    rows = []
    for given in settings:
        d, m = given["noise_density"], given["mean_span_length"]
        for size in sizes:
            # A segment has a mode token, its tokens, and a sentinel on both sides of each span.
            fitting = (n for n in range(size) if 1 + n + 2 * span_counts(n, d, m)[1] <= size)
            n = max(fitting)
            noise, spans = span_counts(n, d, m)
            rows.append(
                (f"{d:g}, {m:g}", str(size), str(n), str(noise), str(spans), str(1 + n + 2 * spans))
            )
    return _table(
        ("density, mean", "row", "longest segment", "noise tokens", "spans", "slots"), rows
    )


# format.md, promises.md


def promise(number: str) -> str:
    """One promise in the words of verification/__init__.py."""
    from packprep.verification import PROMISES

    return f"> **{number.upper()}** {PROMISES[number.upper()]}.\n"


def promises() -> str:
    """The table of all promises, with a link to what format.md says of each."""
    from packprep.verification import PROMISES

    return _table(
        ("promise", "in one sentence"),
        [(f"[{number}](format.md#{number.lower()})", words) for number, words in PROMISES.items()],
    )


def vectors() -> str:
    """Numbers of the generator: the authors' test vectors, and numbers as packprep asks for
    them."""
    from packprep.randomness import (
        bits64,
        integers,
        permute,
        philox,
        segment_key,
        text_key,
        uniforms,
        words,
    )

    lines = ["key               counter words 0 … 3                 → Philox4x32-10"]
    ones = 2**32 - 1
    for key, counter in (
        (0, (0, 0, 0, 0)),
        (2**64 - 1, (ones, ones, ones, ones)),
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)),
    ):
        given = " ".join(f"{word:08x}" for word in counter)
        result = " ".join(f"{int(word):08x}" for word in philox(np.uint64(key), *counter))
        lines.append(f"{key:016x}  {given}   {result}")
    key = text_key(0, "source0", "a.jsonl")
    segment = segment_key(key, 4096, 0, 17)
    lines += [
        "",
        f'text_key(0, "source0", "a.jsonl")       = {int(key):#018x}',
        f"segment_key(that, 4096, repeat 0, 17)   = {int(segment):#018x}    call it k",
        (
            "words(k, purpose 6, index 0 … 3)        ="
            f" {' '.join(f'{int(w):08x}' for w in words(segment, 6, np.arange(4)))}"
        ),
        f"bits64(k, purpose 2)                    = {int(bits64(segment, 2)):#018x}",
        f"uniforms(k, purpose 17, index 0)        = {float(uniforms(segment, 17, 0))!r}",
        f"integers(k, purpose 4, 0, bound 10)     = {int(integers(segment, 4, 0, 10))}",
        (
            "permute(0 … 9, size 10, key 7)          ="
            f" {' '.join(map(str, permute(np.arange(10), 10, 7)))}"
        ),
    ]
    return _fenced("\n".join(lines))


def arrays() -> str:
    """The arrays of a shard in file order, from dataset/shard.py, with the words of `_MEANINGS`."""
    from packprep.dataset.shard import layout

    names = {
        10: "rows",
        20: "segments",
        8: "seq_length",
        40: "blocks",
        70: "ranges",
        2: "2",
        80: "records",
    }
    names |= {11: "rows + 1", 21: "segments + 1", 30: "segments + rows"}
    names |= {50: "places", 51: "places + 1", 60: "bytes"}
    full = layout(
        10,
        20,
        8,
        "u2",
        labels=True,
        padded=True,
        blocks=40,
        trained=70,
        weighted=True,
        media=(50, 60),
        filled=True,
        records=80,
    )
    rows = []
    for name, (dtype, shape) in full.items():
        kind = "u16 or i32" if name in ("tokens", "labels") else f"{dtype.kind}{8 * dtype.itemsize}"
        rows.append(
            (f"`{name}`", f"{kind} [{', '.join(names[n] for n in shape)}]", _MEANINGS[name])
        )
    assert set(_MEANINGS) == set(full)
    return _table(("array", "dtype and shape", "meaning"), rows)


_MEANINGS = {
    "tokens": (
        "what the model reads: the text, corrupted where the task corrupts; `pad_id` on padding"
    ),
    "labels": (
        "the target of the prediction made at this slot; only if a task of the recipe predicts in"
        " place, else derived"
    ),
    "segment_ids": "1, 2, … in row order; 0 is padding; not in [compact](#compact-shards) shards",
    "loss_mask": (
        "1 where the prediction made at this slot is trained; in compact shards only where the"
        " header does not tell"
    ),
    "row_offsets": "how many segments stand before each row",
    "segment_doc": (
        "position of the document in its file: the byte at which its line begins, or its row"
        " number; 0 in a text file"
    ),
    "segment_start": "the first content token of the document that the segment uses",
    "segment_key": "the key of the segment's chance",
    "block_offsets": "block diffusion: which of the blocks below belong to each segment",
    "trained_offsets": "supervised data: which of the ranges below belong to each segment",
    "segment_fill": (
        "block diffusion: number of eos that fill up the segment's last block; only if any is"
        " above 0"
    ),
    "media_offsets": "media: which of the places below belong to each segment",
    "media_ref_offsets": "where each place's ref begins in `media_ref`",
    "media_slot": "the first slot of each place in its row",
    "media_tokens": "how many slots it has",
    "media_kind": "its kind: number in the recipe's `specials.media`, by name",
    "media_ref": "the refs, in UTF-8, one after the other",
    "record_offsets": (
        "`group_by`: which of the records below belong to each segment; the first segment of a"
        " document has [all of its records](#p21)"
    ),
    "record_position": "position of the record in the document's file",
    "record_start": "the record's first token, counted in the document",
    "record_tokens": "how many tokens the record has; may be 0",
    "cu_seqlens": (
        "for row r the slice `[row_offsets[r] + r : row_offsets[r+1] + r + 1]`: 0 and the running"
        " sum of real lengths"
    ),
    "cu_seqlens_padded": "the same in physical slots; only with `pad_seq_to_mult` above 1",
    "segment_tokens": (
        "content tokens used, without bos and eos; 0 if the document [was removed](#p23)"
    ),
    "segment_prefix": (
        "leading slots that see each other both ways; 0: causal; −1: another rule holds"
    ),
    "segment_noise": "noise level t; 0 where there is none",
    "segment_loss_weight": "weight of the segment's loss; 1 where there is none",
    "segment_file": "index into the files of plan.json",
    "block_noise": "block diffusion: level of each block",
    "block_loss_weight": "block diffusion: weight of each block",
    "trained_ranges": (
        "[begin, end) pairs of slots, relative to the segment's begin, that may be trained"
    ),
    "trained_weights": "weight of each range, above 0; only where one is not 1",
    "segment_task": "index into the manifest's tasks; the last is `too_short`",
    "segment_source": "index into the manifest's sources",
    "segment_repeat": "which use of the document this is: 0, 1, …",
}

# scale.md

TEXT_BYTES_PER_TOKEN, STORED_BYTES_PER_TEXT_BYTE = 4.25, 1 / 3
TOKENS_PER_CORE_S = 14.5e6
SLOTS_PER_TOKEN = 1.07
FULL_BYTES_PER_TOKEN, COMPACT_BYTES_PER_TOKEN = 7.61, 4.41
RECEIPT_BYTES, ENTRY_BYTES = 1010, 190


def scale(part: str) -> str:
    """What corpora of some sizes take: ul2r, seq_length 4096, ids of four bytes, measured constants
    (docs/benchmarks.md)."""
    from packprep.building.forecast import PROCESS_BYTES
    from packprep.building.planning import _shard_text_bytes
    from packprep.recipe import read_recipe

    recipe = read_recipe(
        {"tokenizer": "bytes", "seq_length": 4096, "sources": [{"paths": ["x.jsonl"]}]}, DOCS
    )
    rows = []
    for tokens, name in (
        (10**10, "10 B"),
        (10**11, "100 B"),
        (10**12, "1 T"),
        (15 * 10**12, "15 T"),
    ):
        text = int(tokens * TEXT_BYTES_PER_TOKEN)
        shard = _shard_text_bytes(recipe, text, 1 / TEXT_BYTES_PER_TOKEN)
        shards = -(-text // shard)
        core_s = tokens / TOKENS_PER_CORE_S
        slot_bytes, item = 7, 4
        worker = PROCESS_BYTES + tokens / shards * (3 * item + SLOTS_PER_TOKEN * slot_bytes * 2)
        full, compact = tokens * FULL_BYTES_PER_TOKEN, tokens * COMPACT_BYTES_PER_TOKEN
        stored = text * STORED_BYTES_PER_TEXT_BYTE
        cells = {
            "shards": (
                _bytes(text),
                f"{shard / 2**20:,.0f} MiB",
                f"{shards:,}",
                f"{tokens * SLOTS_PER_TOKEN / 4096:,.0f}",
                f"{3 * shards + 3:,}",
                _bytes(shards * ENTRY_BYTES),
                _bytes(shards * RECEIPT_BYTES),
                _bytes(worker),
            ),
            "time": (
                f"{core_s / 3600:,.1f}",
                _time(core_s / 16),
                _time(core_s / 256),
                _time(core_s / 4096),
                _bytes(stored),
                _bytes(full),
                _bytes(compact),
                _time((stored + full) / 1e10),
                _time((stored + compact) / 1e10),
            ),
        }
        rows.append((name, *cells[part]))
    head = {
        "shards": (
            "tokens",
            "text",
            "shard",
            "shards",
            "rows of 4096",
            "files, at most",
            "dataset.json",
            "receipts",
            "a worker",
        ),
        "time": (
            "tokens",
            "core hours",
            "16 cores",
            "256 cores",
            "4096 cores",
            "read, zstd",
            "written, full",
            "compact",
            "at 10 GB/s, full",
            "compact",
        ),
    }
    return _table(head[part], rows)


def _bytes(n: float) -> str:
    for unit in ("kB", "MB", "GB"):
        n /= 1000
        if n < 1000:
            return f"{n:.3g} {unit}"
    return f"{n / 1000:.3g} TB"


def _time(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


IN_PLACE = ("masked_diffusion", "uniform_diffusion", "block_diffusion")
DENSITIES = tuple(
    {"noise_density": d, "mean_span_length": m} for d, m in ((0.15, 3), (0.15, 32), (0.5, 3))
)


PARTS: dict[str, Callable[[], str]] = {
    "cli": help_of,
    **{
        f"cli {name}": lambda name=name: help_of(name)
        for name in (
            "init",
            "doctor",
            "build",
            "tokenize",
            "plan",
            "status",
            "verify",
            "inspect",
            "trace",
            "audit",
            "export",
            "remove",
            "slurm",
            "warm",
            "schema",
        )
    },
    "audit kinds": audit_kinds,
    "slurm script": slurm_script,
    "schedulers": schedulers,
    **{
        f"keys {name or 'top'}": lambda name=name: keys(name)
        for name in ("", "sources", "documents", "packing", "specials", "tasks", "output")
    },
    **{
        f"parameters {name}": lambda name=name: parameters(name)
        for name in ("causal", "prefix_lm", "span_corruption", "fill_in_the_middle", *IN_PLACE)
    },
    "presets": presets,
    **{f"scale {part}": lambda part=part: scale(part) for part in ("shards", "time")},
    "example causal": lambda: example("causal", 12, 0, mode=False),
    "example prefix_lm": lambda: example("prefix_lm", 12, 5),
    "example prefix_lm sentinel": lambda: example("prefix_lm", 11, 5, sentinel=True),
    "example span_corruption": lambda: example(
        "span_corruption", 10, 3, noise_density=0.4, mean_span_length=2.0
    ),
    "example span_corruption roll": lambda: example(
        "span_corruption", 10, 4, noise_density=0.4, mean_span_length=2.0, random_roll=True
    ),
    "example fill_in_the_middle": lambda: example(
        "fill_in_the_middle", 10, 15, mode=False, rate=1.0, spm_rate=0.0
    ),
    "example fill_in_the_middle spm": lambda: example(
        "fill_in_the_middle", 10, 2, mode=False, rate=1.0, spm_rate=1.0
    ),
    "example masked_diffusion": lambda: example("masked_diffusion", 12, 2, mode=False),
    "example masked_diffusion mlm": lambda: example(
        "masked_diffusion",
        14,
        54,
        mode=False,
        noise_range=(0.3, 0.3),
        epsilon=0.0,
        replace=(0.8, 0.1, 0.1),
        weighting="none",
        noise_eos=False,
    ),
    "example uniform_diffusion": lambda: example(
        "uniform_diffusion", 12, 3, schedule="flip", noise_range=(0.2, 0.4)
    ),
    "example block_diffusion": lambda: example("block_diffusion", 6, 4, mode=False, block_length=3),
    "block laws": block_laws,
    "example supervised causal": lambda: example(
        "causal", 12, 0, mode=False, spans=((3, 5), (9, 12))
    ),
    "example supervised prefix_lm": lambda: example("prefix_lm", 12, 0, spans=((3, 5), (9, 12))),
    "example supervised masked_diffusion": lambda: example(
        "masked_diffusion", 12, 2, mode=False, spans=((3, 5), (9, 12))
    ),
    "example supervised block_diffusion": lambda: example(
        "block_diffusion",
        9,
        1,
        mode=False,
        spans=((2, 5), (7, 9)),
        fill=1,
        block_length=2,
        block_origin="answer",
        eos_fill="block",
    ),  # fmt: skip
    "block attention": block_attention,
    "lengths": lambda: lengths("span_corruption", (512, 2048, 4096), DENSITIES),
    **{f"p{i}": lambda i=i: promise(f"P{i}") for i in range(1, 26)},
    "promises": promises,
    "vectors": vectors,
    "arrays": arrays,
}


def made(text: str) -> str:
    """A page with its made parts written anew; KeyError for a part that nothing makes."""
    return _PART.sub(lambda m: f"{m[1]}{PARTS[m['name']]()}{m[4]}", text)


def find_parts(text: str) -> list[re.Match[str]]:
    """The made parts of a page, as matches with the groups `name` and `text`."""
    return list(_PART.finditer(text))


def stale_parts(path: Path) -> list[str]:
    """The parts of a page that are out of date. Layout does not count: libraries wrap the help in
    different places."""
    return [
        m["name"]
        for m in find_parts(path.read_text("utf-8"))
        if PARTS[m["name"]]().split() != m["text"].split()
    ]


def pages() -> list[Path]:
    """The pages of the docs."""
    return sorted(DOCS.rglob("*.md"))


def words() -> dict[str, int]:
    """page → the words that somebody has to read: of README and docs, without code blocks, made
    parts, format.md, promises.md."""
    found = {}
    for path in (DOCS.parent / "README.md", *pages()):
        name = path.relative_to(DOCS.parent).as_posix()
        if name not in ("docs/format.md", "docs/promises.md"):
            text = re.sub(
                r"<!-- made: .*?<!-- /made -->|^```.*?^```$",
                " ",
                path.read_text("utf-8"),
                flags=re.S | re.M,
            )
            text = re.sub(r"<!--.*?-->|<[^>]+>", " ", text, flags=re.S)
            # no bars and rules of tables
            found[name] = sum(any(map(str.isalnum, word)) for word in text.split())
    return found


def main(arguments: Sequence[str]) -> int:
    """Rewrite; with --check only tell; with --words count."""
    if "--words" in arguments:
        for name, count in (found := words()).items():
            print(f"{count:6,} {name}")
        print(f"{sum(found.values()):6,} words")
        return 0
    from drawings import DRAWINGS

    from packprep.objectives.tasks import recipe_schema
    from packprep.sources.formats import formats_asked

    status = 0
    files = {f"drawings/{name}.svg": draw for name, draw in DRAWINGS.items()}
    files["recipe.schema.json"] = lambda: (
        json.dumps(recipe_schema(formats_asked()), indent=2) + "\n"
    )
    for name, content in files.items():
        path, text = DOCS / name, content()
        if not path.exists() or path.read_text("utf-8") != text:
            print(
                f"{path.relative_to(DOCS.parent)} is"
                f" {'out of date' if '--check' in arguments else 'made anew'}"
            )
            if "--check" in arguments:
                status = 1
            else:
                path.write_text(text, "utf-8")
    for path in pages():
        stale = stale_parts(path)
        for name in stale:
            print(
                f"{path.relative_to(DOCS.parent)}: {name} is"
                f" {'out of date' if '--check' in arguments else 'made anew'}"
            )
        if stale and "--check" in arguments:
            status = 1
        elif stale:
            path.write_text(made(path.read_text("utf-8")), "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
