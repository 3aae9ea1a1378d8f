"""`verify --epoch`: the rows that redraw gives keep every promise, and one that it gets wrong
breaks a promise by number."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from packprep import open_dataset
from packprep.dataset.epochs import noise, resampling, token_slots
from packprep.dataset.loader import Dataset
from packprep.dataset.rows import RowSegments
from packprep.dataset.shard import open_shard
from packprep.errors import ArgumentError
from packprep.format.json_files import shard_name
from packprep.verification import arrays as of_arrays
from packprep.verification import print_report, verify_dataset
from tests import made
from tests.command_line import inside, refused
from tests.dataset.test_noise import BLOCK_LAWS
from tests.verification.damage import copied, edit_manifest, resigned

ALL = -1
EPOCHS = (1, 2, 1_000_000, (1 << 32) - 1)
SPANS = {"objective": "span_corruption"}
ROLLED = {**SPANS, "name": "rolled", "random_roll": True, "noise_density": 0.4}
MARKED = {"name": "marked", "objective": "prefix_lm", "sentinel": True, "mode_token": "[NLU]"}
FIM = {"name": "anywhere", "objective": "fill_in_the_middle", "rate": 1.0, "mode_token": "[S2S]"}
IN_PLACE = [
    {"preset": preset} for preset in ("llada", "mdlm", "dllm", "mlm", "duo", "bd3", "causal")
]
BOS = {"documents": {"prepend_bos": True}}
BLOCKS = [
    {
        "objective": "block_diffusion",
        "block_length": 5,
        "name": f"{name}{shift}",
        "shift": shift,
        **law,
    }
    for shift in (False, True)
    for name, law in BLOCK_LAWS.items()
]
# name → (tasks, changes of the recipe, whether documents say what is trained)
KINDS = {
    "moved": ([{"preset": "ul2r"}, ROLLED, MARKED], BOS, False),
    "in_place": (IN_PLACE, {"packing": {"pad_seq_to_mult": 16}}, False),
    "supervised": (
        [SPANS, MARKED, {"objective": "prefix_lm"}, {"preset": "mlm"}, {"preset": "bd3"}],
        BOS,
        True,
    ),
    "supervised_without_eos": (
        [MARKED, {"objective": "prefix_lm"}],
        {"documents": {"append_eos": False}},
        True,
    ),
    "compact": (
        [{"preset": "t5"}, MARKED],
        {"output": {"columns": "compact", "shard_text_bytes": 20_000}},
        False,
    ),
    "ul2": ([{"preset": "ul2"}, {"preset": "bd3"}], {"documents": {"append_eos": False}}, False),
    "int32": (
        [{"preset": "ul2r"}],
        {"output": {"shard_text_bytes": 20_000, "token_dtype": "int32"}},
        False,
    ),
    "fim": ([{"preset": "fim"}, {**FIM, "text_safe": False}], BOS, False),
    "causal": ([{"preset": "causal"}], {}, False),
    "blocks": (BLOCKS, BOS, False),
    "blocks_once": (BLOCKS, {"output": {"columns": "least", "shard_text_bytes": 20_000}}, False),
}


def spans(number, text):
    """What of a document is trained: parts of it, or all, with weights or without."""
    n = len(text)
    return [
        [[n // 3, n // 2], [2 * n // 3, n]],
        [[0, n]],
        [[n // 4, n // 2, 0.25], [3 * n // 4, n, 2]],
        [[0, n // 2, 0.5], [n // 2, n, 1]],
        [[0, max(n - 1, 1)]],
    ][number % 5]


def build(kind, base):
    tasks, changes, supervised = KINDS[kind]
    made.write_lines(base / "plain.jsonl", made.texts(60, mean_bytes=400))
    sources = [{"paths": ["plain.jsonl"]}]
    if supervised:
        lines = [
            {"text": text, "loss_spans": spans(i, text)}
            for i, text in enumerate(made.texts(60, seed=5))
        ]
        (base / "chosen.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        sources.append({"paths": ["chosen.jsonl"]})
    table = made.table(sources, tasks=tasks, **{"output": {"shard_text_bytes": 20_000}, **changes})
    made.build(table, base, base / "out")
    return base / "out"


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """name of a kind → its directory, built at its first use."""
    return cache(lambda kind: build(kind, tmp_path_factory.mktemp(kind)))


def report(directory, epoch, replay=None):
    return verify_dataset(directory, replay, {}, (0, 1), 0, made.Silent(), epoch=epoch)


def broken(directory, epoch=3, replay=None):
    """The failing invariants."""
    found = report(directory, epoch, replay)
    assert all(fault["row"] is not None or fault["value"] is not None for fault in found["listed"])
    return {fault["promise"] for fault in found["listed"]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_promise_holds_in_every_epoch(datasets, kind):
    for epoch in EPOCHS:
        for replay in (None, 40, ALL):
            found = report(datasets(kind), epoch, replay)
            assert found["listed"] == [] and found["faults"] == 0 and found["epoch"] == epoch
            assert bool(found["replayed"]) == (replay is not None)


def test_what_is_verified_is_what_a_trainer_gets(datasets):
    ds = open_dataset(datasets("in_place"))
    shard = open_shard(ds.directory / shard_name(0), ds.seq_length, ds.token_dtype)
    arrays = of_arrays.arrays_in_epoch(ds, shard, 5)
    names = ["tokens", "labels", "loss_mask", "loss_weights"]
    batch = ds.batch(np.arange(shard.rows), columns=names, epochs=[5] * shard.rows)
    assert all(np.array_equal(arrays[name], batch[name]) for name in names)
    assert not np.array_equal(arrays["tokens"], shard.arrays["tokens"])
    header = [ds.row(i, epoch=5).segments for i in range(shard.rows)]
    for name in of_arrays.HEADER:
        assert np.array_equal(
            arrays[f"segment_{name}"], np.concatenate([row[name] for row in header])
        )


def test_rows_are_drawn_a_few_at_a_time(datasets, monkeypatch):
    drawn = []
    whole = Dataset.redraw

    def counted(self, segments, columns, epochs):
        drawn.append(len(segments.places))
        return whole(self, segments, columns, epochs)

    monkeypatch.setattr(Dataset, "redraw", counted)
    monkeypatch.setattr(of_arrays, "SLOTS_AT_ONCE", 3 * 512)
    found = report(datasets("in_place"), 2, ALL)
    assert found["faults"] == 0 and max(drawn) == 3 and sum(drawn) == found["rows"]


# What redraw may get wrong


def of_later_epochs(wrong):
    """A law's function that is the right one in epoch 0, and `wrong`, of what it gives, in the
    others."""

    def changed(law):
        def place(parameters, ids, segments, epoch, known):
            placed = law.place(parameters, ids, segments, epoch, known)
            return wrong(law, placed, (parameters, ids, segments), epoch) if epoch else placed

        return replace(law, place=place)

    return changed


def two_tokens_change_places(law, placed, drawn, epoch):
    token = placed.token.copy()
    token[[0, 1]] = token[[1, 0]]
    return placed._replace(token=token)


def the_last_token_and_the_first_sentinel_change_places(law, placed, drawn, epoch):
    token, special = placed.token.copy(), placed.special.copy()
    token[-1], special[-1] = special[-1], token[-1]
    return placed._replace(token=token, special=special)


def another_sentinel(law, placed, drawn, epoch):
    id = placed.id.copy()
    id[0] += 1
    return placed._replace(id=id)


def a_longer_prefix(law, placed, drawn, epoch):
    return placed._replace(prefix=placed.prefix + 1)


def another_epoch_s(law, placed, drawn, epoch):
    return law.place(*drawn, epoch + 1, np.empty(0))


def the_stored(law, placed, drawn, epoch):
    return law.place(*drawn, 0, np.empty(0))


MOVES = [
    (two_tokens_change_places, {"P17"}),
    (the_last_token_and_the_first_sentinel_change_places, {"P14"}),
    (another_sentinel, {"P14"}),
    (a_longer_prefix, {"P13"}),
    (another_epoch_s, {"P14"}),
    (the_stored, {"P14"}),
]


@pytest.mark.parametrize("wrong, promises", MOVES, ids=lambda value: getattr(value, "__name__", ""))
def test_spans_that_are_drawn_wrongly_are_seen(datasets, monkeypatch, wrong, promises):
    law = token_slots.LAYOUTS["span_corruption"]
    monkeypatch.setitem(token_slots.LAYOUTS, "span_corruption", of_later_epochs(wrong)(law))
    assert broken(datasets("moved")) == promises
    assert not report(datasets("moved"), 0)["faults"]


PIVOTS = [
    (a_longer_prefix, {"P13"}),
    (another_epoch_s, {"P13", "P14"}),
    (the_stored, {"P13", "P14"}),
]


@pytest.mark.parametrize(
    "wrong, promises", PIVOTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_pivots_that_are_drawn_wrongly_are_seen(datasets, monkeypatch, wrong, promises):
    monkeypatch.setitem(
        token_slots.LAYOUTS, "prefix_lm", of_later_epochs(wrong)(token_slots.LAYOUTS["prefix_lm"])
    )
    assert broken(datasets("compact")) == promises


def a_level_is_off(noised, target, epoch):
    level = noised.level.copy()
    level[0] += 2.0**-24
    return noised._replace(level=level)


def a_weight_is_off(noised, target, epoch):
    weight = noised.weight.copy()
    weight[0] = np.nextafter(weight[0], np.float32(9))
    return noised._replace(weight=weight)


def a_slot_is_trained_that_is_not_noised(noised, target, epoch):
    first = target.segments.at[0]
    target.loss_mask[first : first + target.segments.count[0]] = 1
    return noised


def first_trained(target):
    """The first slot of the task's that is trained."""
    slots = np.concatenate(
        [np.arange(at, at + n) for at, n in zip(*target.segments[1:3], strict=True)]
    )
    return slots[target.loss_mask[slots] != 0][0]


def a_slot_is_noised_that_is_not_trained(noised, target, epoch):
    target.loss_mask[first_trained(target)] = 0
    return noised


def a_token_is_another(noised, target, epoch):
    target.tokens[first_trained(target)] += 1
    return noised


NOISES = [
    ("masked_diffusion", a_level_is_off, {"P18"}),
    ("masked_diffusion", a_weight_is_off, {"P18"}),
    ("masked_diffusion", a_slot_is_trained_that_is_not_noised, {"P18"}),
    ("masked_diffusion", a_slot_is_noised_that_is_not_trained, {"P10", "P18"}),
    ("masked_diffusion", a_token_is_another, {"P18"}),
    ("uniform_diffusion", a_level_is_off, {"P18"}),
    ("uniform_diffusion", a_token_is_another, {"P18"}),
    ("block_diffusion", a_token_is_another, {"P18"}),
]


@pytest.mark.parametrize(
    "objective, wrong, promises", NOISES, ids=lambda value: getattr(value, "__name__", None)
)
def test_noise_that_is_drawn_wrongly_is_seen(datasets, monkeypatch, objective, wrong, promises):
    law = noise.SCHEDULES[objective]

    def draw(task, parameters, resolved, ids, target, epoch, **more):
        noised = law.draw(task, parameters, resolved, ids, target, epoch, **more)
        return wrong(noised, target, epoch) if epoch else noised

    monkeypatch.setitem(noise.SCHEDULES, objective, replace(law, draw=draw))
    assert broken(datasets("in_place")) == promises


def test_weights_of_blocks_that_are_wrong_are_seen(datasets, monkeypatch):
    law = noise.SCHEDULES["block_diffusion"]

    def draw(*arguments, **more):
        noised = law.draw(*arguments, **more)
        weight = np.roll(noised.blocks.weight, 1)
        return noised._replace(blocks=noised.blocks._replace(weight=weight))

    monkeypatch.setitem(noise.SCHEDULES, "block_diffusion", replace(law, draw=draw))
    assert broken(datasets("in_place")) == {"P18"}


@pytest.mark.parametrize("kind, promise", [("moved", "P13"), ("in_place", "P18")])
def test_rows_that_are_not_drawn_anew_are_seen(datasets, monkeypatch, kind, promise):
    monkeypatch.setattr(Dataset, "redraw", lambda self, segments, columns, epochs: None)
    assert promise in broken(datasets(kind))


@pytest.mark.parametrize(
    "name, promise", [("labels", "P10"), ("loss_mask", "P9"), ("loss_weights", "P13")]
)
def test_columns_that_do_not_follow_are_seen(datasets, monkeypatch, name, promise):
    whole = Dataset.redraw

    def without(self, segments, columns, epochs):
        if name not in columns:
            return whole(self, segments, columns, epochs)
        stored = columns[name].copy()
        whole(self, segments, columns, epochs)
        columns[name][...] = stored

    monkeypatch.setattr(Dataset, "redraw", without)
    assert promise in broken(datasets("supervised"))


def test_an_epoch_whose_segments_are_wrong_is_seen_by_replay_alone_too(datasets, monkeypatch):
    law = token_slots.LAYOUTS["span_corruption"]
    monkeypatch.setitem(
        token_slots.LAYOUTS, "span_corruption", of_later_epochs(two_tokens_change_places)(law)
    )
    found = report(datasets("moved"), 3, ALL)
    assert {fault["promise"] for fault in found["listed"]} == {"P17"}
    assert any("when rebuilt" in fault["message"] for fault in found["listed"])


def test_redraw_that_stops_breaks_a_promise(datasets, monkeypatch):
    monkeypatch.setattr(
        resampling, "_check_slots", lambda segments, which, wrong: _raise(segments, which)
    )
    found = report(datasets("moved"), 3)
    assert {fault["promise"] for fault in found["listed"]} == {"P12"}
    assert all(fault["message"].startswith("cannot be resampled: ") for fault in found["listed"])


def _raise(segments: RowSegments, which):
    raise segments.fault(0, "this is a test")


# What is stored, and what is asked for


def without_a_sentinel(arrays, sentinels):
    arrays["tokens"][tuple(np.argwhere(np.isin(arrays["tokens"], sentinels))[0])] = 7


def of_no_task(arrays, sentinels):
    arrays["segment_task"][0] = 99


@pytest.mark.parametrize("damage, promise", [(without_a_sentinel, "P14"), (of_no_task, "P11")])
def test_stored_rows_that_cannot_be_drawn_anew_break_the_promise_that_they_break_as_stored(
    datasets, tmp_path, damage, promise
):
    directory = copied(datasets("moved"), tmp_path)
    with resigned(directory, 0) as arrays:
        damage(arrays, open_dataset(directory).manifest["specials"]["sentinels"])
    assert broken(directory) == broken(directory, 0) == {promise}


def test_chance_repeats_after_two_to_the_32_epochs(datasets):
    found = report(datasets("moved"), 1 << 32, 10)
    assert found["faults"] == 0 and found["epoch"] == 1 << 32 and found["replayed"] == 10


@pytest.mark.parametrize("epoch", [-1, 1 << 63, 1.5, True, None])
def test_an_epoch_is_a_count(datasets, epoch):
    with pytest.raises(ArgumentError, match="epoch is .* and should be an integer"):
        report(datasets("moved"), epoch)


def test_a_dataset_that_cannot_be_drawn_anew_is_refused(datasets, tmp_path):
    directory = copied(datasets("moved"), tmp_path)
    edit_manifest(directory, lambda manifest: manifest["tasks"][0].update(objective="toy"))
    with pytest.raises(ArgumentError, match=r"redraw: .* \(toy\) cannot be resampled"):
        report(directory, 1)
    assert "cannot be resampled" in refused("verify", directory, "--epoch", "1")
    assert {fault["promise"] for fault in report(directory, 0)["listed"]} == {"P2"}


def test_the_command_says_the_epoch(datasets):
    said = inside("verify", datasets("compact"), "--epoch", "4", "--replay", "9", "--json")
    assert said.status == 0 and said.json["epoch"] == 4 and said.json["replayed"] == 9
    assert inside("verify", datasets("compact"), "--json").json["epoch"] == 0
    said = inside("verify", datasets("compact"), "--epoch", "1000")
    assert "every invariant holds in epoch 1,000 (" in said.out
    assert inside("verify", datasets("compact"), "--epoch", "-1").status == 2


def test_faults_of_an_epoch_are_printed_with_it(datasets, monkeypatch, capsys):
    monkeypatch.setattr(Dataset, "redraw", lambda self, segments, columns, epochs: None)
    print_report(report(datasets("in_place"), 12))
    assert " faults in epoch 12 (" in capsys.readouterr().out
