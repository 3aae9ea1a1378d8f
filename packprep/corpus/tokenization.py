"""Texts to flat ids, by an engine.

The reference engine is the `tokenizers` library. Every other engine gives the same ids, only faster; a recipe's
fingerprint does not know which one ran. A new one is an entry in ENGINES.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np

from packprep.corpus.tokenizer_json import (
    BYTES_SPECIALS,
    bytes_tokenizer_json,
    plain_tokenizer_json,
    read_tokens,
    unknown_id,
)
from packprep.corpus.vocabulary import Vocabulary
from packprep.digests import digest_of
from packprep.errors import PlanError, RecipeError

SPECIAL_TEXT = ("text", "special", "reject")
BATCH_CHARACTERS = 1 << 20


class Tokens(NamedTuple):
    """Token documents, flat. Document i is ids[offsets[i] : offsets[i + 1]].

    ids: int32[total], offsets: int64[n + 1]; rejected: (index of the document, reason, detail), ascending, reason
    "special_text" or "lone_surrogate". A rejected document has no tokens.
    begins: int64[total]: the character of its document at which each token begins, where that was asked for.
    """

    ids: np.ndarray
    offsets: np.ndarray
    rejected: list[tuple[int, str, str]]
    begins: np.ndarray | None = None


class Engine(Protocol):
    """Turns texts without lone surrogates into ids, without adding, cutting or padding anything."""

    name: str
    version: str

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1]."""
        ...

    def encode_with_begins(self, texts: Sequence[str], chat: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1], begins: int64[total], the character at which each token begins.

        chat: the text of a special token is that token, whatever special_text says. Otherwise the ids are `encode`'s.
        """
        ...


def tokenize(
    engine: Engine,
    texts: Sequence[str],
    special_text: str,
    vocabulary: Vocabulary,
    begins: bool = False,
    chat: Sequence[Sequence[str]] | None = None,
) -> Tokens:
    """The ids of each text, content only: no bos, eos or mode token.

    special_text says what the text of a special token is, as "<pad>" in a document about tokenizers:
    "text" characters like others, "special" that token, "reject" a reason to reject the document.
    Under "text", a document is rejected where the model's own vocabulary gives such a token nevertheless, as a Unigram
    model does whose pieces hold "<pad>".
    begins: give the character at which each token begins, too.
    chat (goes with begins): the texts come from a chat template, whose special tokens are meant; for each text, the
    strings in it that are not the template's. Unless special_text is "special", a special token's text in one of those
    rejects the document, for in the whole text it would become the token.
    """
    assert begins or chat is None
    _check_special_text(special_text)
    rejected: dict[int, tuple[str, str]] = {}
    plain = None if special_text == "special" else _plain_text(vocabulary.tokenizer_json, vocabulary.special_ids)
    for i, text in enumerate(texts):
        if not text.isascii() and (place := _lone_surrogate(text)) is not None:
            detail = f"U+{ord(text[place]):04X} at character {place} is half of a surrogate pair and no character"
            rejected[i] = ("lone_surrogate", detail)
        elif chat is not None and plain is not None:
            if match := next(filter(None, map(plain.pattern.search, chat[i])), None):
                rejected[i] = ("special_text", f"{match.group()} in a message")
        elif special_text == "reject" and plain is not None and (match := plain.pattern.search(text)):
            rejected[i] = ("special_text", f"{match.group()} at character {match.start()}")
    usable = ["" if i in rejected else text for i, text in enumerate(texts)]
    at: np.ndarray | None = None
    if begins:
        ids, offsets, at = engine.encode_with_begins(usable, chat is not None)
    else:
        ids, offsets = engine.encode(usable)
    if plain is not None:
        places = np.flatnonzero((plain.forbidden if chat is None else plain.forbidden_in_chat)[ids])
        documents = np.searchsorted(offsets, places, side="right") - 1
        for i, place in zip(documents.tolist(), places.tolist(), strict=True):
            id = int(ids[place])
            detail = f"its text gives {plain.texts[id]} (id {id}) as token {place - int(offsets[i])}"
            rejected.setdefault(i, ("special_text", detail))
    if rejected:
        lengths = np.diff(offsets)
        kept = np.ones(len(texts), dtype=bool)
        kept[list(rejected)] = False
        of_kept = np.repeat(kept, lengths)
        ids, at = ids[of_kept], None if at is None else at[of_kept]
        offsets = _offsets(np.where(kept, lengths, 0))
    return Tokens(ids, offsets, [(i, *rejected[i]) for i in sorted(rejected)], at)


def _lone_surrogate(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _check_special_text(special_text: str) -> None:
    if special_text not in SPECIAL_TEXT:
        raise RecipeError(f"[documents] special_text = {special_text!r}: it is one of {', '.join(SPECIAL_TEXT)}")


@dataclass(frozen=True)
class _PlainText:
    """What plain text may not contain. forbidden: bool[greatest id + 1]; pattern: any special token's text.

    forbidden_in_chat: those of them that no template can mean, as they are pieces of the model's and no added tokens.
    """

    forbidden: np.ndarray
    forbidden_in_chat: np.ndarray
    pattern: re.Pattern[str]
    texts: Mapping[int, str]


@lru_cache(maxsize=4)
def _plain_text(tokenizer_json: bytes, special_ids: tuple[int, ...]) -> _PlainText:
    tokens = read_tokens(tokenizer_json, "tokenizer.json")
    texts = {id: tokens.texts[id] for id in special_ids if id in tokens.texts}
    forbidden = np.zeros(tokens.n_ids, dtype=bool)
    forbidden[list(texts)] = True
    unknown = unknown_id(tokenizer_json)
    if unknown is not None:
        forbidden[unknown] = False  # [UNK] is special, but any text may give it
    in_chat = forbidden.copy()
    in_chat[[token.id for token in tokens.added.values()]] = False
    return _PlainText(forbidden, in_chat, _any_of(texts.values()), texts)


def _any_of(texts) -> re.Pattern[str]:
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """int64[n + 1] from n lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


class ReferenceEngine:
    """`tokenizers`, without its post-processor, truncation, padding and dropout."""

    name = "reference"

    def __init__(self, vocabulary: Vocabulary, special_text: str):
        import tokenizers

        as_special = special_text == "special"
        special_ids = () if as_special else frozenset(vocabulary.special_ids)
        plain = plain_tokenizer_json(vocabulary.tokenizer_json, special_ids)
        self.version = tokenizers.__version__
        self._tokenizer = tokenizers.Tokenizer.from_buffer(plain)
        self._tokenizer.encode_special_tokens = not as_special
        self._plain, self._chat = plain, self._tokenizer if as_special else None

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1]."""
        parts, lengths = [], []
        for batch in _batches(texts):
            lists = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)]
            counts = [len(ids) for ids in lists]
            parts.append(np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=sum(counts)))
            lengths += counts
        ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        return ids, _offsets(np.array(lengths, dtype=np.int64))

    def encode_with_begins(self, texts: Sequence[str], chat: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1], begins: int64[total]."""
        ids: list[int] = []
        begins: list[int] = []
        lengths: list[int] = []
        tokenizer = self._for_chat() if chat else self._tokenizer
        for batch in _batches(texts):
            # not encode_batch_fast, which leaves the offsets out; Python's are counted in characters
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                ids += encoding.ids
                begins += [begin for begin, _ in encoding.offsets]
                lengths.append(len(encoding))
        return np.array(ids, np.int32), _offsets(np.array(lengths, dtype=np.int64)), np.array(begins, np.int64)

    def _for_chat(self) -> Any:
        """The tokenizer that takes the text of a special token for that token."""
        if self._chat is None:
            import tokenizers

            self._chat = tokenizers.Tokenizer.from_buffer(self._plain)
            self._chat.encode_special_tokens = False
        return self._chat


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Neighbouring texts of about BATCH_CHARACTERS: the library's encodings take many times the room of their ids."""
    begin = characters = 0
    for end, text in enumerate(texts, start=1):
        characters += len(text)
        if characters >= BATCH_CHARACTERS or end == len(texts):
            yield texts[begin:end]
            begin, characters = end, 0


class BytesEngine:
    """The built-in vocabulary without a library: the ids of a text are its UTF-8 bytes."""

    name = "bytes"
    version = "1"

    def __init__(self, vocabulary: Vocabulary, special_text: str):
        self._any_special = _any_of(BYTES_SPECIALS)
        self._special = self._any_special if special_text == "special" else None
        self._ids = {text: np.array([256 + k], dtype=np.int32) for k, text in enumerate(BYTES_SPECIALS)}

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1]."""
        if self._special is not None and any(map(self._special.search, texts)):
            documents = [self._with_specials(text, self._special) for text in texts]
            lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
            return np.concatenate(documents), _offsets(lengths)
        encoded = [text.encode() for text in texts]
        lengths = np.array([len(data) for data in encoded], dtype=np.int64)
        return _byte_ids(b"".join(encoded)), _offsets(lengths)

    def encode_with_begins(self, texts: Sequence[str], chat: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1], begins: int64[total]."""
        special = self._any_special if chat else self._special
        ids, begins = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        lengths = []
        for text in texts:
            size = begin = 0
            for match in special.finditer(text) if special else ():
                size += _append_bytes(ids, begins, text, begin, match.start())
                size += 1
                ids.append(self._ids[match.group()])
                begins.append(np.array([match.start()], np.int64))
                begin = match.end()
            lengths.append(size + _append_bytes(ids, begins, text, begin, len(text)))
        return np.concatenate(ids), _offsets(np.array(lengths, np.int64)), np.concatenate(begins)

    def _with_specials(self, text: str, special: re.Pattern[str]) -> np.ndarray:
        parts, begin = [], 0
        for match in special.finditer(text):
            parts += [_byte_ids(text[begin : match.start()].encode()), self._ids[match.group()]]
            begin = match.end()
        return np.concatenate([*parts, _byte_ids(text[begin:].encode())])


def _byte_ids(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8).astype(np.int32)


def _append_bytes(ids: list[np.ndarray], begins: list[np.ndarray], text: str, begin: int, end: int) -> int:
    """Append the bytes of text[begin:end] and the characters that they begin at; gives how many there are."""
    data = _byte_ids(text[begin:end].encode())
    ids.append(data)
    begins.append(begin - 1 + np.cumsum((data & 0xC0) != 0x80))  # all bytes but a character's first are 10xxxxxx
    return len(data)


@dataclass(frozen=True)
class EngineKind:
    """version: of this installation. fits: whether it gives the reference's ids for this vocabulary."""

    version: Callable[[], str]
    fits: Callable[[Vocabulary], bool]
    load: Callable[[Vocabulary, str], Engine]


def _tokenizers_version() -> str:
    import tokenizers

    return tokenizers.__version__


# In the order in which "auto" tries them; the reference fits always.
ENGINES: dict[str, EngineKind] = {
    "bytes": EngineKind(
        version=lambda: BytesEngine.version,
        fits=lambda vocabulary: vocabulary.digest == digest_of(bytes_tokenizer_json()),
        load=BytesEngine,
    ),
    "reference": EngineKind(version=_tokenizers_version, fits=lambda vocabulary: True, load=ReferenceEngine),
}


def resolve_engine(requested: str, vocabulary: Vocabulary) -> dict[str, str]:
    """{"name", "version"} of the engine that the recipe's `engine` means here; "auto" is the first that fits."""
    if requested == "auto":
        name = next(name for name, kind in ENGINES.items() if kind.fits(vocabulary))
    elif requested not in ENGINES:
        raise RecipeError(f"engine = {requested!r} is not known; the engines are auto, {', '.join(ENGINES)}")
    elif not ENGINES[requested].fits(vocabulary):
        fitting = ", ".join(name for name, kind in ENGINES.items() if kind.fits(vocabulary))
        raise RecipeError(
            f"engine = {requested!r} does not know this tokenizer; the engines for it are auto, {fitting}"
        )
    else:
        name = requested
    return {"name": name, "version": ENGINES[name].version()}


def load_engine(engine: Mapping[str, str], vocabulary: Vocabulary, special_text: str) -> Engine:
    """The engine of a plan. PlanError if this installation has another version of it, or none."""
    _check_special_text(special_text)
    name, version = engine["name"], engine["version"]
    if name not in ENGINES:
        raise PlanError(
            f"the plan's engine is {name} {version}, which this packprep does not have (it has {', '.join(ENGINES)}). "
            "Use the packprep that wrote the plan, or build into a new folder"
        )
    if (here := ENGINES[name].version()) != version:
        install = f": pip install tokenizers=={version}" if name == "reference" else ""
        raise PlanError(
            f"the plan's engine is {name} {version}, and here it is {name} {here}: the same text may get other tokens. "
            f"Install the plan's version{install}, or build into a new folder"
        )
    if not ENGINES[name].fits(vocabulary):
        raise PlanError(f"the plan's engine {name} does not know the plan's tokenizer; build into a new folder")
    return ENGINES[name].load(vocabulary, special_text)
