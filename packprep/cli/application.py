"""The application that the commands belong to, and how each begins and prints."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from packprep.building.progress import say

app = typer.Typer(
    name="packprep",
    help="Text corpora to packed, corrupted, verified training rows: once, offline, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a command line that it cannot read. Its own name for it depends on typer's version."""
_WANTED = {
    "--out": "give --out DIR, the folder to build into",
    "--array": "give --array N, how many tasks the array has",
    "RECIPE.toml | INPUT...": "name a RECIPE.toml, or files and patterns",
    "DIR": "name the folder of a dataset",
}


def say_usage(error: Any, words: Sequence[str]) -> None:
    """Say on stderr what is wrong with a command line, and what to do. words: the command line."""
    message = error.format_message().rstrip(".")
    if not message or "\n" in message:  # the help, for no command at all
        error.show()
        return
    command = error.ctx.command_path if error.ctx else "packprep"
    parameter = getattr(error, "param", None)
    names = [getattr(error, "option_name", "")] if parameter is None else [*parameter.opts, str(parameter.metavar)]
    given = next((w for option, w in zip(words, words[1:], strict=False) if option in names), None)
    if given is not None and message.startswith("Invalid value") and repr(given) not in message:
        message += f", and {given!r} is given"
    wanted = next((_WANTED[name] for name in names if name in _WANTED), None) if "Invalid" not in message else None
    say(f"error: {command}: {message}; {wanted + '; ' if wanted else ''}`{command} -h` lists what there is")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"packprep {version('packprep')}")
        raise typer.Exit


@app.callback()
def _packprep(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def one_thread() -> None:
    """No threads of libraries, before they are imported: processes scale, and only a process of one thread may be forked."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _escaped(text: str) -> str:
    """JSON that says the same, with escapes for all that does not show: names and texts may hold what a terminal obeys."""
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def put(result: Any, as_json: bool, printer: Callable[[Any], None]) -> None:
    """Print a result: as one JSON object, or by its printer."""
    try:
        if as_json:
            print(_escaped(json.dumps(result, ensure_ascii=False, sort_keys=True)))
        else:
            printer(result)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout has read enough; the exit status stays that of the command
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
