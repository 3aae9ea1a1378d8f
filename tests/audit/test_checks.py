import numpy as np

from packprep.audit import checks
from packprep.audit.checks import Audit
from packprep.audit.documents import SpecialIds
from packprep.audit.kinds import KINDS
from packprep.audit.rows import NEXT, SAME, PackedData, PackedRows
from tests.audit import faults_made as made

SPECIAL = SpecialIds(made.EOS, made.BOS, made.PAD, made.UNK, made.VOCAB_SIZE)


def data_of(packed: made.Packed, at: str, rows_at_once: int = 7) -> PackedData:
    """The columns as a reader yields them."""
    labels = packed.labels if at == SAME else packed.next_labels

    def batches():
        for first in range(0, len(packed.ids), rows_at_once):
            own = slice(first, first + rows_at_once)
            ids = packed.ids[own]
            yield PackedRows(
                ids.reshape(-1),
                np.arange(len(ids) + 1) * made.ROW_LENGTH,
                labels=labels[own].reshape(-1),
                positions=packed.positions[own].reshape(-1),
                segments=packed.segments[own].reshape(-1),
            )

    columns = {name: name for name in ("labels", "positions", "segments")}
    return PackedData("made", batches, columns)


def audited(data: PackedData, special: SpecialIds = SPECIAL, **options) -> Audit:
    audit = Audit(data, special, {}, **options)
    audit.add_all()
    audit.finish()
    return audit


def found(audit: Audit) -> set[str]:
    """The kinds with more findings than sound data have."""
    wholes = {"tokens": audit.tokens, "documents": audit.documents, "rows": audit.rows}
    return {
        kind
        for kind, tally in audit.tallies.items()
        if tally.count and tally.count > KINDS[kind].most * wholes[KINDS[kind].unit]
    }


def test_each_planted_fault_is_named_and_clean_rows_have_none():
    assert len(made.FAULTS) >= 15
    for at in (SAME, NEXT):
        audit = audited(data_of(made.clean(), at))
        assert found(audit) == set() and audit.labels_at == at and not audit.unchecked
        for kind, planted in made.FAULTS.items():
            audit = audited(data_of(planted(), at))
            assert found(audit) == {kind} | made.IMPLIED.get(kind, set()), kind
            assert audit.tallies[kind].places, kind


def test_a_template_s_own_end_may_replace_eos():
    packed = made.packed()
    for row in packed:
        for document in row:
            document.ids[-2:] = 20, 21
    audit = Audit(data_of(made.columns(packed), SAME), SPECIAL, {})
    audit.end, audit.after_end = 20, 1
    audit.add_all()
    audit.finish()
    assert not audit.tallies["no_eos"].count and not audit.eos_tokens


def test_a_long_text_without_eos_is_divided_so_that_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(checks, "MOST_UNFINISHED", 100)
    ids = np.full(300, made.FIRST, np.uint16)
    ids[280] = made.EOS

    def batches():
        for first in range(0, 300, 50):
            own = ids[first : first + 50]
            yield PackedRows(own, np.array([0, 50]), continued=first > 0)

    audit = audited(PackedData("made", batches, {}, has_rows=False))
    assert (audit.tokens, audit.divided, audit.documents) == (300, 2, 4)
