"""Random expressions over columns of `TABLE`'s names, as packprep and as SQL read them."""

import math
import random

import pyarrow as pa

from packprep.errors import RecipeError

SCHEMA = pa.schema(
    {
        "i": pa.int64(),
        "u": pa.uint64(),
        "b": pa.int8(),
        "x": pa.float64(),
        "f": pa.float32(),
        "lang": pa.string(),
        "ok": pa.bool_(),
        "n": pa.null(),
    }
)
NUMBERS, TEXTS = ("i", "u", "b", "x", "f"), ("de", "fr", "", "ä", "dé", "d" * 80, "z\U0010ffff")
EDGES = {
    "i": (0, 1, -1, 3, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)),
    "u": (0, 1, 3, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1),
    "b": (0, 1, -1, 127, -128),
    "x": (0.0, -0.0, 0.5, -2.25, 1e300, 9007199254740993.0, math.inf, -math.inf, math.nan),
    "f": (0.0, 0.1, 0.7, -1.5, 16777217.0, 3e38, math.inf, math.nan),
    "lang": TEXTS,
    "ok": (False, True),
    "n": (None,),
}
LITERALS = ("0", "1", "3", "-2", "0.1", "0.5", "9007199254740993", "9223372036854775808", "1e300")


def random_table(rng: random.Random, rows: int, small: bool = False) -> pa.Table:
    """Columns of edge cases and nulls, and with `small` only small numbers."""
    columns = {}
    for name, edges in EDGES.items():
        few = rng.sample(edges, min(len(edges), rng.randint(1, 4)))
        if small and name in NUMBERS:
            few = [rng.randint(0, 9) / (1 if name in "iub" else 4) for _ in range(4)]
            few = [int(value) if name in "iub" else value for value in few]
        null = rng.choice((0, 0.3, 1))
        values = [None if rng.random() < null else rng.choice(few) for _ in range(rows)]
        columns[name] = pa.array(values, SCHEMA.field(name).type)
    return pa.table(columns)


def number(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice((*NUMBERS, *NUMBERS, *LITERALS, "n"))
    one, two, three = (number(rng, depth - 1) for _ in range(3))
    return rng.choice(
        (
            *(f"({one} {sign} {two})" for sign in "+-*/%"),
            f"-({one})",
            f"abs({one})",
            f"floor({one})",
            f"ceil({one})",
            f"min({one}, {two})",
            f"max({one}, {two}, {three})",
            f"clip({one}, {two}, {three})",
            f"coalesce({one}, {two})",
            f"({one} if {truth(rng, depth - 1)} else {two})",
        )
    )


def truth(rng: random.Random, depth: int) -> str:
    sign = rng.choice(("==", "!=", "<", "<=", ">", ">="))
    if depth == 0 or rng.random() < 0.2:
        text = rng.choice(TEXTS)
        return rng.choice(
            (
                "ok",
                f"({rng.choice(NUMBERS)} {sign} {rng.choice(LITERALS)})",
                f"(lang {sign} '{text}')",
                f"(lang in ('{text}', '{rng.choice(TEXTS)}'))",
                f"({rng.choice(NUMBERS)} in ({rng.choice(LITERALS)}, {rng.choice(LITERALS)}))",
                f"({rng.choice((*NUMBERS, 'lang', 'ok', 'n'))} is null)",
            )
        )
    one, two = truth(rng, depth - 1), truth(rng, depth - 1)
    return rng.choice(
        (
            f"({one} and {two})",
            f"({one} or {two})",
            f"(not {one})",
            f"({one} == {two})",
            f"({number(rng, depth - 1)} {sign} {number(rng, depth - 1)})",
            f"({number(rng, depth - 1)} is not null)",
            f"({truth(rng, 0)} if {one} else {two})",
        )
    )


REFUSED = RecipeError
"""What packprep raises for a random expression without a field."""
