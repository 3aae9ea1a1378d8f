"""A dataset at a URL is the dataset in the folder that was uploaded; its shards come through a
bounded cache."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from packprep import open_dataset
from packprep.adapters.remote import open_remote
from packprep.dataset.loader import Dataset
from packprep.errors import ArgumentError, DatasetError
from packprep.storage import Remote
from tests import made
from tests.storage.conftest import BUCKET
from tests.test_forking import ended

pytestmark = pytest.mark.xdist_group("s3")


def upload(folder: Path, remote: Remote) -> str:
    for name, data in made.contents(folder).items():
        remote.write(name, [data])
    return remote.url


@pytest.fixture
def url(built, tmp_path) -> str:
    return upload(built.out, Remote(f"file://{tmp_path}/store"))


def cached(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (cache / "shards").iterdir()}


def equal(one: Dataset, other: Dataset, rows) -> bool:
    mine, theirs = one.batch(rows), other.batch(rows)
    return mine.keys() == theirs.keys() and all(
        np.array_equal(mine[name], theirs[name]) for name in mine
    )


@pytest.mark.long
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_it_is_the_dataset(s3, built, tmp_path, io):
    url = upload(built.out, Remote(f"s3://{BUCKET}/{tmp_path.name}/packed"))
    local, remote = open_dataset(built.out), open_remote(url, cache=tmp_path / "cache", io=io)
    assert repr(remote) == repr(local).replace(str(built.out), url)
    assert cached(tmp_path / "cache") == {}  # shards come when they are asked for
    assert equal(remote, local, range(len(local)))
    entries = local.manifest["shards"]
    assert len(entries) > 3 and cached(tmp_path / "cache") == {
        e["digest"]: e["bytes"] for e in entries
    }
    assert list(Path(tmp_path, "cache", "arriving").iterdir()) == []


def test_batches_and_their_state_are_the_same(built, url, tmp_path):
    local, remote = open_dataset(built.out), open_remote(url, cache=tmp_path / "cache")
    mine, theirs = (ds.batches(batch_size=3, seed=5) for ds in (remote, local))
    for _ in range(4):
        assert np.array_equal(next(mine)["tokens"], next(theirs)["tokens"])
    assert mine.state_dict() == theirs.state_dict()
    again = open_remote(url, cache=tmp_path / "other").batches(batch_size=3, seed=5)
    again.load_state_dict(theirs.state_dict())
    assert np.array_equal(next(again)["tokens"], next(theirs)["tokens"])


def test_a_small_cache_stays_small(built, url, tmp_path):
    local = open_dataset(built.out)
    largest = max(entry["bytes"] for entry in local.manifest["shards"])
    remote = open_remote(url, cache=tmp_path / "cache", max_bytes=2 * largest)
    held = remote.row(0)  # its shard is removed, and stays mapped
    before = held.tokens.copy()
    for row in range(len(local)):
        assert np.array_equal(remote[row]["tokens"], local[row]["tokens"])
        assert sum(cached(tmp_path / "cache").values()) <= 2 * largest
    assert local.manifest["shards"][0]["digest"] not in cached(tmp_path / "cache")
    assert np.array_equal(held.tokens, before)
    # One shard larger than the bound is there alone.
    tiny = open_remote(url, cache=tmp_path / "tiny", max_bytes=1)
    assert equal(tiny, local, range(len(local))) and len(cached(tmp_path / "tiny")) == 1


def test_the_shard_opened_longest_ago_goes_first(built, url, tmp_path):
    entries = open_dataset(built.out).manifest["shards"]
    ends = np.cumsum([entry["rows"] for entry in entries])
    first = [0, *ends.tolist()]
    cache = tmp_path / "cache"
    for number in (0, 1, 0):
        open_remote(url, cache=cache)[first[number]]
    # clocks may be coarse
    os.utime(cache / "shards" / entries[0]["digest"], ns=(2 * 10**18, 2 * 10**18))
    os.utime(cache / "shards" / entries[1]["digest"], ns=(10**18, 10**18))
    room = sum(entries[i]["bytes"] for i in (0, 2))
    open_remote(url, cache=cache, max_bytes=room)[first[2]]
    assert set(cached(cache)) == {entries[0]["digest"], entries[2]["digest"]}


def test_what_is_in_the_cache_is_not_fetched_again(built, url, tmp_path, monkeypatch):
    whole = open_remote(url, cache=tmp_path / "cache")
    expected = whole.batch(range(len(whole)))["tokens"]
    monkeypatch.setattr(Remote, "open", None)
    assert np.array_equal(
        open_remote(url, cache=tmp_path / "cache").batch(range(len(whole)))["tokens"], expected
    )


def read_all(dataset: Dataset, results) -> None:
    results.put(dataset.batch(range(len(dataset)))["tokens"].tobytes())


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_a_cache(built, url, tmp_path, method):
    local = open_dataset(built.out)
    expected = local.batch(range(len(local)))["tokens"].tobytes()
    largest = max(entry["bytes"] for entry in local.manifest["shards"])
    remote = open_remote(url, cache=tmp_path / "cache", max_bytes=2 * largest)
    assert repr(pickle.loads(pickle.dumps(remote))) == repr(remote)
    context = multiprocessing.get_context(method)
    results = context.Queue()
    processes = [context.Process(target=read_all, args=(remote, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [expected] * 3
    for process in processes:
        process.join(60)


def test_a_shard_is_fetched_once_by_threads_that_ask_at_once(built, url, tmp_path, monkeypatch):
    opened: list[str] = []
    fetch = Remote.open
    monkeypatch.setattr(
        Remote, "open", lambda self, name, size: opened.append(name) or fetch(self, name, size)
    )
    datasets = [open_remote(url, cache=tmp_path / "cache") for _ in range(6)]
    threads = [threading.Thread(target=ds.batch, args=(range(len(ds)),)) for ds in datasets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(opened) == sorted(entry["file"] for entry in datasets[0].manifest["shards"])


@pytest.mark.parametrize("dies", [False, True])
def test_a_process_that_forks_while_a_thread_fetches_leaves_no_lock_to_the_child(
    built, url, tmp_path, monkeypatch, dies
):
    """A child has copies of the open files that the parent has locked, and would wait for
    itself."""
    fetching, go_on, fetch = threading.Event(), threading.Event(), Remote.open
    remote = open_remote(url, cache=tmp_path / "cache")
    context = multiprocessing.get_context("fork")

    def slowly(self, name, size):
        fetching.set()
        assert go_on.wait(60)
        return fetch(self, name, size)

    def parent():
        monkeypatch.setattr(Remote, "open", slowly)
        threading.Thread(target=remote.batch, args=([0],), daemon=True).start()
        fetching.wait(60)
        monkeypatch.setattr(Remote, "open", fetch)
        child = os.fork()
        if child == 0:
            remote.batch([0])
            os._exit(0)
        if dies:  # its locks go with it
            print(child, file=(tmp_path / "child").open("w"), flush=True)
            os._exit(0)
        go_on.set()
        os._exit(0 if ended(child) else 1)

    process = context.Process(target=parent)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    if dies:
        child = int((tmp_path / "child").read_text())
        end = time.monotonic() + 20
        while time.monotonic() < end and os.path.exists(f"/proc/{child}/fd/0"):
            time.sleep(0.01)
        left = os.path.exists(f"/proc/{child}/fd/0")
        if left:
            os.kill(child, signal.SIGKILL)
        assert not left


def test_what_a_killed_process_left_is_fetched_anew(built, url, tmp_path):
    remote, local = open_remote(url, cache=tmp_path / "cache"), open_dataset(built.out)
    entry = local.manifest["shards"][0]
    (tmp_path / "cache" / "arriving" / entry["digest"]).write_bytes(b"half of it")
    assert equal(remote, local, [0])


def test_a_damaged_object_is_refused_and_not_kept(built, url, tmp_path):
    entry = open_dataset(built.out).manifest["shards"][0]
    store = Remote(url)
    data = bytearray(store.read(entry["file"]))
    data[-1] ^= 1
    store.write(entry["file"], [data])
    remote = open_remote(url, cache=tmp_path / "cache")
    with pytest.raises(DatasetError, match=f"{entry['file']} has the digest .* It is damaged"):
        remote[0]
    store.write(entry["file"], [data[:-1]])
    with pytest.raises(
        DatasetError, match=f"{entry['file']} has {len(data) - 1} bytes, but {len(data)} in"
    ):
        remote[0]
    store.remove(entry["file"])
    with pytest.raises(DatasetError, match="names this shard, but it does not exist"):
        remote[0]
    assert (
        cached(tmp_path / "cache") == {}
        and list(Path(tmp_path, "cache", "arriving").iterdir()) == []
    )


def test_a_mixture_of_urls(built, url, tmp_path):
    mixed = open_remote([url, url], shares=[0.5, 0.5], cache=tmp_path / "cache")
    local = open_dataset([built.out, built.out], shares=[0.5, 0.5])
    mine, theirs = (ds.batches(batch_size=4, seed=1) for ds in (mixed, local))
    for _ in range(3):
        assert np.array_equal(next(mine)["tokens"], next(theirs)["tokens"])


def test_a_torch_data_loader_reads_it(built, url, tmp_path):
    torch_data = pytest.importorskip("torch.utils.data", reason="needs torch")
    local, remote = open_dataset(built.out), open_remote(url, cache=tmp_path / "cache")
    loader = torch_data.DataLoader(
        remote.with_columns(["tokens"], dtype=np.int64), batch_size=4, num_workers=2
    )
    for i, batch in enumerate(loader):
        rows = range(4 * i, min(4 * i + 4, len(local)))
        assert np.array_equal(batch["tokens"].numpy(), local.batch(rows)["tokens"])


def test_what_cannot_be_opened_is_said(built, url, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(DatasetError, match="nothing: there is no dataset.json"):
        open_remote(f"file://{tmp_path}/nothing", cache=cache)
    for arguments in (
        {"max_bytes": 0},
        {"max_bytes": 1.5},
        {"io": "x"},
        {"shares": [1]},
        {"max_open": 0},
    ):
        with pytest.raises(ArgumentError):
            open_remote(url, cache=cache, **arguments)
    for urls, shares in (([], []), ([url], None), ([url], [1, 1])):
        with pytest.raises(ArgumentError):
            open_remote(urls, cache=cache, shares=shares)
