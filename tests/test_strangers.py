"""Datasets from strangers, and secrets, on the command line.

What a plan claims is bounded, it leads to no folder and no host, names reach the terminal with
every character visible, and no URL's password or signature is kept or shown.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from packprep.building.plan_form import MOST_SHARDS
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import encode
from packprep.messages import say, visible
from packprep.sources.slices import MOST_PIECES
from tests import made
from tests.command_line import inside, packprep, refused
from tests.verification.damage import edit_manifest, edit_receipt, manifest_of, read_json

ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202egnp\u2066\x9b31m"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    made.write_lines(folder / "in/a.jsonl", made.texts(40, 1))
    made.write_lines(folder / "in/b.jsonl", made.texts(40, 2))
    sources = [{"name": "web", "paths": ["a.jsonl"]}, {"name": "books", "paths": ["b.jsonl"]}]
    made.build(made.table(sources, seq_length=256), folder / "in", folder / "out")
    return folder / "out"


def forged(dataset, folder, change):
    """A copy of a dataset with a changed plan, and all that follows from a plan signed again."""
    directory = shutil.copytree(dataset, folder / "forged")
    plan = read_json(directory / "plan.json")
    change(plan)
    recipe = plan["recipe"]
    kept = {
        **recipe,
        "documents": {k: v for k, v in recipe["documents"].items() if k != "chat_template"},
    }
    files = [
        [[f["name"], f["size"]] for f in plan["files"] if f["source"] == i]
        for i in range(len(plan["sources"]))
    ]
    parts = {
        "law_version": plan["law_version"],
        "files": files,
        "tokenizer": plan["tokenizer"]["digest"],
    }
    plan["fingerprint"] = digest_of(
        encode({**parts, "recipe": {k: v for k, v in kept.items() if k != "tokenizer"}})
    )
    del plan["digest"]
    data = encode({**plan, "digest": own_digest(plan)})
    (directory / "plan.json").write_bytes(data)
    for b in range(len(manifest_of(directory)["shards"])):
        edit_receipt(directory, lambda receipt: receipt.update(plan_digest=digest_of(data)), b)

    def follow(manifest):
        manifest["plan"]["digest"] = digest_of(data)
        manifest.update(
            {key: plan[key] for key in ("recipe", "fingerprint", "tasks", "token_dtype")}
        )
        manifest["vocab_size"] = plan["vocabulary"]["vocab_size"]
        for own, source in zip(manifest["sources"], plan["sources"], strict=False):
            own.update(name=source["name"], repeat=source["repeat"])

    edit_manifest(directory, follow)
    return directory


# What a plan claims


def pieces(count, repeat):
    """A file of so many pieces, as large as that takes, used so often."""

    def change(plan):
        plan["files"][0].update(pieces=count, size=count << 22)
        plan["sources"][0]["repeat"] = repeat
        plan["recipe"]["sources"][0]["repeat"] = min(repeat, 1000.0)

    return change


def vocabulary(size):
    def change(plan):
        plan["vocabulary"].update(vocab_size=size)
        plan["recipe"]["specials"].update(vocab_size=size)
        plan.update(token_dtype="int32")

    return change


def crossed(sources, tasks):
    """So many sources that each may draw from so many tasks."""

    def change(plan):
        recipe = plan["recipe"]
        for own, like in (
            (plan["sources"], plan["sources"][1]),
            (recipe["sources"], recipe["sources"][1]),
        ):
            own += [{**like, "name": f"s{i}"} for i in range(sources)]
        for own, like, at in (
            (plan["tasks"], plan["tasks"][0], -1),
            (recipe["tasks"], recipe["tasks"][0], None),
        ):
            own[at:at] = [{**like, "name": f"t{i}"} for i in range(tasks)]

    return change


CLAIMS = {
    "2²⁰ pieces, used a hundred times": (pieces(1 << 20, 100.0), "splits, counted once per pass"),
    "2²⁴ pieces, used 60 000 times": (pieces(1 << 24, 60_000.0), "splits, counted once per pass"),
    "as many pieces as can be, used twice": (
        pieces(MOST_PIECES - 9, 2.0),
        "splits, counted once per pass",
    ),
    "the largest vocabulary": (vocabulary((1 << 31) - 1), "vocab_size is 2147483647"),
    "shards without number": (
        lambda plan: plan.update(shards=1 << 61),
        f"`int` <= {MOST_SHARDS} - at `$.shards`",
    ),
    "one shard too many": (
        lambda plan: plan.update(shards=MOST_SHARDS + 1),
        f"`int` <= {MOST_SHARDS} - at `$.shards`",
    ),
    "thousands of sources by thousands of tasks": (
        crossed(2500, 2500),
        "a dataset has at most 4194304 pairs",
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_a_plan_claims_is_bounded_before_it_is_computed_with(dataset, tmp_path, claim):
    change, words = CLAIMS[claim]
    directory = forged(dataset, tmp_path, change)
    limits = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); import"
        " packprep.cli; "
    )
    for command in ("verify", "status") if "shards" in claim else ("verify",):
        code = (
            f"{limits}import sys; sys.argv = ['packprep', {command!r}, {str(directory)!r}];"
            " packprep.cli.main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=made.environment(SLURM_CPUS_PER_TASK="1"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, (
            done.stderr[-2000:]
        )


@pytest.mark.long
@pytest.mark.parametrize("claim", ["pieces", "uses"])
def test_what_a_plan_may_claim_takes_no_time_for_each_piece(dataset, tmp_path, claim):
    """A million pieces, and thousands of uses, that all go to the same shards."""
    directory = forged(
        dataset, tmp_path, pieces(1 << 20, 1.0) if claim == "pieces" else pieces(1, 1000.0)
    )
    said = packprep("verify", directory)
    assert said.status == 1 and "P22 plan.json" in said.out


def test_a_recipe_beyond_the_bounds_is_refused_before_anything_is_written(dataset, tmp_path):
    folder = dataset.parent / "in"
    message = refused(
        "build",
        folder / "a.jsonl",
        "--out",
        tmp_path / "out",
        "--set",
        "output.shard_text_bytes=1",
        "--set",
        "sources.0.repeat=1000",
    )
    assert (
        "output.shard_text_bytes = 1 makes" in message and not (tmp_path / "out/plan.json").exists()
    )


LEDGERS = {
    "no sources": lambda ledger: ledger.update(sources=None),
    "sources that are a list": lambda ledger: ledger.update(sources=[]),
    "a source of nothing": lambda ledger: ledger["sources"].update(web={}),
    "rejects that are a list": (
        lambda ledger: ledger["sources"]["web"]["documents"].update(rejected=[])
    ),
    "a count that no float holds": lambda ledger: ledger.update(row_padding=int("9" * 4300)),
}


@pytest.mark.parametrize("case", LEDGERS)
def test_a_ledger_that_is_none_is_refused_by_what_reads_it(dataset, tmp_path, case):
    directory = forged(dataset, tmp_path, lambda plan: None)
    edit_manifest(directory, lambda manifest: LEDGERS[case](manifest["ledger"]))
    assert "invalid ledger" in refused("inspect", directory)
    for form in ("megatron", "parquet"):
        message = refused("export", directory, "--to", form, "--out", tmp_path / form)
        assert "its ledger does not have the keys and counts" in message


# Where a plan leads


def reached(arguments, below):
    """(status, what a command says, the paths below a folder that it opens or lists and the hosts
    that it asks for), in a child."""
    code = """
import json, sys
below, seen = sys.argv.pop(1), []
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(below):
        seen.append(str(arguments[0]))
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        seen.append(f"{event} {arguments}")
sys.addaudithook(hook)
import packprep.cli
try:
    packprep.cli.main()
finally:
    print("\\nSEEN" + json.dumps(seen), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(below), *map(str, arguments)],
        env=made.environment(SLURM_CPUS_PER_TASK="1"), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said, _, seen = done.stderr.rpartition("\nSEEN")
    assert "Traceback" not in said, said
    return done.returncode, done.stdout + said, json.loads(seen)


def led_away(folder):
    """A plan whose sources lie in a folder of the user's, one of them as a URL."""

    def change(plan):
        plan["sources"][0].update(prefix=str(folder))
        plan["sources"][1].update(prefix=f"file://{folder}")
        plan["recipe"].update(tokenizer=str(folder))

    return change


VIEWS = {
    "row": ["--row", "-1"],
    "segment": ["--row", "0", "--segment", "1"],
    "doc": ["--source", "web", "--doc", "0"],
    "doc at a url": ["--source", "books", "--doc", "0"],
    "html": ["--html", "report.html"],
    "grep": ["--grep", "corpus"],
    "summary": [],
}


@pytest.mark.parametrize("view", VIEWS)
def test_inspection_follows_no_place_that_only_the_plan_names(dataset, tmp_path, monkeypatch, view):
    private = shutil.copytree(dataset.parent / "in", tmp_path / "private")
    directory = forged(dataset, tmp_path, led_away(private))
    monkeypatch.chdir(tmp_path)
    status, said, seen = reached(["inspect", directory, *VIEWS[view]], private)
    assert status == 0 and seen == []
    if view in ("row", "segment"):
        assert said.count("--from-plan to trust the plan") == 1 and "rebuilt" not in said
    if view == "doc":
        assert "its source was not read" in said and "--from-plan" in said


@pytest.mark.long
def test_inspection_reads_what_is_named_and_with_from_plan_all(dataset, tmp_path):
    private = shutil.copytree(dataset.parent / "in", tmp_path / "private")
    directory = forged(
        dataset, tmp_path, lambda plan: [s.update(prefix=str(private)) for s in plan["sources"]]
    )
    named = shutil.copytree(private, tmp_path / "named")
    by_row = (
        inside("inspect", directory, "--row", r, "--from-plan", "--json").json for r in range(99)
    )
    both = next(row for row in by_row if {s["source"] for s in row["segments"]} == {"web", "books"})
    assert {segment["rebuilt"] for segment in both["segments"]} == {"identical"}
    rows = ["inspect", directory, "--row", both["row"], "--json"]
    status, said, seen = reached([*rows, "--source", f"web={named}"], private)
    segments = json.loads(said)["segments"]
    assert status == 0 and seen == []
    assert {s["rebuilt"] == "identical" for s in segments if s["source"] == "web"} == {True}
    assert {s["rebuilt"][:11] for s in segments if s["source"] == "books"} == {"not rebuilt"}
    assert reached([*rows, "--from-plan"], private)[2]


def test_a_header_that_names_another_sources_file_reads_nothing_of_it(dataset, tmp_path):
    from tests.verification.damage import resigned

    private = shutil.copytree(dataset.parent / "in", tmp_path / "private")
    directory = forged(dataset, tmp_path, led_away(private))
    with resigned(directory) as arrays:
        arrays["segment_source"][:] = 1
        arrays["segment_file"][:2] = 2**32 - 1
    named = ["--source", f"books={dataset.parent / 'in'}"]
    status, said, seen = reached(["inspect", directory, "--row", "0", *named], private)
    assert (
        status == 0
        and seen == []
        and "the file in its header does not belong to its source" in said
    )


def test_replay_says_where_it_reads_before_it_does(dataset):
    said = inside("verify", dataset, "--replay", "3")
    places = f"reading the sources web at {dataset.parent / 'in'}, books at {dataset.parent / 'in'}"
    assert said.status == 0 and places in said.err
    assert "reading the sources" not in inside("verify", dataset).err


# Names


@contextlib.contextmanager
def in_folder(path):
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.long
def test_every_character_of_a_name_shows_wherever_it_is_printed(tmp_path):
    """Names on this disk, through each command and as JSON."""
    name = f"a{ESCAPES}.jsonl"
    made.write_lines(tmp_path / "in" / name, made.texts(40, 3))
    (tmp_path / "in" / name).open("a").write('{"text": 3}\n')
    table = {"name": "w\u202eeb\x9b", "paths": ["*.jsonl"]}
    recipe = (
        'tokenizer = "bytes"\nseq_length = 256\n[[sources]]\nname ='
        f' {json.dumps(table["name"])}\npaths = ["*.jsonl"]\n'
    )
    task = '[[tasks]]\nobjective = "causal"\nname = "t\\u202e"\n'
    (tmp_path / "in/recipe.toml").write_text(recipe + task)
    out = tmp_path / f"out{ESCAPES}"
    with in_folder(tmp_path / "in"):
        commands = [
            ["plan", "recipe.toml"],
            ["build", "recipe.toml", "--out", out],
            ["status", out],
            ["verify", out, "--replay", "2"],
            ["inspect", out],
            ["inspect", out, "--row", "-1", "--from-plan"],
            ["inspect", out, "--row", "0", "--segment", "1"],
            ["inspect", out, "--doc", "0", "--from-plan"],
            ["inspect", out, "--grep", "corpus"],
            ["inspect", out, "--html", tmp_path / f"r{ESCAPES}.html"],
            ["export", out, "--to", "parquet", "--out", tmp_path / f"export{ESCAPES}"],
        ]
        for command in commands:
            for more in ([], ["--json"]):
                said = packprep(*command, *more)
                assert said.status == 0, said
                assert_all_shows(said)
                assert not more or isinstance(said.json, dict)
        for command in (
            ["verify", f"no{ESCAPES}"],
            ["inspect", out, "--source", f"x{ESCAPES}=/", "--row", "0"],
            ["build", f"no{ESCAPES}.jsonl", "--out", "o"],
            ["status", f"{out}/no"],
            [f"x{ESCAPES}"],
        ):
            said = packprep(*command)
            assert said.status == 2
            assert_all_shows(said)
        (tmp_path / "in" / name).write_text("changed\n")
        for command in (["verify", out, "--replay", "all"], ["build", "recipe.toml", "--out", out]):
            said = packprep(*command)
            assert said.status in (1, 2)
            assert_all_shows(said)
    assert "\\u{1b}[2J\\u{202e}gnp\\u{2066}\\u{9b}31m" in said.err


def assert_all_shows(said):
    for text in (said.out, said.err):
        assert all(line == visible(line) for line in text.split("\n")), text


@pytest.mark.long
def test_names_that_a_stranger_chose(dataset, tmp_path):
    def change(plan):
        plan["files"][0].update(name=f"a{ESCAPES}\npackprep: all is well.jsonl")
        plan["sources"][0].update(prefix=f"/nowhere{ESCAPES}")

    directory = forged(dataset, tmp_path, change)
    edit_manifest(directory, lambda manifest: manifest["sources"][0].update(name=f"web{ESCAPES}"))
    for command in (
        ["verify", directory],
        ["verify", directory, "--replay", "all"],
        ["inspect", directory],
        ["inspect", directory, "--row", "-1", "--from-plan"],
        ["inspect", directory, "--source", "web", "--doc", "0"],
        ["inspect", directory, "--grep", "corpus"],
        ["inspect", dataset, "--diff", directory],
        ["inspect", directory, "--row", "0", "--source", "no=/"],
    ):
        said = packprep(*command)
        assert_all_shows(said)
        assert "\npackprep: all is well" not in said.out + said.err


def test_lines_of_a_message_pass_for_no_other_message(capsys):
    say(f"one{ESCAPES}\npackprep: every invariant holds\n")
    first, second, *_ = capsys.readouterr().err.split("\n")
    assert (
        first.startswith("packprep: one\\u{1b}]0;owned\\u{7}")
        and second == "  packprep: every invariant holds"
    )


# Secrets

URLS = {
    "s3://AKIAKEY:se/cr+hunter2@bucket/x": "AWS_ACCESS_KEY_ID",
    "https://user:hunter2@example.org/x": "docs/guides/storage.md",
    "sftp://me@corp.org:hunter2@host:22/x": "profile",
    "https://example.org/x?X-Amz-Algorithm=A&X-Amz-Signature=hunter2": "contains a signature or token",
    "https://example.org/x?sv=1&sig=hunter2": "contains a signature or token",
    "https://example.org/x?token=hunter2": "contains a signature or token",
    "gs://bucket/x?GoogleAccessId=a&Signature=hunter2": "GOOGLE_APPLICATION_CREDENTIALS",
}
PLACES = {
    "an input": lambda url: ["build", f"{url}/*.jsonl", "--out", "out"],
    "the recipe's paths": lambda url: [
        "build",
        "recipe.toml",
        "--out",
        "out",
        "--set",
        f'sources.0.paths=["{url}"]',
    ],
    "the recipe's tokenizer": lambda url: ["plan", "recipe.toml", "--set", f'tokenizer="{url}"'],
    "the chat template": lambda url: [
        "plan",
        "recipe.toml",
        "--set",
        f'documents.chat_template="{url}"',
    ],
    "--tokenizer": lambda url: ["build", "recipe.toml", "--tokenizer", url, "--out", "out"],
    "--out": lambda url: ["build", "recipe.toml", "--out", url],
    "--source": lambda url: ["build", "recipe.toml", "--out", "out", "--source", f"web={url}"],
    "--source of verify": lambda url: ["verify", "data", "--source", f"web={url}"],
    "--source of inspect": lambda url: ["inspect", "data", "--row", "0", "--source", f"web={url}"],
    "verify": lambda url: ["verify", url],
    "status": lambda url: ["status", url],
    "inspect": lambda url: ["inspect", url],
    "--diff": lambda url: ["inspect", "data", "--diff", url],
    "--html": lambda url: ["inspect", "data", "--html", url],
    "export": lambda url: ["export", "data", "--to", "parquet", "--out", url],
    "slurm --out": lambda url: ["slurm", "recipe.toml", "--out", url, "--array", "2"],
    "slurm's recipe": lambda url: [
        "slurm",
        "recipe.toml",
        "--out",
        "out",
        "--array",
        "2",
        "--set",
        f'sources.0.paths=["{url}"]',
    ],
    "slurm --source": lambda url: [
        "slurm",
        "--command",
        "verify",
        "--out",
        "out",
        "--array",
        "2",
        "--source",
        f"web={url}",
    ],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_url_with_a_secret_is_refused_wherever_a_place_is_named(
    dataset, tmp_path, monkeypatch, place
):
    shutil.copytree(dataset, tmp_path / "data")
    (tmp_path / "recipe.toml").write_text(
        'tokenizer = "bytes"\nseq_length = 256\n[[sources]]\nname = "web"\npaths = ["a.jsonl"]\n'
    )
    shutil.copy(dataset.parent / "in/a.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for url, words in URLS.items():
        message = refused(*PLACES[place](url))
        assert "hunter2" not in message and "…" in message and words in message, message
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_urls_in_which_nothing_is_secret_are_taken(dataset):
    for url in (
        "sftp://me@host:22/a@b",
        "hf://datasets/me/it@main/x",
        "s3://arn:aws:s3:eu:1:accesspoint/n/a@b",
    ):
        assert "no source of that name" in refused("verify", dataset, "--source", f"none={url}")


def test_a_message_of_a_library_shows_no_secret(capsys):
    say(
        "error: 's3://key:hunter2@bucket/x' and https://h/x?sig=hunter2: refused; see"
        " https://host:8080/a"
    )
    said = capsys.readouterr().err
    assert (
        said == "packprep: error: 's3://…@bucket/x' and https://h/x?sig=… refused; see"
        " https://host:8080/a\n"
    )
