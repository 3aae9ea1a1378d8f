"""Look up the inputs that a recipe names, and resolve the recipe and its inputs into a plan.

A plan lists the input files and the number of shards. It also stores every value that must be
computed only once: token ids, byte ratios, repeats, and the tokenizer engine with its version. The
first process writes the plan; all others read it. The plan, its tokenizer and the input files
determine every shard.
"""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from packprep.building.plan import id_stream, ids_of
from packprep.building.plan_form import LATER, MOST_SHARDS, MOST_USES
from packprep.building.removal import encode_removed
from packprep.building.stores import (
    check_tokenizer,
    files_in,
    in_stores,
    of_store,
    patterns_of,
    planned_in,
    template_of,
)
from packprep.conversations.chat_template import (
    ChatTemplate,
    NoTemplate,
    compile_template,
    find_template,
    unused_templates,
)
from packprep.conversations.supervision import supervise
from packprep.dataset.manifest import removed_digest
from packprep.documents.calibration import Estimates, calibrate, first_texts
from packprep.documents.joining import check_between
from packprep.documents.reading import MOST_DOCUMENTS
from packprep.documents.sample import Supervise
from packprep.documents.store import (
    STEP_BYTES,
    STORE,
    TokenStore,
    estimates_as_json,
    estimates_from_json,
)
from packprep.documents.store_estimates import chosen_estimates
from packprep.errors import RecipeError
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import FORMAT, LAW_VERSION, VERSION, as_stored, json_value
from packprep.objectives.objective import Task
from packprep.objectives.tasks import (
    check_loss_weighting,
    check_supervised,
    complete,
    marks_of_sources,
    needs_of,
    resolve,
    task_table,
    whole_recipe,
)
from packprep.recipe import DocumentKeys, Recipe, Source, fingerprint, normalised, without_places
from packprep.sources.files import Files, find_files
from packprep.sources.first_look import first_look
from packprep.sources.formats import FORMATS
from packprep.sources.passes import Passes
from packprep.sources.slices import (
    IN_STORE,
    MOST_PIECES,
    PlannedSource,
    other_store,
    pieces_of_all_uses,
    step_bytes,
)
from packprep.tokenizer.engines import ENGINES, candidates, engine_facts, loaded, refused
from packprep.tokenizer.engines.engine import Engine, EngineFault, EngineRefusal
from packprep.tokenizer.file import texts_of_ids
from packprep.tokenizer.proof import prove, prove_on_nasty_text
from packprep.tokenizer.roles import Needs, Vocabulary, resolve_vocabulary


@dataclass(frozen=True)
class Inputs:
    """The completed recipe with the inputs that it names: vocabulary, files and token stores.

    Attributes:
        prefixes: For each source, the folder or URL of its files, or "store:" and the location of
            its token store.
        files: The files of each source.
        chat_template: The text of the chat template, or None if the recipe needs none.
    """

    recipe: Recipe
    vocabulary: Vocabulary
    prefixes: tuple[str, ...]
    files: tuple[Files, ...]
    chat_template: str | None
    stores: Mapping[str, TokenStore]
    """{source name: token store}, for the sources that are read from a token store."""
    is_store: bool = False  # True if the build makes a token store
    calibrations: "list[_Calibration]" = field(default_factory=list, compare=False)
    """The calibration, once a plan was made. All row lengths of a recipe share this list."""

    @property
    def has_text(self) -> bool:
        """Return whether any source is read from files. Only then is a tokenizer engine needed."""
        return len(self.stores) < len(self.recipe.sources)

    @property
    def text_bytes(self) -> int:
        """Return the approximate number of text bytes that a build encodes.

        It follows from the sizes of the files, before a sample is read. A source with a share
        counts as one pass.
        """
        total = 0.0
        for source, files in zip(self.recipe.sources, self.files, strict=True):
            if source.name not in self.stores:
                text_bytes = (
                    files.sizes * np.array(list(starmap(_text_per_byte, files.kinds)))[files.kind]
                )
                low, high = source.sample
                total += float(text_bytes.sum()) * most_passes(source) * float(high - low)
        return round(total)

    @cached_property
    def tasks(self) -> list[Task]:
        """Return the recipe's tasks, followed by `too_short`, the task of segments below 3 tokens.

        Raises:
            RecipeError: If a task cannot work with these ids or this `seq_length`.
        """
        return resolve(self.recipe, ids_of(self.vocabulary), self.vocabulary.mode_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """Return the fingerprint of everything that determines the shards.

        The result is cached, because listing the names and sizes of a million files takes seconds.
        """
        files = [
            list(zip(source.names, source.sizes.tolist(), strict=True)) for source in self.files
        ]
        return fingerprint(
            self.recipe, files, self.vocabulary.digest, self.chat_template, self.removed_digest
        )

    @cached_property
    def removed(self) -> bytes:
        """Return removed.json as bytes, or b"" if no document was removed from the token stores."""
        removed_documents = {
            name: removed_of_store
            for name, store in self.stores.items()
            if (removed_of_store := store.plan.removed.documents.get(name))
        }
        return encode_removed(removed_documents) if removed_documents else b""

    @property
    def removed_digest(self) -> str | None:
        """Return the digest of removed.json, or None if no document was removed."""
        return digest_of(self.removed) if self.removed else None


def _text_per_byte(format: str, compression: str) -> int:
    """Return the approximate number of bytes to encode per stored byte of a file."""
    if FORMATS[format].holds == "tokens":
        return 0
    return COMPRESSED_TEXT if compression or FORMATS[format].file == "parquet" else 1


def look_up(recipe: Recipe, moved: Mapping[str, str], is_store: bool = False) -> Inputs:
    """Complete a recipe, find its tokenizer, files and token stores, and return all as `Inputs`.

    Args:
        recipe: The recipe. Unless `is_store`, it must have one `seq_length`.
        moved: Source name → the folder or URL of the source's files, for sources whose files were
            moved.
        is_store: True to make a token store. The recipe is then replaced by `of_store(recipe)`.

    Raises:
        RecipeError: If the recipe, its files or its tokenizer cannot be used together.
    """
    recipe = complete(of_store(recipe) if is_store else recipe)
    if not recipe.seq_length:
        raise RecipeError(
            f"seq_lengths = {list(recipe.lengths)} define several datasets\n"
            "hint: give one of them as seq_length, or build all with `packprep build`"
        )
    recipe, stores = in_stores(recipe, moved, is_store)
    names = [source.name for source in recipe.sources]
    for name in moved:
        if name not in names:
            raise RecipeError(
                f"--source {name}=…: the recipe has no source of that name, only"
                f" {', '.join(names)}\n"
                f"hint: give the name of a source, as in --source {names[0]}=…"
            )
    # Files of a token store are the files that it was made from, so both ways give the same splits.
    prefixes_and_files = []
    for i, source in enumerate(recipe.sources):
        if source.name in stores:
            files = files_in(stores[source.name], source.name, i)
            prefixes_and_files.append((files.root, files))
        else:
            prefixes_and_files.append(find_files(source, i, recipe.base, moved.get(source.name)))
        kept_fields = (
            stores[source.name].kept_fields(source.name) if source.name in stores else None
        )
        _refuse_without_fields(source, i, prefixes_and_files[-1][1], kept_fields)
    # Empty inputs usually come from an unfinished download, so refuse them before a plan exists.
    if not any(files.sizes.any() for _, files in prefixes_and_files):
        first_path = next(
            (
                os.path.join(files.root, files.names[0])
                for _, files in prefixes_and_files
                if len(files)
            ),
            "none",
        )
        raise RecipeError(
            "the inputs are empty: no file of the sources has any bytes (first file:"
            f" {first_path})\n"
            "hint: fetch the files again, or name others in paths"
        )
    # The tasks determine which special tokens the vocabulary must have.
    vocabulary = resolve_vocabulary(
        recipe.tokenizer, recipe.base, recipe.specials, Needs(*needs_of(recipe))
    )
    # A token store's texts were rendered with its own template, so the recipe's must be equal.
    template, documents = None, recipe.documents
    if documents.loss_spans == "use":
        template = find_template(
            documents.chat_template, recipe.base, recipe.tokenizer, documents.template_date
        )
    check_tokenizer(recipe, vocabulary, stores)
    template = template_of(template, stores)
    prefixes, of_sources = (
        tuple(p for p, _ in prefixes_and_files),
        tuple(files for _, files in prefixes_and_files),
    )
    return Inputs(recipe, vocabulary, prefixes, of_sources, template, stores, is_store)


def _refuse_without_fields(
    source: Source, i: int, files: Files, kept_fields: Sequence[str] | None
) -> None:
    """Raise RecipeError if source `i` reads fields, but a file or its token store has none.

    `kept_fields` has the fields that the source's token store keeps, or is None without a store.
    """
    passes = Passes.of(source, i)
    if passes is None and not source.keep:
        return
    key = "keep" if passes is None else "where" if source.where is not None else "repeat"
    # A token store has only the fields that its own recipe kept.
    if kept_fields is not None:
        missing = [name for name in passes.fields if name not in kept_fields] if passes else []
        if missing:
            raise RecipeError(
                f"sources[{i}].{key} reads {missing[0]!r}, which the token store of source"
                f" {source.name!r} does not keep; it keeps"
                f" {', '.join(kept_fields) or 'no fields'}\n"
                "hint: name the field in keep of the store's recipe, and make the store again",
                ("sources", i, key),
            )
        return
    # In files, the format decides whether documents have fields.
    for kind, (format, _) in enumerate(files.kinds):
        if not FORMATS[format].has_fields:
            name = files.names[int(np.flatnonzero(files.kind == kind)[0])]
            raise RecipeError(
                f"sources[{i}].{key}: {os.path.join(files.root, name)} is read as {format}, whose"
                " documents have no fields\n"
                f"hint: leave {key} out, or make the file a source of its own",
                ("sources", i, key),
            )


def look_up_each(
    recipes: Sequence[Recipe], moved: Mapping[str, str], is_store: bool = False
) -> list[Inputs]:
    """Return the `Inputs` of recipes that differ only in `seq_length`.

    The files and the tokenizer are looked up once. The results share their calibration, which does
    not depend on the row length. The arguments are as in `look_up`.
    """
    first_inputs = look_up(recipes[0], moved, is_store)
    lengths = [recipe.seq_length for recipe in recipes[1:]]
    other_inputs = [
        replace(first_inputs, recipe=replace(first_inputs.recipe, seq_length=n)) for n in lengths
    ]
    return [first_inputs, *other_inputs]


def token_dtype(recipe: Recipe, vocab_size: int) -> np.dtype:
    """Return the dtype of token ids: uint16 or int32.

    Raises:
        RecipeError: If the recipe asks for uint16 and the vocabulary has too many ids for it.
    """
    if recipe.output.token_dtype == "uint16" and vocab_size > 1 << 16:
        raise RecipeError(
            f'output.token_dtype = "uint16" has 65536 ids, but the vocabulary has {vocab_size}\n'
            'hint: use "auto"'
        )
    narrow = vocab_size <= 1 << 16 and recipe.output.token_dtype != "int32"
    return np.dtype(np.uint16 if narrow else np.int32)


MIB = 1 << 20
EVEN_SHARDS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of shards that 2, 4, … workers finish at the same time.

Five shards are a bad number for two workers: one worker makes three of them and the other two.
"""
UNKNOWN_TURNS = (
    "warning: the chat template does not use add_generation_prompt and has no {% generation %}"
    " blocks. The text that opens an assistant's turn cannot be separated from it, and is trained"
    " too. Set documents.chat_template to a copy of the template that uses add_generation_prompt"
)
TWO_ENDS = (
    "warning: the chat template ends conversations with {}, which is eos, and documents.append_eos"
    " adds another eos. Set documents.append_eos = false, unless texts other than conversations"
    " need it"
)
COMPRESSED_TEXT = 3
"""Approximate bytes of text per byte of a compressed file or a Parquet file."""
UNSAMPLED: Mapping[str, Any] = {"ratios": {}, "repeat": 1.0, "step_bytes": 1 << 14}
"""Placeholders for a source's values that are computed from its calibration sample."""
LIBRARIES = ("numpy", "numba", "tokenizers", "pyarrow", "zstandard", "msgspec", "xxhash", "jinja2")


def make_plan(
    inputs: Inputs,
    say: Callable[[str], None] = lambda message: None,
    samples: list[Estimates] | None = None,
) -> dict[str, Any]:
    """Return the contents of plan.json for a recipe and its inputs.

    Only a sample of each source is read.

    Args:
        inputs: The recipe and its inputs.
        say: Receives each message, for example that engine = "auto" skips a fast engine that gives
            other tokens than the reference.
        samples: Receives the estimates of each source. The plan itself stores only the estimates
            that building needs.

    Raises:
        RecipeError: If the inputs, the engine or the number of shards cannot be used.
    """
    recipe, vocabulary = inputs.recipe, inputs.vocabulary
    tasks = inputs.tasks
    # The sample does not depend on the row length, so all row lengths share the first plan's
    # calibration.
    _check_groups(inputs)
    if not inputs.calibrations:
        _look_at_files(inputs, say)
        inputs.calibrations.append(_proven_and_calibrated(inputs, say))
    (calibration,) = inputs.calibrations
    sources, estimates = calibration.sources, calibration.estimates
    if samples is not None:
        samples += estimates
    is_chat = any(estimate.chat for estimate in estimates)
    if inputs.chat_template is not None and is_chat:
        _warn_of_template(inputs, inputs.chat_template, say)
    for source, estimate in zip(sources, estimates, strict=True):
        source.ratios, source.pass_shares = estimate.ratios, estimate.pass_shares
    # Verification computes these values again from the other values of the plan.
    rates = [estimate.tokens_per_byte for estimate in estimates]
    has_chats = recipe.output.shard_text_bytes == "auto" and is_chat
    derived = follows(recipe, vocabulary, tasks, sources, rates, inputs.is_store, has_chats)
    plan = {
        "format": FORMAT,
        "version": VERSION,
        "law_version": LAW_VERSION,
        "fingerprint": inputs.fingerprint,
        "recipe": normalised(recipe),
        "engine": engine_facts(calibration.engine),
        "made_with": made_with(),
        "tokenizer": {"file": "tokenizer.json", "digest": vocabulary.digest},
        "beside_tokenizer": [dict(file) for file in vocabulary.beside],
        "chat_template": inputs.chat_template,
        **derived,
        "sources": [
            {
                **resolved,
                "prefix": source.prefix,
                "patterns": patterns_of(source.source, recipe.base, inputs.stores),
                **stored_estimates(estimate, source, resolved["text_bytes"], kept_estimates),
            }
            for source, estimate, resolved, kept_estimates in zip(
                sources, estimates, derived["sources"], calibration.kept, strict=True
            )
        ],
        "files": [file for files in inputs.files for file in files.as_planned()],
    }
    # These keys are stored only where they apply. Other plans keep their bytes.
    for entry in plan["sources"]:
        if entry["name"] in inputs.stores:
            entry["store"] = inputs.stores[entry["name"]].digest
    if inputs.is_store:
        plan["kind"] = STORE
    if has_chats:
        plan["has_chats"] = True
    if inputs.removed:
        plan["removed"] = {"digest": inputs.removed_digest, "replaces": []}
    _refuse_large_shards(plan)
    return {**plan, "digest": own_digest(as_stored(plan, LATER))}


def _check_groups(inputs: Inputs) -> None:
    """Check the sources with group_by: the tokens between records, and that none is in a store.

    Raises:
        RecipeError: If a source cannot be joined.
    """
    recipe, vocabulary = inputs.recipe, inputs.vocabulary
    of_media = {id for ids in vocabulary.media.values() for id in ids}
    marks = marks_of_sources(recipe, inputs.tasks)
    for i, (source, (of_plain, _)) in enumerate(zip(recipe.sources, marks, strict=True)):
        if source.group_by and (inputs.is_store or source.name in inputs.stores):
            raise RecipeError(
                f"source {source.name!r}: group_by is not supported in a token store, which keeps"
                " each record as a document\n"
                "hint: build from the files, or leave group_by out",
                ("sources", i, "group_by"),
            )
        check_between(source, vocabulary, of_media.union(of_plain.tolist()))


def _look_at_files(inputs: Inputs, say: Callable[[str], None]) -> None:
    """Check some files for known mistakes, and report the number and total size of all files.

    Raises:
        SourceError: If all checked files of a source are faulty.
    """
    recipe, kinds = inputs.recipe, tuple(inputs.vocabulary.media)
    for source, files in zip(recipe.sources, inputs.files, strict=True):
        if source.name not in inputs.stores:
            reads_more = recipe.documents.loss_spans == "use"
            first_look(source, files, reads_more, inputs.chat_template or "", kinds)
    count, size = sum(map(len, inputs.files)), sum(int(files.sizes.sum()) for files in inputs.files)
    say(f"sampling {size / 1e6:,.1f} MB in {count:,} file{'s' * (count != 1)}")


def _warn_of_template(inputs: Inputs, text: str, say: Callable[[str], None]) -> None:
    """Pass warnings about the chat template `text` to `say`.

    One warns that the text that opens an assistant's turn is trained too, because it cannot be
    separated from the turn. The other warns that conversations get two eos.
    """
    documents = inputs.recipe.documents
    template = compile_template(text, documents.template_date)
    if not template.knows_turns:
        say(UNKNOWN_TURNS)
    if documents.eos_after_document and (
        eos := written_by_template(template, inputs.vocabulary, "eos")
    ):
        say(TWO_ENDS.format(eos))


def _refuse_large_shards(plan: Mapping[str, Any]) -> None:
    """Raise RecipeError if a shard would have too many documents, before any shard is made."""
    documents, text_bytes = (
        sum(source[key] for source in plan["sources"]) for key in ("documents", "text_bytes")
    )
    documents_per_shard = documents / plan["shards"]
    if documents_per_shard > MOST_DOCUMENTS:
        raise RecipeError(
            f"each of {plan['shards']} shards would have about {documents_per_shard:.0f} documents,"
            f" but the maximum is {MOST_DOCUMENTS}\nhint: set output.shard_text_bytes to"
            f" {int(text_bytes * MOST_DOCUMENTS / documents * 0.8)} or less",
            ("output", "shard_text_bytes"),
        )


def written_by_template(template: ChatTemplate, vocabulary: Vocabulary, role: str) -> str:
    """Return a special token's text if the chat template writes this token; otherwise "".

    `role` is "bos", for a token at the start of each rendered conversation, or "eos", for a token
    at its end.
    """
    if role not in vocabulary.roles:
        return ""
    (token,) = texts_of_ids(vocabulary.tokenizer_json, [vocabulary.roles[role]]).values()
    asked, answered = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    try:
        text = template.render([asked, answered])
    except MemoryError:
        raise
    except Exception:  # A template is code and can raise any class.
        return ""
    written = text.rstrip().endswith(token) if role == "eos" else text.startswith(token)
    return token if written else ""


def follows(
    recipe: Recipe,
    vocabulary: Vocabulary,
    tasks: Sequence[Task],
    sources: Sequence[PlannedSource],
    tokens_per_byte: Sequence[float],
    is_store: bool = False,
    has_chats: bool = False,
) -> dict[str, Any]:
    """Return {key: value} for the keys of a plan that the arguments determine, such as "shards".

    `make_plan` stores them, and verification computes them again.

    Args:
        recipe: The completed recipe.
        vocabulary: The vocabulary.
        tasks: The recipe's tasks.
        sources: The sources. Their `ratios` must be set. This function sets their `repeat`.
        tokens_per_byte: The estimated tokens per text byte of each source.
        is_store: True for a token store's plan.
        has_chats: The plan's key `has_chats`. If True, "auto" shards are smaller.

    Raises:
        RecipeError: If there are too many splits or shards, or a share cannot be met.
    """
    # Text bytes of one pass over all documents, by source.
    once = [int(source.weights().sum()) for source in sources]
    for source, repeat in zip(sources, repeats(recipe, once, tokens_per_byte), strict=True):
        source.repeat = repeat
    if (pieces := pieces_of_all_uses(sources)) > MOST_PIECES:
        raise RecipeError(
            f"the sources have {pieces:,} splits, counted once per pass, but a dataset has at most"
            f" {MOST_PIECES:,}\n"
            "hint: compress line files (a compressed file is one split), write larger row groups,"
            " lower repeat, or build several datasets"
        )
    weights = [source.weight for source in sources]
    rate = sum(w * t for w, t in zip(weights, tokens_per_byte, strict=True)) / max(1, sum(weights))
    shard_text_bytes = _shard_text_bytes(recipe, sum(weights), rate, has_chats)
    shards = max(1, -(-sum(weights) // shard_text_bytes))
    if shards > MOST_SHARDS:
        raise RecipeError(
            f"output.shard_text_bytes = {shard_text_bytes} makes {shards:,} shards, but a dataset"
            f" has at most {MOST_SHARDS:,}\n"
            f"hint: set at least {-(-sum(weights) // MOST_SHARDS)}",
            ("output", "shard_text_bytes"),
        )
    compressed = [  # bytes of compressed files
        int(
            source.files.sizes[
                np.array([bool(by) for _, by in source.files.kinds])[source.files.kind]
            ].sum()
        )
        for source in sources
    ]
    # All values follow from the arguments, so verification computes the same values (P22).
    return {
        "vocabulary": vocabulary.as_planned(),
        "token_dtype": token_dtype(recipe, vocabulary.vocab_size).name,
        "tasks": task_table(tasks),
        "shards": shards,
        "shard_text_bytes": shard_text_bytes,
        "sources": [
            {
                "name": source.name,
                "repeat": source.repeat,
                "step_bytes": STEP_BYTES if is_store else step_bytes(size * source.uses, shards),
                "text_bytes": weight,
                "tokens": round(weight * tokens),
            }
            for source, size, weight, tokens in zip(
                sources, compressed, weights, tokens_per_byte, strict=True
            )
        ],
    }


class _Calibration(NamedTuple):
    """The chosen engine, and the estimates that were made with it.

    Attributes:
        engine: The name of the engine.
        sources: The sources.
        estimates: The estimates of each source.
        kept: For each source, the estimates that a token store keeps; [] for a dataset.
    """

    engine: str
    sources: list[PlannedSource]
    estimates: list[Estimates]
    kept: list[list[dict[str, Any]]]


def _proven_and_calibrated(inputs: Inputs, say: Callable[[str], None]) -> _Calibration:
    """Choose the tokenizer engine, and calibrate every source with it.

    An engine is chosen only if it gives the same tokens as the reference engine on difficult text
    and on the first texts of the sources. The reference engine itself is not compared.

    Raises:
        RecipeError: If the recipe names an engine that cannot be used or gives other tokens.
    """
    recipe, vocabulary = inputs.recipe, inputs.vocabulary
    special_text = recipe.documents.special_text
    names = candidates(recipe.engine, vocabulary, inputs.text_bytes)
    first_files = np.cumsum([0, *map(len, inputs.files)]).tolist()
    sources = [
        PlannedSource(
            source, i, inputs.prefixes[i], inputs.files[i], first_files[i], UNSAMPLED, recipe.seed,
            in_order=inputs.is_store, kinds=tuple(vocabulary.media),
            stream=id_stream(source, vocabulary),
        )
        for i, source in enumerate(recipe.sources)
    ]  # fmt: skip
    in_files = [source for source in sources if source.name not in inputs.stores]
    # If all sources are in stores, the build reads no text. A later `verify --replay` does, with
    # the engine of the first store.
    if not in_files:
        engine_before = inputs.stores[sources[0].name].plan.stored["engine"]["name"]
        names = candidates(recipe.engine, vocabulary)
        names = [engine_before] if engine_before in names else names[-1:]
    texts: list[str] = []
    for source in in_files if any(ENGINES[name].proven for name in names) else ():
        with _named(source, recipe):
            texts += first_texts(source, _supervise_of(recipe.documents, inputs.chat_template))
    # Use the first engine that tokenizes everything like the reference.
    for name in names:
        try:
            engine = loaded(name, vocabulary, special_text) if in_files else None
            if engine is not None:
                prove_on_nasty_text(engine, special_text, vocabulary)
            samples = [_calibrated(inputs, source, engine) for source in sources]
            if engine is not None:
                prove(engine, texts, special_text, vocabulary)
            estimates, kept_estimates = (list(column) for column in zip(*samples, strict=True))
            return _Calibration(name, sources, estimates, kept_estimates)
        except (EngineRefusal, EngineFault) as error:
            if recipe.engine != "auto":
                raise refused(name, str(error)) from error
            say(f"engine {name} is not used: {error}")
    raise AssertionError("the reference engine takes every tokenizer and needs no proof")


def _calibrated(
    inputs: Inputs, source: PlannedSource, engine: Engine | None
) -> tuple[Estimates, list[dict[str, Any]]]:
    """Return two results for a source: its estimates, and the estimates for a token store's plan.

    The first result comes from a sample of the source's files, or from the token store that the
    source is read from. The second result is [] unless this build makes a token store.

    Raises:
        RecipeError: If the recipe's tasks or loss weighting cannot be used for the source.
    """
    recipe = inputs.recipe
    kept_estimates: list[dict[str, Any]] = []
    if engine is None or source.name in inputs.stores:
        estimates = estimates_in(inputs.stores[source.name], source)
    else:
        settings, template = recipe.documents, inputs.chat_template
        with _named(source, recipe):
            estimates, kept_estimates = sampled(
                source, engine, inputs.vocabulary, settings, template, inputs.is_store
            )
    with _named(source, recipe):
        if problem := estimates.notes.problem(source.source.share is not None):
            raise RecipeError(problem)
    # A store serves recipes with any tasks, so only the tasks of a dataset are checked.
    if not inputs.is_store:
        if estimates.supervised:
            check_supervised(recipe, source.index)
        check_loss_weighting(recipe, source.index, estimates.supervised)
    return estimates, kept_estimates


def sampled(
    source: PlannedSource,
    engine: Engine,
    vocabulary: Vocabulary,
    settings: DocumentKeys,
    template: str | None,
    is_store: bool,
) -> tuple[Estimates, list[dict[str, Any]]]:
    """Return the estimates of a source's calibration sample, and a list for a token store's plan.

    A source with a share needs a precise sample. A quick sample is enough for any other source. A
    dataset that is built from a store may or may not give the source a share. If `is_store` is
    True, the list therefore has the estimates of a quick sample and those of a precise sample. If
    `is_store` is False, the list is []. Both results depend only on the arguments and the source's
    files, so that verification can compute them again.
    """
    supervised = _supervise_of(settings, template)
    sample = partial(calibrate, source, engine, vocabulary, settings, supervised)
    estimates = sample(source.source.share is not None)
    if not is_store:
        return estimates, []
    noted = dict(source.files.piece_bytes)
    kept_estimates = [
        estimates_as_json(estimates, noted),
        estimates_as_json(sample(True), source.files.piece_bytes),
    ]
    source.files.forget(noted)
    return estimates, kept_estimates


def _supervise_of(settings: DocumentKeys, template: str | None) -> Supervise | None:
    """Return the function that converts a batch's supervised documents to texts.

    Return None if the recipe ignores supervision.
    """
    if settings.loss_spans != "use":
        return None
    return partial(supervise, template=template, settings=settings)


def stored_estimates(
    estimates: Estimates,
    source: PlannedSource,
    text_bytes: int,
    kept_estimates: list[dict[str, Any]],
) -> dict[str, Any]:
    """From a source's entry in the plan, return the part that the calibration sample determines.

    Args:
        estimates: The estimates.
        source: The source. Its `repeat` must be set.
        text_bytes: The text bytes of the source in the plan.
        kept_estimates: The second result of `sampled`.
    """
    return {
        "ratios": estimates.ratios,
        "tokens_per_byte": estimates.tokens_per_byte,
        "documents": (
            round(text_bytes / estimates.document_bytes) if estimates.document_bytes else 0
        ),
        "relative_error": estimates.error_of(source),
        **({"estimates": kept_estimates} if kept_estimates else {}),
        **({} if estimates.pass_shares is None else {"pass_shares": estimates.pass_shares}),
    }


def estimates_in(store: TokenStore, source: PlannedSource) -> Estimates:
    """Return a source's estimates from its token store.

    The store also has the number of text bytes of each split. These numbers are recorded in
    `source.files`.
    """
    kept_estimates = planned_in(store, source.name)["estimates"]
    estimates, piece_bytes = estimates_from_json(kept_estimates[source.source.share is not None])
    for i, split_bytes in piece_bytes.items():
        source.files.note(i, split_bytes)
    return estimates if source.passes is None else chosen_estimates(store, source, estimates)


@contextlib.contextmanager
def _named(source: PlannedSource, recipe: Recipe) -> Iterator[None]:
    """Add the source's name to the message of a RecipeError."""
    try:
        yield
    except NoTemplate as error:
        message = unused_templates(recipe.tokenizer, recipe.base) or error
        raise NoTemplate(f"source {source.name!r}: {message}", error.key) from error
    except RecipeError as error:
        raise RecipeError(f"source {source.name!r}: {error}", error.key) from error


def made_with() -> dict[str, str]:
    """Return the versions of Python, packprep and the libraries that a build uses."""
    versions = {name: importlib.metadata.version(name) for name in (*LIBRARIES, "packprep")}
    return {"python": platform.python_version(), **versions}


def repeats(recipe: Recipe, once: Sequence[int], tokens_per_byte: Sequence[float]) -> list[float]:
    """Return the repeat of each source: the recipe's value, or the value that its share requires.

    Repeats that follow from shares are rounded to six digits. For an expression, the result is its
    upper limit.

    Args:
        recipe: The recipe.
        once: For each source, the text bytes of one pass over all documents.
        tokens_per_byte: For each source, the estimated tokens per text byte.

    Raises:
        RecipeError: If a source has a share but no tokens, or needs more than `MOST_USES` passes.
    """
    shares = [source.share for source in recipe.sources]
    if shares[0] is None:
        return [most_passes(source, i) for i, source in enumerate(recipe.sources)]
    # Compute the tokens of one pass over the sampled documents of each source.
    total_share = sum(share for share in shares if share is not None)
    tokens = []
    for source, size, of_byte in zip(recipe.sources, once, tokens_per_byte, strict=True):
        low, high = source.sample
        tokens.append(size * (high - low) * of_byte)
        if not tokens[-1]:
            raise RecipeError(
                f"source {source.name!r} has a share of {source.share}, but no tokens\n"
                "hint: give it files with text"
            )
    # Without total_tokens, the total is as large as possible without reading a source more than
    # once.
    fractions = [share / total_share for share in shares if share is not None]
    total = recipe.total_tokens or min(
        t / fraction for t, fraction in zip(tokens, fractions, strict=True)
    )
    repeats_of_sources = [
        max(1e-6, float(f"{total * fraction / t:.6g}"))
        for t, fraction in zip(tokens, fractions, strict=True)
    ]
    for source, repeat in zip(recipe.sources, repeats_of_sources, strict=True):
        if repeat > MOST_USES:
            raise RecipeError(
                f"source {source.name!r}: its share of total_tokens = {recipe.total_tokens} would"
                f" use each of its documents {repeat:g} times, but the maximum is {MOST_USES}\n"
                "hint: ask for fewer tokens, or give the source more text"
            )
    return repeats_of_sources


def most_passes(source: Source, index: int = 0) -> float:
    """Return the recipe's `repeat` of a source without a share. For an expression, its upper limit.

    `index` is the index of the source, for messages.
    """
    if not isinstance(source.repeat, str):
        return source.repeat
    passes = Passes.of(source, index)
    assert passes is not None
    return passes.most


CHATS_PART = 8
"""Divisor of the shard size for conversations, because chat templates render slowly."""


def _shard_text_bytes(
    recipe: Recipe, text_bytes: int, tokens_per_byte: float, has_chats: bool = False
) -> int:
    """Return the text bytes per shard: the recipe's value, or a computed value for "auto".

    The computed value is 64 MiB. It is larger if a shard would otherwise have fewer than 2000 rows,
    or if a dataset would have more than 50 000 shards. It is at most 512 MiB. For conversations
    (`has_chats`), the numbers 64 MiB and 2000 rows are divided by `CHATS_PART`.

    A smaller value is used if it makes the number of shards one of `EVEN_SHARDS`, and if each shard
    still has at least 2000 rows.
    """
    if recipe.output.shard_text_bytes != "auto":
        return int(recipe.output.shard_text_bytes)
    divisor = CHATS_PART if has_chats else 1
    long_rows = int(2000 // divisor * recipe.seq_length / max(tokens_per_byte, 1e-6))
    most_bytes = min(max(64 * MIB // divisor, long_rows, -(-text_bytes // 50_000)), 512 * MIB)
    even = next((n for n in EVEN_SHARDS if n * most_bytes >= text_bytes), 1)
    less = -(-text_bytes // even)
    return less if even > 1 and less >= long_rows else most_bytes


def other_stores(inputs: Inputs, plan: Mapping[str, Any]) -> list[str]:
    """Return a message for each source that the recipe and the plan read from different places.

    For example, one reads files and the other a token store, or both read different token stores.
    """
    messages = []
    for source, planned in zip(inputs.recipe.sources, plan["sources"], strict=True):
        store, was_stored = inputs.stores.get(source.name), planned["prefix"].startswith(IN_STORE)
        if (store is not None) != was_stored:
            places = ("a token store", "files") if store else ("files", "a token store")
            messages.append(
                "source {!r} is in {} here, but in {} in the plan".format(source.name, *places)
            )
        elif store is not None and planned["store"] not in (None, *store.digests):
            messages.append(other_store(source.name, store, planned["store"]))
    return messages


def differences(inputs: Inputs, plan: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a recipe and its inputs cannot resume a plan; [] if they can."""
    limit = plan["recipe"]["documents"]["max_bad_fraction"]
    if inputs.recipe.documents.max_bad_fraction != limit:  # This key affects only publication.
        documents = replace(inputs.recipe.documents, max_bad_fraction=limit)
        inputs = replace(inputs, recipe=replace(inputs.recipe, documents=documents))
    # Equal fingerprints prove equal inputs. The rest only finds words for a difference.
    if plan["fingerprint"] == inputs.fingerprint:
        return []
    messages = []
    if plan["tokenizer"]["digest"] != inputs.vocabulary.digest:
        messages.append(
            f"the tokenizer changed (digest {inputs.vocabulary.digest} here,"
            f" {plan['tokenizer']['digest']} in the plan)"
        )
    if plan["chat_template"] != inputs.chat_template:
        messages.append("the chat template changed")
    # Compare recipes with presets expanded and defaults filled in, so that only real changes are
    # listed.
    current_recipe, planned_recipe = (
        json_value(without_places(whole_recipe(r)))
        for r in (normalised(inputs.recipe), plan["recipe"])
    )
    messages += changed_keys(current_recipe, planned_recipe, "{} is {} here and {} in the plan")
    # Compare the files of both by source and name. A file counts as equal if its size is equal.
    planned_sizes: dict[tuple[int, str], int] = {
        (f["source"], f["name"]): f["size"] for f in plan["files"]
    }
    current_sizes = {
        (files.source, name): size
        for files in inputs.files
        for name, size in zip(files.names, files.sizes.tolist(), strict=True)
    }
    names = dict(enumerate([source["name"] for source in plan["recipe"]["sources"]]))
    names |= {i: source.name for i, source in enumerate(inputs.recipe.sources)}
    if inputs.removed_digest != removed_digest(plan):
        messages.append(
            "the removed documents differ: resume a copy with `packprep remove`, and a build with"
            " its own token store"
        )
    for key in sorted(set(planned_sizes) | set(current_sizes)):
        if planned_sizes.get(key) != current_sizes.get(key):
            planned_size, current_size = (
                "no file" if d.get(key) is None else f"{d[key]} bytes"
                for d in (planned_sizes, current_sizes)
            )
            messages.append(
                f"input {key[1]!r} of source {names[key[0]]!r}: {planned_size} in the plan,"
                f" {current_size} now"
            )
    return messages[:10] + (["…"] if len(messages) > 10 else []) or ["the fingerprint differs"]


def changed_keys(value: Any, planned: Any, words: str, where: str = "") -> list[str]:
    """Return a message for each key that differs between `value` and `planned`.

    Args:
        value: A value of the recipe, such as a dict of keys.
        planned: The same value in the plan.
        words: A format string with three fields: the key, its value now, and its value in the plan.
        where: The key of `value` in the recipe, for example "documents".
    """
    if isinstance(value, dict) and isinstance(planned, dict):
        keys = sorted(set(value) | set(planned))
        places = [(k, f"{where}.{k}" if where else k) for k in keys]
        return [
            c
            for k, place in places
            for c in changed_keys(value.get(k), planned.get(k), words, place)
        ]
    # Lists of tables with equal length, such as sources, are compared table by table.
    if (
        isinstance(value, list)
        and isinstance(planned, list)
        and len(value) == len(planned)
        and any(isinstance(v, dict) for v in value)
    ):
        pairs = enumerate(zip(value, planned, strict=True))
        return [c for i, (a, b) in pairs for c in changed_keys(a, b, words, f"{where}[{i}]")]
    return [] if value == planned else [words.format(where, _short(value), _short(planned))]


def _short(value: Any) -> str:
    """Return a recipe's value as text for a message.

    A list of tables with names becomes the list of the names.
    """
    if (
        isinstance(value, list)
        and value
        and all(isinstance(v, dict) and "name" in v for v in value)
    ):
        return f"[{', '.join(v['name'] for v in value)}]"
    return f"{value!r:.200}"
