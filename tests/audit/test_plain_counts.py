"""The kernels' counts equal those of loops in plain Python, on random columns with random faults."""

import numpy as np

from packprep.audit.documents import SpecialIds
from packprep.audit.rows import IGNORED, NEXT, SAME, PackedData, PackedRows
from tests.audit.test_checks import audited

EOS, BOS, PAD, UNK, VOCAB = 1, 2, 0, 3, 9
LENGTH = 24


def random_columns(seed):
    """Rows of few different ids, so that every fault is frequent."""
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 9))
    shape = rows, LENGTH
    ids = random.integers(0, VOCAB + 1, shape)
    segments = np.zeros(shape, np.int64)
    positions = np.zeros(shape, np.int64)
    for r in range(rows):
        at = 0
        for k in range(1, 5):
            n = int(random.integers(1, 9))
            end = min(at + n, LENGTH)
            segments[r, at:end] = k
            positions[r, at:end] = np.arange(end - at) + int(random.integers(0, 8) == 0)
            at = end
        if random.integers(0, 3) == 0:
            ids[r] = ids[0]
            segments[r] = segments[0]
    ids[segments == 0] = PAD
    labels = np.where(random.integers(0, 2, shape), ids, IGNORED)
    labels[random.integers(0, 12, shape) == 0] = 5
    trained = random.integers(0, 5, shape) > 0
    return ids, segments, positions, labels, trained


def plain_counts(columns, at):
    """The findings of each kind, by loops over rows and documents."""
    ids, segments, positions, labels, trained = columns
    counts = dict.fromkeys(
        (
            "padding",
            "duplicate_rows",
            "empty_documents",
            "no_eos",
            "inner_eos",
            "two_bos",
            "beyond_vocabulary",
            "unknown_tokens",
            "wrong_labels",
            "crossing_labels",
            "trained_padding",
            "untrained_documents",
            "untrained_rows",
            "unreset_positions",
            "broken_positions",
        ),
        0,
    )
    seen = set()
    for r in range(len(ids)):
        row_ids, row_segments = ids[r].tolist(), segments[r].tolist()
        loss = [bool(trained[r, i]) and labels[r, i] != IGNORED for i in range(LENGTH)]
        content = max((i + 1 for i in range(LENGTH) if row_segments[i]), default=0)
        row_trained = 0
        documents = []
        for k in sorted(set(row_segments) - {0}):
            places = [i for i in range(LENGTH) if row_segments[i] == k]
            documents.append((places[0], places[-1] + 1))
        key = []
        for first, end in documents:
            own = row_ids[first:end]
            body = own[1:] if own[0] == BOS else own
            ends = bool(body) and body[-1] == EOS
            body = body[:-1] if ends else body
            key.append((len(own), tuple(body)))
            counts["padding"] += body.count(PAD)
            counts["two_bos"] += (own[0] == BOS) + body.count(BOS) > 1
            counts["inner_eos"] += EOS in body
            counts["empty_documents"] += not body and first > 0
            counts["no_eos"] += not ends and not (end == content == LENGTH)
            counts["unreset_positions"] += positions[r, first] != 0
            counts["broken_positions"] += sum(
                positions[r, i] != positions[r, i - 1] + 1 for i in range(first + 1, end)
            )
            own_trained = sum(loss[i] for i in range(first, end) if at == NEXT or i > 0)
            row_trained += own_trained
            counts["untrained_documents"] += own_trained == 0 and end - first > 1
            if at == SAME:
                counts["wrong_labels"] += sum(
                    loss[i] and labels[r, i] != ids[r, i] for i in range(first, end)
                )
                counts["crossing_labels"] += first > 0 and loss[first]
            else:
                counts["wrong_labels"] += sum(
                    loss[i] and labels[r, i] != ids[r, i + 1] for i in range(first, end - 1)
                )
                last = labels[r, end - 1]
                if loss[end - 1] and last == PAD:
                    counts["trained_padding"] += 1
                elif loss[end - 1] and end < content and last == ids[r, end]:
                    counts["crossing_labels"] += not (last == EOS and ids[r, end - 1] != EOS)
        counts["padding"] += row_segments.count(0)
        counts["trained_padding"] += sum(loss[i] for i in range(LENGTH) if not row_segments[i])
        counts["untrained_rows"] += row_trained == 0
        counts["beyond_vocabulary"] += sum(id >= VOCAB for id in row_ids)
        counts["unknown_tokens"] += row_ids.count(UNK)
        counts["duplicate_rows"] += tuple(key) in seen
        seen.add(tuple(key))
    return counts


def test_counts_equal_those_of_loops():
    for seed in range(100):
        at = (SAME, NEXT)[seed % 2]
        columns = random_columns(seed)
        rows_at_once = 1 + seed % 4 * 3

        def batches(columns=columns, rows_at_once=rows_at_once):
            for first in range(0, len(columns[0]), rows_at_once):
                ids, *others = (one[first : first + rows_at_once] for one in columns)
                segments, positions, labels, trained = (one.reshape(-1) for one in others)
                yield PackedRows(
                    ids.reshape(-1),
                    np.arange(len(ids) + 1) * LENGTH,
                    labels=labels,
                    trained=trained,
                    positions=positions,
                    segments=segments,
                )

        names = ("labels", "trained", "positions", "segments")
        data = PackedData("made", batches, {name: name for name in names}, labels_at=at)
        audit = audited(data, SpecialIds(EOS, BOS, PAD, UNK, VOCAB))
        counts = {kind: tally.count for kind, tally in audit.tallies.items()}
        expected = plain_counts(columns, at)
        assert {kind: counts[kind] for kind in expected} == expected, seed
