"""The rates of conversations: both commands run on the same conversations."""

import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[trainers]'"
)

import conversation_rate

from tests.conversations import chats_made

pytestmark = pytest.mark.long


@pytest.mark.alike(1)
@pytest.mark.parametrize("template", [chats_made.CHATML, chats_made.GENERATION])
def test_both_rates_are_printed(tmp_path, capsys, template):
    (tmp_path / "made.jinja").write_text(template, "utf-8")
    arguments = [str(tmp_path / "made.jinja"), "--count", "60", "--rounds", "1", "--workers", "1"]
    assert conversation_rate.main(arguments) == 0
    head, columns, line = capsys.readouterr().out.splitlines()
    assert head.startswith("60 conversations") and columns.startswith("template")
    name, *figures = line.split()
    assert name == "made" and len(figures) == 8 and all(float(one) > 0 for one in figures)
