"""Texts → flat ids, by an engine.

The reference engine is the `tokenizers` library. Every other engine gives the same ids, only faster; a recipe's
fingerprint does not know which one ran.

```
engine        what an engine is, and how one fails
reference     `tokenizers`: any tokenizer.json
byte_ids      the built-in vocabulary of bytes, without a library
fastokens     `fastokens`: byte-level BPE
```
Here stands which engines there are, those that a recipe's `engine` may mean, and the one of a plan.
"""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from packprep.errors import PackprepError, PlanError, RecipeError
from packprep.tokenizer.engines import fastokens
from packprep.tokenizer.engines.byte_ids import BytesEngine
from packprep.tokenizer.engines.engine import Engine, EngineRefusal
from packprep.tokenizer.engines.reference import ReferenceEngine
from packprep.tokenizer.file import bytes_tokenizer_json, library_version
from packprep.tokenizer.roles import Vocabulary

REFERENCE = "reference"


@dataclass(frozen=True)
class EngineKind:
    """version: of this installation; None: not installed. load: raises EngineRefusal for a tokenizer that it does not take."""

    package: str  # what to install
    version: Callable[[], str | None]
    refusal: Callable[
        [Vocabulary], str | None
    ]  # why it does not take a tokenizer, as far as can be told without loading
    load: Callable[[Vocabulary, str], Engine]
    proven: bool  # whether it has to be compared with the reference before it is trusted, and all through the build


# In the order in which "auto" tries them; the reference takes every tokenizer.
ENGINES: dict[str, EngineKind] = {
    "bytes": EngineKind(
        "packprep",
        lambda: BytesEngine.version,
        lambda vocabulary: (
            None if vocabulary.tokenizer_json == bytes_tokenizer_json() else 'it is not the built-in "bytes"'
        ),
        BytesEngine,
        proven=False,
    ),
    fastokens.NAME: EngineKind(
        fastokens.NAME, fastokens.installed_version, fastokens.refusal, fastokens.FastEngine, proven=True
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
    """The names of the engines that the recipe's `engine` may mean here, best first: all that can be, for "auto".

    RecipeError if an engine asked for by name is not known, not installed, or does not take this tokenizer.
    """
    if requested != "auto" and requested not in ENGINES:
        raise RecipeError(f"engine = {requested!r} is not known; the engines are auto, {', '.join(ENGINES)}")
    found = []
    for name in ENGINES if requested == "auto" else (requested,):
        kind = ENGINES[name]
        missing = f"it is not installed here (pip install {kind.package})" if kind.version() is None else None
        why = missing or kind.refusal(vocabulary)
        if why is None:
            found.append(name)
        elif requested != "auto":
            raise refused(name, why)
    return found


def refused(name: str, why: str) -> RecipeError:
    """The error for an engine that was asked for by name and cannot be used."""
    return RecipeError(f'engine = {name!r} cannot be used with this tokenizer: {why}. Use engine = "auto"')


def begin_loading(requested: str, vocabulary: Vocabulary, special_text: str) -> None:
    """Load the engine that the recipe's `engine` most likely means while the caller goes on; `loaded` then waits for it.

    Libraries load large vocabularies without the lock of Python. Whatever goes wrong is for `loaded` to say.
    """
    with contextlib.suppress(PackprepError):
        name = candidates(requested, vocabulary)[0]
        key = ENGINES[name], vocabulary, special_text
        if key not in _last and key not in _loading:
            thread = ThreadPoolExecutor(1)
            _loading[key] = thread.submit(ENGINES[name].load, vocabulary, special_text)
            thread.shutdown(wait=False)  # it ends by itself, and only then is this process forked


def loaded(name: str, vocabulary: Vocabulary, special_text: str) -> Engine:
    """An engine; the one that was loaded last is remembered, for a large vocabulary takes a second. Raises EngineRefusal."""
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


def engine_facts(name: str) -> dict[str, str]:
    """What a plan says of its engine: {"name", "version"}, and the version of the "reference" that it is compared with."""
    version = ENGINES[name].version()
    assert version is not None
    facts = {"name": name, "version": version}
    return {**facts, "reference": library_version()} if ENGINES[name].proven else facts


def load_engine(engine: Mapping[str, str], vocabulary: Vocabulary, special_text: str) -> Engine:
    """The engine of a plan. PlanError if this installation has another version of it, or none, or it cannot be loaded."""
    name = engine["name"]
    if name not in ENGINES:
        raise PlanError(
            f"the plan's engine is {name} {engine['version']}, which this packprep does not have "
            f"(it has {', '.join(ENGINES)}). Use the packprep that wrote the plan, or build into a new folder"
        )
    kind = ENGINES[name]
    versions = [(name, kind.package, engine["version"], kind.version())]
    if "reference" in engine:
        versions.append((REFERENCE, ENGINES[REFERENCE].package, engine["reference"], library_version()))
    for which, package, planned, here in versions:
        if planned != here:
            raise PlanError(
                f"the plan's engine is {which} {planned}, and here it is {f'{which} {here}' if here else 'not installed'}: "
                f"the same text may get other tokens. Install the plan's version: pip install {package}=={planned}, "
                "or build into a new folder"
            )
    try:
        return loaded(name, vocabulary, special_text)
    except EngineRefusal as error:
        why = str(error)
    raise PlanError(
        f"the plan's engine {name} cannot be used with the plan's tokenizer: {why}; build into a new folder"
    )
