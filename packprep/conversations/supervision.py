"""Documents that say what of them is trained, or have media: `loss_spans`, `messages`, `media` → a
text, its trained characters, its trained tokens.

```
messages    user: 2+2?   assistant: 4
text        <|im_start|>user↵2+2?<|im_end|>↵<|im_start|>assistant↵4<|im_end|>↵
trained                                                           ^^^^^^^^^^^^     the turn and what closes it, not its header
boundaries                                  ^
```
Which characters are which message, `turns.py` finds.

```
text      Q:·2+2?↵A:·4          span of characters [11, 12)
tokens    Q  :  ·2 + 2 ? ↵ A  :  ·4
begins    0  1  2  4 5 6 7 8  9  10     "·4" begins before the span: it is not trained
```
The whole text is tokenized at once, so that a model sees the tokens that it will see; a token is
trained iff it begins inside a span. One that begins before a {% generation %} block and reaches
into it is trained with the block, as in transformers; law 2 leaves it out. Of a document with media
all but its places is trained, or what it says.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from packprep.conversations.chat_template import (
    LeftOut,
    NoTemplate,
    TemplateRefusal,
    compile_template,
)
from packprep.conversations.layouts import Dialogue, Problem, read_layout
from packprep.conversations.media import (
    BAD_MEDIA,
    NO_PLACES,
    BadMedia,
    MediaPlace,
    MediaPlaces,
    joined,
    pieces_of,
    put_in,
    put_in_chats,
    ranges_beside,
    read_media,
    refuse_other_beginnings,
    refuse_strays,
    slots_of,
)
from packprep.conversations.turns import NotIncremental, Turns, find_turns, strings_of, texts_of
from packprep.errors import PackprepError
from packprep.recipe import DocumentKeys, Source
from packprep.sources.formats import Batch, Decoders, Keep, Reject, Slice, read
from packprep.sources.formats.batch import MAX_DETAIL, MEDIA, SURROGATE, Supervision, large_text
from packprep.sources.formats.fields import Fields, bad_weight, weight_of, whole_number
from packprep.tokenizer.encoding import Tokens, tokenize
from packprep.tokenizer.engines.engine import Engine
from packprep.tokenizer.roles import Vocabulary

MAX_SPANS = 1 << 16  # of one document
_MOST_SAID = 4096
DEFAULTS = DocumentKeys()


@dataclass(frozen=True)
class Conversation:
    """The text of a supervised document, and what of it is trained.

    spans       ascending half-open ranges of characters that are trained, apart from one another or touching where weights differ
    boundaries  ascending: the characters at which messages after the first begin, as far as the template has such places
    roles       of the first message and of each at `boundaries`; (): not known
    system_end  characters of the leading system message and its dressing; 0: none
    chat        the special tokens in the text are the template's
    strings     of a chat: what of it is not the template's, in which a special token's text means no special token
    weights     one for each span, above 0, as float32 holds it; (): 1 each
    blocks      ascending: the characters at which trained {% generation %} blocks begin
    places      of media, in the text's order
    limited     the document says which part of it is trained; False: it only has a weight, and may draw any task
    whole       gives the conversation with boundaries, roles and system_end, where these were left out because only a document
                that is cut needs them; None: they are there
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    boundaries: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()
    system_end: int = 0
    chat: bool = False
    strings: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()
    places: tuple[MediaPlace, ...] = ()
    limited: bool = True
    whole: Callable[[], "Conversation"] | None = field(default=None, compare=False)

    @property
    def trains_all(self) -> bool:
        """Whether all of the text is trained, so that it does not matter where tokens begin."""
        return not self.chat and self.spans == ((0, len(self.text)),)

    @cached_property
    def slots(self) -> int:
        """The slots of its places of media."""
        return slots_of(self.places)


def supervise(
    batch: Batch, template: str | None, settings: DocumentKeys = DEFAULTS
) -> tuple[Batch, dict[int, Conversation]]:
    """(a reader's batch with the text of every document, those that cannot be used among its
    rejects; document's number in it
    → its conversation, of the supervised ones).

    template: of `find_template`; None if there is none. RecipeError where messages
    have no template.
    """
    if not batch.supervision:
        return batch, {}
    texts: list[str] = []
    used: list[int] = []
    rejects = list(batch.rejects)
    conversations: dict[int, Conversation] = {}
    for i, (text, position) in enumerate(zip(batch.texts, batch.positions.tolist(), strict=True)):
        if i in batch.supervision:
            found = conversation(batch.supervision[i], template, settings, with_boundaries=False)
            if isinstance(found, tuple):
                reason, detail = found
                rejects.append(Reject(int(batch.files[i]), position, reason, detail[:MAX_DETAIL]))
                continue
            text = found.text
            # otherwise its weight is 1, as without one
            if found.limited or not found.spans or found.weights:
                conversations[len(texts)] = found
        texts.append(text)
        used.append(i)
    rejects.sort(key=lambda reject: reject.position)
    return Batch(texts, batch.files[used], batch.positions[used], rejects, {}), conversations


def read_supervised(
    part: Slice,
    source: Source,
    settings: DocumentKeys,
    template: str | None,
    keep: Keep | None = None,
    batch_bytes: int = 4 << 20,
    decoders: Decoders | None = None,
    kinds: tuple[str, ...] = (),
) -> Iterator[tuple[Batch, dict[int, Conversation]]]:
    """What `formats.read` gives of a part of a source, after `supervise`; settings: the recipe's,
    which may ignore the fields.
    kinds: of media."""
    fields = Fields.of(source, kinds) if settings.loss_spans == "use" else None
    for batch in read(part, source.text_key, keep, batch_bytes, decoders, fields):
        if batch.supervision:
            yield from _with_few_slots(*supervise(batch, template, settings))
        else:
            yield batch, {}


MOST_SLOTS = 1 << 22
"""Of media in a batch, but for its last document's: a few bytes ask for any number."""


def _with_few_slots(
    batch: Batch, conversations: dict[int, Conversation]
) -> Iterator[tuple[Batch, dict[int, Conversation]]]:
    """A batch in parts of about MOST_SLOTS slots of media."""
    slots = np.zeros(len(batch.texts), np.int64)
    slots[[*conversations]] = [found.slots for found in conversations.values()]
    part = (np.cumsum(slots) - slots) // MOST_SLOTS
    if not part.any():
        yield batch, conversations
        return
    rejects = batch.rejects
    for which in np.split(np.arange(len(part)), np.flatnonzero(np.diff(part)) + 1):
        first, end = int(which[0]), int(which[-1]) + 1
        own = {i - first: conversations[i] for i in range(first, end) if i in conversations}
        yield (
            Batch(
                batch.texts[first:end],
                batch.files[first:end],
                batch.positions[first:end],
                rejects,
                {},
            ),
            own,
        )
        rejects = []


def conversation(
    given: Supervision | Dialogue,
    template: str | None,
    settings: DocumentKeys = DEFAULTS,
    with_boundaries: bool = True,
) -> Conversation | Problem:
    """Return what is trained of a document, or why it cannot be used.

    with_boundaries: whether it is known where a chat's messages begin; if not, `whole` of the
    conversation may find it out later. Raises RecipeError when messages have no template.
    """
    found = (
        read_layout(given, settings.trained_roles)
        if isinstance(given, Supervision) and given.layout
        else given
    )
    if isinstance(found, tuple):
        return found
    if isinstance(found, Supervision):
        return _with_media(found)
    turns = rendered_turns(found, template, settings, with_boundaries)
    if not isinstance(turns, Turns):
        return turns
    assert template is not None
    has_blocks = compile_template(template, settings.template_date).marks_generation
    rendered = _rendered(turns, found, settings, has_blocks)
    if with_boundaries or turns.begins or not isinstance(rendered, Conversation):
        return rendered
    dialogue = found

    def whole() -> Conversation:
        with_begins = rendered_turns(dialogue, template, settings)
        if not isinstance(with_begins, Turns):  # where messages begin cannot be told
            return replace(rendered, whole=None)
        again = _rendered(with_begins, dialogue, settings, has_blocks)
        return again if isinstance(again, Conversation) else replace(rendered, whole=None)

    return replace(rendered, whole=whole)


def weighted(text: str, ranges: Iterable[tuple[int, int, float]], **more: Any) -> Conversation:
    """The conversation of a text and its ranges of characters [begin, end) with a weight:
    ascending, apart or touching.

    Ranges of weight 0 are not trained; touching ones of the same weight become one. more: its other
    fields.
    """
    spans: list[tuple[int, int]] = []
    weights: list[float] = []
    for begin, end, weight in ranges:
        kept = float(np.float32(weight))
        if begin == end or kept == 0:
            continue
        if spans and spans[-1][1] == begin and weights[-1] == kept:
            begin, _ = spans.pop()
            weights.pop()
        spans.append((begin, end))
        weights.append(kept)
    others = () if all(weight == 1 for weight in weights) else tuple(weights)
    return Conversation(text, tuple(spans), weights=others, **more)


def _with_media(given: Supervision) -> Conversation | Problem:
    """What is trained of a text, and its places of media, where kinds say that it may have any;
    without loss_spans all is."""
    assert given.text is not None
    try:
        places = read_media(given.record.get(MEDIA), given.text, given.kinds) if given.kinds else ()
    except BadMedia as bad:
        return BAD_MEDIA, str(bad)
    weight = given.record.get("weight")
    if given.loss_spans is None and given.text and weight is None:
        return Conversation(given.text, ((0, len(given.text)),), places=places)
    of_document = 1.0 if weight is None else weight_of(weight)
    if of_document is None:
        return bad_weight(weight)
    if given.loss_spans is None:
        ranges = [(0, len(given.text), of_document)]
        return weighted(given.text, ranges, places=places, limited=bool(places))
    return _with_spans(given.text, given.loss_spans, of_document, places)


def _with_spans(
    text: str, spans: Any, of_document: float, places: tuple[MediaPlace, ...] = ()
) -> Conversation | Problem:
    """The characters inside any of the spans, in whatever order those stand, overlap, are empty or
    reach beyond the text.

    of_document: the document's weight, by which those of the spans are multiplied. Spans of unequal
    weight do not overlap.
    """
    if not isinstance(spans, list):
        return "bad_loss_spans", "a list of [begin, end] is wanted"
    if len(spans) > MAX_SPANS:
        return "bad_loss_spans", f"{len(spans)} entries; at most {MAX_SPANS}"
    ranges: list[tuple[int, int, float]] = []
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
        if begin < min(end, len(text)):
            ranges.append((begin, min(end, len(text)), weight))
    united: list[tuple[int, int, float]] = []
    for begin, end, weight in sorted(ranges):
        if united and begin < united[-1][1]:
            first, last, other = united.pop()
            if weight != other:
                return (
                    "bad_loss_spans",
                    f"character {begin} is in spans of unequal weight, {other:g} and {weight:g}",
                )
            begin, end = first, max(end, last)
        united.append((begin, end, weight))
    return weighted(
        text, ((begin, end, weight * of_document) for begin, end, weight in united), places=places
    )


def rendered_turns(
    dialogue: Dialogue, template: str | None, settings: DocumentKeys, with_begins: bool = True
) -> Turns | Problem:
    """Return what a template writes for a dialogue, and where its messages stand in it; or why it
    cannot be used. with_begins: as in `find_turns`.

    Raises RecipeError where there is no template, or none that can be used.
    """
    if template is None:
        raise NoTemplate(
            "a document has messages, and the tokenizer has no chat template: give the folder of a"
            " tokenizer that has one, or a template in documents.chat_template, or set"
            ' documents.loss_spans = "ignore"'
        )
    compiled = compile_template(template, settings.template_date)
    # with jinja2, which came with the template
    from packprep.conversations.template_limits import TemplateLimit

    try:
        variables = _variables(dialogue, settings)
        return find_turns(compiled, dialogue, variables, settings, with_begins)
    except (PackprepError, MemoryError):
        raise
    except NotIncremental as error:
        return "template_not_incremental", str(error)
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
        # Of any class, for a template is code. Its message would depend on the versions of Python
        # and Jinja.
        return "template_error", "the template failed at these messages"


def _variables(dialogue: Dialogue, settings: DocumentKeys) -> dict[str, Any]:
    """What the template reads beside messages and tools."""
    return {**(settings.chat_template_kwargs or {}), **dialogue.kwargs}


def _rendered(
    turns: Turns, dialogue: Dialogue, settings: DocumentKeys, has_blocks: bool
) -> Conversation | Problem:
    text, trained, begins, system_end = turns
    contents = [
        said
        for message in dialogue.messages
        for part in texts_of(message)
        if (said := part.strip())
    ]
    if contents and not any(content in text for content in contents):
        # as templates for pictures do, which expect lists of parts and pass over strings
        return "template_error", "the template leaves every message's content out"
    if found := SURROGATE.search(text):
        return (
            "lone_surrogate",
            f"character {found.start()} of the rendered text is {ascii(found[0])}",
        )
    if too_large := large_text(text):
        return too_large
    boundaries = tuple(sorted(set(begins.values())))
    weights = dialogue.weights or (1.0,) * len(dialogue.messages)
    blocks = (
        begin
        for begin, _, k in trained
        if has_blocks and dialogue.messages[k]["role"] == "assistant"
        if np.float32(weights[k]) > 0
    )
    return weighted(
        text,
        ((begin, end, weights[k]) for begin, end, k in trained),
        boundaries=boundaries,
        roles=_roles(dialogue.messages, begins, boundaries),
        system_end=system_end,
        chat=True,
        strings=tuple(
            strings_of([dialogue.messages, dialogue.tools, _variables(dialogue, settings)])
        ),
        blocks=tuple(blocks),
        places=dialogue.media,
    )


def _roles(
    messages: Sequence[dict[str, Any]], begins: Mapping[int, int], boundaries: Sequence[int]
) -> tuple[str, ...]:
    """The role of what begins at 0 and at each boundary: of its first message, or of one that asks,
    where it holds several."""
    roles = {0: messages[0]["role"]}
    at = 0
    for k, message in enumerate(messages):
        at = begins.get(k, at)
        if begins.get(k) == at or message["role"] in _ASKING:
            roles[at] = message["role"]
    return tuple(roles[at] for at in (0, *boundaries))


NEVER, ANYWHERE, BEST = 0, 1, 2
"""Ranks of the places at which a document may be cut: of those in reach of a piece the last one of
the highest rank is taken."""
_ASKING = ("user", "tool")
_EVERYWHERE = np.iinfo(np.int64).max


class Training(NamedTuple):
    """Which tokens of D documents are trained. Token numbers are relative to their document.

    A piece of a document that begins at token `at` trains of span k what it holds, iff at <
    turns[k, 1] or turns[k, 0] < at: the message that the span's answers stands in it, at least in
    part, or the answer was cut inside, and this is its rest.
    """

    # uint8[D]: 1 where the document says which part of it is trained; of the others all is
    supervised: np.ndarray
    span_offsets: np.ndarray  # int64[D + 1]
    # int64[k, 2]: half-open trained ranges, ascending; apart, or of other messages or weights
    spans: np.ndarray
    weights: np.ndarray  # float32[k]: of the spans, above 0
    # int64[k, 2]: the first trained token of the span's message; where the message it answers ends
    turns: np.ndarray
    cut_offsets: np.ndarray  # int64[D + 1]
    cuts: np.ndarray  # int64[c]: ascending: the first tokens of messages after the first
    ranks: np.ndarray  # uint8[c]: NEVER, ANYWHERE or BEST
    # int64[D]: leading tokens, of system message and tools, that a document's later pieces repeat
    system: np.ndarray
    eos_weight: np.ndarray  # float32[D]: with which the end of the text is trained; 0: it is not
    place_offsets: np.ndarray  # int64[D + 1]
    places: MediaPlaces  # of media


class Trained(NamedTuple):
    """One document's part of `Training`; limited: as in its conversation."""

    spans: np.ndarray  # int64[k, 2]
    weights: np.ndarray  # float32[k]
    turns: np.ndarray  # int64[k, 2]
    cuts: np.ndarray  # int64[c]
    ranks: np.ndarray  # uint8[c]
    system: int
    eos_weight: float
    places: MediaPlaces = NO_PLACES
    limited: bool = True
    split_starts: int = 0  # spans of characters whose first one lies inside a token


def counted_begins(characters: np.ndarray, blocks: Sequence[int]) -> np.ndarray:
    """int64[n], ascending: the character from which each token counts, of tokens that stand for
    `characters: int64[n, 2]`.

    It is where the token begins, or the begin of the first block into which it reaches from before
    it.
    """
    begins, ends = characters.T
    if not blocks:
        return begins
    bounds = np.array([*blocks, _EVERYWHERE], np.int64)
    following = bounds[np.searchsorted(bounds, begins, side="right")]
    return np.maximum.accumulate(np.where(following < ends, following, begins))


def trained_tokens(
    conversation: Conversation, begins: np.ndarray, places: MediaPlaces = NO_PLACES
) -> Trained:
    """What is trained of a document whose tokens count from the characters `begins: int64[n]`,
    ascending. places: of media.

    Where roles are known, a cut at a user's message is BEST, and NEVER one that parts a trained
    turn from the message that it answers, the nearest user's or tool's before it, or that leaves
    what is repeated alone.
    """
    n, spans = len(begins), np.array(conversation.spans, np.int64).reshape(-1, 2)
    # the last span that begins at or before the token
    before = np.searchsorted(spans[:, 0], begins, side="right") - 1
    ends = np.append(spans[:, 1], 0)  # of no span, −1: 0
    roles, boundaries = conversation.roles, np.array(conversation.boundaries, np.int64)
    message = np.searchsorted(boundaries, begins, side="right") if roles else np.zeros(n, np.int64)
    weights = np.array(conversation.weights or (1.0,) * len(spans), np.float32)
    which = np.where(begins < ends[before], message, -1)
    for begin, end in places.spans.tolist():
        which[begin:end] = -1
    weight = np.where(which < 0, np.float32(0), np.append(weights, np.float32(0))[before])
    changes = np.diff(which, prepend=-1, append=-1) != 0
    changes |= np.diff(weight, prepend=np.float32(0), append=np.float32(0)) != 0
    edges = np.flatnonzero(changes)
    found = np.stack((edges[:-1], edges[1:]), 1).astype(np.int64)
    found = found[which[found[:, 0]] >= 0]
    first = np.searchsorted(begins, boundaries)  # tokens of messages after the first
    system = int(np.searchsorted(begins, conversation.system_end)) if conversation.system_end else 0
    if len(places.spans) and places.spans[0, 0] < system:
        system = 0  # a place stands once
    cuts = np.unique(first[(first > 0) & (first < n)]).astype(np.int64)
    turns, ranks = (
        np.repeat([[n, n]], len(found), 0).astype(np.int64),
        np.full(len(cuts), ANYWHERE, np.uint8),
    )
    if roles and len(found):
        of_span = which[found[:, 0]]
        turns[:, 0] = found[np.searchsorted(of_span, of_span), 0]
        asking = np.flatnonzero(np.isin(roles, _ASKING))
        last = np.searchsorted(asking, of_span) - 1  # −1: nothing is asked before
        turns[:, 1] = (
            np.where(last < 0, n, np.maximum(np.append(first, n)[asking[last]], 1))
            if len(asking)
            else n
        )
        next_span = np.searchsorted(found[:, 0], cuts)
        ranks[np.append(turns[:, 1], n)[next_span] <= cuts] = NEVER
        ranks[np.isin(cuts, first[np.array(roles[1:]) == "user"])] = BEST
        ranks[cuts <= system] = NEVER
    text = conversation.text
    to_the_end = bool(len(spans)) and int(spans[-1, 1]) == len(text)
    eos_weight = float(weights[-1]) if to_the_end else 0.0
    starts = spans[~np.isin(spans[:, 0], begins), 0].tolist()
    split_starts = sum(not text[start : start + 1].isspace() for start in starts)
    columns = found, weight[found[:, 0]], turns, cuts, ranks
    return Trained(*columns, system, eos_weight, places, split_starts=split_starts)


def _all_trained(
    conversations: Sequence[Conversation], lengths: np.ndarray, places: Sequence[MediaPlaces]
) -> list[Trained]:
    """What `trained_tokens` gives of documents of `lengths: int64[n]` tokens of which all but their
    places is trained."""
    ranges, offsets = ranges_beside(places, lengths)
    of_document = np.array(
        [one.weights[0] if one.weights else 1.0 for one in conversations], np.float32
    )
    count, bounds = np.diff(offsets), offsets.tolist()
    weights, turns = (
        np.repeat(of_document, count),
        np.repeat(np.stack((lengths, lengths), 1), count, axis=0),
    )
    cuts, ranks = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    return [
        Trained(ranges[a:b], weights[a:b], turns[a:b], cuts, ranks, 0, weight, own, one.limited)
        for a, b, weight, own, one in zip(
            bounds, bounds[1:], of_document.tolist(), places, conversations, strict=False
        )
    ]


def trained_by_weight(weights: Mapping[int, float], lengths: np.ndarray) -> dict[int, Trained]:
    """Return what is trained of token documents that have only a weight. weights: by number;
    lengths: int64[n], in tokens."""
    own = [
        Conversation("", ((0, 0),), weights=(weight,), limited=False) for weight in weights.values()
    ]
    trained = _all_trained(own, lengths[[*weights]], [NO_PLACES] * len(own))
    none = np.zeros(0, np.int64)
    nothing = Trained(
        none.reshape(0, 2),
        none.astype(np.float32),
        none.reshape(0, 2),
        none,
        none.astype(np.uint8),
        0,
        0.0,
    )
    return {i: one if one.eos_weight else nothing for i, one in zip(weights, trained, strict=True)}


def trained_by_tokens(weights: np.ndarray, of_document: float, n: int) -> Trained | None:
    """Return what is trained of a document of `n` tokens whose tokens have weights; None where all
    have 1.

    weights: float32[n + 1], the last of the document's end. of_document: multiplies them.
    """
    weights = (weights * np.float32(of_document)).astype(np.float32)
    if (weights == 1).all():
        return None
    of_tokens = weights[:n]
    edges = np.flatnonzero(np.diff(of_tokens, prepend=np.nan, append=np.nan) != 0)
    spans = np.stack((edges[:-1], edges[1:]), 1).astype(np.int64)
    spans = spans[of_tokens[spans[:, 0]] > 0]
    turns = np.full((len(spans), 2), n, np.int64)
    cuts, ranks = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    is_limited = bool((weights != weights[0]).any())
    columns = spans, of_tokens[spans[:, 0]], turns, cuts, ranks
    return Trained(*columns, 0, float(weights[n]), limited=is_limited or not len(spans))


def tokenize_supervised(
    engine: Engine,
    texts: Sequence[str],
    conversations: Mapping[int, Conversation],
    special_text: str,
    vocabulary: Vocabulary,
    uncut_tokens: float = 0,
) -> tuple[Tokens, dict[int, Trained]]:
    """Return the ids of each text, as `tokenize` gives them, and document → what is trained of it,
    of those with a conversation. A rejected document is not among them.

    uncut_tokens: documents of at most so many tokens are never cut, so that it does not matter
    where their messages begin.
    """
    if not conversations:
        tokens = tokenize(engine, texts, special_text, vocabulary)
        return (refuse_strays(tokens, vocabulary) if vocabulary.media else tokens), {}
    whole = {
        i
        for i, found in conversations.items()
        if (found.places or not found.limited) and found.trains_all
    }
    plain = [i for i in range(len(texts)) if i not in conversations or i in whole]
    chats = [i for i in sorted(conversations) if conversations[i].chat]
    spans = [i for i in sorted(conversations) if not conversations[i].chat and i not in whole]
    groups: list[tuple[list[int], Tokens]] = []
    places_of: dict[int, MediaPlaces] = {}
    for group, characters, is_chat in (
        (plain, False, False),
        (spans, True, False),
        (chats, True, True),
    ):
        if not group:
            continue
        places = [conversations[i].places if i in conversations else () for i in group]
        if is_chat:
            strings = [conversations[i].strings for i in group]
            tokens = tokenize(
                engine, [texts[i] for i in group], special_text, vocabulary, True, strings
            )
        else:
            pieces = [
                piece
                for i, own in zip(group, places, strict=True)
                for piece in pieces_of(texts[i], own)
            ]
            if len(pieces) > len(group):
                refuse_other_beginnings(cast(Hashable, engine), vocabulary)
            tokens = tokenize(engine, pieces, special_text, vocabulary, characters)
        if vocabulary.media:
            tokens, found = (put_in_chats if is_chat else put_in)(tokens, places, vocabulary)
            places_of |= {group[k]: own for k, own in found.items()}
        groups.append((group, tokens))
    lengths = np.zeros(len(texts), np.int64)
    for group, tokens in groups:
        lengths[group] = np.diff(tokens.offsets)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    alone = len(groups) == 1  # then it is all of them, in order
    ids = groups[0][1].ids if alone else np.empty(int(offsets[-1]), np.int32)
    rejected: list[tuple[int, str, str]] = []
    trained: dict[int, Trained] = {}
    for group, tokens in groups:
        if not alone:
            shift = np.repeat(offsets[group] - tokens.offsets[:-1], np.diff(tokens.offsets))
            ids[shift + np.arange(len(tokens.ids))] = tokens.ids
        turned_away = {k for k, _, _ in tokens.rejected}
        rejected += [(group[k], reason, detail) for k, reason, detail in tokens.rejected]
        used = [(k, i) for k, i in enumerate(group) if i in conversations and k not in turned_away]
        if tokens.characters is None:
            of_group = np.diff(tokens.offsets)[[k for k, _ in used]]
            own_places = [places_of.get(i, NO_PLACES) for _, i in used]
            all_trained = _all_trained([conversations[i] for _, i in used], of_group, own_places)
            trained |= {i: own for (_, i), own in zip(used, all_trained, strict=True)}
            continue
        bounds = tokens.offsets.tolist()
        for k, i in used:
            told = conversations[i]
            if told.whole is not None and bounds[k + 1] - bounds[k] > uncut_tokens:
                told = told.whole()
            of_document = tokens.characters[bounds[k] : bounds[k + 1]]
            begins = counted_begins(of_document, told.blocks)
            trained[i] = trained_tokens(told, begins, places_of.get(i, NO_PLACES))
    return Tokens(ids, offsets, sorted(rejected)), trained


def training_columns(
    trained: Mapping[int, Trained],
    documents: int,
    long_answers: str = "continue",
) -> Training | None:
    """The columns of `documents` documents; None when none of them says something of its training.

    long_answers: as in a recipe; "untrained": the rest of an answer that was cut inside
    is not.
    """
    if not trained:
        return None
    order = sorted(trained)
    rows = [trained[i] for i in order]
    supervised, eos_weight = np.zeros(documents, np.uint8), np.zeros(documents, np.float32)
    system, n_spans, n_cuts, n_places = (np.zeros(documents, np.int64) for _ in range(4))
    turns, ranks = (
        np.concatenate(columns)
        for columns in zip(*((row.turns, row.ranks) for row in rows), strict=True)
    )
    if long_answers == "untrained":
        turns[:, 0] = _EVERYWHERE
    supervised[order] = [row.limited for row in rows]
    eos_weight[order] = [row.eos_weight for row in rows]
    system[order] = [row.system for row in rows]
    n_spans[order] = [len(row.spans) for row in rows]
    n_cuts[order] = [len(row.cuts) for row in rows]
    n_places[order] = [len(row.places.first) for row in rows]
    zero = np.zeros(1, np.int64)
    return Training(
        supervised,
        np.concatenate((zero, np.cumsum(n_spans))),
        np.concatenate([row.spans for row in rows]),
        np.concatenate([row.weights for row in rows]),
        turns,
        np.concatenate((zero, np.cumsum(n_cuts))),
        np.concatenate([row.cuts for row in rows]),
        ranks,
        system,
        eos_weight,
        np.concatenate((zero, np.cumsum(n_places))),
        joined([row.places for row in rows if len(row.places.first)]),
    )
