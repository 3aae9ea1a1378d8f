"""Tokens that cannot play the roles that they have: one token in two roles, and sentinels that text gives."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from packprep.corpus.missing_roles import is_reserved, listed, looks_special
from packprep.corpus.tokenizer_json import TokenTable
from packprep.errors import VocabularyError

SHARED = {"eos", "bos", "pad"}
"""Roles of which eos may play the other two."""

Players = Iterable[tuple[str, int]]  # key of [specials] and id, for each token that plays a part


def may_share(parts: set[str]) -> bool:
    """Whether one token may play all of these: pad and bos may be eos, nothing else is shared."""
    return len(parts) < 2 or ("eos" in parts and parts <= SHARED)


def refuse_two_roles(players: Players, own: Collection[str], tokens: TokenTable) -> None:
    """VocabularyError for a token that plays two roles. own: roles that the recipe gave no token, but the tokenizer has."""
    by_id: dict[int, list[str]] = {}
    for key, id in players:
        by_id.setdefault(id, []).append(key)
    for id, keys in by_id.items():
        if may_share(set(keys)):
            continue
        if "eos" in keys and "pad" in own:
            keys = [key for key in keys if key != "pad"]  # it only follows eos
        roles = [f"{key} (the tokenizer's own)" if key in own else key for key in keys]
        raise VocabularyError(
            f"[specials]: {tokens.texts[id]} (id {id}) would play {' and '.join(roles)}; a token plays one role "
            "(only pad and bos may be the eos token). Give one of them another token"
        )


def refuse_ordinary_sentinels(sentinels: Sequence[int], tokens: TokenTable) -> None:
    """VocabularyError for sentinels that text gives.

    Text does not give special added tokens, other added ones that are written as no word is, and what the model's own
    vocabulary reserves by name. An added token may be a run of spaces, and a vocabulary of code has "<div>" as a word.
    """
    ordinary = []
    for id in sorted(sentinels):
        text = tokens.texts[id]
        added = tokens.added.get(text)
        if not is_reserved(text) and not (added and (added.special or looks_special(text))):
            ordinary.append(id)
    if not ordinary:
        return
    begins = [i for i, id in enumerate(ordinary) if i == 0 or id != ordinary[i - 1] + 1]
    runs = [ordinary[a:b] for a, b in zip(begins, [*begins[1:], len(ordinary)], strict=True)]
    ranges = [f"{run[0]} … {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    ids = listed(ranges) if len(ranges) > 5 else " and ".join(filter(None, (", ".join(ranges[:-1]), ranges[-1])))
    one = len(ordinary) == 1
    raise VocabularyError(
        f"[specials] sentinels: {'id' if one else 'ids'} {ids} {'is an' if one else 'are'} ordinary "
        f"token{'' if one else 's'} of the vocabulary, which text gives "
        f"({listed((repr(tokens.texts[id]) for id in ordinary), 3)}). Name special or reserved ones, or add them: "
        'sentinels = "auto" and missing = "add"'
    )


def ordinary_players(players: Players, tokens: TokenTable) -> Iterator[str]:
    """Notes on roles played by tokens that text itself can give, as far as a tokenizer file tells."""
    for key, id in players:
        text = tokens.texts[id]
        if text not in tokens.added and not looks_special(text):
            yield (
                f"{key}: {text!r} (id {id}) is an ordinary token of the vocabulary; documents in which it occurs are "
                'rejected unless special_text = "special"'
            )
