"""How document 1 was read, in a line: what a build says first, so that a wrong text key or a doubled bos shows at once."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from packprep.building.job import Job
from packprep.building.progress import visible
from packprep.corpus.planning import PlannedSource
from packprep.corpus.readers import Batch, Reject, read
from packprep.corpus.reading import keeper
from packprep.corpus.token_documents import take_tokens
from packprep.corpus.training import tokenize_marked
from packprep.inspection.decoding import SPECIAL, TextPiece, TokenTexts
from packprep.inspection.lines import special

SHOWN_TOKENS = 8  # at either end of document 1


def first_document(job: Job) -> str:
    """How document 1 was read, in a line: the first of shard 0 that has tokens, its first and last tokens one by one.

        document 1: web a.jsonl at 0: 1,234 tokens: The│ cat│ sat … on│ the│ mat│.│‹eos›

    Of a document that says what of it is trained: "1,234 tokens, 56 of them trained: …".
    Raises SourceError if its file cannot be read.
    """
    first_reject: tuple[PlannedSource, Reject] | None = None
    documents, vocabulary = job.recipe.documents, job.vocabulary
    for source in job.sources:
        for extent in source.extents(0, job.shards):
            keep = keeper(source, extent.use, extent.piece)
            for part in source.parts(extent):
                for batch in read(part, source.source.text_key, keep, batch_bytes=1 << 16, marks=job.marks):
                    if batch.rejects and first_reject is None:
                        first_reject = source, batch.rejects[0]
                    for i, (ids, n_trained) in enumerate(_contents(job, batch)):
                        if ids:
                            of = "" if n_trained is None else f", {n_trained:,} of them trained"
                            where = f"{source.name} {_name_of(source, part.file)} at {batch.positions[i]}"
                            head = [vocabulary.roles["bos"]] if documents.prepend_bos else []
                            tail = [vocabulary.roles["eos"]] if documents.append_eos else []
                            return f"document 1: {where}: {len(ids):,} tokens{of}: {_ends(job, [*head, *ids, *tail])}"
    if first_reject is None:
        return "document 1: shard 0 has no document with tokens"
    source, reject = first_reject
    where = f"{source.name} {_name_of(source, reject.file)} at {reject.position}"
    return (
        f"document 1: shard 0 has no document that can be used; the first is {where}: {reject.reason}: {reject.detail}"
    )


def _contents(job: Job, batch: Batch) -> Iterator[tuple[list[int], int | None]]:
    """(ids; how many are trained, None where it does not say) of each document of a batch that is not rejected, in turn."""
    if batch.tokens is not None:
        tokens = take_tokens(batch.tokens, job.recipe.documents, job.vocabulary)
        yield from ((tokens.ids[a:b].tolist(), None) for a, b in pairwise(tokens.offsets.tolist()))
    for text, mark in zip(batch.texts, batch.marks, strict=True):
        special_text = job.recipe.documents.special_text
        tokens, marked = tokenize_marked(job.engine, [text], [mark], special_text, job.vocabulary)
        yield tokens.ids.tolist(), int(np.diff(marked[0].spans).sum()) if marked else None


def _name_of(source: PlannedSource, file: int) -> str:
    return visible(source.files[file - source.first_file].name)


def _ends(job: Job, ids: Sequence[int]) -> str:
    """The ids' texts, a bar between two tokens; only the first and last SHOWN_TOKENS of many."""
    ends = [ids] if len(ids) <= 2 * SHOWN_TOKENS else [ids[:SHOWN_TOKENS], ids[-SHOWN_TOKENS:]]
    tokens = job.engine.tokens_of([id for end in ends for id in end])
    texts = TokenTexts(job.vocabulary.tokenizer_json, job.vocabulary.special_ids, tokens)
    return " … ".join("│".join(map(_shown, texts.one_by_one(end))) for end in ends)


def _shown(piece: TextPiece) -> str:
    return special(piece.text) if piece.kind == SPECIAL else visible(piece.text)
