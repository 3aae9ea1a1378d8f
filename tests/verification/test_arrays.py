"""Flipped bits in each array: found by the digest, and, where a liar has signed again, by what the
arrays must be."""

import random

import numpy as np
import pytest

from tests.verification.damage import arrays_of, copied, faults_of, made, promises_of, resigned

FLIPS = 6


@pytest.fixture(scope="module", params=["plain", "padded"])
def dataset(request, tmp_path_factory):
    changes = {
        "plain": {},
        "padded": {"packing": {"pad_seq_to_mult": 8}, "documents": {"prepend_bos": True}},
    }
    return made(tmp_path_factory.mktemp(request.param), **changes[request.param])


def flipped(arrays, name, chance):
    """Flip one bit; gives its place, in words."""
    flat = arrays[name].reshape(-1).view(np.uint8)
    at, bit = chance.randrange(len(flat)), chance.randrange(8)
    flat[at] ^= np.uint8(1 << bit)
    return f"{name}: byte {at}, bit {bit}"


NAMES = [
    "tokens",
    "segment_ids",
    "loss_mask",
    "row_offsets",
    "segment_doc",
    "segment_start",
    "segment_key",
    "cu_seqlens",
    "cu_seqlens_padded",
    "segment_tokens",
    "segment_prefix",
    "segment_noise",
    "segment_loss_weight",
    "segment_file",
    "segment_task",
    "segment_source",
    "segment_repeat",
]


@pytest.mark.alike(17)
@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_in_each_array_is_found(dataset, name, tmp_path):
    chance = random.Random(name)
    good = arrays_of(dataset)
    assert set(good) <= set(NAMES)
    if name not in good:
        pytest.skip(f"a dataset without padding inside has no {name}")
    directory = copied(dataset, tmp_path)
    for _ in range(FLIPS):
        with resigned(directory) as arrays:
            arrays.update({key: value.copy() for key, value in good.items()})
            place = flipped(arrays, name, chance)
        # a token of the text is the source's word alone
        assert faults_of(directory, replay=-1 if name == "tokens" else None), place


@pytest.mark.long
def test_flipped_bits_anywhere_never_crash(dataset, tmp_path):
    """Twenty bits at once, signed again and replayed: every index out of a header is checked before
    it is used."""
    chance = random.Random(5)
    good = arrays_of(dataset)
    directory = copied(dataset, tmp_path)
    for _ in range(25):
        with resigned(directory) as arrays:
            arrays.update({key: value.copy() for key, value in good.items()})
            places = [
                flipped(arrays, chance.choice(sorted(good)), chance)
                for _ in range(chance.choice([1, 2, 20]))
            ]
        for replay in (-1, 5):
            assert faults_of(directory, replay) or any(
                place.startswith("tokens") for place in places
            ), places


@pytest.mark.long
def test_noise_in_whole_arrays_never_crashes(dataset, tmp_path):
    good = arrays_of(dataset)
    directory = copied(dataset, tmp_path)
    chance = np.random.default_rng(3)
    for name in sorted(good):
        with resigned(directory) as arrays:
            arrays.update({key: value.copy() for key, value in good.items()})
            flat = arrays[name].reshape(-1).view(np.uint8)
            flat[:] = chance.integers(0, 256, len(flat), np.uint8)
        assert faults_of(directory, -1), name


def test_faults_without_number_are_counted_and_few_are_listed(dataset, tmp_path):
    directory = copied(dataset, tmp_path)
    with resigned(directory) as arrays:
        arrays["loss_mask"][:] ^= 1
    faults = faults_of(directory)
    assert promises_of(faults) == {"P7", "P9"} and len(faults) == 40


def test_an_empty_shard_is_good(tmp_path):
    """More shards than a source has documents: some have no rows."""
    directory = made(tmp_path, output={"shard_text_bytes": 300})
    rows = [len(arrays_of(directory, b)["tokens"]) for b in range(40)]
    assert 0 in rows
    assert faults_of(directory) == [] and faults_of(directory, -1) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": {"algorithm": "concat"}, "tasks": [{"preset": "causal"}]},
        {
            "packing": {"algorithm": "concat"},
            "tasks": [{"preset": "prefix_lm"}],
            "documents": {"prepend_bos": True},
        },
        {"packing": {"algorithm": "next_fit"}},
        {"packing": {"algorithm": "first_fit", "max_segments_per_row": 2}},
        {"documents": {"long": "truncate"}},
        {"documents": {"long": "drop"}},
        {"documents": {"append_eos": False}},
        {"documents": {"min_tokens": 4, "max_tokens": 100}},
        {"output": {"shard_text_bytes": 12_000, "token_dtype": "int32"}},
        {"tasks": [{"preset": "ul2"}]},
        {"tasks": [{"objective": "span_corruption", "random_roll": True, "noise_density": 0.4}]},
        {"tasks": [{"preset": "ul2r"}, {"preset": "causal"}], "seq_length": 1024},
    ],
    ids=str,
)
def test_every_promise_holds_for_every_kind_of_recipe(changes, tmp_path):
    directory = made(tmp_path, **changes)
    assert (
        faults_of(directory) == []
        and faults_of(directory, -1) == []
        and faults_of(directory, 20) == []
    )


def test_every_promise_holds_for_repeats_samples_and_tasks_by_source(tmp_path):
    sources = [
        {"name": "web", "paths": ["web/*.jsonl"], "repeat": 2.5, "tasks": ["r", "x"]},
        {"name": "books", "paths": ["books.jsonl.zst"], "sample": [0.1, 0.8], "tasks": ["causal"]},
    ]
    directory = made(tmp_path, sources=sources)
    assert (
        faults_of(directory) == []
        and faults_of(directory, -1) == []
        and faults_of(directory, 20) == []
    )
