"""ArrayRecord files for Grain: the records are the documents or the loader's rows."""

import struct
import sys

import numpy as np
import pytest

from packprep.errors import RecipeError
from packprep.exporting.array_record import example
from tests.exporting import plain

array_record = pytest.importorskip(
    "array_record.python.array_record_module", reason="array_record is in the extra test"
)


def fields(data):
    """(number, wire type, value) of a message, byte by byte."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        assert key & 7 == 2
        length = varint()
        yield key >> 3, data[at : at + length]
        at += length


def varints(data):
    found, value, shift = [], 0, 0
    for byte in data:
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            found.append(value - (1 << 64) * (value >> 63))
            value = shift = 0
    return found


def features(data):
    """The features of an Example by the wire format alone."""
    found = {}
    [(number, entries)] = fields(data)
    assert number == 1
    for number, entry in fields(entries):
        (one, name), (two, feature) = fields(entry)
        [(kind, values)] = fields(feature)
        [(packed, values)] = fields(values)
        assert (number, one, two, packed) == (1, 1, 2, 1)
        found[name.decode()] = (
            varints(values) if kind == 3 else list(struct.unpack(f"<{len(values) // 4}f", values))
        )
    return found


def records_of(folder):
    for path in sorted(folder.glob("*.array_record")):
        reader = array_record.ArrayRecordReader(str(path))
        assert "group_size:1" in reader.writer_options_string()
        yield from reader.read_all() if reader.num_records() else ()


def test_an_example_is_the_protocol_buffer_of_its_numbers():
    numbers = [0, 1, 127, 128, 300, 2**31 - 1, 2**62, -1, -(2**63)]
    weights = np.array([0.5, 1, 0], np.float32)
    given = {"b": np.array(numbers), "a": weights, "empty": np.zeros(0, np.int32)}
    assert features(example(given)) == {"a": [0.5, 1, 0], "b": numbers, "empty": []}


def test_rows_and_documents_are_those_of_the_dataset_and_grain_reads_them(known, tmp_path):
    grain = pytest.importorskip("grain", reason="grain is in the extra trainers")
    one = known("mixed")
    receipt = one.export(tmp_path / "rows", "array_record", what="rows", workers=2)
    found = [features(record) for record in records_of(tmp_path / "rows")]
    assert receipt["records"] == len(found) == len(one.dataset)
    assert receipt["features"] == sorted(found[0])
    columns = ["tokens", "labels", "segment_ids", "position_ids", "loss_mask", "loss_weights"]
    own = one.dataset.batch(range(len(found)), columns=columns)
    trained = np.where(own["loss_mask"], own["segment_ids"], 0)
    for name, expected in (
        ("inputs", own["tokens"]),
        ("targets", own["labels"]),
        ("inputs_segmentation", own["segment_ids"]),
        ("targets_segmentation", trained),
        ("targets_position", own["position_ids"]),
        ("loss_weights", own["loss_weights"]),
    ):
        assert np.array_equal([row[name] for row in found], expected)
    paths = sorted(map(str, (tmp_path / "rows").glob("*.array_record")))
    source = grain.sources.ArrayRecordDataSource(paths)
    assert len(source) == len(found) and features(source[len(found) - 1]) == found[-1]
    again = one.export(tmp_path / "again", "array_record", what="rows")
    assert again["files"] == receipt["files"]


def test_documents_have_the_ids_of_their_texts_with_bos_and_eos(known, tmp_path):
    one = known("bos")
    receipt = one.export(tmp_path / "out", "array_record")
    found = [features(record)["tokens"] for record in records_of(tmp_path / "out")]
    assert receipt["features"] == ["tokens"] and receipt["records"] == len(found)
    specials = one.dataset.manifest["specials"]
    assert {ids[0] for ids in found} == {specials["bos"]}
    assert {ids[-1] for ids in found} == {specials["eos"]}
    one.export(tmp_path / "pairs", "megatron")
    pairs = [path.with_suffix("") for path in (tmp_path / "pairs").glob("*.idx")]
    assert sorted(found) == sorted(ids for pair in pairs for ids in plain.documents_of(pair))


def test_without_the_package_the_export_is_refused_with_the_extra(known, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(RecipeError, match=r"pip install 'packprep\[array_record\]'"):
        known("bos").export(tmp_path / "out", "array_record")
