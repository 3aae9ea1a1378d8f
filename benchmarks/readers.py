"""The readers, timed: MB/s of text on one core, each format next to a bare loop of the library
below it.

python benchmarks/readers.py                            Python's standard library, repeated to 64 MB of text
python benchmarks/readers.py --input data/a.jsonl       the documents of a line file of yours, its other fields included

Five rounds, each with every format once, so that what else the machine does hits all of them; the
figures are medians. Processor time is counted, not the clock: all of it is spent in one thread.
"""

import argparse
import gzip
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from packprep.recipe import parse_size
from packprep.sources.formats import Decoders, Slice, count_pieces, detect_format, read

_BLOCK_BYTES = 1 << 20
_Decoder = msgspec.json.Decoder(msgspec.defstruct("Record", [("text", str)], gc=False))


def main(arguments: list[str] | None = None) -> None:
    """Measures, and prints a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, help="a .jsonl file whose lines have a text")
    parser.add_argument(
        "--size", default="64MB", help="text of the standard library, if there is no --input"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        source = options.input or _library(Path(folder) / "library.jsonl", parse_size(options.size))
        result = measure(_files(Path(folder), source), options.rounds)
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{result['text_bytes']:,} bytes of text in {result['documents']:,} documents; MB/s of"
        " text, one core"
    )
    print(f"{'':16}{'reader':>8}{'bare loop':>12}{'ratio':>8}")
    for name, rates in result["formats"].items():
        print(
            f"{name:16}{rates['reader']:8.0f}{rates['bare']:12.0f}{rates['reader'] / rates['bare']:8.2f}"
        )


def measure(files: dict[str, Path], rounds: int) -> dict[str, object]:
    """The median rates of reader and bare loop for each format, in MB/s of text."""
    whole = list(_read(files["jsonl"]))
    text_bytes = sum(len("".join(texts).encode()) for texts in whole)
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"reader": [], "bare": []} for name in files
    }
    for _ in range(rounds):
        for name, path in files.items():
            seconds[name]["reader"].append(_seconds(_read, path))
            seconds[name]["bare"].append(_seconds(_BARE[name], path))
    rates = {
        name: {way: text_bytes / 1e6 / statistics.median(found) for way, found in ways.items()}
        for name, ways in seconds.items()
    }
    return {"text_bytes": text_bytes, "documents": sum(map(len, whole)), "formats": rates}


def _seconds(texts_of: Callable[[Path], Iterator[list[str]]], path: Path) -> float:
    begin = time.process_time()
    for _ in texts_of(path):
        pass
    return time.process_time() - begin


def _read(path: Path) -> Iterator[list[str]]:
    format, compression = detect_format(path.name)
    size = path.stat().st_size
    decoders = Decoders()
    for piece in range(count_pieces(str(path), format, compression, size)):
        part = Slice(str(path), 0, size, format, compression, piece, 0, 1, 1, step_bytes=1 << 20)
        for batch in read(part, "text", decoders=decoders):
            yield batch.texts


# Bare loops: what the library alone takes to give the same texts, with no positions, checks, bounds
# or rejects.


def _texts_of_lines(blocks: Iterator[bytes]) -> Iterator[list[str]]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield [_Decoder.decode(line).text for line in lines]


def _bare_lines(path: Path) -> Iterator[list[str]]:
    with path.open("rb") as file:
        yield from _texts_of_lines(iter(lambda: file.read(_BLOCK_BYTES), b""))


def _bare_gzip(path: Path) -> Iterator[list[str]]:
    with gzip.open(path) as file:
        yield from _texts_of_lines(iter(lambda: file.read(_BLOCK_BYTES), b""))


def _bare_zstd(path: Path) -> Iterator[list[str]]:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
        yield from _texts_of_lines(iter(lambda: reader.read(_BLOCK_BYTES), b""))


def _bare_parquet(path: Path) -> Iterator[list[str]]:
    for batch in pq.ParquetFile(path).iter_batches(1024, columns=["text"], use_threads=False):
        yield batch.column(0).to_pylist()


def _bare_arrow(path: Path) -> Iterator[list[str]]:
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i).column("text").to_pylist()


_BARE: dict[str, Callable[[Path], Iterator[list[str]]]] = {
    "jsonl": _bare_lines,
    "jsonl.zst": _bare_zstd,
    "jsonl.gz": _bare_gzip,
    "parquet": _bare_parquet,
    "arrow": _bare_arrow,
}


def _library(path: Path, text_bytes: int) -> Path:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    written = 0
    with path.open("w", encoding="utf-8") as out:
        while written < text_bytes:
            for name, text in zip(files, texts, strict=True):
                out.write(json.dumps({"id": name.name, "text": text}, ensure_ascii=False) + "\n")
                written += len(text.encode())
                if written >= text_bytes:
                    break
    return path


def _files(folder: Path, source: Path) -> dict[str, Path]:
    """The documents of a line file in every format."""
    data = source.read_bytes()
    files = {name: folder / f"corpus.{name}" for name in _BARE}
    files["jsonl"].write_bytes(data)
    files["jsonl.zst"].write_bytes(zstandard.ZstdCompressor(level=3).compress(data))
    files["jsonl.gz"].write_bytes(gzip.compress(data, 6))
    table = pa.table({"text": [text for texts in _bare_lines(files["jsonl"]) for text in texts]})
    pq.write_table(table, files["parquet"], row_group_size=8192, compression="zstd")
    with (
        pa.OSFile(os.fspath(files["arrow"]), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=1000)
    return files


if __name__ == "__main__":
    main()
