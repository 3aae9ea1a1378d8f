"""packprep.sources.unread_fields: fields that other tools read are counted before a build."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from packprep.recipe import Source
from packprep.sources.files import Files
from packprep.sources.first_look import first_look
from packprep.sources.unread_fields import UnreadFields

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def fields_of(*records, format="jsonl", **source):
    """The counts of the unread fields of some records."""
    unread = UnreadFields(Source(name="web", paths=("*",), **source))
    unread.add_lines(format, [json.dumps(record).encode() for record in records])
    return dict(unread.fields)


def test_fields_beside_messages_are_counted_and_said_once(capsys):
    unread = UnreadFields(Source(name="web", paths=("*",)))
    record = {"messages": MESSAGES, "system_prompt": "s", "id": 3, "label": None}
    lines = [json.dumps({**record, "label": k or None}).encode() for k in range(3)]
    unread.add_lines("jsonl", [*lines, b"", b"no JSON", b"[1]"])
    unread.report()
    (said,) = capsys.readouterr().err.splitlines()
    assert "'system_prompt' (3 of 3 inspected records), 'label' (2 of 3" in said


def test_fields_that_are_read_refused_or_empty_are_not_counted():
    for record, source in [
        ({"text": "a", "label": 1}, {}),
        ({"messages": MESSAGES, "label": 1}, {"where": "label == 1"}),
        ({"messages": MESSAGES, "mask": {"kind": 1}}, {"where": "mask.kind == 1"}),
        ({"messages": MESSAGES, "chosen": MESSAGES}, {"messages_key": "chosen"}),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {}),
        ({"messages": MESSAGES, "documents": []}, {}),
    ]:
        assert fields_of(record, **source) == {}, record


def test_a_name_inside_an_expression_or_a_key_does_not_hide_a_field():
    record = {"messages": MESSAGES, "label": 1, "mask": 1}
    assert fields_of(record, where="unlabeled == 'mask'") == {"label": 1, "mask": 1}


def test_answers_beside_a_text_are_counted_because_only_the_text_is_read():
    record = {"text": "Q: q A: a", "instruction": "q", "output": "a"}
    assert fields_of(record, {"text": "q"}) == {"instruction": 1, "output": 1}
    assert fields_of(record, messages_format="alpaca") == {}
    assert fields_of({"text": "q", "prompt": "q", "response": "a"}) == {}


def test_masks_and_lengths_beside_token_ids_are_counted():
    for field, value, is_unread in [
        ("mask", [0, 1, 1, 1], True),
        ("Label_Weights", [0, 1, 1, 1], True),
        ("position_ids", [0, 1, 0, 1], True),
        ("position_ids", [0, 1, 2, 3], False),
        ("seq_lengths", [2, 2], True),
        ("seq_lengths", [4], False),
        ("segment_ids", [1, 1, 2, 2], True),
        ("segment_ids", [1, 1, 1, 1], False),
        ("loss_mask", [0, 1, 1, 1], False),
        ("token_type_ids", [0, 0, 0, 0], False),
        ("mask_name", "x", False),
    ]:
        found = fields_of({"input_ids": [1, 2, 3, 4], field: value}, format="jsonl_tokens")
        assert found == ({field: 1} if is_unread else {}), field


def test_unread_columns_of_a_table_are_named(tmp_path, capsys):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": [MESSAGES], "system_prompt": ["s"], "id": [1]}), path)
    size = pa.array([path.stat().st_size]).to_numpy()
    source = Source(name="web", paths=("*",))
    first_look(source, Files(0, ["a.parquet"], size, "auto", str(tmp_path)), True)
    assert "'system_prompt' (a column)" in capsys.readouterr().err
    first_look(source, Files(0, ["a.parquet"], size, "auto", str(tmp_path)), False)
    assert capsys.readouterr().err == ""
