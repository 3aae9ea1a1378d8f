"""Where a build's time went, for a person who wants to know what bounds it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def print_profile(profile: Mapping[str, Any]) -> None:
    """A described profile as a table."""
    for line in _lines(profile):
        print(line)


def _lines(profile: Mapping[str, Any]) -> Iterator[str]:
    workers = f"{profile['workers']} worker{'s' if profile['workers'] > 1 else ''}"
    yield (
        f"{profile['wall_s']:.2f} s with {workers}: {profile['documents']:,} documents, {profile['tokens']:,} tokens, "
        f"{profile['text_bytes'] / 1e6:,.1f} MB of text: {profile['tokens_per_s'] / 1e6:.2f} M tokens/s, "
        f"{profile['text_bytes_per_s'] / 1e6:.1f} MB/s"
    )
    yield f"{'stage':<10} {'seconds':>9} {'share':>7} {'MB/s':>9} {'M tokens/s':>11}   (of all workers; rates of one)"
    for stage in profile["stages"]:
        rates = f"{stage['text_bytes_per_s'] / 1e6:>9,.0f} {stage['tokens_per_s'] / 1e6:>11,.1f}"
        idle = stage["stage"] == WAITING
        yield f"{stage['stage']:<10} {stage['seconds']:>9.2f} {stage['share']:>7.1%} {'' if idle else rates}".rstrip()
