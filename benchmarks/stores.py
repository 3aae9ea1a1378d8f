"""Token stores, measured: whether a dataset of a store is the one of the text, byte for byte, and
how fast it is built.

python benchmarks/stores.py CORPUS                                   366 MB of what benchmarks/corpus.py made
python benchmarks/stores.py CORPUS --size 1GB --only causal ul2r     rates

Every recipe is built from its files and from the store of it, in turn; shards, rejects and ledger
are compared. Rates are tokens by the wall time behind the plan, of all workers together.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import conversations
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from packprep.recipe import parse_size

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = {
    "lines": {"paths": ["lines.jsonl"]},
    "zipped": {"paths": ["zipped.jsonl.gz", "zipped.jsonl.zst"]},
    "table": {"paths": ["table.parquet"]},
}
ADD = {"missing": "add", "sentinels": "auto", "mask": "<mask>"}
RECIPES: dict[str, dict[str, Any]] = {
    "causal": {"tasks": [{"preset": "causal"}], "sources": TEXTS},
    "ul2r": {"tasks": [{"preset": "ul2r"}], "sources": TEXTS, "seq_length": 2048},
    "roll": {
        "tasks": [
            {
                "objective": "span_corruption",
                "noise_density": 0.15,
                "mean_span_length": 3.0,
                "random_roll": True,
            }
        ],
        "sources": {name: {**source, "repeat": 1.5} for name, source in TEXTS.items()},
    },
    "llada": {"tasks": [{"objective": "masked_diffusion", "stratified": True}], "sources": TEXTS},
    "shares": {
        "tasks": [{"preset": "causal"}],
        "sources": {
            "lines": {**TEXTS["lines"], "share": 0.5, "sample": [0.0, 0.9]},
            "zipped": {**TEXTS["zipped"], "share": 0.2},
            "table": {**TEXTS["table"], "share": 0.3},
        },
    },
    "concat": {
        "tasks": [{"preset": "causal"}],
        "sources": TEXTS,
        "packing": {"algorithm": "concat"},
        "seq_length": 8192,
    },
    "supervised": {
        "tasks": [{"objective": "causal"}, {"objective": "prefix_lm"}],
        "sources": {"chats": {"paths": ["chats.jsonl"], "repeat": 2}},
        "documents": {"chat_template": "chat.jinja", "append_eos": False, "max_bad_fraction": 0.9},
    },
    "tokens": {
        "tasks": [{"preset": "ul2r"}],
        "sources": {"ids": {"paths": ["mega/*.bin"], "format": "megatron", "repeat": 1.25}},
    },
}


def packprep(*words: str | Path) -> Any:
    """The JSON result of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "packprep", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"packprep {' '.join(map(str, words))}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def make_inputs(corpus: Path, size: int, folder: Path) -> None:
    """Lines, compressed lines, a table, conversations, and Megatron's files of some of the text."""
    shutil.copy(corpus / "tokenizer.json", folder)
    (folder / "chat.jinja").write_text(TEMPLATE)
    with (
        (corpus / "corpus.jsonl").open("rb") as lines,
        (folder / "lines.jsonl").open("wb") as plain,
    ):
        kept: list[bytes] = []
        read = 0
        for line in lines:
            read += len(line)
            if read < size // 2:
                plain.write(line)
            elif read < size:
                kept.append(line)
            else:
                break
    third = len(kept) // 3
    with gzip.open(folder / "zipped.jsonl.gz", "wb", 6) as zipped:
        zipped.writelines(kept[:third])
    (folder / "zipped.jsonl.zst").write_bytes(zstandard.compress(b"".join(kept[third : 2 * third])))
    texts = [json.loads(line)["text"] for line in kept[2 * third :]]
    pq.write_table(pa.table({"text": texts}), folder / "table.parquet", row_group_size=4096)
    with (folder / "chats.jsonl").open("w") as chats:
        for record in conversations.conversations(size // 40_000):
            chats.write(json.dumps(record, ensure_ascii=False) + "\n")
    source = [
        "--tokenizer",
        folder / "tokenizer.json",
        "--tasks",
        "causal",
        "--out",
        folder / "ids",
        "-q",
    ]
    packprep("build", folder / "table.parquet", *source)
    packprep("export", folder / "ids", "--to", "megatron", "--out", folder / "mega", "-q")


def written(recipe: dict[str, Any], path: Path, store: str = "") -> Path:
    """The recipe as TOML beside its inputs. store: of which its sources are."""
    from packprep.recipe import as_toml

    lines = [f"seq_length = {recipe.get('seq_length', 4096)}", 'tokenizer = "tokenizer.json"']
    for name, source in recipe["sources"].items():
        keys = {**source, "paths": [store], "format": "store"} if store else source
        lines += [
            "[[sources]]",
            f"name = {as_toml(name)}",
            *(f"{k} = {as_toml(v)}" for k, v in keys.items()),
        ]
    for task in recipe["tasks"]:
        lines += ["[[tasks]]", *(f"{k} = {as_toml(v)}" for k, v in task.items())]
    tables = {
        "specials": ADD,
        "packing": recipe.get("packing", {}),
        "documents": recipe.get("documents", {}),
    }
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{k} = {as_toml(v)}" for k, v in keys.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def different(one: Path, other: Path) -> list[str]:
    """What differs of two datasets that are to be one: their shards, rejects and ledger."""
    names = [
        sorted(
            str(p.relative_to(out))
            for part in ("shards", "rejects")
            for p in (out / part).rglob("*.*")
        )
        for out in (one, other)
    ]
    found = sorted(set(names[0]) ^ set(names[1]))
    found += [
        name
        for name in set(names[0]) & set(names[1])
        if (one / name).read_bytes() != (other / name).read_bytes()
    ]
    ledgers = [json.loads((out / "dataset.json").read_text())["ledger"] for out in (one, other)]
    return found + ["ledger"] * (ledgers[0] != ledgers[1])


def rate(result: dict[str, Any]) -> float:
    """Tokens a second of wall time behind the plan."""
    profile = result["profile"]
    plan = sum(stage["seconds"] for stage in profile["stages"] if stage["stage"] == "plan")
    return float(profile["tokens"] / (profile["wall_s"] - plan))


def main() -> None:
    """Build, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, help="what benchmarks/corpus.py made")
    parser.add_argument(
        "--size", type=parse_size, default=parse_size("366MB"), help="of its text (366MB)"
    )
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="packprep-stores-") as name:
        folder = Path(name)
        make_inputs(arguments.corpus, arguments.size, folder)
        print(
            f"{'recipe':<12}{'tokens':>14}{'text, M/s':>12}{'store, M/s':>12}{'bytes/token':>13} "
            " same bytes"
        )
        wrong = False
        for key in arguments.only:
            workers = ["--workers", str(arguments.workers), "-q"]
            recipe, text, of_store = (
                folder / f"{key}{what}" for what in (".toml", "", "-of-store")
            )
            written(RECIPES[key], recipe)
            packprep("tokenize", recipe, "--out", folder / "store", *workers)
            from_text = packprep("build", recipe, "--out", text, "--profile", *workers)
            again = written(RECIPES[key], folder / f"{key}-store.toml", "store")
            result = packprep("build", again, "--out", of_store, "--profile", *workers)
            size = sum(
                p.stat().st_size for p in (folder / "store" / "shards").rglob("*.safetensors")
            )
            tokens = packprep("inspect", folder / "store")["tokens"]["used"]
            found = different(text, of_store)
            wrong |= bool(found)
            rates = [rate(one) / 1e6 for one in (from_text, result)]
            said = f"no: {', '.join(found[:3])}" if found else "yes"
            print(
                f"{key:<12}{tokens:>14,}{rates[0]:>12.1f}{rates[1]:>12.1f}{size / tokens:>13.2f} "
                f" {said}",
                flush=True,
            )
            for made in (folder / "store", text, of_store):
                shutil.rmtree(made)
        sys.exit(wrong)


if __name__ == "__main__":
    main()
