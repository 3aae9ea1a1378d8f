"""Sessions: tests, long, adapters, lint, types, docs, minimums, package; campaign and trainers, not
by default.

`nox -s lint`: one; `nox -s 'trainers(trl)'`: one trainer.
"""

from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "long", "adapters", "lint", "types", "docs", "minimums", "package"]
# the first line: "# Python 3.11", or "# not run: WHY"
TRAINERS = sorted(Path(__file__).parent.glob("benchmarks/trainers/*.txt"))


@nox.session
def tests(session: nox.Session) -> None:
    """Every promise once, in minutes."""
    session.install(".[test]")
    session.run("python", "-m", "pytest", "-n", "auto", *session.posargs)


@nox.session
def long(session: nox.Session) -> None:
    """The rest of the suite: crashes, Slurm, damage by the hundred, the docs' blocks, and cases of
    the same kind."""
    session.install(".[test,ray]")
    session.run(
        "python", "-m", "pytest", "-n", "auto", "-m", "long and not campaign", *session.posargs
    )


@nox.session
def adapters(session: nox.Session) -> None:
    """What trainers type, with the libraries that they use; without these the same tests skip."""
    session.install(".[test,trainers]")
    session.run(
        "python",
        "-m",
        "pytest",
        "-n",
        "auto",
        "tests/adapters",
        "tests/benchmarks",
        "tests/examples",
        "tests/exporting",
        "tests/docs",
    )


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    session.install(".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy over the package."""
    session.install(".[dev]")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """The site, and whether what the docs take from the code is current; `nox -s docs -- --write`
    rewrites that first."""
    session.install(".[test,trainers,docs]")
    session.run("python", "docs/make.py", *([] if "--write" in session.posargs else ["--check"]))
    session.run("python", "docs/website.py")
    session.run("python", "-m", "pytest", "-n", "auto", "tests/docs", "tests/test_readme.py")


@nox.session
def minimums(session: nox.Session) -> None:
    """The suite with the oldest direct dependencies that pyproject.toml allows."""
    session.install("uv")
    session.run(
        "uv",
        "pip",
        "install",
        "--python",
        session.virtualenv.bin + "/python",
        "--resolution",
        "lowest-direct",
        ".[test]",
    )
    session.run("python", "-m", "pytest", "-n", "auto", *session.posargs)


@nox.session(venv_backend="none")
def package(session: nox.Session) -> None:
    """The wheel and the sdist, each in an environment of its own; the loader, with numpy and
    nothing else."""
    session.run(".ci/package", external=True)


@nox.session
def campaign(session: nox.Session) -> None:
    """What takes hours, an hour of fuzzing with atheris included; `nox -s campaign -- -k signals` a
    part of it."""
    session.install(".[test,trainers]", "atheris>=3.0")
    session.run("python", "-m", "pytest", "-m", "campaign", "-s", *session.posargs)


@nox.session
@nox.parametrize(
    "python,pins,not_run",
    [
        nox.param(None if no else version, path, no or None, id=path.stem)
        for path in TRAINERS
        for version, _, no in [
            path.read_text().split("\n")[0].removeprefix("# Python ").partition("# not run: ")
        ]
    ],
)
def trainers(session: nox.Session, pins: Path, not_run: str | None) -> None:
    """A real trainer on packprep's rows, in the environment of benchmarks/trainers/NAME.txt."""
    if not_run:
        print(f"{pins.stem}: not run: {not_run}")
        return
    # what else a trainer says that it needs may exist for a GPU alone
    session.install("--no-deps", "-r", str(pins))
    session.install("--no-deps", ".")
    session.chdir("benchmarks")
    session.run("python", "-m", f"trainers.{pins.stem}")
