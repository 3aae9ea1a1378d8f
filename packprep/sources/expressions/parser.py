"""Parse the text of an expression into a tree of literals, fields and calls.

Python's parser reads the text. Only the forms below are accepted, and nothing is ever executed.

```
score >= 3 and lang in ('de', 'fr')       comparisons, chains (0 < a < 3), and, or, not, in, not in
meta.quality is not null                  b in a is a.b; field('a b') for any other name
2 if lang == 'de' else 1                  a choice
clip(score - 1, 0, 4)                     + - * / % and the functions in FUNCTIONS
```
"""

import ast
import difflib
import io
import math
import tokenize
import unicodedata
import warnings
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

MAX_CHARACTERS = 64 << 10
MAX_TOKENS = 500
"""Maximum tokens of an expression, without the texts, numbers and commas of its lists.

It limits the nesting that Python's parser has to follow.
"""
MAX_DEPTH = 60  # maximum depth of the tree
FUNCTIONS = {
    "abs": (1, 1),
    "ceil": (1, 1),
    "clip": (3, 3),
    "coalesce": (1, 99),
    "floor": (1, 1),
    "max": (1, 99),
    "min": (1, 99),
}
"""Maps the name of a function to its minimum and maximum number of arguments."""


class Literal(NamedTuple):
    """A number, a text or a truth value in an expression. `at` is its first character."""

    value: int | float | str | bool
    at: int


class Field(NamedTuple):
    """A field of the record, such as "a.b" for b in a. `at` is its first character."""

    name: str
    at: int


class Call(NamedTuple):
    """An operator or a function with its arguments.

    Attributes:
        function: "and", "or", "not", "in", "is null", "if", a comparison such as "<=", an
            arithmetic operator, "negative", or a name of FUNCTIONS. "if" has the condition, the
            value where it is true, and the other value.
        arguments: The arguments. Those of "in" are the value, then the literals of the list.
        at: First character of the call in the text.
    """

    function: str
    arguments: tuple["Node", ...]
    at: int


Node = Literal | Field | Call
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
ARITHMETIC = ("+", "-", "*", "/", "%")
_COMPARISONS = dict(
    zip((ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE), COMPARISONS, strict=True)
)
_ARITHMETIC = dict(zip((ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod), ARITHMETIC, strict=True))
_WORDS = {"AND": "and", "OR": "or", "NOT": "not", "IN": "in", "IS": "is", "NULL": "null"}
_SQL = {
    "between": "write low <= x <= high",
    "like": "write x == 'text', or x in ('a', 'b')",
    "ilike": "write x == 'text', or x in ('a', 'b')",
    "case": "write a if x > 1 else b",
}
"""Maps words of SQL that stand after another name to the advice for them."""
_SIGNS = {
    "=": "==",
    "=>": ">=",
    "=<": "<=",
    "&": "and",
    "|": "or",
    "<>": "!=",
    "&&": "and",
    "||": "or",
    "!": "not",
}
"""Maps an operator of another language to the operator to write."""
_UNCOUNTED = (
    tokenize.NUMBER,
    tokenize.STRING,
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.ENDMARKER,
)


class ExpressionFault(Exception):
    """A part of an expression that cannot be used.

    Attributes:
        message: What is wrong.
        at: Index of the first wrong character, or None.
        advice: An action for the hint, or "".
    """

    def __init__(self, message: str, offset: int | None = None, advice: str = "") -> None:
        super().__init__(message)
        self.message, self.at, self.advice = message, offset, advice


def parse(text: str) -> Node:
    """Return the tree of an expression.

    Raises:
        ExpressionFault: If the text is not an expression.
    """
    _check_tokens(text)
    stripped = text.strip(" \t")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for example for the escape "\d"
            tree = ast.parse(stripped, mode="eval").body
    except SyntaxError as error:
        advice = next((_SQL[w] for w in text.lower().split() if w in _SQL), "")
        advice = "write !=" if "<>" in text else advice
        offset = error.offset or len(stripped) + 1  # Python gives 0 for the end of the text.
        place = text.index(stripped) + offset - 1 if error.lineno == 1 else None
        _refuse("this is not an expression", place, advice)
    except (Warning, ValueError, MemoryError, RecursionError):
        _refuse("this is not an expression")
    # The limit of depth protects the recursion of all later steps.
    parser = _Parser(text)
    parser.check_depth(tree)
    return parser.node(tree)


def fields_of(node: Node) -> Iterator[Field]:
    """Yield the fields of a tree, from left to right."""
    if isinstance(node, Field):
        yield node
    elif isinstance(node, Call):
        for argument in node.arguments:
            yield from fields_of(argument)


def _refuse(message: str, offset: int | None = None, advice: str = "") -> NoReturn:
    raise ExpressionFault(message, offset, advice)


def _check_tokens(text: str) -> None:
    """Check the size of an expression, and refuse what Python reads in a surprising way."""
    if len(text) > MAX_CHARACTERS:
        _refuse(f"the expression has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    if not text.strip():
        _refuse("the expression is empty", None, "write a comparison, or leave the key out")
    if _has_surrogate(text):
        _refuse("the expression has a lone surrogate")
    if "\n" in text or "\r" in text:
        _refuse("the expression has a line break", None, "write it in one line")
    counted, last_type, last_end = 0, None, 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.strip(" \t")).readline):
            start = token.start[1] + len(text) - len(text.lstrip(" \t"))
            if token.type == tokenize.COMMENT:
                _refuse("the expression has a comment", start, "remove it")
            # Python joins neighbouring texts, so a missing comma would change the list.
            if token.type == tokenize.STRING == last_type:
                quoted = 'write "it\'s" for a text with a quotation mark'
                advice = quoted if start == last_end else "write a comma"
                _refuse("a comma is missing between two texts", start, advice)
            if token.string in _SIGNS:
                sign = (
                    text[start : start + 2] if text[start : start + 2] in _SIGNS else token.string
                )
                _refuse(f"unknown operator {sign}", start, f"write {_SIGNS[sign]}")
            if token.type == tokenize.NAME and token.string in _WORDS:
                word = _WORDS[token.string]
                _refuse(f"{token.string} is not an operator", start, f"write {word}")
            # Texts, numbers and commas do not nest, so long lists are allowed.
            counted += token.type not in _UNCOUNTED and token.string != ","
            last_type, last_end = token.type, start + len(token.string)
    except (tokenize.TokenError, SyntaxError, ValueError):
        _refuse("a bracket or a quotation mark is not closed")
    if counted > MAX_TOKENS:
        _refuse(
            f"the expression has {counted} names and operators; at most {MAX_TOKENS} are read",
            None,
            "write a column with the result to the records",
        )


def _has_surrogate(text: str) -> bool:
    return any(0xD800 <= ord(character) < 0xE000 for character in text)


class _Parser:
    """The translation of Python's tree of an expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.indent = len(text) - len(text.lstrip(" \t"))
        self.stripped = text.strip(" \t").encode()

    def at(self, tree: ast.expr) -> int:
        """Return the index of a tree's first character in the text."""
        return self.indent + len(self.stripped[: tree.col_offset].decode())

    def check_depth(self, tree: ast.expr) -> None:
        level: list[ast.AST] = [tree]
        for _ in range(2 * MAX_DEPTH):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
            if not level:
                return
        _refuse("the expression is nested too deeply", None, "write a column with the result")

    def node(self, tree: ast.expr) -> Node:
        """Return the tree of one part of the expression."""
        offset = self.at(tree)
        if isinstance(tree, ast.Constant):
            return self.literal(tree)
        if isinstance(tree, ast.Name | ast.Attribute):
            return self.named(tree)
        if isinstance(tree, ast.BoolOp):
            word = "and" if isinstance(tree.op, ast.And) else "or"
            return Call(word, tuple(map(self.node, tree.values)), offset)
        if isinstance(tree, ast.UnaryOp):
            return self.unary(tree)
        if isinstance(tree, ast.BinOp):
            if type(tree.op) not in _ARITHMETIC:
                _refuse("this operator is unknown", offset, f"use one of {' '.join(ARITHMETIC)}")
            sides = self.node(tree.left), self.node(tree.right)
            return Call(_ARITHMETIC[type(tree.op)], sides, offset)
        if isinstance(tree, ast.IfExp):
            parts = tree.test, tree.body, tree.orelse
            return Call("if", tuple(map(self.node, parts)), offset)
        if isinstance(tree, ast.Compare):
            return self.comparison(tree)
        if isinstance(tree, ast.Call):
            return self.call(tree)
        if isinstance(tree, ast.List | ast.Tuple | ast.Set):
            _refuse("a list stands only after in", offset, "write x in ('a', 'b')")
        _refuse("an expression has no such part", offset, "see the recipe's docs for all forms")

    def literal(self, tree: ast.Constant) -> Literal:
        value, offset = tree.value, self.at(tree)
        if value is None:
            _refuse("None is unknown", offset, "write x is null")
        if not isinstance(value, bool | int | float | str):
            _refuse(f"a literal of type {type(value).__name__} is unknown", offset)
        if isinstance(value, str) and _has_surrogate(value):
            _refuse("a text has a lone surrogate", offset)
        is_large = isinstance(value, int) and value >= 1 << 64
        if is_large or isinstance(value, float) and not math.isfinite(value):
            _refuse("a number is too large", offset, "write a number below 2**64")
        return Literal(value, offset)

    def named(self, tree: ast.Name | ast.Attribute) -> Literal | Field:
        """Return a field, or the literal of true and false."""
        offset, parts = self.at(tree), []
        # a.b.c is an attribute of an attribute, so names are collected from the right.
        base_node: ast.expr = tree
        while isinstance(base_node, ast.Attribute):
            parts.append(base_node.attr)
            base_node = base_node.value
        if isinstance(base_node, ast.Call) and (base := self.quoted_field(base_node)) is not None:
            parts.append(base)
        elif isinstance(base_node, ast.Name):
            parts.append(base_node.id)
        else:
            _refuse("only a field has fields", offset, "write a.b for field b of a")
        name = ".".join(reversed(parts))
        if name in ("true", "false"):
            return Literal(name == "true", offset)
        if name == "null":
            _refuse("null is not a value", offset, "write x is null, or x is not null")
        written = self.stripped[tree.col_offset : tree.end_col_offset].decode()
        if unicodedata.normalize("NFKC", written) != written:
            # Python's parser changes such a name.
            _refuse("a field's name has characters of another form", offset, "write field('…')")
        return Field(name, offset)

    def quoted_field(self, tree: ast.Call) -> str | None:
        """Return NAME of field('NAME'), or None for another call."""
        if not isinstance(tree.func, ast.Name) or tree.func.id != "field":
            return None
        argument = tree.args[0] if len(tree.args) == 1 and not tree.keywords else None
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            _refuse("field takes one text", self.at(tree), "write field('a name')")
        return str(argument.value)

    def unary(self, tree: ast.UnaryOp) -> Node:
        operand, offset = self.node(tree.operand), self.at(tree)
        if isinstance(tree.op, ast.Not):
            return Call("not", (operand,), offset)
        if isinstance(tree.op, ast.Invert):
            _refuse("~ is unknown", offset, "write not")
        if isinstance(tree.op, ast.UAdd):
            return operand
        if isinstance(operand, Literal) and not isinstance(operand.value, bool | str):
            if operand.value > 1 << 63:
                _refuse("a number is too small", offset, "write a number of at least -2**63")
            return Literal(-operand.value, offset)
        return Call("negative", (operand,), offset)

    def comparison(self, tree: ast.Compare) -> Call:
        """Return a comparison. A chain becomes an "and" of its pairs."""
        in_chain = ast.Eq | ast.Lt | ast.LtE | ast.Gt | ast.GtE
        if len(tree.ops) > 1 and not all(isinstance(sign, in_chain) for sign in tree.ops):
            _refuse("in, is and != are not part of a chain", self.at(tree), "write (a in b) == c")
        lefts = (tree.left, *tree.comparators)
        first, *others = map(self.pair, lefts, tree.ops, tree.comparators)
        return Call("and", (first, *others), self.at(tree)) if others else first

    def pair(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Call:
        offset = self.at(left)
        is_null = isinstance(right, ast.Name) and right.id == "null"
        if isinstance(operator, ast.Is | ast.IsNot):
            if not is_null:
                is_none = isinstance(right, ast.Constant) and right.value is None
                advice = "write null for None" if is_none else "write == or !="
                _refuse("is compares only with null", offset, advice)
            call = Call("is null", (self.node(left),), offset)
            return call if isinstance(operator, ast.Is) else Call("not", (call,), offset)
        if is_null:
            _refuse("a comparison with null is never true", offset, "write x is null")
        if isinstance(operator, ast.In | ast.NotIn):
            call = Call("in", (self.node(left), *self.entries(right)), offset)
            return call if isinstance(operator, ast.In) else Call("not", (call,), offset)
        return Call(_COMPARISONS[type(operator)], (self.node(left), self.node(right)), offset)

    def entries(self, tree: ast.expr) -> list[Literal]:
        """Return the literals of a list after "in". ('a') is a list of one text."""
        offset = self.at(tree)
        if isinstance(tree, ast.Tuple | ast.List):
            parts = tree.elts
        elif self.stripped[: tree.col_offset].rstrip().endswith(b"("):
            parts = [tree]
        else:
            _refuse("in needs a list", offset, "write x in ('a', 'b')")
        if not parts:
            _refuse("the list after in is empty", offset)
        entries = [self.node(entry_tree) for entry_tree in parts]
        for entry in entries:
            if not isinstance(entry, Literal):
                _refuse("a list holds only numbers and texts", entry.at, "write x == y or …")
        return [entry for entry in entries if isinstance(entry, Literal)]

    def call(self, tree: ast.Call) -> Node:
        offset = self.at(tree)
        if (name := self.quoted_field(tree)) is not None:
            return Field(name, offset)
        function_names = ", ".join(FUNCTIONS)
        if not isinstance(tree.func, ast.Name) or tree.func.id not in FUNCTIONS:
            name = tree.func.id if isinstance(tree.func, ast.Name) else "this"
            near = next(iter(difflib.get_close_matches(name, FUNCTIONS)), "")
            advice = f"write {near}" if near else f"use one of {function_names}"
            _refuse(f"{name} is not a function", offset, advice)
        min_count, max_count = FUNCTIONS[tree.func.id]
        if tree.keywords or not min_count <= len(tree.args) <= max_count:
            count = min_count if min_count == max_count else f"{min_count} to {max_count}"
            _refuse(f"{tree.func.id} takes {count} arguments, not {len(tree.args)}", offset)
        return Call(tree.func.id, tuple(map(self.node, tree.args)), offset)
