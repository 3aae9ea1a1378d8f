import dataclasses

import pytest
import tokenizers

from packprep.errors import PlanError, RecipeError
from packprep.recipe import Specials
from packprep.tokenizer import engines as registry
from packprep.tokenizer.engines import (
    ENGINES,
    begin_loading,
    candidates,
    engine_facts,
    fastokens,
    load_engine,
    loaded,
)
from packprep.tokenizer.engines.engine import EngineRefusal
from packprep.tokenizer.file import tokens_in_file
from packprep.tokenizer.roles import resolve_vocabulary
from tests.tokenizer import tokenizers_made as made
from tests.tokenizer.test_roles import needs, resolve

BYTES = {"name": "bytes", "version": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def bytes_vocabulary(folder):
    return resolve_vocabulary("bytes", folder, Specials(), needs())


@pytest.fixture(scope="module")
def llama(folder):
    return resolve(folder / "llama", made.llama3_like(), needs())


@pytest.fixture(scope="module")
def bert(folder):
    return resolve(folder / "bert", made.bert_like(), needs())


@pytest.fixture
def without_fastokens(monkeypatch):
    kind = dataclasses.replace(ENGINES[fastokens.NAME], version=lambda: None)
    monkeypatch.setitem(ENGINES, fastokens.NAME, kind)


def test_auto_may_be_every_engine_that_takes_the_tokenizer_best_first(bytes_vocabulary, llama, bert):
    assert candidates("auto", bytes_vocabulary)[0] == "bytes"
    assert candidates("auto", llama) == ["fastokens", "reference"]
    assert candidates("auto", bert) == ["reference"]
    assert candidates("reference", llama) == ["reference"] and candidates("fastokens", llama) == ["fastokens"]


def test_auto_is_the_reference_where_nothing_else_is_installed(llama, without_fastokens):
    assert candidates("auto", llama) == ["reference"]
    with pytest.raises(
        RecipeError, match=r"'fastokens' cannot be used .* not installed here \(pip install fastokens\)"
    ):
        candidates("fastokens", llama)


def test_an_engine_that_does_not_take_the_tokenizer_is_refused_with_the_reason(llama, bert):
    with pytest.raises(RecipeError, match="'bytes' cannot be used with this tokenizer: it is not the built-in"):
        candidates("bytes", llama)
    with pytest.raises(RecipeError, match="'fastokens' cannot be used .* its model is WordPiece, not BPE"):
        candidates("fastokens", bert)


def test_an_unknown_engine_is_refused_with_the_known_ones(llama):
    with pytest.raises(RecipeError, match="'quick' is not known; the engines are auto, bytes, fastokens, reference"):
        candidates("quick", llama)


def test_a_fast_engine_s_facts_have_the_version_of_its_reference_too():
    assert engine_facts("bytes") == BYTES
    assert engine_facts("reference") == {"name": "reference", "version": tokenizers.__version__}
    facts = {"name": "fastokens", "version": fastokens.installed_version(), "reference": tokenizers.__version__}
    assert engine_facts("fastokens") == facts


@pytest.mark.parametrize(
    "facts, said, install",
    [
        (
            {"name": "reference", "version": "0.0.1"},
            f"reference 0.0.1, and here it is reference {tokenizers.__version__}",
            "tokenizers==0.0.1",
        ),
        (
            {"name": "fastokens", "version": "0.0.2", "reference": tokenizers.__version__},
            f"fastokens 0.0.2, and here it is fastokens {fastokens.installed_version()}",
            "fastokens==0.0.2",
        ),
        (
            {"name": "fastokens", "version": fastokens.installed_version(), "reference": "0.0.3"},
            f"reference 0.0.3, and here it is reference {tokenizers.__version__}",
            "tokenizers==0.0.3",
        ),
    ],
)
def test_another_version_than_the_plan_s_is_refused_with_both(llama, facts, said, install):
    with pytest.raises(PlanError) as caught:
        load_engine(facts, llama, "text")
    assert said in str(caught.value) and f"pip install {install}" in str(caught.value)


def test_a_plan_s_engine_that_is_not_installed_is_refused(llama, without_fastokens):
    with pytest.raises(
        PlanError, match=r"fastokens 0\.1, and here it is not installed: .* pip install fastokens==0\.1"
    ):
        load_engine({"name": "fastokens", "version": "0.1", "reference": tokenizers.__version__}, llama, "text")


def test_an_engine_that_is_not_known_is_refused(llama):
    with pytest.raises(PlanError, match="quick 3"):
        load_engine({"name": "quick", "version": "3"}, llama, "text")


def test_an_engine_is_not_used_for_another_tokenizer(llama, bert):
    with pytest.raises(PlanError, match="bytes cannot be used with the plan's tokenizer: it is not the built-in"):
        load_engine(BYTES, llama, "text")
    with pytest.raises(PlanError, match="its model is WordPiece"):
        load_engine(engine_facts("fastokens"), bert, "text")


@pytest.fixture
def loads(monkeypatch):
    """The names of the engines that are loaded, as they are."""
    names = []
    monkeypatch.setattr(registry, "_last", {})
    monkeypatch.setattr(registry, "_loading", {})
    for name, kind in ENGINES.items():

        def noted(*arguments, name=name, kind=kind):
            names.append(name)
            return kind.load(*arguments)

        monkeypatch.setitem(ENGINES, name, dataclasses.replace(kind, load=noted))
    return names


def test_an_engine_whose_loading_has_begun_is_the_one_that_is_loaded(llama, loads):
    for _ in range(2):
        begin_loading("auto", llama, "text")
    engine = loaded(fastokens.NAME, llama, "text")
    assert engine.name == fastokens.NAME and loaded(fastokens.NAME, llama, "text") is engine
    begin_loading("auto", llama, "text")
    assert loads == [fastokens.NAME] and not registry._loading


def test_what_goes_wrong_while_an_engine_is_loaded_is_said_where_it_is_asked_for(bert, llama, loads, monkeypatch):
    def refuse(*_):
        loads.append(fastokens.NAME)
        raise EngineRefusal("not today")

    monkeypatch.setitem(ENGINES, fastokens.NAME, dataclasses.replace(ENGINES[fastokens.NAME], load=refuse))
    begin_loading("auto", llama, "text")
    for _ in range(2):  # the second time by itself
        with pytest.raises(EngineRefusal, match="not today"):
            loaded(fastokens.NAME, llama, "text")
    begin_loading("fastokens", bert, "text")  # refused by what it is, before anything is loaded
    begin_loading("unheard of", bert, "text")
    assert loads == [fastokens.NAME] * 2


def test_another_engine_than_the_one_that_was_begun_is_loaded_beside_it(llama, loads):
    begin_loading("auto", llama, "text")
    assert loaded("reference", llama, "text").name == "reference"
    assert loaded(fastokens.NAME, llama, "text").name == fastokens.NAME
    assert sorted(loads) == sorted([fastokens.NAME, "reference"])


@pytest.mark.parametrize("name", ["bytes_vocabulary", "llama", "bert"])
def test_every_engine_knows_the_tokens_as_the_file_writes_them(name, request):
    vocabulary = request.getfixturevalue(name)
    written = tokens_in_file(vocabulary.tokenizer_json, "tokenizer.json").texts
    for engine in candidates("auto", vocabulary):
        assert loaded(engine, vocabulary, "text").tokens_of(range(vocabulary.vocab_size + 9)) == written, engine
