"""Turn pieces of text into lines with a mark under each token. Widths are in terminal cells.

```
‹NLG›import re↵↵def‹extra_id_0›(‹extra_id_1›     special tokens in ‹ ›, control characters drawn
.    .     .  ...  .           .^~~~~~~~~~~~     a mark under each token's first cell; trained: ^~~
… 312 tokens …                                   the middle of a long text is omitted
 return 0↵‹eos›
^~~~~~~^~^.
```
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from rich.cells import cell_len, chop_cells

from packprep.messages import visible
from packprep.tokenizer.texts import SPECIAL, TEXT

TRAINED, NOT_TRAINED, IN_PART, LED_ON = "^", ".", "+", "~"
MOST_LINES, HEAD_LINES, TAIL_LINES, MOST_TURN_LINES = 6, 3, 2, 48


class Unit(NamedTuple):
    """Characters that are printed together.

    Attributes:
        shown: The characters as shown.
        mark: The mark that is printed under the characters, or " " for none.
        kind: The kind of the piece.
        tokens: Number of tokens.
    """

    shown: str
    mark: str
    kind: str
    tokens: int

    @property
    def width(self) -> int:
        return cell_len(self.shown)

    @property
    def marks(self) -> str:
        """Return the text that is printed under the characters, one character per cell.

        The mark is under the first cell. A mark such as ^ continues as ~ under the other cells.
        """
        return self.mark + _led_on(self.mark) * (self.width - 1)


def _led_on(mark: str) -> str:
    return LED_ON if mark in (TRAINED, IN_PART, LED_ON) else " "


def special(text: str) -> str:
    """Return a special token as it is shown: <s> and [s] become ‹s›, and s becomes ‹s›."""
    bare = text[1:-1] if len(text) > 2 and text[0] + text[-1] in ("<>", "[]") else text
    return f"‹{visible(bare)}›"


def units_of(pieces: Sequence[Mapping[str, Any]]) -> list[Unit]:
    """Return the units of pieces {text, ids, loss, kind}, in order.

    Each piece becomes one unit. But a piece that starts with a combining character, such as an
    accent, joins the unit before it.
    """
    units: list[Unit] = []
    for piece in pieces:
        text, kind = piece["text"], piece["kind"]
        trained = sum(piece["loss"])
        mark = TRAINED if trained == len(piece["loss"]) else IN_PART if trained else NOT_TRAINED
        shown = special(text) if kind == SPECIAL else visible(text)
        if (
            kind == TEXT
            and units
            and units[-1].kind == TEXT
            and _belong_together(units[-1].shown, shown)
        ):
            previous_unit = units[-1]
            mark = mark if mark == previous_unit.mark else IN_PART
            units[-1] = Unit(
                previous_unit.shown + shown, mark, kind, previous_unit.tokens + len(piece["ids"])
            )
            continue
        # A combining character without a base would change the character before it, so its number
        # is shown.
        if shown and not cell_len(shown[0]):
            shown = f"\\u{{{ord(shown[0]):x}}}{shown[1:]}"
        units.append(Unit(shown or special(""), mark, kind, len(piece["ids"])))
    return units


def _belong_together(base: str, shown: str) -> bool:
    """Return whether a terminal draws `shown` over the end of `base`.

    This is the case if `shown` is an accent, a skin tone or a variation selector, for example.
    """
    if shown.isascii() or not shown:
        return False
    return not cell_len(shown[0]) or cell_len(base + shown) != cell_len(base) + cell_len(shown)


def shortened(lines: Sequence[list[Unit]], by_turn: bool = False) -> list[list[Unit]]:
    """Return all lines, or only the first and last lines if there are more than MOST_LINES.

    "… N tokens …" replaces each gap of two or more lines.

    Args:
        lines: The lines.
        by_turn: Whether to also keep at most MOST_TURN_LINES lines near changes between trained and
            untrained tokens.
    """
    if len(lines) <= MOST_LINES:
        return list(lines)
    shown = {*range(HEAD_LINES), *range(len(lines) - TAIL_LINES, len(lines))}
    if by_turn:
        shown.update(islice(_turn_lines(lines), MOST_TURN_LINES))
    kept_lines: list[list[Unit]] = []
    for is_shown, numbers in groupby(range(len(lines)), lambda i: i in shown):
        run = [lines[i] for i in numbers]
        left_out = sum(unit.tokens for line in run for unit in line)
        kept_lines += (
            run
            if is_shown or len(run) == 1
            else [[Unit(f"… {left_out:,} tokens …", " ", "gap", 0)]]
        )
    return kept_lines


def _turn_lines(lines: Sequence[list[Unit]]) -> Iterator[int]:
    """Yield the numbers of lines near changes between trained and untrained tokens, ascending.

    For each change, these are the lines from the last token before the change to the first token
    after the change, and one more line.
    """
    previous_mark, previous_line, last_yielded = "", 0, -1
    for i, line in enumerate(lines):
        for unit in line:
            mark = NOT_TRAINED if unit.mark == NOT_TRAINED else TRAINED
            if previous_mark and mark != previous_mark:
                yield from range(max(previous_line, last_yielded + 1), min(i + 2, len(lines)))
                last_yielded = i + 1
            previous_mark, previous_line = mark, i


def wrapped(units: Sequence[Unit], width: int) -> Iterator[list[Unit]]:
    """Yield lines of units, at most `width` cells each.

    A wider unit is split over several lines.
    """
    line: list[Unit] = []
    filled = 0
    for unit in units:
        parts = [unit]
        if unit.width > width:
            first_text, *other_texts = chop_cells(unit.shown, width)
            parts = [
                unit._replace(shown=first_text),
                *(Unit(text, _led_on(unit.mark), unit.kind, 0) for text in other_texts),
            ]
        for unit_part in parts:
            if line and filled + unit_part.width > width:
                yield line
                line, filled = [], 0
            line.append(unit_part)
            filled += unit_part.width
    if line:
        yield line


def clipped(text: str, limit: int) -> str:
    """Return the text, with "…" instead of its middle if it has more than `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[len(text) - limit // 2 :]}"


def size_of(n_bytes: int) -> str:
    """Return a size as text, as in "129 MiB"."""
    size, unit = float(n_bytes), 0
    while size >= 1024 and unit < 5:
        size, unit = size / 1024, unit + 1
    return (
        f"{n_bytes} bytes"
        if not unit
        else f"{size:.3g} {('', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"
    )


def sides_in_words(fill: Mapping[str, Any]) -> str:
    """Return a text that says how full encoder and decoder sequences are.

    The text is empty if rows have one sequence.

    Args:
        fill: `utilisation` of a forecast or a summary.
    """
    if fill.get("encoder") is None:
        return ""
    return f"; encoder {fill['encoder']:.2%}, decoder {fill['decoder']:.2%}"
