"""Token document → segment, one at a time: its slots, the length law, its inverse. One file an
objective, of its name.

`facts` of a segment is a dict:

    objective    the name of a file here, or "too_short", which is causal without a mode token
    mode         id or None, as bos and eos: the tokens around the body
    bos, eos
    fill         the eos behind these that fill up its last block, a list
    pad          id, default 0: the label where nothing follows
    key          64-bit key of its chance
    epoch        whose chance that is; 0 where absent: the stored
    parameters   as each file says
    first_trained   of a document that says what is trained: the first such token; a prefix ends there

Absent entries are None, False or empty. A file has

    law(n, facts)                   slots of a body of n tokens; without a key the most it can take
    body(tokens, facts)             of a next-token kind: (the body's slots, how many of them are its prefix)
    content(slots, prefix, facts)   the inverse of `body`
    noise(task, ids, segments, trainable, tokens, loss_mask, epoch)
                                    of an in-place kind: writes tokens and loss_mask, flat lists, at
                                    the slots of candidates; [(level, weight, [(level, weight) of
                                    each block])] of the segments. task: number, parameters and
                                    resolved; ids: (mask, ordinary ids, ascending); trainable: bool
                                    of each slot

and, where they are needed,

    COPIES                          how often the slots stand in the row
    labels(slots, task, pad)        what the slots predict, where that is not each itself
    SUPERVISED                      True: documents that say what of them is trained may draw it,
                                    and of blocks where block_origin is given
    PREFIX_MOVES                    where a prefix is not as long in every epoch
    completed(parameters)           the parameters with what follows from them
    with_ids(parameters, roles, tokenizer)   the parameters with ids of the vocabulary
    fits(n, parameters)             whether n tokens need no more than there is
    sides(n, facts)                 the most slots of a body's prefix, and of what follows it
    differences(task, drawable)     what is wrong with what the plan worked out for a task
    marks(parameters)               the ids that it writes between tokens, which no document may have
"""

import importlib
import pkgutil
from functools import cache

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def of(objective):
    """The file of an objective."""
    name = "causal" if objective == "too_short" else objective
    if name not in NAMES:
        raise ValueError(f"objective {objective!r} has no twin")
    return importlib.import_module(f"{__name__}.{name}")


def is_supervised(task):
    """Whether documents that say what of them is trained may draw a task."""
    chosen = task["parameters"].get("block_origin") != "none"
    return hasattr(of(task["objective"]), "SUPERVISED") and chosen


def is_in_place(objective):
    """Whether the prediction at a slot is of that slot's own token."""
    return hasattr(of(objective), "noise")


def copies(objective):
    """How often a segment's slots stand in the row."""
    return getattr(of(objective), "COPIES", 1)


def segment(tokens, facts):
    """(slots, prefix, loss, labels) of a next-token segment with content `tokens`."""
    head, tail = head_and_tail(facts)
    body, prefix = of(facts["objective"]).body(tokens, facts)
    if prefix:
        prefix += len(head)
    slots = head + body + tail
    return slots, prefix, loss_of(len(slots), prefix), next_tokens(slots, facts.get("pad", 0))


def in_place(tokens, facts):
    """(slots, prefix) of an in-place segment before its noise; a prefix of −1: the slots stand more
    than once."""
    head, tail = head_and_tail(facts)
    slots, times = head + list(tokens) + tail, copies(facts["objective"])
    return slots * times, len(slots) if times == 1 else -1


def labels(slots, task, facts):
    """What the slots of an in-place segment before its noise predict: each itself, unless its file
    says otherwise."""
    kind = of(task["objective"])
    return kind.labels(slots, task, facts.get("pad", 0)) if hasattr(kind, "labels") else list(slots)


def head_and_tail(facts):
    """Tokens before and after the body."""
    mode = None if facts["objective"] == "too_short" else facts.get("mode")
    head = [token for token in (facts.get("bos"), mode) if token is not None]
    tail = [token for token in (facts.get("eos"),) if token is not None]
    return head, [*tail, *facts.get("fill", ())]


def loss_of(length, prefix):
    """1 at the slots whose next slot is in the segment and beyond its prefix."""
    return [1 if t + 1 < length and t + 1 >= prefix else 0 for t in range(length)]


def next_tokens(slots, pad):
    return [slots[t + 1] if t + 1 < len(slots) else pad for t in range(len(slots))]


def content(slots, prefix, facts):
    """The inverse of `segment`: its content tokens. The content holds no sentinel of its own."""
    head, tail = head_and_tail(facts)
    if slots[: len(head)] != head or slots[len(slots) - len(tail) :] != tail:
        raise ValueError("the segment does not begin or end as its facts say")
    body = slots[len(head) : len(slots) - len(tail)]
    return of(facts["objective"]).content(body, prefix - len(head), facts)


def law(objective, n, facts):
    """Slots of a segment of n content tokens; without a key the most it can take."""
    head, tail = head_and_tail({**facts, "objective": objective})
    return copies(objective) * (len(head) + of(objective).law(n, facts) + len(tail))
