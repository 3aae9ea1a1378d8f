"""packprep.conversations.turns and .placeholders: which characters are which message, and which are
trained."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.conversations import placeholders, turns
from packprep.conversations.chat_template import LeftOut, TemplateRefusal, compile_template
from packprep.conversations.layouts import Dialogue
from packprep.conversations.placeholders import Placeholders
from packprep.conversations.template_limits import TemplateLimit
from packprep.conversations.turns import NotIncremental, find_turns
from packprep.recipe import DocumentKeys
from tests.conversations import chats_made as chats

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def found(template, messages, tools=None, train=(), variables=None, **settings):
    dialogue = Dialogue(messages, tools, variables or {}, train)
    compiled = compile_template(template, "2026-01-01")
    return find_turns(compiled, dialogue, variables or {}, replace(DocumentKeys(), **settings))


def trained(*arguments, **options):
    text, spans, *_ = found(*arguments, **options)
    return [text[begin:end] for begin, end, _ in spans]


def pieces(*arguments, **options):
    text, _, begins, *_ = found(*arguments, **options)
    bounds = [0, *sorted(begins.values()), len(text)]
    return [text[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def thought(thinks, says):
    return {"role": "assistant", "content": says, "reasoning_content": thinks}


USER = {"role": "user", "content": "q"}
LONG = [
    USER,
    thought("hm", "a"),
    USER,
    thought("oh", "b"),
    {**USER, "content": "q3"},
    thought("yes", " c "),
]


def test_turns_are_found_where_a_template_drops_earlier_thoughts():
    assert trained(chats.THINKING, LONG) == [
        "a<|im_end|>\n",
        "b<|im_end|>\n",
        "<think>\nyes\n</think>\n\n c <|im_end|>\n",
    ]
    assert pieces(chats.THINKING, LONG)[:3] == [
        "<|im_start|>user\nq<|im_end|>\n",
        "<|im_start|>assistant\na<|im_end|>\n",
        "<|im_start|>user\nq<|im_end|>\n",
    ]
    in_tags = [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"},
        USER,
        chats.turns("", "b")[1],
    ]
    assert trained(chats.THINKING, in_tags) == [
        "a<|im_end|>\n",
        "<think>\n\n</think>\n\nb<|im_end|>\n",
    ]
    assert trained(chats.FORGETTING, [*in_tags, USER]) == ["\n\na</>", "b</>"]


def test_a_turn_begins_behind_what_the_prompt_and_the_turn_have_in_common():
    off = {"enable_thinking": False}
    assert trained(chats.THINKING, LONG, variables=off) == [
        "a<|im_end|>\n",
        "b<|im_end|>\n",
        "yes\n</think>\n\n c <|im_end|>\n",
    ]
    assert trained(chats.THINKING, [USER, chats.turns("", "b")[1]], variables=off) == [
        "b<|im_end|>\n"
    ]


@pytest.mark.long
def test_of_a_tag_that_a_prompt_begins_like_a_turn_no_part_is_common():
    messages = [
        USER,
        chats.calls(("f", {})),
        USER,
        {"role": "assistant", "content": "<think>x</think>b"},
    ]
    assert trained(chats.THOUGHT_FIRST, messages) == ["<|call|>f<|end|>", "b<|end|>"]


def test_calls_and_results_of_tools():
    parallel = chats.calls(
        ("weather", {"city": 'Zürich "x"', "n": [1, "two"]}),
        ("weather", '{"city": "y"}'),
        content="so",
    )
    messages = [
        USER,
        parallel,
        chats.result("1 < 2"),
        chats.result('{"a": 1}'),
        thought("hm", "a"),
        USER,
        thought("", "b"),
    ]
    assert trained(chats.THINKING, messages, TOOLS) == [
        (
            'so\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"x\\"", "n": [1,'
            ' "two"]}}\n</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city":'
            ' "y"}}\n</tool_call><|im_end|>\n'
        ),
        "a<|im_end|>\n",
        "<think>\n\n</think>\n\nb<|im_end|>\n",
    ]
    of_results = pieces(chats.THINKING, messages, TOOLS)[2]
    assert (
        of_results.startswith("<|im_start|>user\n<tool_response>\n1 < 2\n</tool")
        and of_results.count("<tool_response>") == 2
    )


def test_the_last_message_may_end_in_another_way_than_the_others():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "thinking": "hm"},
        USER,
        chats.calls(("weather", {"city": "Zürich"})),
        chats.result('15 "C"'),
        {"role": "assistant", "content": "b", "thinking": "so"},
    ]
    del messages[3]["content"]
    assert trained(chats.CHANNELS, messages) == [
        "<|channel|>final<|message|>a<|end|>",
        ' to=weather<|message|>{"city": "Zürich"}<|call|>',
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
    ]
    assert [piece[:16] for piece in pieces(chats.CHANNELS, messages)] == [
        "<|start|>system<",
        "<|start|>assista",
        "<|start|>user<|m",
        "<|start|>assista",
        "<|start|>weather",
        "<|start|>assista",
    ]
    assert trained(chats.ENDED, chats.turns("q", "a", "q", "b")) == [
        "a<|end|>\n",
        "b<|end|>\n<|endoftext|>",
    ]


@pytest.mark.parametrize("again", ["q", "q2"])
def test_a_template_may_write_system_and_tools_before_the_last_question(again):
    messages = [
        {"role": "system", "content": "S"},
        USER,
        chats.calls(("weather", {"a": "b"})),
        chats.result("r"),
    ]
    messages += [
        chats.turns("", "a")[1],
        {"role": "user", "content": again},
        chats.turns("", "b")[1],
    ]
    call = '[CALLS] {"name": "weather", "arguments": {"a": "b"}}</s>'
    assert trained(chats.HOISTED_LAST, messages, TOOLS) == [call, " a</s>", " b</s>"]
    assert trained(chats.HOISTED_LAST, [*messages, {"role": "user", "content": "z"}], TOOLS) == [
        call,
        " a</s>",
        " b</s>",
    ]


def test_a_first_answer_without_a_header_begins_as_the_others_do():
    template = (
        "{{ '<s>' + messages[0].role[:0] }}{% for m in messages %}"
        "{{ '[' + m.content + ']' if m.role == 'user' else ' ' + m.content + '</s>' }}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "x"}, *chats.turns("q", "a")]
    assert trained(template, messages) == [" x</s>", " a</s>"]
    for unknown in (messages[:2], [{"role": "assistant", "content": ""}, *messages[1:]]):
        with pytest.raises(NotIncremental, match="message 0 begins"):
            found(template, unknown, train=(True,) + (None,) * (len(unknown) - 1))


def test_messages_without_a_text_have_their_places():
    empty = {"role": "assistant", "content": ""}
    messages = [
        {"role": "user", "content": ""},
        thought("hm", ""),
        USER,
        empty,
        USER,
        empty,
        USER,
        thought("hm", "b"),
    ]
    assert trained(chats.THINKING, messages) == [
        *["<|im_end|>\n"] * 3,
        "<think>\nhm\n</think>\n\nb<|im_end|>\n",
    ]
    assert (
        trained(chats.THINKING, [{"role": "assistant", "content": "x"}, *LONG])[0]
        == "x<|im_end|>\n"
    )
    assert trained(chats.THINKING, [thought("x", "a"), USER]) == ["a<|im_end|>\n"]


@pytest.mark.long
def test_a_call_behind_a_question_without_a_text_has_its_place():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": ""},
        chats.calls(("weather", {"a": "b"})),
    ]
    messages += [chats.result("r"), *chats.turns("q", "a")[1:]]
    call = '[CALLS] {"name": "weather", "arguments": {"a": "b"}}</s>'
    assert trained(chats.HOISTED_LAST, messages, TOOLS) == [call, " a</s>"]
    assert trained(chats.HOISTED_LAST, messages, TOOLS, trained_roles=("tool",)) == ["r</s>"]


@pytest.mark.long
def test_an_empty_answer_that_is_left_out_at_the_end_has_its_place_before_that():
    messages = chats.turns("q", "a", "q", "", "q", "b")
    assert trained(chats.LAST_LEFT_OUT, messages) == ["a</>", "</>", "b</>"]
    assert pieces(chats.LAST_LEFT_OUT, messages)[3:5] == ["<assistant></>", "<user>q</>"]
    assert trained(chats.LAST_LEFT_OUT, messages[:4]) == ["a</>"]


def test_no_call_that_is_written_is_left_untrained_in_silence():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": ""},
        chats.calls(("weather", {"a": "b"})),
    ]
    messages += [chats.result("r"), *chats.turns("q", "a")[1:]]
    asking = chats.HOISTED_LAST.replace("m.content + '[/INST]'", "(m.content or '-') + '[/INST]'")
    with pytest.raises(NotIncremental):
        found(asking, messages)
    without_calls = chats.CHATML.replace("in messages %}", "in messages if message.content %}")
    with pytest.raises(LeftOut, match="does not write tool_calls"):
        found(without_calls, messages)


def test_what_a_prompt_begins_of_a_thought_is_no_part_of_a_turn():
    asking = chats.FORGETTING.replace("{{- '<assistant>' }}", "{{- '<assistant><think>\\n' }}")
    messages = [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"}]
    assert trained(asking, messages) == ["hm\n</think>\n\na</>"]
    assert trained(asking, [*messages, *messages]) == ["\n\na</>", "hm\n</think>\n\na</>"]


def test_a_template_that_knows_no_lists_of_parts_is_not_given_any():
    parts = [{"type": "text", "text": "it's"}, {"type": "text", "text": "so"}]
    messages = [{"role": "user", "content": parts}, *chats.turns("q", "a")[1:]]
    leaves_out = chats.CHATML.replace(
        "message['content']", "(message['content'] if message['content'] is string else '')"
    )
    with pytest.raises(TemplateRefusal, match="it leaves the list of parts of message 0 out"):
        found(leaves_out, messages)
    system = [{"role": "system", "content": parts}, *chats.turns("q", "a")]
    for_users = "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"
    with pytest.raises(LeftOut, match="does not write the content of message 0, of role 'system'"):
        found(for_users, system)


def test_null_is_a_content_that_is_not_there_or_else_an_empty_one():
    null = {
        "role": "assistant",
        "content": None,
        "tool_calls": chats.calls(("f", {}))["tool_calls"],
    }
    template = (
        "{% for m in messages %}{{ 'none' if m.content is none else m.content }};"
        "{{ m.tool_calls[0].function.name if m.tool_calls }}{% endfor %}"
    )
    assert found(template, [USER, null], train=(None, False)).text == "q;;f"
    each = (
        "{%% for m in messages %%}%s;{%% for c in m.tool_calls %%}{{ c.function.name }}{%% endfor"
        " %%}{%% endfor %%}"
    )
    assert found(each % "{{ m.content + '' }}", [USER, null]).text == "q;;f"
    assert (
        found(each % "{{ '' if m.content is none else m.content + '' }}", [USER, null]).text
        == "q;;f"
    )
    with pytest.raises(TemplateRefusal, match="leaves these out"):
        found("{% for m in messages %}{{ m.content + ';' }}{% endfor %}", [USER, null])
    with pytest.raises(Exception, match="contents"):
        found("{% for m in messages %}{{ m.contents + ';' }}{% endfor %}", [USER, null])


def test_reasoning_has_each_name_by_which_templates_ask_for_it():
    template = (
        "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning_content }}/{{ m.reasoning }}"
        "/{{ m.content }};{% endfor %}"
    )
    for name in ("reasoning_content", "thinking", "reasoning"):
        text = found(
            template,
            [{"role": "assistant", "content": "a", name: "t"}, {"role": "user", "content": "q"}],
        ).text
        assert text == f"t/t/{'t' if name == 'reasoning' else ''}/a;///q;"


# What is trained


def test_the_last_turn_alone_is_trained():
    assert trained(chats.THINKING, LONG, trained_turns="last") == [
        "<think>\nyes\n</think>\n\n c <|im_end|>\n"
    ]
    assert trained(chats.GENERATION, chats.turns("q", "a", "q", "b"), trained_turns="last") == [
        "b<|end|>"
    ]
    called = [*LONG[:2], USER, chats.calls(("f", {}), content="x")]
    assert trained(chats.THINKING, called, trained_turns="last", train_on_tool_calls=False) == [
        "a<|im_end|>\n"
    ]


def test_messages_with_tool_calls_are_not_trained():
    messages = [
        USER,
        chats.calls(("f", {}), content="x"),
        chats.result("r"),
        *chats.turns("q", "a"),
    ]
    for template, answer in ((chats.CHATML, "a<|im_end|>\n"), (chats.GENERATION, "a<|end|>")):
        written = template.replace("message['content']", "message.content ~ message.tool_calls")
        written = written.replace("m.content + '<|end|>'", "m.content ~ m.tool_calls ~ '<|end|>'")
        assert trained(written, messages, train_on_tool_calls=False) == [answer]


def test_other_roles_are_trained_from_what_they_say():
    messages = [{"role": "system", "content": "S"}, *chats.turns(" q ", "a")]
    assert trained(chats.CHATML, messages, trained_roles=("user", "system")) == [
        "S<|im_end|>\n",
        " q <|im_end|>\n",
    ]
    both = trained(chats.GENERATION, messages, trained_roles=("user", "assistant"))
    assert both == [" q <|end|>\n", "a<|end|>"]


def test_a_message_says_itself_whether_it_is_trained():
    messages = chats.turns("q", "a", "q2", "b")
    for template, end in ((chats.CHATML, "<|im_end|>\n"), (chats.GENERATION, "<|end|>")):
        assert trained(template, messages, train=(None, False, None, None)) == ["b" + end]
        assert trained(
            template, messages, train=(None, True, None, False), trained_turns="last"
        ) == ["a" + end]
    assert trained(chats.CHATML, messages, train=(True, False, None, False)) == ["q<|im_end|>\n"]
    assert trained(chats.CHATML, messages, train=(False,) * 4) == []


def test_blocks_of_a_message_are_its_own():
    twice = chats.GENERATION.replace(
        "{{- m.content + '<|end|>' -}}",
        "{{- m.content -}}{%- endgeneration -%}{{- '+' -}}{%- generation -%}{{- '<|end|>' -}}",
    )
    messages = chats.turns("q", "a", "q", "b")
    assert trained(twice, messages) == ["a", "<|end|>", "b", "<|end|>"]
    assert trained(twice, messages, trained_turns="last") == ["b", "<|end|>"]


# The system message and tools


def test_system_and_tools_are_what_later_pieces_repeat():
    def repeated(template, messages, tools=None):
        text, _, _, end, _ = found(template, messages, tools)
        return text[:end]

    system = {"role": "system", "content": "Be brief."}
    tools = f"<tools>{json.dumps(TOOLS[0])}\n</tools><|im_end|>\n"
    assert repeated(chats.THINKING, [system, *LONG]) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert (
        repeated(chats.THINKING, [system, *LONG], TOOLS)
        == f"<|im_start|>system\nBe brief.\n\n{tools}"
    )
    assert repeated(chats.THINKING, LONG, TOOLS) == f"<|im_start|>system\n{tools}"
    assert repeated(chats.THINKING, chats.turns("q", "a"), TOOLS) == f"<|im_start|>system\n{tools}"
    assert repeated(chats.THINKING, LONG) == ""
    assert repeated(chats.HOISTED_LAST, [system, USER, chats.turns("", "a")[1], USER], TOOLS) == ""
    in_question = (
        "{% for m in messages %}<{{ m.role }}>{{ tools | tojson if loop.first else '' }}{{"
        " m.content }}{% endfor %}"
    )
    assert repeated(in_question, chats.turns("q", "a"), TOOLS) == ""


# Templates that ask for what no placeholder is


@pytest.mark.parametrize(
    "asks",
    [
        "'<tool' in m.content",
        "m.content | length > 3",
        "m.content == 'yes'",
        "m.content.startswith('y')",
        "'/think' in m.content",
    ],
)
def test_what_users_say_stays_where_the_template_asks_for_it(asks):
    template = chats.FORGETTING.replace(
        "{%- for", "{% set n = namespace(x='') %}{%- for", 1
    ).replace(
        "<' + m.role + '>' + m.content + '</>'",
        "<' + m.role + ('!' if m.role == 'user' and "
        + asks
        + " else '') + '>' + m.content + '</>'",
    )
    messages = [
        {"role": "user", "content": "yes"},
        thought("", "<think>x</think>a"),
        *chats.turns("no /think <tool>", "b"),
    ]
    assert trained(template, messages) == ["a</>", "b</>"]


def test_names_in_calls_stay_where_the_template_asks_for_them():
    template = chats.THINKING.replace(
        "call.function.name +", "('code' if call.function.name == 'python' else 'other') +"
    )
    messages = [USER, chats.calls(("python", {"x": "1"}), content=""), *LONG]
    assert (
        trained(template, messages)[0]
        == '<tool_call>\n{"name": "code", "arguments": {"x": "1"}}\n</tool_call><|im_end|>\n'
    )


@pytest.mark.parametrize(
    "makes", ["upper", "title", "reverse", "replace('a', 'b')", "truncate(3, True, '', 0)"]
)
def test_a_text_that_the_template_changes_otherwise_is_rejected(makes):
    template = chats.FORGETTING.replace("m.content.split('</think>')[-1]", f"m.content | {makes}")
    with pytest.raises(NotIncremental, match="message 1"):
        found(template, chats.turns("q", "alas so", "q", "b"))


@pytest.mark.parametrize("makes", ["trim", "tojson", "tojson(ensure_ascii=True)", "trim | tojson"])
def test_a_text_may_be_stripped_or_json(makes):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}</u>{% else %}<a>{{ ''"
        " if loop.last else '!' }}{{ m.content | MAKES }}</a>{% endif %}{% endfor %}{{ '<a>' if"
        " add_generation_prompt else '' }}"
    )
    said = ' né "🙂"\n\t'
    first, last = trained(template.replace("MAKES", makes), chats.turns("q", said, "q", said))
    assert first == "!" + last and last.endswith("</a>")


# Long conversations and hostile templates


def test_a_long_conversation_is_rendered_a_few_times(monkeypatch):
    renderings = []
    template = compile_template(chats.THINKING)
    plain = template.render
    monkeypatch.setattr(
        template,
        "render",
        lambda messages, **options: renderings.append(len(messages)) or plain(messages, **options),
    )
    messages = [m for k in range(400) for m in (chats.turns(f"q{k}")[0], thought(f"t{k}", f"a{k}"))]
    text, spans, begins, *_ = find_turns(template, Dialogue(messages), {}, DocumentKeys())
    assert len(spans) == 400 and len(begins) == 799
    of_made_up = max(map(len, placeholders._MADE_UP))
    assert len([count for count in renderings if count > of_made_up + 1]) < 24
    assert [text[a:b] for a, b, _ in spans][7] == "a7<|im_end|>\n"


def test_both_ways_give_the_same_of_a_conversation_that_both_take(monkeypatch):
    messages = [
        {"role": "system", "content": "S"},
        *chats.turns("q", "a", " q", "b ", "x\n", "\nc"),
    ]
    for template in (chats.CHATML, chats.LLAMA3, chats.HOISTED, chats.GENERATION):
        template = "{% set bos_token = '<s>' %}{% set eos_token = '</s>' %}" + template
        by_prefixes = found(template, messages)
        monkeypatch.setattr(turns, "MOST_BY_PREFIXES", 0)
        assert found(template, messages) == by_prefixes
        monkeypatch.undo()


@pytest.mark.parametrize(
    "asked",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{{ 'x' * 60000000 }}",
    ],
)
def test_renderings_that_are_only_for_turns_are_limited_together(asked):
    hostile = chats.CHATML.replace(
        "{%- if add_generation_prompt %}",
        "{%- if messages | length < 40 %}" + asked + "{% endif %}{%- if add_generation_prompt %}",
    )
    with pytest.raises(TemplateLimit):
        found(hostile, chats.turns(*["q", "a"] * 20))


def test_strings_with_all_noncharacters_are_refused_only_where_placeholders_are_needed():
    odd = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    assert trained(chats.CHATML, chats.turns(odd, "a")) == ["a<|im_end|>\n"]
    compiled, dialogue = compile_template(chats.CHATML), Dialogue(chats.turns(odd, "a"))
    assert find_turns(compiled, dialogue, {}, DocumentKeys(), with_begins=False).trained
    with pytest.raises(turns.TemplateRefusal, match="U\\+FDD0"):
        found(chats.THINKING, [*LONG[:3], thought("x", odd)])


STRINGS = st.text(st.sampled_from('ab" \n\\é🙂<>\ufdd0'), max_size=6)


@given(st.lists(st.tuples(STRINGS, STRINGS, STRINGS), min_size=1, max_size=4), st.booleans())
def test_turns_are_what_the_template_writes_of_them(said, short):
    messages = [m for q, t, a in said for m in ({"role": "user", "content": q}, thought(t, a))]
    last = messages[-1]
    most = turns.MOST_BY_PREFIXES
    turns.MOST_BY_PREFIXES = most if short else 0
    try:
        got = trained(chats.THINKING, messages)
    finally:
        turns.MOST_BY_PREFIXES = most
    thinks = f"<think>\n{last['reasoning_content'].strip(chr(10))}\n</think>\n\n"
    assert got == [f"{a}<|im_end|>\n" for _, _, a in said[:-1]] + [
        f"{thinks}{last['content']}<|im_end|>\n"
    ]


@pytest.mark.long
def test_where_strings_stand_is_found_among_several_places():
    def fitted(*given):
        return placeholders._fitted(*given)[0]

    assert fitted("a\n\nb", ["", "\n", ""], ["a\n", "b"]) == [(0, 2), (3, 4)]
    assert fitted("aa", ["", "", ""], ["a", "a"]) == [(0, 1), (1, 2)]
    assert fitted("xay", ["x", "y"], [" a\n"]) == [(1, 2)]
    assert fitted("xy", ["x", "y"], ["gone"]) == [(1, 1)]
    assert (
        fitted("xaz", ["x", "y"], ["a"]) is None
        and fitted("z", ["x"], []) is None
        and fitted("xx", ["x"], []) is None
    )


@pytest.mark.long
def test_placeholders_out_of_order_do_not_fit():
    render = compile_template(
        "{% for m in messages | reverse %}{{ m.content }};{% endfor %}"
    ).render
    laid = Placeholders(render, chats.turns("q", "a"), "\ufdd0\ufdd1", [True, True])
    assert not laid.place("a;q;")
