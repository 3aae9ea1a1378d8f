"""How many positions block diffusion computes for each token of conversations, padded and packed.

python benchmarks/block_padding.py AUTOMODEL
python benchmarks/block_padding.py AUTOMODEL --count 5000 --batch-sizes 1 2 16

AUTOMODEL is a checkout of NVIDIA-NeMo/Automodel. Its `DLLMCollator` pads shuffled batches as three
of its recipes in examples/dllm_sft ask for. A step of a recipe computes these positions:

diffusion_gemma   the padded batch, and the longest answer of the batch once more for each
                  conversation. Only the last answer is trained. Blocks of 256
nemotron          the padded batch twice: x_t and x_0. Blocks of 32
i_dlm             the padded batch twice. Blocks of 1, so that there is no fill

packprep's rows have at least twice the positions of the recipe's longest conversation, so that it
fits with x_t and x_0. Conversations that the recipe would cut are left out. The conversations are
those of `conversations.py`, without tools.

text      percentage of positions with a token of a conversation, in x_t or in x_0
fill      percentage of positions with an eos that fills up a block
padding   the rest
per token positions that are computed for each token of the conversations
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import block_chats
import numpy as np
from block_chats import ENDS, automodel, packed, runs_of
from conversations import conversations


@dataclass(frozen=True)
class Setup:
    """A recipe of Automodel: its dataset's seq_length, and its collator."""

    name: str
    seq_length: int
    block_length: int
    pad_multiple: int | None
    row_lengths: tuple[int, ...]  # of packprep's rows, at least twice seq_length
    has_window: bool = False

    @property
    def pad_block(self) -> int | None:
        return self.block_length if self.block_length > 1 else None


SETUPS = (
    Setup("diffusion_gemma", 1024, 256, 256, (2048, 8192), has_window=True),
    Setup("nemotron", 8192, 32, 1024, (16384,)),
    Setup("i_dlm", 4096, 1, None, (8192,)),
)


class Positions(NamedTuple):
    """Numbers of positions: all, those with a token, those with an eos that fills up a block."""

    computed: int
    text: int
    fill: int


def plain_conversations(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the records of `conversations.py`, without tools, calls and their results.

    Records that quote a special token are left out, because packprep rejects them.
    """
    for record in conversations(count, seed):
        messages = [
            {"role": message["role"], "content": message["content"]}
            for message in record["messages"]
            if message["role"] != "tool" and isinstance(message.get("content"), str)
        ]
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        is_quoting = any(
            text in message["content"] for message in messages for text in ("<|im_", "</s>")
        )
        if messages and messages[-1]["content"] and not is_quoting:
            yield {"messages": messages}


def padded(
    collator: Any, setup: Setup, samples: Sequence[dict[str, Any]], batch_size: int, seed: int
) -> Positions:
    """Return the positions of shuffled batches."""
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    computed = text = fill = 0
    for begin in range(0, len(order), batch_size):
        chosen = [samples[i] for i in order[begin : begin + batch_size]]
        batch = collator([dict(sample) for sample in chosen])
        n_rows, length = batch["input_ids"].shape
        ends = [len(sample["input_ids"]) for sample in chosen]
        # The fill is trained, and nothing after a text is trained otherwise.
        filled = [int(batch["loss_mask"][i, end:].sum()) for i, end in enumerate(ends)]
        if setup.has_window:
            starts = [sample["loss_mask"].index(1) for sample in chosen]
            answers = [end - start for start, end in zip(starts, ends, strict=True)]
            canvas = max(a + f for a, f in zip(answers, filled, strict=True))
            computed += n_rows * (length + canvas)
            text += sum(ends) + sum(answers)
        else:
            computed += 2 * n_rows * length
            text += 2 * sum(ends)
        fill += 2 * sum(filled)
    return Positions(computed, text, fill)


def in_rows(
    folder: Path, setup: Setup, row_length: int, tokenizer: Any, records: Sequence[dict[str, Any]]
) -> Positions:
    """Return the positions of packprep's rows."""
    task = {
        "block_length": setup.block_length,
        "block_origin": "answer" if setup.has_window else "segment",
        "eos_fill": "block" if setup.pad_block else "none",
    }
    turns = {"trained_turns": "last"} if setup.has_window else {}
    found = packed(folder, tokenizer, records, task, row_length, **turns)
    whole = [places[0] for places in found.places.values() if len(places) == 1]
    assert len(whole) == len(records), f"{len(whole)} of {len(records)} are whole: {found.rejects}"
    slots = sum(end - begin for _, begin, end in whole)
    text = 2 * sum(
        int(found.dataset.row(r).segments["tokens"].sum()) for r in range(len(found.dataset))
    )
    return Positions(len(found.dataset) * row_length, text, slots - text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("automodel", type=Path, metavar="AUTOMODEL")
    parser.add_argument("--count", type=int, default=5000, help="conversations before selection")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 4, 8])
    names = [setup.name for setup in SETUPS]
    parser.add_argument("--recipes", nargs="+", choices=names, default=names)
    options = parser.parse_args(arguments)
    records = list(plain_conversations(options.count, options.seed))
    tokenizer = block_chats.tokenizer_of(ENDS["answer"], records[::10])
    samples = block_chats.samples_of(tokenizer, records)
    collate = automodel(options.automodel, "datasets.dllm.collate")
    lengths = sorted(len(sample["input_ids"]) for sample in samples)
    mean, most = statistics.mean(lengths), lengths[-1]
    print(f"{len(lengths):,} conversations of {mean:.0f} tokens: median", end=" ")
    print(
        f"{lengths[len(lengths) // 2]}, 90 % up to {lengths[len(lengths) * 9 // 10]}, most {most}\n"
    )
    print("| recipe | batches | text % | fill % | padding % | positions per token |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for setup in SETUPS:
            if setup.name not in options.recipes:
                continue
            # The blocks of a filled conversation must fit into the recipe's length, too.
            fits = [
                i
                for i, sample in enumerate(samples)
                if len(sample["input_ids"]) + setup.block_length <= setup.seq_length
            ]
            own = [dict(samples[i]) for i in fits]
            if setup.has_window:  # Automodel's mask_history trains only the last answer.
                for sample in own:
                    begin, end = runs_of(sample["loss_mask"])[-1]
                    flags = np.zeros(len(sample["loss_mask"]), int)
                    flags[begin:end] = 1
                    sample["loss_mask"] = flags.tolist()
            collator = collate.DLLMCollator(
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                block_size=setup.pad_block,
                pad_seq_len_divisible=setup.pad_multiple,
                response_window=setup.has_window,
            )
            lines = {
                f"padded, {size} per batch": padded(collator, setup, own, size, options.seed)
                for size in options.batch_sizes
            }
            chosen = [records[i] for i in fits]
            for row_length in setup.row_lengths:
                own_folder = Path(folder) / f"{setup.name}_{row_length}"
                lines[f"packprep, rows of {row_length}"] = in_rows(
                    own_folder, setup, row_length, tokenizer, chosen
                )
            tokens = sum(len(sample["input_ids"]) for sample in own)
            for name, (computed, text, fill) in lines.items():
                rest = computed - text - fill
                shares = " | ".join(f"{100 * part / computed:.1f}" for part in (text, fill, rest))
                what = f"{setup.name}, {len(own):,}"
                print(f"| {what} | {name} | {shares} | {computed / tokens:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
