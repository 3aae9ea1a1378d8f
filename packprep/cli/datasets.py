"""The commands that read a dataset: verify, inspect."""

import os
from typing import Annotated

import typer

from packprep.building.progress import Bar
from packprep.cli.application import one_thread, put
from packprep.cli.arguments import ArrayCount, ArrayIndex, Directory, Json, Moved, Replay, Workers, moved_of, replay_of


def verify(
    directory: Directory,
    replay: Replay = None,
    twin: Annotated[
        bool, typer.Option("--twin", help="Recompute what --replay chooses in plain Python too. Slow.")
    ] = False,
    source: Moved = None,
    workers: Workers = None,
    array_index: ArrayIndex = None,
    array_count: ArrayCount = None,
    as_json: Json = False,
) -> None:
    """Recompute every promise of a dataset; exit status 1 and a line for each fault if one does not hold."""
    one_thread()
    from packprep.building.array import array_position
    from packprep.building.processes import available_cpus
    from packprep.verification import print_report, verify_dataset

    position = array_position(array_index, array_count, os.environ)
    bar = Bar()
    count = workers or available_cpus()
    report = verify_dataset(directory, replay_of(replay), moved_of(source), position, count, bar, twin)
    put(report, as_json, print_report)
    if report["faults"]:
        raise typer.Exit(1)


def inspect(
    directory: Directory,
    row: Annotated[
        int | None,
        typer.Option(metavar="N", help="Show this row. −1: the first with a segment of each task.", show_default=False),
    ] = None,
    source: Moved = None,
    as_json: Json = False,
) -> None:
    """Show a dataset: totals, utilisation, task and source mix, lengths; or one row, decoded."""
    from packprep.inspection.printed_row import print_row
    from packprep.inspection.row import describe_row
    from packprep.inspection.summary import describe_dataset, print_summary

    if row is None:
        put(describe_dataset(directory), as_json, print_summary)
    else:
        put(describe_row(directory, row, moved_of(source)), as_json, print_row)
