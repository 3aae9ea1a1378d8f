"""Random recipes over small corpora: each builds and passes every check, or is refused by name.

    python tests/random_recipes.py --count 2000 --first 0 --processes 2

prints each seed that fails with its recipe; `--first SEED --show` runs it again. A build is stopped
halfway and resumed. Half of the recipes with several lengths build all of them, and a quarter of
the others builds from a token store too, which has to give the same shards.
"""

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a command, of which Python knows the folder alone
    sys.path.insert(0, str(Path(__file__).parents[1]))

from packprep.building.plan import datasets_in
from packprep.errors import PackprepError
from packprep.objectives.tasks import complete
from packprep.recipe import read_recipe
from packprep.verification import verify_dataset
from tests import made, media_made, tokens_made
from tests.tokenizer import tokenizers_made
from tests.twin.check import verify_with_twin

ALL = -1
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<mask>",
    "[NLU]",
    "[NLG]",
    "[S2S]",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
)
SOURCES: dict[str, dict[str, Any]] = {
    "lines": {"paths": ["text/a.jsonl"]},
    "gzip": {"paths": ["text/b.jsonl.gz"]},
    "zstd": {"paths": ["text/c.jsonl.zst"]},
    "several": {"paths": ["text/*.jsonl*"]},
    "body": {"paths": ["body.jsonl"], "text_key": "body"},
    "parquet": {"paths": ["d.parquet"]},
    "arrow": {"paths": ["e.arrow"]},
    "notes": {"paths": ["notes/*.txt"]},
    "megatron": {"paths": ["m/a.bin"]},
    "id_parquet": {"paths": ["ids.parquet"], "format": "tokens"},
    "id_arrow": {"paths": ["ids.arrow"], "format": "tokens", "text_key": "tokens"},
    "id_lines": {"paths": ["ids/*.jsonl*"], "format": "tokens"},
    "spans": {"paths": ["spans.jsonl"]},
    "chats": {"paths": ["chats.jsonl"]},
}
LARGE: dict[str, dict[str, Any]] = {
    "large_gzip": {"paths": ["large/a.jsonl.gz"]},
    "large_zstd": {"paths": ["large/b.jsonl.zst"]},
    "large_parquet": {"paths": ["large/c.parquet"]},
    "large_arrow": {"paths": ["large/d.arrow"]},
    "large_several": {"paths": ["large/*.jsonl*"]},
}
"""Sources of more text than a calibration sample reads, whose parts differ."""
PRESETS = [
    "causal",
    "prefix_lm",
    "t5",
    "ul2r",
    "ul2",
    "fim",
    "mlm",
    "llada",
    "mdlm",
    "dllm",
    "duo",
    "bd3",
]


def write_corpus(folder: Path) -> None:
    """All that the recipes name: files of SOURCES, a chat template, a tokenizer."""
    texts = ["a", "so", "two", *made.texts(8, 3, 120)]
    made.write_lines(folder / "text" / "a.jsonl", texts)
    made.write_lines(folder / "text" / "b.jsonl.gz", made.texts(6, 4, 120))
    made.write_lines(folder / "text" / "c.jsonl.zst", made.texts(6, 5, 150))
    made.write_lines(folder / "body.jsonl", ["<pad> is text", *made.texts(6, 6, 150)], "body")
    made.write_parquet(folder / "d.parquet", ["", *made.texts(8, 7, 120)], 5)
    made.write_arrow(folder / "e.arrow", made.texts(8, 8, 120), 4)
    large = [*made.texts(2500, 14, 80), *("word " * 200 for _ in range(800)), "數" * 90_000]
    made.write_lines(folder / "large" / "a.jsonl.gz", large)
    made.write_lines(folder / "large" / "b.jsonl.zst", large[::-1])
    made.write_parquet(folder / "large" / "c.parquet", large, 700)
    made.write_arrow(folder / "large" / "d.arrow", large[::-1], 700)
    made.write_texts(folder / "notes", ["", *made.texts(4, 9, 150), "é"])
    lists = tokens_made.ids_of(made.texts(9, 10, 100))
    tokens_made.write_megatron(
        folder / "m" / "a.bin", lists, "<i4", [1 + i % 2 for i in range(len(lists))]
    )
    tokens_made.write_parquet(folder / "ids.parquet", lists, 5)
    tokens_made.write_arrow(folder / "ids.arrow", lists, 4, name="tokens")
    records = "\n".join(map(json.dumps, _with_masks(lists, random.Random(3)))).encode()
    made.write(folder / "ids" / "a.jsonl", records)
    made.write(folder / "ids" / "b.jsonl.gz", gzip.compress(records))
    made.write(
        folder / "spans.jsonl", "\n".join(map(json.dumps, _with_spans(random.Random(1)))).encode()
    )
    made.write(
        folder / "chats.jsonl", "\n".join(map(json.dumps, _chats(random.Random(2)))).encode()
    )
    records = "\n".join(map(json.dumps, _with_fields(random.Random(4)))).encode()
    made.write(folder / "fields.jsonl", records)
    made.write(folder / "t.jinja", TEMPLATE.encode())
    made.write(folder / "shown.jinja", media_made.TEMPLATE.encode())
    media_made.write(folder, "media.jsonl", media_made.texts(12, 12, 40, 90))
    media_made.write(folder, "shown.jsonl", media_made.chats(6, 13, 25))
    tokenizers_made.write(
        folder / "bpe",
        tokenizers_made.byte_level(*ROLES, *(f"<extra_id_{k}>" for k in range(40))),
        tokenizer_config={
            "eos_token": "<eos>",
            "bos_token": "<bos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    )


def _with_masks(lists: list[list[int]], chance: random.Random) -> list[dict[str, Any]]:
    """Return records of lists of ids, of which some have padding, labels or a weight."""
    records: list[dict[str, Any]] = []
    for ids in lists:
        begin, pads = chance.randrange(len(ids)), chance.choice([0, 0, 3])
        record: dict[str, Any] = {"input_ids": ids + [0] * pads}
        if pads:
            record["attention_mask"] = [1] * len(ids) + [0] * pads
        if chance.random() < 0.5:
            record["labels"] = [-100] * begin + ids[begin:] + [-100] * pads
        records.append(record | _maybe(chance, "weight", [0.5, 1, 3]))
    return records


def _with_spans(chance: random.Random) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for i, text in enumerate(["x", "so", *made.texts(9, 11, 120)]):
        count = 2 * min(chance.randint(0, 3), len(text) // 2)
        bounds = sorted(chance.sample(range(len(text) + 1), count))
        spans = [
            [*bounds[k : k + 2], *chance.choice(([], [0.3], [2], [0]))] for k in range(0, count, 2)
        ]
        if i % 3 == 1 and count == 4:  # two that touch
            spans[1][0] = bounds[1]
        records.append({"text": text} if i % 5 == 4 else {"text": text, "loss_spans": spans})
    return records


def _with_fields(chance: random.Random) -> list[dict[str, Any]]:
    """Return records with fields that `group_by`, `where` and `repeat` read."""
    return [
        {
            "text": text,
            "repo": i // chance.choice([3, 4]),
            "path": chance.randrange(9),
            "score": chance.choice([0.5, 1, 2.25, None]),
        }
        for i, text in enumerate(made.texts(20, 15, 60))
    ]


def _chats(chance: random.Random) -> list[dict[str, Any]]:
    records = []
    for i in range(7):
        shape = chance.choice([["user", "assistant"], ["user", "assistant", "tool", "assistant"]])
        turns = ["system"] * (i % 2) + shape * chance.randint(1, 4)
        texts = made.texts(len(turns), 100 + i, chance.choice([8, 60]))
        messages = [{"role": r, "content": t} for r, t in zip(turns, texts, strict=True)]
        if i >= 4:
            messages[-1]["content"] = f"<think>\n{texts[0] * (i % 2)}\n</think>\n\n{texts[-1]}"
        if i >= 5:
            marks = {"train": i == 6, "weight": 0.5}
            parts = [{"text": "Then ", **marks}, {"text": texts[1] + " "}, {"text": "so.", **marks}]
            messages[1]["content"] = [{"type": "text", **part} for part in parts]
        records.append({"messages": messages})
    return records


def recipe_of(seed: int) -> dict[str, Any]:
    """Return a recipe over write_corpus' folder; a fourth have media too, an eighth a large
    source."""
    recipe = _with_answers(_recipe_of(seed), random.Random(f"answers {seed}"))
    recipe = _with_media(recipe, random.Random(f"media {seed}"))
    chance = random.Random(f"reasoning {seed}")
    if "chat_template" in recipe["documents"]:
        for key in ("train_reasoning", "train_empty_reasoning"):
            recipe["documents"] |= _maybe(chance, key, [False], 0.5)
    chance = random.Random(f"large {seed}")
    if chance.random() < 0.125:
        name = chance.choice(list(LARGE))
        kept = {key: recipe["sources"][0][key] for key in ("share",) if key in recipe["sources"][0]}
        recipe["sources"] = [*recipe["sources"], {"name": name, **LARGE[name], **kept}]
        recipe["output"]["shard_text_bytes"] = chance.choice([300_000, 5_000_000])
    return recipe


def _with_answers(recipe: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return the recipe with other origins of blocks, and eos that fill them up.

    In a third of the recipes with supervised documents, block diffusion takes them instead of the
    last task.
    """
    tasks, names = [*recipe["tasks"]], {source["name"] for source in recipe["sources"]}
    is_packed = recipe["packing"]["algorithm"] != "concat"
    is_two_sided = "encoder_length" in recipe["packing"]
    is_supervised = bool({"spans", "chats", "id_lines"} & names) and "name" not in tasks[-1]
    if is_supervised and is_packed and not is_two_sided and chance.random() < 1 / 3:
        tasks[-1] = {
            "objective": "block_diffusion",
            "block_length": chance.choice([1, 3, 4, 7]),
            "block_origin": chance.choice(["segment", "answer"]),
            **chance.choice([{}, *_BLOCK_LAWS]),
        }
    for i, task in enumerate(tasks):
        if task.get("objective") == "block_diffusion":
            tasks[i] = _maybe(chance, "block_origin", ["segment", "answer"], 0.3) | task
            if not task.get("noise_eos", True) and "block_origin" in tasks[i]:
                tasks[i]["block_origin"] = "segment"
            fits = task.get("noise_eos", True) and 1 < task.get("block_length", 1000) < 1000
            if fits and "block_origin" in tasks[i]:
                tasks[i] |= _maybe(chance, "eos_fill", ["block"], 0.6)
    return {**recipe, "tasks": tasks}


def _with_media(recipe: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    if chance.random() < 0.75:
        return recipe
    name = chance.choice(["media", "shown"])
    share = {"share": 0.5} if "share" in recipe["sources"][0] else {}
    own = {"name": name, "paths": [f"{name}.jsonl"], **share}
    given = chance.choice(
        [
            media_made.SPECIALS["media"],
            {"image": "<|image|>", "film": ["<|begin|>", "<|film|>", "<|end|>"]},
        ]
    )
    documents = {**recipe["documents"], "loss_spans": "use", "chat_template": "shown.jinja"}
    if chance.random() < 0.9:  # or else it is refused, mostly
        recipe["packing"] = {**recipe["packing"], "algorithm": "best_fit"}
        takers = (
            ["prefix_lm"]
            if "encoder_length" in recipe["packing"]
            else ["causal", "prefix_lm", "llada", "mlm"]
        )
        recipe["tasks"] = [*recipe["tasks"], {"preset": chance.choice(takers)}]
    specials = {**recipe.get("specials", {}), "missing": "add", "media": given}
    return {
        **recipe,
        "sources": [*recipe["sources"], own],
        "documents": documents,
        "specials": specials,
    }


def _recipe_of(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    some = partial(_maybe, chance)
    tasks = [_task(chance, i) for i in range(chance.choice([1, 1, 2, 2, 3, 5]))]
    algorithm = chance.choice(["best_fit", "best_fit", "first_fit", "next_fit", "concat"])
    if algorithm == "concat" and chance.random() < 0.8:  # or else it is refused, mostly
        kept = [
            task
            for task in tasks
            if task.get("objective", task.get("preset")) in ("causal", "prefix_lm")
        ]
        tasks = kept or [{"preset": "causal"}]
    seq_length = chance.choice([16, 64, 64, 96, 128, 200, 256])
    by_share = chance.random() < 0.15
    names = chance.sample(list(SOURCES), chance.choice([1, 1, 2, 3]))
    is_supervised = bool({"spans", "chats", "id_lines"} & set(names)) and chance.random() < 0.9
    if is_supervised:  # or else it is refused, mostly
        tasks.append(
            {
                "preset": chance.choice(
                    ["causal", "prefix_lm", "llada", "mlm"][: 2 if algorithm == "concat" else 4]
                )
            }
        )
    named = [] if is_supervised else [task["name"] for task in tasks if "name" in task]
    sources = []
    for name in names:
        low, high = sorted(chance.sample(range(11), 2))
        sources.append(
            {
                "name": name,
                **SOURCES[name],
                **(
                    {"share": chance.choice([0.1, 0.5, 1])}
                    if by_share
                    else some("repeat", [0.4, 1.5, 2, 2.25])
                ),
                **some("sample", [[low / 10, high / 10]], 0.2),
                **(
                    some("tasks", [chance.sample(named, chance.randint(1, len(named)))], 0.3)
                    if named
                    else {}
                ),
            }
        )
    multiple = (
        1 if algorithm == "concat" and chance.random() < 0.9 else chance.choice([1, 1, 2, 4, 8])
    )
    documents = {
        "max_bad_fraction": 1.0,
        **some("append_eos", [False, "segment"]),
        **some("prepend_bos", [True]),
        **some("long", ["split", "truncate", "drop"]),
        **some("max_tokens", [2, 7, 20, 60, 90]),
        **some("min_tokens", [2, 5, 30]),
        **some("special_text", ["text", "special", "reject"]),
        **some("loss_spans", ["ignore"], 0.1),
        **some("long_answers", ["untrained"]),
        **(
            {"chat_template": "t.jinja"}
            if any(source["name"] == "chats" for source in sources)
            else {}
        ),
    }
    packing = {
        "algorithm": algorithm,
        "pad_seq_to_mult": multiple,
        **some("max_segments_per_row", [1, 2, 5, 60]),
    }
    output = {
        "shard_text_bytes": chance.choice([800, 2000, 50_000]),
        **some("columns", ["compact", "least"]),
        **some("token_dtype", ["uint16", "int32"]),
    }
    tokenizer = chance.choice(["bytes", "bytes", "bpe"])
    specials = _specials(chance, tokenizer)
    seed_of_all = chance.choice([0, 1, 2**32, chance.getrandbits(63)])
    lengths = {}
    if chance.random() < 0.25:
        lengths = {"seq_lengths": sorted({seq_length, *chance.sample([32, 48, 72, 160, 400], 2)})}
        documents |= some("long", ["decompose"], 0.5)
    if chance.random() < 0.15:  # rows of two sides, for tasks that have them
        kept = [
            t
            for t in tasks
            if t.get("objective", t.get("preset"))
            in ("prefix_lm", "span_corruption", "t5", "ul2", "ul2r")
        ]
        tasks = kept or [{"preset": "t5"}]
        sides = {
            f"{side}_length": chance.choice([32, 48, 64, 128]) for side in ("encoder", "decoder")
        }
        packing |= {**sides, "algorithm": "best_fit", "pad_seq_to_mult": 1}
        documents["min_tokens"] = max(3, documents.get("min_tokens", 3))
        seq_length, lengths, sources = (
            sum(sides.values()),
            {},
            [{k: v for k, v in s.items() if k != "tasks"} for s in sources],
        )
        documents.pop("long", None)
    return {
        "seq_length": seq_length,
        **lengths,
        "seed": seed_of_all,
        "tokenizer": tokenizer,
        **(
            {"total_tokens": chance.choice([500, 5000])}
            if by_share and chance.random() < 0.5
            else {}
        ),
        "sources": sources,
        "tasks": tasks,
        "documents": documents,
        "packing": packing,
        "output": output,
        **({"specials": specials} if specials else {}),
    }


def _maybe(
    chance: random.Random, key: str, values: list[Any], probability: float = 0.4
) -> dict[str, Any]:
    return {key: chance.choice(values)} if chance.random() < probability else {}


def _specials(chance: random.Random, tokenizer: str) -> dict[str, Any]:
    if chance.random() < 0.5:
        return {}
    first = 266 if tokenizer == "bytes" else 320 + len(ROLES)
    count = chance.choice([1, 2, 3, 10, 30])
    listed = [
        {"first": first, "count": count},
        [f"<extra_id_{k}>" for k in range(count)],
        "<extra_id_{}>",
        "auto",
    ]
    sentinels = chance.choice(listed)
    return {"sentinels": sentinels, **({"missing": "add"} if sentinels == "auto" else {})}


_BLOCK_LAWS: list[dict[str, Any]] = [
    {},
    {"weighting": "none"},
    {"noise": "all"},
    {"noise": "position", "half_life": 0.5},
    {"complementary": True},
    {"canvas": "uniform", "weighting": "none"},
]


def _task(chance: random.Random, number: int) -> dict[str, Any]:
    """A preset, or an objective with legal parameters."""
    some = partial(_maybe, chance)
    weight = some("weight", [0.1, 1 / 3, 2, 7])
    if chance.random() < 0.25:
        return {"preset": chance.choice(PRESETS), **weight}
    low, high = sorted([round(chance.random(), 3), round(chance.random(), 3)])
    levels = some("noise_range", [[low, high], [low, low], [0, 1], [0.5, 1]])
    eos = some("noise_eos", [False])
    objective, parameters = chance.choice(
        [
            ("causal", {}),
            ("prefix_lm", {**some("sentinel", [True]), **some("eos_after_inputs", [True])}),
            (
                "span_corruption",
                {
                    **some("noise_density", [0.01, 0.15, 0.5, 0.9, low or 0.5]),
                    **some("mean_span_length", [1, 2.5, 8, 64]),
                    **some("random_roll", [True]),
                    **some("too_many_spans", ["split", "lower"]),
                    **some("eos_after_inputs", [True]),
                },
            ),
            (
                "fill_in_the_middle",
                {
                    **some("rate", [0, 0.9, 1]),
                    **some("spm_rate", [0, 1, low]),
                    **some("text_safe", [False]),
                },
            ),
            (
                "masked_diffusion",
                {
                    **levels,
                    **eos,
                    **some("epsilon", [0, 0.1]),
                    **chance.choice(
                        [
                            {},
                            {"stratified": True},
                            {"exact_count": True, "noise_range": [low or 0.1, 1]},
                        ]
                    ),
                    **some("replace", [[0.8, 0.1, 0.1], [0, 1, 0], [0.5, 0, 0.5]]),
                    **some("random_length", [0.01, 0.5, 1]),
                    **some("weighting", ["1/p", "none"]),
                },
            ),
            (
                "uniform_diffusion",
                {
                    **levels,
                    **eos,
                    **some("schedule", ["vp", "linear", "flip"]),
                    **some("loss_on", ["all", "corrupted"]),
                    **some("weighting", ["none", "view_scale"]),
                },
            ),
            (
                "block_diffusion",
                {
                    **levels,
                    **eos,
                    **some("block_length", [1, 3, 7, 1000]),
                    **chance.choice(_BLOCK_LAWS),
                    **some("shift", [True]),
                },
            ),
        ]
    )
    mode = some("mode_token", ["[NLU]", "[NLG]", "[S2S]"])
    return {"name": f"t{number}", "objective": objective, **weight, **mode, **parameters}


def try_recipe(seed: int, corpus: Path) -> str:
    """Return what a seed's recipe came to, "built" or "refused: …"; raise any other error, and any
    fault."""
    table, chance = recipe_of(seed), random.Random(f"form {seed}")
    is_small = not any(source["name"] in LARGE for source in table["sources"])
    if "seq_lengths" in table and chance.random() < 0.5:
        del table["seq_length"]
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        out = Path(folder) / "out"
        try:
            _build_in_two_parts(table, corpus, out)
        except PackprepError as error:
            assert "bug in packprep" not in str(error), error
            return f"refused: {type(error).__name__}: {error}"
        later = (1, 2, 1_000_000, (1 << 32) - 1)[seed % 4]
        for replay, twin, epoch in (
            (None, False, 0),
            (ALL, is_small, 0),
            (ALL, is_small, later),
        ):
            _verify(table, corpus, out, replay, twin, epoch)
        if chance.random() < 0.25:
            store, again = Path(folder) / "store", Path(folder) / "again"
            made.build(table, corpus, store, is_store=True)
            assert verify_dataset(store, ALL, {}, (0, 1), 0, made.Silent())["faults"] == 0
            from_store = _from_store(table, store)
            _build_in_two_parts(from_store, corpus, again)
            assert _shards(again) == _shards(out)
            _verify(from_store, corpus, again, ALL, is_small, 0)
    return "built"


def _build_in_two_parts(table: dict[str, Any], corpus: Path, out: Path) -> None:
    """Build half of the shards, as one of two array tasks does, and then resume."""
    if "seq_length" in table:
        made.build(table, corpus, out, array=(0, 2), progress=made.Silent())  # with its forecast
        made.build(table, corpus, out)
    else:
        made.build_lengths(table, corpus, out, array=(0, 2))
        made.build_lengths(table, corpus, out)


def _verify(
    table: dict[str, Any], corpus: Path, out: Path, replay: int | None, twin: bool, epoch: int
) -> None:
    """Assert that a dataset, or each of several lengths, has no fault and is that of its recipe."""
    recipe, segments = complete(read_recipe(table, corpus)), 0
    for dataset in datasets_in(out):
        if twin:
            found = verify_with_twin(dataset, replay, epoch=epoch, recipe=recipe)
        else:
            found = verify_dataset(
                dataset, replay, {}, (0, 1), 0, made.Silent(), recipe=recipe, epoch=epoch
            )
        assert found["faults"] == 0, [fault["message"] for fault in found["listed"]]
        assert not twin or found["twin"] == found["replayed"] == found["segments"]
        segments += found["segments"]
    assert segments > 0


def _from_store(table: dict[str, Any], store: Path) -> dict[str, Any]:
    """Return the recipe with all of its sources in a token store."""
    kept = ("name", "repeat", "share", "sample", "tasks")
    sources = [
        {key: source[key] for key in kept if key in source}
        | {"paths": [str(store)], "format": "store"}
        for source in table["sources"]
    ]
    return {**table, "sources": sources}


def _shards(out: Path) -> dict[str, bytes]:
    """Return the bytes of all shards below a folder, by path."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}


def _tried(corpus: Path, seed: int) -> tuple[int, str]:
    try:
        return seed, try_recipe(seed, corpus)
    except BaseException:
        return seed, f"FAILED: {traceback.format_exc()}"


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--count", type=int, default=1)
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument(
        "--show", action="store_true", help="print each recipe and what became of it"
    )
    given = arguments.parse_args()
    became: Counter = Counter()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(given.processes) as pool:
        corpus = Path(folder) / "corpus"
        write_corpus(corpus)
        for seed, result in pool.map(
            partial(_tried, corpus), range(given.first, given.first + given.count)
        ):
            became[result.partition(":")[0]] += 1
            if given.show or result.startswith("FAILED"):
                print(f"seed {seed}: {result}\n{json.dumps(recipe_of(seed))}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in sorted(became.items())))
    return min(became["FAILED"], 1)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
