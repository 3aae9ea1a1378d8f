"""Which engines there are, the ones that a recipe's `engine` may mean, and the one of a plan."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from packprep.corpus.engines import fast, native
from packprep.corpus.engines.byte_ids import BytesEngine
from packprep.corpus.engines.engine import Engine, EngineRefusal, Reference, check_special_text
from packprep.corpus.engines.reference import ReferenceEngine
from packprep.corpus.tokenizer_json import bytes_tokenizer_json, library_version
from packprep.corpus.vocabulary import Vocabulary
from packprep.digests import digest_of
from packprep.errors import PackprepError, PlanError, RecipeError

REFERENCE = "reference"


HasReference = Callable[[Reference], None]


@dataclass(frozen=True)
class EngineKind:
    """version: of this installation; None: not installed. load: raises EngineRefusal for a tokenizer that it does not take,
    and tells its last argument the engine's reference as soon as that can be used, where it has one."""

    package: str  # what to install
    version: Callable[[], str | None]
    refusal: Callable[
        [Vocabulary], str | None
    ]  # why it does not take a tokenizer, as far as can be told without loading
    load: Callable[[Vocabulary, str, HasReference], Engine]
    proven: bool  # whether it has to be compared with the reference before it is trusted, and all through the build


def _no_bytes(vocabulary: Vocabulary) -> str | None:
    return None if vocabulary.digest == digest_of(bytes_tokenizer_json()) else 'it is not the built-in "bytes"'


# In the order in which "auto" tries them; the reference takes every tokenizer.
ENGINES: dict[str, EngineKind] = {
    "bytes": EngineKind(
        "packprep", lambda: BytesEngine.version, _no_bytes, lambda v, text, _: BytesEngine(v, text), proven=False
    ),
    native.NAME: EngineKind(native.NAME, fast.installed_version, fast.refusal, fast.FastEngine, proven=True),
    REFERENCE: EngineKind(
        "tokenizers",
        library_version,
        lambda vocabulary: None,
        lambda v, text, _: ReferenceEngine(v, text),
        proven=False,
    ),
}


def candidates(requested: str, vocabulary: Vocabulary) -> list[str]:
    """The names of the engines that the recipe's `engine` may mean here, best first: all that can be, for "auto".

    RecipeError if an engine asked for by name is not known, not installed, or does not take this tokenizer.
    """
    if requested == "auto":
        return [name for name in ENGINES if _why_not(name, vocabulary) is None]
    if requested not in ENGINES:
        raise RecipeError(f"engine = {requested!r} is not known; the engines are auto, {', '.join(ENGINES)}")
    if why := _why_not(requested, vocabulary):
        raise refused(requested, why)
    return [requested]


def is_proven(name: str) -> bool:
    """Whether an engine has to be compared with the reference before it is trusted."""
    return ENGINES[name].proven


def refused(name: str, why: str) -> RecipeError:
    """The error for an engine that was asked for by name and cannot be used."""
    return RecipeError(f'engine = {name!r} cannot be used with this tokenizer: {why}. Use engine = "auto"')


def _why_not(name: str, vocabulary: Vocabulary) -> str | None:
    if ENGINES[name].version() is None:
        return f"it is not installed here (pip install {ENGINES[name].package})"
    return ENGINES[name].refusal(vocabulary)


def begin_loading(requested: str, vocabulary: Vocabulary, special_text: str) -> None:
    """Load the engine that the recipe's `engine` most likely means while the caller goes on; `loaded` then waits for it.

    Libraries load large vocabularies without the lock of Python. Whatever goes wrong is for `loaded` to say.
    """
    with contextlib.suppress(PackprepError):
        name = candidates(requested, vocabulary)[0]
        key = _key(name, vocabulary, special_text)
        if key in _last or key in _begun:
            return
        begun = _begun[key] = _Begun(Future(), Future())

        def load() -> None:
            try:
                begun.engine.set_result(_load(name, vocabulary, special_text, begun.reference.set_result))
            except BaseException as error:
                begun.engine.set_exception(error)
            finally:
                if not begun.reference.done():
                    begun.reference.set_result(None)

        threading.Thread(target=load, daemon=True).start()


def note_begun(requested: str, vocabulary: Vocabulary, special_text: str, tokenizer: str) -> None:
    """Note what `begin_loading` loads for a tokenizer, its path or its name, for `native.begin_as_before`."""
    with contextlib.suppress(PackprepError):
        if candidates(requested, vocabulary)[0] == native.NAME:
            fast.note(tokenizer, vocabulary, special_text)


def reference_of_begun(name: str, vocabulary: Vocabulary, special_text: str) -> Reference | None:
    """The reference of an engine whose loading has begun, which is there before the engine; None where there is none."""
    begun = _begun.get(_key(name, vocabulary, special_text))
    return begun.reference.result() if begun else None


def loaded(name: str, vocabulary: Vocabulary, special_text: str) -> Engine:
    """An engine; the one that was loaded last is remembered, for a large vocabulary takes a second. Raises EngineRefusal."""
    key = _key(name, vocabulary, special_text)
    if key not in _last:
        begun = _begun.pop(key, None)
        engine = begun.engine.result() if begun else _load(name, vocabulary, special_text)
        _last.clear()
        _last[key] = engine
    return _last[key]


def _load(
    name: str, vocabulary: Vocabulary, special_text: str, has_reference: HasReference = lambda reference: None
) -> Engine:
    if why := ENGINES[name].refusal(vocabulary):
        raise EngineRefusal(why)
    return ENGINES[name].load(vocabulary, special_text, has_reference)


class _Begun(NamedTuple):
    engine: Future[Engine]
    reference: Future[Reference | None]


_Key = tuple[EngineKind, str, tuple[int, ...], str]


def _key(name: str, vocabulary: Vocabulary, special_text: str) -> _Key:
    return ENGINES[name], vocabulary.digest, vocabulary.special_ids, special_text


_last: dict[_Key, Engine] = {}
_begun: dict[_Key, _Begun] = {}


def engine_facts(name: str) -> dict[str, str]:
    """What a plan says of its engine: {"name", "version"}, and the version of the "reference" that it is compared with."""
    version = ENGINES[name].version()
    assert version is not None
    facts = {"name": name, "version": version}
    return {**facts, "reference": library_version()} if ENGINES[name].proven else facts


def load_engine(engine: Mapping[str, str], vocabulary: Vocabulary, special_text: str) -> Engine:
    """The engine of a plan. PlanError if this installation has another version of it, or none, or it cannot be loaded."""
    check_special_text(special_text)
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
