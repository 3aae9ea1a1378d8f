"""packprep.conversations.parts: which characters of a message are trained otherwise than the
message."""

import random
import re
from dataclasses import replace

import pytest

from packprep.conversations.supervision import conversation
from packprep.recipe import DocumentKeys
from tests.conversations import chats_made as chats

USER = {"role": "user", "content": "q"}
IN_PARTS = chats.CHATML.replace(
    "message['content']",
    "(message.content if message.content is string else"
    " message.content | map(attribute='text') | join)",
)
ITERATED = """\
{%- for m in messages %}
    {{- '<|' + m.role + '|>' }}
    {%- if m.content is string %}{{ m.content }}
    {%- else %}{% for part in m.content %}{{ '[' + part.text | trim + ']' }}{% endfor %}{% endif %}
    {{- '<|end|>' }}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt else '' }}
"""
# As DeepSeek R1: the prompt begins the reasoning.
PROMPT_THINKS = chats.CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")


def read(template, messages, **settings):
    keys = replace(DocumentKeys(template_date="2026-01-01"), **settings)
    return conversation(chats.said(messages), template, keys)


def trained(template, messages, **settings):
    found = read(template, messages, **settings)
    assert not isinstance(found, tuple), found
    texts = [found.text[begin:end] for begin, end in found.spans]
    return list(zip(texts, found.weights, strict=True)) if found.weights else texts


def answer(content, reasoning=None):
    message = {"role": "assistant", "content": content}
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def part(text, **marks):
    return {"type": "text", "text": text, **marks}


def test_reasoning_is_not_trained_with_its_tags():
    def without(template, *messages):
        return trained(template, [USER, *messages], train_reasoning=False)

    in_tags = answer("<think>\nhm\n</think>\n\na")
    assert without(chats.THINKING, answer("x", "oh"), USER, answer("a", "hm\n")) == [
        "x<|im_end|>\n",
        "a<|im_end|>\n",
    ]
    for template, end in (
        (chats.THINKING, "<|im_end|>\n"),
        (chats.CHATML, "<|im_end|>\n"),
        (chats.GENERATION, "<|end|>"),
        (chats.FORGETTING, "</>"),
    ):
        assert without(template, in_tags) == [f"a{end}"]
    call = chats.calls(("f", {}), content="", reasoning_content="I call f")
    assert without(chats.THINKING, call) == [
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n'
    ]
    assert without(chats.CHANNELS, answer("a", "hm")) == [
        "<|start|>assistant<|channel|>final<|message|>a<|return|>"
    ]
    named = chats.CHANNELS.replace("<|channel|>analysis", " to=self")
    assert without(named, answer("a", "hm")) == [
        "<|start|>assistant<|channel|>final<|message|>a<|return|>"
    ]
    assert without(chats.CHANNELS, answer("<think>hm</think>a")) == [
        "<|channel|>final<|message|>",
        "a<|return|>",
    ]
    prompted = PROMPT_THINKS.replace(
        "'\\n' + message", "'\\n' + ('<think>\\n' if loop.last else '') + message"
    )
    assert without(prompted, answer("hm\n</think>\n\na")) == ["a<|im_end|>\n"]
    assert without(chats.CHATML, answer("no reasoning")) == ["no reasoning<|im_end|>\n"]
    assert without(chats.CHATML, answer("<think>\n\n</think>\n\na")) == [
        "<think>\n\n</think>\n\na<|im_end|>\n"
    ]


def test_tags_without_a_reasoning_are_not_trained():
    def without(template, *messages):
        return trained(template, [USER, *messages], train_empty_reasoning=False)

    written, real = answer("<think>\n\n</think>\n\na"), answer("a", "hm")
    assert without(chats.THINKING, answer("a")) == ["a<|im_end|>\n"]
    assert without(chats.THINKING, real) == ["<think>\nhm\n</think>\n\na<|im_end|>\n"]
    assert without(chats.CHATML, written) == ["a<|im_end|>\n"]
    assert without(chats.GENERATION, written, USER, answer("b")) == ["a<|end|>", "b<|end|>"]
    header = chats.GENERATION.replace("m.content + '<|end|>'", "'\\n<think></think>' + m.content")
    assert without(header, answer("a")) == ["\n", "a"]
    quoted = answer("Write <think></think> first.")
    assert without(chats.CHATML, quoted) == ["Write <think></think> first.<|im_end|>\n"]
    assert without(chats.CHATML, answer("<p></p>")) == ["<p></p><|im_end|>\n"]


@pytest.mark.parametrize(
    "template, message, detail",
    [
        (chats.CHATML, answer("<think>no end"), "<think> and </think> do not pair"),
        (chats.CHATML, answer("no begin</think>a"), "<think> and </think> do not pair"),
        (chats.CHATML, answer("use </think>", "hm"), "<think> and </think> do not pair"),
        (
            "{% for m in messages %}<a>{{ m.reasoning_content }}<end>{{ m.content }}{% endfor %}",
            answer("", "hm"),
            "the end of the reasoning of message 1 in the text",
        ),
        (
            chats.THINKING.replace("thought.strip('\\n')", "thought | upper"),
            answer("a", "hm"),
            "the position of the reasoning of message 1 in the text",
        ),
    ],
)  # fmt: skip
def test_where_the_reasoning_is_not_certain_a_document_is_rejected(template, message, detail):
    if "reasoning_content" in message and template == chats.CHATML:
        template = template.replace(
            "message['content']", "message.reasoning_content ~ message.content"
        )
    reason, found = read(template, [USER, message], train_reasoning=False)
    assert reason == "part_not_found" and detail in found


def qwen_chat(seed):
    chance = random.Random(seed)

    def said(words=("so", "né", "数据", "12", "a < b", "\n", "🙂")):
        return " ".join(chance.choices(words, k=chance.randint(1, 6))).strip() or "x"

    messages = []
    for _ in range(chance.randint(1, 4)):
        messages.append({"role": "user", "content": said()})
        if chance.random() < 0.3:
            call = chats.calls(("f", {"x": said()}), content=chance.choice(["", said()]))
            messages += [{**call, "reasoning_content": said()}, chats.result(said())]
        style = chance.randrange(3)
        messages.append(
            [answer(said()), answer(said(), said()), answer(f"<think>\n{said()}\n</think>\n\na")][
                style
            ]
        )
    return messages


@pytest.mark.parametrize("seed", range(6))
def test_what_is_trained_is_what_a_search_in_the_text_finds(seed):
    messages = qwen_chat(seed)
    turns = trained(chats.THINKING, messages)
    for settings, pattern in (
        ({"train_reasoning": False}, r"<think>\n(?!\n</think>).*?</think>\n\n"),
        ({"train_empty_reasoning": False}, r"<think>\n\n</think>\n\n"),
        ({"train_reasoning": False, "train_empty_reasoning": False}, r"<think>.*?</think>\n\n"),
    ):
        expected = [re.sub(pattern, "", turn, flags=re.DOTALL) for turn in turns]
        assert trained(chats.THINKING, messages, **settings) == expected


def test_parts_of_a_content_hold_for_their_own_characters():
    parts = [part("one "), part("two ", train=False), part("three", weight=0.5)]
    for template, end in (
        (chats.CHATML, "<|im_end|>\n"),  # takes no list
        (IN_PARTS, "<|im_end|>\n"),
        (chats.GENERATION, "<|end|>"),
    ):
        found = trained(template, [USER, {**answer(parts), "weight": 2}])
        assert found == [("one ", 2.0), ("three", 1.0), (end, 2.0)]
    assert trained(ITERATED, [USER, answer(parts)]) == [
        ("[one][", 1.0), ("][", 1.0), ("three", 0.5), ("]<|end|>", 1.0)
    ]  # fmt: skip
    for thought in ("<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n"):
        parts = [part(thought, train=False), part("a")]
        for template in (chats.THINKING, chats.CHATML, IN_PARTS):
            dropped = [USER, answer(parts), USER, answer(parts)]
            assert trained(template, dropped) == ["a<|im_end|>\n"] * 2
        kept = trained(
            chats.CHATML,
            [USER, answer([part(thought, train=True), part("a")])],
            train_reasoning=False,
        )
        assert kept == [thought + "a<|im_end|>\n"]


def test_a_part_says_more_than_its_message_and_the_recipe():
    parts = [part("one "), part("two", train=True, weight=2)]
    asked = {"role": "user", "content": parts}
    assert trained(chats.CHATML, [asked]) == [("two", 2.0)]
    assert trained(IN_PARTS, [asked, asked, answer("a")]) == [
        ("two", 2.0), ("two", 2.0), ("a<|im_end|>\n", 1.0)
    ]  # fmt: skip
    assert trained(IN_PARTS, [USER, {**answer(parts), "train": False}]) == [("two", 2.0)]
    weighed = {"role": "user", "content": [part("one", weight=3)]}
    assert trained(IN_PARTS, [weighed, answer("a")]) == ["a<|im_end|>\n"]
    last = [USER, answer([part("a"), part("b", train=True)]), USER, answer("c")]
    assert trained(chats.CHATML, last, trained_turns="last") == ["b", "c<|im_end|>\n"]


@pytest.mark.parametrize(
    "written",
    ["message.content[0].text", "message.content ~ message.content"],
)
def test_a_part_that_is_not_written_once_rejects_its_document(written):
    template = chats.CHATML.replace(
        "message['content']", f"(message.content if message.role == 'user' else {written})"
    )
    parts = [part("one "), part("two ", train=False)]
    reason, detail = read(template, [USER, answer(parts)])
    assert (
        reason == "part_not_found" and "does not write part 1 of message 1 exactly once" in detail
    )


def test_each_text_of_a_document_trains_its_own_parts():
    parts = [part("one "), part("two", train=False)]
    asked = {"role": "user", "content": [part("q1 "), part("q2", train=True)]}
    messages = [asked, {**answer(parts), "reasoning_content": "hm"}, USER, answer("b", "oh")]
    found = read(chats.THINKING, messages, trained_turns="each", train_reasoning=False)
    assert [[text.text[a:b] for a, b in text.spans] for text in found.parts] == [
        ["q2", "one ", "<|im_end|>\n"],
        ["b<|im_end|>\n"],
    ]
