"""packprep.documents.reading: ids as a source gives them → content."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.documents.reading import TextReader, take_tokens
from packprep.recipe import DocumentKeys, Specials
from packprep.sources.formats import Batch, IdLists
from packprep.tokenizer.roles import Needs, resolve_vocabulary
from tests.tokens_made import BOS, EOS, MASK


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    needs = Needs(frozenset({"eos", "bos", "mask"}), (), 4)
    return resolve_vocabulary("bytes", tmp_path_factory.mktemp("none"), Specials(), needs)


def taken(lists, vocabulary, dtype="<i8", **settings):
    ids = np.array([id for ids in lists for id in ids], dtype)
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in lists], dtype=np.int64))).astype(
        np.int64
    )
    tokens = take_tokens(IdLists(ids, offsets), DocumentKeys(**settings), vocabulary)
    assert tokens.ids.dtype == np.int32
    bounds = zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)
    return [tokens.ids[a:b].tolist() for a, b in bounds], tokens.rejected


@pytest.mark.parametrize(
    "ids, content",
    [
        ([1, 2, EOS], [1, 2]),
        ([1, 2], [1, 2]),
        ([1, EOS, EOS], [1, EOS]),
        ([EOS], []),
        ([], []),
        ([BOS, 1, EOS], [BOS, 1]),
        ([EOS, 1], [EOS, 1]),
    ],
)
def test_one_eos_at_the_end_is_the_one_that_is_appended(vocabulary, ids, content):
    assert taken([ids, [5], ids], vocabulary) == ([content, [5], content], [])
    assert taken([ids, [5], ids], vocabulary, append_eos=False) == ([ids, [5], ids], [])


@pytest.mark.parametrize(
    "ids, content",
    [
        ([BOS, 1], [1]),
        ([BOS], []),
        ([BOS, BOS, 1, EOS], [BOS, 1]),
        ([BOS, EOS], []),
        ([1, BOS], [1, BOS]),
    ],
)
def test_one_bos_at_the_begin_is_the_one_that_is_prepended(vocabulary, ids, content):
    assert taken([ids, ids], vocabulary, prepend_bos=True) == ([content, content], [])


@pytest.mark.parametrize(
    "dtype, odd",
    [
        ("i1", -1),
        ("<i2", -7),
        ("<u2", 65535),
        ("<i4", 528),
        ("<i8", 2**32 + 1),
        ("<i8", -(2**63)),
        ("<u8", 2**64 - 1),
    ],
)
def test_an_id_that_is_none_rejects_its_document_and_never_wraps(vocabulary, dtype, odd):
    found = taken([[1, 2], [3, odd, odd], [odd], [4]], vocabulary, dtype)
    assert found[0] == [[1, 2], [], [], [4]]
    said = f"is {odd}; the vocabulary has 528 ids"
    assert found[1] == [
        (1, "id_out_of_range", f"token 1 {said}"),
        (2, "id_out_of_range", f"token 0 {said}"),
    ]


def test_special_ids_stay_or_reject_as_the_recipe_says(vocabulary):
    lists = [[1, MASK, 2], [1, EOS, 2, EOS], [3, EOS], [MASK]]
    kept = [[1, MASK, 2], [1, EOS, 2], [3], [MASK]]
    for special_text in ("text", "special"):
        assert taken(lists, vocabulary, special_text=special_text) == (kept, [])
    found = taken(lists, vocabulary, special_text="reject")
    assert found[0] == [[], [], [3], []]
    assert found[1] == [
        (0, "special_text", f"token 1 is the special id {MASK}"),
        (1, "special_text", f"token 1 is the special id {EOS}"),
        (3, "special_text", f"token 0 is the special id {MASK}"),
    ]
    assert (
        taken([[3, EOS]], vocabulary, special_text="reject", append_eos=False)[1][0][1]
        == "special_text"
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([1, 2, 3, BOS, EOS, MASK, -1, 528]), max_size=6), max_size=12
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["text", "reject"]),
)
def test_it_is_what_the_twin_takes(vocabulary, lists, append_eos, prepend_bos, special_text):
    from tests.twin.tokens import content

    given_settings = {
        "append_eos": append_eos,
        "prepend_bos": prepend_bos,
        "special_text": special_text,
    }
    found, rejected = taken(lists, vocabulary, **given_settings)
    forbidden = set(vocabulary.special_ids) if special_text == "reject" else set()
    ends = EOS if append_eos else None, BOS if prepend_bos else None
    expected = [content(ids, 528, forbidden, *ends) for ids in lists]
    assert found == [ids or [] for ids in expected]
    assert [i for i, _, _ in rejected] == [i for i, ids in enumerate(expected) if ids is None]


def test_the_weight_of_eos_is_its_own_or_that_of_the_last_token(vocabulary):
    for ids, weights, changes, wanted in (
        ([1, 2], [0.5, 0.25], {}, [0.5, 0.25, 0.25]),
        ([1, 2, EOS], [0.5, 0.25, 2], {}, [0.5, 0.25, 2]),
        ([1, EOS], [0.5, 2], {"append_eos": False}, [0.5, 2, 2]),
        ([BOS, 1], [9, 0.5], {}, [9, 0.5, 0.5]),
        ([BOS, 1], [9, 0.5], {"prepend_bos": True}, [0.5, 0.5]),
        ([BOS, 1, EOS], [9, 0.5, 2], {"prepend_bos": True}, [0.5, 2]),
        ([1, 2], [0.5, 0.25], {"prepend_bos": True}, [0.5, 0.25, 0.25]),
        ([BOS], [3], {"prepend_bos": True}, [0]),
        ([EOS], [3], {}, [3]),
        ([], [], {}, [0]),
    ):
        lists = IdLists(np.array([7, *ids, BOS]), np.array([0, 1, 1 + len(ids), 2 + len(ids)]))
        of_tokens = np.array([8, *weights, 6], np.float32)
        batch = Batch([], None, None, [], {}, lists, {}, of_tokens)
        keys = DocumentKeys(**changes)
        reader = SimpleNamespace(vocabulary=vocabulary, settings=keys)
        tokens = take_tokens(lists, keys, vocabulary)
        assert TextReader._token_weights(reader, batch, tokens, 1).tolist() == wanted
