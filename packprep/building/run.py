"""Progress and resume: a recipe and an output folder in, a published dataset out.

Every process makes whole shards and commits them; the parent hands out shard numbers and shows progress. A process that is
killed leaves nothing but temporaries, and the same command makes what is missing.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from packprep.buffers import Buffers
from packprep.building.array import share_of
from packprep.building.commit import commit_shard
from packprep.building.first_seen import changed_files, differing, done_shards_of, note_of, refuse
from packprep.building.forecast import forecast
from packprep.building.garbage import without_collection
from packprep.building.inputs import Inputs
from packprep.building.job import Job, check_law, recipe_of
from packprep.building.output import Output, output_of
from packprep.building.plan import differences, make_plan
from packprep.building.plan_form import LATER, check_plan
from packprep.building.processes import Do, Report, available_cpus, one_by_one, spread
from packprep.building.profile import Profile
from packprep.building.publication import missing_shards, publish
from packprep.building.revocation import NOTE, is_revoked, leave_note, read_note, stop_if_revoked, with_reference
from packprep.building.signals import ended_by_signals, stoppable
from packprep.building.work import begin_shard, finish_shard, rehearse
from packprep.clock import Clock
from packprep.corpus.calibration import Estimates
from packprep.corpus.finding import absolute_prefix, match_below
from packprep.corpus.missing_roles import listed
from packprep.corpus.readers import Decoders
from packprep.dataset.json_files import (
    FIRST_SEEN_NAME,
    FORMAT,
    MANIFEST_NAME,
    PLAN_NAME,
    TOKENIZER_NAME,
    VERSION,
    as_stored,
    decode,
    encode,
    receipt_name,
    rejects_name,
    shard_name,
    with_defaults,
)
from packprep.digests import digest_of, own_digest
from packprep.errors import DatasetError, EngineRevoked, PlanError, RecipeError

LIST_AGAIN_S = 3.0
WORKER_TEXT_BYTES = 8 << 20
"""Text that a worker process is worth: it takes about a second to start."""


class Progress(Protocol):
    """What the work reports to: `begin` once, `add` for every batch, `say` for messages, `end` at last."""

    def begin(self, text_bytes: int, shards: int, missing: int) -> None: ...
    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None: ...
    def say(self, message: str) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What a build came to: its plan, and the manifest once all shards are done."""

    out: Path | str  # the folder, or its URL
    job: Job
    manifest: dict[str, Any] | None
    made: int  # shards made by this call
    missing: int  # shards that others have still to make
    profile: Profile


def read_plan(out: str | os.PathLike | Output) -> dict[str, Any] | None:
    """The plan of an output folder; None if there is none. PlanError if one byte of it is not as it was written."""
    found = plan_and_digest(out)
    return found[0] if found else None


def plan_and_digest(out: str | os.PathLike | Output) -> tuple[dict[str, Any], str] | None:
    """(the plan of an output folder, the digest of its file); None if there is none. PlanError as in `read_plan`."""
    out = output_of(out)
    path = out.place(PLAN_NAME)
    restore = "put the file back as it was, or begin anew in another folder"
    try:
        data = out.read(PLAN_NAME)
        plan = decode(data, path)
    except FileNotFoundError:
        out.reach()
        return None
    except DatasetError as error:
        raise PlanError(f"{error}; {restore}") from None
    except OSError as error:
        if isinstance(error, NotADirectoryError):
            raise PlanError(f"{out} is a file, or lies below one, and an output is a folder: name another") from None
        raise PlanError(f"{path}: {error.strerror}; see to it, or begin anew in another folder") from None
    if not isinstance(plan, dict) or plan.get("format") != FORMAT or plan.get("version") != VERSION:
        raise PlanError(f"{path}: not a plan of this packprep; begin anew in another folder")
    digest = own_digest(plan)
    if plan.get("digest") != digest:
        raise PlanError(
            f"{path}: it carries the digest {plan.get('digest')!r} and its own is {digest}: it was changed or damaged "
            f"after it was written; {restore}"
        )
    check_plan(plan, path)
    return with_defaults(plan, LATER), digest_of(data)


def open_job(out: str | os.PathLike | Output, prefixes: Sequence[str] | None = None) -> Job:
    """The job of an output folder that has a plan and a tokenizer."""
    out = output_of(out)
    found = plan_and_digest(out)
    if found is None:
        raise PlanError(f"{out}: no plan.json: this is no packprep output; `packprep build … --out {out}` begins one")
    return _job(out, *found, prefixes)


def _job(out: Output, plan: Mapping[str, Any], digest: str, prefixes: Sequence[str] | None) -> Job:
    name = plan["tokenizer"]["file"]
    try:
        tokenizer_json = out.read(name)
    except OSError as error:
        raise PlanError(
            f"{out.place(name)}: {error.strerror}; the plan needs it: put it back, or begin anew in another folder"
        ) from None
    return Job(plan, tokenizer_json, prefixes, digest)


def moved_prefixes(plan: Mapping[str, Any], moved: Mapping[str, str]) -> list[str]:
    """The sources' prefixes: the plan's, or where `moved` says that they lie now. RecipeError for a name that is no source."""
    names = [source["name"] for source in plan["sources"]]
    for name in moved:
        if name not in names:
            raise RecipeError(f"--source {name}=…: the dataset has no source of that name; it has {', '.join(names)}")
    return [absolute_prefix(moved.get(source["name"], source["prefix"])) for source in plan["sources"]]


def run(
    inputs: Inputs,
    out: Output,
    progress: Progress,
    workers: int | None,
    array: tuple[int, int],
    begun: Callable[[Job], None],
    clock: Clock,
) -> Outcome:
    """`start.build` of what a recipe names. clock: has run since the build began."""
    clean = out.remove_temporaries
    with ended_by_signals(clean):
        with clock.stage("plan"), without_collection():
            if not out.exists(MANIFEST_NAME):
                rehearse(inputs)  # while the engine is being loaded
            job = planned(inputs, out, progress.say)
            compare_sources(out, job, inputs, progress.say, workers or available_cpus())
        share = share_of(*array, job.shards)
        missing = missing_shards(out, job.digest, share)
        to_do = sum(source.weight for source in job.sources) * len(missing) // job.shards
        workers = min(workers or _workers_for(to_do), max(1, len(missing)))
        if workers > 1:
            with clock.stage("start-up"):
                job.engine  # noqa: B018  (loaded once, and shared by the workers that are forked from here)
    with stoppable() as stop_asked:
        if len(missing) < job.shards:
            progress.say(_to_do(len(share), len(missing), job.shards))
        progress.begin(to_do, job.shards, len(missing))
        counts = np.zeros(4, np.int64)

        def report(*of_batch: int) -> None:
            counts[:] += of_batch
            progress.add(*of_batch)

        try:
            items, started = [ShardToMake(b) for b in missing], partial(begun, job)
            arguments = (out, inputs.prefixes, job.seen)
            made = spread(shard_maker, arguments, items, workers, report, stop_asked, clean, started, progress.say)
            with _at_hand(out, job), contextlib.closing(made):
                for _, seconds in islice(made, max(1, len(items))):  # `started` is called where there are none, too
                    clock.add(seconds)
                with clock.stage("publish"):  # while workers end, who have much memory to give back
                    manifest = publish(out, job)
            if manifest is None and array[1] > 1:
                time.sleep(LIST_AGAIN_S)  # listings may be cached
                manifest = publish(out, job)
        except EngineRevoked as error:
            note_revocation(out, job, error)
            raise
        finally:
            progress.end()
    others = len(missing_shards(out, job.digest, range(job.shards))) if manifest is None else 0
    documents, text_bytes, tokens, _ = map(int, counts)
    profile = Profile(clock.elapsed(), workers, clock.take(), documents, text_bytes, tokens)
    return Outcome(out.location, job, manifest, len(missing), others, profile)


def _workers_for(text_bytes: int) -> int:
    """The processes that this much text is worth."""
    return max(1, min(available_cpus(), text_bytes // WORKER_TEXT_BYTES))


def _to_do(share: int, missing: int, shards: int) -> str:
    """What is left of an array task's share of the shards, in words."""
    if not share:
        return f"nothing to make: none of the {shards} shards is this array task's"
    whose = f"all {share}" if share == shards else f"this array task's {share}"
    return f"{missing} of {whose} shards to make" if missing else f"nothing to make: {whose} shards are done"


def planned(inputs: Inputs, out: Output, say: Callable[[str], None]) -> Job:
    """The job of the plan that stands in `out`, written first if there is none; PlanError if it is another recipe's.

    say: is told what a user should know.
    """
    for message in inputs.vocabulary.notes:
        say(message)
    _refuse_own_inputs(inputs, out)
    found = plan_and_digest(out)
    if found is None and (out.exists(MANIFEST_NAME) or out.has_folder("receipts")):
        found = plan_and_digest(out)  # another process may have written it in the meantime
        if found is None:
            raise PlanError(
                f"{out} has files of a build and no plan.json: put it back, or begin anew in another folder"
            )
    if found is None:
        others = out.others()
        if others:
            raise PlanError(
                f"{out} holds files that are no packprep's: {listed(others)}. A dataset's folder holds nothing else: "
                "give --out a folder that is new or empty"
            )
        samples: list[Estimates] = []
        fresh = make_plan(inputs, say, samples)
        for warning in forecast(fresh, inputs, samples)["warnings"]:
            say(f"warning: {warning}")
        first = out.write_first(TOKENIZER_NAME, inputs.vocabulary.tokenizer_json)
        if not first and read_plan(out) is None and digest_of(out.read(TOKENIZER_NAME)) != inputs.vocabulary.digest:
            raise PlanError(
                f"{out.place(TOKENIZER_NAME)} is another tokenizer, left there without a plan: remove it, or build into "
                "another folder"
            )
        if out.write_first(PLAN_NAME, encode(as_stored(fresh, LATER))):
            out.write_first(FIRST_SEEN_NAME, note_of(inputs.files))
        found = plan_and_digest(out)
        assert found is not None
    plan, digest = found
    check_law(plan, out.place(PLAN_NAME))
    changed = differences(inputs, plan)
    if changed:
        recipe_of(plan)  # which says so where a newer version wrote it
        raise PlanError(
            f"{out} was begun with something else: {'; '.join(changed)}. "
            "Go on with what it was begun with, or build into another folder"
        )
    note = read_note(out)
    if is_revoked(plan, note):
        say(
            f"warning: {out.place(NOTE)} stands there: engine {plan['engine']['name']} was caught in a difference. The plan is "
            "replaced by the same with the reference engine, and all shards are made anew"
        )
        plan = with_reference(plan)
        data = encode(as_stored(plan, LATER))
        out.write_whole(PLAN_NAME, [data])
        digest = digest_of(data)
    elif inputs.recipe.engine not in ("auto", plan["engine"]["name"]):
        say(f"the build goes on with engine {plan['engine']['name']}, as its plan says")
    return _job(out, plan, digest, inputs.prefixes)


def _refuse_own_inputs(inputs: Inputs, out: Output) -> None:
    """RecipeError where a source would find what the build writes."""
    written = [PLAN_NAME, TOKENIZER_NAME, MANIFEST_NAME, NOTE, rejects_name(0), receipt_name(0), shard_name(0)]
    for source, files in zip(inputs.recipe.sources, inputs.files, strict=True):
        name = match_below(source, inputs.recipe.base, files, str(out), written)
        if name is not None:
            raise RecipeError(
                f"--out {out}: source {source.name!r} would find {name} there, which the build writes: its paths are "
                f"{', '.join(source.paths)}, and a build whose inputs change cannot be gone on with. Choose an --out that "
                "they do not reach, or paths that end before it"
            )


def compare_sources(out: Output, job: Job, inputs: Inputs, say: Callable[[str], None], workers: int = 1) -> None:
    """Let `job` hold its sources to what they are now, after what done shards read of changed files was compared.

    SourceError for a file whose text is not what a done shard read of it. say: is told what is read again.
    """
    job.seen = [files.seen for files in inputs.files]
    if out.exists(MANIFEST_NAME):
        return  # nothing is made any more
    changed = changed_files(out, inputs.files)
    count = sum(map(len, changed))
    if not count:
        return
    items = done_shards_of(out, job, changed)
    if items:
        say(
            f"{count} source {'files were' if count > 1 else 'file was'} written to since the build began: what "
            f"{len(items)} done {'shards' if len(items) > 1 else 'shard'} read of {'them' if count > 1 else 'it'} is compared"
        )
    workers, arguments = min(workers, max(1, len(items))), (out, inputs.prefixes)
    with _at_hand(out, job), stoppable() as stop_asked:
        compared = spread(shard_comparer, arguments, items, workers, lambda *counts: None, stop_asked)
        with contextlib.closing(compared):
            for item, sources in compared:
                for s in sources:
                    refuse(job, item, s, changed[s])
    out.remove(FIRST_SEEN_NAME)
    out.write_first(FIRST_SEEN_NAME, note_of(inputs.files))  # which goes on where another build removes its temporary


def shard_comparer(out: Output, prefixes: Sequence[str]) -> Do:
    """What a process needs to compare what done shards read with what stands there now."""
    job, decoders = _jobs.get(str(out)) or open_job(out, prefixes), Decoders()
    return one_by_one(lambda item, report: differing(job, item, decoders))


def note_revocation(out: Output, job: Job, error: EngineRevoked) -> None:
    """Leave the note of what was found of a job's engine, unless its plan has been replaced in the meantime."""
    standing = plan_and_digest(out)
    if standing and standing[1] == job.digest:
        leave_note(out, error)


_jobs: dict[str, Job] = {}  # by output folder


@contextlib.contextmanager
def _at_hand(out: Output, job: Job) -> Iterator[None]:
    """The job that this process, and those that are forked from it, need not read again."""
    _jobs[str(out)] = job
    try:
        yield
    finally:
        del _jobs[str(out)]


def shard_maker(out: Output, prefixes: Sequence[str], seen: Sequence[np.ndarray | None] | None = None) -> Do:
    """What a process needs to make shards: the plan, read once, and decoders and memory that go on from one shard to the next.

    seen: by source, `Files.seen` of files that must stay so; None: nothing is known of them.
    """
    clock = Clock()
    with clock.stage("start-up"):
        job = _jobs.get(str(out)) or open_job(out, prefixes)
        job.seen = seen
        decoders, buffers = Decoders(), Buffers()
        job.engine  # noqa: B018  (loads it)

    def make(items: Iterable[ShardToMake], report: Report) -> Iterator[dict[str, float]]:
        # A shard is written beside the reading of the next one, for which the disk, or a store, need not be waited for.
        with ThreadPoolExecutor(1) as writer:
            written: Future[Any] | None = None
            for item in items:
                with clock.stage("other"):
                    begun = begin_shard(job, item.number, decoders, report, clock, buffers)
                if written is not None:
                    yield result(written)
                with clock.stage("other"):
                    made = finish_shard(job, begun, clock, buffers)
                    stop_if_revoked(out, job)
                written = writer.submit(commit_shard, out, job, item.number, made)
            if written is not None:
                yield result(written)

    def result(written: Future[Any]) -> dict[str, float]:
        with clock.stage("write"):
            written.result()
        return clock.take()

    return make


class ShardToMake(NamedTuple):
    """A shard to make."""

    number: int

    def __str__(self) -> str:
        return f"shard {self.number}"
