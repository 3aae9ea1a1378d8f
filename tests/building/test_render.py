import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.building.packing import place
from packprep.building.render import Texts, _is_weighted, render, render_rows
from packprep.building.segments import cut
from packprep.dataset.segments import Segments
from packprep.objectives import REGISTRY
from tests import golden, made
from tests.building.test_segments import facts_key
from tests.twin import cutting, objectives, shard
from tests.twin.objectives import masked_diffusion

TABLES = st.fixed_dictionaries(
    {
        "seq_length": st.sampled_from([32, 64, 96]),
        "documents": st.fixed_dictionaries(
            {"append_eos": st.sampled_from(made.ENDS), "prepend_bos": st.booleans()}
        ),
        "tasks": st.sampled_from(
            [[{"preset": p}] for p in ("causal", "prefix_lm", "ul2r", "ul2", "t5")]
        ),
        "packing": st.fixed_dictionaries(
            {
                "algorithm": st.sampled_from(["best_fit", "first_fit", "next_fit"]),
                "max_segments_per_row": st.sampled_from([0, 0, 1, 3]),
                "pad_seq_to_mult": st.sampled_from([1, 1, 2, 8]),
            }
        ),
    }
)


def shard_of(table, documents, sentinels=3000):
    """The arrays of a shard that holds these documents."""
    recipe, tasks = made.mix(table, made.ids(sentinels))
    placed, _ = place(cut(recipe, tasks, documents)[0], recipe, tasks)
    return (
        recipe,
        tasks,
        render(tasks, documents, placed, recipe.seq_length, recipe.packing.pad_seq_to_mult),
    )


@pytest.mark.long
@given(TABLES, st.lists(st.integers(1, 150), min_size=1, max_size=12), st.integers(0, 2**32))
@settings(max_examples=120)
def test_a_whole_shard_equals_its_twin(table, sizes, seed):
    documents = made.documents(sizes, seed)
    recipe, tasks, arrays = shard_of(table, documents)
    twin = made.twin_recipe(recipe, tasks)
    mult = recipe.packing.pad_seq_to_mult
    segments = []  # (document, start, n, task, key, (slots, prefix, loss, labels))
    for d, size in enumerate(sizes):
        key = facts_key(documents, d)
        for start, n, t, bos, eos in cutting.cut(size, {**twin, "key": key}):
            begin = int(documents.offsets[d]) + start
            task = made.twin_task(tasks[t])
            facts = cutting.segment_facts(
                task, made.BOS if bos else None, made.EOS if eos else None, key(start), made.PAD
            )
            content = documents.ids[begin : begin + n].tolist()
            segments.append((d, start, n, t, key(start), objectives.segment(content, facts)))
    lengths = [-(-len(segment[-1][0]) // mult) * mult for segment in segments]
    algorithm, most = recipe.packing.algorithm, recipe.packing.max_segments_per_row
    packed, _ = cutting.pack(lengths, recipe.seq_length, algorithm, most)
    order = shard.ordered_rows(packed, [segment[4] for segment in segments], algorithm)
    assert len(arrays["tokens"]) == len(order)
    cu_seqlens, padded = [], []
    for r, members in enumerate(order):
        own = [
            (slots, loss, labels) for slots, _, loss, labels in (segments[i][-1] for i in members)
        ]
        row = shard.row_arrays(own, recipe.seq_length, made.PAD, mult)
        for name in ("tokens", "segment_ids", "loss_mask"):
            assert arrays[name][r].tolist() == row[name], name
        cu_seqlens += row["cu_seqlens"]
        padded += row["cu_seqlens_padded"] or []
    assert arrays["cu_seqlens"].tolist() == cu_seqlens
    assert ("cu_seqlens_padded" in arrays) == (mult > 1)
    if mult > 1:
        assert arrays["cu_seqlens_padded"].tolist() == padded
    flat = [segments[i] for members in order for i in members]
    assert arrays["row_offsets"].tolist() == np.cumsum([0, *map(len, order)]).tolist()
    assert arrays["segment_doc"].tolist() == [int(documents.position[s[0]]) for s in flat]
    assert arrays["segment_repeat"].tolist() == [int(documents.repeat[s[0]]) for s in flat]
    for name, at in (("start", 1), ("tokens", 2), ("task", 3), ("key", 4)):
        assert arrays[f"segment_{name}"].tolist() == [s[at] for s in flat]
    assert arrays["segment_prefix"].tolist() == [s[-1][1] for s in flat]
    assert "labels" not in arrays  # no task predicts in place
    assert set(arrays["segment_noise"]) <= {0} and set(arrays["segment_loss_weight"]) <= {1}


@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 150), min_size=4, max_size=12),
    st.integers(0, 2**32),
)
@settings(max_examples=40)
def test_labels_where_a_task_predicts_in_place_are_the_twin_s(bos, stratified, sizes, seed):
    """Next-token tasks beside masked diffusion: the one's labels are what follows, the other's the
    tokens themselves."""
    masked = {"objective": "masked_diffusion", "name": "m", "weight": 1.0, "stratified": stratified}
    table = {
        "seq_length": 64,
        "tasks": [{"preset": "ul2r"}, masked],
        "documents": {"prepend_bos": bos},
    }
    documents = made.documents(sizes, seed)
    recipe, tasks, arrays = shard_of(table, documents)
    by_place = {int(place): d for d, place in enumerate(documents.position)}
    flat = {name: arrays[name].ravel().tolist() for name in ("tokens", "labels", "loss_mask")}
    row = np.repeat(np.arange(len(arrays["tokens"])), np.diff(arrays["row_offsets"]))
    at = np.arange(len(row)) + row
    begins = (row * 64 + arrays["cu_seqlens"][at]).tolist()
    expected = {name: [made.PAD] * len(flat["tokens"]) for name in ("tokens", "labels")}
    expected["loss_mask"] = [0] * len(flat["tokens"])
    noised = []
    for g, (r, begin) in enumerate(zip(row.tolist(), begins, strict=True)):
        d, t = by_place[int(arrays["segment_doc"][g])], int(arrays["segment_task"][g])
        start, n = int(arrays["segment_start"][g]), int(arrays["segment_tokens"][g])
        first = int(documents.offsets[d]) + start
        content = documents.ids[first : first + n].tolist()
        head, tail = [made.BOS] * (bos and start == 0), [made.EOS] * (start + n == sizes[d])
        if tasks[t].name == "m":
            slots = [*head, *content, *tail]
            labels, loss, prefix = slots, [0] * len(slots), len(slots)
            noised.append((g, (int(arrays["segment_key"][g]), begin + len(head), n + len(tail), r)))
        else:
            facts = cutting.segment_facts(
                made.twin_task(tasks[t]),
                made.BOS if head else None,
                made.EOS if tail else None,
                int(arrays["segment_key"][g]),
                made.PAD,
            )
            slots, prefix, loss, labels = objectives.segment(content, facts)
        assert arrays["segment_prefix"][g] == prefix
        place = slice(begin, begin + len(slots))
        expected["tokens"][place], expected["labels"][place], expected["loss_mask"][place] = (
            slots,
            labels,
            loss,
        )
    levels = masked_diffusion.noise(
        {"number": 4, "parameters": tasks[4].parameters},
        (made.MASK, []),
        [one for _, one in noised],
        None,
        expected["tokens"],
        expected["loss_mask"],
        0,
    )
    assert flat == expected
    found = [(arrays["segment_noise"][g], arrays["segment_loss_weight"][g]) for g, _ in noised]
    assert found == [(np.float32(level), np.float32(weight)) for level, weight, _ in levels]
    assert noised or (arrays["segment_task"] != 4).all()


def with_prefixes(prefixes):
    """A task that copies its tokens, with the given prefixes, one a segment."""
    _, tasks = made.mix({"tasks": [{"preset": "causal"}]})
    body_prefix = lambda task, bodies: np.array(prefixes, np.int64)  # noqa: E731
    objective = dataclasses.replace(
        REGISTRY["causal"], name="given", attention="prefix", body_prefix=body_prefix
    )
    return [dataclasses.replace(tasks[0], objective=objective)]


def bare(begins, sizes):
    """Segments of the first task that are their tokens alone, in one row."""
    return Segments.create(len(sizes), tokens=sizes, slots=sizes, first_slot=begins)


@pytest.mark.parametrize("id, inputs, expected", golden.cases("loss_mask_shifted"))
def test_fault_11_loss_masks_are_the_golden_file_s(id, inputs, expected):
    sizes = np.bincount(inputs["segment_ids"])
    begins = np.cumsum(sizes) - sizes
    prefixes = [sum(inputs["input_mask"][b : b + n]) for b, n in zip(begins, sizes, strict=True)]
    table = bare(begins, sizes)
    tokens = np.array(inputs["tokens"], np.uint16)
    # the second makes labels, and no segment draws it
    tasks = [*with_prefixes(prefixes), made.in_place_task()]
    arrays, rendered = render_rows(tasks, table, Texts(begins, tokens), len(tokens))
    assert rendered.prefix.tolist() == prefixes and np.array_equal(arrays["tokens"][0], tokens)
    assert arrays["loss_mask"][0].tolist() == expected["correct"]
    targets = np.flatnonzero(arrays["loss_mask"][0])
    assert arrays["labels"][0][targets].tolist() == tokens[targets + 1].tolist()


@pytest.mark.parametrize("id, inputs, expected", golden.cases("prompt_completion_loss_mask"))
def test_loss_of_a_prompt_and_its_completion_is_the_golden_file_s(id, inputs, expected):
    n = inputs["num_ids"]
    table = bare(np.zeros(1, np.int64), np.array([n]))
    tasks = with_prefixes([inputs["prompt_length"]])
    texts = Texts(np.zeros(1, np.int64), np.arange(n, dtype=np.uint16))
    arrays, _ = render_rows(tasks, table, texts, n)
    assert "labels" not in arrays
    assert arrays["loss_mask"][0].tolist() == expected["loss_mask"]


# Faults


def test_fault_01_no_slot_inside_a_segment_is_padding_and_no_loss_is_on_padding():
    recipe, tasks, arrays = shard_of(
        {"seq_length": 256, "tasks": [{"preset": "ul2r"}]}, made.documents(np.arange(1, 300))
    )
    inside = arrays["segment_ids"] > 0
    assert np.array_equal(arrays["tokens"] != made.PAD, inside)
    assert not arrays["loss_mask"][~inside].any()
    trained = np.flatnonzero(arrays["loss_mask"])
    assert np.array_equal(
        arrays["segment_ids"].ravel()[trained], arrays["segment_ids"].ravel()[trained + 1]
    )


@pytest.mark.parametrize("pad", [0, 7, 65000])
def test_fault_03_rows_are_right_whatever_the_pad_id(pad):
    table = {
        "seq_length": 96,
        "tasks": [{"preset": "prefix_lm"}],
        "packing": {"pad_seq_to_mult": 8},
    }
    documents = made.documents(np.arange(1, 150))
    arrays = {}
    for one in (pad, made.PAD):
        recipe, tasks = made.mix(table, dataclasses.replace(made.ids(), pad=one))
        arrays[one] = render(
            tasks, documents, place(cut(recipe, tasks, documents)[0], recipe, tasks)[0], 96, 8
        )
    inside = arrays[pad]["segment_ids"] > 0
    assert np.array_equal(arrays[pad]["segment_ids"], arrays[made.PAD]["segment_ids"])
    assert np.array_equal(arrays[pad]["loss_mask"], arrays[made.PAD]["loss_mask"])
    assert np.array_equal(arrays[pad]["tokens"], np.where(inside, arrays[made.PAD]["tokens"], pad))


@pytest.mark.parametrize("append_eos", made.ENDS)
def test_fault_12_boundaries_do_not_depend_on_eos(append_eos):
    documents = made.documents([20, 30, 9, 200, 14])
    full_of_eos = replace(documents, ids=np.full_like(documents.ids, made.EOS))
    table = {"seq_length": 64, "documents": {"append_eos": append_eos}}
    plain, eos = (shard_of(table, d)[2] for d in (documents, full_of_eos))
    for name in ("segment_ids", "loss_mask", "cu_seqlens", "row_offsets", "segment_tokens"):
        assert np.array_equal(plain[name], eos[name])


def test_fault_20_the_loss_does_not_depend_on_what_the_tokens_are():
    table = {"seq_length": 256, "tasks": [{"preset": "ul2"}]}
    documents = made.documents(np.arange(3, 200))
    one = shard_of(table, documents)[2]
    for value in (0, made.PAD, made.EOS, 1000):  # 1000 is the first sentinel
        other = shard_of(table, replace(documents, ids=np.full_like(documents.ids, value)))[2]
        assert np.array_equal(one["loss_mask"], other["loss_mask"])
        assert np.array_equal(one["segment_prefix"], other["segment_prefix"])


# pad_seq_to_mult


@pytest.mark.parametrize("mult", [2, 16, 64])
def test_pad_seq_to_mult_pads_every_segment_to_a_multiple(mult):
    table = {"seq_length": 192, "tasks": [{"preset": "ul2r"}], "packing": {"pad_seq_to_mult": mult}}
    recipe, tasks, arrays = shard_of(table, made.documents(np.arange(1, 250)))
    row = np.repeat(np.arange(len(arrays["tokens"])), np.diff(arrays["row_offsets"]))
    at = np.arange(len(row)) + row
    padded, real = arrays["cu_seqlens_padded"], arrays["cu_seqlens"]
    assert (padded % mult == 0).all() and (
        padded[arrays["row_offsets"][:-1] + np.arange(row.max() + 1)] == 0
    ).all()
    physical, lengths = padded[at + 1] - padded[at], real[at + 1] - real[at]
    assert np.array_equal(physical, -(-lengths // mult) * mult)
    covered = np.zeros(arrays["tokens"].shape, np.uint16)
    for number, (r, begin, n) in enumerate(zip(row, padded[at], lengths, strict=True)):
        covered[r, begin : begin + n] = number - arrays["row_offsets"][r] + 1
    assert np.array_equal(covered, arrays["segment_ids"])
    gap = covered == 0
    assert (arrays["tokens"][gap] == made.PAD).all() and not arrays["loss_mask"][gap].any()


def test_without_pad_seq_to_mult_there_is_no_physical_column():
    assert "cu_seqlens_padded" not in shard_of({"seq_length": 64}, made.documents([5]))[2]


def test_an_empty_shard_has_no_rows():
    recipe, tasks, arrays = shard_of(
        {"seq_length": 64, "tasks": [{"preset": "ul2r"}]}, made.documents([])
    )
    assert arrays["tokens"].shape == (0, 64) and arrays["row_offsets"].tolist() == [0]
    assert len(arrays["cu_seqlens"]) == len(arrays["segment_key"]) == 0


@pytest.mark.parametrize(
    "weights, eos_weight, expected",
    [
        ([1, 1], [0, 1], False),
        ([1, 1], [0, 3], True),  # no token begins in the last span, whose weight eos gets
        ([1, 0.5], [1, 0], True),
        ([], [0, 0], False),
    ],
)
def test_a_shard_has_weights_if_any_token_or_eos_weighs_other_than_1(weights, eos_weight, expected):
    columns = np.array(weights, np.float32), np.array(eos_weight, np.float32)
    training = SimpleNamespace(weights=columns[0], eos_weight=columns[1])
    assert _is_weighted(training) is expected
