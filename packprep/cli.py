"""The commands. Each parses, calls one function, prints. Results on stdout, progress and messages on stderr.

Exit status: 0 good · 1 `verify` found faults, or `status` found shards missing · 2 an error · 75 stopped by a signal.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from packprep.building.progress import Bar, say

app = typer.Typer(
    name="packprep",
    help="Text corpora to packed, corrupted, verified training rows: once, offline, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Inputs = Annotated[list[str], typer.Argument(metavar="RECIPE.toml | INPUT...", help="A recipe, or files and patterns.")]
Out = Annotated[
    str, typer.Option("--out", metavar="DIR", help="The output folder, or its URL: s3://…", show_default=False)
]
Directory = Annotated[str, typer.Argument(metavar="DIR", help="A dataset, or the output of a build; or its URL.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Tokenizer = Annotated[
    str | None, typer.Option(help='A tokenizer.json, its folder, a Hub name, or "bytes".', show_default=False)
]
SeqLength = Annotated[int | None, typer.Option(metavar="N", help="Slots per row.", show_default=False)]
Tasks = Annotated[
    str | None, typer.Option(metavar="PRESET", help="causal, prefix_lm, t5, ul2, ul2r, …", show_default=False)
]
TextKey = Annotated[
    str | None, typer.Option(metavar="K", help="The field or column that holds the text.", show_default=False)
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The seed of all chance.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a key of the recipe; TOML, or else a text.", show_default=False
    ),
]
Moved = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="NAME=PREFIX",
        help="Where a source's files lie now, if they have moved.",
        show_default=False,
    ),
]
Replay = Annotated[
    str | None,
    typer.Option(metavar="N|all", help="Build N segments, or all shards, again and compare.", show_default=False),
]
Workers = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Processes. Default: the CPUs it may use.", show_default=False)
]
ArrayIndex = Annotated[
    int | None, typer.Option(metavar="I", min=0, help="This array task: 0 … N−1.", show_default=False)
]
ArrayCount = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="How many array tasks share the build.", show_default=False)
]


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


@app.command()
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
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went.")] = False,
    as_json: Json = False,
) -> None:
    """Build a dataset, or go on with a build that stopped: run the same command again."""
    _one_thread()
    from packprep.building.array import array_position
    from packprep.building.output import output_of
    from packprep.building.profile import describe_profile, print_profile
    from packprep.building.run import build as run_build
    from packprep.inspection.summary import describe_build, first_document, print_summary

    recipe = _recipe(inputs, tokenizer, seq_length, tasks, text_key, seed, set_)
    position = array_position(array_index, array_count, os.environ)
    bar = Bar()
    output = output_of(out)
    fresh = not output.exists("plan.json")
    outcome = run_build(recipe, output, bar, workers, _moved(source), position)
    if fresh:
        bar.say(first_document(outcome.job))
    summary = describe_build(outcome)
    if not profile:
        _print(summary, as_json, print_summary)
        return
    with_profile = {**summary, "profile": describe_profile(outcome.profile)}

    def print_both(result: dict[str, Any]) -> None:
        print_summary(result)
        print()
        print_profile(result["profile"])

    _print(with_profile, as_json, print_both)


@app.command()
def plan(
    inputs: Inputs,
    tokenizer: Tokenizer = None,
    seq_length: SeqLength = None,
    tasks: Tasks = None,
    text_key: TextKey = None,
    seed: Seed = None,
    set_: Set = None,
    source: Moved = None,
    as_json: Json = False,
) -> None:
    """Say what a build would make: shards, tokens, bytes, memory, shares, spans. Reads almost nothing."""
    _one_thread()
    from packprep.building.forecast import forecast, print_forecast
    from packprep.building.plan import look_up, make_plan

    recipe = _recipe(inputs, tokenizer, seq_length, tasks, text_key, seed, set_)
    found = look_up(recipe, _moved(source))
    for note in found.vocabulary.notes:
        say(note)
    _print(forecast(make_plan(found, say), found), as_json, print_forecast)


@app.command()
def status(directory: Directory, array_count: ArrayCount = None, as_json: Json = False) -> None:
    """Say which shards are done and which are missing, and the --array= list that would make them."""
    from packprep.building.status import print_status, status_of

    result = status_of(directory, array_count)
    _print(result, as_json, print_status)
    if not result["published"]:
        raise typer.Exit(1)


@app.command()
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
    _one_thread()
    from packprep.building.array import array_position
    from packprep.building.processes import available_cpus
    from packprep.verification import print_report, verify_dataset

    position = array_position(array_index, array_count, os.environ)
    bar = Bar()
    count = workers or available_cpus()
    report = verify_dataset(directory, _replay(replay), _moved(source), position, count, bar, twin)
    _print(report, as_json, print_report)
    if report["faults"]:
        raise typer.Exit(1)


@app.command()
def slurm(
    out: Out,
    array: Annotated[int, typer.Option("--array", metavar="N", min=1, help="Array tasks.", show_default=False)],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE.toml | INPUT... [-- SBATCH OPTIONS]", help="As for build, and options of sbatch."
        ),
    ] = None,
    command: Annotated[Literal["build", "verify"], typer.Option(help="What the array does.")] = "build",
    at_once: Annotated[
        int | None,
        typer.Option(
            metavar="K", min=1, help="Tasks that run at a time. Default: N/4, at least 16.", show_default=False
        ),
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the scripts, too.")] = False,
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
    """Write the scripts of a Slurm array that builds or verifies, into DIR.slurm/; submit them with --submit."""
    from packprep.building.slurm import ArrayJob, arguments_of, prepare, print_prepared

    first = next((i for i, word in enumerate(inputs or ()) if word.startswith("-")), None)
    given, words = (inputs or [])[:first], [] if first is None else (inputs or [])[first:]
    if command == "build":
        _recipe(given, tokenizer, seq_length, tasks, text_key, seed, set_)  # refused here, and not in every task
        _moved(source)
    flags = {
        "--tokenizer": tokenizer, "--seq-length": seq_length, "--tasks": tasks, "--text-key": text_key, "--seed": seed,
        "--set": set_, "--source": source, "--replay": replay,
    }  # fmt: skip
    job = ArrayJob(command, arguments_of(command, given, flags), out, array, at_once, workers, tuple(words))
    print_prepared(prepare(job, submit, say))


@app.command()
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
        _print(describe_dataset(directory), as_json, print_summary)
    else:
        _print(describe_row(directory, row, _moved(source)), as_json, print_row)


def _recipe(
    inputs: list[str],
    tokenizer: str | None,
    seq_length: int | None,
    tasks: str | None,
    text_key: str | None,
    seed: int | None,
    assignments: list[str] | None,
) -> Any:
    from packprep.errors import RecipeError
    from packprep.recipe import load_recipe, read_recipe, set_value

    recipes = [name for name in inputs if name.endswith(".toml")]
    if recipes and len(inputs) > 1:
        raise RecipeError(f"{recipes[0]} is a recipe: give one recipe, or inputs, not both")
    if recipes:
        table, base = load_recipe(Path(recipes[0])), Path(recipes[0]).resolve().parent
    else:
        table, base = {"sources": [{"paths": list(inputs)}]}, Path.cwd()
        if tokenizer is None and not any(a.startswith("tokenizer=") for a in assignments or ()):
            say('tokenizer: "bytes", the built-in byte vocabulary; name another with --tokenizer')
            table["tokenizer"] = "bytes"
    for key, value in (("seq_length", seq_length), ("seed", seed)):
        if value is not None:
            table[key] = value
    if tokenizer is not None:
        exists = Path(tokenizer).exists()
        table["tokenizer"] = str(Path(tokenizer).resolve()) if exists else tokenizer
    if tasks is not None:
        table["tasks"] = [{"preset": tasks}]
    sources = table.get("sources")
    if text_key is not None and isinstance(sources, list):
        table["sources"] = [
            {**source, "text_key": text_key} if isinstance(source, dict) else source for source in sources
        ]
    for assignment in assignments or ():
        set_value(table, assignment)
    return read_recipe(table, base)


def _moved(pairs: list[str] | None) -> dict[str, str]:
    from packprep.errors import RecipeError

    moved = {}
    for pair in pairs or ():
        name, equals, prefix = pair.partition("=")
        if not equals or not name or not prefix:
            raise RecipeError(f"--source {pair}: expected NAME=PREFIX, as in --source web=/data/web")
        moved[name] = prefix
    return moved


def _replay(text: str | None) -> int | None:
    """How many segments to build again; −1 for all shards; None for no replay."""
    from packprep.errors import RecipeError

    if text is None or text == "all":
        return None if text is None else -1
    if not text.isdecimal() or int(text) < 1:
        raise RecipeError(f"--replay {text}: expected a number of segments, or all")
    return int(text)


def _one_thread() -> None:
    """No threads of libraries, before they are imported: processes scale, and only a process of one thread may be forked."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _print(result: Any, as_json: bool, printer: Callable[[Any], None]) -> None:
    try:
        if as_json:
            print(json.dumps(result, ensure_ascii=False, sort_keys=True))
        else:
            printer(result)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout has read enough; the exit status stays that of the command
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the command line; the one place where an error becomes a message and an exit status."""
    from packprep.errors import PackprepError, Stopped

    def stop(number: int, frame: object) -> None:
        raise Stopped("by a signal; nothing was lost, and the same command begins or goes on")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's name may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except PackprepError as error:
        say(f"{'stopped' if error.exit_status == 75 else 'error'}: {error}")
        raise SystemExit(error.exit_status) from None
    except OSError as error:
        say(f"error: {error}; see to it and run the same command again")
        raise SystemExit(2) from None


def entry() -> None:
    """`main`, as the command of a process, which ends without taking its data apart: that takes longer than a small build."""
    status: Any = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    if not isinstance(status, int | None) or "multiprocessing.forkserver" in sys.modules:
        raise SystemExit(status)  # a server of processes has a folder to remove
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status or 0)
