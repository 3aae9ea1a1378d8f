"""fill_in_the_middle, one segment at a time, in plain Python.

`parameters` of a segment: rate, spm_rate, text_safe, fim (ids of prefix, middle, suffix), inside
(ids of tokens that begin inside a character).
"""

from tests.twin.chance import CUT_POINTS, integers, purpose_in, words


def with_ids(parameters, roles, tokenizer):
    ids = [roles[f"fim_{part}"] for part in ("prefix", "middle", "suffix")]
    return {**parameters, "fim": ids, "inside": tokenizer.continuing()}


def marks(parameters):
    return parameters["fim"] if parameters["rate"] > 0 else []


def law(n, facts):
    return n + _added(facts["parameters"], facts.get("key"))


def _added(parameters, key):
    """Slots of role tokens; without a key the most."""
    drawn = parameters["rate"] > 0 if key is None else applied(parameters, key)
    return 3 if drawn else 0


def body(tokens, facts):
    parameters, key, epoch = facts["parameters"], facts["key"], facts.get("epoch", 0)
    if not applied(parameters, key):
        return list(tokens), 0
    before, middle, after = parts(tokens, parameters, key, epoch)
    pre, mid, suf = parameters["fim"]
    if suffix_first(parameters, key, epoch):
        return [pre, suf, *after, mid, *before, *middle], 0
    return [pre, *before, suf, *after, mid, *middle], 0


def parts(tokens, parameters, key, epoch):
    """(prefix, middle, suffix): the tokens at two different cuts."""
    purpose = purpose_in(epoch, CUT_POINTS)
    first = integers(key, purpose, 4, len(tokens) + 1, epoch)
    second = integers(key, purpose, 8, len(tokens), epoch)
    if second >= first:
        second += 1
    low, high = sorted((first, second))
    if parameters["text_safe"]:
        low, high = (begin_of_character(tokens, cut, parameters["inside"]) for cut in (low, high))
    return tokens[:low], tokens[low:high], tokens[high:]


def begin_of_character(tokens, cut, inside):
    while 0 < cut < len(tokens) and tokens[cut] in inside:
        cut -= 1
    return cut


def applied(parameters, key):
    """Whether the segment is rearranged, in every epoch."""
    return words(key, CUT_POINTS, 0) < int(parameters["rate"] * 2**32)


def suffix_first(parameters, key, epoch):
    return words(key, purpose_in(epoch, CUT_POINTS), 1, epoch) < int(parameters["spm_rate"] * 2**32)


def content(slots, prefix, facts):
    """The inverse of `body`, for tokens without role tokens of their own."""
    parameters, key = facts["parameters"], facts["key"]
    if not applied(parameters, key):
        return slots
    pre, mid, suf = parameters["fim"]
    if slots[0] != pre or slots.count(suf) != 1 or slots.count(mid) != 1:
        raise ValueError("the role tokens are not there once each")
    at_suf, at_mid = slots.index(suf), slots.index(mid)
    if suffix_first(parameters, key, facts.get("epoch", 0)):
        if at_suf != 1:
            raise ValueError("the suffix does not come first")
        return slots[at_mid + 1 :] + slots[2:at_mid]
    return slots[1:at_suf] + slots[at_mid + 1 :] + slots[at_suf + 1 : at_mid]
