"""Processes that fork while their threads read, as DataLoader starts workers beside a
prefetcher."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import packprep
from packprep.forking import lazy, unforked
from packprep.kernel import kernel
from tests.dataset.synthetic import make_dataset

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
FORKS = 12


def ended(child, seconds=20):
    """Whether a child ends, with status 0, in time; it is killed where it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def forked(action):
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return ended(child)


def opened(folder, **options):
    return packprep.open_dataset(folder / "a", **options)


def mixed(folder, **options):
    shares = [(0, [0.9, 0.1]), (64, [0.5, 0.5])]
    return packprep.open_dataset([folder / "a", folder / "b"], shares=shares, **options)


def rows(ds):
    for _ in range(3):
        ds.batch(range(len(ds)))
        ds.row(len(ds) - 1).segments  # noqa: B018


def batches(ds):
    for batch in ds.batches(4, seed=1, samples=32):
        assert len(batch["tokens"])


def balanced(ds):
    for batch in ds.batches(2, seed=1, samples=32, balance=("attention", 4), window=16):
        assert len(batch["tokens"])


FEW, PREAD = {"max_open": 2}, {"io": "pread", "max_open": 2}


@pytest.mark.alike(4)
@pytest.mark.parametrize(
    "open_it, options, read",
    [
        (opened, FEW, rows),
        (opened, {}, batches),
        (mixed, {}, batches),
        *((mixed, options, rows) for options in ({}, FEW, PREAD)),
        *((opened, options, balanced) for options in (FEW, PREAD)),
        (mixed, FEW, balanced),
    ],
)
def test_children_read_that_were_forked_while_threads_read(tmp_path, open_it, options, read):
    for name in ("a", "b"):
        make_dataset(tmp_path / name, rows_per_shard=[1] * 9)
    shared, stop = open_it(tmp_path, **options), threading.Event()

    def prefetch(own):
        while not stop.is_set():
            read(shared if own is None else open_it(tmp_path, **options))

    threads = [threading.Thread(target=prefetch, args=(own,)) for own in (None, None, "its own")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(FORKS):
            assert forked(lambda: read(shared)), "a child hangs or fails"
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_process_that_forks_while_a_thread_imports_the_loader(tmp_path):
    make_dataset(tmp_path, rows_per_shard=[3])
    script = f"""if True:
        import os, threading, time, packprep
        read = lambda: packprep.open_dataset({str(tmp_path)!r}).batch([0, 1, 2])
        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(.01)  # numpy takes longer to import
        children = []
        for _ in range(8):
            child = os.fork()
            if child == 0:
                read()
                os._exit(0)
            children.append(child)
        thread.join()
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


def test_reading_imports_nothing():
    golden = [str(path) for path in sorted((Path(__file__).parent / "golden").glob("law[23]/*"))]
    script = f"""if True:
        import sys, packprep.dataset.loader as loader
        before = set(sys.modules)
        for folder in {golden}:
            try:
                ds = loader.open_dataset(folder)
            except loader.DatasetError:  # several lengths
                continue
            for batch in ds.batches(3, epochs=2, redraw=folder.endswith(("in_place", "ul2r", "untrained", "supervised"))):
                pass
            for batch in ds.batches(3, epochs=1, balance=("attention", 2), window=12):
                pass
            row = ds.row(0)
            row.segments, row.media, row.weighted_ranges, row.loss_weights, str(ds), ds._repr_html_()
            mixed = loader.open_dataset([folder, folder], shares=[(0, [1, 2]), (9, [2, 1])], interpolate="linear")
            for batch in mixed.batches(3, samples=12):
                pass
            mixed.delivered({{"rows": 12, "seed": 0, "shuffle": True}})
        print(sorted(set(sys.modules) - before))
    """
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert found.stdout == "[]\n"


def test_a_fork_waits_for_what_runs_unforked():
    inside, held = threading.Event(), []

    def work():
        with unforked():
            inside.set()
            time.sleep(0.05)
            held.append("ended")

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        with unforked():
            os._exit(0 if held == ["ended"] else 1)
    thread.join()
    assert ended(child)


def test_a_fork_waits_for_a_kernel_that_is_compiled():
    @kernel
    def first(n):
        return n + 1

    @kernel
    def second(n):
        return n + 2

    first(1)  # numba is loaded, and its lock known
    thread = threading.Thread(target=lambda: [second(n) for n in (1, 1.5, 1j)])
    thread.start()
    for _ in range(4):
        time.sleep(0.02)
        assert forked(lambda: first(1.5))
    thread.join()


def test_a_lazy_attribute_is_computed_once_and_kept():
    class Made:
        count = 0

        @lazy
        def value(self):
            """What it is."""
            self.count += 1
            return self.count

    made = Made()
    assert (made.value, made.value, made.count) == (1, 1, 1)
    assert Made.value.__doc__ == "What it is." and vars(made)["value"] == 1
