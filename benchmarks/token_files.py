"""Whether packprep reads the token files that other projects' own writers make.

python benchmarks/token_files.py --llm-c LLM_C --nanogpt NANOGPT --olmo-core OLMO_CORE

Each writer gets the docstrings of the standard library and a small tokenizer. packprep then builds
a dataset from the writer's files, verifies it, and compares each document with the ids of its text.

    datatrove   DocumentTokenizer, with and without shuffling, with eos and loss masks
    dolma       tokenize_in_parallel, which `dolma tokens` calls
    llm.c       write_datafile of dev/data/data_common.py, for both models
    nanoGPT     data/shakespeare/prepare.py, with the small tokenizer in place of GPT-2's
    OLMo-core   does not write: its iter_document_indices gives the documents of dolma's files

datatrove and dolma are packages. The others are checkouts, and a writer without one is left out.
"""

import argparse
import ast
import gzip
import importlib.metadata
import importlib.util
import inspect
import json
import pkgutil
import runpy
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from packprep.dataset.loader import open_dataset

EOS, DOCUMENTS = "<|endoftext|>", 600
EXPECTED = "documents of their texts"


def texts() -> list[str]:
    """Return docstrings of the standard library."""
    found = []
    for module in sorted(one.name for one in pkgutil.iter_modules() if one.name.isalpha()):
        spec = importlib.util.find_spec(module)
        if spec is None or not (spec.origin or "").endswith(".py"):
            continue
        tree = ast.parse(Path(spec.origin or "").read_text("utf-8", "ignore"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append(inspect.cleandoc(ast.get_docstring(node) or ""))
    return [text.strip() for text in found if text.strip()][:DOCUMENTS]


def small_tokenizer(folder: Path, documents: list[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE, which is in folder/tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 1000), special_tokens=[EOS], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_tokens([f"unused{i}" for i in range(vocab_size - tokenizer.get_vocab_size())])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return tokenizer


class Written:
    """The files of a writer, and the ids and weights of each document that they should have."""

    def __init__(self, name: str, paths: str, documents: list[list[int]], **source: Any):
        self.name, self.paths, self.documents, self.source = name, paths, documents, source
        self.trained: list[list[int]] | None = None


def by_datatrove(
    folder: Path, tokenizer: Tokenizer, documents: list[str], shuffle: bool, loss: bool
) -> Written:
    """Tokenize with datatrove's DocumentTokenizer."""
    from datatrove.data import Document
    from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer

    step = DocumentTokenizer(
        str(folder / "out"),
        str(folder.parent / "tokenizer" / "tokenizer.json"),
        eos_token=EOS,
        save_loss_metadata=loss,
        shuffle_documents=shuffle,
        seed=3,
        max_tokens_per_file=None,
    )
    records = [Document(text=text, id=str(i)) for i, text in enumerate(documents)]
    if loss:
        for record in records[::2]:
            record.metadata["no_loss_ranges"] = [(0, max(1, len(record.text) // 2))]
    step.run(iter(records), rank=0, world_size=1)
    version = importlib.metadata.version("datatrove")
    kind = f"{'shuffled' if shuffle else 'in order'}{', loss masks' * loss}"
    own = Written(
        f"datatrove {version}, {kind}", "out/*.ds", [tokenizer.encode(t).ids for t in documents]
    )
    if loss:
        own.trained = []
        for i, text in enumerate(documents):
            encoded = tokenizer.encode(text)
            flags = [1] * len(encoded.ids)
            if i % 2 == 0:
                end = encoded.char_to_token(max(1, len(text) // 2))
                end = len(flags) if end is None else end
                flags[:end] = [0] * end
            own.trained.append(flags)
    return own


def by_dolma(folder: Path, tokenizer: Tokenizer, documents: list[str]) -> Written:
    """Tokenize with dolma's tokenize_in_parallel."""
    from dolma.tokenizer import tokenize_in_parallel

    lines = (
        json.dumps({"id": str(i), "text": text, "source": "docs", "added": "", "created": ""})
        for i, text in enumerate(documents)
    )
    source = folder / "in.jsonl.gz"
    source.write_bytes(gzip.compress("\n".join(lines).encode()))
    tokenize_in_parallel(
        sources=[str(source)],
        destination=str(folder / "out"),
        tokenizer_name_or_path=str(folder.parent / "tokenizer" / "tokenizer.json"),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(EOS),
        dtype=np.min_scalar_type(tokenizer.get_vocab_size() - 1).name,
        max_size=1 << 22,
        num_writers=1,
        num_readers=1,
        local_shuffle=100,
    )
    version = importlib.metadata.version("dolma")
    ids = [tokenizer.encode(text).ids for text in documents]
    return Written(f"dolma {version}", "out/**/*.npy", ids)


def by_llm_c(
    folder: Path, checkout: Path, tokenizer: Tokenizer, documents: list[str], model: str
) -> Written:
    """Write eos and the ids of each document with llm.c's write_datafile, as its scripts do."""
    module = runpy.run_path(str(checkout / "dev" / "data" / "data_common.py"))
    eos, ids = tokenizer.token_to_id(EOS), [tokenizer.encode(text).ids for text in documents]
    stream = [id for own in ids for id in (eos, *own)]
    module["write_datafile"](str(folder / "train.bin"), stream, model)
    name = f"llm.c {_commit(checkout)}, {model}"
    return Written(name, "train.bin", ids, format="token_stream")


def by_nanogpt(folder: Path, checkout: Path, tokenizer: Tokenizer, documents: list[str]) -> Written:
    """Run nanoGPT's prepare.py. Its text has eos after each document."""
    place = folder / "shakespeare"
    shutil.copytree(checkout / "data" / "shakespeare", place)
    (place / "input.txt").write_text(EOS.join(documents), "utf-8")
    stub = types.ModuleType("tiktoken")
    encoder = types.SimpleNamespace(encode_ordinary=lambda text: tokenizer.encode(text).ids)
    stub.get_encoding = lambda name: encoder  # type: ignore[attr-defined]
    before = sys.modules.get("tiktoken")
    sys.modules["tiktoken"] = stub
    try:
        runpy.run_path(str(place / "prepare.py"))
    finally:
        if before is None:
            del sys.modules["tiktoken"]
        else:
            sys.modules["tiktoken"] = before
    text = EOS.join(documents)
    cut = int(len(text) * 0.9)
    ids = [
        own
        for half in (text[:cut], text[cut:])
        for own in _divided(tokenizer.encode(half).ids, tokenizer.token_to_id(EOS))
    ]
    name = f"nanoGPT {_commit(checkout)}"
    return Written(name, "shakespeare/*.bin", ids, format="token_stream")


def _divided(ids: list[int], eos: int) -> Iterator[list[int]]:
    own: list[int] = []
    for id in ids:
        if id == eos:
            yield own
            own = []
        else:
            own.append(id)
    if own:
        yield own


def _commit(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or "of an unknown commit"


def found_in(directory: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of each document of a causal dataset, without eos, and which are trained."""
    dataset = open_dataset(directory)
    parts: dict[tuple[int, int], list[tuple[int, list[int], list[int]]]] = {}
    for number in range(len(dataset)):
        row = dataset.row(number)
        segments = row.segments
        for i in range(row.n_segments):
            begin, n = int(segments["begin"][i]), int(segments["tokens"][i])
            # The mask is at the predicting position, so the first token of a segment has none.
            trained = [1, *row.loss_mask[begin : begin + n - 1].astype(int).tolist()]
            place = int(segments["file"][i]), int(segments["doc"][i])
            own = int(segments["start"][i]), row.tokens[begin : begin + n].tolist(), trained
            parts.setdefault(place, []).append(own)
    ids, masks = [], []
    for own_parts in parts.values():
        own_parts.sort()
        ids.append([id for _, some, _ in own_parts for id in some])
        masks.append([one for _, _, some in own_parts for one in some])
    return ids, masks


def judge(folder: Path, written: Written, eos: int) -> str:
    """Build a dataset of the files, and return what differs, or "" if nothing does."""
    recipe = folder / "recipe.toml"
    source = "".join(f"{key} = {json.dumps(value)}\n" for key, value in written.source.items())
    recipe.write_text(
        f'tokenizer = "../tokenizer"\nseq_length = 65536\n[[tasks]]\npreset = "causal"\n'
        f'[[sources]]\npaths = ["{written.paths}"]\n{source}'
    )
    for command in (["build", str(recipe), "--out", str(folder / "packed")],
                    ["verify", str(folder / "packed"), "--replay", "all"]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "packprep", *command], capture_output=True, text=True
        )
        if done.returncode:
            return f"packprep {command[0]}: {done.stderr.strip()[-400:]}"
    ids, masks = found_in(folder / "packed")
    expected = sorted(filter(None, written.documents))
    if sorted(ids) != expected:
        return f"{len(ids)} documents differ from the {len(expected)} {EXPECTED}"
    if any(eos in own for own in ids):
        return "a document has eos as content"
    if written.trained is not None:
        pairs = zip(written.documents, written.trained, strict=True)
        wanted = sorted((own, flags[1:]) for own, flags in pairs if any(flags))
        has = sorted((own, flags[1:]) for own, flags in zip(ids, masks, strict=True))
        if has != wanted:
            return "the trained tokens differ"
    return ""


def olmo_core_documents(checkout: Path, path: Path, eos: int, dtype: Any) -> list[list[int]]:
    """Return the documents of a file as OLMo-core's own function divides it."""
    sys.path.insert(0, str(checkout / "src"))
    from olmo_core.data.utils import iter_document_indices

    ids = np.memmap(path, mode="r", dtype=dtype)
    bounds = iter_document_indices(path, eos_token_id=eos, dtype=dtype)
    return [ids[begin:end].tolist() for begin, end in bounds]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("llm-c", "nanogpt", "olmo-core"):
        parser.add_argument(f"--{name}", type=Path, metavar="CHECKOUT")
    parser.add_argument("--without", action="append", default=[], help="datatrove or dolma")
    options = parser.parse_args(arguments)
    documents, failed = texts(), False
    with tempfile.TemporaryDirectory() as base:
        for vocab_size in (1000, 70_000):
            root = Path(base) / str(vocab_size)
            tokenizer = small_tokenizer(root / "tokenizer", documents, vocab_size)
            eos = tokenizer.token_to_id(EOS)
            tokenizer.post_processor = processors.Sequence([])
            writers: list[tuple[Any, ...]] = []
            if "datatrove" not in options.without:
                writers += [
                    (by_datatrove, shuffle, loss)
                    for shuffle, loss in ((False, False), (True, False), (False, True))
                ]
            if "dolma" not in options.without:
                writers.append((by_dolma,))
            for number, (writer, *more) in enumerate(writers):
                folder = root / f"writer{number}"
                folder.mkdir()
                written = writer(folder, tokenizer, documents, *more)
                difference = judge(folder, written, eos)
                failed |= bool(difference)
                print(f"{written.name}, {vocab_size:,} ids: {difference or 'equal'}", flush=True)
                if writer is by_dolma and options.olmo_core:
                    dtype = np.min_scalar_type(vocab_size - 1).type
                    theirs = [
                        own
                        for path in sorted((folder / "out").rglob("*.npy"))
                        for own in olmo_core_documents(options.olmo_core, path, eos, dtype)
                    ]
                    ours = [[*own, eos] for own in found_in(folder / "packed")[0]]
                    is_equal = sorted(theirs) == sorted(ours)
                    failed |= not is_equal
                    print(
                        f"OLMo-core {_commit(options.olmo_core)}: {'equal' if is_equal else 'differs'}"
                    )
            models_ = ["gpt-2", "llama-3"] if vocab_size < 1 << 16 else ["llama-3"]
            for model in models_ if options.llm_c else ():
                folder = root / f"llm.c-{model}"
                folder.mkdir()
                written = by_llm_c(folder, options.llm_c, tokenizer, documents, model)
                difference = judge(folder, written, eos)
                failed |= bool(difference)
                print(f"{written.name}, {vocab_size:,} ids: {difference or 'equal'}", flush=True)
            if options.nanogpt and vocab_size < 1 << 16:
                folder = root / "nanogpt"
                folder.mkdir()
                written = by_nanogpt(folder, options.nanogpt, tokenizer, documents)
                difference = judge(folder, written, eos)
                failed |= bool(difference)
                print(f"{written.name}, {vocab_size:,} ids: {difference or 'equal'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
