"""The commands that read a dataset: verify, inspect, export."""

import os
from typing import Annotated, Literal

import typer

from packprep.building.progress import Bar
from packprep.cli.application import one_thread, put
from packprep.cli.arguments import (
    ArrayCount,
    ArrayIndex,
    Directory,
    Json,
    Moved,
    MovedOrNamed,
    Out,
    Replay,
    Workers,
    check_view,
    moved_of,
    named_and_moved,
    replay_of,
)


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
    segment: Annotated[
        int | None,
        typer.Option(metavar="K", help="Show the K-th segment of --row whole, from 1.", show_default=False),
    ] = None,
    doc: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE:]POSITION", help="Say where this document of --source NAME went.", show_default=False
        ),
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="TEXT", help="List the rows that hold this text.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Matches to list. Default: 100.", show_default=False)
    ] = None,
    diff: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Say what differs in another dataset.", show_default=False)
    ] = None,
    source: MovedOrNamed = None,
    as_json: Json = False,
) -> None:
    """Show a dataset: totals, utilisation, task and source mix, lengths; or what one of the options asks for."""
    one_thread()
    name, moved = named_and_moved(source)
    check_view(
        {
            "--row": row is not None, "--segment": segment is not None, "--doc": doc is not None,
            "--grep": grep is not None, "--limit": limit is not None, "--diff": diff is not None,
            "--source NAME": name is not None, "--source NAME=PREFIX": bool(moved),
        }
    )  # fmt: skip
    if segment is not None:
        from packprep.inspection.printed_segment import print_segment
        from packprep.inspection.segment import describe_segment

        assert row is not None
        put(describe_segment(directory, row, segment, moved), as_json, print_segment)
    elif row is not None:
        from packprep.inspection.printed_row import print_row
        from packprep.inspection.row import describe_row

        put(describe_row(directory, row, moved), as_json, print_row)
    elif doc is not None:
        from packprep.inspection.document import describe_document
        from packprep.inspection.printed_document import print_document

        put(describe_document(directory, name, doc, moved), as_json, print_document)
    elif grep is not None:
        from packprep.inspection.printed_search import print_matches
        from packprep.inspection.search import describe_matches

        put(describe_matches(directory, grep, 100 if limit is None else limit), as_json, print_matches)
    elif diff is not None:
        from packprep.inspection.difference import describe_difference
        from packprep.inspection.printed_difference import print_difference

        put(describe_difference(directory, diff), as_json, print_difference)
    else:
        from packprep.inspection.printed_summary import print_summary
        from packprep.inspection.summary import describe_dataset

        put(describe_dataset(directory), as_json, print_summary)


def export(
    directory: Directory,
    to: Annotated[
        Literal["megatron", "parquet"],
        typer.Option("--to", help="The format: .bin and .idx, or Parquet.", show_default=False),
    ],
    out: Out,
    what: Annotated[
        Literal["documents", "rows"] | None,
        typer.Option(help="Of Megatron: documents as they were (default), or packed rows.", show_default=False),
    ] = None,
    columns: Annotated[
        Literal["nemo", "full"] | None,
        typer.Option(
            help="Of Parquet: NeMo's packed sequences (default), or the loader's columns.", show_default=False
        ),
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Export a dataset for Megatron or as Parquet, or go on with an export that stopped: run the same command again."""
    one_thread()
    from packprep.building.processes import available_cpus
    from packprep.exporting.export import export_dataset, print_export

    bar = Bar()
    result = export_dataset(directory, to, out, bar, what, columns, workers or available_cpus())
    put(result, as_json, print_export)
