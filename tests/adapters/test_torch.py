import inspect
import json
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader

from packprep import open_dataset
from packprep.adapters.torch import BatchSampler, Rows, iterable, loader
from packprep.adapters.torch_attention import flash_varlen, sdpa_mask, varlen_causal
from packprep.dataset import attention
from packprep.errors import ArgumentError, Exhausted, StateError
from tests import made
from tests.dataset import synthetic
from tests.weights_made import TASKS, build, records

N_ROWS, STEPS = 23, 200


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """23 rows of 64 slots in three shards; each row's tokens are its own."""
    directory = tmp_path_factory.mktemp("torch") / "d"
    synthetic.make_dataset(directory, (9, 0, 14))
    return directory


@pytest.fixture(scope="module")
def in_place(tmp_path_factory):
    """Rows of all rules, block diffusion among them."""
    directory = tmp_path_factory.mktemp("torch") / "b"
    synthetic.make_dataset(directory, (12,), in_place=True, blocks=True)
    return directory


@pytest.fixture(scope="module")
def rows_of(directory):
    """batch → the numbers of its rows."""
    dataset = open_dataset(directory)
    known = {dataset.row(i).tokens.astype(np.int64).tobytes(): i for i in range(len(dataset))}
    assert len(known) == N_ROWS
    return lambda batch: [known[row.numpy().tobytes()] for row in batch["tokens"]]


def expected_rows(directory, batch_size, rank, world_size, steps, **options):
    """The rows of packprep's own loader."""
    dataset = open_dataset(directory)
    known = {dataset.row(i).tokens.tobytes(): i for i in range(len(dataset))}
    batches = dataset.batches(batch_size, rank=rank, world_size=world_size, **options)
    return [[known[row.tobytes()] for row in next(batches)["tokens"]] for _ in range(steps)]


# What a batch is


def test_a_batch_has_the_loader_s_values_in_torch_s_types(directory):
    batch = next(loader(directory, 5, seed=3))
    plain = next(
        open_dataset(directory).batches(5, seed=3, columns=[*list(plain_columns()), "prefix_ends"])
    )
    wanted = {
        "tokens": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "segment_ids": torch.int32,
    }
    wanted |= {"prefix_ends": torch.int32, "loss_mask": torch.bool}
    assert {name: batch[name].dtype for name in wanted} == wanted
    assert set(batch) == {*wanted, "n_trained", "loss_weight_sum"}
    for name in wanted:
        assert np.array_equal(batch[name].numpy(), plain[name]), name
    assert batch["n_trained"] == plain["loss_mask"].sum() == batch["loss_weight_sum"]
    torch.nn.Embedding(528, 4)(batch["tokens"] + 1)


def plain_columns():
    from packprep.dataset.loader import COLUMNS

    return COLUMNS


def test_fault_14_k_step_labels_of_a_batch_never_cross_a_segment(directory):
    batch = {name: np.asarray(values) for name, values in next(loader(directory, 8)).items()}
    ids, mask = batch["segment_ids"], batch["loss_mask"]
    for k in (1, 2, 3):
        labels = attention.next_token_labels(batch["tokens"], ids, mask, k)
        trained = 0
        for r, t in np.argwhere(labels != -100):
            assert labels[r, t] == batch["tokens"][r, t + k] and ids[r, t] == ids[r, t + k] > 0
            assert mask[r, t + k - 1]
            trained += 1
        assert trained > 50 and (k > 1 or trained == batch["n_trained"])


def test_labels_k_slots_ahead_have_their_own_masks_and_seq_idx_counts_on_through_a_flat_row(
    directory,
):
    given = {"columns": ["tokens", "labels_2", "loss_weights_2"], "ignore_index": -100}
    batch = next(loader(directory, 8, **given))
    assert (batch["labels_2"].dtype, batch["loss_mask_2"].dtype) == (torch.int64, torch.bool)
    assert batch["loss_weights_2"].dtype == torch.float32
    assert (
        torch.equal(batch["labels_2"] != -100, batch["loss_mask_2"]) and batch["loss_mask_2"].any()
    )
    plain = next(open_dataset(directory).batches(8, columns=["labels_2", "loss_mask_2"]))
    own = np.where(plain["loss_mask_2"], plain["labels_2"].astype(int), -100)
    assert np.array_equal(batch["labels_2"].numpy(), own)
    flat = next(loader(directory, 8, layout="thd", **given))
    assert torch.equal(flat["labels_2"][0], batch["labels_2"].flatten())
    causal = open_dataset(directory).with_loss_on(task="causal")
    for tail in ("segment", "drop"):
        flat = next(loader(causal, 8, layout="thd", columns=["seq_idx"], tail=tail))
        lengths = flat["cu_seqlens"].diff()
        assert torch.equal(
            flat["seq_idx"][0], torch.arange(len(lengths)).int().repeat_interleave(lengths)
        )
    with pytest.raises(ArgumentError, match="task x attends bidirectionally"):
        loader(directory, 8, columns=["seq_idx"])


def test_weights_come_where_a_task_predicts_in_place(in_place):
    batch = next(loader(in_place, 4))
    assert batch["loss_weights"].dtype == torch.float32
    assert (
        batch["loss_weight_sum"]
        == pytest.approx(float(batch["loss_weights"].sum()))
        != batch["n_trained"]
    )
    assert (batch["loss_weights"][~batch["loss_mask"]] == 0).all()


def test_columns_and_ignore_index(directory):
    batch = next(loader(directory, 4, columns=["tokens", "labels"], ignore_index=-100))
    assert set(batch) == {"tokens", "labels", "loss_mask", "n_trained", "loss_weight_sum"}
    assert torch.equal(batch["labels"] == -100, ~batch["loss_mask"])
    assert set(next(loader(directory, 4, columns=["tokens"]))) == {"tokens"}


@pytest.mark.parametrize("tail", ["segment", "drop"])
def test_thd_is_one_row_with_boundaries(directory, tail):
    wide, flat = next(loader(directory, 4)), next(loader(directory, 4, layout="thd", tail=tail))
    kept = wide["segment_ids"] > 0 if tail == "drop" else torch.ones(4, 64, dtype=torch.bool)
    for name in ("tokens", "labels", "position_ids", "loss_mask"):
        assert torch.equal(flat[name][0], wide[name][kept])
    cu_seqlens = flat["cu_seqlens"]
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0 and cu_seqlens[-1] == kept.sum()
    assert (
        flat["max_seqlen"] == int(cu_seqlens.diff().max())
        and flat["n_trained"] == wide["n_trained"]
    )


def step_of(weights):
    """A training step over one flat row whose attention knows only cu_seqlens, as a varlen kernel;
    the sum of losses."""

    def step(tokens, position_ids, labels, loss_mask, cu_seqlens):
        x = weights[tokens[0]] + position_ids[0, :, None] / 64
        slots = torch.arange(len(x), dtype=torch.int32)
        sequence = torch.searchsorted(cu_seqlens, slots, right=True)
        seen = (sequence[:, None] == sequence) & (slots[:, None] >= slots)
        x = torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3, attn_mask=seen)
        logits = x[0, 0] @ weights.T
        losses = torch.nn.functional.cross_entropy(logits, labels[0], reduction="none")
        return (losses * loss_mask[0]).sum()

    return step


def test_max_segments_gives_one_shape_one_compilation_and_the_losses_without_it(directory):
    """The last of the 12 batches of two epochs is short."""
    weights = torch.randn(528, 8, requires_grad=True)
    step, options = step_of(weights), {"layout": "thd", "seed": 1, "epochs": 2}
    names = inspect.signature(step).parameters

    def compiled():
        torch._dynamo.reset()
        count = CompileCounter()
        return torch.compile(step, backend=count, fullgraph=True, dynamic=False), count

    plain = list(loader(directory, 4, **options))
    fixed = loader(directory, 4, max_segments=12, **options)
    run, count = compiled()
    for batch, expected in zip(fixed, plain, strict=True):
        losses = [run(*(batch[n] for n in names)), step(*(expected[n] for n in names))]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, weights)[0] for loss in losses))
        ends = expected["cu_seqlens"].tolist()
        ends += range(ends[-1] + 64, 257, 64)  # Each row of padding is a segment.
        assert batch["cu_seqlens"].tolist() == ends + [256] * (49 - len(ends))
        assert batch["cu_seqlens"].dtype == torch.int32 and batch["max_seqlen"] == 64
        assert batch["n_trained"] == expected["n_trained"]
    assert count.frame_count == 1
    assert len(plain) == 12 and plain[-1]["tokens"].shape == (1, 2 * 64)
    run, count = compiled()
    for batch in plain[:4]:
        run(*(batch[n] for n in names))
    assert count.frame_count > 1


def test_max_segments_goes_with_the_other_options_of_the_layout(directory, in_place, tmp_path):
    given = {"layout": "thd", "max_segments": 20, "samples": 10, "ignore_index": -100}
    batches = list(loader(in_place, {64: 4}, num_workers=1, **given))
    expected = list(loader(in_place, 4, layout="thd", samples=10, ignore_index=-100))
    for batch, values in zip(batches, expected, strict=True):
        n = values["tokens"].shape[1]
        for name in set(values) - {"cu_seqlens", "max_seqlen", "n_trained", "loss_weight_sum"}:
            assert batch[name].shape == (1, 256) and torch.equal(batch[name][:, :n], values[name])
    assert n == 128 and (batch["labels"][0, n:] == -100).all() and batch["n_trained"] > 0
    assert not batch["segment_ids"][0, n:].any() and not batch["prefix_ends"][0, n:].any()
    # A rank without rows in the last step has a batch of padding.
    *_, last = loader(directory, 5, 1, 2, epochs=1, layout="thd", max_segments=12)
    assert last["n_trained"] == 0 and last["cu_seqlens"][:6].tolist() == [*range(0, 321, 64)]
    # Each length of a mixture has its own shape.
    synthetic.make_dataset(tmp_path, (9,), seq_length=128)
    mixture = open_dataset([directory, tmp_path], shares=[1, 1])
    shapes = {
        (batch["tokens"].shape, batch["cu_seqlens"].shape, batch["max_seqlen"])
        for batch in loader(mixture, {64: 4, 128: 2}, layout="thd", max_segments=16, samples=12)
    }
    assert shapes == {((1, 256), (65,), 64), ((1, 256), (33,), 128)}
    with pytest.raises(ArgumentError, match=r"has \d+ segments.*max_segments = 2\nhint: give max"):
        list(loader(directory, 4, layout="thd", max_segments=2, epochs=1))


def test_block_diffusion_says_its_rule_in_both_layouts(in_place):
    dataset = open_dataset(in_place)
    wide = next(loader(in_place, 12, shuffle=False))
    flat = next(loader(in_place, 12, layout="thd", shuffle=False))
    assert (wide["block_lengths"] == 4).any() and torch.equal(
        wide["prefix_ends"] == -1, wide["block_lengths"] > 0
    )
    mask, one = sdpa_mask(wide)[:, 0].numpy(), sdpa_mask(flat)[0, 0].numpy()
    for i in range(12):
        assert np.array_equal(
            one[i * 64 : (i + 1) * 64, i * 64 : (i + 1) * 64][real(wide, i)], mask[i][real(wide, i)]
        )
        row = dataset.row(i)
        for begin, end, prefix in zip(
            *(row.segments[name] for name in ("begin", "end", "prefix")), strict=True
        ):
            n = int(end - begin)
            if prefix < 0:
                half = np.arange(n) // (n // 2)
                own = attention.block_mask(np.ones(n), row.position_ids[begin:end], half, 4)
            else:
                own = attention.dense_mask(np.ones(n), np.full(n, prefix))
            assert np.array_equal(mask[i, begin:end, begin:end], own)
            assert mask[i, begin:end].sum() == own.sum()
    with pytest.raises(ArgumentError, match="block diffusion"):
        flash_varlen(flat)


def real(batch, i):
    return (batch["segment_ids"][i] > 0).numpy()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"layout": "bhsd"}, "layout is 'bhsd'"),
        ({"tail": "fold"}, "tail is 'fold'"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": "2"}, "num_workers is '2'"),
        ({"ignore_index": 5}, "ignore_index is 5, an id of the dataset"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"columns": ["token"]}, "unknown column 'token'"),
        ({"max_segments": 8}, "layout 'bshd' has no cu_seqlens"),
        ({"max_segments": 8, "layout": "thd", "tail": "drop"}, "number of slots varies"),
        ({"max_segments": 0, "layout": "thd"}, "max_segments is 0"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_at_once(directory, options, words):
    with pytest.raises(ArgumentError, match=words):
        loader(directory, 2, **options)


def test_pinned_memory_without_an_accelerator_is_refused(directory):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ArgumentError, match="needs an accelerator"):
        loader(directory, 2, pin_memory=True)


# Order and state


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("epochs", [None, 2])
def test_the_order_is_the_loader_s_with_any_number_of_workers(directory, rows_of, workers, epochs):
    for rank in range(2):
        batches = loader(directory, 4, rank, 2, seed=7, epochs=epochs, num_workers=workers)
        steps = -(-2 * N_ROWS // 8) if epochs else 20
        got = [rows_of(next(batches)) for _ in range(steps)]
        assert got == expected_rows(directory, 4, rank, 2, steps, seed=7, epochs=epochs)
        if epochs:
            assert next(batches, None) is None and batches.state_dict()["rows"] == 2 * N_ROWS


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_balanced_and_skipped_steps_are_the_loader_s_and_a_sampler_s(directory, rows_of, workers):
    options = {"rank": 1, "world_size": 2, "seed": 3, "balance": ("attention", 4), "window": 8}
    options["skip"] = [(2, 3), (17, 17)]
    expected = expected_rows(directory, 2, steps=30, **options)
    run = loader(directory, 2, num_workers=workers, **options)
    assert [rows_of(next(run)) for _ in range(14)] == expected[:14]
    again = loader(directory, 4, num_workers=workers, **{**options, "rank": 0, "world_size": 1})
    again.load_state_dict(run.state_dict())
    assert [rows_of(next(again))[2:] for _ in range(16)] == expected[14:]
    sampler = iter(BatchSampler(open_dataset(directory), 2, epochs=None, **options))
    assert [next(sampler) for _ in range(30)] == expected
    loaded = BatchSampler(open_dataset(directory), 2, epochs=2, **{**options, "skip": None})
    whole = BatchSampler(open_dataset(directory), 2, epochs=2, **options)
    start, batches = whole.state_dict(), iter(loaded)
    next(batches)
    loaded.load_state_dict(start)
    assert [*batches] == [*whole]
    with pytest.raises(StateError, match="balance"):
        loader(directory, 2, seed=3).load_state_dict(run.state_dict())


def test_redraw_noises_later_epochs_anew_whoever_makes_them(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(60))
    made.build(
        made.table("a.jsonl", tasks=[{"preset": "llada"}], seq_length=256), tmp_path, tmp_path / "d"
    )
    dataset = open_dataset(tmp_path / "d")
    n = len(dataset)
    plain = dataset.batches(n, epochs=2, redraw=True, dtype=np.int64)
    expected = [next(plain)["tokens"] for _ in range(2)]
    stored = next(dataset.batches(n, epochs=1, dtype=np.int64))["tokens"]
    assert np.array_equal(expected[0], stored) and not np.array_equal(
        np.sort(expected[1]), np.sort(stored)
    )
    for workers in (0, 2):
        batches = loader(tmp_path / "d", n, epochs=2, redraw=True, num_workers=workers)
        assert all(np.array_equal(next(batches)["tokens"].numpy(), tokens) for tokens in expected)


@pytest.mark.long
@pytest.mark.parametrize("task", ["ul2r", "t5", "prefix_lm", "fim"])
def test_epoch_3_drawn_anew_goes_on_from_and_with_workers_over_world_sizes_1_4_2(tmp_path, task):
    made.write_lines(tmp_path / "a.jsonl", made.texts(60))
    made.build(
        made.table("a.jsonl", tasks=[{"preset": task}], seq_length=256), tmp_path, tmp_path / "d"
    )
    dataset, given = open_dataset(tmp_path / "d"), {"seed": 5, "redraw": True}
    steps = (3 * len(dataset) + len(dataset) // 2) // 4
    undisturbed = loader(dataset, 2, **given)
    ahead = loader(dataset, 4, num_workers=2, **given)
    for _ in range(steps):
        next(ahead)
        next(undisturbed), next(undisturbed)
    state = ahead.state_dict()
    assert 3 * len(dataset) <= state["rows"] < 4 * len(dataset)
    for world_size, workers in ((4, {0: 2}), (2, {1: 1})):
        ranks = [
            loader(dataset, 2, r, world_size, num_workers=workers.get(r, 0), **given)
            for r in range(world_size)
        ]
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(state)))
        for rank in 2 * ranks:
            expected, got = next(undisturbed), next(rank)
            assert got.keys() == expected.keys()
            for name, values in got.items():
                assert torch.equal(torch.as_tensor(values), torch.as_tensor(expected[name]))
        state = ranks[0].state_dict()
        assert all(rank.state_dict() == state for rank in ranks)


EVERY = [20, pytest.param(1, marks=pytest.mark.campaign)]


@pytest.mark.long
@pytest.mark.parametrize("every", EVERY)
def test_kill_and_resume_at_every_step_of_200_over_world_sizes_1_4_2(directory, rows_of, every):
    """After any step of one rank, four go on; after three steps of these, two: the rows are those
    of one order."""
    order = [row for rows in expected_rows(directory, 4, 0, 1, STEPS + 40, seed=5) for row in rows]
    batches = loader(directory, 4, seed=5)
    for step in range(STEPS):
        state = json.loads(json.dumps(batches.state_dict()))
        assert (
            set(state) == {"fingerprint", "digest", "seed", "shuffle", "redraw", "rows"}
            and state["rows"] == 4 * step
        )
        if step % every:
            next(batches)
            continue
        got = []
        for world_size, batch_size, steps in ((4, 2, 3), (2, 3, 2)):
            ranks = [
                loader(directory, batch_size, r, world_size, seed=5) for r in range(world_size)
            ]
            for rank in ranks:
                rank.load_state_dict(state)
            got += [row for _ in range(steps) for rank in ranks for row in rows_of(next(rank))]
            states = [rank.state_dict() for rank in ranks]
            assert all(s == states[0] for s in states)
            state = states[-1]
        assert got == order[4 * step : 4 * step + len(got)]
        assert rows_of(next(batches)) == order[4 * step : 4 * step + 4]


@pytest.mark.long
@pytest.mark.parametrize("every", EVERY)
def test_kill_and_resume_at_every_step_of_200_from_0_to_3_workers_and_back(
    directory, rows_of, every
):
    """Workers run ahead; the state does not. From each step on, 3 workers go on without any, and
    none goes on with 3."""
    order = expected_rows(directory, 4, 0, 1, STEPS + 4, seed=6)
    ahead = loader(directory, 4, seed=6, num_workers=3)
    for step in range(STEPS):
        if step % every:
            assert rows_of(next(ahead)) == order[step]
            continue
        again = loader(directory, 4, seed=6)
        again.load_state_dict(ahead.state_dict())
        assert [rows_of(next(again)) for _ in range(2)] == order[step : step + 2]
        more = loader(directory, 4, seed=6, num_workers=3)
        more.load_state_dict(again.state_dict())
        assert rows_of(next(more)) == order[step + 2]
        assert rows_of(next(ahead)) == order[step]


def test_loader_states_and_packprep_s_own_are_the_same(directory, rows_of):
    own = open_dataset(directory).batches(4, seed=1)
    next(own)
    batches = loader(directory, 4, seed=1)
    batches.load_state_dict(own.state_dict())
    assert rows_of(next(batches)) == expected_rows(directory, 4, 0, 1, 2, seed=1)[1]
    own.load_state_dict(batches.state_dict())
    assert own.state_dict()["rows"] == 8
    with pytest.raises(StateError, match="seed is 1"):
        loader(directory, 4, seed=2).load_state_dict(own.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_s_own_chance_is_left_alone(directory, workers):
    before = torch.get_rng_state()
    next(loader(directory, 4, num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


# Mixtures


@pytest.fixture(scope="module")
def mixture(directory, in_place, tmp_path_factory):
    """Rows of three datasets that predict the next token, in place, and in blocks; most are of the
    second."""
    second = tmp_path_factory.mktemp("torch") / "c"
    synthetic.make_dataset(second, (3, 4), seed=5, in_place=True)
    return open_dataset([directory, second, in_place], shares=[0.3, 0.5, 0.2])


def test_a_mixture_has_the_columns_of_all_tasks_and_each_dataset_s_values(mixture):
    batches = loader(mixture, 10, seed=3, samples=35)
    plain = mixture.batches(10, seed=3, samples=35, columns=batches.batches.form.columns)
    wanted = {
        *plain_columns(),
        "loss_weights",
        "prefix_ends",
        "block_lengths",
        "n_trained",
        "loss_weight_sum",
    }
    in_blocks = 0
    for expected in plain:
        batch = next(batches)
        assert set(batch) == wanted and batch["n_trained"] == expected["loss_mask"].sum()
        for name, values in expected.items():
            assert np.array_equal(batch[name].numpy(), values), name
        assert torch.equal(batch["prefix_ends"] == -1, batch["block_lengths"] > 0)
        in_blocks += int((batch["block_lengths"] > 0).sum())
    assert in_blocks and next(batches, None) is None and batches.state_dict()["rows"] == 35
    flat = next(loader(mixture, 35, seed=3, layout="thd"))
    assert (flat["block_lengths"] > 0).sum() == in_blocks
    assert torch.equal(flat["prefix_ends"] == -1, flat["block_lengths"] > 0)
    rows = Rows(mixture)
    assert len(rows) == len(mixture) and np.array_equal(
        rows[25]["tokens"].numpy(), mixture[25]["tokens"]
    )


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_goes_on_at_other_ranks_and_workers(mixture, workers):
    order = np.concatenate([batch["tokens"] for batch in mixture.batches(1, seed=6, samples=61)])
    first = loader(mixture, 4, seed=6, samples=61, num_workers=2 - workers, columns=["tokens"])
    got = [next(first)["tokens"] for _ in range(3)]
    state = json.loads(json.dumps(first.state_dict()))
    assert state["rows"] == 12
    ranks = [
        loader(mixture, 3, r, 2, seed=6, samples=61, num_workers=workers, columns=["tokens"])
        for r in range(2)
    ]
    for rank in ranks:
        rank.load_state_dict(state)
    for batches in zip(*ranks, strict=True):
        got += [batch["tokens"] for batch in batches]
    assert np.array_equal(torch.cat(got).numpy(), order)
    assert [rank.state_dict()["rows"] for rank in ranks] == [61, 61]
    [*made_ahead] = DataLoader(
        iterable(mixture, 4, seed=6, samples=61), batch_size=None, num_workers=workers
    )
    assert np.array_equal(torch.cat([batch["tokens"] for batch in made_ahead]).numpy(), order)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_an_exhausted_mixture_says_so_at_the_same_step_whoever_makes_it(
    directory, in_place, workers
):
    mixed = open_dataset(
        [directory, in_place], shares=[(0, [1, 1]), (60, [1, 3])], max_epochs=[None, 3]
    )
    steps = mixed.exhausted_at(seed=2) // 6
    for rank in range(2):
        run = loader(mixed, 3, rank, 2, seed=2, num_workers=workers)
        for _ in range(steps):
            next(run)
        with pytest.raises(Exhausted, match="dataset 1 of the mixture"):
            next(run)
    sampler = iter(BatchSampler(mixed, 3, 0, 2, seed=2, epochs=None))
    assert len([next(sampler) for _ in range(steps)]) == steps
    with pytest.raises(Exhausted):
        next(sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_of_lengths_gives_the_loader_s_steps_and_goes_on_with_other_ranks(
    directory, tmp_path, workers
):
    synthetic.make_dataset(tmp_path, (9,), seq_length=128)
    mixed = open_dataset([directory, tmp_path], shares=[2, 1])
    expected = mixed.batches({64: 4, 128: 2}, 5)
    run = loader(mixed, {64: 2, 128: 1}, 1, 2, seed=5, num_workers=workers)
    for _ in range(10):
        whole = next(expected)["tokens"]
        assert np.array_equal(next(run)["tokens"], whole[len(whole) // 2 :])
    again = loader(mixed, {64: 4, 128: 2}, seed=5, layout="thd", num_workers=workers)
    again.load_state_dict(json.loads(json.dumps(run.state_dict())))
    for _ in range(5):
        assert np.array_equal(next(again)["tokens"], next(expected)["tokens"].reshape(1, -1))
    with pytest.raises(ArgumentError, match="several seq_lengths"):
        BatchSampler(mixed, 4, epochs=None)


def test_a_batch_sampler_draws_a_mixture_by_its_shares(mixture):
    rows = Rows(mixture, columns=["tokens"])
    sampler = BatchSampler(rows, 4, seed=6, samples=30)
    got = np.concatenate([batch["tokens"] for batch in DataLoader(rows, batch_sampler=sampler)])
    assert np.array_equal(
        got, np.concatenate([b["tokens"] for b in mixture.batches(4, seed=6, samples=30)])
    )
    assert sampler.state_dict()["rows"] == 30
    with pytest.raises(ArgumentError, match="give samples = N"):
        BatchSampler(rows, 4)


def test_a_mixture_s_epochs_and_a_list_of_directories_are_refused_with_what_to_do(
    mixture, directory
):
    with pytest.raises(ArgumentError, match="give samples = N"):
        loader(mixture, 4, epochs=1)
    with pytest.raises(ArgumentError, match="open the mixture first"):
        loader([directory, directory], 4)
    with pytest.raises(ArgumentError, match="which no varlen kernel supports"):
        varlen_causal(mixture)


# DataLoader and StatefulDataLoader


@pytest.mark.parametrize("workers", [0, 2])
def test_the_open_dataset_and_rows_work_under_dataloader(directory, workers):
    dataset = open_dataset(directory)
    for batch in (
        next(iter(DataLoader(Rows(directory), batch_size=3, num_workers=workers))),
        next(iter(DataLoader(dataset, batch_size=3, num_workers=workers))),
    ):
        for name in ("tokens", "labels", "loss_mask"):
            assert np.array_equal(
                batch[name].numpy(), [getattr(dataset.row(i), name) for i in range(3)]
            )
    assert Rows(directory)[-1]["tokens"].dtype == torch.int64 and len(Rows(directory)) == N_ROWS


@pytest.mark.long
def test_rows_say_block_diffusion_s_rule(in_place):
    row, batch = Rows(in_place)[5], next(loader(in_place, 12, shuffle=False))
    assert torch.equal(row["prefix_ends"], batch["prefix_ends"][5])
    assert torch.equal(row["block_lengths"], batch["block_lengths"][5])


@pytest.mark.parametrize("epochs", [1, None])
def test_a_batch_sampler_has_the_loader_s_order(directory, rows_of, epochs):
    for rank in range(2):
        sampler = BatchSampler(Rows(directory), 4, rank, 2, seed=9, epochs=epochs)
        batches = iter(DataLoader(Rows(directory), batch_sampler=sampler))
        expected = expected_rows(directory, 4, rank, 2, 3, seed=9, epochs=epochs)
        assert [rows_of(next(batches)) for _ in expected] == expected
        if epochs:
            assert next(batches, None) is None
            assert sampler.state_dict()["rows"] == N_ROWS


def stateful(dataset, **options):
    module = pytest.importorskip(
        "torchdata.stateful_dataloader",
        reason="torchdata is not installed: pip install '.[trainers]'",
    )
    return module.StatefulDataLoader(dataset, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_goes_on_exactly_with_batches(directory, rows_of, workers):
    def fresh():
        return stateful(iterable(directory, 4, 1, 2, seed=2), batch_size=None, num_workers=workers)

    order = expected_rows(directory, 4, 1, 2, 20, seed=2)
    running, run = fresh(), None
    run = iter(running)
    for step in range(10):
        assert rows_of(next(run)) == order[step]
        if step % 3 == 0:
            again = fresh()
            again.load_state_dict(running.state_dict())
            later = iter(again)
            assert [rows_of(next(later)) for _ in range(4)] == order[step + 1 : step + 5]


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_goes_on_exactly_with_rows_and_a_sampler(directory, rows_of, workers):
    def fresh():
        rows = Rows(directory)
        sampler = BatchSampler(rows, 4, seed=2, epochs=None)
        return stateful(rows, batch_sampler=sampler, num_workers=workers)

    order = expected_rows(directory, 4, 0, 1, 20, seed=2)
    running = fresh()
    run = iter(running)
    for step in range(8):
        assert rows_of(next(run)) == order[step]
        if step % 3 == 0:
            again = fresh()
            again.load_state_dict(running.state_dict())
            later = iter(again)
            assert [rows_of(next(later)) for _ in range(4)] == order[step + 1 : step + 5]


def test_another_number_of_workers_takes_the_loader_s_state(directory, rows_of):
    """torchdata refuses its own state with another number of workers; rows delivered are counted
    all the same."""
    batches = iterable(directory, 4, seed=2)
    run = iter(stateful(batches, batch_size=None, num_workers=0))
    order = [rows_of(next(run)) for _ in range(5)]
    assert order == expected_rows(directory, 4, 0, 1, 5, seed=2)
    again = iterable(directory, 4, seed=2)
    again.load_state_dict(batches.state_after(5))
    run = iter(stateful(again, batch_size=None, num_workers=3))
    assert [rows_of(next(run)) for _ in range(4)] == expected_rows(directory, 4, 0, 1, 9, seed=2)[
        5:
    ]


def test_a_worker_s_state_of_other_workers_is_refused(directory):
    steps = iter(iterable(directory, 4))
    with pytest.raises(StateError, match="workers is 3, but here it is 1"):
        steps.load_state_dict({**steps.state_dict(), "workers": 3})


def test_a_worker_s_state_of_another_dataset_is_refused_and_one_of_before_is_taken(directory):
    steps = iter(iterable(directory, 4))
    next(steps)
    state = steps.state_dict()
    again = iter(iterable(directory, 4))
    with pytest.raises(StateError, match="digest is '0000"):
        again.load_state_dict({**state, "digest": "0" * 32})
    with pytest.warns(UserWarning, match="no digest and no redraw"):
        again.load_state_dict(
            {key: value for key, value in state.items() if key not in ("digest", "redraw")}
        )
    assert again.state_dict() == state


def test_iterable_and_loader_take_the_same_options():
    given, options = (inspect.signature(function).parameters for function in (loader, iterable))
    assert list(given)[:5] == list(options)[:5]


@pytest.mark.long
def test_everyone_s_last_steps_may_be_short_and_are_as_many(tmp_path):
    synthetic.make_dataset(tmp_path, (5,))
    for workers in (0, 3):
        sizes = [
            [
                len(batch["tokens"])
                for batch in loader(tmp_path, 2, r, 4, epochs=1, num_workers=workers)
            ]
            for r in range(4)
        ]
        assert sizes == [[2], [2], [1], [0]]
    (batch,) = loader(tmp_path, 2, 3, 4, layout="thd", epochs=1)
    assert (
        batch["cu_seqlens"].tolist() == [0] and batch["max_seqlen"] == 0 and batch["n_trained"] == 0
    )


def test_weights_that_documents_give_come_without_being_asked_for(tmp_path):
    build(tmp_path, records(1, 60), [TASKS["causal"]], seq_length=64)
    batch = next(loader(tmp_path / "out", 4, shuffle=False))
    own = open_dataset(tmp_path / "out").batch(range(4), columns=["loss_weights"])["loss_weights"]
    assert np.array_equal(batch["loss_weights"].numpy(), own) and len(np.unique(own)) > 3
    assert batch["loss_weight_sum"] == pytest.approx(float(own.sum(dtype=np.float64)))
    build(tmp_path / "ones", records(1, 60, (1,)), [TASKS["causal"]], seq_length=64)
    assert "loss_weights" not in next(loader(tmp_path / "ones" / "out", 4))


def test_a_run_with_an_end_has_a_length_that_going_on_does_not_change(directory):
    """Lightning takes a batch ahead of a loader without one, and its checkpoints skip that
    batch."""
    batches = loader(directory, 4, rank=1, world_size=2, epochs=3)
    assert len(batches) == len(list(batches)) == len(DataLoader(batches.batches, batch_size=None))
    batches = loader(directory, 4, epochs=3)
    whole = len(batches)
    for _ in range(3):
        next(batches)
    again = loader(directory, 4, epochs=3)
    again.load_state_dict(batches.state_dict())
    assert len(again) == whole == 3 + len(list(again))
    with pytest.raises(TypeError, match="give epochs or samples"):
        len(loader(directory, 4))


@pytest.mark.long
def test_a_run_that_is_over_says_so_when_it_is_iterated_again(directory):
    """A loop over epochs would train the first alone."""
    rows = Rows(directory)
    for batches in (
        loader(directory, 4, epochs=1),
        DataLoader(rows, batch_sampler=BatchSampler(rows, 4)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len([*batches]) == 6
        with pytest.warns(
            UserWarning, match="all 23 rows of this run are delivered, and no batch follows"
        ):
            assert [*batches] == []


def test_processes_that_all_read_the_same_rows_are_warned(directory, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    rows = Rows(directory)
    for read in (
        lambda **o: loader(directory, 4, **o),
        lambda **o: iter(BatchSampler(rows, 4, **o)),
    ):
        with pytest.warns(
            UserWarning, match="each of the 8 processes .*\nhint: give rank and world_size"
        ):
            next(read())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            next(read(rank=3, world_size=8))
