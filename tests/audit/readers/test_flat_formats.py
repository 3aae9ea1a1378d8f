"""Megatron's pairs, NumPy arrays and nanoGPT's files: sound ones have no finding, and each fault
that the format can contain is named."""

import copy
from collections.abc import Callable

import numpy as np
import pytest

from packprep.audit.report import Request, describe_audit
from packprep.audit.rows import Choices
from packprep.errors import SourceError
from tests.audit import faults_made as made
from tests.tokens_made import write_megatron, write_stream

IDS = {
    "eos": made.EOS,
    "bos": made.BOS,
    "pad": made.PAD,
    "unk": made.UNK,
    "vocab_size": made.VOCAB_SIZE,
}


def described(path, **options):
    return describe_audit(
        Request(path, special_ids=IDS, choices=Choices(batch_tokens=1 << 10), **options)
    )


def found(path) -> set[str]:
    checks = described(path)["checks"]
    return {check["kind"] for check in checks if check["state"] == "finding"}


def documents() -> list[list[int]]:
    return [list(one.ids) for row in made.packed() for one in row]


def _changed(d: int, place: int, id: int) -> Callable[[list[list[int]]], None]:
    def change(of: list[list[int]]) -> None:
        of[d][place] = id

    return change


def _padded(of: list[list[int]]) -> None:
    for one in of:
        one[-1:-1] = [made.PAD] * 10


OF_STREAMS = {
    "duplicate_documents": lambda of: of.extend(of[:20]),
    "empty_documents": lambda of: of[5:5] + [of.insert(9, [made.EOS]) for _ in range(9)],
    "two_bos": _changed(7, 1, made.BOS),
    "beyond_vocabulary": _changed(7, 9, made.VOCAB_SIZE),
    "unknown_tokens": _changed(7, 9, made.UNK),
    "padding": _padded,
}
OF_DOCUMENTS = {
    **OF_STREAMS,
    "no_eos": _changed(7, -1, made.FIRST),
    "inner_eos": _changed(7, 9, made.EOS),
}


def _megatron(path, of):
    """The pair as Megatron's own builder writes it."""
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core")
    builder = indexed.IndexedDatasetBuilder(str(path), dtype=np.int32)
    for ids in of:
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(path.with_suffix(".idx")))
    return path.with_suffix("")


def _npy(path, of):
    np.save(path.with_suffix(".npy"), np.concatenate(of).astype(np.int32))
    return path.with_suffix(".npy")


WRITERS = {
    "megatron": (_megatron, OF_DOCUMENTS),
    "pairs": (lambda path, of: write_megatron(path, of, "<i4"), OF_DOCUMENTS),
    "nanogpt": (lambda path, of: write_stream(path, sum(of, [])), OF_STREAMS),
    "npy": (_npy, OF_STREAMS),
}


def test_each_fault_that_a_stream_can_contain_is_named(tmp_path):
    for name in ("pairs", "nanogpt", "npy"):
        _check_format(name, tmp_path / name)


@pytest.mark.long
def test_each_fault_in_what_megatron_itself_wrote_is_named(tmp_path):
    _check_format("megatron", tmp_path / "megatron")  # The import takes 15 s.


def _check_format(name, folder):
    folder.mkdir()
    write, faults = WRITERS[name]
    path = write(folder / "clean.bin", documents())
    clean = described(path)
    assert found(path) == set() and clean["documents"] == len(documents())
    assert clean["tokens"] == sum(map(len, documents())) and clean["rows"] is None
    checked = {check["kind"] for check in clean["checks"] if check["state"] != "not_checked"}
    assert checked == set(faults)  # Every other kind has a reason why it is not checked.
    for kind, plant in faults.items():
        of = copy.deepcopy(documents())
        plant(of)
        assert found(write(folder / f"{kind}.bin", of)) == {kind}, kind


def test_rows_of_a_two_dimensional_array_are_checked_by_row(tmp_path):
    packed = made.clean()
    np.save(tmp_path / "a.npy", packed.ids.astype(np.uint16))
    np.save(tmp_path / "b.npy", made.columns(made.packed(seed=1)).ids.astype(np.uint16))
    clean = described(tmp_path)
    assert found(tmp_path) == set() and clean["rows"] == 120 and clean["documents"] == 360
    for kind in ("padding", "duplicate_rows", "two_bos", "unknown_tokens", "beyond_vocabulary"):
        np.save(tmp_path / f"{kind}.npy", made.FAULTS[kind]().ids.astype(np.uint16))
        expected = {kind} | made.IMPLIED.get(kind, set())
        assert found(tmp_path / f"{kind}.npy") == expected


def test_eos_before_each_document_begins_it(tmp_path):
    of = [[made.EOS, *one[1:-1]] for one in documents()]
    path = write_stream(tmp_path / "train.bin", sum(of, []), head="gpt-2")
    assert found(path) == set()
    assert described(path)["documents"] == len(of)


@pytest.mark.long
def test_counts_and_places_do_not_depend_on_the_borders_of_batches(tmp_path):
    """Random streams, with pad, bos and eos of one id or of several ids."""
    path = tmp_path / "a.npy"
    for seed in range(24):
        random = np.random.default_rng(seed)
        ids = random.integers(0, (10, 4, 40)[seed % 3], 300)
        ids[0] = seed % 4
        np.save(path, ids.astype(np.uint16))
        for eos, bos, pad in ((1, 2, 0), (1, 1, 1), (1, 2, 1), (1, 1, 0)):
            special_ids = {"eos": eos, "bos": bos, "pad": pad, "vocab_size": 9}
            audits = [
                describe_audit(Request(path, special_ids=special_ids, choices=Choices(None, n)))
                for n in (5, 17, 64, 1000)
            ]
            assert all(audit == audits[-1] for audit in audits), (seed, special_ids)


def test_data_of_no_known_format_are_refused_with_the_formats(tmp_path):
    (tmp_path / "x.bmp").write_bytes(b"BM")
    with pytest.raises(SourceError, match="hint: audit reads .*Megatron.*nanoGPT"):
        described(tmp_path / "x.bmp")
    with pytest.raises(SourceError, match="no such file or directory"):
        described(tmp_path / "absent")


def test_data_that_cannot_be_audited_are_refused_without_words_about_recipes(tmp_path):
    (tmp_path / "empty.bin").write_bytes(b"")
    np.save(tmp_path / "none.npy", np.zeros((0, 8), np.uint16))
    np.save(tmp_path / "columns.npy", np.asfortranarray(np.ones((4, 8), np.uint16)))
    np.save(tmp_path / "cut.npy", np.ones(99, np.uint16))
    np.save(tmp_path / "floats.npy", np.ones(99))
    np.save(tmp_path / "cube.npy", np.ones((2, 3, 4), np.uint16))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-8])
    (tmp_path / "pair.bin").write_bytes(b"ab")
    (tmp_path / "pair.idx").write_bytes(b"x")
    for name, words in (
        ("empty.bin", "no tokens"),
        ("none.npy", "no tokens"),
        ("columns.npy", "column by column"),
        ("cut.npy", "damaged"),
        ("floats.npy", "an array of float64"),
        ("cube.npy", r"the shape \(2, 3, 4\)"),
        ("pair", "damaged"),
    ):
        with pytest.raises(SourceError, match=words) as caught:
            described(tmp_path / name)
        assert "hint: " in str(caught.value) and "recipe" not in str(caught.value)
