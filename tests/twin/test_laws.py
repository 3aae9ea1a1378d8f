"""The twins against golden/cases.json, the worked examples of the design, and by enumeration."""

import json
from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.twin import chance, cutting, objectives, shard
from tests.twin.objectives import span_corruption

pytestmark = pytest.mark.long

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "cases.json").read_text())["cases"]


def golden(fn, with_input=None):
    """Parametrizes by the cases of `fn`, or by those of them that have the input `with_input`."""
    cases = [
        case
        for case in GOLDEN
        if case["fn"] == fn and (with_input is None or with_input in case["inputs"])
    ]
    found = [pytest.param(case["inputs"], case["expected"], id=case["id"]) for case in cases]
    assert found, f"no golden case is called {fn}"
    return pytest.mark.parametrize("inputs, expected", found)


def compositions(n, k):
    for cuts in combinations(range(1, n), k - 1):
        edges = [0, *cuts, n]
        yield [edges[i + 1] - edges[i] for i in range(k)]


# ---- spans
# -----------------------------------------------------------------------------------------------------------


@golden("span_counts")
def test_span_counts(inputs, expected):
    noise, n_spans = span_corruption.span_counts(
        inputs["length"], inputs["density"], inputs["mean_span"]
    )
    text = max(inputs["length"], 2) - noise
    assert (noise, n_spans, text) == (
        expected["num_noise"],
        expected["num_spans_clamped"],
        expected["num_nonnoise"],
    )


@golden("span_counts_f32_vs_f64")
def test_span_counts_are_those_of_float64(inputs, expected):
    noise, n_spans = span_corruption.span_counts(
        inputs["length"], inputs["density"], inputs["mean_span"]
    )
    assert [noise, n_spans, inputs["length"] - noise] == expected["f64"] != expected["f32"]


@golden("infeasible_spans")
def test_more_spans_than_text_are_clamped(inputs, expected):
    noise, n_spans = span_corruption.span_counts(
        inputs["length"], inputs["density"], inputs["mean_span"]
    )
    assert (noise, n_spans) == (expected["num_noise"], expected["required_spans_after_clamp"])


def test_span_counts_round_half_to_even_and_obey_max_spans():
    assert span_corruption.span_counts(5, 0.5, 1) == (2, 2)
    assert span_corruption.span_counts(7, 0.5, 1) == (4, 3)
    assert span_corruption.span_counts(100, 0.5, 4) == (50, 12)
    assert span_corruption.span_counts(4096, 0.15, 3) == (614, 205)
    assert span_corruption.span_counts(4096, 0.15, 3, max_spans=100) == (614, 100)
    assert span_corruption.span_counts(3071, 0.5, 3)[1] == 512


@golden("mask_from_spans")
def test_mask_from_spans(inputs, expected):
    assert (
        span_corruption.mask_from_spans(inputs["nonnoise_spans"], inputs["noise_spans"])
        == expected["mask"]
    )


@golden("max_raw_length_for_budget")
def test_max_tokens_for(inputs, expected):
    n = span_corruption.max_tokens_for(inputs["budget"], inputs["density"], inputs["mean_span"])
    assert n == expected["max_raw_len"]
    lengths = [
        1 + m + 2 * span_corruption.span_counts(m, inputs["density"], inputs["mean_span"])[1]
        for m in (n, n + 1)
    ]
    assert lengths == [expected["len_at_max"], expected["len_at_max_plus_1"]]


def test_max_tokens_for_the_design_s_examples():
    assert [
        span_corruption.max_tokens_for(512, d, m) for d, m in [(0.15, 3), (0.5, 3), (0.15, 32)]
    ] == [465, 383, 507]
    assert span_corruption.max_tokens_for(4096, 0.5, 3) == 3071
    assert span_corruption.max_tokens_for(3, 0.15, 3) == 0
    assert span_corruption.max_tokens_for(5, 0.15, 3) == 2


def test_composition_takes_each_outcome_equally_often_over_all_draws():
    for n in range(1, 9):
        for k in range(1, n + 1):
            seen = Counter()
            for draws in product(*(range(n - k + 1 + i) for i in range(k - 1))):
                seen[
                    tuple(
                        span_corruption.composition_from(n, k, lambda i, j, draws=draws: draws[i])
                    )
                ] += 1
            assert set(seen) == {tuple(parts) for parts in compositions(n, k)}
            assert len(set(seen.values())) == 1


def binomial_bounds(trials, p, tail):
    """Least and greatest counts that are not in a tail of less than `tail`, exactly."""
    q = Fraction(1) - p
    terms = [
        comb(trials, i)
        * p.numerator**i
        * q.numerator ** (trials - i)  # over p.denominator ** trials
        for i in range(trials + 1)
    ]
    limit = tail * p.denominator**trials
    low, total = 0, terms[0]
    while total < limit:
        low += 1
        total += terms[low]
    high, total = trials, terms[-1]
    while total < limit:
        high -= 1
        total += terms[high]
    return low, high


@pytest.mark.parametrize("n, k", [(4, 2), (5, 3), (6, 2), (6, 4), (7, 3)])
@pytest.mark.parametrize("purpose", [chance.NOISE_SPANS, chance.TEXT_SPANS])
def test_composition_is_uniform_over_keys(n, k, purpose):
    keys = 1500
    seen = Counter(
        tuple(span_corruption.composition(n, k, chance.text_key("composition", n, k, i), purpose))
        for i in range(keys)
    )
    low, high = binomial_bounds(keys, Fraction(1, comb(n - 1, k - 1)), Fraction(1, 10**6))
    assert set(seen) == {tuple(parts) for parts in compositions(n, k)}
    assert all(low <= count <= high for count in seen.values()), (low, high, seen)


def test_rolled_masks_are_the_uniform_rotation():
    for n in range(2, 9):
        for noise in range(1, n):
            for k in range(1, min(noise, n - noise) + 1):
                rolled, rotations = Counter(), Counter()
                for noise_spans, text_spans in product(
                    compositions(noise, k), compositions(n - noise, k)
                ):
                    base = span_corruption.mask_from_spans(text_spans, noise_spans)
                    assert len(span_corruption.cutting_offsets(base)) == noise - k
                    for r in range(n):
                        mask = span_corruption.rolled(base, r)
                        assert len(span_corruption.runs(mask)) == k + (r < noise - k)
                        rolled[tuple(mask)] += 1
                        rotations[tuple(span_corruption.rotated(base, r))] += 1
                assert rolled == rotations


def test_span_mask_without_roll_begins_with_text_and_ends_in_noise():
    for seed in range(30):
        mask = span_corruption.span_mask(40, 0.3, 3, None, False, chance.text_key(seed))
        assert (not mask[0]) and mask[-1]
        assert (sum(mask), len(span_corruption.runs(mask))) == span_corruption.span_counts(
            40, 0.3, 3
        )


def test_one_span_is_the_last_noise_tokens():
    noise, n_spans = span_corruption.span_counts(20, 0.15, 3)
    assert n_spans == 1
    assert (
        span_corruption.span_mask(20, 0.15, 3, None, False, 77)
        == [False] * (20 - noise) + [True] * noise
    )


def test_span_mask_rolls_by_the_drawn_number():
    cut = 0
    for seed in range(200):
        key = chance.text_key("roll", seed)
        n = 10 + seed % 7
        mask = span_corruption.span_mask(n, 0.4, 2, None, True, key)
        noise, n_spans = span_corruption.span_counts(n, 0.4, 2)
        is_cut = chance.integers(key, chance.ROLL, 0, n) < noise - n_spans
        assert sum(mask) == noise and len(span_corruption.runs(mask)) == n_spans + is_cut
        assert (mask[0] and mask[-1]) == is_cut
        cut += is_cut
    assert 0 < cut < 200


# ---- objectives
# ------------------------------------------------------------------------------------------------------


@golden("sentinels", with_input="levanter_sentinels")
def test_fault_8_9_sentinels_follow_the_runs_in_order(inputs, expected):
    if not any(inputs["mask"]):
        with pytest.raises(ValueError, match="without noise"):
            span_corruption.corrupted(
                inputs["tokens"], inputs["mask"], inputs["levanter_sentinels"]
            )
        return
    found = span_corruption.corrupted(
        inputs["tokens"], inputs["mask"], inputs["levanter_sentinels"]
    )
    assert found == (expected["levanter_inputs"], expected["levanter_targets"])
    assert span_corruption.reconstruct(*found, inputs["levanter_sentinels"]) == inputs["tokens"]


def test_corrupted_is_the_design_s_example():
    tokens, mask = list(range(10, 20)), [int(bit) for bit in "0011000111"]
    inputs, targets = span_corruption.corrupted(tokens, mask, [100, 101])
    assert inputs + targets == [10, 11, 100, 14, 15, 16, 101, 100, 12, 13, 101, 17, 18, 19]
    assert len(inputs) == 7
    with pytest.raises(ValueError, match="sentinels"):
        span_corruption.corrupted(tokens, mask, [100])


@golden("ul2r_segment")
def test_span_corruption_row(inputs, expected):
    body_inputs, body_targets = span_corruption.corrupted(
        inputs["tokens"], inputs["mask"], inputs["sentinels"]
    )
    slots = [inputs["task_token"], *body_inputs, *body_targets]
    prefix = 1 + len(body_inputs)
    segment = (
        slots,
        objectives.loss_of(len(slots), prefix),
        objectives.next_tokens(slots, inputs["pad_id"]),
    )
    row = shard.row_arrays([segment], inputs["row_len"], inputs["pad_id"])
    assert prefix == expected["inputs_len"] == sum(expected["input_mask"])
    assert row["tokens"] == expected["row_tokens"]
    assert row["segment_ids"] == [number + 1 for number in expected["segment_ids"]]
    assert row["loss_mask"] == expected["loss_mask"]
    assert sum(row["loss_mask"]) == expected["num_loss_tokens"]
    assert row["position_ids"] == expected["position_ids"]
    assert row["cu_seqlens"] == expected["cu_seqlens"]


@golden("loss_mask_shifted")
def test_fault_2_11_loss_stays_inside_segments_and_ignores_values(inputs, expected):
    loss = []
    for number in sorted(set(inputs["segment_ids"])):
        slots = [i for i, other in enumerate(inputs["segment_ids"]) if other == number]
        loss += objectives.loss_of(len(slots), sum(inputs["input_mask"][i] for i in slots))
    assert loss == expected["correct"]


@golden("prompt_completion_loss_mask")
def test_loss_of_a_prompt_and_its_completion(inputs, expected):
    assert objectives.loss_of(inputs["num_ids"], inputs["prompt_length"]) == expected["loss_mask"]


def test_causal_segment():
    facts = {"objective": "causal", "bos": 1, "mode": 3, "eos": 2, "pad": 9}
    slots, prefix, loss, labels = objectives.segment([50, 51, 52], facts)
    assert slots == [1, 3, 50, 51, 52, 2]
    assert prefix == 0
    assert loss == [1, 1, 1, 1, 1, 0]
    assert labels == [3, 50, 51, 52, 2, 9]


def test_too_short_has_no_mode_token():
    facts = {"objective": "too_short", "bos": 1, "mode": 3, "eos": 2}
    assert objectives.segment([50], facts) == ([1, 50, 2], 0, [1, 1, 0], [50, 2, 0])


@pytest.mark.parametrize("sentinel", [False, True])
def test_prefix_lm_trains_what_follows_the_pivot(sentinel):
    pivots = set()
    for seed in range(60):
        key = chance.text_key("pivot", seed)
        facts = {
            "objective": "prefix_lm",
            "bos": 1,
            "mode": 3,
            "eos": 2,
            "key": key,
            "parameters": {"sentinel": sentinel, "sentinels": [100, 101]},
        }
        slots, prefix, loss, labels = objectives.segment([50, 51, 52, 53], facts)
        pivot = prefix - 2
        pivots.add(pivot)
        assert slots == [
            1,
            3,
            *[50, 51, 52, 53][:pivot],
            *([100] if sentinel else []),
            *range(50 + pivot, 54),
            2,
        ]
        assert [labels[t] for t, trained in enumerate(loss) if trained] == slots[prefix:]
    assert pivots == {1, 2, 3}  # fault 7: the pivot reaches the end


objective_facts = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(["causal", "prefix_lm", "span_corruption", "too_short"]),
        "bos": st.sampled_from([None, 1]),
        "mode": st.sampled_from([None, 3]),
        "eos": st.sampled_from([None, 2]),
        "key": st.integers(0, 2**64 - 1),
        "parameters": st.fixed_dictionaries(
            {
                "sentinel": st.booleans(),
                "sentinels": st.just(list(range(1000, 1200))),
                "noise_density": st.sampled_from([0.15, 0.5, 0.9]),
                "mean_span_length": st.sampled_from([1, 3, 8]),
                "random_roll": st.booleans(),
                "max_spans": st.sampled_from([None, 1, 4]),
            }
        ),
    }
)


@given(st.integers(3, 90), objective_facts)
@settings(max_examples=200, deadline=None)
def test_law_is_the_length_and_content_comes_back(n, facts):
    tokens = [10 + 7 * i % 40 for i in range(n)]
    slots, prefix, loss, labels = objectives.segment(tokens, facts)
    assert len(slots) == len(loss) == len(labels) == objectives.law(facts["objective"], n, facts)
    assert len(slots) <= objectives.law(facts["objective"], n, {**facts, "key": None})
    assert objectives.content(slots, prefix, facts) == tokens
    trained = [labels[t] for t in range(len(slots)) if loss[t]]
    assert trained == slots[max(prefix, 1) :]


# ---- cutting
# ---------------------------------------------------------------------------------------------------------


def recipe(**changed):
    fields = {
        "seq_length": 64,
        "min_tokens": 1,
        "max_tokens": 0,
        "long": "split",
        "append_eos": True,
        "prepend_bos": False,
        "max_segments": 0,
        "pad": 1,
        "tasks": [{"objective": "causal", "weight": 1}],
        "allowed": {0},
        "key": lambda start: chance.segment_key(5, 0, 0, start),
    }
    assert changed.keys() <= fields.keys()
    return {**fields, **changed}


SPAN_TASK = {
    "objective": "span_corruption",
    "weight": 1,
    "mode": 3,
    "parameters": {"noise_density": 0.15, "mean_span_length": 3, "sentinels": None},
}


def span_task(**parameters):
    return {**SPAN_TASK, "parameters": {**SPAN_TASK["parameters"], **parameters}}


def test_cut_takes_all_that_is_left_if_it_fits_with_eos():
    assert cutting.cut(63, recipe()) == [(0, 63, 0, False, True)]
    assert cutting.cut(64, recipe()) == [(0, 61, 0, False, False), (61, 3, 0, False, True)]
    assert cutting.cut(64, recipe(append_eos=False)) == [(0, 64, 0, False, False)]
    assert cutting.cut(64 + 63, recipe()) == [(0, 64, 0, False, False), (64, 63, 0, False, True)]
    assert cutting.cut(100, recipe(prepend_bos=True)) == [
        (0, 63, 0, True, False),
        (63, 37, 0, False, True),
    ]
    assert cutting.cut(65, recipe(min_tokens=20)) == [
        (0, 45, 0, False, False),
        (45, 20, 0, False, True),
    ]
    assert cutting.cut(10, recipe(max_tokens=6)) == [
        (0, 5, 0, False, False),
        (5, 5, 0, False, True),
    ]


def test_cut_sends_fewer_than_three_tokens_to_too_short():
    assert cutting.cut(0, recipe()) == []
    assert cutting.cut(2, recipe(prepend_bos=True)) == [(0, 2, 1, True, True)]
    assert cutting.cut(3, recipe()) == [(0, 3, 0, False, True)]
    assert cutting.cut(3, recipe(min_tokens=4)) == []


def test_cut_truncates_and_drops():
    assert cutting.cut(63, recipe(long="truncate")) == [(0, 63, 0, False, True)]
    assert cutting.cut(64, recipe(long="truncate")) == [(0, 64, 0, False, False)]
    assert cutting.cut(900, recipe(long="truncate")) == [(0, 64, 0, False, False)]
    assert cutting.cut(63, recipe(long="drop")) == [(0, 63, 0, False, True)]
    assert cutting.cut(64, recipe(long="drop")) == []


def test_cut_refuses_a_tail_that_capacity_cannot_leave():
    with pytest.raises(ValueError, match="a tail needs 100"):
        cutting.cut(101, recipe(min_tokens=100))


def test_capacity_is_max_tokens_for():
    for seq_length, density, mean in [
        (512, 0.15, 3),
        (512, 0.5, 3),
        (512, 0.15, 32),
        (128, 0.15, 3),
    ]:
        task = span_task(noise_density=density, mean_span_length=mean)
        found = cutting.capacity(recipe(seq_length=seq_length, tasks=[task]), 0, False, False)
        assert found == span_corruption.max_tokens_for(seq_length, density, mean)


def test_inner_pieces_divide_the_row_that_sentinels_or_max_tokens_leave():
    t5 = {**span_task(sentinels=list(range(1000, 1100))), "mode": None}
    facts = recipe(seq_length=4096, tasks=[t5])
    assert cutting.capacity(facts, 0, False, False) == 2009  # 2209 slots
    assert [cutting.inner_capacity(facts, 0, bos) for bos in (False, True)] == [1862, 1861]
    ended = recipe(seq_length=4096, tasks=[t5], append_eos="segment")
    assert [cutting.inner_capacity(ended, 0, bos) for bos in (False, True)] == [1861, 1860]
    assert cutting.inner_capacity(recipe(seq_length=512, max_tokens=200), 0, False) == 170
    assert (
        cutting.inner_capacity(recipe(seq_length=512, max_tokens=200, max_segments=2), 0, False)
        == 200
    )
    assert cutting.inner_capacity(recipe(seq_length=512, max_tokens=200, pad=128), 0, False) == 200
    assert cutting.inner_capacity(recipe(seq_length=512, max_tokens=480), 0, False) == 256
    assert cutting.inner_capacity(recipe(seq_length=512, max_tokens=481), 0, False) == 481
    assert (
        cutting.inner_capacity(recipe(seq_length=512, max_tokens=200, min_tokens=100), 0, False)
        == 199
    )
    assert (
        cutting.inner_capacity(recipe(seq_length=512, max_tokens=200, long="truncate"), 0, False)
        == 200
    )


def test_capacity_keeps_to_the_sentinels():
    def of(**parameters):
        return cutting.capacity(
            recipe(seq_length=4096, tasks=[span_task(**parameters)]), 0, False, False
        )

    few = list(range(1000, 1010))
    n = of(sentinels=few)
    assert [span_corruption.span_counts(m, 0.15, 3)[1] for m in (n, n + 1)] == [10, 11]
    n = of(sentinels=few, random_roll=True)
    assert [span_corruption.span_counts(m, 0.15, 3)[1] for m in (n, n + 1)] == [9, 10]
    assert of(sentinels=few, too_many_spans="lower") == 4096 - 1 - 2 * 10
    assert of(sentinels=few, too_many_spans="lower", random_roll=True) == 4096 - 1 - 2 * (9 + 1)


def test_tasks_are_drawn_by_weight_among_the_allowed():
    tasks = [{"objective": "causal", "weight": w} for w in (0.25, 0.125, 0.125, 0.5)]
    keys = [chance.text_key("task", i) for i in range(1500)]
    for allowed in ({0, 1, 2, 3}, {1, 3}, {2}):
        seen = Counter(cutting.draw_task(key, tasks, allowed) for key in keys)
        total = sum(Fraction(tasks[i]["weight"]) for i in allowed)
        assert set(seen) == allowed
        for i in allowed:
            low, high = binomial_bounds(
                len(keys), Fraction(tasks[i]["weight"]) / total, Fraction(1, 10**6)
            )
            assert low <= seen[i] <= high


MIX = [
    {"objective": "causal", "weight": 1.0, "mode": None},
    {
        "objective": "prefix_lm",
        "weight": 0.5,
        "mode": 3,
        "parameters": {"sentinel": True, "sentinels": [1000]},
    },
    span_task(random_roll=True, sentinels=list(range(1000, 1008))),
    span_task(noise_density=0.5, sentinels=list(range(1000, 1005)), too_many_spans="lower"),
]


@given(
    n_tokens=st.integers(1, 400),
    seq_length=st.sampled_from([32, 64, 128]),
    min_tokens=st.integers(1, 6),
    max_tokens=st.sampled_from([0, 15, 40]),
    append_eos=st.sampled_from([True, False, "segment"]),
    prepend_bos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, deadline=None)
def test_fault_4_6_cut_pieces_tile_the_document_and_fit_after_corruption(
    n_tokens, seq_length, min_tokens, max_tokens, append_eos, prepend_bos, seed
):
    facts = recipe(
        seq_length=seq_length,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        append_eos=append_eos,
        prepend_bos=prepend_bos,
        tasks=MIX,
        allowed={0, 1, 2, 3},
        key=lambda start: chance.segment_key(seed, 0, 0, start),
    )
    segments = cutting.cut(n_tokens, facts)
    assert (segments == []) == (n_tokens < min_tokens)
    at = 0
    for start, n, task, bos, eos in segments:
        last = start + n == n_tokens
        assert (
            start == at
            and bos == (prepend_bos and start == 0)
            and eos == (append_eos == "segment" or (append_eos and last))
        )
        assert (task == len(MIX)) == (n < 3)
        assert len(segments) == 1 or n >= (max(3, min_tokens) if last else 3)
        at += n
        if n >= 3:
            assert not max_tokens or n <= max_tokens
            known = cutting.segment_facts(MIX[task], bos=1 if bos else None, eos=2 if eos else None)
            slots, *_ = objectives.segment(list(range(n)), {**known, "key": facts["key"](start)})
            assert len(slots) <= seq_length
    assert at == (n_tokens if segments else 0)


# ---- packing
# ---------------------------------------------------------------------------------------------------------


@golden("pack_documents")
def test_next_fit(inputs, expected):
    if "error" in expected:
        with pytest.raises(ValueError, match="length 9 at position 1"):
            cutting.pack(inputs["lengths"], inputs["max_length"], "next_fit")
        return
    found, _ = cutting.pack(
        inputs["lengths"], inputs["max_length"], "next_fit", inputs["max_segments"] or 0
    )
    assert found == [
        row for row, (begin, end) in enumerate(expected["ranges"]) for _ in range(begin, end)
    ]
    fill = [sum(inputs["lengths"][begin:end]) for begin, end in expected["ranges"]]
    assert fill == expected["fill"]


def test_packing_examples():
    assert cutting.pack([5, 3, 4, 6, 2], 8, "next_fit") == ([0, 0, 1, 2, 2], [0, 5, 0, 0, 6])
    assert cutting.pack([5, 4, 3, 4, 8], 8, "first_fit") == ([0, 1, 0, 1, 2], [0, 0, 5, 4, 0])
    assert cutting.pack([5, 3, 4, 6, 2], 8, "best_fit") == ([1, 1, 2, 0, 0], [0, 5, 0, 0, 6])
    assert cutting.pack([], 8, "best_fit") == ([], [])
    for length in (0, 9):
        with pytest.raises(ValueError, match="at position 1 is not in 1 … 8"):
            cutting.pack([3, length], 8, "best_fit")


def test_best_fit_prefers_the_row_that_reached_its_fill_last():
    # Rows 0 and 1 are both at 6: the first 2 goes to row 1, which came there last.
    assert cutting.pack([6, 6, 2, 2, 2], 8, "best_fit") == ([0, 1, 1, 0, 2], [0, 0, 6, 6, 0])
    # The row just used is the fullest until it is full.
    assert cutting.pack([4, 4, 1, 1, 1], 6, "best_fit") == ([0, 1, 1, 1, 0], [0, 0, 4, 5, 4])


def test_max_segments_limits_every_algorithm():
    for algorithm in ("best_fit", "first_fit", "next_fit"):
        assert cutting.pack([1, 1, 1, 1, 1], 8, algorithm, 2)[0] == [0, 0, 1, 1, 2]


@given(
    st.lists(st.integers(1, 16), max_size=60),
    st.sampled_from(["best_fit", "first_fit", "next_fit"]),
)
@settings(max_examples=100, deadline=None)
def test_rows_are_numbered_by_creation_and_filled_without_holes(lengths, algorithm):
    found, offsets = cutting.pack(lengths, 16, algorithm)
    fill = Counter()
    for i in sorted(range(len(lengths)), key=lambda i: (found[i], offsets[i])):
        assert offsets[i] == fill[found[i]]
        fill[found[i]] += lengths[i]
        assert fill[found[i]] <= 16
    assert sorted(fill) == list(range(len(fill)))


# ---- rows
# ------------------------------------------------------------------------------------------------------------


def causal_segments(documents, pad=0):
    found = [
        objectives.segment(document, {"objective": "causal", "pad": pad}) for document in documents
    ]
    return [(slots, loss, labels) for slots, _, loss, labels in found]


@golden("pack_row")
def test_row_arrays(inputs, expected):
    row = shard.row_arrays(causal_segments(inputs["docs"]), inputs["row_len"], 0)
    assert row["tokens"] == expected["tokens"]
    assert row["segment_ids"] == expected["segment_ids_1based"]
    assert row["position_ids"] == expected["position_ids"]
    assert row["cu_seqlens"] == expected["cu_seqlens"]
    assert row["cu_seqlens_padded"] is None
    assert max(np.diff(row["cu_seqlens"])) == expected["max_seqlen"]


def test_fault_1_3_row_arrays_with_padded_segments():
    row = shard.row_arrays(
        causal_segments([[5, 6, 7], [8, 9], [1, 2, 3, 4]], pad=255), 16, 255, pad_seq_to_mult=4
    )
    assert row["tokens"] == [5, 6, 7, 255, 8, 9, 255, 255, 1, 2, 3, 4, 255, 255, 255, 255]
    assert row["labels"] == [6, 7, 255, 255, 9, 255, 255, 255, 2, 3, 4, 255, 255, 255, 255, 255]
    assert row["loss_mask"] == [1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert row["segment_ids"] == [1, 1, 1, 0, 2, 2, 0, 0, 3, 3, 3, 3, 0, 0, 0, 0]
    assert row["position_ids"] == [0, 1, 2, 0, 0, 1, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]
    assert row["cu_seqlens"] == [0, 3, 5, 9]
    assert row["cu_seqlens_padded"] == [0, 4, 8, 12]
    with pytest.raises(ValueError, match="segment 2 ends at slot 8 of 6"):
        shard.row_arrays(causal_segments([[5, 6, 7], [8, 9]]), 6, 0, pad_seq_to_mult=4)


def test_ordered_rows_follow_keys():
    row_of_segment = [0, 1, 0, 2, 1, 0, 2]
    keys = [chance.text_key("order", i) for i in range(7)]
    found = shard.ordered_rows(row_of_segment, keys, "best_fit")
    assert sorted(sorted(row) for row in found) == [[0, 2, 5], [1, 4], [3, 6]]
    for row in found:
        drawn = [chance.bits64(keys[i], chance.SEGMENT_ORDER) for i in row]
        assert drawn == sorted(drawn)
    drawn = [chance.bits64(keys[row[0]], chance.ROW_ORDER) for row in found]
    assert drawn == sorted(drawn)
    assert shard.ordered_rows(row_of_segment, [9] * 7, "best_fit") == [[0, 2, 5], [1, 4], [3, 6]]
    assert shard.ordered_rows([0, 0, 1, 2, 2], keys[:5], "next_fit") == [[0, 1], [2], [3, 4]]
    assert shard.ordered_rows([], [], "best_fit") == []
