"""Determine the kind of an expression's value, and refuse operators on other kinds.

The kinds of the fields come from a table's schema or from the values of one JSON record. Without
them, only the literals and operators are checked.
"""

from collections.abc import Mapping

from packprep.sources.expressions.parser import (
    ARITHMETIC,
    COMPARISONS,
    Call,
    ExpressionFault,
    Field,
    Literal,
    Node,
)

NUMBER, TEXT, TRUTH, TIME = "a number", "a text", "true or false", "a time"
NULL, UNKNOWN = "null", "unknown"
"""NULL is the kind of a field without any value, which every operator accepts."""
KINDS = (NUMBER, TEXT, TRUTH, TIME, NULL, UNKNOWN)
"""The kinds that operators accept. Another kind, such as "a list", is accepted by "is null"."""


def kind_of(node: Node, kinds: Mapping[str, str]) -> str:
    """Return the kind of a node's value.

    Args:
        node: The tree.
        kinds: Kind of each field. A field that is not in it is UNKNOWN.

    Raises:
        ExpressionFault: If an operator does not accept the kind of an argument.
    """
    if isinstance(node, Literal):
        if isinstance(node.value, bool):
            return TRUTH
        return TEXT if isinstance(node.value, str) else NUMBER
    if isinstance(node, Field):
        return kinds.get(node.name, UNKNOWN)
    argument_kinds = [kind_of(argument, kinds) for argument in node.arguments]
    if node.function == "is null":
        return TRUTH
    # Only 'is null', which returned above, accepts kinds such as lists.
    for argument, kind in zip(node.arguments, argument_kinds, strict=True):
        if kind not in KINDS:
            raise ExpressionFault(
                f"{_shown(argument)} is {kind}; only 'is null' reads it", argument.at
            )
    if node.function in ("and", "or", "not"):
        _check(node, argument_kinds, TRUTH)
        return TRUTH
    if node.function in COMPARISONS or node.function == "in":
        kind = _same(node, argument_kinds, with_times=True)
        if kind == TIME and node.function == "in":
            raise ExpressionFault("in accepts no times, which == and or can compare", node.at)
        if kind == TRUTH and node.function not in ("==", "!=", "in"):
            raise ExpressionFault(f"{node.function} has no order for true and false", node.at)
        return TRUTH
    if node.function == "if":
        _check(node, argument_kinds[:1], TRUTH)
        return _same(node, argument_kinds[1:], first=1)
    if node.function == "coalesce":
        return _same(node, argument_kinds)
    _check(node, argument_kinds, NUMBER)
    return NUMBER


def expect(node: Node, kind: str, wanted_kind: str) -> None:
    """Check that the value of a whole expression has the kind `wanted_kind`.

    Raises:
        ExpressionFault: If it has another kind.
    """
    if kind not in (wanted_kind, NULL, UNKNOWN):
        raise ExpressionFault(f"the result is {kind}, not {wanted_kind}", node.at)


def _check(node: Call, argument_kinds: list[str], wanted_kind: str) -> None:
    for argument, kind in zip(node.arguments, argument_kinds, strict=False):
        if kind not in (wanted_kind, NULL, UNKNOWN):
            raise ExpressionFault(
                f"{_named(node)} takes {wanted_kind}, but {_shown(argument)} is {kind}", argument.at
            )


def _same(node: Call, argument_kinds: list[str], first: int = 0, with_times: bool = False) -> str:
    """Return the common kind of a call's arguments from number `first` on.

    With `with_times`, a text literal may be compared with a time.
    """
    known_kinds = [
        (argument, kind)
        for argument, kind in zip(node.arguments[first:], argument_kinds, strict=True)
        if kind not in (NULL, UNKNOWN)
    ]
    if not known_kinds:
        return UNKNOWN
    times = [kind for _, kind in known_kinds if kind == TIME]
    other_argument, other_kind = known_kinds[0]
    for argument, kind in known_kinds:
        if kind == other_kind:
            continue
        # A text literal that is compared with a time is read as a time.
        is_written = with_times and any(
            isinstance(side, Literal) and isinstance(side.value, str)
            for side in (argument, other_argument)
        )
        if not (times and is_written):
            raise ExpressionFault(
                f"{_named(node)} takes values of one kind, but {_shown(other_argument)} is"
                f" {other_kind} and {_shown(argument)} is {kind}",
                argument.at,
            )
    return TIME if times else other_kind


def _named(node: Call) -> str:
    return "-" if node.function == "negative" else node.function


def _shown(node: Node) -> str:
    """Return a short ASCII text that shows a part of an expression."""
    if isinstance(node, Field):
        return ascii(node.name[:40])[1:-1]
    if isinstance(node, Literal):
        return ascii(node.value)[:40] if isinstance(node.value, str) else str(node.value).lower()
    if node.function in ARITHMETIC or node.function in COMPARISONS:
        return f"{_shown(node.arguments[0])} {node.function} ..."
    return f"{_named(node)}(...)"
