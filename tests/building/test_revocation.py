"""An engine that is caught in a difference: the build stops with a note, the next one goes on with the reference."""

import json

import pytest

from packprep.building.revocation import NOTE
from packprep.building.run import read_plan
from packprep.building.status import print_status, status_of
from packprep.corpus.engines.registry import ENGINES, engine_facts
from packprep.dataset.json_files import MANIFEST_NAME, receipt_name
from packprep.errors import BuildError, EngineRevoked, RecipeError
from tests import made
from tests.command_line import inside
from tests.corpus import tokenizers_made
from tests.corpus.engines_made import WRONG, wrong_kind
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
    monkeypatch.setattr("packprep.corpus.proof.RATE", 1)


def table(**top_level):
    return made.table("a.jsonl", tokenizer="tokenizer.json", tasks=[{"preset": "causal"}], **top_level)


def use(monkeypatch, trap, breaks=False):
    """A wrong engine stands before the others."""
    kinds = {WRONG: wrong_kind(trap, breaks), **ENGINES}
    monkeypatch.setattr("packprep.corpus.engines.registry.ENGINES", kinds)


def test_fast_and_reference_give_the_same_shards(folder):
    made.build(table(engine="fastokens"), folder, folder / "fast")
    made.build(table(engine="reference"), folder, folder / "slow")
    assert read_plan(folder / "fast")["engine"] == engine_facts("fastokens")
    assert read_plan(folder / "slow")["engine"] == engine_facts("reference")
    shards = made.contents(folder / "fast", "shards")
    assert shards == made.contents(folder / "slow", "shards") and len(shards) > 3


def test_auto_takes_another_engine_than_one_that_fails_its_proof(folder, monkeypatch, capsys):
    use(monkeypatch, "\r\n")
    made.build(table(), folder, folder / "out")
    assert read_plan(folder / "out")["engine"]["name"] == "fastokens"
    with pytest.raises(
        RecipeError, match="engine = 'wrong' cannot be used with this tokenizer: it differs from the ref"
    ):
        made.build(table(engine=WRONG), folder, folder / "other")


def test_auto_proves_on_the_build_s_own_first_documents(folder, monkeypatch):
    use(monkeypatch, "offline")
    made.build(table(), folder, folder / "out")
    assert read_plan(folder / "out")["engine"]["name"] == "fastokens"


def look_at_two_places(monkeypatch):
    """So that the proof does not meet the trap."""
    for name, value in (("WHOLE_BYTES", 0), ("WINDOWS", 2), ("PLACES", 1)):
        monkeypatch.setattr(f"packprep.corpus.sampling.{name}", value)
    monkeypatch.setattr("packprep.corpus.calibration.FIRST_CHARACTERS", 1 << 10)


@pytest.mark.usefixtures("every_document_is_compared")
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("asked", ["auto", WRONG])
def test_a_difference_stops_the_build_and_the_next_one_goes_on_with_the_reference(folder, monkeypatch, asked, breaks):
    use(monkeypatch, TRAP, breaks)
    look_at_two_places(monkeypatch)
    out = folder / "out"
    with pytest.raises(EngineRevoked, match="differs from the reference in the document at .* of 'a.jsonl'") as caught:
        made.build(table(engine=asked), folder, out)
    assert caught.value.exit_status == 2 and TRAP in str(caught.value)
    note = json.loads((out / NOTE).read_text("utf-8"))
    assert note["engine"] == WRONG and note["file"] == "a.jsonl" and note["text"] == TRAP
    assert note["ids"] != note["reference_ids"] and str(note["reference_ids"]) in str(caught.value)
    before = read_plan(out)
    assert before["engine"]["name"] == WRONG and (out / receipt_name(0)).exists()
    status = status_of(out)
    assert status["revoked"] and status["done"] > 0

    outcome = made.build(table(engine=asked), folder, out)
    after = read_plan(out)
    assert {**after, "digest": 0} == {**before, "engine": engine_facts("reference"), "digest": 0}
    assert outcome.made == before["shards"], "the old receipts are void"
    assert not (out / NOTE).exists() and (out / MANIFEST_NAME).exists() and not status_of(out)["revoked"]
    made.build(table(engine="reference"), folder, folder / "slow")
    assert made.contents(out, "shards") == made.contents(folder / "slow", "shards")
    assert report_of(out)["faults"] == 0


@pytest.mark.usefixtures("every_document_is_compared")
def test_from_the_command_line_the_exit_status_is_2_and_status_says_why(folder, monkeypatch, capsys):
    use(monkeypatch, TRAP)
    look_at_two_places(monkeypatch)
    out = folder / "out"
    command = ["build", folder / "a.jsonl", "--out", out, "--tokenizer", folder / "tokenizer.json", "--workers", 1]
    command += ["--tasks", "causal", "--set", "output.shard_text_bytes=50000"]
    said = inside(*command)
    assert said.status == 2 and "differs from the reference in the document" in said.err
    print_status(status_of(out))
    assert "stopped: its engine gave other ids than the reference; see" in capsys.readouterr().out
    said = inside(*command)
    assert said.status == 0 and "caught in a difference. The plan is replaced" in said.err


@pytest.mark.usefixtures("every_document_is_compared")
def test_another_process_keeps_nothing_of_a_revoked_engine(folder, monkeypatch):
    use(monkeypatch, TRAP)
    out = folder / "out"
    monkeypatch.setattr("packprep.corpus.proof.RATE", 2000)
    plan = made.build(table(engine="fastokens"), folder, out, array=(0, 2)).job.plan
    (out / NOTE).write_text("{}\n")
    from packprep.building.output import output_of
    from packprep.building.run import ShardToMake, shard_maker

    make = shard_maker(output_of(out), [str(folder)])
    with pytest.raises(BuildError, match="engine-revoked.json stands there: the engine fastokens was caught"):
        list(make([ShardToMake(plan["shards"] - 1)], lambda *counts: None))
    assert not (out / receipt_name(plan["shards"] - 1)).exists()


def test_a_note_that_an_ended_process_left_beside_a_dataset_is_removed_by_the_next_build(folder):
    out = folder / "out"
    made.build(table(engine="reference"), folder, out)
    (out / NOTE).write_text("{}\n")
    assert [fault["file"] for fault in report_of(out)["listed"]] == [NOTE]
    made.build(table(engine="reference"), folder, out)
    assert not (out / NOTE).exists() and report_of(out)["faults"] == 0
