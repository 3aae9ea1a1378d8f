"""Read a work range (`Slice`) of a file as batches of documents in columns.

Each format has one file, and this module is their registry.

```
Slice ─► jsonl, text ─────────────────────┐
         parquet, arrow ─► table ─┬───────┴► Batch (texts, files, positions, rejects, supervision)
         megatron, datatrove,     │
         token_stream, token_lines┴────────► Batch (tokens, files, positions, rejects)
compressed: files decompressed, for lines and text
groups: records that are joined to documents by group_by
flat_ids: arrays with the ids of all documents, for megatron, datatrove and token_stream
```

A document belongs to the work range that contains its first byte, row or step. Adjacent work ranges
neither overlap nor leave a gap. An unusable document becomes a reject with a reason, and an
unreadable file raises SourceError.

To add a format, write one file with the functions in `FormatModule`, add one line to the registry
below, and add a row to docs/recipe.md.
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
    Grouping,
    Groups,
    IdLists,
    IdStream,
    Keep,
    Reject,
    Slice,
    Supervision,
    by_fields,
)
from packprep.sources.formats.compressed import Decoders
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.groups import FileReader, read_groups

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
    "Grouping",
    "Groups",
    "IdLists",
    "IdStream",
    "Keep",
    "Reject",
    "Slice",
    "by_fields",
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
    """The functions that a format's file provides."""

    def read(
        self,
        work_range: Slice,
        text_key: str,
        keep: Keep | None,
        batch_bytes: int,
        decoders: Decoders,
        fields: Fields | None,
    ) -> Iterator[Batch]:
        """Yield the documents of a work range; see `formats.read`."""

    def pieces(
        self, path: str, size: int, text_key: str, tokens: bool, piece_bytes: int
    ) -> int | list[int]:
        """Return the approximate content bytes of each split of a file, as a list.

        If only the number of splits is known, return this number. Only formats with numbered
        documents provide this function.
        """

    def line_decoder(
        self, text_key: str, fields: Fields | None
    ) -> Callable[[bytes], str | Supervision | tuple[str, str]]:
        """Return a function that decodes a line.

        The returned function takes the bytes of a line. It returns a text, a `Supervision`, or a
        (reject reason, detail) pair. Only formats with a text in each line provide `line_decoder`:
        their `position` is "byte", and they hold "texts".
        """

    def bytes_per_token(self, work_range: Slice, text_key: str) -> float | None:
        """Return the content bytes per token in the file or split that a work range reads.

        Return None if this number is unknown. Only formats with numbered documents of tokens
        provide this function.
        """

    def numbers(self, work_range: Slice, decoders: Decoders) -> range:
        """Return the document numbers of the whole split that a work range belongs to.

        Document numbers count from the start of the file. Only formats with numbered documents
        provide this function.
        """

    def rows_of_splits(self, work_range: Slice, decoders: Decoders) -> list[int]:
        """Return the number of rows of each split of the file of a work range.

        Only tables provide this function.
        """

    def pieces_at(self, path: str, size: int, positions: np.ndarray) -> np.ndarray:
        """For a file, return the splits that contain the documents at `positions`.

        `positions` is int64[n]. The result, int64[k], has ascending indices of splits in the file.
        Only indexed formats provide this function.
        """

    def mistake_of_notes(self, path: str) -> str:
        """Return a message if the files in `Format.notes` contradict the file at `path`, or "".

        Only formats with `notes` provide this function.
        """

    def tokenizer_in_notes(self, path: str) -> str:
        """Return the tokenizer that the files in `Format.notes` name, or "".

        Only formats with `notes` provide this function.
        """


@dataclass(frozen=True)
class Format:
    """The metadata of a format.

    The metadata is available without importing the format's file, which may load slow libraries.

    Attributes:
        name: The format's internal name, as in `Slice.format`.
        suffixes: Endings of file names in lower case. An empty tuple matches all other files.
        file: Name of the module in formats/ that reads the format.
        position: Meaning of a document's position. "byte" is the offset of the document's line, and
            "number" is the document's number in the file. With "whole", the file is one document at
            position 0.
        holds: Content of the documents, "texts" or "tokens".
        asked: Value of the recipe's `format` that selects this format, if it differs from `name`.
        only: Description of the readable files, for an error message. It is set for formats that
            require certain file name endings.
        json: Whether each line of a file is a JSON object with one document.
        pair: Endings of two files that together count as one file, such as (".bin", ".idx"). The
            first is the ending of the file with the ids.
        beside: Endings of further files that belong to a pair, after the name of its first file.
            Such a file may be missing.
        notes: Endings of files that describe a pair, as in `beside`. A build does not read them.
        indexed: Whether an index file contains the locations of documents.
    """

    name: str
    suffixes: tuple[str, ...]
    file: str
    position: str
    holds: str = "texts"
    asked: str = ""
    only: str = ""
    json: bool = False
    pair: tuple[str, str] | None = None
    beside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    indexed: bool = False

    @cached_property
    def module(self) -> FormatModule:
        """Return the module that reads the format, imported at first use.

        pyarrow takes 0.3 s to import, and most corpora are line files, which do not need it.
        """
        return cast(FormatModule, import_module(f"{__name__}.{self.file}"))

    @property
    def has_fields(self) -> bool:
        """Return whether documents are records with fields: JSON objects or rows of a table."""
        return self.json or (self.position == "number" and not self.indexed)

    def counts(
        self, sizes: np.ndarray, compression: str, piece_bytes: int = PIECE_BYTES
    ) -> np.ndarray:
        """Return the number of splits of each file, int64[F], computed from the file sizes.

        A line file has one split per `piece_bytes`, and a compressed line file has one split. An
        empty file of either kind has none. A file that is one document has one split. This method
        does not apply to formats with numbered documents.

        Args:
            sizes: int64[F], file sizes in bytes.
            compression: "", "gzip" or "zstd".
            piece_bytes: Bytes per split of an uncompressed line file.
        """
        if self.position == "whole":
            return np.ones(len(sizes), np.int64)
        return np.minimum(sizes, 1) if compression else -(-sizes // piece_bytes)


_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET, _ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_LISTS = (
    "JSON Lines (.jsonl, .ndjson, .json; with .gz or .zst), Parquet files (.parquet, .pq), Arrow"
    " files (.arrow, .feather, .ipc) and folders of Hugging Face datasets\n"
    "hint: write the tokens in one of these formats; for Megatron's files, set format ="
    ' "megatron", and for arrays of ids, set format = "token_stream"'
)
_PAIRS = (
    "pairs of a .bin and an .idx file\n"
    "hint: name one file of the pair, or set format to the format of the file"
)
_DATATROVE = (
    "pairs of a .ds and a .ds.index file\n"
    "hint: name the .ds files, or set format to the format of the file"
)
FORMATS = {
    format.name: format
    for format in (
        Format("jsonl", _LINES, "jsonl", "byte", json=True),
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
            pair=(".bin", ".idx"),
            indexed=True,
        ),
        Format(
            "datatrove",
            (".ds", ".ds.index", ".ds.loss", ".ds.metadata"),
            "datatrove",
            "number",
            "tokens",
            only=_DATATROVE,
            pair=(".ds", ".ds.index"),
            beside=(".loss",),
            notes=(".metadata",),
            indexed=True,
        ),
        Format("token_stream", (".npy",), "token_stream", "byte", "tokens"),
        Format("parquet_tokens", _PARQUET, "parquet", "number", "tokens", "tokens", _LISTS),
        Format("arrow_tokens", _ARROW, "arrow", "number", "tokens", "tokens", _LISTS),
        Format(
            "jsonl_tokens",
            _LINES,
            "token_lines",
            "byte",
            "tokens",
            "tokens",
            only=_LISTS,
            json=True,
        ),
    )
}
"""Maps names to formats. A file has the first format that lists an ending of the file's name."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


def formats_asked() -> list[str]:
    """Return the valid values of a recipe's `format`.

    The value "store" selects a token store instead of files.
    """
    return list(
        dict.fromkeys(
            ("auto", *(format.asked or format.name for format in FORMATS.values()), "store")
        )
    )


def check_format(format: str, source: int) -> None:
    """Check the `format` of a recipe's source.

    Args:
        format: The value in the recipe.
        source: Index of the source in the recipe.

    Raises:
        RecipeError: If the format is unknown.
    """
    known_formats = formats_asked()
    if format not in known_formats:
        near = difflib.get_close_matches(format, known_formats, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise RecipeError(
            f"sources[{source}].format = {format!r:.500}: expected"
            f" {' | '.join(known_formats)}{meant}",
            ("sources", source, "format"),
        )


def detect_format(name: str) -> tuple[str, str]:
    """Return a file's (format, compression) as given by the endings of its name.

    The compression is "", "gzip" or "zstd".

    Raises:
        SourceError: If the file is compressed and its format needs random access.
    """
    stem, compression = name.lower(), ""
    for ending, compressed in _COMPRESSIONS.items():
        if stem.endswith(ending):
            stem, compression = stem.removesuffix(ending), compressed
            break
    format = next((f for f in FORMATS.values() if stem.endswith(f.suffixes)), FORMATS["text"])
    _refuse_compressed(name, format, compression)
    return format.name, compression


def _refuse_compressed(name: str, format: Format, compression: str) -> None:
    is_binary = format.position == "number" or (format.holds == "tokens" and not format.json)
    if compression and is_binary:
        raise SourceError(
            f"{name}: {format.name} files cannot be read if they are compressed as a whole\n"
            "hint: decompress the file"
        )


def format_of(name: str, format: str) -> tuple[str, str]:
    """Return the (format, compression) of a file in a source.

    Args:
        name: File name.
        format: The recipe's format, which may be "auto".

    Returns:
        The format, as in `Slice.format`, and the compression.

    Raises:
        SourceError: As in `detect_format`. Also if `format` is a token format that does not read
            files with this name.
    """
    detected_format, compression = detect_format(name)
    if format == "auto":
        return detected_format, compression
    asked = [f for f in FORMATS.values() if (f.asked or f.name) == format]
    if asked[0].only:
        asked = [f for f in asked if f.suffixes == FORMATS[detected_format].suffixes] or asked
        if asked[0].suffixes != FORMATS[detected_format].suffixes:
            raise SourceError(f'{name}: format = "{format}" only reads {asked[0].only}')
    _refuse_compressed(name, asked[0], compression)
    return asked[0].name, compression


def position_of(format: str, compression: str) -> str:
    """Return the meaning of a document's position in a file of this format.

    For compressed lines, the result is "stream": the position is the offset of the line in the
    decompressed data. Otherwise, the result is the format's `Format.position`.
    """
    position = FORMATS[format].position
    return "stream" if position == "byte" and compression else position


def count_pieces(
    path: str, format: str, compression: str, size: int, piece_bytes: int = PIECE_BYTES
) -> int:
    """Return the number of splits of a file.

    The splits of a line or text file follow from its size, see `Format.counts`. A Parquet file has
    one split per row group, and an Arrow file has one split per record batch. A pair of files has
    one split per `piece_bytes`, but at most one split per document. Only footers and headers are
    read.

    Args:
        path: Path or URL of the file.
        format: Name of the format.
        compression: "", "gzip" or "zstd".
        size: Size of the file, or of the pair of files, in bytes.
        piece_bytes: Bytes per split, for line files, token streams and pairs of files.
    """
    if FORMATS[format].position != "number":
        return int(FORMATS[format].counts(np.array([size]), compression, piece_bytes)[0])
    count_or_sizes = bytes_of_pieces(path, format, size, piece_bytes=piece_bytes)
    return count_or_sizes if isinstance(count_or_sizes, int) else len(count_or_sizes)


def bytes_of_pieces(
    path: str, format: str, size: int, text_key: str = "text", piece_bytes: int = PIECE_BYTES
) -> int | list[int]:
    """Return the approximate content bytes of each split as a list, or the number of splits.

    The function is for formats with numbered documents. It reads only the file's footer or headers.

    Returns:
        For Parquet with texts, the uncompressed bytes of the text and messages columns of each row
        group. For Parquet with token ids, TOKEN_TEXT_BYTES for each id of a row group. For Arrow,
        the bytes of each record batch. For a pair of files, the number of splits.
    """
    entry = FORMATS[format]
    return entry.module.pieces(path, size, text_key, entry.holds == "tokens", piece_bytes)


def bytes_per_token(work_range: Slice, text_key: str) -> float | None:
    """Return the content bytes per token in the data that a work range belongs to.

    The function is for formats with numbered documents of tokens. For Arrow, the data is the record
    batch. For a pair of files or a token stream, it is the file. For Parquet, the result is always
    TOKEN_TEXT_BYTES. Return None if a record batch contains no token ids.
    """
    return FORMATS[work_range.format].module.bytes_per_token(work_range, text_key)


def read(
    work_range: Slice,
    text_key: str,
    keep: Keep | None = None,
    batch_bytes: int = 4 << 20,
    decoders: Decoders | None = None,
    fields: Fields | None = None,
) -> Iterator[Batch]:
    """Yield the documents of a work range, in file order.

    The position of a document is the byte offset of its line or first id, its row number in the
    file, or its number in an index. It is 0 for a text file. For compressed lines, it is the offset
    in the decompressed stream. Memory use is about `batch_bytes` plus one document.

    Args:
        work_range: The work range to read.
        text_key: Key or column of the text. Text files ignore it. For a table of tokens it is the
            column of token id lists; "text" then means `input_ids`, or `tokens` without an
            `input_ids` column. For JSON Lines of token ids, it is a key with the same rules.
        keep: Selects the documents to decode. The other documents are skipped, but are not rejects.
            A `Choice` also receives the documents of the split that precede the work range. With
            group_by, the position of a document is the position of its first record.
        batch_bytes: Approximate content size of a batch in bytes.
        decoders: State that this process keeps between work ranges. It affects only the speed.
        fields: The other fields to read, such as loss_spans, messages and weight. With None, only
            texts or token ids are read. The key `text_key` never refers to one of these fields.

    Yields:
        Non-empty batches.

    Raises:
        SourceError: If the file is missing, unreadable, corrupt, truncated or not of the planned
            size, or if a column is missing.
    """
    module, own_decoders = FORMATS[work_range.format].module, decoders or Decoders()
    if work_range.grouping is None:
        return module.read(work_range, text_key, keep, batch_bytes, own_decoders, fields)
    position = position_of(work_range.format, work_range.compression)
    if FORMATS[work_range.format].holds != "texts" or position == "whole":
        raise SourceError(
            f"{work_range.path}: group_by joins records of JSON Lines, Parquet and Arrow files of"
            f" texts, but this is a file of format {work_range.format}\n"
            "hint: leave the file out of the source, or leave group_by out"
        )

    reader = FileReader(
        lambda one_range, n_bytes: module.read(
            one_range, text_key, None, n_bytes, own_decoders, fields
        ),
        position,
        lambda: module.rows_of_splits(work_range, own_decoders),
    )
    return read_groups(reader, work_range, keep, batch_bytes)
