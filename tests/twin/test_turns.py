"""The twin finds turns by another way than the build, and gives the same; what the build says
wrongly it does not repeat."""

import random
from dataclasses import replace

import pytest

from packprep.conversations.chat_template import compile_template
from packprep.conversations.supervision import conversation, rendered_turns
from packprep.conversations.turns import Turns
from packprep.recipe import DocumentKeys
from tests.conversations import chats_made as chats
from tests.twin.check import dialogue_of
from tests.twin.records import Talk
from tests.twin.turns import Template, text_of_talk

pytestmark = pytest.mark.long

TEMPLATES = {
    name: getattr(chats, name)
    for name in (
        "CHATML",
        "LLAMA3",
        "GENERATION",
        "HOISTED",
        "FORGETTING",
        "THINKING",
        "CHANNELS",
        "HOISTED_LAST",
        "ENDED",
        "THOUGHT_FIRST",
    )
}
WITH_TOOLS = ("THINKING", "CHANNELS", "HOISTED_LAST")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a place", "parameters": {}},
    }
]
HEAD = "{%- set bos_token = '<s>' %}{%- set eos_token = '</s>' %}"


def talks(name, count):
    chance = random.Random(name)
    # HOISTED_LAST writes no reasoning, and no system message before an answer: such talks are refused.
    with_system, with_thoughts = (0.1, 0.1) if name == "HOISTED_LAST" else (0.4, 0.3)
    words = ("fine", "Zürich", "数据", "\n\n", "🙂", "don't", "<b>", "{{x}}", "12", "yes", "no")

    def said():
        return " ".join(chance.choices(words, k=chance.randint(1, 6))).strip() or "so"

    for _ in range(count):
        with_tools = name in WITH_TOOLS and chance.random() < 0.5
        messages = [{"role": "system", "content": said()}] if chance.random() < with_system else []
        for _ in range(chance.randint(1, 4)):
            messages.append({"role": "user", "content": said()})
            if with_tools and chance.random() < 0.6:
                call = {
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"place": said(), "n": 3}},
                }
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "content": said()})
            answer = {"role": "assistant", "content": said()}
            messages.append(
                {**answer, "reasoning_content": said()}
                if chance.random() < with_thoughts
                else answer
            )
        train = tuple(chance.choice([None, None, None, True, False]) for _ in messages)
        weights = tuple(chance.choice([1.0, 1.0, 0.5, 0.0]) for _ in messages)
        yield Talk(messages, TOOLS if with_tools else None, {}, train, weights)


def in_parts(talk, chance):
    """Some contents as parts with marks."""
    parts, messages = [], []
    for message in talk.messages:
        if message.get("tool_calls") or not message["content"] or chance.random() < 0.5:
            messages.append(message)
            parts.append(())
            continue
        thought = chance.choice(["", "", "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n"])
        if message["role"] != "assistant" or "reasoning_content" in message:
            thought = ""
        texts = [text for text in (thought, message["content"], " so", "and on") if text]
        content = [{"type": "text", "text": text} for text in texts]
        messages.append({**message, "content": content})
        parts.append(
            tuple((chance.choice([None, True, False]), chance.choice([1.0, 0.5])) for _ in texts)
        )
    return talk._replace(messages=messages, parts=tuple(parts))


def twin_s(source, find, **documents):
    defaults = {
        "chat_template_kwargs": None,
        "trained_roles": ["assistant"],
        "trained_turns": "all",
        "train_on_tool_calls": True,
        "train_reasoning": True,
        "train_empty_reasoning": True,
    }

    def render(messages, tools, variables, prompt, around):
        return compile_template(source, "2026-01-01").render(
            messages, prompt, around, tools, variables
        )

    return Template(source, render, find, {**defaults, **documents})


def finding(source, **documents):
    def find(talk):
        found = rendered_turns(dialogue_of(talk), source, settings(**documents))
        return found if isinstance(found, Turns) else None

    return find


def settings(**documents):
    documents = {
        key: tuple(value) if isinstance(value, list) else value for key, value in documents.items()
    }
    return replace(DocumentKeys(template_date="2026-01-01"), **documents)


def united(spans):
    found = []
    for begin, end, weight in spans:
        if found and found[-1][1:] == (begin, weight):
            begin = found.pop()[0]
        found.append((begin, end, weight))
    return found


@pytest.mark.parametrize(
    "documents",
    [
        {},
        {"trained_turns": "last"},
        {"train_on_tool_calls": False},
        {"train_reasoning": False},
        {"train_empty_reasoning": False},
        {"trained_roles": ["assistant", "user"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_both_find_the_same_turns(name, documents):
    source = HEAD + TEMPLATES[name]
    places = taken = used = 0
    chance = random.Random(f"parts {name}")
    plain = list(talks(name, 12))
    for talk in [*plain, *(in_parts(talk, chance) for talk in plain)]:
        built = conversation(dialogue_of(talk), source, settings(**documents))
        found = text_of_talk(talk, twin_s(source, finding(source, **documents), **documents))
        if found is None:
            assert isinstance(built, tuple)
            continue
        text, of_build = found
        weights = built.weights or [1.0] * len(built.spans)
        spans = [(*span, weight) for span, weight in zip(built.spans, weights, strict=True)]
        assert (text.text, united(text.spans), text.strings) == (
            built.text,
            spans,
            list(built.strings),
        )
        assert (*text.blocks,) == built.blocks
        assert (*text.boundaries,) == built.boundaries and (*text.roles,) == built.roles
        assert text.system_end == built.system_end
        places += len(built.spans) + len(built.boundaries)
        taken += of_build
        used += 1
    assert used >= 3 and taken <= places // 20


@pytest.mark.parametrize("name", ["CHATML", "GENERATION", "FORGETTING", "THINKING"])
def test_what_the_build_says_wrongly_is_not_repeated(name):
    source = HEAD + TEMPLATES[name]
    messages = [
        {"role": role, "content": said}
        for role, said in (
            ("user", "one"),
            ("assistant", "two <b>"),
            ("user", "three"),
            ("assistant", "four"),
        )
    ]
    talk = Talk(messages, None, {}, (None,) * 4, (1.0,) * 4)
    right, taken = text_of_talk(talk, twin_s(source, finding(source)))
    assert taken == 0 and len(right.spans) == 2

    def wrong(found):
        first, last = found.trained
        shifted = {k: at + 1 for k, at in found.begins.items()}
        yield found._replace(trained=[(first[0] - 1, *first[1:]), last])
        yield found._replace(trained=[(first[0], first[1] - 1, 1), last])
        yield found._replace(trained=[last])
        yield found._replace(trained=[first])
        yield found._replace(trained=[(0, found.begins[1], 0), first, last])
        yield found._replace(begins=shifted)

    for made in wrong(finding(source)(talk)):
        assert text_of_talk(talk, twin_s(source, lambda _, made=made: made))[0] == right


@pytest.mark.parametrize(
    "source", [chats.LAST_LEFT_OUT, chats.LAST_LEFT_OUT.replace("<think>", "")]
)
def test_what_follows_an_answer_that_is_left_out_at_the_end_does_not_begin_with_it(source):
    messages = chats.turns("q", "a", "q", "", "q", "b")
    talk = Talk(messages, None, {}, (None,) * 6, (1.0,) * 6)
    built = conversation(dialogue_of(talk), source, settings())
    text, taken = text_of_talk(talk, twin_s(source, finding(source)))
    assert [text.text[begin:end] for begin, end, _ in text.spans] == ["a</>", "</>", "b</>"]
    assert (*text.boundaries,) == built.boundaries and (*text.roles,) == built.roles and taken <= 2


def test_an_answer_to_a_trained_message_that_says_nothing_is_trained():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = Talk(
        chats.turns("", "answer", "more", "last"), None, {}, (True, None, None, None), (1.0,) * 4
    )
    built = conversation(dialogue_of(talk), source, settings())
    text, _ = text_of_talk(talk, twin_s(source, finding(source)))
    assert united(text.spans) == [(*span, 1.0) for span in built.spans] and built.spans[0] == (0, 6)


def test_where_renderings_do_not_tell_the_build_s_word_is_taken_and_counted():
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    talk = Talk(messages, None, {}, (None,) * 2, (1.0,) * 2)
    told = Turns("user:Q;assistant:A;", [(17, 19, 1)], {1: 7}, 0)
    text, taken = text_of_talk(talk, twin_s("{{ raise_exception('no') }}", lambda _: told))
    assert (text.spans, text.boundaries, taken) == ([(17, 19, 1.0)], [7], 2)
