"""Document → segments: which tokens, which task, with or without bos and eos; lengths → (row,
offset).

`recipe` is a dict:

    seq_length, min_tokens, max_tokens (0: no limit), prepend_bos
    long         "split" | "truncate" | "drop" | "decompose"
    append_eos   True: eos ends each document, "segment": each segment, False: none
    lengths      row lengths of all datasets that share the documents, ascending; capacities_of: each → its capacities
    pad          pad_seq_to_mult; max_segments: of a row, 0: no limit
    sides        most slots of a row's inputs and of its targets; None: rows have one side
    tasks      list of dicts: objective, weight, mode (id or None), parameters as its file in objectives/ says
    allowed    set of task indices that this source draws from
    key        function: first content token → 64-bit segment key
    capacities   (task, bos, eos) → capacity, as far as it is known; absent: found each time
    keys         for `lay`, which cuts where rows end: of each document such a function
    allowed_of   for `lay`: of each document its `allowed`; absent: they have all the same
"""

import bisect
from fractions import Fraction

from tests.twin import chance, objectives
from tests.twin.objectives import block_diffusion

FORMAT_LIMIT = 65535  # segments in a row: their ids are 16-bit and 0 is padding
GROUP_ROWS = 256


def cut(n_tokens, recipe):
    """[(start, n, task, bos, eos)] of a document of n_tokens; [] if it is dropped. Task len(tasks)
    is too_short."""
    if n_tokens < max(1, recipe["min_tokens"]):
        return []
    long = recipe["long"]
    min_tail = max(3, recipe["min_tokens"])
    segments = []
    start = 0
    while start < n_tokens:
        rest = n_tokens - start
        bos = start == 0 and recipe["prepend_bos"]
        if rest < 3:
            if long != "decompose" or recipe["seq_length"] == recipe["lengths"][0]:
                segments.append((start, rest, len(recipe["tasks"]), bos, ends_in_eos(recipe)))
            return segments
        task = draw_task(recipe["key"](start), recipe["tasks"], recipe["allowed"])
        n, eos = rest, ends_in_eos(recipe)
        if long == "decompose":
            row, n = filled(rest, task, bos, recipe)
            if row == recipe["seq_length"]:
                segments.append((start, n, task, bos, ends_in_eos(recipe, n == rest)))
            start += n
            continue
        if rest > capacity(recipe, task, bos, eos):
            if long == "drop":
                return []
            eos = ends_in_eos(recipe, False)
            if long == "truncate":
                return [(start, min(rest, capacity(recipe, task, bos, eos)), task, bos, eos)]
            n = min(inner_capacity(recipe, task, bos), rest - min_tail)
            if n < 3:
                raise ValueError(
                    f"{rest} tokens are left, beyond task {task}'s capacity, and a tail needs"
                    f" {min_tail}"
                )
        if long == "split":
            shorter = random_length(recipe["key"](start), n, min_tail, recipe["tasks"][task])
            if shorter < n:
                n, eos = shorter, ends_in_eos(recipe, False)
        segments.append((start, n, task, bos, eos))
        if long == "truncate":
            return segments
        start += n
    return segments


def ends_in_eos(recipe, is_last=True):
    """Whether a segment that is its document's last, or is not, has an eos."""
    return recipe["append_eos"] == "segment" or (is_last and recipe["append_eos"])


def filled(rest, task, bos, recipe):
    """(the longest of the row lengths that `rest` tokens fill, or the shortest; how many go into
    it)."""
    row, most = recipe["lengths"][0], 0
    for length in recipe["lengths"]:
        own = {
            **recipe,
            "seq_length": length,
            "capacities": recipe["capacities_of"].setdefault(length, {}),
        }
        holds = capacity(own, task, bos, ends_in_eos(recipe))
        if most == 0 or most < holds <= rest:
            row, most, inner = length, holds, capacity(own, task, bos, ends_in_eos(recipe, False))
    return row, rest if rest <= most else min(inner, rest - max(3, recipe["min_tokens"]))


def is_elsewhere(n_tokens, recipe, is_supervised=False):
    """Whether a document of n_tokens is of another of the row lengths: it is of the first that
    holds most of it, and of the eos that may fill up its last block."""
    if len(recipe["lengths"]) == 1 or recipe["long"] == "decompose":
        return False
    task = len(recipe["tasks"])
    if n_tokens >= 3:
        task = draw_task(recipe["key"](0), recipe["tasks"], recipe["allowed"])
    if is_supervised:
        n_tokens += max(filled_length(recipe, task) - 1, 0)
    held = []
    for length in recipe["lengths"]:
        own = {
            **recipe,
            "seq_length": length,
            "capacities": recipe["capacities_of"].setdefault(length, {}),
        }
        held.append(min(n_tokens, capacity(own, task, recipe["prepend_bos"], ends_in_eos(recipe))))
    return recipe["lengths"][held.index(max(held))] != recipe["seq_length"]


def random_length(key, n, min_tail, task):
    """n, or with the task's probability (53 bits) a number of min_tail … n − min_tail."""
    limit = int(task.get("parameters", {}).get("random_length", 0.0) * 2**53)
    if n < 2 * min_tail or chance.bits64(key, chance.SEGMENT_LENGTH) >> 11 >= limit:
        return n
    return min_tail + chance.integers(key, chance.SEGMENT_LENGTH, 4, n - 2 * min_tail + 1)


def draw_task(key, tasks, allowed):
    """Index of the task: 53 bits against the cumulative weight shares of the allowed tasks,
    exact."""
    u = chance.bits64(key, chance.TASK) >> 11
    total = sum(Fraction(tasks[i]["weight"]) for i in allowed)
    cumulative = Fraction(0)
    for i in sorted(allowed):
        cumulative += Fraction(tasks[i]["weight"]) / total
        if u < cumulative * 2**53 // 1:
            return i
    raise AssertionError("the last share is 1")


def capacity(recipe, task, bos, eos):
    """The most content tokens that a segment of the task can surely hold. Task len(tasks) is
    too_short."""
    known = recipe.get("capacities", {})
    if (task, bos, eos) not in known:
        known[task, bos, eos] = most_tokens(
            recipe, task, bos, eos, recipe["seq_length"], recipe.get("sides")
        )
    return known[task, bos, eos]


def inner_capacity(recipe, task, bos):
    """The most tokens of a piece that more of its document follows: full ones that leave a
    sixteenth of a row divide it."""
    known = recipe.get("capacities", {})
    if (task, bos, "inner") not in known:
        known[task, bos, "inner"] = dividing(recipe, task, bos)
    return known[task, bos, "inner"]


def dividing(recipe, task, bos):
    """inner_capacity, found."""
    eos = ends_in_eos(recipe, False)
    longest = capacity(recipe, task, bos, eos)
    if recipe["long"] != "split":
        return longest
    row, pad = recipe["seq_length"], recipe["pad"]
    facts = segment_facts(
        [*recipe["tasks"], {"objective": "too_short"}][task], eos=-1 if eos else None
    )
    slots = objectives.law(facts["objective"], capacity(recipe, task, False, eos), facts)
    while slots % pad:
        slots += 1
    filled = [(slots, row)]
    if recipe.get("sides"):
        kind = objectives.of(facts["objective"])
        if hasattr(kind, "sides"):
            inputs, targets = kind.sides(capacity(recipe, task, False, eos), facts)
            head, tail = objectives.head_and_tail(facts)
            filled = list(
                zip((inputs + len(head), targets + len(tail)), recipe["sides"], strict=True)
            )
    parts = min(_parts(part, whole) for part, whole in filled)
    if recipe["max_segments"]:
        parts = min(parts, recipe["max_segments"])
    room = row // parts
    while room % pad:
        room -= 1
    two_tails = 2 * max(3, recipe["min_tokens"]) - 1
    sides = [side // parts for side in recipe["sides"]] if recipe.get("sides") else None
    return max(most_tokens(recipe, task, bos, eos, room, sides), min(longest, two_tails))


def _parts(slots, row):
    """How many pieces of so many slots divide a row: 1 where one leaves less than a sixteenth of
    it."""
    if Fraction(slots, row) > Fraction(15, 16):
        return 1
    return next(parts for parts in range(1, row + 1) if parts * slots >= row)


def most_tokens(recipe, task, bos, eos, slots, sides):
    """The largest number of tokens, of all up to `slots`, that `holds` says fits."""
    tasks = [*recipe["tasks"], {"objective": "too_short"}]
    best = 0
    for n in range(1, slots + 1):
        if recipe["max_tokens"] and n > recipe["max_tokens"]:
            break
        if holds(tasks[task], n, bos, eos, slots, sides):
            best = n
    return best


def holds(task, n, bos, eos, slots, sides=None):
    """Whether n content tokens fit whatever is drawn, with what ids there are; on the sides of a
    row, if it has two."""
    facts = segment_facts(task, bos=-1 if bos else None, eos=-1 if eos else None)
    kind = objectives.of(task["objective"])
    if hasattr(kind, "fits") and not kind.fits(n, facts["parameters"]):
        return False
    if sides and hasattr(kind, "sides"):
        inputs, targets = kind.sides(n, facts)
        head, tail = objectives.head_and_tail(facts)
        if len(head) + inputs > sides[0] or targets + len(tail) > sides[1]:
            return False
    return objectives.law(task["objective"], n, facts) <= slots


def segment_facts(task, bos=None, eos=None, key=None, pad=0):
    """What objectives wants to know of a segment of the task."""
    kind, parameters = objectives.of(task["objective"]), dict(task.get("parameters", {}))
    return {
        "objective": task["objective"],
        "mode": task.get("mode"),
        "bos": bos,
        "eos": eos,
        "pad": pad,
        "key": key,
        "parameters": kind.completed(parameters) if hasattr(kind, "completed") else parameters,
    }


def _end_of(span):
    return span[1]


def _first_of(message):
    return message[0]


def filled_length(recipe, task):
    """The slots of a block that eos fill up, 0 for a task without such blocks."""
    parameters = segment_facts([*recipe["tasks"], {"objective": "too_short"}][task])["parameters"]
    return parameters["block_length"] if parameters.get("eos_fill") == "block" else 0


def flags_of(trained, piece, head, n_tokens, rest_trained):
    """Whether each slot of a piece (start, n, copy, eos) may be trained; head: slots before its
    body."""
    start, n, copy, eos = piece
    flags = [False] * (head + copy + n + (1 if eos else 0))
    spans = trained_in(trained, start, n, rest_trained)
    for begin, end, _ in spans:
        for token in range(begin, end):
            flags[head + copy + token - start] = True
    if eos:
        flags[-1] = eos_weight(trained, spans, start, n, n_tokens, rest_trained) > 0
    return flags


def filling(flags, head, parameters, trained, piece, rest_trained):
    """How many eos make the last block of a half whole. Where blocks count from answers, only
    behind a slot that is trained; else only behind the message of the last token that is."""
    if parameters.get("eos_fill") != "block":
        return 0
    if parameters["block_origin"] == "answer" and not flags[-1]:
        return 0
    if parameters["block_origin"] == "segment":
        ends = [end for _, end, _ in trained_in(trained, *piece, rest_trained)]
        if not ends or any(cut >= max(ends) for cut in trained.cuts):
            return 0
    block_of_slot = block_diffusion.numbers(len(flags), head, flags, parameters)
    return parameters["block_length"] - block_of_slot.count(block_of_slot[-1])


def before_block(n, flags, head, copy, eos, parameters):
    """How many of n tokens a piece gets, if behind them an answer goes on: as many as end a block
    of this answer, with an eos where the piece gets one, at least 3, if it has one that ends;
    otherwise n. flags: of one token more."""
    if "block_length" not in parameters or not flags[-1]:
        return n
    block_of_slot = block_diffusion.numbers(len(flags), head, flags, parameters)
    for shorter in range(n, 2, -1):
        slot = head + copy + shorter
        if not flags[slot - 1]:
            break
        begin = block_of_slot.index(block_of_slot[slot - 1])
        if (slot + (1 if eos else 0) - begin) % parameters["block_length"] == 0:
            return shorter
    return n


def cut_supervised(n_tokens, trained, recipe):
    """[(start, n, task, bos, eos, copy, first_trained, fill)] of a document, as `cut`.

    trained: as tokens.Trained. Cuts fall on messages' begins where one lies in reach, else as in
    other documents: where roles are known on a user's, or on another's that no answer behind it
    looks back over. Later pieces repeat `copy` tokens of the system message where that leaves room
    for two tails and any place of media. Pieces are left out that train no token, or one alone that
    no slot predicts, and of rows of two sides those of fewer than 3 tokens. No cut falls into a
    place: it falls before it, or behind one with which the piece begins; [] where that does not
    fit. No cut falls into a block of an answer, as far as the piece has a whole one of it.
    first_trained: number in the body. fill: the eos behind the text that make its last block whole;
    it is cut where they do not fit.
    """
    rest_trained = recipe["long_answers"] == "continue"
    users = {first for first, role in trained.messages if role == "user"}
    min_tail = max(3, recipe["min_tokens"])
    segments: list[tuple] = []
    start = 0
    while start < n_tokens:
        rest = n_tokens - start
        bos = start == 0 and recipe["prepend_bos"]
        task = len(recipe["tasks"])
        if rest >= 3:
            task = draw_task(recipe["key"](start), recipe["tasks"], recipe["allowed"])
        most = capacity(recipe, task, bos, ends_in_eos(recipe))
        inner = inner_capacity(recipe, task, bos)
        copy = trained.system if start else 0
        needed = max([2 * min_tail - 1, *(place.end - place.begin for place in trained.media)])
        needed += filled_length(recipe, task)
        if most - copy < needed or inner - copy < needed:
            copy = 0
        n, eos = rest, ends_in_eos(recipe)
        facts = segment_facts(
            [*recipe["tasks"], {"objective": "too_short"}][task], -1 if bos else None
        )
        head, parameters = len(objectives.head_and_tail(facts)[0]), facts["parameters"]
        flags = flags_of(trained, (start, n, copy, eos), head, n_tokens, rest_trained)
        fill = filling(flags, head, parameters, trained, (start, n), rest_trained)
        if rest + fill > most - copy:
            if recipe["long"] == "drop":
                return segments
            eos = ends_in_eos(recipe, False)
            space = inner - copy
            whole = recipe["long"] == "truncate" and fill == 0
            n, fill = min(space, rest if whole else rest - min_tail), 0
            at_messages = [
                c
                for c in trained.cuts
                if start + 3 <= c <= start + space and n_tokens - c >= min_tail
            ]
            if trained.messages:
                at_messages = [c for c in at_messages if c > trained.system]
                at_users = [c for c in at_messages if c in users]
                at_messages = at_users or [
                    c for c in at_messages if not looked_back_over(trained, c)
                ]
            if at_messages:
                n = at_messages[-1] - start
            elif n < rest:
                flags = flags_of(trained, (start, n + 1, copy, False), head, n_tokens, rest_trained)
                n = before_block(n, flags, head, copy, eos, parameters)
            across = next(
                (place for place in trained.media if place.begin < start + n < place.end), None
            )
            if across is not None:
                n = (across.begin if across.begin > start else across.end) - start
                if across.begin == start and (n == rest or n > max(space, most - copy)):
                    return []
                if n < 3:
                    task = len(recipe["tasks"])
        spans = trained_in(trained, start, n, rest_trained)
        if spans and not (recipe.get("sides") and task == len(recipe["tasks"])):
            ends_trained = eos and eos_weight(trained, spans, start, n, n_tokens, rest_trained)
            only_first = copy == 0 and spans[-1][1] == start + 1 and not ends_trained
            if not (only_first and is_unpredicted(recipe, task, bos)):
                first = copy + spans[0][0] - start
                segments.append((start, n, task, bos, eos, copy, first, fill))
        start += n
        if recipe["long"] == "truncate":
            break
    return segments


def is_unpredicted(recipe, task, bos):
    """Whether no slot predicts the first token of a body, if it is trained."""
    facts = segment_facts([*recipe["tasks"], {"objective": "too_short"}][task], -1 if bos else None)
    no_head = objectives.head_and_tail(facts)[0] == []
    if objectives.is_in_place(facts["objective"]):
        return no_head and bool(facts["parameters"].get("shift"))
    _, inputs = objectives.of(facts["objective"]).body([0] * 3, {**facts, "first_trained": 0})
    return inputs > 0 or no_head


def eos_weight(trained, spans, start, n, n_tokens, rest_trained):
    """Return the weight of a piece's eos, 0 where it is not trained: its document's end, or the
    token before.

    spans: (begin, end, weight) of the tokens that the piece trains.
    """
    if start + n < n_tokens:
        return spans[-1][2] if spans and spans[-1][1] == start + n else 0.0
    return trained.eos if trains(trained, trained.spans[-1][1] - 1, start, rest_trained) else 0.0


def trains(trained, token, start, rest_trained):
    """Whether a piece that begins at `start` trains a token that the document says to train.

    Not where what its message answers, the nearest user's or tool's before it, ended before the
    piece; unless rest_trained, and tokens of its message were trained in a piece before.
    """
    number = message_of(trained, token)
    asking = next(
        (k for k in reversed(range(number)) if trained.messages[k][1] in ("user", "tool")), None
    )
    if asking is None or start < max(1, trained.messages[asking + 1][0]):
        return True
    message = trained.messages[number][0]
    return (
        rest_trained
        and next(max(begin, message) for begin, end in trained.spans if end > message) < start
    )


def message_of(trained, token):
    """The number of the message in which a token stands; −1 where messages are not known."""
    return bisect.bisect_right(trained.messages, token, key=_first_of) - 1


def trained_in(trained, start, n, rest_trained):
    """(begin, end, weight) of the ranges of tokens that a piece of n tokens trains, ascending."""
    stop = start + n
    found = []
    passed = bisect.bisect_right(trained.spans, start, key=_end_of)
    for (begin, end), weight in zip(trained.spans[passed:], trained.weights[passed:], strict=True):
        if begin >= stop:
            break
        token = max(begin, start)
        while token < min(end, stop):  # message by message
            following = bisect.bisect_right(trained.messages, token, key=_first_of)
            until = min(
                [end, stop, *(first for first, _ in trained.messages[following : following + 1])]
            )
            if trains(trained, token, start, rest_trained):
                found.append((token, until, weight))
            token = until
    return found


def looked_back_over(trained, cut):
    """Whether the first token trained from a cut on answers a message that ends before the cut."""
    following = next((max(begin, cut) for begin, end in trained.spans if end > cut), None)
    return following is not None and not trains(trained, following, cut, rest_trained=False)


def trainable(slots, head, mode, n, eos, segment, pivot, shift, has_prefix, behind=()):
    """The weight of each of the segment's slots as a target; 0 where its token may be none.

    head: slots before the body, the last `mode` of which are a mode token that may be predicted; n:
    tokens of the body;
    eos: the weight of an eos that may be trained, 0 without one; segment: (start, copy, ranges of
    tokens that it trains), None for these where the document says nothing; token i of the body
    stands `shift` slots later from `pivot` on. has_prefix: whether the first token is never
    predicted: then it is left out where all of the segment's are trained. behind: the slots that
    fill up its last block, which weigh what the last that is trained before them does.
    """
    start, copy, spans = segment
    weights = [0.0] * slots
    if spans is None:
        for t in range(head - mode, head + n + shift + (1 if eos else 0)):
            weights[t] = 1.0
        return weights
    for begin, end, weight in spans:
        for i in range(begin - start + copy, end - start + copy):
            weights[head + i + (shift if i >= pivot else 0)] = weight
    # What is added at the pivot weighs what the token behind it does; or, where that is not
    # trained, the one before it.
    for t in range(head + pivot, head + pivot + shift):
        weights[t] = weights[head + pivot + shift] or weights[head + pivot - 1] or 1.0
    if has_prefix and sum(end - begin for begin, end, _ in spans) == n:
        weights[head] = 0.0
    if eos:
        weights[head + n + shift] = eos
    for t in behind:
        weights[t] = next(weight for weight in reversed(weights[:t]) if weight)
    return weights


def lay(sizes, recipe):
    """[(document, start, n, task, bos, eos, row, offset)], flags as 0 or 1. Task len(tasks) is
    too_short."""
    segments = []
    row, used, in_row = 0, 0, 0
    for document, size in enumerate(sizes):
        if "allowed_of" in recipe:
            recipe = {**recipe, "allowed": recipe["allowed_of"][document]}
        start = 0
        while start < size:
            found = None
            if recipe["seq_length"] - used >= 2 and in_row < (recipe["max_segments"] or 65535):
                found = piece_in_room(
                    size, start, recipe["seq_length"] - used, recipe, recipe["keys"][document]
                )
            if found is None:
                row, used, in_row = row + 1, 0, 0
                continue
            n, task, bos, eos = found
            segments.append((document, start, n, task, int(bos), int(eos), row, used))
            used += slots(recipe, task, n, bos, eos)
            in_row += 1
            start += n
    return segments


def piece_in_room(size, start, room, recipe, key):
    """(n, task, bos, eos) of the segment that begins at `start` and fits into `room` slots; None if
    there is none.

    All that is left if it fits with its eos; else as much as fits, but for at least one token that
    eos goes with. Fewer than three tokens of a task are too_short's.
    """
    too_short = len(recipe["tasks"])
    rest = size - start
    bos = start == 0 and recipe["prepend_bos"]
    drawn = too_short if rest < 3 else draw_task(key(start), recipe["tasks"], recipe["allowed"])
    for task in (drawn, too_short):
        most = recipe["max_tokens"] or recipe["seq_length"]
        eos = ends_in_eos(recipe)
        if rest <= most and slots(recipe, task, rest, bos, eos) <= room:
            n = rest
        else:
            eos = ends_in_eos(recipe, False)
            top = min(rest - 1, most, room)  # a segment has at least the slots of its tokens
            n = next((n for n in range(top, 0, -1) if slots(recipe, task, n, bos, eos) <= room), 0)
        if n >= 3 or (task == too_short and n >= 1):
            return n, task, bos, eos
    return None


def slots(recipe, task, n, bos, eos):
    if task == len(recipe["tasks"]):
        facts = {"bos": 1 if bos else None, "eos": 1 if eos else None}
        return objectives.law("too_short", n, facts)
    facts = segment_facts(recipe["tasks"][task], 1 if bos else None, 1 if eos else None)
    return objectives.law(facts["objective"], n, facts)


def pack(lengths, capacity, algorithm, max_segments=0):
    """(rows, offsets), lists as long as lengths. algorithm: "best_fit" | "first_fit" |
    "next_fit"."""
    for position, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(f"length {length} at position {position} is not in 1 … {capacity}")
    return {"best_fit": best_fit, "first_fit": first_fit, "next_fit": next_fit}[algorithm](
        list(lengths), capacity, max_segments or FORMAT_LIMIT
    )


def best_fit(lengths, capacity, max_segments):
    """Longest first; into the fullest row that holds it; of equally full rows the one that reached
    that fill last."""
    rows, offsets = [0] * len(lengths), [0] * len(lengths)
    fills: list[int] = []  # those that some open row has, ascending
    open_rows: dict[int, list[int]] = {}  # fill → rows in the order in which they reached it
    count: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_right(fills, capacity - lengths[i]) - 1
        if place < 0:
            row, fill = len(count), 0
            count.append(0)
        else:
            fill = fills[place]
            row = open_rows[fill].pop()
            if not open_rows[fill]:
                del open_rows[fill], fills[place]
        rows[i], offsets[i] = row, fill
        count[row] += 1
        if count[row] < max_segments:
            fill += lengths[i]
            if fill not in open_rows:
                bisect.insort(fills, fill)
                open_rows[fill] = []
            open_rows[fill].append(row)
    return rows, offsets


def pack_sides(inputs, targets, room, max_segments=0):
    """The row of each segment, of rows whose inputs and targets have their own room, filled one by
    one.

    A row begins with the largest segment that is left, by the larger share of a side that it takes.
    Then the side of which a larger share is to be filled gets its largest segment that fits; of
    equal ones that with the least of the other side, then the first. The tighter side, of which all
    segments need more, is to be filled whole, the other as far as they need it then.
    """
    parts, needed = (inputs, targets), (sum(inputs), sum(targets))
    wanted = [Fraction(1), Fraction(1)]
    tighter = 0 if needed[0] * room[1] >= needed[1] * room[0] else 1
    if inputs:
        other = 1 - tighter
        wanted[other] = Fraction(needed[other] * room[tighter] // needed[tighter], room[other])
    # of a side → (of the other, segment), the best last
    by_part: list[dict[int, list[tuple[int, int]]]] = [{}, {}]
    for side in (0, 1):
        for i in sorted(range(len(inputs)), key=lambda i: (-parts[1 - side][i], -i)):
            by_part[side].setdefault(parts[side][i], []).append((parts[1 - side][i], i))
    values = [sorted(found) for found in by_part]
    left = sorted(
        range(len(inputs)), key=lambda i: (max(inputs[i] * room[1], targets[i] * room[0]), -i)
    )
    rows: dict[int, int] = {}
    row, count, free = -1, 0, list(room)
    while len(rows) < len(inputs):
        chosen = None
        if row >= 0 and count < (max_segments or FORMAT_LIMIT):
            shares = [Fraction(free[side], room[side]) - 1 + wanted[side] for side in (0, 1)]
            side = 0 if shares[0] > shares[1] else 1
            for k in range(bisect.bisect_right(values[side], free[side]) - 1, -1, -1):
                found = by_part[side][values[side][k]]
                while found and found[-1][1] in rows:
                    found.pop()
                if found and found[-1][0] <= free[1 - side]:
                    chosen = found[-1][1]
                    break
        if chosen is None:
            while left[-1] in rows:
                left.pop()
            chosen, row, count, free = left[-1], row + 1, 0, list(room)
        rows[chosen], count = row, count + 1
        free = [free[side] - parts[side][chosen] for side in (0, 1)]
    return [rows[i] for i in range(len(inputs))]


def first_fit(lengths, capacity, max_segments):
    """In the given order; into the lowest row that holds it. Groups of rows are passed over by the
    most room in them."""
    rows, offsets, count = [], [], []
    fill: list[int] = []
    most_room: list[int] = []
    for length in lengths:
        group = next((g for g, room in enumerate(most_room) if room >= length), None)
        if group is None:
            row = len(fill)
            group = row // GROUP_ROWS
            fill.append(0)
            count.append(0)
            most_room += [0] * (group == len(most_room))
        else:
            row = group * GROUP_ROWS
            while count[row] == max_segments or fill[row] + length > capacity:
                row += 1
        rows.append(row)
        offsets.append(fill[row])
        fill[row] += length
        count[row] += 1
        members = range(group * GROUP_ROWS, min((group + 1) * GROUP_ROWS, len(fill)))
        most_room[group] = max(
            (capacity - fill[r] for r in members if count[r] < max_segments), default=0
        )
    return rows, offsets


def next_fit(lengths, capacity, max_segments):
    """In the given order; into the last row or a new one."""
    rows, offsets = [], []
    row, fill, count = -1, capacity, 0
    for length in lengths:
        if fill + length > capacity or count == max_segments:
            row, fill, count = row + 1, 0, 0
        rows.append(row)
        offsets.append(fill)
        fill += length
        count += 1
    return rows, offsets
