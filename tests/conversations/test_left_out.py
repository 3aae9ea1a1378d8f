"""What a record says is written by its template, or the record is rejected by name."""

import json
from dataclasses import replace

import pytest

from packprep.conversations.chat_template import (
    LeftOut,
    TemplateRefusal,
    compile_template,
    find_template,
)
from packprep.conversations.layouts import read_layout
from packprep.conversations.supervision import conversation
from packprep.conversations.turns import find_turns
from packprep.errors import RecipeError
from packprep.recipe import DocumentKeys
from packprep.sources.formats.batch import Supervision
from tests.conversations import chats_made as chats

TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 3}}}
CALLING = [
    {"role": "user", "content": "3 by 4"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "twelve"},
]
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
WITH_CALLS = PLAIN.replace(
    ";{%",
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %};{%",
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + WITH_CALLS


def text_of(template, messages, tools=None):
    dialogue = read_layout(
        Supervision(None, None, {"messages": messages, "tools": tools}, "messages")
    )
    settings = replace(DocumentKeys(), trained_turns="all")
    return find_turns(compile_template(template), dialogue, {}, settings).text


def reject_of(**record):
    layout = "messages" if "messages" in record else "prompt_completion"
    return read_layout(Supervision(None, None, record, layout))


@pytest.mark.parametrize(
    "template, messages, tools, left_out",
    [
        (PLAIN, CALLING, None, "tool_calls"),
        (WITH_CALLS, CALLING, [TOOL], "tools"),
        (WITH_CALLS + "{% if tools %}{% endif %}", CALLING, [TOOL], "tools"),
        (
            PLAIN,
            [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "reasoning_content": "hm"},
            ],
            None,
            "reasoning_content",
        ),
        (
            PLAIN.replace("in messages", "in messages if m.role != 'system'"),
            chats.turns("q", "a", system="be brief"),
            None,
            "the content of message 0, of role 'system'",
        ),
    ],
)
def test_what_a_template_does_not_write_is_named(template, messages, tools, left_out):
    with pytest.raises(LeftOut, match=f"does not write {left_out}"):
        text_of(template, messages, tools)


def test_results_of_tools_that_only_an_answer_quotes_are_left_out():
    without_tools = PLAIN.replace("in messages", "in messages if m.role != 'tool'")
    for result, answer in (
        ("12", "It is 12."),
        ("The product is 12.", "I see: The product is 12."),
    ):
        messages = chats.turns("3 by 4", "Let me see.")
        messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": answer}]
        with pytest.raises(LeftOut, match="the content of message 2, of role 'tool'"):
            text_of(without_tools, messages)
        for written in (result, "x"):
            messages[2] = {"role": "tool", "content": written}
            assert f"tool:{written};" in text_of(PLAIN, messages)


@pytest.mark.parametrize(
    "message, left_out",
    [
        ({"content": "", "function_call": {"name": "f"}}, "'function_call' of message 1"),
        ({"content": None, "refusal": "No."}, "'refusal' of message 1"),
        ({"content": "a", "images": ["a.png"]}, "'images' of message 1"),
        ({"value": "a"}, "'value' of message 1"),
    ],
)
def test_fields_that_stand_for_a_content_are_written_or_named(message, left_out):
    messages = [*chats.turns("q"), {"role": "assistant", **message}, *chats.turns("r", "b")]
    for template in (PLAIN, PLAIN.replace("m.content", "(m.role + m.content)")):
        with pytest.raises(LeftOut, match=f"does not write {left_out}"):
            text_of(template, messages)
    (field,) = message.keys() - {"content"}
    assert text_of(PLAIN.replace("m.content", f"(m.content or '') ~ m.{field}"), messages)
    assert text_of("{% for m in messages %}{{ m | tojson }};{% endfor %}", messages)


def test_unread_and_untrained_parts_are_described():
    messages = [
        {"role": "user", "content": "q", "id": "1", "mask": True, "note": ""},
        {"role": "model", "content": "a"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{'a': 1}"}]},
        {"role": "assistant", "content": "<think>hm</think>b"},
    ]
    kwargs = {"enable_thinking": False, "style": None, "tone": "mild"}

    def parts_of(template):
        record = {"messages": messages, "chat_template_kwargs": kwargs}
        given = Supervision(None, None, record, "messages")
        return list(conversation(given, template).ignored())

    written = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ m.tool_calls or '' }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert parts_of(written) == [
        "'mask' of a message",
        "'enable_thinking' of chat_template_kwargs",
        "'tone' of chat_template_kwargs",
        "the role 'model', which is not trained",
        "reasoning, although enable_thinking is false",
        "arguments of a tool call that are a text, but not the JSON of an object",
    ]
    with_variables = "{{ tone }}{{ enable_thinking }}" + written
    assert not any("kwargs" in part for part in parts_of(with_variables))
    as_json = written.replace("m.content or ''", "m | tojson")
    assert not any("mask" in part for part in parts_of(as_json))


def test_what_a_template_writes_is_not_rejected():
    assert "multiply" in text_of(WITH_TOOLS, CALLING, [TOOL])
    all_fields = "{% for m in messages %}{{ m | tojson }};{% endfor %}"
    assert '"tool_calls"' in text_of(all_fields, CALLING)
    forgetting = PLAIN + "{{ messages[-1].reasoning_content or '' }}"
    thought = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert "hm" not in text_of(forgetting, [chats.turns("q")[0], thought, *chats.turns("p", "b")])


@pytest.mark.parametrize("arguments", ['{"a": 3}', ' {"a": 3}', '{"a": "é"}'])
def test_arguments_that_are_a_json_text_are_the_object_where_a_template_expects_one(arguments):
    call = {"function": {"name": "multiply", "arguments": arguments}}
    messages = [CALLING[0], {**CALLING[1], "tool_calls": [call]}, *CALLING[2:]]
    as_object = {"function": {"name": "multiply", "arguments": json.loads(arguments)}}
    expected = [CALLING[0], {**CALLING[1], "tool_calls": [as_object]}, *CALLING[2:]]
    assert text_of(WITH_CALLS, messages) == text_of(WITH_CALLS, expected)
    as_text = WITH_CALLS.replace("c.function.arguments | tojson", "c.function.arguments")
    assert arguments in text_of(as_text, messages)
    items = WITH_CALLS.replace("c.function.arguments | tojson", "c.function.arguments.items()|list")
    assert text_of(items, messages) == text_of(items, expected)
    refusing = WITH_CALLS.replace(
        "{{ c.function.arguments | tojson }}",
        "{% if c.function.arguments is string %}{{ raise_exception('an object is wanted') }}"
        "{% endif %}{{ c.function.arguments | tojson }}",
    )
    assert refusing != WITH_CALLS
    assert text_of(refusing, messages) == text_of(refusing, expected)


def test_blank_arguments_are_an_empty_object_where_a_template_expects_one():
    call = {"function": {"name": "multiply", "arguments": ""}}
    messages = [CALLING[0], {**CALLING[1], "tool_calls": [call]}, *CALLING[2:]]
    assert "multiply{};" in text_of(WITH_CALLS, messages)
    as_text = WITH_CALLS.replace("c.function.arguments | tojson", "c.function.arguments")
    assert "multiply;" in text_of("{{ '\"\"' }}" + as_text, messages)


def test_a_list_of_parts_is_named_if_the_template_accepts_only_texts():
    parts = [{"type": "text", "text": "q"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]
    with pytest.raises(TemplateRefusal, match="accepts only a text as the content"):
        text_of(PLAIN.replace("m.content", "('' + m.content)"), messages)


def test_a_blank_reasoning_gives_way_to_another():
    thought = {"role": "assistant", "content": "a", "thinking": " ", "reasoning": "hm"}
    for field in ("thinking", "reasoning_content"):
        template = PLAIN.replace("m.content", f"(m.{field} or '') + m.content")
        assert "assistant:hma" in text_of(template, [*chats.turns("q"), thought])


def test_other_texts_in_arguments_stay_texts():
    call = {"function": {"name": "multiply", "arguments": "not {json"}}
    messages = [CALLING[0], {**CALLING[1], "tool_calls": [call]}, *CALLING[2:]]
    assert '"not {json"' in text_of(WITH_CALLS, messages)


def test_a_system_beside_messages_is_the_first_message():
    for record in (
        {"messages": chats.turns("q", "a")},
        {"prompt": chats.turns("q"), "completion": chats.turns("q", "a")[1:]},
    ):
        dialogue = reject_of(**record, system="be brief")
        assert dialogue.messages[0] == {"role": "system", "content": "be brief"}
    twice = reject_of(messages=chats.turns("q", "a", system="S"), system="T")
    assert twice[0] == "bad_messages" and "has a system" in twice[1]
    of_texts = reject_of(prompt="q", completion="a", system="S")
    assert of_texts[0] == "bad_messages" and "system beside a prompt" in of_texts[1]


@pytest.mark.parametrize(
    "field, value",
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("images", ["a.png"]),
        ("videos", ["a.mp4"]),
        ("audios", ["a.wav"]),
        ("train_detail", [{}]),
        ("loss_mask", [1]),
        ("loss_weight", 0.5),
    ],
)
def test_a_field_beside_messages_that_is_not_read_is_named(field, value):
    reason, detail = reject_of(messages=chats.turns("q", "a"), **{field: value})
    assert reason == "bad_messages" and repr(field) in detail
    assert not isinstance(reject_of(messages=chats.turns("q", "a"), **{field: []}), tuple)


@pytest.mark.parametrize(
    "marks, train, weight",
    [
        ({"training": False}, False, 1.0),
        ({"loss": 0}, False, 1.0),
        ({"loss": True, "train": True}, True, 1.0),
        ({"loss_weight": 0.5}, None, 0.5),
    ],
)
def test_other_names_of_train_and_weight_are_read(marks, train, weight):
    user, answer = chats.turns("q", "a")
    dialogue = reject_of(messages=[user, {**answer, **marks}, *chats.turns("p", "b")])
    assert (dialogue.train[1], dialogue.weights[1]) == (train, weight)
    assert dialogue.messages[1] == answer


@pytest.mark.parametrize(
    "marks, words",
    [
        ({"train_detail": [{"train": False}]}, "'train_detail'"),
        ({"masked": True}, "'masked'"),
        ({"train": True, "training": False}, "train and training contradict"),
        ({"weight": 1, "loss_weight": 0}, "weight and loss_weight contradict"),
        ({"training": "no"}, "training is a text; true or false is wanted"),
        ({"loss_weight": -1}, "loss_weight is below 0"),
    ],
)
def test_marks_that_cannot_be_read_are_named(marks, words):
    user, answer = chats.turns("q", "a")
    reason, detail = reject_of(messages=[user, {**answer, **marks}])
    assert reason == "bad_messages" and words in detail


def tokenizer_with(folder, chat_template, more=()):
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    for name, text in more:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return find_template("", folder.parent, folder.name)


def test_conversations_with_tools_take_the_template_of_that_name(tmp_path):
    default, tool_use = "D" + PLAIN + "\n", "U" + WITH_TOOLS + "\n"
    named = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
    templates = [
        tokenizer_with(tmp_path / "list", named),
        tokenizer_with(tmp_path / "mapping", {"default": default, "tool_use": tool_use}),
        tokenizer_with(
            tmp_path / "files",
            None,
            [
                ("chat_template.jinja", default),
                ("additional_chat_templates/tool_use.jinja", tool_use),
            ],
        ),
    ]
    talk = chats.turns("q", "a")
    for template in templates:
        assert text_of(template, talk) == text_of(default, talk)
        assert text_of(template, CALLING, [TOOL]) == text_of(tool_use, CALLING, [TOOL])
        assert text_of(template, talk, []) == text_of(tool_use, talk, [])


def test_named_templates_of_which_one_marks_what_is_trained_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="only one of .* has"):
        tokenizer_with(tmp_path / "t", {"default": PLAIN, "tool_use": chats.GENERATION})


def test_parts_that_a_template_drops_are_named_where_their_text_stands_elsewhere():
    only_texts = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else '' }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    question = [
        {"type": "text", "text": "Name the capital of France"},
        {"type": "text", "text": "?"},
    ]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "Do you mean today? Paris."},
    ]
    reason, detail = conversation(
        Supervision(None, None, {"messages": messages}, "messages"), only_texts
    )
    assert reason == "template_error" and "leaves the list of parts of message 0 out" in detail
