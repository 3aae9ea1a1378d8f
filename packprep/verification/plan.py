"""P22: the plan follows from what it is said to follow from.

From its recipe, tokenizer.json and its estimates everything else of it is worked out again, by what made it. With
`--replay all` the patterns list the files again, the files' pieces are counted, and the text that was read is compared with
the estimates. A recipe from elsewhere says whether the stored one is the user's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from packprep.building.inputs import ids_of
from packprep.building.job import Job
from packprep.building.plan import changed_keys, follows, plain, repeats
from packprep.building.publication import bad_documents, too_many_bad
from packprep.corpus.calibration import highest_ratio
from packprep.corpus.chat_templates import find_template
from packprep.corpus.files import Files
from packprep.corpus.finding import below_one_folder, find_below
from packprep.corpus.planning import PlannedSource, format_name
from packprep.corpus.readers import TABLES
from packprep.corpus.tokenizer_files import HINT_KEYS
from packprep.corpus.tokenizer_json import texts_of_ids
from packprep.corpus.vocabulary import Needs, Vocabulary, resolve_again, resolve_vocabulary
from packprep.dataset.json_files import MANIFEST_NAME, PLAN_NAME
from packprep.errors import PackprepError, PlanError
from packprep.objectives.tasks import mode_tokens_used, resolve, roles_used, sentinels_used, whole_recipe
from packprep.recipe import Recipe, normalised, without_places
from packprep.verification.report import Faults

TOLERANCE = 4e-9
"""Of thresholds and rates: libraries of mathematics differ in their last digits, and law 1 interpolated to 2e-9."""
STANDARD_ERRORS, LEAST_PART = 3, 0.01
"""How far the text that was read may be from the plan's, the larger of both."""
FEWEST = 1000
"""Documents of which a coin for each, as `sample` throws, keeps a part evenly enough for that."""


def check_plan_follows(job: Job, faults: Faults) -> None:
    """P22 of plan.json, from itself, its recipe and tokenizer.json alone."""
    try:
        expected = _worked_out_again(job)
    except PackprepError as error:
        faults.add("P22", PLAN_NAME, f"its recipe, tokenizer and files give no plan: {error}")
        return
    stored = plain({key: job.plan[key] for key in expected})
    stored["sources"] = [
        {key: source[key] for key in wanted}
        for source, wanted in zip(stored["sources"], expected["sources"], strict=True)
    ]
    for task, wanted in zip(stored["tasks"], expected["tasks"], strict=True):
        if _is_near(task["resolved"], wanted["resolved"]):
            wanted["resolved"] = task["resolved"]
    for message in changed_keys(expected, stored, "{} is {} when it is worked out again, and {} in the plan"):
        faults.add("P22", PLAN_NAME, message)


def _worked_out_again(job: Job) -> dict[str, Any]:
    """What `follows` gives of the plan's recipe, tokenizer, files and estimates; PackprepError where that gives no plan."""
    plan, recipe = job.plan, job.recipe
    lacking = [key for source in plan["sources"] for key in ("tokens_per_byte", "patterns") if source[key] is None]
    if job.law > 1 and (lacking or plan["beside_tokenizer"] is None):
        raise PlanError(f"key {(lacking or ['beside_tokenizer'])[0]!r} is missing")
    vocabulary = _vocabulary(job)
    tasks = resolve(recipe, ids_of(vocabulary, job.law), vocabulary.mode_tokens)
    tokens_per_byte = [source["tokens_per_byte"] for source in plan["sources"]]
    if job.law == 1:  # which kept no tokens per byte, on which shares and the shards' size depend
        output = recipe.output
        if output.shard_text_bytes == "auto":
            output = replace(output, shard_text_bytes=plan["shard_text_bytes"])
        planned = [
            s.source if s.source.share is None else replace(s.source, share=None, repeat=s.repeat) for s in job.sources
        ]
        recipe = replace(recipe, output=output, sources=tuple(planned))
        tokens_per_byte = [source["tokens"] / max(source["text_bytes"], 1) for source in plan["sources"]]
    for source in job.sources:
        _check_ratios(source)
    once = [int(source.weights().sum()) for source in job.sources]
    for source, repeat in zip(job.sources, repeats(recipe, once, tokens_per_byte), strict=True):
        if source.repeat != repeat:  # before anything as long as all uses is made
            raise PlanError(f"source {source.name!r} has repeat {repeat} by them, and {source.repeat} in the plan")
    return plain(follows(recipe, vocabulary, tasks, job.sources, tokens_per_byte))


def _vocabulary(job: Job) -> Vocabulary:
    """The vocabulary that the recipe makes of tokenizer.json, less what was added to it."""
    recipe, stored, beside = job.recipe, job.vocabulary, job.plan["beside_tokenizer"]
    if beside is None:  # law 1 kept nothing of these files: tokens that play eos, bos, pad and mask are believed
        texts = texts_of_ids(stored.tokenizer_json, list(stored.roles.values()))
        roles = {role: texts[id] for role, id in stored.roles.items() if role in HINT_KEYS and id in texts}
        beside = [{"file": "", "digest": "", "roles": roles}]
    found = resolve_again(
        stored.tokenizer_json, len(stored.added_tokens), beside, recipe.tokenizer, recipe.specials, _needs(recipe)
    )
    if found.digest != stored.digest:
        raise PlanError("tokenizer.json is not what adding its added_tokens to the tokenizer gives")
    return found


def _needs(recipe: Recipe) -> Needs:
    return Needs(roles_used(recipe), mode_tokens_used(recipe), sentinels_used(recipe))


def _check_ratios(source: PlannedSource) -> None:
    """PlanError for ratios of other formats than the source's, or beyond what calibration gives."""
    formats = {format_name(*kind) for kind in source.files.kinds}
    most = highest_ratio(source)
    held = max((max(held, default=0) for held in source.files.piece_bytes.values()), default=0)
    for name, ratio in source.ratios.items():
        if name not in formats or not 1 <= ratio <= most or held * ratio >= 1 << 62:
            raise PlanError(f"source {source.name!r} has the ratio {ratio} for {name}, which no sample gives")


def _is_near(stored: Any, expected: Any) -> bool:
    """Whether values are the same but for the last digits of numbers, which libraries of mathematics give differently."""
    if isinstance(stored, dict) and isinstance(expected, dict):
        return stored.keys() == expected.keys() and all(_is_near(stored[key], expected[key]) for key in stored)
    if isinstance(stored, list) and isinstance(expected, list):
        return len(stored) == len(expected) and all(map(_is_near, stored, expected))
    if type(stored) is int and type(expected) is int:
        return abs(stored - expected) <= 1 + TOLERANCE * abs(expected)
    if type(stored) is float and type(expected) is float:
        return abs(stored - expected) <= TOLERANCE
    return bool(stored == expected)


def check_reject_limit(job: Job, total: Mapping[str, Any], faults: Faults) -> None:
    """P22 of dataset.json: so many bad documents as the ledgers' sum has are let pass."""
    read, used, reasons = bad_documents(total)
    bad, fraction = sum(reasons.values()), job.recipe.documents.max_bad_fraction
    if too_many_bad(bad, read, used, fraction, job.law):
        message = f"{bad} of {read} documents are bad, more than documents.max_bad_fraction = {fraction:g} lets pass"
        faults.add("P22", MANIFEST_NAME, message)


def check_inputs(job: Job, faults: Faults) -> None:
    """P22 of plan.json, from the sources: its files are those that its patterns find, with the pieces that they have."""
    for source, planned in zip(job.sources, job.plan["sources"], strict=True):
        try:
            _, found = find_below(source.source, source.index, source.prefix, planned["patterns"])
            here, there = (dict(zip(files.names, files.sizes.tolist(), strict=True)) for files in (found, source.files))
            for name in sorted(here.keys() ^ there.keys()):
                which = (
                    "its patterns find {!r}, which is not in it" if name in here else "its patterns do not find {!r}"
                )
                faults.add("P22", PLAN_NAME, f"source {source.name}: {which.format(name)}")
            _check_pieces(source, [name for name, size in there.items() if here.get(name) == size], faults)
        except PackprepError as error:
            faults.add("P22", PLAN_NAME, f"source {source.name}: {error}")


def _check_pieces(source: PlannedSource, names: Sequence[str], faults: Faults) -> None:
    """The pieces of these files, which have the plan's sizes, and of tables what each holds, are the plan's."""
    at = {name: i for i, name in enumerate(source.files.names)}
    sizes = source.files.sizes[[at[name] for name in names]]
    own = Files(source.index, names, sizes, source.source.format, source.prefix, text_key=source.source.text_key)
    for k, (name, pieces) in enumerate(zip(names, own.pieces.tolist(), strict=True)):
        i = at[name]
        message = f"source {source.name}: {name!r} has {pieces} pieces"
        if pieces != source.files.pieces[i]:
            faults.add("P22", PLAN_NAME, message, value=int(source.files.pieces[i]))
        elif own.formats[k][0] in TABLES and list(own.piece_bytes.get(k, ())) != list(
            source.files.piece_bytes.get(i, ())
        ):
            faults.add("P22", PLAN_NAME, f"{message}, which do not hold what the plan says")


def check_text_bytes(job: Job, total: Mapping[str, Any], read: Mapping[str, int], faults: Faults) -> None:
    """P22 of plan.json, once all shards were read again: each source has about the text that the plan expects of it.

    total: the ledgers' sum. read: source → bytes of text in all shards.
    """
    for source, planned in zip(job.sources, job.plan["sources"], strict=True):
        documents = total["sources"][source.name]["documents"]["read"]
        by_chance = tuple(source.source.sample) != (0.0, 1.0)
        ratios, expected = source.ratios.values(), planned["text_bytes"]
        if not planned["documents"]:  # the sample met none
            continue
        if (by_chance and documents < FEWEST) or max(ratios, default=0) >= highest_ratio(source):
            continue
        least = min(ratios, default=1)  # 1 also stands for less
        rounding = 0.5 / least if least > 1 else 1.0
        part = max(STANDARD_ERRORS * (planned["relative_error"] or 0.0), LEAST_PART) + rounding
        rounded = 2 * len(source.pieces) * source.uses
        if abs(read[source.name] - expected) > part * expected + rounded:
            message = f"source {source.name}: the shards have {read[source.name]} bytes of its text"
            faults.add("P22", PLAN_NAME, f"{message}; the plan expects {expected}, to {part:.1%}", value=expected)


def check_recipe(job: Job, recipe: Recipe, faults: Faults) -> None:
    """P22 by a recipe from elsewhere: it is the stored one, and plan and tokenizer are what it names."""
    words = "{} is {} in the recipe that was given, and {} in the stored one"
    now, stored = (plain(without_places(whole_recipe(r))) for r in (normalised(recipe), job.plan["recipe"]))
    found = changed_keys(now, stored, words)
    for source in recipe.sources:
        patterns = below_one_folder(source, recipe.base)[1]
        planned = [s["patterns"] for s in job.plan["sources"] if s["name"] == source.name and s["patterns"] is not None]
        if planned and planned[0] != patterns:
            found.append(
                f"the patterns of source {source.name} are {patterns} in the recipe that was given, and {planned[0]}"
            )
    vocabulary = resolve_vocabulary(recipe.tokenizer, recipe.base, recipe.specials, _needs(recipe))
    if vocabulary.digest != job.vocabulary.digest:
        found.append(f"the tokenizer of the recipe that was given has the digest {vocabulary.digest}")
    if job.plan["beside_tokenizer"] not in (None, plain(vocabulary.beside)):
        found.append("the files beside the tokenizer of the recipe that was given are others")
    template = None
    if recipe.documents.loss_spans == "use":
        template = find_template(recipe.documents.chat_template, recipe.base, recipe.tokenizer)
    if template != job.plan["chat_template"]:
        found.append("the chat template of the recipe that was given is another")
    for message in found:
        faults.add("P22", PLAN_NAME, message)
