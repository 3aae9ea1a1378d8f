"""Datasets of which every document is known, built once: all objectives and kinds of documents, and
all formats of files."""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import zstandard

from packprep import open_dataset
from packprep.dataset.loader import Dataset
from tests import made, test_mixed_rows

WEB = [{"name": "web", "paths": ["web/*"], "repeat": 2.5, "sample": [0.1, 0.8]}]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "objectives": {},
    "truncated": {"documents": {"long": "truncate", "prepend_bos": True}},
    "dropped": {"documents": {"long": "drop"}, "packing": {"pad_seq_to_mult": 8}},
    "no_eos": {"documents": {"append_eos": False}},
    "segment_eos": {"documents": {"append_eos": "segment"}},
    "compact": {
        "output": {"columns": "compact", "shard_text_bytes": 40_000},
        "tasks": [{"preset": "ul2r"}, {"preset": "fim"}],
    },
    "files": {"sources": WEB, "output": {"shard_text_bytes": 30_000}},
    "concat": {
        "packing": {"algorithm": "concat"},
        "tasks": [{"preset": "causal"}],
        "output": {"shard_text_bytes": 30_000},
    },
}


class Known(NamedTuple):
    """A dataset and what it was made of: (source, file, position) → the document's bytes."""

    out: Path
    dataset: Dataset
    documents: dict[tuple[str, str, int], bytes]
    recipe: dict[str, Any]


def known(folder: Path, name: str) -> Known:
    """One of CONFIGURATIONS, built into `folder`."""
    changes = CONFIGURATIONS[name]
    if name in ("files", "concat"):
        sources = made.mixed_corpus(folder)
        documents = _documents(folder)
        recipe = made.table(
            changes.get("sources", sources[:2]),
            **{k: v for k, v in changes.items() if k != "sources"},
        )
    else:
        of_lines = test_mixed_rows.write_corpus(folder)
        documents = {
            (source, f"{source}.jsonl", at): document.text
            for (source, at), document in of_lines.items()
        }
        recipe = {
            **test_mixed_rows.recipe(changes),
            **{k: changes[k] for k in ("output", "tasks") if k in changes},
        }
        if name == "compact":
            recipe["sources"] = recipe["sources"][:1]
    names = {source.get("name") for source in recipe["sources"]}
    made.build(recipe, folder, folder / "out")
    own = {place: text for place, text in documents.items() if place[0] in names}
    return Known(folder / "out", open_dataset(folder / "out"), own, recipe)


def _documents(folder: Path) -> dict[tuple[str, str, int], bytes]:
    """Read with nothing of packprep."""
    found = {}
    for path in sorted((folder / "web").iterdir()):
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        at = 0
        for line in data.splitlines(keepends=True):
            found["web", path.name, at] = json.loads(line)["text"].encode()
            at += len(line)
    for path in (folder / "books").iterdir():
        for at, text in enumerate(pq.read_table(path)["text"].to_pylist()):
            found["books", path.name, at] = text.encode()
    return found


def segments(known: Known) -> list[dict[str, Any]]:
    """Every segment of a dataset: where it is, where it comes from, and its own bytes of the
    document."""
    plan = json.loads((known.out / "plan.json").read_text())
    found = []
    for r in range(len(known.dataset)):
        columns = known.dataset.row(r).segments
        for i in range(len(columns["task"])):
            source = known.dataset.manifest["sources"][int(columns["source"][i])]["name"]
            start, n = int(columns["start"][i]), int(columns["tokens"][i])
            place = source, plan["files"][int(columns["file"][i])]["name"], int(columns["doc"][i])
            found.append(
                {
                    "place": place,
                    "use": int(columns["repeat"][i]),
                    "row": r,
                    "segment": i + 1,
                    "tokens": [start, start + n],
                    "slots": [int(columns["begin"][i]), int(columns["end"][i])],
                    "task": known.dataset.tasks[int(columns["task"][i])],
                    "text": known.documents[place][start : start + n],
                }
            )
    return found
