"""A reader of the media spans in documents.

A media span, or place, has the slots of a picture, a sound or a film. Only the trainer has the
pixels.

```
record      {"text": "A cat.", "media": [{"at": 2, "tokens": 3, "ref": "cat.jpg", "kind": "image"}]}
recipe      specials.media = {image = ["<begin>", "<slot>", "<end>"]}
ids         A ·  <begin> <slot> <slot> <slot> <end>  cat .
place       spans [2, 7)   first 3   tokens 3   kind 0   ref cat.jpg
```
Text between two media spans is tokenized separately. Transformers' processors also do this, because
they put a special token between the texts. A chat template writes a media part with one slot token,
which is repeated `tokens` times. Begin and end tokens next to the slots belong to the media span. A
document with a slot token outside of media spans is rejected, because the token has no ref.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of, owners, ranks
from packprep.errors import RecipeError
from packprep.sources.formats.batch import MAX_DOCUMENT_TOKENS, SURROGATE
from packprep.sources.formats.fields import shown, whole_number
from packprep.tokenizer.encoding import Tokens
from packprep.tokenizer.file import texts_of_ids
from packprep.tokenizer.roles import Vocabulary

BAD_MEDIA = "bad_media"
OF_PART = ("ref", "tokens")
"""Keys of a media part. They are removed, so that the template does not see them."""


class MediaPlace(NamedTuple):
    """A media span of a document before tokenization.

    `at` is the number of characters before the span, or −1 if a chat template writes the span.
    """

    kind: str
    tokens: int
    ref: str
    at: int = -1


class BadMedia(Exception):
    """An error for an invalid media span. Its message is the detail of the reject."""


class MediaPlaces(NamedTuple):
    """The k media spans of one document, or of several documents in order.

    Positions are token numbers in the span's document. The first four arrays have one entry per
    span. The ref of span i is refs[ref_offsets[i] : ref_offsets[i + 1]].
    """

    spans: (
        np.ndarray
    )  # int64[k, 2]: token ranges, including begin and end tokens; never cut, noised or trained
    first: np.ndarray  # int64: the first slot
    tokens: np.ndarray  # int64: number of slots
    kind: np.ndarray  # int64: index of the kind among the sorted names of kinds
    ref_offsets: np.ndarray  # int64[k + 1]
    refs: np.ndarray  # uint8: the refs in UTF-8, concatenated

    def at(self, indices: np.ndarray) -> "MediaPlaces":
        """Return the media spans at `indices`, in this order."""
        lengths = np.diff(self.ref_offsets)[indices]
        bytes_of = np.repeat(self.ref_offsets[indices], lengths) + ranks(lengths)
        spans, first_slots, tokens, kind = (column[indices] for column in self[:4])
        return MediaPlaces(
            spans, first_slots, tokens, kind, offsets_of(lengths), self.refs[bytes_of]
        )

    def of(self, begin: int, end: int) -> "MediaPlaces":
        """Return the media spans with the indices begin … end − 1, as views of the arrays."""
        own_slice, offsets = slice(begin, end), self.ref_offsets[begin : end + 1]
        first_offset = offsets[0]
        refs = self.refs[first_offset : offsets[-1]]
        return MediaPlaces(
            self.spans[own_slice],
            self.first[own_slice],
            self.tokens[own_slice],
            self.kind[own_slice],
            offsets - first_offset,
            refs,
        )


_NONE = np.zeros(0, np.int64)
NO_PLACES = MediaPlaces(
    _NONE.reshape(0, 2), _NONE, _NONE, _NONE, np.zeros(1, np.int64), np.zeros(0, np.uint8)
)


def joined(parts: Sequence[MediaPlaces]) -> MediaPlaces:
    """Join the media spans of several documents, in order."""
    every = (NO_PLACES, *parts)
    spans, first_slots, tokens, kind = (
        np.concatenate(column)
        for column in zip(*(media_spans[:4] for media_spans in every), strict=True)
    )
    ends = np.cumsum([len(media_spans.ref_offsets) for media_spans in every])
    lengths = np.delete(
        np.diff(np.concatenate([media_spans.ref_offsets for media_spans in every])), ends[:-1] - 1
    )
    return MediaPlaces(
        spans,
        first_slots,
        tokens,
        kind,
        offsets_of(lengths),
        np.concatenate([media_spans.refs for media_spans in every]),
    )


def read_media(entries: Any, text: str, kinds: Sequence[str]) -> tuple[MediaPlace, ...]:
    """Return the media spans of a record's `media`, which may be missing.

    Raises:
        BadMedia: If an entry is invalid.
    """
    if entries is None:
        return ()
    if not isinstance(entries, list):
        raise BadMedia("a list of {at, tokens, ref, kind} is wanted")
    spans: list[MediaPlace] = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise BadMedia(f"entry {i} is no object of at, tokens, ref and kind")
        position, kind = whole_number(entry.get("at")), entry.get("kind")
        if position is None or not 0 <= position <= len(text):
            where = shown(entry.get("at"))
            raise BadMedia(
                f"entry {i}: at is {where}; a character of the text, 0 … {len(text)}, is wanted"
            )
        if spans and position < spans[-1].at:
            raise BadMedia(
                f"entry {i}: at is {position}, before the one before it, {spans[-1].at}: write"
                " them in the text's order"
            )
        if not isinstance(kind, str) or kind not in kinds:
            raise BadMedia(
                f"entry {i}: kind is {shown(kind)}; specials.media has {', '.join(kinds)}"
            )
        spans.append(MediaPlace(kind, *read_slots(entry, f"entry {i}"), position))
    refuse_many(spans)
    return tuple(spans)


def read_slots(entry: Mapping[str, Any], where: str) -> tuple[int, str]:
    """Return (tokens, ref) of an entry of a record's `media`, or of a message's media part.

    Raises:
        BadMedia: If the entry is invalid.
    """
    tokens, ref = whole_number(entry.get("tokens")), entry.get("ref")
    if tokens is None or not 1 <= tokens <= MAX_DOCUMENT_TOKENS:
        count = shown(entry.get("tokens"))
        raise BadMedia(f"{where}: tokens is {count}; a count, 1 … {MAX_DOCUMENT_TOKENS}, is wanted")
    if not isinstance(ref, str) or not (ref.isascii() or not SURROGATE.search(ref)):
        raise BadMedia(f"{where}: ref is {shown(ref)}; a text of whole characters is wanted")
    return tokens, ref


def refuse_many(places: Sequence[MediaPlace]) -> None:
    """Raise BadMedia if all media spans together have more slots than a document may have."""
    if (slots := slots_of(places)) > MAX_DOCUMENT_TOKENS:
        raise BadMedia(f"{slots} slots; at most {MAX_DOCUMENT_TOKENS}")


def slots_of(places: Sequence[MediaPlace]) -> int:
    """Return the total number of slots of media spans, without begin and end tokens."""
    return sum([place.tokens for place in places])


def ranges_outside(
    places: Sequence[MediaPlaces], lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ranges, offsets): the token ranges of n documents outside of media spans.

    `ranges`, int64[k, 2], has non-empty ranges of token numbers in their document. Document i has
    the ranges with the indices offsets[i] … offsets[i + 1] − 1. `offsets` is int64[n + 1].

    Args:
        places: The media spans of each document.
        lengths: The number of tokens of each document, int64[n].
    """
    many = np.array([len(own.first) for own in places], np.int64)
    spans = np.concatenate([NO_PLACES.spans, *(own.spans for own in places)])
    ends = np.cumsum(many)
    # A document with k media spans has k + 1 ranges, and some may be empty.
    begins = np.insert(spans[:, 1], ends - many, 0)
    ranges = np.stack((begins, np.insert(spans[:, 0], ends, lengths)), 1)
    filled = ranges[:, 0] < ranges[:, 1]
    count = np.bincount(owners(many + 1)[filled], minlength=len(many))
    return ranges[filled], offsets_of(count)


def content_of(places: Sequence[MediaPlace]) -> bytes:
    """Return a document's media spans as JSON bytes, which the digest of a source includes."""
    return json.dumps(places).encode()


def pieces_of(text: str, places: Sequence[MediaPlace]) -> list[str]:
    """Split a text at its k media spans, and return the k + 1 pieces."""
    bounds = [0, *(place.at for place in places), len(text)]
    return [text[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]


# Media spans among tokens


_BESIDE = ("Look", " at 2 cats, ", "und\n  dies", "x ")
"""Texts that show how a tokenizer continues after a special token."""


@lru_cache(maxsize=4)
def refuse_other_beginnings(engine: Any, vocabulary: Vocabulary) -> None:
    """Check that texts have the same ids next to a media kind's special tokens as elsewhere.

    Otherwise a text with media spans cannot be tokenized as a model's processor tokenizes it.

    Raises:
        RecipeError: If a text next to such tokens gets other ids than the same text encoded
            separately.
    """
    for kind, ids in vocabulary.media.items():
        own_ids = [id for id in ids if id >= 0]
        between = "".join(texts_of_ids(vocabulary.tokenizer_json, own_ids)[id] for id in own_ids)
        whole_ids = engine.encode_with_characters([between.join(_BESIDE)], True)[0].tolist()
        parts = [engine.encode_with_characters([text], False)[0].tolist() for text in _BESIDE]
        apart = [*parts[0], *(id for ids_of_part in parts[1:] for id in (*own_ids, *ids_of_part))]
        if whole_ids != apart:
            raise RecipeError(
                f"a text has media of kind {kind!r}, and the tokenizer encodes text next to a"
                " special token differently\nhint: write such documents as messages, with parts of"
                " media",
                ("specials", "media"),
            )


def put_in(
    tokens: Tokens, places: Sequence[Sequence[MediaPlace]], vocabulary: Vocabulary
) -> tuple[Tokens, dict[int, MediaPlaces]]:
    """Insert the tokens of media spans between the tokens of the pieces.

    Return the tokens of the documents, and document number → its media spans. If a piece was
    rejected, its document is rejected.

    Args:
        tokens: The tokens of all pieces that `pieces_of` returns for the documents.
        places: The media spans of each document.
        vocabulary: The vocabulary.
    """
    tokens = refuse_strays(tokens, vocabulary)
    count = np.array([len(of_document) for of_document in places], np.int64)
    flat = [place for of_document in places for place in of_document]
    document = owners(count)
    # The piece before each media span. A document has one piece more than media spans.
    piece = np.arange(len(flat)) + document
    # Insert begin, slot and end token of each media span at the end of the piece before it.
    ids = _ids_of_kinds(flat, vocabulary)
    is_token = ids >= 0
    insert_at = np.repeat(tokens.offsets[piece + 1], is_token.sum(axis=1))
    is_slot = np.zeros(ids.shape, np.bool_)
    is_slot[:, 1] = True
    slots = (insert_at + np.arange(len(insert_at)))[is_slot[is_token]]
    all_ids = np.insert(tokens.ids, insert_at, ids[is_token])
    first_piece = offsets_of(count + 1)
    inserted = np.bincount(document, is_token.sum(axis=1), len(places)).astype(np.int64)
    offsets = tokens.offsets[first_piece] + offsets_of(inserted)
    # Characters count from the start of the piece. Make them count from the start of the document.
    # An inserted token gets the position of its media span.
    characters = tokens.characters
    if characters is not None:
        begins = [
            begin for of_document in places for begin in (0, *(place.at for place in of_document))
        ]
        shifts = np.repeat(np.array(begins, np.int64), np.diff(tokens.offsets))
        place_at = np.array([place.at for place in flat], np.int64)
        inserted_at = np.repeat(place_at, is_token.sum(axis=1))[:, None]
        characters = np.insert(characters + shifts[:, None], insert_at, inserted_at, axis=0)
    rejects = _rejected_documents(tokens, places, first_piece)
    return _repeated(Tokens(all_ids, offsets, rejects, characters), slots, places, vocabulary)


def _rejected_documents(
    tokens: Tokens, places: Sequence[Sequence[MediaPlace]], first_piece: np.ndarray
) -> list[tuple[int, str, str]]:
    """Return (document number, reason, detail) for each document with a rejected piece.

    The reason and the detail are from the document's first rejected piece.
    """
    rejected: dict[int, tuple[int, str, str]] = {}
    for k, reason, detail in tokens.rejected:
        i = int(np.searchsorted(first_piece, k, "right")) - 1
        number = k - int(first_piece[i])
        begin = places[i][number - 1].at if number else 0
        where = f", counted from character {begin}" if begin else ""
        rejected.setdefault(i, (i, reason, f"{detail}{where}"))
    return sorted(rejected.values())


def _ids_of_kinds(places: Sequence[MediaPlace], vocabulary: Vocabulary) -> np.ndarray:
    """Return (begin id, slot id, end id) of each media span, int64[k, 3].

    A begin or end id is −1 if the kind of the span has no such token.
    """
    ids = [vocabulary.media[place.kind] for place in places]
    return np.array(ids, np.int64).reshape(-1, 3)


def put_in_chats(
    tokens: Tokens, places: Sequence[Sequence[MediaPlace]], vocabulary: Vocabulary
) -> tuple[Tokens, dict[int, MediaPlaces]]:
    """Repeat each media placeholder of rendered conversations, once per position of its media span.

    The placeholder is the slot token of the media kind. The template writes it once per media span,
    and the span's `tokens` is the number of repetitions. A conversation is rejected unless its slot
    tokens match its media spans in number, kind and order. The result is as for `put_in`.
    """
    slot_indices = slot_tokens(tokens.ids, vocabulary)
    document = np.searchsorted(tokens.offsets, slot_indices, "right") - 1
    ids = tokens.ids[slot_indices].tolist()
    rejected = {k: (reason, detail) for k, reason, detail in tokens.rejected}
    of_document: dict[int, list[int]] = {}
    for i, id in zip(document.tolist(), ids, strict=True):
        of_document.setdefault(i, []).append(id)
    # The template must have written one placeholder of the right kind per media part.
    for i, own_places in enumerate(places):
        wanted_slots, written_slots = (
            [vocabulary.media[place.kind][1] for place in own_places],
            of_document.get(i, []),
        )
        if i not in rejected and wanted_slots != written_slots:
            # `mismatch` is the number of the first part with another placeholder. It is −1 if the
            # template only writes too few or too many.
            mismatch = next(
                (
                    k
                    for k, pair in enumerate(zip(wanted_slots, written_slots, strict=False))
                    if pair[0] != pair[1]
                ),
                -1,
            )
            detail = (
                f"the template writes {len(written_slots)} placeholders for {len(wanted_slots)}"
                " parts of media"
            )
            if mismatch >= 0:
                detail = (
                    f"the template writes another placeholder than that of part {mismatch} of"
                    f" media, which is {own_places[mismatch].kind}"
                )
            rejected[i] = (BAD_MEDIA, detail)
    # Only slots of accepted documents are repeated. `_repeated` removes other documents.
    is_accepted = np.array([i not in rejected for i in range(len(places))], np.bool_)
    kept_places = [own_places if is_accepted[i] else () for i, own_places in enumerate(places)]
    with_rejects = Tokens(
        tokens.ids, tokens.offsets, [(i, *rejected[i]) for i in sorted(rejected)], tokens.characters
    )
    return _repeated(with_rejects, slot_indices[is_accepted[document]], kept_places, vocabulary)


def slot_tokens(ids: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Return the indices of the slot tokens in `ids`, int64[k]."""
    slots = sorted({slot for _, slot, _ in vocabulary.media.values()})
    if not slots or not len(ids) or ids.max() < slots[0]:
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.isin(ids, slots))


def refuse_strays(tokens: Tokens, vocabulary: Vocabulary) -> Tokens:
    """Reject each document that contains the slot token of a media kind.

    `tokens` has no media spans yet. Only a media span may have slot tokens, and these are inserted
    later. Return the tokens without the tokens of rejected documents.
    """
    slot_indices = slot_tokens(tokens.ids, vocabulary)
    if not len(slot_indices):
        return tokens
    rejected = {i: (reason, detail) for i, reason, detail in tokens.rejected}
    for i, slot_index in zip(
        (np.searchsorted(tokens.offsets, slot_indices, "right") - 1).tolist(),
        slot_indices.tolist(),
        strict=True,
    ):
        stray = (
            f"token {slot_index - int(tokens.offsets[i])} is the slot token"
            f" {int(tokens.ids[slot_index])} of media, at no place"
        )
        rejected.setdefault(i, (BAD_MEDIA, stray))
    return _without_rejected(
        tokens._replace(rejected=[(i, *rejected[i]) for i in sorted(rejected)])
    )


def _without_rejected(tokens: Tokens) -> Tokens:
    """Return the tokens without the tokens of rejected documents."""
    lengths = np.diff(tokens.offsets)
    is_kept = np.ones(len(lengths), np.bool_)
    is_kept[[i for i, *_ in tokens.rejected]] = False
    if is_kept.all():
        return tokens
    of_kept = np.repeat(is_kept, lengths)
    characters = None if tokens.characters is None else tokens.characters[of_kept]
    return Tokens(
        tokens.ids[of_kept], offsets_of(np.where(is_kept, lengths, 0)), tokens.rejected, characters
    )


def _repeated(
    tokens: Tokens,
    slots: np.ndarray,
    places: Sequence[Sequence[MediaPlace]],
    vocabulary: Vocabulary,
) -> tuple[Tokens, dict[int, MediaPlaces]]:
    """Repeat each slot token as often as its media span needs.

    `slots`, int64[k], has the indices of the slot tokens in `tokens.ids`. Return the new tokens,
    and document number → its media spans.
    """
    flat = [place for of_document in places for place in of_document]
    place_counts = np.array([len(of_document) for of_document in places], np.int64)
    # A slot token is repeated, and any other token occurs once.
    times = np.ones(len(tokens.ids), np.int64)
    times[slots] = [place.tokens for place in flat]
    # `ends` maps the number of a token to its number after the repetition.
    ends = offsets_of(times)
    offsets = ends[tokens.offsets]
    document = owners(place_counts)
    has_begin, has_end = _has_begin_and_end(tokens, slots, flat, document, vocabulary)
    first_slot, count = ends[slots] - offsets[document], times[slots]
    spans = np.stack((first_slot - has_begin, first_slot + count + has_end), 1)
    # One token may end a media span and begin the next. It belongs to the first of them.
    follows = document[1:] == document[:-1]
    spans[1:, 0] = np.maximum(spans[1:, 0], np.where(follows, spans[:-1, 1], 0))
    kind_names = list(vocabulary.media)
    kinds = np.array([kind_names.index(place.kind) for place in flat], np.int64)
    refs = [place.ref.encode() for place in flat]
    ref_offsets = offsets_of(np.array([len(ref) for ref in refs], np.int64))
    ref_bytes = np.frombuffer(b"".join(refs), np.uint8)
    every_place = MediaPlaces(spans, first_slot, count, kinds, ref_offsets, ref_bytes)
    bounds = offsets_of(place_counts).tolist()
    of_documents = {
        i: every_place.of(bounds[i], bounds[i + 1]) for i in np.flatnonzero(place_counts).tolist()
    }
    characters = None if tokens.characters is None else np.repeat(tokens.characters, times, axis=0)
    repeated_ids = np.repeat(tokens.ids, times).astype(np.int32, copy=False)
    repeated = Tokens(repeated_ids, offsets, tokens.rejected, characters)
    return _without_rejected(repeated), of_documents


def _has_begin_and_end(
    tokens: Tokens,
    slots: np.ndarray,
    places: Sequence[MediaPlace],
    document: np.ndarray,
    vocabulary: Vocabulary,
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays for k slot tokens, bool[k].

    The first says whether the token before the slot token is the begin token of its media kind. The
    second says whether the token after it is the end token. Both tokens must be in the same
    document as the slot token.
    """
    ids = _ids_of_kinds(places, vocabulary)
    # padded_ids[s] is the token before token s, and padded_ids[s + 2] is the token after it.
    padded_ids = np.concatenate(([-2], tokens.ids, [-2]))
    has_begin = (padded_ids[slots] == ids[:, 0]) & (slots > tokens.offsets[document])
    has_end = (padded_ids[slots + 2] == ids[:, 2]) & (slots + 1 < tokens.offsets[document + 1])
    return has_begin, has_end
