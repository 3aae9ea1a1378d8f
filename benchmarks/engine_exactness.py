"""Whether fast engines give the reference's ids, and the characters of tokens where they compute
them, on far more text than a build's proof has time for, and how fast they are.

python benchmarks/engine_exactness.py tokenizer.json other.json         100 000 nasty texts and all code points, each file
python benchmarks/engine_exactness.py tokenizer.json --documents corpus.jsonl                      real documents first
python benchmarks/engine_exactness.py tokenizer.json --texts 1000000 --key 7 --special-text special

Each engine that the tokenizer's shape allows is compared. Documents (the field "text" of JSON
lines) come first, so that the rates are those of a first pass: of processor time, one thread, the
first 100 MB and all. The nasty texts are those of packprep/tokenizer/proof.py, under another key
than the proof's. Then every code point that unicodedata lists, and their unassigned neighbours,
between letters, digits, spaces and marks. A tokenizer that no engine takes goes through the
reference, and is no difference. Exit status 1 if there is a difference.
"""

import argparse
import json
import os
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np

from packprep.errors import VocabularyError
from packprep.recipe import Specials
from packprep.tokenizer.encoding import Tokens
from packprep.tokenizer.engines import ENGINES, candidates, loaded
from packprep.tokenizer.engines.engine import Engine, EngineRefusal
from packprep.tokenizer.proof import (
    chat_difference,
    nasty_texts,
    prove,
    texts_of_tokens,
    texts_with_added,
)
from packprep.tokenizer.roles import Needs, Vocabulary, resolve_vocabulary

AT_ONCE, AT_ONCE_CHARACTERS = 5000, 1 << 20
CONTEXTS = ("{0}", "a{0}b {0}{0}", " {0}1 \n{0}", "'{0} e\u0301{0}\u0301")
FIRST_BYTES = 100_000_000


def documents(path: Path) -> Iterator[list[str]]:
    """The texts of a line file, AT_ONCE_CHARACTERS or more at a time."""
    texts, characters = list[str](), 0
    with open(path, encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            characters += len(texts[-1])
            if characters >= AT_ONCE_CHARACTERS:
                yield texts
                texts, characters = [], 0
    yield texts


def batches(
    reference: Engine, vocabulary: Vocabulary, count: int, key: int
) -> Iterator[tuple[str, list[str]]]:
    """(kind, some texts): those with added tokens, nasty ones, then those of code points."""
    yield "texts with added tokens", texts_with_added(vocabulary)
    added, pieces = texts_of_tokens(reference, vocabulary)
    for begin in range(0, count, AT_ONCE):
        yield "nasty texts", nasty_texts(key, begin, min(begin + AT_ONCE, count), added, pieces)
    listed = [
        chr(c)
        for c in range(sys.maxunicode + 1)
        if c < 0x33480 or unicodedata.category(chr(c)) not in ("Cn", "Co")
    ]
    for begin in range(0, len(listed), AT_ONCE):
        for context in CONTEXTS:
            yield (
                "code points in context",
                [context.format(c) for c in listed[begin : begin + AT_ONCE]],
            )


def tells_characters(engine: Any) -> bool:
    """Return whether an engine computes the characters of its tokens itself."""
    return hasattr(engine, "can_tell_characters") and engine.can_tell_characters()


def prove_characters(engine: Any, texts: list[str], chats: tuple[bool, ...]) -> None:
    """Compare the characters that an engine computes with the reference's, in chats or elsewhere.

    Raises:
        EngineRefusal: If they differ.
    """
    whole = [text for text in texts if text.encode("utf-8", "ignore").decode() == text]
    for chat in chats:
        fast = engine.own_characters(whole, chat)
        slow = engine.reference.encode_with_characters(whole, chat)
        if all(map(np.array_equal, fast, slow)):
            continue
        for text in whole:
            ids, offsets, _ = engine.own_characters([text], chat)
            if found := chat_difference(engine, text, Tokens(ids, offsets, []), 0, chat):
                raise EngineRefusal(f"its characters differ from the reference's: {found}")
        raise EngineRefusal("its characters differ from the reference's for many texts together")


class Rates:
    """MB/s of processor time, of the first FIRST_BYTES and of all, of each engine."""

    def __init__(self, names: list[str]):
        self._seconds, self._first = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        self._bytes = self._first_bytes = 0

    def encode(self, engine: Engine, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        began = time.process_time()
        found = engine.encode(texts)
        self._seconds[engine.name] += time.process_time() - began
        return found

    def add(self, size: int) -> None:
        self._bytes += size
        if not self._first_bytes and self._bytes >= FIRST_BYTES:
            self._first, self._first_bytes = dict(self._seconds), self._bytes

    def __str__(self) -> str:
        of_each = []
        for name, seconds in self._seconds.items():
            first = (
                f"{self._first_bytes / self._first[name] / 1e6:.1f} first, "
                if self._first_bytes
                else ""
            )
            of_each.append(f"{name} {first}{self._bytes / seconds / 1e6:.1f} in all")
        return f"MB/s: {'; '.join(of_each)}"


def compare(path: Path, options: argparse.Namespace) -> bool:
    """Print what is found of one tokenizer.json; whether there was a difference."""
    needs, specials = Needs(frozenset({"pad"}), (), 0), Specials(pad="<|pad|>", missing="add")
    special_text = options.special_text
    try:
        vocabulary = resolve_vocabulary(str(path.resolve()), Path(), specials, needs)
    except VocabularyError as error:
        print(f"{path.name}: no tokenizer that packprep takes: {str(error)[:200]}")
        return False
    fast: dict[str, Engine] = {}
    for name, kind in ENGINES.items():
        if not kind.proven:
            continue
        try:
            if name not in candidates("auto", vocabulary):
                raise EngineRefusal(kind.refusal(vocabulary) or "it is not installed")
            fast[name] = kind.load(vocabulary, special_text)
        except EngineRefusal as error:
            print(f"{path.name}: {name} is not used: {error}", flush=True)
    if not fast:
        return False
    reference = loaded("reference", vocabulary, special_text)
    rates, found, size, done = Rates([*fast, reference.name]), set[str](), 0, dict[str, int]()

    def compare_all(name: str, texts: list[str], ids_too: bool = True) -> None:
        engine: Any = fast[name]
        try:
            if ids_too:
                prove(engine, texts, special_text, vocabulary)
            if tells_characters(engine):
                prove_characters(engine, texts, (False, True) if ids_too else (True,))
        except EngineRefusal as error:
            print(f"{path.name}: {name}: after {done}: {error}", flush=True)
            found.add(name)

    for texts in documents(options.documents) if options.documents else ():
        expected = rates.encode(reference, texts)
        for name, engine in fast.items():
            equal = all(map(np.array_equal, rates.encode(engine, texts), expected))
            compare_all(name, texts, ids_too=not equal)
        own = sum(len(text.encode()) for text in texts)
        done["documents"] = done.get("documents", 0) + len(texts)
        size += own
        rates.add(own)
    for kind, texts in batches(reference, vocabulary, options.texts, options.key):
        for name in set(fast) - found:
            compare_all(name, texts)
        done[kind] = done.get(kind, 0) + len(texts)
        size += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    listed = ", ".join(f"{number:,} {kind}" for kind, number in done.items())
    for name in set(fast) - found:
        what = "in ids and characters" if tells_characters(fast[name]) else "in ids"
        print(f"{path.name}: {name}: no difference {what} in {listed}; {size:,} bytes", flush=True)
    if options.documents:
        print(f"{path.name}: {rates}", flush=True)
    return bool(found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizers", nargs="+", type=Path, metavar="tokenizer.json")
    parser.add_argument("--documents", type=Path, metavar="corpus.jsonl")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--key", type=int, default=1)
    parser.add_argument("--special-text", default="text", choices=("text", "special", "reject"))
    options = parser.parse_args(arguments)
    return int(any([compare(path, options) for path in options.tokenizers]))


if __name__ == "__main__":
    sys.exit(main())
