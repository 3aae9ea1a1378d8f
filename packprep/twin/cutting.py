"""Document → segments: which tokens, which task, with or without bos and eos.

`recipe` is a dict:

    seq_length, min_tokens, max_tokens (0: no limit), long ("split" | "truncate" | "drop"), append_eos, prepend_bos
    pad          pad_seq_to_mult; max_segments: of a row, 0: no limit
    tasks      list of dicts: objective, weight, mode (id or None), parameters as in objectives.py and, for
               span_corruption, too_many_spans ("split" | "lower"); sentinels None: as many as needed
    allowed    set of task indices that this source draws from
    key        function: first content token → 64-bit segment key
    capacities   (task, bos, eos) → capacity, as far as it is known; absent: found each time
"""

from fractions import Fraction

from packprep.twin import chance, objectives, spans


def cut(n_tokens, recipe):
    """[(start, n, task, bos, eos)] of a document of n_tokens; [] if it is dropped. Task len(tasks) is too_short."""
    if n_tokens < max(1, recipe["min_tokens"]):
        return []
    long, append_eos = recipe["long"], recipe["append_eos"]
    min_tail = max(3, recipe["min_tokens"])
    segments = []
    start = 0
    while start < n_tokens:
        rest = n_tokens - start
        bos = start == 0 and recipe["prepend_bos"]
        if rest < 3:
            segments.append((start, rest, len(recipe["tasks"]), bos, append_eos))
            return segments
        task = draw_task(recipe["key"](start), recipe["tasks"], recipe["allowed"])
        n, eos = rest, append_eos
        if rest > capacity(recipe, task, bos, append_eos):
            if long == "drop":
                return []
            eos = False
            if long == "truncate":
                return [(start, min(rest, capacity(recipe, task, bos, False)), task, bos, False)]
            n = min(inner_capacity(recipe, task, bos), rest - min_tail)
            if n < 3:
                raise ValueError(f"{rest} tokens are left, beyond task {task}'s capacity, and a tail needs {min_tail}")
        if long == "split":
            shorter = random_length(recipe["key"](start), n, min_tail, recipe["tasks"][task])
            n, eos = shorter, eos and shorter == n
        segments.append((start, n, task, bos, eos))
        if long == "truncate":
            return segments
        start += n
    return segments


def random_length(key, n, min_tail, task):
    """n, or with the task's probability (53 bits) a number of min_tail … n − min_tail."""
    limit = int(task.get("parameters", {}).get("random_length", 0.0) * 2**53)
    if n < 2 * min_tail or chance.bits64(key, chance.SEGMENT_LENGTH) >> 11 >= limit:
        return n
    return min_tail + chance.integers(key, chance.SEGMENT_LENGTH, 4, n - 2 * min_tail + 1)


def draw_task(key, tasks, allowed):
    """Index of the task: 53 bits against the cumulative weight shares of the allowed tasks, exact."""
    u = chance.bits64(key, chance.TASK) >> 11
    total = sum(Fraction(tasks[i]["weight"]) for i in allowed)
    cumulative = Fraction(0)
    for i in sorted(allowed):
        cumulative += Fraction(tasks[i]["weight"]) / total
        if u < cumulative * 2**53 // 1:
            return i
    raise AssertionError("the last share is 1")


def capacity(recipe, task, bos, eos):
    """The most content tokens that a segment of the task can surely hold. Task len(tasks) is too_short."""
    known = recipe.get("capacities", {})
    if (task, bos, eos) not in known:
        known[task, bos, eos] = most_tokens(recipe, task, bos, eos, recipe["seq_length"])
    return known[task, bos, eos]


def inner_capacity(recipe, task, bos):
    """The same of a piece that more of its document follows: where full pieces leave a sixteenth of the row, they divide it."""
    known = recipe.get("capacities", {})
    if (task, bos, "inner") not in known:
        known[task, bos, "inner"] = dividing(recipe, task, bos)
    return known[task, bos, "inner"]


def dividing(recipe, task, bos):
    """inner_capacity, found."""
    longest = capacity(recipe, task, bos, False)
    if recipe["long"] != "split":
        return longest
    row, pad = recipe["seq_length"], recipe["pad"]
    facts = segment_facts([*recipe["tasks"], {"objective": "too_short"}][task])
    slots = objectives.law(facts["objective"], capacity(recipe, task, False, False), facts)
    while slots % pad:
        slots += 1
    parts = 1
    if Fraction(slots, row) <= Fraction(15, 16):
        while parts * slots < row:
            parts += 1
    if recipe["max_segments"]:
        parts = min(parts, recipe["max_segments"])
    room = row // parts
    while room % pad:
        room -= 1
    two_tails = 2 * max(3, recipe["min_tokens"]) - 1
    return max(most_tokens(recipe, task, bos, False, room), min(longest, two_tails))


def most_tokens(recipe, task, bos, eos, slots):
    """The largest number of tokens, of all up to `slots`, that `holds` says fits."""
    tasks = [*recipe["tasks"], {"objective": "too_short"}]
    best = 0
    for n in range(1, slots + 1):
        if recipe["max_tokens"] and n > recipe["max_tokens"]:
            break
        if holds(tasks[task], n, bos, eos, slots):
            best = n
    return best


def holds(task, n, bos, eos, slots):
    """Whether n content tokens fit whatever is drawn, with the sentinels that there are."""
    facts = segment_facts(task, bos=-1 if bos else None, eos=-1 if eos else None)
    parameters = task.get("parameters", {})
    sentinels = parameters.get("sentinels")
    if task["objective"] == "span_corruption" and sentinels is not None and not lowers(task):
        wanted = spans.span_counts(n, parameters["noise_density"], parameters["mean_span_length"])[1]
        if wanted + (1 if parameters.get("random_roll") else 0) > len(sentinels):
            return False
    return objectives.law(task["objective"], n, facts) <= slots


def lowers(task):
    return task.get("parameters", {}).get("too_many_spans", "split") == "lower"


def segment_facts(task, bos=None, eos=None, key=None, pad=0):
    """What objectives.py wants to know of a segment of the task. With "lower" spans are clamped to the sentinels."""
    parameters = dict(task.get("parameters", {}))
    if task["objective"] == "span_corruption":
        sentinels = parameters.get("sentinels")
        parameters["max_spans"] = None
        if sentinels is not None and lowers(task):
            parameters["max_spans"] = len(sentinels) - (1 if parameters.get("random_roll") else 0)
    return {
        "objective": task["objective"],
        "mode": task.get("mode"),
        "bos": bos,
        "eos": eos,
        "pad": pad,
        "key": key,
        "parameters": parameters,
    }
