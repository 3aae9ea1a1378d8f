"""Datasets of conversations in which each trained turn stands behind its own history."""

import json

import pytest

from packprep.errors import RecipeError
from packprep.removing import remove_documents
from packprep.verification import verify_dataset
from tests import made
from tests.conversations.chats_made import THINKING
from tests.twin.check import REPLAY_ALL, verify_with_twin

SOURCES = [{"name": "chats", "paths": ["chats.jsonl"]}]


def conversation(number):
    """Return one to three turns of a user; some answers call a tool first."""
    texts = iter(made.texts(12, seed=number, mean_bytes=60))
    messages = [{"role": "system", "content": "Be brief."}] if number % 2 else []
    for turn in range(1 + number % 3):
        messages.append({"role": "user", "content": next(texts)[:200]})
        if (number + turn) % 4 == 0:
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": turn}}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            messages.append({**message, "reasoning_content": next(texts)[:30]})
            messages.append({"role": "tool", "content": next(texts)[:40]})
        answer = {"role": "assistant", "content": next(texts)[:300]}
        messages.append({**answer, "reasoning_content": next(texts)[:60]})
    return messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("each_turn")
    lines = [json.dumps({"messages": conversation(number)}) for number in range(24)]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "chat.jinja").write_text(THINKING)
    return folder


def recipe(seq_length, objective="causal", **documents):
    settings = {"chat_template": "chat.jinja", "trained_turns": "each", "max_bad_fraction": 1}
    return made.table(
        SOURCES,
        seq_length=seq_length,
        tasks=[{"objective": objective}],
        documents={**settings, **documents},
        output={"shard_text_bytes": 20_000},
    )


@pytest.mark.parametrize(
    "seq_length, objective, documents",
    [
        (2048, "causal", {}),
        (256, "causal", {"append_eos": False}),
        (256, "prefix_lm", {"append_eos": "segment", "long_answers": "untrained"}),
        (256, "masked_diffusion", {"long": "truncate"}),
        (512, "causal", {"long": "drop"}),
    ],
)
def test_a_dataset_is_what_its_sources_say(folder, tmp_path, seq_length, objective, documents):
    table = recipe(seq_length, objective, **documents)
    outcome = made.build(table, folder, tmp_path / "out")
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] > 0
    tokens = outcome.manifest["ledger"]["sources"]["chats"]["tokens"]
    assert 0 < tokens["history"] < tokens["read"]
    made.build(table, folder, tmp_path / "store", is_store=True)
    source = {"name": "chats", "paths": [str(tmp_path / "store")], "format": "store"}
    of_store = {**table, "sources": [source]}
    made.build(of_store, folder, tmp_path / "again")
    again, direct = (made.contents(tmp_path / name, "shards") for name in ("again", "out"))
    assert again == direct


def test_each_turn_is_trained_once_whatever_is_cut(folder, tmp_path):
    whole = made.build(recipe(4096, append_eos=False), folder, tmp_path / "whole").manifest
    once = recipe(4096, append_eos=False, trained_turns="all")
    all_turns = made.build(once, folder, tmp_path / "all").manifest
    tokens = whole["ledger"]["sources"]["chats"]["tokens"]
    plain = all_turns["ledger"]["sources"]["chats"]["tokens"]
    # Under "all", earlier answers have lost their thoughts, which texts of their own have.
    assert tokens["used"] - tokens["history"] > plain["used"] and "history" not in plain


@pytest.mark.long
def test_a_dataset_without_some_documents_holds_every_promise(folder, tmp_path):
    made.build(recipe(256, append_eos=True), folder, tmp_path / "out")
    first = len((folder / "chats.jsonl").read_bytes().split(b"\n")[0]) + 1
    gone = {"source": "chats", "file": "chats.jsonl", "doc": first}
    (tmp_path / "gone.jsonl").write_text(json.dumps(gone) + "\n")
    progress = made.Silent()
    result = remove_documents(
        tmp_path / "out", tmp_path / "gone.jsonl", tmp_path / "rest", progress
    )
    assert result["removed"] == 1
    report = verify_dataset(tmp_path / "rest", REPLAY_ALL, {}, (0, 1), 0, progress)
    assert report["listed"] == []


@pytest.mark.parametrize(
    "change, key",
    [
        ({"documents": {"trained_turns": "each", "prepend_bos": True}}, "documents.prepend_bos"),
        ({"documents": {"trained_turns": "each"}, "seq_lengths": [256, 512]}, "seq_lengths"),
    ],
)
def test_what_does_not_go_with_several_texts_is_refused(folder, tmp_path, change, key):
    table = {**recipe(512), **change}
    if "seq_lengths" in change:
        del table["seq_length"]
    with pytest.raises(RecipeError, match=f"{key}.* is not supported with .*trained_turns"):
        made.build(table, folder, tmp_path / "out")
