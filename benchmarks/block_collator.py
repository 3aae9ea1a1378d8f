"""Whether packed block diffusion trains the positions that NeMo Automodel's collator trains.

python benchmarks/block_collator.py AUTOMODEL                        8 kinds of 1,000 conversations
python benchmarks/block_collator.py AUTOMODEL --count 100 --block-length 8 --show 5

AUTOMODEL is a checkout of NVIDIA-NeMo/Automodel. Its `DLLMCollator` gets ids and masks that
Transformers' `apply_chat_template` returns. packprep reads the same conversations from JSON lines.
Each kind is written with two templates: the last answer ends the text, or an untrained newline
does. `--templates` replaces them by files with {% generation %} blocks, such as those of TRL.

window   response_window=True, and block_origin "answer": blocks count from the answer's first token
grid     response_window=False, and block_origin "segment": blocks count from the text's first token

Of each conversation that fits into a row, these are compared:

ids      the clean tokens, and the eos that fill up the last block
mask     the trained positions
blocks   whether consecutive trained positions share a noise level, as in `corrupt_blockwise`, over
         the levels of three epochs
all      x_t under noise "all" equals that of `corrupt_all_masked`, id by id
position x_t at level 1 equals that of `corrupt_blockwise`, id by id
uniform  the positions that get other ids in some epoch are those that `corrupt_uniform_random` may
         replace

Two differences are deliberate, and counted apart:

turns    The window refuses several answers. packprep starts blocks at each answer. The collator
         then gets the text up to each answer, with this answer trained, and its fill counts only
         for the last one.
end      The window fills up the block after an untrained end. packprep does not, because noised
         positions would see the clean end in their own block, and so learn where the answer ends.

Exit status 1 if anything else differs, or if more than 1 % of the conversations are rejected.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import block_chats
import numpy as np
import torch
from block_chats import ENDS, KINDS, Packed, automodel, conversations_of, packed, runs_of

SEQ_LENGTH = 16384  # of packprep's rows, with x_t and x_0
BATCH = 4  # conversations of a batch of the collator
PAD_MULTIPLE = 64
EPOCHS = range(3)
MOST_REJECTED = 0.01
ORIGINS = {"window": "answer", "grid": "segment"}
TASKS: dict[str, dict[str, Any]] = {
    "level": {"noise_range": [0.97, 1.0]},
    "all": {"noise": "all"},
    "position": {"noise": "position", "noise_range": [1.0, 1.0]},
    "uniform": {"canvas": "uniform", "weighting": "none", "noise_range": [1.0, 1.0]},
}
COLUMNS = (
    "conversations",
    "rejected",
    "cut",
    "equal",
    "turns",
    "end",
    "trained",
    "filled",
    "pairs",
)


class Judge(NamedTuple):
    """Automodel's collator of one mode, and its modules."""

    collator: Any
    corruption: Any
    mode: str
    block_length: int
    mask_id: int
    vocab_size: int


class Expected(NamedTuple):
    """A text as Automodel batches it. All arrays have one value per position up to the fill's end.

    block has the number of each position's block, and noised the ids after each corruption.
    first_slot is the first slot of the window, before which there is no block.
    """

    ids: np.ndarray
    mask: np.ndarray
    block: np.ndarray
    all_masked: np.ndarray
    by_position: np.ndarray
    replaceable: np.ndarray
    first_slot: int


class Found(NamedTuple):
    """A conversation in packprep's rows. Arrays have one value per slot of a half."""

    clean: np.ndarray
    levels: list[np.ndarray]  # of each epoch: the weight of each noised slot, otherwise 0
    all_masked: np.ndarray
    by_position: np.ndarray
    uniform: list[np.ndarray]  # of each epoch: x_t
    masks: list[np.ndarray]  # trained slots by each task that trains all of them


@dataclass
class Counts:
    """What is counted of one kind of conversations."""

    numbers: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    sentences: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def differs(self, what: str, sentence: str) -> None:
        self.differing[what] += 1
        self.sentences.append(f"{what}: {sentence}")


def expected_of(judge: Judge, samples: Sequence[dict[str, list[int]]]) -> list[Expected]:
    """Return what Automodel makes of the samples, in batches."""
    found = []
    for begin in range(0, len(samples), BATCH):
        chosen = samples[begin : begin + BATCH]
        batch = judge.collator([dict(sample) for sample in chosen])
        for i, sample in enumerate(chosen):
            found.append(_expected(judge, batch, i, sample))
    return found


def _expected(judge: Judge, batch: Any, i: int, sample: dict[str, list[int]]) -> Expected:
    """Return sample i of a batch, with the corruption functions applied to all of its blocks."""
    content, length = len(sample["input_ids"]), judge.block_length
    first_slot = 0
    if judge.mode == "window":
        first_slot = sample["loss_mask"].index(1)
        end = int(batch["attention_mask"][i].sum())
    else:
        trained = np.flatnonzero(batch["loss_mask"][i].numpy())
        end = max(content, int(trained[-1]) + 1)
    ids, mask = batch["input_ids"][i, :end], batch["loss_mask"][i, :end]
    window = slice(first_slot, None)
    own = ids[None, window], mask[None, window]
    functions = judge.corruption
    by_position = functions.corrupt_blockwise(*own, judge.mask_id, length, eps=1.0)
    all_masked = functions.corrupt_all_masked(*own, judge.mask_id)
    uniform = functions.corrupt_uniform_random(*own, judge.vocab_size, length, eps=1.0)
    # A second draw tells blocks apart whose levels are equal by chance.
    levels = [functions.corrupt_blockwise(*own, judge.mask_id, length)[2][0] for _ in range(2)]
    level = torch.stack(levels).numpy()
    block = np.append(0, np.cumsum((level[:, 1:] != level[:, :-1]).any(axis=0)))

    def whole(values: Any, before: Any) -> np.ndarray:
        return np.concatenate((before, np.asarray(values)))

    return Expected(
        ids.numpy(),
        mask.numpy() != 0,
        whole(block, np.full(first_slot, -1)),
        whole(all_masked[0][0], ids[:first_slot]),
        whole(by_position[0][0], ids[:first_slot]),
        whole(uniform[1][0], np.zeros(first_slot, bool)),
        first_slot,
    )


def found_of(sets: dict[str, Packed], record: int) -> Found:
    """Return a conversation as the rows of each task have it."""

    levels = []
    for epoch in EPOCHS:
        weights, mask = (
            sets["level"].halves(record, column, epoch)[0]
            for column in ("loss_weights", "loss_mask")
        )
        levels.append(np.where(mask != 0, weights, 0))
    all_masked, clean = sets["all"].halves(record, "tokens")
    return Found(
        clean,
        levels,
        all_masked,
        sets["position"].halves(record, "tokens")[0],
        [sets["uniform"].halves(record, "tokens", epoch)[0] for epoch in EPOCHS],
        [sets[task].halves(record, "loss_mask")[0] != 0 for task in ("all", "position", "uniform")],
    )


def compare(
    counts: Counts, name: str, judge: Expected, found: Found, begin: int, end: int, filled: int
) -> bool:
    """Compare slots [begin, end) of a conversation, and return whether nothing differs.

    The last `filled` of these slots are eos that fill up a block. All slots before `begin` belong
    to the texts of earlier answers.
    """
    own, before = slice(begin, end), len(counts.sentences)
    if not np.array_equal(judge.ids[:end], found.clean[:end]):
        counts.differs("ids", f"{name}: {judge.ids[own].tolist()} {found.clean[own].tolist()}")
        return False
    expected = judge.mask[own]
    for mask in found.masks:
        if not np.array_equal(mask[own], expected):
            counts.differs("mask", f"{name}: {np.flatnonzero(mask[own] != expected).tolist()}")
    for what, theirs, ours in (
        ("all", judge.all_masked, found.all_masked),
        ("position", judge.by_position, found.by_position),
    ):
        if not np.array_equal(theirs[own], ours[own]):
            counts.differs(what, f"{name}: {np.flatnonzero(theirs[own] != ours[own]).tolist()}")
    changed = np.any([x_t[own] != found.clean[own] for x_t in found.uniform], axis=0)
    if not np.array_equal(changed, judge.replaceable[own]):
        counts.differs("uniform", f"{name}: {np.flatnonzero(changed != expected).tolist()}")
    counts.numbers["trained"] += int(expected.sum())
    counts.numbers["filled"] += filled
    return len(counts.sentences) == before


def compare_blocks(counts: Counts, name: str, block: np.ndarray, found: Found) -> bool:
    """Compare whether consecutive trained positions share a block and a level in each epoch.

    Returns:
        Whether they do.
    """
    trained = found.masks[0]
    block, weights = block[trained], [level[trained] for level in found.levels]
    shares = block[1:] == block[:-1]
    both = np.array([(w[1:] > 0) & (w[:-1] > 0) for w in weights])
    equal = np.array([w[1:] == w[:-1] for w in weights])
    is_split = (both & ~equal).any(axis=0)  # In some epoch, both are noised with two levels.
    is_joined = both.any(axis=0) & ~is_split
    wrong = (shares & is_split) | (~shares & is_joined)
    counts.numbers["pairs"] += int(both.any(axis=0).sum())
    if wrong.any():
        where = np.flatnonzero(trained)[:-1][wrong].tolist()
        counts.differs("blocks", f"{name}: between trained positions after {where}")
    return not wrong.any()


def compare_window(
    counts: Counts, name: str, judge: Judge, sample: dict[str, list[int]], found: Found
) -> None:
    """Compare a conversation with the response window, answer by answer."""
    answers, text_length = runs_of(sample["loss_mask"]), len(sample["input_ids"])
    if len(answers) > 1:
        try:
            judge.collator([dict(sample)])
            counts.differs("turns", f"{name}: the window takes {len(answers)} answers")
        except AssertionError:
            counts.numbers["turns"] += 1
    begin, is_equal, has_end, blocks = 0, True, False, np.full(len(found.clean), -1)
    for number, (first, end) in enumerate(answers):
        is_last = number == len(answers) - 1
        length = text_length if is_last else end
        mask = [0] * length
        mask[first:end] = [1] * (end - first)
        alone = {
            "input_ids": sample["input_ids"][:length],
            "loss_mask": mask,
            "attention_mask": [1] * length,
        }
        (expected,) = expected_of(judge, [alone])
        fill = len(expected.ids) - length if is_last else 0
        if is_last and end < text_length:
            # The end is untrained: packprep adds no fill, and ends where the text ends.
            has_end |= fill > 0
            fill = 0
        upto = length + fill
        if is_last and len(found.clean) != upto:
            counts.differs("fill", f"{name}: {len(found.clean) - text_length} eos, not {fill}")
            return
        is_equal &= compare(counts, name, expected, found, begin, upto, fill)
        # Blocks of different answers are different.
        blocks[first:upto] = expected.block[first:upto] + blocks.max() + 1
        begin = length
    is_equal &= compare_blocks(counts, name, blocks, found)
    counts.numbers["end"] += has_end
    counts.numbers["equal"] += is_equal


def compare_grid(
    counts: Counts, name: str, judge: Judge, sample: dict[str, list[int]], found: Found
) -> None:
    """Compare a conversation with blocks that count from the start of the text."""
    (expected,) = expected_of(judge, [sample])
    fill = len(expected.ids) - len(sample["input_ids"])
    if len(found.clean) != len(expected.ids):
        has = len(found.clean) - len(sample["input_ids"])
        counts.differs("fill", f"{name}: {has} eos, not {fill}")
        return
    is_equal = compare(counts, name, expected, found, 0, len(expected.ids), fill)
    is_equal &= compare_blocks(counts, name, expected.block, found)
    counts.numbers["equal"] += is_equal


def compare_batches(counts: Counts, judge: Judge, samples: Sequence[dict[str, list[int]]]) -> None:
    """Check that a text in a batch is the text alone, so that batches need no other comparison."""
    single = [sample for sample in samples if len(runs_of(sample["loss_mask"])) == 1]
    for together, sample in zip(expected_of(judge, single), single, strict=True):
        (alone,) = expected_of(judge, [sample])
        for name in ("ids", "mask", "all_masked", "by_position", "replaceable"):
            if not np.array_equal(getattr(together, name), getattr(alone, name)):
                counts.differs("batch", f"{name} of a text in a batch differ from the text alone")


def judge_template(
    folder: Path,
    options: argparse.Namespace,
    end: str,
    template: str,
    counts: dict[tuple[str, str, str], Counts],
) -> None:
    """Compare all kinds of conversations under one template, named `end`."""
    records, kind_of = [], []
    for kind in KINDS:
        records += conversations_of(kind, options.count, options.seed)
        kind_of += [kind.name] * options.count
    tokenizer = block_chats.tokenizer_of(template, records[:: max(1, len(records) // 500)])
    samples = block_chats.samples_of(tokenizer, records)
    modules = [
        automodel(options.automodel, f"datasets.dllm.{name}") for name in ("collate", "corruption")
    ]
    for mode, origin in ORIGINS.items():
        collator = modules[0].DLLMCollator(
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            block_size=options.block_length,
            pad_seq_len_divisible=PAD_MULTIPLE,
            response_window=mode == "window",
        )
        ids = options.block_length, tokenizer.mask_token_id, len(tokenizer)
        judge = Judge(collator, modules[1], mode, *ids)
        shape = {
            "block_length": options.block_length,
            "block_origin": origin,
            "eos_fill": "block",
        }
        sets = {
            name: packed(
                folder / f"{end}_{mode}_{name}",
                tokenizer,
                records,
                {**shape, **task},
                options.seq_length,
            )
            for name, task in TASKS.items()
        }
        for record, sample in enumerate(samples):
            own = counts.setdefault((kind_of[record], end, mode), Counts())
            own.numbers["conversations"] += 1
            if record in sets["all"].rejects:
                own.numbers["rejected"] += 1
                own.reasons[sets["all"].rejects[record][:100]] += 1
            elif len(sets["all"].places.get(record, ())) != 1:
                own.numbers["cut"] += 1
            else:
                compare_mode = compare_window if mode == "window" else compare_grid
                found = found_of(sets, record)
                compare_mode(own, f"conversation {record}", judge, sample, found)
        compare_batches(own, judge, samples[:200])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("automodel", type=Path, metavar="AUTOMODEL")
    parser.add_argument("--count", type=int, default=1000, help="conversations of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-length", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=SEQ_LENGTH)
    parser.add_argument("--show", type=int, default=0, help="differences shown of each kind")
    parser.add_argument("--templates", type=Path, nargs="+", metavar="FILE.jinja")
    options = parser.parse_args(arguments)
    templates = ENDS
    if options.templates:
        templates = {file.stem: file.read_text("utf-8") for file in options.templates}
    began = time.monotonic()
    counts: dict[tuple[str, str, str], Counts] = {}
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for end, template in templates.items():
            judge_template(Path(folder), options, end, template, counts)
    print("| kind | template | mode |", *(f"{name} |" for name in COLUMNS), "unexplained |")
    print("| --- | --- | --- |", *("---: |" for _ in COLUMNS), "--- |")
    failed = False
    for (kind, end, mode), own in counts.items():
        cells = " | ".join(f"{own.numbers[name]:,}" for name in COLUMNS)
        differing = ", ".join(f"{n} {what}" for what, n in own.differing.items()) or "0"
        print(f"| {kind} | {end} | {mode} | {cells} | {differing} |")
        for sentence in own.sentences[: options.show]:
            print(f"    {sentence}")
        for reason, n in own.reasons.most_common(3):
            print(f"    {n} × {reason}")
        failed |= bool(own.differing)
        failed |= own.numbers["rejected"] > MOST_REJECTED * own.numbers["conversations"]
    print(f"{time.monotonic() - began:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
