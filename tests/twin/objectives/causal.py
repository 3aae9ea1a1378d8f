"""causal: the tokens as they are."""

SUPERVISED = True


def law(n, facts):
    return n


def body(tokens, facts):
    return list(tokens), 0


def content(slots, prefix, facts):
    return slots
