"""Report all missing special tokens of a tokenizer at once, with recipe lines that fix them."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from packprep.errors import VocabularyError
from packprep.messages import listed
from packprep.recipe import as_toml
from packprep.tokenizer.file import TokenTable

RESERVED = re.compile("reserved|unused|extra_id|place.?holder|dummy", re.IGNORECASE)
"""A pattern that matches the names of reserved tokens, such as <unused_1> or [unused1]."""


@dataclass(frozen=True)
class Missing:
    """A role (purpose of a special token) that has no token.

    Attributes:
        key: The key in [specials].
        why: The reason, with the tokens that were searched for.
        add: Texts of new tokens that would fill the role. It is empty if no new token can fill it,
            for example if the recipe gives an id without a token.
        wanted: Number of tokens that the role needs.
        instead: The text of an existing token that probably has this purpose, because it has a
            well-known name or the files next to the tokenizer declare it. Otherwise "".
    """

    key: str
    why: str
    add: tuple[str, ...]
    wanted: int = 1
    instead: str = ""


def missing_roles(
    name: str,
    tokens: TokenTable,
    missing: Sequence[Missing],
    playing: Collection[int],
    spare_sentinels: Sequence[int],
    vocab_size: int,
) -> VocabularyError:
    """Return the error that lists all roles for which tokenizer `name` has no token.

    The message also lists unused reserved tokens and recipe lines to paste.

    Args:
        name: The tokenizer's name.
        tokens: The tokens of the tokenizer.
        missing: The roles without a token.
        playing: Ids that have a role.
        spare_sentinels: The ids of sentinels that may get another role, because a pattern found
            them and the recipe does not list them. The last of these ids get other roles first.
        vocab_size: The maximum size of the vocabulary, 0 for no limit.
    """
    reserved = _reserved(tokens, playing)
    lines = [f"tokenizer = {name!r} lacks {len(missing)} of the roles that the recipe uses:"]
    lines += [f"  {role.key}: {role.why}" for role in missing]
    if reserved:
        shown = [f"{tokens.texts[id]} ({id})" for id in reserved]
        lines += [f"It has {len(shown)} reserved tokens that play no role: {listed(shown, 8)}."]
    else:
        lines += ["It has no reserved tokens to spare."]

    # The message offers up to two remedies: existing tokens, and new tokens.
    n_new = len({text for role in missing for text in role.add})
    addable = all(role.add for role in missing)
    fits = not vocab_size or tokens.n_ids + n_new <= vocab_size
    pasted, complete = _lines_from_reserved(reserved, spare_sentinels, tokens, missing)
    add = ('missing = "add"',)
    if pasted and (complete or (addable and fits)):
        goal = "To use existing tokens" if complete else "To use existing tokens and add the rest"
        lines += [
            f"{goal}, paste into the recipe:",
            "",
            "[specials]",
            *(() if complete else add),
            *pasted,
            "",
        ]
    if addable and fits:
        lines += [
            (
                "To extend the vocabulary (the embedding then needs at least"
                f" {tokens.n_ids + n_new} rows), paste:"
            ),
            "",
            "[specials]",
            *add,
        ]
    elif addable:
        lines += [
            f'missing = "add" would need ids up to {tokens.n_ids + n_new - 1}, but vocab_size is'
            f" {vocab_size}."
        ]
    elif not complete:
        lines += [
            f"Name existing tokens, by text or by id (0 to {tokens.n_ids - 1}), in the recipe's"
            " [specials]."
        ]
    # These lines set the tokens without a person, so only a complete remedy counts.
    mends = tuple(pasted) if complete else add if addable and fits else ()
    return VocabularyError("\n".join(lines).rstrip(), mends)


def _reserved(tokens: TokenTable, playing: Collection[int]) -> list[int]:
    """Return the ids of reserved tokens without a role, ascending.

    A reserved token matches RESERVED, for example because it contains "unused". The word "unused"
    may also be ordinary text. Therefore the token must look special, such as <unused_1>, or be an
    added token.
    """
    return sorted(
        id
        for text, id in tokens.ids.items()
        if id not in playing
        and RESERVED.search(text)
        and (looks_special(text) or text in tokens.added)
    )


def looks_special(text: str) -> bool:
    """Return whether a token is written like <this> or [this]."""
    return len(text) > 2 and text.lstrip("▁")[:1] in ("<", "[") and text[-1:] in (">", "]")


def _lines_from_reserved(
    reserved: Sequence[int],
    spare_sentinels: Sequence[int],
    tokens: TokenTable,
    missing: Sequence[Missing],
) -> tuple[list[str], bool]:
    """Return TOML lines for [specials] that assign existing tokens to the missing roles.

    The second result is True if every missing role gets at least one token.
    """
    singles = [role for role in missing if role.key not in ("sentinels", "media")]
    # Media tokens are inside a table, so these lines cannot set them.
    can_be_all = not any(role.key == "media" for role in missing)
    spans = next((role for role in missing if role.key == "sentinels"), None)
    # A role with a token that probably has this purpose takes this token. Other roles take reserved
    # tokens.
    with_known_token = [role for role in singles if role.instead]
    singles = [role for role in singles if not role.instead]
    free = list(reserved)
    # If reserved tokens are too few, sentinels that the recipe does not list fill the gap, the last
    # first.
    short = len(singles) - len(free)
    if 0 < short < len(spare_sentinels):
        free += spare_sentinels[-short:]
    played = [(role, role.instead) for role in with_known_token]
    played += [(role, tokens.texts[id]) for role, id in zip(singles, free, strict=False)]
    lines = [f"{_toml_key(role.key)} = {as_toml(text)}" for role, text in played]
    if spans is None:
        return lines, can_be_all and len(lines) == len(with_known_token) + len(singles)
    # The remaining reserved tokens become sentinels, as a range if enough ids are consecutive.
    other_ids = free[len(singles) :]
    run = _consecutive(other_ids, spans.wanted)
    if run:
        lines.append(f"sentinels = {{first = {run[0]}, count = {len(run)}}}")
    elif other_ids:
        texts = ", ".join(as_toml(tokens.texts[id]) for id in other_ids[: spans.wanted])
        lines.append(f"sentinels = [{texts}]")
    return lines, can_be_all and bool(other_ids)


def _consecutive(ids: Sequence[int], count: int) -> Sequence[int]:
    """Return the first run of `count` items of `ids` that are consecutive numbers.

    If `ids` has fewer items, return all of them if they are consecutive. Otherwise return an empty
    list.
    """
    count = min(count, len(ids))
    for k in range(len(ids) - count + 1):
        if count and ids[k + count - 1] - ids[k] == count - 1:
            return ids[k : k + count]
    return []


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else as_toml(key)
