import json
import os
import subprocess
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep import open_dataset
from packprep.errors import RecipeError
from packprep.objectives.span_corruption import render_with_mask, span_counts
from packprep.objectives.tasks import capacities
from tests import golden, made
from tests.objectives import lengths
from tests.properties import few_and_many
from tests.twin import cutting
from tests.twin.objectives import span_corruption as span_twin

T5 = "SEQIO_PYTHON"
DENSITIES = st.sampled_from([0.01, 0.15, 0.25, 1 / 3, 0.5, 0.75, 0.9, 0.99])
MEANS = st.sampled_from([1.0, 1.5, 3.0, 8.0, 32.0, 64.0, 1000.0])


@st.composite
def configurations(draw, seq_length):
    """(a recipe's table with one task of span corruption, how many sentinels there are)."""
    roll = draw(st.booleans())
    few = draw(st.booleans())
    table = {
        "seq_length": seq_length,
        "documents": {
            "append_eos": draw(st.sampled_from(made.ENDS)),
            "prepend_bos": draw(st.booleans()),
        },
        "tasks": [
            {
                "objective": "span_corruption",
                "noise_density": draw(DENSITIES),
                "mean_span_length": draw(MEANS),
                "random_roll": roll,
                "too_many_spans": draw(st.sampled_from(["split", "lower"])),
                **({"mode_token": "[NLU]"} if draw(st.booleans()) else {}),
            }
        ],
    }
    return table, draw(st.integers(3 + roll, 60)) if few else 5000


def test_every_input_and_target_of_t5_ends_with_eos():
    table = {
        "documents": {"append_eos": "segment"},
        "packing": {"encoder_length": 128, "decoder_length": 64},
        "tasks": [{"objective": "span_corruption", "eos_after_inputs": True}],
    }
    recipe, tasks = made.mix(table)
    rendered = lengths.render_all(recipe, tasks, made.documents(np.arange(3, 600, 7)))
    lengths.check_lengths(rendered)
    lengths.check_restored(tasks, rendered)
    at, ends = rendered.at, rendered.at + rendered.slots
    assert len(at) > 2 * 86
    assert (rendered.tokens[at + rendered.prefix - 1] == made.EOS).all()
    assert (rendered.tokens[ends - 1] == made.EOS).all() and rendered.loss_mask[ends - 2].all()
    assert (rendered.slots - rendered.prefix <= 64).all() and (rendered.prefix <= 128).all()


# The length law


@pytest.mark.long
@few_and_many(5, 12, configurations(seq_length=3 * 4096 + 8), st.integers(0, 2**32))
def test_length_law_holds_for_every_length_to_4096_and_restore_gives_back_the_tokens(
    configuration, seed
):
    table, sentinels = configuration
    recipe, tasks = made.mix(table, made.ids(sentinels))
    rendered = lengths.render_all(recipe, tasks, made.documents(np.arange(1, 4097), seed))
    lengths.check_lengths(rendered)
    lengths.check_restored(tasks, rendered)
    lengths.check_law(recipe, tasks, rendered)
    short = np.flatnonzero(rendered.segments.tokens <= 12)[:30].tolist()
    lengths.check_segments(tasks, rendered, [*short, *range(100, len(rendered.slots), 1500)])


@pytest.mark.long
@given(
    configurations(seq_length=256),
    st.lists(st.integers(1, 700), min_size=1, max_size=12),
    st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_kernels_equal_their_twins_on_documents_that_are_cut(configuration, sizes, seed):
    table, sentinels = configuration
    recipe, tasks = made.mix(table, made.ids(sentinels))
    rendered = lengths.render_all(recipe, tasks, made.documents(sizes, seed))
    lengths.check_lengths(rendered)
    lengths.check_restored(tasks, rendered)
    lengths.check_law(recipe, tasks, rendered)
    lengths.check_segments(tasks, rendered, range(len(rendered.slots)))


@pytest.mark.long
@given(configurations(seq_length=512))
@settings(max_examples=40)
def test_capacity_is_what_trying_every_length_gives(configuration):
    table, sentinels = configuration
    recipe, tasks = made.mix(table, made.ids(sentinels))
    twin = made.twin_recipe(recipe, tasks)
    expected = [[cutting.capacity(twin, 0, bos, eos) for eos in (0, 1)] for bos in (0, 1)]
    assert capacities(recipe, tasks)[0][0].tolist() == expected


def test_fault_08_no_sentinel_is_used_twice_and_inputs_and_targets_name_the_same_ones():
    table = {
        "seq_length": 1024,
        "tasks": [
            {
                "objective": "span_corruption",
                "noise_density": 0.5,
                "mean_span_length": 1,
                "random_roll": True,
            }
        ],
    }
    # too few for a row: segments are cut where the list ends
    recipe, tasks = made.mix(table, made.ids(120))
    rendered = lengths.render_all(recipe, tasks, made.documents([900] * 40, 1))
    assert rendered.slots.max() <= 1024
    ends = rendered.at + rendered.slots
    for begin, end, prefix in zip(rendered.at, ends, rendered.prefix, strict=True):
        inputs, targets = (
            rendered.tokens[begin : begin + prefix],
            rendered.tokens[begin + prefix : end],
        )
        there, again = inputs[inputs >= 1000], targets[targets >= 1000]
        assert there.tolist() == again.tolist() == list(range(1000, 1000 + len(there)))
        assert len(there) <= 120


def test_fault_09_targets_are_right_under_every_rotation():
    table = {
        "seq_length": 256,
        "tasks": [
            {
                "objective": "span_corruption",
                "noise_density": 0.4,
                "mean_span_length": 3,
                "random_roll": True,
            }
        ],
    }
    recipe, tasks = made.mix(table)
    rendered = lengths.render_all(recipe, tasks, made.documents([30] * 400, 5))
    runs = set()
    begins_with_noise = 0
    sentinels = tasks[0].ids.sentinels.tolist()
    for i in range(400):
        slots = rendered.tokens[
            rendered.at[i] : rendered.at[i] + rendered.slots[i] - 1
        ].tolist()  # without eos
        inputs, targets = slots[: rendered.prefix[i]], slots[rendered.prefix[i] :]
        content = rendered.documents.ids[
            rendered.documents.offsets[i] : rendered.documents.offsets[i + 1]
        ].tolist()
        assert span_twin.reconstruct(inputs, targets, sentinels) == content
        runs.add(sum(token >= 1000 for token in inputs))
        begins_with_noise += inputs[0] >= 1000
    assert runs == {4, 5} and begins_with_noise > 50  # some rotations cut a span in two


def test_fault_05_equal_documents_get_different_masks_and_every_use_its_own():
    recipe, tasks = made.mix({"tasks": [{"preset": "t5"}], "seq_length": 512})
    documents = made.documents([200] * 50)
    same = replace(documents, ids=np.tile(documents.ids[:200], 50))
    rendered = lengths.render_all(recipe, tasks, same)
    assert (
        len(
            {
                rendered.tokens[a : a + n].tobytes()
                for a, n in zip(rendered.at, rendered.slots, strict=True)
            }
        )
        == 50
    )
    one_place = replace(
        same, position=np.zeros(50, np.int64), file_key=same.file_key[:1].repeat(50)
    )
    uses = replace(one_place, repeat=np.arange(50))
    rendered = lengths.render_all(recipe, tasks, uses)
    assert (
        len(
            {
                rendered.tokens[a : a + n].tobytes()
                for a, n in zip(rendered.at, rendered.slots, strict=True)
            }
        )
        == 50
    )
    rendered = lengths.render_all(recipe, tasks, replace(one_place, repeat=np.zeros(50, np.int64)))
    assert (
        len(
            {
                rendered.tokens[a : a + n].tobytes()
                for a, n in zip(rendered.at, rendered.slots, strict=True)
            }
        )
        == 1
    )


def test_fault_20_content_that_looks_like_sentinels_pad_or_eos_is_given_back():
    table = {"seq_length": 256, "tasks": [{"objective": "span_corruption", "random_roll": True}]}
    recipe, tasks = made.mix(table)
    documents = made.documents([100] * 30)
    lookalike = np.resize(
        np.array([1000, 1001, made.PAD, made.EOS, 0], np.uint16), documents.ids.shape
    )
    rendered = lengths.render_all(recipe, tasks, replace(documents, ids=lookalike))
    lengths.check_restored(tasks, rendered)
    expected = np.concatenate(
        [
            np.arange(n) >= max(p - 1, 0)
            for n, p in zip(rendered.slots, rendered.prefix, strict=True)
        ]
    )
    expected[np.cumsum(rendered.slots) - 1] = False
    assert np.array_equal(rendered.loss_mask[rendered.segment_ids > 0], expected)


# The public functions


@pytest.mark.parametrize("id, inputs, expected", golden.cases("span_counts"))
def test_span_counts_is_the_golden_file_s(id, inputs, expected):
    found = span_counts(inputs["length"], inputs["density"], inputs["mean_span"])
    assert found == (expected["num_noise"], expected["num_spans_clamped"])


@pytest.mark.parametrize("id, inputs, expected", golden.cases("span_counts_f32_vs_f64"))
def test_span_counts_are_those_of_float64(id, inputs, expected):
    n_noise, n_spans = span_counts(inputs["length"], inputs["density"], inputs["mean_span"])
    assert [n_noise, n_spans, inputs["length"] - n_noise] == expected["f64"] != expected["f32"]


@pytest.mark.parametrize("id, inputs, expected", golden.cases("helper_vs_mask_mismatch"))
def test_fault_02_the_reserved_length_is_the_realised_one_where_t5_s_two_differ(
    id, inputs, expected
):
    task = {
        "noise_density": inputs["noise_density"],
        "mean_span_length": inputs["mean_noise_span_length"],
    }
    n = expected["helper_tokens_length"]
    table = {"seq_length": 1024, "documents": {"append_eos": False}}
    recipe, tasks = made.mix({**table, "tasks": [{"objective": "span_corruption", **task}]})
    rendered = lengths.render_all(recipe, tasks, made.documents([n]))
    lengths.check_lengths(rendered)
    prefix, slots = int(rendered.prefix[0]), int(rendered.slots[0])
    # T5 counts an eos in the inputs and one in the targets
    assert (prefix + 1, slots - prefix + 1) == (
        inputs["inputs_length"],
        expected["helper_targets_length"],
    )


@pytest.mark.parametrize("id, inputs, expected", golden.cases("infeasible_spans"))
def test_more_spans_than_text_are_clamped(id, inputs, expected):
    found = span_counts(inputs["length"], inputs["density"], inputs["mean_span"])
    assert found == (expected["num_noise"], expected["required_spans_after_clamp"])


def test_span_counts_gives_whole_numbers_of_python_and_takes_numpy_s():
    found = span_counts(np.int32(4096), 0.15, 3)
    assert found == (614, 205) and all(type(n) is int for n in found)
    assert span_counts(4096, 0.15, 3, max_spans=100) == (614, 100)
    assert span_counts(0, 0.15, 3) == span_counts(1, 0.15, 3) == span_counts(2, 0.15, 3) == (1, 1)


@pytest.mark.long
@given(
    st.integers(1, 10**6),
    DENSITIES | st.floats(1e-6, 1 - 1e-6),
    MEANS | st.floats(1, 1e6),
    st.integers(1, 10**5) | st.none(),
)
@settings(max_examples=500)
def test_span_counts_equals_its_twin(n, density, mean, max_spans):
    assert span_counts(n, density, mean, max_spans) == span_twin.span_counts(
        n, density, mean, max_spans
    )


def test_span_counts_equals_its_twin_for_every_length_to_4096():
    for density, mean in [(0.15, 3), (0.5, 3), (0.15, 32), (0.9, 1), (0.15, 8), (0.5, 64)]:
        for n in range(1, 4097):
            assert span_counts(n, density, mean) == span_twin.span_counts(n, density, mean)


@pytest.mark.parametrize("id, inputs, expected", golden.cases("max_raw_length_for_budget"))
def test_the_longest_segment_of_a_budget_is_the_golden_file_s(id, inputs, expected):
    n = expected["max_raw_len"]
    slots = [
        1 + m + 2 * span_counts(m, inputs["density"], inputs["mean_span"])[1] for m in (n, n + 1)
    ]
    assert slots == [expected["len_at_max"], expected["len_at_max_plus_1"]]


SENTINEL_CASES = {id: (inputs, expected) for id, inputs, expected in golden.cases("sentinels")}


@pytest.mark.parametrize(
    "id", [id for id, (inputs, _) in SENTINEL_CASES.items() if "levanter_sentinels" in inputs]
)
def test_render_with_mask_is_the_golden_file_s(id):
    inputs, expected = SENTINEL_CASES[id]
    if not any(inputs["mask"]):
        with pytest.raises(RecipeError, match="no noise"):
            render_with_mask(inputs["tokens"], inputs["mask"], inputs["levanter_sentinels"])
        return
    slots, prefix = render_with_mask(inputs["tokens"], inputs["mask"], inputs["levanter_sentinels"])
    assert slots.tolist() == expected["levanter_inputs"] + expected["levanter_targets"]
    assert prefix == len(expected["levanter_inputs"])


def test_fault_08_a_span_beyond_the_sentinels_is_refused_where_others_used_an_ordinary_id():
    inputs, expected = SENTINEL_CASES["sentinels/t5_collides_with_vocab"]
    assert expected["is_regular_token"]
    mask = np.arange(2 * inputs["num_spans"]) % 2 == 1
    sentinels = inputs["vocab_size"] - 1 - np.arange(inputs["extra_ids"])
    with pytest.raises(RecipeError, match="101 runs of noise, but there are only 100 sentinels"):
        render_with_mask(np.arange(len(mask)), mask, sentinels)


def test_a_mask_without_noise_is_refused_where_others_wrote_targets_without_tokens():
    inputs, expected = SENTINEL_CASES["sentinels/T5_doc_len1"]
    assert expected["t5_targets"] == [32099]
    with pytest.raises(RecipeError, match="no noise"):
        render_with_mask(inputs["tokens"], inputs["mask"], [32099])


@pytest.mark.parametrize("id, inputs, expected", golden.cases("ul2r_segment"))
def test_render_with_mask_puts_the_mode_token_first(id, inputs, expected):
    arrays = (np.array(inputs[name]) for name in ("tokens", "mask", "sentinels"))
    slots, prefix = render_with_mask(*arrays, mode_token=inputs["task_token"])
    assert (
        slots.tolist() == expected["row_tokens"][: len(slots)]
        and len(slots) == expected["cu_seqlens"][-1]
    )
    assert prefix == expected["inputs_len"]


def test_render_with_mask_the_contract_s_example():
    mask = np.array([bit == "1" for bit in "0011000111"])
    slots, prefix = render_with_mask(np.arange(10, 20), mask, np.array([100, 101]))
    assert (
        slots.tolist() == [10, 11, 100, 14, 15, 16, 101, 100, 12, 13, 101, 17, 18, 19]
        and prefix == 7
    )


@given(st.lists(st.booleans(), min_size=1, max_size=60).filter(any), st.booleans())
def test_render_with_mask_equals_its_twin_for_any_mask(mask, mode):
    tokens, sentinels = list(range(50, 50 + len(mask))), list(range(1000, 1040))
    slots, prefix = render_with_mask(tokens, mask, sentinels, 7 if mode else None)
    inputs, targets = span_twin.corrupted(tokens, mask, sentinels)
    assert slots.tolist() == [7] * mode + inputs + targets and prefix == mode + len(inputs)


def test_render_with_mask_refuses_what_cannot_be_right():
    with pytest.raises(RecipeError, match="2 runs of noise, but there are only 1 sentinels"):
        render_with_mask([1, 2, 3], [True, False, True], [100])
    with pytest.raises(RecipeError, match="no noise"):
        render_with_mask([1, 2, 3], [False] * 3, [100])
    with pytest.raises(RecipeError, match="one flag for each token"):
        render_with_mask([1, 2, 3], [True, False], [100])
    with pytest.raises(RecipeError, match="no noise"):
        render_with_mask([], [], [100])


# What restore refuses


def test_restore_finds_a_sentinel_that_is_not_where_the_header_says():
    recipe, tasks = made.mix({"tasks": [{"preset": "t5"}], "seq_length": 256})
    rendered = lengths.render_all(recipe, tasks, made.documents([100, 100]))
    lengths.check_restored(tasks, rendered)
    sentinels = np.flatnonzero(rendered.tokens >= 1000)
    for place in sentinels[:: max(1, len(sentinels) // 7)]:
        damaged = rendered.tokens.copy()
        damaged[place] = 5
        with pytest.raises(AssertionError):
            lengths.check_restored(tasks, rendered._replace(tokens=damaged))


@pytest.mark.long
def test_one_span_is_exactly_the_last_noise_tokens():
    recipe, tasks = made.mix(
        {"tasks": [{"objective": "span_corruption", "mean_span_length": 1000.0}], "seq_length": 256}
    )
    rendered = lengths.render_all(recipe, tasks, made.documents([100] * 5))
    for i in range(5):
        slots = rendered.tokens[rendered.at[i] : rendered.at[i] + rendered.slots[i]].tolist()
        content = rendered.documents.ids[100 * i : 100 * (i + 1)].tolist()
        assert slots == [*content[:85], 1000, 1000, *content[85:], made.EOS]


# The lengths of inputs and targets beside those of T5's own masks.

T5_RUNS = """
import json, sys
import tensorflow as tf
from t5.data.preprocessors import random_spans_noise_mask

def runs(seeds):
    mask = tf.cast(random_spans_noise_mask(n, density, seeds, mean, roll), tf.int32)
    return tf.reduce_sum(tf.nn.relu(mask - tf.concat([[0], mask[:-1]], 0))), tf.reduce_sum(mask)

found = []
for n, density, mean, roll, count in json.loads(sys.argv[1]):
    seeds = tf.random.stateless_uniform([count, 2, 2], [n, count], None, None, tf.int32)
    one = tf.function(lambda: tf.map_fn(runs, seeds, fn_output_signature=(tf.int32, tf.int32)))
    found.append([values.numpy().tolist() for values in one()])
print(json.dumps(found))
"""


@pytest.mark.campaign
@pytest.mark.skipif(
    T5 not in os.environ, reason=f"{T5} names a Python with benchmarks/requirements-t5.txt"
)
def test_lengths_of_inputs_and_targets_have_t5_s_distribution(tmp_path):
    """χ² of both samples together, for each n and law; without a roll all lengths are one number,
    and equal."""
    count = 4000
    laws = [
        (0.15, 3.0, False),
        (0.15, 3.0, True),
        (0.15, 8.0, True),
        (0.5, 3.0, True),
        (0.5, 32.0, True),
    ]
    cases = [(n, *law, count) for n in (24, 114, 512) for law in laws]
    ran = subprocess.run(
        [os.environ[T5], "-c", T5_RUNS, json.dumps(cases)],
        check=True,
        capture_output=True,
        text=True,
    )
    for case, (runs, noise) in zip(cases, json.loads(ran.stdout.splitlines()[-1]), strict=True):
        n, density, mean, roll, _ = case
        theirs = Counter((n - k + r, k + r + 1) for r, k in zip(runs, noise, strict=True))  # 1: eos
        folder = tmp_path / "-".join(map(str, case))
        made.write_lines(folder / "a.jsonl", [f"{i:0{n}}" for i in range(count)])
        law = {"noise_density": density, "mean_span_length": mean, "random_roll": roll}
        tasks = [{"objective": "span_corruption", **law}]
        made.build(made.table("a.jsonl", seq_length=2048, tasks=tasks), folder, folder / "out")
        ds, ours = open_dataset(folder / "out"), Counter()
        for row in map(ds.row, range(len(ds))):
            prefix = row.segments["prefix"].tolist()
            ours.update(
                (p, s - p) for p, s in zip(prefix, np.diff(row.cu_seqlens).tolist(), strict=True)
            )
        lengths = sorted({*ours, *theirs})
        table = np.array([[sample[pair] for pair in lengths] for sample in (ours, theirs)])
        assert table.sum(axis=1).tolist() == [count, count]
        expected = table.sum(axis=0) / 2
        chi2, freedom = ((table - expected) ** 2 / expected).sum(), len(lengths) - 1
        print(f"{case}: {len(lengths)} pairs of lengths, chi2 {chi2:.2f} of {freedom}")
        # 15.1: one sample in 10,000
        assert chi2 <= (0, 15.1)[freedom], f"{case}: {ours} and {theirs}"
