"""A fast engine that was caught in a difference: the note that says where, and the plan without that engine.

The build that catches it stops and leaves the note. The next one replaces the plan by the same with the reference engine,
the only case in which a plan is replaced; so the receipts of the old one are void. Publication removes the note.
"""

from collections.abc import Mapping
from typing import Any

from packprep.building.job import Job
from packprep.building.output import Output
from packprep.building.plan_form import LATER
from packprep.corpus.engines.registry import REFERENCE
from packprep.dataset.json_files import as_stored, decode, encode
from packprep.digests import own_digest
from packprep.errors import BuildError, EngineRevoked

NOTE = "engine-revoked.json"


def leave_note(out: Output, error: EngineRevoked) -> None:
    """Write what was found, unless another process has."""
    if error.found and not out.exists(NOTE):
        out.write_whole(NOTE, [encode(error.found)])


def read_note(out: Output) -> dict[str, Any] | None:
    """What was found; None if nothing was."""
    try:
        note = decode(out.read(NOTE), out.place(NOTE))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BuildError(f"{out.place(NOTE)}: {error.strerror}; see to it and run the same command again") from None
    return note if isinstance(note, dict) else {}


def remove_note(out: Output) -> None:
    """Remove it, if there is one."""
    if not out.exists(NOTE):
        return  # so that nothing is asked of a folder that can only be read
    out.remove(NOTE)
    out.flush()


def is_revoked(plan: Mapping[str, Any], note: Mapping[str, Any] | None) -> bool:
    """Whether the note of its output folder is about a plan's engine."""
    return note is not None and "reference" in plan["engine"]


def with_reference(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The same plan with the reference engine, of the version that the fast one was compared with: equal by whomever."""
    changed = {**plan, "engine": {"name": REFERENCE, "version": plan["engine"]["reference"]}}
    return {**changed, "digest": own_digest(as_stored(changed, LATER))}


def stop_if_revoked(out: Output, job: Job) -> None:
    """EngineRevoked if another process has caught this job's engine in a difference: what it makes must not be kept."""
    if "reference" in job.plan["engine"] and out.exists(NOTE):
        raise EngineRevoked(
            f"{out.place(NOTE)} stands there: the engine {job.plan['engine']['name']} was caught in a difference; "
            "run the same command again, and it goes on with the reference engine"
        )
