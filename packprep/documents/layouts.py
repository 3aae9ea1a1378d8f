"""Records of the known layouts → a dialogue: messages as a chat template takes them, and what the record says is trained of them.

```
messages            [{role, content, …}, …], tools, chat_template_kwargs, weight                      as OpenAI's API has them
sharegpt            conversations: [{from, value}, …]        human → user, gpt → assistant, …
prompt_completion   two texts, or two lists of messages      the completion alone is trained
alpaca              instruction, input, output               user: instruction␊␊input   assistant: output
```
Readers say which layout a record is (`sources/formats/fields.py`), and give its fields as they stand in the file. `train` and
`weight` of a message are taken off: no template sees them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packprep.sources.formats.batch import Supervision

Problem = tuple[str, str]  # a reason and its detail


@dataclass(frozen=True)
class Dialogue:
    """Messages, and what a template needs beside them.

    messages  one or more objects with a role, and a content that is null, a string, or a list of text parts; other keys only
              where they are not null; none has train or weight
    tools     what the assistant may call, for the template; None: nothing is said of tools
    kwargs    the record's chat_template_kwargs, which go before the recipe's
    train     of each message: whether it is trained; None: what the recipe says of its role and turn
    weights   of each message, finite and ≥ 0; the record's weight multiplies them
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    train: tuple[bool | None, ...] = ()
    weights: tuple[float, ...] = ()


def read_layout(given: Supervision) -> Dialogue | Supervision | Problem:
    """The dialogue of a record with a layout; a text with loss_spans where no template is needed; or why it cannot be used."""
    return _LAYOUTS[given.layout](given.record)


def _of_messages(record: Mapping[str, Any]) -> Dialogue | Problem:
    messages: Any = record.get("messages")
    if problem := _problem_of(messages):
        return "bad_messages", problem
    # A Parquet or Arrow column gives every message every key: null is a key that is not there.
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return Dialogue(kept, None, {}, (None,) * len(kept), (1.0,) * len(kept))


def _problem_of(messages: Any) -> str:
    """What is wrong with messages; "" if nothing is."""
    if not isinstance(messages, list):
        return "a list of messages is wanted"
    for k, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"message {k} is not an object with a role and a content"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"message {k} has no {key} that is a string"
    if not any(message["role"] == "assistant" for message in messages):
        return "no message is the assistant's: nothing would be trained"
    return ""


_LAYOUTS: dict[str, Callable[[Mapping[str, Any]], Dialogue | Supervision | Problem]] = {"messages": _of_messages}
