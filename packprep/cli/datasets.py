"""The commands that read a dataset: verify, export, inspect and remove."""

import os
import time
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal

import typer

from packprep.cli.arguments import (
    ArrayCount,
    ArrayIndex,
    Directory,
    Json,
    Moved,
    Out,
    Replay,
    Workers,
    moved_of,
    recipe_of,
    replay_of,
)
from packprep.cli.printing import one_thread, put, put_each
from packprep.exporting import EXPORTS, exports_with
from packprep.messages import Bar, put_line


def verify(
    directory: Directory,
    replay: Replay = None,
    replay_seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Seed that selects the segments of --replay N. Default: the clock.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also compare the dataset with this recipe.", show_default=False
        ),
    ] = None,
    epoch: Annotated[
        int,
        typer.Option(
            metavar="E", min=0, help="Check the rows as redraw resamples them in this epoch."
        ),
    ] = 0,
    source: Moved = None,
    workers: Workers = None,
    array_index: ArrayIndex = None,
    array_count: ArrayCount = None,
    as_json: Json = False,
) -> None:
    """Check every invariant of a dataset.

    This prints a line for each fault. The exit status is 1 if there is a fault.
    """
    one_thread()
    from packprep.building.array_tasks import array_position
    from packprep.building.plan import datasets_in
    from packprep.building.processes import available_cpus
    from packprep.errors import RecipeError
    from packprep.verification import print_report, verify_dataset
    from packprep.verification.lengths import verify_lengths

    position = array_position(array_index, array_count, os.environ)
    bar = Bar()
    count = workers or available_cpus()
    if recipe is not None and not recipe.endswith(".toml"):
        raise RecipeError(
            f"--recipe {recipe}: expected a RECIPE.toml"
            "\nhint: give the recipe that the dataset was built from"
        )
    one_recipe = None if recipe is None else recipe_of([recipe], None, None, None, None, None, None)
    seed = time.time_ns() % 1_000_000 if replay_seed is None else replay_seed
    reports = [
        verify_dataset(
            folder,
            replay_of(replay),
            moved_of(source),
            position,
            count,
            bar,
            replay_seed=seed,
            recipe=one_recipe,
            epoch=epoch,
        )
        for folder in datasets_in(directory)
    ]
    # Datasets of several row lengths are also compared with each other.
    if across := verify_lengths(directory, reports, position, count):
        reports.append(across)
    put_each(reports, as_json, print_report, after_work=True)
    if any(report["faults"] for report in reports):
        raise typer.Exit(1)


def _with_exports(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with `--to` and the options of all exports in EXPORTS."""
    # typer reads options from the signature, so options of exports become parameters.
    written = dict(signature(command).parameters)
    del written["options"]
    says = f"The format: {', or '.join(export.files for export in EXPORTS.values())}."
    to_option = typer.Option("--to", help=says, show_default=False)
    kind = Annotated[Literal[*EXPORTS], to_option]  # type: ignore[valid-type]
    written["to"] = written["to"].replace(annotation=kind)
    chosen = []
    for name, choices in {
        export.option: export.choices for export in EXPORTS.values() if export.option
    }.items():
        default, *other_choices = choices.values()
        help = f"{exports_with(name)}: {', or '.join([f'{default} (default)', *other_choices])}."
        typer_option = typer.Option(help=help, show_default=False)
        option = Annotated[Literal[*choices] | None, typer_option]  # type: ignore
        chosen.append(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option))
    # The help lists options in the order of the parameters.
    ordered = [written.pop(name) for name in ("directory", "to", "out")]
    parameters = [*ordered, *chosen, *written.values()]
    kinds = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = Signature(kinds)  # type: ignore[attr-defined]
    return command


@_with_exports
def export(
    directory: Directory,
    to: str,
    out: Out,
    loss_weights: Annotated[
        Literal["refuse", "ignore"],
        typer.Option(help="Document weights that the format cannot store: refuse or ignore them."),
    ] = "refuse",
    workers: Workers = None,
    as_json: Json = False,
    **options: str | None,
) -> None:
    """Export a dataset for another tool.

    To resume, run the same command again.
    """
    one_thread()
    from packprep.building.processes import available_cpus
    from packprep.exporting.export import export_dataset, folders_to_export, print_export
    from packprep.inspection.card import card_at

    folders, count = folders_to_export(directory, out, to, options), workers or available_cpus()
    results = [
        export_dataset(dataset, to, into, Bar(), count, card_at, loss_weights, **options)
        for dataset, into in folders
    ]
    put_each(results, as_json, print_export, after_work=True)


def remove(
    directory: Directory,
    documents: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="JSON lines with source, file and doc (a position).",
            show_default=False,
        ),
    ],
    out: Out,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Copy a dataset without some documents.

    This also copies token stores. All other tokens keep their positions. To resume, run the same
    command again.
    """
    one_thread()
    from packprep.building.processes import available_cpus
    from packprep.removing import print_removal, remove_documents

    removed = remove_documents(directory, documents, out, Bar(), workers or available_cpus())
    put(removed, as_json, print_removal, after_work=True)


MovedOrNamed = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="NAME[=PREFIX]",
        help="Current location of a source's files. NAME without a prefix: the source of --doc.",
        show_default=False,
    ),
]

VIEWS = {
    "--row": ("--segment", "--epoch", "--source NAME=PREFIX", "--from-plan"),
    "--doc": ("--source NAME", "--source NAME=PREFIX", "--from-plan"),
    "--grep": ("--limit",),
    "--diff": (),
    "--html": ("--source NAME=PREFIX", "--from-plan"),
    "--card": (),
}
"""Option of `inspect` that replaces the summary → options that may accompany it."""


def inspect(
    directory: Directory,
    row: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Row to show. −1: the first row with the most tasks.",
            show_default=False,
        ),
    ] = None,
    segment: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Show only segment K of --row, without cuts. Segments count from 1.",
            show_default=False,
        ),
    ] = None,
    epoch: Annotated[
        int | None,
        typer.Option(
            metavar="E",
            min=0,
            help="Show --row and --segment as redraw resamples them in this epoch.",
            show_default=False,
        ),
    ] = None,
    doc: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE:]POSITION",
            help="Show where this document of --source NAME is used.",
            show_default=False,
        ),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="List the rows that contain this text.", show_default=False
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Maximum number of matches to list. Default: 100.",
            show_default=False,
        ),
    ] = None,
    diff: Annotated[
        str | None,
        typer.Option(metavar="OTHER", help="Compare with another dataset.", show_default=False),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write an HTML report, with rows to page through.",
            show_default=False,
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a data card for the Hugging Face Hub to a new file.",
            show_default=False,
        ),
    ] = None,
    source: MovedOrNamed = None,
    from_plan: Annotated[
        bool,
        typer.Option(
            "--from-plan", help="Read the sources at the locations that the dataset names."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a dataset contains.

    The default is a summary: totals, packing efficiency, tasks, sources and lengths. An option may
    select another view.
    """
    one_thread()
    # --source has two forms, which belong to different views.
    name, moved = named_and_moved(source)
    check_view(
        is_given := {
            "--row": row is not None,
            "--segment": segment is not None,
            "--epoch": epoch is not None,
            "--doc": doc is not None,
            "--grep": grep is not None,
            "--limit": limit is not None,
            "--diff": diff is not None,
            "--html": html is not None,
            "--card": card is not None,
            "--source NAME": name is not None,
            "--source NAME=PREFIX": bool(moved),
            "--from-plan": from_plan,
        }
    )
    from packprep.building.plan import datasets_in

    names = datasets_in(directory)
    # A view shows a single dataset, but a folder may have several row lengths.
    if len(names) > 1:
        _inspect_several(directory, names, [view for view in VIEWS if is_given[view]], as_json)
    elif segment is not None:
        # Each branch imports only the modules of its view, so that the command starts fast.
        from packprep.inspection.row import describe_segment, print_segment

        assert row is not None
        put(
            describe_segment(directory, row, segment, moved, from_plan, epoch or 0),
            as_json,
            print_segment,
        )
    elif row is not None:
        from packprep.inspection.row import describe_row, print_row

        put(describe_row(directory, row, moved, from_plan, epoch or 0), as_json, print_row)
    elif doc is not None:
        from packprep.inspection.document import describe_document, print_document

        put(describe_document(directory, name, doc, moved, from_plan), as_json, print_document)
    elif grep is not None:
        from packprep.inspection.search import describe_matches, print_matches

        put(
            describe_matches(directory, grep, 100 if limit is None else limit),
            as_json,
            print_matches,
        )
    elif diff is not None:
        from packprep.inspection.difference import describe_difference, print_difference

        put(describe_difference(directory, diff), as_json, print_difference)
    elif html is not None:
        put(_report(directory, html, moved, from_plan), as_json, _print_written, after_work=True)
    elif card is not None:
        from packprep.inspection.card import print_written_card, write_card
        from packprep.storage import expanded

        put(write_card(directory, expanded(card)), as_json, print_written_card, after_work=True)
    else:
        from packprep.inspection.summary import describe_dataset, print_summary

        put(describe_dataset(directory), as_json, print_summary)


def _inspect_several(directory: str, names: list[str], views: list[str], as_json: bool) -> None:
    """Print a summary of all datasets in a folder together, and a summary of each dataset.

    Raises:
        RecipeError: If a view is requested, because a view shows one dataset.
    """
    from packprep.errors import RecipeError
    from packprep.inspection.summary import describe_dataset, describe_several, print_summary

    if views:
        raise RecipeError(
            f"{directory} has {len(names)} datasets, but {views[0]} shows one"
            f"\nhint: give the folder of one dataset, such as {names[0]}"
        )
    summaries = [describe_dataset(name) for name in names]
    put_each([describe_several(directory, summaries), *summaries], as_json, print_summary)


def check_view(is_given: dict[str, bool]) -> None:
    """Check that the options of `inspect` are compatible.

    Args:
        is_given: Option → whether the user gave it. The keys include all options of VIEWS.

    Raises:
        RecipeError: If there are two views, or an option does not belong to the view.
    """
    from packprep.errors import RecipeError

    views = [option for option in VIEWS if is_given[option]]
    if len(views) > 1:
        raise RecipeError(
            f"{' and '.join(views)}: inspect shows one view at a time\nhint: give one of them"
        )
    view = views[0] if views else None
    for option in (option for option, given in is_given.items() if given and option not in VIEWS):
        if view is None or option not in VIEWS[view]:
            goes_with = [name for name, options in VIEWS.items() if option in options]
            raise RecipeError(
                f"{option} needs {' or '.join(goes_with)}"
                f"\nhint: {_instead(view, option, goes_with)}"
            )


def _instead(view: str | None, option: str, goes_with: list[str]) -> str:
    if option == "--segment" and view is None:
        return "give --row R too, because segments are numbered 1, 2, … in each row"
    if view is None:
        return f"give {' or '.join(goes_with)} too, or omit {option}"
    return f"omit {option} or {view}"


def named_and_moved(values: list[str] | None) -> tuple[str | None, dict[str, str]]:
    """Parse the values of --source, and return (name, {source: prefix}).

    For example, ["web", "books=/data"] gives ("web", {"books": "/data"}), and ["books=/data"] gives
    (None, {"books": "/data"}).
    """
    from packprep.errors import RecipeError

    names = [value for value in values or () if "=" not in value]
    if len(names) > 1:
        raise RecipeError(
            f"--source {names[1]}: a document has one source, and {names[0]} is already given"
        )
    if names == [""]:
        raise RecipeError("--source: expected NAME, or NAME=PREFIX as in --source web=/data/web")
    return names[0] if names else None, moved_of([value for value in values or () if "=" in value])


def _report(directory: str, html: str, moved: dict[str, str], from_plan: bool) -> dict[str, Any]:
    """Verify the shards that the report shows, and write the report."""
    from packprep.building.processes import available_cpus
    from packprep.errors import DatasetError, PackprepError, PlanError, VocabularyError
    from packprep.inspection.report import check_file, shards_shown, write_report
    from packprep.storage import expanded
    from packprep.verification import PROMISES, verify_dataset

    html = expanded(html)
    check_file(html)
    only = shards_shown(directory)
    verification: dict[str, Any] | PackprepError
    try:
        verification = verify_dataset(
            directory, None, moved, (0, 1), available_cpus(), Bar(), only=only
        )
    except (
        DatasetError,
        PlanError,
        VocabularyError,
    ) as error:  # The page reports the error, and shows the readable parts.
        verification = error
    return write_report(directory, html, moved, verification, PROMISES, from_plan)


def _print_written(written: Mapping[str, Any]) -> None:
    from packprep.messages import counted

    faults = written["faults"]
    verdict = (
        "not verified"
        if faults is None
        else "every invariant holds"
        if not faults
        else counted(faults, "fault")
    )
    rows = f"{written['shown_rows']:,} of {counted(written['rows'], 'row')}"
    put_line(f"{written['html']}: {written['bytes']:,} bytes, {rows}; {verdict}")
