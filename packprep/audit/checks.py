"""Check the rows of a packed dataset, batch by batch, and count the findings of each kind.

```
PackedData ─ batches ─► whole_documents ─► find_documents ─► document_figures ─► counts and places
                                                 └────────► loss_figures, position_figures
```

A check that the data do not allow is listed with its reason, so no kind is ever left out silently.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from packprep.audit import documents as found
from packprep.audit.copies import HashTable
from packprep.audit.documents import (
    FoundDocuments,
    LossColumns,
    SpecialIds,
    find_documents,
)
from packprep.audit.kinds import KINDS
from packprep.audit.markup import Search
from packprep.audit.rows import IGNORED, NEXT, SAME, PackedData, PackedRows
from packprep.kernel import read_only
from packprep.messages import counted

MOST_PLACES = 5
"""Number of places that a report lists for each kind."""
MOST_UNFINISHED = 8 << 20
"""Maximum number of tokens without eos in a stream that are kept as one document. A longer one is
divided, so that memory is bounded."""
LEAST_COMPARED = 16
"""Documents with fewer tokens are not compared, because short texts repeat in sound data."""
_BINS = 40


OF_DOCUMENTS = (
    "duplicate_documents",
    "empty_documents",
    "no_eos",
    "inner_eos",
    "two_bos",
    "crossing_labels",
    "untrained_documents",
    "unreset_positions",
    "missing_documents",
    "cut_documents",
)
"""Kinds that need the boundaries of documents."""


class Place(NamedTuple):
    """Where a finding is.

    Attributes:
        row: Number of the row in the dataset, or of the document if the format has no rows.
        position: Index of the token in the row.
        detail: What is there, or "".
    """

    row: int
    position: int
    detail: str = ""


@dataclass
class Findings:
    """The count and the first places of a kind."""

    count: int = 0
    places: list[Place] = field(default_factory=list)

    def add(self, count: int, places: Callable[[int], Iterator[Place]]) -> None:
        """Add a count. `places` yields at least the given number of places, if there are any."""
        self.count += count
        places_left = MOST_PLACES - len(self.places)
        if count and places_left > 0:
            for place, _ in zip(places(places_left), range(places_left), strict=False):
                self.places.append(place)


class Lengths:
    """Statistics of numbers: minimum, maximum, mean, and a histogram by powers of two."""

    def __init__(self) -> None:
        self.count = self.sum = self.most = 0
        self.least: int | None = None
        self.bins = np.zeros(_BINS, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Add numbers, int64[n], at least 0."""
        if not len(values):
            return
        self.count, self.sum = self.count + len(values), self.sum + int(values.sum())
        least = int(values.min())
        self.least = least if self.least is None else min(self.least, least)
        self.most = max(self.most, int(values.max()))
        bits = np.frexp(values.astype(np.float64))[1]
        self.bins += np.bincount(bits, minlength=_BINS)[:_BINS]

    def described(self) -> dict[str, Any] | None:
        """Return the statistics, with [smallest value of a bin, count] pairs; None if empty."""
        if not self.count:
            return None
        filled = np.flatnonzero(self.bins).tolist()
        return {
            "min": self.least,
            "mean": self.sum / self.count,
            "max": self.most,
            "histogram": [[1 << b >> 1, int(self.bins[b])] for b in filled],
        }


def whole_documents(
    data: PackedData, special: SpecialIds, by_eos: bool
) -> Iterator[tuple[PackedRows, int]]:
    """Yield batches in which no document continues in the next batch.

    Yields:
        (rows, number of divided documents in the batch), which is 0 or 1.
    """
    batches = read_ahead(data.batches())
    # Only a stream that is divided by eos may have a document in two batches.
    if data.has_rows or not by_eos:
        for rows in batches:
            yield rows, 0
        return
    tail: np.ndarray | None = None
    eos_is_first: bool | None = None
    for rows in batches:
        # If eos comes before each document, a batch is cut before its last eos, otherwise after it.
        if eos_is_first is None and len(rows.ids):
            eos_is_first = int(rows.ids[0]) == special.eos
        # A new file starts a new document.
        if tail is not None and not rows.continued:
            yield _stream(tail), 0
            tail = None
        ids = rows.ids if tail is None or not len(tail) else np.concatenate((tail, rows.ids))
        cut = max(last_after(ids, special.eos) - bool(eos_is_first), 0)
        # With a wrong eos, the whole stream would become one document.
        if not cut and len(ids) >= MOST_UNFINISHED:
            yield _stream(ids), 1
            tail = ids[:0]
        else:
            if cut:
                yield _stream(ids[:cut]), 0
            tail = ids[cut:]
    if tail is not None:
        yield _stream(tail), 0


def read_ahead(batches: Iterator[PackedRows]) -> Iterator[PackedRows]:
    """Yield the batches, while a thread reads the next one."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, batches, None)
        while (rows := following.result()) is not None:
            following = thread.submit(next, batches, None)
            yield rows


def _stream(ids: np.ndarray) -> PackedRows:
    return PackedRows(ids, np.array([0, len(ids)], np.int64))


def last_after(ids: np.ndarray, eos: int) -> int:
    """Return the index after the last eos, or 0."""
    for end in range(len(ids), 0, -(1 << 16)):
        places = np.flatnonzero(ids[max(end - (1 << 16), 0) : end] == eos)
        if len(places):
            return max(end - (1 << 16), 0) + int(places[-1]) + 1
    return 0


class Audit:
    """The checks of a dataset.

    Attributes:
        tokens: Number of tokens so far, including padding.
        rows: Number of rows so far.
        documents: Number of documents so far.
        unchecked: Kind → the reason why it is not checked.
        labels_at: SAME or NEXT, once it is known.
        labels_seem: The alignment that the first labels show, once it is known.
        ids: The smallest and the largest id so far, or None without tokens.
        eos_tokens: Number of eos so far, in documents.
        end: The id of a token that may end documents instead of eos, because the chat template
            writes it at the end, or eos.
        after_end: Number of tokens that may follow this token.
    """

    def __init__(
        self,
        data: PackedData,
        special: SpecialIds,
        searches: Mapping[str, Search],
        heads: HashTable | None = None,
        eos_ends_documents: bool = True,
    ):
        """Start the checks.

        Args:
            data: The dataset.
            special: The ids of special tokens.
            searches: Kind → a function of (rows, documents, loss by token) that returns which
                documents have a finding, bool[d]. `markup.py` makes them.
            heads: Collects the hashes of the first tokens of documents, for a comparison with a
                source.
            eos_ends_documents: Whether eos ends documents, if the data store no boundaries. False
                if it also ends the turns of a chat.
        """
        self.data, self.special, self._searches, self.heads = data, special, searches, heads
        has_starts = "document_starts" in data.columns or "segments" in data.columns
        self.by_eos = not has_starts and special.eos >= 0 and eos_ends_documents
        self.is_stream = self.by_eos and not data.has_rows
        self.has_documents = has_starts or self.by_eos
        self.tokens = self.rows = self.documents = 0
        self.divided = self.uncompared = self.cut_at_end = self.padded_tokens = 0
        self.loss_tokens = 0
        self.labels_at = data.labels_at
        self.labels_seem: str | None = None
        self.ids: tuple[int, int] | None = None
        self.eos_tokens = 0
        self.end, self.after_end = special.eos, 0
        self.tallies = {kind: Findings() for kind in KINDS}
        self.of_documents, self.of_rows = HashTable(), HashTable()
        self.document_lengths, self.row_lengths, self.per_row = Lengths(), Lengths(), Lengths()
        self._ends_without_eos: dict[int, Findings] = {}
        self._eos_is_first: bool | None = None
        self.unchecked = self._impossible()

    def _impossible(self) -> dict[str, str]:
        """Return kind → the reason why the data do not allow its check."""
        columns, special = self.data.columns, self.special
        reasons: dict[str, str] = {}

        def without(condition: bool, reason: str, *kinds: str) -> None:
            # The first reason of a kind is the most general one, so it stays.
            if condition:
                reasons.update(dict.fromkeys(kinds, reason) | reasons)

        without(
            not self.has_documents and special.eos < 0,
            "the data store no document boundaries, and eos is unknown. Give --eos-id or"
            " --tokenizer",
            *OF_DOCUMENTS,
        )
        without(
            not self.has_documents,
            "the data store no document boundaries, and the chat template writes eos after each"
            " turn. If eos ends documents, give --eos-id",
            *OF_DOCUMENTS,
        )
        without(
            not self.data.has_rows, "the format has no rows", "duplicate_rows", "untrained_rows"
        )
        without(
            special.eos < 0,
            "eos is unknown. Give --eos-id or --tokenizer",
            "no_eos", "inner_eos", "empty_documents",
        )  # fmt: skip
        without(self.by_eos, "documents are found by their eos", "no_eos", "inner_eos")
        without(
            self.by_eos,
            "the data store no document boundaries, so a row is trained as one text",
            "crossing_labels", "unreset_positions",
        )  # fmt: skip
        without(special.bos < 0, "bos is unknown, or the tokenizer has none", "two_bos")
        without(special.unk < 0, "unk is unknown, or the tokenizer has none", "unknown_tokens")
        without(
            special.vocab_size < 0,
            "the vocabulary is unknown. Give --vocab-size or --tokenizer",
            "beyond_vocabulary",
        )
        has_mask = "attended" in columns or "segments" in columns
        is_unknown = not has_mask and special.pad < 0
        reason = "no mask is stored, and pad is unknown. Give --pad-id or --tokenizer"
        without(is_unknown, reason, "padding", "trained_padding")
        without(
            not self.data.has_rows and not has_mask and special.own_pad < 0,
            "pad is also another special token, so the stream does not show it",
            "padding",
        )
        without(
            "labels" not in columns,
            "no labels are stored, so the trainer makes them",
            "wrong_labels",
        )
        without(
            "labels" not in columns and "trained" not in columns,
            "no labels and no loss mask are stored, so the trainer trains every token",
            "crossing_labels", "trained_padding", "untrained_documents", "untrained_rows",
            "trained_prompts", "empty_reasoning",
        )  # fmt: skip
        without(
            "positions" not in columns,
            "no positions are stored",
            "unreset_positions", "broken_positions",
        )  # fmt: skip
        positions_column = columns.get("positions")
        without(
            positions_column is not None
            and columns.get("document_starts", "").startswith(positions_column),
            "documents are found by their positions. inner_eos counts missing restarts",
            "unreset_positions",
        )
        return reasons | dict(self.data.impossible)

    def add_all(self) -> None:
        """Check all rows of the dataset."""
        for rows, divided in whole_documents(self.data, self.special, self.by_eos):
            self.divided += divided
            self.add(rows)

    def add(self, rows: PackedRows) -> None:
        """Check a batch of rows."""
        if not len(rows.row_offsets) or not len(rows.ids):
            self.rows += max(len(rows.row_offsets) - 1, 0)
            return
        rows = rows._replace(ids=_as_known_dtype(rows.ids))
        # The figures of documents are computed once, and each check reads them.
        documents = self._documents(rows)
        figures, hashes, heads = self._figures(rows, documents)
        batch = _Batch(
            rows,
            documents,
            figures,
            self.rows if self.data.has_rows else self.documents,
            self.data.has_rows,
        )
        least_id, greatest_id = self.ids or (int(rows.ids[0]), int(rows.ids[0]))
        self.ids = min(least_id, int(rows.ids.min())), max(greatest_id, int(rows.ids.max()))
        # A dataset without any eos probably has another eos.
        ends = figures[:, found.INNER_EOS] + figures[:, found.ENDS_IN_EOS]
        self.eos_tokens += int(ends.sum()) + bool(self._eos_is_first)
        self._check_tokens(batch)
        if self.has_documents:
            self._check_documents(batch, heads)
        self._check_copies(batch, hashes)
        loss = self._loss(rows)
        if loss is not None:
            self._check_loss(batch, loss)
        if rows.positions is not None:
            self._check_positions(batch, rows.positions)
        # A search looks at texts, so it needs the loss by predicted token.
        by_token = None if loss is None else self._by_token(rows, loss)
        for kind, search in self._searches.items():
            if kind not in self.unchecked and by_token is not None:
                self._add_documents(kind, batch, search(rows, documents, by_token))
        # The totals grow last, because the checks take them as the numbers of earlier rows and
        # documents.
        self.row_lengths.add(np.diff(rows.row_offsets))
        self.per_row.add(np.bincount(documents.row, minlength=len(rows.row_offsets) - 1))
        self.document_lengths.add(figures[:, found.TOKENS])
        self.tokens += len(rows.ids)
        self.rows += len(rows.row_offsets) - 1
        self.documents += len(documents)

    def _documents(self, rows: PackedRows) -> FoundDocuments:
        if self._eos_is_first is None:
            # llm.c writes eos before each document. Eos is then the first token of the data.
            self._eos_is_first = self.is_stream and int(rows.ids[0]) == self.special.eos
        if not self._eos_is_first:
            return find_documents(rows, self.special, self.by_eos, self.is_stream)
        starts = np.flatnonzero(rows.ids == self.special.eos)
        starts = starts if len(starts) and not starts[0] else np.append(0, starts)
        # Padding before eos belongs to a document, wherever a batch ends.
        special = self.special._replace(pad=-1)
        return find_documents(rows._replace(document_starts=starts), special, False)

    def _figures(
        self, rows: PackedRows, documents: FoundDocuments
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        special, count = self.special, len(documents)
        bos = special.eos if self._eos_is_first else special.bos
        figures = np.empty((count, len(found.FIGURES)), np.int64)
        hashes, heads = np.empty((count, 2), np.uint64), np.empty(count, np.uint64)
        ids = np.array([special.eos, bos, special.unk, special.own_pad], np.int64)
        found.document_figures(
            read_only(rows.ids), documents.begin, documents.end, ids, figures, hashes, heads
        )
        return figures, hashes, heads

    def _check_tokens(self, batch: "_Batch") -> None:
        rows, figures = batch.rows, batch.figures
        if "padding" not in self.unchecked:
            self._add_padding(batch)
        if "beyond_vocabulary" not in self.unchecked:
            size = self.special.vocab_size
            if int(rows.ids.max()) >= size or int(rows.ids.min()) < 0:
                tokens = np.flatnonzero((rows.ids >= size) | (rows.ids < 0))
                self._add_tokens("beyond_vocabulary", batch, tokens)
        if "unknown_tokens" not in self.unchecked and figures[:, found.UNKNOWN].any():
            tokens = np.flatnonzero(rows.ids == self.special.unk)
            self._add_tokens("unknown_tokens", batch, tokens[batch.are_inside(tokens)])

    def _add_padding(self, batch: "_Batch") -> None:
        rows, figures = batch.rows, batch.figures
        if self.is_stream:
            pad_counts, numbers = figures[:, found.PADDING], batch.row_numbers()
        else:
            content = figures[:, found.TOKENS] - figures[:, found.PADDING]
            lengths = np.diff(rows.row_offsets)
            pad_counts = lengths - np.bincount(batch.documents.row, content, minlength=len(lengths))
            numbers = batch.first_row + np.arange(len(lengths))
        total = len(rows.ids) - int((figures[:, found.TOKENS] - figures[:, found.PADDING]).sum())
        self.tallies["padding"].add(
            total,
            lambda most_places: (
                Place(int(numbers[i]), 0, counted(int(pad_counts[i]), "token"))
                for i in np.flatnonzero(pad_counts)[:most_places].tolist()
            ),
        )

    def _check_documents(self, batch: "_Batch", heads: np.ndarray) -> None:
        figures, documents = batch.figures, batch.documents
        tokens = figures[:, found.TOKENS]
        content_end = documents.row_end[documents.row]
        at_row_start = documents.begin == documents.row_begin[documents.row]
        if "empty_documents" not in self.unchecked:
            # A document is empty if it has at most one bos and one eos.
            specials = np.minimum(figures[:, found.BOS], 1) + figures[:, found.ENDS_IN_EOS]
            is_empty = tokens <= specials
            if self.data.has_rows:
                is_empty &= ~at_row_start  # It may be the eos of a document that was cut.
            is_empty &= ~self._cut_by_rows(documents)
            self._add_documents("empty_documents", batch, is_empty)
        if "no_eos" not in self.unchecked:
            # A chat template may end texts with another token than eos, and then write line feeds.
            lacks = figures[:, found.ENDS_IN_EOS] == 0
            if (self.end, self.after_end) != (self.special.eos, 0):
                last_indices = documents.end - 1 - self.after_end
                is_inside = last_indices >= documents.begin
                ids = batch.rows.ids[np.where(is_inside, last_indices, 0)]
                lacks &= ~(is_inside & (ids == self.end))
            # A full row may cut its last document. The length of a full row is known only at the
            # end.
            at_end = lacks & (documents.end == content_end) & self.data.has_rows
            self._add_documents("no_eos", batch, lacks & ~at_end)
            length = content_end - batch.rows.row_offsets[documents.row]
            for n in np.unique(length[at_end]).tolist():
                tally = self._ends_without_eos.setdefault(n, Findings())
                chosen = np.flatnonzero(at_end & (length == n))
                tally.add(len(chosen), partial(batch.places, chosen))
        if "inner_eos" not in self.unchecked:
            self._add_documents("inner_eos", batch, figures[:, found.INNER_EOS] > 0)
        if "two_bos" not in self.unchecked:
            self._add_documents("two_bos", batch, figures[:, found.BOS] > 1)
        if self.heads is not None:
            chosen = np.flatnonzero(heads)
            # A head has 64 bits, so the second half of its key is 0.
            keys = np.column_stack((heads[chosen], np.zeros_like(heads[chosen])))
            self.heads.add(keys, batch.row_numbers()[chosen], batch.positions()[chosen])

    def _cut_by_rows(self, documents: FoundDocuments) -> np.ndarray:
        """Return which documents may be parts, because rows cut a stream of documents, bool[d]."""
        if not (self.by_eos and self.data.has_rows):
            return np.zeros(len(documents), np.bool_)
        at_start = documents.begin == documents.row_begin[documents.row]
        return at_start | (documents.end == documents.row_end[documents.row])

    def _check_copies(self, batch: "_Batch", hashes: np.ndarray) -> None:
        figures, documents = batch.figures, batch.documents
        if "duplicate_documents" not in self.unchecked:
            is_long = figures[:, found.TOKENS] >= LEAST_COMPARED
            # A comparison with a source also needs the short documents.
            chosen = slice(None) if self.heads is not None else np.flatnonzero(is_long)
            self.uncompared += int(len(is_long) - is_long.sum())
            self.of_documents.add(
                hashes[chosen], batch.row_numbers()[chosen], batch.positions()[chosen]
            )
        if "duplicate_rows" not in self.unchecked:
            count = len(batch.rows.row_offsets) - 1
            of_rows = found.row_hashes(documents.row, hashes, figures, count)
            lengths = np.diff(batch.rows.row_offsets)
            chosen = np.flatnonzero(lengths >= LEAST_COMPARED)
            self.of_rows.add(of_rows[chosen], self.rows + chosen, np.zeros_like(chosen))

    def _loss(self, rows: PackedRows) -> np.ndarray | None:
        """Return which positions have loss, bool[n], or None if the data do not say."""
        loss = rows.trained
        if rows.labels is not None:
            is_label = rows.labels != IGNORED
            loss = is_label if loss is None else is_label & loss
        if loss is None:
            return None
        if self.labels_seem is None and rows.labels is not None and loss.any():
            # The labels equal their own tokens or the next ones, and the first batch with loss
            # shows which.
            same = int((loss & (rows.labels == rows.ids)).sum())
            following = int((loss[:-1] & (rows.labels[:-1] == rows.ids[1:])).sum())
            self.labels_seem = NEXT if following > same else SAME
            self.labels_at = self.labels_at or self.labels_seem
        return np.ascontiguousarray(loss, np.bool_)

    def _by_token(self, rows: PackedRows, loss: np.ndarray) -> np.ndarray:
        """Return which tokens are predicted with loss, bool[n]."""
        if self.labels_at != NEXT:
            return loss
        # No position predicts the first token of a row.
        predicted = np.zeros_like(loss)
        predicted[1:] = loss[:-1]
        predicted[rows.row_offsets[:-1][np.diff(rows.row_offsets) > 0]] = False
        return predicted

    def _check_loss(self, batch: "_Batch", loss: np.ndarray) -> None:
        rows, documents = batch.rows, batch.documents
        # A kernel cannot take None, so absent labels are an empty array.
        labels = np.empty(0, np.int64) if rows.labels is None else rows.labels
        is_next = self.labels_at == NEXT
        columns = LossColumns(
            read_only(labels.astype(np.int64, copy=False)),
            read_only(loss),
            is_next,
            self.special.eos,
            self.special.own_pad,
        )
        of_loss = found.loss_figures(read_only(rows.ids), columns, documents)
        trained = of_loss[:, found.TRAINED]
        self.loss_tokens += int(trained.sum())
        if "wrong_labels" not in self.unchecked:
            self._add_wrong_labels(batch, labels, loss, of_loss[:, found.WRONG])
        if "crossing_labels" not in self.unchecked:
            self._add_documents("crossing_labels", batch, of_loss[:, found.CROSSING] > 0)
        if "trained_padding" not in self.unchecked:
            # Loss on padding is outside of documents, or in a last position whose label is pad.
            outside = found.loss_outside(
                read_only(loss), rows.row_offsets, documents.begin, documents.end
            )
            outside += np.bincount(
                documents.row, of_loss[:, found.TO_PADDING], minlength=len(outside)
            ).astype(np.int64)
            chosen = np.flatnonzero(outside)
            self.tallies["trained_padding"].add(
                int(outside.sum()),
                lambda most_places: (
                    Place(batch.first_row + r, 0, f"{counted(int(outside[r]), 'token')} of the row")
                    for r in chosen[:most_places].tolist()
                ),
            )
        if "untrained_documents" not in self.unchecked:
            # Nothing inside of a document predicts its only token.
            is_whole = ~self._cut_by_rows(documents) & (batch.figures[:, found.TOKENS] > 1)
            self._add_documents("untrained_documents", batch, (trained == 0) & is_whole)
        if "untrained_rows" not in self.unchecked:
            by_row = np.bincount(documents.row, trained, minlength=len(rows.row_offsets) - 1)
            chosen_rows = np.flatnonzero(by_row == 0)
            self.tallies["untrained_rows"].add(
                len(chosen_rows),
                lambda most_places: (
                    Place(batch.first_row + r, 0) for r in chosen_rows[:most_places].tolist()
                ),
            )

    def _add_wrong_labels(
        self, batch: "_Batch", labels: np.ndarray, loss: np.ndarray, is_wrong: np.ndarray
    ) -> None:
        ids, documents = batch.rows.ids, batch.documents
        shift = int(self.labels_at == NEXT)

        def places(most_places: int) -> Iterator[Place]:
            for d in np.flatnonzero(is_wrong)[:most_places].tolist():
                a, b = int(documents.begin[d]), int(documents.end[d]) - shift
                expected = ids[a + shift : b + shift].astype(np.int64)
                i = a + int(np.flatnonzero(loss[a:b] & (labels[a:b] != expected))[0])
                detail = f"label {int(labels[i])} for token {int(ids[i + shift])}"
                yield Place(batch.row_number(d), batch.position(i, d), detail)

        self.tallies["wrong_labels"].add(int(is_wrong.sum()), places)

    def _check_positions(self, batch: "_Batch", positions: np.ndarray) -> None:
        documents = batch.documents
        of_positions = found.position_figures(
            read_only(positions.astype(np.int64, copy=False)), documents.begin, documents.end
        )
        if "unreset_positions" not in self.unchecked:
            self._add_documents("unreset_positions", batch, of_positions[:, 0] > 0)
        if "broken_positions" not in self.unchecked:
            broken = of_positions[:, 1]
            self.tallies["broken_positions"].add(
                int(broken.sum()), partial(batch.places, np.flatnonzero(broken))
            )

    def _add_documents(self, kind: str, batch: "_Batch", has_finding: np.ndarray) -> None:
        chosen = np.flatnonzero(has_finding)
        self.tallies[kind].add(len(chosen), partial(batch.places, chosen))

    def _add_tokens(self, kind: str, batch: "_Batch", tokens: np.ndarray) -> None:
        rows = batch.rows

        def places(most_places: int) -> Iterator[Place]:
            for i in tokens[:most_places].tolist():
                yield batch.place_of_token(i, f"id {int(rows.ids[i])}")

        self.tallies[kind].add(len(tokens), places)

    def finish(self) -> None:
        """Complete the counts that need the whole dataset."""
        # Only a row of the full length can have cut its last document.
        full = self.data.row_length or self.row_lengths.most
        for length, tally in sorted(self._ends_without_eos.items()):
            if length >= full:
                self.cut_at_end += tally.count
            else:
                self.tallies["no_eos"].add(tally.count, partial(_first, tally.places))
        for kind, table in (
            ("duplicate_documents", self.of_documents),
            ("duplicate_rows", self.of_rows),
        ):
            if kind in self.unchecked:
                continue
            copies = table.copies(MOST_PLACES)
            noun = "row" if kind == "duplicate_rows" else "document at row"
            if not self.data.has_rows:
                noun = "document"
            places = [Place(*copy, f"as {noun} {original[0]:,}") for copy, original in copies.pairs]
            self.tallies[kind].add(copies.number, partial(_first, places))


def _first(places: list[Place], most_places: int) -> Iterator[Place]:
    return iter(places[:most_places])


class _Batch(NamedTuple):
    """A batch of rows with its documents and their figures."""

    rows: PackedRows
    documents: FoundDocuments
    figures: np.ndarray
    first_row: int  # number of the batch's first row, or first document if there are no rows
    has_rows: bool

    def row_number(self, d: int) -> int:
        return self.first_row + (int(self.documents.row[d]) if self.has_rows else d)

    def row_numbers(self) -> np.ndarray:
        """Return the row of each document in the dataset, int64[d]."""
        rows_in_batch = self.documents.row if self.has_rows else np.arange(len(self.documents))
        return self.first_row + rows_in_batch

    def position(self, token: int, d: int) -> int:
        """Return the position of a token of document d in its row."""
        row_begin = self.rows.row_offsets[self.documents.row[d]] if self.has_rows else 0
        return token - int(row_begin if self.has_rows else self.documents.begin[d])

    def positions(self) -> np.ndarray:
        """Return the first position of each document in its row, int64[d]."""
        if not self.has_rows:
            return np.zeros(len(self.documents), np.int64)
        return self.documents.begin - self.rows.row_offsets[self.documents.row]

    def places(self, chosen: np.ndarray, most_places: int) -> Iterator[Place]:
        """Yield the places of the first documents among `chosen`, int64[k]."""
        for d in chosen[:most_places].tolist():
            begin = int(self.documents.begin[d])
            count = counted(int(self.figures[d, found.TOKENS]), "token")
            yield Place(self.row_number(d), self.position(begin, d), count)

    def are_inside(self, tokens: np.ndarray) -> np.ndarray:
        """Return which tokens, int64[k], are inside of documents, bool[k]."""
        d = np.searchsorted(self.documents.begin, tokens, "right") - 1
        return (d >= 0) & (tokens < self.documents.end[d])

    def place_of_token(self, token: int, detail: str) -> Place:
        """Return the place of a token, which may be padding."""
        if self.has_rows:
            r = int(np.searchsorted(self.rows.row_offsets, token, "right")) - 1
            return Place(self.first_row + r, token - int(self.rows.row_offsets[r]), detail)
        d = max(int(np.searchsorted(self.documents.begin, token, "right")) - 1, 0)
        return Place(self.row_number(d), self.position(token, d), detail)


def _as_known_dtype(ids: np.ndarray) -> np.ndarray:
    """Return ids as uint16, int32 or int64, for which the kernels are compiled."""
    native = ids.dtype.newbyteorder("=")
    if native in (np.dtype("u2"), np.dtype("i4"), np.dtype("i8")):
        return np.ascontiguousarray(ids, native)
    if native == np.dtype("u4") and int(ids.max()) < 1 << 31:
        return np.ascontiguousarray(ids, native).view(np.int32)
    return ids.astype(np.int32 if native.itemsize < 4 else np.int64)
