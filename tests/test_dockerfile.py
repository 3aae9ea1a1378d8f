"""The Dockerfile, without an engine that could build it: its RUN steps as they stand, then its
entrypoint as another user.

What stands for the rest: FROM, an empty virtual environment of this Python; COPY, the files of the
clone that .dockerignore leaves; ENV, WORKDIR and USER, the same in folders of the test; read-only
layers, a user who may not write there.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import made

ROOT = Path(__file__).resolve().parents[1]
USER = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"]
# The test's Python may lie in root's home: this lets the other user read it. What the image lets
# him read is asserted.
USER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


def instructions() -> list[tuple[str, str]]:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]  # type: ignore[misc]


def copied_into(folder: Path) -> None:
    """What `COPY . .` brings: only what .dockerignore names with a !."""
    first, *rest = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert first == "*"
    for name in (line[1:] for line in rest if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / name)


def can_be_another_user() -> bool:
    return (
        bool(shutil.which("setpriv"))
        and subprocess.run([*USER, "true"], capture_output=True).returncode == 0
    )


def test_the_base_is_slim_and_the_user_is_not_root():
    steps = dict(instructions())
    assert steps["FROM"] == "python:3.12-slim" and not steps["USER"].startswith(("0", "root"))
    assert json.loads(steps["ENTRYPOINT"]) == ["packprep"]


@pytest.mark.long
def test_its_steps_make_an_image_in_which_another_user_compiles_nothing():
    with tempfile.TemporaryDirectory() as name:
        image = Path(name)
        image.chmod(0o755)
        subprocess.run([sys.executable, "-m", "venv", image / "venv"], check=True)
        path = f"{image}/venv/bin:/usr/local/bin:/usr/bin:/bin"
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment, at = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **pip}, image
        for instruction, words in instructions():
            match instruction:
                case "ENV":
                    environment |= {
                        key: f"{image}{value}" for key, value in map(_pair, shlex.split(words))
                    }
                case "WORKDIR":
                    at = Path(f"{image}{words}")
                    at.mkdir()
                case "COPY":
                    assert words == ". ."
                    copied_into(at)
                case "RUN":
                    done = subprocess.run(
                        words, shell=True, cwd=at, env=environment, capture_output=True, text=True
                    )
                    assert done.returncode == 0, (words, done.stdout, done.stderr)
                case _:
                    assert instruction in ("FROM", "USER", "ENTRYPOINT")

        kernels = Path(environment["NUMBA_CACHE_DIR"])
        modes = [
            (kept.is_dir(), kept.stat().st_mode & 0o777) for kept in (kernels, *kernels.rglob("*"))
        ]
        assert len(modes) > 50 and set(modes) == {(True, 0o755), (False, 0o644)}
        (image / "tmp").mkdir()
        for writable in (at, image / "tmp"):  # the volume, and the folder of temporaries
            writable.chmod(0o1777)
        made.write_lines(at / "a.jsonl", made.texts(50))
        as_user = USER if can_be_another_user() else []
        if not as_user:
            subprocess.run(["chmod", "-R", "a-w", kernels], check=True)
        entrypoint = json.loads(dict(instructions())["ENTRYPOINT"])
        for more in (
            [
                "build",
                "a.jsonl",
                "--tokenizer",
                "bytes",
                "--tasks",
                "ul2r",
                "--seq-length",
                "512",
                "--out",
                "packed",
            ],
            ["verify", "packed", "--replay", "all"],
        ):
            command = [*as_user, str(image / "venv/bin" / entrypoint[0]), *entrypoint[1:], *more]
            done = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True)
            assert done.returncode == 0 and "compiling" not in done.stderr, (
                done.stdout,
                done.stderr,
            )
        assert (at / "packed").stat().st_uid == (1000 if as_user else os.geteuid())


def _pair(assignment: str) -> tuple[str, str]:
    key, _, value = assignment.partition("=")
    return key, value
