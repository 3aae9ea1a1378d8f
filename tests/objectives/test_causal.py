from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import made
from tests.objectives import lengths


@st.composite
def configurations(draw, seq_length):
    mode = {"mode_token": "[NLG]"} if draw(st.booleans()) else {}
    return {
        "seq_length": seq_length,
        "documents": {
            "append_eos": draw(st.sampled_from(made.ENDS)),
            "prepend_bos": draw(st.booleans()),
        },
        "tasks": [{"objective": "causal", **mode}],
    }


@given(configurations(seq_length=4096 + 8), st.integers(0, 2**32))
@settings(max_examples=4)
def test_length_law_holds_for_every_length_to_4096_and_restore_gives_back_the_tokens(table, seed):
    recipe, tasks = made.mix(table)
    rendered = lengths.render_all(recipe, tasks, made.documents(np.arange(1, 4097), seed))
    lengths.check_lengths(rendered)
    lengths.check_restored(tasks, rendered)
    lengths.check_law(recipe, tasks, rendered)
    lengths.check_segments(tasks, rendered, [*range(30), *range(100, 4096, 1000)])


@pytest.mark.long
@given(
    configurations(seq_length=32),
    st.lists(st.integers(1, 150), min_size=1, max_size=12),
    st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_kernels_equal_their_twins_on_documents_that_are_cut(table, sizes, seed):
    recipe, tasks = made.mix(table)
    rendered = lengths.render_all(recipe, tasks, made.documents(sizes, seed))
    lengths.check_lengths(rendered)
    lengths.check_law(recipe, tasks, rendered)
    lengths.check_segments(tasks, rendered, range(len(rendered.slots)))


def test_fault_11_no_label_of_a_segment_comes_from_its_neighbour_and_none_is_shifted_twice():
    recipe, tasks = made.mix({"seq_length": 64, "documents": {"append_eos": False}})
    documents = made.documents([5, 9, 4])
    tokens = np.arange(18, dtype=np.uint16)
    rendered = lengths.render_all(recipe, tasks, replace(documents, ids=tokens))
    trained = rendered.loss_mask == 1
    assert (rendered.labels[trained] == rendered.tokens[trained] + 1).all()
    lasts = rendered.at + rendered.slots - 1
    assert not rendered.loss_mask[lasts].any() and (rendered.labels[lasts] == made.PAD).all()
    assert trained.sum() == 18 - 3
