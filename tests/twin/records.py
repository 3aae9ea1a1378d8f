"""What a record, a line's JSON or a table's row, is: a text, or the messages of a conversation;
None where it cannot be used. And what of a text its loss_spans train.

```
{"prompt": "2+2?", "completion": " 4"}                     a Passage: "2+2? 4", trained from character 4 on
{"conversations": [{"from": "gpt", "value": "4"}, …]}      a Talk: [{"role": "assistant", "content": "4"}, …]
```
"""

import json
import math
import struct
from collections import Counter
from typing import Any, NamedTuple

MAX_DEPTH = 256
MAX_TEXT = 8 * 2**20  # bytes of a document's text
MAX_LINE = 4 * MAX_TEXT
SPANS, MESSAGES, MEDIA = "loss_spans", "messages", "media"
MOST_SLOTS = 8 * 2**20  # of media of a document
LARGEST = 3.4028234663852886e38  # of float32
USERS, TOOLS = ("human", "user"), ("tool", "observation", "function_response")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
CALL_KEYS = ("name", "arguments", "id", "type")
OTHER_ARGUMENTS = ("parameters", "args", "input", "kwargs")
ASSISTANTS = ("gpt", "assistant", "chatgpt", "model", "bard", "bing", "function_call")
NEEDED = {
    "messages": ["messages"],
    "sharegpt": ["conversations"],
    "prompt_completion": ["prompt", "completion"],
    "alpaca": ["instruction", "output"],
}
OTHERS = [
    "chosen",
    "rejected",
    "label",
    "completions",
    "labels",
    "input",
    "system",
    "history",
    "weight",
]


NOT_READ = [
    "functions",
    "function_call",
    *("image", "images", "video", "videos", "audio", "audios"),
    *("training", "train_detail", "loss_mask", "loss_scale", "loss_weight"),
]
NO_MARKS = ("train_detail", "loss_mask", "loss_scale", "masked", "trainable")


class Keys(NamedTuple):
    """What a source calls its fields, which format its recipe says, the plan's law, whose messages
    are trained, and kinds of media."""

    text: str
    messages: str = MESSAGES
    tools: str = "tools"
    format: str = "auto"
    roles: tuple[str, ...] = ("assistant",)
    kinds: tuple[str, ...] = ()

    def place(self, name: str) -> str:
        """Where a field stands."""
        if name == "conversations" and self.messages != MESSAGES:
            name = MESSAGES
        return {MESSAGES: self.messages, "tools": self.tools}.get(name, name)

    def names(self) -> list[str]:
        """The keys of all fields that may matter."""
        needed = [self.place(name) for names in NEEDED.values() for name in names]
        media = [MEDIA] if self.kinds else []
        return [
            self.text,
            SPANS,
            *media,
            *needed,
            self.tools,
            "chat_template_kwargs",
            *OTHERS,
            *NOT_READ,
        ]


def size(record: dict[str, Any], keys: Keys) -> int:
    """The size of a table's row: of its text in bytes, or of what a layout has, texts in bytes and
    lists by items."""
    text = at(record, keys.text) if keys.format == "auto" else None
    if text is not None:
        return _length(text)
    places: set[str] = set()
    for kind, names in NEEDED.items():
        own = {keys.place(name) for name in names} - {keys.text}
        there = all(name in record or at(record, name) is not None for name in own) and len(
            own
        ) == len(names)
        if there and keys.format in ("auto", kind):
            places |= own
    held = [at(record, name) for name in places]
    return sum(map(_length, held))


def _length(value: Any) -> int:
    return (
        len(value.encode() if isinstance(value, str) else value)
        if isinstance(value, str | bytes | list)
        else 0
    )


Picture = tuple[str, int, str, int]
"""A place of media: its kind, how many slots, its ref, and how many characters of the text stand
before it (−1: unsaid)."""


class Talk(NamedTuple):
    """Messages for a template, its tools and variables; of each message whether it is trained
    (None: unsaid), and its weight; what stands for their parts of media; and the same two of each
    part of a message's content, () where none says it, and () where no message has any."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]
    train: tuple[bool | None, ...]
    weights: tuple[float, ...]
    media: tuple[Picture, ...] = ()
    parts: tuple[tuple[tuple[bool | None, float], ...], ...] = ()
    weight: float = 1.0  # the record's, which is multiplied into the others


class Passage(NamedTuple):
    """A text, its loss_spans as they stand in the record (None: it has none), the record's weight
    and its media, unchecked."""

    text: Any
    spans: Any = None
    weight: Any = None
    media: Any = None


class _BadRecord(Exception):
    """What a rejected record raises."""


def _need(condition: Any) -> None:
    if not condition:
        raise _BadRecord


def at(record: Any, key: str) -> Any:
    """What a record has at a key, or at the end of the path that the key's points make; None:
    nothing."""
    while isinstance(record, dict):
        if key in record:
            return record[key]
        head, point, key = key.partition(".")
        if not point:
            return None
        record = record.get(head)
    return None


def parsed(source: str) -> Any:
    """The value of JSON; ValueError where it is none, or nested too deep."""
    if too_deep(source):
        raise ValueError
    try:
        return json.loads(source, parse_int=_integer)
    except RecursionError:
        raise ValueError from None


def read(record: dict[str, Any], keys: Keys) -> Talk | Passage | None:
    """What a record is. A field that is the text's is the text and nothing else."""
    fields = {name: at(record, name) for name in keys.names()}
    text = fields.pop(keys.text, None)
    spans = fields.get(SPANS)
    format = keys.format
    try:
        kind = (
            _kind(fields, keys, text is not None or spans is not None)
            if format == "auto"
            else format
        )
        if not kind:
            return Passage(text, spans, fields.get("weight"), fields.get(MEDIA))
        _need(spans is None and (text is None or format != "auto"))
        found = {
            name: fields.get(keys.place(name))
            for name in [*NEEDED[kind], "tools", "chat_template_kwargs", *OTHERS]
        }
        _need(not any(fields.get(name) for name in NOT_READ))
        made = _of_kind(kind, found, keys.kinds)
        if isinstance(made, Passage):
            return made._replace(media=fields.get(MEDIA))
        _need(not fields.get(MEDIA))
        if isinstance(made, Talk):
            trained = [message["role"] in keys.roles for message in made.messages]
            _need(
                any(
                    said or (said is None and own)
                    for said, own in zip(made.train, trained, strict=True)
                )
                or any(train for marks in made.parts for train, _ in marks)
            )
        return made
    except _BadRecord:
        return None


def _kind(fields: dict[str, Any], keys: Keys, has_text: bool) -> str:
    """Which of NEEDED a record is; "" where it is a text."""

    def has(*names: str) -> bool:
        return all(fields.get(keys.place(name)) is not None for name in names)

    if has(MESSAGES):
        return "messages"
    if has_text:
        return ""
    _need(not has("chosen", "rejected"))
    _need(not (has("prompt", "completion") and isinstance(fields["label"], bool)))
    _need(not has("prompt", "completions", "labels"))
    return next((kind for kind, names in NEEDED.items() if has(*names)), "")


def _of_kind(kind: str, found: dict[str, Any], kinds: tuple[str, ...]) -> Talk | Passage:
    system, answers_from = found["system"], 0
    if kind == "prompt_completion":
        prompt, completion = found["prompt"], found["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            _need(not system and not found["tools"] and not found["chat_template_kwargs"])
            whole = prompt + completion
            _need(len(whole.encode("utf-8", "surrogatepass")) <= MAX_TEXT)
            return Passage(whole, [[len(prompt), len(whole)]], found["weight"])
        _need(isinstance(prompt, list) and isinstance(completion, list) and completion)
        messages, answers_from = prompt + completion, len(prompt)
    elif kind == "alpaca":
        system, earlier, given = found["system"], found["history"] or [], found["input"]
        _need(isinstance(earlier, list) and isinstance(given, str | None))
        _need(isinstance(found["instruction"], str) and isinstance(found["output"], str))
        question = "\n\n".join([found["instruction"], given]) if given else found["instruction"]
        pairs = [*earlier, [question, found["output"]]]
        _need(all(isinstance(pair, list) and len(pair) == 2 for pair in pairs))
        messages = []
        for question, answer in pairs:
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
    else:
        (name,) = NEEDED[kind]
        messages, system = found[name], found["system"]
        _need(isinstance(messages, list) and messages)
    return _talk(messages, answers_from, system, found, kinds)


def _talk(
    messages: list[Any],
    answers_from: int,
    system: Any,
    found: dict[str, Any],
    kinds: tuple[str, ...],
) -> Talk:
    of_all = _weight(found["weight"])
    said = []
    media: list[Picture] = []
    for i, message in enumerate(messages):
        _need(isinstance(message, dict))
        own = dict(message)
        if "role" not in own and "from" in own:
            own = _spoken(own)
        own = {key: value for key, value in own.items() if value is not None or key == "content"}
        train, own_weight = _marks(own)
        weight = of_all * own_weight
        _need(weight <= LARGEST)
        if own.get("tool_calls") == []:
            del own["tool_calls"]
        _need(_sound(own, kinds))
        marks: list[tuple[bool | None, float]] = []
        if isinstance(own.get("content"), list):
            own["content"] = [dict(part) for part in own["content"]]
            for part in own["content"]:
                marks.append(_marks(part))
                _need(weight * marks[-1][1] <= LARGEST)
                if marks[-1] != (None, 1.0):
                    _need(part["type"] not in kinds and part["text"].strip())
            if set(marks) == {(None, 1.0)}:
                marks = []
            pictures = [part for part in own["content"] if part["type"] in kinds]
            media += [(part["type"], *_slots(part), -1) for part in pictures]
            own["content"] = [
                {
                    key: value
                    for key, value in part.items()
                    if part not in pictures or key not in ("ref", "tokens")
                }
                for part in own["content"]
            ]
        train = train if train is not None or i >= answers_from else False
        said.append((own, train, weight, tuple(marks)))
    if system:
        _need(isinstance(system, str) and said[0][0]["role"] != "system")
        said.insert(0, ({"role": "system", "content": system}, None, of_all, ()))
    _need(said)
    tools, variables = (_value(found[name]) for name in ("tools", "chat_template_kwargs"))
    _need(
        tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))
    )
    variables = {} if variables is None else variables
    _need(isinstance(variables, dict))
    _need(
        not variables.keys() & {"messages", "tools", "add_generation_prompt", "packprep_generation"}
    )
    _need(sum(slots for _, slots, *_ in media) <= MOST_SLOTS)
    all_messages, trains, weights, parts = zip(*said, strict=True)
    parts = parts if any(parts) else ()
    marks = trains, weights, tuple(media), parts, of_all
    return Talk(list(all_messages), tools, variables, *marks)


def _marks(own: dict[str, Any]) -> tuple[bool | None, float]:
    """What a message or a part says of its training, which is taken off it."""
    _need(not any(own.get(key) is not None for key in NO_MARKS))
    said = [own.pop(key, None) for key in ("train", "training", "loss")]
    if isinstance(said[2], int | float) and said[2] in (0, 1):
        said[2] = bool(said[2])
    trains = [train for train in said if train is not None]
    given = [own.pop(key, None) for key in ("weight", "loss_weight")]
    weights = [_weight(weight) for weight in given if weight is not None]
    _need(all(isinstance(train, bool) for train in trains) and len(set(trains)) < 2)
    _need(len(set(weights)) < 2)
    return (trains or [None])[0], (weights or [1.0])[0]


def _slots(entry: dict[str, Any]) -> tuple[int, str]:
    """How many slots an entry of media asks for, and its ref."""
    slots, ref = _whole(entry.get("tokens")), entry.get("ref")
    try:
        if 1 <= slots <= MOST_SLOTS and isinstance(ref, str) and ref.encode() is not None:
            return slots, ref
    except UnicodeEncodeError:
        pass
    raise _BadRecord


def _whole(number: Any) -> int:
    """A whole number, be it written as 3 or as 3.0."""
    _need(isinstance(number, int | float) and not isinstance(number, bool))
    _need(isinstance(number, int) or number.is_integer())
    return int(number)


def pictures_of(media: Any, text: str, kinds: tuple[str, ...]) -> list[Picture] | None:
    """The places of a text's media; None where they are none."""
    found: list[Picture] = []
    try:
        _need(media is None or isinstance(media, list))
        for entry in media or []:
            _need(isinstance(entry, dict) and entry.get("kind") in kinds)
            at = _whole(entry.get("at"))
            _need((found[-1][3] if found else 0) <= at <= len(text))
            found.append((entry["kind"], *_slots(entry), at))
        _need(sum(slots for _, slots, *_ in found) <= MOST_SLOTS)
    except (_BadRecord, TypeError):
        return None
    return found


def _spoken(own: dict[str, Any]) -> dict[str, Any]:
    """A message of role and content for one of from and value."""
    speaker, value = own.pop("from"), own.pop("value", None)
    _need(isinstance(speaker, str) and isinstance(value, str | None))
    speaker = speaker.lower()
    roles = (
        dict.fromkeys(USERS, "user")
        | dict.fromkeys(ASSISTANTS, "assistant")
        | dict.fromkeys(TOOLS, "tool")
    )
    roles |= {"system": "system", "developer": "developer"}
    _need(speaker in roles)
    made: dict[str, Any] = {"role": roles[speaker], "content": value}
    if speaker == "function_call" and value:
        try:
            calls = parsed(value)
        except ValueError:
            calls = None
        calls = calls if isinstance(calls, list) else [calls]
        called = [_called(call) for call in calls]
        if called and all(name is not None for name in map(_name_of, called)):
            for function in called:
                _need(not [key for key in function if key not in CALL_KEYS])
            made = {"role": "assistant", "content": None, "tool_calls": []}
            for function in called:
                arguments = function.get("arguments", {})
                own_call = {"name": function["name"], "arguments": arguments}
                made["tool_calls"].append({"type": "function", "function": own_call})
    return {**made, **own}


def _called(call: Any) -> Any:
    """What a call calls: at `function`, or the call itself."""
    return call["function"] if isinstance(call, dict) and "function" in call else call


def _name_of(called: Any) -> str | None:
    name = called.get("name") if isinstance(called, dict) else None
    return name if isinstance(name, str) else None


def _sound(own: dict[str, Any], kinds: tuple[str, ...]) -> bool:
    """Whether a message is such as templates take. kinds: of media."""
    role, content = own.get("role"), own.get("content")
    texts = [own[key] for key in ("name", "tool_call_id", *THOUGHTS) if key in own]
    if not (isinstance(role, str) and role and all(isinstance(text, str) for text in texts)):
        return False
    calls = own.get("tool_calls", [])
    if not isinstance(calls, list):
        return False
    thoughts = [own[key].strip() for key in THOUGHTS if key in own]
    if len({thought for thought in thoughts if thought}) > 1:
        return False
    for called in map(_called, calls):
        if _name_of(called) is None:
            return False
        if "arguments" not in called and not called.keys().isdisjoint(OTHER_ARGUMENTS):
            return False
    if content is None:
        return len(own.keys() - {"role", "content", "name", "tool_call_id", "id"}) > 0
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        words = [
            part
            for part in parts
            if not (isinstance(part.get("type"), str) and part["type"] in kinds)
        ]
        return all(
            part.get("type") == "text" and isinstance(part.get("text"), str) for part in words
        )
    return isinstance(content, str)


def _weight(value: Any) -> float:
    if value is None:
        return 1.0
    _need(isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST)
    _need(not math.isnan(value))
    return float(value)


def _value(given: Any) -> Any:
    """What tools or variables are, of which a text is the JSON; "" is nothing."""
    if not isinstance(given, str):
        return given
    try:
        return parsed(given) if given else None
    except ValueError:
        raise _BadRecord from None


def of_table(row: dict[str, Any]) -> dict[str, Any]:
    """A table's row as a line has it: no nulls, and no weight where null or NaN stands for none."""
    record = without_nulls({**row, "weight": unless_nan(row.get("weight"))})
    spans = record.get(SPANS)
    if isinstance(spans, list):
        for i, span in enumerate(spans):
            if isinstance(span, list) and len(span) == 3 and unless_nan(span[2]) is None:
                spans[i] = span[:2]
    return record


def without_nulls(value: Any) -> Any:
    """A table's value, where null stands for a key that is not there, but at a message's
    content."""
    if isinstance(value, list):
        return list(map(without_nulls, value))
    if not isinstance(value, dict):
        return value
    made = {}
    for key, inner in value.items():
        is_part = "type" in value and "text" in value
        if key == "weight" and (is_part or "role" in value or "from" in value):
            inner = unless_nan(inner)
        if inner is not None or (key == "content" and "role" in value):
            made[key] = without_nulls(inner)
    return made


def unless_nan(number: Any) -> Any:
    """A table's number; None where NaN stands for none."""
    return None if isinstance(number, float) and math.isnan(number) else number


def too_deep(source: str) -> bool:
    """Whether brackets outside of strings nest deeper than MAX_DEPTH."""
    if source.count("[") + source.count("{") <= MAX_DEPTH:
        return False
    depth, in_string, escaped = 0, False, False
    for character in source:
        if in_string:
            in_string = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif character in "]}":
            depth -= 1
    return False


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= 4000 else (-1) ** digits.startswith("-") * 2**64


# loss_spans


class Span(NamedTuple):
    """One entry."""

    begin: int
    end: int
    weight: float


def ranges_of(
    spans: Any, characters: int, of_document: Any = None
) -> list[tuple[int, int, float]] | None:
    """The runs of the text's characters that lie in spans of one weight, (begin, end, weight) each,
    by which spans are open from each place on where one begins or ends. None where the entries are
    no spans, or two of unequal weight are open at once.

    of_document: the record's own weight, by which the others are multiplied; None: 1.
    """
    factor = in_float32(1 if of_document is None else of_document)
    if not isinstance(spans, list) or factor is None:
        return None
    entries = [_span(span) for span in spans]
    opened: dict[int, Counter[float]] = {}
    for entry in entries:
        if entry is None or in_float32(entry.weight * factor) is None:
            return None
        if entry.begin < min(entry.end, characters):
            opened.setdefault(entry.begin, Counter())[entry.weight] += 1
            opened.setdefault(min(entry.end, characters), Counter())[entry.weight] -= 1
    found: list[tuple[int, int, float]] = []
    first, now = 0, Counter[float]()
    for bound in sorted(opened):
        weight = in_float32(factor * next((own for own, many in now.items() if many), 0.0))
        if weight and found and found[-1][1:] == (first, weight):
            found[-1] = (found[-1][0], bound, weight)
        elif weight:
            found.append((first, bound, weight))
        first = bound
        for own, many in opened[bound].items():
            now[own] += many
        if sum(many > 0 for many in now.values()) > 1:
            return None
    return found


def _span(span: Any) -> Span | None:
    """An entry that is [begin, end] or [begin, end, weight], whose weight is 1 where there are
    none; None for any other."""
    if not isinstance(span, list) or not 2 <= len(span) <= 3:
        return None
    *bounds, weight = span if len(span) == 3 else [*span, 1]
    try:
        begin, end = map(_whole, bounds)
    except _BadRecord:
        return None
    kept = in_float32(weight)
    if kept is None or not 0 <= begin <= end:
        return None
    return Span(begin, end, kept)


def in_float32(weight: Any) -> float | None:
    """The nearest number of 32 bits; None for what is no finite number of at least 0."""
    if type(weight) not in (int, float) or not 0 <= weight < math.inf:
        return None
    try:
        # the native form gives infinity instead of an error
        return struct.unpack("<f", struct.pack("<f", weight))[0]
    except OverflowError:
        return None
