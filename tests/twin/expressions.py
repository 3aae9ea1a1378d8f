"""How often a document is used, by `where` and `repeat` of its source, from one record at a time.

Null follows SQL. NaN, x / 0 and integers beyond 64 bits are null. A kind that an operator does not
take makes the record unusable.
"""

import ast
import math
from collections.abc import Callable
from typing import Any


class Unusable(Exception):
    """A value of another kind than its operator takes."""


Get = Callable[[str], Any]


def condition(text: str, get: Get) -> bool:
    """Whether the condition holds for a record. get: a field's name → its value, or None."""
    found = _value(_parsed(text), get)
    if found is not None and not isinstance(found, bool):
        raise Unusable
    return found is True


def number(text: str, get: Get) -> float | None:
    """The number of a record."""
    found = _value(_parsed(text), get)
    _numbers(found)
    return found


def fields(text: str) -> list[str]:
    """The names of the fields that a text reads."""
    found: list[str] = []

    def collect(name: str) -> None:
        found.append(name)

    _walk(_parsed(text), collect)
    return found


def _parsed(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _name(tree: ast.expr) -> str | None:
    """The name of a field; None for anything else."""
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Attribute):
        return f"{_name(tree.value)}.{tree.attr}"
    if isinstance(tree, ast.Call) and getattr(tree.func, "id", "") == "field":
        return str(ast.literal_eval(tree.args[0]))
    return None


def _walk(tree: ast.AST, collect: Callable[[str], None]) -> None:
    name = _name(tree) if isinstance(tree, ast.expr) else None
    if name is not None:
        if name not in ("true", "false", "null"):
            collect(name)
        return
    for inner in ast.iter_child_nodes(tree):
        if not (isinstance(tree, ast.Call) and inner is tree.func):
            _walk(inner, collect)


def _value(tree: ast.expr, get: Get) -> Any:
    name = _name(tree)
    if name is not None:
        return {"true": True, "false": False}[name] if name in ("true", "false") else _of(get(name))
    if isinstance(tree, ast.Constant):
        return tree.value
    if isinstance(tree, ast.BoolOp):
        return _joined(isinstance(tree.op, ast.Or), [_value(one, get) for one in tree.values])
    if isinstance(tree, ast.UnaryOp):
        inner = _value(tree.operand, get)
        if isinstance(tree.op, ast.Not):
            return None if inner is None else not _truth(inner)
        _numbers(inner)
        return None if inner is None else -inner
    if isinstance(tree, ast.IfExp):
        test, first, second = (_value(one, get) for one in (tree.test, tree.body, tree.orelse))
        if len({_kind(one) for one in (first, second) if one is not None}) > 1:
            raise Unusable  # Kinds count in the branch that is not taken, too.
        return first if test is not None and _truth(test) else second
    if isinstance(tree, ast.BinOp):
        return _calculated(tree.op, _value(tree.left, get), _value(tree.right, get))
    if isinstance(tree, ast.Compare):
        sides = zip([tree.left, *tree.comparators], tree.ops, tree.comparators, strict=False)
        return _joined(False, [_pair(left, sign, right, get) for left, sign, right in sides])
    assert isinstance(tree, ast.Call), ast.dump(tree)
    return _called(getattr(tree.func, "id", ""), [_value(one, get) for one in tree.args])


def _of(value: Any) -> Any:
    """A field's value: a number that is NaN is null, an integer beyond 64 bits is a float, and a
    text is its bytes' text."""
    if type(value) is int and not -(2**63) <= value < 2**64:
        return float(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unusable
    return value


def _numbers(*values: Any) -> None:
    if any(value is not None and type(value) not in (int, float) for value in values):
        raise Unusable


def _joined(is_or: bool, values: list[Any]) -> bool | None:
    truths = [None if value is None else _truth(value) for value in values]
    if is_or in truths:
        return is_or
    return None if None in truths else not is_or


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    return "number" if isinstance(value, int | float) else type(value).__name__


def _pair(left: ast.expr, sign: ast.cmpop, right: ast.expr, get: Get) -> bool | None:
    a = _value(left, get)
    if isinstance(sign, ast.Is | ast.IsNot):
        return (a is None) == isinstance(sign, ast.Is)
    if isinstance(sign, ast.In | ast.NotIn):
        every = right.elts if isinstance(right, ast.Tuple | ast.List) else [right]
        values = [_value(one, get) for one in every]
        if a is not None and any(_kind(one) != _kind(a) for one in values):
            raise Unusable
        return None if a is None else (a in values) == isinstance(sign, ast.In)
    b = _value(right, get)
    if a is None or b is None:
        return None
    if _kind(a) != _kind(b) or _kind(a) not in ("truth", "number", "str"):
        raise Unusable
    return {
        ast.Eq: lambda: a == b,
        ast.NotEq: lambda: a != b,
        ast.Lt: lambda: a < b,
        ast.LtE: lambda: a <= b,
        ast.Gt: lambda: a > b,
        ast.GtE: lambda: a >= b,
    }[type(sign)]()


def _calculated(sign: ast.operator, a: Any, b: Any) -> Any:
    _numbers(a, b)
    if a is None or b is None or (isinstance(sign, ast.Div | ast.Mod) and b == 0):
        return None
    if isinstance(sign, ast.Div):
        return float(a) / float(b)
    if isinstance(sign, ast.Mod):
        return math.fmod(a, b)
    found = {
        ast.Add: lambda: a + b,
        ast.Sub: lambda: a - b,
        ast.Mult: lambda: a * b,
    }[type(sign)]()
    beyond = isinstance(found, int) and not -(2**63) <= found < 2**63
    return None if beyond or found != found else found


def _called(name: str, values: list[Any]) -> Any:
    if name == "coalesce":
        return next((value for value in values if value is not None), None)
    _numbers(*values)
    if None in values:
        return None
    if name == "clip":
        return min(max(values[0], values[1]), values[2])
    return {
        "abs": lambda: abs(values[0]),
        "floor": lambda: math.floor(values[0]),
        "ceil": lambda: math.ceil(values[0]),
        "min": lambda: min(values),
        "max": lambda: max(values),
    }[name]()
