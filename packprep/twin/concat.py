"""`concat`: documents laid end to end and cut where rows end, one segment at a time.

`recipe` is cutting.py's dict, with `max_segments` (0: 65535) and `keys`: for each document a function
first content token → 64-bit segment key. `allowed_of`, where it is there, has each document's `allowed`.
"""

from packprep.twin import cutting, objectives


def lay(sizes, recipe):
    """[(document, start, n, task, bos, eos, row, offset)], flags as 0 or 1. Task len(tasks) is too_short."""
    segments = []
    row, used, in_row = 0, 0, 0
    for document, size in enumerate(sizes):
        if "allowed_of" in recipe:
            recipe = {**recipe, "allowed": recipe["allowed_of"][document]}
        start = 0
        while start < size:
            found = None
            if recipe["seq_length"] - used >= 2 and in_row < (recipe["max_segments"] or 65535):
                found = piece(size, start, recipe["seq_length"] - used, recipe, recipe["keys"][document])
            if found is None:
                row, used, in_row = row + 1, 0, 0
                continue
            n, task, bos, eos = found
            segments.append((document, start, n, task, int(bos), int(eos), row, used))
            used += slots(recipe, task, n, bos, eos)
            in_row += 1
            start += n
    return segments


def piece(size, start, room, recipe, key):
    """(n, task, bos, eos) of the segment that begins at `start` and fits into `room` slots; None if there is none.

    All that is left if it fits with its eos; else as much as fits, but for at least one token that eos goes with.
    Fewer than three tokens of a task are too_short's.
    """
    too_short = len(recipe["tasks"])
    rest = size - start
    bos = start == 0 and recipe["prepend_bos"]
    drawn = too_short if rest < 3 else cutting.draw_task(key(start), recipe["tasks"], recipe["allowed"])
    for task in (drawn, too_short):
        most = recipe["max_tokens"] or recipe["seq_length"]
        eos = recipe["append_eos"]
        if rest <= most and slots(recipe, task, rest, bos, eos) <= room:
            n = rest
        else:
            eos = False
            top = min(rest - 1, most, room)  # a segment has at least the slots of its tokens
            n = next((n for n in range(top, 0, -1) if slots(recipe, task, n, bos, eos) <= room), 0)
        if n >= 3 or (task == too_short and n >= 1):
            return n, task, bos, eos
    return None


def slots(recipe, task, n, bos, eos):
    if task == len(recipe["tasks"]):
        facts = {"bos": 1 if bos else None, "eos": 1 if eos else None}
        return objectives.law("too_short", n, facts)
    facts = cutting.segment_facts(recipe["tasks"][task], 1 if bos else None, 1 if eos else None)
    return objectives.law(facts["objective"], n, facts)
