"""Which characters of a conversation's text are which message, and which of them are trained.

A template with {% generation %} blocks says itself what is trained. For others an assistant's turn is what rendering the
messages up to it adds to rendering those before it with the generation prompt: what a model will have to write where it is
asked to.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from packprep.documents.chat_template import TemplateRefusal

Render = Callable[..., str]  # `ChatTemplate.render` of a template and what it reads beside the messages

_ADVICE = "; a template with {% generation %} blocks would say itself what is trained"


class NotIncremental(Exception):
    """Rendering more messages changes what stood before them."""


def free_characters(taken: Iterable[str], count: int) -> list[str]:
    """So many of Unicode's noncharacters that none of some texts has. TemplateRefusal if there are not so many."""
    held = set().union(*map(set, taken))
    free = [c for c in map(chr, range(0xFDD0, 0xFDF0)) if c not in held]
    if len(free) < count:
        raise TemplateRefusal("the messages hold the noncharacters U+FDD0 to U+FDEF")
    return free[:count]


def beginnings(render: Render, messages: Sequence[dict[str, Any]], text: str) -> dict[int, int]:
    """Message → the character at which it begins, of those after the first where the text can be cut.

    No such place is where the messages before it cannot be rendered alone, or give something else alone, as under
    templates that write the system message into the user's.
    """
    from packprep.documents.template_limits import TemplateLimit

    begins: dict[int, int] = {}
    for k in range(1, len(messages)):
        try:
            before = render(messages[:k])
        except (MemoryError, TemplateLimit):
            raise
        except Exception:  # whatever it raises: here it only says that there is no place to cut
            continue
        if 0 < len(before) < len(text) and text.startswith(before):
            begins[k] = len(before)
    return begins


def spans_of_turns(
    render: Render, messages: Sequence[dict[str, Any]], text: str, begins: Mapping[int, int]
) -> list[tuple[int, int]]:
    spans = []
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = render(messages[:k], prompt=True)
        if k + 1 in begins:
            answered = text[: begins[k + 1]]
        else:
            answered = text if k == len(messages) - 1 else render(messages[: k + 1])
        if not answered.startswith(asked):
            raise NotIncremental(f"message {k} does not begin with what the template asks for it with{_ADVICE}")
        if not text.startswith(answered):
            raise NotIncremental(f"what follows message {k} changes what the template writes up to it{_ADVICE}")
        if len(asked) < len(answered):
            spans.append((len(asked), len(answered)))
    return spans


def spans_of_blocks(
    render: Render, messages: Sequence[dict[str, Any]], taken: Iterable[str]
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and what its {% generation %} blocks gave, found by characters around them that are not in `taken`."""
    opening, closing = free_characters(taken, 2)
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    size = depth = begin = 0
    for piece in re.split(f"([{opening}{closing}])", render(messages, around=(opening, closing))):
        if piece == opening:
            begin = size if depth == 0 else begin
            depth += 1
        elif piece == closing:
            depth -= 1
            if depth < 0:
                raise TemplateRefusal("{% endgeneration %} without its begin: the template cuts its own text")
            if depth == 0 and begin < size:
                spans.append((begin, size))
        else:
            pieces.append(piece)
            size += len(piece)
    if depth:
        raise TemplateRefusal("{% generation %} without its end: the template cuts its own text")
    return "".join(pieces), spans
