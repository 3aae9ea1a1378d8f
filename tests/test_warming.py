"""`packprep warm`: what it compiled no command compiles again."""

import json
import os

import pytest

from packprep.cache import CacheFolders
from packprep.cli import warming
from packprep.errors import BuildError
from packprep.kernel import compiling
from tests import made
from tests.command_line import packprep, refused
from tests.golden.builds import BUILDS, SOURCES
from tests.made import texts, write_lines

CAUSAL = """
seq_length = 256
tokenizer = "bytes"
sources = [{paths = ["a.jsonl"]}]
tasks = [{preset = "causal"}]
"""


IN_ONE_PROCESS = """
import os
from packprep import open_dataset
from packprep.kernel import compiling
from tests import test_warming
from tests.command_line import inside
name = os.environ["RECIPE"]
test_warming.check_commands(f"{name}.toml", name, run=inside)
open_dataset(name).batch([0], epochs=[3], accelerate="numba")
assert not compiling.COUNTS["compiled"], compiling.COUNTS
"""


def without_compiling(*arguments, run=packprep, **changes):
    said = run(*arguments, **changes)
    assert said.status == 0 and "compiling" not in said.err, said
    return said


def check_commands(recipe, out, **changes):
    """Nothing is compiled by a build of a recipe and by what is done with its dataset."""
    without_compiling("build", recipe, "--out", out, **changes)
    for arguments in (
        ("verify", out, "--replay", "all"),
        ("verify", out, "--epoch", 1),
        ("inspect", out, "--html", f"{out}.html"),
        ("export", out, "--to", "megatron", "--out", f"{out}.megatron"),
    ):
        without_compiling(*arguments, **changes)


@pytest.mark.long
def test_a_recipe_s_kernels_are_compiled_ahead(tmp_path):
    write_lines(tmp_path / "a.jsonl", texts(40))
    (tmp_path / "recipe.toml").write_text(CAUSAL)
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    first, again = (packprep("warm", tmp_path / "recipe.toml", "--json", **cache) for _ in range(2))
    assert first.err.startswith(
        f"packprep: compiling kernels that {tmp_path}/cache/packprep lacks, up to 10 s: they"
    )
    assert (
        first.json["objectives"] == ["causal"]
        and first.json["folder"] == f"{tmp_path}/cache/packprep"
    )
    assert first.json["compiled"] > 5 and again.json["compiled"] == 0 and again.err == ""
    check_commands(tmp_path / "recipe.toml", tmp_path / "out", **cache)
    assert packprep("warm", tmp_path / "recipe.toml", **cache).out.startswith(
        f"kernels of causal are in {tmp_path}/cache"
    )
    # Others may only read what is kept, as of an image.
    os.chmod(tmp_path / "cache/packprep", 0o555)
    assert json.loads(without_compiling("plan", tmp_path / "recipe.toml", "--json", **cache).out)[
        "shards"
    ]


@pytest.mark.long
def test_without_a_recipe_all_kernels_are(tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert "up to 30 s" in packprep("warm", **cache).err
    (tmp_path / "sources").symlink_to(SOURCES)
    for name, recipe in BUILDS.items():
        (tmp_path / f"{name}.toml").write_text(recipe)
        # One process runs all commands of a recipe. Five processes would take four times as long.
        done = made.run_python(IN_ONE_PROCESS, tmp_path, RECIPE=name, **cache)
        assert done.returncode == 0, (name, done.stdout, done.stderr)


def test_what_cannot_be_kept_is_an_error(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(warming, "cache_folders", lambda: CacheFolders((), None))
        with pytest.raises(BuildError, match="kernels cannot be cached.*\n.*set NUMBA_CACHE_DIR"):
            warming.compile_ahead()
    monkeypatch.setattr(
        warming, "build", lambda *given: compiling.COUNTS.update(compiled=3, kept=1)
    )
    monkeypatch.setattr(warming, "verify_dataset", lambda *given: None)
    monkeypatch.setattr(warming, "write_report", lambda *given: None)
    monkeypatch.setattr(compiling, "COUNTS", compiling.COUNTS.copy())
    with pytest.raises(
        BuildError, match="of .* kernels could not be cached in .*\nhint: check its disk"
    ):
        warming.compile_ahead()


def test_what_is_no_recipe_is_refused(tmp_path):
    assert "a.jsonl: expected a RECIPE.toml" in refused("warm", "a.jsonl")
    assert "no-such.toml" in refused("warm", tmp_path / "no-such.toml")
