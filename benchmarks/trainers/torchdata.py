"""torchdata's StatefulDataLoader: batches of `iterable`, and `Rows` by `BatchSampler`, with two
workers and its own state."""

from pathlib import Path

from torchdata.stateful_dataloader import StatefulDataLoader

from packprep import open_dataset
from packprep.adapters.torch import BatchSampler, Rows, iterable
from trainers import made


def batches_of(path: Path, form: str) -> StatefulDataLoader:
    """The two ways to read a dataset, whose order is the same."""
    if form == "iterable":
        return StatefulDataLoader(
            iterable(path, made.BATCH, seed=1), batch_size=None, num_workers=2
        )
    rows = Rows(path)
    return StatefulDataLoader(
        rows, batch_sampler=BatchSampler(rows, made.BATCH, seed=1), num_workers=2
    )


def train(folder: Path, name: str, form: str) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the steps that are left of 20; the loader's state is saved
    every 5."""
    batches = batches_of(folder.parent / name, form)

    def restore(state):
        batches.load_state_dict(state)
        return batches

    dataset = open_dataset(folder.parent / name)
    return made.trained_by_hand(folder, dataset, batches, lambda _: batches.state_dict(), restore)


def check(folder: Path) -> str:
    for make, form in (
        (made.causal, "iterable"),
        (made.causal, "rows"),
        (made.prefixes, "iterable"),
    ):
        path = folder / make.__name__
        dataset = Rows(path if path.exists() else make(folder)).dataset
        losses, steps = train(folder / f"{path.name}-{form}", path.name, form)
        made.assert_equal(
            f"{path.name}, {form}",
            losses,
            made.reference(dataset, steps, made.llama(dataset.vocab_size)),
        )
    for form in ("iterable", "rows"):
        made.killed_and_resumed(
            folder / f"{form}-undisturbed", folder / f"{form}-disturbed", "causal", form
        )
    return made.TRAINED


if __name__ == "__main__":
    made.main("torchdata", check, train)
