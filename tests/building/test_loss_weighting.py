"""`documents.loss_weighting`: the weights of a document, or of a turn, sum to the document's weight."""

import json
import random
from collections import defaultdict

import numpy as np
import pytest

import packprep
from packprep.errors import RecipeError
from packprep.exporting.export import export_dataset
from packprep.recipe import DocumentKeys
from tests import made
from tests.building.test_long_conversations import CHAT, SHAPES, conversation
from tests.twin.check import verify_with_twin
from tests.weights_made import TASKS, build, records


def chat_lines(seed, count):
    """Return records of conversations, of which some have weights, and some are longer than a
    row."""
    chance, lines = random.Random(seed), []
    for k in range(count):
        messages = conversation(SHAPES[k % len(SHAPES)], chance, 60)
        for message in messages:
            if message["role"] == "assistant" and chance.random() < 0.3:
                message |= chance.choice([{"weight": 0.5}, {"weight": 3}, {"train": False}])
        weight = chance.choice([{}, {}, {"weight": 2}, {"weight": 0.25}])
        lines.append({"messages": messages, **weight})
    return lines


def build_chats(folder, lines, weighting, sources=("a.jsonl",), **changes):
    folder.mkdir(exist_ok=True)
    made.write(folder / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    (folder / "chat.jinja").write_text(CHAT)
    documents = {"chat_template": "chat.jinja", "max_bad_fraction": 1, "loss_weighting": weighting}
    changes = {"tasks": [{"objective": "causal"}], "seq_length": 256, **changes}
    return made.table(*sources, documents=documents, **changes)


def sums_by_document(dataset, lines):
    """Return line → the sum of its loss weights, and line → the number of its segments."""
    ends = np.cumsum([0, *(len(json.dumps(line)) + 1 for line in lines)]).tolist()
    sums, segments = defaultdict(float), defaultdict(int)
    for row in map(dataset.row, range(len(dataset))):
        columns, weights = row.segments, row.loss_weights.astype(np.float64)
        for begin, end, doc in zip(
            *(columns[name].tolist() for name in ("begin", "end", "doc")), strict=True
        ):
            sums[ends.index(doc)] += weights[begin:end].sum()
            segments[ends.index(doc)] += 1
    return sums, segments


def test_the_weights_of_a_conversation_sum_to_its_own_in_all_segments(tmp_path):
    lines = chat_lines(1, 24)
    made.build(build_chats(tmp_path, lines, "document"), tmp_path, tmp_path / "out")
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] > 40
    sums, segments = sums_by_document(packprep.open_dataset(tmp_path / "out"), lines)
    assert len(sums) > 20 and max(segments.values()) > 3
    for number, total in sums.items():
        assert total == pytest.approx(lines[number].get("weight", 1), rel=1e-6)


def test_each_turn_of_a_conversation_weighs_as_much_as_any_other(tmp_path):
    lines = chat_lines(2, 24)
    made.build(build_chats(tmp_path, lines, "turn", seq_length=512), tmp_path, tmp_path / "out")
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] > 24
    dataset = packprep.open_dataset(tmp_path / "out")
    sums, segments = sums_by_document(dataset, lines)
    uncut = [number for number, count in segments.items() if count == 1]
    turns = []
    for number in uncut:
        answers = [m for m in lines[number]["messages"] if m["role"] == "assistant"]
        turns.append(sum(m.get("train", True) for m in answers))
        weight = lines[number].get("weight", 1)
        assert sums[number] == pytest.approx(turns[-1] * weight, rel=1e-6)
    assert len(uncut) > 4 and max(turns) > 2


@pytest.mark.parametrize("name", ["prefix", "sentinel", "masked"])
def test_weights_of_spans_and_plain_documents_sum_to_one_by_any_objective(tmp_path, name):
    lines = records(3, 60, longest=200)
    settings = {"loss_weighting": "document", "max_bad_fraction": 1}
    build(tmp_path, lines, [TASKS[name]], seq_length=128, documents=settings)
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] > 40
    sums, _ = sums_by_document(packprep.open_dataset(tmp_path / "out"), lines)
    shares = [total / lines[number].get("weight", 1) for number, total in sums.items()]
    if name == "masked":  # each draws its own noise, and the expected sum is 1
        assert np.mean(shares) == pytest.approx(1, abs=0.5)
    else:
        assert shares == pytest.approx(np.ones(len(shares)), rel=1e-6)


def test_later_epochs_keep_the_weights_of_documents(tmp_path):
    lines = [{"text": "question answer", "loss_spans": [[9, 15]]}, {"text": "no spans at all here"}]
    settings = {"loss_weighting": "document", "max_bad_fraction": 1}
    build(tmp_path, lines, [TASKS["prefix"], TASKS["causal"]], seq_length=64, documents=settings)
    dataset = packprep.open_dataset(tmp_path / "out")
    for epoch in range(4):
        row = dataset.row(0, epoch=epoch)
        ends = zip(row.segments["begin"].tolist(), row.segments["end"].tolist(), strict=True)
        sums = [float(row.loss_weights[begin:end].sum()) for begin, end in ends]
        assert sums == pytest.approx([1, 1])


def test_an_export_without_weights_names_the_weighting(tmp_path):
    made.build(build_chats(tmp_path, chat_lines(6, 8), "turn"), tmp_path, tmp_path / "out")
    with pytest.raises(RecipeError, match='documents.loss_weighting = "turn" gives weights'):
        export_dataset(tmp_path / "out", "hf", tmp_path / "hf", made.Silent())


@pytest.mark.long
def test_a_token_store_gives_the_same_weights(tmp_path):
    lines = chat_lines(4, 20)
    table = build_chats(tmp_path, lines, "turn")
    direct = made.build(table, tmp_path, tmp_path / "direct")
    stored = {**table, "documents": {**table["documents"], "loss_weighting": "token"}}
    made.build(stored, tmp_path, tmp_path / "store", is_store=True)
    source = {"name": "source0", "paths": ["store"], "format": "store"}
    of_store = made.build({**table, "sources": [source]}, tmp_path, tmp_path / "of_store")
    digests = [[shard["digest"] for shard in o.manifest["shards"]] for o in (direct, of_store)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"tasks": [{"objective": "masked_diffusion", "weighting": "none"}]},
            "depends on how much",
        ),
        ({"sources": ("plain.jsonl",)}, "no document in the sample of source 'source0'"),
    ],
    ids=["noise without its weight", "nothing says what is trained"],
)
def test_what_cannot_be_weighted_is_refused_before_a_build(tmp_path, changes, message):
    (tmp_path / "plain.jsonl").write_text('{"text": "all of this is trained"}\n' * 20)
    table = build_chats(tmp_path, chat_lines(5, 10), "document", **changes)
    with pytest.raises(
        RecipeError, match=rf"loss_weighting = \"document\": .*{message}[^\n]*\nhint"
    ):
        made.build(table, tmp_path, tmp_path / "out")


def test_by_default_weights_stay_as_they_are():
    assert DocumentKeys().loss_weighting == "token"
