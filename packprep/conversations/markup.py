"""Find where messages begin by the template's own text between two messages.

```
made up     <|user|>⟨x⟩<|end|>↵<|assistant|>⟨y⟩<|end|>↵<|user|>⟨z⟩<|end|>↵
ends        user <|end|>↵   assistant <|end|>↵
heads       user <|user|>
prompt      <|assistant|>
a text      …⟨call⟩</call><|end|>↵<|user|>⟨2+2?⟩    the user's message begins before <|user|>
```
A template writes every conversation by the same rules, so made-up conversations show how it ends a
message of a role, and how it begins the next one. A boundary counts only where both stand next to
each other. Otherwise the caller renders the messages before it.
"""

import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import NamedTuple

FIRST_TAG = re.compile(r"[^>\]\n]+[>\]\n]?")
_OPEN_TAG = re.compile(r"[<\[][^>\]]*\Z")


class Boundary(NamedTuple):
    """Where a message begins in the template's text before its first string.

    begin   number of characters before the message
    answer  number of characters before the trained part of an assistant's message, else None
    """

    begin: int
    answer: int | None


class Markup(NamedTuple):
    """The texts that a template writes around messages.

    ends    role → the texts after the last string of its message: after a content, after a call
    heads   role → the text before the first string of its message
    prompt  the generation prompt, "" for a template without one
    """

    ends: Mapping[str, Sequence[str]]
    heads: Mapping[str, str]
    prompt: str

    def boundary(self, literal: str, before: str, role: str) -> Boundary | None:
        """Return where a message begins, or None where this text does not show it.

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
            return self._boundary_of_answer(literal, ends[0], before)
        head = self.heads.get(role, "")
        # More text may stand before the end of a message, such as the end of a call.
        is_between = any(literal == end + head for end in ends) or (
            ends[0].strip() and literal.endswith(ends[0] + head)
        )
        return Boundary(len(literal) - len(head), None) if head.strip() and is_between else None

    def _boundary_of_answer(self, literal: str, end: str, before: str) -> Boundary | None:
        """Return where an assistant's message begins, which may open with more than the prompt."""
        if not self.prompt:
            is_between = end.strip() and literal == end + self.heads.get("assistant", "")
            return Boundary(len(end), len(end)) if is_between else None
        tag = FIRST_TAG.match(self.prompt)
        if tag is None or literal.count(end + tag[0]) != 1:
            return None
        if before == "assistant" and not end.strip():
            return None
        begin = literal.index(end + tag[0]) + len(end)
        count = shared_start(self.prompt, literal[begin:])
        return None if count is None else Boundary(begin, begin + count)


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
