"""The plan that every process loads once, from plan.json and the dataset's tokenizer."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from packprep.building.plan_form import LATER, check_plan
from packprep.building.removal import Removed
from packprep.building.segments import CutLimits, cut_limits
from packprep.dataset.epochs.noise import SCHEDULES
from packprep.dataset.manifest import LATER as LATER_IN_MANIFEST
from packprep.dataset.manifest import check_manifest, is_count, removed_digest, replaced
from packprep.dataset.mixture import mixture_of
from packprep.documents.store import STORE, TokenStore
from packprep.errors import DatasetError, PackprepError, PlanError, RecipeError
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import (
    FORMAT,
    MANIFEST_NAME,
    MIXTURE_NAME,
    PLAN_NAME,
    REMOVED_NAME,
    VERSION,
    as_stored,
    decode,
    encode,
    json_value,
    with_defaults,
)
from packprep.messages import listed
from packprep.objectives.objective import Ids, Task, TaskTable
from packprep.objectives.tasks import (
    TOO_SHORT,
    Marks,
    complete,
    marks_of_sources,
    resolve,
    task_table,
)
from packprep.recipe import Recipe, Source, from_normalised
from packprep.sources.files import Files, absolute_prefix
from packprep.sources.formats import IdStream, check_format
from packprep.sources.passes import Passes
from packprep.sources.slices import (
    IN_STORE,
    MOST_PIECES,
    PlannedSource,
    format_name,
    pieces_of_all_uses,
)
from packprep.storage import Folder, LocalFolder, folder_at, is_url
from packprep.tokenizer.engines import load_engine
from packprep.tokenizer.engines.engine import Engine
from packprep.tokenizer.file import continuing_tokens
from packprep.tokenizer.roles import Vocabulary


def recipe_of(stored: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a stored plan, and check that its sources and tasks match the plan's.

    Raises:
        PlanError: If the recipe is invalid or does not match.
    """
    try:
        recipe = from_normalised(stored["recipe"], stored["engine"]["name"], stored["made_with"])
        for i, source in enumerate(recipe.sources):
            check_format(source.format, i)
            Passes.of(source, i)
        recipe = complete(recipe, stored["made_with"])
    except RecipeError as error:
        raise PlanError(f"plan.json: recipe: {error}") from error
    if [source.name for source in recipe.sources] != [
        source["name"] for source in stored["sources"]
    ]:
        raise PlanError("plan.json: its sources differ from its recipe's")
    # Later steps look up mode tokens and media kinds without a check.
    mode_tokens = {entry.mode_token for entry in recipe.tasks if entry.mode_token is not None}
    if not mode_tokens <= stored["vocabulary"]["mode_tokens"].keys():
        raise PlanError("plan.json: its vocabulary does not have the mode tokens of its tasks")
    if (stored["vocabulary"].get("media") or {}).keys() != (recipe.specials.media or {}).keys():
        raise PlanError("plan.json: its vocabulary does not have the media kinds of its recipe")
    return recipe


def _resolved(stored: Mapping[str, Any], recipe: Recipe) -> list[Mapping[str, Any]]:
    """Return, for each task of the recipe, the task's dict `resolved` in a stored plan.

    The dict has the values that planning computed once for the task, such as thresholds.

    Raises:
        PlanError: If the plan does not have exactly one task more than the recipe (`too_short`), or
            a dict is not valid for its task.
    """
    if len(stored["tasks"]) != len(recipe.tasks) + 1:
        raise PlanError(
            f"plan.json: it has {len(stored['tasks'])} tasks, but its recipe needs"
            f" {len(recipe.tasks) + 1}"
        )
    # Trainers resample noise with these values, so a noise schedule refuses unusable ones.
    resolved: list[Mapping[str, Any]] = []
    for task, entry in zip(stored["tasks"], recipe.tasks, strict=False):
        facts = task.get("resolved") if isinstance(task, dict) else None
        law, why = SCHEDULES.get(entry.objective), ""
        if isinstance(facts, dict) and law is not None:
            why = law.unusable(facts)
        if not isinstance(facts, dict) or why:
            raise PlanError(
                f"plan.json: task {entry.name!r}: resolved:"
                f" {why if isinstance(facts, dict) else 'not an object'}"
            )
        resolved.append(facts)
    return resolved


def ids_of(vocabulary: Vocabulary) -> Ids:
    """From a vocabulary, return the token ids that tasks need, such as pad, mask and sentinels."""
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
        continues=np.frombuffer(
            continuing_tokens(vocabulary.tokenizer_json, vocabulary.vocab_size), np.uint8
        ),
    )


def _vocabulary_of(stored: Mapping[str, Any], tokenizer_json: bytes, digest: str) -> Vocabulary:
    """Return the vocabulary that a plan stores.

    Args:
        stored: The plan's key "vocabulary".
        tokenizer_json: The contents of the dataset's tokenizer.json.
        digest: The digest of tokenizer.json.
    """
    kinds = sorted((stored.get("media") or {}).items())
    return Vocabulary(
        tokenizer_json=tokenizer_json,
        digest=digest,
        vocab_size=stored["vocab_size"],
        roles=stored["roles"],
        sentinels=tuple(stored["sentinels"]),
        mode_tokens=stored["mode_tokens"],
        added_tokens=tuple(stored["added_tokens"]),
        special_ids=tuple(stored["special_ids"]),
        notes=(),
        media={kind: tuple(ids) for kind, ids in kinds},
    )


def id_stream(source: Source, vocabulary: Vocabulary) -> IdStream:
    """Return the facts that the token streams of a source are read with."""
    return IdStream(source.token_dtype, vocabulary.vocab_size, vocabulary.roles.get("eos"))


def _files_of(source: Source, index: int, prefix: str, files: Sequence[dict[str, Any]]) -> Files:
    """Return the files of source number `index`. They are below the folder or URL `prefix`.

    `files` are the source's entries in the plan's key "files".
    """
    sizes, pieces = (
        np.fromiter((file[key] for file in files), np.int64, len(files))
        for key in ("size", "pieces")
    )
    piece_bytes = {
        k: file["piece_bytes"]
        for k, file in enumerate(files)
        if file.get("piece_bytes") is not None
    }
    names = [file["name"] for file in files]
    return Files(index, names, sizes, source.format, prefix, pieces, source.text_key, piece_bytes)


class Plan:
    """A plan that is ready to build: sources, tasks, vocabulary and engine.

    All attributes are derived from the stored plan, the dataset's tokenizer and removed.json.

    Attributes:
        stored: The values of plan.json except "files". The files are in `sources`.
        digest: The digest of the plan's canonical JSON.
        seen: `Files.seen` of each source: the modification times that its files must keep during
            the build. None if the files are not checked.
    """

    def __init__(
        self,
        stored: Mapping[str, Any],
        tokenizer_json: bytes,
        prefixes: Sequence[str] | None = None,
        plan_digest: str | None = None,
        removed: bytes = b"",
    ):
        """Load a plan.

        Args:
            stored: The plan's values.
            tokenizer_json: The dataset's tokenizer.json.
            prefixes: The folder or URL that has each source's files now; None for the plan's
                prefixes.
            plan_digest: The digest of the plan's canonical JSON, if it is already computed.
            removed: The contents of removed.json, if the plan has one.

        Raises:
            PlanError: If the tokenizer, removed.json or the recipe does not match the plan.
        """
        # All ids depend on the tokenizer, so compare its digest before anything is derived from it.
        digest = digest_of(tokenizer_json)
        if digest != stored["tokenizer"]["digest"]:
            raise PlanError(
                f"tokenizer.json has digest {digest}, but the plan names"
                f" {stored['tokenizer']['digest']}\n"
                "hint: restore the original file"
            )
        self.stored = {key: value for key, value in stored.items() if key != "files"}
        self.digest = plan_digest or digest_of(encode(as_stored(stored, LATER)))
        self.is_store = stored.get("kind") == STORE
        self.recipe = recipe_of(stored)
        self.max_bad_fraction = self.recipe.documents.max_bad_fraction
        """Maximum fraction of bad documents for publication. A resumed build may change it."""
        self.vocabulary = _vocabulary_of(stored["vocabulary"], tokenizer_json, digest)
        self.token_dtype = np.dtype(stored["token_dtype"])
        # Resolve the tasks again with the stored values. The result must equal the stored table
        # (P22).
        ids, values = ids_of(self.vocabulary), _resolved(stored, self.recipe)
        self.tasks: list[Task] = resolve(self.recipe, ids, self.vocabulary.mode_tokens, values)
        self.by_task = TaskTable.of(self.tasks)
        self.too_short = [task.name for task in self.tasks].index(TOO_SHORT)
        if json_value(task_table(self.tasks)) != json_value(stored["tasks"]):
            raise PlanError(
                "plan.json: its tasks do not match its recipe and vocabulary\n"
                "hint: restore the original file"
            )
        self.shards: int = stored["shards"]
        self.seen: Sequence[np.ndarray | None] | None = None
        # Source files may have moved since the plan was written.
        prefixes = prefixes or [source["prefix"] for source in stored["sources"]]
        self.sources = self._planned_sources(stored, prefixes)
        self.removed = Removed(self.sources, removed, self.removed_digest)
        if (count := pieces_of_all_uses(self.sources)) > MOST_PIECES:
            raise PlanError(
                f"plan.json: its sources have {count:,} splits, counted once per pass, but a plan"
                f" has at most {MOST_PIECES:,}\n"
                "hint: restore the original file"
            )

    def _planned_sources(
        self, stored: Mapping[str, Any], prefixes: Sequence[str]
    ) -> list[PlannedSource]:
        """Return the plan's sources with their files.

        `prefixes` has the folder or URL of each source's files.
        """
        sources, files = [], stored["files"]  # Files are in the order of their sources.
        source_of_file = np.fromiter((file["source"] for file in files), np.int64, len(files))
        bounds = np.searchsorted(source_of_file, np.arange(len(prefixes) + 1)).tolist()
        for i, (source, values) in enumerate(
            zip(self.recipe.sources, stored["sources"], strict=True)
        ):
            first_file, prefix = bounds[i], prefixes[i]
            planned_files = _files_of(source, i, prefix, files[first_file : bounds[i + 1]])
            planned = PlannedSource(
                source, i, prefix, planned_files, first_file, values, self.recipe.seed,
                self.is_store, open_store, tuple(self.vocabulary.media),
                id_stream(source, self.vocabulary),
            )  # fmt: skip
            # Refuse missing estimates here. The weights of splits and passes read them later.
            for kind in planned_files.kinds:
                if format_name(*kind) not in planned.ratios:
                    raise PlanError(
                        f"plan.json: sources[{i}]: ratios has no {format_name(*kind)}, the format"
                        " of its files"
                    )
            pass_count = planned.uses if isinstance(source.repeat, str) else None
            if (planned.pass_shares and len(planned.pass_shares)) != pass_count:
                raise PlanError(
                    f"plan.json: sources[{i}]: pass_shares does not match the passes of its repeat"
                )
            sources.append(planned)
        return sources

    @property
    def removed_digest(self) -> str | None:
        """Return the digest of removed.json, or None if no document was removed."""
        return removed_digest(self.stored)

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the result of `plan_digests` for this plan."""
        return plan_digests(self.stored, self.digest)

    @cached_property
    def engine(self) -> Engine:
        """Return the plan's engine, loaded at first access.

        If the plan's engine was checked against the reference engine and is not installed here in
        the same version, the reference engine is returned.

        Raises:
            PlanError: If neither engine can be used here, or the reference engine has another
                version.
        """
        return load_engine(
            self.stored["engine"], self.vocabulary, self.recipe.documents.special_text
        )

    @property
    def text_engine(self) -> Engine | None:
        """Return the engine, or None if all sources are in token stores and no text is read."""
        return None if all(source.in_store for source in self.sources) else self.engine

    @cached_property
    def cut_limits(self) -> CutLimits:
        """Return the limits that `cut` applies to documents of this plan."""
        return cut_limits(self.recipe, self.tasks)

    @cached_property
    def marks(self) -> list[Marks]:
        """Return, for each source, the ids that no document of the source may contain."""
        return marks_of_sources(self.recipe, self.tasks)


def plan_digests(stored: Mapping[str, Any], digest: str) -> tuple[str, ...]:
    """Return the plan digests that the receipts of an output may have.

    The first is the digest of the output's plan. After documents were removed, the plan digests of
    the earlier datasets follow, because shards that lost no document keep their earlier receipts.

    Args:
        stored: The output's plan as stored.
        digest: The digest of that plan.
    """
    return digest, *(entry["plan"] for entry in replaced(stored))


def open_store(location: str) -> TokenStore:
    """Open the token store at a path or URL.

    The result is cached in this process until the store's manifest changes.

    Raises:
        PlanError: If the location is not a token store, or the store is not finished.
        DatasetError: If the store's manifest is damaged.
    """
    manifest = b""
    with contextlib.suppress(OSError):  # `_opened_store` reports the error.
        manifest = folder_at(location).read(MANIFEST_NAME)
    return _opened_store(location, digest_of(manifest))


@lru_cache(maxsize=16)
def _opened_store(location: str, manifest_digest: str) -> TokenStore:
    folder = folder_at(location)
    plan_and_digest = stored_plan_and_digest(folder)
    if plan_and_digest is None or plan_and_digest[0]["kind"] != STORE:
        raise PlanError(
            f"{location} is not a token store\n"
            f"hint: make one with `packprep tokenize RECIPE --out {location}`, or give the new"
            " path of a moved one with --source NAME=store:PATH"
        )
    if not folder.exists(MANIFEST_NAME):
        raise PlanError(
            f"{location}: the token store is not finished\n"
            "hint: run the command that makes it again"
        )
    # Readers trust the manifest's shard digests. It must therefore match its own digest and this
    # plan.
    path = folder.path_of(MANIFEST_NAME)
    manifest = check_manifest(decode(folder.read(MANIFEST_NAME), path), path)
    actual_digest = own_digest(as_stored(manifest, LATER_IN_MANIFEST))
    if (
        manifest["digest"] != actual_digest
        or manifest["plan"]["digest"] != plan_and_digest[1]
        or manifest.get("kind") != STORE
    ):
        raise DatasetError(
            f"{path}: this file or the plan next to it was changed or damaged\n"
            f"hint: find the damage with `packprep verify {location}`, and restore the file"
        )
    return TokenStore(folder, open_plan(folder, found=plan_and_digest), manifest)


def stored_plan(out: str | os.PathLike | Folder) -> dict[str, Any] | None:
    """Return the contents of an output folder's plan.json, or None without one.

    Raises:
        PlanError: If any byte of the file has changed since it was written.
    """
    plan_and_digest = stored_plan_and_digest(out)
    return plan_and_digest[0] if plan_and_digest else None


def refuse_others(out: Folder) -> None:
    """Check that a new build can use a folder.

    Raises:
        PlanError: If the folder has files that packprep did not write, or is a link to a missing
            folder.
    """
    if isinstance(out, LocalFolder) and out.path.is_symlink() and not out.path.exists():
        raise PlanError(
            f"{out} is a link to {out.path.readlink()}, which does not exist\n"
            "hint: create that folder, or remove the link"
        )
    if other_files := out.others():
        raise PlanError(
            f"{out} has files that packprep did not write: {listed(other_files)}\n"
            "hint: give --out a new or empty folder"
        )


def datasets_in(place: str | os.PathLike | Folder) -> list[str]:
    """Return the folders of the datasets in an output folder.

    The first case that applies gives the result:

    - The folder has a plan or a manifest: the folder itself.
    - It has the folders seq_N of a build of several seq_lengths: one folder per seq_length, even if
      some builds have not started.
    - It has a mixture.json: the datasets that mixture.json names.
    - None of these: the folder itself.
    """
    out = folder_at(place)
    if out.exists(PLAN_NAME) or out.exists(MANIFEST_NAME):
        return [str(out)]
    names = [f"seq_{length}" for length in lengths_in(out)] or _mixed_in(out)
    return [f"{out}/{name}" for name in names] or [str(out)]


def lengths_in(out: Folder) -> list[int]:
    """Return the recipe's `seq_lengths`, such as [512, 2048], from the plans in the folders seq_N.

    Return [] without such plans. If the plans disagree, the most frequent value is returned.
    Unreadable plans are ignored.
    """
    candidates = []
    for name in [*out.others()] or _mixed_in(out):  # An object store lists nothing.
        if name.startswith("seq_") and "/" not in name:
            with contextlib.suppress(PackprepError):
                lengths = (stored_plan(f"{out}/{name}") or {"recipe": {}})["recipe"].get(
                    "seq_lengths"
                )
                if isinstance(lengths, list) and all(map(is_count, lengths)):
                    candidates.append(lengths)
    return max(candidates, key=candidates.count, default=[])


def _mixed_in(out: Folder) -> list[str]:
    """Return the folders that a folder's mixture.json names, or [] without such a file."""
    if not out.exists(MIXTURE_NAME):
        return []
    names: list[str] = mixture_of(out.read(MIXTURE_NAME), out.path_of(MIXTURE_NAME))["datasets"]
    return names


def stored_plan_and_digest(out: str | os.PathLike | Folder) -> tuple[dict[str, Any], str] | None:
    """Return the contents of an output's plan.json and the file's digest, or None without a plan.

    Raises:
        PlanError: As in `stored_plan`, or if the file cannot be read.
    """
    out = folder_at(out)
    path = out.path_of(PLAN_NAME)
    restore = "hint: restore the file, or build into another folder"
    try:
        data = out.read(PLAN_NAME)
        stored = decode(data, path)
    except FileNotFoundError:
        # At a URL, a missing object can also mean a missing bucket, which `reach` reports.
        out.reach()
        return None
    except DatasetError as error:
        raise PlanError(f"{error}\n{restore}") from None
    except OSError as error:
        if isinstance(error, NotADirectoryError):
            raise PlanError(
                f"{out} is a file or below one, but an output is a folder\n"
                "hint: name another folder"
            ) from None
        raise PlanError(
            f"{path}: {error.strerror}\nhint: make it readable, or build into another folder"
        ) from None
    if (
        not isinstance(stored, dict)
        or stored.get("format") != FORMAT
        or stored.get("version") != VERSION
    ):
        raise PlanError(f"{path}: not a plan of this packprep\nhint: build into another folder")
    # Compare the digest before any value, so that damage is reported as damage.
    digest = own_digest(stored)
    if stored.get("digest") != digest:
        raise PlanError(
            f"{path}: changed or damaged, because it has the digest {stored.get('digest')!r}, but"
            f" its contents have {digest}\n"
            f"{restore}"
        )
    check_plan(stored, path)
    return with_defaults(stored, LATER), digest_of(data)


def open_plan(
    out: str | os.PathLike | Folder,
    prefixes: Sequence[str] | None = None,
    found: tuple[Mapping[str, Any], str] | None = None,
) -> Plan:
    """Load the plan of an output folder.

    Args:
        out: The output folder.
        prefixes: The folder or URL that has each source's files now; None for the plan's prefixes.
        found: The result of `stored_plan_and_digest`, if it is already known.

    Raises:
        PlanError: If the plan, the tokenizer or removed.json is missing or damaged.
    """
    out = folder_at(out)
    found = found or stored_plan_and_digest(out)
    if found is None:
        raise PlanError(
            f"{out}: no plan.json, so this is not a packprep output\n"
            f"hint: start a build with `packprep build … --out {out}`"
        )
    stored, digest = found
    name = stored["tokenizer"]["file"]
    try:
        tokenizer_json = out.read(name)
    except OSError as error:
        raise PlanError(
            f"{out.path_of(name)}: {error.strerror}, but the plan needs this file\n"
            "hint: restore it, or build into another folder"
        ) from None
    # A rebuild erases the removed documents again, so the plan needs their list.
    removed = b""
    if removed_digest(stored):
        try:
            removed = out.read(REMOVED_NAME)
        except OSError as error:
            raise PlanError(
                f"{out.path_of(REMOVED_NAME)}: {error.strerror}, but the plan needs this file\n"
                "hint: restore it"
            ) from None
    return Plan(stored, tokenizer_json, prefixes, digest, removed)


def moved_prefixes(stored: Mapping[str, Any], moved: Mapping[str, str]) -> list[str]:
    """Return the folder or URL of each source's files: from `moved`, otherwise from the plan.

    Raises:
        RecipeError: If `moved` has a name that is not a source.
    """
    names = [source["name"] for source in stored["sources"]]
    for name in moved:
        if name not in names:
            raise RecipeError(
                f"--source {name}=…: the dataset has no source of that name, only"
                f" {', '.join(names)}\n"
                f"hint: give the name of a source, as in --source {names[0]}=…"
            )
    return [prefix_of(moved.get(source["name"], source["prefix"])) for source in stored["sources"]]


def lacks_fields(stored: Mapping[str, Any], index: int) -> bool:
    """Return whether only a token store can choose the documents of a source as the build did.

    `packprep remove` erases the fields of documents in a store. If a dataset was built from the
    store afterwards, an expression read null for these documents, but files have the values.

    Args:
        stored: The values of the dataset's plan.
        index: Index of the source.
    """
    source = stored["recipe"]["sources"][index]
    by_fields = source.get("where") is not None or isinstance(source.get("repeat"), str)
    removed = stored.get("removed")
    if not removed or not by_fields or stored["sources"][index].get("store") is None:
        return False
    # The oldest entry describes the build. Without entries, the build itself already had
    # removed.json.
    versions = [entry.get("removed") for entry in removed["replaces"]]
    return [*versions, removed["digest"]][0] is not None


_LOOKED_AT = 1000


def at_text(name: str, prefix: str) -> str:
    """Return the folder or URL of the text files of source `name`.

    If `prefix` is a token store ("store:…"), return the folder of the files that the store was made
    from. Return `prefix` if it is not a token store, or if the files are not on this machine.
    """
    if prefix.startswith(IN_STORE):
        with contextlib.suppress(PackprepError, OSError):
            store_source = next(
                source
                for source in open_store(prefix.removeprefix(IN_STORE)).plan.sources
                if source.name == name
            )
            paths = (
                os.path.join(store_source.prefix, file)
                for file in store_source.files.names[:_LOOKED_AT]
            )
            if not is_url(store_source.prefix) and all(map(os.path.exists, paths)):
                return store_source.prefix
    return prefix


def prefix_of(prefix: str) -> str:
    """Return a source's prefix as a plan stores it.

    This is the absolute path or URL of the source's files. For a token store, it is "store:" and
    the store's absolute path or URL.
    """
    if prefix.startswith(IN_STORE):
        return IN_STORE + absolute_prefix(prefix.removeprefix(IN_STORE))
    return absolute_prefix(prefix)
