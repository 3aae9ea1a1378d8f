"""Set up commands, and print results as JSON or as text.

This module contains the functions that print forecasts, build states and profiles.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from packprep.building.array_tasks import ranges
from packprep.clock import WAITING
from packprep.messages import discard_output, one_line, put_line, say_error


def one_thread() -> None:
    """Disable the threads of libraries. Call this before they are imported.

    Work is parallel by processes, and only a single-threaded process may be forked.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _escaped(text: str) -> str:
    """Return the same JSON, with all unprintable characters escaped.

    Names and texts may contain control sequences for a terminal.
    """
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    )


def put(
    result: Any, as_json: bool, printer: Callable[[Any], None], after_work: bool = False
) -> None:
    """Print a result, as one JSON object or with its printer.

    Args:
        result: The result, as JSON-compatible values.
        as_json: Whether to print JSON.
        printer: Function that prints the result as text.
        after_work: Whether the work is already done. Then an error while printing does not change
            the exit status.
    """
    try:
        if as_json:
            print(_escaped(json.dumps(result, ensure_ascii=False, sort_keys=True)))
        else:
            printer(result)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader has read enough. The exit status is unchanged.
        discard_output(sys.stdout)
    except OSError as error:
        discard_output(sys.stdout)
        if not after_work:
            raise
        say_error(f"error: the work is done, but its result cannot be printed: {error.strerror}")


def put_each(
    results: list[Any], as_json: bool, printer: Callable[[Any], None], after_work: bool = False
) -> None:
    """Print one or several results. The other arguments are as in `put`.

    As text, several results have an empty line between them. As JSON, they are one list.
    """

    def print_all(several: list[Any]) -> None:
        for i, result in enumerate(several):
            if i:
                put_line()
            printer(result)

    if len(results) == 1:
        put(results[0], as_json, printer, after_work)
    else:
        put(results, as_json, print_all, after_work)


SUMS = {"documents": "documents", "text_bytes": "bytes of text", "tokens": "tokens"}


def print_forecast(f: dict[str, Any]) -> None:
    """Print a forecast as text."""
    from packprep.inspection.text import sides_in_words

    shards, files = (
        f"{f[name]:,} {name if f[name] != 1 else name[:-1]}" for name in ("shards", "files")
    )
    put_line(f"{shards} of about {f['shard_text_bytes'] / 2**20:.3g} MiB of text, {files}")
    # The sample may have no documents.
    sums = [f"{f[name]:,} {unit}" for name, unit in SUMS.items() if f[name]]
    put_line(f"about {', '.join(sums)} ({f['engine']['name']} engine)")
    put_line(
        f"about {f['rows']:,} rows of {f['seq_length']}, {f['output_bytes']:,} bytes on disk,"
        f" {f['worker_bytes'] / 2**20:.0f} MiB per worker"
    )
    fill = f["utilisation"]
    if fill["all_rows"] is not None:
        without = fill["without_last_rows"]
        addition = "" if without is None else f"; {without:.2%} without each shard's last row"
        put_line(f"about {fill['all_rows']:.2%} of slots filled{addition}{sides_in_words(fill)}")
    if "to_come" in f:
        _print_outlook(f["to_come"], f["shards"], f.get("out"))
    _print_sources(f["sources"])
    _print_tasks(f["tasks"])
    for warning in f["warnings"]:
        put_line(f"warning: {one_line(warning)}")
    if f["store"] is not None:
        s = f["store"]
        store_size = (
            f"{s['documents']:,} documents, {s['tokens']:,} tokens (± {s['token_error']:.2%}),"
            f" {s['bytes']:,} bytes"
        )
        put_line(f"as a token store: about {store_size}")


def _print_sources(sources: list[dict[str, Any]]) -> None:
    """Print the tokens and the share of each source."""
    put_line()
    put_line(f"{'source':<16} {'repeat':>7} {'tokens':>15} {'share':>8} {'± s.e.':>7}")
    for s in sources:
        repeat = f"{'≤ ' if s['pass_shares'] else ''}{s['repeat']:g}"
        put_line(
            f"{s['name']:<16} {repeat:>7} {s['tokens']:>15,} {s['share']:>8.2%}"
            f" {s['share_error']:>7.2%}"
        )


def _print_tasks(tasks: list[dict[str, Any]]) -> None:
    """Print the lengths and figures of each task."""
    put_line()
    longest = f"{'longest inner':>14} {'last chunk':>11} {'per row':>9}"
    put_line(f"{'task':<16} {'objective':<18} {'weight':>7} {longest}  figures of an inner chunk")
    for t in tasks:
        figures = ", ".join(
            f"{name} {v['realised']:.3g} (wanted {v['wanted']:g})"
            for name, v in t["figures"].items()
        )
        longest = f"{t['longest_inner']:>14,} {t['longest_last']:>11,} {t['pieces_of_a_row']:>9}"
        put_line(
            f"{t['name']:<16} {t['objective']:<18} {t['weight']:>7.2%} {longest}"
            f"  {figures}".rstrip()
        )


def _print_outlook(come: Mapping[str, Any], shards: int, out: Mapping[str, Any] | None) -> None:
    """Print how long a build takes, and the state of its output directory."""
    if come["missing"]:
        steps = [("reads and renders" if come["renders"] else "reads", come["read_mb_s"], "text")]
        steps += [
            ("tokenizes", come["tokenize_mb_s"], "text"),
            ("packs and writes", come["rows_mb_s"], "rows"),
        ]
        rates = [
            f"{step} {float(f'{rate:.3g}'):,g} MB/s of {kind}"
            for step, rate, kind in steps
            if rate is not None
        ]
        compiling = f", plus {come['compile_s']} s to compile kernels" if come["compile_s"] else ""
        workers = f"{come['workers']} worker{'s' * (come['workers'] > 1)}"
        by = ", at the speed of the sample on this machine" if come["sampled"] else ""
        core = f"{', '.join(rates[:-1])} and {rates[-1]}, if the disk is fast enough{compiling}"
        put_line(f"about {duration(come['seconds'])} with {workers}{by}: each core {core}")
    if out is None:
        return
    progress = (
        f"{shards - come['missing']} of {shards} shards are done"
        if out["begun"]
        else "no build yet"
    )
    free = "" if out["free_bytes"] is None else f", {out['free_bytes']:,} free"
    put_line(f"{out['folder']}: {progress}; {come['output_bytes']:,} bytes still to write{free}")


def duration(seconds: float) -> str:
    """Return an approximate duration as text."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return (
                f"{seconds / size:.3g} {unit}"
                if seconds < 10 * size
                else f"{seconds / size:.0f} {unit}"
            )
    return f"{seconds:.0f} s"


def print_status(result: dict[str, Any]) -> None:
    """Print the status of a build."""
    jobs = ", ".join(f"{job['job']} ({job['script']})" for job in result.get("jobs", ()))
    if result["shards"] is None and not jobs:
        put_line(f"{result['out']}: no output yet")
        return
    if result["shards"] is None:
        put_line(
            f"{result['out']}: no output yet; submitted as jobs {jobs}, which are pending or have"
            " just started"
        )
        put_line(
            f"squeue --jobs={','.join(job['job'].partition(';')[0] for job in result['jobs'])}"
            " shows their state"
        )
        return
    put_line(f"{result['out']}: {result['done']} of {result['shards']} shards done")
    if jobs:
        put_line(f"submitted as jobs {jobs}")
    if result["missing"]:
        put_line(f"missing: {ranges(result['missing'])}")
    if result.get("array"):
        put_line(f"--array={result['array']}")
    if "refused" in result:
        put_line(f"complete, but not published: {one_line(result['refused'])}")
        put_line(
            "hint: correct the documents and build into another folder, or raise"
            " documents.max_bad_fraction"
        )
    elif not result["missing"] and not result["published"]:
        put_line("complete, but not published")
        put_line("hint: run the build's command again, on any machine, to publish it")
    elif result["published"]:
        put_line("published")
    if "redo" in result and "refused" not in result:
        put_line(f"if no job is running, finish it with: {result['redo']}")


def print_profile(profile: Mapping[str, Any]) -> None:
    """Print a profile, as returned by `describe_profile`, as a table."""
    for line in _lines(profile):
        put_line(line)


def _lines(profile: Mapping[str, Any]) -> Iterator[str]:
    workers = f"{profile['workers']} worker{'s' if profile['workers'] > 1 else ''}"
    totals = (
        f"{profile['documents']:,} documents, {profile['tokens']:,} tokens,"
        f" {profile['text_bytes'] / 1e6:,.1f} MB of text"
    )
    rates = [
        f"{profile[name] / 1e6:.{digits}f} {unit}"
        for name, digits, unit in (
            ("tokens_per_s", 2, "M tokens/s"),
            ("text_bytes_per_s", 1, "MB/s of text"),
        )
        if profile[name] is not None
    ]
    summary = (
        f"{totals}: {', '.join(rates)}"
        if rates
        else totals
        if profile["documents"]
        else "nothing was read"
    )
    yield f"{profile['wall_s']:.2f} s with {workers}, from plan to publication: {summary}"
    means = "(seconds: all workers together; rates: one worker, in this stage only)"
    yield f"{'stage':<10} {'seconds':>9} {'share':>7} {'MB/s':>9} {'M tokens/s':>11}   {means}"
    for stage in profile["stages"]:
        text, tokens = (
            None if stage["stage"] == WAITING else stage[name]
            for name in ("text_bytes_per_s", "tokens_per_s")
        )
        columns = (
            "" if text is None else f"{text / 1e6:,.0f}",
            "" if tokens is None else f"{tokens / 1e6:,.1f}",
        )
        line = (
            f"{stage['stage']:<10} {stage['seconds']:>9.2f} {stage['share']:>7.1%} {columns[0]:>9}"
            f" {columns[1]:>11}"
        )
        yield line.rstrip()
