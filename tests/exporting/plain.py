"""Readers of what is exported, written from the formats' descriptions alone."""

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DTYPES = {4: "<i4", 8: "<u2"}


def documents_of(prefix: Path) -> list[list[int]]:
    """The documents of a .bin and its .idx, of which every byte is accounted for."""
    index, data = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    magic, version, code, sequences, boundaries = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version, boundaries) == (b"MMIDIDX\x00\x00", 1, sequences + 1)
    assert len(index) == 34 + 4 * sequences + 8 * sequences + 8 * boundaries
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    begins = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    assert struct.unpack_from(f"<{boundaries}q", index, 34 + 12 * sequences) == tuple(
        range(boundaries)
    )
    size = np.dtype(DTYPES[code]).itemsize
    assert len(data) == size * sum(lengths) and all(length > 0 for length in lengths)
    found, at = [], 0
    for begin, length in zip(begins, lengths, strict=True):
        assert begin == at
        found.append(np.frombuffer(data, DTYPES[code], length, begin).tolist())
        at += size * length
    return found


def parquet_rows(folder: Path) -> list[dict[str, list]]:
    """The rows of all files in their order."""
    return [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def arrow_rows(folder: Path) -> list[dict[str, list]]:
    """The rows of a folder as `save_to_disk` writes it, of the files that its state names."""
    names = [
        file["filename"] for file in json.loads((folder / "state.json").read_bytes())["_data_files"]
    ]
    return [
        row for name in names for row in pa.ipc.open_stream(folder / name).read_all().to_pylist()
    ]


def trl_row(row) -> dict[str, list]:
    """What TRL is given of a Row of packprep's: slot by slot, each label where its token stands."""
    found: dict[str, list] = {"input_ids": [], "labels": [], "position_ids": [], "seq_lengths": []}
    for begin, end in zip(row.segments["begin"], row.segments["end"], strict=True):
        for t in range(begin, end):
            trained = t > begin and row.loss_mask[t - 1]
            assert not trained or row.labels[t - 1] == row.tokens[t]
            found["input_ids"].append(int(row.tokens[t]))
            found["labels"].append(int(row.tokens[t]) if trained else -100)
            found["position_ids"].append(int(t - begin))
        found["seq_lengths"].append(int(end - begin))
    return found


def described(path: Path) -> dict:
    """What a Parquet file says of itself."""
    return json.loads(pq.read_metadata(path).metadata[b"packprep"])


def trained_by_nemo(row: dict[str, list]) -> list[tuple[int, int, int, int]]:
    """(segment, offset in it, input token, target) of each trained prediction, as
    GPTSFTPackedDataset slices a row: tokens [begin : end − 1], labels [begin + 1 : end], loss_mask
    [begin : end − 1]."""
    boundaries = [*row["seq_start_id"], len(row["input_ids"])]
    assert boundaries[0] == 0 and len(row["loss_mask"]) == len(row["input_ids"])
    trained = []
    for i, (begin, end) in enumerate(zip(boundaries[:-1], boundaries[1:], strict=True)):
        assert begin < end
        tokens, labels = row["input_ids"][begin : end - 1], row["input_ids"][begin + 1 : end]
        for k, mask in enumerate(row["loss_mask"][begin : end - 1]):
            trained += [(i, k, tokens[k], labels[k])] * mask
    return trained


def trained_by_packprep(row) -> list[tuple[int, int, int, int]]:
    """The same of a Row of packprep's, where nothing is shifted."""
    trained, seen = [], {}
    for t in range(len(row.tokens)):
        segment = int(row.segment_ids[t])
        offset = seen.get(segment, 0)
        seen[segment] = offset + 1
        if row.loss_mask[t]:
            trained.append((segment - 1, offset, int(row.tokens[t]), int(row.labels[t])))
    return trained
