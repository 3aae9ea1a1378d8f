"""Where messages begin is worked out only for conversations that are cut, and no byte depends on
that."""

import json
from unittest import mock

import pytest

from packprep.conversations import supervision
from tests import made
from tests.conversations import chats_made as chats


@pytest.mark.parametrize("template", [chats.GENERATION, chats.CHATML])
def test_a_build_is_the_same_with_and_without_the_boundaries_of_uncut_conversations(
    tmp_path, template
):
    lines = []
    for i in range(60):
        turns = [text for k in range(1 + i % 5) for text in (f"q{k} " * 9, f"a{i} " * (3 * k + 4))]
        lines.append(json.dumps({"messages": chats.turns(*turns, system="be brief")}))
    made.write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    (tmp_path / "t.jinja").write_text(template)
    recipe = made.table(
        "a.jsonl",
        seq_length=256,
        tasks=[{"preset": "causal"}, {"objective": "prefix_lm"}],
        documents={"chat_template": "t.jinja"},
    )
    calls = []
    rendered_turns = supervision.rendered_turns

    def counted(dialogue, template, settings, with_begins=True):
        calls.append(with_begins)
        return rendered_turns(dialogue, template, settings, with_begins)

    with mock.patch.object(supervision, "rendered_turns", counted):
        made.build(recipe, tmp_path, tmp_path / "lazy")
    if template == chats.GENERATION:  # some are cut, most are not
        assert 0 < sum(calls) < 60 < len(calls)
    with mock.patch("packprep.building.work.uncut_tokens", lambda *arguments: 0):
        made.build(recipe, tmp_path, tmp_path / "whole")
    lazy, whole = (made.contents(tmp_path / name) for name in ("lazy", "whole"))
    assert lazy == whole and any(name.startswith("shards") for name in lazy)
