import contextlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packprep
from packprep.dataset import loader, mixture, order
from packprep.dataset.epochs import noise
from packprep.dataset.rows import COLUMNS, MORE_COLUMNS
from packprep.errors import ArgumentError, DatasetError, Exhausted, StateError
from packprep.format import json_files
from tests.dataset.synthetic import make_dataset, replace_in_manifest
from tests.dataset.synthetic import task as task_of
from tests.dataset.test_loader import Numbered


@pytest.fixture
def three(tmp_path):
    """Directories of three datasets: 12 rows with blocks, 7 in place, 3 that predict the next
    token, of int32."""
    options = [
        {"seed": 1, "in_place": True, "blocks": True, "trained": True, "pad_to": 4},
        {"seed": 2, "in_place": True, "rows_per_shard": (3, 4)},
        {"seed": 3, "token_dtype": "int32", "rows_per_shard": (1, 2)},
    ]
    for i, own in enumerate(options):
        make_dataset(tmp_path / str(i), **own)
    return [tmp_path / str(i) for i in range(3)]


SHARES = [0.5, 0.3, 0.2]
SUMMED = [
    *COLUMNS,
    "loss_weights",
    "n_trained",
    "loss_weight_sum",
    "labels_2",
    "loss_mask_3",
    "loss_weights_2",
]


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_rows_items_and_batches_are_those_of_the_datasets_one_after_the_other(three, io):
    parts = [packprep.open_dataset(directory) for directory in three]
    mixed = packprep.open_dataset(three, shares=SHARES, io=io)
    assert len(mixed) == 22 and mixed.token_dtype == np.int32 and mixed.shares.tolist() == SHARES
    assert (mixed.seq_length, mixed.vocab_size, mixed.pad_id) == (64, 528, 1)
    where = [(d, i) for d, part in enumerate(parts) for i in range(len(part))]
    order = np.random.default_rng(0).permutation(22)
    batch = mixed.batch(order, columns=SUMMED)
    assert list(batch) == SUMMED and batch["tokens"].dtype == batch["labels"].dtype == np.int32
    for at, index in enumerate(order.tolist()):
        d, i = where[index]
        expected = parts[d].batch([i], columns=SUMMED)
        row, again = mixed.row(index), mixed.row(index - 22)
        assert row.index == again.index == i and row.dataset is mixed.datasets[d]
        assert np.array_equal(row.tokens, expected["tokens"][0]) and np.array_equal(
            row.labels, again.labels
        )
        item = mixed[np.int64(index)]
        assert list(item) == list(COLUMNS)
        for name in SUMMED:
            assert np.array_equal(batch[name][at], expected[name][0]), name
            assert name not in item or np.array_equal(item[name], expected[name][0])
    out = {"tokens": np.empty((3, 64), np.int64), "n_trained": np.empty(3, np.int64)}
    assert mixed.batch([0, 21, 13], out=out)["tokens"] is out["tokens"]
    assert np.array_equal(out["tokens"], mixed.batch([0, 21, 13])["tokens"])
    items = mixed.__getitems__([21, 0])
    assert np.array_equal(items[0]["labels"], mixed[21]["labels"]) and len(items) == 2
    assert mixed.batch([])["tokens"].shape == (0, 64)
    for index in (22, -23):
        for read in (mixed.row, mixed.__getitem__, lambda i: mixed.batch([i])):
            with pytest.raises(IndexError, match=f"{index} of a (mixture|dataset) of 22 rows"):
                read(index)
    with pytest.raises(ArgumentError, match="there are 2 epochs for 1 rows"):
        mixed.batch([0], epochs=[1, 2])


def test_each_dataset_comes_in_the_order_that_its_seed_gives_it_with_its_own_epochs(three):
    mixed = packprep.open_dataset(three, shares=SHARES)
    samples = np.arange(500)
    rows, epochs = mixed.rows_of_samples(samples, 9, True)
    first = 0
    for d, dataset in enumerate(mixed.datasets):
        here = (rows >= first) & (rows < first + len(dataset))
        assert here.sum() == [250, 150, 100][d]
        alone, own_epochs = dataset.rows_of_samples(
            np.arange(here.sum()), order.seed_of(9, d), True
        )
        assert (
            rows[here].tolist() == (first + alone).tolist()
            and epochs[here].tolist() == own_epochs.tolist()
        )
        first += len(dataset)
    in_order, _ = mixed.rows_of_samples(np.arange(20), 9, False)
    assert in_order.tolist() == [
        0,
        12,
        19,
        1,
        2,
        13,
        3,
        20,
        14,
        4,
        5,
        15,
        21,
        6,
        7,
        16,
        8,
        19,
        17,
        9,
    ]


def test_a_mixture_of_one_dataset_has_its_order(three):
    alone = packprep.open_dataset(three[0]).batches(5, seed=7, epochs=2)
    mixed = packprep.open_dataset(three[:1], shares=[1.0]).batches(5, seed=7, samples=24)
    for a, b in zip(alone, mixed, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in COLUMNS)


def test_datasets_of_one_size_have_orders_of_their_own():
    mixed = numbered([1000, 1000, 1000], [1, 1, 1])
    rows, _ = mixed.rows_of_samples(np.arange(3000), 4, True)
    a, b, c = (rows[(rows >= begin) & (rows < begin + 1000)] - begin for begin in (0, 1000, 2000))
    for one, other in ((a, b), (b, c), (a, c)):
        assert sorted(one.tolist()) == list(range(1000)) and (one == other).mean() < 0.02


def numbered(sizes, given, fingerprint="f", interpolate=None, max_epochs=None):
    """A mixture of datasets without files, whose row i, of all rows, has tokens i."""
    datasets = []
    for d, n in enumerate(sizes):
        dataset = Numbered(n, fingerprint + str(d))
        dataset.seq_length, dataset.vocab_size, dataset.pad_id, dataset.token_dtype = (
            8,
            9,
            0,
            np.dtype("u2"),
        )
        dataset.manifest |= {"tokenizer": {"digest": "t"}}
        datasets.append(dataset)

    class NumberedMixture(mixture.Mixture):
        def batch(self, indices, out=None, columns=None, dtype=None, epochs=None):
            return {"tokens": np.asarray(indices, np.int64)}

    return NumberedMixture(datasets, order.dealing_of(given, datasets, interpolate), max_epochs)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_shares_and_epochs_hold_over_ranks_restarts_and_changed_sizes(data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4), "sizes")
    given_shares = data.draw(
        st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)), "shares"
    )
    seed, shuffle = (
        data.draw(st.integers(0, 2**64 - 1), "seed"),
        data.draw(st.booleans(), "shuffle"),
    )
    samples = data.draw(st.integers(0, 200), "samples")
    mixed, delivered, state = numbered(sizes, given_shares), [], None
    for _ in range(data.draw(st.integers(1, 5), "restarts")):
        size, world = data.draw(st.integers(1, 9), "B"), data.draw(st.integers(1, 5), "W")
        ranks = [
            mixed.batches(size, seed, r, world, shuffle, samples=samples) for r in range(world)
        ]
        for it in ranks:
            if state is not None:
                it.load_state_dict(state)
        for _ in range(data.draw(st.integers(0, 9), "steps")):
            batches = [next(it, None) for it in ranks]
            if batches[0] is None:
                assert batches == [None] * world
                break
            for batch in batches:
                delivered += batch["tokens"].tolist()
        states = [json.loads(json.dumps(it.state_dict())) for it in ranks]
        assert (
            all(s == states[0] for s in states) and states[0]["rows"] == len(delivered) <= samples
        )
        state = states[0]
        assert mixed.delivered(state) == by_dataset(delivered, sizes, shuffle)
    one_rank = mixed.batches(1, seed, shuffle=shuffle)
    assert [next(one_rank)["tokens"][0] for _ in delivered] == delivered


def by_dataset(delivered, sizes, shuffle):
    """How many rows of each dataset were delivered; each epoch of each holds every row of it
    once."""
    counts, first = [], 0
    for n in sizes:
        own = [row - first for row in delivered if first <= row < first + n]
        for begin in range(0, len(own), n):
            epoch = own[begin : begin + n]
            assert len(set(epoch)) == len(epoch)
            assert shuffle or epoch == list(range(len(epoch)))
        counts.append(len(own))
        first += n
    return counts


SCHEDULE = [(0, [1, 0, 1]), (100, [1, 3, 0])]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_shares_that_change_hold_over_ranks_restarts_and_changed_sizes(data):
    mixed, delivered, state = numbered([13, 7, 5], SCHEDULE, interpolate="linear"), [], None
    for _ in range(data.draw(st.integers(1, 4), "restarts")):
        size, world = data.draw(st.integers(1, 9), "B"), data.draw(st.integers(1, 5), "W")
        ranks = [mixed.batches(size, 3, r, world, samples=300) for r in range(world)]
        for it in ranks:
            if state is not None:
                it.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(data.draw(st.integers(0, 9), "steps")):
            for it in ranks:
                delivered += next(it, {"tokens": np.array([])})["tokens"].tolist()
        state = ranks[0].state_dict()
        assert state == ranks[-1].state_dict() and state["rows"] == len(delivered)
        assert mixed.delivered(state) == by_dataset(delivered, [13, 7, 5], True)
    assert delivered == mixed.rows_of_samples(np.arange(len(delivered)), 3, True)[0].tolist()


def test_other_points_shares_or_interpolation_are_another_order(three):
    mixed = packprep.open_dataset(three, shares=SCHEDULE, interpolate="linear")
    assert mixed.shares.shape == (
        2,
        3,
    ) and "shares at samples 0, 100\n50.00% → 25.00% of samples" in str(mixed)
    state = mixed.batches(4).state_dict()
    for shares, interpolate in (
        (SCHEDULE, "step"),
        ([SCHEDULE[0], (101, [1, 3, 0])], "linear"),
        (SHARES, None),
    ):
        other = packprep.open_dataset(three, shares=shares, interpolate=interpolate)
        with pytest.raises(StateError, match="fingerprint"):
            other.batches(4).load_state_dict(state)
    again = packprep.open_dataset(
        three,
        shares=[(0, [2, 0, 2]), (100, [0.25, 0.75, 0])],
        interpolate="linear",
        max_epochs=[9, 9, 9],
    )
    # the same order, which may end before
    pickle.loads(pickle.dumps(again)).batches(4).load_state_dict(state)


@pytest.mark.parametrize(
    "shares, interpolate",
    [([1, 2], None), ([(0, [1, 2])], None), ([(0, [1, 0]), (60, [0, 1])], "linear")],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_max_epochs_end_a_mixture_where_the_first_dataset_is_exhausted(
    shares, interpolate, shuffle
):
    mixed = numbered([50, 40], shares, interpolate=interpolate, max_epochs=[None, 2])
    end, (rows, _) = (
        mixed.exhausted_at(5, shuffle),
        mixed.rows_of_samples(np.arange(400), 5, shuffle),
    )
    assert end == np.flatnonzero(rows >= 50)[80]
    told = (
        rf"dataset 1 of the mixture, numbered, .* max_epochs = 2, of 40 rows, before sample {end}"
        rf"\nhint: set samples = {end}"
    )
    with pytest.raises(Exhausted, match=told):
        mixed.batches(4, 5, shuffle=shuffle, samples=end + 1)
    exact = [next(mixed.batches(end, 5, shuffle=shuffle, samples=end))["tokens"]]
    assert np.array_equal(exact[0], rows[:end])
    for rank in range(2):
        it, steps = mixed.batches(4, 5, rank, 2, shuffle), 0
        with pytest.raises(Exhausted, match=told):
            while steps < 99:
                next(it)
                steps += 1
        assert steps == end // 8 and it.state_dict()["rows"] == steps * 8
        with pytest.raises(Exhausted):
            next(it)
    assert (
        numbered([50, 40], shares, interpolate=interpolate, max_epochs=[None, None]).exhausted_at()
        is None
    )


def costly(most):
    """A mixture whose rows cost differently, with these max_epochs."""
    mixed = numbered([50, 40], [1, 2], max_epochs=most)
    mixed.costs = lambda rows, attention, linear: (rows * 7 % 31).astype(float)
    return mixed


@pytest.mark.parametrize("window", [8, 64, 1024])
def test_balanced_a_mixture_gives_as_many_samples_as_without_balance(window):
    mixed, unbound = costly([None, 2]), costly(None)
    end = mixed.exhausted_at()
    assert end % 64 and end < 1024
    balance = {"balance": ("attention", 8), "window": window}
    given = np.concatenate([batch["tokens"] for batch in mixed.batches(8, samples=end, **balance)])
    assert sorted(given) == sorted(mixed.rows_of_samples(np.arange(end), 0, True)[0])
    assert np.bincount(given, minlength=90)[50:].tolist() == [2] * 40
    whole = end // window * window  # windows before the last are those of a mixture without an end
    free = unbound.batches(1, **balance)
    assert [next(free)["tokens"] for _ in range(whole)] == given[:whole].tolist()
    for rank in range(2):
        run = mixed.batches(4, 0, rank, 2, **balance)
        own = [next(run)["tokens"] for _ in range(end // 8)]
        assert np.array_equal(own, given[: end // 8 * 8].reshape(-1, 2, 4)[:, rank])
        with pytest.raises(Exhausted, match=f"before sample {end}\nhint: set samples = {end}"):
            next(run)
        assert sum(mixed.delivered(run.state_dict())) == end // 8 * 8
    with pytest.raises(Exhausted):
        mixed.batches(8, samples=end + 1, **balance)


@pytest.mark.long
@pytest.mark.parametrize("every", [5, 1])
def test_balanced_states_go_on_with_other_max_epochs_where_the_rows_before_are_the_same(every):
    mixed, unbound, longer = costly([None, 2]), costly(None), costly([None, 4])
    balance = {"balance": ("attention", 8), "window": 64}
    end, run = mixed.exhausted_at(), mixed.batches(4, **balance)
    window = end // 64 * 64
    for step in range(end // 4):
        state = json.loads(json.dumps(run.state_dict()))
        assert state["balance"]["end"] == end
        if step % every:
            next(run)
            continue
        for other in (unbound, longer):
            again = other.batches(4, **balance)
            back = mixed.batches(4, **balance)
            if step * 4 <= window:
                again.load_state_dict(state)
                back.load_state_dict(json.loads(json.dumps(again.state_dict())))
                assert back.state_dict() == state
            else:  # in another order of the same window rows would come twice
                with pytest.raises(
                    StateError, match="hint: give the balance, window and max_epochs of the state"
                ):
                    again.load_state_dict(state)
        back = mixed.batches(4, **balance)
        back.load_state_dict(state)
        assert np.array_equal(next(run)["tokens"], next(back)["tokens"])


@pytest.mark.parametrize(
    "bad, words",
    [
        ([1], "should be a list of 2"),
        (3, "should be a list of 2"),
        ([1, 0], r"max_epochs\[1\] is 0 and should be an integer in 1 … 2147483647$"),
    ],
)
def test_max_epochs_that_cannot_be_are_refused(bad, words):
    with pytest.raises(ArgumentError, match=words):
        numbered([5, 4], [1, 2], max_epochs=bad)


def test_rows_are_noised_anew_by_the_epochs_of_their_own_dataset(three):
    mixed = packprep.open_dataset(three[1:], shares=[1, 1])
    for directory in three[1:]:
        changed = {"mask": 499, "pad": 1, "special_ids": [1, 499, 500, 501]}
        replace_in_manifest(directory, specials=changed)
    mixed = packprep.open_dataset(three[1:], shares=[1, 1])
    for task in (task for dataset in mixed.datasets for task in dataset.tasks):
        if task["label_alignment"] != "same_slot":
            task["objective"] = "causal"
        else:
            law = {p.name: p.default for p in noise.MASKED_DIFFUSION.parameters} | {
                "noise_range": [0.3, 0.3],
                "epsilon": 0.0,
            }
            task["parameters"] |= {**law, "replace": [1.0, 0.0, 0.0], "weighting": "none"}
    epochs = mixed.rows_of_samples(np.arange(40), 3, True)[1]
    assert sorted(set(epochs.tolist())) == [0, 1, 2, 3, 4, 5, 6]
    asked = []
    for dataset in mixed.datasets:
        dataset._fill = lambda found, batch, epochs, accelerate, dataset=dataset: (
            asked.append((dataset.directory, epochs))
            or loader.Dataset._fill(dataset, found, batch, None, accelerate)
        )
    for _ in mixed.batches(40, seed=3, redraw=True, samples=40):
        pass
    assert [len(epochs) for _, epochs in asked] == [20, 20]
    assert max(asked[0][1]) == 2 and max(asked[1][1]) == 6


def test_a_state_of_other_datasets_or_shares_is_refused_and_json_keeps_it(three):
    it = packprep.open_dataset(three, shares=SHARES).batches(4, seed=1)
    next(it)
    state = json.loads(json.dumps(it.state_dict()))
    order = {"seed": 1, "shuffle": True, "redraw": False}
    digests = ",".join(packprep.open_dataset(each).manifest["digest"] for each in three)
    assert state == {"fingerprint": it.dataset.fingerprint, "digest": digests, **order, "rows": 4}
    others = [
        packprep.open_dataset(three, shares=[0.5, 0.2, 0.3]),
        packprep.open_dataset([three[1], three[0], three[2]], shares=SHARES),
        packprep.open_dataset(three[:2], shares=[0.5, 0.5]),
        packprep.open_dataset(three[0]),
    ]
    for other in others:
        with pytest.raises(StateError, match="fingerprint"):
            other.batches(4, seed=1).load_state_dict(state)
    with pytest.raises(
        StateError, match=f"the state's digest is 'f+,.*this loader's is '{digests}'"
    ):
        it.load_state_dict({**state, "digest": ",".join(["f" * 32, *digests.split(",")[1:]])})
    again = packprep.open_dataset(three, shares=[5, 3, 2]).batches(2, rank=1, world_size=2, seed=1)
    again.load_state_dict(state)
    assert np.array_equal(next(again)["tokens"], next(it)["tokens"][2:])


def test_pickles_and_columns_are_those_of_a_dataset(three):
    mixed = packprep.open_dataset(three, shares=SHARES)
    some = mixed.with_columns(["tokens", "n_trained"], dtype=np.int64)
    for reader in (some, pickle.loads(pickle.dumps(some)), some.with_loss_on()):
        assert reader.fingerprint == mixed.fingerprint and reader.counts.tolist() == [5, 3, 2]
        for got in (reader.batch([20, 3]), next(reader.batches(2, seed=1))):
            assert list(got) == ["tokens", "n_trained"] and got["tokens"].dtype == np.int64
        assert np.array_equal(reader[20]["tokens"], mixed[20]["tokens"])
    assert mixed.with_columns("labels").batch([0, 20])["labels"].dtype == np.int32
    with pytest.raises(ArgumentError, match="'colour'"):
        mixed.with_columns(["colour"])


def test_loss_is_kept_on_the_named_sources_tasks_and_datasets(three):
    mixed = packprep.open_dataset(three, shares=SHARES)
    parts = [packprep.open_dataset(directory) for directory in three]

    def masks(reader):
        return reader.batch(range(22), columns=["loss_mask"])["loss_mask"]

    def of_parts(*restricted):
        return np.concatenate(
            [
                part.batch(range(len(part)), columns=["loss_mask"])["loss_mask"]
                for part in restricted
            ]
        )

    assert np.array_equal(
        masks(mixed.with_loss_on(task="x")),
        of_parts(*(part.with_loss_on(task="x") for part in parts)),
    )
    assert np.array_equal(
        masks(mixed.with_loss_on(task=["masked", "x"], source="web")),
        of_parts(
            *(part.with_loss_on("web", ["masked", "x"]) for part in parts[:2]),
            parts[2].with_loss_on("web", "x"),
        ),
    )
    none = [part.with_loss_on(source=[]) for part in parts]
    assert np.array_equal(
        masks(mixed.with_loss_on(dataset=1)), of_parts(none[0], parts[1], none[2])
    )
    assert np.array_equal(
        masks(mixed.with_loss_on(dataset=[2, 0])), of_parts(parts[0], none[1], parts[2])
    )
    assert np.array_equal(
        masks(mixed.with_loss_on(task="bd3")),
        of_parts(parts[0].with_loss_on(task="bd3"), *none[1:]),
    )
    both = mixed.with_loss_on(dataset=1).with_loss_on(task="x")
    assert np.array_equal(masks(both), masks(mixed.with_loss_on(task="x", dataset=1)))
    with pytest.raises(
        ArgumentError, match="unknown task 'y' in all datasets; there are 'causal', 'x'"
    ):
        mixed.with_loss_on(task="y")
    with pytest.raises(ArgumentError, match=r"dataset is 3 .* 0 … 2"):
        mixed.with_loss_on(dataset=3)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pad_id": 2}, "pad_id is 2 in .*/1, but 1 in .*/0"),
        ({"vocab_size": 600}, "vocab_size"),
        ({"tokenizer": {"file": "tokenizer.json", "digest": "0" * 32}}, "the tokenizer's digest"),
        ({"shards": []}, "has no rows"),
    ],
)
def test_datasets_that_one_model_cannot_read_are_refused_by_what_differs(three, changes, words):
    replace_in_manifest(three[1], **changes)
    with pytest.raises(ArgumentError, match=words):
        packprep.open_dataset(three, shares=SHARES)


# Rows of several lengths


@pytest.fixture
def lengths(tmp_path):
    """Directories of three datasets: 12 rows of 64 slots, 9 of 128, 5 of 64."""
    make_dataset(tmp_path / "short", seed=1)
    make_dataset(tmp_path / "long", seed=2, seq_length=128, rows_per_shard=(4, 5))
    make_dataset(tmp_path / "more", seed=3, rows_per_shard=(5,))
    return [tmp_path / name for name in ("short", "long", "more")]


def test_each_step_is_of_one_dataset_and_its_length_has_its_own_batch_size(lengths):
    mixed, parts = (
        packprep.open_dataset(lengths, shares=[2, 2, 1]),
        [packprep.open_dataset(one) for one in lengths],
    )
    assert (
        mixed.seq_length == 128
        and mixed.seq_lengths == (64, 128, 64)
        and "40.00% of steps" in str(mixed)
    )
    ranks = [mixed.batches({64: 4, 128: 2}, 7, r, 2) for r in range(2)]
    whole = [
        part.batches(size, order.seed_of(7, d))
        for d, (part, size) in enumerate(zip(parts, (8, 4, 8), strict=True))
    ]
    which, _ = order.of_samples(np.arange(60), mixed.counts, 7, True)
    rows = np.zeros(3, int)
    for d in which.tolist():
        expected, got = next(whole[d]), [next(it) for it in ranks]
        for name in COLUMNS:
            assert np.array_equal(np.concatenate([batch[name] for batch in got]), expected[name])
        rows[d] += len(expected["tokens"])
        assert mixed.delivered(ranks[1].state_dict()) == rows.tolist()
    state = ranks[0].state_dict()
    assert (
        state == ranks[1].state_dict()
        and state["rows"] == 60
        and state["step_rows"] == {"64": 8, "128": 4}
    )
    for key, value, words in (
        ("rows", 1 << 62, "rows is .* in 0 … 4611686018427387903"),
        ("rows", -1, "rows is -1"),
        ("step_rows", {"64": 8, "128": 0}, "step_rows of 128 is 0 .* 1 … 4611686018427387903"),
        ("seed", 1 << 64, "seed is .* in 0 … 18446744073709551615"),
    ):
        with pytest.raises(StateError, match=words):
            mixed.delivered({**state, key: value})
    assert sum(1 for _ in mixed.batches({64: 1, 128: 1}, samples=17)) == 17
    anew = [next(mixed.batches({64: 4, 128: 2}, 7)) for _ in range(2)]
    assert np.array_equal(anew[0]["tokens"], anew[1]["tokens"])


@pytest.mark.parametrize("shares", [[2, 2, 1], SCHEDULE])
def test_a_mixture_of_lengths_goes_on_at_other_world_sizes_with_the_same_rows_of_a_step(
    lengths, shares
):
    mixed = packprep.open_dataset(lengths, shares=shares)
    one, expected = mixed.batches({64: 8, 128: 4}, 3), []
    for _ in range(40):
        expected.append(next(one)["tokens"])
    for stop in (1, 23):
        first = mixed.batches({64: 2, 128: 1}, 3, 1, 4)
        for k in range(stop):
            batch = next(first)["tokens"]
            assert np.array_equal(batch, expected[k][len(batch) : 2 * len(batch)])
        ranks = [mixed.batches({64: 4, 128: 2}, 3, r, 2) for r in range(2)]
        for it in ranks:
            it.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for k in range(stop, 40):
            assert np.array_equal(np.concatenate([next(it)["tokens"] for it in ranks]), expected[k])
    state = one.state_dict()
    with pytest.raises(
        StateError, match="step_rows is .*\nhint: .* the same number of rows per step"
    ):
        mixed.batches({64: 8, 128: 2}, 3).load_state_dict(state)


def test_a_mixture_of_lengths_refuses_what_it_cannot_do(lengths):
    mixed = packprep.open_dataset(lengths, shares=[2, 2, 1], max_epochs=[None, 2, None])
    for size, words in (
        (8, r"batch_size is 8, but rows differ in seq_length\nhint: give \{64: …, 128: …\}"),
        ({64: 8}, r"seq_lengths \[64\], but the rows have \[64, 128\]"),
        ({64: 8, 128: 0}, r"batch_size\[128\] is 0 and should be an integer in 1 … 2147483647$"),
    ):
        with pytest.raises(ArgumentError, match=words):
            mixed.batches(size)
    with pytest.raises(ArgumentError, match="rows of 64 and 128 positions cannot be in one batch"):
        mixed.batch([0, 12])
    assert mixed.batch([12, 20])["tokens"].shape == (2, 128) and mixed[3]["tokens"].shape == (64,)
    with pytest.raises(ArgumentError, match="balance requires rows of one seq_length"):
        mixed.batches({64: 8, 128: 4}, balance=("attention", 8))
    with pytest.raises(ArgumentError, match="step_rows = "):
        mixed.exhausted_at()
    end = mixed.exhausted_at(0, True, {64: 8, 128: 4})
    assert order.of_samples(np.arange(end + 1), mixed.counts, 0, True)[1][-1] == 18 // 4
    it = mixed.batches({64: 8, 128: 4})
    for _ in range(end):
        next(it)
    with pytest.raises(Exhausted, match="dataset 1 of the mixture"):
        next(it)
    alone = packprep.open_dataset(lengths[0])
    assert np.array_equal(next(alone.batches({64: 3}))["tokens"], next(alone.batches(3))["tokens"])
    with pytest.raises(ArgumentError, match=r"seq_lengths \[128\], but the rows have \[64\]"):
        alone.batches({128: 3})


# mixture.json


def test_a_mixture_file_opens_the_mixture_wherever_it_lies(three, tmp_path):
    for name, options in (
        ("plain.json", {"shares": SHARES}),
        (
            "mixture.json",
            {"shares": SCHEDULE, "interpolate": "linear", "max_epochs": [None, 4, None]},
        ),
    ):
        loader.write_mixture(tmp_path / name, three, **options)
        expected = packprep.open_dataset(three, **options)
        moved = tmp_path / "moved" / name
        moved.parent.mkdir(exist_ok=True)
        for folder in three:
            if not (moved.parent / folder.name).exists():
                shutil.copytree(folder, moved.parent / folder.name)
        shutil.copy(tmp_path / name, moved)
        for mixed in (
            packprep.open_dataset(tmp_path / name),
            packprep.open_dataset(str(moved), io="pread"),
        ):
            assert (
                mixed.fingerprint == expected.fingerprint
                and mixed.max_epochs == expected.max_epochs
            )
    assert (
        json.loads(moved.read_text())["datasets"] == ["0", "1", "2"]
        and b".." not in moved.read_bytes()
    )
    assert packprep.open_dataset(moved.parent).fingerprint == expected.fingerprint  # by its folder
    with pytest.raises(ArgumentError, match="shares has|at least one"):
        loader.write_mixture(tmp_path / "no.json", three, shares=[1])
    assert not list(tmp_path.glob("*no.json*"))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"format": "packprep"}, 'is not a mixture: its format should be "packprep mixture"'),
        ({"version": 2}, "version 1"),
        ({"shares": None}, "key 'shares' is missing"),
        ({"share": [1]}, "unknown key 'share'"),
        ({"datasets": "0"}, "datasets is '0' and should be a list of folders"),
        ({"datasets": []}, "a list of 0 directories"),
        ({"shares": 5}, "shares is 5 and should be a list"),
        ({"shares": [[0, [1, 2]]]}, r"shares\[0\] has 2 numbers, but there are 3 datasets"),
        ({"max_epochs": [1, "2", 3]}, r"max_epochs\[1\] is '2'"),
    ],
)
def test_a_mixture_file_that_cannot_be_used_says_what_and_where(three, tmp_path, changes, words):
    path = tmp_path / "mixture.json"
    loader.write_mixture(path, three, shares=SHARES)
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: own for key, own in value.items() if own is not None}))
    with pytest.raises(DatasetError, match=rf"mixture\.json.*{words}"):
        packprep.open_dataset(path)
    path.write_text("{")
    with pytest.raises(DatasetError, match="invalid JSON"):
        packprep.open_dataset(path)
    with pytest.raises(ArgumentError, match="already sets shares, interpolate and max_epochs"):
        packprep.open_dataset(path, shares=[1])


def test_arguments_that_make_no_mixture_are_clear_errors(three, tmp_path):
    for some, there in ((None, 0), ([1, 1], 2)):
        with pytest.raises(
            ArgumentError, match=rf"3 directories requires shares, .* there are {there}"
        ):
            packprep.open_dataset(three, shares=some)
    with pytest.raises(ArgumentError, match="0 directories"):
        packprep.open_dataset([], shares=[])
    for name in ("shares", "max_epochs"):
        with pytest.raises(ArgumentError, match=rf"{name} = \[1\] requires a list of directories"):
            packprep.open_dataset(three[0], **{name: [1]})
    with pytest.raises(DatasetError, match="does not exist"):
        packprep.open_dataset([three[0], tmp_path / "none"], shares=[1, 1])
    mixed = packprep.open_dataset(three, shares=SHARES)
    with pytest.raises(ArgumentError, match="epochs = 2: a mixture has no epochs.*\n.*samples = N"):
        mixed.batches(4, epochs=2)
    with pytest.raises(ArgumentError, match="give only one of them"):
        mixed.batches(4, epochs=2, samples=9)
    with pytest.raises(ArgumentError, match="samples is -1"):
        mixed.batches(4, samples=-1)


def test_the_bound_on_open_shards_is_of_all_datasets_together(three):
    mixed = packprep.open_dataset(three, shares=SHARES, max_open=6)
    assert [dataset.max_open for dataset in mixed.datasets] == [2, 2, 2]
    assert [dataset._open for dataset in mixed.datasets] == [{}, {}, {}]
    for limit, shards, bounds in [
        (10, [2, 9, 30], [2, 4, 4]),
        (2, [5, 5, 5], [1, 1, 1]),
        (99, [30, 9], [30, 9]),
    ]:
        assert mixture.split_bound(limit, shards) == bounds


def test_a_shard_that_is_missing_is_an_error_of_its_file(three):
    (three[1] / json_files.shard_name(0)).unlink()
    mixed = packprep.open_dataset(three, shares=SHARES)
    with pytest.raises(DatasetError, match=r"1/shards/000/000000\.safetensors"):
        mixed.batch([0, 12])


def test_prefix_ends_are_given_where_no_dataset_has_blocks(three):
    mixed = packprep.open_dataset(three[1:], shares=[1, 1])
    got = mixed.batch([9, 0], columns=MORE_COLUMNS[1:2])["prefix_ends"]
    assert np.array_equal(got[1], mixed.datasets[0].row(0).prefix_ends)


def test_seq_idx_and_labels_ahead_are_refused_by_the_tasks_of_all_datasets(three):
    for directory, own in (
        (three[1], task_of("m", "bidirectional", "same_slot")),
        (three[2], task_of("c")),
    ):
        replace_in_manifest(
            directory, tasks=[{**own, "name": f"{own['name']}{i}"} for i in range(4)]
        )
    mixed = packprep.open_dataset(three[1:], shares=[1, 1])
    with pytest.raises(
        ArgumentError,
        match=r"task m0, m1, m2, m3 attends bidirectionally.*\n.*with_loss_on\(task=\['c0', 'c1', 'c2', 'c3'\]\)",
    ):
        mixed.batches(2, columns=["seq_idx"])
    causal = mixed.with_loss_on(dataset=1)
    assert np.array_equal(
        causal.batch([7], columns=["seq_idx"])["seq_idx"][0], causal.row(7).seq_idx
    )
    # one dataset has such labels, the other none
    batch = mixed.batch([7, 0], columns=["labels_2", "loss_mask_2"])
    assert (
        batch["loss_mask_2"][0].any()
        and not batch["loss_mask_2"][1].any()
        and (batch["labels_2"][1] == 1).all()
    )
    with pytest.raises(ArgumentError, match="task m0, m1, m2, m3 predicts the same position"):
        mixed.with_loss_on(dataset=0).batches(2, columns=["labels_2"])


NASTY = [
    10**400,
    -(10**400),
    1 << 64,
    -1,
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    [10**400],
    [[0, [10**400, 1]]],
    {"a": 1},
]


def places_in(value, place=()):
    """The place of each value inside a JSON value."""
    yield place
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in parts:
        yield from places_in(part, (*place, key))


def replaced_at(value, place, by):
    """A JSON value with another value at a place."""
    if not place:
        return by
    made = dict(value) if isinstance(value, dict) else list(value)
    made[place[0]] = replaced_at(value[place[0]], place[1:], by)
    return made


def test_whatever_a_mixture_says_of_shares_and_epochs_is_refused_by_name_or_read(three):
    options = [
        {"shares": [1, 2.5], "max_epochs": [1, None]},
        {"shares": [[0, [1, 2]], [30, [0.5, 1]]], "interpolate": "linear", "max_epochs": [2, 3]},
    ]
    for told in options:
        for place in places_in(told):
            for value in NASTY if place else ():
                try:
                    mixed = packprep.open_dataset(three[:2], **replaced_at(told, place, value))
                    mixed.exhausted_at(), str(mixed)
                except (ArgumentError, DatasetError):
                    pass
    for bad in ([10**400, 1], [1, 1e309], [(0, [10**400, 1])]):
        with pytest.raises(ArgumentError, match="at most 1.8e308"):
            packprep.open_dataset(three[:2], shares=bad)


@pytest.mark.long
def test_whatever_a_state_says_is_refused_by_name_or_read():
    mixed = numbered([50, 40], [1, 2], max_epochs=[None, 4])
    mixed.costs = lambda rows, attention, linear: rows.astype(float)
    for balance in (None, ("attention", 4)):
        run = mixed.batches(4, balance=balance)
        next(run)
        state = run.state_dict()
        assert sum(mixed.delivered(state)) == 4
        for place in places_in(state):
            for value in NASTY:
                for act in (mixed.batches(4, balance=balance).load_state_dict, mixed.delivered):
                    with contextlib.suppress(StateError):
                        act(replaced_at(state, place, value))


@pytest.mark.parametrize("broken", [0, 1])
def test_a_mixture_that_cannot_be_resampled_is_refused_before_its_first_batch(tmp_path, broken):
    sound = Path(__file__).parents[1] / "golden/law3/in_place/dataset"
    folders = [shutil.copytree(sound, tmp_path / str(i)) for i in range(2)]
    packprep.open_dataset(folders, shares=[1, 1]).batches(2, redraw=True)
    specials = packprep.open_dataset(sound).manifest["specials"]
    less = {role: id for role, id in specials.items() if role != "special_ids"}
    replace_in_manifest(folders[broken], specials=less)
    mixed = packprep.open_dataset(folders, shares=[1, 1])
    assert len(next(mixed.batches(2))["tokens"]) == 2
    with pytest.raises(DatasetError, match="redraw: the manifest's specials have no special_ids"):
        mixed.batches(2, redraw=True)
