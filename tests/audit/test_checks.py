import numpy as np
import pytest

from packprep.audit.checks import Audit
from packprep.audit.documents import SpecialIds
from packprep.audit.kinds import KINDS
from packprep.audit.rows import NEXT, SAME, PackedData, PackedRows
from tests.audit import faults_made as made

SPECIAL = SpecialIds(made.EOS, made.BOS, made.PAD, made.UNK, made.VOCAB_SIZE)
IDS_ALONE = {
    "duplicate_documents",
    "empty_documents",
    "no_eos",
    "inner_eos",
    "two_bos",
    "beyond_vocabulary",
    "unknown_tokens",
    "padding",
    "duplicate_rows",
}


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


@pytest.mark.every_case
@pytest.mark.parametrize("at", [SAME, NEXT])
def test_each_planted_fault_is_named_and_clean_rows_have_none(at):
    audit = audited(data_of(made.clean(), at))
    assert found(audit) == set() and audit.labels_at == at
    assert set(audit.unchecked) == set()
    assert len(made.FAULTS) >= 15
    for kind, planted in made.FAULTS.items():
        packed = planted()
        audit = audited(data_of(packed, at))
        assert found(audit) == {kind} | made.IMPLIED.get(kind, set()), kind
        assert audit.tallies[kind].places, kind
