import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.objectives.objective import Bodies
from packprep.objectives.prefix_lm import OBJECTIVE
from packprep.randomness import text_key
from tests import made
from tests.objectives import lengths
from tests.twin.objectives import prefix_lm as twin


@st.composite
def configurations(draw, seq_length):
    mode = {"mode_token": "[S2S]"} if draw(st.booleans()) else {}
    return {
        "seq_length": seq_length,
        "documents": {
            "append_eos": draw(st.sampled_from(made.ENDS)),
            "prepend_bos": draw(st.booleans()),
        },
        "tasks": [{"objective": "prefix_lm", "sentinel": draw(st.booleans()), **mode}],
    }


@given(configurations(seq_length=4096 + 8), st.integers(0, 2**32))
@settings(max_examples=4)
def test_length_law_holds_for_every_length_to_4096_and_restore_gives_back_the_tokens(table, seed):
    recipe, tasks = made.mix(table, made.ids(1))
    rendered = lengths.render_all(recipe, tasks, made.documents(np.arange(1, 4097), seed))
    lengths.check_lengths(rendered)
    lengths.check_restored(tasks, rendered)
    lengths.check_law(recipe, tasks, rendered)
    lengths.check_segments(tasks, rendered, [*range(30), *range(100, 4096, 1000)])


@pytest.mark.long
@given(
    configurations(seq_length=64),
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_kernels_equal_their_twins_on_documents_that_are_cut(table, sizes, seed):
    recipe, tasks = made.mix(table, made.ids(1))
    rendered = lengths.render_all(recipe, tasks, made.documents(sizes, seed))
    lengths.check_lengths(rendered)
    lengths.check_law(recipe, tasks, rendered)
    lengths.check_segments(tasks, rendered, range(len(rendered.slots)))


def test_fault_07_a_pivot_reaches_both_ends_and_every_place_between_equally_often():
    keys = np.array([text_key("pivot", i) for i in range(3000)], np.uint64)
    _, tasks = made.mix({"tasks": [{"preset": "prefix_lm"}]})
    columns = keys, np.full(3000, -1), np.zeros(3000, np.int64)
    pivots = OBJECTIVE.body_prefix(tasks[0], Bodies(np.full(3000, 7), *columns))
    counts = np.bincount(pivots, minlength=8)
    assert counts[0] == counts[7] == 0
    assert (abs(counts[1:7] - 500) < 5 * np.sqrt(500)).all(), counts
    pivots_of_two = OBJECTIVE.body_prefix(tasks[0], Bodies(np.full(3000, 2), *columns))
    assert pivots_of_two.tolist() == [1] * 3000
    assert pivots[:50].tolist() == [twin.pivot_of(7, int(key)) for key in keys[:50]]


@pytest.mark.parametrize("sentinel", [777, 0])
def test_loss_begins_with_the_prediction_of_what_follows_the_pivot(sentinel):
    table = {
        "seq_length": 64,
        "tasks": [{"objective": "prefix_lm", "mode_token": "[S2S]", "sentinel": True}],
    }
    recipe, tasks = made.mix(table, made.ids([sentinel]))
    rendered = lengths.render_all(recipe, tasks, made.documents([20] * 10))
    lengths.check_restored(tasks, rendered)
    for at, slots, prefix in zip(rendered.at, rendered.slots, rendered.prefix, strict=True):
        loss, tokens = rendered.loss_mask[at : at + slots], rendered.tokens[at : at + slots]
        assert np.flatnonzero(loss).tolist() == list(range(prefix - 1, slots - 1))
        # the sentinel is the first target
        assert rendered.labels[at + prefix - 1] == sentinel == tokens[prefix]
        assert tokens[0] == made.MODE_TOKENS["[S2S]"] and 2 <= prefix <= 20


def test_what_is_trained_begins_behind_the_prefix_which_has_a_token_at_least():
    _, tasks = made.mix({"tasks": [{"preset": "prefix_lm"}]})
    keys = np.array([text_key("trained", i) for i in range(50)], np.uint64)
    for first in range(4):
        columns = np.full(50, 7), keys, np.full(50, first), np.zeros(50, np.int64)
        pivots = OBJECTIVE.body_prefix(tasks[0], Bodies(*columns))
        assert pivots.tolist() == [max(first, 1)] * 50


def test_restore_finds_a_sentinel_that_is_not_at_the_pivot():
    recipe, tasks = made.mix(
        {"seq_length": 64, "tasks": [{"objective": "prefix_lm", "sentinel": True}]}, made.ids([777])
    )
    rendered = lengths.render_all(recipe, tasks, made.documents([20]))
    task = tasks[0]
    columns = lengths.BodySlots(np.zeros(1, np.int64), rendered.segments.bodies(), rendered.at)
    out = np.zeros(20, np.uint16)
    assert task.objective.restore(task, columns, rendered.tokens, out).tolist() == [True]
    damaged = np.where(rendered.tokens == 777, 5, rendered.tokens).astype(np.uint16)
    assert task.objective.restore(task, columns, damaged, out).tolist() == [False]
