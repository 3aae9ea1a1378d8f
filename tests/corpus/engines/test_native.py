"""The fast engine's tokenizer: loaded in a thread, and begun before anything is known but what was loaded before."""

import os

import pytest

from packprep import cache
from packprep.corpus.engines import fast, native
from packprep.corpus.engines.registry import note_begun
from packprep.corpus.tokenizer_json import plain_tokenizer_json
from packprep.recipe import Specials
from tests.corpus import tokenizers_made as made
from tests.corpus.test_vocabulary import needs, resolve


@pytest.fixture
def vocabulary(tmp_path):
    return resolve(tmp_path / "a", made.llama3_like(), needs("eos", sentinels=2), Specials(missing="add"))


@pytest.fixture
def other(tmp_path):
    return resolve(tmp_path / "b", made.byte_level("<|endoftext|>", normalizer={"type": "NFC"}))


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """An empty folder of what is remembered, and nothing that has begun."""
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(cache, "cache_folder", lambda: str(folder))
    monkeypatch.setattr(native, "_begun", [])
    plain_tokenizer_json.cache_clear()
    return folder


@pytest.fixture
def loads(monkeypatch):
    """What is loaded, as it is."""
    loaded = []
    begin = native.Loading.__init__

    def noted(self, tokenizer_json):
        loaded.append(tokenizer_json)
        begin(self, tokenizer_json)

    monkeypatch.setattr(native.Loading, "__init__", noted)
    return loaded


def plain_of(vocabulary):
    return plain_tokenizer_json(vocabulary.tokenizer_json, frozenset(vocabulary.special_ids), False)


def engine_of(vocabulary):
    return fast.FastEngine(vocabulary, "text")


def test_what_was_loaded_before_begins_and_is_what_the_engine_takes(vocabulary, loads):
    native.begin_as_before("a", "text")
    assert not loads
    note_begun("auto", vocabulary, "text", "a")
    expected = engine_of(vocabulary).encode(["the other dog"])[0].tolist()
    assert loads == [plain_of(vocabulary)]
    native.begin_as_before("a", "text")
    [begun] = native._begun
    assert begun.tokenizer_json == plain_of(vocabulary) and len(loads) == 2
    engine = engine_of(vocabulary)
    assert len(loads) == 2 and not native._begun and engine._tokenizer is begun.result()
    assert engine.encode(["the other dog"])[0].tolist() == expected


def test_another_tokenizer_than_before_is_loaded_anew_and_noted(vocabulary, other, loads):
    note_begun("auto", vocabulary, "text", "a")
    engine_of(vocabulary)
    native.begin_as_before("a", "text")  # and now the file at "a" is another one
    engine = engine_of(other)
    assert engine.encode(["the"])[0].tolist() == engine.reference.encode(["the"])[0].tolist()
    assert loads == [plain_of(vocabulary), plain_of(vocabulary), plain_of(other)] and not native._begun
    note_begun("auto", other, "text", "a")
    native.begin_as_before("a", "text")
    assert native._begun[0].tokenizer_json == plain_of(other)


@pytest.mark.parametrize("tokenizer, special_text", [("b", "text"), ("a", "special")])
def test_what_was_loaded_for_something_else_does_not_begin(vocabulary, loads, tokenizer, special_text):
    note_begun("auto", vocabulary, "text", "a")
    engine_of(vocabulary)
    native.begin_as_before(tokenizer, special_text)
    assert len(loads) == 1


@pytest.mark.parametrize("requested", ["reference", "unheard of"])
def test_nothing_is_noted_of_engines_that_are_not_this_one(vocabulary, kept, requested):
    note_begun(requested, vocabulary, "text", "a")
    assert not list(kept.glob("begun-*"))
    note_begun("auto", vocabulary, "text", "a")
    assert len(list(kept.glob("begun-*"))) == 1


def test_special_text_is_noted_with_the_special_tokens(vocabulary, loads):
    note_begun("auto", vocabulary, "special", "a")
    engine = fast.FastEngine(vocabulary, "special")
    native.begin_as_before("a", "special")
    assert loads[1] == loads[0] and fast.FastEngine(vocabulary, "special").encode(["<|eot_id|>"])[0].tolist() == [325]
    assert len(loads) == 2 and engine.encode(["<|eot_id|>"])[0].tolist() == [325]


def test_a_library_that_fails_says_so_where_it_is_waited_for(vocabulary):
    broken = plain_of(vocabulary)[:-1]
    with pytest.raises(ValueError, match="EOF"):
        native.Loading(broken).result()
    native.begin(broken)  # what has begun and failed is nobody's, if it is not what is asked for
    assert engine_of(vocabulary).encode(["the"])[0].size


def test_without_a_folder_nothing_is_noted(vocabulary, loads, monkeypatch):
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    note_begun("auto", vocabulary, "text", "a")
    native.begin_as_before("a", "text")
    assert not loads


def test_the_library_has_one_thread_unless_more_are_asked_for(monkeypatch):
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setenv("FASTOKENS_BPE_THREADS", "2")
    native.library()
    assert (os.environ["RAYON_NUM_THREADS"], os.environ["FASTOKENS_BPE_THREADS"]) == ("1", "2")
