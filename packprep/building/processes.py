"""Work spread over processes: items in, results out. The only file that forks.

A worker is handed an item when it asks for one. Whoever is killed leaves temporaries at most; the
parent notices and says so. Workers are forked from this process, with all that it has loaded, as
long as it has one thread; else by a server without any. The parent does no work of its own, so that
it hears a signal at once, whatever library a worker is in.
"""

import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from packprep import messages
from packprep.errors import NO_MEMORY, BuildError, PackprepError, Stopped

Report = Callable[[int, int, int, int], None]
"""(documents, text bytes, tokens, rejects): what was done since the last report."""
Do = Callable[[Iterable[Any], Report], Iterator[Any]]
"""The result of each item, in their order. It may take the next item before it gives the result of
the last one."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED = "by a signal; what is committed stays, and the same command goes on"
STOP_S = 5.0
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
SILENT_S = 30.0
"""After so long without a word from a worker, it is said whom the work waits for."""
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_MOST_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")
_STOPPED_CODES = {-number for number in STOP_SIGNALS}
_THREADS, _ENDING_MS = "/proc/self/task", 20


def one_by_one(do: Callable[[Any, Report], Any]) -> Do:
    """A Do that gives the result of each item before it takes the next."""
    return lambda items, report: (do(item, report) for item in items)


def available_cpus() -> int:
    """The CPUs that this process may use: SLURM_CPUS_PER_TASK, or its affinity."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0))


def free_memory() -> int:
    """The bytes of memory that this process and its workers may take: what the machine has free, or
    a job's limit leaves."""
    meminfo = Path("/proc/meminfo").read_text()
    free = [
        int(found[1]) << 10 for found in re.finditer(r"^MemAvailable: *(\d+) kB$", meminfo, re.M)
    ]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            free += _left_by_limits(
                Path("/sys/fs/cgroup", controllers), path, *_LIMITS[controllers]
            )
    return max(0, min(free))


def free_addresses() -> int | None:
    """The bytes that this process may still take below its limit, `ulimit -v`, which each worker
    has, too; None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(
        0, limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    )


_LIMITS = {"": ("memory.max", "anon"), "memory": ("memory.limit_in_bytes", "rss")}
"""Of both versions of control groups: the file of a group's limit, and what counts of its
memory.stat; the rest is given back."""


def _left_by_limits(root: Path, path: str, limit: str, used: str) -> Iterator[int]:
    """What the limit of a control group, and those of the groups above it, leave."""
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError, TypeError):  # no such file here, or "max"
            most = int((folder / limit).read_text())
            found = re.search(
                rf"^(?:total_)?{used} (\d+)$", (folder / "memory.stat").read_text(), re.M
            )
            yield most - int(found[1])  # type: ignore[index]
        if folder == root:
            return


def _context() -> Any:
    """How processes begin: by a fork, so that they have what this process has loaded; by a server
    where threads run here.

    A fork copies one thread: a lock that another holds is never released in the copy.
    """
    if _may_be_forked():
        return multiprocessing.get_context("fork")
    _keep_sockets_near()
    return multiprocessing.get_context("forkserver")


def _keep_sockets_near() -> None:
    """Have multiprocessing make the server's socket where its path is short enough, however long
    TMPDIR is.

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
        f"TMPDIR is {given}, and worker processes need a socket, whose path ends at 107 bytes: set"
        f" TMPDIR to a folder of at most {_MOST_FOLDER_BYTES} bytes, or give --workers 1"
    )


def _may_be_forked() -> bool:
    """Whether this process has no threads but such as are prepared for a fork: pyarrow's allocator
    stops its own."""
    for _ in range(_ENDING_MS):  # a thread that was waited for is gone a moment later
        try:
            names = [
                Path(f"/proc/self/task/{thread}/comm").read_text().strip()
                for thread in os.listdir(_THREADS)
            ]
        except FileNotFoundError:
            names = []
        if len(names) - names.count("jemalloc_bg_thd") == 1:
            return True
        time.sleep(0.001)
    return False


def in_processes(
    setup: Callable[..., Do],
    arguments: Sequence[Any],
    items: Sequence[Any],
    workers: int,
    report: Report,
    clean: Callable[[int], None] = lambda pid: None,
    on_start: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda message: None,
) -> Generator[tuple[Any, Any], None, None]:
    """(item, result) of each item, as they come; `setup(*arguments)` gives a process its function.

    workers: how many processes, one for each item at most; 0: all is done here, and signals are the
    caller's. clean(pid) removes what an ended worker may have left behind. on_start: called once
    the workers are at work, or before this process is. say: told of a worker that reports nothing
    for SILENT_S, and that it goes on. Raises what a worker raised, BuildError for one that was
    killed, Stopped after SIGTERM, SIGINT or SIGUSR1.
    """
    if not workers or not items:
        on_start()
        if items:
            yield from zip(items, setup(*arguments)(iter(items), report), strict=True)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context, waiting = _context(), deque(items)
    everyone: dict[Connection, _Worker] = {}
    with _signals_noted() as signals, _ended(everyone, clean):
        for _ in range(min(workers, len(items))):
            here, there = context.Pipe()
            is_forked = context.get_start_method() == "fork"
            ours, environment = ([here, *everyone], None) if is_forked else ([], dict(os.environ))
            process = context.Process(
                target=_work, args=(there, ours, environment, setup, arguments), daemon=True
            )
            process.start()
            there.close()
            everyone[here] = _Worker(process, deque([waiting.popleft()]))
            _tell(here, everyone[here].handed[0])
        on_start()
        while at_work := {here: worker for here, worker in everyone.items() if not worker.is_done}:
            if signals:
                raise Stopped(STOPPED)
            for here in wait(list(at_work), timeout=0.2):
                assert isinstance(here, Connection)
                worker = at_work[here]
                if worker.heard == math.inf:
                    say(f"{worker}worker process {worker.process.pid} goes on")
                worker.heard = time.monotonic()
                try:
                    kind, value = here.recv()
                except (EOFError, ConnectionResetError):
                    raise worker.lost() from None
                if kind == "report":
                    report(*value)
                elif kind == "say":
                    messages.say(*value)
                elif kind == "next":
                    item = waiting.popleft() if waiting else None
                    _tell(here, item)
                    if item is None:
                        worker.is_last = True
                    else:
                        worker.handed.append(item)
                elif kind == "done":
                    yield worker.handed.popleft(), value
                elif kind == "error":
                    raise value
                else:
                    raise BuildError(
                        f"{worker}a worker failed; this is a fault of packprep, report it:\n{value}"
                    )
            for worker in at_work.values():
                if time.monotonic() - worker.heard >= SILENT_S:
                    worker.heard = math.inf
                    say(
                        f"{worker}worker process {worker.process.pid} has reported nothing for"
                        f" {SILENT_S:g} s; waiting for it"
                    )


@dataclass
class _Worker:
    """A worker process as its parent knows it; as text, what an error begins with.

    handed: the items of which it has given no result. is_last: it was told that there are no more.
    heard: when it reported last; infinite once its silence was noticed.
    """

    process: Any
    handed: deque[Any]
    is_last: bool = False
    heard: float = field(default_factory=time.monotonic)

    @property
    def is_done(self) -> bool:
        return self.is_last and not self.handed

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.handed))}: " if self.handed else ""

    def lost(self) -> PackprepError:
        """The error for one that ended without a word: Stopped where a signal to the whole group
        reached it first."""
        self.process.join(STOP_S)
        code = self.process.exitcode
        if code in _STOPPED_CODES:
            return Stopped(STOPPED)
        how = (
            f"killed by signal {-code}"
            if code is not None and code < 0
            else f"ended with status {code}"
        )
        hint = ""
        if code == -signal.SIGKILL:
            hint = (
                " (the kernel kills what uses too much memory: try fewer --workers or a smaller"
                " output.shard_text_bytes)"
            )
        whose = "its" if self.handed else "a"
        return BuildError(
            f"{self}{whose} worker process was {how}{hint}; run the same command again: what is"
            " committed stays"
        )


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """While this lasts, STOP_SIGNALS are put into the list that it gives, instead of obeyed."""
    noted: list[int] = []
    try:
        before = {s: signal.signal(s, lambda number, _: noted.append(number)) for s in STOP_SIGNALS}
    except ValueError:  # not in the main thread: the caller handles signals
        before = {}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ended(everyone: Mapping[Connection, _Worker], clean: Callable[[int], None]) -> Iterator[None]:
    """In the end no worker is left, and `clean` has removed what each may have left behind."""
    try:
        yield
    finally:
        for connection, worker in everyone.items():
            connection.close()
            worker.process.terminate()
        for worker in everyone.values():
            worker.process.join(STOP_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            clean(worker.process.pid)
            worker.process.close()


def _work(
    connection: Connection,
    inherited: Sequence[Connection],
    environment: Mapping[str, str] | None,
    setup: Callable[..., Do],
    arguments: Sequence[Any],
) -> None:
    """inherited: the parent's ends of pipes, of which a fork leaves copies: they would hide that
    the parent is gone.

    environment: the parent's, for a server of forks keeps the one that it began with.
    """
    gc.freeze()  # what is shared with the parent is not to be copied by a search for garbage
    _keep_memory()
    for copy in inherited:
        copy.close()
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)

    # shards are written by a thread of their own, which may have something to say
    sending = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with sending:
            connection.send((kind, value))

    def say(*said: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send("say", said)

    def handed() -> Iterator[Any]:
        while (item := connection.recv()) is not None:
            yield item
            send("next", None)

    try:
        with messages.heard_by(say):
            for result in setup(*arguments)(handed(), lambda *counts: send("report", counts)):
                send("done", result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, or has no more work
    except PackprepError as error:
        _tell(connection, ("error", error))
    except MemoryError:
        _tell(connection, ("error", BuildError(NO_MEMORY)))
    except BaseException:
        _tell(connection, ("fault", traceback.format_exc()))


def _keep_memory() -> None:
    """Have the memory of one shard serve the next: fresh pages cost more than what is written to
    them.

    glibc, where it is that, gives large blocks from its heap and not from new pages, and leaves the
    heap's end as it is.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _tell(connection: Connection, message: Any) -> None:
    try:
        connection.send(message)
    except (BrokenPipeError, ConnectionResetError):
        return  # nobody is left to be told; who reads the connection next finds that out
