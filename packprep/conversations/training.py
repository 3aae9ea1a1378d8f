"""The trained tokens of supervised documents, and the positions where a cut is allowed.

```
text      Q:·2+2?↵A:·4          span of characters [11, 12)
tokens    Q  :  ·2 + 2 ? ↵ A  :  ·4
begins    0  1  2  4 5 6 7 8  9  10     "·4" begins before the span and is not trained
```
The whole text is tokenized at once, so that spans do not change its tokens. A token is trained if
it begins inside a span. A token that begins before a {% generation %} block and reaches into it is
trained with the block, as in Transformers.
"""

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np

from packprep.conversations.media import (
    NO_PLACES,
    MediaPlaces,
    joined,
    pieces_of,
    put_in,
    put_in_chats,
    ranges_outside,
    refuse_other_beginnings,
    refuse_strays,
)
from packprep.conversations.supervision import ASKING, Conversation
from packprep.dataset.boundaries import offsets_of
from packprep.tokenizer.encoding import Tokens, tokenize
from packprep.tokenizer.engines.engine import Engine
from packprep.tokenizer.roles import Vocabulary

NEVER, ANYWHERE, BEST, NEW_TEXT = 0, 1, 2, 3
"""Ranks of the positions at which a document may be cut.

A chunk ends at the last position of the highest rank in its reach. NEW_TEXT is the start of a
document's next text, where a cut is always made.
"""
END_OF_HISTORY = 4
"""A number that is added to a rank if a text repeats an earlier text up to this position."""
_EVERYWHERE = np.iinfo(np.int64).max


class Training(NamedTuple):
    """The trained tokens of D documents. Token numbers are relative to their document.

    `turns[k]` is (the first trained token of the answer that has span k, the end of the question).
    A chunk that begins at token `at` trains its tokens of span k in two cases. If at < turns[k, 1],
    the chunk has at least a part of the question. If turns[k, 0] < at, an earlier chunk has the
    start of the answer, and this chunk continues the answer.
    """

    # uint8[D]: 1 if the document limits what is trained; otherwise all its tokens are trained
    supervised: np.ndarray
    span_offsets: np.ndarray  # int64[D + 1]
    # int64[k, 2]: half-open trained ranges, ascending; touching ranges differ in message or weight
    spans: np.ndarray
    weights: np.ndarray  # float32[k]: weight of each span, above 0
    turn: np.ndarray  # int64[k]: the number of the first span of the same message
    # int64[k, 2]: the first trained token of the span's message; the end of the answered message
    turns: np.ndarray
    cut_offsets: np.ndarray  # int64[D + 1]
    cuts: np.ndarray  # int64[c]: the first tokens of messages after the first, ascending
    ranks: np.ndarray  # uint8[c]: from NEVER to NEW_TEXT, perhaps plus END_OF_HISTORY
    # int64[D]: number of leading tokens (system message and tools) that later chunks repeat
    system: np.ndarray
    eos_weight: np.ndarray  # float32[D]: the weight of the end of the text; 0 if it is untrained
    document_weight: np.ndarray  # float32[D]: the record's weight, a factor of the other weights
    place_offsets: np.ndarray  # int64[D + 1]
    places: MediaPlaces  # the media spans of all documents


class Trained(NamedTuple):
    """The trained tokens of one document, in the form of `Training`."""

    spans: np.ndarray  # int64[k, 2]
    weights: np.ndarray  # float32[k]
    turns: np.ndarray  # int64[k, 2]
    cuts: np.ndarray  # int64[c]
    ranks: np.ndarray  # uint8[c]
    system: int
    eos_weight: float
    places: MediaPlaces = NO_PLACES
    limited: bool = True
    document_weight: float = 1.0
    split_starts: int = 0  # number of spans of characters that start inside a token


_NOTHING_TRAINED = Trained(
    np.zeros((0, 2), np.int64),
    np.zeros(0, np.float32),
    np.zeros((0, 2), np.int64),
    np.zeros(0, np.int64),
    np.zeros(0, np.uint8),
    0,
    0.0,
)


def counted_begins(characters: np.ndarray, blocks: Sequence[int]) -> np.ndarray:
    """Return, for each token, the index of the character that decides if the token is trained.

    This is the first character of the token. If a {% generation %} block begins inside the token,
    it is the first character of this block. The result is int64[n], ascending.

    Args:
        characters: The characters of each token, int64[n, 2].
        blocks: The starts of blocks, ascending.
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
    """Return the trained tokens of a document, and where it may be cut.

    Args:
        conversation: The document.
        begins: The result of `counted_begins`, int64[n], ascending.
        places: The document's media spans.
    """
    text = conversation.text
    spans = np.array(conversation.spans, np.int64).reshape(-1, 2)
    weights = np.array(conversation.weights or (1.0,) * len(spans), np.float32)
    ranges, message, weight = _trained_ranges(conversation, begins, spans, weights, places)
    first_tokens = begins.searchsorted(np.array(conversation.boundaries, np.int64))
    system = _system_tokens(conversation, begins, places)
    turns, cuts, ranks = _cut_positions(
        conversation.roles, first_tokens, ranges, message, system, begins
    )
    # The last eos is trained if the last span reaches the end of the text.
    is_last_trained = bool(len(spans)) and int(spans[-1, 1]) == len(text)
    span_begins = spans[:, 0]
    # If no token begins at the start of a span, the span starts inside a token.
    is_inside = begins.searchsorted(span_begins) == begins.searchsorted(span_begins, side="right")
    starts_in_tokens = span_begins[is_inside].tolist()
    return Trained(
        ranges,
        weight,
        turns,
        cuts,
        ranks,
        system,
        float(weights[-1]) if is_last_trained else 0.0,
        places,
        document_weight=conversation.weight,
        split_starts=sum(not text[start : start + 1].isspace() for start in starts_in_tokens),
    )


def _trained_ranges(
    conversation: Conversation,
    begins: np.ndarray,
    spans: np.ndarray,
    weights: np.ndarray,
    places: MediaPlaces,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ranges of trained tokens, int64[k, 2], with the message and weight of each.

    The messages are int64[k] and the weights float32[k]. Adjacent ranges differ in message or
    weight.

    Args:
        conversation: The document.
        begins: The result of `counted_begins`, int64[n].
        spans: The document's trained characters, int64[s, 2].
        weights: The weight of each span, float32[s].
        places: The document's media spans, which are never trained.
    """
    n = len(begins)
    boundaries = conversation.boundaries if conversation.roles else ()
    # Message and weight can change only at these tokens. There are few of them, so lists are faster
    # than arrays.
    edges = begins.searchsorted(np.concatenate((spans.ravel(), np.array(boundaries, np.int64))))
    starts = sorted({0, *edges.tolist(), *places.spans.ravel().tolist()} - {n})
    span_begins, span_ends = spans[:, 0].tolist(), spans[:, 1].tolist()
    place_begins, place_ends = places.spans[:, 0].tolist(), places.spans[:, 1].tolist()
    ranges: list[tuple[int, int]] = []
    messages: list[int] = []
    of_ranges: list[float] = []
    for start, end, character in zip(
        starts, [*starts[1:], n], begins[starts].tolist(), strict=False
    ):
        # The last span and the last place that begin at or before the token, or −1.
        span = bisect_right(span_begins, character) - 1
        place = bisect_right(place_begins, start) - 1
        if span < 0 or character >= span_ends[span] or (place >= 0 and start < place_ends[place]):
            continue
        message = bisect_right(boundaries, character)
        weight = float(weights[span])
        if ranges and (ranges[-1][1], messages[-1], of_ranges[-1]) == (start, message, weight):
            ranges[-1] = ranges[-1][0], end
            continue
        ranges.append((start, end))
        messages.append(message)
        of_ranges.append(weight)
    return (
        np.array(ranges, np.int64).reshape(-1, 2),
        np.array(messages, np.int64),
        np.array(of_ranges, np.float32),
    )


def _system_tokens(conversation: Conversation, begins: np.ndarray, places: MediaPlaces) -> int:
    """Return the number of leading tokens that later chunks repeat: system message and tools.

    Return 0 if these tokens have a media span, because media spans are never repeated.
    """
    count = int(np.searchsorted(begins, conversation.system_end)) if conversation.system_end else 0
    return 0 if len(places.spans) and places.spans[0, 0] < count else count


def _cut_positions(
    roles: Sequence[str],
    first_tokens: np.ndarray,
    spans: np.ndarray,
    message_of_span: np.ndarray,
    system: int,
    begins: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (turns, cuts, ranks) of a document, as in `Trained`.

    If roles are known, a cut at a user's message is BEST. A cut is NEVER made between a trained
    turn and the message that it answers, which is the nearest earlier message of a user or a tool.
    A cut is also NEVER made inside or right after the tokens that later chunks repeat.

    ```
    messages       system  user  assistant  user  assistant
    first_tokens           5     9          20    26
    spans                        [11, 20)         [28, 40)
    turns                        11, 9            28, 26       first trained token, question's end
    cuts                   5     9          20    26
    ranks                  NEVER NEVER      BEST  NEVER
    ```

    Args:
        roles: The role of each message, or () if they are unknown.
        first_tokens: The first token of each message after the first, int64[m].
        spans: Ranges of trained tokens, int64[k, 2].
        message_of_span: The message of each span, int64[k].
        system: Number of tokens that later chunks repeat.
        begins: The result of `counted_begins`, int64[n].
    """
    n = len(begins)
    turns = np.full((len(spans), 2), n, np.int64)
    if roles and len(spans):
        # All spans of a message share its first trained token.
        turns[:, 0] = spans[message_of_span.searchsorted(message_of_span), 0]
    if not len(first_tokens):
        return turns, np.zeros(0, np.int64), np.zeros(0, np.uint8)
    # Two messages may begin in one token. A cut at token 0 or at the end divides nothing.
    cuts = np.unique(first_tokens[(first_tokens > 0) & (first_tokens < n)]).astype(np.int64)
    ranks = np.full(len(cuts), ANYWHERE, np.uint8)
    if not roles or not len(spans):
        return turns, cuts, ranks
    asking = np.array([k for k, role in enumerate(roles) if role in ASKING], np.int64)
    if len(asking):
        question = np.searchsorted(asking, message_of_span) - 1  # −1: no message asks before
        # `first_tokens[k]` is the end of message k, because message k + 1 starts there.
        ends = np.append(first_tokens, n)[asking[question]]
        turns[:, 1] = np.where(question < 0, n, np.maximum(ends, 1))
    # After the question's end, a cut would separate the next answer from its question.
    next_span = np.searchsorted(spans[:, 0], cuts)
    ranks[np.append(turns[:, 1], n)[next_span] <= cuts] = NEVER
    # BEST overrides NEVER, except in the repeated start.
    of_users = first_tokens[[k for k, role in enumerate(roles[1:]) if role == "user"]]
    ranks[np.searchsorted(cuts, of_users[(of_users > 0) & (of_users < n)])] = BEST
    ranks[cuts <= system] = NEVER
    return turns, cuts, ranks


def _all_trained(
    conversations: Sequence[Conversation], lengths: np.ndarray, places: Sequence[MediaPlaces]
) -> list[Trained]:
    """Return the trained tokens of documents in which only media spans are untrained."""
    ranges, offsets = ranges_outside(places, lengths)
    of_document = np.array(
        [document.weights[0] if document.weights else 1.0 for document in conversations], np.float32
    )
    count, bounds = np.diff(offsets), offsets.tolist()
    # The question ends at the document's end, so every chunk trains its tokens.
    weights, turns = (
        np.repeat(of_document, count),
        np.repeat(np.stack((lengths, lengths), 1), count, axis=0),
    )
    cuts, ranks = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    return [
        Trained(
            *(
                ranges[a:b],
                weights[a:b],
                turns[a:b],
                cuts,
                ranks,
                0,
                weight,
                media,
                document.limited,
            ),
            document_weight=document.weight,
        )
        for a, b, weight, media, document in zip(
            bounds, bounds[1:], of_document.tolist(), places, conversations, strict=False
        )
    ]


def trained_by_weight(weights: Mapping[int, float], lengths: np.ndarray) -> dict[int, Trained]:
    """For token documents with only a weight, return document number → trained tokens.

    Args:
        weights: Document number → weight.
        lengths: The number of tokens of each document, int64[n].
    """
    conversations = [
        Conversation("", ((0, 0),), weights=(weight,), weight=weight, limited=False)
        for weight in weights.values()
    ]
    trained = _all_trained(conversations, lengths[[*weights]], [NO_PLACES] * len(conversations))
    return {
        i: entry if entry.eos_weight else _NOTHING_TRAINED
        for i, entry in zip(weights, trained, strict=True)
    }


def all_supervised(trained: Mapping[int, Trained], lengths: np.ndarray) -> dict[int, Trained]:
    """Return document number → trained tokens for all n documents, all marked as supervised.

    Args:
        trained: Document number → trained tokens. If a document is missing here, all its tokens
            are trained.
        lengths: Tokens of each document, int64[n].
    """
    unsupervised = [i for i in range(len(lengths)) if i not in trained]
    documents = [Conversation("", ((0, 0),))] * len(unsupervised)
    all_trained = _all_trained(documents, lengths[unsupervised], [NO_PLACES] * len(unsupervised))
    limited = {i: entry._replace(limited=True) for i, entry in trained.items()}
    return limited | dict(zip(unsupervised, all_trained, strict=True))


def trained_by_tokens(weights: np.ndarray, of_document: float, n: int) -> Trained | None:
    """Return the trained tokens of a document that has a weight for each token.

    The result is None if all weights are 1.

    Args:
        weights: float32[n + 1]. The last entry is the weight of the end of the document.
        of_document: The weight of the document, a factor of all weights.
        n: Number of tokens.
    """
    weights = (weights * np.float32(of_document)).astype(np.float32)
    if (weights == 1).all():
        return None
    of_tokens = weights[:n]
    # NaN before and after the weights makes both ends of the document edges.
    edges = np.flatnonzero(np.diff(of_tokens, prepend=np.nan, append=np.nan) != 0)
    spans = np.stack((edges[:-1], edges[1:]), 1).astype(np.int64)
    spans = spans[of_tokens[spans[:, 0]] > 0]
    # The question ends at the document's end, so every chunk trains its tokens.
    turns = np.full((len(spans), 2), n, np.int64)
    cuts, ranks = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    # A weight that all tokens share is a weight of the document, which limits nothing.
    is_limited = bool((weights != weights[0]).any())
    columns = spans, of_tokens[spans[:, 0]], turns, cuts, ranks
    return Trained(
        *columns,
        0,
        float(weights[n]),
        limited=is_limited or not len(spans),
        document_weight=of_document,
    )


class _Group(NamedTuple):
    """Documents of one kind that are tokenized together."""

    documents: list[int]  # their numbers, ascending
    tokens: Tokens
    places: Mapping[int, MediaPlaces] = MappingProxyType({})  # by document
    # document with several texts → where each text ends, int64[t]
    text_ends: Mapping[int, np.ndarray] = MappingProxyType({})


def tokenize_supervised(
    engine: Engine,
    texts: Sequence[str],
    conversations: Mapping[int, Conversation],
    special_text: str,
    vocabulary: Vocabulary,
    uncut_tokens: float = 0,
) -> tuple[Tokens, dict[int, Trained]]:
    """Return the result of `tokenize` for the texts, and the trained tokens of some documents.

    The second result maps document number → trained tokens, for supervised documents that are not
    rejected.

    Args:
        engine: The tokenizer's engine.
        texts: The text of each document.
        conversations: Document number → conversation of each supervised document.
        special_text: As in the recipe.
        vocabulary: The vocabulary.
        uncut_tokens: Documents with at most this number of tokens are never cut, so the starts of
            their messages are not searched.
    """
    options = engine, special_text, vocabulary
    if not conversations:
        tokens = tokenize(engine, texts, special_text, vocabulary)
        return (refuse_strays(tokens, vocabulary) if vocabulary.media else tokens), {}
    # If a text is trained completely, the characters of its tokens are not needed.
    trained_whole = {
        i
        for i, document in conversations.items()
        if (document.places or not document.limited) and document.trains_all
    }
    plain = [i for i in range(len(texts)) if i not in conversations or i in trained_whole]
    chats = [i for i in sorted(conversations) if conversations[i].chat]
    with_spans = sorted(conversations.keys() - trained_whole - set(chats))
    # Each group needs another call of the tokenizer, so the results are joined at the end.
    groups = []
    if plain:
        groups.append(_tokenize_texts(plain, texts, conversations, *options, characters=False))
    if with_spans:
        groups.append(_tokenize_texts(with_spans, texts, conversations, *options, characters=True))
    if chats:
        groups.append(_tokenize_chats(chats, conversations, *options))
    trained: dict[int, Trained] = {}
    for group in groups:
        trained |= _trained_of_group(group, conversations, uncut_tokens)
    return _joined_groups(groups, len(texts)), trained


def _tokenize_texts(
    documents: list[int],
    texts: Sequence[str],
    conversations: Mapping[int, Conversation],
    engine: Engine,
    special_text: str,
    vocabulary: Vocabulary,
    characters: bool,
) -> _Group:
    """Tokenize documents without a chat template, in pieces between their media spans."""
    places = [conversations[i].places if i in conversations else () for i in documents]
    pieces = [
        piece
        for i, of_document in zip(documents, places, strict=True)
        for piece in pieces_of(texts[i], of_document)
    ]
    if len(pieces) > len(documents):
        refuse_other_beginnings(cast(Hashable, engine), vocabulary)
    tokens = tokenize(engine, pieces, special_text, vocabulary, characters)
    if not vocabulary.media:
        return _Group(documents, tokens)
    tokens, media = put_in(tokens, places, vocabulary)
    return _Group(documents, tokens, {documents[k]: spans for k, spans in media.items()})


def _tokenize_chats(
    documents: list[int],
    conversations: Mapping[int, Conversation],
    engine: Engine,
    special_text: str,
    vocabulary: Vocabulary,
) -> _Group:
    """Tokenize the texts of chats, with the special tokens that their template writes."""
    parts = [
        text_part for i in documents for text_part in conversations[i].parts or (conversations[i],)
    ]
    strings = [text_part.strings for text_part in parts]
    tokens = tokenize(
        engine, [text_part.text for text_part in parts], special_text, vocabulary, True, strings
    )
    # A recipe with several texts per document has no media.
    if len(parts) > len(documents):
        counts = [max(len(conversations[i].parts), 1) for i in documents]
        tokens, text_ends = _joined_parts(tokens, counts)
        return _Group(documents, tokens, {}, dict(zip(documents, text_ends, strict=True)))
    if not vocabulary.media:
        return _Group(documents, tokens)
    tokens, media = put_in_chats(tokens, [conversations[i].places for i in documents], vocabulary)
    return _Group(documents, tokens, {documents[k]: spans for k, spans in media.items()})


def _trained_of_group(
    group: _Group, conversations: Mapping[int, Conversation], uncut_tokens: float
) -> dict[int, Trained]:
    """Return the trained tokens of a group's accepted documents that have a conversation."""
    documents, tokens, bounds = group.documents, group.tokens, group.tokens.offsets.tolist()
    turned_away = {k for k, _, _ in tokens.rejected}
    used = [(k, i) for k, i in enumerate(documents) if i in conversations and k not in turned_away]
    # A group without characters has only documents that are trained completely.
    if tokens.characters is None:
        lengths = np.diff(tokens.offsets)[[k for k, _ in used]]
        places = [group.places.get(i, NO_PLACES) for _, i in used]
        all_trained = _all_trained([conversations[i] for _, i in used], lengths, places)
        return {i: entry for (_, i), entry in zip(used, all_trained, strict=True)}
    trained: dict[int, Trained] = {}
    for k, i in used:
        document, of_document = conversations[i], slice(bounds[k], bounds[k + 1])
        characters = tokens.characters[of_document]
        if document.parts:
            ids = tokens.ids[of_document]
            trained[i] = _trained_parts(document.parts, ids, characters, group.text_ends[i])
            continue
        # Only a document that may be cut needs the starts of its messages.
        if document.whole is not None and len(characters) > uncut_tokens:
            document = document.whole()
        begins = counted_begins(characters, document.blocks)
        trained[i] = trained_tokens(document, begins, group.places.get(i, NO_PLACES))
    return trained


def _joined_groups(groups: Sequence[_Group], count: int) -> Tokens:
    """Return the tokens of all `count` documents, in the order of their numbers."""
    if len(groups) == 1:
        return groups[0].tokens._replace(characters=None)
    lengths = np.zeros(count, np.int64)
    for group in groups:
        lengths[group.documents] = np.diff(group.tokens.offsets)
    offsets = offsets_of(lengths)
    ids = np.empty(int(offsets[-1]), np.int32)
    rejected: list[tuple[int, str, str]] = []
    for documents, tokens, *_ in groups:
        # `shift` moves each token from its place in the group to its place in the batch.
        shift = np.repeat(offsets[documents] - tokens.offsets[:-1], np.diff(tokens.offsets))
        ids[shift + np.arange(len(tokens.ids))] = tokens.ids
        rejected += [(documents[k], reason, detail) for k, reason, detail in tokens.rejected]
    return Tokens(ids, offsets, sorted(rejected))


def _joined_parts(tokens: Tokens, counts: Sequence[int]) -> tuple[Tokens, list[np.ndarray]]:
    """Join the tokens of the texts of each document.

    Return the tokens of the documents, and for each document an array with the end of each text in
    the document's tokens. A document is rejected if one of its texts is rejected.

    Args:
        tokens: The tokens of the texts.
        counts: Number of texts of each document.
    """
    owner, lengths = np.repeat(np.arange(len(counts)), counts), np.diff(tokens.offsets)
    rejected: dict[int, tuple[int, str, str]] = {}
    for k, reason, detail in tokens.rejected:
        i = int(owner[k])
        rejected.setdefault(i, (i, reason, detail))
    # If one text is rejected, the whole document loses its tokens.
    is_used = ~np.isin(owner, list(rejected))
    is_kept, lengths = np.repeat(is_used, lengths), np.where(is_used, lengths, 0)
    ends = np.split(np.cumsum(lengths), np.cumsum(counts)[:-1])
    offsets = np.array([0, *(of_parts[-1] for of_parts in ends)], np.int64)
    # The ends count from the start of the document.
    part_ends = [of_parts - begin for of_parts, begin in zip(ends, offsets, strict=False)]
    assert tokens.characters is not None
    documents = Tokens(
        tokens.ids[is_kept], offsets, sorted(rejected.values()), tokens.characters[is_kept]
    )
    return documents, part_ends


def _trained_parts(
    parts: Sequence[Conversation], ids: np.ndarray, characters: np.ndarray, ends: np.ndarray
) -> Trained:
    """Return the trained tokens of a document with several texts.

    If all texts begin with the same system message, each later chunk of the document repeats it.

    Args:
        parts: The conversation of each text.
        ids: The ids of all texts, int64[n].
        characters: The characters of each token in its text, int64[n, 2].
        ends: The end of each text in `ids`, int64[t].
    """
    trained_parts: list[Trained] = []
    for text_part, begin, end in zip(parts, (0, *ends), ends, strict=False):
        begins = counted_begins(characters[begin:end], text_part.blocks)
        of_part = trained_tokens(text_part, begins)
        cuts, ranks = of_part.cuts, of_part.ranks
        if text_part.history:
            # The history ends before the first token with new text.
            new = int(np.searchsorted(begins, text_part.history))
            # END_OF_HISTORY needs a position in `cuts`, even if no cut is allowed there.
            if new < len(begins) and new not in cuts:
                index = np.searchsorted(cuts, new)
                cuts, ranks = np.insert(cuts, index, new), np.insert(ranks, index, np.uint8(NEVER))
            ranks = np.where(cuts == new, ranks | END_OF_HISTORY, ranks).astype(np.uint8)
        if begin:
            # Each text after the first starts a new chunk.
            cuts = np.concatenate((np.zeros(1, np.int64), cuts))
            ranks = np.concatenate((np.full(1, NEW_TEXT, np.uint8), ranks))
        trained_parts.append(
            of_part._replace(
                spans=of_part.spans + begin,
                turns=of_part.turns + begin,
                cuts=cuts + begin,
                ranks=ranks,
            )
        )
    # Chunks repeat the tokens of the first text, so all texts must begin with the same tokens.
    systems = {of_part.system for of_part in trained_parts}
    is_same = len(systems) == 1 and all(
        np.array_equal(ids[begin : begin + trained_parts[0].system], ids[: trained_parts[0].system])
        for begin in ends[:-1]
    )

    def joined_column(name: str) -> np.ndarray:
        return np.concatenate([getattr(of_part, name) for of_part in trained_parts])

    return Trained(
        joined_column("spans"),
        joined_column("weights"),
        joined_column("turns"),
        joined_column("cuts"),
        joined_column("ranks"),
        trained_parts[0].system if is_same else 0,
        trained_parts[-1].eos_weight,
        document_weight=trained_parts[0].document_weight,
        split_starts=sum(of_part.split_starts for of_part in trained_parts),
    )


def history_tokens(training: Training) -> np.ndarray:
    """Return how many tokens of each document only repeat its earlier texts, int64[D].

    A text counts 0 if it has no history, or if none of its tokens starts after its history.
    """
    tokens = np.zeros(len(training.supervised), np.int64)
    document = np.repeat(np.arange(len(tokens)), np.diff(training.cut_offsets))
    begins_text = training.ranks == NEW_TEXT
    ends_history = training.ranks >= END_OF_HISTORY
    # Such a text has no END_OF_HISTORY, so its start does not count either.
    marks = np.flatnonzero(begins_text | ends_history)
    is_paired = ends_history[marks[1:]] & (document[marks[1:]] == document[marks[:-1]])
    starts = marks[:-1][begins_text[marks[:-1]] & is_paired]
    np.subtract.at(tokens, document[starts], training.cuts[starts])
    np.add.at(tokens, document[ends_history], training.cuts[ends_history])
    return tokens


def training_columns(
    trained: Mapping[int, Trained],
    documents: int,
    long_answers: str = "continue",
) -> Training:
    """Return the `Training` of all documents of a batch.

    Args:
        trained: Document number → trained tokens, for supervised documents. All tokens of other
            documents are trained.
        documents: Number of documents.
        long_answers: As in a recipe. With "untrained", a chunk does not train an answer that an
            earlier chunk begins.
    """
    order = sorted(trained)
    # The empty row sets the dtypes if no document is in `trained`.
    rows = [_NOTHING_TRAINED, *(trained[i] for i in order)]
    supervised, eos_weight = np.zeros(documents, np.uint8), np.zeros(documents, np.float32)
    document_weight = np.ones(documents, np.float32)
    system, n_spans, n_cuts, n_places = (np.zeros(documents, np.int64) for _ in range(4))
    turns, ranks = (
        np.concatenate(columns)
        for columns in zip(*((row.turns, row.ranks) for row in rows), strict=True)
    )
    # Documents that are not in `trained` keep the values of unsupervised documents.
    supervised[order] = [row.limited for row in rows[1:]]
    eos_weight[order] = [row.eos_weight for row in rows[1:]]
    document_weight[order] = [row.document_weight for row in rows[1:]]
    system[order] = [row.system for row in rows[1:]]
    n_spans[order] = [len(row.spans) for row in rows[1:]]
    n_cuts[order] = [len(row.cuts) for row in rows[1:]]
    n_places[order] = [len(row.places.first) for row in rows[1:]]
    document = np.repeat(np.arange(documents), n_spans)
    # Spans of one message have the same turns[:, 0], so a change starts a message.
    begins_turn = np.diff(document, prepend=-1) != 0
    begins_turn[1:] |= turns[1:, 0] != turns[:-1, 0]
    turn = np.maximum.accumulate(np.where(begins_turn, np.arange(len(document)), 0))
    # With this value, no chunk continues an answer.
    if long_answers == "untrained":
        turns[:, 0] = _EVERYWHERE
    zero = np.zeros(1, np.int64)
    return Training(
        supervised,
        np.concatenate((zero, np.cumsum(n_spans))),
        np.concatenate([row.spans for row in rows]),
        np.concatenate([row.weights for row in rows]),
        turn,
        turns,
        np.concatenate((zero, np.cumsum(n_cuts))),
        np.concatenate([row.cuts for row in rows]),
        ranks,
        system,
        eos_weight,
        document_weight,
        np.concatenate((zero, np.cumsum(n_places))),
        joined([row.places for row in rows if len(row.places.first)]),
    )
