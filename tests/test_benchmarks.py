"""The benchmarks measure what they say."""

import importlib.util
import json
from pathlib import Path


def loaded(name):
    path = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


end_to_end, readers = loaded("end_to_end"), loaded("readers")


def test_it_builds_all_of_the_text_and_leaves_nothing(tmp_path, capsys):
    end_to_end.main(["--size", "200KB", "--workers", "1", "--folder", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    one = result["one"]
    assert one["profile"]["text_bytes"] >= 200_000 and one["tokens_used"] == one["profile"]["tokens"]
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
