"""`trained_turns = "each"`: each trained turn stands behind the history that its template gives it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from packprep.conversations.chat_template import compile_template
from packprep.conversations.supervision import Conversation, conversation
from packprep.conversations.training import (
    END_OF_HISTORY,
    NEW_TEXT,
    history_tokens,
    tokenize_supervised,
    training_columns,
)
from packprep.recipe import DocumentKeys, Specials
from packprep.sources.formats.batch import Supervision
from packprep.tokenizer.engines import candidates, engine_facts, load_engine
from packprep.tokenizer.roles import resolve_vocabulary
from tests.conversations import chats_made as chats
from tests.tokenizer.test_roles import needs, resolve

EACH = replace(DocumentKeys(), trained_turns="each")


def read(template, messages, **settings):
    given = Supervision(None, None, {"messages": messages}, "messages")
    return conversation(given, template, replace(EACH, **settings))


def thinking(*answers, calls=()):
    """Return messages: a user's before each answer, which has a thought; of numbers in `calls`, an
    answer that calls a tool, and its result."""
    messages = []
    for k, answer in enumerate(answers):
        if not (k and k - 1 in calls):
            messages.append({"role": "user", "content": f"question {k}"})
        message = {"role": "assistant", "content": answer, "reasoning_content": f"thought {k}"}
        if k in calls:
            call = {"name": "tool", "arguments": {"k": k}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        messages.append(message)
        if k in calls:
            messages.append({"role": "tool", "content": f"result {k}"})
    return messages


def rendered(template, messages):
    return compile_template(template).render(messages)


def test_a_template_that_forgets_thoughts_gives_a_text_for_each_user_turn():
    messages = thinking("a", "b", "c")
    found = read(chats.THINKING, messages)
    assert [part.text for part in found.parts] == [
        rendered(chats.THINKING, messages[: 2 * k + 2]) for k in range(3)
    ]
    trained = [[part.text[a:b] for a, b in part.spans] for part in found.parts]
    assert trained == [
        [f"<think>\nthought {k}\n</think>\n\n{answer}<|im_end|>\n"]
        for k, answer in enumerate("abc")
    ]
    assert found.text == "".join(part.text for part in found.parts)


def test_calls_of_one_user_turn_share_a_text():
    messages = thinking("call", "a", "b", calls=(0,))
    found = read(chats.THINKING, messages)
    assert [part.text for part in found.parts] == [
        rendered(chats.THINKING, messages[:4]),
        rendered(chats.THINKING, messages),
    ]
    first, second = ([part.text[a:b] for a, b in part.spans] for part in found.parts)
    assert len(first) == 2 and "thought 0" in first[0] and "thought 1" in first[1]
    assert len(second) == 1 and "thought 2" in second[0]


def test_a_template_that_keeps_everything_gives_one_text():
    messages = chats.turns("q", "a", "r", "b")
    found = read(chats.CHATML, [*messages, {"role": "user", "content": "left out"}])
    expected = read(chats.CHATML, messages, trained_turns="all")
    assert not found.parts
    assert (found.text, found.spans) == (expected.text, expected.spans)


def test_what_a_message_says_of_its_training_goes_before():
    messages = thinking("a", "b", "c")
    messages[3]["train"] = False
    found = read(chats.THINKING, messages)
    assert [part.text for part in found.parts] == [
        rendered(chats.THINKING, thinking("a", "b", "c")[:k]) for k in (2, 6)
    ]
    assert "thought 1" not in found.text


def test_history_ends_where_the_first_new_message_begins():
    found = read(chats.THINKING, thinking("a", "b"))
    first, second = found.parts
    assert first.history == 0
    assert second.text[second.history :].startswith("<|im_start|>user\nquestion 1")
    # Without places of messages it ends where the new answer begins.
    hoisted = read(chats.HOISTED_LAST, chats.turns("q", "a", "r", "b", system="S"))
    for part in hoisted.parts[1:]:
        assert 0 < part.history <= part.spans[0][0]


def test_a_text_of_which_nothing_is_known_to_be_trained_is_a_reject():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% if loop.last %}!{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.first or messages|length < 4 %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
    )
    reason, detail = read(template, chats.turns("q", "a", "r", ""))
    assert reason == "template_not_incremental" and "message 3" in detail


def test_tokens_of_several_texts_are_cut_apart_and_trained_once():
    found = read(chats.THINKING, thinking("a", "b", "c"))
    vocabulary = resolve_vocabulary("bytes", Path(), Specials(), needs())
    engine = load_engine({"name": "bytes", "version": "1"}, vocabulary, "text")
    tokens, trained = tokenize_supervised(
        engine, ["plain", found.text], {1: found}, "text", vocabulary
    )
    one = trained[1]
    lengths = [len(part.text.encode()) for part in found.parts]
    begins = np.cumsum(lengths)[:-1]
    assert one.cuts[one.ranks == NEW_TEXT].tolist() == begins.tolist()
    histories = one.cuts[one.ranks >= END_OF_HISTORY] - begins
    assert histories.tolist() == [part.history for part in found.parts[1:]]
    columns = training_columns(trained, 2)
    assert history_tokens(columns).tolist() == [0, histories.sum()]
    text = tokens.ids[len("plain") :].astype(np.uint8).tobytes().decode()
    spans = [text[a:b] for a, b in one.spans.tolist()]
    assert spans == [part.text[a:b] for part in found.parts for a, b in part.spans]


def test_a_text_without_history_or_of_one_token_counts_no_history(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{{ m.thinking if loop.last }}{% endfor %}"
    silent = {"role": "user", "content": ""}
    thoughts = [{"role": "assistant", "content": "", "thinking": thought} for thought in "tu"]
    without = read(template, [silent, thoughts[0], silent, thoughts[1]])
    # The only token of the second text has both history and new text.
    joined = read("{{ messages|length }}" + template, chats.turns("q", "a", "r", "b"))
    assert [part.text for part in (*without.parts, *joined.parts)] == ["t", "u", "2qa", "4qarb"]
    assert [part.history for part in (*without.parts, *joined.parts)] == [0, 0, 0, 3]
    words = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    vocabulary = resolve(tmp_path, json.loads(words.to_str()), needs(), Specials(missing="add"))
    engine = load_engine(engine_facts(candidates("auto", vocabulary)[0]), vocabulary, "text")
    found = {0: without, 1: joined}
    texts = [each.text for each in found.values()]
    _, trained = tokenize_supervised(engine, texts, found, "text", vocabulary)
    assert history_tokens(training_columns(trained, 2)).tolist() == [0, 0]


@pytest.mark.long
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=5))
def test_each_turn_is_trained_once_behind_its_own_rendering(turns):
    answers, calls = [], set()
    for _, many in turns:
        for _ in range(many):
            calls.add(len(answers))
            answers.append(f"call{len(answers)}")
        answers.append(f"answer{len(answers)}")
    messages = thinking(*answers, calls=calls)
    found = read(chats.THINKING, messages)
    parts = found.parts or (found,)
    renderings = {
        rendered(chats.THINKING, messages[: k + 1]): k
        for k, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    ends = [renderings[part.text] for part in parts]
    assert ends == sorted(ends) and ends[-1] == len(messages) - 1
    trained = "".join(part.text[a:b] for part in parts for a, b in part.spans)
    assert all(trained.count(f"thought {k}\n") == 1 for k in range(len(answers)))
    assert isinstance(found, Conversation)


def test_a_turn_of_weight_0_is_only_history():
    messages = thinking("a", "b")
    messages[1]["weight"] = 0
    found = read(chats.THINKING, messages)
    assert [found.text[a:b] for a, b in found.spans] == [
        "<think>\nthought 1\n</think>\n\nb<|im_end|>\n"
    ]
    assert not found.parts
