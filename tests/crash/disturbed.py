"""Builds that are killed, or given an error, at one chosen call of those by which they write.

A build runs in a fork of this process, through the command line, so that no point costs a start.
The calls that it makes on its output folder pass a gate: a pipe with as many bytes as calls may
pass, shared by the build's processes.
"""

import contextlib
import json
import os
import re
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packprep.format.digests import digest_of
from packprep.format.json_files import (
    FIRST_SEEN_NAME,
    MANIFEST_NAME,
    decode,
    receipt_name,
    rejects_name,
    shard_name,
)
from tests import command_line, made

CALLS = ("open", "write", "fsync", "close", "rename", "link", "unlink", "mkdir")
LONGEST_S = 120
KILL, STOP, SHORT = "kill", "stop", "short"


class Project(NamedTuple):
    """A corpus with its recipe, and the bytes of its build, or token store, that nothing
    disturbed."""

    base: Path
    recipe: Path
    expected: dict[str, bytes]
    name: str = "build"

    def command(self, out: Path, workers: int = 1) -> list[object]:
        return [self.name, self.recipe, "--out", out, "--workers", workers]


class Ended(NamedTuple):
    """How a build ended: its exit status, or minus the signal; its messages; the calls it made, by
    name."""

    status: int
    err: str
    calls: list[str]


def project(
    base: Path,
    documents: int = 120,
    shard_text_bytes: int = 12_000,
    name: str = "build",
    **changes: Any,
) -> Project:
    """A corpus of two files with some bad lines: a handful of shards, some with rejects. name: the
    command that makes them."""
    lines = made.texts(documents, 5, 250)
    made.write_lines(base / "a.jsonl", lines[::2])
    with open(base / "a.jsonl", "ab") as file:
        file.write(b'{broken\n{"other": 1}\n')
    made.write_lines(base / "b.jsonl.zst", lines[1::2])
    table = {"seq_length": 256, "tokenizer": '"bytes"', **changes}
    recipe = (
        "".join(f"{key} = {value}\n" for key, value in table.items())
        + '[[sources]]\npaths = ["*.jsonl*"]\n[[tasks]]\npreset = "ul2r"\n'
        f"[output]\nshard_text_bytes = {shard_text_bytes}\n"
    )
    made.write(base / "recipe.toml", recipe.encode())
    undisturbed = Project(base, base / "recipe.toml", {}, name)
    said = command_line.inside(*undisturbed.command(base / "out"))
    assert said.status == 0, said
    return undisturbed._replace(expected=made.contents(base / "out"))


class Running(NamedTuple):
    """A build at work in a fork: a group of processes."""

    pid: int
    log: int

    def wait_until_stopped(self) -> None:
        """Wait for a call with strike STOP."""
        _, state = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(state), "it has ended"

    def go_on(self) -> None:
        """Let it make that call."""
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it, also where it is stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> Ended:
        """Wait for all its processes."""
        logged = _read_all(self.log)  # ends when the last of them does
        os.close(self.log)
        _, state = os.waitpid(self.pid, 0)
        lines = [json.loads(line) for line in logged.splitlines()]
        err = "".join(line["err"] for line in lines if isinstance(line, dict))
        return Ended(
            os.waitstatus_to_exitcode(state), err, [line for line in lines if isinstance(line, str)]
        )


def start(
    arguments: Sequence[object],
    out: Path,
    at: Sequence[int] = (),
    strike: str | int = KILL,
    where: str = "anywhere",
    before: Callable[[], object] = lambda: None,
) -> Running:
    """Start a command in a fork; its calls on `out` with the ascending numbers `at`, from 1 on, are
    struck.

    strike: KILL, in the middle of a write and before any other call; STOP, likewise before it goes
    on; the number of an error, which the call gives; or SHORT: from that call on, each write takes
    a part of what it is given. where: whose calls are counted, and who is killed: the build's
    "first" process, one of its "worker" processes, or "anywhere" and all.
    before: what the fork does first.
    """
    gate_out, gate_in = os.pipe()
    numbers = set(at)
    os.write(
        gate_in, bytes(b".!"[number in numbers] for number in range(1, max(numbers, default=0) + 1))
    )
    os.close(gate_in)
    log_out, log_in = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(log_out)
            os.setpgid(0, 0)
            signal.alarm(LONGEST_S)
            _guard(out, gate_out, log_in, strike, where)
            before()
            said = command_line.inside(*arguments)
            os.write(log_in, json.dumps({"err": said.err}).encode() + b"\n")
            os._exit(said.status)
        except BaseException:
            os.write(log_in, json.dumps({"err": traceback.format_exc()}).encode() + b"\n")
        finally:
            os._exit(99)
    os.close(log_in)
    os.close(gate_out)
    with contextlib.suppress(OSError):  # whoever of both comes first
        os.setpgid(process, process)
    return Running(process, log_out)


def run(arguments: Sequence[object], out: Path, at: int = 0, **options: Any) -> Ended:
    """`start` with one call to strike (0: none), and wait."""
    return start(arguments, out, [at] if at else [], **options).wait()


def _read_all(descriptor: int) -> bytes:
    parts, end = [], time.monotonic() + LONGEST_S
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0, end - time.monotonic()))
        assert ready, "a process of a build that was struck did not end"
        parts.append(os.read(descriptor, 1 << 16))
        if not parts[-1]:
            return b"".join(parts)


def _guard(out: Path, gate: int, log: int, strike: str | int, where: str) -> None:
    """Wrap the calls of `os`, here and in the processes that are forked from here."""
    first, top, ours = os.getpid(), os.fspath(out), {}
    write = os.write
    short = False

    def is_struck(name: str, place: str) -> bool:
        if where != "anywhere" and (os.getpid() == first) != (where == "first"):
            return False
        write(log, json.dumps(f"{name} {os.path.relpath(place, top)}").encode() + b"\n")
        return os.read(gate, 1) == b"!"

    def wrapped(name: str, real: Callable) -> Callable:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal short
            place = (
                ours.get(arguments[0])
                if name in ("write", "fsync", "close")
                else os.fspath(arguments[0])
            )
            reads = name == "open" and not arguments[1] & (os.O_WRONLY | os.O_DIRECTORY)
            if (
                reads
                or not isinstance(place, str)
                or not (place == top or place.startswith(top + "/"))
            ):
                return real(*arguments, **named)
            if name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
                return real(*arguments, **named)  # it is read
            struck = is_struck(name, place)
            if struck and strike in (KILL, STOP):
                if name == "write":
                    half = write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    arguments = (arguments[0], arguments[1][half:])
                number = signal.SIGKILL if strike == KILL else signal.SIGSTOP
                if where == "anywhere" and strike == KILL:
                    os.killpg(0, number)
                elif os.getpid() != first and strike == STOP:
                    os.kill(first, number)  # for which the test waits
                # at once: no call of its own comes between
                signal.pthread_kill(threading.get_ident(), number)
            if struck and isinstance(strike, int):
                if name == "close":
                    real(*arguments)
                    del ours[arguments[0]]
                raise OSError(strike, os.strerror(strike), place)
            short = short or (struck and strike == SHORT)
            if short and name == "write":
                return real(arguments[0], arguments[1][: max(1, len(arguments[1]) // 3)])
            result = real(*arguments, **named)
            if struck and name == "write":
                return half + result
            if name == "open":
                ours[result] = place
            elif name == "close":
                del ours[arguments[0]]
            return result

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))


def check_truth(plain: Project, out: Path) -> int:
    """What stands in a disturbed output is whole, and `status` says what is true of it; gives the
    number of done shards."""
    there = (
        {name: data for name, data in made.contents(out).items() if not name.endswith(".tmp")}
        if out.exists()
        else {}
    )
    there.pop(FIRST_SEEN_NAME, None)  # no part of what is published
    assert there.items() <= plain.expected.items(), "a file that is not as the undisturbed build's"
    said = command_line.inside("status", out, "--json")
    if "plan.json" not in there:
        assert said.status == 2 and "no build was started here" in said.err, said
        return 0
    status = said.json
    done = set(range(status["shards"])) - set(status["missing"])
    for b in range(status["shards"]):
        whole = receipt_name(b) in there
        assert (b in done) == whole, (b, status)
        if whole:
            receipt = decode(there[receipt_name(b)], "receipt")
            assert digest_of(there[shard_name(b)]) == receipt["digest"]
            rejects = receipt["rejects"]
            assert rejects is None or digest_of(there[rejects_name(b)]) == rejects["digest"]
    assert status["done"] == len(done) and status["published"] == (MANIFEST_NAME in there)
    assert said.status == (0 if status["published"] else 1)
    return len(done)


def check_goes_on(plain: Project, out: Path, workers: int = 1) -> None:
    """The same command finishes, and the folder is, byte by byte, as if nothing had happened."""
    again = run(plain.command(out, workers), out)
    assert again.status == 0, again.err
    assert made.contents(out) == plain.expected


def different(calls: Sequence[str]) -> list[int]:
    """The numbers of calls, from 1 on, of which none is the same call on the same file as one
    before it."""
    names = [re.sub(r"\.[A-Za-z0-9-]+\.tmp$", "", call) for call in calls]
    return [i + 1 for i, name in enumerate(names) if name not in names[:i]]
