import json
from types import SimpleNamespace

import numpy as np
import pytest

from packprep import cache
from packprep.randomness import text_key
from packprep.tokenizer import proof
from packprep.tokenizer.encoding import Tokens, tokenize
from packprep.tokenizer.engines.engine import EngineFault, EngineRefusal
from packprep.tokenizer.engines.fastokens import FastEngine
from packprep.tokenizer.engines.reference import ReferenceEngine
from packprep.tokenizer.proof import (
    MAX_CHARACTERS,
    RATE,
    chat_difference,
    compared,
    difference,
    fault,
    prove,
    prove_on_nasty_text,
    texts_with_added,
)
from tests.tokenizer import tokenizers_made as made
from tests.tokenizer.engines_made import WrongEngine
from tests.tokenizer.test_roles import needs, resolve


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return resolve(tmp_path_factory.mktemp("gpt2"), made.gpt2_like(), needs())


def test_an_engine_that_is_right_passes_and_one_that_is_believed_is_not_asked(gpt2):
    prove_on_nasty_text(FastEngine(gpt2, "text"), "text", gpt2)
    prove_on_nasty_text(ReferenceEngine(gpt2, "text"), "text", gpt2)


def test_that_an_engine_is_compared_is_said_before_it_begins_and_where_it_is(
    gpt2, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        cache, "cache_folders", lambda: cache.CacheFolders((str(tmp_path),), str(tmp_path))
    )
    engine, said = FastEngine(gpt2, "text"), []
    monkeypatch.setattr(proof, "prove", lambda *given: said.append(capsys.readouterr().err))
    prove_on_nasty_text(engine, "text", gpt2)
    assert said == ["packprep: comparing engine fastokens with the reference, once per tokenizer\n"]
    prove_on_nasty_text(engine, "text", gpt2)  # as is remembered
    assert len(said) == 1 and capsys.readouterr().err == ""


def test_the_reference_has_its_tokens_and_no_others(gpt2):
    found = ReferenceEngine(gpt2, "text").tokens_of([64, 10**6, 320])
    assert list(found) == [64, 320] and found[320] == "<|endoftext|>"


@pytest.mark.parametrize("trap", ["\r\n", "<|endoftext|>", "\u0301", "🇩🇪", "    "])
def test_an_engine_that_errs_on_nasty_text_is_refused_with_text_and_both_ids(gpt2, trap):
    with pytest.raises(
        EngineRefusal,
        match=r"it differs from the reference: the text .* gives \[.*\] .* reference gives \[",
    ):
        prove_on_nasty_text(WrongEngine(gpt2, "text", trap), "text", gpt2)


def test_a_difference_is_shown_by_what_is_around_it(gpt2):
    text = "the lazy dog " * 50 + "TRAP"
    engine = WrongEngine(gpt2, "text", "TRAP")
    expected = engine.reference.encode([text])[0].tolist()
    tokens = tokenize(engine, ["the", text], "text", gpt2)
    found = difference(engine, text, tokens, 1, "text", gpt2)
    assert (
        text[found.character :] == found.text
        and found.text.endswith("TRAP")
        and len(found.text) < 60
    )
    assert found.reference_ids == expected[found.token :] and found.ids == [
        *expected[found.token : -1],
        0,
    ]
    assert str(found.ids) in str(found) and str(found.reference_ids) in str(found)
    assert difference(engine, "the", tokens, 0, "text", gpt2) is None


@pytest.mark.long
@pytest.mark.parametrize("chat", [True, False])
def test_other_characters_of_the_same_ids_are_a_difference(gpt2, monkeypatch, chat):
    engine, text = FastEngine(gpt2, "text"), "the lazy dog " * 50 + "é<|endoftext|>"
    ids, offsets, characters = engine.reference.encode_with_characters([text], chat)
    tokens = Tokens(ids, offsets, [])
    assert chat_difference(engine, text, tokens, 0, chat) is None
    wrong = characters.copy()
    token = int(np.flatnonzero(characters[:, 0] == 650)[0])
    wrong[token, 1] += 1
    monkeypatch.setattr(engine, "encode_with_characters", lambda *_: (ids, offsets, wrong))
    found = chat_difference(engine, text, tokens, 0, chat)
    assert found.token == token and text[found.character :] == found.text
    assert found.ids.startswith("the characters [[650, 652]")
    assert found.reference_ids.startswith("the characters [[650, 651]")
    monkeypatch.setattr(engine, "encode_with_characters", lambda *_: (ids, offsets, characters))
    tokens.ids[-1] = 0
    assert chat_difference(engine, text, tokens, 0, chat).ids[-1] == 0


def test_a_missing_token_at_the_end_is_a_difference(gpt2):
    reference = ReferenceEngine(gpt2, "text")
    tokens = tokenize(reference, ["the lazy dog"], "text", gpt2)
    cut = tokens._replace(ids=tokens.ids[:-1], offsets=np.array([0, len(tokens.ids) - 1]))
    found = difference(WrongEngine(gpt2, "text", "-"), "the lazy dog", cut, 0, "text", gpt2)
    assert found.reference_ids == [*found.ids, int(tokens.ids[-1])]


def test_a_rejection_that_the_reference_does_not_give_is_a_difference(gpt2):
    engine = WrongEngine(gpt2, "text", "-")
    tokens = tokenize(engine, ["the\ud800"], "text", gpt2)
    assert difference(engine, "the\ud800", tokens, 0, "text", gpt2) is None
    found = difference(engine, "the", tokens, 0, "text", gpt2)
    assert (
        found.ids.startswith("no ids but a rejection (U+D800 at character 3")
        and found.reference_ids
    )


def test_a_text_on_which_the_reference_fails_is_not_compared(gpt2, monkeypatch):
    engine = WrongEngine(gpt2, "text", "-")
    tokens = tokenize(engine, ["the lazy dog"], "text", gpt2)

    encode = engine.reference.encode

    def fail(texts):
        if any(texts):
            raise ValueError("not this one")
        return encode(texts)

    monkeypatch.setattr(engine.reference, "encode", fail)
    assert difference(engine, "the lazy dog", tokens, 0, "text", gpt2) is None


@pytest.mark.long
def test_of_a_long_text_the_begin_is_compared(gpt2):
    long = "a " * (MAX_CHARACTERS // 2)
    engine = WrongEngine(gpt2, "text", "TRAP")
    for text, differs in (("TRAP" + long, True), (long + "TRAP", False)):
        tokens = tokenize(engine, [text], "text", gpt2)
        assert (difference(engine, text, tokens, 0, "text", gpt2) is not None) == differs


def test_an_engine_that_breaks_down_is_refused(gpt2):
    with pytest.raises(EngineRefusal, match="it failed .* at the text 'TRAP'"):
        prove(WrongEngine(gpt2, "text", "TRAP", breaks=True), ["the", "TRAP"], "text", gpt2)


def test_a_failure_of_an_engine_is_shown_with_the_begin_of_its_text_and_of_the_reference_s_ids(
    gpt2,
):
    engine, text = WrongEngine(gpt2, "text", "TRAP", breaks=True), "TRAP " + "the lazy dog " * 50
    with pytest.raises(EngineFault) as failed:
        engine.encode([text])
    found = fault(engine, failed.value)
    assert found.text == text[:80] and (found.character, found.token) == (0, 0)
    assert found.ids == f"no ids but an error ({failed.value})"
    assert found.reference_ids == engine.reference.encode([text])[0][:16].tolist()


@pytest.mark.long
def test_texts_of_a_proof_join_each_end_of_an_added_token_to_a_special_and_an_ordinary_one():
    texts = ["<|a|>", "|>b", "|>c", ">>", "b<", "x" * 1001, "a", "<" * 40]
    special = {0, 2, 4, 7}
    entries = [made.added(i, text, i in special - {7}) for i, text in enumerate(texts)]
    data = json.dumps({**made.gpt2_like(), "added_tokens": entries}).encode()
    found = texts_with_added(SimpleNamespace(tokenizer_json=data, special_ids=(7,)))
    short = [i for i, text in enumerate(texts) if len(text) <= 1000]
    for i, of_i in zip(short, found, strict=False):
        assert of_i.count(texts[i]) >= 6
    joined = set(found[len(short) :])
    assert "<|a|>b" in joined and len(joined) == len(found) - len(short)
    expected = set()
    for i in short:
        for size in range(1, min(len(texts[i]), 33)):
            for kind in (special, set(short) - special):
                others = [texts[k] for k in short if k in kind and len(texts[k]) > size]
                fitting = [text for text in others if text.startswith(texts[i][-size:])]
                expected |= {texts[i] + text[size:] for text in fitting[:1]}
    assert joined == expected


def test_one_document_of_2000_is_compared_whatever_else_is_read_with_it():
    key, positions = text_key(0, "web", "a.jsonl"), np.arange(400_000) * 300
    found = compared(key, positions, 0)
    assert abs(len(found) - 400_000 / RATE) < 4 * np.sqrt(400_000 / RATE)
    later = compared(key, positions[1000:], 0) + 1000
    np.testing.assert_array_equal(later, found[found >= 1000])
    for other in (
        compared(key, positions, 1),
        compared(text_key(1, "web", "a.jsonl"), positions, 0),
    ):
        assert len(np.intersect1d(found, other)) < 10 < len(other)


def test_positions_beyond_32_bits_have_chances_of_their_own():
    key, positions = text_key(0, "web", "a.jsonl"), np.arange(100_000)
    assert set(compared(key, positions, 0)) != set(compared(key, positions + (1 << 32), 0))
