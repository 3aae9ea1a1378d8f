"""Resolve token stores: make the recipe of a store, and find sources that are read from a store.

    recipe of a dataset ─ of_store ─► recipe of its store, with each document once
    source with format = "store" ─ in_stores ─► the source that the store was made from

A dataset that is built from a store therefore has the same recipe, files and fingerprint as a
dataset that is built from the text.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packprep.building.plan import open_store
from packprep.documents.store import STORE, TokenStore, special_texts
from packprep.errors import RecipeError, VocabularyError
from packprep.objectives.tasks import needs_of
from packprep.recipe import Recipe, Source
from packprep.sources.files import Files, absolute_prefix, below_one_folder
from packprep.sources.formats import FORMATS
from packprep.sources.slices import IN_STORE
from packprep.tokenizer.roles import Needs, Vocabulary, resolve_vocabulary

_FIXED = (
    "special_text",
    "loss_spans",
    "chat_template_kwargs",
    "template_date",
    "trained_turns",
    "trained_roles",
    "train_on_tool_calls",
    "train_reasoning",
    "train_empty_reasoning",
)
_FIXED_OF_TOKENS = ("append_eos", "prepend_bos")
_HOW_USED = ("where", "repeat", "max_repeat", "share", "sample", "tasks")
_OF_USE = ("name", "paths", "format", *_HOW_USED)


def of_store(recipe: Recipe) -> Recipe:
    """Return the recipe of the token store for a dataset.

    It is the dataset's recipe, but with each document used once.
    """
    sources = tuple(
        replace(
            s, where=None, repeat=1.0, max_repeat=None, share=None, sample=(0.0, 1.0), tasks=None
        )
        for s in recipe.sources
    )
    store_recipe = replace(recipe, total_tokens=0, sources=sources)
    if not recipe.seq_lengths:
        return store_recipe
    documents = replace(recipe.documents, long="split")
    return replace(
        store_recipe,
        documents=documents,
        seq_length=recipe.seq_length or recipe.lengths[-1],
        seq_lengths=None,
    )


def in_stores(
    recipe: Recipe, moved: Mapping[str, str], is_store: bool
) -> tuple[Recipe, dict[str, TokenStore]]:
    """Replace each source that is read from a token store by the same source in the store's recipe.

    Args:
        recipe: The recipe.
        moved: Source name → the source's current location. For a token store, this is "store:" and
            a path or URL.
        is_store: True if the recipe makes a token store, which must not use another store.

    Returns:
        The new recipe, and {source name: token store} for the replaced sources.

    Raises:
        RecipeError: If a store does not have a source or a setting that the recipe needs.
    """
    sources, stores = [], {}
    for i, source in enumerate(recipe.sources):
        place = moved.get(source.name, "")
        if source.format != STORE and not place.startswith(IN_STORE):
            sources.append(source if is_store else replace(source, keep=None))
            continue
        if is_store:
            raise RecipeError(
                f'sources[{i}].format = "store": a token store is made from files, not from'
                " another store",
                ("sources", i),
            )
        location = _location(source, i, recipe, place)
        store = open_store(location)
        sources.append(_source_in(store, source, i))
        stores[sources[-1].name] = store
    recipe = replace(recipe, sources=tuple(sources))
    for store in stores.values():
        _refuse_other_keys(recipe, store)
    return recipe, stores


def _location(source: Source, i: int, recipe: Recipe, place: str) -> str:
    if place.startswith(IN_STORE):
        return absolute_prefix(place.removeprefix(IN_STORE))
    if place:
        raise RecipeError(
            f"--source {source.name}={place}: the source is in a token store\n"
            f"hint: give {IN_STORE}{place}"
        )
    if len(source.paths) != 1:
        raise RecipeError(
            f'sources[{i}].paths must be one token store with format = "store"',
            ("sources", i, "paths"),
        )
    # The store determines how its files were read, so these keys cannot be changed here.
    default = Source(paths=source.paths)
    for key in KEYS_OF_FILES:
        if getattr(source, key) != getattr(default, key):
            raise RecipeError(
                f'sources[{i}].{key} comes from the store with format = "store"\n'
                "hint: leave it out",
                ("sources", i, key),
            )
    (path,) = source.paths
    return absolute_prefix(
        path if "://" in path else os.path.join(recipe.base, os.path.expanduser(path))
    )


KEYS_OF_FILES = tuple(key for key in Source.__dataclass_fields__ if key not in _OF_USE)
"""The keys of a source that determine how its files are read."""


def _source_in(store: TokenStore, source: Source, i: int) -> Source:
    """In a token store, find the source with the name of `source`, and return it.

    Without a name, `source` means the only source of the store. The keys of the result that say how
    documents are used, such as `repeat`, are taken from `source`. `i` is the index of `source`, for
    messages.

    Raises:
        RecipeError: If the store has no source of this name.
    """
    sources_by_name = {s.name: s for s in store.plan.recipe.sources}
    name = source.name
    if name not in sources_by_name and name == f"source{i}" and len(sources_by_name) == 1:
        (name,) = sources_by_name
    if name not in sources_by_name:
        raise RecipeError(
            f"sources[{i}].name = {name!r} is not in the token store {store}\n"
            f"hint: name one of its sources: {', '.join(sources_by_name)}",
            ("sources", i, "name"),
        )
    use = {key: getattr(source, key) for key in _HOW_USED}
    return replace(sources_by_name[name], paths=(), keep=None, **use)


def _refuse_other_keys(recipe: Recipe, store: TokenStore) -> None:
    store_recipe = store.plan.recipe
    of_tokens = any(
        FORMATS[format].holds == "tokens"
        for store_source in store.plan.sources
        for format, _ in store_source.files.kinds
    )
    for key in (*_FIXED, *(_FIXED_OF_TOKENS if of_tokens else ())):
        value, store_value = getattr(recipe.documents, key), getattr(store_recipe.documents, key)
        if (
            (bool(value) != bool(store_value))
            if key in _FIXED_OF_TOKENS
            else (value != store_value)
        ):
            raise RecipeError(
                f"documents.{key} is {value!r} here, but {store_value!r} in the token"
                f" store {store}, whose tokens depend on it\n"
                "hint: use the same value, or make a store with this one",
                ("documents", key),
            )
    if recipe.specials.media != store_recipe.specials.media:
        raise RecipeError(
            f"specials.media is {recipe.specials.media!r} here, but"
            f" {store_recipe.specials.media!r} in the token store {store}, whose tokens depend"
            " on it\n"
            "hint: use the same value, or make a store with this one",
            ("specials", "media"),
        )


def check_tokenizer(
    recipe: Recipe, vocabulary: Vocabulary, stores: Mapping[str, TokenStore]
) -> None:
    """Raise RecipeError if a store was made with another tokenizer than the recipe's.

    The special tokens of the recipe and the store may differ, unless the difference could change
    the tokens in the store.
    """
    for store in stores.values():
        store_recipe = store.plan.recipe
        needs = Needs(*needs_of(store_recipe))
        digest = ""
        with contextlib.suppress(VocabularyError):  # A token of the store's tokenizer is missing.
            digest = resolve_vocabulary(
                recipe.tokenizer, recipe.base, store_recipe.specials, needs
            ).digest
        if digest != store.plan.vocabulary.digest:
            raise RecipeError(
                f"tokenizer = {recipe.tokenizer!r} is not the tokenizer of the token store"
                f" {store}\n"
                "hint: name the store's tokenizer, or make a store with this one",
                ("tokenizer",),
            )
        _refuse_other_specials(vocabulary, store)


def _refuse_other_specials(vocabulary: Vocabulary, store: TokenStore) -> None:
    """Raise RecipeError if the recipe's special tokens could change the tokens in the store.

    `TokenStore.read` makes another check, of each document that it reads.
    """
    own_specials, store_specials = special_texts(vocabulary), special_texts(store.plan.vocabulary)
    if own_specials == store_specials:
        return
    special_text = store.plan.recipe.documents.special_text
    added_ids = {entry["id"] for entry in store.plan.vocabulary.added_tokens}
    why = ""
    if special_text != "text":
        why = f'documents.special_text = "{special_text}" rejects or accepts documents by them'
    elif (
        any(planned["estimates"][0]["chat"] for planned in store.plan.stored["sources"])
        and not own_specials <= store_specials
    ):
        why = "they determine which of its conversations are rejected"
    elif missing_ids := sorted(
        id for id, _ in store_specials - own_specials if id not in added_ids
    ):
        why = f"ids {missing_ids[:5]} are special in it, but not here"
    if why:
        raise RecipeError(
            f"the token store {store} was made with other special tokens than this recipe has, and"
            f" {why}\n"
            "hint: make a store with this recipe's special tokens and tasks, or build from the"
            " text",
            ("specials",),
        )


def template_of(template: str | None, stores: Mapping[str, TokenStore]) -> str | None:
    """Return the chat template of the token stores, or `template` if there are no stores.

    `template` is the chat template of the recipe, or None.

    Raises:
        RecipeError: If the templates of the recipe and its stores differ.
    """
    for store in stores.values():
        store_template = store.plan.stored["chat_template"]
        if template is not None and store_template != template:
            raise RecipeError(
                f"the chat template differs from the one in the token store {store}\n"
                "hint: name the store's tokenizer, or make a store with this template",
                ("documents", "chat_template"),
            )
        template = store_template
    return template


def patterns_of(source: Source, base: Path, stores: Mapping[str, TokenStore]) -> list[str]:
    """Return the glob patterns of a source's files.

    For a source in a token store, these are the patterns of the files that the store was made from.
    """
    if source.name in stores:
        patterns: list[str] = planned_in(stores[source.name], source.name)["patterns"]
        return patterns
    return below_one_folder(source, base)[1]


def planned_in(store: TokenStore, name: str) -> Mapping[str, Any]:
    """Return the entry of source `name` in the plan of a token store."""
    return next(entry for entry in store.plan.stored["sources"] if entry["name"] == name)


def files_in(store: TokenStore, name: str, index: int) -> Files:
    """For source `name` of a token store, return the files that the source was made from.

    The root of the files is "store:" and the store's location, because the documents are read from
    the store. `index` is the index of the source in the recipe.
    """
    planned_source = next(s for s in store.plan.sources if s.name == name)
    files, source = planned_source.files, planned_source.source
    root = f"{IN_STORE}{store}"
    return Files(
        index,
        files.names,
        files.sizes,
        source.format,
        root,
        files.pieces,
        source.text_key,
        dict(files.piece_bytes),
    )
