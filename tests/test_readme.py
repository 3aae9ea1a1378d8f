"""The README and the quickstart do what they say: their commands run, as written but for where the corpus lies."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.S | re.M)


def blocks(page: str, language: str) -> list[str]:
    return [block["text"] for block in _FENCE.finditer(page) if block["language"] == language]


def steps(page: str) -> list[str]:
    """Every command of a page, those joined by && one by one."""
    return [step.strip() for block in blocks(page, "sh") for step in re.split(r"&&|\n", block) if step.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that looks like a clone, with this interpreter's packprep first in PATH and a small standard library."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("examples", "packprep", "docs"):
        (folder / name).symlink_to(ROOT / name)
    library = folder / "lib" / "json"
    library.mkdir(parents=True)
    for module in ("argparse", "ast", "bisect", "calendar", "dataclasses", "functools"):
        source = Path(sys.modules["os"].__file__).with_name(f"{module}.py")
        (folder / "lib" / source.name).write_bytes(source.read_bytes())
    (library / "decoder.py").write_bytes(Path(sys.modules["json"].__file__).with_name("decoder.py").read_bytes())
    (folder / "bin").mkdir()
    for name, module in (("packprep", "-m packprep"), ("python", "")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        script.chmod(0o755)
    return folder


def run(folder: Path, step: str, out: str) -> str:
    """Run one command in the shell; `packed` becomes `out`, so that the pages do not share a dataset."""
    step = re.sub(r"\bpacked\b", out, step)
    path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "lib": str(folder / "lib")}
    result = subprocess.run(["bash", "-euc", step], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{step}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize(("page", "out"), [(README, "packed_readme"), (QUICKSTART, "packed_quickstart")])
def test_commands_run_and_what_they_make_is_good(folder, page, out):
    commands = [step for step in steps(page) if step.startswith("packprep ")]
    assert any(" build " in command for command in commands) and any(" verify " in command for command in commands)
    for command in commands:
        said = run(folder, command, out)
        if " verify " in command:
            assert "every promise holds" in said and "built again from their sources" in said
        if " --row " in command:
            assert said.splitlines()[-1] in README, "the README shows another legend under its row"
        if " build " in command:
            assert set(re.findall(r"^[a-z]+", said, re.M)) <= set(re.findall(r"^[a-z]+", README, re.M)) | {"too_short"}
    for block in blocks(page, "python"):
        run(folder, f"python -c {shlex.quote(block)}", out)


def test_everything_else_in_the_commands_installs_finds_the_library_or_tests():
    others = {step for page in (README, QUICKSTART) for step in steps(page) if not step.startswith("packprep ")}
    find = """lib="$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')\""""
    assert others == {"pip install .", "pip install '.[test]'", "python -m pytest -n auto", find}
    assert run(ROOT, f'{find}; ls "$lib/os.py"', "packed").strip().endswith("/os.py")


def test_the_readme_has_two_commands_one_line_each_and_five_lines_of_python():
    assert len(blocks(README, "sh")) == 2 and all(block.count("\n") == 1 for block in blocks(README, "sh"))
    (python,) = blocks(README, "python")
    assert python.count("\n") == 5 and python.splitlines()[-1].startswith("assert ")


def test_the_readme_has_at_most_200_lines():
    assert len(README.splitlines()) <= 200


def test_the_readme_begins_with_a_sentence_and_a_decoded_row():
    assert README.index("$ packprep inspect packed --row -1") < README.index("```python") < README.index("## ")


def test_the_recipe_in_the_readme_is_that_of_the_example():
    (shown,) = [block for block in blocks(README, "toml") if "reserved_special_token" in block]
    example = tomllib.loads((ROOT / "examples" / "ul2r_llama.toml").read_text("utf-8"))
    assert is_part(tomllib.loads(shown), example)


def is_part(part: object, whole: object) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_part(value, whole[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(is_part, part, whole))
    return part == whole


def test_the_quickstart_shows_the_example_as_it_is():
    (shown,) = blocks(QUICKSTART, "toml")
    assert tomllib.loads(shown) == tomllib.loads((ROOT / "examples" / "quickstart.toml").read_text("utf-8"))


def test_ci_takes_the_test_command_from_the_readme():
    (line,) = [line for line in README.splitlines() if line.startswith("pip install '.[test]'")]
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert line not in script and """grep -m1 -F "pip install '.[test]'" README.md""" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
