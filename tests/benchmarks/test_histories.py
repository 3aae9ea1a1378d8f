"""The judge of `trained_turns = "each"`: what it finds equal, and that it sees what is not."""

import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[trainers]'"
)

import histories
import numpy as np
from conversations import conversations

from packprep.conversations import supervision
from tests.conversations import chats_made

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "template, is_one_text",
    [(chats_made.THINKING, False), (chats_made.CHATML, True), (chats_made.GENERATION, True)],
)
def test_texts_and_chunks_are_those_of_transformers(template, is_one_text):
    found = histories.judge_template(template, list(conversations(24)), 128)
    counts = found.counts
    taken = counts["conversations"] - counts["refused"] - counts["rejects"]
    assert not found.differences and taken >= 5
    assert (counts["texts"] == taken) == is_one_text
    assert counts["masks"] >= counts["texts"] / 2 and counts["cut"] >= 4


def first_trained(chunk):
    chunk.trained[np.argmax(chunk.trained)] = False


def second_again(chunk):
    chunk.start += 1


def repeated_trained(chunk):
    chunk.trained[:1] = True


@pytest.mark.parametrize("damage", [first_trained, second_again, repeated_trained])
def test_other_chunks_are_seen(damage, monkeypatch):
    in_order = histories.chunks_built

    def damaged(folder, *arguments, **settings):
        chunks, rejects = in_order(folder, *arguments, **settings)
        if folder.name == "cut":
            for own in chunks.values():
                damage(own[-1])
        return chunks, rejects

    monkeypatch.setattr(histories, "chunks_built", damaged)
    found = histories.judge_template(chats_made.CHATML, list(conversations(24)), 128)
    assert found.counts["chunks differ"]


def test_a_turn_after_another_history_is_seen(monkeypatch):
    """As `trained_turns = "all"`: earlier answers without their reasoning, in one text."""
    monkeypatch.setattr(
        supervision, "dialogues_with_own_history", lambda _, dialogue, *rest: [dialogue]
    )
    found = histories.judge_template(chats_made.THINKING, list(conversations(24)), 128)
    assert found.counts["texts differ"]
