"""The registry of the kinds of findings, in the order of the report."""

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of finding.

    Attributes:
        unit: What is counted, and the whole of the share: tokens, documents, rows or "source
            documents".
        title: What a finding is, as a noun phrase for the report.
        means: Why it matters, as one sentence.
        most: Largest share that is no finding. It is above 0 only for properties that sound data
            have too.
    """

    unit: str
    title: str
    means: str
    most: float = 0.0


KINDS = {
    "padding": Kind(
        "tokens",
        "padding",
        "Packers that place whole documents leave less than 5 % in practice. The rest is computed"
        " for nothing.",
        0.10,
    ),
    "duplicate_documents": Kind(
        "documents",
        "copies of an earlier document",
        "A few copies are usual in collected texts. Many copies come from a tool that ran twice.",
        0.01,
    ),
    "duplicate_rows": Kind(
        "rows",
        "copies of an earlier row",
        "A row with the same documents in the same order was written twice.",
        0.01,
    ),
    "empty_documents": Kind(
        "documents",
        "documents without any content",
        "They have only bos and eos, for example because eos was written twice.",
        0.01,
    ),
    "no_eos": Kind(
        "documents",
        "documents without eos",
        "The model does not learn to stop, unless another token ends the texts, such as <|eot_id|>"
        " or a line feed after eos. Documents that are cut at the end of a full row do not count.",
    ),
    "inner_eos": Kind(
        "documents",
        "documents with eos inside",
        "A boundary is missing, so tokens see another document. In chats, eos may end each turn.",
    ),
    "two_bos": Kind(
        "documents",
        "documents with more than one bos",
        "The tokenizer and the chat template both added bos, or a boundary is missing.",
    ),
    "beyond_vocabulary": Kind(
        "tokens",
        "ids outside of the vocabulary",
        "An embedding has no row for them. If many ids are outside, --token-dtype or the tokenizer"
        " is probably not the one of the data.",
    ),
    "unknown_tokens": Kind(
        "tokens",
        "unk tokens",
        "The tokenizer lost the text. It is probably not the tokenizer of the data.",
    ),
    "wrong_labels": Kind(
        "tokens",
        "labels that differ from the predicted token",
        "The label of a position is neither ignored nor the token that the position predicts.",
    ),
    "crossing_labels": Kind(
        "documents",
        "labels that cross a document boundary",
        "The first token of the document is predicted from the document before.",
    ),
    "trained_padding": Kind(
        "tokens", "trained padding", "The loss includes positions that have no content."
    ),
    "untrained_documents": Kind(
        "documents",
        "documents without any trained token",
        "They take positions and give no loss.",
    ),
    "untrained_rows": Kind(
        "rows",
        "rows without any trained token",
        "The mean loss of a batch with only such rows is not a number.",
    ),
    "unreset_positions": Kind(
        "documents",
        "documents whose positions do not start at 0",
        "Position ids run on from the document before. With rotary embeddings this is harmless, if"
        " the attention mask separates documents.",
    ),
    "broken_positions": Kind(
        "tokens",
        "positions that do not increase by 1",
        "Position ids jump inside a document.",
    ),
    "trained_prompts": Kind(
        "documents",
        "documents with trained prompts",
        "Tokens of system, user or tool messages have loss.",
    ),
    "empty_reasoning": Kind(
        "documents",
        "documents with trained empty reasoning",
        "The model learns to write a reasoning block without reasoning.",
    ),
    "missing_documents": Kind(
        "source documents",
        "documents of the source that are missing",
        "No document has their tokens, nor their first 16 tokens.",
    ),
    "cut_documents": Kind(
        "source documents",
        "documents of the source that are cut or changed",
        "A document starts with their first 16 tokens, but none has all their tokens.",
    ),
}
"""Name of a kind → its description. The names are stable: --fail-on and --json use them."""
