"""Records that group_by joins: their tokens, and what a sample knows of them."""

import numpy as np
import pytest

from packprep.documents.joining import check_between, ids_between, join_records, joined_texts
from packprep.errors import RecipeError
from packprep.recipe import Source
from packprep.tokenizer.encoding import Tokens
from tests.conversations.test_media import vocabulary_of


def test_joined_documents_have_tokens_between_records_and_samples_count_them():
    # Documents 0 and 1 have three records and one record. The second record is not used.
    tokens = Tokens(np.arange(6, dtype=np.int32), np.array([0, 2, 3, 5, 6]), [])
    number, used = np.array([0, 0, 0, 1]), np.array([True, False, True, True])
    joined = join_records(tokens, np.array([7, 5, 9, 20]), number, used, (100, 101))
    assert joined.tokens.ids.tolist() == [0, 1, 100, 101, 3, 4, 5]
    assert joined.tokens.offsets.tolist() == [0, 6, 7]
    assert joined.positions.tolist() == [7, 20]
    offsets, positions, starts, lengths = (column.tolist() for column in joined.records)
    assert (offsets, positions, starts) == ([0, 2, 3], [7, 9, 20], [0, 4, 0])
    assert lengths == [2, 2, 1]

    texts, separators = joined_texts(["a", "b", "c", "d"], number, 2)
    assert texts == ["abc", "d"] and [own.slots for own in separators] == [4, 0]
    assert joined_texts([], number[:0], 2) == ([], [])


def test_a_token_between_records_exists_and_has_no_other_meaning(tmp_path):
    vocabulary = vocabulary_of(tmp_path)
    source = Source(name="a", paths=("a",), group_by="repo", between=("<eos>", 5))
    assert ids_between(source, vocabulary) == (vocabulary.roles["eos"], 5)
    check_between(source, vocabulary, {4, 6})
    with pytest.raises(RecipeError, match="'a': between = 5: a task or .specials. media gives"):
        check_between(source, vocabulary, {5})
    for token in ("<none>", 9999):
        with pytest.raises(RecipeError, match="the tokenizer has no such token"):
            ids_between(Source(paths=("a",), group_by="repo", between=(token,)), vocabulary)
    assert ids_between(Source(paths=("a",)), vocabulary) == ()
