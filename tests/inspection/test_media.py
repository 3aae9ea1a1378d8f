"""What commands show of places of media, as a user types them."""

import re
import shutil

import numpy as np
import pytest

from packprep import open_dataset
from tests import made, media_made
from tests.command_line import inside
from tests.verification.damage import resigned


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    media_made.corpus(folder)
    made.build(media_made.table(), folder, folder / "out")
    return folder


def test_a_row_shows_each_place_once_with_its_ref(folder):
    dataset = open_dataset(folder / "out")
    row = next(r for r in range(len(dataset)) if "a\nb\0c" in dataset.row(r).media.refs)
    shown = inside("inspect", folder / "out", "--row", row).out
    flat = re.sub(r"\s*\n[ .^~+]*", "", shown)
    assert "\0" not in shown and re.search(r"(image|film) of [0-9]+ slots?: a↵b", flat)
    described = inside("inspect", folder / "out", "--row", row, "--json").json
    media = [place for segment in described["segments"] for place in segment["media"]]
    assert [place["ref"] for place in media] == dataset.row(row).media.refs
    for segment in described["segments"]:
        pieces = [piece for part in segment["parts"] for piece in part["pieces"]]
        if segment["predicts"] == "next":  # the pieces hold all ids
            assert sum(len(piece["ids"]) for piece in pieces) == segment["slots"]


def test_the_summary_and_the_report_tell_of_media(folder):
    said = inside("inspect", folder / "out").out
    many = sum(
        int(open_dataset(folder / "out").row(r).media.tokens.sum())
        for r in range(len(open_dataset(folder / "out")))
    )
    assert f"including {many:,} of media" in said
    inside("inspect", folder / "out", "--html", folder / "report.html")
    assert "cat.jpg" in (folder / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    "name", ["media_slot", "media_kind", "media_ref", "media_ref_offsets", "media_offsets"]
)
def test_a_difference_of_places_names_its_row_and_segment(folder, tmp_path, name):
    shutil.copytree(folder / "out", tmp_path / "out")
    with resigned(tmp_path / "out") as arrays:
        place = int(np.flatnonzero(np.diff(arrays["media_ref_offsets"]))[9])
        segment = int(np.searchsorted(arrays["media_offsets"], place, "right")) - 1
        row = int(np.searchsorted(arrays["row_offsets"], segment, "right")) - 1
        at = {
            "media_ref": arrays["media_ref_offsets"][place],
            "media_ref_offsets": place + 1,
            "media_offsets": segment + 1,
        }
        arrays[name][at.get(name, place)] += 1
    found = inside("inspect", folder / "out", "--diff", tmp_path / "out", "--json").json["rows"][0]
    assert (found["array"], found["row"]) == (name, row)
    assert found["segment"] == segment - int(arrays["row_offsets"][row]) + 1


def test_an_export_says_that_it_has_no_refs(folder, tmp_path):
    said = inside(
        "export", folder / "out", "--to", "parquet", "--columns", "full", "--out", tmp_path / "p"
    )
    assert "but not their refs" in said.err


def test_torch_s_loader_gives_media_by_rows_and_refuses_them_end_to_end(folder):
    pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
    from packprep.adapters.torch import loader
    from packprep.errors import ArgumentError

    columns = ["tokens", "labels", "loss_mask", "media"]
    batch = next(loader(folder / "out", 4, columns=columns, seed=2))
    at = batch["media"].flat_slots(128)
    tokens = batch["tokens"].reshape(-1)
    assert (
        len(at)
        and set(tokens[at].tolist()) <= set(np.unique(tokens[at].numpy()).tolist())
        and len(set(tokens[at].tolist())) <= 2
    )
    with pytest.raises(ArgumentError, match="layout 'thd' joins rows"):
        loader(folder / "out", 4, layout="thd", columns=columns)
