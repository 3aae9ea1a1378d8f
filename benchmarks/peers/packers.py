"""Documents of given lengths into rows: packprep's packers beside those of trainers.

Lengths are those of the corpus's documents. A line says whether lengths alone are packed or tokens
are moved too; where its tokens are fewer than the input's, the packer cut some away.
"""

import sys
import time
from typing import Any

from peers.contender import Config, Contender, Work, main, second_of_two


def lengths_of(config: Config, split: bool = True, at_least: int = 0) -> Any:
    """Tokens of documents, int64; split: as segments of at most seq_length; repeated until there
    are `at_least`."""
    import numpy as np

    lengths = np.diff(np.load(config["offsets"]))
    lengths = lengths[lengths > 0]
    if split:
        width = config["seq_length"]
        whole, rest = lengths // width, lengths % width
        pieces = whole + (rest > 0)
        ends = np.cumsum(pieces)
        lengths = np.full(int(pieces.sum()), width, np.int64)
        lengths[ends[rest > 0] - 1] = rest[rest > 0]
    if len(lengths) < at_least:
        lengths = np.random.default_rng(0).choice(lengths, at_least)
    return lengths


def packed(config: Config, lengths: Any, rows: int, seconds: float) -> Work:
    """The work of a packer of lengths that leaves nothing out."""
    tokens = int(lengths.sum())
    return Work(len(lengths), tokens, rows, tokens / (rows * config["seq_length"]), seconds=seconds)


MANY = 2_000_000


def packprep(algorithm: str) -> Any:
    """building.packing.pack of MANY segments."""

    def run(config: Config) -> Work:
        from packprep.building.packing import pack

        lengths = lengths_of(config, at_least=MANY)
        seconds, (row, _) = second_of_two(lambda: pack(lengths, config["seq_length"], algorithm))
        return packed(config, lengths, int(row.max()) + 1, seconds)

    return run


def trl(strategy: str) -> Any:
    """pack_dataset of the documents' tokens, in memory, with the defaults of map."""

    def run(config: Config) -> Work:
        import datasets
        import numpy as np
        import pyarrow as pa
        from trl import pack_dataset

        datasets.disable_progress_bars()
        offsets, tokens = np.load(config["offsets"]), np.load(config["tokens"])
        documents = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(tokens))
        dataset = datasets.Dataset(pa.table({"input_ids": documents}))
        begin = time.perf_counter()
        made = pack_dataset(dataset, config["seq_length"], strategy)
        seconds = time.perf_counter() - begin
        kept = sum(len(chunk.flatten()) for chunk in made.data.column("input_ids").chunks)
        return Work(
            len(dataset),
            kept,
            len(made),
            kept / (len(made) * config["seq_length"]),
            seconds=seconds,
        )

    return run


def axolotl(config: Config) -> Work:
    """pack_parallel of its multipack sampler, with the group and bin sizes of its defaults."""
    from axolotl.utils.samplers.multipack import pack_parallel

    lengths = lengths_of(config)

    def run() -> Any:
        return pack_parallel(
            lengths, config["seq_length"], 100_000, 200, num_processes=config["workers"]
        )

    seconds, bins = second_of_two(run)
    return packed(config, lengths, len(bins), seconds)


def grain_first_fit(config: Config) -> Work:
    """FirstFitPackIterDataset over the segments' tokens, 32 rows open."""
    import grain
    import numpy as np

    lengths, tokens = lengths_of(config), np.load(config["tokens"])
    ends = np.cumsum(lengths)
    width = config["seq_length"]
    segments = [{"tokens": tokens[end - n : end]} for n, end in zip(lengths, ends, strict=True)]
    source = grain.MapDataset.source(segments).to_iter_dataset()
    packer = grain.experimental.FirstFitPackIterDataset(
        source, length_struct={"tokens": width}, num_packing_bins=32
    )
    begin = time.perf_counter()
    rows = sum(1 for _ in packer)
    return packed(config, lengths, rows, time.perf_counter() - begin)


TRL = (("trl", "datasets"), ("trl", "datasets"))
CONTENDERS = [
    Contender(
        "packprep best_fit",
        "lengths; best-fit decreasing",
        ("packprep",),
        ("packprep",),
        packprep("best_fit"),
    ),
    Contender(
        "packprep first_fit",
        "lengths; document order",
        ("packprep",),
        ("packprep",),
        packprep("first_fit"),
    ),
    Contender(
        "packprep next_fit",
        "lengths; keeps the order",
        ("packprep",),
        ("packprep",),
        packprep("next_fit"),
    ),
    Contender(
        "axolotl",
        "lengths; first-fit decreasing by groups",
        ("axolotl", "numba"),
        ("axolotl.utils.samplers", "numba", "torch"),
        axolotl,
    ),
    Contender("TRL bfd", "tokens; cuts what is too long", *TRL, trl("bfd"), slow=True),
    Contender(
        "TRL bfd_split", "tokens; best-fit decreasing by 1000", *TRL, trl("bfd_split"), slow=True
    ),
    Contender(
        "TRL wrapped", "tokens; end to end, cut at row ends", *TRL, trl("wrapped"), slow=True
    ),
    Contender(
        "Grain first-fit",
        "tokens; 32 rows open",
        ("grain",),
        ("grain",),
        grain_first_fit,
        slow=True,
    ),
]

if __name__ == "__main__":
    main(CONTENDERS, sys.argv[1:])
