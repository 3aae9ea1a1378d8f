import pytest
from rich.cells import cell_len

from packprep.inspection.text import (
    HEAD_LINES,
    MOST_LINES,
    MOST_TURN_LINES,
    TAIL_LINES,
    shortened,
    special,
    units_of,
    wrapped,
)
from packprep.messages import visible


def piece(text, loss=(0,), kind="text"):
    return {"text": text, "ids": list(range(len(loss))), "loss": list(loss), "kind": kind}


def drawn(pieces, width=100):
    """The lines and their marks, as printed."""
    lines = wrapped(units_of(pieces), width)
    return [
        ("".join(unit.shown for unit in line), "".join(unit.marks for unit in line))
        for line in lines
    ]


def test_marks_stand_under_the_first_cell_of_each_token():
    pieces = [
        piece("[NLG]", (0,), "special"),
        piece("The"),
        piece(" cat", (1,)),
        piece("\n", (1,)),
        piece("s"),
    ]
    assert drawn(pieces) == [
        (
            "‹NLG›The cat↵s",
            ".    .  ^~~~^.",
        )
    ]


def test_a_wide_character_takes_two_cells_of_marks():
    pieces = [
        piece("日", (0, 0, 1)),
        piece("本", (1, 1, 1)),
        piece("é", (0, 0)),
        piece("한", (0, 0, 0)),
        piece("x", (1,)),
    ]
    [(text, marks)] = drawn(pieces)
    assert text == "日本é한x"
    assert marks == "+~^~.. ^" and cell_len(marks) == cell_len(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\n\t\r\x00\x7f\x1b", "↵⇥⇤\\u{0}\\u{7f}\\u{1b}"),
        ("a b", "a b"),
        ("\u200b\ufeff\u202e", "\\u{200b}\\u{feff}\\u{202e}"),
        ("\xa0\x85", "\\u{a0}\\u{85}"),
        ("\u3000é日👍", "\u3000é日👍"),
    ],
)
def test_every_character_shows(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<extra_id_0>", "‹extra_id_0›"),
        ("[NLU]", "‹NLU›"),
        ("<|end|>", "‹|end|›"),
        ("</s>", "‹/s›"),
        ("eos", "‹eos›"),
        ("<>", "‹<>›"),
    ],
)
def test_special_tokens_stand_between_marks_of_their_own(text, shown):
    assert special(text) == shown


def test_a_character_without_width_joins_the_one_before_it():
    units = units_of(
        [piece("e"), piece("\u0301", (1, 1)), piece("x", (1,)), piece("\u0301", (1, 1))]
    )
    assert [(unit.shown, unit.mark, unit.tokens) for unit in units] == [
        ("e\u0301", "+", 3),
        ("x\u0301", "^", 3),
    ]
    assert [unit.marks for unit in units] == ["+", "^"]


@pytest.mark.skipif(
    cell_len("👍🏽") != 2, reason="this rich counts the cells of each character by itself"
)
def test_a_skin_tone_joins_its_emoji():
    [hand, after] = units_of([piece("👍", (1,) * 4), piece("🏽", (1,) * 4), piece("x")])
    assert (hand.shown, hand.marks, hand.tokens, after.shown) == ("👍🏽", "^~", 8, "x")


def test_a_character_without_width_is_escaped_after_a_special_token():
    units = units_of([piece("<eos>", (0,), "special"), piece("\u0301")])
    assert [unit.shown for unit in units] == ["‹eos›", "\\u{301}"]


@pytest.mark.parametrize("width", [2, 7, 40, 100])
def test_wrapping_keeps_every_cell_and_no_line_is_longer(width):
    pieces = [
        piece(text, (i % 2,))
        for i, text in enumerate(
            ["The", " quick", "日", "\n", "extraordinarily long", "é", " "] * 9
        )
    ]
    lines = drawn(pieces, width)
    assert "".join(text for text, _ in lines) == "".join(visible(p["text"]) for p in pieces)
    assert "".join(marks for _, marks in lines) == "".join(
        marks for _, marks in drawn(pieces, 10**6)
    )
    for text, marks in lines:
        assert cell_len(text) == len(marks) <= width


def test_shortening_counts_what_it_leaves_out():
    units = units_of([piece("ab", (0, 0, 1)) for _ in range(200)])
    lines = list(wrapped(units, 40))
    short = shortened(lines)
    [gap] = short[HEAD_LINES]
    shown = sum(unit.tokens for line in short for unit in line)
    assert len(short) == HEAD_LINES + 1 + TAIL_LINES
    assert gap.shown == f"… {600 - shown} tokens …" and shown == 3 * 20 * (HEAD_LINES + TAIL_LINES)
    assert gap.marks.strip() == ""
    assert short[:HEAD_LINES] == lines[:HEAD_LINES] and short[-TAIL_LINES:] == lines[-TAIL_LINES:]


def test_by_turn_the_lines_where_training_begins_or_ends_are_shown_too():
    marks = [0] * 150 + [1] * 3 + [0] * 100 + [1] * 147 + [0] * 100
    lines = list(wrapped(units_of([piece("ab", (mark,)) for mark in marks]), 20))
    short = shortened(lines, by_turn=True)
    assert [i for i, line in enumerate(lines) if any(line is other for other in short)] == [
        *(0, 1, 2, 14, 15, 16, 25, 26, 39, 40, 41, 48, 49)
    ]
    gaps = [unit.shown for line in short for unit in line if unit.kind == "gap"]
    assert gaps == ["… 110 tokens …", "… 80 tokens …", "… 120 tokens …", "… 60 tokens …"]


@pytest.mark.long
def test_of_many_turns_the_first_are_shown():
    lines = list(wrapped(units_of([piece("ab", (i // 60 % 2,)) for i in range(30_000)]), 20))
    short = shortened(lines, by_turn=True)
    shown = [line for line in short if line[0].kind != "gap"]
    assert len(shown) == HEAD_LINES + TAIL_LINES + MOST_TURN_LINES
    assert sum(unit.tokens for line in shown for unit in line) == 10 * len(shown)


def test_few_lines_are_not_shortened():
    lines = list(wrapped(units_of([piece("a")] * (10 * MOST_LINES)), 10))
    assert shortened(lines) == lines and len(lines) == MOST_LINES
