"""MDS folders: sound ones have no finding, and each fault that they can contain is named."""

import json

import numpy as np
import pytest
import zstandard

from packprep.audit.readers import open_packed
from packprep.audit.rows import Choices
from packprep.errors import SourceError
from tests.audit import faults_made as made
from tests.audit.readers.layouts_made import described, found, tokens

_CODES = {"int32": 33, "uint16": 16, "int64": 65}


def _encoded(values, encoding: str) -> bytes:
    kind, *args = encoding.split(":")
    array = np.asarray(values, args[0] if args else "int64")
    if kind == "bytes":
        return array.tobytes()
    head = b"" if args else bytes([_CODES[array.dtype.name]])
    if len(args) < 2:
        head += bytes([1 << 2 | 1]) + np.uint16(len(array)).tobytes()
    return head + array.tobytes()


def write_mds(path, columns, encodings, samples=23, compression=None):
    """A folder of shards with at most `samples` samples, as MDSWriter writes it."""
    path.mkdir()
    names = sorted(columns)
    sizes = [
        int(np.dtype(encoding.split(":")[1]).itemsize) * int(encoding.split(":")[2])
        if encoding.count(":") == 2
        else None
        for encoding in (encodings[name] for name in names)
    ]
    about = {
        "column_encodings": [encodings[name] for name in names],
        "column_names": names,
        "column_sizes": sizes,
        "compression": compression,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    config = json.dumps(about, sort_keys=True).encode()
    shards, count = [], len(columns[names[0]])
    for first in range(0, count, samples):
        data = []
        for row in range(first, min(first + samples, count)):
            values = [_encoded(columns[name][row], encodings[name]) for name in names]
            own = [len(v) for v, size in zip(values, sizes, strict=True) if size is None]
            data.append(np.array(own, np.uint32).tobytes() + b"".join(values))
        begins = 4 * (len(data) + 2) + len(config) + np.cumsum([0, *map(len, data)])
        raw = np.array([len(data), *begins], np.uint32).tobytes() + config + b"".join(data)
        name = f"shard.{len(shards):05d}.mds"
        shard = about | {"samples": len(data), "raw_data": {"basename": name, "bytes": len(raw)}}
        if compression:
            name += ".zstd"
            raw = zstandard.ZstdCompressor().compress(raw)
        zipped = {"basename": name, "bytes": len(raw)} if compression else None
        (path / name).write_bytes(raw)
        shards.append(shard | {"zip_data": zipped})
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return path


def _whole(columns):
    """Rows of equal length, as llm-foundry writes them."""
    return {name: rows[:-1] for name, rows in columns.items()}


def test_each_fault_that_tokens_can_contain_is_named(tmp_path):
    encodings = {"tokens": "ndarray:int32"}
    assert found(write_mds(tmp_path / "a", _whole(tokens(made.clean())), encodings)) == set()
    kinds = "duplicate_documents", "empty_documents", "two_bos", "beyond_vocabulary"
    for kind in (*kinds, "unknown_tokens"):
        columns = _whole(tokens(made.FAULTS[kind]()))
        assert found(write_mds(tmp_path / kind, columns, encodings)) == {kind}


def test_all_encodings_give_the_same_rows(tmp_path):
    columns = _whole(tokens(made.clean()))
    fixed = f"ndarray:int32:{made.ROW_LENGTH}"
    for i, (encoding, compression) in enumerate(
        (
            ("ndarray:int32", None),
            ("ndarray", None),
            (fixed, None),
            ("bytes", None),
            (fixed, "zstd"),
        )
    ):
        path = write_mds(tmp_path / str(i), columns, {"tokens": encoding}, compression=compression)
        data = open_packed(path, Choices(batch_tokens=500))
        ids = np.concatenate([rows.ids for rows in data.batches()])
        assert ids.tolist() == sum(columns["tokens"], [])
        assert data.row_length == (made.ROW_LENGTH if encoding == fixed else None)
    path = write_mds(tmp_path / "u2", columns, {"tokens": "bytes:uint16"})
    path.joinpath("index.json").write_text(
        path.joinpath("index.json").read_text().replace("bytes:uint16", "bytes")
    )
    data = open_packed(path, Choices(dtype="uint16"))
    assert np.concatenate([rows.ids for rows in data.batches()]).tolist() == sum(
        columns["tokens"], []
    )


def test_damaged_shards_are_refused_with_their_file(tmp_path):
    columns = _whole(tokens(made.clean()))
    path = write_mds(tmp_path / "a", columns, {"tokens": "ndarray:int32"})
    shard = path / "shard.00001.mds"
    data = shard.read_bytes()
    shard.write_bytes(data[:-7])
    with pytest.raises(SourceError, match="shard.00001.mds: damaged: it ends too early"):
        described(path)
    shard.write_bytes(np.uint32(5).tobytes() + data[4:])
    with pytest.raises(SourceError, match="shard.00001.mds: its head does not fit index.json"):
        described(path)
    shard.unlink()
    with pytest.raises(SourceError, match="shard.00001.mds: the file is missing"):
        described(path)
    path = write_mds(tmp_path / "b", {"text": columns["tokens"]}, {"text": "bytes"})
    with pytest.raises(SourceError, match=r"the columns are text \(bytes\)\nhint: give"):
        described(path)
