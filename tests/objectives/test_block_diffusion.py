"""Block diffusion: the attention rule of BD3-LM, [x_t ; x_0] as it is rendered, and the laws of
other trainers' noise.

NeMo Automodel's own functions are asked where PACKPREP_AUTOMODEL names the folder in which
nemo_automodel is installed.
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep import open_dataset
from packprep.dataset import attention
from packprep.dataset.epochs import noise
from packprep.errors import RecipeError
from packprep.objectives.block_diffusion import OBJECTIVE, check, mean_weight
from packprep.randomness import bits64
from packprep.recipe.from_toml import presets
from tests import golden, made
from tests.dataset.test_token_slots import is_improbable
from tests.twin.check import verify_with_twin

DEFAULTS = {parameter.name: parameter.default for parameter in OBJECTIVE.parameters}


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("bd3_mask"))
def test_the_attention_rule_is_bd3_lms(name, given, expected):
    """BD3-LM's mask of 2n slots, x_t first: rows of the golden mask are queries."""
    n = given["n"]
    position, half = np.tile(np.arange(n), 2), np.repeat([0, 1], n)
    mask = attention.block_mask(np.ones(2 * n, int), position, half, given["block_size"])
    assert mask.astype(int).tolist() == expected["mask"]
    assert mask.sum() == expected["num_true"]


@given(st.integers(1, 70), st.integers(0, 2), st.integers(1, 40), st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_each_block_has_one_level_and_the_clean_half_stays(candidates, before, block_length, key):
    half = before + candidates
    tokens = np.tile(np.arange(10, 10 + half, dtype=np.uint16), 2)
    loss_mask = np.zeros(2 * half, np.uint8)
    segments = noise.Candidates(
        np.array([key], np.uint64),
        np.array([before]),
        np.array([candidates]),
        np.zeros(1, np.int64),
    )
    target = noise.Target(segments, np.array([before]), np.array([half]), None, tokens, loss_mask)
    parameters = {**DEFAULTS, "block_length": block_length}
    noised = noise.block_diffusion(0, parameters, {}, made.ids().for_noise, target, 0)
    counts, level, weight = noised.blocks.blocks.count, noised.blocks.level, noised.blocks.weight
    assert counts.tolist() == [-(-half // block_length)] == [len(level)] == [len(weight)]
    assert tokens[half:].tolist() == list(range(10, 10 + half)) and not loss_mask[half:].any()
    assert tokens[:before].tolist() == list(range(10, 10 + before)) and not loss_mask[:before].any()
    assert np.array_equal(tokens[:half] != tokens[half:], loss_mask[:half] != 0)
    assert set(tokens[:half][loss_mask[:half] != 0].tolist()) <= {259}
    assert noised.level.tolist() == [0.0] and noised.weight.tolist() == [1.0]


def test_a_level_of_one_masks_everything():
    tokens, loss_mask = np.full(20, 7, np.uint16), np.zeros(20, np.uint8)
    segments = noise.Candidates(
        np.array([5], np.uint64), np.array([1]), np.array([9]), np.zeros(1, np.int64)
    )
    target = noise.Target(segments, np.array([1]), np.array([10]), None, tokens, loss_mask)
    parameters = {**DEFAULTS, "noise_range": (1.0, 1.0), "block_length": 4}
    noised = noise.block_diffusion(0, parameters, {}, made.ids().for_noise, target, 0)
    assert loss_mask.tolist() == [0] + [1] * 9 + [0] * 10
    assert noised.blocks.level.tolist() == noised.blocks.weight.tolist() == [1.0] * 3


def test_a_range_from_0_has_no_weights():
    check(DEFAULTS, "task")
    with pytest.raises(RecipeError, match="weights are 1/level"):
        check({**DEFAULTS, "noise_range": (0.0, 0.8)}, "task")
    check({**DEFAULTS, "noise_range": (2.0**-24, 0.8)}, "task")


def test_a_masked_slot_weighs_the_inverse_of_the_mean_level():
    task = made.mix({"tasks": [{"objective": "block_diffusion", "noise_range": [0.2, 0.6]}]})[1][0]
    assert mean_weight(task) == pytest.approx(2.5)


MESSAGES = {
    "leave noise_range out": {"noise": "all", "noise_range": (0.1, 0.2)},
    "half_life requires": {"half_life": 0.5},
    "does not support noise": {"canvas": "uniform", "weighting": "none", "noise": "position"},
    "trains all tokens alike": {"canvas": "uniform"},
    "leave complementary or noise": {"complementary": True, "noise": "all"},
    "leave complementary or canvas": {
        "complementary": True,
        "canvas": "uniform",
        "weighting": "none",
    },
    "the complement of its mask would be empty": {"complementary": True, "noise_range": (1.0, 1.0)},
}


@pytest.mark.parametrize("message", MESSAGES)
def test_what_does_not_go_together_is_refused(message):
    with pytest.raises(RecipeError, match=message):
        check({**DEFAULTS, **MESSAGES[message]}, "task")


# Laws of other trainers

MASK, VOCABULARY = 99, 8
LAWS = {
    "corrupt_blockwise": {"noise": "position", "noise_range": (1e-3, 1.0)},
    "corrupt_uniform_random": {
        "canvas": "uniform",
        "weighting": "none",
        "noise_range": (1e-3, 1.0),
    },
    "corrupt_all_masked": {"noise": "all"},
}
"""Automodel's function → the law that is its."""
AUTOMODEL_0_7_0 = {
    "corrupt_blockwise": [
        49634,
        9879,
        16322,
        6713,
        27355,
        9645,
        14054,
        16539,
        46101,
        15163,
        22046,
        21726,
        32636,
        27630,
        34682,
        49875,
    ],
    "corrupt_uniform_random": [
        79736,
        19861,
        19955,
        13344,
        19807,
        13202,
        13431,
        20138,
        20062,
        13531,
        13402,
        20225,
        13163,
        20274,
        19796,
        80073,
    ],
    "ids": [100564, 99862, 100434, 100500, 100149, 100206, 99854, 99853],
}
"""Of 400,000 blocks of 4 slots, by torch's generator with seed 0: how often each pattern is noised,
slot i being 2ⁱ; and the ids of what corrupt_uniform_random, of 8 ids, noised. half_life_ratio 0.25,
eps 0.001."""


def drawn(law, keys, n, block_length, epoch=0):
    """(tokens, trained [m, n], level and weight of each slot) of segments of n slots, 0 … 7 by
    turns."""
    m, parameters = len(keys), {**DEFAULTS, **law, "block_length": block_length}
    tokens = np.resize(np.arange(n, dtype=np.int32) % VOCABULARY, m * n)
    segments = noise.Candidates(keys, np.arange(m) * n, np.full(m, n), np.arange(m))
    target = noise.Target(
        segments, np.zeros(m, int), np.full(m, n), None, tokens, np.zeros(m * n, np.uint8)
    )
    ids = noise.NoiseIds(MASK, *noise.ordinary_ids(VOCABULARY, np.zeros(0, np.int64)))
    noised = OBJECTIVE.noise(0, parameters, {}, ids, target, epoch)
    level, weight = noised.blocks[1:] if noised.blocks else noised[:2]
    slots = np.arange(n) // (block_length if noised.blocks else n)
    by_slot = (values.reshape(m, -1)[:, slots] for values in (level, weight))
    return tokens.reshape(m, n), target.loss_mask.reshape(m, n), *by_slot


def patterns(noised):
    return np.bincount(noised.reshape(-1, 4) @ (1 << np.arange(4)), minlength=16)


def differ(one, other):
    """Whether χ² says, at 10⁻⁴, that two rows of counts are of different distributions."""
    counts, kept = np.array([one, other], float), np.add(one, other) > 0
    counts = counts[:, kept]
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    freedom = counts.shape[1] - 1
    chi = ((counts - expected) ** 2 / expected).sum()
    return (chi / freedom) ** (1 / 3) > 1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))


def far(one, other):
    """Whether Kolmogorov and Smirnov say, at 10⁻⁴, that two samples are of different
    distributions."""
    every = np.sort(np.concatenate((one, other)))
    apart = [
        np.searchsorted(np.sort(values), every, "right") / len(values) for values in (one, other)
    ]
    return np.abs(apart[0] - apart[1]).max() > 2.2253 * np.sqrt(1 / len(one) + 1 / len(other))


def keys_of(m, seed):
    return bits64(np.uint64(seed), 0, np.arange(m))


@pytest.mark.long
def test_patterns_and_ids_are_those_that_automodel_0_7_0_drew():
    tokens, _, _, _ = drawn(LAWS["corrupt_blockwise"], keys_of(100_000, 1), 4, 4)
    recorded = AUTOMODEL_0_7_0["corrupt_blockwise"]
    assert not differ(patterns(tokens == MASK), recorded)
    plain, _, _, _ = drawn({"noise_range": (1e-3, 1.0)}, keys_of(100_000, 1), 4, 4)
    assert not differ(patterns(plain == MASK), AUTOMODEL_0_7_0["corrupt_uniform_random"])
    assert differ(patterns(plain == MASK), recorded), "this test can fail"
    tokens, trained, _, weight = drawn(LAWS["corrupt_uniform_random"], keys_of(100_000, 2), 4, 4)
    assert trained.all() and (weight == 1).all()
    changed = tokens[tokens != np.arange(4)]  # a draw of the token itself is not seen
    shares = np.bincount(changed, minlength=VOCABULARY)
    expected = np.array([3, 3, 3, 3, 4, 4, 4, 4]) * len(changed) / 28
    assert not is_improbable(shares, expected)
    recorded = np.array(AUTOMODEL_0_7_0["ids"])
    assert not is_improbable(recorded, np.full(8, recorded.sum() / 8))


@pytest.mark.long
def test_labels_of_the_next_slot_stand_beside_documents_that_say_what_is_trained(tmp_path):
    """Whose later pieces end with eos or not: their last label is pad, whatever their last
    token."""
    made.write_lines(tmp_path / "a.jsonl", made.texts(12, 1, 400))
    made.write(tmp_path / "b.jsonl", b'{"text": "what is trained", "loss_spans": [[0, 4]]}\n' * 3)
    sources = [
        {"name": "a", "paths": ["a.jsonl"], "tasks": ["bd"]},
        {"name": "b", "paths": ["b.jsonl"], "tasks": ["c"]},
    ]
    tasks = [
        {"name": "bd", "objective": "block_diffusion", "shift": True},
        {"name": "c", "objective": "causal"},
    ]
    made.build(made.table(sources, tasks=tasks, seq_length=128), tmp_path, tmp_path / "out")
    report = verify_with_twin(tmp_path / "out")
    assert not report["faults"], report["listed"]


def test_an_odd_epoch_masks_just_what_the_one_before_left():
    keys, law = keys_of(50, 3), {"complementary": True, "noise_range": (0.2, 0.9)}
    found = [drawn(law, keys, 37, 8, epoch) for epoch in range(4)]
    for even, odd in ((0, 1), (2, 3)):
        assert ((found[even][1] ^ found[odd][1]) == 1).all()
        assert np.allclose(found[even][2] + found[odd][2], 1) and np.allclose(
            1 / found[odd][3], found[odd][2]
        )
    assert (found[0][1] != found[2][1]).any()


@pytest.mark.parametrize("name", ["fast_dllm", "i_dlm", "diffusion_gemma", "nemotron_diffusion"])
def test_presets_read_as_their_trainers_take_them(name, tmp_path):
    """Labels of x_t are of the next slot with shift; x_0 is the text; and with the least columns
    all of it is the same."""
    made.write_lines(tmp_path / "a.jsonl", made.texts(30, mean_bytes=200))
    sets = []
    for columns in ("full", "least"):
        recipe = made.table(
            "a.jsonl", tasks=[{"preset": name}], output={"columns": columns}, seq_length=1024
        )
        made.build(recipe, tmp_path, tmp_path / columns)
        sets.append(open_dataset(tmp_path / columns))
    law = dict(presets()[name][0])
    full, least = (ds.batch(range(len(ds)), epochs=[1] * len(ds)) for ds in sets)
    assert all(np.array_equal(full[column], least[column]) for column in full)
    bytes_of = [sum(entry["bytes"] for entry in ds.manifest["shards"]) for ds in sets]
    assert bytes_of[1] <= 0.55 * bytes_of[0]
    for i in range(len(sets[0])):
        row = sets[0].row(i)
        for begin, end in zip(row.segments["begin"], row.segments["end"], strict=True):
            half, shift = (end - begin) // 2, int(law.get("shift", False))
            if row.segments["prefix"][list(row.segments["begin"]).index(begin)] >= 0:
                continue  # too short
            clean, noised = row.tokens[begin + half : end], row.tokens[begin : begin + half]
            labels, loss = (values[begin : begin + half] for values in (row.labels, row.loss_mask))
            assert (
                np.array_equal(labels[: half - shift], clean[shift:])
                and not row.loss_mask[begin + half : end].any()
            )
            if law.get("canvas") != "uniform":
                assert (
                    np.array_equal(loss[: half - shift] == 1, (noised != clean)[shift:])
                    and not loss[half - shift :].any()
                )


@pytest.mark.campaign
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("block_length, n", [(32, 96), (32, 75), (8, 30)])
def test_noise_is_distributed_as_automodel_draws_it(name, block_length, n, capsys):
    """Over 100,000 segments: how many slots of a block, which of them by level, ids, p_mask or
    weights."""
    torch = pytest.importorskip("torch")
    folder = os.environ.get("PACKPREP_AUTOMODEL")
    if not folder:
        pytest.skip("PACKPREP_AUTOMODEL names no folder with nemo_automodel")
    path = Path(folder, "nemo_automodel/components/datasets/dllm/corruption.py")
    spec = importlib.util.spec_from_file_location("corruption", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    m, generator = 100_000, torch.Generator().manual_seed(block_length + n)
    text = np.resize(np.arange(n, dtype=np.int64) % VOCABULARY, (m, n))
    given = (torch.from_numpy(text), torch.ones(m, n))
    if name == "corrupt_all_masked":
        theirs = module.corrupt_all_masked(*given, MASK)
    else:
        ids = VOCABULARY if name == "corrupt_uniform_random" else MASK
        theirs = getattr(module, name)(
            *given, ids, block_size=block_length, eps=1e-3, generator=generator
        )
    noisy, _, p = (values.numpy() for values in theirs)
    tokens, trained, level, weight = drawn(
        LAWS[name], keys_of(m, block_length + n), n, block_length
    )
    begins = np.arange(0, n, block_length)
    if name == "corrupt_all_masked":
        assert np.array_equal(noisy, tokens) and trained.all() and np.array_equal(1 / p, weight)
        return
    hit, mine = noisy != text, tokens != text
    blocks = [np.add.reduceat(values, begins, axis=1, dtype=np.int64) for values in (hit, mine)]
    for b in range(len(begins)):  # how many of a block
        assert not differ(
            *(np.bincount(counts[:, b], minlength=block_length + 1) for counts in blocks)
        )
    for low in range(4):  # which of them, by how many; each segment's first and last block
        for b, begin in ((0, 0), (len(begins) - 1, begins[-1])):
            width = min(block_length, n - begin)
            quarter = [np.minimum(counts[:, b] * 4 // (width + 1), 3) == low for counts in blocks]
            places = [
                values[own, begin : begin + width].sum(0)
                for values, own in zip((hit, mine), quarter, strict=True)
            ]
            shares = [own.sum() for own in quarter]
            for place in range(width):  # of each place, at the level of all together
                one, other = (
                    np.array([found[place], total - found[place]])
                    for found, total in zip(places, shares, strict=True)
                )
                assert not _apart(one, other, 1e-4 / width)
    changed = [
        np.bincount(values[values != text], minlength=MASK + 1) for values in (noisy, tokens)
    ]
    assert (
        not differ(*changed) if name == "corrupt_uniform_random" else (changed[0][:MASK] == 0).all()
    )
    if name == "corrupt_uniform_random":
        assert (p == 1).all() and (weight == 1).all() and trained.all()
    else:
        assert not far(p[:, 0], level[:, 0].astype(np.float64)) and not far(
            1 / p[:, -1], weight[:, -1]
        )
        assert np.array_equal(trained == 1, mine)
    with capsys.disabled():
        print(
            f"{name}, blocks of {block_length} in {n}: noised by Automodel {hit.mean():.5f}, here"
            f" {mine.mean():.5f}"
        )


def _apart(one, other, level):
    """Whether two shares, (yes, no) counts, differ at this level."""
    total = one + other
    if (total == 0).any():
        return False
    share, sizes = total[0] / total.sum(), (one.sum(), other.sum())
    z = abs(one[0] / sizes[0] - other[0] / sizes[1]) / np.sqrt(
        share * (1 - share) * (1 / sizes[0] + 1 / sizes[1])
    )
    return z > np.sqrt(-2 * np.log(level / 2))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"eos_fill": "block"}, "do not draw this task without block_origin"),
        ({"eos_fill": "block", "block_origin": "answer", "block_length": 1}, "always full"),
        (
            {"eos_fill": "block", "block_origin": "segment", "noise_eos": False},
            "noise_eos is false",
        ),
        ({"block_origin": "answer", "noise_eos": False}, "noises all trained tokens"),
        (
            {"eos_fill": "block", "block_origin": "answer", "block_length": 1 << 17},
            "up to 65,536 positions, but block_length is 131,072\nhint: reduce",
        ),
    ],
)
def test_settings_of_conversations_that_exclude_each_other(changes, message):
    with pytest.raises(RecipeError, match=message):
        check({**DEFAULTS, **changes}, "task")
