"""Every example builds and verifies, with its recipe as it stands but for what a small corpus
needs."""

import gzip
import json
import runpy
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer
from typer.testing import CliRunner

import packprep
from packprep.cli.application import app
from packprep.dataset.loader import Dataset
from tests.docs.world import write_corpus
from tests.tokenizer import tokenizers_made

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
        + " ".join(
            vocabulary[(i * i + 7 * j) % len(vocabulary)] for j in range(1 + i * 13 % (2 * words))
        )
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
    assert {path.name for path in EXAMPLES.glob("*.toml")} == {
        "quickstart.toml",
        "ul2r_llama.toml",
        "mixture.toml",
        "llada.toml",
        "supervised.toml",
        "code_fim.toml",
    }


@pytest.mark.long
def test_quickstart_builds_and_verifies(tmp_path):
    packprep_says(
        "build", EXAMPLES / "quickstart.toml", "--out", tmp_path / "packed", "--workers", "1"
    )
    assert "every invariant holds" in packprep_says(
        "verify", tmp_path / "packed", "--replay", "all", "--workers", "1"
    )
    assert (
        packprep_says("inspect", tmp_path / "packed", "--row", "-1", "--from-plan").count(
            "rebuilt from source: identical"
        )
        > 1
    )


@pytest.mark.long
def test_ul2r_for_llama_uses_reserved_tokens_and_adds_none(folder, tmp_path):
    tokenizers_made.write(folder / "tokenizer", tokenizers_made.llama3_like(n_reserved=248))
    # The made tokenizer has 320 tokens before its special ones, and Llama's 128000; all else is as
    # the recipe has it.
    smaller = ["--set", "specials.sentinels.first=327", "--set", "specials.vocab_size=576"]
    out = tmp_path / "packed"
    packprep_says("build", folder / "ul2r_llama.toml", "--out", out, "--workers", "1", *smaller)
    assert "every invariant holds" in packprep_says(
        "verify", out, "--replay", "all", "--workers", "1"
    )
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
    longest = {task["name"]: task["longest_last"] for task in forecast["tasks"]}
    assert longest["x-dense"] == 1473 and longest["r"] > 3700
    dense = next(task for task in forecast["tasks"] if task["name"] == "x-dense")
    assert (dense["longest_inner"], dense["pieces_of_a_row"]) == (1022, 3)


@pytest.mark.long
def test_mixture_gives_the_shares_and_holds_out_what_it_says(folder, tmp_path):
    out, heldout = tmp_path / "packed", tmp_path / "heldout"
    packprep_says("build", folder / "mixture.toml", "--out", out, "--workers", "1")
    assert "every invariant holds" in packprep_says(
        "verify", out, "--replay", "all", "--workers", "1"
    )
    sources = packprep.open_dataset(out).manifest["ledger"]["sources"]
    tokens = {name: source["tokens"]["used"] for name, source in sources.items()}
    assert 0.6 < tokens["web"] / sum(tokens.values()) < 0.8

    second = [
        "--set",
        "sources.web.sample=[0.9, 1.0]",
        "--set",
        "sources.code.sample=[0.9, 1.0]",
        "--tasks",
        "causal",
    ]
    first = ["--set", "sources.web.sample=[0.0, 0.9]", "--set", "sources.code.sample=[0.0, 0.9]"]
    packprep_says(
        "build", folder / "mixture.toml", "--out", tmp_path / "first", "--workers", "1", *first
    )
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


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The examples beside a corpus of real text and a tokenizer with the ids of Llama 3.1's special
    tokens."""
    folder = tmp_path_factory.mktemp("real") / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    write_corpus(folder)
    return folder


def built(real: Path, name: str, out: Path, *options: str) -> Dataset:
    """The dataset of a recipe as it stands, verified; `options` of build."""
    packprep_says("build", real / name, "--out", out, "--workers", "1", *options)
    assert "every invariant holds" in packprep_says(
        "verify", out, "--replay", "all", "--workers", "1"
    )
    return packprep.open_dataset(out)


@pytest.mark.long
def test_llada_masks_every_level_spreads_levels_over_rows_and_draws_new_noise(real, tmp_path):
    dataset = built(real, "llada.toml", tmp_path / "packed")
    assert dataset.manifest["specials"]["mask"] == 128002 and dataset.vocab_size == 128256
    rows = [dataset.row(i).segments["noise"] for i in range(len(dataset))]
    assert min(noise.min() for noise in rows) < 0.05 and max(noise.max() for noise in rows) > 0.95
    # of stratified levels alone
    assert all(abs(noise.mean() - 0.5) <= 0.5 / len(noise) + 1e-6 for noise in rows)
    weights = np.concatenate([dataset.row(i).segments["loss_weight"] for i in range(len(dataset))])
    assert weights.min() >= 1 and weights.max() <= 1000
    shard = dataset.manifest["shards"][0]
    # full columns take 11, and headers
    assert shard["bytes"] < 10.5 * shard["rows"] * dataset.seq_length
    rows_of = dataset.batches(batch_size=len(dataset), shuffle=False, redraw=True)
    first, second = next(rows_of), next(rows_of)
    assert np.array_equal(first["labels"], second["labels"]) and not np.array_equal(
        first["tokens"], second["tokens"]
    )


@pytest.mark.long
def test_supervised_trains_what_the_assistant_says_and_what_closes_it(real, tmp_path):
    dataset = built(real, "supervised.toml", tmp_path / "packed")
    conversations = [
        json.loads(line)["messages"]
        for line in (real / "data/chat/000.jsonl").open(encoding="utf-8")
    ]
    answers = [
        m["content"] for messages in conversations for m in messages if m["role"] == "assistant"
    ]
    batch = dataset.batch(range(len(dataset)))
    trained = batch["labels"][batch["loss_mask"] == 1]
    # <|eot_id|>; each conversation is used twice
    assert (trained == 128009).sum() == 2 * len(answers)
    tokenizer = Tokenizer.from_file(str(real / "tokenizer" / "tokenizer.json"))
    said = Counter(tokenizer.encode(answer, add_special_tokens=False).ids[-1] for answer in answers)
    before = Counter(
        batch["tokens"][(batch["loss_mask"] == 1) & (batch["labels"] == 128009)].tolist()
    )
    assert before == Counter({token: 2 * count for token, count in said.items()})
    mix = dataset.manifest["ledger"]["tasks"]
    assert mix["causal"]["segments"] > mix["prefix_lm"]["segments"] > 0


@pytest.mark.long
def test_code_is_rearranged_and_text_is_not_and_two_pieces_fill_a_row(real, tmp_path):
    dataset = built(real, "code_fim.toml", tmp_path / "packed")
    tasks = [task["name"] for task in dataset.manifest["tasks"]]
    sources = [source["name"] for source in dataset.manifest["sources"]]
    pairs, rearranged, longest = set(), [], 0
    for i in range(len(dataset)):
        row = dataset.row(i)
        for task, source, begin, end, tokens in zip(
            *(row.segments[name].tolist() for name in ("task", "source", "begin", "end", "tokens")),
            strict=True,
        ):
            pairs.add((sources[source], tasks[task]))
            longest = max(longest, tokens)
            assert tokens <= 2048
            if tasks[task] == "fim":
                rearranged.append(set(row.tokens[begin:end].tolist()) >= {128002, 128003, 128005})
    assert pairs >= {("code", "fim"), ("web", "causal")} and pairs <= {
        ("code", "fim"), ("web", "causal"), ("web", "too_short"), ("code", "too_short")
    }  # fmt: skip
    assert 0.8 < np.mean(rearranged) < 0.97 and longest > 2040
    ledger = dataset.manifest["ledger"]
    assert ledger["row_padding"] < 0.03 * len(dataset) * dataset.seq_length


def test_read_batches_runs(tmp_path, capsys):
    packprep_says(
        "build", EXAMPLES / "quickstart.toml", "--out", tmp_path / "packed", "--workers", "1"
    )
    runpy.run_path(str(EXAMPLES / "read_batches.py"))["main"](str(tmp_path / "packed"))
    assert "goes on with the same rows" in capsys.readouterr().out
