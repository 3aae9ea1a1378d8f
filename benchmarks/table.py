"""The whole table, side by side, in one command; every line says the work done beside the time.

python benchmarks/corpus.py CORPUS                                     once: a corpus from packages
python benchmarks/table.py --corpus CORPUS --json RESULT.json          all groups
python benchmarks/table.py --corpus CORPUS --only builds --size 20MB
python benchmarks/table.py --render RESULT.json                        rewrite the tables of docs/benchmarks.md

packprep runs in the interpreter that runs this; its peers in the first of --peers-python that has
their packages (see requirements-peers.txt). A peer that no interpreter has is a line that says so.
"""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import inputs
import results
from measuring import HERE, Line, available, environment, in_turn, machine
from peers.contender import Config, Contender

from packprep.building.planning import made_with
from packprep.recipe import parse_size

PAGE = HERE.parent / "docs" / "benchmarks.md"
NEEDS_TOKENS = ("packers", "collators", "loaders")


def absent(contender: Contender) -> str:
    """Why a line was not measured."""
    return (
        f"no interpreter given has {', '.join(contender.modules)} (pip install"
        f" {contender.packages[0]})"
    )


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Prepare the inputs, run the groups, give the result."""

    def say(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    source = arguments.corpus / "corpus.jsonl"
    size = min(source.stat().st_size, arguments.size or source.stat().st_size)
    slow_size = min(size, arguments.slow_size)
    pythons = [sys.executable, *(str(python) for python in arguments.peers_python)]
    say("making the inputs")
    shared = (arguments.workers, arguments.seq_length, folder)
    config = inputs.prepare(arguments.corpus, size, *shared)
    slow = inputs.prepare(arguments.corpus, slow_size, *shared)
    if any(group in NEEDS_TOKENS for group in arguments.only):
        inputs.prepare_tokens(config)
        inputs.prepare_tokens(slow)

    def repeats(contender: Contender) -> int:
        return (
            min(arguments.repeats, arguments.slow_repeats) if contender.slow else arguments.repeats
        )

    lines: list[Line] = []
    for group in arguments.only:
        contenders: list[Contender] = importlib.import_module(f"peers.{group}").CONTENDERS
        if arguments.line:
            contenders = [contender for contender in contenders if contender.name in arguments.line]
        found = available(group, pythons, environment())
        runs: list[tuple[Line, Contender, Config, str]] = []
        for contender in contenders:
            own = slow if contender.slow else config
            own_bytes = Path(own["one" if contender.kind == "start-up" else "jsonl"]).stat().st_size
            line = Line(group, contender.name, contender.what, contender.kind, own_bytes)
            lines.append(line)
            if contender.name in found:
                python, line.versions = found[contender.name]
                line.versions.pop("packprep", None)
                runs.append((line, contender, own, python))
            else:
                line.status, line.why = "not installed", absent(contender)
        if group == "builds":
            say("compiling kernels")
            warm = {**config, **dict.fromkeys(inputs.SOURCES, config["one"])}
            own_runs = [
                (one, python) for _, one, _, python in runs if one.packages == ("packprep",)
            ]
            again = [
                (Line(group, one.name, "", "", 0), one, warm, python) for one, python in own_runs
            ]
            in_turn(again, lambda contender: 1, folder, say)
        in_turn(runs, repeats, folder, say)
    settings = {"size": size, "slow_size": slow_size, "repeats": arguments.repeats}
    settings |= {"slow_repeats": min(arguments.repeats, arguments.slow_repeats)}
    settings |= {"workers": arguments.workers, "seq_length": arguments.seq_length}
    facts = {"machine": machine(), "made_with": made_with(), "settings": settings}
    return results.as_json(lines, facts)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, help="what benchmarks/corpus.py made")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(results.GROUPS),
        default=list(results.GROUPS),
        metavar="GROUP",
    )
    parser.add_argument(
        "--peers-python",
        type=Path,
        nargs="+",
        default=[],
        metavar="PYTHON",
        help="interpreters of peers",
    )
    parser.add_argument(
        "--line",
        action="append",
        metavar="NAME",
        help="only this line of a group; may be given again",
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each line (default: 5)")
    parser.add_argument(
        "--slow-repeats", type=int, default=3, help="runs of slow lines (default: 3)"
    )
    parser.add_argument(
        "--size", type=parse_size, help="bytes of JSON lines (default: the whole corpus)"
    )
    parser.add_argument(
        "--slow-size", type=parse_size, default=parse_size("100MB"), help="… for slow lines (100MB)"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of each contender (default: 2)"
    )
    parser.add_argument(
        "--seq-length", type=int, default=4096, help="slots per row (default: 4096)"
    )
    parser.add_argument(
        "--folder", type=Path, help="keep inputs there (default: a temporary folder)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--render", type=Path, metavar="RESULT", help="only write docs/benchmarks.md from a result"
    )
    arguments = parser.parse_args(argv)
    if arguments.render is None and arguments.corpus is None:
        parser.error("--corpus FOLDER is needed: python benchmarks/corpus.py FOLDER makes one")
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Run and print, or render."""
    arguments = parsed(argv)
    if arguments.render is not None:
        results.render(PAGE, json.loads(arguments.render.read_text("utf-8")))
        return
    arguments.corpus = arguments.corpus.resolve()
    # not resolve(): the interpreter of a virtual environment is a link
    arguments.peers_python = [python.absolute() for python in arguments.peers_python]
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="packprep-table-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = run(arguments, folder)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(results.as_text(result))


if __name__ == "__main__":
    main()
