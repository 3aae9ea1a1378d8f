"""Find the text and the trained characters of supervised documents.

```
messages    user: 2+2?   assistant: 4
text        <|im_start|>user↵2+2?<|im_end|>↵<|im_start|>assistant↵4<|im_end|>↵
trained                                                           ^^^^^^^^^^^^
boundaries                                  ^
```
The assistant's turn and the text that ends it are trained, without its header. A supervised
document has `loss_spans`, `messages`, a `weight` or `media`. `turns.py` finds the characters of
each message.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from packprep.conversations.chat_template import (
    ChatTemplate,
    LeftOut,
    NoTemplate,
    TemplateRefusal,
    compile_template,
)
from packprep.conversations.layouts import Dialogue, Problem, read_layout
from packprep.conversations.left_out import ignored_parts, strings_of
from packprep.conversations.media import (
    BAD_MEDIA,
    BadMedia,
    MediaPlace,
    read_media,
    slots_of,
)
from packprep.conversations.parts import UncertainPart, changed_ranges
from packprep.conversations.turns import (
    NotIncremental,
    Turns,
    dialogues_with_own_history,
    find_turns,
)
from packprep.errors import PackprepError
from packprep.recipe import DocumentKeys
from packprep.sources.formats import Batch, Decoders, Keep, Reject, Slice, read
from packprep.sources.formats.batch import MAX_DETAIL, MEDIA, SURROGATE, Supervision, large_text
from packprep.sources.formats.fields import Fields, bad_weight, weight_of, whole_number
from packprep.sources.slices import PlannedSource

T = TypeVar("T")
ASKING = ("user", "tool")
"""The roles of messages that an assistant answers."""
MAX_SPANS = 1 << 16  # maximum number of loss_spans of a document
_MOST_SAID = 4096
DEFAULTS = DocumentKeys()


@dataclass(frozen=True)
class Conversation:
    """The text of a supervised document, and its trained characters.

    Attributes:
        text: The text, or all texts of a document with `parts`.
        spans: Ascending half-open ranges of trained characters. Ranges touch only if their weights
            differ.
        boundaries: Ascending indices of the characters at which messages after the first begin.
            Messages with an uncertain start are missing.
        roles: The role of the first message and of the message at each boundary, or () if they are
            unknown.
        chat: Whether a chat template wrote the text. If so, special tokens in the text are real,
            except in `strings`.
        system_end: Number of characters of the leading system message and its markup, or 0.
        strings: The strings that come from messages. They must not contain special tokens.
        weights: The weight of each span, above 0, rounded to float32. () if all are 1.
        weight: The weight of the document. `weights` already include this factor.
        blocks: Ascending indices of the characters at which trained {% generation %} blocks begin.
        places: Media spans, in the text's order.
        limited: Whether the document limits what is trained. A document with only a weight may draw
            any task.
        whole: None, or a function that returns the conversation with boundaries, roles and
            system_end. They take time to find and are needed only if the document is cut.
        ignored: A function that describes the parts of the record that are not read or trained.
        history: Number of leading characters that repeat an earlier text of the same document.
        parts: One conversation per text, if the document has several texts, otherwise (). With
            parts, `spans` has the spans of all parts, each relative to the text of its part, and
            there are no boundaries.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    boundaries: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()
    system_end: int = 0
    chat: bool = False
    strings: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    weight: float = 1.0
    blocks: tuple[int, ...] = ()
    places: tuple[MediaPlace, ...] = ()
    limited: bool = True
    whole: Callable[[], "Conversation"] | None = field(default=None, compare=False)
    ignored: Callable[[], Sequence[str]] = field(default=tuple, compare=False)
    history: int = 0
    parts: tuple["Conversation", ...] = ()

    @property
    def trains_all(self) -> bool:
        """Return whether all of the text is trained, so that the starts of tokens do not matter."""
        return not self.chat and self.spans == ((0, len(self.text)),)

    @cached_property
    def slots(self) -> int:
        """Return the number of slots of the document's media spans."""
        return slots_of(self.places)


def supervise(
    batch: Batch, template: str | None, settings: DocumentKeys = DEFAULTS
) -> tuple[Batch, dict[int, Conversation]]:
    """Return a new batch with the text of each document, and the conversations of its documents.

    The second result maps document number in the new batch → conversation, for supervised
    documents. Documents that cannot be used are among the rejects of the new batch.

    Args:
        batch: A reader's batch.
        template: The result of `find_template`.
        settings: The recipe's table `documents`.

    Raises:
        RecipeError: If a document has messages, but there is no template.
    """
    if not batch.supervision:
        return batch, {}
    texts: list[str] = []
    used: list[int] = []
    rejects = list(batch.rejects)
    conversations: dict[int, Conversation] = {}
    for i, (text, position) in enumerate(zip(batch.texts, batch.positions.tolist(), strict=True)):
        if i in batch.supervision:
            document = conversation(batch.supervision[i], template, settings, with_boundaries=False)
            if isinstance(document, tuple):
                reason, detail = document
                rejects.append(Reject(int(batch.files[i]), position, reason, detail[:MAX_DETAIL]))
                continue
            text = document.text
            # Any other document has the weight 1 and is trained whole, like an unsupervised one.
            if document.limited or not document.spans or document.weights:
                conversations[len(texts)] = document
        texts.append(text)
        used.append(i)
    rejects.sort(key=lambda reject: reject.position)
    return Batch(texts, batch.files[used], batch.positions[used], rejects, {}), conversations


def read_supervised(
    work_range: Slice,
    source: PlannedSource,
    settings: DocumentKeys,
    template: str | None,
    keep: Keep | None = None,
    batch_bytes: int = 4 << 20,
    decoders: Decoders | None = None,
) -> Iterator[tuple[Batch, dict[int, Conversation]]]:
    """Yield the batches of a work range, with the conversations of supervised documents.

    Each pair is a result of `supervise` for a batch of `formats.read`. A batch with many media
    slots is yielded in several pairs.

    Args:
        work_range: The work range.
        source: The source.
        settings: The recipe's table `documents`, which may ignore supervision.
        template: The result of `find_template`.
        keep: As in `formats.read`.
        batch_bytes: As in `formats.read`.
        decoders: As in `formats.read`.
    """
    text_key, fields = source.source.text_key, None
    if settings.loss_spans == "use":
        fields = Fields.of(source.source, source.kinds)
    for batch in read(work_range, text_key, keep, batch_bytes, decoders, fields):
        if batch.supervision:
            yield from _with_few_slots(*supervise(batch, template, settings))
        else:
            yield batch, {}


MOST_SLOTS = 1 << 22
"""Maximum number of media slots in a batch, not counting its last document.

The number is limited because a few bytes of a record can ask for any number of slots.
"""


def _with_few_slots(
    batch: Batch, conversations: dict[int, Conversation]
) -> Iterator[tuple[Batch, dict[int, Conversation]]]:
    """Yield a batch with its conversations, in parts with about MOST_SLOTS media slots per part."""
    slots = np.zeros(len(batch.texts), np.int64)
    slots[[*conversations]] = [document.slots for document in conversations.values()]
    # A document belongs to the part of its first slot, so documents stay complete.
    part_numbers = (np.cumsum(slots) - slots) // MOST_SLOTS
    if not part_numbers.any():
        yield batch, conversations
        return
    rejects = batch.rejects
    for indices in np.split(
        np.arange(len(part_numbers)), np.flatnonzero(np.diff(part_numbers)) + 1
    ):
        begin, end = int(indices[0]), int(indices[-1]) + 1
        own_conversations = {
            i - begin: conversations[i] for i in range(begin, end) if i in conversations
        }
        yield (
            Batch(
                batch.texts[begin:end],
                batch.files[begin:end],
                batch.positions[begin:end],
                rejects,
                {},
            ),
            own_conversations,
        )
        # The rejects belong to the first part, so that each is counted once.
        rejects = []


def conversation(
    record: Supervision | Dialogue,
    template: str | None,
    settings: DocumentKeys = DEFAULTS,
    with_boundaries: bool = True,
) -> Conversation | Problem:
    """Return a document's text with its trained characters, or the reason of its reject.

    Args:
        record: A supervised record or a dialogue.
        template: The result of `find_template`.
        settings: The recipe's table `documents`.
        with_boundaries: Whether to find where messages begin. If false, the result may have the
            function `whole`, which finds the boundaries later.

    Raises:
        RecipeError: If the document has messages, but there is no template.
    """
    parsed_record = (
        read_layout(record, settings.trained_roles)
        if isinstance(record, Supervision) and record.layout
        else record
    )
    if isinstance(parsed_record, tuple):
        return parsed_record
    if isinstance(parsed_record, Supervision):
        return _with_media(parsed_record)
    # With this setting, weights depend on where messages begin, even in documents that are not cut.
    with_boundaries |= settings.loss_weighting == "turn"
    if settings.trained_turns != "each":
        return _of_dialogue(parsed_record, template, settings, with_boundaries)
    dialogues = _attempt(dialogues_with_own_history, parsed_record, template, settings)
    if isinstance(dialogues, tuple):
        return dialogues
    if len(dialogues) == 1:
        return _of_dialogue(dialogues[0], template, settings, with_boundaries)
    parts = []
    # Each text trains only new messages. Messages of the text before are history.
    for k, dialogue in enumerate(dialogues):
        known_count = len(dialogues[k - 1].messages) if k else 0
        text_part = _of_dialogue(dialogue, template, settings, True, known_count)
        if not isinstance(text_part, Conversation):
            return text_part
        if not text_part.spans:
            return "template_not_incremental", (
                f"it cannot be told what the template writes for message"
                f" {len(dialogue.messages) - 1}; a template with a {{% generation %}} block for"
                " each of its messages would say it"
            )
        parts.append(text_part)
    text = "".join(text_part.text for text_part in parts)
    if too_large := large_text(text):
        return too_large
    spans = tuple(span for text_part in parts for span in text_part.spans)
    weight = parts[0].weight
    ignored = parts[-1].ignored
    return Conversation(text, spans, weight=weight, chat=True, ignored=ignored, parts=tuple(parts))


def _of_dialogue(
    dialogue: Dialogue,
    template: str | None,
    settings: DocumentKeys,
    with_boundaries: bool,
    known_count: int = 0,
) -> Conversation | Problem:
    """Return a dialogue's text with its trained characters, or the reason of a reject.

    Args:
        dialogue: The dialogue.
        template: The result of `find_template`.
        settings: The recipe's table `documents`.
        with_boundaries: As in `conversation`.
        known_count: Number of leading messages that are also in an earlier text of the same
            document.
    """
    turns = rendered_turns(dialogue, template, settings, with_boundaries)
    if not isinstance(turns, Turns):
        return turns
    assert template is not None
    compiled = compile_template(template, settings.template_date)
    rendered = _rendered(turns, dialogue, settings, compiled)
    if not isinstance(rendered, Conversation):
        return rendered
    if known_count:
        # If the start of the first new message is unknown, the history ends where training begins.
        begins = [begin for begin, *_ in turns.trained]
        begins += [change.begin for of_list in turns.changes for change in of_list if change.train]
        first_trained = min(begins, default=len(turns.text))
        rendered = replace(rendered, history=turns.begins.get(known_count, first_trained))
    if with_boundaries or turns.begins:
        return rendered

    # Starts of messages take time to find, so they are found only for a cut.
    def whole() -> Conversation:
        with_begins = rendered_turns(dialogue, template, settings)
        if not isinstance(with_begins, Turns):  # The starts of messages are not certain.
            return replace(rendered, whole=None)
        rendered_again = _rendered(with_begins, dialogue, settings, compiled)
        return (
            rendered_again
            if isinstance(rendered_again, Conversation)
            else replace(rendered, whole=None)
        )

    return replace(rendered, whole=whole)


def weighted(text: str, ranges: Iterable[tuple[int, int, float]], **fields: Any) -> Conversation:
    """Return a `Conversation` with this text, in which the given ranges of characters are trained.

    Ranges of weight 0 are untrained. Touching ranges of the same weight are merged.

    Args:
        text: The text.
        ranges: (begin, end, weight), ascending and not overlapping.
        fields: Other attributes of the `Conversation`.
    """
    spans: list[tuple[int, int]] = []
    weights: list[float] = []
    for begin, end, weight in ranges:
        rounded_weight = float(np.float32(weight))
        if begin == end or rounded_weight == 0:
            continue
        if spans and spans[-1][1] == begin and weights[-1] == rounded_weight:
            begin, _ = spans.pop()
            weights.pop()
        spans.append((begin, end))
        weights.append(rounded_weight)
    span_weights = () if all(weight == 1 for weight in weights) else tuple(weights)
    return Conversation(text, tuple(spans), weights=span_weights, **fields)


def _with_media(supervision: Supervision) -> Conversation | Problem:
    """Return a `Conversation` for a text with media spans or a weight, or the reason of a reject.

    If the text has loss_spans, only they are trained. Otherwise all characters are trained.
    """
    assert supervision.text is not None
    try:
        places = (
            read_media(supervision.record.get(MEDIA), supervision.text, supervision.kinds)
            if supervision.kinds
            else ()
        )
    except BadMedia as bad:
        return BAD_MEDIA, str(bad)
    weight = supervision.record.get("weight")
    if supervision.loss_spans is None and supervision.text and weight is None:
        return Conversation(supervision.text, ((0, len(supervision.text)),), places=places)
    of_document = 1.0 if weight is None else weight_of(weight)
    if of_document is None:
        return bad_weight(weight)
    if supervision.loss_spans is None:
        ranges = [(0, len(supervision.text), of_document)]
        limited = bool(places)
        return weighted(
            supervision.text, ranges, weight=of_document, places=places, limited=limited
        )
    return _with_spans(supervision.text, supervision.loss_spans, of_document, places)


def _with_spans(
    text: str, spans: Any, of_document: float, places: tuple[MediaPlace, ...] = ()
) -> Conversation | Problem:
    """Return a `Conversation` for a text with loss_spans, or the reason of a reject.

    Spans may be unordered, overlap, be empty or reach beyond the end of the text. But the document
    is rejected if spans of different weights overlap.

    Args:
        text: The text.
        spans: The record's loss_spans.
        of_document: The document's weight, which multiplies the weights of spans.
        places: Media spans.
    """
    if not isinstance(spans, list):
        return "bad_loss_spans", "a list of [begin, end] is wanted"
    if len(spans) > MAX_SPANS:
        return "bad_loss_spans", f"{len(spans)} entries; at most {MAX_SPANS}"
    ranges: list[tuple[int, int, float]] = []
    # The order of these checks is fixed, because the first reason is stored in the rejects.
    for k, span in enumerate(spans):
        bounds = [whole_number(bound) for bound in span[:2]] if isinstance(span, list) else []
        begin, end = bounds if len(bounds) == 2 and len(span) <= 3 else (None, None)
        if begin is None or end is None:
            return "bad_loss_spans", f"entry {k} is not [begin, end] in whole numbers"
        weight = weight_of(span[2]) if len(span) == 3 else 1.0
        if weight is None:
            return (
                "bad_loss_spans",
                f"entry {k} has a weight that is no finite number of at least 0 in float32",
            )
        if weight_of(weight * of_document) is None:
            return (
                "bad_loss_spans",
                f"entry {k}: its weight times the document's is not finite in float32",
            )
        if not 0 <= begin <= end:
            numbers = (
                f"[{begin}, {end}]" if max(abs(begin), abs(end)) < 1 << 63 else "of huge numbers"
            )
            return "bad_loss_spans", f"entry {k} is {numbers}; 0 <= begin <= end"
        # Spans are cut to the text, and empty spans are dropped.
        if begin < min(end, len(text)):
            ranges.append((begin, min(end, len(text)), weight))
    # Overlapping spans are united, which is clear only if their weights are equal.
    united: list[tuple[int, int, float]] = []
    for begin, end, weight in sorted(ranges):
        if united and begin < united[-1][1]:
            other_begin, other_end, other_weight = united.pop()
            if weight != other_weight:
                return (
                    "bad_loss_spans",
                    f"character {begin} is in spans of unequal weight, {other_weight:g} and"
                    f" {weight:g}",
                )
            begin, end = other_begin, max(end, other_end)
        united.append((begin, end, weight))
    products = ((begin, end, weight * of_document) for begin, end, weight in united)
    return weighted(text, products, weight=of_document, places=places)


def rendered_turns(
    dialogue: Dialogue, template: str | None, settings: DocumentKeys, with_begins: bool = True
) -> Turns | Problem:
    """Render a dialogue, and return its text with the positions of its messages.

    If the dialogue is rejected, return the reason.

    Args:
        dialogue: The dialogue.
        template: The result of `find_template`.
        settings: The recipe's table `documents`.
        with_begins: As in `find_turns`.

    Raises:
        RecipeError: If the template is missing or invalid.
    """
    return _attempt(partial(find_turns, with_begins=with_begins), dialogue, template, settings)


def _attempt(
    find: Callable[[ChatTemplate, Dialogue, Mapping[str, Any], DocumentKeys], T],
    dialogue: Dialogue,
    template: str | None,
    settings: DocumentKeys,
) -> T | Problem:
    """Call `find` with the compiled template, and return its result or the reason of a reject.

    Raises:
        RecipeError: If the template is missing or invalid.
    """
    if template is None:
        raise NoTemplate(
            "a document has messages, and the tokenizer has no chat template\n"
            "hint: name a tokenizer with one, or a Jinja file in documents.chat_template; with"
            ' documents.loss_spans = "ignore", only texts are read'
        )
    compiled = compile_template(template, settings.template_date)
    # Compiling the template has imported jinja2 already.
    from packprep.conversations.template_limits import TemplateLimit

    try:
        return find(compiled, dialogue, _variables(dialogue, settings), settings)
    except (PackprepError, MemoryError):
        raise
    except NotIncremental as error:
        return "template_not_incremental", str(error)
    except UncertainPart as error:
        return "part_not_found", str(error)
    except LeftOut as error:
        return "template_error", str(error)
    except TemplateRefusal as error:
        return "template_error", f"the template says {ascii(str(error)[:_MOST_SAID])}"
    except TemplateLimit:
        return (
            "template_error",
            "the template does more than it may at these messages, or prints what is no text",
        )
    except Exception:
        # A template is code and may raise any error. The error's text would depend on the versions
        # of Python and Jinja.
        return "template_error", "the template failed at these messages"


def _variables(dialogue: Dialogue, settings: DocumentKeys) -> dict[str, Any]:
    """Return name → value of the template's variables, except messages and tools."""
    return {**(settings.chat_template_kwargs or {}), **dialogue.kwargs}


def _rendered(
    turns: Turns, dialogue: Dialogue, settings: DocumentKeys, template: ChatTemplate
) -> Conversation | Problem:
    text, trained, begins, system_end, changes = turns
    if surrogate := SURROGATE.search(text):
        return (
            "lone_surrogate",
            f"character {surrogate.start()} of the rendered text is {ascii(surrogate[0])}",
        )
    if too_large := large_text(text):
        return too_large
    boundaries = tuple(sorted(set(begins.values())))
    weights = dialogue.weights or (1.0,) * len(dialogue.messages)
    # The second list has the marks of parts, which override the recipe.
    ranges = [(begin, end, weights[k]) for begin, end, k in trained]
    for of_list in changes:
        ranges = changed_ranges(ranges, of_list, weights)
    # A token that reaches into a block counts for it only if the block is trained.
    trained_begins = {begin for begin, _, weight in ranges if np.float32(weight) > 0}
    blocks = (
        begin
        for begin, _, k in trained
        if template.marks_generation and dialogue.messages[k]["role"] == "assistant"
        if begin in trained_begins
    )
    variables = _variables(dialogue, settings)
    return weighted(
        text,
        ranges,
        weight=dialogue.weight,
        ignored=partial(
            ignored_parts, template, dialogue, variables, tuple(settings.trained_roles), text
        ),
        boundaries=boundaries,
        roles=_roles(dialogue.messages, begins, boundaries),
        system_end=system_end,
        chat=True,
        strings=tuple(strings_of([dialogue.messages, dialogue.tools, variables])),
        blocks=tuple(blocks),
        places=dialogue.media,
    )


def _roles(
    messages: Sequence[dict[str, Any]], begins: Mapping[int, int], boundaries: Sequence[int]
) -> tuple[str, ...]:
    """Return the roles of the sections that begin at character 0 and at each boundary.

    If a section has several messages, because some starts are unknown, its role is the role of its
    last message from a user or a tool. If it has no such message, it is the role of its first
    message.
    """
    roles = {0: messages[0]["role"]}
    section_begin = 0
    for k, message in enumerate(messages):
        section_begin = begins.get(k, section_begin)
        if begins.get(k) == section_begin or message["role"] in ASKING:
            roles[section_begin] = message["role"]
    return tuple(roles[section_begin] for section_begin in (0, *boundaries))
