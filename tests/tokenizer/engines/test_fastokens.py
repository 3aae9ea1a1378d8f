import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from packprep.format.digests import digest_of
from packprep.tokenizer.encoding import tokenize
from packprep.tokenizer.engines.engine import EngineFault, EngineRefusal
from packprep.tokenizer.engines.fastokens import FastEngine
from packprep.tokenizer.file import plain_tokenizer_json
from packprep.tokenizer.proof import prove, prove_on_nasty_text
from tests.tokenizer import tokenizers_made as made
from tests.tokenizer.test_roles import needs, resolve
from tests.twin.reading import Text
from tests.twin.tokens import Tokenizer as TwinTokenizer

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def unresolved(folder, parsed):
    """A vocabulary of a tokenizer that resolving one would refuse."""
    data = json.dumps(parsed).encode()
    return replace(
        vocabulary_of(folder, made.gpt2_like()), tokenizer_json=data, digest=digest_of(data)
    )


def split(pattern, behavior="Isolated"):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def after(*steps, **changes):
    """The made byte-level BPE with these steps before ByteLevel."""
    steps = {"type": "Sequence", "pretokenizers": [*steps, BYTE_LEVEL]}
    return {**made.byte_level("<|endoftext|>", "<pad>"), "pre_tokenizer": steps, **changes}


def changed(part, **values):
    parsed = made.gpt2_like()
    return {**parsed, part: {**parsed[part], **values}}


def with_added(**flags):
    parsed = made.byte_level("<|endoftext|>")
    parsed["added_tokens"].append({**made.added(321, "the dog"), **flags})
    return parsed


def with_a_token_of_what_is_none(text):
    parsed = made.gemma_like()
    parsed["model"]["vocab"][text] = len(parsed["model"]["vocab"])
    return parsed


def with_many_added(*tokens):
    """GPT-2's with 400 added tokens, and these among them: (text, special)."""
    parsed = made.gpt2_like()
    many = [(f"<r{k}>", False) for k in range(400)]
    for text, special in [*many[:201], *tokens, *many[201:]]:
        parsed["added_tokens"].append(
            made.added(parsed["added_tokens"][-1]["id"] + 1, text, special)
        )
    return parsed


TAKEN = {
    "gpt2": made.gpt2_like(),
    "llama3": made.llama3_like(),
    "gpt4": after(split(GPT4)),
    "deepseek": after(
        split(r"\p{N}{1,3}"), split("[一-龥぀-ヿ]+"), split(r" ?[\p{P}\p{S}]+[\r\n]*|\s+")
    ),
    "digits": after({"type": "Digits", "individual_digits": True}, split(GPT4)),
    "nfc": after(split(GPT4), normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
    "ignore_merges": changed("model", ignore_merges=True),
    "dropout": changed("model", dropout=0.5),
    "not special": with_added(special=False),
    "lstrip": with_added(lstrip=True),
    "normalized rstrip": with_added(normalized=True, rstrip=True, special=False),
    "single_word": with_added(single_word=True, special=False),
}
REFUSED = {
    "its model is WordPiece, not BPE": made.bert_like(),
    "its model is Unigram, not BPE": made.t5_like(),
    "its pre-tokenizer is ByteLevel, not Metaspace or a split after spaces": changed(
        "model", byte_fallback=True
    ),
    "its pre-tokenizer is Metaspace, not a split after spaces": made.mistral_like(),
    "its model has unk_token = '<|endoftext|>'": changed("model", unk_token="<|endoftext|>"),
    "its vocabulary has '\\x0b\\x0b', but not all of its characters": with_a_token_of_what_is_none(
        "\v\v"
    ),
    "its normalizer is NFKC, not NFC": {**made.gpt2_like(), "normalizer": {"type": "NFKC"}},
    "its normalizer is Lowercase, not NFC": {
        **made.gpt2_like(),
        "normalizer": {"type": "Lowercase"},
    },
    "its pre-tokenizer is Whitespace → ByteLevel, not ByteLevel after": after(
        {"type": "Whitespace"}
    ),
    "its pre-tokenizer is None, not ByteLevel after": {**made.gpt2_like(), "pre_tokenizer": None},
    "its pre-tokenizer is Split, not ByteLevel after": {
        **made.gpt2_like(),
        "pre_tokenizer": split("a"),
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


def vocabulary_of(folder, parsed):
    return resolve(folder / digest_of(json.dumps(parsed).encode()), parsed, needs())


@pytest.mark.parametrize(
    "merges, expected",
    [
        ([["t", "h"], ["th", "e"]], ["t h", "th e"]),
        (["t h", "th e"], ["t h", "th e"]),
        (
            [["a b", "c"], ["d", "e"]],
            [["a b", "c"], ["d", "e"]],
        ),  # in the older form nobody could tell where it ends
        ([["t", "h", "e"]], [["t", "h", "e"]]),
        ([["t", 1]], [["t", 1]]),
        ([[]], [[]]),
        (None, None),
    ],
)
def test_merges_are_handed_over_in_the_form_that_loads_faster_where_it_says_the_same(
    merges, expected
):
    data = json.dumps(changed("model", merges=merges)).encode()
    assert json.loads(plain_tokenizer_json(data, frozenset()))["model"]["merges"] == expected


@pytest.mark.alike(12)
@pytest.mark.parametrize("special_text", ["text", "special", "reject"])
@pytest.mark.parametrize("name", TAKEN)
def test_ids_are_the_reference_s_on_nasty_text(folder, name, special_text):
    vocabulary = vocabulary_of(folder, TAKEN[name])
    prove_on_nasty_text(FastEngine(vocabulary, special_text), special_text, vocabulary)


@pytest.mark.parametrize("special_text", ["text", "special"])
@pytest.mark.parametrize("name", ["gpt2", "gpt4", "deepseek", "nfc", "normalized rstrip"])
def test_ids_are_the_reference_s_on_any_text(folder, name, special_text):
    vocabulary = vocabulary_of(folder, TAKEN[name])
    engine = FastEngine(vocabulary, special_text)
    own = st.sampled_from(
        ["the dog", " the", "<|endoftext|>", "<pad>", "'ll", "\r\n", "  ", "e\u0301", "123", "数据"]
    )

    @given(st.lists(st.lists(st.text(max_size=8) | own, max_size=8).map("".join), max_size=5))
    @example([])
    @example(["", "the lazy dog", ""])
    def equal(texts):
        ids, offsets = engine.encode(texts)
        expected, expected_offsets = engine.reference.encode(texts)
        assert ids.dtype == np.int32 and offsets.dtype == np.int64
        assert ids.tolist() == expected.tolist() and offsets.tolist() == expected_offsets.tolist()

    equal()


@pytest.mark.long
def test_letters_that_fold_to_ascii_go_through_the_reference(folder, monkeypatch):
    gpt4o = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    vocabulary = vocabulary_of(folder, after(split(gpt4o)))
    engine = FastEngine(vocabulary, "text")
    texts = ["the dog", "the'\u017f'the dog", "", "\u017f", "\u212a'\u212ajumps", "the"]
    asked = []
    encode = engine.reference.encode
    monkeypatch.setattr(
        engine.reference, "encode", lambda texts: asked.extend(texts) or encode(texts)
    )
    ids, offsets = engine.encode(texts)
    assert asked == [texts[1], texts[3], texts[4]]
    expected, expected_offsets = encode(texts)
    assert (
        ids.dtype == np.int32
        and ids.tolist() == expected.tolist()
        and offsets.tolist() == expected_offsets.tolist()
    )
    prove_on_nasty_text(engine, "text", vocabulary)


@pytest.mark.parametrize("chat", [False, True])
def test_what_tokens_stand_for_is_the_reference_s(folder, chat):
    engine = FastEngine(vocabulary_of(folder, TAKEN["llama3"]), "text")
    texts = ["é<|eot_id|> the dog", ""]
    for got, expected in zip(
        engine.encode_with_characters(texts, chat),
        engine.reference.encode_with_characters(texts, chat),
        strict=True,
    ):
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_library_is_not_exact_for_is_refused(folder, why):
    with pytest.raises(EngineRefusal, match=re.escape(why)):
        FastEngine(vocabulary_of(folder, REFUSED[why]), "text")


def test_a_vocabulary_that_lacks_a_byte_is_refused(folder):
    parsed = made.gpt2_like()
    parsed["model"]["vocab"] = {
        text: id for text, id in parsed["model"]["vocab"].items() if text != "ÿ"
    }
    vocabulary = unresolved(folder, parsed)
    with pytest.raises(EngineRefusal, match="its vocabulary lacks 1 of the 256 bytes"):
        FastEngine(vocabulary, "text")


def test_an_added_token_that_the_libraries_number_differently_is_refused(folder):
    parsed = made.with_hole()
    assert Tokenizer.from_str(json.dumps(parsed)).token_to_id("<|endoftext|>") == 320
    vocabulary = unresolved(folder, parsed)
    engine = FastEngine(vocabulary, "special")  # the file's ids, which are not the reference's
    with pytest.raises(
        EngineRefusal, match="it differs from the reference: the text '<|endoftext|>'"
    ):
        prove(engine, ["<|endoftext|>"], "special", vocabulary)


@pytest.mark.parametrize("special_text", ["text", "reject", "special"])
def test_an_added_token_that_is_not_special_is_found_between_special_ones(folder, special_text):
    parsed = made.llama3_like()
    first = 1 + max(token["id"] for token in parsed["added_tokens"])
    parsed["added_tokens"] += [
        made.added(first, "zzqq", False),
        made.added(first + 1, "<|more|>"),
        made.added(first + 2, "qqzz", False),
    ]
    engine = FastEngine(vocabulary_of(folder, parsed), special_text)
    texts = ["a zzqq <|more|> qqzz<|more|>zzqq <|begin_of_text|>", "<|more|>", "the <|mo"]
    ids, offsets = engine.encode(texts)
    expected, expected_offsets = engine.reference.encode(texts)
    assert ids.tolist() == expected.tolist() and offsets.tolist() == expected_offsets.tolist()
    assert {first, first + 2} <= set(ids.tolist()) and (first + 1 in ids.tolist()) == (
        special_text == "special"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "tokens", [[("<a><b>", True), ("<b>", False)], [("xab", True), ("abx", False)]]
)
def test_each_of_many_added_tokens_is_proven_and_two_that_overlap(folder, tokens):
    vocabulary = vocabulary_of(folder, with_many_added(*tokens))
    # which has only those that are not special, and finds them across the others
    engine = FastEngine(vocabulary, "text")
    with pytest.raises(
        EngineRefusal, match=f"it differs from the reference: the text '.*{tokens[0][0]}"
    ):
        prove_on_nasty_text(engine, "text", vocabulary)
    prove_on_nasty_text(FastEngine(vocabulary, "special"), "special", vocabulary)


def test_a_pattern_that_the_library_cannot_read_is_refused_in_one_line(folder):
    with pytest.raises(EngineRefusal, match=r"^it cannot load it \(.*\)$"):
        FastEngine(vocabulary_of(folder, after(split(r"\X"))), "text")


def test_a_text_on_which_engine_and_reference_fail_is_a_reject(folder):
    engine = FastEngine(vocabulary_of(folder, after(split(r"(a+)+$"))), "text")
    vocabulary = vocabulary_of(folder, after(split(r"(a+)+$")))
    hopeless = "a" * 60 + "b"
    tokens = tokenize(engine, ["the dog", hopeless, "the"], "text", vocabulary)
    assert [entry[:2] for entry in tokens.rejected] == [(1, "tokenizer_error")] and not np.diff(
        tokens.offsets
    ).all()


class PanicException(BaseException):
    """As a panic of the library arrives in Python."""


PanicException.__module__ = "pyo3_runtime"


class Panicking:
    def encode_batch_flat(self, texts, *_):
        if "bad" in texts:
            raise PanicException("index out of range")
        raise KeyboardInterrupt


def test_a_panic_is_a_fault_and_nothing_else_is_caught(folder, monkeypatch):
    vocabulary = vocabulary_of(folder, TAKEN["gpt2"])
    engine = FastEngine(vocabulary, "text")
    monkeypatch.setattr(engine, "_tokenizer", Panicking())
    with pytest.raises(EngineFault, match="index out of range"):
        tokenize(engine, ["bad"], "text", vocabulary)
    with pytest.raises(KeyboardInterrupt):
        tokenize(engine, ["good"], "text", vocabulary)


SPACES = " " * 11_000_000 + "x"  # Oniguruma gives up on it


@pytest.mark.long
def test_a_text_that_only_the_reference_fails_on_is_the_engine_s(folder):
    vocabulary = vocabulary_of(folder, TAKEN["gpt4"])
    engine = FastEngine(vocabulary, "text")
    tokens = tokenize(engine, ["the", SPACES], "text", vocabulary)
    assert tokens.rejected == [] and len(tokens.ids) > 11_000_000
    assert tokenize(engine.reference, ["the", SPACES], "text", vocabulary).rejected[0][:2] == (
        1,
        "tokenizer_error",
    )
    prove(engine, ["the", SPACES], "text", vocabulary)
    twin = TwinTokenizer(
        vocabulary.tokenizer_json, list(vocabulary.special_ids), "text", engine.name
    )
    assert twin.encode(Text(SPACES))[0] == tokens.ids[tokens.offsets[1] :].tolist()
    alone = TwinTokenizer(
        vocabulary.tokenizer_json, list(vocabulary.special_ids), "text", "reference"
    )
    assert alone.encode(Text(SPACES)) is None


def test_the_library_has_one_thread_unless_more_are_asked_for(folder, monkeypatch):
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setenv("FASTOKENS_BPE_THREADS", "2")
    FastEngine(vocabulary_of(folder, made.gpt2_like()), "text")
    assert (os.environ["RAYON_NUM_THREADS"], os.environ["FASTOKENS_BPE_THREADS"]) == ("1", "2")
