"""Of every objective in the registry: inverse(render(x)) == x, through the arrays of a shard."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.building.layout import arrange
from packprep.building.packing import pack
from packprep.building.render import render, rounded_up
from packprep.building.replay import restore, stored_segments
from packprep.building.segments import cut, slots_of
from packprep.errors import RecipeError
from packprep.objectives import REGISTRY
from tests import made


def values(parameter):
    """Values of one parameter, in all of its range."""
    if parameter.choices:
        return st.sampled_from(parameter.choices)
    if isinstance(parameter.default, bool):
        return st.booleans()
    if parameter.shares:
        parts = st.lists(st.integers(0, 8), min_size=len(parameter.default), max_size=len(parameter.default))
        return parts.filter(any).map(lambda drawn: [part / sum(drawn) for part in drawn])
    low = 0.0 if parameter.low is None else parameter.low
    high = 100.0 if parameter.high is None else parameter.high
    if isinstance(parameter.default, int):
        return st.integers(int(low), int(high))
    number = st.floats(low, high, exclude_min=parameter.low_open, exclude_max=parameter.high_open)
    if isinstance(parameter.default, tuple):
        return st.lists(number, min_size=len(parameter.default), max_size=len(parameter.default)).map(sorted)
    return number


@st.composite
def recipes(draw, objective):
    """A recipe of one task with parameters drawn, or left as they are."""
    given = {p.name: draw(values(p)) for p in objective.parameters if draw(st.booleans())}
    mode = {"mode_token": "[NLG]"} if draw(st.booleans()) else {}
    return {
        "seq_length": draw(st.sampled_from([64, 128])),
        "documents": {"append_eos": draw(st.booleans()), "prepend_bos": draw(st.booleans())},
        "packing": {"pad_seq_to_mult": draw(st.sampled_from([1, 1, 8]))},
        "tasks": [{"objective": objective.name, **given, **mode}],
    }


def check_inverse(table, documents):
    """Cut, pack and render; read back what the arrays alone tell, and restore every segment."""
    try:
        recipe, tasks = made.mix(table)
    except RecipeError:
        return False  # parameters that do not go together, or leave no room in a row
    segments, untrained = cut(recipe, tasks, documents)
    assert not untrained.any()
    slots = slots_of(tasks, segments)
    mult = recipe.packing.pad_seq_to_mult
    physical = rounded_up(slots, mult)
    row, _ = pack(physical, recipe.seq_length, "best_fit")
    layout = arrange(segments.key, physical, row, False)
    arrays = render(tasks, documents, segments, slots, layout, recipe.seq_length, mult)
    job = SimpleNamespace(recipe=recipe, tasks=tasks, vocabulary=SimpleNamespace(roles={"eos": made.EOS}))
    stored = stored_segments(job, arrays)
    order = layout.order
    for found, made_of in ((stored.slots, slots), (stored.bos, segments.bos), (stored.eos, segments.eos)):
        assert np.array_equal(found, made_of[order])
    tokens, offsets, fits = restore(job, arrays, stored, np.arange(len(order)))
    assert fits.all()
    assert ("labels" in arrays) == tasks[0].in_place
    for g, s in enumerate(order):
        begin = int(documents.offsets[segments.document[s]] + segments.start[s])
        expected = documents.ids[begin : begin + int(segments.n[s])]
        assert np.array_equal(tokens[offsets[g] : offsets[g + 1]], expected)
    some = np.arange(len(order))[::-3]  # any segments, in any order
    chosen, places, _ = restore(job, arrays, stored, some)
    for i, g in enumerate(some):
        assert np.array_equal(chosen[places[i] : places[i + 1]], tokens[offsets[g] : offsets[g + 1]])
    return True


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_restore_inverts_render(name):
    done = 0

    @given(recipes(REGISTRY[name]), st.lists(st.integers(1, 200), min_size=1, max_size=8), st.integers(0, 2**32))
    @settings(max_examples=60)
    def check(table, sizes, seed):
        nonlocal done
        done += check_inverse(table, made.documents(sizes, seed))

    check()
    assert done > 20, "most parameters were refused"
