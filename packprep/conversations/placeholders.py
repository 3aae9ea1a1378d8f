"""Find where the strings of messages are in the text that a chat template makes of them.

```
messages    user: 2+2?                        assistant: <think>easy</think>4     user: thanks
T           <|user|>2+2?<|end|>↵<|assistant|>4<|end|>↵<|user|>thanks<|end|>↵
T′          <|user|>⟨0⟩<|end|>↵<|assistant|>⟨2⟩<|end|>↵<|user|>⟨3⟩<|end|>↵
before 2    <|user|>⟨0⟩<|end|>↵<|assistant|><think>⟨1⟩</think>⟨2⟩<|end|>↵
```
T is the rendered text. T′ is the rendering of the messages with a placeholder in place of each
string. A placeholder is a text that does not occur in the messages. If T can be made from T′ by
replacing each placeholder with its string, the positions of the strings in T are known. The texts
between the placeholders are called literals. They are written by the template. The template may
change a string in the ways of `forms_of`, for example strip it.

In the example, the template leaves out the reasoning ⟨1⟩ in T′. The rendering of the messages
before message 2 ends in ⟨2⟩<|end|>↵, so message 2 begins after this text.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from packprep.conversations.chat_template import TemplateRefusal
from packprep.conversations.markup import FIRST_TAG, Boundary, Markup, shared_start

T = TypeVar("T")

SYSTEM = ("system", "developer")
"""Roles of instructions before the conversation."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
TAGS = re.compile(r"(\s*</?think>\s*)")  # Templates split a content at these tags.
_FIRST_NUMBER = 83_152_971 * 10**6
"""The first placeholder for an integer in the arguments of a tool call."""
_DIGITS = str(_FIRST_NUMBER)[:8]
# The pattern begins with a digit and not with the test before it, which is faster to search for.
_NUMBER = f"{_DIGITS[0]}(?<![0-9]{_DIGITS[0]}){_DIGITS[1:]}([0-9]{{6}})(?![0-9])"
_MOST_ENDS = 64  # maximum number of possible ends per string that `_fitted` tries


_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "i"}}}
_MADE_UP: Sequence[Sequence[Mapping[str, Any]]] = (
    [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 3, "xyzvwu", strict=True)
    ],
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "r"},
        {"role": "user", "content": "z"},
        {"role": "assistant", "content": "v", "reasoning_content": "s"},
    ],
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "o"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "system", "content": "t"},
        {"role": "assistant", "content": "z"},
    ],
)
"""Conversations that show what a template writes around messages."""


class Render(Protocol):
    """A function that calls `ChatTemplate.render` with fixed tools and variables."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        """Return the text of messages, with the generation prompt if `prompt` is true."""


class Remember(Protocol):
    """A function that calls `ChatTemplate.remembered`, and adds tools and variables to the key."""

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, or of an earlier call with the same key."""


class _End(NamedTuple):
    """The end of a rendered text.

    last   number of the last placeholder, -1 for none
    times  how often the text has this placeholder
    tail   the text after its last occurrence
    """

    last: int
    times: int
    tail: str


def free_characters(taken: Iterable[str], count: int) -> list[str]:
    """Return `count` of Unicode's noncharacters that occur in no text of `taken`.

    Raises:
        TemplateRefusal: If fewer than `count` noncharacters are free.
    """
    text, free = "".join(taken), list[str]()
    for character in map(chr, range(0xFDD0, 0xFDF0)):
        if character not in text:
            free.append(character)
            if len(free) == count:
                return free
    raise TemplateRefusal("the messages hold the noncharacters U+FDD0 to U+FDEF")


def attempted(do: Callable[[], T]) -> T | None:
    """Return the result of a function that renders, or None if the template fails.

    A template is code and may raise any error. MemoryError and TemplateLimit are not caught.
    """
    from packprep.conversations.template_limits import TemplateLimit

    try:
        return do()
    except (MemoryError, TemplateLimit):
        raise
    except Exception:
        return None


class Place(NamedTuple):
    """The position of a string in its message.

    key      "content", or one of THOUGHTS
    part     number of the content's part, or 0
    segment  number of the string in the part, as TAGS splits it
    """

    key: str
    part: int
    segment: int


class PlacedString(NamedTuple):
    """A string of a message, with its position in the text.

    place   the string's position in the message
    once    whether the text has the string exactly once per message that has it
    before  the end of the previous string in the text, of any message; 0 for the first string
    begin   the index in the text of the string's first character
    end     the index in the text after the string's last character
    after   the start of the next string in the text; the text's length for the last string
    """

    place: Place
    once: bool
    before: int
    begin: int
    end: int
    after: int


class _Places(NamedTuple):
    """The start of a message, and the start of its trained characters.

    Attributes:
        literal: Index of the literal in which both starts are.
        begin: Number of the literal's characters before the message, or None if not certain.
        answer: Number of the literal's characters before the trained part of an assistant's
            message, or None if not certain.
    """

    literal: int
    begin: int | None
    answer: int | None


class ShownBoundary(NamedTuple):
    """The start of a message, found by comparing renderings.

    Attributes:
        literal: The template's text between the last string of the previous message and the first
            string of the message.
        before: Role of the previous message.
        role: Role of the message.
        boundary: Where the message begins in `literal`.
        asks: The generation prompt before an assistant's message, or None if not certain.
    """

    literal: str
    before: str
    role: str
    boundary: Boundary
    asks: str | None


class Placeholders:
    """Messages with placeholders for strings, and the positions of the strings in the text.

    Call `place` first, and ask for positions only if it returned True. Methods that render raise
    only the errors of a template's limits.
    """

    def __init__(
        self,
        render: Render,
        messages: Sequence[Mapping[str, Any]],
        marks: Sequence[str],
        replaced: Sequence[bool],
        calls: bool = True,
        blanks: bool = False,
        remember: Remember | None = None,
        texts: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ):
        """Replace strings of messages with placeholders.

        Args:
            render: Renders messages.
            messages: The messages.
            marks: Two characters that no message contains.
            replaced: For each message, whether to replace its strings.
            calls: Whether to replace the names in tool calls.
            blanks: Whether to replace blank strings, except blank strings of an assistant.
            remember: Caches renderings. None: messages are rendered every time.
            texts: Message number → the texts of its parts, for messages in which the parts were
                joined into one string.
        """
        self._given = list(messages)
        self._render, self._remember, self._texts = render, remember, texts
        self._blanks = blanks
        self._marks = marks
        # Placeholder 0 is for the content of `_another`.
        self._strings: list[str] = [""]
        # For each placeholder, the numbers of the messages that have it.
        self._owners: list[list[int]] = [[len(messages)]]
        # For each placeholder, its position in each of these messages.
        self._sources: list[list[Place | None]] = [[None]]
        self._same: dict[tuple[str, str, str], str] = {}  # role, key and string → placeholder
        self._roles = [message["role"] for message in messages]
        self.messages: list[Mapping[str, Any]] = [
            self._marked(k, message, calls) if replaced[k] else message
            for k, message in enumerate(messages)
        ]
        self._in_parts = any(isinstance(message.get("content"), list) for message in messages)
        self.replaces_all = all(replaced) and calls
        # Rendering this message after the first k messages shows how these messages end if
        # another message follows.
        self._another = {"role": "user", "content": self._written(f"{marks[0]}0{marks[1]}")}
        self._keys = [repr(message) for message in (*self.messages, self._another)]
        in_json = (re.escape(json.dumps(mark)[1:-1]) for mark in marks)
        patterns = "([0-9]+)".join(marks), "([0-9]+)".join(in_json), _NUMBER
        self._pattern = re.compile("|".join(patterns))
        self._before: dict[tuple[int, str], _End | None] = {}
        self._heads: dict[str, str] = {}
        self._known: dict[tuple[str, ...], _Places] = {}
        # The template's markup. The caller sets it once it is known to fit this conversation.
        self.markup: Markup | None = None

    @cached_property
    def _replaces_numbers(self) -> bool:
        """Return whether integers in the arguments of tool calls can be replaced.

        The numbers that replace them begin with 8 fixed digits, which must not occur in a message.
        """
        return _DIGITS not in repr(self._given)

    # Messages with placeholders

    def _marked(self, k: int, message: Mapping[str, Any], calls: bool) -> dict[str, Any]:
        changed = dict(message)
        for key in ("content", *THOUGHTS):
            if key in changed:
                changed[key] = self._content(k, changed[key], key)
        if message["role"] == "assistant" and isinstance(message.get("tool_calls"), list):
            changed["tool_calls"] = [self._call(k, call, calls) for call in message["tool_calls"]]
        return changed

    def _content(self, k: int, content: Any, key: str) -> Any:
        if isinstance(content, str):
            texts = self._texts.get(k, (content,)) if key == "content" else (content,)
            return "".join(self._marked_text(k, text, key, j) for j, text in enumerate(texts))
        if isinstance(content, list):
            return [
                (
                    {**content_part, "text": self._marked_text(k, content_part["text"], key, j)}
                    if isinstance(content_part, dict) and isinstance(content_part.get("text"), str)
                    else content_part
                )
                for j, content_part in enumerate(content)
            ]
        return content

    def _marked_text(self, k: int, text: str, key: str, part_number: int) -> str:
        """Return a text of message k, with placeholders for the strings between its tags."""
        return "".join(
            string
            if TAGS.fullmatch(string)
            else self._new(k, string, key, Place(key, part_number, i))
            for i, string in enumerate(TAGS.split(text))
        )

    def _call(self, k: int, call: Any, calls: bool) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(k, call["function"], calls)}
        changed = dict(call)
        if calls and isinstance(call.get("name"), str):
            changed["name"] = self._new(k, call["name"], "name")
        if "arguments" in call:
            changed["arguments"] = self._argument(k, call["arguments"])
        return changed

    def _argument(self, k: int, value: Any) -> Any:
        if isinstance(value, str):
            return self._new(k, value, "arguments")
        if type(value) is int and self._replaces_numbers:
            return _FIRST_NUMBER + int(self._new(k, str(value), "number")[1:-1])
        if isinstance(value, dict):
            return {key: self._argument(k, item) for key, item in value.items()}
        return [self._argument(k, item) for item in value] if isinstance(value, list) else value

    def _new(self, k: int, string: str, key: str, source: Place | None = None) -> str:
        """Return the placeholder for a string of message k, or a blank string unchanged.

        If equal strings have the same key in messages of the same role, they get the same
        placeholder, because some templates compare messages. But each string of an assistant gets a
        new placeholder.
        """
        if not string.strip() and not (self._blanks and self._roles[k] != "assistant"):
            return string  # Templates check whether a string is blank.
        same = self._roles[k], key, string
        if self._roles[k] != "assistant" and same in self._same:
            placeholder = self._same[same]
            self._owners[int(placeholder[1:-1])].append(k)
            self._sources[int(placeholder[1:-1])].append(source)
            return placeholder
        placeholder = self._same[same] = f"{self._marks[0]}{len(self._strings)}{self._marks[1]}"
        self._strings.append(string)
        self._owners.append([k])
        self._sources.append([source])
        return placeholder

    def _written(self, text: str) -> Any:
        """Return a text in the form that the contents of the messages have.

        If the content of some message is a list of parts, return a list with the text as its only
        part. Otherwise return the text.
        """
        return [{"type": "text", "text": text}] if self._in_parts else text

    # The text

    def place(self, text: str) -> bool:
        """Return whether `text` can be made from T′ by replacing the placeholders with strings.

        If so, store the positions of the strings. The other methods need them.
        """
        literals, numbers = self._first_messages(len(self.messages))
        ends, self.is_certain = _fitted(
            text, literals, [self._strings[number] for number in numbers]
        )
        owners = self._in_order(numbers)
        if ends is None or owners is None:
            return False
        self._text, self._literals, self._numbers, self._owner = text, literals, numbers, owners
        self._placed = ends
        self._starts = [0, *(end for _, end in ends)]  # of each literal in the text
        # message number → index in the text of its first placeholder
        self._shown = {owner: j for j, owner in reversed(list(enumerate(owners)))}
        self._first = {owner: ends[j][0] for owner, j in self._shown.items()}
        # For each message, the number of placeholders before it.
        self._gap = [bisect_left(owners, k) for k in range(len(self.messages))]
        self._where: dict[int, list[int]] = {}
        for j, number in enumerate(numbers):
            self._where.setdefault(number, []).append(j)
        return True

    def _split(self, rendered: str) -> tuple[list[str], list[int]]:
        """Split a rendered text, and return (literals, numbers of the placeholders).

        The text is literals[0], placeholder numbers[0], literals[1], …, literals[-1].
        """
        parts = self._pattern.split(rendered)
        # A placeholder matches one of three groups: a text, a text in JSON, or a number.
        groups = zip(parts[1::4], parts[2::4], parts[3::4], strict=True)
        digits = (raw or in_json or number for raw, in_json, number in groups)
        numbers = [int(string) if len(string) < 10 else -1 for string in digits]
        if any(not 0 <= number < len(self._strings) for number in numbers):
            raise TemplateRefusal("the messages hold the noncharacters U+FDD0 to U+FDEF")
        return parts[::4], numbers

    def _in_order(self, numbers: Sequence[int]) -> list[int] | None:
        """Return the message number of each placeholder in the text.

        Return None if the messages are out of order. If a template writes a system message inside
        another message, the placeholders of the system message count as placeholders of the other
        message.
        """
        seen: dict[int, int] = {}
        owners: list[int] = []
        last_before = [-1]  # the last message before each place, except system messages
        for number in numbers:
            # Occurrence i of a shared placeholder belongs to its i-th message.
            its_owners, times = self._owners[number], seen.get(number, 0)
            owners.append(its_owners[min(times, len(its_owners) - 1)])
            seen[number] = times + 1
            last_before.append(
                last_before[-1]
                if self._roles[owners[-1]] in SYSTEM
                else max(last_before[-1], owners[-1])
            )
        # A system message inside another message gets the number of that message.
        first_after = len(self.messages) - 1
        for j in range(len(owners) - 1, -1, -1):
            if self._roles[owners[j]] not in SYSTEM:
                first_after = owners[j]
            elif not last_before[j] <= owners[j] <= first_after:
                owners[j] = first_after
        return owners if all(a <= b for a, b in pairwise(owners)) else None

    def _end(self, k: int, then: str = "") -> _End | None:
        """Return the end of the text of the first k messages, or None if the template fails.

        Args:
            k: Number of messages.
            then: "prompt" to render the messages with the generation prompt, "user" to render them
                with a user's message after them, or "".
        """
        if (k, then) not in self._before:
            self._before[k, then] = attempted(partial(self._rendered_end, k, then))
        return self._before[k, then]

    def _rendered_end(self, k: int, then: str) -> _End | None:
        literals, numbers = self._first_messages(k, then)
        if then == "user":
            if numbers[-1:] != [0]:
                return None
            numbers = numbers[:-1]
        return _End(
            last_number := (numbers or [-1])[-1], numbers.count(last_number), literals[len(numbers)]
        )

    def _first_messages(self, k: int, then: str = "") -> tuple[list[str], list[int]]:
        """Return the literals and placeholder numbers of the first k messages.

        `then` is as in `_end`.
        """
        more_messages: list[Mapping[str, Any]] = [self._another] if then == "user" else []

        def split() -> tuple[list[str], list[int]]:
            return self._split(
                self._render(self.messages[:k] + more_messages, prompt=then == "prompt")
            )

        key = then, *self._marks, *self._keys[:k], *self._keys[-1:][: len(more_messages)]
        return self._remembered(key, split)

    def _remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        return make() if self._remember is None else self._remember(key, make)

    def prefix(self, k: int, prompt: bool = False) -> str:
        """Return the text of the first k messages.

        The messages are rendered with placeholders. Each placeholder is then replaced by its
        string, in the form that the string has in the whole text.

        Args:
            k: Number of messages.
            prompt: Whether to add the generation prompt.
        """
        literals, numbers = self._first_messages(k, "prompt" if prompt else "")
        parts, seen = [literals[0]], dict[int, int]()
        for number, literal in zip(numbers, literals[1:], strict=True):
            times = seen[number] = seen.get(number, 0) + 1
            where = self._where.get(number, ())
            if times <= len(where):
                begin, end = self._placed[where[times - 1]]
                parts.append(self._text[begin:end])
            else:
                parts.append(self._strings[number])
            parts.append(literal)
        return "".join(parts)

    def _behind(self, k: int, then: str = "") -> tuple[int, str] | None:
        """Return (number, tail) for the end of the first k messages.

        `number` is the number of the literal that follows their last string in the whole text.
        `tail` is the text that follows this string if only these messages are rendered. `then` is
        as in `_end`. The result is None if this rendering fails, or if its last string is not in
        the whole text.
        """
        end = self._end(k, then)
        if end is None or end.last < 0:
            return None if end is None else (0, end.tail)
        where = self._where.get(end.last, [])
        return (where[end.times - 1] + 1, end.tail) if len(where) >= end.times else None

    def head_of(self, role: str) -> str:
        """Return the text that a template writes before the content of a message with this role.

        Return "" if the text is uncertain.
        """
        if role not in self._heads:
            self._heads[role] = ""  # the result for calls during the search
            key = role, self._in_parts, *self._marks, *self._heads.items()
            self._heads |= self._remembered(key, partial(self._heads_with, role))
        return self._heads[role]

    def _heads_with(self, role: str) -> dict[str, str]:
        """Return role → result of `head_of`, for `role` and the roles of earlier calls."""
        head = attempted(partial(self._rendered_head, role)) or ""
        return {**self._heads, role: head}

    def _rendered_head(self, role: str) -> str:
        like: dict[str, Any] = {**self._another, "role": role, "content": self._written("x")}
        other_role = "user" if role == "assistant" else "assistant"
        messages = [like, {"role": other_role, "content": self._written("y")}, like]
        alike = Placeholders(
            self._render, messages, self._marks, [True] * 3, remember=self._remember
        )
        alike._heads = self._heads
        text = self._render(messages)
        begin = alike.begins().get(2) if alike.place(text) else None
        return "" if begin is None else text[begin : alike.said(2)]

    @cached_property
    def asks(self) -> str:
        """Return the generation prompt, or "" if it is uncertain."""
        other_prompt = ""  # a prompt that replaces the end of a text
        for k in range(1, len(self.messages) + 1):
            end, asked = self._end(k), self._end(k, "prompt")
            if end is None or asked is None or end[:2] != asked[:2] or end == asked:
                continue
            if asked.tail.startswith(end.tail):
                return asked.tail[len(end.tail) :]
            other_prompt = other_prompt or asked.tail[shared_start(asked.tail, end.tail) or 0 :]
        return other_prompt

    def boundary_by_markup(self, k: int) -> Boundary | None:
        """Return where message k begins in the text, or None if the markup does not show it.

        No messages are rendered.
        """
        gap, owners = self._gap[k], self._owner
        # The start of an answer is found from the string before the gap, and the start of another
        # message from the string after the gap.
        if self._roles[k] == "assistant":
            is_shown = gap > 0 and owners[gap - 1] == k - 1
        else:
            is_shown = gap < len(owners) and owners[gap] == k
        if self.markup is None or not k or not is_shown:
            return None
        boundary = self.markup.boundary(self._literals[gap], self._roles[k - 1], self._roles[k])
        if boundary is None:
            return None
        start = self._starts[gap]
        return Boundary(
            start + boundary.begin, None if boundary.answer is None else start + boundary.answer
        )

    def text_after(self, k: int) -> str | None:
        """Return the text after the last of all strings, or None if message k does not have it."""
        return self._literals[-1] if self._owner and self._owner[-1] == k else None

    def shown_boundary(self, k: int) -> "ShownBoundary | None":
        """Compare renderings to find where message k begins. Return None if it is uncertain."""
        number, begin, answer = self._looked_up(k)
        is_answer = self._roles[k] == "assistant"
        if (
            not self._is_between(k)
            or number != self._gap[k]
            or begin is None
            or (answer is None) == is_answer
        ):
            return None
        return ShownBoundary(
            self._literals[number],
            self._roles[k - 1],
            self._roles[k],
            Boundary(begin, answer),
            self._asks_after(k) if is_answer else None,
        )

    def _is_between(self, k: int) -> bool:
        """Return whether a single literal separates the strings of messages k − 1 and k."""
        gap, owners = self._gap[k], self._owner
        return 0 < gap < len(owners) and owners[gap - 1] == k - 1 and owners[gap] == k

    def _places(self, k: int) -> _Places:
        """Return where message k begins, and where its trained characters begin."""
        gap = self._gap[k]
        if shown := self.boundary_by_markup(k):
            start, answer = self._starts[gap], shown.answer
            return _Places(gap, shown.begin - start, None if answer is None else answer - start)
        if not self._is_between(k):
            return self._looked_up(k)
        # The same text between two placeholders is analysed once, so that a long conversation is
        # rendered only a few times.
        alike = (
            self._literals[gap],
            self._roles[k - 1],
            self._roles[k],
            str("tool_calls" in self.messages[k - 1]),
        )
        if alike in self._known:
            return self._known[alike]._replace(literal=gap)
        places = self._looked_up(k)
        if places.literal == gap:
            self._known[alike] = places
        return places

    def _looked_up(self, k: int) -> _Places:
        if k == 0:
            return self._first_places()
        number, begin = self._boundary(k)
        if begin is None or self._roles[k] != "assistant":
            return _Places(number, begin, None)
        asks = self._asks_after(k)
        if asks is None and not (asks := self.asks):
            return _Places(number, begin, None)
        common = shared_start(asks, self._literals[number][begin:])
        return _Places(number, begin, None if common is None else begin + common)

    def _asks_after(self, k: int) -> str | None:
        """Return the generation prompt after the first k messages, or None if uncertain."""
        alone, asked = self._behind(k), self._behind(k, "prompt")
        if alone and asked and alone[0] == asked[0] and asked[1].startswith(alone[1]):
            return asked[1].removeprefix(alone[1])
        return None

    def _boundary(self, k: int) -> tuple[int, int | None]:
        """Return (literal, begin) for the start of message k.

        `literal` is the number of the literal in which message k begins. `begin` is the number of
        the literal's characters before message k, or None if it is uncertain.
        """
        boundary = None
        # Some templates end the last message differently, and end it like the others before a
        # generation prompt or a further message.
        for then in ("", "prompt", "user"):
            end = self._behind(k, then)
            head = {"": "", "prompt": self.asks, "user": self.head_of("user")}[then] if end else ""
            if end is None or bool(head) != bool(then) or not end[1].endswith(head):
                continue
            tail = end[1].removesuffix(head)
            # Some templates drop the last content before a generation prompt, and end earlier.
            if end[0] > self._shown.get(k - 1, -1) and self._literals[end[0]].startswith(tail):
                boundary = boundary or (end[0], len(tail))
                # Some templates leave out an empty last message, and end as without it.
                if k - 1 in self._shown or end != self._behind(k - 1, then):
                    return end[0], len(tail)
        return boundary or (self._gap[k], None)

    def _first_places(self) -> _Places:
        """Return the result of `_places` for message 0, which has no messages before it."""
        literal, alone = self._literals[0], self._behind(0)
        begin = len(alone[1]) if alone and alone[0] == 0 and literal.startswith(alone[1]) else 0
        answer = None
        if self._roles[0] == "assistant" and self.asks:
            tag = FIRST_TAG.match(self.asks)
            tag_begin = literal.rfind(tag[0], begin) if tag else -1
            common = shared_start(self.asks, literal[tag_begin:]) if tag_begin >= 0 else None
            answer = None if common is None else tag_begin + common
        elif self._roles[0] == "assistant" and self._shown.get(0) == 0:
            head = self._unasked_head()
            answer = (
                None if head is None or not literal.endswith(head) else len(literal) - len(head)
            )
        return _Places(0, begin, answer)

    def _unasked_head(self) -> str | None:
        """Return the trained text that precedes the first string in an assistant's messages.

        It is read from an assistant's message after message 0. Return None if there is no such
        message with a known start.
        """
        for k in (k for k in self._shown if k and self._roles[k] == "assistant"):
            literal, _, answer = self._places(k)
            if answer is not None:
                return self._literals[literal][answer:]
        return None

    def begins(self) -> dict[int, int]:
        """Return message number → index of its first character, for messages after the first.

        Messages with an uncertain start are missing.
        """
        begins_by_message: dict[int, int] = {}
        heads: dict[str, set[str]] = {}  # role → the text before the first string of its messages
        for k in range(1, len(self.messages)):
            literal, begin, _ = self._places(k)
            if begin is not None and (
                begin_index := self._starts[literal] + begin
            ) <= self._first.get(k, begin_index):
                begins_by_message[k] = begin_index
                if literal == self._gap[k] and k in self._first:
                    heads.setdefault(self._roles[k], set()).add(self._literals[literal][begin:])
        for k in self._first.keys() - begins_by_message.keys() - {0}:
            # The messages before message k may end differently if they are rendered without it.
            # In this case, other messages with the role of message k show how it begins.
            head = heads.get(self._roles[k], set())
            if (
                len(head) == 1
                and (own_head := next(iter(head))).strip()
                and self._literals[self._gap[k]].endswith(own_head)
            ):
                begins_by_message[k] = self._first[k] - len(own_head)
        return dict(sorted(begins_by_message.items()))

    def answer(self, k: int) -> int | None:
        """Return the index in the text at which the trained characters of message k begin.

        Return None if the index is uncertain. Message k must be an assistant's.
        """
        literal, _, answer = self._places(k)
        return None if answer is None else self._starts[literal] + answer

    def said(self, k: int) -> int | None:
        """Return where message k's first string starts in the text, or None without a string."""
        return self._first.get(k)

    @cached_property
    def strings(self) -> dict[int, list[PlacedString]]:
        """Return message number → the strings of its content and reasoning, in the text's order."""
        strings_by_message: dict[int, list[PlacedString]] = {}
        text_end = len(self._text)
        for number, where in self._where.items():
            owners = self._owners[number]
            for i, j in enumerate(where):
                owner_index = min(i, len(owners) - 1)
                source = self._sources[number][owner_index]
                if source is not None:
                    begin_after = self._placed[j + 1][0] if j + 1 < len(self._placed) else text_end
                    end_before = self._placed[j - 1][1] if j else 0
                    placed = PlacedString(
                        source, len(where) == len(owners), end_before, *self._placed[j], begin_after
                    )
                    strings_by_message.setdefault(owners[owner_index], []).append(placed)
        return {
            k: sorted(strings, key=lambda placed: placed.begin)
            for k, strings in strings_by_message.items()
        }


def find_markup(render: Render, source: str) -> Markup | None:
    """Render made-up conversations, and return the texts that the template writes around messages.

    Return None if the renderings do not show these texts. A role is left out of `ends` if,
    after a message of this role, the markup would give another boundary than the renderings.

    Args:
        render: Renders messages without tools.
        source: The template's source.
    """
    marks = free_characters([source], 2)
    prompts: list[str | None] = []
    ends: dict[str, list[str]] = {}
    heads: dict[str, str] = {}
    last_ends: list[str] = []
    shown: list[ShownBoundary] = []
    # Each made-up conversation shows the template's text between several roles.
    for messages in _MADE_UP:
        made_up = Placeholders(render, messages, marks, [True] * len(messages))
        text = attempted(partial(render, messages))
        if text is None or not attempted(partial(made_up.place, text)):
            continue
        boundaries = [made_up.shown_boundary(k) for k in range(1, len(messages))]
        if not all(boundaries):
            continue  # For example, the template does not write calls.
        asked = {boundary.asks for boundary in boundaries if boundary and boundary.asks is not None}
        # A template without a prompt gives "", and an uncertain prompt gives None.
        prompts.append("" if asked == {""} else made_up.asks or None)
        # A template may end the last message differently.
        if messages[-1]["role"] == "assistant":
            last_ends.append(made_up.text_after(len(messages) - 1) or "")
        for boundary in filter(None, boundaries):
            shown.append(boundary)
            literal, begin = boundary.literal, boundary.boundary.begin
            of_role = ends.setdefault(boundary.before, [])
            of_role += [literal[:begin]] if literal[:begin] not in of_role else []
            heads.setdefault(boundary.role, literal[begin:])
    # Without a certain prompt, no answer can be found. The first conversation that the template
    # accepts gives the prompt. Other conversations may have another prompt, so `Markup.asks` must
    # confirm it for each conversation.
    if not prompts or prompts[0] is None:
        return None
    markup = Markup(ends, heads, prompts[0], last_ends)
    # The collected texts must reproduce each boundary that the renderings showed.
    wrong_roles = {
        boundary.before
        for boundary in shown
        if boundary.asks not in (None, markup.prompt)
        or markup.boundary(boundary.literal, boundary.before, boundary.role)
        not in (None, boundary.boundary)
    }
    return markup._replace(ends={role: ends[role] for role in ends if role not in wrong_roles})


def _fitted(
    text: str, literals: Sequence[str], strings: Sequence[str]
) -> tuple[list[tuple[int, int]] | None, bool]:
    """Find the strings in a text that consists of literals[0], strings[0], literals[1], …

    Each string may have one of its forms (`forms_of`). Return the ranges (begin, end) of the
    strings, and whether only these ranges are possible. If the text does not consist of the
    literals and strings, the ranges are None.
    """
    if not text.startswith(literals[0]):
        return None, False
    # For each string: end of the literal after it → (begin, end) of the string.
    reached: list[dict[int, tuple[int, int]]] = []
    ends = [len(literals[0])]
    # For each string: the ends that several ranges of the string lead to.
    ambiguous_ends: list[set[int]] = []
    for string, literal in zip(strings, literals[1:], strict=True):
        range_by_end: dict[int, tuple[int, int]] = {}
        reached_again: set[int] = set()
        # A form in JSON that differs from the plain form has a backslash among these characters.
        is_escaped = any(text.find("\\", begin, begin + len(string)) >= 0 for begin in ends)
        forms = forms_of(string, is_escaped)
        # Several forms may fit, so all ends that were reached are followed.
        for begin in ends:
            for form in forms:
                end = begin + len(form)
                if text.startswith(form, begin) and text.startswith(literal, end):
                    known_range = range_by_end.setdefault(end + len(literal), (begin, end))
                    if known_range != (begin, end):
                        reached_again.add(end + len(literal))
        ends = list(range_by_end)[:_MOST_ENDS]
        reached.append(range_by_end)
        ambiguous_ends.append(reached_again)
    if len(text) not in ends:
        return None, False
    # Follow the ranges back from the end of the text.
    places, literal_end, is_certain = [], len(text), True
    for range_by_end, reached_again in zip(
        reversed(reached), reversed(ambiguous_ends), strict=True
    ):
        places.append(range_by_end[literal_end])
        is_certain = is_certain and literal_end not in reached_again
        literal_end = range_by_end[literal_end][0]
    return places[::-1], is_certain


def forms_of(string: str, in_json: bool = True) -> list[str]:
    """Return the forms that a string may have in the text: unchanged, stripped, in JSON, or empty.

    Args:
        string: The string.
        in_json: Whether to return the forms in JSON too.
    """
    core = string.strip()
    if core == string and not in_json:
        return [string, ""] if string else [""]
    core_begin = string.index(core)
    lead, tail = string[:core_begin], string[core_begin + len(core) :]
    # A template may strip all white space at an end, or only line feeds.
    begins, ends = (lead, lead.lstrip("\n"), ""), (tail, tail.rstrip("\n"), "")
    plain = list(dict.fromkeys(begin + core + end for begin in begins for end in ends))
    escaped = [
        json.dumps(form, ensure_ascii=only_ascii)[1:-1]
        for only_ascii in (False, True)
        for form in (plain if in_json else ())
    ]
    return list(dict.fromkeys([*plain, *escaped, ""]))
