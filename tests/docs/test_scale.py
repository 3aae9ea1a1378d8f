"""docs/scale.md: its limits are the code's."""

import re
from pathlib import Path

import numpy as np

from packprep.building.plan_form import MOST_USES
from packprep.building.planning import MIB, _shard_text_bytes
from packprep.building.segments import FORMAT_MAX_SEGMENTS
from packprep.building.work import BEYOND_PLAN, LEAST_BOUND
from packprep.conversations.supervision import MAX_SPANS
from packprep.dataset.shard import layout
from packprep.documents.reading import MOST_DOCUMENTS
from packprep.format.json_files import receipt_name, shard_name
from packprep.recipe import read_recipe
from packprep.sources.formats.batch import MAX_DOCUMENT_BYTES, MAX_DOCUMENT_TOKENS, MAX_LINE_BYTES
from packprep.sources.formats.table import MAX_BLOCK_BYTES
from tests import made

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PROMISES = ((DOCS / name).read_text("utf-8") for name in ("scale.md", "promises.md"))


def limits_in(page: str, quantity: str) -> list[int]:
    """Return the numbers in the second cell of the row of a table that starts with `quantity`."""
    (cell,) = re.findall(rf"^\| {re.escape(quantity)}[^|]*\| ([^|]*) \|", page, re.MULTILINE)
    return [int(number.replace(" ", "")) for number in re.findall(r"\b\d[\d ]*\b(?!-)", cell)]


def test_the_limits_of_inputs_are_those_of_the_pages():
    text, line, block = (n / MIB for n in (MAX_DOCUMENT_BYTES, MAX_LINE_BYTES, MAX_BLOCK_BYTES))
    assert limits_in(PAGE, "a document")[::2] == [text, MAX_DOCUMENT_TOKENS / MIB]
    assert limits_in(PAGE, "a line of JSON") == limits_in(PROMISES, "a line") == [line]
    assert limits_in(PAGE, "a page of") == limits_in(PROMISES, "a page") == [block]
    assert limits_in(PROMISES, "a text") == [text]
    assert limits_in(PAGE, "`loss_spans`") == [MAX_SPANS]
    assert limits_in(PAGE, "documents of a shard") == [MOST_DOCUMENTS]
    assert f"exceeds both {LEAST_BOUND >> 30} GiB and {BEYOND_PLAN} times" in PROMISES
    assert limits_in(PAGE, "segments of a row") == [FORMAT_MAX_SEGMENTS] == [MOST_USES - 1]


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
