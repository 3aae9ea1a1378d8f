import json
import pickle
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st

import packprep
from packprep.dataset import attention, loader, manifest, shard
from packprep.dataset import batches as iteration
from packprep.dataset.row import Row
from packprep.dataset.rows import SLOTS, padding_value
from packprep.errors import ArgumentError, DatasetError, StateError
from packprep.format import json_files
from tests import made as builds
from tests.dataset.synthetic import (
    PAD,
    SOURCES,
    make_dataset,
    make_shard,
    replace_in_manifest,
    slots_ahead,
    slots_of_tasks,
    tasks,
)
from tests.properties import few_and_many

VARIANTS = {
    "plain": {},
    "int32": {"token_dtype": "int32"},
    "padded": {"pad_to": 8},
    "in_place": {"in_place": True},
    "everything": {"in_place": True, "blocks": True, "trained": True, "pad_to": 4},
}


@pytest.fixture(params=VARIANTS)
def made(request, tmp_path):
    options = VARIANTS[request.param]
    shards = make_dataset(tmp_path, **options)
    return packprep.open_dataset(tmp_path), shards, options


def expected_rows(shards, options):
    """Every row worked out slot by slot from the shards' arrays."""
    table = tasks(options.get("in_place", False), options.get("blocks", False))
    rows = []
    for arrays in shards:
        for r in range(len(arrays["tokens"])):
            a, b = (int(n) for n in arrays["row_offsets"][r : r + 2])
            cu = arrays["cu_seqlens"][a + r : b + r + 1].tolist()
            physical = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"])[
                a + r : b + r + 1
            ].tolist()
            tokens, ids = arrays["tokens"][r].tolist(), arrays["segment_ids"][r].tolist()
            length = len(tokens)
            labels = [PAD] * length
            positions, weights, ends = [0] * length, [0.0] * length, [0] * length
            for s in range(b - a):
                task, begin, n = (
                    table[arrays["segment_task"][a + s]],
                    physical[s],
                    cu[s + 1] - cu[s],
                )
                for i in range(n):
                    slot = begin + i
                    assert ids[slot] == s + 1
                    block = task["attention"] == "block_diffusion"
                    positions[slot] = i - n // 2 if block and i >= n // 2 else i
                    weight = arrays["segment_loss_weight"][a + s]
                    if block and i < n // 2:
                        weight = arrays["block_loss_weight"][
                            arrays["block_offsets"][a + s] + i // 4
                        ]
                    weights[slot] = float(weight) * int(arrays["loss_mask"][r, slot])
                    ends[slot] = begin + int(arrays["segment_prefix"][a + s])
                    if task["label_alignment"] == "same_slot":
                        labels[slot] = int(arrays["labels"][r, slot])
                    elif i + 1 < n:
                        labels[slot] = tokens[slot + 1]
            rows.append(
                {
                    "tokens": tokens,
                    "labels": labels,
                    "segment_ids": ids,
                    "position_ids": positions,
                    "loss_mask": arrays["loss_mask"][r].tolist(),
                    "loss_weights": weights,
                    "prefix_ends": ends,
                    "cu": cu,
                    "physical": physical,
                    "header": {
                        k[8:]: v[a:b].tolist()
                        for k, v in arrays.items()
                        if k.startswith("segment_") and v.ndim == 1
                    },
                }
            )
    return rows


def test_rows_items_and_batches_agree_with_the_files(made):
    ds, shards, options = made
    rows = expected_rows(shards, options)
    assert len(ds) == len(rows) == 12
    batch = ds.batch(range(12), columns=loader.COLUMNS + ("loss_weights",))
    for i, expected in enumerate(rows):
        row, item = ds.row(i), ds[i]
        assert list(item) == list(loader.COLUMNS)
        for name in loader.COLUMNS:
            assert item[name].tolist() == expected[name], name
            assert getattr(row, name).tolist() == expected[name], name
            assert batch[name][i].tolist() == expected[name], name
            assert item[name].dtype == getattr(row, name).dtype == batch[name].dtype
        assert row.loss_weights.dtype == np.float32
        assert (
            row.loss_weights.tolist()
            == expected["loss_weights"]
            == batch["loss_weights"][i].tolist()
        )
        assert row.cu_seqlens.tolist() == expected["cu"]
        assert (row.cu_seqlens_padded is not None) == ("pad_to" in options)
        assert row.segments["begin"].tolist() == expected["physical"][:-1]
        for name, column in expected["header"].items():
            assert row.segments[name].tolist() == column
        assert row.n_segments == len(expected["cu"]) - 1 == len(row.segments["end"])
        assert row.n_tokens == sum(n > 0 for n in expected["segment_ids"])
        assert row.max_seqlen == max(
            (b - a for a, b in zip(expected["cu"], expected["cu"][1:], strict=False)), default=0
        )
        for s, (begin, end) in enumerate(
            zip(row.segments["begin"], row.segments["end"], strict=True)
        ):
            assert (row.segment_ids[begin:end] == s + 1).all()
        if options.get("blocks") and -1 in expected["header"]["prefix"]:
            with pytest.raises(DatasetError, match="block diffusion"):
                row.prefix_ends  # noqa: B018
        else:
            assert row.prefix_ends.tolist() == expected["prefix_ends"]


def test_fault_11_label_never_crosses_a_segment(made):
    ds, _, _ = made
    next_token = np.array([task["label_alignment"] == "next_token" for task in ds.tasks])
    for i in range(len(ds)):
        row = ds.row(i)
        last = row.segments["end"][next_token[row.segments["task"]]] - 1
        assert (row.labels[last] == PAD).all() and (row.labels[row.segment_ids == 0] == PAD).all()


def test_derived_labels_are_pad_on_padding_whatever_stands_there(tmp_path):
    ds = damaged(tmp_path, "tokens", (slice(None), -4), 77)
    for i in range(5):
        row = ds.row(i)
        assert row.segment_ids[-4] != 0 or row.tokens[-4] == 77
        assert (row.labels[row.segment_ids == 0] == PAD).all()


def test_a_row_is_a_read_only_view_of_the_map(tmp_path):
    make_dataset(tmp_path, in_place=True)
    ds = packprep.open_dataset(tmp_path)
    row = next(row for row in map(ds.row, range(12)) if row.n_segments > 1)
    arrays = row._shard.arrays
    for name in ("tokens", "labels", "segment_ids", "loss_mask", "cu_seqlens"):
        assert np.shares_memory(getattr(row, name), arrays[name])
    assert np.shares_memory(row.segments["key"], arrays["segment_key"])
    for array in (row.tokens, row.position_ids, row.loss_weights, row.segments["end"]):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_row_lists_each_of_its_columns_and_declares_them_for_type_checkers(tmp_path, epoch):
    builds.write_lines(tmp_path / "a.jsonl", builds.texts(5))
    builds.build(builds.table("a.jsonl"), tmp_path, tmp_path / "out")
    row = packprep.open_dataset(tmp_path / "out").row(0, epoch=epoch)
    assert dir(row) == sorted(dir(row)) and {*SLOTS, "cu_seqlens", "segments"} <= set(dir(row))
    assert SLOTS.keys() <= Row.__annotations__.keys()
    assert Row.__annotations__.keys() <= {*SLOTS, "dataset", "index", "_opened", "_row"}
    with pytest.raises(AttributeError, match="a Row has no 'lables'") as refused:
        row.lables  # noqa: B018
    assert (refused.value.name, refused.value.obj) == ("lables", row)


def test_completion_in_a_notebook_shows_only_public_names_and_reprs_say_what_they_are(tmp_path):
    make_dataset(tmp_path, (4,))
    ds = packprep.open_dataset(tmp_path)
    mixture = packprep.open_dataset([tmp_path, tmp_path], shares=[1, 1])
    batches = mixture.batches(2, rank=1, world_size=3)
    next(batches)
    shown = {}
    for each in (ds, mixture, batches, ds.row(0)):
        shown[type(each).__name__] = [name for name in dir(each) if not name.startswith("__")]
    assert not [name for names in shown.values() for name in names if name.startswith("_")]
    assert shown["Batches"] == [
        "dataset",
        "documents",
        "end",
        "load_state_dict",
        "reads_of_row",
        "state_after",
        "state_dict",
    ]
    assert {"batch", "batches", "row", "with_columns", "kinds", "tasks"} < set(shown["Dataset"])
    assert not {"facts", "costs", "what", "rows_of_samples"} & {
        *shown["Dataset"],
        *shown["Mixture"],
    }
    assert repr(ds.row(1)) == f"Row(1 of {ds!r})"
    assert repr(batches) == f"Batches({mixture!r}: batch_size 2, rank 1 of 3, at step 1)"
    assert repr(ds.batch([0, 1], columns=["media"])["media"]) == "Media(none in 2 rows)"


@pytest.mark.long
def test_mypy_knows_what_a_dataset_gives(tmp_path):
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed: pip install '.[dev]'")
    lines = {
        "ds.row(0).tokens": "numpy.ndarray",
        "ds.row(0).labels_3": "numpy.ndarray",
        "ds.row(0).segments": "dict[str, numpy.ndarray",
        "ds.row(0).n_segments": "int",
        "ds.row(0).media.refs": "list[str]",
        "ds.row(0).dataset": "packprep.dataset.loader.Dataset",
        "next(ds.batches(8))": "dict[str, Any]",
        "packprep.open_dataset([], shares=[])": "packprep.dataset.mixture.Mixture",
    }
    program = ["import packprep", "ds = packprep.open_dataset('packed')"]
    program += [f"reveal_type({line})" for line in lines]
    (tmp_path / "a.py").write_text("\n".join([*program, "ds.row(0).lables"]))
    said, _, status = mypy.run([str(tmp_path / "a.py"), "--cache-dir", str(tmp_path / "cache")])
    *known, unknown = [line for line in said.splitlines() if "a.py:" in line]
    for line, (expression, kind) in zip(known, lines.items(), strict=True):
        assert f'Revealed type is "{kind}' in line, expression
    assert '"Row" has no attribute "lables"' in unknown and status == 1


def test_items_are_writable_copies(tmp_path):
    make_dataset(tmp_path)
    ds = packprep.open_dataset(tmp_path)
    before = ds.row(0).tokens.copy()
    ds[0]["tokens"][:] = 0
    assert np.array_equal(ds.row(0).tokens, before)


def test_indices_count_from_either_end_and_end(tmp_path):
    make_dataset(tmp_path)
    ds = packprep.open_dataset(tmp_path)
    assert np.array_equal(ds[-1]["tokens"], ds[11]["tokens"]) and np.array_equal(
        ds[-12]["tokens"], ds[0]["tokens"]
    )
    assert ds.row(-1).index == 11
    assert np.array_equal(ds.batch([-1, 0])["tokens"], ds.batch([11, 0])["tokens"])
    assert np.array_equal(ds[np.int64(3)]["tokens"], ds[3]["tokens"])
    assert np.array_equal(ds.batch(np.array([3], np.uint8))["tokens"][0], ds[3]["tokens"])
    with pytest.raises(IndexError):
        ds[1 << 70]
    for index in (12, -13):
        for read in (ds.__getitem__, ds.row, lambda i: ds.batch([0, i])):
            with pytest.raises(IndexError, match=f"{index} of a dataset of 12"):
                read(index)
    assert len(list(ds)) == 12
    with pytest.raises(ArgumentError):
        ds.batch([0.5])
    with pytest.raises(ArgumentError):
        ds.batch([[0, 1]])
    with pytest.raises(TypeError):
        ds[0.5]


def test_getitems_gives_what_items_give(tmp_path):
    make_dataset(tmp_path)
    ds = packprep.open_dataset(tmp_path)
    for got, i in zip(ds.__getitems__([3, 9, 3]), [3, 9, 3], strict=True):
        assert {k: v.tolist() for k, v in got.items()} == {k: v.tolist() for k, v in ds[i].items()}


def test_a_batch_of_no_rows_has_its_shape(tmp_path):
    make_dataset(tmp_path)
    assert packprep.open_dataset(tmp_path).batch([])["labels"].shape == (0, 64)


def test_columns_dtype_and_out(made):
    ds, _, _ = made
    plain = ds.batch([3, 1, 2])
    assert plain["tokens"].dtype == ds.token_dtype and plain["position_ids"].dtype == np.int32
    cast = ds.batch([3, 1, 2], dtype=np.int64)
    assert cast["tokens"].dtype == cast["labels"].dtype == cast["position_ids"].dtype == np.int64
    assert cast["loss_mask"].dtype == np.uint8
    mapped = ds.batch([3, 1, 2], dtype={"loss_mask": np.float32})
    assert mapped["loss_mask"].dtype == np.float32 and mapped["tokens"].dtype == ds.token_dtype
    out = {name: np.full((3, 64), 99, np.int64) for name in ("labels", "position_ids")}
    written = ds.batch([3, 1, 2], out=out)
    assert written["labels"] is out["labels"] and list(written) == ["labels", "position_ids"]
    for batch in (cast, mapped, written, ds.batch([3, 1, 2], columns=["labels"])):
        for name, values in batch.items():
            assert np.array_equal(values, plain[name])
    with pytest.raises(ArgumentError, match="'colour'.*tokens"):
        ds.batch([0], columns=["colour"])
    with pytest.raises(ArgumentError, match="no array for column 'tokens'"):
        ds.batch([0, 1, 2], out=out, columns=["tokens"])
    with pytest.raises(ArgumentError, match="should have"):
        ds.batch([0], out=out)


def test_one_dtype_is_that_of_ids_and_places_alone_and_each_dtype_holds_its_column(made):
    ds, _, _ = made
    own, cast = ds._dtypes(None), ds._dtypes(np.int64)
    ahead = {f"labels_{k}" for k in range(2, 9)}
    ids = {"tokens", "labels", *ahead, "segment_ids", "position_ids", "prefix_ends"}
    assert {name for name in own if cast[name] != own[name]} == ids
    padding = {"tokens": 7, "labels": 7, "labels_3": 7, "block_starts": -1, "loss_mask_2": 0}
    assert {name: padding_value(name, 7) for name in padding} == padding
    blocks = {"block_lengths", "block_starts", "seq_idx"}
    assert all(own[name] == np.int32 for name in ("position_ids", "prefix_ends", *blocks))
    for name, holds, loses in (  # ids to 527, 64 slots, costs to 4096
        ("tokens", "u2 f2 f4", "u1 i1 ?"),
        ("labels_8", "u2 i2", "u1 i1 ?"),
        ("position_ids", "u1 i1 f2", "?"),
        ("loss_mask", "? u1 f2", ""),
        ("loss_mask_2", "? u1", ""),
        ("loss_weights", "f2 f4", "u1 i8 ?"),
        ("loss_weights_2", "f2 f8", "u1 i8 ?"),
        ("loss_weight_sum", "f2 f4", "u1 i8 ?"),
        ("row_cost", "u2 i2 f4", "u1 i1 f2 ?"),
    ):
        for dtype in holds.split():
            assert ds._dtypes({name: dtype})[name] == np.dtype(dtype)
        for dtype in loses.split():
            with pytest.raises(ArgumentError, match=f"the dtype of '{name}' is .* cannot hold"):
                ds._dtypes({name: dtype})


@pytest.mark.parametrize("ask", ["batch", "batches", "with_columns"])
def test_a_dtype_that_is_none_or_of_no_column_is_refused_where_it_is_asked_for(made, ask):
    ds, _, _ = made
    asked = {
        "batch": lambda dtype: ds.batch([0], dtype=dtype),
        "batches": lambda dtype: ds.batches(1, dtype=dtype),
        "with_columns": lambda dtype: ds.with_columns(["tokens"], dtype=dtype),
    }[ask]
    for dtype in ("float33", {"tokens": "float33"}):
        with pytest.raises(ArgumentError, match="dtype of 'tokens' is 'float33'"):
            asked(dtype)
    with pytest.raises(ArgumentError, match="unknown column 'token'"):
        asked({"token": np.int64})


def test_with_columns_gives_items_batches_and_pickles_of_these_columns_alone(tmp_path):
    make_dataset(tmp_path, in_place=True)
    ds = packprep.open_dataset(tmp_path)
    whole = ds.batch(range(12))
    some = ds.with_columns(["tokens", "loss_mask"], dtype=np.int64)
    assert [item.keys() for item in some.__getitems__([3, 1])] == [{"tokens", "loss_mask"}] * 2
    for reader in (some, pickle.loads(pickle.dumps(some)), some.with_loss_on()):
        for got in (reader.batch(range(12)), next(reader.batches(12, shuffle=False))):
            assert list(got) == ["tokens", "loss_mask"]
            assert got["tokens"].dtype == np.int64 and got["loss_mask"].dtype == np.uint8
            assert all(np.array_equal(values, whole[name]) for name, values in got.items())
        for item in (reader[5], reader.__getitems__([2, 5])[1]):
            assert list(item) == ["tokens", "loss_mask"] and np.array_equal(
                item["tokens"], whole["tokens"][5]
            )
    assert list(some.batch([0], columns=["labels"])) == ["labels"]
    assert some.batch([0], dtype=np.int32)["tokens"].dtype == np.int32
    assert list(some.batch([0], out={"labels": np.empty((1, 64), "u2")})) == ["labels"]
    assert list(ds.with_columns("tokens")[0]) == ["tokens"]
    mapped = ds.with_columns(["loss_mask", "tokens"], dtype={"loss_mask": "f4"})[0]
    assert mapped["loss_mask"].dtype == np.float32 and mapped["tokens"].dtype == ds.token_dtype
    both = ds.with_loss_on(task="x").with_columns(["loss_mask"])
    assert np.array_equal(
        both.batch(range(12))["loss_mask"], ds.with_loss_on(task="x").batch(range(12))["loss_mask"]
    )
    with pytest.raises(ArgumentError, match="'colour'"):
        ds.with_columns(["tokens", "colour"])


def test_items_of_a_list_are_views_of_one_batch(tmp_path):
    make_dataset(tmp_path)
    first, second = packprep.open_dataset(tmp_path).__getitems__([3, 1])
    for name in loader.COLUMNS:
        assert first[name].base is second[name].base is not None and first[name].flags.writeable
    alone = packprep.open_dataset(tmp_path).with_columns("labels").__getitems__([3, 1])
    assert [list(item) for item in alone] == [["labels"]] * 2
    assert all(
        np.array_equal(item["labels"], row["labels"])
        for item, row in zip(alone, (first, second), strict=True)
    )


@pytest.mark.parametrize("max_open", [1, 3, 100])
def test_rows_by_any_integer_of_many_shards_are_those_of_the_shards(tmp_path, max_open):
    shards = make_dataset(tmp_path, rows_per_shard=[2, 0, 3, 1, 0, 4])
    tokens = np.concatenate([arrays["tokens"] for arrays in shards])
    ds = packprep.open_dataset(tmp_path, max_open=max_open)
    for i in [*range(10), *range(9, -11, -1), 5, 0, 9, -1]:
        for index in (i, np.int64(i), np.int8(i)):
            row = ds.row(index)
            assert (
                row.index == i % 10
                and type(row.index) is int
                and np.array_equal(row.tokens, tokens[i])
            )
        assert len(ds._open) <= max_open
    for index in ("3", 3.0, None, [3]):
        with pytest.raises(TypeError):
            ds.row(index)


@pytest.mark.parametrize("k", [2, 3, 8])
def test_labels_masks_and_weights_k_slots_ahead_are_those_of_the_slots_there(made, k):
    whole, _, _ = made
    own = ("labels", "loss_mask", "loss_weights")
    names = [f"{name}_{k}" for name in own]
    for ds in (whole, whole.with_loss_on(source="web")):
        rows = range(11, -1, -1)
        batch = ds.batch(rows, columns=["tokens", "segment_ids", *own, *names])
        ends = ds.batch(rows, columns=["prefix_ends", "block_lengths"])["prefix_ends"].astype(int)
        for name, next_slot in zip(names, own, strict=True):
            none = {"labels": PAD}.get(next_slot)
            expected = slots_ahead(batch[next_slot], batch["segment_ids"], k, ds, rows, none, ends)
            assert batch[name].dtype == batch[next_slot].dtype and np.array_equal(
                batch[name], expected
            ), name
            assert np.array_equal(ds.batch(rows, columns=[name])[name], expected)
            assert np.array_equal([getattr(ds.row(i), name) for i in rows], expected)
        in_place = slots_of_tasks(ds, rows, lambda task: task["label_alignment"] == "same_slot")
        two_way = slots_of_tasks(ds, rows, lambda task: task["attention"] == "prefix")
        trained, by_law = (
            batch[names[1]] == 1,
            {"distance": k, "in_place": in_place, "ignore_index": -1},
        )
        law = attention.next_token_labels(
            batch["tokens"], batch["segment_ids"], batch["loss_mask"], **by_law
        )
        assert (
            np.array_equal(trained, (law >= 0) & ~(two_way & (np.arange(ds.seq_length) < ends - 1)))
            and (batch[names[0]] == law)[trained].all()
            and trained.any()
        )
    given = {"dtype": {"labels": "i8", names[0]: "i4", "loss_weights": "f2", names[2]: "f8"}}
    cast = ds.batch(rows, columns=[*own, *names], **given)
    assert all(np.array_equal(cast[name], batch[name].astype(cast[name].dtype)) for name in cast)
    with pytest.raises(ArgumentError, match=f"'labels_{k}' is uint8"):
        ds.batch(rows, columns=[names[0]], dtype=np.uint8)


def test_fault_14_no_head_sees_its_label_from_inside_a_two_way_prefix(tmp_path):
    make_dataset(tmp_path)
    ds, trained = packprep.open_dataset(tmp_path), 0
    for row in map(ds.row, range(12)):
        seen = attention.dense_mask(row.segment_ids, row.prefix_ends)
        # whose input is, at depth k − 1, the token k − 1 on
        last_seen = ds.seq_length - 1 - np.argmax(seen[:, ::-1], axis=1)
        for k in (2, 3, 8):
            heads = np.flatnonzero(getattr(row, f"loss_mask_{k}"))
            assert (last_seen[heads] + k - 1 < heads + k).all()
            trained += len(heads)
    assert trained > 500


def test_heads_are_trained_before_a_second_answer_behind_a_two_way_prefix(tmp_path):
    """As in causal, except in the prefix before its last slot."""
    line = {"text": "Q1 A1 Q2 A2", "loss_spans": [[3, 5], [9, 11]]}
    builds.write(tmp_path / "a.jsonl", json.dumps(line).encode())
    found = {}
    for task in ("causal", "prefix_lm"):
        recipe = builds.table("a.jsonl", seq_length=16, tasks=[{"preset": task}])
        builds.build(recipe, tmp_path, tmp_path / task)
        batch = packprep.open_dataset(tmp_path / task).batch(
            [0], columns=["loss_mask_2", "loss_mask_3"]
        )
        found[task] = [np.flatnonzero(column[0]).tolist() for column in batch.values()]
    assert found == {
        "causal": [[1, 2, 7, 8, 9], [0, 1, 6, 7, 8]],
        "prefix_lm": [[2, 7, 8, 9], [6, 7, 8]],
    }


def test_a_distance_beyond_the_row_leaves_nothing(tmp_path):
    make_dataset(tmp_path, seq_length=8, rows_per_shard=(3,))
    batch = packprep.open_dataset(tmp_path).batch(
        range(3), columns=["labels_8", "loss_mask_8", "loss_mask"]
    )
    assert (
        batch["loss_mask"].any()
        and not batch["loss_mask_8"].any()
        and (batch["labels_8"] == PAD).all()
    )


@pytest.mark.parametrize("pad_to", [1, 8])
def test_seq_idx_is_a_column_of_what_sees_the_past_alone(tmp_path, pad_to):
    make_dataset(tmp_path, pad_to=pad_to)
    ds = packprep.open_dataset(tmp_path)
    for ask in (
        lambda: ds.batch([0], columns="seq_idx"),
        lambda: ds.batches(2, columns=["seq_idx"]),
        lambda: ds.with_columns(["seq_idx"]),
        lambda: ds.row(0).seq_idx,
    ):
        with pytest.raises(
            ArgumentError,
            match=r"task x attends .*\n.*with_loss_on\(task=\['causal', 'too_short'\]\).*causally",
        ):
            ask()
    served = ds.with_loss_on(task=["causal", "too_short"])
    batch = next(served.batches(12, shuffle=False, columns=["tokens", "seq_idx"], dtype=np.int64))
    assert batch["seq_idx"].dtype == np.int32
    for i, found in enumerate(batch["seq_idx"]):
        row = served.row(i)
        expected = attention.seq_idx(row.cu_seqlens, ds.seq_length, row.cu_seqlens_padded)
        assert (
            found.tolist() == expected.tolist() == row.seq_idx.tolist()
            and not row.seq_idx.flags.writeable
        )
    assert (
        ds.with_loss_on(source=[]).batch([3], columns=["seq_idx"])["seq_idx"] == batch["seq_idx"][3]
    ).all()
    replace_in_manifest(tmp_path, ledger={"tasks": {"x": {"segments": 0}}})
    assert packprep.open_dataset(tmp_path).row(3).seq_idx.tolist() == batch["seq_idx"][3].tolist()


def test_what_sees_both_ways_or_predicts_in_place_alone_is_refused_by_name(tmp_path):
    make_dataset(tmp_path, in_place=True, blocks=True)
    ds = packprep.open_dataset(tmp_path)
    with pytest.raises(
        ArgumentError,
        match=r"task x, masked, bd3 attends bidirectionally.*\n.*a dataset of causal tasks$",
    ):
        ds.batches(2, columns=["seq_idx"])
    with pytest.raises(
        ArgumentError,
        match=r"task masked, bd3 predicts the same .* has no loss_mask_2\nhint: use loss_mask,",
    ):
        ds.with_loss_on(task=["masked", "bd3"]).batches(2, columns=["loss_mask_2"])
    for name in ("labels_1", "labels_9", "cu_seqlens"):
        with pytest.raises(
            ArgumentError,
            match=f"unknown column '{name}'.* k = 2 … 8" + ".*flatten" * (name[0] == "c"),
        ):
            ds.batch([0], columns=[name])


def test_prefix_ends_are_a_column_on_request(tmp_path):
    shards = make_dataset(tmp_path, pad_to=4)
    ds = packprep.open_dataset(tmp_path)
    got = ds.batch(range(12), columns=["prefix_ends"])["prefix_ends"]
    assert got.tolist() == [row["prefix_ends"] for row in expected_rows(shards, {"pad_to": 4})]
    got = ds.batch(range(12), columns=["block_lengths", "prefix_ends"])
    assert not got["block_lengths"].any() and got["block_lengths"].dtype == np.int32
    assert got["prefix_ends"].tolist() == [
        row["prefix_ends"] for row in expected_rows(shards, {"pad_to": 4})
    ]


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_block_lengths_say_where_prefix_ends_do_not_hold(tmp_path, io):
    make_dataset(tmp_path, pad_to=4, in_place=True, blocks=True)
    ds = packprep.open_dataset(tmp_path, io=io)
    got = ds.batch(range(12), columns=["prefix_ends", "block_lengths", "n_trained"])
    lengths, ends = np.zeros((12, 64), int), np.zeros((12, 64), int)
    for i in range(12):
        of = ds.row(i).segments
        for begin, end, prefix, task in zip(
            of["begin"], of["end"], of["prefix"], of["task"], strict=True
        ):
            in_blocks = ds.tasks[task]["attention"] == "block_diffusion"
            lengths[i, begin:end] = 4 if in_blocks else 0
            ends[i, begin:end] = -1 if in_blocks else begin + prefix
    assert lengths.any() and (lengths == 0).any()
    assert np.array_equal(got["block_lengths"], lengths) and np.array_equal(
        got["prefix_ends"], ends
    )
    assert np.array_equal(ds.batch(range(12), columns=["block_lengths"])["block_lengths"], lengths)
    with pytest.raises(DatasetError, match="the attention pattern of block diffusion"):
        ds.batch(range(12), columns=["prefix_ends"])


def test_a_block_length_that_the_manifest_lacks_is_said_by_the_task(tmp_path):
    make_dataset(tmp_path, in_place=True, blocks=True)
    ds = packprep.open_dataset(tmp_path)
    [task] = [task for task in ds.tasks if task["attention"] == "block_diffusion"]
    del task["parameters"]["block_length"]
    with pytest.raises(DatasetError, match=f"task {task['name']} has no block_length"):
        ds.batch([0], columns=["block_lengths"])


@pytest.mark.parametrize("pad_to", [1, 8])
@pytest.mark.parametrize("size", [17, 32, 64])
def test_micro_sequences_are_windows_over_all_of_a_row(tmp_path, pad_to, size):
    make_dataset(tmp_path, (12,), pad_to=pad_to)
    for row in map(packprep.open_dataset(tmp_path).row, range(12)):
        longest = int(row.segments["prefix"].max(initial=0))
        if longest > size:
            with pytest.raises(ArgumentError, match=f"does not fit into a window of {size}"):
                list(row.micro_sequences(size))
            continue
        windows = list(row.micro_sequences(size))
        assert [w.start for w, _ in windows] == [0, *(w.stop for w, _ in windows[:-1])]
        assert windows[-1][0].stop == 64 and all(0 < w.stop - w.start <= size for w, _ in windows)
        dense = attention.dense_mask(row.segment_ids, row.prefix_ends)
        for window, layout in windows:
            real = row.segment_ids[window] > 0
            seen = dense[window][real]
            assert (
                not seen[:, : layout.first_document_begin].any()
                and not seen[:, window.stop :].any()
            )
            assert (
                layout.cu_seqlens_q[-1] == window.stop - window.start
                and layout.cu_seqlens_k[0] == 0
            )
            assert layout.cu_seqlens_k[-1] == window.stop - layout.first_document_begin
            assert layout.position_ids[real].tolist() == row.position_ids[window][real].tolist()


def test_sums_of_a_row_are_those_of_its_slots_whatever_is_asked_for_besides(made):
    ds, shards, options = made
    rows = expected_rows(shards, options)
    trained = [sum(row["loss_mask"]) for row in rows]
    weights = [np.float32(sum(row["loss_weights"])) for row in rows]
    sums = ["n_trained", "loss_weight_sum"]
    for columns in (
        sums,
        ["loss_weight_sum", "tokens", "n_trained"],
        [*sums, "loss_mask", "loss_weights"],
    ):
        batch = ds.batch(
            range(12), columns=columns, dtype={"loss_mask": bool, "loss_weights": "f2"}
        )
        assert list(batch) == columns and batch["n_trained"].dtype == np.int32
        assert batch["n_trained"].tolist() == trained
        assert batch["loss_weight_sum"].dtype == np.float32
        np.testing.assert_allclose(batch["loss_weight_sum"], weights, rtol=1e-6)
    assert batch["loss_mask"].dtype == bool and batch["loss_weights"].dtype == np.float16
    assert batch["loss_mask"].tolist() == [row["loss_mask"] for row in rows]
    some = ds.with_loss_on(task="x").with_columns(["n_trained", "loss_mask"])
    assert (
        some[3]["n_trained"] == some[3]["loss_mask"].sum() and np.shape(some[3]["n_trained"]) == ()
    )
    assert [item["n_trained"] for item in some.__getitems__(range(12))] == some.batch(range(12))[
        "n_trained"
    ].tolist()
    out = {"n_trained": np.empty(12, np.int64)}
    assert (
        ds.batch(range(12), out=out)["n_trained"] is out["n_trained"]
        and out["n_trained"].tolist() == trained
    )
    with pytest.raises(ArgumentError, match="out\\['n_trained'\\] has shape"):
        ds.batch([0], out=out)


def test_loss_is_kept_on_the_named_sources_and_tasks_alone(made):
    ds, shards, options = made
    for source, task in [
        ("web", None),
        (None, "x"),
        (["web", "code"], ["x", "causal"]),
        ([], None),
    ]:
        part = ds.with_loss_on(source=source, task=task)
        assert len(part) == len(ds)
        batch = part.batch(range(12))
        for i in range(12):
            row, whole = part.row(i), ds.row(i)
            expected = np.zeros(64, np.uint8)
            for s in range(whole.n_segments):
                named = SOURCES[whole.segments["source"][s]] in (
                    [source] if isinstance(source, str) else source or []
                )
                tasked = ds.tasks[whole.segments["task"][s]]["name"] in (
                    [task] if isinstance(task, str) else task or []
                )
                if (named or source is None) and (tasked or task is None):
                    at = slice(whole.segments["begin"][s], whole.segments["end"][s])
                    expected[at] = whole.loss_mask[at]
            assert row.loss_mask.dtype == np.uint8
            assert np.array_equal(row.loss_mask, expected) and np.array_equal(
                batch["loss_mask"][i], expected
            )
            assert np.array_equal(row.loss_weights, whole.loss_weights * expected)
            assert np.array_equal(row.labels, whole.labels)
    both = ds.with_loss_on(source="web").with_loss_on(task="x")
    assert np.array_equal(
        both.batch(range(12))["loss_mask"],
        ds.with_loss_on("web", "x").batch(range(12))["loss_mask"],
    )


def test_unknown_names_say_which_exist(tmp_path):
    make_dataset(tmp_path)
    ds = packprep.open_dataset(tmp_path)
    with pytest.raises(
        ArgumentError, match="unknown source 'wed'; there are 'web', 'code', 'chat'"
    ):
        ds.with_loss_on(source="wed")
    with pytest.raises(ArgumentError, match="'causal', 'x', 'too_short'"):
        ds.with_loss_on(task=["x", "y"])


def test_what_the_manifest_says_is_at_hand(tmp_path):
    make_dataset(tmp_path)
    ds = packprep.open_dataset(str(tmp_path))
    assert (ds.seq_length, ds.vocab_size, ds.pad_id) == (64, 528, PAD)
    assert ds.manifest == manifest.read_manifest(tmp_path) and ds.tasks[1]["name"] == "x"
    mixed = packprep.open_dataset([tmp_path, tmp_path], shares=[1, 1])
    before = {"digest": "1" * 32, "fingerprint": "2" * 32, "plan": "3" * 32}
    for one in (ds, *mixed.datasets):  # Documents were removed from it once.
        one.manifest["removed"] = {"digest": "4" * 32, "replaces": [before]}
    versions = [ds.fingerprint_at(digest) for digest in (ds.digest, "1" * 32, "3" * 32)]
    assert versions == [ds.fingerprint, "2" * 32, None]
    pairs = (f"{ds.digest},{ds.digest}", f"{'1' * 32},{ds.digest}", f"{ds.digest},{'3' * 32}")
    same, earlier, unknown = map(mixed.fingerprint_at, pairs)
    assert (same, unknown) == (mixed.fingerprint, None) and earlier not in (None, same)
    assert mixed.fingerprint_at(ds.digest) is None
    del ds.manifest["removed"]
    for sources, weighted in ({"a": 0, "b": 2}, True), ({"a": 0}, False), ({}, False):
        ledger = {"sources": {name: {"slots": {"weighted": n}} for name, n in sources.items()}}
        assert manifest.has_weighted_spans({"ledger": ledger}) == weighted
    assert not manifest.has_weighted_spans({"ledger": {"sources": {"a": {"slots": {}}, "b": 3}}})
    assert ds.task_params.dtype == np.float32 and ds.task_params.shape == (
        3,
        len(loader.TASK_PARAMS),
    )
    assert (
        ds.task_params[1].tolist() == [7, np.float32(0.15), 32, 1]
        and np.isnan(ds.task_params[[0, 2]]).all()
    )


def test_a_missing_shard_or_list_of_directories_is_a_clear_error(tmp_path):
    make_dataset(tmp_path)
    ds = packprep.open_dataset(tmp_path)
    (tmp_path / json_files.shard_name(2)).unlink()
    assert ds[0]
    with pytest.raises(DatasetError, match="000002"):
        ds[11]
    with pytest.raises(ArgumentError, match="a list of 2 directories requires shares"):
        packprep.open_dataset([tmp_path, tmp_path])
    with pytest.raises(DatasetError, match="packprep status"):
        packprep.open_dataset(tmp_path / "none")


def test_opening_touches_no_shard_and_maps_stay_bounded(tmp_path):
    make_dataset(tmp_path, rows_per_shard=[2] * 9)
    ds = packprep.open_dataset(tmp_path, max_open=3)
    assert ds._open == {}
    kept = ds.row(0)
    for i in range(18):
        ds[i]
        assert len(ds._open) <= 3
    assert list(ds._open) == [6, 7, 8]
    ds[12]
    ds[0]
    assert list(ds._open) == [8, 6, 0]
    assert np.array_equal(kept.tokens, ds[0]["tokens"])
    assert ds.batch(range(18))["tokens"].shape == (18, 64)


def test_by_default_half_of_the_files_that_may_be_open_are_shards(tmp_path, monkeypatch):
    make_dataset(tmp_path)
    for files, shards in ((1, 1), (3, 1), (100, 50), (2046, 1023), (2 * 1026, 1024), (-1, 1024)):
        system = SimpleNamespace(RLIMIT_NOFILE=7, RLIM_INFINITY=-1)
        system.getrlimit = {7: (files, 1 << 20)}.get
        monkeypatch.setattr(loader, "resource", system)
        assert packprep.open_dataset(tmp_path).max_open == shards
    monkeypatch.setattr(loader, "resource", None)  # Windows
    assert packprep.open_dataset(tmp_path).max_open == 256
    with pytest.raises(ArgumentError, match="^max_open is 0 .* in 1 … 2147483647$"):
        packprep.open_dataset(tmp_path, max_open=0)


def test_threads_and_pickles_read_the_same(tmp_path):
    make_dataset(tmp_path, rows_per_shard=[2] * 9)
    ds = packprep.open_dataset(tmp_path, max_open=2)
    whole = ds.batch(range(18))["tokens"]
    with ThreadPoolExecutor(8) as pool:
        for i, item in zip(
            list(range(18)) * 20, pool.map(ds.__getitem__, list(range(18)) * 20), strict=True
        ):
            assert np.array_equal(item["tokens"], whole[i])
    again = pickle.loads(pickle.dumps(ds.with_loss_on(task="x")))
    assert np.array_equal(
        again.batch(range(18))["loss_mask"], ds.with_loss_on(task="x").batch(range(18))["loss_mask"]
    )


# Damage inside a shard: refused by file and row, never read outside


def damaged(tmp_path, name, index, value, **options):
    """A dataset whose shard 0 has one wrong number."""
    make_dataset(tmp_path, **options)
    path = tmp_path / json_files.shard_name(0)
    arrays = {k: v.copy() for k, v in shard.open_shard(path, 64, "uint16").arrays.items()}
    arrays[name][index] = value
    path.write_bytes(b"".join(shard.encode(arrays)))
    return packprep.open_dataset(tmp_path)


@pytest.mark.parametrize(
    "name, index, value, read",
    [
        ("row_offsets", 3, 1 << 40, lambda row: row.segments),
        ("row_offsets", 2, -1, lambda row: row.n_segments),
        ("cu_seqlens", 1, 0, lambda row: row.cu_seqlens),
        ("cu_seqlens", 0, 1, lambda row: row.n_tokens),
        ("cu_seqlens", 1, -5, lambda row: row.position_ids),
        ("cu_seqlens", 1, 1 << 30, lambda row: row.position_ids),
        (
            "segment_task",
            slice(None),
            77,
            lambda row: row.dataset.with_loss_on(task="x").row(row.index).loss_mask,
        ),
    ],
)
def test_damage_is_refused_by_file_and_row(tmp_path, name, index, value, read):
    ds = damaged(tmp_path, name, index, value)
    with pytest.raises(DatasetError, match=r"000000\.safetensors: row \d"):
        for i in range(5):
            read(ds.row(i))


@pytest.mark.parametrize(
    "name, value", [("block_offsets", 1 << 40), ("cu_seqlens_padded", 3), ("cu_seqlens_padded", 65)]
)
def test_damage_of_blocks_and_physical_offsets_is_refused_by_file_and_row(tmp_path, name, value):
    ds = damaged(tmp_path, name, slice(1, None), value, blocks=True, pad_to=8)
    with pytest.raises(DatasetError, match=r"000000\.safetensors: row \d"):
        for i in range(5):
            ds.row(i).loss_weights  # noqa: B018


def test_one_segment_with_fewer_physical_slots_than_its_own_is_refused(tmp_path):
    make_dataset(tmp_path, pad_to=8)
    row = next(
        row for row in map(packprep.open_dataset(tmp_path).row, range(5)) if row.n_segments > 1
    )
    first = row._shard.segment_range(row._row)[0] + row._row
    end = int(row.cu_seqlens[1])
    ds = damaged(tmp_path, "cu_seqlens_padded", first + 1, end - 1, pad_to=8)
    with pytest.raises(
        DatasetError,
        match=rf"row {row.index}: its cu_seqlens or cu_seqlens_padded are not ascending",
    ):
        ds.row(row.index).cu_seqlens_padded  # noqa: B018
    ds = damaged(tmp_path, "cu_seqlens_padded", first + 1, end, pad_to=8)  # as many are enough
    assert ds.row(row.index).cu_seqlens_padded[1] == end


def test_a_shard_without_labels_is_refused_where_a_task_predicts_in_place(tmp_path):
    make_dataset(tmp_path)
    replace_in_manifest(tmp_path, tasks=tasks(in_place=True))
    with pytest.raises(DatasetError, match="'labels' is missing"):
        packprep.open_dataset(tmp_path)[0]


def test_a_manifest_that_claims_a_huge_dataset_costs_no_memory(tmp_path):
    make_dataset(tmp_path)
    entries = packprep.open_dataset(tmp_path).manifest["shards"]
    replace_in_manifest(
        tmp_path, shards=[{**entries[0], "rows": 1 << 50}, *entries[1:]], seq_length=1 << 30
    )
    ds = packprep.open_dataset(tmp_path)
    tracemalloc.start()
    with pytest.raises(DatasetError):
        ds.batch([1 << 49])
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


SCALE = """
import sys
import numpy as np, packprep
ds = packprep.open_dataset(sys.argv[1])
assert len(ds) == 4 * 10**9
ds.batch = lambda rows, **given: rows
size, world = 8, 16
it = ds.batches(size, seed=5, rank=3, world_size=world)
it.load_state_dict({**it.state_dict(), "rows": 999_999 * size * world})
rows = next(it)
from packprep.dataset import order
g = 999_999 * size * world + 3 * size + np.arange(size)
assert rows.tolist() == order.permutation(5, 0, 4 * 10**9, g).tolist()
[peak] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_four_billion_rows_in_50000_shards_take_no_array_of_their_size(tmp_path):
    make_dataset(tmp_path)
    [entry, *_] = packprep.open_dataset(tmp_path).manifest["shards"]
    entries = [{**entry, "file": json_files.shard_name(b), "rows": 80_000} for b in range(50_000)]
    replace_in_manifest(tmp_path, shards=entries)
    done = subprocess.run([sys.executable, "-c", SCALE, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300  # MiB; one bit for each row would be 477


# Iteration


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize(
    "rows", [(2, 0, 11, 1, 1), (1, 1, 30), (40, 1, 1), (0, 3), (5,), (4, 4, 4)]
)
def test_a_row_is_found_however_unlike_the_shards_are(tmp_path, rows, io):
    make_dataset(tmp_path, rows_per_shard=rows)
    ds = packprep.open_dataset(tmp_path, io=io)
    expected = ds.batch(range(sum(rows)), columns=["tokens"])["tokens"]
    # shards are opened as they come
    for order in (range(sum(rows)), reversed(range(sum(rows))), range(-sum(rows), 0)):
        ds = packprep.open_dataset(tmp_path, io=io)
        for index in order:
            row = ds.row(index)
            assert row.index == index % sum(rows) and np.array_equal(row.tokens, expected[index])
            assert np.array_equal(ds.row(np.int64(index)).tokens, expected[index])
    for index in (sum(rows), -sum(rows) - 1, 1 << 70):
        with pytest.raises(IndexError, match=f"row {index} of a dataset of {sum(rows)} rows"):
            ds.row(index)
    for index in ("1", 1.0, None):
        with pytest.raises(TypeError):
            ds.row(index)


class Numbered(loader.Dataset):
    """A dataset of n rows without files, whose row i has tokens i; only `batch` and `manifest` are
    used."""

    def __init__(self, n, fingerprint="f" * 32):
        self.n, self.manifest, self.directory = (
            n,
            {"fingerprint": fingerprint, "digest": "d" * 32, "shards": []},
            "numbered",
        )

    def __len__(self):
        return self.n

    def batch(self, indices, out=None, columns=None, dtype=None, epochs=None):
        return {"tokens": np.asarray(indices, np.int64)}


@few_and_many(30, 80, st.data())
def test_every_row_comes_exactly_once_in_each_epoch_over_ranks_restarts_and_changed_sizes(data):
    n = data.draw(st.integers(1, 60), "n")
    seed, shuffle = (
        data.draw(st.integers(0, 2**64 - 1), "seed"),
        data.draw(st.booleans(), "shuffle"),
    )
    ds, delivered, state = Numbered(n), [], None
    epochs = data.draw(st.integers(1, 3), "epochs")
    for _ in range(data.draw(st.integers(0, 4), "restarts")):
        size, world = data.draw(st.integers(1, 9), "B"), data.draw(st.integers(1, 5), "W")
        ranks = [ds.batches(size, seed, r, world, shuffle) for r in range(world)]
        if state is not None:
            for it in ranks:
                it.load_state_dict(state)
        for _ in range(data.draw(st.integers(0, 6), "steps")):
            for it in ranks:
                delivered += next(it)["tokens"].tolist()
        states = [json.loads(json.dumps(it.state_dict())) for it in ranks]
        assert all(s == states[0] for s in states) and states[0]["rows"] == len(delivered)
        state = states[0]
    size, world = data.draw(st.integers(1, 9), "B"), data.draw(st.integers(1, 5), "W")
    ranks = [ds.batches(size, seed, r, world, shuffle, epochs) for r in range(world)]
    for it in ranks:
        if state is not None:
            it.load_state_dict(state)
    by_rank = [[batch["tokens"].tolist() for batch in it] for it in ranks]
    steps = -(-max(0, epochs * n - len(delivered)) // (size * world))
    assert [len(batches) for batches in by_rank] == [steps] * world
    for step in range(steps):
        for batches in by_rank:
            assert len(batches[step]) == size or step == steps - 1
            delivered += batches[step]
    if steps:
        assert len(delivered) == epochs * n and ranks[0].state_dict()["rows"] == epochs * n
    for e in range(len(delivered) // n):
        assert sorted(delivered[e * n : (e + 1) * n]) == list(range(n))
    one_rank = Numbered(n).batches(1, seed, shuffle=shuffle)
    assert [next(one_rank)["tokens"][0] for _ in delivered] == delivered


@pytest.mark.long
@pytest.mark.parametrize("every", [7, 1])
def test_killed_at_every_step_of_a_run_and_taken_up_by_other_world_sizes_the_rows_are_the_same(
    every,
):
    ds, size, steps = Numbered(313), 4, 200
    one_rank = ds.batches(size, seed=6)
    expected = [row for _ in range(steps + 18) for row in next(one_rank)["tokens"].tolist()]
    uncut = ds.batches(size, seed=6)
    for killed in range(0, steps, every):
        state, delivered = json.loads(json.dumps(uncut.state_dict())), killed * size
        for world in (4, 2):  # each goes on for a while, 4 until it is killed too
            ranks = [ds.batches(size, 6, rank, world) for rank in range(world)]
            for it in ranks:
                it.load_state_dict(state)
            for _ in range(3):
                got = [row for it in ranks for row in next(it)["tokens"].tolist()]
                assert got == expected[delivered : delivered + len(got)]
                delivered += len(got)
            state = ranks[killed % world].state_dict()
            assert state["rows"] == delivered
        for _ in range(every):
            next(uncut)


@pytest.mark.long
def test_a_step_is_the_same_however_many_were_drawn_ahead(monkeypatch):
    streams = []
    for ahead in (1, 7, 4096):
        monkeypatch.setattr(iteration, "_AHEAD", (1, 64, ahead))
        it = Numbered(1000).batches(4, 5, 1, 2)
        streams.append([next(it)["tokens"].tolist() for _ in range(600)])
    assert streams[0] == streams[1] == streams[2]


def test_batches_are_what_batch_gives(tmp_path):
    make_dataset(tmp_path)
    ds = packprep.open_dataset(tmp_path)
    it = ds.batches(batch_size=5, seed=3, epochs=1, columns=["tokens"], dtype=np.int64)
    batches = list(it)
    assert [b["tokens"].shape for b in batches] == [(5, 64), (5, 64), (2, 64)]
    assert batches[0]["tokens"].dtype == np.int64 and list(batches[0]) == ["tokens"]
    whole = ds.batch(range(12))["tokens"]
    assert sorted(map(tuple, np.concatenate([b["tokens"] for b in batches]).tolist())) == sorted(
        map(tuple, whole.tolist())
    )
    assert next(it, None) is None
    unshuffled = next(ds.batches(12, shuffle=False))
    assert np.array_equal(unshuffled["tokens"], whole)
    assert [b["tokens"].shape for b in ds.batches(5, rank=2, world_size=3, epochs=1)] == [(2, 64)]
    assert [b["tokens"].shape for b in ds.batches(12, rank=1, world_size=2, epochs=1)] == [(0, 64)]
    # Workers of a trainer's loader read every n-th step of what is left.
    order, after = Numbered(100).batches(4, 5, epochs=1), Numbered(100).batches(4, 5, epochs=1)
    steps = [batch["tokens"].tolist() for batch in order]
    for rows, first, every, made in ((0, 1, 3, 2), (0, 24, 7, 0), (0, 3, 5, 9), (40, 1, 2, 1)):
        after.load_state_dict({**after.state_dict(), "rows": rows})
        next(after)
        after.part(first, every, made)
        part = [batch["tokens"].tolist() for batch in after]
        assert part == steps[rows // 4 + first + every * made :: every]


def test_a_state_has_six_keys_and_survives_json():
    it = Numbered(10).batches(3, seed=2**64 - 1, rank=1, world_size=2)
    next(it)
    state = json.loads(json.dumps(it.state_dict()))
    of = {"fingerprint": "f" * 32, "digest": "d" * 32}
    assert state == {**of, "seed": 2**64 - 1, "shuffle": True, "redraw": False, "rows": 6}
    other = Numbered(10).batches(3, seed=2**64 - 1, rank=1, world_size=2)
    next(other)
    next(other)
    other.load_state_dict(state)
    assert next(other)["tokens"].tolist() == next(it)["tokens"].tolist()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"fingerprint": "0" * 32}, "fingerprint"),
        (
            {"digest": "0" * 32},
            "digest is '0{32}', but this loader's is 'd{32}': .*\nhint: open the dataset with this digest",
        ),
        ({"digest": None}, "digest"),
        ({"seed": 1}, "seed"),
        ({"redraw": True}, "redraw"),
        ({"redraw": 0}, "redraw"),
        ({"shuffle": False}, "shuffle"),
        ({"shuffle": 1}, "shuffle"),
        ({"rows": -1}, "rows"),
        ({"rows": 1.5}, "rows"),
        ({"rows": True}, "rows"),
        ({"rows": 1 << 62}, "rows"),
        ({"epoch": 1}, "keys"),
    ],
)
def test_a_state_of_another_dataset_seed_or_order_is_refused(change, words):
    it = Numbered(10).batches(3)
    with pytest.raises(StateError, match=words):
        it.load_state_dict({**it.state_dict(), **change})
    with pytest.raises(StateError, match="keys"):
        it.load_state_dict(None)
    assert it.state_dict()["rows"] == 0


@pytest.mark.parametrize("absent", [["digest"], ["redraw"], ["digest", "redraw"]])
def test_a_state_of_before_is_taken_once_with_a_warning_that_names_what_is_not_checked(absent):
    it = Numbered(10).batches(3)
    next(it)
    old = {key: value for key, value in it.state_dict().items() if key not in absent}
    again = Numbered(10).batches(3)
    with pytest.warns(
        UserWarning, match=f"no {' and no '.join(absent)}, .*without a check of whether"
    ) as caught:
        again.load_state_dict(old)
    text, warned_at = str(caught[0].message), caught[0].filename
    assert ("built again" in text) == ("digest" in absent) and ("resampled" in text) == (
        "redraw" in absent
    )
    assert warned_at == __file__
    assert again.state_dict() == it.state_dict()
    assert next(again)["tokens"].tolist() == next(it)["tokens"].tolist()


def test_a_dataset_built_again_from_other_text_of_equal_size_refuses_the_state(tmp_path):
    builds.write_lines(tmp_path / "a.jsonl", texts := builds.texts(30))
    builds.build(table := builds.table("a.jsonl"), tmp_path, tmp_path / "one")
    builds.write_lines(tmp_path / "a.jsonl", [text.replace("a", "o") for text in texts])
    builds.build(table, tmp_path, tmp_path / "two")
    one, two = (packprep.open_dataset(tmp_path / name).batches(2) for name in ("one", "two"))
    assert one.dataset.fingerprint == two.dataset.fingerprint
    with pytest.raises(StateError, match="the state's digest is"):
        two.load_state_dict(one.state_dict())
    before = {key: value for key, value in one.state_dict().items() if key != "digest"}
    with pytest.warns(UserWarning, match="no digest"):
        two.load_state_dict(before)


# Argument → its least and greatest value, of two ranks.
RANGES = {
    "batch_size": (1, 2**31 - 1),
    "rank": (0, 1),
    "world_size": (1, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "epochs": (0, 2**31 - 1),
    "samples": (0, 2**62 - 1),
}


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 1.5},
        {"batch_size": True},
        {"rank": -1},
        {"rank": 2, "world_size": 2},
        {"world_size": 0},
        {"seed": -1},
        {"seed": 1 << 64},
        {"epochs": -1},
    ],
)
def test_arguments_out_of_range_are_clear_errors(arguments):
    [name] = [name for name in arguments if name != "world_size" or len(arguments) == 1]
    with pytest.raises(ArgumentError, match=f"{name} is {arguments[name]} and should be an integ"):
        Numbered(10).batches(**{"batch_size": 4, **arguments})


def test_each_argument_of_batches_has_a_range_and_both_ends_are_allowed():
    for name, bounds in RANGES.items():
        given = {"batch_size": 4, "world_size": 2}
        for value in bounds:
            Numbered(10).batches(**{**given, name: value})
        least, most = bounds
        for value in (least - 1, most + 1):
            with pytest.raises(ArgumentError, match=f"^{name} is .* in {least} … {most}$"):
                Numbered(10).batches(**{**given, name: value})
    with pytest.raises(ArgumentError, match="column"):
        Numbered(10).batches(4, columns=["colour"])


def test_a_dataset_without_rows_ends_at_once_or_says_that_it_never_begins(tmp_path):
    make_dataset(tmp_path, rows_per_shard=(0,))
    ds = packprep.open_dataset(tmp_path)
    assert list(ds.batches(4, epochs=2)) == [] and len(ds) == 0
    with pytest.raises(ArgumentError, match="no rows"):
        ds.batches(4)
    with pytest.raises(IndexError):
        ds[0]


def test_a_batch_that_could_not_be_read_is_not_delivered(tmp_path):
    make_dataset(tmp_path)
    it = packprep.open_dataset(tmp_path).batches(12)
    path = tmp_path / json_files.shard_name(2)
    data = path.read_bytes()
    path.write_bytes(data[:5000])
    with pytest.raises(DatasetError):
        next(it)
    assert it.state_dict()["rows"] == 0
    path.write_bytes(data)
    assert next(it)["tokens"].shape == (12, 64) and it.state_dict()["rows"] == 12


def test_fault_1_no_padding_inside_a_segment_and_fault_2_a_real_token_may_be_the_pad_id(tmp_path):
    make_dataset(tmp_path, rows_per_shard=(1,))
    path = tmp_path / json_files.shard_name(0)
    arrays = make_shard(np.random.default_rng(5), 1)
    arrays["tokens"][arrays["segment_ids"] > 0] = PAD
    path.write_bytes(b"".join(shard.encode(arrays)))
    entry = packprep.open_dataset(tmp_path).manifest["shards"][0]
    replace_in_manifest(tmp_path, shards=[{**entry, "segments": len(arrays["segment_key"])}])
    row = packprep.open_dataset(tmp_path).row(0)
    assert row.n_tokens == int(arrays["cu_seqlens"][-1]) > 0
    assert row.position_ids[: row.n_tokens].max() == row.max_seqlen - 1
