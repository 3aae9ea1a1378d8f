"""Random rows of seq_length int32 tokens from disk, in the page cache.

A batch is BATCH random rows as one new int64 array [BATCH, seq_length]; a store gives it by its own
batch call where it has one. Also measured: one random row, copied into a reused buffer, and opening
plus the first batch in a new process.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from peers.contender import Config, Contender, Work, main

BATCH, ROWS = 16, 20_000
Batch = Callable[[Any], Any]


def made(config: Config, name: str, make: Callable[[str], None]) -> str:
    """The store's folder, made once for an input."""
    path = os.path.join(config["work"], f"{os.path.basename(config['rows'])}-{name}")
    if not os.path.exists(path):
        os.makedirs(path + ".part", exist_ok=True)
        make(path + ".part")
        os.rename(path + ".part", path)
    return path


def loaded(
    config: Config,
    open_store: Callable[[], tuple[Callable[[int], Any], Batch, int]],
    own: bool = False,
) -> Work:
    """Open a store (row, batch, rows) and read it at random; slow stores read fewer rows. own: it
    has rows of its own."""
    import numpy as np

    began = time.perf_counter()
    row, batch, count = open_store()
    chance = np.random.default_rng(0)
    got = batch(chance.integers(count, size=BATCH).tolist())
    first = time.perf_counter() - began
    assert np.asarray(got).shape == (BATCH, config["seq_length"]), np.asarray(got).shape
    if not own:
        expected = np.load(config["rows"], mmap_mode="r")
        indices = chance.integers(len(expected), size=BATCH).tolist()
        assert count == len(expected) and np.array_equal(batch(indices), expected[indices]), (
            "it read other rows"
        )
    order, buffer, deadline = (
        chance.integers(count, size=ROWS).tolist(),
        np.empty(config["seq_length"], np.int32),
        4.0,
    )
    # the page cache, the process's own map of its pages, and whatever the store caches
    for i in range(count):
        buffer[:] = row(i)
    rows, begin = 0, time.perf_counter()
    while rows < ROWS and time.perf_counter() - begin < deadline:
        for i in order[rows : rows + 250]:
            buffer[:] = row(i)
        rows += 250
    row_us = (time.perf_counter() - begin) / rows * 1e6
    rows, begin = 0, time.perf_counter()
    while rows < ROWS and time.perf_counter() - begin < deadline:
        batch(chance.integers(count, size=BATCH).tolist())
        rows += BATCH
    seconds = time.perf_counter() - begin
    return Work(
        tokens=rows * config["seq_length"], rows=rows, seconds=seconds,
        extra={"one row µs": row_us, "open, first batch ms": first * 1e3},
    )  # fmt: skip


def stacked(row: Callable[[int], Any]) -> Batch:
    """A batch call for stores without one."""
    import numpy as np

    return lambda indices: np.stack([row(i) for i in indices]).astype(np.int64)


def packprep(columns: tuple[str, ...] | None) -> Any:
    """open_dataset; a causal dataset of the same text, whose rows have segment ids and loss masks
    too."""

    def run(config: Config) -> Work:
        import numpy as np

        from packprep import open_dataset
        from peers.builds import packprep_command

        def make(folder: str) -> None:
            command = packprep_command("causal")({**config, "out": folder})
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        folder = os.path.join(made(config, "packprep", make), "dataset")

        def open_store() -> Any:
            dataset = open_dataset(folder)
            return (
                lambda i: dataset.row(i).tokens,
                lambda indices: dataset.batch(indices, columns=columns, dtype=np.int64)["tokens"],
                len(dataset),
            )

        return loaded(config, open_store, own=True)

    return run


def numpy_memmap(config: Config) -> Work:
    """np.load(mmap_mode="r") of one array."""
    import numpy as np

    def open_store() -> Any:
        rows = np.load(config["rows"], mmap_mode="r")
        return rows.__getitem__, lambda indices: rows[indices].astype(np.int64), len(rows)

    return loaded(config, open_store)


def hugging_face(format: str | None) -> Any:
    """load_from_disk, rows as lists of one column. format: None gives rows as lists of Python's
    integers."""

    def run(config: Config) -> Work:
        import datasets
        import numpy as np

        def make(folder: str) -> None:
            import pyarrow as pa

            rows = np.load(config["rows"])
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
            datasets.Dataset(pa.table({"tokens": column})).save_to_disk(folder)

        datasets.disable_progress_bars()
        folder = made(config, "datasets", make)

        def open_store() -> Any:
            rows = datasets.load_from_disk(folder).with_format(format)
            return (
                lambda i: rows[i]["tokens"],
                lambda indices: np.asarray(rows[indices]["tokens"]).astype(np.int64),
                len(rows),
            )

        return loaded(config, open_store)

    return run


def mds(config: Config) -> Work:
    """A local StreamingDataset, not shuffled, by index."""
    from peers.builds import stand_in_for_torchvision

    stand_in_for_torchvision()
    import numpy as np
    from streaming import MDSWriter, StreamingDataset

    width = config["seq_length"]

    def make(folder: str) -> None:
        with MDSWriter(out=folder, columns={"tokens": f"ndarray:int32:{width}"}) as writer:
            for row in np.load(config["rows"]):
                writer.write({"tokens": row})

    folder = made(config, "mds", make)

    def open_store() -> Any:
        rows = StreamingDataset(local=folder, batch_size=BATCH)
        return lambda i: rows[i]["tokens"], stacked(lambda i: rows[i]["tokens"]), len(rows)

    return loaded(config, open_store)


def litdata(config: Config) -> Work:
    """StreamingDataset with a TokensLoader, by index."""
    import litdata as ld
    import numpy as np
    import torch
    from litdata.streaming import Cache
    from litdata.streaming.item_loader import TokensLoader

    width = config["seq_length"]

    def make(folder: str) -> None:
        cache = Cache(folder, chunk_bytes="64MB", item_loader=TokensLoader())
        for i, row in enumerate(np.load(config["rows"])):
            cache[i] = torch.from_numpy(row)
        cache.done()
        cache.merge()

    folder = made(config, "litdata", make)

    def open_store() -> Any:
        rows = ld.StreamingDataset(folder, item_loader=TokensLoader(block_size=width))
        return rows.__getitem__, stacked(lambda i: rows[i].numpy()), len(rows)

    return loaded(config, open_store)


def megatron(config: Config) -> Work:
    """IndexedDataset, a document a row, by index."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    def make(folder: str) -> None:
        builder = IndexedDatasetBuilder(os.path.join(folder, "rows.bin"), dtype=np.int32)
        for row in np.load(config["rows"]):
            builder.add_document(row, [len(row)])
        builder.finalize(os.path.join(folder, "rows.idx"))

    folder = made(config, "megatron", make)

    def open_store() -> Any:
        rows = IndexedDataset(os.path.join(folder, "rows"))
        return rows.__getitem__, stacked(rows.__getitem__), len(rows)

    return loaded(config, open_store)


def megatron_gpt(config: Config) -> Work:
    """GPTDataset over an IndexedDataset, a text a document: each row is cut from the documents that
    it crosses."""
    import numpy as np
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split

    def make(folder: str) -> None:
        tokens, bounds = np.load(config["tokens"]), np.load(config["offsets"])
        builder = IndexedDatasetBuilder(os.path.join(folder, "texts.bin"), dtype=np.int32)
        for begin, end in itertools.pairwise(bounds.tolist()):
            builder.add_document(np.append(tokens[begin:end], config["eos_id"]), [end - begin + 1])
        builder.finalize(os.path.join(folder, "texts.idx"))

    folder = made(config, "megatron-gpt", make)

    class Tokenizer:
        eod = pad = config["eos_id"]
        vocab_size = config["vocab_size"]
        unique_identifiers: ClassVar[dict[str, str]] = {"class": "ids"}

    settings = GPTDatasetConfig(
        random_seed=0,
        sequence_length=config["seq_length"],
        split="1,0,0",
        tokenizer=Tokenizer(),
        path_to_cache=os.path.join(folder, "cache"),
        reset_position_ids=True,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
    )

    def open_store() -> Any:
        texts = IndexedDataset(os.path.join(folder, "texts"))
        rows = GPTDataset(
            texts, folder, np.arange(len(texts), dtype=np.int32), None, Split.train, settings
        )
        return lambda i: rows[i]["tokens"], stacked(lambda i: rows[i]["tokens"].numpy()), len(rows)

    return loaded(config, open_store, own=True)


def array_record_file(config: Config) -> str:
    """The rows' bytes as records, a record a group."""

    def make(folder: str) -> None:
        import numpy as np
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(os.path.join(folder, "rows.array_record"), "group_size:1")
        for row in np.load(config["rows"]):
            writer.write(row.tobytes())
        writer.close()

    return os.path.join(made(config, "array_record", make), "rows.array_record")


def array_record(config: Config) -> Work:
    """ArrayRecordReader, records by index, a batch in one call."""
    import numpy as np
    from array_record.python.array_record_module import ArrayRecordReader

    path = array_record_file(config)

    def open_store() -> Any:
        reader = ArrayRecordReader(path)

        def batch(indices: Any) -> Any:
            return np.stack(
                [np.frombuffer(record, np.int32) for record in reader.read(indices)]
            ).astype(np.int64)

        return lambda i: np.frombuffer(reader.read([i])[0], np.int32), batch, reader.num_records()

    return loaded(config, open_store)


def grain(config: Config) -> Work:
    """A MapDataset over an ArrayRecordDataSource, by index."""
    import grain as library
    import numpy as np

    path = array_record_file(config)

    def open_store() -> Any:
        source = library.sources.ArrayRecordDataSource(path)
        rows = library.MapDataset.source(source).map(lambda record: np.frombuffer(record, np.int32))
        return rows.__getitem__, stacked(rows.__getitem__), len(rows)

    return loaded(config, open_store)


OWN = (("packprep",), ("packprep",))
CONTENDERS = [
    Contender("packprep, tokens", "open_dataset, batch of tokens", *OWN, packprep(("tokens",))),
    Contender("packprep, all columns", "labels, masks, positions too", *OWN, packprep(None)),
    Contender("numpy memmap", "one array", ("numpy",), ("numpy",), numpy_memmap),
    Contender(
        "Megatron IndexedDataset",
        "a document a row",
        ("megatron-core",),
        ("megatron.core",),
        megatron,
    ),
    Contender(
        "Megatron GPTDataset",
        "a text a document; labels, masks, positions too",
        ("megatron-core",),
        ("megatron.core",),
        megatron_gpt,
    ),
    Contender("MDS", "StreamingDataset, local", ("mosaicml-streaming",), ("streaming",), mds),
    Contender("LitData", "StreamingDataset, TokensLoader", ("litdata",), ("litdata",), litdata),
    Contender(
        "ArrayRecord", "ArrayRecordReader", ("array-record",), ("array_record",), array_record
    ),
    Contender(
        "Grain",
        "MapDataset over ArrayRecord",
        ("grain", "array-record"),
        ("grain", "array_record"),
        grain,
    ),
    Contender(
        "Hugging Face datasets, numpy",
        "load_from_disk, with_format",
        ("datasets",),
        ("datasets",),
        hugging_face("numpy"),
    ),
    Contender(
        "Hugging Face datasets, lists",
        "load_from_disk, as it is",
        ("datasets",),
        ("datasets",),
        hugging_face(None),
    ),
]

if __name__ == "__main__":
    main(CONTENDERS, sys.argv[1:])
