import dataclasses

import pytest
import tokenizers

from packprep.errors import PlanError, RecipeError
from packprep.recipe import Specials
from packprep.tokenizer import engines as registry
from packprep.tokenizer.encoding import tokenize
from packprep.tokenizer.engines import (
    ENGINES,
    begin_loading,
    candidates,
    engine_facts,
    engine_in_words,
    fastokens,
    load_engine,
    loaded,
)
from packprep.tokenizer.engines.engine import EngineRefusal, installed_version
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


@pytest.fixture(scope="module")
def t5(folder):
    return resolve(folder / "t5", made.t5_like(), needs())


@pytest.fixture(scope="module")
def sentencepiece(folder):
    return resolve(folder / "sentencepiece", made.gemma_like(), needs())


@pytest.fixture
def without_fastokens(monkeypatch):
    kind = dataclasses.replace(ENGINES[fastokens.NAME], version=lambda: None)
    monkeypatch.setitem(ENGINES, fastokens.NAME, kind)


def test_auto_may_be_every_engine_that_takes_the_tokenizer_best_first(
    bytes_vocabulary, llama, bert, sentencepiece
):
    assert candidates("auto", bytes_vocabulary)[0] == "bytes"
    assert candidates("auto", llama) == ["fastokens", "reference"]
    assert candidates("auto", sentencepiece) == ["gigatoken", "fastokens", "reference"]
    assert candidates("auto", bert)[-1] == "reference" and "fastokens" not in candidates(
        "auto", bert
    )
    assert candidates("reference", llama) == ["reference"] and candidates("fastokens", llama) == [
        "fastokens"
    ]


def test_auto_takes_the_engine_with_the_least_expected_time_for_the_text(
    bytes_vocabulary, llama, sentencepiece
):
    assert candidates("auto", bytes_vocabulary, 1)[0] == "bytes"
    large = dataclasses.replace(sentencepiece, vocab_size=256_000)
    for vocabulary, text_bytes, names in (
        (llama, 1e6, ["reference"]),
        (llama, 4e6, ["fastokens", "reference"]),
        (dataclasses.replace(llama, vocab_size=128_000), 4e6, ["reference"]),
        (large, 4e6, ["reference"]),
        (large, 8e6, ["gigatoken", "reference"]),
        (large, 64e6, ["gigatoken", "fastokens", "reference"]),
    ):
        assert candidates("auto", vocabulary, text_bytes) == names
    assert candidates("fastokens", llama, 1) == ["fastokens"]
    said = engine_in_words(loaded("reference", large, "text"), "auto", large, 1e6)
    assert said.endswith(
        ", because it would take longer to load and check gigatoken or fastokens than to tokenize"
        " this little text"
    )
    said = engine_in_words(loaded("fastokens", llama, "text"), "auto", llama, 1e6)
    assert said.endswith(" MB/s of text per core")


def test_auto_is_the_reference_where_nothing_else_is_installed(llama, without_fastokens):
    assert candidates("auto", llama) == ["reference"]
    with pytest.raises(
        RecipeError,
        match=r"'fastokens' cannot be used .* not installed here \(pip install fastokens\)",
    ):
        candidates("fastokens", llama)


def test_an_engine_that_does_not_take_the_tokenizer_is_refused_with_the_reason(llama, bert):
    with pytest.raises(
        RecipeError, match="'bytes' cannot be used with this tokenizer: it is not the built-in"
    ):
        candidates("bytes", llama)
    with pytest.raises(
        RecipeError, match="'fastokens' cannot be used .* its model is WordPiece, not BPE"
    ):
        candidates("fastokens", bert)


def test_an_unknown_engine_is_refused_with_the_known_ones(llama):
    with pytest.raises(
        RecipeError,
        match=(
            "unknown engine = 'quick'; the engines are auto, bytes, nanotoken, gigatoken,"
            " fastokens, reference\nhint: use engine ="
        ),
    ):
        candidates("quick", llama)


def test_a_fast_engine_s_facts_have_the_version_of_its_reference_too():
    assert engine_facts("bytes") == BYTES
    assert engine_facts("reference") == {"name": "reference", "version": tokenizers.__version__}
    facts = {
        "name": "fastokens",
        "version": installed_version("fastokens"),
        "reference": tokenizers.__version__,
    }
    assert engine_facts("fastokens") == facts


HERE = {"reference": tokenizers.__version__}


@pytest.mark.parametrize(
    "facts",
    [
        {"name": "reference", "version": "0.0.1"},
        {"name": "fastokens", "version": "0.3.5", "reference": "0.0.1"},
    ],
)
def test_another_reference_than_the_plan_s_is_refused_with_both(llama, facts):
    with pytest.raises(PlanError) as caught:
        load_engine(facts, llama, "text")
    assert f"reference 0.0.1, but here it is reference {tokenizers.__version__}" in str(
        caught.value
    )
    assert "pip install tokenizers==0.0.1" in str(caught.value)


@pytest.mark.parametrize(
    "name, version, why",
    [
        (
            "fastokens",
            "0.0.2",
            (
                f"fastokens {installed_version('fastokens')} is installed here: pip install"
                " fastokens==0.0.2"
            ),
        ),
        ("gigatoken", installed_version("gigatoken"), "its model has no byte_fallback"),
        ("quick", "3", "it is not installed here: pip install quick==3"),
    ],
)
def test_the_reference_goes_in_place_of_a_plan_s_engine_that_cannot_be_used_and_says_so(
    llama, name, version, why
):
    engine = load_engine({"name": name, "version": version, **HERE}, llama, "text")
    assert engine.name == "reference" and engine.in_place_of == f"{name} {version} ({why})"
    assert (
        f"4 MB/s of text per core, instead of the plan's {engine.in_place_of}"
        in engine_in_words(engine, "auto", llama)
    )


def test_the_reference_goes_in_place_of_an_engine_that_is_not_installed(llama, without_fastokens):
    engine = load_engine({"name": "fastokens", "version": "0.1", **HERE}, llama, "text")
    assert (
        engine.in_place_of == "fastokens 0.1 (it is not installed here: pip install fastokens==0.1)"
    )


def test_a_text_on_which_only_the_reference_fails_is_no_reject_in_place_of_another_engine(folder):
    hopeless, split = (
        "a" * 60 + "b",
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    )
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    parsed = {
        **made.gpt2_like(),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
    }
    vocabulary = resolve(folder / "hopeless", parsed, needs())
    engine = load_engine({"name": "fastokens", "version": "0.1", **HERE}, vocabulary, "text")
    with pytest.raises(
        PlanError,
        match=(
            r"61 characters that starts with 'aaaa.* replaces fastokens 0\.1 .*\nhint: install that version"
        ),
    ):
        tokenize(engine, ["the", hopeless], "text", vocabulary)
    own = loaded("reference", vocabulary, "text")
    assert tokenize(own, ["the", hopeless], "text", vocabulary).rejected[0][:2] == (
        1,
        "tokenizer_error",
    )


def test_an_engine_is_told_with_its_rate_and_with_what_would_be_faster(
    monkeypatch, llama, bert, t5, sentencepiece, bytes_vocabulary
):
    def told(requested, vocabulary):
        return engine_in_words(
            loaded(candidates(requested, vocabulary)[0], vocabulary, "text"), requested, vocabulary
        )

    version = tokenizers.__version__
    assert (
        told("auto", bytes_vocabulary)
        == "engine bytes 1, tokenizing about 600 MB/s of text per core"
    )
    assert told("auto", llama).endswith(", tokenizing about 150 MB/s of text per core")
    assert told("auto", sentencepiece).endswith(", tokenizing about 35 MB/s of text per core")
    assert (
        told("reference", llama)
        == f"engine reference {version}, tokenizing about 4 MB/s of text per core, as set by"
        ' engine = "reference"'
    )
    why = "its model is Unigram, not BPE, and no faster engine is exact for this tokenizer"
    assert (
        told("auto", t5)
        == f"engine reference {version}, tokenizing about 4 MB/s of text per core: {why}"
    )
    without = dataclasses.replace(ENGINES["nanotoken"], version=lambda: None)
    monkeypatch.setitem(ENGINES, "nanotoken", without)
    assert (
        "; nanotoken is faster with this tokenizer. To use it, pip install 'packprep[nanotoken]'"
        in told("auto", bert)
    )
    kind = dataclasses.replace(ENGINES["gigatoken"], version=lambda: None)
    monkeypatch.setitem(ENGINES, "gigatoken", kind)
    assert (
        "; gigatoken is faster with this tokenizer. To use it, pip install 'packprep[gigatoken]'"
        in told("auto", sentencepiece)
    )


def test_an_engine_is_told_as_its_plan_has_it_where_the_recipe_asks_for_another_or_a_faster_one_failed(
    llama,
):
    said = engine_in_words(loaded("fastokens", llama, "text"), "reference", llama)
    assert said.endswith(", tokenizing about 150 MB/s of text per core")
    said = engine_in_words(loaded("reference", llama, "text"), "auto", llama)
    assert said.endswith(
        " per core, because fastokens failed, was missing or was not wanted when the plan was made"
    )


def test_of_byte_fallback_that_reason_is_told_for_which_no_engine_takes_it(folder):
    parsed = made.mistral_like()
    parsed["model"]["vocab"]["<unused0>"] = parsed["model"]["vocab"].pop("<0xFF>")
    vocabulary = resolve(folder / "lacks a byte", parsed, needs())
    said = engine_in_words(loaded("reference", vocabulary, "text"), "auto", vocabulary)
    assert said.endswith(
        " per core: its vocabulary lacks 1 of the 256 bytes, and no faster engine is exact for this tokenizer"
    )


def test_an_engine_that_is_not_known_is_refused(llama):
    with pytest.raises(PlanError, match="quick 3"):
        load_engine({"name": "quick", "version": "3"}, llama, "text")


def test_an_engine_is_not_used_for_another_tokenizer(llama):
    with pytest.raises(
        PlanError, match="bytes cannot be used with the plan's tokenizer: it is not the built-in"
    ):
        load_engine(BYTES, llama, "text")


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


def test_what_goes_wrong_while_an_engine_is_loaded_is_said_where_it_is_asked_for(
    bert, llama, loads, monkeypatch
):
    def refuse(*_):
        loads.append(fastokens.NAME)
        raise EngineRefusal("not today")

    monkeypatch.setitem(
        ENGINES, fastokens.NAME, dataclasses.replace(ENGINES[fastokens.NAME], load=refuse)
    )
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
        assert (
            loaded(engine, vocabulary, "text").tokens_of(range(vocabulary.vocab_size + 9))
            == written
        ), engine
