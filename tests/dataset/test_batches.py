import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packprep
from packprep.dataset import order
from packprep.errors import ArgumentError, StateError
from tests.dataset.synthetic import make_dataset
from tests.dataset.test_loader import Numbered
from tests.dataset.test_mixture import numbered

ATTENTION = ("attention", 8)


class Costly(Numbered):
    """A dataset of n rows without files, whose row i costs costs[i]."""

    def __init__(self, costs):
        super().__init__(len(costs))
        self.own = np.asarray(costs, np.float64)

    def costs(self, rows, attention=1, linear=0):
        return self.own[rows]


def documents(n, seed=0):
    """What n rows cost whose documents' lengths have a heavy tail, as those of a corpus have."""
    return np.random.default_rng(seed).pareto(1.1, n).clip(0, 30) + 0.01


def rows_of(ds, n, **options):
    return ds.batches(1, **options).rows_of_samples(np.arange(n))[0]


def unevenness(costs, world_size, batch_size):
    """float64[steps]: what the dearest rank of a step costs, over their mean."""
    whole = costs[: len(costs) // (world_size * batch_size) * world_size * batch_size]
    ranks = whole.reshape(-1, world_size, batch_size).sum(axis=2)
    return ranks.max(axis=1) / ranks.mean(axis=1)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_balanced_every_row_comes_once_an_epoch_over_ranks_restarts_and_changed_sizes(data):
    n, group = data.draw(st.integers(1, 90), "n"), data.draw(st.integers(1, 12), "group")
    options = {
        "seed": data.draw(st.integers(0, 2**64 - 1), "seed"),
        "balance": ("attention", group),
    }
    options["window"] = group * data.draw(st.integers(1, 5), "groups")
    ds, delivered, state = Costly(documents(n, group).round(1)), [], None
    for _ in range(data.draw(st.integers(1, 4), "restarts")):
        size, world = data.draw(st.integers(1, 9), "B"), data.draw(st.integers(1, 5), "W")
        ranks = [ds.batches(size, rank=r, world_size=world, **options) for r in range(world)]
        for it in ranks:
            if state is not None:
                it.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(data.draw(st.integers(0, 9), "steps")):
            for it in ranks:
                delivered += next(it)["tokens"].tolist()
        state = ranks[0].state_dict()
        assert state["rows"] == len(delivered) and state == ranks[-1].state_dict()
    assert delivered == rows_of(ds, len(delivered), **options).tolist()
    for begin in range(0, len(delivered), n):
        epoch = delivered[begin : begin + n]
        assert len(set(epoch)) == len(epoch) and (len(epoch) < n or set(epoch) == set(range(n)))


def test_ranks_of_a_balanced_step_cost_the_same_to_a_twentieth_for_every_split_of_the_group():
    ds = Costly(documents(8192))
    for world, size in ((8, 4), (4, 8), (2, 16)):
        own, plain = (ds.own[rows_of(ds, 3 * 8192, balance=b)] for b in (("attention", 32), None))
        assert np.quantile(unevenness(own, world, size), 0.99) < 1.05
        assert np.quantile(unevenness(plain, world, size), 0.5) > 1.1


def test_an_epoch_that_no_step_divides_leaves_the_later_ones_even():
    ds = Costly(documents(2048 + 13))
    costs = ds.own[rows_of(ds, 5 * len(ds), balance=("attention", 32), window=1024)]
    assert (
        unevenness(costs, 8, 4) > 1.1
    ).mean() < 0.04  # where an epoch ends, and the windows that it cuts


def test_steps_of_like_cost_come_in_no_order():
    """A runs test (Wald, Wolfowitz): how often the cost of steps crosses its median, beside the
    plain shuffle's."""
    ds = Costly(documents(32768))
    for balance in (("attention", 32), None):
        steps = ds.own[rows_of(ds, 32768, balance=balance)].reshape(-1, 32).sum(axis=1)
        above = steps > np.median(steps)
        runs, n = 1 + np.count_nonzero(above[1:] != above[:-1]), len(above)
        assert abs(runs - (1 + n / 2)) < 3 * (n / 4) ** 0.5


def test_the_order_is_one_of_seed_group_and_window():
    ds = Costly(documents(640))
    base = rows_of(ds, 640, seed=1, balance=ATTENTION)
    assert base.tolist() == rows_of(ds, 640, seed=1, balance=((1, 0), 8), window=512).tolist()
    for other in (
        {"seed": 2, "balance": ATTENTION},
        {"seed": 1, "balance": ("attention", 16), "window": 512},
        {"seed": 1, "balance": ATTENTION, "window": 64},
        {"seed": 1},
    ):
        assert (rows_of(ds, 640, **other) != base).mean() > 0.5
    plain = rows_of(ds, 640, seed=1)
    for begin in range(0, 640, 64):  # windows hold the rows of the plain shuffle
        own = rows_of(ds, 640, seed=1, balance=ATTENTION, window=64)[begin : begin + 64]
        assert sorted(own) == sorted(plain[begin : begin + 64])


def test_a_seek_in_four_billion_rows_reads_one_window():
    ds, asked = Costly([1.0]), []
    ds.n, ds.costs = (
        4 * 10**9,
        lambda rows, attention, linear: asked.append(len(rows)) or (rows % 97).astype(float),
    )
    it = ds.batches(4, seed=3, rank=5, world_size=8, balance=("attention", 32))
    it.load_state_dict({**it.state_dict(), "rows": 32 * 10**8})
    rows = next(it)["tokens"]
    assert asked == [2048]
    assert (
        rows.tolist() == it.rows_of_samples(np.arange(32 * 10**8 + 20, 32 * 10**8 + 24))[0].tolist()
    )


def test_a_state_of_another_balance_is_refused():
    ds = Costly(documents(64))
    it = ds.batches(8, balance=ATTENTION)
    next(it)
    state = it.state_dict()
    assert state["balance"] == {"attention": 1.0, "linear": 0.0, "group": 8, "window": 512}
    for other in (
        {"balance": ("attention", 16)},
        {"balance": ATTENTION, "window": 64},
        {"balance": ((1, 5), 8)},
        {},
    ):
        with pytest.raises(
            StateError, match="state's balance is .*\nhint: give the balance, window"
        ):
            ds.batches(8, **other).load_state_dict(state)
    with pytest.raises(StateError, match="state's balance is None"):
        it.load_state_dict(ds.batches(8).state_dict())


def test_a_mixture_is_balanced_over_its_datasets():
    mixed = numbered([100, 50], [2, 1])
    mixed.costs = lambda rows, attention, linear: (rows * 7 % 31).astype(float)
    plain = mixed.batches(8)
    for skip in ([(0, 1), (6, 9), (30, 30)], None):
        it, counted = mixed.batches(8, balance=ATTENTION, window=64, skip=skip), np.zeros(2, int)
        for _ in range(40):
            rows = next(it)["tokens"]
            counted += [(rows < 100).sum(), (rows >= 100).sum()]
            assert mixed.delivered(it.state_dict()) == counted.tolist()
    assert sorted(it.rows_of_samples(np.arange(64, 128))[0]) == sorted(
        plain.rows_of_samples(np.arange(64, 128))[0]
    )


@pytest.mark.parametrize("pad_to, io", [(1, "mmap"), (8, "pread")])
def test_a_row_costs_the_squares_of_its_segments(tmp_path, pad_to, io):
    make_dataset(tmp_path, pad_to=pad_to)
    ds = packprep.open_dataset(tmp_path, io=io)
    expected = [int((np.diff(ds.row(i).cu_seqlens).astype(int) ** 2).sum()) for i in range(12)]
    batch = ds.batch(range(12), columns=["row_cost", "tokens"])
    assert batch["row_cost"].dtype == np.int64 and batch["row_cost"].tolist() == expected
    assert [ds.row(i).cost for i in range(12)] == expected
    assert ds.costs(np.arange(11, -1, -1), 2, 3).tolist() == [
        2 * expected[i] + 3 * ds.row(i).n_tokens for i in range(11, -1, -1)
    ]
    with pytest.raises(ArgumentError, match="'row_cost' is uint8.* 4096"):
        ds.batch([0], columns=["row_cost"], dtype={"row_cost": np.uint8})
    mixed = packprep.open_dataset([tmp_path, tmp_path], shares=[1, 1], io=io)
    assert mixed.batch(range(24), columns=["row_cost"])["row_cost"].tolist() == expected * 2
    assert mixed.costs(np.arange(24)).tolist() == expected * 2
    batches = ds.batches(3, epochs=2, balance=("attention", 6), columns=["tokens", "row_cost"])
    assert sum(batch["row_cost"].sum() for batch in batches) == 2 * sum(expected)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"window": 64}, "window = 64 .*\nhint: also give balance"),
        ({"balance": 32}, r'balance is 32 and should be \("attention", group\)'),
        ({"balance": ("atention", 32)}, "cost of balance is 'atention'"),
        ({"balance": ((1, -1), 32)}, r"cost of balance is \(1, -1\).*at least 0"),
        ({"balance": ((0, 0), 32)}, "one is above 0"),
        ({"balance": ("attention", 0)}, "group of balance is 0 .* in 1 … 2147483647$"),
        ({"balance": ATTENTION, "window": 0}, "^window is 0 .* in 1 … 1099511627775$"),
        ({"balance": ("attention", "8")}, "group of balance is '8'"),
        (
            {"balance": ATTENTION, "window": 20},
            "window is 20 and should be a multiple of the group, 8",
        ),
        ({"balance": ATTENTION, "shuffle": False}, "shuffle=False .*\nhint: leave one out"),
    ],
)
def test_a_balance_that_cannot_be_is_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        Costly([1, 2]).batches(1, **options)


def test_the_balanced_order_is_fixed():
    """What stands here is part of the law: a change of it would repeat and skip rows of runs that
    are resumed."""
    costs = np.array([9, 4, 1, 7, 3, 8, 2, 6, 5, 0, 11, 10], float)
    assert order.balanced(costs, 6, order.Balance(1, 0, 4, 24), 5).tolist() == [
        1,
        8,
        10,
        5,
        11,
        0,
        4,
        9,
        6,
        2,
        7,
        3,
    ]


@given(st.integers(1, 48), st.integers(0, 5))
def test_neighbours_of_a_group_make_up_for_each_other(n, seed):
    costs = np.sort(documents(3 * n, seed).reshape(3, n))
    dealt = order.dealt(costs)
    assert (np.sort(dealt) == np.arange(n)).all()
    if n % 2 == 0:
        pairs = np.take_along_axis(costs, dealt, axis=1).reshape(3, -1, 2).sum(axis=2)
        assert np.allclose(
            np.sort(pairs), np.sort(costs[:, : n // 2] + costs[:, ::-1][:, : n // 2])
        )
