"""Every function of packprep.dataset.attention on 1000 random layouts, next to loops that follow
the definitions.

Half of the layouts are physically padded. The loops know a row only as what stands in each slot:
the number of its segment or none, and its place in it.
"""

import random
import tracemalloc
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from packprep.dataset import attention
from packprep.errors import ArgumentError
from tests.adapters import rows_made


class Layout(NamedTuple):
    lengths: list[int]
    begins: list[int]
    cu_seqlens: list[int]
    cu_seqlens_padded: list[int] | None
    total: int
    segment: list[int]  # of each slot; −1 on padding
    place: list[int]  # in its segment; 0 on padding
    prefix: list[int]
    chance: random.Random

    @property
    def ids(self):
        return np.array([s + 1 for s in self.segment], np.uint16)


def layout_of(number):
    chance = random.Random(number)
    lengths = [chance.randint(1, 12) for _ in range(chance.randint(0, 6))]
    multiple = chance.choice([2, 4, 8]) if number % 2 else 1
    begins, segment, place, real = [], [], [], [0]
    for i, n in enumerate(lengths):
        begins.append(len(segment))
        gap = -n % multiple
        segment += [i] * n + [-1] * gap
        place += [*range(n)] + [0] * gap
        real.append(real[-1] + n)
    padded = [*begins, len(segment)] if multiple > 1 else None
    tail = chance.choice([0, 0, 1, 5])
    segment, place = segment + [-1] * tail, place + [0] * tail
    prefix = [chance.choice([0, n, chance.randint(0, n)]) for n in lengths]
    return Layout(lengths, begins, real, padded, len(segment), segment, place, prefix, chance)


LAYOUTS = [layout_of(number) for number in range(1000)]


def says(array, expected, dtype):
    assert array.dtype == dtype and array.tolist() == expected


@pytest.mark.long
def test_position_ids_and_seq_idx():
    for x in LAYOUTS:
        says(attention.position_ids(x.cu_seqlens, x.total, x.cu_seqlens_padded), x.place, np.int32)
        idx = [len(x.lengths) if s < 0 else s for s in x.segment]
        says(attention.seq_idx(x.cu_seqlens, x.total, x.cu_seqlens_padded), idx, np.int32)


@pytest.mark.long
def test_next_token_labels():
    for x in LAYOUTS:
        tokens = [x.chance.randint(0, 99) for _ in x.segment]
        mask, in_place = ([x.chance.randint(0, 1) for _ in x.segment] for _ in range(2))
        distance = x.chance.randint(1, 4)
        expected = []
        for i in range(x.total):
            j = i + distance
            good = (
                j < x.total
                and x.segment[i] == x.segment[j] >= 0
                and mask[j - 1]
                and not in_place[i]
            )
            expected.append(tokens[j] if good else -1)
        got = attention.next_token_labels(
            tokens, x.ids, mask, distance, np.array(in_place, bool), -1
        )
        says(got, expected, np.int64)


@pytest.mark.long
def test_label_counts():
    for x in LAYOUTS:
        mask = [x.chance.randint(0, 1) for _ in x.segment]
        expected = [
            0 if s < 0 else sum(m for m, t in zip(mask, x.segment, strict=True) if t == s)
            for s in x.segment
        ]
        says(attention.label_counts(mask, x.cu_seqlens, x.cu_seqlens_padded), expected, np.int32)


@pytest.mark.long
def test_thd():
    for x in LAYOUTS:
        if not x.total:
            continue
        room = len(x.lengths) + x.chance.randint(0, 3)
        seqlens, offsets = attention.thd(x.ids, room, fill=-7)
        spare = room - len(x.lengths)
        says(seqlens, x.lengths + [-7] * spare, np.int32)
        says(offsets, x.begins + [-1] * (spare + 1), np.int32)


@pytest.mark.long
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_thd_pair(causal):
    """Queries and keys are each some slots of the whole row, as ranks of context parallelism hold
    them."""
    compared = 0
    for x in LAYOUTS:
        window = x.chance.choice(
            [None, (x.chance.randint(-1, 5), x.chance.randint(-1, 5)), (-1, 1 << 40), (1 << 40, 2)]
        )
        sides = [[i for i in range(x.total) if x.chance.random() < 0.7] for _ in range(2)]
        if causal == "bottom_right":  # neighbouring slots of each segment: others it refuses
            ranges = [
                [sorted(x.chance.choices(range(n + 1), k=2)) for n in [*x.lengths, 1]]
                for _ in range(2)
            ]
            sides = [
                [i for i in range(x.total) if s[x.segment[i]][0] <= x.place[i] < s[x.segment[i]][1]]
                for s in ranges
            ]
        room = 8
        q, k = ([(x.segment[i], x.place[i]) for i in side] for side in sides)
        last = [{s: max(p for t, p in side if t == s) for s, _ in side} for side in (q, k)]

        def allowed(a, b, last=last, window=window):
            if a[0] != b[0] or a[0] < 0:
                return False
            distance = a[1] - b[1]
            if causal == "bottom_right":
                distance = (a[1] - last[0][a[0]]) - (b[1] - last[1][b[0]])
            left, right = window or (-1, -1)
            return not (
                (causal and distance < 0)
                or (left >= 0 and distance > left)
                or (right >= 0 and -distance > right)
            )

        counts = (
            [any(allowed(a, b) for b in k) for a in q],
            [any(allowed(a, b) for a in q) for b in k],
        )
        expected = []
        for side, counting in zip((q, k), counts, strict=True):
            kept = [s if c else -1 for (s, _), c in zip(side, counting, strict=True)]
            starts = [i for i, s in enumerate(kept) if s >= 0 and (i == 0 or kept[i - 1] != s)]
            expected.append(([kept.count(s) for s in range(room)], starts))
        ids, positions = (
            [np.array([s[i] for s in side], np.int32) for side in (q, k)] for i in (0, 1)
        )
        arguments = (ids[0] + 1, ids[1] + 1, *positions, room, causal, window)
        if any(len(starts) > room + 1 for _, starts in expected):  # offsets has room + 1 entries
            with pytest.raises(ArgumentError, match="more segments"):
                attention.thd_pair(*arguments)
            continue
        got = attention.thd_pair(*arguments)
        for i in range(2):
            says(got[i], expected[i][0], np.int32)
            says(got[2 + i], expected[i][1] + [-1] * (room + 1 - len(expected[i][1])), np.int32)
        compared += 1
    assert compared > 900


@pytest.mark.long
def test_pad_cu_seqlens():
    for x in LAYOUTS:
        cu = x.cu_seqlens if x.cu_seqlens_padded is None else x.cu_seqlens_padded
        for tail in ("none", "segment", "fold"):
            expected = list(cu)
            if tail != "none" and cu[-1] < x.total:
                expected = (
                    [*cu, x.total] if tail == "segment" or len(cu) == 1 else [*cu[:-1], x.total]
                )
            room = len(expected) + x.chance.randint(-1, 3)
            if room < len(expected):
                with pytest.raises(ArgumentError, match="do not fit"):
                    attention.pad_cu_seqlens(cu, room, x.total, tail)
                continue
            got = attention.pad_cu_seqlens(cu, room, x.total, tail)
            says(got, expected + [expected[-1]] * (room - len(expected)), np.int32)


def ends_of(x):
    return [0 if s < 0 else x.begins[s] + x.prefix[s] for s in x.segment]


def sees(x, q, k):
    """Prefix, causal and both ways; padding sees padding before it and itself."""
    same = x.segment[q] == x.segment[k]
    return same and (
        k <= q or (x.segment[q] >= 0 and k < x.begins[x.segment[q]] + x.prefix[x.segment[q]])
    )


def test_prefix_ends_and_dense_mask():
    for x in LAYOUTS:
        got = attention.prefix_ends(x.cu_seqlens, x.prefix, x.total, x.cu_seqlens_padded)
        says(got, ends_of(x), np.int32)
        says(
            attention.dense_mask(x.ids, got),
            [[sees(x, q, k) for k in range(x.total)] for q in range(x.total)],
            bool,
        )
        causal = [
            [x.segment[q] == x.segment[k] and k <= q for k in range(x.total)]
            for q in range(x.total)
        ]
        says(attention.dense_mask(x.ids), causal, bool)


@pytest.mark.long
def test_block_mask():
    for x in LAYOUTS:
        block = x.chance.randint(1, 6)
        half = [
            int(s >= 0 and p >= x.lengths[s] // 2) for s, p in zip(x.segment, x.place, strict=True)
        ]
        position = [
            p - x.lengths[s] // 2 if s >= 0 and h else p
            for s, p, h in zip(x.segment, x.place, half, strict=True)
        ]

        def allowed(q, k, x=x, half=half, position=position, block=block):
            if x.segment[q] != x.segment[k]:
                return False
            b_q, b_k = position[q] // block, position[k] // block
            if half[q] == half[k] and b_q == b_k:
                return True
            return half[k] == 1 and (b_q > b_k if half[q] == 0 else b_q >= b_k)

        expected = [[allowed(q, k) for k in range(x.total)] for q in range(x.total)]
        says(attention.block_mask(x.ids, position, half, block), expected, bool)


@pytest.mark.long
def test_micro_sequence():
    refused = 0
    for x in LAYOUTS:
        if not x.total:
            continue
        begin = x.chance.randrange(x.total)
        end = x.chance.randint(begin + 1, x.total)
        prefix = x.prefix if x.chance.random() < 0.5 else None
        if prefix and any(b < end < b + p for b, p in zip(x.begins, prefix, strict=True)):
            with pytest.raises(ArgumentError, match=f"ends at position {end}"):
                attention.micro_sequence(x.cu_seqlens, begin, end, prefix, x.cu_seqlens_padded)
            refused += 1
            continue
        got = attention.micro_sequence(x.cu_seqlens, begin, end, prefix, x.cu_seqlens_padded)
        # A segment's gap belongs to it here, and what is behind the last segment is one more.
        behind = len(x.lengths)
        bounds = [*x.begins, (x.cu_seqlens_padded or x.cu_seqlens)[-1]]
        owner = [
            max((s for s in range(behind) if bounds[s] <= i < bounds[s + 1]), default=behind)
            for i in range(x.total)
        ]
        first = min(i for i in range(x.total) if owner[i] == owner[begin])
        touched = sorted({owner[i] for i in range(begin, end)})
        lengths_q = [sum(owner[i] == s for i in range(begin, end)) for s in touched]
        lengths_k = [sum(owner[i] == s for i in range(first, end)) for s in touched]
        assert got.first_document_begin == first
        says(got.cu_seqlens_q, np.cumsum([0, *lengths_q]).tolist(), np.int32)
        says(got.cu_seqlens_k, np.cumsum([0, *lengths_k]).tolist(), np.int32)
        assert (got.max_seqlen_q, got.max_seqlen_k) == (max(lengths_q), max(lengths_k))
        number = [0 if x.segment[i] < 0 else 1 + touched.index(owner[i]) for i in range(first, end)]
        says(got.document_index_k, number, np.int32)
        says(got.document_index_q, number[begin - first :], np.int32)
        says(got.position_ids, x.place[begin:end], np.int32)
        mask = attention.dense_mask(x.ids, None if prefix is None else ends_of(x), got)
        for q in range(begin, end):
            for k in range(x.total):
                wanted = sees(x, q, k) if prefix else x.segment[q] == x.segment[k] and k <= q
                if first <= k < end:
                    assert mask[q - begin, k - first] == wanted
                elif x.segment[q] >= 0:
                    assert not wanted  # every key that a query needs is there
    assert refused > 20


@pytest.mark.long
def test_cut_points():
    refused = 0
    for x in LAYOUTS:
        size = x.chance.randint(1, 16)
        row = SimpleNamespace(
            tokens=[0] * x.total,
            cu_seqlens=np.array(x.cu_seqlens),
            cu_seqlens_padded=(
                None if x.cu_seqlens_padded is None else np.array(x.cu_seqlens_padded)
            ),
            segments={"prefix": np.array(x.prefix, np.int64)},
        )
        forbidden = {
            i for b, p in zip(x.begins, x.prefix, strict=True) for i in range(b + 1, b + p)
        }
        expected, at = [], 0
        while at < x.total:
            at = max(
                (e for e in range(at + 1, min(at + size, x.total) + 1) if e not in forbidden),
                default=-1,
            )
            if at < 0:
                break
            expected.append(at)
        if at < 0:
            with pytest.raises(ArgumentError, match=f"not fit into a window of {size}"):
                attention.cut_points(row, size)
            refused += 1
            continue
        got = attention.cut_points(row, size)
        assert got.dtype == np.int64 and (got.tolist()[-1:] or [0]) == [x.total]
        assert not forbidden & set(got.tolist()) and (np.diff(got, prepend=0) <= size).all()
        assert len(got) >= len(expected)
    assert refused > 20


@pytest.mark.long
def test_context_parallel():
    for x in LAYOUTS:
        cp_size, tp_size = x.chance.randint(1, 4), x.chance.randint(1, 2)
        multiple = tp_size if cp_size == 1 else 2 * cp_size * tp_size
        whole, begins = [], [0]  # segment and place of each slot of the padded whole
        for s, n in enumerate(x.lengths):
            whole += [(s, p) for p in range(-(-n // multiple) * multiple)]
            begins.append(len(whole))
        for rank in range(cp_size):
            held = []
            for s in range(len(x.lengths)):
                chunk = (begins[s + 1] - begins[s]) // (2 * cp_size)
                parts = [rank, 2 * cp_size - 1 - rank] if cp_size > 1 else [0, 1]
                if cp_size == 1:
                    held += range(begins[s], begins[s + 1])
                else:
                    held += [begins[s] + part * chunk + i for part in parts for i in range(chunk)]
            real = [
                sum(whole[i][0] == s and whole[i][1] < x.lengths[s] for i in held)
                for s in range(len(x.lengths))
            ]
            got = attention.context_parallel(x.cu_seqlens, cp_size, rank, tp_size)
            says(got[0], held, np.int64)
            says(got[1], np.cumsum([0, *real]).tolist(), np.int32)
            says(got[2], begins, np.int32)
            if x.cu_seqlens_padded is not None:
                lies = x.cu_seqlens_padded
                if any((b - a) % multiple for a, b in zip(lies, lies[1:], strict=False)):
                    with pytest.raises(ArgumentError, match=f"pad_seq_to_mult = {multiple}"):
                        attention.context_parallel(x.cu_seqlens, cp_size, rank, tp_size, lies)
                elif lies == begins:
                    again = attention.context_parallel(x.cu_seqlens, cp_size, rank, tp_size, lies)
                    assert all(np.array_equal(a, b) for a, b in zip(again, got, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("tail", ["segment", "drop"])
def test_flatten(tail):
    for at in range(0, 1000, 3):
        rows = LAYOUTS[at : at + 3]
        total = max(x.total for x in rows)
        ids, tokens, ends = (np.zeros((len(rows), total), np.int64) for _ in range(3))
        flat_tokens, flat_ids, flat_ends, boundaries, where = [], [], [], [0], {}
        segments = 0
        for b, x in enumerate(rows):
            ids[b, : x.total], ends[b, : x.total] = x.ids, ends_of(x)
            tokens[b] = np.arange(total) + 1000 * b
            slots = x.segment + [-1] * (total - x.total)
            for i in range(total):
                if tail == "drop" and slots[i] < 0:
                    continue
                if (
                    i == 0
                    or slots[i] != slots[i - 1]
                    or (tail == "drop" and boundaries[-1] == len(flat_tokens))
                ):
                    boundaries += [len(flat_tokens)] if flat_tokens else []
                where[b, i] = len(flat_tokens)
                flat_tokens.append(1000 * b + i)
                flat_ids.append(0 if slots[i] < 0 else segments + slots[i] + 1)
            segments += len(x.lengths)
        for b, x in enumerate(rows):
            for i in range(total):
                if (b, i) in where:
                    segment = x.segment[i] if i < x.total else -1
                    seen = 0 if segment < 0 else where[b, x.begins[segment]] + x.prefix[segment]
                    flat_ends.append(seen)
        boundaries += [len(flat_tokens)] if flat_tokens else []
        batch = {"tokens": tokens, "segment_ids": ids, "prefix_ends": ends}
        got, cu_seqlens, max_seqlen = attention.flatten(batch, tail)
        assert got["tokens"].tolist() == flat_tokens
        says(got["segment_ids"], flat_ids, np.int32)
        says(got["prefix_ends"], flat_ends, np.int32)
        boundaries = sorted(set(boundaries))
        says(cu_seqlens, boundaries, np.int32)
        assert max_seqlen == max(
            (b - a for a, b in zip(boundaries, boundaries[1:], strict=False)), default=0
        )


@pytest.mark.long
def test_micro_windows():
    for x in LAYOUTS:
        splits, cp_size, part = (x.chance.randint(1, 5) for _ in range(3))
        length = splits * cp_size * part
        owned = []
        for rank in range(cp_size):
            windows = attention.micro_windows(length, splits, cp_size, rank)
            assert windows.dtype == np.int64 and windows.shape == (splits, 2)
            for split, (begin, end) in enumerate(windows.tolist()):
                assert (begin, end) == (
                    split * length // splits + rank * part,
                    split * length // splits + (rank + 1) * part,
                )
                owned += range(begin, end)
        assert sorted(owned) == list(range(length))
        with pytest.raises(ArgumentError, match="not a multiple"):
            attention.micro_windows(length * 2 + 1, 2, 1)


# Memory


def peak_bytes(call):
    """The most that numpy and Python have allocated at once during the call; what a first call
    imports is not asked for."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def long_row():
    """(segment_ids, position_ids, segments) of 131 072 slots, some of them padding."""
    chance, lengths, total = random.Random(0), [], 131_000
    while sum(lengths) < total:
        lengths.append(min(chance.randint(1, 400), total - sum(lengths)))
    ids = np.zeros(131_072, np.uint16)
    ids[:total] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return ids, attention.position_ids(np.append(0, np.cumsum(lengths)), len(ids)), len(lengths)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_thd_of_131072_slots_takes_under_64_bytes_a_slot(dtype):
    ids, _, n = long_row()
    assert peak_bytes(lambda: attention.thd(ids.astype(dtype), n)) < 64 * len(ids)


@pytest.mark.long
@pytest.mark.parametrize("window", [None, (-1, 3), (5, 3)])
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_thd_pair_of_131072_slots_takes_under_64_bytes_a_slot(causal, window):
    ids, positions, n = long_row()
    for dtype in (np.uint16, np.int64):
        arguments = [array.astype(dtype) for array in (ids, ids, positions, positions)]
        assert peak_bytes(
            lambda given=arguments: attention.thd_pair(*given, n, causal, window)
        ) < 64 * len(ids)


def rows_of_answers(seed):
    """Rows of segments in blocks, of other segments and of gaps."""
    chance, rows = random.Random(seed), []
    for _ in range(chance.randint(1, 3)):
        segments = []
        for _ in range(chance.randint(0, 4)):
            half, gap = chance.randint(1, 8), chance.choice([0, 0, 2])
            if chance.random() < 0.3:
                segments.append(rows_made.Segment("causal", half, gap=gap))
                continue
            size = chance.randint(1, 4)
            starts = rows_made.answers(chance, half, size) if chance.random() < 0.7 else ()
            segments.append(rows_made.Segment("blocks", 2 * half, size, gap, starts))
        rows.append([*segments, rows_made.Segment("blocks", 4, 2, 0, (0, 1))])
    return rows


@pytest.mark.long
def test_block_mask_of_answers():
    for seed in range(60):
        for segment in (s for row in rows_of_answers(seed) for s in row if s.rule == "blocks"):
            row = rows_made.batch([[segment]], segment.length)
            half = np.arange(segment.length) * 2 // segment.length
            starts = np.array(rows_made.starts_of(segment) * 2)
            columns = row["segment_ids"][0], row["position_ids"][0], half
            mask = attention.block_mask(*columns, None, starts)
            assert np.array_equal(mask, rows_made.seen(segment))


@pytest.mark.long
def test_block_varlen_numbers_the_blocks_of_each_half():
    for seed in range(60):
        rows = rows_of_answers(seed)
        found = attention.block_varlen(rows_made.batch(rows, 80))
        numbers, begins = np.full(80 * len(rows), -1), {0, 80 * len(rows)}
        for r, at, segment in rows_made.places(rows):
            at += 80 * r
            half, end = segment.length // 2, at + segment.length
            begins |= {at, end}
            if segment.rule == "blocks":
                begins.add(at + half)
                starts = rows_made.starts_of(segment)
                number = [sorted(set(starts)).index(start) for start in starts]
                numbers[at:end] = number * 2
        begins |= {80 * r for r in range(len(rows))}
        says(found["block_ids"], numbers.tolist(), np.int32)
        says(found["cu_seqlens"], sorted(begins), np.int32)
        assert found["max_seqlen"] == np.diff(sorted(begins)).max()
