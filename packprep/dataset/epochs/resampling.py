"""Resample the segments of rows for every epoch except 0.

`noise.py` has the noise schedules, and `token_slots.py` the layouts of tokens.

    manifest ─ resampling_of ─► Resampling: the settings of each task, checked before they are used

    same-position segments: stored labels ─ a schedule's draw(…, epoch) ─► tokens, mask, weights
    other segments: stored tokens ─ a layout's slots in epoch 0 ─► the document's tokens
                    ─ its slots in this epoch ─► tokens, labels, prefixes

Each segment has its own key, so an epoch's rows do not depend on the batch or the rank that
requests them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.attention import RULES
from packprep.dataset.boundaries import fill_slots, next_token_loss_mask, put_blocks, put_clean
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
from packprep.dataset.rows import RowSegments, fill, own_dtype
from packprep.errors import ArgumentError, DatasetError, RecipeError
from packprep.forking import unforked
from packprep.format.json_files import unknown_key
from packprep.format.tokenizer_json import continuing, flags_of

ACCELERATE = ("numpy", "numba", "auto")
_KERNELS_NEED = ("numba", "msgspec", "xxhash")
EPOCHS = 1 << 32
"""Number of epochs after which randomness repeats, counted from the stored rows."""
MOST_IDS = 1 << 24
"""Largest vocabulary that resampling makes tables for; they take 9 bytes per id."""


class NoisedTask(NamedTuple):
    """The settings for noising the segments of one task."""

    schedule: noise.NoiseSchedule
    parameters: Mapping[str, Any]
    resolved: Mapping[str, Any]
    mode: int  # slots of the mode token
    copies: int  # 2 for [x_t ; x_0], where only x_t is noised


class MovedTask(NamedTuple):
    """The settings for moving the tokens of one task's segments."""

    layout: TokenLayout
    parameters: Mapping[str, Any]
    mode: int  # slots of the mode token


class Resampling(NamedTuple):
    """The settings for resampling the tasks of a dataset."""

    by_task: list[NoisedTask | MovedTask | None]  # None for a task without randomness
    in_place: np.ndarray  # bool[tasks]
    moved: np.ndarray  # bool[tasks]
    ids: noise.NoiseIds
    special: SpecialIds
    prepend_bos: bool

    @property
    def has_chance(self) -> bool:
        """True if any task is resampled."""
        return bool(self.in_place.any() or self.moved.any())

    @property
    def written(self) -> tuple[str, ...]:
        """The columns that `resample` writes at every slot of a row.

        It also reads the labels of same-position tasks.
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
            called if the manifest does not say which tokens begin inside a character.

    Returns:
        The settings of all tasks.

    Raises:
        ArgumentError: If the randomness of a task is unknown here.
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
        keeps_characters = moved_task and moved_task.layout.whole(moved_task.parameters)
        if keeps_characters and not len(special.continues):
            continues = _continues(manifest, task["name"], read_tokenizer)
            special = special._replace(continues=continues)
    noised_tasks = [task for task in by_task if isinstance(task, NoisedTask)]
    in_place, moved = (
        np.array([isinstance(task, kind) for task in by_task]) for kind in (NoisedTask, MovedTask)
    )
    bos = bool(manifest["recipe"].get("documents", {}).get("prepend_bos", False))
    return Resampling(by_task, in_place, moved, _ids(manifest, noised_tasks), special, bos)


def _check_objectives(manifest: Manifest) -> None:
    """Check that the randomness of all next-token tasks is known here.

    Raises:
        ArgumentError: If it is not.
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
    """Return the settings for resampling a next-token task, or None if it does not change.

    Raises:
        DatasetError: If the manifest does not have the special tokens that the task writes.
    """
    layout = LAYOUTS.get(task["objective"])
    if layout is None:
        return None
    has_sides = manifest["recipe"].get("packing", {}).get("encoder_length")
    # A prefix of another length would not fit the encoder or the decoder.
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
        ArgumentError: If the objective's noise is unknown here.
        DatasetError: If the manifest's properties of the task do not agree.
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
    """Return the sentinels and special tokens, with −1 for a missing special token.

    Raises:
        DatasetError: If one is not an id of the vocabulary.
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
    """Return a flag for each token that begins inside a character, uint8[vocab_size].

    The flags come from the manifest, or from the dataset's tokenizer.json.

    Raises:
        ArgumentError: If both are missing or invalid.
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
    """Return the ids that noise writes.

    Raises:
        DatasetError: If the manifest does not have the ids that the tasks need.
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
    known: noise.NoiseSchedule | TokenLayout, task: StoredTask, made_with: Any
) -> dict[str, Any]:
    """Return a task's parameters in their types.

    Parameters that were added later get their defaults.

    Raises:
        DatasetError: If a parameter is missing, unknown or out of range, or `resolved` is not an
            object.
    """
    place = f"redraw: task {task['name']!r} in the manifest"
    if unknown := task["parameters"].keys() - {parameter.name for parameter in known.parameters}:
        raise DatasetError(f"{place}: {unknown_key(min(unknown), made_with)}")
    parameters = {}
    for parameter in known.parameters:
        name = parameter.name
        value = task["parameters"].get(name, parameter.default if parameter.later else None)
        try:
            parameters[name] = parameter.accept(value, place)
            is_usable = (
                not isinstance(known, noise.NoiseSchedule)
                or name != "noise_range"
                or parameters[name][0] >= known.least
            )
        except RecipeError:
            is_usable = False
        if not is_usable:
            raise DatasetError(
                f"{place}: {name} is {value!r:.100}, which {known.name} cannot use\n"
                "hint: run `packprep verify` for details"
            )
    if not isinstance(task.get("resolved", {}), dict):
        raise DatasetError(f"{place}: resolved is not an object")
    return parameters


def _kernels() -> Any:
    """Return objectives/tasks.py, whose `draw_of` and `move` need numba.

    It is imported by name, since trainers may have only this subpackage.
    """
    with unforked():
        return import_module("packprep.objectives.tasks")


@cache
def check_accelerate(accelerate: str) -> bool:
    """Return whether the compiled kernels of a build resample.

    Args:
        accelerate: "numpy"; "numba"; or "auto" for numba where its packages are installed.

    Raises:
        ArgumentError: If the value is unknown, or numba's packages are missing.
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
    """The values of segments' headers that describe their bodies, [m] each."""

    key: np.ndarray  # uint64
    tokens: np.ndarray  # int64: tokens of the body
    before: np.ndarray  # int64: slots before the body


class _Rows(NamedTuple):
    """The rows that are being resampled."""

    resampling: Resampling
    segments: RowSegments
    header: _Header
    epochs: np.ndarray  # int64[B]
    trainable: np.ndarray | None  # uint8[B · T]: slots in trained ranges; None without such ranges
    tokens: np.ndarray  # [B, T]
    loss_mask: np.ndarray  # uint8[B, T]
    kernels: bool

    def at_slots(self, chosen: np.ndarray) -> np.ndarray:
        """Return the slots of the chosen segments, bool[B, T]. `chosen` is bool[m]."""
        return self.segments.at_slots(chosen, False).reshape(self.tokens.shape)

    def groups(self, chosen: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield each task and epoch of the chosen segments, with the numbers of these segments.

        `chosen` is bool[m].
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
        epochs: int64[B], below EPOCHS.
        segments: The segments of the rows. `segments.changed` receives their new header.
        columns: name → [B, T], of tokens, labels, loss_mask, loss_weights and prefix_ends. They
            hold the stored rows, and are overwritten.
        kernels: Whether to use the compiled kernels of a build. They need numba and write the same.

    Raises:
        DatasetError: If a row's header does not fit the row.
    """
    written = [name for name in resampling.written if name in columns]
    # Shards without a supervised document have no ranges that limit noise, so there are two kinds
    # of rows.
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
    """Resample the rows of one kind, with the arguments of `resample`."""
    facts = all_segments.facts
    is_whole = len(rows) == len(all_segments.places)
    segments = (
        all_segments if is_whole else RowSegments(facts, [all_segments.places[i] for i in rows])
    )
    # Write to the columns themselves where that is possible.
    made: dict[str, np.ndarray] = {}
    for name in ("tokens", "loss_mask"):
        values, dtype = columns.get(name), own_dtype(name, facts.token_dtype)
        if values is None or not (is_whole and values.flags.c_contiguous and values.dtype == dtype):
            values = np.empty((len(rows), facts.seq_length), dtype)
        made[name] = values
    weights = _draw_rows(
        resampling,
        segments,
        epochs[rows],
        made["tokens"],
        made["loss_mask"],
        "loss_weights" in columns,
        kernels,
    )
    # Derive the other columns.
    if resampling.moved.any():
        if not is_whole:
            all_segments.changed["prefix"] = prefix = all_segments.column("prefix").copy()
            prefix[np.isin(all_segments.row, rows)] = segments.column("prefix")
        if "labels" in columns:
            labels = columns["labels"][rows]
            made["labels"] = _next_tokens(resampling, segments, made["tokens"], labels)
        if "prefix_ends" in columns:
            prefix_ends = segments.prefix_ends("block_lengths" in columns)
            made["prefix_ends"] = prefix_ends.reshape(made["tokens"].shape)
    loss_mask = made["loss_mask"]
    if facts.loss_on is not None:
        np.multiply(loss_mask, segments.kept().reshape(loss_mask.shape), out=loss_mask)
    if weights is not None:
        made["loss_weights"] = weights * loss_mask
    for name in resampling.written:
        if name in columns and made[name] is not columns[name]:
            columns[name][slice(None) if is_whole else rows] = made[name]


def _draw_rows(
    resampling: Resampling,
    segments: RowSegments,
    epochs: np.ndarray,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    weighted: bool,
    kernels: bool,
) -> np.ndarray | None:
    """Write tokens and loss_mask of rows.

    Returns:
        The weight of each slot before its loss_mask, [B, T], if `weighted`, otherwise None.
    """
    task = segments.column("task")
    if task.max(initial=0) >= len(resampling.by_task):
        raise DatasetError(
            f"redraw: segment_task {task.max()} is beyond the manifest's"
            f" {len(resampling.by_task)} tasks"
        )
    # The slots before the body are bos and the mode token.
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
    """Write the tokens and the loss_mask of rows before they are resampled.

    Same-position segments, bool[m], get their original tokens and a loss_mask of 0. The others keep
    the stored values.
    """
    segments, tokens, loss_mask = rows.segments, rows.tokens, rows.loss_mask
    # Segments with two copies have their originals in x_0, and their labels may be shifted. All
    # other same-position segments have their originals as labels.
    twice = segments.looked_up("task", segments.facts.in_blocks)
    labelled = in_place & ~twice
    for i, (shard, row) in enumerate(segments.places):  # Padding is the same in both.
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
    """Noise the same-position segments, bool[m], and store their levels in segments.changed.

    Returns:
        The weight of each slot before its loss_mask, [B, T], if `weighted`, otherwise None.
    """
    resampling, segments, tokens = rows.resampling, rows.segments, rows.tokens
    weight, level = (segments.column(name).copy() for name in ("loss_weight", "noise"))
    noised_blocks = []
    for t, epoch, which in rows.groups(in_place):
        task = resampling.by_task[t]
        assert isinstance(task, NoisedTask)
        target = _target(rows, task, which)
        if task.schedule.flips:
            _check_labels(segments, tokens, len(resampling.ids.rank))
        draw = _kernels().draw_of(task.schedule.name) if rows.kernels else task.schedule.draw
        noised = draw(t, task.parameters, task.resolved, resampling.ids, target, epoch)
        drawn = rows.header.tokens[which] > 0
        weight[which[drawn]], level[which[drawn]] = noised.weight[drawn], noised.level[drawn]
        if noised.blocks is not None:
            noised_blocks.append((which, task.parameters, noised.blocks))
    segments.changed |= {"loss_weight": weight, "noise": level}
    if not weighted:
        return None
    # Spread the weights of segments, blocks and trained ranges over slots.
    weights = segments.at_slots(weight, 0)
    for which, parameters, (count, _, values) in noised_blocks:
        lengths = np.full(len(which), parameters["block_length"])
        half, shift = segments.slots[which] // 2, int(parameters["shift"])
        put_blocks(weights, segments.at[which], half, lengths, count, values, shift)
    if (range_weights := segments.range_weights()) is not None:
        weights *= range_weights
    return weights.reshape(tokens.shape)


def _move_all(rows: _Rows) -> None:
    """Move the tokens of next-token segments to their slots in their rows' epochs.

    segments.changed receives the prefixes. A segment stays the same if its document leaves tokens
    untrained, or if it has no tokens.
    """
    resampling, segments, header = rows.resampling, rows.segments, rows.header
    moves = resampling.moved[segments.column("task")] & (header.tokens > 0) & ~_supervised(rows)
    prefix, flat_tokens = segments.column("prefix").copy(), rows.tokens.reshape(-1)
    move = _kernels().move if rows.kernels else _move
    for t, epoch, which in rows.groups(moves):
        task = resampling.by_task[t]
        assert isinstance(task, MovedTask)
        before, n = header.before[which], header.tokens[which]
        body_slots = segments.slots[which] - before
        check = partial(_check_slots, segments, which)
        check((n < task.layout.least) | (n > body_slots))
        bodies = Stretches(header.key[which], n, segments.at[which] + before)
        body_prefix = move(task, resampling.special, bodies, body_slots, epoch, flat_tokens, check)
        if body_prefix is not None:
            prefix[which] = before + body_prefix
    # If its prefix has changed, a segment has its loss elsewhere.
    is_changed = prefix != segments.column("prefix")
    if is_changed.any():
        new_loss_mask = next_token_loss_mask(
            segments.at[is_changed], segments.slots[is_changed], prefix[is_changed], segments.size
        )
        if rows.trainable is not None:
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
    """Write one task's segments of one epoch to the flat rows.

    Args:
        task: The task.
        special: The ids that it writes.
        bodies: The bodies of its segments.
        body_slots: int64[m], slots of each body and its eos.
        epoch: The epoch.
        rows: The flat rows, which hold the stored tokens.
        check: Raises DatasetError if its first argument, bool[m], has a True.

    Returns:
        The prefix of each body, int64[m]; None for a task without prefixes.
    """
    layout, drawn = task.layout, (task.parameters, special, bodies)
    stored = layout.place(*drawn, 0, rows)
    check(misfit(body_slots, stored.slots))
    wrong_slots = stored.special[rows[stored.special] != stored.id]
    has_wrong = np.zeros(len(bodies.n), np.bool_)
    has_wrong[np.searchsorted(bodies.first_slot, wrong_slots, "right") - 1] = True
    check(has_wrong, SPECIAL)
    tokens = rows[stored.token]
    placed = layout.place(*drawn, epoch, tokens)
    rows[placed.token] = tokens
    rows[placed.special] = placed.id
    return placed.prefix


def _check_slots(
    segments: RowSegments,
    which: np.ndarray,
    wrong: np.ndarray,
    missing: str = "the positions that its tokens need",
) -> None:
    """Check that no segment is `wrong`, bool[k] for the segments `which`.

    Raises:
        DatasetError: If one is. The message says that it has not `missing`.
    """
    if wrong.any():
        g = which[np.argmax(wrong)]
        first_slot = int(segments.at[g]) % segments.facts.seq_length
        task = segments.column("task")[g]
        raise segments.fault(
            int(segments.row[g]),
            f"the segment of task {task} at position {first_slot} does not have {missing}",
        )


def _supervised(rows: _Rows) -> np.ndarray:
    """Return which segments have documents that leave tokens other than eos untrained, bool[m]."""
    segments, header = rows.segments, rows.header
    is_supervised = np.zeros(len(segments), np.bool_)
    if rows.trainable is None:
        return is_supervised
    segment, ranges, _ = segments.trained()
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
    is_supervised[:] = np.bincount(segment, minlength=len(is_supervised)) != 1
    is_supervised[segment] |= (ranges[:, 0] > header.before[segment]) | (
        ranges[:, 1] < body_end[segment]
    )
    return is_supervised


def _next_tokens(
    resampling: Resampling, segments: RowSegments, tokens: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """Return the labels of rows, [B, T].

    Slots of moved segments get the next token, and slots of same-position segments get `labels`.
    """
    following = np.empty_like(tokens)
    following[:, :-1] = tokens[:, 1:]
    following.reshape(-1)[segments.without_next()] = segments.facts.pad_id
    if not resampling.in_place.any():
        return following
    is_moved = segments.at_slots(resampling.moved[segments.column("task")], False)
    return np.where(is_moved.reshape(tokens.shape), following, labels)


def _check_labels(segments: RowSegments, labels: np.ndarray, vocab_size: int) -> None:
    """Check that all labels are ids, since flips use them as indices.

    Raises:
        DatasetError: If one is not.
    """
    is_wrong = (labels < 0) | (labels >= vocab_size)
    if is_wrong.any():
        i, slot = (int(n) for n in np.argwhere(is_wrong)[0])
        raise segments.fault(
            i, f"position {slot}: {labels[i, slot]} is not an id below vocab_size {vocab_size}"
        )


def _trainable(segments: RowSegments) -> np.ndarray | None:
    """Return 1 for slots inside trained ranges, uint8[size], or None if shards have no ranges."""
    if "trained_ranges" not in segments.places[0][0].layout:
        return None
    segment, ranges, _ = segments.trained()
    begins, lengths = segments.at[segment] + ranges[:, 0], ranges[:, 1] - ranges[:, 0]
    return fill_slots(begins, lengths, np.ones(len(ranges), np.uint8), 0, segments.size)


def _target(rows: _Rows, task: NoisedTask, which: np.ndarray) -> noise.Target:
    """Return the candidates of one task's segments, which are the same as in rendering.

    They are the body and eos, or only the body if noise_eos is off. A segment without tokens has no
    candidates, but the levels of its row's other segments may depend on it.
    """
    segments, header = rows.segments, rows.header
    half = segments.slots[which] // task.copies
    before = header.before[which]
    count = half - before
    if not task.parameters["noise_eos"] and (rows.trainable is None or task.copies > 1):
        # If trained ranges limit noise, they exclude eos themselves.
        count = np.minimum(count, header.tokens[which])
    if (count < 0).any():
        raise DatasetError(
            "redraw: a segment has fewer positions than its bos and mode token\n"
            "hint: run `packprep verify` to find it"
        )
    count = np.where(header.tokens[which] > 0, count, 0)
    candidates = noise.Candidates(
        header.key[which], segments.at[which] + before, count, segments.row[which]
    )
    flat = rows.tokens.reshape(-1), rows.loss_mask.reshape(-1)
    return noise.Target(candidates, before, half, rows.trainable, *flat)
