"""Noise spans: how many, where, and rolled."""

from packprep.twin import chance


def span_counts(n, density, mean, max_spans=None):
    """(noise tokens, spans) of a segment of n tokens. Python's round() is half to even, its floats are float64."""
    n = max(n, 2)
    noise = min(max(round(n * density), 1), n - 1)
    most = min(noise, n - noise)
    if max_spans is not None:
        most = min(most, max_spans)
    return noise, min(max(round(noise / mean), 1), most)


def composition_from(n, k, draw):
    """n as k positive parts. draw(i, j) gives the i-th number, of 0 … j − 1. Floyd's sampling of k − 1 cut points."""
    chosen = set()
    for i in range(k - 1):
        j = n - k + 1 + i
        t = 1 + draw(i, j)
        chosen.add(j if t in chosen else t)
    cuts = [0, *sorted(chosen), n]
    return [cuts[i + 1] - cuts[i] for i in range(k)]


def composition(n, k, key, purpose):
    """n as k positive parts, uniform over all C(n − 1, k − 1)."""
    return composition_from(n, k, lambda i, j: chance.integers(key, purpose, i, j))


def mask_from_spans(text_spans, noise_spans):
    """Interleaved, beginning with text."""
    mask = []
    for text, noise in zip(text_spans, noise_spans, strict=True):
        mask += [False] * text + [True] * noise
    return mask


def base_mask(n, density, mean, max_spans, key):
    """The mask before a roll: begins with text, ends in noise."""
    noise, spans = span_counts(n, density, mean, max_spans)
    noise_spans = composition(noise, spans, key, chance.NOISE_SPANS)
    text_spans = composition(n - noise, spans, key, chance.TEXT_SPANS)
    return mask_from_spans(text_spans, noise_spans)


def cutting_offsets(base):
    """Offsets strictly inside a noise run: a rotation that begins there cuts the run in two."""
    return [o for o in range(1, len(base)) if base[o - 1] and base[o]]


def rotated(base, offset):
    return [base[(offset + i) % len(base)] for i in range(len(base))]


def rolled(base, r):
    """The rotation that r (0 … n − 1) stands for: cutting offsets first, then the others, each ascending."""
    cutting = cutting_offsets(base)
    others = [o for o in range(len(base)) if o not in cutting]
    return rotated(base, (cutting + others)[r])


def span_mask(n, density, mean, max_spans, roll, key):
    """list[bool]: which of n ≥ 2 tokens are noise."""
    if n < 2:
        raise ValueError(f"{n} tokens: at least 2 are needed for noise and text")
    base = base_mask(n, density, mean, max_spans, key)
    if not roll:
        return base
    return rolled(base, chance.integers(key, chance.ROLL, 0, n))


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
    """The largest n whose segment (mode token, no bos, no eos, no roll) has at most `slots` slots; 0 if none."""
    best = 0
    for n in range(1, slots + 1):
        if 1 + n + 2 * span_counts(n, density, mean, max_spans)[1] <= slots:
            best = n
    return best
