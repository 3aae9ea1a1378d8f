"""Every kind of task, and a dataset of every kind of file, for the twin to compute once more."""

from tests import made

ALL = -1
CAUSAL = {"name": "causal", "objective": "causal", "mode_token": "[S2S]"}
EVERY_KIND = [
    {"preset": "ul2r"},
    {"name": "rolled", "objective": "span_corruption", "random_roll": True, "noise_density": 0.4},
    {
        "name": "lower",
        "objective": "span_corruption",
        "noise_density": 0.5,
        "too_many_spans": "lower",
    },
    {"name": "marked", "objective": "prefix_lm", "sentinel": True},
    {"preset": "fim"},
    {"name": "cut", "objective": "masked_diffusion", "random_length": 0.5},
    {
        "name": "bert",
        "objective": "masked_diffusion",
        "replace": [0.8, 0.1, 0.1],
        "noise_eos": False,
    },
    {"name": "even", "objective": "masked_diffusion", "stratified": True},
    {"preset": "dllm"},
    {
        "name": "counted",
        "objective": "masked_diffusion",
        "exact_count": True,
        "noise_range": [0.1, 0.6],
    },
    {"preset": "duo"},
    {
        "name": "flipped",
        "objective": "uniform_diffusion",
        "loss_on": "corrupted",
        "weighting": "view_scale",
    },
    {"name": "blocks", "objective": "block_diffusion", "block_length": 7},
    CAUSAL,
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def built(folder, **changes):
    made.write_lines(folder / "web" / "a.jsonl", made.texts(50, 1))
    made.write_lines(folder / "web" / "b.jsonl.zst", made.texts(40, 2))
    made.write_lines(folder / "web" / "c.jsonl.gz", made.texts(30, 3))
    made.write_parquet(folder / "books" / "d.parquet", made.texts(40, 4), 15)
    made.write_texts(folder / "notes", ["", *made.texts(20, 5), ""])
    sources = [
        {"name": "web", "paths": ["web/*"]},
        {"name": "books", "paths": ["books/*.parquet"], "repeat": 1.5},
        {"name": "notes", "paths": ["notes/*.txt"]},
    ]
    output = {"shard_text_bytes": 20_000}
    recipe = made.table(
        sources, **{"tasks": EVERY_KIND, "seq_length": 256, "output": output, **changes}
    )
    outcome = made.build(recipe, folder, folder / "out")
    assert len(outcome.manifest["shards"]) > 1
    return folder / "out"
