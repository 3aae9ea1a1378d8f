"""packprep.conversations.layouts: what a template gets of a record of each layout, or why the record
cannot be used."""

import json

import pytest

from packprep.conversations.layouts import Dialogue, Mark, read_layout
from packprep.sources.formats.batch import Supervision
from tests.conversations import chats_made as chats

CALL = {
    "type": "function",
    "id": "c1",
    "function": {"name": "add", "arguments": {"a": 1, "b": None}},
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"default": None}}}}]


def read(layout, **record):
    return read_layout(Supervision(None, None, record, layout))


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


def marked(text, **marks):
    return {"type": "text", "text": text, **marks}


QA = [turn("user", "q"), turn("assistant", "a")]


def test_messages_reach_the_template_as_they_are_but_for_nulls_train_and_weight():
    messages = [
        turn("system", "s", name=None),
        turn("user", [{"type": "text", "text": "q"}], train=None),
        turn("assistant", None, tool_calls=[CALL], reasoning_content="r", train=False),
        turn("tool", "3", tool_call_id="c1", weight=None),
        {"role": "assistant", "thinking": "t", "tool_calls": [CALL], "weight": 0.5},
        turn("assistant", "a", train=True, weight=2, tool_calls=[]),
    ]
    found = read(
        "messages",
        messages=messages,
        tools=TOOLS,
        chat_template_kwargs={"enable_thinking": False},
        weight=3,
    )
    assert found == Dialogue(
        [
            turn("system", "s"),
            turn("user", [{"type": "text", "text": "q"}]),
            turn("assistant", None, tool_calls=[CALL], reasoning_content="r"),
            turn("tool", "3", tool_call_id="c1"),
            {"role": "assistant", "thinking": "t", "tool_calls": [CALL]},
            turn("assistant", "a"),
        ],
        TOOLS,
        {"enable_thinking": False},
        (None, None, False, None, None, True),
        (3.0, 3.0, 3.0, 3.0, 1.5, 6.0),
        weight=3.0,
    )
    assert "train" in messages[5], "the record is left as it is"


def test_without_anything_beside_them_messages_are_trained_as_the_recipe_says():
    assert read("messages", messages=QA) == Dialogue(QA, None, {}, (None, None), (1.0, 1.0))
    assert read("messages", messages=QA, tools="", chat_template_kwargs="").tools is None


def test_tools_and_kwargs_may_be_json():
    found = read("messages", messages=QA, tools=json.dumps(TOOLS), chat_template_kwargs='{"x": 1}')
    assert (found.tools, found.kwargs) == (TOOLS, {"x": 1})
    assert read("messages", messages=QA, tools=[]).tools == []


def test_sharegpt_s_speakers_have_roles():
    conversations = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}', "weight": 0},
        {"from": "observation", "value": "3"},
        {"from": "function_call", "value": "I call nobody"},
        {"from": "function_call", "value": json.dumps([CALL])},
        {"from": "GPT", "value": "a", "loss": False},
        {"from": "gpt", "value": "b", "loss": 1, "weight": 1},
    ]
    found = read("sharegpt", conversations=conversations, system="s", tools="[]")
    assert found.messages == [
        turn("system", "s"),
        turn("user", "q"),
        turn(
            "assistant",
            None,
            tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        ),
        turn("tool", "3"),
        turn("assistant", "I call nobody"),
        turn("assistant", None, tool_calls=[{k: CALL[k] for k in ("type", "function")}]),
        turn("assistant", "a"),
        turn("assistant", "b"),
    ]
    assert found.train == (None, None, None, None, None, None, False, True)
    assert found.weights == (1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert read("sharegpt", conversations=QA).messages == QA
    assert (
        read(
            "messages", messages=[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
        ).messages
        == QA
    )


def test_alpaca_s_input_follows_its_instruction():
    assert read("alpaca", instruction="q", output="a").messages == QA
    assert read("alpaca", instruction="q", input="", output="a").messages == QA
    found = read(
        "alpaca", instruction="q", input="i", output="a", system="s", history=[["p", "o"]], weight=2
    )
    assert found.messages == [turn("system", "s"), *chats.turns("p", "o", "q\n\ni", "a")]
    assert found.weights == (2.0,) * 5


def test_of_a_prompt_and_its_completion_the_completion_is_trained():
    assert read("prompt_completion", prompt="né", completion=" a", weight=2) == Supervision(
        "né a", [[2, 4]], {"weight": 2}
    )
    found = read(
        "prompt_completion", prompt=chats.turns("q", "a", "r"), completion=[turn("assistant", "b")]
    )
    assert found.messages == chats.turns("q", "a", "r", "b")
    assert found.train == (False, False, False, None)
    asked = [turn("user", "q"), turn("assistant", "a", train=True), turn("user", "r")]
    assert (
        read("prompt_completion", prompt=asked, completion=[turn("assistant", "b")]).train[1]
        is True
    )


@pytest.mark.parametrize(
    "layout, record, detail",
    [
        ("messages", {"messages": "hello"}, "messages is a text; a list of messages"),
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {}, "messages is null or missing"),
        ("messages", {"messages": [1]}, "message 0 is a number"),
        ("messages", {"messages": chats.turns("q")}, "no message is the assistant's"),
        ("messages", {"messages": [*QA[:1], turn("assistant", "a", train=False)]}, "no message is the assistant's"),
        ("messages", {"messages": [*QA, {"content": "x"}]}, "message 2: role is null or missing"),
        ("messages", {"messages": [*QA, turn(3, "x")]}, "message 2: role is a number"),
        ("messages", {"messages": [*QA, turn("user", None)]}, "message 2 has no content"),
        ("messages", {"messages": [*QA, {"role": "assistant"}]}, "message 2 has no content"),
        ("messages", {"messages": [*QA, turn("user", 3)]}, "message 2: content is a number"),
        ("messages", {"messages": [*QA, turn("user", {"text": "a"})]}, "message 2: content is an object"),
        ("messages", {"messages": [*QA, turn("user", [{"type": "image_url"}])]}, "a part of type 'image_url'"),
        ("messages", {"messages": [*QA, turn("user", [{"text": "x"}])]}, "a part without a type"),
        ("messages", {"messages": [*QA, turn("user", ["x"])]}, "a part without a type"),
        ("messages", {"messages": [*QA, turn("user", [{"type": "text"}])]}, "text of a part is null or missing"),
        ("messages", {"messages": [*QA, turn("user", "x", train=1)]}, "message 2: train is a number"),
        ("messages", {"messages": [*QA, turn("user", "x", weight=True)]}, "message 2: weight is true or false"),
        ("messages", {"messages": [*QA, turn("user", "x", weight=-1)]}, "message 2: weight is below 0"),
        ("messages", {"messages": [*QA, turn("user", "x", weight=10**400)]}, "message 2: weight is not finite"),
        ("messages", {"messages": [*QA, turn("user", [marked("x", train=1)])]}, "message 2: part 0: train is a number"),
        ("messages", {"messages": [*QA, turn("user", [marked("x", weight=-1)])]}, "message 2: part 0: weight is below 0"),
        ("messages", {"messages": [*QA, turn("user", [marked("x", masked=True)])]}, "message 2: part 0 has 'masked', which"),
        ("messages", {"messages": [*QA, turn("user", [marked(" ", train=False)])]}, "message 2: part 0 has a mark and is blank"),
        ("messages", {"messages": [*QA, turn("user", [marked("x", weight=9e30)], weight=9e30)]}, "part 0: its weight times"),
        ("messages", {"messages": QA, "weight": float("nan")}, "the document: weight is not finite"),
        ("messages", {"messages": QA, "weight": "1"}, "the document: weight is a text"),
        ("messages", {"messages": [turn("user", "x", weight=1e30), *QA], "weight": 1e30}, "message 0: its weight times"),
        ("messages", {"messages": [*QA, turn("tool", "x", tool_call_id=3)]}, "message 2: tool_call_id is a number"),
        ("messages", {"messages": [*QA, turn("assistant", None, tool_calls="x")]}, "message 2: tool_calls is a text"),
        ("messages", {"messages": [*QA, turn("assistant", None, tool_calls=[{}])]}, "message 2: tool call 0 has no function"),
        ("messages", {"messages": [*QA, turn("assistant", "", thinking=[])]}, "message 2: thinking is a list"),
        ("messages", {"messages": [*QA, turn("assistant", "", reasoning=[])]}, "message 2: reasoning is a list"),
        ("messages", {"messages": [*QA, turn("assistant", "a", thinking="x", reasoning="y")]}, "thinking and reasoning contradict"),
        ("messages", {"messages": [*QA, turn("assistant", None, id="3")]}, "message 2 has no content"),
        ("messages", {"messages": [*QA, turn("assistant", None, tool_calls=[{"name": "f", "args": {}}])]}, "call 0 has 'args' instead of"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": '{"name": "f", "parameters": {"a": 1}}'}]}, "a call has 'parameters'; only"),
        ("messages", {"messages": QA, "tools": "add(a, b)"}, "tools is a text that is not JSON"),
        ("messages", {"messages": QA, "tools": "[" * 300}, "tools is a text that is not JSON"),
        ("messages", {"messages": QA, "tools": "\ud800"}, "tools is a text that is not JSON"),
        ("messages", {"messages": QA, "tools": ["add"]}, "tools is a list; a list of objects"),
        ("messages", {"messages": QA, "tools": {}}, "tools is an object; a list of objects"),
        ("messages", {"messages": QA, "chat_template_kwargs": 3}, "chat_template_kwargs is a number"),
        ("messages", {"messages": QA, "chat_template_kwargs": {"tools": 3}}, "chat_template_kwargs has tools"),
        ("sharegpt", {"conversations": [{"from": "né", "value": "x"}]}, "message 0 is from 'n\\xe9'; known are human"),
        ("sharegpt", {"conversations": [{"from": 3, "value": "x"}]}, "message 0 is from a number"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": 3}]}, "message 0: value is a number"),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, "message 0 has no content"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "x", "loss": "x"}]}, "message 0: loss is a text"),
        ("sharegpt", {"conversations": [turn("system", "s"), *QA], "system": "s"}, "take one of them away"),
        ("sharegpt", {"conversations": QA, "system": 3}, "system is a number"),
        ("alpaca", {"instruction": "q"}, "output is null or missing"),
        ("alpaca", {"instruction": "q", "output": "a", "input": 3}, "input is a number"),
        ("alpaca", {"instruction": "q", "output": "a", "history": [["q"]]}, "history is a list; a list of pairs"),
        ("prompt_completion", {"prompt": "q"}, "completion is null or missing: two texts or two lists"),
        ("prompt_completion", {"prompt": QA, "completion": "a"}, "prompt is a list and completion is a text"),
        ("prompt_completion", {"prompt": "q", "completion": "a", "tools": TOOLS}, "tools beside a prompt that is a text"),
        ("prompt_completion", {"prompt": QA, "completion": QA[:1]}, "no message is the assistant's"),
        ("prompt_completion", {"prompt": QA, "completion": []}, "completion is empty; a list of messages is wanted"),
        ("prompt_completion", {"prompt": [], "completion": [], "system": "s"}, "completion is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_record_is_said(layout, record, detail):
    reason, found = read(layout, **record)
    assert reason == "bad_messages" and detail in found and found.isascii() and len(found) <= 200, (
        found
    )


def test_marks_of_parts_do_not_reach_the_template():
    parts = [marked("x", train=True, loss=1), marked("y", weight=0.5), marked("z", weight=None)]
    found = read("messages", messages=[turn("user", parts), QA[1]], system="s", weight=2)
    assert found.messages[1] == turn("user", [marked("x"), marked("y"), marked("z")])
    assert found.parts == ((), (Mark(True), Mark(weight=0.5), Mark()), ())
    alone = read("messages", messages=[turn("user", parts)])
    assert alone.train == (None,) and alone.trains_part(0) and "train" in parts[0]


def test_one_message_has_to_be_of_a_trained_role():
    given = Supervision(None, None, {"messages": QA[:1]}, "messages")
    assert read_layout(given, ["user"]) == Dialogue(QA[:1], None, {}, (None,), (1.0,))
    assert read_layout(given, ["tool", "assistant"])[1].startswith(
        "no message is of documents.trained_roles"
    )


def test_texts_that_are_no_text_or_too_long_are_rejected(monkeypatch):
    assert read("prompt_completion", prompt="a", completion="\udc00")[0] == "lone_surrogate"
    monkeypatch.setattr("packprep.sources.formats.batch.MAX_DOCUMENT_BYTES", 3)
    assert read("prompt_completion", prompt="ab", completion="cd") == (
        "too_large",
        "4 bytes; at most 3 bytes",
    )
