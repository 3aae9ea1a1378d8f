"""A part of a file → batches of documents as columns.

```
Part ─► lines ───► json_lines ─┐
        text                   ├─► Batch (texts, files, positions, rejects, marks)
        parquet, arrow ─► columnar
                       └► token_lists ─┐
        megatron ──────────────────────┴► Batch (tokens, files, positions, rejects)
streams: compressed files, for lines and text
```
A document belongs to the part in which its first byte, row or step lies; neighbouring parts neither overlap nor leave
a gap. A document that cannot be used is a reject with a reason; a file that cannot be read is a SourceError.
"""

from collections.abc import Iterator

from packprep.corpus.conversations import MarkReader
from packprep.corpus.readers.choice import Choice
from packprep.corpus.readers.documents import (
    BAD_REASONS,
    MAX_DOCUMENT_BYTES,
    PIECE_BYTES,
    TOKEN_TEXT_BYTES,
    Batch,
    IdLists,
    Keep,
    Part,
    Reject,
)
from packprep.corpus.readers.lines import read_lines
from packprep.corpus.readers.streams import Decoders
from packprep.corpus.readers.text import read_text
from packprep.errors import SourceError

__all__ = [
    "BAD_REASONS",
    "MAX_DOCUMENT_BYTES",
    "PIECE_BYTES",
    "TABLES",
    "TOKEN_FORMATS",
    "TOKEN_TEXT_BYTES",
    "Batch",
    "Choice",
    "Decoders",
    "IdLists",
    "Keep",
    "Part",
    "Reject",
    "bytes_per_token",
    "count_pieces",
    "detect_format",
    "format_of",
    "bytes_of_pieces",
    "read",
]

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".bin": "megatron",
    ".idx": "megatron",
}
TOKEN_FORMATS = ("megatron", "parquet_tokens", "arrow_tokens")
"""Formats of files whose documents are tokens. The recipe's "tokens" is the last two."""
TABLES = ("parquet", "arrow", *TOKEN_FORMATS)
"""Formats whose positions are 0, 1, … through the file."""


def detect_format(name: str) -> tuple[str, str]:
    """(format, compression) by a file name's endings: jsonl | parquet | arrow | megatron | text, and "" | gzip | zstd.

    Raises SourceError for a compressed file of a format that is entered in the middle.
    """
    stem, compression = _split(name.lower(), _COMPRESSIONS, "")
    _, format = _split(stem, _FORMATS, "text")
    if compression and format in TABLES:
        raise SourceError(f"{name}: {format} files compressed as a whole cannot be read. Decompress the file.")
    return format, compression


def format_of(name: str, format: str) -> tuple[str, str]:
    """(format, compression) of a file in a source whose recipe says `format`; the format is one that `Part` names.

    Raises SourceError as `detect_format` does, and for a file that holds no tokens by its name where tokens are asked for.
    """
    found, compression = detect_format(name)
    if format == "tokens":
        if found not in ("parquet", "arrow"):
            raise SourceError(
                f'{name}: format = "tokens" reads Parquet files (.parquet, .pq), Arrow files (.arrow, .feather, .ipc) and '
                'folders of Hugging Face datasets. Write the tokens as one of these; for Megatron\'s files say "megatron"'
            )
        return f"{found}_tokens", ""
    if format == "megatron" and found != "megatron":
        raise SourceError(
            f'{name}: format = "megatron" reads pairs of a .bin and an .idx file. Name one of the two, or set format to '
            "what the file is"
        )
    return (found if format == "auto" else format), compression


def _split(name: str, endings: dict[str, str], default: str) -> tuple[str, str]:
    for ending, value in endings.items():
        if name.endswith(ending):
            return name.removesuffix(ending), value
    return name, default


def count_pieces(path: str, format: str, compression: str, size: int, piece_bytes: int = PIECE_BYTES) -> int:
    """The pieces of a file of `size` bytes: what can be entered by itself.

    An uncompressed line file has one per `piece_bytes`, a compressed one 1, each 0 if empty; Parquet its row groups,
    Arrow its record batches (headers only are read); a pair of Megatron's files one per `piece_bytes` and at most one a
    document; a text file 1.
    """
    if format == "jsonl":
        return min(size, 1) if compression else -(-size // piece_bytes)
    if format == "text":
        return 1
    # pyarrow takes 0.3 s to import, and most corpora are line files.
    if format == "megatron":
        from packprep.corpus.readers.megatron import count_runs

        return count_runs(path, size, piece_bytes)
    return len(bytes_of_pieces(path, format, size))


def bytes_of_pieces(path: str, format: str, size: int, text_key: str = "text") -> list[int]:
    """About how much each piece of a table holds, by its footer or headers: of a Parquet file the bytes of the column of
    texts before compression, or TOKEN_TEXT_BYTES for each id; of an Arrow file the bytes of the record batch."""
    if format in ("parquet", "parquet_tokens"):
        from packprep.corpus.readers.parquet import row_group_bytes

        return row_group_bytes(path, size, text_key, format == "parquet_tokens")
    if format in ("arrow", "arrow_tokens"):
        from packprep.corpus.readers.arrow import record_batch_bytes

        return record_batch_bytes(path, size)
    raise AssertionError(f"no reader for format {format!r}")


def bytes_per_token(part: Part, text_key: str) -> float | None:
    """The bytes that pieces hold for a token: of a part's file, or of its record batch. None where that cannot be told."""
    if part.format == "megatron":
        from packprep.corpus.readers.megatron import stored_per_token

        return stored_per_token(part.path, part.size)
    if part.format == "parquet_tokens":
        return float(TOKEN_TEXT_BYTES)
    if part.format == "arrow_tokens":
        from packprep.corpus.readers.arrow import stored_per_value

        return stored_per_value(part, text_key)
    raise AssertionError(f"format {part.format!r} holds no tokens")


def read(
    part: Part,
    text_key: str,
    keep: Keep | None = None,
    batch_bytes: int = 4 << 20,
    decoders: Decoders | None = None,
    marks: MarkReader | None = None,
) -> Iterator[Batch]:
    """The documents of a part, in file order, in batches of about `batch_bytes`; no batch is empty.

    text_key: the key or column that holds the text; text files have none. Of a table of tokens the column that holds
    the lists of ids; "text": input_ids, or else tokens
    keep: which documents to decode; the others leave no trace. A Choice sees those of the piece before the part, too
    decoders: what this process remembers between parts; it changes the speed only
    marks: reads a document's loss_spans or messages; the text of messages is what their template gives. None: these
    fields are not looked at, and so in a source of tokens. A field that is the text_key is the text and nothing else
    A position is the byte offset of a line (compressed: in the decompressed stream), a row number in the file, the number
    of a document in Megatron's index, or 0.

    Raises SourceError for a file that is missing, unreadable, corrupt, truncated or not of the planned size, and for
    a missing column. Memory: about `batch_bytes` and one document.
    """
    decoders = decoders or Decoders()
    if part.format == "jsonl":
        return read_lines(part, text_key, keep, batch_bytes, decoders, marks)
    if part.format == "text":
        return read_text(part, keep)
    if part.format == "megatron":
        from packprep.corpus.readers.megatron import read_run

        return read_run(part, keep, batch_bytes, decoders)
    if part.format in ("parquet", "parquet_tokens"):
        from packprep.corpus.readers.parquet import read_row_group

        return read_row_group(part, text_key, keep, batch_bytes, marks)
    if part.format in ("arrow", "arrow_tokens"):
        from packprep.corpus.readers.arrow import read_record_batch

        return read_record_batch(part, text_key, keep, batch_bytes, decoders, marks)
    raise AssertionError(f"no reader for format {part.format!r}")
