"""Whether the fast engine gives the reference's ids, on far more nasty text than a build's proof has time for.

python benchmarks/engine_exactness.py tokenizer.json other.json         100 000 nasty texts and all code points, each file
python benchmarks/engine_exactness.py tokenizer.json --texts 1000000 --key 7 --special-text special

The nasty texts are those of packprep/tokenizer/proof.py, under another key than the proof's. Then every code point that
unicodedata lists, and their unassigned neighbours, between letters, digits, spaces and marks. A tokenizer that the engine
refuses goes through the reference, and is no difference. Exit status 1 if there is a difference.
"""

import argparse
import os
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from packprep.errors import VocabularyError
from packprep.recipe import Specials
from packprep.tokenizer.engines.engine import EngineRefusal
from packprep.tokenizer.engines.fastokens import FastEngine
from packprep.tokenizer.proof import nasty_texts, prove, texts_of_tokens
from packprep.tokenizer.roles import Needs, Vocabulary, resolve_vocabulary

AT_ONCE = 5000
CONTEXTS = ("{0}", "a{0}b {0}{0}", " {0}1 \n{0}", "'{0} e\u0301{0}\u0301")


def batches(engine: FastEngine, vocabulary: Vocabulary, count: int, key: int) -> Iterator[tuple[str, list[str]]]:
    """(kind, some texts): nasty ones, then those of code points."""
    added, pieces = texts_of_tokens(engine.reference, vocabulary)
    for begin in range(0, count, AT_ONCE):
        yield "nasty texts", nasty_texts(key, begin, min(begin + AT_ONCE, count), added, pieces)
    listed = [
        chr(c) for c in range(sys.maxunicode + 1) if c < 0x33480 or unicodedata.category(chr(c)) not in ("Cn", "Co")
    ]
    for begin in range(0, len(listed), AT_ONCE):
        for context in CONTEXTS:
            yield "code points in context", [context.format(c) for c in listed[begin : begin + AT_ONCE]]


def compare(path: Path, count: int, key: int, special_text: str) -> bool:
    """Print what is found of one tokenizer.json; whether there was a difference."""
    needs, specials = Needs(frozenset({"pad"}), (), 0), Specials(pad="<|pad|>", missing="add")
    try:
        vocabulary = resolve_vocabulary(str(path.resolve()), Path(), specials, needs)
        engine = FastEngine(vocabulary, special_text)
    except VocabularyError as error:
        print(f"{path.name}: no tokenizer that packprep takes: {str(error)[:200]}")
        return False
    except EngineRefusal as error:
        print(f"{path.name}: refused, so that the reference is used: {error}")
        return False
    done = {"nasty texts": 0, "code points in context": 0}
    size, began = 0, time.process_time()
    for kind, texts in batches(engine, vocabulary, count, key):
        try:
            prove(engine, texts, special_text, vocabulary)
        except EngineRefusal as error:
            print(f"{path.name}: after {done}: {error}")
            return True
        done[kind] += len(texts)
        size += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    listed = ", ".join(f"{number:,} {kind}" for kind, number in done.items())
    print(f"{path.name}: no difference in {listed}; {size:,} bytes, {time.process_time() - began:.0f} s", flush=True)
    return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizers", nargs="+", type=Path, metavar="tokenizer.json")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--key", type=int, default=1)
    parser.add_argument("--special-text", default="text", choices=("text", "special", "reject"))
    options = parser.parse_args(arguments)
    found = [compare(path, options.texts, options.key, options.special_text) for path in options.tokenizers]
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
