import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packprep.tokenizer.encoding import tokenize
from packprep.tokenizer.engines import candidates, engine_facts
from packprep.tokenizer.engines import nanotoken as engine_file
from packprep.tokenizer.engines.engine import EngineRefusal, installed_version
from packprep.tokenizer.engines.nanotoken import CACHED_WORDS, WordPieceEngine
from packprep.tokenizer.proof import prove_on_nasty_text
from tests.tokenizer import tokenizers_made as made
from tests.tokenizer.test_roles import needs, resolve

library = pytest.importorskip(
    "nanotoken", reason="nanotoken is not installed: pip install 'packprep[nanotoken]'"
)


def changed(part, **values):
    parsed = made.bert_like()
    return {**parsed, part: {**parsed[part], **values}}


def steps(*kinds):
    return {"type": "Sequence", "normalizers": [{"type": kind} for kind in kinds]}


def with_added(**flags):
    parsed = made.bert_like()
    parsed["added_tokens"].append({**made.added(len(parsed["model"]["vocab"]), "the dog"), **flags})
    return parsed


TAKEN = {
    "bert": made.bert_like(),
    "cased": changed("normalizer", lowercase=False),
    "accents kept": changed("normalizer", strip_accents=False),
    "Chinese in one": changed("normalizer", handle_chinese_chars=False),
    "short words": changed("model", max_input_chars_per_word=5),
    "no normalizer": {**made.bert_like(), "normalizer": None},
    "NFKC": {**made.bert_like(), "normalizer": steps("NFKC", "Lowercase", "StripAccents")},
    "spaces": {**made.bert_like(), "pre_tokenizer": {"type": "WhitespaceSplit"}},
    "not special": with_added(special=False),
    "normalized rstrip": with_added(normalized=True, rstrip=True, special=False),
    "single_word": with_added(single_word=True, special=False),
}
REFUSED = {
    "its model is BPE, not WordPiece": made.gpt2_like(),
    "its model is Unigram, not WordPiece": made.t5_like(),
    "it cannot load it": {**made.bert_like(), "normalizer": {"type": "Prepend", "prepend": "_"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


def vocabulary_of(folder, name, parsed):
    return resolve(folder / re.sub(r"\W", "_", name), parsed, needs())


@pytest.mark.alike(12)
@pytest.mark.parametrize("special_text", ["text", "special", "reject"])
@pytest.mark.parametrize("name", TAKEN)
def test_ids_are_the_reference_s_on_nasty_text(folder, name, special_text):
    vocabulary = vocabulary_of(folder, name, TAKEN[name])
    prove_on_nasty_text(WordPieceEngine(vocabulary, special_text), special_text, vocabulary)


@pytest.mark.parametrize("special_text", ["text", "special"])
def test_ids_are_the_reference_s_on_any_text(folder, special_text):
    vocabulary = vocabulary_of(folder, "not special", TAKEN["not special"])
    engine = WordPieceEngine(vocabulary, special_text)
    own = st.sampled_from(
        [
            "the dog",
            " the",
            "[MASK]",
            "[PAD]",
            "[UNK]",
            "##a",
            "\r\n",
            "\v",
            "e\u0301",
            "数据",
            "\0",
        ]
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


@pytest.mark.parametrize("special_text", ["text", "special", "reject"])
def test_rejects_are_the_reference_s(folder, special_text):
    vocabulary = vocabulary_of(folder, "bert", TAKEN["bert"])
    engine = WordPieceEngine(vocabulary, special_text)
    texts = ["the dog", "a [MASK] b", "\ud800 half", "", "[unused1]", "[PAD]"]
    fast, slow = (
        tokenize(each, texts, special_text, vocabulary) for each in (engine, engine.reference)
    )
    assert fast.rejected == slow.rejected and any(
        reason == "lone_surrogate" for _, reason, _ in fast.rejected
    )
    assert fast.ids.tolist() == slow.ids.tolist() and fast.offsets.tolist() == slow.offsets.tolist()


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_wordpiece_or_is_not_known_to_the_library_is_refused(folder, why):
    with pytest.raises(EngineRefusal, match=re.escape(why)):
        WordPieceEngine(vocabulary_of(folder, why, REFUSED[why]), "text")


def test_auto_tries_it_before_the_reference_and_the_plan_names_both(folder):
    assert candidates("auto", vocabulary_of(folder, "bert", TAKEN["bert"])) == [
        "nanotoken",
        "reference",
    ]
    facts = engine_facts("nanotoken")
    assert facts["version"] == installed_version("nanotoken") and set(facts) == {
        "name",
        "version",
        "reference",
    }


def test_what_it_remembers_is_bounded_and_the_ids_do_not_depend_on_it(folder, monkeypatch):
    vocabulary = vocabulary_of(folder, "bert", TAKEN["bert"])
    texts = [
        " ".join(f"the{a}dog-{b}" for a in range(40) for b in range(k, k + 40)) for k in range(8)
    ]
    ids = WordPieceEngine(vocabulary, "text").encode(texts)[0].tolist()
    assert library.get_cache_entries() == CACHED_WORDS
    monkeypatch.setattr(engine_file, "CACHED_WORDS", 64)
    small = WordPieceEngine(vocabulary, "text")
    assert library.get_cache_entries() == 64
    assert [small.encode(texts)[0].tolist() for _ in range(2)] == [ids, ids]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_no_thread_of_the_library_hinders_a_fork(folder):
    engine = WordPieceEngine(vocabulary_of(folder, "bert", TAKEN["bert"]), "text")
    before = len(os.listdir("/proc/self/task"))
    engine.encode(["the lazy dog"] * 5000)
    assert len(os.listdir("/proc/self/task")) == before


def test_what_tokens_stand_for_is_the_reference_s(folder):
    engine = WordPieceEngine(vocabulary_of(folder, "bert", TAKEN["bert"]), "text")
    texts = ["É the dog", ""]
    for got, expected in zip(
        engine.encode_with_characters(texts, False),
        engine.reference.encode_with_characters(texts, False),
        strict=True,
    ):
        assert got.tolist() == expected.tolist()
