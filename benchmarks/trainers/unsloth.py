"""Unsloth's model and its SFTTrainer on a CPU, on an export of conversations: with TRL's collator, and with its own choice."""

import os
import shutil
from pathlib import Path

from packprep import open_dataset
from trainers import made


def train(folder: Path, collator: str) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the steps that are left of 20; collator: "trl", or "own" with padding_free=True."""
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(folder.parent / "compiled")
    from unsloth import FastLanguageModel  # isort: skip
    import torch
    from datasets import load_from_disk
    from transformers.trainer_utils import get_last_checkpoint
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    class Saying(SFTTrainer):
        def training_step(self, *given, **named):
            loss = super().training_step(*given, **named)
            losses.append(loss.item())
            made.say_loss(self.state.global_step + 1, loss.item())
            return loss

    losses: list[float] = []
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
        max_steps=made.STEPS,
        save_steps=5,
        per_device_train_batch_size=made.BATCH,
        learning_rate=made.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Saying(
        model,
        train_dataset=load_from_disk(str(folder.parent / "export")),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(0, padding_free=True) if collator == "trl" else None,
        args=arguments,
    )
    trainer.data_collator = noted = made.Noted(trainer.data_collator, dataset)
    folder.mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return losses, noted.steps[: made.STEPS]


def check(folder: Path) -> str:
    dataset = open_dataset(made.conversations(folder))
    made.exported(folder / "conversations", "hf", folder / "export")
    made.llama(dataset.vocab_size).save_pretrained(folder / "model")
    shutil.copytree(folder / "tokenizer", folder / "model", dirs_exist_ok=True)
    losses, steps = train(folder / "trl", "trl")
    made.assert_equal("TRL's collator, given", losses, made.reference(dataset, steps, made.llama(dataset.vocab_size)))
    made.killed_and_resumed(folder / "undisturbed", folder / "disturbed", "trl")
    losses, steps = train(folder / "across", "own")
    apart = abs(losses[0] - made.reference(dataset, steps[:1], made.llama(dataset.vocab_size))[0])
    made.say(
        "its own on a CPU turns padding_free off, and attends across documents", f"the first loss is {apart:.3f} apart"
    )
    assert apart > 1e-3
    return made.TRAINED


if __name__ == "__main__":
    made.main("unsloth", check, train)
