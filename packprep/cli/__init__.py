"""The commands. Each parses, calls one function, prints. Results on stdout, progress and messages on stderr.

Exit status: 0 good · 1 `verify` found faults, or `status` found shards missing · 2 an error · 75 stopped by a signal.
"""

import gc
import io
import os
import signal
import sys
from typing import Any

from packprep.building.progress import say
from packprep.cli.application import UsageError, app, say_usage
from packprep.cli.building import build, plan, slurm, status
from packprep.cli.datasets import export, verify
from packprep.cli.inspecting import inspect

__all__ = ["app", "entry", "main"]

for command in (build, plan, status, verify, inspect, export, slurm):
    app.command()(command)


def main() -> None:
    """Run the command line; the one place where an error becomes a message and an exit status."""
    from packprep.errors import PackprepError, Stopped

    def stop(number: int, frame: object) -> None:
        raise Stopped("by a signal; nothing was lost, and the same command begins or goes on")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's name may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = app(standalone_mode=False)
        if status:
            raise SystemExit(status)
    except UsageError as error:
        say_usage(error, sys.argv)
        raise SystemExit(2) from None
    except PackprepError as error:
        say(f"{'stopped' if error.exit_status == 75 else 'error'}: {error}")
        raise SystemExit(error.exit_status) from None
    except OSError as error:
        say(f"error: {error}; see to it and run the same command again")
        raise SystemExit(2) from None


def entry() -> None:
    """`main`, as the command of a process, which ends without taking its data apart: that takes longer than a small build."""
    gc.set_threshold(100_000, 20, 50)  # what is imported stays: to look through it again and again gains nothing
    status: Any = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    if not isinstance(status, int | None) or "multiprocessing.forkserver" in sys.modules:
        raise SystemExit(status)  # a server of processes has a folder to remove
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status or 0)
