"""Rows of two sides: the prefixes of a row fit encoder_length, and what follows them
decoder_length."""

import json

import numpy as np
import pytest

from packprep.dataset.encoder_decoder import READ, split
from packprep.dataset.loader import open_dataset
from packprep.dataset.shard import shard_in
from packprep.errors import RecipeError
from packprep.objectives.tasks import capacities
from packprep.recipe import read_recipe
from tests import made
from tests.command_line import packprep
from tests.conversations.chats_made import CHATML
from tests.twin import cutting
from tests.twin.check import verify_with_twin

PREFIX = {"objective": "prefix_lm", "eos_after_inputs": True, "sentinel": True}
SPANS = {"objective": "span_corruption", "eos_after_inputs": True, "mode_token": "[NLU]"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sides")
    return folder, made.mixed_corpus(folder)


def recipe(sources, tasks, encoder=256, decoder=64, **changes):
    packing = {"encoder_length": encoder, "decoder_length": decoder, **changes.pop("packing", {})}
    table = made.table(
        sources, tasks=tasks, packing=packing, specials={"missing": "add"}, **changes
    )
    return (
        table if "seq_length" in changes else {k: v for k, v in table.items() if k != "seq_length"}
    )


def sides_of(out):
    """(inputs, targets), int64[rows] each: slots of a dataset's rows."""
    manifest, found = open_dataset(out).manifest, []
    for number in range(len(manifest["shards"])):
        arrays = shard_in(out, manifest, number).arrays
        lengths = np.diff(arrays["cu_seqlens"].astype(np.int64))
        slots = lengths[
            np.setdiff1d(
                np.arange(len(lengths)),
                arrays["row_offsets"][1:-1] + np.arange(len(arrays["tokens"]) - 1),
            )
        ]
        row = np.repeat(np.arange(len(arrays["tokens"])), np.diff(arrays["row_offsets"]))
        prefix = arrays["segment_prefix"]
        assert (prefix > 0).all() and (slots > prefix).all()
        found.append([np.bincount(row, part) for part in (prefix, slots - prefix)])
    return [np.concatenate(part) for part in zip(*found, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("tasks", [[{"preset": "ul2"}, PREFIX], [SPANS]], ids=["ul2", "spans"])
def test_both_sums_of_each_row_fit_in_every_epoch_and_the_tighter_side_is_full(
    corpus, tmp_path, tasks
):
    folder, sources = corpus
    made.build(recipe(sources, tasks, documents={"prepend_bos": True}), folder, tmp_path / "out")
    inputs, targets = sides_of(tmp_path / "out")
    assert inputs.max() <= 256 and targets.max() <= 64
    shown = packprep("inspect", tmp_path / "out", "--json").json
    fill = shown["utilisation"]
    assert (fill["encoder"], fill["decoder"]) == (inputs.mean() / 256, targets.mean() / 64)
    assert np.maximum(inputs / 256, targets / 64).mean() > 0.97 and shown["seq_length"] == 320
    assert (
        f"encoder {fill['encoder']:.2%}, decoder {fill['decoder']:.2%}"
        in packprep("inspect", tmp_path / "out").out
    )
    for epoch in (0, 3):
        assert verify_with_twin(tmp_path / "out", epoch=epoch)["faults"] == 0
    columns = ("tokens", "prefix_ends")
    stored, drawn = (
        open_dataset(tmp_path / "out").batch(range(9), None, columns, epochs=[e] * 9)
        for e in (0, 3)
    )
    assert np.array_equal(stored["prefix_ends"], drawn["prefix_ends"])
    assert not np.array_equal(stored["tokens"], drawn["tokens"])


@pytest.mark.parametrize("sides", [(64, 64), (256, 64), (96, 512)])
@pytest.mark.parametrize(
    "changes",
    [{}, {"random_roll": True, "noise_density": 0.5}, {"objective": "prefix_lm", "name": "s"}],
)
def test_the_longest_segment_is_that_of_which_both_sides_fit(sides, changes):
    documents = {"prepend_bos": True}
    table = recipe("x.jsonl", [SPANS | changes, PREFIX], *sides, documents=documents)
    mixed, tasks = made.mix(table)
    last, inner = capacities(mixed, tasks)
    plain = made.twin_recipe(mixed, tasks)
    for t, task in enumerate(tasks[:-1]):
        for bos, eos in ((0, 0), (1, 1)):
            fits = [
                prefix + bos + task.mode <= sides[0] and behind + eos <= sides[1]
                for prefix, behind in (
                    task.objective.most_sides(task, n) for n in range(2, sum(sides))
                )
            ]
            longest = fits.index(False) + 1
            assert not any(fits[longest - 1 :]), "neither side falls when n grows"
            assert last[t, bos, eos] == longest == cutting.capacity(plain, t, bool(bos), bool(eos))
        assert inner[t].tolist() == [cutting.inner_capacity(plain, t, bool(bos)) for bos in (0, 1)]


def test_eos_ends_inputs_and_a_document_s_targets(corpus, tmp_path):
    folder, sources = corpus
    made.build(recipe(sources, [SPANS, PREFIX], encoder=512, decoder=512), folder, tmp_path / "out")
    ds = open_dataset(tmp_path / "out")
    eos, slots = ds.manifest["specials"]["eos"], ds.manifest["ledger"]["sources"]
    ends = 0
    for i in range(len(ds)):
        row = ds.row(i)
        for begin, end, prefix in zip(
            row.cu_seqlens[:-1], row.cu_seqlens[1:], row.segments["prefix"], strict=True
        ):
            assert row.tokens[begin + prefix - 1] == eos and row.loss_mask[begin + prefix - 1] == 1
            assert not row.loss_mask[begin : begin + prefix - 1].any()
            ends += 1 + int(row.tokens[end - 1] == eos)
    assert ends == sum(source["slots"]["added"]["eos"] for source in slots.values())


def test_conversations_have_the_prompt_on_one_side_and_the_answer_on_the_other(tmp_path):
    talks = [
        [("user", f"what is {k}?"), ("assistant", "a number " * (1 + k % 7))] for k in range(60)
    ]
    lines = [
        json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}) for talk in talks
    ]
    made.write(tmp_path / "chat.jsonl", "\n".join(lines).encode())
    made.write(tmp_path / "t.jinja", CHATML.encode())
    documents = {"chat_template": "t.jinja", "append_eos": False}
    for name, ended in (("plain", False), ("ended", True)):
        task = {"objective": "prefix_lm", "eos_after_inputs": ended, "sentinel": ended}
        made.build(
            recipe("chat.jsonl", [task], documents=documents, encoder=256, decoder=256),
            tmp_path,
            tmp_path / name,
        )
        for epoch in (0, 5) if ended else ():
            assert verify_with_twin(tmp_path / name, epoch=epoch)["faults"] == 0
    plain, ended = (sides_of(tmp_path / name)[0].sum() for name in ("plain", "ended"))
    assert ended - plain == 60
    ds = open_dataset(tmp_path / "ended")
    arrays = split(ds.batch(range(len(ds)), columns=READ))
    asked, answered = (
        bytes(token for token in arrays[name].ravel().tolist() if 0 < token < 256).decode()
        for name in ("encoder_input_tokens", "decoder_target_tokens")
    )
    assert asked.count("what is") == 60 and "a number" not in asked
    assert (
        answered.count("a number") == sum(1 + k % 7 for k in range(60))
        and "what is" not in answered
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"packing": {"decoder_length": 0}}, "packing.encoder_length is set, but packing.decoder_length is not\nhint: set both"),
        ({"packing": {"decoder_length": 60}}, "packing.decoder_length = 60: expected a multiple of 8"),
        ({"packing": {"algorithm": "next_fit"}}, 'packing.algorithm = "next_fit" cannot be combined with packing.encoder'),
        ({"packing": {"algorithm": "concat"}}, 'packing.algorithm = "concat" cannot be combined'),
        ({"packing": {"pad_seq_to_mult": 8}}, "packing.pad_seq_to_mult = 8 cannot be combined"),
        ({"seq_length": 512}, "it is their sum\nhint: leave seq_length out"),
        ({"seq_lengths": [64, 128]}, "seq_lengths = [64, 128] cannot be combined"),
        ({"documents": {"min_tokens": 2}}, "documents.min_tokens = 2 cannot be combined with packing.encoder_length and"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_key(tmp_path, changes, said):
    with pytest.raises(RecipeError) as caught:
        read_recipe(recipe("a.jsonl", [SPANS], **changes), tmp_path)
    assert said in str(caught.value)


def test_tasks_without_a_prefix_and_sides_that_are_too_small_are_refused_by_name(corpus, tmp_path):
    folder, sources = corpus
    with pytest.raises(
        RecipeError,
        match=(
            "task 'causal': packing.encoder_length needs prefixes .*\nhint: use tasks of prefix_lm, span_corr"
        ),
    ):
        made.build(recipe(sources, [{"objective": "causal"}]), folder, tmp_path / "a")
    with pytest.raises(
        RecipeError,
        match="row of encoder_length = 256 and decoder_length = 8 fits .*\nhint: raise decoder_length",
    ):
        made.build(
            recipe(sources, [PREFIX], decoder=8, documents={"min_tokens": 9}),
            folder,
            tmp_path / "b",
        )
    with pytest.raises(RecipeError, match="raise encoder_length"):
        made.build(
            recipe(sources, [SPANS], encoder=8, documents={"min_tokens": 9}), folder, tmp_path / "c"
        )
