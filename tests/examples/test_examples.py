"""Every example builds and verifies, with its recipe as it stands but for what a small corpus needs."""

import gzip
import json
import runpy
import shutil
from pathlib import Path

import pytest
import zstandard
from typer.testing import CliRunner

import packprep
from packprep.cli import app
from tests.corpus import tokenizers_made

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def packprep_says(*arguments: str | Path) -> str:
    """The stdout of a command that has to succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{arguments}: {result.output} {result.exception!r}"
    return result.stdout


def lines(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts)


def texts(count: int, words: int) -> list[str]:
    """Documents of 1 … 2 · words words, none like another."""
    vocabulary = " ".join(tokenizers_made.SENTENCES).split()
    return [
        f"document {i}: "
        + " ".join(vocabulary[(i * i + 7 * j) % len(vocabulary)] for j in range(1 + i * 13 % (2 * words)))
        for i in range(count)
    ]


@pytest.fixture
def folder(tmp_path):
    """A copy of the examples, with a small corpus beside them."""
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("web", "code"):
        (folder / "data" / name).mkdir(parents=True)
    (folder / "data/web/a.jsonl.zst").write_bytes(zstandard.compress(lines(texts(400, 200))))
    (folder / "data/code/a.jsonl.gz").write_bytes(gzip.compress(lines(texts(300, 100), "content")))
    return folder


def test_every_recipe_has_a_test():
    assert {path.name for path in EXAMPLES.glob("*.toml")} == {"quickstart.toml", "ul2r_llama.toml", "mixture.toml"}


def test_quickstart_builds_and_verifies(tmp_path):
    packprep_says("build", EXAMPLES / "quickstart.toml", "--out", tmp_path / "packed", "--workers", "1")
    assert "every promise holds" in packprep_says("verify", tmp_path / "packed", "--replay", "all", "--workers", "1")
    assert packprep_says("inspect", tmp_path / "packed", "--row", "-1").count("rebuilt from source: identical") > 1


def test_ul2r_for_llama_uses_reserved_tokens_and_adds_none(folder, tmp_path):
    tokenizers_made.write(folder / "tokenizer", tokenizers_made.llama3_like(n_reserved=248))
    # The made tokenizer has 320 tokens before its special ones, and Llama's 128000; all else is as the recipe has it.
    smaller = ["--set", "specials.sentinels.first=327", "--set", "specials.vocab_size=576"]
    out = tmp_path / "packed"
    packprep_says("build", folder / "ul2r_llama.toml", "--out", out, "--workers", "1", *smaller)
    assert "every promise holds" in packprep_says("verify", out, "--replay", "all", "--workers", "1")
    dataset = packprep.open_dataset(out)
    specials = dataset.manifest["specials"]
    assert (specials["[NLU]"], specials["[NLG]"], specials["[S2S]"]) == (322, 323, 326)
    assert specials["sentinels"] == list(range(327, 327 + 245))
    assert (specials["bos"], specials["eos"], specials["pad"]) == (320, 321, 324)
    assert dataset.manifest["added_tokens"] == [] and dataset.vocab_size == 576
    mix = {name: count["segments"] for name, count in dataset.manifest["ledger"]["tasks"].items()}
    assert all(mix[name] > 10 for name in ("r", "x-long", "x-dense", "s"))


def test_ul2r_for_llama_plans_the_lengths_that_its_comments_name(folder):
    tokenizers_made.write(folder / "tokenizer", tokenizers_made.llama3_like(n_reserved=248))
    smaller = ["--set", "specials.sentinels.first=327", "--set", "specials.vocab_size=576"]
    forecast = json.loads(packprep_says("plan", folder / "ul2r_llama.toml", "--json", *smaller))
    longest = {task["name"]: task["longest_tokens"] for task in forecast["tasks"]}
    assert longest["x-dense"] == 1473 and longest["r"] > 3700


def test_mixture_gives_the_shares_and_holds_out_what_it_says(folder, tmp_path):
    out, heldout = tmp_path / "packed", tmp_path / "heldout"
    packprep_says("build", folder / "mixture.toml", "--out", out, "--workers", "1")
    assert "every promise holds" in packprep_says("verify", out, "--replay", "all", "--workers", "1")
    sources = packprep.open_dataset(out).manifest["ledger"]["sources"]
    tokens = {name: source["tokens"]["used"] for name, source in sources.items()}
    assert 0.6 < tokens["web"] / sum(tokens.values()) < 0.8

    second = ["--set", "sources.web.sample=[0.9, 1.0]", "--set", "sources.code.sample=[0.9, 1.0]", "--tasks", "causal"]
    first = ["--set", "sources.web.sample=[0.0, 0.9]", "--set", "sources.code.sample=[0.0, 0.9]"]
    packprep_says("build", folder / "mixture.toml", "--out", tmp_path / "first", "--workers", "1", *first)
    packprep_says("build", folder / "mixture.toml", "--out", heldout, "--workers", "1", *second)
    assert not documents_of(tmp_path / "first") & documents_of(heldout)


def documents_of(directory: Path) -> set[tuple[int, int]]:
    dataset = packprep.open_dataset(directory)
    found = set()
    for i in range(len(dataset)):
        segments = dataset.row(i).segments
        found |= set(zip(segments["file"].tolist(), segments["doc"].tolist(), strict=True))
    assert found
    return found


def test_read_batches_runs(tmp_path, capsys):
    packprep_says("build", EXAMPLES / "quickstart.toml", "--out", tmp_path / "packed", "--workers", "1")
    runpy.run_path(str(EXAMPLES / "read_batches.py"))["main"](str(tmp_path / "packed"))
    assert "goes on with the same rows" in capsys.readouterr().out
