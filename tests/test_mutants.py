"""Mutants of the package are found; those that are listed as equivalent are mutants still."""

import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
from hypothesis import settings

from packprep import open_dataset
from packprep.format.digests import digest_of
from tests import mutants
from tests.made import ROOT, environment

SOURCE = '''
"""min(1, 2)"""
LIMIT = 256


def f(a: int = 3, *, strict=True) -> int:
    assert a < 4
    if not a or a >= LIMIT:
        raise ValueError(f"{a + 1} of {min(a, 5)}")
    for _ in zip([a], [a], strict=True):
        a += g(a, 2)
    return max(a, 1)


def abstract():
    raise NotImplementedError
'''
BECOMES = {
    "LIMIT = 257",
    "LIMIT = 255",
    "def f(a: int = 4, *, strict=True) -> int:",
    "def f(a: int = 2, *, strict=True) -> int:",
    "def f(a: int = 3, *, strict=False) -> int:",
    "if (not a and a >= LIMIT):",
    "if (a) or a >= LIMIT:",
    "if not a or (a > LIMIT):",
    "if (not (not a or a >= LIMIT)):",
    "pass",
    "a += (g(2, a))",
    "a += g(a, 3)",
    "a += g(a, 1)",
    "return None",
    "return (min(a, 1))",
    "return max(a, 2)",
    "return max(a, 0)",
}


@pytest.mark.long
def test_mutants_are_of_what_a_program_does(tmp_path, monkeypatch):
    """Not of docstrings, annotations, assertions, abstract methods, texts and what `strict`
    guards."""
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "f.py").write_text(SOURCE)
    every = [mutant for found in mutants.mutants_of("f.py").values() for mutant in found]
    assert {
        mutant.becomes.strip().replace("if ((not a", "if (not a") for mutant in every
    } == BECOMES
    assert sum(mutant.becomes.strip() == "pass" for mutant in every) == 2
    for mutant in every:
        lines = mutants.mutated(mutant).decode().split("\n")
        changed = [i for i, line in enumerate(SOURCE.split("\n")) if line != lines[i]]
        assert changed == [mutant.line - 1] and lines[mutant.line - 1] == mutant.becomes


@pytest.mark.long
def test_a_file_imports_the_modules_that_it_names_and_a_registry_those_of_its_folder():
    modules = {
        "packprep.a": "packprep/a/__init__.py",
        "packprep.a.b": "packprep/a/b.py",
        "packprep.a.c": "packprep/a/c.py",
        "packprep.d": "packprep/d.py",
        "tests.made": "tests/made.py",
    }
    source = 'from packprep.a import (\n    b,\n    g,\n)\npatch("packprep.d.f.g")\n'
    found = mutants.imports_of("tests/test_a.py", source, modules)
    assert found == {"packprep/a/__init__.py", "packprep/a/b.py", "packprep/d.py"}
    registry = "from importlib import import_module\nfrom packprep import d\n"
    found = mutants.imports_of("packprep/a/__init__.py", registry, modules)
    assert found == {"packprep/a/b.py", "packprep/a/c.py", "packprep/d.py"}


@pytest.mark.long
def test_tests_that_import_a_module_come_first_and_those_of_its_subpackage_before_others():
    imports = {
        "packprep/a/c.py": {"packprep/a/b.py"},
        "tests/a/test_broad.py": {"packprep/a/b.py", "tests/made.py"},
        "tests/a/test_narrow.py": {"packprep/a/b.py", "packprep/a/c.py"},
        "tests/a/test_through_c.py": {"packprep/a/c.py"},
        "tests/d/test_direct.py": {"packprep/a/b.py"},
        "tests/d/test_through_c.py": {"packprep/a/c.py"},
        "tests/made.py": {"packprep/a/b.py"},
    }
    bench = SimpleNamespace(imports=imports, sources=dict.fromkeys(imports, ""))
    first, second, *others = found = mutants.Bench.importing(bench, "packprep/a/b.py")
    assert [first, second] == ["tests/a/test_broad.py", "tests/a/test_narrow.py"]
    assert others == ["tests/d/test_direct.py", "tests/a/test_through_c.py"]
    bench.sources |= dict.fromkeys(others, "call_of_b()")
    order = mutants.Bench.importing(bench, "packprep/a/b.py", {"call_of_b"})
    assert order == [others[0], first, second, others[1]] and set(order) == set(found)


@pytest.mark.long
def test_tests_that_name_the_function_or_its_callers_come_first(tmp_path):
    (tmp_path / "test_a.py").write_text("""
import pytest
from hypothesis import given, strategies as st

def test_first(): assert False
def test_default(): f(1)
@pytest.mark.long
def test_long(): assert f
@given(st.none())
def test_given(_): raise ValueError(f)
""")
    try:
        for names, failed in (({"f", "g"}, "test_default"), ({"ValueError"}, "test_given")):
            assert mutants._run_tests([str(tmp_path)], 60, names).endswith(f"::{failed}")
        assert mutants._run_tests([str(tmp_path)], 60).endswith("::test_first")
    finally:
        settings.load_profile("packprep")


@pytest.mark.long
def test_a_mutant_is_called_by_what_uses_its_function_method_or_constant():
    source = "LIMIT = 1\nclass A:\n    def m(self): return f()\ndef f(): return LIMIT\n"
    other = "def g(a): return a.m()\ndef h(): return 3\n"
    sources = {"packprep/a.py": source, "packprep/b.py": other, "packprep/c.py": other}
    bench = SimpleNamespace(sources=sources, imports={"packprep/b.py": {"packprep/a.py"}})
    bench.imports |= {"packprep/a.py": set(), "packprep/c.py": set()}
    for name, callers in (("LIMIT", {"f"}), ("f", {"m"}), ("m", {"g"})):
        mutant = mutants.Mutant("packprep/a.py", 1, frozenset({name, "int"}), "", "", "")
        assert mutants.Bench.callers(bench, mutant) == {name} | callers


@pytest.mark.long
def test_what_is_listed_as_equivalent_is_a_mutant_of_the_code_as_it_is():
    known = mutants.equivalent()
    every = {
        (file, mutant.was.strip(), mutant.becomes.strip())
        for file in {file for file, _, _ in known}
        for found in mutants.mutants_of(file).values()
        for mutant in found
    }
    assert set(known) <= every and all(known.values())


@pytest.mark.long
def test_no_byte_depends_on_the_constants_that_only_tune(tmp_path, monkeypatch):
    """Builds of every kind of source, and batches of them, with each constant at 3."""
    mutants.write_inputs(tmp_path / "corpus")
    recipes = mutants._recipes("")

    def digests() -> tuple[str, str]:
        found, built, _ = mutants._judge(tmp_path / "corpus", recipes, tmp_path / "out")
        assert found == ""
        batches = open_dataset(tmp_path / "out" / "built").batches(3, seed=2, epochs=2)
        tokens = b"".join(batch["tokens"].tobytes() for batch in batches)
        return built, digest_of(tokens)

    as_it_is = digests()
    own = [module for name, module in sys.modules.items() if name.startswith("packprep.")]
    lines = [
        line
        for path in (ROOT / "packprep").rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
    ]
    for file, names in mutants.tuning().items():
        module = import_module(mutants.module_of(file))
        for name in names:
            value = getattr(module, name)
            private = name.startswith("_")
            # A module that imports a public constant holds it too, so its name must be unique.
            assert private or sum(line.startswith(f"{name} = ") for line in lines) == 1, name
            for holder in [module] if private else own:
                if hasattr(holder, name):
                    assert getattr(holder, name) == value
                    is_tuple = isinstance(value, tuple)
                    monkeypatch.setattr(holder, name, (3,) * len(value) if is_tuple else 3)
    assert digests() == as_it_is


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "tests/mutants.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_mutants_of_some_lines_are_found_each_by_what_is_nearest_to_it():
    """A kernel, and what only tests can see."""
    lines = {
        "packprep/objectives/prefix_lm.py": (
            "pivot[i] = 1 + integer(bodies.key[i], purpose, 0, n[i] - 1, bodies.epoch)"
        ),
        "packprep/sources/formats/jsonl.py": "MAX_NESTING = 256",
    }
    places = []
    for file, text in lines.items():
        every = [line.strip() for line in (ROOT / file).read_text("utf-8").splitlines()]
        places.append(f"{file}:{every.index(text) + 1}")
    done = run("--lines", *places)
    print(done.stdout)
    assert done.returncode == 0 and "SURVIVED" not in done.stdout
    for place, by in zip(places, ("builds twin", "tests/sources"), strict=True):
        assert any(by in line and place in line for line in done.stdout.splitlines())


@pytest.mark.campaign
def test_19_of_20_mutants_are_found():
    """`PACKPREP_MUTANTS` sets another number than 500."""
    done = run("--count", os.environ.get("PACKPREP_MUTANTS", "500"))
    print(done.stdout)
    assert done.returncode == 0
