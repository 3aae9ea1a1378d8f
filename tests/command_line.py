"""The command line as a user types it: in a process of its own, or, where many ways to be wrong are
tried, in this one."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from packprep.building import processes
from packprep.building.array_tasks import LAUNCHERS, SCHEDULERS
from packprep.cli import main
from tests.made import environment

_ARRAY = {str(name) for scheduler in SCHEDULERS for name in astuple(scheduler)[1:]}
_ARRAY |= {name for names in LAUNCHERS.values() for name in names}


class Said(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout, which holds one JSON value and nothing else."""
        return json.loads(self.out)


def packprep(*arguments: object, at: Path | None = None, **changes: str) -> Said:
    """Run `packprep ARGUMENTS` in the folder `at`; `changes` of the environment, in which no array
    is to be found else.

    No traceback may ever be seen, whatever the command is given.
    """
    done = subprocess.run(
        [sys.executable, "-m", "packprep", *map(str, arguments)],
        cwd=at, env=_environment(changes), capture_output=True, encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "Traceback" not in done.stdout, done.stderr
    return Said(done.returncode, done.stdout, done.stderr)


def inside(*arguments: object, **changes: str) -> Said:
    """The same in this process, without its start, and without that of its worker where there is
    one alone. Several are forked, whatever threads pytest-xdist has: they only wait."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            mock.patch.dict(os.environ, _environment(changes), clear=True),
            mock.patch.object(sys, "argv", ["packprep", *map(str, arguments)]),
            mock.patch.object(processes, "_may_be_forked", lambda: True),
            mock.patch("packprep.building.run.in_processes", _one_of_them_here),
            mock.patch("packprep.verification.in_processes", _one_of_them_here),
            mock.patch("packprep.verification.lengths.in_processes", _one_of_them_here),
            mock.patch("packprep.exporting.export.in_processes", _one_of_them_here),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
        status: Any = 0
    except SystemExit as end:
        status = end.code or 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Said(status, out.getvalue(), err.getvalue())


def _one_of_them_here(
    setup: Any, arguments: Any, items: Any, workers: int, *rest: Any, **named: Any
) -> Any:
    return processes.in_processes(
        setup, arguments, items, 0 if workers == 1 else workers, *rest, **named
    )


def refused(*arguments: object, **changes: str) -> str:
    """The message of a command that ends with an error: exit status 2, nothing on stdout, the error
    last on stderr."""
    said = inside(*arguments, **changes)
    assert said.status == 2 and said.out == "" and said.err.count("packprep: error: ") == 1, said
    return said.err.partition("packprep: error: ")[2]


def _environment(changes: dict[str, str]) -> dict[str, str]:
    """One process, so that a small command does not wait for others to start, and no array but that
    of `changes`."""
    whole = environment(**{"SLURM_CPUS_PER_TASK": "1", **changes})
    return {name: value for name, value in whole.items() if name in changes or name not in _ARRAY}
