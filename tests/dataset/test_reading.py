"""io = "pread": the same rows as from maps, without a map; and a file that is lost is an error with
its place."""

import errno
import mmap
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import packprep
from packprep.adapters.remote import open_remote
from packprep.dataset import shard
from packprep.dataset.rows import COLUMNS, MORE_COLUMNS
from packprep.dataset.shard import ShardBytes
from packprep.errors import ArgumentError, DatasetError
from packprep.format import json_files
from tests.dataset.synthetic import make_dataset, replace_in_manifest
from tests.dataset.test_compact import build
from tests.dataset.test_loader import VARIANTS

pytestmark = pytest.mark.skipif(not shard.CAN_PREAD, reason="no preadv here")

ROW_PARTS = [*COLUMNS, "loss_weights", "cu_seqlens", "cu_seqlens_padded"]


@pytest.fixture(params=[*VARIANTS, "compact"])
def both(request, tmp_path):
    if request.param == "compact":
        for b, arrays in enumerate(make_dataset(tmp_path)):
            (tmp_path / json_files.shard_name(b)).write_bytes(
                b"".join(shard.encode(shard.compacted(arrays)))
            )
        replace_in_manifest(tmp_path, recipe={"output": {"columns": "compact"}})
    else:
        make_dataset(tmp_path, **VARIANTS[request.param])
    return packprep.open_dataset(tmp_path), packprep.open_dataset(tmp_path, io="pread")


def test_rows_are_those_of_maps_and_nothing_is_mapped(both, monkeypatch):
    mapped, read = both
    rows = [mapped.row(i) for i in range(12)]
    expected = [{name: getattr(row, name) for name in ROW_PARTS} | row.segments for row in rows]
    ends = [None if -1 in row.segments["prefix"] else row.prefix_ends for row in rows]
    monkeypatch.setattr(mmap, "mmap", None)
    for i in range(12):
        row = read.row(i)
        for name, value in (
            {name: getattr(row, name) for name in ROW_PARTS} | row.segments
        ).items():
            if value is None:
                assert expected[i][name] is None
                continue
            assert value.dtype == expected[i][name].dtype and np.array_equal(
                value, expected[i][name]
            ), name
            assert not value.flags.writeable
        assert (row.n_segments, row.n_tokens, row.max_seqlen) == (
            rows[i].n_segments,
            rows[i].n_tokens,
            rows[i].max_seqlen,
        )
        assert ends[i] is None or np.array_equal(row.prefix_ends, ends[i])


@pytest.mark.parametrize(
    "given", [{}, {"dtype": np.int64}, {"dtype": {"loss_mask": "f4", "loss_weights": "f2"}}]
)
def test_batches_are_those_of_maps(both, given):
    in_halves = any(task["attention"] == "block_diffusion" for task in both[0].tasks)
    names = [
        name
        for name in COLUMNS + MORE_COLUMNS
        if name != "seq_idx" and (name != "prefix_ends" or not in_halves)
    ]
    rows = [3, 11, 0, 3, 7]
    for prepared in (lambda ds: ds, lambda ds: ds.with_loss_on(task="x")):
        mapped, read = (prepared(ds).batch(rows, columns=names, **given) for ds in both)
        for name in names:
            assert mapped[name].dtype == read[name].dtype and np.array_equal(
                mapped[name], read[name]
            ), name
    out = {name: np.zeros((64, 5), np.int32).T for name in COLUMNS}  # not contiguous
    both[1].batch(rows, out=out)
    assert all(np.array_equal(out[name], values) for name, values in both[0].batch(rows).items())
    mapped, read = (list(ds.batches(5, seed=3, epochs=2)) for ds in both)
    assert all(
        np.array_equal(a[name], b[name])
        for a, b in zip(mapped, read, strict=True)
        for name in COLUMNS
    )


def test_redrawn_rows_are_those_of_maps(tmp_path):
    for directory in build("supervised_in_place", tmp_path):
        mapped, read = (packprep.open_dataset(directory, io=io) for io in ("mmap", "pread"))
        rows = range(0, len(mapped), 3)
        names = [name for name in COLUMNS + MORE_COLUMNS if name not in ("prefix_ends", "seq_idx")]
        a, b = (ds.batch(rows, columns=names, epochs=[2] * len(rows)) for ds in (mapped, read))
        assert all(np.array_equal(a[name], b[name]) for name in a)
        assert not np.array_equal(a["tokens"], mapped.batch(rows)["tokens"])


def test_pickles_threads_and_forks_read_the_same(tmp_path):
    make_dataset(tmp_path, rows_per_shard=[2] * 9)
    ds = packprep.open_dataset(tmp_path, io="pread", max_open=2)
    whole = packprep.open_dataset(tmp_path).batch(range(18))
    again = pickle.loads(pickle.dumps(ds.with_columns(["tokens"])))
    assert again.io == "pread" and np.array_equal(again.batch(range(18))["tokens"], whole["tokens"])
    with ThreadPoolExecutor(8) as pool:
        for i, item in zip(
            list(range(18)) * 20, pool.map(ds.__getitem__, list(range(18)) * 20), strict=True
        ):
            assert all(np.array_equal(item[name], whole[name][i]) for name in COLUMNS)
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            good = all(
                np.array_equal(ds.batch(range(18))["tokens"], whole["tokens"]) for _ in range(50)
            )
            os._exit(0 if good else 1)
        children.append(child)
    for _ in range(50):
        assert np.array_equal(ds.batch(range(18))["tokens"], whole["tokens"])
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_open_files_stay_bounded(tmp_path):
    make_dataset(tmp_path, rows_per_shard=[2] * 9)
    ds = packprep.open_dataset(tmp_path, io="pread", max_open=3)
    before = len(os.listdir("/proc/self/fd"))
    kept = ds.row(0)
    for i in [*range(18), *range(17, -1, -1)]:
        ds[i]
        assert len(os.listdir("/proc/self/fd")) <= before + 3 + 1  # the kept row's
    assert kept.segments["key"].tolist() == ds.row(0).segments["key"].tolist()
    del ds, kept
    assert len(os.listdir("/proc/self/fd")) == before


def shard_path(directory, number=0):
    return directory / json_files.shard_name(number)


def test_a_file_truncated_after_it_was_opened_is_an_error_by_file_and_row_and_heals(tmp_path):
    make_dataset(tmp_path)
    ds = packprep.open_dataset(tmp_path, io="pread")
    whole, row = ds.batch(range(5)), ds.row(4)
    path = shard_path(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: 4096 + 64 * 2 * 3 + 10])  # three rows of tokens, and a piece
    assert np.array_equal(ds.batch([2], columns=["tokens"])["tokens"][0], whole["tokens"][2])
    with pytest.raises(
        DatasetError, match=r"000000\.safetensors: row 3: array 'tokens'.*ends 118 bytes before"
    ):
        ds.batch([2, 3], columns=["tokens"])
    with pytest.raises(DatasetError, match=r"000000\.safetensors: its size changed"):
        ds.batch([2])
    with pytest.raises(DatasetError, match=r"000000\.safetensors"):
        row.segments  # noqa: B018
    path.write_bytes(data)
    assert np.array_equal(ds.batch(range(5))["labels"], whole["labels"])


def test_a_truncated_file_ends_a_process_that_maps_it_and_not_one_that_reads_it(tmp_path):
    make_dataset(tmp_path, rows_per_shard=(200,))
    code = (
        "import sys, os, packprep\n"
        "from packprep.errors import DatasetError\n"
        "ds = packprep.open_dataset(sys.argv[1], io=sys.argv[2]); ds.batch(range(200))\n"
        "os.truncate(sys.argv[3], 4096)\n"
        "try: ds.batch(range(200))\n"
        "except DatasetError as error: print(error)\n"
    )
    for io, status in (("pread", 0), ("mmap", -signal.SIGBUS)):
        path = shard_path(tmp_path)
        data = path.read_bytes()
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path, io, path], capture_output=True, text=True
        )
        assert done.returncode == status, done.stderr
        assert ("row 0: array 'tokens'" in done.stdout) == (io == "pread")
        path.write_bytes(data)


def test_a_directory_that_is_moved_away_is_read_on_where_files_are_open_and_else_an_error(tmp_path):
    home, away = tmp_path / "home", tmp_path / "away"
    make_dataset(home)
    ds = packprep.open_dataset(home, io="pread")
    whole = packprep.open_dataset(home).batch(range(12))
    ds[0]
    home.rename(away)
    assert np.array_equal(ds.batch([4, 0])["tokens"], whole["tokens"][[4, 0]])
    with pytest.raises(DatasetError, match=r"000002\.safetensors does not exist\nhint: restore it"):
        ds[11]
    with pytest.raises(DatasetError, match=r"gone: cannot be opened: .*No such file"):
        ShardBytes(tmp_path / "gone", 1).open()
    away.rename(home)
    assert np.array_equal(ds[11]["tokens"], whole["tokens"][11])


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENODEV])
def test_an_error_of_the_system_names_file_row_and_number_and_nothing_counts_as_delivered(
    tmp_path, number, monkeypatch
):
    make_dataset(tmp_path)
    ds = packprep.open_dataset(tmp_path, io="pread")
    expected = [next(it) for it in [ds.batches(12, seed=1)] for _ in range(2)]
    it = ds.batches(12, seed=1)
    next(it)
    real, at = os.preadv, {"left": 7}

    def fails(descriptor, buffers, offset):
        at["left"] -= 1
        if at["left"] == 0:
            raise OSError(number, os.strerror(number))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(
        DatasetError, match=rf"\.safetensors: row \d: array '\w+': cannot be read: .*Errno {number}"
    ):
        next(it)
    assert it.state_dict()["rows"] == 12
    again = next(it)
    assert all(np.array_equal(again[name], expected[1][name]) for name in COLUMNS)


def test_reads_that_give_less_than_was_asked_are_gone_on_with(tmp_path, monkeypatch):
    make_dataset(tmp_path, in_place=True)
    ds, whole = (
        packprep.open_dataset(tmp_path, io="pread"),
        packprep.open_dataset(tmp_path).batch(range(12)),
    )
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][: 1 + len(buffers[0]) // 3]], at)
    )
    got = ds.batch(range(12))
    assert all(np.array_equal(got[name], whole[name]) for name in COLUMNS)


def test_damage_is_refused_by_file_and_row(tmp_path):
    make_dataset(tmp_path)
    path = shard_path(tmp_path)
    arrays = {k: v.copy() for k, v in shard.open_shard(path, 64, "uint16").arrays.items()}
    arrays["row_offsets"][3] = 1 << 40
    path.write_bytes(b"".join(shard.encode(arrays)))
    with pytest.raises(DatasetError, match=r"000000\.safetensors: row 2: row_offsets"):
        packprep.open_dataset(tmp_path, io="pread").batch(range(5))


def test_another_io_is_refused(tmp_path, monkeypatch):
    make_dataset(tmp_path)
    monkeypatch.setattr(shard, "CAN_PREAD", False)
    for opening in (
        lambda io: packprep.open_dataset(tmp_path, io=io),
        lambda io: open_remote(f"memory://{tmp_path}", cache=tmp_path / "cache", io=io),
    ):
        with pytest.raises(ArgumentError, match="io is 'read'"):
            opening("read")
        with pytest.raises(ArgumentError, match="requires preadv"):
            opening("pread")
