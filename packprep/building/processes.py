"""Distribute items over worker processes and collect the results. Only this file forks.

A worker gets an item when it asks for one. If a worker is killed, it leaves only temporary files,
and the parent reports its death. Workers are forked from this process and inherit everything that
is loaded. If this process has more than one thread, a fork server without threads starts the
workers instead. The parent does no work itself, so that it reacts to a signal at once, even if
workers are inside a library call.
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
"""A callback. Its arguments count documents, text bytes, tokens and rejects since its last call."""
Do = Callable[[Iterable[Any], Report], Iterator[Any]]
"""A function of (items, report). It yields the result of each item, in the order of the items.

It may take the next item before it yields the result of the previous item.
"""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED = "by a signal; committed work is kept. Run the same command again"
STOP_S = 5.0
COLLECTED_OBJECTS = 100_000
"""Number of new objects after which a worker collects garbage. Python's default is 700."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # constants of malloc.h
SILENT_S = 30.0
"""A message names a worker that has reported nothing for this many seconds."""
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_MOST_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")
_STOPPED_CODES = {-number for number in STOP_SIGNALS}
_THREADS, _ENDING_MS = "/proc/self/task", 20


def one_by_one(do: Callable[[Any, Report], Any]) -> Do:
    """Return a `Do` that yields the result of `do` for each item before it takes the next item."""
    return lambda items, report: (do(item, report) for item in items)


def available_cpus() -> int:
    """Return the number of CPUs that this process may use.

    It is SLURM_CPUS_PER_TASK if set, otherwise the number of CPUs in the process's affinity.
    """
    cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(cpus) if cpus.isdigit() and int(cpus) else len(os.sched_getaffinity(0))


def free_memory() -> int:
    """Return the bytes of memory that this process and its workers may allocate.

    This is the minimum of the machine's available memory and the memory that the control groups of
    this process allow.
    """
    meminfo = Path("/proc/meminfo").read_text()
    free = [
        int(match[1]) << 10 for match in re.finditer(r"^MemAvailable: *(\d+) kB$", meminfo, re.M)
    ]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            free += _left_by_limits(
                Path("/sys/fs/cgroup", controllers), path, *_LIMITS[controllers]
            )
    return max(0, min(free))


def free_addresses() -> int | None:
    """Return the bytes of address space that this process may still allocate; None without a limit.

    The limit is `ulimit -v`, which applies to each worker separately.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(
        0, limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    )


_LIMITS = {"": ("memory.max", "anon"), "memory": ("memory.limit_in_bytes", "rss")}
"""{controller: (file with the memory limit, entry of memory.stat with the used memory)}.

The controller is "" in version 2 of control groups, and "memory" in version 1. Other entries of
memory.stat count memory that the kernel can reclaim.
"""


def _left_by_limits(root: Path, path: str, limit: str, used: str) -> Iterator[int]:
    """Yield the bytes of memory that a control group and each of its parents may still use.

    Args:
        root: The folder where control groups are mounted.
        path: The path of the group below `root`.
        limit: The file with a group's limit, from `_LIMITS`.
        used: The entry of memory.stat that counts as used, from `_LIMITS`.
    """
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError, TypeError):  # The file is missing, or "max".
            limit_bytes = int((folder / limit).read_text())
            match = re.search(
                rf"^(?:total_)?{used} (\d+)$", (folder / "memory.stat").read_text(), re.M
            )
            yield limit_bytes - int(match[1])  # type: ignore[index]
        if folder == root:
            return


def _context() -> Any:
    """Return the multiprocessing context: fork, or a fork server if this process has threads.

    Forked processes share all loaded objects. A fork copies only one thread, so a lock that another
    thread holds would never be released in the copy.
    """
    if _may_be_forked():
        return multiprocessing.get_context("fork")
    _keep_sockets_near()
    return multiprocessing.get_context("forkserver")


def _keep_sockets_near() -> None:
    """Make multiprocessing create the fork server's socket in a folder with a short path.

    The path of a socket has at most 107 bytes, and the path of TMPDIR may be too long for that.

    Raises:
        BuildError: If no folder with a short path is writable.
    """
    folder_before, given_folder = tempfile.tempdir, tempfile.gettempdir()
    for folder in (given_folder, *_SHORT_FOLDERS):
        if len(os.fsencode(folder)) <= _MOST_FOLDER_BYTES and os.access(folder, os.W_OK | os.X_OK):
            try:
                tempfile.tempdir = folder
                get_temp_dir()  # The first call creates the folder for all later calls.
            finally:
                tempfile.tempdir = folder_before
            return
    raise BuildError(
        f"TMPDIR = {given_folder} is too long for the sockets of worker processes, whose paths"
        " have at most 107 bytes\n"
        f"hint: set TMPDIR to a folder of at most {_MOST_FOLDER_BYTES} bytes, or give --workers 1"
    )


def _may_be_forked() -> bool:
    """Return whether this process has no threads other than pyarrow's allocator thread.

    A fork is safe with this thread, because pyarrow stops it before the fork.
    """
    for _ in range(_ENDING_MS):  # A joined thread disappears only after a moment.
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
    """Yield each item with its result, in the order of completion.

    Args:
        setup: Called as `setup(*arguments)` in each process. It returns the process's `Do`.
        arguments: The arguments of `setup`.
        items: The items.
        workers: Number of processes, at most one per item. 0 does all work in this process and
            leaves signals to the caller.
        report: Called with the numbers of documents, text bytes, tokens and rejects since the
            previous call for the same worker.
        clean: Called as `clean(pid)` for each ended worker, to remove its temporary files.
        on_start: Called once the workers have started, or before this process starts to work.
        say: Receives a message if a worker reports nothing for SILENT_S, and when it reports again.

    Raises:
        PackprepError: If a worker raises it.
        BuildError: If a worker is killed or fails.
        Stopped: After SIGTERM, SIGINT or SIGUSR1.
    """
    # Without workers, the caller keeps its signal handlers, and no process starts.
    if not workers or not items:
        on_start()
        if items:
            yield from zip(items, setup(*arguments)(iter(items), report), strict=True)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context, waiting = _context(), deque(items)
    everyone: dict[Connection, _Worker] = {}
    with _signals_noted() as signals, _ended(everyone, clean):
        # The first item goes out at once, so that workers do not wait for this loop.
        for _ in range(min(workers, len(items))):
            connection, process = _started(context, everyone, setup, arguments)
            everyone[connection] = _Worker(process, deque([waiting.popleft()]))
            _tell(connection, everyone[connection].handed[0])
        on_start()
        # Each item goes to the first worker that asks for one. This loop also detects lost and
        # silent workers, because a worker that the kernel kills cannot report anything.
        while at_work := {pipe: worker for pipe, worker in everyone.items() if not worker.is_done}:
            if signals:
                raise Stopped(STOPPED)
            for pipe in wait(list(at_work), timeout=0.2):
                assert isinstance(pipe, Connection)
                worker = at_work[pipe]
                if worker.heard == math.inf:
                    say(f"{worker}worker process {worker.process.pid} reports again")
                worker.heard = time.monotonic()
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise worker.lost() from None
                if kind == "report":
                    report(*value)
                elif kind == "say":
                    messages.say(*value)
                # A worker asks for an item while it still writes its last one, so it can have two.
                elif kind == "next":
                    item = waiting.popleft() if waiting else None
                    _tell(pipe, item)
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
                        f"{worker}a worker failed because of a bug in packprep\n"
                        "hint: report it:\n"
                        f"{value}"
                    )
            # A silent worker may still work, for example on a slow disk. Report its silence once,
            # and wait.
            for worker in at_work.values():
                if time.monotonic() - worker.heard >= SILENT_S:
                    worker.heard = math.inf
                    say(
                        f"{worker}worker process {worker.process.pid} has reported nothing for"
                        f" {SILENT_S:g} s. Waiting for it"
                    )


def _started(
    context: Any,
    other_connections: Iterable[Connection],
    setup: Callable[..., Do],
    arguments: Sequence[Any],
) -> tuple[Connection, Any]:
    """Start a worker. Return the parent's end of the worker's pipe, and the worker process.

    A forked worker inherits the connections to `other_connections`, and closes them.
    """
    connection, end_of_worker = context.Pipe()
    is_forked = context.get_start_method() == "fork"
    inherited = [connection, *other_connections] if is_forked else []
    environment = None if is_forked else dict(os.environ)
    process = context.Process(
        target=_work, args=(end_of_worker, inherited, environment, setup, arguments), daemon=True
    )
    process.start()
    end_of_worker.close()
    return connection, process


@dataclass
class _Worker:
    """A worker process as its parent sees it.

    `str` of a worker is the start of an error message, which names the worker's items.

    Attributes:
        process: The process.
        handed: The items that the worker has received and has not finished.
        is_last: True if the worker was notified that there are no more items.
        heard: Time of the worker's last report; infinite after its silence was reported.
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
        """Return the error for a worker that ended without a message.

        The error is `Stopped` if a stop signal ended the worker, and otherwise a BuildError. A
        signal to the whole process group may reach a worker before this process.
        """
        self.process.join(STOP_S)
        code = self.process.exitcode
        if code in _STOPPED_CODES:
            return Stopped(STOPPED)
        outcome = (
            f"was killed by signal {-code}"
            if code is not None and code < 0
            else f"ended with status {code}"
        )
        remedy = "run the same command again"
        if code == -signal.SIGKILL:
            outcome += ", which the kernel does to processes that use too much memory"
            remedy += " with fewer --workers"
        whose = "its" if self.handed else "a"
        return BuildError(
            f"{self}{whose} worker process {outcome}\nhint: {remedy}; committed work is kept"
        )


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Add each signal of STOP_SIGNALS to the yielded list instead of handling it."""
    noted: list[int] = []
    try:
        handlers_before = {
            s: signal.signal(s, lambda number, _: noted.append(number)) for s in STOP_SIGNALS
        }
    except ValueError:  # Outside the main thread, the caller handles signals.
        handlers_before = {}
    try:
        yield noted
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ended(everyone: Mapping[Connection, _Worker], clean: Callable[[int], None]) -> Iterator[None]:
    """End all workers when the with block ends, and call `clean` with the pid of each worker."""
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
    """Run a worker process.

    Args:
        connection: The worker's end of its pipe.
        inherited: The parent's ends of pipes that a fork copied. The worker closes them; otherwise
            it would not notice the parent's death.
        environment: The parent's environment, because a fork server keeps its initial one. None
            after a fork.
        setup: As in `in_processes`.
        arguments: As in `in_processes`.
    """
    gc.freeze()  # Garbage collection would copy the pages that are shared with the parent.
    gc.set_threshold(COLLECTED_OBJECTS)
    _keep_memory()
    for copy in inherited:
        copy.close()
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)

    # The thread that writes shards may send messages at the same time, so a lock is needed.
    sending = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with sending:
            connection.send((kind, value))

    def say(*message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send("say", message)

    def handed() -> Iterator[Any]:
        while (item := connection.recv()) is not None:
            yield item
            send("next", None)

    try:
        with messages.heard_by(say):
            for result in setup(*arguments)(handed(), lambda *counts: send("report", counts)):
                send("done", result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # The parent has ended or closed the connection.
    except PackprepError as error:
        _tell(connection, ("error", error))
    except MemoryError:
        _tell(connection, ("error", BuildError(NO_MEMORY)))
    except BaseException:
        _tell(connection, ("fault", traceback.format_exc()))


def _keep_memory() -> None:
    """Make malloc reuse the memory of one shard for the next shard.

    The operating system takes longer to provide new pages than the process takes to fill them. This
    setting of glibc takes large blocks from the heap instead of new pages, and never trims the
    heap.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _tell(connection: Connection, message: Any) -> None:
    try:
        connection.send(message)
    except (BrokenPipeError, ConnectionResetError):
        return  # The other end is closed. The next read of the connection reports that.
