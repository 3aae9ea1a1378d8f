import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

from hypothesis import given, settings
from hypothesis import strategies as st

from packprep import open_dataset
from packprep.adapters import torch_attention
from packprep.adapters.torch import loader, tensors
from packprep.dataset import attention
from packprep.errors import ArgumentError
from tests.adapters import rows_made
from tests.adapters.rows_made import LENGTH, Segment
from tests.dataset import synthetic

VARLEN = (
    torch_attention.flash_varlen,
    torch_attention.torch_varlen,
    torch_attention.transformers_kwargs,
)


@st.composite
def rows(draw, length=40):
    """Rows of segments of all rules, gaps between some."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        segments, room = [], length
        while room > 3 and draw(st.booleans()):
            rule = draw(st.sampled_from(["causal", "prefix", "both_ways", "blocks"]))
            n = draw(st.integers(1, min(room, 14)))
            n = max(2, n // 2 * 2) if rule == "blocks" else n
            size, gap = draw(st.integers(1, n)), draw(st.integers(0, min(2, room - n)))
            starts = ()
            if rule == "blocks" and draw(st.booleans()):
                chance = draw(st.randoms(use_true_random=False))
                starts = rows_made.answers(chance, n // 2, size)
            segments.append(Segment(rule, n, size, gap, starts))
            room -= n + segments[-1].gap
        made.append(segments)
    return made


def evaluated(mask_mod, n_rows, length):
    b, q, k = torch.meshgrid(*(torch.arange(n) for n in (n_rows, length, length)), indexing="ij")
    return mask_mod(b, 0, q, k)


@settings(max_examples=60)
@given(rows(), st.sampled_from([8, 16]))
def test_masks_are_each_document_s_own_rule(segments, block_size):
    batch = tensors(rows_made.batch(segments, 40))
    real = batch["segment_ids"] > 0
    mask = torch_attention.sdpa_mask(batch)
    assert mask.shape == (len(segments), 1, 40, 40) and mask.dtype == torch.bool
    expected = torch.from_numpy(rows_made.whole_mask(segments, 40))
    assert torch.equal(mask[:, 0][real], expected[real])
    assert not (mask[:, 0] & ~real[:, :, None] & real[:, None, :]).any(), "padding sees no document"
    assert mask.any(-1).all(), "no query is without keys"
    assert torch.equal(
        evaluated(torch_attention.flex_mask_mod(batch), len(segments), 40), mask[:, 0]
    )

    blocks = torch_attention.flex_block_mask(batch, block_size)
    n = -(-40 // block_size)
    padded = torch.zeros(len(segments), n * block_size, n * block_size, dtype=torch.bool)
    padded[:, :40, :40] = mask[:, 0]
    tiles = (
        padded.unflatten(2, (n, block_size))
        .unflatten(1, (n, block_size))
        .permute(0, 1, 3, 2, 4)
        .flatten(3)
    )
    dense = blocks.to_dense()[:, 0].bool()
    assert torch.equal(dense, tiles.any(-1))
    for row in range(len(segments)):
        for q in range(n):
            whole = blocks.full_kv_indices[
                row, 0, q, : blocks.full_kv_num_blocks[row, 0, q]
            ].tolist()
            assert whole == tiles[row, q].all(-1).nonzero()[:, 0].tolist()
            part = blocks.kv_indices[row, 0, q, : blocks.kv_num_blocks[row, 0, q]].tolist()
            assert part == (tiles[row, q].any(-1) & ~tiles[row, q].all(-1)).nonzero()[:, 0].tolist()


def test_the_block_mask_is_that_of_create_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    # In the second batch, x_t is 4 … 35 and x_0 is 36 … 67. Queries 32 … 39 see the keys 40 … 47 by
    # different ranges, and queries 24 … 31 see the keys 32 … 39 by two ranges that touch.
    for segments, length, block_size in (
        ([[Segment("prefix", 300, 150), Segment("blocks", 500, 32)], []], 1000, 128),
        ([[Segment("causal", 4), Segment("blocks", 64, 16)]], 72, 8),
    ):
        batch = tensors(rows_made.batch(segments, length))
        mine = torch_attention.flex_block_mask(batch, block_size)
        theirs = create_block_mask(
            torch_attention.flex_mask_mod(batch),
            len(segments), None, length, length, device="cpu", BLOCK_SIZE=block_size,
        )  # fmt: skip
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        assert torch.equal(mine.to_dense(), theirs.to_dense())
        assert mine.seq_lengths == theirs.seq_lengths


@pytest.mark.parametrize("name", ["causal", "prefix", "both_ways", "gaps"])
def test_masks_agree_with_the_loader_s_own_dense_mask(name):
    batch = rows_made.batch(rows_made.ALL[name], LENGTH)
    mask = torch_attention.sdpa_mask(batch)[:, 0].numpy()
    for r, ids in enumerate(batch["segment_ids"]):
        assert np.array_equal(
            mask[r][ids > 0], attention.dense_mask(ids, batch["prefix_ends"][r])[ids > 0]
        )


def test_block_diffusion_agrees_with_the_loader_s_own_block_mask():
    (segment,) = [Segment("blocks", 22, 4)]
    batch = rows_made.batch([[segment]], 22)
    half = np.arange(22) // 11
    expected = attention.block_mask(batch["segment_ids"][0], batch["position_ids"][0], half, 4)
    assert np.array_equal(torch_attention.sdpa_mask(batch)[0, 0].numpy(), expected)


@pytest.mark.long
def test_one_row_may_come_without_a_batch_axis():
    batch = rows_made.batch(rows_made.MIXED, LENGTH)
    row = {name: values[1] for name, values in batch.items()}
    assert torch.equal(torch_attention.sdpa_mask(row)[0], torch_attention.sdpa_mask(batch)[1])


def test_the_causal_reading_sees_nothing_ahead():
    batch = tensors(rows_made.batch(rows_made.PREFIX, LENGTH))
    mask = torch_attention.sdpa_mask(batch, prefix_bidirectional=False)[:, 0]
    assert not mask.triu(1).any()
    del batch["prefix_ends"]
    assert torch.equal(mask, torch_attention.sdpa_mask(batch, prefix_bidirectional=False)[:, 0])


def test_a_batch_without_its_rule_is_refused():
    batch = rows_made.batch(rows_made.PREFIX, LENGTH)
    del batch["prefix_ends"]
    for function in (torch_attention.sdpa_mask, torch_attention.flex_block_mask, *VARLEN):
        with pytest.raises(ArgumentError, match="no prefix_ends"):
            function(batch)
    batch = rows_made.batch(rows_made.BLOCKS, LENGTH)
    del batch["block_lengths"]
    with pytest.raises(ArgumentError, match="block diffusion, but the batch has no block_lengths"):
        torch_attention.sdpa_mask(batch)


def test_fault_13_positions_never_begin_again_without_a_mask_that_parts_the_segments():
    batch = tensors(rows_made.batch(rows_made.CAUSAL, LENGTH))
    mask = torch_attention.sdpa_mask(batch)[:, 0]
    ids = batch["segment_ids"]
    assert not (mask & (ids[:, :, None] != ids[:, None, :])).any()
    cu_seqlens = torch_attention.flash_varlen(batch)["cu_seqlens_q"]
    begins = set(((batch["position_ids"] == 0) & (ids > 0)).flatten().nonzero()[:, 0].tolist())
    assert begins <= set(cu_seqlens.tolist())


# Varlen keywords


def test_fault_15_cu_seqlens_start_at_0_and_cover_every_slot():
    batch = rows_made.batch(
        [[Segment("causal", 3), Segment("causal", 5)], [Segment("causal", 2)], []], 10
    )
    flash = torch_attention.flash_varlen(batch)
    assert (
        flash["cu_seqlens_q"].tolist() == [0, 3, 8, 10, 12, 20, 30]
        and flash["cu_seqlens_q"].dtype == torch.int32
    )
    assert flash["cu_seqlens_k"] is flash["cu_seqlens_q"]
    assert flash["max_seqlen_q"] == flash["max_seqlen_k"] == 10 and flash["causal"] is True
    other = torch_attention.torch_varlen(batch)
    assert (other["max_q"], other["max_k"], other["window_size"]) == (10, 10, (-1, 0))
    assert (
        torch.equal(other["cu_seq_q"], flash["cu_seqlens_q"])
        and other["cu_seq_k"] is other["cu_seq_q"]
    )
    theirs = torch_attention.transformers_kwargs(batch)
    assert theirs["max_length_q"] == theirs["max_length_k"] == 10 and theirs[
        "position_ids"
    ].shape == (1, 30)
    assert torch.equal(theirs["cu_seq_lens_q"], flash["cu_seqlens_q"])


@pytest.mark.long
def test_gaps_are_segments_of_their_own():
    flash = torch_attention.flash_varlen(rows_made.batch(rows_made.GAPS, 12))
    assert flash["cu_seqlens_q"].tolist() == [0, 3, 4, 6, 8, 12, 20, 24]


@pytest.mark.long
def test_an_empty_batch_has_no_segments():
    batch = {"segment_ids": np.zeros((0, 8), np.int32), "prefix_ends": np.zeros((0, 8), np.int32)}
    assert torch_attention.flash_varlen(batch)["cu_seqlens_q"].tolist() == [0]


def test_keywords_are_those_of_the_kernel():
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    assert set(torch_attention.torch_varlen(rows_made.batch(rows_made.CAUSAL, LENGTH))) <= set(
        parameters
    )


@pytest.mark.parametrize("function", VARLEN)
def test_prefixes_and_blocks_are_refused_by_row_and_segment(function):
    with pytest.raises(
        ArgumentError,
        match=r"row 0 .* segment 1 \(positions 0 to 9\) has a bidirectional prefix of 4",
    ):
        function(rows_made.batch(rows_made.PREFIX, LENGTH))
    with pytest.raises(
        ArgumentError,
        match="row 0 of the batch, segment 1 has the attention pattern of block diffusion",
    ):
        function(rows_made.batch(rows_made.MIXED, LENGTH))
    function(rows_made.batch(rows_made.PREFIX, LENGTH), prefix_bidirectional=False)


@pytest.mark.long
def test_a_prefix_of_one_slot_is_causal_and_whole_segments_go_both_ways():
    batch = rows_made.batch([[Segment("prefix", 7, 1), Segment("both_ways", 1)]], 9)
    assert torch_attention.flash_varlen(batch)["causal"] is True
    batch = rows_made.batch(rows_made.BOTH_WAYS, LENGTH)
    assert torch_attention.flash_varlen(batch)["causal"] is False
    assert torch_attention.torch_varlen(batch)["window_size"] == (-1, -1)
    with pytest.raises(ArgumentError, match="a causal Transformers model"):
        torch_attention.transformers_kwargs(batch)
    with pytest.raises(ArgumentError, match="segment 1"):
        torch_attention.flash_varlen(
            rows_made.batch([[Segment("both_ways", 5), Segment("causal", 2)]], 9)
        )


def test_a_dataset_is_refused_by_its_tasks_names(tmp_path):
    synthetic.make_dataset(tmp_path / "x", (3,))
    with pytest.raises(ArgumentError, match="task x attends bidirectionally in part of a row"):
        torch_attention.varlen_causal(open_dataset(tmp_path / "x"))
    assert torch_attention.varlen_causal(open_dataset(tmp_path / "x"), prefix_bidirectional=False)
    synthetic.make_dataset(tmp_path / "b", (3,), in_place=True, blocks=True)
    with pytest.raises(
        ArgumentError, match="task bd3 has the attention pattern of block diffusion"
    ):
        torch_attention.varlen_causal(open_dataset(tmp_path / "b"), prefix_bidirectional=False)
    synthetic.replace_in_manifest(
        tmp_path / "x", tasks=[synthetic.task("c"), synthetic.task("too_short", weight=0.0)]
    )
    assert torch_attention.varlen_causal(open_dataset(tmp_path / "x")) is True
    masked = synthetic.task("m", "bidirectional", "same_slot")
    drawn = {"tasks": {"m": {"segments": 4}, "too_short": {"segments": 0}}}
    synthetic.replace_in_manifest(
        tmp_path / "x", tasks=[masked, synthetic.task("too_short")], ledger=drawn
    )
    assert torch_attention.varlen_causal(open_dataset(tmp_path / "x")) is False
    drawn["tasks"]["too_short"]["segments"] = 1
    synthetic.replace_in_manifest(tmp_path / "x", ledger=drawn)
    with pytest.raises(ArgumentError, match="task m attends bidirectionally"):
        torch_attention.varlen_causal(open_dataset(tmp_path / "x"))


def test_fault_16_descriptors_of_several_rows_with_padded_tails_are_those_of_their_slots(tmp_path):
    synthetic.make_dataset(tmp_path / "d", (6,))
    synthetic.replace_in_manifest(tmp_path / "d", tasks=[synthetic.task(f"{i}") for i in range(3)])
    dataset = open_dataset(tmp_path / "d")
    wide = next(loader(dataset, 6, shuffle=False))
    flat = next(loader(dataset, 6, layout="thd", shuffle=False))
    assert (wide["segment_ids"][:, -1] == 0).sum() > 1, "several rows have a padded tail"
    for batch in (wide, flat):
        keywords = torch_attention.flash_varlen(batch, prefix_bidirectional=False)
        cu_seqlens = keywords["cu_seqlens_q"].tolist()
        assert cu_seqlens[-1] == 6 * 64 and keywords["max_seqlen_q"] == max(np.diff(cu_seqlens))
        expected = []
        for r in range(6):
            row = dataset.row(r)
            expected += [r * 64 + int(begin) for begin in row.segments["begin"]]
            if row.n_tokens < 64:
                expected.append(r * 64 + row.n_tokens)
        assert cu_seqlens[:-1] == expected
    assert torch.equal(flat["tokens"].view(6, 64), wide["tokens"])
