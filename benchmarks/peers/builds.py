"""Text files to what a trainer reads: packprep's `build` beside the tools that tokenize, and a bare
loop.

None of the others packs, corrupts, keeps a ledger or digests what it wrote; packprep does all of
that in every line.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from peers.contender import Config, Contender, Work, bytes_below, main, running

SPECIALS = '[specials]\nmissing = "add"\nsentinels = "auto"\n'


# --- packprep, through its command line


def recipe(config: Config, preset: str, source: str, top: str = "") -> str:
    """Write the recipe of one line; gives its path."""
    path = running(config, "recipe.toml")
    text = (
        f"tokenizer = {json.dumps(config['tokenizer'])}\nseq_length ="
        f" {config['seq_length']}\n{top}\n[[sources]]\npaths ="
        f" {json.dumps(source)}\n[[tasks]]\npreset = {json.dumps(preset)}\n{SPECIALS}"
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def packprep_command(preset: str, source: str = "jsonl", top: str = "") -> Any:
    """`packprep build` of the input config[source]."""

    def command(config: Config) -> list[str]:
        path = recipe(config, preset, config[source], top)
        command = [
            sys.executable,
            "-m",
            "packprep",
            "build",
            path,
            "--out",
            running(config, "dataset"),
        ]
        return [*command, "--workers", str(config["workers"])]

    return command


def packprep_work(config: Config) -> Work:
    """What the manifest of a build says."""
    folder = running(config, "dataset")
    with open(os.path.join(folder, "dataset.json"), encoding="utf-8") as file:
        manifest = json.load(file)
    ledger = manifest["ledger"]
    sources = ledger["sources"].values()
    return Work(
        documents=sum(source["documents"]["read"] for source in sources),
        tokens=sum(source["tokens"]["used"] for source in sources),
        rows=ledger["rows"],
        utilisation=1 - ledger["row_padding"] / max(ledger["row_slots"], 1),
        output_bytes=bytes_below(folder),
    )


def packprep(
    name: str, what: str, preset: str, source: str = "jsonl", top: str = "", **more: Any
) -> Contender:
    """A line of packprep."""
    command = packprep_command(preset, source, top)
    return Contender(
        name, what, ("packprep",), ("packprep",), command=command, read=packprep_work, **more
    )


# --- a bare loop: read, decode, encode, write


def byte_ranges(path: str, count: int) -> list[tuple[int, int]]:
    """Split a file at line ends into `count` parts of about the same size."""
    size = os.path.getsize(path)
    ends = [0]
    with open(path, "rb") as file:
        for i in range(1, count):
            file.seek(size * i // count)
            file.readline()
            ends.append(file.tell())
    ends.append(size)
    return list(zip(ends, ends[1:], strict=False))


def texts_of(path: str, begin: int, end: int, batch_bytes: int = 1 << 22) -> Iterator[list[str]]:
    """Lists of the texts of a part of a JSON lines file."""
    import msgspec

    line_type = msgspec.defstruct("Line", [("text", str)])
    decode = msgspec.json.Decoder(line_type).decode
    with open(path, "rb") as file:
        file.seek(begin)
        while file.tell() < end:
            # one less than what is left: readlines stops where it exceeds its hint
            lines = file.readlines(min(batch_bytes, end - file.tell() - 1))
            yield [decode(line).text for line in lines]


def _fastokens(path: str) -> Callable[[list[str]], bytes]:
    os.environ["RAYON_NUM_THREADS"] = "1"
    from fastokens._native import Tokenizer

    encode = Tokenizer.from_file(path).encode_batch_flat
    return lambda texts: encode(texts)[0]


def _gigatoken(path: str) -> Callable[[list[str]], bytes]:
    import numpy as np
    from gigatoken import Tokenizer

    encode = Tokenizer(path).encode
    return lambda texts: np.concatenate([encode(text) for text in texts]).data


def _scratch_part(arguments: tuple[Any, Config, int, int, int]) -> tuple[int, int]:
    load, config, number, begin, end = arguments
    encode = load(config["tokenizer"])
    documents = tokens = 0
    with open(running(config, f"part{number}.bin"), "wb", buffering=0) as target:
        for texts in texts_of(config["jsonl"], begin, end):
            ids = memoryview(encode(texts)).cast("B")
            target.write(ids)  # uint32, the same bytes as int32
            documents, tokens = documents + len(texts), tokens + len(ids) // 4
    return documents, tokens


def scratch_loop(config: Config, load: Any = _fastokens) -> Work:
    """As many processes as workers, each with its part of the file; nothing is kept but the ids."""
    began = time.time()
    ranges = byte_ranges(config["jsonl"], config["workers"])
    parts = [(load, config, i, begin, end) for i, (begin, end) in enumerate(ranges)]
    with multiprocessing.Pool(len(parts)) as pool:
        done = pool.map(_scratch_part, parts)
    documents, tokens = (sum(column) for column in zip(*done, strict=True))
    return Work(documents, tokens, output_bytes=bytes_below(config["out"]), began_at=began)


# --- datatrove


def datatrove(config: Config) -> Work:
    """JsonlReader → DocumentTokenizer, one task a part; its default shuffle of documents is on."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    began = time.time()
    out = running(config, "tokens")
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(config["parts"], glob_pattern="*.jsonl"),
            DocumentTokenizer(out, config["tokenizer"], eos_token=config["eos"]),
        ],
        tasks=config["workers"],
        workers=config["workers"],
        logging_dir=running(config, "logs"),
        skip_completed=False,
    ).run()
    names = os.listdir(out)
    documents = sum(
        os.path.getsize(os.path.join(out, name)) // 8 for name in names if name.endswith(".index")
    )
    slots = sum(
        os.path.getsize(os.path.join(out, name)) // 4 for name in names if name.endswith(".ds")
    )
    return Work(documents, slots - documents, output_bytes=bytes_below(out), began_at=began)


# --- Megatron's preprocessing: its two tools are scripts of its repository, so the same steps stand
# here

_tokenizer: Any = None


def _load_tokenizer(path: str) -> None:
    global _tokenizer
    from tokenizers import Tokenizer

    _tokenizer = Tokenizer.from_file(path)


def _encode_line(line: str) -> list[int]:
    return _tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids


def megatron(config: Config) -> Work:
    """A pool maps lines to ids, 32 lines a message; the parent adds documents to an
    IndexedDatasetBuilder."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    began = time.time()
    prefix = running(config, "megatron")
    builder = IndexedDatasetBuilder(
        prefix + ".bin", dtype=DType.optimal_dtype(config["vocab_size"])
    )
    documents = tokens = 0
    with (
        multiprocessing.Pool(config["workers"], _load_tokenizer, (config["tokenizer"],)) as pool,
        open(config["jsonl"], encoding="utf-8") as lines,
    ):
        for ids in pool.imap(_encode_line, lines, 32):
            documents, tokens = documents + 1, tokens + len(ids)
            ids.append(config["eos_id"])
            builder.add_document(ids, [len(ids)])
    builder.finalize(prefix + ".idx")
    return Work(documents, tokens, output_bytes=bytes_below(config["out"]), began_at=began)


def megatron_fast(config: Config) -> Work:
    """gigatoken reads and encodes the whole file on all cores; ids and lengths go to the builder in
    one piece."""
    import awkward as ak
    import gigatoken
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    began = time.time()
    with open(config["tokenizer"], encoding="utf-8") as file:
        tokenizer = gigatoken.Tokenizer.from_json(file.read())
    prefix = running(config, "megatron")
    builder = IndexedDatasetBuilder(
        prefix + ".bin", dtype=DType.optimal_dtype(config["vocab_size"])
    )
    documents = tokenizer.encode_files(gigatoken.JsonlFileSource([config["jsonl"]], "text"))
    flat = np.asarray(ak.flatten(documents)).astype(builder.dtype)
    lengths = np.asarray(ak.num(documents, axis=1))
    flat = np.insert(flat, np.cumsum(lengths), config["eos_id"]).astype(builder.dtype, copy=False)
    builder.data_file.write(flat.tobytes(order="C"))
    builder.sequence_lengths.extend((lengths + 1).tolist())
    builder.document_indices.extend(range(1, len(lengths) + 1))
    builder.finalize(prefix + ".idx")
    return Work(
        len(lengths), int(lengths.sum()), output_bytes=bytes_below(config["out"]), began_at=began,
    )  # fmt: skip


# --- dolma


def dolma_command(config: Config) -> list[str]:
    """`dolma tokens`, one process a part."""
    return [
        os.path.join(os.path.dirname(config["python"]), "dolma"), "tokens",
        "--documents", os.path.join(config["parts"], "*.jsonl"),
        "--destination", running(config, "tokens"),
        "--tokenizer.name_or_path", config["tokenizer"],
        "--tokenizer.eos_token_id", str(config["eos_id"]),
        "--tokenizer.pad_token_id", str(config["eos_id"]),
        "--processes", str(config["workers"]),
        "--dtype", "uint32",
        "--seed", "0",
    ]  # fmt: skip


def dolma_work(config: Config) -> Work:
    """Documents are the lines of its .csv.gz, tokens what its .npy hold."""
    import gzip

    documents = slots = 0
    for folder, _, names in os.walk(running(config, "tokens")):
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(".csv.gz"):
                with gzip.open(path) as file:
                    documents += sum(1 for _ in file)
            elif name.endswith(".npy"):
                slots += os.path.getsize(path) // 4
    return Work(documents, slots - documents, output_bytes=bytes_below(running(config, "tokens")))


# --- MDS


def stand_in_for_torchvision() -> None:
    """`streaming` imports its image datasets, which want torchvision; where that does not fit the
    installed torch, the names that they import stand empty. No image is read here."""
    import importlib.machinery
    import types

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in (
            "torchvision",
            "torchvision.datasets",
            "torchvision.transforms",
            "torchvision.transforms.functional",
        ):
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            sys.modules[name] = module
        sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
        sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


def _mds_part(arguments: tuple[Config, int, int, int]) -> tuple[int, int]:
    config, number, begin, end = arguments
    stand_in_for_torchvision()
    import numpy as np
    from streaming import MDSWriter
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(config["tokenizer"]).encode
    documents = tokens = 0
    with (
        MDSWriter(
            out=running(config, f"mds/{number}"), columns={"tokens": "ndarray:int32"}
        ) as writer,
        open(config["jsonl"], "rb") as file,
    ):
        file.seek(begin)
        while file.tell() < end:
            ids = encode(json.loads(file.readline())["text"], add_special_tokens=False).ids
            documents, tokens = documents + 1, tokens + len(ids)
            writer.write({"tokens": np.array([*ids, config["eos_id"]], np.int32)})
    return documents, tokens


def mds(config: Config) -> Work:
    """One MDSWriter a worker, an array of ids a document; then merge_index."""
    stand_in_for_torchvision()
    from streaming.base.util import merge_index

    began = time.time()
    ranges = byte_ranges(config["jsonl"], config["workers"])
    parts = [(config, i, begin, end) for i, (begin, end) in enumerate(ranges)]
    with multiprocessing.Pool(len(parts)) as pool:
        done = pool.map(_mds_part, parts)
    merge_index(running(config, "mds"), keep_local=True)
    documents, tokens = (sum(column) for column in zip(*done, strict=True))
    return Work(documents, tokens, output_bytes=bytes_below(config["out"]), began_at=began)


# --- Hugging Face datasets


def hugging_face(config: Config) -> Work:
    """load_dataset("json") → map(tokenize, batched, a process a worker) → save_to_disk."""
    import datasets
    from tokenizers import Tokenizer

    began = time.time()
    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(config["tokenizer"])

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [one.ids for one in encoded]}

    cache = running(config, "cache")
    lines = datasets.load_dataset(
        "json", data_files=config["jsonl"], split="train", cache_dir=cache
    )
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    made = lines.map(
        encode,
        batched=True,
        num_proc=config["workers"],
        remove_columns=lines.column_names,
        features=features,
    )
    made.save_to_disk(running(config, "saved"))
    tokens = sum(len(chunk.flatten()) for chunk in made.data.column("input_ids").chunks)
    return Work(
        len(made), tokens, output_bytes=bytes_below(running(config, "saved")), began_at=began
    )


TOKENIZERS = {"slow": True, "kind": "tokenizers"}
CONTENDERS = [
    packprep("packprep ul2r", "tokenize, corrupt, pack; ledger, digests, receipts", "ul2r"),
    packprep("packprep causal", "the same, causal", "causal"),
    packprep("packprep llada", "the same, masked diffusion", "llada"),
    packprep("packprep ul2r, .jsonl.zst", "from one compressed file", "ul2r", "zst"),
    packprep("packprep ul2r, .jsonl.gz", "from one compressed file", "ul2r", "gz"),
    packprep("packprep ul2r, Parquet", "from one Parquet file, zstd", "ul2r", "parquet"),
    packprep(
        "packprep ul2r, reference",
        'engine = "reference"',
        "ul2r",
        top='engine = "reference"\n',
        slow=True,
    ),
    packprep("packprep ul2r, one document", "what starting costs", "ul2r", "one", kind="start-up"),
    Contender(
        "bare loop",
        "read, decode, fastokens, write: no more",
        ("fastokens", "msgspec"),
        ("fastokens._native", "msgspec"),
        scratch_loop,
    ),
    Contender(
        "bare loop, gigatoken",
        "the same with gigatoken",
        ("gigatoken", "msgspec"),
        ("gigatoken", "msgspec"),
        partial(scratch_loop, load=_gigatoken),
    ),
    Contender(
        "Megatron-style, gigatoken",
        "as preprocess_data_fast.py: tokenize, index",
        ("megatron-core", "gigatoken"),
        ("megatron.core", "gigatoken", "awkward"),
        megatron_fast,
    ),
    Contender(
        "Megatron-style, tokenizers",
        "as preprocess_data.py: tokenize, index",
        ("megatron-core", "tokenizers"),
        ("megatron.core", "tokenizers"),
        megatron,
        **TOKENIZERS,
    ),
    Contender(
        "datatrove",
        "JsonlReader, DocumentTokenizer: tokenize, shuffle",
        ("datatrove", "tokenizers"),
        ("datatrove", "tokenizers"),
        datatrove,
        **TOKENIZERS,
    ),
    Contender(
        "dolma",
        "dolma tokens: tokenize, shuffle",
        ("dolma", "tokenizers"),
        ("dolma",),
        command=dolma_command,
        read=dolma_work,
        **TOKENIZERS,
    ),
    Contender(
        "MDS",
        "tokenize, MDSWriter, merge_index",
        ("mosaicml-streaming", "tokenizers"),
        ("streaming", "tokenizers"),
        mds,
        **TOKENIZERS,
    ),
    Contender(
        "Hugging Face datasets",
        "load_dataset, map, save_to_disk",
        ("datasets", "tokenizers"),
        ("datasets", "tokenizers"),
        hugging_face,
        **TOKENIZERS,
    ),
]

if __name__ == "__main__":
    main(CONTENDERS, sys.argv[1:])
