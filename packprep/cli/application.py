"""The application that the commands belong to, and how each begins and prints."""

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="packprep",
    help="Text corpora to packed, corrupted, verified training rows: once, offline, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


def put(result: Any, as_json: bool, printer: Callable[[Any], None]) -> None:
    """Print a result: as one JSON object, or by its printer."""
    try:
        if as_json:
            print(json.dumps(result, ensure_ascii=False, sort_keys=True))
        else:
            printer(result)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout has read enough; the exit status stays that of the command
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
