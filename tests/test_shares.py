"""Shares and repeats of whole builds, to the document: sources of very different documents, in
every kind of file."""

import json
import os
import random
from collections import Counter
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from packprep import open_dataset
from packprep.building.plan import open_plan, stored_plan
from packprep.dataset.shard import shard_of
from packprep.format.json_files import shard_name
from packprep.inspection.summary import describe_build, describe_dataset
from tests import made
from tests.command_line import inside

SHARES = {"notes": 0.7, "pages": 0.25, "books": 0.05}
SIZES = {"notes": (100, 30_000), "pages": (3_000, 1_000), "books": (200_000, 30)}
"""Mean bytes of a document, and how many there are."""
NAMES, WANTED = list(SHARES), np.array(list(SHARES.values()))


@cache
def texts(name):
    """Documents of half to one and a half times the source's mean, which no compressor makes much
    of."""
    size, count = SIZES[name]
    chance = random.Random(name)
    lengths = chance.choices(range(size // 2, size + size // 2), k=count)
    digits, ends = chance.randbytes(sum(lengths) // 2 + 1).hex(), np.cumsum([0, *lengths]).tolist()
    return [digits[begin:end] for begin, end in pairwise(ends)]


LENGTHS = {name: np.array([len(text) for text in texts(name)]) for name in SHARES}


WRITE = {
    ".jsonl": made.write_lines,
    ".jsonl.zst": made.write_lines,
    ".jsonl.gz": made.write_lines,
    ".parquet": lambda path, documents: made.write_parquet(
        path, documents, max(1, len(documents) // 40)
    ),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """ending → the folder in which each source has one file of that ending."""
    folder = tmp_path_factory.mktemp("shares")
    for name in SHARES:
        documents = texts(name)
        for ending, write in WRITE.items():
            write(folder / ending[1:] / name / f"a{ending}", documents)
    return {ending: folder / ending[1:] for ending in WRITE}


def table(shard_text_bytes, **changes):
    sources = [
        {"name": name, "paths": [f"{name}/*"], "share": share} for name, share in SHARES.items()
    ]
    tasks = [{"name": "c", "objective": "causal"}]
    output = {"shard_text_bytes": shard_text_bytes}
    return made.table(sources, tasks=tasks, output=output, seq_length=2048, **changes)


def uses(out):
    """(source, position) → Counter of uses, and tokens by [shard, source], from the shards
    alone."""
    dataset = open_dataset(out)
    shards = dataset.manifest["shards"]
    found = Counter()
    tokens = np.zeros((len(shards), len(SHARES)), np.int64)
    for b, entry in enumerate(shards):
        if not entry["rows"]:
            continue
        header = shard_of(dataset.directory / shard_name(b), dataset.manifest, b).arrays
        first = header["segment_start"] == 0
        columns = (
            header[f"segment_{name}"][first].tolist() for name in ("source", "doc", "repeat")
        )
        found.update(zip(*columns, strict=True))
        tokens[b] = np.bincount(header["segment_source"], header["segment_tokens"], len(SHARES))
    return found, tokens


def expected_uses(out):
    """(source, position, use) → 1, as the twin chooses them."""
    expected = Counter()
    for s, source in enumerate(open_plan(out).sources):
        expected.update((s, position, use) for _, position, use in made.uses_of(source))
    return expected


def grain_of(plan, ending):
    """The most tokens by which a shard's part of a source may be off, because documents, steps and
    blocks are whole."""
    longest = max(own.max() for own in LENGTHS.values())
    if ending not in (".jsonl.zst", ".jsonl.gz"):
        return 2 * longest
    # hexadecimal digits: to a half, twice
    steps = 4 * max(source["step_bytes"] for source in plan["sources"])
    return 2 * longest + max(steps, 256 << 10 if ending == ".jsonl.zst" else 0)  # blocks of zstd


@pytest.mark.alike(4)
@pytest.mark.parametrize(
    "ending, total_tokens",
    [
        *((ending, None) for ending in WRITE),
        *(
            (ending, total)
            for ending in (".jsonl", ".jsonl.zst")
            for total in (2 * 10**6, 12 * 10**6)
        ),
    ],
)
def test_every_source_has_its_share_of_the_whole_and_of_every_shard(
    corpora, tmp_path, ending, total_tokens
):
    asked = {} if total_tokens is None else {"total_tokens": total_tokens}
    size = (total_tokens or int(LENGTHS["notes"].sum() / SHARES["notes"])) // 9
    outcome = made.build(table(size, **asked), corpora[ending], tmp_path, workers=2)
    plan = stored_plan(tmp_path)
    repeats = [source["repeat"] for source in plan["sources"]]
    assert plan["shards"] >= 8
    assert repeats == [source["repeat"] for source in outcome.manifest["sources"]]
    most = {None: (1, 1), 2_000_000: (0.4, 0.6), 12_000_000: (2.5, 3)}[total_tokens]
    assert most[0] <= max(repeats) <= most[1]

    found, tokens = uses(tmp_path)
    assert found == expected_uses(tmp_path)
    whole = tokens.sum(0)
    longest = max(own.max() for own in LENGTHS.values())
    assert (abs(whole / whole.sum() - WANTED) <= 0.003 + 2 * longest / whole.sum()).all(), whole
    if total_tokens:
        assert abs(whole.sum() - total_tokens) <= 0.005 * total_tokens + 2 * longest
    for shard in tokens:
        assert (
            abs(shard / shard.sum() - WANTED) <= 0.015 + grain_of(plan, ending) / shard.sum()
        ).all(), tokens

    # No source ends before the others.
    assert (tokens[-1][:2] > 0).all() and (tokens[0][:2] > 0).all()


@pytest.mark.long
def test_what_was_resolved_and_what_was_achieved_is_reported(corpora, tmp_path):
    base = corpora[".jsonl"]
    out = tmp_path / "out"
    outcome = made.build(table(300_000), base, out, workers=2)
    _, tokens = uses(out)
    achieved = tokens.sum(0) / tokens.sum()
    for figures in (
        describe_build(outcome),
        describe_dataset(out),
        inside("inspect", out, "--json").json,
    ):
        assert [source["name"] for source in figures["sources"]] == list(SHARES)
        assert [source["token_share"] for source in figures["sources"]] == achieved.tolist()
        assert [source["repeat"] for source in figures["sources"]] == [
            s.repeat for s in open_plan(out).sources
        ]
    said = inside("inspect", out).out
    for name, share in zip(SHARES, achieved, strict=True):
        (line,) = [line for line in said.splitlines() if line.startswith(f"{name} ")]
        assert f"{share:.2%}" in line
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'seq_length = 512\ntokenizer = "bytes"\n'
        + "".join(
            f'[[sources]]\nname = "{name}"\npaths ='
            f" [{json.dumps(os.path.join(base, name, '*'))}]\nshare = {share}\n"
            for name, share in SHARES.items()
        )
        + '[[tasks]]\nname = "c"\nobjective = "causal"\n[output]\nshard_text_bytes = 300000\n'
    )
    forecast = inside("plan", recipe, "--json").json
    for source, share in zip(forecast["sources"], SHARES.values(), strict=True):
        assert abs(source["share"] - share) < 0.002 and source["repeat"] <= 1


@pytest.mark.long
@pytest.mark.alike(4)
@pytest.mark.parametrize(
    "repeat, ending",
    [(1.0, ".jsonl"), (2.0, ".jsonl"), (0.25, ".jsonl"), *((2.5, ending) for ending in WRITE)],
)
def test_repeat_is_exact_for_every_document(corpora, tmp_path, ending, repeat):
    sources = [{"name": name, "paths": [f"{name}/*"], "repeat": repeat} for name in SHARES]
    tasks = [{"name": "c", "objective": "causal"}]
    recipe = made.table(
        sources, tasks=tasks, output={"shard_text_bytes": 2_000_000}, seq_length=2048
    )
    made.build(recipe, corpora[ending], tmp_path, workers=2)
    found, tokens = uses(tmp_path)
    assert found == expected_uses(tmp_path)
    assert len(tokens) >= 2
    times = Counter((source, position) for source, position, _ in found.elements())
    assert set(times.values()) == {int(np.floor(repeat)), int(np.ceil(repeat))} - {0}


def test_what_was_wanted_stands_beside_what_was_got_and_far_off_is_warned_of(tmp_path):
    """Documents that are rejected after planning are reported and not made up for."""
    good, bad = ["a fine document " * 20] * 300, ["short"] * 3000
    made.write_lines(tmp_path / "a.jsonl", good)
    made.write_lines(tmp_path / "b.jsonl", good[:150] + bad)
    sources = [{"name": name, "paths": [f"{name}.jsonl"], "share": 0.5} for name in "ab"]
    for min_tokens, warned in ((1, False), (10, True)):
        out = tmp_path / f"out{min_tokens}"
        made.build(made.table(sources, documents={"min_tokens": min_tokens}), tmp_path, out)
        first, second = inside("inspect", out, "--json").json["sources"]
        assert first["wanted_share"] == second["wanted_share"] == 0.5
        said = " ".join(inside("inspect", out).out.split())
        assert "share wanted" in said
        warning = (
            f"warning: source a has {first['token_share']:.2%} of the tokens, but the recipe asks"
            " for 50.00%"
        )
        assert (warning in said) == warned
