"""`packprep verify --replay` from the dataset's folder and the sources alone, as a user gives
it."""

import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios

import pytest

from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import LAW_VERSION, encode, receipt_name, rejects_name, shard_name
from tests.command_line import inside, packprep, refused
from tests.made import environment, texts, write, write_lines, write_parquet
from tests.tokenizer import tokenizers_made
from tests.verification.damage import edit_manifest, edit_receipt, manifest_of, read_json

RECIPE = """
seq_length = 128
tokenizer = "{tokenizer}"
engine = "{engine}"
tasks = [{{ preset = "causal" }}, {{ preset = "mlm" }}]

[output]
shard_text_bytes = 9000

[[sources]]
name = "lines"
paths = ["lines/*.jsonl"]

[[sources]]
name = "rows"
paths = ["rows.parquet"]
repeat = 1.5
"""
LINES = 90
"""Documents that are in it."""


def built(folder, tokenizer="bytes", engine="auto"):
    """A dataset of a recipe and its sources: its folder, in which nothing else is left of what
    built it."""
    write_lines(folder / "in/lines/a.jsonl", texts(LINES, 1))
    write_lines(folder / "in/lines/b.jsonl", [*texts(30, 2), ""])
    write_parquet(folder / "in/rows.parquet", texts(40, 3), rows_per_group=9)
    recipe = folder / "made/recipe.toml"
    text = RECIPE.format(tokenizer=tokenizer, engine=engine).replace(
        '"lines/', f'"{folder}/in/lines/'
    )
    write(recipe, text.replace('"rows.', f'"{folder}/in/rows.').encode())
    more = [] if tokenizer == "bytes" else ["--set", "specials.missing=add"]
    said = inside("build", recipe, "--out", folder / "made/out", "--json", *more)
    assert said.status == 0, said
    shutil.move(folder / "made/out", folder / "out")
    shutil.rmtree(folder / "made")
    return folder / "out"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return built(tmp_path_factory.mktemp("dataset"))


@pytest.fixture
def own(dataset, tmp_path):
    """A copy of the dataset and of its sources, which may be changed."""
    shutil.copytree(dataset, tmp_path / "out")
    shutil.copytree(dataset.parent / "in", tmp_path / "in")
    return tmp_path / "out"


def sources_at(folder):
    """Where the sources of a copy lie."""
    return ["--source", f"lines={folder}/in/lines", "--source", f"rows={folder}/in"]


@pytest.mark.parametrize("replay", ["7", "all"])
def test_a_dataset_is_built_again_from_its_folder_and_the_sources_alone(dataset, replay):
    said = inside("verify", dataset, "--replay", replay, "--json")
    assert said.status == 0 and said.json["faults"] == 0, said
    assert said.json["replayed"] == (7 if replay == "7" else said.json["segments"]) > 0


def test_one_shard_of_many_is_built_again_where_the_others_are_missing(own):
    count = len(manifest_of(own)["shards"])
    assert count >= 5
    for b in range(count):
        if b != 2:
            for name in (shard_name(b), receipt_name(b), rejects_name(b)):
                (own / name).unlink(missing_ok=True)
    arguments = [
        "verify",
        own,
        "--replay",
        "all",
        "--array-index",
        2,
        "--array-count",
        count,
        *sources_at(own.parent),
    ]
    said = inside(*arguments, "--json")
    assert said.status == 0 and (said.json["shards"], said.json["faults"]) == (1, 0), said
    assert (
        said.json["replayed"] == said.json["segments"] == manifest_of(own)["shards"][2]["segments"]
    )
    assert inside(*arguments[:4], "--json").status == 1  # all of it is not there


def test_an_array_of_tasks_builds_all_of_it_again(dataset):
    entries = manifest_of(dataset)["shards"]
    found = []
    for index in range(3):
        variables = {
            f"SLURM_ARRAY_TASK_{k}": v
            for k, v in (("ID", f"{index}"), ("MIN", "0"), ("MAX", "2"), ("COUNT", "3"))
        }
        said = inside("verify", dataset, "--replay", "all", "--json", **variables)
        assert said.status == 0, said
        found.append((said.json["shards"], said.json["replayed"]))
    assert [sum(column) for column in zip(*found, strict=True)] == [
        len(entries),
        sum(e["segments"] for e in entries),
    ]


@pytest.mark.long
def test_workers_and_a_bar_on_a_terminal(dataset):
    """The same verdict by two processes, with a bar on stderr, and nothing of it on stdout."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("4H", 40, 160, 0, 0))
    command = [
        sys.executable,
        "-m",
        "packprep",
        "verify",
        str(dataset),
        "--replay",
        "all",
        "--workers",
        "2",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=there, env=environment())
    os.close(there)
    shown = b""
    try:
        while block := os.read(here, 1 << 16):
            shown += block
    except OSError:  # the terminal's other side is closed
        pass
    out, _ = process.communicate(timeout=120)
    os.close(here)
    assert process.returncode == 0 and b"every invariant holds" in out and b"%|" not in out, out
    assert (
        b"100%|" in shown
        and b"tokens" in shown
        and b"documents" not in shown
        and b"Traceback" not in shown
    )


@pytest.mark.long
def test_off_a_terminal_there_is_no_bar(dataset):
    said = packprep("verify", dataset, "--replay", "3", "--workers", "2")
    reads, shards = [line for line in said.err.splitlines() if "compiling" not in line]
    assert reads.startswith("packprep: reading the sources lines at ") and shards.startswith(
        "packprep: shards to do: "
    )
    assert said.status == 0 and "3 segments rebuilt from their sources" in said.out


def test_shards_that_nobody_looked_at_are_not_counted(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "out")
    (tmp_path / "out/plan.json").write_bytes(b"{}")
    said = inside("verify", tmp_path / "out")
    assert said.status == 1 and f"{tmp_path / 'out'}: 1 fault (no shard was checked)" in said.out


@pytest.mark.parametrize("replay", ["60", "all"])
def test_sources_at_another_place(own, replay):
    (own.parent / "in/rows.parquet").rename(own.parent / "rows.parquet")
    (own.parent / "in/lines").rename(own.parent / "l")
    moved = ["--source", f"lines={own.parent / 'l'}", "--source", f"rows={own.parent}"]
    assert inside("verify", own, "--replay", replay, *moved).status == 0
    half = ["--source", f"lines={own.parent / 'l'}", "--source", f"rows={own.parent / 'in'}"]
    said = inside("verify", own, "--replay", replay, *half)
    assert said.status == 1 and f"{own.parent / 'in/rows.parquet'}: the file is missing" in said.out
    message = refused("verify", own, "--replay", replay, "--source", f"line={own.parent / 'l'}")
    assert "the dataset has no source of that name, only lines, rows" in message


@pytest.mark.parametrize("replay", ["60", "all"])
def test_a_source_that_changed_is_what_is_blamed(own, replay):
    """Its receipt has the digest of the text that was read."""
    path = own.parent / "in/lines/a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"corpus", b"CORPUS"))
    said = inside("verify", own, "--replay", replay, "--json", *sources_at(own.parent))
    assert said.status == 1
    assert {fault["promise"] for fault in said.json["listed"]} == {"P17"}
    assert all(
        "source 'lines' changed since the build: the text" in f["message"]
        for f in said.json["listed"]
    )


def resign_plan(directory, change):
    """Change the plan, and sign it in receipts and manifest."""
    plan = read_json(directory / "plan.json")
    change(plan)
    data = encode({**plan, "digest": own_digest(plan)})
    (directory / "plan.json").write_bytes(data)
    for b in range(len(manifest_of(directory)["shards"])):
        edit_receipt(directory, lambda receipt: receipt.update(plan_digest=digest_of(data)), b)

    def sign(manifest):
        manifest["plan"]["digest"] = digest_of(data)
        for key in ("law_version", "engine"):
            manifest[key] = plan[key]

    edit_manifest(directory, sign)


@pytest.mark.parametrize("replay", [[], ["--replay", "3"], ["--replay", "all"]])
def test_a_plan_of_another_law_version_is_refused(own, replay):
    resign_plan(own, lambda plan: plan.update(law_version=LAW_VERSION + 6))
    message = refused("verify", own, *replay, *sources_at(own.parent))
    assert f"law_version {LAW_VERSION + 6} and this packprep makes {LAW_VERSION}" in message


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("replay", ["3", "all"])
def test_a_plan_of_another_version_of_tokenizers_is_refused_for_replay(tmp_path, replay, workers):
    tokenizer = tokenizers_made.write(tmp_path / "tokenizer", tokenizers_made.byte_level())
    directory = built(tmp_path, tokenizer, "reference")
    here = read_json(directory / "plan.json")["engine"]["version"]
    resign_plan(directory, lambda plan: plan["engine"].update(version="0.0.7"))
    assert inside("verify", directory).status == 0  # no text is tokenized
    message = refused("verify", directory, "--replay", replay, "--workers", workers)
    assert f"the plan's engine is reference 0.0.7, but here it is reference {here}" in message
    assert "pip install tokenizers==0.0.7" in message


def test_a_plan_of_another_version_of_the_bytes_is_refused_for_replay(own):
    resign_plan(own, lambda plan: plan["engine"].update(version="9"))
    message = refused("verify", own, "--replay", "all", *sources_at(own.parent))
    assert "the plan's engine is bytes 9, but here it is bytes 1" in message


def test_the_segments_of_a_replay_are_drawn_anew_or_by_the_seed(dataset):
    said = [
        inside("verify", dataset, "--replay", "3", *more) for more in ((), ("--replay-seed", "5"))
    ]
    assert all(one.status == 0 and "selected by --replay-seed " in one.out for one in said)
    assert "--replay-seed 5" in said[1].out


def test_a_dataset_is_compared_with_a_recipe_from_elsewhere(dataset, tmp_path):
    text = RECIPE.format(tokenizer="bytes", engine="auto")
    for name, changed in (("same", text), ("other", text.replace("repeat = 1.5", "repeat = 2"))):
        write(
            tmp_path / f"{name}.toml",
            changed.replace('"lines/', f'"{dataset.parent}/in/lines/').encode(),
        )
    same, other = (
        inside("verify", dataset, "--recipe", tmp_path / f"{name}.toml", "--json")
        for name in ("same", "other")
    )
    assert same.status == 0 and same.json["listed"] == []
    assert other.status == 1
    assert [fault["promise"] for fault in other.json["listed"]] == ["P22"]
    assert (
        "sources[1].repeat is 2.0 in the given recipe, but 1.5"
        in other.json["listed"][0]["message"]
    )
    assert "expected a RECIPE.toml" in refused("verify", dataset, "--recipe", tmp_path / "a.jsonl")
