"""Packed tables of trainers: sound ones have no finding, and each fault is named."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packprep.audit.readers import open_packed
from packprep.audit.rows import NEXT, SAME, Choices
from packprep.errors import SourceError
from tests.audit import faults_made as made
from tests.audit.readers.layouts_made import LAYOUTS, check_faults, described, found, trl


def write_parquet(path, columns):
    """A Parquet file with several row groups."""
    pq.write_table(pa.table(columns), path, row_group_size=17)
    return path


def write_folder(path, columns):
    """A split as `save_to_disk` of datasets writes it: streams of record batches, and their list."""
    path.mkdir()
    table = pa.table(columns)
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    half = len(table) // 2
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pa.ipc.new_stream(path / name, table.schema) as writer:
            writer.write_table(part, max_chunksize=11)
    files = [{"filename": name} for name in names]
    (path / "state.json").write_text(json.dumps({"_data_files": files}))
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_fault_that_a_layout_can_contain_is_named(name, tmp_path):
    check_faults(lambda kind, columns: write_folder(tmp_path / kind, columns), name)


@pytest.mark.long
def test_parquet_and_arrow_give_the_same_rows(tmp_path):
    for name, (layout, _) in LAYOUTS.items():
        columns = layout(made.clean())
        paths = (
            write_parquet(tmp_path / f"{name}.parquet", columns),
            write_folder(tmp_path / name, columns),
        )
        opened = [open_packed(path, Choices(batch_tokens=500)) for path in paths]
        assert opened[0]._replace(format="", batches=None) == opened[1]._replace(
            format="", batches=None
        )
        for column in ("ids", *opened[0].columns):
            flat = [
                np.concatenate(
                    [
                        getattr(rows, column) + (base if column == "document_starts" else 0)
                        for rows, base in _with_bases(data)
                    ]
                )
                for data in opened
            ]
            np.testing.assert_array_equal(*flat, err_msg=f"{name}: {column}")


def test_a_suffix_may_have_capital_letters(tmp_path):
    columns = trl(made.clean())
    once, twice = (
        sum(len(rows.ids) for rows in open_packed(path, Choices()).batches())
        for path in (
            write_parquet(tmp_path / "A.PARQUET", columns),
            write_parquet(tmp_path / "b.parquet", columns).parent,
        )
    )
    assert twice == 2 * once > 0


def _with_bases(data):
    base = 0
    for rows in data.batches():
        yield rows, base
        base += len(rows.ids)


def test_columns_define_boundaries_labels_and_rows(tmp_path):
    expected = {
        "trl": ("seq_lengths", SAME, True),
        "wrapped": (None, SAME, True),
        "llamafactory": ("attention_mask that changes", SAME, True),
        "llamafactory_plain": ("position_ids that restart", SAME, True),
        "axolotl": ("position_ids that restart", SAME, True),
        "axolotl_documents": ("each row is a document", SAME, False),
        "axolotl_pretraining": ("attention_mask that changes", SAME, True),
        "bridge": ("seq_start_id", NEXT, True),
    }
    for name, (layout, _) in LAYOUTS.items():
        path = write_parquet(tmp_path / f"{name}.parquet", layout(made.clean()))
        data = open_packed(path, Choices())
        seen = data.columns.get("document_starts"), data.labels_at, data.has_rows
        assert seen == expected[name], name


def test_sound_rows_of_any_layout_have_no_finding(tmp_path):
    packed, length = made.clean(), made.ROW_LENGTH
    stream = packed.ids[packed.ids != made.PAD]
    parts = np.split(stream, np.arange(length, len(stream), length))
    shorter = [*parts[:20], parts[20][:50], *parts[21:40], parts[40][:70], *parts[41:]]
    left = [np.roll(row, (row == made.PAD).sum()) for row in packed.ids]
    # A batch of `described` has 8 rows, and the first 10 rows have one document each.
    random = np.random.default_rng(9)
    bodies = random.integers(made.FIRST, made.VOCAB_SIZE, (10, length - 2)).tolist()
    whole = [[made.Document([made.BOS, *body, made.EOS], [True] * length)] for body in bodies]
    long_first = made.columns(whole + packed.rows)
    row_positions = [np.arange(length)] * 9
    for name, columns, origin in (
        ("shorter parts", {"input_ids": shorter}, "eos"),
        ("a single row", {"input_ids": [stream]}, "eos"),
        ("long rows", {"input_ids": [stream[:3000], stream[3000:6000], stream[6000:]]}, "eos"),
        ("row positions", {"input_ids": parts[:9], "position_ids": row_positions}, "eos"),
        ("padding first", {"input_ids": left}, "eos"),
        (
            "numbers",
            {"input_ids": long_first.ids, "attention_mask": long_first.segments},
            "attention_mask",
        ),
        (
            "positions",
            {"input_ids": long_first.ids, "position_ids": long_first.positions},
            "position_ids that restart",
        ),
    ):
        path = tmp_path / f"{name}.parquet"
        write_parquet(path, {key: [list(row) for row in of] for key, of in columns.items()})
        audit = described(path)
        findings = {check["kind"] for check in audit["checks"] if check["state"] == "finding"}
        assert (findings, audit["documents_from"]) == (set(), origin), name


def test_masks_of_completions_and_assistants_are_joined(tmp_path):
    columns = {
        "input_ids": [[1, 11, 12, 2], [1, 13, 2]],
        "seq_lengths": [[4], [3]],
        "completion_mask": [[0, 1, 1, 1], [0, 0, 1]],
        "assistant_masks": [[1, 1, 0, 1], [1, 1, 1]],
    }
    data = open_packed(write_parquet(tmp_path / "a.parquet", columns), Choices())
    (rows,) = data.batches()
    assert rows.trained.tolist() == [False, True, False, True, False, False, True]
    assert data.labels_at == SAME


def test_a_folder_of_one_split_is_read_and_several_splits_are_refused(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    write_folder(folder / "train", trl(made.clean()))
    assert found(folder) == set() and described(folder)["rows"] == 60
    write_folder(folder / "test", trl(made.clean()))
    with pytest.raises(SourceError, match="several splits: test, train\nhint: audit "):
        described(folder)


def test_columns_that_contradict_each_other_are_refused_with_their_row(tmp_path):
    sound = {"input_ids": [[1, 11, 2], [1, 12, 13, 2]]}
    for i, (columns, message) in enumerate(
        (
            ({"labels": [[1, 11, 2], [1, 12, 2]]}, "row 1: labels has 3 entries for 4 tokens"),
            ({"labels": [[1, 11, 2], None]}, "row 1: labels is null or contains a null"),
            ({"labels": [[1, 11, 2], [1, 2, 3, None]]}, "row 1: labels is null or contains a null"),
            ({"seq_lengths": [[3], [3, 2]]}, "row 1: seq_lengths add up to 5, but the row has 4"),
            ({"seq_start_id": [[0], [0, 4]]}, "row 1: seq_start_id 4 is not a start"),
            ({"seq_start_id": [[0], [1]]}, "row 1: seq_start_id 1 is not a start"),
        )
    ):
        path = write_parquet(tmp_path / f"{i}.parquet", sound | columns)
        with pytest.raises(SourceError, match=message):
            described(path)


def test_tables_without_ids_are_refused_with_their_columns(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"messages": ["a"], "lengths": [[3]]})
    with pytest.raises(SourceError, match="columns are 'messages', 'lengths'\nhint: give .*token"):
        described(path)
    path = write_parquet(tmp_path / "b.parquet", {"input_ids": ["1 2 3"]})
    with pytest.raises(SourceError, match="no column 'input_ids' or 'tokens' with lists"):
        described(path)


def test_columns_that_are_not_read_are_named(tmp_path):
    columns = trl(made.clean()) | {
        "source": ["web"] * 60,
        "position_ids": [[[0, 1, 2]] for _ in range(60)],
    }
    data = open_packed(write_parquet(tmp_path / "a.parquet", columns), Choices())
    assert "Columns that were not read: source." in data.notes
    assert any("position_ids was not read, because its type is list<" in one for one in data.notes)
