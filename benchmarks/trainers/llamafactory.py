"""LLaMA-Factory's own run, on an export of conversations: neat_packing with sdpa and eager, and
without it."""

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

from trainers import made

SETTINGS = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "any",  # has to be given, and is not looked at beside tokenized_path
    "template": "empty",
    **made.ARGUMENTS,
    "gradient_accumulation_steps": 1,
    "logging_steps": 1,
    "disable_tqdm": True,
    "use_cpu": True,
}


def train(folder: Path, attention: str, *switches: str) -> None:
    """The steps that are left of 20; switches are settings that are true."""
    # imported for the sound of conversations, which these have not; no build of it loads beside
    # torch's for a CPU
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)
    from llamafactory.train.tuner import run_exp

    paths = {"model_name_or_path": "model", "tokenized_path": "export"}
    given = {key: str(folder.parent / name) for key, name in paths.items()} | {
        "output_dir": str(folder)
    }
    run_exp(
        {**SETTINGS, **given, "flash_attn": attention, **dict.fromkeys(switches, True)},
        callbacks=[made.saying_callback()],
    )


def check(folder: Path) -> str:
    made.say("a module without contents in place of", "torchaudio")
    dataset, model = made.exported_with_model(folder, "llamafactory")
    expected = made.reference(dataset, made.in_order(), model)
    for name, attention in (("sdpa", "sdpa"), ("eager", "disabled")):
        losses = made.losses_of(folder / name, attention, "neat_packing", "disable_shuffling")
        made.assert_equal(f"flash_attn: {attention} ({name})", list(losses.values()), expected)
    made.killed_and_resumed(folder / "undisturbed", folder / "disturbed", "sdpa", "neat_packing")
    losses = made.losses_of(folder / "across", "sdpa", "disable_shuffling")
    made.assert_apart("without neat_packing it attends across documents", losses[1], expected[0])
    return made.TRAINED


if __name__ == "__main__":
    made.main("llamafactory", check, train)
