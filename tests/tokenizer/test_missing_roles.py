"""The error that lists the special tokens that a tokenizer lacks, and what it advises."""

from packprep.tokenizer.file import TokenTable
from packprep.tokenizer.missing_roles import Missing, missing_roles

TEXTS = ["a", "b", "<|reserved_0|>", "<|reserved_1|>", "unused"]
PAD = Missing("pad", "no token known for it", ("<|pad|>",))
MASK = Missing("mask", "id 9 has no token", ())


def error_of(missing, playing=(), texts=TEXTS, vocab_size=0):
    ids = {text: i for i, text in enumerate(texts)}
    tokens = TokenTable(ids, {i: text for text, i in ids.items()}, {}, len(ids), ())
    return str(missing_roles("folder", tokens, missing, playing, (), vocab_size))


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
