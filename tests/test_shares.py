"""Shares and repeats of whole builds, to the document: sources of very different documents, in every kind of file."""

import json
import os
import random
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from packprep import open_dataset
from packprep.building.run import open_job, read_plan
from packprep.dataset.json_files import shard_name
from packprep.dataset.shard import shard_of
from packprep.inspection.summary import describe_build, describe_dataset
from packprep.twin import chance
from tests import made
from tests.command_line import inside

REPEAT = 11  # purpose of randomness.py
SHARES = {"notes": 0.7, "pages": 0.25, "books": 0.05}
SIZES = {"notes": (100, 30_000), "pages": (3_000, 1_000), "books": (200_000, 30)}
"""Mean bytes of a document, and how many there are."""
NAMES, WANTED = list(SHARES), np.array(list(SHARES.values()))


@cache
def texts(name):
    """Documents of half to one and a half times the source's mean, which no compressor makes much of."""
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
    ".parquet": lambda path, documents: made.write_parquet(path, documents, max(1, len(documents) // 40)),
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
    sources = [{"name": name, "paths": [f"{name}/*"], "share": share} for name, share in SHARES.items()]
    tasks = [{"name": "c", "objective": "causal"}]
    output = {"shard_text_bytes": shard_text_bytes}
    return made.table(sources, tasks=tasks, output=output, seq_length=2048, **changes)


def uses(out):
    """(source, position) → Counter of uses, and tokens by [shard, source], from the shards alone."""
    dataset = open_dataset(out)
    shards = dataset.manifest["shards"]
    found = Counter()
    tokens = np.zeros((len(shards), len(SHARES)), np.int64)
    for b, entry in enumerate(shards):
        if not entry["rows"]:
            continue
        header = shard_of(dataset.directory / shard_name(b), dataset.manifest, b).arrays
        first = header["segment_start"] == 0
        columns = (header[f"segment_{name}"][first].tolist() for name in ("source", "doc", "repeat"))
        found.update(zip(*columns, strict=True))
        tokens[b] = np.bincount(header["segment_source"], header["segment_tokens"], len(SHARES))
    return found, tokens


def expected_uses(ending, positions, repeats, seed):
    """Each use of each document that a repeat asks for: all of it for every whole one, by u(key) < the rest at last."""
    expected = Counter()
    for s, (name, repeat) in enumerate(zip(SHARES, repeats, strict=True)):
        for position in positions[name]:
            for use in range(int(np.ceil(repeat))):
                part = int(min(Fraction(1), Fraction(repeat) - use) * 2**53)
                key = chance.segment_key(chance.text_key(seed, name, f"a{ending}"), position, use, 0)
                if part == 2**53 or chance.bits64(key, REPEAT) >> 11 < part:
                    expected[s, position, use] += 1
    return expected


def positions_of(ending):
    """source → positions of its documents in its file."""
    if ending == ".parquet":
        return {name: range(len(texts(name))) for name in SHARES}
    sizes = {name: [len(json.dumps({"text": text})) + 1 for text in texts(name)] for name in SHARES}
    return {name: np.cumsum([0, *own])[:-1].tolist() for name, own in sizes.items()}


def errors_of(repeats):
    """float64[sources]: the standard error of a source's tokens, as a part of √tokens: of documents used by chance."""
    parts = np.array([repeat % 1 for repeat in repeats])
    squares = np.array([(own.astype(float) ** 2).mean() / own.mean() for own in LENGTHS.values()])
    return np.sqrt(np.where(parts > 0, 1 - parts, 0) * squares)


def grain_of(plan, ending):
    """float64[sources]: the tokens by which a shard's part may be off, because documents, steps and blocks are whole."""
    longest = np.array([own.max() for own in LENGTHS.values()], float)
    if ending not in (".jsonl.zst", ".jsonl.gz"):
        return longest
    steps = [source["step_bytes"] * ratio / 1024 for source in plan["sources"] for ratio in source["ratios"].values()]
    return longest + np.maximum(steps, 128 << 10 if ending == ".jsonl.zst" else 0)  # a block of zstd


@pytest.mark.parametrize("total_tokens", [None, 2_000_000, 12_000_000])
@pytest.mark.parametrize("ending", list(WRITE))
def test_every_source_has_its_share_of_the_whole_and_of_every_shard(corpora, tmp_path, ending, total_tokens):
    asked = {} if total_tokens is None else {"total_tokens": total_tokens}
    size = (total_tokens or int(LENGTHS["notes"].sum() / SHARES["notes"])) // 9
    outcome = made.build(table(size, **asked), corpora[ending], tmp_path, workers=2)
    plan = read_plan(tmp_path)
    repeats = [source["repeat"] for source in plan["sources"]]
    assert plan["shards"] >= 8
    assert repeats == [source["repeat"] for source in outcome.manifest["sources"]]
    most = {None: (1, 1), 2_000_000: (0.4, 0.6), 12_000_000: (2.5, 3)}[total_tokens]
    assert most[0] <= max(repeats) <= most[1]

    found, tokens = uses(tmp_path)
    assert found == expected_uses(ending, positions_of(ending), repeats, 0)

    # The whole is what the repeats give, and the repeats are what the shares come to.
    sizes, error, whole = np.array([own.sum() for own in LENGTHS.values()]), errors_of(repeats), tokens.sum(0)
    assert (abs(whole - repeats * sizes) <= 4 * error * np.sqrt(repeats * sizes)).all()
    planned = repeats * sizes / (repeats * sizes).sum()
    assert (abs(planned - WANTED) <= 0.01).all(), planned

    # Every shard, by pairs: the few long documents of one source make no share of the others uncertain.
    grain = grain_of(plan, ending)
    for pair in ([0, 1], [0, 2], [1, 2]):
        share = planned[pair[0]] / planned[pair].sum()
        for shard in tokens[:, pair]:
            both = planned[pair] * size  # what it should be
            spread = 3 * np.sqrt((((1 - share, share) * error[pair]) ** 2 * both).sum())
            off = abs(shard[0] - share * shard.sum())
            assert off <= max(0.02 * both.sum(), spread) + ((1 - share, share) * grain[pair]).sum(), (pair, tokens)

    # All sources together: within 2 points, or 3 standard errors of documents drawn at random.
    variance = WANTED * size * np.array([(own.astype(float) ** 2).mean() / own.mean() for own in LENGTHS.values()])
    of_share = np.sqrt((1 - 2 * WANTED) * variance + WANTED**2 * variance.sum()) / size
    for shard in tokens:
        assert (abs(shard / shard.sum() - WANTED) <= np.maximum(0.02, 3 * of_share)).all(), tokens

    # No source ends before the others.
    assert (tokens[-1][:2] > 0).all() and (tokens[0][:2] > 0).all()


def test_what_was_resolved_and_what_was_achieved_is_reported(corpora, tmp_path):
    base = corpora[".jsonl"]
    out = tmp_path / "out"
    outcome = made.build(table(300_000), base, out, workers=2)
    _, tokens = uses(out)
    achieved = tokens.sum(0) / tokens.sum()
    for figures in (describe_build(outcome), describe_dataset(out), inside("inspect", out, "--json").json):
        assert [source["name"] for source in figures["sources"]] == list(SHARES)
        assert [source["token_share"] for source in figures["sources"]] == achieved.tolist()
        assert [source["repeat"] for source in figures["sources"]] == [s.repeat for s in open_job(out).sources]
    said = inside("inspect", out).out
    for name, share in zip(SHARES, achieved, strict=True):
        (line,) = [line for line in said.splitlines() if line.startswith(f"{name} ")]
        assert f"{share:.2%}" in line
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'seq_length = 512\ntokenizer = "bytes"\n'
        + "".join(
            f'[[sources]]\nname = "{name}"\npaths = [{json.dumps(os.path.join(base, name, "*"))}]\nshare = {share}\n'
            for name, share in SHARES.items()
        )
        + '[[tasks]]\nname = "c"\nobjective = "causal"\n[output]\nshard_text_bytes = 300000\n'
    )
    forecast = inside("plan", recipe, "--json").json
    for source, share in zip(forecast["sources"], SHARES.values(), strict=True):
        assert abs(source["share"] - share) < 0.002 and source["repeat"] <= 1


@pytest.mark.parametrize("ending", list(WRITE))
@pytest.mark.parametrize("repeat", [1.0, 2.0, 0.25, 2.5])
def test_repeat_is_exact_for_every_document(corpora, tmp_path, ending, repeat):
    sources = [{"name": name, "paths": [f"{name}/*"], "repeat": repeat} for name in SHARES]
    tasks = [{"name": "c", "objective": "causal"}]
    recipe = made.table(sources, tasks=tasks, output={"shard_text_bytes": 2_000_000}, seq_length=2048)
    made.build(recipe, corpora[ending], tmp_path, workers=2)
    found, tokens = uses(tmp_path)
    assert found == expected_uses(ending, positions_of(ending), [repeat] * 3, 0)
    assert len(tokens) >= 2
    times = Counter((source, position) for source, position, _ in found.elements())
    assert set(times.values()) == {int(np.floor(repeat)), int(np.ceil(repeat))} - {0}
