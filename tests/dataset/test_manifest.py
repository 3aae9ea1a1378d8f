import itertools
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import packprep
from packprep.dataset import manifest
from packprep.errors import DatasetError
from tests.dataset.synthetic import make_dataset, replace_in_manifest

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_decode_gives_what_encode_took(value):
    data = manifest.encode(value)
    assert manifest.decode(data, "f") == value
    assert data == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def test_integers_stay_integers_and_keys_are_sorted():
    assert manifest.encode({"b": 1, "a": 1.0, "é": "ü"}) == '{"a":1.0,"b":1,"é":"ü"}\n'.encode()
    assert type(manifest.decode(b"1\n", "f")) is int


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "\ud800", {"\ud800": 1}])
def test_encode_refuses_what_json_cannot_say(value):
    with pytest.raises(DatasetError):
        manifest.encode([value])


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":1}\n',
        b'{"a":{"b":1,"b":2}}\n',
        b"NaN\n",
        b"[Infinity]\n",
        b"1e999\n",
        b'"\xff"\n',
        b'"\\ud800"\n',
        b"",
        b"{",
        b"[" * 100_000,
        b"9" * 5000,
        b"\xef\xbb\xbf{}\n",
    ],
)
@pytest.mark.parametrize("canonical", [True, False])
def test_decode_refuses_what_is_no_json_of_a_dataset_and_names_the_file(data, canonical):
    with pytest.raises(DatasetError, match=r"^dir/plan\.json: "):
        manifest.decode(data, "dir/plan.json", canonical)


@pytest.mark.parametrize(
    "data", [b"{}", b"{} ", b"{} \n", b'{"b":1,"a":2}\n', b'"\\u00e9"\n', b"1.50\n", b"{}\n\n", b"{}\r\n"]
)
def test_decode_refuses_what_is_not_canonical_unless_allowed(data):
    with pytest.raises(DatasetError, match="canonical form from byte"):
        manifest.decode(data, "f")
    manifest.decode(data, "f", canonical=False)


def test_names_carry_the_shard_number_and_its_thousands():
    assert manifest.shard_name(0) == "shards/000/000000.safetensors"
    assert manifest.shard_name(12_345) == "shards/012/012345.safetensors"
    assert manifest.receipt_name(1000) == "receipts/001/001000.json"
    assert manifest.rejects_name(999) == "rejects/000/000999.jsonl"


def test_a_manifest_is_read_as_a_plain_dict(tmp_path):
    make_dataset(tmp_path)
    value = manifest.read_manifest(tmp_path)
    assert type(value) is dict and value["seq_length"] == 64 and value["tasks"][-1]["name"] == "too_short"


def test_no_manifest_says_that_the_build_is_not_finished(tmp_path):
    with pytest.raises(DatasetError, match="packprep status"):
        manifest.read_manifest(tmp_path)


ENTRY = {"rows": 1, "segments": 1, "tokens": 1, "bytes": 1, "digest": "0" * 32, "receipt_digest": "0" * 32}


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
    assert manifest._listed_shards(data) is not None and changed != data
    path.write_bytes(changed)
    with pytest.raises(DatasetError, match="dataset.json"):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize("rows", [(), (3,), (2, 0, 5, 1)])
def test_a_manifest_read_by_one_expression_is_that_of_json(tmp_path, rows):
    make_dataset(tmp_path, rows_per_shard=rows)
    data = (tmp_path / "dataset.json").read_bytes()
    value = manifest.read_manifest(tmp_path)
    assert value == json.loads(data) and list(value) == list(json.loads(data)) and manifest.encode(value) == data
    assert (manifest._listed_shards(data) is None) == (rows == ())


def test_a_key_called_shards_elsewhere_changes_nothing(tmp_path):
    make_dataset(tmp_path)
    entries = manifest.read_manifest(tmp_path)["shards"]
    for changes in ({"ledger": {"a": 1, "shards": entries}}, {"specials": {"shards": 3}}, {"engine": ',"shards":[{'}):
        replace_in_manifest(tmp_path, **changes)
        value = manifest.read_manifest(tmp_path)
        assert value["shards"] == entries and value.items() >= changes.items()


def test_a_missing_key_is_named(tmp_path):
    make_dataset(tmp_path)
    path = tmp_path / "dataset.json"
    value = manifest.decode(path.read_bytes(), "f")
    for key in value:
        path.write_bytes(manifest.encode({k: v for k, v in value.items() if k != key}))
        with pytest.raises(DatasetError, match=f"'{key}' is missing"):
            manifest.read_manifest(tmp_path)


@pytest.mark.parametrize("rows", [(3,), (2, 0, 5, 1, 7)])
def test_shards_that_are_not_parsed_are_a_sequence_of_the_same_entries(tmp_path, rows):
    make_dataset(tmp_path, rows_per_shard=rows)
    expected = json.loads((tmp_path / "dataset.json").read_bytes())["shards"]
    shards = manifest.open_manifest(tmp_path)["shards"]
    assert type(shards) is manifest.Shards and len(shards) == len(rows) and list(shards) == expected
    for number in range(-len(rows), len(rows)):
        assert shards[number] == expected[number]
    assert shards[1:] == expected[1:] and shards[::-1] == expected[::-1]
    for number in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            shards[number]
    assert list(pickle.loads(pickle.dumps(shards))) == expected
    assert manifest.first_rows(manifest.open_manifest(tmp_path)) == manifest.first_rows(
        manifest.read_manifest(tmp_path)
    )
    assert manifest.first_rows(manifest.read_manifest(tmp_path)) == [0, *itertools.accumulate(rows)]


def test_a_dataset_shows_its_manifest_as_a_plain_dict(tmp_path):
    make_dataset(tmp_path, rows_per_shard=(2, 3))
    shown = packprep.open_dataset(tmp_path).manifest
    assert manifest.encode(shown) == (tmp_path / "dataset.json").read_bytes() and type(shown["shards"]) is list
