"""Complete and check the recipe's tasks, then resolve ids, capacities and thresholds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, compress
from typing import Any

import numpy as np

from packprep.dataset.epochs.noise import Noised
from packprep.dataset.epochs.resampling import MovedTask
from packprep.dataset.epochs.token_slots import ROLES as FIM_ROLES
from packprep.dataset.epochs.token_slots import SPECIAL, SpecialIds, Stretches, misfit
from packprep.errors import RecipeError
from packprep.format.json_files import as_stored, unknown_key, with_defaults
from packprep.objectives import OWN, REGISTRY, find
from packprep.objectives.objective import Bodies, BodySlots, Ids, Objective, Parameter, Task
from packprep.recipe import (
    KEYS,
    LATER,
    Recipe,
    json_schema,
    misplaced,
    presets,
    tasks_named,
    unknown,
)

TOO_SHORT = "too_short"
SHORTEST = 3
"""Segments with fewer content tokens go to the implicit task `too_short`.

This task is causal and has no mode token.
"""


def complete(recipe: Recipe, made_with: Any = None) -> Recipe:
    """Return the recipe with all task parameters, converted to their types and checked.

    Parameters that a task does not set get their defaults.

    Args:
        recipe: The recipe.
        made_with: The versions of the plan that contains the recipe, or None if a user wrote it.

    Returns:
        The completed recipe.

    Raises:
        RecipeError: If an objective or a parameter is unknown, a value is out of range, or
            parameters exclude each other.
    """
    tasks = []
    for entry in recipe.tasks:
        place = f"task {entry.name!r}"
        objective = find(entry.objective)
        if objective is None:
            fault = unknown("objective", entry.objective, list(REGISTRY))
            raise RecipeError(f"{place}: {fault}", ("tasks", entry.objective, "objective"))
        # Refuse unknown keys before any value is read.
        declared = {parameter.name: parameter for parameter in objective.parameters}
        for name in entry.parameters:
            if name not in declared:
                raise _unknown_parameter(entry.name, objective, name, made_with)
        parameters = {}
        name = ""
        # `name` is the key that is read, so that an error points to it. A conflict of keys has no
        # name.
        try:
            for name, parameter in declared.items():
                value = entry.parameters.get(name, parameter.default)
                parameters[name] = parameter.accept(value, place)
            name = ""
            if objective.check:
                objective.check(parameters, place)
        except RecipeError as error:
            error.key = ("tasks", entry.name, *([name] if name else []))
            raise
        tasks.append(replace(entry, parameters=parameters, later=objective.later))
    return replace(recipe, tasks=tuple(tasks))


def _unknown_parameter(task: str, objective: Objective, name: str, made_with: Any) -> RecipeError:
    """Return the error for a key that a task's objective does not have."""
    place = f"task {task!r}"
    if made_with is not None and objective.name in OWN:
        return RecipeError(f"{place}: {unknown_key(name, made_with)}")
    if made_with is not None:
        return RecipeError(
            f"{place}: key {name!r} is unknown to the installed objective {objective.name}\n"
            "hint: use the version that wrote it"
        )
    fault = unknown(
        f"key of {objective.name}",
        name,
        [*KEYS["tasks"], *(parameter.name for parameter in objective.parameters)],
    )
    if misplaced(name):
        fault = f"unknown key of {objective.name} {name!r}: {misplaced(name)}"
    return RecipeError(f"{place}: {fault}", ("tasks", task, name))


def needs_of(recipe: Recipe) -> tuple[frozenset[str], tuple[str, ...], int]:
    """Return the special tokens that a completed recipe needs from a vocabulary.

    Returns:
        A tuple (roles, mode_tokens, sentinels). `roles` has the special tokens that documents and
        tasks write: eos, bos, pad, mask, fim_prefix, … `mode_tokens` has each mode token once, in
        the order of the tasks. `sentinels` is the number of sentinels that the longest segment of
        any task could use.
    """
    roles = {"pad"}
    if recipe.documents.eos_after_document:
        roles.add("eos")
    if recipe.documents.prepend_bos:
        roles.add("bos")
    mode_tokens: dict[str, None] = {}
    # The formula gets more sentinels than a segment can use, so that they do not limit its length.
    sentinel_count, plenty = 0, Ids(0, 0, -1, -1, -1, np.zeros(1 << 24, np.int8))
    for entry in recipe.tasks:
        objective = REGISTRY[entry.objective]
        if objective.roles:
            roles |= objective.roles(entry.parameters)
        if entry.mode_token is not None:
            mode_tokens[entry.mode_token] = None
        if objective.sentinels:
            mode_token = -1 if entry.mode_token is None else 0
            task = Task(entry.name, objective, entry.weight, entry.parameters, mode_token, plenty)
            longest = task.capacity(
                recipe.lengths[-1], 0, int(recipe.documents.eos_after_segment), recipe.packing.sides
            )
            sentinel_count = max(sentinel_count, objective.sentinels(entry.parameters, longest))
    return frozenset(roles), tuple(mode_tokens), sentinel_count


def role_id(ids: Ids, role: str) -> int:
    """Return the id of a special token.

    Args:
        ids: The ids that objectives write.
        role: Name of the special token, for example "eos" or "fim_prefix".

    Returns:
        The id, or −1 if the tokenizer has no such token.
    """
    fim = dict(zip(("fim_prefix", "fim_middle", "fim_suffix"), ids.fim, strict=True))
    return fim[role] if role in fim else getattr(ids, role)


def resolve(
    recipe: Recipe,
    ids: Ids,
    mode_tokens: Mapping[str, int],
    resolved: Sequence[Mapping[str, Any]] | None = None,
) -> list[Task]:
    """Return the recipe's tasks, followed by the causal task for documents that are too short.

    Args:
        recipe: A completed recipe.
        ids: The ids that objectives write.
        mode_tokens: Text → id of the mode tokens.
        resolved: The values that the plan stored for each task, or None to compute them.

    Returns:
        The tasks.

    Raises:
        RecipeError: If a task cannot work with these ids or this seq_length.
    """
    keeps_prefix = recipe.packing.sides is not None
    tasks = []
    for i, entry in enumerate(recipe.tasks):
        objective = REGISTRY[entry.objective]
        mode_token = -1 if entry.mode_token is None else mode_tokens[entry.mode_token]
        # Use the plan's values if there are any, because computing them again may change their last
        # digits.
        values: Mapping[str, Any] = {}
        if objective.resolve:
            values = objective.resolve(entry.parameters, ids) if resolved is None else resolved[i]
        properties = entry.name, objective, entry.weight, entry.parameters, mode_token, ids
        tasks.append(Task(*properties, values, keeps_prefix))
    for task in tasks:
        _check_sentinels(task)
        _check_packing(recipe, task)
        _check_roles(task)
        _check_capacity(recipe, task)
    return [*tasks, Task(TOO_SHORT, REGISTRY["causal"], 0.0, {}, -1, ids)]


def _check_sentinels(task: Task) -> None:
    """Check that there are enough sentinels for the shortest segments of the task.

    Raises:
        RecipeError: If these segments need more sentinels.
    """
    if not task.objective.sentinels:
        return
    fewest, sentinels = task.objective.sentinels(task.parameters, SHORTEST), task.ids.sentinels
    if len(sentinels) < fewest:
        raise RecipeError(
            f"task {task.name!r} needs at least {fewest} sentinels, but there are"
            f" {len(sentinels)}\n"
            "hint: set specials.sentinels"
        )


def _check_packing(recipe: Recipe, task: Task) -> None:
    """Check that the recipe's packing suits the task.

    Raises:
        RecipeError: If packing is by concat and the task adds a variable number of slots. It is
            also raised if rows have an encoder and a decoder sequence, and the task has no prefix.
    """
    place = f"task {task.name!r}"
    if recipe.packing.algorithm == "concat" and not task.objective.constant:
        raise RecipeError(
            f"{place}: concat cuts at row ends, which requires a length of n + constant, but"
            f" {task.objective.name} has another length formula\n"
            'hint: use packing.algorithm = "best_fit"'
        )
    if recipe.packing.sides is not None and task.objective.most_sides is None:
        suitable_names = ", ".join(
            sorted(name for name, objective in REGISTRY.items() if objective.most_sides)
        )
        raise RecipeError(
            f"{place}: packing.encoder_length needs prefixes as encoder inputs, and"
            f" {task.objective.name} has no prefix\n"
            f"hint: use tasks of {suitable_names}, or leave encoder_length and decoder_length out"
        )


def _check_roles(task: Task) -> None:
    """Check that the vocabulary has the special tokens that the task writes.

    Raises:
        RecipeError: If a special token is missing.
    """
    roles = task.objective.roles(task.parameters) if task.objective.roles else ()
    missing = sorted(role for role in roles if role_id(task.ids, role) < 0)
    if missing:
        raise RecipeError(
            f"task {task.name!r} needs a token for {', '.join(missing)}\nhint: set it in [specials]"
        )


def _check_capacity(recipe: Recipe, task: Task) -> None:
    """Check that the task's segments in the shortest rows are long enough.

    A segment must have space for 2 · min_tail − 1 content tokens. With less space, a long document
    could not always be cut into chunks of at least min_tail tokens.

    Raises:
        RecipeError: If a segment has less space.
    """
    documents, sides = recipe.documents, recipe.packing.sides
    bos, eos = int(documents.prepend_bos), int(documents.eos_after_document)
    shortest = replace(recipe, seq_length=recipe.lengths[0])
    most_tokens, needed = capacity(shortest, task, bos, eos), 2 * recipe.min_tail - 1
    if most_tokens >= needed:
        _check_fill(shortest, task, bos)
        return
    # Name max_tokens if it is too small by itself, because longer rows would not help.
    if 0 < documents.max_tokens < needed:
        raise RecipeError(
            f"documents.max_tokens = {documents.max_tokens}: with documents.min_tokens ="
            f" {documents.min_tokens}, cutting a document needs at least {needed}\n"
            f"hint: raise documents.max_tokens to {needed}"
        )
    row, key = f"seq_length = {shortest.seq_length}", "seq_length"
    if sides is not None:
        row = "encoder_length = {} and decoder_length = {}".format(*sides)
        key = f"{_tighter(task, sides, most_tokens + 1, bos, eos)}_length"
    raise RecipeError(
        f"task {task.name!r}: a row of {row} fits {most_tokens} of its tokens, but cutting a"
        f" document needs at least {needed}, which is 2 × max(3, documents.min_tokens) - 1\n"
        f"hint: raise {key}"
    )


def _check_fill(recipe: Recipe, task: Task, bos: int) -> None:
    """Check that the end of every text and its last block, filled up with eos, fit into a segment.

    Raises:
        RecipeError: If a segment has less space.
    """
    if task.parameters.get("eos_fill") != "block":
        return
    length, tail = task.parameters["block_length"], 2 * recipe.min_tail - 1
    if (room := inner_capacity(recipe, task, bos)) < length + tail:
        raise RecipeError(
            f"task {task.name!r}: a segment in rows of seq_length = {recipe.seq_length} holds"
            f" {room} tokens, but eos_fill needs room for a block of {length} and {tail} tokens\n"
            "hint: raise seq_length, or reduce block_length"
        )


def capacity(recipe: Recipe, task: Task, bos: int, eos: int) -> int:
    """Return the most content tokens that a segment of the task can have in this recipe.

    Args:
        recipe: A completed recipe.
        task: The task.
        bos: Slots of the segment's bos, 0 or 1.
        eos: Slots of the segment's eos, 0 or 1.

    Returns:
        The number of tokens.
    """
    most_tokens = task.capacity(recipe.seq_length, bos, eos, recipe.packing.sides)
    return min(most_tokens, recipe.documents.max_tokens or most_tokens)


def _tighter(task: Task, sides: tuple[int, int], n: int, bos: int, eos: int) -> str:
    """Return "encoder" or "decoder": the sequence that limits segments of n tokens more.

    This is the sequence in which n tokens can fill the greater share of the slots.
    """
    assert task.objective.most_sides is not None
    prefix, continuation = task.objective.most_sides(task, n)
    encoder_slots, decoder_slots = prefix + bos + task.mode, continuation + eos
    return "encoder" if encoder_slots * sides[1] > decoder_slots * sides[0] else "decoder"


def pieces_of_a_row(recipe: Recipe, task: Task) -> int:
    """Return how many chunks of a long document should share a row.

    The sentinels, max_tokens or the objective may limit the length of a chunk. If the longest chunk
    would leave a sixteenth of the row or more empty, several chunks share the row. Their number is
    the smallest number that can fill the row, but at most max_segments_per_row.

    Args:
        recipe: A completed recipe.
        task: The task.

    Returns:
        The number of chunks. 1 means that chunks are as long as possible.
    """
    length, packing = recipe.seq_length, recipe.packing
    if recipe.documents.long != "split" or packing.algorithm == "concat":
        return 1
    eos = int(recipe.documents.eos_after_segment)
    # Count the slots that the longest earlier chunk takes of each sequence of a row.
    longest = capacity(recipe, task, 0, eos)
    slots = task.objective.copies * (task.most_body_slots(longest) + task.mode + eos)
    slots = -(-slots // packing.pad_seq_to_mult) * packing.pad_seq_to_mult
    filled = [(slots, length)]
    if packing.sides is not None and task.objective.most_sides is not None:
        prefix, behind = task.objective.most_sides(task, longest)
        filled = [(prefix + task.mode, packing.sides[0]), (behind + eos, packing.sides[1])]
    # If one chunk nearly fills any sequence, the row has no space for several.
    pieces = min(
        1 if 16 * chunk_slots > 15 * row_slots else -(-row_slots // chunk_slots)
        for chunk_slots, row_slots in filled
    )
    return min(pieces, packing.max_segments_per_row or pieces)


def inner_capacity(recipe: Recipe, task: Task, bos: int) -> int:
    """Return the most content tokens of a chunk that is not the last of its document.

    A row is divided equally among `pieces_of_a_row` chunks, and the tokens must fit into one part.
    The result is at least 2 · min_tail − 1, unless `capacity` is smaller.

    Args:
        recipe: A completed recipe.
        task: The task.
        bos: Slots of the chunk's bos, 0 or 1.

    Returns:
        The number of tokens.
    """
    eos = int(recipe.documents.eos_after_segment)
    most_tokens, multiple = capacity(recipe, task, bos, eos), recipe.packing.pad_seq_to_mult
    pieces, sides = pieces_of_a_row(recipe, task), recipe.packing.sides
    # Each part of the row must be a multiple of pad_seq_to_mult, as chunks are padded to it.
    room = recipe.seq_length // pieces // multiple * multiple
    if sides is not None:
        sides = sides[0] // pieces, sides[1] // pieces
    return max(
        min(most_tokens, task.capacity(room, bos, eos, sides)),
        min(most_tokens, 2 * recipe.min_tail - 1),
    )


def capacities(recipe: Recipe, tasks: Sequence[Task]) -> tuple[np.ndarray, np.ndarray]:
    """Return `capacity` and `inner_capacity` of all tasks as tables.

    Args:
        recipe: A completed recipe.
        tasks: The tasks.

    Returns:
        Two arrays. The first, int64[tasks, 2, 2], has `capacity` by task, bos and eos. The second,
        int64[tasks, 2], has `inner_capacity` by task and bos.
    """
    last_capacities = [
        [[capacity(recipe, task, bos, eos) for eos in (0, 1)] for bos in (0, 1)] for task in tasks
    ]
    inner_capacities = [[inner_capacity(recipe, task, bos) for bos in (0, 1)] for task in tasks]
    return np.array(last_capacities, np.int64), np.array(inner_capacities, np.int64)


def thresholds(recipe: Recipe, supervised: bool = False) -> np.ndarray:
    """Return the cumulative shares of the tasks for each source, times 2⁵³ and rounded down.

    The computation uses exact fractions. A random number selects the first task with a greater
    threshold. A task that a source must not draw has the threshold of the previous task, so that no
    random number selects it.

    Args:
        recipe: A completed recipe.
        supervised: Whether to count only the tasks that documents with loss_spans or messages may
            draw. A source without such tasks has a row of zeros.

    Returns:
        int64[sources, tasks].
    """
    allowed = [
        not supervised or REGISTRY[task.objective].is_supervised(task.parameters)
        for task in recipe.tasks
    ]
    names = [task.name for task in recipe.tasks]
    exact = [Fraction(task.weight) for task in recipe.tasks]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    table = np.zeros((len(recipe.sources), len(names)), np.int64)
    # A source's `tasks` → its row of thresholds.
    rows: dict[tuple[str, ...] | None, list[int]] = {}
    for s, source in enumerate(recipe.sources):
        # Sources with the same tasks share a row, because a dataset may have many sources.
        if source.tasks not in rows:
            drawn = (
                range(len(names))
                if source.tasks is None
                else {i for name in source.tasks for i in tasks_named(name, names)}
            )
            # Whole numbers keep the shares exact until the last division.
            weights = [
                int(w * denominator) if i in drawn and allowed[i] else 0
                for i, w in enumerate(exact)
            ]
            total = sum(weights)
            rows[source.tasks] = [
                (sum_ << 53) // total if total else 0 for sum_ in accumulate(weights)
            ]
        table[s] = rows[source.tasks]
    return table


def own_marks(recipe: Recipe, task: Task) -> np.ndarray:
    """Return the ids that the texts of the task's segments must not contain.

    They are the sentinels and the special tokens of fill_in_the_middle, if the task writes them. If
    a text contained such an id, it would be read as a token that the task wrote.

    Args:
        recipe: A completed recipe.
        task: The task.

    Returns:
        int64[k].
    """
    objective, ids = task.objective, []
    if objective.sentinels and objective.sentinels(task.parameters, recipe.lengths[-1]):
        ids += task.ids.sentinels.tolist()
    if objective.roles:
        ids += [
            role_id(task.ids, role)
            for role in sorted(objective.roles(task.parameters))
            if role in FIM_ROLES
        ]
    return np.array(ids, np.int64)


Marks = tuple[np.ndarray, np.ndarray]
"""Two ascending arrays with ids of `own_marks` that a source's documents must not contain.

The first array is for plain documents, the second for documents with loss_spans or messages.
"""


def marks_of_sources(recipe: Recipe, tasks: Sequence[Task]) -> list[Marks]:
    """For each source, return the `own_marks` of all tasks that its documents may draw.

    Args:
        recipe: A completed recipe.
        tasks: The tasks.

    Returns:
        One entry per source, as in `Marks`.
    """

    def joined(cumulative: np.ndarray) -> np.ndarray:
        drawn = np.flatnonzero(np.diff(cumulative, prepend=0)).tolist()
        return np.unique(
            np.concatenate([np.zeros(0, np.int64), *(own_marks(recipe, tasks[t]) for t in drawn)])
        )

    tables = thresholds(recipe), thresholds(recipe, supervised=True)
    return [(joined(plain), joined(supervised)) for plain, supervised in zip(*tables, strict=True)]


def check_supervised(recipe: Recipe, source: int) -> None:
    """Check that a source's documents with loss_spans or messages can be trained.

    Args:
        recipe: A completed recipe.
        source: Index of the source.

    Raises:
        RecipeError: If the source draws no task that supports such documents, or if documents.long
            is "decompose".
    """
    if not thresholds(recipe, supervised=True)[source, -1]:
        or_media = ", or media," if recipe.specials.media else ""
        or_ignore = ', or set documents.loss_spans = "ignore"'
        takers = ", ".join(
            sorted(name for name, objective in REGISTRY.items() if objective.is_supervised({}))
        )
        raise RecipeError(
            f"source {recipe.sources[source].name!r} has documents with loss_spans or"
            f" messages{or_media} but no task that supports them\n"
            f"hint: give it a task of {takers}"
            + ("" if or_media else f", or of block_diffusion with block_origin{or_ignore}")
        )
    shares = np.diff(thresholds(recipe, supervised=True)[source], prepend=0)
    for task in compress(recipe.tasks, shares):
        if recipe.specials.media and REGISTRY[task.objective].copies > 1:
            raise RecipeError(
                f"task {task.name!r} stores tokens twice, but a media span is stored once\n"
                "hint: give documents with media a task of causal, masked_diffusion or prefix_lm"
            )
    if recipe.documents.long == "decompose":
        raise RecipeError(
            f"source {recipe.sources[source].name!r} has documents with loss_spans or messages,"
            ' and documents.long = "decompose" would cut through them\n'
            'hint: set documents.long = "split", or documents.loss_spans = "ignore"',
            ("documents", "long"),
        )


def check_loss_weighting(recipe: Recipe, source: int, is_supervised: bool) -> None:
    """Check that the recipe's `documents.loss_weighting` can be applied to a source.

    Args:
        recipe: The recipe.
        source: Index of the source.
        is_supervised: Whether documents in the source's calibration sample have messages,
            loss_spans or masks.

    Raises:
        RecipeError: If loss_weighting is not "token", and one of two problems exists: the source is
            not supervised, or the expected loss of a task that it draws depends on the noise.
    """
    weighting = recipe.documents.loss_weighting
    if weighting == "token":
        return
    setting, name = f'documents.loss_weighting = "{weighting}"', recipe.sources[source].name
    key = ("documents", "loss_weighting")
    if not is_supervised:
        raise RecipeError(
            f"{setting}: no document in the sample of source {name!r} has messages, loss_spans or"
            ' masks\nhint: set loss_weighting = "token", or build this source into another dataset',
            key,
        )
    # A task with the threshold of the task before it is never drawn.
    shares = np.diff(thresholds(recipe, supervised=True)[source], prepend=0)
    for task in compress(recipe.tasks, shares):
        is_noised = REGISTRY[task.objective].noise is not None
        if is_noised and not _has_fixed_expectation(task.parameters):
            raise RecipeError(
                f"{setting}: the expected loss of task {task.name!r} depends on how much of a"
                " document is noised\n"
                'hint: set weighting = "1/p" in this task, and leave noise out',
                key,
            )


def _has_fixed_expectation(parameters: Mapping[str, Any]) -> bool:
    """Return whether each trained token's loss weight is 1 in expectation over the noise.

    This holds if all of them are trained with weight 1, or if they are noised with probability p
    and weighted by 1 / p. With noise = "all", p is 1. With noise = "position", the number of noised
    tokens of a block is rounded, so their share differs from the level.
    """
    if parameters.get("noise") == "all":
        return True
    if parameters.get("canvas") == "uniform" or parameters.get("loss_on") == "all":
        return parameters.get("weighting") == "none"
    return parameters.get("weighting") == "1/p" and parameters.get("noise") != "position"


FAR_WEIGHTS = 100.0


def unequal_weights(tasks: Sequence[Task]) -> list[str]:
    """Return [warning] if the mean loss weights of two tasks differ by more than FAR_WEIGHTS.

    Otherwise return []. FAR_WEIGHTS is a factor. Beyond this factor, the task with the smallest
    weight would train almost nothing.
    """
    weights = {
        t.name: t.objective.mean_weight(t) if t.objective.mean_weight else 1.0
        for t in tasks
        if t.weight
    }
    light, heavy = min(weights, key=weights.__getitem__), max(weights, key=weights.__getitem__)
    if weights[heavy] <= FAR_WEIGHTS * weights[light]:
        return []
    return [
        f"the loss weight of a trained token is {weights[heavy]:.3g} in task {heavy} and"
        f" {weights[light]:.3g} in task {light}, so {light} trains almost nothing. Change the"
        " weighting of one task, or train the tasks separately"
    ]


def draw_of(name: str) -> Callable[..., Noised]:
    """Return the function that draws and writes the noise of a same-position objective."""
    draw = REGISTRY[name].noise
    assert draw is not None
    return draw


def move(
    moved: MovedTask,
    special: SpecialIds,
    bodies: Stretches,
    body_slots: np.ndarray,
    epoch: int,
    rows: np.ndarray,
    check: Callable[..., None],
) -> np.ndarray | None:
    """Write resampled segments of one task to the rows, with compiled kernels.

    The results equal the results of `_move` in `dataset/epochs/resampling.py`.

    Args:
        moved: The task.
        special: The ids of special tokens.
        bodies: The bodies of m segments in the flat rows.
        body_slots: int64[m], the slots of each body.
        epoch: The epoch of the new random numbers.
        rows: The flat rows, changed in place.
        check: Takes flags, bool[m], and raises an error if a segment is flagged.

    Returns:
        int64[m], the number of slots of each body that are in the prefix. None if the objective has
        no prefix.
    """
    no_id, objective = -1, REGISTRY[moved.layout.name]
    assert objective.restore is not None and objective.render is not None
    sentinels = special.sentinels.astype(np.int32)
    ids = Ids(
        0, no_id, no_id, special.eos, no_id, sentinels, special.fim, continues=special.continues
    )
    task, n = Task(objective.name, objective, 1.0, moved.parameters, no_id, ids), bodies.n
    # Restore the tokens with the random numbers of epoch 0. Then render with the numbers of the new
    # epoch.
    stored = Bodies(n, bodies.key, np.full(len(n), -1), 0 * n)
    # Compiled kernels do not check array bounds.
    check(misfit(body_slots, task.body_slots(stored)))
    columns = BodySlots(np.cumsum(n) - n, stored, bodies.first_slot)
    tokens = np.empty(int(n.sum()), rows.dtype)
    check(~objective.restore(task, columns, rows, tokens), SPECIAL)
    drawn = stored._replace(epoch=epoch)
    objective.render(task, columns._replace(bodies=drawn), tokens, rows)
    return None if objective.body_prefix is None else objective.body_prefix(task, drawn)


def in_place_rules(tasks: Sequence[Task]) -> list[str]:
    """Return the attention pattern of each same-position task."""
    return [task.objective.attention for task in tasks if task.in_place]


def task_table(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return the manifest's `tasks`: one entry per task, with its properties."""
    return [
        {
            "name": task.name,
            "objective": task.objective.name,
            "weight": task.weight,
            "attention": task.objective.attention,
            "label_alignment": task.label_alignment,
            "mode_token": task.mode_token if task.mode_token >= 0 else None,
            "parameters": as_stored(task.parameters, {"": task.objective.later}),
            "resolved": dict(task.resolved),
        }
        for task in tasks
    ]


def whole_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task of a stored task table or recipe, with all of its parameters.

    Only parameters that an older version did not store are added, with their defaults.
    """
    name, parameters = task.get("objective"), task.get("parameters")
    objective = find(name) if isinstance(name, str) else None
    if objective is None or not isinstance(parameters, dict):
        return dict(task)
    return {**task, "parameters": {**objective.later, **parameters}}


def whole_recipe(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe, with all of its keys and task parameters.

    Only keys and parameters that an older version did not store are added, with their defaults.
    """
    full_table = with_defaults(table, LATER)
    if isinstance(full_table.get("tasks"), list | tuple):
        full_table["tasks"] = [
            whole_task(task) if isinstance(task, dict) else task for task in full_table["tasks"]
        ]
    return full_table


def recipe_schema(formats: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of a recipe, with the parameters of each registered objective.

    `formats` are the names of the source formats.
    """
    return json_schema(
        list(presets()),
        {
            name: {p.name: _parameter_schema(p) for p in objective.parameters}
            for name, objective in REGISTRY.items()
        },
        formats,
    )


def _parameter_schema(parameter: Parameter) -> dict[str, Any]:
    default = parameter.default
    about = {"title": parameter.range_text(), "description": parameter.meaning, "default": default}
    if parameter.choices:
        return {**about, "enum": list(parameter.choices)}
    if isinstance(default, bool | str):
        return {**about, "type": "boolean" if isinstance(default, bool) else "string"}
    limits = {
        "exclusiveMinimum" if parameter.low_open else "minimum": parameter.low,
        "exclusiveMaximum" if parameter.high_open else "maximum": parameter.high,
    }
    number = {
        "type": "integer" if isinstance(default, int) else "number",
        **{name: limit for name, limit in limits.items() if limit is not None},
    }
    if isinstance(default, tuple):
        return {
            **about,
            "type": "array",
            "items": number,
            "minItems": len(default),
            "maxItems": len(default),
        }
    return {**about, **number}
