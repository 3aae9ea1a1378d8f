"""What redraw needs of a manifest: the law of each task with chance, checked before anything is computed from its numbers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset import noise
from packprep.dataset.json_files import LAW_VERSION, other_law, unknown_key
from packprep.dataset.manifest import Manifest, StoredTask
from packprep.errors import ArgumentError, DatasetError

MOST_IDS = 1 << 24
"""Ids of a vocabulary for which redraw makes tables, of 9 bytes each."""


class Law(NamedTuple):
    """How one task's segments are noised."""

    objective: str
    parameters: Mapping[str, Any]
    resolved: Mapping[str, Any]
    mode: int  # slots of the mode token
    copies: int  # 2 for [x_t ; x_0], of which x_t is noised


class Laws(NamedTuple):
    """What redraw needs of a manifest."""

    by_task: list[Law | None]  # None: causal, which has no chance
    in_place: np.ndarray  # bool[tasks]
    ids: noise.NoiseIds
    prepend_bos: bool


def laws_of(manifest: Manifest) -> Laws:
    """The laws of a dataset's tasks; ArgumentError if a task has chance and no law here, or if all are of another law_version,
    DatasetError if one cannot be applied."""
    if manifest["law_version"] != LAW_VERSION:
        raise ArgumentError(
            f"redraw: the dataset has {other_law(manifest['law_version'], manifest['made_with'])}, or read its stored rows, "
            "without redraw"
        )
    by_task: list[Law | None] = []
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
        task = _whole(task)
        _check_law(task, manifest["made_with"])
        resolved = task.get("resolved", {})
        arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in resolved.items()}
        copies = 2 if task["attention"] == "block_diffusion" else 1
        by_task.append(Law(task["objective"], task["parameters"], arrays, int(task["mode_token"] is not None), copies))
    in_place = np.array([law is not None for law in by_task])
    bos = bool(manifest["recipe"].get("documents", {}).get("prepend_bos", False))
    return Laws(by_task, in_place, _ids(manifest, [law for law in by_task if law is not None]), bos)


def _ids(manifest: Manifest, laws: list[Law]) -> noise.NoiseIds:
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
    for law in laws:
        replace = law.parameters.get("replace", (1.0, 0.0, 0.0))
        flips = law.objective == "uniform_diffusion"
        if mask < 0 and not flips and replace[0] > 0:
            raise DatasetError("redraw: a task masks, and the manifest's specials have no mask")
        if len(ids.ordinary) < 2 and (flips or replace[1] > 0):
            raise DatasetError("redraw: a task draws other tokens, and the manifest has no two ordinary ids")
    return ids


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _are_shares(count: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == count and all(map(_is_share, value))


def _is_range(value: Any) -> bool:
    return _are_shares(2)(value) and value[0] <= value[1]


def _is_threshold(value: Any) -> bool:
    return type(value) is int and 0 <= value <= noise.ONE


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


PARAMETERS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "masked_diffusion": {
        "noise_range": _is_range,
        "epsilon": _is_share,
        "exact_count": _is_flag,
        "replace": _are_shares(3),
        "stratified": _is_flag,
        "weighting": _is_text,
    },
    "uniform_diffusion": {"noise_range": _is_range, "loss_on": _is_text, "weighting": _is_text},
    "block_diffusion": {
        "noise_range": lambda value: _is_range(value) and value[0] >= 2.0**-24,
        "block_length": lambda value: type(value) is int and 1 <= value < 1 << 31,
    },
}

UNREAD = {
    "masked_diffusion": {"random_length", "noise_eos"},
    "uniform_diffusion": {"schedule", "noise_eos"},
    "block_diffusion": {"noise_eos"},
}
"""The other parameters of these objectives: of cutting and of candidates, or worked out in the plan."""
LATER: dict[str, dict[str, Any]] = {}
"""objective → the defaults of its parameters that joined later."""


def _whole(task: StoredTask) -> StoredTask:
    """A task with its parameters that joined later and are absent."""
    return {**task, "parameters": {**LATER.get(task["objective"], {}), **task["parameters"]}}


def _check_law(task: StoredTask, made_with: Any) -> None:
    """DatasetError unless a task of packprep's own has the parameters, in range, that its law reads, and no unknown one."""
    where, objective = f"redraw: task {task['name']!r} in the manifest", task["objective"]
    if unknown := task["parameters"].keys() - PARAMETERS[objective].keys() - UNREAD[objective]:
        raise DatasetError(f"{where}: {unknown_key(min(unknown), made_with)}")
    for name, good in PARAMETERS[objective].items():
        value = task["parameters"].get(name)
        if not good(value):
            raise DatasetError(
                f"{where}: {name} is {value!r:.100}, which {objective} cannot use; `packprep verify` says more"
            )
    if (objective == "block_diffusion") != (task["attention"] == "block_diffusion"):
        raise DatasetError(f"{where}: the attention of {objective} is not {task['attention']}")
    resolved = task.get("resolved", {})
    if not isinstance(resolved, dict):
        raise DatasetError(f"{where}: resolved is no object")
    if why := unusable_facts(objective, resolved):
        raise DatasetError(f"{where}: {why}")


def unusable_facts(objective: str, resolved: Mapping[str, Any]) -> str:
    """Why a law of packprep's own cannot use what the plan worked out for its task, in words; "" if it can."""
    if objective != "uniform_diffusion":
        return ""
    limits = resolved.get("flip_thresholds")
    if not isinstance(limits, list) or len(limits) != noise.FLIP_STEPS or not all(map(_is_threshold, limits)):
        return f"flip_thresholds are not {noise.FLIP_STEPS} thresholds up to {noise.ONE}"
    return ""
