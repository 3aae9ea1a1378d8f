"""How document 1 was read, in a line: what a build says first, so that a wrong text key or a doubled bos shows at once."""

from collections.abc import Sequence

from packprep.building.job import Job
from packprep.corpus.planning import PlannedSource
from packprep.corpus.readers import Reject, read
from packprep.corpus.reading import keeper
from packprep.corpus.tokenization import tokenize
from packprep.inspection.decoding import SPECIAL, Piece, TokenTexts
from packprep.inspection.lines import special, visible

SHOWN_TOKENS = 8  # at either end of document 1


def first_document(job: Job) -> str:
    """How document 1 was read, in a line: the first of shard 0 that has tokens, its first and last tokens one by one.

        document 1: web a.jsonl at 0: 1,234 tokens: The│ cat│ sat … on│ the│ mat│.│‹eos›

    Raises SourceError if its file cannot be read.
    """
    first_reject: tuple[PlannedSource, Reject] | None = None
    documents, vocabulary = job.recipe.documents, job.vocabulary
    for source in job.sources:
        for extent in source.extents(0, job.shards):
            keep = keeper(source, extent.use)
            for part in source.parts(extent):
                for batch in read(part, source.source.text_key, keep, batch_bytes=1 << 16):
                    if batch.rejects and first_reject is None:
                        first_reject = source, batch.rejects[0]
                    for i, text in enumerate(batch.texts):
                        ids = tokenize(job.engine, [text], documents.special_text, vocabulary).ids.tolist()
                        if ids:
                            where = f"{source.name} {_name_of(source, part.file)} at {batch.positions[i]}"
                            head = [vocabulary.roles["bos"]] if documents.prepend_bos else []
                            tail = [vocabulary.roles["eos"]] if documents.append_eos else []
                            texts = TokenTexts(vocabulary.tokenizer_json, vocabulary.special_ids)
                            return f"document 1: {where}: {len(ids):,} tokens: {_ends(texts, [*head, *ids, *tail])}"
    if first_reject is None:
        return "document 1: shard 0 has no document with tokens"
    source, reject = first_reject
    where = f"{source.name} {_name_of(source, reject.file)} at {reject.position}"
    return (
        f"document 1: shard 0 has no document that can be used; the first is {where}: {reject.reason}: {reject.detail}"
    )


def _name_of(source: PlannedSource, file: int) -> str:
    return visible(source.files[file - source.first_file].name)


def _ends(texts: TokenTexts, ids: Sequence[int]) -> str:
    """The ids' texts, a bar between two tokens; only the first and last SHOWN_TOKENS of many."""
    if len(ids) <= 2 * SHOWN_TOKENS:
        return "│".join(map(_shown, texts.one_by_one(ids)))
    return " … ".join("│".join(map(_shown, texts.one_by_one(end))) for end in (ids[:SHOWN_TOKENS], ids[-SHOWN_TOKENS:]))


def _shown(piece: Piece) -> str:
    return special(piece.text) if piece.kind == SPECIAL else visible(piece.text)
