"""Texts → ids by the `tokenizers` library, and which of the tokens are trained."""

import bisect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.twin.reading import Text
from tests.twin.records import Picture


class Trained(NamedTuple):
    """What is trained of a document that says so; numbers are of its tokens."""

    # ascending, disjoint, half-open; none touches another of its weight
    spans: list[tuple[int, int]]
    weights: list[float]  # of each
    cuts: list[int]  # the first tokens of messages after the first
    system: int  # leading tokens that later pieces repeat
    eos: float  # the weight of the end of the text; 0 where it is not trained
    messages: list[
        tuple[int, str]
    ] = []  # first token and role of each, where roles are known and count
    media: list["Spot"] = []


class Spot(NamedTuple):
    """Where a place of media stands among a document's tokens: all of it, its slots, and what they
    stand for."""

    begin: int
    end: int
    first: int
    slots: int
    kind: str
    ref: str


class Tokenizer:
    """The dataset's tokenizer with nothing that adds, cuts, pads or draws; loaded once in a
    process.

    engine: the plan's. Where it is `fastokens`, that is asked for a text on which `tokenizers`
    fails. media: kind → ids of what begins a place, fills its slots and ends it; −1 for none.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        special_ids: list[int],
        special_text: str,
        engine: str = "",
        media: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ):
        import tokenizers

        self.media = media
        self.slots = {slot for _, slot, _ in media.values()}

        parsed = json.loads(tokenizer_json)
        self.parsed, self.special_text = parsed, special_text
        flagged = [] if special_text == "special" else special_ids
        added = [
            {**entry, "special": bool(entry.get("special")) or entry["id"] in flagged}
            for entry in parsed.get("added_tokens") or []
        ]
        model = parsed["model"]
        if "dropout" in model:
            model = {**model, "dropout": None}
        off = {"truncation": None, "padding": None, "post_processor": None}
        plain = json.dumps({**parsed, **off, "added_tokens": added, "model": model})
        self._plain = tokenizers.Tokenizer.from_str(plain)
        self._plain.encode_special_tokens = special_text != "special"
        self._chat = tokenizers.Tokenizer.from_str(plain)
        self._chat.encode_special_tokens = False
        self._fast, self._json = engine == "fastokens", plain
        texts = {i: text for text, i in self._vocabulary() if i in special_ids}
        texts.update(
            {entry["id"]: entry["content"] for entry in added if entry["id"] in special_ids}
        )
        self._special_texts = [text for text in texts.values() if text]
        self._forbidden = set(texts) - {self._unknown()}
        self.forbidden_ids = set(special_ids) - {self._unknown()}
        self._forbidden_in_chat = self._forbidden - {entry["id"] for entry in added}
        self._normalizing = _growing(parsed.get("normalizer"))

    def encode(self, document: Text) -> tuple[list[int], Trained | None] | None:
        """(ids, what is trained); None where the text of a special token turns the document away,
        or the tokenizer fails."""
        limited = self.special_text != "special"
        cuts = [0, *(at for *_, at in document.media), len(document.text)]
        parts = (
            [document.text] if document.chat else [document.text[a:b] for a, b in pairwise(cuts)]
        )
        if limited and (document.chat or self.special_text == "reject"):
            looked_at = document.strings if document.chat else parts
            there = [
                special
                for special in self._special_texts
                if any(special in text for text in looked_at)
            ]
            if there:
                return None
        tokenizer = self._chat if document.chat else self._plain
        # Where all is trained it does not matter where tokens begin, and any engine may be asked.
        everything = bool(document.media) and not document.chat and self._trains_all(document)
        forbidden = self._forbidden_in_chat if document.chat else self._forbidden
        ids: list[int] = []
        begins: list[int] = []
        spots: list[Spot] = []
        for i, part in enumerate(parts):
            if self._outgrows(part):
                return None
            encoding = _unless_it_fails(partial(tokenizer.encode, part, add_special_tokens=False))
            if encoding is None:
                fast = self._fast and (document.spans is None or everything)
                own = _unless_it_fails(partial(self._other_ids, part)) if fast else None
                if own is None:
                    return None
                where = [(0, 0)] * len(own)
            else:
                own, where = encoding.ids, encoding.offsets
            if limited and not forbidden.isdisjoint(own):
                return None
            if not document.chat and not self.slots.isdisjoint(own):
                return None
            ids += own
            if document.spans is not None:
                begins += [cuts[i] + begin for begin in counted_from(document.blocks, where)]
            if not document.chat and i < len(document.media):
                kind, count, ref, at = document.media[i]
                before, slot, behind = self.media[kind]
                head, tail = [before] if before >= 0 else [], [behind] if behind >= 0 else []
                first = len(ids) + len(head)
                spots.append(Spot(len(ids), first + count + len(tail), first, count, kind, ref))
                ids += head + [slot] * count + tail
                begins += [at] * (len(head) + count + len(tail))
        if document.chat and self.media:
            found = self._filled(ids, begins, document.media)
            if found is None:
                return None
            ids, begins, spots = found
        if document.spans is None:
            return ids, None
        return ids, trained_tokens(document, begins, spots)

    def _trains_all(self, document: Text) -> bool:
        spans = document.spans or []
        return [span[:2] for span in spans] == [(0, len(document.text))] or not document.text

    def _filled(
        self, ids: list[int], begins: list[int], media: Sequence[Picture]
    ) -> tuple[list[int], list[int], list[Spot]] | None:
        """(ids, begins, places) of a chat whose k-th slot token stands as often as its k-th part
        says; None where the slot tokens are not those of its parts."""
        if [i for i in ids if i in self.slots] != [self.media[kind][1] for kind, *_ in media]:
            return None
        left = list(media)
        made: list[int] = []
        where: list[int] = []
        spots: list[Spot] = []
        for i, id in enumerate(ids):
            times = 1
            if id in self.slots:
                kind, times, ref, _ = left.pop(0)
                before, _, behind = self.media[kind]
                has_begin = (
                    i > 0
                    and ids[i - 1] == before >= 0
                    and not (spots and spots[-1].end == len(made))
                )
                has_end = i + 1 < len(ids) and ids[i + 1] == behind >= 0
                first = len(made)
                spots.append(
                    Spot(first - has_begin, first + times + has_end, first, times, kind, ref)
                )
            made += [id] * times
            where += [begins[i]] * times
        return made, where, spots

    def _outgrows(self, text: str) -> bool:
        """Whether a step of the normalizer makes more than 2²⁰ characters of a text, and more than
        16 times its own."""
        most = max(1 << 20, 16 * len(text))
        for step in self._normalizing:
            if step["type"] == "Prepend":
                length = len(text) * (len(step["prepend"]) + 1)
            elif step["type"] == "Replace":
                gone, marked = (
                    len(_normalized({**step, "content": new}, text)) for new in ("", "#")
                )
                length = gone + len(step["content"]) * (marked - gone)
            else:
                length = len(text)
            if length > most:
                return True
            text = _normalized(step, text)
        return False

    def _other_ids(self, text: str) -> list[int]:
        """The ids by `fastokens`, without special tokens where their text is text."""
        from fastokens import _native

        plain = json.loads(self._json)
        if self.special_text != "special":
            plain["added_tokens"] = [
                entry for entry in plain["added_tokens"] if not entry["special"]
            ]
        tokenizer = _native.Tokenizer.from_json_str(json.dumps(plain))
        return tokenizer.encode(text, add_special_tokens=False).ids

    def _vocabulary(self) -> list[tuple[str, int]]:
        vocabulary = self.parsed["model"].get("vocab") or {}
        if isinstance(vocabulary, dict):
            return list(vocabulary.items())
        return [(entry[0], i) for i, entry in enumerate(vocabulary)]

    def _unknown(self) -> int | None:
        model: dict[str, Any] = self.parsed["model"]
        if isinstance(model.get("unk_id"), int):
            return model["unk_id"]
        vocabulary = model.get("vocab")
        return vocabulary.get(model.get("unk_token")) if isinstance(vocabulary, dict) else None

    def continuing(self) -> set[int]:
        """The ids of tokens that begin inside a character of UTF-8: with a byte 10xxxxxx."""
        if "ByteLevel" in json.dumps(
            [self.parsed.get("pre_tokenizer"), self.parsed.get("decoder")]
        ):
            inside = {
                character
                for byte, character in enumerate(_characters_of_bytes())
                if 128 <= byte < 192
            }
            return {i for text, i in self._vocabulary() if text and text[0] in inside}
        if not self.parsed["model"].get("byte_fallback"):
            return set()
        bytes_inside = {f"<0x{byte:02X}>" for byte in range(128, 192)}
        return {i for text, i in self._vocabulary() if text in bytes_inside}


def _growing(normalizer: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, if together they may make more than 16 characters of one; else
    none."""
    steps, left, most = [], [normalizer] if normalizer else [], 1
    while left:
        step = left.pop(0)
        if step["type"] == "Sequence":
            left = [*step["normalizers"], *left]
            continue
        steps.append(step)
        if step["type"] == "Prepend":
            most *= len(step["prepend"]) + 1
        elif step["type"] == "Replace":
            old, new = step["pattern"].get("String"), len(step["content"])
            most *= max(1, math.ceil(new / len(old))) if old else new + 1
    return steps if most > 16 else []


def _normalized(step: dict[str, Any], text: str) -> str:
    import tokenizers

    alone = {"normalizer": step, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return tokenizers.Tokenizer.from_str(json.dumps(alone)).normalizer.normalize_str(text)


def _unless_it_fails(made: Callable[[], Any]) -> Any:
    """What a library makes; None where it fails, be it by a panic, which is no Exception."""
    try:
        return made()
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None


def _characters_of_bytes() -> list[str]:
    """A byte-level vocabulary's characters: a byte that prints is itself, the others are numbered
    from U+0100."""
    free = iter(range(256, 512))
    prints = [33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174 for byte in range(256)]
    return [chr(byte if itself else next(free)) for byte, itself in enumerate(prints)]


def counted_from(blocks: Sequence[int], characters: Iterable[tuple[int, int]]) -> list[int]:
    """The character from which each token counts: its first, or where a block begins, of a token
    that holds what is before the block and its begin."""
    counted = [0]
    for begin, end in characters:
        k = bisect.bisect_right(blocks, begin)
        counted.append(
            max(counted[-1], blocks[k] if k < len(blocks) and blocks[k] < end else begin)
        )
    return counted[1:]


def trained_tokens(document: Text, begins: list[int], spots: Sequence[Spot] = ()) -> Trained:
    """A token is trained if the character from which it counts lies in a span, with the span's
    weight, and it is of no place."""
    weights, k = [], 0
    spans = document.spans or []
    for begin in begins:
        while k < len(spans) and spans[k][1] <= begin:
            k += 1
        weights.append(spans[k][2] if k < len(spans) and spans[k][0] <= begin else 0.0)
    for spot in spots:
        weights[spot.begin : spot.end] = [0.0] * (spot.end - spot.begin)
    first_at = [bisect.bisect_left(begins, boundary) for boundary in document.boundaries]
    found = runs(weights)
    system = sum(begin < document.system_end for begin in begins)
    if spots and spots[0].begin < system:
        system = 0  # a place stands once
    return Trained(
        [(begin, end) for begin, end, _ in found],
        [weight for _, _, weight in found],
        sorted({first for first in first_at if 0 < first < len(begins)}),
        system,
        spans[-1][2] if spans and spans[-1][1] == len(document.text) else 0.0,
        list(zip([0, *first_at], document.roles, strict=True)) if document.roles else [],
        list(spots),
    )


def runs(weights: list[float]) -> list[tuple[int, int, float]]:
    """(begin, end, weight) of the ranges of one weight other than 0."""
    found: list[tuple[int, int, float]] = []
    for i, weight in enumerate(weights):
        if weight and i and weights[i - 1] == weight:
            found[-1] = (found[-1][0], i + 1, weight)
        elif weight:
            found.append((i, i + 1, weight))
    return found


def trained_ids(
    ids: list[int], weights: list[float], content: list[int], append_eos: int | None
) -> tuple[Trained | None, float]:
    """(what is trained of a document of tokens with weights, or None where all has one weight; that
    weight).

    content: the ids without bos and eos, as `content` gives it.
    """
    if len(set(weights)) < 2:
        return None, weights[0] if weights else 1.0
    has_eos = ids[-1] == append_eos
    begin = len(ids) - len(content) - has_eos
    own = weights[begin : begin + len(content)]
    ranges = runs(own)
    spans = [(a, b) for a, b, _ in ranges]
    end = weights[-1] if has_eos or content else 0.0
    return Trained(spans, [weight for _, _, weight in ranges], [], 0, end), 1.0


def content(
    ids: list[int],
    vocab_size: int,
    forbidden: set[int],
    append_eos: int | None,
    prepend_bos: int | None,
) -> list[int] | None:
    """The ids without one eos at the end, if packprep appends it, and without one bos at the begin,
    if it is prepended.

    None: an id is none of the vocabulary's, or the content has a forbidden one. append_eos,
    prepend_bos: the ids, or None.
    """
    if not all(0 <= i < vocab_size for i in ids):
        return None
    if ids and ids[-1] == append_eos:
        ids = ids[:-1]
    if ids and ids[0] == prepend_bos:
        ids = ids[1:]
    return ids if forbidden.isdisjoint(ids) else None
