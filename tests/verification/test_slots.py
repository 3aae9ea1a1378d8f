"""The compiled walk over slots finds what the plain one finds: which promise, where, which
value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.verification.slots import _CODES, Bounds, Found, Slots, _check_slots
from tests.verification.plain_slots import slot_faults

PAD, VOCAB_SIZE, LISTED = 3, 50, 1000


def good_rows(chance, length, rows, dtype, with_labels, with_may, kinds):
    """Arrays of rows in which every invariant holds."""
    tokens = np.full((rows, length), PAD, dtype)
    labels = np.full((rows, length), PAD, dtype)
    ids, loss = np.zeros((rows, length), np.uint16), np.zeros((rows, length), np.uint8)
    may = (chance.random((rows, length)) < 0.7).astype(np.uint8)
    segments, next_token = [], []
    for r in range(rows):
        segments.append([])
        next_token.append([])
        t = 0
        while True:
            t += int(chance.integers(0, 3))
            slots = int(chance.integers(1, 12))
            if t + slots > length:
                break
            prefix = int(chance.choice([-1, 0, 1, slots // 2, slots, slots + 2]))
            plain = bool(chance.choice(kinds)) or not with_labels
            own = slice(t, t + slots)
            tokens[r, own] = chance.integers(0, VOCAB_SIZE, slots)
            ids[r, own] = len(segments[r]) + 1
            if plain:
                labels[r, t : t + slots - 1] = tokens[r, t + 1 : t + slots]
                for k in range(t + max(prefix - 1, 0), t + slots - 1):
                    loss[r, k] = may[r, k + 1] if with_may else 1
            else:
                labels[r, own] = tokens[r, own]
                loss[r, own] = chance.integers(0, 2, slots)
                noised = np.flatnonzero(loss[r, own]) + t
                tokens[r, noised] = chance.integers(0, VOCAB_SIZE, len(noised))
            segments[r].append((t, slots, prefix))
            next_token[r].append(plain)
            t += slots
    return (
        tokens,
        labels if with_labels else None,
        ids,
        loss,
        may if with_may else None,
        segments,
        next_token,
    )


def both(tokens, labels, ids, loss, may, segments, next_token):
    """(what the kernel finds, what the twin finds), sorted."""
    flat = [one for row in segments for one in row]
    columns = [np.array([one[k] for one in flat], np.int64) for k in range(3)]
    row_begin = np.concatenate(([0], np.cumsum([len(row) for row in segments]))).astype(np.int64)
    kinds = np.array([flag for row in next_token for flag in row], np.bool_)
    where, counts = np.zeros((_CODES, LISTED, 3), np.int64), np.zeros(_CODES, np.int64)
    none = np.zeros((0, tokens.shape[1]), tokens.dtype)
    may_rows = none.astype(np.uint8) if may is None else may
    rows = Slots(tokens, none if labels is None else labels, ids, loss, may_rows)
    _check_slots(rows, Bounds(row_begin, *columns, kinds), PAD, VOCAB_SIZE, Found(where, counts))
    found = [
        (code, *map(int, place)) for code in range(_CODES) for place in where[code, : counts[code]]
    ]
    lists = [
        None if array is None else array.tolist() for array in (tokens, labels, ids, loss, may)
    ]
    return sorted(found), sorted(slot_faults(*lists, segments, next_token, PAD, VOCAB_SIZE))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.integers(0, 12))
def test_the_same_faults_are_found(dtype, seed, with_labels, with_may, changes):
    chance = np.random.default_rng(seed)
    made = good_rows(chance, 40, 3, dtype, with_labels, with_may, [True, False])
    assert both(*made) == ([], [])
    arrays = [array for array in made[:4] if array is not None]
    for _ in range(changes):
        array = arrays[chance.integers(len(arrays))]
        place = tuple(chance.integers(0, array.shape))
        values = [
            0,
            1,
            PAD,
            VOCAB_SIZE,
            VOCAB_SIZE - 1,
            np.iinfo(array.dtype).max,
            np.iinfo(array.dtype).min,
        ]
        array[place] = values[chance.integers(len(values))]
    found, expected = both(*made)
    assert found == expected
