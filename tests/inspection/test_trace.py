"""The documents of steps, compared with runs that read their documents' names from the tokens."""

import json
import random
import re

import numpy as np
import pytest

from packprep.dataset.loader import open_dataset
from packprep.dataset.mixture import mixture_file
from packprep.errors import ArgumentError, Exhausted, StateError
from packprep.inspection.trace import TrainingRun, describe_reads
from tests import command_line, made
from tests.inspection.conftest import built

SHARES = [(0, [0.8, 0.2]), (300, [0.3, 0.7])]
SOME_KINDS = ["balance", "lengths"] + [
    pytest.param(kind, marks=pytest.mark.long) for kind in ("one", "changing shares")
]
LENGTHS = {256: 2, 128: 1}


def write_named_documents(folder, letter, count, seed):
    """Write documents that repeat their own name, and return name → (file, position)."""
    drawn, places = random.Random(seed), {}
    with open(folder / f"{letter}.jsonl", "wb") as file:
        for i in range(count):
            name = f"{letter}{i:04d}"
            places[name] = (f"{letter}.jsonl", file.tell())
            line = json.dumps({"text": f"{name} " * drawn.randint(2, 18)})
            file.write(f"{line}\n".encode())
    return places


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A folder with three causal datasets of documents that repeat their names, and the places."""
    folder, places = tmp_path_factory.mktemp("named"), {}
    for k, (letter, count, length) in enumerate(
        [("a", 300, 256), ("b", 200, 256), ("c", 150, 128)]
    ):
        places |= write_named_documents(folder, letter, count, k)
        table = {"paths": [f"{letter}.jsonl"], "name": letter}
        causal = [{"preset": "causal"}]
        built(folder, f"packed_{letter}", sources=[table], tasks=causal, seq_length=length)
    return folder, places


def dataset_of(folder, kind):
    paths = [folder / f"packed_{letter}" for letter in "abc"]
    if kind == "mixture":
        return open_dataset(paths[:2], shares=[0.7, 0.3])
    if kind == "changing shares":
        return open_dataset(paths[:2], shares=SHARES, interpolate="linear")
    if kind == "lengths":
        return open_dataset([paths[0], paths[2]], shares=[1, 1])
    return open_dataset(paths[0])


def options_of(kind, world_size):
    size = {length: 12 // world_size * k for length, k in LENGTHS.items()}
    return {
        "batch_size": size if kind == "lengths" else 12 // world_size,
        "seed": 5,
        **({"balance": ("attention", 12), "window": 48} if kind == "balance" else {}),
    }


def names_read(batch):
    """Return the documents' names in a batch, one list per row, from the tokens alone."""
    rows = []
    for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
        is_text = tokens < 256  # Every document ends with an eos, whose id is higher.
        texts = [
            tokens[(segments == k) & is_text].astype(np.uint8).tobytes()
            for k in range(1, segments.max() + 1)
        ]
        rows.append([re.search(rb"[abc]\d{4}", text)[0].decode() for text in texts])
    return rows


def names_traced(documents, places):
    by_place = {place: name for name, place in places.items()}
    rows = {}
    for one in documents:
        name = by_place[one["file"], one["document"]]
        rows.setdefault(one["position"], []).append(name)
    return [rows[position] for position in sorted(rows)]


@pytest.mark.parametrize("kind", ["one", "balance", "mixture", "changing shares", "lengths"])
@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=pytest.mark.campaign)])
def test_the_documents_of_steps_are_those_that_a_run_reads(named, kind, steps):
    folder, places = named
    ds, looked_up = dataset_of(folder, kind), dataset_of(folder, kind)
    state = None
    for world_size in (1, 4, 3):  # Each run resumes the run before.
        options = options_of(kind, world_size)
        for rank in range(world_size):
            run, trace = (
                one.batches(**options, rank=rank, world_size=world_size) for one in (ds, looked_up)
            )
            if state is not None:
                run.load_state_dict(state)
                trace.load_state_dict(state)
            for step in range(steps // 3 if world_size > 1 else steps):
                assert names_traced(trace.documents(step), places) == names_read(next(run))
        state = json.loads(json.dumps(run.state_dict()))


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_skipped_steps_leave_the_order_of_all_others(named, kind):
    ds = dataset_of(named[0], kind)
    options, skip = options_of(kind, 1), [(3, 4), (8, 8), (4, 5)]
    plain, skipping = ds.batches(**options), ds.batches(**options, skip=skip)
    kept = [next(plain)["tokens"] for _ in range(20)]
    kept = [kept[step] for step in range(20) if step not in (3, 4, 5, 8)]
    assert all(np.array_equal(next(skipping)["tokens"], one) for one in kept[:6])
    state = json.loads(json.dumps(skipping.state_dict()))
    resumed = [ds.batches(**options_of(kind, 2), rank=r, world_size=2) for r in (0, 1)]
    for rank in resumed:
        rank.load_state_dict(state)
    for one in kept[6:]:
        assert np.array_equal(np.concatenate([next(rank)["tokens"] for rank in resumed]), one)
    documents = resumed[0].documents(-1)
    assert documents and resumed[0].state_dict()["rows"] == (16 if kind == "lengths" else 16 * 12)
    if kind == "changing shares":
        read = [0, 0]
        for step in range(16):
            for one in ds.batches(**options, skip=skip).documents(step):
                read[one["dataset"]] += one["segment"] == 1
        assert ds.delivered(resumed[0].state_dict()) == read


def test_a_skip_after_a_spike_goes_with_an_earlier_state(named):
    ds = dataset_of(named[0], "one")
    run = ds.batches(4, epochs=2)
    for _ in range(10):
        next(run)
    again = ds.batches(4, epochs=2, skip=[(12, 14)])
    again.load_state_dict(run.state_dict())
    rows = [one["tokens"].tobytes() for one in again]
    whole = [one["tokens"].tobytes() for one in ds.batches(4, epochs=2)]
    assert rows == whole[10:12] + whole[15:]
    with pytest.raises(StateError, match=r"samples 16 … 23, but .*\nhint: leave skip out"):
        ds.batches(4, epochs=2, skip=[(4, 5)]).load_state_dict(run.state_dict())
    other = ds.batches(4, epochs=2)
    for one in (ds.batches(4, skip=[(15, 16)]), run):  # The second state has no skip.
        other.load_state_dict(one.state_dict())
    assert "skip" not in other.state_dict()
    assert [one["tokens"].tobytes() for one in other] == whole[10:]
    with pytest.raises(ArgumentError, match=r"the last step of skip\[0\] is 2"):
        ds.batches(4, skip=[(3, 2)])
    with pytest.raises(ArgumentError, match="skip is .* and should be a list"):
        ds.batches(4, skip=zip([1], [2], strict=True))
    with pytest.raises(ArgumentError, match=r"step 99 is not part of the run; its steps are 0 … 4"):
        ds.batches(4, samples=20).documents(99)
    for skip in ([[5, 3]], [[0, 4], [4, 8]], "0-4", [[0, 4.0]]):
        with pytest.raises(StateError, match="the state's skip is"):
            ds.batches(4).load_state_dict({**ds.batches(4).state_dict(), "skip": skip})


def test_a_run_ends_at_its_max_epochs_whatever_it_skips(named):
    paths = [named[0] / f"packed_{letter}" for letter in "ab"]
    limited = open_dataset(paths, shares=[0.7, 0.3], max_epochs=[1, None])
    last, rows = limited.exhausted_at(), len(limited.datasets[0])
    skipping = limited.batches(4, skip=[(1, 3)]).state_dict()
    with pytest.raises(Exhausted, match=f"before sample {last - 12}"):
        limited.batches(4, samples=last).load_state_dict(skipping)
    endless = limited.batches(4)
    with pytest.raises(ArgumentError, match=rf"its steps are 0 … {last // 4 - 1}$"):
        endless.documents(last // 4)
    for run in (endless, open_dataset(paths[0]).batches(4, epochs=1)):
        assert all(len(run.reads_of_row(row, epochs=3)) <= 1 for row in range(rows))


def test_balanced_windows_cut_at_max_epochs_count_skipped_samples(named):
    paths = [named[0] / f"packed_{letter}" for letter in "ab"]
    one, two = (open_dataset(paths, shares=[0.7, 0.3], max_epochs=[most, None]) for most in (1, 2))
    options = {"balance": ("attention", 4), "window": 48}
    run, last = two.batches(4, skip=[(0, 0), (5, 9)], **options), one.exhausted_at()
    for _ in range(30):
        next(run)
        position = run.state_dict()["rows"] + 24
        inside = last // 48 == position // 48 and position % 48
        if inside:  # In this window, the mixtures differ in their order.
            with pytest.raises(StateError, match="balance"):
                one.batches(4, **options).load_state_dict(run.state_dict())


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_the_steps_of_a_row_are_those_whose_documents_contain_it(named, kind):
    ds = dataset_of(named[0], kind)
    run = ds.batches(**options_of(kind, 1), skip=[(2, 3)])
    for row in (0, 7, len(ds) - 1):
        reads = run.reads_of_row(row, epochs=2)
        assert reads == run.reads_of_row(row - len(ds), epochs=2)
        assert [read["epoch"] for read in reads] == [0, 1]
        for read in reads:
            if read["step"] is not None:
                found = [one for one in run.documents(read["step"]) if one["row"] == row]
                assert {(one["position"], one["sample"]) for one in found} == {
                    (read["position"], read["sample"])
                }


def test_trace_shows_steps_documents_and_losses_as_a_user_asks(named, tmp_path):
    folder, places = named
    options = ("--batch-size", 3, "--world-size", 4, "--seed", 5)
    packed, ds = folder / "packed_a", dataset_of(folder, "one")
    run = ds.batches(3, seed=5, rank=2, world_size=4)
    shown = command_line.inside("trace", packed, "--step", "6-7", "--rank", 2, *options, "--json")
    expected = [
        {"step": step, "rank": 2, **document} for step in (6, 7) for document in run.documents(step)
    ]
    assert shown.json["documents"] == expected
    for _ in range(5):
        next(run)
    state = made.write(tmp_path / "run.json", json.dumps(run.state_dict()).encode())
    resumed = ("--state", state, "--first-step", 5, "--batch-size", 6, "--world-size", 2)
    later = command_line.inside("trace", packed, "--step", 6, *resumed, "--json").json
    both = [one for one in later["documents"] if one["rank"] == 1 and one["position"] < 3]
    assert {(one["file"], one["document"]) for one in both} == {
        (one["file"], one["document"]) for one in expected if one["step"] == 6
    }
    file, position = places["a0017"]
    place = f"{file}:{position}"
    read = command_line.inside("trace", packed, "--document", place, *options, "--json").json
    (one,) = read["reads"]
    step = command_line.inside("trace", packed, "--step", one["step"], *options)
    assert step.status == 0 and f"{position:,}" in step.out
    losses = [
        {"step": k, "rank": r, "loss": 1 + (k == 3 and r == 1)} for k in range(5) for r in (0, 1)
    ]
    losses.append({"sample": one["sample"], "loss": float("nan"), "lr": 0.1})
    lines = "".join(json.dumps(line) + "\n" for line in losses)
    logged, worst = made.write(tmp_path / "losses.jsonl", lines.encode()), tmp_path / "worst.jsonl"
    found = command_line.inside(
        "trace", packed, "--losses", logged, *options, "--out", worst, "--limit", 9, "--json"
    ).json
    assert found["losses"] == 11 and found["documents"][0]["loss"] is None
    spiked = {(d["file"], d["document"]) for d in ds.batches(3, 5, 1, 4).documents(3)}
    assert {(d["file"], d["document"]) for d in found["documents"] if d["loss"] == 2} <= spiked
    removed = command_line.inside("remove", packed, "--documents", worst, "--out", tmp_path / "r")
    assert removed.status == 0 and "removed 9 documents" in removed.out
    again = command_line.inside(
        "trace", tmp_path / "r", "--losses", logged, *options, "--json"
    ).json
    assert again["found"] == found["found"] - 9


def test_trace_counts_what_it_does_not_list(named, tmp_path):
    folder, places = named
    options = ("--batch-size", 3, "--world-size", 4)
    for name in "abc":
        made.write(tmp_path / f"{name}.jsonl", b'{"text": "one and the same"}\n')
    causal = [{"preset": "causal"}]
    tables = [{"paths": [f"{name}.jsonl"], "name": name} for name in "ab"]
    built(tmp_path, "two", sources=tables, tasks=causal)
    file = mixture_file(
        tmp_path / "mixture.json", [folder / "packed_a", tmp_path / "two"], shares=[1, 1]
    )
    mixed = made.write(tmp_path / "mixture.json", file)
    for arguments, words in [
        (["--document", "b.jsonl:0"], "two has several sources: a, b"),
        (["--document", "c.jsonl:0", "--source", "b"], "source 'b' has no file 'c.jsonl'"),
        (["--losses", made.write(tmp_path / "none.jsonl", b"\n")], "the file has no lines"),
        (["--losses", made.write(tmp_path / "row.jsonl", b'{"row": -1, "loss": 1}')], "row is -1"),
        (["--step", 5, "--first-step", 9], "--first-step 9 is step -4 of the loader: step -4"),
    ]:
        said = command_line.inside("trace", mixed, *arguments, *options)
        assert said.status == 2 and words in said.err, said.err
    shown = command_line.inside("trace", folder / "packed_a", "--document", "a.jsonl:1", *options)
    assert "read 0 times" in shown.out and "absent" in shown.out
    described = describe_reads(open_dataset(tmp_path / "two"), TrainingRun(1, 1, {}), "b", "0", 1)
    assert len(described["reads"]) == 1 and described["more_files"] == 0
    line = made.write(tmp_path / "line.jsonl", b'\xef\xbb\xbf{"sample": 3, "loss": 1}\n')
    worst = tmp_path / "worst.jsonl"
    made.write(tmp_path / "worst.0.jsonl", b"")
    made.write(tmp_path / "worst.1.jsonl", b"")
    said = command_line.inside("trace", mixed, "--losses", line, *options, "--out", worst)
    assert said.status == 2 and "exists already" in said.err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--step", "3"], "--batch-size is missing"),
        ([], "no view: trace shows one view"),
        (["--step", "3", "--document", "4"], "--step and --document: trace shows one view"),
        (
            ["--step", "5-3", "--batch-size", "2", "--world-size", "1"],
            "--step 5-3: expected a step",
        ),
        (["--document", "0", "--rank", "1"], "--rank needs --step"),
        (
            ["--step", "1", "--rank", "2", "--batch-size", "2", "--world-size", "2"],
            "--rank 2 is not below --world-size 2",
        ),
        (
            [
                "--step",
                "1",
                "--state",
                "x",
                "--seed",
                "2",
                "--batch-size",
                "2",
                "--world-size",
                "2",
            ],
            "--seed and --state both describe the order",
        ),
        (["--step", "1", "--batch-size", "a=3", "--world-size", "2"], "expected a number of rows"),
    ],
)
def test_trace_refuses_arguments_that_do_not_fit(named, arguments, words):
    said = command_line.inside("trace", named[0] / "packed_a", *arguments)
    assert said.status == 2 and words in said.err and "hint:" in said.err


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"step": 1}', "expected an object with loss"),
        ('{"loss": 1}', "no step, sample or row"),
        ('{"loss": "1", "step": 1}', "loss is '1'"),
        ('{"loss": 1, "step": 1.5}', "step is 1.5"),
        ('{"loss": 1, "step": 1, "position": 0}', "it needs rank"),
        ('{"loss": 1, "step": 1, "rank": 7}', "rank 7 is not below"),
        ('{"loss": 1, "row": 10000000}', "row 10000000 of a dataset"),
    ],
)
def test_a_line_of_losses_that_says_too_little_is_refused(named, tmp_path, line, words):
    path = made.write(tmp_path / "losses.jsonl", f"{line}\n".encode())
    options = ("--batch-size", 2, "--world-size", 2)
    said = command_line.inside("trace", named[0] / "packed_a", "--losses", path, *options)
    assert (
        said.status == 2 and f"line 1: {words}" in said.err.replace("\n", " ") or words in said.err
    )
