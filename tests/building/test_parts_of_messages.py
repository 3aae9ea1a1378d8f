"""Datasets in which parts of messages are not trained."""

import json

import pytest

import packprep
from packprep.removing import remove_documents
from packprep.verification import verify_dataset
from tests import made
from tests.command_line import inside
from tests.conversations.chats_made import THINKING
from tests.twin.check import REPLAY_ALL, verify_with_twin

SOURCES = [{"name": "chats", "paths": ["chats.jsonl"]}]


def messages(number):
    """Return one to three turns: with a reasoning, without one, and in parts."""
    texts = iter(made.texts(12, seed=number, mean_bytes=60))
    found = []
    for turn in range(1 + number % 3):
        found.append({"role": "user", "content": next(texts)[:200]})
        answer = {"role": "assistant", "content": next(texts)[:300].strip() or "so"}
        if (number + turn) % 3 == 0:
            answer["reasoning_content"] = "Because: " + next(texts)[:60]
        elif (number + turn) % 3 == 1:
            parts = [{"text": "First. ", "train": False}, {"text": "Then.", "weight": 0.5}]
            answer["content"] = [{"type": "text", **part} for part in parts]
        found.append(answer)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    lines = [json.dumps({"messages": messages(number)}) for number in range(24)]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "chat.jinja").write_text(THINKING)
    return folder


def recipe(seq_length, **documents):
    settings = {"chat_template": "chat.jinja", "append_eos": False, "max_bad_fraction": 1}
    keys = {"train_reasoning": False, "train_empty_reasoning": False}
    return made.table(
        SOURCES,
        seq_length=seq_length,
        tasks=[{"objective": "causal"}],
        documents={**settings, **keys, **documents},
        output={"shard_text_bytes": 20_000},
    )


def trained_text(folder):
    """Return the trained characters of a dataset of bytes."""
    dataset = packprep.open_dataset(folder)
    batch = dataset.batch(range(len(dataset)))
    ids = batch["labels"][batch["loss_mask"] == 1]
    return bytes(ids[ids < 256].astype("u1").tolist()).decode("utf-8", "replace")


@pytest.mark.parametrize(
    "seq_length, documents", [(2048, {}), (256, {"trained_turns": "each", "append_eos": True})]
)
def test_a_dataset_without_reasoning_is_what_its_sources_say(
    folder, tmp_path, seq_length, documents
):
    table = recipe(seq_length, **documents)
    made.build(table, folder, tmp_path / "out")
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] > 0
    text = trained_text(tmp_path / "out")
    assert "Then." in text and "<|im_end|>" in text
    assert not any(gone in text for gone in ("think>", "Because", "First."))
    made.build(table, folder, tmp_path / "store", is_store=True)
    store = {"name": "chats", "paths": [str(tmp_path / "store")], "format": "store"}
    made.build({**table, "sources": [store]}, folder, tmp_path / "again")
    again, direct = (made.contents(tmp_path / name, "shards") for name in ("again", "out"))
    assert again == direct


@pytest.mark.long
def test_documents_in_parts_are_removed_restored_and_shown(folder, tmp_path):
    made.build(recipe(512), folder, tmp_path / "out")
    gone = {"source": "chats", "file": "chats.jsonl", "doc": 0}
    (tmp_path / "gone.jsonl").write_text(json.dumps(gone) + "\n")
    progress = made.Silent()
    remove_documents(tmp_path / "out", tmp_path / "gone.jsonl", tmp_path / "rest", progress)
    report = verify_dataset(tmp_path / "rest", REPLAY_ALL, {}, (0, 1), 0, progress)
    assert report["listed"] == []
    row = inside("inspect", tmp_path / "rest", "--row", "0", "--from-plan").out
    assert "rebuilt from source: identical" in row and "First." in row
    options = ("--source", "chats", "--doc", "chats.jsonl:0", "--from-plan")
    assert "trained" in inside("inspect", tmp_path / "out", *options).out
    assert "removed" in inside("inspect", tmp_path / "rest", *options).out
