"""What an audit says, and the command."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from packprep.audit.kinds import KINDS
from tests.audit import faults_made as made
from tests.command_line import inside, refused

IDS = [f"--{name}-id={id}" for name, id in (("eos", 1), ("bos", 2), ("pad", 0), ("unk", 3))]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows in which three documents have two bos."""
    packed = made.packed()
    for row in packed[4:7]:
        row[1].ids[1] = made.BOS
    path = tmp_path_factory.mktemp("rows") / "rows.npy"
    np.save(path, made.columns(packed).ids.astype(np.uint16))
    return path


def test_a_limit_that_is_exceeded_or_not_checked_gives_exit_status_1(rows):
    assert inside("audit", rows, *IDS).status == 0
    assert inside("audit", rows, *IDS, "--fail-on", "two_bos=0.1").status == 0
    said = inside("audit", rows, *IDS, "--fail-on", "two_bos=0.01")
    assert said.status == 1 and "over the limits of --fail-on: two_bos" in said.out
    said = inside("audit", rows, *IDS, "--fail-on", "wrong_labels=0")
    assert said.status == 1 and "not checked in spite of --fail-on: wrong_labels" in said.out
    for limit, words in (
        ("two_bos", "expected KIND=SHARE"),
        ("two_bos=2", "expected KIND=SHARE"),
        ("two_boss=0", "no such kind"),
    ):
        assert words in refused("audit", rows, "--fail-on", limit)
    twice = ("--fail-on", "two_bos=0.1", "--fail-on", "two_bos=0.2")
    assert "--fail-on two_bos: given twice" in refused("audit", rows, *twice)
    assert "needs --tokenizer" in refused("audit", rows, "--source", rows)
    given = ("audit", rows, "--tokenizer", "bytes")
    assert "hint: give --source an existing file" in refused(*given, "--source", "none/*.jsonl")
    assert "--chat-template none.jinja: no such file" in refused(
        *given, "--chat-template", "none.jinja"
    )


def test_every_kind_is_reported_with_its_places_or_the_reason_why_it_is_not_checked(rows, tmp_path):
    html = tmp_path / "audit.html"
    said = inside("audit", rows, *IDS, "--json", "--html", html)
    described = json.loads(said.out)
    checks = {check["kind"]: check for check in described["checks"]}
    assert list(checks) == list(KINDS)
    assert all(("why" in one) == (one["state"] == "not_checked") for one in checks.values())
    two = checks["two_bos"]
    assert (two["state"], two["count"], two["of"]) == ("finding", 3, described["documents"])
    assert [place["row"] for place in two["places"]] == [4, 5, 6]
    assert checks["padding"]["state"] == "below_threshold" and checks["padding"]["count"] > 0
    text = inside("audit", rows, *IDS).out
    assert all(kind in text for kind in KINDS)
    written = html.read_text()
    assert (
        all(kind in written for kind in KINDS)
        and "http:" not in written
        and "https:" not in written
    )
    assert "default-src 'none'" in written and 'class="verdict bad"' in written
    inside("audit", rows, "--fail-on", "duplicate_rows=0", "--html", html)
    assert 'class="verdict good"' in html.read_text()
    for limit in ("padding=0.001", "wrong_labels=0"):
        inside("audit", rows, "--pad-id", 0, "--fail-on", limit, "--html", html)
        assert 'class="verdict bad"' in html.read_text()
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "train.bin")
    inside("audit", tmp_path / "train.bin", "--html", html)
    assert 'class="verdict "' in html.read_text()  # Nothing could be checked.


def test_the_ids_of_an_option_win_over_those_of_a_tokenizer_and_the_report_says_so(rows):
    said = inside("audit", rows, "--tokenizer", "bytes", "--eos-id", 1, "--json")
    described = json.loads(said.out)
    assert described["special_ids"]["eos"] == {"id": 1, "from": "--eos-id"}
    assert described["special_ids"]["pad"]["from"] == "the tokenizer"
    assert any("eos is 1 in --eos-id" in note for note in described["notes"])


def test_a_tokenizer_without_special_tokens_gives_only_its_vocabulary(rows, tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said = inside("audit", rows, "--tokenizer", tmp_path / "tokenizer.json", "--json")
    described = json.loads(said.out)
    assert described["special_ids"] == {"vocab_size": {"id": 256, "from": "the tokenizer"}}
    assert described["documents"] is None


def test_a_file_of_wider_ids_than_expected_names_the_option(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(400, dtype=np.uint32).tofile(path)
    assert re.search(
        "every second id is less than 16.*hint: give --token-dtype", refused("audit", path), re.S
    )
    assert inside("audit", path, "--token-dtype", "uint32").status == 0
    # uint16 read as uint32: the ids are far outside of the vocabulary, and shown as they are.
    np.full(400, 65000, np.uint16).tofile(path)
    said = inside("audit", path, "--token-dtype", "uint32", "--vocab-size", 65001).out
    assert "id 4259905000" in said and "--token-dtype" in said
    assert "not a dtype of ids" in refused("audit", path, "--token-dtype", "float32")


def test_notes_lead_to_another_eos_shifted_labels_and_files_that_are_not_read(rows, tmp_path):
    said = inside("audit", rows, "--eos-id", 77777)
    assert "note: no document has eos 77777" in said.out
    ids = made.clean().ids
    columns = {"input_ids": ids.tolist(), "labels": np.roll(ids, -1).tolist()}
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "train.parquet")
    np.save(folder / "val.npy", ids)
    said = inside("audit", folder, "--eos-id", 1)
    assert "wrong_labels" in said.out and "they are already shifted" in said.out
    assert "Files that were not read: val.npy" in said.out
    assert f"give {folder}" in refused("audit", tmp_path)
