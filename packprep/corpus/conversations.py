"""Documents that say what of them is trained: `loss_spans` or `messages` → a text and its trained characters.

```
messages    user: 2+2?   assistant: 4
text        <|im_start|>user␊2+2?<|im_end|>␊<|im_start|>assistant␊4<|im_end|>␊
trained                                                           ^^^^^^^^^^^^     the turn and what closes it, not its header
boundaries                                  ^
```
A template with {% generation %} blocks says what is trained. For others an assistant's turn is what rendering the messages
up to it adds to rendering those before it with the generation prompt: what a model will have to write where it is asked to.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packprep.corpus.chat_templates import ChatTemplate, TemplateLimit, TemplateRefusal, compile_template, find_template
from packprep.errors import PackprepError, RecipeError

__all__ = ["MARK_REASONS", "MarkReader", "Marked", "find_template"]

# Why a document with loss_spans or messages can be rejected, beside the reasons that any document has.
MARK_REASONS = ("bad_loss_spans", "bad_messages", "template_error", "template_not_incremental")
LOSS_SPANS, MESSAGES = "loss_spans", "messages"
_ADVICE = "; a template with {% generation %} blocks would say itself what is trained"
MAX_SPANS = 1 << 16  # of one document
_MOST_SAID = 4096
SURROGATE = re.compile("[\ud800-\udfff]")

Problem = tuple[str, str]  # a reason and its detail


@dataclass(frozen=True)
class Marked:
    """A document's text, and what of it is trained.

    spans       ascending half-open ranges of characters that are trained, apart from one another
    boundaries  ascending: the characters at which messages after the first begin, as far as the template has such places
    system_end  characters of the leading system message and its dressing; 0: none
    chat        the special tokens in the text are the template's
    strings     of a chat: what of it is not the template's, in which a special token's text means no special token
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    boundaries: tuple[int, ...] = ()
    system_end: int = 0
    chat: bool = False
    strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MarkReader:
    """How documents with loss_spans or messages are read.

    template: of `find_template`; None if there is none
    """

    template: str | None

    def marked(self, text: str | None, loss_spans: Any, messages: Any) -> Marked | Problem:
        """A document of which loss_spans or messages is not None, None being what is not there; or why it cannot be used.

        Messages make the text: beside a text of its own, or loss_spans, it is not said which of them is meant, and
        either guess would train what nobody asked for. Raises RecipeError when messages have no template.
        """
        if messages is None:
            assert text is not None
            return _with_spans(text, loss_spans)
        if text is not None or loss_spans is not None:
            other = "a text" if text is not None else LOSS_SPANS
            return "bad_messages", (
                f"the document has {other}, too; take one of them away, or set another text_key, or "
                'documents.loss_spans = "ignore" for the text alone'
            )
        if problem := _problem_of(messages):
            return "bad_messages", problem
        # A Parquet or Arrow column gives every message every key: null is a key that is not there.
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if self.template is None:
            raise RecipeError(
                "a document has messages, and the tokenizer has no chat template: give one in documents.chat_template, "
                'or set documents.loss_spans = "ignore"'
            )
        return _rendered(compile_template(self.template), messages)


def _with_spans(text: str, spans: Any) -> Marked | Problem:
    """The characters inside any of the spans, in whatever order those stand, overlap, are empty or reach beyond the text."""
    if not isinstance(spans, list):
        return "bad_loss_spans", "a list of [begin, end] is wanted"
    if len(spans) > MAX_SPANS:
        return "bad_loss_spans", f"{len(spans)} entries; at most {MAX_SPANS}"
    ranges: list[tuple[int, int]] = []
    for k, span in enumerate(spans):
        if not isinstance(span, list) or len(span) not in (2, 3) or not all(type(bound) is int for bound in span[:2]):
            return "bad_loss_spans", f"entry {k} is not [begin, end] in whole numbers"
        if len(span) == 3 and (type(span[2]) not in (int, float) or span[2] != 1):
            return "bad_loss_spans", f"entry {k} has a weight, and weights other than 1 are not supported yet"
        begin, end = span[:2]
        if not 0 <= begin <= end:
            shown = f"[{begin}, {end}]" if max(abs(begin), abs(end)) < 1 << 63 else "of huge numbers"
            return "bad_loss_spans", f"entry {k} is {shown}; 0 <= begin <= end"
        if begin < min(end, len(text)):
            ranges.append((begin, min(end, len(text))))
    united: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if united and begin <= united[-1][1]:
            begin, last = united.pop()
            end = max(end, last)
        united.append((begin, end))
    return Marked(text, tuple(united))


def _problem_of(messages: Any) -> str:
    """What is wrong with messages; "" if nothing is."""
    if not isinstance(messages, list):
        return "a list of messages is wanted"
    for k, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"message {k} is not an object with a role and a content"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"message {k} has no {key} that is a string"
    if not any(message["role"] == "assistant" for message in messages):
        return "no message is the assistant's: nothing would be trained"
    return ""


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys too, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


class _NotIncremental(Exception):
    """Rendering more messages changes what stood before them."""


def _rendered(template: ChatTemplate, messages: Sequence[dict[str, Any]]) -> Marked | Problem:
    try:
        if template.marks_generation:
            text, spans = _spans_of_blocks(template, messages)
            begins = _beginnings(template, messages, text)
        else:
            text = template.render(messages)
            begins = _beginnings(template, messages, text)
            spans = _spans_of_turns(template, messages, text, begins)
    except (PackprepError, MemoryError):
        raise
    except _NotIncremental as error:
        return "template_not_incremental", str(error)
    except TemplateRefusal as error:
        return "template_error", f"the template says {ascii(str(error)[:_MOST_SAID])}"
    except TemplateLimit:
        return "template_error", "the template does more than it may at these messages, or prints what is no text"
    except Exception:
        # Of any class, for a template is code. Its message would depend on the versions of Python and Jinja.
        return "template_error", "the template failed at these messages"
    contents = [content for message in messages if (content := message["content"].strip())]
    if contents and not any(content in text for content in contents):
        # as templates for pictures do, which expect lists of parts and pass over strings
        return "template_error", "the template leaves every message's content out"
    if found := SURROGATE.search(text):
        return "lone_surrogate", f"character {found.start()} of the rendered text is {ascii(found[0])}"
    system_end = begins.get(1, 0) if messages[0]["role"] == "system" else 0
    if messages[0]["content"].strip() not in text[:system_end]:
        system_end = 0  # it stands in a later message
    boundaries = tuple(sorted(set(begins.values())))
    return Marked(text, tuple(spans), boundaries, system_end, True, tuple(_strings(messages)))


def _beginnings(template: ChatTemplate, messages: Sequence[dict[str, Any]], text: str) -> dict[int, int]:
    """Message → the character at which it begins, of those after the first where the text can be cut.

    No such place is where the messages before it cannot be rendered alone, or give something else alone, as under
    templates that write the system message into the user's.
    """
    begins: dict[int, int] = {}
    for k in range(1, len(messages)):
        try:
            before = template.render(messages[:k])
        except (MemoryError, TemplateLimit):
            raise
        except Exception:  # as in _rendered: here it only says that there is no place to cut
            continue
        if 0 < len(before) < len(text) and text.startswith(before):
            begins[k] = len(before)
    return begins


def _spans_of_turns(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], text: str, begins: Mapping[int, int]
) -> list[tuple[int, int]]:
    spans = []
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = template.render(messages[:k], prompt=True)
        if k + 1 in begins:
            answered = text[: begins[k + 1]]
        else:
            answered = text if k == len(messages) - 1 else template.render(messages[: k + 1])
        if not answered.startswith(asked):
            raise _NotIncremental(f"message {k} does not begin with what the template asks for it with{_ADVICE}")
        if not text.startswith(answered):
            raise _NotIncremental(f"what follows message {k} changes what the template writes up to it{_ADVICE}")
        if len(asked) < len(answered):
            spans.append((len(asked), len(answered)))
    return spans


def _spans_of_blocks(template: ChatTemplate, messages: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and what its {% generation %} blocks gave, found by characters around them that occur nowhere else."""
    taken = set(template.source).union(*map(set, _strings(messages)))
    free = [c for c in map(chr, range(0xFDD0, 0xFDF0)) if c not in taken]  # noncharacters of Unicode
    if len(free) < 2:
        raise TemplateRefusal("the messages hold all of the noncharacters U+FDD0 to U+FDEF")
    opening, closing = free[:2]
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    size = depth = begin = 0
    for piece in re.split(f"([{opening}{closing}])", template.render(messages, around=(opening, closing))):
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
