"""Check that a template writes all parts of a record."""

import json
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

from packprep.conversations.chat_template import ChatTemplate, LeftOut, TemplateRefusal
from packprep.conversations.layouts import ROLES, Dialogue, parsed_json
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
    without_content: Set[int],
) -> None:
    """Raise LeftOut if the template leaves a part of the record out of `text`.

    The checked parts are the tools, the tool calls, the reasoning, the content of each message, and
    the fields that a template may read instead of a content. A model must not be trained without
    such a part. `without_content` has the numbers of messages whose record has no content.
    """

    def leaves_out(field: str, other_messages: Sequence[dict[str, Any]], **variables: Any) -> None:
        if attempted(partial(render, other_messages, **variables)) == text:
            raise LeftOut(
                f"the template does not write {field}, so the model would be trained without: give"
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
    contents = [
        [part_text for whole in texts_of(message) if (part_text := whole.strip())]
        for message in messages
    ]
    uncertain = _uncertain_messages(messages, contents, text)
    for k, (message, texts) in enumerate(zip(messages, contents, strict=True)):
        if unread := _unread_fields(message, template.words, k in without_content):
            others = [*messages[:k], _without(message, unread), *messages[k + 1 :]]
            leaves_out(f"{ascii(unread[0][:40])} of message {k}", others)
        if texts and (k in uncertain or not writes_any(text, texts)):
            role, in_parts = ascii(message["role"][:40]), isinstance(message["content"], list)
            # The content is replaced and not removed, because some templates need a content.
            word = "y" if texts == ["x"] else "x"
            other_message = {
                **message,
                "content": [{"type": "text", "text": word}] if in_parts else word,
            }
            with_other = [*messages[:k], other_message, *messages[k + 1 :]]
            leaves_out(f"the content of message {k}, of role {role}", with_other)


_INSTEAD_OF_CONTENT = {
    *("function_call", "function_calls", "functions", "tools", "tool_plan", "tool_responses"),
    *("refusal", "image", "images", "video", "videos", "audio", "audios"),
}
"""Fields of a message that a model reads or writes, although they are not in the content."""
_CHECKED_ALONE = {"role", "content", "tool_calls", *THOUGHTS}


def _unread_fields(message: Mapping[str, Any], words: Set[str], lacks_content: bool) -> list[str]:
    """Return the fields of a message that a model needs, but that are not among a template's words.

    If a message has neither content nor tool calls, all its texts, lists and objects are such
    fields.
    """
    if message.keys() <= _CHECKED_ALONE:
        return []
    lacks_content &= "tool_calls" not in message
    return [
        key
        for key, value in message.items()
        if value
        and key not in words
        and key not in _CHECKED_ALONE
        and (key in _INSTEAD_OF_CONTENT or (lacks_content and type(value) in (str, list, dict)))
    ]


def _uncertain_messages(
    messages: Sequence[Mapping[str, Any]], contents: Sequence[Sequence[str]], text: str
) -> set[int]:
    """Return the numbers of messages whose content may be in `text` only as part of another string.

    For example, an answer often quotes the result of a tool. The messages are the ones with the
    longest content of each role, because a template usually drops all messages of a role, or all
    except the first message.

    Args:
        messages: The messages.
        contents: The texts in the content of each message, without white space around them.
        text: The text of the conversation.
    """
    longest: dict[tuple[str, bool], tuple[str, int]] = {}
    for k, (message, said) in enumerate(zip(messages, contents, strict=True)):
        key = message["role"], k == 0
        for part in said:
            if len(part) > len(longest.get(key, ("", k))[0]):
                longest[key] = part, k
    thoughts = [message[key] for message in messages for key in THOUGHTS if key in message]
    uncertain = set()
    for (role, _), (part, k) in longest.items():
        others = sum(other.count(part) for j, own in enumerate(contents) if j != k for other in own)
        others += sum(thought.count(part) for thought in thoughts)
        is_short = len(part) < _LONG_TEXT and role not in ("system", "user", "assistant")
        if is_short or 0 < others >= text.count(part):
            uncertain.add(k)
    return uncertain


_KNOWN_FIELDS = {
    *_CHECKED_ALONE,
    *("id", "index", "model", "name", "timestamp", "tool_call_id", "type"),
}
"""Fields of a message that are read, or that say nothing about training."""
_SPEAKERS = {"ai", "bot", "tool_call"} | {
    name for name, role in ROLES.items() if role == "assistant"
}
"""Names of an assistant in other tools."""


def ignored_parts(
    template: ChatTemplate,
    dialogue: Dialogue,
    variables: Mapping[str, Any],
    trained: Sequence[str],
    text: str,
) -> list[str]:
    """Describe the parts of a conversation that are probably not read or trained as intended.

    Args:
        template: The template of the conversation.
        dialogue: The conversation.
        variables: The variables of the template, except messages and tools.
        trained: The trained roles.
        text: The text of the conversation.
    """
    fields = {
        key: value
        for message in dialogue.messages
        for key, value in message.items()
        if key not in _KNOWN_FIELDS and value not in (None, "", [], {})
    }
    # A template that writes whole messages as JSON writes their keys.
    unread = [key for key in fields if key not in template.words and json.dumps(key) not in text]
    parts = [f"{ascii(key[:40])} of a message" for key in unread]
    parts += [
        f"{ascii(name[:40])} of chat_template_kwargs"
        for name, value in variables.items()
        if name not in template.words and value is not None
    ]
    marks = dialogue.train or (None,) * len(dialogue.messages)
    roles = {
        message["role"]: None
        for message, mark in zip(dialogue.messages, marks, strict=True)
        if mark is None and message["role"].lower() in _SPEAKERS - {*trained}
    }
    parts += [f"the role {ascii(role)}, which is not trained" for role in roles]
    if variables.get("enable_thinking") is False and any(map(_has_reasoning, dialogue.messages)):
        parts.append("reasoning, although enable_thinking is false")
    calls = [call for message in dialogue.messages for call in message.get("tool_calls", ())]
    if any(_is_no_object(function_of(call).get("arguments")) for call in calls):
        parts.append("arguments of a tool call that are a text, but not the JSON of an object")
    return parts


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    return any(message.get(key, "").strip() for key in THOUGHTS) or any(
        thought.strip() for part in texts_of(message) for thought in TAGS.split(part)[:-1:2]
    )


def _is_no_object(arguments: Any) -> bool:
    """Return whether the arguments of a call are a text that is not the JSON of an object."""
    if not isinstance(arguments, str) or not arguments.strip():
        return False
    try:
        return not isinstance(parsed_json(arguments), dict)
    except ValueError:
        return True


def writes_any(text: str, texts: Sequence[str]) -> bool:
    """Return whether a text contains at least one text of `texts`, or the answer in such a text.

    `texts` has the texts of a message's content. The answer is a long string outside <think> and
    </think>. The answer suffices, because a template may drop the reasoning before an answer.
    """
    for part_text in texts:
        if part_text in text:
            return True
    answers = (string for part_text in texts for string in TAGS.split(part_text)[::2])
    return any(len(string) >= _LONG_TEXT and string in text for string in answers)


def _describes(text: str, tool: Any) -> bool:
    """Return whether a text contains a tool's description, or a string of its parameters."""
    function = function_of(tool) if isinstance(tool, dict) else {}
    schema_texts = [string for string in strings_of(function.get("parameters")) if len(string) > 3]
    description = function.get("description")
    schema_texts += [description] if isinstance(description, str) and description else []
    return any(string in text for string in schema_texts if string not in _OF_SCHEMAS)


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
        as_data = [repr(content_part) for content_part in message["content"]]
        if message["role"] != "tool":
            as_data += [
                json.dumps(content_part, ensure_ascii=is_ascii)
                for content_part in message["content"]
                for is_ascii in (False, True)
            ]
        if any(written in text for written in as_data):
            raise TemplateRefusal(
                f"it writes the parts of message {k} as data; write one text instead"
            )
        texts = [part_text for part_text in texts_of(message) if part_text.strip()]
        # A template may drop the reasoning of some turns, so parts with reasoning are not checked.
        has_tags = any("think>" in part_text for part_text in texts)
        if texts and not has_tags and not _writes_parts(render, messages, k):
            as_text = [*messages[:k], {**message, "content": "".join(texts)}, *messages[k + 1 :]]
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
        {**content_part, "text": content_part["text"] + mark}
        if str(content_part.get("text") or "").strip()
        else content_part
        for content_part in messages[k]["content"]
    ]
    marked = [*messages[:k], {**messages[k], "content": content}, *messages[k + 1 :]]
    count = sum(bool(part_text.strip()) for part_text in texts_of(messages[k]))
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
    if not isinstance(content, list):
        return [content] if isinstance(content, str) else []
    return [
        content_part["text"]
        for content_part in content
        if isinstance(content_part, dict) and isinstance(content_part.get("text"), str)
    ]


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool
