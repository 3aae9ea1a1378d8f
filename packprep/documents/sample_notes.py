"""Find problems in a calibration sample that would harm training, and report them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from packprep.conversations.supervision import Conversation
from packprep.conversations.training import Trained
from packprep.documents.sampled_passes import FEW_KEPT, SampledPasses
from packprep.messages import NEAREST, listed
from packprep.recipe import DocumentKeys
from packprep.tokenizer.encoding import Tokens
from packprep.tokenizer.file import unknown_id
from packprep.tokenizer.roles import Vocabulary

MOST_UNKNOWN = 0.01
"""The fraction of a source's tokens that may be the unknown token without a warning."""


@dataclass
class SampleNotes:
    """Counts of problems in a source's sampled texts that would harm training."""

    tokens: int = 0
    unknown: int = 0  # number of tokens that are the unknown token
    conversations: int = 0
    two_bos: int = 0  # conversations in which packprep and the template both add a bos
    spans: int = 0  # trained spans
    split_starts: int = 0  # spans that start inside a token, so that this token is not trained
    answers: int = 0  # trained spans of conversations
    open_ends: int = 0  # answers without a special token among their last tokens
    # description of a part that is not read as intended → conversations with such a part
    ignored: Counter[str] = field(default_factory=Counter)
    keys_keep: str = ""  # `Passes.keys_keep` of the source's expressions
    judged: int = 0  # documents that the source's expressions judged
    kept: int = 0  # documents that they keep
    unjudged: int = 0  # documents with fields that the expressions do not accept
    fault: str = ""  # why the first of these is not accepted
    fields: str = ""  # the fields of a JSON record, if a message needs them
    is_whole: bool = True  # whether they judged all documents of the source
    empty: frozenset[str] | None = None  # fields without a value in all judged records

    def add_passes(self, passes: SampledPasses, is_whole: bool) -> None:
        """Count the documents that the source's expressions judged in one format's sample.

        `is_whole` says whether these are all documents in the source's files of this format.
        """
        self.keys_keep = passes.passes.keys_keep
        self.judged += passes.judged
        self.kept += passes.kept
        self.unjudged += passes.unjudged
        self.fault = self.fault or passes.fault
        self.is_whole &= is_whole
        if passes.judged:
            empty = frozenset(passes.empty)
            self.empty = empty if self.empty is None else self.empty & empty

    def add(
        self,
        tokens: Tokens,
        trained: Mapping[int, Trained],
        conversations: Mapping[int, Conversation],
        settings: DocumentKeys,
        vocabulary: Vocabulary,
    ) -> None:
        """Count the tokens and trained spans of tokenized texts.

        A window of a long conversation has no trained spans, so only its tokens are counted.

        Args:
            tokens: The tokens of all texts.
            trained: Maps a text's number to its trained spans.
            conversations: Maps a text's number to its conversation.
            settings: `[documents]` in the recipe.
            vocabulary: The vocabulary of the tokenizer.
        """
        self.tokens += len(tokens.ids)
        unknown, special = _unknown_and_special(vocabulary)
        self.unknown += int((tokens.ids == unknown).sum())
        for i, of_text in trained.items():
            ids = tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]]
            # A document that has only a weight is not limited, so it has no answers to judge.
            if not len(ids) or not of_text.limited:
                continue
            self.spans += len(conversations[i].spans)
            self.split_starts += of_text.split_starts
            # A window may start anywhere in its conversation, so its start and end mean nothing.
            if not conversations[i].chat or not conversations[i].spans:
                continue
            self.conversations += 1
            self.ignored.update(conversations[i].ignored())
            self.two_bos += bool(settings.prepend_bos and ids[0] == vocabulary.roles.get("bos", -1))
            # The end of an answer may be followed by a line feed, so its last three tokens count.
            last_ones = [ids[max(end - 3, 0) : end] for end in of_text.spans[:, 1].tolist()]
            self.answers += len(last_ones)
            self.open_ends += sum(not np.isin(last_ids, special).any() for last_ids in last_ones)

    def problem(self, has_share: bool) -> str:
        """Return a message about a problem that must stop a build, or "" without such a problem.

        `has_share` says whether the source has a share, which needs an estimate of its tokens.
        """
        field_list = f"; the fields are {self.fields}" if self.fields else ""
        if self.judged and self.unjudged == self.judged:
            return f"{self.fault}{field_list}\nhint: correct the expression"
        if self.judged and not self.kept and (self.empty or self.is_whole or has_share):
            fields = ", ".join(sorted(self.empty or ()))
            why = f": no record has the field {fields}" if fields else ""
            return (
                f"{self.keys_keep} none of {self.judged:,} sampled documents"
                f"{why}{field_list}\n"
                "hint: correct the expression"
            )
        if not self.two_bos:
            return ""
        return (
            f"{self.two_bos} of {self.conversations} sampled conversations start with the bos of"
            " their chat template, and documents.prepend_bos adds another\n"
            "hint: set documents.prepend_bos = false"
        )

    def warnings(self) -> list[str]:
        """Return warnings about problems that do not stop a build."""
        warnings = []
        if self.empty:
            warnings.append(
                f"no sampled record has a value in the field {', '.join(sorted(self.empty))},"
                " which where or repeat reads. Check the name"
                + (f". The fields are {self.fields}" if self.fields else "")
            )
        if self.kept < FEW_KEPT and not self.is_whole:
            warnings.append(
                f"{self.keys_keep} only {self.kept:,} of {self.judged:,} sampled documents,"
                " so its numbers of documents and tokens are uncertain"
            )
        if self.unknown > MOST_UNKNOWN * self.tokens:
            warnings.append(
                f"{self.unknown / self.tokens:.1%} of its sampled tokens are the unknown token"
                " (<unk>), so the tokenizer cannot encode all of the text. Use a tokenizer that"
                " falls back to bytes"
            )
        if self.split_starts:
            warnings.append(
                f"{self.split_starts} of {self.spans} sampled trained spans start inside a token"
                " that starts in the prompt, so this token is not trained. If a prompt ends in a"
                " space, move the space to the start of its completion"
            )
        if self.ignored:
            ordered = sorted(self.ignored.items(), key=lambda item: (-item[1], item[0]))
            parts = listed((f"{part} ({n:,})" for part, n in ordered), NEAREST, "; ")
            warnings.append(
                f"its {self.conversations:,} sampled conversations have parts that are not read, or"
                f" not as intended: {parts}. docs/records.md lists the fields that are read"
            )
        if self.open_ends > self.answers / 2:
            warnings.append(
                f"{self.open_ends} of {self.answers} sampled answers end without a trained special"
                " token, so a model would not learn where an answer ends. Inspect the rows with"
                " `packprep inspect --row 0`"
            )
        return warnings


@lru_cache(maxsize=4)
def _unknown_and_special(vocabulary: Vocabulary) -> tuple[int, np.ndarray]:
    """Return (unknown, special): the id of the unknown token, and the ids of all special tokens.

    `unknown` is -1 if the vocabulary has no unknown token. `special` is int64[k].
    """
    unknown = unknown_id(vocabulary.tokenizer_json)
    special = np.array(vocabulary.special_ids, np.int64)
    return -1 if unknown is None else unknown, special
