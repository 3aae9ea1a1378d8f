"""The error that lists the special tokens that a tokenizer lacks, and what it advises."""

import pytest

from packprep.messages import listed
from packprep.tokenizer.file import TokenTable
from packprep.tokenizer.missing_roles import Missing, looks_special, missing_roles

TEXTS = ["a", "b", "<|reserved_0|>", "<|reserved_1|>", "unused"]
PAD = Missing("pad", "no token known for it", ("<|pad|>",))
MASK = Missing("mask", "id 9 has no token", ())


RESERVED = ["a", *(f"<|reserved_{k}|>" for k in range(6))]
SPANS = Missing("sentinels", "none of 3", ("<x0>", "<x1>", "<x2>"), wanted=3)


def error_of(missing, playing=(), texts=TEXTS, vocab_size=0, spare_sentinels=()):
    ids = {text: i for i, text in enumerate(texts)}
    tokens = TokenTable(ids, {i: text for text, i in ids.items()}, {}, len(ids), ())
    return str(missing_roles("folder", tokens, missing, playing, spare_sentinels, vocab_size))


def test_only_reserved_tokens_without_a_role_are_offered():
    said = error_of([PAD], playing=[2])
    assert "It has 1 reserved tokens that play no role: <|reserved_1|> (3)." in said
    assert 'pad = "<|reserved_1|>"' in said and "reserved_0" not in said
    assert "It has no reserved tokens to spare." in error_of([PAD], playing=[2, 3])


def test_adding_tokens_is_advised_only_if_it_fills_every_role():
    some = ["a", "b"]
    assert 'missing = "add"' in error_of([PAD], texts=some)
    assert 'missing = "add"' not in error_of([PAD, MASK], texts=some)
    said = error_of([PAD], texts=some, vocab_size=2)
    assert 'missing = "add" would need ids up to 2, but vocab_size is 2.' in said


EXISTING = "To use existing tokens, paste"
REST = "To use existing tokens and add the rest, paste"
EXTEND = "To extend the vocabulary (the embedding then needs at least {} rows), paste:"
NAME = "Name existing tokens, by text or by id (0 to {}), in the recipe's [specials]."
CUT = Missing("cut", "no token known for it", ("<|cut|>",))
MEDIA = Missing("media", "image has no tokens", ("<|image|>",))


def test_each_advice_is_given_where_it_helps():
    """By whether reserved tokens fill the roles, whether new ones can, and whether they fit."""
    for missing, count, vocab_size, advice in (
        ([PAD], 1, 0, [EXISTING, EXTEND.format(3)]),
        ([PAD], 1, 2, [EXISTING]),
        ([MASK], 1, 0, [EXISTING]),
        ([PAD, CUT], 1, 4, [REST, EXTEND.format(4)]),
        ([PAD, MEDIA], 1, 4, [REST, EXTEND.format(4)]),
        ([PAD, CUT], 1, 3, []),
        ([PAD, MASK], 1, 0, [NAME.format(1)]),
        ([MASK], 0, 0, [NAME.format(0)]),
        ([PAD], 0, 2, [EXTEND.format(2)]),
        ([PAD], 0, 1, []),
    ):
        said = error_of(missing, texts=RESERVED[: count + 1], vocab_size=vocab_size)
        every = (EXISTING, REST, *(text.format(n) for text in (EXTEND, NAME) for n in range(5)))
        found = [text for text in every if text in said]
        assert found == advice, (missing, count, vocab_size, said)
        blocks = said.split("[specials]\n")[1:]
        adds = ['missing = "add"' in block.splitlines() for block in blocks]
        assert adds == [text != EXISTING for text in advice if "paste" in text]
        too_large = f"would need ids up to {count + len(missing)}, but vocab_size is {vocab_size}"
        assert (too_large in said) == (
            0 < vocab_size <= count + len(missing) and MASK not in missing
        )


def test_reserved_tokens_become_sentinels_after_the_single_roles():
    for playing, missing, line in (
        ([], [SPANS], "sentinels = {first = 1, count = 3}"),
        ([], [PAD, SPANS], "sentinels = {first = 2, count = 3}"),
        ([2], [SPANS], "sentinels = {first = 3, count = 3}"),
        ([2, 5], [SPANS], 'sentinels = ["<|reserved_0|>", "<|reserved_2|>", "<|reserved_3|>"]'),
        ([1, 2, 3, 4], [SPANS], "sentinels = {first = 5, count = 2}"),
    ):
        said = error_of(missing, playing, RESERVED)
        assert line in said.splitlines(), said
    assert "sentinels =" not in error_of([PAD, SPANS], [2, 3, 4, 5, 6], RESERVED)


def test_the_last_spare_sentinels_and_tokens_of_a_well_known_name_fill_roles():
    texts = ["a", "<s0>", "<s1>", "<s2>", "</s>"]
    said = error_of([PAD, CUT], texts=texts, spare_sentinels=[1, 2, 3])
    assert 'pad = "<s1>"\ncut = "<s2>"\n' in said
    # One sentinel has to stay.
    assert "pad = " not in error_of([PAD, CUT], texts=texts, spare_sentinels=[1, 2])
    eos = Missing("eos", "not <eos>", ("<eos>",), instead="</s>")
    said = error_of([eos, PAD], texts=texts, spare_sentinels=[1, 2])
    assert 'eos = "</s>"\npad = "<s1>"\n' in said
    assert '"[NLG]" = "<s1>"' in error_of(
        [Missing("[NLG]", "no such token", ("[NLG]",))], texts=texts, spare_sentinels=[1, 2]
    )


@pytest.mark.long
def test_a_message_lists_five_items_and_counts_the_others():
    for count, more in ((4, ""), (5, ""), (6, " and 1 more"), (9, " and 4 more")):
        items = [f"<{i}>" for i in range(count)]
        assert listed(items) == ", ".join(items[:5]) + more
    assert listed(items, 8) == ", ".join(items[:8]) + " and 1 more"


@pytest.mark.long
def test_a_token_looks_special_in_brackets_around_something():
    for text in ("<a>", "[a]", "▁<a>", "<|im_end|>"):
        assert looks_special(text)
    for text in ("<>", "[]", "a", "<a", "a>", "", "(a)", "a<b>"):
        assert not looks_special(text)
