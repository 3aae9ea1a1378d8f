"""Find the ids of eos, bos, pad and unk, and the size of the vocabulary."""

from collections.abc import Mapping
from pathlib import Path

from packprep.audit.documents import SpecialIds
from packprep.recipe import Specials
from packprep.tokenizer.file import unknown_id
from packprep.tokenizer.roles import Needs, Vocabulary, resolve_vocabulary

_OPTIONS = {name: f"--{name}-id" for name in ("eos", "bos", "pad", "unk")}
_OPTIONS["vocab_size"] = "--vocab-size"


def read_vocabulary(tokenizer: str) -> Vocabulary:
    """Return the vocabulary of a tokenizer, with the special tokens that its files declare.

    A tokenizer without eos and pad gets further tokens for them, which `ChosenIds` ignores.

    Raises:
        VocabularyError: If the tokenizer cannot be read.
    """
    return resolve_vocabulary(
        tokenizer, Path.cwd(), Specials(missing="add"), Needs(frozenset(), (), 0)
    )


class ChosenIds:
    """The ids that an audit uses, and their places.

    An option wins over the data's own notes, and these win over the tokenizer.

    Attributes:
        ids: The ids.
        places: Name → (id, place), for known ids.
        notes: Sentences about differences between the places.
    """

    def __init__(
        self,
        given_ids: Mapping[str, int],
        of_data: Mapping[str, tuple[int, str]],
        vocabulary: Vocabulary | None,
    ):
        """Choose the ids.

        Args:
            given_ids: Name → id from the options.
            of_data: Name → (id, place), from the data's own notes.
            vocabulary: The vocabulary of --tokenizer, or None.
        """
        of_tokenizer: dict[str, tuple[int, str]] = {}
        if vocabulary is not None:
            # Tokens that were added to the vocabulary here are not tokens of the data.
            added = {token["id"] for token in vocabulary.added_tokens}
            names = ("eos", "bos", "pad")
            ids = {n: i for n, i in vocabulary.roles.items() if n in names and i not in added}
            unknown = unknown_id(vocabulary.tokenizer_json)
            ids |= {} if unknown is None else {"unk": unknown}
            ids["vocab_size"] = vocabulary.vocab_size - len(added)
            of_tokenizer = {name: (id, "the tokenizer") for name, id in ids.items()}
        # In this order, a later place wins over an earlier one.
        options = {name: (id, _OPTIONS[name]) for name, id in given_ids.items()}
        self.places: dict[str, tuple[int, str]] = {**of_tokenizer, **of_data, **options}
        other_ids = {self.places[n][0] for n in ("eos", "bos", "pad") if n in self.places}
        if "unk" in self.places and self.places["unk"][0] in other_ids:
            del self.places["unk"]  # As in GPT-2. Such a token does not show unknown text.
        self.ids = SpecialIds(**{name: id for name, (id, _) in self.places.items()})
        self.notes = [
            f"{name} is {self.places[name][0]} in {self.places[name][1]}, but {id} in {place}"
            for name, (id, place) in [*of_data.items(), *of_tokenizer.items()]
            if self.places[name][0] != id and name != "vocab_size"
        ]
