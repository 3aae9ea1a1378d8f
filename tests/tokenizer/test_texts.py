import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from packprep.errors import VocabularyError
from packprep.tokenizer.file import (
    bytes_tokenizer_json,
    continuing_tokens,
    outline_of,
    tokens_in_file,
)
from packprep.tokenizer.texts import BYTES, SPECIAL, TEXT, ByteTable, TokenTexts
from tests.tokenizer import tokenizers_made

SENTINEL = 266


@pytest.fixture(scope="module")
def texts():
    return TokenTexts(bytes_tokenizer_json())


def pieces(texts, ids):
    return [tuple(piece) for piece in texts.pieces(ids)]


def test_tokens_that_share_a_character_are_one_piece(texts):
    assert pieces(texts, "aé日👍".encode()) == [
        ("a", [97], TEXT),
        ("é", list("é".encode()), TEXT),
        ("日", list("日".encode()), TEXT),
        ("👍", list("👍".encode()), TEXT),
    ]


def test_a_character_cut_by_a_sentinel_is_shown_as_its_bytes(texts):
    first, second, third = "日".encode()
    assert pieces(texts, [first, second, SENTINEL, third, 97, first]) == [
        ("\\xe6", [first], BYTES),
        ("\\x97", [second], BYTES),
        ("<extra_id_0>", [SENTINEL], SPECIAL),
        ("\\xa5", [third], BYTES),
        ("a", [97], TEXT),
        ("\\xe6", [first], BYTES),
    ]


def test_a_character_that_another_interrupts_does_not_hide_it(texts):
    assert pieces(texts, [0xE6, 0x97, *"é".encode()]) == [
        ("\\xe6", [0xE6], BYTES),
        ("\\x97", [0x97], BYTES),
        ("é", list("é".encode()), TEXT),
    ]


def test_a_byte_level_token_with_a_character_of_no_byte_is_shown_as_it_is():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "a日": 1, "Ġb": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    texts = TokenTexts(tokenizer.to_str().encode())
    assert [piece.text for piece in texts.one_by_one([0, 1, 2])] == ["a", "a日", " b"]


@pytest.mark.long
def test_a_replacement_character_of_the_text_is_text(texts):
    assert pieces(texts, "\ufffd".encode()) == [("\ufffd", [0xEF, 0xBF, 0xBD], TEXT)]


def test_an_id_without_a_token_is_shown_by_its_number(texts):
    assert pieces(texts, [527]) == [("#527", [527], SPECIAL)]


def test_every_id_is_in_one_piece_in_order(texts):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 528, 3000).tolist() + rng.integers(0x80, 0x100, 3000).tolist()
    found = texts.pieces(ids)
    assert [id for piece in found for id in piece.ids] == ids
    assert all(len(piece.ids) <= 4 and piece.text for piece in found)


@pytest.mark.long
def test_one_by_one_gives_each_token_a_piece(texts):
    assert [tuple(piece) for piece in texts.one_by_one(list("é".encode()))] == [
        ("\\xc3", [0xC3], BYTES),
        ("\\xa9", [0xA9], BYTES),
    ]


@pytest.mark.parametrize(
    ("parsed", "text", "shown"),
    [
        (tokenizers_made.byte_level("<|end|>"), "ünïcödé dog 日本", "ünïcödé dog 日本"),
        (tokenizers_made.t5_like(), "the quick dog", " the quick dog"),
        (tokenizers_made.bert_like(), "the quick dogs", " the quick dogs"),
    ],
    ids=["byte level", "unigram", "word piece"],
)
def test_the_pieces_of_other_tokenizers_join_to_the_text(parsed, text, shown):
    data = json.dumps({**parsed, "truncation": None, "padding": None}).encode()
    ids = Tokenizer.from_buffer(data).encode(text, add_special_tokens=False).ids
    assert "".join(piece.text for piece in TokenTexts(data).pieces(ids)) == shown


@pytest.mark.parametrize(
    "parsed",
    [tokenizers_made.llama3_like(), tokenizers_made.bert_like(), tokenizers_made.t5_like()],
)
def test_a_few_tokens_are_shown_as_they_are_with_all_of_the_file(parsed):
    data = json.dumps(parsed).encode()
    tokens = tokens_in_file(data, "tokenizer.json").texts
    some = list(tokens)[:: len(tokens) // 20 + 1]
    few = TokenTexts(data, some[:1], {id: tokens[id] for id in some})
    assert few.one_by_one([*some, 10**6]) == TokenTexts(data, some[:1]).one_by_one([*some, 10**6])


def test_a_tokenizer_with_half_a_character_is_none():
    parsed = tokenizers_made.byte_level("<|end|>")
    data = json.dumps(
        {**parsed, "added_tokens": [*parsed["added_tokens"], tokenizers_made.added(900, "\ud800")]}
    )
    with pytest.raises(VocabularyError, match="'tokenizer.json': not JSON"):
        TokenTexts(data.encode())


@pytest.mark.long
def test_a_decoder_without_a_type_is_passed_over():
    """`tokenizers` takes it for a WordPiece decoder."""
    data = json.dumps(
        {**tokenizers_made.byte_level(), "decoder": {"prefix": "##", "cleanup": True}}
    )
    assert Tokenizer.from_str(data).get_vocab_size() == 320
    assert [piece.text for piece in TokenTexts(data.encode()).pieces([64, 65])] == ["a", "b"]


@pytest.mark.long
def test_the_outline_of_a_file_with_nan_is_complete():
    parts = {name: {"type": name} for name in ("decoder", "normalizer", "pre_tokenizer")}
    file = {"added_tokens": [], **parts, "model": {"type": "BPE", "dropout": float("nan")}}
    outline = outline_of(json.dumps(file).encode())
    assert {name: getattr(outline, name) for name in parts} == parts


def test_byte_fallback_tokens_are_joined():
    vocabulary = {"▁a": 0, "<0xC3>": 1, "<0xA9>": 2, "<0x>": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    texts = TokenTexts(tokenizer.to_str().encode())
    assert [piece.text for piece in texts.pieces([0, 1, 2, 3])] == [" a", "é", "<0x>"]


@pytest.mark.parametrize(
    ("like", "one", "two"),
    [
        (tokenizers_made.llama2_like, "a", " a"),
        (tokenizers_made.mistral_like, "a", "  a"),
        (tokenizers_made.gemma_like, " a", "  a"),
        (tokenizers_made.gpt2_like, " a", "  a"),
        (tokenizers_made.bert_like, "a", "  a"),
    ],
)
def test_the_space_that_a_tokenizer_adds_is_no_part_of_a_document(like, one, two):
    texts = TokenTexts(json.dumps(like()).encode())
    assert [texts.without_added_space(text) for text in ("a", " a", "  a", "")] == [
        "a",
        one,
        two,
        "",
    ]


def test_a_role_is_special_even_where_the_tokenizer_says_nothing():
    data = json.dumps(tokenizers_made.byte_level("<|end|>")).encode()
    assert TokenTexts(data, [97]).pieces([97])[0].kind == SPECIAL


def test_the_table_gives_what_each_token_means():
    data = json.dumps(tokenizers_made.byte_level("<|end|>")).encode()
    texts = TokenTexts(data)
    table, ids = ByteTable(texts, 321), np.array([320, 5, 99, 300, 320, 0])
    flat, offsets = table.decode(ids)
    for i, id in enumerate(ids.tolist()):
        mean = texts.meaning(id)
        assert flat[offsets[i] : offsets[i + 1]].tobytes() == (
            mean.encode() if isinstance(mean, str) else mean
        )
    assert table.decode(ids[:0])[0].tolist() == []


DECODERS = {
    "Metaspace": decoders.Metaspace(),
    "Replace": decoders.Replace("_", "--"),
    "WordPiece": decoders.WordPiece("##", cleanup=False),
    "BPEDecoder": decoders.BPEDecoder("</w>"),
    "ByteFallback": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    "Strip": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_a_token_inside_a_text_means_what_the_decoder_makes_of_it(kind):
    tokens = ["a", "▁b", "b▁", "_", "a_b_", "##c", "c##", "d</w>", "</w>d", "<0x41>", "<0x4>", "日"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "a"))
    tokenizer.decoder = DECODERS[kind]
    texts = TokenTexts(tokenizer.to_str().encode())
    for id in range(len(tokens)):
        around = tokenizer.decode([0, id, 0], skip_special_tokens=False)
        assert around == "a" + (texts.meaning(id) + texts.meaning(0)).decode(), tokens[id]


def test_tokens_that_start_inside_a_character_are_marked_and_ids_have_few_holes():
    def marked(vocab_size, **model):
        parsed = tokenizers_made.byte_level("<eos>")
        data = json.dumps({**parsed, "model": {**parsed["model"], **model}}).encode()
        return continuing_tokens(data, vocab_size)

    # The 256 bytes have ids in the order of their characters; "Ģ" is byte 128 and "ł" byte 160.
    vocab = tokenizers_made.byte_level()["model"]["vocab"]
    flags = marked(321)
    assert len(flags) == 321 and set(flags) == {0, 1}
    expected = {"a": 0, "Ġ": 0, "Ģ": 1, "ł": 1, "¿": 1, "Ã": 0}
    assert {text: flags[vocab[text]] for text in expected} == expected
    assert marked(1 << 20, vocab={"a": 0}, merges=[]) == b""  # no token starts inside one
    for vocab_size, count in ((321 + (207 + (1 << 20)), 321), (1002 + (1 << 20), 1001)):
        of_ids = {**vocab, **{f"more{i}": i for i in range(320, count)}}
        assert len(marked(vocab_size, vocab=of_ids)) == vocab_size
        with pytest.raises(VocabularyError, match="and at most 1048576 ids may be without a token"):
            marked(vocab_size + 1, vocab=of_ids)
    for far in (321, -1, "1"):
        with pytest.raises(VocabularyError, match="has no id below its declared vocab_size 321"):
            marked(321, vocab={**vocab, "far": far})
    with pytest.raises(VocabularyError, match="tokenizer.json has no vocabulary: KeyError"):
        continuing_tokens(b'{"model": {}, "added_tokens": []}', 321)
