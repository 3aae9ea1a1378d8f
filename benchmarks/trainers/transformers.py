"""Transformers' Trainer on `Rows` by `Collator`: eager, sdpa, two-way prefixes, FlexAttention, and
a checkpoint of its own."""

from pathlib import Path

import torch
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from packprep.adapters.huggingface import Collator
from packprep.adapters.torch import Rows, loader
from packprep.errors import ArgumentError
from trainers import made


class Saying(made.SaysLosses, Trainer):
    """The Trainer, which says the loss of each step."""


def train(folder: Path, name: str, attention: str) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the steps that are left of 20; a checkpoint is made every
    5."""
    rows = Rows(folder.parent / name)
    model = made.llama(rows.dataset.vocab_size, attention)
    noted = made.Noted(Collator(rows.dataset, model), rows.dataset)
    arguments = TrainingArguments(
        output_dir=str(folder),
        weight_decay=0.0,
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        **made.ARGUMENTS,
    )
    trainer = Saying(model=model, train_dataset=rows, data_collator=noted, args=arguments)
    folder.mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer.losses, noted.steps[: made.STEPS]


def check(folder: Path) -> str:
    datasets = {
        make.__name__: make(folder) for make in (made.causal, made.conversations, made.prefixes)
    }
    runs = (
        ("causal", "sdpa"),
        ("causal", "eager"),
        ("conversations", "sdpa"),
        ("prefixes", "sdpa"),
    )
    for name, attention in runs:
        dataset = Rows(datasets[name]).dataset
        losses, steps = train(folder / f"{name}-{attention}", name, attention)
        expected = made.reference(dataset, steps, made.llama(dataset.vocab_size))
        made.assert_equal(f"{name}, {attention}", losses, expected)
    made.killed_and_resumed(folder / "undisturbed", folder / "disturbed", "causal", "sdpa")
    for name, path in datasets.items():
        flex_attention(name, path)
    refuses_other_collators(datasets["causal"], folder / "tokenizer")
    return made.TRAINED


def flex_attention(name: str, path: Path) -> None:
    """Its loss of a batch; it has no backward pass on a CPU."""
    batch = next(loader(path, made.BATCH, seed=0))
    losses = []
    for attention in ("flex_attention", "sdpa"):
        with torch.no_grad():
            model = made.llama(made.VOCAB_SIZE, attention)
            losses.append(model(**Collator(path, model).inputs(batch), use_cache=False).loss.item())
    made.assert_equal(f"{name}, flex_attention beside sdpa, forward", losses[:1], losses[1:])


def refuses_other_collators(path: Path, tokenizer: Path) -> None:
    """Transformers' own collators do not know packprep's columns, and must not train on them."""
    rows = Rows(path)
    own = DataCollatorForLanguageModeling(
        PreTrainedTokenizerFast.from_pretrained(tokenizer), mlm=False
    )
    for collate in (own, None):
        arguments = TrainingArguments(
            output_dir=str(path.parent / "refused"), max_steps=1, report_to="none", use_cpu=True
        )
        try:
            Trainer(
                model=made.llama(made.VOCAB_SIZE),
                train_dataset=rows,
                data_collator=collate,
                args=arguments,
            ).train()
        except (ArgumentError, ValueError, KeyError, TypeError, IndexError) as error:
            made.say(
                f"{type(collate).__name__} on Rows", f"{type(error).__name__}: {str(error)[:150]}"
            )
        else:
            raise AssertionError(f"{type(collate).__name__} trained on Rows")


if __name__ == "__main__":
    made.main("transformers", check, train)
