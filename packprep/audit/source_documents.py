"""Compare the documents of a source with packed documents, by the hashes of their tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from packprep.audit.checks import MOST_PLACES
from packprep.audit.copies import HashTable
from packprep.audit.documents import FIGURES, SpecialIds, document_figures
from packprep.building.plan import Plan
from packprep.building.planning import look_up, make_plan
from packprep.building.work import slices_of, text_reader
from packprep.errors import RecipeError, SourceError
from packprep.kernel import read_only
from packprep.messages import say
from packprep.recipe import read_recipe


class SourceFindings(NamedTuple):
    """The documents of a source that are not in the packed data.

    Attributes:
        documents: Number of documents of the source.
        missing: Number of documents without any trace.
        cut: Number of documents whose first tokens exist.
        rejected: Number of documents that cannot be tokenized.
        missing_places: First missing documents, as "file:position".
        cut_places: First cut documents, as "file:position".
    """

    documents: int
    missing: int
    cut: int
    rejected: int
    missing_places: list[str]
    cut_places: list[str]


def plan_source(source: str, tokenizer: str, chat_template: str) -> Plan:
    """Return how to read and tokenize the documents of a source.

    Args:
        source: Path, pattern or folder of the source.
        tokenizer: The tokenizer.
        chat_template: The file of a chat template, or "".

    Raises:
        RecipeError: If no file matches the source, or a file is not readable.
    """
    table = {
        "sources": [{"paths": [source]}],
        "tokenizer": tokenizer if not Path(tokenizer).exists() else str(Path(tokenizer).resolve()),
        "specials": {"missing": "add"},
        "seq_length": 1 << 20,
        "tasks": [{"preset": "causal"}],
    }
    if chat_template:
        table["documents"] = {"chat_template": str(Path(chat_template).resolve())}
    try:
        inputs = look_up(read_recipe(table, Path.cwd()), {}, is_store=True)
        plan = Plan(make_plan(inputs), inputs.vocabulary.tokenizer_json)
    except (RecipeError, SourceError) as error:
        message, _, hint = str(error).partition("\nhint: ")
        if "source" in hint:  # Such hints name settings of a recipe.
            hint = "give --source an existing file or pattern of documents"
        message = message.removeprefix("source 'source0': ")
        raise RecipeError(f"--source {source}: {message}\nhint: {hint}") from None
    for note in inputs.vocabulary.notes:
        say(note)
    return plan


def compare_source(
    plan: Plan, special: SpecialIds, packed: HashTable, heads: HashTable
) -> SourceFindings:
    """Tokenize the documents of a source, and look for them among the packed documents.

    Args:
        plan: The result of `plan_source`.
        special: The ids of special tokens. A bos at the start and an eos at the end of a document
            are not compared.
        packed: The hashes of the packed documents.
        heads: The hashes of the first 16 tokens of the packed documents.
    """
    names = [name for planned_source in plan.sources for name in planned_source.files.names]
    source_table, lost, rejected = HashTable(), HashTable(), 0
    for file, positions, hashes, of_heads, rejects in _hashes(plan, special):
        source_table.add(hashes, np.full(len(hashes), file, np.int64), positions, of_heads)
        rejected += rejects
    documents = missing = cut = 0
    places: tuple[list[str], list[str]] = ([], [])
    # A document without an equal hash may have been cut, so its head is looked up next.
    for absent, present in source_table.divided_by(packed):
        documents += len(absent) + len(present)
        keys = np.column_stack((absent["head"], np.zeros_like(absent["head"])))
        lost.add(keys, absent["row"], absent["token"], absent["head"])
    for absent, present in lost.divided_by(heads):
        missing, cut = missing + len(absent), cut + len(present)
        for records, own_places in zip((absent, present), places, strict=True):
            for record in records[: MOST_PLACES - len(own_places)]:
                own_places.append(f"{names[int(record['row'])]}:{int(record['token'])}")
    return SourceFindings(documents, missing, cut, rejected, *places)


def _hashes(
    plan: Plan, special: SpecialIds
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, int]]:
    """Yield the file, positions, hashes, heads and number of rejects of each batch of documents."""
    reader = text_reader(plan)
    ids_of = np.array([special.eos, special.bos, special.unk, -1], np.int64)
    for shard in range(plan.shards):
        for source, work_range in slices_of(plan, shard):
            for read in reader.read(source, work_range, None, xxhash.xxh3_128()):
                offsets = read.tokens.offsets
                # Documents that were rejected by the tokenizer have a position, but no tokens.
                kept_indices = np.delete(
                    np.arange(len(read.positions)), [i for i, *_ in read.tokens.rejected]
                )
                count = len(offsets) - 1
                figures = np.empty((count, len(FIGURES)), np.int64)
                hashes, heads = np.empty((count, 2), np.uint64), np.empty(count, np.uint64)
                ids = np.ascontiguousarray(read.tokens.ids, np.int32)
                document_figures(
                    read_only(ids), offsets[:-1], offsets[1:], ids_of, figures, hashes, heads
                )
                positions = (
                    read.positions if len(read.positions) == count else read.positions[kept_indices]
                )
                rejects = len(read.rejects) + len(read.tokens.rejected)
                # A document without tokens cannot be missing from packed data.
                is_filled = np.diff(offsets) > 0
                yield (
                    work_range.file,
                    positions[is_filled],
                    hashes[is_filled],
                    heads[is_filled],
                    rejects,
                )
