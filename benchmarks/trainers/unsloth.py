"""Unsloth's model and its SFTTrainer on a CPU, on an export of conversations: with TRL's collator,
and with its own choice."""

import os
from pathlib import Path

from packprep import open_dataset
from trainers import made


def train(folder: Path, collator: str) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the steps that are left of 20; collator: "trl", or "own" with
    padding_free=True."""
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(folder.parent / "compiled")
    from unsloth import FastLanguageModel  # isort: skip
    import torch
    from datasets import load_from_disk
    from transformers.trainer_utils import get_last_checkpoint
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    class Saying(made.SaysLosses, SFTTrainer):
        """The SFTTrainer, which says the loss of each step."""

    dataset = open_dataset(folder.parent / "conversations")
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder.parent / "model"),
        max_seq_length=made.SEQ_LENGTH,
        dtype=torch.float32,
        load_in_4bit=False,
        full_finetuning=True,
    )
    arguments = SFTConfig(
        output_dir=str(folder),
        padding_free=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        bf16=False,
        disable_tqdm=True,
        **made.ARGUMENTS,
    )
    trainer = Saying(
        model,
        train_dataset=load_from_disk(str(folder.parent / "export")),
        processing_class=tokenizer,
        data_collator=(
            DataCollatorForLanguageModeling(0, padding_free=True) if collator == "trl" else None
        ),
        args=arguments,
    )
    trainer.data_collator = noted = made.Noted(trainer.data_collator, dataset)
    folder.mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer.losses, noted.steps[: made.STEPS]


def check(folder: Path) -> str:
    dataset, model = made.exported_with_model(folder, "trl")
    losses, steps = train(folder / "trl", "trl")
    made.assert_equal("TRL's collator, given", losses, made.reference(dataset, steps, model))
    made.killed_and_resumed(folder / "undisturbed", folder / "disturbed", "trl")
    losses, steps = train(folder / "across", "own")
    right = made.reference(dataset, steps[:1], made.llama(dataset.vocab_size))
    made.assert_apart(
        "its own on a CPU turns padding_free off, and attends across documents", losses[0], right[0]
    )
    return made.TRAINED


if __name__ == "__main__":
    made.main("unsloth", check, train)
