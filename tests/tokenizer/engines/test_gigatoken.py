import json
import os
import re
import signal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packprep.format.digests import digest_of
from packprep.tokenizer.engines import gigatoken as engine_file
from packprep.tokenizer.engines.engine import EngineRefusal
from packprep.tokenizer.engines.fastokens import FastEngine
from packprep.tokenizer.engines.gigatoken import GigatokenEngine
from packprep.tokenizer.proof import nasty_texts, prove, prove_on_nasty_text, texts_of_tokens
from tests.tokenizer import tokenizers_made as made
from tests.tokenizer.test_roles import needs, resolve


def with_added(**flags):
    parsed = made.llama2_like()
    parsed["added_tokens"].append({**made.added(len(parsed["model"]["vocab"]), "the dog"), **flags})
    return parsed


def changed(**values):
    parsed = made.llama2_like()
    return {**parsed, "model": {**parsed["model"], **values}}


def without(byte):
    parsed = made.llama2_like()
    vocabulary = {text: id for text, id in parsed["model"]["vocab"].items() if text != byte}
    return {**parsed, "model": {**parsed["model"], "vocab": {**vocabulary, "<unused>": 258}}}


TAKEN = {
    "llama2": made.llama2_like(),
    "gemma": made.gemma_like(),
    "mistral": made.mistral_like(),
    "yi": made.llama2_like(normalizer={"type": "Sequence", "normalizers": [made.SPACE_TO_MARK]}),
    "not special": with_added(special=False),
    "lstrip": with_added(lstrip=True),
}
REFUSED = {
    "its model is WordPiece, not BPE": made.bert_like(),
    "its model is Unigram, not BPE": made.t5_like(),
    "its model has no byte_fallback": made.gpt2_like(),
    "its model has ignore_merges = True": changed(ignore_merges=True),
    "its normalizer is NFKC": made.llama2_like(normalizer={"type": "NFKC"}),
    "its normalizer is Replace": made.llama2_like(
        normalizer={**made.SPACE_TO_MARK, "content": "_"}
    ),
    "its pre-tokenizer is Digits → Metaspace, not Metaspace or a split after spaces": (
        made.llama2_like(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    made.mistral_like()["pre_tokenizer"],
                ],
            }
        )
    ),
    "its vocabulary lacks 1 of the 256 bytes": without("<0xFF>"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


def vocabulary_of(folder, parsed):
    return resolve(folder / digest_of(json.dumps(parsed).encode()), parsed, needs())


@pytest.mark.alike(12)
@pytest.mark.parametrize("special_text", ["text", "special", "reject"])
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("engine_of", [GigatokenEngine, FastEngine])
def test_ids_are_the_reference_s_on_nasty_text(folder, engine_of, name, special_text):
    vocabulary = vocabulary_of(folder, TAKEN[name])
    if (engine_of, name) == (FastEngine, "mistral"):
        with pytest.raises(
            EngineRefusal, match="its pre-tokenizer is Metaspace, not a split after spaces"
        ):
            FastEngine(vocabulary, special_text)
    else:
        prove_on_nasty_text(engine_of(vocabulary, special_text), special_text, vocabulary)


@pytest.mark.parametrize("name", ["llama2", "gemma", "mistral"])
def test_ids_are_the_reference_s_on_any_text(folder, name):
    vocabulary = vocabulary_of(folder, TAKEN[name])
    engine = GigatokenEngine(vocabulary, "text")
    own = st.sampled_from(
        ["the dog", " the", "<s>", "<0x0A>", "▁", " ", "\r\n", "\t", "e\u0301", "123", "数据", "\0"]
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


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_may_not_be_tried_on_is_refused(folder, why):
    with pytest.raises(EngineRefusal, match=re.escape(why)):
        GigatokenEngine(vocabulary_of(folder, REFUSED[why]), "text")


def test_it_is_loaded_anew_before_it_remembers_much_and_the_ids_do_not_depend_on_that(
    folder, monkeypatch
):
    engine = GigatokenEngine(vocabulary_of(folder, TAKEN["gemma"]), "text")
    texts = [
        " ".join(f"the{a}dog-{b}" for a in range(10) for b in range(k, k + 40)) for k in range(8)
    ]
    first = engine._tokenizers[False]
    expected = engine.encode(texts)[0].tolist()
    assert engine.encode(texts)[0].tolist() == expected and engine._tokenizers[False] is first
    monkeypatch.setattr(engine_file, "MOST_IDS", 1000)
    assert [engine.encode(texts)[0].tolist() for _ in range(2)] == [expected, expected]
    assert engine._tokenizers[False] is not first
    in_chat = [engine.own_characters(texts, True)[0].tolist() for _ in range(2)]
    assert in_chat == [expected, expected] and [*engine._tokenizers] == [True]


def test_it_works_in_a_process_that_was_forked_after_it_had_worked(folder):
    vocabulary = vocabulary_of(folder, TAKEN["gemma"])
    engine = GigatokenEngine(vocabulary, "text")
    texts = nasty_texts(5, 0, 200, *texts_of_tokens(engine.reference, vocabulary))
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    prove(engine, texts, "text", vocabulary)
    child = os.fork()
    if not child:
        signal.alarm(30)
        engine.encode(texts)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
