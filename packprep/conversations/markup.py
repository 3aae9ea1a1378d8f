"""Find where messages begin by the template's own text between two messages.

```
made up     <|user|>⟨x⟩<|end|>↵<|assistant|>⟨y⟩<|end|>↵<|user|>⟨z⟩<|end|>↵
ends        user <|end|>↵   assistant <|end|>↵
heads       user <|user|>
prompt      <|assistant|>
a text      …⟨call⟩</call><|end|>↵<|user|>⟨2+2?⟩    the user's message begins before <|user|>
```
Made-up conversations show how a template ends a message of a role, and how it begins the next one.
A boundary counts only if the end of a message and the head of the next one are next to each other.
A template may insert other text between them. Then the caller renders the messages before the
boundary.
"""

import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import NamedTuple

FIRST_TAG = re.compile(r"[^>\]\n]+[>\]\n]?")
_OPEN_TAG = re.compile(r"[<\[][^>\]]*\Z")


class Boundary(NamedTuple):
    """The start of a message in the template's text before its first string.

    Attributes:
        begin: Number of characters before the message.
        answer: Number of characters before the trained part of an assistant's message, or None for
            other roles.
    """

    begin: int
    answer: int | None


class Markup(NamedTuple):
    """The texts that a template writes around messages.

    Attributes:
        ends: Role → the texts that may follow the last string of its message. They may differ after
            a content and after a call.
        heads: Role → the text before the first string of its message.
        prompt: The generation prompt, or "" for a template without one.
        last_ends: The texts after the last string of an assistant's message that ends the text.
    """

    ends: Mapping[str, Sequence[str]]
    heads: Mapping[str, str]
    prompt: str
    last_ends: Sequence[str] = ()

    def boundary(self, literal: str, before: str, role: str) -> Boundary | None:
        """Return where a message begins, or None if this text does not show it.

        Args:
            literal: The template's text between the last string of a message and the first string
                of the next one.
            before: Role of the first message.
            role: Role of the next message.
        """
        ends = self.ends.get(before, ())
        if not ends:
            return None
        if role == "assistant":
            return self._boundary_of_answer(literal, ends, before)
        head = self.heads.get(role, "")
        if not head.strip() or not literal.endswith(head):
            return None
        begin = len(literal) - len(head)
        return Boundary(begin, None) if _is_end(literal[:begin], ends) else None

    def _boundary_of_answer(
        self, literal: str, ends: Sequence[str], before: str
    ) -> Boundary | None:
        """Return where an assistant's message begins, or None if `literal` does not show it.

        The message may start with more text of the template than the generation prompt.
        """
        if before == "assistant":
            return None  # Some templates write no generation prompt after an answer.
        if not self.prompt:
            head = self.heads.get("assistant", "")
            end = literal.removesuffix(head)
            ends_question = literal.endswith(head) and end.strip() and end in ends
            return Boundary(len(end), len(end)) if ends_question else None
        tag = FIRST_TAG.match(self.prompt)
        if tag is None or literal.count(tag[0]) != 1:
            return None
        begin = literal.index(tag[0])
        count = shared_start(self.prompt, literal[begin:])
        if count is None or not _is_end(literal[:begin], ends):
            return None
        return Boundary(begin, begin + count)

    def ends_answer(self, literal: str) -> bool:
        """Return whether the text after the last string only ends an assistant's message."""
        return _is_end(literal, self.last_ends)

    def asks(self, text: str, before: str) -> bool:
        """Return whether a text ends with a known end of a message and this generation prompt.

        Args:
            text: The template's text of some messages, with the generation prompt.
            before: Role of the last message.
        """
        expected = [end + self.prompt for end in self.ends.get(before, ())]
        return any(ending.strip() and text.endswith(ending) for ending in expected)


def _is_end(literal: str, ends: Sequence[str]) -> bool:
    """Return whether a text ends a message, with nothing after this end.

    Before the end, there may only be the rest of a call. An inserted message would have an end of
    its own.
    """
    return literal in ends or any(
        end.strip() and literal.endswith(end) and literal.count(end.strip()) == 1 for end in ends
    )


def shared_start(prompt: str, written: str) -> int | None:
    """Return how many leading characters the generation prompt and a message share.

    The result is None if they differ inside a word, because then the prompt does not begin the
    message. A tag that differs is not shared, even where both begin with "<".
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
