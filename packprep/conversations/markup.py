"""Find where a message begins, from the text that the template writes between two messages.

```
made up     <|user|>⟨x⟩<|end|>↵<|assistant|>⟨y⟩<|end|>↵<|user|>⟨z⟩<|end|>↵
ends        user <|end|>↵   assistant <|end|>↵
heads       user <|user|>
prompt      <|assistant|>
a text      …⟨call⟩</call><|end|>↵<|user|>⟨2+2?⟩    the user's message begins before <|user|>
```
Made-up conversations show how a template ends and begins the messages of each role. The boundary
between two messages is found only if the head of the second message directly follows the end of the
first message. If the template inserts other text between them, the caller finds the boundary by
rendering the messages before it.

`Markup.answers` needs no placeholders. It applies if the strings of a conversation contain no
markup.
"""

import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import NamedTuple

FIRST_TAG = re.compile(r"[^>\]\n]+[>\]\n]?")
_OPEN_TAG = re.compile(r"[<\[][^>\]]*\Z")

Span = tuple[int, int, int]  # begin, end, number of the message


class Boundary(NamedTuple):
    """The start of a message in a text.

    Attributes:
        begin: Number of the text's characters before the message.
        answer: Number of the text's characters before the trained part of the message, or None if
            the message is not an assistant's.
    """

    begin: int
    answer: int | None


class Markup(NamedTuple):
    """The texts that a template writes around messages.

    Attributes:
        ends: Role → the texts that may end its messages, after the last string of the message. The
            end after a tool call may differ from the end after a content.
        heads: Role → the text that begins its messages, before the first string of the message.
        prompt: The generation prompt, or "" for a template without one.
        last_ends: The texts that may end an assistant's message if it is the last message.
    """

    ends: Mapping[str, Sequence[str]]
    heads: Mapping[str, str]
    prompt: str
    last_ends: Sequence[str] = ()

    def boundary(self, literal: str, previous_role: str, role: str) -> Boundary | None:
        """Return where a message begins in `literal`, or None if `literal` does not show it.

        Args:
            literal: The template's text between the last string of the previous message and the
                first string of the message.
            previous_role: Role of the previous message.
            role: Role of the message.
        """
        ends = self.ends.get(previous_role, ())
        if not ends:
            return None
        if role == "assistant":
            return self._boundary_of_answer(literal, ends, previous_role)
        head = self.heads.get(role, "")
        if not head.strip() or not literal.endswith(head):
            return None
        begin = len(literal) - len(head)
        return Boundary(begin, None) if _is_end(literal[:begin], ends) else None

    def _boundary_of_answer(
        self, literal: str, ends: Sequence[str], previous_role: str
    ) -> Boundary | None:
        """Return where an assistant's message begins in `literal`, or None if this is uncertain.

        After the generation prompt, the template may write more text before the first string.
        """
        if previous_role == "assistant":
            return None  # Some templates write no generation prompt after an answer.
        # Without a prompt, an answer starts after the end of the question.
        if not self.prompt:
            head = self.heads.get("assistant", "")
            end = literal.removesuffix(head)
            ends_question = literal.endswith(head) and end.strip() and end in ends
            return Boundary(len(end), len(end)) if ends_question else None
        tag = FIRST_TAG.match(self.prompt)
        # Two tags would make the start uncertain.
        if tag is None or literal.count(tag[0]) != 1:
            return None
        begin = literal.index(tag[0])
        count = shared_start(self.prompt, literal[begin:])
        if count is None or not _is_end(literal[:begin], ends):
            return None
        return Boundary(begin, begin + count)

    def answers(
        self, text: str, roles: Sequence[str], is_wanted: Sequence[bool], strings: str
    ) -> list[Span] | None:
        """Return the ranges of wanted answers in a text, or None if it does not show all of them.

        The text shows them if the complete prompt begins every assistant's message, and if no
        string may contain the markup.

        Args:
            text: The rendered text.
            roles: Role of each message.
            is_wanted: Whether each message is trained.
            strings: All strings that the template can read, joined.
        """
        is_sure = not _may_hold(strings, self.prompt)
        if not is_sure or text.count(self.prompt) != roles.count("assistant"):
            return None
        heads = {role: self.heads.get(role, "") for role in roles}
        unsure = {role for role, head in heads.items() if _may_hold(strings, head)}
        spans: list[Span] = []
        begin = 0
        for k, role in enumerate(roles):
            if role == "assistant":
                begin = text.index(self.prompt, begin) + len(self.prompt)
            if not is_wanted[k]:
                continue
            previous_role = roles[k - 1] if k else ""
            if (
                role != "assistant"
                or previous_role == "assistant"
                or previous_role not in self.ends
            ):
                return None
            # An answer ends before the head of the next message, or at the end of the text.
            end, ends = len(text), self.last_ends
            if k + 1 < len(roles):
                after, ends = roles[k + 1], self.ends.get(role, ())
                end = -1 if after in unsure else text.find(heads[after], begin)
            if end < 0 or not _is_end(
                text[begin:end], [end_text for end_text in ends if end_text.strip()]
            ):
                return None
            spans.append((begin, end, k))
        return spans

    def ends_answer(self, literal: str) -> bool:
        """Return whether `literal` ends an assistant's message that is the last message.

        `literal` is the text that the template writes after the last string of this message.
        """
        return _is_end(literal, self.last_ends)

    def asks(self, text: str, previous_role: str) -> bool:
        """Return whether a text ends with `prompt`, and before it with the end of a message.

        This end must be one of `ends` for the role `previous_role`.

        Args:
            text: The template's text of some messages, with the generation prompt.
            previous_role: Role of the last message.
        """
        expected = [end + self.prompt for end in self.ends.get(previous_role, ())]
        return any(ending.strip() and text.endswith(ending) for ending in expected)


def _may_hold(strings: str, markup: str) -> bool:
    """Return whether strings may contain the first tag of a markup. True for a markup without tag.

    A template may join two strings, so one half of the tag is enough.
    """
    tag = FIRST_TAG.match(markup)
    if tag is None:
        return True
    half = len(tag[0]) // 2
    return tag[0][:half] in strings or tag[0][half:] in strings


def _is_end(literal: str, ends: Sequence[str]) -> bool:
    """Return whether `literal` is one of `ends`, or finishes with one of them.

    If `literal` is longer than this end, only the rest of a tool call may precede the end. If the
    template had inserted another message, the end would occur twice, and the result is False.
    """
    return literal in ends or any(
        end.strip() and literal.endswith(end) and literal.count(end.strip()) == 1 for end in ends
    )


def shared_start(prompt: str, written: str) -> int | None:
    """Return how many leading characters `prompt` and `written` have in common.

    `prompt` is the generation prompt and `written` a message with its header. If they differ inside
    a tag, no character of this tag counts. If they differ inside a word, the prompt does not begin
    the message, and the result is None.
    """
    alike = commonprefix([prompt, written])
    tag = _OPEN_TAG.search(alike) if len(alike) < len(prompt) else None
    count = tag.start() if tag else len(alike)
    rests = prompt[count : count + 1], written[count : count + 1]
    return (
        count
        if all(not rest or rest in "<[" or rest.isspace() for rest in rests) or not rests[0]
        else None
    )
