"""The commands. Each parses, calls one function, prints. Results on stdout, progress and messages
on stderr.

Exit status: 0 good · 1 `verify` found faults, `status` shards missing, `doctor` what fails · 2 an
error · 75 stopped by a signal.
"""

import gc
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["entry", "main"]

# Nothing else is imported here: a signal before `entry` is Python's own affair.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_STOPPED = (
    b"packprep: stopped: by a signal; nothing was lost, and the same command begins or goes on\n"
)
_STOPPED_STATUS = 75
_STAY_S = 2.0


class _Asked(BaseException):
    """A signal asks the process to stop: no error, not even to code that takes every error for its
    input's."""


def main() -> None:
    """Run the command line; the one place where an error becomes a message and an exit status."""
    import io

    from typer.main import get_command

    from packprep.cli.application import UsageError, app, say_usage
    from packprep.errors import NO_MEMORY, PackprepError
    from packprep.messages import USUAL, say_error, show

    show(USUAL)
    # a file's name may hold what the terminal's encoding does not
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # app itself would set sys.excepthook
        status = get_command(app)(prog_name="packprep", standalone_mode=False)
        if status:
            raise SystemExit(status)
    except UsageError as error:
        say_usage(error, sys.argv)
        raise SystemExit(2) from None
    except PackprepError as error:
        say_error(f"{'stopped' if error.exit_status == _STOPPED_STATUS else 'error'}: {error}")
        raise SystemExit(error.exit_status) from None
    except ModuleNotFoundError as error:
        _say_missing(error)
    except MemoryError:
        say_error(f"error: {NO_MEMORY}")
        raise SystemExit(2) from None
    except OSError as error:
        say_error(f"error: {error}; see to it and run the same command again")
        raise SystemExit(2) from None


def _open_closed_streams() -> None:
    """Open /dev/null as each of stdin, stdout and stderr that is closed.

    Otherwise the next file that is opened, of a dataset perhaps, gets its number, and what is
    printed goes into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _end_output() -> None:
    """Write out what stdout and stderr still hold, and discard what cannot be written: Python
    itself would fail at its end."""
    from packprep.messages import discard_output

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard_output(stream)


def entry() -> None:
    """`main`, as the command of a process, which from here on stops with a message and its status
    when a signal asks it to.

    While its modules are imported there is nothing to leave in order, and a signal ends it. Then a
    signal is raised, so that what is half written is removed; the next one ends it once _STAY_S are
    over, for the first may have been passed over.
    """
    _open_closed_streams()
    _on_signals(_end)
    # a virtual machine has to ask its host for such pages each time
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    try:
        import packprep.cli.application  # noqa: F401
    except ModuleNotFoundError as error:
        _say_missing(error)

    asked: list[float] = []  # when

    def stop(*_: object) -> None:
        if not asked:
            asked.append(time.monotonic())
            raise _Asked
        if time.monotonic() - asked[0] > _STAY_S:
            _end()

    # Python prints what is raised in a callback, as in a destructor or where an import ends, and
    # goes on; an extension module prints what is raised while it imports numpy, and says that numpy
    # cannot be imported.
    sys.unraisablehook = lambda what: _end() if asked else sys.__unraisablehook__(what)
    sys.excepthook = lambda *what: _end() if asked else sys.__excepthook__(*what)
    _on_signals(stop)
    try:
        try:
            main()
        finally:
            _on_signals(signal.SIG_IGN)
            _end_output()
            # at the end Python searches for garbage once more, .15 s where numba is loaded
            gc.freeze()
    except SystemExit:
        raise
    except BaseException:  # what was raised may have become another error on its way
        if not asked:
            raise
        _say_stopped()
        raise SystemExit(_STOPPED_STATUS) from None


def _say_missing(error: ModuleNotFoundError) -> "NoReturn":
    """End where a package is missing, as where packprep was installed for a trainer, without what
    its command needs."""
    name = str(error.name).partition(".")[0]
    if name == "packprep":
        raise error
    print(
        f"packprep: error: {name} is not installed, which this command needs: `pip install"
        " packprep` adds all that is missing here; opening and reading datasets,"
        " `packprep.open_dataset`, needs numpy alone",
        file=sys.stderr,
    )
    raise SystemExit(2)


def _on_signals(handler: object) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)  # type: ignore[arg-type]


def _end(*_: object) -> None:
    _say_stopped()
    os._exit(_STOPPED_STATUS)


def _say_stopped() -> None:
    try:
        os.write(2, _STOPPED)  # print cannot be entered twice
    except OSError:  # nobody reads it
        return
