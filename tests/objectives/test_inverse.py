"""Of every objective in the registry: inverse(render(x)) == x, through the arrays of a shard."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.building.packing import place
from packprep.building.render import render
from packprep.building.segments import cut
from packprep.errors import RecipeError
from packprep.objectives import REGISTRY
from packprep.restoring import restore, stored_segments
from tests import made
from tests.objectives import lengths


def values(parameter):
    """Values of one parameter, in all of its range."""
    if parameter.choices:
        return st.sampled_from(parameter.choices)
    if isinstance(parameter.default, bool):
        return st.booleans()
    if parameter.shares:
        parts = st.lists(
            st.integers(0, 8), min_size=len(parameter.default), max_size=len(parameter.default)
        )
        return parts.filter(any).map(lambda drawn: [part / sum(drawn) for part in drawn])
    low = 0.0 if parameter.low is None else parameter.low
    high = 100.0 if parameter.high is None else parameter.high
    if isinstance(parameter.default, int):
        return st.integers(int(low), int(high))
    number = st.floats(low, high, exclude_min=parameter.low_open, exclude_max=parameter.high_open)
    if isinstance(parameter.default, tuple):
        return st.lists(
            number, min_size=len(parameter.default), max_size=len(parameter.default)
        ).map(sorted)
    return number


@st.composite
def recipes(draw, objective):
    """A recipe of one task with parameters drawn, or left as they are. eos_fill is of supervised
    documents alone."""
    drawn = [p for p in objective.parameters if p.name != "eos_fill"]
    given = {p.name: draw(values(p)) for p in drawn if draw(st.booleans())}
    mode = {"mode_token": "[NLG]"} if draw(st.booleans()) else {}
    return {
        "seq_length": draw(st.sampled_from([64, 128])),
        "documents": {
            "append_eos": draw(st.sampled_from(made.ENDS)),
            "prepend_bos": draw(st.booleans()),
        },
        "packing": {"pad_seq_to_mult": draw(st.sampled_from([1, 1, 8]))},
        "tasks": [{"objective": objective.name, **given, **mode}],
    }


@pytest.mark.parametrize(
    "algorithm, objective",
    [
        (algorithm, objective)
        for algorithm in ("best_fit", "concat")
        for objective in REGISTRY.values()
        if objective.restore and (objective.constant or algorithm != "concat")
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_with_eos_after_each_segment_every_length_is_the_formula_s(algorithm, objective):
    table = {
        "seq_length": 128,
        "documents": {"append_eos": "segment"},
        "packing": {"algorithm": algorithm},
        "tasks": [{"objective": objective.name, "mode_token": "[NLG]"}],
    }
    recipe, tasks = made.mix(table)
    rendered = lengths.render_all(recipe, tasks, made.documents(np.arange(1, 400)))
    lengths.check_lengths(rendered)
    lengths.check_restored(tasks, rendered)
    lengths.check_law(recipe, tasks, rendered)
    assert rendered.segments.eos.all() and (rendered.segments.start > 0).any()
    ends = rendered.at + rendered.slots
    assert (rendered.tokens[ends - 1] == made.EOS).all() and rendered.loss_mask[ends - 2].all()


def check_inverse(table, documents):
    """Cut, pack and render; read back what the arrays alone tell, and restore every segment."""
    try:
        recipe, tasks = made.mix(table)
    except RecipeError:
        return False  # parameters that do not go together, or leave no room in a row
    segments, lost = cut(recipe, tasks, documents)
    assert not lost.untrained.any()
    segments, _ = place(segments, recipe, tasks)
    arrays = render(tasks, documents, segments, recipe.seq_length, recipe.packing.pad_seq_to_mult)
    plan = SimpleNamespace(
        recipe=recipe, tasks=tasks, vocabulary=SimpleNamespace(roles={"eos": made.EOS})
    )
    stored = stored_segments(plan, arrays)
    for name in ("slots", "bos", "eos", "row"):
        assert np.array_equal(getattr(stored, name), getattr(segments, name))
    tokens, offsets, fits = restore(plan, arrays, stored, np.arange(len(segments.tokens)))
    assert fits.all()
    assert ("labels" in arrays) == tasks[0].in_place
    for s in range(len(segments.tokens)):
        begin = int(documents.offsets[segments.document[s]] + segments.start[s])
        expected = documents.ids[begin : begin + int(segments.tokens[s])]
        assert np.array_equal(tokens[offsets[s] : offsets[s + 1]], expected)
    some = np.arange(len(segments.tokens))[::-3]  # any segments, in any order
    chosen, places, _ = restore(plan, arrays, stored, some)
    for i, s in enumerate(some):
        assert np.array_equal(
            chosen[places[i] : places[i + 1]], tokens[offsets[s] : offsets[s + 1]]
        )
    return True


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_restore_inverts_render(name):
    done = 0

    @given(
        recipes(REGISTRY[name]),
        st.lists(st.integers(1, 200), min_size=1, max_size=8),
        st.integers(0, 2**32),
    )
    @settings(max_examples=90)
    def check(table, sizes, seed):
        nonlocal done
        done += check_inverse(table, made.documents(sizes, seed))

    check()
    assert done > 20, "most parameters were refused"
