"""The application with its commands in the order of its help, and its usage errors."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from packprep import messages
from packprep.cli.arguments import PRINTING_PANEL
from packprep.cli.auditing import audit
from packprep.cli.building import build, doctor, init, plan, schema, slurm, status, tokenize, warm
from packprep.cli.datasets import export, inspect, remove, verify
from packprep.cli.tracing import trace
from packprep.messages import say_error


def _show(level: str) -> Any:
    """Return the callback of a flag. The callback sets the level of output to `level`."""
    return lambda context, parameter, is_wanted: messages.show(level) if is_wanted else None


def _loudness() -> list[TyperOption]:
    """Return the options for the amount of output on stderr.

    They are allowed before and after the name of a command.
    """
    return [
        TyperOption(
            param_decls=[f"-{name[0]}", f"--{name}"],
            is_flag=True,
            expose_value=False,
            callback=_show(level),
            help=help,
            rich_help_panel=PRINTING_PANEL,
        )  # fmt: skip
        for name, level, help in (
            ("quiet", messages.ERRORS, "Print only errors and results."),
            ("verbose", messages.STAGES, "Also print each stage and shard, with the seconds."),
        )
    ]


class Command(TyperCommand):
    """A command with the common options, a help grouped by panels, and examples as its epilog."""

    def __init__(self, *arguments: Any, params: list[Any], **named: Any):
        super().__init__(*arguments, params=[*params, *_loudness()], **named)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            named = (
                "Arguments"
                if param.param_type_name == "argument"
                else PRINTING_PANEL
                if "-h" in param.opts
                else "Options"
            )
            record = param.get_help_record(ctx)
            panels.setdefault(getattr(param, "rich_help_panel", None) or named, []).extend(
                [record] if record else []
            )
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for line in (self.epilog or "").splitlines():
                formatter.write(f"  {line}\n")


class Commands(TyperGroup):
    """The group of all commands, which also takes the common options before a command's name."""

    def __init__(self, *arguments: Any, params: list[Any], **named: Any):
        super().__init__(*arguments, params=[*params, *_loudness()], **named)


app = typer.Typer(
    name="packprep",
    cls=Commands,
    help="Tokenize, pack and corrupt text into training shards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


UsageError: Any = typer.BadParameter.__base__
"""The exception that typer raises for an invalid command line. Its name depends on typer's version.
"""
_WANTED = {
    "--out": "give --out DIR, the folder to build into",
    "--array": "give --array N, the number of array tasks",
    "RECIPE.toml | INPUT...": "name a RECIPE.toml, or files and patterns",
    "DIR": "name the folder of a dataset",
    "PATH": "name a packed dataset",
}


def say_usage(error: Any, words: Sequence[str]) -> None:
    """Print an error about the command line to stderr, with a hint.

    Args:
        error: The exception that typer raised.
        words: The words of the command line.
    """
    message = error.format_message().rstrip(".")
    if message.startswith("Missing"):
        message = " ".join(message.split())  # The message also lists the choices.
    if not message or "\n" in message:  # The message is the help, because no command was given.
        error.show()
        return
    command = error.ctx.command_path if error.ctx else "packprep"
    parameter = getattr(error, "param", None)
    names = (
        [getattr(error, "option_name", "")]
        if parameter is None
        else [*parameter.opts, str(parameter.metavar)]
    )
    value = next((w for option, w in zip(words, words[1:], strict=False) if option in names), None)
    # The message shows the value, unless it has the value already.
    if value is not None and message.startswith("Invalid value") and repr(value) not in message:
        message += f", and {value!r} is given"
    is_known = not message.startswith(("Invalid", "No such"))
    advice = next((_WANTED[name] for name in names if name in _WANTED), None) if is_known else None
    say_error(
        f"error: {command}: {message}\nhint: {advice or f'run `{command} -h` for the arguments'}"
    )


def _version(is_wanted: bool) -> None:
    if is_wanted:
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


EXAMPLES: dict[Callable[..., None], str] = {
    init: (
        """\
packprep init data/*.jsonl --tokenizer tokenizer/
packprep init s3://bucket/web/ --tokenizer meta-llama/Llama-3.1-8B --tasks ul2r --out web.toml"""
    ),
    doctor: (
        """\
packprep doctor
packprep doctor recipe.toml --out /data/packed"""
    ),
    build: (
        """\
packprep build recipe.toml --out packed
packprep build 'docs/**/*.txt' --tokenizer tokenizer/ --tasks ul2r --seq-length 2048 --out packed"""
    ),
    tokenize: (
        """\
packprep tokenize recipe.toml --out store
packprep tokenize 'data/**/*.jsonl' --tokenizer tokenizer/ --out s3://bucket/store"""
    ),
    plan: (
        """\
packprep plan recipe.toml --out packed --workers 16
packprep plan recipe.toml --seq-length 8192 --set packing.algorithm=concat"""
    ),
    status: (
        """\
packprep status packed
packprep status packed --array-count 64"""
    ),
    verify: (
        """\
packprep verify packed
packprep verify packed --replay 1000 --source web=/mnt/web"""
    ),
    inspect: (
        """\
packprep inspect packed --row -1
packprep inspect packed --html report.html --from-plan
packprep inspect packed --source web --doc 4096"""
    ),
    trace: (
        """\
packprep trace packed --step 812 --batch-size 8 --world-size 16 --seed 1
packprep trace packed --losses losses.jsonl --batch-size 8 --world-size 16 --out worst.jsonl
packprep trace packed --document a.jsonl:4096 --state run.json --batch-size 8 --world-size 16"""
    ),
    audit: (
        """\
packprep audit megatron/web_text_document --tokenizer tokenizer/
packprep audit packed.parquet --tokenizer tokenizer/ --fail-on padding=0.05 --html audit.html
packprep audit train.bin --eos-id 50256 --source 'web/*.jsonl' --tokenizer gpt2"""
    ),
    export: (
        """\
packprep export packed --to megatron --out megatron/
packprep export packed --to parquet --columns full --out parquet/
packprep export packed --to hf --out hf/
packprep export packed --to jsonl --what rows --out lines/"""
    ),
    remove: (
        """\
packprep remove packed --documents withdrawn.jsonl --out packed2"""
    ),
    slurm: (
        """\
packprep slurm recipe.toml --out packed --array 64 --submit -- --time=4:00:00 --mem=8G
packprep slurm --command verify --out packed --array 16"""
    ),
    warm: (
        """\
packprep warm
packprep warm recipe.toml"""
    ),
    schema: (
        """\
packprep schema > recipe.schema.json"""
    ),
}
"""Command → examples in its epilog, in the order of the help."""

for command, examples in EXAMPLES.items():
    app.command(cls=Command, epilog=examples)(command)
