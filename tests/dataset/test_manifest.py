import itertools
import json
from pathlib import Path

import pytest

import packprep
from packprep.dataset import manifest
from packprep.errors import DatasetError
from packprep.format import json_files
from tests.dataset.synthetic import make_dataset, replace_in_manifest

LAW3 = Path(__file__).parents[1] / "golden" / "law3"


def test_a_manifest_is_read_as_a_plain_dict(tmp_path):
    make_dataset(tmp_path)
    value = manifest.read_manifest(tmp_path)
    assert (
        type(value) is dict
        and value["seq_length"] == 64
        and value["tasks"][-1]["name"] == "too_short"
    )


def test_no_manifest_says_that_the_build_is_not_finished(tmp_path):
    with pytest.raises(DatasetError, match="packprep status"):
        manifest.read_manifest(tmp_path)


ENTRY = {
    "rows": 1,
    "segments": 1,
    "tokens": 1,
    "bytes": 1,
    "digest": "0" * 32,
    "receipt_digest": "0" * 32,
}


@pytest.mark.parametrize(
    "key, value",
    [
        ("format", "other"),
        ("version", 2),
        ("version", True),
        ("version", 1.0),
        ("law_version", 0),
        ("seq_length", 60),
        ("seq_length", 0),
        ("seq_length", "64"),
        ("seq_length", 64.0),
        ("seq_length", 1 << 40),
        ("token_dtype", "uint32"),
        ("vocab_size", 0),
        ("vocab_size", 1 << 20),
        ("pad_id", -1),
        ("pad_id", 528),
        ("specials", {"pad": -1}),
        ("added_tokens", [{"id": 1}]),
        ("tokenizer", {"file": "../tokenizer.json", "digest": "0" * 32}),
        ("plan", {"file": "plan.json", "digest": "no"}),
        ("tasks", []),
        ("tasks", [{"name": "a"}]),
        ("sources", [{}]),
        ("sources", ["web"]),
        ("fingerprint", None),
        ("shards", {}),
        ("shards", [{**ENTRY, "file": "../../etc/passwd"}]),
        ("shards", [{**ENTRY, "file": "shards/000/000001.safetensors"}]),
        ("shards", [{**ENTRY, "file": "shards/000/000000.safetensors", "rows": -1}]),
        ("shards", [{**ENTRY, "file": "shards/000/000000.safetensors", "rows": True}]),
        ("shards", [{**ENTRY, "file": "shards/000/000000.safetensors", "rows": 1 << 62}]),
        ("shards", [{**ENTRY, "file": "shards/000/000000.safetensors", "colour": 1}]),
        ("colour", "red"),
    ],
)
def test_a_manifest_with_a_wrong_key_is_refused_by_name(tmp_path, key, value):
    make_dataset(tmp_path)
    replace_in_manifest(tmp_path, **{key: value})
    with pytest.raises(DatasetError, match=rf"dataset\.json.*{key}"):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        lambda value: value.update(colour="red"),
        lambda value: value["tasks"][0].update(colour="red"),
        lambda value: value["sources"][0].update(colour="red"),
        lambda value: value["added_tokens"][0].update(colour="red"),
    ],
)
def test_a_key_of_a_newer_version_is_refused_with_it(tmp_path, changes):
    make_dataset(tmp_path)
    value = manifest.read_manifest(tmp_path)
    changes(value)
    value["made_with"] = {"packprep": "7.0"}
    replace_in_manifest(tmp_path, **value)
    with pytest.raises(
        DatasetError,
        match=r"key 'colour' is unknown to packprep \S+; packprep 7.0 wrote it\nhint: use that",
    ):
        manifest.read_manifest(tmp_path)


def test_a_key_that_joined_later_is_its_default_where_it_is_absent(tmp_path, monkeypatch):
    make_dataset(tmp_path)
    for keys in (manifest._KEYS, manifest._TASK_KEYS):
        monkeypatch.setitem(keys, "colour", ("a text", lambda value: isinstance(value, str)))
    monkeypatch.setattr(manifest, "LATER", {"": {"colour": "red"}, "tasks": {"colour": "blue"}})
    value = manifest.read_manifest(tmp_path)
    assert value["colour"] == "red" and {task["colour"] for task in value["tasks"]} == {"blue"}
    replace_in_manifest(tmp_path, colour="green")
    assert manifest.read_manifest(tmp_path)["colour"] == "green"
    replace_in_manifest(tmp_path, colour=3)
    with pytest.raises(DatasetError, match="colour is 3 and should be a text"):
        manifest.read_manifest(tmp_path)


def test_a_newer_law_is_refused_with_both(tmp_path):
    make_dataset(tmp_path)
    replace_in_manifest(tmp_path, law_version=9, colour=1, made_with={"packprep": "7.0"})
    with pytest.raises(
        DatasetError,
        match="law_version 9 and this packprep makes 3\nhint: use packprep 7.0, which made it",
    ):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize(
    "old, new",
    [
        (b'"rows":5,', b'"rows":05,'),
        (b'"rows":5,', b'"rows":5.0,'),
        (b'"rows":5,', b'"rows":-5,'),
        (b'"rows":5,', b'"rows":true,'),
        (b'"rows":5,', b'"rows":5,"rows":5,'),
        (b'"rows":5,', b'"rows": 5,'),
        (b'"rows":5,', b'"rows":9223372036854775808,'),
        (b'"bytes"', b'"Bytes"'),
        (b"000000.safetensors", b"000001.safetensors"),
        (b"000000.safetensors", b"000000.safetensorS"),
        (b'"},{"', b'"} ,{"'),
        (b'],"sources"', b',],"sources"'),
        (b'],"sources"', b'],"shards":[],"sources"'),
        (b'"shards":[', b'"shards":[],"shards":['),
        (b'"ledger":{', b'"ledger":{"x":{},"shards":['),
    ],
)
def test_the_list_of_shards_is_refused_unless_it_is_canonical_and_right(tmp_path, old, new):
    make_dataset(tmp_path)
    path = tmp_path / "dataset.json"
    data = path.read_bytes()
    changed = data.replace(old, new, 1)
    if changed == data:  # what stands between two entries
        changed = data.replace(b"},{", b"} ,{", 1)
    assert changed != data
    path.write_bytes(changed)
    with pytest.raises(DatasetError, match="dataset.json"):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize("rows", [(), (3,), (2, 0, 5, 1)])
def test_a_manifest_is_what_json_gives(tmp_path, rows):
    make_dataset(tmp_path, rows_per_shard=rows)
    data = (tmp_path / "dataset.json").read_bytes()
    value = manifest.read_manifest(tmp_path)
    assert (
        value == json.loads(data)
        and list(value) == list(json.loads(data))
        and json_files.encode(value) == data
    )
    assert manifest.first_rows(value) == [0, *itertools.accumulate(rows)]


def test_a_key_called_shards_elsewhere_changes_nothing(tmp_path):
    make_dataset(tmp_path)
    entries = manifest.read_manifest(tmp_path)["shards"]
    for changes in (
        {"ledger": {"a": 1, "shards": entries}},
        {"specials": {"shards": 3}},
        {"engine": ',"shards":[{'},
    ):
        replace_in_manifest(tmp_path, **changes)
        value = manifest.read_manifest(tmp_path)
        assert value["shards"] == entries and value.items() >= changes.items()


def test_a_missing_key_is_named(tmp_path):
    make_dataset(tmp_path)
    path = tmp_path / "dataset.json"
    value = json_files.decode(path.read_bytes(), "f")
    for key in value:
        path.write_bytes(json_files.encode({k: v for k, v in value.items() if k != key}))
        with pytest.raises(DatasetError, match=f"'{key}' is missing"):
            manifest.read_manifest(tmp_path)


def test_a_dataset_shows_its_manifest_as_a_plain_dict(tmp_path):
    make_dataset(tmp_path, rows_per_shard=(2, 3))
    shown = packprep.open_dataset(tmp_path).manifest
    assert (
        json_files.encode(shown) == (tmp_path / "dataset.json").read_bytes()
        and type(shown["shards"]) is list
    )


TREE = """\
{}: 53 rows of 128 slots in 2 shards, 95.17% filled; uint16 ids below 528
├── sources
│   ├── books   46.56%  2,657 tokens, 38 documents
│   └── web     53.44%  3,050 tokens, 39 documents
└── tasks
    ├── r           36.97%  2,110 tokens, 31 segments, span_corruption
    ├── x           29.67%  1,693 tokens, 28 segments, span_corruption
    ├── prefix_lm   33.33%  1,902 tokens, 32 segments, prefix_lm
    └── too_short    0.04%  2 tokens, 1 segment, causal"""


def test_a_dataset_as_text_is_a_tree_of_its_sources_and_tasks():
    ds = packprep.open_dataset(LAW3 / "ul2r" / "dataset")
    assert str(ds) == TREE.format(ds.directory)
    assert repr(ds).count("\n") == 0 and "53 rows of 128 slots" in repr(ds)
    mixture = packprep.open_dataset([ds.directory, ds.directory], shares=[0.75, 0.25])
    tree = str(ds)
    assert (
        str(mixture)
        == f"mixture of 2 datasets\n75.00% of samples: {tree}\n25.00% of samples: {tree}"
    )


def test_a_tree_shows_every_character_and_is_escaped_in_a_notebook():
    ds = packprep.open_dataset(LAW3 / "ul2r" / "dataset")
    sources = ds.manifest["ledger"]["sources"]
    sources["<b>\x1b[31m"] = sources.pop("web")
    assert "└── '<b>\\x1b[31m'   53.44%" in str(ds)
    assert "&lt;b&gt;" in ds._repr_html_() and "<b>" not in ds._repr_html_()


@pytest.mark.parametrize(
    "ledger",
    [{}, {"sources": 3, "tasks": [1]}, {"sources": {"a": None}, "tasks": {"r": {"tokens": "x"}}}],
)
def test_a_ledger_that_says_nothing_does_not_keep_a_tree_from_being_shown(ledger):
    ds = packprep.open_dataset(LAW3 / "ul2r" / "dataset")
    ds.manifest["ledger"] = ledger
    assert "53 rows of 128 slots in 2 shards; uint16" in str(
        ds
    ) and "0.00%  0 tokens, 0 segments, span_corruption" in str(ds)


def test_numbers_of_a_manifest_fit_into_its_arrays():
    for is_one, end in ((manifest.is_count, 1 << 62), (manifest.is_id, 1 << 31)):
        assert all(map(is_one, (0, 1, end - 1)))
        assert not any(map(is_one, (-1, end, 1.0, True, "1", None)))
    assert manifest.is_digest("0123456789abcdef" * 2)
    for value in ("0" * 31, "0" * 33, "A" * 32, "g" * 32, "0" * 32 + "\n", 0, None, b"0" * 32):
        assert not manifest.is_digest(value)


DIGEST, BIG = "0" * 32, 1 << 63
REPLACED = {"fingerprint": DIGEST, "digest": DIGEST, "plan": DIGEST}
# Key → values that a manifest may have, and values that it may not have.
VALUES = {
    "law_version": ([1, (1 << 62) - 1], [0, True, 1 << 62]),
    "seq_length": ([8, (1 << 31) - 8], [0, -8, 4, 9, 1 << 31]),
    "vocab_size": ([1, (1 << 31) - 1], [0, 1 << 31]),
    "specials": ([{}, {"pad": 0, "image": [1, 2]}], [[], 3, {"image": [1, -1]}, {"pad": "0"}]),
    "tasks": ([[{}]], [[], {"r": 1}]),
    "sources": ([[{}]], [[], {"web": 1}]),
    "recipe": ([{}, {"documents": {}, "output": {}}], [[], {"documents": []}, {"output": 3}]),
    "kind": (["store"], ["stores", None]),
    "max_bad_fraction": ([0, 0.5, 1], [-0.01, 1.01, True, "1"]),
    "engine": (["bytes", {}], [3, None]),
    "removed": (
        [
            {"digest": DIGEST, "replaces": []},
            {"digest": DIGEST, "replaces": [REPLACED, {**REPLACED, "removed": DIGEST}]},
        ],
        [
            {"digest": DIGEST},
            {"digest": "0", "replaces": []},
            {"digest": DIGEST, "replaces": {}},
            {"digest": DIGEST, "replaces": [[]]},
            {"digest": DIGEST, "replaces": [REPLACED, {"digest": DIGEST}]},
            {"digest": DIGEST, "replaces": [{**REPLACED, "colour": DIGEST}]},
            {"digest": DIGEST, "replaces": [REPLACED, {**REPLACED, "plan": "0"}]},
        ],
    ),
}


def test_each_key_of_a_manifest_has_the_values_that_its_description_names():
    tables = {**manifest._KEYS, **manifest._TASK_KEYS}
    of_tasks = {
        "weight": ([0, 0.5, BIG - 1, 1 - BIG], [BIG, -BIG, 1e19, True, "1"]),
        "mode_token": ([None, 0], [-1, "0", 1 << 31]),
        "parameters": ([{}, {"a": BIG - 1, "b": "x"}], [[], {"a": 1, "b": BIG}]),
    }
    for key, (valid, invalid) in {**VALUES, **of_tasks}.items():
        _, is_valid = tables[key]
        assert all(map(is_valid, valid)), key
        assert [value for value in invalid if is_valid(value)] == [], key
