"""Work spread over processes: items in, results out. The only file that forks.

A worker is handed an item when it asks for one. Whoever is killed leaves temporaries at most; the parent notices and says so.
Workers are forked from this process, with all that it has loaded, as long as it has one thread; else by a server without any.
"""

import gc
import math
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from packprep.building.signals import STOP_SIGNALS, STOPPED, ended_by_signals
from packprep.errors import BuildError, PackprepError, Stopped

Report = Callable[[int, int, int, int], None]
"""(documents, text bytes, tokens, rejects): what was done since the last report."""
Do = Callable[[Iterable[Any], Report], Iterator[Any]]
"""The result of each item, in their order. It may take the next item before it gives the result of the last one."""

STOP_S = 5.0
SILENT_S = 30.0
"""After so long without a word from a worker, it is said whom the work waits for."""
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_MOST_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")
_STOPPED_CODES = {-number for number in STOP_SIGNALS}


def one_by_one(do: Callable[[Any, Report], Any]) -> Do:
    """A Do that gives the result of each item before it takes the next."""
    return lambda items, report: (do(item, report) for item in items)


def available_cpus() -> int:
    """The CPUs that this process may use: SLURM_CPUS_PER_TASK, or its affinity."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0))


def _context() -> Any:
    """How processes begin: by a fork, so that they have what this process has loaded; by a server where threads run here.

    A fork copies one thread: a lock that another holds is never released in the copy.
    """
    if _may_be_forked():
        return multiprocessing.get_context("fork")
    _keep_sockets_near()
    return multiprocessing.get_context("forkserver")


def _keep_sockets_near() -> None:
    """Have multiprocessing make the server's socket where its path is short enough, however long TMPDIR is.

    BuildError where no such folder can be written.
    """
    before, given = tempfile.tempdir, tempfile.gettempdir()
    for folder in (given, *_SHORT_FOLDERS):
        if len(os.fsencode(folder)) <= _MOST_FOLDER_BYTES and os.access(folder, os.W_OK | os.X_OK):
            try:
                tempfile.tempdir = folder
                get_temp_dir()  # made once, and kept
            finally:
                tempfile.tempdir = before
            return
    raise BuildError(
        f"TMPDIR is {given}, and worker processes need a socket, whose path ends at 107 bytes: set TMPDIR to a folder of at "
        f"most {_MOST_FOLDER_BYTES} bytes, or give --workers 1"
    )


def _may_be_forked() -> bool:
    """Whether this process has no threads but such as are prepared for a fork: pyarrow's allocator stops its own."""
    try:
        names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    except OSError:  # no Linux, or a thread that ended meanwhile
        return False
    return len(names) - names.count("jemalloc_bg_thd") == 1


def spread(
    setup: Callable[..., Do],
    arguments: Sequence[Any],
    items: Sequence[Any],
    workers: int,
    report: Report,
    stop_asked: Callable[[], bool],
    clean: Callable[[int], None] = lambda pid: None,
    started: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda message: None,
) -> Generator[tuple[Any, Any], None, None]:
    """(item, result) of each item, as they come; `setup(*arguments)` gives a process its function.

    With one worker, or one item, all is done here. clean(pid) removes what an ended worker may have left behind.
    started: called once the workers are at work, or before this process is. say: told of a worker that reports nothing for
    SILENT_S, and that it goes on.
    Raises what a worker raised, BuildError for one that was killed, Stopped once `stop_asked()`.
    """
    if workers == 1 or len(items) <= 1:
        started()
        yield from _here(setup, arguments, items, report, stop_asked, clean)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = _context()
    waiting = deque(items)
    processes: dict[Connection, Any] = {}
    at_work: dict[Connection, deque[Any]] = {}  # what it was handed and has given no result of
    told_last: set[Connection] = set()  # who was told that there is no more
    heard: dict[Connection, float] = {}  # when each reported last, or was said to be silent: then it is infinite
    try:
        for _ in range(min(workers, len(items))):
            here, there = context.Pipe()
            is_forked = context.get_start_method() == "fork"
            ours, environment = ([here, *processes], None) if is_forked else ([], dict(os.environ))
            process = context.Process(target=_worker, args=(there, ours, environment, setup, arguments), daemon=True)
            process.start()
            there.close()
            processes[here] = process
            at_work[here] = deque([waiting.popleft()])
            _tell(here, at_work[here][0])
            heard[here] = time.monotonic()
        started()
        while at_work:
            if stop_asked():
                raise Stopped(STOPPED)
            for ready in wait(list(at_work), timeout=0.2):
                assert isinstance(ready, Connection)
                handed = at_work[ready]
                if heard[ready] == math.inf:
                    say(f"{_with(handed)}worker process {processes[ready].pid} goes on")
                heard[ready] = time.monotonic()
                try:
                    kind, value = ready.recv()
                except (EOFError, ConnectionResetError):
                    processes[ready].join(STOP_S)
                    if (
                        processes[ready].exitcode in _STOPPED_CODES
                    ):  # a signal to the whole group, which this process is yet to hear
                        raise Stopped(STOPPED) from None
                    raise _lost(processes[ready].exitcode, handed) from None
                if kind == "report":
                    report(*value)
                elif kind == "next":
                    item = waiting.popleft() if waiting else None
                    _tell(ready, item)
                    if item is None:
                        told_last.add(ready)
                    else:
                        handed.append(item)
                elif kind == "done":
                    yield handed.popleft(), value
                elif kind == "error":
                    raise value
                else:
                    raise BuildError(
                        f"{_with(handed)}a worker failed; this is a fault of packprep, report it:\n{value}"
                    )
                if ready in told_last and not handed:
                    del at_work[ready]
            for silent, handed in at_work.items():
                if time.monotonic() - heard[silent] >= SILENT_S:
                    heard[silent] = math.inf
                    say(
                        f"{_with(handed)}worker process {processes[silent].pid} has reported nothing for {SILENT_S:g} s; "
                        "waiting for it"
                    )
    finally:
        _end(processes, clean)


def _here(
    setup: Callable[..., Do],
    arguments: Sequence[Any],
    items: Sequence[Any],
    report: Report,
    stop_asked: Callable[[], bool],
    clean: Callable[[int], None],
) -> Iterator[tuple[Any, Any]]:
    def report_or_stop(*counts: int) -> None:
        report(*counts)
        if stop_asked():
            raise Stopped(STOPPED)

    def until_stopped() -> Iterator[Any]:
        for item in items:
            if stop_asked():
                raise Stopped(STOPPED)
            yield item

    if not items:
        return
    with ended_by_signals(clean):
        yield from zip(items, setup(*arguments)(until_stopped(), report_or_stop), strict=True)


def _worker(
    connection: Connection,
    inherited: Sequence[Connection],
    environment: Mapping[str, str] | None,
    setup: Callable[..., Do],
    arguments: Sequence[Any],
) -> None:
    """inherited: the parent's ends of pipes, of which a fork leaves copies: they would hide that the parent is gone.

    environment: the parent's, for a server of forks keeps the one that it began with.
    """
    gc.freeze()  # what is shared with the parent is not to be copied by a search for garbage
    for copy in inherited:
        copy.close()
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)

    def handed() -> Iterator[Any]:
        while (item := connection.recv()) is not None:
            yield item
            connection.send(("next", None))

    try:
        for result in setup(*arguments)(handed(), lambda *counts: connection.send(("report", counts))):
            connection.send(("done", result))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, or has no more work
    except PackprepError as error:
        _tell(connection, ("error", error))
    except BaseException:
        _tell(connection, ("fault", traceback.format_exc()))


def _tell(connection: Connection, message: Any) -> None:
    try:
        connection.send(message)
    except (BrokenPipeError, ConnectionResetError):
        return  # nobody is left to be told; who reads the connection next finds that out


def _with(items: Sequence[Any]) -> str:
    """What an error begins with: the items that a worker had; nothing where it had none."""
    return f"{' and '.join(map(str, items))}: " if items else ""


def _lost(code: int | None, items: Sequence[Any]) -> BuildError:
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    hint = ""
    if code == -signal.SIGKILL:
        hint = " (the kernel kills what uses too much memory: try fewer --workers or a smaller output.shard_text_bytes)"
    whose = "its" if items else "a"
    return BuildError(
        f"{_with(items)}{whose} worker process was {how}{hint}; run the same command again: what is committed stays"
    )


def _end(processes: Mapping[Connection, Any], clean: Callable[[int], None]) -> None:
    for connection, process in processes.items():
        connection.close()
        process.terminate()
    for process in processes.values():
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
            process.join()
        clean(process.pid)
