"""What of a conversation is trained otherwise than its turns: reasoning, tags without one, and parts
of a content that say so.

```
"alpha" for hm     …assistant↵<think>↵alpha↵</think>↵↵4<|im_end|>↵      alike up to the reasoning, and from behind it
"zero" for hm      …assistant↵<think>↵zero↵</think>↵↵4<|im_end|>↵
```
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from os.path import commonprefix
from typing import Any, NamedTuple

from tests.twin.records import Talk

WORDS = "alpha", "zero"  # which begin and end with other characters
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
THINK_TAG = re.compile(r"(\s*</?think>\s*)")  # by which templates take a content apart
TAG = r"[<\[◁][^\s<>\[\]◁▷]+[>\]▷]"
REASONING = r"(?:seed:)?(?:thinking|think|THINK)"

Message = dict[str, Any]
Span = tuple[int, int, int]  # begin, end, number of the message


class Changed(NamedTuple):
    """Characters of a message, whether they are trained (None: unsaid), and what multiplies its
    weight."""

    begin: int
    end: int
    message: int
    train: bool | None
    weight: float = 1.0


class Shown(NamedTuple):
    """A string of a message between tags, and its characters in the text."""

    key: str
    part: int
    piece: int
    begin: int
    end: int


class Unknown(Exception):
    """Renderings do not tell."""


class Parts:
    """A conversation whose parts are looked for. render: messages → text, None where that fails."""

    def __init__(
        self,
        render: Callable[[Sequence[Message]], str | None],
        messages: Sequence[Message],
        talk: Talk,
        text: str,
    ):
        self._render, self._messages, self._talk, self._text = render, messages, talk, text

    def changes(
        self, spans: Sequence[Span], wanted: Sequence[bool], documents: Mapping[str, Any]
    ) -> list[list[Changed]]:
        """What the recipe says, and what parts say, which goes before. Unknown where renderings do
        not tell."""
        answers = [
            k
            for k, message in enumerate(self._messages)
            if wanted[k] and message["role"] == "assistant"
        ]
        by_recipe: list[Changed] = []
        if not documents["train_reasoning"]:
            for k in answers:
                by_recipe += [Changed(*found, k, False) for found in self._reasoning(k)]
        if not documents["train_empty_reasoning"]:
            for begin, end, k in spans:
                if k in answers:
                    by_recipe += self._empty(begin, end, k)
        by_parts = [
            Changed(*self._part(k, j), k, train, weight)
            for k, marks in enumerate(self._talk.parts)
            for j, (train, weight) in enumerate(marks)
            if (train, weight) != (None, 1)
        ]
        return [by_recipe, by_parts]

    def _texts(self, k: int) -> list[str]:
        """The texts of a content's parts, as the record has them; "" for one of media."""
        content = self._talk.messages[k].get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        return [part.get("text") or "" for part in parts]

    def _with(self, k: int, key: str, part: int, piece: int, word: str) -> Message:
        """Message k with a word for one of its strings."""

        def instead(text: str) -> str:
            pieces = THINK_TAG.split(text)
            pieces[piece] = word
            return "".join(pieces)

        message = self._messages[k]
        if key != "content":
            thought = instead(message[key])
            return message | {name: thought for name in THOUGHTS if name in message}
        content, texts = message["content"], self._texts(k)
        if isinstance(content, list):
            own = [{**one, "text": instead(one["text"])} if j == part else one
                   for j, one in enumerate(content)]  # fmt: skip
            return {**message, "content": own}
        texts[part] = instead(texts[part])
        return {**message, "content": "".join(texts)}

    def _shown(self, k: int) -> list[Shown]:
        """The strings of a message that the text has, in its order."""
        message = self._messages[k]
        thoughts = [(key, 0, message[key]) for key in THOUGHTS[:1] if message.get(key)]
        contents = [("content", j, text) for j, text in enumerate(self._texts(k))]
        found = []
        for key, part, text in [*thoughts, *contents]:
            for piece, string in enumerate(THINK_TAG.split(text)):
                if string.strip() and not THINK_TAG.fullmatch(string):
                    found += self._characters(k, key, part, piece)
        return sorted(found, key=lambda shown: shown.begin)

    def _characters(self, k: int, key: str, part: int, piece: int) -> list[Shown]:
        one, two = (
            self._render(
                [
                    *self._messages[:k],
                    self._with(k, key, part, piece, word),
                    *self._messages[k + 1 :],
                ]
            )
            for word in WORDS
        )
        if one is None or two is None:
            raise Unknown
        if one == two:
            return []
        before, behind = commonprefix([one, two]), commonprefix([one[::-1], two[::-1]])[::-1]
        if not (self._text.startswith(before) and self._text.endswith(behind)):
            raise Unknown
        return [Shown(key, part, piece, len(before), len(self._text) - len(behind))]

    def _thinks(self, k: int) -> set[tuple[int, int]]:
        """(part, piece) of a content's strings between <think>, or its begin, and </think>."""
        found: set[tuple[int, int]] = set()
        open_now: list[tuple[int, int]] = []
        for j, text in enumerate(self._texts(k)):
            for i, string in enumerate(THINK_TAG.split(text)):
                if string.strip() == "</think>":
                    found.update(open_now)
                if THINK_TAG.fullmatch(string):
                    open_now = []
                else:
                    open_now.append((j, i))
        return found

    def _reasoning(self, k: int) -> list[tuple[int, int]]:
        """The reasoning of a message with the tags around it."""
        message = self._messages[k]
        if not any("think>" in text for text in self._texts(k)) and not any(
            str(message.get(key) or "").strip() for key in THOUGHTS
        ):
            return []
        shown, inside = self._shown(k), self._thinks(k)
        found = []
        runs = groupby(
            range(len(shown)),
            lambda i: shown[i].key != "content" or (shown[i].part, shown[i].piece) in inside,
        )
        for thinks, run in runs:
            if thinks:
                numbers = list(run)
                found.append(self._dressed(shown, numbers[0], numbers[-1]))
        return found

    def _dressed(self, shown: Sequence[Shown], first: int, last: int) -> tuple[int, int]:
        """From the tag before the first of some strings to behind the tag after the last."""
        start = shown[first - 1].end if first else 0
        stop = shown[last + 1].begin if last + 1 < len(shown) else len(self._text)
        begin, end = shown[first].begin, shown[last].end
        head, rest = self._text[start:begin], self._text[end:stop]
        name = re.search(rf"[<\[◁]{REASONING}[>\]▷]\s*$", head)
        tag = name or re.search(rf"({TAG}[\w =.]*)+\s*$", head)
        closing = re.match(rf"\s*{TAG}\s*", rest)
        if not (tag and closing):
            return begin, end
        return start + tag.start(), end + closing.end()

    def _empty(self, begin: int, end: int, k: int) -> list[Changed]:
        """The tags without a reasoning in a trained turn, before what it says."""
        block = rf"[<\[◁]({REASONING})[>\]▷]\s*[<\[◁]/\1[>\]▷]\s*"
        opened = re.search(rf"[<\[◁]{REASONING}[>\]▷]\s*$", self._text[:begin][-100:])
        first = begin - len(opened[0]) if opened else begin
        found = re.match(block, self._text[first:end])
        if found:
            return [Changed(begin, first + found.end(), k, False)]
        found = re.search(block, self._text[begin:end])
        if not found:
            return []
        said = min((shown.begin for shown in self._shown(k)), default=end)
        if begin + found.end() > said:
            return []
        return [Changed(begin + found.start(), begin + found.end(), k, False)]

    def _part(self, k: int, j: int) -> tuple[int, int]:
        """The characters of a part of a content, with the tags at its ends."""
        shown = [one for one in self._shown(k) if one.key == "content"]
        own = [one for one in shown if one.part == j]
        pieces = THINK_TAG.split(self._texts(k)[j])
        if own:
            start = max((one.end for one in shown if one.end <= own[0].begin), default=0)
            stop = min((one.begin for one in shown if one.begin >= own[-1].end), default=None)
            head, rest = self._text[start : own[0].begin], self._text[own[-1].end : stop]
            lead, tail = _tags(pieces[: own[0].piece]), _tags(pieces[own[-1].piece + 1 :])
            before = re.search(lead + "$", head) if lead else None
            after = re.match(r"\s*" + tail, rest) if tail else None
            begin = start + before.start() if before else own[0].begin
            return begin, own[-1].end + (after.end() if after else 0)
        if not _tags(pieces):
            return 0, 0
        start, stop = 0, len(self._text)
        following = [one for one in shown if one.part > j]
        earlier = [one for one in shown if one.part < j]
        if following:
            stop = following[0].begin
            start = self._last_end(k, stop)
        elif earlier:
            start = earlier[-1].end
        found = re.search(_tags(pieces), self._text[start:stop])
        return (start + found.start(), start + found.end()) if found else (0, 0)

    def _last_end(self, k: int, stop: int) -> int:
        """Where the last string before a character of message k ends, of this or the one before
        it."""
        shown = [one for j in (k - 1, k) if j >= 0 for one in self._shown(j)]
        return max((one.end for one in shown if one.end <= stop), default=0)


def _tags(pieces: Sequence[str]) -> str:
    tags = (piece.strip() for piece in pieces if THINK_TAG.fullmatch(piece))
    return "".join(tag + r"\s*" for tag in tags)


def trained_characters(
    length: int,
    spans: Sequence[Span],
    changes: Sequence[Sequence[Changed]],
    weights: Sequence[float],
) -> list[float]:
    """The weight of each of a text's characters, 0 where it is not trained. weights: of each
    message."""
    own: list[float | None] = [None] * length  # None: not trained
    for begin, end, k in spans:
        own[begin:end] = [weights[k]] * (end - begin)
    for of_list in changes:
        before = list(own)
        for begin, end, k, train, weight in of_list:
            for at in range(begin, end):
                is_trained = before[at] is not None if train is None else train
                own[at] = weights[k] * weight if is_trained else None
    return [0.0 if weight is None else weight for weight in own]
