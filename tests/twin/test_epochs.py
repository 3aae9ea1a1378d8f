"""The twin draws the rows of every epoch by itself, and gets what the loader's redraw gives."""

import json
import random

import numpy as np
import pytest

from packprep import open_dataset
from packprep.dataset.loader import Dataset
from packprep.recipe.from_toml import presets
from tests import made
from tests.twin import chance
from tests.twin.check import verify_with_twin
from tests.twin.objectives import fill_in_the_middle, prefix_lm, span_corruption
from tests.twin.shards_made import ALL, CAUSAL, TEMPLATE, built
from tests.verification.test_epochs import BLOCKS

EPOCHS = (1, 2, 1_000_000)
LAST = (1 << 32) - 1


def report(directory, epoch, replay=ALL):
    return verify_with_twin(directory, replay, epoch=epoch)


def holds(directory, epochs=EPOCHS, replay=ALL):
    for epoch in epochs:
        found = report(directory, epoch, replay)
        assert [fault["message"] for fault in found["listed"]] == [] and found["faults"] == 0
        assert found["twin"] == found["replayed"] > 0


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory):
    return built(
        tmp_path_factory.mktemp("every_kind"), documents={"prepend_bos": True}, seq_length=192
    )


@pytest.mark.parametrize(
    "epochs", [(1, LAST), pytest.param((2, 1_000_000), marks=pytest.mark.campaign)]
)
def test_every_kind_of_task(every_kind, epochs):
    holds(every_kind, epochs)


@pytest.mark.long
def test_some_segments_of_every_kind_of_task(every_kind):
    holds(every_kind, (3,), 40)


@pytest.mark.long
@pytest.mark.parametrize("columns", ["full", pytest.param("least", marks=pytest.mark.long)])
def test_every_law_of_blocks(tmp_path, columns):
    output = {"columns": columns, "shard_text_bytes": 20_000}
    holds(
        built(
            tmp_path, tasks=BLOCKS, documents={"prepend_bos": True}, seq_length=192, output=output
        ),
        (0, 1, 2),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "preset, append_eos",
    [  # each preset with one of the ends; a campaign has the others
        pytest.param(preset, end, marks=() if i % len(made.ENDS) == k else pytest.mark.campaign)
        for i, preset in enumerate(presets())
        for k, end in enumerate(made.ENDS)
    ],
)
def test_every_preset(tmp_path, preset, append_eos):
    made.write_lines(tmp_path / "a.jsonl", made.texts(40, 7, mean_bytes=400))
    tasks = [{"preset": preset}]
    recipe = made.table(
        "a.jsonl", tasks=tasks, documents={"append_eos": append_eos}, seq_length=200
    )
    made.build(recipe, tmp_path, tmp_path / "out")
    holds(tmp_path / "out", EPOCHS if append_eos is True else (2,))


@pytest.mark.long
@pytest.mark.parametrize("epochs", [(2,), pytest.param((1, 1_000_000), marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "changes",
    [
        {"packing": {"algorithm": "first_fit", "pad_seq_to_mult": 8}},
        {"documents": {"long": "truncate", "append_eos": False, "min_tokens": 40}},
        {
            "packing": {"algorithm": "concat", "max_segments_per_row": 5},
            "documents": {"prepend_bos": True},
            "tasks": [{"preset": "llada"}, CAUSAL, {"preset": "prefix_lm"}],
        },
        {"seq_length": 16},
        {"output": {"columns": "compact", "shard_text_bytes": 15_000, "token_dtype": "int32"}},
    ],
    ids=["padded", "truncate", "concat", "short", "compact"],
)
def test_every_rule_of_cutting_and_packing(tmp_path, changes, epochs):
    holds(built(tmp_path, **changes), epochs)


@pytest.mark.long
@pytest.mark.parametrize("weights", [False, True])
def test_documents_that_say_what_is_trained(tmp_path, weights):
    draws, lines = random.Random(8), []
    for i in range(90):
        text = " ".join(
            draws.choice(["two", "and", "wörter", "so"]) for _ in range(draws.randint(1, 60))
        )
        n = len(text)
        spans = [[[n // 3, n // 2], [3 * n // 4, n]], [[0, n]], [[0, n // 2, 1], [n // 2, n, 0.5]]][
            i % (2 + weights)
        ]
        lines.append(json.dumps({"text": text, **({"loss_spans": spans} if i % 5 else {})}))
    made.write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    tasks = [
        {"name": "s", "objective": "prefix_lm", "sentinel": True, "mode_token": "[S2S]"},
        {"preset": "prefix_lm"},
        {"preset": "t5"},
        {"preset": "mlm"},
        {"preset": "bd3"},
        {"preset": "duo"},
        {"preset": "fim"},
    ]
    documents = {"prepend_bos": True, "append_eos": "segment" if weights else True}
    recipe = made.table(
        "a.jsonl",
        seq_length=128,
        tasks=tasks,
        documents=documents,
        output={"shard_text_bytes": 9000},
    )
    made.build(recipe, tmp_path, tmp_path / "out")
    holds(tmp_path / "out", (0, *EPOCHS))
    holds(tmp_path / "out", (5,), 30)


@pytest.mark.long
def test_conversations(tmp_path):
    lines = []
    for i in range(40):
        turns = [("user", 20 + i), ("assistant", 40), ("user", 9), ("assistant", 5 * i + 1)]
        lines.append(
            json.dumps(
                {"messages": [{"role": role, "content": "wörter " * n} for role, n in turns]}
            )
        )
    made.write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    made.write(tmp_path / "t.jinja", TEMPLATE.encode())
    tasks = [CAUSAL, {"name": "s", "objective": "prefix_lm", "sentinel": True}, {"preset": "mdlm"}]
    documents = {"chat_template": "t.jinja", "max_bad_fraction": 1.0}
    made.build(made.table("a.jsonl", tasks=tasks, documents=documents), tmp_path, tmp_path / "out")
    holds(tmp_path / "out")


# What the loader gives that the twin does not


def another_epoch(self, segments, columns, epochs, redraw=Dataset.redraw):
    redraw(self, segments, columns, [epoch + 1 for epoch in epochs])


def other_weights(self, segments, columns, epochs, redraw=Dataset.redraw):
    redraw(self, segments, columns, epochs)
    columns["loss_weights"] *= 2


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong, array", [(another_epoch, "tokens"), (other_weights, "loss_weights")]
)
@pytest.mark.parametrize("replay", [ALL, 40])
def test_what_differs_is_named(every_kind, monkeypatch, wrong, array, replay):
    monkeypatch.setattr("packprep.verification.check_arrays", lambda *arguments: True)
    # the other replay's faults beside the twin's
    monkeypatch.setattr("packprep.verification.faults.MAX_LISTED", 10**6)
    monkeypatch.setattr(Dataset, "redraw", wrong)
    found = [
        fault
        for fault in report(every_kind, 4, replay)["listed"]
        if fault["message"].startswith("twin: ")
    ]
    assert any(f"{array}: the twin gives" in fault["message"] for fault in found)


@pytest.mark.long
def test_rows_of_an_epoch_are_others_than_the_stored(every_kind):
    ds = open_dataset(every_kind)
    rows = np.arange(len(ds))
    stored, once, twice = (
        ds.batch(rows, columns=["tokens"], epochs=[e] * len(ds))["tokens"] for e in (0, 1, 2)
    )
    # but for rows of causal alone
    for one, other in ((stored, once), (once, twice), (stored, twice)):
        assert (one != other).any(axis=1).mean() > 0.8


# The laws themselves


KEYS = [chance.text_key("epochs", i) for i in range(200)]


@pytest.mark.long
def test_a_roll_keeps_its_kind_and_takes_every_offset_of_it():
    """3 spans of 6 in 12 tokens: of the masks that begin and end with noise there are 10 · 10, of
    the others 3 · 10 · 10."""
    for key in KEYS[:6]:
        masks = [
            span_corruption.span_mask(12, 0.5, 2.0, None, True, key, epoch) for epoch in range(2500)
        ]
        assert {sum(mask) for mask in masks} == {6} and len(
            {len(span_corruption.runs(mask)) for mask in masks}
        ) == 1
        there_are = 100 if masks[0][0] and masks[0][-1] else 300
        assert 0.98 * there_are <= len(set(map(tuple, masks))) <= there_are


@pytest.mark.long
def test_a_pivot_is_anywhere_and_one_that_is_said_stays():
    assert {prefix_lm.pivot_of(6, 5, None, epoch) for epoch in range(100)} == {1, 2, 3, 4, 5}
    assert {prefix_lm.pivot_of(6, 5, 3, epoch) for epoch in range(20)} == {3}


@pytest.mark.long
def test_whether_a_text_is_rearranged_stays_and_its_cuts_and_order_do_not():
    """5 tokens have 15 pairs of cuts; where the suffix comes first, the slots tell the second
    alone, as where the first is 0."""
    parameters = {
        "rate": 0.5,
        "spm_rate": 0.5,
        "text_safe": False,
        "fim": [97, 98, 99],
        "inside": set(),
    }
    for key in KEYS[:12]:
        facts = [{"parameters": parameters, "key": key, "epoch": epoch} for epoch in range(600)]
        bodies = [fill_in_the_middle.body([1, 2, 3, 4, 5], own)[0] for own in facts]
        assert len(set(map(tuple, bodies))) == (
            15 if fill_in_the_middle.applied(parameters, key) else 1
        )
        again = [
            fill_in_the_middle.content(body, 0, own)
            for body, own in zip(bodies, facts, strict=True)
        ]
        assert again == [[1, 2, 3, 4, 5]] * 600
