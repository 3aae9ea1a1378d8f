"""How much of packprep somebody has to know: functions by stage of a build, files, import circles,
names with several meanings.

python benchmarks/concepts.py

The build is UL2R with a byte-level BPE that no build has met, one JSONL file, one shard, in this
process, so that parent and worker are counted together. Functions are those with a name, called at
least once. RECORDS and BOUNDARIES are lists made by hand, of which each name is looked up.
"""

import ast
import functools
import importlib
import multiprocessing
import secrets
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# the recipe and corpus are those of the tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import packprep

ROOT = Path(packprep.__file__).parent
STAGES = {
    "read to ledger": ("packprep.building.run", "make_shard"),
    "commit": ("packprep.building.run", "commit_shard"),
}
RECORDS = (
    "sources.formats.batch.Slice",
    "sources.formats.compressed.Block",
    "sources.formats.compressed.Cursor",
    "sources.formats.jsonl.Lines",
    "sources.formats.batch.BatchBuilder",
    "sources.formats.batch.Batch",
    "tokenizer.encoding.Tokens",
    "documents.reading.Documents",
    "dataset.segments.Segments",
    "objectives.objective.BodySlots",
    "building.work.Made",
)
"""Records that a document goes through on its way from a file's bytes to a shard."""
BOUNDARIES = (
    "dataset.boundaries", "verification.arrays",
)  # fmt: skip
"""Modules that work out where a row's segments lie."""


def stages(recipe: dict[str, Any], folder: Path, out: Path) -> dict[str, dict[str, int]]:
    """Stage → function of packprep → calls, of one build."""
    from packprep.building.run import build
    from packprep.recipe import read_recipe
    from tests.made import Silent

    root, stage = f"{ROOT}/", ["before the first document"]
    seen: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(root)
            and not code.co_name.startswith("<")
        ):
            seen[stage[0]][f"{code.co_filename[len(root) :]}:{code.co_qualname}"] += 1

    def marked(name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            stage[0] = name
            try:
                return function(*arguments, **named)
            finally:
                stage[0] = "after"

        return call

    before = []
    for name, (module, function) in STAGES.items():
        place = importlib.import_module(module)
        before.append((place, function, getattr(place, function)))
        setattr(place, function, marked(name, getattr(place, function)))
    try:
        sys.setprofile(note)
        threading.setprofile(note)
        build(read_recipe(recipe, folder), out, Silent())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        for place, function, own in before:
            setattr(place, function, own)
    return seen


def modules() -> dict[str, Path]:
    """Name → file of each module of the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = [ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, every: dict[str, Path]) -> set[str]:
    """The package's modules that one imports, wherever in it: in functions, for types alone, and by
    importlib too."""
    found = set()
    for node in ast.walk(ast.parse(every[name].read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names = [
                a.value
                for a in node.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
        for wanted in names:
            while wanted and wanted not in every:
                wanted = wanted.rpartition(".")[0]
            if wanted not in ("", name):
                found.add(wanted)
    return found


def circles(every: dict[str, Path]) -> Iterator[list[str]]:
    """Modules that import each other, directly or through others."""
    graph = {name: imports_of(name, every) for name in every}
    reach = {name: _reached(name, graph) for name in graph}
    done: set[str] = set()
    for name in graph:
        circle = sorted(other for other in reach[name] if name in reach[other])
        if len(circle) > 1 and name not in done:
            done.update(circle)
            yield circle


def _reached(name: str, graph: dict[str, set[str]]) -> set[str]:
    found, waiting = set[str](), [name]
    while waiting:
        for other in graph[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found


def classes_of_one_name(every: dict[str, Path]) -> dict[str, list[str]]:
    """Class name → the modules that each have a class of that name, where they are several."""
    found = defaultdict(list)
    for name, path in every.items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    return {name: places for name, places in found.items() if len(places) > 1}


def main() -> None:
    from tests import made
    from tests.tokenizer import tokenizers_made

    every = modules()
    for name in RECORDS:
        module, _, record = f"packprep.{name}".rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), record), type), name
    for name in BOUNDARIES:
        assert f"packprep.{name}" in every, name
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        made.write_lines(base / "in.jsonl", made.texts(200))
        reserved = [f"<|r{k}|>" for k in range(110)]
        specials = {"pad": "<pad>", "eos": "<eos>", "sentinels": {"first": 325, "count": 100}}
        specials |= {f"[{name}]": reserved[k] for k, name in enumerate(("NLU", "NLG", "S2S"))}
        recipe = made.table("in.jsonl", tokenizer="tokenizer.json", specials=specials, output={})
        recipe["tokenizer"] = str(base)
        tokenizers_made.write(
            base, tokenizers_made.byte_level("<pad>", "<eos>", *reserved, secrets.token_hex(8))
        )
        first = multiprocessing.get_context("fork").Process(
            target=stages, args=(recipe, base, base / "first")
        )
        first.start()  # compiles kernels, which is done once on a machine
        first.join()
        tokenizers_made.write(
            base, tokenizers_made.byte_level("<pad>", "<eos>", *reserved, secrets.token_hex(8))
        )
        counted = stages(recipe, base, base / "out")
    for stage, calls in counted.items():
        print(
            f"{stage:28} {len(calls):4} functions in"
            f" {len({name.split(':')[0] for name in calls}):3} files"
        )
    per_shard = set().union(*(counted[stage] for stage in STAGES))
    print(
        f"{'per shard':28} {len(per_shard):4} functions in"
        f" {len({name.split(':')[0] for name in per_shard}):3} files"
    )
    print(
        f"{len(RECORDS)} records from bytes to shard, {len(BOUNDARIES)} places that work out"
        " segments' boundaries"
    )
    print(
        f"{sum(path.read_text('utf-8').count(chr(10)) for path in every.values()):,} lines in"
        f" {len(every)} files"
    )
    for circle in circles(every):
        print("import circle:", ", ".join(circle))
    several = classes_of_one_name(every)
    print(f"{len(several)} class names with several meanings: {', '.join(sorted(several))}")


if __name__ == "__main__":
    main()
