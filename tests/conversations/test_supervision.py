"""packprep.conversations.supervision: which characters of a document are trained, or why it cannot be
used."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.conversations.supervision import MAX_SPANS, Conversation, conversation
from packprep.errors import RecipeError
from packprep.sources.formats import BAD_REASONS
from packprep.sources.formats.batch import Supervision
from tests.conversations import chats_made as chats
from tests.test_imports import imported_by
from tests.twin.records import ranges_of


def marked(messages, template=chats.CHATML, text=None, loss_spans=None):
    return conversation(chats.said(messages, text, loss_spans), template)


def trained(marked):
    return [marked.text[a:b] for a, b in marked.spans]


def pieces(marked):
    """The text, cut where messages begin."""
    bounds = [0, *marked.boundaries, len(marked.text)]
    return [marked.text[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def test_every_reason_is_a_bad_one():
    assert {"bad_loss_spans", "bad_messages", "template_error", "template_not_incremental"} <= set(
        BAD_REASONS
    )


def test_reading_documents_does_not_import_jinja():
    assert "jinja2" not in imported_by("import packprep.documents.reading")


# messages


def test_chatml_trains_the_turn_and_its_closing_token_and_not_the_header():
    found = marked(chats.turns("2+2?", "4", "né?", "non 🙂", system="Be short."))
    assert trained(found) == ["4<|im_end|>\n", "non 🙂<|im_end|>\n"]
    assert pieces(found) == [
        "<|im_start|>system\nBe short.<|im_end|>\n",
        "<|im_start|>user\n2+2?<|im_end|>\n",
        "<|im_start|>assistant\n4<|im_end|>\n",
        "<|im_start|>user\nné?<|im_end|>\n",
        "<|im_start|>assistant\nnon 🙂<|im_end|>\n",
    ]
    assert found.system_end == found.boundaries[0]
    assert found.chat


def test_llama_3_trains_the_turn_and_its_closing_token():
    template = "{% set bos_token = '<|begin_of_text|>' %}\n" + chats.LLAMA3
    found = marked(chats.turns(" hi ", " hello\n", "bye", "bye", system="s"), template)
    assert trained(found) == ["hello<|eot_id|>", "bye<|eot_id|>"]
    assert (
        found.text[: found.system_end]
        == "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>"
    )
    assert len(found.boundaries) == 4


def test_generation_blocks_say_what_is_trained():
    found = marked(chats.turns("q", "a", "q2", "a2", system="s"), chats.GENERATION)
    assert trained(found) == ["a<|end|>", "a2<|end|>"]
    assert pieces(found)[1:] == [
        "<|user|>q<|end|>\n",
        "<|assistant|>a<|end|>\n",
        "<|user|>q2<|end|>\n",
        "<|assistant|>a2<|end|>\n",
    ]
    assert found.system_end == len("<|system|>s<|end|>\n")


def test_generation_blocks_may_be_empty_nested_in_macros_and_beside_noncharacters():
    source = """{%- macro turn(m) -%}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif -%}
    {%- endmacro -%}
    {%- for m in messages %}{{ turn(m) }}{% endfor -%}"""
    found = marked(chats.turns("\ufdd0", "", "x\ufdd1", "é"), source)
    assert (found.text, trained(found)) == ("\ufdd0x\ufdd1é", ["é"])
    assert "".join(trained(marked(chats.turns("a", "b", "c", "d"), source))) == "bd"


def test_generation_blocks_whose_text_is_cut_are_an_error():
    source = "{% set x %}{% generation %}abc{% endgeneration %}{% endset %}{{ x[:2] }}"
    assert marked(chats.turns("q", "a"), source)[0] == "template_error"


def test_a_template_that_hoists_the_system_message_has_fewer_places_to_cut():
    template = "{% set bos_token = '<s>' %}\n{% set eos_token = '</s>' %}\n" + chats.HOISTED
    found = marked(chats.turns("q", "a", "q2", "a2", system="s"), template)
    assert found.text == "<s>[INST] s\n\nq [/INST] a</s><s>[INST] q2 [/INST] a2</s>"
    assert trained(found) == [" a</s>", " a2</s>"]
    assert pieces(found) == [
        "<s>[INST] s\n\nq [/INST]",
        " a</s>",
        "<s>[INST] q2 [/INST]",
        " a2</s>",
    ]
    assert found.system_end == 0


def test_an_assistant_may_begin_and_follow_itself():
    messages = [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        *chats.turns("q"),
    ]
    assert trained(marked(messages)) == ["a<|im_end|>\n", "b<|im_end|>\n"]


def test_a_template_that_changes_what_stood_before_is_incremental_by_placeholders():
    good = chats.turns("q", "<think>x</think>a")
    assert trained(marked(good, chats.FORGETTING)) == ["<think>x</think>a</>"]
    changed = [*good, *chats.turns("q2", "b")]
    assert trained(marked(changed, chats.FORGETTING)) == ["a</>", "b</>"]
    prompted = chats.CHATML.replace("assistant\\n' }}", "assistant\\n<think>' }}")
    assert trained(marked(chats.turns("q", "a"), prompted)) == ["a<|im_end|>\n"]


def test_what_a_template_refuses_is_rejected_with_its_words_and_its_mistakes_without():
    template = "{% set bos_token = '' %}{% set eos_token = '' %}" + chats.HOISTED
    messages = [{"role": "user", "content": "a"}, *chats.turns("b", "c")]
    assert marked(messages, template) == (
        "template_error",
        "the template says 'roles must alternate user/assistant'",
    )
    for mistake in ("{{ messages[0].name.first }}", "{{ 1 // 0 }}", "{{ 'a' + 1 }}"):
        assert marked(chats.turns("q", "a"), mistake) == (
            "template_error",
            "the template failed at these messages",
        )
    for too_much in ("{{ 'x' * 10 ** 9 }}", "{{ raise_exception }}"):
        reason, detail = marked(chats.turns("q", "a"), too_much)
        assert reason == "template_error" and detail.startswith(
            "the template does more than it may"
        )


def test_a_key_that_is_null_is_not_there():
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.name is defined %}({{ m.name }}){% endif"
        " %};{% endfor %}"
    )
    messages = chats.turns("q", "a")
    messages[0]["name"], messages[1]["name"] = None, "x"
    assert marked(messages, template).text == "q;a(x);"


def test_a_template_that_passes_over_strings_is_an_error():
    template = (
        "{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor"
        " %};{% endfor %}"
    )
    reason, detail = marked(chats.turns("hi", "yes"), template)
    assert reason == "template_error" and "the content of message 0, of role 'user'" in detail
    assert not isinstance(marked(chats.turns("", " "), template), tuple)


@pytest.mark.parametrize("written", ["trim", "tojson", "tojson(ensure_ascii=True)"])
def test_a_template_that_writes_parts_as_data_is_an_error_but_for_a_tool_s_json(written):
    template = chats.CHATML.replace("message['content']", f"message['content'] | {written}")
    parts = [{"type": "text", "text": "né"}]
    reason, detail = marked([*chats.turns("q"), {"role": "assistant", "content": parts}], template)
    assert reason == "template_error" and "writes the parts of message 1 as data" in detail
    found = marked([{"role": "tool", "content": parts}, chats.turns("", "a")[1]], template)
    assert isinstance(found, tuple) == (written == "trim")


def test_a_system_message_that_is_written_later_is_not_repeated():
    template = (
        "<s>{% for m in messages %}{% if m.role != 'system' %}{{ m.content }};{% endif %}{%"
        " endfor %}"
    )
    messages = chats.turns("q", "a", system="S!")
    found = marked(messages, template + "{{ messages[0].content }}")
    assert (found.text, found.system_end) == ("<s>q;a;S!", 0)
    reason, detail = marked(messages, template)
    assert (
        reason == "template_error"
        and "does not write the content of message 0, of role 'system'" in detail
    )


def test_the_limit_of_a_document_counts_the_rendered_text(monkeypatch):
    text = marked(chats.turns("q", "数" * 9)).text
    size = len(text.encode())
    monkeypatch.setattr("packprep.sources.formats.batch.MAX_DOCUMENT_BYTES", size)
    assert marked(chats.turns("q", "数" * 9)).text == text
    assert marked(chats.turns("q", "数" * 9 + "!")) == (
        "too_large",
        f"{size + 1} bytes; at most {size} bytes",
    )


def test_a_lone_surrogate_in_a_message_is_rejected():
    assert marked(chats.turns("q\ud800", "a"))[0] == "lone_surrogate"


def test_messages_beside_a_text_or_spans_are_ambiguous():
    assert marked(chats.turns("q", "a"), text="t")[0] == "bad_messages"
    assert marked(chats.turns("q", "a"), loss_spans=[])[0] == "bad_messages"


def test_messages_without_a_template_stop_the_build():
    with pytest.raises(RecipeError, match="documents.chat_template"):
        marked(chats.turns("q", "a"), None)
    assert marked(None, None, "text", [[0, 2]]) == Conversation("text", ((0, 2),))


CONTENTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ROLES = st.sampled_from(["user", "assistant", "tool"])


@given(
    st.lists(st.tuples(ROLES, CONTENTS), min_size=1, max_size=6),
    st.none() | CONTENTS,
    st.sampled_from([chats.CHATML, chats.GENERATION]),
)
def test_spans_are_the_assistant_s_turns_and_boundaries_the_messages(turns, system, template):
    messages = [{"role": role, "content": content} for role, content in turns]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    found = marked(messages, template)
    spoken = [m["content"] for m in messages if m["role"] == "assistant"]
    if not spoken:
        assert found[0] == "bad_messages"
        return
    closing = "<|im_end|>\n" if template == chats.CHATML else "<|end|>"
    assert trained(found) == [content + closing for content in spoken]
    assert len(pieces(found)) == len(messages)
    assert all(m["content"] in piece for m, piece in zip(messages, pieces(found), strict=True))
    assert (found.system_end > 0) == (system is not None)


# loss_spans


@pytest.mark.parametrize(
    ("spans", "united"),
    [
        ([[0, 1], [3, 5]], ((0, 1), (3, 5))),
        ([[3, 5], [0, 1]], ((0, 1), (3, 5))),
        ([[0, 1], [1, 2], [3, 5]], ((0, 2), (3, 5))),  # touching
        ([[1, 3], [2, 4], [0, 1], [2, 3], [1, 3]], ((0, 4),)),
        ([[0, 5], [1, 2]], ((0, 5),)),
        ([[2, 2], [0, 0], [5, 5], [9, 9]], ()),  # empty
        ([[4, 99], [7, 8], [0, 10**30], [10**30, 10**31]], ((0, 5),)),  # beyond the end
        ([[4, 6]], ((4, 5),)),
        ([[0, 1, 1], [1, 2, 1.0]], ((0, 2),)),
        ([], ()),
    ],
)
def test_loss_spans_are_sorted_united_and_clipped(spans, united):
    assert marked(None, None, "né 🙂x", spans) == Conversation("né 🙂x", united)
    assert marked(None, None, "", [[0, 0], [0, 3]]) == Conversation("", ())


@pytest.mark.parametrize(
    ("spans", "united", "weights"),
    [
        ([[0, 2, 2], [2, 3, 2.0], [3, 5, 0.5]], ((0, 3), (3, 5)), (2.0, 0.5)),
        ([[1, 3, 0.1], [0, 2, 0.1], [3, 4]], ((0, 3), (3, 4)), (float(np.float32(0.1)), 1.0)),
        (
            [[0, 1, 0], [1, 2, 0.0], [2, 3, -0.0], [3, 9]],
            ((3, 5),),
            (),
        ),  # what weighs 0 is not trained
        ([[0, 1, 1e-60], [1, 2, 2]], ((1, 2),), (2.0,)),  # 0 in float32
        (
            [[0, 9, 3], [5, 9, 4], [2, 2, 7]],
            ((0, 5),),
            (3.0,),
        ),  # what is empty or beyond the end overlaps nothing
        ([[0, 5, 3.4028235e38]], ((0, 5),), (float(np.finfo(np.float32).max),)),
        ([[0, 5, 16777217]], ((0, 5),), (16777216.0,)),
        (
            [[0.0, 2.0, 0.5], [2, 3]],
            ((0, 2), (2, 3)),
            (0.5, 1.0),
        ),  # as a column of numbers has them
    ],
)
def test_spans_of_other_weights_touch_and_do_not_overlap(spans, united, weights):
    assert marked(None, None, "né 🙂x", spans) == Conversation("né 🙂x", united, weights=weights)
    assert ranges_of(spans, 5) == [
        (*span, w) for span, w in zip(united, weights or [1.0] * len(united), strict=True)
    ]


WEIGHTS = st.sampled_from([0, 1, 0.3, 2, 1e-30, 1e30, -1, None])


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), WEIGHTS).map(list), max_size=5),
    st.sampled_from([None, None, 0.7, 1e-20, 1e20, 0, -1]),
)
def test_weighted_spans_are_those_of_the_twin(spans, weight):
    spans = [[begin, begin + size, own] for begin, size, own in spans]
    record = {} if weight is None else {"weight": weight}
    found = conversation(Supervision("x" * 12, spans, record), None)
    twin = ranges_of(spans, 12, record.get("weight"))
    if isinstance(found, tuple):
        assert (
            found[0] == ("bad_weight" if weight == -1 and record else "bad_loss_spans")
            and twin is None
        )
    else:
        weights = found.weights or (1.0,) * len(found.spans)
        assert twin == [(*span, weight) for span, weight in zip(found.spans, weights, strict=True)]


@pytest.mark.parametrize(
    ("weight", "weights"),
    [(None, (0.5, 1.0)), (2, ()), (0.5, (0.25, 0.5)), (0, None), (1e-46, None)],
)
def test_a_document_s_weight_multiplies_those_of_its_spans(weight, weights):
    found = conversation(Supervision("abcd", [[0, 1, 0.5], [2, 4]], {"weight": weight}), None)
    assert found.weight == pytest.approx(1 if weight is None else weight, abs=1e-40)
    found = replace(found, weight=1.0)
    if weights is None:
        assert found == Conversation("abcd", ())
    elif not weights:
        assert found == Conversation("abcd", ((0, 1), (2, 4)), weights=(1.0, 2.0))
    else:
        assert found == Conversation("abcd", ((0, 1), (2, 4)), weights=weights)
    halved = conversation(Supervision("abcd", [[0, 2, 2], [2, 3, 2.0]], {"weight": 0.5}), None)
    assert halved == Conversation("abcd", ((0, 3),), weight=0.5)


@pytest.mark.parametrize("weight", [-1, True, "1", float("nan"), float("inf"), 1e39, 10**400, [1]])
def test_a_document_s_weight_is_a_number_that_float32_holds(weight):
    assert conversation(Supervision("ab", [[0, 1]], {"weight": weight}), None)[0] == "bad_weight"
    assert conversation(Supervision("ab", None, {"weight": weight}), None)[0] == "bad_weight"


def test_weights_that_multiply_to_more_than_float32_holds_are_rejected():
    assert (
        conversation(Supervision("ab", [[0, 1, 1e30]], {"weight": 1e30}), None)[0]
        == "bad_loss_spans"
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 14), st.integers(0, 6)).map(lambda s: [s[0], sum(s)]), max_size=8
    )
)
def test_loss_spans_are_the_characters_inside_any_of_them(spans):
    found = marked(None, None, "x" * 12, spans).spans
    assert {i for begin, end in found for i in range(begin, end)} == {
        i for a, b in spans for i in range(a, b) if i < 12
    }
    assert all(begin < end for begin, end in found)
    assert all(end < begin for (_, end), (begin, _) in pairwise(found))


@pytest.mark.long
def test_as_many_loss_spans_as_may_be_in_any_order():
    n = MAX_SPANS // 2
    spans = [[3 * (7919 * k % n), 3 * (7919 * k % n) + 1 + k % 2] for k in range(n)]
    empty = [[10, 10]] * n
    assert marked(None, None, "ab " * n, spans + empty).spans == tuple(map(tuple, sorted(spans)))
    found = marked(None, None, "ab " * n, [*spans, *empty, [10, 10]])
    assert found == ("bad_loss_spans", f"{MAX_SPANS + 1} entries; at most {MAX_SPANS}")


@pytest.mark.parametrize(
    "spans",
    [
        "0-2", {"a": 1}, [0, 2], [[0]], [[0, 1, 1, 1]], [[0, 1.5]], [[False, True]], [["0", "1"]], [None], [(0, 1)],
        [[-1, 2]], [[-1, -1]], [[-(10**30), 2]], [[3, 2]], [[9, 8]], [[10**30, 7]], [[0, 1], [0, None]],
        [[0, 1, True]], [[0, 1, "1"]], [[0, 1, None]], [[0, 0, -1]], [[0, 1, -0.5]], [[0, 1, float("nan")]],
        [[0, 1, float("inf")]], [[0, 1, 10**400]], [[0, 1, 1e39]], [[0, 2], [1, 3, 2]], [[0, 2, 0], [1, 3]],
        [[0, 3, 0.5], [3, 4, 0.5], [1, 2, 0.25]], [[0.5, 1.0]], [[0.0, 1.5, 0.5]],
        [[0.0, float("nan"), 0.5]], [[0.0, float("inf"), 0.5]],
    ],
)  # fmt: skip
def test_bad_loss_spans_are_rejected(spans):
    reason, detail = marked(None, None, "text", spans)
    assert reason == "bad_loss_spans" and detail.isascii() and len(detail) < 150


@pytest.mark.parametrize("span", [[0, 3], [0.0, 3.0], [0, 3.0], [0.0, 3, 1], [0.0, 1e300, 1.0]])
def test_whole_numbers_of_any_type_are_bounds(span):
    assert conversation(Supervision("abc", [span]), None) == Conversation("abc", ((0, 3),))
    assert ranges_of([span], 3) == [(0, 3, 1.0)]
