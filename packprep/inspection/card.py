"""Write a data card: Markdown with front matter in the format of the Hugging Face Hub.

`origin` describes the inputs of a dataset, for the card and for the report.

```
manifest, plan ─► origin ─┬─► card ─► FILE, which must not exist yet
                          └─► the report's last section
ledger ─────────► totals ─┘
manifest ─► Croissant's metadata ─► FILE with the ending .croissant.json
```
A card depends only on the dataset and the name of its folder. The publisher adds facts that
packprep cannot know, such as the license.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packprep.building.ledger import FILTERED
from packprep.building.plan import stored_plan
from packprep.dataset.manifest import Manifest, is_in_place, read_manifest
from packprep.documents.joining import JOINED
from packprep.errors import ArgumentError, DatasetError, RecipeError
from packprep.format.json_files import MANIFEST_NAME, PLAN_NAME
from packprep.inspection.summary import describe_manifest, percent, repeat_in_words
from packprep.inspection.text import size_of
from packprep.messages import counted, put_line, visible
from packprep.recipe import from_normalised, normalised_toml
from packprep.storage import Folder, LocalCopy, LocalFolder, folder_at, local_copy

SIZES = (
    "n<1K",
    "1K<n<10K",
    "10K<n<100K",
    "100K<n<1M",
    "1M<n<10M",
    "10M<n<100M",
    "100M<n<1B",
    "1B<n<10B",
    "10B<n<100B",
    "100B<n<1T",
    "n>1T",
)
"""The Hub's size categories by number of rows, one per power of ten from a thousand."""
MOST_PATHS = 100
"""Maximum number of file names that `origin` lists for a source without patterns."""


def origin(manifest: Manifest, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a description of a dataset's inputs as JSON-compatible values.

    Args:
        manifest: The manifest.
        plan: The content of plan.json, or None if it is missing.

    Returns:
        {recipe: TOML, tokenizer: {name, digest}, seed, engine, made_with: {name: version},
        law_version, sources: [{name, paths, files, bytes}]}. `files` and `bytes` are the number and
        total size of the source's files, or None without a plan. `paths` has the plan's patterns,
        or the file names if the plan has no patterns for the source. It is ["FILES"] if the files
        are unknown, or if more than MOST_PATHS file names would be listed.

    Raises:
        DatasetError: If this version of packprep cannot read the recipe.
    """
    # A recipe that cannot be read could not be built again either.
    try:
        from_normalised(manifest["recipe"], "auto", manifest["made_with"])
    except RecipeError as error:
        raise DatasetError(f"the recipe in dataset.json: {error}") from None
    unknown: dict[str, Any] = {"paths": ["FILES"], "files": None, "bytes": None}
    planned: dict[str, dict[str, Any]] = {}
    # Patterns find the files again. Without patterns, a few file names serve the same purpose.
    for source, files in files_by_source(plan) if plan else ():
        paths = (
            source["patterns"]
            or [file["name"] for file in files if len(files) <= MOST_PATHS]
            or ["FILES"]
        )
        inputs = {"paths": paths, "files": len(files), "bytes": sum(file["size"] for file in files)}
        planned[source["name"]] = inputs
    sources = [{"name": s["name"], **planned.get(s["name"], unknown)} for s in manifest["sources"]]
    recipe, engine = manifest["recipe"], manifest["engine"]
    limit = (
        {"max_bad_fraction": manifest["max_bad_fraction"]} if "max_bad_fraction" in manifest else {}
    )
    # The dataset was published with this limit, so a rebuild needs it.
    recipe = {**recipe, "documents": {**recipe["documents"], **limit}}
    paths = {s["name"]: ["FILES"] for s in recipe["sources"]} | {
        s["name"]: s["paths"] for s in sources
    }
    return {
        "recipe": normalised_toml(recipe, paths),
        "tokenizer": {"name": recipe["tokenizer"], "digest": manifest["tokenizer"]["digest"]},
        "seed": recipe["seed"],
        "engine": (
            engine if isinstance(engine, str) else f"{engine.get('name')} {engine.get('version')}"
        ),
        "made_with": (
            manifest["made_with"]
            if isinstance(manifest["made_with"], dict)
            else {"": manifest["made_with"]}
        ),
        "law_version": manifest["law_version"],
        "sources": sources,
    }


def files_by_source(
    plan: Mapping[str, Any],
) -> list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Return [(source, its files)] from the content of plan.json."""
    sources_and_files: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = [
        (source, []) for source in plan["sources"]
    ]
    for file in plan["files"]:
        sources_and_files[file["source"]][1].append(file)
    return sources_and_files


def write_card(directory: str | os.PathLike | Folder, card: str | os.PathLike) -> dict[str, Any]:
    """Write the card of a published dataset to a new file.

    The same dataset gives the same bytes. If mlcroissant is installed, Croissant's metadata are
    written to a file next to the card. This file has the name of the card and the ending
    .croissant.json.

    Args:
        directory: Directory or URL of the dataset.
        card: Path of the file.

    Returns:
        {card, bytes, directory}: the path and the size of the card, and the dataset's directory.
        `croissant`, the path of Croissant's metadata, is only there if they were written.

    Raises:
        DatasetError: If the dataset cannot be read.
        ArgumentError: If one of the files exists, or their folder does not.
        BuildError: If the file cannot be written.
    """
    path = Path(card)
    if not path.parent.is_dir():
        raise ArgumentError(
            f"--card {card}: no such folder: {path.parent}\nhint: create it, or choose another path"
        )
    with local_copy(folder_at(directory)) as local:
        place, data = str(local.out), card_at(local).encode()
        croissant = croissant_of(_name_of(local), local.folder / MANIFEST_NAME)
    beside = path.with_suffix(".croissant.json")
    # Both names are checked before the first file is written.
    taken = [path] if path.is_dir() else []
    taken += [beside] if croissant is not None and os.path.lexists(beside) else []
    if taken or not LocalFolder(path.parent).create(path.name, data):
        raise ArgumentError(
            f"--card {card}: {(taken or [path])[0]} already exists, and a card is never overwritten"
            "\nhint: choose another name"
        )
    written = {"card": str(card), "bytes": len(data), "directory": place}
    if croissant is not None:
        LocalFolder(path.parent).create(beside.name, croissant)
        written["croissant"] = str(beside)
    return written


def croissant_of(name: str, manifest_path: Path) -> bytes | None:
    """Return the Croissant metadata of a dataset as JSON-LD, or None without mlcroissant.

    The metadata name the files. Rows are not described, because Croissant cannot read shards.

    Args:
        name: Name of the dataset.
        manifest_path: Path of the dataset's manifest.
    """
    try:
        import mlcroissant as mlc
    except ImportError:
        return None
    data = manifest_path.read_bytes()
    manifest = read_manifest(manifest_path.parent)
    totals = describe_manifest(name, manifest)
    rows = f"{counted(totals['rows'], 'row')} of {totals['seq_length']:,} token ids"
    metadata = mlc.Metadata(
        name=visible(name),
        description=f"Packed training rows with their objectives applied: {rows}.",
        keywords=_tags(totals),
        distribution=[
            mlc.FileObject(
                id=MANIFEST_NAME,
                name=MANIFEST_NAME,
                description="The manifest, which has the digests of all shards.",
                content_url=MANIFEST_NAME,
                content_size=f"{len(data)} B",
                encoding_formats=["application/json"],
                sha256=hashlib.sha256(data).hexdigest(),
            ),
            mlc.FileSet(
                id="shards",
                name="shards",
                description="The shards, whose arrays have one entry per row or per segment.",
                encoding_formats=["application/octet-stream"],
                includes=["shards/*/*.safetensors"],
            ),
        ],
    )
    return (json.dumps(metadata.to_json(), ensure_ascii=False, indent=2) + "\n").encode()


def card_at(local: LocalCopy, use: str = "") -> str:
    """Return the card of a published dataset. The card contains the name of the dataset's folder.

    Args:
        local: A local copy of the dataset.
        use: Markdown that explains how to read the published data. If it is empty, the card
            explains how to read the dataset with packprep.

    Raises:
        DatasetError: If the dataset cannot be read.
    """
    local.fetch(MANIFEST_NAME, PLAN_NAME)
    return card_of(_name_of(local), read_manifest(local.folder), stored_plan(local.folder), use)


def _name_of(local: LocalCopy) -> str:
    place = str(local.out)
    return os.path.basename(place.rstrip("/")) or place


def card_of(name: str, manifest: Manifest, plan: Mapping[str, Any] | None, use: str = "") -> str:
    """Return the card of a dataset with this name, as Markdown with YAML front matter."""
    totals, data_origin = describe_manifest(name, manifest), origin(manifest, plan)
    rows, shards = counted(totals["rows"], "row"), counted(totals["shards"], "shard")
    # A folder may have any name, so the name is escaped for Markdown, Python and the shell.
    folder = shlex.quote(visible(name))
    lines = [
        *_front_matter(name, manifest, totals),
        "",
        f"# {_escaped(name)}",
        "",
        ("<!-- The publisher adds: what the data is, where it comes from, and its license. -->"),
        "",
        (
            f"{rows} of {totals['seq_length']:,} slots in {shards}, {size_of(totals['bytes'])}:"
            " packed training rows with their objectives applied. The ids are"
            f" {manifest['token_dtype']}, below {manifest['vocab_size']:,}. Made by packprep."
        ),
        "",
        # An export explains its own format, because packprep cannot open it.
        *(use.strip().splitlines() if use else _use(name)),
        "",
        "## Objectives",
        "",
        *_table(
            ("task", "objective", "drawn", "segments", "tokens", "share"),
            [
                (
                    task["name"],
                    task["objective"],
                    percent(task["drawn"]),
                    task["segments"],
                    task["tokens"],
                    percent(task["token_share"]),
                )
                for task in totals["tasks"]
                if task["drawn"] or task["segments"]
            ],
        ),
        "",
        "## Sources",
        "",
        *_table(
            ("source", "files", "bytes", "repeat", "documents", "tokens", "share"),
            [
                (
                    source["name"],
                    _or_unknown(inputs["files"]),
                    _or_unknown(inputs["bytes"]),
                    repeat_in_words(source),
                    source["documents"],
                    source["tokens"],
                    percent(source["token_share"]),
                )
                for source, inputs in zip(totals["sources"], data_origin["sources"], strict=True)
            ],
        ),
        "",
        "## Ledger",
        "",
        *_ledger(totals),
        "",
        "## Origin",
        "",
        *_table(
            ("what", "which"),
            [
                (
                    "fingerprint of the recipe, the sizes of the sources, and the tokenizer",
                    manifest["fingerprint"],
                ),
                ("digest of dataset.json, which has the digests of the shards", manifest["digest"]),
                ("digest of plan.json", manifest["plan"]["digest"]),
                (
                    "tokenizer",
                    f"{data_origin['tokenizer']['name']}, digest"
                    f" {data_origin['tokenizer']['digest']}",
                ),
                ("seed", data_origin["seed"]),
                ("engine", data_origin["engine"]),
                ("format version (`law_version`)", data_origin["law_version"]),
                ("made with", versions(data_origin)),
            ],
        ),
        "",
        "## Rebuild",
        "",
        (
            "You need the same files, tokenizer and chat template, and this text as"
            " `recipe.toml`. The paths of a source are relative to its FOLDER. The recipe has"
            " only the last name of the paths of tokenizer and template."
        ),
        "",
        *_fenced("toml", data_origin["recipe"]),
        "",
        *_fenced("sh", f"{_command(data_origin)} --out {folder}\n"),
    ]
    return "\n".join(lines) + "\n"


def _use(name: str) -> Iterator[str]:
    yield from _fenced(
        "python", f"import packprep\n\nds = packprep.open_dataset({visible(name)!r})\n"
    )
    yield ""
    yield from _fenced("sh", f"packprep verify {shlex.quote(visible(name))}\n")


def versions(data_origin: Mapping[str, Any]) -> str:
    """Return the versions in a result of `origin` as text: "packprep 0.2.0, python 3.11.7"."""
    ordered = sorted(
        data_origin["made_with"].items(), key=lambda item: (item[0] != "packprep", item)
    )
    return ", ".join(f"{name} {version}".strip() for name, version in ordered)


def _front_matter(name: str, manifest: Manifest, totals: Mapping[str, Any]) -> list[str]:
    in_place = any(is_in_place(task) for task in manifest["tasks"] if task["weight"])
    categories = [
        "text-generation",
        *(["fill-mask"] if in_place and "mask" in manifest["specials"] else []),
    ]
    return [
        "---",
        "# license: and language: are for the publisher to add",
        f"pretty_name: {json.dumps(visible(name), ensure_ascii=False)}",
        *_listed("task_categories", categories),
        *_listed(
            "size_categories", [SIZES[min(max(len(str(totals["rows"])) - 3, 0), len(SIZES) - 1)]]
        ),
        *_listed("tags", _tags(totals)),
        "viewer: false",
        "---",
    ]


def _tags(totals: Mapping[str, Any]) -> list[str]:
    objectives = sorted({task["objective"] for task in totals["tasks"] if task["drawn"]})
    return ["packprep", *objectives]


def _listed(key: str, values: Sequence[str]) -> Iterator[str]:
    yield f"{key}:"
    yield from (f"- {json.dumps(visible(value), ensure_ascii=False)}" for value in values)


def _ledger(s: Mapping[str, Any]) -> Iterator[str]:
    documents, tokens, slots = s["documents"], s["tokens"], s["slots"]
    sums = [
        (
            "documents",
            documents["read"],
            {key: documents[key] for key in ("used", JOINED) if key in documents},
            "rejected: ",
            documents["rejected"],
        ),
        (
            "tokens",
            tokens["read"],
            {"used": tokens["used"], "truncated": tokens["truncated"]},
            "dropped: ",
            tokens["dropped"],
        ),
        (
            "slots",
            s["row_slots"],
            {
                "tokens": slots["used"],
                "padding inside": slots["padding_inside"],
                "padding of rows": slots["row_padding"],
            },
            "added: ",
            slots["added"],
        ),
    ]
    lines = []
    for label, total, parts, prefix, other_counts in sums:
        named = {**parts, **{f"{prefix}{name}": n for name, n in sorted(other_counts.items())}}
        sum_in_words = " + ".join(
            f"{n:,} {_escaped(name)}" for i, (name, n) in enumerate(named.items()) if n or not i
        )
        lines.append((label, total, sum_in_words))
    yield from _table(("", "total", "parts"), lines, escape=False)
    yield ""
    if documents[FILTERED]:
        yield f"The conditions of the sources left out {documents[FILTERED]:,} other documents."
        yield ""
    yield f"Filled: {percent(s['utilisation']['all_rows'])} of the slots in rows."


def _command(data_origin: Mapping[str, Any]) -> str:
    moved = (
        f" --source {shlex.quote(visible(source['name']) + '=FOLDER')}"
        for source in data_origin["sources"]
    )
    return f"packprep build recipe.toml{''.join(moved)}"


def _or_unknown(count: int | None) -> int | str:
    return "unknown" if count is None else count


def _table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], escape: bool = True
) -> Iterator[str]:
    def cell(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else _escaped(value) if escape else value

    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    yield from (f"| {' | '.join(map(cell, row))} |" for row in rows)


def _escaped(text: str) -> str:
    """Return the text with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$!&])", r"\\\1", visible(text))


def _fenced(language: str, text: str) -> Iterator[str]:
    """Yield a code block between fences that are longer than any fence in it."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    yield f"{fence}{language}"
    yield from map(visible, text.splitlines())
    yield fence


def print_written_card(written: Mapping[str, Any]) -> None:
    """Print the path of the card, and the entries that the publisher must add."""
    put_line(f"{written['card']}: {written['bytes']:,} bytes; add its license and language")
    if "croissant" in written:
        put_line(f"{written['croissant']}: Croissant metadata; add the license and the date")
