"""A fast engine that was caught in a difference: the note that says where, and the plan without that engine.

The build that catches it stops and leaves the note. The next one replaces the plan by the same with the reference engine,
the only case in which a plan is replaced; so the receipts of the old one are void. Publication removes the note.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packprep.building.commit import flush_output, write_error, write_whole
from packprep.building.plan import Job
from packprep.corpus.engines.registry import REFERENCE
from packprep.dataset.manifest import decode, encode
from packprep.dataset.opening import read_file
from packprep.digests import own_digest
from packprep.errors import BuildError, EngineRevoked

NOTE = "engine-revoked.json"


def leave_note(out: Path, error: EngineRevoked) -> None:
    """Write what was found, unless another process has."""
    if error.found and not (out / NOTE).exists():
        write_whole(out / NOTE, [encode(error.found)], out)


def read_note(out: Path) -> dict[str, Any] | None:
    """What was found; None if nothing was."""
    path = out / NOTE
    try:
        note = decode(read_file(path), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}; see to it and run the same command again") from None
    return note if isinstance(note, dict) else {}


def remove_note(out: Path) -> None:
    """Remove it, if there is one."""
    if not (out / NOTE).exists():
        return  # so that nothing is asked of a folder that can only be read
    try:
        (out / NOTE).unlink(missing_ok=True)
    except OSError as error:
        raise write_error(out / NOTE, error) from error
    flush_output(out)


def is_revoked(plan: Mapping[str, Any], note: Mapping[str, Any] | None) -> bool:
    """Whether the note of its output folder is about a plan's engine."""
    return note is not None and "reference" in plan["engine"]


def with_reference(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The same plan with the reference engine, of the version that the fast one was compared with: equal by whomever."""
    changed = {**plan, "engine": {"name": REFERENCE, "version": plan["engine"]["reference"]}}
    return {**changed, "digest": own_digest(changed)}


def stop_if_revoked(out: Path, job: Job) -> None:
    """EngineRevoked if another process has caught this job's engine in a difference: what it makes must not be kept."""
    if "reference" in job.plan["engine"] and (out / NOTE).exists():
        raise EngineRevoked(
            f"{out / NOTE} stands there: the engine {job.plan['engine']['name']} was caught in a difference; "
            "run the same command again, and it goes on with the reference engine"
        )
