"""Datasets to export: all objectives in one row, and the many forms of a recipe."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from packprep import open_dataset
from packprep.exporting.export import export_dataset
from tests import made
from tests.test_mixed_rows import recipe as mixed_recipe
from tests.test_mixed_rows import write_corpus as write_mixed


class Known(NamedTuple):
    """A dataset, and what its corpus holds: (source, position) → its bytes, and whether it says
    what is trained."""

    out: Path
    texts: dict[tuple[str, int], bytes]
    supervised: set[tuple[str, int]]
    table: dict[str, Any]

    @property
    def dataset(self):
        return open_dataset(self.out)

    def export(self, out: Path, to: str, **options: Any) -> dict[str, Any]:
        return export_dataset(self.out, to, out, made.Silent(), **options)


NEXT_TOKEN = [{"preset": "ul2r"}, {"preset": "causal"}, {"preset": "prefix_lm"}, {"preset": "fim"}]
COMPACT = {"shard_text_bytes": 14_000, "columns": "compact"}
# name → changes of the recipe of next-token tasks; "web" is used 2.5 times in the first
NEXT_TOKEN_KINDS: dict[str, dict[str, Any]] = {
    "repeated": {},
    "bos": {"documents": {"prepend_bos": True}},
    "no_eos": {"documents": {"prepend_bos": True, "append_eos": False}},
    "segment_eos": {"documents": {"append_eos": "segment"}},
    "padded": {"packing": {"pad_seq_to_mult": 8}},
    "compact": {
        "output": COMPACT,
        "packing": {"pad_seq_to_mult": 16},
        "documents": {"prepend_bos": True},
    },
    "truncated": {"documents": {"long": "truncate"}},
    "dropped": {"documents": {"long": "drop"}},
    "concat": {"tasks": [{"preset": "causal"}], "packing": {"algorithm": "concat"}},
    "int32": {"output": {"shard_text_bytes": 20_000, "token_dtype": "int32"}},
    "large_vocabulary": {"specials": {"vocab_size": 70_000}},
    "between": {"specials": {"vocab_size": 65_520}},
}
# next-token tasks that attend causally
CAUSAL_KINDS: dict[str, dict[str, Any]] = {
    "causal": {
        "tasks": [{"preset": "causal"}, {"preset": "fim"}],
        "documents": {"prepend_bos": True},
    },
    "causal_padded": {
        "tasks": [{"preset": "causal"}],
        "packing": {"pad_seq_to_mult": 8},
        "output": COMPACT,
    },
}
MIXED_KINDS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "mixed_truncated": {"documents": {"long": "truncate"}},
    "mixed_bos": {"documents": {"prepend_bos": True}, "packing": {"pad_seq_to_mult": 8}},
    "mixed_no_eos": {"documents": {"append_eos": False}},
    "mixed_segment_eos": {"documents": {"append_eos": "segment"}},
}


def _next_token(folder: Path, changes: dict[str, Any]) -> Known:
    """Two sources of line files, one of them used 2.5 times; long documents, short ones, and one
    without text."""
    texts = {}
    for name, count in (("web", 40), ("my books", 25)):
        lines = [*made.texts(count, len(name), 400), "x", "ab"]
        made.write_lines(folder / f"{name}.jsonl", [*lines, ""])
        at = 0
        for line, text in zip(
            (folder / f"{name}.jsonl").read_bytes().splitlines(True), lines, strict=False
        ):
            texts[name, at] = text.encode()
            at += len(line)
    sources = [
        {"name": "web", "paths": ["web.jsonl"], "repeat": 2.5},
        {"name": "my books", "paths": ["my books.jsonl"]},
    ]
    table = made.table(sources, **{"tasks": NEXT_TOKEN, "seq_length": 256, **changes})
    made.build(table, folder, folder / "out")
    return Known(folder / "out", texts, set(), table)


def _mixed(folder: Path, changes: dict[str, Any]) -> Known:
    documents, table = write_mixed(folder), mixed_recipe(changes)
    made.build(table, folder, folder / "out")
    texts = {place: document.text for place, document in documents.items()}
    supervised = {place for place, document in documents.items() if document.trained is not None}
    return Known(folder / "out", texts, supervised, table)


@pytest.fixture(scope="session")
def known(tmp_path_factory):
    """name of a kind → its dataset, built at its first use. Read only."""
    built: dict[str, Known] = {}

    def of(kind: str) -> Known:
        if kind not in built:
            folder = tmp_path_factory.mktemp(kind)
            one = (NEXT_TOKEN_KINDS | CAUSAL_KINDS).get(kind)
            built[kind] = (
                _mixed(folder, MIXED_KINDS[kind]) if one is None else _next_token(folder, one)
            )
        return built[kind]

    return of


@pytest.fixture(scope="session")
def without_rows(tmp_path_factory) -> Path:
    """A dataset whose documents are empty."""
    return made.build_without_rows(tmp_path_factory.mktemp("without_rows"))


@pytest.fixture(scope="session")
def with_empty_shards(tmp_path_factory) -> Path:
    """A dataset some of whose shards have no rows."""
    folder = tmp_path_factory.mktemp("with_empty_shards")
    made.write_lines(folder / "a.jsonl", ["one document", "x" * 3000, "another"])
    made.build(
        made.table("a.jsonl", output={"shard_text_bytes": 200}, tasks=NEXT_TOKEN),
        folder,
        folder / "out",
    )
    assert 0 in {entry["rows"] for entry in open_dataset(folder / "out").manifest["shards"]}
    return folder / "out"
