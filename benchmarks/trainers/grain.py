"""Grain: packprep's batches with their own state, and a dataset as a source of Grain's own order,
in a loop of torch."""

from pathlib import Path

import grain
from etils import epath
from grain.python import PyGrainCheckpointHandler

from packprep import open_dataset
from packprep.adapters import default_columns
from packprep.adapters.jax.grain_source import grain_batches
from packprep.adapters.torch import DTYPES, tensors
from trainers import made


def batches_of(path: Path, form: str) -> grain.DatasetIterator:
    """Grain's iterator over batches; form: "batches" in packprep's order, or "source" in
    Grain's."""
    if form == "batches":
        return iter(grain_batches(path, made.BATCH, seed=1, dtype=DTYPES))
    dataset = open_dataset(path)
    rows = grain.MapDataset.source(dataset.with_columns(default_columns(dataset), DTYPES))
    return iter(rows.shuffle(seed=1).repeat().batch(made.BATCH).to_iter_dataset())


def train(folder: Path, name: str, form: str) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the steps that are left of 20; Grain saves its own state,
    every 5."""
    handler, batches = PyGrainCheckpointHandler(), batches_of(folder.parent / name, form)

    def save(step: int) -> str:
        at = folder / f"grain{step}"
        at.mkdir()
        handler.save(epath.Path(at), batches)
        return str(at)

    def restore(at: str):
        return map(tensors, handler.restore(epath.Path(at), batches))

    return made.trained_by_hand(
        folder, open_dataset(folder.parent / name), map(tensors, batches), save, restore
    )


def check(folder: Path) -> str:
    for make in (made.causal, made.prefixes):
        dataset = open_dataset(make(folder))
        for form in ("batches", "source"):
            losses, steps = train(folder / f"{make.__name__}-{form}", make.__name__, form)
            expected = made.reference(dataset, steps, made.llama(dataset.vocab_size))
            made.assert_equal(f"{make.__name__}, {form}", losses, expected)
    for form in ("batches", "source"):
        made.killed_and_resumed(
            folder / f"{form}-undisturbed", folder / f"{form}-disturbed", "causal", form
        )
    return made.TRAINED


if __name__ == "__main__":
    made.main("grain", check, train)
