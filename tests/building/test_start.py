"""How a build begins: what it loaded before, it may load before it knows what it needs."""

import pytest

from tests import made
from tests.command_line import packprep
from tests.corpus import tokenizers_made

OTHER = {"normalizer": {"type": "NFC"}}


@pytest.fixture
def folder(tmp_path):
    made.write_lines(
        tmp_path / "a.jsonl", [*made.texts(40), "e\u0301 ".join(["accents that a normalizer composes"] * 20)]
    )
    return tmp_path


def build(folder, out, *options, **top_level):
    """The dataset of the folder's text by the tokenizer at the one place, which is written first."""
    tokenizers_made.write(folder / "tok", tokenizers_made.byte_level("<|endoftext|>", **top_level))
    said = packprep("build", "a.jsonl", "--tokenizer", "tok", "--seq-length", 256, "--out", out, *options, at=folder)
    assert said.status == 0, said.err
    return made.contents(folder / out, "shards")


def test_a_tokenizer_that_is_not_the_one_of_the_build_before_is_not_taken_for_it(folder):
    reference = "--set", "engine=reference"
    for number, (top_level, expected) in enumerate([({}, {}), (OTHER, OTHER), ({}, {})]):
        made_fast = build(folder, f"fast{number}", "--set", "engine=fastokens", **top_level)
        assert made_fast == build(folder, f"reference{number}", *reference, **expected)
    assert build(folder, "again") == made_fast != build(folder, "other", **OTHER)


def test_a_build_that_goes_on_or_has_nothing_to_do_begins_as_it_should(folder):
    first = build(folder, "out")
    assert build(folder, "out") == first
    (folder / "out" / "dataset.json").unlink()
    for name in made.contents(folder / "out", "receipts"):
        (folder / "out" / "receipts" / name.removeprefix("receipts/")).unlink()
    assert build(folder, "out") == first
