"""The twin divides files into groups of records by itself, and gets the documents that were built."""

import json
import random

import pyarrow as pa
import pyarrow.parquet
import pytest

from packprep.sources.formats import batch
from tests import made
from tests.twin import groups
from tests.twin.check import verify_with_twin
from tests.twin.shards_made import ALL


def rows(count, seed, kinds=3):
    """Records of groups of 1 to 7. The values have several types where there are more kinds."""
    chance, found = random.Random(seed), []
    for g in range(count):
        repo = [f"repo {g}", None, f"{g}", g, float(g), g % 2 == 0][chance.randrange(kinds)]
        for _ in range(chance.choice([1, 1, 2, 3, 7])):
            words = " ".join(chance.choice(made._WORDS) for _ in range(chance.randint(0, 60)))
            found.append({"text": words, "meta": {"repo": repo}, "path": f"{chance.random():.1f}"})
    return found


def corpus(folder):
    """Line files, of which one has bad lines, and tables of the same kind of records."""
    for name, seed in (("a.jsonl", 1), ("b.jsonl.gz", 2), ("c.jsonl.zst", 3)):
        lines = [json.dumps(row).encode() for row in rows(30, seed, 6)]
        for i in range(0, len(lines), 9):
            lines[i:i] = [b"{", b'{"text": 5, "meta": {"repo": "x"}}'][: i // 9 % 3]
        made.write_compressed(folder / "web" / name, b"\n".join(lines))
    table = pa.Table.from_pylist(rows(40, 4))
    folder.joinpath("tables").mkdir()
    pa.parquet.write_table(table, folder / "tables" / "d.parquet", row_group_size=11)
    dictionary = table.set_column(2, "path", table.column("path").dictionary_encode())
    with pa.ipc.new_file(folder / "tables" / "e.arrow", dictionary.schema) as writer:
        writer.write_table(dictionary, max_chunksize=13)
    keys = {"group_by": "meta.repo", "order_by": "path", "between": ["$", 7]}
    return [
        {"name": "web", "paths": ["web/*"], **keys},
        {"name": "tables", "paths": ["tables/*"], **keys, "repeat": 1.5, "sample": [0.1, 0.95]},
        {"name": "alone", "paths": ["web/a.jsonl"]},
    ]


def report(out):
    found = verify_with_twin(out, ALL)
    assert [fault["message"] for fault in found["listed"]] == [] and found["faults"] == 0
    assert found["twin"] == found["replayed"] > 0
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": {"algorithm": "concat"}, "tasks": [{"objective": "causal"}]},
        {"tasks": [{"preset": "ul2r"}]},
        {
            "documents": {"special_text": "reject", "prepend_bos": True},
            "output": {"columns": "least"},
        },
        {"documents": {"long": "truncate", "min_tokens": 30, "max_tokens": 200}},
    ],
    ids=["concat", "ul2r", "least", "truncate"],
)
def test_groups_of_line_files_and_tables(tmp_path, changes):
    documents = {"max_bad_fraction": 1.0, **changes.pop("documents", {})}
    output = {"shard_text_bytes": 8_000, **changes.pop("output", {})}
    recipe = made.table(corpus(tmp_path), documents=documents, output=output, **changes)
    outcome = made.build(recipe, tmp_path, tmp_path / "out")
    assert len(outcome.manifest["shards"]) > 9
    report(tmp_path / "out")


@pytest.mark.long
def test_groups_that_are_longer_than_a_document_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "MAX_DOCUMENT_BYTES", 700)
    monkeypatch.setattr(groups, "MAX_TEXT", 700)
    recipe = made.table(
        corpus(tmp_path), documents={"max_bad_fraction": 1.0}, output={"shard_text_bytes": 8_000}
    )
    outcome = made.build(recipe, tmp_path, tmp_path / "out")
    assert outcome.manifest["ledger"]["sources"]["web"]["documents"]["group_cuts"] > 10
    report(tmp_path / "out")
