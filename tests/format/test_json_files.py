import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.errors import DatasetError
from packprep.format import json_files

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_decode_gives_what_encode_took(value):
    data = json_files.encode(value)
    assert json_files.decode(data, "f") == value
    assert (
        data
        == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        + b"\n"
    )


def test_integers_stay_integers_and_keys_are_sorted():
    assert json_files.encode({"b": 1, "a": 1.0, "é": "ü"}) == '{"a":1.0,"b":1,"é":"ü"}\n'.encode()
    assert type(json_files.decode(b"1\n", "f")) is int


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), "\ud800", {"\ud800": 1}]
)
def test_encode_refuses_what_json_cannot_say(value):
    with pytest.raises(DatasetError):
        json_files.encode([value])


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
        json_files.decode(data, "dir/plan.json", canonical)


@pytest.mark.parametrize(
    "data",
    [b"{}", b"{} ", b"{} \n", b'{"b":1,"a":2}\n', b'"\\u00e9"\n', b"1.50\n", b"{}\n\n", b"{}\r\n"],
)
def test_decode_refuses_what_is_not_canonical_unless_allowed(data):
    with pytest.raises(DatasetError, match="canonical form from byte"):
        json_files.decode(data, "f")
    json_files.decode(data, "f", canonical=False)


def test_names_carry_the_shard_number_and_its_thousands():
    assert json_files.shard_name(0) == "shards/000/000000.safetensors"
    assert json_files.shard_name(12_345) == "shards/012/012345.safetensors"
    assert json_files.receipt_name(1000) == "receipts/001/001000.json"
    assert json_files.rejects_name(999) == "rejects/000/000999.jsonl"
