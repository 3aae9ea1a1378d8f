"""What a recipe names, looked up: its tokenizer's vocabulary and its files. Light to import: a build begins with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from packprep.corpus.chat_templates import find_template
from packprep.corpus.files import Files
from packprep.corpus.finding import find_files
from packprep.corpus.tokenizer_json import continuing_tokens
from packprep.corpus.vocabulary import Needs, Vocabulary, resolve_vocabulary
from packprep.dataset.json_files import LAW_VERSION
from packprep.errors import RecipeError
from packprep.objectives.objective import Ids, Task
from packprep.objectives.tasks import complete, mode_tokens_used, resolve, roles_used, sentinels_used
from packprep.recipe import Recipe, fingerprint, fingerprint_parts


@dataclass(frozen=True)
class Inputs:
    """A recipe with what it names: the completed recipe, its vocabulary, and each source's prefix and files."""

    recipe: Recipe
    vocabulary: Vocabulary
    prefixes: tuple[str, ...]
    files: tuple[Files, ...]
    chat_template: str | None

    @property
    def fingerprint_parts(self) -> dict[str, Any]:
        """What determines the shards, as `recipe.fingerprint_parts` gives it."""
        files = [list(zip(source.names, source.sizes.tolist(), strict=True)) for source in self.files]
        return fingerprint_parts(self.recipe, files, self.vocabulary.digest, self.chat_template)

    @cached_property
    def tasks(self) -> list[Task]:
        """The recipe's tasks, `too_short` last. RecipeError where one cannot work with these ids or this seq_length."""
        return resolve(self.recipe, ids_of(self.vocabulary), self.vocabulary.mode_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of that, computed once: of a million files it takes seconds."""
        return fingerprint(self.fingerprint_parts)


def look_up(recipe: Recipe, moved: Mapping[str, str]) -> Inputs:
    """Check the recipe against its tokenizer and find its files. `moved`: source name → prefix where its files lie now."""
    recipe = complete(recipe)
    names = [source.name for source in recipe.sources]
    for name in moved:
        if name not in names:
            raise RecipeError(f"--source {name}=…: the recipe has no source of that name; it has {', '.join(names)}")
    found = [find_files(source, i, recipe.base, moved.get(source.name)) for i, source in enumerate(recipe.sources)]
    if not any(files.sizes.any() for _, files in found):
        raise RecipeError("the inputs hold no bytes: every file that the sources name is empty")
    needs = Needs(roles_used(recipe), mode_tokens_used(recipe), sentinels_used(recipe))
    vocabulary = resolve_vocabulary(recipe.tokenizer, recipe.base, recipe.specials, needs)
    template = None
    if recipe.documents.loss_spans == "use":
        template = find_template(recipe.documents.chat_template, recipe.base, recipe.tokenizer)
    return Inputs(recipe, vocabulary, tuple(p for p, _ in found), tuple(files for _, files in found), template)


def ids_of(vocabulary: Vocabulary, law: int = LAW_VERSION) -> Ids:
    """The ids that tasks write, and the law by which."""
    roles = vocabulary.roles
    return Ids(
        vocab_size=vocabulary.vocab_size,
        pad=roles["pad"],
        bos=roles.get("bos", -1),
        eos=roles.get("eos", -1),
        mask=roles.get("mask", -1),
        sentinels=np.array(vocabulary.sentinels, np.int32),
        fim=(roles.get("fim_prefix", -1), roles.get("fim_middle", -1), roles.get("fim_suffix", -1)),
        special=vocabulary.special_ids,
        continues=np.frombuffer(continuing_tokens(vocabulary.tokenizer_json, vocabulary.vocab_size), np.uint8),
        law=law,
    )


def token_dtype(recipe: Recipe, vocab_size: int) -> np.dtype:
    """uint16 or int32; RecipeError if the recipe asks for uint16 and an id may not fit."""
    if recipe.output.token_dtype == "uint16" and vocab_size > 1 << 16:
        raise RecipeError(
            f'output.token_dtype = "uint16": the vocabulary has {vocab_size} ids, and uint16 holds 65536; use "auto"'
        )
    narrow = vocab_size <= 1 << 16 and recipe.output.token_dtype != "int32"
    return np.dtype(np.uint16 if narrow else np.int32)
