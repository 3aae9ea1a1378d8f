"""Which characters of a chat template's text are which message, by the difference between two of
its renderings.

```
messages              user: 2+2?   assistant: 4
"alpha" for the 4     …assistant↵alpha<|im_end|>↵      alike up to the 4, and from behind it: there it stands
"zero" for the 4      …assistant↵zero<|im_end|>↵
```
What the template writes, whether a conversation is turned away, and which messages have a place of
their own in the text is the build's word. Where that is, whose it is and what of it is trained is
worked out here; where renderings do not tell, the build's word stands for that, too, and is
counted.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from typing import Any, NamedTuple

from tests.twin.parts import (
    THINK_TAG,
    THOUGHTS,
    WORDS,
    Message,
    Parts,
    Span,
    Unknown,
    trained_characters,
)
from tests.twin.reading import Text
from tests.twin.records import Talk, in_float32

NEXT = "qux"
SYSTEM, ASKING = ("system", "developer"), ("user", "tool")
MOST_MESSAGES = 128  # of a conversation of which parts are rendered
MARKS = "\ufdee", "\ufdef"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Template(NamedTuple):
    """A chat template.

    source     its text
    render     (messages, tools, variables, prompt, around) → text, or an error of any class. prompt: and what asks for an
               answer; around: two texts, between which each {% generation %} block stands
    find       Talk → the build's word: text, trained (begin, end, message), begins (message → character), system_end, changes;
               None where it turns the conversation away
    documents  the recipe's table of this name
    """

    source: str
    render: Callable[..., str]
    find: Callable[[Talk], Any]
    documents: Mapping[str, Any]


def text_of_talk(talk: Talk, template: Template) -> tuple[Text, int] | None:
    """(the text of a conversation, of how many places in it the build's word was taken); None where
    it is turned away."""
    theirs = template.find(talk)
    if theirs is None:
        return None
    text = theirs.text
    said = [
        string.strip()
        for message in talk.messages
        for string in _contents(message)
        if string.strip()
    ]
    if (said and not any(string in text for string in said)) or re.search("[\ud800-\udfff]", text):
        return None
    variables = {**(template.documents["chat_template_kwargs"] or {}), **talk.variables}
    chat = _Renderings(template, talk, variables, text)
    taken = 0
    begins: dict[int, int] = {}
    for k, at in theirs.begins.items():
        own = chat.begin(k)
        taken += own is None
        begins[k] = at if own is None else own
    spans: list[Span] = []
    told = chat.trained(begins)
    for k in sorted(told.keys() | {k for *_, k in theirs.trained}):
        of_message = told.get(k, [])
        taken += of_message is None
        spans += (
            [span for span in theirs.trained if span[2] == k] if of_message is None else of_message
        )
    end = theirs.system_end and chat.system_end(begins)
    taken += end is None
    # the role of the first message at a place, or of one there that asks
    places = {0: talk.messages[0]["role"]}
    at = 0
    for k, message in enumerate(talk.messages):
        at = begins.get(k, at)
        if at not in places or begins.get(k) == at or message["role"] in ASKING:
            places[at] = message["role"]
    boundaries = sorted(set(begins.values()))
    spans = [span for span in sorted(spans) if span[0] < span[1]]
    parts = Parts(chat.render, chat.messages, talk, text)
    try:
        changes = parts.changes(spans, chat.wanted, template.documents)
    except Unknown:
        changes = theirs.changes
        taken += sum(map(len, changes))
    characters = trained_characters(len(text), spans, changes, talk.weights)
    in_32_bits = {weight: in_float32(weight) for weight in set(characters)}
    characters = [in_32_bits[weight] or 0.0 for weight in characters]
    found = Text(
        text,
        [(begin, begin + len(own), weight) for begin, own, weight in _runs(characters)],
        True,
        boundaries,
        [places[place] for place in (0, *boundaries)],
        theirs.system_end if end is None else end,
        list(_strings([talk.messages, talk.tools, variables])),
        [
            begin
            for begin, _, k in spans
            if chat.has_blocks and chat.roles[k] == "assistant" and characters[begin]
        ],
        talk.media,
        document_weight=talk.weight,
    )
    return found, taken


def _runs(weights: Sequence[float]) -> Iterator[tuple[int, list[float], float]]:
    """(first character, all of them, their weight) of characters of one weight above 0 that touch."""
    begin = 0
    for weight, run in groupby(weights):
        own = list(run)
        if weight:
            yield begin, own, weight
        begin += len(own)


def texts_of_talk(talk: Talk, template: Template) -> tuple[Text, int] | None:
    """As `text_of_talk`, of a recipe that trains each turn behind its own history: the first of the
    texts, with the others as `later`.

    A text goes on as long as what is rendered up to the next trained message extends it.
    """
    wanted = [
        k
        for k, want in enumerate(wanted_of(talk, template.documents))
        if want or (talk.parts and any(train for train, _ in talk.parts[k]))
    ]
    wanted = [k for k in wanted if in_float32(talk.weights[k])]
    groups: list[list[int]] = []
    before = None
    for k in wanted:
        theirs = template.find(_up_to(talk, [k], template.documents))
        if theirs is None:
            return None
        if before is not None and theirs.text.startswith(before.rstrip()):
            groups[-1].append(k)
        else:
            groups.append([k])
        before = theirs.text
    if not groups:
        return text_of_talk(talk, template)
    found = [text_of_talk(_up_to(talk, group, template.documents), template) for group in groups]
    texts = [one[0] for one in found if one is not None]
    if len(texts) < len(found) or (len(texts) > 1 and not all(text.spans for text in texts)):
        return None
    return texts[0]._replace(later=texts[1:]), sum(one[1] for one in found if one is not None)


def _up_to(talk: Talk, trained: Sequence[int], documents: Mapping[str, Any]) -> Talk:
    """A conversation up to the last of the messages that are trained in it, all or in part."""
    count = trained[-1] + 1
    wanted = wanted_of(talk, documents)
    train = [k in trained and wanted[k] for k in range(count)]
    parts = [
        marks if k in trained else tuple((False, 1.0) for _ in marks)
        for k, marks in enumerate(talk.parts[:count])
    ]
    return talk._replace(
        messages=talk.messages[:count],
        train=train,
        weights=talk.weights[:count],
        parts=tuple(parts),
    )


def wanted_of(talk: Talk, documents: Mapping[str, Any]) -> list[bool]:
    """Of each message, whether it is trained."""
    roles = [message["role"] for message in talk.messages]
    calls = documents["train_on_tool_calls"]
    wanted = [
        role in documents["trained_roles"] and (calls or not message.get("tool_calls"))
        for role, message in zip(roles, talk.messages, strict=True)
    ]
    if documents["trained_turns"] == "last":
        for k in [k for k, want in enumerate(wanted) if want][:-1]:
            wanted[k] = False
    return [
        want if train is None else train for want, train in zip(wanted, talk.train, strict=True)
    ]


class _Renderings:
    """A conversation, parts of which are rendered with other words in them."""

    def __init__(self, template: Template, talk: Talk, variables: Mapping[str, Any], text: str):
        self.text = text
        self.messages = [_as_read(message) for message in talk.messages]
        self.roles = [message["role"] for message in talk.messages]
        self.wanted = wanted_of(talk, template.documents)
        self.has_blocks = bool(GENERATION.search(template.source))
        self._template, self._tools, self._variables = template, talk.tools, variables
        self._kept: dict[Any, Any] = {}
        if self._render(self.messages) != text:  # it wants a content beside tool_calls, too
            joined = [_joined(message) for message in self.messages]
            for first, content in ((self.messages, None), (self.messages, ""), (joined, "")):
                filled = [{"content": content, **message} for message in first]
                if self._render(filled) == text:
                    self.messages = filled
                    break

    def render(self, messages: Sequence[Message]) -> str | None:
        """The text of messages; None where the template fails."""
        return self._render(messages)

    def _render(
        self, messages: Sequence[Message], prompt: bool = False, around: tuple[str, str] = ("", "")
    ) -> str | None:
        """The text of messages; None where the template fails."""
        if len(self.messages) > MOST_MESSAGES:
            return None
        try:
            return self._template.render(messages, self._tools, self._variables, prompt, around)
        except MemoryError:
            raise
        except Exception:  # of any class, for a template is code
            return None

    def _first(self, k: int, prompt: bool = False) -> str | None:
        """The text of the first k messages."""
        if (k, prompt) not in self._kept:
            self._kept[k, prompt] = self._render(self.messages[:k], prompt)
        return self._kept[k, prompt]

    def _around(self, k: int, count: int, then: str = "") -> tuple[str, str] | None:
        """What stands before what message k says, and behind it, in the text of the first `count`
        messages and of what then
        comes: "", "prompt", what asks for an answer, or "user", another message. None if nothing
        does.
        """
        asked = "around", k, count, then
        if asked not in self._kept:
            rest = self.messages[k + 1 : count] + ([self._next] if then == "user" else [])
            self._kept[asked] = None
            for names in (False, True):  # what is called may stand in its result, too
                said = (_saying(self.messages[k], word, names) for word in WORDS)
                one, two = (
                    self._render([*self.messages[:k], message, *rest], then == "prompt")
                    for message in said
                )
                if one is None or two is None or one == two:
                    continue
                before, behind = (
                    commonprefix([one, two]),
                    commonprefix([one[::-1], two[::-1]])[::-1],
                )
                if rest != self.messages[k + 1 :] or (
                    self.text.startswith(before) and self.text.endswith(behind)
                ):
                    self._kept[asked] = before, behind
                    break
        return self._kept[asked]

    @cached_property
    def _next(self) -> Message:
        """What a user says behind some of the messages."""
        in_parts = any(isinstance(message.get("content"), list) for message in self.messages)
        return {"role": "user", "content": [{"type": "text", "text": NEXT}] if in_parts else NEXT}

    def said(self, k: int) -> tuple[int, int] | None:
        """The characters of the text in which message k says something."""
        around = self._around(k, len(self.messages))
        return around and (len(around[0]), len(self.text) - len(around[1]))

    def begin(self, k: int) -> int | None:
        """The character at which message k begins."""
        before = self._before(k)
        if before and len(before) < len(self.text) and self.text.startswith(before):
            return len(before)
        return self._place(k)[0]

    def _before(self, k: int) -> str | None:
        """The text of the messages before k; None where the last of them adds nothing to it, as
        where a template leaves out a last message that says nothing."""
        before = self._first(k)
        return before if before != self._first(k - 1) else None

    def _place(self, k: int) -> tuple[int | None, int | None]:
        """Where message k begins, and where what an assistant is trained on in it."""
        said = [self.said(j) for j in range(len(self.messages))]
        p = next((j for j in reversed(range(k)) if said[j]), None)
        before, follows = (
            None if p is None else said[p],
            next((place for place in said[k:] if place), None),
        )
        start = before[1] if before else 0
        between = self.text[start : follows[0] if follows else len(self.text)]
        alone, asked, followed = (self._behind(p, k, then) for then in ("", "prompt", "user"))
        asks = self._asks
        if alone is not None and asked is not None and asked.startswith(alone):
            asks = asked[len(alone) :]
        # Some write another end behind the last message, and that of the others where they ask for
        # the next one or have it.
        heads = ("", alone, ""), ("prompt", asked, asks), ("user", followed, self._head("user"))
        ends = [
            end.removesuffix(head)
            for then, end, head in heads
            if end is not None and head is not None and end.endswith(head)
            if p == k - 1 or end != self._behind(p, k - 1, then)  # message k - 1 adds to it
        ]
        end = next((end for end in ends if between.startswith(end)), None)
        if end is None:
            return None, None
        alike = None if asks is None else _alike(asks, between[len(end) :])
        return start + len(end), None if alike is None else start + len(end) + alike

    def _behind(self, p: int | None, k: int, then: str) -> str | None:
        """What stands behind what message p says (None: what there is) in the text of the first k
        messages and of what then comes, up to what that says."""
        if p is None:
            return self._first(k, then == "prompt") if then != "user" else None
        around = self._around(p, k, then)
        if around is None or then != "user":
            return around and around[1]
        return around[1][: around[1].rindex(NEXT)] if NEXT in around[1] else None

    def _head(self, role: str, begins: Mapping[int, int] | None = None) -> str | None:
        """What stands before what messages of a role say, by one of them that is not the first;
        begins: of messages, where they are known."""
        for k in (k for k in range(1, len(self.messages)) if self.roles[k] == role):
            before, said = (
                self._before(k) if begins is None else self.text[: begins.get(k, 0)],
                self.said(k),
            )
            if (
                before
                and said
                and self.text.startswith(before)
                and self.text[len(before) : said[0]].strip()
            ):
                return self.text[len(before) : said[0]]
        return None

    def _answer(self, k: int, begins: Mapping[int, int]) -> int | None:
        """Where what an assistant's message is trained on begins."""
        if k:
            return self._place(k)[1]
        said, head, asks = self.said(0), self._head(self.roles[0], begins), self._asks
        if said is None or head is None or asks is None or not self.text[: said[0]].endswith(head):
            return None
        alike = _alike(asks, head)
        return None if alike is None else said[0] - len(head) + alike

    @cached_property
    def _asks(self) -> str | None:
        """What the template writes to ask for an answer."""
        instead = None  # of what ends a text
        for k in range(1, len(self.messages) + 1):
            alone, asked = self._first(k), self._first(k, True)
            if alone is None or not asked or asked == alone:
                continue
            if asked.startswith(alone):
                return asked[len(alone) :]
            instead = instead or asked[_alike(asked, alone) or 0 :]
        return instead

    def trained(self, begins: Mapping[int, int]) -> dict[int, list[Span] | None]:
        """Message → what is trained of it, of those that are; None where that cannot be told."""
        by_blocks = [role == "assistant" and self.has_blocks for role in self.roles]
        found: dict[int, list[Span] | None] = {}
        if any(want and not inside for want, inside in zip(self.wanted, by_blocks, strict=True)):
            prefixes = not self.has_blocks and set(self._wanted_roles()) == {"assistant"}
            found = (self._by_prefixes() if prefixes else None) or self._by_words(begins)
        if self.has_blocks:
            blocks = self._in_blocks(begins)
            for k in (k for k, inside in enumerate(by_blocks) if inside and self.wanted[k]):
                found[k] = None if blocks is None else [span for span in blocks if span[2] == k]
        return found

    def _wanted_roles(self) -> list[str]:
        return [role for role, want in zip(self.roles, self.wanted, strict=True) if want]

    def _by_prefixes(self) -> dict[int, list[Span] | None] | None:
        """What each adds to those before it with what asks for it; None where one of them adds
        nothing of that kind."""
        found: dict[int, list[Span] | None] = {}
        for k in (k for k, want in enumerate(self.wanted) if want):
            asked, answered = self._first(k, True), self._first(k + 1)
            if (
                asked is None
                or answered is None
                or not (answered.startswith(asked) and self.text.startswith(answered))
            ):
                return None
            found[k] = [(len(asked), len(answered), k)]
        return found

    def _by_words(self, begins: Mapping[int, int]) -> dict[int, list[Span] | None]:
        """From where each answers, or says something, to where the next begins that has a place of
        its own or is not trained."""
        found: dict[int, list[Span] | None] = {}
        count, after = len(self.messages), 0
        for k in (k for k, want in enumerate(self.wanted) if want):
            if k < after:
                found[k] = []
                continue
            after = next(
                (j for j in range(k + 1, count) if j in begins or not self.wanted[j]), count
            )
            end = len(self.text) if after == count else begins.get(after)
            said = self.said(k)
            begin = self._answer(k, begins) if self.roles[k] == "assistant" else said and said[0]
            found[k] = None if begin is None or end is None else [(begin, end, k)]
            after = after if found[k] else k + 1
        return found

    def _in_blocks(self, begins: Mapping[int, int]) -> list[Span] | None:
        """What the template's {% generation %} blocks gave, each with the message of an assistant
        that it is of."""
        marked = self._render(self.messages, around=MARKS)
        if marked is None or re.sub("[" + "".join(MARKS) + "]", "", marked) != self.text:
            return None
        places: list[tuple[int, int]] = []
        opened: list[int] = []
        at = 0
        for character in marked:
            if character == MARKS[0]:
                opened.append(at)
            elif character == MARKS[1]:
                begin = opened.pop()
                if not opened and begin < at:
                    places.append((begin, at))
            else:
                at += 1
        speakers = [k for k, role in enumerate(self.roles) if role == "assistant"]
        if len(places) == len(speakers):
            return [(*place, k) for place, k in zip(places, speakers, strict=True)]
        found = []
        for begin, end in places:
            message = max((k for k, at in begins.items() if at <= begin), default=0)
            found.append((begin, end, next((k for k in speakers if k >= message), speakers[-1])))
        return found

    def system_end(self, begins: Mapping[int, int]) -> int | None:
        """The character at which the leading system message and tools end; None where that cannot
        be told."""
        leads = self.roles[0] in SYSTEM
        if leads and 1 in begins:
            return begins[1]
        k = int(leads)
        said = self.said(k) if k < len(self.messages) else None
        head = self._head(self.roles[k], begins) if said else None
        return (
            said[0] - len(head) if said and head and self.text[: said[0]].endswith(head) else None
        )


def _as_read(message: Message) -> Message:
    """A message as templates read it: without nulls, and with what was thought under each name by
    which they ask for it."""
    given = {key: value for key, value in message.items() if value is not None}
    thoughts = [given[key] for key in THOUGHTS if key in given]
    if not thoughts:
        return given
    thought = [*filter(str.strip, thoughts), *thoughts][0]
    blank = [key for key in ("thinking",) if key in given and not given[key].strip()]
    kept = {key: value for key, value in given.items() if key not in blank}
    return {"thinking": thought, **kept, "reasoning_content": thought}


def _joined(message: Message) -> Message:
    """A message with one text for a list of them."""
    content = message.get("content")
    if not isinstance(content, list) or not all("text" in part for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _saying(message: Message, word: str, names: bool) -> Message:
    """A message with a word for each of its texts that are not blank, and for what its calls hand
    over; names: for what they call, too."""

    def instead(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: instead(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [instead(inner) for inner in value]
        return word if isinstance(value, str) and value.strip() else value

    def of_content(content: Any) -> Any:
        if isinstance(content, list):
            return [
                {**part, "text": of_content(part["text"])} if "text" in part else part
                for part in content
            ]
        if not isinstance(content, str):
            return content
        return "".join(
            part if THINK_TAG.fullmatch(part) else instead(part)
            for part in THINK_TAG.split(content)
        )

    def of_call(call: Message) -> Message:
        if isinstance(call.get("function"), dict):
            return {**call, "function": of_call(call["function"])}
        changed = {
            key: instead(value) if key == "arguments" else value for key, value in call.items()
        }
        return {**changed, "name": word} if names else changed

    changed = {
        key: of_content(value) if key in ("content", *THOUGHTS) else value
        for key, value in message.items()
    }
    if message["role"] == "assistant" and message.get("tool_calls"):
        changed["tool_calls"] = [of_call(call) for call in message["tool_calls"]]
    return changed


def _alike(asks: str, written: str) -> int | None:
    """With how many characters a message begins as what asks for it; None where they part inside a
    word.

    Of a tag that both begin, and that is another in each, no part counts.
    """
    alike = commonprefix([asks, written])
    if alike == asks:
        return len(asks)
    opened = max(alike.rfind("<"), alike.rfind("["))
    if opened > max(alike.rfind(">"), alike.rfind("]")):
        alike = alike[:opened]
    return (
        len(alike)
        if all(
            not c or c in "<[" or c.isspace()
            for c in (s[len(alike) : len(alike) + 1] for s in (asks, written))
        )
        else None
    )


def _contents(message: Message) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else [{"text": content}]:
        text = part.get("text")
        if isinstance(text, str):
            yield text


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.items() if isinstance(value, dict) else value:
            yield from _strings(inner)
