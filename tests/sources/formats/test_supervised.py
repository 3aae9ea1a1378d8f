"""Readers and the fields that say what is trained: loss_spans and messages, in every format that
has fields."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.conversations.supervision import Conversation, conversation, supervise
from packprep.errors import RecipeError, SourceError
from packprep.sources.formats import read
from packprep.sources.formats.batch import Supervision
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import decode_slowly, line_decoder
from tests.conversations import chats_made as chats
from tests.sources.formats.parts import part_of, read_all, write

FIELDS = Fields()
decode = line_decoder("text", FIELDS)
CHAT = conversation(chats.said(chats.turns("q", "né 🙂")), chats.CHATML)

RECORDS = [
    {"text": "plain"},
    {"text": "né 🙂!", "loss_spans": [[0, 1], [3, 4]]},
    {"messages": chats.turns("q", "né 🙂")},
    {"text": "", "loss_spans": []},
    {"text": "t", "messages": chats.turns("q", "a")},
    {"text": "t", "loss_spans": [[2, 0]]},
    {"text": None, "loss_spans": [[0, 1]]},
    {"text": "last"},
    {"text": "né 🙂!", "loss_spans": [[3, 90], [2, 2], [0, 1], [1, 2, 1], [8, 9]]},
    {"text": "t", "loss_spans": [[0, 1, 3]]},
    {"text": "t", "loss_spans": [[0, 1], [-1, 0]]},
    {"text": "t", "loss_spans": [[0, 1], [0, None]]},
    {"text": "t", "loss_spans": [[0, 1], None]},
    {"text": "t", "loss_spans": [[0, 0], [7, 2**63 - 1]]},
]
DOCUMENTS = [
    (0, "plain", None),
    (1, "né 🙂!", Conversation("né 🙂!", ((0, 1), (3, 4)))),
    (2, CHAT.text, CHAT),
    (3, "", Conversation("", ())),
    (7, "last", None),
    (8, "né 🙂!", Conversation("né 🙂!", ((0, 2), (3, 5)))),
    (9, "t", Conversation("t", ((0, 1),), weights=(3.0,))),
    (13, "t", Conversation("t", ())),
]
REJECTS = [
    (4, "bad_messages"),
    (5, "bad_loss_spans"),
    (6, "not_a_string"),
    *((i, "bad_loss_spans") for i in range(10, 13)),
]
MESSAGES = pa.list_(
    pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
)


def table(records, dictionary=False):
    fields = [
        ("id", pa.int64()),
        ("messages", MESSAGES),
        ("text", pa.string()),
        ("loss_spans", pa.list_(pa.list_(pa.int64()))),
    ]
    columns = {name: pa.array([r.get(name) for r in records], type) for name, type in fields}
    if dictionary:
        columns["text"] = columns["text"].dictionary_encode()
    return pa.table(columns)


def arrow(path, given, stream=False):
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, given.schema) as writer:
        writer.write_table(given)
    return path


WRITERS = {
    "jsonl": lambda folder, records: write(
        folder,
        "a.jsonl",
        b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in records),
    ),
    "parquet": lambda folder, records: (
        pq.write_table(table(records), folder / "a.parquet"),
        folder / "a.parquet",
    )[1],
    "arrow file": lambda folder, records: arrow(folder / "a.arrow", table(records)),
    "arrow stream": lambda folder, records: arrow(folder / "b.arrow", table(records), stream=True),
    "arrow dictionary": lambda folder, records: arrow(
        folder / "c.arrow", table(records, True), stream=True
    ),
}


def complete(found):
    """Return a conversation with the boundaries that are worked out only where it is cut."""
    return found.whole() if found is not None and found.whole is not None else found


def rows(path, records, template=chats.CHATML, fields=FIELDS, **options):
    """([(record's number, text, conversation)], [(record's number, reason)]) of a file with these
    records."""
    part = part_of(path)
    at = {}
    position = 0
    for i, record in enumerate(records):
        at[position if part.format == "jsonl" else i] = i
        position += len(json.dumps(record, ensure_ascii=False).encode()) + 1
    documents, rejects = [], []
    for batch in read(part, "text", fields=fields, **options):
        batch, conversations = supervise(batch, template)
        numbers = [at[p] for p in batch.positions.tolist()]
        documents += (
            (n, text, complete(conversations.get(i)))
            for i, (n, text) in enumerate(zip(numbers, batch.texts, strict=True))
        )
        rejects += [(at[reject.position], reject.reason) for reject in batch.rejects]
    return documents, rejects


@pytest.mark.parametrize("writer", WRITERS)
def test_every_format_gives_the_same_conversations(tmp_path, writer):
    path = WRITERS[writer](tmp_path, RECORDS)
    assert rows(path, RECORDS) == (DOCUMENTS, REJECTS)
    assert rows(path, RECORDS, batch_bytes=1) == (DOCUMENTS, REJECTS)


@pytest.mark.parametrize("writer", WRITERS)
def test_documents_that_are_not_kept_leave_no_trace(tmp_path, writer):
    path = WRITERS[writer](tmp_path, RECORDS)
    whole, rejects = rows(path, RECORDS)
    for parity in (0, 1):
        seen = []

        def keep(file, positions, parity=parity, seen=seen):
            seen.extend(positions.tolist())
            return [(len(seen) - len(positions) + k) % 2 == parity for k in range(len(positions))]

        expected = (
            [d for d in whole if d[0] % 2 == parity],
            [r for r in rejects if r[0] % 2 == parity],
        )
        assert rows(path, RECORDS, keep=keep) == expected


@pytest.mark.parametrize("writer", WRITERS)
def test_fields_that_nobody_asks_for_are_not_looked_at(tmp_path, writer):
    path = WRITERS[writer](tmp_path, RECORDS)
    documents, rejects = rows(path, RECORDS, fields=None)
    assert [(i, text) for i, text, _ in documents] == [
        (i, r["text"]) for i, r in enumerate(RECORDS) if r.get("text") is not None
    ]
    assert all(conversation is None for _, _, conversation in documents)
    missing = "missing_text" if writer == "jsonl" else "not_a_string"
    assert rejects == [(2, missing), (6, "not_a_string")]


@pytest.mark.parametrize("writer", WRITERS)
def test_messages_without_a_template_stop_the_reading(tmp_path, writer):
    path = WRITERS[writer](tmp_path, RECORDS)
    with pytest.raises(RecipeError, match="no chat template"):
        rows(path, RECORDS, template=None)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_file_may_have_messages_alone(tmp_path, kind):
    given = pa.table({"messages": pa.array([chats.turns("q", "né 🙂"), None, []], MESSAGES)})
    path = tmp_path / f"a.{kind}"
    pq.write_table(given, path) if kind == "parquet" else arrow(path, given)
    batch, conversations = supervise(
        next(read(part_of(path), "text", fields=Fields())), chats.CHATML
    )
    assert {i: complete(found) for i, found in conversations.items()} == {0: CHAT}
    assert batch.texts == [CHAT.text]
    assert [(r.position, r.reason) for r in batch.rejects] == [
        (1, "not_a_string"),
        (2, "bad_messages"),
    ]
    with pytest.raises(SourceError, match="no column named 'text'"):
        read_all(part_of(path))


def test_columns_of_another_type_are_rejects_of_the_rows_that_use_them(tmp_path):
    given = pa.table(
        {"text": ["a", "b", None], "messages": [None, 3, 4], "loss_spans": [None, None, None]}
    )
    pq.write_table(given, tmp_path / "a.parquet")
    batch, conversations = supervise(
        next(read(part_of(tmp_path / "a.parquet"), "text", fields=Fields())), None
    )
    assert batch.texts == ["a"] and conversations == {}
    assert [(r.position, r.reason) for r in batch.rejects] == [
        (1, "bad_messages"),
        (2, "bad_messages"),
    ]


def test_two_columns_of_one_name_are_refused(tmp_path):
    columns = [
        pa.array(["a"]),
        pa.array([None], pa.list_(pa.int64())),
        pa.array([None], pa.list_(pa.int64())),
    ]
    path = arrow(
        tmp_path / "a.arrow", pa.Table.from_arrays(columns, ["text", "loss_spans", "loss_spans"])
    )
    with pytest.raises(SourceError, match="2 columns named 'loss_spans'"):
        read_all(part_of(path), fields=Fields())
    assert read_all(part_of(path)) == ([(0, "a")], [])
    # Columns of messages are refused too, even if the file has another layout.
    names = ["prompt", "completion", "messages", "messages"]
    path = arrow(tmp_path / "b.arrow", pa.Table.from_arrays([columns[0], *columns], names))
    with pytest.raises(SourceError, match="2 columns named 'messages'"):
        read_all(part_of(path), fields=Fields(format="prompt_completion"))


def test_messages_of_a_parquet_file_that_are_not_utf_8_are_rejects(tmp_path):
    raw = pa.array([b"\xff", b"q"]).view(pa.string())
    message = pa.StructArray.from_arrays(
        [pa.array(["assistant", "assistant"]), raw], ["role", "content"]
    )
    given = pa.table(
        {"messages": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), message)}
    )
    pq.write_table(given, tmp_path / "a.parquet")
    documents, rejects = read_all(part_of(tmp_path / "a.parquet"), fields=Fields())
    assert [position for position, _ in documents] == [1] and rejects == [(0, "invalid_utf8")]


# lines


def found_in(line, text_key="text"):
    """What comes of a line: its text, its conversation, or the reason why it has none."""
    outcome = line_decoder(text_key, Fields())(line)
    found = conversation(outcome, chats.CHATML) if isinstance(outcome, Supervision) else outcome
    return found[0] if isinstance(found, tuple) else found


def test_a_field_that_is_the_text_is_the_text_and_nothing_else():
    assert found_in(b'{"messages": "hello"}', "messages") == "hello"
    assert found_in(b'{"messages": []}', "messages") == "not_a_string"
    assert found_in(b'{"loss_spans": "x", "messages": 3}', "loss_spans") == "bad_messages"
    assert found_in(b'{"messages": "x", "loss_spans": [[0, 1]]}', "messages") == Conversation(
        "x", ((0, 1),)
    )


@pytest.mark.parametrize(
    "line, outcome",
    [
        (b'{"text": "a", "loss_spans": null, "messages": null}', "a"),
        (
            b'{"text": "ab", "loss_spans": [[0, 9]], "loss_spans": [[0, 1]]}',
            Conversation("ab", ((0, 1),)),
        ),
        (
            b'{"n": ' + b"9" * 9000 + b', "text": "ab", "loss_spans": [[0, 1]]}',
            Conversation("ab", ((0, 1),)),
        ),
        (
            b'{"n": 1e999, "t": "\\ud800", "text": "ab", "loss_spans": [[0, 1]]}',
            Conversation("ab", ((0, 1),)),
        ),
        (
            b'{"text": "ab", "loss_spans": [[0, ' + b"9" * 9000 + b"]]}",
            Conversation("ab", ((0, 2),)),
        ),
        (b'{"text": "ab", "loss_spans": [[-' + b"9" * 9000 + b", 1]]}", "bad_loss_spans"),
        (b'{"text": "ab", "loss_spans": [[1e999, 1]]}', "bad_loss_spans"),
        (b'{"text": ' + b"9" * 9000 + b', "loss_spans": [[0, 1]]}', "not_a_string"),
        (b'{"text": "ab", "loss_spans": [[0, 1]', "malformed_json"),
        (b'{"text": "ab", "loss_spans": [[0, 1],]}', "malformed_json"),
        (b'{"text": "ab", "loss_spans": ' + b"[" * 300 + b"]" * 300 + b"}", "malformed_json"),
        (b'{"text": "a\xff", "loss_spans": [[0, 1]]}', "invalid_utf8"),
        (b'{"text": "\\ud800", "loss_spans": [[0, 1]]}', "lone_surrogate"),
        (b'{"loss_spans": [[0, 1]]}', "missing_text"),
        (b'{"text": 3, "loss_spans": [[0, 1]]}', "not_a_string"),
        (b'{"text": 3, "messages": [{"role": "assistant", "content": "a"}]}', "not_a_string"),
        (b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "lone_surrogate"),
        (b'{"messages": [{"role": "assistant", "content": "\xff"}]}', "invalid_utf8"),
    ],
)
def test_lines_with_fields(line, outcome):
    assert found_in(line) == outcome


VALUES = (
    st.none()
    | st.integers(-2, 6)
    | st.text(max_size=4)
    | st.lists(st.lists(st.integers(-1, 5), max_size=3), max_size=3)
)
KEYS = st.sampled_from(["text", "loss_spans", "messages", "x"])


@given(
    st.dictionaries(KEYS, VALUES | st.just(chats.turns("q", "a")), max_size=4),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=2),
)
def test_the_fast_path_and_the_exact_path_agree_on_fields_and_plain_lines_are_as_without(
    value, ascii, changes
):
    line = bytearray(json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass"))
    for at, byte in changes:
        line[at % len(line)] = byte
    found = decode(bytes(line))
    assert found == decode_slowly(bytes(line), "text", Fields())
    if isinstance(found, str):
        assert found == line_decoder("text")(bytes(line))


def test_values_of_type_arrow_json_are_the_values_at_any_depth(tmp_path):
    """As datasets writes fields of mixed types, with which it gives objects back."""
    kind = pa.json_(pa.string())

    given = [{"a": None, "b": [1, "x"]}, "only a text"]
    texts = pa.array([*map(json.dumps, given), None], pa.string())
    parameters = pa.ExtensionArray.from_storage(kind, texts)
    function = pa.StructArray.from_arrays(
        [pa.array(["f", "g", "h"]), parameters], ["name", "parameters"]
    )
    tools = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), function)
    messages = pa.array([chats.turns("q", "a")] * 3, MESSAGES)
    table = pa.table({"messages": messages, "tools": tools})
    pq.write_table(table, tmp_path / "a.parquet")
    batches = list(read(part_of(tmp_path / "a.parquet"), "text", fields=Fields()))
    records = [one.record for batch in batches for one in batch.supervision.values()]
    assert [record["tools"] for record in records] == [
        [{"name": "f", "parameters": given[0]}],
        [{"name": "g", "parameters": given[1]}],
        [{"name": "h"}],
    ]
    broken = pa.ExtensionArray.from_storage(kind, pa.array(["{", "{}", None], pa.string()))
    pq.write_table(pa.table({"messages": messages, "tools": broken}), tmp_path / "b.parquet")
    (batch,) = read(part_of(tmp_path / "b.parquet"), "text", fields=Fields())
    assert [reject.reason for reject in batch.rejects] == ["malformed_json"]
