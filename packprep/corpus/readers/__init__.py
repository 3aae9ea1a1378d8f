"""A part of a file → batches of documents as columns.

```
Part ─► lines ───► json_lines ─┐
        text                   ├─► Batch (texts, files, positions, rejects, marks)
        parquet, arrow ─► columnar
streams: compressed files, for lines and text
```
A document belongs to the part in which its first byte, row or step lies; neighbouring parts neither overlap nor leave
a gap. A document that cannot be used is a reject with a reason; a file that cannot be read is a SourceError.
"""

from collections.abc import Iterator

from packprep.corpus.conversations import MarkReader
from packprep.corpus.readers.documents import (
    BAD_REASONS,
    MAX_DOCUMENT_BYTES,
    PIECE_BYTES,
    Batch,
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
    "Batch",
    "Decoders",
    "Keep",
    "Part",
    "Reject",
    "count_pieces",
    "detect_format",
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
}


def detect_format(name: str) -> tuple[str, str]:
    """(format, compression) by a file name's endings: jsonl | parquet | arrow | text, and "" | gzip | zstd.

    Raises SourceError for a compressed Parquet or Arrow file: it cannot be entered in the middle.
    """
    stem, compression = _split(name.lower(), _COMPRESSIONS, "")
    _, format = _split(stem, _FORMATS, "text")
    if compression and format in ("parquet", "arrow"):
        raise SourceError(f"{name}: {format} files compressed as a whole cannot be read. Decompress the file.")
    return format, compression


def _split(name: str, endings: dict[str, str], default: str) -> tuple[str, str]:
    for ending, value in endings.items():
        if name.endswith(ending):
            return name.removesuffix(ending), value
    return name, default


def count_pieces(path: str, format: str, compression: str, size: int, piece_bytes: int = PIECE_BYTES) -> int:
    """The pieces of a file of `size` bytes: what can be entered by itself.

    An uncompressed line file has one per `piece_bytes`, a compressed one 1, each 0 if empty; Parquet its row groups,
    Arrow its record batches (headers only are read); a text file 1.
    """
    if format == "jsonl":
        return min(size, 1) if compression else -(-size // piece_bytes)
    if format == "text":
        return 1
    # pyarrow takes 0.3 s to import, and most corpora are line files.
    if format == "parquet":
        from packprep.corpus.readers.parquet import count_row_groups

        return count_row_groups(path, size)
    if format == "arrow":
        from packprep.corpus.readers.arrow import count_record_batches

        return count_record_batches(path, size)
    raise AssertionError(f"no reader for format {format!r}")


def read(
    part: Part,
    text_key: str,
    keep: Keep | None = None,
    batch_bytes: int = 4 << 20,
    decoders: Decoders | None = None,
    marks: MarkReader | None = None,
) -> Iterator[Batch]:
    """The documents of a part, in file order, in batches of about `batch_bytes`; no batch is empty.

    text_key: the key or column that holds the text; text files have none
    keep(file, positions int64[n]) → bool[n]: which documents to decode; the others leave no trace
    decoders: what this process remembers between parts; it changes the speed only
    marks: reads a document's loss_spans or messages; the text of messages is what their template gives. None: these
    fields are not looked at. A field that is the text_key is the text and nothing else
    A position is the byte offset of a line (compressed: in the decompressed stream), a row number in the file, or 0.

    Raises SourceError for a file that is missing, unreadable, corrupt, truncated or not of the planned size, and for
    a missing column. Memory: about `batch_bytes` and one document.
    """
    decoders = decoders or Decoders()
    if part.format == "jsonl":
        return read_lines(part, text_key, keep, batch_bytes, decoders, marks)
    if part.format == "text":
        return read_text(part, keep)
    if part.format == "parquet":
        from packprep.corpus.readers.parquet import read_row_group

        return read_row_group(part, text_key, keep, batch_bytes, marks)
    if part.format == "arrow":
        from packprep.corpus.readers.arrow import read_record_batch

        return read_record_batch(part, text_key, keep, batch_bytes, decoders, marks)
    raise AssertionError(f"no reader for format {part.format!r}")
