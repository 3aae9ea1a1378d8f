"""The README does what it says, and has its form: its commands run, as written but for where the
corpus lies."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.blocks import read_page
from tests.docs.running import commands

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str, page: str = "README.md") -> list[str]:
    return [block.text for block in read_page(ROOT / page).blocks if block.language == language]


def steps() -> list[str]:
    """Every command of the README, those joined by && one by one."""
    return [
        step.strip() for block in blocks("sh") for step in re.split(r"&&|\n", block) if step.strip()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with this interpreter's packprep in bin/, and a small standard library in lib/."""
    folder = tmp_path_factory.mktemp("readme")
    library = folder / "lib" / "json"
    library.mkdir(parents=True)
    for module in ("argparse", "ast", "bisect", "calendar", "dataclasses", "functools"):
        source = Path(sys.modules["os"].__file__).with_name(f"{module}.py")
        (folder / "lib" / source.name).write_bytes(source.read_bytes())
    (library / "decoder.py").write_bytes(
        Path(sys.modules["json"].__file__).with_name("decoder.py").read_bytes()
    )
    commands(folder / "bin")
    return folder


def run(folder: Path, step: str) -> str:
    """What one command in the shell prints."""
    path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "lib": str(folder / "lib")}
    result = subprocess.run(
        ["bash", "-euc", step], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{step}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_commands_run_and_what_they_make_is_good(folder):
    said_to_run = [step for step in steps() if step.startswith("packprep ")]
    assert any(" build " in command for command in said_to_run) and any(
        " verify " in command for command in said_to_run
    )
    for command in said_to_run:
        said = run(folder, command)
        if " verify " in command:
            assert "every promise holds" in said and "built again from their sources" in said
        if " build " in command:
            assert set(re.findall(r"^[a-z]+", said, re.M)) <= set(
                re.findall(r"^[a-z]+", README, re.M)
            ) | {"too_short"}
    legend = run(folder, "packprep inspect packed --row -1 --from-plan").splitlines()[-1]
    assert legend in README, "the README shows another legend under its row"


def test_everything_else_in_the_commands_installs_finds_the_library_or_tests():
    others = {step for step in steps() if not step.startswith("packprep ")}
    find = """lib="$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')\""""
    assert others == {"pip install .", "pip install '.[test]'", "python -m pytest -n auto", find}
    assert run(ROOT, f'{find}; ls "$lib/os.py"').strip().endswith("/os.py")


def test_the_readme_has_two_commands_one_line_each_and_five_lines_of_python():
    assert len(blocks("sh")) == 2 and all(block.count("\n") == 1 for block in blocks("sh"))
    (python,) = blocks("python")
    lines = [line for line in python.splitlines() if line]
    assert len(lines) == 5 and lines[-1].startswith("assert ")


def test_the_readme_has_at_most_200_lines():
    assert len(README.splitlines()) <= 200


def test_the_readme_begins_with_a_sentence_and_a_decoded_row():
    assert (
        README.index("$ packprep inspect packed --row -1 --from-plan")
        < README.index("```python")
        < README.index("## ")
    )


def test_the_recipe_in_the_readme_is_that_of_the_example():
    (shown,) = [block for block in blocks("toml") if "reserved_special_token" in block]
    example = tomllib.loads((ROOT / "examples" / "ul2r_llama.toml").read_text("utf-8"))
    assert is_part(tomllib.loads(shown), example)


def is_part(part: object, whole: object) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_part(value, whole[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(is_part, part, whole))
    return part == whole


def test_the_quickstart_shows_the_example_as_it_is():
    (shown,) = blocks("toml", "docs/quickstart.md")
    assert tomllib.loads(shown) == tomllib.loads(
        (ROOT / "examples" / "quickstart.toml").read_text("utf-8")
    )


@pytest.mark.parametrize(
    "script, command", [("run", "pip install '.[test]'"), ("package", "pip install . &&")]
)
def test_ci_takes_its_commands_from_the_readme(script, command):
    (line,) = [line for line in README.splitlines() if line.startswith(command)]
    path = ROOT / ".ci" / script
    text = path.read_text("utf-8")
    assert line not in text and f'grep -m1 -F "{command}" README.md' in text
    assert os.access(path, os.X_OK)
