"""P22: forged plans, from which every shard was then built, and which carry digests and
fingerprints of their own."""

import json
import shutil

import numpy as np
import pytest

from packprep.building import distributed
from packprep.building.plan import recipe_of
from packprep.building.plan_form import LATER
from packprep.exporting.megatron import Pair
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import as_stored, encode, shard_name
from packprep.objectives.tasks import complete
from packprep.recipe import fingerprint, read_recipe
from packprep.verification import verify_dataset
from tests import made
from tests.verification.damage import (
    copied,
    edit_manifest,
    edit_receipt,
    faults_of,
    manifest_of,
    promises_of,
    put_shard,
    read_json,
)

ALL = -1
NEWLINE = 10


def recipe_table(**changes):
    sources = [
        {"name": "lines", "paths": ["lines/*.jsonl"]},
        {"name": "rows", "paths": ["rows.parquet"]},
        {"name": "batches", "paths": ["batches.arrow"]},
    ]
    tasks = [{"preset": preset} for preset in ("ul2r", "mlm", "duo", "causal")]
    table = {"tokenizer": "bytes", "seq_length": 128, "sources": sources, "tasks": tasks}
    return {**table, "output": {"shard_text_bytes": 9_000}, **changes}


def built(folder, **changes):
    made.write_lines(folder / "in/lines/a.jsonl", made.texts(30, 1))
    made.write_lines(folder / "in/lines/b.jsonl", made.texts(20, 2))
    made.write_parquet(folder / "in/rows.parquet", made.texts(20, 3), rows_per_group=8)
    made.write_arrow(folder / "in/batches.arrow", made.texts(20, 4), rows_per_batch=8)
    made.build(recipe_table(**changes), folder / "in", folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return built(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A dataset whose sources have shares."""
    folder = tmp_path_factory.mktemp("shared")
    sources = [
        {"name": "lines", "paths": ["lines/*.jsonl"], "share": 0.5},
        {"name": "rows", "paths": ["rows.parquet"], "share": 0.5},
    ]
    return built(folder, sources=sources, tasks=[{"preset": "causal"}])


def signed(plan):
    """A plan with the fingerprint and digest that its values have."""
    files = [[] for _ in plan["sources"]]
    for file in plan["files"]:
        files[file["source"]].append((file["name"], file["size"]))
    digest = plan["tokenizer"]["digest"]
    of_all = fingerprint(recipe_of(plan), files, digest, plan["chat_template"])
    plan = as_stored({**plan, "fingerprint": of_all}, LATER)
    return {**plan, "digest": own_digest(plan)}


def forged(dataset, folder, change):
    """A dataset that was built from a changed plan."""
    plan = read_json(dataset / "plan.json")
    change(plan)
    folder.mkdir()
    shutil.copy(dataset / "tokenizer.json", folder)
    (folder / "plan.json").write_bytes(encode(signed(plan)))
    for shard in range(plan["shards"]):
        distributed.build_shard(folder, shard)
    distributed.finish(folder)
    return folder


@pytest.mark.long
def test_honest_datasets_have_no_faults(dataset, shared):
    for directory in (dataset, shared):
        assert faults_of(directory, ALL) == []
    plan = read_json(dataset / "plan.json")
    assert [source["patterns"] for source in plan["sources"]] == [
        ["*.jsonl"],
        ["rows.parquet"],
        ["batches.arrow"],
    ]
    assert plan["beside_tokenizer"] == []


def ids(plan):
    return plan["vocabulary"]


def roles(**changes):
    return lambda plan: ids(plan)["roles"].update(changes)


def exchanged_modes(plan):
    tokens = ids(plan)["mode_tokens"]
    tokens["[NLU]"], tokens["[NLG]"] = tokens["[NLG]"], tokens["[NLU]"]
    for task in plan["tasks"]:
        back = {260: 261, 261: 260}
        task["mode_token"] = back.get(task["mode_token"], task["mode_token"])


def resolved_of_duo(plan):
    return next(task for task in plan["tasks"] if task["objective"] == "uniform_diffusion")[
        "resolved"
    ]


def other_thresholds(plan):
    """All but those that the twin looks at."""
    limits = resolved_of_duo(plan)["flip_thresholds"]
    looked_at = {0, len(limits) // 3, len(limits) // 2, len(limits) - 1}
    limits[:] = [limit if k in looked_at else limit // 2 for k, limit in enumerate(limits)]


def source(i, **changes):
    return lambda plan: plan["sources"][i].update(changes)


FORGERIES = {
    "repeat 2 where the recipe says 1": source(0, repeat=2),
    "eos is a newline": roles(eos=NEWLINE),
    "a mask that is an ordinary token": roles(mask=97),
    "sentinels that are bytes of no text": (
        lambda p: ids(p).update(sentinels=[*range(1, 9), *range(14, 26)])
    ),
    "mode tokens exchanged": exchanged_modes,
    "no special ids": lambda p: ids(p).update(special_ids=[]),
    "an added token that is none": (
        lambda p: ids(p).update(added_tokens=[{"id": 521, "text": "x", "role": "mask"}])
    ),
    "a vocabulary twice as large": lambda p: ids(p).update(vocab_size=1056),
    "another token dtype": lambda p: p.update(token_dtype="int32"),
    "thresholds where the twin does not look": other_thresholds,
    "one threshold": lambda p: resolved_of_duo(p)["flip_thresholds"].__setitem__(7, 1 << 39),
    "another alpha": lambda p: resolved_of_duo(p).update(alpha=[0.5, 0.25]),
    "another flip rate": lambda p: resolved_of_duo(p).update(flip_rate=0.25),
    "steps of other bytes": source(0, step_bytes=1 << 15),
    "more shards": lambda p: p.update(shards=p["shards"] + 1),
    "larger shards": lambda p: p.update(shard_text_bytes=10_000),
    "more text": source(0, text_bytes=10**6),
    "more tokens": source(0, tokens=10**6),
    "a ratio that no sample gives": source(0, ratios={"jsonl": 1 << 30}),
    "a ratio of no file": lambda p: p["sources"][0]["ratios"].update(text=1024),
    "no tokens per byte": source(0, tokens_per_byte=None),
    "no patterns": source(0, patterns=None),
    "nothing of the files beside the tokenizer": lambda p: p.pop("beside_tokenizer"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_what_does_not_follow_is_found_without_the_sources(dataset, tmp_path, name):
    directory = forged(dataset, tmp_path / "forged", FORGERIES[name])
    found = [fault for fault in faults_of(directory) if fault["promise"] == "P22"]
    assert found and {fault["file"] for fault in found} == {"plan.json"}


def without_a_file(plan):
    plan["files"] = [file for file in plan["files"] if file["name"] != "b.jsonl"]


def fewer_pieces(name):
    def change(plan):
        file = next(file for file in plan["files"] if file["name"] == name)
        file.update(pieces=1, piece_bytes=file["piece_bytes"][:1])

    return change


def another_weight(plan):
    file = next(file for file in plan["files"] if file["name"] == "rows.parquet")
    file["piece_bytes"] = [sum(file["piece_bytes"][:-1]), *([1] * (len(file["piece_bytes"]) - 1))]


def consistent(change):
    """A change of the plan, and of the sums that follow from its estimates."""

    def changed(stored):
        from packprep.building.plan import Plan
        from packprep.building.planning import follows

        change(stored)
        plan = Plan(stored, changed.tokenizer)
        of_bytes = [source["tokens_per_byte"] for source in stored["sources"]]
        derived = follows(plan.recipe, plan.vocabulary, plan.tasks, plan.sources, of_bytes)
        for own, values in zip(stored["sources"], derived.pop("sources"), strict=True):
            own.update(values)
        stored.update(shards=derived["shards"], shard_text_bytes=derived["shard_text_bytes"])

    return changed


OF_THE_SOURCES = {
    "a file left out": (without_a_file, "'b.jsonl', which is not in the plan"),
    "fewer pieces of a Parquet file": (fewer_pieces("rows.parquet"), "'rows.parquet' has 3 splits"),
    "fewer pieces of an Arrow file": (
        fewer_pieces("batches.arrow"),
        "'batches.arrow' has 3 splits",
    ),
    "pieces that hold something else": (another_weight, "but their contents differ from the plan"),
    "a ratio that makes a source larger": (
        source(1, ratios={"parquet": 2048}),
        "sources[1].ratios.parquet is",
    ),
}


@pytest.mark.parametrize("name", OF_THE_SOURCES)
def test_what_the_sources_tell_is_found_by_replaying_all(dataset, tmp_path, name):
    change, words = OF_THE_SOURCES[name]
    change = consistent(change)
    change.tokenizer = (dataset / "tokenizer.json").read_bytes()
    directory = forged(dataset, tmp_path / "forged", change)
    assert faults_of(directory) == []
    found = [fault["message"] for fault in faults_of(directory, ALL) if fault["promise"] == "P22"]
    assert any(words in message for message in found), found


def test_ratios_that_end_a_source_early_are_found(shared, tmp_path):
    change = consistent(source(1, ratios={"parquet": 4096}))
    change.tokenizer = (shared / "tokenizer.json").read_bytes()
    directory = forged(shared, tmp_path / "forged", change)
    assert faults_of(directory) == []
    assert any(
        "sources[1].ratios.parquet is" in fault["message"] for fault in faults_of(directory, ALL)
    )


OF_THE_RECIPE = {
    "sample": lambda r: r["sources"][0].update(sample=[0.0, 0.5]),
    "tasks": lambda r: r["sources"][0].update(tasks=["causal"]),
    "max_bad_fraction": lambda r: r["documents"].update(max_bad_fraction=0.5),
}


@pytest.mark.parametrize("name", OF_THE_RECIPE)
def test_a_stored_recipe_that_was_changed_is_found_by_the_users_own(dataset, tmp_path, name):
    change = consistent(lambda plan: OF_THE_RECIPE[name](plan["recipe"]))
    change.tokenizer = (dataset / "tokenizer.json").read_bytes()
    directory = forged(dataset, tmp_path / "forged", change)
    assert faults_of(directory) == []
    own = complete(read_recipe(recipe_table(), dataset.parent / "in"))

    def compared(folder):
        return verify_dataset(folder, None, {}, (0, 1), 0, made.Silent(), recipe=own)["listed"]

    assert compared(dataset) == []
    (fault,) = compared(directory)
    assert fault["promise"] == "P22" and name in fault["message"]


def test_other_patterns_are_found_by_the_users_recipe(dataset, tmp_path):
    table = recipe_table()
    table["sources"][0] = {"name": "lines", "paths": ["lines/a.jsonl"]}
    directory = tmp_path / "out"
    made.build(table, dataset.parent / "in", directory)
    assert faults_of(directory, ALL) == []
    own = complete(read_recipe(recipe_table(), dataset.parent / "in"))
    (fault,) = verify_dataset(directory, None, {}, (0, 1), 0, made.Silent(), recipe=own)["listed"]
    assert "the patterns of source lines" in fault["message"]


def test_p22_more_bad_documents_than_the_recipe_lets_pass(tmp_path):
    lines = [json.dumps({"text": text}) for text in made.texts(60, 5)] + ["{"] * 30
    made.write(tmp_path / "in/lines/a.jsonl", ("\n".join(lines) + "\n").encode())
    sources = [{"name": "lines", "paths": ["lines/*.jsonl"]}]
    made.build(
        recipe_table(sources=sources, documents={"max_bad_fraction": 0.9}),
        tmp_path / "in",
        tmp_path / "out",
    )
    directory = tmp_path / "out"
    assert faults_of(directory) == []
    plan = read_json(directory / "plan.json")
    plan["recipe"]["documents"]["max_bad_fraction"] = 0.0
    plan = signed(plan)
    data = encode(plan)
    (directory / "plan.json").write_bytes(data)
    for shard in range(plan["shards"]):
        edit_receipt(directory, lambda receipt: receipt.update(plan_digest=digest_of(data)), shard)

    def change(manifest):
        manifest.update(recipe=plan["recipe"], fingerprint=plan["fingerprint"])
        manifest["plan"]["digest"] = digest_of(data)

    edit_manifest(directory, change)
    (fault,) = faults_of(directory)
    assert (fault["promise"], fault["file"]) == (
        "P22",
        "dataset.json",
    ) and "30 of 90 documents are bad" in fault["message"]


def other_header(directory, change):
    """A shard whose header says the same in other bytes."""
    data = (directory / shard_name(0)).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(json.loads(data[8 : 8 + length])).encode()
    assert len(text) <= length
    put_shard(directory, data[:8] + text.ljust(length, b" ") + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: json.dumps(dict(reversed(header.items())), separators=(",", ":")),
        lambda header: json.dumps(header, separators=(",", ":")).replace(
            '"tokens"', '"\\u0074okens"'
        ),
        lambda header: json.dumps(header),
    ],
    ids=["other order", "escaped", "spaces"],
)
def test_a_header_in_other_bytes_is_found(dataset, tmp_path, change):
    directory = copied(dataset, tmp_path)
    other_header(directory, change)
    assert promises_of(faults_of(directory)) == {"P3"}


@pytest.mark.parametrize("name", ["empty", "shards/001", "rejects/empty"])
def test_an_empty_folder_is_found(dataset, tmp_path, name):
    directory = copied(dataset, tmp_path)
    (directory / name).mkdir(parents=True)
    (fault,) = faults_of(directory)
    assert (fault["promise"], fault["file"]) == ("P1", name)


def test_which_segments_are_replayed_depends_on_the_seed(dataset):
    from packprep.verification import _items

    manifest = manifest_of(dataset)

    def chosen(seed):
        items = _items(manifest, range(len(manifest["shards"])), 9, seed)
        return [(item.number, *item.replay.tolist()) for item in items if item.replay is not None]

    assert chosen(1) == chosen(1) != chosen(2)
    assert (
        verify_dataset(dataset, 3, {}, (0, 1), 0, made.Silent(), replay_seed=4)["replay_seed"] == 4
    )


def test_a_megatron_pair_listed_without_its_pieces_is_found(dataset, tmp_path):
    pair = Pair(made.write(tmp_path / "in/ids", b"").with_name("pair"), np.dtype("<u2"))
    pair.add(np.arange(400) % 97, np.full(8, 50))
    pair.commit()
    made.write_lines(tmp_path / "in/a.jsonl", made.texts(20, 1))
    sources = [{"name": "pair", "paths": ["pair.bin"]}, {"name": "lines", "paths": ["a.jsonl"]}]
    made.build(recipe_table(sources=sources), tmp_path / "in", tmp_path / "out")
    change = consistent(lambda plan: plan["files"][0].update(pieces=0))
    change.tokenizer = (tmp_path / "out/tokenizer.json").read_bytes()
    directory = forged(tmp_path / "out", tmp_path / "forged", change)
    assert faults_of(directory) == []
    assert "source pair: 'pair.bin' has 1 splits" in [
        f["message"] for f in faults_of(directory, ALL)
    ]
