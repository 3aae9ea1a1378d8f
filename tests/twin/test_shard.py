"""The twin computes whole shards from plan, tokenizer and sources, and gets what was built,
whatever the recipe says."""

import gzip
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from packprep.errors import PlanError
from packprep.sources.formats import MAX_DOCUMENT_BYTES
from tests import made
from tests.twin import cutting
from tests.twin.check import verify_with_twin
from tests.twin.shard import check
from tests.twin.shards_made import ALL, CAUSAL, EVERY_KIND, TEMPLATE, built
from tests.verification.damage import copied, resigned


def report(directory, replay=ALL):
    return verify_with_twin(directory, replay)


def holds(directory, replay=ALL):
    found = report(directory, replay)
    assert [fault["message"] for fault in found["listed"]] == [] and found["faults"] == 0
    assert found["twin"] == found["replayed"] > 0
    return found


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory):
    return built(tmp_path_factory.mktemp("every_kind"), documents={"prepend_bos": True})


def test_every_kind_of_task_and_file(every_kind):
    found = holds(every_kind)
    assert found["twin"] == found["segments"] > 200


@pytest.mark.long
def test_so_many_segments_as_asked_for(every_kind):
    assert holds(every_kind, 60)["twin"] == 60


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"packing": {"algorithm": "first_fit", "pad_seq_to_mult": 8}},
        {"packing": {"algorithm": "next_fit", "max_segments_per_row": 3}},
        {"output": {"columns": "compact", "shard_text_bytes": 15_000, "token_dtype": "int32"}},
        {"documents": {"long": "truncate", "append_eos": False, "min_tokens": 40}},
        {"documents": {"long": "drop", "max_tokens": 90, "special_text": "reject"}},
        {
            "packing": {"algorithm": "concat", "max_segments_per_row": 5},
            "documents": {"prepend_bos": True},
            "tasks": [{"preset": "llada"}, CAUSAL, {"preset": "prefix_lm"}],
        },
        {
            "packing": {"pad_seq_to_mult": 8},
            "documents": {"append_eos": "segment", "prepend_bos": True},
        },
    ],
    ids=["first_fit", "next_fit", "compact", "truncate", "drop", "concat", "segment"],
)
def test_every_rule_of_cutting_and_packing(tmp_path, changes):
    out = built(tmp_path, **changes)
    holds(out)
    holds(out, 25)


@pytest.mark.long
def test_parts_of_sources(tmp_path):
    """Fractions of uses, samples, own tasks, damaged lines, batches, members of gzip, and steps
    smaller than the file."""
    chance = random.Random(5)
    texts = [f"{chance.random()} ünïcödé <pad>" * chance.randint(0, 8) for _ in range(400)]
    lines = [json.dumps({"body": text}).encode() for text in texts]
    lines[3], lines[9], lines[20], lines[21] = (
        b"{",
        b'{"body": "\xff"}',
        b" \r",
        b'{"body": null, "body": "last"}',
    )
    lines[30], lines[31] = (
        b'{"body": "\\ud800"}',
        b'{"body": "deep", "x": ' + b"[" * 300 + b"]" * 300 + b"}",
    )
    data = b"\xef\xbb\xbf" + b"\n".join(lines)
    half = len(data) // 2
    made.write(
        tmp_path / "z/a.jsonl.gz",
        gzip.compress(data[:half]) + b"\0" * 9 + gzip.compress(data[half:]),
    )
    made.write(tmp_path / "z/b.jsonl", data)
    made.write_arrow(tmp_path / "c.arrow", texts, 130)
    table = pa.table({"text": pa.array([None, *texts[:99], "x"]).dictionary_encode()})
    pa.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=40)
    sources = [
        {
            "name": "z",
            "paths": ["z/*"],
            "text_key": "body",
            "repeat": 2.25,
            "sample": [0.1, 0.8],
            "tasks": ["s", "blocks"],
        },
        {"name": "c", "paths": ["c.arrow"], "repeat": 0.5},
        {"name": "d", "paths": ["d.parquet"]},
    ]
    recipe = made.table(
        sources,
        tasks=EVERY_KIND,
        seed=99,
        documents={"max_bad_fraction": 1.0},
        output={"shard_text_bytes": 20_000},
    )
    made.build(recipe, tmp_path, tmp_path / "out")
    holds(tmp_path / "out")
    holds(tmp_path / "out", 40)


@pytest.mark.long
def test_what_is_larger_than_a_document_may_be_is_left_out_in_every_kind_of_file(tmp_path):
    text = "a" * (MAX_DOCUMENT_BYTES + 1)
    lines = b'{"text": "' + text.encode() + b'"}\n{"text": "small"}'
    made.write(tmp_path / "a.txt", text.encode())
    made.write(tmp_path / "b.jsonl", lines)
    made.write(tmp_path / "c.jsonl.gz", gzip.compress(lines))
    pa.parquet.write_table(pa.table({"text": [text, "small"]}), tmp_path / "d.parquet")
    sources = [{"name": "s", "paths": ["*.*"]}]
    recipe = made.table(
        sources, tasks=[{"objective": "causal"}], documents={"max_bad_fraction": 1.0}
    )
    outcome = made.build(recipe, tmp_path, tmp_path / "out")
    assert outcome.manifest["ledger"]["sources"]["s"]["documents"]["rejected"] == {"too_large": 4}
    holds(tmp_path / "out")


def test_documents_that_say_what_is_trained(tmp_path):
    chance = random.Random(8)

    def words(count):
        return " ".join(chance.choice(["two", "and", "wörter", "so"]) for _ in range(count))

    lines = []
    for i in range(150):
        text = words(chance.randint(1, 120))
        bounds = sorted(chance.sample(range(len(text) + 1), 4 if len(text) > 4 else 2))
        record = {"text": text}
        if i % 3 == 0:
            record["loss_spans"] = spans = [bounds[k : k + 2] for k in range(0, len(bounds), 2)]
            if i % 2:  # in no order, overlapping, touching, empty, beyond the end
                begin, end = spans[0]
                more = [
                    [end, end],
                    [begin, max(begin, end - 1), 1],
                    [len(text) - 1, 10**30],
                    [begin, begin + 1],
                ]
                record["loss_spans"] = [*more, *reversed(spans)]
        elif i % 3 == 1:
            turns = [("system", 6), ("user", 30), ("assistant", 40), ("user", 9), ("assistant", 50)]
            own = turns[chance.randint(0, 1) : chance.choice([3, 5])]
            record = {
                "messages": [{"role": r, "content": words(chance.randint(1, n))} for r, n in own]
            }
        lines.append(json.dumps(record))
    lines[3] = '{"text": "no such place", "loss_spans": [[99, 5]]}'
    lines[6] = '{"text": "weighed", "loss_spans": [[0, 3, 0.5]]}'
    lines[4] = '{"text": "both", "messages": [{"role": "assistant", "content": "x"}]}'
    lines += ['{"text": "so"}', '{"text": "so", "loss_spans": [[1, 2]]}']  # too_short's
    made.write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    made.write(tmp_path / "t.jinja", TEMPLATE.encode())
    tasks = [
        CAUSAL,
        {"name": "s", "objective": "prefix_lm", "sentinel": True},
        {"preset": "bd3"},
        {"preset": "fim"},
        {"name": "bert", "objective": "masked_diffusion", "noise_eos": False},
        {"preset": "duo"},
    ]
    documents = {"chat_template": "t.jinja", "prepend_bos": True, "max_bad_fraction": 1.0}
    recipe = made.table(
        "a.jsonl",
        seq_length=128,
        tasks=tasks,
        documents=documents,
        output={"shard_text_bytes": 9000},
    )
    made.build(recipe, tmp_path, tmp_path / "out")
    holds(tmp_path / "out")
    holds(tmp_path / "out", 50)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tokens", "labels", "loss_mask", "segment_noise", "block_noise"])
def test_what_differs_is_named(every_kind, tmp_path, name):
    directory = copied(every_kind, tmp_path)
    with resigned(directory) as arrays:
        if arrays[name].ndim == 2:
            arrays[name][1, 3] = 1 if arrays[name][1, 3] != 1 else 0
        else:  # another level of a noised segment or block
            arrays[name][np.flatnonzero(arrays[name])[0]] /= 2
    found = [
        fault
        for fault in report(directory)["listed"]
        if fault["message"].startswith(f"twin: {name}")
    ]
    assert [fault["promise"] for fault in found] == ["P17"]
    if name in ("tokens", "labels", "loss_mask"):
        assert (found[0]["row"], found[0]["slot"]) == (1, 3) and "the twin gives" in found[0][
            "message"
        ]


@pytest.mark.long
def test_an_objective_without_a_twin_is_refused_by_name():
    task = {"name": "mine", "objective": "reversed"}
    with pytest.raises(PlanError, match=r"task 'mine': objective 'reversed' has no twin"):
        check({"tasks": [task], "recipe": {"sources": []}})


def every_row_looked_at(lengths, capacity, algorithm, max_segments):
    """Packing as the design says it: each of all rows is looked at for each document."""
    order = range(len(lengths))
    if algorithm == "best_fit":
        order = sorted(order, key=lambda i: (-lengths[i], i))
    row_of, fill, count, reached = {}, [], [], []
    for time, i in enumerate(order):
        able = [
            r
            for r in range(len(fill))
            if fill[r] + lengths[i] <= capacity and count[r] < max_segments
        ]
        if not able:
            able = [len(fill)]
            fill, count, reached = [*fill, 0], [*count, 0], [*reached, 0]
        row = max(able, key=lambda r: (fill[r], reached[r])) if algorithm == "best_fit" else able[0]
        row_of[i] = row, fill[row]
        fill[row], count[row], reached[row] = fill[row] + lengths[i], count[row] + 1, time
    return [row_of[i] for i in range(len(lengths))]


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["best_fit", "first_fit"])
@pytest.mark.parametrize("most", [40, 7, 64])
@pytest.mark.parametrize("max_segments", [0, 2, 5])
def test_packing_gives_what_looking_at_every_row_gives(algorithm, most, max_segments):
    lengths = np.random.default_rng(most).integers(1, most + 1, 900).tolist()
    found = cutting.pack(lengths, 64, algorithm, max_segments)
    assert list(zip(*found, strict=True)) == every_row_looked_at(
        lengths, 64, algorithm, max_segments or 65535
    )
