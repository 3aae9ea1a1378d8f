"""The commands that create datasets and token stores, write recipes, and prepare machines."""

import os
from typing import Annotated, Any, Literal

import typer

from packprep.cli.arguments import (
    PRINTING_PANEL,
    ArrayCount,
    ArrayIndex,
    Directory,
    Inputs,
    Json,
    Moved,
    Out,
    Replay,
    Seed,
    SeqLength,
    Set,
    Tasks,
    TextKey,
    Tokenizer,
    Workers,
    moved_of,
    recipe_of,
)
from packprep.cli.printing import one_thread, put, put_each
from packprep.messages import Bar, put_line, say


def build(
    inputs: Inputs,
    out: Out,
    tokenizer: Tokenizer = None,
    seq_length: SeqLength = None,
    tasks: Tasks = None,
    text_key: TextKey = None,
    seed: Seed = None,
    workers: Workers = None,
    set_: Set = None,
    source: Moved = None,
    array_index: ArrayIndex = None,
    array_count: ArrayCount = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Print where the time went.", rich_help_panel=PRINTING_PANEL
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Build a dataset, or resume a build.

    To resume, run the same command again.
    """
    one_thread()
    from packprep.building.array_tasks import array_position
    from packprep.building.run import build as build_dataset
    from packprep.building.run import build_lengths
    from packprep.storage import folder_at

    recipe = recipe_of(inputs, tokenizer, seq_length, tasks, text_key, seed, set_)
    position = array_position(array_index, array_count, os.environ, is_build=True)
    bar = Bar()
    output = folder_at(out)
    fresh = not (output.exists("plan.json") or output.exists(f"seq_{recipe.lengths[0]}/plan.json"))

    # A new build shows its first document, so that the user sees a mistake early.
    def on_start(job: Any) -> None:
        from packprep.inspection.document import first_document

        if fresh:
            bar.say(first_document(job))

    options: dict[str, Any] = {
        "workers": workers,
        "moved": moved_of(source),
        "array": position,
        "on_start": on_start,
    }
    if recipe.seq_length:
        outcomes = [build_dataset(recipe, output, bar, **options)]
    else:
        outcomes = build_lengths(recipe, output, bar, **options)
    from packprep.inspection.summary import describe_build, print_summary

    results = [describe_build(outcome) for outcome in outcomes]
    if profile:
        from packprep.clock import describe_profile

        results = [
            {**result, "profile": describe_profile(outcome.profile)}
            for result, outcome in zip(results, outcomes, strict=True)
        ]

    def print_one(result: dict[str, Any]) -> None:
        print_summary(result)
        if profile and result is results[-1]:  # One profile describes the whole build.
            from packprep.cli.printing import print_profile

            put_line()
            print_profile(result["profile"])

    put_each(results, as_json, print_one, after_work=True)


def tokenize(
    inputs: Inputs,
    out: Out,
    tokenizer: Tokenizer = None,
    text_key: TextKey = None,
    workers: Workers = None,
    set_: Set = None,
    source: Moved = None,
    array_index: ArrayIndex = None,
    array_count: ArrayCount = None,
    as_json: Json = False,
) -> None:
    """Tokenize once, for many datasets.

    This writes a token store, which `build` then reads instead of the text. To resume, run the
    same command again.
    """
    one_thread()
    from packprep.building.array_tasks import array_position
    from packprep.building.run import build as build_dataset
    from packprep.inspection.summary import describe_build, print_summary
    from packprep.storage import folder_at

    recipe = recipe_of(inputs, tokenizer, None, None, text_key, None, set_)
    position = array_position(array_index, array_count, os.environ, is_build=True)
    outcome = build_dataset(
        recipe, folder_at(out), Bar(), workers, moved_of(source), position, is_store=True
    )
    put(describe_build(outcome), as_json, print_summary, after_work=True)


def plan(
    inputs: Inputs,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Also report the state and the free space of this output folder.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    seq_length: SeqLength = None,
    tasks: Tasks = None,
    text_key: TextKey = None,
    seed: Seed = None,
    workers: Workers = None,
    set_: Set = None,
    source: Moved = None,
    as_json: Json = False,
) -> None:
    """Estimate what a build would write.

    This prints shards, tokens, bytes, time, memory, shares and spans. It reads only a sample and
    writes nothing.
    """
    one_thread()
    from packprep.cli.printing import print_forecast

    recipe = recipe_of(inputs, tokenizer, seq_length, tasks, text_key, seed, set_)
    from packprep.building.commit import missing_shards
    from packprep.building.forecast import built_together, outlook
    from packprep.building.lengths import folders_of_lengths
    from packprep.building.plan import plan_digests
    from packprep.building.planning import look_up_each
    from packprep.building.run import begun, workers_for
    from packprep.storage import folder_at

    # A recipe with several row lengths has a plan and a folder for each length.
    recipes, outputs = recipe.by_length(), [None if out is None else folder_at(out)]
    if not recipe.seq_length:
        outputs = [None] * len(recipes)
        if out is not None:
            outputs = [folder_at(path) for _, path in folders_of_lengths(recipe, folder_at(out))]
    inputs_by_length = look_up_each(recipes, moved_of(source))
    for note in inputs_by_length[0].vocabulary.notes:
        say(note)
    # If a build was started in the folder, its plan is shown instead of a new plan.
    standing = [
        None if output is None else begun(dataset_inputs, output)
        for dataset_inputs, output in zip(inputs_by_length, outputs, strict=True)
    ]
    results, missing = [], []
    for dataset_inputs, output, stored in zip(inputs_by_length, outputs, standing, strict=True):
        results.append(_forecast(dataset_inputs, stored and stored[0], workers))
        shards = range(results[-1]["shards"])
        missing.append(
            len(shards)
            if output is None or stored is None
            else len(missing_shards(output, plan_digests(*stored), shards))
        )
    # Documents of all row lengths are read and tokenized once.
    results = built_together(results, missing)
    for result, output, stored, count in zip(results, outputs, standing, missing, strict=True):
        processes = workers or workers_for(result["text_bytes"] * count // result["shards"])
        to_come = result["to_come"] = outlook(result, count, processes)
        if output is None:
            continue
        free = output.free_bytes()
        result["out"] = {"folder": str(output), "begun": stored is not None, "free_bytes": free}
        if free is not None and free < to_come["output_bytes"]:
            result["warnings"].append(
                f"{output} has {free:,} bytes free, but the build needs"
                f" {to_come['output_bytes']:,} more; free some space, or choose another --out"
            )
    put_each(results, as_json, print_forecast)


def _forecast(inputs: Any, stored: Any, workers: int | None) -> dict[str, Any]:
    """Return the forecast of a build of one dataset.

    Args:
        inputs: The recipe and its `Inputs`.
        stored: The plan of a build that was started, or None.
        workers: Number of worker processes, or None for the default.
    """
    from packprep.building.forecast import forecast
    from packprep.building.planning import make_plan
    from packprep.building.run import pace
    from packprep.tokenizer.engines import load_engine

    samples: list[Any] = []
    planned = make_plan(inputs, say, samples)
    if stored is not None:
        planned = stored
    engine = (
        load_engine(planned["engine"], inputs.vocabulary, inputs.recipe.documents.special_text)
        if inputs.has_text
        else None
    )
    say(pace(planned, engine, inputs, workers))
    return forecast(planned, inputs, samples)


def status(directory: Directory, array_count: ArrayCount = None, as_json: Json = False) -> None:
    """Show which shards are done or missing.

    With --array-count, this also prints the --array= list that makes the missing shards.
    """
    from packprep.building.distributed import status_of
    from packprep.building.plan import datasets_in
    from packprep.cli.printing import print_status

    names = datasets_in(directory)
    results = [status_of(name, array_count, len(names) > 1) for name in names]
    put_each(results, as_json, print_status)
    if not all(result["published"] for result in results):
        raise typer.Exit(1)


def slurm(
    out: Out,
    array: Annotated[
        int,
        typer.Option(
            "--array", metavar="N", min=1, help="Number of array tasks.", show_default=False
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE.toml | INPUT... [-- SBATCH OPTIONS]",
            help="Inputs as for build, then options of sbatch.",
        ),
    ] = None,
    command: Annotated[
        Literal["build", "tokenize", "verify"], typer.Option(help="Command that the array runs.")
    ] = "build",
    at_once: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Number of tasks that run at a time. Default: N/4, at least 16.",
            show_default=False,
        ),
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Also submit the scripts.")] = False,
    tokenizer: Tokenizer = None,
    seq_length: SeqLength = None,
    tasks: Tasks = None,
    text_key: TextKey = None,
    seed: Seed = None,
    workers: Workers = None,
    set_: Set = None,
    source: Moved = None,
    replay: Replay = None,
) -> None:
    """Write the scripts of a Slurm array.

    The array builds or verifies a dataset. The scripts go to DIR.slurm/, and --submit submits them.
    """
    from packprep.building.slurm import ArrayJob, arguments_of, prepare, print_prepared

    first_option = next((i for i, word in enumerate(inputs or ()) if word.startswith("-")), None)
    input_words, words = (
        (inputs or [])[:first_option],
        [] if first_option is None else (inputs or [])[first_option:],
    )
    if command != "verify":
        # Report errors here instead of in every task.
        recipe_of(input_words, tokenizer, seq_length, tasks, text_key, seed, set_)
        moved_of(source)
    flags = {
        "--tokenizer": tokenizer,
        "--seq-length": seq_length,
        "--tasks": tasks,
        "--text-key": text_key,
        "--seed": seed,
        "--set": set_,
        "--source": source,
        "--replay": replay,
    }
    job = ArrayJob(
        command,
        arguments_of(command, input_words, flags),
        out,
        array,
        at_once,
        workers,
        tuple(words),
    )
    put(prepare(job, submit, say), False, print_prepared, after_work=True)


def warm(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE.toml]",
            help="Compile only the kernels that this recipe needs.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile all kernels ahead of time.

    Otherwise, the first command that needs a kernel compiles it. Use this for container images and
    job arrays.
    """
    one_thread()
    from packprep.cli.warming import compile_ahead, print_compiled
    from packprep.errors import RecipeError

    if recipe is not None and not recipe.endswith(".toml"):
        raise RecipeError(f"{recipe}: expected a RECIPE.toml\nhint: omit it to compile all kernels")
    one_recipe = None if recipe is None else recipe_of([recipe], None, None, None, None, None, None)
    put(
        compile_ahead(one_recipe and one_recipe.by_length()[-1]),
        as_json,
        print_compiled,
        after_work=True,
    )


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE.toml]", help="Also check what this recipe needs.", show_default=False
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Also check this output folder or URL.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find problems that stop or slow a build here.

    This prints one line for each check, with the cost of a problem and a remedy.
    """
    one_thread()
    from packprep.cli.doctor import FAILS, examine, print_findings
    from packprep.errors import RecipeError

    if recipe is not None and not recipe.endswith(".toml"):
        raise RecipeError(
            f"{recipe}: expected a RECIPE.toml\nhint: omit it to check only this machine"
        )
    one_recipe = None if recipe is None else recipe_of([recipe], None, None, None, None, None, None)
    result = examine(one_recipe, out)
    put(result, as_json, print_findings)
    if result["result"] == FAILS:
        raise typer.Exit(1)


def init(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Files, patterns, folders or URLs of the data."),
    ],
    tokenizer: Tokenizer = None,
    tasks: Tasks = None,
    text_key: TextKey = None,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="Name of the new recipe.")
    ] = "recipe.toml",
    as_json: Json = False,
) -> None:
    """Write a first recipe for your data.

    This reads some of the data. The recipe explains its keys. No existing file is overwritten.
    """
    one_thread()
    from pathlib import Path

    from packprep.cli.first_recipe import print_first_recipe, write_first_recipe
    from packprep.storage import expanded

    written = write_first_recipe(
        paths, tokenizer or "bytes", tasks or "causal", text_key, Path(expanded(out)), say
    )
    put(written, as_json, print_first_recipe, after_work=True)


def schema() -> None:
    """Print the JSON schema of recipes.

    Editors use it to check and complete recipes.
    """
    import json

    from packprep.objectives.tasks import recipe_schema
    from packprep.sources.formats import formats_asked

    put(recipe_schema(formats_asked()), False, lambda schema: print(json.dumps(schema, indent=2)))
