"""Levanter's examples of packed rows: by a dataset of ten lines, and by its format `prebuilt` from
an export.

`prebuilt` begins a document behind each eos, so it is right where every segment ends with one.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from haliax import Axis
from jax.sharding import Mesh
from levanter.data.dataset import AsyncDataset
from levanter.data.loader import DataLoader
from levanter.data.sharded_datasource import UrlDataSource
from levanter.data.text.datasets import NamedLmDataset, PrebuiltLmDataset
from levanter.data.text.examples import GrugLmExample
from levanter.data.text.formats import PrebuiltLmDatasetFormat
from levanter.grug.attention import AttentionMask
from levanter.store.cache import build_or_load_cache

from packprep.adapters.jax import loader
from packprep.dataset.loader import Dataset, open_dataset
from trainers import made


class Rows(AsyncDataset[GrugLmExample]):
    """Rows by number; order and state are Levanter's."""

    def __init__(self, directory: Path):
        self.dataset = loader(
            directory, batch_size=1, names="levanter"
        ).dataset  # refuses what Levanter would pass over

    def is_finite(self) -> bool:
        return True

    async def async_len(self) -> int:
        return len(self.dataset)

    async def get_batch(self, indices: Sequence[int]) -> list[GrugLmExample]:
        batch = self.dataset.batch(
            list(indices), columns=["tokens", "loss_weights", "segment_ids"], dtype=np.int32
        )
        rows = zip(batch["tokens"], batch["loss_weights"], batch["segment_ids"], strict=True)
        return [
            GrugLmExample(ids, w, AttentionMask.causal().with_segment_ids(segments))
            for ids, w, segments in rows
        ]


def seen(example: GrugLmExample) -> np.ndarray:
    """bool[T, T]: what Levanter's own mask of an example lets each slot see."""
    return np.asarray(
        example.attn_mask.materialize_mask(example.tokens.shape[0], example.tokens.shape[0])
    )


def right(row) -> np.ndarray:
    slots = np.arange(len(row.tokens))
    return (row.segment_ids[:, None] == row.segment_ids) & (slots[:, None] >= slots)


def by_its_loader(dataset: Dataset, rows: Rows) -> int:
    """Batches of its DataLoader, whose ids, weights and segments are compared with what is stored;
    how many rows."""
    length = Axis("position", dataset.seq_length)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    found = DataLoader(
        NamedLmDataset(rows, length), made.BATCH, mesh=mesh, axis_resources={"batch": "data"}
    )
    number = 0
    for batch, _ in zip(found, range(made.STEPS), strict=False):
        segments = batch.attn_mask.segment_ids[0].array
        for ids, weights, its in zip(
            batch.tokens.array, batch.loss_weight.array, segments, strict=True
        ):
            row = dataset.row(number)
            assert np.array_equal(ids, row.tokens) and np.array_equal(its, row.segment_ids)
            assert np.array_equal(weights, row.loss_mask)
            number += 1
    return number


def misled_by_prebuilt(packed: Path) -> tuple[int, int]:
    """How many slots of an export are trained in Levanter's own reading of it, by its cache; how
    many see what is not theirs."""
    dataset = open_dataset(packed)
    export = made.exported(packed, "parquet", packed.with_name("export"), "--columns", "full")
    form = PrebuiltLmDatasetFormat(input_ids_key="tokens", loss_weights_key="loss_weights")
    source = UrlDataSource(
        [str(path) for path in sorted(export.glob("*.parquet"))], ["tokens", "loss_weights"]
    )
    its = PrebuiltLmDataset(
        build_or_load_cache(str(packed.with_name("cache")), source, form.build_preprocessor(None)),
        Axis("position", dataset.seq_length),
        input_ids_key="tokens",
        loss_weights_key="loss_weights",
        loss_weight_transform=None,
        eos_id=dataset.manifest["specials"]["eos"],
    )
    trained = misled = 0
    for number, example in enumerate(asyncio.run(its.get_batch(range(len(dataset))))):
        row = dataset.row(number)
        on = row.loss_mask > 0
        assert np.array_equal(example.tokens, row.tokens) and np.array_equal(
            np.asarray(example.loss_weight) > 0, on
        )
        trained += int(on.sum())
        misled += int((seen(example) != right(row)).any(axis=1)[on].sum())
    return trained, misled


def check(folder: Path) -> str:
    packed = made.causal(folder)
    dataset = open_dataset(packed)
    rows = Rows(packed)
    examples = asyncio.run(rows.get_batch(range(made.STEPS)))
    for number, example in enumerate(examples):
        row = dataset.row(number)
        real = row.segment_ids > 0
        assert np.array_equal(seen(example)[real], right(row)[real])
    made.say(
        "a dataset of ten lines, its masks", f"equal those of the segments in {len(examples)} rows"
    )
    made.say(
        "by its DataLoader",
        f"{by_its_loader(dataset, rows)} rows: ids, weights and segments equal what is stored",
    )

    whole = misled_by_prebuilt(packed)
    made.say(
        "prebuilt, whole documents: trained slots, of them with another mask",
        "{:,}, {:,}".format(*whole),
    )
    cut = misled_by_prebuilt(made.causal(folder / "cut", "--set", "documents.max_tokens=40"))
    made.say(
        "prebuilt, documents cut to 40 tokens, of which the last has eos", "{:,}, {:,}".format(*cut)
    )
    assert whole[1] == 0 < cut[1]

    made.assert_refused("prefixes", lambda: Rows(made.prefixes(folder)))
    return made.READ


if __name__ == "__main__":
    made.main("marin-levanter", check)
