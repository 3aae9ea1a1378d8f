"""Datasets of documents with answers in blocks: the independent implementation gives the same in
every epoch, and documents can be removed."""

import json
import random

import numpy as np
import pytest

from packprep.dataset.loader import open_dataset
from packprep.errors import PackprepError
from packprep.removing import remove_documents
from tests import made, media_made
from tests.dataset.test_blocks import walked
from tests.test_removing import documents_of, segment_numbers, shards_of, sound, write_list

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}\n{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWERS = {
    "name": "answers",
    "objective": "block_diffusion",
    "block_length": 7,
    "block_origin": "answer",
}
GRID = {**ANSWERS, "name": "grid", "block_origin": "segment"}
BOTH = [{**task, "eos_fill": "block"} for task in (ANSWERS, GRID)]
ONLY_BODIES = {"noise_eos": False, "noise": "position"}
WITH_PLAIN = ["chats", "plain"]
VARIANTS = {
    "filled": {"tasks": BOTH},
    "bodies": {
        "tasks": [ANSWERS, {**GRID, **ONLY_BODIES}],
        "sources": WITH_PLAIN,
    },
    "plain": {"tasks": [*BOTH, {"objective": "uniform_diffusion"}], "sources": WITH_PLAIN},
    "headed": {
        "tasks": [{**task, "mode_token": "[NLG]", "shift": True} for task in BOTH],
        "documents": {"prepend_bos": True, "append_eos": "segment"},
        "packing": {"pad_seq_to_mult": 4},
    },
    "no eos": {
        "tasks": [{**task, "noise": "position", "half_life": 0.5} for task in BOTH],
        "documents": {"append_eos": False},
    },
    "each": {
        "tasks": [{**task, "noise": "all"} for task in BOTH],
        "documents": {"trained_turns": "each"},
    },
    "pairs": {"tasks": [{**task, "complementary": True} for task in BOTH], "weighted": True},
    "canvas": {
        "tasks": [{**task, "canvas": "uniform", "weighting": "none"} for task in BOTH],
        "documents": {"long": "truncate"},
    },
    "by document": {
        "tasks": BOTH,
        "documents": {"loss_weighting": "document", "long": "drop"},
        "weighted": True,
    },
    "by turn": {
        "tasks": [{**task, "shift": True} for task in BOTH],
        "documents": {"loss_weighting": "turn", "long_answers": "untrained"},
        "weighted": True,
    },
    "least": {"tasks": BOTH, "output": {"columns": "least"}, "documents": {"max_tokens": 60}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, chance = tmp_path_factory.mktemp("answers"), random.Random(4)
    made.write(folder / "chat.jinja", TEMPLATE.encode())
    made.write_lines(folder / "plain.jsonl", made.texts(8, 3, 90))
    for name in ("chats", "weighted"):
        lines = [json.dumps(chat(chance, name == "weighted")) for _ in range(14)]
        made.write(folder / f"{name}.jsonl", "\n".join(lines).encode())
    return folder


def chat(chance, is_weighted):
    """A conversation of up to four turns; some say what weights they have."""
    texts = iter(made.texts(9, chance.randrange(1000), 45))
    messages = [{"role": "system", "content": "Be brief."}] * chance.randint(0, 1)
    for _ in range(chance.randint(1, 4)):
        messages.append({"role": "user", "content": next(texts)[:50]})
        weight = {"weight": chance.choice([0.5, 1, 2])} if is_weighted else {}
        messages.append({"role": "assistant", "content": next(texts)[:120], **weight})
    weight = {"weight": chance.choice([0.25, 3])} if is_weighted else {}
    return {"messages": messages, **weight}


def table_of(folder, tasks, documents=(), sources=("chats",), weighted=False, **changes):
    names = ["weighted"] if weighted else sources
    return made.table(
        [{"name": name, "paths": [f"{name}.jsonl"]} for name in names],
        seq_length=256,
        tasks=tasks,
        documents={"chat_template": "chat.jinja", "max_bad_fraction": 1, **dict(documents)},
        **{"output": {"shard_text_bytes": 4000}, **changes},
    )


@pytest.mark.alike(6)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_twin_gives_the_same_in_every_epoch(folder, tmp_path, variant):
    made.build(table_of(folder, **VARIANTS[variant]), folder, tmp_path / "out")
    for epoch in (0, 1, 4):
        report = sound(tmp_path / "out", twin=True, epoch=epoch)
        assert report["twin"] == report["segments"] > 0
    ledger = open_dataset(tmp_path / "out").manifest["ledger"]
    fill = sum(source["slots"]["added"].get("eos_fill", 0) for source in ledger["sources"].values())
    assert (fill > 0) == (variant != "bodies")
    stored = [arrays.get("segment_fill", np.zeros(1)) for _, arrays in shards_of(tmp_path / "out")]
    assert sum(int(column.sum()) for column in stored) == fill
    for source in ledger["sources"].values():
        tokens = source["tokens"]
        lost = tokens["truncated"] + sum(tokens["dropped"].values())
        assert tokens["used"] + lost == tokens["read"]


def test_the_loader_gives_where_blocks_begin(folder, tmp_path):
    """By a walk over the trained slots of each segment."""
    tasks = [*BOTH, {"objective": "uniform_diffusion"}]
    table = table_of(folder, tasks, {"prepend_bos": True}, WITH_PLAIN)
    made.build({**table, "output": {}}, folder, tmp_path / "out")
    ds, ((_, arrays),) = open_dataset(tmp_path / "out"), shards_of(tmp_path / "out")
    names = ["tokens", "block_starts", "position_ids", "segment_ids"]
    batch = ds.batch(range(len(ds)), columns=names)
    numbers = segment_numbers(arrays)
    for g, t in enumerate(arrays["segment_task"].tolist()):
        mine = numbers == g
        starts = batch["block_starts"][mine].tolist()
        if t not in (0, 1):
            assert set(starts) == {-1}
            continue
        half = len(starts) // 2
        flags = [0] * half
        for k in range(*arrays["trained_offsets"][g : g + 2]):
            begin, end = arrays["trained_ranges"][k].tolist()
            flags[begin:end] = [1] * (end - begin)
        before = int(arrays["segment_start"][g] == 0)
        parameters = {"block_length": 7, "block_origin": "segment" if t else "answer"}
        walk = walked(flags, before, parameters)
        expected = [walk.index(n) if n >= 0 else slot for slot, n in enumerate(walk)]
        assert starts == expected * 2
    for ask in (
        lambda: ds.batch([0], columns=["tokens", "block_lengths", "block_starts"]),
        lambda: ds.row(0).block_lengths,
    ):
        with pytest.raises(PackprepError, match="ask for the column block_starts instead"):
            ask()


@pytest.mark.parametrize("lengths", [[160, 256, 512], [96, 128]])
@pytest.mark.long
def test_rows_of_several_lengths(folder, tmp_path, lengths):
    table = table_of(folder, BOTH, {}, WITH_PLAIN, seq_lengths=lengths)
    del table["seq_length"]
    made.build_lengths(table, folder, tmp_path / "out")
    for length in lengths:
        for epoch in (0, 1):
            assert sound(tmp_path / "out" / f"seq_{length}", twin=True, epoch=epoch)["segments"]


@pytest.mark.long
def test_documents_with_filled_blocks_are_removed(folder, tmp_path):
    made.build(table_of(folder, BOTH), folder, tmp_path / "out")
    documents = documents_of(tmp_path / "out")
    for name, gone in (("some", documents[::3]), ("all", documents)):
        new = tmp_path / name
        result = remove_documents(
            tmp_path / "out", write_list(tmp_path / f"{name}.list", gone), new, made.Silent()
        )
        assert result["removed"] == len(gone)
        for (_, before), (_, after) in zip(
            shards_of(tmp_path / "out"), shards_of(new), strict=True
        ):
            kept = np.isin(segment_numbers(before), np.flatnonzero(after["segment_tokens"] > 0))
            assert (before["tokens"] == after["tokens"])[kept].all()
            assert np.array_equal(before["segment_fill"], after["segment_fill"])
        for epoch in (0, 2):
            sound(new, twin=True, epoch=epoch)


@pytest.mark.long
def test_documents_of_recipes_with_media_are_not_stored_twice(tmp_path):
    """A media span is stored once, so block diffusion of documents that may have one is refused."""
    media_made.write(tmp_path, "media.jsonl", media_made.texts(12, 12, 40, 90))
    tasks = [{**ANSWERS, "canvas": "uniform", "weighting": "none"}, {"preset": "causal"}]
    recipe = made.table(
        [{"name": "media", "paths": ["media.jsonl"]}],
        tasks=tasks,
        seq_length=256,
        specials={"missing": "add", "media": media_made.SPECIALS["media"]},
        documents={"loss_spans": "use", "max_bad_fraction": 1},
    )
    for some in (tasks, tasks[:1]):
        with pytest.raises(PackprepError, match="stores tokens twice, but a media span"):
            made.build({**recipe, "tasks": some}, tmp_path, tmp_path / "out")


def test_the_weight_of_a_shifted_task_is_that_of_the_token_it_predicts(folder, tmp_path):
    """Also at the first token of an answer, and where two weights meet."""
    spans = [[2, 4, 0.5], [4, 7, 0.25], [8, 10, 2.0]]
    line = json.dumps({"text": "a b c d e ", "loss_spans": spans})
    made.write(folder / "spans.jsonl", line.encode())
    task = {**ANSWERS, "noise": "all", "shift": True}
    table = table_of(folder, [task], {"append_eos": False}, ["spans"])
    made.build(table, folder, tmp_path / "out")
    sound(tmp_path / "out", twin=True)
    row = open_dataset(tmp_path / "out").row(0)
    half = int(row.segments["end"][0]) // 2
    expected = [0, 0.5, 0.5, 0.25, 0.25, 0.25, 0, 2, 2, 0]
    assert row.loss_weights[:half].tolist() == expected
    assert row.loss_mask[:half].tolist() == [int(weight > 0) for weight in expected]


@pytest.mark.parametrize("last", [{"role": "user", "content": "thanks"}, None])
def test_a_conversation_that_ends_with_a_question_is_not_filled(folder, tmp_path, last):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    line = json.dumps({"messages": [*messages, *([last] if last else [])]})
    made.write(folder / "ends.jsonl", line.encode())
    made.build(table_of(folder, BOTH[1:], sources=["ends"]), folder, tmp_path / "out")
    ((_, arrays),) = shards_of(tmp_path / "out")
    assert ("segment_fill" in arrays) == (last is None)
    sound(tmp_path / "out", twin=True)
