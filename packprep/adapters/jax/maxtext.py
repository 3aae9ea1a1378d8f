"""Describe MaxText's column names, and check whether its loss and mask can train a dataset."""

from collections.abc import Sequence

from packprep.adapters import datasets_of
from packprep.dataset.attention import RULES
from packprep.dataset.loader import Dataset
from packprep.dataset.manifest import StoredTask, block_columns, drawn_tasks, is_in_place
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError

# Only MaxText asks for these columns.
TRAINED_SEGMENT_IDS = "trained_segment_ids"  # segment_ids where loss_mask is not 0, elsewhere 0
TRAINED_SLOTS = "trained_slots"  # loss_mask as int32
NOISED_SLOTS = "noised_slots"  # 1 where the token of a same-position segment is not its original

MAXTEXT_NAMES = {
    "inputs": "tokens",
    "inputs_position": "position_ids",
    "inputs_segmentation": "segment_ids",
    "targets": "labels",
    "targets_position": "position_ids",
    "targets_segmentation": TRAINED_SEGMENT_IDS,
}
"""MaxText's name of an array → packprep's column.

MaxText trains where targets_segmentation is not 0, and reads no weights.
"""

# MaxText's block diffusion reads these names too. Its loss trains where targets_loss_mask and
# targets_segmentation are both not 0.
IN_PLACE_NAMES = {
    "targets_segmentation": "segment_ids",
    "corruption_mask": NOISED_SLOTS,
    "targets_loss_mask": TRAINED_SLOTS,
}


def check_maxtext(
    dataset: Dataset | Mixture, attention: str | None, weighted: bool, loss_weights: str
) -> bool:
    """Check that MaxText can train a dataset; return whether all tasks are same-position tasks.

    MaxText trains same-position tasks as block diffusion. Its mask counts blocks of
    causal_block_size slots from the row's start and compares segment ids. So every segment must
    start at a block boundary. If causal_block_size is the length of the row, attention is
    bidirectional inside each segment.

    Args:
        dataset: The dataset or mixture.
        attention: Attention path, as in `loader`. None means MaxText's block-diffusion mask if all
            tasks are same-position tasks.
        weighted: Whether documents give loss weights.
        loss_weights: "refuse" or "ignore", as in `loader`.

    Returns:
        Whether all tasks are same-position tasks.

    Raises:
        ArgumentError: If MaxText's loss would ignore weights, or if its loss or mask cannot train a
            task. The message names the task.
    """
    tasks = [task for member in datasets_of(dataset) for task in drawn_tasks(member.manifest)]
    in_place = [task for task in tasks if is_in_place(task)]
    if loss_weights == "refuse":
        if weighted:
            raise ArgumentError(
                "documents of this dataset have loss weights, which MaxText's loss does not"
                " read\n"
                "hint: use names='packprep' with masked_loss, remove the weights from the"
                " documents, or set loss_weights='ignore'"
            )
        for task in in_place:
            if task["parameters"].get("weighting") != "none":
                raise ArgumentError(
                    f"task {task['name']!r} weights its loss, which MaxText's loss does not"
                    " read\n"
                    "hint: use names='packprep' with masked_loss, build with weighting = 'none'"
                    " where the objective has it, or set loss_weights='ignore'"
                )
    if not in_place:
        return False
    for task in in_place:
        if task["label_alignment"] == "next_slot":
            raise ArgumentError(
                f"task {task['name']!r} has shift, but MaxText shifts itself, with each block's"
                " first token clean (seed_and_mask)\n"
                "hint: build without shift, or use names='packprep'"
            )
    if len(in_place) < len(tasks):
        next_token_task = next(task["name"] for task in tasks if not is_in_place(task))
        raise ArgumentError(
            f"task {in_place[0]['name']!r} predicts the same position and task"
            f" {next_token_task!r} does not, but MaxText trains with one objective\n"
            "hint: build a dataset for each"
            + (
                ", without the documents of one and two tokens, by documents.min_tokens = 3"
                * (next_token_task == "too_short")
            )
        )
    if attention is None:
        _check_blocks(dataset, tasks)
    return True


def _check_blocks(dataset: Dataset | Mixture, tasks: Sequence[StoredTask]) -> None:
    """Check that one causal_block_size serves all tasks and segments.

    MaxText reads rows that contain only x_t, the first half of each segment. In such a row, each
    segment must start at a block boundary.

    Raises:
        ArgumentError: If the tasks' blocks differ, or if a segment may start inside a block.
    """
    sizes = {
        task["name"]: task["parameters"].get("block_length", dataset.seq_length) for task in tasks
    }
    size = min(sizes.values())
    if len(set(sizes.values())) > 1:
        raise ArgumentError(
            "tasks have blocks of"
            f" {', '.join(f'{n} tokens ({name})' for name, n in sizes.items())}, but MaxText has"
            " one causal_block_size\n"
            "hint: build a dataset for each"
        )
    for member in datasets_of(dataset):
        if "block_starts" in block_columns(member.manifest):
            raise ArgumentError(
                f"blocks of {member.directory} start at the answers of conversations, but"
                " MaxText counts blocks from the start of the row\n"
                'hint: build with block_origin = "segment"'
            )
        multiple = member.manifest["recipe"].get("packing", {}).get("pad_seq_to_mult", 1)
        if any(RULES[task["attention"]].in_blocks for task in member.tasks) and multiple % (
            2 * size
        ):
            raise ArgumentError(
                f"MaxText counts blocks of {size} tokens from the start of the row, but segments"
                f" of {member.directory} start at multiples of {multiple}\n"
                f"hint: build with packing.pad_seq_to_mult = {2 * size}, two blocks since x_t and"
                " x_0 are stored"
            )
