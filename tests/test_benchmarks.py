"""The benchmarks measure what they say."""

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from packprep.objectives import tasks
from packprep.objectives.span_corruption import render_with_mask, span_counts
from packprep.tokenizer.engines.byte_tokens import ByteTokens
from packprep.tokenizer.engines.fastokens import FastEngine
from tests.tokenizer import tokenizers_made

pytestmark = pytest.mark.long


def script(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


end_to_end, packing, objectives, readers = map(
    script, ("end_to_end", "packing", "objectives", "readers")
)
engine_exactness, verify, utilisation = map(script, ("engine_exactness", "verify", "utilisation"))


@pytest.mark.long
def test_it_builds_all_of_the_text_and_leaves_nothing(tmp_path, capsys):
    end_to_end.main(["--size", "200KB", "--workers", "1", "--folder", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    one = result["one"]
    assert (
        one["profile"]["text_bytes"] >= 200_000 and one["tokens_used"] == one["profile"]["tokens"]
    )
    assert one["tokens_used"] == one["profile"]["text_bytes"]  # bytes are its tokens
    assert result["many"] is None and not list(tmp_path.iterdir())


def test_readers_and_bare_loops_give_the_same_texts(tmp_path):
    source = readers._library(tmp_path / "library.jsonl", 3_000_000)
    files = readers._files(tmp_path, source)
    expected = [json.loads(line)["text"] for line in source.read_bytes().splitlines()]
    for name, path in files.items():
        for texts_of in (readers._read, readers._BARE[name]):
            assert [text for texts in texts_of(path) for text in texts] == expected, name


def test_the_readers_benchmark_has_a_rate_for_every_format(capsys):
    readers.main(["--size", "100KB", "--rounds", "1", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["text_bytes"] >= 100_000 and set(result["formats"]) == set(readers._BARE)
    assert all(rate > 0 for rates in result["formats"].values() for rate in rates.values())


def test_packing_is_measured_for_each_capacity_and_algorithm(capsys):
    few = [
        "--documents",
        "3000",
        "--capacity",
        "512",
        "1000",
        "--algorithm",
        "best_fit",
        "next_fit",
        "--repeats",
        "1",
    ]
    packing.main([*few, "--json"])
    lines = json.loads(capsys.readouterr().out)
    assert [(line["algorithm"], line["capacity"]) for line in lines] == [
        (algorithm, capacity) for algorithm in ("best_fit", "next_fit") for capacity in (512, 1000)
    ]
    assert all(line["grouped_per_s"] > 0 and 0.5 < line["utilisation"] <= 1 for line in lines)
    assert [line["assignment_per_s"] is not None for line in lines] == [True, True, False, False]
    packing.main(few)
    assert "best_fit" in capsys.readouterr().out


def test_pieces_of_long_documents_fill_rows_whatever_the_sentinels(capsys):
    assert (
        utilisation.main(
            ["--seq-length", "512", "4096", "32768", "--sentinels", "64", "100", "245", "--json"]
        )
        == 0
    )
    lines = json.loads(capsys.readouterr().out)
    assert len(lines) == 3 * 3 + 4 and all(line["fewest_rows"] >= 1000 for line in lines)
    assert all(share > 0.995 for line in lines for share in line["filled"].values())


def test_what_is_not_full_is_told_by_the_exit_status(capsys, monkeypatch):
    """Without the law, 100 sentinels end pieces at 54 % of a row of 4096."""
    monkeypatch.setattr(tasks, "pieces_of_a_row", lambda recipe, task: 1)
    assert utilisation.main(["--seq-length", "4096", "--sentinels", "100"]) == 1
    cells = capsys.readouterr().out.splitlines()[2].split("|")
    assert [cell.strip() for cell in cells[1:3]] == ["t5", "100"] and float(cells[3]) < 60


def test_objectives_are_measured_beside_what_others_do(capsys):
    few = ["--tokens", "20000", "--length", "500", "--seq-length", "1024", "--repeats", "1"]
    objectives.main([*few, "--json"])
    tables = json.loads(capsys.readouterr().out)
    counts = [len(objectives.SPANS), len(objectives.NOISE), len(objectives.PRESETS)]
    assert [len(lines) for lines in tables.values()] == counts
    for name, lines in tables.items():
        assert all(line["tokens_per_s"] > 0 and line["copy_per_s"] > 0 for line in lines)
        assert all((line["other_per_s"] is None) == (name == "render") for line in lines)
    objectives.main(few)
    assert "of copy bound" in capsys.readouterr().out


@pytest.mark.long
def test_scale_measures_planning_starting_and_publishing(tmp_path, capsys):
    script("scale").main(
        [
            "--files",
            "50",
            "--file-bytes",
            "30MB",
            "--shards",
            "12",
            "--folder",
            str(tmp_path),
            "--json",
        ]
    )
    result = json.loads(capsys.readouterr().out)
    assert len(result) == 7 and not list(tmp_path.iterdir())
    assert all(
        line["seconds"] >= 0 and line["peak_mib"] > 0 for lines in result.values() for line in lines
    )
    assert [line["note"] for line in result["starting:.jsonl"]][:2] == ["50 files", "400 pieces"]


@pytest.mark.parametrize("density, mean", [(0.15, 3.0), (0.5, 3.0), (0.15, 64.0)])
def test_the_collator_corrupts_spans_as_packprep_does(density, mean):
    tokens, chance = np.arange(500), np.random.default_rng(3)
    mask = objectives.spans_mask(500, density, mean, np.random.default_rng(3))
    n_noise, n_spans = span_counts(500, density, mean)
    assert mask.sum() == n_noise and np.count_nonzero(np.diff(mask.astype(int)) == 1) == n_spans
    inputs, targets = objectives.collate(tokens, density, mean, 1000, chance)
    slots, prefix = render_with_mask(tokens, mask, np.arange(1000, 1500))
    assert inputs.tolist() == slots[:prefix].tolist()
    # its targets mark the text between the spans; ours the spans
    assert targets[targets < 1000].tolist() == [t for t in slots[prefix:].tolist() if t < 1000]
    assert np.count_nonzero(targets >= 1000) == n_spans


def test_exactness_tells_equal_refused_and_different_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine_exactness, "CONTEXTS", ())  # code points are a matter of minutes
    files = {
        "gpt2": tokenizers_made.gpt2_like(),
        "bert": tokenizers_made.bert_like(),
        "hole": tokenizers_made.with_hole(),
    }
    paths = [
        str(tokenizers_made.write(tmp_path / name, made) / "tokenizer.json")
        for name, made in files.items()
    ]
    assert engine_exactness.main([*paths, "--texts", "50"]) == 0
    said = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    assert [words.partition(":")[0] for *_, words in said if ": no difference" in words] == [
        "fastokens",
        "nanotoken",
    ]
    assert said[-1][2].startswith("no tokenizer that packprep")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in tokenizers_made.SENTENCES)
    )
    assert engine_exactness.main([paths[0], "--texts", "50", "--documents", str(corpus)]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"no difference in ids and characters in 4 documents,"
        r" ([\d,]+ texts with added tokens, )?50 nasty texts; ",
        out,
    ), out
    with monkeypatch.context() as patch:
        patch.setattr(
            ByteTokens, "characters", lambda *_: (np.zeros((0, 2), np.int64), np.zeros(0))
        )
        assert engine_exactness.main([paths[0], "--texts", "50"]) == 1
    monkeypatch.setattr(
        FastEngine,
        "encode",
        lambda engine, texts: engine.reference.encode([t + "a" for t in texts]),
    )
    assert engine_exactness.main([paths[0], "--texts", "50"]) == 1
    assert "it differs from the reference: the text" in capsys.readouterr().out


# what real_tokenizers.py made, and corpus.py's corpus.jsonl
TOKENIZERS, DOCUMENTS = ("PACKPREP_TOKENIZERS", "PACKPREP_DOCUMENTS")


@pytest.mark.campaign
@pytest.mark.skipif(
    TOKENIZERS not in os.environ or DOCUMENTS not in os.environ,
    reason=f"{TOKENIZERS} names a folder of tokenizer.json files, {DOCUMENTS} a line file",
)
def test_engines_are_exact_for_real_tokenizers():
    paths = [str(path) for path in sorted(Path(os.environ[TOKENIZERS]).glob("*.json"))]
    assert paths and engine_exactness.main([*paths, "--documents", os.environ[DOCUMENTS]]) == 0


def test_torch_workers_measures_all_that_it_names(tmp_path, capsys):
    pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
    from tests.dataset import synthetic

    synthetic.make_dataset(tmp_path, (9,))
    figures = script("torch_workers").main(
        [str(tmp_path), "--batch-size", "4", "--batches", "2", "--repeats", "1"]
    )
    assert len(figures) == 7 and all(value > 0 for value in figures.values())
    assert capsys.readouterr().out.count("rows/s") == 7


def test_verification_is_measured_beside_the_digest_of_the_same_bytes(built, capsys):
    verify.main([str(built.out), "--repeats", "2", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == sum(
        path.stat().st_size for path in built.out.rglob("*") if path.is_file()
    )
    assert [len(result[name]) for name in ("digest", "verify")] == [2, 2]
    verify.main([str(built.out), "--repeats", "1"])
    assert "times as long as the digest" in capsys.readouterr().out


def test_audits_are_measured_for_each_format(tmp_path, capsys):
    arguments = ["--gigabytes", "0.001", "--repeats", "1", "--folder", str(tmp_path)]
    script("audit").main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {one["tokens"] for one in found.values()} == {500_000} and len(found) == 3
    script("audit").main(arguments)
    assert capsys.readouterr().out.count("s of CPU") == 3 and not any(tmp_path.iterdir())


def test_a_damaged_dataset_is_not_measured(built, tmp_path):
    directory = Path(shutil.copytree(built.out, tmp_path / "copy"))
    (directory / "more").write_bytes(b"")
    with pytest.raises(SystemExit, match="1 faults"):
        verify.main([str(directory)])
