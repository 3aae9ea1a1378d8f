"""packprep.randomness against its plain-integer twin, published vectors and exact counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep import randomness
from tests.twin import chance

keys = st.integers(0, 2**64 - 1)
purposes = st.integers(0, 2**32 - 1)
epochs = st.integers(0, 2**32 - 1)
many = settings(max_examples=150, deadline=None)

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def hexadecimal(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter, key, result", KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, result):
    low, high = hexadecimal(key)
    found = randomness.philox(low + 2**32 * high, *hexadecimal(counter))
    assert [int(word) for word in found] == hexadecimal(result)
    assert all(word.dtype == np.uint32 for word in found)
    assert chance.philox(low + 2**32 * high, hexadecimal(counter)) == hexadecimal(result)


def test_purposes_are_distinct_and_those_of_the_twin():
    numbers = {
        name: value
        for name, value in vars(randomness).items()
        if name.isupper() and isinstance(value, int)
    }
    numbers = {
        name: value
        for name, value in numbers.items()
        if name[0] != "_" and name != "PERMUTATION_ROUNDS"
    }
    assert len(set(numbers.values())) == len(numbers) == 31
    assert 0 not in numbers.values()  # purpose 0 under a permutation's key is its round keys
    twins = [name for name in vars(chance) if name in numbers]
    assert len(twins) == 19
    assert all(numbers[name] == getattr(chance, name) for name in twins)


@given(keys, purposes, st.integers(0, 2**34 - 1), epochs, st.integers(0, 2**32 - 1))
@many
def test_words_agree_with_the_twin(key, purpose, index, epoch, attempt):
    found = randomness.words(key, purpose, index, epoch, attempt)
    assert int(found) == chance.words(key, purpose, index, epoch, attempt)
    assert found.dtype == np.uint32


@pytest.mark.long
@given(keys, purposes, st.lists(st.integers(0, 2**34 - 1), max_size=9), epochs)
@many
def test_words_of_an_index_array_agree_with_the_twin(key, purpose, index, epoch):
    found = randomness.words(key, purpose, np.array(index, np.int64), epoch)
    assert found.tolist() == [chance.words(key, purpose, i, epoch) for i in index]


@pytest.mark.long
@given(st.lists(keys, min_size=1, max_size=5), purposes, st.integers(0, 2**34 - 6))
@many
def test_words_broadcast_keys_against_indices(key, purpose, index):
    found = randomness.words(
        np.array(key, np.uint64)[:, None], purpose, np.arange(index, index + 6)[None]
    )
    assert found.tolist() == [[chance.words(k, purpose, index + i) for i in range(6)] for k in key]


@given(keys, purposes, st.integers(0, 2**32 - 1), epochs)
@many
def test_bits64_agree_with_the_twin(key, purpose, index, epoch):
    found = randomness.bits64(key, purpose, index, epoch)
    assert int(found) == chance.bits64(key, purpose, index, epoch)
    assert found.dtype == np.uint64


@given(keys, purposes, st.lists(st.integers(0, 2**34 - 1), max_size=9), epochs)
@many
def test_uniforms_agree_with_the_twin_and_are_multiples_of_two_to_the_minus_24(
    key, purpose, index, epoch
):
    found = randomness.uniforms(key, purpose, np.array(index, np.int64), epoch)
    assert found.dtype == np.float64
    assert found.tolist() == [chance.uniforms(key, purpose, i, epoch) for i in index]
    assert ((found >= 0) & (found < 1) & (found * 2**24 % 1 == 0)).all()
    assert (found.astype(np.float32) == found).all()


def test_uniforms_reach_both_ends(monkeypatch):
    monkeypatch.setattr(
        randomness, "words", lambda *_: np.array([0, 255, 256, 2**32 - 1], np.uint32)
    )
    assert randomness.uniforms(0, 0, np.arange(4)).tolist() == [0.0, 0.0, 2.0**-24, 1 - 2.0**-24]


# Half of all words are drawn anew at 2³¹ + 1, a quarter at 3·2³⁰ + 1, nearly none at the others.
BOUNDS = [1, 2, 3, 10, 2**16, 2**31, 2**31 + 1, 3 * 2**30 + 1, 2**32 - 2, 2**32 - 1]


@given(
    keys,
    purposes,
    st.integers(0, 2**33),
    st.one_of(st.sampled_from(BOUNDS), st.integers(1, 2**32 - 1)),
    epochs,
)
@many
def test_integers_of_arrays_agree_with_the_twin(key, purpose, index, bound, epoch):
    found = randomness.integers(key, purpose, np.arange(index, index + 20), bound, epoch)
    assert found.dtype == np.int64
    assert found.tolist() == [
        chance.integers(key, purpose, index + i, bound, epoch) for i in range(20)
    ]
    assert ((found >= 0) & (found < bound)).all()


@pytest.mark.long
@given(
    keys,
    purposes,
    st.integers(0, 2**34 - 1),
    st.one_of(st.sampled_from(BOUNDS), st.integers(1, 2**32 - 1)),
    epochs,
)
@many
def test_integers_of_scalars_agree_with_the_twin(key, purpose, index, bound, epoch):
    assert int(randomness.integers(key, purpose, index, bound, epoch)) == chance.integers(
        key, purpose, index, bound, epoch
    )


@given(
    st.lists(
        st.tuples(keys, st.integers(0, 2**34 - 1), st.sampled_from(BOUNDS)), min_size=1, max_size=12
    ),
    purposes,
)
@many
def test_integers_broadcast_keys_indices_and_bounds(draws, purpose):
    key, index, bound = (list(column) for column in zip(*draws, strict=True))
    found = randomness.integers(np.array(key, np.uint64), purpose, np.array(index), np.array(bound))
    assert found.tolist() == [chance.integers(k, purpose, i, b) for k, i, b in draws]


@pytest.mark.parametrize("bound", [3, 7, 1000, 2**31 + 1, 3 * 2**30 + 1, 2**32 - 1])
def test_integers_are_exactly_uniform(bound, monkeypatch):
    """Each value keeps exactly ⌊2³² / bound⌋ words: of those that give it, only the first can be
    drawn anew.

    The words at both edges of many values are fed in; a word drawn anew becomes `fresh`.
    """
    values = sorted({*range(min(bound, 200)), *range(max(0, bound - 200), bound), bound // 2})
    first = [-(-v * 2**32 // bound) for v in values]  # least word whose product's high half is v
    last = [-(-(v + 1) * 2**32 // bound) - 1 for v in values]
    fresh = 2**32 - 1  # never drawn anew: its low half is 2³² − bound

    def fed(key, purpose, index, epoch=0, attempt=0):
        table = np.array(first + last, np.uint32)
        return table[index] if attempt == 0 else np.full(len(index), fresh, np.uint32)

    monkeypatch.setattr(randomness, "words", fed)
    found = randomness.integers(1, 2, np.arange(2 * len(values)), bound).tolist()
    redrawn = 0
    for i, v in enumerate(values):
        refused = (first[i] * bound) % 2**32 < 2**32 % bound
        redrawn += refused
        assert last[i] - first[i] + 1 - refused == 2**32 // bound
        assert found[i] == (fresh * bound // 2**32 if refused else v)
        if last[i] > first[i]:
            assert found[len(values) + i] == v
    assert redrawn > 0


def test_integers_draw_anew_as_often_as_the_bound_demands():
    bound, n = 2**31 + 1, 4000
    again = sum(chance.words(7, 9, i) * bound % 2**32 < 2**32 % bound for i in range(n))
    assert abs(again - n * (2**32 % bound) / 2**32) < 6 * (n / 4) ** 0.5
    found = randomness.integers(7, 9, np.arange(n), bound)
    assert found.tolist() == [chance.integers(7, 9, i, bound) for i in range(n)]


@given(st.lists(st.one_of(st.text(), st.integers(-(2**70), 2**70)), max_size=4))
@many
def test_text_key_agrees_with_the_twin(parts):
    found = randomness.text_key(*parts)
    assert isinstance(found, np.uint64)
    assert int(found) == chance.text_key(*parts)


def test_text_key_tells_parts_apart():
    parts = [
        ("a", "b"),
        ("ab",),
        ("a,b",),
        ('a","b',),
        (0, "a"),
        ("0", "a"),
        ("a\udc80",),
        ("😀\n\x7f\\",),
        (),
    ]
    assert len({int(randomness.text_key(*each)) for each in parts}) == len(parts)
    assert [int(randomness.text_key(*each)) for each in parts] == [
        chance.text_key(*each) for each in parts
    ]


@given(keys, st.integers(0, 2**63 - 1), st.integers(0, 2**24 - 1), st.integers(0, 2**32 - 1))
@many
def test_segment_key_agrees_with_the_twin(file_key, document, repeat, start):
    found = randomness.segment_key(np.uint64(file_key), document, repeat, start)
    assert found.dtype == np.uint64
    assert int(found) == chance.segment_key(file_key, document, repeat, start)


@pytest.mark.long
def test_segment_key_of_columns_agrees_with_the_twin():
    document = np.array([0, 1, 2**32 - 1, 2**32, 2**40 + 5], np.int64)
    start, repeat = (
        np.array([0, 7, 0, 9, 2**31], np.int64),
        np.array([0, 1, 2, 255, 65535], np.uint16),
    )
    file_key = np.arange(5, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    found = randomness.segment_key(file_key, document, repeat, start)
    expected = [
        chance.segment_key(*(int(x) for x in row))
        for row in zip(file_key, document, repeat, start, strict=True)
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize("step", [275, 25])
def test_permute_is_a_bijection_for_every_size_to_5000(step):
    for first in range(1, 5001, step):  # many sizes in one call, one after the other
        sizes = np.arange(first, first + 25)
        size, begin = np.repeat(sizes, sizes), np.repeat(np.cumsum(sizes) - sizes, sizes)
        found = randomness.permute(np.arange(len(size)) - begin, size, 1234567 + first)
        assert ((found >= 0) & (found < size)).all()
        assert (np.bincount(found + begin, minlength=len(size)) == 1).all()


@pytest.mark.long
@given(st.integers(1, 300), st.lists(keys, min_size=1, max_size=5))
@many
def test_permutations_with_a_key_each_broadcast(size, some_keys):
    found = randomness.permute(
        np.broadcast_to(np.arange(size), (len(some_keys), size)),
        size,
        np.array(some_keys, "u8")[:, None],
    )
    for order, key in zip(found, some_keys, strict=True):
        assert order.tolist() == randomness.permute(np.arange(size), size, key).tolist()


@given(
    st.one_of(st.integers(1, 70), st.sampled_from([4**5, 4**5 + 1, 4 * 10**9, 2**40 + 1])),
    keys,
    st.data(),
)
@many
def test_permute_agrees_with_the_twin(size, key, data):
    index = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
    found = randomness.permute(np.array(index, np.int64), size, key)
    assert found.dtype == np.int64
    assert found.tolist() == [chance.permute(i, size, key) for i in index]
    assert randomness.permute(found, size, key, inverse=True).tolist() == [*index]


def test_permute_of_four_billion_keeps_apart_what_is_apart():
    size = 4 * 10**9
    index = np.concatenate(
        [np.arange(50_000), size - 1 - np.arange(50_000), np.arange(1, 50_000) * 79_999]
    )
    index = np.unique(index)
    found = randomness.permute(index, size, 42)
    assert len(np.unique(found)) == len(index)
    assert found.min() >= 0 and found.max() < size
    assert (
        np.abs(np.bincount(found // (size // 16), minlength=16) - len(index) / 16).max()
        < 6 * len(index) ** 0.5 / 4
    )


def test_permute_depends_on_its_key_and_keeps_the_shape_of_its_index():
    orders = {tuple(randomness.permute(np.arange(6), 6, key).tolist()) for key in range(300)}
    assert len(orders) > 200
    index = np.arange(12).reshape(3, 4)
    found = randomness.permute(index, 12, 5)
    assert found.shape == (3, 4)
    assert found.ravel().tolist() == randomness.permute(index.ravel(), 12, 5).tolist()
