"""Corpora that are tokenized already, in every form that they come in, written by plain code."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests import made

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}
EOS, BOS, MASK = 258, 257, 259  # of the tokenizer "bytes"


def ids_of(texts: Sequence[str], append_eos: bool = True) -> list[list[int]]:
    """The texts as the tokenizer "bytes" would have them."""
    return [[*text.encode(), *([EOS] if append_eos else [])] for text in texts]


def write_megatron(
    path: Path,
    documents: Sequence[Sequence[int]],
    dtype: str = "<u2",
    sequences: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
) -> Path:
    """A pair, as Megatron's builder writes it; gives the .bin. sequences: in how many each document
    is cut; None: one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts: list[Sequence[int]] = []
    bounds = [0]
    for d, ids in enumerate(documents):
        count = 1 if sequences is None else sequences[d]
        edges = [i * len(ids) // count for i in range(count + 1)] if count else []
        parts += [ids[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
        bounds.append(len(parts))
    write_index(path.with_suffix(".idx"), [len(part) for part in parts], bounds, dtype, modes=modes)
    path.with_suffix(".bin").write_bytes(
        b"".join(np.array(part, dtype).tobytes() for part in parts)
    )
    return path.with_suffix(".bin")


def write_index(path, lengths, bounds, dtype="<u2", pointers=None, modes=None, **head):
    """An .idx; `pointers` None: one sequence after the other. head: magic, version, code,
    sequences, count as they shall be."""
    lengths = np.array(lengths, "<i4")
    if pointers is None:
        pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    said = {
        "magic": b"MMIDIDX\0\0",
        "version": 1,
        "code": CODES[dtype],
        "sequences": len(lengths),
        "count": len(bounds),
    }
    data = struct.pack("<9sQBQQ", *(said | head).values())
    data += (
        lengths.tobytes() + np.array(pointers, "<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    )
    if modes is not None:
        data += np.array(modes, "i1").tobytes()
    path.write_bytes(data)


def write_datatrove(
    path: Path,
    documents: Sequence[Sequence[int]],
    dtype: str = "<u2",
    loss: Sequence[int] | None = None,
) -> Path:
    """A .ds and the files next to it, as datatrove's DocumentTokenizer writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(np.array(ids, dtype).tobytes() for ids in documents))
    ends = np.cumsum([len(ids) for ids in documents], dtype="<u8")
    path.with_name(f"{path.name}.index").write_bytes(ends.tobytes())
    count = int(ends[-1]) if len(ends) else 0
    path.with_name(f"{path.name}.metadata").write_text(f"bytes|{np.dtype(dtype).itemsize}\n{count}")
    if loss is not None:
        path.with_name(f"{path.name}.loss").write_bytes(bytes(loss))
    return path


def write_stream(path: Path, ids: Sequence[int], dtype: str = "<u2", head: str = "raw") -> Path:
    """One array of ids, with a header of NumPy or of llm.c if `head` says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.array(ids, dtype)
    if head == "numpy":
        with path.open("wb") as file:
            np.save(file, array)
        return path
    magic = {"raw": [], "gpt-2": [20240520, 1], "llama-3": [20240801, 7]}[head]
    header = np.zeros(256 if magic else 0, "<i4")
    header[: len(magic) + 1] = [*magic, len(ids)][: len(header)]
    path.write_bytes(header.tobytes() + array.tobytes())
    return path


def id_table(documents, kind: pa.DataType | None = None, name: str = "input_ids") -> pa.Table:
    column = pa.array(documents, kind or pa.list_(pa.int32()))
    return pa.table(
        {"number": np.arange(len(documents)), name: column, "text": ["a text"] * len(documents)}
    )


def write_lines(path: Path, documents: Sequence[Sequence[int]], name: str = "input_ids") -> Path:
    """Write JSON Lines of ids, compressed if the file's name says so."""
    lines = [json.dumps({name: ids, "text": "a text"}) + "\n" for ids in documents]
    return made.write_compressed(path, "".join(lines).encode())


def write_parquet(
    path: Path, documents, rows: int = 50, kind: pa.DataType | None = None, name: str = "input_ids"
) -> Path:
    pq.write_table(id_table(documents, kind, name), path, row_group_size=rows)
    return path


def write_arrow(
    path: Path,
    documents,
    rows: int = 50,
    kind: pa.DataType | None = None,
    name: str = "input_ids",
    stream: bool = True,
) -> Path:
    table = id_table(documents, kind, name)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def save_dataset(folder: Path, documents, files: int = 2, **state) -> Path:
    """A folder as `datasets` writes it with save_to_disk."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        own = documents[i * len(documents) // files : (i + 1) * len(documents) // files]
        write_arrow(folder / name, own, 20)
    (folder / "dataset_info.json").write_text("{}")
    listed = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "00",
        "_split": None,
    }
    listed |= {
        "_format_type": None,
        "_format_kwargs": {},
        "_format_columns": None,
        "_output_all_columns": False,
    }
    (folder / "state.json").write_text(json.dumps(listed | state))
    return folder
