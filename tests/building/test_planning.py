import copy
import json
import re
from importlib.metadata import version

import numpy as np
import pytest

from packprep.building import planning
from packprep.building.forecast import forecast
from packprep.building.plan import Plan, recipe_of
from packprep.building.plan_form import LATER, check_plan
from packprep.building.planning import (
    _shard_text_bytes,
    differences,
    look_up,
    make_plan,
    repeats,
    token_dtype,
)
from packprep.errors import PackprepError, PlanError, RecipeError
from packprep.format.digests import own_digest
from packprep.format.json_files import as_stored, decode, encode
from packprep.recipe import KEYS, read_recipe
from packprep.sources.slices import step_bytes
from tests import made
from tests.recipe.values_made import in_section


def inputs_of(folder, sources="*.jsonl", **changes):
    return look_up(read_recipe(made.table(sources, **changes), folder), {})


@pytest.fixture
def folder(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(400))
    made.write_lines(tmp_path / "b.jsonl.zst", made.texts(200, 1))
    return tmp_path


def test_a_plan_is_the_same_whenever_and_wherever_it_is_made(folder, built):
    plans = [encode(as_stored(make_plan(inputs_of(folder)), LATER)) for _ in range(2)]
    assert plans[0] == plans[1]
    fresh = make_plan(look_up(read_recipe(built.table, built.base), {}))
    assert encode(as_stored(fresh, LATER)) == (built.out / "plan.json").read_bytes()


def test_a_plan_is_canonical_json_without_hosts_times_or_output(folder):
    data = encode(as_stored(make_plan(inputs_of(folder)), LATER))
    plan = decode(data, "plan.json")
    assert encode(plan) == data
    assert set(plan) == {
        "format",
        "version",
        "law_version",
        "fingerprint",
        "recipe",
        "engine",
        "made_with",
        "tokenizer",
        "vocabulary",
        "chat_template",
        "token_dtype",
        "tasks",
        "shards",
        "shard_text_bytes",
        "sources",
        "files",
        "digest",
        "beside_tokenizer",
    }
    assert plan["digest"] == own_digest(plan) != own_digest({**plan, "shards": plan["shards"] + 1})
    assert [source["prefix"] for source in plan["sources"]] == [str(folder)]
    without = {
        **plan,
        "sources": [{k: v for k, v in s.items() if k != "prefix"} for s in plan["sources"]],
    }
    assert str(folder) not in encode(without).decode()


def test_files_are_listed_with_sizes_and_pieces(folder):
    said: list[str] = []
    files = make_plan(inputs_of(folder, "*"), said.append)["files"]
    sizes = [(folder / name).stat().st_size for name in ("a.jsonl", "b.jsonl.zst")]
    make_plan(inputs_of(folder, "a.jsonl"), said.append)
    assert said == [
        f"sampling {sum(sizes) / 1e6:.1f} MB in 2 files",
        f"sampling {sizes[0] / 1e6:.1f} MB in 1 file",
    ]
    assert files == [
        {"source": 0, "name": "a.jsonl", "size": sizes[0], "pieces": 1},
        {"source": 0, "name": "b.jsonl.zst", "size": sizes[1], "pieces": 1},
    ]


def test_the_text_to_encode_follows_from_files_passes_and_hash_split(tmp_path):
    for name in ("a.jsonl", "b.jsonl.zst", "c.parquet", "d.arrow"):
        made.write(tmp_path / name, b"x" * 1000)
    sources = [
        {"name": "lines", "paths": ["a.jsonl"], "repeat": 2.5, "sample": [0.5, 1.0]},
        {"name": "packed", "paths": ["b.jsonl.zst", "c.parquet"]},
        {"name": "tables", "paths": ["d.arrow"]},
        {"name": "ids", "paths": ["a.jsonl"], "format": "tokens"},
    ]
    assert inputs_of(tmp_path, sources).text_bytes == 1250 + 6000 + 1000


def test_the_steps_of_compressed_files_are_of_all_that_a_shard_reads_of_them(tmp_path):
    made.write_lines(tmp_path / "a.jsonl.gz", made.texts(4000))
    stored = (tmp_path / "a.jsonl.gz").stat().st_size
    for uses in (1, 8):
        sources = [{"paths": ["a.jsonl.gz"], "repeat": uses}]
        plan = make_plan(inputs_of(tmp_path, sources, output={"shard_text_bytes": 4 << 20}))
        assert plan["sources"][0]["step_bytes"] == step_bytes(stored * uses, plan["shards"])
    assert step_bytes(stored * 8, plan["shards"]) != step_bytes(stored // 8, plan["shards"])


def test_shards_are_the_text_that_is_kept_over_shard_text_bytes(folder):
    text = sum(len(t.encode()) for t in made.texts(400))
    plan = make_plan(inputs_of(folder, "a.jsonl", output={"shard_text_bytes": 10_000}))
    assert abs(plan["shards"] - text / 10_000) <= 1
    assert make_plan(inputs_of(folder, "a.jsonl", output={}))["shards"] == 1
    half = [{"paths": ["a.jsonl"], "repeat": 3, "sample": [0.0, 0.5]}]
    plan = make_plan(inputs_of(folder, half, output={"shard_text_bytes": 10_000}))
    assert abs(plan["shards"] - 1.5 * text / 10_000) <= 1


@pytest.mark.parametrize(
    "mib, shards",
    [(0.1, 1), (64, 1), (64.1, 2), (128, 2), (130, 4), (256, 4), (320, 6), (333, 6), (513, 12), (1024, 16), (1100, 24),
     (64 * 64, 64), (64 * 65, 65), (64 * 1000, 1000)],
)  # fmt: skip
def test_a_few_shards_by_themselves_are_as_many_as_workers_share_evenly(folder, mib, shards):
    inputs = inputs_of(folder, "a.jsonl", output={})
    text_bytes = int(mib * 2**20)
    size = _shard_text_bytes(inputs.recipe, text_bytes, 0.25)
    assert -(-text_bytes // size) == shards and (2**25 < size <= 2**26)


def test_long_rows_are_not_made_fewer_to_share_shards_evenly(folder):
    recipe = inputs_of(folder, "a.jsonl", seq_length=65536, output={}).recipe
    # eight shards would have fewer rows
    assert _shard_text_bytes(recipe, 3 << 30, 0.25) == 2000 * 65536 * 4
    assert _shard_text_bytes(recipe, 3 << 30, 0.25, has_chats=True) == 250 * 65536 * 4
    recipe = inputs_of(folder, "a.jsonl", seq_length=16384, output={}).recipe
    whole = int(2000 * 16384 / 0.25)
    assert _shard_text_bytes(recipe, 5 * whole, 0.25) == whole  # six shards would have too few
    recipe = inputs_of(folder, "a.jsonl", output={}).recipe
    assert _shard_text_bytes(recipe, 1000 << 20, 0.25, has_chats=True) == 8 << 20
    # 50,000 shards at most, and 512 MiB of text in each
    assert _shard_text_bytes(recipe, 100_000 << 26, 0.25) == 2 << 26
    assert _shard_text_bytes(recipe, 1_000_000 << 26, 0.25) == 512 << 20


@pytest.mark.parametrize(
    "seq_length, expected",
    [(512, 64 << 20), (8192, 64 << 20), (65_536, 2000 * 65_536), (1 << 20, 512 << 20)],
)
def test_shard_text_bytes_by_themselves_give_two_thousand_rows_within_bounds(
    folder, seq_length, expected
):
    assert make_plan(inputs_of(folder, "a.jsonl", seq_length=seq_length, output={}))[
        "shard_text_bytes"
    ] == pytest.approx(expected, rel=0.001)


def test_shares_become_repeats_of_six_digits(folder):
    sources = [
        {"name": "a", "paths": ["a.jsonl"], "share": 0.25},
        {"name": "b", "paths": ["b*"], "share": 0.75},
    ]
    plan = make_plan(inputs_of(folder, sources))
    repeats = [source["repeat"] for source in plan["sources"]]
    assert max(repeats) == 1.0 and all(repeat == float(f"{repeat:.6g}") for repeat in repeats)
    tokens = [source["tokens"] for source in plan["sources"]]
    assert abs(tokens[0] / sum(tokens) - 0.25) < 0.0001
    inputs, samples = inputs_of(folder, sources, total_tokens=1_000_000), []
    plan = make_plan(inputs, samples=samples)
    assert abs(sum(source["tokens"] for source in plan["sources"]) / 1e6 - 1) < 0.0001
    rows = forecast(plan, inputs, samples)["sources"]
    assert abs(rows[1]["share"] - 0.75) < 0.01 and rows[1]["share_error"] >= 0


def test_shares_hold_in_the_dataset(folder):
    sources = [
        {"name": "a", "paths": ["a.jsonl"], "share": 0.4},
        {"name": "b", "paths": ["b*"], "share": 0.6},
    ]
    manifest = made.build(
        made.table(sources, total_tokens=600_000), folder, folder / "out"
    ).manifest
    used = [manifest["ledger"]["sources"][name]["tokens"]["used"] for name in ("a", "b")]
    assert abs(used[0] / sum(used) - 0.4) < 0.02 and abs(sum(used) / 600_000 - 1) < 0.05


def test_a_share_uses_a_document_at_least_once_in_a_million_and_at_most_65_536_times(folder):
    def repeat_of(total_tokens):
        sources = [{"name": "a", "paths": ["a.jsonl"], "share": 1.0}]
        recipe = inputs_of(folder, sources, total_tokens=total_tokens).recipe
        return repeats(recipe, [10_000_000], [1.0])

    most = 65_536 * 10**7
    assert [repeat_of(1), repeat_of(100), repeat_of(most)] == [[1e-6], [1e-5], [65_536.0]]
    with pytest.raises(RecipeError, match="use each of its documents 65537 times, but the maximum"):
        repeat_of(most + 10**7)


def test_a_dataset_has_at_most_2_20_shards(folder, monkeypatch):
    text_bytes = make_plan(inputs_of(folder, "a.jsonl"))["sources"][0]["text_bytes"]
    third = -(-text_bytes // 3)
    monkeypatch.setattr(planning, "MOST_SHARDS", 3)
    size = {"shard_text_bytes": third}
    assert make_plan(inputs_of(folder, "a.jsonl", output=size))["shards"] == 3
    with pytest.raises(RecipeError, match=f"makes 4 shards, but .* 3\nhint: set at least {third}$"):
        make_plan(inputs_of(folder, "a.jsonl", output={"shard_text_bytes": third - 1}))


def test_a_share_of_a_source_without_text_is_refused(folder):
    made.write(folder / "empty.jsonl", b"")
    sources = [
        {"name": "a", "paths": ["a.jsonl"], "share": 0.4},
        {"name": "b", "paths": ["empty.jsonl"], "share": 0.6},
    ]
    with pytest.raises(RecipeError, match="source 'b' has a share of 0.6, but no tokens"):
        make_plan(inputs_of(folder, sources))


def test_a_plan_takes_the_largest_number_that_each_key_of_a_recipe_takes(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["abc"])
    # A total of 2**18 would need 87 381 passes, which are more than a plan may have.
    numbers = [2**63 - 1, *(2**k - 1 for k in range(62, 0, -1))]

    def is_planned(section, key, value):
        table = in_section(section, key, value)
        table["sources"][0] |= {"paths": ["a.jsonl"]}
        table["sources"][0] |= {"share": 1.0} if key == "total_tokens" else {}
        try:
            plan = make_plan(look_up(read_recipe(table, tmp_path), {}))
        except PackprepError:
            return False
        check_plan(plan, "plan.json")
        return True

    most = {
        key: next((value for value in numbers if is_planned(section, key, value)), None)
        for section, keys in KEYS.items()
        for key in keys
        if section != "specials"  # ids, which the vocabulary limits
    }
    assert (most["seed"], most["max_tokens"]) == (2**63 - 1, 2**63 - 1)
    assert most["shard_text_bytes"] == 2**62 - 1 and most["total_tokens"] == 2**17 - 1


def test_fault_25_the_token_dtype_fits_the_vocabulary_and_is_stored(folder):
    recipe = inputs_of(folder).recipe
    assert (
        token_dtype(recipe, 1 << 16) == np.uint16 and token_dtype(recipe, (1 << 16) + 1) == np.int32
    )
    narrow = inputs_of(folder, output={"token_dtype": "uint16"}).recipe
    with pytest.raises(
        RecipeError, match='token_dtype = "uint16" has 65536 ids, but the vocabulary has 65537'
    ):
        token_dtype(narrow, (1 << 16) + 1)
    wide = make_plan(inputs_of(folder, output={"token_dtype": "int32"}))
    assert (
        wide["token_dtype"] == "int32" and make_plan(inputs_of(folder))["token_dtype"] == "uint16"
    )


def test_fault_28_a_ceiling_of_the_vocabulary_is_stored(folder):
    assert (
        make_plan(inputs_of(folder, specials={"vocab_size": 1024}))["vocabulary"]["vocab_size"]
        == 1024
    )
    assert make_plan(inputs_of(folder))["vocabulary"]["vocab_size"] == 528


# Plan


def test_a_plan_is_the_recipe_again_without_its_paths(folder):
    inputs = inputs_of(folder, tasks=[{"preset": "ul2r"}], documents={"prepend_bos": True})
    stored = make_plan(inputs)
    plan = Plan(decode(encode(stored), "plan.json"), inputs.vocabulary.tokenizer_json)
    assert [t.name for t in plan.tasks] == ["r", "x-long", "x-dense", "s", "too_short"]
    assert (plan.recipe.documents, plan.recipe.packing) == (
        inputs.recipe.documents,
        inputs.recipe.packing,
    )
    assert plan.recipe.tasks == inputs.recipe.tasks
    assert plan.shards == stored["shards"] and plan.token_dtype == np.uint16
    assert (
        plan.sources[0].files == inputs.files[0]
        and plan.vocabulary.roles == inputs.vocabulary.roles
    )
    again = make_plan(inputs)
    assert Plan(again, inputs.vocabulary.tokenizer_json).digest == plan.digest


def test_a_plan_s_weights_are_its_text_bytes(folder):
    sources = [{"paths": ["a.jsonl"], "repeat": 2.5, "sample": [0.1, 0.9]}, {"paths": ["b*"]}]
    inputs = inputs_of(folder, sources)
    stored = make_plan(inputs)
    plan = Plan(stored, inputs.vocabulary.tokenizer_json)
    assert [source.weight for source in plan.sources] == [
        source["text_bytes"] for source in stored["sources"]
    ]
    assert stored["shards"] == -(
        -sum(source.weight for source in plan.sources) // stored["shard_text_bytes"]
    )


def test_a_plan_refuses_another_law_tokenizer_or_engine(folder):
    inputs = inputs_of(folder)
    plan, data = make_plan(inputs), inputs.vocabulary.tokenizer_json
    for law, words in (
        (
            99,
            "plan.json has law_version 99 and this packprep makes 3\nhint: use packprep .*, which made",
        ),
        (
            2,
            "plan.json was built by a pre-release version of packprep .law_version 2.\nhint: build it",
        ),
    ):
        with pytest.raises(PlanError, match=words):
            check_plan({**plan, "law_version": law}, "plan.json")
    with pytest.raises(
        PlanError, match="tokenizer.json has digest .*\nhint: restore the original file"
    ):
        Plan(plan, data + b" ")
    other = {**plan, "engine": {"name": "bytes", "version": "0"}}
    with pytest.raises(PlanError, match="the plan's engine is bytes 0, but here it is bytes 1"):
        _ = Plan(other, data).engine


def test_a_plan_s_key_of_a_newer_version_is_refused_with_it_and_a_later_one_may_be_absent(folder):
    plan = make_plan(inputs_of(folder))
    plan["made_with"] = {"packprep": "7.0"}
    mine = re.escape(version("packprep"))
    newer = (
        rf"key 'colour' is unknown to packprep {mine}; packprep 7.0 wrote it\nhint: use that version or a"
        r" newer one"
    )
    for part in (plan, plan["vocabulary"], plan["sources"][0], plan["files"][0]):
        part["colour"] = 1
        with pytest.raises(PlanError, match=newer):
            check_plan(plan, "plan.json")
        del part["colour"]
    plan["recipe"]["packing"]["colour"] = 1
    with pytest.raises(PlanError, match=f"recipe: packing: {newer}"):
        recipe_of(plan)
    del plan["recipe"]["packing"]["colour"]
    plan["recipe"]["tasks"][0]["parameters"]["colour"] = 1
    with pytest.raises(PlanError, match=newer):
        recipe_of(plan)
    check_plan(plan, "plan.json")
    ratios = plan["sources"][0]["ratios"]
    for other in (-1, 2.5, "2", True, 1 << 31):
        plan["sources"][0]["ratios"] = {**ratios, "jsonl": other}
        with pytest.raises(PlanError, match="ratios"):
            check_plan(plan, "plan.json")
    plan["sources"][0]["ratios"] = ratios
    special = plan["vocabulary"]["special_ids"]
    for other in ([-1], ["2"], {"1": 1}, 1):
        plan["vocabulary"]["special_ids"] = other
        with pytest.raises(PlanError, match="special_ids"):
            check_plan(plan, "plan.json")
    plan["vocabulary"]["special_ids"] = special
    assert (
        check_plan(
            {key: value for key, value in plan.items() if key != "beside_tokenizer"}, "plan.json"
        ).beside_tokenizer
        is None
    )
    del plan["shards"]
    with pytest.raises(PlanError, match="key 'shards' is missing\nhint: restore the file"):
        check_plan(plan, "plan.json")


COUNTS = [0, (1 << 62) - 1], [-1, 1 << 62, 1.0]
NAMES = [["a", "a/..b", "...", "a.."]], [[], ["/a"], [".."], ["a/.."], ["../a"], ["a/../b"], ["\0"]]
# Key of a plan → values that it may have, and values that it may not have.
RANGES = {
    "shards": ([1, 1 << 20], [0, (1 << 20) + 1]),
    "shard_text_bytes": ([1, (1 << 62) - 1], [0, 1 << 62]),
    "digest": (["0" * 32], ["0" * 31, "0" * 33, "g" * 32, "0" * 32 + "\n"]),
    "vocabulary.vocab_size": ([528, (1 << 31) - 1], [0, 1 << 31]),
    "vocabulary.media": ([{"image": [-1, 0, -1]}], [{"image": [-2, 0, -1]}, {"image": [0, -1, 0]}]),
    "sources.0.repeat": ([1e-9, float(1 << 16)], [0.0, (1 << 16) + 0.5]),
    "sources.0.step_bytes": ([1, (1 << 31) - 1], [0, 1 << 31]),
    "sources.0.ratios": ([{"jsonl": (1 << 31) - 1}], [{"jsonl": 1 << 31}]),
    **{f"sources.0.{key}": COUNTS for key in ("text_bytes", "tokens", "documents")},
    "sources.0.tokens_per_byte": ([None, 1e-9, 2.0**31 - 1], [0.0, 2.0**31]),
    "sources.0.patterns": NAMES,
    "sources.0.pass_shares": ([[0.0, 0.5, 1.0]], [[-0.01], [1.01]]),
    "files.0.size": COUNTS,
    "files.0.piece_bytes": ([None, [0], [(1 << 47) - 1]], [[-1], [1 << 47]]),
}


def with_value(plan, key, value):
    """A copy of a plan with another value of a key, such as "files.0.size"."""
    changed = copy.deepcopy(plan)
    *path, last = (int(name) if name.isdigit() else name for name in key.split("."))
    place = changed
    for name in path:
        place = place[name]
    place[last] = value
    return changed


@pytest.fixture
def two_sources(folder):
    """A plan of two sources of one file each, with four-byte ids."""
    sources = [{"name": "a", "paths": ["a.jsonl"]}, {"name": "b", "paths": ["b*"]}]
    return make_plan(inputs_of(folder, sources, output={"token_dtype": "int32"}))


def test_each_key_of_a_plan_has_a_range_and_both_ends_are_allowed(two_sources):
    for key, (valid, invalid) in RANGES.items():
        for value in valid:
            check_plan(with_value(two_sources, key, value), "plan.json")
        for value in invalid:
            with pytest.raises(PlanError, match="\nhint: restore the file"):
                check_plan(with_value(two_sources, key, value), f"{key} = {value}")


def test_values_of_a_plan_that_contradict_each_other_are_refused(two_sources):
    size = two_sources["vocabulary"]["vocab_size"]
    above = f"an id is not below vocab_size {size}"
    for key, last, beyond, words in [
        ("vocabulary.roles", {"pad": size - 1}, {"pad": 0, "eos": size}, above),
        ("vocabulary.sentinels", [0, size - 1], [0, size], above),
        ("vocabulary.mode_tokens", {"r": size - 1}, {"r": size}, above),
        ("vocabulary.special_ids", [size - 1], [size], above),
        ("vocabulary.media", {"i": [0, size - 1, -1]}, {"i": [0, 1, size]}, above),
        ("vocabulary.roles", {"pad": 0}, {"eos": 0}, "roles has no pad"),
        ("files.0.piece_bytes", [3], [3, 4], r"files\[0\]: .* its 1 splits"),
        ("files.1.source", 1, 2, r"files\[1\]: source 2 does not exist or is out of order"),
        ("files.0.source", 0, -1, "Expected `int` >= 0"),
        ("files.0.source", 1, 2, r"files\[0\]: source 2"),
        ("files.0.pieces", (1 << 26) - 1, 1 << 26, "files: more than 67108864 splits"),
    ]:
        check_plan(with_value(two_sources, key, last), "plan.json")
        with pytest.raises(PlanError, match=words):
            check_plan(with_value(two_sources, key, beyond), "plan.json")
    narrow = {**two_sources, "token_dtype": "uint16"}
    check_plan(with_value(narrow, "vocabulary.vocab_size", 1 << 16), "plan.json")
    with pytest.raises(PlanError, match="vocab_size 65537 does not fit token_dtype uint16"):
        check_plan(with_value(narrow, "vocabulary.vocab_size", (1 << 16) + 1), "plan.json")
    second_first = with_value(two_sources, "files.0.source", 1)
    with pytest.raises(PlanError, match=r"files\[1\]: source 0 does not exist or is out of order"):
        check_plan(with_value(second_first, "files.1.source", 0), "plan.json")
    of_store = with_value(two_sources, "sources.1.store", "0" * 32)
    check_plan(with_value(of_store, "sources.1.prefix", "store:/a"), "plan.json")
    with pytest.raises(PlanError, match=r"sources\[1\]: store is a token store's digest, but"):
        check_plan(of_store, "plan.json")
    with pytest.raises(PlanError, match=r"sources\[0\]: estimates: "):
        check_plan({**two_sources, "kind": "store"}, "plan.json")


# differences


def test_no_differences_with_oneself_and_every_changed_key_is_named(folder):
    inputs = inputs_of(folder)
    plan = decode(encode(make_plan(inputs)), "plan.json")
    assert differences(inputs, plan) == []
    for path, said in [
        (("recipe", "seed"), f"seed is 0 here and '{'o' * 199} in the plan"),
        (
            ("recipe", "sources", 0, "sample"),
            "sources[0].sample is [0.0, 1.0] here and 'other' in the plan",
        ),
        (
            ("recipe", "tasks", 1, "parameters", "noise_density"),
            "tasks[1].parameters.noise_density is 0.15 here",
        ),
        (("recipe", "tasks"), "tasks is [r, x-long, x-dense, s] here and 'other' in the plan"),
        (("tokenizer", "digest"), "the tokenizer changed (digest "),
        (("chat_template",), "the chat template changed"),
    ]:
        changed = copy.deepcopy(plan)
        place = changed
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = "o" * 300 if path[-1] == "seed" else "other"
        changed["fingerprint"] = "other"
        found = differences(inputs, changed)
        assert len(found) == 1 and said in found[0], (found, said)
    assert differences(inputs, {**plan, "fingerprint": "other"}) == ["the fingerprint differs"]


def test_many_differences_are_cut_short(folder):
    inputs = inputs_of(folder)
    plan = make_plan(inputs)
    plan["files"] = [{"source": 0, "name": f"{i}.jsonl", "size": 1, "pieces": 1} for i in range(30)]
    found = differences(inputs, {**plan, "fingerprint": "other"})
    assert len(found) == 11 and found[-1] == "…"
    assert found[0] == "input '0.jsonl' of source 'source0': 1 bytes in the plan, no file now"
    files = plan["files"][:9]  # With the file of the recipe, ten differ.
    found = differences(inputs, {**plan, "files": files, "fingerprint": "other"})
    assert len(found) == 10 and found[-1].startswith("input 'a.jsonl' of source 'source0': no file")


def said_of(template, folder, **documents):
    """What is said aloud of a source of one conversation."""
    chat = {
        "messages": [{"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}]
    }
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.jsonl").write_text(json.dumps(chat) + "\n")
    (folder / "chat.jinja").write_text(template)
    said: list[str] = []
    table = {
        "seq_length": 64,
        "tokenizer": "bytes",
        "sources": [{"paths": ["corpus/*.jsonl"]}],
        "documents": {"chat_template": "chat.jinja", **documents},
        "tasks": [{"preset": "causal"}],
    }
    make_plan(look_up(read_recipe(table, folder), {}), said.append)
    return said


TURNS = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"
ENDED = "{% for m in messages %}{{ m.content }}<eos>\n{% endfor %}"


@pytest.mark.parametrize(
    "template, warned", [("", True), ("{% if add_generation_prompt %}A: {% endif %}", False)]
)
def test_a_template_that_does_not_know_what_opens_a_turn_is_warned_of(tmp_path, template, warned):
    assert (
        any("add_generation_prompt" in note for note in said_of(TURNS + template, tmp_path))
        is warned
    )


@pytest.mark.parametrize(
    "template, append_eos, warned",
    [
        (ENDED, True, True),
        (ENDED, False, False),
        (TURNS, True, False),
        (
            "{% if messages[0].content == '2+2?' %}{{ raise_exception('no') }}{% endif %}" + ENDED,
            True,
            False,
        ),
    ],
)
def test_an_eos_behind_that_of_a_template_is_warned_of(tmp_path, template, append_eos, warned):
    said = said_of(template, tmp_path, append_eos=append_eos)
    assert any("ends conversations with <eos>, which is eos" in note for note in said) is warned
