"""The law of in-place noise: equal to its twin in plain Python, and the distributions that it
promises.

Statistics have fixed keys: they hold or they do not, and never change by chance.
"""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packprep.dataset.epochs import candidates, noise
from packprep.objectives.objective import Ids
from packprep.objectives.uniform_diffusion import flip_probability, mu_of, resolve
from packprep.randomness import bits64, words
from tests.dataset.test_token_slots import is_improbable
from tests.twin import chance as twin
from tests.twin import objectives as twins

many = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

MASKED = {
    "noise_range": (0.0, 1.0),
    "epsilon": 1e-3,
    "exact_count": False,
    "replace": (1.0, 0.0, 0.0),
    "stratified": False,
    "weighting": "1/p",
    "noise_eos": True,
}
UNIFORM = {
    "schedule": "flip",
    "noise_range": (0.1, 0.4),
    "loss_on": "all",
    "weighting": "none",
    "noise_eos": True,
}
BLOCKS = {parameter.name: parameter.default for parameter in noise.BLOCK_DIFFUSION.parameters} | {
    "block_length": 4
}
VOCAB, SPECIAL, MASK = 40, [0, 1, 39], 39
BLOCK_LAWS = {
    "level": {},
    "all": {"noise": "all"},
    "position": {"noise": "position"},
    "steep": {"noise": "position", "half_life": 0.01},
    "complementary": {"complementary": True},
    "uniform": {"canvas": "uniform", "weighting": "none"},
}
"""What a task of block diffusion may say of its noise; each with shift, too."""


def ids_of(vocab_size=VOCAB, special=SPECIAL, mask=MASK):
    return noise.NoiseIds(mask, *noise.ordinary_ids(vocab_size, np.array(special, np.int64)))


def columns(segments):
    key, at, count, row = zip(*segments, strict=True) if segments else ((), (), (), ())
    return noise.Candidates(
        np.array(key, np.uint64), *(np.array(c, np.int64) for c in (at, count, row))
    )


def arange_segments(keys, count):
    """Segments of `count` candidates each, one a row, without gaps."""
    m = len(keys)
    return noise.Candidates(keys, np.arange(m) * count, np.full(m, count), np.arange(m))


def some_keys(m, seed=0):
    return bits64(np.uint64(seed), 0, np.arange(m))


def target(segments, tokens, may=None, before=None, length=None):
    before = np.zeros(len(segments.key), np.int64) if before is None else before
    length = segments[2] if length is None else length
    return noise.Target(segments, before, length, may, tokens, np.zeros(len(tokens), np.uint8))


@st.composite
def cases(draw):
    """Segments in row order with gaps between them, tokens, `may`, and how many candidates make a
    chunk."""
    rows = draw(
        st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=5), max_size=4)
    )
    segments, before, at = [], [], 0
    for r, row in enumerate(rows):
        for gap, count in row:
            segments.append((draw(st.integers(0, 2**64 - 1)), at + gap, count, r))
            before.append(gap)
            at += gap + count + draw(st.integers(0, 2))
    size = at + draw(st.integers(0, 3))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    may = draw(st.none() | st.lists(st.integers(0, 1), min_size=size, max_size=size))
    dtype = draw(st.sampled_from(["uint16", "int32"]))
    return segments, before, tokens, may, dtype, draw(st.sampled_from([1, 7, 40, 1 << 17]))


epochs = st.integers(0, 3) | st.just(2**32 - 1)
ranges = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda r: (min(r), max(r)))
share_kinds = [(1.0, 0.0, 0.0), (0.8, 0.1, 0.1), (0.0, 1.0, 0.0), (0.0, 0.5, 0.5), (0.0, 0.0, 1.0)]


def run(law, case, parameters, resolved, ids, task, epoch):
    segments, before, tokens, may, dtype, chunk = case
    made = np.array(tokens, dtype)
    length = np.array([b + s[2] for b, s in zip(before, segments, strict=True)], np.int64)
    where = target(
        columns(segments),
        made,
        None if may is None else np.array(may, np.uint8),
        np.array(before, np.int64),
        length,
    )
    was, candidates.CHUNK_SLOTS = candidates.CHUNK_SLOTS, chunk
    try:
        return noise.SCHEDULES[law].draw(task, parameters, resolved, ids, where, epoch), where
    finally:
        candidates.CHUNK_SLOTS = was


def assert_columns(noised, expected):
    assert noised.level.dtype == noised.weight.dtype == np.float32
    assert noised.level.tolist() == [np.float32(level) for level, *_ in expected]
    assert noised.weight.tolist() == [np.float32(weight) for _, weight, _ in expected]


# Twins


@given(
    cases(), ranges, st.sampled_from([0.0, 1e-3, 0.3]), st.booleans(), st.booleans(), st.sampled_from(share_kinds),
    st.sampled_from(["1/p", "none"]), st.integers(0, 300), epochs,
)  # fmt: skip
@many
def test_masked_diffusion_agrees_with_the_twin(
    case, noise_range, epsilon, exact, stratified, shares, weighting, task, epoch
):
    parameters = {
        **MASKED,
        "noise_range": noise_range,
        "epsilon": epsilon,
        "exact_count": exact,
        "stratified": stratified,
        "replace": shares,
        "weighting": weighting,
    }
    segments, _, tokens, may, _, _ = case
    ids = ids_of(mask=MASK if shares[0] else -1)
    noised, where = run("masked_diffusion", case, parameters, {}, ids, task, epoch)
    tokens, loss_mask = list(tokens), [0] * len(tokens)
    expected = twins.of("masked_diffusion").noise(
        {"number": task, "parameters": parameters},
        (ids.mask, ids.ordinary.tolist()),
        segments,
        may,
        tokens,
        loss_mask,
        epoch,
    )
    assert where.tokens.tolist() == tokens
    assert where.loss_mask.tolist() == loss_mask
    assert_columns(noised, expected)


@given(
    cases(), ranges, st.sampled_from(["all", "corrupted"]), st.sampled_from(["none", "view_scale"]), epochs,
    st.sampled_from([0, 1, 2**39, 2**40 - 1, 2**40]),
)  # fmt: skip
@many
def test_uniform_diffusion_agrees_with_the_twin(
    case, noise_range, loss_on, weighting, epoch, constant
):
    parameters = {**UNIFORM, "noise_range": noise_range, "loss_on": loss_on, "weighting": weighting}
    segments, _, tokens, may, _, _ = case
    ids = ids_of()
    limits = [constant if step % 2 else step * 2**40 // 4096 for step in range(4096)]
    noised, where = run(
        "uniform_diffusion", case, parameters, {"flip_thresholds": limits}, ids, 0, epoch
    )
    tokens, loss_mask = list(tokens), [0] * len(tokens)
    described = {"parameters": parameters, "resolved": {"flip_thresholds": limits}}
    expected = twins.of("uniform_diffusion").noise(
        described, (-1, ids.ordinary.tolist()), segments, may, tokens, loss_mask, epoch
    )
    assert where.tokens.tolist() == tokens
    assert where.loss_mask.tolist() == loss_mask
    assert_columns(noised, expected)


level_ranges = ranges.map(lambda r: (min(max(r[0], 2.0**-24), 0.9), max(r[1], 2.0**-24)))
block_laws = st.builds(
    lambda law, shift, origin: {**law, "shift": shift, "block_origin": origin},
    st.sampled_from([*BLOCK_LAWS.values()]),
    st.booleans(),
    st.sampled_from(["answer", "segment"]),
)
block_lengths = st.integers(1, 5) | st.integers(1, 50)


def with_trainable_bodies(case):
    """Return the case without flags in front of the segments' candidates: bos and mode token are
    never trained."""
    segments, before, tokens, may, dtype, chunk = case
    if may is not None:
        may = list(may)
        for (_, at, _, _), b in zip(segments, before, strict=True):
            may[at - b : at] = [0] * b
    return segments, before, tokens, may, dtype, chunk


@given(cases(), level_ranges, block_lengths, epochs, block_laws)
@many
def test_block_diffusion_agrees_with_the_twin(case, noise_range, block_length, epoch, law):
    parameters = {**BLOCKS, "noise_range": noise_range, "block_length": block_length, **law}
    case = with_trainable_bodies(case)
    segments, before, tokens, may, _, _ = case
    noised, where = run("block_diffusion", case, parameters, {}, ids_of(), 0, epoch)
    tokens, loss_mask = list(tokens), [0] * len(tokens)
    candidates = [
        twin.CandidateSlots(*s, b, b + s[2]) for b, s in zip(before, segments, strict=True)
    ]
    made = twins.of("block_diffusion").noise(
        {"parameters": parameters},
        (MASK, ids_of().ordinary.tolist()),
        candidates,
        may,
        tokens,
        loss_mask,
        epoch,
    )
    expected = [blocks for _, _, blocks in made]
    assert where.tokens.tolist() == tokens
    assert where.loss_mask.tolist() == loss_mask
    assert (noised.blocks is None) == (law.get("noise") == "all")
    if noised.blocks is not None:
        counts, level, weight = noised.blocks.blocks.count, *noised.blocks[1:]
        assert counts.tolist() == [len(blocks) for blocks in expected]
        flat = [block for blocks in expected for block in blocks]
        assert level.tolist() == [np.float32(t) for t, _ in flat]
        assert weight.tolist() == [np.float32(w) for _, w in flat]
    assert (
        noised.level.tolist()
        == [level for level, _, _ in made]
        == [float(noised.blocks is None)] * len(segments)
    )
    assert noised.weight.tolist() == [weight for _, weight, _ in made] == [1.0] * len(segments)


# Edges


@pytest.mark.parametrize("law", noise.SCHEDULES)
@pytest.mark.parametrize("count", [None, 0])
def test_without_segments_or_candidates_nothing_is_written(law, count):
    segments = columns([] if count is None else [(5, 3, 0, 0), (6, 8, 0, 0)])
    tokens = np.arange(2, 12, dtype=np.uint16)
    where = target(segments, tokens.copy(), length=np.full(len(segments.key), 3, np.int64))
    parameters = {
        "masked_diffusion": MASKED,
        "uniform_diffusion": UNIFORM,
        "block_diffusion": BLOCKS,
    }[law]
    resolved = {"flip_thresholds": [2**40] * noise.FLIP_STEPS}
    noised = noise.SCHEDULES[law].draw(0, parameters, resolved, ids_of(), where, 0)
    assert where.tokens.tolist() == tokens.tolist()
    assert not where.loss_mask.any()
    assert len(noised.level) == len(segments.key)
    exact = {**MASKED, "exact_count": True, "noise_range": (0.2, 0.3)}
    noise.masked_diffusion(0, exact, {}, ids_of(), where, 0)
    assert not where.loss_mask.any()


@pytest.mark.parametrize("sizes", [[], [0], [5], [0, 0, 5, 0], [3, 9, 0, 0, 1, 40, 0, 2], [10] * 7])
@pytest.mark.parametrize("chunk", [1, 4, 10, 1000])
def test_chunks_hold_each_segment_once(monkeypatch, sizes, chunk):
    monkeypatch.setattr(candidates, "CHUNK_SLOTS", chunk)
    segments = columns([(i, i * 50, n, 0) for i, n in enumerate(sizes)])
    slices = [part for part, _, _ in candidates.chunks(segments)]
    assert [i for part in slices for i in range(len(sizes))[part]] == list(range(len(sizes)))
    assert all(part.stop > part.start for part in slices)


def test_chunks_do_not_show(monkeypatch):
    segments = arange_segments(some_keys(50), 37)
    found = []
    for chunk in (1, 100, 1 << 17):
        monkeypatch.setattr(candidates, "CHUNK_SLOTS", chunk)
        where = target(segments, np.full(50 * 37, 7, np.int32))
        noise.masked_diffusion(0, MASKED, {}, ids_of(), where, 3)
        found.append(where.tokens.tolist())
    assert found[0] == found[1] == found[2]


def test_thresholds_decide_to_the_last_of_forty_bits():
    keys, count = some_keys(300), 64
    mine = [[twin.uniform40(int(key), i, 0) for i in range(count)] for key in keys[:20]]
    for key, values in zip(keys[:20], mine, strict=True):
        for i in (0, 17, 63):
            for limit in (values[i], values[i] + 1):
                below = noise.below(
                    np.array([key]),
                    np.array([count]),
                    np.array([limit], np.uint64),
                    np.array([count]),
                    0,
                )
                assert below.tolist() == [value < limit for value in values]


@pytest.mark.parametrize("equal", [[3, 4], [0, 9], [2, 5, 7]])
def test_an_exact_count_breaks_ties_by_place(monkeypatch, equal):
    word = np.arange(100, 110, dtype=np.uint32)
    word[equal] = 50
    monkeypatch.setattr(noise, "words_of", lambda *_: word)
    segments = columns([(1, 0, 10, 0)])
    for wanted in range(1, 11):
        noised, share = noise._fewest(segments, np.array([wanted / 10 + 1e-9]), None, 0)
        assert share.tolist() == [wanted / 10]
        order = sorted(range(10), key=lambda i: (word[i], i))
        assert np.flatnonzero(noised).tolist() == sorted(order[:wanted])
    allowed = np.ones(10, bool)
    allowed[equal[0]] = False
    noised, share = noise._fewest(segments, np.array([0.12]), allowed, 0)
    assert share.tolist() == [1 / 9]
    assert np.flatnonzero(noised).tolist() == [equal[1]]


@pytest.mark.parametrize(
    ("candidates", "ratio", "expected"), [(20, 0.15, 3), (100, 0.15, 15), (3, 0.15, 1), (9, 1.0, 9)]
)
def test_an_exact_count_takes_the_ratio_as_it_is_given(candidates, ratio, expected):
    """0.15 cut to a multiple of 2⁻²⁴ lies below it, and 20 · 0.15 would give 2."""
    where = target(arange_segments(some_keys(1), candidates), np.full(candidates, 7, np.uint16))
    noise.masked_diffusion(
        0, {**MASKED, "exact_count": True, "noise_range": (ratio, ratio)}, {}, ids_of(), where, 0
    )
    assert where.loss_mask.sum() == expected


EXACT = {**MASKED, "exact_count": True, "noise_range": (0.15, 0.99)}


def test_an_exact_count_weighs_candidates_over_count():
    """A segment's weights sum to its candidates, whatever k is rounded to: what may not be noised
    is none of them."""
    tokens = np.full(60, 7, np.int32)
    tokens[[4, 25]] = MASK  # in the text itself
    may = np.ones(60, np.uint8)
    may[[1, 2, *range(20, 24), *range(50, 60)]] = 0
    segments = columns(
        [(5, 0, 3, 0), (6, 3, 1, 0), (7, 4, 1, 0), (8, 5, 15, 1), (9, 20, 30, 1), (10, 50, 10, 2)]
    )
    where = target(segments, tokens, may)
    noised = noise.masked_diffusion(0, EXACT, {}, ids_of(), where, 0)
    many = [int(where.loss_mask[at : at + n].sum()) for _, at, n, _ in zip(*segments, strict=True)]
    candidates = [1, 1, 0, 15, 25, 0]
    weight = [np.float32(c / k) if k else 1 for c, k in zip(candidates, many, strict=True)]
    assert (
        noised.weight.tolist() == weight
        and many[2] == many[5] == 0
        and many[3] < 15
        and many[4] < 25
    )
    # another level: the count is rounded, and at least one
    assert [
        abs(w - 1 / t) > 1e-3 for w, t in zip(noised.weight[:2], noised.level[:2], strict=True)
    ] == [True, True]
    again = target(segments, np.where(may == 0, 7, np.where(where.loss_mask, 7, where.tokens)), may)
    noise.masked_diffusion(0, EXACT, {}, ids_of(), again, 0)
    assert np.array_equal(again.loss_mask, where.loss_mask)
    quiet = target(segments, np.full(60, 7, np.int32), may)
    assert (
        noise.masked_diffusion(0, {**EXACT, "weighting": "none"}, {}, ids_of(), quiet, 0).weight
        == 1
    ).all()


def test_weights_of_an_exact_count_are_unbiased_in_short_segments():
    """By the level they were not: of 2 candidates at least one is masked, of 3 tokens at level .6
    one and not 1.8."""
    m, n = 4000, 3
    where = target(arange_segments(some_keys(m, 20), n), np.full(m * n, 7, np.uint16))
    noised = noise.masked_diffusion(0, EXACT, {}, ids_of(), where, 0)
    sums = noised.weight * where.loss_mask.reshape(m, n).sum(axis=1)
    assert np.allclose(sums, n, rtol=2.0**-23)


def test_view_scale_counts_the_ids_that_can_be_drawn():
    """Half of the vocabulary is special."""
    vocab, half = 64, list(range(32))
    parameters = {**UNIFORM, "weighting": "view_scale"}
    resolved = {"flip_thresholds": [2**39] * noise.FLIP_STEPS}
    where = target(arange_segments(some_keys(40), 5), np.full(200, 40, np.uint16))
    noised = noise.uniform_diffusion(0, parameters, resolved, ids_of(vocab, half), where, 0)
    step, level = noise.quantised_level(some_keys(40), 0.1, 0.4, noise.FLIP_STEPS, 0)
    assert np.array_equal(noised.weight, (level / (32 * (1 - level) + level)).astype(np.float32))
    assert where.tokens.min() >= 32


def test_gaps_between_segments_keep_their_tokens_and_their_loss():
    segments = columns([(5, 2, 4, 0), (6, 9, 3, 0)])
    tokens, loss_mask = np.arange(2, 16, dtype=np.uint16), np.zeros(14, np.uint8)
    loss_mask[[0, 6, 7, 13]] = 1
    where = noise.Target(segments, np.zeros(2, np.int64), segments[2], None, tokens, loss_mask)
    noise.masked_diffusion(0, {**MASKED, "noise_range": (1.0, 1.0)}, {}, ids_of(), where, 0)
    assert tokens.tolist() == [2, 3, MASK, MASK, MASK, MASK, 8, 9, 10, MASK, MASK, MASK, 14, 15]
    assert loss_mask.tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1]


# Distributions


def test_weight_times_masked_has_mean_one():
    m, n = 4000, 512
    where = target(arange_segments(some_keys(m, 1), n), np.full(m * n, 7, np.uint16))
    noised = noise.masked_diffusion(0, MASKED, {}, ids_of(), where, 0)
    masked = where.loss_mask.reshape(m, n)
    weight = noised.weight.astype(np.float64)
    mean = float((weight * masked.mean(axis=1)).mean())
    sigma = math.sqrt(float((weight - 1).sum() / n)) / m  # of a segment's mean: √((1/p − 1) / n)
    assert abs(mean - 1) < min(0.01, 5 * sigma)
    assert np.array_equal(where.tokens.reshape(m, n) == MASK, masked)
    level = noised.level.astype(np.float64)
    assert np.array_equal(noised.weight, (1 / ((1 - 1e-3) * level + 1e-3)).astype(np.float32))
    assert abs(level.mean() - 0.5) < 5 * math.sqrt(1 / 12 / m)


@pytest.mark.parametrize("n", [0.1585, 0.25, 0.5])
def test_flips_follow_the_integral(n):
    vocab, m, length = 50368, 200, 1000
    special = (0, 1, vocab - 1)
    ids = ids_of(vocab, special, vocab - 1)
    made = resolve(
        {"schedule": "linear", "noise_range": (n, n)},
        Ids(vocab, 0, 1, 1, -1, np.zeros(0, np.int32), special=special),
    )
    wanted = float(flip_probability(mu_of("linear", np.array([n])), vocab - 3)[0])
    assert abs(made["flip_rate"] - wanted) < 1e-12
    where = target(arange_segments(some_keys(m, 2), length), np.full(m * length, 7, np.uint16))
    noise.uniform_diffusion(0, {**UNIFORM, "noise_range": (n, n)}, made, ids, where, 0)
    flips = int((where.tokens != 7).sum())
    assert abs(flips - m * length * wanted) < 4 * math.sqrt(m * length * wanted * (1 - wanted))
    assert where.loss_mask.all()


def test_wrong_tokens_are_uniform_over_the_ordinary_ids_and_never_special():
    m, length = 100, 2000
    for original in (7, 0):  # an ordinary one, which has 36 others, and a special one, which has 37
        where = target(
            arange_segments(some_keys(m, 3), length), np.full(m * length, original, np.uint16)
        )
        resolved = {"flip_thresholds": [2**40] * noise.FLIP_STEPS}
        noise.uniform_diffusion(0, UNIFORM, resolved, ids_of(), where, 0)
        found = np.bincount(where.tokens, minlength=VOCAB)
        others = [i for i in range(VOCAB) if i not in SPECIAL and i != original]
        assert found.sum() == found[others].sum()
        expected = m * length / len(others)
        assert np.abs(found[others] - expected).max() < 5 * math.sqrt(expected)


def test_replaced_tokens_come_in_the_shares_asked_for():
    m, length = 200, 1000
    where = target(arange_segments(some_keys(m, 4), length), np.full(m * length, 7, np.uint16))
    parameters = {**MASKED, "noise_range": (0.15, 0.15), "epsilon": 0.0, "replace": (0.8, 0.1, 0.1)}
    noise.masked_diffusion(0, parameters, {}, ids_of(), where, 0)
    noised = int(where.loss_mask.sum())
    assert abs(noised - 0.15 * m * length) < 5 * math.sqrt(0.15 * 0.85 * m * length)
    after = where.tokens[where.loss_mask != 0]
    ordinary = VOCAB - len(SPECIAL)
    shares = {
        MASK: 0.8,
        7: 0.1 + 0.1 / ordinary,
        **{i: 0.1 / ordinary for i in range(2, 39) if i != 7},
    }
    for token, share in shares.items():
        assert abs(int((after == token).sum()) - share * noised) < 5 * math.sqrt(
            share * (1 - share) * noised
        )
    assert not np.isin(after, [0, 1]).any()
    assert (where.tokens[where.loss_mask == 0] == 7).all()


@pytest.mark.parametrize("many_in_row", [8, 13])
def test_stratified_levels_vary_less_between_rows(many_in_row):
    """Means of m levels at even distances have the variance 1 / 12 m², those of independent ones 1
    / 12 m."""
    rows = 400
    keys, row = some_keys(rows * many_in_row, 5), np.repeat(np.arange(rows), many_in_row)
    counts = np.full(len(keys), 2)
    segments = noise.Candidates(keys, np.arange(len(keys)) * 2, counts, row)
    means = {}
    for stratified in (False, True):
        level = noise.levels(segments, 0.0, 1.0, stratified, 3, 0)
        assert ((level >= 0) & (level < 1)).all()
        assert abs(level.mean() - 0.5) < 5 * math.sqrt(1 / 12 / rows)
        means[stratified] = level.reshape(rows, many_in_row).mean(axis=1)
    deviation = 5 * math.sqrt(2 / rows)  # of a variance; a little above a uniform's own
    assert abs(means[True].var() * 12 * many_in_row**2 - 1) < deviation
    assert abs(means[False].var() * 12 * many_in_row - 1) < deviation
    level = level.reshape(rows, many_in_row)
    gaps = np.diff(np.sort(level, axis=1), axis=1)
    assert np.abs(gaps - 1 / many_in_row).max() < 2.0**-22  # one level in each part of the circle
    assert np.abs(np.corrcoef(level[:, 0], np.arange(rows))[0, 1]) < 5 / math.sqrt(rows)
    by_place = level.mean(axis=0)  # no place in the row has a level of its own
    assert np.abs(by_place - 0.5).max() < 5 * math.sqrt(1 / 12 / rows)


def test_stratified_levels_depend_on_their_row_alone():
    keys = some_keys(9, 6)
    row = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2])
    segments = noise.Candidates(keys, np.arange(9), np.ones(9, np.int64), row)
    whole = noise.levels(segments, 0.0, 1.0, True, 1, 7)
    for r in (0, 1, 2):
        own = noise.Candidates(*(column[row == r] for column in segments))
        assert noise.levels(
            own._replace(row=np.full(len(own.key), 40)), 0.0, 1.0, True, 1, 7
        ).tolist() == (whole[row == r].tolist())


@pytest.mark.parametrize("stratified", [False, True])
def test_levels_are_uncorrelated_with_length(stratified):
    m = 4000
    counts = 1 + (words(np.uint64(9), 0, np.arange(m)) % np.uint32(500)).astype(np.int64)
    segments = noise.Candidates(
        some_keys(m, 7), np.cumsum(counts) - counts, counts, np.arange(m) // 8
    )
    level = noise.levels(segments, 0.0, 1.0, stratified, 0, 0)
    assert abs(np.corrcoef(level, counts)[0, 1]) < 4 / math.sqrt(m)


def test_block_levels_lie_in_their_range_and_weigh_their_inverse():
    m, length, block = 300, 100, 32
    where = target(arange_segments(some_keys(m, 8), length), np.full(m * length, 7, np.uint16))
    blocks, level, weight = noise.block_diffusion(
        0, {**BLOCKS, "block_length": block}, {}, ids_of(), where, 0
    ).blocks
    assert blocks.count.tolist() == [4] * m
    level = level.astype(np.float64)
    assert ((level > 0.3 - 2.0**-24) & (level < 0.8)).all()
    assert np.array_equal(weight, (1 / level).astype(np.float32))
    assert np.array_equal(level * 2**24, np.floor(level * 2**24))
    slots = np.array([32, 32, 32, 4] * m)
    masked = np.add.reduceat(where.loss_mask.astype(np.int64), np.cumsum(slots) - slots)
    assert abs(float((masked / level).sum()) / (m * length) - 1) < 5 * math.sqrt(
        float((slots * (1 / level - 1)).sum())
    ) / (m * length)
    chance = np.abs(masked - slots * level) / np.sqrt(slots * level * (1 - level))
    assert chance.max() < 5
    assert abs(level.mean() - 0.55) < 5 * math.sqrt(0.25 / 12 / len(level))


def test_fault_20_a_mask_id_in_the_text_is_not_trained_on():
    where = target(arange_segments(some_keys(40, 9), 50), np.full(2000, MASK, np.uint16))
    noise.masked_diffusion(0, {**MASKED, "noise_range": (0.3, 0.3)}, {}, ids_of(), where, 0)
    assert (where.tokens == MASK).all()
    assert not where.loss_mask.any()


def test_fault_05_segments_and_epochs_have_noise_of_their_own():
    keys, n = some_keys(2, 10), 400
    found = []
    for epoch in (0, 1):
        where = target(arange_segments(keys, n), np.full(2 * n, 7, np.uint16))
        noise.masked_diffusion(
            0, {**MASKED, "noise_range": (0.5, 0.5), "epsilon": 0.0}, {}, ids_of(), where, epoch
        )
        found += [where.loss_mask[:n].astype(int), where.loss_mask[n:].astype(int)]
    for i in range(4):
        for j in range(i):
            assert abs(int((found[i] == found[j]).sum()) - n / 2) < 5 * math.sqrt(n / 4)


@pytest.mark.parametrize("law", ["masked_diffusion", "uniform_diffusion", "block_diffusion"])
def test_every_pattern_of_noise_is_as_likely_over_segments_and_over_epochs(law):
    n, at_half, wide = 4, {"noise_range": (0.5, 0.5)}, {"noise_range": (0.25, 0.75)}
    defaults = {
        "masked_diffusion": {**MASKED, "epsilon": 0.0},
        "uniform_diffusion": {**UNIFORM, "loss_on": "corrupted"},
        "block_diffusion": {**BLOCKS, "block_length": n},
    }[law]

    def drawn(keys, epoch, parameters):
        """(a number for each pattern of 4 candidates, a place of 16 for each level)."""
        parameters = {**defaults, **parameters}
        where = target(arange_segments(keys, n), np.full(len(keys) * n, 7, np.uint16))
        ids = Ids(VOCAB, 0, 0, 0, MASK, np.zeros(0, np.int32), special=tuple(SPECIAL))
        resolved = resolve(parameters, ids) if law == "uniform_diffusion" else {}
        noised = noise.SCHEDULES[law].draw(0, parameters, resolved, ids_of(), where, epoch)
        level = noised.level if noised.blocks is None else noised.blocks[1]
        return where.loss_mask.reshape(-1, n) @ (1 << np.arange(n)), ((level - 0.25) * 32).astype(
            int
        )

    def check(found):
        assert not is_improbable(
            np.bincount(np.concatenate(found), minlength=16), np.full(16, sum(map(len, found)) / 16)
        )

    keys = some_keys(60_000, 12)
    for epoch in (0, 5):
        check([drawn(keys, epoch, at_half)[0]])
        check([drawn(keys, epoch, wide)[1]])
    check([drawn(keys[:1], epoch, at_half)[0] for epoch in range(1, 1001)])
    check([drawn(keys[:1], epoch, wide)[1] for epoch in range(1, 1001)])


def test_neighbouring_candidates_are_independent():
    m, n = 500, 512
    where = target(arange_segments(some_keys(m, 11), n), np.full(m * n, 7, np.uint16))
    noise.masked_diffusion(
        0, {**MASKED, "noise_range": (0.25, 0.25), "epsilon": 0.0}, {}, ids_of(), where, 0
    )
    masked = where.loss_mask.reshape(m, n).astype(np.float64)
    for distance in (1, 2, 4, 16):
        both = (masked[:, distance:] * masked[:, :-distance]).mean()
        assert abs(both - 1 / 16) < 5 * math.sqrt(2 / 16 * 15 / 16 / masked.size)
    by_place = masked.mean(axis=0)
    assert np.abs(by_place - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / m)


def test_an_exact_count_is_uniform_over_the_places():
    m, n = 3000, 20
    where = target(arange_segments(some_keys(m, 12), n), np.full(m * n, 7, np.uint16))
    noise.masked_diffusion(
        0, {**MASKED, "exact_count": True, "noise_range": (0.3, 0.3)}, {}, ids_of(), where, 0
    )
    masked = where.loss_mask.reshape(m, n)
    assert (masked.sum(axis=1) == 6).all()
    assert np.abs(masked.mean(axis=0) - 0.3).max() < 5 * math.sqrt(0.21 / m)
