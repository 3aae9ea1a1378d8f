"""Every length of an objective at once: all documents of 1 … n tokens, cut, measured by the law,
and rendered apart."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packprep.building.render import Texts, render_rows
from packprep.building.segments import FORMAT_MAX_SEGMENTS, cut
from packprep.dataset.segments import Segments
from packprep.documents.reading import Documents
from packprep.objectives.objective import Bodies, BodySlots, Task
from packprep.recipe import Recipe
from tests import made
from tests.twin import cutting, objectives

# slots between rendered segments: whatever is written there was written beyond a segment's end
GAP = 3


class Rendered(NamedTuple):
    documents: Documents
    segments: Segments
    slots: np.ndarray  # int64[m], by the length law
    at: np.ndarray  # int64[m], first slot in the flat rows
    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    prefix: np.ndarray


def render_all(recipe: Recipe, tasks: Sequence[Task], documents: Documents) -> Rendered:
    """The documents' segments, GAP slots apart, in rows of as many as a row can number."""
    segments, _ = cut(recipe, tasks, documents)
    slots = segments.slots
    row = np.arange(len(slots)) // FORMAT_MAX_SEGMENTS
    begin = GAP + np.cumsum(slots + GAP) - (slots + GAP)
    first_slot = begin - begin[np.searchsorted(row, row)] + GAP
    length = int((first_slot + slots).max(initial=0)) + GAP
    table = segments.replace(row=row, first_slot=first_slot)
    with_labels = [*tasks, made.in_place_task(tasks[0].ids)]
    bodies = documents.offsets[segments.document] + segments.start
    done, rendered = render_rows(with_labels, table, Texts(bodies, documents.ids), length)
    slots_of = [done[name].reshape(-1) for name in ("tokens", "labels", "segment_ids", "loss_mask")]
    return Rendered(documents, table, slots, row * length + first_slot, *slots_of, rendered.prefix)


def check_lengths(rendered: Rendered) -> None:
    """The rendered length is the law's: no slot inside a segment was left out, none outside was
    written. The documents hold no pad."""
    edges = np.zeros(len(rendered.tokens) + 1, np.int64)
    edges[rendered.at] += 1
    edges[rendered.at + rendered.slots] -= 1
    inside = np.cumsum(edges)[:-1] == 1
    assert np.array_equal(rendered.tokens != made.PAD, inside)
    assert np.array_equal(rendered.segment_ids > 0, inside)
    assert not rendered.loss_mask[~inside].any() and (rendered.labels[~inside] == made.PAD).all()


def check_restored(tasks: Sequence[Task], rendered: Rendered) -> None:
    """`restore` gives back the documents' tokens, and finds every body in the form that its header
    says."""
    segments = rendered.segments
    begin = rendered.documents.offsets[segments.document] + segments.start
    out = np.full_like(rendered.documents.ids, 9999)
    for t, task in enumerate(tasks):
        own = np.flatnonzero(segments.task == t)
        body = rendered.at[own] + segments.bos[own] + task.mode
        bodies = Bodies(*(column[own] for column in segments.bodies()[:4]))
        columns = BodySlots(begin[own], bodies, body)
        assert task.objective.restore(task, columns, rendered.tokens, out).all()
    assert np.array_equal(out, rendered.documents.ids)


def check_law(recipe: Recipe, tasks: Sequence[Task], rendered: Rendered) -> None:
    """The law gives what the twin's gives, for every segment; and no segment takes more than its
    row."""
    twins = [made.twin_task(task) for task in tasks]
    segments = rendered.segments
    expected = []
    names = ("tokens", "task", "bos", "eos", "key")
    columns = [getattr(segments, name).tolist() for name in names]
    for n, t, bos, eos, key in zip(*columns, strict=True):
        facts = cutting.segment_facts(
            twins[t], made.BOS if bos else None, made.EOS if eos else None, key, made.PAD
        )
        expected.append(objectives.law(twins[t]["objective"], n, facts))
    assert rendered.slots.tolist() == expected
    assert rendered.slots.max(initial=0) <= recipe.seq_length


def check_segments(tasks: Sequence[Task], rendered: Rendered, chosen: Sequence[int]) -> None:
    """Slots, prefix, loss and labels of the chosen segments are the twin's."""
    twins = [made.twin_task(task) for task in tasks]
    segments, documents = rendered.segments, rendered.documents
    for i in chosen:
        begin = int(documents.offsets[segments.document[i]] + segments.start[i])
        tokens = documents.ids[begin : begin + int(segments.tokens[i])].tolist()
        bos, eos = made.BOS if segments.bos[i] else None, made.EOS if segments.eos[i] else None
        facts = cutting.segment_facts(
            twins[segments.task[i]], bos, eos, int(segments.key[i]), made.PAD
        )
        slots, prefix, loss, labels = objectives.segment(tokens, facts)
        place = slice(rendered.at[i], rendered.at[i] + rendered.slots[i])
        assert rendered.tokens[place].tolist() == slots
        assert rendered.loss_mask[place].tolist() == loss
        assert rendered.labels[place].tolist() == labels
        assert rendered.prefix[i] == prefix
        assert objectives.content(slots, prefix, facts) == tokens
