"""Precompile kernels for images, read-only installations and arrays of jobs.

A kernel is compiled for the types of its arguments. These types depend on objectives, token_dtype
and packing. So small datasets that cover these types are built, verified and rebuilt.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packprep.building.run import build
from packprep.cache import cache_folders
from packprep.errors import BuildError
from packprep.inspection.report import write_report
from packprep.kernel import compiling, warm_kernels
from packprep.messages import put_line
from packprep.objectives import REGISTRY
from packprep.recipe import Recipe, read_recipe
from packprep.verification import ALL, PROMISES, verify_dataset

_ALL_S = 30
_SIDES: dict[str, Any] = {"encoder_length": 256, "decoder_length": 256}
_PACKINGS = (
    *({"algorithm": name} for name in ("best_fit", "first_fit", "next_fit", "concat")),
    _SIDES,
)
_TOKEN_DTYPES = ("uint16", "int32")


class _Silent:
    """A progress that shows nothing, because the datasets are temporary."""

    def begin(self, text_bytes: int, shards: int, missing: int) -> None: ...
    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None: ...
    def say(self, message: str) -> None: ...
    def done(self, item: object) -> None: ...
    def end(self) -> None: ...


def compile_ahead(recipe: Recipe | None = None) -> dict[str, Any]:
    """Compile the missing kernels of build, verify, inspect and export.

    Args:
        recipe: Compile only the kernels that this recipe needs, or all kernels if None.

    Returns:
        {folder, objectives, compiled, seconds}. `folder` is the cache folder, and `compiled` is the
        number of compiled kernels.

    Raises:
        BuildError: If the kernels cannot be cached.
    """
    begun, counts_before = time.perf_counter(), compiling.COUNTS.copy()
    if (folder := cache_folders().own) is None:
        raise BuildError(
            "kernels cannot be cached: no cache folder is writable"
            "\nhint: set NUMBA_CACHE_DIR to a folder that only you can write"
        )
    if recipe is None:
        compiling.seconds = _ALL_S
    objectives = [
        name
        for name in REGISTRY
        if recipe is None or name in {task.objective for task in recipe.tasks}
    ]
    warm_kernels()
    with tempfile.TemporaryDirectory(prefix="packprep-") as name:
        base = Path(name)
        _write_corpus(base)
        for number, table in enumerate(_tables(objectives, recipe)):
            out = base / str(number)
            build(read_recipe(table, base), out, _Silent())
            report = verify_dataset(out, ALL, {}, (0, 1), 0, _Silent())
            write_report(out, f"{out}.html", {}, report, PROMISES)
    # A kernel that was compiled but not cached would be compiled again.
    counts = compiling.COUNTS - counts_before
    if counts["kept"] < counts["compiled"]:
        raise BuildError(
            f"{counts['compiled'] - counts['kept']} of {counts['compiled']} kernels could not be"
            f" cached in {folder}"
            "\nhint: check its disk, and run the same command again"
        )
    seconds = time.perf_counter() - begun
    return {
        "folder": folder,
        "objectives": objectives,
        "compiled": counts["compiled"],
        "seconds": seconds,
    }


def _tables(objectives: list[str], recipe: Recipe | None) -> Iterator[dict[str, Any]]:
    """Yield recipes. Building and verifying all of them compiles the kernels of the objectives."""
    token_dtypes = list(_TOKEN_DTYPES)
    packings: list[dict[str, Any]] = list(_PACKINGS)
    if recipe:
        packings = [_SIDES if recipe.packing.sides else {"algorithm": recipe.packing.algorithm}]
        if recipe.output.token_dtype != "auto":
            token_dtypes = [recipe.output.token_dtype]
        elif recipe.tokenizer == "bytes":
            token_dtypes = ["uint16"]
    for token_dtype in token_dtypes:
        yield _table(objectives, token_dtype, packings[0])
    for packing in packings[1:]:
        yield _table(["prefix_lm" if packing is _SIDES else "causal"], token_dtypes[0], packing)


def _table(objectives: list[str], token_dtype: str, packing: dict[str, Any]) -> dict[str, Any]:
    sources = [{"paths": ["texts.jsonl"]}]
    supervised = [name for name in objectives if REGISTRY[name].supervised]
    if supervised and packing.get("algorithm") != "concat":
        sources.append({"paths": ["spans.jsonl"], "tasks": supervised})
    return {
        "seq_length": 512,
        "tokenizer": "bytes",
        "sources": sources,
        "tasks": [{"name": name, "objective": name} for name in objectives],
        "packing": packing,
        "documents": {"prepend_bos": True},
        "output": {"token_dtype": token_dtype},
    }


def _write_corpus(folder: Path) -> None:
    """Write a file of texts, and a second file of the same texts with loss_spans.

    Some texts are longer than a row.
    """
    texts = ["packprep is warm. " * (1 + i % 50) for i in range(200)]
    for name, records in (
        ("texts", [{"text": text} for text in texts]),
        ("spans", [{"text": text, "loss_spans": [[2, 7, 0.5], [9, 12]]} for text in texts]),
    ):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records), "utf-8"
        )


def print_compiled(result: dict[str, Any]) -> None:
    """Print the location of the kernels, their objectives, and the time."""
    put_line(
        f"kernels of {', '.join(result['objectives'])} are in {result['folder']}:"
        f" {result['compiled']} compiled in {result['seconds']:.1f} s"
    )
