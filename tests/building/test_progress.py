import sys

from packprep.building.progress import Bar


def shown(monkeypatch, capsys, *reports):
    """What a bar in a terminal shows at its end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    bar = Bar()
    bar.begin(1000, 2, 2)
    for report in reports:
        bar.add(*report)
    bar.end()
    return capsys.readouterr().err


def test_a_bar_shows_what_was_counted_and_no_other_number(monkeypatch, capsys):
    said = shown(monkeypatch, capsys, (3, 400, 100, 1), (4, 600, 1100, 0))
    assert "1,200 tokens, 7 documents, 1 rejects" in said
    said = shown(monkeypatch, capsys, (0, 1000, 1200, 0))  # as verify reports
    assert "1,200 tokens" in said and "document" not in said and "reject" not in said
