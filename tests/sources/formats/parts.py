"""Parts of files, for the tests of readers."""

import gzip
from pathlib import Path

import zstandard

from packprep.sources.formats import PIECE_BYTES, Slice, count_pieces, detect_format, read

COMPRESS = {"": bytes, "gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}


def write(folder, name, data):
    path = Path(folder) / name
    path.write_bytes(data)
    return path


def part_of(
    path, piece=0, lo=0, hi=1, weight=1, step_bytes=16 << 10, piece_bytes=PIECE_BYTES, file=7
):
    format, compression = detect_format(path.name)
    size = path.stat().st_size
    return Slice(
        str(path), file, size, format, compression, piece, lo, hi, weight, step_bytes, piece_bytes
    )


def pieces_of(path, piece_bytes=PIECE_BYTES):
    return count_pieces(str(path), *detect_format(path.name), path.stat().st_size, piece_bytes)


def read_all(part, text_key="text", **options):
    """([(position, text)], [(position, reason)]) of a part."""
    documents, rejects = [], []
    for batch in read(part, text_key, **options):
        assert batch.texts or batch.rejects
        assert batch.files.tolist() == [part.file] * len(batch.texts)
        assert len(batch.positions) == len(batch.texts)
        assert all(
            len(reject.detail) <= 200 and reject.detail.isascii() for reject in batch.rejects
        )
        documents += zip(batch.positions.tolist(), batch.texts, strict=True)
        rejects += [(reject.position, reject.reason) for reject in batch.rejects]
    return documents, rejects


def read_cut(path, cuts, order=None, piece_bytes=PIECE_BYTES, **options):
    """As `read_all`, of all pieces of a file, each cut at `cuts` = 0 … weight and read in
    `order`."""
    step_bytes = options.pop("step_bytes", 16 << 10)
    parts = [
        part_of(path, piece, lo, hi, cuts[-1], step_bytes, piece_bytes)
        for piece in range(pieces_of(path, piece_bytes))
        for lo, hi in zip(cuts[:-1], cuts[1:], strict=True)
    ]
    results = {}
    for i in order(len(parts)) if order else range(len(parts)):
        results[i] = read_all(parts[i], **options)
    documents = [document for i in range(len(parts)) for document in results[i][0]]
    rejects = [reject for i in range(len(parts)) for reject in results[i][1]]
    return documents, rejects
