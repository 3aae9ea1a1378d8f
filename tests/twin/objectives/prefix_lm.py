"""prefix_lm: the tokens as they are, those before a pivot its prefix.

`parameters` of a segment: sentinel (bool: one stands at the pivot), sentinels (ids; the first is
used), input_eos (a list: the id that ends the prefix, or nothing).
"""

from tests.twin import chance

SUPERVISED = True
PREFIX_MOVES = True  # from epoch to epoch


def marks(parameters):
    return parameters["sentinels"] if parameters["sentinel"] else []


def law(n, facts):
    return n + len(_input_eos(facts)) + (1 if facts.get("parameters", {}).get("sentinel") else 0)


def sides(n, facts):
    """The most slots of the inputs and of the targets: all tokens but one on either."""
    most = max(n - 1, 1)
    return most + len(_input_eos(facts)), most + (
        1 if facts.get("parameters", {}).get("sentinel") else 0
    )


def body(tokens, facts):
    pivot = pivot_of(len(tokens), facts["key"], facts.get("first_trained"), facts.get("epoch", 0))
    inputs = [*tokens[:pivot], *_input_eos(facts)]
    return [*inputs, *_sentinel(facts), *tokens[pivot:]], len(inputs)


def pivot_of(n, key, first_trained=None, epoch=0):
    """1 … n − 1: how many content tokens a prefix holds. Where a document says what is trained, no
    epoch has another."""
    if first_trained is not None:
        return max(first_trained, 1)
    return 1 + chance.integers(key, chance.purpose_in(epoch, chance.PIVOT), 0, n - 1, epoch)


def content(slots, prefix, facts):
    sentinel, end = _sentinel(facts), _input_eos(facts)
    if slots[prefix : prefix + len(sentinel)] != sentinel:
        raise ValueError("the targets do not begin with the sentinel")
    if slots[prefix - len(end) : prefix] != end:
        raise ValueError("the inputs do not end in eos")
    return slots[: prefix - len(end)] + slots[prefix + len(sentinel) :]


def _input_eos(facts):
    return list(facts.get("parameters", {}).get("input_eos", ()))


def _sentinel(facts):
    parameters = facts.get("parameters", {})
    return [parameters["sentinels"][0]] if parameters.get("sentinel") else []
