import json
import os
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from tokenizers import Tokenizer

from packprep import messages
from packprep.errors import VocabularyError
from packprep.format.digests import digest_of
from packprep.recipe import Specials
from packprep.tokenizer.file import _beside, load_tokenizer_json
from packprep.tokenizer.roles import Needs, bytes_tokenizer_json, resolve_vocabulary
from tests.tokenizer import tokenizers_made as made

UL2R_MODES = ("[NLU]", "[NLG]", "[S2S]")
ALL_ROLES = frozenset(("eos", "bos", "pad", "mask", "fim_prefix", "fim_middle", "fim_suffix"))


def needs(*roles, modes=(), sentinels=0):
    return Needs(frozenset(roles), tuple(modes), sentinels)


def resolve(folder, tokenizer, needed=None, specials=None, **beside):
    made.write(folder / "tok", tokenizer, **beside)
    return resolve_vocabulary("tok", folder, specials or Specials(), needed or needs("eos"))


def fails(folder, tokenizer, needed=None, specials=None, **beside) -> str:
    with pytest.raises(VocabularyError) as caught:
        resolve(folder, tokenizer, needed, specials, **beside)
    return str(caught.value)


def pasted_blocks(message: str) -> list[dict]:
    """The [specials] tables in a message, as somebody would paste them."""
    blocks = [block.split("\n\n")[0] for block in message.split("[specials]\n")[1:]]
    return [tomllib.loads("[specials]\n" + block)["specials"] for block in blocks]


def with_lines(specials: Specials, table: dict) -> Specials:
    known = {f.name for f in fields(Specials)}
    modes = {key: value for key, value in table.items() if key not in known}
    roles = {key: value for key, value in table.items() if key in known}
    return replace(specials, **roles, mode_tokens={**(specials.mode_tokens or {}), **modes})


def loads_as(vocabulary) -> Tokenizer:
    return Tokenizer.from_buffer(vocabulary.tokenizer_json)


# the built-in bytes


def test_bytes_has_the_contract_ids_and_tokenizers_loads_them():
    tokenizer = Tokenizer.from_buffer(bytes_tokenizer_json())
    text = "Grüße, 世界\x00\x7f 🙂\r\n"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.get_vocab_size() == 522
    assert [tokenizer.token_to_id(text) for text in UL2R_MODES] == [260, 261, 262]
    assert tokenizer.encode("a<extra_id_255><pad>").ids == [97, 521, 256]


def test_bytes_never_changes():
    assert digest_of(bytes_tokenizer_json()) == "83d96ff0f5b106ca1cb676208653fa56"


def test_bytes_has_every_role_without_a_word_said():
    vocabulary = resolve_vocabulary("bytes", Path(), Specials(), Needs(ALL_ROLES, UL2R_MODES, 200))
    assert vocabulary.roles == {
        "eos": 258,
        "bos": 257,
        "pad": 256,
        "mask": 259,
        "fim_prefix": 263,
        "fim_middle": 264,
        "fim_suffix": 265,
    }
    assert vocabulary.mode_tokens == {"[NLU]": 260, "[NLG]": 261, "[S2S]": 262}
    assert vocabulary.sentinels == tuple(range(266, 522))
    assert vocabulary.vocab_size == 528
    assert vocabulary.special_ids == tuple(range(256, 528))
    assert (vocabulary.notes, vocabulary.added_tokens) == ((), ())
    assert vocabulary.tokenizer_json == bytes_tokenizer_json()


def test_bytes_can_be_extended():
    specials = Specials(missing="add", sentinels="auto")
    vocabulary = resolve_vocabulary(
        "bytes", Path(), specials, needs("eos", modes=["[X]"], sentinels=300)
    )
    assert vocabulary.mode_tokens == {"[X]": 522}
    assert vocabulary.sentinels == (*range(266, 522), *range(523, 567))
    assert vocabulary.vocab_size == 567
    assert loads_as(vocabulary).token_to_id("<extra_id_299>") == 566


# families


def test_roles_of_a_llama_like_tokenizer_are_found_by_name(tmp_path):
    vocabulary = resolve(tmp_path, made.llama3_like(), needs("eos", "bos"))
    assert vocabulary.roles == {"eos": 321, "bos": 320, "pad": 324}
    assert vocabulary.notes == (
        "eos: <|end_of_text|> (id 321), found by name",
        "bos: <|begin_of_text|> (id 320), found by name",
        "pad: <|finetune_right_pad_id|> (id 324), found by name",
    )
    assert vocabulary.vocab_size == 336
    assert vocabulary.special_ids == tuple(range(320, 336))
    assert vocabulary.tokenizer_json == (tmp_path / "tok" / "tokenizer.json").read_bytes()
    assert vocabulary.digest == digest_of(vocabulary.tokenizer_json)


@pytest.mark.long
def test_roles_of_a_bert_like_tokenizer(tmp_path):
    vocabulary = resolve(tmp_path, made.bert_like(), needs("eos", "bos", "mask"))
    assert vocabulary.roles == {"eos": 8, "bos": 7, "pad": 0, "mask": 9}
    assert vocabulary.special_ids == (0, 6, 7, 8, 9)
    assert "the tokenizer's own truncation is off" in vocabulary.notes


def test_roles_of_a_t5_like_tokenizer(tmp_path):
    vocabulary = resolve(tmp_path, made.t5_like(), needs("eos", sentinels=7))
    last = vocabulary.vocab_size - 1
    assert vocabulary.roles == {"eos": 1, "pad": 0}
    assert vocabulary.sentinels == tuple(range(last, last - 10, -1))
    assert vocabulary.specials() == {"eos": 1, "pad": 0, "sentinels": list(vocabulary.sentinels)}


def test_a_tokenizer_without_pad_pads_with_eos_and_says_so(tmp_path):
    vocabulary = resolve(tmp_path, made.gpt2_like())
    assert vocabulary.roles == {"eos": 320, "pad": 320}
    assert vocabulary.notes == (
        "pad: the tokenizer has none, so <|endoftext|> (id 320) pads",
        "eos: <|endoftext|> (id 320), found by name",
    )


def test_files_beside_the_tokenizer_are_heard_first(tmp_path):
    config = {"eos_token": {"content": "<|eot_id|>", "special": True}, "bos_token": None}
    vocabulary = resolve(
        tmp_path,
        made.llama3_like(),
        tokenizer_config=config,
        special_tokens_map={
            "eos_token": "<|end_of_text|>",
            "mask_token": "<|reserved_special_token_1|>",
        },
    )
    assert vocabulary.roles == {"eos": 325, "pad": 324, "mask": 323}
    assert "eos: <|eot_id|> (id 325), named by the tokenizer's own files" in vocabulary.notes


def with_pieces(tokenizer: dict, *texts: str) -> dict:
    """The tokenizer with texts as ordinary pieces of its vocabulary, in place of its longest
    ones."""
    vocab = tokenizer["model"]["vocab"]
    for text, long in zip(texts, sorted(vocab, key=len)[-len(texts) :], strict=True):
        vocab[text] = vocab.pop(long)
        tokenizer["model"]["merges"] = [
            pair for pair in tokenizer["model"]["merges"] if "".join(pair) != long
        ]
    vocab_texts = set(vocab)
    tokenizer["model"]["merges"] = [
        pair for pair in tokenizer["model"]["merges"] if {*pair, "".join(pair)} <= vocab_texts
    ]
    return tokenizer


def test_an_ordinary_piece_is_no_special_token_whatever_its_text(tmp_path):
    pieces = (
        "<s>",
        "<pad>",
        "<mask>",
        "<fim_prefix>",
        "<fim_middle>",
        "<fim_suffix>",
        "<extra_id_0>",
    )
    tokenizer = with_pieces(made.gpt2_like(), *pieces)
    vocabulary = resolve(tmp_path, tokenizer)
    assert vocabulary.roles == {"eos": 320, "pad": 320}
    assert vocabulary.sentinels == ()
    assert vocabulary.special_ids == (320,)
    message = fails(tmp_path, tokenizer, Needs(ALL_ROLES, (), 1))
    assert "lacks 6 of the roles" in message
    id = tokenizer["model"]["vocab"]["<s>"]
    assert resolve(tmp_path, tokenizer, needs("bos"), Specials(bos="<s>")).roles["bos"] == id
    assert resolve(tmp_path, tokenizer, tokenizer_config={"bos_token": "<s>"}).roles["bos"] == id
    more = resolve(
        tmp_path, tokenizer, needs(sentinels=2), Specials(missing="add", sentinels="auto")
    )
    assert [entry["text"] for entry in more.added_tokens] == ["<extra_id_1>", "<extra_id_2>"]


@pytest.mark.long
def test_null_beside_the_tokenizer_means_that_there_is_no_such_token(tmp_path):
    config = {"bos_token": None, "cls_token": None, "mask_token": None}
    vocabulary = resolve(tmp_path, made.llama3_like(), tokenizer_config=config)
    assert "bos" not in vocabulary.roles
    assert vocabulary.beside[0]["roles"] == {"bos": None, "mask": None}
    message = fails(tmp_path, made.llama3_like(), needs("bos"), tokenizer_config=config)
    assert "bos: the files next to the tokenizer declare null, so there is no such token" in message
    added = resolve(
        tmp_path, made.llama3_like(), needs("bos"), Specials(missing="add"), tokenizer_config=config
    )
    assert added.added_tokens == ({"id": 336, "text": "<s>", "role": "bos"},)
    both = resolve(
        tmp_path, made.bert_like(), tokenizer_config={"bos_token": None, "cls_token": "[CLS]"}
    )
    assert both.roles["bos"] == 7


def test_another_token_does_not_stand_in_for_a_declared_one_that_is_missing(tmp_path):
    config = {"eos_token": "<|im_end|>"}
    message = fails(tmp_path, made.llama3_like(), tokenizer_config=config)
    assert "declare '<|im_end|>', which tokenizer.json does not have" in message
    added = resolve(
        tmp_path, made.llama3_like(), None, Specials(missing="add"), tokenizer_config=config
    )
    assert added.added_tokens == ({"id": 336, "text": "<|im_end|>", "role": "eos"},)


def test_a_well_known_added_token_that_is_not_special_is_offered_and_not_taken(tmp_path):
    tokenizer = made.byte_level(
        "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"
    )
    for entry in tokenizer["added_tokens"][1:]:
        entry["special"] = False
    assert "fim_prefix" not in resolve(tmp_path, tokenizer).roles
    needed = needs("fim_prefix", "fim_middle", "fim_suffix")
    for missing in ("error", "add"):
        message = fails(tmp_path, tokenizer, needed, Specials(missing=missing))
        assert pasted_blocks(message) == [{role: f"<|{role}|>" for role in needed.roles}]


def test_fim_tokens_come_from_one_family(tmp_path):
    texts = ("<|endoftext|>", "<fim_prefix>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    vocabulary = resolve(
        tmp_path, made.byte_level(*texts), needs("fim_prefix", "fim_middle", "fim_suffix")
    )
    assert [vocabulary.roles[role] for role in ("fim_prefix", "fim_middle", "fim_suffix")] == [
        322,
        323,
        324,
    ]


def test_what_nothing_uses_is_not_required(tmp_path):
    assert resolve(tmp_path, made.gpt2_like(), needs()).sentinels == ()


@pytest.mark.parametrize(
    "beside",
    [
        {
            "tokenizer_config": {
                "added_tokens_decoder": {"321": {"content": "<|im_end|>", "special": True}}
            }
        },
        {"tokenizer_config": {"additional_special_tokens": ["<|endoftext|>", "<|im_end|>"]}},
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<|im_end|>"}}},
        {"tokenizer_config": {"extra_special_tokens": [{"content": "<|im_end|>"}]}},
        {"added_tokens": {"<|im_end|>": 321}},
    ],
)
def test_added_tokens_that_tokenizer_json_lacks_are_refused_by_name(tmp_path, beside):
    message = fails(tmp_path, made.gpt2_like(), **beside)
    assert "lacks 1 added tokens that the files next to it declare ('<|im_end|>')" in message
    assert f"AutoTokenizer.from_pretrained('{tmp_path / 'tok'}').save_pretrained(FOLDER)" in message
    assert (
        resolve(tmp_path, made.byte_level("<|endoftext|>", "<|im_end|>"), **beside).roles["eos"]
        == 320
    )


@pytest.mark.long
def test_added_tokens_json_is_not_read_beside_a_newer_list(tmp_path):
    config = {"added_tokens_decoder": {"320": {"content": "<|endoftext|>", "special": True}}}
    assert (
        resolve(
            tmp_path, made.gpt2_like(), tokenizer_config=config, added_tokens={"<|old|>": 9}
        ).roles["eos"]
        == 320
    )


@pytest.mark.parametrize("name", ["tok", "tok/tekken.json"])
def test_a_tekken_json_is_no_tokenizer_json(tmp_path, name):
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok/tekken.json").write_text("{}")
    with pytest.raises(
        VocabularyError, match=r"tekken.json is Mistral's own format\n.*from_pretrained\('.*/tok'\)"
    ):
        load_tokenizer_json(name, tmp_path)


# given roles


def test_roles_are_given_by_text_or_id(tmp_path):
    specials = Specials(
        eos="<|eot_id|>",
        mask=323,
        mode_tokens={"[NLU]": "<|reserved_special_token_0|>", "[X]": 326},
    )
    vocabulary = resolve(
        tmp_path, made.llama3_like(), needs("eos", "mask", modes=["[NLU]"]), specials
    )
    assert vocabulary.roles["eos"] == 325
    assert vocabulary.roles["mask"] == 323
    assert vocabulary.mode_tokens == {"[NLU]": 322, "[X]": 326}
    assert vocabulary.specials()["[NLU]"] == 322


@pytest.mark.parametrize(
    ("sentinels", "expected"),
    [
        (
            "<|reserved_special_token_{}|>",
            (322, 323, 326, 327, 328, 329, 330, 331, 332, 333, 334, 335),
        ),
        (["<|eot_id|>", 330], (325, 330)),
        ({"first": 326, "count": 3}, (326, 327, 328)),
    ],
)
def test_forms_of_sentinels(tmp_path, sentinels, expected):
    specials = Specials(sentinels=sentinels)
    assert resolve(tmp_path, made.llama3_like(), needs(sentinels=5), specials).sentinels == expected


@pytest.mark.long
def test_a_pattern_leaves_out_what_was_given_another_role(tmp_path):
    specials = Specials(mode_tokens={"[NLU]": "<extra_id_3>"})
    vocabulary = resolve(tmp_path, made.t5_like(5), needs(modes=["[NLU]"], sentinels=2), specials)
    assert len(vocabulary.sentinels) == 4
    assert vocabulary.mode_tokens["[NLU]"] not in vocabulary.sentinels
    assert any("<extra_id_3>" in note and "is skipped" in note for note in vocabulary.notes)


def test_a_sentinel_twice_is_refused(tmp_path):
    message = fails(
        tmp_path,
        made.llama3_like(),
        specials=Specials(sentinels=[330, 331, "<|reserved_special_token_6|>"]),
    )
    assert "<|reserved_special_token_6|> (id 330) occurs twice" in message
    assert message.endswith("\nhint: list each sentinel once")


def test_a_pattern_without_a_place_for_the_number_is_refused(tmp_path):
    assert "<extra_id_{}>" in fails(
        tmp_path, made.llama3_like(), specials=Specials(sentinels="<extra_id>")
    )


def test_a_mode_token_named_like_a_role_is_refused(tmp_path):
    assert "'pad' has the name of a special token" in fails(
        tmp_path, made.llama3_like(), needs(modes=["pad"])
    )


# missing = "error"

UL2R = needs("eos", modes=UL2R_MODES, sentinels=6)
CASES = {
    "llama": (made.llama3_like(12), UL2R, Specials()),
    "llama, too few sentinels": (made.llama3_like(9), UL2R, Specials()),
    "llama, sentinels apart": (made.llama3_like(4), needs(sentinels=3), Specials()),
    "llama, too few for the modes": (made.llama3_like(2), UL2R, Specials()),
    "gpt2, nothing reserved": (made.gpt2_like(), UL2R, Specials()),
    "gpt2, no mask, no fim": (made.gpt2_like(), Needs(ALL_ROLES, (), 0), Specials()),
    "t5, sentinels to spare": (made.t5_like(8), UL2R, Specials()),
    "t5, one sentinel to spare": (
        made.t5_like(3),
        needs(modes=["[NLU]", "[NLG]"], sentinels=9),
        Specials(),
    ),
    "bert, unused in the model": (
        made.bert_like(),
        needs(modes=UL2R_MODES, sentinels=9),
        Specials(),
    ),
    "placeholders": (
        made.byte_level("<｜place▁holder▁no▁0｜>", "<｜place▁holder▁no▁1｜>"),
        needs("eos"),
        Specials(),
    ),
    "no eos, no pad": (made.byte_level(), needs("eos"), Specials()),
    "no eos, no pad, no need": (made.byte_level(), needs(), Specials()),
    "part of a fim family": (
        made.byte_level("</s>", "<fim_prefix>"),
        Needs(ALL_ROLES, (), 0),
        Specials(),
    ),
    "given, not there": (
        made.llama3_like(),
        needs("eos"),
        Specials(eos="<end>", sentinels=["<a>", "<b>"]),
    ),
    "given id, not there": (
        made.llama3_like(),
        needs("eos", "mask"),
        Specials(eos=99999, mask="<m>"),
    ),
    "auto finds none": (made.llama3_like(), needs(sentinels=4), Specials(sentinels="auto")),
    "odd text": (made.byte_level("</s>"), needs(modes=['[\\"\x7f\n]']), Specials()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_lines_of_the_message_really_work(tmp_path, case):
    tokenizer, needed, specials = CASES[case]
    message = fails(tmp_path, tokenizer, needed, specials)
    blocks = pasted_blocks(message)
    assert blocks, message
    for table in blocks:
        vocabulary = resolve(tmp_path, tokenizer, needed, with_lines(specials, table))
        assert set(vocabulary.mode_tokens) == set(needed.mode_tokens)
        assert needed.roles <= vocabulary.roles.keys()
        assert bool(vocabulary.sentinels) >= bool(needed.sentinels)
        for entry in vocabulary.added_tokens:
            assert vocabulary.specials().keys() >= {entry["role"]}
            assert loads_as(vocabulary).token_to_id(entry["text"]) == entry["id"]


def test_everything_missing_is_listed_at_once(tmp_path):
    message = fails(
        tmp_path,
        made.llama3_like(),
        needs("mask", modes=["[NLU]"], sentinels=9),
        Specials(fim_prefix="<F>"),
    )
    assert "tokenizer = 'tok' lacks 4 of the roles" in message
    for part in (
        "fim_prefix: no token '<F>'",
        "[NLU]: no token '[NLU]'",
        "mask: no token",
        "sentinels: no tokens of",
    ):
        assert part in message
    assert "12 reserved tokens that play no role: <|reserved_special_token_0|> (322)" in message
    assert 'missing = "add"' in message


@pytest.mark.long
def test_consecutive_reserved_tokens_are_offered_as_a_range(tmp_path):
    message = fails(tmp_path, made.llama3_like(), UL2R)
    assert pasted_blocks(message)[0] == {
        "[NLU]": "<|reserved_special_token_0|>",
        "[NLG]": "<|reserved_special_token_1|>",
        "[S2S]": "<|reserved_special_token_2|>",
        "sentinels": {"first": 327, "count": 6},
    }
    apart = pasted_blocks(fails(tmp_path, made.llama3_like(4), needs(sentinels=3)))[0]["sentinels"]
    assert apart == [f"<|reserved_special_token_{k}|>" for k in range(3)]


@pytest.mark.long
def test_a_role_of_which_the_token_is_known_takes_no_reserved_one(tmp_path):
    message = fails(
        tmp_path, made.llama3_like(), needs(modes=["[NLU]"]), Specials(eos="<|nothing|>")
    )
    assert pasted_blocks(message)[0] == {
        "eos": "<|end_of_text|>",
        "[NLU]": "<|reserved_special_token_0|>",
    }


@pytest.mark.long
def test_adding_is_not_offered_above_the_ceiling(tmp_path):
    message = fails(tmp_path, made.gpt2_like(), needs(modes=["[NLU]"]), Specials(vocab_size=321))
    assert not pasted_blocks(message)
    assert 'missing = "add" would need ids up to 321, but vocab_size is 321' in message


def test_an_unknown_id_cannot_be_added(tmp_path):
    message = fails(tmp_path, made.gpt2_like(), specials=Specials(missing="add", eos=5000))
    assert "eos: no token has the id 5000 (they end at 320)" in message
    assert 'eos = "<|endoftext|>"' in message


# missing = "add"


def test_added_tokens_go_to_the_end_and_the_file_loads_with_them(tmp_path):
    needed = needs("eos", "mask", modes=UL2R_MODES, sentinels=3)
    vocabulary = resolve(
        tmp_path, made.gpt2_like(), needed, Specials(missing="add", sentinels="auto")
    )
    assert [(entry["id"], entry["text"], entry["role"]) for entry in vocabulary.added_tokens] == [
        (321, "[NLU]", "[NLU]"),
        (322, "[NLG]", "[NLG]"),
        (323, "[S2S]", "[S2S]"),
        (324, "<extra_id_0>", "sentinels"),
        (325, "<extra_id_1>", "sentinels"),
        (326, "<extra_id_2>", "sentinels"),
        (327, "<mask>", "mask"),
    ]
    assert vocabulary.vocab_size == 328
    assert vocabulary.roles == {"eos": 320, "pad": 320, "mask": 327}
    assert vocabulary.special_ids == tuple(range(320, 328))
    assert any(
        "added 7 tokens with ids 321 to 327" in note and "328 rows" in note
        for note in vocabulary.notes
    )
    tokenizer = loads_as(vocabulary)
    assert tokenizer.encode("[S2S]<extra_id_2>").ids == [323, 326]
    again = resolve(tmp_path, made.gpt2_like(), needed, Specials(missing="add", sentinels="auto"))
    assert again.tokenizer_json == vocabulary.tokenizer_json
    before = json.loads((tmp_path / "tok" / "tokenizer.json").read_bytes())
    after = json.loads(vocabulary.tokenizer_json)
    assert list(after) == list(before)
    assert after["added_tokens"][:1] == before["added_tokens"]
    assert {**after, "added_tokens": []} == {**before, "added_tokens": []}


def test_auto_uses_existing_sentinels_first(tmp_path):
    specials = Specials(missing="add", sentinels="auto")
    vocabulary = resolve(tmp_path, made.t5_like(4), needs(sentinels=6), specials)
    size = vocabulary.vocab_size
    assert vocabulary.sentinels == (size - 3, size - 4, size - 5, size - 6, size - 2, size - 1)
    assert (
        resolve(tmp_path, made.t5_like(4), needs(sentinels=3), specials).sentinels
        == vocabulary.sentinels[:3]
    )


def test_with_add_a_given_text_is_added_and_nothing_else(tmp_path):
    vocabulary = resolve(
        tmp_path, made.gpt2_like(), specials=Specials(missing="add", pad="<nothing>")
    )
    assert vocabulary.roles == {"eos": 320, "pad": 321}
    assert vocabulary.added_tokens == ({"id": 321, "text": "<nothing>", "role": "pad"},)


@pytest.mark.long
def test_an_added_role_is_not_said_to_be_found(tmp_path):
    notes = resolve(tmp_path, made.byte_level(), specials=Specials(missing="add")).notes
    assert notes[0] == "pad: the tokenizer has none, so </s> (id 320) pads"
    assert notes[1].startswith("added 1 tokens with ids 320 (</s>)")
    assert len(notes) == 2


@pytest.mark.long
def test_with_add_and_nothing_missing_the_file_stays_as_it_is(tmp_path):
    vocabulary = resolve(tmp_path, made.llama3_like(), specials=Specials(missing="add"))
    assert vocabulary.tokenizer_json == (tmp_path / "tok" / "tokenizer.json").read_bytes()


def test_vocab_size_may_be_larger_and_ids_without_a_token_are_no_ordinary_text(tmp_path):
    vocabulary = resolve(tmp_path, made.gpt2_like(), specials=Specials(vocab_size=330))
    assert vocabulary.vocab_size == 330
    assert vocabulary.special_ids == tuple(range(320, 330))


def test_fault_28_added_ids_never_reach_the_embedding_s_rows(tmp_path):
    needed = needs(modes=UL2R_MODES)
    fits = resolve(tmp_path, made.gpt2_like(), needed, Specials(missing="add", vocab_size=324))
    assert max(fits.mode_tokens.values()) == 323
    message = fails(tmp_path, made.gpt2_like(), needed, Specials(missing="add", vocab_size=323))
    assert "the ids 321 to 323" in message
    assert "vocab_size = 323 is the limit" in message
    assert "set vocab_size = 324" in message


def test_fault_28_a_tokenizer_beyond_the_ceiling_is_refused(tmp_path):
    message = fails(tmp_path, made.gpt2_like(), specials=Specials(vocab_size=320))
    assert "vocab_size = 320" in message
    assert "ids up to 320" in message


# reading


def test_a_hole_in_the_vocabulary_is_refused_with_both_ids(tmp_path):
    message = fails(tmp_path, made.with_hole())
    assert "<|endoftext|> is 322 in the file and 320 in `tokenizers`" in message
    assert "fill the hole" in message


def test_an_added_token_with_another_token_s_id_is_refused(tmp_path):
    tokenizer = made.gpt2_like()
    vocab = tokenizer["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 320
    assert "both 320" in fails(
        tmp_path, {**tokenizer, "added_tokens": [made.added(320, "<|endoftext|>")]}
    )


def test_dropout_is_off_and_said(tmp_path):
    tokenizer = made.gpt2_like()
    tokenizer["model"]["dropout"] = 0.1
    assert "dropout of 0.1 is off" in " ".join(resolve(tmp_path, tokenizer).notes)


def test_a_file_is_read_relative_to_the_recipe(tmp_path):
    made.write(
        tmp_path / "there", made.gpt2_like(), tokenizer_config={"eos_token": "<|endoftext|>"}
    )
    data, beside = load_tokenizer_json("there/tokenizer.json", tmp_path)
    assert data == (tmp_path / "there" / "tokenizer.json").read_bytes()
    config = (tmp_path / "there" / "tokenizer_config.json").read_bytes()
    roles = {"eos": "<|endoftext|>"}
    assert beside == [
        {"file": "tokenizer_config.json", "digest": digest_of(config), "roles": roles}
    ]
    assert load_tokenizer_json(str(tmp_path / "there"), Path("/")) == (data, beside)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not json", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[]", 'no "model"'),
        (b'{"model": {"type": "BPE"}}', "cannot load it"),
        (b'{"model": {}, "added_tokens": [{"id": "7", "content": "x"}]}', "no integer id"),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path, content, words):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(VocabularyError, match=words) as caught:
        resolve_vocabulary("tokenizer.json", tmp_path, Specials(), needs())
    assert "tokenizer.json" in str(caught.value)


def test_a_tokenizer_at_which_the_library_panics_is_refused(tmp_path):
    broken = made.byte_level(
        "</s>", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    )
    assert "`tokenizers` cannot load it" in fails(tmp_path, broken)


@pytest.mark.parametrize("longest, refused", [(1000, False), (1001, True), (10**30, True)])
def test_words_for_which_a_tokenizer_would_take_minutes_are_refused(tmp_path, longest, refused):
    parsed = made.bert_like()
    parsed["model"]["max_input_chars_per_word"] = longest
    if refused:
        assert f"max_input_chars_per_word is {longest}" in fails(tmp_path, parsed)
    else:
        resolve(tmp_path, parsed)


@pytest.mark.long
def test_half_a_character_in_a_tokenizer_is_refused(tmp_path):
    """Also where tokens are added, for which the file is written anew."""
    parsed = made.byte_level()
    parsed["model"]["vocab"]["\ud800"] = 320
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    with pytest.raises(VocabularyError, match="not JSON .*surrogates"):
        resolve_vocabulary("tokenizer.json", tmp_path, Specials(missing="add"), needs("eos"))


@pytest.mark.parametrize("broken", ["{", "[" * 100_000])
def test_a_broken_file_beside_the_tokenizer_is_refused(tmp_path, broken):
    made.write(tmp_path, made.gpt2_like())
    (tmp_path / "tokenizer_config.json").write_text(broken)
    with pytest.raises(
        VocabularyError, match=r"tokenizer_config\.json next to the tokenizer is not JSON"
    ):
        load_tokenizer_json(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    "name", ["missing/tokenizer.json", "./missing", "a/b/c", "tokenizer.json", "s3://a/b"]
)
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(VocabularyError, match="does not exist") as caught:
        load_tokenizer_json(name, tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_without_a_tokenizer_says_what_it_holds(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(VocabularyError, match=r"it has tokenizer\.model") as caught:
        load_tokenizer_json(str(tmp_path), tmp_path)
    assert "save_pretrained" in str(caught.value)


def test_a_hub_name_is_fetched_with_its_hints_and_it_is_said_before(tmp_path, monkeypatch, capsys):
    folder = made.write(
        tmp_path / "hub", made.gpt2_like(), tokenizer_config={"eos_token": "<|endoftext|>"}
    )
    said = []
    monkeypatch.setattr(messages, "_said", set())

    def download(repo: str, file: str) -> str:
        assert repo == "somebody/some-model.v1"
        said.append(capsys.readouterr().err)
        if not (folder / file).exists():
            raise EntryNotFoundError(file)
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    data, beside = load_tokenizer_json("somebody/some-model.v1", tmp_path)
    assert data == (folder / "tokenizer.json").read_bytes()
    assert [file["roles"] for file in beside] == [{"eos": "<|endoftext|>"}]
    fetching = (
        "packprep: fetching tokenizer somebody/some-model.v1 from the Hugging Face Hub, unless it"
        " is cached\n"
    )
    assert "".join(said) == said[0] == fetching


@pytest.mark.parametrize(
    "error", [ConnectionError("no route"), EntryNotFoundError("404\nmore"), ValueError("odd")]
)
def test_a_hub_that_does_not_answer_says_what_was_tried(tmp_path, monkeypatch, error):
    def download(repo: str, file: str) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(VocabularyError) as caught:
        load_tokenizer_json("gpt-unknown", tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "gpt-unknown") in message
    assert f"{type(error).__name__}: {str(error).splitlines()[0]}" in message
    assert "give its path" in message


def test_a_hub_that_gives_only_the_tokenizer_names_the_other_file(tmp_path, monkeypatch):
    folder = made.write(tmp_path / "hub", made.gpt2_like())

    def download(repo: str, file: str) -> str:
        if file != "tokenizer.json":
            raise ConnectionError("no route\nmore")
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    expected = (
        r"gave no tokenizer_config\.json \(ConnectionError: no route\)\nhint: check the network"
    )
    with pytest.raises(VocabularyError, match=expected):
        load_tokenizer_json("somebody/model", tmp_path)


def test_files_that_may_exist_are_named_if_the_hub_cannot_be_reached(tmp_path, monkeypatch, capsys):
    folder = made.write(tmp_path / "hub", made.gpt2_like())
    monkeypatch.setattr(messages, "_said", set())

    def download(repo: str, file: str) -> str:
        if file != "tokenizer.json":
            raise LocalEntryNotFoundError("offline")
        return str(folder / file)

    def cached(repo: str, file: str) -> Any:
        return None if file == "tokenizer_config.json" else huggingface_hub._CACHED_NO_EXIST

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert load_tokenizer_json("somebody/model", tmp_path)[1] == []
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert "cache does not have tokenizer_config.json. If this file exists" in warning


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_tokenizer_that_is_no_regular_file_is_refused_and_not_looked_up_on_the_hub(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", None)
    if kind == "pipe":
        os.mkfifo(tmp_path / "tokenizer")
    else:
        (tmp_path / "tokenizer").symlink_to("/dev/zero")
    with pytest.raises(
        VocabularyError, match="is not a regular file but a pipe, a device or a socket"
    ):
        resolve_vocabulary("tokenizer", tmp_path, Specials(), needs())


@pytest.mark.parametrize("id", [1_900_000_000, (1 << 32) - 1])
def test_ids_far_beyond_the_tokens_are_refused_before_tables_of_them_are_made(tmp_path, id):
    parsed = made.gpt2_like()
    parsed["model"]["vocab"]["far"] = id
    assert f"it has the id {id}, and at most 1048576 ids may be without a token" in fails(
        tmp_path, parsed
    )
    size = 321 + (1 << 20)
    assert (
        resolve(tmp_path, made.gpt2_like(), specials=Specials(vocab_size=size)).vocab_size == size
    )
    message = fails(tmp_path, made.gpt2_like(), specials=Specials(vocab_size=size + 1))
    assert f"vocab_size = {size + 1}, and at most 1048576" in message


@pytest.mark.parametrize("id", [-1, "1", 1.5, None, 1 << 32])
def test_an_id_that_is_none_is_refused(tmp_path, id):
    parsed = made.gpt2_like()
    parsed["model"]["vocab"]["odd"] = id
    assert "an entry of its vocab has an invalid id" in fails(tmp_path, parsed)


@pytest.mark.long
@pytest.mark.parametrize(
    "declared, roles",
    [
        (
            {"eos_token": "<e>", "sep_token": "<s>", "cls_token": "<c>"},
            {"eos": "<e>", "bos": "<c>"},
        ),
        ({"eos_token": None, "sep_token": {"content": "<s>"}}, {"eos": "<s>"}),
        ({"pad_token": None, "mask_token": ""}, {"pad": None}),
        ({"bos_token": 3}, {}),
    ],
)
def test_eos_and_bos_come_before_the_tokens_that_stand_for_them_in_other_models(declared, roles):
    files = {"tokenizer_config.json": json.dumps(declared).encode()}
    assert [(one["file"], one["roles"]) for one in _beside(files.get)] == [
        ("tokenizer_config.json", roles)
    ]
