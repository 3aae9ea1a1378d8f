"""TRL's SFTTrainer on an export of conversations, with padding_free and without, and on `Rows` by
`Collator`."""

from pathlib import Path

from datasets import Dataset, load_from_disk
from transformers import PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from packprep import open_dataset
from packprep.adapters.huggingface import Collator
from packprep.adapters.torch import Rows
from trainers import made


class Saying(made.SaysLosses, SFTTrainer):
    """The SFTTrainer, which says the loss of each step."""


def numbered(rows: Rows) -> Dataset:
    """Rows as SFTTrainer takes them, which wants a `Dataset` of its own: their numbers, of which
    each becomes its row."""

    def each(batch):
        found = rows.__getitems__(batch["row"])
        return {name: [row[name] for row in found] for name in found[0]}

    return Dataset.from_dict({"row": range(len(rows))}).with_transform(each)


def train(
    folder: Path, name: str, form: str, attention: str, *options: str
) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the steps that are left of 20; form: "export", or "rows" of
    the dataset itself."""
    dataset = open_dataset(folder.parent / name)
    rows = (
        load_from_disk(str(folder.parent / "export"))
        if form == "export"
        else numbered(Rows(dataset))
    )
    arguments = SFTConfig(
        output_dir=str(folder),
        padding_free="padding_free" in options,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=form == "export",
        activation_checkpointing=False,
        bf16=False,
        disable_tqdm=True,
        use_cpu=True,
        **made.ARGUMENTS,
    )
    model = made.llama(dataset.vocab_size, attention)
    trainer = Saying(
        model,
        train_dataset=rows,
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder.parent / "tokenizer"),
        data_collator=Collator(dataset, model) if form == "rows" else None,
        args=arguments,
    )
    trainer.data_collator = noted = made.Noted(trainer.data_collator, dataset)
    folder.mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer.losses, noted.steps[: made.STEPS]


def check(folder: Path) -> str:
    for make in (made.conversations, made.prefixes):
        make(folder)
    made.exported(folder / "conversations", "hf", folder / "export")
    for name, form, attention, *options in (
        ("conversations", "export", "sdpa", "padding_free"),
        ("conversations", "export", "eager", "padding_free"),
        ("conversations", "rows", "sdpa"),
        ("prefixes", "rows", "sdpa"),
    ):
        losses, steps = train(
            folder / f"{name}-{form}-{attention}", name, form, attention, *options
        )
        dataset = open_dataset(folder / name)
        expected = made.reference(dataset, steps, made.llama(dataset.vocab_size))
        made.assert_equal(", ".join((name, form, attention, *options)), losses, expected)
    words = ("conversations", "export", "sdpa")
    made.killed_and_resumed(folder / "undisturbed", folder / "disturbed", *words, "padding_free")
    losses, steps = train(folder / "across", *words)
    dataset = open_dataset(folder / "conversations")
    expected = made.reference(dataset, steps[:1], made.llama(dataset.vocab_size))
    made.assert_apart("without padding_free it attends across documents", losses[0], expected[0])
    return made.TRAINED


if __name__ == "__main__":
    made.main("trl", check, train)
