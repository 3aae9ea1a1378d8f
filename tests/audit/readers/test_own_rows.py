"""packprep's own dataset: sound rows have no finding, and a fault that is written into a shard is
named.

A shard stores neither labels nor positions, so these cannot be wrong in it, and no label crosses a
boundary.
"""

import shutil

import numpy as np
import pytest

from packprep.audit.report import Request, describe_audit
from packprep.audit.rows import Choices
from packprep.exporting import hf
from packprep.exporting.export import export_dataset
from tests import made
from tests.tokens_made import BOS, EOS
from tests.verification.damage import places_of, resigned

ROW = 256


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Rows of documents that were not cut, with bos and eos."""
    folder = tmp_path_factory.mktemp("own")
    random = np.random.default_rng(0)
    texts = [
        bytes(random.integers(97, 123, int(n)).tolist()).decode()
        for n in random.integers(30, 100, 400)
    ]
    made.write_lines(folder / "in.jsonl", texts)
    recipe = made.table(
        "in.jsonl",
        seq_length=ROW,
        tasks=[{"preset": "causal"}],
        documents={"prepend_bos": True},
    )
    made.build(recipe, folder, folder / "out")
    return folder


def found(path, **options) -> set[str]:
    described = describe_audit(Request(path, choices=Choices(batch_tokens=1 << 11), **options))
    return {check["kind"] for check in described["checks"] if check["state"] == "finding"}


def _inner_eos(arrays, row, begin, end):
    arrays["tokens"][row[3], begin[3] + 9] = EOS


def _two_bos(arrays, row, begin, end):
    arrays["tokens"][row[3], begin[3] + 1] = BOS


def _no_eos(arrays, row, begin, end):
    d = next(
        d for d in range(len(row)) if end[d] < ROW and d + 1 < len(row) and row[d + 1] == row[d]
    )
    arrays["tokens"][row[d], end[d] - 1] = 97


def _beyond(arrays, row, begin, end):
    arrays["tokens"][row[3], begin[3] + 9] = 5000


def _unknown(arrays, row, begin, end):
    arrays["tokens"][row[3], begin[3] + 9] = 3


def _trained_padding(arrays, row, begin, end):
    d = int(np.flatnonzero((end < ROW) & (np.append(row[1:], -1) != row))[0])
    arrays["loss_mask"][row[d], end[d] :] = 1


def _untrained_document(arrays, row, begin, end):
    arrays["loss_mask"][row[3], begin[3] : end[3]] = 0


def _untrained_row(arrays, row, begin, end):
    arrays["loss_mask"][1] = 0


def _same_rows(arrays, row, begin, end):
    counts = np.diff(arrays["row_offsets"])
    like = np.flatnonzero(counts == counts[0])[:4]
    for r in like[1:]:
        own, first = (
            slice(arrays["row_offsets"][i] + i, arrays["row_offsets"][i + 1] + i + 1)
            for i in (r, 0)
        )
        arrays["cu_seqlens"][own] = arrays["cu_seqlens"][first]
        for name in ("tokens", "segment_ids", "loss_mask"):
            arrays[name][r] = arrays[name][0]


PLANTED = {
    "inner_eos": _inner_eos,
    "two_bos": _two_bos,
    "no_eos": _no_eos,
    "beyond_vocabulary": _beyond,
    "unknown_tokens": _unknown,
    "trained_padding": _trained_padding,
    "untrained_documents": _untrained_document,
    "untrained_rows": _untrained_row,
    "duplicate_rows": _same_rows,
}
ENTAILED = {
    "untrained_rows": {"untrained_documents"},
    "duplicate_rows": {"duplicate_documents"},
}


def test_faults_in_a_shard_are_named_and_a_sound_dataset_has_none(dataset, tmp_path):
    ids = {"unk": 3}
    assert found(dataset / "out", special_ids=ids) == set()
    for kind, plant in PLANTED.items():
        copy = shutil.copytree(dataset / "out", tmp_path / kind)
        with resigned(copy) as arrays:
            plant(arrays, *places_of(arrays))
        assert found(copy, special_ids=ids) == {kind} | ENTAILED.get(kind, set()), kind


def test_rows_with_one_document_each_are_mostly_padding_and_a_source_shows_lost_documents(dataset):
    made.write_lines(dataset / "more.jsonl", ["x" * 40, "y" * 50])
    lines = (dataset / "in.jsonl").read_text()
    (dataset / "cut.jsonl").write_text(lines.replace('"}', ' and more"}', 3))
    recipe = made.table(
        "in.jsonl",
        seq_length=ROW,
        tasks=[{"preset": "causal"}],
        packing={"max_segments_per_row": 1},
    )
    made.build(recipe, dataset, dataset / "alone")
    whole = {"tokenizer": "bytes"}
    assert found(dataset / "alone", source=str(dataset / "in.jsonl"), **whole) == {"padding"}
    assert found(dataset / "out", source=str(dataset / "more.jsonl"), **whole) == {
        "missing_documents"
    }
    assert found(dataset / "out", source=str(dataset / "cut.jsonl"), **whole) == {"cut_documents"}


@pytest.mark.long
def test_exports_have_the_documents_of_the_dataset_and_no_finding(dataset, tmp_path):
    own = describe_audit(Request(dataset / "out"))
    forms = [("mds", {}), ("parquet", {"columns": "nemo"}), ("parquet", {"columns": "trl"})]
    forms += [("parquet", {"columns": "full"})] + [("hf", {"trainer": name}) for name in hf.FORMS]
    for i, (form, options) in enumerate(forms):
        export_dataset(dataset / "out", form, tmp_path / str(i), made.Silent(), **options)
        ids = {"eos": EOS, "bos": BOS}
        report = describe_audit(Request(tmp_path / str(i), special_ids=ids))
        assert not [one for one in report["checks"] if one["state"] == "finding"], (form, options)
        assert (report["documents"], report["rows"]) == (own["documents"], own["rows"])
