"""Whether packprep's masks of packed block diffusion are those of the models' own trainers.

python benchmarks/block_attention.py AUTOMODEL BD3LM.py
python benchmarks/block_attention.py AUTOMODEL BD3LM.py --count 100 --block-lengths 1 4 32

AUTOMODEL is a checkout of NVIDIA-NeMo/Automodel. BD3LM.py is dllm/core/trainers/bd3lm.py of
ZHZisZZ/dllm. Conversations (`block_chats.py`) are packed into rows. The mask of each segment is cut
out of its row. `torch_attention.sdpa_mask`, `flex_mask_mod` and `attention.block_mask` must agree,
and no position may attend to another segment. Then the mask is compared with:

gemma    `build_block_diffusion_training_mask` (DiffusionGemma), for the noised positions of each
         answer. The positions before the answer are its prompt. After an untrained end, the model
         also attends to this end and to its fill: only columns up to the answer's end are compared
clean    token-causal attention of the clean half, as DiffusionGemma has it, after block_starts is
         replaced by position_ids in x_0. x_t must not change
bd3lm    `_create_bd3lm_attention_mask`, for block_origin "segment"
i-dlm    `create_idlm_sdpa_mask`, for block_origin "segment". Its blocks are causal inside, so it
         differs from block diffusion if block_length is above 1

The column *differ* counts cells. Exit status 1 if any differ, except for i-dlm: there, exactly the
cells of later positions in the same block of the same half must differ.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import block_chats
import numpy as np
import torch
from block_chats import ENDS, KINDS, Packed, automodel, conversations_of, function_of, packed

from packprep.adapters import default_columns, torch_attention
from packprep.adapters.torch import DTYPES, tensors
from packprep.dataset import attention

SEQ_LENGTH = 4096


class Judges:
    """The mask functions of Automodel and dllm, as boolean arrays."""

    def __init__(self, folder: Path, bd3lm: Path):
        self._gemma = automodel(folder, "models.diffusion_gemma.attention_mask")
        self._idlm = automodel(folder, "attention.idlm_mask")
        self._bd3lm = function_of(bd3lm, "_create_bd3lm_attention_mask", {"torch": torch})

    def gemma(self, prefix: int, response: int, length: int) -> np.ndarray:
        """Return bool[response, prefix + 2 · response]: the clean text, then the noised answer."""
        keep, _ = self._gemma.build_block_diffusion_training_mask(
            prefix, response, prefix + response, length, batch_size=1
        )
        return keep[0, 0].numpy()

    def bd3lm(self, half: int, length: int) -> np.ndarray:
        """Return bool[2 · half, 2 · half]."""
        slots = torch.arange(2 * half)
        return self._bd3lm(None, None, slots[:, None], slots, block_size=length, n=half).numpy()

    def idlm(self, half: int, length: int) -> np.ndarray:
        """Return bool[2 · half, 2 · half]."""
        valid, cpu = torch.ones(1, half), torch.device("cpu")
        mask = self._idlm.create_idlm_sdpa_mask(
            half, length, valid, device=cpu, dtype=torch.float32
        )
        return (mask[0, 0] == 0).numpy()


class Table:
    """Counts of compared segments and cells, by judge."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], Counter[str]] = {}
        self.failed = False

    def add(self, line: tuple[str, ...], theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
        """Count the cells of one comparison, and return those that differ."""
        differing = theirs != ours
        counts = self.counts.setdefault(line, Counter())
        counts["masks"] += 1
        counts["cells"] += differing.size
        counts["differ"] += int(differing.sum())
        return differing

    def expect(self, line: tuple[str, ...], holds: bool, what: str) -> None:
        """Count a check that fails."""
        if not holds:
            self.failed = True
            self.counts.setdefault(line, Counter())[f"WRONG: {what}"] += 1


def masks_of_row(
    found: Packed, r: int, length: int, in_x0: np.ndarray, causal_x0: bool
) -> list[np.ndarray]:
    """Return the mask of a row by each function, bool[T, T] each.

    Args:
        found: The dataset.
        r: The row.
        length: The block length.
        in_x0: Whether each slot is in x_0, bool[T].
        causal_x0: Whether to replace block_starts by position_ids in x_0.
    """
    columns = dict.fromkeys([*default_columns(found.dataset), "block_starts"])
    batch = dict(found.dataset.batch([r], columns=list(columns), dtype=DTYPES))
    if causal_x0:
        starts = np.where(in_x0, batch["position_ids"], batch["block_starts"])
        batch["block_starts"] = starts.astype(np.int32)
    slots = torch.arange(found.dataset.seq_length)
    given = tensors(batch)
    by_mod = torch_attention.flex_mask_mod(given)(0, 0, slots[:, None], slots)
    by_rule = attention.block_mask(
        batch["segment_ids"][0], batch["position_ids"][0], in_x0, length, batch["block_starts"][0]
    )
    masks = [torch_attention.sdpa_mask(given)[0, 0].numpy(), by_mod.numpy(), by_rule]
    if "block_starts" not in default_columns(found.dataset) and not causal_x0:
        del batch["block_starts"]
        masks.append(torch_attention.sdpa_mask(tensors(batch))[0, 0].numpy())
    return masks


def compare_segment(
    table: Table,
    judges: Judges,
    line: tuple[str, str, str],
    own: dict[str, np.ndarray],
    sample: Any,
) -> None:
    """Compare the masks of one conversation.

    `own` has packprep's mask under "blocks", and under "causal" the mask with a token-causal x_0.
    """
    origin, length = line[0], int(line[2])
    mask, causal = own["blocks"], own["causal"]
    half = len(mask) // 2
    clean = np.tri(half, dtype=bool)
    of_clean = ("clean", *line)
    table.add(of_clean, clean, causal[half:, half:])
    replaced = int((mask[half:, half:] != clean).sum())
    table.counts[of_clean]["differ before the replacement"] += replaced
    table.expect(of_clean, not causal[half:, :half].any(), "x_0 attends to x_t")
    table.expect(of_clean, np.array_equal(causal[:half], mask[:half]), "x_t changes")
    if origin == "segment":
        table.add(("bd3lm", *line), judges.bd3lm(half, length), mask)
        of_idlm = ("i-dlm", *line)
        differing = table.add(of_idlm, judges.idlm(half, length), mask)
        counts = table.counts[of_idlm]
        counts["in x_t"] += int(differing[:half, :half].sum())
        counts["in x_0"] += int(differing[half:, half:].sum())
        block = np.arange(half) // length
        later = np.triu(block[:, None] == block, 1)
        expected = np.kron(np.eye(2, dtype=bool), later)
        table.expect(of_idlm, np.array_equal(differing, expected), "other cells differ")
        return
    answers = block_chats.runs_of(sample["loss_mask"])
    is_ended = answers[-1][1] == len(sample["input_ids"])
    if is_ended:  # The fill belongs to the last answer.
        answers[-1] = answers[-1][0], half
    for number, (begin, stop) in enumerate(answers):
        text_end = stop if is_ended or number < len(answers) - 1 else half
        response = text_end - begin
        if text_end > stop:  # The model fills the block that has the untrained end.
            response = -(-response // length) * length
        theirs, n = judges.gemma(begin, response, length), stop - begin
        text = begin + response
        theirs_shown = np.concatenate((theirs[:n, :stop], theirs[:n, text : text + n]), axis=1)
        rows = mask[begin:stop]
        shown = np.concatenate((rows[:, half : half + stop], rows[:, begin:stop]), axis=1)
        of_gemma = ("gemma", *line)
        table.add(of_gemma, theirs_shown, shown)
        table.expect(of_gemma, rows.sum() == shown.sum(), "an answer attends to other positions")
        counts = table.counts[of_gemma]
        counts["the model's end and fill"] += int(theirs[:n].sum() - theirs_shown.sum())


def judge(folder: Path, options: argparse.Namespace, table: Table, end: str, origin: str) -> None:
    """Compare all conversations of one template and one origin."""
    records = [
        record for kind in KINDS for record in conversations_of(kind, options.count, options.seed)
    ]
    tokenizer = block_chats.tokenizer_of(ENDS[end], records)
    samples = block_chats.samples_of(tokenizer, records)
    judges = Judges(options.automodel, options.bd3lm)
    for length in options.block_lengths:
        task = {"block_length": length, "block_origin": origin, "eos_fill": "block"}
        found = packed(folder / f"{end}_{origin}_{length}", tokenizer, records, task, SEQ_LENGTH)
        line = (origin, end, str(length))
        whole = {i: places[0] for i, places in found.places.items() if len(places) == 1}
        by_row: dict[int, list[int]] = {}
        for record, (r, _, _) in whole.items():
            by_row.setdefault(r, []).append(record)
        for r, of_row in by_row.items():
            in_x0 = np.zeros(found.dataset.seq_length, bool)
            segments = found.dataset.row(r).segments
            for begin, stop in zip(segments["begin"], segments["end"], strict=True):
                in_x0[(begin + stop) // 2 : stop] = True
            own = {}
            for name in ("blocks", "causal"):
                masks = masks_of_row(found, r, length, in_x0, name == "causal")
                in_segment = found.dataset.row(r).segment_ids != 0
                for other in masks[1:]:
                    same = np.array_equal(masks[0][in_segment], other[in_segment])
                    table.expect(("packprep", *line), same, f"functions differ: {name}")
                own[name] = masks[0]
            for record in of_row:
                _, begin, stop = whole[record]
                at = slice(begin, stop)
                for mask in own.values():
                    inside = mask[at, at].sum() == mask[at].sum() == mask[:, at].sum()
                    table.expect(("packprep", *line), bool(inside), "attends to another segment")
                of_segment = {name: mask[at, at] for name, mask in own.items()}
                compare_segment(table, judges, line, of_segment, samples[record])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("automodel", type=Path, metavar="AUTOMODEL")
    parser.add_argument("bd3lm", type=Path, metavar="BD3LM.py")
    parser.add_argument("--count", type=int, default=20, help="conversations of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-lengths", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args(arguments)
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        for end in ENDS:
            for origin in ("answer", "segment"):
                judge(Path(folder), options, table, end, origin)
    print(
        "| judge | block_origin | text ends with | block_length | masks | cells | differ | more |"
    )
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | --- |")
    for line, counts in sorted(
        table.counts.items(), key=lambda item: (*item[0][:3], int(item[0][3]))
    ):
        more = {k: n for k, n in counts.items() if k not in ("masks", "cells", "differ") and n}
        sentence = ", ".join(f"{k}: {n:,}" for k, n in more.items())
        cells = " | ".join(f"{counts[k]:,}" for k in ("masks", "cells", "differ"))
        print("|", " | ".join(line), "|", cells, "|", sentence, "|")
        table.failed |= line[0] != "i-dlm" and counts["differ"] > 0
        table.failed |= line[0] == "i-dlm" and line[3] == "1" and counts["differ"] > 0
    half, length = 27, 4
    slots = np.arange(half)
    example = Judges(options.automodel, options.bd3lm).idlm(half, length)
    ours = attention.block_mask(
        np.ones(2 * half, int), np.tile(slots, 2), np.repeat([0, 1], half), length
    )
    print(
        f"i-dlm, {half} positions, block_length {length}: {(example != ours).sum()} of {ours.size}"
    )
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
