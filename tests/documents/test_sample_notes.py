"""What a calibration sample shows that training would suffer from is said before a build, or stops
it."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from packprep.documents import sample as sampling
from packprep.documents.sample_notes import SampleNotes
from packprep.documents.sampled_passes import SampledPasses
from packprep.recipe import Source
from packprep.sources.passes import Passes
from tests import made
from tests.command_line import inside, refused
from tests.conversations.chats_made import CHATML

TALK = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer in `bpe`, one of six words in `words`."""
    folder = tmp_path_factory.mktemp("notes")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[], initial_alphabet=sorted(alphabet), show_progress=False
    )
    bpe.train_from_iterator(["the lamp is on on on"] * 50, trainer)
    specials = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    bpe.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    words = ["<unk>", "the", "lamp", "is", "on"]
    word_level = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    word_level.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    for name, tokenizer in (("bpe", bpe), ("words", word_level)):
        (folder / name).mkdir()
        tokenizer.save(str(folder / name / "tokenizer.json"))
        roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


def arguments_of(folder, path, records, *settings, tokenizer="bpe", template=CHATML):
    """The arguments of `packprep plan` on some records."""
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    made.write(path / "a.jsonl", lines)
    (path / "t.jinja").write_text(template)
    keys = [f"documents.chat_template={path / 't.jinja'}", "documents.append_eos=false", *settings]
    sets = [argument for key in keys for argument in ("--set", key)]
    given = ["--tokenizer", folder / tokenizer, "--seq-length", 64, "--tasks", "causal", *sets]
    return ["plan", path / "a.jsonl", *given]


def test_unknown_tokens_are_said_with_their_share(folder, tmp_path):
    records = [{"text": "the lamp is on"}] * 9 + [{"text": "the { lamp } is"}]
    said = inside(*arguments_of(folder, tmp_path, records, tokenizer="words"))
    assert said.status == 0 and "4.9% of its sampled tokens are the unknown token" in said.out
    said = inside(*arguments_of(folder, tmp_path, records[:9], tokenizer="words"))
    assert said.status == 0 and "unknown token" not in said.out


def test_answers_whose_first_token_begins_in_the_prompt_are_said(folder, tmp_path):
    merged = [{"prompt": "the lamp is ", "completion": "on"}] * 3
    said = inside(*arguments_of(folder, tmp_path, merged))
    assert "3 of 3 sampled trained spans start inside a token" in said.out
    apart = [{"prompt": "the lamp is", "completion": " on"}] * 3
    assert "start inside a token" not in inside(*arguments_of(folder, tmp_path, apart)).out


def test_a_second_bos_stops_the_build(folder, tmp_path):
    with_bos = "<s>" + CHATML
    arguments = arguments_of(
        folder, tmp_path, [TALK] * 3, "documents.prepend_bos=true", template=with_bos
    )
    message = refused(*arguments)
    assert "3 of 3 sampled conversations start with the bos" in message
    assert "documents.prepend_bos = false" in message and message.count("source0") == 1
    assert inside(*arguments_of(folder, tmp_path, [TALK] * 3, template=with_bos)).status == 0


def test_windows_of_long_conversations_are_not_counted_as_conversations(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(sampling, "WHOLE_BYTES", 1 << 16)
    # Only a window of the longer conversations is tokenized, which does not show how they start.
    records = [
        {"messages": [TALK["messages"][0], {"role": "assistant", "content": "lamp " * words}]}
        for words in [500, 2000] * 10
    ]
    arguments = arguments_of(
        folder, tmp_path, records, "documents.prepend_bos=true", template="<s>" + CHATML
    )
    counts = re.search(r"(\d+) of (\d+) sampled conversations", refused(*arguments))
    assert counts[1] == counts[2]


def test_answers_without_an_end_are_said(folder, tmp_path):
    without_end = CHATML.replace("'<|im_end|>' + '\\n'", "'\\n'")
    said = inside(*arguments_of(folder, tmp_path, [TALK] * 2, template=without_end))
    assert "2 of 2 sampled answers end without a trained special token" in said.out
    said = inside(*arguments_of(folder, tmp_path, [TALK] * 2))
    assert said.status == 0 and "sampled" not in said.out


def test_parts_of_conversations_that_nothing_reads_are_said_with_a_count(folder, tmp_path):
    marked = {"messages": [{**TALK["messages"][0], "mask": 1}, TALK["messages"][1]]}
    said = inside(*arguments_of(folder, tmp_path, [TALK] * 2 + [marked] * 3))
    assert "not as intended: 'mask' of a message (3). docs/records.md lists" in said.out


@pytest.mark.long
def test_a_sample_warns_above_a_hundredth_of_unknown_tokens_and_half_of_answers_without_an_end():
    notes = SampleNotes(tokens=1000, unknown=10, answers=4, open_ends=2)
    assert notes.warnings() == [] and notes.problem(has_share=False) == ""
    (warning,) = replace(notes, unknown=11).warnings()
    assert warning.startswith("1.1% of its sampled tokens are the unknown token")
    (warning,) = replace(notes, open_ends=3).warnings()
    assert warning.startswith("3 of 4 sampled answers end without")
    (warning,) = replace(notes, spans=4, split_starts=1).warnings()
    assert warning.startswith("1 of 4 sampled trained spans start inside a token")
    problem = replace(notes, conversations=9, two_bos=1).problem(has_share=False)
    assert problem.startswith("1 of 9 sampled conversations start with the bos")
    few = SampleNotes(judged=900, kept=199, is_whole=False, keys_keep="where keeps")
    (warning,) = few.warnings()
    assert warning.startswith("where keeps only 199 of 900 sampled documents")
    assert replace(few, kept=200).warnings() == [] == replace(few, is_whole=True).warnings()
    named = replace(few, kept=200, empty=frozenset("ba"), fields="'c' (a text)")
    (warning,) = named.warnings()
    assert warning.startswith("no sampled record has a value in the field a, b, which where")
    assert warning.endswith(". The fields are 'c' (a text)")
    assert replace(named, fields="").warnings()[0].endswith("Check the name")


def test_a_sample_of_which_the_expressions_keep_nothing_stops_a_build_if_that_is_certain():
    none = SampleNotes(
        judged=9,
        is_whole=False,
        empty=frozenset(),
        fields="'c' (a text)",
        keys_keep="where and repeat keep",
    )
    assert none.problem(has_share=False) == "" == replace(none, judged=0).problem(has_share=True)
    assert replace(none, kept=1, is_whole=True).problem(has_share=True) == ""
    for of_all in (none.problem(has_share=True), replace(none, is_whole=True).problem(False)):
        assert of_all.startswith(
            "where and repeat keep none of 9 sampled documents; the fields are"
        )
    named = replace(none, empty=frozenset("ba"), fields="").problem(has_share=False)
    assert named.startswith("where and repeat keep none of 9 sampled documents: no record has")
    assert "the field a, b\nhint" in named
    unjudged = replace(none, unjudged=9, fault="where: why").problem(has_share=False)
    assert unjudged.startswith("where: why; the fields are 'c' (a text)\nhint")
    assert replace(none, unjudged=8, fault="where: why").problem(has_share=False) == ""


def test_notes_of_several_formats_are_added():
    notes, passes = SampleNotes(), SampledPasses(Passes.of(Source(paths=("a",), where="a > b"), 0))
    notes.add_passes(passes, is_whole=True)
    assert notes == SampleNotes(keys_keep="where keeps")
    lines = [b'{"a": 5, "b": 1}', b'{"a": "x", "b": 1}', b'{"a": 0, "b": 1}', b"{"]
    assert passes.of_lines(lines, [0, 1, 2, 3]).tolist() == [1, 1, 0, 1]
    assert (passes.judged, passes.kept, passes.unjudged, passes.empty) == (4, 3, 1, set())
    assert passes.fault.startswith("where: > takes values of one kind") and len(passes.bad) == 1
    assert passes.of_lines(lines[2:3], [0]).tolist() == [0] and passes.known == {}
    notes.add_passes(passes, is_whole=False)
    other = SampledPasses(passes.passes)
    other.of_lines([b'{"a": null, "b": 3}'], [0])
    assert other.empty == {"a"}
    other.leave_out(0, np.arange(7))
    assert (other.judged, other.kept, other.empty) == (8, 0, set())
    notes.add_passes(other, is_whole=True)
    assert notes == SampleNotes(
        judged=13,
        kept=3,
        unjudged=1,
        fault=passes.fault,
        is_whole=False,
        empty=frozenset(),
        keys_keep="where keeps",
    )
