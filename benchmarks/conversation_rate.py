"""How fast conversations become training rows, compared with a plain script of Transformers.

python benchmarks/conversation_rate.py qwen3.jinja qwen3_training.jinja gemma.jinja llama3_1.jinja
python benchmarks/conversation_rate.py qwen3.jinja --count 2000 --rounds 1

For each chat template, `packprep build` and the script work in turn on the same conversations
(conversations.py) and the same tokenizer (chats.py), each in --workers processes. The script calls
`apply_chat_template`, for templates with {% generation %} blocks with
`return_assistant_tokens_mask=True`, and writes ids and masks as arrays. It skips conversations that
the template refuses. The seconds are of whole commands, elapsed and of CPU, and the rates are
medians of the rounds. On a machine with other work, compare the CPU seconds. packprep's kernels are
compiled before the first round.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
from chat_datasets import BOS, EOS, PAD
from chats import has_blocks, tokenizer_of
from conversations import conversations, strings

SAMPLE = 500  # conversations that the tokenizer is trained on
RECIPE = """\
tokenizer = "."
seq_length = 8192
[documents]
append_eos = false
max_bad_fraction = 1.0
template_date = "2026-01-01"
[[sources]]
paths = ["chats.jsonl"]
[[tasks]]
objective = "causal"
"""


def prepare(folder: Path, source: str, lines: Sequence[bytes]) -> None:
    """Write the conversations, a tokenizer with the chat template, and the recipe."""
    records = [json.loads(line) for line in lines[:SAMPLE]]
    tokenizer = tokenizer_of(source, [text for record in records for text in strings(record)])
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(), "utf-8")
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
    (folder / "chats.jsonl").write_bytes(b"".join(lines))
    (folder / "recipe.toml").write_text(RECIPE)


def script(folder: Path, part: int, parts: int) -> None:
    """Render and tokenize every `parts`-th conversation from number `part` on."""
    from transformers import PreTrainedTokenizerFast

    named = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
    with_masks = has_blocks(tokenizer)
    ids, masks, skipped = [], [], 0
    with open(folder / "chats.jsonl", "rb") as file:
        for number, line in enumerate(file):
            if number % parts != part:
                continue
            record: dict[str, Any] = json.loads(line)
            variables = record.get("chat_template_kwargs") or {}
            try:
                found = tokenizer.apply_chat_template(
                    record["messages"],
                    tools=record.get("tools"),
                    return_dict=True,
                    return_assistant_tokens_mask=with_masks,
                    **variables,
                )
            except Exception:  # of any class, for a template is code
                skipped += 1
                continue
            ids.append(np.array(found["input_ids"], np.int32))
            if with_masks:
                masks.append(np.array(found["assistant_masks"], np.uint8))
    np.save(folder / f"ids-{part}.npy", np.concatenate(ids))
    if with_masks:
        np.save(folder / f"masks-{part}.npy", np.concatenate(masks))
    print(f"skipped {skipped}", file=sys.stderr)


def seconds_of(commands: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Run the commands at the same time, and return their elapsed seconds and CPU seconds."""
    begin, cpu = time.monotonic(), cpu_seconds()
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for command in commands
    ]
    errors = [process.communicate()[1].decode() for process in running]
    for process, text in zip(running, errors, strict=True):
        if process.returncode:
            raise SystemExit(f"{process.args} ended with {process.returncode}:\n{text}")
    return time.monotonic() - begin, cpu_seconds() - cpu


def cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(
    source: str, lines: Sequence[bytes], workers: int, rounds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the median elapsed and CPU seconds of packprep, and of the script, float64[2]."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, source, lines)
        for k in range(rounds):
            out = folder / f"out-{k}"
            build = ["build", str(folder / "recipe.toml"), "--out", str(out)]
            ours.append(
                seconds_of([[sys.executable, "-m", "packprep", *build, "--workers", str(workers)]])
            )
            own = [sys.executable, __file__, "--script", str(folder), "--workers", str(workers)]
            theirs.append(seconds_of([[*own, "--part", str(part)] for part in range(workers)]))
    return np.median(ours, axis=0), np.median(theirs, axis=0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("templates", nargs="*", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--script", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.script:
        script(options.script, options.part, options.workers)
        return 0
    lines = [
        json.dumps(record, ensure_ascii=False).encode() + b"\n"
        for record in conversations(options.count)
    ]
    size = sum(map(len, lines))
    subprocess.run([sys.executable, "-m", "packprep", "warm"], check=True, capture_output=True)
    print(f"{len(lines):,} conversations, {size / 1e6:,.1f} MB, {options.workers} workers")
    print(f"{'template':32}    packprep s    script s   MB/s  conversations/s  ratio  of CPU")
    for path in options.templates:
        own, others = measure(path.read_text("utf-8"), lines, options.workers, options.rounds)
        seconds = [f"{elapsed:6.1f} {cpu:6.1f}" for elapsed, cpu in (own, others)]
        rates = f"{size / own[0] / 1e6:5.2f}  {len(lines) / own[0]:15,.0f}"
        ratios = f"{others[0] / own[0]:5.2f}  {others[1] / own[1]:6.2f}"
        print(f"{path.stem:32.32} {' '.join(seconds)}  {rates}  {ratios}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
