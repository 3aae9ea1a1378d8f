"""A plan made ready to work: what every process makes of plan.json and the dataset's tokenizer, once."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from packprep.building.inputs import ids_of
from packprep.building.plan import mark_reader, plain
from packprep.building.plan_form import LATER
from packprep.corpus.conversations import MarkReader
from packprep.corpus.engines.engine import Engine
from packprep.corpus.engines.registry import load_engine
from packprep.corpus.files import Files
from packprep.corpus.planning import MOST_PIECES, PlannedSource, format_name, pieces_of_all_uses
from packprep.corpus.vocabulary import Vocabulary
from packprep.dataset.json_files import LAW_VERSION, PLAN_NAME, as_stored, encode, other_law
from packprep.dataset.laws import unusable_facts
from packprep.digests import digest_of
from packprep.errors import PlanError, RecipeError
from packprep.objectives.objective import Task
from packprep.objectives.tasks import complete, resolve, task_table
from packprep.recipe import Recipe, from_normalised


def recipe_of(plan: Mapping[str, Any]) -> Recipe:
    """The recipe of a plan, and its sources and tasks as many as the plan's; PlanError if it is none."""
    try:
        stored = from_normalised(plan["recipe"], plan["engine"]["name"], plan["made_with"])
        recipe = complete(stored, plan["made_with"])
    except RecipeError as error:
        raise PlanError(f"plan.json: recipe: {error}") from error
    if [source.name for source in recipe.sources] != [source["name"] for source in plan["sources"]]:
        raise PlanError("plan.json: its sources are not those of its recipe")
    wanted = {entry.mode_token for entry in recipe.tasks if entry.mode_token is not None}
    if not wanted <= plan["vocabulary"]["mode_tokens"].keys():
        raise PlanError("plan.json: its vocabulary has not the mode tokens of its tasks")
    return recipe


def _resolved(plan: Mapping[str, Any], recipe: Recipe) -> list[Mapping[str, Any]]:
    """What the plan stored for each task; PlanError if it cannot be that."""
    if len(plan["tasks"]) != len(recipe.tasks) + 1:
        raise PlanError(f"plan.json: it has {len(plan['tasks'])} tasks and its recipe needs {len(recipe.tasks) + 1}")
    resolved: list[Mapping[str, Any]] = []
    for task, entry in zip(plan["tasks"], recipe.tasks, strict=False):
        facts = task.get("resolved") if isinstance(task, dict) else None
        if not isinstance(facts, dict) or (why := unusable_facts(entry.objective, facts)):
            raise PlanError(
                f"plan.json: task {entry.name!r}: resolved: {why if isinstance(facts, dict) else 'no object'}"
            )
        resolved.append(facts)
    return resolved


def check_law(plan: Mapping[str, Any], where: str) -> None:
    """PlanError unless shards, or segments, of a plan can be made here: those of an older law are read only."""
    if plan["law_version"] != LAW_VERSION:
        raise PlanError(
            f"{where} has {other_law(plan['law_version'], plan['made_with'])}, or build into another folder"
        )


class Job:
    """A plan made ready to work: sources, tasks, vocabulary and engine, from the plan and the dataset's tokenizer alone.

    plan: the plan's values but for its files, which are in `sources`. digest: the plan's. law: its law_version; of an older
    one than LAW_VERSION only what is stored can be read: there is no engine.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        tokenizer_json: bytes,
        prefixes: Sequence[str] | None = None,
        plan_digest: str | None = None,
    ):
        """prefixes: where the sources' files lie now. plan_digest: of the plan's canonical JSON, where that is known."""
        digest = digest_of(tokenizer_json)
        if digest != plan["tokenizer"]["digest"]:
            raise PlanError(
                f"tokenizer.json has digest {digest} and the plan names {plan['tokenizer']['digest']}: put the right file back"
            )
        self.plan = {key: value for key, value in plan.items() if key != "files"}
        self.digest = plan_digest or digest_of(encode(as_stored(plan, LATER)))
        self.law: int = plan["law_version"]
        self.recipe = recipe_of(plan)
        stored = plan["vocabulary"]
        self.vocabulary = Vocabulary(
            tokenizer_json=tokenizer_json,
            digest=digest,
            vocab_size=stored["vocab_size"],
            roles=stored["roles"],
            sentinels=tuple(stored["sentinels"]),
            mode_tokens=stored["mode_tokens"],
            added_tokens=tuple(stored["added_tokens"]),
            special_ids=tuple(stored["special_ids"]),
            notes=(),
        )
        self.token_dtype = np.dtype(plan["token_dtype"])
        self.tasks: list[Task] = resolve(
            self.recipe,
            ids_of(self.vocabulary, self.law),
            self.vocabulary.mode_tokens,
            _resolved(plan, self.recipe),
        )
        if plain(task_table(self.tasks)) != plain(plan["tasks"]):
            raise PlanError("plan.json: its tasks are not those of its recipe and vocabulary; put the right file back")
        self.shards: int = plan["shards"]
        self.seen: Sequence[np.ndarray | None] | None = None  # by source, `Files.seen` of files that must stay so
        self.sources: list[PlannedSource] = []
        files = plan["files"]  # by source
        of_source = np.fromiter((file["source"] for file in files), np.int64, len(files))
        for i, (source, resolved) in enumerate(zip(self.recipe.sources, plan["sources"], strict=True)):
            first, end = map(int, np.searchsorted(of_source, [i, i + 1]))
            own = files[first:end]
            sizes, pieces = (np.fromiter((file[key] for file in own), np.int64, len(own)) for key in ("size", "pieces"))
            prefix = prefixes[i] if prefixes else resolved["prefix"]
            known = {k: held for k, file in enumerate(own) if (held := file.get("piece_bytes")) is not None}
            names, seed = [file["name"] for file in own], self.recipe.seed
            listed = Files(i, names, sizes, source.format, prefix, pieces, source.text_key, known)
            self.sources.append(PlannedSource(source, i, prefix, listed, first, resolved, seed, law=self.law))
            for kind in listed.kinds:
                if format_name(*kind) not in self.sources[-1].ratios:
                    raise PlanError(f"plan.json: sources[{i}]: ratios has no {format_name(*kind)}, which its files are")
        if (count := pieces_of_all_uses(self.sources)) > MOST_PIECES:
            raise PlanError(
                f"plan.json: its sources come to {count:,} pieces, once for each use, and no plan has more than "
                f"{MOST_PIECES:,}; put the right file back"
            )

    @cached_property
    def engine(self) -> Engine:
        """The plan's engine, loaded at first use; refused if this installation has another version of it, or makes another law:
        without it nothing is made, nor made again."""
        check_law(self.plan, PLAN_NAME)
        return load_engine(self.plan["engine"], self.vocabulary, self.recipe.documents.special_text)

    @cached_property
    def marks(self) -> MarkReader | None:
        """Reads loss_spans and messages, with the plan's chat template; None where the recipe ignores them."""
        return mark_reader(self.recipe, self.plan["chat_template"])
