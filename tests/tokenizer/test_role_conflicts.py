"""A token plays one role, and sentinels are no tokens of text."""

import re
from dataclasses import replace

import pytest

from packprep.messages import listed
from packprep.recipe import Specials
from tests.tokenizer import tokenizers_made as made
from tests.tokenizer.test_roles import fails, needs, resolve


@pytest.mark.parametrize(
    "specials",
    [
        Specials(mask="<|end_of_text|>"),
        Specials(mask="<|eot_id|>", mode_tokens={"[NLU]": "<|eot_id|>"}),
        Specials(mode_tokens={"[NLU]": 330, "[NLG]": 330}),
        Specials(mode_tokens={"[NLU]": 330}, sentinels={"first": 329, "count": 2}),
        Specials(eos="<|end_of_text|>", bos="<|begin_of_text|>", pad="<|begin_of_text|>"),
    ],
)
def test_a_token_with_two_roles_is_refused(tmp_path, specials):
    message = fails(tmp_path, made.llama3_like(), specials=replace(specials, eos="<|end_of_text|>"))
    assert re.search(
        r"\(id \d+\) would be .+ and .+, but a token can be only one special token", message
    )


def test_bos_and_pad_may_be_eos(tmp_path):
    specials = Specials(eos="<|eot_id|>", bos="<|eot_id|>", pad="<|eot_id|>")
    assert set(resolve(tmp_path, made.llama3_like(), specials=specials).roles.values()) == {325}


@pytest.mark.parametrize(
    ("tokenizer", "needed", "specials", "words"),
    [
        (made.t5_like(), needs("eos", "mask"), Specials(mask="<pad>"), "<pad> (id 0) would be pad (its own) and mask"),
        (made.llama3_like(), needs("mask"), Specials(mask=324), "(id 324) would be pad (its own) and mask"),
        (made.llama3_like(), needs("eos"), Specials(sentinels=[321, 330]), "eos (its own) and sentinels"),
        (made.llama3_like(), needs(), Specials(sentinels={"first": 320, "count": 1}), "bos (its own) and sent"),
        (made.llama3_like(), needs(sentinels=1), Specials(mask=330, sentinels=[330]), "mask and sentinels"),
        (made.byte_level("</s>"), needs("eos", modes=["</s>"]), Specials(), "eos (its own) and </s>,"),
        (made.bert_like(), needs("mask"), Specials(sentinels=["[MASK]"]), "mask (its own) and sentinels"),
        (made.bert_like(), needs("bos"), Specials(pad="[CLS]"), "bos (its own) and pad"),
        (
            made.byte_level("</s>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
            needs("fim_prefix", "fim_middle", "fim_suffix", modes=["[A]"]),
            Specials(mode_tokens={"[A]": "<fim_middle>"}),
            "fim_middle (its own) and [A]",
        ),
    ],
)  # fmt: skip
def test_a_token_that_the_tokenizer_has_in_another_role_is_refused(
    tmp_path, tokenizer, needed, specials, words
):
    message = fails(tmp_path, tokenizer, needed, specials)
    assert words.replace("its own", "the tokenizer's own") in message and message.count("\n") == 1


def test_files_beside_the_tokenizer_say_which_roles_are_taken(tmp_path):
    beside = {"tokenizer_config": {"eos_token": "<|eot_id|>"}}
    assert "eos (the tokenizer's own) and mask" in fails(
        tmp_path, made.llama3_like(), needs("mask"), Specials(mask="<|eot_id|>"), **beside
    )
    vocabulary = resolve(
        tmp_path, made.llama3_like(), needs("mask"), Specials(mask="<|end_of_text|>"), **beside
    )
    assert vocabulary.roles["mask"] == 321 and vocabulary.roles["eos"] == 325


def test_a_token_of_a_role_that_is_given_to_another_or_not_used_is_free(tmp_path):
    given = Specials(mask="<|finetune_right_pad_id|>", pad="<|reserved_special_token_0|>")
    assert resolve(tmp_path, made.llama3_like(), needs("mask"), given).roles["mask"] == 324
    unused = resolve(
        tmp_path,
        made.bert_like(),
        needs("eos", modes=["[A]"]),
        Specials(mode_tokens={"[A]": "[MASK]"}),
    )
    assert unused.mode_tokens == {"[A]": 9} and "mask" not in unused.roles
    assert resolve(tmp_path, made.bert_like(), needs("eos"), Specials(pad="[CLS]")).roles == {
        "eos": 8,
        "pad": 7,
        "mask": 9,
    }


def test_one_token_may_be_bos_eos_and_pad_as_a_tokenizer_says(tmp_path):
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    vocabulary = resolve(
        tmp_path, made.gpt2_like(), needs("eos", "bos", "pad"), tokenizer_config=config
    )
    assert vocabulary.roles == {"eos": 320, "bos": 320, "pad": 320}


@pytest.mark.parametrize(
    ("sentinels", "words"),
    [
        ({"first": 100, "count": 64}, "ids 100 … 163 are ordinary tokens"),
        ([*range(100, 164), 170], "ids 100 … 163 and 170 are ordinary tokens"),
        ([170, 322, 100, 101], "ids 100 … 101 and 170 are ordinary tokens"),
        (["e"], "an ordinary token of the vocabulary, which occur in encoded text ('e')"),
        ([*range(0, 20, 2)], "ids 0, 2, 4, 6, 8 and 5 more are ordinary tokens"),
        ([321, 324], "id 324 is an ordinary token"),  # an added word, which is not special
        ([325, 326], "ids 325 … 326 are ordinary tokens"),
    ],
)
def test_sentinels_that_text_gives_are_refused_in_one_line(tmp_path, sentinels, words):
    message = fails(tmp_path, with_odd_tokens(), specials=Specials(sentinels=sentinels))
    assert words in message and message.count("\n") == 1 and 'sentinels = "auto"' in message


def test_added_and_reserved_tokens_are_no_text(tmp_path):
    specials = Specials(sentinels=["<|a|>", "<unused0>", "[unused1]", "<extra_id_7>"])
    assert resolve(tmp_path, with_odd_tokens(), specials=specials).sentinels == (322, 323, 321, 320)


def with_odd_tokens() -> dict:
    """In the model alone <extra_id_7> 320, [unused1] 321, <div> 325, <0x0A> 326; added </s>, <|a|>,
    <unused0> and spaces."""
    parsed = made.byte_level()
    parsed["model"]["vocab"] |= {
        "<extra_id_7>": 320,
        "[unused1]": 321,
        "<|a|>": 322,
        "<unused0>": 323,
        "    ": 324,
    }
    parsed["model"]["vocab"] |= {"<div>": 325, "<0x0A>": 326, "</s>": 327}
    special = {
        "</s>": (327, True),
        "<|a|>": (322, True),
        "<unused0>": (323, False),
        "    ": (324, False),
    }
    parsed["added_tokens"] = [made.added(id, text, flag) for text, (id, flag) in special.items()]
    return parsed


def test_an_ordinary_token_in_a_role_is_named(tmp_path):
    vocabulary = resolve(tmp_path, made.gpt2_like(), specials=Specials(mask="Ċ"))
    assert any("mask: 'Ċ'" in note and "ordinary" in note for note in vocabulary.notes)


def test_a_list_in_a_message_shows_five_and_counts_the_others():
    assert listed("abcde") == "a, b, c, d, e" and listed("abcdefg") == "a, b, c, d, e and 2 more"
    assert listed("abc", 3) == "a, b, c" and listed("abcd", 3) == "a, b, c and 1 more"
