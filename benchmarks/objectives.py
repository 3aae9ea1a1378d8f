"""Objectives, timed: tokens in, the slots of their segments out; and the whole of a shard's
rendering.

python benchmarks/objectives.py                         16.8 million tokens in segments of 2048, shards of rows of 4096
python benchmarks/objectives.py --tokens 1000000

spans     the bodies of span corruption, against the usual numpy collator, which works example by example
noise     in-place noise with its levels, as rendering writes it, against the numpy law that redraw uses in a trainer
render    lengths packed → arrays: `placement` and `render` of documents of lognormal lengths (mean 500), by preset

Ratios are to the copy bound, np.copyto of the tokens (of all arrays for `render`), in the same run.
Medians of --repeats. Seconds are the processor's, on one core: what else runs does not count.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.packing import pack, placement
from packprep.building.render import render
from packprep.building.segments import FORMAT_MAX_SEGMENTS, cut
from packprep.dataset.epochs import noise
from packprep.documents.reading import Documents
from packprep.objectives import REGISTRY
from packprep.objectives.objective import Bodies, BodySlots, Ids, Task
from packprep.objectives.tasks import complete, resolve
from packprep.randomness import bits64
from packprep.recipe import read_recipe

VOCABULARY, TEXT = 32_768, 28_000  # ids below TEXT are text
IDS = Ids(
    VOCABULARY,
    TEXT,
    TEXT + 1,
    TEXT + 2,
    TEXT + 3,
    np.arange(VOCABULARY - 4000, VOCABULARY, dtype=np.int32),
    (TEXT + 4, TEXT + 5, TEXT + 6),
    tuple(range(TEXT, VOCABULARY)),
)
MODE_TOKENS = {"[NLU]": TEXT + 7, "[NLG]": TEXT + 8, "[S2S]": TEXT + 9}
SPANS = ((0.15, 3.0, False), (0.15, 3.0, True), (0.5, 3.0, False), (0.15, 64.0, False))
NOISE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("masked_diffusion", {}),
    ("masked_diffusion", {"stratified": True}),
    ("masked_diffusion", {"exact_count": True, "noise_range": (0.15, 0.99)}),
    ("masked_diffusion", {"replace": (0.8, 0.1, 0.1), "noise_range": (0.15, 0.15)}),
    ("block_diffusion", {}),
    ("uniform_diffusion", {}),
)
PRESETS = ("causal", "prefix_lm", "ul2r", "llada", "duo", "bd3")


def median_s(
    work: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Median processor seconds of a call, after one that is not counted: it compiles. `before` runs
    off the clock."""
    seconds = []
    for _ in range(repeats + 1):
        before()
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds[1:])


# The usual collator: what trainers run on each example, in numpy


def segment_lengths(items: int, parts: int, chance: np.random.Generator) -> np.ndarray:
    """`items` cut into `parts` non-empty parts: shuffled flags of where a part begins, summed and
    counted."""
    begins = np.arange(items - 1) < parts - 1
    chance.shuffle(begins)
    part = np.cumsum(np.concatenate(([False], begins)))
    return np.unique(part, return_counts=True)[1]


def spans_mask(length: int, density: float, mean: float, chance: np.random.Generator) -> np.ndarray:
    """bool[length], True for noise: spans of text and noise by turns, text first."""
    n_noise = min(max(round(length * density), 1), length - 1)
    n_spans = max(round(n_noise / mean), 1)
    noise_spans = segment_lengths(n_noise, n_spans, chance)
    text_spans = segment_lengths(length - n_noise, n_spans, chance)
    begins = np.cumsum(np.stack((text_spans, noise_spans), axis=1).reshape(-1))[:-1]
    is_begin = np.zeros(length, np.int8)
    is_begin[begins] = 1
    return np.cumsum(is_begin) % 2 == 1


def sentinels_at(mask: np.ndarray, first_sentinel: int) -> np.ndarray:
    """int64: at each span's first slot its sentinel, −1 at its others, 0 outside."""
    begins = mask & ~np.roll(mask, 1)
    begins[0] = mask[0]
    number = np.cumsum(begins)
    return np.where(begins, first_sentinel + number - 1, np.where(mask, -1, 0))


def filtered(tokens: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """The tokens with spans as their sentinels."""
    full = np.where(sentinels != 0, sentinels, tokens)
    return full[full >= 0]


def collate(
    tokens: np.ndarray,
    density: float,
    mean: float,
    first_sentinel: int,
    chance: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets) of one example."""
    mask = spans_mask(len(tokens), density, mean, chance)
    inputs = filtered(tokens, sentinels_at(mask, first_sentinel))
    targets = filtered(tokens, sentinels_at(~mask, first_sentinel))
    return inputs, targets


# What is measured


def task_of(objective: str, parameters: dict[str, Any]) -> Task:
    """A task with these parameters and the defaults of all others."""
    found = REGISTRY[objective]
    all_of_them = {parameter.name: parameter.default for parameter in found.parameters} | parameters
    resolved = found.resolve(all_of_them, IDS) if found.resolve else {}
    return Task(objective, found, 1.0, all_of_them, -1, IDS, resolved)


def text_tokens(count: int) -> np.ndarray:
    return (
        bits64(np.uint64(1), 0, np.arange(-(-count // 4))).view(np.uint16)[:count] % TEXT
    ).astype(np.uint16)


def spans(tokens: np.ndarray, length: int, repeats: int) -> list[dict[str, Any]]:
    """Span corruption by its parameters."""
    m = len(tokens) // length
    used = tokens[: m * length]
    bodies = Bodies(
        np.full(m, length),
        bits64(np.uint64(2), 0, np.arange(m)),
        np.full(m, -1),
        np.zeros(m, np.int64),
    )
    copied = np.empty_like(used)
    bound = used.size / median_s(lambda: np.copyto(copied, used), repeats)
    lines = []
    for density, mean, roll in SPANS:
        task = task_of(
            "span_corruption",
            {"noise_density": density, "mean_span_length": mean, "random_roll": roll},
        )
        slots = task.body_slots(bodies)
        columns, rows = (
            BodySlots(np.arange(m) * length, bodies, np.cumsum(slots) - slots),
            np.zeros(slots.sum(), np.uint16),
        )
        assert task.objective.render is not None
        write = task.objective.render
        ours = used.size / median_s(lambda: write(task, columns, used, rows), repeats)  # noqa: B023
        examples = used.reshape(m, length)[: max(m // 64, 1)].astype(np.int64)
        chance = np.random.default_rng(0)
        of_collator = median_s(
            lambda: [collate(e, density, mean, VOCABULARY, chance) for e in examples],  # noqa: B023
            repeats,
        )
        lines.append(
            {
                "what": f"({density}, {mean:g}){' with roll' if roll else ''}",
                "tokens_per_s": ours,
                "copy_per_s": bound,
                "other_per_s": examples.size / of_collator,
            }
        )
    return lines


def in_place(tokens: np.ndarray, length: int, repeats: int) -> list[dict[str, Any]]:
    """In-place noise by objective and parameters."""
    m = len(tokens) // length
    used = tokens[: m * length]
    made, loss_mask = used.copy(), np.zeros(used.size, np.uint8)
    bound = used.size / median_s(lambda: np.copyto(made, used), repeats)
    own = noise.Candidates(
        bits64(np.uint64(3), 0, np.arange(m)),
        np.arange(m) * length,
        np.full(m, length),
        np.arange(m) // 8,
    )
    target = noise.Target(own, np.zeros(m, np.int64), np.full(m, length), None, made, loss_mask)

    def clean() -> None:
        made[:], loss_mask[:] = used, 0

    lines = []
    for objective, parameters in NOISE:
        task = task_of(objective, parameters)
        ids, speed = task.ids.for_noise, []
        for law in (task.objective.noise, noise.SCHEDULES[objective].draw):
            assert law is not None
            write = law
            work = lambda: write(0, task.parameters, task.resolved, ids, target, 0)  # noqa: B023, E731
            speed.append(used.size / median_s(work, repeats, clean))
        what = ", ".join([objective, *(f"{name} {value}" for name, value in parameters.items())])
        lines.append(
            {"what": what, "tokens_per_s": speed[0], "copy_per_s": bound, "other_per_s": speed[1]}
        )
    return lines


def shards(tokens: np.ndarray, seq_length: int, repeats: int) -> list[dict[str, Any]]:
    """Rendering of a whole shard by preset."""
    drawn = (
        np.random.default_rng(4)
        .lognormal(np.log(500) - 0.5, 1.0, len(tokens) // 500 + 1)
        .astype(np.int64)
        + 1
    )
    n = drawn[: max(int(np.searchsorted(np.cumsum(drawn), len(tokens))), 1)]
    offsets = np.concatenate(([0], np.minimum(np.cumsum(n), len(tokens))))
    zeros, place = np.zeros(len(n), np.int64), np.arange(len(n))
    documents = Documents(
        tokens[: offsets[-1]], offsets, place, zeros, zeros, zeros, np.full(len(n), 7, np.uint64)
    )  # fmt: skip
    lines = []
    for preset in PRESETS:
        given = {
            "tokenizer": "bytes",
            "seq_length": seq_length,
            "sources": [{"paths": ["x.jsonl"]}],
        }
        recipe = complete(read_recipe(given | {"tasks": [{"preset": preset}]}, Path()))
        tasks = resolve(recipe, IDS, MODE_TOKENS)
        segments, _ = cut(recipe, tasks, documents)
        row, _ = pack(segments.slots, seq_length, "best_fit", FORMAT_MAX_SEGMENTS)

        def work() -> dict[str, np.ndarray]:
            order, placed, first_slot = placement(segments.key, segments.slots, row, False)  # noqa: B023
            table = segments.select(order).replace(row=placed, first_slot=first_slot)  # noqa: B023
            return render(tasks, documents, table, seq_length, 1)  # noqa: B023

        seconds = median_s(work, repeats)
        arrays = list(work().values())
        copies = median_s(lambda: [np.copyto(np.empty_like(a), a) for a in arrays], repeats)  # noqa: B023
        size = int(offsets[-1])
        lines.append(
            {
                "what": preset,
                "tokens_per_s": size / seconds,
                "copy_per_s": size / copies,
                "other_per_s": None,
            }
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1 << 24)
    parser.add_argument(
        "--length", type=int, default=2048, help="tokens of a segment of spans and noise"
    )
    parser.add_argument("--seq-length", type=int, default=4096, help="of the rows of render")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    tokens = text_tokens(given.tokens)
    tables = {
        "spans": ("numpy collator", spans(tokens, given.length, given.repeats)),
        "noise": ("numpy law", in_place(tokens, given.length, given.repeats)),
        "render": ("", shards(tokens, given.seq_length, given.repeats)),
    }
    if given.json:
        print(json.dumps({name: lines for name, (_, lines) in tables.items()}))
        return
    print(f"{given.tokens:,} tokens; millions of tokens per second")
    for name, (other, lines) in tables.items():
        print(f"\n{name:69}  packprep  of copy bound  {other}")
        for line in lines:
            against = ""
            if line["other_per_s"]:
                against = (
                    f"{line['other_per_s'] / 1e6:9.1f}  ×"
                    f" {line['tokens_per_s'] / line['other_per_s']:.1f}"
                )
            share = line["tokens_per_s"] / line["copy_per_s"]
            print(f"{line['what']:69}  {line['tokens_per_s'] / 1e6:8.1f}  {share:13.1%}  {against}")


if __name__ == "__main__":
    main()
