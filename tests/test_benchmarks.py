"""The benchmark measures what it says."""

import importlib.util
import json
from pathlib import Path

_PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "end_to_end.py"
_SPEC = importlib.util.spec_from_file_location("end_to_end", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
end_to_end = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(end_to_end)


def test_it_builds_all_of_the_text_and_leaves_nothing(tmp_path, capsys):
    end_to_end.main(["--size", "200KB", "--workers", "1", "--folder", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    one = result["one"]
    assert one["profile"]["text_bytes"] >= 200_000 and one["tokens_used"] == one["profile"]["tokens"]
    assert one["tokens_used"] == one["profile"]["text_bytes"]  # bytes are its tokens
    assert result["many"] is None and not list(tmp_path.iterdir())
