"""Limit chat templates, which are foreign code and run on every conversation.

A template runs in Jinja's immutable sandbox, as in Transformers. Its steps (iterations of loops,
calls of macros) and characters (of output and of the results of operators) are counted. Seconds are
not counted, so that every machine rejects the same conversations. docs/promises.md lists what is
not covered.
"""

from collections.abc import Iterable, Mapping, Sized
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

MOST_STEPS = 1 << 17
MOST_CHARACTERS = 1 << 26
_MOST_BITS = 1 << 12
_PRINTABLE = (str, int, float, type(None), jinja2.Undefined)
_COUNT, _JOIN = "packprep: count_step", "packprep: join_values"
"""A Jinja test and a Jinja filter. Their names are no identifiers, so no template has the same."""
_FORMATS = {"format", "format_map"}
_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_" and name not in _FORMATS)
_DICT_NAMES = frozenset(dir(dict))
_LOOP_NUMBERS = {"index", "index0", "first", "depth", "depth0"}
"""Attributes of loops that do not read the next value, which may fail."""
_VALUES = {str, int, bool, dict, list}
_REPEATED = jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock | jinja2.nodes.Block


class TemplateLimit(Exception):
    """An error for a template that exceeds its limits, or prints a value that is not plain data.

    For example, the text of a function would have an address in memory.
    """


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment for templates that counts their steps and characters.

    The count starts at the last call of `begin`.
    """

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, **options: Any):
        # The optimizer would evaluate constant expressions without counting them.
        super().__init__(**options, optimized=False, finalize=_finalize)
        self._safe: dict[tuple[type, str], bool] = {}
        self.tests[_COUNT], self.filters[_JOIN] = self.count_step, self.join_values
        self.begin()

    def begin(self) -> None:
        """Set the counters to 0."""
        self._steps = self._characters = 0

    def counts(self) -> tuple[int, int]:
        """Return the numbers of steps and characters since `begin`."""
        return self._steps, self._characters

    def count_again(self, steps: int, characters: int) -> None:
        """Add the counts of an earlier rendering, if its cached text is used again.

        Raises:
            TemplateLimit: If a limit is exceeded.
        """
        self._steps += steps
        self.count_characters(characters)
        if self._steps > MOST_STEPS:
            raise TemplateLimit

    def count_step(self, _value: Any) -> bool:
        """Count an iteration or a call. Return True, because this method is a Jinja test."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise TemplateLimit
        return True

    def count_characters(self, count: int) -> None:
        """Count characters of a text, or items of a list."""
        self._characters += count
        if self._characters > MOST_CHARACTERS:
            raise TemplateLimit

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a template, macro or block."""
        texts = []
        for text in pieces:
            # This is `count_characters`, without a call for each text.
            self._characters += len(text)
            if self._characters > MOST_CHARACTERS:
                raise TemplateLimit
            texts.append(text)
        return "".join(texts)

    def join_values(self, *values: Any) -> str:
        """Evaluate `a ~ b`."""
        return self.concat(map(str, values))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Evaluate `obj.attribute` as the sandbox does.

        Most attributes in templates are keys of objects, methods of texts, numbers of loops, and
        values of namespaces. They need no check, and the sandbox's own checks take longer than all
        other parts of a rendering.
        """
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in _STR_METHODS:
            return getattr(obj, attribute)
        if type(obj) is LoopContext and attribute in _LOOP_NUMBERS:
            return getattr(obj, attribute)
        if type(obj) is Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, None)
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return the sandbox's answer, which depends only on the type of `obj` and on `attr`.

        It is cached, except for namespaces, because their attributes may come from documents.
        """
        if type(obj) is Namespace:
            return super().is_safe_attribute(obj, attr, value)
        key = type(obj), attr
        if key not in self._safe:
            self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return self._safe[key]

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluate `obj(…)` as the sandbox does, without its checks for methods of texts.

        The sandbox's method is not called, because another frame would lower the depth that
        recursive macros can reach.
        """
        is_method = type(obj) is BuiltinMethodType and type(obj.__self__) is str
        if is_method and obj.__name__ not in _FORMATS:
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return obj(*args, **kwargs)
        if not self.is_safe_callable(obj):
            raise jinja2.sandbox.SecurityError(f"{obj!r} is not safely callable")
        return context.call(obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluate `left operator right`, unless the result would be too large."""
        if operator == "+" and type(left) is str and type(right) is str:
            self.count_characters(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            # The result of ** has at most bits(left) · right bits.
            times = max(right, 0) if operator == "**" else 1
            if left.bit_length() * times + right.bit_length() > _MOST_BITS:
                raise TemplateLimit
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, Sized) and isinstance(times, int):
                self.count_characters(len(sequence) * max(times, 0))
        elif isinstance(left, Sized) and isinstance(right, Sized):
            self.count_characters(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


# With a context, Jinja calls this at run time even for constants.
@jinja2.pass_context
def _finalize(context: Any, value: Any) -> Any:
    if type(value) is not str:
        check_printable(value)
    return value


def check_printable(value: Any) -> None:
    """Raise TemplateLimit for a value with a text that may contain an address in memory."""
    if isinstance(value, _PRINTABLE):
        return
    if isinstance(value, Mapping):
        check_printable([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            check_printable(item)
    else:
        raise TemplateLimit


def with_counters(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """Return the parsed template with a counter in each loop, macro, block and `~`.

    The counters are a Jinja test and a Jinja filter, because the sandbox calls tests and filters
    without checks.
    """
    count = jinja2.nodes.Test(jinja2.nodes.Const(None), _COUNT, [], [], None, None)

    def changed(node: Any) -> Any:
        if not isinstance(node, jinja2.nodes.Node):
            return node
        for field, value in list(node.iter_fields()):
            new_value = (
                [changed(item) for item in value] if isinstance(value, list) else changed(value)
            )
            setattr(node, field, new_value)
        if isinstance(node, _REPEATED):
            node.body.insert(0, jinja2.nodes.ExprStmt(count))
        # The filter of a loop also runs for items that the loop skips.
        if isinstance(node, jinja2.nodes.For) and node.test:
            node.test = jinja2.nodes.And(count, node.test)
        if isinstance(node, jinja2.nodes.Concat):
            return jinja2.nodes.Filter(node.nodes[0], _JOIN, node.nodes[1:], [], None, None)
        return node

    return changed(tree).set_lineno(1, override=False)
