"""Which fields of lines and rows are read, and which layout they show
(packprep.sources.formats.fields), in each format."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packprep.conversations.supervision import supervise
from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.sources.formats import read
from packprep.sources.formats.fields import Fields, field_at, of_table, weight_of, without_nulls
from packprep.sources.formats.jsonl import line_decoder
from tests.conversations import chats_made as chats
from tests.sources.formats.parts import part_of

QA = chats.turns("q", "a")
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
FIELDS = Fields()


def outcome(record, text_key="text", fields=FIELDS):
    return line_decoder(text_key, fields)(json.dumps(record).encode())


def jsonl(folder, records):
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def table(records):
    """Of records whose keys all are columns, null where they have none."""
    return pa.table(
        {
            key: [record.get(key) for record in records]
            for key in dict.fromkeys(k for r in records for k in r)
        }
    )


def parquet(folder, records):
    pq.write_table(table(records), folder / "a.parquet")
    return folder / "a.parquet"


def arrow(folder, records):
    rows = table(records)
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, rows.schema) as writer,
    ):
        writer.write_table(rows)
    return folder / "a.arrow"


FORMATS = pytest.mark.parametrize("write", [jsonl, parquet, arrow])


def documents(path, text_key="text", fields=FIELDS):
    """(texts, trained parts of each or None, (reason, detail) of rejects)."""
    texts, trained, rejects = [], [], []
    for batch in read(part_of(path), text_key, fields=fields):
        used, conversations = supervise(batch, chats.CHATML)
        texts += used.texts
        found = [conversations.get(i) for i in range(len(used.texts))]
        trained += [c and [c.text[a:b] for a, b in c.spans] for c in found]
        rejects += [(reject.reason, reject.detail) for reject in used.rejects]
    return texts, trained, rejects


CHAT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"


@FORMATS
@pytest.mark.parametrize(
    "record, fields",
    [
        ({"messages": QA, "id": 3}, FIELDS),
        ({"conversations": SHAREGPT}, FIELDS),
        ({"conversations": QA}, FIELDS),
        ({"instruction": "q", "input": "", "output": "a"}, FIELDS),
        ({"instruction": "q", "output": "a", "text": "no"}, Fields(format="alpaca")),
        ({"prompt": QA[:1], "completion": QA[1:]}, FIELDS),
        ({"dialog": QA}, Fields("dialog")),
        ({"dialog": SHAREGPT, "text": "no"}, Fields("dialog", format="sharegpt")),
        ({"data": {"messages": QA}}, Fields("data.messages")),
        ({"data.messages": QA, "data": {"messages": []}}, Fields("data.messages")),
        ({"messages": QA, "text": None, "chosen": "a", "rejected": "b"}, FIELDS),
    ],
)
def test_each_layout_gives_the_conversation(tmp_path, write, record, fields):
    assert documents(write(tmp_path, [record] * 3), fields=fields) == (
        [CHAT] * 3,
        [["a<|im_end|>\n"]] * 3,
        [],
    )


@FORMATS
def test_a_prompt_and_its_completion_are_a_text_that_is_trained_from_the_completion_on(
    tmp_path, write
):
    path = write(tmp_path, [{"prompt": "né? ", "completion": "a"}] * 2)
    assert documents(path) == (["né? a"] * 2, [["a"]] * 2, [])


@FORMATS
def test_texts_are_texts_whatever_stands_beside_them(tmp_path, write):
    records = [
        {
            "text": "t",
            "prompt": "q",
            "completion": "a",
            "instruction": "q",
            "output": "a",
            "chosen": "a",
            "rejected": "b",
        }
    ]
    assert documents(write(tmp_path, records)) == (["t"], [None], [])
    assert documents(write(tmp_path, records), "prompt") == (["q"], [None], [])
    assert documents(write(tmp_path, records), fields=None) == (["t"], [None], [])


@FORMATS
def test_a_record_whose_text_is_null_is_what_its_other_fields_show(tmp_path, write):
    records = [
        {"text": None, "messages": QA},
        {"text": "plain", "prompt": None, "completion": None},
        {"text": None, "conversations": SHAREGPT},
        {"text": None, "prompt": "p", "completion": "c"},
        {"text": "plain", "instruction": "i", "output": "o"},
        {"text": None, "instruction": "q", "output": "a"},
        {"text": None, "chosen": "c", "rejected": "r"},
    ]
    texts, trained, rejects = documents(write(tmp_path, records))
    of_chat = documents(write(tmp_path, [{"messages": QA}]))[0][0]
    assert (
        texts == [of_chat, "plain", of_chat, "pc", "plain", of_chat]
        and trained[1] is trained[4] is None
    )
    assert [reason for reason, _ in rejects] == ["bad_messages"]


@FORMATS
def test_a_text_may_lie_in_an_object(tmp_path, write):
    path = write(tmp_path, [{"data": {"text": "t", "n": 1}}, {"data": {"text": "u", "n": 2}}])
    for fields in (FIELDS, None):
        assert documents(path, "data.text", fields) == (["t", "u"], [None, None], [])


@FORMATS
def test_a_record_with_a_text_and_messages_is_rejected(tmp_path, write):
    path = write(tmp_path, [{"text": "t", "messages": QA}, {"text": "t", "messages": None}])
    texts, _, [(reason, detail)] = documents(path)
    assert (texts, reason) == (
        ["t"],
        "bad_messages",
    ) and "set messages_format for these alone" in detail
    assert documents(path, fields=Fields(format="messages"))[0] == [CHAT]


@pytest.mark.parametrize(
    "record, name",
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference data (chosen, rejected)"),
        (
            {"conversations": SHAREGPT, "chosen": "a", "rejected": "b"},
            "preference data (chosen, rejected)",
        ),
        (
            {"prompt": "q", "completion": "a", "label": True},
            "rated completions (prompt, completion, label)",
        ),
        (
            {"prompt": "q", "completions": ["a"], "labels": [True]},
            "rated steps (prompt, completions, labels)",
        ),
        (
            {"question": "q", "answer": "a"},
            "question and answer (question, answer): name them prompt and completion",
        ),
        ({"prompt": "q", "response": "a"}, "prompt and response (prompt, response)"),
        ({"instruction": "q", "response": "a", "context": ""}, "instruction and response"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path, record, name):
    reason, detail = outcome(record)
    assert reason == "bad_messages" and detail.startswith(name) and len(detail) <= 200
    if not {"label", "conversations"} & record.keys():
        with pytest.raises(SourceError, match="its rows are " + name.split(" (")[0]):
            documents(parquet(tmp_path, [record]))
    else:
        assert documents(parquet(tmp_path, [record]))[2] == [(reason, detail)]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q"},
        {"prompt": "q", "chosen": None, "rejected": "b"},
        {"conversations": None},
        {"question": "q"},
    ],
)
def test_a_record_that_shows_no_layout_lacks_a_text(record):
    assert outcome(record)[0] == "missing_text"


def test_a_label_that_is_no_rating_says_nothing():
    assert (
        outcome({"prompt": "q", "completion": "a", "label": "math"}).layout == "prompt_completion"
    )


def test_a_field_that_is_the_text_is_no_field_of_a_layout():
    assert outcome({"prompt": 3, "completion": "a"}, "prompt")[0] == "not_a_string"
    assert outcome({"messages": "t"}, "messages") == "t"


def test_columns_of_bytes_and_dictionaries_are_texts(tmp_path):
    columns = {
        "prompt": pa.array(["né", "n"]).dictionary_encode(),
        "completion": pa.array([b"\xc3\xa9", b"\xff"]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    texts, trained, rejects = documents(tmp_path / "a.parquet")
    assert (texts, trained) == (["néé"], [["é"]])
    assert rejects == [("invalid_utf8", "byte 0 of the completion, 0xff, is not valid UTF-8")]


def test_a_null_of_a_dictionary_is_no_text(tmp_path):
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["plain", None]))
    rows = pa.table({"text": texts, "prompt": ["p", "p"], "completion": ["c", "c"]})
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, rows.schema) as writer,
    ):
        writer.write_table(rows)
    assert documents(tmp_path / "a.arrow") == (["plain", "pc"], [None, ["c"]], [])


def test_a_null_of_a_column_is_a_key_that_is_not_there_but_for_content():
    given = {
        "messages": [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"arguments": {"a": 1, "b": None}}],
                "x": None,
            }
        ]
    }
    wanted = {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"a": 1}}]}
        ]
    }
    assert without_nulls(given) == wanted
    assert without_nulls([None, {"content": None}]) == [None, {}]


def test_keys_with_points_are_looked_for_as_they_are_first():
    record = {"a.b": 1, "a": {"b": 2, "c": {"d.e": 3}}, "n": None}
    assert [field_at(record, key) for key in ("a.b", "a.c.d.e", "a.c.x", "n", "n.x", "a.b.c")] == [
        1,
        3,
        None,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            Fields(format="sharegpt"),
            (
                "messages_format = 'sharegpt' requires columns named 'conversations', but the"
                " columns are 'x'"
            ),
        ),
        (Fields("dialog", format="messages"), "requires columns named 'dialog'"),
        (FIELDS, "no column named 'text'; the columns are 'x'\nhint: set text_key"),
        (None, "no column named 'text'; the columns are 'x'\nhint: set text_key"),
    ],
)
def test_a_table_without_the_layout_says_what_it_has(tmp_path, fields, message):
    with pytest.raises(SourceError, match=message):
        documents(parquet(tmp_path, [{"x": "y"}]), fields=fields)


@pytest.mark.parametrize(
    "record, key", [({"dialog": QA}, "dialog"), ({"data": {"turns": SHAREGPT}}, "data.turns")]
)
def test_a_table_with_messages_under_another_name_says_it(tmp_path, record, key):
    with pytest.raises(
        SourceError, match=f"no column named 'text', but .*\nhint: set messages_key = \"{key}\""
    ):
        documents(parquet(tmp_path, [record]), fields=FIELDS)


def test_where_the_fields_are_ignored_no_text_is_advised(tmp_path):
    with pytest.raises(
        SourceError, match='hint: for sharegpt .conversations.: set documents.loss_spans = "use"'
    ):
        documents(parquet(tmp_path, [{"conversations": SHAREGPT}]), fields=None)


def test_a_source_says_its_keys():
    source = Source(paths=("x",), messages_key="d", tools_key="t", messages_format="alpaca")
    assert Fields.of(source, 2) == Fields("d", "t", "alpaca", 2)
    without, with_media = Fields("a.b"), Fields("a.b", kinds=("image",))
    assert without.beside_text("text") == ["loss_spans", "a.b", "a", "weight"]
    assert with_media.beside_text("weight") == ["loss_spans", "a.b", "a", "media"]
    assert not without.says("media") and with_media.says("media")
    for fields in (without, with_media):
        for key in ("loss_spans", "a.b", "weight", "tools"):
            assert fields.says(key), key
        assert not fields.says("url")


def test_a_weight_is_refused_from_the_first_number_that_float32_rounds_to_infinity():
    first_infinite = 2.0**128 - 2.0**103
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(first_infinite))
    assert weight_of(first_infinite) is None
    assert weight_of(math.nextafter(first_infinite, 0)) == np.finfo(np.float32).max


@pytest.mark.parametrize("weight, kept", [(2.5, {"weight": 2.5}), (None, {}), (math.nan, {})])
def test_the_weight_of_a_table_s_record_is_kept_unless_it_is_missing(weight, kept):
    record = {"messages": QA, "weight": weight}
    assert of_table(record) == {"messages": QA, **kept}
