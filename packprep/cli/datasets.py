"""The commands that read a dataset: verify, inspect."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

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
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a report of it all, with rows to page through.", show_default=False),
    ] = None,
    source: Moved = None,
    as_json: Json = False,
) -> None:
    """Show a dataset: totals, utilisation, task and source mix, lengths; or one row, decoded; or all in an HTML file."""
    if html is not None:
        put(_report(directory, html, row, source), as_json, _print_written)
        return
    from packprep.inspection.printed_row import print_row
    from packprep.inspection.row import describe_row
    from packprep.inspection.summary import describe_dataset, print_summary

    if row is None:
        put(describe_dataset(directory), as_json, print_summary)
    else:
        put(describe_row(directory, row, moved_of(source)), as_json, print_row)


def _report(directory: str, html: str, row: int | None, source: list[str] | None) -> dict[str, Any]:
    """Verify what the report looks at, and write it."""
    one_thread()
    from packprep.building.processes import available_cpus
    from packprep.errors import ArgumentError, DatasetError, PackprepError, PlanError, VocabularyError
    from packprep.inspection.report import check_place, shards_shown, write_report
    from packprep.verification import PROMISES, verify_dataset

    if row is not None:
        raise ArgumentError(f"--html and --row {row}: the report has rows of its own; leave one of the two out")
    check_place(html)
    moved, only = moved_of(source), shards_shown(directory)
    verification: dict[str, Any] | PackprepError
    try:
        verification = verify_dataset(directory, None, moved, (0, 1), available_cpus(), Bar(), only=only)
    except (
        DatasetError,
        PlanError,
        VocabularyError,
    ) as error:  # the page says so, and shows what can be read all the same
        verification = error
    return write_report(directory, html, moved, verification, PROMISES)


def _print_written(written: Mapping[str, Any]) -> None:
    from packprep.inspection.lines import counted

    faults = written["faults"]
    found = "not verified" if faults is None else "every promise holds" if not faults else counted(faults, "fault")
    rows = f"{written['shown_rows']:,} of {counted(written['rows'], 'row')}"
    print(f"{written['html']}: {written['bytes']:,} bytes, {rows}; {found}")
