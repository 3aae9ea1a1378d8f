"""Which fields of a record are read, and which layout its fields show: of conversations, of answers
to prompts, or of none.

```
{"text": …}                                     a text: all else says nothing, except loss_spans, weight and messages
{"messages": […], "tools": […]}                 messages
{"conversations": [{"from": …, "value": …}]}    sharegpt
{"prompt": …, "completion": …}                  prompt_completion
{"instruction": …, "input": …, "output": …}     alpaca
{"prompt": …, "chosen": …, "rejected": …}       preference data: refused by name
```
A record with a text and no messages is a text, unless `messages_format` says which layout is meant.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from packprep.recipe import Source
from packprep.sources.formats.batch import LOSS_SPANS, MEDIA, Supervision

OF_PLACE = {"at", "tokens", "ref", "kind"}
"""The keys of an entry of media."""
UNREAD_MEDIA = (
    "its documents have media, and would be trained without: name their kinds in specials.media, or"
    ' set documents.loss_spans = "ignore" to train on the texts alone'
)


class Layout(NamedTuple):
    """What records of one layout have.

    name      what messages_format calls it; of a refused one, what people do
    needs     fields that all of them have
    may_have  fields that they may have, too
    advice    what to do about a refused one; "": it is read
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
"""Fields next to messages that say what a model reads or what is trained, and that are not read:
name → what to do. A record in which one of them has a value is rejected."""
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
"""By its fields a record has the first of these."""


def field_at(record: Any, key: str) -> Any:
    """The value at a key, or of "a.b" at b in the object at a; None: there is none."""
    if not isinstance(record, dict):
        return None
    if key in record or "." not in key:
        return record.get(key)
    first, rest = key.split(".", 1)
    return field_at(record.get(first), rest)


def is_message(keys: Collection[str]) -> bool:
    """Whether what has these keys is a message, of either kind."""
    return any(keys_of_one <= set(keys) for keys_of_one in ({"role", "content"}, {"from", "value"}))


@dataclass(frozen=True)
class Fields:
    """How a source calls the fields of its layout, and which layout that is.

    format: a layout's name, of all records; "auto": of those without a text, by their fields
    kinds: of media, by name; (): it is not looked at
    """

    messages_key: str = "messages"
    tools_key: str = "tools"
    format: str = "auto"
    kinds: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: Source, kinds: tuple[str, ...] = ()) -> "Fields":
        """Those of a recipe's source."""
        return cls(source.messages_key, source.tools_key, source.messages_format, kinds)

    def key_of(self, field: str) -> str:
        """Where a layout's field stands in a record."""
        if field == "tools":
            return self.tools_key
        own_list = field == "messages" or (
            field == "conversations" and self.messages_key != "messages"
        )
        return self.messages_key if own_list else field

    def beside_text(self, text_key: str) -> list[str]:
        """The keys at which a record that has a text may have more than it: their begins, where
        they are nested."""
        keys = (
            LOSS_SPANS,
            self.messages_key,
            self.messages_key.split(".")[0],
            *((MEDIA,) if self.kinds else ()),
            "weight",
        )
        return [key for key in dict.fromkeys(keys) if key != text_key]

    def says(self, key: str) -> bool:
        """Whether what stands at a key says something of a record that has a text."""
        own = (LOSS_SPANS, MEDIA) if self.kinds else (LOSS_SPANS,)
        return key in (*own, *map(self.key_of, (*LAYOUTS[0].needs, *_COMMON)))

    def layout_of(self, value: Callable[[str], Any], has_text: bool) -> Layout | None:
        """The layout of a record; None: it has none.

        value: gives what stands at a key, None where nothing does. has_text: whether it has a text
        or loss_spans
        """
        if self.format != "auto":
            return next(layout for layout in LAYOUTS if layout.name == self.format)
        for layout in LAYOUTS[:1] if has_text else LAYOUTS:
            found = [value(self.key_of(field)) for field in layout.needs]
            if all(v is not None for v in found) and (
                "label" not in layout.needs or isinstance(found[-1], bool)
            ):
                return layout
        return None

    def counted(self, columns: Collection[str]) -> list[str]:
        """The keys whose texts' bytes and lists' items are the size of a table's row without a
        text: of layouts that `columns` hold."""
        layouts = (layout for layout in LAYOUTS if not layout.advice)
        needs = ([self.key_of(field) for field in layout.needs] for layout in layouts)
        return list(
            dict.fromkeys(
                key for keys in needs if all(key in columns for key in keys) for key in keys
            )
        )

    def of_text(self, text: str, spans: Any, value: Callable[[str], Any]) -> str | Supervision:
        """What a record of no layout is: its text; with loss_spans or media, these and what may
        stand beside them."""
        media, weight = value(MEDIA) if self.kinds else None, value("weight")
        if spans is None and weight is None and (media is None or media == []):
            return text
        beside = {"weight": weight, MEDIA: media}
        return Supervision(
            text,
            spans,
            {key: given for key, given in beside.items() if given is not None},
            kinds=self.kinds,
        )

    def of_layout(
        self, layout: Layout, text: str | None, spans: Any, value: Callable[[str], Any]
    ) -> Supervision:
        """What a record of a layout is: its text and loss_spans, and those fields of the layout
        that it has. value: as for `layout_of`."""
        names = dict.fromkeys((*layout.needs, *layout.may_have, *REFUSED_FIELDS))
        found = [(field, value(self.key_of(field))) for field in names]
        if self.kinds:
            found.append((MEDIA, value(MEDIA)))
        record = {field: given for field, given in found if given is not None}
        return Supervision(text, spans, record, layout.name, self.kinds)


def refused(layout: Layout) -> str:
    """What records of a layout are that is not read, and what to do."""
    return f"{_named(layout)}: {layout.advice}"


def instead_of_text(layout: Layout) -> str:
    """What records are where texts are looked for, and what to do."""
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
    """Return a table's row as a line's record would be: without nulls, and without numbers that
    stand for a missing weight."""
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
    """A value of an Arrow column, in which null is a key that is not there, as each object has
    every key; but a message's content may be null. A message's weight that is NaN is not there
    either."""
    if isinstance(value, Mapping):
        is_message = "role" in value or "from" in value
        kept = {
            k: without_nulls(v)
            for k, v in value.items()
            if not (is_message and k == "weight" and is_missing(v))
        }
        return {
            k: inner
            for k, inner in kept.items()
            if inner is not None or (k == "content" and "role" in value)
        }
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def is_missing(value: Any) -> bool:
    """Whether a table's number is null or NaN, which pandas and NumPy write where there is none."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def whole_number(value: Any) -> int | None:
    """Return a whole number of any type, such as 3 or 3.0, as an int; None for any other value."""
    return int(value) if type(value) in (int, float) and value % 1 == 0 else None


_BEYOND_FLOAT32 = 2.0**128 - 2.0**103  # the least number that float32 rounds to infinity


def weight_of(value: Any) -> float | None:
    """A weight of a document, a message or a span, as float32 holds it; None for what is no finite
    number of at least 0."""
    if type(value) not in (int, float) or not 0 <= value < _BEYOND_FLOAT32:
        return None
    return float(np.float32(float(value)))


def bad_weight(value: Any) -> tuple[str, str]:
    """Return the reason and detail of a document whose weight `weight_of` refuses."""
    wanted = "a finite number of at least 0 in float32 is wanted"
    return (
        "bad_weight",
        f'weight is {shown(value)}; {wanted}; documents.loss_spans = "ignore" reads the text alone',
    )


def shown(value: Any) -> str:
    """Return what a reject's detail says of a value that is not the wanted one."""
    if value is None:
        return "null or missing"
    if type(value) is float:
        return f"{value:g}"
    if isinstance(value, str):
        return ascii(value[:40])
    return (
        str(value) if type(value) is int and abs(value) < 1 << 64 else f"a {type(value).__name__}"
    )
