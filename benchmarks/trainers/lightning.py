"""Lightning's Trainer on `loader`, whose state it keeps in its checkpoints: exactly, if the loader
has a length."""

import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from packprep import open_dataset
from packprep.adapters.torch import loader
from packprep.adapters.torch_attention import sdpa_mask
from packprep.adapters.torch_loss import masked_loss
from trainers import made


class Module(LightningModule):
    """The small Llama, which says the loss of each step and notes its rows."""

    def __init__(self, dataset):
        super().__init__()
        self.llama, self.losses, self.steps = made.llama(dataset.vocab_size), [], []
        self._numbers, self._pad_id = made.numbers_of(dataset), dataset.pad_id

    def training_step(self, batch, _):
        self.steps.append(
            [self._numbers[made.key_of(row, self._pad_id)] for row in batch["tokens"]]
        )
        given = {
            "position_ids": batch["position_ids"],
            "attention_mask": sdpa_mask(batch),
            "use_cache": False,
        }
        loss = masked_loss(self.llama(input_ids=batch["tokens"], **given).logits, batch)
        self.losses.append(loss.item())
        made.say_loss(self.global_step + 1, loss.item())
        return loss

    def configure_optimizers(self):
        return made.optimizer(self)


def train(folder: Path, name: str, *options: str) -> Module:
    """The module after the steps that are left of 20; a checkpoint is made every 5, and the last is
    gone on from."""
    ends = {} if "endless" in options else {"epochs": 1}
    batches = loader(folder.parent / name, batch_size=made.BATCH, seed=1, **ends)
    module = Module(batches.dataset)
    saved = ModelCheckpoint(
        folder, save_last=True, every_n_train_steps=5, save_on_train_epoch_end=False
    )
    last = folder / "last.ckpt"
    trainer = Trainer(
        max_steps=made.STEPS, accelerator="cpu", callbacks=[saved], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, batches, ckpt_path=last if last.exists() else None, weights_only=False)
    return module


def check(folder: Path) -> str:
    for make in (made.causal, made.prefixes):
        dataset = open_dataset(make(folder))
        module = train(folder / f"{make.__name__}-run", make.__name__)
        expected = made.reference(
            dataset, module.steps[: made.STEPS], made.llama(dataset.vocab_size)
        )
        made.assert_equal(make.__name__, module.losses, expected)
    made.killed_and_resumed(folder / "undisturbed", folder / "disturbed", "causal")
    whole = made.losses_of(folder / "undisturbed-endless", "causal", "endless")
    made.losses_of(folder / "disturbed-endless", "causal", "endless", kill_at=13)
    after = made.losses_of(folder / "disturbed-endless", "causal", "endless")
    what = "without epochs or samples it asks for a batch ahead, and skips it when it resumes"
    made.assert_apart(what, after[11], whole[11])
    return made.TRAINED


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made.main("lightning", check, train)
