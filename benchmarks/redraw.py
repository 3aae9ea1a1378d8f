"""Redraw, measured: what a batch of an epoch above 0 costs, and what fresh chance in every epoch
does for a model.

python benchmarks/redraw.py speed                             batches of 16 rows of 4096 slots, on one core
python benchmarks/redraw.py speed --accelerate numpy --preset t5 ul2r
python benchmarks/redraw.py train                             three epochs of UL2R, with redraw and without, for each seed
python benchmarks/redraw.py train --share 0.1 --epochs 20     the same of a tenth of the documents

speed   presets are built from Python's standard library, bytes as tokens. Columns are those that a trainer takes. Redraw and the
        stored rows are timed in turn: processor time, medians. Memory is the most that a batch
        takes beside what it returns.
train   Python's standard library as a BPE of --vocabulary tokens beside the preset's own; a tenth of the documents is held out,
        and built by the same recipe. The model is the small decoder of examples/train_torch.py,
        with the attention that rows ask for. In each pair, with redraw and without, initial weights
        and the order of rows are the same. --ways repeat: one pass over rows in which each document
        stands as often as there are epochs, with other tasks each time. After each epoch: the loss
        of a trained slot of held-out rows as stored, over all and by task; `trained` is the mean of
        the epoch's steps.
"""

import argparse
import json
import random
import runpy
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from end_to_end import Quiet, machine, standard_library, train_bpe, write_corpus
from loader import measured

from packprep import open_dataset
from packprep.building.run import build
from packprep.dataset.loader import COLUMNS, Dataset
from packprep.recipe import parse_size, read_recipe

PRESETS = ("t5", "ul2r", "prefix_lm", "fim", "mlm", "llada", "dllm", "duo", "bd3")
ROOT = Path(__file__).resolve().parent.parent
WAYS = ("stored", "redraw", "repeat")
HELD_OUT = 0.1  # of the documents
EVALUATED_ROWS = 32  # of a batch, when nothing is trained


def build_dataset(out: Path, lines: Path, table: dict[str, Any]) -> Dataset:
    """A dataset of the documents of a JSONL file."""
    source = {"name": "library", "paths": [str(lines)], **table.pop("source", {})}
    build(read_recipe({"sources": [source], **table}, out.parent), out, Quiet(), 1)
    return open_dataset(out)


# Speed


def measure_speed(preset: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Slots a second of batches as stored and in epoch 1, by each of --accelerate, and bytes a slot
    beside what those return."""
    table = {
        "seq_length": options.seq_length,
        "tokenizer": "bytes",
        "specials": {},
        "tasks": [{"preset": preset}],
    }
    ds = build_dataset(folder / preset, folder / "corpus.jsonl", table)
    blocks = any(task["attention"] == "block_diffusion" for task in ds.tasks)
    columns = [*COLUMNS, "loss_weights", "prefix_ends", *(["block_lengths"] if blocks else [])]
    rows = np.random.default_rng(0).choice(len(ds), min(options.batch_size, len(ds)), replace=False)
    epochs, slots = np.ones(len(rows), np.int64), len(rows) * ds.seq_length
    ways = {"stored": lambda: ds.batch(rows, columns=columns)} | {
        name: lambda name=name: ds.batch(rows, columns=columns, epochs=epochs, accelerate=name)
        for name in options.accelerate
    }
    seconds = measured(ways, options.calls, options.repeats)
    rates = {name: slots / seconds[name] for name in ways}
    beside = {name: bytes_beside(ways[name]) / slots for name in options.accelerate}
    return {
        "preset": preset,
        "rows": len(ds),
        "slots_per_s": rates,
        "bytes_beside_per_slot": beside,
    }


def bytes_beside(way: Callable[[], dict[str, np.ndarray]]) -> int:
    """The most bytes that a batch takes at a time, beside the arrays that it returns."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    returned = way()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - before - sum(values.nbytes for values in returned.values())


def print_speed(lines: list[dict[str, Any]]) -> None:
    ways, drawn = lines[0]["slots_per_s"], lines[0]["bytes_beside_per_slot"]
    print(
        f"{'M slots/s':12}{''.join(f'{name:>9}' for name in ways)}   bytes a"
        f" slot{''.join(f'{n:>9}' for n in drawn)}"
    )
    for line in lines:
        rates = "".join(f"{rate / 1e6:9.1f}" for rate in line["slots_per_s"].values())
        beside = "".join(f"{bytes:9.1f}" for bytes in line["bytes_beside_per_slot"].values())
        print(f"{line['preset']:12}{rates}   {'':12}{beside}")


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="packprep-benchmark-") as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", standard_library(), parse_size(options.size))
        return [measure_speed(preset, folder, options) for preset in options.preset]


# Training


def build_all(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Dataset], Dataset]:
    """(way → what is trained, what is held out), as UL2R."""
    texts = standard_library()
    random.Random(0).shuffle(texts)
    write_corpus(folder / "corpus.jsonl", texts, parse_size(options.size))
    train_bpe(folder / "tokenizer.json", texts, options.vocabulary)

    def built(name: str, source: dict[str, Any]) -> Dataset:
        table = {
            "seq_length": options.seq_length,
            "tokenizer": str(folder / "tokenizer.json"),
            "tasks": [{"preset": "ul2r"}],
            "specials": {"missing": "add", "sentinels": "auto"},
        }
        return build_dataset(folder / name, folder / "corpus.jsonl", {**table, "source": source})

    sample = [0.0, options.share * (1 - HELD_OUT)]
    once = built("once", {"sample": sample})
    trained = dict.fromkeys(options.ways, once)
    if "repeat" in trained:
        trained["repeat"] = built("repeat", {"sample": sample, "repeat": float(options.epochs)})
    return trained, built("heldout", {"sample": [1 - HELD_OUT, 1.0]})


class HeldOut:
    """Rows as stored, with the task of each trained slot."""

    def __init__(self, ds: Dataset, most_rows: int):
        from packprep.adapters.torch import loader

        self.names = [task["name"] for task in ds.tasks]
        rows = list(range(min(len(ds), most_rows)))
        self.batches = []
        each = loader(ds, EVALUATED_ROWS, shuffle=False, epochs=1)
        for first in range(0, len(rows), EVALUATED_ROWS):
            some = rows[first : first + EVALUATED_ROWS]
            tasks = [np.append(-1, ds.row(i).segments["task"])[ds.row(i).segment_ids] for i in some]
            batch = {
                name: values[: len(some)]
                for name, values in next(each).items()
                if hasattr(values, "shape")
            }
            self.batches.append((batch, np.stack(tasks)[batch["loss_mask"].numpy()]))

    def losses(self, model: Any, attention_of: Any) -> dict[str, float]:
        """Mean cross entropy of a trained slot: over all, and by task."""
        import torch

        total, count = np.zeros(len(self.names)), np.zeros(len(self.names))
        with torch.no_grad():
            for batch, task in self.batches:
                logits = model(batch, attention_of(batch, None))
                labels = batch["labels"][batch["loss_mask"]]
                losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none").numpy()
                total += np.bincount(task, losses, len(self.names))
                count += np.bincount(task, minlength=len(self.names))
        by_task = {name: total[t] / count[t] for t, name in enumerate(self.names) if count[t]}
        return {"all": total.sum() / count.sum(), **by_task}


def train_once(
    ds: Dataset, heldout: HeldOut, seed: int, way: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A line for each epoch of a run; of `repeat`, which has the epochs in its rows, for each such
    part of these."""
    import torch

    from packprep.adapters.torch import loader
    from packprep.adapters.torch_loss import masked_loss

    example = runpy.run_path(str(ROOT / "examples" / "train_torch.py"))
    torch.manual_seed(seed)
    model = example["Decoder"](ds.vocab_size, options.width, options.layers, options.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
    warm = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / options.warm_up)
    )
    batches = loader(ds, options.batch_size, seed=seed, redraw=way == "redraw")
    steps = len(ds) / options.batch_size / (options.epochs if way == "repeat" else 1)
    begin = time.perf_counter()
    for epoch in range(options.epochs):
        losses = []
        for _ in range(round(epoch * steps), round((epoch + 1) * steps)):
            batch = next(batches)
            loss = masked_loss(model(batch, example["attention_of"](batch, None)), batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm.step()
            losses.append(loss.item())
        yield {
            "seed": seed,
            "way": way,
            "epoch": epoch + 1,
            "trained": statistics.mean(losses),
            "held_out": heldout.losses(model, example["attention_of"]),
            "seconds": time.perf_counter() - begin,
        }


def print_epoch(line: dict[str, Any]) -> None:
    means = "".join(f"{name:>10} {loss:.3f}" for name, loss in line["held_out"].items())
    print(
        f"seed {line['seed']}  {line['way']}  epoch {line['epoch']:>2}  trained"
        f" {line['trained']:.3f}{means}  {line['seconds']:6.0f} s",
        flush=True,
    )


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(options.threads)
    lines = []
    with tempfile.TemporaryDirectory(prefix="packprep-benchmark-") as name:
        trained, rest = build_all(Path(name), options)
        heldout = HeldOut(rest, options.held_out_rows)
        if not options.json:
            held_out = sum(len(batch["tokens"]) for batch, _ in heldout.batches)
            rows = ", ".join(f"{way} {len(ds):,}" for way, ds in trained.items())
            print(
                f"{rows} rows of {rest.seq_length} slots to train, {held_out:,} held out; "
                f"{options.epochs} epochs; vocabulary {rest.vocab_size:,}"
            )
        for seed in options.seeds:
            for way, ds in trained.items():
                for line in train_once(ds, heldout, seed, way, options):
                    lines.append(line)
                    if not options.json:
                        print_epoch(line)
    return lines


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "speed", help="slots a second and memory of a batch in an epoch above 0"
    )
    one.add_argument("--preset", nargs="+", default=PRESETS)
    one.add_argument(
        "--accelerate", nargs="+", default=("numpy", "numba"), help="as of `Dataset.batches`"
    )
    one.add_argument("--batch-size", type=int, default=16)
    one.add_argument("--seq-length", type=int, default=4096)
    one.add_argument("--size", default="4MB", help="bytes of text of each build (default: 4MB)")
    one.add_argument("--calls", type=int, default=10, help="batches of a repeat")
    one.add_argument("--repeats", type=int, default=15)
    two = commands.add_parser("train", help="losses of held-out rows with redraw and without")
    two.add_argument("--epochs", type=int, default=3)
    two.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    two.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:2])
    two.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="of the documents that are not held out (default: 1)",
    )
    two.add_argument(
        "--size", default="4MB", help="bytes of text, held-out documents included (default: 4MB)"
    )
    two.add_argument("--vocabulary", type=int, default=2048)
    two.add_argument("--seq-length", type=int, default=256)
    two.add_argument("--batch-size", type=int, default=16)
    two.add_argument("--held-out-rows", type=int, default=320, help="at most (default: 320)")
    two.add_argument("--width", type=int, default=128)
    two.add_argument("--layers", type=int, default=3)
    two.add_argument("--heads", type=int, default=4)
    two.add_argument("--learning-rate", type=float, default=2e-3)
    two.add_argument(
        "--warm-up", type=int, default=50, help="steps until the rate is reached; then it stays"
    )
    two.add_argument("--threads", type=int, default=1)
    for command in (one, two):
        command.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    if not options.json:
        print(machine())
    lines = {"speed": speed, "train": train}[options.command](options)
    if options.json:
        print(json.dumps(lines, indent=1))
    elif options.command == "speed":
        print_speed(lines)


if __name__ == "__main__":
    sys.exit(main())
