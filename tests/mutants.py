"""Mutants: copies of packprep with one line changed. Each should be found, by `verify --replay
all`, by the twin or by a test.

    python tests/mutants.py --count 500
    python tests/mutants.py --lines packprep/building/run.py:12

prints each with what found it. It is judged first by small builds that its own code verifies, and
by copies of them without some documents. Then the tests of its mirror file follow, then those of
other files that import its module, and some that build. Files that name the mutant's function or a
caller of it come first, and the first test of a file comes before its others. A survivor is a hole
in the tests, or changes nothing that anybody can see: mutants_equivalent.toml lists the latter with
the reason, and the constants that only tune speed or memory. `--folder` keeps compiled kernels for
the next run.
"""

import argparse
import ast
import builtins
import contextlib
import importlib
import inspect
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("sources", "tokenizer", "documents", "building", "objectives", "dataset")
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
LIBRARIES = (
    "numba",
    "pyarrow.parquet",
    "tokenizers",
    "fastokens",
    "msgspec",
    "zstandard",
    "xxhash",
    "jinja2",
    "rich.console",
    "typer",
    "fsspec",
    "scipy.special",
    "hypothesis",
)
"""Imported once: each mutant is judged in children that are forked with them."""
READING = ("test_attention", "test_reading", "test_loader", "test_mixture", "test_redraw")
WHOLE = ["tests/golden/test_datasets.py", "tests/test_groups.py", "tests/test_removing.py"]
WIDER = {
    "dataset": [
        *(f"tests/dataset/{name}.py" for name in READING),
        "tests/inspection/test_trace.py",
        *WHOLE,
    ],
    **dict.fromkeys(ROOMS[:5], [*WHOLE, "tests/test_bad_input.py", "tests/building/test_run.py"]),
}
"""Room → tests of what is made of it."""
RECORDS = "records.jsonl"
MAX_BYTES = 6 << 30


# Mutations


class Mutant(NamedTuple):
    """One line of a file that becomes another. names: what a kernel would name if it depended on
    it."""

    file: str
    line: int
    names: frozenset[str]
    what: str
    was: str
    becomes: str

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line} ({self.what})\n    - {self.was.strip()}\n    +"
            f" {self.becomes.strip()}"
        )


_COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_CALCULATED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_CALLED = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "minimum": "maximum",
    "maximum": "minimum",
}
_UNSEEN = {"annotation", "returns", "decorator_list"}


def _mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    """(kind, what stands in the node's place)."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARED:
            yield "comparison", ast.Compare(left, [_COMPARED[type(operator)]()], [right])
        case ast.BoolOp(operator, values):
            yield (
                "and, or",
                ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values),
            )
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", operand
        case ast.BinOp(left, operator, right):
            if type(operator) in _CALCULATED:
                yield "operator", ast.BinOp(left, _CALCULATED[type(operator)](), right)
            if isinstance(operator, ast.Add | ast.Sub):
                yield "operand dropped", left
        case ast.Constant(bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int(value)):
            yield "constant", ast.Constant(value + 1)
            yield (
                "constant",
                ast.UnaryOp(ast.USub(), ast.Constant(1)) if value == 0 else ast.Constant(value - 1),
            )
        case ast.Constant(float(value)):
            yield "constant", ast.Constant(value * 2 or 1.0)
        case ast.Call(function, [first, second, *rest], keywords) if _may_swap(node):
            yield "arguments swapped", ast.Call(function, [second, first, *rest], keywords)
        case ast.Return(value) if value is not None and not isinstance(value, ast.JoinedStr):
            yield "result", ast.Return(ast.Constant(None))
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield "condition", test
        case (
            ast.Expr(ast.Call())
            | ast.AugAssign()
            | ast.Raise()
            | ast.Continue()
            | ast.Break()
            | ast.Delete()
        ):
            yield "statement dropped", "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "statement dropped", "pass"
    match node:
        case ast.Call(ast.Name(name), arguments, keywords) if name in _CALLED:
            yield "min, max, any, all", ast.Call(ast.Name(_CALLED[name]), arguments, keywords)
        case ast.Call(ast.Attribute(value, name), arguments, keywords) if name in _CALLED:
            yield (
                "min, max, any, all",
                ast.Call(ast.Attribute(value, _CALLED[name]), arguments, keywords),
            )


def _may_swap(call: ast.Call) -> bool:
    """Whether the first two arguments differ and their order matters, and, swapped, they are not a
    TypeError at once, which any test finds."""
    typed = ast.unparse(call.func).partition(".")[0] in (
        "contextlib",
        "np",
        "isinstance",
        "getattr",
        "hasattr",
        "zip",
        "max",
        "min",
    )
    return not typed and ast.unparse(call.args[0]) != ast.unparse(call.args[1])


def _seen(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it; without annotations, decorators, asserts, bodies of abstract
    methods, texts of messages, what `strict` guards, what msgspec's `gc` only makes faster, and
    functions of their own."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in _UNSEEN or (isinstance(node, ast.Raise) and name in ("exc", "cause")):
            continue
        for child in value if isinstance(value, list) else [value]:
            match child:
                case ast.FunctionDef() | ast.ClassDef() | ast.Assert() | ast.JoinedStr():
                    continue
                case ast.Raise(ast.Name("NotImplementedError")):
                    continue
                case ast.keyword(arg="strict" | "gc"):
                    continue
                case ast.Expr(ast.Call(ast.Attribute(attr="say"))):
                    continue
                case ast.AST():
                    yield from _seen(child)


def _places(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(name, node) of all functions, and of the module without them."""
    yield "<module>", tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in ("__repr__", "__str__"):
            yield node.name, node


def mutants_of(file: str) -> dict[str, list[Mutant]]:
    """Function → its mutants, of a file of the package."""
    data = (ROOT / file).read_bytes()
    tree, lines = ast.parse(data), data.split(b"\n")
    found: dict[str, list[Mutant]] = {}
    for function, place in _places(tree):
        for node in _seen(place):
            for kind, new in _mutations(node) if hasattr(node, "lineno") else ():
                target: Any = node.test if kind == "condition" else node
                if target.lineno != target.end_lineno:
                    continue
                text = new if isinstance(new, str) else ast.unparse(new)
                if kind == "condition":
                    text = f"(not ({text}))"
                elif isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
                    text = f"({text})"
                line = lines[target.lineno - 1]
                becomes = line[: target.col_offset] + text.encode() + line[target.end_col_offset :]
                names = (
                    re.findall(r"\w+", line.decode().partition("=")[0])
                    if function == "<module>"
                    else [function]
                )
                mutant = Mutant(
                    file, target.lineno, frozenset(names), kind, line.decode(), becomes.decode()
                )
                found.setdefault(f"{function}:{getattr(place, 'lineno', 0)}", []).append(mutant)
    return found


def mutated(mutant: Mutant) -> bytes:
    """The file as it becomes."""
    lines = (ROOT / mutant.file).read_bytes().split(b"\n")
    lines[mutant.line - 1] = mutant.becomes.encode()
    return b"\n".join(lines)


def _differs(mutant: Mutant) -> bool:
    """Whether it is Python, and another program."""
    try:
        return ast.dump(ast.parse(mutated(mutant))) != ast.dump(
            ast.parse((ROOT / mutant.file).read_bytes())
        )
    except SyntaxError:
        return False


def drawn(seed: int) -> Iterator[Mutant]:
    """Mutants, of one room after another, one of each function before a second of any, of each kind
    of mutation alike."""

    def of_room(room: str) -> Iterator[Mutant]:
        chance = random.Random(f"{seed} {room}")
        files = sorted(
            path.relative_to(ROOT).as_posix() for path in (ROOT / "packprep" / room).rglob("*.py")
        )
        functions = [function for file in files for function in mutants_of(file).values()]
        chance.shuffle(functions)
        while functions:
            for mutants in functions:
                kind = chance.choice(sorted({mutant.what for mutant in mutants}))
                mutant = chance.choice([mutant for mutant in mutants if mutant.what == kind])
                mutants.remove(mutant)
                if _differs(mutant):
                    yield mutant
            functions = [mutants for mutants in functions if mutants]

    return chain.from_iterable(zip(*map(of_room, ROOMS), strict=False))


# Judges


def write_inputs(folder: Path) -> None:
    """Write the files that `_recipes` name."""
    from tests import made
    from tests.random_recipes import write_corpus

    write_corpus(folder)
    records = [
        {"text": text, "repo": k // 4, "path": f"{k % 3}", "stars": k % 5}
        for k, text in enumerate(made.texts(30, 15, 80))
    ]
    made.write(folder / RECORDS, "\n".join(map(json.dumps, records)).encode())


def _judge(
    corpus: Path, recipes: Sequence[dict[str, Any]], out: Path
) -> tuple[str, str, list[str]]:
    """(what finds a fault in builds of these recipes: "replay", "twin" or nothing, digest of what
    was built, modules)."""
    from packprep.format.digests import digest_of
    from tests import made
    from tests.twin.check import verify_with_twin

    digests = []
    for i, recipe in enumerate(recipes):
        shutil.rmtree(out, ignore_errors=True)
        made.build(recipe, corpus, out / "built")
        if i:  # The first recipe is the largest.
            _remove_some(out)
        for folder in sorted(out.iterdir()):
            found = verify_with_twin(folder)
            if found["faults"]:
                by_twin = all(fault["message"].startswith("twin: ") for fault in found["listed"])
                return "twin" if by_twin else "replay", "", []
            assert found["twin"] == found["segments"] > 0
            digests += [digest_of(data) for data in made.contents(folder).values()]
    return (
        "",
        digest_of("".join(digests).encode()),
        [name for name in sys.modules if name.startswith("packprep.")],
    )


def _remove_some(out: Path) -> None:
    """Copy the dataset in `built` to `copied`, without the documents of every fourth row."""
    from packprep.dataset.loader import open_dataset
    from packprep.removing import remove_documents
    from tests import made

    dataset = open_dataset(out / "built")
    removed = {
        json.dumps({"source": one["source"], "file": one["file"], "doc": one["document"]})
        for row in range(0, len(dataset), 4)
        for one in dataset.documents(row)
    }
    with tempfile.NamedTemporaryFile("w") as listed:
        print(*sorted(removed), sep="\n", file=listed, flush=True)
        remove_documents(out / "built", listed.name, out / "copied", made.Silent())


def _recipes(file: str) -> list[dict[str, Any]]:
    """Recipes that together have every kind of source, task, cutting and packing, with media, and
    with records that are joined or chosen by their fields. Those that integrate flips take
    seconds."""
    from tests import media_made
    from tests.random_recipes import SOURCES
    from tests.twin.shards_made import EVERY_KIND

    flips = [
        task
        for task in EVERY_KIND
        if task.get("preset") == "duo" or task.get("objective") == "uniform_diffusion"
    ]
    every = [task for task in EVERY_KIND if _is_slow(file) or task not in flips]
    sources = {
        name: {"name": name, **source} for name, source in SOURCES.items() if name != "several"
    }
    spoken = [sources.pop("spans"), sources.pop("chats")]
    fields = {"paths": ["fields.jsonl"], "name": "fields"}
    grouped = {**fields, "group_by": "repo", "order_by": "path", "between": [7, 8]}
    chosen = {**fields, "where": "score != 1 or path > 4", "repeat": "clip(score, 0, 2)"}
    sources["lines"] |= {"repeat": 2.25}
    sources["zstd"] |= {"sample": [0.2, 0.9]}
    sources["parquet"] |= {"repeat": 0.5, "tasks": ["causal"]}
    common = {"seq_length": 128, "seed": 3, "tokenizer": "bytes"}
    loose = {"max_bad_fraction": 1.0, "prepend_bos": True}
    in_order = [task for task in EVERY_KIND if task.get("objective") in ("causal", "prefix_lm")] + [
        {"preset": "llada"}
    ]
    return [
        {
            **common,
            "sources": [*sources.values(), chosen],
            "tasks": every,
            "documents": loose,
            "output": {"shard_text_bytes": 3000},
        },
        {
            **common,
            "sources": [*spoken, grouped],
            "tokenizer": "bpe",
            "documents": {**loose, "chat_template": "t.jinja"},
            "tasks": [
                {"preset": "causal"},
                {"preset": "prefix_lm"},
                {"preset": "mlm"},
                {"preset": "bd3"},
            ],
            "output": {"shard_text_bytes": 2000, "columns": "compact"},
        },
        {
            **common,
            "sources": [{**sources["gzip"], "share": 0.4}, {**sources["id_arrow"], "share": 0.8}],
            "tasks": in_order,
            "packing": {"algorithm": "concat", "max_segments_per_row": 5},
            "output": {"shard_text_bytes": 800},
            "documents": {**loose, "min_tokens": 5, "max_tokens": 90},
        },
        {
            **common,
            "sources": spoken,
            "tokenizer": "bpe",
            "documents": {
                **loose,
                "chat_template": "t.jinja",
                "loss_weighting": "turn",
                "trained_turns": "each",
                "prepend_bos": False,
                "append_eos": "segment",
            },
            "tasks": [
                {"preset": "prefix_lm"},
                {"objective": "block_diffusion", "block_length": 8, "block_origin": "answer"},
            ],
            "packing": {"pad_seq_to_mult": 16},
            "output": {"shard_text_bytes": 2000, "columns": "least"},
        },
        {
            **common,
            "sources": [
                {"name": "joined", "paths": [RECORDS], "group_by": "repo", "order_by": "path"}
                | {"between": ["$", 7], "repeat": 1.5},
                {
                    "name": "chosen",
                    "paths": [RECORDS],
                    "where": "stars > 1",
                    "repeat": "stars / 2",
                    "max_repeat": 4,
                },
                {"name": "media", "paths": ["media.jsonl"]},
            ],
            "tokenizer": "bpe",
            "specials": {"missing": "add", "media": media_made.SPECIALS["media"]},
            "tasks": [{"preset": "ul2r"}, {"preset": "mlm"}],
            "documents": {**loose, "max_tokens": 60},
            "output": {"shard_text_bytes": 1500},
        },
        {
            **{key: value for key, value in common.items() if key != "seq_length"},
            "sources": [sources["lines"]],
            "tasks": [{"preset": "ul2"}],
            "documents": loose,
            "packing": {"encoder_length": 128, "decoder_length": 64},
            "output": {"shard_text_bytes": 3000},
        },
    ]


class _Watch:
    """A plugin of pytest: stops after some CPU time, keeps what failed, and lets hypothesis shrink
    nothing. Tests that have one of `names` come first."""

    def __init__(self, seconds: float, names: Set[str]):
        self.end, self.failed = time.process_time() + seconds, list[str]()
        self.named = _named(names)

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants", settings.get_profile("packprep"), phases=[Phase.explicit, Phase.generate]
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Of tests with a name as of those without, the tests of `long` come last, and the first
        test of each file comes before the others."""
        short = [item for item in items if not item.get_closest_marker("long")]
        first = {item.path: item for item in reversed(short)}

        def rank(item: pytest.Item) -> tuple[bool, bool, bool]:
            test = getattr(item, "function", None)
            test = getattr(getattr(test, "hypothesis", None), "inner_test", test)
            is_named = test is not None and self.named.search(inspect.getsource(test))
            is_long = item.get_closest_marker("long") is not None
            return not is_named, is_long, item is not first.get(item.path)

        items.sort(key=rank)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logfinish(self) -> None:
        if sum(os.times()[:4]) > self.end:
            pytest.exit("time is up", 0)


def _run_tests(tests: Sequence[str], seconds: float, names: Set[str] = frozenset()) -> str:
    """The test that failed, or nothing; some tests may not have been run when the CPU time is
    up."""
    watch = _Watch(seconds, names)
    status = pytest.main(
        ["-x", "-q", "-p", "no:cacheprovider", "-m", "not campaign", *tests],
        plugins=[watch],
    )
    return (
        watch.failed[0]
        if watch.failed
        else ""
        if status in (0, 5)
        else f"{tests[0]}: pytest ends with {int(status)}"
    )


IDLE_S = 60
"""Seconds within which a mutant has to take one second of CPU time. Otherwise it counts as hung."""


def _cpu_seconds(group: int) -> float:
    """Return the CPU time of all processes of a process group."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # A process may end meanwhile.
            fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Bench:
    """A folder with a copy of packprep and its tests, in which one file at a time is another."""

    def __init__(self, folder: Path):
        self.folder, self.copy, self.kernels = folder, folder / "copy", folder / "kernels"
        self.corpus, self.digests = folder / "random" / "corpus", {}
        for name in (
            "packprep",
            "tests",
            "examples",
            "docs",
            "benchmarks",
            "pyproject.toml",
            "README.md",
            "CONTRIBUTING.md",
        ):
            source, target = ROOT / name, self.copy / name
            if source.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
        # Kernels of the copy stay what they are until `cache_of` removes those that a mutant
        # changes.
        with open(self.copy / "packprep" / "cache.py", "a") as file:
            file.write('\n\ncode_digest = lambda path: "mutants"\n')
        self.sources = {
            path.relative_to(self.copy).as_posix(): path.read_text("utf-8")
            for path in self.copy.rglob("*.py")
        }
        modules = {module_of(file): file for file in self.sources}
        self.imports = {
            file: imports_of(file, source, modules) for file, source in self.sources.items()
        }
        self.sound, self._changes = set[str](), 0  # tests that hold for the package as it is
        if not self.corpus.exists():
            self.in_child(lambda: write_inputs(self.corpus), self.kernels, 600)

    def in_child(
        self, do: Callable[[], Any], cache: Path, seconds: float
    ) -> tuple[Any, str, float]:
        """(what `do` gives, or how it failed, CPU seconds) in a process of its own that finds the
        copy."""
        result, log = self.folder / "result.json", self.folder / "log.txt"
        result.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.setsid()
                with open(log, "wb") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 5))
                resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
                resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
                os.environ |= {
                    "NUMBA_CACHE_DIR": str(cache),
                    "PYTHONPATH": str(self.copy),
                    "TMPDIR": str(self.folder / "t"),
                }
                shutil.rmtree(self.folder / "t", ignore_errors=True)
                (self.folder / "t").mkdir()
                tempfile.tempdir = None
                os.chdir(self.copy)
                sys.path.insert(0, str(self.copy))
                for name in [
                    name for name in sys.modules if name.split(".")[0] in ("tests", "packprep")
                ]:
                    del sys.modules[name]
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                try:
                    given = [do(), ""]
                except BaseException as error:
                    traceback.print_exc()
                    given = [None, type(error).__name__]
                result.write_text(json.dumps(given))
                sys.stdout.flush()
                sys.stderr.flush()
                status = 0
            finally:
                os._exit(status)
        # A mutant of a kernel may damage the heap, and then wait forever for one of its locks.
        spent, looked, ended, usage = 0.0, time.monotonic(), 0, None
        deadline = looked + 10 * seconds + 60
        while not ended and time.monotonic() < deadline:
            time.sleep(0.02)
            ended, _, usage = os.wait4(pid, os.WNOHANG)
            if time.monotonic() - looked > IDLE_S:
                spent_before, spent = spent, _cpu_seconds(pid)
                if spent - spent_before < 1:
                    break
                looked = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not ended:
            _, _, usage = os.wait4(pid, 0)
        assert usage is not None
        spent = usage.ru_utime + usage.ru_stime
        given, error = (
            json.loads(result.read_text()) if result.exists() else (None, "died or took too long")
        )
        return given, error, spent

    # What is judged by what

    def nearest(self, file: str) -> list[str]:
        """The mirror file of a file's tests."""
        room, stem = os.path.split(file.replace("packprep/", "tests/", 1))
        mirror = f"{room}/test_{stem}"
        return [mirror] if mirror in self.sources else []

    def importing(self, file: str, names: Set[str] = frozenset()) -> list[str]:
        """Return the test files that import a module, and those of its folder that import it
        through another file.

        Direct imports come first. Among them, files that have one of `names` come first, then tests
        of the same subpackage. The order of the others is by how many of a file's imports are the
        module or import it.
        """
        named = _named(names)
        folder = os.path.dirname(file.replace("packprep/", "tests/", 1))
        subpackage = folder.split("/")[1]
        ranked = []
        for test, imports in self.imports.items():
            ways = sum(file == other or file in self.imports[other] for other in imports)
            is_test = test.startswith("tests/") and os.path.basename(test).startswith("test_")
            is_direct = file in imports
            if is_test and ways and (is_direct or os.path.dirname(test) == folder):
                is_near = test.split("/")[1] == subpackage
                is_named = bool(named.search(self.sources[test]))
                share = ways / len(imports)
                ranked.append((not is_direct, not is_named, not is_near, -share, test))
        return [test for *_, test in sorted(ranked)]

    def callers(self, mutant: Mutant) -> set[str]:
        """Return the names of a mutant's function or constant, and of the functions that use it.

        They are in the mutant's file and the files that import it.
        """
        functions = [
            node
            for file, source in self.sources.items()
            if file == mutant.file or mutant.file in self.imports[file]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and file.startswith("packprep/")
        ]
        own = mutant.names.difference(dir(builtins))  # a field's annotation may be `int`
        return {*own, *(f.name for f in functions if not own.isdisjoint(_words_of(f)))}

    def found(
        self, tests: Sequence[str], seconds: float, mutant: Mutant, cache: Path
    ) -> tuple[str, float]:
        """(the test that fails with the mutant and not without, or nothing; CPU seconds)."""
        names = self.callers(mutant)
        with self.changed(mutant):
            failed, error, spent = self.in_child(
                lambda: _run_tests(tests, seconds, names), cache, 3 * seconds + 60
            )
        failed = error or failed
        if not error and failed and failed not in self.sound:
            holds = self.in_child(
                lambda: _run_tests([failed], seconds), self.kernels, 3 * seconds + 60
            )
            if holds[:2] != ("", ""):
                print(f"{failed} fails without a mutant, too: {holds}", flush=True)
                return "", spent
            self.sound.add(failed)
        return failed, spent

    def cache_of(self, mutant: Mutant) -> Path:
        """A folder with the compiled kernels that do not depend on what a mutant changes."""
        cache = self.folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        changed = set(mutant.names)
        kernels: dict[str, set[str]] = {}
        for file, source in self.sources.items():
            if "@kernel" in source and file.startswith("packprep/"):
                for node in ast.walk(ast.parse(source)):
                    if isinstance(node, ast.FunctionDef) and "kernel" in map(
                        _decorator, node.decorator_list
                    ):
                        # Several files have kernels of the same name, such as _render.
                        kernels.setdefault(node.name, set()).update(
                            n.id for n in ast.walk(node) if isinstance(n, ast.Name)
                        )
        while more := {
            name for name, names in kernels.items() if name not in changed and names & changed
        }:
            changed |= more
        shutil.copytree(self.kernels, cache, copy_function=os.link)
        # what is kept of tokenizers follows from them
        facts = mutant.file.split("/")[1] in ("tokenizer", "dataset")
        for path in cache.glob("packprep/*"):
            what = path.name.rpartition("-")[0]
            if what.rpartition(".")[2] in changed if what.startswith("packprep.") else facts:
                path.unlink()
        return cache

    def usual(self, file: str) -> tuple[str, list[str], float]:
        """(digest, modules, CPU seconds) of the builds by which a file's mutants are judged, of the
        package as it is."""
        key = repr(_is_slow(file))
        for _ in range(2):
            if key not in self.digests:
                given, error, seconds = self.in_child(lambda: self._judged(file), self.kernels, 900)
                assert given and not given[0], (given, error, (self.folder / "log.txt").read_text())
                self.digests[key] = given[1], given[2], seconds
        return self.digests[key]

    def _judged(self, file: str) -> tuple[str, str, list[str]]:
        return _judge(self.corpus, _recipes(file), self.folder / "out")

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """The copy has the mutant while this lasts."""
        path = self.copy / mutant.file
        before, stamp = path.read_bytes(), path.stat().st_mtime
        path.write_bytes(mutated(mutant))
        self._changes += 1
        # no two alike: by it Python knows what it has compiled
        os.utime(path, (stamp, stamp - 10 * self._changes))
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, (stamp, stamp))

    def judge(
        self, mutant: Mutant, nearest_seconds: float, wider_seconds: float
    ) -> tuple[str, str, float]:
        """(the stage that finds a mutant, or nothing; by what; CPU seconds)."""
        digest, modules, usual = self.usual(mutant.file)
        cache = self.cache_of(mutant)
        found, built, total = "", digest, 0.0
        if module_of(mutant.file) in modules:
            with self.changed(mutant):
                given, error, total = self.in_child(
                    lambda: self._judged(mutant.file), cache, 4 * usual + 60
                )
            found, built, _ = given or (error, "", [])
        if found:
            return "builds", found, total
        importing = self.importing(mutant.file, self.callers(mutant))
        others = list(dict.fromkeys([*importing, *WIDER[mutant.file.split("/")[1]]]))
        nearest = self.nearest(mutant.file)
        wider = [test for test in others if test not in nearest]
        # Without a mirror file, the tests of all files run before those of `long`.
        more_seconds = 0 if nearest else nearest_seconds
        for stage, tests, seconds in (
            ("nearest", nearest, nearest_seconds),
            ("wider", wider, wider_seconds + more_seconds),
        ):
            by, spent = (
                self.found(tests, seconds, mutant, cache) if tests and seconds else ("", 0.0)
            )
            total += spent
            if by:
                return stage, by, total
        return "", "" if built == digest else "other bytes", total


def of_lines(places: Sequence[str]) -> Iterator[Mutant]:
    """All mutants of lines, each given as "packprep/building/run.py:12"."""
    for file, _, line in (place.partition(":") for place in places):
        every = (mutant for mutants in mutants_of(file).values() for mutant in mutants)
        yield from (mutant for mutant in every if mutant.line == int(line) and _differs(mutant))


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(file: str, source: str, modules: Mapping[str, str]) -> set[str]:
    """Return the files that a file imports or names by a dotted path.

    A package that loads its files at run time counts as importing all of them. `modules` maps
    module to file.
    """
    names = set(re.findall(r"\b(?:packprep|tests)(?:\.\w+)+", source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = set()
    for name in names:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        found |= {modules[name]} if name else set()
    if "import_module" in source and file.endswith("__init__.py"):
        folder = os.path.dirname(file)
        found |= {other for other in modules.values() if os.path.dirname(other) == folder}
    return found - {file}


def _is_slow(file: str) -> bool:
    """Whether a file's mutants are judged by builds that integrate flips, too."""
    return "diffusion" in file or "nois" in file


def _named(names: Set[str]) -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join(map(re.escape, names))})\b" if names else r"(?!)")


def _words_of(function: ast.FunctionDef) -> set[str]:
    """Return the names and attributes that a function uses."""
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Name | ast.Attribute)
    }


def _decorator(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def equivalent() -> dict[tuple[str, str, str], str]:
    """(file, line, what it becomes) → why nobody can see it."""
    table = tomllib.loads(EQUIVALENT.read_text("utf-8"))
    return {
        (entry["file"], entry["was"], entry["becomes"]): entry["why"]
        for entry in table.get("equivalent", [])
    }


def tuning() -> dict[str, set[str]]:
    """Return the constants of each file that only affect speed or memory."""
    names: dict[str, set[str]] = {}
    for entry in tomllib.loads(EQUIVALENT.read_text("utf-8"))["tuning"]:
        names.setdefault(entry["file"], set()).update(entry["names"])
    return names


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--count", type=int, default=500)
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument(
        "--lines",
        nargs="+",
        metavar="FILE:LINE",
        help="all mutants of these lines, in place of any",
    )
    arguments.add_argument(
        "--nearest",
        type=float,
        default=90.0,
        help="CPU seconds after which none of its tests begins",
    )
    arguments.add_argument(
        "--wider", type=float, default=45.0, help="the same of the tests of other files"
    )
    arguments.add_argument("--folder", type=Path)
    given = arguments.parse_args()
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    known, tuned, counts = equivalent(), tuning(), Counter[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder)
        wanted = (
            of_lines(given.lines)
            if given.lines
            else islice(drawn(given.seed), given.first, given.first + given.count)
        )
        for number, mutant in enumerate(wanted, 0 if given.lines else given.first):
            if (
                mutant.names <= tuned.get(mutant.file, set())
                or (mutant.file, mutant.was.strip(), mutant.becomes.strip()) in known
            ):
                counts["equivalent"] += 1
                print(f"{number} equivalent: {mutant}", flush=True)
                continue
            begun = time.monotonic()
            stage, by, seconds = bench.judge(mutant, given.nearest, given.wider)
            counts[stage or "survived"] += 1
            took = f"{seconds:.1f} s, {time.monotonic() - begun:.0f} s by the clock"
            print(f"{number} {stage or 'SURVIVED'} {by} ({took}): {mutant}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    tried = counts.total() - counts["equivalent"]
    return int(tried - counts["survived"] < 0.95 * tried)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
