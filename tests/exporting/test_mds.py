"""A folder for StreamingDataset: its rows are the loader's, by the format's description, and
mosaicml-streaming reads it."""

import json
import struct

import numpy as np
import pytest

from packprep.exporting import mds
from packprep.exporting.export import export_dataset
from packprep.format.digests import digest_of
from packprep.storage import Remote
from tests import made
from tests.command_line import inside


def rows_of(folder):
    """The rows of all files that index.json names, of which every byte is accounted for: column →
    array."""
    index = json.loads((folder / "index.json").read_bytes())
    assert index["version"] == 2
    for shard in index["shards"]:
        raw = shard.pop("raw_data")
        data = (folder / raw["basename"]).read_bytes()
        assert (raw["bytes"], raw["hashes"]) == (len(data), {"xxh3_128": digest_of(data)})
        samples = shard.pop("samples")
        [count] = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        assert count == samples and offsets[-1] == len(data) and shard.pop("zip_data") is None
        assert json.loads(data[8 + 4 * count : offsets[0]]) == shard
        for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
            row, at = {}, begin
            for name, encoding, size in zip(
                *(shard[f"column_{k}"] for k in ("names", "encodings", "sizes")), strict=True
            ):
                kind, dtype, length = encoding.split(":")
                row[name] = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), int(length), at)
                assert kind == "ndarray" and row[name].nbytes == size
                at += size
            assert at == end and [*row] == sorted(row)
            yield row


BASE = {"tokens", "labels", "loss_mask", "segment_ids", "position_ids"}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mixed", {"loss_weights", "prefix_ends", "block_lengths"}),
        ("compact", {"prefix_ends"}),
        ("concat", set()),
        ("causal_padded", set()),
        ("large_vocabulary", {"prefix_ends"}),
    ],
)
def test_rows_are_those_of_the_loader_in_files_that_are_not_too_large(
    known, tmp_path, monkeypatch, kind, more
):
    dataset = known(kind).dataset
    monkeypatch.setattr(mds, "FILE_SLOTS", dataset.seq_length * 40)
    receipt = known(kind).export(tmp_path / "out", "mds")
    found = list(rows_of(tmp_path / "out"))
    assert {*found[0]} == {*receipt["columns"]} == BASE | more and receipt["rows"] == len(
        found
    ) == len(dataset)
    own = dataset.batch(range(len(dataset)), columns=receipt["columns"])
    assert all(np.array_equal([row[name] for row in found], own[name]) for name in own)
    assert len(receipt["files"]) > 2 and {file.get("rows", 1) for file in receipt["files"]} <= set(
        range(1, 41)
    )


def test_an_export_that_stopped_goes_on_and_workers_and_urls_do_not_show(
    known, tmp_path, monkeypatch
):
    one, begun = known("causal"), tmp_path / "begun"
    monkeypatch.setattr(mds, "FILE_SLOTS", one.dataset.seq_length * 20)
    one.export(tmp_path / "whole", "mds", workers=2)
    one.export(begun, "mds")
    whole = made.contents(tmp_path / "whole")
    assert made.contents(begun) == whole
    first, cut, other, *_ = sorted(begun.glob("*.mds"))
    (begun / ".export.json").rename(begun / ".export-begun.json")
    before = first.stat().st_ino
    cut.write_bytes(cut.read_bytes()[:-1])
    other.write_bytes(bytes(other.stat().st_size))
    said = inside("export", one.out, "--to", "mds", "--out", begun, "--workers", 1).out
    assert "tokens, for streaming.StreamingDataset: " in said
    assert made.contents(begun) == whole and first.stat().st_ino == before
    remote = Remote("memory://exporting/mds")
    one.export(remote.url, "mds")
    assert {name: remote.read(name) for name, _ in remote.list()} == whole


def test_datasets_without_rows_and_with_empty_shards(without_rows, with_empty_shards, tmp_path):
    assert export_dataset(without_rows, "mds", tmp_path / "none", made.Silent())["rows"] == 0
    receipt = export_dataset(with_empty_shards, "mds", tmp_path / "some", made.Silent())
    assert len(list(rows_of(tmp_path / "some"))) == receipt["rows"] > 0
    assert [file["file"] for file in receipt["files"]][:2] == ["shard.00000.mds", "shard.00001.mds"]


@pytest.mark.parametrize("kind", ["causal", "mixed"])
def test_streaming_reads_the_arrays_of_the_loader_and_takes_the_hashes(known, tmp_path, kind):
    streaming = pytest.importorskip(
        "streaming", reason="mosaicml-streaming is not installed: pip install mosaicml-streaming"
    )
    receipt, dataset = known(kind).export(tmp_path / "out", "mds"), known(kind).dataset
    given = {
        "remote": str(tmp_path / "out"),
        "local": str(tmp_path / "local"),
        "validate_hash": mds.HASH,
    }
    rows = streaming.StreamingDataset(**given, shuffle=False, batch_size=1)
    assert len(rows) == len(dataset)
    for i in range(len(rows)):
        own = dataset.batch([i], columns=receipt["columns"])
        assert rows[i].keys() == own.keys() and all(
            np.array_equal(rows[i][name], own[name][0]) for name in own
        )
