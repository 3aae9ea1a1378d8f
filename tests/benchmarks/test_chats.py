"""The judge of chat templates: what it finds equal, and that it sees what is not."""

import os
from pathlib import Path

import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[trainers]'"
)

import chats
import numpy as np
from conversations import MARK, conversations, strings

from tests.conversations import chats_made

pytestmark = pytest.mark.long

TEMPLATES = "PACKPREP_CHAT_TEMPLATES"  # a folder of *.jinja


def test_conversations_are_functions_of_their_numbers_and_name_the_owner_of_each_string():
    records = list(conversations(40))
    assert records[:10] == list(conversations(10)) != list(conversations(10, seed=1))
    whose = {"assistant": "a", "user": "u", "system": "s", "tool": "t"}
    roles = set()
    for record in records:
        marks = [mark[0] for text in strings(record) for mark in MARK.finditer(text)]
        assert len(marks) == len(set(marks))
        for message in record["messages"]:
            roles.add(message["role"])
            assert {mark[1] for text in strings(message) for mark in MARK.finditer(text)} <= {
                whose[message["role"]]
            }
    assert roles == set(whose) and any("tools" in record for record in records)


@pytest.mark.parametrize(
    "template, column", [(chats_made.CHATML, "turns"), (chats_made.GENERATION, "mask")]
)
def test_small_templates_give_the_ids_and_masks_of_transformers(template, column):
    found = chats.judge_template(template, list(conversations(40)))
    taken = found.counts["conversations"] - found.counts["refused"]
    assert not found.differences and taken >= 8
    assert found.counts["ids"] == taken and found.counts[column] >= taken / 2


@pytest.mark.parametrize(
    "template, what", [(chats_made.CHATML, "turns"), (chats_made.GENERATION, "mask")]
)
def test_another_id_or_a_shifted_mask_is_seen(template, what, monkeypatch):
    records = list(conversations(8))
    in_order = chats.built

    def shifted(*arguments):
        documents, rejects = in_order(*arguments)
        for number, document in documents.items():
            if number % 2:
                document.ids[3] += 1
            document.trained = np.roll(document.trained, -1)
        return documents, rejects

    monkeypatch.setattr(chats, "built", shifted)
    found = chats.judge_template(template, records)
    assert found.counts["ids differ"] and found.counts[f"{what} differ"]


CONTENT = "message['content']"


@pytest.mark.parametrize(
    "written", [f"{CONTENT} | trim", f"({CONTENT} if {CONTENT} is string else '')"]
)
def test_lists_of_parts_that_a_template_makes_nothing_of_count_as_refused(written):
    records = [
        r
        for r in conversations(40)
        if all(isinstance(m.get("content"), list) for m in r["messages"])
    ]
    found = chats.judge_template(chats_made.CHATML.replace(CONTENT, written), records)
    assert found.counts["refused"] == len(records) > 0 and not found.differences


@pytest.mark.campaign
@pytest.mark.skipif(
    TEMPLATES not in os.environ, reason=f"{TEMPLATES} names a folder of real templates"
)
def test_real_templates_give_the_ids_and_masks_of_transformers():
    assert chats.main([str(Path(os.environ[TEMPLATES])), "--show", "3"]) == 0
