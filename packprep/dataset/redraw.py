"""Redraw: the in-place segments of rows noised anew from their labels, in every epoch but 0, by the law of `noise.py`.

    manifest ─ laws_of ─► Laws: what each task's law reads, checked before anything is computed from its numbers
    stored rows ─ labels ─► tokens of in-place segments ─ its law's draw(…, epoch) ─► tokens, loss_mask, weights

Keys are the segments', so that what an epoch gives depends neither on the batch nor on the rank that asks.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset import noise
from packprep.dataset.attention import RULES
from packprep.dataset.boundaries import fill_slots
from packprep.dataset.manifest import Manifest, StoredTask
from packprep.dataset.rows import Segments, own_dtype, put_blocks
from packprep.errors import ArgumentError, DatasetError, RecipeError
from packprep.format.json_files import LAWS_MADE, other_law, unknown_key

REDRAWN = ("tokens", "loss_mask", "loss_weights")
"""The columns of which `redrawn` writes every slot of a row."""
MOST_IDS = 1 << 24
"""Ids of a vocabulary for which redraw makes tables, of 9 bytes each."""


class TaskLaw(NamedTuple):
    """How one task's segments are noised."""

    law: noise.NoiseLaw
    parameters: Mapping[str, Any]
    resolved: Mapping[str, Any]
    mode: int  # slots of the mode token
    copies: int  # 2 for [x_t ; x_0], of which x_t is noised


class Laws(NamedTuple):
    """What redraw needs of a manifest."""

    by_task: list[TaskLaw | None]  # None: causal, which has no chance
    in_place: np.ndarray  # bool[tasks]
    ids: noise.NoiseIds
    prepend_bos: bool


def laws_of(manifest: Manifest) -> Laws:
    """The laws of a dataset's tasks; ArgumentError if a task has chance and no law here, or if all are of another law_version,
    DatasetError if one cannot be applied."""
    if manifest["law_version"] not in LAWS_MADE:
        raise ArgumentError(
            f"redraw: the dataset has {other_law(manifest['law_version'], manifest['made_with'])}, or read its stored rows, "
            "without redraw"
        )
    by_task: list[TaskLaw | None] = []
    next_token = [task for task in manifest["tasks"] if task["label_alignment"] != "same_slot"]
    stuck = [task for task in next_token if task["objective"] != "causal"]
    if stuck:
        named = ", ".join(f"{task['name']!r} ({task['objective']})" for task in stuck)
        raise ArgumentError(
            f"redraw: {named} cannot be drawn anew yet, only {', '.join(noise.LAWS)} can: read the stored rows, without redraw; "
            "a recipe's repeat gives each use of a document chance of its own"
        )
    for task in manifest["tasks"]:
        if task["label_alignment"] != "same_slot":
            by_task.append(None)
            continue
        if task["objective"] not in noise.LAWS:
            raise ArgumentError(
                f"redraw: task {task['name']!r} has the objective {task['objective']!r}, which comes from outside packprep "
                f"and has no law of noise here (there are {', '.join(noise.LAWS)}): read its stored rows, without redraw"
            )
        law = noise.LAWS[task["objective"]]
        parameters = _read_parameters(law, task, manifest["made_with"])
        resolved = task.get("resolved", {})
        arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in resolved.items()}
        by_task.append(
            TaskLaw(law, parameters, arrays, int(task["mode_token"] is not None), RULES[law.attention].copies)
        )
    in_place = np.array([law is not None for law in by_task])
    bos = bool(manifest["recipe"].get("documents", {}).get("prepend_bos", False))
    return Laws(by_task, in_place, _ids(manifest, [law for law in by_task if law is not None]), bos)


def _ids(manifest: Manifest, laws: list[TaskLaw]) -> noise.NoiseIds:
    """The ids that the laws write; DatasetError where the manifest has not what they need."""
    specials, vocab_size = manifest["specials"], manifest["vocab_size"]
    if not laws:
        none = np.zeros(0, np.int32)
        return noise.NoiseIds(-1, none, none)
    if "special_ids" not in specials:
        raise DatasetError(
            "redraw: the manifest's specials have no special_ids, without which no ordinary token is known"
        )
    if vocab_size > MOST_IDS:
        raise DatasetError(
            f"redraw: the manifest's vocab_size is {vocab_size}, and tables are made of at most {MOST_IDS} ids"
        )
    special, mask = specials["special_ids"], specials.get("mask", -1)
    if not isinstance(special, list) or max(special, default=0) >= vocab_size:
        raise DatasetError(f"redraw: the manifest's special_ids are no list of ids below vocab_size {vocab_size}")
    if not isinstance(mask, int) or mask >= vocab_size:
        raise DatasetError(f"redraw: the manifest's mask is {mask!r} and should be an id below vocab_size {vocab_size}")
    ids = noise.NoiseIds(
        mask, *noise.ordinary_ids(vocab_size, np.array(special, np.int64)), law=manifest["law_version"]
    )
    needs = frozenset[str]().union(*(task.law.needs(task.parameters) for task in laws))
    if mask < 0 and "mask" in needs:
        raise DatasetError("redraw: a task masks, and the manifest's specials have no mask")
    if len(ids.ordinary) < 2 and "ordinary" in needs:
        raise DatasetError("redraw: a task draws other tokens, and the manifest has no two ordinary ids")
    return ids


def _read_parameters(law: noise.NoiseLaw, task: StoredTask, made_with: Any) -> dict[str, Any]:
    """A task's parameters in their types, with those that joined later and are absent.

    DatasetError unless it has all that its law reads, in range, and no unknown one, and what the plan worked out for it.
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
            good = name != "noise_range" or parameters[name][0] >= law.least
        except RecipeError:
            good = False
        if not good:
            raise DatasetError(
                f"{where}: {name} is {value!r:.100}, which {law.name} cannot use; `packprep verify` says more"
            )
    if law.attention != task["attention"]:
        raise DatasetError(f"{where}: the attention of {law.name} is not {task['attention']}")
    resolved = task.get("resolved", {})
    if not isinstance(resolved, dict):
        raise DatasetError(f"{where}: resolved is no object")
    if why := law.unusable(resolved):
        raise DatasetError(f"{where}: {why}")
    return parameters


def redrawn(laws: Laws, epochs: np.ndarray, segments: Segments, columns: Mapping[str, np.ndarray]) -> None:
    """Noise anew what `columns`, name → [B, T], hold of rows with an epoch above 0: tokens, loss_mask, loss_weights.

    epochs: int64[B], below 2³², after which chance repeats. DatasetError where a row's header does not fit the row.
    """
    written = [name for name in REDRAWN if name in columns]
    by_ranges: dict[bool, list[int]] = {}  # shards without a supervised document have no ranges that limit noise
    for i in np.flatnonzero(epochs).tolist() if written else ():
        by_ranges.setdefault("trained_ranges" in segments.places[i][0].layout, []).append(i)
    for which in by_ranges.values():
        every = len(which) == len(segments.places)
        own = segments if every else Segments(segments.facts, [segments.places[i] for i in which])
        made: dict[str, np.ndarray] = {}
        for name in ("tokens", "loss_mask"):
            values, dtype = columns.get(name), own_dtype(name, segments.facts.token_dtype)
            if values is None or not (every and values.flags.c_contiguous and values.dtype == dtype):
                values = np.empty((len(which), segments.facts.seq_length), dtype)
            made[name] = values
        weights = _redraw(laws, own, epochs[which], made["tokens"], made["loss_mask"], "loss_weights" in columns)
        if segments.facts.loss_on is not None:
            np.multiply(made["loss_mask"], own.kept().reshape(made["loss_mask"].shape), out=made["loss_mask"])
        if weights is not None:
            made["loss_weights"] = weights * made["loss_mask"]
        for name in written:
            if made[name] is not columns[name]:
                columns[name][slice(None) if every else which] = made[name]


def _redraw(
    laws: Laws, segments: Segments, epochs: np.ndarray, tokens: np.ndarray, loss_mask: np.ndarray, weighted: bool
) -> np.ndarray | None:
    """Write tokens and loss_mask; gives each slot's weight, [B, T], before its loss_mask, if `weighted`."""
    task = segments.column("task")
    if task.max(initial=0) >= len(laws.by_task):
        raise DatasetError(f"redraw: segment_task {task.max()} is beyond the manifest's {len(laws.by_task)} tasks")
    in_place = laws.in_place[task]
    if in_place.all():  # padding is the same in both
        for i, (shard, row) in enumerate(segments.places):
            tokens[i] = shard.row("labels", row)
        loss_mask[...] = 0
    else:
        labels = np.empty_like(tokens)
        for i, (shard, row) in enumerate(segments.places):
            labels[i], tokens[i] = shard.row("labels", row), shard.row("tokens", row)
            loss_mask[i] = shard.row("loss_mask", row)
        anew = segments.at_slots(in_place, False).reshape(tokens.shape)
        np.copyto(tokens, labels, where=anew)
        np.copyto(loss_mask, 0, where=anew)
    header = {name: segments.column(name) for name in ("key", "start", "tokens")}
    weight, by_block = segments.column("loss_weight").copy(), []
    trainable = _trainable(segments)
    for t in np.unique(task[in_place]):
        law = laws.by_task[t]
        assert law is not None
        of_task = np.flatnonzero(task == t)
        epoch_of = epochs[segments.row[of_task]]
        for epoch in np.unique(epoch_of):
            which = of_task[epoch_of == epoch]
            target = _target(laws, law, segments, header, which, trainable, tokens, loss_mask)
            if law.law.flips:
                _check_labels(segments, tokens, len(laws.ids.rank))
            noised = law.law.draw(int(t), law.parameters, law.resolved, laws.ids, target, int(epoch))
            weight[which] = noised.weight
            if noised.blocks is not None:
                by_block.append((which, law.parameters["block_length"], noised.blocks))
    if not weighted:
        return None
    weights = segments.at_slots(weight, 0)
    for which, length, (count, _, values) in by_block:
        lengths = np.full(len(which), length)
        put_blocks(weights, segments.at[which], segments.slots[which] // 2, lengths, count, values)
    if (of_ranges := segments.range_weights()) is not None:
        weights *= of_ranges
    return weights.reshape(tokens.shape)


def _check_labels(segments: Segments, labels: np.ndarray, vocab_size: int) -> None:
    """DatasetError for a label that is no id: flips look it up."""
    wrong = (labels < 0) | (labels >= vocab_size)
    if wrong.any():
        i, slot = (int(n) for n in np.argwhere(wrong)[0])
        raise segments.fault(i, f"slot {slot}: {labels[i, slot]} is no id below vocab_size {vocab_size}")


def _trainable(segments: Segments) -> np.ndarray | None:
    """uint8[size]: the slots inside trained ranges; None where shards have none."""
    if "trained_ranges" not in segments.places[0][0].layout:
        return None
    segment, ranges, _ = segments.trained()
    begins, lengths = segments.at[segment] + ranges[:, 0], ranges[:, 1] - ranges[:, 0]
    return fill_slots(begins, lengths, np.ones(len(ranges), np.uint8), 0, segments.size)


def _target(
    laws: Laws,
    law: TaskLaw,
    segments: Segments,
    header: Mapping[str, Any],
    which: np.ndarray,
    trainable: np.ndarray | None,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
) -> noise.Target:
    """The candidates of one task's segments, as render finds them: the body and, unless noise_eos is off, eos."""
    half = segments.slots[which] // law.copies
    before = ((header["start"][which] == 0) & laws.prepend_bos).astype(np.int64) + law.mode
    count = half - before
    if not law.parameters["noise_eos"] and (trainable is None or law.copies > 1):
        count = np.minimum(count, header["tokens"][which])  # where ranges say what may be noised, they leave eos out
    if (count < 0).any():
        what = "a segment has fewer slots than its bos and mode token; `packprep verify` says which"
        raise DatasetError(f"redraw: {what}")
    own = noise.Candidates(header["key"][which], segments.at[which] + before, count, segments.row[which])
    return noise.Target(own, before, half, trainable, tokens.reshape(-1), loss_mask.reshape(-1))
