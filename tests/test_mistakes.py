"""What people do wrong: each mistake has one message that says what, where and what to do; then it
can be put right."""

import gzip
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packprep
from packprep.errors import PackprepError
from tests import made, mistakes_made
from tests.command_line import inside
from tests.mistakes_made import RECIPE, project, typed
from tests.mistakes_table import MISTAKES

ALL = {mistake.name: mistake for group in MISTAKES.values() for mistake in group}
LONG = ("a Hub name without network",)
INTERNAL = re.compile(
    r"Traceback|\.py\b|packprep\.[a-z_]+|NoneType|object at"
    r" 0x|Errno|PackprepError|RecipeError|\b_[a-z]+\("
)


def test_there_are_many_and_no_two_are_one():
    assert len(ALL) == sum(map(len, MISTAKES.values())) >= 40


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in ALL]
)
def test_a_mistake_is_named_placed_and_can_be_put_right(tmp_path, name):
    mistake, folder = ALL[name], project(tmp_path / "project")
    there = []
    seen = replace(mistake, before=lambda folder: there.append(_begun(mistake, folder)))
    message = _message(mistakes_made.make(seen, folder), mistake.status).replace(
        str(folder), "/project"
    )
    for part in (mistake.what, mistake.where, mistake.do):
        assert part in message, message
    assert not INTERNAL.search(message) and len(message.splitlines()) <= mistake.most_lines, message
    if mistake.keeps:
        assert made.contents(folder) == there[0]
    if mistake.then is not None:
        (folder / "recipe.toml").write_text(RECIPE)
        mistake.mended(folder)
        said = typed(folder, mistake.then)
        assert said.status == 0, said


def _begun(mistake, folder: Path) -> dict[str, bytes]:
    mistake.before(folder)
    return made.contents(folder)


def _message(said, status: int) -> str:
    """The one message of a mistake: an error on stderr, or a fault that verify lists."""
    assert said.status == status, said
    if status == 1:
        assert "error" not in said.err and said.out
        return said.out
    assert said.out == "" and said.err.count("packprep: error: ") == 1, said
    before, _, message = said.err.partition("packprep: error: ")
    assert all(line.startswith("packprep: ") for line in before.splitlines()), said
    return message


def test_shares_that_do_not_sum_to_1_are_said(tmp_path):
    """No error: the parts that they are taken as are printed."""
    folder = project(tmp_path)
    text = (
        RECIPE.replace("paths =", "share = 0.5\npaths =")
        + '\n[[sources]]\nshare = 0.3\npaths = ["data/a.jsonl"]\n'
    )
    (folder / "recipe.toml").write_text(text)
    said = typed(folder, mistakes_made.BUILD)
    assert said.status == 0
    assert (
        "warning: the shares of the sources sum to 0.8, not 1, and are scaled to source0 62.5%,"
        " source1 37.5%" in said.err
    )
    (folder / "recipe.toml").write_text(text.replace("0.3", "0.5"))
    assert "sum to" not in typed(folder, "build recipe.toml --out out2").err


def test_building_a_finished_dataset_again_is_no_mistake(tmp_path):
    folder = project(tmp_path)
    assert typed(folder, mistakes_made.BUILD).status == 0
    before = made.contents(folder)
    said = typed(folder, mistakes_made.BUILD)
    assert (
        said.status == 0
        and "nothing to make: all 1 shards are done" in said.err
        and made.contents(folder) == before
    )


def test_one_odd_file_among_good_ones_is_no_mistake_of_a_source(tmp_path):
    folder = project(tmp_path)
    made.write(folder / "data/aa.jsonl", b'{"body": "another key"}\n')
    made.write(folder / "data/ab.jsonl", b'[{"text": "an array"}]\n')
    said = typed(folder, mistakes_made.BUILD + " --json")
    assert said.status == 0 and said.json["documents"]["rejected"] == {
        "malformed_json": 1,
        "missing_text": 1,
    }


def test_a_readme_among_tables_is_said(tmp_path):
    folder = project(tmp_path)
    made.write(folder / "data/README.md", b"# A corpus\n")
    said = typed(folder, mistakes_made.BUILD + " --set sources.0.paths=data/*")
    words = (
        "source source0: 1 of its 3 files is read as one text per file, for example README.md. To"
        " read only the others, name them in paths"
    )
    assert said.status == 0 and words in said.err


def test_a_file_beside_its_compressed_copy_is_said(tmp_path):
    folder = project(tmp_path)
    made.write(folder / "data/copied.jsonl.gz", gzip.compress(b'{"text": "one text, two files"}\n'))
    assert (
        "are both read"
        not in typed(
            folder,
            mistakes_made.BUILD.replace("out out", "out alone") + " --set sources.0.paths=data/*",
        ).err
    )
    made.write(folder / "data/copied.jsonl", b'{"text": "one text, two files"}\n')
    said = typed(
        folder, mistakes_made.BUILD.replace("out out", "out both") + " --set sources.0.paths=data/*"
    )
    words = (
        "source source0: copied.jsonl.gz and copied.jsonl are both read. Name only one of them if"
        " they contain the same text"
    )
    assert said.status == 0 and words in said.err


def test_a_hidden_file_keeps_no_build_from_a_folder(tmp_path):
    folder = project(tmp_path)
    made.write(folder / "out/.hidden", b"")
    (folder / "out/lost+found").mkdir()
    assert typed(folder, mistakes_made.BUILD).status == 0


def test_no_arguments_list_the_commands():
    said = inside()
    assert (
        said.status == 2 and "Commands:" in said.err + said.out and "build " in said.err + said.out
    )


# In a trainer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = project(tmp_path_factory.mktemp("trained"))
    assert typed(folder, mistakes_made.BUILD).status == 0
    return folder / "out"


def _state(dataset, **changes):
    return {**packprep.open_dataset(dataset).batches(batch_size=2).state_dict(), **changes}


@pytest.mark.parametrize(
    "do, words",
    [
        (
            lambda d: packprep.open_dataset(d.parent / "data"),
            ["data/dataset.json does not exist", "`packprep build --out`"],
        ),
        (
            lambda d: packprep.open_dataset(d / "dataset.json"),
            ["dataset.json is a file", "give the folder with"],
        ),
        (
            lambda d: packprep.open_dataset([d, d], shares=[1]),
            ["2 directories", "requires shares, one for each"],
        ),
        (lambda d: packprep.open_dataset(d).batches(batch_size=0), ["batch_size is 0", "in 1 …"]),
        (
            lambda d: packprep.open_dataset(d).batches(batch_size=2, rank=2, world_size=2),
            ["rank is 2", "in 0 … 1"],
        ),
        (
            lambda d: packprep.open_dataset(d).batches(batch_size=2, columns=["token"]),
            ["'token'", "the columns are tokens,"],
        ),
        (
            lambda d: packprep.open_dataset("s3://bucket/packed"),
            ["s3://bucket/packed is a URL", "open_remote"],
        ),
        (
            lambda d: packprep.open_dataset(None),
            ["directory is None", "give the folder of a dataset"],
        ),
        (lambda d: packprep.open_dataset(d, io="mmaped"), ["io is 'mmaped'", "'mmap' or 'pread'"]),
        (
            lambda d: packprep.open_dataset(d).batches(2, shuffle="no"),
            ["shuffle is 'no'", "True or False"],
        ),
        (
            lambda d: packprep.open_dataset(d).batches(2, redraw="false"),
            ["redraw is 'false'", "True or False"],
        ),
        (
            lambda d: packprep.open_dataset(d).batches(2, epochs=1, samples=4),
            ["epochs = 1 and samples = 4", "one of them"],
        ),
        (
            lambda d: packprep.open_dataset(d).batches(2, dtype=np.int8),
            ["the dtype of 'tokens' is int8", "give a wider dtype"],
        ),
        (
            lambda d: packprep.open_dataset(d).batch(
                [0], out={"tokens": np.zeros((1, 512), np.uint8)}
            ),
            ["the dtype of 'tokens' is uint8", "values up to 527"],
        ),
        (
            lambda d: packprep.open_dataset(d).batch(
                [0], columns=["loss_weights"], dtype={"loss_weights": int}
            ),
            ["the dtype of 'loss_weights' is int64", "not whole numbers"],
        ),
        (
            lambda d: packprep.open_dataset(d).batches(2).load_state_dict(_state(d, rows="4")),
            ["the state's rows is '4'", "an integer of at least 0"],
        ),
        (
            lambda d: packprep.open_dataset(d).with_loss_on(task="x-lon"),
            ["'x-lon'", "there are 'r', 'x-long'"],
        ),
        (
            lambda d: packprep.open_dataset(d).batches(batch_size=2).load_state_dict({"rows": 2}),
            ["['rows']", "pass the result of state_dict()"],
        ),
        (
            lambda d: (
                packprep.open_dataset(d)
                .batches(batch_size=2)
                .load_state_dict(_state(d, fingerprint="0" * 32))
            ),
            ["the state's fingerprint is '000", "open that dataset"],
        ),
        (
            lambda d: (
                packprep.open_dataset(d).batches(batch_size=2, seed=4).load_state_dict(_state(d))
            ),
            ["the state's seed is 0, but this loader's is 4", "with the seed"],
        ),
    ],
)
def test_a_mistake_in_a_trainer_is_named_and_can_be_put_right(dataset, do, words):
    with pytest.raises(PackprepError) as caught:
        do(dataset)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


# Ctrl-C


@pytest.mark.long
def test_ctrl_c_is_one_line_and_exit_status_75(tmp_path):
    folder = project(tmp_path)
    made.write_lines(folder / "data/c.jsonl", made.texts(20_000))
    command = [
        sys.executable,
        "-m",
        "packprep",
        "build",
        "recipe.toml",
        "--out",
        "out",
        "--workers",
        "1",
    ]
    running = subprocess.Popen(
        [*command, "--set", "output.shard_text_bytes=50000"],
        cwd=folder,
        env=made.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while running.poll() is None and not (folder / "out/receipts").exists():
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 75 and out == "" and "Traceback" not in err
    stopped = [line for line in err.splitlines() if line.startswith("packprep: stopped: ")]
    assert len(stopped) == 1 and "the same command" in stopped[0]
