"""Print the output of inspection, in colour in a terminal, otherwise as lines of 100 columns.

```
page.facts([("rows", "12 of 2,048 slots")])      rows  12 of 2,048 slots
page.table(head, lines, text_columns=1)          text to the left and numbers to the right
page.bars(histogram)                             1 … 3  12  ████████
```
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from packprep.messages import visible

WIDTH = 100
NARROWEST, WIDEST = 40, 160
BAR = 40
LEAST_TEXT = 16  # Minimum width in cells to which a text column may be folded.
HEAD, NAME, DIM, BAR_STYLE = "bold", "bold cyan", "dim", "cyan"


class Page:
    """A page of lines, tables and histograms.

    Attributes:
        width: Cells per line.
        in_colour: Whether the output is a terminal.
    """

    def __init__(self, console: Console):
        self._console = console
        self.in_colour = console.is_terminal
        columns = shutil.get_terminal_size((WIDTH, 24)).columns
        self.width = min(max(columns, NARROWEST), WIDEST) if self.in_colour else WIDTH

    def put(self, line: Text | str = "", style: str = "") -> None:
        """Print one line without wrapping it."""
        self._console.print(_showing(line, style), soft_wrap=True)

    def wrap(self, text: Text | str, style: str = "", indent: int = 0) -> None:
        """Print a text, wrapped at spaces to the width of the terminal.

        Lines after the first are indented by `indent` cells. If the output is not a terminal, the
        text is printed as one line, for tools like grep.
        """
        text = _showing(text, style)
        if not self.in_colour or text.cell_len <= self.width:
            self.put(text)
            return
        # Only the first line has the full width, so the rest is joined and wrapped again.
        first_line, *other_lines = text.wrap(self._console, self.width)
        self.put(_without_end(first_line))
        rest_of_text = Text(" ").join(map(_without_end, other_lines))
        for line in rest_of_text.wrap(self._console, max(self.width - indent, 20)):
            self.put(Text(" " * indent) + _without_end(line))

    def facts(self, facts: Sequence[tuple[str, str]], style: str = "") -> None:
        """Print one line per fact: its name, and its text in an aligned column."""
        gutter = max((cell_len(name) for name, _ in facts), default=0) + 2
        for name, text in facts:
            self.wrap(Text().append(f"{name:<{gutter}}", NAME).append(text, style), indent=gutter)

    def table(self, head: Sequence[str], lines: Sequence[Sequence[str]], text_columns: int) -> None:
        """Print a table with the column names `head` and the rows `lines`.

        The first `text_columns` columns are aligned to the left, and the other columns to the
        right. If the terminal is too narrow, each row becomes a paragraph.
        """
        lines = [[visible(cell) for cell in line] for line in lines]
        widths = [max(cell_len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        if not self.in_colour:
            self._plain_table(head, lines, text_columns, widths)
            return
        least = [
            min(width, LEAST_TEXT) if i < text_columns else width for i, width in enumerate(widths)
        ]
        if sum(least) + 2 * (len(head) - 1) > self.width:
            self._paragraphs(head, lines)
            return
        # The right padding and the box give two spaces between columns, as in other output.
        table = Table(
            box=box.SIMPLE_HEAD,
            header_style=HEAD,
            pad_edge=False,
            show_edge=False,
            padding=(0, 1, 0, 0),
        )
        for i, (name, width) in enumerate(zip(head, least, strict=True)):
            is_text = i < text_columns
            table.add_column(
                name,
                justify="left" if is_text else "right",
                no_wrap=not is_text,
                overflow="fold",
                min_width=width,
                style="" if i else NAME,
            )
        for line in lines:
            table.add_row(*(Text(cell) for cell in line))
        self._console.print(table, width=self.width)

    def _plain_table(
        self,
        head: Sequence[str],
        lines: Sequence[Sequence[str]],
        text_columns: int,
        widths: Sequence[int],
    ) -> None:
        for line in [head, *lines]:
            cells = []
            for i, (cell, width) in enumerate(zip(line, widths, strict=True)):
                room = " " * (width - cell_len(cell))
                cells.append(cell + room if i < text_columns else room + cell)
            self.put("  ".join(cells).rstrip())

    def _paragraphs(self, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        for line in lines:
            other_values = " · ".join(
                f"{name.strip()} {cell}"
                for name, cell in zip(head[1:], line[1:], strict=True)
                if cell
            )
            self.wrap(Text().append(line[0], NAME).append(f"  {other_values}"), indent=4)

    def bars(self, histogram: Sequence[Mapping[str, int]]) -> None:
        """Print a histogram [{from, to, count}], with one line, count and bar per range."""
        names = [
            f"{h['from']:,}" if h["from"] == h["to"] else f"{h['from']:,} … {h['to']:,}"
            for h in histogram
        ]
        counts = [f"{h['count']:,}" for h in histogram]
        peak = max((h["count"] for h in histogram), default=1)
        name_width, count_width = max(map(len, names), default=0), max(map(len, counts), default=0)
        room = self.width - name_width - count_width - 6 if self.in_colour else BAR
        for name, count, h in zip(names, counts, histogram, strict=True):
            bar = "█" * -(-h["count"] * max(room, 8) // max(peak, 1))
            line = Text(f"  {name:>{name_width}}  {count:>{count_width}}  ").append(bar, BAR_STYLE)
            line.rstrip()
            self.put(line)


def _showing(text: Text | str, style: str) -> Text:
    """Return the text in `style`, with invisible characters replaced by visible characters.

    A `Text` without invisible characters is returned as it is, with the styles of its parts.
    """
    plain = visible(text if isinstance(text, str) else text.plain)
    return text if isinstance(text, Text) and text.plain == plain else Text(plain, style)


def _without_end(line: Text) -> Text:
    line.rstrip()
    return line


@contextmanager
def page() -> Iterator[Page]:
    """Yield a page, and write it to stdout at the end.

    The page is written by one call of sys.stdout.write, so a closed pipe raises its error here.
    """
    console = Console(highlight=False)
    drawn = Page(console)
    with console.capture() as captured:
        yield drawn
    sys.stdout.write(captured.get())
