"""tests.twin.records gives what readers and conversations/layouts.py give, of any record, in its own
way."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.conversations.layouts import Dialogue, read_layout
from packprep.sources.formats import read
from packprep.sources.formats.batch import Choice, Supervision
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import line_decoder
from tests.sources.formats.parts import part_of
from tests.twin import reading, records
from tests.twin.records import Keys, Passage, Talk

pytestmark = pytest.mark.long

CALLS = [{"function": {"name": "f", "arguments": {"a": None}}}]
odd = st.sampled_from(
    [
        None,
        "",
        "x",
        0,
        1,
        2.5,
        -1,
        True,
        False,
        [],
        {},
        ["x"],
        [["q", "a"]],
        {"a": 1},
        "[]",
        "{",
        10**400,
    ]
)
weights = st.sampled_from([None, 0, 1, 0.5, 1e30, -1, True, "1"])
flags = st.sampled_from([None, True, False, 1, "x"])
texts = st.sampled_from(
    [
        *(
            "",
            "q",
            "né",
            "\ud800",
            '{"name": "f", "arguments": {}}',
            '[{"name": "f"}, {"name": 3}]',
        ),
        '{"function": {"name": "f", "arguments": {"a": 1}}}',
        '{"name": "f", "parameters": {}}',
    ]
)
parts = st.fixed_dictionaries(
    {"type": st.just("text"), "text": st.sampled_from(["q", "q", " ", ""])},
    optional={"train": flags, "weight": weights, "loss": flags, "masked": st.none() | flags},
)
contents = (
    texts
    | st.sampled_from(
        [None, [{"type": "text", "text": "q"}], [{"type": "image"}], [{"type": "text"}]]
    )
    | st.lists(parts, max_size=3)
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "assistant", "tool"]),
        "content": contents,
    },
    optional={
        "train": flags,
        "weight": weights,
        "tool_calls": st.sampled_from([CALLS, [], None, [{}], [{"name": "f", "args": {}}]]),
        "name": odd,
        "tool_call_id": odd,
        "thinking": texts,
        "reasoning": st.sampled_from(["", " q", "r", 3]),
        "id": odd,
        "extra": odd,
        "training": flags,
        "loss": flags | odd,
        "loss_weight": weights,
        "masked": flags,
    },
)
spoken = st.fixed_dictionaries(
    {
        "from": st.sampled_from(
            ["human", "GPT", "gpt", "function_call", "observation", "system", "nobody", None]
        ),
        "value": texts | odd,
    },
    optional={"loss": flags | odd, "train": flags, "weight": weights},
)
lists = (
    st.lists(messages, max_size=4)
    | st.lists(spoken, max_size=4)
    | st.lists(messages | odd, max_size=3)
    | odd
)
made = st.fixed_dictionaries(
    {},
    optional={
        "text": texts | st.none(),
        "loss_spans": st.sampled_from([None, [], [[0, 1]]]),
        "messages": lists,
        "conversations": lists,
        "prompt": texts | lists,
        "completion": texts | lists,
        "label": odd,
        "instruction": texts,
        "input": texts | st.none(),
        "output": texts,
        "system": st.sampled_from([None, "", "s", 3]),
        "history": odd,
        "weight": weights,
        "tools": st.sampled_from([None, [], [{"a": 1}], "[]", "[", 3, ""]),
        "chosen": odd,
        "rejected": odd,
        "chat_template_kwargs": st.sampled_from([None, {}, {"x": 1}, '{"x": 1}', {"tools": 1}, 3]),
        "data": st.fixed_dictionaries({}, optional={"messages": lists, "text": texts}),
        "answer": texts,
        "images": odd,
        "functions": odd,
    },
)
asked = st.builds(
    Keys,
    st.sampled_from(["text", "text", "prompt", "data.text"]),
    st.sampled_from(["messages", "messages", "conversations", "data.messages"]),
    st.just("tools"),
    st.sampled_from(
        ["auto", "auto", "auto", "messages", "sharegpt", "prompt_completion", "alpaca"]
    ),
    st.sampled_from([("assistant",), ("user", "tool")]),
)


def by_the_package(record, keys):
    fields = Fields(keys.messages, keys.tools, keys.format)
    found = line_decoder(keys.text, fields)(json.dumps(record).encode())
    return (
        read_layout(found, keys.roles) if isinstance(found, Supervision) and found.layout else found
    )


def by_the_twin(record, keys):
    found = records.read(records.parsed(json.dumps(record)), keys)
    if isinstance(found, Passage):
        try:
            found.text.encode()
        except (AttributeError, UnicodeEncodeError):
            return None
    return found


def check(record, keys):
    wanted, found = by_the_package(record, keys), by_the_twin(record, keys)
    if isinstance(wanted, tuple):
        assert found is None, wanted
    elif isinstance(wanted, Dialogue):
        assert isinstance(found, Talk) and Dialogue(*found) == wanted
    elif isinstance(wanted, str):
        assert (found.text, found.spans) == (wanted, None)
    else:
        assert found[:2] == (wanted.text, wanted.loss_spans)
        assert found.weight == wanted.record.get("weight")


@settings(max_examples=400, deadline=None)
@given(made, asked)
def test_any_record_is_to_the_twin_what_it_is_to_the_package(record, keys):
    check(record, keys)


@pytest.mark.campaign
@settings(max_examples=20_000, deadline=None)
@given(made, asked)
def test_any_of_many_records_is_to_the_twin_what_it_is_to_the_package(record, keys):
    check(record, keys)


@pytest.mark.parametrize("format", ["auto", "alpaca", "messages"])
@pytest.mark.parametrize("text_key", ["text", "body"])
def test_rows_have_the_sizes_that_the_package_chooses_by(tmp_path, format, text_key):
    rows = {
        "text": ["né", None, None, "t"],
        "messages": [None, [{"role": "user", "content": "q"}] * 3, None, None],
        "instruction": ["a", "bb", None, "é"],
        "output": [None, "x", "yyyy", ""],
        "prompt": ["only a prompt"] * 4,
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    sizes = {}

    class Noted(Choice):
        def __call__(self, file, positions, given, *others):
            sizes.update(zip(positions.tolist(), given.tolist(), strict=True))
            return super().__call__(file, positions, given, *others)

    list(
        read(
            part_of(tmp_path / "a.parquet"),
            text_key,
            Noted(np.uint64(1), 1 << 31),
            fields=Fields(format=format),
        )
    )
    source = {
        "files": [("a.parquet", (tmp_path / "a.parquet").stat().st_size, 1)],
        "prefix": str(tmp_path),
        "format": "auto",
        "step_bytes": 1,
        "keys": Keys(text_key, format=format),
    }
    assert reading.sizes(source, 0, 0, reading.TextReader(True, lambda talk: ())) == sorted(
        sizes.items()
    )
