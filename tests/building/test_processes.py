import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from packprep.building import processes
from packprep.building.processes import STOP_SIGNALS, in_processes, one_by_one
from packprep.errors import BuildError, SourceError, Stopped
from tests.made import ROOT, environment


def nothing(*_):
    pass


@pytest.mark.parametrize("given", ["", "0", "x", "-1", None])
def test_the_cpus_are_those_of_slurm_or_of_the_affinity(monkeypatch, given):
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: set(range(5)) if process == 0 else None
    )
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert processes.available_cpus() == 3
    (
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
        if given is not None
        else monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    )
    assert processes.available_cpus() == 5


# What workers run: found by their names in a new process.


def double(factor=2):
    def do(item, report):
        report(1, item, 0, 0)
        return item * factor

    return one_by_one(do)


def refuses():
    def do(item, report):
        if item == 3:
            raise SourceError("item 3: cannot be read")
        return item

    return one_by_one(do)


def breaks():
    def do(item, report):
        raise ZeroDivisionError("oh")

    return one_by_one(do)


def takes_too_much():
    def do(item, report):
        return bytearray(1 << 60)

    return one_by_one(do)


def broken_setup():
    raise SourceError("nothing works")


def dies():
    def do(item, report):
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return item

    return one_by_one(do)


def leaves():
    def do(item, report):
        os._exit(7)

    return one_by_one(do)


def waits():
    def do(item, report):
        for _ in range(600):
            time.sleep(0.1)
            report(0, 0, 0, 0)
        return item

    return one_by_one(do)


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_every_item_gives_its_result_once_and_every_report_arrives(workers):
    told = []
    results = list(
        in_processes(double, (3,), list(range(9)), workers, lambda *counts: told.append(counts))
    )
    assert sorted(results) == [(i, 3 * i) for i in range(9)]
    assert sorted(told) == [(1, i, 0, 0) for i in range(9)]


def lags():
    """The result of an item once the next one is there."""

    def do(items, report):
        last = []
        for item in items:
            yield from last
            last = [item * 2]
        yield from last

    return do


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_an_item_may_be_taken_before_the_result_of_the_last_one_is_given(workers, count):
    results = list(in_processes(lags, (), list(range(count)), workers, nothing))
    assert sorted(results) == [(i, 2 * i) for i in range(count)]


def dies_with_two():
    def do(items, report):
        taken = list(itertools.islice(items, 2))
        os.kill(os.getpid(), signal.SIGKILL)
        yield taken

    return do


def test_a_killed_worker_is_named_with_all_that_it_was_handed():
    with pytest.raises(
        BuildError, match=r"^(0|1) and (2|3): its worker process was killed by signal 9"
    ):
        list(in_processes(dies_with_two, (), list(range(6)), 2, nothing))


def dies_while_it_waits():
    def do(items, report):
        yield next(items)
        report(1, 0, 0, 0)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        yield next(items)

    return do


def test_a_worker_that_died_before_it_was_handed_what_it_asked_for_is_named():
    def told(*counts):
        deadline = time.monotonic() + 60
        while len(multiprocessing.active_children()) == 2 and time.monotonic() < deadline:
            time.sleep(0.01)

    with pytest.raises(BuildError, match="[0-5]: its worker process was killed by signal 9"):
        list(in_processes(dies_while_it_waits, (), list(range(6)), 2, told))


def stops():
    def do(item, report):
        if item == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return item

    return one_by_one(do)


@pytest.mark.long
def test_a_worker_that_reports_nothing_is_named_once_and_when_it_goes_on(monkeypatch):
    monkeypatch.setattr(processes, "SILENT_S", 0.3)
    told = []

    def say(message):
        if message.startswith("1: "):
            told.append(re.sub(r"process \d+", "process PID", message))
        if message.startswith("1: ") and " nothing " in message:
            go_on_when_stopped(int(re.findall(r"process (\d+)", message)[0]))

    results = list(in_processes(stops, (), [0, 1], 2, nothing, say=say))
    assert sorted(results) == [(0, 0), (1, 1)]
    silence = "1: worker process PID has reported nothing for 0.3 s. Waiting for it"
    assert told == [silence, "1: worker process PID reports again"]


def go_on_when_stopped(pid):
    deadline = time.monotonic() + 60
    while state_of(pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    threading.Timer(
        1, os.kill, (pid, signal.SIGCONT)
    ).start()  # in which time it could be said again


def leaves_between_two():
    def do(items, report):
        yield next(iter(items))
        os._exit(7)

    return do


@pytest.mark.long
def test_a_worker_that_ends_with_nothing_to_do_is_named_without_an_item():
    with pytest.raises(
        BuildError, match="^a worker process ended with status 7\nhint: run the same command again"
    ):
        list(in_processes(leaves_between_two, (), list(range(6)), 2, nothing))


@pytest.mark.parametrize("workers", [1, 2])
def test_no_items_need_no_process(workers):
    assert list(in_processes(broken_setup, (), [], workers, nothing)) == []


def test_without_workers_all_is_done_here():
    seen = []

    def setup():
        return one_by_one(lambda item, report: seen.append(os.getpid()))

    list(in_processes(setup, (), ["one"], 0, nothing))
    assert seen == [os.getpid()]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_of_a_worker_is_raised_as_it_is(workers):
    with pytest.raises(SourceError, match="item 3: cannot be read"):
        list(in_processes(refuses, (), list(range(6)), workers, nothing))
    with pytest.raises(SourceError, match="nothing works"):
        list(in_processes(broken_setup, (), list(range(6)), workers, nothing))


def test_a_fault_in_a_worker_is_a_build_error_with_its_traceback():
    with pytest.raises(BuildError, match="item|0|1") as caught:
        list(in_processes(breaks, (), [0, 1], 2, nothing))
    assert "ZeroDivisionError: oh" in str(caught.value) and "report it" in str(caught.value)


def test_a_worker_without_memory_says_so_and_shows_no_traceback():
    with pytest.raises(BuildError, match="out of memory\nhint: free memory") as caught:
        list(in_processes(takes_too_much, (), [0], 1, nothing))
    assert "Traceback" not in str(caught.value)


def test_a_killed_worker_is_named_with_its_item_its_signal_and_what_to_do():
    cleaned = []
    with pytest.raises(
        BuildError,
        match=(
            "2: its worker process was killed by signal 9, which the kernel does to .*\nhint: run the"
            " same command again with fewer --workers"
        ),
    ):
        list(in_processes(dies, (), list(range(6)), 2, nothing, cleaned.append))
    assert len(set(cleaned)) == 2 and os.getpid() not in cleaned


def test_a_worker_that_leaves_is_named_with_its_status():
    with pytest.raises(
        BuildError, match="its worker process ended with status 7\nhint: run the same command again"
    ):
        list(in_processes(leaves, (), [0, 1], 2, nothing))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_the_work_soon_no_process_is_left_and_the_handlers_are_those_before(number):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    threading.Timer(1, os.kill, (os.getpid(), number)).start()
    with pytest.raises(
        Stopped, match="committed work is kept. Run the same command again"
    ) as caught:
        list(in_processes(waits, (), list(range(4)), 2, nothing))
    assert caught.value.exit_status == 75 and multiprocessing.active_children() == []
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def signalled():
    def do(item, report):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

    return one_by_one(do)


def test_a_signal_that_a_worker_hears_first_is_a_stop_and_no_fault():
    with pytest.raises(Stopped, match="Run the same command again"):
        list(in_processes(signalled, (), [0, 1], 2, nothing))


DEAF = """
import hashlib, sys
from packprep.building.processes import in_processes, one_by_one
from packprep.errors import Stopped

def setup():
    def do(item, report):
        print("begun", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)  # hours inside of a library
    return one_by_one(do)

try:
    list(in_processes(setup, (), ["one"], 1, print, lambda pid: print("cleaned", flush=True)))
except Stopped as error:
    sys.exit(error.exit_status)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_process_that_is_deep_in_a_library_ends_with_75_all_the_same(number):
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and out == "cleaned\n" and err == ""


@pytest.mark.parametrize("workers", [0, 2])
def test_no_thread_and_no_descriptor_is_left_behind(workers):
    # a server of processes stays, once it runs
    list(in_processes(double, (), [1, 2], workers, nothing))
    before = os.listdir("/proc/self/fd"), threading.active_count()
    list(in_processes(double, (), [1, 2], workers, nothing))
    with pytest.raises(SourceError):
        list(in_processes(broken_setup, (), [1], workers, nothing))
    assert (os.listdir("/proc/self/fd"), threading.active_count()) == before


def test_who_stops_taking_results_leaves_no_process():
    results = in_processes(double, (), list(range(20)), 2, nothing)
    next(results)
    assert multiprocessing.active_children()
    results.close()
    assert multiprocessing.active_children() == []


# Where processes come from. These run in a process of their own, whose threads are known.

ALONE = """
import os, sys, threading, time
from packprep.building import processes
from tests.building.test_processes import nothing, where, waits
"""


def alone(code, *arguments, **changes):
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **changes}
    command = [sys.executable, "-c", ALONE + code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def where():
    def do(item, report):
        time.sleep(0.05)
        return os.getpid(), os.getppid()

    return one_by_one(do)


@pytest.mark.parametrize("threads", [0, 1])
def test_workers_are_forked_from_here_unless_threads_run_here(threads):
    said, _ = alone(f"""
for _ in range({threads}):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
results = [result for _, result in processes.in_processes(where, (), list(range(6)), 2, nothing)]
print(all(pid != os.getpid() for pid, _ in results), {{parent == os.getpid() for _, parent in results}})
""").communicate(timeout=60)
    assert said.split() == ["True", "{True}" if not threads else "{False}"]


BESIDE_A_THREAD = """
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
try:
    print(len(list(processes.in_processes(where, (), list(range(6)), 2, nothing))), os.environ["TMPDIR"])
except processes.BuildError as error:
    print(error)
"""


@pytest.mark.long
def test_workers_start_under_a_temporary_folder_of_any_length(tmp_path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    said, _ = alone(BESIDE_A_THREAD, TMPDIR=str(folder)).communicate(timeout=60)
    assert said == f"6 {folder}\n" and not list(folder.iterdir())
    said, _ = alone(
        "processes._SHORT_FOLDERS = ()" + BESIDE_A_THREAD, TMPDIR=str(folder)
    ).communicate(timeout=60)
    assert f"TMPDIR = {folder}" in said and "set TMPDIR to a folder of at most 75 bytes" in said
    with tempfile.TemporaryDirectory(dir="/tmp") as near:
        for length, works in ((75, True), (76, False)):
            folder = Path(near) / ("x" * (length - len(near) - 1))
            folder.mkdir()
            said, _ = alone(
                "processes._SHORT_FOLDERS = ()" + BESIDE_A_THREAD, TMPDIR=str(folder)
            ).communicate(timeout=60)
            assert said.startswith("6 ") == works, said


@pytest.mark.parametrize("threads", [0, 1])
def test_workers_end_when_their_parent_is_killed(threads):
    process = alone(f"""
for _ in range({threads}):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def told(*counts):
    print(*processes.multiprocessing.active_children(), flush=True)
list(processes.in_processes(waits, (), list(range(3)), 3, told))
""")
    workers = [int(pid) for pid in re.findall(r"pid=(\d+)", process.stdout.readline())]
    assert len(workers) == 3
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state_of(pid):
    """The state's letter; "Z" for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_outside_of_the_main_thread_signals_are_the_caller_s():
    before, found = signal.getsignal(signal.SIGTERM), []

    def work():
        for item, _ in in_processes(double, (), [1, 2], 1, nothing):
            found.append((item, signal.getsignal(signal.SIGTERM) == before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(1, True), (2, True)]
