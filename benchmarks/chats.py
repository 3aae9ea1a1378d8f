"""Whether real chat templates give in packprep the ids and masks that they give in Transformers.

python benchmarks/chats.py FOLDER                        each FOLDER/*.jinja, 500 conversations of all shapes
python benchmarks/chats.py FOLDER/qwen3.jinja --count 2000 --seed 7 --show 5

For each template a dataset is built whose tokenizer has the template's special tokens, and each
conversation (conversations.py) that lies in it is compared with
`PreTrainedTokenizerFast.apply_chat_template`:

ids      equal those of Transformers; of conversations with a special token's text under special_text = "special", for they
         are rejects under "text"
mask     of templates with {% generation %} blocks: equals return_assistant_tokens_mask=True
turns    of templates without: the trained characters are those that a regular expression of the template's family finds, of
         conversations where it can
marks    the words that say whose a string is: all of assistants are trained, none of anybody else
refused  the template itself fails or says no, in Transformers, or it knows texts alone and was given lists of parts, or the other
         way round, and leaves them out or writes them as data. Where it fails because a message has
         no content, packprep may take what it makes of null or an empty string there. Or the text
         lacks a word of the record, and packprep rejects it because the template does not write it
rejects  what packprep rejects and the template does not, by reason

Exit status 1 if anything differs, or if more than 1 % are rejected that the template takes.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
from chat_datasets import BOS, DATE, EOS, PAD, chunks_built
from conversations import MARK, conversations, strings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from packprep.errors import PackprepError

MOST_REJECTED = 0.01
NOT_WRITTEN = "the template does not write"  # of packprep's rejects
TOKEN = re.compile(
    r"<[|｜][^|｜<>\s{}'\"]+[|｜]>|<SPECIAL_\d+>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As Llama 3 and Qwen split: several newlines are one token, which may reach over a turn's
begin."""

TURNS = {
    "<|start_header_id|>": (
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
        r".*?<\|eo[tm]_id\|>",
    ),
    "<|im_start|>": (r"<\|im_start\|>assistant\n", r".*?<\|im_end\|>\n?"),
    "<start_of_turn>": (r"<start_of_turn>model\n", r".*?<end_of_turn>\n"),
    "[/INST]": (
        r"(?:\[/INST\]|\[/TOOL_RESULTS\])(?!\[TOOL_RESULTS\]|\[INST\]|\[AVAILABLE_TOOLS\]|\Z)",
        r".*?</s> ?",
    ),
    "<|channel|>": (
        r"<\|start\|>assistant",
        r"(?:<\|channel\|>analysis<\|message\|>(?:(?!<\|end\|>).)*<\|end\|><\|start\|>assistant)?"
        r"(?: to=|<\|channel\|>final).*?(?:<\|end\|>|<\|return\|>|<\|call\|>)",
    ),
    "<｜Assistant｜></think>": (
        r"<｜Assistant｜>|<｜tool▁output▁end｜>(?!<｜tool▁output▁begin｜>|<｜User｜>|\Z)",
        r".*?<｜end▁of▁sentence｜>",
    ),
    "<｜Assistant｜><think>": (
        r"<｜Assistant｜>|<｜tool▁outputs▁end｜>(?!\Z)|(?<!<｜tool▁call▁end｜>)(?=\n<｜tool▁call▁begin｜>)",
        r".*?<｜end▁of▁sentence｜>",
    ),
    "<SPECIAL_11>": (
        r"<SPECIAL_11>Assistant\n",
        r".*?<SPECIAL_12>\n(?:<SPECIAL_11>Assistant\n<TOOLCALL>(?:(?!<SPECIAL_12>).)*<SPECIAL_12>\n\n\Z|\n\Z)?",
    ),
    "<|end|>": (r"<\|assistant\|>\n?", r".*?<\|end\|>\n(?:</s>\Z)?"),
}
"""What stands in a template of a family → expressions of what opens a turn and of what is trained.
Checked by hand."""


@dataclass
class Found:
    """What is counted of one template, and some sentences about what differs."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def differs(self, what: str, number: int, detail: str) -> None:
        self.counts[f"{what} differ"] += 1
        self.differences.append(f"{what} of conversation {number}: {detail}")

    def differing(self) -> dict[str, int]:
        """Return how often each kind of comparison differs."""
        return {
            name.removesuffix(" differ"): n
            for name, n in self.counts.items()
            if name.endswith(" differ")
        }

    def fails(self, conversations: int) -> bool:
        """Return whether anything differs, or too many of the conversations are rejected."""
        return bool(self.differing()) or self.counts["rejects"] > MOST_REJECTED * conversations


@dataclass
class Document:
    """A document of a dataset. ids: [n]; trained: bool[n]."""

    ids: np.ndarray
    trained: np.ndarray


def special_tokens(source: str) -> list[str]:
    """What a template writes that is one token."""
    return sorted({BOS, EOS, PAD, *TOKEN.findall(source)})


def tokenizer_of(source: str, texts: Iterable[str]) -> Any:
    """Transformers' tokenizer, small, whose special tokens are those that the template writes."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in special_tokens(source)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=source,
    )


def built(
    folder: Path, tokenizer: Any, records: Sequence[dict[str, Any]], special_text: str
) -> tuple[dict[int, Document], dict[int, str]]:
    """Record → its document in a dataset, and record → why it was rejected."""
    chunks, rejects = chunks_built(folder, tokenizer, records, special_text=special_text)
    found = {}
    for record, (only, *others) in chunks.items():
        assert not others and only.start == 0, "a conversation is longer than a row"
        found[record] = Document(only.ids, only.trained)
    return found, rejects


class _Date(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_Date":
        return cls.fromisoformat(DATE)


@dataclass
class Judged:
    """A conversation as Transformers has it.

    begins: int64[n]: the character at which each token begins. mask: bool[n]: Transformers' own;
    None where the template has no blocks. blocks: their characters, if so. refusal: why the template does not take it, if it does
    not. lacks_words: whether the text lacks a marked word of the record.
    """

    refusal: str = ""
    text: str = ""
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    begins: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    mask: np.ndarray | None = None
    blocks: list[tuple[int, int]] = field(default_factory=list)
    lacks_words: bool = False


def judge(tokenizer: Any, record: dict[str, Any]) -> Judged:
    """Return what `apply_chat_template` makes of a record.

    Arguments of calls that are JSON texts are given as objects to a template that fails on the texts
    or writes them in quotes, as packprep does.
    """
    judged = judge_as_given(tokenizer, record)
    parsed = with_objects(record)
    if parsed != record and (judged.refusal or quotes_arguments(record, judged.text)):
        return judge_as_given(tokenizer, parsed)
    return judged


def with_objects(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the arguments of calls as objects."""

    def parsed(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        is_text = isinstance(arguments, str)
        arguments = json.loads(arguments) if is_text else arguments
        return {**call, "function": {**call["function"], "arguments": arguments}}

    messages = [
        {**message, "tool_calls": [parsed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in record["messages"]
    ]
    return {**record, "messages": messages}


def quotes_arguments(record: dict[str, Any], text: str) -> bool:
    """Return whether a template wrote arguments that are JSON texts as JSON strings."""
    calls = [call for message in record["messages"] for call in message.get("tool_calls") or ()]
    given = [call["function"]["arguments"] for call in calls]
    return any(
        json.dumps(arguments, ensure_ascii=escaped) in text
        for arguments in given
        if isinstance(arguments, str)
        for escaped in (False, True)
    )


def judge_as_given(tokenizer: Any, record: dict[str, Any]) -> Judged:
    """Return what `apply_chat_template` makes of a record as it is."""
    given = {"tools": record.get("tools"), **record.get("chat_template_kwargs", {})}
    with mock.patch.object(chat_template_utils, "datetime", _Date):
        try:
            encoded = tokenizer.apply_chat_template(
                record["messages"],
                return_dict=True,
                return_assistant_tokens_mask=has_blocks(tokenizer),
                **given,
            )
        except Exception as error:
            return Judged(refusal=f"{type(error).__name__}: {error}"[:100])
        plain = [
            {key: value for key, value in m.items() if value is not None}
            for m in record["messages"]
        ]
        judged = rendered(tokenizer, plain, given)
        if leaves_out(tokenizer, plain, given, judged.text):
            return Judged(refusal="contents are left out, or written as data")
    assert judged.ids.tolist() == encoded["input_ids"]
    assert judged.mask is None or judged.mask[1:].tolist() == encoded["assistant_masks"][1:]
    judged.lacks_words = any(word not in judged.text for word in marked_words(record))
    return judged


def marked_words(value: Any) -> list[str]:
    """The words in a JSON value that say whose a string is."""
    return [mark[0] for text in strings(value) for mark in MARK.finditer(text)]


def leaves_out(
    tokenizer: Any, messages: list[dict[str, Any]], given: dict[str, Any], text: str
) -> bool:
    """Whether a template writes no content at all, as those do for texts that know lists of parts
    alone; or nothing of a list, of whose text it writes something; or a list as Python or, but of a
    tool's, JSON have it."""
    marks = [marked_words(message.get("content")) for message in messages]
    if any(marks) and not any(mark in text for own in marks for mark in own):
        return True
    for k, message in enumerate(messages):
        parts = message.get("content")
        if not isinstance(parts, list) or not marks[k]:
            continue
        as_data = [repr(part) for part in parts]
        if message["role"] != "tool":
            as_data += [
                json.dumps(part, ensure_ascii=escaped)
                for part in parts
                for escaped in (False, True)
            ]
        if any(written in text for written in as_data):
            return True
        if not any(mark in text for mark in marks[k]):
            as_text = {**message, "content": "".join(part["text"] for part in parts)}
            if (
                rendered(tokenizer, [*messages[:k], as_text, *messages[k + 1 :]], given).text
                != text
            ):
                return True
    return False


def has_blocks(tokenizer: Any) -> bool:
    """Whether the template says by {% generation %} what an assistant generates."""
    return bool(re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template))


def rendered(tokenizer: Any, messages: list[dict[str, Any]], given: dict[str, Any]) -> Judged:
    """What a template makes of messages as they are, nulls as well."""
    texts, blocks = chat_template_utils.render_jinja_template(
        [messages],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=has_blocks(tokenizer),
        **{**tokenizer.special_tokens_map, **given},
    )
    encoded = tokenizer(texts[0], add_special_tokens=False, return_offsets_mapping=True)
    begins = np.array([begin for begin, _ in encoded["offset_mapping"]], np.int64)
    judged = Judged("", texts[0], np.array(encoded["input_ids"], np.int64), begins)
    if has_blocks(tokenizer):
        judged.mask, judged.blocks = np.zeros(len(begins), np.bool_), blocks[0]
        for begin, end in blocks[0]:
            first, last = encoded.char_to_token(begin), encoded.char_to_token(end - 1)
            judged.mask[first : last + 1] = True
        judged.mask[:1] = False  # no slot predicts a document's first token
    return judged


def without_content(tokenizer: Any, record: dict[str, Any], judged: Judged) -> Judged:
    """What a template that does not take messages without a content makes of them where it is null,
    or an empty string, if it does not leave their calls out."""
    given = {"tools": record.get("tools"), **record.get("chat_template_kwargs", {})}
    for content in (None, ""):
        messages = [
            {key: value for key, value in m.items() if value is not None}
            for m in record["messages"]
        ]
        if all("content" in message for message in messages):
            return judged
        messages = [{"content": content, **message} for message in messages]
        with (
            mock.patch.object(chat_template_utils, "datetime", _Date),
            contextlib.suppress(Exception),
        ):
            found = rendered(tokenizer, messages, given)
            if all(
                call["function"]["name"] in found.text
                for m in messages
                for call in m.get("tool_calls", ())
            ):
                return found
    return judged


def prompt_of(tokenizer: Any, record: dict[str, Any]) -> str:
    """What the template adds to ask for an answer; "" where that cannot be told."""
    given = {
        "tools": record.get("tools"),
        **record.get("chat_template_kwargs", {}),
        "tokenize": False,
    }
    asking = [{"role": "user", "content": "2+2?"}]
    with mock.patch.object(chat_template_utils, "datetime", _Date), contextlib.suppress(Exception):
        unasked, asked = (
            tokenizer.apply_chat_template(asking, add_generation_prompt=prompt, **given)
            for prompt in (False, True)
        )
        return asked.removeprefix(os.path.commonprefix([unasked, asked]))
    return ""


def turns_of(tokenizer: Any, text: str, record: dict[str, Any]) -> list[tuple[int, int]] | None:
    """The characters of the turns by the table; None where no family is the template's, or where it
    does not find as many turns as assistants' messages, as where a template opens one of two in a
    row without a header.

    Of what opens a turn as far as it stands in the prompt nothing is trained, as `<think>` in some
    templates.
    """
    found = next((turns for mark, turns in TURNS.items() if mark in tokenizer.chat_template), None)
    if found is None:
        return None
    opening, body = found
    prompt = prompt_of(tokenizer, record)
    ranges = []
    for match in re.finditer(f"(?:{opening})({body})", text, re.DOTALL):
        begin, end = match.span(1)
        asked = os.path.commonprefix([text[match.start() : end], prompt])
        ranges.append((max(begin, match.start() + len(re.sub(r"<[^>]*\Z", "", asked))), end))
    return (
        ranges if len(ranges) == sum(m["role"] == "assistant" for m in record["messages"]) else None
    )


def inside(ranges: Iterable[tuple[int, int]], begins: np.ndarray) -> np.ndarray:
    """bool[n]: the tokens that begin inside any of the ranges; never the first."""
    trained = np.zeros(len(begins), np.bool_)
    for begin, end in ranges:
        trained |= (begins >= begin) & (begins < end)
    trained[:1] = False
    return trained


def first_difference(expected: Judged, wanted: np.ndarray, given: np.ndarray) -> str:
    """A sentence about the first token of two masks that differs."""
    i = int(np.argmax(wanted != given))
    at = int(expected.begins[i])
    before, behind = expected.text[max(0, at - 60) : at], expected.text[at : at + 40]
    return f"token {i} should {'' if wanted[i] else 'not '}be trained: {before!r} ▸ {behind!r}"


def compare(
    found: Found,
    number: int,
    record: dict[str, Any],
    expected: Judged,
    given: Document,
    tokenizer: Any,
    is_plain: bool,
) -> None:
    """Count what is equal of one conversation, and note what is not. is_plain: it quotes no special
    token."""
    if not np.array_equal(expected.ids, given.ids):
        n = min(len(expected.ids), len(given.ids))
        i = int(np.argmax(np.append(expected.ids[:n] != given.ids[:n], True)))
        at = int(expected.begins[min(i, len(expected.begins) - 1)])
        return found.differs(
            "ids",
            number,
            f"from token {i}: Transformers has {expected.text[max(0, at - 40) : at + 60]!r}",
        )
    found.counts["ids"] += 1
    if expected.mask is not None:
        if not np.array_equal(expected.mask, given.trained):
            return found.differs(
                "mask", number, first_difference(expected, expected.mask, given.trained)
            )
        found.counts["mask"] += 1
        return None
    turns = turns_of(tokenizer, expected.text, record) if is_plain else None
    if turns is not None:
        wanted = inside(turns, expected.begins)
        if np.array_equal(wanted, given.trained):
            found.counts["turns"] += 1
        else:
            found.differs("turns", number, first_difference(expected, wanted, given.trained))
    for match in MARK.finditer(expected.text):
        tokens = slice(*np.searchsorted(expected.begins, match.span()))
        wanted = np.full_like(given.trained[tokens], match[1] == "a")
        if not np.array_equal(wanted, given.trained[tokens]):
            return found.differs(
                "marks", number, f"{match[0]} should {'' if match[1] == 'a' else 'not '}be trained"
            )
    found.counts["marks"] += 1
    return None


def judge_template(source: str, records: Sequence[dict[str, Any]]) -> Found:
    """All comparisons of one template."""
    found = Found()
    tokenizer = tokenizer_of(source, [*map("\n".join, map(strings, records)), source])
    special = re.compile("|".join(map(re.escape, special_tokens(source))))
    judged = [judge(tokenizer, record) for record in records]
    quoting = {i for i, record in enumerate(records) if any(map(special.search, strings(record)))}
    for special_text in ("text", "special"):
        with tempfile.TemporaryDirectory() as folder:
            documents, rejects = built(Path(folder) / "chats", tokenizer, records, special_text)
        for i, (record, expected) in enumerate(zip(records, judged, strict=True)):
            if special_text == "text" and i in quoting:
                quotes = [text for text in strings(record) if special.search(text)]
                if i in documents and any(word in expected.text for word in marked_words(quotes)):
                    found.differs("special text", i, "packprep takes it")
                continue
            if special_text == "special" and i not in quoting:
                continue
            found.counts["conversations"] += 1
            says_so = expected.lacks_words and NOT_WRITTEN in rejects.get(i, "")
            if says_so or (expected.refusal and i not in documents):
                found.counts["refused"] += 1
            elif (
                expected.refusal
                and (expected := without_content(tokenizer, record, expected)).refusal
            ):
                found.differs(
                    "refusals", i, f"Transformers says {expected.refusal}; packprep takes it"
                )
            elif i in rejects:
                found.counts["rejects"] += 1
                found.reasons[re.sub(r"\d+", "N", rejects[i])[:150]] += 1
                found.differences.append(f"reject of conversation {i}: {rejects[i]}")
            elif i in documents:
                compare(found, i, record, expected, documents[i], tokenizer, i not in quoting)
            else:
                found.counts["untrained"] += 1
                if expected.mask is None or expected.mask.any():
                    found.differs(
                        "untrained documents", i, "nothing of it is trained, so that it is dropped"
                    )
    return found


COLUMNS = ("conversations", "refused", "rejects", "ids", "mask", "turns", "marks", "untrained")


def template_files(paths: Sequence[Path]) -> list[Path]:
    """Return the templates that a command names: files, and the *.jinja of folders."""
    return [
        file
        for path in paths
        for file in (sorted(path.glob("*.jinja")) if path.is_dir() else [path])
    ]


def template_parser(description: str | None, count: int) -> argparse.ArgumentParser:
    """Return a parser of the options that all judges of templates have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("templates", nargs="+", type=Path, metavar="FOLDER or FILE.jinja")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="differences shown of each template")
    return parser


def print_head(width: int, columns: Sequence[str]) -> None:
    """Print the names of the columns, after a first column of `width` characters."""
    print(
        f"{'':{width}}", *(f"{name:>{max(6, len(name))}}" for name in columns), "differ", sep="  "
    )


def print_found(name: str, columns: Sequence[str], found: Found, show: int) -> None:
    """Print a template's line, the reasons of rejects, and its first differences."""
    cells = (f"{found.counts[column] or '·':>{max(6, len(column))}}" for column in columns)
    differing = (f"{n} {what}" for what, n in found.differing().items())
    print(name, *cells, ", ".join(differing) or "nothing", sep="  ", flush=True)
    for reason, n in found.reasons.most_common(6):
        print(f"    {n} × {reason}")
    for sentence in found.differences[:show]:
        print(f"    {sentence}")


def main(arguments: list[str] | None = None) -> int:
    options = template_parser(__doc__, count=500).parse_args(arguments)
    files = template_files(options.templates)
    records = list(conversations(options.count, options.seed))
    width = max(len(file.stem) for file in files)
    print_head(width, COLUMNS)
    failed = False
    for file in files:
        began = time.monotonic()
        try:
            found = judge_template(file.read_text("utf-8"), records)
        except PackprepError as error:
            print(f"{file.stem:{width}}  no dataset: {error}", flush=True)
            failed = True
            continue
        failed |= found.fails(len(records))
        print_found(f"{file.stem:{width}}", COLUMNS, found, options.show)
        if options.show:
            print(f"    {time.monotonic() - began:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
