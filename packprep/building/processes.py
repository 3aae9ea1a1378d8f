"""Work spread over processes: items in, results out. The only file that forks.

A worker is handed one item at a time. Whoever is killed leaves temporaries at most; the parent notices and says so.
Processes are forked by a server that has imported packprep and done nothing: they start at once, and no fork comes after a
library has started threads, which can hang.
"""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from packprep.errors import BuildError, PackprepError, Stopped

Report = Callable[[int, int, int, int], None]
"""(documents, text bytes, tokens, rejects): what was done since the last report."""
Do = Callable[[Any, Report], Any]

STOP_S = 5.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_STOPPED = "by a signal; what is committed stays, and the same command goes on"


def available_cpus() -> int:
    """The CPUs that this process may use: SLURM_CPUS_PER_TASK, or its affinity."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0))


def start_server(module: str) -> None:
    """Start the process that forks workers, which imports `module` meanwhile; does nothing if it runs."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    multiprocessing.set_forkserver_preload([module])
    forkserver.ensure_running()


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """While this lasts, SIGTERM, SIGINT and SIGUSR1 are noted instead of obeyed; gives the function that tells."""
    asked: list[int] = []
    try:
        before = {s: signal.signal(s, lambda number, _: asked.append(number)) for s in _STOP_SIGNALS}
    except ValueError:  # not in the main thread: the caller handles signals
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Workers:
    """Processes that are there before their work is known. To be closed, or used as a context."""

    def __init__(self, count: int, warm: Callable[..., None], arguments: Sequence[Any]) -> None:
        """Start `count` processes, which call `warm(*arguments)` to load what will be needed; its errors are not told."""
        start_server(warm.__module__)
        context = multiprocessing.get_context("forkserver")
        self.processes: dict[Connection, Any] = {}
        try:
            for _ in range(count):
                here, there = context.Pipe()
                process = context.Process(target=_worker, args=(there,), daemon=True)
                process.start()
                there.close()
                self.processes[here] = process
                here.send((warm, arguments))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, clean: Callable[[int], None] = lambda pid: None) -> None:
        """End all processes; clean(pid) removes what an ended one may have left behind."""
        _end(self.processes, clean)
        self.processes.clear()


def no_warming() -> None:
    """For workers that load what they need when they are told."""


def spread(
    setup: Callable[..., Do],
    arguments: Sequence[Any],
    items: Sequence[Any],
    workers: int,
    report: Report,
    stop_asked: Callable[[], bool],
    clean: Callable[[int], None] = lambda pid: None,
    started: Workers | None = None,
) -> Iterator[tuple[Any, Any]]:
    """(item, result) of each item, as they come; `setup(*arguments)` gives a process its function.

    With one worker, or one item, all is done here. started: processes to use, instead of `workers` new ones.
    clean(pid) removes what an ended worker may have left behind.
    Raises what a worker raised, BuildError for one that was killed, Stopped once `stop_asked()`.
    """
    if workers == 1 or len(items) <= 1:
        yield from _here(setup, arguments, items, report, stop_asked)
        return
    if started is None:
        started = Workers(min(workers, len(items)), no_warming, ())
    waiting = list(reversed(items))
    processes, at_work = started.processes, dict[Connection, Any]()
    try:
        for connection in processes:
            if not waiting:
                break
            at_work[connection] = waiting.pop()
            with contextlib.suppress(BrokenPipeError):  # it is gone already, which is seen below
                connection.send((setup, arguments))
                connection.send(at_work[connection])
        while at_work:
            if stop_asked():
                raise Stopped(_STOPPED)
            for ready in wait(list(at_work), timeout=0.2):
                assert isinstance(ready, Connection)
                connection = ready
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise _lost(processes[connection], at_work[connection]) from None
                if kind == "report":
                    report(*value)
                elif kind == "done":
                    item = at_work.pop(connection)
                    if waiting:
                        at_work[connection] = waiting.pop()
                        connection.send(at_work[connection])
                    yield item, value
                elif kind == "error":
                    raise value
                else:
                    raise BuildError(
                        f"{at_work[connection]}: a worker failed; this is a fault of packprep, report it:\n{value}"
                    )
    finally:
        started.close(clean)


def _here(
    setup: Callable[..., Do],
    arguments: Sequence[Any],
    items: Sequence[Any],
    report: Report,
    stop_asked: Callable[[], bool],
) -> Iterator[tuple[Any, Any]]:
    def report_or_stop(*counts: int) -> None:
        report(*counts)
        if stop_asked():
            raise Stopped(_STOPPED)

    do = setup(*arguments) if items else None
    for item in items:
        if stop_asked():
            raise Stopped(_STOPPED)
        assert do is not None
        yield item, do(item, report_or_stop)


def _worker(connection: Connection) -> None:
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    try:
        warm, arguments = connection.recv()
        with contextlib.suppress(Exception):  # what is wrong is found again, and told, when the work begins
            warm(*arguments)
        setup, arguments = connection.recv()
        do = setup(*arguments)
        while True:
            item = connection.recv()
            connection.send(("done", do(item, lambda *counts: connection.send(("report", counts)))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, or has no more work
    except PackprepError as error:
        _tell(connection, ("error", error))
    except BaseException:
        _tell(connection, ("fault", traceback.format_exc()))


def _tell(connection: Connection, message: tuple[str, Any]) -> None:
    try:
        connection.send(message)
    except (BrokenPipeError, ConnectionResetError):
        return  # nobody is left to be told


def _lost(process: Any, item: Any) -> BuildError:
    process.join(STOP_S)
    code = process.exitcode
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    hint = ""
    if code == -signal.SIGKILL:
        hint = " (the kernel kills what uses too much memory: try fewer --workers or a smaller output.shard_text_bytes)"
    return BuildError(
        f"{item}: its worker process was {how}{hint}; run the same command again: what is committed stays"
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
