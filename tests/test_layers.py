"""Who imports whom: a file imports only from rooms below its own."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import packprep

ROOT = Path(packprep.__file__).parent
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in sorted(ROOT.rglob("*.py"))
}

# room → the rooms that it may import, besides itself
LEVELS = [
    ("errors", "forking"),
    ("format", "messages", "randomness"),
    ("dataset",),
    ("cache", "clock", "kernel", "recipe", "storage"),
    ("sources", "tokenizer"),
    ("conversations",),
    ("documents", "objectives"),
    ("building",),
    ("restoring",),
    ("adapters", "exporting", "inspection", "removing", "verification"),
    ("audit",),
    ("cli", "__main__"),
]
BESIDE = {
    "kernel": {"cache"},
    "__main__": {"cli"},
    "__init__": {"dataset", "forking"},
}
ALLOWED = {
    room: {below for lower in LEVELS[:i] for below in lower} | BESIDE.get(room, set())
    for i, level in enumerate(LEVELS)
    for room in level
} | {
    "__init__": {"dataset", "forking"},
    "adapters": {
        "dataset",
        "format",
        "randomness",
        "errors",
        "storage",
    },  # the last for datasets at URLs
    "recipe": {"format", "errors"},
    "objectives": {
        "kernel",
        "recipe",
        "dataset",
        "format",
        "randomness",
        "errors",
        "forking",
    },  # arrays in, arrays out
}
IN_TRAINERS = ("dataset", "format")  # rooms that have numpy and the standard library alone
WITH_XXHASH = "packprep.format.digests"  # but for this file
TWIN = Path(__file__).parent / "twin"
TWIN_MAY_IMPORT = {"packprep.errors", "tests.twin"}
TWIN_LIBRARIES = {"fastokens", "numpy", "pyarrow", "tokenizers", "zstandard"}
OUTSIDE_THE_TWIN = {"__main__.py", "check.py", "shards_made.py"}  # they compare it with packprep

FREE_OBJECTIVE_FILES = {"objectives/__init__.py", "objectives/tasks.py"}
SHARED_OBJECTIVE_FILES = {"objectives/objective.py", "objectives/noising.py"}
FORBIDDEN_NAMES = {"utils", "util", "common", "base", "core", "helpers", "manager"}
MAX_LINES = 820


def room_of(name: str) -> str:
    """The room of a file, by its path in the package."""
    return name.split("/")[0].removesuffix(".py")


def imports_of(name: str, source: str) -> set[str]:
    """The absolute names of all modules, and of all they are asked for, wherever in the file that
    is."""
    package = ["packprep", *name.split("/")[:-1]]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            found.add(module)
            if module.startswith("packprep"):
                found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def module_files(module: str) -> str | None:
    """The path of a module of packprep; None for other names."""
    parts = module.split(".")[1:]
    for path in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
        if path in SOURCES:
            return path
    return None


def violations(name: str, source: str) -> list[str]:
    """What a file imports and may not, in words."""
    room, wrong = room_of(name), []
    for module in sorted(imports_of(name, source)):
        top = module.split(".")[0]
        if top != "packprep":
            library = (
                top == "numpy"
                or top in sys.stdlib_module_names
                or (name, top) == ("format/digests.py", "xxhash")
            )
            if room in IN_TRAINERS and not library:
                wrong.append(
                    f"{name} imports {module}: {room}/ has numpy and the standard library alone"
                )
            if top == "tests":
                wrong.append(f"{name} imports {module}: the package runs without its tests")
            continue
        if module.count(".") == 0:
            continue  # the package itself: its names are checked one by one
        other = module.split(".")[1]
        if room in IN_TRAINERS and module == WITH_XXHASH:
            wrong.append(
                f"{name} imports {module}: {room}/ runs in trainers, which may have no xxhash"
            )
        if (
            other != room
            and other not in ALLOWED[room]
            and (other in ALLOWED or module_files(module))
        ):
            wrong.append(f"{name} imports {module}: {room} lies not above {other}")
        file = module_files(module)
        strict = room == "objectives" == other and name not in FREE_OBJECTIVE_FILES
        if strict and file not in {None, name, *SHARED_OBJECTIVE_FILES}:
            wrong.append(f"{name} imports {module}: objectives never import one another")
    return wrong


def test_every_room_has_its_place():
    assert {room_of(name) for name in SOURCES} <= set(ALLOWED)


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_imports_only_from_rooms_below(name):
    assert violations(name, SOURCES[name]) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "name, source",
    [
        ("documents/x.py", "from packprep.building.run import build"),
        ("documents/x.py", "from packprep.objectives.tasks import complete"),
        ("sources/x.py", "from packprep.tokenizer import roles"),
        ("tokenizer/x.py", "from packprep.sources import files"),
        ("sources/x.py", "from packprep.documents import reading"),
        ("objectives/x.py", "import packprep.documents.reading"),
        ("objectives/x.py", "from packprep.objectives.causal import OBJECTIVE"),
        ("objectives/x.py", "from packprep.objectives import causal"),
        ("objectives/x.py", "def f():\n    from . import prefix_lm"),
        ("objectives/x.py", "from packprep.objectives import find"),
        ("dataset/x.py", "import xxhash"),
        ("dataset/x.py", "def f():\n    from pyarrow import parquet"),
        ("dataset/x.py", "from ..format.digests import digest_of"),
        ("format/json_files.py", "from packprep.format import digests"),
        ("format/x.py", "import xxhash"),
        ("recipe/x.py", "from packprep.dataset.manifest import is_count"),
        ("dataset/x.py", "from packprep import recipe"),
        ("randomness.py", "from packprep.dataset import order"),
        ("errors.py", "from packprep import randomness"),
        ("recipe.py", "from packprep.kernel import kernel"),
        ("building/x.py", "import packprep.cli"),
        ("building/x.py", "from packprep.verification import verify_dataset"),
        ("building/x.py", "from packprep.restoring import restore"),
        ("restoring.py", "from packprep.inspection.opened import opened"),
        ("verification/x.py", "from packprep.inspection import summary"),
        ("adapters/x.py", "from packprep.building.run import build"),
        ("inspection/x.py", "from packprep.adapters.torch import loader"),
        ("building/x.py", "from tests.twin import chance"),
        ("verification/x.py", "def f():\n    import tests.made"),
    ],
)
def test_this_test_can_fail(name, source):
    assert violations(name, source)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, source",
    [
        ("cli/x.py", "from packprep.building.run import build"),
        (
            "objectives/x.py",
            "from packprep.objectives.objective import Task\nfrom packprep.kernel import kernel",
        ),
        ("objectives/tasks.py", "from packprep.objectives import REGISTRY, causal"),
        (
            "dataset/x.py",
            (
                "import numpy as np, json, mmap\nfrom packprep.randomness import permute\nfrom ."
                " import order"
            ),
        ),
        ("cache.py", "from packprep.format.digests import digest_of"),
        ("kernel/x.py", "from packprep.cache import cache_folders"),
    ],
)
def test_what_is_allowed_passes(name, source):
    assert violations(name, source) == []


@pytest.mark.parametrize(
    "name", [name for name in SOURCES if room_of(name) in (*IN_TRAINERS, "kernel", "objectives")]
)
def test_what_readers_run_has_no_lock(name):
    """A fork while a thread reads would leave it locked in the child; packprep/forking.py has what
    to use instead."""
    locks = {
        "functools.cached_property",
        "threading.Lock",
        "threading.RLock",
        "threading.Condition",
        "queue.Queue",
    }
    tree = ast.parse(SOURCES[name])
    named = {
        f"{n.value.id}.{n.attr}"
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    }
    taken = {
        f"{n.module}.{a.name}"
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    assert not locks & (named | taken)


def foreign_imports(source: str) -> list[str]:
    """Return what a file of the twin imports, except its own modules and plain libraries."""
    return [
        module
        for module in sorted(imports_of("twin/x.py", source))
        if module.split(".")[0] not in {*TWIN_LIBRARIES, *sys.stdlib_module_names}
        and not any(module == one or module.startswith(f"{one}.") for one in TWIN_MAY_IMPORT)
    ]


def test_the_twin_shares_no_code_with_what_it_checks():
    files = [
        path
        for path in sorted(TWIN.rglob("*.py"))
        if path.name not in OUTSIDE_THE_TWIN and not path.name.startswith("test_")
    ]
    assert len(files) > 15
    for path in files:
        assert foreign_imports(path.read_text("utf-8")) == [], path


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    [
        "from packprep.kernel import kernel",
        "def f():\n    from packprep.objectives import causal",
        "from packprep.sources.formats import read",
        "from tests import made",
        "import numba",
    ],
)
def test_the_test_of_the_twin_can_fail(source):
    assert foreign_imports(source)


def test_no_file_is_a_bag():
    for name in SOURCES:
        assert not FORBIDDEN_NAMES & {part.removesuffix(".py") for part in name.split("/")}, name


def lines_of_code(source: str) -> int:
    """Return the lines of a module without those of docstrings and comments."""
    in_docstrings = sum(
        node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    comments = sum(line.lstrip().startswith("#") for line in source.splitlines())
    return source.count("\n") - in_docstrings - comments


@pytest.mark.long
def test_files_are_of_at_most_820_lines_of_code():
    assert [name for name, source in SOURCES.items() if lines_of_code(source) > MAX_LINES] == []


def test_private_constants_are_used():
    for name, source in SOURCES.items():
        names = {
            constant.id
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign)
            for constant in ast.walk(node)
            if isinstance(constant, ast.Name) and isinstance(constant.ctx, ast.Store)
        }
        uses = Counter(re.findall(r"\w+", source))
        unused = [word for word in names if word.startswith("_") and uses[word] == 1]
        assert unused in ([], ["__all__"]), name


def test_no_module_has_the_name_of_a_standard_one():
    top = {name.split("/")[0].removesuffix(".py") for name in SOURCES} - {"__init__", "__main__"}
    assert not top & set(sys.stdlib_module_names) and "build" not in top
