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
            assert "every invariant holds" in said and "rebuilt from their sources" in said
        if " build " in command:
            (shown,) = [block for block in blocks("text") if block.startswith("packed: ")]
            first_words = re.findall(r"^[a-z]+ ", shown, re.M)
            assert first_words and set(first_words) <= set(re.findall(r"^[a-z]+ ", said, re.M))
    legend = run(folder, "packprep inspect packed --row -1 --from-plan").splitlines()[-1]
    assert legend in (ROOT / "docs/guides/inspect.md").read_text("utf-8")


def test_everything_else_in_the_commands_installs_finds_the_library_or_tests():
    others = {step for step in steps() if not step.startswith("packprep ")}
    find = """lib="$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')\""""
    assert others == {"pip install .", "pip install '.[test]'", "python -m pytest -n auto", find}
    assert run(ROOT, f'{find}; ls "$lib/os.py"').strip().endswith("/os.py")


def test_the_readme_has_two_commands_one_line_each_and_a_short_loop():
    assert len(blocks("sh")) == 2 and all(block.count("\n") == 1 for block in blocks("sh"))
    (python,) = blocks("python")
    assert len([line for line in python.splitlines() if line]) <= 8


def test_the_readme_has_at_most_1000_words():
    assert len(README.split()) <= 1000


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
