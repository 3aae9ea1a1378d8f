"""Check for problems that would stop or slow a build on this machine.

The checks cover versions, engines, kernels, stores, memory and disk space. Each check returns a
Finding. Its result is `ok`, `slow` if a build works but takes longer than necessary, or `fails` if
a build would end with an error. Files that a check writes are removed.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from packprep import messages
from packprep.building.commit import missing_shards
from packprep.building.forecast import ROWS_MB_S, built_together, forecast, outlook
from packprep.building.lengths import folders_of_lengths
from packprep.building.plan import plan_digests
from packprep.building.planning import Inputs, look_up_each, made_with, make_plan
from packprep.building.processes import available_cpus, free_addresses, free_memory
from packprep.building.run import begun, workers_for
from packprep.cache import cache_folders, is_kept
from packprep.errors import PackprepError, StorageError
from packprep.kernel import compiling
from packprep.messages import one_line, put_line, say
from packprep.recipe import Recipe
from packprep.sources.files import below_one_folder
from packprep.storage import Folder, LocalFolder, Remote, folder_at, is_url
from packprep.storage.local import write_error
from packprep.tokenizer.engines import (
    ENGINES,
    REFERENCE,
    engine_in_words,
    load_engine,
    suitable,
)

OK, SLOW, FAILS = "ok", "slow", "fails"
_RESULTS = (OK, SLOW, FAILS)
SLOW_FILE_S = 0.1
_FILES, _PROBE_BYTES = 3, 32 << 20


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
        check: Name of the check.
        result: "ok", "slow" or "fails".
        says: The state that the check found, and the cost of a problem.
        advice: The recommended action, or "" for none.
    """

    check: str
    result: str
    says: str
    advice: str = ""


def examine(recipe: Recipe | None, out: str | None) -> dict[str, Any]:
    """Run all checks, including the checks of a recipe and an output directory if given.

    Args:
        recipe: The recipe, or None.
        out: The output directory or its URL, or None.

    Returns:
        {result, checks}: the worst result, and all findings as dicts.

    Raises:
        PackprepError: If the recipe or its inputs are invalid. A store that cannot be reached is a
            finding instead.
    """
    findings = [_versions(), _kernels()]
    stores = [] if recipe is None else list(_stores(recipe))
    output = None if out is None else folder_at(out)
    # If a store cannot be reached, no plan can be made.
    if recipe is None or any(finding.result == FAILS for finding in stores):
        findings += [_engines(), *stores, _memory(None)]
        if output is not None:
            findings += _output(output, None, [])
    else:
        inputs_by_length = look_up_each(recipe.by_length(), {})
        # Only the first plan prints messages, because other row lengths would repeat them.
        planned = [
            _planned(inputs, say if inputs is inputs_by_length[0] else _unheard)
            for inputs in inputs_by_length
        ]
        together = built_together(
            [figures for _, _, figures in planned], [plan["shards"] for plan, _, _ in planned]
        )
        findings += [_engine_of(*planned[-1]), *stores, _memory(together[-1])]
        if output is not None:
            findings += _output(output, recipe, planned)
    worst = max((finding.result for finding in findings), key=_RESULTS.index)
    return {"result": worst, "checks": [finding._asdict() for finding in findings]}


def _unheard(message: str) -> None:
    """Ignore a message."""


def _planned(
    inputs: Inputs, tell: Callable[[str], None]
) -> tuple[dict[str, Any], Inputs, dict[str, Any]]:
    """Return the plan of one dataset, its inputs, and its `forecast`."""
    samples = list[Any]()
    plan = make_plan(inputs, tell, samples)
    return plan, inputs, forecast(plan, inputs, samples)


def _versions() -> Finding:
    return Finding(
        "versions", OK, ", ".join(f"{name} {version}" for name, version in made_with().items())
    )


def _engines() -> Finding:
    """Report which engines are installed. This is used without a recipe."""
    fast = {name: kind for name, kind in ENGINES.items() if kind.proven}
    installed = (
        ", ".join(f"{name} {kind.version()}" for name, kind in fast.items() if kind.version())
        or "none"
    )
    missing = {name: kind.package for name, kind in fast.items() if kind.version() is None}
    if not missing:
        return Finding("engines", OK, f"all fast engines are installed: {installed}")
    says = (
        f"fast engines: {installed}; not installed: {', '.join(missing)}, so slower ones"
        " do their work"
    )
    return Finding(
        "engines", OK, says, "give a RECIPE.toml to see which engine its tokenizer needs"
    )


def _engine_of(plan: Mapping[str, Any], inputs: Inputs, figures: Mapping[str, Any]) -> Finding:
    """Report the engine that tokenizes, and the time for 1 GB of text on one core.

    `figures` is the result of `forecast`. The time is estimated from the recipe's sample.
    """
    vocabulary, documents = inputs.vocabulary, inputs.recipe.documents
    engine = load_engine(plan["engine"], vocabulary, documents.special_text)
    says = engine_in_words(engine, inputs.recipe.engine, vocabulary, inputs.text_bytes)
    if figures["sampled"]:
        seconds = (figures["read_s"] + figures["tokenize_s"]) * 1e9 / max(1, figures["text_bytes"])
        act = "read, render and tokenize" if figures["renders"] else "read and tokenize"
        says += f"; one core takes {seconds:,.0f} s to {act} 1 GB of text like this recipe's sample"
    names = suitable(vocabulary, inputs.text_bytes)
    # Engines before the plan's engine in this list would be faster.
    for name in takewhile(lambda name: name != engine.name, names):
        if ENGINES[name].version() is None:
            advice = f"pip install {ENGINES[name].package} before you start a build"
            return Finding("engine", SLOW, says, advice)
    if suitable(vocabulary) == [REFERENCE]:
        return Finding(
            "engine",
            SLOW,
            says,
            "no faster engine is exact for this tokenizer; use more workers",
        )
    return Finding("engine", OK, says)


def _kernels() -> Finding:
    """Report where compiled kernels are cached, or the cost of compiling them."""
    heard: list[str] = []
    with messages.heard_by(lambda message, once: heard.append(message)):
        folders = cache_folders()
    if folders.own is not None:
        if is_kept("packprep.building.render.*"):
            return Finding(
                "kernels", OK, "; ".join([f"compiled kernels are cached in {folders.own}", *heard])
            )
        first_cost = (
            f"the first command takes about {compiling.seconds} s more and caches them in"
            f" {folders.own}"
        )
        says = "; ".join([f"not compiled yet: {first_cost}", *heard])
        return Finding("kernels", OK, says, "run packprep warm to compile them now")
    if is_kept("packprep.building.render.*"):
        says = (
            f"compiled kernels are read from {', '.join(folders.to_read)}; others cannot be"
            " cached, so every command compiles them again"
        )
        return Finding("kernels", OK, says)
    why = "; ".join(heard) or (  # The recorded messages contain advice.
        f"no kernels in {', '.join(folders.to_read)}, and none can be cached there; set"
        " NUMBA_CACHE_DIR to a folder that you can write"
    )
    return Finding("kernels", SLOW, f"about {compiling.seconds} s in every command: {why}")


def _stores(recipe: Recipe) -> Iterator[Finding]:
    """Yield a finding for each URL in the sources. It says whether the URL can be listed."""
    for root in dict.fromkeys(
        below_one_folder(source, recipe.base)[0] for source in recipe.sources
    ):
        if is_url(root):
            try:
                yield Finding(
                    "store", OK, f"{root}: listed in {_seconds(Remote(root).reach):.2f} s"
                )
            except StorageError as error:
                yield Finding("store", FAILS, str(error))


def _memory(figures: Mapping[str, Any] | None) -> Finding:
    """Report whether the workers have enough memory. `figures` is from `forecast`, or None."""
    free, cpus = free_memory(), available_cpus()
    resources = f"{free / 2**30:.1f} GiB of memory free, {cpus} CPU{'s' * (cpus > 1)}"
    if figures is None:
        return Finding("memory", OK, resources)
    workers, of_one = (
        min(workers_for(figures["text_bytes"]), figures["shards"]),
        figures["worker_bytes"],
    )
    says = (
        f"{resources}; {workers} worker{'s take' if workers > 1 else ' takes'}"
        f" {workers * of_one / 2**30:.1f} GiB"
    )
    if (address_bytes := free_addresses()) is not None and address_bytes < of_one:
        says += f"; the limit of this process leaves {address_bytes / 2**30:.1f} GiB"
        return Finding(
            "memory",
            FAILS,
            says,
            "raise the limit (ulimit -v), or set a smaller output.shard_text_bytes",
        )
    if workers * of_one <= free:
        return Finding("memory", OK, says)
    if of_one <= free:
        return Finding(
            "memory",
            FAILS,
            says,
            f"use --workers {free // of_one}, or set a smaller output.shard_text_bytes",
        )
    return Finding(
        "memory", FAILS, says, "use --workers 1 and set a smaller output.shard_text_bytes"
    )


def _output(
    out: Folder,
    recipe: Recipe | None,
    planned: Sequence[tuple[Mapping[str, Any], Inputs, Mapping[str, Any]]],
) -> Iterator[Finding]:
    """Check an output directory: its contents, how fast it is written, and its free space.

    The contents are checked first, if there is a recipe. A build of the recipe must be able to
    start or to resume in the directory.

    Args:
        out: The output directory.
        recipe: The recipe, or None.
        planned: The result of `_planned` for each dataset of the recipe. Empty without a recipe.
    """
    needed = 0
    try:
        folders = [out]
        if recipe is not None and not recipe.seq_length:
            folders = [folder_at(folder) for _, folder in folders_of_lengths(recipe, out)]
        for (_, inputs, figures), folder in zip(planned, folders, strict=recipe is not None):
            missing, standing = figures["shards"], begun(inputs, folder)
            # Only missing shards need space.
            if standing is not None:
                missing = len(missing_shards(folder, plan_digests(*standing), range(missing)))
            needed += outlook(figures, missing, 1)["output_bytes"]
    except PackprepError as error:
        yield Finding("out", FAILS, str(error))
        return
    free = out.free_bytes()
    try:
        yield _store(out) if isinstance(out, Remote) else _file_system(Path(str(out)), free)
    except PackprepError as error:
        yield Finding("out", FAILS, str(error))
    if free is not None:
        says = f"{free:,} bytes free" + (f", {needed:,} needed" if needed else "")
        yield (
            Finding("room", OK, says)
            if needed <= free
            else Finding("room", FAILS, says, "free some space, or choose another --out")
        )


def _store(out: Remote) -> Finding:
    out.reach()
    name, begin = f".packprep-doctor-{secrets.token_hex(4)}", time.perf_counter()
    try:
        out.create(name, b"packprep")
        out.read(name)
    finally:
        with suppress(PackprepError):
            out.remove(name)
    return Finding(
        "out",
        OK,
        f"{out}: creating, reading and removing an object takes {time.perf_counter() - begin:.2f}"
        " s",
    )


def _file_system(path: Path, free: int | None) -> Finding:
    """Measure how fast a local directory is written, and test whether it supports hard links.

    Args:
        path: The directory, which may not exist yet.
        free: Free bytes, or None if unknown.

    Raises:
        BuildError: If the directory is not writable.
    """
    target = Path(os.path.abspath(path))
    # The folder may not exist yet, so its nearest existing parent is measured.
    above = next(folder for folder in (target, *target.parents) if os.path.lexists(folder))
    try:
        folder = Path(tempfile.mkdtemp(prefix=".packprep-doctor-", dir=above))
    except OSError as error:
        raise write_error(above, error) from None
    try:
        # Random bytes prevent a compressing file system from looking faster.
        probe, large = LocalFolder(folder), os.urandom(1 << 20) * (_PROBE_BYTES >> 20)
        file_s = min(_seconds(lambda: probe.write("small", [b"packprep"])) for _ in range(_FILES))
        mb_s = None  # With little free space, only a small file fits, which does not show the rate.
        if free is None or free > 2 * _PROBE_BYTES:
            mb_s = _PROBE_BYTES / 1e6 / _seconds(lambda: probe.write("large", [large]))
        links = "hard links"
        try:
            os.link(folder / "small", folder / "linked")
        except OSError:
            links = (
                "no hard links (so do not start a build with several commands at the same moment)"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rate = "too little space to measure MB/s" if mb_s is None else f"{mb_s:,.0f} MB/s"
    says = f"{target}: a file is on disk after {file_s * 1000:.1f} ms, {rate}, {links}"
    if file_s > SLOW_FILE_S:
        return Finding(
            "out",
            SLOW,
            f"{says}; each shard writes two or three files",
            "use a disk with lower latency, or larger shards",
        )
    if mb_s is not None and mb_s < ROWS_MB_S:
        return Finding(
            "out",
            SLOW,
            f"{says}; one core writes {ROWS_MB_S} MB/s",
            "use a faster disk, or fewer --workers",
        )
    return Finding("out", OK, says)


def _seconds(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def print_findings(result: Mapping[str, Any]) -> None:
    """Print one line per finding, with the advice below it."""
    for finding in result["checks"]:
        put_line(f"{finding['result']:<6} {finding['check']:<9} {one_line(finding['says'])}")
        if finding["advice"]:
            put_line(f"{'':<16} ─► {finding['advice']}")
