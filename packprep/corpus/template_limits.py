"""Jinja's sandbox with limits: a chat template is code from elsewhere, and a document one that it is run on.

Steps and characters are counted, never seconds, so that the same conversation is rejected everywhere. Counted are the
iterations of loops, calls, and the characters that are printed, joined or handed to a filter, whether they come to be in the
text or not.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from packprep.corpus.chat_templates import TemplateLimit

MOST_STEPS = 1 << 17
MOST_CHARACTERS = 1 << 26
MOST_NUMBER = 1 << 24  # of an argument, as of a width; the bits of a product or power are fewer, too
_DEEP = ("string", "tojson", "pprint", "join", "format", "e", "escape", "forceescape", "urlencode", "xmlattr")
_PRINTED = (str, int, float, type(None), jinja2.Undefined)
_BINOPS = ("+", "*", "**", "%")
_PLACE = 64  # characters that a value counts as which is no text: about the time that it takes
_LONG_NUMBER = re.compile(r"\d{8}")


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates count what they do; `begin` begins with nothing counted."""

    intercepted_binops = frozenset(_BINOPS)

    def __init__(self, **options: Any):
        super().__init__(
            **options, optimized=False, finalize=_finalize
        )  # folded while compiling, nothing would be counted
        self.begin()

    def limit_filters(self) -> None:
        """Count what filters are given and give."""
        for name, filter_ in self.filters.items():
            self.filters[name] = _counted(self, name, filter_)

    def begin(self) -> None:
        self._steps = self._characters = 0

    def step(self) -> None:
        """Count one step."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise TemplateLimit

    def characters(self, count: int) -> None:
        """Count some characters."""
        self._characters += count
        if self._characters > MOST_CHARACTERS:
            raise TemplateLimit

    def whole(self, value: Any) -> None:
        """Count what a value is as text."""
        if isinstance(value, str):
            self.characters(len(value))
            return
        self.characters(_PLACE)
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self.whole(key)
                self.whole(inner)
        elif isinstance(value, list | tuple | set):
            for inner in value:
                self.whole(inner)

    def argument(self, value: Any) -> None:
        """Count an argument's own length; a number may not be large."""
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            raise TemplateLimit
        if isinstance(value, str | list | tuple | dict | set):
            self.characters(len(value))

    def as_one_text(self, *parts: Any) -> str:
        """a ~ b"""
        for part in parts:
            self.printed(part)
        return "".join(map(str, parts))

    def printed(self, value: Any) -> None:
        """Count what is printed. TemplateLimit for what is no value: its text may be an address in memory."""
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
            bits = left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
            if bits > 1 << 12:
                raise TemplateLimit
        elif operator == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
            self.characters(len(left) * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            self._formatted(left, right if isinstance(right, tuple) else (right,))
        else:
            for value in (left, right):
                if not isinstance(value, int):
                    self.argument(value)
        return super().call_binop(context, operator, left, right)

    def _formatted(self, text: str, values: Iterable[Any]) -> None:
        if _LONG_NUMBER.search(text):
            raise TemplateLimit
        widths = sum(map(int, re.findall(r"\d+", text)))
        self.characters(len(text) + widths)
        for value in values:
            self.whole(value)
            if isinstance(value, int):
                self.characters(min(abs(value), MOST_CHARACTERS) if "*" in text or "{:{" in text else 20)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call is a step; methods of strings are counted by what they give."""
        self.step()
        for value in (*args, *kwargs.values()):
            self.argument(value)
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps format
        of = getattr(method, "__self__", None)
        if isinstance(of, str):
            self._method(of, method.__name__, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str | list | tuple):
            self.characters(len(result))
        return result

    def _method(self, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.characters(len(text))
        if name in ("format", "format_map"):
            self._formatted(text, (*args, *kwargs.values()))
        elif name == "replace" and len(args) > 1 and all(isinstance(part, str) for part in args[:2]):
            self.characters(text.count(args[0]) * len(args[1]))
        elif name == "join" and args:
            self.whole(args[0] if isinstance(args[0], list | tuple | dict) else "")
            self.characters(len(text) * (len(args[0]) if isinstance(args[0], list | tuple | dict | str) else 0))
        elif name == "expandtabs":
            self.characters(text.count("\t") * next((size for size in (*args, *kwargs.values())), 8))
        elif name in ("ljust", "rjust", "center", "zfill"):
            self.characters(args[0] if args and isinstance(args[0], int) else 0)


@jinja2.pass_environment
def _finalize(environment: LimitedEnvironment, value: Any) -> Any:
    environment.printed(value)
    return value


def _counted(environment: LimitedEnvironment, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    passed = 1 if getattr(filter_, "jinja_pass_arg", None) else 0

    @functools.wraps(filter_)
    def counted(*args: Any, **kwargs: Any) -> Any:
        environment.step()
        values = [*args[passed:], *kwargs.values()]
        for value in values:
            (environment.whole if name in _DEEP else environment.argument)(value)
            environment.argument(value)
        widths = [value for value in values if isinstance(value, int)]
        for text in values[:1]:
            lines = text.count("\n") + 1 if isinstance(text, str) else 0
            if name in ("center", "indent"):
                environment.characters(sum(widths) * lines)
            elif name == "format" and isinstance(text, str):
                environment._formatted(text, values[1:])
            elif name == "wordwrap" and isinstance(text, str):  # a word is cut from its begin again and again
                environment.characters(len(text) * (len(text) // max(widths[0] if widths else 79, 1)))
            elif name == "replace" and isinstance(text, str) and len(values) > 2 and isinstance(values[2], str):
                environment.characters(text.count(str(values[1])) * len(values[2]))
            elif name == "join" and len(values) > 1 and isinstance(text, list | tuple | dict | str):
                environment.characters(len(text) * len(str(values[1])))
            elif name == "tojson":
                indent = max([0, *widths])
                environment.characters(indent * 64)
        result = filter_(*args, **kwargs)
        if not isinstance(result, int):
            environment.argument(result)
        return result

    return counted


def counting(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """The template with what counts at the begin of each loop's body, of each macro's, and where text of its own is written."""

    def said(name: str, *args: int) -> jinja2.nodes.Node:
        attribute = jinja2.nodes.EnvironmentAttribute(name)
        return jinja2.nodes.ExprStmt(
            jinja2.nodes.Call(attribute, [jinja2.nodes.Const(a) for a in args], [], None, None)
        )

    def changed(node: jinja2.nodes.Node) -> None:
        for field, value in node.iter_fields():
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, jinja2.nodes.Node):
                    changed(child)
            if isinstance(value, list):
                found: list[Any] = []
                for child in value:
                    if isinstance(child, jinja2.nodes.Output):
                        own = sum(len(n.data) for n in child.nodes if isinstance(n, jinja2.nodes.TemplateData))
                        found += [said("characters", own)] if own else []
                    found.append(_as_call(child))
                setattr(node, field, found)
            else:
                setattr(node, field, _as_call(value))
        if isinstance(node, jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock):
            node.body.insert(0, said("step"))

    changed(tree)
    tree.set_lineno(1, override=False)
    return tree


def _as_call(node: Any) -> Any:
    if not isinstance(node, jinja2.nodes.Concat):
        return node
    call = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("as_one_text"), node.nodes, [], None, None)
    return call.set_lineno(node.lineno)
