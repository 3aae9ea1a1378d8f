"""Trained characters → trained tokens.

```
text      Q:·2+2?␊A:·4          span of characters [11, 12)
tokens    Q  :  ·2 + 2 ? ␊ A  :  ·4
begins    0  1  2  4 5 6 7 8  9  10     "·4" begins before the span: it is not trained
```
The whole text is tokenized at once, so that a model sees the tokens that it will see; a token is trained iff it begins
inside a span.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from packprep.corpus.conversations import Marked
from packprep.corpus.engines.engine import Engine
from packprep.corpus.tokenization import Tokens, tokenize
from packprep.corpus.vocabulary import Vocabulary


class Training(NamedTuple):
    """Which tokens of D documents are trained. Token numbers are relative to their document."""

    supervised: np.ndarray  # uint8[D]: 1 where the document says what is trained of it; all of the others is
    span_offsets: np.ndarray  # int64[D + 1]
    spans: np.ndarray  # int64[k, 2]: half-open ranges of trained tokens, ascending, apart from one another
    cut_offsets: np.ndarray  # int64[D + 1]
    cuts: np.ndarray  # int64[c]: ascending: the first tokens of messages after the first
    system: np.ndarray  # int64[D]: leading tokens, of the system message, that a document's later pieces repeat
    eos_trained: np.ndarray  # uint8[D]: whether the end of the text is trained


class Trained(NamedTuple):
    """One supervised document's part of `Training`."""

    spans: np.ndarray  # int64[k, 2]
    cuts: np.ndarray  # int64[c]
    system: int
    eos_trained: bool


def trained_tokens(marked: Marked, begins: np.ndarray) -> Trained:
    """What is trained of a document whose tokens begin at the characters `begins: int64[n]`, ascending."""
    spans = np.array(marked.spans, np.int64).reshape(-1, 2)
    before = np.searchsorted(spans[:, 0], begins, side="right") - 1  # the last span that begins at or before the token
    ends = np.append(spans[:, 1], 0)  # of no span, −1: 0
    trained = begins < ends[before]
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False))
    cuts = np.unique(np.searchsorted(begins, np.array(marked.boundaries, np.int64)))
    return Trained(
        edges.reshape(-1, 2).astype(np.int64),
        cuts[(cuts > 0) & (cuts < len(begins))].astype(np.int64),
        int(np.searchsorted(begins, marked.system_end)) if marked.system_end else 0,
        bool(len(spans)) and int(spans[-1, 1]) == len(marked.text),
    )


def tokenize_marked(
    engine: Engine, texts: Sequence[str], marks: Sequence[Marked | None], special_text: str, vocabulary: Vocabulary
) -> tuple[Tokens, dict[int, Trained]]:
    """The ids of each text, as `tokenize` gives them, and document → what is trained of it, of those that have a mark.

    A rejected document is not among them.
    """
    plain: list[int] = []
    spans: list[int] = []
    chats: list[int] = []
    for i, mark in enumerate(marks):
        (plain if mark is None else chats if mark.chat else spans).append(i)
    if not spans and not chats:
        return tokenize(engine, texts, special_text, vocabulary), {}
    strings = [mark.strings for mark in marks if mark and mark.chat]
    groups = [
        (group, tokenize(engine, [texts[i] for i in group], special_text, vocabulary, begins, chat))
        for group, begins, chat in ((plain, False, None), (spans, True, None), (chats, True, strings))
    ]
    lengths = np.zeros(len(texts), np.int64)
    for group, tokens in groups:
        lengths[group] = np.diff(tokens.offsets)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = np.empty(int(offsets[-1]), np.int32)
    rejected: list[tuple[int, str, str]] = []
    trained: dict[int, Trained] = {}
    for group, tokens in groups:
        shift = np.repeat(offsets[group] - tokens.offsets[:-1], np.diff(tokens.offsets))
        ids[shift + np.arange(len(tokens.ids))] = tokens.ids
        turned_away = {k for k, _, _ in tokens.rejected}
        rejected += [(group[k], reason, detail) for k, reason, detail in tokens.rejected]
        for k, i in enumerate(group):
            mark = marks[i]
            if mark is not None and tokens.begins is not None and k not in turned_away:
                trained[i] = trained_tokens(mark, tokens.begins[tokens.offsets[k] : tokens.offsets[k + 1]])
    return Tokens(ids, offsets, sorted(rejected)), trained


def training_columns(trained: Mapping[int, Trained], documents: int) -> Training | None:
    """The columns of `documents` documents; None when none of them is supervised."""
    if not trained:
        return None
    order = sorted(trained)
    rows = [trained[i] for i in order]
    supervised, eos_trained = np.zeros(documents, np.uint8), np.zeros(documents, np.uint8)
    system, n_spans, n_cuts = (np.zeros(documents, np.int64) for _ in range(3))
    supervised[order] = 1
    eos_trained[order] = [row.eos_trained for row in rows]
    system[order] = [row.system for row in rows]
    n_spans[order] = [len(row.spans) for row in rows]
    n_cuts[order] = [len(row.cuts) for row in rows]
    zero = np.zeros(1, np.int64)
    return Training(
        supervised,
        np.concatenate((zero, np.cumsum(n_spans))),
        np.concatenate([row.spans for row in rows]),
        np.concatenate((zero, np.cumsum(n_cuts))),
        np.concatenate([row.cuts for row in rows]),
        system,
        eos_trained,
    )
