"""Token document → segment, one segment at a time: slots before noise, the length law, and its inverse.

`facts` of a segment is a dict:

    objective    "causal" | "prefix_lm" | "span_corruption" | "fill_in_the_middle" | "too_short", and, for the law and
                 `in_place` alone, "masked_diffusion" | "uniform_diffusion" | "block_diffusion"
    mode         id or None, as bos and eos: the tokens around the body
    bos, eos
    pad          id, default 0: the label where nothing follows
    key          64-bit key of its chance
    parameters   prefix_lm:        sentinel (bool), sentinels (ids; the first is used)
                 span_corruption:  noise_density, mean_span_length, random_roll, sentinels, max_spans (or None)
                 fill_in_the_middle:  as in fill_in_the_middle.py
    first_trained   of a document that says what is trained: the first such token; a prefix ends there

Absent entries are None, False or empty.
"""

from packprep.twin import chance, fill_in_the_middle, spans

IN_PLACE = ("masked_diffusion", "uniform_diffusion", "block_diffusion")
NEXT_TOKEN = ("causal", "prefix_lm", "span_corruption", "fill_in_the_middle")


def segment(tokens, facts):
    """(slots, prefix, loss, labels) of a segment with content `tokens`."""
    head, tail = head_and_tail(facts)
    objective, parameters = facts["objective"], facts.get("parameters", {})
    if objective in ("causal", "too_short"):
        body, prefix = list(tokens), 0
    elif objective == "prefix_lm":
        pivot = pivot_of(len(tokens), facts["key"], facts.get("first_trained"))
        sentinel = [parameters["sentinels"][0]] if parameters.get("sentinel") else []
        body = [*tokens[:pivot], *sentinel, *tokens[pivot:]]
        prefix = len(head) + pivot
    elif objective == "span_corruption":
        inputs, targets = corrupted(tokens, mask_of(len(tokens), facts), parameters["sentinels"])
        body = inputs + targets
        prefix = len(head) + len(inputs)
    elif objective == "fill_in_the_middle":
        body, prefix = fill_in_the_middle.body(tokens, parameters, facts["key"]), 0
    else:
        raise ValueError(f"objective {objective!r} has no twin")
    slots = head + body + tail
    return slots, prefix, loss_of(len(slots), prefix), next_tokens(slots, facts.get("pad", 0))


def in_place(tokens, facts):
    """(slots, prefix) of an in-place segment before its noise; in block diffusion they stand twice."""
    head, tail = head_and_tail(facts)
    slots = head + list(tokens) + tail
    return (slots + slots, -1) if facts["objective"] == "block_diffusion" else (slots, len(slots))


def head_and_tail(facts):
    """Tokens before and after the body."""
    mode = None if facts["objective"] == "too_short" else facts.get("mode")
    head = [token for token in (facts.get("bos"), mode) if token is not None]
    tail = [token for token in (facts.get("eos"),) if token is not None]
    return head, tail


def pivot_of(n, key, first_trained=None):
    """1 … n − 1: how many content tokens a prefix holds."""
    if first_trained is not None:
        return max(first_trained, 1)
    return 1 + chance.integers(key, chance.PIVOT, 0, n - 1)


def mask_of(n, facts):
    p = facts["parameters"]
    return spans.span_mask(
        n, p["noise_density"], p["mean_span_length"], p.get("max_spans"), p.get("random_roll", False), facts["key"]
    )


def corrupted(tokens, mask, sentinels):
    """(inputs, targets): each noise run becomes its own sentinel, which stands again before the run's tokens."""
    inputs, targets = [], []
    used = 0
    for i, token in enumerate(tokens):
        if not mask[i]:
            inputs.append(token)
            continue
        if i == 0 or not mask[i - 1]:
            if used == len(sentinels):
                raise ValueError(f"more noise runs than {len(sentinels)} sentinels")
            inputs.append(sentinels[used])
            targets.append(sentinels[used])
            used += 1
        targets.append(token)
    if not used:
        raise ValueError("a mask without noise")
    return inputs, targets


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
    objective, parameters = facts["objective"], facts.get("parameters", {})
    if objective in ("causal", "too_short"):
        return body
    if objective == "fill_in_the_middle":
        return fill_in_the_middle.content(body, parameters, facts["key"])
    inputs, targets = body[: prefix - len(head)], body[prefix - len(head) :]
    if objective == "prefix_lm":
        if not parameters.get("sentinel"):
            return body
        if targets[0] != parameters["sentinels"][0]:
            raise ValueError("the targets do not begin with the sentinel")
        return inputs + targets[1:]
    return reconstruct(inputs, targets, parameters["sentinels"])


def reconstruct(inputs, targets, sentinels):
    """The original of `corrupted`: each sentinel in the inputs gives way to the tokens behind it in the targets."""
    tokens_behind: dict[int, list[int]] = {}
    order: list[int] = []
    for token in targets:
        if token in sentinels:
            if token in tokens_behind:
                raise ValueError(f"sentinel {token} is used twice")
            tokens_behind[token] = []
            order.append(token)
        elif not order:
            raise ValueError("the targets do not begin with a sentinel")
        else:
            tokens_behind[order[-1]].append(token)
    if [token for token in inputs if token in sentinels] != order or order != list(sentinels[: len(order)]):
        raise ValueError("the sentinels of inputs and targets are not the first ones in the same order")
    result = []
    for token in inputs:
        result += tokens_behind.get(token, [token])
    return result


def law(objective, n, facts):
    """Slots of a segment of n content tokens; without a key the most it can take (a roll that cuts a span in two)."""
    head, tail = head_and_tail({**facts, "objective": objective})
    around = len(head) + len(tail)
    parameters = facts.get("parameters", {})
    if objective in ("causal", "too_short", "masked_diffusion", "uniform_diffusion"):
        return around + n
    if objective == "block_diffusion":
        return 2 * (around + n)
    if objective == "prefix_lm":
        return around + n + (1 if parameters.get("sentinel") else 0)
    if objective == "span_corruption":
        noise, n_runs = spans.span_counts(
            n, parameters["noise_density"], parameters["mean_span_length"], parameters.get("max_spans")
        )
        if parameters.get("random_roll"):
            key = facts.get("key")
            # Each composition has exactly noise − spans offsets that cut a span.
            if key is None or chance.integers(key, chance.ROLL, 0, n) < noise - n_runs:
                n_runs += 1
        return around + n + 2 * n_runs
    if objective == "fill_in_the_middle":
        return around + fill_in_the_middle.law(n, parameters, facts.get("key"))
    raise ValueError(f"objective {objective!r} has no twin")
