"""Checks of the golden datasets that `make_datasets.py` wrote."""

import json
import shutil
from pathlib import Path

import numpy as np

import packprep
from packprep.building.run import build
from packprep.errors import PackprepError
from packprep.exporting.export import export_dataset
from packprep.inspection.row import describe_row
from packprep.recipe import load_recipe, read_recipe
from packprep.verification import ALL, verify_dataset
from tests import made
from tests.twin.check import verify_with_twin

LAW3 = Path(__file__).parent / "law3"
FINISHED = (
    "causal",
    "compact",
    "in_place",
    "shares",
    "supervised",
    "ul2r",
    "calls",
    "chats",
    "untrained",
)


def moved(folder: Path) -> dict[str, str]:
    """source → where its files lie now."""
    sources = json.loads((folder / "dataset/plan.json").read_text())["sources"]
    return {
        source["name"]: source["prefix"].replace(f"/tmp/golden/{folder.name}", str(folder))
        for source in sources
    }


def verified(
    folder: Path,
    replay: int | None = None,
    twin: bool = False,
    dataset: Path | None = None,
    epoch: int = 0,
) -> dict:
    """The report of `verify`, which finds no fault. dataset: folder / "dataset" by default."""
    asked = dataset or folder / "dataset", replay, moved(folder)
    if twin:
        found = verify_with_twin(*asked, epoch)
    else:
        found = verify_dataset(*asked, (0, 1), 0, made.Silent(), epoch=epoch)
    assert found["faults"] == 0, found["listed"]
    return found


def check_read(folder: Path, to: Path) -> None:
    """It opens, and its rows are shown and exported."""
    dataset = packprep.open_dataset(folder / "dataset")
    rows = np.arange(len(dataset))
    assert len(rows) and dataset.batch(rows)["tokens"].shape == (len(rows), dataset.seq_length)
    assert sum(len(batch["loss_mask"]) for batch in dataset.batches(4, seed=1, epochs=1)) == len(
        rows
    )
    assert describe_row(folder / "dataset", 0, moved(folder))["segments"]
    documents = export_dataset(
        folder / "dataset", "megatron", to / "bin", made.Silent(), loss_weights="ignore"
    )
    parquet = export_dataset(
        folder / "dataset", "parquet", to / "parquet", made.Silent(), columns="full"
    )
    assert documents["documents"] > 0 and parquet["rows"] == len(rows)


def check_finished(folder: Path, to: Path) -> None:
    """Read a finished dataset, rebuild it, compare it with the twin (in a later epoch too), resume
    it and build it again: the bytes are the same."""
    check_read(folder, to)
    for epoch in (0, 3):
        found = verified(folder, ALL, twin=True, epoch=epoch)
        assert found["replayed"] == found["twin"] == found["segments"] > 0
    stored = json.loads((folder / "dataset/dataset.json").read_text())
    shutil.copytree(folder / "dataset", to / "half")
    for path in (
        to / "half/dataset.json",
        *to.glob("half/receipts/*/*0.json"),
        *to.glob("half/shards/*/*0.safetensors"),
    ):
        path.unlink()
    outcome = build_again(folder, to / "half")
    assert outcome.made and same_shards(folder / "dataset", to / "half")
    assert all(
        outcome.manifest[key] == stored[key] for key in ("fingerprint", "law_version", "ledger")
    )
    again = build_again(folder, to / "again").manifest
    assert same_shards(folder / "dataset", to / "again")
    assert again["fingerprint"] == stored["fingerprint"]


def build_again(folder: Path, out: Path, **changes):
    """Its recipe built into `out`, or gone on with there. changes: of the recipe's table."""
    return build(
        read_recipe(load_recipe(folder / "recipe.toml") | changes, folder), out, made.Silent()
    )


def tasks_of(folder: Path) -> list[dict]:
    """The tasks of its recipe."""
    return load_recipe(folder / "recipe.toml")["tasks"]


def same_shards(one: Path, two: Path) -> bool:
    """Whether they have the same shards and rejects."""
    assert made.contents(one, "shards")
    return all(
        made.contents(one, kind) == made.contents(two, kind) for kind in ("shards", "rejects")
    )


def check_half(folder: Path, to: Path) -> None:
    """Resume a half-finished dataset: it gets the bytes of an undisturbed build, and what was done
    stays."""
    shutil.copytree(folder / "dataset", to / "half")
    before = made.contents(to / "half", "receipts")
    outcome = build_again(folder, to / "half")
    assert outcome.made == outcome.plan.shards - len(before) > 1 and before
    assert made.contents(to / "half").items() >= before.items()
    build_again(folder, to / "undisturbed")
    assert same_shards(to / "half", to / "undisturbed")
    assert verified(folder, ALL, twin=True, dataset=to / "half")["replayed"]


def refusal(call) -> str:
    """The message with which a call is refused."""
    try:
        call()
    except PackprepError as error:
        return str(error)
    raise AssertionError("it is not refused")
