from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.errors import RecipeError
from packprep.objectives import REGISTRY
from packprep.objectives.objective import Parameter
from packprep.objectives.tasks import (
    capacities,
    complete,
    marks_of_sources,
    needs_of,
    pieces_of_a_row,
    resolve,
    task_table,
    thresholds,
    unequal_weights,
    whole_task,
)
from packprep.recipe import presets, read_recipe
from tests import made
from tests.twin import chance, cutting


def recipe_of(**changes):
    return read_recipe(
        {"tokenizer": "bytes", "sources": [{"paths": ["x.jsonl"]}], **changes}, Path()
    )


def span(**parameters):
    return {"tasks": [{"objective": "span_corruption", **parameters}]}


# complete


def test_parameters_are_completed_in_their_types():
    recipe = complete(recipe_of(**span(mean_span_length=8)))
    expected = {
        "noise_density": 0.15,
        "mean_span_length": 8.0,
        "random_roll": False,
        "too_many_spans": "split",
    }
    expected["eos_after_inputs"] = False
    assert (
        recipe.tasks[0].parameters == expected
        and type(recipe.tasks[0].parameters["mean_span_length"]) is float
    )
    assert complete(recipe) == recipe


def test_an_unknown_parameter_names_the_nearest_known():
    with pytest.raises(
        RecipeError,
        match="unknown key of span_corruption 'noise_densty'; did you mean 'noise_density'?",
    ):
        complete(recipe_of(**span(noise_densty=0.1)))
    with pytest.raises(RecipeError, match="task 'causal': unknown key of causal 'sentinel'"):
        complete(recipe_of(tasks=[{"objective": "causal", "sentinel": True}]))


def test_an_unknown_objective_names_the_nearest_known():
    with pytest.raises(
        RecipeError, match="unknown objective 'span_coruption'; did you mean 'span_corruption'?"
    ):
        complete(recipe_of(tasks=[{"objective": "span_coruption"}]))


def test_values_out_of_range_name_task_key_value_and_range():
    with pytest.raises(
        RecipeError, match=r"task 'span_corruption'.noise_density = 1.0: must be in \(0, 1\)"
    ):
        complete(recipe_of(**span(noise_density=1)))
    with pytest.raises(RecipeError, match=r"mean_span_length = 0.5: must be in \[1, ∞\)"):
        complete(recipe_of(**span(mean_span_length=0.5)))
    with pytest.raises(RecipeError, match="random_roll = 1: expected true or false"):
        complete(recipe_of(**span(random_roll=1)))
    with pytest.raises(RecipeError, match=r"too_many_spans = 'cut': must be in split \| lower"):
        complete(recipe_of(**span(too_many_spans="cut")))


# What a recipe uses


def test_roles_and_mode_tokens_that_are_wanted():
    recipe = complete(
        recipe_of(tasks=[{"preset": "ul2r"}], documents={"append_eos": False, "prepend_bos": True})
    )
    assert needs_of(recipe)[:2] == ({"pad", "bos"}, ("[NLU]", "[NLG]", "[S2S]"))
    assert needs_of(complete(recipe_of())) == ({"pad", "eos"}, (), 0)


def test_as_many_sentinels_are_wanted_as_the_longest_segment_takes():
    assert needs_of(complete(recipe_of(seq_length=4096, **span(noise_density=0.5))))[2] == 512
    assert (
        needs_of(complete(recipe_of(seq_length=4096, **span(noise_density=0.5, random_roll=True))))[
            2
        ]
        == 513
    )
    assert needs_of(complete(recipe_of(tasks=[{"preset": "causal"}])))[2] == 0
    assert (
        needs_of(complete(recipe_of(tasks=[{"objective": "prefix_lm", "sentinel": True}])))[2] == 1
    )


@pytest.mark.long
@given(
    st.sampled_from([64, 128, 512, 4096]),
    st.sampled_from([0.05, 0.15, 0.5, 0.9]),
    st.sampled_from([1.0, 3.0, 8.0]),
    st.booleans(),
)
@settings(max_examples=40)
def test_with_the_sentinels_wanted_no_segment_is_cut_for_want_of_them(
    seq_length, density, mean, roll
):
    table = span(noise_density=density, mean_span_length=mean, random_roll=roll)
    count = needs_of(complete(recipe_of(seq_length=seq_length, **table)))[2]
    table["seq_length"] = seq_length
    found = [capacities(*made.mix(table, made.ids(n)))[0].tolist() for n in (count, 5000)]
    assert found[0] == found[1]


# resolve


def test_too_short_comes_last_and_has_no_mode_token():
    _, tasks = made.mix({"tasks": [{"preset": "ul2r"}]})
    assert [task.name for task in tasks] == ["r", "x-long", "x-dense", "s", "too_short"]
    assert [task.mode_token for task in tasks] == [260, 261, 261, 262, -1] and tasks[-1].mode == 0
    assert tasks[-1].objective.name == "causal"


def test_a_row_too_short_to_cut_is_refused_with_what_to_do():
    with pytest.raises(
        RecipeError,
        match=r"seq_length = 8 fits 3 of its tokens.*needs at least 5.*\nhint: raise seq_length",
    ):
        made.mix({"seq_length": 8, **span(noise_density=0.5, mean_span_length=1)})
    with pytest.raises(
        RecipeError,
        match=r"documents.max_tokens = 4: .*cutting a document needs at least 5\nhint: raise .* to 5",
    ):
        made.mix({"documents": {"max_tokens": 4}})
    with pytest.raises(
        RecipeError, match=r"documents.min_tokens = 40, cutting a document needs at least 79"
    ):
        made.mix({"documents": {"max_tokens": 50, "min_tokens": 40}})


def test_too_few_sentinels_are_refused():
    with pytest.raises(
        RecipeError,
        match="needs at least 2 sentinels, but there are 1\nhint: set specials.sentinels",
    ):
        made.mix(span(random_roll=True), made.ids(1))
    with pytest.raises(RecipeError, match="needs at least 1 sentinels, but there are 0"):
        made.mix({"tasks": [{"objective": "prefix_lm", "sentinel": True}]}, made.ids(0))


def test_concat_refuses_span_corruption():
    with pytest.raises(
        RecipeError, match="task 'span_corruption': concat cuts at row ends.*\n.*best_fit"
    ):
        made.mix({"packing": {"algorithm": "concat"}, **span()})
    made.mix(
        {
            "packing": {"algorithm": "concat"},
            "tasks": [{"preset": "causal"}, {"preset": "prefix_lm"}],
        }
    )


@given(
    st.sampled_from([64, 136, 520]),
    st.sampled_from(["causal", "prefix_lm", "t5", "ul2", "ul2r"]),
    st.integers(4, 40) | st.just(4000),
    st.integers(0, 60).map(lambda n: n and n + 5),
)
@settings(max_examples=30)
def test_capacities_are_what_trying_every_length_gives(seq_length, preset, sentinels, max_tokens):
    table = {
        "seq_length": seq_length,
        "tasks": [{"preset": preset}],
        "documents": {"max_tokens": max_tokens},
    }
    recipe, tasks = made.mix(table, made.ids(sentinels))
    twin = made.twin_recipe(recipe, tasks)
    for t in range(len(tasks) - 1):
        expected = [[cutting.capacity(twin, t, bos, eos) for eos in (0, 1)] for bos in (0, 1)]
        assert capacities(recipe, tasks)[0][t].tolist() == expected


def test_pieces_that_end_before_the_row_does_divide_it():
    def of(sentinels=3000, seq_length=512, task="causal", **changes):
        recipe, tasks = made.mix(
            {"seq_length": seq_length, "tasks": [{"preset": task}], **changes}, made.ids(sentinels)
        )
        return pieces_of_a_row(recipe, tasks[0]), capacities(recipe, tasks)[1][0].tolist()

    assert of(100, 4096, "t5") == (2, [1862, 1861])
    assert of(3000, 4096, "t5") == (1, [3724, 3723])
    assert of(documents={"max_tokens": 200}) == (3, [170, 169])
    # From a sixteenth of a row that would stay empty.
    assert of(documents={"max_tokens": 480}) == (2, [256, 255]) and of(
        documents={"max_tokens": 481}
    ) == (1, [481, 481])
    assert of(documents={"max_tokens": 200}, packing={"max_segments_per_row": 2}) == (2, [200, 200])
    # Slots are rounded up to 64, what a piece may take of 512 / 3 down.
    assert of(documents={"max_tokens": 190}, packing={"pad_seq_to_mult": 64}) == (3, [128, 127])
    assert of(documents={"max_tokens": 200, "min_tokens": 100}) == (3, [199, 199])
    for changes in (
        {"documents": {"long": "truncate"}},
        {"documents": {"long": "drop"}},
        {"packing": {"algorithm": "concat"}},
    ):
        changes["documents"] = {**changes.get("documents", {}), "max_tokens": 200}
        assert of(**changes) == (1, [200, 200])


def test_pieces_that_end_with_eos_leave_it_a_slot():
    def of(sentinels=3000, seq_length=512, task="causal", **documents):
        documents["append_eos"] = "segment"
        table = {"seq_length": seq_length, "tasks": [{"preset": task}], "documents": documents}
        recipe, tasks = made.mix(table, made.ids(sentinels))
        return pieces_of_a_row(recipe, tasks[0]), capacities(recipe, tasks)[1][0].tolist()

    assert of() == (1, [511, 510])
    assert of(100, 4096, "t5") == (2, [1861, 1860])
    assert of(max_tokens=200) == (3, [169, 168])
    # A sixteenth of a row would stay empty up to 479 tokens and their eos.
    assert of(max_tokens=479) == (2, [255, 254]) and of(max_tokens=480) == (1, [480, 480])


def test_a_row_whose_pieces_could_not_leave_two_tails_is_refused_only_where_no_piece_could():
    made.mix({"seq_length": 512, "documents": {"max_tokens": 199, "min_tokens": 100}})
    with pytest.raises(RecipeError, match="needs at least 199"):
        made.mix({"seq_length": 512, "documents": {"max_tokens": 198, "min_tokens": 100}})


# thresholds


def test_thresholds_are_exact_cumulative_shares():
    recipe, _ = made.mix({"tasks": [{"preset": "ul2"}]})
    expected = [int(Fraction(i, 7) * 2**53) for i in range(1, 8)]
    found = thresholds(recipe)[0].tolist()
    assert found[-1] == 2**53 and max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1
    recipe, _ = made.mix({"tasks": [{"preset": "ul2r"}]})
    assert thresholds(recipe)[0].tolist() == [2**51, 2**51 + 2**50, 2**52, 2**53]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), st.data())
@settings(max_examples=60)
def test_draws_equal_the_twin_s_and_a_source_draws_its_own_tasks_alone(weights, data):
    names = [f"t{i}" for i in range(len(weights))]
    own = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    tables = [
        {"name": n, "objective": "causal", "weight": w} for n, w in zip(names, weights, strict=True)
    ]
    recipe, tasks = made.mix(
        {"tasks": tables, "sources": [{"paths": ["x"], "tasks": own}, {"paths": ["y"]}]}
    )
    limits = thresholds(recipe)
    assert limits.shape == (2, len(weights)) and limits[:, -1].tolist() == [2**53] * 2
    for s, allowed in enumerate([{names.index(n) for n in own}, set(range(len(names)))]):
        twins = made.twin_recipe(recipe, tasks)["tasks"]
        for i in range(40):
            key = chance.text_key("draw", i)
            u = chance.bits64(key, chance.TASK) >> 11
            found = int(np.argmax(u < limits[s]))
            assert found == cutting.draw_task(key, twins, allowed) and found in allowed


def test_a_source_s_task_name_stands_for_its_family():
    recipe, _ = made.mix(
        {"tasks": [{"preset": "ul2r"}], "sources": [{"paths": ["x"], "tasks": ["x"]}]}
    )
    assert thresholds(recipe)[0].tolist() == [0, 2**52, 2**53, 2**53]


def test_tasks_are_drawn_by_their_weights():
    recipe, tasks = made.mix({"tasks": [{"preset": "ul2r"}], "seq_length": 64})
    from packprep.building.segments import cut

    segments, _ = cut(recipe, tasks, made.documents([10] * 8000))
    counts = Counter(segments.task.tolist())
    for task, share in enumerate([0.25, 0.125, 0.125, 0.5]):
        assert abs(counts[task] - 8000 * share) < 5 * (8000 * share * (1 - share)) ** 0.5


# The table in the manifest


def test_task_table_is_what_all_segments_of_a_task_share():
    _, tasks = made.mix({"tasks": [{"preset": "ul2r"}]})
    table = task_table(tasks)
    assert table[0] == {
        "name": "r",
        "objective": "span_corruption",
        "weight": 0.25,
        "attention": "prefix",
        "label_alignment": "next_token",
        "mode_token": 260,
        "parameters": {
            "noise_density": 0.15,
            "mean_span_length": 3.0,
            "random_roll": False,
            "too_many_spans": "split",
        },
        "resolved": {},
    }
    assert (
        table[-1]["name"] == "too_short"
        and table[-1]["mode_token"] is None
        and table[-1]["weight"] == 0
    )


def test_tasks_of_which_one_weighs_a_hundred_times_another_are_warned_of():
    def warnings_of(level):
        tables = [
            {"name": "a", "objective": "causal"},
            {"name": "b", "objective": "block_diffusion", "noise_range": [level] * 2},
        ]
        return unequal_weights(made.mix({"tasks": tables})[1])

    assert warnings_of(0.01) == []
    (warning,) = warnings_of(0.005)
    assert warning.startswith(
        "the loss weight of a trained token is 200 in task b and 1 in task a, so a trains"
    )


def test_a_mode_token_takes_a_slot_whatever_its_id():
    task = made.mix({"tasks": [{"preset": "causal"}]})[1][0]
    assert [replace(task, mode_token=id).mode for id in (-1, 0, 1)] == [0, 1, 1]


def test_a_stored_task_has_the_parameters_that_joined_later(monkeypatch):
    later = replace(REGISTRY["causal"], parameters=(Parameter("depth", 3, "", later=True),))
    monkeypatch.setitem(REGISTRY, "causal", later)
    assert whole_task({"objective": "causal", "parameters": {}})["parameters"] == {"depth": 3}
    assert whole_task({"objective": "causal", "parameters": {"depth": 4}})["parameters"] == {
        "depth": 4
    }
    for task in (
        {"objective": "one of a plugin", "parameters": {}},
        {"objective": "causal", "parameters": None},
        {},
    ):
        assert whole_task(task) == task


def test_every_preset_resolves_alone_and_all_together():
    for preset in presets():
        made.mix({"tasks": [{"preset": preset}]})
    recipe, tasks = made.mix({"tasks": [{"preset": preset} for preset in presets()]})
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names) and resolve(recipe, made.ids(), made.MODE_TOKENS)


def test_documents_of_a_source_must_not_contain_the_marks_of_the_tasks_they_may_draw():
    sources = [
        {"name": "both", "paths": ["a"], "tasks": ["spans", "middle"]},
        {"name": "plain", "paths": ["b"], "tasks": ["text"]},
        {"name": "one", "paths": ["c"], "tasks": ["middle", "text"]},
    ]
    tasks = [
        {"objective": "span_corruption", "name": "spans"},
        {"objective": "fill_in_the_middle", "name": "middle"},
        {"objective": "causal", "name": "text"},
    ]
    recipe, resolved = made.mix({"tasks": tasks, "sources": sources})
    ids = made.ids()
    sentinels, middle = set(ids.sentinels.tolist()), set(ids.fim)
    both, plain, one = (
        [set(own.tolist()) for own in of] for of in marks_of_sources(recipe, resolved)
    )
    assert both[0] == sentinels | middle and one[0] == middle
    assert plain == [set(), set()]
    assert all(
        np.array_equal(own, np.unique(own))
        for of in marks_of_sources(recipe, resolved)
        for own in of
    )
