"""Texts → flat ids, by an engine.

The reference engine is the `tokenizers` library. Every other engine gives the same ids, only
faster; a recipe's fingerprint does not know which one ran.

```
engine        what an engine is, and how one fails
reference     `tokenizers`: any tokenizer.json
byte_ids      the built-in vocabulary of bytes, without a library
nanotoken     `nanotoken`: WordPiece
gigatoken     `gigatoken`: SentencePiece's BPE with byte_fallback
fastokens     `fastokens`: byte-level BPE, and that of SentencePiece
shapes        which tokenizers those are
```
Here stands which engines there are, those that a recipe's `engine` may mean, and the one of a plan.
"""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from packprep.errors import PackprepError, PlanError, RecipeError
from packprep.tokenizer.engines import fastokens, gigatoken, nanotoken
from packprep.tokenizer.engines.byte_ids import BytesEngine
from packprep.tokenizer.engines.engine import Engine, EngineRefusal, installed_version
from packprep.tokenizer.engines.reference import ReferenceEngine
from packprep.tokenizer.file import bytes_tokenizer_json, library_version
from packprep.tokenizer.roles import Vocabulary

REFERENCE = "reference"


@dataclass(frozen=True)
class EngineKind:
    """version: of this installation; None: not installed. load: raises EngineRefusal for a
    tokenizer that it does not take."""

    package: str  # what to install
    version: Callable[[], str | None]
    # why it does not take a tokenizer, as far as can be told without loading
    refusal: Callable[[Vocabulary], str | None]
    load: Callable[[Vocabulary, str], Engine]
    # whether it has to be compared with the reference before it is trusted, and all through the
    # build
    proven: bool


# In the order in which "auto" tries them; the reference takes every tokenizer.
ENGINES: dict[str, EngineKind] = {
    "bytes": EngineKind(
        "packprep",
        lambda: BytesEngine.version,
        lambda vocabulary: (
            None
            if vocabulary.tokenizer_json == bytes_tokenizer_json()
            else 'it is not the built-in "bytes"'
        ),
        BytesEngine,
        proven=False,
    ),
    nanotoken.NAME: EngineKind(
        "'packprep[nanotoken]'",
        partial(installed_version, nanotoken.NAME),
        nanotoken.refusal,
        nanotoken.WordPieceEngine,
        proven=True,
    ),
    gigatoken.NAME: EngineKind(
        "'packprep[gigatoken]'",
        partial(installed_version, gigatoken.NAME),
        gigatoken.refusal,
        gigatoken.GigatokenEngine,
        proven=True,
    ),
    fastokens.NAME: EngineKind(
        fastokens.NAME,
        partial(installed_version, fastokens.NAME),
        fastokens.refusal,
        fastokens.FastEngine,
        proven=True,
    ),
    REFERENCE: EngineKind(
        "tokenizers",
        library_version,
        lambda vocabulary: None,
        ReferenceEngine,
        proven=False,
    ),
}


def candidates(requested: str, vocabulary: Vocabulary) -> list[str]:
    """The names of the engines that the recipe's `engine` may mean here, best first: all that can
    be, for "auto".

    RecipeError if an engine asked for by name is not known, not installed, or does not take this
    tokenizer.
    """
    if requested != "auto" and requested not in ENGINES:
        raise RecipeError(
            f"engine = {requested!r} is not known; the engines are auto, {', '.join(ENGINES)}"
        )
    found = []
    for name in ENGINES if requested == "auto" else (requested,):
        kind = ENGINES[name]
        missing = (
            f"it is not installed here (pip install {kind.package})"
            if kind.version() is None
            else None
        )
        why = missing or kind.refusal(vocabulary)
        if why is None:
            found.append(name)
        elif requested != "auto":
            raise refused(name, why)
    return found


def refused(name: str, why: str) -> RecipeError:
    """The error for an engine that was asked for by name and cannot be used."""
    return RecipeError(
        f'engine = {name!r} cannot be used with this tokenizer: {why}. Use engine = "auto"'
    )


def begin_loading(requested: str, vocabulary: Vocabulary, special_text: str) -> None:
    """Load the engine that the recipe's `engine` most likely means while the caller goes on;
    `loaded` then waits for it.

    Libraries load large vocabularies without the lock of Python. Whatever goes wrong is for
    `loaded` to say.
    """
    with contextlib.suppress(PackprepError):
        name = candidates(requested, vocabulary)[0]
        key = ENGINES[name], vocabulary, special_text
        if key not in _last and key not in _loading:
            thread = ThreadPoolExecutor(1)
            _loading[key] = thread.submit(ENGINES[name].load, vocabulary, special_text)
            thread.shutdown(wait=False)  # it ends by itself, and only then is this process forked


def loaded(name: str, vocabulary: Vocabulary, special_text: str) -> Engine:
    """An engine; the one that was loaded last is remembered, for a large vocabulary takes a second.
    Raises EngineRefusal."""
    key = ENGINES[name], vocabulary, special_text
    if key not in _last:
        if why := ENGINES[name].refusal(vocabulary):
            raise EngineRefusal(why)
        loading = _loading.pop(key, None)
        engine = loading.result() if loading else ENGINES[name].load(vocabulary, special_text)
        _last.clear()
        _last[key] = engine
    return _last[key]


_last: dict[tuple[EngineKind, Vocabulary, str], Engine] = {}
_loading: dict[tuple[EngineKind, Vocabulary, str], Future[Engine]] = {}


def engine_in_words(engine: Engine, requested: str, vocabulary: Vocabulary) -> str:
    """Say which engine, its rate in tokenizing alone, why none is faster, and what would help.

    requested: the recipe's `engine`.
    """
    said = (
        f"engine {engine.name} {engine.version}, by itself about {engine.rate} MB/s of text a core"
    )
    if isinstance(engine, ReferenceEngine) and engine.in_place_of:
        return f"{said}, in place of the plan's {engine.in_place_of}"
    if requested == engine.name:
        return f'{said}, as engine = "{requested}" asks'
    passed_over, refusals = [], []
    for name, kind in ENGINES.items():
        if name == engine.name:
            break
        why = kind.refusal(vocabulary) if kind.proven else None
        if why is not None:
            refusals.append(why)
        elif kind.proven and kind.version() is None:
            return (
                f"{said}; {name} is faster with this tokenizer: pip install {kind.package}, then"
                " begin in another folder"
            )
        elif kind.proven:
            passed_over.append(name)
    if passed_over:
        return (
            f"{said}, as {' and '.join(passed_over)} failed, or was not there or not wanted, when"
            " the plan was made"
        )
    if engine.name == REFERENCE and refusals:
        return f"{said}: {refusals[-1]}, and nothing faster is exact for that"
    return said


def engine_facts(name: str) -> dict[str, str]:
    """What a plan says of its engine: {"name", "version"}, and the version of the "reference" that
    it is compared with."""
    version = ENGINES[name].version()
    assert version is not None
    facts = {"name": name, "version": version}
    return {**facts, "reference": library_version()} if ENGINES[name].proven else facts


def load_engine(engine: Mapping[str, str], vocabulary: Vocabulary, special_text: str) -> Engine:
    """The engine of a plan; the reference in its place, where this installation has another version
    of it, or none.

    PlanError where it is not one that is compared with the reference, or the reference is another,
    too.
    """
    name, version = engine["name"], engine["version"]
    believed = REFERENCE if "reference" in engine else name
    if believed not in ENGINES:
        raise PlanError(
            f"the plan's engine is {name} {version}, which this packprep does not have (it has"
            f" {', '.join(ENGINES)}). Use the packprep that wrote the plan, or build into a new"
            " folder"
        )
    planned, here = engine.get("reference", version), ENGINES[believed].version()
    if planned != here:
        raise PlanError(
            f"the plan's engine is {believed} {planned}, and here it is"
            f" {f'{believed} {here}' if here else 'not installed'}: the same text may get other"
            " tokens. Install the plan's version: pip install"
            f" {ENGINES[believed].package}=={planned}, or build into a new folder"
        )
    found = ENGINES[name].version() if name in ENGINES else None
    try:
        if found != version:
            installed = f"{name} {found} is installed here" if found else "it is not installed here"
            raise EngineRefusal(f"{installed}: pip install {name}=={version}")
        return loaded(name, vocabulary, special_text)
    except EngineRefusal as error:
        why = str(error)
    if believed != name:
        return ReferenceEngine(vocabulary, special_text, f"{name} {version} ({why})")
    raise PlanError(
        f"the plan's engine {name} cannot be used with the plan's tokenizer: {why}; build into a"
        " new folder"
    )
