import re

import pytest
from rich.cells import cell_len

from packprep.inspection.terminal import page

HEAD = ("task", "objective", "drawn", "segments", "tokens", "share", "slots", "trained")
LINES = [
    ("x-long", "span_corruption", "12.50%", "1,743", "3,396,874", "13.34%", "3,432,215", "15.33%"),
    ("日本", "prefix_lm", "50.00%", "6,868", "13,434,180", "52.76%", "13,441,618", "49.27%"),
]


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Draws on a terminal of some columns, or on none; gives the lines, and whether there was
    colour."""

    def draw(columns, what):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        if columns:
            monkeypatch.setenv("FORCE_COLOR", "1")
            monkeypatch.setenv("COLUMNS", str(columns))
        with page() as drawn:
            what(drawn)
        out = capsys.readouterr().out
        return re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines(), "\x1b" in out

    return draw


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 160, 400])
def test_a_table_fits_the_terminal_and_loses_nothing(terminal, columns):
    lines, coloured = terminal(columns, lambda page: page.table(HEAD, LINES, 2))
    assert coloured and max(map(cell_len, lines)) <= min(columns, 160)
    whole = " ".join(" ".join(lines).split())
    for cell in (cell for line in LINES for cell in line):
        assert cell in whole


def test_off_a_terminal_a_table_is_aligned_and_plain(terminal):
    lines, coloured = terminal(None, lambda page: page.table(HEAD, LINES, 2))
    assert not coloured and lines[0].startswith("task    objective")
    assert len({cell_len(line) for line in lines}) == 1


@pytest.mark.parametrize("columns", [None, 40, 60, 160])
def test_the_longest_bar_is_the_most_and_none_is_nothing(terminal, columns):
    histogram = [
        {"from": 1, "to": 1, "count": 1},
        {"from": 2, "to": 3, "count": 5000},
        {"from": 4, "to": 7, "count": 0},
    ]
    lines, _ = terminal(columns, lambda page: page.bars(histogram))
    bars = [line.count("█") for line in lines]
    assert bars[0] == 1 and bars[2] == 0 and bars[1] == max(bars)
    assert max(map(cell_len, lines)) <= (columns or 100)
    assert [line.split()[0] for line in lines] == ["1", "2", "4"]


@pytest.mark.parametrize("columns", [40, 60, 160])
def test_a_long_text_is_wrapped_under_itself_and_whole(terminal, columns):
    text = "words " * 40 + "日本 end"
    lines, _ = terminal(columns, lambda page: page.facts([("tokens", text), ("x", "short")]))
    assert max(map(cell_len, lines)) <= columns
    assert (
        " ".join(" ".join(lines[:-1]).split()) == f"tokens {text}" and lines[-1] == "x       short"
    )
    assert all(line.startswith(" " * 8) for line in lines[1:-1])


def test_off_a_terminal_a_line_stays_a_line(terminal):
    lines, _ = terminal(None, lambda page: page.wrap("words " * 60))
    assert len(lines) == 1
