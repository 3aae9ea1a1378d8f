"""A fast engine that is wrong on purpose."""

from packprep.tokenizer.engines import EngineKind
from packprep.tokenizer.engines.engine import EngineFault
from packprep.tokenizer.engines.reference import ReferenceEngine

WRONG = "wrong"


class WrongEngine:
    """The reference's ids, but 0 for the last one of a text that has `trap` in it."""

    name, version, library = WRONG, "1", ()

    def __init__(self, vocabulary, special_text, trap, breaks=False):
        self.reference = ReferenceEngine(vocabulary, special_text)
        self.trap, self.breaks = trap, breaks

    def encode(self, texts):
        ids, offsets = self.reference.encode(texts)
        for i, text in enumerate(texts):
            if self.trap in text:
                if self.breaks:
                    raise EngineFault(text, "a slice index starts at 3 but ends at 2")
                ids[offsets[i + 1] - 1] = 0
        return ids, offsets

    def encode_with_characters(self, texts, chat):
        return self.reference.encode_with_characters(texts, chat)

    def tokens_of(self, ids):
        return self.reference.tokens_of(ids)


def prefer_fast_engines(monkeypatch):
    """Let "auto" try a fast engine first for a short text too."""
    monkeypatch.setattr("packprep.tokenizer.engines.PROOF_S", -1.0)


def wrong_kind(trap, breaks=False):
    """The kind of a WrongEngine, for ENGINES."""

    def load(vocabulary, special_text):
        return WrongEngine(vocabulary, special_text, trap, breaks)

    return EngineKind(
        "wrong",
        lambda: WrongEngine.version,
        lambda vocabulary: None,
        load,
        lambda vocabulary: 1000,
        proven=True,
    )
