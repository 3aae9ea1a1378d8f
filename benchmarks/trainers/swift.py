"""ms-swift's own run, on an export of conversations as `cached_dataset`: padding_free, packing, and
without padding_free."""

from pathlib import Path

from trainers import made

SETTINGS = {
    "model_type": "llama",
    "template": "dummy",
    "truncation_strategy": "split",  # rows are taken as they are, and are not encoded
    "max_length": made.SEQ_LENGTH,
    "tuner_type": "full",
    "torch_dtype": "float32",
    "attn_impl": "sdpa",
    **made.ARGUMENTS,
    "gradient_accumulation_steps": 1,
    "adam_beta2": 0.999,
    "warmup_ratio": 0,
    "weight_decay": 0,
    "logging_steps": 1,
    "use_cpu": "true",
    "add_version": "false",
}


def train(folder: Path, *settings: str) -> None:
    """The steps that are left of 20; settings as KEY=VALUE. "padding_free" is said to the
    template."""
    from swift.pipelines import SwiftSft
    from transformers.trainer_utils import get_last_checkpoint

    chosen = {**SETTINGS, **dict(word.split("=") for word in settings)}
    free = chosen.pop("padding_free", "true") == "true"

    class Run(SwiftSft):
        def _prepare_template(self):
            super()._prepare_template()
            self.template.padding_free = (
                free  # its arguments take it beside FlashAttention alone, which no CPU has
            )

        def train(self, trainer):
            trainer.add_callback(made.saying_callback())
            return super().train(trainer)

    place = folder.parent
    chosen |= {
        "model": str(place / "model"),
        "cached_dataset": str(place / "export"),
        "output_dir": str(folder),
    }
    folder.mkdir(exist_ok=True)
    if last := get_last_checkpoint(folder):
        chosen["resume_from_checkpoint"] = last
    Run([word for key, value in chosen.items() for word in (f"--{key}", str(value))]).main()


def check(folder: Path) -> str:
    made.say(
        "padding_free",
        "set behind swift's check of the attention's name, as FlashAttention runs on no CPU",
    )
    dataset, model = made.exported_with_model(folder, "swift")
    expected = made.reference(dataset, made.in_order(), model)
    for attention in ("sdpa", "eager"):
        words = (f"attn_impl={attention}", "train_dataloader_shuffle=false")
        made.assert_equal(
            attention, list(made.losses_of(folder / attention, *words).values()), expected
        )
    made.killed_and_resumed(folder / "undisturbed", folder / "disturbed")
    losses = made.losses_of(
        folder / "across", "padding_free=false", "train_dataloader_shuffle=false"
    )
    made.assert_apart("without padding_free it attends across documents", losses[1], expected[0])
    try:
        made.losses_of(folder / "encoded", "truncation_strategy=delete")
    except AssertionError as error:
        made.say(
            "without truncation_strategy split it ends", str(error).strip().rpartition("\n")[2]
        )
    else:
        raise AssertionError("it encodes rows that have no messages")
    return made.TRAINED


if __name__ == "__main__":
    made.main("ms-swift", check, train)
