"""packprep.sources.formats.jsonl: many lines at once give what each gives by itself, or nothing."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.sources.formats import batch as limits
from packprep.sources.formats.batch import BatchBuilder
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import MAX_NESTING, block_decoder, line_decoder
from tests.sources.formats.parts import part_of, read_all, write

DEEP = b"[" * MAX_NESTING + b"]" * MAX_NESTING

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
others = st.dictionaries(
    st.sampled_from(["id", "é", "loss_spans", "messages", 'a"b']),
    scalars
    | st.lists(scalars, max_size=2)
    | st.dictionaries(st.text(max_size=3), scalars, max_size=2),
    max_size=3,
)
good_lines = st.builds(
    lambda before, text, after, ascii: json.dumps(
        {**before, "text": text, **after}, ensure_ascii=ascii
    ).encode(),
    others,
    st.text(max_size=12),
    others,
    st.booleans(),
)
odd_lines = st.sampled_from(
    [
        b"{",
        b'"a"}',
        b'{"text":',
        b'{"text": "a"} {"text": "b"}',
        b'{"text": "a", "x": "}',
        b'{"}',
        b'{"text": "a", "x": {}',
        b"{}}",
        b'{"text": "a\xff"}',
        b'{"text": "a", "x": "\xff"}',
        b'{"text": "a", "x": "\xff", "x": 1}',
        b'{"x": "\xc3", "text": "a"}',
        b'{"text": "\xa9"}',
        b'{"\xff": 1, "text": "a"}',
        b'{"text": 3, "text": "a"}',
        b'{"text": "a", "text": 3}',
        b'{"text": "a", "x": "\\ud800"}',
        b'{"text": "\\ud800"}',
        b'{"text": null}',
        b'{"id": 1}',
        b'{"text": "a", "x": 1e999, "y": ' + b"9" * 5000 + b"}",
        b'{"text": "a", "x": ' + DEEP + b"}",
        b'{"text": "a", "x": ' + DEEP[1:-1] + b"}",
        b'{"text": "a", "x": ' + DEEP + b', "x": 1}',
        b'{"text": "a", "x": "' + b"long" * 100 + b'"}',
        b'{"text": "a", "loss_spans": [[0, 1]]}',
        b'{"messages": [{"role": "user", "content": "a"}]}',
        b'{"text": "a\tb"}',
        b'{"text": "a", "x": NaN}',
        b" \t",
        b"",
        b"\x0b",
        b"\xef\xbb\xbf{}",
    ]
)


def in_a_block(lines, end=b"\n"):
    sizes = np.array(list(map(len, lines)), np.int64)
    return end.join(lines), np.cumsum(sizes + len(end)) - sizes - len(end), sizes


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.lists(good_lines, min_size=1, max_size=6)
        | st.lists(good_lines | odd_lines, min_size=1, max_size=6)
    ),
    st.sampled_from(
        [
            None,
            Fields(),
            Fields("data.messages"),
            Fields(format="alpaca"),
        ]
    ),
    st.sampled_from(["text", "id", 'a"b']),
)
def test_a_block_gives_what_its_lines_give_or_nothing(blocks, fields, text_key):
    """One decoder for all blocks, so that what it learnt from one is used on the others."""
    decode, decode_line = block_decoder(text_key, fields), line_decoder(text_key, fields)
    for lines in blocks:
        texts = decode(*in_a_block(lines))
        if texts is not None:
            assert texts == [decode_line(line) for line in lines]


@pytest.mark.parametrize("fields", [None, Fields(), Fields("data.messages")])
@pytest.mark.parametrize(
    "lines",
    [
        [b'{"text": "a"}', '{"text": "é"}'.encode()],
        [b'{"id": 1, "text": "a"}', b'{"text": "b", "kind": null}'],
        [b'{"text": "a"}'] * 40 + [b'{"text": "b", "new": [{"x": 1}]}'],
        ['{"text": "aé", "meta": {"title": "é"}}'.encode()] * 3,
        [b'{"text": "a", "x": ' + DEEP[1:-1] + b"}"],
        ['{"text": "🙂", "html": "'.encode() + "né".encode() * 20_000 + b'"}'],
        [b'{"text": "a"}\r', b'{"text": "b"}\r'],
    ],
)
def test_good_lines_are_decoded_together(lines, fields):
    """The fast way is taken: else the equality above could hold for a decoder that gives
    nothing."""
    decode = block_decoder("text", fields)
    for _ in range(2):
        assert decode(*in_a_block(lines)) == [line_decoder("text")(line) for line in lines]
        assert decode(*in_a_block(lines, b"\n \t\r\n\n")) == [
            line_decoder("text")(line) for line in lines
        ]


def test_two_lines_of_one_record_and_one_line_of_two_are_not_taken_for_records():
    decode = block_decoder("text")
    assert decode(*in_a_block([b'{"text":', b'"a"}', b'{"text": "b"} {"text": "c"}'])) is None
    assert decode(*in_a_block([b'{"text":', b'"a"}'])) is None
    two = b'{"text": "b"} {"text": "c"}'
    for first, second in ((b'{"text": "a", "x": "}', b'{"}'), (b'{"text": "a", "x": {}', b"{}}")):
        assert decode(*in_a_block([first, second, two])) is None
    assert decode(*in_a_block([b'{"text": "a", "x": [{"y": 1}', b'{"y": 1}]}', two])) is None
    assert decode(*in_a_block([b'{"text": "b"} {"text": "a", "x": [', b'{"y": 1}]}'])) is None
    assert decode(b'{"text": "a"}', np.zeros(1, np.int64), np.array([-1])) is None


def test_fields_that_were_learnt_hide_nothing_in_a_field_that_comes_twice():
    plain = b'{"x": 1, "text": "a"}'
    for hidden in (b'"\xff"', DEEP):
        decode = block_decoder("text")
        assert decode(*in_a_block([plain] * 40)) == ["a"] * 40
        assert decode(*in_a_block([plain, b'{"x": ' + hidden + b', "x": 1, "text": "a"}'])) is None


@pytest.mark.parametrize("batch_bytes", [1, 100, 4 << 20])
def test_one_bad_line_does_not_change_what_its_neighbours_give(tmp_path, batch_bytes):
    lines = [json.dumps({"id": i, "text": str(i)}).encode() for i in range(300)]
    lines[70], lines[71], lines[299] = b'{"id": 70', b"", b'{"text": "\xff"}'
    path = write(tmp_path, "a.jsonl", b"\n".join(lines))
    at = np.cumsum([0, *(len(line) + 1 for line in lines)]).tolist()
    good = [(at[i], str(i)) for i in range(300) if i not in (70, 71, 299)]
    bad = [(at[70], "malformed_json"), (at[299], "invalid_utf8")]
    assert read_all(part_of(path), batch_bytes=batch_bytes) == (good, bad)


def test_texts_added_together_are_batched_as_if_added_one_by_one():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(0, 40, rng.integers(1, 30))
        positions, texts = np.arange(len(sizes)), [str(i) for i in range(len(sizes))]
        together, single = BatchBuilder(3), BatchBuilder(3)
        expected = []
        for position, text, size in zip(positions.tolist(), texts, sizes.tolist(), strict=True):
            single.add(position, text, size)
            if single.bytes >= 50:
                expected += single.take()
        found = [*together.extend(positions, texts, sizes, 50), *together.take()]
        expected += single.take()
        assert [
            (b.texts, b.positions.tolist(), b.files.tolist(), b.supervision) for b in found
        ] == [(b.texts, b.positions.tolist(), b.files.tolist(), b.supervision) for b in expected]


def test_slices_hold_about_the_bytes_asked_for_or_one_document():
    sizes = np.array([5, 5, 5, 100, 0, 0, 7])
    assert [(s.start, s.stop) for s in limits.slices(sizes, 10)] == [(0, 2), (2, 3), (3, 4), (4, 7)]
    assert list(limits.slices(sizes[:0], 10)) == []
