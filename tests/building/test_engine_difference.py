"""An engine that differs from the reference: it fails its proof, or the build stops."""

import pytest

from packprep.building.plan import stored_plan
from packprep.errors import BuildError, RecipeError
from packprep.format.json_files import MANIFEST_NAME, receipt_name
from packprep.tokenizer.engines import ENGINES, engine_facts
from tests import made, media_made
from tests.tokenizer import tokenizers_made
from tests.tokenizer.engines_made import WRONG, prefer_fast_engines, wrong_kind
from tests.verification.damage import report_of

TRAP = "a trap that nothing else has"


@pytest.fixture
def folder(tmp_path):
    """Texts of which the last has TRAP, beyond what a proof reads, and a tokenizer."""
    tokenizers_made.write(tmp_path, tokenizers_made.gpt2_like())
    texts = [*made.texts(400, mean_bytes=1000), TRAP]
    made.write_lines(tmp_path / "a.jsonl", texts)
    return tmp_path


@pytest.fixture
def every_document_is_compared(monkeypatch):
    monkeypatch.setattr("packprep.tokenizer.proof.RATE", 1)


def table(**top_level):
    return made.table(
        "a.jsonl", tokenizer="tokenizer.json", tasks=[{"preset": "causal"}], **top_level
    )


def use(monkeypatch, trap, breaks=False):
    """A wrong engine stands before the others."""
    prefer_fast_engines(monkeypatch)
    kinds = {WRONG: wrong_kind(trap, breaks), **ENGINES}
    for module in ("packprep.tokenizer.engines", "packprep.building.planning"):
        monkeypatch.setattr(f"{module}.ENGINES", kinds)


@pytest.mark.long
def test_fast_and_reference_give_the_same_shards(folder):
    made.build(table(engine="fastokens"), folder, folder / "fast")
    made.build(table(engine="reference"), folder, folder / "slow")
    assert stored_plan(folder / "fast")["engine"] == engine_facts("fastokens")
    assert stored_plan(folder / "slow")["engine"] == engine_facts("reference")
    shards = made.contents(folder / "fast", "shards")
    assert shards == made.contents(folder / "slow", "shards") and len(shards) > 3


@pytest.mark.long
def test_auto_takes_another_engine_than_one_that_fails_its_proof(folder, monkeypatch, capsys):
    use(monkeypatch, "\r\n")
    made.build(table(), folder, folder / "out")
    assert stored_plan(folder / "out")["engine"]["name"] == "fastokens"
    with pytest.raises(
        RecipeError,
        match="engine = 'wrong' cannot be used with this tokenizer: it differs from the ref",
    ):
        made.build(table(engine=WRONG), folder, folder / "other")


@pytest.mark.long
def test_auto_proves_on_the_build_s_own_first_documents(folder, monkeypatch):
    use(monkeypatch, "offline")
    made.build(table(), folder, folder / "out")
    assert stored_plan(folder / "out")["engine"]["name"] == "fastokens"


def look_at_two_places(monkeypatch):
    """So that the proof does not meet the trap."""
    for name, value in (("WHOLE_BYTES", 0), ("WINDOWS", 2), ("PLACES", 1)):
        monkeypatch.setattr(f"packprep.documents.sample.{name}", value)
    monkeypatch.setattr("packprep.documents.calibration.FIRST_CHARACTERS", 1 << 10)


@pytest.mark.usefixtures("every_document_is_compared")
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("asked", ["auto", WRONG])
def test_a_difference_stops_the_build_again_and_again_and_what_is_advised_gives_the_reference_s_shards(
    folder, monkeypatch, asked, breaks
):
    use(monkeypatch, TRAP, breaks)
    look_at_two_places(monkeypatch)
    out = folder / "out"
    at = (folder / "a.jsonl").read_bytes().rindex(b"\n", 0, -1) + 1
    for _ in range(2):
        with pytest.raises(
            BuildError, match=f"differs from the reference in the document at {at} of 'a.jsonl'"
        ) as caught:
            made.build(table(engine=asked), folder, out)
        assert caught.value.exit_status == 2 and TRAP in str(caught.value)
    assert 'hint: set engine = "reference", and build into another folder' in str(caught.value)
    assert (out / receipt_name(0)).exists() and not (out / MANIFEST_NAME).exists()
    made.build(table(engine="reference"), folder, folder / "slow")
    assert report_of(folder / "slow")["faults"] == 0


@pytest.mark.long
@pytest.mark.usefixtures("every_document_is_compared")
@pytest.mark.parametrize("is_before", [True, False])
def test_a_difference_beside_media_stops_the_build(folder, monkeypatch, is_before):
    use(monkeypatch, TRAP)
    look_at_two_places(monkeypatch)
    records = [{"text": text} for text in made.texts(400, mean_bytes=1000)]
    text, at = (f"{TRAP}b", len(TRAP)) if is_before else (f"b{TRAP}", 1)
    media = [{"at": at, "tokens": 2, "ref": "r", "kind": "film"}]
    media_made.write(folder, "a.jsonl", [*records, {"text": text, "media": media}])
    at = (folder / "a.jsonl").read_bytes().rindex(b"\n", 0, -1) + 1
    with pytest.raises(
        BuildError, match=f"differs from the reference in the document at {at} of 'a.jsonl'"
    ):
        made.build(table(engine=WRONG, specials=media_made.SPECIALS), folder, folder / "out")
