"""Ids that a source gives → Tokens: in range, special ids as the recipe says, without the bos and eos that packprep adds."""

from functools import lru_cache

import numpy as np

from packprep.corpus.engines.engine import offsets_of
from packprep.corpus.readers import IdLists
from packprep.corpus.tokenization import Tokens
from packprep.corpus.tokenizer_json import unknown_id
from packprep.corpus.vocabulary import Vocabulary
from packprep.recipe import DocumentKeys


def take_tokens(lists: IdLists, documents: DocumentKeys, vocabulary: Vocabulary) -> Tokens:
    """The content of each list of ids: as `tokenize` gives it for texts.

    A document with an id outside of [0, vocab_size) is rejected, reason "id_out_of_range".
    append_eos: one eos at a document's end is the one that packprep appends, and no content. prepend_bos: likewise one bos
    at its begin. special_text: under "text" and "special" ids of special tokens in the content stay what they are, as
    their writer meant them; under "reject" they reject the document, reason "special_text".
    """
    ids, offsets = lists
    rejected: dict[int, tuple[str, str]] = {}
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary.vocab_size):
        outside = np.flatnonzero((ids < 0) | (ids >= vocabulary.vocab_size))
        for i, place in _firsts(outside, offsets):
            of = f"the vocabulary has {vocabulary.vocab_size} ids"
            rejected[i] = ("id_out_of_range", f"token {place - int(offsets[i])} is {int(ids[place])}; {of}")
    begin, end = offsets[:-1].copy(), offsets[1:].copy()
    if documents.append_eos and len(ids):
        end -= (end > begin) & (ids[np.maximum(end - 1, 0)] == vocabulary.roles["eos"])
    if documents.prepend_bos and len(ids):
        begin += (end > begin) & (ids[np.minimum(begin, len(ids) - 1)] == vocabulary.roles["bos"])
    if documents.special_text == "reject":
        forbidden = _forbidden(vocabulary)
        places = np.flatnonzero(np.isin(ids, forbidden))
        owner = np.searchsorted(offsets, places, side="right") - 1
        places = places[(places >= begin[owner]) & (places < end[owner])]
        for i, place in _firsts(places, offsets):
            detail = f"token {place - int(offsets[i])} is the special id {int(ids[place])}"
            rejected.setdefault(i, ("special_text", detail))
    end[list(rejected)] = begin[list(rejected)]
    lengths = end - begin
    if int(lengths.sum()) != len(ids):
        # What is left out lies before, between and behind the contents: a mark where it changes, summed up.
        change = np.zeros(len(ids) + 1, np.int8)
        np.add.at(change, begin, 1)
        np.add.at(change, end, -1)
        ids = ids[np.cumsum(change[:-1], dtype=np.int8).view(np.bool_)]
    taken = ids.astype(np.int32, copy=False)
    return Tokens(taken, offsets_of(lengths), [(i, *rejected[i]) for i in sorted(rejected)])


def _firsts(places: np.ndarray, offsets: np.ndarray) -> list[tuple[int, int]]:
    """(document, its first place) of ascending places in the flat ids."""
    owner = np.searchsorted(offsets, places, side="right") - 1
    documents, at = np.unique(owner, return_index=True)
    return list(zip(documents.tolist(), places[at].tolist(), strict=True))


@lru_cache(maxsize=4)
def _forbidden(vocabulary: Vocabulary) -> np.ndarray:
    """int64[k]: the special ids but the unknown token's, which any text may give."""
    unknown = unknown_id(vocabulary.tokenizer_json)
    return np.array([id for id in vocabulary.special_ids if id != unknown], np.int64)
