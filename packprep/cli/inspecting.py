"""The command that looks: inspect, with its views."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from packprep.building.progress import Bar, put_line
from packprep.cli.application import one_thread, put
from packprep.cli.arguments import Directory, Json, moved_of

MovedOrNamed = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="NAME[=PREFIX]",
        help="Where a source's files lie now; NAME alone: the source of --doc.",
        show_default=False,
    ),
]

VIEWS = {
    "--row": ("--segment", "--source NAME=PREFIX", "--from-plan"),
    "--doc": ("--source NAME", "--source NAME=PREFIX", "--from-plan"),
    "--grep": ("--limit",),
    "--diff": (),
    "--html": ("--source NAME=PREFIX", "--from-plan"),
}
"""What `inspect` shows beside the summary, one at a time → the options that go with it."""


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
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a report of it all, with rows to page through.", show_default=False),
    ] = None,
    source: MovedOrNamed = None,
    from_plan: Annotated[
        bool, typer.Option("--from-plan", help="Read the sources where the dataset says that they lie.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a dataset: totals, utilisation, task and source mix, lengths; or what one of the options asks for."""
    one_thread()
    name, moved = named_and_moved(source)
    check_view(
        {
            "--row": row is not None, "--segment": segment is not None, "--doc": doc is not None,
            "--grep": grep is not None, "--limit": limit is not None, "--diff": diff is not None, "--html": html is not None,
            "--source NAME": name is not None, "--source NAME=PREFIX": bool(moved),
            "--from-plan": from_plan,
        }
    )  # fmt: skip
    if segment is not None:
        from packprep.inspection.printed_segment import print_segment
        from packprep.inspection.segment import describe_segment

        assert row is not None
        put(describe_segment(directory, row, segment, moved, from_plan), as_json, print_segment)
    elif row is not None:
        from packprep.inspection.printed_row import print_row
        from packprep.inspection.row import describe_row

        put(describe_row(directory, row, moved, from_plan), as_json, print_row)
    elif doc is not None:
        from packprep.inspection.document import describe_document
        from packprep.inspection.printed_document import print_document

        put(describe_document(directory, name, doc, moved, from_plan), as_json, print_document)
    elif grep is not None:
        from packprep.inspection.printed_search import print_matches
        from packprep.inspection.search import describe_matches

        put(describe_matches(directory, grep, 100 if limit is None else limit), as_json, print_matches)
    elif diff is not None:
        from packprep.inspection.difference import describe_difference
        from packprep.inspection.printed_difference import print_difference

        put(describe_difference(directory, diff), as_json, print_difference)
    elif html is not None:
        put(_report(directory, html, moved, from_plan), as_json, _print_written)
    else:
        from packprep.inspection.printed_summary import print_summary
        from packprep.inspection.summary import describe_dataset

        put(describe_dataset(directory), as_json, print_summary)


def check_view(given: dict[str, bool]) -> None:
    """Whether what `inspect` is given goes together. given: option of VIEWS → whether it is there.

    Raises RecipeError for two views, and for an option that does not go with the one.
    """
    from packprep.errors import RecipeError

    views = [option for option in VIEWS if given[option]]
    if len(views) > 1:
        raise RecipeError(f"{' and '.join(views)}: inspect shows one thing at a time; give one of them")
    view = views[0] if views else None
    for option in (option for option, there in given.items() if there and option not in VIEWS):
        if view is None or option not in VIEWS[view]:
            goes_with = [name for name, options in VIEWS.items() if option in options]
            raise RecipeError(f"{option} goes with {' or '.join(goes_with)}; {_instead(view, option, goes_with)}")


def _instead(view: str | None, option: str, goes_with: list[str]) -> str:
    if option == "--segment" and view is None:
        return "give --row R too: segments are numbered 1, 2, … in each row, as segment_ids are"
    if view is None:
        return f"give {' or '.join(goes_with)} too, or leave it out"
    return f"leave it or {view} out"


def named_and_moved(values: list[str] | None) -> tuple[str | None, dict[str, str]]:
    """(the NAME that stands alone, or None; source → prefix) of the values of --source."""
    from packprep.errors import RecipeError

    names = [value for value in values or () if "=" not in value]
    if len(names) > 1:
        raise RecipeError(f"--source {names[1]}: {names[0]} is named already, and a document is of one source")
    if names == [""]:
        raise RecipeError("--source: expected NAME, or NAME=PREFIX as in --source web=/data/web")
    return names[0] if names else None, moved_of([value for value in values or () if "=" in value])


def _report(directory: str, html: str, moved: dict[str, str], from_plan: bool) -> dict[str, Any]:
    """Verify what the report looks at, and write it."""
    from packprep.building.processes import available_cpus
    from packprep.errors import DatasetError, PackprepError, PlanError, VocabularyError
    from packprep.inspection.report import check_place, shards_shown, write_report
    from packprep.storage import expanded
    from packprep.verification import PROMISES, verify_dataset

    html = expanded(html)
    check_place(html)
    only = shards_shown(directory)
    verification: dict[str, Any] | PackprepError
    try:
        verification = verify_dataset(directory, None, moved, (0, 1), available_cpus(), Bar(), only=only)
    except (
        DatasetError,
        PlanError,
        VocabularyError,
    ) as error:  # the page says so, and shows what can be read all the same
        verification = error
    return write_report(directory, html, moved, verification, PROMISES, from_plan)


def _print_written(written: Mapping[str, Any]) -> None:
    from packprep.inspection.lines import counted

    faults = written["faults"]
    found = "not verified" if faults is None else "every promise holds" if not faults else counted(faults, "fault")
    rows = f"{written['shown_rows']:,} of {counted(written['rows'], 'row')}"
    put_line(f"{written['html']}: {written['bytes']:,} bytes, {rows}; {found}")
