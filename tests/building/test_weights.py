"""Weights of spans: from a record to the loss of a packed row."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packprep
from packprep.verification import verify_dataset
from tests import made
from tests.conversations import chats_made as chats
from tests.twin.check import verify_with_twin
from tests.weights_made import TASKS, WEIGHTS, build, character_weights, records


def expected_weights(dataset, row, lines):
    """float32[T]: what a row's loss_weights should be, slot by slot, by the documents' own
    characters; bytes are tokens."""
    offsets = np.cumsum([0, *(len(json.dumps(line)) + 1 for line in lines)]).tolist()
    expected, columns = np.zeros(dataset.seq_length, np.float32), row.segments
    for k in range(row.n_segments):
        begin, end, start = (int(columns[name][k]) for name in ("begin", "end", "start"))
        task, n = dataset.tasks[int(columns["task"][k])], int(columns["tokens"][k])
        record = lines[offsets.index(int(columns["doc"][k]))]
        own = character_weights(record)
        has_eos = (
            start + n == len(record["text"])
            or dataset.manifest["recipe"]["documents"]["append_eos"] == "segment"
        )
        weights = [*own[start : start + n], *([own[start + n - 1]] if has_eos else [])]
        pivot = int(columns["prefix"][k])
        if len(weights) < end - begin:  # a sentinel weighs what follows it
            weights.insert(pivot, weights[pivot] or weights[pivot - 1] or 1)
        for slot in range(begin, end):
            if not row.loss_mask[slot]:
                continue
            target = slot - begin + (task["label_alignment"] == "next_token")
            expected[slot] = columns["loss_weight"][k] * np.float32(weights[target])
            assert weights[target] > 0
    return expected


@pytest.mark.parametrize("columns", ["full", "compact"])
@pytest.mark.parametrize("names", [["causal"], ["sentinel"], ["masked"], [*TASKS]], ids="-".join)
def test_weights_of_spans_are_the_loss_weights_of_what_is_predicted(tmp_path, names, columns):
    lines = records(1, 150)
    tasks = [TASKS[name] for name in names]
    outcome = build(
        tmp_path, lines, tasks, seq_length=64, output={"columns": columns, "shard_text_bytes": 2000}
    )
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] > 100
    dataset = packprep.open_dataset(tmp_path / "out")
    assert len(dataset.manifest["shards"]) > 2
    batch = dataset.batch(
        range(len(dataset)), columns=["loss_mask", "loss_weights", "loss_weight_sum"]
    )
    assert len(np.unique(batch["loss_weights"])) > 5
    for i in range(len(dataset)):
        row = dataset.row(i)
        expected = expected_weights(dataset, row, lines)
        assert np.array_equal(batch["loss_weights"][i], expected)
        assert np.array_equal(row.loss_weights, expected)
        assert batch["loss_weight_sum"][i] == np.float32(expected.sum(dtype=np.float64))
    weighted = outcome.manifest["ledger"]["sources"]["source0"]["slots"]["weighted"]
    arrays = [dataset.row(int(r))._shard.arrays for r in dataset._first_row[:-1]]
    lengths = [
        np.diff(a["trained_ranges"])[a["trained_weights"] != 1]
        for a in arrays
        if "trained_weights" in a
    ]
    assert weighted == sum(int(own.sum()) for own in lengths) > 0


def test_shards_in_which_all_weights_are_1_store_none(tmp_path):
    ones = records(2, 60, weights=(1, 1.0))
    build(tmp_path / "ones", ones, [TASKS["causal"]], seq_length=64)
    of_ones = packprep.open_dataset(tmp_path / "ones" / "out")
    assert (
        "trained_ranges" in of_ones.row(0)._shard.layout
        and "trained_weights" not in of_ones.row(0)._shard.layout
    )
    assert "weighted" not in of_ones.manifest["ledger"]["sources"]["source0"]["slots"]
    # A shard beside it may have some, and a batch has rows of both.
    lines = [{"text": "x" * 50, "loss_spans": [[0, 40]]}] * 40 + [
        {"text": "y" * 50, "loss_spans": [[0, 40, 2.5]]}
    ]
    build(
        tmp_path / "both", lines, [TASKS["causal"]], seq_length=64, output={"shard_text_bytes": 500}
    )
    both = packprep.open_dataset(tmp_path / "both" / "out")
    rows = [both.row(i) for i in range(len(both))]
    stored = ["trained_weights" in row._shard.layout for row in rows]
    assert 0 < sum(stored) < len(stored)
    weights = both.batch(range(len(both)), columns=["loss_weights"])["loss_weights"]
    assert set(np.unique(weights)) == {0, 1, 2.5}
    y = np.array([np.isin(ord("y"), row.tokens) for row in rows])
    assert np.array_equal((weights == 2.5).any(axis=1), y)


def test_weights_stay_in_later_epochs(tmp_path):
    lines = [{"text": "abcdefgh" * 4, "loss_spans": [[0, 8, 0.5], [8, 20, 2], [24, 32, 0]]}] * 30
    build(tmp_path, lines, [TASKS["masked"], TASKS["causal"]], seq_length=64)
    dataset = packprep.open_dataset(tmp_path / "out")
    every, columns = (
        range(len(dataset)),
        ["loss_mask", "loss_weights", "position_ids", "segment_ids"],
    )
    stored = dataset.batch(every, columns=columns)
    again = dataset.batch(every, columns=columns, epochs=[3] * len(dataset))
    assert not np.array_equal(stored["loss_mask"], again["loss_mask"])
    for i in every:
        segments = dataset.row(i).segments
        for k in range(len(segments["task"])):
            here = slice(int(segments["begin"][k]), int(segments["end"][k]))
            causal = dataset.tasks[int(segments["task"][k])]["objective"] == "causal"
            if causal:
                assert np.array_equal(
                    stored["loss_weights"][i, here], again["loss_weights"][i, here]
                )
                continue
            found = again["loss_weights"][i, here]
            assert (found[20:] == 0).all() and np.array_equal(
                found > 0, again["loss_mask"][i, here] > 0
            )
            shares = {
                float(w)
                for w in np.concatenate((found[:8] / np.float32(0.5), found[8:20] / np.float32(2)))
            } - {0.0}
            assert len(shares) <= 1  # the segment's own weight of that epoch


def test_eos_inside_a_document_weighs_as_much_as_the_token_before_it(tmp_path):
    lines, tasks = records(6, 60, longest=200), [TASKS["causal"], TASKS["masked"]]
    build(tmp_path, lines, tasks, seq_length=64, documents={"append_eos": "segment"})
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] > 60
    dataset, inner = packprep.open_dataset(tmp_path / "out"), []
    for row in map(dataset.row, range(len(dataset))):
        assert np.array_equal(row.loss_weights, expected_weights(dataset, row, lines))
        columns = row.segments
        for begin, end, task in zip(columns["begin"], columns["end"], columns["task"], strict=True):
            if dataset.tasks[int(task)]["objective"] == "causal":
                assert row.tokens[end - 1] == dataset.manifest["specials"]["eos"]
                inner.append(float(row.loss_weights[end - 2]))
                assert begin == end - 2 or row.loss_weights[end - 2] == row.loss_weights[end - 3]
    assert len(set(inner)) > 3 and 0.0 in inner


def test_a_packed_rows_weighted_loss_is_that_of_its_documents_alone(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    lines = records(5, 60, longest=60)
    build(tmp_path, lines, [TASKS["causal"]], seq_length=128, documents={"append_eos": False})
    dataset = packprep.open_dataset(tmp_path / "out")
    vocabulary = int(dataset.manifest["vocab_size"])
    embedding, head = (
        torch.randn(vocabulary, 16, dtype=torch.float64),
        torch.randn(16, vocabulary, dtype=torch.float64),
    )

    def logits(
        ids, positions
    ):  # of each token and its place alone, so that a packed row gives what its documents do
        angles = positions[:, None] * torch.arange(1, 17, dtype=torch.float64) / 7
        return (embedding[ids] * torch.cos(angles)) @ head

    packed = total = torch.zeros((), dtype=torch.float64)
    batch = dataset.batch(
        range(len(dataset)), columns=["tokens", "labels", "position_ids", "loss_weights"]
    )
    for i in range(len(dataset)):
        ids, labels, positions, weights = (
            torch.tensor(batch[name][i].astype(np.float64)) for name in batch
        )
        losses = torch.nn.functional.cross_entropy(
            logits(ids.long(), positions), labels.long(), reduction="none"
        )
        packed = packed + (losses * weights).sum()
    for line in lines:
        weights = torch.tensor(character_weights(line)[1:-1].astype(np.float64))
        ids = torch.tensor(list(line["text"].encode()))
        losses = torch.nn.functional.cross_entropy(
            logits(ids[:-1], torch.arange(len(ids) - 1, dtype=torch.float64)),
            ids[1:],
            reduction="none",
        )
        total = total + (losses * weights).sum()
    assert float(packed) == pytest.approx(float(total), rel=1e-12) and float(total) > 0


@pytest.mark.parametrize("missing", [None, float("nan"), "absent"])
def test_a_column_of_spans_with_and_without_weights_is_read_as_its_lines_are(tmp_path, missing):
    spans = [[0, 2], [18, 44, 0.5]]
    lines = [
        {"text": "Q: What is abc? A: A module of base classes.", "loss_spans": spans, "weight": 2},
        {"text": "none"},
    ]
    rows = [
        dict(line, weight=line.get("weight", None if missing == "absent" else missing))
        for line in lines
    ]
    for row in rows[:1] if missing != "absent" else ():
        row["loss_spans"] = [[0, 2, missing], [18, 44, 0.5]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    made.write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    weights = []
    for name in ("a.jsonl", "a.parquet"):
        table = made.table(name, tasks=[TASKS["causal"]], seq_length=128)
        made.build(table, tmp_path, tmp_path / f"out-{name}")
        report = verify_with_twin(tmp_path / f"out-{name}")
        assert report["listed"] == [] and report["twin"] == 2
        row = packprep.open_dataset(tmp_path / f"out-{name}").row(0)
        begin, end = (
            int(row.segments[name][list(row.segments["tokens"]).index(44)])
            for name in ("begin", "end")
        )
        weights.append(row.loss_weights[begin:end].tolist())
    assert weights[0] == weights[1] and set(weights[0]) == {0, 1, 2}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_column_of_floats_holds_spans_with_weights(tmp_path, compression):
    lines = [
        {
            "text": f"document {i} " * 3,
            "loss_spans": [[0.0, 9.0, 0.5], [9.0, 20.0, 1.0 + i]],
            "weight": 0.5,
        }
        for i in range(9)
    ]
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "a.parquet", compression=compression)
    made.build(
        made.table("a.parquet", tasks=[TASKS["causal"]], seq_length=128), tmp_path, tmp_path / "out"
    )
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == 9
    dataset = packprep.open_dataset(tmp_path / "out")
    weights = dataset.batch(range(len(dataset)), columns=["loss_weights"])["loss_weights"]
    assert set(np.unique(weights).tolist()) == {0, 0.25, *((1 + i) / 2 for i in range(9))}


def test_a_mixture_has_the_weights_of_its_datasets(tmp_path):
    for name, weights in (("a", (0.5, 2)), ("b", (1,))):
        build(tmp_path / name, records(3, 40, weights), [TASKS["causal"]], seq_length=64)
    alone = [packprep.open_dataset(tmp_path / name / "out") for name in ("a", "b")]
    mixture = packprep.open_dataset(
        [tmp_path / "a" / "out", tmp_path / "b" / "out"], shares=[0.5, 0.5]
    )
    rows = [0, len(alone[0]), 1]
    found = mixture.batch(rows, columns=["loss_weights", "loss_weight_sum"])
    for i, (dataset, row) in enumerate(((alone[0], 0), (alone[1], 0), (alone[0], 1))):
        own = dataset.batch([row], columns=["loss_weights", "loss_weight_sum"])
        assert all(np.array_equal(found[name][i], own[name][0]) for name in own)


@pytest.mark.parametrize("template", [chats.CHATML, chats.GENERATION])
def test_weights_of_messages_multiply_with_their_conversation_s(tmp_path, template):
    """An assistant's letters say its weight: A, B, C, … of WEIGHTS."""
    chance, lines = random.Random(8), []
    for i in range(60):
        messages = []
        for _ in range(chance.randint(1, 4)):
            which = chance.randrange(len(WEIGHTS))
            spoken = {
                "role": "assistant",
                "content": chr(65 + which) * chance.randint(2, 9),
                "weight": WEIGHTS[which],
            }
            messages += [
                {"role": "user", "content": "z" * chance.randint(1, 9), "weight": 3},
                spoken,
            ]
        lines.append(
            {"messages": messages, **({"weight": chance.choice([0.5, 0.3, 2])} if i % 2 else {})}
        )
    (tmp_path / "chat.jinja").write_text(template)
    documents = {"chat_template": "chat.jinja", "append_eos": False, "max_bad_fraction": 1.0}
    tasks = [TASKS["causal"], TASKS["masked"], TASKS["sentinel"]]
    build(tmp_path, lines, tasks, seq_length=128, documents=documents)
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] > 40
    dataset = packprep.open_dataset(tmp_path / "out")
    offsets = np.cumsum([0, *(len(json.dumps(line)) + 1 for line in lines)]).tolist()
    seen = set()
    for row in map(dataset.row, range(len(dataset))):
        columns = row.segments
        for k, doc in enumerate(columns["doc"].tolist()):
            of_document = lines[offsets.index(doc)].get("weight", 1)
            for slot in (
                np.flatnonzero(row.loss_mask[columns["begin"][k] : columns["end"][k]])
                + columns["begin"][k]
            ):
                letter = int(row.labels[slot]) - 65
                if 0 <= letter < len(WEIGHTS):
                    own = np.float32(WEIGHTS[letter] * of_document)
                    assert row.loss_weights[slot] == columns["loss_weight"][k] * own > 0
                    seen.add(float(own))
                assert int(row.labels[slot]) != ord("z")
    assert len(seen) > 12


EVERY_TASK = [
    *(
        {"objective": name}
        for name in ("causal", "prefix_lm", "fill_in_the_middle", "masked_diffusion")
    ),
    {"objective": "span_corruption", "random_roll": True},
    *({"objective": name} for name in ("uniform_diffusion", "block_diffusion")),
    {"name": "random_length", "objective": "masked_diffusion", "random_length": 0.3},
]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "store", "tokens.parquet", "tokens.arrow"])
def test_a_document_s_weight_holds_for_every_task_that_it_may_draw_without_it(tmp_path, form):
    chance = random.Random(7)
    lines = [
        {"text": text, "weight": chance.choice([0.25, 1, 3, None])}
        for text in made.texts(120, 7, 90)
    ]
    positions, at = {}, 0
    for i, line in enumerate(lines):
        positions[i if form not in ("jsonl", "store") else at] = np.float32(
            1 if line["weight"] is None else line["weight"]
        )
        at += len(json.dumps(line)) + 1
    datasets = []
    for key in ("weight", "unread"):
        folder = tmp_path / key
        of_key = [{"text": line["text"], key: line["weight"]} for line in lines]
        name = {"jsonl": "a.jsonl", "store": "a.jsonl"}.get(form, f"a.{form}")
        rows = pa.Table.from_pylist(of_key)
        if form.startswith("tokens"):
            rows = rows.append_column(
                "input_ids",
                pa.array([list(line["text"].encode()) for line in lines], pa.list_(pa.int32())),
            )
        folder.mkdir()
        if name.endswith("jsonl"):
            made.write(folder / name, "".join(json.dumps(line) + "\n" for line in of_key).encode())
        elif name.endswith("parquet"):
            pq.write_table(rows, folder / name, row_group_size=50)
        else:
            with (
                pa.OSFile(str(folder / name), "wb") as sink,
                pa.ipc.new_file(sink, rows.schema) as writer,
            ):
                writer.write_table(rows, max_chunksize=50)
        source = {
            "name": "s",
            "paths": [name],
            "format": "tokens" if form.startswith("tokens") else "auto",
        }
        table = made.table([source], tasks=EVERY_TASK, seq_length=128, specials={"missing": "add"})
        if form == "store":
            made.build(table, folder, folder / "store", is_store=True)
            report = verify_dataset(folder / "store", -1, {}, (0, 1), 0, made.Silent())
            assert report["listed"] == []
            table["sources"] = [{"name": "s", "paths": ["store"], "format": "store"}]
        made.build(table, folder, folder / "out")
        if form == "store":
            report = verify_dataset(folder / "out", -1, {}, (0, 1), 0, made.Silent())
        else:
            report = verify_with_twin(folder / "out")
        assert report["listed"] == []
        datasets.append(packprep.open_dataset(folder / "out"))
    weighted, plain = datasets
    assert {int(task) for i in range(len(plain)) for task in plain.row(i).segments["task"]} >= set(
        range(8)
    )
    for epoch in (0, 2):
        names = ["tokens", "labels", "segment_ids", "loss_mask", "loss_weights"]
        every, epochs = range(len(plain)), {"epochs": [epoch] * len(plain)} if epoch else {}
        found, expected = (of.batch(every, columns=names, **epochs) for of in (weighted, plain))
        for i in every:
            segments = plain.row(i).segments
            for begin, end, position in zip(
                *(segments[name] for name in ("begin", "end", "doc")), strict=True
            ):
                expected["loss_weights"][i, int(begin) : int(end)] *= positions[int(position)]
        for name in names:
            assert np.array_equal(found[name], expected[name]), (epoch, name)


def test_a_document_of_weight_0_is_dropped_as_untrained(tmp_path):
    lines = [
        {"text": "left out", "weight": 0},
        {"text": "trained", "weight": 1.0},
        {"text": "also"},
    ]
    outcome = build(tmp_path, lines, [TASKS["causal"]], seq_length=64)
    assert outcome.manifest["ledger"]["sources"]["source0"]["documents"]["rejected"] == {
        "untrained": 1
    }
    assert "trained_ranges" not in packprep.open_dataset(tmp_path / "out").row(0)._shard.layout


def test_weights_alone_may_be_packed_by_concat(tmp_path):
    lines = [{"text": "abcdefgh" * 9, "weight": 1 + i % 2} for i in range(30)]
    build(tmp_path, lines, [TASKS["causal"]], seq_length=64, packing={"algorithm": "concat"})
    assert verify_with_twin(tmp_path / "out")["listed"] == []
    dataset = packprep.open_dataset(tmp_path / "out")
    found = dataset.batch(range(len(dataset)), columns=["loss_weights"])["loss_weights"]
    assert set(np.unique(found)) == {0, 1, 2}


@pytest.mark.parametrize("weight", ["3 kg", -1, True, [1], float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_rejected_with_the_key_and_a_way_out(tmp_path, weight):
    lines = [{"text": "heavy", "weight": weight}, {"text": "light"}]
    made.write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    table = made.table("a.jsonl", tasks=[TASKS["causal"]], seq_length=64)
    made.build({**table, "documents": {"max_bad_fraction": 1.0}}, tmp_path, tmp_path / "out")
    (path,) = (tmp_path / "out" / "rejects").rglob("*.jsonl")
    reject = json.loads(path.read_text())
    assert (
        reject["reason"] == "bad_weight" and 'documents.loss_spans = "ignore"' in reject["detail"]
    )
    assert verify_with_twin(tmp_path / "out")["listed"] == []
    made.build({**table, "documents": {"loss_spans": "ignore"}}, tmp_path, tmp_path / "all")


def test_a_row_of_tokens_of_weight_0_or_of_none_is_left_out_by_name(tmp_path):
    weights = [0, 0.5, None, float("nan"), -1, float("inf")]
    ids = [[10 + i] * 4 for i in range(len(weights))]
    pq.write_table(
        pa.table({"tokens": ids, "weight": pa.array(weights, pa.float64())}), tmp_path / "a.parquet"
    )
    table = made.table(
        [{"name": "s", "paths": ["a.parquet"], "format": "tokens"}],
        tasks=[TASKS["causal"]],
        seq_length=64,
    )
    table["documents"] = {"max_bad_fraction": 1.0}
    outcome = made.build(table, tmp_path, tmp_path / "out")
    rejected = outcome.manifest["ledger"]["sources"]["s"]["documents"]["rejected"]
    assert rejected == {"untrained": 1, "bad_weight": 2}
    assert verify_with_twin(tmp_path / "out")["listed"] == []
    (row,) = packprep.open_dataset(tmp_path / "out").batch([0], columns=["tokens", "loss_weights"])[
        "loss_weights"
    ]
    assert sorted(row[row > 0].tolist()) == [0.5] * 4 + [1] * 8
    table["documents"] = {"loss_spans": "ignore"}
    outcome = made.build(table, tmp_path, tmp_path / "all")
    assert outcome.manifest["ledger"]["sources"]["s"]["documents"]["rejected"] == {}
    assert verify_with_twin(tmp_path / "all")["listed"] == []
