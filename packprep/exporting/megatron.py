"""A dataset as Megatron-core's indexed datasets: documents, a pair of files for each source, or packed rows, one pair in all.

Documents are what a `preprocess_data.py --append-eod` would have made of the text: Megatron shuffles, joins and cuts them
itself. Rows keep the packing and lose all that says what in them belongs together and what is trained.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.output import LocalOutput, Nearby, Output
from packprep.building.processes import Do, Report, one_by_one, spread
from packprep.building.run import Progress, open_job
from packprep.building.signals import stoppable
from packprep.dataset.json_files import PLAN_NAME, TOKENIZER_NAME
from packprep.dataset.manifest import Manifest
from packprep.errors import DatasetError, PlanError, RecipeError
from packprep.exporting.documents import restored_documents
from packprep.exporting.indexed import Pair, dtype_for
from packprep.exporting.shards import ShardToExport, drawn_tasks, sound_shard

ROWS_PREFIX = "rows"
_MOST_NAME = 100


def check_out(out: Output) -> LocalOutput:
    """RecipeError for a URL: a .bin grows to its end before it appears, which objects cannot."""
    if not isinstance(out, LocalOutput):
        raise RecipeError(
            f"--out {out}: Megatron's files are written to a folder of this machine; copy them from there"
        )
    return out


def check_rows(manifest: Manifest, progress: Progress) -> None:
    """Rows without their masks: RecipeError where the targets would be lost too; else what is lost is said."""
    tasks = drawn_tasks(manifest)
    in_place = [task["name"] for task in tasks if task["label_alignment"] == "same_slot"]
    if in_place:
        raise RecipeError(
            f"--what rows: a .bin holds tokens alone, and those of {', '.join(in_place)} are noised in place: their targets "
            "would be lost. Give --what documents, or train from the dataset by packprep's loader"
        )
    progress.say(
        "warning: rows of a .bin have no segment ids, loss masks or position ids: a trainer attends and trains across "
        "segments and on padding, unless it reads the dataset itself by packprep.adapters.megatron"
    )


def say_what_documents_lack(manifest: Manifest, progress: Progress) -> None:
    """Tokens that the recipe cut off or dropped are in no segment."""
    truncated = dropped = 0
    for source in manifest["ledger"].get("sources", {}).values():
        truncated += source["tokens"]["truncated"]
        dropped += sum(source["tokens"]["dropped"].values())
    if truncated or dropped:
        progress.say(
            f"{truncated + dropped:,} tokens that the recipe truncated ({truncated:,}) or dropped ({dropped:,}) are not in "
            "the dataset, and so in no document"
        )


def export_megatron(
    near: Nearby, manifest: Manifest, out: LocalOutput, what: str, progress: Progress
) -> dict[str, Any]:
    """Write the pairs; gives what the receipt says of them: dtype, documents, tokens, data_path, files."""
    names = prefixes([source["name"] for source in manifest["sources"]]) if what == "documents" else [ROWS_PREFIX]
    dtype = dtype_for(manifest["vocab_size"])
    pairs = [Pair(out.path / name, dtype) for name in names]
    parts = _documents if what == "documents" else _rows
    try:
        with stoppable() as stop_asked:
            items = [ShardToExport(b) for b in range(len(manifest["shards"]))]
            progress.begin(sum(entry["bytes"] for entry in manifest["shards"]), len(items), len(items))
            clean = out.remove_temporaries
            arguments = (near, manifest, pairs)
            try:
                for _ in spread(parts, arguments, items, 1, progress.add, stop_asked, clean):
                    pass
            finally:
                progress.end()
        made = [(name, pair) for name, pair in zip(names, pairs, strict=True) if pair.documents]
        files = [file for _, pair in made for file in pair.commit()]
    finally:
        for pair in pairs:
            pair.discard()
    return {
        "dtype": dtype.name,
        "documents": sum(pair.documents for pair in pairs),
        "tokens": sum(pair.tokens for pair in pairs),
        "data_path": [text for name, pair in made for text in (str(pair.tokens), name)],
        "files": files,
    }


def _documents(near: Nearby, manifest: Manifest, pairs: Sequence[Pair]) -> Do:
    near.bring(PLAN_NAME, TOKENIZER_NAME)
    job = open_job(near.folder)
    if job.digest != manifest["plan"]["digest"]:
        raise PlanError(
            f"{near.folder / PLAN_NAME}: its digest is {job.digest} and the manifest's {manifest['plan']['digest']}: "
            "put the right file back"
        )

    def append(item: ShardToExport, report: Report) -> None:
        with sound_shard(near, manifest, item.number) as shard:
            restored = restored_documents(job, shard.arrays, str(shard.path))
        first = np.searchsorted(restored.source, np.arange(len(pairs) + 1))
        if first[-1] < len(restored.source):
            raise DatasetError(f"{shard.path}: segment_source {restored.source[-1]} is no source of the manifest")
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(restored.lengths)))
        for pair, begin, end in zip(pairs, first[:-1], first[1:], strict=True):
            if begin < end:
                pair.add(restored.tokens[offsets[begin] : offsets[end]], restored.lengths[begin:end])
        report(len(restored.lengths), shard.size, len(restored.tokens), 0)

    return one_by_one(append)


def _rows(near: Nearby, manifest: Manifest, pairs: Sequence[Pair]) -> Do:
    [pair] = pairs

    def append(item: ShardToExport, report: Report) -> None:
        with sound_shard(near, manifest, item.number) as shard:
            pair.add(shard.arrays["tokens"].reshape(-1), np.full(shard.rows, shard.seq_length, np.int64))
        report(0, shard.size, shard.rows * shard.seq_length, 0)

    return one_by_one(append)


def prefixes(sources: Sequence[str]) -> list[str]:
    """The names of the sources' pairs, NAME_document, as files can be called; no two alike."""
    names: list[str] = []
    for i, source in enumerate(sources):
        name = re.sub(r"^[.-]|[^\w.-]", "_", source)[:_MOST_NAME]
        taken = f"{name}_document" in names
        names.append(f"{name}_{i}_document" if taken else f"{name}_document")
    return names


def data_path(receipt: Mapping[str, Any], out: Output) -> Iterator[str]:
    """The words of Megatron's --data-path: a weight, its tokens, and a prefix for each source that has any."""
    for weight, name in zip(receipt["data_path"][::2], receipt["data_path"][1::2], strict=True):
        yield weight
        yield out.place(name)
