"""Conversations of all shapes, made by a script: what chat templates and chat data are tried on.

Each string of a conversation holds a word of its own that says whose it is, so that it is found
again in a text:

    zq17azq        the 17th string, an assistant's; s system, u user, t tool's result, d of a tool's description

`python benchmarks/conversations.py --count 500 > chats.jsonl` prints them as JSON lines.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from typing import Any

MARK = re.compile(r"zq\d+([suatd])zq")
WORDS = (
    "the",
    "weather",
    "in",
    "Zürich",
    "is",
    "fine",
    "today",
    "and",
    "Ελλάδα",
    "数据",
    "🙂",
    "👩‍👩‍👧",
    "naïve",
    "שלום",
    "e\u0301",
    "x = 3;",
    "it's",
    "12345",
    "(see",
    "below)",
    "**bold**",
    "C:\\temp",
    '"quoted"',
    "<b>",
    "&amp;",
    "100%",
    "tab\there",
    "don't",
)
ODD = (
    "{{ messages }}",
    "{% generation %}",
    "{# no #}",
    "\ufdd0",
    "\ufeffmark",
    "\u200b",
    "\r\n",
    "```py\nprint(1)\n```",
    "\u2028",
    "</s",
    "<|not_special",
    "assistant",
    "user\n",
    "[INST",
    "function",
    "null",
    "None",
    "<tool_call>",
)
SPECIAL = (
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|eot_id|>",
    "</s>",
    "[/INST]",
    "<end_of_turn>",
    "<|end|>",
    "<SPECIAL_12>",
)
NAMES = ("get_weather", "search", "add_numbers", "send_mail", "lookup_é")


class Strings:
    """Strings of one conversation, each with a word of its own."""

    def __init__(self, chance: random.Random, special: bool):
        self.chance, self.special, self.count = chance, special, 0

    def __call__(self, whose: str, most: int = 30) -> str:
        chance = self.chance
        words = chance.choices(WORDS, k=chance.randint(0, most))
        if chance.random() < 0.12:
            words.append(chance.choice(ODD))
        if self.special and chance.random() < 0.4:
            words.append(chance.choice(SPECIAL))
        chance.shuffle(words)
        words.insert(chance.randint(0, len(words)), f"zq{self.count}{whose}zq")
        self.count += 1
        text = "".join(
            word + chance.choice((" ", " ", " ", " ", "\n", "\n\n", "  ")) for word in words
        )
        edge = chance.random()
        return text.strip() if edge < 0.8 else text if edge < 0.99 else f" \n{text}"


def conversation(chance: random.Random) -> dict[str, Any]:
    """One record: messages, and where it has them tools and chat_template_kwargs."""

    def some(probability: float) -> bool:
        return chance.random() < probability

    text = Strings(chance, some(0.06))
    has_tools, calls_differ = some(0.4), some(0.3)
    thinks = (
        ""
        if some(0.6)
        else chance.choice(("reasoning_content", "reasoning_content", "thinking", "<think>"))
    )
    as_parts, with_nulls = some(0.015), some(0.06)
    names = chance.sample(NAMES, chance.randint(1, 3))
    messages: list[dict[str, Any]] = []

    def say(role: str, content: str | None, **more: Any) -> None:
        given: Any = (
            [{"type": "text", "text": content}] if as_parts and content is not None else content
        )
        nulls = {"name": None, "tool_calls": None, "tool_call_id": None} if with_nulls else {}
        messages.append({"role": role, "content": given, **nulls, **more})

    def answer() -> None:
        content, more = "" if some(0.02) else text("a", 60), {}
        if thinks == "<think>" and some(0.8):
            content = f"<think>\n{text('a')}\n</think>\n\n{content}"
        elif thinks in ("reasoning_content", "thinking") and some(0.7):
            more = {thinks: text("a")}
        say("assistant", content, **more)

    def call() -> None:
        """An assistant's message with calls, and their results."""
        calls = []
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            arguments: Any = {
                key: _value(chance, text)
                for key in chance.sample(("city", "n", "units", "öl"), chance.randint(0, 3))
            }
            if calls_differ:
                arguments = json.dumps(arguments, ensure_ascii=False)
            id = "".join(chance.choices("abcdefghijkmnpqrstuvwxyzABCDEFGH123456789", k=9))
            calls.append(
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": chance.choice(names), "arguments": arguments},
                }
            )
        content = chance.choice((None, None, None, "", text("a")))
        say(
            "assistant",
            content,
            tool_calls=calls,
            **({thinks: text("a")} if thinks in ("reasoning_content", "thinking") else {}),
        )
        if content is None and some(0.2):
            del messages[-1]["content"]
        for done in calls:
            more = {"name": done["function"]["name"]} if some(0.8) else {}
            say("tool", text("t"), tool_call_id=done["id"], **more)

    if some(0.45):
        say("system", "" if some(0.02) else text("s", 50))
    if some(0.02):
        answer()
    turns = chance.choice((1, 1, 1, 2, 2, 3, 4, 5, 7, 9, 12))
    for turn in range(turns):
        for _ in range(2 if some(0.04) else 1):
            say("user", "" if some(0.01) else text("u", 40))
        while has_tools and some(0.4):
            call()
        if turn < turns - 1 or not some(0.06):
            answer()
        if some(0.01):
            answer()
        if some(0.004):
            say("system", text("s"))
    if not any(message["role"] == "assistant" for message in messages):
        answer()
    record: dict[str, Any] = {"messages": messages}
    if has_tools:
        record["tools"] = [_tool(name, text) for name in names]
    if some(0.08):
        record["chat_template_kwargs"] = chance.choice(
            (
                {"enable_thinking": False},
                {"enable_thinking": True},
                {"thinking": True},
                {"reasoning_effort": "high"},
            )
        )
    return record


def _value(chance: random.Random, text: Strings) -> Any:
    kinds = (
        lambda: text("a", 5),
        lambda: chance.randint(-5, 10**6),
        lambda: None,
        lambda: True,
        lambda: 0.5,
    )
    value = chance.choice((kinds[0], *kinds))()
    return chance.choice((value, value, value, [value], {"inner": value}))


def _tool(name: str, text: Strings) -> dict[str, Any]:
    properties = {
        "city": {"type": "string", "description": text("d", 5)},
        "n": {"type": "integer", "description": text("d", 3)},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {
        "type": "function",
        "function": {"name": name, "description": text("d", 8), "parameters": parameters},
    }


def conversations(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`count` records, each a function of seed and its number alone."""
    for i in range(count):
        yield conversation(random.Random(f"{seed} {i}"))


def strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (key, *strings(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for record in conversations(options.count, options.seed):
        print(json.dumps(record, ensure_ascii=False))


if __name__ == "__main__":
    main()
