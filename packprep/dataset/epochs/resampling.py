"""Redraw: the segments of rows drawn anew, in every epoch but 0, by the laws of `noise.py` and
`token_slots.py`.

    manifest ─ resampling_of ─► Resampling: what each task's law reads, checked before anything is computed from its numbers
    stored rows ─ labels ─► tokens of in-place segments ─ its law's draw(…, epoch) ─► tokens, loss_mask, weights
    stored rows ─ where its law puts them in epoch 0 ─► tokens of the others ─ … in this epoch ─► tokens, labels, prefixes

Keys are the segments', so that what an epoch gives depends neither on the batch nor on the rank
that asks.
"""

import json
from collections.abc import Callable, Mapping
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
"""Epochs after which chance repeats, from the stored rows on."""
MOST_IDS = 1 << 24
"""Ids of a vocabulary for which redraw makes tables, of 9 bytes each."""


class NoisedTask(NamedTuple):
    """How one task's segments are noised."""

    law: noise.NoiseSchedule
    parameters: Mapping[str, Any]
    resolved: Mapping[str, Any]
    mode: int  # slots of the mode token
    copies: int  # 2 for [x_t ; x_0], of which x_t is noised


class MovedTask(NamedTuple):
    """How one task's segments have their tokens moved."""

    law: TokenLayout
    parameters: Mapping[str, Any]
    mode: int  # slots of the mode token


class Resampling(NamedTuple):
    """What redraw needs of a manifest."""

    by_task: list[NoisedTask | MovedTask | None]  # None: causal, which has no chance
    in_place: np.ndarray  # bool[tasks]
    moved: np.ndarray  # bool[tasks]
    ids: noise.NoiseIds
    special: SpecialIds
    prepend_bos: bool

    @property
    def has_chance(self) -> bool:
        """Whether any task is drawn anew."""
        return bool(self.in_place.any() or self.moved.any())

    @property
    def written(self) -> tuple[str, ...]:
        """The columns that `resample` writes, in every slot of a row, but that it reads the labels
        of in-place tasks."""
        return (
            "tokens",
            "loss_mask",
            "loss_weights",
            *(("labels", "prefix_ends") if self.moved.any() else ()),
        )


def resampling_of(manifest: Manifest, read_tokenizer: Callable[[], bytes]) -> Resampling:
    """The laws of a dataset's tasks; ArgumentError if a task has chance and no law here,
    DatasetError if one cannot be applied.

    read_tokenizer: gives the dataset's tokenizer.json, where the manifest does not tell which
    tokens begin inside a character; OSError where it is not at hand.
    """
    by_task: list[NoisedTask | MovedTask | None] = []
    next_token = [task for task in manifest["tasks"] if not is_in_place(task)]
    stuck = [task for task in next_token if task["objective"] not in ("causal", *LAYOUTS)]
    if stuck:
        named = ", ".join(f"{task['name']!r} ({task['objective']})" for task in stuck)
        raise ArgumentError(
            f"redraw: {named} cannot be drawn anew, only {', '.join((*LAYOUTS, *noise.SCHEDULES))}"
            " can: read the stored rows, without redraw; a recipe's repeat gives each use of a"
            " document chance of its own"
        )
    special = _special_ids(manifest)
    has_sides = bool(manifest["recipe"].get("packing", {}).get("encoder_length"))
    for task in manifest["tasks"]:
        mode = int(task["mode_token"] is not None)
        if task["objective"] in LAYOUTS:
            token_law = LAYOUTS[task["objective"]]
            if has_sides and not token_law.keeps_prefix:  # which would not fit its side
                by_task.append(None)
                continue
            own = _read_parameters(token_law, task, manifest["made_with"])
            if len(special.sentinels) < token_law.sentinels(own):
                raise DatasetError(
                    f"redraw: task {task['name']!r} needs {token_law.sentinels(own)} sentinels, and"
                    f" the manifest's specials have {len(special.sentinels)}"
                )
            if missing := sorted(token_law.roles(own) - manifest["specials"].keys()):
                raise DatasetError(
                    f"redraw: task {task['name']!r} needs {missing[0]}, which the manifest's"
                    " specials do not have"
                )
            if token_law.whole(own) and not len(special.continues):
                special = special._replace(
                    continues=_continues(manifest, task["name"], read_tokenizer)
                )
            by_task.append(MovedTask(token_law, own, mode))
            continue
        if not is_in_place(task):
            by_task.append(None)
            continue
        if task["objective"] not in noise.SCHEDULES:
            raise ArgumentError(
                f"redraw: task {task['name']!r} has the objective {task['objective']!r}, which"
                " comes from outside packprep and has no law of noise here (there are"
                f" {', '.join(noise.SCHEDULES)}): read its stored rows, without redraw"
            )
        law = noise.SCHEDULES[task["objective"]]
        parameters = _read_parameters(law, task, manifest["made_with"])
        resolved = task.get("resolved", {})
        arrays = {
            name: np.array(value) if isinstance(value, list) else value
            for name, value in resolved.items()
        }
        if law.attention != task["attention"]:
            raise DatasetError(
                f"redraw: task {task['name']!r} in the manifest: the attention of {law.name} is not"
                f" {task['attention']}"
            )
        if parameters.get("shift", False) != (task["label_alignment"] == "next_slot"):
            raise DatasetError(
                f"redraw: task {task['name']!r} in the manifest: shift is not what its"
                f" label_alignment, {task['label_alignment']}, says"
            )
        if why := law.unusable(resolved):
            raise DatasetError(f"redraw: task {task['name']!r} in the manifest: {why}")
        by_task.append(NoisedTask(law, parameters, arrays, mode, RULES[law.attention].copies))
    in_place, moved = (
        np.array([isinstance(law, kind) for law in by_task]) for kind in (NoisedTask, MovedTask)
    )
    bos = bool(manifest["recipe"].get("documents", {}).get("prepend_bos", False))
    ids = _ids(manifest, [law for law in by_task if isinstance(law, NoisedTask)])
    return Resampling(by_task, in_place, moved, ids, special, bos)


def _special_ids(manifest: Manifest) -> SpecialIds:
    """The sentinels and role tokens, −1 for a role that no token has; DatasetError where they are
    none."""
    specials = manifest["specials"]
    sentinels = specials.get("sentinels", [])
    if not isinstance(sentinels, list) or max(sentinels, default=0) >= manifest["vocab_size"]:
        raise DatasetError(
            "redraw: the manifest's sentinels are no list of ids below vocab_size"
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
    """uint8[vocab_size]: 1 where a token begins inside a character, as the manifest says, or the
    dataset's tokenizer.json."""
    stored, size = manifest.get("continues", ""), manifest["vocab_size"]
    try:
        if stored:
            return flags_of(stored, size)
        return continuing(json.loads(read_tokenizer()), size)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = "continues" if stored else "tokenizer.json"
        raise ArgumentError(
            f"redraw: {task!r} never cuts inside a character, and the dataset's {what} does not"
            f" tell which tokens begin inside one ({error}): put the tokenizer.json that was built"
            " with it beside its dataset.json, or read the stored rows, without redraw"
        ) from error


def _ids(manifest: Manifest, laws: list[NoisedTask]) -> noise.NoiseIds:
    """The ids that the laws write; DatasetError where the manifest has not what they need."""
    specials, vocab_size = manifest["specials"], manifest["vocab_size"]
    if not laws:
        none = np.zeros(0, np.int32)
        return noise.NoiseIds(-1, none, none)
    if "special_ids" not in specials:
        raise DatasetError(
            "redraw: the manifest's specials have no special_ids, without which no ordinary token"
            " is known"
        )
    if vocab_size > MOST_IDS:
        raise DatasetError(
            f"redraw: the manifest's vocab_size is {vocab_size}, and tables are made of at most"
            f" {MOST_IDS} ids"
        )
    special, mask = specials["special_ids"], specials.get("mask", -1)
    if not isinstance(special, list) or max(special, default=0) >= vocab_size:
        raise DatasetError(
            f"redraw: the manifest's special_ids are no list of ids below vocab_size {vocab_size}"
        )
    if not isinstance(mask, int) or mask >= vocab_size:
        raise DatasetError(
            f"redraw: the manifest's mask is {mask!r} and should be an id below vocab_size"
            f" {vocab_size}"
        )
    ids = noise.NoiseIds(mask, *noise.ordinary_ids(vocab_size, np.array(special, np.int64)))
    needs = frozenset[str]().union(*(task.law.needs(task.parameters) for task in laws))
    if mask < 0 and "mask" in needs:
        raise DatasetError("redraw: a task masks, and the manifest's specials have no mask")
    if len(ids.ordinary) < 2 and "ordinary" in needs:
        raise DatasetError(
            "redraw: a task draws other tokens, and the manifest has no two ordinary ids"
        )
    return ids


def _read_parameters(
    law: noise.NoiseSchedule | TokenLayout, task: StoredTask, made_with: Any
) -> dict[str, Any]:
    """A task's parameters in their types, with those that joined later and are absent.

    DatasetError unless it has all that its law reads, in range, and no unknown one, and what the
    plan worked out for it.
    """
    where = f"redraw: task {task['name']!r} in the manifest"
    if unknown := task["parameters"].keys() - {parameter.name for parameter in law.parameters}:
        raise DatasetError(f"{where}: {unknown_key(min(unknown), made_with)}")
    parameters = {}
    for parameter in law.parameters:
        name = parameter.name
        value = task["parameters"].get(name, parameter.default if parameter.later else None)
        try:
            parameters[name] = parameter.accept(value, where)
            good = (
                not isinstance(law, noise.NoiseSchedule)
                or name != "noise_range"
                or parameters[name][0] >= law.least
            )
        except RecipeError:
            good = False
        if not good:
            raise DatasetError(
                f"{where}: {name} is {value!r:.100}, which {law.name} cannot use; `packprep verify`"
                " says more"
            )
    if not isinstance(task.get("resolved", {}), dict):
        raise DatasetError(f"{where}: resolved is no object")
    return parameters


def _kernels() -> Any:
    """`draw_of` and `move` of objectives/tasks.py, which need numba; by name, since trainers may
    have this room alone."""
    with unforked():
        return import_module("packprep.objectives.tasks")


@cache
def check_accelerate(accelerate: str) -> bool:
    """Whether the kernels of a build draw anew; ArgumentError unless it is "numpy", "numba", where
    that and what kernels are kept by is installed, or "auto": numba where they are."""
    if accelerate not in ACCELERATE:
        raise ArgumentError(
            f"accelerate is {accelerate!r} and should be one of {', '.join(map(repr, ACCELERATE))}"
        )
    missing = [name for name in _KERNELS_NEED if find_spec(name) is None]
    if accelerate == "numba" and missing:
        raise ArgumentError(
            f"accelerate = 'numba' needs {', '.join(missing)}, not installed here: pip install"
            f" {' '.join(missing)}, or take 'numpy', which gives the same rows"
        )
    return accelerate != "numpy" and not missing


def resample(
    laws: Resampling,
    epochs: np.ndarray,
    segments: RowSegments,
    columns: Mapping[str, np.ndarray],
    kernels: bool = False,
) -> None:
    """Draw anew what `columns`, name → [B, T], hold of rows with an epoch above 0: tokens, labels,
    loss_mask, loss_weights, prefix_ends.

    epochs: int64[B], below EPOCHS. kernels: by those of a build, which need numba and write the
    same. DatasetError where a row's header does not fit the row.
    """
    written = [name for name in laws.written if name in columns]
    by_ranges: dict[
        bool, list[int]
    ] = {}  # shards without a supervised document have no ranges that limit noise
    for i in np.flatnonzero(epochs).tolist() if written else ():
        by_ranges.setdefault("trained_ranges" in segments.places[i][0].layout, []).append(i)
    for which in by_ranges.values():
        every = len(which) == len(segments.places)
        own = (
            segments if every else RowSegments(segments.facts, [segments.places[i] for i in which])
        )
        made: dict[str, np.ndarray] = {}
        for name in ("tokens", "loss_mask"):
            values, dtype = columns.get(name), own_dtype(name, segments.facts.token_dtype)
            if values is None or not (
                every and values.flags.c_contiguous and values.dtype == dtype
            ):
                values = np.empty((len(which), segments.facts.seq_length), dtype)
            made[name] = values
        weights = _redraw(
            laws,
            own,
            epochs[which],
            made["tokens"],
            made["loss_mask"],
            "loss_weights" in columns,
            kernels,
        )
        if laws.moved.any():
            if not every:
                segments.changed["prefix"] = prefix = segments.column("prefix").copy()
                prefix[np.isin(segments.row, which)] = own.column("prefix")
            if "labels" in columns:
                made["labels"] = _next_tokens(laws, own, made["tokens"], columns["labels"][which])
            if "prefix_ends" in columns:
                made["prefix_ends"] = own.prefix_ends("block_lengths" in columns).reshape(
                    made["tokens"].shape
                )
        if segments.facts.loss_on is not None:
            np.multiply(
                made["loss_mask"],
                own.kept().reshape(made["loss_mask"].shape),
                out=made["loss_mask"],
            )
        if weights is not None:
            made["loss_weights"] = weights * made["loss_mask"]
        for name in written:
            if made[name] is not columns[name]:
                columns[name][slice(None) if every else which] = made[name]


def _redraw(
    laws: Resampling,
    segments: RowSegments,
    epochs: np.ndarray,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    weighted: bool,
    kernels: bool,
) -> np.ndarray | None:
    """Write tokens and loss_mask; gives each slot's weight, [B, T], before its loss_mask, if
    `weighted`."""
    task = segments.column("task")
    if task.max(initial=0) >= len(laws.by_task):
        raise DatasetError(
            f"redraw: segment_task {task.max()} is beyond the manifest's {len(laws.by_task)} tasks"
        )
    in_place = laws.in_place[task]
    twice = segments.looked_up("task", segments.facts.in_blocks)
    labelled = in_place & ~twice  # of the others x_0 is at hand, and labels may be of the next slot
    for i, (shard, row) in enumerate(segments.places):  # padding is the same in both
        tokens[i] = shard.row("labels" if labelled.all() else "tokens", row)
    if labelled.any() and not labelled.all():
        labels = np.empty_like(tokens)
        for i, (shard, row) in enumerate(segments.places):
            labels[i] = shard.row("labels", row)
        np.copyto(tokens, labels, where=segments.at_slots(labelled, False).reshape(tokens.shape))
    put_clean(
        tokens.reshape(-1), tokens.reshape(-1), segments.at[twice], segments.slots[twice] // 2
    )
    if in_place.all():
        loss_mask[...] = 0
    else:
        fill(segments, "loss_mask", loss_mask)
        np.copyto(loss_mask, 0, where=segments.at_slots(in_place, False).reshape(tokens.shape))
    header = {name: segments.column(name) for name in ("key", "tokens")}
    mode = np.array([0 if law is None else law.mode for law in laws.by_task], np.int64)
    # slots before the body
    header["before"] = ((segments.column("start") == 0) & laws.prepend_bos) + mode[task]
    trainable = _trainable(segments)
    if laws.moved[task].any():
        _move_all(laws, segments, header, epochs, trainable, tokens, loss_mask, kernels)
    weight, level, by_block = (
        segments.column("loss_weight").copy(),
        segments.column("noise").copy(),
        [],
    )
    for t in np.unique(task[in_place]):
        law = laws.by_task[t]
        assert isinstance(law, NoisedTask)
        of_task = np.flatnonzero(task == t)
        epoch_of = epochs[segments.row[of_task]]
        for epoch in np.unique(epoch_of):
            which = of_task[epoch_of == epoch]
            target = _target(law, segments, header, which, trainable, tokens, loss_mask)
            if law.law.flips:
                _check_labels(segments, tokens, len(laws.ids.rank))
            draw = _kernels().draw_of(law.law.name) if kernels else law.law.draw
            noised = draw(int(t), law.parameters, law.resolved, laws.ids, target, int(epoch))
            weight[which], level[which] = noised.weight, noised.level
            if noised.blocks is not None:
                by_block.append((which, law.parameters, noised.blocks))
    blank = segments.removed & in_place
    if blank.any():  # they were drawn with the others of their rows, whose levels ask for them
        away = segments.at_slots(blank, False).reshape(tokens.shape)
        tokens[away], loss_mask[away] = segments.facts.pad_id, 0
    segments.changed |= {"loss_weight": weight, "noise": level}
    if not weighted:
        return None
    weights = segments.at_slots(weight, 0)
    for which, of, (count, _, values) in by_block:
        lengths, half = np.full(len(which), of["block_length"]), segments.slots[which] // 2
        put_blocks(weights, segments.at[which], half, lengths, count, values, int(of["shift"]))
    if (of_ranges := segments.range_weights()) is not None:
        weights *= of_ranges
    return weights.reshape(tokens.shape)


def _move_all(
    laws: Resampling,
    segments: RowSegments,
    header: Mapping[str, Any],
    epochs: np.ndarray,
    trainable: np.ndarray | None,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    kernels: bool,
) -> None:
    """Put the tokens of next-token segments where their epochs have them, with the sentinels;
    segments.changed has the prefixes.

    A segment whose document says what of it is trained keeps its own place, and one whose document
    was removed has nothing to move.
    """
    task, epoch_of = segments.column("task"), epochs[segments.row]
    moves = laws.moved[task] & ~segments.removed & ~_supervised(laws, segments, header)
    prefix, flat = segments.column("prefix").copy(), tokens.reshape(-1)
    move = _kernels().move if kernels else _move
    for t in np.unique(task[moves]):
        law = laws.by_task[t]
        assert isinstance(law, MovedTask)
        of_task = moves & (task == t)
        for epoch in np.unique(epoch_of[of_task]):
            which = np.flatnonzero(of_task & (epoch_of == epoch))
            before, n = header["before"][which], header["tokens"][which].astype(np.int64)
            room = segments.slots[which] - before
            check = partial(_check_slots, segments, which)
            check((n < law.law.least) | (n > room))
            own = Stretches(header["key"][which], n, segments.at[which] + before)
            anew = move(law.law, law.parameters, laws.special, own, room, int(epoch), flat, check)
            if anew is not None:
                prefix[which] = before + anew
    changed = np.flatnonzero(prefix != segments.column("prefix"))
    if len(changed):
        anew = next_token_loss_mask(
            segments.at[changed], segments.slots[changed], prefix[changed], segments.size
        )
        if trainable is not None:
            anew[:-1] &= trainable[1:]
        here = np.zeros(len(segments), np.bool_)
        here[changed] = True
        np.copyto(
            loss_mask,
            anew.reshape(tokens.shape),
            where=segments.at_slots(here, False).reshape(tokens.shape),
        )
    segments.changed["prefix"] = prefix


def _move(
    law: TokenLayout,
    parameters: Mapping[str, Any],
    special: SpecialIds,
    own: Stretches,
    room: np.ndarray,
    epoch: int,
    rows: np.ndarray,
    check: Callable[..., None],
) -> np.ndarray | None:
    """Write one task's segments of one epoch into the flat rows; gives the bodies' prefixes, None
    where none ever has one.

    room: int64[m], slots of a body and its eos. check: (bool[m], what is lacking where it is True):
    raises what is wrong.
    """
    drawn = parameters, special, own
    stored = law.place(*drawn, 0, rows)
    check(misfit(room, stored.slots))
    wrong = np.zeros(len(own.n), np.bool_)
    wrong[
        np.searchsorted(own.first_slot, stored.special[rows[stored.special] != stored.id], "right")
        - 1
    ] = True
    check(wrong, SPECIAL)
    body = rows[stored.token]
    anew = law.place(*drawn, epoch, body)
    rows[anew.token] = body
    rows[anew.special] = anew.id
    return anew.prefix


def _check_slots(
    segments: RowSegments,
    which: np.ndarray,
    wrong: np.ndarray,
    what: str = "the slots that its tokens take",
) -> None:
    """DatasetError if one of the segments `which` has not `what`."""
    if wrong.any():
        g = which[np.argmax(wrong)]
        begin = int(segments.at[g]) % segments.facts.seq_length
        task = segments.column("task")[g]
        raise segments.fault(
            int(segments.row[g]), f"the segment of task {task} at slot {begin} has not {what}"
        )


def _supervised(laws: Resampling, segments: RowSegments, header: Mapping[str, Any]) -> np.ndarray:
    """bool[m]: the segments of which not all is trained alike, as their documents say; an eos need
    not be."""
    stays = np.zeros(len(segments), np.bool_)
    if "trained_ranges" in segments.places[0][0].layout:
        segment, ranges, _ = segments.trained()
        added = np.array(
            [
                (
                    sum(
                        int(law.parameters.get(name, 0))
                        for name in ("sentinel", EOS_AFTER_INPUTS.name)
                    )
                    if isinstance(law, MovedTask)
                    else 0
                )
                for law in laws.by_task
            ]
        )
        body = header["before"] + header["tokens"].astype(np.int64) + added[segments.column("task")]
        stays[:] = np.bincount(segment, minlength=len(stays)) != 1
        stays[segment] |= (ranges[:, 0] > header["before"][segment]) | (
            ranges[:, 1] < body[segment]
        )
    return stays


def _next_tokens(
    laws: Resampling, segments: RowSegments, tokens: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """[B, T]: the labels of the slots, with the next tokens at those of moved segments; `labels` is
    read where a task predicts in place."""
    following = np.empty_like(tokens)
    following[:, :-1] = tokens[:, 1:]
    following.reshape(-1)[segments.without_next()] = segments.facts.pad_id
    if not laws.in_place.any():
        return following
    moved = segments.at_slots(laws.moved[segments.column("task")], False).reshape(tokens.shape)
    return np.where(moved, following, labels)


def _check_labels(segments: RowSegments, labels: np.ndarray, vocab_size: int) -> None:
    """DatasetError for a label that is no id: flips look it up."""
    wrong = (labels < 0) | (labels >= vocab_size)
    if wrong.any():
        i, slot = (int(n) for n in np.argwhere(wrong)[0])
        raise segments.fault(
            i, f"slot {slot}: {labels[i, slot]} is no id below vocab_size {vocab_size}"
        )


def _trainable(segments: RowSegments) -> np.ndarray | None:
    """uint8[size]: the slots inside trained ranges; None where shards have none."""
    if "trained_ranges" not in segments.places[0][0].layout:
        return None
    segment, ranges, _ = segments.trained()
    begins, lengths = segments.at[segment] + ranges[:, 0], ranges[:, 1] - ranges[:, 0]
    return fill_slots(begins, lengths, np.ones(len(ranges), np.uint8), 0, segments.size)


def _target(
    law: NoisedTask,
    segments: RowSegments,
    header: Mapping[str, Any],
    which: np.ndarray,
    trainable: np.ndarray | None,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
) -> noise.Target:
    """The candidates of one task's segments, as render finds them: the body and, unless noise_eos
    is off, eos."""
    half = segments.slots[which] // law.copies
    before = header["before"][which]
    count = half - before
    if not law.parameters["noise_eos"] and (trainable is None or law.copies > 1):
        # where ranges say what may be noised, they leave eos out
        count = np.minimum(count, header["tokens"][which])
    if (count < 0).any():
        what = "a segment has fewer slots than its bos and mode token; `packprep verify` says which"
        raise DatasetError(f"redraw: {what}")
    own = noise.Candidates(
        header["key"][which], segments.at[which] + before, count, segments.row[which]
    )
    return noise.Target(own, before, half, trainable, tokens.reshape(-1), loss_mask.reshape(-1))
