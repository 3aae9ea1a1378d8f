"""Global batches in JAX: what they hold, on which meshes, from which state; and what is refused by
name."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import packprep
from packprep import open_dataset
from packprep.dataset import attention, encoder_decoder
from packprep.dataset.rows import padding_value
from packprep.errors import ArgumentError, DatasetError, StateError
from tests import made
from tests.adapters import jax_made
from tests.adapters.jax_made import jax, jnp
from tests.dataset import synthetic
from tests.weights_made import TASKS, build, records

from packprep.adapters.jax import data_rank, dense_mask, loader, loading, masked_loss  # isort: skip

LENGTH = 64


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """23 rows of causal and prefix segments."""
    folder = tmp_path_factory.mktemp("plain")
    synthetic.make_dataset(folder, (5, 0, 18))
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """12 rows of causal, prefix, bidirectional and block-diffusion segments on multiples of 4
    slots."""
    folder = tmp_path_factory.mktemp("mixed")
    synthetic.make_dataset(folder, (12,), pad_to=4, in_place=True, blocks=True)
    return folder


@pytest.fixture(scope="module")
def in_place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in_place")
    synthetic.make_dataset(folder, (12,), in_place=True)
    return folder


def padded(batch, size, pad_id):
    """A short batch of packprep's loader, filled up."""
    filled = {}
    for name, values in batch.items():
        fill = pad_id if name in ("tokens", "labels", "labels_2") else 0
        filled[name] = np.concatenate(
            (values, np.full((size - len(values), LENGTH), fill, values.dtype))
        )
    return filled


# What a batch holds


def test_batches_are_those_of_packpreps_loader_and_the_last_is_filled_up(plain):
    dataset = packprep.open_dataset(plain)
    names = ["tokens", "labels", "segment_ids", "position_ids", "loss_mask", "prefix_ends"]
    expected = list(dataset.batches(8, seed=3, epochs=2, columns=names))
    got = list(loader(plain, batch_size=8, seed=3, epochs=2))
    assert len(got) == len(expected) == 6 and len(expected[-1]["tokens"]) == 6
    for a, b in zip(got, expected, strict=True):
        assert list(a) == names
        for name, values in padded(b, 8, dataset.pad_id).items():
            assert isinstance(a[name], jax.Array) and a[name].shape == (8, LENGTH)
            assert a[name].dtype == (bool if name == "loss_mask" else np.int32)
            assert np.array_equal(a[name], values), name
    assert not np.asarray(got[-1]["loss_mask"])[6:].any()


def test_one_compilation_serves_every_batch(plain):
    traces = []

    @jax.jit
    def step(batch):
        traces.append(1)
        return sum(values.sum() for values in batch.values())

    for batch in loader(plain, batch_size=8, epochs=1, max_segments=12):
        step(batch)
    assert traces == [1]


@pytest.mark.long
def test_chosen_columns_and_the_weights_of_what_predicts_in_place(in_place):
    dataset = packprep.open_dataset(in_place)
    [batch] = loader(dataset, batch_size=12, epochs=1, shuffle=False)
    [expected] = dataset.batches(12, epochs=1, shuffle=False, columns=["loss_weights"])
    assert np.array_equal(batch["loss_weights"], expected["loss_weights"])
    assert batch["loss_weights"].dtype == np.float32
    assert list(next(loader(dataset, batch_size=4, columns=["tokens", "loss_weights"]))) == [
        "tokens",
        "loss_weights",
    ]
    with pytest.raises(ArgumentError, match="unknown column 'token'"):
        next(loader(dataset, batch_size=4, columns=["token"]))


def test_seq_idx_and_labels_ahead_are_columns_of_the_same_shapes(plain):
    causal, names = (
        open_dataset(plain).with_loss_on(task="causal"),
        ["seq_idx", "labels_2", "loss_mask_2", "loss_weights_2"],
    )
    batches = loader(causal, batch_size=16, columns=names, epochs=1)
    for batch, expected in zip(batches, causal.batches(16, columns=names, epochs=1), strict=True):
        for name, values in padded(expected, 16, causal.pad_id).items():
            assert np.array_equal(batch[name], values), name
    assert [batch[name].dtype.name for name in names] == ["int32", "int32", "bool", "float32"]
    for directory, column, words in (
        (plain, "seq_idx", "task x attends bidirectionally, but .* seq_idx only see the past"),
        (causal, "n_trained", "unknown column 'n_trained'.* seq_idx"),
    ):
        with pytest.raises(ArgumentError, match=words):
            loader(directory, batch_size=4, columns=[column])


@pytest.mark.long
def test_balanced_and_skipped_steps_are_those_of_packpreps_loader(plain):
    options = {"seed": 5, "balance": ("attention", 4), "window": 8, "skip": [(2, 3)]}
    expected = packprep.open_dataset(plain).batches(4, columns=["tokens"], **options)
    batches = loader(plain, batch_size=4, **options)
    for _ in range(20):
        assert np.array_equal(next(batches)["tokens"], next(expected)["tokens"])
    assert batches.state_dict() == expected.state_dict()


def test_a_mixture_of_lengths_has_torch_s_batches_and_compiles_once_for_each_length(
    plain, tmp_path
):
    torch_adapter = pytest.importorskip("packprep.adapters.torch", reason="torch is not installed")
    synthetic.make_dataset(tmp_path, (9,), seq_length=128)
    mixture = packprep.open_dataset([plain, tmp_path], shares=[2, 1])
    options = {"batch_size": {64: 6, 128: 3}, "seed": 4, "samples": 9}
    batches, shapes = loader(mixture, max_segments=12, **options), []
    step = jax.jit(lambda batch: (shapes.append(batch["tokens"].shape), batch["labels"].sum()))
    expected = list(torch_adapter.loader(mixture, **options))
    assert len(expected) == 9
    for number, values in enumerate(expected):
        batch = next(batches)
        step({name: column for name, column in batch.items() if name in values or "seq" in name})
        for name in ("tokens", "labels", "segment_ids", "position_ids", "loss_mask", "prefix_ends"):
            assert np.array_equal(batch[name], values[name]), (number, name)
        assert batch["cu_seqlens"].shape == (len(values["tokens"]), 13)
        if number == 3:
            state = json.loads(json.dumps(batches.state_dict()))
    assert sorted(shapes) == [(3, 128), (6, 64)] and next(batches, None) is None
    again = loader(mixture, **options)
    again.load_state_dict(state)
    for batch, values in zip(again, expected[4:], strict=True):
        assert np.array_equal(batch["tokens"], values["tokens"])
    for given, words in (
        ({"batch_size": 4}, "rows differ in seq_length\nhint: give {64: …, 128: …}"),
        (
            {"batch_size": {64: 4, 128: 2}, "names": "maxtext", "prefix_bidirectional": False},
            "MaxText has one max_target_length\nhint: make a loader for each",
        ),
    ):
        with pytest.raises(ArgumentError, match=words):
            loader(mixture, **given)


def test_rows_that_fill_a_batch_up_belong_to_no_block():
    columns = ("tokens", "labels_2", "block_starts", "prefix_ends")
    assert [padding_value(name, 7) for name in columns] == [7, 7, -1, 0]


def test_redraw_noises_later_epochs_anew(built_in_place):
    dataset = packprep.open_dataset(built_in_place)
    size = len(dataset)
    batches = loader(
        dataset, batch_size=size, epochs=2, shuffle=False, redraw=True, columns=["tokens", "labels"]
    )
    expected = dataset.batches(
        size, epochs=2, shuffle=False, redraw=True, columns=["tokens", "labels"]
    )
    first, second = batches
    for got, values in zip((first, second), expected, strict=True):
        assert np.array_equal(got["tokens"], values["tokens"])
    assert np.array_equal(first["labels"], second["labels"]) and not np.array_equal(
        first["tokens"], second["tokens"]
    )


@pytest.mark.long
@pytest.mark.parametrize("accelerate", ["numpy", "auto"])
def test_the_middle_of_epoch_3_is_that_of_packpreps_loader_whatever_draws(tmp_path, accelerate):
    made.write_lines(tmp_path / "a.jsonl", made.texts(40))
    tasks = [{"preset": "ul2r"}, {"preset": "fim"}]
    made.build(made.table("a.jsonl", seq_length=256, tasks=tasks), tmp_path, tmp_path / "out")
    dataset = packprep.open_dataset(tmp_path / "out")
    names = ["tokens", "labels", "loss_mask", "prefix_ends"]
    expected = dataset.batches(2, seed=1, redraw=True, columns=names)
    for _ in range((7 * len(dataset) // 2) // 2):
        next(expected)
    batches = loader(dataset, batch_size=6, seed=1, redraw=True, accelerate=accelerate)
    batches.load_state_dict(json.loads(json.dumps(expected.state_dict())))
    got = next(batches)
    for part in range(3):
        for name, values in next(expected).items():
            assert np.array_equal(got[name][2 * part : 2 * part + 2], values), name


@pytest.fixture(scope="module")
def built_in_place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llada")
    made.write_lines(folder / "a.jsonl", made.texts(40))
    table = made.table("a.jsonl", seq_length=256, tasks=[{"preset": "llada"}])
    made.build(table, folder, folder / "out")
    return folder / "out"


def test_task_params_go_into_jit(plain):
    dataset = packprep.open_dataset(plain)
    assert dataset.task_params.dtype == np.float32
    density = jax.jit(lambda table, task: table[task, 1])(jnp.asarray(dataset.task_params), 1)
    assert density == np.float32(0.15)


# Mixtures


@pytest.mark.long
def test_a_mixture_s_batches_are_those_of_packpreps_loader_and_its_state_goes_on(
    plain, mixed, built_in_place
):
    mixture = packprep.open_dataset([plain, mixed], shares=[0.75, 0.25])
    options = {"seed": 3, "samples": 43}
    names = [
        "tokens",
        "labels",
        "segment_ids",
        "position_ids",
        "loss_mask",
        "loss_weights",
        "prefix_ends",
        "block_lengths",
    ]
    expected = list(mixture.batches(8, columns=names, **options))
    batches = loader(mixture, batch_size=8, attention="dense", **options)
    for values in expected[:3]:
        got = next(batches)
        assert list(got) == names and all(np.array_equal(got[name], values[name]) for name in names)
    assert any((values["block_lengths"] > 0).any() for values in expected[:3])
    again = loader(mixture, batch_size=6, attention="dense", **options)
    again.load_state_dict(json.loads(json.dumps(batches.state_dict())))
    tokens = np.concatenate([batch["tokens"] for batch in again])
    assert (
        np.array_equal(tokens[:19], np.concatenate([v["tokens"] for v in expected[3:]]))
        and len(tokens) == 24
    )
    assert (tokens[19:] == mixture.pad_id).all() and again.state_dict()["rows"] == 43
    causal = next(
        loader(mixture, batch_size=8, attention="dense", prefix_bidirectional=False, **options)
    )
    rows, _ = mixture.rows_of_samples(np.arange(8), 3, True)
    for i, number in enumerate(rows.tolist()):
        of = (row := mixture.row(number)).segments
        for begin, end, prefix, task in zip(
            of["begin"], of["end"], of["prefix"], of["task"], strict=True
        ):
            value = {"block_diffusion": -1, "prefix": begin}.get(
                row.dataset.tasks[task]["attention"], begin + prefix
            )
            assert (np.asarray(causal["prefix_ends"])[i, begin:end] == value).all()
    with pytest.raises(ArgumentError, match="splash attention does not support task"):
        loader(mixture, batch_size=8)
    with pytest.raises(ArgumentError, match="give samples = N"):
        loader(mixture, batch_size=8, attention="dense", epochs=1)
    # Each dataset's own epochs are what redraw counts.
    anew = packprep.open_dataset([built_in_place], shares=[1])
    n = 2 * len(anew)
    own = np.concatenate([b["tokens"] for b in anew.batches(n // 2, samples=n, redraw=True)])
    got = [
        b["tokens"]
        for b in loader(anew, batch_size=n // 2, samples=n, redraw=True, columns=["tokens"])
    ]
    assert np.array_equal(np.concatenate(got), own)


# Attention


def test_layouts_have_one_shape_and_leave_no_slot_out(mixed):
    batch = next(loader(mixed, batch_size=6, shuffle=False, attention="dense", max_segments=9))
    dataset = packprep.open_dataset(mixed)
    ids = np.asarray(batch["segment_ids"])
    seqlens, offsets = attention.thd(ids, 9)
    assert np.array_equal(batch["seqlens"], seqlens) and np.array_equal(batch["offsets"], offsets)
    for i in range(6):
        row = dataset.row(i)
        n = row.n_segments
        real, physical = (
            np.asarray(batch[name])[i] for name in ("cu_seqlens", "cu_seqlens_padded")
        )
        assert real.shape == physical.shape == (10,) and real.dtype == physical.dtype == np.int32
        assert real[: n + 1].tolist() == row.cu_seqlens.tolist()
        assert physical[:n].tolist() == row.segments["begin"].tolist()
        assert physical[-1] == LENGTH and (np.diff(real) <= np.diff(physical)).all()
        assert real[-1] == real[n] + LENGTH - row.segments["end"][-1] if n else real[-1] == LENGTH
        if row.cu_seqlens_padded is None:
            assert np.array_equal(real, physical)


@pytest.mark.parametrize("sharding", ["data", jax.sharding.PartitionSpec("data")])
def test_what_is_no_sharding_is_refused_with_what_would_be_one(plain, sharding):
    with pytest.raises(
        ArgumentError, match=r"should be a jax.sharding.Sharding, as NamedSharding\(mesh"
    ):
        loader(plain, sharding, batch_size=2)


def test_a_row_of_more_segments_than_max_segments_is_refused_by_its_number(plain):
    dataset = packprep.open_dataset(plain)
    counts = np.array([dataset.row(i).n_segments for i in range(len(dataset))])
    behind = np.array([(dataset.row(i).segment_ids[-1] == 0) for i in range(len(dataset))])
    need = counts + behind
    most = int(need.max()) - 1
    first = int(np.argmax(need > most))
    batches = loader(plain, batch_size=1, shuffle=False, max_segments=most)
    for _ in range(first):
        next(batches)
    with pytest.raises(ArgumentError, match=f"row {first} has {need[first]} segments.* = {most}\n"):
        next(batches)
    assert batches.state_dict()["rows"] == first  # not delivered


def test_prefixes_can_be_read_causally_while_what_predicts_in_place_sees_both_ways(mixed):
    dataset = packprep.open_dataset(mixed)
    both, causal = (
        next(
            loader(
                mixed, batch_size=12, shuffle=False, attention="dense", prefix_bidirectional=value
            )
        )
        for value in (True, False)
    )
    for i in range(12):
        row, seen = dataset.row(i), set()
        for k, (begin, end) in enumerate(
            zip(row.segments["begin"], row.segments["end"], strict=True)
        ):
            task = dataset.tasks[int(row.segments["task"][k])]
            prefix = begin + row.segments["prefix"][k]
            rule = task["attention"]
            seen.add(rule)
            expected = {"block_diffusion": (-1, -1), "prefix": (prefix, begin)}.get(
                rule, (prefix, prefix)
            )
            for batch, value in zip((both, causal), expected, strict=True):
                assert (np.asarray(batch["prefix_ends"])[i, begin:end] == value).all(), rule
                blocks = 4 if rule == "block_diffusion" else 0
                assert (np.asarray(batch["block_lengths"])[i, begin:end] == blocks).all()
        gaps = row.segment_ids == 0
        assert not np.asarray(both["prefix_ends"])[i, gaps].any()
    assert len(seen) > 1


def test_dense_mask_of_a_batch_is_the_one_of_its_rows_headers(mixed):
    dataset = packprep.open_dataset(mixed)
    batch = next(loader(mixed, batch_size=12, shuffle=False, attention="dense"))
    names = ("segment_ids", "prefix_ends", "position_ids", "block_lengths")
    mask = np.asarray(dense_mask(*(batch[name] for name in names)))[:, 0]
    for i in range(12):
        row = dataset.row(i)
        expected = np.zeros((LENGTH, LENGTH), bool)
        for k, (begin, end) in enumerate(
            zip(row.segments["begin"], row.segments["end"], strict=True)
        ):
            n, prefix = end - begin, int(row.segments["prefix"][k])
            ones = np.ones(n, int)
            if prefix < 0:
                half = np.repeat([0, 1], n // 2)
                own = attention.block_mask(ones, row.position_ids[begin:end], half, 4)
            else:
                own = attention.dense_mask(ones, attention.prefix_ends([0, n], [prefix], n))
            expected[begin:end, begin:end] = own
        real = row.segment_ids != 0
        assert np.array_equal(mask[i][real], expected[real])


def test_attention_paths_refuse_by_name_what_they_cannot_do(plain, in_place, mixed):
    for folder, options, words in [
        (
            mixed,
            {},
            (
                "splash attention does not support task 'bd3', whose attention pattern is"
                " block_diffusion\nhint: use attention='dense'"
            ),
        ),
        (
            plain,
            {"attention": "causal"},
            "causal attention does not support task 'x'.*\n.*prefix_bidirectional=False",
        ),
        (plain, {"names": "maxtext"}, "causal attention does not support task 'x'"),
        (
            in_place,
            {"attention": "causal", "prefix_bidirectional": False},
            "does not support task 'masked'.*\n.*'splash'",
        ),
        (
            in_place,
            {"names": "levanter", "attention": "splash"},
            "Levanter.*task 'masked' predicts the same position",
        ),
        (
            plain,
            {"attention": "flash"},
            "attention is 'flash' and should be one of 'causal', 'splash', 'dense'",
        ),
        (
            plain,
            {"names": "t5x"},
            "names is 't5x' and should be 'packprep', 'maxtext', 'levanter', 'seqio'",
        ),
        (
            plain,
            {"names": "levanter", "columns": ["tokens"], "attention": "splash"},
            "leave columns out",
        ),
        (plain, {"max_segments": 0}, "max_segments is 0"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            loader(folder, batch_size=4, **options)
    assert "prefix_ends" not in next(
        loader(plain, batch_size=4, attention="causal", prefix_bidirectional=False)
    )


# Names


def test_seqio_gets_an_encoder_s_and_a_decoder_s_arrays(plain, tmp_path):
    directory = made.two_sided(tmp_path)
    ds, options = open_dataset(directory), {"epochs": 2, "redraw": True, "seed": 3}
    batches = list(loader(directory, batch_size=11, names="seqio", **options))
    for given, batch in zip(
        ds.batches(11, columns=encoder_decoder.READ, **options), batches, strict=True
    ):
        assert tuple(batch) == encoder_decoder.NAMES
        for name, values in encoder_decoder.split(given).items():
            assert batch[name].shape == (11, values.shape[1]) and batch[name].dtype == values.dtype
            assert (
                np.array_equal(batch[name][: len(values)], values)
                and not batch[name][len(values) :].any()
            )
    assert 0 < len(values) < 11, "the last batch is filled up"
    assert next(loader(directory, batch_size=4))["encoder_length"] == 128
    with pytest.raises(DatasetError, match="there is no encoder_length"):
        loader(plain, batch_size=4, names="seqio")
    for given in ({"attention": "dense"}, {"prefix_bidirectional": False}, {"max_segments": 9}):
        with pytest.raises(
            ArgumentError, match="leave attention, prefix_bidirectional and max_segments out"
        ):
            loader(directory, batch_size=4, names="seqio", **given)


def test_maxtext_and_levanter_get_their_own_names(plain):
    options = {"batch_size": 4, "shuffle": False, "prefix_bidirectional": False}
    own = next(packprep.open_dataset(plain).batches(4, shuffle=False))
    batch = next(loader(plain, names="maxtext", **options))
    assert {name: values.dtype for name, values in batch.items()} == dict.fromkeys(
        [
            f"{side}{what}"
            for side in ("inputs", "targets")
            for what in ("", "_position", "_segmentation")
        ],
        np.dtype(np.int32),
    )
    assert np.array_equal(batch["inputs"], own["tokens"]) and np.array_equal(
        batch["targets"], own["labels"]
    )
    for side in ("inputs", "targets"):
        assert np.array_equal(batch[f"{side}_position"], own["position_ids"])
    assert np.array_equal(batch["inputs_segmentation"], own["segment_ids"])
    assert np.array_equal(batch["targets_segmentation"], own["segment_ids"] * own["loss_mask"])

    batch = next(loader(plain, names="levanter", max_segments=20, **options))
    layouts = ["cu_seqlens", "cu_seqlens_padded", "seqlens", "offsets"]
    assert list(batch) == ["tokens", "loss_weight", "segment_ids", "position_ids", *layouts]
    # Its target is the next slot's token.
    rolled = np.roll(own["tokens"], -1, axis=1)
    weight = np.asarray(batch["loss_weight"])
    assert (weight > 0).any() and np.array_equal(weight > 0, own["loss_mask"] == 1)
    assert np.array_equal(rolled[weight > 0], own["labels"][weight > 0])
    assert {"prefix_ends"} <= set(
        next(loader(plain, names="maxtext", attention="splash", batch_size=4))
    )


def in_place_dataset(folder, task, mult=1, min_tokens=3):
    made.write_lines(folder / "a.jsonl", made.texts(90, mean_bytes=30))
    documents = {"min_tokens": min_tokens}
    packing = {"pad_seq_to_mult": mult}
    table = made.table(
        "a.jsonl", tasks=[task], seq_length=LENGTH, documents=documents, packing=packing
    )
    made.build(table, folder, folder / "out")
    return open_dataset(folder / "out")


BLOCKS = {"name": "bd3", "objective": "block_diffusion", "block_length": 4}


def test_maxtext_gets_both_masks_of_what_predicts_in_place_and_its_segments(tmp_path):
    dataset = in_place_dataset(tmp_path, {"preset": "dllm"})
    [batch] = loader(dataset, batch_size=len(dataset) + 1, shuffle=False, epochs=1, names="maxtext")
    own = dataset.batch(range(len(dataset)))
    columns = ["tokens", "labels", "position_ids", "segment_ids", "loss_mask"]
    own = {name: padded(own, len(dataset) + 1, dataset.pad_id)[name] for name in columns}
    noised = (own["tokens"] != own["labels"]) & (own["segment_ids"] > 0)
    expected = {
        "inputs": own["tokens"],
        "inputs_position": own["position_ids"],
        "inputs_segmentation": own["segment_ids"],
        "targets": own["labels"],
        "targets_position": own["position_ids"],
        "targets_segmentation": own["segment_ids"],
        "corruption_mask": noised,
        "targets_loss_mask": own["loss_mask"],
    }
    assert set(batch) == set(expected) and noised.any() and (own["segment_ids"] == 0).any()
    for name, values in expected.items():
        assert batch[name].dtype == np.int32 and np.array_equal(batch[name], values), name


def test_maxtext_gets_the_noised_copies_alone_whose_blocks_lie_where_it_counts_them(tmp_path):
    dataset = in_place_dataset(tmp_path, BLOCKS, mult=8)
    [batch] = loader(
        dataset,
        batch_size=len(dataset),
        shuffle=False,
        epochs=1,
        names="maxtext",
        loss_weights="ignore",
    )
    batch = {name: np.asarray(values) for name, values in batch.items()}
    halves, many = 0, 0
    for i, own in enumerate(map(dataset.row, range(len(dataset)))):
        blocks = np.arange(LENGTH // 2) // 4
        ids = batch["inputs_segmentation"][i]
        seen = (blocks[:, None] >= blocks) & (ids[:, None] == ids)  # as MaxText makes its mask
        many += len(own.segments) > 1
        for number, (begin, n) in enumerate(
            zip(own.segments["begin"], np.diff(own.cu_seqlens) // 2, strict=True), 1
        ):
            at, there = ids == number, slice(begin, begin + n)
            assert np.array_equal(batch["inputs"][i][at], own.tokens[there])
            assert np.array_equal(batch["targets"][i][at], own.labels[there])
            assert np.array_equal(batch["targets"][i][at], own.tokens[begin + n : begin + 2 * n])
            assert np.array_equal(batch["targets_loss_mask"][i][at], own.loss_mask[there])
            assert np.array_equal(batch["inputs_position"][i][at], np.arange(n))
            alone = np.arange(n) // 4
            assert np.array_equal(seen[np.ix_(at, at)], alone[:, None] >= alone)
            assert not seen[np.ix_(at, ~at)].any()
            halves += n
    assert halves == (batch["inputs_segmentation"] > 0).sum() and many
    assert np.array_equal(batch["corruption_mask"], batch["targets_loss_mask"])
    trained = dataset.batch(range(len(dataset)), columns=["loss_mask"])["loss_mask"].sum()
    assert batch["targets_loss_mask"].sum() == trained > 0


@pytest.mark.parametrize(
    "task, mult, options, words",
    [
        (BLOCKS, 8, {}, "task 'bd3' weights its loss, which MaxText's loss does not read"),
        (
            BLOCKS,
            4,
            {"loss_weights": "ignore"},
            "start at multiples of 4\nhint: build with packing.pad_seq_to_mult = 8",
        ),
        ({"preset": "llada"}, 1, {}, "task 'llada' weights its loss"),
        ({"preset": "dllm"}, 1, {"loss_weights": "no"}, "loss_weights is 'no'"),
        ({"preset": "fast_dllm"}, 64, {}, "has shift, but MaxText shifts itself"),
    ],
)
def test_what_maxtext_would_pass_over_is_refused(tmp_path, task, mult, options, words):
    with pytest.raises(ArgumentError, match=words):
        loader(in_place_dataset(tmp_path, task, mult), batch_size=1, names="maxtext", **options)


def test_maxtext_s_one_objective_and_one_block_size_are_held(mixed, plain, tmp_path):
    with pytest.raises(ArgumentError, match="predicts the same position and task .* does not"):
        loader(mixed, batch_size=1, names="maxtext", loss_weights="ignore")
    with pytest.raises(
        ArgumentError, match="'too_short' does not, .*\n.* by documents.min_tokens = 3"
    ):
        loader(
            in_place_dataset(tmp_path, {"preset": "dllm"}, min_tokens=1),
            batch_size=1,
            names="maxtext",
        )
    (tmp_path / "blocks").mkdir()
    (tmp_path / "whole").mkdir()
    both = [
        in_place_dataset(tmp_path / "blocks", BLOCKS, 8),
        in_place_dataset(tmp_path / "whole", {"preset": "dllm"}),
    ]
    with pytest.raises(ArgumentError, match=r"blocks of 4 tokens \(bd3\), 64 tokens \(dllm\)"):
        loader(
            open_dataset([each.directory for each in both], shares=[1, 1]),
            batch_size=1,
            names="maxtext",
            loss_weights="ignore",
        )


# State


def test_a_state_goes_on_exactly_at_another_batch_size(plain):
    expected = [
        row
        for batch in loader(plain, batch_size=1, seed=5, epochs=3)
        for row in np.asarray(batch["tokens"])
    ]
    got, batches = [], loader(plain, batch_size=4, seed=5, epochs=3)
    for size in (4, 8, 1, 16):
        state = json.loads(json.dumps(batches.state_dict()))
        batches = loader(plain, batch_size=size, seed=5, epochs=3)
        batches.load_state_dict(state)
        got += [row for _ in range(2) for row in np.asarray(next(batches)["tokens"])]
    assert batches.state_dict()["rows"] == len(got) == 58
    assert np.array_equal(got, expected[:58])
    rest = [np.asarray(batch["tokens"]) for batch in batches]
    assert len(rest) == 1 and batches.state_dict()["rows"] == 69
    assert np.array_equal(rest[0][:11], expected[58:])
    plain_loader = packprep.open_dataset(plain).batches(3, seed=5)
    plain_loader.load_state_dict(batches.state_dict())  # one state for all loaders
    with pytest.raises(StateError, match="seed"):
        loader(plain, batch_size=4, seed=6).load_state_dict(state)


# Devices


@pytest.mark.long
def test_arrays_lie_where_the_rows_were_read(plain, monkeypatch):
    """On one CPU device nothing is copied, and no two batches share memory."""
    where, own = [], loading.aligned

    def noted(shape, dtype):
        array = own(shape, dtype)
        where.append(array.ctypes.data)
        assert array.ctypes.data % 64 == 0
        return array

    monkeypatch.setattr(loading, "aligned", noted)
    kept = [next_batch for next_batch in loader(plain, batch_size=4, epochs=1, max_segments=12)]
    lie = [
        array.addressable_data(0).unsafe_buffer_pointer()
        for batch in kept
        for array in batch.values()
    ]
    assert set(lie) <= set(where) and len(set(lie)) == len(lie)


def test_what_was_delivered_does_not_change_later(plain):
    batches = loader(plain, batch_size=4)
    kept = [next(batches) for _ in range(12)]
    copies = [{name: np.array(values) for name, values in batch.items()} for batch in kept]
    for _ in range(24):
        next(batches)
    for batch, copy in zip(kept, copies, strict=True):
        for name, values in batch.items():
            assert np.array_equal(values, copy[name])


def sharding_of(*held):
    """As much of a sharding as data_rank asks for: the rows of this process' devices."""
    return SimpleNamespace(
        addressable_devices_indices_map=lambda _: {
            i: (rows, slice(None)) for i, rows in enumerate(held)
        }
    )


def test_data_rank_is_the_share_of_rows_that_this_process_holds():
    s = slice
    for held, expected in [
        ((s(None),), (0, 1)),
        ((s(0, 4), s(4, 8)), (0, 2)),
        ((s(12, 16), s(8, 12), s(8, 12)), (1, 2)),
        ((s(4, 8), s(4, 8)), (1, 4)),
    ]:
        assert data_rank(sharding_of(*held), (16, 8)) == expected
    for held, words in [
        ((s(0, 4), s(8, 12)), r"rows 0 … 3 and then row 8 of 16\nhint: order the mesh"),
        ((s(4, 8), s(8, 12)), r"rows \[4, 12\) of 16, which is not an equal share"),
        ((s(0, 10),), r"rows \[0, 10\) of 16, which is not an equal share"),
        ((), "no device of this process"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            data_rank(sharding_of(*held), (16, 8))


MESHES = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, Mesh
import packprep
from packprep.adapters.jax import loader
from packprep.errors import ArgumentError
folder = sys.argv[1]
devices = np.array(jax.devices())
assert len(devices) == 8
own = [next(packprep.open_dataset(folder).batches(16, seed=1))]
for shape, axes, spec in [
    ((8,), ("data",), P("data")),
    ((8,), ("data",), P("data", None)),
    ((4, 2), ("data", "tensor"), P("data")),
    ((2, 2, 2), ("data", "fsdp", "tensor"), P(("data", "fsdp"))),
    ((2, 2, 2), ("data", "fsdp", "sequence"), P(("data", "fsdp"), "sequence")),
    ((8,), ("data",), P()),
    ((2, 4), ("data", "tensor"), P("tensor")),
]:
    sharding = NamedSharding(Mesh(devices.reshape(shape), axes), spec)
    batches = loader(folder, sharding, batch_size=16, seed=1, max_segments=12)
    assert (batches.rank, batches.world_size) == (0, 1)
    batch = next(batches)
    for name, values in own[0].items():
        assert np.array_equal(batch[name], values), (name, spec)
        assert batch[name].sharding.is_equivalent_to(sharding, 2)
    assert batch["cu_seqlens"].shape == (16, 13)
    assert jax.jit(lambda b: b["tokens"].sum())(batch) == own[0]["tokens"].sum()
sharding = NamedSharding(Mesh(devices, ("data",)), P("data"))
try:
    loader(folder, sharding, batch_size=12)
except ArgumentError as error:
    assert "does not fit a batch of [12, 64]" in str(error)
    print("good")
"""


@pytest.mark.long
def test_meshes_of_eight_devices_get_the_rows_of_packpreps_loader(plain):
    environment = made.environment(
        JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8"
    )
    done = subprocess.run(
        [sys.executable, "-c", MESHES, str(plain)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "good\n", done.stderr


PROCESSES = """
import sys
import jax, numpy as np
folder, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
from jax.sharding import NamedSharding, PartitionSpec as P, Mesh
import packprep
from packprep.adapters.jax import loader
from packprep.errors import ArgumentError
devices = np.array(jax.devices())
assert len(devices) == 4 and jax.process_count() == 2
dataset = packprep.open_dataset(folder)
own = list(dataset.batches(8, seed=2, epochs=1))
for shape, spec, expected in [
    ((4, 1), P("data"), (index, 2)),           # rows over all devices
    ((2, 2), P("data"), (index, 2)),           # each process a replica group of its own rows
    ((2, 2), P("tensor"), (0, 1)),             # rows inside a process: the processes are replicas
    ((2, 2), P("data", "tensor"), (index, 2)), # slots cut too
]:
    sharding = NamedSharding(Mesh(devices.reshape(shape), ("data", "tensor")), spec)
    batches = loader(dataset, sharding, batch_size=8, seed=2, epochs=1, max_segments=12)
    assert (batches.rank, batches.world_size) == expected
    n = 0
    for batch, values in zip(batches, own, strict=True):
        short = len(values["tokens"])
        for shard in batch["tokens"].addressable_shards:
            rows = np.full((8, 64), dataset.pad_id)
            rows[:short] = values["tokens"]
            assert np.array_equal(shard.data, rows[shard.index])
        assert batch["tokens"].shape == (8, 64) and batch["cu_seqlens"].shape == (8, 13)
        n += 1
    assert n == 3 and batches.state_dict()["rows"] == 23
apart = NamedSharding(Mesh(devices[[0, 2, 1, 3]], ("data",)), P("data"))
try:
    loader(dataset, apart, batch_size=8)
except ArgumentError as error:
    assert "order the mesh" in str(error)
try:
    loader(dataset, batch_size=8)
except ArgumentError as error:
    assert "2 processes need a sharding" in str(error)
    print("good")
"""


@pytest.mark.long
def test_two_processes_read_their_own_halves_and_make_one_array(plain):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = made.environment(
        JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESSES, str(plain), port, str(i)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for process in running:
            out, errors = process.communicate(timeout=120)
            assert out == "good\n", errors
    finally:
        for process in running:
            process.kill()


def test_without_jax_the_extra_to_install_is_named():
    done = made.run_python("import sys; sys.modules['jax'] = None; import packprep.adapters.jax")
    assert done.returncode == 1 and "pip install 'packprep[jax]'" in done.stderr


# The loss


def made_slots():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 7, 11)).astype(np.float32) * 4
    labels, mask = rng.integers(0, 11, (3, 7)), rng.integers(0, 2, (3, 7)).astype(bool)
    return logits, labels, mask, rng.random((3, 7)).astype(np.float32)


def test_it_is_the_sum_of_the_trained_slots_cross_entropies():
    logits, labels, mask, weights = made_slots()
    total = weighted = 0.0
    for b, t in zip(*np.nonzero(mask), strict=True):
        row = logits[b, t].astype(np.float64)
        loss = np.log(np.exp(row).sum()) - row[labels[b, t]]
        total, weighted = total + loss, weighted + loss * weights[b, t]
    got, trained = masked_loss(logits, labels, mask)
    assert got.dtype == np.float32 and np.isclose(got, total, rtol=1e-6) and trained == mask.sum()
    assert np.isclose(
        masked_loss(logits, labels, mask.astype(np.uint8), weights)[0], weighted, rtol=1e-6
    )
    assert masked_loss(logits.astype(jnp.bfloat16), labels, mask)[0].dtype == np.float32


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_fault_29_nan_where_nothing_is_trained_reaches_neither_the_loss_nor_its_gradient(value):
    logits, labels, mask, weights = made_slots()
    loss = jax.value_and_grad(lambda logits: masked_loss(logits, labels, mask, weights)[0])
    expected, expected_gradient = loss(logits)
    logits[~mask] = value
    got, gradient = loss(logits)
    assert got == expected and np.array_equal(gradient, expected_gradient)
    assert not np.asarray(gradient)[~mask].any()
    nothing, trained = masked_loss(np.full_like(logits, value), labels, np.zeros_like(mask))
    assert nothing == 0 and trained == 0


@pytest.mark.long
def test_fault_29_a_model_whose_outputs_at_padding_are_nan_has_a_finite_loss_and_gradients():
    row = jax_made.packed(128, [("prefix", 40, 0), ("causal", 30, 0)])
    columns, weights = jax_made.batch([row]), jax_made.parameters(1, 1)
    real = columns["segment_ids"] != 0

    def loss(weights, padding):
        def attend(query, key, value):
            mask = dense_mask(columns["segment_ids"], columns["prefix_ends"])
            return jax.nn.dot_product_attention(query, key, value, mask=mask)

        logits = jnp.where(real[..., None], jax_made.decoder(weights, columns, attend), padding)
        return masked_loss(logits, columns["labels"], columns["loss_mask"])[0]

    got, gradients = jax.value_and_grad(loss)(weights, np.nan)
    expected, expected_gradients = jax.value_and_grad(loss)(weights, 0.0)
    assert np.isfinite(got) and got == expected
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert np.isfinite(a).all() and np.array_equal(a, b)


def test_weights_that_documents_give_come_without_being_asked_for_and_are_refused_for_maxtext(
    tmp_path,
):
    build(tmp_path, records(1, 60), [TASKS["causal"]], seq_length=64)
    own = open_dataset(tmp_path / "out").batch(range(4), columns=["loss_weights"])["loss_weights"]
    for names, name in (("packprep", "loss_weights"), ("levanter", "loss_weight")):
        batch = next(loader(tmp_path / "out", batch_size=4, shuffle=False, names=names))
        assert np.array_equal(np.asarray(batch[name]), own)
    with pytest.raises(ArgumentError, match="documents of this dataset have loss weights"):
        loader(tmp_path / "out", batch_size=4, names="maxtext")
