"""Where a build's time went, for a person who wants to know what bounds it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packprep.building.progress import put_line

WAITING = "waiting"
"""What no stage accounts for: processes that start, and workers that have nothing to do."""


@dataclass(frozen=True)
class Profile:
    """One call of `build`. seconds: stage → seconds, of all processes together; wall_s: as a clock on the wall has it."""

    wall_s: float
    workers: int
    seconds: Mapping[str, float]
    documents: int
    text_bytes: int
    tokens: int


def describe_profile(profile: Profile) -> dict[str, Any]:
    """The profile as plain values: rates over the wall's time, and each stage's share and rate of one worker alone."""
    whole = profile.wall_s * profile.workers
    seconds = {**profile.seconds, WAITING: max(0.0, whole - sum(profile.seconds.values()))}
    return {
        "workers": profile.workers,
        "wall_s": profile.wall_s,
        "documents": profile.documents,
        "text_bytes": profile.text_bytes,
        "tokens": profile.tokens,
        "text_bytes_per_s": _rate(profile.text_bytes, profile.wall_s),
        "tokens_per_s": _rate(profile.tokens, profile.wall_s),
        "stages": [
            {
                "stage": name,
                "seconds": spent,
                "share": spent / whole if whole else 0.0,
                "text_bytes_per_s": _rate(profile.text_bytes, spent),
                "tokens_per_s": _rate(profile.tokens, spent),
            }
            for name, spent in seconds.items()
        ],
    }


def _rate(count: int, seconds: float) -> float | None:
    """None where there is nothing to have a rate of, or no time that was measured."""
    return count / seconds if count and seconds > 0 else None


def print_profile(profile: Mapping[str, Any]) -> None:
    """A described profile as a table."""
    for line in _lines(profile):
        put_line(line)


def _lines(profile: Mapping[str, Any]) -> Iterator[str]:
    workers = f"{profile['workers']} worker{'s' if profile['workers'] > 1 else ''}"
    made = f"{profile['documents']:,} documents, {profile['tokens']:,} tokens, {profile['text_bytes'] / 1e6:,.1f} MB of text"
    rates = [
        f"{profile[name] / 1e6:.{digits}f} {unit}"
        for name, digits, unit in (("tokens_per_s", 2, "M tokens/s"), ("text_bytes_per_s", 1, "MB/s"))
        if profile[name] is not None
    ]
    said = f"{made}: {', '.join(rates)}" if rates else made if profile["documents"] else "nothing was read"
    yield f"{profile['wall_s']:.2f} s with {workers}: {said}"
    yield f"{'stage':<10} {'seconds':>9} {'share':>7} {'MB/s':>9} {'M tokens/s':>11}   (of all workers; rates of one)"
    for stage in profile["stages"]:
        text, tokens = (
            None if stage["stage"] == WAITING else stage[name] for name in ("text_bytes_per_s", "tokens_per_s")
        )
        columns = ("" if text is None else f"{text / 1e6:,.0f}", "" if tokens is None else f"{tokens / 1e6:,.1f}")
        line = f"{stage['stage']:<10} {stage['seconds']:>9.2f} {stage['share']:>7.1%} {columns[0]:>9} {columns[1]:>11}"
        yield line.rstrip()
