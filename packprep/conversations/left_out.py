"""Check that a template writes all parts of a record."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from packprep.conversations.chat_template import ChatTemplate, LeftOut, TemplateRefusal
from packprep.conversations.placeholders import (
    TAGS,
    THOUGHTS,
    Render,
    attempted,
    free_characters,
)


def check_written(
    template: ChatTemplate,
    render: Render,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Any] | None,
    text: str,
) -> None:
    """Raise LeftOut if the template leaves a part of the record out of `text`.

    The checked parts are the tools, the tool calls, the reasoning, and the content of each message.
    A model must not be trained without such a part.
    """

    def leaves_out(what: str, others: Sequence[dict[str, Any]], **more: Any) -> None:
        if attempted(partial(render, others, **more)) == text:
            raise LeftOut(
                f"the template does not write {what}, so the model would be trained without: give"
                " another template in documents.chat_template, or take it off the records"
            )

    # If the text does not show a part, a rendering without this part decides.
    if tools and not ("tools" in template.words and any(map(partial(_describes, text), tools))):
        leaves_out("tools", messages, tools=None)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    is_written = all(str(function_of(call).get("name", "")) in text for call in calls)
    if calls and not (is_written and "tool_calls" in template.words):
        leaves_out("tool_calls", [_without(message, ("tool_calls",)) for message in messages])
    # A template that names such a field may still drop the reasoning of earlier turns.
    if template.words.isdisjoint(THOUGHTS) and any(
        str(message.get(key, "")).strip() for message in messages for key in THOUGHTS
    ):
        leaves_out("reasoning_content", [_without(message, THOUGHTS) for message in messages])
    for k, message in enumerate(messages):
        said = [part.strip() for part in texts_of(message) if part.strip()]
        if said and not writes_any(text, said):
            role, in_parts = ascii(message["role"][:40]), isinstance(message["content"], list)
            # The content is replaced and not removed, because some templates need a content.
            other = {**message, "content": [{"type": "text", "text": "x"}] if in_parts else "x"}
            with_other = [*messages[:k], other, *messages[k + 1 :]]
            leaves_out(f"the content of message {k}, of role {role}", with_other)


def writes_any(text: str, said: Sequence[str]) -> bool:
    """Return whether a text contains at least one text of `said`, or the answer in such a text.

    `said` has the texts of a message's content. The answer is a long string outside <think> and
    </think>. The answer suffices, because a template may drop the reasoning before an answer.
    """
    for part in said:
        if part in text:
            return True
    answers = (string for part in said for string in TAGS.split(part)[::2])
    return any(len(string) >= _LONG_TEXT and string in text for string in answers)


def _describes(text: str, tool: Any) -> bool:
    """Return whether a text contains a tool's description, or a string of its parameters."""
    function = function_of(tool) if isinstance(tool, dict) else {}
    said = [said for said in strings_of(function.get("parameters")) if len(said) > 3]
    description = function.get("description")
    said += [description] if isinstance(description, str) and description else []
    return any(part in text for part in said if part not in _OF_SCHEMAS)


_LONG_TEXT = 20
"""A text of at least this many characters does not occur in another message by accident."""
_OF_SCHEMAS = {"type", "object", "string", "properties", "required", "array", "number", "integer"}
"""Strings in every JSON schema."""


def _without(message: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}


def check_parts(render: Render, messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Check that a template supports messages with a list of parts as their content.

    A template may write the parts of a tool's result as JSON, but no other parts.

    Raises:
        TemplateRefusal: If the template writes a list as Python or JSON data, or leaves it out.
    """
    for k, message in enumerate(messages):
        if not isinstance(message.get("content"), list):
            continue
        # A template for texts writes a list as Python or JSON data.
        as_data = [repr(part) for part in message["content"]]
        if message["role"] != "tool":
            as_data += [
                json.dumps(part, ensure_ascii=own)
                for part in message["content"]
                for own in (False, True)
            ]
        if any(written in text for written in as_data):
            raise TemplateRefusal(
                f"it writes the parts of message {k} as data; write one text instead"
            )
        said = [part for part in texts_of(message) if part.strip()]
        # A template may drop the reasoning of some turns, so parts with reasoning are not checked.
        has_tags = any("think>" in part for part in said)
        if said and not has_tags and not _writes_parts(render, messages, k):
            as_text = [*messages[:k], {**message, "content": "".join(said)}, *messages[k + 1 :]]
            if attempted(partial(render, as_text)) not in (text, None):
                raise TemplateRefusal(
                    f"it leaves the list of parts of message {k} out; write one text instead"
                )


def _writes_parts(render: Render, messages: Sequence[Mapping[str, Any]], k: int) -> bool:
    """Return whether a template writes each text in the list of parts of a message.

    A short text may occur elsewhere by accident. Therefore a character that occurs nowhere else is
    appended to each text, and its occurrences in a new rendering are counted.
    """
    (mark,) = free_characters(strings_of(messages), 1)
    content = [
        {**part, "text": part["text"] + mark} if str(part.get("text") or "").strip() else part
        for part in messages[k]["content"]
    ]
    marked = [*messages[:k], {**messages[k], "content": content}, *messages[k + 1 :]]
    count = sum(bool(part.strip()) for part in texts_of(messages[k]))
    text = attempted(partial(render, marked))
    escaped = json.dumps(mark)[1:-1]  # as a template writes it in JSON
    return text is None or text.count(mark) + text.count(escaped) >= count


def strings_of(value: Any) -> list[str]:
    """Return all strings in a JSON value in order, including keys."""
    strings: list[str] = []
    _add_strings(value, strings)
    return strings


def _add_strings(value: Any, strings: list[str]) -> None:
    kind = type(value)
    if kind is str:
        strings.append(value)
    elif kind is list or kind is tuple:
        for item in value:
            _add_strings(item, strings)
    elif kind is dict or isinstance(value, Mapping):
        for pair in value.items():
            for item in pair:
                if type(item) is str:  # Most items are strings, and a call takes time.
                    strings.append(item)
                else:
                    _add_strings(item, strings)


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the text of each part of a message's content, or [] if the content is null."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return [
        part["text"]
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool
