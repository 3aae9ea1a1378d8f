"""Whether a trainer's tokenizer is the one that a dataset's ids come from.

    check_tokenizer("packed", "model/")        nothing, or TokenizerMismatch that names the first id or text

Equal files are known by their digest. Others are compared by what they do: which token has which
id, and the ids of 1000 texts, which follow from the dataset's tokens and the table below alone:

    text k   pieces of PIECES and any characters, then the texts of the tokens k, k + 1000, k + 2000, …
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from packprep.adapters import datasets_of, opened
from packprep.dataset.loader import Dataset
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError, DatasetError, TokenizerMismatch
from packprep.format.digests import digest_of
from packprep.format.json_files import PLAN_NAME, TOKENIZER_NAME
from packprep.storage import folder_at

TEXTS = 1000
PIECES = (  # by which normalizers and pre-tokenizers differ
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "\xa0",
    "\u2003",
    "\u200b",
    "\u3000",
    "\ufeff",
    "e\u0301",
    "\u212b",
    "ﬁ",
    "½",
    "Ⅻ",
    "７",
    "٣",
    "ß",
    "İ",
    "ſ",
    "'s",
    "'LL",
    "’s",
    "the",
    "Hello",
    "WORLD",
    "tion",
    "camelCase",
    "x86",
    "3.14",
    "1999",
    "1,000,000",
    "!=",
    "---",
    "...",
    "…",
    "({[",
    "😀",
    "👍🏽",
    "한국어",
    "مرحبا",
    "नमस्ते",
    "ไทย",
    "𠀀",
    "▁",
)


def check_tokenizer(ds: str | os.PathLike | Dataset | Mixture, tokenizer: Any) -> None:
    """Raise TokenizerMismatch unless a dataset's ids mean the same with this tokenizer, and text
    becomes the same ids.

    ds: a dataset, its folder, or a mixture, of which each dataset is checked. tokenizer: the path
    of a tokenizer.json or of a folder with one, a `tokenizers.Tokenizer`, or a tokenizer of
    Transformers; it is not changed.

    The same file matches. Another one does where it has the dataset's tokens, those that the build
    added among them, under the same ids, and encodes 1000 texts, in which all of them stand,
    equally: without what post-processing adds, truncation, padding and dropout. Further tokens, as
    of a chat template, are no mismatch; and what shows in no id and in none of the texts, as merges
    that seldom meet in another order, is not found.

    DatasetError where the dataset's tokenizer.json is missing or damaged, and where documents came
    as ids and its recipe names no tokenizer but the built-in "bytes". ArgumentError for what is no
    tokenizer.
    """
    file = None
    if isinstance(tokenizer, str | os.PathLike):
        path = Path(tokenizer)
        path = path / TOKENIZER_NAME if path.is_dir() else path
        try:
            file = path.read_bytes()
        except OSError as error:
            raise ArgumentError(
                f"{path}: {error.strerror}; give a {TOKENIZER_NAME} or a folder with one"
            ) from error
    given = None
    for dataset in datasets_of(opened(ds)):
        digest = dataset.manifest["tokenizer"]["digest"]
        if dataset.manifest["recipe"].get("tokenizer") == "bytes":
            _check_origin(dataset)
        if file is not None and digest_of(file) == digest:
            continue
        data = _read(dataset, TOKENIZER_NAME)
        if (found := digest_of(data)) != digest:
            raise DatasetError(
                f"{dataset.directory}: {TOKENIZER_NAME} has digest {found} and not the manifest's:"
                " put the right file back"
            )
        given = given or _loaded(tokenizer if file is None else file)
        difference = _first_difference(_loaded(data), given)
        if difference:
            raise TokenizerMismatch(
                f"{dataset.directory}: its ids are not those of the tokenizer that was given:"
                f" {difference}. Train with the {TOKENIZER_NAME} of the dataset, or build it again"
                " with yours"
            )


def _first_difference(own: Tokenizer, given: Any) -> str | None:
    """The first id or text in which the given tokenizer differs from the dataset's, in words; None
    if there is none."""
    ids = given.get_vocab()
    for token, id in sorted(own.get_vocab().items(), key=lambda entry: entry[1]):
        if ids.get(token) != id:
            there = next((repr(other) for other in ids if ids[other] == id), "no token")
            return (
                f"id {id} is {token!r}, and {there} there, where {token!r} is"
                f" {ids.get(token, 'none')}"
            )
    for k, text in enumerate(_texts(own)):
        one, other = _encoded(own, text), _encoded(given, text)
        if one != other:
            at = len(os.path.commonprefix([one, other]))
            return (
                f"text {k}, {text[:40]!r}…, is {one[at : at + 8]} from token {at} on, and"
                f" {other[at : at + 8]} there"
            )
    return None


def _texts(own: Tokenizer) -> Iterator[str]:
    """The texts that both tokenizers encode."""
    chance = Random(0).random
    ids = sorted(own.get_vocab().values())
    added = own.get_added_tokens_decoder()
    words = []
    for id, word in zip(
        ids, own.decode_batch([[id] for id in ids], skip_special_tokens=False), strict=True
    ):
        # behind a space and not; of an added token, in a word and in another case, too
        words.append(
            f"\na{word}b {word} {word.swapcase()}" if id in added else f"\n{word} \n {word}"
        )
    for k in range(TEXTS):
        pieces = [PIECES[int(chance() * len(PIECES))] for _ in range(16)]
        characters = [chr(int(chance() * (1 << int(chance() * 16)))) for _ in range(16)]
        yield "".join([*map("".join, zip(pieces, characters, strict=True)), *words[k::TEXTS]])


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """A text's ids; none where a word is unknown and there is no token for that."""
    try:
        encoded = tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # a bare one, by the library
        return []
    return getattr(encoded, "ids", encoded)


def _check_origin(dataset: Dataset) -> None:
    """DatasetError where documents came as ids, and the recipe did not say of which tokenizer."""
    sources = json.loads(_read(dataset, PLAN_NAME))["sources"]
    tokens = [
        source["name"]
        for source in sources
        if {"megatron", "parquet_tokens", "arrow_tokens"} & {*source["ratios"]}
    ]
    if tokens:
        raise DatasetError(
            f"{dataset.directory}: the documents of {', '.join(tokens)} came as ids, and the"
            ' recipe\'s tokenizer is the built-in "bytes", so nothing says which one made them:'
            " build with tokenizer = that one"
        )


def _read(dataset: Dataset, name: str) -> bytes:
    folder = folder_at(str(dataset.directory))
    try:
        return folder.read(name)
    except OSError as error:
        raise DatasetError(
            f"{folder.path_of(name)}: {error.strerror or error}; put it back: it says what the ids"
            " mean"
        ) from error


def _loaded(source: Any) -> Any:
    """A tokenizer that neither cuts, pads nor draws: of a tokenizer.json's bytes, or a copy of one
    of `tokenizers`; the same one of Transformers that is written in Python."""
    library = getattr(source, "backend_tokenizer", source)
    if not isinstance(library, bytes | Tokenizer):
        if hasattr(library, "get_vocab") and hasattr(library, "encode"):
            return library
        raise ArgumentError(
            f"a {type(source).__name__} is no tokenizer: give a path, or one of tokenizers or"
            " Transformers"
        )
    try:
        tokenizer = Tokenizer.from_buffer(
            library if isinstance(library, bytes) else library.to_str().encode()
        )
    except Exception as error:  # a bare one, by the library
        raise ArgumentError(
            f"`tokenizers` cannot load a {TOKENIZER_NAME} ({error}): give one that it wrote"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if hasattr(tokenizer.model, "dropout"):
        tokenizer.model.dropout = None
    return tokenizer
