"""Check whether a trainer's tokenizer is the one that made a dataset's ids.

    check_tokenizer("packed", "model/")    raises TokenizerMismatch with the first id or text

A file with the digest of the dataset's tokenizer.json matches. All other tokenizers are compared by
their behavior: the id of each token, and the ids of 1000 texts. The texts depend only on the
dataset's tokens and on PIECES:

    text k   random PIECES and characters, then the texts of tokens k, k + 1000, k + 2000, …
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
# Names of the formats with ids in `sources.formats.FORMATS`, which adapters may not import.
TOKEN_FORMATS = {
    "megatron",
    "datatrove",
    "token_stream",
    "parquet_tokens",
    "arrow_tokens",
    "jsonl_tokens",
}
PIECES = (  # Normalizers and pre-tokenizers differ in these strings.
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
    """Check that a tokenizer gives ids the same meaning as a dataset, and encodes text equally.

    A file that equals the dataset's tokenizer.json matches. Any other tokenizer matches if it has
    the dataset's tokens under the same ids, including the tokens that the build added. It must also
    encode 1000 texts equally. Together, the texts contain all tokens of the dataset. Both
    tokenizers encode the texts without post-processing, truncation, padding and dropout.

    Additional tokens, as for a chat template, are allowed. A difference that affects neither an id
    nor one of the texts is not found, for example the order of merges that seldom compete.

    Args:
        ds: Dataset folder, or an open `Dataset` or `Mixture`. Every dataset of a mixture is
            checked.
        tokenizer: Path of a tokenizer.json or of a folder with one, a `tokenizers.Tokenizer`, or a
            Transformers tokenizer. It is not changed.

    Raises:
        TokenizerMismatch: If the tokenizers differ. The message names the first id or text that
            differs.
        DatasetError: If the dataset's tokenizer.json is missing or damaged. Also if documents came
            as ids and the recipe names only the built-in "bytes" tokenizer.
        ArgumentError: If `tokenizer` is not a tokenizer.

    Example:
        check_tokenizer("packed", "model/")
    """
    file = None
    if isinstance(tokenizer, str | os.PathLike):
        path = Path(tokenizer)
        path = path / TOKENIZER_NAME if path.is_dir() else path
        try:
            file = path.read_bytes()
        except OSError as error:
            raise ArgumentError(
                f"{path}: {error.strerror}\nhint: give a {TOKENIZER_NAME} or a folder with one"
            ) from error
    given_tokenizer = None
    for dataset in datasets_of(opened(ds)):
        digest = dataset.manifest["tokenizer"]["digest"]
        if dataset.manifest["recipe"].get("tokenizer") == "bytes":
            _check_origin(dataset)
        if file is not None and digest_of(file) == digest:
            continue
        data = _read(dataset, TOKENIZER_NAME)
        if (actual_digest := digest_of(data)) != digest:
            raise DatasetError(
                f"{dataset.directory}: {TOKENIZER_NAME} has digest {actual_digest}, which differs"
                " from the manifest\n"
                "hint: restore the right file"
            )
        given_tokenizer = given_tokenizer or _loaded(tokenizer if file is None else file)
        difference = _first_difference(_loaded(data), given_tokenizer)
        if difference:
            raise TokenizerMismatch(
                f"{dataset.directory}: its ids are not from the given tokenizer: {difference}\n"
                f"hint: train with the {TOKENIZER_NAME} of the dataset, or build it again with"
                " your tokenizer"
            )


def _first_difference(own_tokenizer: Tokenizer, given_tokenizer: Any) -> str | None:
    """Describe the first id or text where the given tokenizer differs from the dataset's.

    Return None if they agree.
    """
    # The dataset's ids are compared in order, so the message names the lowest id that differs.
    ids = given_tokenizer.get_vocab()
    for token, id in sorted(own_tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if ids.get(token) != id:
            given_token = next(
                (repr(name) for name, given_id in ids.items() if given_id == id), "no token"
            )
            return (
                f"id {id} is {token!r}, but {given_token} in the given tokenizer, where {token!r}"
                f" is {ids.get(token, 'none')}"
            )
    # Equal ids do not show equal merges or normalizers, so texts are encoded too.
    for k, text in enumerate(_texts(own_tokenizer)):
        own_ids, given_ids = _encoded(own_tokenizer, text), _encoded(given_tokenizer, text)
        if own_ids != given_ids:
            index = len(os.path.commonprefix([own_ids, given_ids]))
            return (
                f"text {k}, {text[:40]!r}…, is {own_ids[index : index + 8]} from token {index} on,"
                f" but {given_ids[index : index + 8]} with the given tokenizer"
            )
    return None


def _texts(own_tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the texts that both tokenizers encode. They depend on the dataset's tokens."""
    chance = Random(0).random
    ids = sorted(own_tokenizer.get_vocab().values())
    added = own_tokenizer.get_added_tokens_decoder()
    words = []
    for id, word in zip(
        ids,
        own_tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False),
        strict=True,
    ):
        # Each token's text appears with and without a space before it. The text of an added token
        # also appears inside a word and with its letter case swapped.
        words.append(
            f"\na{word}b {word} {word.swapcase()}" if id in added else f"\n{word} \n {word}"
        )
    for k in range(TEXTS):
        pieces = [PIECES[int(chance() * len(PIECES))] for _ in range(16)]
        characters = [chr(int(chance() * (1 << int(chance() * 16)))) for _ in range(16)]
        yield "".join([*map("".join, zip(pieces, characters, strict=True)), *words[k::TEXTS]])


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Return a text's ids.

    The result is an empty list if the tokenizer raises an error, for example because it has neither
    a word of the text nor a token for unknown words.
    """
    try:
        encoded = tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # The library raises a bare Exception.
        return []
    return getattr(encoded, "ids", encoded)


def _check_origin(dataset: Dataset) -> None:
    """Check that no documents were read as ids, for a dataset with the tokenizer "bytes".

    Documents that were read as ids come from another tokenizer, which the recipe does not name.

    Raises:
        DatasetError: If documents of a source were read as ids.
    """
    sources = json.loads(_read(dataset, PLAN_NAME))["sources"]
    # The keys of `ratios` are names of formats, some with a compression, such as jsonl_tokens.gzip.
    tokens = [
        source["name"]
        for source in sources
        if TOKEN_FORMATS & {format.split(".")[0] for format in source["ratios"]}
    ]
    if tokens:
        raise DatasetError(
            f"{dataset.directory}: the documents of {', '.join(tokens)} were read as ids, and the"
            ' recipe\'s tokenizer is the built-in "bytes", so their tokenizer is unknown\n'
            "hint: build with the tokenizer of these ids"
        )


def _read(dataset: Dataset, name: str) -> bytes:
    folder = folder_at(str(dataset.directory))
    try:
        return folder.read(name)
    except OSError as error:
        raise DatasetError(
            f"{folder.path_of(name)}: {error.strerror or error}. It is needed to interpret the"
            " ids\n"
            "hint: restore the file"
        ) from error


def _loaded(source: Any) -> Any:
    """Return a tokenizer without truncation, padding and dropout.

    It is loaded from the bytes of a tokenizer.json, or copied from a tokenizer of `tokenizers`. A
    Transformers tokenizer that is written in Python is returned as it is.

    Raises:
        ArgumentError: If the source is not a tokenizer.
    """
    library = getattr(source, "backend_tokenizer", source)
    if not isinstance(library, bytes | Tokenizer):
        if hasattr(library, "get_vocab") and hasattr(library, "encode"):
            return library
        raise ArgumentError(
            f"a {type(source).__name__} is not a tokenizer\n"
            "hint: give a path, or a tokenizer of tokenizers or Transformers"
        )
    try:
        tokenizer = Tokenizer.from_buffer(
            library if isinstance(library, bytes) else library.to_str().encode()
        )
    except Exception as error:  # The library raises a bare Exception.
        raise ArgumentError(
            f"`tokenizers` cannot load a {TOKENIZER_NAME} ({error})\n"
            "hint: give a file that it wrote"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if hasattr(tokenizer.model, "dropout"):
        tokenizer.model.dropout = None
    return tokenizer
