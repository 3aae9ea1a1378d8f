from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.building.plan import ids_of
from packprep.dataset.epochs.token_slots import ROLES
from packprep.errors import RecipeError
from packprep.objectives.objective import BodySlots
from packprep.objectives.tasks import capacities, needs_of
from packprep.recipe import Specials
from packprep.tokenizer.roles import Needs, resolve_vocabulary
from tests import made
from tests.objectives import lengths
from tests.properties import few_and_many
from tests.twin import cutting
from tests.twin.objectives import fill_in_the_middle

RATES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
PRE, MID, SUF = made.FIM


@st.composite
def configurations(draw, seq_length):
    mode = {"mode_token": "[NLG]"} if draw(st.booleans()) else {}
    parameters = {"rate": draw(RATES), "spm_rate": draw(RATES), "text_safe": draw(st.booleans())}
    return {
        "seq_length": seq_length,
        "documents": {
            "append_eos": draw(st.sampled_from(made.ENDS)),
            "prepend_bos": draw(st.booleans()),
        },
        "tasks": [{"objective": "fill_in_the_middle", **parameters, **mode}],
    }


def table(**parameters):
    return {"seq_length": 4096, "tasks": [{"objective": "fill_in_the_middle", **parameters}]}


def bodies(rendered):
    """The slots of each segment without its eos."""
    return [
        rendered.tokens[a : a + n - 1].tolist()
        for a, n in zip(rendered.at, rendered.slots, strict=True)
    ]


@pytest.mark.long
@few_and_many(3, 8, configurations(seq_length=4096 + 8), st.integers(0, 2**32))
def test_length_law_holds_for_every_length_to_4096_and_restore_gives_back_the_tokens(table, seed):
    recipe, tasks = made.mix(table)
    rendered = lengths.render_all(recipe, tasks, made.documents(np.arange(1, 4097), seed))
    assert rendered.segments.tokens.tolist() == list(range(1, 4097))
    lengths.check_lengths(rendered)
    lengths.check_restored(tasks, rendered)
    lengths.check_law(recipe, tasks, rendered)
    lengths.check_segments(tasks, rendered, [*range(60), *range(100, 4096, 200)])


@pytest.mark.long
@given(
    configurations(seq_length=64),
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.integers(0, 2**32),
)
@settings(max_examples=100)
def test_kernels_equal_their_twins_on_documents_that_are_cut(table, sizes, seed):
    recipe, tasks = made.mix(table)
    rendered = lengths.render_all(recipe, tasks, made.documents(sizes, seed))
    lengths.check_lengths(rendered)
    lengths.check_restored(tasks, rendered)
    lengths.check_law(recipe, tasks, rendered)
    lengths.check_segments(tasks, rendered, range(len(rendered.slots)))


@given(configurations(seq_length=128))
@settings(max_examples=20)
def test_capacity_is_what_trying_every_length_gives(table):
    recipe, tasks = made.mix(table)
    twin = made.twin_recipe(recipe, tasks)
    expected = [[cutting.capacity(twin, 0, bos, eos) for eos in (0, 1)] for bos in (0, 1)]
    assert capacities(recipe, tasks)[0][0].tolist() == expected


@pytest.mark.parametrize(
    "rate, spm_rate", [(0.5, 0.5), (0.9, 0.1), (0.25, 1.0), (1.0, 0.0), (0.0, 0.5)]
)
def test_shares_of_the_segments_are_rearranged_and_put_the_suffix_first(rate, spm_rate):
    count = 8000
    recipe, tasks = made.mix(table(rate=rate, spm_rate=spm_rate))
    found = bodies(lengths.render_all(recipe, tasks, made.documents([12] * count)))
    moved = [body for body in found if len(body) == 15]
    assert all(body[0] == PRE and body.count(MID) == body.count(SUF) == 1 for body in moved)
    assert abs(len(moved) - count * rate) <= 5 * (count * rate * (1 - rate)) ** 0.5
    # with an empty prefix the two orders look alike: the twin tells them apart
    first = sum(body[1] == SUF and body[-1] != MID for body in moved)
    both = [body for body in moved if body[1] != SUF]
    share = len(moved) * spm_rate
    assert first >= share - 5 * (share * (1 - spm_rate)) ** 0.5 - count / 13
    assert both if spm_rate < 1 and moved else not both


def test_the_cuts_are_two_different_ones_uniform_over_all_pairs():
    """Every pair of 0 … n equally often: the prefix and the suffix may be empty, the middle never
    is."""
    count, n = 21_000, 6
    recipe, tasks = made.mix(table(rate=1.0, spm_rate=0.0, text_safe=False))
    pairs = np.zeros((n + 1, n + 1), int)
    for body in bodies(lengths.render_all(recipe, tasks, made.documents([n] * count))):
        at_suf, at_mid = body.index(SUF), body.index(MID)
        pairs[at_suf - 1, at_suf - 1 + len(body) - 1 - at_mid] += 1
    expected = count / 21
    drawn = pairs[np.triu_indices(n + 1, 1)]
    assert drawn.sum() == count
    assert (abs(drawn - expected) < 5 * expected**0.5).all(), pairs


def test_the_worked_example_of_the_docstring():
    """Cuts 2 and 4 of six tokens, in both orders."""
    found = {}
    for spm_rate in (0.0, 1.0):
        recipe, tasks = made.mix({**table(rate=1.0, spm_rate=spm_rate, text_safe=False)})
        documents = made.documents([6] * 400)
        documents = replace(documents, ids=np.tile(np.arange(10, 16, dtype=np.uint16), 400))
        found[spm_rate] = bodies(lengths.render_all(recipe, tasks, documents))
    assert [PRE, 10, 11, SUF, 14, 15, MID, 12, 13] in found[0.0]
    assert [PRE, SUF, 14, 15, MID, 10, 11, 12, 13] in found[1.0]


def test_every_slot_but_the_last_is_trained_and_nothing_is_prefix():
    recipe, tasks = made.mix(table(rate=1.0))
    rendered = lengths.render_all(recipe, tasks, made.documents([20] * 30))
    assert not rendered.prefix.any()
    for at, slots in zip(rendered.at, rendered.slots, strict=True):
        assert rendered.loss_mask[at : at + slots].tolist() == [1] * (slots - 1) + [0]


@given(st.lists(st.sampled_from([*made.FIM, 1]), min_size=200, max_size=200), RATES, st.booleans())
@settings(max_examples=40)
def test_fault_20_content_that_looks_like_role_tokens_is_given_back(content, spm_rate, text_safe):
    recipe, tasks = made.mix(table(rate=1.0, spm_rate=spm_rate, text_safe=text_safe))
    documents = replace(made.documents([20] * 10), ids=np.array(content, np.uint16))
    rendered = lengths.render_all(recipe, tasks, documents)
    lengths.check_restored(tasks, rendered)


# Characters

TEXTS = st.text(st.sampled_from("aé数🙂z "), min_size=1, max_size=60)


def of_bytes(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)


@pytest.fixture(scope="module")
def bytes_vocabulary(tmp_path_factory):
    """The ids of the bytes vocabulary."""
    needs = Needs(frozenset({"pad", "eos", *ROLES}), (), 0)
    return ids_of(resolve_vocabulary("bytes", tmp_path_factory.mktemp("none"), Specials(), needs))


def parts_of(body, fim):
    """prefix, middle and suffix of a rendered body with empty ones among them, or the body
    alone."""
    if body[0] != fim[0]:
        return [body]
    pieces, piece = [], []
    for token in body[1:]:
        if token in fim:
            pieces.append(piece)
            piece = []
        else:
            piece.append(token)
    return [*pieces, piece]


@given(texts=st.lists(TEXTS, min_size=1, max_size=8), spm_rate=RATES, seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_no_part_begins_inside_a_character(bytes_vocabulary, texts, spm_rate, seed):
    recipe, tasks = made.mix(table(rate=1.0, spm_rate=spm_rate), bytes_vocabulary)
    tokens = [of_bytes(text) for text in texts]
    documents = replace(made.documents([len(t) for t in tokens], seed), ids=np.concatenate(tokens))
    rendered = lengths.render_all(recipe, tasks, documents)
    lengths.check_restored(tasks, rendered)
    fim = bytes_vocabulary.fim
    for g, (at, slots) in enumerate(zip(rendered.at, rendered.slots, strict=True)):
        if rendered.segments.tokens[g] < 3:
            continue  # too_short
        body = rendered.tokens[at : at + slots - 1].tolist()
        pieces = parts_of(body, fim)
        assert body[0] == fim[0] and 3 <= len(pieces) <= 4
        for piece in pieces:
            bytes(piece).decode()  # an error if it is no whole text
    twin = {
        **tasks[0].parameters,
        "fim": fim,
        "inside": set(np.flatnonzero(bytes_vocabulary.continues).tolist()),
    }
    assert twin["inside"] == set(range(0x80, 0xC0))
    for g in np.flatnonzero(rendered.segments.tokens >= 3):
        begin = int(documents.offsets[rendered.segments.document[g]])
        content = documents.ids[begin : begin + int(rendered.segments.tokens[g])].tolist()
        body = rendered.tokens[rendered.at[g] : rendered.at[g] + rendered.slots[g] - 1].tolist()
        assert (
            body
            == fill_in_the_middle.body(
                content, {"parameters": twin, "key": int(rendered.segments.key[g])}
            )[0]
        )


def test_without_text_safe_characters_are_cut(bytes_vocabulary):
    recipe, tasks = made.mix(table(rate=1.0, spm_rate=0.0, text_safe=False), bytes_vocabulary)
    tokens = of_bytes("🙂" * 10)
    documents = replace(made.documents([40] * 50), ids=np.tile(tokens, 50))
    rendered = lengths.render_all(recipe, tasks, documents)
    lengths.check_restored(tasks, rendered)
    begins = [
        piece[0]
        for body in bodies(rendered)
        for piece in parts_of(body, bytes_vocabulary.fim)
        if piece
    ]
    assert sum(0x80 <= begin < 0xC0 for begin in begins) > 50


# What it needs, and what it refuses


def test_the_role_tokens_are_needed_only_where_it_is_applied():
    recipe, _ = made.mix(table())
    assert needs_of(recipe)[0] == {"pad", "eos", *ROLES}
    without = made.ids()
    without = type(without)(65536, made.PAD, made.BOS, made.EOS, made.MASK, without.sentinels)
    recipe, tasks = made.mix(table(rate=0.0), without)
    assert needs_of(recipe)[0] == {"pad", "eos"}
    with pytest.raises(
        RecipeError, match="needs a token for fim_middle, fim_prefix, fim_suffix\nhint: set it in"
    ):
        made.mix(table(), without)


def test_concat_refuses_it():
    with pytest.raises(
        RecipeError, match="task 'fill_in_the_middle': concat cuts at row ends.*\n.*best_fit"
    ):
        made.mix({**table(), "packing": {"algorithm": "concat"}})


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
@pytest.mark.parametrize("role", range(3))
def test_restore_finds_a_role_token_that_is_not_there(spm_rate, role):
    recipe, tasks = made.mix(table(rate=1.0, spm_rate=spm_rate))
    rendered = lengths.render_all(recipe, tasks, made.documents([20]))
    columns = BodySlots(np.zeros(1, np.int64), rendered.segments.bodies(), rendered.at)
    out = np.zeros(20, np.uint16)
    assert tasks[0].objective.restore(tasks[0], columns, rendered.tokens, out).tolist() == [True]
    damaged = np.where(rendered.tokens == made.FIM[role], 5, rendered.tokens).astype(np.uint16)
    assert tasks[0].objective.restore(tasks[0], columns, damaged, out).tolist() == [False]
