"""The commands as a user types them: results on stdout, messages on stderr, and the exit status."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from typer.main import get_command

from packprep import cli
from packprep.building.array_tasks import share_of
from packprep.building.processes import STOP_SIGNALS, STOPPED
from packprep.cli.application import app
from packprep.cli.arguments import PRESETS
from packprep.errors import Stopped
from packprep.recipe import presets
from packprep.storage import LocalFolder
from tests import made
from tests.command_line import inside, packprep, refused
from tests.made import environment, texts, write_lines, write_texts

RECIPE = """
seq_length = 256
tokenizer = "bytes"

[[sources]]
name = "web"
paths = ["web/*.jsonl", "web/*.jsonl.zst"]

[[sources]]
name = "notes"
paths = ["notes/*.txt"]

[[tasks]]
preset = "ul2r"

[output]
shard_text_bytes = 4500
"""
SHARDS = 5
SHARDS_TO_DO = r"packprep: [^\n]*\bshards?\b[^\n]*\n"
"""What verify says on stderr: one line, how much there is to do."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with a recipe and its inputs; read only."""
    folder = tmp_path_factory.mktemp("corpus")
    write_lines(folder / "web/a.jsonl", texts(30, 1))
    write_lines(folder / "web/b.jsonl.zst", texts(20, 2))
    write_texts(folder / "notes", texts(15, 3))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def dataset(corpus, tmp_path_factory):
    """A built dataset; read only."""
    out = tmp_path_factory.mktemp("dataset") / "out"
    said = packprep("build", corpus / "recipe.toml", "--out", out)
    assert said.status == 0, said
    return out


def test_a_tilde_is_the_home_folder_wherever_a_place_is_named(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "home")
    home = {"HOME": str(tmp_path / "home")}
    template = tmp_path / "home/t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "home/tilde.toml").write_text(
        RECIPE.replace('"web/', '"file://~/web/').replace('"notes/', '"~/notes/')
        + '\n[documents]\nchat_template = "~/t.jinja"\n'
    )
    for out in ("~/out", "file://~/other"):
        assert inside("build", "~/tilde.toml", "--out", out, "--workers", 1, **home).status == 0
        assert inside("verify", out, "--replay", 1, "--source", "notes=~/notes", **home).status == 0
    assert inside("inspect", "~/out", "--html", "~/report.html", **home).status == 0
    assert (tmp_path / "home/report.html").exists() and not os.path.exists("~")
    shards = [
        (tmp_path / "home" / name / "shards/000/000000.safetensors").read_bytes()
        for name in ("out", "other")
    ]
    assert shards[0] == shards[1]
    tokenizer = tmp_path / "home/tokenizer.json"
    tokenizer.write_bytes((tmp_path / "home/out/tokenizer.json").read_bytes())
    for options in (["--tokenizer", "~/tokenizer.json"], ["--set", "tokenizer=~/tokenizer.json"]):
        assert "tokens" in inside("plan", "~/web/*.jsonl", *options, **home).out


@pytest.fixture
def own(corpus, tmp_path):
    """A copy of the corpus and its recipe that may be changed."""
    return shutil.copytree(corpus, tmp_path / "own")


def contents(directory):
    return {
        p.relative_to(directory).as_posix(): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file()
    }


# Build


def test_build_from_a_recipe(corpus, tmp_path):
    said = packprep("build", corpus / "recipe.toml", "--out", tmp_path / "out")
    assert said.status == 0 and "256" in said.out and "ul2r" not in said.err
    assert (tmp_path / "out/dataset.json").exists()


@pytest.mark.long
def test_build_from_inputs(corpus, tmp_path):
    said = packprep(
        "build",
        "web/*.jsonl",
        "--out",
        tmp_path / "out",
        "--seq-length",
        512,
        "--tasks",
        "ul2r",
        "--seed",
        7,
        at=corpus,
    )
    assert said.status == 0
    assert 'packprep: tokenizer: "bytes"' in said.err  # said aloud
    manifest = json.loads((tmp_path / "out/dataset.json").read_text())
    assert manifest["seq_length"] == 512 and manifest["recipe"]["seed"] == 7
    assert [task["name"] for task in manifest["tasks"]] == [
        "r",
        "x-long",
        "x-dense",
        "s",
        "too_short",
    ]
    assert [source["name"] for source in manifest["sources"]] == ["source0"]


@pytest.mark.long
def test_a_build_in_the_folder_of_its_inputs_and_from_elsewhere_are_the_same(corpus, tmp_path):
    packprep("build", "recipe.toml", "--out", tmp_path / "a", "--workers", 2, at=corpus)
    packprep("build", corpus / "recipe.toml", "--out", "b", "--workers", 1, at=tmp_path)
    assert contents(tmp_path / "a").keys() == contents(tmp_path / "b").keys()
    different = [
        name
        for name, data in contents(tmp_path / "a").items()
        if contents(tmp_path / "b")[name] != data
    ]
    assert different == []


def test_the_first_build_prints_how_document_1_was_read_and_the_second_that_nothing_is_to_do(
    corpus, tmp_path
):
    arguments = ("build", corpus / "recipe.toml", "--out", tmp_path / "out")
    first = inside(*arguments)
    before = contents(tmp_path / "out")
    second = inside(*arguments)
    assert "packprep: document 1: " in first.err and "document 1" not in second.err
    assert "nothing to make: all 5 shards are done" in second.err
    assert first.status == second.status == 0 and contents(tmp_path / "out") == before


def test_a_build_goes_on_where_it_stopped(corpus, dataset, tmp_path):
    out = shutil.copytree(dataset, tmp_path / "out")
    for name in ("dataset.json", "receipts/000/000001.json", "shards/000/000003.safetensors"):
        (out / name).unlink()
    said = inside("build", corpus / "recipe.toml", "--out", out)
    assert said.status == 0 and "2 of all 5 shards to make" in said.err
    assert contents(out) == contents(dataset)


@pytest.mark.long
def test_a_build_without_a_manifest_is_published_by_the_same_command(corpus, dataset, tmp_path):
    out = shutil.copytree(dataset, tmp_path / "out")
    (out / "dataset.json").unlink()
    said = inside("status", out)
    assert said.status == 1 and "complete, but not published" in said.out
    assert inside("build", corpus / "recipe.toml", "--out", out).status == 0
    assert contents(out) == contents(dataset)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--seed", "1"], "seed is 1 here and 0 in the plan"),
        (["--seq-length", "512"], "seq_length is 512 here and 256 in the plan"),
        (
            ["--set", "packing.algorithm=next_fit"],
            "packing.algorithm is 'next_fit' here and 'best_fit' in the plan",
        ),
        (["--set", "sources.web.repeat=2"], "sources[0].repeat is 2.0 here and 1.0 in the plan"),
        (["--tasks", "causal"], "tasks is"),
    ],
)
def test_a_build_goes_on_with_its_own_recipe_only(corpus, dataset, arguments, words):
    message = refused("build", corpus / "recipe.toml", "--out", dataset, *arguments)
    assert (
        words in message
        and f"{dataset} was started with another recipe" in message
        and "another folder" in message
    )


@pytest.mark.long
def test_a_build_does_not_go_on_with_other_inputs(own, tmp_path):
    out = tmp_path / "out"
    assert inside("build", own / "recipe.toml", "--out", out).status == 0
    (own / "web/c.jsonl").write_text('{"text": "new"}\n')
    message = refused("build", own / "recipe.toml", "--out", out)
    assert "input 'c.jsonl' of source 'web': no file in the plan, 16 bytes now" in message
    (own / "web/c.jsonl").unlink()
    (own / "notes/d0001.txt").write_text("longer or shorter")
    assert "input 'd0001.txt' of source 'notes':" in refused(
        "build", own / "recipe.toml", "--out", out
    )


@pytest.mark.long
def test_a_profile_is_printed_and_never_written(corpus, dataset, tmp_path):
    out = tmp_path / "out"
    described = packprep("build", corpus / "recipe.toml", "--out", out, "--profile", "--json").json
    assert described["published"] is True
    assert {"plan", "read", "tokenize", "render", "write"} <= {
        stage["stage"] for stage in described["profile"]["stages"]
    }
    assert contents(out) == contents(dataset)
    lines = packprep("build", corpus / "recipe.toml", "--out", out, "--profile").out.splitlines()
    assert any(line.startswith("stage ") for line in lines) and any(
        line.startswith("plan ") for line in lines
    )


@pytest.mark.long
def test_json_is_all_that_stdout_holds(corpus, dataset, tmp_path):
    built = inside("build", corpus / "recipe.toml", "--out", tmp_path / "out", "--json")
    assert built.json["shards"] == SHARDS and built.json["published"] is True
    assert (
        inside("build", corpus / "recipe.toml", "--out", tmp_path / "out", "--json").json["made"]
        == 0
    )
    assert inside("plan", corpus / "recipe.toml", "--json").json["shards"] == SHARDS
    assert inside("status", dataset, "--json").json["done"] == SHARDS
    assert inside("verify", dataset, "--json").json["faults"] == 0
    assert inside("inspect", dataset, "--json").json["shards"] == SHARDS


@pytest.mark.long
def test_no_bar_off_a_terminal(corpus, tmp_path):
    said = packprep("build", corpus / "recipe.toml", "--out", tmp_path / "out", "--workers", 2)
    rates = said.err.replace("MB/s of text per core", "")
    assert "\r" not in rates and "%|" not in rates and "it/s" not in rates and "B/s" not in rates
    assert all(line.startswith("packprep: ") for line in said.err.splitlines())
    said = packprep("verify", tmp_path / "out", "--replay", "all")
    reads, shards = [line for line in said.err.splitlines() if ": compiling " not in line]
    assert reads.startswith("packprep: reading the sources ") and shards.startswith(
        "packprep: shards to do: 5 of 5, "
    )


def test_what_is_no_packprep_output_is_not_touched(corpus, tmp_path):
    (tmp_path / "file").write_text("mine")
    message = refused("build", corpus / "recipe.toml", "--out", tmp_path / "file")
    assert str(tmp_path / "file") in message and (tmp_path / "file").read_text() == "mine"


def test_a_plan_that_was_removed_is_missed(corpus, dataset, tmp_path):
    out = shutil.copytree(dataset, tmp_path / "out")
    (out / "plan.json").unlink()
    message = refused("build", corpus / "recipe.toml", "--out", out)
    assert (
        "no plan.json" in message and "restore plan.json, or build into another folder" in message
    )


@pytest.mark.parametrize(
    "data",
    ["", "{}", "[]\n", '{"format":"packprep","version":1}\n', '{"format":"other","version":1}\n'],
)
def test_a_plan_that_is_none(corpus, dataset, tmp_path, data):
    out = shutil.copytree(dataset, tmp_path / "out")
    (out / "plan.json").write_text(data)
    for command in (["build", corpus / "recipe.toml", "--out", out], ["status", out]):
        assert "plan.json" in refused(*command)


# Recipe and options


def test_a_recipe_and_inputs_together_are_refused(corpus):
    message = refused(
        "build", corpus / "recipe.toml", corpus / "web/a.jsonl", "--out", corpus / "never"
    )
    assert "recipe.toml is a recipe, so other inputs are not allowed" in message
    assert "give one recipe" in refused("plan", corpus / "recipe.toml", corpus / "recipe.toml")


def test_an_unknown_preset_names_the_nearest(corpus):
    message = refused("plan", corpus / "web/*.jsonl", "--tasks", "ul2s")
    assert "unknown preset 'ul2s'; did you mean 'ul2" in message
    assert "known: bd3" in refused("plan", corpus / "web/*.jsonl", "--tasks", "zzzz")


@pytest.mark.parametrize(
    "assignment, words",
    [
        ("seq_lenth=8", "did you mean 'seq_length'?"),
        ("packing.algoritm=best_fit", "did you mean 'algorithm'?"),
        (
            "packing.algorithm=worst_fit",
            "packing.algorithm = 'worst_fit': expected best_fit | first_fit",
        ),
        ("append_eos=false", "append_eos is a key of [documents]"),
        ("sources.0.pathes=x", "did you mean 'paths'?"),
        ("sources.books.repeat=2", "there is no 'books' among the 2"),
        ("sources.7.repeat=2", "there is no '7' among the 2"),
        ("nothing", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("seed=-1", "seed = -1: expected"),
        ("seed.x=1", "is not a key"),
        ("sources=3", "expected [[sources]] tables"),
        ("tasks.0=3", "is not a key"),
        ("specials.eos=no such token", "no such token"),
        ("documents.max_bad_fraction=nan", "documents.max_bad_fraction = nan: expected"),
    ],
)
def test_set_refuses_what_cannot_be(corpus, assignment, words):
    assert words in refused("plan", corpus / "recipe.toml", "--set", "seed=1", "--set", assignment)


@pytest.mark.long
def test_set_takes_toml_or_else_a_text(corpus, tmp_path):
    settings = [
        "seed=5",
        "packing.algorithm=next_fit",
        "documents.append_eos=false",
        "sources.web.sample=[0.0, 0.5]",
        'output.shard_text_bytes="8KB"',
        "sources.1.repeat=2",
        "output.token_dtype = int32",
    ]
    arguments = [word for setting in settings for word in ("--set", setting)]
    said = inside("build", corpus / "recipe.toml", "--out", tmp_path / "out", *arguments)
    assert said.status == 0, said
    recipe = json.loads((tmp_path / "out/dataset.json").read_text())["recipe"]
    assert recipe["seed"] == 5 and recipe["packing"]["algorithm"] == "next_fit"
    assert recipe["documents"]["append_eos"] is False and recipe["sources"][0]["sample"] == [
        0.0,
        0.5,
    ]
    assert recipe["output"]["shard_text_bytes"] == 8000 and recipe["sources"][1]["repeat"] == 2.0


def test_options_override_the_recipe(corpus, tmp_path):
    options = ["--seq-length", "128", "--seed", "3", "--tasks", "causal", "--tokenizer", "bytes"]
    said = inside("build", corpus / "recipe.toml", "--out", tmp_path / "out", *options)
    assert said.status == 0 and "tokenizer:" not in said.err
    recipe = json.loads((tmp_path / "out/dataset.json").read_text())["recipe"]
    assert (recipe["seq_length"], recipe["seed"], recipe["tasks"][0]["name"]) == (128, 3, "causal")


def test_text_key_is_that_of_every_source(own):
    for path in own.glob("web/*.jsonl"):
        path.write_text(path.read_text().replace('"text"', '"body"'))
    (own / "web/b.jsonl.zst").unlink()
    arguments = [
        "build",
        own / "web/*.jsonl",
        "--out",
        own / "out",
        "--text-key",
        "body",
        "--seq-length",
        256,
        "--json",
    ]
    assert inside(*arguments).json["documents"]["rejected"] == {}


def test_text_key_with_sources_that_are_none(own):
    (own / "recipe.toml").write_text('tokenizer = "bytes"\nsources = "web"\n')
    assert "expected [[sources]] tables" in refused(
        "plan", own / "recipe.toml", "--text-key", "body"
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("seq_length = ", "not TOML"),
        ("seq_length = 256\n", "is missing"),
        ('tokenizer = "bytes"\n', "no [[sources]]"),
        ('tokenizer = "bytes"\n[[sources]]\n', "paths is missing"),
        ('tokenizer = "bytes"\n[[sources]]\npaths = []\n', "expected a text or a list of texts"),
        (
            (
                'tokenizer = "bytes"\n[[sources]]\npaths = ["web/*.jsonl"]\n[[tasks]]\nobjective ='
                ' "causl"\n'
            ),
            "'causal'?",
        ),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused_before_work_starts(own, text, words):
    (own / "recipe.toml").write_text(text)
    assert words in refused("build", own / "recipe.toml", "--out", own / "out")
    assert not (own / "out").exists()


def test_a_recipe_that_is_not_there_or_not_text(own):
    assert "No such file" in refused("plan", own / "absent.toml")
    (own / "recipe.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8 at byte 0" in refused("plan", own / "recipe.toml")
    (own / "folder.toml").mkdir()
    assert "folder.toml" in refused("plan", own / "folder.toml")


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["build"], ["build", "x.jsonl"], ["bild", "x"], ["build", "x", "--out"], ["plan", "x", "--seed", "one"],
        ["verify"], ["status", "a", "b"], ["build", "x", "--out", "y", "--workers", "0"], ["plan", "x", "--nothing"],
    ],
)  # fmt: skip
def test_what_was_typed_wrongly_is_an_error(arguments):
    said = packprep(*arguments)
    assert said.status == 2 and (said.err or not arguments)


@pytest.mark.long
def test_source_says_where_the_files_lie_now(own, tmp_path):
    out = tmp_path / "out"
    assert packprep("build", own / "recipe.toml", "--out", out).status == 0
    before = contents(out)
    (own / "web").rename(tmp_path / "elsewhere")
    assert "no file" in refused("build", own / "recipe.toml", "--out", out)
    moved = ["--source", f"web={tmp_path / 'elsewhere'}"]
    said = packprep("build", own / "recipe.toml", "--out", out, *moved)
    assert said.status == 0 and "nothing to make" in said.err
    for name in ("receipts/000/000002.json", "dataset.json"):
        (out / name).unlink()
    assert packprep("build", own / "recipe.toml", "--out", out, *moved).status == 0
    assert contents(out) == before
    assert packprep("verify", out, "--replay", "all").status == 1
    assert packprep("verify", out, "--replay", "all", *moved).status == 0
    assert packprep("plan", own / "recipe.toml", *moved).status == 0


@pytest.mark.parametrize(
    "pair, words",
    [("web", "NAME=PREFIX"), ("=x", "NAME=PREFIX"), ("web=", "NAME=PREFIX"), ("wep=/", "web")],
)
def test_a_source_that_cannot_be(corpus, dataset, pair, words):
    assert words in refused("plan", corpus / "recipe.toml", "--source", pair)
    assert words in refused("verify", dataset, "--source", pair)


# Plan and status


def test_plan_says_what_a_build_would_make_and_writes_nothing(corpus):
    before = contents(corpus)
    said = inside("plan", corpus / "recipe.toml")
    assert (
        said.status == 0
        and said.out.startswith(f"{SHARDS} shards of about")
        and contents(corpus) == before
    )
    figures = inside("plan", corpus / "recipe.toml", "--json").json
    assert [source["name"] for source in figures["sources"]] == ["web", "notes"]
    assert sum(source["share"] for source in figures["sources"]) == pytest.approx(1)
    for key in ("documents", "tokens", "rows", "output_bytes", "worker_bytes"):
        assert figures[key] > 0


def test_plan_says_what_stands_in_a_folder_and_what_is_to_come(
    corpus, dataset, tmp_path, monkeypatch
):
    def planned(out, *more):
        return inside(
            "plan", corpus / "recipe.toml", "--out", out, "--workers", 2, "--json", *more
        ).json

    fresh, half = planned(tmp_path / "new"), shutil.copytree(dataset, tmp_path / "half")
    assert not (tmp_path / "new").exists()
    assert fresh["out"]["begun"] is False and fresh["out"]["free_bytes"] > fresh["output_bytes"]
    come = fresh["to_come"]
    assert (come["missing"], come["workers"], come["output_bytes"]) == (
        SHARDS,
        2,
        fresh["output_bytes"],
    )
    for shard in (1, 2):
        (half / f"receipts/000/{shard:06d}.json").unlink()
    before = contents(half)
    said = inside("plan", corpus / "recipe.toml", "--out", half, "--workers", 9).out
    assert (
        f"\n{half}: 3 of 5 shards are done; " in said
        and " s with 2 workers, at the speed of the sample on this machine: each core " in said
    )
    assert contents(half) == before
    assert (
        planned(dataset)["to_come"]["seconds"] == planned(dataset)["to_come"]["output_bytes"] == 0
    )
    other = refused("plan", corpus / "recipe.toml", "--out", half, "--seed", 7)
    assert (
        other == refused("build", corpus / "recipe.toml", "--out", half, "--seed", 7)
        and "seed" in other
    )
    monkeypatch.setattr(LocalFolder, "free_bytes", lambda self: 10)
    assert "has 10 bytes free" in planned(tmp_path / "new")["warnings"][-1]


@pytest.mark.long
def test_plan_estimates_what_the_build_makes(corpus, dataset):
    figures = packprep("plan", corpus / "recipe.toml", "--json").json
    built = inside("inspect", dataset, "--json").json
    assert figures["tokens"] == pytest.approx(built["tokens"]["used"], rel=0.1)
    assert figures["rows"] == pytest.approx(built["rows"], rel=0.3)


@pytest.mark.long
def test_status_of_a_build_that_is_not_finished(dataset, tmp_path):
    out = shutil.copytree(dataset, tmp_path / "out")
    for shard in (1, 2, 4):
        (out / f"receipts/000/{shard:06d}.json").unlink()
    (out / "dataset.json").unlink()
    said = packprep("status", out, "--array-count", SHARDS)
    assert said.status == 1
    assert said.out.splitlines() == [
        f"{out}: 2 of 5 shards done",
        "missing: 1-2,4",
        "--array=1-2,4",
    ]
    result = inside("status", out, "--json", "--array-count", 2).json
    assert result == {
        "out": str(out), "shards": 5, "done": 2, "missing": [1, 2, 4], "published": False,
        "array": "0-1",
    }  # fmt: skip


def test_status_of_a_published_dataset(dataset):
    said = inside("status", dataset)
    assert said.status == 0 and said.out.splitlines() == [
        f"{dataset}: 5 of 5 shards done",
        "published",
    ]


def test_status_of_nothing(tmp_path):
    assert "no build was started here" in refused("status", tmp_path)
    assert "no build was started here" in refused("status", tmp_path / "nowhere")
    assert "no build was started here" in refused("status", "/")


# Verify


def test_verify_a_good_dataset(dataset):
    said = packprep("verify", dataset)
    assert said.status == 0 and "every invariant holds (5 shards, " in said.out
    # where it is the first to verify
    assert re.fullmatch(SHARDS_TO_DO, re.sub(r".*: compiling .*\n", "", said.err))
    for replay, workers in (("5", 1), ("all", 2)):
        said = inside("verify", dataset, "--replay", replay, "--workers", workers)
        assert said.status == 0 and "rebuilt from their sources" in said.out


def test_verify_a_damaged_dataset(dataset, tmp_path):
    out = shutil.copytree(dataset, tmp_path / "out")
    path = out / "shards/000/000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    said = inside("verify", out)
    assert said.status == 1 and said.out.startswith(
        "P1 shards/000/000001.safetensors: its digest is "
    )
    report = inside("verify", out, "--json")
    assert (
        report.status == 1
        and report.json["listed"][0]["promise"] == "P1"
        and re.fullmatch(SHARDS_TO_DO, report.err)
    )
    statuses = [
        inside("verify", out, "--array-index", i, "--array-count", 3).status for i in range(3)
    ]
    assert statuses == [1, 0, 0]


def test_verify_what_is_no_dataset(dataset, tmp_path):
    assert "is not a dataset, or its build is not finished" in refused("verify", tmp_path)
    out = shutil.copytree(dataset, tmp_path / "out")
    (out / "dataset.json").write_bytes(b"{}\n")
    assert "dataset.json: key" in refused("verify", out)


@pytest.mark.parametrize("replay", ["0", "-1", "some", "1.5", "²"])
def test_replay_takes_a_number_or_all(dataset, replay):
    assert "expected a number of segments, or all" in refused("verify", dataset, "--replay", replay)


# Array tasks


SLURM = {"SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "4", "SLURM_ARRAY_TASK_COUNT": "2"}


@pytest.mark.long
def test_array_tasks_make_the_dataset_together(corpus, dataset, tmp_path):
    out = tmp_path / "out"
    first = packprep(
        "build", corpus / "recipe.toml", "--out", out, "--array-index", 1, "--array-count", 2
    )
    assert first.status == 0 and not (out / "dataset.json").exists()
    assert "this array task's 2 shards to make" in first.err
    assert inside("status", out).status == 1
    second = packprep(
        "build", corpus / "recipe.toml", "--out", out, SLURM_ARRAY_TASK_ID="3", **SLURM
    )
    assert second.status == 0 and contents(out) == contents(dataset)


@pytest.mark.long
def test_an_array_task_that_waits_for_others_says_so_in_json(corpus, tmp_path):
    arguments = ["--array-index", 0, "--array-count", 3, "--json"]
    said = packprep("build", corpus / "recipe.toml", "--out", tmp_path / "out", *arguments)
    assert said.status == 0 and said.json["published"] is False and said.json["missing"] == 3


def test_flags_win_over_slurm(corpus, dataset):
    environment = {"SLURM_ARRAY_TASK_ID": "3", **SLURM, "SLURM_ARRAY_TASK_COUNT": "9"}
    arguments = ["--array-index", 2, "--array-count", 3, "--json"]
    assert inside("verify", dataset, *arguments, **environment).json["shards"] == len(
        share_of(2, 3, SHARDS)
    )
    said = inside("verify", dataset, "--json", SLURM_ARRAY_TASK_ID="4", **SLURM)
    assert said.json["shards"] == len(share_of(1, 2, SHARDS))


def test_fault_30_a_sparse_redo_list_is_refused_with_the_flags_to_add(corpus, tmp_path):
    environment = {"SLURM_ARRAY_TASK_ID": "4", **SLURM, "SLURM_ARRAY_TASK_MAX": "9"}
    message = refused("build", corpus / "recipe.toml", "--out", tmp_path / "out", **environment)
    assert (
        "--array-index" in message
        and "--array-count" in message
        and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize("missing", ["SLURM_ARRAY_TASK_ID", *SLURM])
def test_a_slurm_variable_that_is_missing_is_refused(dataset, missing):
    environment = {"SLURM_ARRAY_TASK_ID": "4", **SLURM}
    del environment[missing]
    message = refused("verify", dataset, **environment)
    assert missing in message and "--array-index" in message


def test_a_slurm_variable_that_is_no_number_is_refused(dataset):
    assert "--array-count" in refused("verify", dataset, **{"SLURM_ARRAY_TASK_ID": "four", **SLURM})


def test_kubernetes_gives_the_index_and_the_flag_the_count(dataset):
    arguments = ["verify", dataset, "--json"]
    assert inside(*arguments, "--array-count", 5, JOB_COMPLETION_INDEX="4").json["shards"] == 1
    assert "add --array-count" in refused("verify", dataset, JOB_COMPLETION_INDEX="4")
    assert "not below" in refused(*arguments, "--array-count", 4, JOB_COMPLETION_INDEX="4")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--array-index", "1"], "give both"),
        (["--array-count", "3"], "give both"),
        (["--array-index", "3", "--array-count", "3"], "is not below"),
    ],
)
def test_array_flags_that_cannot_be(dataset, flags, words):
    assert words in refused("verify", dataset, *flags)


@pytest.mark.long
def test_more_array_tasks_than_shards(corpus, tmp_path):
    shares = {i: share_of(i, 7, SHARDS) for i in range(7)}
    i = next(i for i, share in shares.items() if not share)
    arguments = [
        "build",
        corpus / "recipe.toml",
        "--out",
        tmp_path / "out",
        "--array-index",
        i,
        "--array-count",
        7,
    ]
    said = packprep(*arguments)
    assert said.status == 0 and "this array task has none of the 5 shards" in said.err


# Slurm


def test_slurm_writes_scripts_that_build_with_these_options(corpus, tmp_path):
    out = tmp_path / "out"
    said = inside(
        "slurm",
        corpus / "recipe.toml",
        "--out",
        out,
        "--array",
        40,
        "--seed",
        7,
        "--set",
        "documents.long=drop",
        "--source",
        f"web={corpus / 'web'}",
        "--workers",
        1,
        "--",
        "--mem",
        "4G",
        "-p",
        "x",
    )
    assert said.status == 0 and f"{out}.slurm/build.sh: 40 tasks, 16 at a time" in said.out
    text = (tmp_path / "out.slurm" / "build.sh").read_text()
    assert "#SBATCH --mem 4G\n#SBATCH -p x\n" in text
    options = (
        f"--seed 7 --set documents.long=drop --source web={corpus / 'web'} --out {out} --workers 1"
    )
    assert f"packprep build {corpus / 'recipe.toml'} {options} " in text
    assert not out.exists()


def test_slurm_that_verifies_needs_no_recipe(tmp_path):
    said = inside(
        "slurm",
        "--command",
        "verify",
        "--out",
        tmp_path / "out",
        "--array",
        2,
        "--replay",
        9,
        "--",
        "--mem=1G",
    )
    assert said.status == 0 and "verify.sh: 2 tasks, 2 at a time" in said.out
    assert (
        f"packprep verify --replay 9 {tmp_path / 'out'}"
        in (tmp_path / "out.slurm" / "verify.sh").read_text()
    )


def test_slurm_refuses_what_every_task_would(corpus, tmp_path):
    arguments = ["slurm", "--out", tmp_path / "out", "--array", 2]
    assert "give a RECIPE.toml, or files and patterns" in refused(*arguments)
    assert "presett" in refused(*arguments, corpus / "recipe.toml", "--set", "tasks.0.presett=x")
    assert "--seed cannot be used with --command verify" in refused(
        *arguments, "--command", "verify", "--seed", 1
    )
    assert "--source web: expected NAME=PREFIX" in refused(
        *arguments, corpus / "recipe.toml", "--source", "web"
    )
    assert not list(tmp_path.iterdir())


# Signals, pipes, terminals


def started(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "packprep", *map(str, arguments)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_a_build_with_75_and_the_same_command_goes_on(tmp_path, number):
    chance = random.Random(number)
    lines = [
        json.dumps({"text": " ".join(map(str, chance.choices(range(10**6), k=200)))})
        for _ in range(3000)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = [
        "build",
        tmp_path / "in.jsonl",
        "--out",
        tmp_path / "out",
        "--workers",
        2,
        "--seq-length",
        512,
    ]
    arguments += ["--tasks", "ul2r", "--set", "output.shard_text_bytes=20KB"]
    process = started(*arguments)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("receipts/000/*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert (
        out == ""
        and err.splitlines()[-1].startswith("packprep: stopped: by a signal")
        and "Traceback" not in err
    )
    done = packprep("status", tmp_path / "out", "--json").json
    assert 0 < done["done"] < done["shards"]
    again = packprep(*arguments)
    assert (
        again.status == 0
        and f"{done['shards'] - done['done']} of all {done['shards']} shards to make" in again.err
    )
    assert packprep("verify", tmp_path / "out").status == 0


HELD = """
import sys, time
from packprep import cli, recipe
recipe.load_recipe = lambda path: (print("held", flush=True), time.sleep(60))
sys.argv = ["packprep", "plan", "recipe.toml"]
cli.entry()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_work_begins_is_75_too(number):
    process = subprocess.Popen(
        [sys.executable, "-c", HELD],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and out == "" and err.startswith("packprep: stopped: "), err


@pytest.mark.long
def test_a_reader_that_goes_changes_no_exit_status(dataset, tmp_path):
    out = shutil.copytree(dataset, tmp_path / "out")
    (out / "extra").write_text("")
    for directory, status in ((dataset, 0), (out, 1)):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, "-m", "packprep", "verify", directory],
            env=environment(), stdout=write, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
        os.close(write)
        assert done.returncode == status and re.fullmatch(SHARDS_TO_DO, done.stderr)


def with_streams(redirected, *arguments):
    """A command by a shell that redirects its streams: (exit status, stderr)."""
    words = shlex.join([sys.executable, "-m", "packprep", *map(str, arguments)])
    done = subprocess.run(
        f"{words} {redirected}",
        shell=True,
        env=environment(),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("redirected", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_build_does_its_work_whatever_its_streams_are(corpus, tmp_path, redirected):
    out = tmp_path / "out"
    given = ["build", corpus / "recipe.toml", "--out", out, "--workers", 2]
    assert with_streams(redirected, *given) == (0, "")
    assert packprep("verify", out).status == 0


COMMANDS = [
    ("verify {dataset}", True),
    ("tokenize {corpus}/recipe.toml --out {tmp}/store", True),
    ("export {dataset} --to parquet --out {tmp}/export", True),
    ("init {corpus} --out {tmp}/r.toml", True),
    ("slurm {corpus}/recipe.toml --out {tmp}/out --array 2", True),
    ("inspect {dataset} --card {tmp}/card.md", True),
    ("warm {corpus}/recipe.toml", True),
    ("plan {corpus}/recipe.toml", False),
    ("inspect {dataset} --row 0", False),
    ("status {dataset}", False),
    ("schema", False),
    ("doctor", False),
    ("--help", False),
    ("--version", False),
]


@pytest.mark.alike(10)
@pytest.mark.parametrize(
    "command, work, redirected",
    [
        *((*command, to) for command in COMMANDS for to in (">&-", ">/dev/full")),
        # What is closed besides is opened before a command is known.
        *((*command, to) for command in COMMANDS[:2] for to in ("2>&-", "<&- >&- 2>&-")),
    ],
)
def test_a_closed_stream_or_a_full_disk_behind_it_is_no_traceback(
    corpus, dataset, tmp_path, command, work, redirected
):
    arguments = command.format(dataset=dataset, corpus=corpus, tmp=tmp_path).split()
    status, err = with_streams(redirected, *arguments)
    full = "full" in redirected
    assert status == (2 if full and not work else 0), err
    assert ("No space left on device" in err) == full


def test_what_is_closed_is_no_number_for_a_file(tmp_path):
    code = (
        "import os, sys\n"
        "from packprep.cli import _open_closed_streams\n"
        "_open_closed_streams()\n"
        "file = open(sys.argv[1], 'wb')\n"
        "print('to stdout'); print('to stderr', file=sys.stderr)\n"
        "os.write(1, b'x'); os.write(2, b'x'); os.read(0, 1)\n"
        "os._exit(file.fileno())\n"
    )
    words = shlex.join([sys.executable, "-c", code, str(tmp_path / "file")])
    assert (
        subprocess.run(
            f"{words} <&- >&- 2>&-", shell=True, env=environment(), timeout=60
        ).returncode
        > 2
    )
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.long
def test_a_reader_of_messages_that_goes_stops_no_build(corpus, tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "packprep",
            "build",
            corpus / "recipe.toml",
            "--out",
            tmp_path / "out",
        ],
        env=environment(),
        stdout=write,
        stderr=write,
        timeout=120,
    )
    os.close(write)
    assert done.returncode == 0 and packprep("verify", tmp_path / "out").status == 0


@pytest.mark.long
def test_a_full_disk_behind_stdout_is_an_error(dataset):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "packprep", "status", dataset],
            env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert (
        done.returncode == 2
        and "No space left on device" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.long
def test_a_terminal_that_knows_ascii_alone(corpus, dataset):
    said = packprep("verify", dataset.parent / "söme", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert said.status == 2
    for arguments in (
        ["inspect", dataset],
        ["plan", corpus / "recipe.toml"],
        ["inspect", dataset, "--row", 0],
    ):
        assert packprep(*arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="0").status == 0


# Signals, at the moment when a module is looked for

STRIKE = """
import os, signal, sys
def strike(): os.kill(os.getpid(), signal.{number})
class Dropped:
    def __del__(self): strike()
class Finder:
    def find_spec(self, name, path, target=None):
        if name != "{module}": return
        sys.meta_path.remove(self)
        {how}
sys.meta_path.insert(0, Finder())
sys.argv = ["packprep", *sys.argv[1:]]
from packprep.cli import entry
entry()
"""
HOW = {
    "raised": "strike()",
    "again at once": "try: strike()\n        finally: strike()",
    "in a destructor": "Dropped()",
    "printed by an extension module": (
        "__import__('ctypes').pythonapi.PyRun_SimpleString(b'strike()')"
    ),
    "made another error": (
        "try: strike()\n        except BaseException: raise RuntimeError('of a library')"
    ),
}
MODULES = ("packprep.cli.application", "typer", "packprep.building.run")


@pytest.mark.alike(6)
@pytest.mark.parametrize(
    "number, module, how",
    [
        *(("SIGINT", module, how) for module in MODULES for how in HOW),
        *((number, MODULES[-1], "raised") for number in ("SIGTERM", "SIGUSR1")),
    ],
)
def test_a_signal_while_modules_are_imported_is_one_line_and_exit_status_75(
    corpus, tmp_path, number, module, how
):
    code = STRIKE.format(number=number, module=module, how=HOW[how])
    done = subprocess.run(
        [sys.executable, "-c", code, "build", corpus / "recipe.toml", "--out", tmp_path / "out"],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 75 and done.stdout == "", done
    assert (
        done.stderr
        == "packprep: stopped: by a signal; committed work is kept. Run the same command again\n"
    )


def test_the_command_line_heeds_the_signals_that_a_build_does():
    assert cli._STOPPED.decode() == f"packprep: stopped: {STOPPED}\n"
    assert cli._SIGNALS == STOP_SIGNALS and Stopped.exit_status == cli._STOPPED_STATUS


# Help, version, and what they cost


def test_version():
    said = packprep("--version")
    assert said.status == 0 and said.out.startswith("packprep 0.") and said.err == ""


def test_quiet_tells_of_errors_alone_and_verbose_of_stages_before_a_command_s_name_and_behind_it(
    corpus, tmp_path
):
    recipe, out = corpus / "recipe.toml", tmp_path / "out"
    for line in (["-q", "build"], ["build", "--quiet"]):
        shutil.rmtree(out, ignore_errors=True)
        said = inside(*line, recipe, "--out", out)
        assert said.status == 0 and said.err == "" and "5 shards" in said.out
        assert inside(*line, "no.toml", "--out", out).err.startswith("packprep: error: no.toml")
    shutil.rmtree(out)
    for line in (
        ["-v", "build", recipe, "--out", out],
        ["verify", out, "-v"],
        ["export", out, "--verbose", "--to", "parquet", "--out", tmp_path / "parquet"],
    ):
        said = inside(*line)
        assert said.status == 0 and "shard 4: done\n" in said.err
        assert all(re.match(r"packprep: \d+\.\d\d s: ", line) for line in said.err.splitlines()), (
            said.err
        )
        if "build" in line:
            assert re.search(r"of all workers: plan .* render \d\.\d\d s, .*publish", said.err)
    # one command's choice is not the next one's
    assert re.match(r"packprep: shards? to do", inside("verify", out).err)


def test_help_names_every_command():
    said = packprep("--help")
    assert said.status == 0
    for command in ("build", "plan", "status", "verify", "inspect"):
        assert f"\n  {command} " in said.out
        assert inside(command, "--help").status == 0


def test_help_lists_options_by_what_they_are_of_and_names_every_preset():
    said = inside("build", "--help").out
    headings = [line[:-1] for line in said.splitlines() if re.fullmatch(r"\w.*:", line)]
    assert headings == ["Arguments", "Options", "Recipe", "Work", "Printing", "Examples"]
    assert (
        said.index("Recipe:")
        < said.index("--tasks")
        < said.index("Work:")
        < said.index("--workers")
    )
    assert list(presets()) == PRESETS and f"{', '.join(PRESETS)}." in " ".join(said.split())


@pytest.mark.parametrize(
    "command", get_command(app).commands.values(), ids=lambda command: command.name
)
def test_every_command_shows_examples_that_it_takes(command):
    for line in command.epilog.splitlines():
        program, name, *words = shlex.split(line.partition(" > ")[0])
        assert (program, name) == ("packprep", command.name)
        assert command.make_context(name, words)  # raises for what it does not know


COMPLETE = "from packprep.cli import main\nmain()"


@pytest.mark.parametrize(
    "words, found", [("packprep bu", "build"), ("packprep build --tasks ul", "ul2r\nul2")]
)
def test_a_shell_completes_commands_and_presets(words, found):
    asked = {
        "_PACKPREP_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = made.run_python(COMPLETE, **asked)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, found, "")


def test_help_pays_for_nothing_heavy():
    code = (
        "import sys\nfrom packprep.cli import main\nsys.argv = ['packprep', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert "Usage" in done.stdout
    heavy = {
        "numpy",
        "numba",
        "pyarrow",
        "tokenizers",
        "zstandard",
        "msgspec",
        "xxhash",
        "tqdm",
        "multiprocessing",
    }
    assert set(done.stderr.split()) & heavy == set() and "typer" in done.stderr.split()


def test_the_installed_script_is_the_same_command():
    script = shutil.which("packprep", path=os.path.dirname(sys.executable))
    if script is None:
        pytest.skip("packprep is not installed beside this Python")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == packprep("--version").out


# Inspect


def test_inspect_a_dataset_and_a_row(dataset):
    said = inside("inspect", dataset)
    assert said.status == 0 and " rows of 256 slots in 5 shards" in said.out
    for row in ("0", "-1"):
        assert inside("inspect", dataset, "--row", row).status == 0
        assert inside("inspect", dataset, "--row", row, "--json").json


def test_inspect_a_row_that_is_not_there(dataset, tmp_path):
    assert "row" in refused("inspect", dataset, "--row", "100000")
    assert "dataset.json does not exist" in refused("inspect", tmp_path)


@pytest.mark.parametrize("missing", ["typer", pytest.param("numba", marks=pytest.mark.long)])
def test_what_is_not_installed_is_named_with_what_to_install(corpus, tmp_path, missing):
    """As in a trainer's image, where packprep was installed without its dependencies."""
    words = ["packprep", "build", str(corpus / "recipe.toml"), "--out", str(tmp_path / "out")]
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = {words!r}; from packprep.cli"
        " import entry; entry()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        f"error: {missing} is not installed" in done.stderr
        and "`pip install packprep`" in done.stderr
    )
