"""docs/scale.md: its limits are the code's."""

from pathlib import Path

import numpy as np

from packprep.building.planning import MIB, _shard_text_bytes
from packprep.dataset.shard import layout
from packprep.format.json_files import receipt_name, shard_name
from packprep.recipe import read_recipe
from tests import made

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scale.md").read_text("utf-8")


def test_the_caps_on_shards_are_those_of_the_page():
    recipe = read_recipe({**made.table("x.jsonl"), "output": {}}, Path())
    sizes = {
        text: _shard_text_bytes(recipe, text, 0.25)
        for text in (10**9, 10**12, 10**13, 26_843_545_600_000)
    }
    assert list(sizes.values()) == [10**9 // 16, 64 * MIB, 200_000_000, 512 * MIB]
    assert all(-(-text // size) <= 50_000 for text, size in sizes.items())
    at_60_tb = _shard_text_bytes(recipe, 60 * 10**12, 0.25)
    assert at_60_tb == 512 * MIB and -(-60 * 10**12 // at_60_tb) == 111_759
    assert "112 000 at 60 TB" in PAGE and "26.8 TB" in PAGE


def test_no_folder_holds_more_than_a_thousand_shards_and_names_stay_apart_beyond_a_million():
    for name in (shard_name, receipt_name):
        folders = np.unique(
            [name(b).rpartition("/")[0] for b in range(0, 112_000, 7)], return_counts=True
        )[1]
        assert folders.max() <= 143
    assert shard_name(1_234_567) == "shards/1234/1234567.safetensors"
    dtypes = {name: dtype for name, (dtype, _) in layout(1, 1, 8, "u2").items()}
    assert (
        dtypes["segment_file"] == np.uint32
        and dtypes["segment_source"] == dtypes["segment_repeat"] == np.uint16
    )
