"""Find the parts of a message that are trained differently from the rest of the message.

```
text            <|im_start|>assistant↵<think>↵hm↵</think>↵↵4<|im_end|>↵
the turn                              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
its reasoning                         ------------------------             train_reasoning = false
```
Such a part is a reasoning, the tags of an empty reasoning, or a marked part of the content.
Placeholders give the positions of the strings in the text. The tags around a string are found in
the template's text next to the string.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from packprep.conversations.layouts import Dialogue, Mark
from packprep.conversations.placeholders import (
    TAGS,
    THOUGHTS,
    Place,
    PlacedString,
    Placeholders,
)
from packprep.recipe import DocumentKeys

_TAG = r"[<\[◁][^\s<>\[\]◁▷]+[>\]▷]"
_OPENING = re.compile(rf"(?:{_TAG}[\w =.]*)+\s*\Z")  # such as <|channel|>analysis<|message|>
_CLOSING = re.compile(rf"\s*({_TAG})\s*")
_NAME = r"(?:seed:)?(?:think|thinking|THINK)"
_EMPTY = re.compile(rf"[<\[◁]({_NAME})[>\]▷]\s*[<\[◁]/\1[>\]▷]\s*")
_BEGUN = re.compile(rf"[<\[◁]{_NAME}[>\]▷]\s*\Z")
_MOST_BEGUN = 100  # A reasoning's tag is searched in this many characters before a turn.


class UncertainPart(Exception):
    """An error for a part of a message, if its position in the text is uncertain."""


class Change(NamedTuple):
    """A range of characters [begin, end) that is trained differently from its turn.

    message  number of the message
    train    whether the characters are trained; None: only if the turn is trained
    weight   a factor of the message's weight
    """

    begin: int
    end: int
    message: int
    train: bool | None
    weight: float = 1.0


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation, for finding parts of its messages.

    dialogue  the record's conversation
    text      the template's text
    wanted    whether each message is trained
    trained   (begin, end, message number) of trained turns
    laid      returns placeholders with their positions in the text, or None if none fit
    """

    dialogue: Dialogue
    text: str
    wanted: Sequence[bool]
    trained: Sequence[tuple[int, int, int]]
    laid: Callable[[], Placeholders | None]

    @cached_property
    def ends(self) -> dict[int, int]:
        """Return message number → the end of its trained turn, for messages with such a turn."""
        return {k: end for _, end, k in self.trained}

    def strings(self, k: int, part_name: str) -> list[PlacedString]:
        """Return the strings of a message, with their positions in the text.

        Args:
            k: Message number.
            part_name: Name of the part that is searched, for the error.

        Raises:
            UncertainPart: If the placeholders do not fit the text in exactly one way.
        """
        laid = self.laid()
        if laid is None or not laid.is_certain:
            raise UncertainPart(
                f"the position of {part_name} of message {k} in the text is not certain"
            )
        return laid.strings.get(k, [])


def texts_in_parts(message: Mapping[str, Any]) -> list[str | None]:
    """Return the text of each part of a message's content, with None for a media part.

    A content that is not a list counts as one part.
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return [
        content_part.get("text") if isinstance(content_part, dict) else None
        for content_part in parts
    ]


def find_changes(rendered: Rendered, settings: DocumentKeys) -> list[list[Change]]:
    """Return the ranges that are trained differently from their turns, in at most two lists.

    The first list has the changes that the recipe demands, such as train_reasoning = false. The
    second list has the changes that marks of parts demand. The second list overrides the first. A
    list without changes is left out. The changes of a list are ascending and do not overlap.

    Raises:
        UncertainPart: If the position of a part in the text is not certain.
    """
    dialogue = rendered.dialogue
    answers = [
        k
        for k, message in enumerate(dialogue.messages)
        if rendered.wanted[k] and message["role"] == "assistant"
    ]
    by_recipe: list[Change] = []
    if not settings.train_reasoning:
        for k in answers:
            by_recipe += (Change(*span, k, False) for span in _reasoning(rendered, k))
    if not settings.train_empty_reasoning:
        by_recipe += _empty_reasoning(rendered, set(answers))
    by_marks = [
        Change(*_part(rendered, k, j), k, *mark)
        for k, marks in enumerate(dialogue.parts)
        for j, mark in enumerate(marks)
        if mark != Mark()
    ]
    lists = [
        [change for change in changes if change.begin < change.end]
        for changes in (by_recipe, by_marks)
    ]
    return [sorted(changes, key=lambda change: change.begin) for changes in lists if changes]


def changed_ranges(
    ranges: Sequence[tuple[int, int, float]],
    changes: Sequence[Change],
    weights: Sequence[float],
) -> list[tuple[int, int, float]]:
    """Apply one list of changes from `find_changes` to weighted ranges of characters.

    Args:
        ranges: (begin, end, weight), ascending.
        changes: The list of changes.
        weights: The weight of each message.

    Returns:
        The new ranges, ascending and not overlapping.
    """
    # Training changes only at edges, so it is constant between two edges.
    edges = {edge for begin, end, _ in ranges for edge in (begin, end)}
    edges |= {edge for change in changes for edge in (change.begin, change.end)}
    range_at, change_at = _finder(ranges), _finder(changes)
    weighted_ranges: list[tuple[int, int, float]] = []
    for begin, end in pairwise(sorted(edges)):
        turn, change = range_at(begin), change_at(begin)
        if change is None and turn is not None:
            weighted_ranges.append((begin, end, turn[2]))
        elif change is not None and (change.train or (change.train is None and turn is not None)):
            weighted_ranges.append((begin, end, weights[change.message] * change.weight))
    return weighted_ranges


def _finder(items: Sequence[Any]) -> Callable[[int], Any]:
    """Return a function that maps the index of a character to the item that contains it, or None.

    The first two entries of an item are its range (begin, end). The ranges are ascending.
    """
    begins = [item[0] for item in items]

    def item_at(character: int) -> Any:
        i = bisect_right(begins, character) - 1
        return items[i] if i >= 0 and character < items[i][1] else None

    return item_at


# Reasoning


def _reasoning(rendered: Rendered, k: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a message's reasoning, including its tags."""
    message = rendered.dialogue.messages[k]
    texts = texts_in_parts(message)
    has_field = any(str(message.get(key) or "").strip() for key in THOUGHTS)
    if not has_field and not any(text and TAGS.search(text) for text in texts):
        return
    inside, is_begun = _inside_tags(texts)
    strings = rendered.strings(k, "the reasoning")
    is_thought = [placed.place.key in THOUGHTS or placed.place in inside for placed in strings]
    # A content that starts with reasoning needs a <think> before it in the text.
    lacks_tag = is_begun and any(is_thought[:1]) and not _follows_tag(rendered.text, strings[0])
    if is_begun is None or (is_begun and has_field) or lacks_tag:
        raise UncertainPart(f"<think> and </think> do not pair in the content of message {k}")
    first_index = 0
    # Consecutive strings of reasoning are one range.
    for i, (placed, thinks) in enumerate(zip(strings, is_thought, strict=True)):
        if not thinks:
            continue
        if i == 0 or not is_thought[i - 1]:
            first_index = i
        if i + 1 == len(strings) or not is_thought[i + 1]:
            yield _with_tags(rendered, k, strings[first_index], placed)


def _inside_tags(texts: Sequence[str | None]) -> tuple[set[Place], bool | None]:
    """Return the strings between <think> and </think>, and whether the content starts inside.

    The second value is True if the first tag of the content is </think>. In this case, the
    generation prompt has the <think>, and the content starts inside the reasoning. The second value
    is None if the tags do not form pairs of <think> and </think>.
    """
    inside: set[Place] = set()
    places_before: list[Place] = []
    tags: list[str] = []
    for j, text in enumerate(texts):
        for i, string in enumerate(TAGS.split(text or "")):
            if not TAGS.fullmatch(string):
                places_before.append(Place("content", j, i))
                continue
            tags.append(string.strip())
            # A closing tag shows that the strings before it are reasoning.
            if "/" in string:
                inside.update(places_before)
            places_before = []
    is_begun = tags[:1] == ["</think>"]
    all_tags = ["<think>"] * is_begun + tags
    is_paired = all_tags == ["<think>", "</think>"] * (len(all_tags) // 2)
    return inside, is_begun if is_paired else None


def _follows_tag(text: str, placed: PlacedString) -> bool:
    """Return whether a string directly follows a <think> in the text, except for spaces."""
    return text[placed.before : placed.begin].rstrip().endswith("<think>")


def _with_tags(
    rendered: Rendered, k: int, first_string: PlacedString, last_string: PlacedString
) -> tuple[int, int]:
    """Return the range of a reasoning, from its opening tag to the end of its closing tag.

    If one of the tags is missing, return only the range from string `first_string` to string
    `last_string`.

    Raises:
        UncertainPart: If the closing tag is the last text of the turn and has no "/". Such a tag
            may close the turn instead of the reasoning.
    """
    text = rendered.text
    head = text[first_string.before : first_string.begin]
    opening = _BEGUN.search(head) or _OPENING.search(head)
    closing = _CLOSING.match(text, last_string.end, last_string.after) if opening else None
    if opening is None or closing is None:
        return first_string.begin, last_string.end
    is_last = not text[closing.end() : rendered.ends.get(k)].strip()
    if is_last and "/" not in closing[1]:
        raise UncertainPart(f"the end of the reasoning of message {k} in the text is not certain")
    return first_string.before + opening.start(), closing.end()


def _empty_reasoning(rendered: Rendered, answers: set[int]) -> Iterator[Change]:
    """Yield a change for each answer that begins with the tags of an empty reasoning.

    The change covers these tags. `answers` has the message numbers of the answers.
    """
    text = rendered.text
    for begin, end, k in rendered.trained:
        if k not in answers:
            continue
        # The prompt may have written the opening tag, which is then before the turn.
        begun = _BEGUN.search(text[max(begin - _MOST_BEGUN, 0) : begin])
        block_begin = begin - len(begun[0]) if begun else begin
        block = _EMPTY.match(text, block_begin, end)
        if block is None and (block := _EMPTY.search(text, begin, end)) is not None:
            # After the first string, such tags are a part of the content.
            strings = rendered.strings(k, "an empty reasoning")
            content_begin = strings[0].begin if strings else end
            block = block if block.end() <= content_begin else None
        if block is not None:
            yield Change(max(block.start(), begin), block.end(), k, False)


# Parts of a content


def _part(rendered: Rendered, k: int, j: int) -> tuple[int, int]:
    """Return the range of part j of message k.

    The range is (0, 0) if the template leaves the part out because it is reasoning.

    Raises:
        UncertainPart: If the template does not write the part exactly once, and does not leave it
            out as reasoning.
    """
    texts = texts_in_parts(rendered.dialogue.messages[k])
    part_name = f"part {j}"
    strings = [s for s in rendered.strings(k, part_name) if s.place.key == "content"]
    own_strings = [placed for placed in strings if placed.place.part == j]
    pieces = TAGS.split(texts[j] or "")
    inside, _ = _inside_tags(texts)
    # Blank strings and tags need not be in the text.
    wanted_places = [Place("content", j, i) for i, piece in enumerate(pieces) if piece.strip()]
    wanted_places = [place for place in wanted_places if not TAGS.fullmatch(pieces[place.segment])]
    shown = [placed.place for placed in own_strings if placed.once and placed.begin < placed.end]
    # A template may drop reasoning, so a part that has only reasoning may be missing.
    is_left_out = not own_strings and all(place in inside for place in wanted_places)
    if (
        len(shown) < len(own_strings)
        or not is_left_out
        and set(wanted_places) - inside - set(shown)
    ):
        raise UncertainPart(
            f"the template does not write part {j} of message {k} exactly once: write the message's"
            " parts as one text"
        )
    if own_strings:
        # Tags at the ends of the part belong to it.
        first_string, last_string = own_strings[0], own_strings[-1]
        lead = _tags_in(pieces[: first_string.place.segment])
        tail = _tags_in(pieces[last_string.place.segment + 1 :])
        opening = re.search(lead + r"\Z", rendered.text[first_string.before : first_string.begin])
        closing = re.compile(r"\s*" + tail).match(rendered.text, last_string.end, last_string.after)
        return (
            first_string.before + opening.start() if lead and opening else first_string.begin,
            closing.end() if tail and closing else last_string.end,
        )
    return _part_of_tags(rendered, k, j, strings, _tags_in(pieces))


def _part_of_tags(
    rendered: Rendered, k: int, j: int, strings: Sequence[PlacedString], pattern: str
) -> tuple[int, int]:
    """Return the range of a part that has only tags and no string in the text.

    `pattern` matches the tags. They are searched next to the strings of other parts. If they are
    not found, return (0, 0).

    Raises:
        UncertainPart: If the tags are found more than once.
    """
    if not pattern:
        return 0, 0
    # The tags are between the strings of the neighbouring parts.
    string_after = next((s for s in strings if s.place.part > j), None)
    string_before = next((s for s in reversed(strings) if s.place.part < j), None)
    if string_after is not None:
        bounds = string_after.before, string_after.begin
    elif string_before is not None:
        bounds = string_before.end, string_before.after
    else:
        bounds = 0, len(rendered.text)
    tag_ranges = [match.span() for match in re.compile(pattern).finditer(rendered.text, *bounds)]
    if len(tag_ranges) > 1:
        raise UncertainPart(f"the text has the tags of part {j} of message {k} more than once")
    return tag_ranges[0] if tag_ranges else (0, 0)


def _tags_in(pieces: Iterable[str]) -> str:
    """Return a pattern that matches the tags in `pieces`, with white space after each tag."""
    tags = [re.escape(piece.strip()) for piece in pieces if TAGS.fullmatch(piece)]
    return "".join(tag + r"\s*" for tag in tags)
