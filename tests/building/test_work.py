import numpy as np
import pytest

from packprep.buffers import Buffers
from packprep.building.inputs import look_up
from packprep.building.run import open_job
from packprep.building.work import begin_shard, make_shard, rehearse
from packprep.clock import Clock
from packprep.corpus.readers import Decoders
from packprep.dataset.shard import encode
from packprep.kernel.compiling import Kernel
from packprep.recipe import read_recipe
from tests import made


def bytes_of(made_shard):
    return b"".join(encode(made_shard.arrays))


def test_a_shard_is_a_function_of_plan_and_number_alone(built):
    job = open_job(built.out)
    alone = [bytes_of(make_shard(job, b)) for b in range(job.shards)]
    again = open_job(built.out)
    decoders, buffers = Decoders(), Buffers()
    for size in (0, 1 << 16):  # whatever lies in the memory that it goes on with
        for name in ("ids", "tokens", "labels", "segment_ids", "loss_mask", "may"):
            buffers.array(name, np.uint8, size).fill(0xA5)
    backwards = [bytes_of(make_shard(again, b, decoders, buffers=buffers)) for b in reversed(range(job.shards))]
    assert backwards[::-1] == alone
    assert alone == list(made.contents(built.out, "shards").values())


@pytest.mark.parametrize("planned", [0, 1 << 61])
def test_how_many_tokens_the_plan_expects_changes_nothing(built, planned):
    job = open_job(built.out)
    expected = bytes_of(make_shard(job, 0))
    job.plan["sources"] = [{**source, "tokens": planned} for source in job.plan["sources"]]
    assert bytes_of(make_shard(job, 0)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"packing": {"algorithm": "concat"}, "tasks": [{"preset": "prefix_lm"}]},
        {"packing": {"pad_seq_to_mult": 8}, "output": {"shard_text_bytes": 30_000, "columns": "compact"}},
        {"tasks": [{"name": "b", "objective": "block_diffusion", "weight": 1, "block_length": 8}]},
    ],
    ids=["ul2r", "concat", "compact", "block diffusion"],
)
def test_a_shard_stands_while_the_next_one_is_begun(built, tmp_path, changes):
    job = made.build({**built.table, **changes}, built.base, tmp_path / "out").job
    assert job.shards > 2
    buffers, decoders, clock = Buffers(), Decoders(), Clock()
    for b in range(job.shards):
        shard = make_shard(job, b, decoders, buffers=buffers)
        before = bytes_of(shard), shard.reading.text_digests, list(shard.reading.rejected.in_order())
        begin_shard(job, (b + 1) % job.shards, decoders, None, clock, buffers)
        assert before == (bytes_of(shard), shard.reading.text_digests, list(shard.reading.rejected.in_order()))


def test_a_shard_may_have_no_rows(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["x" * 3000, "y"])
    table = made.table("a.jsonl", output={"shard_text_bytes": 300})
    outcome = made.build(table, tmp_path, tmp_path / "out")
    rows = [entry["rows"] for entry in outcome.manifest["shards"]]
    assert len(rows) >= 9 and rows.count(0) >= 7 and sum(rows) >= 6
    nothing = make_shard(outcome.job, rows.index(0))
    assert nothing.arrays["tokens"].shape == (0, 512) and nothing.ledger["rows"] == 0


@pytest.mark.parametrize("algorithm", ["best_fit", "first_fit", "next_fit", "concat"])
@pytest.mark.parametrize("mult", [1, 8])
def test_every_algorithm_makes_shards_that_balance(built, tmp_path, algorithm, mult):
    if algorithm == "concat" and mult > 1:
        return
    packing = {"algorithm": algorithm, "pad_seq_to_mult": mult}
    tasks = [{"preset": "prefix_lm" if algorithm == "concat" else "ul2r"}]
    table = {**built.table, "packing": packing, "tasks": tasks, "output": {"shard_text_bytes": "1MiB"}}
    manifest = made.build(table, built.base, tmp_path / "out").manifest
    ledger, whole = manifest["ledger"], built.outcome.manifest["ledger"]
    for name in ("web", "books", "notes"):
        assert ledger["sources"][name]["tokens"] == whole["sources"][name]["tokens"]
    assert ("cu_seqlens_padded" in make_shard(open_job(tmp_path / "out"), 0).arrays) == (mult > 1)


def test_next_fit_keeps_document_order(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(300))
    table = made.table("a.jsonl", packing={"algorithm": "next_fit"}, output={})
    arrays = make_shard(made.build(table, tmp_path, tmp_path / "out").job, 0).arrays
    places = list(zip(arrays["segment_doc"].tolist(), arrays["segment_start"].tolist(), strict=True))
    assert places == sorted(places)


def test_max_segments_per_row_is_kept_and_loses_nothing(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(300, mean_bytes=60))
    table = made.table("a.jsonl", packing={"max_segments_per_row": 2}, output={})
    outcome = made.build(table, tmp_path, tmp_path / "out")
    arrays = make_shard(outcome.job, 0).arrays
    assert np.diff(arrays["row_offsets"]).max() == 2
    assert outcome.manifest["ledger"]["sources"]["source0"]["documents"]["used"] == 300


def test_the_last_row_s_padding_is_told_apart(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["x" * 100])
    for multiple, physical in ((1, 101), (8, 104)):
        table = made.table("a.jsonl", tasks=[{"preset": "causal"}], packing={"pad_seq_to_mult": multiple})
        ledger = made.build(table, tmp_path, tmp_path / f"out{multiple}").manifest["ledger"]
        assert ledger["row_padding"] == 512 - physical
        assert ledger["last_row_padding"] == 512 - 101 and ledger["last_rows"] == 1  # what is inside of it, too


def test_progress_is_told(built):
    told = []
    reading = make_shard(open_job(built.out), 0, progress=lambda *counts: told.append(counts)).reading
    assert np.sum(told, axis=0)[0] == sum(reading.read.values())


@pytest.fixture
def called(monkeypatch):
    """(kernel, types of its arguments) of those that are called to lay out and render."""
    import numba

    seen = set()
    call = Kernel.__call__

    def note(kernel, *arguments):
        if kernel.__module__.startswith(("packprep.building", "packprep.objectives", "packprep.dataset")):
            seen.add((kernel.__module__, kernel.__name__, tuple(map(numba.typeof, arguments))))
        return call(kernel, *arguments)

    monkeypatch.setattr(Kernel, "__call__", note)
    return seen


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"packing": {"pad_seq_to_mult": 8, "algorithm": "first_fit"}},
        {"packing": {"algorithm": "concat"}, "tasks": [{"preset": "causal"}]},
        *(
            {"tasks": [{"preset": preset}]}
            for preset in ("llada", "prefix_lm", "t5", "fim", "duo", "bd3", "mlm", "dllm")
        ),
    ],
    ids=str,
)
def test_a_rehearsal_calls_the_kernels_of_a_shard(tmp_path, called, changes):
    made.write_lines(tmp_path / "a.jsonl", made.texts(80, 5, 250))
    table = made.table("a.jsonl", **changes)
    made.build(table, tmp_path, tmp_path / "out")
    called.clear()
    rehearse(look_up(read_recipe(table, tmp_path), {}))
    rehearsed = set(called)
    called.clear()
    make_shard(open_job(tmp_path / "out"), 0)
    counting = {one for one in called if "ledger" in one[0]}
    assert called and called - counting <= rehearsed


def test_a_rehearsal_says_nothing_of_what_is_wrong(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["text"])
    table = made.table("a.jsonl", output={"token_dtype": "uint16"})
    inputs = look_up(read_recipe(table, tmp_path), {})
    object.__setattr__(inputs.vocabulary, "vocab_size", 1 << 17)
    rehearse(inputs)
