"""Export a dataset as Megatron-core's indexed datasets, as documents or as packed rows.

An export of documents writes one pair of files per source, as `preprocess_data.py --append-eod`
would write it from the text. Megatron then shuffles, joins and cuts the documents. An export of
rows writes a single pair. It keeps the packing, but loses the boundaries of segments and the loss
masks.

Text that the recipe truncated or dropped is not in the dataset.

PREFIX.bin contains only tokens, and PREFIX.idx the offset of each document.

    .idx   MMIDIDX\\0\\0   u64 version 1   u8 dtype   u64 sequences   u64 documents + 1
           i32[sequences] tokens of each   i64[sequences] first byte of each in .bin
           i64[documents + 1] first sequence of each

All numbers are little-endian. The format follows `megatron.core.datasets.indexed_dataset`
(megatron-core 0.16). Its `DType` gives each dtype a number and uses uint16 below 65 500 ids. A
document is one sequence here, as `preprocess_data.py` writes it.
"""

import re
import shlex
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.processes import Do, Report, one_by_one
from packprep.dataset.boundaries import offsets_of
from packprep.dataset.manifest import Manifest, drawn_tasks, is_in_place
from packprep.errors import DatasetError, RecipeError
from packprep.exporting.export import (
    Exporting,
    ShardToExport,
    each_shard,
    plan_of,
    restored,
    say_what_documents_lack,
    sound_shard,
)
from packprep.storage import Folder, LocalCopy, LocalFolder
from packprep.storage.local import Growing

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_CODES = {np.dtype("<u2"): 8, np.dtype("<i4"): 4}
_MOST_UINT16_IDS = 65500
_AT_ONCE = 1 << 20  # index entries that are written at a time


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron uses for `vocab_size` ids: uint16 or int32."""
    return np.dtype("<u2" if vocab_size < _MOST_UINT16_IDS else "<i4")


class Pair:
    """A writer of a .bin file and its .idx file. Call `add`, then `commit` or `discard`.

    It needs four bytes of memory per document.
    """

    def __init__(self, prefix: Path, dtype: np.dtype):
        self.prefix, self.dtype = prefix, dtype
        self._bin = Growing(prefix.with_name(f"{prefix.name}.bin"))
        self._idx = Growing(prefix.with_name(f"{prefix.name}.idx"))
        self._lengths: list[np.ndarray] = []
        self.documents = self.tokens = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents.

        Args:
            tokens: int[Σ lengths], of any dtype.
            lengths: int64[d], number of tokens of each document.

        Raises:
            DatasetError: If a document has 2³¹ tokens or more.
        """
        if len(lengths) and lengths.max() >= 1 << 31:
            raise DatasetError(
                f"{self.prefix}: a document has {lengths.max()} tokens, and the format allows at"
                " most 2147483647"
            )
        self._bin.append(np.ascontiguousarray(tokens, self.dtype))
        self._lengths.append(lengths.astype("<i4"))
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def commit(self) -> list[dict[str, Any]]:
        """Write both files under their names, .idx last, and return [{file, bytes, digest}]."""
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        n = len(lengths)
        self._idx.append(MAGIC + struct.pack("<QBQQ", VERSION, _CODES[self.dtype], n, n + 1))
        self._idx.append(lengths)
        # Pointers are computed in parts, to limit the memory.
        byte = 0
        for begin in range(0, n, _AT_ONCE):
            ends = (
                byte
                + np.cumsum(lengths[begin : begin + _AT_ONCE], dtype="<i8") * self.dtype.itemsize
            )
            self._idx.append(np.concatenate(([byte], ends[:-1])).astype("<i8"))
            byte = int(ends[-1])
        # A document is one sequence, so the document indices are 0, 1, … n.
        for begin in range(0, n + 1, _AT_ONCE):
            self._idx.append(np.arange(begin, min(begin + _AT_ONCE, n + 1), dtype="<i8"))
        return [self._bin.commit(), self._idx.commit()]

    def discard(self) -> None:
        """Remove the files, unless `commit` has finished them."""
        self._bin.discard()
        self._idx.discard()


ROWS_PREFIX = "rows"
_MOST_NAME = 100


def check(exporting: Exporting) -> None:
    """Check that the dataset can be written as Megatron's files, and warn of lost masks.

    Raises:
        RecipeError: If `out` is a URL, because a .bin grows until it is published, which object
            stores do not support. Also if rows are exported and the dataset has a same-position
            task, because the targets of this task would be lost.
    """
    if not isinstance(exporting.out, LocalFolder):
        raise RecipeError(
            f"--out {exporting.out}: Megatron's files can only be written to a local folder\n"
            "hint: give a local folder, and copy the files from there"
        )
    if exporting.form == "documents":
        return
    in_place = [task["name"] for task in drawn_tasks(exporting.manifest) if is_in_place(task)]
    if in_place:
        raise RecipeError(
            f"--what rows: a .bin contains only tokens, so the targets of {', '.join(in_place)}"
            " would be lost, because they are at the same positions\n"
            "hint: give --what documents, or train with packprep's loader"
        )
    exporting.progress.say(
        "warning: rows of a .bin have no segment ids, loss masks or position ids. A trainer"
        " attends and trains across segments and on padding\n"
        "hint: read the dataset with packprep.adapters.megatron"
    )


def write(exporting: Exporting) -> dict[str, Any]:
    """Write the pairs of files, and return entries for the receipt.

    The entries are `dtype`, `documents`, `tokens`, `data_path` and `files`.
    """
    manifest, out, of_documents = exporting.manifest, exporting.out, exporting.form == "documents"
    assert isinstance(out, LocalFolder)
    if of_documents:
        say_what_documents_lack(exporting)
    names = (
        prefixes([source["name"] for source in manifest["sources"]])
        if of_documents
        else [ROWS_PREFIX]
    )
    pairs = [Pair(out.path / name, dtype_for(manifest["vocab_size"])) for name in names]
    try:
        counts = each_shard(exporting, _documents if of_documents else _rows, pairs)
        in_part = sum(count for _, count in counts)
        # A source without documents has no files.
        written = [(name, pair) for name, pair in zip(names, pairs, strict=True) if pair.documents]
        files = [file for _, pair in written for file in pair.commit()]
    finally:
        for pair in pairs:
            pair.discard()
    if in_part:
        exporting.progress.say(
            f"warning: {in_part:,} documents are only partly trained, by loss_spans or messages."
            " A .bin cannot express this, so a trainer trains on all of them"
        )
    return {
        "dtype": dtype_for(manifest["vocab_size"]).name,
        "documents": sum(pair.documents for pair in pairs),
        "tokens": sum(pair.tokens for pair in pairs),
        "data_path": [text for name, pair in written for text in (str(pair.tokens), name)],
        "files": files,
    }


def located(receipt: Mapping[str, Any], out: Folder) -> dict[str, Any]:
    """Return the receipt with full paths in `data_path`, the words of Megatron's --data-path.

    Each source with documents has two words: its weight, which is its number of tokens, and its
    file prefix.
    """
    words = receipt["data_path"]
    return {
        **receipt,
        "data_path": [out.path_of(word) if i % 2 else word for i, word in enumerate(words)],
    }


def said(result: Mapping[str, Any]) -> list[str]:
    """Return a line that describes the export, and a line with Megatron's --data-path."""
    summary = (
        f"{result['documents']:,} {result['what']}, {result['tokens']:,} tokens ({result['dtype']})"
    )
    return (
        [summary, f"--data-path {shlex.join(result['data_path'])}"]
        if result["data_path"]
        else [summary]
    )


def _documents(local: LocalCopy, manifest: Manifest, pairs: Sequence[Pair]) -> Do:
    plan = plan_of(local, manifest)

    def append(item: ShardToExport, report: Report) -> int:
        with sound_shard(local, manifest, item.number) as shard:
            documents = restored(plan, manifest, shard)
        # Documents are sorted by source, so each pair gets one range.
        bounds = np.searchsorted(documents.source, np.arange(len(pairs) + 1))
        offsets = offsets_of(documents.lengths)
        for pair, begin, end in zip(pairs, bounds[:-1], bounds[1:], strict=True):
            if begin < end:
                pair.add(
                    documents.tokens[offsets[begin] : offsets[end]], documents.lengths[begin:end]
                )
        report(len(documents.lengths), shard.size, len(documents.tokens), 0)
        return int(documents.in_part.sum())

    return one_by_one(append)


def _rows(local: LocalCopy, manifest: Manifest, pairs: Sequence[Pair]) -> Do:
    [pair] = pairs

    def append(item: ShardToExport, report: Report) -> int:
        with sound_shard(local, manifest, item.number) as shard:
            pair.add(
                shard.arrays["tokens"].reshape(-1), np.full(shard.rows, shard.seq_length, np.int64)
            )
        report(0, shard.size, shard.rows * shard.seq_length, 0)
        return 0  # `check` has already warned of the information that rows lose.

    return one_by_one(append)


def prefixes(sources: Sequence[str]) -> list[str]:
    """Return a unique prefix of file names for each source, such as web_document.

    If two sources would have the same prefix, the second has a number, such as web_1_document.
    Characters that are unusual in file names are replaced by _.
    """
    names: list[str] = []
    for i, source in enumerate(sources):
        stem = re.sub(r"^[.-]|[^\w.-]", "_", source)[:_MOST_NAME]
        name = f"{stem}_document"
        while name in names:
            name, i = f"{stem}_{i}_document", i + 1
        names.append(name)
    return names
