"""Axolotl's own run, on an export of conversations: sdpa, eager, padding; and what it says to
sample_packing and preparation."""

import os
from pathlib import Path

from trainers import made

SETTINGS = {
    "seed": (
        1
    ),  # left out, each start draws one, and a run that is resumed reads rows in another order
    "skip_prepare_dataset": True,
    "sample_packing": False,
    "sequence_len": made.SEQ_LENGTH,
    "micro_batch_size": made.BATCH,
    "gradient_accumulation_steps": 1,
    "max_steps": made.STEPS,
    "save_steps": 5,
    "auto_resume_from_checkpoints": True,
    "optimizer": "adamw_torch",
    "learning_rate": made.LEARNING_RATE,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
}


def train(folder: Path, *settings: str) -> None:
    """The steps that are left of 20; settings as KEY=VALUE, of YAML."""
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    import yaml
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train as run
    from transformers.trainer import Trainer

    begin = Trainer.__init__

    def saying(trainer, *given, **named):
        begin(trainer, *given, **named)
        trainer.add_callback(made.saying_callback())

    Trainer.__init__ = saying  # the run builds its trainer and takes no callbacks
    chosen = SETTINGS | {
        key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in settings)
    }
    place = folder.parent
    paths = {
        "base_model": str(place / "model"),
        "datasets": [{"path": str(place / "export"), "type": None}],
        "output_dir": str(folder),
        "dataset_prepared_path": str(folder / "prepared"),
    }
    folder.mkdir(exist_ok=True)
    (folder / "axolotl.yaml").write_text(yaml.safe_dump(chosen | paths))
    cfg = load_cfg(str(folder / "axolotl.yaml"))
    run(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))


def check(folder: Path) -> str:
    dataset, model = made.exported_with_model(folder, "axolotl")
    expected = made.reference(dataset, made.in_order(), model)
    for number, (attention, padding) in enumerate(
        (("sdpa", "false"), ("sdpa", "null"), ("sdpa", "true"), ("eager", "null"))
    ):
        words = (f"attn_implementation={attention}", f"pad_to_sequence_len={padding}")
        losses = made.losses_of(folder / str(number), *words, "curriculum_sampling=true")
        made.assert_equal(" ".join(words), list(losses.values()), expected)
    made.killed_and_resumed(
        folder / "undisturbed", folder / "disturbed", "attn_implementation=sdpa"
    )
    for setting, why in (
        ("sample_packing=true", "Column name ['length'] not in the dataset"),
        ("skip_prepare_dataset=false", "'NoneType' object has no attribute 'startswith'"),
    ):
        try:
            made.losses_of(folder / setting, "attn_implementation=sdpa", setting)
        except AssertionError as error:
            assert why in str(error), error
            made.say(f"{setting} ends at once", why)
        else:
            raise AssertionError(f"{setting} trains")
    return made.TRAINED


if __name__ == "__main__":
    made.main("axolotl", check, train)
