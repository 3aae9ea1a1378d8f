"""Build a recipe into a published dataset, with progress, and resume stopped builds.

Every process makes whole shards and commits them. The parent distributes shard numbers and shows
progress. A killed process leaves only temporary files, and the same command makes the missing
shards.

Source files must not change during a build. When the build first sees the files, it records their
modification times in first-seen.json, next to the plan. A resumed build compares the times:

    time changed ─► read again the text of finished shards ─┬─ same text: record the new time
                                                            └─ other text: SourceError

Within a process, `work.unchanged_slices` also checks a file's time before and after reading a work
range. Publication removes first-seen.json.
"""

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from packprep.building.array_tasks import share_of
from packprep.building.commit import commit_shard, done_receipt, missing_shards, publish
from packprep.building.forecast import bad_in_samples, forecast
from packprep.building.lengths import (
    ShardsToMake,
    ShardToMake,
    folders_of_lengths,
    lengths_mixture,
    read_shards,
    shared_work,
)
from packprep.building.plan import (
    Plan,
    open_plan,
    recipe_of,
    refuse_others,
    stored_plan,
    stored_plan_and_digest,
)
from packprep.building.plan_form import LATER
from packprep.building.planning import (
    Inputs,
    differences,
    look_up_each,
    make_plan,
    other_stores,
)
from packprep.building.processes import Do, Report, available_cpus, in_processes, one_by_one
from packprep.building.work import (
    make_shard,
    make_store_shard,
    shard_of,
)
from packprep.clock import Clock, Profile
from packprep.dataset.manifest import ANSWERS
from packprep.documents.calibration import Estimates
from packprep.documents.reading import text_digest
from packprep.documents.store import STORE
from packprep.errors import BuildError, DatasetError, PlanError, RecipeError, SourceError
from packprep.format.digests import digest_of
from packprep.format.json_files import (
    FIRST_SEEN_NAME,
    MANIFEST_NAME,
    MIXTURE_NAME,
    PLAN_NAME,
    REMOVED_NAME,
    TOKENIZER_NAME,
    as_stored,
    decode,
    encode,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.kernel import warm_kernels
from packprep.messages import say_stage
from packprep.recipe import Recipe
from packprep.sources.files import Files, match_below
from packprep.sources.formats import Decoders
from packprep.storage import Folder, folder_at
from packprep.tokenizer.engines import begin_loading, engine_in_words
from packprep.tokenizer.engines.engine import Engine

LIST_AGAIN_S = 3.0
WORKER_TEXT_BYTES = 8 << 20
"""Text bytes that justify one more worker process, which takes about a second to start."""


class Progress(Protocol):
    """The interface that a build reports its progress to.

    `begin` is called once, `add` for every batch of documents, `done` for every finished shard,
    `say` for each message, and `end` last.
    """

    def begin(self, text_bytes: int, shards: int, missing: int) -> None: ...
    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None: ...
    def done(self, item: object) -> None: ...
    def say(self, message: str) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """The result of a build: its plan, and its manifest once all shards are done."""

    out: Path | str  # the folder, or its URL
    plan: Plan
    manifest: dict[str, Any] | None
    made: int  # shards made by this call
    missing: int  # shards that other processes still have to make
    profile: Profile


def build(
    recipe: Recipe,
    out: str | os.PathLike | Folder,
    progress: Progress,
    workers: int | None = 0,
    moved: Mapping[str, str] | None = None,
    array: tuple[int, int] = (0, 1),
    on_start: Callable[[Plan], None] = lambda plan: None,
    is_store: bool = False,
) -> Outcome:
    """Build a recipe into `out`, or resume a stopped build there.

    Args:
        recipe: The recipe. Unless `is_store`, it must have one `seq_length`.
        out: The output folder, as a path or URL.
        progress: Receives the progress.
        workers: Number of processes. 0 runs in this process, without signal handling. None uses one
            for each available CPU, and fewer for little text.
        moved: Source name → the folder or URL of the source's files, for sources whose files were
            moved.
        array: The index of this array task, and the number of array tasks.
        on_start: Called once with the plan, while the workers make the first shards. Without
            workers, it is called before this process makes the first shard.
        is_store: True to make a token store of the recipe's sources instead of a dataset.

    Raises:
        PackprepError: If the recipe, the inputs or the disk prevent the build.
        Stopped: After SIGTERM, SIGINT or SIGUSR1 while processes make shards.
    """
    targets = [(recipe, folder_at(out))]
    (outcome,) = _build_each(targets, progress, workers, moved, array, on_start, is_store)
    return outcome


class _Output(NamedTuple):
    """A dataset or token store that a build writes."""

    inputs: Inputs
    out: Folder
    plan: Plan


def _build_each(
    targets: Sequence[tuple[Recipe, Folder]],
    progress: Progress,
    workers: int | None = 0,
    moved: Mapping[str, str] | None = None,
    array: tuple[int, int] = (0, 1),
    on_start: Callable[[Plan], None] = lambda plan: None,
    is_store: bool = False,
) -> list[Outcome]:
    """Build one recipe with one or several row lengths.

    Each document is read and tokenized once, for all row lengths.

    Args:
        targets: (recipe, output folder) per row length. The recipes differ only in `seq_length`.
        progress: As in `build`.
        workers: As in `build`.
        moved: As in `build`.
        array: As in `build`.
        on_start: As in `build`. It is called with the plan of the first output.
        is_store: As in `build`.

    Returns:
        The outcome of each output. All have the same profile.
    """
    # Write or open the plan of each output, and check that the sources are unchanged.
    clock = Clock()
    with clock.stage("plan"):
        all_inputs = look_up_each([recipe for recipe, _ in targets], moved or {}, is_store)
        outputs = [
            _Output(inputs, out, _write_plan(inputs, out, workers, progress.say))
            for inputs, (_, out) in zip(all_inputs, targets, strict=True)
        ]
    # A resumed build makes only the missing shards of this array task.
    shares = [share_of(*array, plan.shards) for _, _, plan in outputs]
    missing = [
        missing_shards(out, plan.digests, share)
        for (_, out, plan), share in zip(outputs, shares, strict=True)
    ]
    missing_count, shards = sum(map(len, missing)), sum(plan.shards for _, _, plan in outputs)
    # All row lengths share one reading of the text, so the output with the most missing text
    # counts.
    text_bytes = max(
        sum(source.weight for source in plan.sources) * len(numbers) // plan.shards
        for (_, _, plan), numbers in zip(outputs, missing, strict=True)
    )
    # Shards of several row lengths that have documents in common form one item, which one worker
    # makes.
    worker_count = workers_for(text_bytes) if workers is None else workers
    items = shared_work([plan for _, _, plan in outputs], missing, worker_count, array[1])
    worker_count = min(worker_count, len(items))
    if missing_count:
        # The engine is loaded once. Workers are forked from this process and share it.
        with clock.stage("start-up"):
            engine = outputs[0].plan.text_engine
        inputs, _, fewest = min(outputs, key=lambda output: output.plan.shards)
        progress.say(pace(fewest.stored, engine, inputs, workers, array[1]))
    if missing_count < shards:
        progress.say(_to_do(sum(map(len, shares)), missing_count, shards))
    progress.begin(text_bytes, shards, missing_count)
    counts = np.zeros(4, np.int64)

    # `counts` sums documents, text bytes, tokens and rejects over all workers.
    def report(*of_batch: int) -> None:
        counts[:] += of_batch
        progress.add(*of_batch)

    # An ended worker may leave temporary files in any output.
    def clean(process: int) -> None:
        for _, out, _ in outputs:
            out.remove_temporaries(process)

    # Make the shards. Publication waits for the last item, and happens only if no shard is missing.
    try:
        results = in_processes(
            shard_maker,
            ([out for _, out, _ in outputs], all_inputs[0].prefixes, outputs[0].plan.seen),
            items,
            worker_count,
            report,
            clean,
            partial(on_start, outputs[0].plan),
            progress.say,
        )
        manifests = _make_and_publish(outputs, results, len(items), progress, clock, array[1])
    finally:
        progress.end()
    for (_, _, plan), manifest in zip(outputs, manifests, strict=True):
        for warning in _unfilled(plan, manifest) if manifest is not None else ():
            progress.say(f"warning: {warning}")
    # Report times of all workers together. They can exceed the elapsed time.
    seconds = ", ".join(f"{stage} {spent:.2f} s" for stage, spent in clock.seconds.items())
    say_stage(f"of all workers: {seconds}")
    documents, read_bytes, tokens, _ = map(int, counts)
    elapsed, processes = clock.elapsed(), max(worker_count, 1)
    profile = Profile(elapsed, processes, clock.take(), documents, read_bytes, tokens)
    # Without a manifest, other array tasks still have to make shards.
    outcomes = []
    for (_, out, plan), numbers, manifest in zip(outputs, missing, manifests, strict=True):
        other_count = (
            len(missing_shards(out, plan.digests, range(plan.shards))) if manifest is None else 0
        )
        outcomes.append(Outcome(out.location, plan, manifest, len(numbers), other_count, profile))
    return outcomes


def _unfilled(plan: Plan, manifest: Mapping[str, Any]) -> list[str]:
    """Return a list with a warning if tasks fill up blocks of answers, but filled up none."""
    ledger = manifest["ledger"]
    names = [
        task.name
        for task in plan.tasks
        if task.parameters.get("eos_fill") == "block" and ledger["tasks"][task.name].get(ANSWERS)
    ]
    if not names or any(
        "eos_fill" in entry["slots"]["added"] for entry in ledger["sources"].values()
    ):
        return []
    return [
        f"eos_fill filled up no block of task {', '.join(names)}, because no conversation ends with"
        " a trained token\n"
        "hint: if the chat template writes a line break after the last answer, move it into the"
        " {% generation %} block"
    ]


def _write_plan(
    inputs: Inputs, out: Folder, workers: int | None, say: Callable[[str], None]
) -> Plan:
    """Return the plan of a build, and write it first if none exists.

    Also check that the source files have not changed since the build started.
    """
    if not out.exists(MANIFEST_NAME):
        recipe = inputs.recipe
        if inputs.has_text:
            begin_loading(
                recipe.engine,
                inputs.vocabulary,
                recipe.documents.special_text,
                inputs.text_bytes,
            )
        # The kernels load at the same time as the engine. The forecast and the workers need them.
        warm_kernels()
    plan = planned(inputs, out, say)
    compare_sources(out, plan, inputs, say, available_cpus() if workers is None else workers)
    return plan


def _make_and_publish(
    outputs: Sequence[_Output],
    results: Generator[tuple[Any, Any], None, None],
    items: int,
    progress: Progress,
    clock: Clock,
    array_count: int,
) -> list[dict[str, Any] | None]:
    """Make shards by taking `items` items from the generator `results`, and publish the datasets.

    Return the manifest of each output, or None if other processes still have to make shards.
    """
    with contextlib.ExitStack() as opened:
        for _, out, plan in outputs:
            opened.enter_context(_at_hand(out, plan))
        opened.enter_context(contextlib.closing(results))
        # Workers start when the first result is requested, so request one even without shards.
        for item, seconds in islice(results, max(1, items)):
            clock.add(seconds)
            for shard in item.shards:
                progress.done(shard)
        with clock.stage("publish"):  # The workers end at the same time.
            manifests = [publish(out, plan) for _, out, plan in outputs]
    if array_count > 1 and None in manifests:
        time.sleep(LIST_AGAIN_S)  # A file system may return a cached listing of a folder.
        manifests = [
            manifest or publish(out, plan)
            for manifest, (_, out, plan) in zip(manifests, outputs, strict=True)
        ]
    return manifests


def build_lengths(
    recipe: Recipe, out: str | os.PathLike | Folder, progress: Progress, **options: Any
) -> list[Outcome]:
    """Build a dataset for each of a recipe's `seq_lengths`, or resume such a build.

    The datasets are written to seq_N below `out`. Documents are read and tokenized once for all
    datasets, and the bytes are those of separate builds. When all are complete, mixture.json is
    written next to them. In the mixture, the share of each dataset is its number of slots. If every
    step has the same number of slots, one epoch of the mixture is therefore one epoch of each
    dataset.

    Args:
        recipe: The recipe with several `seq_lengths`.
        out: The output folder, as a path or URL.
        progress: Receives the progress.
        **options: The other options of `build`. `on_start` is called with the plan of the shortest
            length.

    Returns:
        The outcome of each dataset. All have the same profile.

    Raises:
        PackprepError: As in `build` and `folders_of_lengths`.
    """
    out = folder_at(out)
    targets = [
        (one_recipe, folder_at(folder)) for one_recipe, folder in folders_of_lengths(recipe, out)
    ]
    outcomes = _build_each(targets, progress, **options)
    # The shares come from all ledgers, so mixture.json is written after the last publication.
    manifests = [outcome.manifest for outcome in outcomes if outcome.manifest is not None]
    if len(manifests) == len(outcomes):
        data = lengths_mixture(manifests)
        if not out.create(MIXTURE_NAME, data) and out.read(MIXTURE_NAME) != data:
            progress.say(
                f"{out.path_of(MIXTURE_NAME)} has other datasets or shares than this build, and is"
                " kept\n"
                "hint: to replace it, remove it and run the same command again"
            )
        out.flush()
    return outcomes


def pace(
    plan: Mapping[str, Any],
    engine: Engine | None,
    inputs: Inputs,
    workers: int | None,
    array_count: int = 1,
) -> str:
    """Return a line that names the build's engine, with a hint if the build has too few shards.

    The hint suggests a shard size with at least one shard for each worker.

    Args:
        plan: The plan as stored.
        engine: The engine, or None if all sources are in token stores.
        inputs: The recipe and its inputs.
        workers: The argument `workers` of `build`.
        array_count: Number of array tasks.
    """
    description = "tokens from stores: no tokenizer runs"
    if engine is not None:
        description = engine_in_words(
            engine, inputs.recipe.engine, inputs.vocabulary, inputs.text_bytes
        )
    text_bytes, shards = sum(source["text_bytes"] for source in plan["sources"]), plan["shards"]
    all_workers = workers_for(text_bytes // array_count) if workers is None else workers
    # A worker with less than WORKER_TEXT_BYTES of text is not worth its start.
    at_work = min(array_count * all_workers, text_bytes // WORKER_TEXT_BYTES)
    if shards >= at_work:
        return description
    return (
        f"{description}; {shards} {'shards' if shards > 1 else 'shard'} for {at_work} workers. To"
        f" use all of them, give --set output.shard_text_bytes={-(-text_bytes // at_work)} and"
        " build into another folder"
    )


def workers_for(text_bytes: int) -> int:
    """Return the default number of worker processes for this many bytes of text."""
    return max(1, min(available_cpus(), text_bytes // WORKER_TEXT_BYTES))


def _to_do(share: int, missing: int, shards: int) -> str:
    """Return a message that counts the shards that this array task still has to make.

    For example "3 of all 8 shards to make". `share` is the number of shards of the array task.
    """
    if not share:
        return f"nothing to make: this array task has none of the {shards} shards"
    whose = f"all {share}" if share == shards else f"this array task's {share}"
    return (
        f"{missing} of {whose} shards to make"
        if missing
        else f"nothing to make: {whose} shards are done"
    )


def planned(inputs: Inputs, out: Folder, say: Callable[[str], None]) -> Plan:
    """Return the plan in `out`, and write it first if none exists.

    Args:
        inputs: The recipe and its inputs.
        out: The output folder.
        say: Receives messages for the user.

    Raises:
        PlanError: If the plan belongs to another recipe.
        BuildError: If the samples already have too many bad documents.
    """
    for message in inputs.vocabulary.notes:
        say(message)
    plan_and_digest = begun(inputs, out)
    if plan_and_digest is None:
        samples: list[Estimates] = []
        fresh = make_plan(inputs, say, samples)
        # Refuse before the first file exists, so that a corrected recipe can use the same folder.
        bad, is_certain = bad_in_samples(fresh, inputs, samples)
        if is_certain:
            raise BuildError(
                f"{bad}. Nothing was built\n"
                "hint: fix the inputs, or set a higher documents.max_bad_fraction to leave the bad"
                " documents out"
            )
        for warning in (
            [bad] * bool(bad) if inputs.is_store else forecast(fresh, inputs, samples)["warnings"]
        ):
            say(f"warning: {warning}")
        # The plan names the tokenizer and removed.json, so it is written after them.
        is_created = out.create(TOKENIZER_NAME, inputs.vocabulary.tokenizer_json)
        if (
            not is_created
            and stored_plan(out) is None
            and digest_of(out.read(TOKENIZER_NAME)) != inputs.vocabulary.digest
        ):
            raise PlanError(
                f"{out.path_of(TOKENIZER_NAME)} is another tokenizer, without a plan\n"
                "hint: remove it, or build into another folder"
            )
        if inputs.removed:
            out.create(REMOVED_NAME, inputs.removed)
        # Several builds may start at once. Only the build that wrote the plan records the
        # modification times.
        if out.create(PLAN_NAME, encode(as_stored(fresh, LATER))):
            out.create(FIRST_SEEN_NAME, note_of(inputs.files))
        # Read the plan back, because another build may have written it first.
        plan_and_digest = begun(inputs, out)
        assert plan_and_digest is not None
    engine = plan_and_digest[0]["engine"]["name"]
    if inputs.recipe.engine not in ("auto", engine):
        say(f"the build resumes with engine {engine}, as in its plan")
    plan = open_plan(out, inputs.prefixes, plan_and_digest)
    # The limit affects only publication, so a resumed build may change it.
    plan.max_bad_fraction = inputs.recipe.documents.max_bad_fraction
    return plan


def begun(inputs: Inputs, out: Folder) -> tuple[dict[str, Any], str] | None:
    """Return the stored plan in `out` and its digest, or None before a plan is written.

    Nothing is written.

    Raises:
        PlanError: If the plan belongs to another recipe, or the folder has other files.
        RecipeError: If the paths of a source match the files that the build writes.
    """
    _refuse_own_inputs(inputs, out)
    plan_and_digest = stored_plan_and_digest(out)
    if plan_and_digest is None and (out.exists(MANIFEST_NAME) or out.exists("receipts")):
        plan_and_digest = stored_plan_and_digest(out)  # Another process may have just written it.
        if plan_and_digest is None:
            raise PlanError(
                f"{out} has files of a build, but no plan.json\n"
                "hint: restore plan.json, or build into another folder"
            )
    if plan_and_digest is None:
        refuse_others(out)
        return None
    plan, _ = plan_and_digest
    if (plan["kind"] == STORE) != inputs.is_store:
        raise PlanError(
            f"{out} is a {'dataset' if inputs.is_store else 'token store'}\n"
            "hint: give --out another folder, or resume this one with `packprep"
            f" {'build' if inputs.is_store else 'tokenize'}`"
        )
    changed = differences(inputs, plan)
    if not changed and not out.exists(MANIFEST_NAME):  # A published dataset needs no sources.
        changed = other_stores(inputs, plan)
    if changed:
        recipe_of(plan)  # If a newer version wrote the plan, this raises a clearer error.
        raise PlanError(
            f"{out} was started with another recipe or other inputs: {'; '.join(changed)}\n"
            "hint: resume with the original recipe and inputs, or build into another folder"
        )
    return plan_and_digest


def _refuse_own_inputs(inputs: Inputs, out: Folder) -> None:
    """Raise RecipeError if the paths of a source match files that the build writes."""
    written = [
        PLAN_NAME,
        TOKENIZER_NAME,
        MANIFEST_NAME,
        rejects_name(0),
        receipt_name(0),
        shard_name(0),
    ]
    for source, files in zip(inputs.recipe.sources, inputs.files, strict=True):
        if source.name in inputs.stores:
            continue
        name = match_below(source, inputs.recipe.base, files, str(out), written)
        if name is not None:
            raise RecipeError(
                f"--out {out}: source {source.name!r} with paths {', '.join(source.paths)} would"
                f" read {name} there, which the build writes. A build cannot resume if its inputs"
                " change\n"
                "hint: choose an --out that the paths do not match, or paths that end before it"
            )


def compare_sources(
    out: Folder, plan: Plan, inputs: Inputs, say: Callable[[str], None], workers: int = 0
) -> None:
    """Check that the source files are unchanged since the build first saw them.

    If the modification time of a file has changed, this function reads the text of the finished
    shards that used the file again. It compares the digest of each shard's text with the digest in
    the shard's receipt.

    Args:
        out: The output folder.
        plan: The plan. Its `seen` is set, so that later reads refuse changed files.
        inputs: The recipe and its inputs.
        say: Receives a message about the files that are read again.
        workers: Number of processes.

    Raises:
        SourceError: If a finished shard was made from another text than the file now has.
    """
    plan.seen = [files.seen for files in inputs.files]
    if out.exists(MANIFEST_NAME):
        return  # The dataset is complete.
    changed = changed_files(out, inputs.files)
    count = sum(map(len, changed))
    if not count:
        return
    items = done_shards_of(out, plan, changed)
    if items:
        say(
            f"{count} source {'files were' if count > 1 else 'file was'} written to since the build"
            f" started. Comparing {'them' if count > 1 else 'it'} with the text of {len(items)}"
            f" finished {'shards' if len(items) > 1 else 'shard'}"
        )
    arguments = out, inputs.prefixes
    with _at_hand(out, plan):
        compared = in_processes(shard_comparer, arguments, items, workers, lambda *counts: None)
        with contextlib.closing(compared):
            for item, sources in compared:
                for s in sources:
                    refuse(plan, item, s, changed[s])
    # After a crash between these calls, all files count as changed. Nothing is missed.
    out.remove(FIRST_SEEN_NAME)
    # `create` repeats the write if another build removes its temporary file.
    out.create(FIRST_SEEN_NAME, note_of(inputs.files))


def shard_comparer(out: Folder, prefixes: Sequence[str]) -> Do:
    """Return a `Do` that yields, per `DoneShard`, the indices of the sources with changed text.

    `differing` computes the indices.
    """
    plan, decoders = _plans.get(str(out)) or open_plan(out, prefixes), Decoders()
    return one_by_one(lambda item, report: differing(plan, item, decoders))


_plans: dict[str, Plan] = {}  # by output folder


@contextlib.contextmanager
def _at_hand(out: Folder, plan: Plan) -> Iterator[None]:
    """Keep the plan in a cache for this process and for the processes that are forked from it."""
    _plans[str(out)] = plan
    try:
        yield
    finally:
        del _plans[str(out)]


def shard_maker(
    outs: Sequence[Folder], prefixes: Sequence[str], seen: Sequence[np.ndarray | None] | None = None
) -> Do:
    """Return a `Do` that makes and commits shards, and yields {stage: seconds} for each item.

    The items are of type `ShardsToMake`. The plans are read only once. Decoders stay open for the
    next shard, which may continue in the same file.

    Args:
        outs: The output folder of each row length.
        prefixes: The folder or URL of each source's files.
        seen: `Files.seen` of each source: the modification times that its files must keep. None if
            the files are not checked.
    """
    clock = Clock()
    with clock.stage("start-up"):
        plans = [_plans.get(str(out)) or open_plan(out, prefixes) for out in outs]
        for plan in plans:
            plan.seen = seen
            plan.cut_limits  # noqa: B018  (This is computed at first access, as the next one.)
        plans[0].text_engine  # noqa: B018
        decoders = Decoders()

    make = make_store_shard if plans[0].is_store else make_shard

    def make_all(items: Iterable[ShardsToMake], report: Report) -> Iterator[dict[str, float]]:
        # A thread writes each shard while the next one is made, so that nothing waits for the disk
        # or the object store.
        with ThreadPoolExecutor(1) as writer:
            written: tuple[Future[Any], bool] | None = None
            for item in chain(items, (None,)):  # None ends the work after the last item.
                shards: Sequence[ShardToMake | None] = item.shards if item is not None else (None,)
                together = [(plans[s.output], s.number) for s in shards if s is not None]
                # The generator starts only if the item has several shards. `make` reads a single
                # shard itself.
                documents = read_shards(together, decoders, report, clock)
                for shard in shards:
                    if shard is not None:
                        plan, number = plans[shard.output], shard.number
                        with clock.stage("other"):
                            shard_data = (
                                shard_of(plan, number, next(documents), clock)
                                if len(shards) > 1
                                else make(plan, number, decoders, report, clock)
                            )
                    if written is not None:
                        write, is_last_of_item = written
                        with clock.stage("write"):
                            write.result()
                        if is_last_of_item:
                            yield clock.take()
                    if shard is not None:
                        write = writer.submit(
                            commit_shard, outs[shard.output], plan, number, shard_data
                        )
                        written = write, shard is shards[-1]
                        del shard_data  # Once a shard is written, the next one can use its memory.

    return make_all


_SHOWN = 3


class DoneShard(NamedTuple):
    """A finished shard whose sources are to be read again and compared.

    `digests` maps the index of a source to the digest of the text that the shard has from this
    source.
    """

    number: int
    digests: Mapping[int, str]

    def __str__(self) -> str:
        return f"shard {self.number}"


def note_of(files: Sequence[Files]) -> bytes:
    """Return the bytes of first-seen.json. It has the modification time of every file in ns.

    The key "modified" has one list per source, in the order of the source's files. The list is null
    for a source at a URL.
    """
    return encode(
        {
            "modified": [
                None if source_files.seen is None else source_files.seen[:, 1].tolist()
                for source_files in files
            ]
        }
    )


def changed_files(out: Folder, files: Sequence[Files]) -> list[np.ndarray]:
    """Return, for each source, the indices of the files that may have changed, int64[k].

    A file may have changed if its modification time differs from first-seen.json. If
    first-seen.json has no usable times for a source, all files of the source may have changed. For
    a source at a URL, the array is empty.
    """
    try:
        note = decode(out.read(FIRST_SEEN_NAME), out.path_of(FIRST_SEEN_NAME))
    except (OSError, DatasetError):
        note = None
    times = note.get("modified") if isinstance(note, dict) else None
    if not isinstance(times, list) or len(times) != len(files):
        times = [None] * len(files)
    changed = []
    for of_source, times_before in zip(files, times, strict=True):
        # A damaged note leaves `known_times` empty, so that all files of the source are compared.
        known_times = np.zeros(0, np.int64)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            known_times = np.array(times_before, np.int64)
        if of_source.seen is None:
            changed.append(np.zeros(0, np.int64))
        elif known_times.shape == (len(of_source),):
            changed.append(np.flatnonzero(known_times != of_source.seen[:, 1]))
        else:
            changed.append(np.arange(len(of_source)))
    return changed


def done_shards_of(out: Folder, plan: Plan, changed: Sequence[np.ndarray]) -> list[DoneShard]:
    """Return the finished shards that use text of any changed file.

    Args:
        out: The output folder.
        plan: The plan.
        changed: The result of `changed_files`.
    """
    # Find the shards with text of a changed file. If all files changed, all shards have such text.
    sources: dict[int, list[int]] = {}
    for source, files in zip(plan.sources, changed, strict=True):
        own_shards: Iterable[int] = range(plan.shards)
        if len(files) < len(source.files):
            pieces = [np.asarray(source.pieces.of_file(i), np.int64) for i in files.tolist()]
            own_shards = source.shards_of(
                np.unique(np.concatenate([*pieces, np.zeros(0, np.int64)])), plan.shards
            ).tolist()
        for b in own_shards:
            sources.setdefault(b, []).append(source.index)
    # Only finished shards are compared. The others are made from the files as they are now.
    shards = sorted(sources)
    shard_receipts = out.each(lambda near, b: done_receipt(near, b, plan.digests), shards)
    receipts = {
        b: receipt[0]
        for b, receipt in zip(shards, shard_receipts, strict=True)
        if receipt is not None
    }
    return [
        DoneShard(
            b, {s: str(receipt["text_digests"].get(plan.sources[s].name)) for s in sources[b]}
        )
        for b, receipt in receipts.items()
    ]


def differing(plan: Plan, item: DoneShard, decoders: Decoders) -> list[int]:
    """Return the indices of the sources whose text has changed since shard `item` was made.

    The shard's part of each source in `item.digests` is read again.
    """
    return [
        s
        for s, digest in item.digests.items()
        if digest
        != text_digest(
            plan.recipe,
            plan.sources[s],
            plan.sources[s].slices(item.number, plan.shards),
            plan.vocabulary,
            decoders,
            plan.stored["chat_template"],
        )
    ]


def refuse(plan: Plan, item: DoneShard, source: int, changed: np.ndarray) -> None:
    """Raise a SourceError. It names the files that changed after shard `item` was made from them.

    `source` is the index of the source, and `changed` has the indices of the source's changed
    files.
    """
    planned_source = plan.sources[source]
    parts = planned_source.slices(item.number, plan.shards)
    paths = {
        work_range.path: None
        for work_range in parts
        if work_range.file - planned_source.first_file in set(changed.tolist())
    }
    more_files = f" or {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    raise SourceError(
        f"{' or '.join(list(paths)[:_SHOWN])}{more_files}: its bytes changed since {item} read"
        " it, but its size did not. The dataset would mix old and new documents\n"
        "hint: restore the file, or build into another folder"
    )
