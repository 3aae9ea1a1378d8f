"""The recipe as a dataset stores it, and its fingerprint."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from packprep.dataset.manifest import LAW_VERSION, encode
from packprep.digests import digest_of
from packprep.recipe.records import Documents, Output, Packing, Recipe, Source, Specials, TaskEntry, keys_of


def normalised(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a dataset stores it: defaults filled in, values in their types, presets expanded, and nothing of where
    its files lie (no paths, only the tokenizer's last path component) or of the engine."""
    table = asdict(recipe)
    for name in ("base", "engine"):
        del table[name]
    table["documents"]["chat_template"] = os.path.basename(recipe.documents.chat_template)
    table["tokenizer"] = os.path.basename(os.path.normpath(recipe.tokenizer))
    table["sources"] = [{k: v for k, v in source.items() if k != "paths"} for source in table["sources"]]
    return table


def without_places(table: Mapping[str, Any]) -> dict[str, Any]:
    """A normalised recipe without the names of the files whose contents the fingerprint holds instead."""
    documents = {k: v for k, v in table["documents"].items() if k != "chat_template"}
    return {**{k: v for k, v in table.items() if k != "tokenizer"}, "documents": documents}


def fingerprint_parts(
    recipe: Recipe, files: Sequence[Sequence[tuple[str, int]]], tokenizer_digest: str, chat_template: str | None
) -> dict[str, Any]:
    """What determines the shards: the law, the recipe, each source's (relative name, size), the tokenizer's digest, and
    the chat template where there is one."""
    parts = {
        "law_version": LAW_VERSION,
        "recipe": without_places(normalised(recipe)),
        "files": [[[name, size] for name, size in source] for source in files],
        "tokenizer": tokenizer_digest,
    }
    return parts if chat_template is None else {**parts, "chat_template": chat_template}


def fingerprint(parts: Mapping[str, Any]) -> str:
    """The xxh3-128 of the canonical JSON of `fingerprint_parts`."""
    return digest_of(encode(parts))


def from_normalised(table: Mapping[str, Any], engine: str) -> Recipe:
    """The recipe that a plan holds: `normalised` undone, but for the paths, which the plan's list of files replaces."""
    values = {name: table[name] for name in keys_of(Recipe) if name != "engine"}
    sources = []
    for source in table["sources"]:
        tasks = source["tasks"]
        lists = {"sample": tuple(source["sample"]), "tasks": None if tasks is None else tuple(tasks), "paths": ()}
        sources.append(Source(**{**source, **lists}))
    return Recipe(
        engine=engine,
        sources=tuple(sources),
        documents=Documents(**table["documents"]),
        packing=Packing(**table["packing"]),
        specials=Specials(**table["specials"]),
        tasks=tuple(TaskEntry(**task) for task in table["tasks"]),
        output=Output(**table["output"]),
        **values,
    )
