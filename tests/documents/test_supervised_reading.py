"""packprep.documents.reading of documents that say what of them is trained."""

import json

import numpy as np
import pytest

from packprep.building.plan import Plan
from packprep.building.planning import look_up, make_plan
from packprep.documents.reading import DocumentsBuilder, TextReader, is_bad, read_documents
from packprep.errors import RecipeError, SourceError
from packprep.recipe import read_recipe
from tests import made
from tests.conversations import chats_made as chats

CHATML = chats.CHATML.replace("<|im_start|>", "<fim_prefix>").replace("<|im_end|>", "<fim_suffix>")
PREFIX, SUFFIX = 263, 265  # of the built-in bytes
RECORDS = [
    {"text": "plain"},
    {"text": "né 🙂!", "loss_spans": [[1, 2], [3, 4]]},
    {"messages": chats.turns("né", "a 🙂", "q", "b", system="s")},
    {"text": "nothing", "loss_spans": []},
    {"text": "x", "loss_spans": [[0, 1]]},
    {"messages": chats.turns("<pad>", "a")},
    {"text": "plain, too"},
    {"text": "all", "loss_spans": [[0, 3]]},
]


def read(folder, records=RECORDS, template=CHATML, **documents):
    made.write(
        folder / "a.jsonl",
        b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in records),
    )
    ignoring, recipe = (
        read_recipe(
            made.table("a.jsonl", documents={"loss_spans": loss_spans, **documents}), folder
        )
        for loss_spans in ("ignore", "use")
    )
    inputs = look_up(ignoring, {})
    plan = Plan(make_plan(inputs), inputs.vocabulary.tokenizer_json)
    slices = ((source, part) for source in plan.sources for part in source.slices(0, 1))
    builder = DocumentsBuilder(recipe, plan.sources, plan.token_dtype)
    reader = TextReader(recipe.documents, plan.vocabulary, plan.engine, template)
    return read_documents(builder, reader, slices)


def own(offsets, values, i):
    return values[offsets[i] : offsets[i + 1]]


def test_supervised_documents_bring_their_trained_tokens_cuts_and_system(tmp_path):
    reading = read(tmp_path, min_tokens=2)
    documents, training = reading, reading.training
    places = np.cumsum([0, *(len(json.dumps(r, ensure_ascii=False).encode()) + 1 for r in RECORDS)])
    assert documents.position.tolist() == places[[0, 1, 2, 6, 7]].tolist()
    assert training.supervised.tolist() == [0, 1, 1, 0, 1]
    assert training.eos_weight.tolist() == [0, 0, 1, 0, 1]
    assert [own(training.span_offsets, training.spans, i).tolist() for i in (0, 1, 3, 4)] == [
        [],
        [[1, 3], [4, 8]],
        [],
        [[0, 3]],
    ]
    ids = own(documents.offsets, documents.ids, 2)
    trained = [ids[a:b].tolist() for a, b in own(training.span_offsets, training.spans, 2)]
    assert trained == [[*"a 🙂".encode(), SUFFIX, 10], [*b"b", SUFFIX, 10]]
    assert [0, *own(training.cut_offsets, training.cuts, 2)] == np.flatnonzero(
        ids == PREFIX
    ).tolist()
    assert training.system.tolist() == [
        0,
        0,
        training.cuts[0],
        0,
        0,
    ] and training.cut_offsets.tolist() == [
        0,
        0,
        0,
        4,
        4,
        4,
    ]


def test_what_cannot_be_trained_is_left_out_and_counted(tmp_path):
    reading = read(tmp_path, min_tokens=2)
    reasons = [record["reason"] for record in reading.rejected.records()]
    assert reasons == ["untrained", "below_min_tokens", "special_text"]
    assert [is_bad(reason) for reason in reasons] == [False, False, True]
    assert reading.dropped_tokens == {
        "source0": {"untrained": len("nothing"), "below_min_tokens": 1}
    }
    assert reading.read == {"source0": len(RECORDS)}


def test_without_supervised_documents_there_is_nothing_about_training(tmp_path):
    assert read(tmp_path, [{"text": "a"}, {"text": "b"}]).training is None
    ignored = read(tmp_path, loss_spans="ignore")
    assert ignored.training is None
    assert [record["reason"] for record in ignored.rejected.records()] == [
        "missing_text",
        "missing_text",
    ]


def test_plain_documents_are_read_the_same_beside_supervised_ones(tmp_path):
    plain = [{"text": text} for text in made.texts(60)]
    mixed = [
        record for i, p in enumerate(plain) for record in ([p, RECORDS[2]] if i % 3 == 0 else [p])
    ]
    alone, beside = read(tmp_path, plain), read(tmp_path, mixed)
    own_ids = np.repeat(beside.training.supervised == 0, np.diff(beside.offsets))
    np.testing.assert_array_equal(beside.ids[own_ids], alone.ids)


def test_bad_documents_fail_counts_the_reasons_of_supervised_ones(tmp_path):
    bad = [{"text": "x", "loss_spans": [[2, 0]]}, {"messages": []}, RECORDS[5]]
    for record, reason in zip(bad, ("bad_loss_spans", "bad_messages", "special_text"), strict=True):
        with pytest.raises(SourceError, match=f"document at 18: {reason}"):
            read(tmp_path, [RECORDS[0], record], bad_documents="fail")
    assert len(read(tmp_path, [RECORDS[0], RECORDS[3]], bad_documents="fail").rejected) == 1


def test_messages_without_a_template_stop_the_build(tmp_path):
    with pytest.raises(RecipeError, match="documents.chat_template"):
        read(tmp_path, template=None)
