"""Documents that say what of them is trained: where they are cut, and which slots may be trained."""

from bisect import bisect_right

from packprep.twin import cutting

# Kinds that such documents may draw.
OBJECTIVES = ("causal", "prefix_lm", "masked_diffusion")


def _end_of(span):
    return span[1]


def cut(n_tokens, trained, recipe):
    """[(start, n, task, bos, eos, copy, first_trained)] of a document, as cutting.cut.

    trained: as tokens.Trained. Cuts fall on messages' begins where one lies in reach, else as in other documents. Later
    pieces repeat `copy` tokens of the system message where that leaves room for two tails. Pieces without a trained token
    are left out. first_trained: number in the body, None where all of it is trained.
    """
    min_tail = max(3, recipe["min_tokens"])
    segments: list[tuple] = []
    start = 0
    while start < n_tokens:
        rest = n_tokens - start
        bos = start == 0 and recipe["prepend_bos"]
        task = len(recipe["tasks"])
        if rest >= 3:
            task = cutting.draw_task(recipe["key"](start), recipe["tasks"], recipe["allowed"])
        most = cutting.capacity(recipe, task, bos, recipe["append_eos"])
        inner = cutting.inner_capacity(recipe, task, bos)
        copy = trained.system if start else 0
        if most - copy < 2 * min_tail - 1 or inner - copy < 2 * min_tail - 1:
            copy = 0
        n, eos = rest, recipe["append_eos"]
        if rest > most - copy:
            if recipe["long"] == "drop":
                return segments
            eos = False
            space = inner - copy
            n = min(space, rest if recipe["long"] == "truncate" else rest - min_tail)
            at_messages = [c for c in trained.cuts if start + 3 <= c <= start + space and n_tokens - c >= min_tail]
            if at_messages:
                n = at_messages[-1] - start
        next_span = bisect_right(trained.spans, start, key=_end_of)
        if next_span < len(trained.spans) and trained.spans[next_span][0] < start + n:
            begin, end = trained.spans[next_span]
            first = copy + max(begin - start, 0)
            if copy == 0 and begin <= start and end >= start + n:
                first = None
            segments.append((start, n, task, bos, eos, copy, first))
        start += n
        if recipe["long"] == "truncate":
            break
    return segments


def trainable(slots, head, mode, n, eos, segment, pivot, shift):
    """bool for each of the segment's slots: whether its token may be a target.

    head: slots before the body, the last `mode` of which are a mode token that may be predicted; n: tokens of the body;
    eos: whether there is an eos that may be trained; segment: (start, copy, trained) with trained None where the document
    says nothing; token i of the body stands `shift` slots later from `pivot` on.
    """
    start, copy, trained = segment
    may = [False] * slots
    if trained is None:
        for t in range(head - mode, head + n + shift + (1 if eos else 0)):
            may[t] = True
        return may
    for i in range(copy, n):
        token = start + i - copy
        next_span = bisect_right(trained.spans, token, key=_end_of)
        if next_span < len(trained.spans) and trained.spans[next_span][0] <= token:
            may[head + i + (shift if i >= pivot else 0)] = True
    if shift:
        may[head + pivot] = True
    if eos and trained.eos:
        may[head + n + shift] = True
    return may
