"""An eighth objective from outside the package: one record is all it takes, by `register` or by an
entry point."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from packprep.building.plan import open_plan
from packprep.dataset import manifest
from packprep.dataset.attention import RULES, Rule
from packprep.errors import ArgumentError, DatasetError, PlanError
from packprep.objectives import REGISTRY, register
from packprep.objectives.objective import Objective, Parameter
from packprep.verification import verify_dataset
from tests import made

TOY = '''
"""reversed: the tokens of each run of `width` slots in reverse order, the sum of it the same."""

import numpy as np

from packprep.objectives.objective import Objective, Parameter


def _reversed(task, columns, source, source_begin, target, target_begin):
    width = task.parameters["width"]
    for n, s, t in zip(columns.bodies.n, source_begin, target_begin):
        for a in range(0, n, width):
            b = min(a + width, n)
            target[t + a : t + b] = source[s + a : s + b][::-1]


def render(task, columns, tokens, rows):
    _reversed(task, columns, tokens, columns.begin, rows, columns.at)


def restore(task, columns, rows, out):
    _reversed(task, columns, rows, columns.at, out, columns.begin)
    return np.ones(len(columns.begin), np.bool_)


OBJECTIVE = Objective(
    name="reversed",
    attention="causal",
    constant=True,
    parameters=(Parameter("width", 4, "tokens of a run", 1),),
    render=render,
    restore=restore,
)
'''


@pytest.fixture
def registry():
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def toy() -> Objective:
    namespace: dict = {}
    exec(TOY, namespace)
    return namespace["OBJECTIVE"]


def shouting(task, parameters, resolved, ids, target, epoch):
    """In place: each letter that may be trained becomes a capital, and is predicted."""
    from packprep.dataset.epochs.noise import Noised

    segments = target.segments
    for at, count in zip(segments.at, segments.count, strict=True):
        here = slice(int(at), int(at + count))
        small = (target.tokens[here] >= 97) & (target.tokens[here] <= 122)
        if target.trainable is not None:
            small &= target.trainable[here] != 0
        target.tokens[here][small] -= 32
        target.loss_mask[here] = small
    level = np.full(len(segments.key), 0.5, np.float32)
    return Noised(level, level * parameters["loudness"])


def recipe(*tasks: dict, **changes) -> dict:
    return made.table("a.jsonl", tasks=[*tasks, {"preset": "causal"}, {"preset": "mlm"}], **changes)


def good(out) -> int:
    """Segments of a dataset that keeps every promise, replayed whole and in part."""
    for replay in (-1, 50):
        report = verify_dataset(out, replay, {}, (0, 1), 0, made.Silent())
        assert report["listed"] == [] and report["replayed"]
    return report["segments"]


def task_of(out, name):
    """(dataset, number of the task)"""
    from packprep import open_dataset

    dataset = open_dataset(out)
    return dataset, [task["name"] for task in dataset.tasks].index(name)


@pytest.mark.parametrize(
    "changes", [{}, {"packing": {"algorithm": "next_fit", "pad_seq_to_mult": 8}}]
)
def test_an_objective_that_is_registered_builds_and_verifies(tmp_path, registry, changes):
    register(toy())
    made.write_lines(tmp_path / "a.jsonl", made.texts(200))
    made.build(recipe({"objective": "reversed", "width": 3}, **changes), tmp_path, tmp_path / "out")
    assert good(tmp_path / "out") > 100
    dataset, number = task_of(tmp_path / "out", "reversed")
    assert dataset.tasks[number]["objective"] == "reversed" and dataset.tasks[number][
        "parameters"
    ] == {"width": 3}
    assert dataset.tasks[number]["attention"] == "causal"
    texts, seen = {text.encode() for text in made.texts(200)}, 0
    for row in map(dataset.row, range(len(dataset))):
        for i in np.flatnonzero((row.segments["task"] == number) & (row.segments["start"] == 0)):
            begin, n = int(row.segments["begin"][i]), int(row.segments["tokens"][i])
            body = bytes(row.tokens[begin : begin + n].tolist())
            text = b"".join(body[a : a + 3][::-1] for a in range(0, n, 3))
            assert any(whole.startswith(text) for whole in texts)
            seen += 1
    assert seen > 20


def test_a_parameter_that_joins_later_leaves_what_was_built_before_as_it_was(tmp_path, registry):
    register(first := toy())
    made.write_lines(tmp_path / "a.jsonl", made.texts(60))
    outcome = made.build(recipe({"objective": "reversed"}), tmp_path, tmp_path / "out")
    joined = Parameter("steps", 1, "how often", 1, later=True)
    REGISTRY["reversed"] = replace(first, parameters=(*first.parameters, joined))
    assert good(tmp_path / "out") and open_plan(tmp_path / "out").tasks[0].parameters == {
        "width": 4,
        "steps": 1,
    }
    again = made.build(recipe({"objective": "reversed"}), tmp_path, tmp_path / "again")
    assert made.contents(tmp_path / "again") == made.contents(tmp_path / "out")
    other = made.build(recipe({"objective": "reversed", "steps": 2}), tmp_path, tmp_path / "other")
    assert (
        other.manifest["fingerprint"]
        != again.manifest["fingerprint"]
        == outcome.manifest["fingerprint"]
    )
    with pytest.raises(PlanError, match=r"tasks\[0\].parameters.steps is 2 here and 1 in the plan"):
        made.build(recipe({"objective": "reversed", "steps": 2}), tmp_path, tmp_path / "out")
    REGISTRY["reversed"] = first
    with pytest.raises(
        PlanError,
        match="key 'steps' is unknown to the installed objective reversed\nhint: use the version",
    ):
        open_plan(tmp_path / "other")


def test_an_objective_in_place_builds_and_verifies(tmp_path, registry):
    loud = Objective(
        name="shouting",
        attention="bidirectional",
        constant=True,
        supervised=True,
        parameters=(Parameter("loudness", 2.0, "of the loss", 0.0),),
        noise=shouting,
    )
    register(loud)
    made.write_lines(tmp_path / "a.jsonl", made.texts(200))
    made.build(
        recipe({"objective": "shouting"}, documents={"prepend_bos": True}),
        tmp_path,
        tmp_path / "out",
    )
    assert good(tmp_path / "out") > 100
    dataset, number = task_of(tmp_path / "out", "shouting")
    seen = 0
    for row in map(dataset.row, range(len(dataset))):
        mine = np.isin(row.segment_ids, 1 + np.flatnonzero(row.segments["task"] == number))
        small = (row.labels >= 97) & (row.labels <= 122)
        assert np.array_equal(row.loss_mask[mine], small[mine])
        assert np.array_equal(row.tokens[mine], np.where(small, row.labels - 32, row.labels)[mine])
        assert (row.loss_weights[mine & small] == 1).all()  # level · loudness
        seen += int(mine.sum())
    assert seen > 1000


@pytest.mark.long
def test_an_objective_of_an_installed_package_is_found_by_every_process(tmp_path):
    """As `pip install` leaves it: a module, and a dist-info folder with its entry point."""
    site = tmp_path / "site"
    made.write(site / "packprep_toy.py", TOY.encode())
    info = site / "packprep_toy-1.0.dist-info"
    made.write(info / "METADATA", b"Metadata-Version: 2.1\nName: packprep-toy\nVersion: 1.0\n")
    made.write(
        info / "entry_points.txt", b"[packprep.objectives]\nreversed = packprep_toy:OBJECTIVE\n"
    )
    made.write_lines(tmp_path / "a.jsonl", made.texts(200))
    lines = [
        "seq_length = 512",
        'tokenizer = "bytes"',
        "[[sources]]",
        'paths = ["a.jsonl"]',
        "[[tasks]]",
    ]
    lines += ['objective = "reversed"', "width = 5", "[output]", "shard_text_bytes = 20000"]
    made.write(tmp_path / "toy.toml", "\n".join(lines).encode())

    def packprep(*arguments, python_path=f"{made.ROOT}:{site}"):
        return subprocess.run(
            [sys.executable, "-m", "packprep", *arguments],
            cwd=tmp_path,
            env=made.environment(PYTHONPATH=python_path),
            capture_output=True,
            text=True,
            timeout=300,
        )

    built = packprep("build", "toy.toml", "--out", "out", "--workers", "2")
    assert built.returncode == 0, built.stderr
    verified = packprep("verify", "out", "--replay", "all", "--workers", "2")
    assert verified.returncode == 0 and "every invariant holds" in verified.stdout, (
        verified.stdout + verified.stderr
    )
    without = packprep("verify", "out", python_path=str(made.ROOT))
    assert without.returncode == 2 and "unknown objective 'reversed'" in without.stderr


def test_whoever_does_not_know_a_rule_of_its_own_refuses_its_tasks(tmp_path, registry, monkeypatch):
    rule = Rule(
        "own",
        (),
        lambda query, begin, end, columns, where: [
            (where(query > begin, query - 1, begin), query + 1)
        ],
    )
    monkeypatch.setitem(RULES, "two_keys", rule)
    monkeypatch.setitem(manifest._TASK_KEYS, "attention", ("a rule", RULES.__contains__))
    register(replace(toy(), attention="two_keys"))
    made.write_lines(tmp_path / "a.jsonl", made.texts(60))
    made.build(recipe({"objective": "reversed"}), tmp_path, tmp_path / "out")
    good(tmp_path / "out")
    dataset, number = task_of(tmp_path / "out", "reversed")
    headers = [row.segments for row in map(dataset.row, range(len(dataset)))]
    assert {
        prefix
        for of_row in headers
        for prefix in of_row["prefix"][of_row["task"] == number].tolist()
    } == {-1}
    with pytest.raises(DatasetError, match="the attention pattern of block diffusion"):
        dataset.batch(range(len(dataset)), columns=["prefix_ends"])
    with pytest.raises(ArgumentError, match="task reversed"):
        dataset.with_loss_on(task=["reversed"]).checked_columns(["seq_idx"])
