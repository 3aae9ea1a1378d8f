"""Resolve the special tokens of a vocabulary, such as padding, mask and sentinels.

A special token's purpose (eos, pad, mask, …) is called its role. The token for a role comes from
the recipe's [specials], from the files next to the tokenizer, or from a well-known name. They are
tried in this order. The declarations of the files are final: null means that the tokenizer has no
such token. A well-known name counts only if tokenizer.json lists it in added_tokens as special. An
ordinary token of the vocabulary never counts.

A token is refused if [specials] gives it one role, the tokenizer itself gives it another, and the
recipe uses both. For example, if mask and pad were the same token, padding would look like masked
positions. A sentinel must not be a token of ordinary text.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packprep.cache import remembered
from packprep.errors import VocabularyError
from packprep.format.digests import digest_of
from packprep.messages import listed
from packprep.recipe import Specials
from packprep.tokenizer.file import (
    BYTES_ROLES,
    BYTES_VOCAB_SIZE,
    MOST_HOLES,
    Beside,
    TokenTable,
    bytes_tokenizer_json,
    extended_tokenizer_json,
    library_version,
    load_tokenizer_json,
    read_tokens,
    tokens_in_file,
    without_last_tokens,
)
from packprep.tokenizer.missing_roles import RESERVED, Missing, looks_special, missing_roles

SHARED = {"eos", "bos", "pad"}
"""The roles that one token may have at the same time, if eos is among them."""

Players = Sequence[tuple[str, int]]  # (key in [specials], id) of tokens with a role


def may_share(parts: set[str]) -> bool:
    """Return whether one token may have all roles in `parts` at the same time.

    A token may have several roles only if one of them is eos and the others are pad or bos.
    """
    return len(parts) < 2 or ("eos" in parts and parts <= SHARED)


def refuse_two_roles(players: Players, own_roles: Collection[str], tokens: TokenTable) -> None:
    """Check that no token has two roles, except eos with pad or bos.

    Args:
        players: (key in [specials], id) of each token with a role.
        own_roles: The roles that [specials] does not set. The message calls their tokens "the
            tokenizer's own".
        tokens: The tokens of the tokenizer.

    Raises:
        VocabularyError: If a token has two roles for which `may_share` is False.
    """
    by_id: dict[int, list[str]] = {}
    for key, id in players:
        by_id.setdefault(id, []).append(key)
    for id, keys in by_id.items():
        if may_share(set(keys)):
            continue
        if "eos" in keys and "pad" in own_roles:
            keys = [key for key in keys if key != "pad"]  # pad may be eos, so do not name it.
        roles = [f"{key} (the tokenizer's own)" if key in own_roles else key for key in keys]
        raise VocabularyError(
            f"[specials]: {tokens.texts[id]} (id {id}) would be {' and '.join(roles)}, but a"
            " token can be only one special token (except pad and bos, which may be the eos"
            " token)\n"
            "hint: give one of them another token"
        )


def refuse_ordinary_sentinels(sentinels: Sequence[int], tokens: TokenTable) -> None:
    """Check that ordinary text cannot produce a sentinel.

    A sentinel must be a special added token, another added token written like <this>, or a token of
    the model's vocabulary that is written like <this> and has a reserved name. Text may produce any
    other token. For example, an added token may be a run of spaces, and a vocabulary for code has
    "<div>" as a word.

    Raises:
        VocabularyError: If a sentinel is an ordinary token.
    """
    ordinary = []
    for id in sorted(sentinels):
        text = tokens.texts[id]
        added = tokens.added.get(text)
        named = looks_special(text) and (added or RESERVED.search(text))
        if not named and not (added and added.special):
            ordinary.append(id)
    if not ordinary:
        return
    # Consecutive ids form a range, so that the message stays short.
    begins = [i for i, id in enumerate(ordinary) if i == 0 or id != ordinary[i - 1] + 1]
    runs = [ordinary[a:b] for a, b in zip(begins, [*begins[1:], len(ordinary)], strict=True)]
    ranges = [f"{run[0]} … {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    ids = (
        listed(ranges)
        if len(ranges) > 5
        else " and ".join(filter(None, (", ".join(ranges[:-1]), ranges[-1])))
    )
    is_single = len(ordinary) == 1
    raise VocabularyError(
        f"[specials] sentinels: {'id' if is_single else 'ids'} {ids}"
        f" {'is an' if is_single else 'are'} ordinary token{'' if is_single else 's'} of the"
        f" vocabulary, which occur in encoded text"
        f" ({listed((repr(tokens.texts[id]) for id in ordinary), 3)})\n"
        'hint: name special or reserved tokens, or add them: sentinels = "auto" and missing ='
        ' "add"'
    )


def ordinary_players(players: Players, tokens: TokenTable) -> Iterator[str]:
    """Yield a note for each role with a token that is ordinary, so that text can contain it."""
    for key, id in players:
        text = tokens.texts[id]
        if text not in tokens.added and not looks_special(text):
            yield (
                f"{key}: {text!r} (id {id}) is an ordinary token of the vocabulary, so documents"
                ' that contain it are rejected unless special_text = "special"'
            )


__all__ = ["Needs", "Vocabulary", "bytes_tokenizer_json", "resolve_again", "resolve_vocabulary"]

ROLES = ("eos", "bos", "pad", "mask", "fim_prefix", "fim_middle", "fim_suffix")

# The first name is added if no token is found and missing = "add".
WELL_KNOWN = {
    "eos": (
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<eos>",
        "<|eos|>",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
        "<|im_end|>",
        "[SEP]",
    ),
    "bos": (
        "<s>",
        "<|begin_of_text|>",
        "<bos>",
        "<|startoftext|>",
        "<|bos|>",
        "[BOS]",
        "<｜begin▁of▁sentence｜>",
        "[CLS]",
    ),
    "pad": (
        "<pad>",
        "[PAD]",
        "<|pad|>",
        "<|padding|>",
        "<|finetune_right_pad_id|>",
        "<PAD>",
        "<｜▁pad▁｜>",
    ),
    "mask": ("<mask>", "[MASK]", "<|mask|>", "<|mdm_mask|>", "<MASK>"),
}
WELL_KNOWN_FIM = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("▁<PRE>", "▁<MID>", "▁<SUF>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),
)
FIM_ROLES = ("fim_prefix", "fim_middle", "fim_suffix")
SENTINEL_PATTERN = "<extra_id_{}>"


@dataclass(frozen=True)
class Needs:
    """The special tokens that the recipe needs.

    Attributes:
        roles: Names in ROLES. pad is always needed.
        mode_tokens: The texts of the mode tokens, as the tasks write them.
        sentinels: Number of sentinels that the longest segment would use. 0 means none.
    """

    roles: frozenset[str]
    mode_tokens: tuple[str, ...]
    sentinels: int


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with all special tokens resolved.

    Attributes:
        tokenizer_json: The tokenizer.json that the dataset stores. Two vocabularies are compared by
            their `digest` and not by these bytes.
        digest: The digest of `tokenizer_json`.
        vocab_size: All ids are below it.
        roles: Role → id. pad is always present.
        sentinels: The ids of the sentinels. The k-th sentinel marks the k-th span.
        mode_tokens: Text as a task writes it → id.
        added_tokens: {"id", "text", "role"} of the tokens that packprep added. The role is a key of
            `specials()`.
        special_ids: The ids that are not ordinary text, ascending. They are special tokens, tokens
            with a role, and ids below `vocab_size` without a token.
        notes: Messages for the user.
        beside: The declarations in the files next to the tokenizer, as in `Beside`.
        media: Media kind → (start id, position id, end id), sorted by kind. These tokens start a
            media span, fill its positions and end it. An id is -1 if there is no such token.
    """

    tokenizer_json: bytes = field(compare=False)
    digest: str
    vocab_size: int
    roles: dict[str, int] = field(hash=False)
    sentinels: tuple[int, ...]
    mode_tokens: dict[str, int] = field(hash=False)
    added_tokens: tuple[dict[str, Any], ...] = field(hash=False)
    special_ids: tuple[int, ...]
    notes: tuple[str, ...] = field(compare=False)
    beside: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    media: dict[str, tuple[int, int, int]] = field(default_factory=dict, hash=False)

    def specials(self) -> dict[str, int | list[int]]:
        """Return the manifest's `specials`, such as {"pad": 0, "sentinels": [9, 8], "[NLU]": 7}."""
        sentinels: dict[str, int | list[int]] = (
            {"sentinels": list(self.sentinels)} if self.sentinels else {}
        )
        return {**self.roles, **sentinels, **self.mode_tokens}

    def as_planned(self) -> dict[str, Any]:
        """Return the `vocabulary` entry of the plan."""
        return {
            "vocab_size": self.vocab_size,
            "roles": {role: int(i) for role, i in self.roles.items()},
            "sentinels": [int(i) for i in self.sentinels],
            "mode_tokens": {text: int(i) for text, i in self.mode_tokens.items()},
            "added_tokens": list(self.added_tokens),
            "special_ids": [int(i) for i in self.special_ids],
            **(
                {"media": {kind: [int(i) for i in ids] for kind, ids in self.media.items()}}
                if self.media
                else {}
            ),
        }


@dataclass(frozen=True)
class _Parts:
    """The result of assigning tokens to roles: tokens with a role, and roles without a token."""

    roles: dict[str, int]
    sentinels: tuple[int, ...]
    mode_tokens: dict[str, int]
    media: dict[str, tuple[int, int, int]]
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]
    found: dict[str, str]  # role that [specials] does not set → note on its token
    players: Players  # all tokens with a role


def resolve_vocabulary(tokenizer: str, base: Path, specials: Specials, needs: Needs) -> Vocabulary:
    """Return the vocabulary of a recipe's tokenizer, with all special tokens that the recipe needs.

    With missing = "add", needed tokens that do not exist are added. Their ids count upward from the
    end of the vocabulary.

    Args:
        tokenizer: The recipe's `tokenizer`.
        base: The folder that a relative path starts from.
        specials: The recipe's [specials].
        needs: The special tokens that the recipe needs.

    Raises:
        VocabularyError: If the tokenizer is unreadable, a token has two roles, or an id is not
            below specials.vocab_size. It is also raised if roles have no token. The message then
            lists all of them and the recipe lines that would set them.
    """
    data, beside = load_tokenizer_json(tokenizer, base)
    return _resolved(data, beside, tokenizer, specials, needs)


def resolve_again(
    tokenizer_json: bytes,
    added: int,
    beside: Beside,
    tokenizer: str,
    specials: Specials,
    needs: Needs,
) -> Vocabulary:
    """Return the same vocabulary as `resolve_vocabulary`, from a dataset's tokenizer.json.

    Args:
        tokenizer_json: The dataset's tokenizer.json.
        added: Number of tokens that packprep added. They are the last tokens of `tokenizer_json`.
        beside: The plan's record of the files next to the original tokenizer.
        tokenizer: The recipe's `tokenizer`, for messages.
        specials: The recipe's [specials].
        needs: The special tokens that the recipe needs.

    Raises:
        VocabularyError: If the special tokens cannot be resolved, as in `resolve_vocabulary`.
    """
    return _resolved(
        without_last_tokens(tokenizer_json, added, tokenizer), beside, tokenizer, specials, needs
    )


@remembered(
    Vocabulary,
    lambda data, beside, tokenizer, specials, needs: (
        digest_of(data),
        beside,
        asdict(specials),
        sorted(needs.roles),
        needs.mode_tokens,
        needs.sentinels,
        library_version(),
    ),
)
def _resolved(
    data: bytes, beside: Beside, tokenizer: str, specials: Specials, needs: Needs
) -> Vocabulary:
    """Resolve the special tokens of a tokenizer.json, and add missing ones if `specials` allows it.

    `tokenizer` is the tokenizer's name in messages.
    """
    # Collect the roles that the files next to the tokenizer declare. The byte vocabulary has its
    # own.
    is_bytes = data == bytes_tokenizer_json()
    # If several files declare a role, the first file wins.
    hints: dict[str, str | None] = {
        role: text for file in reversed(beside) for role, text in file["roles"].items()
    }
    if is_bytes and not beside:
        hints = dict(BYTES_ROLES)
    # Refuse impossible sizes before any table with an entry per id exists.
    tokens = tokens_in_file(data, tokenizer)
    if 0 < specials.vocab_size < tokens.n_ids:
        raise VocabularyError(
            f"[specials] vocab_size = {specials.vocab_size}, but tokenizer = {tokenizer!r} has"
            f" ids up to {tokens.n_ids - 1}, so the embedding would have no row for them\n"
            "hint: set vocab_size to the number of the embedding's rows, at least"
            f" {tokens.n_ids}, or leave it out"
        )
    if max(tokens.n_ids, specials.vocab_size) > len(tokens.texts) + MOST_HOLES:
        reason = f"[specials] vocab_size = {specials.vocab_size}"
        if tokens.n_ids > len(tokens.texts) + MOST_HOLES:
            reason = f"it has the id {tokens.n_ids - 1}"
        raise VocabularyError(
            f"tokenizer = {tokenizer!r} has {len(tokens.texts)} tokens, but {reason}, and at most"
            f" {MOST_HOLES} ids may be without a token\n"
            "hint: give the tokenizer that the model was trained with, and the rows of its"
            " embedding"
        )
    # In [specials], a role and a mode token are keys of one table, so their names must differ.
    for text in (*needs.mode_tokens, *(specials.mode_tokens or ())):
        if text in ROLES or text == "sentinels":
            raise VocabularyError(
                f"the mode token {text!r} has the name of a special token, so [specials] could"
                " not distinguish them\n"
                'hint: write it as a token is written, for example "[NLU]"'
            )
    # Assign the existing tokens to roles, which also shows which roles lack a token.
    parts = _parts(tokens, specials, needs, hints)
    own_roles = {role for role in ROLES if getattr(specials, role) is None}
    refuse_two_roles(parts.players, own_roles, tokens)
    refuse_ordinary_sentinels(parts.sentinels, tokens)
    # New tokens get ids after all existing ones, so that no existing id changes.
    first_added = tokens.n_ids
    if parts.missing:
        texts = _texts_to_add(tokenizer, tokens, specials, parts)
        data = extended_tokenizer_json(data, first_added, texts, tokenizer)
        hints |= {role.key: role.add[0] for role in parts.missing if role.key in hints}
    # Assign the roles again in the final file. `read_tokens` also compares its ids with
    # `tokenizers`.
    tokens = read_tokens(data, tokenizer)
    parts = _parts(tokens, specials, needs, hints)
    assert not parts.missing, parts.missing
    refuse_two_roles(parts.players, own_roles, tokens)
    smallest = max(tokens.n_ids, BYTES_VOCAB_SIZE if is_bytes else 0)
    vocab_size = specials.vocab_size or smallest
    # If a token has two roles, such as eos and pad, the role that comes first names it.
    players = {id: key for key, id in reversed(parts.players)}
    added = tuple(
        {"id": id, "text": tokens.texts[id], "role": players[id]}
        for id in range(first_added, tokens.n_ids)
    )
    notes = [*tokens.notes, *parts.notes, *ordinary_players(parts.players, tokens)]
    if not is_bytes:
        notes += [note for role, note in parts.found.items() if parts.roles[role] < first_added]
    if added:
        span = f"{added[0]['id']}" if len(added) == 1 else f"{added[0]['id']} to {added[-1]['id']}"
        notes.append(
            f"added {len(added)} tokens with ids {span}"
            f" ({listed(str(entry['text']) for entry in added)}), so the model's embedding needs"
            f" at least {vocab_size} rows"
        )
    return Vocabulary(
        tokenizer_json=data,
        digest=digest_of(data),
        vocab_size=vocab_size,
        roles=parts.roles,
        sentinels=parts.sentinels,
        mode_tokens=parts.mode_tokens,
        added_tokens=added,
        special_ids=tuple(
            sorted(
                {token.id for token in tokens.added.values() if token.special}
                | set(players)
                | (set(range(vocab_size)) - tokens.texts.keys())
            )
        ),
        notes=tuple(notes),
        beside=tuple(beside),
        media=parts.media,
    )


def _texts_to_add(
    name: str, tokens: TokenTable, specials: Specials, parts: _Parts
) -> tuple[str, ...]:
    """Return the texts of the new tokens for the roles that lack a token.

    Raises:
        VocabularyError: If [specials] does not allow new tokens, a new token cannot fill a role, or
            the new ids would exceed vocab_size.
    """
    if specials.missing != "add" or not all(missing.add for missing in parts.missing):
        by_pattern = specials.sentinels is None or isinstance(specials.sentinels, str)
        raise missing_roles(
            name,
            tokens,
            parts.missing,
            playing={id for _, id in parts.players},
            spare_sentinels=parts.sentinels if by_pattern else (),
            vocab_size=specials.vocab_size,
        )
    # Roles may share a new token, which is added once.
    texts = tuple(dict.fromkeys(text for missing in parts.missing for text in missing.add))
    needed = tokens.n_ids + len(texts)
    if 0 < specials.vocab_size < needed:
        raise VocabularyError(
            f'[specials] missing = "add" would give {len(texts)} new tokens ({listed(texts)}) the'
            f" ids {tokens.n_ids} to {needed - 1}, but vocab_size = {specials.vocab_size} is the"
            " limit, so the embedding would have no row for them\n"
            f"hint: enlarge the embedding and set vocab_size = {needed}, or name existing tokens"
            ' (missing = "error" lists unused ones)'
        )
    return texts


def _parts(
    tokens: TokenTable, specials: Specials, needs: Needs, hints: Mapping[str, str | None]
) -> _Parts:
    """Assign tokens to roles.

    The roles are filled in this order: tokens that [specials] names, media tokens, sentinels, and
    tokens that the tokenizer's files declare or that have a well-known name. Without a pad token,
    eos is used for padding.
    """
    mapped = specials.mode_tokens or {}
    # Take the tokens that [specials] names. A mode token without an entry there has its own text.
    wishes = {
        role: getattr(specials, role) for role in ROLES if getattr(specials, role) is not None
    }
    wishes |= {text: mapped.get(text, text) for text in (*needs.mode_tokens, *mapped)}
    chosen_ids = {
        key: id for key, value in wishes.items() if (id := _id_of(value, tokens)) is not None
    }
    missing = [
        _not_there(key, value, tokens, hints)
        for key, value in wishes.items()
        if key not in chosen_ids
    ]

    # A sentinel must not be a media token, so media come first.
    media, media_missing = _media(tokens, specials)
    missing += media_missing
    of_media = sorted({id for ids in media.values() for id in ids if id >= 0})

    # Sentinels are not taken from tokens that already have another role.
    taken = {id: key for key, id in chosen_ids.items()} | dict.fromkeys(of_media, "media")
    sentinels, sentinels_missing, notes = _sentinels(tokens, specials, needs, taken)
    missing += sentinels_missing
    playing: dict[int, set[str]] = {id: {key} for id, key in taken.items()}
    playing |= {id: {"sentinels"} for id in sentinels}

    # Look for the roles that [specials] leaves open. Only a role that the recipe needs can lack a
    # token.
    roles = {role: chosen_ids[role] for role in ROLES if role in chosen_ids}
    notes_by_role: dict[str, str] = {}
    open_roles = [role for role in ROLES if role not in wishes]
    for role, id, origin in _found(tokens, hints, open_roles, needs.roles, playing):
        roles[role] = id
        if role in needs.roles or role == "pad":
            notes_by_role[role] = f"{role}: {tokens.texts[id]} (id {id}), {origin}"
    lacking = [
        role for role in open_roles if role in needs.roles and role not in roles and role != "pad"
    ]
    missing += [_not_found(role, lacking, tokens, hints) for role in lacking]
    # A missing eos is added and then pads too. Only without any eos does pad need its own token.
    if "pad" in open_roles and "pad" not in roles:
        if "eos" in roles:
            roles["pad"] = roles["eos"]
            notes.append(
                f"pad: the tokenizer has none, so {tokens.texts[roles['eos']]} (id {roles['eos']})"
                " pads"
            )
        elif "eos" in open_roles and "eos" not in lacking:
            pad = _names_to_add(tokens, ["pad"])["pad"]
            missing.append(Missing("pad", "no token known as such, and no eos to pad with", pad))
    # The order of ROLES decides which role names a token with two roles.
    roles = {role: roles[role] for role in ROLES if role in roles}
    mode_tokens = {key: id for key, id in chosen_ids.items() if key not in ROLES}
    return _Parts(
        roles=roles,
        sentinels=sentinels,
        mode_tokens=mode_tokens,
        media=media,
        missing=tuple(missing),
        notes=tuple(notes),
        found=notes_by_role,
        players=(
            *roles.items(),
            *mode_tokens.items(),
            *(("media", id) for id in of_media),
            *(("sentinels", id) for id in sentinels),
        ),
    )


def _media(
    tokens: TokenTable, specials: Specials
) -> tuple[dict[str, tuple[int, int, int]], list[Missing]]:
    """Return media kind → (start id, position id, end id), and the media tokens that are missing.

    An id is -1 if [specials] gives "" or names a token that does not exist. Only a token that does
    not exist counts as missing.

    Raises:
        VocabularyError: If the position token of a kind is also a start or end token.
    """
    ids_by_kind, missing = {}, []
    for kind, values in sorted((specials.media or {}).items()):
        ids = []
        for value in values:
            id = -1 if value == "" else _id_of(value, tokens)
            if id is None:
                token_in_words = f"id {value}" if isinstance(value, int) else repr(value)
                absent = f"kind {kind!r}: no token {token_in_words}"
                missing.append(Missing("media", absent, (value,) if isinstance(value, str) else ()))
            ids.append(-1 if id is None else id)
        ids_by_kind[kind] = (ids[0], ids[1], ids[2])
    # The position token marks the slots of a span (P25), so it must not be next to a span.
    slots = {slot for _, slot, _ in ids_by_kind.values() if slot >= 0}
    for kind, (begin, _, end) in ids_by_kind.items():
        if beside := slots & {begin, end}:
            text = tokens.texts[beside.pop()]
            raise VocabularyError(
                f"[specials] media: {text} is a slot token, but also begins or ends media of kind"
                f" {kind!r}\n"
                "hint: give one of them another token"
            )
    return ids_by_kind, missing


def _id_of(value: str | int, tokens: TokenTable) -> int | None:
    if isinstance(value, int):
        return value if value in tokens.texts else None
    return tokens.ids.get(value)


def _names_to_add(tokens: TokenTable, roles: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the text of the token to add for each role, such as {"mask": ("<mask>",)}.

    The text is the first well-known name that the tokenizer does not have. The tuple is empty if
    the tokenizer has all well-known names.
    """
    fim = [FIM_ROLES.index(role) for role in roles if role in FIM_ROLES]
    # New tokens of fill-in-the-middle come from one family, none of whose tokens exists.
    free_families = [
        family for family in WELL_KNOWN_FIM if not any(family[k] in tokens.ids for k in fim)
    ]
    names = {
        role: [name for name in known_names if name not in tokens.ids]
        for role, known_names in WELL_KNOWN.items()
    }
    names |= {role: [family[k] for family in free_families] for k, role in enumerate(FIM_ROLES)}
    return {role: tuple(names[role][:1]) for role in roles}


def _is_special(name: str, tokens: TokenTable) -> bool:
    """Return whether tokenizer.json lists the text `name` among its added tokens as special."""
    return name in tokens.added and tokens.added[name].special


def _not_found(
    role: str, lacking: Sequence[str], tokens: TokenTable, hints: Mapping[str, str | None]
) -> Missing:
    """Return a `Missing` that says why no token was found for a role, and which text to add.

    If tokenizer.json lists a well-known name, but not as special, `Missing.instead` suggests this
    token. `lacking` has all roles without a token.
    """
    add = _names_to_add(tokens, lacking)[role]
    if role in hints:
        declared = hints[role]
        if declared is None:
            return Missing(
                role, "the files next to the tokenizer declare null, so there is no such token", add
            )
        if declared not in tokens.ids:
            why = (
                f"the files next to the tokenizer declare {declared!r}, which tokenizer.json does"
                " not have"
            )
            return Missing(role, why, (declared,))
    # Existing tokens of fill-in-the-middle are suggested only as a whole family.
    if role in FIM_ROLES:
        indices = [FIM_ROLES.index(other_role) for other_role in lacking if other_role in FIM_ROLES]
        families = [
            family for family in WELL_KNOWN_FIM if all(family[k] in tokens.added for k in indices)
        ]
        names = tuple(family[FIM_ROLES.index(role)] for family in families)
    else:
        names = WELL_KNOWN[role]
    instead = next((name for name in names if name in tokens.added), "")
    if instead and not _is_special(instead, tokens):
        return Missing(
            role, f"tokenizer.json does not list {instead} as special", (), instead=instead
        )
    return Missing(role, "no token known for it", add)


def _not_there(
    key: str, value: str | int, tokens: TokenTable, hints: Mapping[str, str | None]
) -> Missing:
    known_names = [name for name in WELL_KNOWN.get(key, ()) if _is_special(name, tokens)]
    if key in hints:
        known_names = [name for name in (hints[key],) if name is not None and name in tokens.ids]
    instead = known_names[0] if known_names else ""
    if isinstance(value, int):
        return Missing(
            key,
            f"no token has the id {value} (they end at {tokens.n_ids - 1})",
            (),
            instead=instead,
        )
    return Missing(key, f"no token {value!r}", (value,) if value else (), instead=instead)


def _sentinels(
    tokens: TokenTable, specials: Specials, needs: Needs, taken: Mapping[int, str]
) -> tuple[tuple[int, ...], list[Missing], list[str]]:
    """Return (ids of the sentinels in order, missing sentinels, notes for the user).

    The list of missing sentinels is empty or has one `Missing` for all of them. `taken` maps the id
    of a token to its role, for tokens that already have another role.
    """
    wish = specials.sentinels
    # A pattern finds sentinels by number. The default pattern finds only tokens that are listed as
    # special.
    if wish is None or isinstance(wish, str):
        named = wish is not None and wish != "auto"
        pattern = wish if wish is not None and named else SENTINEL_PATTERN
        usable = (
            tokens.ids if named else [text for text in tokens.added if _is_special(text, tokens)]
        )
        extend = wish == "auto" and specials.missing == "add"
        return _sentinels_by_pattern(pattern, extend, tokens, frozenset(usable), needs, taken)
    # The recipe lists the sentinels. All of them must exist, and each must be unique.
    if isinstance(wish, Mapping):
        wish = range(wish["first"], wish["first"] + wish["count"])
    ids = [_id_of(value, tokens) for value in wish]
    absent = [value for value, id in zip(wish, ids, strict=True) if id is None]
    if absent:
        unknown_ids = [value for value in absent if isinstance(value, int)]
        why = f"{len(absent)} of {len(ids)} are not there: {listed(map(repr, absent))}"
        return (), [Missing("sentinels", why, () if unknown_ids else tuple(absent), len(ids))], []
    present = tuple(id for id in ids if id is not None)
    if len(set(present)) < len(present):
        twice = Counter(present).most_common(1)[0][0]
        raise VocabularyError(
            f"[specials] sentinels: {tokens.texts[twice]} (id {twice}) occurs twice, but each"
            " span needs its own sentinel\n"
            "hint: list each sentinel once"
        )
    if needs.sentinels and not present:
        return (), [Missing("sentinels", "the list is empty", (), needs.sentinels)], []
    return present, [], []


def _sentinels_by_pattern(
    pattern: str,
    as_many_as_needed: bool,
    tokens: TokenTable,
    usable: Collection[str],
    needs: Needs,
    taken: Mapping[int, str],
) -> tuple[tuple[int, ...], list[Missing], list[str]]:
    """Return the result of `_sentinels` for a pattern such as "<extra_id_{}>".

    With `as_many_as_needed`, use at most `needs.sentinels` tokens of the pattern, and report the
    other needed sentinels as missing. Otherwise use all tokens of the pattern. If sentinels are
    needed and there is no token, report them as missing. If there are too few, add a note. `usable`
    has the texts of the tokens that may be sentinels.
    """
    if pattern.count("{}") != 1:
        raise VocabularyError(
            f"[specials] sentinels = {pattern!r}: a pattern needs one {{}} for the number\n"
            'hint: write a pattern, as "<extra_id_{}>", a list of tokens or ids,'
            ' {first = ID, count = N}, or "auto"'
        )
    sentinel_ids: list[int] = []
    notes: list[str] = []
    k = 0
    # The numbers have no gaps: the search ends at the first text that is not a token.
    while (text := pattern.replace("{}", str(k))) in tokens.ids:
        id = tokens.ids[text]
        if text not in usable:
            pass
        elif id in taken:
            notes.append(
                f"sentinels: {tokens.texts[id]} (id {id}) is skipped, because it is used for"
                f" {taken[id]}"
            )
        else:
            sentinel_ids.append(id)
        k += 1
    short = needs.sentinels - len(sentinel_ids)
    if as_many_as_needed:
        sentinel_ids = sentinel_ids[: needs.sentinels]
    if short > 0 and (as_many_as_needed or not sentinel_ids):
        why = (
            f"{len(sentinel_ids) or 'no'} tokens of the pattern {pattern}; the longest segment"
            f" would use {needs.sentinels}"
        )
        # New sentinels continue the numbering of the existing ones.
        add = tuple(pattern.replace("{}", str(k + offset)) for offset in range(short))
        return tuple(sentinel_ids), [Missing("sentinels", why, add, needs.sentinels)], notes
    if short > 0:
        notes.append(
            f"sentinels: {len(sentinel_ids)} tokens of the pattern {pattern}; the longest segment"
            f" would use {needs.sentinels}"
        )
    return tuple(sentinel_ids), [], notes


def _found(
    tokens: TokenTable,
    hints: Mapping[str, str | None],
    open_roles: Sequence[str],
    needed: Collection[str],
    playing: dict[int, set[str]],
) -> Iterator[tuple[str, int, str]]:
    """Yield (role, id, how the token was found) for each open role that has a token.

    If the token already has roles that `may_share` forbids with the new role, the new role is
    usually skipped unless the recipe needs it. For example, eos does not become mask if nothing is
    masked. eos, bos and pad are skipped only if all other roles of the token are among these three.
    Where a role is not skipped, `refuse_two_roles` reports the conflict. The three tokens for
    fill-in-the-middle come from one family of WELL_KNOWN_FIM.

    `playing` maps an id to its roles so far. This function adds eos, bos, pad and mask to it.
    """
    # A declared token takes precedence over well-known names, even if it does not exist.
    for role, names in WELL_KNOWN.items():
        if role not in open_roles:
            continue
        candidates = [(name, "found by name") for name in names if _is_special(name, tokens)]
        if role in hints:
            candidates = [(hints[role] or "", "named by the tokenizer's own files")]
        for name, origin in candidates:
            id = tokens.ids.get(name)
            if id is None:
                continue
            other_roles = playing.get(id, set()) - {role}
            used = role in needed or (role in SHARED and not other_roles <= SHARED)
            if used or may_share(other_roles | {role}):
                playing.setdefault(id, set()).add(role)
                yield role, id, origin
                break
    # A family counts if it has all tokens that the recipe needs or, if it needs none, all open
    # ones.
    fim_roles = [role for role in FIM_ROLES if role in open_roles]
    required = [role for role in fim_roles if role in needed] or fim_roles
    for family in WELL_KNOWN_FIM:
        names_of = {role: family[FIM_ROLES.index(role)] for role in fim_roles}
        ids = {
            role: tokens.ids[name] for role, name in names_of.items() if _is_special(name, tokens)
        }
        free_ids = {role: id for role, id in ids.items() if id not in playing or role in needed}
        if all(role in free_ids for role in required):
            yield from ((role, id, "found by name") for role, id in free_ids.items())
            return
