"""prefix_lm: the tokens as they are, those before a pivot its prefix.

`parameters` of a segment: sentinel (bool: one stands at the pivot), sentinels (ids; the first is used).
"""

from packprep.twin import chance

SUPERVISED = True


def law(n, facts):
    return n + (1 if facts.get("parameters", {}).get("sentinel") else 0)


def body(tokens, facts):
    pivot = pivot_of(len(tokens), facts["key"], facts.get("first_trained"), facts.get("epoch", 0))
    return [*tokens[:pivot], *_sentinel(facts), *tokens[pivot:]], pivot


def pivot_of(n, key, first_trained=None, epoch=0):
    """1 … n − 1: how many content tokens a prefix holds. Where one is the first trained, no epoch has another."""
    if first_trained is not None:
        return max(first_trained, 1)
    return 1 + chance.integers(key, chance.purpose_in(epoch, chance.PIVOT), 0, n - 1, epoch)


def content(slots, prefix, facts):
    sentinel = _sentinel(facts)
    if slots[prefix : prefix + len(sentinel)] != sentinel:
        raise ValueError("the targets do not begin with the sentinel")
    return slots[:prefix] + slots[prefix + len(sentinel) :]


def _sentinel(facts):
    parameters = facts.get("parameters", {})
    return [parameters["sentinels"][0]] if parameters.get("sentinel") else []
