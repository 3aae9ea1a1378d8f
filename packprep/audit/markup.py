"""Find trained prompts and trained empty reasoning by the markup of a chat template, as token ids.

```
ids      <|im_start|> user ↵  2+2 ?  <|im_end|> ↵  <|im_start|> assistant ↵  4  <|im_end|> ↵
marker   ^^^^^^^^^^^^^^^^^         ^^^^^^^^^^      ^^^^^^^^^^^^^^^^^^^^^^
loss                            ×                                            ×        ×
```

A made-up conversation shows whether the markers of the template are visible in ids. If they
are not, for example because tokens join markup and text, trained prompts are not checked.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from packprep.audit.documents import FoundDocuments
from packprep.audit.rows import PackedRows
from packprep.conversations.chat_template import compile_template
from packprep.conversations.placeholders import find_markup
from packprep.kernel import kernel, read_only
from packprep.tokenizer.engines import candidates, loaded
from packprep.tokenizer.engines.engine import Engine
from packprep.tokenizer.file import added_tokens
from packprep.tokenizer.roles import Vocabulary

Search = Callable[[PackedRows, FoundDocuments, np.ndarray], np.ndarray]
"""A function of (rows, documents, loss by token, bool[n]) → which documents have a finding."""

_OUTSIDE, _ASSISTANT, _PROMPT = 0, 1, 2
"""Roles of the tokens after a mark. `marked_documents` counts those of _PROMPT."""
_NAMES = ("think", "thinking", "THINK", "seed:think")
_SPACES = ("", "\n", "\n\n", "\n\n\n", " ")
_CONVERSATION = (
    ("system", "Answer briefly."),
    ("user", "Name a river."),
    ("assistant", "The Danube."),
    ("user", "And a lake?"),
    ("assistant", "Lake Como."),
)


class _Marks(NamedTuple):
    """Sequences of ids: `ids` joined, int64[k], their `offsets`, int64[m + 1], and `roles`."""

    ids: np.ndarray
    offsets: np.ndarray
    roles: np.ndarray


def engine_of(vocabulary: Vocabulary) -> Engine:
    """Return an engine that encodes the text of a special token as that token."""
    return loaded(candidates("auto", vocabulary, 1e4)[0], vocabulary, "special")


def prompt_search(source: str, vocabulary: Vocabulary) -> Search | str:
    """Return a search for documents with trained prompts, or the reason why there is none.

    Args:
        source: The chat template.
        vocabulary: The vocabulary of the data.
    """
    template = compile_template(source)
    template.begin()
    try:
        markup = find_markup(partial(template.render, go_on=True), source)
    except Exception as error:  # A template is code and may raise any error.
        return f"the chat template fails on a made-up conversation: {error}"
    if markup is None:
        return "the chat template does not show where its messages begin"
    # Without markup before an answer, the end of the user's message starts the answer.
    answer = markup.prompt.strip() or markup.heads.get("assistant", "").strip()
    answer = answer or next((end.strip() for end in markup.ends.get("user", ()) if end.strip()), "")
    texts = {head.strip(): _PROMPT for role, head in markup.heads.items() if role != "assistant"}
    # After the end of a prompt, an answer may go on that was cut, without markup before it.
    ends = [end for role, group in markup.ends.items() if role != "assistant" for end in group]
    texts = dict.fromkeys((end.strip() for end in ends), _OUTSIDE) | texts
    texts = {text: role for text, role in texts.items() if text} | {answer: _ASSISTANT}
    if not answer or _PROMPT not in texts.values():
        return "the chat template writes no markup before its messages"
    engine = engine_of(vocabulary)
    marks = _marks(engine, texts)
    if not _are_visible(source, engine, marks):
        return "the markup of the chat template is not visible in token ids"
    return partial(_search, marks, False)


def _are_visible(source: str, engine: Engine, marks: _Marks) -> bool:
    """Return whether the markers give the roles of a made-up conversation."""
    for ids, roles in _made_up(source, engine):
        codes = [role for role in found_roles(read_only(ids), marks).tolist() if role != _OUTSIDE]
        expected = [_ASSISTANT if role == "assistant" else _PROMPT for role in roles]
        # Some templates write the system message into the user's, or always write one.
        return codes in (expected, expected[1:], [_PROMPT, *expected])
    return False


def _made_up(source: str, engine: Engine) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Yield the ids, int64[n], and the roles of made-up conversations that a template accepts."""
    template = compile_template(source)
    for messages in (_CONVERSATION, _CONVERSATION[1:]):
        made_up = [{"role": role, "content": content} for role, content in messages]
        try:
            ids, _ = engine.encode([template.render(made_up)])
        except Exception:  # For example, the template refuses a system message.
            continue
        yield ids.astype(np.int64), [role for role, _ in messages]


class ChatSpecials(NamedTuple):
    """Where a chat template writes special tokens.

    Attributes:
        inner_eos: Whether eos stands inside conversations.
        several_bos: Whether conversations have more than one bos.
        end: The id of the token that ends conversations: eos, or without eos the last added token.
        after_end: Number of tokens after the end.
    """

    inner_eos: bool
    several_bos: bool
    end: int
    after_end: int


_MOST_AFTER_END = 3
"""Maximum number of tokens after the end of a conversation. They are line feeds."""


def chat_specials(source: str, vocabulary: Vocabulary, eos: int, bos: int) -> ChatSpecials | None:
    """Return where a chat template writes special tokens, by a made-up conversation of two turns.

    None if the template fails.
    """
    added = [id for _, id in added_tokens(vocabulary.tokenizer_json)]
    for ids, _ in _made_up(source, engine_of(vocabulary)):
        of_eos = np.flatnonzero(ids == eos)
        # A template may end texts with another added token than eos.
        ends = of_eos if len(of_eos) else np.flatnonzero(np.isin(ids, added))
        after = len(ids) - 1 - int(ends[-1]) if len(ends) else len(ids)
        end, after = (int(ids[-1 - after]), after) if after <= _MOST_AFTER_END else (eos, 0)
        return ChatSpecials(len(of_eos) > 1, int((ids == bos).sum()) > 1, end, after)
    return None


def reasoning_search(vocabulary: Vocabulary) -> Search | str:
    """Return a search for documents with trained empty reasoning, or why there is none."""
    engine = engine_of(vocabulary)
    texts = {f"<{name}>{space}</{name}>": _PROMPT for name in _NAMES for space in _SPACES}
    return partial(_search, _marks(engine, texts), True)


def _marks(engine: Engine, texts: dict[str, int]) -> _Marks:
    """Return the ids of texts, the longest first. A text may end with joined line feeds."""
    ids, offsets = engine.encode([end for text in texts for end in (text, f"{text}\n\n")])
    role_of_ids: dict[tuple[int, ...], int] = {}
    for i, (text, role) in enumerate(texts.items()):
        alone = ids[offsets[2 * i] : offsets[2 * i + 1]].tolist()
        ended = ids[offsets[2 * i + 1] : offsets[2 * i + 2]].tolist()
        role_of_ids[tuple(alone)] = role
        # A tokenizer may join ">" with line feeds, so a mark has a second form.
        if text.startswith("<") and ended[: len(alone)] != alone:
            role_of_ids[tuple(ended[: len(alone)])] = role
    sequences = sorted((mark_ids for mark_ids in role_of_ids if mark_ids), key=len, reverse=True)
    lengths = [len(mark_ids) for mark_ids in sequences]
    return _Marks(
        np.array([id for mark_ids in sequences for id in mark_ids], np.int64),
        np.append(0, np.cumsum(lengths)).astype(np.int64),
        np.array([role_of_ids[mark_ids] for mark_ids in sequences], np.int64),
    )


def _search(
    marks: _Marks, inside: bool, rows: PackedRows, documents: FoundDocuments, trained: np.ndarray
) -> np.ndarray:
    return marked_documents(
        read_only(rows.ids), read_only(trained), documents.begin, documents.end, marks, inside
    )


@kernel
def mark_at(ids, i, end, marks):
    """Return the number of the first mark that starts at token i, or −1."""
    # Longer marks come first, so the longest mark at a token is found.
    for m in range(marks.roles.shape[0]):
        offset, length = marks.offsets[m], marks.offsets[m + 1] - marks.offsets[m]
        if i + length <= end:
            k = 0
            while k < length and ids[i + k] == marks.ids[offset + k]:
                k += 1
            if k == length:
                return m
    return -1


@kernel
def found_roles(ids, marks):
    """Return the roles of all marks in some ids, in order, int64[k]."""
    roles = np.empty(ids.shape[0], np.int64)
    count, i = 0, 0
    while i < ids.shape[0]:
        m = mark_at(ids, i, ids.shape[0], marks)
        if m >= 0:
            roles[count] = marks.roles[m]
            count += 1
            i += marks.offsets[m + 1] - marks.offsets[m]
        else:
            i += 1
    return roles[:count]


@kernel
def marked_documents(ids, trained, begin, end, marks, inside):
    """Return which documents have loss on marked tokens, bool[d].

    Args:
        ids: integer[n], the tokens.
        trained: bool[n], which tokens are predicted with loss.
        begin: int64[d], first token of each document.
        end: int64[d], the token after each document.
        marks: The marks.
        inside: If True, the tokens of a mark count. Otherwise the tokens between a mark with the
            role _PROMPT and the next mark count.
    """
    out = np.zeros(begin.shape[0], np.bool_)
    for d in range(begin.shape[0]):
        role = _OUTSIDE
        i = begin[d]
        while i < end[d] and not out[d]:
            m = mark_at(ids, i, end[d], marks)
            # Between marks, a trained token of a prompt is a finding.
            if m < 0:
                out[d] = role == _PROMPT and trained[i] and not inside
                i += 1
            else:
                # A mark decides the role of the tokens up to the next mark.
                stop = i + marks.offsets[m + 1] - marks.offsets[m]
                role = marks.roles[m]
                while i < stop:
                    out[d] = out[d] or (inside and trained[i])
                    i += 1
    return out
