"""Packed .npy files of NeMo and Megatron-Bridge: read as a stream, and never unpickled."""

import pickle

import numpy as np
import pytest

from packprep.audit.readers import open_packed, pickled_rows
from packprep.audit.rows import Choices
from packprep.errors import SourceError
from tests.audit import faults_made as made
from tests.audit.readers.layouts_made import bridge, check_faults, described


def rows_of(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def write_rows(path, columns):
    """A file as the packing of Megatron-Bridge saves it."""
    np.save(path.with_suffix(".npy"), rows_of(columns))
    return path.with_suffix(".npy")


@pytest.mark.long
def test_each_fault_that_packed_rows_can_contain_is_named(tmp_path):
    check_faults(lambda kind, columns: write_rows(tmp_path / kind, columns), "bridge")


@pytest.mark.parametrize("protocol", (4, 2, 3, 5))
def test_rows_are_those_that_numpy_unpickles(protocol, tmp_path, monkeypatch):
    rng = np.random.default_rng(protocol)
    rows = [
        {
            "input_ids": rng.integers(-high, high, n).tolist(),
            "loss_mask": [mask(rng.random() < 0.5) for _ in range(n)],
            "seq_start_id": [0, n // 2],
        }
        for n, high, mask in (
            (9, 200, bool),
            (2500, 60_000, float),
            (4000, 1 << 31, int),
            (70_000, 1 << 17, lambda one: -0.0 if one else 1.0),
        )
    ]
    path = tmp_path / "rows.npy"
    array = np.array(rows, object)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        pickle.dump(array, file, protocol=protocol)
    expected = np.load(path, allow_pickle=True)
    monkeypatch.setattr(pickled_rows, "_READ_BYTES", 1 << 10)
    seen = [{name: of.tolist() for name, of in row.items()} for row in pickled_rows._rows(path)]
    assert seen == expected.tolist()


def test_code_in_a_pickle_is_refused_and_does_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return print, ("ran",)

    for i, rows in enumerate(
        (
            [{"input_ids": [1, 2], "loss_mask": [1, 1], "seq_start_id": Attack()}],
            [{"input_ids": Attack()}],
            [{"input_ids": [[1, 2]], "loss_mask": [1], "seq_start_id": [0]}],
            [{"input_ids": [1, 2]}],
            [{"input_ids": [1.5, 2.0], "loss_mask": [1, 1], "seq_start_id": [0]}],
        )
    ):
        path = tmp_path / f"{i}.npy"
        np.save(path, np.array(rows, object))
        with pytest.raises(SourceError, match="row 0: not a packed row"):
            described(path)


def test_a_file_that_ends_too_early_is_refused(tmp_path, capsys):
    path = write_rows(tmp_path / "a", bridge(made.clean()))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match="row [0-9]+: .*it ends too early"):
        list(open_packed(path, Choices()).batches())
