"""Whether a model's loss over packprep's rows is the one that TRL's SFTTrainer computes from the
same records.

python benchmarks/losses.py                                   the templates that TRL has, 40 records of all shapes each
python benchmarks/losses.py FOLDER FILE.jinja --count 200 --seed 7

TRL renders, tokenizes, masks and collates by itself: its loss is that of one step over padded
batches of records. packprep's is that of a dataset's rows, which hold several, and which the model
takes through `adapters.huggingface`. Both are a mean over all trained tokens; the model is small,
of random weights, in double precision. The records are those of `conversations.py`:

messages     with tools, calls and reasoning; assistant_only_loss=True, under templates with {% generation %} blocks
completion   prompt and completion as messages, the last answer; completion_only_loss, under the other templates
texts        prompt and completion as texts; completion_only_loss, without a template

Left out are records that the template does not take or writes no answer of, rejects, and those
longer than a row; and where the prompt alone is written or tokenized otherwise than before its
completion: TRL warns of that, and trains the rest of the prompt. Exit status 1 if a loss or a count
of trained tokens differs.
"""

import argparse
import datetime
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import chats
import torch
import trl
from chat_datasets import BOS, EOS, PAD, Silent
from conversations import conversations, strings
from datasets import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback

from packprep import open_dataset
from packprep.adapters.huggingface import Collator
from packprep.adapters.torch import loader
from packprep.building.run import build
from packprep.recipe import read_recipe

SEQ_LENGTH = 2048
BATCH = 8  # conversations that TRL pads to the longest
TOLERANCE = 1e-5
TODAY = datetime.date.today().isoformat()


class Loss(NamedTuple):
    """A mean over trained tokens, and how many those are."""

    mean: float
    trained: int


def records_of(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` records of one kind, as both read them."""
    return [
        record
        for record in (_record_as(kind, made) for made in conversations(4 * count, seed))
        if record
    ][:count]


def _record_as(kind: str, record: dict[str, Any]) -> dict[str, Any] | None:
    """A conversation as a record of a kind; None: it does not end in an answer."""
    messages = record["messages"]
    if kind == "messages":
        return record
    *prompt, last = messages
    if last["role"] != "assistant" or not prompt:
        return None
    if kind == "completion":
        return {
            **{key: value for key, value in record.items() if key != "messages"},
            "prompt": prompt,
            "completion": [last],
        }
    question, answer = (next(strings(message["content"])).strip() for message in messages[-2:])
    return (
        {"prompt": f"Q: {question}\nA:", "completion": f" {answer}"}
        if question and answer
        else None
    )


def usable(tokenizer: Any, kind: str, record: dict[str, Any]) -> bool:
    """Whether a record has ids, an answer among them, and fits into a row; and of a prompt, whether
    it is the same alone."""
    if kind == "texts":
        return len(tokenizer(record["prompt"] + record["completion"])["input_ids"]) < SEQ_LENGTH
    messages = (
        record["messages"] if kind == "messages" else [*record["prompt"], *record["completion"]]
    )
    found = chats.judge(tokenizer, {**record, "messages": messages})
    if found.refusal or len(found.ids) > SEQ_LENGTH or not (found.mask is None or found.mask.any()):
        return False
    return kind == "messages" or _is_same_alone(tokenizer, record, found)


def _is_same_alone(tokenizer: Any, record: dict[str, Any], found: chats.Judged) -> bool:
    """Whether a prompt alone has the text that it has before its completion, and no token of that
    is of both."""
    kwargs = record.get("chat_template_kwargs", {})
    alone, asked = (
        chats.judge(
            tokenizer,
            {
                **record,
                "messages": record["prompt"],
                "chat_template_kwargs": {**kwargs, "add_generation_prompt": prompt},
            },
        )
        for prompt in (False, True)
    )
    shared = len(os.path.commonprefix([asked.text, found.text]))
    tokens = len(os.path.commonprefix([asked.ids.tolist(), found.ids.tolist()]))
    before = len(os.path.commonprefix([alone.text, asked.text]))
    return not asked.refusal and before <= shared == found.begins[tokens]


def model_of(vocab_size: int) -> LlamaForCausalLM:
    """The model that both losses are of."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=SEQ_LENGTH,
    )
    return LlamaForCausalLM(config).double()


def packed_loss(
    folder: Path, tokenizer: Any, records: Sequence[dict[str, Any]], kind: str
) -> tuple[Loss, list[dict[str, Any]]]:
    """(the loss over the rows of a dataset of the records, those that it has: others are
    rejects)."""
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(), "utf-8")
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**named, "chat_template": tokenizer.chat_template}), "utf-8"
    )
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "records.jsonl").write_text("".join(lines), "utf-8")
    documents = {
        "append_eos": kind == "texts",
        "special_text": "special",
        "template_date": TODAY,
        "max_bad_fraction": 1.0,
    }
    recipe = {
        "seq_length": SEQ_LENGTH,
        "tokenizer": ".",
        "sources": [{"paths": ["records.jsonl"]}],
        "tasks": [{"preset": "causal"}],
        "documents": documents,
    }
    build(read_recipe(recipe, folder), folder / "packed", Silent())
    dataset = open_dataset(folder / "packed")
    model = model_of(len(tokenizer)).eval()
    collator = Collator(dataset, model)
    total, trained = 0.0, 0
    with torch.no_grad():
        for batch in loader(dataset, 1, epochs=1):
            own = int(batch["loss_mask"].sum())
            total += model(**collator.inputs(batch)).loss.item() * own
            trained += own
    begins = accumulate(map(len, lines), initial=0)
    used = {int(at) for i in range(len(dataset)) for at in dataset.row(i).segments["doc"]}
    return Loss(total / trained, trained), [
        record for begin, record in zip(begins, records, strict=False) if begin in used
    ]


def trl_loss(folder: Path, tokenizer: Any, records: Sequence[dict[str, Any]], kind: str) -> Loss:
    """The loss of the one step that SFTTrainer makes of the records."""

    def each() -> Iterator[dict[str, Any]]:
        yield from records

    trainer = trl.SFTTrainer(
        model_of(len(tokenizer)),
        trl.SFTConfig(
            output_dir=str(folder),
            assistant_only_loss=kind == "messages",
            max_length=None,
            max_steps=1,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=-(-len(records) // BATCH),
            learning_rate=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=IterableDataset.from_generator(each),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trained = sum(
        label != -100 for example in trainer.train_dataset for label in example["labels"][1:]
    )
    return Loss(trainer.train().training_loss, trained)


def both_losses(source: str, kind: str, count: int, seed: int) -> tuple[int, Loss, Loss]:
    """(records, packprep's loss, TRL's) under one template."""
    records = records_of(kind, count, seed)
    tokenizer = chats.tokenizer_of(source, [*map("\n".join, map(strings, records)), source])
    records = [record for record in records if usable(tokenizer, kind, record)]
    if not records:
        return 0, Loss(0.0, 0), Loss(0.0, 0)
    with tempfile.TemporaryDirectory() as folder:
        own, used = packed_loss(Path(folder), tokenizer, records, kind)
        return len(used), own, trl_loss(Path(folder), tokenizer, used, kind)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    of_trl = Path(trl.__file__).parent / "chat_templates"
    parser.add_argument(
        "templates", nargs="*", type=Path, default=[of_trl], metavar="FOLDER or FILE.jinja"
    )
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    files = [
        file
        for path in options.templates
        for file in (sorted(path.glob("*.jinja")) if path.is_dir() else [path])
    ]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(
        f"{'':32}  kind        records  trained  of TRL  packprep's loss   TRL's loss       "
        " relative difference"
    )
    failed = False
    for file in files:
        source = file.read_text("utf-8")
        kinds = [
            "messages" if "generation %}" in source else "completion",
            *(["texts"] if file == files[0] else []),
        ]
        for kind in kinds:
            records, own, trls = both_losses(source, kind, options.count, options.seed)
            difference = abs(own.mean - trls.mean) / trls.mean if records else 0.0
            failed |= own.trained != trls.trained or difference > TOLERANCE
            cells = (
                f"{own.trained:7}  {trls.trained:6}  {own.mean:<16.12f}  {trls.mean:<16.12f} "
                f" {difference:.1e}"
            )
            print(f"{file.stem:32}  {kind:10}  {records:7}  {cells}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
