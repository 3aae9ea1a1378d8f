"""Run the command line. Results go to stdout, and progress and messages to stderr.

Each command parses its arguments, calls one function, and prints the result. The exit status is 0
for success, 2 for an error, and 75 if a signal stopped the command. It is 1 if `verify` found
faults, `status` found missing shards, `doctor` found a failing check, or `audit` exceeded a limit.
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

# Import nothing more here, because Python itself handles a signal before `entry`.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_STOPPED = b"packprep: stopped: by a signal; committed work is kept. Run the same command again\n"
_STOPPED_STATUS = 75
_STAY_S = 2.0


class _Asked(BaseException):
    """A signal handler's request to stop the process.

    It is not an `Exception`, so code that handles every error of its input does not catch it.
    """


def main() -> None:
    """Run the command line. Only this function turns an error into a message and an exit status."""
    import io

    from typer.main import get_command

    from packprep.cli.application import UsageError, app, say_usage
    from packprep.errors import NO_MEMORY, PackprepError
    from packprep.messages import USUAL, say_error, show

    show(USUAL)
    # A file's name may contain characters that the terminal's encoding does not have.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Calling the app itself would set sys.excepthook.
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
        say_error(f"error: {error}\nhint: fix the cause and run the same command again")
        raise SystemExit(2) from None


def _open_closed_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed.

    If stdout stayed closed, the next file that is opened would get its file descriptor. Printed
    text would then go into that file, for example a dataset.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # This gets the lowest free descriptor, `number`.
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _end_output() -> None:
    """Flush stdout and stderr, and discard output that cannot be written.

    Such output would make Python fail at exit.
    """
    from packprep.messages import discard_output

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard_output(stream)


def entry() -> None:
    """Run `main`, and handle signals: print a message and exit with status 75.

    During imports there is nothing to clean up, so a signal ends the process at once. Later the
    first signal raises an exception, so that partial files are removed. Other code may catch that
    exception. So a further signal ends the process, if it comes at least _STAY_S seconds later.
    """
    _open_closed_streams()
    _on_signals(_end)
    # NumPy must not ask for huge pages, because a virtual machine must request each from its host.
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    try:
        import packprep.cli.application  # noqa: F401
    except ModuleNotFoundError as error:
        _say_missing(error)

    asked: list[float] = []  # Time of the first signal.

    def stop(*_: object) -> None:
        if not asked:
            asked.append(time.monotonic())
            raise _Asked
        if time.monotonic() - asked[0] > _STAY_S:
            _end()

    # Python prints an exception from a callback, such as a destructor or the end of an import, and
    # continues. An extension module prints an exception that is raised while it imports numpy, and
    # then reports that numpy cannot be imported. The hooks end the process in both cases.
    sys.unraisablehook = lambda reported: _end() if asked else sys.__unraisablehook__(reported)
    sys.excepthook = lambda *reported: _end() if asked else sys.__excepthook__(*reported)
    _on_signals(stop)
    try:
        try:
            main()
        finally:
            _on_signals(signal.SIG_IGN)
            _end_output()
            # The garbage collection at exit takes 0.15 s if numba is loaded, so skip it.
            gc.freeze()
    except SystemExit:
        raise
    except BaseException:  # The exception may have become another error.
        if not asked:
            raise
        _say_stopped()
        raise SystemExit(_STOPPED_STATUS) from None


def _say_missing(error: ModuleNotFoundError) -> "NoReturn":
    """Print that a package is missing, and exit.

    This happens if packprep was installed only for a trainer, without the packages that the
    commands of packprep need.
    """
    name = str(error.name).partition(".")[0]
    if name == "packprep":
        raise error
    print(
        f"packprep: error: {name} is not installed, but this command needs it\n  hint: run `pip"
        " install packprep`, which installs all missing packages. Reading datasets with"
        " `packprep.open_dataset` needs only numpy.",
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
        # `print` is not reentrant.
        os.write(2, _STOPPED)
    except OSError:  # The reader of stderr is closed.
        return
