"""List the engines that encode texts, select them for a recipe's `engine`, and load them.

The reference engine is the `tokenizers` library. All other engines give the same ids, only faster.
A recipe's fingerprint does not depend on the engine.

```
engine        the interface of an engine, and its errors
reference     `tokenizers`: any tokenizer.json
byte_ids      the built-in byte vocabulary, without a library
nanotoken     `nanotoken`: WordPiece
gigatoken     `gigatoken`: SentencePiece BPE with byte_fallback
fastokens     `fastokens`: byte-level BPE and SentencePiece BPE
shapes        which tokenizers these engines accept
byte_tokens   the characters of BPE tokens, from the bytes of the tokens
```
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

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
    """An entry of ENGINES, with functions that check an engine and load it.

    Attributes:
        package: The argument of `pip install` that installs the engine, for hints.
        version: Returns the installed version of the engine, or None if the engine is not
            installed.
        refusal: Returns the reason why the engine cannot be used for a vocabulary, or None if it
            may be usable. This check does not load the engine.
        load: Loads the engine for a vocabulary and a `special_text`. Raises `EngineRefusal` if the
            engine does not accept the tokenizer.
        rate: Returns the approximate encoding speed on one core for a vocabulary, in MB/s of text.
        proven: Whether the engine must be compared with the reference before its first use and
            during the build.
        load_us: Time to load the engine, in microseconds per token of the vocabulary. The time to
            load its reference is not included.

    `rate` and `load_us` were measured with real tokenizers and text (docs/benchmarks.md). The times
    are from a machine on which the reference encodes 4 MB/s.
    """

    package: str
    version: Callable[[], str | None]
    refusal: Callable[[Vocabulary], str | None]
    load: Callable[[Vocabulary, str], Engine]
    rate: Callable[[Vocabulary], int]
    proven: bool
    load_us: float = 0.0


# The reference accepts every tokenizer.
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
        lambda vocabulary: 600,
        proven=False,
    ),
    nanotoken.NAME: EngineKind(
        "'packprep[nanotoken]'",
        partial(installed_version, nanotoken.NAME),
        nanotoken.refusal,
        nanotoken.WordPieceEngine,
        lambda vocabulary: 80,
        proven=True,
        load_us=2.0,
    ),
    gigatoken.NAME: EngineKind(
        "'packprep[gigatoken]'",
        partial(installed_version, gigatoken.NAME),
        gigatoken.refusal,
        gigatoken.GigatokenEngine,
        lambda vocabulary: 35,
        proven=True,
        load_us=2.5,
    ),
    fastokens.NAME: EngineKind(
        fastokens.NAME,
        partial(installed_version, fastokens.NAME),
        fastokens.refusal,
        fastokens.FastEngine,
        fastokens.rate,
        proven=True,
        load_us=6.0,
    ),
    REFERENCE: EngineKind(
        "tokenizers",
        library_version,
        lambda vocabulary: None,
        ReferenceEngine,
        lambda vocabulary: 4,
        proven=False,
    ),
}
PROOF_S = 0.6
"""Seconds to compare an engine with its reference, measured as `EngineKind.load_us`."""
TWO_PROCESSES_BYTES = 16 << 20
"""Text bytes from which at least two processes encode a build's text."""


def suitable(vocabulary: Vocabulary, text_bytes: float = math.inf) -> list[str]:
    """Return the engines that accept a vocabulary and are no slower than the reference.

    Engines that are not installed are included. They are sorted by the expected time to load them,
    to prove them and to encode `text_bytes` bytes of text. The reference is the last one. A plan
    stores the engine, so the time is estimated from the arguments and from constants. It is never
    measured, and assumes at most two processes on any machine. With infinite `text_bytes`, the
    order is the order of ENGINES.
    """
    processes = 2 if text_bytes >= TWO_PROCESSES_BYTES else 1

    def expected_s(name: str) -> float:
        kind = ENGINES[name]
        start_s = PROOF_S + kind.load_us * vocabulary.vocab_size / 1e6 if kind.proven else 0.0
        return start_s + text_bytes / 1e6 / kind.rate(vocabulary) / processes

    accepting = [name for name, kind in ENGINES.items() if kind.refusal(vocabulary) is None]
    accepting.sort(key=expected_s)
    return accepting[: accepting.index(REFERENCE) + 1]


def candidates(requested: str, vocabulary: Vocabulary, text_bytes: float = math.inf) -> list[str]:
    """Return the names of the engines that may be used for a vocabulary, best first.

    With "auto", these are the installed engines of `suitable`. With the name of an engine, the list
    has only this name.

    Args:
        requested: The recipe's `engine`.
        vocabulary: The vocabulary.
        text_bytes: Approximate number of text bytes to encode.

    Raises:
        RecipeError: If an engine requested by name is unknown, is not installed, or does not accept
            this tokenizer.
    """
    if requested != "auto" and requested not in ENGINES:
        raise RecipeError(
            f"unknown engine = {requested!r}; the engines are auto, {', '.join(ENGINES)}\n"
            'hint: use engine = "auto"'
        )
    if requested == "auto":
        return [name for name in suitable(vocabulary, text_bytes) if ENGINES[name].version()]
    kind = ENGINES[requested]
    missing = (
        f"it is not installed here (pip install {kind.package})" if kind.version() is None else None
    )
    if why := missing or kind.refusal(vocabulary):
        raise refused(requested, why)
    return [requested]


def refused(name: str, why: str) -> RecipeError:
    """Return the error for an engine that was requested by name and cannot be used."""
    return RecipeError(
        f'engine = {name!r} cannot be used with this tokenizer: {why}\nhint: use engine = "auto"'
    )


def begin_loading(
    requested: str, vocabulary: Vocabulary, special_text: str, text_bytes: float = math.inf
) -> None:
    """Start to load the first engine of `candidates` in a background thread.

    `loaded` waits for the thread and raises its errors. A thread saves time because libraries
    release the GIL while they load a large vocabulary.
    """
    with contextlib.suppress(PackprepError):
        name = candidates(requested, vocabulary, text_bytes)[0]
        key = ENGINES[name], vocabulary, special_text
        if key not in _last and key not in _loading:
            thread = ThreadPoolExecutor(1)
            _loading[key] = thread.submit(ENGINES[name].load, vocabulary, special_text)
            # The thread ends after the load. This process forks only after that.
            thread.shutdown(wait=False)


def loaded(name: str, vocabulary: Vocabulary, special_text: str) -> Engine:
    """Return the engine with this name, loaded for a vocabulary and a `special_text`.

    The engine of the last call is cached, because a large vocabulary takes a second to load.

    Raises:
        EngineRefusal: If the engine does not accept the vocabulary.
    """
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


def engine_in_words(
    engine: Engine, requested: str, vocabulary: Vocabulary, text_bytes: float = math.inf
) -> str:
    """Describe an engine for messages.

    The text has the engine's name and its speed in MB/s, and usually the reason why no faster
    engine is used. If a faster engine only has to be installed, the text says how. The arguments
    except `engine` are those of `candidates`.
    """
    rate = f"tokenizing about {ENGINES[engine.name].rate(vocabulary)} MB/s of text per core"
    description = f"engine {engine.name} {engine.version}, {rate}"
    if isinstance(engine, ReferenceEngine) and engine.in_place_of:
        return f"{description}, instead of the plan's {engine.in_place_of}"
    if requested == engine.name:
        return f'{description}, as set by engine = "{requested}"'
    # Engines before this one in `suitable` would be faster, so say why they are not used.
    ends = engine.name, REFERENCE
    passed_over = list(takewhile(lambda name: name not in ends, suitable(vocabulary, text_bytes)))
    for name in passed_over:
        if ENGINES[name].version() is None:
            return (
                f"{description}; {name} is faster with this tokenizer. To use it, pip install"
                f" {ENGINES[name].package} and build into another folder"
            )
    if passed_over:
        return (
            f"{description}, because {' and '.join(passed_over)} failed, was missing or was not"
            " wanted when the plan was made"
        )
    if engine.name != REFERENCE:
        return description
    # If a faster engine accepts the tokenizer, only the small amount of text decided against it.
    if slow := [name for name in suitable(vocabulary) if ENGINES[name].proven]:
        return (
            f"{description}, because it would take longer to load and check {' or '.join(slow)}"
            " than to tokenize this little text"
        )
    refusals = [
        why for kind in ENGINES.values() if kind.proven and (why := kind.refusal(vocabulary))
    ]
    return f"{description}: {refusals[-1]}, and no faster engine is exact for this tokenizer"


def engine_facts(name: str) -> dict[str, str]:
    """Return the entry that a plan stores about its engine, with the keys "name" and "version".

    If the engine must be compared with the reference, the key "reference" has the version of the
    library `tokenizers`.
    """
    version = ENGINES[name].version()
    assert version is not None
    facts = {"name": name, "version": version}
    return {**facts, "reference": library_version()} if ENGINES[name].proven else facts


def load_engine(engine: Mapping[str, str], vocabulary: Vocabulary, special_text: str) -> Engine:
    """Return the engine that a plan names, or the reference if it can replace this engine.

    The reference can replace every engine that is compared with it. It does so if the engine is not
    installed here in the plan's version, or refuses the vocabulary.

    Args:
        engine: The plan's entry, as returned by `engine_facts`.
        vocabulary: The vocabulary of the plan.
        special_text: `special_text` in the recipe.

    Raises:
        PlanError: If the engine cannot be used and the reference cannot replace it, or if the
            reference has another version here than in the plan.
    """
    name, version = engine["name"], engine["version"]
    # If the plan's engine is compared with the reference, only the version of the reference must be
    # equal.
    believed = REFERENCE if "reference" in engine else name
    if believed not in ENGINES:
        raise PlanError(
            f"the plan's engine is {name} {version}, which this packprep does not have (it has"
            f" {', '.join(ENGINES)})\n"
            "hint: use the packprep that wrote the plan, or build into a new folder"
        )
    planned, here = engine.get("reference", version), ENGINES[believed].version()
    if planned != here:
        raise PlanError(
            f"the plan's engine is {believed} {planned}, but here it is"
            f" {f'{believed} {here}' if here else 'not installed'}, so the same text may get"
            " other tokens\n"
            f"hint: pip install {ENGINES[believed].package}=={planned}, or build into a new"
            " folder"
        )
    # The engine itself may be missing or have another version. The reference then gives the same
    # ids.
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
        f"the plan's engine {name} cannot be used with the plan's tokenizer: {why}\n"
        "hint: build into a new folder"
    )
