"""Charts as inline SVG: bars of what is there, a line of what should be, and one text for those who cannot see them.

All are 340 × 170 units, shown at that size or larger, with text of 14 units. Colours are the page's, by class.
"""

from collections.abc import Sequence

from markupsafe import Markup

WIDTH, HEIGHT = 340, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 4, 336, 24, 144

Tick = tuple[float, str]
"""(place, text) below a chart; place: in bins, from the left end of the first."""


def chart(
    values: Sequence[float], expected: Sequence[float] | None, ticks: Sequence[Tick], top: tuple[float, str], words: str
) -> Markup:
    """Bars of the values, one a bin, and points of what is expected joined by a line.

    top: (value, text) of the line above which no bar should go; words: what the chart says, for a screen reader.
    """
    most = max([top[0], *values, *(expected if expected is not None else ())], default=0.0) or 1.0
    step = (_RIGHT - _LEFT) / max(len(values), 1)
    gap = min(2.0, step * 0.15)

    def y(value: float) -> float:
        return _BOTTOM - value / most * (_BOTTOM - _TOP)

    parts = [
        Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(_LEFT, y(top[0]), _RIGHT),
        Markup('<text x="{}" y="{:.1f}">{}</text>').format(_LEFT, y(top[0]) - 6, top[1]),
    ]
    for i, value in enumerate(values):
        if value > 0:
            height = max(_BOTTOM - y(value), 1.0)
            box = (_LEFT + i * step + gap / 2, _BOTTOM - height, step - gap, height)
            parts.append(
                Markup('<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(*box)
            )
    if expected is not None:
        points = [(_LEFT + (i + 0.5) * step, y(value)) for i, value in enumerate(expected)]
        if len(points) > 1:
            line = " ".join(f"{x:.1f},{height:.1f}" for x, height in points)
            parts.append(Markup('<polyline class="theory" points="{}"/>').format(line))
        parts += [Markup('<circle class="theory" cx="{:.1f}" cy="{:.1f}" r="2.2"/>').format(*point) for point in points]
    parts.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(_LEFT, _BOTTOM, _RIGHT))
    for place, text in ticks:
        x = _LEFT + place * step
        anchor = "start" if x < 30 else "end" if x > WIDTH - 30 else "middle"
        parts.append(Markup('<text x="{:.1f}" y="164" text-anchor="{}">{}</text>').format(x, anchor, text))
    head = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, words)
    return head + Markup("").join(parts) + Markup("</svg>")


def meter(share: float | None, wanted: float | None = None) -> Markup:
    """A bar of a share of 1, with a mark where it was wanted; the numbers stand beside it."""
    parts = [Markup('<rect class="track" width="100" height="8"/>')]
    if share:
        parts.append(Markup('<rect class="bar" width="{:.2f}" height="8"/>').format(100 * min(share, 1)))
    if wanted is not None:
        x = min(max(100 * wanted, 0.75), 99.25)
        parts.append(Markup('<path class="wanted" d="M{:.2f} -2V10"/>').format(x))
    head = Markup('<svg class="meter" viewBox="0 -2 100 12" preserveAspectRatio="none" aria-hidden="true">')
    return head + Markup("").join(parts) + Markup("</svg>")


def stack(parts: Sequence[tuple[str, float]], words: str) -> Markup:
    """One bar of several (class, share of 1), side by side."""
    drawn, x = [], 0.0
    for kind, share in parts:
        drawn.append(Markup('<rect class="{}" x="{:.3f}" width="{:.3f}" height="20"/>').format(kind, x, 1000 * share))
        x += 1000 * share
    head = Markup('<svg class="stack" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label="{}">')
    return head.format(words) + Markup("").join(drawn) + Markup("</svg>")
