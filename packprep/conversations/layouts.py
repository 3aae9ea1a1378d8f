"""Readers of the known record layouts, which return dialogues.

A dialogue has messages for a chat template, and marks for training.

```
messages            [{role, content, …}, …], tools, chat_template_kwargs, weight, as in OpenAI's API
sharegpt            conversations: [{from, value}, …]     human → user, gpt → assistant, …
prompt_completion   two texts, or two lists of messages   only the completion is trained
alpaca              instruction, input, output            user: instruction↵↵input
                                                          assistant: output
```
`sources/formats/fields.py` determines the layout of a record. The keys `train` and `weight` of
messages and parts, and the keys `ref` and `tokens` of media parts, are for packprep only. They are
removed from the messages, so that no template sees them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from packprep.conversations.media import (
    BAD_MEDIA,
    OF_PART,
    BadMedia,
    MediaPlace,
    read_slots,
    refuse_many,
)
from packprep.conversations.placeholders import THOUGHTS
from packprep.recipe.schema import OF_PACKPREP
from packprep.sources.formats.batch import LOSS_SPANS, MEDIA, SURROGATE, Supervision, large_text
from packprep.sources.formats.fields import REFUSED_FIELDS
from packprep.sources.formats.jsonl import nested_too_deep, read_integer

Problem = tuple[str, str]  # a reason and its detail

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The role for each sender of a ShareGPT message."""
MOST_WEIGHT = float(np.finfo(np.float32).max)


class Mark(NamedTuple):
    """The training marks of a part of a message.

    train   whether the part's characters are trained; None: only if the message is trained
    weight  a factor of the message's weight
    """

    train: bool | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Dialogue:
    """A conversation as a template takes it.

    Attributes:
        messages: One or more objects with a role and a content. The content is null, a string, or a
            list of parts of text or media. Other keys are never null. The keys `train` and `weight`
            are removed.
        tools: The tools that the assistant may call, or None if the record does not mention tools.
        kwargs: The record's chat_template_kwargs, which override the chat_template_kwargs of the
            recipe.
        train: Whether each message is trained. None: the recipe's trained_roles decide.
        weights: The weight of each message times the record's weight, finite and ≥ 0.
        media: The media spans of all messages, in order.
        parts: For each message, a tuple with the mark of each part, or () if the message has no
            marked part. The whole attribute is () if no message has a marked part.
        weight: The record's weight.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    train: tuple[bool | None, ...] = ()
    weights: tuple[float, ...] = ()
    media: tuple[MediaPlace, ...] = ()
    parts: tuple[tuple[Mark, ...], ...] = ()
    weight: float = 1.0

    def marks_of(self, k: int) -> tuple[Mark, ...]:
        """Return the marks of a message's parts, or () if no part has a mark."""
        return self.parts[k] if self.parts else ()

    def trains_part(self, k: int) -> bool:
        """Return whether a part of a message has the mark `train = true`."""
        return any(mark.train for mark in self.marks_of(k))


class _Bad(Exception):
    """An error for a faulty record. Its message is the detail of the reject."""


def read_layout(
    supervision: Supervision, trained_roles: Sequence[str] = ("assistant",)
) -> Dialogue | Supervision | Problem:
    """Return the dialogue of a record, or a text with loss_spans, or the reason of a reject.

    If the prompt and the completion of a record are texts and not messages, the result is a text
    with loss_spans, which needs no template. A record with messages is rejected if it also has a
    text or loss_spans, because it is not clear which of them to train.

    Args:
        supervision: A record with a layout.
        trained_roles: The messages of these roles are trained unless a mark says otherwise. A
            dialogue without any trained message is rejected.
    """
    if supervision.text is not None or supervision.loss_spans is not None:
        other_field = "a text" if supervision.text is not None else LOSS_SPANS
        choice = (
            "another text_key" if supervision.text is None else "messages_format for these alone"
        )
        return (
            "bad_messages",
            (
                f"the document has {other_field}, too; take one of them away, or set {choice}, or "
                'documents.loss_spans = "ignore" for the text alone'
            ),
        )
    try:
        result = _LAYOUTS[supervision.layout](supervision.record, supervision.kinds)
    except _Bad as bad:
        return "bad_messages", str(bad)
    except BadMedia as bad:
        return BAD_MEDIA, str(bad)
    if beside := next((key for key in REFUSED_FIELDS if supervision.record.get(key)), None):
        return "bad_messages", f"the document has {beside!r}, which is not read: " + (
            REFUSED_FIELDS[beside]
        )
    if isinstance(result, Dialogue) and supervision.record.get(MEDIA):
        return (
            BAD_MEDIA,
            "the document has media beside messages: write each as a part of a message's content",
        )
    if isinstance(result, Dialogue) and not any(
        (message["role"] in trained_roles if train is None else train) or result.trains_part(k)
        for k, (message, train) in enumerate(zip(result.messages, result.train, strict=True))
    ):
        whose = (
            "the assistant's"
            if tuple(trained_roles) == ("assistant",)
            else "of documents.trained_roles"
        )
        return "bad_messages", f"no message is {whose}: nothing would be trained"
    return result


def _of_messages(record: Mapping[str, Any], kinds: Sequence[str]) -> Dialogue:
    return _dialogue(_list_of(record, "messages"), record, kinds)


def _of_sharegpt(record: Mapping[str, Any], kinds: Sequence[str]) -> Dialogue:
    return _dialogue(_list_of(record, "conversations"), record, kinds)


def _of_alpaca(record: Mapping[str, Any], kinds: Sequence[str]) -> Dialogue:
    instruction, output = (_text_of(record, key) for key in ("instruction", "output"))
    input_text = _text_of(record, "input")
    turns = [(instruction + ("\n\n" + input_text if input_text else ""), output)]
    history = record.get("history") or []
    if not (
        isinstance(history, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    ):
        raise _Bad(
            f"history is {_kind(record['history'])}; a list of pairs of an instruction and an"
            " output is wanted"
        )
    messages = [
        {"role": role, "content": content}
        for turn in [*history, *turns]
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    return _dialogue(messages, record, kinds)


def _of_prompt_and_completion(
    record: Mapping[str, Any], kinds: Sequence[str]
) -> Dialogue | Supervision | Problem:
    prompt, completion = (record.get(key) for key in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        # These fields need a template, but texts are not rendered.
        for key in ("system", "tools", "chat_template_kwargs"):
            if record.get(key):
                raise _Bad(
                    f"{key} beside a prompt that is a text, which no chat template writes: write"
                    " both as messages"
                )
        text = prompt + completion
        if surrogate := SURROGATE.search(text):
            return (
                "lone_surrogate",
                f"character {surrogate.start()} of the text is the lone surrogate"
                f" {ascii(surrogate[0])}",
            )
        if too_large := large_text(text):
            return too_large
        beside = {key: record[key] for key in ("weight", MEDIA) if key in record}
        return Supervision(text, [[len(prompt), len(text)]], beside, kinds=tuple(kinds))
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise _Bad(
            f"prompt is {_kind(prompt)} and completion is {_kind(completion)}: two texts or two"
            " lists of messages are wanted"
        )
    messages = [*prompt, *_list_of(record, "completion")]
    return _dialogue(messages, record, kinds, untrained=len(prompt))


def _list_of(record: Mapping[str, Any], key: str) -> list[Any]:
    messages = record.get(key)
    if not isinstance(messages, list) or not messages:
        raise _Bad(
            f"{key} is {'empty' if messages == [] else _kind(messages)}; a list of messages is"
            " wanted"
        )
    return messages


def _text_of(record: Mapping[str, Any], key: str) -> str:
    """Return the text at a key. The key `input` may be missing or null, which gives ""."""
    value = record.get(key)
    if value is None and key == "input":
        return ""
    if not isinstance(value, str):
        raise _Bad(f"{key} is {_kind(value)}; a text is wanted")
    return value


def _dialogue(
    given_messages: Sequence[Any],
    record: Mapping[str, Any],
    kinds: Sequence[str],
    untrained: int = 0,
) -> Dialogue:
    """Return the dialogue of a list of messages.

    If the record has a `system`, it becomes the first message.

    Args:
        given_messages: Messages with role and content, or with from and value.
        record: The fields of the record.
        kinds: Kinds of media.
        untrained: Number of leading messages that are trained only if their mark says so.
    """
    messages, train, weights, parts = [], [], [], list[tuple[Mark, ...]]()
    system = record.get("system")
    media: list[MediaPlace] = []
    of_record = _weight(record, "the document")
    for k, message in enumerate(given_messages):
        if _is_plain(message):
            messages.append(message)
            train.append(False if k < untrained else None)
            weights.append(of_record)
            parts.append(())
            continue
        place = f"message {k}"
        if not isinstance(message, dict):
            raise _Bad(f"{place} is {_kind(message)}, not an object with a role and a content")
        fields = (
            _from_sharegpt(message, place)
            if "from" in message and "role" not in message
            else message
        )
        # Null means that a key is missing, except for a content.
        fields = {
            key: value for key, value in fields.items() if value is not None or key == "content"
        }
        trained, weight = _take_marks(fields, place)
        weights.append(_product(of_record, weight, place))
        _check(fields, place, kinds)
        parts.append(_take_part_marks(fields, place, kinds))
        # Each product of weights must be finite in float32.
        for j, mark in enumerate(parts[-1]):
            _product(weights[-1], mark.weight, f"{place}: part {j}")
        media += _taken_off(fields, place, kinds)
        messages.append(fields)
        # Messages of a prompt are trained only if their mark says so.
        train.append(False if trained is None and k < untrained else trained)
    if system:
        if not isinstance(system, str):
            raise _Bad(f"system is {_kind(system)}; a text is wanted")
        if messages[0]["role"] == "system":
            raise _Bad(
                "the document has a system, and its first message is the system's, too: take one of"
                " them away"
            )
        # The system message gets an entry in every list.
        messages.insert(0, {"role": "system", "content": system})
        train.insert(0, None)
        weights.insert(0, of_record)
        parts.insert(0, ())
    refuse_many(media)
    marks = tuple(train), tuple(weights), tuple(media), tuple(parts) if any(parts) else ()
    return Dialogue(messages, _tools(record), _kwargs(record), *marks, weight=of_record)


def _is_plain(message: Any) -> bool:
    """Return whether a message only has a role and a text, so that no other field is checked."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and type(message.get("role")) is str
        and message["role"] != ""
    )


def _take_marks(message: dict[str, Any], place: str) -> tuple[bool | None, float]:
    """Remove the marks of a message or a part, and return (train, weight).

    Without marks, `train` is None and `weight` is 1. The names that other tools use for these marks
    are also accepted, such as `loss` for `train`.
    """
    if _MARKS.isdisjoint(message):
        return None, 1.0
    if unread := next((key for key in _UNREAD_MARKS if message.get(key) is not None), None):
        raise _Bad(f"{place} has {unread!r}, which is not read: say it by train or weight instead")
    # These three names mean the same mark.
    values_by_key = {key: message.pop(key, None) for key in ("train", "training", "loss")}
    marks = {key: value for key, value in values_by_key.items() if value is not None}
    for key, value in marks.items():
        if key == "loss" and value in (0, 1):
            marks[key] = bool(value)
        elif not isinstance(value, bool):
            raise _Bad(f"{place}: {key} is {_kind(value)}; true or false is wanted")
    if len(set(marks.values())) > 1:
        raise _Bad(f"{place}: {' and '.join(marks)} contradict each other")
    weights = {
        key: _weight(message, place, key)
        for key in ("weight", "loss_weight")
        if message.get(key) is not None
    }
    for key in ("weight", "loss_weight"):
        message.pop(key, None)
    if len(set(weights.values())) > 1:
        raise _Bad(f"{place}: weight and loss_weight contradict each other")
    return next(iter(marks.values()), None), next(iter(weights.values()), 1.0)


def _take_part_marks(message: dict[str, Any], place: str, kinds: Sequence[str]) -> tuple[Mark, ...]:
    """Remove the marks of a message's parts, and return them. Return () if no part has a mark.

    Raises:
        _Bad: If a media part or a blank text part has a mark.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return ()
    message["content"] = parts = [dict(content_part) for content_part in content]
    marks = tuple(
        Mark(*_take_marks(content_part, f"{place}: part {j}"))
        for j, content_part in enumerate(parts)
    )
    for j, (content_part, mark) in enumerate(zip(parts, marks, strict=True)):
        if mark != Mark() and content_part["type"] in kinds:
            raise _Bad(f"{place}: part {j} has a mark, and a place of media is never trained")
        if mark != Mark() and not content_part["text"].strip():
            raise _Bad(
                f"{place}: part {j} has a mark and is blank: write it into the part before it"
            )
    return marks if any(mark != Mark() for mark in marks) else ()


_UNREAD_MARKS = ("train_detail", "loss_mask", "loss_scale", "masked", "trainable")
"""Marks that only other tools read. packprep rejects a conversation with such a mark."""
_MARKS = frozenset((*_UNREAD_MARKS, "train", "training", "loss", "weight", "loss_weight"))


def _taken_off(message: dict[str, Any], place: str, kinds: Sequence[str]) -> list[MediaPlace]:
    """Remove `ref` and `tokens` from a message's media parts, and return the media spans.

    Raises:
        BadMedia: If `ref` or `tokens` of a part is invalid.
    """
    content = message.get("content")
    if not kinds or not isinstance(content, list):
        return []
    spans = [
        MediaPlace(content_part["type"], *read_slots(content_part, f"{place}: part {j}"))
        for j, content_part in enumerate(content)
        if content_part["type"] in kinds
    ]
    message["content"] = [
        (
            {key: value for key, value in content_part.items() if key not in OF_PART}
            if content_part["type"] in kinds
            else content_part
        )
        for content_part in content
    ]
    return spans


def _from_sharegpt(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Convert a message with `from` and `value` into a message with `role` and `content`.

    All other keys are kept, so the marks are kept too.
    """
    fields = dict(message)
    sender, value = fields.pop("from"), fields.pop("value", None)
    role = ROLES.get(sender.lower()) if isinstance(sender, str) else None
    if role is None:
        shown = ascii(sender[:40]) if isinstance(sender, str) else _kind(sender)
        raise _Bad(f"{place} is from {shown}; known are {', '.join(ROLES)}")
    if not isinstance(value, str | None):
        raise _Bad(f"{place}: value is {_kind(value)}; a text is wanted")
    calls = _calls(value, place) if sender.lower() == "function_call" and value else None
    return (
        {"role": role, "content": None, "tool_calls": calls, **fields}
        if calls
        else {"role": role, "content": value, **fields}
    )


def _calls(value: str, place: str) -> list[dict[str, Any]] | None:
    """Parse a text that is the JSON of one or several calls, and return them as `tool_calls`.

    A call is an object with a name and arguments, or such an object at the key `function`. Return
    None for any other text.
    """
    try:
        parsed_calls = parsed_json(value)
    except ValueError:
        return None
    calls = parsed_calls if isinstance(parsed_calls, list) else [parsed_calls]
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    if not functions or not all(
        isinstance(function, dict) and isinstance(function.get("name"), str)
        for function in functions
    ):
        return None
    for function in functions:
        if unread := sorted(function.keys() - {"name", "arguments", "id", "type"}):
            shown = ascii(unread[0][:40])
            raise _Bad(f"{place}: a call has {shown}; only its name and arguments are read")
    return [
        {
            "type": "function",
            "function": {"name": function["name"], "arguments": function.get("arguments", {})},
        }
        for function in functions
    ]


def _check(message: dict[str, Any], place: str, kinds: Sequence[str]) -> None:
    """Raise _Bad if a message has a wrong type in a field that templates read."""
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise _Bad(f"{place}: role is {_kind(message.get('role'))}; a text is wanted")
    for key in _TEXTS:
        if key in message and not isinstance(message[key], str):
            raise _Bad(f"{place}: {key} is {_kind(message[key])}; a text is wanted")
    thoughts = [key for key in THOUGHTS if key in message and message[key].strip()]
    if len(thoughts) > 1 and len({message[key].strip() for key in thoughts}) > 1:
        raise _Bad(f"{place}: {' and '.join(thoughts)} contradict each other")
    if message.get("tool_calls") == []:
        del message["tool_calls"]  # An empty list means the same as no list.
    _check_calls(message.get("tool_calls", []), place)
    content = message.get("content")
    if isinstance(content, str):
        return
    # Without a content, another field such as tool_calls has to be written.
    if content is None and not message.keys() - {"role", "content", "name", "tool_call_id", "id"}:
        raise _Bad(
            f"{place} has no content; a text, a list of text parts, or tool_calls are wanted"
        )
    if not isinstance(content, list | None):
        raise _Bad(
            f"{place}: content is {_kind(content)}; a text or a list of text parts is wanted"
        )
    for content_part in content if isinstance(content, list) else ():
        kind = content_part.get("type") if isinstance(content_part, dict) else None
        if isinstance(kind, str) and kind in kinds:
            continue
        if kind != "text":
            shown = f"of type {ascii(kind[:40])}" if isinstance(kind, str) else "without a type"
            read = f", or a kind of specials.media ({', '.join(kinds)})," if kinds else ""
            raise _Bad(f"{place} has a part {shown}; parts of type 'text'{read} alone are read")
        if not isinstance(content_part.get("text"), str):
            raise _Bad(
                f"{place}: text of a part is {_kind(content_part.get('text'))}; a text is wanted"
            )


_TEXTS = ("name", "tool_call_id", *THOUGHTS)
"""The fields of a message whose value must be a text."""


def _check_calls(calls: Any, place: str) -> None:
    if not isinstance(calls, list):
        raise _Bad(f"{place}: tool_calls is {_kind(calls)}; a list of calls is wanted")
    for j, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Bad(f"{place}: tool call {j} has no function with a name that is a text")
        if "arguments" not in function and (other := _ARGUMENTS & function.keys()):
            raise _Bad(f"{place}: tool call {j} has {min(other)!r} instead of 'arguments'")


_ARGUMENTS = {"parameters", "args", "input", "kwargs"}
"""Other names for the arguments of a call, which templates do not read."""


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = _from_json(record, "tools")
    if tools is None or tools == "":
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _Bad(f"tools is {_kind(tools)}; a list of objects is wanted, or its JSON")
    return tools


def _kwargs(record: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = _from_json(record, "chat_template_kwargs")
    if kwargs is None or kwargs == "":
        return {}
    if not isinstance(kwargs, dict):
        raise _Bad(f"chat_template_kwargs is {_kind(kwargs)}; an object is wanted")
    if taken := [key for key in OF_PACKPREP if key in kwargs]:
        raise _Bad(f"chat_template_kwargs has {', '.join(taken)}, which packprep gives")
    return kwargs


def _from_json(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a field. If the value is a JSON text, return the parsed JSON.

    A column of a table has one type, so tables store values of several types as JSON texts.
    """
    value = record.get(key)
    try:
        return parsed_json(value) if isinstance(value, str) and value else value
    except ValueError:
        raise _Bad(f"{key} is a text that is not JSON") from None


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If the text is invalid JSON.
    """
    if nested_too_deep(text.encode("utf-8", "surrogatepass")):
        raise ValueError
    return json.loads(text, parse_int=read_integer)


def _weight(fields: Mapping[str, Any], place: str, key: str = "weight") -> float:
    weight = fields.get(key)
    if weight is None:
        return 1.0
    if type(weight) not in (int, float):
        raise _Bad(f"{place}: {key} is {_kind(weight)}; a number, 0 or more, is wanted")
    if not 0 <= weight <= MOST_WEIGHT:
        shown = "below 0" if weight < 0 else "not finite in float32"
        raise _Bad(f"{place}: {key} is {shown}; a number, 0 or more, is wanted")
    return float(weight)


def _product(of_record: float, of_message: float, place: str) -> float:
    if of_record * of_message > MOST_WEIGHT:
        raise _Bad(f"{place}: its weight times the document's is not finite in float32")
    return of_record * of_message


def _kind(value: object) -> str:
    if value is None:
        return "null or missing"
    if isinstance(value, bool):
        return "true or false"
    kinds: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a text",
        int: "a number",
        float: "a number",
    }
    return kinds.get(type(value), "of another kind")


_LAYOUTS: dict[
    str, Callable[[Mapping[str, Any], Sequence[str]], Dialogue | Supervision | Problem]
] = {
    "messages": _of_messages,
    "sharegpt": _of_sharegpt,
    "prompt_completion": _of_prompt_and_completion,
    "alpaca": _of_alpaca,
}
