"""Datasets of several row lengths: each document in one of them, or cut into pieces that fill their
rows; one mixture of all."""

import json
import shutil
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

from packprep.building import planning
from packprep.building.lengths import shared_work
from packprep.dataset.loader import open_dataset
from packprep.dataset.shard import shard_in
from packprep.errors import RecipeError
from packprep.format.json_files import receipt_name
from packprep.recipe import as_toml, read_recipe
from tests import made
from tests.command_line import inside, refused
from tests.conversations.chats_made import CHATML
from tests.twin.check import verify_with_twin

LENGTHS = [64, 256, 1024]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    return folder, made.mixed_corpus(folder)


def recipe(sources, long="split", **changes):
    changes = {"tasks": [{"preset": "ul2r"}], "seq_lengths": LENGTHS, **changes}
    table = made.table(
        sources, documents={"long": long, "prepend_bos": True, "max_bad_fraction": 1}, **changes
    )
    del table["seq_length"]
    return table


def written(folder, table):
    """recipe.toml of a table, in a folder."""
    lists = {name: table[name] for name in ("sources", "tasks")}
    sections = {name: value for name, value in table.items() if isinstance(value, dict)}
    lines = [
        f"{name} = {as_toml(value)}"
        for name, value in table.items()
        if name not in {**lists, **sections}
    ]
    for name, tables in [*((n, [t]) for n, t in sections.items()), *lists.items()]:
        for one in tables:
            lines += [
                f"[[{name}]]" if name in lists else f"[{name}]",
                *(f"{k} = {as_toml(v)}" for k, v in one.items()),
            ]
    return made.write(folder / "recipe.toml", "\n".join(lines).encode())


def pieces(out):
    """(file, position, use) → [(first token, tokens)] in a dataset."""
    found = defaultdict(list)
    names = ("segment_file", "segment_doc", "segment_repeat", "segment_start", "segment_tokens")
    manifest = open_dataset(out).manifest
    for shard in range(len(manifest["shards"])):
        arrays = shard_in(out, manifest, shard).arrays
        for file, position, use, start, n in zip(
            *(arrays[name].tolist() for name in names), strict=True
        ):
            found[file, position, use].append((start, n))
    return found


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """(datasets of ul2r in all lengths, by the command; tokens of each use in rows of 1024)."""
    folder, sources = corpus
    base = tmp_path_factory.mktemp("whole")
    build = "build", written(base, recipe(sources)).rename(folder / "whole.toml")
    assert inside(*build, "--out", base / "all", "--workers", 1).status == 0
    alone = {**recipe(sources), "seq_lengths": None, "seq_length": 1024}
    made.build({key: value for key, value in alone.items() if value}, folder, base / "alone")
    found = pieces(base / "alone").items()
    return base / "all", {use: sum(n for _, n in parts) for use, parts in found}


def test_each_document_is_whole_in_the_first_length_that_holds_it_and_in_no_other(corpus, whole):
    folder, sources = corpus
    out, tokens = whole
    found = [pieces(out / f"seq_{length}") for length in LENGTHS]
    assert sum(map(len, found)) == len(tokens) > 500 and set().union(*found) == set(tokens)
    for shorter, length, own in zip([0, *LENGTHS], LENGTHS, found, strict=False):
        assert len(own) > 20
        for use, parts in own.items():
            assert sum(n for _, n in parts) == tokens[use]
            assert len(parts) == 1 or length == LENGTHS[-1]
            assert tokens[use] > shorter / 2  # sentinels take the rest of a row
    verified = inside("verify", out, "--json", "--workers", 1)
    assert [report["faults"] for report in verified.json] == [0, 0, 0, 0]
    for length in LENGTHS:
        assert verify_with_twin(out / f"seq_{length}")["faults"] == 0
    ledgers = [open_dataset(out / f"seq_{n}").manifest["ledger"]["sources"] for n in LENGTHS]
    for source in sources:
        kept, read = (
            sum(ledger[source["name"]]["tokens"][what] for ledger in ledgers)
            for what in ("used", "read")
        )
        assert read == 3 * kept > 0


@pytest.mark.long
@pytest.mark.parametrize("tasks", ["causal", "ul2r"])
def test_pieces_of_a_decomposed_document_tile_it_over_the_datasets(corpus, whole, tmp_path, tasks):
    folder, sources = corpus
    _, tokens = whole
    table = recipe(sources, "decompose", tasks=[{"preset": tasks}])
    made.build_lengths(table, folder, tmp_path / "all")
    together = defaultdict(list)
    for length in LENGTHS:
        for use, parts in pieces(tmp_path / "all" / f"seq_{length}").items():
            together[use] += parts
            if tasks == "causal" and length > LENGTHS[0]:  # whole rows, but for room for a tail
                assert all(n >= length - 5 for _, n in parts)
        report = verify_with_twin(tmp_path / "all" / f"seq_{length}")
        assert report["faults"] == 0, report["listed"]
    assert together.keys() == tokens.keys()
    for use, parts in together.items():
        ends = [0, *(start + n for start, n in sorted(parts))]
        assert [start for start, _ in sorted(parts)] == ends[:-1] and ends[-1] == tokens[use]


@pytest.mark.long
def test_workers_arrays_stores_and_kills_change_no_byte(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("packprep.building.run.LIST_AGAIN_S", 0)
    folder, (web, *_) = corpus
    sources = [web]
    table = recipe(sources, output={"shard_text_bytes": 40_000})
    made.build_lengths(table, folder, tmp_path / "one")
    wanted = made.contents(tmp_path / "one")
    made.build_lengths(table, folder, tmp_path / "two", workers=2)
    assert made.contents(tmp_path / "two") == wanted
    written(folder, table)
    for i in range(3):
        assert not (tmp_path / "array" / "mixture.json").exists()
        build = "build", folder / "recipe.toml", "--out", tmp_path / "array", "--workers", 1
        said = inside(*build, "--array-index", i, "--array-count", 3)
        assert said.status == 0, said
    assert made.contents(tmp_path / "array") == wanted
    killed = tmp_path / "killed"
    process = made.start_build(folder, table, killed, before=_KILL)
    assert process.wait() == -9 and not (killed / "mixture.json").exists()
    done = {n: len(list((killed / f"seq_{n}").glob("receipts/*/*"))) for n in LENGTHS}
    assert 0 < done[256] <= done[64] < len(list((tmp_path / "one/seq_64").glob("receipts/*/*")))
    assert inside("status", killed).status == 1
    # nor is a dataset that was not begun forgotten
    shutil.rmtree(killed / "seq_256")
    status = inside("status", killed)
    assert status.status == 1 and "seq_256: no output yet" in status.out
    assert inside("verify", killed).status == 2
    made.build_lengths(table, folder, killed)
    assert made.contents(killed) == wanted
    made.build(table, folder, tmp_path / "store", is_store=True)
    stored = [
        {**source, "paths": [str(tmp_path / "store")], "format": "store"} for source in sources
    ]
    made.build_lengths({**table, "sources": stored}, folder, tmp_path / "of-store")
    shards = made.contents(tmp_path / "of-store", "seq_")
    assert {name: data for name, data in shards.items() if "/shards/" in name} == {
        name: data for name, data in wanted.items() if "/shards/" in name
    }


_KILL = """
import os, signal
from packprep.building import run
make = run.shard_of
def killing(plan, number, *arguments, **named):
    if plan.recipe.seq_length == 256 and number == 2:
        os.killpg(0, signal.SIGKILL)
    return make(plan, number, *arguments, **named)
run.shard_of = killing
"""


def _built_alone(table, folder, out):
    """The bytes of the datasets of all lengths, each from a build of its own."""
    for length in table["seq_lengths"]:
        made.build({**table, "seq_length": length}, folder, out / f"seq_{length}")
    return made.contents(out)


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_lengths_that_are_built_together_have_the_bytes_of_separate_builds(tmp_path, kind):
    if kind == "text":
        sources = [*made.mixed_corpus(tmp_path), {"name": "w", "paths": ["weights.jsonl"]}]
        lines = [
            {"text": "word " * i, "weight": i % 3} if i % 9 else {"other": i} for i in range(300)
        ]
        sources[0]["sample"] = [0.1, 0.8]
        table = recipe(sources, output={"shard_text_bytes": 150_000})
    else:
        lines = [
            {"messages": [{"role": r, "content": f"{r} " * (i % 70)} for r in ROLES * (i % 4)]}
            for i in range(400)
        ]
        made.write(tmp_path / "template.jinja", CHATML.encode())
        sources = [{"name": "chats", "paths": ["weights.jsonl"], "repeat": 1.5}]
        changes = {"seq_lengths": [256, 1024], "output": {"shard_text_bytes": 90_000}}
        table = recipe(sources, tasks=[{"objective": "causal"}], **changes)
        table["documents"]["chat_template"] = "template.jinja"
    made.write(tmp_path / "weights.jsonl", "\n".join(map(json.dumps, lines)).encode())
    wanted = _built_alone(table, tmp_path, tmp_path / "alone")
    outcomes = made.build_lengths(table, tmp_path, tmp_path / "all")
    assert made.contents(tmp_path / "all", "seq_") == wanted
    ledgers = [outcome.manifest["ledger"]["sources"].values() for outcome in outcomes]
    read = [sum(source["documents"]["read"] for source in ledger) for ledger in ledgers]
    assert len(outcomes[0].manifest["shards"]) > 2
    assert set(read) == {outcomes[0].profile.documents}  # each document was read once


ROLES = ["user", "assistant"]


def test_lengths_with_other_numbers_of_shards_read_few_documents_twice(tmp_path, monkeypatch):
    # As for a large corpus, rows of other lengths have other shards, and compressed files other steps.
    counts = {64: 7, 256: 5, 1024: 3}

    def shard_text_bytes(recipe, text_bytes, *_):
        return -(-text_bytes // counts[recipe.seq_length])

    monkeypatch.setattr(planning, "_shard_text_bytes", shard_text_bytes)
    monkeypatch.setattr(planning, "step_bytes", lambda _, shards: 1 << 14 + (shards < 5))
    sources = made.mixed_corpus(tmp_path)[:2]
    for name, count in (("x.jsonl.zst", 600), ("y.jsonl.gz", 500)):
        made.write_lines(tmp_path / "web" / name, made.texts(count, count, 900))
    table = recipe(sources, output={"shard_text_bytes": "auto"})
    wanted = _built_alone(table, tmp_path, tmp_path / "alone")
    outcomes = made.build_lengths(table, tmp_path, tmp_path / "all", workers=2)
    assert [len(outcome.manifest["shards"]) for outcome in outcomes] == [*counts.values()]
    assert made.contents(tmp_path / "all", "seq_") == wanted
    sources = outcomes[0].manifest["ledger"]["sources"].values()
    read = sum(source["documents"]["read"] for source in sources)
    assert read < outcomes[0].profile.documents < 1.3 * read
    # A shard that is missing is made alone.
    for name in (receipt_name(3), "dataset.json"):
        (tmp_path / "all" / "seq_256" / name).unlink()
    outcomes = made.build_lengths(table, tmp_path, tmp_path / "all")
    assert [outcome.made for outcome in outcomes] == [0, 1, 0]
    assert made.contents(tmp_path / "all", "seq_") == wanted


@pytest.mark.parametrize(
    "counts, workers, items",
    [
        ((4, 4, 4), 2, 4),  # one shard of each
        ((6, 2), 2, 2),  # three and one
        ((12, 8), 2, 4),  # three and two, which start and end together
        ((7, 3), 1, 1),  # a single worker reads everything once
        ((7, 3), 2, 2),
        ((1491, 382), 16, 32),  # runs of shards, so that few continue in the next run
        ((1491, 382), 100, 100),
        ((1491, 382), 1000, 382),
    ],
)
@pytest.mark.every_case
def test_shards_are_divided_into_items_of_work(monkeypatch, counts, workers, items):
    monkeypatch.setattr("packprep.building.lengths.read_alike", lambda plans: True)
    plans = [SimpleNamespace(shards=n, recipe=SimpleNamespace(seq_length=8 << n)) for n in counts]
    missing = [range(n) for n in counts]
    found = shared_work(plans, missing, workers, 1)
    assert len(found) == items
    made_shards = [(shard.output, shard.number) for item in found for shard in item.shards]
    assert sorted(made_shards) == [(i, b) for i, n in enumerate(counts) for b in range(n)]
    for item in found:
        ends = [(shard.number + 1) / counts[shard.output] for shard in item.shards]
        assert ends == sorted(ends)


def test_an_epoch_of_the_mixture_is_one_of_the_corpus(whole):
    mixed = open_dataset(whole[0])
    assert mixed.seq_lengths == tuple(LENGTHS) and "shares at" not in str(mixed)
    batch_size = {64: 16, 256: 4, 1024: 1}
    slots = sum(len(dataset) * dataset.seq_length for dataset in mixed.datasets)
    batches = mixed.batches(batch_size=batch_size, seed=3)
    rows = defaultdict(Counter)
    for _ in range(slots // 1024):
        batch = next(batches)
        size, length = batch["tokens"].shape
        assert size == batch_size[length]
        rows[length].update(row.tobytes() for row in batch["tokens"])
    for given, dataset in zip(mixed.delivered(batches.state_dict()), mixed.datasets, strict=True):
        stored, step = dataset.batch(range(len(dataset)))["tokens"], batch_size[dataset.seq_length]
        left = Counter(row.tobytes() for row in stored)
        assert len(left) > 20
        left.subtract(rows[dataset.seq_length])
        assert abs(given - len(dataset)) <= step
        assert sum(map(abs, left.values())) <= step


def test_shares_and_added_tokens_are_of_all_datasets_together(corpus, tmp_path):
    folder, sources = corpus
    shared = [
        {**{k: v for k, v in source.items() if k != "repeat"}, "share": 0.3} for source in sources
    ]
    table = recipe(shared, total_tokens=100_000, tokenizer="bytes")
    outcomes = made.build_lengths(table, folder, tmp_path / "all")
    used = Counter()
    for outcome in outcomes:
        used.update(
            {
                name: one["tokens"]["used"]
                for name, one in outcome.manifest["ledger"]["sources"].items()
            }
        )
    assert sum(used.values()) == pytest.approx(100_000, rel=0.1)
    for source in shared:
        assert used[source["name"]] / sum(used.values()) == pytest.approx(1 / 3, abs=0.04)
    assert len({outcome.manifest["tokenizer"]["digest"] for outcome in outcomes}) == 1


@pytest.mark.long
def test_conversations_are_whole_and_not_decomposed(tmp_path):
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "hi " * i},
                    {"role": "assistant", "content": "yes " * i},
                ]
            }
        )
        for i in range(60)
    ]
    made.write(tmp_path / "chats.jsonl", "\n".join(lines).encode())
    made.write(tmp_path / "template.jinja", CHATML.encode())
    table = recipe([{"paths": ["chats.jsonl"]}], tasks=[{"objective": "causal"}])
    table["documents"]["chat_template"] = "template.jinja"
    outcomes = made.build_lengths(table, tmp_path, tmp_path / "all")
    used = [
        outcome.manifest["ledger"]["sources"]["source0"]["documents"]["used"]
        for outcome in outcomes
    ]
    assert sum(used) == 60 and min(used) > 0
    for length in LENGTHS:
        report = verify_with_twin(tmp_path / "all" / f"seq_{length}")
        assert report["faults"] == 0, report["listed"]
    table["documents"]["long"] = "decompose"
    with pytest.raises(
        RecipeError, match='"decompose" would cut through them\nhint: set documents.long = "split"'
    ):
        made.build_lengths(table, tmp_path, tmp_path / "cut")


@pytest.mark.parametrize(
    "lengths", [[256, 64], [64, 64], [64], [], [4, 64], [64, 100], 64, ["64", "128"]]
)
def test_lists_of_lengths_that_are_none_are_refused(tmp_path, lengths):
    table = {"tokenizer": "bytes", "sources": [{"paths": ["x"]}], "seq_lengths": lengths}
    with pytest.raises(
        RecipeError, match="expected a list of two or more multiples of 8, ascending"
    ):
        read_recipe(table, tmp_path)


def test_what_does_not_go_with_lengths_is_refused(corpus, tmp_path):
    folder, sources = corpus
    written(folder, recipe(sources))
    build = "build", folder / "recipe.toml", "--out", tmp_path / "out"
    assert "seq_length = 128 is not one of seq_lengths = [64, 256, 1024]" in refused(
        *build, "--seq-length", 128
    )
    assert 'hint: use "best_fit"' in refused(*build, "--set", "packing.algorithm=concat")
    alone = folder / "web" / "*", "--out", tmp_path / "out", "--set", "documents.long=decompose"
    assert "give seq_lengths" in refused("build", *alone)
    assert inside(*build, "--seq-length", 64).status == 0
    assert "is a dataset, but seq_lengths make several" in refused(*build)
    made.write(tmp_path / "other" / "notes.txt", b"")
    assert "has files that are not from this build: notes.txt" in refused(
        *build[:-1], tmp_path / "other"
    )
    assert inside("plan", folder / "recipe.toml").out.count("rows of") == 3
    whole = written(folder, recipe(sources, tasks=[{"objective": "causal"}]))
    go_on = "build", whole, "--out", tmp_path / "all"
    assert inside(*go_on).status == 0
    made.write(tmp_path / "all" / "README.md", b"")
    mixture = tmp_path / "all" / "mixture.json"
    mixture.write_bytes(mixture.read_bytes().replace(b"seq_1024", b"seq_2048"))
    assert "has other datasets or shares than this build" in inside(*go_on).err
    for length in LENGTHS:
        shutil.rmtree(tmp_path / "all" / f"seq_{length}")
    assert "not from this build: README.md, mixture.json" in refused(*go_on)
    made.write(tmp_path / "just_begun" / "seq_64" / ".plan.json.tmp", b"")  # by another array task
    assert inside(*go_on[:-1], tmp_path / "just_begun").status == 0
    assert "no document goes into rows of 16384\n  hint: set seq_length = 8192" in refused(
        *build[:-1], tmp_path / "long", "--set", "seq_lengths=[8192, 16384]", "--tasks", "causal"
    )
