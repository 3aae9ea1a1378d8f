"""What a trainer reads of places of media: of a row, of batches, of mixtures."""

import shutil

import numpy as np
import pytest

from packprep.dataset.loader import open_dataset
from packprep.errors import ArgumentError, DatasetError
from tests import made, media_made
from tests.verification.damage import resigned


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    media_made.corpus(folder)
    made.build(media_made.table(tokenizer="bpe"), folder, folder / "d")
    sounds = {"media": {"sound": "<|begin|>", "film": "<|film|>"}}
    records = [
        {"text": "la la", "media": [{"at": 2, "tokens": 3, "ref": f"{i}.wav", "kind": "sound"}]}
        for i in range(40)
    ]
    media_made.write(folder, "s.jsonl", records)
    made.build(
        made.table(
            "s.jsonl",
            seq_length=128,
            tokenizer="bpe",
            specials=sounds,
            tasks=[{"preset": "causal"}],
        ),
        folder,
        folder / "s",
    )
    made.write_lines(folder / "t.jsonl", made.texts(20))
    made.build(
        made.table("t.jsonl", seq_length=128, tokenizer="bpe", tasks=[{"preset": "causal"}]),
        folder,
        folder / "t",
    )
    return folder


def places(media):
    columns = (
        media.row.tolist(),
        media.slot.tolist(),
        media.tokens.tolist(),
        media.kinds,
        media.refs,
    )
    return list(zip(*columns, strict=True))


def test_a_batch_has_the_places_of_its_rows_in_their_order(folder):
    for io in ("mmap", "pread"):
        dataset = open_dataset(folder / "d", io=io)
        rows = [7, *range(12), 7, len(dataset) - 1]
        batch = dataset.batch(rows, columns=["tokens", "media"])
        own = [
            (i, *place[1:]) for i, r in enumerate(rows) for place in places(dataset.row(r).media)
        ]
        assert places(batch["media"]) == own and len(own) > 9
        slots = slot_ids(batch)
        flat = batch["tokens"].reshape(-1)
        at = batch["media"].flat_slots(dataset.seq_length)
        assert np.isin(flat[at], slots).all() and np.isin(flat, slots).sum() == len(at)
        assert [places(one) for one in batch["media"]] == [
            places(dataset.row(r).media) for r in rows
        ]
        assert places(batch["media"][-1]) == places(dataset.row(rows[-1]).media)
        assert places(batch["media"][-15]) == places(dataset.row(7).media)
        for row in (15, -16):
            with pytest.raises(IndexError, match=f"row {row} of the media of 15 rows"):
                batch["media"][row]
        assert places(dataset.with_columns(["media"])[7]["media"]) == places(dataset.row(7).media)
        assert "media" not in dataset.batch([0]) and batch["tokens"].shape == (15, 128)


def slot_ids(batch):
    media, tokens = batch["media"], batch["tokens"]
    return [
        int(tokens[row, slot])
        for name in ("film", "image")
        for row, slot, _, kind, _ in [next(p for p in places(media) if p[3] == name)]
    ]


def test_later_epochs_have_the_same_places(folder):
    dataset = open_dataset(folder / "d")
    anew = next(
        dataset.batches(
            len(dataset),
            shuffle=False,
            redraw=True,
            columns=["tokens", "media"],
            samples=len(dataset),
        )
    )
    later = dataset.batch(
        range(len(dataset)), columns=["tokens", "media"], epochs=[3] * len(dataset)
    )
    assert places(anew["media"]) == places(later["media"])
    at = later["media"].flat_slots(dataset.seq_length)
    assert (later["tokens"].reshape(-1)[at] == anew["tokens"].reshape(-1)[at]).all()
    assert (later["tokens"] != anew["tokens"]).any() and places(
        dataset.row(5, epoch=3).media
    ) == places(dataset.row(5).media)


def test_a_mixture_names_the_kinds_of_all_its_datasets(folder):
    directories = [folder / name for name in ("s", "t", "d")]
    mixture = open_dataset(directories, shares=[1, 1, 1])
    rows = [len(mixture) - 3, 0, len(open_dataset(folder / "s")), 1, len(mixture) - 1]
    media = mixture.batch(rows, columns=["media", "tokens"])["media"]
    assert media.names == ("film", "image", "sound") and len(media) == 5
    own = [(i, *place[1:]) for i, r in enumerate(rows) for place in places(mixture.row(r).media)]
    assert places(media) == own and {place[3] for place in own} >= {"sound"}


def test_a_dataset_without_media_has_none(folder):
    dataset = open_dataset(folder / "t")
    media = dataset.batch([0, 1], columns=["media"])["media"]
    assert (
        media.offsets.tolist() == [0, 0, 0] and media.refs == [] and dataset.row(0).media.refs == []
    )


def test_columns_that_are_none_are_named_with_media(folder):
    with pytest.raises(ArgumentError, match="the columns are tokens, .*, media, and"):
        open_dataset(folder / "d").batch([0], columns=["images"])


@pytest.mark.parametrize("name, at, value", [
    ("media_offsets", 1, 10**9), ("media_slot", 0, 500), ("media_slot", 0, -1), ("media_tokens", 0, 0),
    ("media_kind", 0, 9), ("media_ref_offsets", 1, 10**9),
])  # fmt: skip
def test_damaged_places_are_an_error_that_names_the_row(folder, tmp_path, name, at, value):
    shutil.copytree(folder / "s", tmp_path / "s")
    with resigned(tmp_path / "s") as arrays:
        arrays[name][at] = value
    with pytest.raises(DatasetError, match=r"row 0: its media spans"):
        _ = open_dataset(tmp_path / "s").row(0).media
