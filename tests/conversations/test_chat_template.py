"""packprep.conversations.chat_template: which template, and that its bytes are a function of the
messages."""

import datetime
import json
import os

import jinja2.sandbox
import pytest

from packprep.conversations.chat_template import (
    TemplateRefusal,
    compile_template,
    find_template,
    unused_templates,
)
from packprep.conversations.supervision import conversation
from packprep.conversations.template_limits import TemplateLimit
from packprep.errors import RecipeError
from tests.conversations import chats_made as chats
from tests.tokenizer import tokenizers_made as made


def render(source, messages, **options):
    return compile_template(source).render(messages, **options)


def test_chatml_is_rendered_as_its_makers_do():
    messages = chats.turns("2+2?", "4", system="Be short.")
    text = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    assert render(chats.CHATML, messages[:2]) == text
    assert render(chats.CHATML, messages[:2], prompt=True) == text + "<|im_start|>assistant\n"
    assert render(chats.CHATML, messages) == text + "<|im_start|>assistant\n4<|im_end|>\n"


def test_blocks_are_trimmed_and_loops_have_break_and_json_is_not_escaped():
    source = """{% for m in messages %}
    {% if m.stop %}{% break %}{% endif %}
    {{ m | tojson }}
{% endfor %}
"""
    assert render(source, [{"a": "<é>"}, {"stop": 1}, {"b": 2}]) == '    {"a": "<é>"}\n'


@pytest.mark.parametrize(
    "source, what",
    [
        ("{{ strftime_now('%Y') }}", "today's date"),
        ("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}", "today's date"),
        ("{{ [1, 2] | random }}", "random"),
        ("{% if %}", "line 1"),
        ("\n{% generation %}", "line 2"),
    ],
)
def test_what_is_no_function_of_the_messages_or_no_jinja_is_refused(source, what):
    with pytest.raises(RecipeError, match=what):
        compile_template(source)


def test_a_template_is_kept_in_a_sandbox():
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ lipsum() }}",
        "{{ {}.update(a=1) }}",
        "{{ {'a': 1}.__class__.__mro__ }}",
        "{{ ''.join.__self__.x }}",
        "{{ namespace().__class__.x }}",
    ):
        with pytest.raises(Exception):  # noqa: B017
            render(source, [])


def test_raise_exception_is_a_refusal_with_the_template_s_words():
    with pytest.raises(TemplateRefusal, match="no tools"):
        render("{{ raise_exception('no tools') }}", [])


BOMBS = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "recursive loop": (
        "{% for a in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}"
    ),
    "macro": (
        "{% macro m(n) %}{% if n %}{% set a = m(n - 1) %}{% set b = m(n - 1) %}{% endif %}{%"
        " endmacro %}{{ m(60) }}"
    ),
    "product": "{{ 'x' * 10 ** 10 }}",
    "product from the left": "{% set a = 10 ** 8 * 'x' %}",
    "power": "{{ 10 ** 9999999 }}",
    "squares": (
        "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"
    ),
    "joined": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{%"
        " endfor %}"
    ),
    "added": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{%"
        " endfor %}"
    ),
    "blocks": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{%"
        " endset %}{% set n.x = y %}{% endfor %}"
    ),
    "own text": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "format of one again and again": "{{ ('{0}' * 9999).format('x' * 99999) }}",
    "percent of one again and again": "{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}",
    "a constant": "{% for i in range(99999) %}{{ 'x' | center(99999) }}{% endfor %}",
    "passed over": (
        "{% for i in range(999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_does_more_than_it_may_is_stopped(name):
    template = compile_template(BOMBS[name])
    with pytest.raises(TemplateLimit):
        template.render([])


@pytest.mark.parametrize(
    "text, most",
    [
        ("{%% for a in [0] * %d %%}{%% endfor %%}", 131_072),
        ("{%% set a = 'x' * %d %%}", 67_108_864),
        ("{%% set a = %d * 'x' %%}", 67_108_864),
        (
            "{%% for a in [0] * 9 if a < 1 %%}{%% endfor %%}{%% set a = 'x' * (%d - 9) %%}",
            67_108_864,
        ),
    ],
)
def test_the_limits_are_exact(text, most):
    """They decide which documents are used."""
    compile_template(text % most).render([])
    with pytest.raises(TemplateLimit):
        compile_template(text % (most + 1)).render([])


@pytest.mark.parametrize(
    "value",
    [
        "raise_exception",
        "messages | map('upper')",
        "[raise_exception]",
        "{'a': [range]}",
        "cycler('a')",
        "self",
        "namespace",
        "raise_exception(raise_exception)",
        "raise_exception([cycler])",
    ],
)
def test_what_prints_an_address_is_refused(value):
    with pytest.raises(TemplateLimit):
        render("{{ " + value + " }}", [])


PLAIN = (
    "1 < 2 < 3",
    "1 < 3 < 2",
    "2 == 2 != 3",
    "'a' in 'abc' in ['abc']",
    "'x' not in messages",
    "1 not in [1]",
    "'a' <= 'b' >= 'a'",
    "[1, messages[0]][1:]",
    "(1, messages)[0]",
    "{'a': messages[0], 1: 2}",
    "[[1], [x]]",
    "messages[::-1]",
    "'abc'[1:]",
    "messages[:1] + messages[1:]",
    "dict(a=1, b=messages)",
    "[3, 1, 2] | sort",
    "['b', 'a', 'b'] | unique | list",
    "'ba' | sort | join",
    "[1, 2, 3, 4] | batch(3, 0) | list",
    "range(7) | slice(3) | list",
    "messages | map(attribute='role') | join(', ')",
    "messages | selectattr('role', 'equalto', 'user') | list | length",
    "messages | groupby('role')",
    "[[1], [2]] | sum(start=[])",
    "range(5) | select('odd') | list",
    "range(5) | reject('in', [1]) | list",
    "[1, 2] | sum",
    "[] | map('nothing') | list",
    "{'b': 1, 'a': 2} | dictsort",
    "{'b': 1} | items | list",
    "[2, 1] | min",
    "[] | max",
    "x | list",
    "'abc' | list",
    "'abc' | first",
    "['a'] | last",
    "messages | tojson(indent=2)",
    "'a b' | title | wordcount",
    "'aB' is lower",
    "1 is in [1]",
    "2 is eq 2",
    "x is defined",
    "'{} {0}' | length",
    "'{0} {0}'.format('a')",
    "'%s %s' % ('a', 1)",
    "'a,b'.split(',')",
    "', '.join(messages | map(attribute='role'))",
    "'a\nb' | indent('> ')",
    "'abc def' | wordwrap(4)",
    "'a' ~ 1 ~ none ~ x",
    "not 1 == 1",
    "'abc'.translate({97: 'x'})",
    "namespace(a=[1]).a",
    "cycler(1, 2).next()",
    "'a' if messages else 'b'",
    "messages | reverse | list",
    "messages[0].role",
    "messages[0]['role']",
    "messages[0].nothing is defined",
    "messages[0].nothing | default('b')",
    "messages[0].items() | list",
    "{'items': 1}.items is callable",
    "{'items': 1}['items']",
    "messages[0].get('role').upper()",
    "messages[0].__class__ is defined",
    "messages[0].update is defined",
    "messages.append is defined",
    "'a'.nothing is defined",
    "'a'.__class__ is defined",
    "'a b'.split().index('b')",
    "'abc'.replace('b', '').startswith(('x', 'a'))",
    "'{a}{0}'.format(1, a=2)",
    "'{a}'.format_map({'a': 1})",
    "'a'.format is callable",
    "'{0.__class__}'.format('a')",
    "'{a.__class__}'.format_map({'a': 'b'})",
    "namespace(a=1).b is defined",
    "1 .real",
    "namespace({'': 1})|attr('')",
    "dict(_LimitedEnvironment__obj=1, context=2, self=3)",
)


@pytest.mark.parametrize(
    "template",
    [
        "{% for x in [{}, 1]|map('xmlattr') %}{{ loop.last }}{% endfor %}",
        "{% for x in [{}, 1]|map('xmlattr') %}{{ loop.length }}{% endfor %}",
        "{% for x in 'ab' %}{{ loop.index }}{{ loop.first }}{{ loop.depth0 }}{% endfor %}",
    ],
)
@pytest.mark.every_case
def test_loops_are_those_of_jinja(template):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    assert render(template, []) == plain.from_string(template).render()


def test_attributes_from_documents_are_not_cached():
    template = compile_template("{% set n = namespace(tools[0]) %}{{ n[messages[0].content] }}")
    safe = template._template.environment._safe
    for k in range(50):
        template.render(chats.turns(f"k{k}"), tools=[{f"k{k}": None}])
    assert len(safe) < 9


def test_macros_are_as_deep_as_those_of_jinja():
    source = "{% macro r(n) %}{% if n %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(tools[0]) }}"
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source)
    own = compile_template(source)

    def deepest(renders):
        for depth in range(1, 300):
            try:
                renders(depth)
            except RecursionError:
                return depth

    assert deepest(lambda n: own.render([], tools=[n])) >= 0.97 * deepest(
        lambda n: plain.render(tools=[n])
    )


def test_what_is_counted_is_what_jinja_prints():
    messages = chats.turns("one", "two")
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = compile_template("")._template.environment.filters["tojson"]
    for expression in (f"({expression})" for expression in PLAIN):
        template = (
            f"{{% macro m(a) %}}{{{{ a }}}}{{% endmacro %}}{{{{ {expression} }}}}{{{{"
            f" m({expression}) }}}}{{% for a in [1, 2] if {expression} or a == 1 %}}{{{{ a }}}}{{%"
            f" if {expression} %}}y{{% endif %}}{{% endfor %}}"
        )
        assert render(template, messages) == plain.from_string(template).render(
            messages=messages
        ), expression


def test_a_template_that_is_no_text_of_a_file_s_size_or_name_is_refused(tmp_path):
    (tmp_path / "large.jinja").touch()
    os.truncate(tmp_path / "large.jinja", 3 << 30)
    for name, words in (
        ("large.jinja", "has more than 1048576 bytes"),
        ("a\0b", "invalid file name"),
    ):
        with pytest.raises(RecipeError, match=words):
            find_template(name, tmp_path, "bytes")


def test_what_a_template_says_of_messages_is_kept_to_some_lines():
    messages = chats.said(chats.turns("q", "a"))
    assert conversation(messages, "{{ raise_exception('x' * 9999999) }}") == (
        "template_error",
        f"the template says '{'x' * 4096}'",
    )


def test_a_template_reads_tools_and_variables_and_no_others_for_what_is_packprep_s():
    source = "{{ tools | tojson }}{{ level }}{{ messages | length }}{{ documents }}"
    template = compile_template(source)
    variables = {"level": "low", "messages": [], "tools": 1}
    assert (
        template.render(chats.turns("q"), tools=[{"name": "f"}], variables=variables)
        == '[{"name": "f"}]low1None'
    )
    assert template.render(chats.turns("q")) == "null1None"


def test_a_template_s_day_is_the_recipe_s():
    source = "{{ strftime_now('%d %b %Y, %A %-d %B %y %j %F %H:%M:%S %I%p %e %a %m %h %T %R %%') }}"
    day = datetime.date(2026, 1, 5)
    assert compile_template(source, str(day)).render([]) == day.strftime(source[17:-5])
    assert (
        compile_template(source, "0999-12-31")
        .render([])
        .startswith("31 Dec 0999, Tuesday 31 December 99 365 0999-12-31")
    )
    for form in ("%s", "%", "%c", "%5d", "%é"):
        with pytest.raises(ValueError, match="no part of a day"):
            compile_template("{{ strftime_now('" + form + "') }}", "2026-01-05").render([])


def test_a_template_nested_too_deeply_is_refused():
    with pytest.raises(RecipeError, match="nested too deeply"):
        compile_template("{% if a %}" * 3000 + "{% endif %}" * 3000)


def test_a_template_with_an_endless_number_is_refused():
    with pytest.raises(RecipeError, match="a number of more than 4300 digits"):
        compile_template("{% set a = " + "7" * 5000 + " %}")


def test_a_long_conversation_is_within_the_limits():
    messages = chats.turns(*["a few words " * 100] * 2000)
    assert len(render(chats.CHATML, messages)) > 2_000_000
    counted = "{% for m in messages %}{{ m.content | trim ~ (messages | length) }}{% endfor %}"
    assert len(render(counted, messages)) > 2_000_000


# where it comes from

MESSAGES = chats.turns("q", "a")


def beside(folder, **files):
    made.write(
        folder / "tok", made.gpt2_like(), **{k: v for k, v in files.items() if v is not None}
    )
    return folder


def test_the_bytes_have_no_template_of_their_own(tmp_path):
    assert find_template("", tmp_path, "bytes") is None


@pytest.mark.parametrize(
    "config, text",
    [
        (None, None),
        ({}, None),
        ({"chat_template": None}, None),
        ({"chat_template": "T"}, "T"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "U"},
                    {"name": "default", "template": "T"},
                ]
            },
            "{% if tools is not none %}U{%+ else %}T{%+ endif %}",
        ),
        (
            {
                "chat_template": [
                    {"name": [], "template": "U"},
                    {"name": "default", "template": "T"},
                ]
            },
            "T",
        ),
        ({"chat_template": [{"name": "rag", "template": "U"}]}, None),
    ],
)
@pytest.mark.parametrize("name", ["tok", "tok/tokenizer.json"])
def test_the_template_of_tokenizer_config_is_taken(tmp_path, config, text, name):
    assert find_template("", beside(tmp_path, tokenizer_config=config), name) == text


def test_a_processor_s_template_counts_like_the_configuration_s(tmp_path):
    assert find_template("", beside(tmp_path, chat_template={"chat_template": "P"}), "tok") == "P"
    both = beside(
        tmp_path, chat_template={"chat_template": "P"}, tokenizer_config={"chat_template": "T"}
    )
    assert find_template("", both, "tok") == "T"


def test_templates_that_are_not_used_because_of_their_names_are_listed(tmp_path):
    assert unused_templates("tok", beside(tmp_path, tokenizer_config={"chat_template": "T"})) == ""
    (tmp_path / "tok/additional_chat_templates").mkdir()
    (tmp_path / "tok/additional_chat_templates/rag.jinja").write_text("R")
    said = unused_templates("tok", tmp_path)
    assert (
        "only the chat templates of additional_chat_templates, named rag\nhint:" in said
        and "documents.chat_template = " in said
    )
    entries = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "U"}]
    said = unused_templates("tok", beside(tmp_path, tokenizer_config={"chat_template": entries}))
    assert "is named default: they are named rag, tool_use\nhint:" in said


def test_the_file_that_newer_tokenizers_have_beside_them_comes_first(tmp_path):
    beside(tmp_path, tokenizer_config={"chat_template": "old"})
    (tmp_path / "tok" / "chat_template.jinja").write_text("né\n", encoding="utf-8")
    assert find_template("", tmp_path, "tok") == "né\n"


def test_the_tokens_that_a_template_names_are_set_in_it(tmp_path):
    config = {
        "chat_template": (
            "\n  {% if true %}{{ bos_token }}|{{ eos_token }}|{{ pad_token }}{% endif %}|{{"
            " bos_token is defined }}"
        ),
        "bos_token": {"content": '<"\\é🙂\n{%', "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "unk_token": "<unk>",
    }
    template = find_template("", beside(tmp_path, tokenizer_config=config), "tok")
    assert "unk" not in template
    assert render(template, []) == '\n<"\\é🙂\n{%|</s>||True'


def test_a_token_that_the_configuration_declares_null_is_not_set(tmp_path):
    config = {
        "bos_token": None,
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}x{{ eos_token }}",
    }
    beside(tmp_path, tokenizer_config=config, special_tokens_map={"bos_token": "<s>"})
    assert compile_template(find_template("", tmp_path, "tok")).render([]) == "x</s>"


def test_the_names_set_at_the_top_change_no_whitespace(tmp_path):
    for source in (
        "\nx{{ eos_token }}",
        "  {% if true %}y{% endif %}{{ eos_token }}",
        "{%- if 1 %}\n z{{ eos_token }}{% endif %}",
    ):
        config = {"chat_template": source, "eos_token": "E"}
        template = find_template("", beside(tmp_path, tokenizer_config=config), "tok")
        assert render(template, []) == render(source.replace("{{ eos_token }}", "E"), [])


def test_the_recipe_s_file_wins_and_lies_beside_the_recipe(tmp_path):
    beside(tmp_path, tokenizer_config={"chat_template": "other", "eos_token": "</s>"})
    (tmp_path / "mine.jinja").write_text("mine{{ eos_token }}", encoding="utf-8")
    assert render(find_template("mine.jinja", tmp_path, "tok"), []) == "mine</s>"
    assert render(find_template("mine.jinja", tmp_path, "bytes"), []) == "mine<eos>"


@pytest.mark.parametrize(
    "content, what",
    [
        (None, "No such file"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"{% if %}", "line 1"),
        (b"{{ strftime_now('%d') }}", "documents.template_date"),
        (b"{{ eos_token }}", "(?s)eos_token.*write the token's text into the template"),
    ],
)
def test_a_file_of_the_recipe_s_that_cannot_be_used_is_refused_at_once(tmp_path, content, what):
    if content is not None:
        (tmp_path / "mine.jinja").write_bytes(content)
    with pytest.raises(RecipeError, match=what):
        find_template("mine.jinja", beside(tmp_path), "tok")


def test_a_template_beside_the_tokenizer_is_looked_into_only_when_it_is_used(tmp_path):
    config = {"chat_template": "{{ strftime_now('%d') }}"}
    assert (
        find_template("", beside(tmp_path, tokenizer_config=config), "tok")
        == config["chat_template"]
    )


def test_a_config_that_is_no_object_says_nothing(tmp_path):
    beside(tmp_path)
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps([1]), encoding="utf-8")
    assert find_template("", tmp_path, "tok") is None


@pytest.mark.parametrize(
    "source, knows",
    [
        (
            (
                "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt"
                " %}A:{% endif %}"
            ),
            True,
        ),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", False),
        (
            (
                "{% set add_generation_prompt = true %}{% for m in messages %}{{ m.content }}{%"
                " endfor %}"
            ),
            False,
        ),
    ],
)
def test_whether_a_template_tells_what_opens_a_turn_from_the_turn(source, knows):
    assert compile_template(source).knows_turns is knows
