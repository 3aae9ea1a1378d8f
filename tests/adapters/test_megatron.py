import sys
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

from torch.utils.data import DataLoader

from packprep import open_dataset
from packprep.adapters import megatron
from packprep.errors import ArgumentError
from tests.dataset import synthetic
from tests.golden import cases
from tests.weights_made import TASKS, build, records


def make(directory, pad_to=1):
    """A dataset of causal tasks alone, by the word of its manifest."""
    synthetic.make_dataset(directory, (4, 5), pad_to=pad_to)
    synthetic.replace_in_manifest(
        directory, tasks=[synthetic.task(name) for name in ("a", "b", "too_short")]
    )
    return open_dataset(directory)


@pytest.mark.parametrize(
    "inputs, expected", [pytest.param(i, e, id=n) for n, i, e in cases("megatron_padding")]
)
def test_alignment_takes_the_least_common_multiple(inputs, expected):
    fp8 = (inputs["recipe"] or "fp8") if inputs["fp8"] else None
    factor = megatron.alignment_factor(inputs["tp_size"], inputs["cp_size"], inputs["has_sp"], fp8)
    assert factor == expected["lcm_factor_packprep"]


@pytest.mark.long
def test_alignment_of_everything_at_once():
    assert megatron.alignment_factor(3, 2, True, "mxfp8") == 96
    assert megatron.alignment_factor(4, 1, True) == 4 and megatron.alignment_factor(4, 1) == 1
    for wrong in ({"fp8": "fp4"}, {"tp_size": 0}):
        with pytest.raises(ArgumentError):
            megatron.alignment_factor(**wrong)


@pytest.mark.parametrize("pad_to", [1, 8])
def test_rows_have_gptdataset_s_keys(tmp_path, pad_to):
    dataset = make(tmp_path, pad_to)
    rows = megatron.GPTRows(tmp_path, max_segments=20)
    assert len(rows) == 9
    for i in range(9):
        item, row = rows[i], dataset.row(i)
        assert list(item) == [
            "tokens",
            "labels",
            "position_ids",
            "loss_mask",
            "cu_seqlens",
            "max_seqlen",
        ]
        for name in ("tokens", "labels", "position_ids"):
            assert item[name].dtype == torch.int64 and np.array_equal(
                item[name].numpy(), getattr(row, name)
            )
        assert item["loss_mask"].dtype == torch.float32
        assert np.array_equal(item["loss_mask"].numpy(), row.loss_weights)
        assert np.array_equal(item["loss_mask"].numpy() > 0, row.loss_mask > 0)
        cu_seqlens = item["cu_seqlens"].numpy()
        physical = row.cu_seqlens if pad_to == 1 else row.cu_seqlens_padded
        assert cu_seqlens.dtype == np.int32 and cu_seqlens.shape == (22,)
        assert (
            np.array_equal(cu_seqlens[: len(physical)], physical)
            and (cu_seqlens[len(physical) :] == 64).all()
        )
        assert item["max_seqlen"] == np.diff(cu_seqlens).max()
        if pad_to > 1:
            assert (physical % pad_to == 0).all()
    filler = rows[None]
    assert torch.equal(filler["tokens"], rows[0]["tokens"]) and not filler["loss_mask"].any()
    batch = next(iter(DataLoader(rows, batch_size=3)))
    assert batch["cu_seqlens"].shape == (3, 22) and batch["max_seqlen"].shape == (3,)


@pytest.mark.parametrize("pad_to", [1, 8])
def test_labels_masks_and_weights_ahead_are_what_megatron_s_mtp_rolls(tmp_path, pad_to):
    mtp = pytest.importorskip(
        "megatron.core.transformer.multi_token_prediction", reason="megatron-core is not installed"
    )
    dataset = make(tmp_path, pad_to)
    batch = next(iter(DataLoader(megatron.GPTRows(tmp_path, max_segments=20), batch_size=9)))
    params, rolled = (
        megatron.packed_seq_params(batch),
        {name: batch[name].view(1, -1) for name in ("labels", "loss_mask")},
    )
    real = (
        torch.from_numpy(
            dataset.batch(range(9), columns=["segment_ids"])["segment_ids"].astype(int)
        ).view(1, -1)
        > 0
    )
    for k in range(2, 9):
        rolled = {
            name: mtp.roll_tensor(values, packed_seq_params=params)[0]
            for name, values in rolled.items()
        }
        names = [f"{name}_{k}" for name in ("labels", "loss_mask", "loss_weights")]
        labels, mask, weights = (torch.from_numpy(values) for values in dataset.batch(
            range(9), columns=names, dtype={names[0]: np.int64}).values())  # fmt: skip
        assert torch.equal(rolled["loss_mask"] > 0, mask.view(1, -1) == 1) and mask.any()
        assert torch.equal(rolled["loss_mask"], weights.view(1, -1))
        trained = rolled["loss_mask"] > 0
        assert torch.equal(rolled["labels"][trained], labels.view(1, -1)[trained])
        # untrained slots have their label too
        within = real & (labels.view(1, -1) != dataset.pad_id)
        assert torch.equal(rolled["labels"][within], labels.view(1, -1)[within])


def test_too_many_segments_are_refused_by_row(tmp_path):
    dataset = make(tmp_path)
    most = max(range(9), key=lambda i: dataset.row(i).n_segments)
    with pytest.raises(ArgumentError, match=f"row {most}: .*\nhint: raise max_segments = 1"):
        megatron.GPTRows(tmp_path, max_segments=1)[most]
    assert megatron.GPTRows(tmp_path).max_segments == 64
    synthetic.replace_in_manifest(tmp_path, recipe={"packing": {"max_segments_per_row": 12}})
    assert megatron.GPTRows(tmp_path).max_segments == 12


def test_fault_16_packed_seq_params_of_several_rows_move_their_boundaries(tmp_path, monkeypatch):
    # as where it is not installed
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", None)
    make(tmp_path)
    rows = megatron.GPTRows(tmp_path, max_segments=20)
    batch = next(iter(DataLoader(rows, batch_size=3)))
    fields = megatron.packed_seq_params(batch)
    cu_seqlens = fields["cu_seqlens_q"]
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0 and cu_seqlens[-1] == 3 * 64
    assert (cu_seqlens.diff() >= 0).all() and cu_seqlens.shape == (1 + 3 * 21,)
    starts = torch.cat([rows[i]["cu_seqlens"] + 64 * i for i in range(3)])
    assert set(cu_seqlens.tolist()) == set(starts.tolist())
    assert all(fields[name] is cu_seqlens for name in fields if name.startswith("cu_seqlens"))
    assert fields["max_seqlen_q"] == fields["max_seqlen_kv"] == int(batch["max_seqlen"].max())
    assert fields["qkv_format"] == "thd"
    assert (
        megatron.packed_seq_params(rows[0])["cu_seqlens_q"].tolist()
        == rows[0]["cu_seqlens"].tolist()
    )


def test_packed_seq_params_are_megatron_s_where_it_is_installed(tmp_path, monkeypatch):
    class PackedSeqParams:
        def __init__(
            self,
            qkv_format,
            cu_seqlens_q,
            cu_seqlens_kv,
            cu_seqlens_q_padded,
            cu_seqlens_kv_padded,
            max_seqlen_q,
            max_seqlen_kv,
        ):
            self.qkv_format = qkv_format

    for name in ("megatron", "megatron.core", "megatron.core.packed_seq_params"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.core.packed_seq_params"].PackedSeqParams = PackedSeqParams
    make(tmp_path)
    assert megatron.packed_seq_params(megatron.GPTRows(tmp_path)[0]).qkv_format == "thd"


def test_rules_that_are_not_causal_are_refused_by_name(tmp_path):
    synthetic.make_dataset(tmp_path, (4,))
    for refused in (megatron.GPTRows, lambda directory: megatron.torchtitan(directory, 2)):
        with pytest.raises(ArgumentError, match="task x attends bidirectionally"):
            refused(tmp_path)
    assert len(megatron.GPTRows(tmp_path, prefix_bidirectional=False)) == 4
    synthetic.replace_in_manifest(
        tmp_path, tasks=[synthetic.task("m", "bidirectional", "same_slot")]
    )
    with pytest.raises(
        ArgumentError, match="every task of this dataset attends bidirectionally to its segments"
    ):
        megatron.GPTRows(tmp_path)


@pytest.mark.long
def test_torchtitan_gets_positions_and_labels_of_minus_100(tmp_path):
    dataset = make(tmp_path)
    batches = megatron.torchtitan(tmp_path, 2, rank=1, world_size=2, seed=4)
    plain = dataset.batches(2, seed=4, rank=1, world_size=2)
    for _ in range(3):
        inputs, labels = next(batches)
        batch = next(plain)
        assert np.array_equal(inputs["input"].numpy(), batch["tokens"])
        assert np.array_equal(inputs["positions"].numpy(), batch["position_ids"])
        expected = np.where(batch["loss_mask"] > 0, batch["labels"].astype(np.int64), -100)
        assert labels.dtype == torch.int64 and np.array_equal(labels.numpy(), expected)
    assert batches.state_dict() == plain.state_dict()
    again = megatron.torchtitan(tmp_path, 2, rank=1, world_size=2, seed=4)
    again.load_state_dict(plain.state_dict())
    assert torch.equal(next(again)[1], next(batches)[1])


@pytest.mark.long
def test_a_mixture_is_read_by_torchtitan_and_refused_where_rows_are_drawn_by_number(tmp_path):
    for name in ("a", "b"):
        make(tmp_path / name)
    mixture = open_dataset([tmp_path / "a", tmp_path / "b"], shares=[1, 2])
    with pytest.raises(
        ArgumentError, match="Mixture.*is a mixture.*\nhint: make GPTRows of each dataset"
    ):
        megatron.GPTRows(mixture)
    inputs, labels = next(megatron.torchtitan(mixture, 6, seed=1))
    expected = next(mixture.batches(6, seed=1))
    assert np.array_equal(inputs["input"].numpy(), expected["tokens"])
    assert np.array_equal((labels != -100).numpy(), expected["loss_mask"] > 0)


def test_weights_that_documents_give_are_in_megatron_s_loss_mask_and_refused_for_torchtitan(
    tmp_path,
):
    build(tmp_path, records(1, 60), [TASKS["causal"]], seq_length=64)
    rows = megatron.GPTRows(tmp_path / "out")
    own = rows.dataset.batch(range(4), columns=["loss_weights"])["loss_weights"]
    assert (
        np.array_equal(np.stack([rows[i]["loss_mask"].numpy() for i in range(4)]), own)
        and len(np.unique(own)) > 3
    )
    with pytest.raises(ArgumentError, match="documents of this dataset have loss weights"):
        megatron.torchtitan(tmp_path / "out", 2)


def test_a_task_that_weights_its_loss_is_refused_for_torchtitan(tmp_path):
    build(tmp_path, [{"text": "abcdefgh" * 20}], [TASKS["masked"]], seq_length=64)
    with pytest.raises(
        ArgumentError, match="task 'm' weights its loss, which torchtitan's loss does not read"
    ):
        megatron.torchtitan(tmp_path / "out", 2, prefix_bidirectional=False)
