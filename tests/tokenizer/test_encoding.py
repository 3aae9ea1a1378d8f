import json
import os
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from packprep.recipe import Specials
from packprep.tokenizer.encoding import tokenize
from packprep.tokenizer.engines import load_engine
from packprep.tokenizer.engines.reference import BATCH_CHARACTERS, NormalForms, NormalizerLimit
from packprep.tokenizer.file import BYTES_SPECIALS
from packprep.tokenizer.roles import resolve_vocabulary
from tests.tokenizer import tokenizers_made as made
from tests.tokenizer.test_roles import needs, resolve
from tests.twin.reading import Text
from tests.twin.tokens import Tokenizer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REFERENCE = {"name": "reference", "version": tokenizers.__version__}
BYTES = {"name": "bytes", "version": "1"}
TEXTS = ["the lazy dog", "", "ünïcödé 世界 🙂\n", "jumps over the lazy dog and then it jumps"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def bytes_vocabulary(folder):
    return resolve_vocabulary("bytes", folder, Specials(), needs())


@pytest.fixture(scope="module")
def llama(folder):
    specials = Specials(mode_tokens={"[NLU]": "<|reserved_special_token_0|>"})
    return resolve(folder / "llama", made.llama3_like(), needs(modes=["[NLU]"]), specials)


def documents(tokens):
    return [
        tokens.ids[a:b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)
    ]


def reference(vocabulary, texts, special_text="text"):
    return tokenize(
        load_engine(REFERENCE, vocabulary, special_text), texts, special_text, vocabulary
    )


def test_tokens_decode_to_the_text(llama):
    tokens = reference(llama, TEXTS)
    assert tokens.ids.dtype == np.int32
    assert tokens.offsets.dtype == np.int64
    assert tokens.rejected == []
    tokenizer = tokenizers.Tokenizer.from_buffer(llama.tokenizer_json)
    assert [tokenizer.decode(ids) for ids in documents(tokens)] == TEXTS


def test_nothing_of_the_tokenizer_s_post_processor_truncation_or_padding_runs(folder, llama):
    assert 320 not in reference(llama, TEXTS).ids
    bert = resolve(folder / "bert", made.bert_like(), needs("mask"))
    lengths = [
        len(ids)
        for ids in documents(reference(bert, ["the lazy dog and the quick brown fox", "dog"]))
    ]
    assert lengths == [8, 1]


def test_dropout_does_not_run(folder):
    tokenizer = made.gpt2_like()
    tokenizer["model"]["dropout"] = 0.9
    vocabulary = resolve(folder / "dropout", tokenizer)
    ids = documents(reference(vocabulary, ["jumps over the lazy dog"] * 20))
    assert all(other == ids[0] for other in ids)
    assert (
        ids[0]
        == documents(
            reference(resolve(folder / "gpt2", made.gpt2_like()), ["jumps over the lazy dog"])
        )[0]
    )


def test_batches_do_not_show(llama, monkeypatch):
    whole = reference(llama, TEXTS * 5)
    assert BATCH_CHARACTERS > 1000
    monkeypatch.setattr("packprep.tokenizer.engines.reference.BATCH_CHARACTERS", 7)
    parts = reference(llama, TEXTS * 5)
    assert documents(parts) == documents(whole)


@pytest.mark.parametrize("engine", [REFERENCE, BYTES])
def test_no_texts_give_no_tokens(bytes_vocabulary, engine):
    tokens = tokenize(load_engine(engine, bytes_vocabulary, "text"), [], "text", bytes_vocabulary)
    assert (tokens.ids.tolist(), tokens.offsets.tolist(), tokens.rejected) == ([], [0], [])


# special tokens in text


def test_fault_26_special_token_text_in_a_document_stays_text(llama):
    texts = [
        "a <|end_of_text|> b",
        "<|begin_of_text|>",
        "x<|reserved_special_token_0|>y",
        "<|eot_id|>",
    ]
    tokens = reference(llama, texts)
    assert tokens.rejected == []
    assert not set(tokens.ids.tolist()) & set(llama.special_ids)
    tokenizer = tokenizers.Tokenizer.from_buffer(llama.tokenizer_json)
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents(tokens)] == texts


def test_fault_26_a_role_played_by_an_added_token_that_is_not_special_stays_text(folder):
    tokenizer = made.gpt2_like()
    tokenizer["added_tokens"] += [
        made.added(321, "<tool>", special=False),
        made.added(322, "<other>", special=False),
    ]
    vocabulary = resolve(
        folder / "tool", tokenizer, specials=Specials(mode_tokens={"[NLU]": "<tool>"})
    )
    tokens = reference(vocabulary, ["<tool>", "<other>"])
    assert tokens.rejected == []
    plain, ordinary = documents(tokens)
    assert 321 not in plain
    assert ordinary == [322]
    assert documents(reference(vocabulary, ["<tool>"], "special")) == [[321]]


def test_fault_26_where_the_model_itself_gives_the_special_token_the_document_is_rejected(folder):
    vocabulary = resolve(folder / "t5", made.t5_like(), needs(sentinels=3))
    tokens = reference(vocabulary, ["the dog", "the <pad> dog", "lazy", "a<extra_id_3>"])
    assert [(i, reason) for i, reason, _ in tokens.rejected] == [
        (1, "special_text"),
        (3, "special_text"),
    ]
    assert "<pad> (id 0)" in tokens.rejected[0][2]
    assert [len(ids) > 0 for ids in documents(tokens)] == [True, False, True, False]
    assert documents(tokens)[2] == documents(reference(vocabulary, ["lazy"]))[0]


def test_unknown_characters_are_no_special_text(folder):
    t5 = resolve(folder / "t5 unknown", made.t5_like(), needs())
    assert reference(t5, ["the 世界 dog"]).rejected == []
    bert = resolve(folder / "bert unknown", made.bert_like(), needs())
    tokens = reference(bert, ["the 世界 dog"])
    assert tokens.rejected == []
    assert 6 in tokens.ids


def test_special_text_may_be_special(llama):
    tokens = reference(llama, ["<|end_of_text|>a<|reserved_special_token_0|>"], "special")
    letter = reference(llama, ["a"]).ids.tolist()
    assert tokens.ids.tolist() == [321, *letter, 322]


def test_special_text_may_be_rejected(llama):
    tokens = reference(
        llama,
        ["fine", "a <|end_of_text|> b", "<|end_of_text", "<|reserved_special_token_11|>"],
        "reject",
    )
    assert tokens.rejected == [
        (1, "special_text", "<|end_of_text|> at character 2"),
        (3, "special_text", "<|reserved_special_token_11|> at character 0"),
    ]
    assert [len(ids) > 0 for ids in documents(tokens)] == [True, False, True, False]


def test_an_ordinary_token_with_a_role_rejects_where_it_occurs(folder):
    vocabulary = resolve(folder / "newline", made.gpt2_like(), specials=Specials(eos="Ċ"))
    assert [i for i, _, _ in reference(vocabulary, ["one line", "two\nlines"]).rejected] == [1]


@pytest.mark.parametrize("special_text", ["text", "special", "reject"])
@pytest.mark.parametrize("engine", [REFERENCE, BYTES])
def test_a_lone_surrogate_is_rejected(bytes_vocabulary, engine, special_text):
    loaded = load_engine(engine, bytes_vocabulary, special_text)
    tokens = tokenize(loaded, ["ok", "né\ud83d!", "🙂", "\udc00"], special_text, bytes_vocabulary)
    assert [(i, reason) for i, reason, _ in tokens.rejected] == [
        (1, "lone_surrogate"),
        (3, "lone_surrogate"),
    ]
    assert tokens.rejected[0][2].startswith("U+D83D at character 2")
    assert documents(tokens) == [[111, 107], [], list("🙂".encode()), []]


# engines

PIECES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        [
            *BYTES_SPECIALS[:12],
            "<extra_id_25",
            "<<pad>",
            "[NLU",
            "\r\n",
            "\u0085",
            "\ufeff",
            "e\u0301",
        ]
    ),
)
DOCUMENTS = st.lists(st.lists(PIECES, max_size=6).map("".join), max_size=5)


@pytest.mark.parametrize("special_text", ["text", "special", "reject"])
def test_the_bytes_engine_equals_the_reference(bytes_vocabulary, special_text):
    slow = load_engine(REFERENCE, bytes_vocabulary, special_text)
    fast = load_engine(BYTES, bytes_vocabulary, special_text)

    @given(DOCUMENTS)
    @example(["".join(chr(c) for c in range(0x3000) if not 0xD800 <= c < 0xE000), "\U0010ffff"])
    def equal(texts):
        expected = tokenize(slow, texts, special_text, bytes_vocabulary)
        got = tokenize(fast, texts, special_text, bytes_vocabulary)
        assert got.rejected == expected.rejected
        assert (got.ids.dtype, got.offsets.dtype) == (expected.ids.dtype, expected.offsets.dtype)
        np.testing.assert_array_equal(got.ids, expected.ids)
        np.testing.assert_array_equal(got.offsets, expected.offsets)
        if special_text == "text":
            assert [bytes(ids).decode() for ids in documents(got)] == texts

    equal()


# texts on which the tokenizer fails


def failing_on(kind):
    """(a tokenizer.json that fails on some texts, one of them)."""
    parsed = made.gpt2_like()
    if kind == "pattern":
        pattern = {
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
        steps = [pattern, {**parsed["pre_tokenizer"], "use_regex": False}]
        return {
            **parsed,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        }, "a" * 60 + "b"
    words = {word: id for id, word in enumerate(["the", "dog", "<|endoftext|>", *"tehdog"])}
    if kind == "unigram":
        model = {
            "type": "Unigram",
            "unk_id": None,
            "vocab": [[word, -1.0 - id] for word, id in words.items()],
        }
    else:
        model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    changes = {"model": model, "added_tokens": [made.added(2, "<|endoftext|>")]}
    return {**parsed, **changes, "pre_tokenizer": {"type": "Whitespace"}, "decoder": None}, "the Ω"


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("kind", ["unigram", "words", "pattern"])
def test_a_text_on_which_the_tokenizer_fails_is_rejected_and_the_others_are_as_without_it(
    tmp_path, kind, begins
):
    parsed, bad = failing_on(kind)
    vocabulary = resolve(tmp_path / kind, parsed, needs())
    engine = load_engine(REFERENCE, vocabulary, "text")
    tokens = tokenize(
        engine, ["the dog", bad, "", "dog", "x\ud800", bad], "text", vocabulary, begins
    )
    without = tokenize(engine, ["the dog", "", "", "dog", "", ""], "text", vocabulary, begins)
    failed = ("tokenizer_error", "the tokenizer fails on its text")
    assert [entry for entry in tokens.rejected if entry[0] != 4] == [(1, *failed), (5, *failed)]
    assert documents(tokens) == documents(without) and documents(tokens)[0] and documents(tokens)[3]


def replacing(*pairs, regex=False):
    kind = "Regex" if regex else "String"
    return [{"type": "Replace", "pattern": {kind: old}, "content": new} for old, new in pairs]


EXPLODING = {
    "texts": replacing(("a", "b" * 1000), ("b", "c" * 1000), ("c", "d" * 1000)),
    "a text and what it gives": replacing(("aa", "ab" * 500_000), ("ba", "c" * 1000)),
    "patterns": replacing(("[aA]", "b" * 1000), ("b", "c" * 2000), regex=True),
    "the empty text": replacing(("", "b" * 9000), ("", "c" * 9000)),
    "an empty pattern": replacing(("x*", "b" * 9000), ("x*", "c" * 9000), regex=True),
    "doubling": replacing(*[("", "b")] * 40, regex=True),
    "what stands before": [{"type": "Prepend", "prepend": "b" * 600_000}],
    "among others": (
        [
            {"type": "Sequence", "normalizers": replacing(("a", "B" * 3000))},
            {"type": "Lowercase"},
        ]
        + replacing(("b", "c" * 3000))
    ),
}


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("kind", EXPLODING)
def test_a_text_that_the_normalizer_makes_too_much_of_is_rejected_before_it_does(
    tmp_path, kind, begins
):
    normalizer = {"type": "Sequence", "normalizers": EXPLODING[kind]}
    vocabulary = resolve(tmp_path, {**made.gpt2_like(), "normalizer": normalizer})
    engine = load_engine(REFERENCE, vocabulary, "text")
    tokens = tokenize(engine, ["", "aa a" * 3, ""], "text", vocabulary, begins)
    detail = "the tokenizer's normalizer makes more than 1048576 characters of its text"
    assert tokens.rejected == [(1, "tokenizer_error", detail)] and not len(tokens.ids)
    twin = Tokenizer(vocabulary.tokenizer_json, list(vocabulary.special_ids), "text")
    assert twin.encode(Text("aa a" * 3)) is None


@pytest.mark.long
@pytest.mark.parametrize("step", [
    *replacing(("a", "bcd" * 10), ("aa", ""), ("", "b" * 10)), *replacing(("a+|b", "." * 20), ("x*", "b" * 10), regex=True),
])  # fmt: skip
def test_the_length_of_a_normal_form_is_known_before_it_is_made(step):
    forms = NormalForms(
        {"type": "Sequence", "normalizers": [step, *replacing(("of no text", "b" * 200))]}
    )
    text = "aaab ünïcödé 🙂 ba" * 4096
    normal = tokenizers.Tokenizer.from_str(
        json.dumps({"normalizer": step, "model": made.gpt2_like()["model"]})
    ).normalizer
    assert forms.characters(text) == max(len(text), len(normal.normalize_str(text)))


def test_a_normalizer_may_make_sixteen_times_a_text_or_a_million_characters():
    def characters(content, text):
        return NormalForms(*replacing(("a", "b" * content))).characters(text)

    assert (
        characters(17, "a" * 61_000) == 17 * 61_000 < 1 << 20
        and characters(1 << 20, "a") == 1 << 20
    )
    # nothing is counted
    assert (
        characters(17, "a" + "x" * 100_000) == 100_017 and characters(16, "a" * 100_000) == 100_000
    )
    for content, text in ((17, "a" * 62_000), ((1 << 20) + 1, "a")):
        with pytest.raises(NormalizerLimit):
            characters(content, text)


def test_what_is_wrong_with_the_machine_is_no_reject(llama, monkeypatch):
    engine = load_engine(REFERENCE, llama, "text")

    def without_memory(*_):
        raise MemoryError

    monkeypatch.setattr(engine, "encode", without_memory)
    with pytest.raises(MemoryError):
        tokenize(engine, ["the"], "text", llama)


# the characters that tokens stand for


@pytest.mark.parametrize("special_text", ["text", "special", "reject"])
@pytest.mark.parametrize("chat", [False, True])
def test_the_bytes_engine_s_characters_equal_the_reference_s(bytes_vocabulary, special_text, chat):
    slow = load_engine(REFERENCE, bytes_vocabulary, special_text)
    fast = load_engine(BYTES, bytes_vocabulary, special_text)

    @given(DOCUMENTS)
    def equal(texts):
        expected = slow.encode_with_characters(texts, chat)
        got = fast.encode_with_characters(texts, chat)
        for a, b in zip(expected, got, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        if not chat:
            np.testing.assert_array_equal(got[0], fast.encode(texts)[0])

    equal()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "bert", "t5"])
def test_characters_ascend_beside_the_usual_ids(folder, llama, kind):
    makers = {"bert": made.bert_like, "t5": made.t5_like}
    vocabulary = (
        llama
        if kind == "llama"
        else resolve(folder / f"characters {kind}", makers[kind](), needs())
    )
    engine = load_engine(REFERENCE, vocabulary, "text")

    @given(DOCUMENTS)
    @example(TEXTS)
    def hold(texts):
        ids, offsets, characters = engine.encode_with_characters(texts, False)
        for a, b in zip((ids, offsets), engine.encode(texts), strict=True):
            np.testing.assert_array_equal(a, b)
        for i, text in enumerate(texts):
            begins, ends = characters[offsets[i] : offsets[i + 1]].T
            assert (np.diff(begins, prepend=0) >= 0).all() and (begins < max(1, len(text))).all()
            assert (begins <= ends).all() and (ends <= len(text)).all()

    hold()


def test_a_byte_level_token_stands_for_the_characters_that_its_bytes_are_of(llama):
    engine = load_engine(REFERENCE, llama, "text")
    _, _, characters = engine.encode_with_characters(["é🙂a"], False)
    assert characters.tolist() == [[0, 1], [0, 1], [1, 2], [1, 2], [1, 2], [1, 2], [2, 3]]


@pytest.mark.parametrize("special_text", ["text", "special"])
def test_in_a_chat_the_text_of_a_special_token_is_that_token(llama, special_text):
    engine = load_engine(REFERENCE, llama, special_text)
    ids, _, characters = engine.encode_with_characters(["é<|eot_id|>\n<|eot_id|>"], True)
    assert characters[ids == 325].tolist() == [[1, 11], [12, 22]]
    letter = load_engine(REFERENCE, llama, "text").encode_with_characters(["<|eot_id|>"], False)
    assert 325 not in letter[0]


@pytest.mark.long
def test_an_id_that_only_the_ceiling_has_changes_no_token(folder, llama):
    wide = replace(llama, vocab_size=400, special_ids=(*llama.special_ids, *range(336, 400)))
    assert documents(reference(wide, TEXTS)) == documents(reference(llama, TEXTS))
