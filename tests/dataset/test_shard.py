import json
import os
import time
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open

from packprep.dataset import shard
from packprep.errors import DatasetError
from tests.dataset.synthetic import make_shard

ALL = {"in_place": True, "blocks": True, "trained": True, "pad_to": 4}


def written(path, rows=5, seq_length=64, token_dtype="uint16", **options):
    arrays = make_shard(np.random.default_rng(3), rows, seq_length, token_dtype, **options)
    path.write_bytes(b"".join(shard.encode(arrays)))
    return arrays


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("options", [{}, ALL, {"token_dtype": "int32"}, {"seq_length": 8}])
def test_what_is_encoded_comes_back(tmp_path, rows, options):
    path = tmp_path / "s"
    arrays = written(path, rows, **options)
    opened = shard.open_shard(
        path, options.get("seq_length", 64), options.get("token_dtype", "uint16"), rows=rows
    )
    assert opened.rows == rows and opened.segments == len(arrays["segment_key"])
    assert list(opened.arrays) == list(opened.layout)
    for name, array in arrays.items():
        here = opened.arrays[name]
        assert here.dtype == array.dtype and np.array_equal(here, array)
        assert type(here) is np.ndarray and not here.flags.writeable
        assert here.size == 0 or here.ctypes.data % here.itemsize == 0


@pytest.mark.parametrize("rows", [0, 4])
def test_any_safetensors_reader_opens_it(tmp_path, rows):
    path = tmp_path / "s.safetensors"
    arrays = written(path, rows, **ALL)
    with safe_open(path, "np") as file:
        assert set(file.keys()) == set(arrays)
        assert file.metadata() == shard.METADATA
        for name, array in arrays.items():
            assert np.array_equal(file.get_tensor(name), array)


def test_data_begins_at_a_multiple_of_4096_and_the_file_ends_with_it(tmp_path):
    arrays = written(tmp_path / "s", **ALL)
    data = (tmp_path / "s").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    assert begin % 4096 == 0
    assert len(data) == begin + sum(a.nbytes for a in arrays.values())


def test_the_order_is_rows_then_columns_by_item_size():
    layout = shard.layout(3, 9, 64, "uint16", labels=True, padded=True, blocks=2, trained=1)
    assert list(layout)[:4] == ["tokens", "labels", "segment_ids", "loss_mask"]
    sizes = [dtype.itemsize for dtype, _ in list(layout.values())[4:]]
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {8, 4, 2}


def test_encode_makes_no_copies():
    arrays = make_shard(np.random.default_rng(0), 4)
    buffers = shard.encode(arrays)
    for name, buffer in zip(
        shard.layout(4, len(arrays["segment_key"]), 64, "u2"), buffers[1:], strict=True
    ):
        assert buffer.nbytes == arrays[name].nbytes
        assert buffer.nbytes == 0 or np.shares_memory(np.frombuffer(buffer, np.uint8), arrays[name])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda a: {**a, "more": a["tokens"]}, "'more'"),
        (lambda a: {k: v for k, v in a.items() if k != "segment_doc"}, "'segment_doc' is missing"),
        (lambda a: {**a, "segment_doc": a["segment_doc"].astype("i4")}, "'segment_doc'.*int32"),
        (lambda a: {**a, "cu_seqlens": a["cu_seqlens"][:-1]}, "'cu_seqlens'"),
        (lambda a: {**a, "loss_mask": np.asfortranarray(a["loss_mask"])}, "contiguous"),
        (lambda a: {**a, "tokens": a["tokens"].astype("u4")}, "uint32"),
        (lambda a: {**a, "tokens": a["tokens"][:, :60]}, "multiple of 8"),
        (lambda a: {**a, "loss_mask": a["loss_mask"].astype(">u2")}, "'loss_mask'"),
    ],
)
def test_encode_refuses_what_the_layout_does_not_have(change, words):
    with pytest.raises(DatasetError, match=words):
        shard.encode(change(make_shard(np.random.default_rng(0), 4)))


def header_of(path):
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def rewrite(path, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def changed(name, **entry):
    return lambda h: {**h, name: {**h[name], **entry}}


def huge(h):
    return {k: {**v, "shape": [2**62, 2**62]} if k == "tokens" else v for k, v in h.items()}


HEADERS = {
    "unknown array": (lambda h: {**h, "extra": h["tokens"]}, "'extra'"),
    "missing array": (
        lambda h: {k: v for k, v in h.items() if k != "segment_key"},
        "'segment_key'",
    ),
    "missing one of a pair": (lambda h: {**h, "block_noise": h["segment_noise"]}, "'block_"),
    "wrong dtype": (changed("tokens", dtype="I32"), "'tokens'.*dtype"),
    "unknown dtype": (changed("tokens", dtype="BF16"), "'tokens'.*dtype"),
    "dtype no string": (changed("tokens", dtype=["U16"]), "'tokens'.*dtype"),
    "overlap": (
        lambda h: changed("segment_ids", data_offsets=h["tokens"]["data_offsets"])(h),
        "'segment_ids'",
    ),
    "hole": (
        lambda h: changed(
            "loss_mask", data_offsets=[o + 8 for o in h["loss_mask"]["data_offsets"]]
        )(h),
        "'loss_mask'",
    ),
    "beyond the file": (changed("segment_repeat", data_offsets=[0, 2**70]), "'segment_repeat'"),
    "negative offsets": (changed("tokens", data_offsets=[-8, 0]), "'tokens'"),
    "float offsets": (changed("tokens", data_offsets=[0.0, 640.0]), "'tokens'"),
    "bool in shape": (changed("tokens", shape=[True, 64]), "'tokens'"),
    "huge shape": (huge, "'tokens'"),
    "rows that overflow": (changed("tokens", shape=[2**61, 64]), "'tokens'"),
    "rows that wrap to 0": (changed("tokens", shape=[2**58, 64]), "'tokens'"),
    "shape of three": (changed("tokens", shape=[5, 64, 1]), "'tokens'"),
    "no shape": (changed("tokens", shape=[]), "'tokens'"),
    "other seq_length": (changed("tokens", shape=[10, 32]), "'tokens'"),
    "segments disagree": (changed("segment_key", shape=[1]), "."),
    "rows disagree": (
        lambda h: changed("row_offsets", shape=[h["row_offsets"]["shape"][0] - 1])(h),
        ".",
    ),
    "entry no object": (lambda h: {**h, "tokens": [1]}, "'tokens'"),
    "entry with more": (changed("tokens", more=1), "'tokens'"),
    "no metadata": (lambda h: {k: v for k, v in h.items() if k != "__metadata__"}, "__metadata__"),
    "other version": (
        lambda h: {**h, "__metadata__": {**h["__metadata__"], "version": "2"}},
        "__metadata__",
    ),
    "a list": (lambda h: [h], "list"),
    "not JSON": (lambda h: b"{" * 100, "JSON"),
    "deep JSON": (lambda h: b"[" * 100_000, "JSON"),
    "no UTF-8": (lambda h: b'{"\xff": 1}', "JSON"),
    "NaN": (lambda h: b'{"tokens": {"dtype": "U16", "shape": [NaN], "data_offsets": [0, 1]}}', "."),
    "huge integer": (lambda h: b'{"tokens": ' + b"9" * 5000 + b"}", "."),
    "many duplicates": (
        lambda h: b"{" + b",".join([b'"a":1'] * 100_000) + b"}",
        "'a' occurs twice",
    ),
    "duplicate keys": (
        lambda h: json.dumps(h).encode()[:-1] + b', "tokens": {}}',
        "'tokens' occurs twice",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_is_refused_quickly_and_by_name(tmp_path, case):
    path = tmp_path / "000007.safetensors"
    written(path)
    header, data = header_of(path)
    make, words = HEADERS[case]
    rewrite(path, make(header), data)
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(DatasetError, match=words) as caught:
        shard.open_shard(path, 64, "uint16")
    took, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert took < 2 and peak < 64 << 20


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 1 << 21, 4095])
def test_an_impossible_header_length_is_refused(tmp_path, length):
    path = tmp_path / "s"
    written(path)
    header, data = header_of(path)
    rewrite(path, header, data, length)
    with pytest.raises(DatasetError, match="header|begins"):
        shard.open_shard(path, 64, "uint16")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 4096, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "s"
    written(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DatasetError, match=str(path)):
        shard.open_shard(path, 64, "uint16")


def test_bytes_after_the_end_are_refused(tmp_path):
    path = tmp_path / "s"
    written(path)
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(DatasetError, match="end at byte"):
        shard.open_shard(path, 64, "uint16")


def test_a_file_that_shrinks_after_it_was_opened_is_refused_before_it_is_mapped(tmp_path):
    path = tmp_path / "s"
    written(path)
    opened = shard.open_shard(path, 64, "uint16")
    os.truncate(path, 5000)
    with pytest.raises(DatasetError, match="changed"):
        opened.arrays["tokens"].sum()


def test_a_file_that_cannot_be_mapped_is_an_error_by_name(tmp_path):
    path = tmp_path / "s"
    written(path)
    opened = shard.open_shard(path, 64, "uint16")
    path.unlink()
    with pytest.raises(DatasetError, match=f"{path}: cannot be mapped: .*No such file"):
        opened.arrays["tokens"].sum()


def test_no_file_and_a_directory_are_refused_by_name(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DatasetError, match=str(path)):
            shard.open_shard(path, 64, "uint16")


def test_fault_25_another_token_dtype_than_the_manifests_is_refused(tmp_path):
    written(tmp_path / "s", token_dtype="int32")
    with pytest.raises(DatasetError, match="dtype"):
        shard.open_shard(tmp_path / "s", 64, "uint16")


def test_rows_and_segments_must_be_the_manifests(tmp_path):
    arrays = written(tmp_path / "s")
    with pytest.raises(DatasetError, match="5 rows, but the manifest has 6"):
        shard.open_shard(tmp_path / "s", 64, "uint16", rows=6)
    with pytest.raises(DatasetError, match="segments"):
        shard.open_shard(tmp_path / "s", 64, "uint16", segments=len(arrays["segment_key"]) + 1)


@pytest.mark.parametrize("value", [-1, 1 << 40, -(1 << 63)])
def test_row_offsets_outside_the_columns_are_refused_by_row(tmp_path, value):
    arrays = make_shard(np.random.default_rng(3), 5)
    arrays["row_offsets"][3] = value
    (tmp_path / "s").write_bytes(b"".join(shard.encode(arrays)))
    opened = shard.open_shard(tmp_path / "s", 64, "uint16")
    for row in (2, 3):
        with pytest.raises(DatasetError, match=f"row {row}.*{value}"):
            opened.segment_range(row)
    assert opened.segment_range(0)[0] == 0
