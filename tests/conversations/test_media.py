"""What a record's media come to among its tokens, and which records are turned away."""

import json

import numpy as np
import pytest

from packprep.conversations.media import MediaPlace
from packprep.conversations.supervision import Conversation, conversation
from packprep.conversations.training import tokenize_supervised
from packprep.errors import RecipeError
from packprep.recipe import Specials
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import line_decoder
from packprep.tokenizer.engines.reference import ReferenceEngine
from packprep.tokenizer.roles import Needs, resolve_vocabulary
from tests import media_made
from tests.tokenizer import tokenizers_made
from tests.twin.reading import TextReader, text_of
from tests.twin.records import Keys, parsed

KINDS = ("film", "image")
TOKENS = ("<pad>", "<eos>", *media_made.tokens())
GOOD = {"at": 1, "tokens": 2, "ref": "r", "kind": "image"}


def vocabulary_of(folder, tokenizer=None, **specials):
    tokenizers_made.write(folder / "t", tokenizer or tokenizers_made.byte_level(*TOKENS))
    given = {
        "eos": "<eos>",
        "pad": "<pad>",
        "media": {"film": ("", "<|film|>", ""), "image": tuple(TOKENS[2:5])},
    }
    return resolve_vocabulary(
        "t", folder, Specials(**{**given, **specials}), Needs(frozenset(["eos"]), (), 0)
    )


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return vocabulary_of(tmp_path_factory.mktemp("media"))


def tokenized(vocabulary, *found, special_text="text"):
    engine = ReferenceEngine(vocabulary, special_text)
    texts = [one if isinstance(one, str) else one.text for one in found]
    conversations = {i: one for i, one in enumerate(found) if isinstance(one, Conversation)}
    return tokenize_supervised(engine, texts, conversations, special_text, vocabulary)


def record(text, media, **more):
    """The conversation of a text's record, read from its line; or why it is turned away."""
    line = json.dumps({"text": text, "media": media, **more}).encode()
    outcome = line_decoder("text", Fields(kinds=KINDS))(line)
    return outcome if isinstance(outcome, str | tuple) else conversation(outcome, None)


@pytest.mark.parametrize("media, words", [
    ({}, "a list of"), ("x", "a list of"), ([1], "entry 0 is no object"), ([{}], "entry 0: at is null or missing"),
    ([{**GOOD, "at": 5}], "at is 5; a character of the text, 0 … 4"), ([{**GOOD, "at": -1}], "at is -1"),
    ([{**GOOD, "at": True}], "at is a bool"), ([{**GOOD, "at": 1.5}], "at is 1.5"), ([{**GOOD, "at": 10**30}], "at is a int"),
    ([GOOD, {**GOOD, "at": 0}], "entry 1: at is 0, before the one before it, 1"),
    ([{**GOOD, "tokens": 0}], "tokens is 0; a count"), ([{**GOOD, "tokens": -5}], "tokens is -5"),
    ([{**GOOD, "tokens": 1 << 40}], "tokens is 1099511627776; a count, 1 … 8388608"),
    ([{**GOOD, "tokens": "7"}], "tokens is '7'"),
    ([{**GOOD, "tokens": 8 << 20}, GOOD], "8388610 slots; at most 8388608"),
    ([{**GOOD, "ref": None}], "ref is null or missing"), ([{**GOOD, "ref": 3}], "ref is 3"),
    ([{**GOOD, "ref": "\\ud800"}], "ref is"), ([{**GOOD, "kind": "sound"}], "kind is 'sound'; specials.media has film, image"),
    ([{**GOOD, "kind": ["image"]}], "kind is a list"),
])  # fmt: skip
def test_a_record_of_bad_media_is_turned_away(media, words):
    line = json.dumps({"text": "text", "media": media}).replace("\\\\ud800", "\\ud800").encode()
    found = conversation(line_decoder("text", Fields(kinds=KINDS))(line), None)
    assert found[0] == "bad_media" and words in found[1]
    reader = TextReader(True, lambda talk: None)
    assert text_of(parsed(line.decode()), Keys("text", kinds=KINDS), reader) is None


def test_what_says_nothing_of_media_is_a_text():
    for line in (
        b'{"text": "a"}',
        b'{"text": "a", "media": []}',
        b'{"text": "a", "media": null}',
        b'{"text": "a", "weight": null}',
    ):
        assert line_decoder("text", Fields(kinds=KINDS))(line) == "a"
    # no kind, nothing is looked at
    assert line_decoder("text", Fields())(b'{"text": "a", "media": [1]}') == "a"


def test_whole_numbers_of_any_type_are_places():
    places = record("abcd", [{**GOOD, "at": 2.0, "tokens": 3.0}]).places
    assert [(place.at, place.tokens) for place in places] == [(2, 3)] and type(
        places[0].tokens
    ) is int


@pytest.mark.parametrize("ref", media_made.REFS)
def test_any_text_is_a_ref(vocabulary, ref):
    _, trained = tokenized(vocabulary, record("ab", [{**GOOD, "ref": ref}]))
    assert trained[0].places.refs.tobytes().decode() == ref


def test_places_stand_where_their_text_is_cut(vocabulary):
    """ids, spans, slots and what is trained, of a text by itself, of one with loss_spans, and of
    one without media."""
    media = [
        {**GOOD, "at": 0, "tokens": 3},
        {**GOOD, "at": 2, "kind": "film"},
        {**GOOD, "at": 2},
        {**GOOD, "at": 4},
    ]
    one, other = record("dog.", media), record("dog.", media, loss_spans=[[2, 4, 0.5]])
    tokens, trained = tokenized(vocabulary, one, "dog.", other)
    engine = ReferenceEngine(vocabulary, "text")
    do, g = (engine.encode([text])[0].tolist() for text in ("do", "g."))
    begin, image, end, film = (vocabulary.media["image"] + vocabulary.media["film"])[:3] + (
        vocabulary.media["film"][1],
    )
    ids = [
        begin,
        *[image] * 3,
        end,
        *do,
        film,
        film,
        begin,
        image,
        image,
        end,
        *g,
        begin,
        image,
        image,
        end,
    ]
    assert tokens.ids[tokens.offsets[0] : tokens.offsets[1]].tolist() == ids
    assert tokens.ids[tokens.offsets[2] :].tolist() == ids
    n, m = len(do), len(g)
    spans = [[0, 5], [5 + n, 7 + n], [7 + n, 11 + n], [11 + n + m, 15 + n + m]]
    for i in (0, 2):
        places = trained[i].places
        assert places.spans.tolist() == spans
        assert places.first.tolist() == [1, 5 + n, 8 + n, 12 + n + m]
        assert places.tokens.tolist() == [3, 2, 2, 2] and places.kind.tolist() == [1, 0, 1, 1]
    assert trained[0].spans.tolist() == [[5, 5 + n], [11 + n, 11 + n + m]] and trained[
        0
    ].weights.tolist() == [1, 1]
    assert trained[2].spans.tolist() == [[11 + n, 11 + n + m]] and trained[2].weights.tolist() == [
        0.5
    ]
    assert trained[0].eos_weight == 1 and trained[2].eos_weight == 0.5


def chat(content, source=media_made.TEMPLATE):
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
    outcome = line_decoder("text", Fields(kinds=KINDS))(json.dumps({"messages": messages}).encode())
    return conversation(outcome, source)


PART = {"type": "image", "ref": "cat.jpg", "tokens": 4}


def test_parts_are_the_placeholders_that_a_template_writes(vocabulary):
    found = chat([PART, {"type": "text", "text": "A cat?"}, {**PART, "type": "film", "tokens": 2}])
    tokens, trained = tokenized(vocabulary, found)
    text = found.text.replace("<|image|>", "<|image|>" * 4).replace("<|film|>", "<|film|>" * 2)
    engine = ReferenceEngine(vocabulary, "text")
    ids, _, _ = engine.encode_with_characters([text], True)
    # as a processor does, which repeats them in the text
    assert tokens.ids.tolist() == ids.tolist()
    places = trained[0].places
    assert [tokens.ids[a:b].tolist() for a, b in places.spans.tolist()] == [
        [
            vocabulary.media["image"][0],
            *[vocabulary.media["image"][1]] * 4,
            vocabulary.media["image"][2],
        ],
        [vocabulary.media["film"][1]] * 2,
    ]
    begin, end = trained[0].spans[-1]
    assert "Yes." in "".join(engine.texts_of(tokens.ids[begin:end].tolist()))


@pytest.mark.parametrize("source, content, words", [
    ("{% for m in messages %}{{ m.content[0].text if m.content is not string else m.content }}{% endfor %}",
     [{"type": "text", "text": "A"}, PART], "writes 0 placeholders for 1 parts"),
    (media_made.TEMPLATE.replace("<|film|>", "<|image|>"), [{**PART, "type": "film"}], "another placeholder than that of part 0"),
    (media_made.TEMPLATE.replace("<|film|>", "<|film|><|film|>"), [{**PART, "type": "film"}],
     "writes 2 placeholders for 1 parts"),
])  # fmt: skip
def test_a_template_that_writes_other_placeholders_turns_the_conversation_away(
    vocabulary, source, content, words
):
    found = chat(content, "{% if add_generation_prompt %}{% endif %}" + source)
    tokens, trained = tokenized(vocabulary, found)
    assert [reason for _, reason, _ in tokens.rejected] == [
        "bad_media"
    ] and words in tokens.rejected[0][2]
    assert not len(tokens.ids) and not trained


@pytest.mark.parametrize("content, reason, words", [
    ([{"type": "sound", "ref": "x", "tokens": 1}], "bad_messages", "a kind of specials.media (film, image), alone are read"),
    ([{"type": "image", "ref": "x"}], "bad_media", "message 0: part 0: tokens is null or missing"),
    ([{"type": "image", "tokens": 3}], "bad_media", "message 0: part 0: ref is null or missing"),
])  # fmt: skip
def test_a_bad_part_turns_the_conversation_away(content, reason, words):
    found = chat(content)
    assert found[0] == reason and words in found[1]


def test_a_slot_token_at_no_place_turns_a_document_away(vocabulary):
    texts = "no <|image|>", record("ab <|film|>", [GOOD])
    tokens, _ = tokenized(vocabulary, *texts, special_text="special")
    assert [(i, reason) for i, reason, _ in tokens.rejected] == [(0, "bad_media"), (1, "bad_media")]
    tokens, trained = tokenized(vocabulary, *texts)  # there it is text
    assert not tokens.rejected and len(trained) == 1


def test_a_tokenizer_that_strips_spaces_beside_special_tokens_takes_media_in_messages_alone(
    tmp_path,
):
    tokenizer = tokenizers_made.byte_level(*TOKENS)
    tokenizer["added_tokens"][TOKENS.index("<|end|>")]["rstrip"] = True
    vocabulary = vocabulary_of(tmp_path, tokenizer)
    with pytest.raises(RecipeError, match="write such documents as messages, with parts of media"):
        tokenized(vocabulary, record("ab", [GOOD]))
    assert len(tokenized(vocabulary, chat([PART]))[1]) == 1


def test_the_template_sees_neither_ref_nor_tokens():
    keys = "{{ m.content if m.content is string else m.content[0].keys() | list | join(' ') }}"
    source = (
        f"{{% if add_generation_prompt %}}{{% endif %}}{{% for m in messages %}}{keys}{{%"
        " endfor %}"
    )
    found = chat([{**PART, "detail": "low"}], source)
    assert found.text == "type detailYes." and found.places == (MediaPlace("image", 4, "cat.jpg"),)


def test_a_rejected_piece_rejects_its_document_alone(vocabulary):
    tokens, trained = tokenized(
        vocabulary, record("ab", [GOOD]), "x", record("cd", [GOOD]), special_text="reject"
    )
    assert not tokens.rejected and sorted(trained) == [0, 2]
    tokens, trained = tokenized(
        vocabulary, record("a<pad>b", [GOOD]), "x", record("cd", [GOOD]), special_text="reject"
    )
    assert [(i, reason) for i, reason, _ in tokens.rejected] == [(0, "special_text")]
    assert "counted from character 1" in tokens.rejected[0][2] and sorted(trained) == [2]
    assert np.diff(tokens.offsets)[0] == 0
