"""Whether `trained_turns = "each"` trains every turn after the text that Transformers writes
before it.

python benchmarks/histories.py FOLDER                     each FOLDER/*.jinja, 200 conversations
python benchmarks/histories.py FOLDER/qwen3.jinja --count 500 --seed 7 --show 5

The conversations and the tokenizers are those of `chats.py`. Transformers renders the messages up
to each assistant's message. A rendering that continues the one before it takes its place, and the
renderings that remain are the expected texts. Columns:

texts    expected texts of conversations that both take. Their ids equal those of a dataset with
         long rows, text by text
masks    texts whose trained tokens are known: {% generation %} blocks or a regular expression of
         the template's family show them. They are the turns that no earlier text trains
turns    assistants' messages. Each of their marked words is trained in one text, if the rendering
         that ends with the message has it; no other word is trained
cut      texts that rows of --seq-length cut. Chunks have the ids of the text, in order, and repeat
         only its start. Each token that the long rows train is trained once, and no other token
at user  cuts before a message of a user. Of other chunks, none has a user's message begin inside it
apart    tokens that stay untrained because their question is in an earlier chunk
first    tokens that stay untrained because they are first in a chunk, where nothing predicts them

Exit status 1 if anything differs, or if more than 1 % are rejected that the template takes.
"""

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chats
import numpy as np
from chat_datasets import Chunk, chunks_built
from conversations import MARK, conversations, strings

from packprep.errors import PackprepError

SEQ_LENGTH = 384  # of the rows that cut texts
SHORTEST = 3  # A chunk that is cut has at least as many tokens.
USER_HEADER = re.compile(
    r"(?:<\|im_start\|>user\n|<start_of_turn>user\n|<\|turn>user\n|<\|user\|>\n?|<｜User｜>|"
    r"<\|start_header_id\|>user<\|end_header_id\|>\n\n|<\|start\|>user<\|message\|>|"
    r"<\|START_OF_TURN_TOKEN\|><\|USER_TOKEN\|>)\Z"
)


@dataclass
class Text:
    """A text that packprep should write.

    judged: the text of Transformers. count: its messages. turns: the messages that it trains.
    trained: bool[n]; None where it is not known.
    """

    judged: chats.Judged
    count: int
    turns: list[int]
    trained: np.ndarray | None = None


def first_messages(record: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a record of the first `count` messages, with the same tools and variables."""
    return {**record, "messages": record["messages"][:count]}


def speakers_of(record: dict[str, Any]) -> list[int]:
    """Return the numbers of the assistant's messages."""
    return [k for k, message in enumerate(record["messages"]) if message["role"] == "assistant"]


def renderings_of(tokenizer: Any, record: dict[str, Any]) -> dict[int, chats.Judged]:
    """Return what Transformers writes up to each assistant's message, by the message's number."""
    return {k: chats.judge(tokenizer, first_messages(record, k + 1)) for k in speakers_of(record)}


def texts_of(
    tokenizer: Any, record: dict[str, Any], renderings: dict[int, chats.Judged], is_plain: bool
) -> list[Text]:
    """Return the texts that packprep should write. is_plain: no string quotes a special token."""
    texts: list[Text] = []
    for k, judged in renderings.items():
        turns = [k]
        if texts and judged.text.startswith(texts[-1].judged.text.rstrip()):
            turns = [*texts.pop().turns, k]
        texts.append(Text(judged, k + 1, turns))
    for text in texts:
        speakers = speakers_of(first_messages(record, text.count))
        judged = text.judged
        if judged.mask is not None and len(judged.blocks) == len(speakers):
            text.trained = np.zeros(len(judged.ids), np.bool_)
            for k, block in zip(speakers, judged.blocks, strict=True):
                # As in Transformers, a token that a block begins or ends in belongs to it.
                begin, end = (
                    np.searchsorted(judged.begins, at, "right") for at in (block[0], block[1] - 1)
                )
                text.trained[begin - 1 : end] |= k in text.turns
            text.trained[:1] = False
        elif judged.mask is None and is_plain:
            made = first_messages(record, text.count)
            ranges = chats.turns_of(tokenizer, judged.text, made)
            if ranges is not None:
                own = [span for k, span in zip(speakers, ranges, strict=True) if k in text.turns]
                text.trained = chats.inside(own, judged.begins)
    return texts


def trained_words(judged: chats.Judged, trained: np.ndarray) -> Iterator[tuple[str, bool | None]]:
    """Yield each marked word of a text, and whether it is trained; None: a part of it is."""
    for match in MARK.finditer(judged.text):
        of_word = trained[slice(*np.searchsorted(judged.begins, match.span()))]
        yield match[0], bool(of_word.any()) if of_word.all() == of_word.any() else None


def compare_texts(
    found: chats.Found,
    number: int,
    record: dict[str, Any],
    texts: Sequence[Text],
    renderings: dict[int, chats.Judged],
    chunks: Sequence[Chunk],
) -> bool:
    """Compare the uncut texts of a conversation, and return whether they have equal ids."""
    if [len(chunk.ids) for chunk in chunks] != [len(text.judged.ids) for text in texts]:
        found.differs(
            "texts",
            number,
            f"of {[len(chunk.ids) for chunk in chunks]} tokens; Transformers has"
            f" {[len(text.judged.ids) for text in texts]}",
        )
        return False
    begin = 0
    times: Counter[str] = Counter()
    for text, chunk in zip(texts, chunks, strict=True):
        found.counts["texts"] += 1
        if chunk.start != begin or chunk.repeated or not np.array_equal(text.judged.ids, chunk.ids):
            found.differs("ids", number, f"of the text of {text.count} messages")
            return False
        begin += len(chunk.ids)
        if text.trained is not None:
            if np.array_equal(text.trained, chunk.trained):
                found.counts["masks"] += 1
            else:
                sentence = chats.first_difference(text.judged, text.trained, chunk.trained)
                found.differs("masks", number, sentence)
        for word, is_trained in trained_words(text.judged, chunk.trained):
            times[word] += is_trained is True
            if is_trained is None:
                found.differs("turns", number, f"a part of {word} is trained")
    expected: Counter[str] = Counter()
    for k, judged in renderings.items():
        written = set(mark[0] for mark in MARK.finditer(judged.text))
        expected.update(written.intersection(chats.marked_words(record["messages"][k])))
        found.counts["turns"] += 1
    if +times != expected:
        wrong = {word: (times[word], expected[word]) for word in times | expected}
        wrong = {word: both for word, both in wrong.items() if both[0] != both[1]}
        found.differs("turns", number, f"word: (times trained, expected): {wrong}")
    return True


def texts_before_users(
    tokenizer: Any, record: dict[str, Any], renderings: dict[int, chats.Judged]
) -> dict[int, list[str]]:
    """Return what may be written before each message of a user, by the message's number.

    It is the rendering of the messages before, or, where later messages change this rendering, what
    two renderings that end with another message of the user share, up to the header that a regular
    expression finds at the end. A first message, or one after a system message, is left out: no
    chunk ends there.
    """
    messages = record["messages"]
    first = 1 if messages[0]["role"] == "system" else 0
    found: dict[int, list[str]] = {}
    for k in range(first + 1, len(messages)):
        if messages[k]["role"] != "user":
            continue
        before = renderings.get(k - 1) or chats.judge(tokenizer, first_messages(record, k))
        others = [[*messages[:k], {"role": "user", "content": letter}] for letter in "xy"]
        asked = [chats.judge(tokenizer, {**record, "messages": other}) for other in others]
        shared = os.path.commonprefix([one.text for one in asked])
        header = USER_HEADER.search(shared)
        found[k] = [before.text] * bool(before.text) + [shared[: header.start()]] * bool(header)
    return found


def user_begins(before_users: dict[int, list[str]], text: Text) -> np.ndarray:
    """Return the first tokens of a text's messages of users, as far as renderings show them."""
    begins = []
    for k, candidates in before_users.items():
        sizes = [len(before) for before in candidates if text.judged.text.startswith(before)]
        if sizes and k < text.count:
            begins.append(int(np.searchsorted(text.judged.begins, sizes[0])))
    return np.array(begins, np.int64)


def compare_cut(
    found: chats.Found,
    number: int,
    texts: Sequence[Text],
    users: Sequence[np.ndarray],
    whole: Sequence[Chunk],
    chunks: Sequence[Chunk],
    seq_length: int,
) -> None:
    """Compare the chunks of short rows with the uncut texts of a conversation.

    users: the first tokens of users' messages of each text.
    """
    bounds = np.cumsum([0, *(len(chunk.ids) for chunk in whole)])
    of_text: list[list[Chunk]] = [[] for _ in whole]
    for chunk in chunks:
        of_text[int(np.searchsorted(bounds, chunk.start, "right")) - 1].append(chunk)
    for t, (one, own) in enumerate(zip(whole, of_text, strict=True)):
        if len(own) == 1 and len(own[0].ids) == len(one.ids):
            if not np.array_equal(own[0].trained, one.trained):
                found.differs("chunks", number, f"text {t} fits a row, and is trained otherwise")
            continue
        found.counts["cut"] += 1
        fault = _fault_of_cut(found, texts[t], users[t], one, own, int(bounds[t]), seq_length)
        if fault:
            found.differs("chunks", number, f"text {t}: {fault}")


def _fault_of_cut(
    found: chats.Found,
    text: Text,
    users: np.ndarray,
    whole: Chunk,
    chunks: Sequence[Chunk],
    text_begin: int,
    seq_length: int,
) -> str:
    """Return what is wrong with the chunks of one text, or nothing."""
    size, judged = len(whole.ids), text.judged
    starts = np.full(size, -1, np.int64)  # of the chunk that has the token; −1: no chunk has it
    times = np.zeros(size, np.int64)
    unpredicted = np.zeros(size, np.bool_)
    for chunk in chunks:
        begin, copied = chunk.start - text_begin, chunk.repeated
        end = begin + len(chunk.ids) - copied
        if len(chunk.ids) > seq_length or end > size or (starts[begin:end] >= 0).any():
            return f"a chunk has tokens {begin} to {end} of {size}, which another chunk has"
        if not np.array_equal(chunk.ids[copied:], whole.ids[begin:end]):
            return f"tokens {begin} to {end} have other ids"
        if copied and (begin == 0 or not np.array_equal(chunk.ids[:copied], whole.ids[:copied])):
            return f"the chunk of token {begin} repeats other tokens than the start of its text"
        repeated = judged.text[: judged.begins[copied]] if copied else ""
        if any(mark[1] not in "sd" for mark in MARK.finditer(repeated)):
            return f"the chunk of token {begin} repeats more than the system message and tools"
        if chunk.trained[:copied].any():
            return f"the chunk of token {begin} trains what it repeats"
        starts[begin:end] = begin
        times[begin:end] += chunk.trained[copied:]
        unpredicted[begin] = copied == 0
        if end < size:
            if end in users:
                found.counts["at user"] += 1
            elif len(passed := users[(users >= begin + SHORTEST) & (users < end)]):
                return f"a chunk ends at token {end}, after a user's message at {passed[-1]}"
    if (times > whole.trained).any():
        return f"token {np.argmax(times > whole.trained)} is trained too often"
    missing = np.flatnonzero(whole.trained & (times == 0))
    edges = np.flatnonzero(np.diff(whole.trained.astype(np.int8), prepend=0) == 1)
    asked = [
        int(np.searchsorted(judged.begins, mark.end()))
        for mark in MARK.finditer(judged.text)
        if mark[1] in "ut"
    ]
    most_copied = max(chunk.repeated for chunk in chunks) if chunks else 0
    for i in missing.tolist():
        if unpredicted[i]:
            found.counts["first"] += 1
            continue
        begin, end = _untrained_range(starts, i)
        turn = edges[np.searchsorted(edges, i, "right") - 1]
        # Tokens that no chunk has may have been several chunks, if they exceed one.
        is_one = starts[i] >= 0 or end - begin <= seq_length - most_copied
        if turn < begin or (is_one and any(begin < at <= i for at in asked)):
            return f"token {i} is not trained: {judged.text[judged.begins[i] :][:40]!r}"
        found.counts["apart"] += 1
    return ""


def _untrained_range(starts: np.ndarray, i: int) -> tuple[int, int]:
    """Return the first and the last token of the chunk of token i, or of what no chunk has."""
    edges = np.flatnonzero(np.diff(starts, prepend=-2, append=-2) != 0)
    k = int(np.searchsorted(edges, i, "right"))
    return int(edges[k - 1]), int(edges[k])


def judge_template(source: str, records: Sequence[dict[str, Any]], seq_length: int) -> chats.Found:
    """Make all comparisons of one template."""
    found = chats.Found()
    texts = [*map("\n".join, map(strings, records)), source]
    tokenizer = chats.tokenizer_of(source, texts)
    special = re.compile("|".join(map(re.escape, chats.special_tokens(source))))
    quoting = [any(map(special.search, strings(record))) for record in records]
    for special_text in ("text", "special"):
        chosen = [
            record
            for record, quotes in zip(records, quoting, strict=True)
            if quotes == (special_text == "special")
        ]
        _judge_records(found, tokenizer, chosen, special_text, seq_length)
    return found


def _judge_records(
    found: chats.Found,
    tokenizer: Any,
    records: Sequence[dict[str, Any]],
    special_text: str,
    seq_length: int,
) -> None:
    """Build datasets of long and of short rows, and compare each conversation."""
    settings = {"special_text": special_text, "trained_turns": "each"}
    with tempfile.TemporaryDirectory() as folder:
        whole, rejects = chunks_built(Path(folder) / "whole", tokenizer, records, **settings)
        cut, _ = chunks_built(Path(folder) / "cut", tokenizer, records, seq_length, **settings)
    for i, record in enumerate(records):
        found.counts["conversations"] += 1
        renderings = renderings_of(tokenizer, record)
        refusals = [judged.refusal for judged in renderings.values() if judged.refusal]
        lacks_words = any(judged.lacks_words for judged in renderings.values())
        if i not in whole and (
            refusals or (lacks_words and chats.NOT_WRITTEN in rejects.get(i, ""))
        ):
            found.counts["refused"] += 1
            continue
        if i in rejects:
            found.counts["rejects"] += 1
            found.reasons[re.sub(r"\d+", "N", rejects[i])[:150]] += 1
            found.differences.append(f"reject of conversation {i}: {rejects[i]}")
            continue
        renderings = {
            k: chats.without_content(tokenizer, first_messages(record, k + 1), judged)
            if judged.refusal
            else judged
            for k, judged in renderings.items()
        }
        if any(judged.refusal for judged in renderings.values()):
            found.differs("refusals", i, f"Transformers says {refusals[0]}; packprep takes it")
            continue
        expected = texts_of(tokenizer, record, renderings, special_text == "text")
        if i not in whole:
            found.differs("untrained", i, "no text of it is in the dataset")
            continue
        if compare_texts(found, i, record, expected, renderings, whole[i]):
            before_users = (
                texts_before_users(tokenizer, record, renderings)
                if any(len(chunk.ids) > seq_length for chunk in whole[i])
                else {}
            )
            users = [user_begins(before_users, text) for text in expected]
            compare_cut(found, i, expected, users, whole[i], cut.get(i, ()), seq_length)


COLUMNS = (
    *("conversations", "refused", "rejects", "texts", "masks", "turns", "cut", "at user"),
    *("apart", "first"),
)


def main(arguments: list[str] | None = None) -> int:
    parser = chats.template_parser(__doc__, count=200)
    parser.add_argument("--seq-length", type=int, default=SEQ_LENGTH, help="of the short rows")
    options = parser.parse_args(arguments)
    files = chats.template_files(options.templates)
    records = list(conversations(options.count, options.seed))
    width = max(len(file.stem) for file in files)
    chats.print_head(width, COLUMNS)
    failed = False
    for file in files:
        try:
            found = judge_template(file.read_text("utf-8"), records, options.seq_length)
        except PackprepError as error:
            print(f"{file.stem:{width}}  no dataset: {error}", flush=True)
            failed = True
            continue
        failed |= found.fails(len(records))
        chats.print_found(f"{file.stem:{width}}", COLUMNS, found, options.show)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
