"""Rows drawn anew: the stored rows in epoch 0, the same law with chance of its own in every
other."""

import json
import math
import shutil
from functools import cache

import numpy as np
import pytest

from packprep import open_dataset
from packprep.building.plan import open_plan
from packprep.building.work import make_shard
from packprep.dataset import order
from packprep.dataset.epochs import noise, resampling
from packprep.dataset.rows import RowSegments
from packprep.errors import ArgumentError, DatasetError, StateError
from packprep.format.tokenizer_json import flags_of
from packprep.recipe import presets
from tests import made
from tests.dataset.synthetic import replace_in_manifest, slots_ahead

LAW3 = made.ROOT / "tests" / "golden" / "law3"
COLUMNS = ["tokens", "labels", "segment_ids", "position_ids", "loss_mask", "loss_weights"]
MASKED, UNIFORM = {"objective": "masked_diffusion"}, {"objective": "uniform_diffusion"}
BLOCKS, CAUSAL = {"objective": "block_diffusion"}, {"objective": "causal"}
NO_EOS = {"noise_eos": False}
EXACT = {**MASKED, "name": "exact", "exact_count": True, "noise_range": [0.15, 0.99]}

# name → (tasks, changes of the recipe, whether documents say what is trained)
KINDS = {
    "mix": (
        [{"preset": "llada"}, UNIFORM, BLOCKS, CAUSAL],
        {"documents": {"prepend_bos": True}},
        False,
    ),
    "supervised": ([MASKED, UNIFORM, BLOCKS, CAUSAL], {"documents": {"prepend_bos": True}}, True),
    "supervised_without_eos": (
        [{**MASKED, **NO_EOS}, {**BLOCKS, **NO_EOS}, {**EXACT, **NO_EOS}, CAUSAL],
        {"documents": {"prepend_bos": True}},
        True,
    ),
    "without_eos": ([{**task, **NO_EOS} for task in (MASKED, UNIFORM, BLOCKS)], {}, False),
    "mode_tokens": (
        [
            {**MASKED, "mode_token": "[NLU]"},
            {**BLOCKS, "mode_token": "[NLG]"},
            {**UNIFORM, "mode_token": "[S2S]"},
        ],
        {"documents": {"prepend_bos": True}},
        False,
    ),
    "padded": ([{"preset": "mdlm"}, BLOCKS, CAUSAL], {"packing": {"pad_seq_to_mult": 16}}, False),
    "mlm_int32": (
        [{"preset": "mlm"}],
        {"output": {"shard_text_bytes": 40_000, "token_dtype": "int32"}},
        False,
    ),
    "stratified": ([{"preset": "mdlm"}], {}, False),
    "exact": ([EXACT], {}, False),
    "corrupted": ([{**UNIFORM, "loss_on": "corrupted", "weighting": "view_scale"}], {}, False),
}
SPANS, ROLLED = (
    {"objective": "span_corruption"},
    {"objective": "span_corruption", "random_roll": True, "noise_density": 0.4},
)
LOWER = {
    "objective": "span_corruption",
    "noise_density": 0.5,
    "mean_span_length": 1.0,
    "too_many_spans": "lower",
}
MARKED = {"objective": "prefix_lm", "sentinel": True}
FIM = {"objective": "fill_in_the_middle", "mode_token": "[NLG]"}

KINDS_MOVED = {
    "t5": ([{"preset": "t5"}], {}, False),
    "ul2r": ([{"preset": "ul2r"}], {"documents": {"prepend_bos": True}}, False),
    "compact": (
        [{"preset": "ul2r"}, MARKED],
        {"output": {"columns": "compact", "shard_text_bytes": 40_000}},
        False,
    ),
    "rolled": ([ROLLED, {**LOWER, "name": "lower"}], {"documents": {"append_eos": False}}, False),
    "supervised_moved": (
        [SPANS, {"objective": "prefix_lm"}, MASKED],
        {"documents": {"prepend_bos": True}},
        True,
    ),
    "cuts": (
        [FIM, {**FIM, "name": "fim_always", "rate": 1.0}],
        {"documents": {"prepend_bos": True}},
        False,
    ),
    "all": (
        [{"preset": "ul2r"}, {**ROLLED, "name": "rolled"}, FIM, MASKED, BLOCKS, CAUSAL],
        {"packing": {"pad_seq_to_mult": 16}},
        False,
    ),
}


PRESETS = {
    name: ([{"preset": name}], {}, False)
    for name in presets()
    if name not in {**KINDS_MOVED, "causal": None}
}


LATE = ("all", "mix")
"""Kinds whose epochs are compared far behind the first, too: between them they have every
objective."""


def build(kind, base):
    tasks, changes, supervised = (KINDS | KINDS_MOVED | PRESETS)[kind]
    made.write_lines(base / "plain.jsonl", made.texts(80, mean_bytes=400))
    sources = [{"paths": ["plain.jsonl"]}]
    if supervised:
        with open(base / "chosen.jsonl", "w", encoding="utf-8") as file:
            for text in made.texts(80, seed=5):
                n = len(text)
                spans = [[n // 3, n // 2], [2 * n // 3, n]]
                file.write(json.dumps({"text": text, "loss_spans": spans}) + "\n")
        sources.append({"paths": ["chosen.jsonl"]})
    made.build(
        made.table(sources, tasks=tasks, **{"output": {"shard_text_bytes": 40_000}, **changes}),
        base,
        base / "out",
    )
    return base / "out"


@pytest.fixture(scope="session")
def datasets(tmp_path_factory):
    """name of a kind → the opened dataset, built at its first use."""
    return cache(lambda kind: open_dataset(build(kind, tmp_path_factory.mktemp(kind))))


def in_place_slots(dataset, index):
    """bool[T]: slots of a row's in-place segments; of block diffusion x_t alone."""
    row = dataset.row(index)
    slots = np.zeros(dataset.seq_length, bool)
    for i, t in enumerate(row.segments["task"]):
        task = dataset.tasks[t]
        if task["label_alignment"] == "same_slot":
            begin, end = row.segments["begin"][i], row.segments["end"][i]
            slots[begin : (begin + end) // 2 if task["attention"] == "block_diffusion" else end] = (
                True
            )
    return slots


@pytest.mark.parametrize("kind", KINDS)
def test_the_law_with_epoch_0_gives_the_stored_rows(datasets, kind):
    ds = datasets(kind)
    everything = np.arange(len(ds))
    stored = ds.batch(everything, columns=COLUMNS)
    tokens, loss_mask = np.empty_like(stored["tokens"]), np.empty_like(stored["loss_mask"])
    segments, epochs = RowSegments(ds.facts, ds._find(everything)), np.zeros(len(ds), np.int64)
    weights = resampling._draw_rows(
        ds._resampling, segments, epochs, tokens, loss_mask, True, False
    )
    assert np.array_equal(tokens, stored["tokens"]) and np.array_equal(
        loss_mask, stored["loss_mask"]
    )
    assert np.array_equal(weights * loss_mask, stored["loss_weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_changes_nothing_but_what_may_be_noised(datasets, kind):
    ds = datasets(kind)
    everything = np.arange(len(ds))
    stored = ds.batch(everything, columns=COLUMNS)
    anew = ds.batch(everything, columns=COLUMNS, epochs=[3] * len(ds))
    for name in ("labels", "segment_ids", "position_ids"):
        assert np.array_equal(anew[name], stored[name])
    changed_tokens = changed_loss = 0
    for i in everything:
        slots = in_place_slots(ds, i)
        row = ds.row(i)
        may = slots.copy()
        may[row.segments["begin"][row.segments["start"] == 0]] &= not ds.manifest["recipe"][
            "documents"
        ]["prepend_bos"]
        if "trained_ranges" in row._shard.arrays:
            first = row._shard.segment_range(row._row)[0]
            in_ranges = np.zeros(ds.seq_length, bool)
            offsets = row._shard.arrays["trained_offsets"]
            for g, begin in enumerate(row.segments["begin"]):
                for a, b in row._shard.arrays["trained_ranges"][
                    offsets[first + g] : offsets[first + g + 1]
                ]:
                    in_ranges[begin + a : begin + b] = True
            may &= in_ranges
        assert np.array_equal(anew["tokens"][i][~slots], stored["tokens"][i][~slots])
        assert np.array_equal(anew["loss_mask"][i][~slots], stored["loss_mask"][i][~slots])
        # what may not be noised, such as prompts, has its own token and no loss
        assert np.array_equal(anew["tokens"][i][slots & ~may], stored["labels"][i][slots & ~may])
        assert not anew["loss_mask"][i][slots & ~may].any()
        untrained = slots & (anew["loss_mask"][i] == 0)
        assert np.array_equal(anew["tokens"][i][untrained], stored["labels"][i][untrained])
        changed_tokens += (anew["tokens"][i] != stored["tokens"][i]).sum()
        changed_loss += (anew["loss_mask"][i] != stored["loss_mask"][i]).sum()
    assert changed_tokens > 100 and (changed_loss > 100 or kind == "uniform")


def test_no_two_epochs_are_equal_and_each_is_itself_again(datasets):
    ds = datasets("mix")
    seen = [ds.batch(range(20), columns=COLUMNS, epochs=[e] * 20) for e in (0, 1, 2, 3, 2**32 - 1)]
    for name in ("tokens", "loss_mask", "loss_weights"):
        for i, one in enumerate(seen):
            assert all(not np.array_equal(one[name], other[name]) for other in seen[:i])
    again = ds.batch(range(20), columns=COLUMNS, epochs=[2] * 20)
    assert all(np.array_equal(again[name], seen[2][name]) for name in COLUMNS)
    assert all(
        np.array_equal(ds.batch(range(20), columns=COLUMNS)[name], seen[0][name])
        for name in COLUMNS
    )
    # chance repeats after 2³² epochs
    beyond = ds.batch(range(20), columns=COLUMNS, epochs=[2**32 + 2] * 20)
    assert all(np.array_equal(beyond[name], seen[2][name]) for name in COLUMNS)
    for epoch in (-1, 1 << 63):
        with pytest.raises(ArgumentError, match=r"^epochs\[1\] is .* in 0 … 9223372036854775807$"):
            ds.batch([0, 1], epochs=[0, epoch])
        with pytest.raises(ArgumentError, match="^epoch is .* in 0 … 9223372036854775807$"):
            ds.row(0, epoch)
    with pytest.raises(ArgumentError, match="there are 1 epochs for 2 rows"):
        ds.batch([0, 1], epochs=[1])


@pytest.mark.parametrize("kind", ["mix", "stratified", "supervised", "padded"])
def test_a_row_in_an_epoch_does_not_depend_on_its_batch(datasets, kind):
    ds = datasets(kind)
    rows, epochs = [5, 1, 5, 0, 7, 5], [2, 0, 1, 9, 2, 0]
    batch = ds.batch(rows, columns=COLUMNS, epochs=epochs)
    for i, (row, epoch) in enumerate(zip(rows, epochs, strict=True)):
        alone = ds.batch([row], columns=COLUMNS, epochs=[epoch])
        assert all(np.array_equal(batch[name][i], alone[name][0]) for name in COLUMNS)
    for name in COLUMNS:
        assert np.array_equal(ds.batch(rows, columns=[name], epochs=epochs)[name], batch[name])


@pytest.mark.parametrize(
    ("size", "world", "shuffle"), [(1, 1, True), (7, 1, True), (3, 2, False), (5, 4, True)]
)
def test_batches_give_each_sample_in_its_epoch(datasets, size, world, shuffle):
    ds = datasets("mix")
    n, epochs = len(ds), 3
    ranks = [
        list(ds.batches(size, 11, rank, world, shuffle, epochs, columns=COLUMNS, redraw=True))
        for rank in range(world)
    ]
    found = [row for step in zip(*ranks, strict=True) for batch in step for row in batch["tokens"]]
    samples = np.arange(epochs * n)
    expected = ds.batch(
        order.rows_of_samples(samples, n, 11, shuffle), columns=["tokens"], epochs=samples // n
    )
    assert np.array_equal(np.stack(found), expected["tokens"])
    stored = ds.batches(size, 11, 0, world, shuffle, epochs, columns=COLUMNS)
    assert np.array_equal(next(stored)["tokens"], ranks[0][0]["tokens"])


@pytest.mark.parametrize("at", ["inside an epoch", "at its end"])
def test_epoch_3_of_a_resumed_run_is_that_of_an_undisturbed_one(datasets, at):
    ds = datasets("mix")
    undisturbed = ds.batches(4, 3, columns=COLUMNS, redraw=True)
    steps = -(-3 * len(ds) // 4) + (2 if at == "inside an epoch" else 0)
    for _ in range(steps):
        next(undisturbed)
    state = undisturbed.state_dict()
    assert state["redraw"] is True and state["rows"] >= 3 * len(ds)
    with pytest.raises(
        StateError,
        match="the state's redraw is True, but this loader's is False: .*\nhint: give the redraw",
    ):
        ds.batches(4, 3).load_state_dict(state)
    ahead = [next(undisturbed) for _ in range(6)]
    resumed = ds.batches(8, 3, columns=COLUMNS, redraw=True)
    next(resumed)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    for i in range(3):
        batch = next(resumed)
        for name in COLUMNS:
            assert np.array_equal(
                batch[name], np.concatenate([ahead[2 * i][name], ahead[2 * i + 1][name]])
            )


@pytest.mark.parametrize(
    "kind", ["ul2r", "cuts", "compact", "t5", "rolled", "supervised_moved", "all"]
)
def test_moved_segments_go_on_in_the_middle_of_epoch_3_over_world_sizes_1_4_2(datasets, kind):
    ds = datasets(kind)
    options = {"seed": 3, "columns": [*COLUMNS, "n_trained"], "redraw": True}
    samples = 3 * len(ds) + len(ds) // 2 + np.arange(4 + 3 * 8 + 2 * 6)
    one = ds.batches(1, **options)
    for _ in range(samples[0]):
        next(one)
    got, state = [next(one) for _ in range(4)], one.state_dict()
    for world_size, batch_size, steps in ((4, 2, 3), (2, 3, 2)):
        ranks = [
            ds.batches(batch_size, rank=rank, world_size=world_size, **options)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(state)))
        got += [next(rank) for _ in range(steps) for rank in ranks]
        state = ranks[0].state_dict()
        assert all(rank.state_dict() == state for rank in ranks)
    rows = order.rows_of_samples(samples, len(ds), 3, True)
    expected = ds.batch(rows, columns=options["columns"], epochs=samples // len(ds))
    for name in options["columns"]:
        assert np.array_equal(np.concatenate([batch[name] for batch in got]), expected[name])


def test_without_redraw_every_epoch_is_the_stored_rows(datasets):
    ds = datasets("mix")
    it = ds.batches(len(ds), shuffle=False, epochs=2)
    first, second = next(it), next(it)
    assert np.array_equal(first["tokens"], second["tokens"])


def test_loss_on_some_sources_and_tasks_holds_in_every_epoch(datasets):
    ds = datasets("mix")
    everything, epochs = np.arange(len(ds)), [0, 2] * (len(ds) // 2) + [2] * (len(ds) % 2)
    whole = ds.batch(everything, columns=COLUMNS, epochs=epochs)
    names = [task["name"] for task in ds.tasks]
    for kept in ("uniform_diffusion", "block_diffusion", "causal"):
        some = ds.with_loss_on(task=kept).batch(everything, columns=COLUMNS, epochs=epochs)
        assert np.array_equal(some["tokens"], whole["tokens"])
        for i in everything:
            row = ds.row(i)
            on = np.append(False, row.segments["task"] == names.index(kept))[row.segment_ids]
            assert np.array_equal(some["loss_mask"][i], whole["loss_mask"][i] * on)
            assert np.array_equal(some["loss_weights"][i], whole["loss_weights"][i] * on)


@pytest.mark.parametrize("kind", ["ul2r", "supervised_moved"])
def test_labels_ahead_are_those_of_the_epoch(datasets, kind):
    ds, own = datasets(kind), ("labels", "loss_mask", "loss_weights")
    rows, epochs = range(len(ds)), [0, 1, 2] * (len(ds) // 3) + [1] * (len(ds) % 3)
    batch = ds.batch(rows, columns=["segment_ids", *own], epochs=epochs)
    ends = ds.batch(rows, columns=["prefix_ends"], epochs=epochs)["prefix_ends"]
    for name in own:
        none = ds.pad_id if name == "labels" else None
        expected = slots_ahead(batch[name], batch["segment_ids"], 3, ds, rows, none, ends)
        for given in (epochs, epochs[::-1]):
            found = ds.batch(rows, columns=[f"{name}_3"], epochs=given)[f"{name}_3"]
            assert np.array_equal(found, expected) == (given is epochs), name
        assert np.array_equal(getattr(ds.row(1, epoch=1), f"{name}_3"), expected[1])


@pytest.mark.parametrize("dtype", [None, np.int64])
def test_given_arrays_are_written(datasets, dtype):
    ds = datasets("mix")
    rows, epochs = [3, 0, 8], [1, 1, 4]
    expected = ds.batch(rows, columns=COLUMNS, epochs=epochs)
    out = {
        name: np.full((3, 2 * ds.seq_length), 77, dtype or expected[name].dtype)[:, ::2]
        for name in COLUMNS[:5]
    }
    given = ds.batch(rows, out=out, epochs=epochs)
    assert all(
        given[name] is out[name] and np.array_equal(out[name], expected[name]) for name in out
    )
    out = {
        name: np.full((3, ds.seq_length), 77, dtype or expected[name].dtype) for name in COLUMNS[:5]
    }
    ds.batch(rows, out=out, epochs=epochs)
    assert all(np.array_equal(out[name], expected[name]) for name in out)
    cast = ds.batch(rows, dtype=dtype, epochs=epochs)
    assert np.array_equal(cast["tokens"], expected["tokens"])


def test_marginals_are_those_of_render(datasets):
    """E[weight · trained] = 1 a candidate of masked diffusion; flip rates and shares of BERT as the
    recipe says."""
    ds = datasets("stratified")
    slots = ds.batch(range(len(ds)), columns=["segment_ids"])["segment_ids"] != 0
    total = square = 0.0
    for epoch in range(1, 9):
        weights = ds.batch(range(len(ds)), columns=["loss_weights"], epochs=[epoch] * len(ds))[
            "loss_weights"
        ]
        total += float(weights.sum(dtype=np.float64))
        square += float((weights.astype(np.float64) ** 2).sum())
    assert abs(total / (8 * slots.sum()) - 1) < 5 * math.sqrt(square) / (8 * slots.sum())
    ds = datasets("mlm_int32")
    batch = ds.batch(range(len(ds)), epochs=[5] * len(ds))
    n = int((batch["segment_ids"] != 0).sum())
    noised = int(batch["loss_mask"].sum())
    assert abs(noised - 0.15 * n) < 5 * math.sqrt(0.15 * 0.85 * n)
    masked = int((batch["tokens"] == ds.manifest["specials"]["mask"]).sum())
    assert abs(masked - 0.8 * noised) < 5 * math.sqrt(0.16 * noised)


@pytest.mark.parametrize(
    "epoch, kind",
    [
        *((1, kind) for kind in (*KINDS_MOVED, *KINDS, *PRESETS)),
        *((1_000_000, kind) for kind in LATE),
        *(
            pytest.param(epoch, kind, marks=pytest.mark.campaign)
            for epoch in (2, 1_000_000)
            for kind in (*KINDS_MOVED, *KINDS)
            if epoch == 2 or kind not in LATE
        ),
    ],
)
def test_rows_of_an_epoch_are_those_of_a_build_with_its_chance(datasets, kind, epoch):
    ds = datasets(kind)
    blocks = any(task["attention"] == "block_diffusion" for task in ds.tasks)
    names = [*COLUMNS, "prefix_ends", *(["block_lengths"] if blocks else [])]
    anew = ds.batch(range(len(ds)), columns=names, epochs=[epoch] * len(ds))
    stored = ds.batch(range(len(ds)), columns=names)
    plan, first = open_plan(ds.directory), 0
    for b in range(plan.shards):
        arrays = make_shard(plan, b, epoch=epoch).arrays
        for i in range(len(arrays["tokens"])):
            row = {name: anew[name][first + i] for name in names}
            assert np.array_equal(row["tokens"], arrays["tokens"][i])
            begin, end = arrays["row_offsets"][i : i + 2]
            real = arrays["cu_seqlens"][begin + i : end + i + 1]
            at = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"])[begin + i : end + i + 1]
            prefix = arrays["segment_prefix"][begin:end]
            ends, labels = (
                np.zeros(ds.seq_length, np.int64),
                np.full(ds.seq_length, ds.manifest["pad_id"]),
            )
            for k, slots in enumerate(np.diff(real)):
                here = slice(at[k], at[k] + slots)
                ends[here] = -1 if prefix[k] == -1 else at[k] + prefix[k]
                labels[at[k] : at[k] + slots - 1] = arrays["tokens"][i, at[k] + 1 : at[k] + slots]
            assert np.array_equal(row["prefix_ends"], ends)
            assert np.array_equal(
                row["labels"], arrays["labels"][i] if "labels" in arrays else labels
            )
            if "loss_mask" in arrays:
                assert np.array_equal(row["loss_mask"], arrays["loss_mask"][i])
            for name in ("segment_ids", "position_ids"):
                assert np.array_equal(row[name], stored[name][first + i])
            own = ds.row(first + i, epoch=epoch)
            for name in names:
                if name != "prefix_ends" or not (prefix == -1).any():
                    assert (
                        np.array_equal(getattr(own, name), row[name])
                        and not getattr(own, name).flags.writeable
                    )
            for name in ("prefix", "noise", "loss_weight"):
                assert np.array_equal(own.segments[name], arrays[f"segment_{name}"][begin:end])
            assert np.array_equal(own.cu_seqlens, real) and own.n_tokens == real[-1]
        first += len(arrays["tokens"])
    other = (anew["tokens"] != stored["tokens"]) | (anew["loss_mask"] != stored["loss_mask"])
    if kind == "i_dlm":  # all of which is masked, so that no epoch is another
        assert not other.any()
    else:
        assert other.mean() > (0.05 if kind in KINDS_MOVED else 0.005)
    assert np.array_equal(anew["loss_weights"] > 0, anew["loss_mask"] == 1)


@pytest.mark.parametrize("kind", dict.fromkeys(["all", "mix", "cuts", *KINDS, *KINDS_MOVED]))
def test_the_kernels_of_a_build_draw_the_same_rows(datasets, kind):
    ds = datasets(kind)
    names = [*COLUMNS, "prefix_ends", "block_lengths", "n_trained"]
    epochs = [(1, 2, 0, 1_000_000)[i % 4] for i in range(len(ds))]
    expected = ds.batch(range(len(ds)), columns=names, epochs=epochs)
    for accelerate in ("numba", "auto"):
        anew = ds.batch(range(len(ds)), columns=names, epochs=epochs, accelerate=accelerate)
        assert all(np.array_equal(anew[name], expected[name]) for name in names)
    plain, fast = (
        ds.batches(3, redraw=True, accelerate=which, epochs=2) for which in ("numpy", "numba")
    )
    assert fast.state_dict() == plain.state_dict()
    fast.load_state_dict({**plain.state_dict(), "rows": len(ds) + 2})
    plain.load_state_dict(fast.state_dict())
    assert np.array_equal(next(fast)["tokens"], next(plain)["tokens"])


def test_what_draws_is_refused_where_it_is_not_there(datasets):
    ds = datasets("t5")
    for batches in (ds.batches, open_dataset([ds.directory] * 2, shares=[1, 1]).batches):
        with pytest.raises(
            ArgumentError, match="accelerate is 'gpu' and should be one of 'numpy', 'numba', 'auto'"
        ):
            batches(2, redraw=True, accelerate="gpu")
    code = """
import sys
sys.modules[MISSING] = None
from packprep import open_dataset
ds = open_dataset(DIRECTORY)
print(int(ds.batch([0], epochs=[3], accelerate="auto")["labels"].sum()))
ds.batches(2, redraw=True, accelerate="numba")
"""
    for missing in ("numba", "msgspec"):  # a trainer's image may have either without the other
        done = made.run_python(
            code.replace("MISSING", repr(missing)).replace("DIRECTORY", repr(str(ds.directory)))
        )
        assert int(done.stdout) == int(ds.batch([0], epochs=[3])["labels"].sum())
        said = (
            f"ArgumentError: accelerate = 'numba' needs {missing}, not installed here\nhint: pip install"
            f" {missing}, or"
        )
        assert said in done.stderr


MOVED_DAMAGE = {
    "does not have the special token": lambda a: np.copyto(a["tokens"], 7),
    "does not have the positions that its tokens need": lambda a: a["segment_tokens"].__iadd__(
        1000
    ),
    "position 0 does not have the positions that its tokens need": lambda a: np.copyto(
        a["segment_tokens"], 1
    ),
}


@pytest.mark.parametrize("accelerate", ["numpy", "numba"])
@pytest.mark.parametrize("what", MOVED_DAMAGE)
def test_a_row_that_is_not_what_its_key_says_is_a_fault_with_a_name(datasets, what, accelerate):
    fresh = open_dataset(datasets("t5").directory)
    *_, shard = fresh._at_hand(0)
    arrays = {name: array.copy() for name, array in shard.arrays.items()}
    MOVED_DAMAGE[what](arrays)
    shard.__dict__["arrays"] = arrays
    with pytest.raises(DatasetError, match=f"row 0: .*{what}"):
        fresh.batch([0, 1], epochs=[1, 1], accelerate=accelerate)


def test_characters_stay_whole_by_the_manifest_or_the_tokenizer_beside_it(datasets, tmp_path):
    ds = datasets("cuts")
    expected = ds.batch(range(len(ds)), epochs=[1] * len(ds))
    plan = open_plan(ds.directory)
    assert np.array_equal(
        flags_of(ds.manifest["continues"], ds.vocab_size), plan.tasks[0].ids.continues
    )
    out = shutil.copytree(ds.directory, tmp_path / "out")
    replace_in_manifest(out, continues="")
    anew = open_dataset(out).batch(range(len(ds)), epochs=[1] * len(ds))
    assert all(np.array_equal(anew[name], values) for name, values in expected.items())
    tokenizer = out / "tokenizer.json"
    for damage in (
        lambda: tokenizer.write_bytes(b"{"),
        lambda: tokenizer.write_bytes(b"{}"),
        tokenizer.unlink,
    ):
        damage()
        with pytest.raises(
            ArgumentError,
            match="'fill_in_the_middle' never cuts inside a character, .*tokenizer.json",
        ):
            open_dataset(out).batches(2, redraw=True)
    for damage in ("AAAA", "?", "é"):
        replace_in_manifest(out, continues=damage)
        with pytest.raises(
            ArgumentError, match="'fill_in_the_middle' never cuts inside a character, .*continues"
        ):
            open_dataset(out).batches(2, redraw=True)
    tasks = [
        {**task, "parameters": {**task["parameters"], "text_safe": False}} for task in ds.tasks
    ]
    replace_in_manifest(out, continues="", tasks=tasks)
    open_dataset(out).batches(2, redraw=True)


@pytest.mark.parametrize("accelerate", ["numpy", "numba"])
@pytest.mark.parametrize("kind", ["cuts", "ul2r"])
def test_whatever_a_header_says_it_is_drawn_or_refused(datasets, kind, accelerate):
    fresh, chance, outcomes = (
        open_dataset(datasets(kind).directory),
        np.random.default_rng(4),
        set(),
    )
    *_, shard = fresh._at_hand(0)
    good = shard.arrays
    rows = len(good["tokens"])
    for _ in range(150):
        arrays = {
            **good,
            "segment_tokens": good["segment_tokens"].copy(),
            "segment_key": good["segment_key"].copy(),
        }
        row = int(chance.integers(rows))
        g = int(good["row_offsets"][row + 1]) - 1 - int(chance.integers(2))
        arrays["segment_tokens"][g] += chance.integers(-4, 5)
        arrays["segment_key"][g] += np.uint64(chance.integers(2))
        shard.__dict__["arrays"] = arrays
        try:
            fresh.batch([max(row - 1, 0), row], epochs=[1, 1], accelerate=accelerate)
            outcomes.add("drawn")
        except DatasetError as error:
            assert f"row {row}" in str(error) or f"row {row - 1}" in str(error)
            outcomes.add("refused")
    assert outcomes == {"drawn", "refused"}


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    base = tmp_path_factory.mktemp("causal")
    made.write_lines(base / "a.jsonl", made.texts(30))
    made.build(made.table("a.jsonl", tasks=[CAUSAL]), base, base / "out")
    return base / "out"


def test_a_dataset_of_causal_tasks_stays_as_it_is(causal):
    ds = open_dataset(causal)
    it = ds.batches(len(ds), shuffle=False, epochs=2, redraw=True)
    assert np.array_equal(next(it)["tokens"], next(it)["tokens"])


@pytest.mark.parametrize("objective", ["my_shift", "my_cuts"])
def test_a_task_whose_chance_would_stay_is_refused_by_name_at_once(causal, tmp_path, objective):
    shutil.copytree(causal, tmp_path / "out")
    tasks = [
        {**open_dataset(causal).tasks[0], "name": "mine", "objective": objective},
        open_dataset(causal).tasks[1],
    ]
    replace_in_manifest(tmp_path / "out", tasks=tasks)
    ds = open_dataset(tmp_path / "out")
    for dataset in (ds, open_dataset([causal, tmp_path / "out"], shares=[1, 1])):
        with pytest.raises(
            ArgumentError,
            match=rf"redraw: 'mine' \({objective}\) cannot be resampled, (?s:.*)without redraw",
        ):
            dataset.batches(2, redraw=True)
    with pytest.raises(ArgumentError, match="'mine'"):
        ds.batch([0], epochs=[1])
    next(ds.batches(2))


def test_a_task_without_a_law_is_refused_by_name_at_once(datasets, tmp_path):
    shutil.copytree(datasets("exact").directory, tmp_path / "out")
    tasks = [dict(task) for task in datasets("exact").tasks]
    tasks[0] |= {"name": "mine", "objective": "my_diffusion"}
    replace_in_manifest(tmp_path / "out", tasks=tasks)
    ds = open_dataset(tmp_path / "out")
    with pytest.raises(ArgumentError, match="'mine' has the objective 'my_diffusion'"):
        ds.batches(2, redraw=True)
    next(ds.batches(2))


def test_an_unknown_parameter_is_refused_with_the_version_that_can(datasets, tmp_path):
    shutil.copytree(datasets("exact").directory, tmp_path / "d")
    value = json.loads((tmp_path / "d/dataset.json").read_bytes())
    for task in value["tasks"]:
        task["parameters"]["tempo"] = 2
    value["made_with"] = {"packprep": "7.0"}
    replace_in_manifest(tmp_path / "d", **value)
    dataset = open_dataset(tmp_path / "d")
    dataset.batch([0])
    words = "key 'tempo' is unknown to packprep .*; packprep 7.0 wrote it\nhint: use that version"
    with pytest.raises((ArgumentError, DatasetError), match=words):
        dataset.batches(2, redraw=True)


@pytest.mark.parametrize(
    "replace", [[0.8, 0.1], [0.9, -0.1, 0.2], [0.9, "0.1", 0], [True, 0, 0], 1, None]
)
def test_shares_that_are_none_are_refused(datasets, tmp_path, replace):
    shutil.copytree(datasets("exact").directory, tmp_path / "d")
    tasks = [{**task, "parameters": {**task["parameters"]}} for task in datasets("exact").tasks]
    tasks[0]["parameters"]["replace"] = replace
    replace_in_manifest(tmp_path / "d", tasks=tasks)
    with pytest.raises((ArgumentError, DatasetError), match="replace"):
        open_dataset(tmp_path / "d").batches(2, redraw=True)


LAST = 527  # the highest id of the golden datasets' vocabulary
UNUSABLE = {
    "in_place": [
        ({"special_ids": None}, "specials have no special_ids"),
        ({"special_ids": 3}, "special_ids are not a list of ids below vocab_size 528"),
        ({"special_ids": [LAST + 1]}, "special_ids are not a list of ids below vocab_size 528"),
        ({"special_ids": [*range(1, LAST + 1)]}, "fewer than two ordinary ids"),
        ({"mask": None}, "specials have no mask"),
        ({"mask": "259"}, "mask is '259' and should be an id below vocab_size 528"),
        ({"mask": LAST + 1}, "mask is 528 and should be an id below vocab_size 528"),
    ],
    "ul2r": [
        ({"sentinels": [272]}, "task 'r' needs [0-9]+ sentinels, but .* have 1"),
        ({"sentinels": 3}, "sentinels are not a list of ids below vocab_size 528"),
        ({"sentinels": [LAST + 1]}, "sentinels are not a list of ids below vocab_size 528"),
        ({"eos": LAST + 1}, "eos is 528 and should be an id below vocab_size 528"),
    ],
    "compact": [
        ({"fim_suffix": None}, "task 'fill_in_the_middle' needs fim_suffix, which is missing"),
        ({"fim_suffix": LAST + 1}, "fim_suffix is 528 and should be an id below vocab_size 528"),
    ],
}
USABLE = {
    "in_place": [{"special_ids": [*range(2, LAST + 1)]}, {"mask": LAST}, {"special_ids": [LAST]}],
    "ul2r": [{"eos": LAST}],
    "compact": [{"fim_suffix": LAST}],
}


def test_specials_that_a_task_writes_are_needed_and_are_ids_of_the_vocabulary():
    def resample(name, changes):
        folder = LAW3 / name / "dataset"
        manifest = open_dataset(folder).manifest
        given = {**manifest["specials"], **changes}
        specials = {role: ids for role, ids in given.items() if ids is not None}
        read_tokenizer = (folder / "tokenizer.json").read_bytes
        return resampling.resampling_of({**manifest, "specials": specials}, read_tokenizer)

    for name in UNUSABLE:
        for changes, words in UNUSABLE[name]:
            with pytest.raises(DatasetError, match=f"^redraw: .*{words}"):
                resample(name, changes)
        for changes in USABLE[name]:
            assert resample(name, changes).has_chance


def test_a_task_that_contradicts_its_noise_schedule_is_refused_by_name():
    manifest = open_dataset(LAW3 / "in_place" / "dataset").manifest
    masked, *others = manifest["tasks"]
    for changes, words in (
        ({"attention": "causal"}, "its attention is causal and should be bidirectional"),
        ({"label_alignment": "next_slot"}, "its shift does not agree with its label_alignment"),
        ({"resolved": [1]}, "resolved is not an object"),
        ({"parameters": {}}, "noise_range is None, which masked_diffusion cannot use"),
    ):
        tasks = [{**masked, **changes}, *others]
        with pytest.raises(DatasetError, match=f"^redraw: task 'masked_diffusion' .*: {words}"):
            resampling.resampling_of({**manifest, "tasks": tasks}, lambda: b"")


@pytest.mark.parametrize("epochs", [[1], [1, 2, 3], [1, -1], [1, 0.5]])
def test_bad_epochs_are_refused(datasets, epochs):
    with pytest.raises(ArgumentError, match="epochs"):
        datasets("exact").batch([0, 1], epochs=epochs)


DAMAGE = {
    "cu_seqlens": lambda a: a["cu_seqlens"].__setitem__(1, 10_000),
    "segment_task": lambda a: a["segment_task"].__setitem__(0, 99),
    "trained range": lambda a: a["trained_ranges"].__setitem__((0, 1), 10_000),
    "trained_offsets": lambda a: a["trained_offsets"].__setitem__(1, 10_000),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_header_is_a_fault_with_a_name(datasets, what):
    ds = datasets("supervised")
    fresh = open_dataset(ds.directory)
    *_, shard = fresh._at_hand(0)
    arrays = {name: array.copy() for name, array in shard.arrays.items()}
    DAMAGE[what](arrays)
    shard.__dict__["arrays"] = arrays
    with pytest.raises(DatasetError, match=what):
        fresh.batch([0, 1], epochs=[1, 1])


def test_redraw_works_with_numpy_alone(datasets):
    ds = datasets("mix")
    code = """
import sys
for name in ("numba", "pyarrow", "tokenizers", "zstandard", "msgspec", "xxhash", "tqdm", "typer", "rich"):
    sys.modules[name] = None
from packprep import open_dataset
it = open_dataset(DIRECTORY).batches(5, shuffle=False, redraw=True, columns=["tokens", "loss_weights"])
it.load_state_dict({**it.state_dict(), "rows": ROWS})
batch = next(it)
print(int(batch["tokens"].sum()), float(batch["loss_weights"].sum()))
"""
    done = made.run_python(
        code.replace("DIRECTORY", repr(str(ds.directory))).replace("ROWS", str(2 * len(ds)))
    )
    assert done.returncode == 0, done.stderr
    expected = ds.batch(range(5), columns=COLUMNS, epochs=[2] * 5)
    tokens, weights = done.stdout.split()
    assert int(tokens) == int(expected["tokens"].sum())
    assert float(weights) == float(expected["loss_weights"].sum())


@pytest.mark.parametrize("threshold", [-1, 0.5, "1", True, None, noise.ONE + 1])
def test_a_threshold_that_is_none_is_said(threshold):
    limits = [noise.ONE] * noise.FLIP_STEPS
    assert not noise.UNIFORM_DIFFUSION.unusable({"flip_thresholds": limits})
    found = noise.UNIFORM_DIFFUSION.unusable({"flip_thresholds": [*limits[1:], threshold]})
    assert found.startswith("flip_thresholds are not 4096 thresholds")
