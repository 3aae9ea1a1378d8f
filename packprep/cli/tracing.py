"""The command trace: the documents of training steps."""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from packprep.cli.arguments import Json
from packprep.cli.printing import one_thread, put
from packprep.messages import put_line

ORDER_PANEL = "Order of the run"
"""Heading of the options that have to equal the arguments of the trainer's loader."""


def _of_order(*names: str, help: str, **named: Any) -> Any:
    return typer.Option(*names, help=help, show_default=False, rich_help_panel=ORDER_PANEL, **named)


def trace(
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR", help="Folder or URL of a dataset, or a mixture.json."),
    ],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="S|FIRST-LAST",
            help="Show the documents of this step, or of a range of steps.",
            show_default=False,
        ),
    ] = None,
    document: Annotated[
        str | None,
        typer.Option(
            "--document",
            "--doc",
            metavar="[FILE:]POSITION",
            help="Show the steps that read this document of --source NAME.",
            show_default=False,
        ),
    ] = None,
    losses: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Show the documents with the highest losses. FILE has JSON lines with loss and"
            " step, optionally rank and position; or with loss and sample or row.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(metavar="R", min=0, help="Only this rank of --step.", show_default=False),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Source of --document.", show_default=False),
    ] = None,
    epochs: Annotated[
        int, typer.Option(metavar="E", min=1, help="Number of epochs that --document searches.")
    ] = 1,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of documents of --losses.")
    ] = 100,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write JSON lines to a new file: the documents of --step, or the list of --losses"
            " that `packprep remove` takes.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        _of_order(
            metavar="B",
            help="Rows per rank and step, or LENGTH=ROWS,LENGTH=ROWS.",
        ),
    ] = None,
    world_size: Annotated[
        int | None, _of_order(metavar="W", min=1, help="Number of data-parallel ranks.")
    ] = None,
    seed: Annotated[int | None, _of_order(metavar="N", min=0, help="Seed of the loader.")] = None,
    shuffle: Annotated[
        bool | None, _of_order(help="Whether the loader shuffles. Default: it does.")
    ] = None,
    balance: Annotated[
        str | None,
        _of_order(
            metavar="COST:GROUP",
            help="The loader's balance, such as attention:32, or 1,4096:32 for the cost (1, 4096).",
        ),
    ] = None,
    window: Annotated[
        int | None, _of_order(metavar="N", min=1, help="The loader's window of balanced steps.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        _of_order(metavar="FIRST-LAST", help="A range of steps that the loader skips."),
    ] = None,
    state: Annotated[
        str | None,
        _of_order(
            metavar="FILE",
            help="The JSON of a saved loader state. It replaces seed, shuffle, balance and skip.",
        ),
    ] = None,
    first_step: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="The trainer's number of the first step, or of the first step after --state.",
            rich_help_panel=ORDER_PANEL,
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Show which documents a training step read, or when a document is read."""
    one_thread()
    from packprep.errors import RecipeError
    from packprep.inspection.trace import (
        TrainingRun,
        check_plans,
        describe_losses,
        describe_reads,
        describe_steps,
        documents_of_steps,
        print_losses,
        print_reads,
        print_steps,
        write_removal_lists,
    )

    views = {"--step": step, "--document": document, "--losses": losses}
    given_views = [name for name, value in views.items() if value is not None]
    if len(given_views) != 1:
        raise RecipeError(
            f"{' and '.join(given_views) or 'no view'}: trace shows one view"
            "\nhint: give one of --step, --document and --losses"
        )
    _check_options(given_views[0], {"--rank": rank, "--source": source, "--out": out})
    # The order of a run depends on both values, so both are required.
    if batch_size is None or world_size is None:
        missing = "--batch-size" if batch_size is None else "--world-size"
        raise RecipeError(
            f"{missing} is missing\nhint: give --batch-size B and --world-size W of the run"
        )
    # A saved state replaces these options, so giving both is an error.
    given_options = {"--seed": seed, "--shuffle": shuffle, "--balance": balance, "--window": window}
    options, stored = _options(given_options, state)
    options["skip"] = [_steps_of("--skip", value) for value in skip or ()]
    run = TrainingRun(_sizes_of(batch_size), world_size, options, stored, first_step)
    if rank is not None and rank >= world_size:
        raise RecipeError(
            f"--rank {rank} is not below --world-size {world_size}"
            f"\nhint: use a rank in 0 … {world_size - 1}"
        )
    # The file must be new. Check this before the work.
    if out is not None and Path(out).exists():
        raise RecipeError(f"--out {out} exists already\nhint: give a new file")
    with _opened_order(directory) as dataset:
        check_plans(dataset)
        if step is not None:
            steps = _steps_of("--step", step)
            if out is not None:
                # A step may have many documents, so each is written when it is found.
                with open(out, "x", encoding="utf-8") as file:
                    count = 0
                    for step_document in documents_of_steps(dataset, run, *steps, rank):
                        file.write(json.dumps(step_document, ensure_ascii=False) + "\n")
                        count += 1
                put({"out": out, "segments": count}, as_json, _print_written, after_work=True)
            else:
                put(describe_steps(dataset, run, *steps, rank), as_json, print_steps)
        elif document is not None:
            put(describe_reads(dataset, run, source, document, epochs), as_json, print_reads)
        elif losses is not None:
            description = describe_losses(dataset, run, losses, limit)
            if out is not None:
                description["written"] = write_removal_lists(description["documents"], out)
            put(description, as_json, print_losses, after_work=out is not None)


def _check_options(view: str, given_options: dict[str, Any]) -> None:
    """Check that the options belong to the view.

    Raises:
        RecipeError: If one does not.
    """
    from packprep.errors import RecipeError

    views = {"--rank": ["--step"], "--source": ["--document"], "--out": ["--step", "--losses"]}
    for option, value in given_options.items():
        if value is not None and view not in views[option]:
            raise RecipeError(
                f"{option} needs {' or '.join(views[option])}\nhint: omit {option} or {view}"
            )


def _options(given_options: dict[str, Any], state: str | None) -> tuple[dict[str, Any], Any]:
    """Return the arguments of the loader, and the contents of the file --state."""
    from packprep.errors import RecipeError
    from packprep.inspection.trace import options_of_state

    if state is not None:
        for option, value in given_options.items():
            if value is not None:
                raise RecipeError(
                    f"{option} and --state both describe the order\nhint: omit {option}"
                )
        try:
            stored = json.loads(Path(state).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"--state {state}: cannot be read: {error}"
                "\nhint: give a file with the JSON of the loader's state_dict()"
            ) from None
        return options_of_state(stored, state), stored
    options = {
        "seed": given_options["--seed"] or 0,
        "shuffle": given_options["--shuffle"] is not False,
    }
    if given_options["--balance"] is not None:
        options["balance"] = _balance_of(given_options["--balance"])
    if given_options["--window"] is not None:
        options["window"] = given_options["--window"]
    return options, None


def _balance_of(text: str) -> tuple[Any, int]:
    from packprep.errors import RecipeError

    cost, _, group = text.rpartition(":")
    weights = cost.split(",")
    try:
        cost_or_weights = cost if cost == "attention" else (float(weights[0]), float(weights[1]))
        return cost_or_weights, int(group)
    except (ValueError, IndexError):
        raise RecipeError(
            f"--balance {text}: expected COST:GROUP\nhint: write attention:32, or 1,4096:32"
        ) from None


def _sizes_of(text: str) -> Any:
    """Return the value of --batch-size: a number, or a dict seq_length → rows."""
    from packprep.errors import RecipeError

    if text.isdecimal() and int(text):
        return int(text)
    pairs = [pair.split("=") for pair in text.split(",")]
    if all(len(pair) == 2 and pair[0].isdecimal() and pair[1].isdecimal() for pair in pairs):
        return {int(length): int(rows) for length, rows in pairs}
    raise RecipeError(
        f"--batch-size {text}: expected a number of rows, or LENGTH=ROWS for each length"
        "\nhint: write 8, or 2048=16,4096=8"
    )


def _steps_of(option: str, text: str) -> tuple[int, int]:
    """Return the first and the last step of S or FIRST-LAST. Steps may be negative."""
    from packprep.errors import RecipeError

    match = re.fullmatch(r"(-?\d+)(?:-(-?\d+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise RecipeError(
            f"{option} {text}: expected a step, or FIRST-LAST\nhint: write 812, or 800-812"
        )
    return int(match[1]), int(match[2] or match[1])


@contextmanager
def _opened_order(directory: str) -> Iterator[Any]:
    """Open a dataset or a mixture to look up its order. Shards at a URL are fetched when needed."""
    from packprep.storage import Remote, folder_at

    if isinstance(folder_at(directory), Remote):
        from packprep.adapters.remote import open_remote

        with tempfile.TemporaryDirectory(prefix="packprep-") as cache:
            yield open_remote(directory, cache=cache)
    else:
        from packprep.dataset.loader import open_dataset
        from packprep.storage import expanded

        yield open_dataset(expanded(directory))


def _print_written(written: dict[str, Any]) -> None:
    from packprep.messages import counted

    put_line(f"{written['out']}: {counted(written['segments'], 'segment')}")
