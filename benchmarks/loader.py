"""How fast a trainer is served: opening, rows, batches and items of a synthetic dataset, in the
page cache.

python benchmarks/loader.py
python benchmarks/loader.py --seq-length 2048 --dtype int32

Every figure is CPU time, the median of rounds in one process; what packprep is compared with (bare
ndarrays over the same maps, and np.memmap) is measured in the same rounds, so that ratios hold on a
noisy machine. `make_dataset`, `measured` and `reading_rows` may be imported to measure other
formats in the same way.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packprep import open_dataset
from packprep.dataset import manifest, shard
from packprep.dataset.loader import COLUMNS, Dataset
from packprep.format import json_files

ROWS = 8000  # of each dataset: more than a processor's cache holds
PAD, VOCAB_SIZE, SEGMENT_TOKENS = 0, 50_000, 400  # mean tokens of a segment


def make_rows(
    chance: np.random.Generator, rows: int, seq_length: int, token_dtype: str
) -> dict[str, np.ndarray]:
    """The arrays of a shard of causal segments, exponential in length, whose last slots are
    padding."""
    lengths, counts = [], []
    for _ in range(rows):
        row = []
        while (room := seq_length - 8 - sum(row)) > 0:
            row.append(min(room, 1 + int(chance.exponential(SEGMENT_TOKENS))))
        lengths.append(np.array(row, np.int64))
        counts.append(len(row))
    slots, segments = np.concatenate(lengths), sum(counts)
    tokens = chance.integers(1, VOCAB_SIZE, (rows, seq_length)).astype(token_dtype)
    ids, mask = np.zeros((rows, seq_length), np.uint16), np.zeros((rows, seq_length), np.uint8)
    for r, own in enumerate(lengths):
        used, ends = int(own.sum()), np.cumsum(own)
        tokens[r, used:], ids[r, :used], mask[r, :used] = (
            PAD,
            np.repeat(np.arange(1, len(own) + 1), own),
            1,
        )
        mask[r, ends - 1] = 0
    values = {
        "tokens": tokens,
        "segment_ids": ids,
        "loss_mask": mask,
        "row_offsets": np.append(0, np.cumsum(counts)),
        "cu_seqlens": np.concatenate([np.append(0, np.cumsum(own)) for own in lengths]),
        "segment_key": chance.integers(0, 1 << 63, segments),
        "segment_tokens": slots,
        "segment_loss_weight": np.ones(segments),
    }
    layout = shard.layout(rows, segments, seq_length, token_dtype)
    return {
        name: np.array(values.get(name, np.zeros(shape)), dtype)
        for name, (dtype, shape) in layout.items()
    }


def write_manifest(
    directory: Path, entries: Sequence[dict], seq_length: int, token_dtype: str, compact: bool
) -> None:
    """The manifest of shards with these entries."""
    nothing = "0" * 32
    task = {
        "name": "causal",
        "objective": "causal",
        "weight": 1.0,
        "attention": "causal",
        "label_alignment": "next_token",
        "mode_token": None,
        "parameters": {},
    }
    value = {
        "format": json_files.FORMAT,
        "version": json_files.VERSION,
        "law_version": json_files.LAW_VERSION,
        "seq_length": seq_length,
        "token_dtype": token_dtype,
        "vocab_size": VOCAB_SIZE,
        "pad_id": PAD,
        "specials": {"pad": PAD},
        "added_tokens": [],
        "tokenizer": {"file": json_files.TOKENIZER_NAME, "digest": nothing},
        "plan": {"file": json_files.PLAN_NAME, "digest": nothing},
        "tasks": [task],
        "sources": [{"name": "synthetic"}],
        "recipe": {"output": {"columns": "compact" if compact else "full"}},
        "fingerprint": nothing,
        "engine": "none",
        "made_with": "benchmarks/loader.py",
        "shards": entries,
        "ledger": {},
        "digest": nothing,
    }
    (directory / json_files.MANIFEST_NAME).write_bytes(json_files.encode(value))


def make_dataset(
    directory: Path,
    shards: int,
    rows: int,
    seq_length: int,
    token_dtype: str,
    compact: bool = False,
) -> None:
    """Write a dataset of `shards` shards of `rows` rows each, in the format's own encoding."""
    chance, entries, nothing = np.random.default_rng(0), [], "0" * 32
    for b in range(shards):
        arrays = make_rows(chance, rows, seq_length, token_dtype)
        path = directory / json_files.shard_name(b)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffers = shard.encode(shard.compacted(arrays) if compact else arrays)
        with open(path, "wb") as file:
            file.writelines(buffers)
        entries.append(
            {
                "file": json_files.shard_name(b),
                "rows": rows,
                "segments": len(arrays["segment_key"]),
                "tokens": int(arrays["segment_tokens"].sum()),
                "bytes": path.stat().st_size,
                "digest": nothing,
                "receipt_digest": nothing,
            }
        )
    write_manifest(directory, entries, seq_length, token_dtype, compact)


def measured(
    ways: Mapping[str, Callable[[], object]], calls: int, rounds: int = 15
) -> dict[str, float]:
    """CPU seconds a call of each way: the median over rounds, each of which runs all ways in turn,
    `calls` calls each."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.thread_time()
            for _ in range(calls):
                way()
            times[name].append((time.thread_time() - begin) / calls)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def reading_rows(rows: Any, order: Sequence[Any], buffer: np.ndarray) -> Callable[[], None]:
    """A way that copies rows[i], for each i of `order`, into a reused buffer."""

    def read() -> None:
        for i in order:
            buffer[:] = rows[i]

    return read


def reading_views(dataset: Dataset, order: Sequence[int], buffer: np.ndarray) -> Callable[[], None]:
    """The same of the rows' views."""

    def read() -> None:
        for i in order:
            buffer[:] = dataset.row(i).tokens

    return read


def reading_places(
    shards: Sequence[Any], order: Sequence[tuple[int, int]], buffer: np.ndarray
) -> Callable[[], None]:
    """The same of shards[number][place], for each (number, place) of `order`."""

    def read() -> None:
        for number, place in order:
            buffer[:] = shards[number][place]

    return read


FIRST_BATCH = """
import sys, time, numpy, packprep
from packprep import open_dataset
begin = time.thread_time()
dataset = open_dataset(sys.argv[1])
opened = time.thread_time()
next(dataset.batches(8))
print(opened - begin, time.thread_time() - begin)
"""


def first_batch(directory: Path, rounds: int = 9) -> tuple[float, float]:
    """(seconds to open, seconds until the first shuffled batch of 8), in a fresh process each,
    after import."""
    lines = [
        subprocess.run(
            [sys.executable, "-c", FIRST_BATCH, directory],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(rounds)
    ]
    opened, all_of_it = zip(*(map(float, line.split()) for line in lines), strict=True)
    return statistics.median(opened), statistics.median(all_of_it)


FAR_BATCH = """
import sys, time, numpy, packprep
from packprep import open_dataset
begin = time.thread_time()
dataset = open_dataset(sys.argv[1])
opened = time.thread_time()
dataset.batch = lambda rows, **given: rows
batches = dataset.batches(8, world_size=16)
batches.load_state_dict({**batches.state_dict(), "rows": 999_999 * 8 * 16})
next(batches)
drawn = time.thread_time()
[peak] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(opened - begin, drawn - begin, int(peak.split()[1]) * 1024)
"""


def far_batch(directory: Path, rounds: int = 9) -> tuple[float, float, float]:
    """(seconds to open, seconds until the rows of the millionth batch are known, bytes of the
    process at most), of 50 000 shards and 4 · 10⁹ rows that a manifest claims, in a fresh process
    each, after import."""
    directory.mkdir()
    sizes = {"rows": 80_000, "segments": 900_000, "tokens": 327_000_000, "bytes": 10**9}
    entries = [
        {
            "file": json_files.shard_name(b),
            **sizes,
            "digest": f"{b:032x}",
            "receipt_digest": f"{b:032x}",
        }
        for b in range(50_000)
    ]
    write_manifest(directory, entries, 4096, "uint16", False)
    lines = [
        subprocess.run(
            [sys.executable, "-c", FAR_BATCH, directory], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(rounds)
    ]
    opened, all_of_it, peak = zip(*(map(float, line.split()) for line in lines), strict=True)
    return statistics.median(opened), statistics.median(all_of_it), max(peak)


def bare_rows(directory: Path, shards: int) -> list[np.ndarray]:
    """The tokens of each shard as a plain ndarray over a map of its file: as few steps to a row as
    numpy has."""
    value = manifest.read_manifest(directory)
    opened = (
        shard.open_shard(directory / entry["file"], value["seq_length"], value["token_dtype"])
        for entry in value["shards"][:shards]
    )
    return [one.tokens for one in opened]


def as_memmap(directory: Path, seq_length: int, token_dtype: str) -> np.memmap:
    """The tokens of shard 0 as numpy's own class of maps."""
    path = directory / json_files.shard_name(0)
    one = shard.open_shard(path, seq_length, token_dtype)
    return np.memmap(path, token_dtype, "r", one.data_begin, one.tokens.shape)


def measure_rows(
    directory: Path, seq_length: int, token_dtype: str, n_rows: int = 4000
) -> dict[str, float]:
    """Seconds a random row, copied into a reused buffer."""
    dataset, buffer = open_dataset(directory), np.empty(seq_length, token_dtype)
    bare = bare_rows(directory, len(dataset.manifest["shards"]))
    first = np.cumsum([0, *map(len, bare)])
    rows = np.random.default_rng(1).integers(0, first[-1], n_rows)
    numbers = np.searchsorted(first, rows, "right") - 1
    places = list(zip(numbers.tolist(), (rows - first[numbers]).tolist(), strict=True))
    if len(bare) == 1:
        ways = {
            "bare ndarray": reading_rows(bare[0], rows.tolist(), buffer),
            "np.memmap": reading_rows(
                as_memmap(directory, seq_length, token_dtype), rows.tolist(), buffer
            ),
        }
    else:
        ways = {"bare ndarrays": reading_places(bare, places, buffer)}
    ways["ds.row(i).tokens"] = reading_views(dataset, rows.tolist(), buffer)
    return {name: seconds / n_rows for name, seconds in measured(ways, 1).items()}


def measure_gathers(directory: Path, batch_size: int = 256) -> dict[str, float]:
    """Seconds a row of random batches of tokens as int64."""
    dataset = open_dataset(directory).with_columns(["tokens"], dtype=np.int64)
    bare = bare_rows(directory, 1)[0]
    rows = np.random.default_rng(2).integers(0, len(bare), batch_size).tolist()
    out = np.empty((batch_size, dataset.seq_length), np.int64)

    def plain() -> None:
        for target, i in zip(out, rows, strict=True):
            target[...] = bare[i]

    ways = {
        "bare ndarray, row by row": plain,
        "ds.batch(rows, out=…)": lambda: dataset.batch(rows, out={"tokens": out}),
        "ds.__getitems__(rows)": lambda: dataset.__getitems__(rows),
    }
    return {name: seconds / batch_size for name, seconds in measured(ways, 20).items()}


def measure_batches(full: Path, compact: Path, batch_size: int = 8) -> dict[str, float]:
    """Seconds a random batch; of all columns and of those that cost less."""
    ways: dict[str, Callable[[], object]] = {}
    for name, directory in (("full", full), ("compact", compact)):
        dataset = open_dataset(directory)
        rows = np.random.default_rng(3).integers(0, len(dataset), batch_size).tolist()
        tokens, stored = (
            dataset.with_columns(["tokens"]),
            dataset.with_columns(["tokens", "segment_ids", "loss_mask"]),
        )
        states, ahead = (
            dataset.with_columns(names)
            for names in (("tokens", "seq_idx"), (*COLUMNS, "labels_2", "loss_mask_2"))
        )
        ways |= {
            f"{name}: tokens": lambda tokens=tokens, rows=rows: tokens.batch(rows),
            f"{name}: tokens, segment_ids, loss_mask": lambda stored=stored, rows=rows: (
                stored.batch(rows)
            ),
            f"{name}: all five columns": lambda dataset=dataset, rows=rows: dataset.batch(rows),
            f"{name}: tokens, seq_idx": lambda states=states, rows=rows: states.batch(rows),
            f"{name}: all five, labels_2, loss_mask_2": lambda ahead=ahead, rows=rows: ahead.batch(
                rows
            ),
        }
    return measured(ways, 20)


def measure_ways(full: Path, batch_size: int = 8) -> dict[str, float]:
    """Seconds a random batch of tokens and loss_mask: mapped, read, and of a mixture."""
    columns = ["tokens", "loss_mask"]
    mixed = open_dataset([full, full], shares=[0.5, 0.5], max_open=10_000)
    mapped, read = (open_dataset(full, io=io) for io in ("mmap", "pread"))
    iterators = {
        "mmap": mapped.batches(batch_size, columns=columns),
        "pread": read.batches(batch_size, columns=columns),
        "mmap, half and half of two datasets": mixed.batches(batch_size, columns=columns),
        "mmap, with n_trained": mapped.batches(batch_size, columns=[*columns, "n_trained"]),
    }
    return measured({name: lambda it=it: next(it) for name, it in iterators.items()}, 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--dtype", choices=("uint16", "int32"), default="uint16")
    parser.add_argument("--shards", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = (given.seq_length, given.dtype)
        one, full, compact = (Path(folder) / name for name in ("one", "full", "compact"))
        make_dataset(one, 1, ROWS, *shape)
        make_dataset(full, given.shards, ROWS // given.shards, *shape)
        make_dataset(compact, given.shards, ROWS // given.shards, *shape, compact=True)
        print(
            f"{ROWS} rows of {given.seq_length} {given.dtype}, in the page cache, in {given.shards}"
            " shards"
        )
        opened, first = first_batch(full)
        print(f"  {'open_dataset':42}{opened * 1e3:10.2f} ms")
        print(f"  {'open_dataset and first batch of 8':42}{first * 1e3:10.2f} ms")
        for directory, shards in ((one, 1), (full, given.shards)):
            print(f"random rows into a reused buffer, {shards} shard{'s' if shards > 1 else ''}")
            times = measure_rows(directory, *shape)
            for name, seconds in times.items():
                over = seconds / next(iter(times.values()))
                print(f"  {name:42}{seconds * 1e6:10.2f} µs a row {over:6.2f} of bare")
        print("batches of 256 random rows of tokens, as int64, 1 shard")
        for name, seconds in measure_gathers(one).items():
            print(f"  {name:42}{1 / seconds:10,.0f} rows/s")
        print(f"batches of 8 random rows, {given.shards} shards")
        for name, seconds in measure_batches(full, compact).items():
            print(f"  {name:42}{seconds * 1e6:10.1f} µs")
        print(f"next(batches) of 8 rows, tokens and loss_mask, {given.shards} shards")
        for name, seconds in measure_ways(full).items():
            print(f"  {name:42}{seconds * 1e6:10.1f} µs")
        opened, drawn, peak = far_batch(Path(folder) / "far")
        print("50 000 shards, 4 · 10⁹ rows, of which no file is there")
        print(f"  {'open_dataset':42}{opened * 1e3:10.1f} ms")
        print(f"  {'and the rows of the millionth batch':42}{drawn * 1e3:10.1f} ms")
        print(f"  {'memory of the process':42}{peak / 2**20:10.1f} MiB")


if __name__ == "__main__":
    main()
