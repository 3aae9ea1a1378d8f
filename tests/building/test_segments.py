from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.building.segments import Cuts, cut
from packprep.conversations.supervision import Conversation
from packprep.conversations.training import trained_tokens, training_columns
from packprep.errors import RecipeError
from tests import made
from tests.properties import few_and_many
from tests.twin import chance, cutting, objectives, tokens
from tests.twin.reading import Text

FILLED = [
    {"objective": "block_diffusion", "block_origin": "answer", "eos_fill": "block", **changes}
    for changes in (
        {"name": "b4", "block_length": 4},
        {"name": "b3", "block_length": 3, "mode_token": "[NLG]", "shift": True},
        {"name": "bs", "block_length": 5, "block_origin": "segment"},
    )
]
TASKS = st.lists(
    st.sampled_from(
        [
            {"name": "c", "objective": "causal"},
            {"name": "m", "objective": "causal", "mode_token": "[NLG]", "weight": 0.5},
            {"name": "p", "objective": "prefix_lm", "mode_token": "[S2S]", "weight": 2.0},
            {"name": "ps", "objective": "prefix_lm", "sentinel": True},
            {"name": "r", "objective": "span_corruption", "weight": 3.0, "mode_token": "[NLU]"},
            {
                "name": "rr",
                "objective": "span_corruption",
                "random_roll": True,
                "noise_density": 0.4,
            },
            {
                "name": "d",
                "objective": "span_corruption",
                "noise_density": 0.5,
                "mean_span_length": 2,
            },
            {
                "name": "l",
                "objective": "span_corruption",
                "noise_density": 0.5,
                "too_many_spans": "lower",
            },
            {"name": "b", "objective": "block_diffusion"},
            {"name": "x", "objective": "masked_diffusion", "random_length": 0.4},
        ]
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda task: task["name"],
)


@st.composite
def recipes(draw):
    """(table, number of sentinels) of small rows."""
    least = draw(st.integers(1, 8))
    table = {
        "seq_length": draw(st.sampled_from([32, 40, 64, 128])),
        "seed": draw(st.integers(0, 3)),
        "tasks": draw(TASKS),
        "packing": {
            "pad_seq_to_mult": draw(st.sampled_from([1, 1, 4, 8])),
            "max_segments_per_row": draw(st.sampled_from([0, 0, 2, 3])),
        },
        "documents": {
            "append_eos": draw(st.sampled_from(made.ENDS)),
            "prepend_bos": draw(st.booleans()),
            "long": draw(st.sampled_from(["split", "split", "truncate", "drop"])),
            "min_tokens": least,
            "max_tokens": draw(st.sampled_from([0, 0, 16, 50])),
        },
    }
    return table, draw(st.integers(4, 12) | st.just(200))


def facts_key(documents, d):
    file_key, position, repeat = (
        int(c[d]) for c in (documents.file_key, documents.position, documents.repeat)
    )
    return lambda start: chance.segment_key(file_key, position, repeat, start)


def without_segments(segments, sizes):
    """How many documents have none: those that are dropped."""
    return len(sizes) - len(np.unique(segments.document))


@few_and_many(
    30, 60, recipes(), st.lists(st.integers(1, 400), min_size=1, max_size=10), st.integers(0, 2**32)
)
def test_cut_equals_its_twin(configuration, sizes, seed):
    table, sentinels = configuration
    try:
        recipe, tasks = made.mix(table, made.ids(sentinels))
    except RecipeError as error:
        assert "cut" in str(error)  # a row or max_tokens that could not leave a tail
        return
    # reading leaves shorter ones out
    sizes = [max(size, recipe.documents.min_tokens) for size in sizes]
    documents = made.documents(sizes, seed)
    segments, lost = cut(recipe, tasks, documents)
    expected, left_out = [], 0
    twin = made.twin_recipe(recipe, tasks)
    for d, size in enumerate(sizes):
        key = facts_key(documents, d)
        found = cutting.cut(size, {**twin, "key": key})
        left_out += not found
        expected += [(d, *map(int, segment), key(segment[0]), 0, -1, 0) for segment in found]
    assert list(zip(*columns_of(segments), strict=True)) == expected
    assert without_segments(segments, sizes) == left_out and not lost.untrained.any()


def columns_of(segments):
    """The columns that cutting decides, as lists."""
    return [getattr(segments, name).tolist() for name in Cuts._fields]


@few_and_many(30, 60, recipes(), st.integers(1, 10), st.randoms(use_true_random=False))
def test_cut_equals_its_twin_where_documents_say_what_is_trained(configuration, count, chance_of):
    table, sentinels = configuration
    taken = {"causal", "prefix_lm", "masked_diffusion"}
    table["tasks"] = [task for task in table["tasks"] if task["objective"] in taken] or [
        {"objective": "causal"}
    ]
    table["tasks"] += chance_of.sample(FILLED, chance_of.choice([0, 1, 2]))
    try:
        recipe, tasks = made.mix(table, made.ids(sentinels))
        cut(recipe, tasks, made.documents([]))
    except RecipeError as error:
        assert "cut" in str(error) or "eos_fill needs room" in str(error)
        return
    least = recipe.documents.min_tokens
    marked = [conversation(chance_of, max(least, chance_of.randint(1, 400))) for _ in range(count)]
    sizes = [len(one.text) for one in marked]
    documents = replace(made.documents(sizes, count), training=training(marked, recipe))
    segments, lost = cut(recipe, tasks, documents)
    twin, expected = made.twin_recipe(recipe, tasks), []
    # tokens that may be trained, and those that are, where nothing is cut off
    told = np.zeros((count, 2), np.int64)
    for d, (size, one) in enumerate(zip(sizes, marked, strict=True)):
        key, trained = (
            facts_key(documents, d),
            tokens.trained_tokens(as_twin(one), list(range(size))),
        )
        told[d, 0] = sum(end - begin for begin, end in trained.spans)
        for *segment, copy, first, fill in cutting.cut_supervised(
            size, trained, {**twin, "key": key}
        ):
            expected.append((d, *map(int, segment), key(segment[0]), copy, first, fill))
            kept = cutting.trained_in(
                trained, *segment[:2], recipe.documents.long_answers == "continue"
            )
            told[d, 1] += sum(end - begin for begin, end, _ in kept)
    assert list(zip(*columns_of(segments), strict=True)) == expected
    if recipe.documents.long == "split":
        # trained first tokens of pieces that are left out
        unpredicted = told[:, 0] - told[:, 1] - lost.apart
        assert ((unpredicted >= 0) & (unpredicted <= lost.untrained)).all()


def conversation(chance_of, size):
    """A document of a token for each character: spans, messages' begins, in half of them with
    roles, and a system message."""
    edges = sorted(
        chance_of.sample(range(size + 1), 2 * chance_of.randint(1, max(1, min(3, size // 2))))
    )
    cuts = (
        sorted(chance_of.sample(range(1, size), min(size - 1, chance_of.randint(0, 6))))
        if size > 1
        else []
    )
    roles = chance_of.choices(["user", "assistant", "assistant", "tool", "system"], k=len(cuts) + 1)
    system = chance_of.choice([0, min(size // 2, 5), min(size // 2, 60)])
    spans = tuple(zip(edges[::2], edges[1::2], strict=True))
    weights = tuple(chance_of.choice([0.5, 1.0, 3.0]) for _ in spans)
    # two that touch, of unequal weight
    if chance_of.random() < 0.5 and spans[-1][1] - spans[-1][0] > 1:
        *spans, (begin, end) = spans
        middle = chance_of.randrange(begin + 1, end)
        spans, weights = (*spans, (begin, middle), (middle, end)), (*weights, weights[-1] * 2)
    roles = tuple(roles) if chance_of.random() < 0.5 else ()
    return Conversation("x" * size, spans, tuple(cuts), roles, system, weights=weights)


def as_twin(one):
    """A conversation as the twin has it."""
    spans = [(*span, weight) for span, weight in zip(one.spans, one.weights, strict=True)]
    return Text(one.text, spans, True, one.boundaries, one.roles, one.system_end)


def training(conversations, recipe):
    """Such documents as `cut` takes them."""
    trained = {
        i: trained_tokens(one, np.arange(len(one.text))) for i, one in enumerate(conversations)
    }
    return training_columns(trained, len(trained), recipe.documents.long_answers)


def of_a_conversation(system, **changes):
    """(n, copy) of each piece of 1000 tokens, all of them trained, of which the first `system` are
    a system message."""
    recipe, tasks = made.mix({"seq_length": 512, **changes})
    trained = training([Conversation("x" * 1000, ((0, 1000),), system_end=system)], recipe)
    segments, _ = cut(recipe, tasks, replace(made.documents([1000]), training=trained))
    return list(zip(segments.tokens.tolist(), segments.repeated.tolist(), strict=True))


def test_what_later_pieces_repeat_leaves_room_for_two_tails_in_pieces_that_divide_a_row():
    assert of_a_conversation(100)[:2] == [(512, 0), (412, 100)]
    # Three pieces a row, 170 tokens each: 165 leave room for two tails of 3, less one; 166 do not.
    assert of_a_conversation(165, documents={"max_tokens": 200})[:3] == [
        (170, 0),
        (5, 165),
        (5, 165),
    ]
    assert of_a_conversation(166, documents={"max_tokens": 200})[:3] == [
        (170, 0),
        (170, 0),
        (170, 0),
    ]
    # A last piece has to hold eos, too.
    assert of_a_conversation(506)[:2] == [(512, 0), (6, 506)] and of_a_conversation(507)[:2] == [
        (512, 0),
        (488, 0),
    ]


@given(recipes(), st.lists(st.integers(1, 400), min_size=1, max_size=10), st.integers(0, 2**32))
@settings(max_examples=100)
def test_fault_06_segments_fit_after_corruption_tile_their_documents_and_leave_no_short_tail(
    configuration, sizes, seed
):
    table, sentinels = configuration
    table["documents"]["long"] = "split"
    try:
        recipe, tasks = made.mix(table, made.ids(sentinels))
    except RecipeError:
        return
    sizes = np.maximum(sizes, recipe.documents.min_tokens)
    segments, lost = cut(recipe, tasks, made.documents(sizes, seed))
    assert without_segments(segments, sizes) == 0 and not lost.untrained.any()
    assert segments.slots.max() <= recipe.seq_length
    first = np.concatenate(([True], segments.document[1:] != segments.document[:-1]))
    last = np.concatenate((first[1:], [True]))
    ends = segments.start + segments.tokens
    assert (segments.start[first] == 0).all() and (
        segments.start[1:][~first[1:]] == ends[:-1][~first[1:]]
    ).all()
    assert np.array_equal(ends[last], sizes[segments.document[last]])
    assert np.array_equal(segments.bos == 1, first & recipe.documents.prepend_bos)
    documents = recipe.documents
    assert np.array_equal(
        segments.eos == 1, documents.eos_after_segment | (last & documents.eos_after_document)
    )
    assert (segments.tokens[~first & last] >= recipe.min_tail).all() and (
        segments.tokens[~last] >= 3
    ).all()
    assert np.array_equal(segments.task == len(tasks) - 1, segments.tokens < 3)
    if recipe.documents.max_tokens:
        assert segments.tokens.max() <= recipe.documents.max_tokens


def test_fault_04_documents_of_one_and_two_tokens_are_segments_of_their_own():
    recipe, tasks = made.mix({"tasks": [{"preset": "ul2r"}], "documents": {"prepend_bos": True}})
    segments, _ = cut(recipe, tasks, made.documents([1, 2, 3, 1]))
    assert segments.tokens.tolist() == [1, 2, 3, 1]
    assert (segments.task == len(tasks) - 1).tolist() == [True, True, False, True]
    assert segments.slots[[0, 1, 3]].tolist() == [3, 4, 3]


def test_fault_18_only_a_recipe_that_says_so_truncates():
    sizes = [5000, 10, 900]
    recipe, tasks = made.mix({"seq_length": 64})
    segments, _ = cut(recipe, tasks, made.documents(sizes))
    assert np.bincount(segments.document, segments.tokens).tolist() == sizes
    recipe, tasks = made.mix({"seq_length": 64, "documents": {"long": "truncate"}})
    segments, _ = cut(recipe, tasks, made.documents(sizes))
    assert (segments.tokens.tolist(), segments.eos.tolist()) == ([64, 10, 64], [0, 1, 0])
    assert without_segments(segments, sizes) == 0
    recipe, tasks = made.mix(
        {"seq_length": 64, "documents": {"long": "truncate", "append_eos": "segment"}}
    )
    segments, _ = cut(recipe, tasks, made.documents(sizes))
    assert (segments.tokens.tolist(), segments.eos.tolist()) == ([63, 10, 63], [1, 1, 1])


def test_fault_21_a_dropped_document_leaves_the_others_where_they_were():
    recipe, tasks = made.mix({"seq_length": 64, "documents": {"long": "drop"}})
    segments, _ = cut(recipe, tasks, made.documents([10, 500, 20, 63, 64, 30]))
    assert segments.document.tolist() == [0, 2, 3, 5] and segments.tokens.tolist() == [
        10,
        20,
        63,
        30,
    ]


def test_no_documents_give_no_segments():
    recipe, tasks = made.mix({"tasks": [{"preset": "ul2r"}]})
    segments, lost = cut(recipe, tasks, made.documents([]))
    assert len(segments.tokens) == len(lost.untrained) == 0 and len(segments.slots) == 0


# concat


@st.composite
def concat_recipes(draw, most=3):
    return {
        "seq_length": draw(st.sampled_from([8, 16, 32, 64])),
        "packing": {
            "algorithm": "concat",
            "max_segments_per_row": draw(st.sampled_from([0, 0, most, 1])),
        },
        "tasks": draw(
            TASKS.filter(
                lambda tasks: all(task["objective"] != "span_corruption" for task in tasks)
            )
        ),
        "documents": {
            "append_eos": draw(st.sampled_from(made.ENDS)),
            "prepend_bos": draw(st.booleans()),
            "max_tokens": draw(st.sampled_from([0, 0, 7, 20])),
        },
    }


def rows_of_concat(recipe, tasks, documents):
    """(segments, row of each, where in it each begins)."""
    segments, _ = cut(recipe, tasks, documents)
    begin = np.cumsum(segments.slots) - segments.slots
    return segments, segments.row, begin - begin[np.searchsorted(segments.row, segments.row)]


def of_concat(table, sizes, seed):
    try:
        recipe, tasks = made.mix(table)
    except RecipeError as error:
        assert "cut" in str(error)
        return None
    documents = made.documents(sizes, seed)
    return recipe, tasks, documents, *rows_of_concat(recipe, tasks, documents)


@few_and_many(
    70,
    200,
    concat_recipes(),
    st.lists(st.integers(1, 120), min_size=1, max_size=30),
    st.integers(0, 2**32),
)
def test_concat_equals_its_twin(table, sizes, seed):
    made_of = of_concat(table, sizes, seed)
    if made_of is None:
        return
    recipe, tasks, documents, segments, row, offset = made_of
    facts = {
        **made.twin_recipe(recipe, tasks),
        "keys": [facts_key(documents, d) for d in range(len(sizes))],
    }
    expected = cutting.lay(sizes, facts)
    columns = (
        segments.document,
        segments.start,
        segments.tokens,
        segments.task,
        segments.bos,
        segments.eos,
        row,
        offset,
    )
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    keys = [facts["keys"][d](start) for d, start, *_ in expected]
    assert segments.key.tolist() == keys


@given(
    concat_recipes(),
    st.lists(st.integers(1, 120) | st.integers(1, 3), min_size=1, max_size=30),
    st.integers(0, 2**32),
)
@settings(max_examples=200)
def test_concat_fills_rows_but_for_less_than_two_slots_and_no_segment_is_eos_alone(
    table, sizes, seed
):
    made_of = of_concat(table, sizes, seed)
    if made_of is None:
        return
    recipe, tasks, documents, segments, row, offset = made_of
    slots = segments.slots
    assert (segments.tokens >= 1).all()
    assert np.array_equal(np.bincount(segments.document, segments.tokens), sizes)
    order = np.arange(len(row))
    assert np.array_equal(np.lexsort((offset, row)), order)  # document order is kept
    fill = np.bincount(row, slots).astype(np.int64)
    ends = np.cumsum(np.bincount(row)) - 1
    assert np.array_equal(offset[ends] + slots[ends], fill) and fill.max() <= recipe.seq_length
    most = recipe.packing.max_segments_per_row
    assert not most or np.bincount(row).max() <= most
    for r, left in enumerate(recipe.seq_length - fill[:-1]):
        if np.count_nonzero(row == r) == most:
            continue  # full of segments
        after = ends[r] + 1  # the segment that begins the next row
        # Two slots hold no bos, token and eos, and neither may be parted from the token.
        framed = segments.bos[after] == segments.eos[after] == 1
        framed &= segments.tokens[after] == 1 or recipe.documents.eos_after_segment
        assert left < 2 or (left == 2 and framed), (r, left)


def test_concat_of_long_documents_pads_only_the_shard_s_last_row():
    recipe, tasks = made.mix({"seq_length": 512, "packing": {"algorithm": "concat"}})
    documents = made.documents(np.random.default_rng(0).integers(3, 2000, 500))
    segments, row, offset = rows_of_concat(recipe, tasks, documents)
    fill = np.bincount(row, segments.slots)
    assert 512 * len(fill) - fill.sum() <= 512 + len(fill) and (fill[:-1] >= 511).all()


def test_fault_10_a_row_of_concat_never_has_more_segments_than_the_format_can_number():
    recipe, tasks = made.mix({"seq_length": 1 << 18, "packing": {"algorithm": "concat"}})
    segments, row, offset = rows_of_concat(
        recipe, tasks, made.documents(np.ones(150_000, np.int64))
    )
    assert np.bincount(row).tolist() == [65535, 65535, 150_000 - 2 * 65535]
    recipe, tasks = made.mix(
        {"seq_length": 64, "packing": {"algorithm": "concat", "max_segments_per_row": 2}}
    )
    segments, row, offset = rows_of_concat(recipe, tasks, made.documents([3] * 5))
    assert row.tolist() == [0, 0, 1, 1, 2] and offset.tolist() == [0, 4, 0, 4, 0]


def test_concat_refuses_what_it_would_have_to_break():
    recipe, tasks = made.mix(
        {"packing": {"algorithm": "concat"}, "documents": {"long": "truncate"}}
    )
    with pytest.raises(
        RecipeError,
        match='documents.long = "truncate", but concat cuts documents at row ends\nhint: use "split"',
    ):
        cut(recipe, tasks, made.documents([5]))


def test_slots_are_by_the_law_of_each_segment_s_own_task():
    recipe, tasks = made.mix(
        {"seq_length": 64, "tasks": [{"preset": "ul2r"}], "documents": {"prepend_bos": True}}
    )
    segments, _ = cut(recipe, tasks, made.documents([40, 2, 30, 200, 17] * 5))
    twins = [made.twin_task(task) for task in tasks]
    expected = []
    for n, t, bos, eos, key in zip(*columns_of(segments)[2:7], strict=True):
        facts = cutting.segment_facts(
            twins[t], made.BOS if bos else None, made.EOS if eos else None, key
        )
        expected.append(objectives.law(twins[t]["objective"], n, facts))
    assert segments.slots.tolist() == expected
