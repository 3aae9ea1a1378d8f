"""span_corruption: noise spans, how many, where, and rolled; each gives way to a sentinel, behind
which it stands again.

`parameters` of a segment: noise_density, mean_span_length, random_roll, sentinels (None: as many as
needed), too_many_spans ("split" | "lower"), input_eos (a list: the id that ends the inputs, or
nothing), and max_spans (or None), which `completed` adds.
"""

from tests.twin import chance


def completed(parameters):
    """With "lower" spans are clamped to the sentinels."""
    sentinels, max_spans = parameters.get("sentinels"), None
    if sentinels is not None and _lowers(parameters):
        max_spans = len(sentinels) - _of_roll(parameters)
    return {**parameters, "max_spans": max_spans}


def fits(n, parameters):
    """Whether there are enough sentinels, whatever is drawn."""
    sentinels = parameters.get("sentinels")
    if sentinels is None or _lowers(parameters):
        return True
    wanted = span_counts(n, parameters["noise_density"], parameters["mean_span_length"])[1]
    return wanted + _of_roll(parameters) <= len(sentinels)


def _lowers(parameters):
    return parameters.get("too_many_spans", "split") == "lower"


def _of_roll(parameters):
    """A roll can cut a span in two."""
    return 1 if parameters.get("random_roll") else 0


def marks(parameters):
    return parameters["sentinels"]


def law(n, facts):
    """Without a key the most it can take: a roll that cuts a span in two."""
    parameters = facts["parameters"]
    noise, n_runs = span_counts(
        n, parameters["noise_density"], parameters["mean_span_length"], parameters.get("max_spans")
    )
    if parameters.get("random_roll"):
        key = facts.get("key")
        # Each composition has exactly noise − spans offsets that cut a span.
        if key is None or chance.integers(key, chance.ROLL, 0, n) < noise - n_runs:
            n_runs += 1
    return n + 2 * n_runs + len(parameters.get("input_eos", ()))


def sides(n, facts):
    """The most slots of the inputs and of the targets."""
    parameters = facts["parameters"]
    noise, spans = span_counts(
        n, parameters["noise_density"], parameters["mean_span_length"], parameters.get("max_spans")
    )
    runs = spans + _of_roll(parameters)
    return max(n, 2) - noise + runs + len(parameters.get("input_eos", ())), noise + runs


def body(tokens, facts):
    p, epoch = facts["parameters"], facts.get("epoch", 0)
    of_spans = p["noise_density"], p["mean_span_length"], p.get("max_spans")
    mask = span_mask(len(tokens), *of_spans, p.get("random_roll"), facts["key"], epoch)
    inputs, targets = corrupted(tokens, mask, p["sentinels"])
    inputs += p.get("input_eos", [])
    return inputs + targets, len(inputs)


def content(slots, prefix, facts):
    end = list(facts["parameters"].get("input_eos", []))
    if slots[prefix - len(end) : prefix] != end:
        raise ValueError("the inputs do not end in eos")
    return reconstruct(slots[: prefix - len(end)], slots[prefix:], facts["parameters"]["sentinels"])


def corrupted(tokens, mask, sentinels):
    """(inputs, targets): each noise run becomes its own sentinel, which stands again before the
    run's tokens."""
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


def reconstruct(inputs, targets, sentinels):
    """The original of `corrupted`: each sentinel in the inputs gives way to the tokens behind it in
    the targets."""
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
    if [token for token in inputs if token in sentinels] != order or order != list(
        sentinels[: len(order)]
    ):
        raise ValueError(
            "the sentinels of inputs and targets are not the first ones in the same order"
        )
    result = []
    for token in inputs:
        result += tokens_behind.get(token, [token])
    return result


def span_counts(n, density, mean, max_spans=None):
    """(noise tokens, spans) of a segment of n tokens. Python's round() is half to even, its floats
    are float64."""
    n = max(n, 2)
    noise = min(max(round(n * density), 1), n - 1)
    most = min(noise, n - noise)
    if max_spans is not None:
        most = min(most, max_spans)
    return noise, min(max(round(noise / mean), 1), most)


def composition_from(n, k, draw):
    """n as k positive parts. draw(i, j) gives the i-th number, of 0 … j − 1. Floyd's sampling of k
    − 1 cut points."""
    chosen = set()
    for i in range(k - 1):
        j = n - k + 1 + i
        t = 1 + draw(i, j)
        chosen.add(j if t in chosen else t)
    cuts = [0, *sorted(chosen), n]
    return [cuts[i + 1] - cuts[i] for i in range(k)]


def composition(n, k, key, purpose, epoch=0):
    """n as k positive parts, uniform over all C(n − 1, k − 1)."""
    return composition_from(n, k, lambda i, j: chance.integers(key, purpose, i, j, epoch))


def mask_from_spans(text_spans, noise_spans):
    """Interleaved, beginning with text."""
    mask = []
    for text, noise in zip(text_spans, noise_spans, strict=True):
        mask += [False] * text + [True] * noise
    return mask


def base_mask(n, density, mean, max_spans, key, epoch):
    """The mask before a roll: begins with text, ends in noise."""
    noise, spans = span_counts(n, density, mean, max_spans)
    noise_spans = composition(
        noise, spans, key, chance.purpose_in(epoch, chance.NOISE_SPANS), epoch
    )
    text_spans = composition(
        n - noise, spans, key, chance.purpose_in(epoch, chance.TEXT_SPANS), epoch
    )
    return mask_from_spans(text_spans, noise_spans)


def cutting_offsets(base):
    """Offsets strictly inside a noise run: a rotation that begins there cuts the run in two."""
    return [o for o in range(1, len(base)) if base[o - 1] and base[o]]


def rotated(base, offset):
    return [base[(offset + i) % len(base)] for i in range(len(base))]


def rolled(base, r):
    """The rotation that r (0 … n − 1) stands for: cutting offsets first, then the others, each
    ascending."""
    cutting = cutting_offsets(base)
    others = [o for o in range(len(base)) if o not in cutting]
    return rotated(base, (cutting + others)[r])


def span_mask(n, density, mean, max_spans, roll, key, epoch=0):
    """list[bool]: which of n ≥ 2 tokens are noise. Whether a roll cuts a span is for all epochs as
    epoch 0 has it."""
    if n < 2:
        raise ValueError(f"{n} tokens: at least 2 are needed for noise and text")
    base = base_mask(n, density, mean, max_spans, key, epoch)
    if not roll:
        return base
    r, cutting = chance.integers(key, chance.ROLL, 0, n), len(cutting_offsets(base))
    if epoch:
        first, many = (0, cutting) if r < cutting else (cutting, n - cutting)
        r = first + chance.integers(key, chance.purpose_in(epoch, chance.ROLL), 0, many, epoch)
    return rolled(base, r)


def runs(mask):
    """(begin, end) of each run of noise."""
    found = []
    for i, noise in enumerate(mask):
        if noise and (i == 0 or not mask[i - 1]):
            found.append((i, i + 1))
        elif noise:
            found[-1] = (found[-1][0], i + 1)
    return found


def max_tokens_for(slots, density, mean, max_spans=None):
    """The largest n whose segment (mode token, no bos, no eos, no roll) has at most `slots` slots;
    0 if none."""
    best = 0
    for n in range(1, slots + 1):
        if 1 + n + 2 * span_counts(n, density, mean, max_spans)[1] <= slots:
            best = n
    return best
