"""LLaMA-Factory's own run, on an export of conversations: neat_packing with sdpa and eager, and without it."""

import shutil
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

from packprep import open_dataset
from trainers import made

SETTINGS = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "any",  # has to be given, and is not looked at beside tokenized_path
    "template": "empty",
    "per_device_train_batch_size": made.BATCH,
    "gradient_accumulation_steps": 1,
    "max_steps": made.STEPS,
    "save_steps": 5,
    "learning_rate": made.LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    "use_cpu": True,
}


def train(folder: Path, attention: str, *switches: str) -> None:
    """The steps that are left of 20; switches are settings that are true."""
    # imported for the sound of conversations, which these have not; no build of it loads beside torch's for a CPU
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    class Saying(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            if "loss" in logs:
                made.say_loss(state.global_step, logs["loss"])

    paths = {"model_name_or_path": "model", "tokenized_path": "export"}
    given = {key: str(folder.parent / name) for key, name in paths.items()} | {"output_dir": str(folder)}
    run_exp({**SETTINGS, **given, "flash_attn": attention, **dict.fromkeys(switches, True)}, callbacks=[Saying()])


def check(folder: Path) -> str:
    made.say("a module without contents in place of", "torchaudio")
    dataset = open_dataset(made.conversations(folder))
    made.exported(folder / "conversations", "hf", folder / "export", "--trainer", "llamafactory")
    made.llama(dataset.vocab_size).save_pretrained(folder / "model")
    shutil.copytree(folder / "tokenizer", folder / "model", dirs_exist_ok=True)
    steps = [[step * made.BATCH + row for row in range(made.BATCH)] for step in range(made.STEPS)]
    expected = made.reference(dataset, steps, made.llama(dataset.vocab_size))
    for name, attention in (("sdpa", "sdpa"), ("eager", "disabled")):
        losses = made.losses_of(folder / name, attention, "neat_packing", "disable_shuffling")
        made.assert_equal(f"flash_attn: {attention} ({name})", list(losses.values()), expected)
    made.killed_and_resumed(folder / "undisturbed", folder / "disturbed", "sdpa", "neat_packing")
    losses = made.losses_of(folder / "across", "sdpa", "disable_shuffling")
    apart = abs(losses[1] - expected[0])
    made.say("without neat_packing it attends across documents", f"the first loss is {apart:.3f} apart")
    assert apart > 1e-3
    return made.TRAINED


if __name__ == "__main__":
    made.main("llamafactory", check, train)
