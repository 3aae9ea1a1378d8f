"""Determine which fields of a record are read, and which layout the record has.

A layout is a form of conversations, or of prompts and answers. A record may also have no layout.

```
{"text": …}                                     a text, optionally with loss_spans, weight, media
                                                or messages
{"messages": […], "tools": […]}                 messages
{"conversations": [{"from": …, "value": …}]}    sharegpt
{"prompt": …, "completion": …}                  prompt_completion
{"instruction": …, "input": …, "output": …}     alpaca
{"prompt": …, "chosen": …, "rejected": …}       preference data, which packprep refuses
```

A record with a text and messages has the layout "messages". A record with a text and no messages
has no layout, unless `messages_format` names a layout.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.sources.formats.batch import (
    LOSS_SPANS,
    MEDIA,
    Grouping,
    GroupValue,
    Supervision,
)

OF_PLACE = {"at", "tokens", "ref", "kind"}
"""The keys of an entry in a record's list of media."""
UNREAD_MEDIA = (
    "its documents have media, which would be ignored\n"
    'hint: name their kinds in specials.media, or set documents.loss_spans = "ignore" to train'
    " only on the texts"
)


class Layout(NamedTuple):
    """A form of records. The fields of a record show which layout it has.

    Attributes:
        name: Value of `messages_format`. For a refused layout, its common name.
        needs: Fields that every record with this layout has.
        may_have: Fields that a record with this layout may have.
        advice: Remedy for a refused layout, or an empty string for a readable one.
    """

    name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...] = ()
    advice: str = ""


_MEDIA_ADVICE = (
    "name its kind in specials.media and write it as a part of a message's content, or take the"
    " field away"
)
_MARK_ADVICE = 'say it by "train" or "weight" of each message, or by "weight" of the record'
REFUSED_FIELDS = {
    "functions": "write them as tools",
    "function_call": "write the call as tool_calls of a message",
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA_ADVICE),
    **dict.fromkeys(
        ("training", "train_detail", "loss_mask", "loss_scale", "loss_weight"), _MARK_ADVICE
    ),
}
"""Maps the name of a refused field to a remedy. A refused field of a record with messages says what
a model should read or train, but packprep does not read it. If it has a value, the record is
rejected.
"""
_COMMON = ("tools", "chat_template_kwargs", "weight")
_RENAME = "name them prompt and completion, or write messages of role and content"
LAYOUTS = (
    Layout("messages", ("messages",), ("system", *_COMMON)),
    Layout(
        "preference data",
        ("chosen", "rejected"),
        advice=(
            "packprep trains on one answer: write prompt and chosen as messages, or as prompt and"
            " completion"
        ),
    ),
    Layout(
        "rated completions",
        ("prompt", "completion", "label"),
        advice=(
            "packprep trains on all that it reads: keep the records whose label is true, without"
            " the label"
        ),
    ),
    Layout(
        "rated steps",
        ("prompt", "completions", "labels"),
        advice="packprep trains on one answer: write prompt and completion",
    ),
    Layout("sharegpt", ("conversations",), ("system", *_COMMON)),
    Layout("prompt_completion", ("prompt", "completion"), ("system", *_COMMON)),
    Layout("alpaca", ("instruction", "output"), ("input", "system", "history", *_COMMON)),
    *(
        Layout(f"{asked} and {answered}", (asked, answered), advice=_RENAME)
        for asked, answered in product(
            ("prompt", "instruction", "question", "query", "problem", "input"),
            ("response", "answer", "answers", "output", "solution", "target"),
        )
    ),
)
"""All layouts. A record has the first layout with all `needs` fields in the record."""


def field_at(record: Any, key: str) -> Any:
    """Return the value at a key of a record, or None if the record does not have the key.

    If the record has no key `a.b`, this key refers to key b of the object at key a.
    """
    if not isinstance(record, dict):
        return None
    if key in record or "." not in key:
        return record.get(key)
    outer_key, inner_key = key.split(".", 1)
    return field_at(record.get(outer_key), inner_key)


def is_message(keys: Collection[str]) -> bool:
    """Return whether an object with these keys is a message.

    A message has the keys "role" and "content", or "from" and "value".
    """
    return any(keys_of_one <= set(keys) for keys_of_one in ({"role", "content"}, {"from", "value"}))


@dataclass(frozen=True)
class Fields:
    """A source's settings for the fields and layouts of its records.

    Attributes:
        messages_key: Key of the messages.
        tools_key: Key of the tools.
        format: Name of the layout of all records. With "auto", the layout of each record is
            detected from its fields.
        kinds: Names of the media kinds. With an empty tuple, media is ignored.
    """

    messages_key: str = "messages"
    tools_key: str = "tools"
    format: str = "auto"
    kinds: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: Source, kinds: tuple[str, ...] = ()) -> "Fields":
        """Return the `Fields` with the settings of a recipe's source."""
        return cls(source.messages_key, source.tools_key, source.messages_format, kinds)

    def key_of(self, field: str) -> str:
        """Return the key of the layout field `field` in records of this source.

        For the field "messages", this is `messages_key`.
        """
        if field == "tools":
            return self.tools_key
        own_list = field == "messages" or (
            field == "conversations" and self.messages_key != "messages"
        )
        return self.messages_key if own_list else field

    def beside_text(self, text_key: str) -> list[str]:
        """Return the keys that a record with a text may have in addition to `text_key`.

        These are the keys of loss_spans, messages and weight, and of media if there are media
        kinds. If `messages_key` is nested, such as "chat.messages", its first part "chat" is also
        in the list.
        """
        keys = (
            LOSS_SPANS,
            self.messages_key,
            self.messages_key.split(".")[0],
            *((MEDIA,) if self.kinds else ()),
            "weight",
        )
        return [key for key in dict.fromkeys(keys) if key != text_key]

    def says(self, key: str) -> bool:
        """Return whether the field at `key` is read even if the record has a text.

        This is the case for loss_spans, weight, messages, and optional fields of all layouts, such
        as tools. With media kinds, it is also the case for media.
        """
        own_keys = (LOSS_SPANS, MEDIA) if self.kinds else (LOSS_SPANS,)
        return key in (*own_keys, *map(self.key_of, (*LAYOUTS[0].needs, *_COMMON)))

    def layout_of(self, value: Callable[[str], Any], has_text: bool) -> Layout | None:
        """Return the layout of a record, or None if it has no layout.

        Args:
            value: Function that takes a key and returns the record's value at this key, or None.
            has_text: Whether the record has a text or loss_spans. With `format` "auto", such a
                record can only have the layout "messages".
        """
        if self.format != "auto":
            return next(layout for layout in LAYOUTS if layout.name == self.format)
        for layout in LAYOUTS[:1] if has_text else LAYOUTS:
            needed_values = [value(self.key_of(field)) for field in layout.needs]
            if all(v is not None for v in needed_values) and (
                "label" not in layout.needs or isinstance(needed_values[-1], bool)
            ):
                return layout
        return None

    def counted(self, columns: Collection[str]) -> list[str]:
        """Return the keys whose values are summed to get the size of a table row without a text.

        A layout is possible if it is readable and all its required keys are in `columns`. The
        result has the required keys of the possible layouts. The size of a text is its number of
        bytes, and the size of a list is its number of items.
        """
        layouts = (layout for layout in LAYOUTS if not layout.advice)
        needs = ([self.key_of(field) for field in layout.needs] for layout in layouts)
        return list(
            dict.fromkeys(
                key for keys in needs if all(key in columns for key in keys) for key in keys
            )
        )

    def of_text(self, text: str, spans: Any, value: Callable[[str], Any]) -> str | Supervision:
        """Return the document of a record without a layout.

        Args:
            text: The text.
            spans: The value of loss_spans, or None.
            value: Function that takes a key and returns the record's value at this key, or None.

        Returns:
            A Supervision with the text, if the record has loss_spans, a weight or a non-empty list
            of media. Otherwise, only the text.
        """
        media, weight = value(MEDIA) if self.kinds else None, value("weight")
        if spans is None and weight is None and (media is None or media == []):
            return text
        beside = {"weight": weight, MEDIA: media}
        return Supervision(
            text,
            spans,
            {key: field_value for key, field_value in beside.items() if field_value is not None},
            kinds=self.kinds,
        )

    def of_layout(
        self, layout: Layout, text: str | None, spans: Any, value: Callable[[str], Any]
    ) -> Supervision:
        """Return the document of a record with a layout.

        Args:
            layout: The record's layout.
            text: The text, or None.
            spans: The value of loss_spans, or None.
            value: Function that takes a key and returns the record's value at this key, or None.

        Returns:
            A Supervision with the text, the loss_spans, and the layout fields that have a value.
            Its `record` also contains the values of media and of fields in REFUSED_FIELDS.
        """
        names = dict.fromkeys((*layout.needs, *layout.may_have, *REFUSED_FIELDS))
        pairs = [(field, value(self.key_of(field))) for field in names]
        if self.kinds:
            pairs.append((MEDIA, value(MEDIA)))
        record = {field: field_value for field, field_value in pairs if field_value is not None}
        return Supervision(text, spans, record, layout.name, self.kinds)


def refused(layout: Layout) -> str:
    """Return a message part that describes a refused layout and gives the remedy."""
    return f"{_named(layout)}: {layout.advice}"


def instead_of_text(layout: Layout) -> str:
    """Return a message part for records that have a layout, but were expected to be texts.

    It names the layout and gives the remedy.
    """
    return (
        refused(layout)
        if layout.advice
        else f'{_named(layout)}: set documents.loss_spans = "use" to train on them as such'
    )


def _named(layout: Layout) -> str:
    return (
        layout.name
        if layout.needs == (layout.name,)
        else f"{layout.name} ({', '.join(layout.needs)})"
    )


def of_table(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a table row to the record that a JSON line with the same data would have.

    A weight that is null or NaN is removed, also from a message, a content part and a span. In
    nested objects, keys with the value null are removed, except the content of a message.
    """
    record = {
        key: without_nulls(value)
        for key, value in row.items()
        if key != "weight" or not is_missing(value)
    }
    if isinstance(spans := record.get(LOSS_SPANS), list):
        record[LOSS_SPANS] = [
            span[:2] if isinstance(span, list) and len(span) == 3 and is_missing(span[2]) else span
            for span in spans
        ]
    return record


def without_nulls(value: Any) -> Any:
    """Return a value of an Arrow column without the nested keys that have the value null.

    In Arrow, each object has every key, so null means a missing key. The exception is the content
    of a message, which is kept if it is null. A weight of a message or of a content part is also
    removed if it is NaN.
    """
    if isinstance(value, Mapping):
        is_message = "role" in value or "from" in value or {"type", "text"} <= value.keys()
        kept_entries = {
            k: without_nulls(v)
            for k, v in value.items()
            if not (is_message and k == "weight" and is_missing(v))
        }
        return {
            k: entry
            for k, entry in kept_entries.items()
            if entry is not None or (k == "content" and "role" in value)
        }
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def is_missing(value: Any) -> bool:
    """Return whether a value in a table is null or NaN.

    pandas and NumPy represent a missing number as NaN.
    """
    return value is None or (isinstance(value, float) and math.isnan(value))


def group_value(
    grouping: Grouping, value: Callable[[str], Any], path: str, position: int
) -> GroupValue:
    """Return the values of a record that decide which document it joins, and where.

    Values are equal only if their types are equal. NaN counts as missing. The order is: false,
    true, numbers, texts, and last the records without a value.

    Args:
        grouping: The settings of the source.
        value: Function that takes a key and returns the record's value at this key, or None.
        path: Path or URL of the file, for the message.
        position: Position of the record, for the message.

    Raises:
        SourceError: If a value is a list or an object.
    """

    def scalar(key: str) -> Any:
        field_value = value(key) if key else None
        if isinstance(field_value, str):
            return field_value
        if isinstance(field_value, list | dict):
            kind = "a list" if isinstance(field_value, list) else "an object"
            name = "group_by" if key == grouping.group_by else "order_by"
            raise SourceError(
                f"{path}: the record at {position}: {key!r} is {kind}, but {name} takes texts,"
                " numbers, true and false\n"
                f"hint: set {name} to another field"
            )
        return None if is_missing(field_value) else field_value

    group, order = scalar(grouping.group_by), scalar(grouping.order_by)
    # Python treats true as 1, so ranks sort truth values before numbers.
    ranks = {bool: 0, int: 1, float: 1, type(None): 3}
    return GroupValue(
        None if group is None else (type(group).__name__, group),
        (ranks.get(type(order), 2), 0 if order is None else order),
    )


def whole_number(value: Any) -> int | None:
    """Return a number without a fraction, such as 3 or 3.0, as an int, otherwise None."""
    return int(value) if type(value) in (int, float) and value % 1 == 0 else None


_BEYOND_FLOAT32 = 2.0**128 - 2.0**103  # smallest number that float32 rounds to infinity


def weight_of(value: Any) -> float | None:
    """Return the weight of a document, message or span, rounded to float32.

    Return None if `value` is not a number, is negative, or is not finite in float32.
    """
    if type(value) not in (int, float) or not 0 <= value < _BEYOND_FLOAT32:
        return None
    return float(np.float32(float(value)))


def bad_weight(value: Any) -> tuple[str, str]:
    """Return the reject reason and detail for a weight that `weight_of` refuses."""
    requirement = "a finite number of at least 0 in float32 is wanted"
    return (
        "bad_weight",
        f'weight is {shown(value)}; {requirement}; documents.loss_spans = "ignore" reads'
        " the text alone",
    )


def shown(value: Any) -> str:
    """Return a short text that shows an invalid value in a reject's detail."""
    if value is None:
        return "null or missing"
    if type(value) is float:
        return f"{value:g}"
    if isinstance(value, str):
        return ascii(value[:40])
    return (
        str(value) if type(value) is int and abs(value) < 1 << 64 else f"a {type(value).__name__}"
    )
