"""Whether verification can fail: a copy of packprep with one fault in its code builds a dataset,
and finds the fault itself.

Build and replay are the same code, so that both make the same mistake: most of these faults are
seen by the plain twin. Kernels run as the Python that they are written in, so that no copy has to
be compiled; but for the last test, whose fault is in what was compiled.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import packprep
from tests import made

PACKAGE = Path(packprep.__file__).parent
SEQ_LENGTH = 256

# Every kind of task, and segments at lengths at which float32 rounds another way than float64.
RECIPE = {
    "seq_length": SEQ_LENGTH,
    "tokenizer": "bytes",
    "sources": [{"paths": ["*.jsonl"]}],
    "documents": {"prepend_bos": True},
    "tasks": [
        {"name": "spans", "objective": "span_corruption", "weight": 3, "mode_token": "[NLU]"},
        {"name": "rolled", "objective": "span_corruption", "random_roll": True},
        {"name": "prefix", "objective": "prefix_lm", "sentinel": True},
        {"preset": "fim"},
        {"preset": "llada"},
        {"preset": "duo"},
        {"preset": "bd3"},
        {"preset": "causal"},
    ],
}
# numba.njit, when packprep.kernel asks for it, gives the function back.
PLAIN = """
import sys
import numpy as np
import numba
def plain(function):
    function.enable_caching = lambda: None
    return function
numba.njit = lambda **flags: plain
np.seterr(over="ignore")  # uint64 products wrap, as they do when they are compiled
"""
# Builds, and verifies with the code that built: the faults, as JSON, on the last line.
BUILD_AND_VERIFY = """
import json, sys
from pathlib import Path
import packprep
from packprep.building.run import build
from packprep.recipe import read_recipe
from packprep.verification import verify_dataset
from tests.twin.check import verify_with_twin
class Silent:
    def begin(self, *_): pass
    def add(self, *_): pass
    def say(self, *_): pass
    def done(self, item: object): ...
    def end(self): pass
recipe, base, out = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
assert Path(packprep.__file__).is_relative_to(Path.cwd())
if not out.exists():
    build(read_recipe(recipe, base), out, Silent())
without = verify_dataset(out, -1, {}, (0, 1), 0, Silent())
print(json.dumps([without, verify_with_twin(out)]))
"""


class Mutation(NamedTuple):
    """A fault: `old` becomes `new` in one file of the package. by_twin: only the twin can see
    it."""

    name: str
    file: str
    old: str
    new: str
    by_twin: bool


MUTATIONS = [
    Mutation("wrong_key_purpose", "randomness.py", "PIVOT = 5  #", "PIVOT = 55  #", True),
    Mutation(
        "span_count_off_by_one",
        "objectives/span_corruption.py",
        "n_spans = max(min(n_spans, n_noise, n - n_noise, np.int64(max_spans)), np.int64(1))",
        "n_spans = max(min(n_spans - 1, n_noise, n - n_noise, np.int64(max_spans)), np.int64(1))",
        True,
    ),
    Mutation(  # T5's: 190 tokens of density .15 have 28 of noise, or 29
        "span_count_in_float32",
        "objectives/span_corruption.py",
        "np.rint(np.float64(n) * noise_density)",
        "np.rint(np.float32(n) * np.float32(noise_density))",
        True,
    ),
    Mutation(
        "probability_in_float32",
        "dataset/epochs/noise.py",
        "    return (1.0 - epsilon) * level + epsilon",
        "    return ((1.0 - epsilon) * level + epsilon).astype(np.float32)",
        True,
    ),
    Mutation(
        "label_shifted",
        "building/render.py",
        "copy_items(rows.labels, begin, rows.tokens, begin + 1, n - 1)",
        "copy_items(rows.labels, begin, rows.tokens, begin, n - 1)",
        False,
    ),
    Mutation(
        "sentinel_order",
        "building/plan.py",
        "sentinels=np.array(vocabulary.sentinels, np.int32)",
        "sentinels=np.array(vocabulary.sentinels[::-1], np.int32)",
        True,
    ),
    Mutation(
        "last_document_of_a_piece_dropped",
        "sources/formats/jsonl.py",
        'ends = np.flatnonzero(characters[begin:some_end] == ord("\\n")) + begin',
        'ends = (np.flatnonzero(characters[begin:some_end] == ord("\\n")) + begin)[:-1]',
        True,
    ),
    Mutation(
        "pivot_off_by_one",
        "objectives/prefix_lm.py",
        "pivot[i] = 1 + integer(bodies.key[i], purpose, 0, n[i] - 1, bodies.epoch)",
        "pivot[i] = max(integer(bodies.key[i], purpose, 0, n[i] - 1, bodies.epoch), 1)",
        True,
    ),
    Mutation(
        "row_order",
        "building/packing.py",
        'shuffled = np.argsort(row_draws, kind="stable")',
        'shuffled = np.argsort(row_draws, kind="stable")[::-1].copy()',
        True,
    ),
    Mutation(
        "eos_missing",
        "building/segments.py",
        "            tokens, eos = rest, np.int64(policy.eos_last)\n            if rest >= SHORTEST",
        "            tokens, eos = rest, np.int64(0)\n            if rest >= SHORTEST",
        False,
    ),
]
STALE = Mutation(
    "stale_kernel",
    "kernel/chance.py",
    "    return below(word(key, purpose, index, epoch, 0), key, purpose, index, bound, epoch)\n",
    "    return np.int64(bound) - 1\n",
    True,
)


def package_copy(folder: Path) -> Path:
    """A copy of the package in a folder of its own: the folder."""
    shutil.copytree(PACKAGE, folder / "packprep", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def edit(folder: Path, mutation: Mutation) -> None:
    path = folder / "packprep" / mutation.file
    source = path.read_text("utf-8")
    assert source.count(mutation.old) == 1, (
        f"{mutation.file} does not hold the text that {mutation.name} replaces"
    )
    path.write_text(source.replace(mutation.old, mutation.new), "utf-8")


def write_corpus(folder: Path) -> Path:
    documents = [text[:220] for text in made.texts(50, 7, 120)] + ["x" * 190] * 12
    return made.write_lines(folder / "in" / "a.jsonl", documents).parent


def run(
    package: Path,
    code: str,
    corpus: Path,
    out: Path,
    recipe: dict[str, Any] = RECIPE,
    **environment: str,
) -> list[str]:
    """The last lines that code prints with this package, under the recipe's table, the corpus and
    the output folder."""
    command = [sys.executable, "-c", code, json.dumps(recipe), str(corpus), str(out)]
    paths = os.pathsep.join([str(package), str(made.ROOT)])  # the copy hides the package
    found = made.environment(PYTHONPATH=paths, **environment)
    done = subprocess.run(
        command, cwd=package, env=found, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def assert_found(reports: list[dict], mutation: Mutation) -> None:
    without, with_twin = reports
    assert bool(without["faults"]) is not mutation.by_twin, without["listed"]
    assert with_twin["faults"] and all(
        fault["promise"].startswith("P") for fault in with_twin["listed"]
    )
    if mutation.by_twin:
        assert {fault["promise"] for fault in with_twin["listed"]} == {"P17"}
        assert all(fault["message"].startswith("twin: ") for fault in with_twin["listed"])


@pytest.mark.long
def test_the_package_as_it_is_has_no_fault(tmp_path):
    """The control: what is copied, run as plain Python, and not changed."""
    corpus, package = write_corpus(tmp_path), package_copy(tmp_path / "copy")
    reports = json.loads(run(package, PLAIN + BUILD_AND_VERIFY, corpus, tmp_path / "out")[-1])
    assert [report["faults"] for report in reports] == [0, 0]
    assert reports[1]["twin"] == reports[1]["replayed"] == reports[1]["segments"] > 60


@pytest.mark.long
@pytest.mark.alike(5)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_fault_in_the_code_is_found(tmp_path, mutation):
    corpus, package = write_corpus(tmp_path), package_copy(tmp_path / "copy")
    edit(package, mutation)
    assert_found(
        json.loads(run(package, PLAIN + BUILD_AND_VERIFY, corpus, tmp_path / "out")[-1]), mutation
    )


@pytest.mark.long
def test_a_stale_kernel_is_found(tmp_path):
    """A cache in which the callers of a kernel were compiled with another one: that of a changed
    package, whose code has the digest of the package as it is."""
    corpus, package = write_corpus(tmp_path), package_copy(tmp_path / "copy")
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    # few kernels to compile
    recipe = {**RECIPE, "tasks": [{"preset": "prefix_lm"}, {"preset": "causal"}]}
    any_code = "import packprep.cache\npackprep.cache.code_digest = lambda path: ''\n"
    source = package / "packprep" / STALE.file
    sound = source.read_bytes()
    edit(package, STALE)
    # compiles
    run(package, any_code + BUILD_AND_VERIFY, corpus, tmp_path / "changed", recipe, **cache)
    source.write_bytes(sound)
    code = (
        any_code + BUILD_AND_VERIFY + "\nfrom packprep.objectives.prefix_lm import"
        " _draw_pivots\nprint(_draw_pivots.compiled.stats.cache_hits)"
    )
    *_, reports, hits = run(package, code, corpus, tmp_path / "out", recipe, **cache)
    assert "{}" not in hits and hits.strip() != "Counter()", "the kernel was compiled anew"
    assert_found(json.loads(reports), STALE)
