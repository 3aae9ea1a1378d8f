"""The commands that go through a dataset: verify, export."""

import os
import time
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
    Out,
    Replay,
    Workers,
    moved_of,
    recipe_of,
    replay_of,
)


def verify(
    directory: Directory,
    replay: Replay = None,
    replay_seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Which segments --replay N takes. Default: by the clock.", show_default=False
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="FILE", help="Compare with this recipe, too.", show_default=False)
    ] = None,
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
    from packprep.errors import RecipeError
    from packprep.verification import print_report, verify_dataset

    position = array_position(array_index, array_count, os.environ)
    bar = Bar()
    count = workers or available_cpus()
    if recipe is not None and not recipe.endswith(".toml"):
        raise RecipeError(f"--recipe {recipe}: expected a RECIPE.toml, that which the dataset was built from")
    given = None if recipe is None else recipe_of([recipe], None, None, None, None, None, None)
    seed = time.time_ns() % 1_000_000 if replay_seed is None else replay_seed
    report = verify_dataset(
        directory, replay_of(replay), moved_of(source), position, count, bar, twin, replay_seed=seed, recipe=given
    )
    put(report, as_json, print_report)
    if report["faults"]:
        raise typer.Exit(1)


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
