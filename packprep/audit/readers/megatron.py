"""Read Megatron's pairs of a .bin and an .idx file. The index stores the documents, and no rows."""

from collections.abc import Iterator
from pathlib import Path

from packprep.audit.rows import Choices, PackedData, PackedRows
from packprep.errors import SourceError
from packprep.sources.formats import megatron
from packprep.sources.formats.batch import MAX_DOCUMENT_TOKENS, TOKEN_TEXT_BYTES, Slice
from packprep.sources.formats.compressed import Decoders


def pairs_at(path: Path) -> list[Path]:
    """Return the .bin files of pairs: of a prefix, of one of both files, or in a folder."""
    if path.is_dir():
        files = [p.with_suffix(".bin") for p in sorted(path.iterdir()) if p.suffix == ".idx"]
    elif path.suffix in (".bin", ".idx"):
        files = [path.with_suffix(".bin")]
    else:
        files = [path.with_name(f"{path.name}.bin")]
    return [file for file in files if file.exists() and file.with_suffix(".idx").exists()]


def recognizes(path: Path) -> bool:
    """Return whether a path names pairs of .bin and .idx files."""
    return bool(pairs_at(path))


def open_pairs(path: Path, choices: Choices) -> PackedData:
    """Open pairs of .bin and .idx files.

    Raises:
        SourceError: If an index is damaged or does not match its .bin.
    """
    files = pairs_at(path)
    for file in files:
        megatron.pieces(str(file), _size(file), "", True)
    return PackedData(
        "Megatron's .bin and .idx files",
        lambda: _batches(files, choices),
        columns={"document_starts": "documents of the .idx"},
        has_rows=False,
    )


def _size(file: Path) -> int:
    return file.stat().st_size + file.with_suffix(".idx").stat().st_size


def _batches(files: list[Path], choices: Choices) -> Iterator[PackedRows]:
    decoders = Decoders()
    batch_bytes = choices.batch_tokens * TOKEN_TEXT_BYTES
    for file in files:
        path, size = str(file), _size(file)
        # One split per pair, whose documents come in batches.
        whole_file = Slice(path, 0, size, "megatron", "", 0, 0, 1, 1, 1, piece_bytes=max(size, 1))
        if not megatron.pieces(path, size, "", True, max(size, 1)):
            continue
        for batch in megatron.read(whole_file, "", None, batch_bytes, decoders, None):
            if batch.rejects:
                raise SourceError(
                    f"{path}: document {batch.rejects[0].position} has more than"
                    f" {MAX_DOCUMENT_TOKENS:,} tokens, which an audit does not read\n"
                    "hint: divide the document"
                )
            assert batch.tokens is not None
            offsets = batch.tokens.offsets
            yield PackedRows(batch.tokens.ids, offsets, document_starts=offsets[:-1])
