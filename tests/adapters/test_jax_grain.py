"""packprep's rows and batches in Grain, with Grain's own checkpoints."""

import json

import numpy as np
import pytest

import packprep
from packprep.adapters import default_columns
from packprep.dataset.loader import COLUMNS
from packprep.errors import ArgumentError, StateError
from tests.adapters import jax_made  # noqa: F401
from tests.dataset import synthetic

grain = pytest.importorskip(
    "grain", reason="Grain is not installed: pip install 'packprep[trainers]'"
)
from packprep.adapters.jax.grain_source import grain_batches


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    synthetic.make_dataset(folder, (5, 0, 18))
    return folder


def same(a, b):
    return set(a) == set(b) and all(np.array_equal(a[name], b[name]) for name in a)


def test_batches_are_those_of_packpreps_loader(directory):
    dataset = packprep.open_dataset(directory)
    options = {"seed": 4, "rank": 1, "world_size": 2, "epochs": 2}
    batches = grain_batches(directory, 4, **options)
    for _ in range(2):  # each iterator begins anew
        got = list(batches)
        assert len(got) == 6
        expected = dataset.batches(4, **options, columns=default_columns(dataset))
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    sums = [int(total) for total in batches.map(lambda batch: batch["loss_mask"].sum())]
    assert sums == [int(batch["loss_mask"].sum()) for batch in got]


def test_state_goes_on_exactly_through_grains_transformations_and_at_another_batch_size(directory):
    whole = [
        row
        for batch in packprep.open_dataset(directory).batches(1, seed=9, epochs=2)
        for row in batch["tokens"]
    ]
    iterator = iter(grain_batches(directory, 4, seed=9, epochs=2))
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state["rows"] == 12
    other = iter(grain_batches(directory, 5, seed=9, epochs=2))
    other.set_state(state)
    assert np.array_equal([row for batch in other for row in batch["tokens"]], whole[12:])
    with pytest.raises(StateError, match="seed"):
        iter(grain_batches(directory, 4, seed=8)).set_state(state)

    tokens = iter(grain_batches(directory, 4, seed=9, epochs=2).map(lambda batch: batch["tokens"]))
    for _ in range(3):
        next(tokens)
    state = tokens.get_state()
    rest = list(tokens)
    tokens.set_state(state)
    assert all(np.array_equal(a, b) for a, b in zip(tokens, rest, strict=True))


def test_grains_checkpoint_handler_saves_and_restores_it(directory, tmp_path):
    from etils import epath
    from grain.python import PyGrainCheckpointHandler

    iterator = iter(grain_batches(directory, 4, seed=1))
    for _ in range(7):
        next(iterator)
    PyGrainCheckpointHandler().save(epath.Path(tmp_path), iterator)
    expected = next(iterator)
    restored = PyGrainCheckpointHandler().restore(
        epath.Path(tmp_path), iter(grain_batches(directory, 4, seed=1))
    )
    assert same(next(restored), expected)


def test_a_dataset_is_a_random_access_source_for_grains_own_loader(directory):
    dataset = packprep.open_dataset(directory)
    sampler = grain.samplers.IndexSampler(len(dataset), shuffle=True, seed=3, num_epochs=1)
    loader = grain.DataLoader(data_source=dataset, sampler=sampler, worker_count=0)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = iterator.get_state()
    rest = list(iterator)
    assert len(rest) == len(dataset) - 5
    iterator = iter(loader)
    iterator.set_state(state)
    assert all(same(a, b) for a, b in zip(iterator, rest, strict=True))
    in_order = grain.MapDataset.source(dataset).batch(4)
    assert same(in_order[0], dataset.batch([0, 1, 2, 3]))


def test_arguments_are_refused_where_they_are_given(directory):
    with pytest.raises(ArgumentError, match="batch_size"):
        grain_batches(directory, 0)
    with pytest.raises(ArgumentError, match="rank"):
        grain_batches(directory, 4, rank=2, world_size=2)


@pytest.mark.long
def test_a_mixture_s_batches_come_by_its_shares(directory):
    mixture = packprep.open_dataset([directory, directory], shares=[2, 1])
    got = list(grain_batches(mixture, 4, seed=2, samples=10))
    assert len(got) == 3
    expected = mixture.batches(4, seed=2, samples=10, columns=default_columns(mixture))
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.long
def test_batches_say_what_sees_ahead_and_what_is_weighted_without_being_asked(directory, tmp_path):
    """A loop that is not given prefix_ends or loss_weights would train prefixes causally, and all
    slots alike."""
    assert {*next(iter(grain_batches(directory, 2)))} == {*COLUMNS, "prefix_ends"}
    synthetic.make_dataset(tmp_path, (4,), in_place=True, blocks=True)
    assert {"prefix_ends", "loss_weights", "block_lengths"} <= {
        *next(iter(grain_batches(tmp_path, 2)))
    }
    assert {*next(iter(grain_batches(tmp_path, 2, columns=["tokens"])))} == {"tokens"}
