"""Find the messages in a conversation's text, and the characters that are trained.

```
text        <|im_start|>user↵2+2?<|im_end|>↵<|im_start|>assistant↵4<|im_end|>↵
begins                                      ^
trained                                                           ^^^^^^^^^^^^
```
In the example, message 1 begins at the ^ of the line `begins`. Its content and the text that ends
its turn are trained. Its header is not trained.

{% generation %} blocks of a template mark trained text. Without such blocks, a turn begins after
the generation prompt, and ends where the next message begins. Usually, the text that the template
writes between two messages shows both positions (`markup.py`). Otherwise two renderings are
compared: the messages up to an assistant's turn, and the messages before this turn with the
generation prompt. This fails for templates that rewrite earlier turns, for example to drop
reasoning. Placeholders find the turns of such templates (`placeholders.py`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from packprep.conversations.chat_template import ChatTemplate, TemplateRefusal
from packprep.conversations.layouts import Dialogue, Mark, parsed_json
from packprep.conversations.left_out import (
    check_parts,
    check_written,
    function_of,
    strings_of,
    texts_of,
    writes_any,
)
from packprep.conversations.markup import Markup, Span
from packprep.conversations.parts import Change, Rendered, find_changes
from packprep.conversations.placeholders import (
    SYSTEM,
    THOUGHTS,
    Placeholders,
    Remember,
    attempted,
    find_markup,
    free_characters,
)
from packprep.recipe import DocumentKeys

MOST_BY_PREFIXES = 128
"""Maximum number of messages for which all prefixes of a conversation are rendered first.

For longer conversations, placeholders are tried first, because they need fewer renderings.
"""
_ADVICE = "; a template with {% generation %} blocks would say itself what is trained"

# `ChatTemplate.render` with a template, tools and variables
Render = Callable[..., str]


class NotIncremental(Exception):
    """An error for a message, if its position in the text is uncertain.

    For example, the template may change the text of earlier messages when messages are added.
    """


class Turns(NamedTuple):
    """A conversation's text, and the positions of its messages.

    Attributes:
        text: The text.
        trained: (begin, end, message number) of trained characters, ascending and not overlapping.
        begins: Message number → index in the text of its first character, for messages after the
            first. Messages with an uncertain start are missing.
        system_end: Number of leading characters with the system message, the tools and the
            template's text around them. 0 if there is no system message and there are no tools.
        changes: Ranges that are trained differently from their turns, as `find_changes` returns
            them.
    """

    text: str
    trained: list[Span]
    begins: dict[int, int]
    system_end: int
    changes: Sequence[Sequence[Change]] = ()


def find_turns(
    template: ChatTemplate,
    dialogue: Dialogue,
    variables: Mapping[str, Any],
    settings: DocumentKeys,
    with_begins: bool = True,
) -> Turns:
    """Return the text of a dialogue, with the positions of its messages and of trained characters.

    Args:
        template: The compiled template.
        dialogue: The dialogue.
        variables: Variables that the template reads in addition to messages and tools.
        settings: The recipe's table `documents`.
        with_begins: Whether to find where messages begin. If false, `begins` of the result may be
            empty.

    Raises:
        NotIncremental: If the position of a message in the text is uncertain.
        UncertainPart: If the position of a part of a message in the text is uncertain.
        TemplateRefusal: If the template refuses the messages.
    """
    chat, blocks = _rendered_chat(template, dialogue, variables, settings)
    if not with_begins and (trained := _trained_alone(chat, blocks)) is not None:
        turns = Turns(chat.text, trained, {}, 0)
    else:
        turns = _found(chat, blocks)
    rendered = Rendered(dialogue, chat.text, chat.wanted, turns.trained, lambda: chat.laid)
    return turns._replace(changes=find_changes(rendered, settings))


def dialogues_with_own_history(
    template: ChatTemplate,
    dialogue: Dialogue,
    variables: Mapping[str, Any],
    settings: DocumentKeys,
) -> list[Dialogue]:
    """Split a dialogue into dialogues, so that each trained message has the right text before it.

    The right text is the text that the template writes before the message if no messages follow
    it. Templates may write earlier messages differently when further messages follow.

    ```
    messages    user  assistant·1  user  assistant·2        the template drops earlier reasoning
    dialogues   user  assistant·1                           trains 1
                user  assistant·1  user  assistant·2        trains 2
    ```
    Each resulting dialogue ends with a trained message. If the text of a dialogue only continues
    the text of an earlier dialogue, both become one dialogue that trains the messages of both. The
    errors are the same as for `find_turns`.
    """
    is_wanted = trained_messages(dialogue, settings)
    # A message of weight 0 is only history.
    trained = [
        k
        for k, want in enumerate(is_wanted)
        if (want or dialogue.trains_part(k)) and np.float32(dialogue.weights[k])
    ]
    dialogues: list[Dialogue] = []
    last_text, first_message = "", 0
    for k in trained:
        upto = _trained_from(dialogue, first_message, k + 1, is_wanted)
        text = _rendered_chat(template, upto, variables, settings)[0].text
        # The text continues the text before, so one dialogue trains both messages.
        if dialogues and text.startswith(last_text.rstrip()):
            dialogues.pop()
        elif dialogues:
            # A new dialogue starts. Messages of the dialogue before are only history.
            first_message = len(dialogues[-1].messages)
            upto = _trained_from(dialogue, first_message, k + 1, is_wanted)
        dialogues.append(upto)
        last_text = text
    return dialogues or [dialogue]


def _trained_from(
    dialogue: Dialogue, first_message: int, count: int, is_wanted: Sequence[bool]
) -> Dialogue:
    """Return a dialogue of the first `count` messages, untrained before `first_message`."""
    return replace(
        dialogue,
        messages=dialogue.messages[:count],
        train=tuple(is_wanted[k] and first_message <= k for k in range(count)),
        weights=dialogue.weights[:count],
        parts=tuple(
            marks if first_message <= k else tuple(Mark(False) for _ in marks)
            for k, marks in enumerate(dialogue.parts[:count])
        ),
    )


def _rendered_chat(
    template: ChatTemplate,
    dialogue: Dialogue,
    variables: Mapping[str, Any],
    settings: DocumentKeys,
) -> tuple["_Chat", list[tuple[int, int]] | None]:
    """Return a rendered conversation and the ranges of its {% generation %} blocks.

    The ranges are None if the template has no such blocks. If the template fails on a list of parts
    and the dialogue has marked parts, each list is replaced by one string with all of its texts.
    """
    from packprep.conversations.template_limits import TemplateLimit

    messages = [_as_read(message) for message in dialogue.messages]
    rendered = partial(_rendered_messages, template, dialogue, variables, settings)
    joined = _with_joined_parts(messages) if dialogue.parts else messages
    if joined == messages:
        return rendered(messages)
    try:
        return rendered(messages)
    except (MemoryError, TemplateLimit):
        raise
    except Exception:  # A template is code and may raise any error.
        return rendered(joined)


def _with_joined_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages. A content that is a list of texts becomes one string."""
    return [
        {**message, "content": "".join(texts)}
        if isinstance(message.get("content"), list)
        and len(texts := texts_of(message)) == len(message["content"])
        else message
        for message in messages
    ]


def _rendered_messages(
    template: ChatTemplate,
    dialogue: Dialogue,
    variables: Mapping[str, Any],
    settings: DocumentKeys,
    messages: list[dict[str, Any]],
) -> tuple["_Chat", list[tuple[int, int]] | None]:
    """Return the result of `_rendered_chat` for the dialogue with `messages` as its messages."""
    from packprep.conversations.template_limits import TemplateLimit

    tools = dialogue.tools
    render = partial(template.render, tools=tools, variables=variables)
    rendered: Callable[..., tuple[str, list[tuple[int, int]] | None]] = _without_blocks
    if template.marks_generation:
        taken = (template.source, *strings_of([messages, tools, variables]))
        rendered = partial(_with_blocks, taken=taken)
    try:
        text, blocks = rendered(render, messages)
    except (MemoryError, TemplateLimit):
        raise
    except Exception as error:  # A template is code and may raise any error.
        # Some templates need the arguments of calls as objects, or a content in each message.
        as_objects = _with_objects(messages)
        tried = None if as_objects is None else attempted(partial(rendered, render, as_objects))
        if as_objects is not None and tried is not None:
            messages, (text, blocks) = as_objects, tried
        elif isinstance(error, TemplateRefusal):
            raise
        elif (joined := _with_joined_parts(messages)) != messages and (
            attempted(partial(rendered, render, joined)) is not None
        ):
            raise TemplateRefusal(
                "it accepts only a text as the content of a message, not a list of parts; write one"
                " text instead"
            ) from None
        elif all("content" in message for message in messages):
            raise
        else:
            messages, text, blocks = _with_contents(partial(rendered, render), messages)
    # Quoted arguments show that the template expects objects.
    if _quotes_arguments(render, messages, text):
        messages = _with_objects(messages) or messages
        text, blocks = rendered(render, messages)
    check_parts(render, messages, text)
    without_content = {k for k, m in enumerate(dialogue.messages) if m.get("content") is None}
    check_written(template, render, messages, tools, text, without_content)
    is_wanted = trained_messages(dialogue, settings)
    return _Chat(template, render, messages, tools, is_wanted, text, dialogue), blocks


def _trained_alone(chat: "_Chat", blocks: list[tuple[int, int]] | None) -> list[Span] | None:
    """Return the trained ranges, without finding where untrained messages begin.

    Return None if this is not possible. The caller then uses `_found`.
    """
    from packprep.conversations.template_limits import TemplateLimit

    speakers = [k for k, message in enumerate(chat.messages) if message["role"] == "assistant"]
    wanted_messages = [k for k, want in enumerate(chat.wanted) if want]
    if not set(wanted_messages) <= set(speakers):
        return None
    # The ways are tried by their cost: blocks, markup, prefixes, then placeholders.
    if blocks is not None:
        if len(blocks) != len(speakers):
            return None
        return [(*block, k) for block, k in zip(blocks, speakers, strict=True) if chat.wanted[k]]
    if (spans := _by_markup(chat)) is not None:
        return spans
    if len(chat.messages) > MOST_BY_PREFIXES:
        return None
    try:
        begins = _Begins(chat.prefixes(), chat.text)
        return _by_prefixes(begins.prefix, len(chat.messages), chat.text, begins, chat.wanted)
    except (MemoryError, TemplateLimit):
        raise
    except Exception as error:  # A template is code and may raise any error.
        return _told_by_placeholders(chat, _Told({}, None, error), True).spans


def _with_objects(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages, with the arguments of tool calls as objects instead of JSON strings.

    Return None if no tool call has arguments that are the JSON string of an object.
    """
    changed, is_changed = [], False
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = function_of(call)
            arguments = _object_of(function.get("arguments"))
            if arguments is not None:
                is_changed = True
                function = {**function, "arguments": arguments}
                call = {**call, "function": function} if "function" in call else function
            calls.append(call)
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed if is_changed else None


def _object_of(text: Any) -> dict[str, Any] | None:
    """Return the object in a JSON text, or None if `text` is not the JSON of an object.

    A blank text is an empty object, because some APIs return it for a call without arguments.
    """
    if not isinstance(text, str) or text.lstrip()[:1] not in ("", "{"):
        return None
    try:
        value = parsed_json(text) if text.strip() else {}
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _quotes_arguments(render: Render, messages: Sequence[dict[str, Any]], text: str) -> bool:
    """Return whether the text has the arguments of a tool call as a JSON string in quotes.

    This happens if the messages have the arguments as a string and the template expects an object.
    Transformers would write the quotes into the text, and a model would learn them.
    """
    is_blank = False
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = function_of(call).get("arguments")
            if not isinstance(arguments, str) or _object_of(arguments) is None:
                continue
            is_blank |= not arguments.strip()
            if arguments.strip() and any(
                json.dumps(arguments, ensure_ascii=ascii_only) in text
                for ascii_only in (False, True)
            ):
                return True
    if not is_blank:
        return False
    # Two quotes may occur anywhere in the text. Quotes around a new character are certain.
    (mark,) = free_characters(strings_of(messages), 1)
    marked = [
        {**message, "tool_calls": [_with_blank(call, mark) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]
    with_marks = attempted(partial(render, marked)) or ""
    return f'"{mark}"' in with_marks or json.dumps(mark) in with_marks


def _with_blank(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a tool call with `mark` as its arguments, if its arguments are a blank text."""
    function = function_of(call)
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or arguments.strip():
        return call
    marked = {**function, "arguments": mark}
    return {**call, "function": marked} if "function" in call else marked


def _with_contents(
    rendered: Callable[..., tuple[str, Any]], messages: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], str, Any]:
    """Add a content to messages without one, and render them with `rendered`.

    Return (messages, text, blocks), the new messages with the two results of `rendered`.

    Some templates need a content next to tool_calls. The added content is null if the template
    accepts null, because some templates write tool calls only then. Otherwise it is an empty
    string. A template that leaves out a call is refused.
    """
    from packprep.conversations.template_limits import TemplateLimit

    filled = [{"content": None, **message} for message in messages]
    try:
        text, blocks = rendered(filled)
    except (MemoryError, TemplateRefusal, TemplateLimit):
        raise
    except Exception:  # A template is code and may raise any error.
        filled = [{"content": "", **message} for message in messages]
        text, blocks = rendered(filled)
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        if str(function_of(call).get("name", "")) not in text:
            raise TemplateRefusal("it wants a content beside tool_calls, and leaves these out")
    return filled, text, blocks


def _as_read(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as Transformers gives it to templates.

    The message has no nulls, and has its reasoning as both "thinking" and "reasoning_content".
    """
    if len(message) == 2 and message.get("content") is not None:
        return message  # It only has a role and a content.
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning_texts = [fields[key] for key in THOUGHTS if key in fields]
    if not reasoning_texts:
        return fields
    if not fields.get("thinking", "").strip():
        fields.pop("thinking", None)
    thought = next((text for text in reasoning_texts if text.strip()), reasoning_texts[0])
    return {"thinking": thought, **fields, "reasoning_content": thought}


def trained_messages(dialogue: Dialogue, settings: DocumentKeys) -> list[bool]:
    """Return whether each message is trained.

    The mark `train` of a message overrides the recipe's trained_roles.
    """
    taken = [
        message["role"] in settings.trained_roles
        and (settings.train_on_tool_calls or not message.get("tool_calls"))
        for message in dialogue.messages
    ]
    if settings.trained_turns == "last":
        last_taken = max((k for k, is_taken in enumerate(taken) if is_taken), default=-1)
        taken = [k == last_taken for k in range(len(taken))]
    marks = dialogue.train or (None,) * len(taken)
    return [
        by_recipe if mark is None else mark for by_recipe, mark in zip(taken, marks, strict=True)
    ]


# The ways of finding turns


@dataclass(frozen=True)
class _Chat:
    """A rendered conversation, with helpers that render it again to find its turns."""

    template: ChatTemplate
    render: Render  # renders messages with the tools and variables
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    wanted: list[bool]  # whether each message is trained
    text: str
    dialogue: Dialogue  # with the messages of the record

    def has_answer(self, begin: int, end: int, k: int) -> bool:
        """Return whether a range of the text contains the content of message k or a tool call."""
        texts = [part_text.strip() for part_text in texts_of(self.messages[k]) if part_text.strip()]
        return (
            writes_any(self.text[begin:end], texts) if texts else "tool_calls" in self.messages[k]
        )

    @cached_property
    def strings(self) -> list[str]:
        """Return all strings that the template can read."""
        keywords = self.render.keywords.values()  # type: ignore[attr-defined]
        return strings_of([self.messages, *keywords])

    @cached_property
    def laid(self) -> Placeholders | None:
        """Return placeholders that fit the text, or None if none fit."""
        return _laid(self)

    @cached_property
    def markup(self) -> Markup | None:
        """Return the result of `find_markup` for the template."""
        variables = self.render.keywords["variables"]  # type: ignore[attr-defined]
        render = partial(self.template.render, variables=variables, go_on=True)
        markup: Markup | None = self.template.remembered(
            ("markup", repr(variables)), partial(find_markup, render, self.template.source)
        )
        return markup

    def prefixes(self) -> Callable[..., str]:
        """Return a function that renders the first k messages.

        It adds the generation prompt if `prompt` is true.
        """
        try:
            if self.laid is not None and self.laid.replaces_all:
                return self.laid.prefix
        except TemplateRefusal:  # Without a free character, prefixes may still be enough.
            pass
        render = self.anew()
        return lambda k, prompt=False: render(self.messages[:k], prompt=prompt)

    def remember(self) -> Remember:
        """Return a function that caches renderings with these tools and variables."""
        render = self.render.keywords  # type: ignore[attr-defined]
        key = repr((render["tools"], render["variables"]))
        return lambda of_messages, make: self.template.remembered((key, of_messages), make)

    def anew(self) -> Render:
        """Reset the template's limits, and return a function that renders messages.

        All renderings of this function together must stay within the limits.
        """
        self.template.begin()
        return partial(self.render, go_on=True)


def _found(chat: _Chat, blocks: list[tuple[int, int]] | None) -> Turns:
    """Return the turns of a conversation.

    Args:
        chat: The rendered conversation.
        blocks: Ranges of {% generation %} blocks, or None without such blocks.
    """
    from packprep.conversations.template_limits import TemplateLimit

    text, messages = chat.text, chat.messages
    speaks = [message["role"] == "assistant" for message in messages]
    wants_others = any(
        want and not speaker for want, speaker in zip(chat.wanted, speaks, strict=True)
    )
    begins, spans, why, laid = _told(chat, blocks is None or wants_others, wants_others)
    # Blocks show an assistant's turns. Other trained messages need renderings.
    if blocks is not None:
        is_wanted_answer = [
            want and speaker for want, speaker in zip(chat.wanted, speaks, strict=True)
        ]
        rest_spans = spans if wants_others else []
        of_blocks = _owned(blocks, begins, messages, is_wanted_answer)
        spans = (
            None
            if rest_spans is None
            else sorted([span for span in rest_spans if not is_wanted_answer[span[2]]] + of_blocks)
        )
    if spans is None:
        if isinstance(why, NotIncremental | TemplateLimit):
            raise why
        raise NotIncremental(
            f"it cannot be told from what the template writes where messages begin{_ADVICE}"
        )
    # A system message ends where message 1 begins.
    leads = messages[0]["role"] in SYSTEM
    end = begins.get(1, 0) if leads else 0
    if not end and laid is not None and (leads or chat.tools):
        end = _first_begin(text, messages, laid, int(leads))
    return Turns(text, spans, begins, _system_end(messages, text, end, chat.tools))


class _Told(NamedTuple):
    """The positions of messages, found by comparing renderings.

    begins  as in `Turns`
    spans   trained ranges; None if they are not needed or not certain
    why     the error that explains why the trained ranges are not certain, or None
    laid    placeholders with their positions in the text; None if they are not needed or do not fit
    """

    begins: dict[int, int]
    spans: list[Span] | None = None
    why: Exception | None = None
    laid: Placeholders | None = None


def _told(chat: _Chat, with_spans: bool, wants_others: bool) -> _Told:
    """Return the positions that prefixes show. Placeholders add positions that are missing.

    A prefix is a rendering of the first k messages.

    Args:
        chat: The rendered conversation.
        with_spans: Whether to find trained ranges.
        wants_others: Whether roles other than the assistant are trained, which needs placeholders.
    """
    from packprep.conversations.template_limits import TemplateLimit

    count = len(chat.messages)
    positions = (
        _told_by_prefixes(chat, with_spans and not wants_others)
        if count <= MOST_BY_PREFIXES
        else _Told({})
    )
    needed = with_spans and positions.spans is None
    if (
        needed
        or len(positions.begins) < count - 1
        or (chat.tools and chat.messages[0]["role"] not in SYSTEM)
    ):
        try:
            positions = _told_by_placeholders(chat, positions, needed)
        except TemplateLimit:
            if needed:
                raise
    # Long conversations need many renderings of prefixes, so these come last.
    if positions.laid is None and count > MOST_BY_PREFIXES:
        positions = _told_by_prefixes(chat, with_spans and not wants_others)
    return positions


def _told_by_prefixes(chat: _Chat, with_spans: bool) -> _Told:
    """Return the positions that renderings of the first k messages show."""
    begins: dict[int, int] = {}
    try:
        prefix = chat.prefixes()
        begins = _begins(prefix, len(chat.messages), chat.text)
        # Some templates leave out an empty last message. The next message does not begin at the
        # same character.
        begins = {k: begin for k, begin in begins.items() if begin != begins.get(k - 1)}
        return _Told(
            begins,
            (
                _by_prefixes(prefix, len(chat.messages), chat.text, begins, chat.wanted)
                if with_spans
                else None
            ),
        )
    except MemoryError:
        raise
    except Exception as error:  # A template is code and may raise any error.
        return _Told(begins, None, error)


def _told_by_placeholders(chat: _Chat, positions: _Told, needed: bool) -> _Told:
    """Return `positions`, and the missing positions from placeholders.

    If no placeholders fit the text, return `positions`.

    Args:
        chat: The rendered conversation.
        positions: The positions that are already known.
        needed: Whether to find the trained ranges with placeholders. If false, `positions.spans`
            is returned.
    """
    chat.template.begin()
    laid = chat.laid
    if laid is None:
        return positions
    begins = _ascending({k: positions.begins.get(k, begin) for k, begin in laid.begins().items()})
    inside = {k: begin for k, begin in begins.items() if 0 < begin < len(chat.text)}
    try:
        return _Told(
            inside,
            _by_placeholders(chat, laid, begins) if needed else positions.spans,
            positions.why,
            laid,
        )
    except NotIncremental as error:
        return positions._replace(
            why=positions.why if isinstance(positions.why, NotIncremental) else error, laid=laid
        )


def _begins(prefix: Callable[..., str], count: int, text: str) -> dict[int, int]:
    """Return message number → index of its first character, for messages after the first.

    A message's start is known if the text starts with the rendering of the messages before it. Some
    templates cannot render these messages. Others render them differently, for example templates
    that write the system message into the user's.
    """
    begins: dict[int, int] = {}
    for k in range(1, count):
        start = attempted(partial(prefix, k))
        if start is not None and 0 < len(start) < len(text) and text.startswith(start):
            begins[k] = len(start)
    return begins


class _Begins(dict[int, int]):
    """A dict of message number → index of the message's first character, filled on demand.

    `k in begins` computes the entry of message k, if the dict does not have it yet. The entries are
    the same as in the result of `_begins`, with one exception: a message that begins at the same
    character as the previous message has no entry.
    """

    def __init__(self, prefix: Callable[..., str], text: str):
        super().__init__()
        self.prefix, self._text = prefix, text
        self._lengths: dict[int, int] = {}

    def __contains__(self, k: object) -> bool:
        assert isinstance(k, int)
        if not super().__contains__(k):
            begin = self._begin(k)
            if begin > 0 and begin != self._begin(k - 1):
                self[k] = begin
        return super().__contains__(k)

    def _begin(self, k: int) -> int:
        """Return the index of the first character of message k, or 0 if it is uncertain."""
        if k not in self._lengths:
            start = attempted(partial(self.prefix, k)) if k > 0 else None
            is_told = start is not None and 0 < len(start) < len(self._text)
            is_told = is_told and self._text.startswith(start or "")
            self._lengths[k] = len(start or "") if is_told else 0
        return self._lengths[k]


def _by_markup(chat: _Chat) -> list[Span] | None:
    """Return the ranges of all trained messages, or None if the markup does not show all of them.

    All trained messages must be an assistant's.
    """
    from packprep.conversations.template_limits import TemplateLimit

    roles = [message["role"] for message in chat.messages]
    try:
        markup = chat.markup
        if markup is None:
            return None
        spans = markup.answers(chat.text, roles, chat.wanted, "\n".join(chat.strings))
        if spans is not None and not all(chat.has_answer(*span) for span in spans):
            spans = None
        # If strings contain markup, placeholders separate strings and markup.
        laid = chat.laid if spans is None else None
    except (TemplateLimit, TemplateRefusal):  # Prefixes may still be enough.
        return None
    if spans is None and laid is None:
        return None
    last_answers = {roles[k - 1]: k for k, want in enumerate(chat.wanted) if want and k}
    # A template may choose its prompt by the conversation, such as by tools or a flag in a content.
    for previous_role, k in last_answers.items():
        asked = attempted(partial(chat.render, chat.messages[:k], prompt=True, go_on=True))
        if asked is None or not markup.asks(asked, previous_role):
            return None
    if laid is None:
        return spans
    # An answer ends where the next message begins, or at the end of the text.
    laid.markup, spans = markup, []
    last_message = len(chat.messages) - 1
    for k in (k for k, want in enumerate(chat.wanted) if want):
        begin = laid.boundary_by_markup(k)
        if k < last_message:
            next_boundary = laid.boundary_by_markup(k + 1)
            end = None if next_boundary is None else next_boundary.begin
        else:
            ending = laid.text_after(k)
            end = None if ending is None or not markup.ends_answer(ending) else len(chat.text)
        if begin is None or begin.answer is None or end is None:
            return None
        if begin.answer < end:
            spans.append((begin.answer, end, k))
    return spans


def _by_prefixes(
    prefix: Callable[..., str],
    count: int,
    text: str,
    begins: Mapping[int, int],
    is_wanted: Sequence[bool],
) -> list[Span]:
    """Return the ranges of all trained messages, which must be an assistant's.

    `prefix` renders the first k messages. `is_wanted` says whether each message is trained.
    """
    spans = []
    for k in (k for k, want in enumerate(is_wanted) if want):
        asked = prefix(k, prompt=True)
        if k + 1 in begins:
            answered = text[: begins[k + 1]]
        else:
            answered = text if k == count - 1 else prefix(k + 1)
        # The prompt must begin the answered text, which must begin the whole text.
        if not answered.startswith(asked):
            raise NotIncremental(
                f"message {k} does not begin with what the template asks for it with{_ADVICE}"
            )
        if not text.startswith(answered):
            raise NotIncremental(
                f"what follows message {k} changes what the template writes up to it{_ADVICE}"
            )
        if len(asked) < len(answered):
            spans.append((len(asked), len(answered), k))
    return spans


def _laid(chat: _Chat) -> Placeholders | None:
    """Return placeholders that fit the text, or None if none fit.

    Up to four attempts replace fewer and fewer strings:

    1. all strings, except blank strings of an assistant
    2. all strings that are not blank
    3. only the strings of an assistant's messages, and of messages with trained text
    4. the strings of attempt 3, except names in tool calls, because some templates compare them
    """
    render, remember = chat.anew(), chat.remember()
    marks = free_characters((chat.template.source, *chat.strings), 2)
    everybody = [True] * len(chat.messages)
    has_blanks = any(
        not text.strip()
        for message in chat.messages
        if message["role"] != "assistant"
        for text in texts_of(message)
    )
    speakers = [
        want or message["role"] == "assistant" or chat.dialogue.trains_part(k)
        for k, (want, message) in enumerate(zip(chat.wanted, chat.messages, strict=True))
    ]
    # Parts that were joined into one string keep their own placeholders.
    texts = {
        k: texts_of(given_message)
        for k, (given_message, message) in enumerate(
            zip(chat.dialogue.messages, chat.messages, strict=True)
        )
        if isinstance(given_message.get("content"), list)
        and isinstance(message.get("content"), str)
    }
    ways = [(everybody, True, False), (speakers, True, False), (speakers, False, False)]
    for replaced, calls, blanks in [(everybody, True, True), *ways] if has_blanks else ways:
        laid = Placeholders(render, chat.messages, marks, replaced, calls, blanks, remember, texts)
        if attempted(partial(laid.place, chat.text)):
            return laid
    return None


def _ascending(begins: Mapping[int, int]) -> dict[int, int]:
    """Return the starts of messages, except starts that precede the start of an earlier message."""
    kept_begins: dict[int, int] = {}
    last_begin = 0
    for k, begin in begins.items():
        if begin >= last_begin:
            kept_begins[k] = last_begin = begin
    return kept_begins


def _by_placeholders(chat: _Chat, laid: Placeholders, begins: Mapping[int, int]) -> list[Span]:
    """Return the trained ranges of all messages that are to be trained, whatever their role."""
    spans: list[Span] = []
    count, after = len(chat.messages), 0
    for k in (k for k, want in enumerate(chat.wanted) if want):
        if k < after:
            continue  # This message is trained with the message before it.
        after = k + 1
        # Messages without a known start are trained with the message before them.
        while after < count and after not in begins and chat.wanted[after]:
            after += 1
        end = begins.get(after) if after < count else len(chat.text)
        begin = laid.answer(k) if chat.messages[k]["role"] == "assistant" else laid.said(k)
        if end is None or (begins.get(k) != end if begin is None else begin > end):
            raise NotIncremental(
                f"it cannot be told where message {k}"
                f" {'ends' if end is None else 'begins'}{_ADVICE}"
            )
        if begin is not None and begin != end:
            spans.append((begin, end, k))
    return spans


# {% generation %} blocks


def _with_blocks(
    render: Render, messages: Sequence[dict[str, Any]], taken: Sequence[str]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of messages, and the ranges of its {% generation %} blocks.

    During rendering, the blocks are marked with two characters that occur in no text of `taken`.
    """
    opening, closing = free_characters(taken, 2)
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    size = depth = begin = 0
    for piece in re.split(f"([{opening}{closing}])", render(messages, around=(opening, closing))):
        # Nested blocks count as one block.
        if piece == opening:
            begin = size if depth == 0 else begin
            depth += 1
        elif piece == closing:
            depth -= 1
            if depth < 0:
                raise TemplateRefusal(
                    "{% endgeneration %} without its begin: the template cuts its own text"
                )
            if depth == 0 and begin < size:
                spans.append((begin, size))
        else:
            pieces.append(piece)
            size += len(piece)
    if depth:
        raise TemplateRefusal("{% generation %} without its end: the template cuts its own text")
    return "".join(pieces), spans


def _without_blocks(render: Render, messages: Sequence[dict[str, Any]]) -> tuple[str, None]:
    return render(messages), None


def _owned(
    blocks: Sequence[tuple[int, int]],
    begins: Mapping[int, int],
    messages: Sequence[Mapping[str, Any]],
    is_wanted: Sequence[bool] | None = None,
) -> list[Span]:
    """Return (begin, end, message number) for each block of a trained assistant's message.

    `is_wanted` says whether each message is trained. If it is None, all blocks are returned.
    """
    speakers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if len(blocks) == len(speakers) or not speakers:
        owners = speakers
    else:
        # Find the last message that is known to begin before the block. If it is an assistant's,
        # the block belongs to it. Otherwise the block belongs to the next assistant's message.
        owners = []
        for begin, _ in blocks:
            first_message = max((k for k, start in begins.items() if start <= begin), default=0)
            owners.append(next((k for k in speakers if k >= first_message), speakers[-1]))
    owned_blocks = [(*block, owner) for block, owner in zip(blocks, owners, strict=bool(speakers))]
    return [span for span in owned_blocks if is_wanted is None or is_wanted[span[2]]]


# The repeated start of later chunks


def _first_begin(
    text: str, messages: Sequence[Mapping[str, Any]], laid: Placeholders, k: int
) -> int:
    """Return the index in `text` of the first character of message k, or 0 if uncertain.

    Message k is the first message after the system message and tools.
    """
    content_begin = laid.said(k) if k < len(messages) else None
    head = laid.head_of(messages[k]["role"]) if content_begin is not None else ""
    return max(text.rfind(head, 0, content_begin), 0) if head.strip() else 0


def _system_end(
    messages: Sequence[dict[str, Any]], text: str, end: int, tools: Sequence[Any] | None = None
) -> int:
    """Return `end` if text[:end] contains the system message or the tools' names, otherwise 0."""
    if messages[0]["role"] in SYSTEM:
        texts = texts_of(messages[0])
    else:
        texts = [
            str(function_of(tool).get("name", "")) for tool in tools or () if isinstance(tool, dict)
        ]
    return end if texts and all(string.strip() in text[:end] for string in texts) else 0
