"""The judge of losses: under small templates it finds packprep's loss to be TRL's, and sees another
mask."""

import importlib

import pytest

from tests.conversations import chats_made

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def losses():
    """Return the benchmark. It imports a trainer, which takes seconds of every collection."""
    pytest.importorskip("trl", reason="trl is not installed: pip install '.[trainers]'")
    return importlib.import_module("losses")


@pytest.mark.long
@pytest.mark.alike(2)
@pytest.mark.parametrize(
    "template, kind",
    [
        (chats_made.GENERATION, "messages"),
        (chats_made.GENERATION, "texts"),
        (chats_made.THINKING, "completion"),
    ],
)
def test_the_loss_over_rows_is_that_of_trl(losses, template, kind):
    records, own, trls = losses.both_losses(template, kind, 16, 0)
    assert records >= 4 and own.trained == trls.trained > 100
    assert own.mean == pytest.approx(trls.mean, rel=losses.TOLERANCE)


@pytest.mark.long
def test_another_mask_is_seen(losses, monkeypatch, tmp_path, capsys):
    in_order = losses.loader

    def shifted(*arguments, **options):
        for batch in in_order(*arguments, **options):
            yield {**batch, "loss_mask": batch["loss_mask"].roll(1, -1)}

    (tmp_path / "chat.jinja").write_text(chats_made.GENERATION)
    monkeypatch.setattr(losses, "loader", shifted)
    assert losses.main([str(tmp_path), "--count", "6"]) == 1
    assert capsys.readouterr().out.count("chat ") == 2


@pytest.mark.campaign
def test_the_loss_over_rows_is_that_of_trl_under_all_of_its_templates(losses):
    assert losses.main([]) == 0
