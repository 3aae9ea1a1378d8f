"""Jinja's sandbox with limits: a chat template is code from elsewhere, and a document one that it
is run on.

Counted are steps, characters and work, never seconds, so that the same conversation is rejected
everywhere:

    steps        iterations of loops, calls, filters
    characters   printed, joined, or handed to a filter or a call, whether they come to be in the text or not
    work         what costs time alone: characters and items that are searched, compared or copied, nodes that a loop repeats

A value may hold the same list many times over, and be far longer than the memory that it takes.
What puts values into a new one, as a list does that the template writes, counts all that they hold;
so whatever is done to a value takes no more than has been counted.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

MOST_STEPS = 1 << 17
MOST_CHARACTERS = 1 << 26
MOST_WORK = 1 << 30  # some seconds
# of an argument, as of a width; the bits of a product or power are fewer, too
MOST_NUMBER = 1 << 24
MOST_NODES = 1 << 15  # of a template
_PLACE = 64  # characters that a value counts as which is no text: about the time that it takes
# the work of an item that is compared, a node that is run, an item given to a filter
_ITEM, _NODE, _PASSED = (16, 64, 256)
_MOST_INDENT = 64
_PRINTED = (str, int, float, type(None), jinja2.Undefined)
_CONTAINERS = (dict, list, tuple, set)
_BINOPS = ("+", "*", "**", "%")
_LONG_NUMBER = re.compile(r"\d{8}")
_PASSING = (
    "map",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "batch",
    "slice",
    "unique",
    "list",
    "sum",
    "join",
    "sort",
    "min",
    "max",
    "groupby",
)
"""Filters that look at each item of what they are given."""
_SHALLOW = (
    "length",
    "count",
    "first",
    "last",
    "list",
    "map",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "batch",
    "slice",
    "items",
    "default",
    "d",
    "attr",
    "reverse",
    "safe",
)
"""Filters that look at nothing of what the items hold. Others compare them, or take a value for its
text."""
_BY_WORDS = ("title", "wordcount", "striptags", "urlize")


class TemplateLimit(Exception):
    """A template does more than it may, or prints what is no value."""


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates count what they do; `begin` begins with nothing counted."""

    intercepted_binops = frozenset(_BINOPS)

    def __init__(self, **options: Any):
        # folded while compiling, nothing would be counted
        super().__init__(**options, optimized=False, finalize=_finalize)
        self.begin()

    def limit(self) -> None:
        """Count what filters and tests are given and give."""
        for name, filter_ in self.filters.items():
            self.filters[name] = _counted(self, name, filter_)
        for name, test in self.tests.items():
            self.tests[name] = _counted_test(self, name, test)

    def begin(self) -> None:
        self._steps = self._characters = self._work = 0

    def step(self, nodes: int = 0) -> None:
        """Count one step, in which so many nodes are run."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise TemplateLimit
        self.work(_NODE * nodes)

    def characters(self, count: int) -> None:
        """Count some characters."""
        self._characters += count
        if self._characters > MOST_CHARACTERS:
            raise TemplateLimit

    def work(self, count: int) -> None:
        """Count some work."""
        self._work += count
        if self._work > MOST_WORK:
            raise TemplateLimit

    def whole(self, value: Any, indent: int = 0) -> int:
        """Count what a value is as text, all that it holds; how much that is. indent: of each value
        for each level."""
        before = self._characters
        self._whole(value, indent, 0)
        return self._characters - before

    def _whole(self, value: Any, indent: int, margin: int) -> None:
        if isinstance(value, str):
            self.characters(len(value) + margin)
            return
        self.characters(_PLACE + margin)
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self._whole(key, indent, margin)
                self._whole(inner, indent, margin + indent)
        elif isinstance(value, list | tuple | set):
            for inner in value:
                self._whole(inner, indent, margin + indent)

    def argument(self, value: Any) -> None:
        """Count an argument's own length; a number may not be large."""
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            raise TemplateLimit
        if isinstance(value, Sized):
            self.characters(len(value))

    def made(self, value: Any) -> Any:
        """A new list, dict or tuple, with all that those in it hold counted."""
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            if isinstance(inner, _CONTAINERS):
                self.whole(inner)
        return value

    def copied(self, value: Any) -> Any:
        """A slice, with what was copied counted."""
        if isinstance(value, Sized):
            self.work(len(value) * (1 if isinstance(value, str) else _ITEM))
        return value

    def looked_at(self, condition: Any, nodes: int) -> Any:
        """Whether a loop takes an item, by so many nodes."""
        self.work(_PASSED + _NODE * nodes)
        return condition

    def items(self, values: Iterable[Any]) -> Iterator[Any]:
        """The items, each counted when it is taken."""
        for item in values:
            self.work(_PASSED)
            yield item

    def searched(self, item: Any, where: Any) -> None:
        """Count the work of looking for an item."""
        if isinstance(where, str):
            self.work(len(where))
        elif isinstance(where, dict | set):
            self.held(item)
        elif isinstance(where, Sized):
            each = len(item) // 16 if isinstance(item, str) else 0
            self.work(len(where) * (_ITEM + each))
            if isinstance(item, _CONTAINERS):
                self.held(where)

    def compared(self, left: Any, right: Any) -> None:
        """Count the work of comparing two values."""
        if isinstance(left, str) and isinstance(right, str):
            self.work(min(len(left), len(right)))
        elif isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS):
            self.held(left if len(left) < len(right) else right)

    def held(self, value: Any) -> None:
        """Count the work of looking at all that a value holds."""
        self.work(len(value) if isinstance(value, str) else _ITEM)
        if isinstance(value, _CONTAINERS):
            for inner in (*value, *value.values()) if isinstance(value, dict) else value:
                self.held(inner)

    def cased(self, value: Any) -> None:
        """Count the work of looking at each character's case."""
        self.work(_ITEM * len(value) if isinstance(value, str) else 0)

    def compare(self, left: Any, *others: Any) -> bool:
        """left == right; left < right < more. others: operator and value in turn."""
        result: Any = left
        for operator, right in zip(others[::2], others[1::2], strict=True):
            (self.searched if operator in ("in", "notin") else self.compared)(left, right)
            result = _COMPARE[operator](left, right)
            if not result:
                break
            left = right
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        """obj[argument]"""
        if isinstance(argument, tuple):
            self.held(argument)
        return super().getitem(obj, argument)

    def as_one_text(self, *parts: Any) -> str:
        """a ~ b"""
        for part in parts:
            self.printed(part)
        return "".join(map(str, parts))

    def printed(self, value: Any) -> None:
        """Count what is printed. TemplateLimit for what is no value: its text may be an address in
        memory."""
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self.printed(key)
                self.printed(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                self.printed(inner)
        elif not isinstance(value, _PRINTED):
            raise TemplateLimit
        self.characters(len(value) if isinstance(value, str) else _PLACE)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """a + b, and what else makes much of little."""
        if operator == "*" and isinstance(left, int) and not isinstance(right, int):
            left, right = right, left
        if isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
            )
            if bits > 1 << 12:
                raise TemplateLimit
        elif operator == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
            self.characters(len(left) * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            self.formatted(left, right if isinstance(right, tuple) else (right,))
        else:
            for value in (left, right):
                if not isinstance(value, int):
                    self.argument(value)
        return super().call_binop(context, operator, left, right)

    def formatted(self, text: str, values: Iterable[Any]) -> None:
        """Count what formatting by a text makes of values."""
        if _LONG_NUMBER.search(text):
            raise TemplateLimit
        widths = sum(map(int, re.findall(r"\d+", text)))
        self.characters(len(text) + widths)
        longest = 0
        for value in values:
            self.printed(value)
            longest = max(longest, self.whole(value))
            if isinstance(value, int):
                self.characters(
                    min(abs(value), MOST_CHARACTERS) if "*" in text or "{:{" in text else 20
                )
        # each field may ask for the longest
        self.characters(max(0, text.count("{") + text.count("%") - 1) * longest)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call is a step; methods of strings are counted by what they give."""
        if getattr(obj, "__self__", None) is self:  # what `counting` put there
            return obj(*args)
        self.step()
        self.work(_PASSED * (len(args) + len(kwargs)))
        for value in (*args, *kwargs.values()):
            self.argument(value)
        held = [value for value in (*args, *kwargs.values()) if isinstance(value, _CONTAINERS)]
        if len(held) > 1 or not isinstance(obj, jinja2.runtime.Macro):
            for value in held:
                self.whole(value)
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps format
        of = getattr(method, "__self__", None)
        if isinstance(of, str):
            args = self._method(of, method.__name__, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        # nothing of theirs is counted, and a template prints none
        if isinstance(result, bytes | bytearray):
            raise TemplateLimit
        if isinstance(result, str | list | tuple):
            self.characters(len(result))
        elif isinstance(result, dict):
            self.made(result)
        return result

    def _method(
        self, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Count what a method of a text makes; its arguments, an iterator as a list."""
        self.characters(len(text))
        if name in ("format", "format_map"):
            self.formatted(text, (*args, *kwargs.values()))
        elif (
            name == "replace" and len(args) > 1 and all(isinstance(part, str) for part in args[:2])
        ):
            self.characters(text.count(args[0]) * len(args[1]))
        elif name == "join" and args:
            if isinstance(args[0], Iterator):
                args = (list(self.items(args[0])),)
                self.whole(args[0])
            elif isinstance(args[0], str):
                self.whole(args[0])
            self.characters(len(text) * (len(args[0]) if isinstance(args[0], Sized) else 0))
        elif name == "expandtabs":
            self.characters(
                text.count("\t") * next((size for size in (*args, *kwargs.values())), 8)
            )
        elif name in ("ljust", "rjust", "center", "zfill"):
            self.characters(args[0] if args and isinstance(args[0], int) else 0)
        elif name in ("split", "rsplit", "splitlines"):
            self.characters(len(text))
        elif name == "translate" and args and isinstance(args[0], Mapping):
            longest = max((len(new) for new in args[0].values() if isinstance(new, str)), default=1)
            self.characters(len(text) * longest)
        elif name == "translate":
            raise TemplateLimit
        return args


# with a context nothing is printed while compiling, where nothing would be counted
@jinja2.pass_context
def _finalize(context: jinja2.runtime.Context, value: Any) -> Any:
    environment: Any = context.environment
    environment.printed(value)
    return value


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda left, right: left == right,
    "ne": lambda left, right: left != right,
    "lt": lambda left, right: left < right,
    "lteq": lambda left, right: left <= right,
    "gt": lambda left, right: left > right,
    "gteq": lambda left, right: left >= right,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


def _counted(
    environment: LimitedEnvironment, name: str, filter_: Callable[..., Any]
) -> Callable[..., Any]:
    passed = 1 if getattr(filter_, "jinja_pass_arg", None) else 0

    @functools.wraps(filter_)
    def counted(*args: Any, **kwargs: Any) -> Any:
        environment.step()
        given = args[passed] if len(args) > passed else None
        if (
            name in _PASSING
            and isinstance(given, Iterable)
            and not (isinstance(given, Sized) and not len(given))
        ):
            items: Any = environment.items(given)
            if name == "join" or name not in _SHALLOW:  # they take all of them at once
                items = list(items)
            args = (*args[:passed], items, *args[passed + 1 :])
        values = [*args[passed:], *kwargs.values()]
        for value in values:
            if name not in _SHALLOW:
                environment.printed(value)
            environment.argument(value)
        if values:
            _made_by(environment, name, values[0], values[1:])
        result = filter_(*args, **kwargs)
        if isinstance(result, Iterator):
            result = environment.items(result)
            return map(environment.made, result) if name in ("batch", "slice") else result
        if not isinstance(result, int):
            environment.argument(result)
        return result

    return counted


def _made_by(environment: LimitedEnvironment, name: str, value: Any, others: list[Any]) -> None:
    """Count what a filter makes of a value, beyond what it is given."""
    numbers = [other for other in others if isinstance(other, int)]
    strings = [other for other in others if isinstance(other, str)]
    lines = value.count("\n") + 1 if isinstance(value, str) else 0
    if name in ("center", "indent"):
        environment.characters((sum(numbers) + sum(map(len, strings))) * lines)
    elif name == "format" and isinstance(value, str):
        environment.formatted(value, others)
    # a word is cut from its begin again and again
    elif name == "wordwrap" and isinstance(value, str):
        cuts = len(value) // max(numbers[0] if numbers else 79, 1)
        environment.characters((len(value) + sum(map(len, strings))) * cuts)
    elif (
        name == "replace"
        and isinstance(value, str)
        and len(others) > 1
        and isinstance(others[1], str)
    ):
        environment.characters(value.count(str(others[0])) * len(others[1]))
    elif name == "join" and others and isinstance(value, Sized):
        environment.characters(len(value) * len(str(others[0])))
    elif name == "tojson":
        if sum(numbers) > _MOST_INDENT or any(len(str(other)) > _MOST_INDENT for other in others):
            raise TemplateLimit
        environment.whole(value, _MOST_INDENT if strings else sum(numbers))
    elif name == "sum" and any(isinstance(other, _CONTAINERS) for other in others):
        environment.work(
            _ITEM * len(value) * sum(len(item) for item in value if isinstance(item, Sized))
        )
    elif name in ("batch", "slice"):
        environment.work(_NODE * sum(numbers))
    elif name in ("sort", "unique", "min", "max", "groupby", "dictsort") and isinstance(
        value, Sized
    ):
        environment.work(environment.whole(value) * len(value).bit_length())
    elif name in _BY_WORDS and isinstance(value, str):
        environment.characters(len(value) * 8)


def _counted_test(environment: LimitedEnvironment, name: str, test: Any) -> Any:
    """The tests that compare, search or look at a whole text; others as they are."""
    if name in ("lower", "upper"):
        look: Callable[..., Any] = environment.cased
    elif name == "in":
        look = environment.searched
    elif name in _COMPARING:
        look = environment.compared
    else:
        return test

    @functools.wraps(test)
    def counted(*values: Any) -> Any:
        look(*values)
        return test(*values)

    return counted


_COMPARING = {
    "eq",
    "==",
    "equalto",
    "ne",
    "!=",
    "lt",
    "<",
    "lessthan",
    "le",
    "<=",
    "gt",
    ">",
    "greaterthan",
    "ge",
    ">=",
}


def counting(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """The template with what counts at the begin of each loop's body, of each macro's and block's,
    where text of its own is written, and where values are compared, copied or put into new ones.

    TemplateLimit for one of more than MOST_NODES nodes.
    """
    if _nodes_of([tree]) > MOST_NODES:
        raise TemplateLimit

    def changed(node: jinja2.nodes.Node) -> None:
        nodes = _nodes_of(getattr(node, "body", []))
        tested = _nodes_of([node.test]) if isinstance(node, jinja2.nodes.For) and node.test else 0
        for field, value in node.iter_fields():
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, jinja2.nodes.Node):
                    changed(child)
            if isinstance(value, list):
                found: list[Any] = []
                for child in value:
                    if isinstance(child, jinja2.nodes.Output):
                        own = sum(
                            len(n.data)
                            for n in child.nodes
                            if isinstance(n, jinja2.nodes.TemplateData)
                        )
                        found += [jinja2.nodes.ExprStmt(_asked("characters", own))] if own else []
                    found.append(_as_call(child))
                setattr(node, field, found)
            else:
                setattr(node, field, _as_call(value))
        if isinstance(
            node,
            jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock | jinja2.nodes.Block,
        ):
            node.body.insert(0, jinja2.nodes.ExprStmt(_asked("step", nodes)))
        if isinstance(node, jinja2.nodes.For) and node.test:
            node.test = _asked("looked_at", node.test, tested)

    changed(tree)
    tree.set_lineno(1, override=False)
    return tree


def _nodes_of(nodes: Iterable[jinja2.nodes.Node]) -> int:
    return sum(1 + _nodes_of(node.iter_child_nodes()) for node in nodes)


def _asked(name: str, *values: Any) -> jinja2.nodes.Call:
    """A call of a method of the environment; values: nodes, or what is constant."""
    given = [
        value if isinstance(value, jinja2.nodes.Node) else jinja2.nodes.Const(value)
        for value in values
    ]
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), given, [], None, None)


def _as_call(node: Any) -> Any:
    """A part of a template as what counts and does the same."""
    call = None
    if isinstance(node, jinja2.nodes.Concat):
        call = _asked("as_one_text", *node.nodes)
    elif isinstance(node, jinja2.nodes.Compare):
        call = _asked(
            "compare",
            node.expr,
            *(part for operand in node.ops for part in (operand.op, operand.expr)),
        )
    elif isinstance(node, jinja2.nodes.List | jinja2.nodes.Dict | jinja2.nodes.Tuple):
        constant = all(isinstance(n, jinja2.nodes.Const | jinja2.nodes.Pair) for n in node.items)
        pairs = isinstance(node, jinja2.nodes.Dict) and any(
            not isinstance(p.value, jinja2.nodes.Const) for p in node.items
        )
        if (pairs or not constant) and getattr(node, "ctx", "load") == "load":
            call = _asked("made", node)
    elif isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice):
        call = _asked("copied", node)
    return node if call is None else call.set_lineno(node.lineno)
