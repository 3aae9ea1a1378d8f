"""packprep.conversations.markup: where messages begin, by the template's text between them."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.conversations import turns
from packprep.conversations.chat_template import compile_template
from packprep.conversations.layouts import Dialogue
from packprep.conversations.markup import Boundary, Markup
from packprep.conversations.placeholders import find_markup
from packprep.conversations.turns import find_turns
from packprep.recipe import DocumentKeys
from tests.conversations import chats_made as chats

TOKENS = "{% set bos_token = '<s>' %}{% set eos_token = '</s>' %}"
CALLING = chats.CHATML.replace(
    "message['content'] + '<|im_end|>'",
    "(message.content or '') + (message.tool_calls | tojson if message.tool_calls else '')"
    " + '<|im_end|>'",
)
# As Mistral: the tools stand before the last question, and not before the first one.
TOOLS_LAST = """\
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if loop.last %}{{- '[TOOLS]search[/TOOLS]' }}{% endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- else %}{{- m.content + '</s>' }}{% endif %}
{%- endfor %}
"""
TEMPLATES = {
    "chatml": chats.CHATML,
    "llama3": TOKENS + chats.LLAMA3,
    "thinking": chats.THINKING,
    "calling": CALLING,
    "hoisted": TOKENS + chats.HOISTED,
    "tools_last": TOOLS_LAST,
}


def markup_of(template):
    compiled = compile_template(template, "2026-01-01")
    return find_markup(partial(compiled.render, go_on=True), compiled.source)


def test_ends_and_heads_are_what_the_template_writes_around_messages():
    markup = markup_of(chats.CHATML)
    assert markup.prompt == "<|im_start|>assistant\n"
    assert markup.heads["user"] == "<|im_start|>user\n"
    assert markup.ends["assistant"][0] == "<|im_end|>\n"


def test_a_boundary_needs_an_end_and_a_head_next_to_each_other():
    markup = Markup({"user": ["<e>"], "assistant": ["<e>", "</c><e>"]}, {"user": "<u>"}, "<a>\n")
    assert markup.boundary("<e><u>", "assistant", "user") == Boundary(3, None)
    assert markup.boundary('"}</c><e><u>', "assistant", "user") == Boundary(9, None)
    assert markup.boundary("<e>today<u>", "assistant", "user") is None
    assert markup.boundary("<e><u>today", "assistant", "user") is None
    assert markup.boundary("<e><a>\n<think>\n", "user", "assistant") == Boundary(3, 7)
    assert markup.boundary("<e><a>\n<e><a>\n", "user", "assistant") is None
    assert markup.boundary("<e><a>\n", "tool", "assistant") is None


def test_an_end_without_text_counts_only_alone():
    markup = Markup({"user": [""], "assistant": ["", "</c>"]}, {"user": "<u>"}, "<a>")
    assert markup.boundary("<u>", "assistant", "user") == Boundary(0, None)
    assert markup.boundary("</c><u>", "assistant", "user") == Boundary(4, None)
    assert markup.boundary("[TOOLS]<u>", "assistant", "user") is None


def test_an_answer_follows_a_question_where_a_template_has_no_generation_prompt():
    markup = markup_of(TOOLS_LAST)
    assert markup.prompt == ""
    assert markup.boundary("[/INST]", "user", "assistant") == Boundary(7, 7)
    assert markup.boundary("[/INST]<think>", "user", "assistant") is None
    assert markup.boundary("</s>[INST]", "assistant", "user") == Boundary(4, None)
    assert markup.boundary("</s>[TOOLS]search[/TOOLS][INST]", "assistant", "user") is None


def answers_of(text, roles, strings, markup=None):
    markup = markup or markup_of(chats.CHATML)
    wanted = [role == "assistant" for role in roles]
    found = markup.answers(text, roles, wanted, strings)
    return None if found is None else [text[begin:end] for begin, end, _ in found]


def test_a_text_shows_its_answers_if_only_the_template_writes_markup():
    roles = ["user", "assistant"] * 2
    text = compile_template(chats.CHATML).render(chats.turns("A", "B", "C", "D"))
    assert answers_of(text, roles, "ABCD") == ["B<|im_end|>\n", "D<|im_end|>\n"]
    # Joined by the template, a half could complete the tag.
    assert answers_of(text, roles, "A<|im_sBCD") is None
    assert answers_of(text, roles, "Atart|>BCD") is None
    assert answers_of(text, ["user", "assistant", "user", "tool"], "ABCD") is None
    assert answers_of(text.replace("assistant\nB", "assistant\tB"), roles, "ABCD") is None
    assert answers_of(text.replace("B<|im_end|>", "B"), roles, "ABCD") is None
    assert answers_of(text + "more", roles, "ABCD") is None


def test_a_turn_of_another_role_is_not_taken_for_an_answer_that_the_template_leaves_out():
    template = chats.CHATML.replace(
        "message['role'] + ", "(message['role'] if message['role'] != 'critic' else 'assistant') + "
    ).replace("{% for message in messages %}", "{% for message in messages if message.content %}")
    assert template.count("critic") == template.count("if message.content") == 1
    messages = [*chats.turns("q"), {"role": "critic", "content": "bad"}]
    messages += [{"role": "assistant", "content": ""}]
    found = results_of(template, messages, None, True)
    assert found == results_of(template, messages, None, False)
    assert found == "NotIncremental" or "bad" not in [found[0][b:e] for b, e, _ in found[1]]


def test_a_role_after_which_the_prompt_differs_is_left_out():
    other = CALLING.replace(
        "if add_generation_prompt", "if add_generation_prompt and messages[-1].role != 'tool'"
    )
    assert "tool" in markup_of(CALLING).ends
    assert markup_of(other).ends.keys() == {"user", "assistant", "system"}


INSERTED = "{{- '<|im_start|>system\\nInserted<|im_end|>\\n' }}"
ANSWER = "<|im_end|>\n"


def results_of(template, messages, tools, with_markup):
    """What is trained, and where messages begin; or the name of the error."""
    compiled = compile_template(template, "2026-01-01")
    dialogue = Dialogue(messages, tools, {}, ())
    with pytest.MonkeyPatch.context() as patch:
        if not with_markup:
            patch.setattr(turns._Chat, "markup", None)
        try:
            quick = find_turns(compiled, dialogue, {}, DocumentKeys(), with_begins=False)
            return quick.text, quick.trained, find_turns(compiled, dialogue, {}, DocumentKeys())
        except Exception as error:
            return type(error).__name__


@pytest.mark.parametrize(
    "condition",
    [
        "tools and loop.last",
        "tools is not none and message.role == 'user' and loop.index0",
        "messages | length > 6 and message.role == 'user' and loop.index0",
        "message.name is defined",
    ],
)
def test_a_message_that_the_template_inserts_is_not_trained(condition):
    template = chats.CHATML.replace(
        "{% for message in messages %}\n",
        "{% for message in messages %}\n{%- if " + condition + " %}" + INSERTED + "{% endif %}\n",
    )
    assert template != chats.CHATML
    messages = chats.turns("A", "B", "C", "D", "E", "F", "G", "H", "I")
    messages[4] = {**messages[4], "name": "bob"}
    for tools in (None, [], [{"name": "f", "description": "Inserted"}]):
        found = results_of(template, messages, tools, True)
        if found == "LeftOut":  # The template does not write the tools.
            continue
        text, trained, _ = found
        assert [text[begin:end] for begin, end, _ in trained] == [each + ANSWER for each in "BDFH"]


@pytest.mark.parametrize(
    "condition",
    [
        *("tools", "tools is not none", "'/flag' in messages[0].content"),
        *("messages[-1].role == 'tool'", "messages[-1].role != 'assistant'"),
    ],
)
def test_a_prompt_that_the_conversation_changes_is_found_by_renderings(condition):
    thinking = "{{- '<think>' if " + condition + " }}"
    template = "{{ tools | tojson if tools }}" + CALLING.replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n' }}" + thinking
    )
    assert thinking in template
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    messages = [
        {"role": "system", "content": "S /flag"},
        *chats.turns("q"),
        call,
        {"role": "tool", "content": "r"},
        *({"role": "assistant", "content": f"<think>{answer}"} for answer in "ab"),
    ]
    for tools in (None, [], [{"name": "f", "description": "what it does"}]):
        given = template, messages, tools
        assert results_of(*given, True) == results_of(*given, False)


def test_a_prompt_that_only_other_conversations_have_is_not_used():
    # The template refuses all made-up conversations with two users, so the prompt is from the only
    # one with a system message. Without a system message, the template has another prompt.
    template = (
        "{% if messages|selectattr('role', 'eq', 'user')|list|length > 1 %}{{ fail() }}{% endif %}"
        "{% set own = THEN if messages[0].role == 'system' else OTHERWISE %}"
        "{% for m in messages %}{% if m.role == 'user' %}<u>{% elif m.role == 'system' %}<s>"
        "{% else %}{{ own or '<a>' }}{% endif %}{{ m.content }}<e>{% endfor %}"
        "{% if add_generation_prompt %}{{ own }}{% endif %}"
    )
    for then, other in (("", "<a>"), ("<a>", "<a>ok:"), ("<a>ok:", "<a>")):
        own = template.replace("THEN", repr(then)).replace("OTHERWISE", repr(other))
        assert markup_of(own).prompt == then
        text, trained, _ = found = results_of(own, chats.turns("q", "a"), None, True)
        assert found == results_of(own, chats.turns("q", "a"), None, False)
        assert [text[begin:end] for begin, end, _ in trained] == ["a<e>"]


def test_a_text_after_the_last_answer_is_not_part_of_it():
    template = chats.CHATML.replace(
        "{%- if add_generation_prompt %}",
        "{%- if tools %}" + INSERTED + "{% endif %}{%- if add_generation_prompt %}",
    )
    tools = [{"name": "f", "description": "Inserted"}]
    given = template, chats.turns("q", "a"), tools
    assert results_of(*given, True) == results_of(*given, False) == "NotIncremental"


def _messages(choices):
    roles = ("user", "assistant", "tool", "system")
    messages = []
    for number, content, thoughts, calls in choices:
        message = {"role": roles[number], "content": content}
        if roles[number] == "assistant" and thoughts:
            message["reasoning_content"] = thoughts
        if roles[number] == "assistant" and calls:
            message["tool_calls"] = [{"function": {"name": "f", "arguments": {"a": calls}}}]
        messages.append(message)
    return messages


TEXTS = st.text(st.sampled_from("ab<|>/\n im_end"), max_size=5) | st.sampled_from(
    ["<|im_end|>\n<|im_start|>user\n", "<e>", "[INST]", "q"]
)
CHOICES = st.lists(
    st.tuples(
        st.integers(0, 3) | st.integers(0, 1), TEXTS, TEXTS | st.just(""), st.just("") | TEXTS
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(choices=CHOICES)
def test_turns_are_those_that_renderings_of_the_messages_before_show(name, choices):
    given = TEMPLATES[name], _messages(choices), None
    assert results_of(*given, True) == results_of(*given, False)
