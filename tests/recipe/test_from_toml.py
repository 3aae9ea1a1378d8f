import json
import os
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from packprep.errors import RecipeError
from packprep.format.json_files import decode, encode
from packprep.objectives.tasks import complete
from packprep.recipe import (
    KEYS,
    fingerprint,
    from_normalised,
    load_recipe,
    normalised,
    normalised_toml,
    parse_size,
    presets,
    read_recipe,
    refuse_misnamed_recipes,
    set_value,
    tasks_named,
)
from packprep.recipe.from_toml import check_together
from tests.recipe.values_made import LEAST, VALUES, in_section


@pytest.fixture
def usual_recursion_limit():
    """Python's limit, which some libraries raise for the whole process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


def read(**changes):
    return read_recipe({**LEAST, **changes}, Path("/base"))


def value_of(recipe, section, key):
    place = {"": recipe, "sources": recipe.sources[0], "tasks": recipe.tasks[0]}.get(section)
    return getattr(place or getattr(recipe, section), key)


def test_every_key_of_every_section_is_tested_here():
    keys = {(section, key) for section, names in KEYS.items() for key in names}
    # other keys of [specials]; see below
    assert keys - set(VALUES) == {("specials", "mode_tokens")}
    assert set(VALUES) <= keys


@pytest.mark.parametrize("section, key", VALUES)
def test_values_are_taken_in_their_declared_types(section, key):
    for value in VALUES[section, key][0]:
        given, expected = value if isinstance(value, tuple) else (value, value)
        found = value_of(read_recipe(in_section(section, key, given), Path()), section, key)
        assert found == expected and type(found) is type(expected), (given, found)


@pytest.mark.parametrize("section, key", VALUES)
def test_values_that_are_not_taken_name_key_value_and_what_was_expected(section, key):
    for value in VALUES[section, key][1]:
        with pytest.raises(RecipeError) as caught:
            read_recipe(in_section(section, key, value), Path())
        assert key in str(caught.value), (value, str(caught.value))


@pytest.mark.parametrize("section, key", VALUES)
def test_every_key_says_what_it_means_and_its_default_is_of_its_kind(section, key):
    declared = KEYS[section][key]
    assert declared.meaning and declared.kind
    if declared.default not in (..., None, ""):
        assert declared.accept(declared.default) == declared.default


@pytest.mark.parametrize(
    "section, key", [("sources", "paths"), ("sources", "tasks"), ("specials", "sentinels")]
)
def test_a_set_is_no_list_since_it_has_no_order(section, key):
    with pytest.raises(RecipeError, match=f"{key} = {{'causal'}}: expected"):
        read_recipe(in_section(section, key, {"causal"}), Path())


def test_the_defaults_are_the_contract_s():
    recipe = read()
    assert (recipe.seq_length, recipe.seed, recipe.engine, recipe.total_tokens) == (
        4096,
        0,
        "auto",
        0,
    )
    source = recipe.sources[0]
    assert (source.name, source.format, source.text_key, source.repeat) == (
        "source0",
        "auto",
        "text",
        1.0,
    )
    assert (source.share, source.sample, source.tasks) == (None, (0.0, 1.0), None)
    documents = recipe.documents
    assert (documents.append_eos, documents.prepend_bos, documents.long) == (True, False, "split")
    assert (documents.max_tokens, documents.min_tokens, documents.special_text) == (0, 1, "text")
    assert (documents.loss_spans, documents.bad_documents, documents.max_bad_fraction) == (
        "use",
        "reject",
        0.001,
    )
    packing = recipe.packing
    assert (packing.algorithm, packing.max_segments_per_row, packing.pad_seq_to_mult) == (
        "best_fit",
        0,
        1,
    )
    assert (recipe.specials.missing, recipe.specials.sentinels, recipe.specials.vocab_size) == (
        "error",
        None,
        0,
    )
    assert [(t.name, t.objective, t.weight, t.mode_token) for t in recipe.tasks] == [
        ("causal", "causal", 1.0, None)
    ]
    output = recipe.output
    assert (output.shard_text_bytes, output.token_dtype, output.columns) == ("auto", "auto", "full")
    assert recipe.min_tail == 3 and read(documents={"min_tokens": 9}).min_tail == 9


# Unknown and missing keys


@pytest.mark.parametrize(
    "table, said",
    [
        ({"seq_lenght": 8}, "unknown key 'seq_lenght'; did you mean 'seq_length'? (in the recipe)"),
        (
            {"documents": {"apend_eos": True}},
            "unknown key 'apend_eos'; did you mean 'append_eos'? (in [documents])",
        ),
        ({"packing": {"algoritm": "x"}}, "did you mean 'algorithm'? (in [packing])"),
        ({"output": {"dtype": "x"}}, "did you mean 'token_dtype'? (in [output])"),
        ({"sources": [{"path": ["x"]}]}, "did you mean 'paths'? (in [sources[0]])"),
        ({"specials": {"sentinel": "x{}"}}, "did you mean 'sentinels'? (in [specials"),
        ({"algorithm": "concat"}, "algorithm is a key of [packing]: put it under that header"),
        ({"xyzzy": 1}, "unknown key 'xyzzy'; known: documents, engine, output"),
        ({"tasks": [{"preset": "ul2rr"}]}, "unknown preset 'ul2rr'; did you mean 'ul2r'?"),
        ({"tasks": [{"preset": ["ul2r"]}]}, "unknown preset \"['ul2r']\""),
        ({"tasks": [{"preset": "ul2r", "name": "x"}]}, "a preset takes only a weight, not name"),
        (
            {"sources": [{"paths": ["x"], "tasks": ["causl"]}]},
            "sources[0].tasks: unknown task 'causl'; did you mean 'causal'?",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest_known(table, said):
    with pytest.raises(RecipeError) as caught:
        read(**table)
    assert said in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "table, said",
    [
        ({"sources": LEAST["sources"]}, "tokenizer is missing: a file, a directory"),
        ({"tokenizer": "bytes"}, "the recipe has no [[sources]]\nhint: give at least one"),
        (
            {**LEAST, "sources": [{"name": "a"}]},
            "sources[0].paths is missing: files, patterns or URLs",
        ),
        ({**LEAST, "tasks": [{"name": "a"}]}, "tasks[0] has neither an objective nor a preset"),
        ({**LEAST, "tasks": []}, "tasks is empty"),
        ({**LEAST, "sources": {"paths": ["x"]}}, "sources: expected [[sources]] tables"),
        ({**LEAST, "tasks": {"objective": "causal"}}, "tasks: expected [[tasks]] tables"),
        ({**LEAST, "tasks": ["causal"]}, "tasks[0]: expected a table, found 'causal'"),
        ({**LEAST, "sources": ["x"]}, "[sources[0]]: expected a table of keys, found 'x'"),
        ({**LEAST, "documents": []}, "[documents]: expected a table of keys, found []"),
    ],
)
def test_a_missing_or_misshaped_part_is_named(table, said):
    with pytest.raises(RecipeError) as caught:
        read_recipe(table, Path())
    assert said in str(caught.value), str(caught.value)


# What only the whole recipe can tell


@pytest.mark.parametrize(
    "table, said",
    [
        (
            {"packing": {"pad_seq_to_mult": 24}, "seq_length": 4096},
            "pad_seq_to_mult = 24 does not divide seq_length = 4096",
        ),
        (
            {"packing": {"pad_seq_to_mult": 8, "algorithm": "concat"}},
            "pad_seq_to_mult does not support concat",
        ),
        ({"total_tokens": 5}, "total_tokens requires share"),
        (
            {"specials": {"media": {"image": "<i>"}}, "documents": {"loss_spans": "ignore"}},
            "which loss spans express\nhint: leave loss_spans out",
        ),
        (
            {"sources": [{"paths": ["x"]}, {"name": "source0", "paths": ["y"]}]},
            "sources[1].name = 'source0' is already taken",
        ),
        ({"sources": [{"paths": ["s3://x", "y"]}]}, "mixes URLs and local paths"),
        ({"sources": [{"paths": ["x"], "share": 0.5, "repeat": 1}]}, "both repeat and share"),
        (
            {"sources": [{"paths": ["x"], "share": 0.5}, {"name": "b", "paths": ["y"]}]},
            "but not for b\nhint: give it in every",
        ),
        (
            {"tasks": [{"objective": "causal"}, {"objective": "causal"}]},
            "tasks[1].name = 'causal' is already taken",
        ),
        ({"tasks": [{"name": "too_short", "objective": "causal"}]}, "'too_short' is already taken"),
        (
            {"tasks": [{"preset": "ul2r"}, {"preset": "ul2r"}, {"preset": "ul2r"}]},
            "is already taken",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(table, said):
    with pytest.raises(RecipeError) as caught:
        read(**table)
    assert said in str(caught.value), str(caught.value)


def test_mode_tokens_are_quoted_keys_of_specials():
    mapped = read(specials={"[NLU]": "<|reserved_1|>", "[NLG]": 7}).specials.mode_tokens
    assert mapped == {"[NLU]": "<|reserved_1|>", "[NLG]": 7}
    with pytest.raises(
        RecipeError, match=r"unknown key 'NLU'.*write a mode token in quotes, with its brackets"
    ):
        read(specials={"NLU": 7})
    with pytest.raises(
        RecipeError, match=r'specials."\[NLU\]" = -1: expected a token\'s text or its id'
    ):
        read(specials={"[NLU]": -1})


@pytest.mark.parametrize(
    "media", [{"text": "x"}, {"a": ["x", "x", "y"]}, {"a": ["y", "x", "x"]}, {"a": ["", "", "y"]}]
)
def test_a_kind_of_media_has_a_slot_token_of_its_own(media):
    with pytest.raises(
        RecipeError,
        match=r"specials.media = .*: expected a table: a kind and its \[begin, slot, end\] tokens",
    ):
        read(specials={"media": media})


# Presets


def test_presets_expand_with_their_weights_in_proportion():
    recipe = read(tasks=[{"preset": "ul2r", "weight": 3}, {"name": "c", "objective": "causal"}])
    assert [(t.name, t.weight) for t in recipe.tasks] == [
        ("r", 0.75), ("x-long", 0.375), ("x-dense", 0.375), ("s", 1.5), ("c", 1.0),
    ]  # fmt: skip
    assert [t.mode_token for t in recipe.tasks] == ["[NLU]", "[NLG]", "[NLG]", "[S2S]", None]


def test_presets_compose_and_their_names_do_not_clash():
    recipe = read(
        tasks=[{"preset": "ul2r"}, {"preset": "ul2"}, {"name": "mine", "objective": "causal"}]
    )
    names = [t.name for t in recipe.tasks]
    assert len(set(names)) == len(names) and {"s", "ul2.s", "x-long", "ul2.x-long"} <= set(names)
    every = read(tasks=[{"preset": name} for name in presets()])
    assert len({t.name for t in every.tasks}) == sum(len(tasks) for tasks in presets().values())


def test_the_presets_are_the_contract_s():
    assert {"causal", "prefix_lm", "ul2", "ul2r", "t5"} <= set(presets())
    ul2r = {
        t["name"]: (t.get("noise_density"), t.get("mean_span_length"), t["weight"])
        for t in presets()["ul2r"]
    }
    assert ul2r == {
        "r": (0.15, 3.0, 0.25),
        "x-long": (0.15, 32.0, 0.125),
        "x-dense": (0.5, 3.0, 0.125),
        "s": (None, None, 0.5),
    }
    spans = sorted(
        (t["noise_density"], t["mean_span_length"])
        for t in presets()["ul2"]
        if "noise_density" in t
    )
    assert spans == [(0.15, 3), (0.15, 8), (0.15, 64), (0.5, 3), (0.5, 8), (0.5, 64)]
    assert len({t.get("weight", 1.0) for t in presets()["ul2"]}) == 1
    [mlm], [dllm] = presets()["mlm"], presets()["dllm"]
    assert mlm["noise_eos"] is False and mlm["weighting"] == dllm["weighting"] == "none"


def test_a_task_s_name_stands_for_its_family():
    names = ["r", "x", "x-long", "xy", "x-dense"]
    assert (
        tasks_named("x", names) == [1, 2, 4]
        and tasks_named("x-long", names) == [2]
        and tasks_named("z", names) == []
    )


# Sizes, files, --set


def test_sizes_are_bytes():
    for text, expected in [
        ("1MiB", 1 << 20),
        ("64 MB", 64_000_000),
        ("1.5kib", 1536),
        ("7", 7),
        ("7B", 7),
        (" 2 GiB ", 2 << 30),
        (9, 9),
    ]:
        assert parse_size(text) == expected
    assert parse_size(2**62 - 1) == 2**62 - 1
    beyond = (2**62, "4611686018427387904", "4294967296GiB", "9000000000000000000GiB")
    for bad in ("", "x", "1 XB", "-1", "1e3", "0", 0, -1, 1.5, True, None, *beyond):
        with pytest.raises(ValueError):
            parse_size(bad)


def test_a_recipe_file_that_cannot_be_used_says_why(tmp_path):
    with pytest.raises(
        RecipeError,
        match="none.toml: No such file or directory\nhint: give a recipe file or inputs",
    ):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "a.toml").write_bytes(b"seed = \n")
    with pytest.raises(RecipeError, match="a.toml: not TOML: Invalid value .at line 1"):
        load_recipe(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_bytes(b'tokenizer = "\xff"\n')
    with pytest.raises(RecipeError, match="b.toml: not UTF-8 at byte 13"):
        load_recipe(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_text('tokenizer = "bytes"\n[[sources]]\npaths = ["x"]\n')
    assert read_recipe(load_recipe(tmp_path / "c.toml"), tmp_path).base == tmp_path


def test_a_byte_order_mark_before_a_recipe_is_taken(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfseed = 3\r\n")
    assert load_recipe(tmp_path / "a.toml") == {"seed": 3}
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfseed = True\n")
    with pytest.raises(
        RecipeError, match="not TOML.*line 1.*: seed = True\nhint: write true in TOML"
    ):
        load_recipe(tmp_path / "a.toml")


OTHER_FORMATS = {
    "JSON": '{"seq_length": 512,\n "tokenizer": "bytes", "sources": [{"paths": ["a"]}]}',
    "YAML": "# a recipe\nseq_length: 512\ntokenizer: bytes\nsources:\n  - paths: a\n",
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_a_recipe_in_json_or_yaml_is_refused_as_one_whatever_its_name(tmp_path, name):
    text = OTHER_FORMATS[name]
    toml, own, other = (tmp_path / f"a.{ending}" for ending in ("toml", name.lower(), "txt"))

    def read_input(path):
        refuse_misnamed_recipes([str(path)])

    for path, read in ((toml, load_recipe), (own, read_input), (other, read_input)):
        path.write_text(text)
        with pytest.raises(
            RecipeError,
            match=f"a.{path.suffix[1:]}: is {name}, but a recipe is TOML\nhint: write seq_length = 512",
        ):
            read(path)


@pytest.mark.parametrize("name", ["a", "a.tml", "a.TOML", "a.toml.bak", "a.yaml"])
def test_a_recipe_whose_name_does_not_end_with_toml_is_refused(tmp_path, name):
    (tmp_path / name).write_text('tokenizer = "bytes"\n[[sources]]\npaths = ["a"]\n')
    with pytest.raises(RecipeError, match=f"{name} is a recipe, .*\nhint: rename it to a.toml"):
        refuse_misnamed_recipes([str(tmp_path / name)])


@pytest.mark.parametrize(
    "text",
    [
        'sources:\n  - paths: ["a"]\n',
        "---\nsources: [{paths: a}]\n",
        '"sources":\n- "paths": [a,\n b\n]\n',
        '{"sources": [{"paths": "a"}]}',
    ],
)
def test_sources_with_paths_alone_make_a_recipe(tmp_path, text):
    (tmp_path / "a.yml").write_text(text)
    with pytest.raises(RecipeError, match="but a recipe is TOML"):
        refuse_misnamed_recipes([str(tmp_path / "a.yml")])


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.json", '{"text": "x", "sources": 1}\n'),
        ("a.json", '{"text": "tokenizer:"}\n{"sources": 1, "seed": 1}\n'),
        ("a.json", "{"),
        ("a.yaml", "tasks:\n- name: x\n"),
        ("a.yaml", "tasks:\n- name: x\ndocuments: 3\n"),
        ("a.yaml", "sources:\n  web: 1\n"),
        ("a.txt", f"How to write a recipe:\n\n{OTHER_FORMATS['YAML']}"),
        ("a.toml.txt", '[tool]\nname = "x"\n'),
        ("*.yaml", None),
        ("data", None),
    ],
)
def test_inputs_that_are_no_recipe_are_left_alone(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    else:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "a.yaml").write_text(OTHER_FORMATS["YAML"])
    refuse_misnamed_recipes([str(tmp_path / name)])


def test_among_several_inputs_only_files_of_other_formats_are_read(tmp_path):
    for name in ("a.yaml", "a.txt"):
        (tmp_path / name).write_text(OTHER_FORMATS["YAML"])
    refuse_misnamed_recipes([str(tmp_path / "a.txt"), "b.jsonl"])
    with pytest.raises(RecipeError, match="a.yaml: is YAML"):
        refuse_misnamed_recipes(["b.jsonl", str(tmp_path / "a.yaml")])


@pytest.mark.parametrize(
    "assignment, path, value",
    [
        ("seq_length=512", ("seq_length",), 512),
        ("tokenizer=gpt2", ("tokenizer",), "gpt2"),
        ("tokenizer=", ("tokenizer",), ""),
        ("packing.algorithm=next_fit", ("packing", "algorithm"), "next_fit"),
        ("documents.append_eos=false", ("documents", "append_eos"), False),
        ("output.shard_text_bytes=64MiB", ("output", "shard_text_bytes"), "64MiB"),
        ("sources.0.repeat=2.5", ("sources", 0, "repeat"), 2.5),
        ("sources.web.paths=['a', 'b']", ("sources", 1, "paths"), ["a", "b"]),
        ("sources.web.text_key=a=b", ("sources", 1, "text_key"), "a=b"),
        ('specials.sentinels={first = 5, count = 2}', ("specials", "sentinels"), {"first": 5, "count": 2}),
    ],
)  # fmt: skip
def test_set_value_goes_by_key_number_or_name(assignment, path, value):
    table = {"sources": [{"paths": ["x"]}, {"name": "web", "paths": ["y"]}]}
    set_value(table, assignment)
    place = table
    for name in path:
        place = place[name]
    assert place == value and type(place) is type(value)


@pytest.mark.parametrize(
    "assignment, said",
    [
        ("seed", "expected KEY=VALUE"),
        ("=5", "expected KEY=VALUE"),
        (
            "sources.5.repeat=2",
            "there is no '5' among the 2 entries of sources\nhint: give a number, 0 … 1, or a name",
        ),
        ("sources.book.repeat=2", "there is no 'book' among the 2"),
        ("sources.0=2", "'sources.0' is not a key\nhint: name a key"),
        ("seed.x=2", "'seed.x' is not a key"),
        ("seed.x.y=2", "'x' is inside a value that is not a table"),
        ("specials.pad=18446744073709551616", "an integer has more than 64 bits"),
        ("specials.pad=" + "9" * 5000, "an integer has more than 64 bits"),
        ("specials.sentinels=" + "[" * 5000, "its value is nested too deeply"),
    ],
)
def test_set_value_refuses_what_names_no_key_or_is_beyond_all_bounds(
    usual_recursion_limit, assignment, said
):
    table = {"seed": 1, "sources": [{"paths": ["x"]}, {"name": "web", "paths": ["y"]}]}
    with pytest.raises(RecipeError) as caught:
        set_value(table, assignment)
    assert said in str(caught.value) and assignment[:500] in str(caught.value)


# Normalised and fingerprint


FULL = {
    "seq_length": 1024,
    "seed": 5,
    "tokenizer": "some/where/tokenizer.json",
    "engine": "reference",
    "sources": [
        {
            "name": "web",
            "paths": ["a/*.jsonl"],
            "repeat": 2.5,
            "sample": [0.1, 0.9],
            "tasks": ["r", "s"],
        },
        {"name": "books", "paths": ["b/*.parquet"], "format": "parquet", "text_key": "body"},
    ],
    "documents": {"prepend_bos": True, "max_tokens": 900},
    "packing": {"max_segments_per_row": 7, "pad_seq_to_mult": 16},
    "specials": {"eos": "</s>", "pad": 0, "sentinels": ["<a>", 5], "[NLU]": "<r>"},
    "tasks": [{"preset": "ul2r"}, {"name": "c", "objective": "causal", "weight": 2}],
    "output": {"shard_text_bytes": "1MiB"},
}


def full(**changes):
    return complete(read_recipe({**FULL, **changes}, Path("/base")))


def test_a_normalised_recipe_has_its_defaults_filled_in_and_nothing_of_paths_or_engine():
    table = normalised(full())
    text = json.dumps(table)
    assert (
        "a/*.jsonl" not in text
        and "/base" not in text
        and "some/where" not in text
        and "engine" not in table
    )
    assert table["tokenizer"] == "tokenizer.json" and table["output"]["shard_text_bytes"] == 1 << 20
    assert table["sources"][0]["repeat"] == 2.5 and table["sources"][1]["repeat"] == 1.0
    assert table["tasks"][0]["parameters"] == {
        "noise_density": 0.15,
        "mean_span_length": 3.0,
        "random_roll": False,
        "too_many_spans": "split",
    }
    assert set(table["sources"][0]) == {
        name for name, key in KEYS["sources"].items() if not key.later
    } - {"paths"}


def test_a_normalised_recipe_comes_back_from_json():
    for recipe in (full(), complete(read())):
        stored = decode(encode(normalised(recipe)), "plan.json")
        again = from_normalised(stored, "reference")
        assert encode(normalised(again)) == encode(normalised(recipe))
        assert (
            complete(again).tasks == complete(recipe).tasks
            and again.documents == recipe.documents
            and again.packing == recipe.packing
        )
        assert again.output == recipe.output and again.min_tail == recipe.min_tail
        assert [(s.name, s.sample, s.tasks, s.paths) for s in again.sources] == [
            (s.name, s.sample, s.tasks, ()) for s in recipe.sources
        ]


def test_a_normalised_recipe_is_written_as_a_recipe_that_is_read_to_the_same():
    taken = [
        (place, v[0] if isinstance(v, tuple) else v)
        for place, (values, _) in VALUES.items()
        for v in values
    ]
    several = [in_section(section, key, value) for (section, key), value in taken]
    shared = [
        {"paths": ["a"], "share": 0.25, "tasks": ["s", "r"]},
        {"name": 'b"\\ü', "paths": ["b\u2028"], "share": 1e-9},
    ]
    modes = {
        "specials": {"[NLU]": 7, "[S2S]": "<s>"},
        "tasks": [{"preset": "ul2r"}, {"preset": "bd3", "weight": 0.3}],
    }
    for table in [FULL, *several, {**LEAST, "sources": shared, **modes}]:
        recipe = complete(read_recipe(table, Path("/base"))).by_length()[-1]
        written = normalised_toml(
            stored := normalised(recipe), {source.name: source.paths for source in recipe.sources}
        )
        again = read_recipe(tomllib.loads(written), Path("/elsewhere"))
        assert encode(normalised(complete(again))) == encode(stored), written
        assert [s.paths for s in again.sources] == [s.paths for s in recipe.sources]


def print_of(recipe, files=((("a", 5),), (("b", 7),)), tokenizer="t" * 32, template=None):
    return fingerprint(recipe, files, tokenizer, template)


CHANGES = [
    {"seq_length": 2048},
    {"seed": 6},
    {"documents": {"prepend_bos": False, "max_tokens": 900}},
    {"documents": {"prepend_bos": True, "max_tokens": 901}},
    {"documents": {"prepend_bos": True, "max_tokens": 900, "special_text": "special"}},
    {"documents": {"prepend_bos": True, "max_tokens": 900, "bad_documents": "fail"}},
    {"packing": {"max_segments_per_row": 8, "pad_seq_to_mult": 16}},
    {"packing": {"max_segments_per_row": 7, "pad_seq_to_mult": 8}},
    {"packing": {"max_segments_per_row": 7, "pad_seq_to_mult": 16, "algorithm": "next_fit"}},
    {"specials": {**FULL["specials"], "eos": "<eos>"}},
    {"specials": {**FULL["specials"], "[NLU]": "<q>"}},
    {"specials": {**FULL["specials"], "sentinels": ["<a>", 6]}},
    {"tasks": [{"preset": "ul2r"}, {"name": "c", "objective": "causal", "weight": 3}]},
    {"tasks": [{"preset": "ul2r"}, {"name": "d", "objective": "causal", "weight": 2}]},
    {"output": {"shard_text_bytes": "2MiB"}},
    {"output": {"shard_text_bytes": "1MiB", "token_dtype": "int32"}},
    *(
        {"sources": [{**FULL["sources"][0], **change}, FULL["sources"][1]]}
        for change in (
            {"name": "w"},
            {"repeat": 2.6},
            {"sample": [0.1, 0.8]},
            {"tasks": ["s"]},
            {"text_key": "t"},
            {"format": "text"},
        )
    ),
    {"sources": FULL["sources"][::-1]},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_fingerprint_changes_with_every_key_that_matters(change):
    assert print_of(full(**change)) != print_of(full())


def test_the_fingerprint_does_not_change_with_engine_paths_or_the_way_a_value_is_written():
    sources = [{**FULL["sources"][0], "paths": ["/other/*.jsonl"]}, FULL["sources"][1]]
    for change in (
        {"engine": "auto"},
        {"sources": sources},
        {"tokenizer": "moved/other.json"},
        {
            "documents": {
                "prepend_bos": True,
                "max_tokens": 900,
                "chat_template": "moved/chat.jinja",
            }
        },
        {"output": {"shard_text_bytes": 1 << 20}},
        {"documents": {"prepend_bos": True, "max_tokens": 900, "append_eos": True}},
        {"packing": {"max_segments_per_row": 7, "pad_seq_to_mult": 16, "algorithm": "best_fit"}},
    ):
        assert print_of(full(**change)) == print_of(full())


def test_the_fingerprint_changes_with_files_sizes_and_tokenizer():
    recipe = full()
    prints = {
        print_of(recipe),
        print_of(recipe, files=((("a", 6),), (("b", 7),))),
        print_of(recipe, files=((("c", 5),), (("b", 7),))),
        print_of(recipe, files=((), (("a", 5), ("b", 7)))),
        print_of(recipe, tokenizer="u" * 32),
        print_of(recipe, template="{{ messages }}"),
        print_of(recipe, template=""),
    }
    assert len(prints) == 7 and all(len(p) == 32 for p in prints)


@pytest.mark.parametrize(
    "text, words",
    [
        (b"seq_length = " + b"[" * 100_000, "nested too deeply"),
        (b"a" + b".b" * 5_000 + b" = 1", "nested too deeply|not TOML"),
        (b"seq_length = 0x" + b"f" * 5000, "64 bits"),
        (b"seq_length = 9223372036854775808", "64 bits"),
        (b"seq_length = 9223372036854775808\ntokenizer = 'bytes'\nsources = []", "64 bits"),
        (b"seq_length = " + b"9" * 5000, "not TOML"),
        (b"\xff", "not UTF-8"),
        (b"a = 1\na = 2", "not TOML"),
        (b"a\0 = 1", "not TOML"),
    ],
    ids=range(9),
)
def test_a_hostile_recipe_file_is_refused_by_name(usual_recursion_limit, tmp_path, text, words):
    path = tmp_path / "recipe.toml"
    path.write_bytes(text)
    with pytest.raises(RecipeError, match=rf"recipe\.toml.*({words})"):
        load_recipe(path)


@pytest.mark.parametrize("section, key, value", [
    ("output", "shard_text_bytes", "9" * 400 + "GB"),
    ("output", "shard_text_bytes", 10**400),
    ("output", "shard_text_bytes", 2**62),
    ("documents", "max_bad_fraction", 10**400),
    ("documents", "max_bad_fraction", float("nan")),
    ("documents", "max_bad_fraction", float("inf")),
])  # fmt: skip
def test_a_number_beyond_all_bounds_is_refused_by_name(section, key, value):
    with pytest.raises(RecipeError, match=rf"{section}\.{key}"):
        read_recipe(
            {"tokenizer": "bytes", "sources": [{"paths": ["a"]}], section: {key: value}}, Path()
        )


@pytest.mark.parametrize("name, change", [
    ("seq_length", lambda t: t.update(seq_length=12)),
    ("seq_length", lambda t: t.pop("seq_length")),
    ("sources", lambda t: t.update(sources=[])),
    ("sources", lambda t: t.update(sources=3)),
    ("tasks", lambda t: t.update(tasks=[3])),
    ("parameters", lambda t: t["tasks"][0].update(parameters=[])),
    ("weight", lambda t: t["tasks"][0].update(weight=-1.0)),
    ("documents", lambda t: t.update(documents=None)),
    ("long", lambda t: t["documents"].update(long="x")),
    ("colour", lambda t: t["packing"].update(colour=1)),
    ("pad_seq_to_mult", lambda t: t["packing"].update(pad_seq_to_mult=7)),
    ("mode_tokens", lambda t: t["specials"].update(mode_tokens=3)),
    ("NLU", lambda t: t["specials"].update(mode_tokens={"[NLU]": -1})),
    ("paths", lambda t: t["sources"][0].update(paths=["a"])),
])  # fmt: skip
def test_a_stored_recipe_is_checked_like_one_that_is_written(name, change):
    table = {"tokenizer": "bytes", "sources": [{"paths": ["a"]}], "tasks": [{"preset": "ul2r"}]}
    stored = json.loads(json.dumps(normalised(read_recipe(table, Path()))))
    assert from_normalised(stored, "auto") == from_normalised(stored, "auto")
    change(stored)
    with pytest.raises(RecipeError, match=name):
        from_normalised(stored, "auto")


@pytest.mark.parametrize("what", ["sources", "tasks"])
def test_more_sources_or_tasks_than_a_segment_s_header_can_number_are_refused(what):
    entries = {
        "sources": [{"paths": ["x"], "name": f"s{i}"} for i in range(2)],
        "tasks": [{"objective": "causal", "name": f"t{i}"} for i in range(2)],
    }
    recipe = read_recipe({"tokenizer": "bytes", **entries}, Path())
    entries = getattr(recipe, what)
    check_together(replace(recipe, **{what: entries[:1] * 65_535}))
    with pytest.raises(RecipeError, match=f"65536 {what}: a dataset has at most 65535"):
        check_together(replace(recipe, **{what: entries[:1] * 65_536}))


@pytest.mark.parametrize("what", ["sources", "tasks"])
def test_too_many_sources_or_tasks_are_refused_before_one_is_read(what):
    with pytest.raises(RecipeError, match=f"70000 {what}: a dataset has at most 65535"):
        read_recipe({**LEAST, what: [None] * 70_000}, Path())


def test_very_many_sources_are_read_at_once():
    sources = [{"paths": ["x"]}] * 65_535
    begun = time.process_time()
    assert len(read_recipe({**LEAST, "sources": sources}, Path()).sources) == 65_535
    assert time.process_time() - begun < 20  # not the square of their number


def test_a_recipe_that_is_no_file_or_beyond_measure_is_refused_unread(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "zero.toml"):
        with pytest.raises(
            RecipeError, match=f"{name} is not a regular file but a pipe, a device or a socket"
        ):
            load_recipe(tmp_path / name)
    (tmp_path / "large.toml").touch()
    os.truncate(tmp_path / "large.toml", 3 << 30)
    with pytest.raises(
        RecipeError, match="has 3221225472 bytes, but a recipe has at most 67108864"
    ):
        load_recipe(tmp_path / "large.toml")
