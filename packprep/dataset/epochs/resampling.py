"""Resample the segments of rows in every epoch except 0, which has the stored rows.

`noise.py` has the noise schedules, and `token_slots.py` the layouts of tokens.

    manifest ─ resampling_of ─► Resampling: the checked settings of each task

    same-position segments: stored labels ─ schedule.draw(…, epoch) ─► tokens, loss_mask, weights
    next-token segments:    stored tokens ─ the slots of epoch 0 ─► the document's tokens
                            ─ the slots of this epoch ─► tokens, labels, prefixes

All random numbers follow from the keys of the segments. So the rows of an epoch do not depend on
the batch or the rank that requests them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.attention import RULES
from packprep.dataset.blocks import put_by_block
from packprep.dataset.boundaries import fill_slots, next_token_loss_mask, put_clean
from packprep.dataset.epochs import noise
from packprep.dataset.epochs.token_slots import (
    EOS_AFTER_INPUTS,
    LAYOUTS,
    ROLES,
    SPECIAL,
    SpecialIds,
    Stretches,
    TokenLayout,
    misfit,
)
from packprep.dataset.manifest import Manifest, StoredTask, is_in_place
from packprep.dataset.rows import BLOCK_COLUMNS, RowSegments, fill, own_dtype
from packprep.errors import ArgumentError, DatasetError, RecipeError
from packprep.forking import unforked
from packprep.format.json_files import unknown_key
from packprep.format.tokenizer_json import continuing, flags_of

ACCELERATE = ("numpy", "numba", "auto")
_KERNELS_NEED = ("numba", "msgspec", "xxhash")
EPOCHS = 1 << 32
"""Number of epochs after which random numbers repeat: epoch EPOCHS has the stored rows again."""
MOST_IDS = 1 << 24
"""Largest vocabulary for which resampling builds its tables, which take 9 bytes per id."""


class NoisedTask(NamedTuple):
    """The settings for resampling one same-position task: its segments are noised again."""

    schedule: noise.NoiseSchedule
    parameters: Mapping[str, Any]
    resolved: Mapping[str, Any]
    mode: int  # slots of the mode token, 0 or 1
    copies: int  # 2 for [x_t ; x_0] (only x_t is noised), otherwise 1


class MovedTask(NamedTuple):
    """The settings for resampling one next-token task: its tokens move to other slots."""

    layout: TokenLayout
    parameters: Mapping[str, Any]
    mode: int  # slots of the mode token, 0 or 1


class Resampling(NamedTuple):
    """The settings for resampling the tasks of a dataset."""

    by_task: list[NoisedTask | MovedTask | None]  # None for a task without randomness
    in_place: np.ndarray  # bool[tasks]: the task is noised
    moved: np.ndarray  # bool[tasks]: the task's tokens move
    ids: noise.NoiseIds
    special: SpecialIds
    prepend_bos: bool
    append_eos: bool

    @property
    def has_chance(self) -> bool:
        """Whether any task is resampled."""
        return bool(self.in_place.any() or self.moved.any())

    @property
    def written(self) -> tuple[str, ...]:
        """The names of the columns that `resample` overwrites in whole rows.

        If `labels` is one of these columns, it must contain the stored labels of same-position
        segments before the call, because `resample` keeps them in these segments.
        """
        return (
            "tokens",
            "loss_mask",
            "loss_weights",
            *(("labels", "prefix_ends") if self.moved.any() else ()),
        )


def resampling_of(manifest: Manifest, read_tokenizer: Callable[[], bytes]) -> Resampling:
    """Return the settings for resampling the tasks of a dataset.

    Args:
        manifest: The dataset's manifest.
        read_tokenizer: Returns the bytes of the dataset's tokenizer.json or raises OSError. It is
            called only if a task never cuts inside a character, and the manifest does not list the
            tokens that begin inside a character.

    Returns:
        The settings of all tasks.

    Raises:
        ArgumentError: If a task's objective cannot be resampled, or tokenizer.json is needed but
            missing or invalid.
        DatasetError: If the manifest does not have the values that a task needs.
    """
    _check_objectives(manifest)
    special = _special_ids(manifest)
    by_task: list[NoisedTask | MovedTask | None] = []
    for task in manifest["tasks"]:
        if is_in_place(task):
            by_task.append(_noised_task(task, manifest["made_with"]))
            continue
        moved_task = _moved_task(task, manifest, special)
        by_task.append(moved_task)
        # Reading the flags may require tokenizer.json, so it is done only for a task that needs
        # them.
        keeps_characters = moved_task and moved_task.layout.whole(moved_task.parameters)
        if keeps_characters and not len(special.continues):
            continues = _continues(manifest, task["name"], read_tokenizer)
            special = special._replace(continues=continues)
    noised_tasks = [task for task in by_task if isinstance(task, NoisedTask)]
    in_place, moved = (
        np.array([isinstance(task, kind) for task in by_task]) for kind in (NoisedTask, MovedTask)
    )
    documents = manifest["recipe"].get("documents", {})
    added = (
        bool(documents.get("prepend_bos", False)),
        documents.get("append_eos", True) is not False,
    )
    return Resampling(by_task, in_place, moved, _ids(manifest, noised_tasks), special, *added)


def _check_objectives(manifest: Manifest) -> None:
    """Check that this package can resample the objectives of all next-token tasks.

    Raises:
        ArgumentError: If an objective is unknown.
    """
    known_names = ("causal", *LAYOUTS)
    unknown_tasks = [
        f"{task['name']!r} ({task['objective']})"
        for task in manifest["tasks"]
        if not is_in_place(task) and task["objective"] not in known_names
    ]
    if unknown_tasks:
        raise ArgumentError(
            f"redraw: {', '.join(unknown_tasks)} cannot be resampled, only"
            f" {', '.join((*LAYOUTS, *noise.SCHEDULES))} can\n"
            "hint: read the stored rows, without redraw; a recipe's repeat gives each pass of a"
            " document its own randomness"
        )


def _moved_task(task: StoredTask, manifest: Manifest, special: SpecialIds) -> MovedTask | None:
    """Return the settings for resampling a next-token task, or None if it is not resampled.

    A task is not resampled if its objective has no randomness. In a dataset with an encoder_length,
    a task is also not resampled if a new draw may change the length of a prefix. The row could then
    exceed the length of the encoder or of the decoder.

    Raises:
        DatasetError: If the manifest does not have the special tokens that the task writes.
    """
    layout = LAYOUTS.get(task["objective"])
    if layout is None:
        return None
    has_sides = manifest["recipe"].get("packing", {}).get("encoder_length")
    if has_sides and not layout.keeps_prefix:
        return None
    parameters = _read_parameters(layout, task, manifest["made_with"])
    sentinels = layout.sentinels(parameters)
    if len(special.sentinels) < sentinels:
        raise DatasetError(
            f"redraw: task {task['name']!r} needs {sentinels} sentinels, but the manifest's"
            f" specials have {len(special.sentinels)}"
        )
    if missing := sorted(layout.roles(parameters) - manifest["specials"].keys()):
        raise DatasetError(
            f"redraw: task {task['name']!r} needs {missing[0]}, which is missing from the"
            " manifest's specials"
        )
    return MovedTask(layout, parameters, int(task["mode_token"] is not None))


def _noised_task(task: StoredTask, made_with: Any) -> NoisedTask:
    """Return the settings for resampling a same-position task.

    Raises:
        ArgumentError: If this package does not know the noise schedule of the objective.
        DatasetError: If the task's entry in the manifest is invalid or inconsistent.
    """
    place = f"redraw: task {task['name']!r} in the manifest"
    schedule = noise.SCHEDULES.get(task["objective"])
    if schedule is None:
        raise ArgumentError(
            f"redraw: task {task['name']!r} has the objective {task['objective']!r} from outside"
            f" packprep, but only {', '.join(noise.SCHEDULES)} can be resampled\n"
            "hint: read the stored rows, without redraw"
        )
    parameters = _read_parameters(schedule, task, made_with)
    resolved = task.get("resolved", {})
    if schedule.attention != task["attention"]:
        raise DatasetError(
            f"{place}: its attention is {task['attention']} and should be {schedule.attention}"
        )
    if parameters.get("shift", False) != (task["label_alignment"] == "next_slot"):
        raise DatasetError(
            f"{place}: its shift does not agree with its label_alignment {task['label_alignment']}"
        )
    if fault := schedule.unusable(resolved):
        raise DatasetError(f"{place}: {fault}")
    arrays = {
        name: np.array(value) if isinstance(value, list) else value
        for name, value in resolved.items()
    }
    mode, copies = int(task["mode_token"] is not None), RULES[schedule.attention].copies
    return NoisedTask(schedule, parameters, arrays, mode, copies)


def _special_ids(manifest: Manifest) -> SpecialIds:
    """Return the ids of a manifest's sentinels and special tokens. A missing special token is −1.

    Raises:
        DatasetError: If a sentinel or special token is not an id below vocab_size.
    """
    specials = manifest["specials"]
    sentinels = specials.get("sentinels", [])
    if not isinstance(sentinels, list) or max(sentinels, default=0) >= manifest["vocab_size"]:
        raise DatasetError(
            "redraw: the manifest's sentinels are not a list of ids below vocab_size"
            f" {manifest['vocab_size']}"
        )
    roles = {role: specials.get(role, -1) for role in ("eos", *ROLES)}
    for role, id in roles.items():
        if not isinstance(id, int) or id >= manifest["vocab_size"]:
            raise DatasetError(
                f"redraw: the manifest's {role} is {id!r} and should be an id below vocab_size"
                f" {manifest['vocab_size']}"
            )
    eos, pre, mid, suf = roles.values()
    return SpecialIds(np.array(sentinels, np.int64), (pre, mid, suf), np.zeros(0, np.uint8), eos)


def _continues(manifest: Manifest, task: str, read_tokenizer: Callable[[], bytes]) -> np.ndarray:
    """Return which tokens begin inside a character, uint8[vocab_size].

    The flags come from the manifest's key `continues`. Without this key, they are computed from the
    dataset's tokenizer.json. `task` is the name of a task that needs the flags, for messages.

    Raises:
        ArgumentError: If the key is invalid, or tokenizer.json is needed but missing or invalid.
    """
    stored, size = manifest.get("continues", ""), manifest["vocab_size"]
    try:
        if stored:
            return flags_of(stored, size)
        return continuing(json.loads(read_tokenizer()), size)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        source = "continues" if stored else "tokenizer.json"
        raise ArgumentError(
            f"redraw: {task!r} never cuts inside a character, but the dataset's {source} does not"
            f" show which tokens start inside a character ({error})\n"
            "hint: put the dataset's own tokenizer.json next to its dataset.json, or read the"
            " stored rows, without redraw"
        ) from error


def _ids(manifest: Manifest, tasks: list[NoisedTask]) -> noise.NoiseIds:
    """Return the ids that noise writes: the mask token and the ordinary ids of the manifest.

    Raises:
        DatasetError: If the manifest does not have the ids that `tasks` need.
    """
    specials, vocab_size = manifest["specials"], manifest["vocab_size"]
    if not tasks:
        no_ids = np.zeros(0, np.int32)
        return noise.NoiseIds(-1, no_ids, no_ids)
    if "special_ids" not in specials:
        raise DatasetError(
            "redraw: the manifest's specials have no special_ids, so the ordinary tokens are"
            " unknown"
        )
    if vocab_size > MOST_IDS:
        raise DatasetError(
            f"redraw: the manifest's vocab_size is {vocab_size}, but the limit is {MOST_IDS}"
        )
    special, mask = specials["special_ids"], specials.get("mask", -1)
    if not isinstance(special, list) or max(special, default=0) >= vocab_size:
        raise DatasetError(
            "redraw: the manifest's special_ids are not a list of ids below vocab_size"
            f" {vocab_size}"
        )
    if not isinstance(mask, int) or mask >= vocab_size:
        raise DatasetError(
            f"redraw: the manifest's mask is {mask!r} and should be an id below vocab_size"
            f" {vocab_size}"
        )
    ids = noise.NoiseIds(mask, *noise.ordinary_ids(vocab_size, np.array(special, np.int64)))
    needs = frozenset[str]().union(*(task.schedule.needs(task.parameters) for task in tasks))
    if mask < 0 and "mask" in needs:
        raise DatasetError("redraw: a task masks tokens, but the manifest's specials have no mask")
    if len(ids.ordinary) < 2 and "ordinary" in needs:
        raise DatasetError(
            "redraw: a task draws other tokens, but the manifest has fewer than two ordinary ids"
        )
    return ids


def _read_parameters(
    objective: noise.NoiseSchedule | TokenLayout, task: StoredTask, made_with: Any
) -> dict[str, Any]:
    """Return a stored task's parameters, checked and converted to their types.

    A parameter may be missing if it was added after the first version of the format
    (`Parameter.later`). It then gets its default.

    Raises:
        DatasetError: If a parameter is missing, unknown or out of range, or the task's `resolved`
            is not an object.
    """
    place = f"redraw: task {task['name']!r} in the manifest"
    if unknown := task["parameters"].keys() - {
        parameter.name for parameter in objective.parameters
    }:
        raise DatasetError(f"{place}: {unknown_key(min(unknown), made_with)}")
    parameters = {}
    for parameter in objective.parameters:
        name = parameter.name
        value = task["parameters"].get(name, parameter.default if parameter.later else None)
        try:
            # The manifest may come from anyone, so values are checked as in a recipe.
            parameters[name] = parameter.accept(value, place)
            is_usable = (
                not isinstance(objective, noise.NoiseSchedule)
                or name != "noise_range"
                or parameters[name][0] >= objective.least
            )
        except RecipeError:
            is_usable = False
        if not is_usable:
            raise DatasetError(
                f"{place}: {name} is {value!r:.100}, which {objective.name} cannot use\n"
                "hint: run `packprep verify` for details"
            )
    if not isinstance(task.get("resolved", {}), dict):
        raise DatasetError(f"{place}: resolved is not an object")
    return parameters


def _kernels() -> Any:
    """Import and return packprep.objectives.tasks, which has compiled `draw_of` and `move`.

    The import is here because it needs numba, and trainers may have only this subpackage.
    """
    with unforked():
        return import_module("packprep.objectives.tasks")


@cache
def check_accelerate(accelerate: str) -> bool:
    """Return whether to resample with the compiled kernels of a build.

    Args:
        accelerate: "numpy" gives False, and "numba" gives True. "auto" gives True if the packages
            that the kernels need are installed.

    Raises:
        ArgumentError: If the value is unknown, or "numba" is given and a package is missing.
    """
    if accelerate not in ACCELERATE:
        raise ArgumentError(
            f"accelerate is {accelerate!r} and should be one of {', '.join(map(repr, ACCELERATE))}"
        )
    missing = [name for name in _KERNELS_NEED if find_spec(name) is None]
    if accelerate == "numba" and missing:
        raise ArgumentError(
            f"accelerate = 'numba' needs {', '.join(missing)}, not installed here\n"
            f"hint: pip install {' '.join(missing)}, or use 'numpy', which gives the same rows"
        )
    return accelerate != "numpy" and not missing


class _Header(NamedTuple):
    """The keys and bodies of m segments, from the segment header. Each array has the shape [m]."""

    key: np.ndarray  # uint64
    tokens: np.ndarray  # int64: number of tokens in the body
    before: np.ndarray  # int64: slots before the body (bos, mode token)


class _Rows(NamedTuple):
    """The rows to resample, with their segments and the arrays to write."""

    resampling: Resampling
    segments: RowSegments
    header: _Header
    epochs: np.ndarray  # int64[B]
    # uint8[B · T]: 1 in trained ranges; None if the shards have no trained ranges
    trainable: np.ndarray | None
    tokens: np.ndarray  # [B, T]
    loss_mask: np.ndarray  # uint8[B, T]
    kernels: bool

    def at_slots(self, chosen: np.ndarray) -> np.ndarray:
        """Return bool[B, T], True at slots of the chosen segments. `chosen` is bool[m]."""
        return self.segments.at_slots(chosen, False).reshape(self.tokens.shape)

    def groups(self, chosen: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Group the chosen segments by task and epoch. `chosen` is bool[m].

        Yields:
            The index of a task, an epoch, and the indices of the group's segments, int64[k].
        """
        task, epoch_of = self.segments.column("task"), self.epochs[self.segments.row]
        for t in np.unique(task[chosen]).tolist():
            of_task = np.flatnonzero(chosen & (task == t))
            for epoch in np.unique(epoch_of[of_task]).tolist():
                yield t, epoch, of_task[epoch_of[of_task] == epoch]


def resample(
    resampling: Resampling,
    epochs: np.ndarray,
    segments: RowSegments,
    columns: Mapping[str, np.ndarray],
    kernels: bool = False,
) -> None:
    """Resample the rows with an epoch above 0.

    Args:
        resampling: The settings of the dataset's tasks.
        epochs: The epoch of each row, int64[B], below EPOCHS.
        segments: The segments of the rows. The new header columns are put into `segments.changed`.
        columns: name → [B, T]. On entry, the arrays contain the stored rows. If present, tokens,
            labels, loss_mask, loss_weights and prefix_ends are overwritten.
        kernels: Whether to use the compiled kernels of a build. They need numba and give the same
            rows.

    Raises:
        DatasetError: If a row's header does not fit its tokens.
    """
    written = [name for name in resampling.written if name in columns]
    # Rows from shards with trained ranges and rows from other shards are resampled separately. A
    # shard has trained ranges if it contains a supervised document.
    rows_by_kind: dict[bool, list[int]] = {}
    for i in np.flatnonzero(epochs).tolist() if written else ():
        has_ranges = "trained_ranges" in segments.places[i][0].layout
        rows_by_kind.setdefault(has_ranges, []).append(i)
    for rows in rows_by_kind.values():
        _resample_rows(resampling, epochs, segments, columns, rows, kernels)


def _resample_rows(
    resampling: Resampling,
    epochs: np.ndarray,
    all_segments: RowSegments,
    columns: Mapping[str, np.ndarray],
    rows: list[int],
    kernels: bool,
) -> None:
    """Resample some rows of a batch. `rows` has their indices.

    Either all of these rows are from shards with trained ranges, or none of them is.
    """
    facts = all_segments.facts
    is_whole = len(rows) == len(all_segments.places)
    segments = (
        all_segments if is_whole else RowSegments(facts, [all_segments.places[i] for i in rows])
    )
    # Write directly into a column's array if it has the right rows, memory order and dtype.
    resampled: dict[str, np.ndarray] = {}
    for name in ("tokens", "loss_mask"):
        values, dtype = columns.get(name), own_dtype(name, facts.token_dtype)
        if values is None or not (is_whole and values.flags.c_contiguous and values.dtype == dtype):
            values = np.empty((len(rows), facts.seq_length), dtype)
        resampled[name] = values
    weights = _draw_rows(
        resampling,
        segments,
        epochs[rows],
        resampled["tokens"],
        resampled["loss_mask"],
        "loss_weights" in columns,
        kernels,
    )
    # Derive the other columns.
    if resampling.moved.any():
        if not is_whole:
            # These rows have their own `segments`, so their prefixes are copied to the segments of
            # all rows.
            all_segments.changed["prefix"] = prefix = all_segments.column("prefix").copy()
            prefix[np.isin(all_segments.row, rows)] = segments.column("prefix")
        if "labels" in columns:
            labels = columns["labels"][rows]
            resampled["labels"] = _next_tokens(resampling, segments, resampled["tokens"], labels)
        if "prefix_ends" in columns:
            prefix_ends = segments.prefix_ends(not columns.keys().isdisjoint(BLOCK_COLUMNS))
            resampled["prefix_ends"] = prefix_ends.reshape(resampled["tokens"].shape)
    loss_mask = resampled["loss_mask"]
    # Resampling makes a new mask, so `with_loss_on` applies again.
    if facts.loss_on is not None:
        np.multiply(loss_mask, segments.kept().reshape(loss_mask.shape), out=loss_mask)
    if weights is not None:
        resampled["loss_weights"] = weights * loss_mask
    for name in resampling.written:
        if name in columns and resampled[name] is not columns[name]:
            columns[name][slice(None) if is_whole else rows] = resampled[name]


def _draw_rows(
    resampling: Resampling,
    segments: RowSegments,
    epochs: np.ndarray,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    weighted: bool,
    kernels: bool,
) -> np.ndarray | None:
    """Draw the tokens and the loss_mask of all given rows, and write them into the arrays.

    Returns:
        If `weighted`, the loss weight of each slot, [B, T], before the loss_mask is applied.
        Otherwise None.
    """
    task = segments.column("task")
    if task.max(initial=0) >= len(resampling.by_task):
        raise DatasetError(
            f"redraw: segment_task {task.max()} is beyond the manifest's"
            f" {len(resampling.by_task)} tasks"
        )
    # A body comes after bos and the mode token.
    mode = np.array([0 if moves is None else moves.mode for moves in resampling.by_task], np.int64)
    has_bos = (segments.column("start") == 0) & resampling.prepend_bos
    header = _Header(
        segments.column("key"),
        segments.column("tokens").astype(np.int64, copy=False),
        has_bos + mode[task],
    )
    trainable = _trainable(segments)
    rows = _Rows(resampling, segments, header, epochs, trainable, tokens, loss_mask, kernels)
    in_place = resampling.in_place[task]
    _write_originals(rows, in_place)
    if resampling.moved[task].any():
        _move_all(rows)
    return _noise_all(rows, in_place, weighted)


def _write_originals(rows: _Rows, in_place: np.ndarray) -> None:
    """Write the tokens and the loss_mask that the rows have before resampling.

    `in_place`, bool[m], flags same-position segments. They get their original tokens and a
    loss_mask of 0. All other segments get their stored tokens and loss_mask.
    """
    segments, tokens, loss_mask = rows.segments, rows.tokens, rows.loss_mask
    # Block-diffusion segments [x_t ; x_0] have their original tokens in x_0, because their labels
    # may be shifted. Other same-position segments have their original tokens as labels.
    twice = segments.looked_up("task", segments.facts.in_blocks)
    labelled = in_place & ~twice
    for i, (shard, row) in enumerate(segments.places):  # Padding is the same in tokens and labels.
        tokens[i] = shard.row("labels" if labelled.all() else "tokens", row)
    if labelled.any() and not labelled.all():
        labels = np.empty_like(tokens)
        for i, (shard, row) in enumerate(segments.places):
            labels[i] = shard.row("labels", row)
        np.copyto(tokens, labels, where=rows.at_slots(labelled))
    flat = tokens.reshape(-1)
    put_clean(flat, flat, segments.at[twice], segments.slots[twice] // 2)
    if in_place.all():
        loss_mask[...] = 0
    else:
        fill(segments, "loss_mask", loss_mask)
        np.copyto(loss_mask, 0, where=rows.at_slots(in_place))


def _noise_all(rows: _Rows, in_place: np.ndarray, weighted: bool) -> np.ndarray | None:
    """Add noise to all same-position segments.

    `in_place`, bool[m], flags these segments. Their new levels and loss weights are put into
    `segments.changed`.

    Returns:
        If `weighted`, the loss weight of each slot, [B, T], before the loss_mask is applied.
        Otherwise None.
    """
    resampling, segments, tokens = rows.resampling, rows.segments, rows.tokens
    weight, level = (segments.column(name).copy() for name in ("loss_weight", "noise"))
    noised_blocks = []
    for t, epoch, indices in rows.groups(in_place):
        task = resampling.by_task[t]
        assert isinstance(task, NoisedTask)
        target = _target(rows, task, indices)
        if task.schedule.flips:
            _check_labels(segments, tokens, len(resampling.ids.rank))
        draw = _kernels().draw_of(task.schedule.name) if rows.kernels else task.schedule.draw
        noised = draw(t, task.parameters, task.resolved, resampling.ids, target, epoch)
        # A removed segment keeps its stored level and weight (P23).
        drawn = rows.header.tokens[indices] > 0
        weight[indices[drawn]], level[indices[drawn]] = noised.weight[drawn], noised.level[drawn]
        if noised.blocks is not None:
            noised_blocks.append((indices, int(task.parameters["shift"]), noised.blocks))
    segments.changed |= {"loss_weight": weight, "noise": level}
    if not weighted:
        return None
    # Spread the weights of segments, blocks and trained ranges over slots.
    weights = segments.at_slots(weight, 0)
    for indices, shift, by_block in noised_blocks:
        put_by_block(weights, segments.at[indices], by_block.blocks, by_block.weight, shift)
    if (range_weights := segments.range_weights()) is not None:
        weights *= range_weights
    return weights.reshape(tokens.shape)


def _move_all(rows: _Rows) -> None:
    """Move the tokens of next-token segments to the slots that they have in the row's epoch.

    The new prefixes are put into `segments.changed`, and the loss_mask is updated. A segment stays
    the same if it has no tokens. It also stays the same if some of its tokens are not trained,
    because they are from a supervised document.
    """
    resampling, segments, header = rows.resampling, rows.segments, rows.header
    moves = resampling.moved[segments.column("task")] & (header.tokens > 0) & ~_supervised(rows)
    prefix, flat_tokens = segments.column("prefix").copy(), rows.tokens.reshape(-1)
    move = _kernels().move if rows.kernels else _move
    for t, epoch, indices in rows.groups(moves):
        task = resampling.by_task[t]
        assert isinstance(task, MovedTask)
        slots_before, n = header.before[indices], header.tokens[indices]
        body_slots = segments.slots[indices] - slots_before
        check = partial(_check_slots, segments, indices)
        # The slots follow from n and the key, so a wrong header is refused before slots are
        # computed.
        check((n < task.layout.least) | (n > body_slots))
        bodies = Stretches(header.key[indices], n, segments.at[indices] + slots_before)
        body_prefix = move(task, resampling.special, bodies, body_slots, epoch, flat_tokens, check)
        if body_prefix is not None:
            prefix[indices] = slots_before + body_prefix
    # Segments with another prefix need a new loss_mask.
    is_changed = prefix != segments.column("prefix")
    if is_changed.any():
        new_loss_mask = next_token_loss_mask(
            segments.at[is_changed], segments.slots[is_changed], prefix[is_changed], segments.size
        )
        if rows.trainable is not None:
            # A slot is trained if its target is, and the target is in the next slot (P9).
            new_loss_mask[:-1] &= rows.trainable[1:]
        new_loss_mask = new_loss_mask.reshape(rows.tokens.shape)
        np.copyto(rows.loss_mask, new_loss_mask, where=rows.at_slots(is_changed))
    segments.changed["prefix"] = prefix


def _move(
    task: MovedTask,
    special: SpecialIds,
    bodies: Stretches,
    body_slots: np.ndarray,
    epoch: int,
    rows: np.ndarray,
    check: Callable[..., None],
) -> np.ndarray | None:
    """Move the tokens of one task's segments to their slots in one epoch.

    Args:
        task: The settings of the task.
        special: The special ids of the dataset.
        bodies: The bodies of the segments.
        body_slots: int64[m], the number of slots of each body, including eos.
        epoch: The epoch.
        rows: The flat tokens of the rows. They contain the stored tokens and are changed.
        check: `_check_slots` for these segments. It raises DatasetError if any element of its first
            argument, bool[m], is True.

    Returns:
        The number of prefix slots in each body, int64[m], or None for a task without prefixes.
    """
    layout, drawn = task.layout, (task.parameters, special, bodies)
    # The slots of epoch 0 give the tokens in document order.
    stored = layout.place(*drawn, 0, rows)
    check(misfit(body_slots, stored.slots))
    # The stored row must have its special tokens in these slots. Otherwise the header does not
    # belong to it.
    wrong_slots = stored.special[rows[stored.special] != stored.id]
    has_wrong = np.zeros(len(bodies.n), np.bool_)
    has_wrong[np.searchsorted(bodies.first_slot, wrong_slots, "right") - 1] = True
    check(has_wrong, SPECIAL)
    tokens = rows[stored.token]
    # The body has the same number of slots in every epoch, so these writes overwrite all of them.
    placed = layout.place(*drawn, epoch, tokens)
    rows[placed.token] = tokens
    rows[placed.special] = placed.id
    return placed.prefix


def _check_slots(
    segments: RowSegments,
    indices: np.ndarray,
    is_wrong: np.ndarray,
    missing: str = "the positions that its tokens need",
) -> None:
    """Raise an error if a segment does not have its tokens in the expected slots.

    `indices` has the indices of k segments, and `is_wrong`, bool[k], is True for faulty segments.
    The message names the first faulty segment, and says that it does not have `missing`.

    Raises:
        DatasetError: If an element of `is_wrong` is True.
    """
    if is_wrong.any():
        g = indices[np.argmax(is_wrong)]
        first_slot = int(segments.at[g]) % segments.facts.seq_length
        task = segments.column("task")[g]
        raise segments.fault(
            int(segments.row[g]),
            f"the segment of task {task} at position {first_slot} does not have {missing}",
        )


def _supervised(rows: _Rows) -> np.ndarray:
    """Return which segments have untrained tokens in their body, bool[m].

    An untrained eos does not count.
    """
    segments, header = rows.segments, rows.header
    is_supervised = np.zeros(len(segments), np.bool_)
    if rows.trainable is None:
        return is_supervised
    segment, ranges, _ = segments.trained()
    # These parameters add slots to a body, so a range of the whole body is longer than its tokens.
    names = ("sentinel", EOS_AFTER_INPUTS.name)
    added = np.array(
        [
            sum(int(task.parameters.get(name, 0)) for name in names)
            if isinstance(task, MovedTask)
            else 0
            for task in rows.resampling.by_task
        ]
    )
    body_end = header.before + header.tokens + added[segments.column("task")]
    # An unsupervised segment has one range that covers its body (P19).
    is_supervised[:] = np.bincount(segment, minlength=len(is_supervised)) != 1
    is_supervised[segment] |= (ranges[:, 0] > header.before[segment]) | (
        ranges[:, 1] < body_end[segment]
    )
    return is_supervised


def _next_tokens(
    resampling: Resampling, segments: RowSegments, tokens: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """Return the labels of resampled rows, [B, T].

    In segments of tasks whose tokens move, a label is the next token, or the pad id in the
    segment's last slot. All other segments have the values of `labels`.
    """
    following = np.empty_like(tokens)
    following[:, :-1] = tokens[:, 1:]
    following.reshape(-1)[segments.without_next()] = segments.facts.pad_id
    if not resampling.in_place.any():
        return following
    is_moved = segments.at_slots(resampling.moved[segments.column("task")], False)
    return np.where(is_moved.reshape(tokens.shape), following, labels)


def _check_labels(segments: RowSegments, labels: np.ndarray, vocab_size: int) -> None:
    """Check that all labels are ids below vocab_size, because flips use them as indices.

    Raises:
        DatasetError: If a label is not an id below vocab_size.
    """
    is_wrong = (labels < 0) | (labels >= vocab_size)
    if is_wrong.any():
        i, slot = (int(n) for n in np.argwhere(is_wrong)[0])
        raise segments.fault(
            i, f"position {slot}: {labels[i, slot]} is not an id below vocab_size {vocab_size}"
        )


def _trainable(segments: RowSegments) -> np.ndarray | None:
    """Return flags of slots, uint8[size]: 1 in trained ranges, 0 elsewhere.

    Returns None if the shards have no trained ranges.
    """
    if "trained_ranges" not in segments.places[0][0].layout:
        return None
    segment, ranges, _ = segments.trained()
    begins, lengths = segments.at[segment] + ranges[:, 0], ranges[:, 1] - ranges[:, 0]
    return fill_slots(begins, lengths, np.ones(len(ranges), np.uint8), 0, segments.size)


def _has_eos(rows: _Rows, indices: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Return which segments end with an eos that the build added, bool[k].

    Such a segment has more slots than tokens. With trained ranges, the other slots may also be a
    system message that the segment repeats, so the last token is compared with eos. The rows must
    have the original tokens.

    Args:
        rows: The rows.
        indices: The indices of the segments, int64[k].
        half: Slots of one copy of each segment, int64[k].
    """
    header, special = rows.header, rows.resampling.special
    has_more = half - header.before[indices] > header.tokens[indices]
    last_tokens = rows.tokens.reshape(-1)[rows.segments.at[indices] + half - 1]
    ends_in_eos: np.ndarray = has_more & (last_tokens == special.eos) & rows.resampling.append_eos
    return ends_in_eos


def _target(rows: _Rows, task: NoisedTask, indices: np.ndarray) -> noise.Target:
    """Return the `noise.Target` for the segments `indices`, all of one task.

    The candidates of a segment are its body and eos, or only its body if noise_eos is false, as in
    rendering. A segment without tokens has no candidates. It is still part of the target, because
    stratified levels depend on the number of segments in a row.
    """
    segments, header = rows.segments, rows.header
    half = segments.slots[indices] // task.copies
    slots_before = header.before[indices]
    count = half - slots_before
    # Shards with ranges may also have repeated system messages, so eos is recognised by its id.
    if not task.parameters["noise_eos"]:
        if rows.trainable is None:
            count = np.minimum(count, header.tokens[indices])
        else:
            count -= _has_eos(rows, indices, half)
    if (count < 0).any():
        raise DatasetError(
            "redraw: a segment has fewer positions than its bos and mode token\n"
            "hint: run `packprep verify` to find it"
        )
    count = np.where(header.tokens[indices] > 0, count, 0)
    candidates = noise.Candidates(
        header.key[indices], segments.at[indices] + slots_before, count, segments.row[indices]
    )
    flat = rows.tokens.reshape(-1), rows.loss_mask.reshape(-1)
    return noise.Target(candidates, slots_before, half, rows.trainable, *flat)
