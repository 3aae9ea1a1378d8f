"""Runs the blocks of a page, in order, in one folder.

sh                  `bash -euo pipefail -c`, with packprep and python first in PATH
python              in one namespace a page; with `# NAME.py` as its first line: written to that file, and compiled
toml                with `# NAME.toml` as its first line: written, and read as a recipe. Else a part of one: put over a minimal
                    recipe, it is read without error
bash, yaml, json    a script or a file that is shown: it parses
text                right below a block of sh or Python: each of its lines has words that a line of the output has
console             shown
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packprep.errors import PackprepError
from packprep.objectives.tasks import complete
from packprep.recipe import read_recipe
from tests.docs.blocks import Block, BlockError, Page

_WORD = re.compile(r"\b[^\W\d]+\b")
_PATIENCE_S = 300
_NAMESPACE = Path(__file__).with_name("namespace.py")


def run_page(
    page: Page,
    folder: Path,
    environment: Mapping[str, str],
    missing: Mapping[str, str] | None = None,
    after: Callable[[str], None] | None = None,
) -> list[str]:
    """Run a page's blocks in `folder`; gives what was left out for want of a library.

    missing: pattern of modules that cannot be imported → why. A block of Python that imports one is
    left out, with all blocks of Python after it, which may use its names, and the blocks of sh that
    call a file that was left out.
    after: called with what each block of sh printed.
    """
    left_out: list[str] = []
    files: set[str] = set()
    said: str | None = ""  # None: what would have said it was left out
    python = _Python(folder, environment)
    try:
        for block in page.blocks:
            if block.not_run is not None:
                said = ""
                continue
            lacking = _lacking(block, missing or {}, bool(left_out), files)
            if lacking:
                left_out.append(f"{page.at(block)}: {lacking}")
                files |= {block.name} - {None}  # type: ignore[arg-type]
                said = None
                continue
            try:
                if block.language == "text":
                    if block.below and not block.sample and said is not None:
                        _compare(block.text, said)
                    continue
                said = ""
                if block.language == "sh":
                    said = _sh(block, folder, environment)
                    if after:
                        after(said)
                elif block.language == "python" and not block.name:
                    said = python.run(page.at(block), block.text)
                else:
                    _CHECKS[block.language](block, folder)
            except (BlockError, PackprepError, SyntaxError, ValueError) as error:
                raise BlockError(f"{page.at(block)}: {error}\n\n{block.text}") from error
    finally:
        python.close()
    return left_out


def _lacking(
    block: Block, missing: Mapping[str, str], python_ended: bool, files: set[str]
) -> str | None:
    """Why a block is left out."""
    if block.language == "python":
        if python_ended and not block.name:
            return "goes on from a block that was left out"
        for modules, reason in missing.items():
            if re.search(rf"^\s*(import|from) ({modules})\b", block.text, re.M):
                return reason
    called = [name for name in files if block.language == "sh" and name in block.text]
    return f"calls {', '.join(called)}" if called else None


def _sh(block: Block, folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != block.exit_status:
        raise BlockError(
            f"exit status {done.returncode}, not {block.exit_status}\n{done.stdout}{done.stderr}"
        )
    return done.stdout + done.stderr


class _Python:
    """The process of a page's Python, begun with its first block."""

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        self._folder, self._environment = folder, environment
        self._process: subprocess.Popen[str] | None = None

    def run(self, where: str, text: str) -> str:
        if self._process is None:
            with (self._folder / ".stderr").open("w") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, str(_NAMESPACE)],
                    cwd=self._folder, env=self._environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([where, text]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise BlockError(f"Python ended\n{(self._folder / '.stderr').read_text()}")
        out, error = json.loads(answer)
        if error:
            raise BlockError(f"{out}{error}{(self._folder / '.stderr').read_text()}")
        return out

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin and self._process.stdout
            self._process.stdin.close()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()


def _compare(shown: str, said: str) -> None:
    """BlockError unless for each line that is shown some line of the output has all its words."""
    output = [set(_WORD.findall(line)) for line in said.splitlines()]
    for line in shown.splitlines():
        words = set(_WORD.findall(line))
        if words and not any(words <= other for other in output):
            raise BlockError(f"the output has no line with the words of {line.strip()!r}:\n{said}")


def _python_file(block: Block, folder: Path) -> None:
    assert block.name
    compile(block.text, block.name, "exec")
    (folder / block.name).write_text(block.text, "utf-8")


def _toml(block: Block, folder: Path) -> None:
    table = tomllib.loads(block.text)
    if block.name:
        (folder / block.name).write_text(block.text, "utf-8")
    if block.name != "pyproject.toml":
        complete(read_recipe(table if block.name else over_a_minimal_recipe(table), folder))


def over_a_minimal_recipe(table: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe of its part: with a tokenizer, a source, and the paths of a source where they are
    missing."""
    sources = [
        {"paths": ["data/web/*.jsonl.zst"], **source} for source in table.get("sources", [{}])
    ]
    return {"tokenizer": "bytes", **table, "sources": sources}


def _bash(block: Block, folder: Path) -> None:
    done = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
    if done.returncode:
        raise BlockError(done.stderr)


def _yaml(block: Block, folder: Path) -> None:
    try:
        import yaml
    except ImportError:
        return
    try:
        yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        raise BlockError(str(error)) from error


_CHECKS: dict[str, Callable[[Block, Path], None]] = {
    "python": _python_file,
    "toml": _toml,
    "bash": _bash,
    "yaml": _yaml,
    "json": lambda block, folder: json.loads(block.text),
    "console": lambda block, folder: None,
}


def commands(folder: Path) -> Path:
    """A folder for PATH with packprep and python of this interpreter. packprep is not that of the
    folder at hand, which may look like a clone: kernels are compiled for the place of their
    source."""
    folder.mkdir()
    for name, module in (("packprep", " -P -m packprep"), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{module} "$@"\n')
        script.chmod(0o755)
    return folder
