import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packprep.format.digests import digest_of
from packprep.tokenizer import proof
from packprep.tokenizer.engines.byte_tokens import ByteTokens, byte_tokens_of
from packprep.tokenizer.engines.fastokens import FastEngine
from packprep.tokenizer.engines.gigatoken import GigatokenEngine
from packprep.tokenizer.proof import characters_are_proven
from tests.tokenizer import tokenizers_made as made
from tests.tokenizer.test_roles import needs, resolve

PREPEND = {"type": "Prepend", "prepend": "▁"}


def metaspace(**changes):
    """SentencePiece BPE whose pre-tokenizer replaces the spaces."""
    step = made.mistral_like()["pre_tokenizer"]
    return made.llama2_like(normalizer=None, pre_tokenizer={**step, **changes})


def with_added(parsed, text, **flags):
    """The tokenizer with another added token, which may be a token of the model too."""
    vocabulary = parsed["model"]["vocab"]
    last = max(*vocabulary.values(), *(token["id"] for token in parsed["added_tokens"]))
    own = {**made.added(vocabulary.get(text, last + 1), text, special=False), **flags}
    return {**parsed, "added_tokens": [*parsed["added_tokens"], own]}


def with_merged_spaces(parsed):
    """The tokenizer with a token for two spaces, which is also an added token, as Gemma's."""
    vocabulary, merges = parsed["model"]["vocab"], parsed["model"]["merges"]
    model = {
        **parsed["model"],
        "vocab": {**vocabulary, "▁▁": len(vocabulary)},
        "merges": [["▁", "▁"], *merges],
    }
    return with_added({**parsed, "model": model}, "▁▁")


def phi3_like():
    """Llama 2's tokenizer with tokens that strip the spaces after them, as Phi-3's."""
    parsed = made.llama2_like()
    for text in ("<|user|>", "<|end|>", "<|assistant|>"):
        parsed = with_added(parsed, text, rstrip=True, special=True)
    return parsed


SENTENCEPIECE = {
    "llama2": made.llama2_like(),
    "gemma": made.gemma_like(),
    "yi": made.llama2_like(normalizer=made.SPACE_TO_MARK),
    "no step": made.llama2_like(normalizer=None),
    "two added spaces": made.llama2_like(
        normalizer={"type": "Sequence", "normalizers": [PREPEND, PREPEND, made.SPACE_TO_MARK]}
    ),
    "lstrip": with_added(made.llama2_like(), "the dog", lstrip=True),
    "rstrip": with_added(made.llama2_like(), "the dog", rstrip=True, special=True),
    "gemma rstrip": with_added(made.gemma_like(), "the dog", rstrip=True),
    "phi3": phi3_like(),
    "both sides": with_added(made.llama2_like(), "the dog", lstrip=True, rstrip=True),
    "strip a token's start": with_added(
        with_added(made.llama2_like(), "the dog", rstrip=True), "\n\ta", rstrip=True, lstrip=True
    ),
    "strip normalized": with_added(
        made.llama2_like(), "the dog", lstrip=True, rstrip=True, normalized=True
    ),
    "normalized": with_added(made.llama2_like(), "the dog", normalized=True),
    "gemma normalized": with_added(made.gemma_like(), "the dog", normalized=True),
    "normalized ▁": with_added(made.llama2_like(), "▁the", normalized=True),
    "single_word": with_added(made.llama2_like(), "the dog", single_word=True),
    "model's own": with_added(made.llama2_like(), "the"),
    "merged spaces": with_merged_spaces(made.llama2_like()),
    "gemma merged spaces": with_merged_spaces(made.gemma_like()),
}
METASPACE = {
    "mistral": made.mistral_like(),
    "split": metaspace(split=True),
    "never": metaspace(prepend_scheme="never"),
    "mistral lstrip": with_added(made.mistral_like(), "the dog", lstrip=True),
    "mistral merged spaces": with_merged_spaces(made.mistral_like()),
}
BYTE_LEVEL = {
    "gpt2": made.gpt2_like(),
    "llama3": made.llama3_like(),
    "nfc": {**made.llama3_like(), "normalizer": {"type": "NFC"}},
    "byte-level lstrip": with_added(made.llama3_like(), "the dog", lstrip=True),
    "byte-level both sides": with_added(made.llama3_like(), "the dog", lstrip=True, rstrip=True),
    "byte-level rstrip": with_added(made.llama3_like(), "the dog", rstrip=True, special=True),
}
CASES = [
    *((FastEngine, name, parsed) for name, parsed in (SENTENCEPIECE | BYTE_LEVEL).items()),
    *((GigatokenEngine, name, parsed) for name, parsed in (SENTENCEPIECE | METASPACE).items()),
]
# The library ignores the flag of special tokens, so this pair does not pass the proof.
CASES = [case for case in CASES if case[:2] != (GigatokenEngine, "single_word")]
SHOWN_CASES = [
    *("fastokens llama2", "fastokens phi3", "fastokens gpt2", "gigatoken mistral"),
]
OWN = [
    "the dog", " the", "<|end|>", "<|user|>", "\x85", "\n\ta",
    "<s>", "</s>", "<unk>", "<|eot_id|>", "<0x0A>", "▁", "▁▁the", " ", "  ",
    "   ", "\n", "\t", "\r\n", "\0", "\x1c", "\u00a0", "\u3000", "e\u0301", "é", "世界", "🙂",
    "👩‍👩‍👧", "ཀ", "ß", "İ", "[UNK]", "##s", "\U0010ffff", "�",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


def vocabulary_of(folder, parsed):
    return resolve(folder / digest_of(json.dumps(parsed).encode()), parsed, needs())


def spans(engine, text, chat=True):
    """(token, begin, end) of each token of a text."""
    ids, _, characters = engine.own_characters([text], chat)
    tokens = engine.tokens_of(ids.tolist())
    return [(tokens[id], *own) for id, own in zip(ids.tolist(), characters.tolist(), strict=True)]


def without_reference(engine, monkeypatch):
    """Make an engine fail if it asks its reference."""

    def asked(texts, chat):
        raise AssertionError(f"the reference is asked for {texts}")

    monkeypatch.setattr(engine.reference, "encode_with_characters", asked)
    return engine


def equals_reference(engine, texts, chat):
    expected = engine.reference.encode_with_characters(texts, chat)
    for got, slow in zip(engine.own_characters(texts, chat), expected, strict=True):
        assert got.dtype == slow.dtype
        np.testing.assert_array_equal(got, slow)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "engine_of, name, parsed",
    [
        pytest.param(*case, id=name, marks=() if name in SHOWN_CASES else pytest.mark.long)
        for case in CASES
        for name in [f"{case[0].name} {case[1]}"]
    ],
)
def test_characters_are_the_reference_s_on_any_text(folder, engine_of, name, parsed):
    vocabulary = vocabulary_of(folder, parsed)
    engines = [engine_of(vocabulary, special_text) for special_text in ("text", "special")]
    text = st.lists(st.text(max_size=6) | st.sampled_from(OWN), max_size=8).map("".join)

    @given(st.lists(text, max_size=4), st.sampled_from(engines), st.booleans())
    @settings(max_examples=60)
    @example([], engines[0], True)
    @example(["", " ", "", "<s>", "the"], engines[0], True)
    @example(["  the dog  the dog", "the dogthe dog ", "<s>  the<s><s> </s>"], engines[0], True)
    @example(
        ["the dog \x1cthe dog\x1c", " \u2028\u200bthe dog\u3000\x85 the dog "], engines[0], True
    )
    @example(["the dog\n\ta", "the dog \n\ta \n\ta", "\n\n\ta the dog"], engines[0], False)
    @example(["▁▁▁ ▁", " ▁ ", "   the", "the   "], engines[0], False)
    def equal(texts, engine, chat):
        equals_reference(engine, texts, chat)

    equal()


def test_an_added_space_counts_as_the_character_after_it(folder, monkeypatch):
    engine = FastEngine(vocabulary_of(folder, SENTENCEPIECE["llama2"]), "text")
    without_reference(engine, monkeypatch)
    assert spans(engine, "the dog") == [("▁the", 0, 3), ("▁dog", 3, 7)]
    byte = [(f"<0x{value:02X}>", 1, 2) for value in "🙂".encode()]
    assert spans(engine, "é🙂") == [("▁", 0, 1), ("é", 0, 1), *byte]
    assert spans(engine, " the") == [("▁", 0, 1), ("▁the", 0, 4)]
    assert spans(engine, "<s>the<s> \t") == [
        *(("<s>", 0, 3), ("▁the", 3, 6), ("<s>", 6, 9)),
        *(("▁", 9, 10), ("▁", 9, 10), ("\t", 10, 11)),
    ]
    assert spans(engine, "") == [] and spans(engine, "<s><s>") == [("<s>", 0, 3), ("<s>", 3, 6)]


def test_metaspace_adds_a_space_only_at_the_start_of_a_text(folder, monkeypatch):
    engine = GigatokenEngine(vocabulary_of(folder, METASPACE["mistral"]), "text")
    without_reference(engine, monkeypatch)
    letters = [("t", 6, 7), ("h", 7, 8), ("e", 8, 9)]
    assert spans(engine, "the<s>the") == [("▁the", 0, 3), ("<s>", 3, 6), *letters]
    assert spans(engine, " the") == [("▁the", 0, 4)]
    assert spans(engine, "<s><s>the") == [("<s>", 0, 3), ("<s>", 3, 6), *letters]
    assert spans(engine, "\tthe")[:2] == [("▁", 0, 1), ("\t", 0, 1)]


@pytest.mark.parametrize(
    "name, text",
    [
        ("llama2", "a ▁ dog"),  # the model gives a space and this character the same token
        ("llama2", "▁"),
        ("strip normalized", "the dog "),
        ("strip a token's start", "the dog\n\ta"),  # the reference gives \n\t to the first one
        ("normalized", "a the dog the"),
        ("two added spaces", "the"),
        ("merged spaces", "  the"),  # the added space and another one are one token
        ("gemma merged spaces", "▁▁"),
    ],
)
def test_a_text_that_differs_from_its_tokens_goes_to_the_reference(folder, monkeypatch, name, text):
    engine = FastEngine(vocabulary_of(folder, SENTENCEPIECE[name]), "text")
    asked, encode = [], engine.reference.encode_with_characters
    monkeypatch.setattr(
        engine.reference,
        "encode_with_characters",
        lambda texts, chat: asked.extend(texts) or encode(texts, chat),
    )
    ids, offsets, characters = engine.own_characters(["the dog", text, "\n"], True)
    assert text in asked and (name == "two added spaces" or asked == [text])
    for got, slow in zip(
        (ids, offsets, characters), encode(["the dog", text, "\n"], True), strict=True
    ):
        np.testing.assert_array_equal(got, slow)


def test_an_added_token_stands_for_the_spaces_that_it_strips(folder, monkeypatch):
    engine = FastEngine(vocabulary_of(folder, SENTENCEPIECE["phi3"]), "text")
    without_reference(engine, monkeypatch)
    assert spans(engine, "<|user|> \n a <|end|>\n<|assistant|>\n") == [
        *(("<|user|>", 0, 11), ("▁a", 11, 12), ("▁", 12, 13)),
        *(("<|end|>", 13, 21), ("<|assistant|>", 21, 35)),
    ]
    engine = FastEngine(vocabulary_of(folder, SENTENCEPIECE["both sides"]), "text")
    without_reference(engine, monkeypatch)
    assert spans(engine, "a \n the dog \u3000é") == [
        *(("▁a", 0, 1), ("the dog", 1, 13), ("▁", 13, 14), ("é", 13, 14)),
    ]
    # Only the first of two tokens stands for the spaces between them.
    assert spans(engine, "the dog  the dog ") == [("the dog", 0, 9), ("the dog", 9, 17)]


def test_a_token_for_two_spaces_that_is_also_an_added_token_needs_no_reference(folder, monkeypatch):
    engine = FastEngine(vocabulary_of(folder, SENTENCEPIECE["gemma merged spaces"]), "text")
    without_reference(engine, monkeypatch)
    assert spans(engine, "a  ") == [("a", 0, 1), ("▁▁", 1, 3)]


@pytest.mark.parametrize(
    "changes", [{"prepend_scheme": "always"}, {"prepend_scheme": None}, {"replacement": "_"}]
)
def test_another_way_to_add_spaces_leaves_characters_to_the_reference(folder, changes):
    parsed = metaspace(**changes)
    assert byte_tokens_of(json.dumps(parsed).encode(), {}) is None


def test_an_unsupported_tokenizer_s_characters_come_from_the_reference(folder):
    vocabulary = vocabulary_of(folder, metaspace(prepend_scheme="always"))
    engine = GigatokenEngine(vocabulary, "text")
    assert not engine.can_tell_characters()
    texts = ["the dog", "<s>é the"]
    for got, slow in zip(
        engine.encode_with_characters(texts, True),
        engine.reference.encode_with_characters(texts, True),
        strict=True,
    ):
        np.testing.assert_array_equal(got, slow)


@pytest.mark.parametrize("change", ["begin", "end", "last"])
@pytest.mark.parametrize("engine_of", [FastEngine, GigatokenEngine])
def test_characters_that_differ_from_the_reference_s_are_not_proven(
    folder, monkeypatch, engine_of, change
):
    vocabulary = vocabulary_of(folder, SENTENCEPIECE["llama2"])
    engine = engine_of(vocabulary, "text")
    monkeypatch.setattr(proof, "NASTY_TEXTS", 50)  # also the name of the proof in the cache
    assert characters_are_proven.__wrapped__(engine, "text", vocabulary)
    compute = ByteTokens.characters

    def wrong(self, texts, ids, offsets):
        characters, untold = compute(self, texts, ids, offsets)
        if change == "last":
            characters[-1:, 1] += 1
        else:
            # The added space takes no character.
            lone = self._after_added_space(texts, ids, offsets) & (self._starts[ids] == 1)
            characters[lone, 1] -= change == "end"
            characters[lone, 0] += change == "begin"
        return characters, untold

    monkeypatch.setattr(ByteTokens, "characters", wrong)
    assert not characters_are_proven.__wrapped__(engine, "text", vocabulary)


def test_a_token_without_bytes_and_an_id_beyond_the_vocabulary_equal_no_text():
    tokens = ByteTokens({0: b"a", 2: b""}, [])
    for ids in ([0, 1], [0, 2], [0, 3], [0, 9], [1], [2]):
        _, untold = tokens.characters(["a"], np.array(ids, np.int32), np.array([0, len(ids)]))
        assert untold.tolist() == [0]
    characters, untold = tokens.characters(
        ["a", "", "aa"], np.zeros(3, np.int32), np.array([0, 1, 1, 3])
    )
    assert characters.tolist() == [[0, 1], [0, 1], [1, 2]] and not len(untold)
