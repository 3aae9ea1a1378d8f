"""A slice of a file → batches of documents as columns. One file a format; this is their registry.

```
Slice ─► jsonl, text ─────────────────────┐
         parquet, arrow ─► table ─┬───────┴► Batch (texts, files, positions, rejects, supervision)
         megatron ────────────────┴────────► Batch (tokens, files, positions, rejects)
compressed: files decompressed, for lines and text
```
A document belongs to the slice in which its first byte, row or step lies; neighbouring slices
neither overlap nor leave a gap. A document that cannot be used is a reject with a reason; a file
that cannot be read is a SourceError.

A format is one file with the functions that `FormatModule` names, one line in the registry below,
and a row in docs/recipe.md.
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Protocol, cast

import numpy as np

from packprep.errors import RecipeError, SourceError
from packprep.sources.formats.batch import (
    BAD_REASONS,
    MAX_DOCUMENT_BYTES,
    PIECE_BYTES,
    TOKEN_TEXT_BYTES,
    Batch,
    Choice,
    IdLists,
    Keep,
    Reject,
    Slice,
    Supervision,
)
from packprep.sources.formats.compressed import Decoders
from packprep.sources.formats.fields import Fields

__all__ = [
    "BAD_REASONS",
    "FORMATS",
    "MAX_DOCUMENT_BYTES",
    "PIECE_BYTES",
    "TOKEN_TEXT_BYTES",
    "Batch",
    "Choice",
    "Decoders",
    "Format",
    "IdLists",
    "Keep",
    "Reject",
    "Slice",
    "bytes_of_pieces",
    "bytes_per_token",
    "check_format",
    "count_pieces",
    "detect_format",
    "format_of",
    "formats_asked",
    "position_of",
    "read",
]


class FormatModule(Protocol):
    """What a format's file has."""

    def read(
        self,
        part: Slice,
        text_key: str,
        keep: Keep | None,
        batch_bytes: int,
        decoders: Decoders,
        fields: Fields | None,
    ) -> Iterator[Batch]:
        """The documents of a slice; see `formats.read`."""

    def pieces(
        self, path: str, size: int, text_key: str, tokens: bool, piece_bytes: int
    ) -> int | list[int]:
        """How many pieces a file has, or about how much each of them holds. Of formats of numbered
        documents alone."""

    def line_decoder(
        self, text_key: str, fields: Fields | None
    ) -> Callable[[bytes], str | Supervision | tuple[str, str]]:
        """A function from a line to its text, fields, or reason and detail. Of formats of lines
        alone, whose position is "byte"."""

    def bytes_per_token(self, part: Slice, text_key: str) -> float | None:
        """The bytes that pieces hold for a token; None where that cannot be told. Of formats of
        tokens alone."""

    def numbers(self, part: Slice, decoders: Decoders) -> range:
        """The numbers in their file of the documents of a slice's piece. Of formats of numbered
        documents alone."""

    def pieces_at(self, path: str, size: int, positions: np.ndarray) -> np.ndarray:
        """int64[k], ascending: which pieces hold the documents at `positions: int64[n]`. Of indexed
        formats alone."""


@dataclass(frozen=True)
class Format:
    """What is known of a format without its file, which may import what takes long.

    position    what a document's position counts: "byte", of its line; "number", in its file; "whole": the file is a document
    asked       what a recipe's `format` calls it, where that is not its name
    only        what that reads, where a file is told by its name's ending: for a message
    """

    name: str
    suffixes: tuple[str, ...]  # endings of file names in lower case; none: of all other files
    file: str  # below formats/
    position: str
    holds: str = "texts"  # or "tokens"
    asked: str = ""
    only: str = ""
    json: bool = False  # a document is a JSON object in a line
    paired: bool = False  # a file is a .bin with its .idx
    indexed: bool = False  # an index says where documents lie

    @cached_property
    def module(self) -> FormatModule:
        """Its file. pyarrow takes 0.3 s to import, and most corpora are line files."""
        return cast(FormatModule, import_module(f"{__name__}.{self.file}"))

    def counts(
        self, sizes: np.ndarray, compression: str, piece_bytes: int = PIECE_BYTES
    ) -> np.ndarray:
        """int64[F]: the pieces of files of `sizes: int64[F]` bytes, where sizes tell them: not of
        numbered documents.

        Lines have one per `piece_bytes`, compressed ones 1, each 0 if empty; a file that is a
        document 1.
        """
        if self.position == "whole":
            return np.ones(len(sizes), np.int64)
        return np.minimum(sizes, 1) if compression else -(-sizes // piece_bytes)


_PARQUET, _ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_LISTS = (
    "Parquet files (.parquet, .pq), Arrow files (.arrow, .feather, .ipc) and folders of Hugging"
    ' Face datasets. Write the tokens as one of these; for Megatron\'s files say "megatron"'
)
_PAIRS = "pairs of a .bin and an .idx file. Name one of the two, or set format to what the file is"
FORMATS = {
    format.name: format
    for format in (
        Format("jsonl", (".jsonl", ".ndjson", ".json"), "jsonl", "byte", json=True),
        Format("parquet", _PARQUET, "parquet", "number"),
        Format("arrow", _ARROW, "arrow", "number"),
        Format("text", (), "text", "whole"),
        Format(
            "megatron",
            (".bin", ".idx"),
            "megatron",
            "number",
            "tokens",
            only=_PAIRS,
            paired=True,
            indexed=True,
        ),
        Format("parquet_tokens", _PARQUET, "parquet", "number", "tokens", "tokens", _LISTS),
        Format("arrow_tokens", _ARROW, "arrow", "number", "tokens", "tokens", _LISTS),
    )
}
"""Name → format. By its ending, a file is of the first that has it."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


def formats_asked() -> list[str]:
    """What a recipe's `format` may be: of files, or "store" for a token store, which is no
    file's."""
    return list(
        dict.fromkeys(
            ("auto", *(format.asked or format.name for format in FORMATS.values()), "store")
        )
    )


def check_format(format: str, source: int) -> None:
    """RecipeError unless the `format` of a recipe's source, by its number, is known."""
    known = formats_asked()
    if format not in known:
        near = difflib.get_close_matches(format, known, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise RecipeError(
            f"sources[{source}].format = {format!r:.500}: expected {' | '.join(known)}{meant}",
            ("sources", source, "format"),
        )


def detect_format(name: str) -> tuple[str, str]:
    """(format, compression) by a file name's endings; the compression is "", gzip or zstd.

    Raises SourceError for a compressed file of a format that is entered in the middle.
    """
    stem, compression = name.lower(), ""
    for ending, compressed in _COMPRESSIONS.items():
        if stem.endswith(ending):
            stem, compression = stem.removesuffix(ending), compressed
            break
    format = next((f for f in FORMATS.values() if stem.endswith(f.suffixes)), FORMATS["text"])
    if compression and format.position == "number":
        raise SourceError(
            f"{name}: {format.name} files compressed as a whole cannot be read. Decompress the"
            " file."
        )
    return format.name, compression


def format_of(name: str, format: str) -> tuple[str, str]:
    """(format, compression) of a file in a source whose recipe says `format`; the format is one
    that `Slice` names.

    Raises SourceError as `detect_format` does, and for a file that holds no tokens by its name
    where tokens are asked for.
    """
    found, compression = detect_format(name)
    if format == "auto":
        return found, compression
    asked = [f for f in FORMATS.values() if (f.asked or f.name) == format]
    if asked[0].only:
        asked = [f for f in asked if f.suffixes == FORMATS[found].suffixes] or asked
        if asked[0].suffixes != FORMATS[found].suffixes:
            raise SourceError(f'{name}: format = "{format}" reads {asked[0].only}')
    return asked[0].name, compression


def position_of(format: str, compression: str) -> str:
    """`Format.position` of a format, but "stream" of compressed lines, whose bytes a plan does not
    tell."""
    position = FORMATS[format].position
    return "stream" if position == "byte" and compression else position


def count_pieces(
    path: str, format: str, compression: str, size: int, piece_bytes: int = PIECE_BYTES
) -> int:
    """The pieces of a file of `size` bytes: what can be entered by itself.

    Of lines and texts as `Format.counts`; Parquet has its row groups, Arrow its record batches
    (headers only are read); a pair of Megatron's files one per `piece_bytes` and at most one a
    document.
    """
    if FORMATS[format].position != "number":
        return int(FORMATS[format].counts(np.array([size]), compression, piece_bytes)[0])
    found = bytes_of_pieces(path, format, size, piece_bytes=piece_bytes)
    return found if isinstance(found, int) else len(found)


def bytes_of_pieces(
    path: str, format: str, size: int, text_key: str = "text", piece_bytes: int = PIECE_BYTES
) -> int | list[int]:
    """About how much each piece of a file of numbered documents holds, by its footer or headers, or
    how many there are.

    Of a Parquet file the bytes of the column of texts before compression, or TOKEN_TEXT_BYTES for
    each id; of an Arrow file the bytes of the record batch; of a pair of Megatron's the number.
    """
    own = FORMATS[format]
    return own.module.pieces(path, size, text_key, own.holds == "tokens", piece_bytes)


def bytes_per_token(part: Slice, text_key: str) -> float | None:
    """The bytes that pieces hold for a token: of a slice's file, or of its record batch. None where
    that cannot be told."""
    return FORMATS[part.format].module.bytes_per_token(part, text_key)


def read(
    part: Slice,
    text_key: str,
    keep: Keep | None = None,
    batch_bytes: int = 4 << 20,
    decoders: Decoders | None = None,
    fields: Fields | None = None,
) -> Iterator[Batch]:
    """The documents of a slice, in file order, in batches of about `batch_bytes`; no batch is
    empty.

    text_key: the key or column that holds the text; text files have none. Of a table of tokens the
    column that holds the lists of ids; "text": input_ids, or else tokens
    keep: which documents to decode; the others leave no trace. A Choice sees those of the piece
    before the slice, too
    decoders: what this process remembers between slices; it changes the speed only
    fields: give a document's loss_spans, messages and what else `fields.py` says, too; None: these
    are not looked at, and so in a source of tokens. A field that is the text_key is the text and
    nothing else A position is the byte offset of a line (compressed: in the decompressed stream), a
    row number in the file, the number of a document in Megatron's index, or 0.

    Raises SourceError for a file that is missing, unreadable, corrupt, truncated or not of the
    planned size, and for a missing column. Memory: about `batch_bytes` and one document.
    """
    module = FORMATS[part.format].module
    return module.read(part, text_key, keep, batch_bytes, decoders or Decoders(), fields)
