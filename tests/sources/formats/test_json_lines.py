"""packprep.sources.formats.jsonl: each line has a text, or one reason."""

import json
import sys
import threading

import pytest
from hypothesis import strategies as st

from packprep.conversations.supervision import conversation
from packprep.sources.formats import BAD_REASONS
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import (
    MAX_NESTING,
    decode_slowly,
    line_decoder,
    nested_too_deep,
    parse_object,
    read_integer,
    without_keys,
)
from tests.properties import few_and_many
from tests.twin.records import MAX_DEPTH

decode = line_decoder("text")
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.just("text"), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "line, text",
    [
        (b'{"text": "a"}', "a"),
        (b' {"id": 1, "text" : "a", "more": [{}]} \r', "a"),
        (b'{"text": ""}', ""),
        ('{"text": "é\U0001f600\\u0000"}'.encode(), "é\U0001f600\0"),
        (b'{"text": "\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"\\u0074ext": "a"}', "a"),
        (b'{"text": "a", "text": "b"}', "b"),
        (b'{"text": 3, "text": "b"}', "b"),
        (b'{"title": "\\ud800", "text": "b"}', "b"),
        (b'{"n": ' + b"9" * 5000 + b', "title": "\\ud800", "text": "b"}', "b"),
        (b'{"x": 1e999, "text": "b"}', "b"),
    ],
)
def test_a_good_line_gives_its_text(line, text):
    assert decode(line) == text


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "a"', "malformed_json"),
        (b'{"text": "a"} x', "malformed_json"),
        (b'{"other": 1} x', "malformed_json"),
        (b'{"text": "a",}', "malformed_json"),
        (b'{"text": NaN}', "not_a_string"),
        (b'{"text": "a", "x": nan}', "malformed_json"),
        (b'{"text": "a\tb"}', "malformed_json"),
        (b'{"text": "a\0b"}', "malformed_json"),
        (b'{"text": "\\x"}', "malformed_json"),
        (b'{"text": "\\ud8', "malformed_json"),
        (b"text", "malformed_json"),
        (b"\xef\xbb\xbf{}", "malformed_json"),
        (b"[]", "malformed_json"),
        (b'"text"', "malformed_json"),
        (b"3", "malformed_json"),
        (b"null", "malformed_json"),
        (b"{}", "missing_text"),
        (b'{"Text": "a", "content": "b"}', "missing_text"),
        (b'{"nested": {"text": "a"}}', "missing_text"),
        (b'{"text": null}', "not_a_string"),
        (b'{"text": 3}', "not_a_string"),
        (b'{"text": 1.5}', "not_a_string"),
        (b'{"text": true}', "not_a_string"),
        (b'{"text": ["a"]}', "not_a_string"),
        (b'{"text": {"a": 1}}', "not_a_string"),
        (b'{"text": "b", "text": 3}', "not_a_string"),
        (b'{"text": "a\xff"}', "invalid_utf8"),
        (b'{"text": "\xff' + b"a" * 100 + b'"}', "invalid_utf8"),
        (b'{"text": "a\\n\xc3"}', "invalid_utf8"),
        (b'{"text": "\xed\xa0\x80"}', "invalid_utf8"),
        (b'{"text": "\xc0\x80"}', "invalid_utf8"),
        (b'{"text": "\xf4\x90\x80\x80"}', "invalid_utf8"),
        (b'{"title": "\xff", "text": "a"}', "invalid_utf8"),
        (b'{"\xff": 1, "text": "a"}', "invalid_utf8"),
        (b'{"text": "\\ud800"}', "lone_surrogate"),
        (b'{"text": "\\udc00\\ud800"}', "lone_surrogate"),
        (b'{"text": "\\ud800\\u0041"}', "lone_surrogate"),
        (b'{"text": "\\ud800\\ud800\\udc00"}', "lone_surrogate"),
    ],
)
def test_a_bad_line_gives_a_reason_and_never_raises(line, reason):
    found, detail = decode(line)
    assert found == reason in BAD_REASONS
    assert detail.isascii()


def test_numbers_that_only_python_writes_beside_a_text_are_read_as_python_reads_them():
    for number in (b"NaN", b"Infinity", b"-Infinity", b'{"a": [NaN]}'):
        for fields in (None, Fields(), Fields(kinds=("image",))):
            assert line_decoder("text", fields)(b'{"text": "a", "score": ' + number + b"}") == "a"


@pytest.mark.parametrize(
    ("beside", "reason"),
    [('"weight": NaN', "bad_weight"), ('"weight": Infinity', "bad_weight"), ('"loss_spans": [[0, NaN]]', "bad_loss_spans"),
     ('"loss_spans": [[0, 1, NaN]]', "bad_loss_spans"), ('"media": [{"at": NaN}]', "bad_media")],
)  # fmt: skip
def test_numbers_that_only_python_writes_in_a_field_of_ours_are_rejected_by_its_name(
    beside, reason
):
    outcome = line_decoder("text", Fields(kinds=("image",)))(f'{{"text": "a", {beside}}}'.encode())
    assert conversation(outcome, None)[0] == reason


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("closed", [True, False])
def test_a_line_nested_100_000_deep_is_malformed(opening, closing, closed):
    nest = opening * 100_000 + b"1" + closing * 100_000 * closed
    for line in (b'{"x": ' + nest + b', "text": "a"}', b'{"text": "a", "x": ' + nest + b"}", nest):
        assert decode(line)[0] == "malformed_json"


def test_the_limit_of_nesting_is_exact_and_ours():
    """256 levels are read, 257 are not; the line's object is one of them."""
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        for depth in (254, 255, 256):
            inner = opening * depth + b"1" + closing * depth
            found = [
                decode(line)
                for line in (b'{"x":' + inner + b',"text":"a"}', b'{"text":"a","x":' + inner + b"}")
            ]
            assert (
                found == ["a"] * 2
                if depth < 256
                else [reason for reason, _ in found] == ["malformed_json"] * 2
            )
            assert nested_too_deep(b'{"x":' + inner) == (depth > 255)
    assert MAX_NESTING == MAX_DEPTH == 256


def test_the_limit_of_nesting_holds_at_any_depth_of_the_caller():
    good = b'{"x": ' + b"[" * (MAX_NESTING - 1) + b"]" * (MAX_NESTING - 1) + b', "text": "a"}'

    def deeper(levels):
        return deeper(levels - 1) if levels else decode(good)

    results = []
    thread = threading.Thread(target=lambda: results.append(deeper(sys.getrecursionlimit() // 2)))
    thread.start()
    thread.join()
    assert results == ["a"]


def test_brackets_in_strings_are_not_nesting():
    text = '[{"\\' * 1000
    assert decode(json.dumps({"text": text}).encode()) == text
    assert not nested_too_deep(json.dumps({"text": text}).encode())
    assert not nested_too_deep(b"[]" * 1000)
    many = b"[]" * 32_700  # The brackets that follow are in two blocks.
    assert nested_too_deep(many + b"[" * 257) and not nested_too_deep(many + b"[" * 256)
    assert not nested_too_deep(many + b"[" * 200 + b"]" * 100 + b"{" * 156)


def test_a_reject_names_some_keys_of_its_record_and_the_start_of_each():
    record = {f"{i}{'k' * 40}": 0 for i in range(9)}
    keys = ", ".join(f"'{i}{'k' * 39}'" for i in range(8))
    wanted = f"no key '{'a' * 40}' or 'b'; the line's keys are: {keys}"
    assert without_keys(record, "a" * 41, "b") == wanted
    assert without_keys({}, "a") == "no key 'a'; the line's keys are: none"


def test_an_unterminated_string_full_of_quotes_is_decided_fast():
    assert decode(b"[" * 300 + b'"' + b'\\"' * 2_000_000)[0] == "malformed_json"


def test_a_detail_shows_no_more_than_an_excerpt():
    secret = "s" * 10_000
    for line in (
        secret,
        json.dumps({secret: 1}),
        json.dumps({"text": [secret]}),
        '{"text": "\\ud800' + secret + '"}',
    ):
        assert len(decode(line.encode())[1]) < 200


@pytest.mark.parametrize(
    "key", ["", 'a"b', "back\\slash", "\n", "é", "\U0001f600", "text.x", "class", "__init__"]
)
def test_any_string_can_be_the_text_key(key):
    decode_key = line_decoder(key)
    assert decode_key(json.dumps({"x": 1, key: "a"}).encode()) == "a"
    assert decode_key(json.dumps({"x": 1, key: 2}).encode())[0] == "not_a_string"
    assert decode_key(b'{"x": 1}')[0] == "missing_text"


CHANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=2)


@few_and_many(100, 300, values, st.booleans(), CHANGES)
def test_the_fast_path_and_the_exact_path_agree_on_any_bytes(value, ensure_ascii, changes):
    line = bytearray(json.dumps(value, ensure_ascii=ensure_ascii).encode("utf-8", "surrogatepass"))
    for at, byte in changes:
        line[at % len(line)] = byte
    assert decode(bytes(line)) == decode_slowly(bytes(line), "text")


@few_and_many(100, 300, values, st.booleans(), CHANGES)
def test_objects_have_the_values_of_pythons_decoder(value, ensure_ascii, changes):
    line = bytearray(json.dumps({"a": value}, ensure_ascii=ensure_ascii).encode())
    for at, byte in changes:
        line[at % len(line)] = byte
    record = parse_object(bytes(line), has_numbers=True)
    try:
        expected = json.loads(bytes(line).decode(), parse_int=read_integer)
    except ValueError:
        expected = None
    if isinstance(expected, dict):
        assert repr(record) == repr(expected)
    else:
        assert record[0] in BAD_REASONS


def test_integers_of_more_digits_than_the_limit_are_replaced():
    for offset in (0, 1, 3985, 3986, 3999, 4000):
        for digits, value in (
            ("9" * 4000, int("9" * 4000)),
            ("9" * 4001, 1 << 64),
            ("-" + "9" * 4000, -(1 << 64)),
        ):
            line = f'{{"x": "{"y" * offset}", "n": {digits}}}'.encode()
            assert parse_object(line, has_numbers=True)["n"] == value
