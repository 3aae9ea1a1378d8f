from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.dataset import attention
from packprep.errors import ArgumentError
from tests.golden import cases
from tests.properties import few_and_many


def golden(fn):
    return pytest.mark.parametrize(
        "inputs, expected", [pytest.param(i, e, id=name) for name, i, e in cases(fn)]
    )


def cu(lengths):
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


@st.composite
def layouts(draw, padded=True, min_segments=0):
    """(lengths, cu_seqlens, cu_seqlens_padded or None, T, segment_ids)."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=min_segments, max_size=6))
    multiple = draw(st.sampled_from([1, 2, 4])) if padded else 1
    physical = cu([-(-n // multiple) * multiple for n in lengths])
    total = int(physical[-1]) + draw(st.integers(0, 5))
    ids = np.zeros(total, np.int64)
    for i, n in enumerate(lengths):
        ids[physical[i] : physical[i] + n] = i + 1
    return lengths, cu(lengths), physical if multiple > 1 else None, total, ids


def prefixes(draw, lengths):
    return np.array([draw(st.integers(0, n)) for n in lengths], np.int64)


# position_ids, prefix_ends, dense_mask


@golden("pack_row")
def test_positions_of_packed_rows(inputs, expected):
    assert (
        attention.position_ids(expected["cu_seqlens"], inputs["row_len"]).tolist()
        == expected["position_ids"]
    )
    seqlens, offsets = attention.thd(expected["segment_ids_1based"], len(inputs["docs"]))
    assert seqlens.tolist() == [len(doc) for doc in inputs["docs"]]
    assert offsets[:-1].tolist() == expected["cu_seqlens"][:-1]


@golden("te_cu_seqlens_padded_doc")
def test_positions_of_physically_padded_segments(inputs, expected):
    names = inputs["layout"].split()
    got = attention.position_ids(expected["cu_seqlens"], len(names), expected["cu_seqlens_padded"])
    assert got.tolist() == [0, 1, 2, 0, 0, 1, 0, 0, 0, 1, 2, 3, 0]


@given(layouts())
def test_position_ids_count_from_each_begin(layout):
    _, offsets, padded, total, ids = layout
    got = attention.position_ids(offsets, total, padded)
    assert got.dtype == np.int32
    for slot in range(total):
        assert got[slot] == (0 if ids[slot] == 0 else slot - np.argmax(ids == ids[slot]))


def brute_mask(ids, ends):
    total = len(ids)
    return np.array(
        [
            [ids[q] == ids[k] and (k <= q or k < ends[q]) for k in range(total)]
            for q in range(total)
        ],
        bool,
    ).reshape(total, total)


@given(st.data())
def test_prefix_ends_and_dense_mask_are_the_one_rule(data):
    lengths, offsets, padded, total, ids = data.draw(layouts())
    prefix = prefixes(data.draw, lengths)
    ends = attention.prefix_ends(offsets, prefix, total, padded)
    begins = offsets if padded is None else padded
    assert ends.dtype == np.int32
    assert ends.tolist() == [begins[i - 1] + prefix[i - 1] if i else 0 for i in ids]
    assert np.array_equal(attention.dense_mask(ids, ends), brute_mask(ids, ends))
    causal = attention.dense_mask(ids)
    assert np.array_equal(causal, brute_mask(ids, np.zeros(total))) and causal.diagonal().all()


@golden("prefix_lm_mask")
def test_dense_mask_is_the_prefix_lm_mask(inputs, expected):
    ids = np.array(inputs["segment_ids"]) + 1
    prefix = [sum(np.array(inputs["input_mask"])[ids == i]) for i in range(1, ids.max() + 1)]
    ends = attention.prefix_ends(cu(np.bincount(ids)[1:]), prefix, len(ids))
    assert attention.dense_mask(ids, ends).astype(int).tolist() == expected["mask"]


def test_a_prefix_with_another_rule_or_beyond_its_segment_is_refused_by_name():
    with pytest.raises(ArgumentError, match="segment 1 has prefix -1.*block"):
        attention.prefix_ends([0, 3, 8], [0, -1], 8)
    for prefix in (6, -2):
        with pytest.raises(ArgumentError, match=f"segment 1 has prefix {prefix}"):
            attention.prefix_ends([0, 3, 8], [0, prefix], 8)
    with pytest.raises(ArgumentError, match="1 entries, but there are 2"):
        attention.prefix_ends([0, 3, 8], [0], 8)


@golden("bd3_mask")
def test_block_mask_is_block_diffusions(inputs, expected):
    n = inputs["n"]
    positions, half = np.tile(np.arange(n), 2), np.repeat([0, 1], n)
    mask = attention.block_mask(np.ones(2 * n, int), positions, half, inputs["block_size"])
    assert mask.astype(int).tolist() == expected["mask"] and mask.sum() == expected["num_true"]


def test_block_mask_stays_inside_segments_and_no_query_is_empty():
    ids = np.array([1] * 6 + [2] * 4 + [0] * 2)
    positions, half = (
        np.array([0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 0]),
        np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]),
    )
    mask = attention.block_mask(ids, positions, half, 2)
    one = attention.block_mask(ids[:6], positions[:6], half[:6], 2)
    assert (
        np.array_equal(mask[:6, :6], one) and not mask[:6, 6:].any() and not mask[6:10, 10:].any()
    )
    assert mask.any(axis=1).all()


# labels


@golden("mtp_labels")
def test_next_token_labels_at_every_distance(inputs, expected):
    lengths, tokens, steps = (
        inputs["doc_lengths"],
        np.array(inputs["tokens"]),
        inputs["predicted_tokens"],
    )
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    trained = np.ones(len(tokens), int)
    # of targets; ours stands at the predicting slot
    for begin, end in inputs["loss_masking_spans"]:
        trained[max(begin - 1, 0) : end - 1] = 0
    trained[: len(tokens) - 1] &= tokens[1:] != -100
    [(begin, end)] = expected["windows"]
    for k in range(steps):
        got = attention.next_token_labels(tokens, ids, trained, k + 1)
        assert got[begin:end].tolist() == expected["labels"][0][k]
        assert (got[begin:end] != -100).astype(int).tolist() == expected["loss_masks"][0][k]


@given(st.data())
def test_fault_14_k_step_labels_never_cross_a_segment(data):
    _, _, _, total, ids = data.draw(layouts())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    tokens, mask, in_place = (
        rng.integers(0, 9, total),
        rng.integers(0, 2, total),
        rng.random(total) < 0.2,
    )
    for distance in (1, 2, 5):
        got = attention.next_token_labels(tokens, ids, mask, distance, in_place, -7)
        assert got.dtype == np.int64
        for i in range(total):
            there = i + distance
            good = (
                there < total and ids[i] == ids[there] != 0 and mask[there - 1] and not in_place[i]
            )
            assert got[i] == (tokens[there] if good else -7)
    batch = attention.next_token_labels(
        np.stack([tokens] * 2), np.stack([ids] * 2), np.stack([mask] * 2), 2
    )
    assert np.array_equal(batch[1], attention.next_token_labels(tokens, ids, mask, 2))


def test_the_documented_k_step_example():
    ids, ones = np.repeat([1, 2], [4, 6]), np.ones(10, int)
    for distance, mask in ((1, "1110111110"), (2, "1100111100")):
        labels = attention.next_token_labels(ones, ids, ones, distance)
        assert "".join(str(int(x != -100)) for x in labels) == mask
    with pytest.raises(ArgumentError):
        attention.next_token_labels(ones, ids, ones, 0)


@golden("label_counts")
def test_label_counts(inputs, expected):
    assert (
        attention.label_counts(inputs["mask"], cu(inputs["doc_lengths"])).tolist()
        == expected["counts"]
    )


@given(st.data())
def test_label_counts_are_each_segments_trained_slots(data):
    _, offsets, padded, total, ids = data.draw(layouts())
    mask = np.random.default_rng(total).integers(0, 2, total)
    got = attention.label_counts(mask, offsets, padded)
    assert got.dtype == np.int32 and got.tolist() == [
        int(mask[ids == i].sum()) if i else 0 for i in ids
    ]


# thd


@golden("thd_seqlens_offsets")
def test_thd(inputs, expected):
    seqlens, offsets = attention.thd(inputs["segment_ids"], inputs["max_segments_per_seq"])
    assert seqlens.tolist() == expected["seqlens_0fill"] and offsets.tolist() == expected["offsets"]
    seqlens, _ = attention.thd(inputs["segment_ids"], inputs["max_segments_per_seq"], fill=-1)
    assert seqlens.tolist() == expected["seed_seqlens_neg1fill"]


@given(st.lists(layouts(), min_size=1, max_size=4))
def test_fault_16_batched_descriptors_are_right_beyond_the_first_row_and_with_padded_tails(rows):
    total = max(row[3] for row in rows) or 1
    ids = np.stack([np.pad(row[4], (0, total - row[3])) for row in rows])
    seqlens, offsets = attention.thd(ids, 7)
    assert seqlens.dtype == offsets.dtype == np.int32 and offsets.shape == (len(rows), 8)
    for i, (lengths, offs, padded, _, _) in enumerate(rows):
        begins = (offs if padded is None else padded)[:-1].tolist()
        assert seqlens[i].tolist() == lengths + [0] * (7 - len(lengths))
        assert offsets[i].tolist() == begins + [-1] * (8 - len(lengths))


@pytest.mark.parametrize(
    "ids, words",
    [
        ([[1, 1, 2, 3]], "row 0, position 3.*exceeds max_segments = 2"),
        ([[1, 0, 0, 0], [1, 0, 1, 2]], "row 1, position 2.*segment 1 starts again"),
        ([[1, 3, 3, 0]], "row 0, position 1.*segment id 3 follows 1"),
        ([[2, 2, 0, 0]], "row 0, position 0.*segment id 2 follows 0"),
        ([[1, 2, 1, 0]], "row 0, position 2.*segment 1 starts again"),
        ([[1, -1, 0, 0]], "row 0, position 1.*-1"),
    ],
)
def test_fault_10_segments_beyond_the_maximum_and_broken_ids_are_refused_by_row_and_slot(
    ids, words
):
    with pytest.raises(ArgumentError, match=words):
        attention.thd(ids, 2)


PAIR_RULES = {
    "padding": None,
    "padding_causal": "top_left",
    "padding_causal_bottom_right": "bottom_right",
}


@golden("thd_mask_seqlens_offsets")
def test_thd_pair(inputs, expected):
    got = attention.thd_pair(
        inputs["segment_ids_q"],
        inputs["segment_ids_kv"],
        inputs["segment_pos_q"],
        inputs["segment_pos_kv"],
        inputs["max_segments_per_seq"],
        PAIR_RULES[inputs["mask_type"]],
        inputs["window_size"],
    )
    for name, values in zip(("q_seqlen", "kv_seqlen", "q_offset", "kv_offset"), got, strict=True):
        assert values.tolist() == expected["merged"][name], name
        assert values.dtype == np.int32


def unlike_stripes(ids_q, ids_kv, pos_q, pos_kv):
    """Segments of both sides of which slots are missing between, and that differ in number or in
    their last slot."""
    found = []
    for i in set(ids_q.tolist()) & set(ids_kv.tolist()) - {0}:
        q, kv = pos_q[ids_q == i], pos_kv[ids_kv == i]
        striped = any((np.diff(positions) > 1).any() for positions in (q, kv))
        if striped and (len(q) != len(kv) or q[-1] != kv[-1]):
            found.append(i)
    return found


def brute_pair(ids_q, ids_kv, pos_q, pos_kv, max_segments, causal, window):
    """By the mask itself."""
    allowed = (ids_q[:, None] == ids_kv) & (ids_q[:, None] != 0)
    pos_q, pos_kv = pos_q.copy(), pos_kv.copy()
    if causal == "bottom_right":
        for ids, pos in ((ids_q, pos_q), (ids_kv, pos_kv)):
            for i in np.unique(ids):
                pos[ids == i] -= pos[ids == i].max()
    distance = pos_q[:, None] - pos_kv
    if causal:
        allowed &= distance >= 0
    left, right = window or (-1, -1)
    allowed &= (left < 0) | (distance <= left)
    allowed &= (right < 0) | (-distance <= right)
    result = []
    for ids, counts in ((ids_q, allowed.any(axis=1)), (ids_kv, allowed.any(axis=0))):
        lengths = [int(((ids == i) & counts).sum()) for i in range(1, max_segments + 1)]
        kept = np.where(counts, ids, 0)
        starts = [t for t in range(len(ids)) if kept[t] and (t == 0 or kept[t - 1] != kept[t])]
        result.append((lengths, starts + [-1] * (max_segments + 1 - len(starts))))
    return result[0][0], result[1][0], result[0][1], result[1][1]


@few_and_many(80, 300, st.data())
def test_thd_pair_is_what_a_mask_would_say(data):
    causal = data.draw(st.sampled_from([None, "top_left", "bottom_right"]))
    window = data.draw(st.none() | st.tuples(st.integers(-1, 4), st.integers(-1, 4)))
    sides = []
    for _ in range(2):
        ids, pos = [], []
        for segment in data.draw(st.lists(st.integers(1, 4), max_size=4, unique=True).map(sorted)):
            positions = data.draw(
                st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True).map(sorted)
            )
            gap = data.draw(st.integers(0, 2))
            ids += [segment] * len(positions) + [0] * gap
            pos += positions + [0] * gap
        sides.append((np.array([*ids, 0]), np.array([*pos, 0])))
    (ids_q, pos_q), (ids_kv, pos_kv) = sides
    try:
        got = attention.thd_pair(ids_q, ids_kv, pos_q, pos_kv, 4, causal, window)
    except ArgumentError as error:
        wrong = unlike_stripes(ids_q, ids_kv, pos_q, pos_kv) if causal == "bottom_right" else []
        assert f"row 0, segment {min(wrong)}:" in str(error) if wrong else "pieces" in str(error)
        return
    assert causal != "bottom_right" or not unlike_stripes(ids_q, ids_kv, pos_q, pos_kv)
    for values, expected in zip(
        got, brute_pair(ids_q, ids_kv, pos_q, pos_kv, 4, causal, window), strict=True
    ):
        assert values.tolist() == expected
    batched = attention.thd_pair(
        np.stack([ids_q * 0, ids_q]),
        np.stack([ids_kv, ids_kv]),
        np.stack([pos_q, pos_q]),
        np.stack([pos_kv, pos_kv]),
        4,
        causal,
        window,
    )
    for values, one in zip(batched, got, strict=True):
        assert values[1].tolist() == one.tolist() and not (values[0] > 0).any()


@given(st.data())
def test_thd_pair_of_striped_sides_is_transformer_engines(data):
    """Bottom-right: its `_get_seqlens_offsets_thd` takes a pair iff n_q − position_q ≤ n_kv −
    position_kv, n the slots of the segment that a side holds. Equal wherever both sides hold as
    many slots of each segment, and its last one.
    """
    ids, sides = [], ([], [])
    for segment in range(1, data.draw(st.integers(1, 4)) + 1):
        end = data.draw(st.integers(0, 9))
        before = st.integers(0, max(end - 1, 0))
        many = data.draw(st.integers(0, min(end, 5)))
        ids += [segment] * (many + 1) + [0]
        for side in sides:
            positions = data.draw(
                st.lists(before, min_size=many, max_size=many, unique=True).map(sorted)
            )
            side += [*positions, end, 0]
    ids, q, kv = np.array(ids), *map(np.array, sides)
    held = np.array([(ids == i).sum() for i in ids])
    allowed = (ids[:, None] == ids) & (ids != 0) & ((held - q)[:, None] <= held - kv)
    try:
        got = attention.thd_pair(ids, ids, q, kv, 4, "bottom_right")
    except ArgumentError as error:
        assert "pieces" in str(error)
        return
    for counts, seqlens, offsets in zip(
        (allowed.any(axis=1), allowed.any(axis=0)), got[:2], got[2:], strict=True
    ):
        kept = np.where(counts, ids, 0)
        starts = np.flatnonzero((kept != 0) & (np.diff(kept, prepend=0) != 0))
        assert seqlens.tolist() == [int((kept == i).sum()) for i in range(1, 5)]
        assert offsets[offsets >= 0].tolist() == starts.tolist()


def test_bottom_right_refuses_sides_of_a_ring_by_row_and_segment():
    """Rank 0's queries, rank 1's keys: counted from each side's own end, query 0 would see key
    1."""
    q, kv = np.array([[0, 0, 0, 0], [1, 1, 2, 2]]), np.array([[1, 1, 2, 2], [1, 1, 2, 2]])
    words = "row 1, segment 1:.*queries contain 2 up to position 2, the keys 2 up to 3\nhint: .*'top_left'"
    with pytest.raises(ArgumentError, match=words):
        attention.thd_pair(q, kv, [[0, 2, 0, 2]] * 2, [[1, 3, 1, 3]] * 2, 2, "bottom_right")
    with pytest.raises(
        ArgumentError,
        match="row 0, segment 2:.*queries contain 2 up to position 3, the keys 3 up to 3",
    ):
        attention.thd_pair([1, 2, 2], [2, 2, 2], [0, 1, 3], [0, 1, 3], 2, "bottom_right")
    # no pair: nothing counts
    one_side = attention.thd_pair([1, 1, 0], [2, 2, 2], [0, 2, 0], [0, 1, 3], 2, "bottom_right")
    assert [values.tolist() for values in one_side] == [[0, 0], [0, 0], [-1] * 3, [-1] * 3]


def test_the_documented_striped_example_and_refusals():
    q, kv = [1, 1, 2, 2], [1, 1, 2, 2]
    got = attention.thd_pair(q, kv, [0, 2, 0, 2], [1, 3, 1, 3], 2, "top_left")
    assert [values.tolist() for values in got] == [[1, 1], [1, 1], [1, 3, -1], [0, 2, -1]]
    with pytest.raises(ArgumentError, match="segment_ids_kv: row 0, position 3"):
        attention.thd_pair(q, [1, 1, 2, 3], q, kv, 2)
    with pytest.raises(ArgumentError, match="causal"):
        attention.thd_pair(q, kv, q, kv, 2, "top-left")


# fixed widths


@golden("pad_cu_seqlens_static")
def test_pad_cu_seqlens(inputs, expected):
    got = attention.pad_cu_seqlens(inputs["cu_seqlens"], inputs["entries"])
    assert got.tolist() == expected["out"] and got.dtype == np.int32


def test_fault_29_the_tail_can_be_a_segment_or_join_the_last():
    pad = attention.pad_cu_seqlens
    assert pad([0, 3, 5], 5, 8, "segment").tolist() == [0, 3, 5, 8, 8]
    assert pad([0, 3, 5], 5, 8, "fold").tolist() == [0, 3, 8, 8, 8]
    assert pad([0, 3, 5], 5, 8, "none").tolist() == [0, 3, 5, 5, 5]
    assert pad([0, 3, 8], 4, 8, "segment").tolist() == [0, 3, 8, 8]
    assert pad([0], 3, 8, "segment").tolist() == pad([0], 3, 8, "fold").tolist() == [0, 8, 8]
    for arguments, words in [
        (([0, 3, 5], 2), "do not fit"),
        (([0, 3, 5], 3, 8, "segment"), "do not fit"),
        (([0, 3, 5], 4, None, "fold"), "requires length"),
        (([0, 3, 5], 4, 4, "fold"), "beyond the length 4"),
        (([0, 3, 5], 4, 8, "cut"), "tail"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            pad(*arguments)


@golden("seq_idx")
def test_seq_idx(inputs, expected):
    assert (
        attention.seq_idx(inputs["cu_seqlens"], inputs["total_tokens"]).tolist()
        == expected["seq_idx"]
    )


@given(layouts())
def test_seq_idx_counts_segments_and_padding_comes_next(layout):
    lengths, offsets, padded, total, ids = layout
    got = attention.seq_idx(offsets, total, padded)
    assert got.dtype == np.int32 and got.tolist() == [i - 1 if i else len(lengths) for i in ids]


@pytest.mark.parametrize("bad", [[1, 3], [0, 3, 2], [], [[0, 3]]])
def test_fault_15_cu_seqlens_that_do_not_start_at_0_and_ascend_are_refused(bad):
    for call in (
        lambda: attention.position_ids(bad, 8),
        lambda: attention.seq_idx(bad, 8),
        lambda: attention.pad_cu_seqlens(bad, 9),
        lambda: attention.context_parallel(bad, 2, 0),
        lambda: attention.micro_sequence(bad, 0, 2),
        lambda: attention.label_counts(np.ones(8), bad),
    ):
        with pytest.raises(ArgumentError, match="cu_seqlens should start at 0"):
            call()


def test_segments_beyond_the_length_and_padded_offsets_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match="beyond the length 4"):
        attention.position_ids([0, 3, 5], 4)
    for padded in ([0, 2, 8], [0, 4], [1, 4, 8]):
        with pytest.raises(ArgumentError, match="cu_seqlens_padded"):
            attention.position_ids([0, 3, 5], 8, padded)


# windows


@golden("micro_sequence")
def test_micro_sequence(inputs, expected):
    got = attention.micro_sequence(cu(inputs["doc_lengths"]), inputs["begin"], inputs["end"])
    for field, name in [
        ("cu_seqlens_q", "cu_seqlens_q"),
        ("cu_seqlens_k", "cu_seqlens_k"),
        ("document_index_q", "document_index_q"),
        ("document_index_k", "document_index_k"),
        ("position_ids", "position_index"),
    ]:
        values = getattr(got, field)
        assert values.tolist() == expected[name] and values.dtype == np.int32, field
    for field in ("max_seqlen_q", "max_seqlen_k", "first_document_begin"):
        assert getattr(got, field) == expected[field] and type(getattr(got, field)) is int
    assert np.diff(got.cu_seqlens_q).tolist() == expected["lengths_q"]


def bottom_right_mask(cu_q, cu_k):
    mask = np.zeros((cu_q[-1], cu_k[-1]), bool)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        n_q, n_k = q1 - q0, k1 - k0
        mask[q0:q1, k0:k1] = np.arange(n_k) <= np.arange(n_q)[:, None] + (n_k - n_q)
    return mask


@golden("varlen_causal_alignment")
def test_bottom_right_alignment_is_right_and_top_left_is_not(inputs, expected):
    lengths = inputs["doc_lengths"]
    window = attention.micro_sequence(cu(lengths), inputs["begin"], inputs["end"])
    mask = attention.dense_mask(np.repeat(np.arange(1, len(lengths) + 1), lengths), None, window)
    wrong = (bottom_right_mask(window.cu_seqlens_q, window.cu_seqlens_k) != mask).sum()
    assert wrong == expected["bottom_right_wrong_entries"] == 0


@few_and_many(80, 200, st.data())
def test_a_window_sees_exactly_what_its_queries_see_in_the_whole_row(data):
    lengths, offsets, padded, total, ids = data.draw(layouts())
    if total == 0:
        return
    prefix = prefixes(data.draw, lengths)
    ends = attention.prefix_ends(offsets, prefix, total, padded)
    begin = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(begin + 1, total))
    whole = attention.dense_mask(ids, ends)
    inside = any(ids[q] and end < ends[q] for q in range(begin, end))
    try:
        window = attention.micro_sequence(offsets, begin, end, prefix, padded)
    except ArgumentError as error:
        assert inside and f"ends at position {end}" in str(error)
        return
    assert not inside
    first = window.first_document_begin
    assert first <= begin and window.cu_seqlens_q[0] == window.cu_seqlens_k[0] == 0
    assert window.cu_seqlens_q[-1] == end - begin and window.cu_seqlens_k[-1] == end - first
    mask = attention.dense_mask(ids, ends, window)
    assert np.array_equal(mask, whole[begin:end, first:end])
    real = ids[begin:end] != 0
    assert mask[real].sum() == whole[begin:end][real].sum()
    assert np.array_equal(
        window.position_ids, attention.position_ids(offsets, total, padded)[begin:end]
    )
    assert ((window.document_index_q == 0) == ~real).all()
    if padded is None:
        causal = attention.dense_mask(ids, None, window)
        assert np.array_equal(
            bottom_right_mask(window.cu_seqlens_q, window.cu_seqlens_k)[real], causal[real]
        )


@few_and_many(80, 200, st.data())
def test_cut_points_are_ends_that_micro_sequence_takes(data):
    lengths, offsets, padded, total, _ = data.draw(layouts())
    prefix = prefixes(data.draw, lengths)
    row = SimpleNamespace(
        tokens=np.zeros(total),
        cu_seqlens=offsets,
        cu_seqlens_padded=padded,
        segments={"prefix": prefix},
    )
    size = data.draw(st.integers(1, 20))
    if size < prefix.max(initial=0):
        try:
            attention.cut_points(row, size)
        except ArgumentError as error:
            assert f"not fit into a window of {size}" in str(error)
        return
    ends = attention.cut_points(row, size).tolist()
    assert (ends[-1:] or [0]) == [total]
    for begin, end in zip([0, *ends], ends, strict=False):
        assert 0 < end - begin <= size
        attention.micro_sequence(offsets, begin, end, prefix, padded)


def test_windows_and_sizes_out_of_range_are_refused():
    for begin, end in ((3, 3), (-1, 2), (5, 4)):
        with pytest.raises(ArgumentError, match="window"):
            attention.micro_sequence([0, 8], begin, end)
    with pytest.raises(ArgumentError, match="prefix -1"):
        attention.micro_sequence([0, 8], 0, 8, [-1])


@golden("micro_sequence_windows")
def test_micro_windows(inputs, expected):
    got = attention.micro_windows(
        inputs["total_tokens"] - inputs["predicted_tokens"],
        inputs["micro_batch_splits"],
        inputs["sequence_data_parallel"],
        inputs["rank"],
    )
    assert got.tolist() == expected["windows"]


def test_micro_windows_refuse_what_does_not_divide():
    with pytest.raises(ArgumentError, match="not a multiple"):
        attention.micro_windows(17, 2)
    with pytest.raises(ArgumentError, match="rank 2"):
        attention.micro_windows(16, 2, 2, 2)


# context parallelism


@golden("context_parallel_layout")
def test_context_parallel(inputs, expected):
    offsets = cu(inputs["seq_lens"])
    for rank in range(inputs["cp_size"]):
        indices, rank_cu, padded = attention.context_parallel(
            offsets, inputs["cp_size"], rank, inputs["tp_size"]
        )
        assert (
            indices.tolist() == expected["rank_token_indices"][rank] and indices.dtype == np.int64
        )
        assert rank_cu.tolist() == expected["rank_cu_seqlens"][rank] and rank_cu.dtype == np.int32
        assert padded.tolist() == expected["cu_seqlens_padded"] and padded.dtype == np.int32


@given(layouts(padded=False), st.integers(1, 4), st.integers(1, 3))
def test_ranks_hold_every_slot_once_and_equally_many(layout, cp_size, tp_size):
    lengths, offsets, *_ = layout
    parts = [attention.context_parallel(offsets, cp_size, r, tp_size) for r in range(cp_size)]
    padded = parts[0][2]
    assert sorted(np.concatenate([p[0] for p in parts]).tolist()) == list(range(padded[-1]))
    assert (np.diff(padded) % (tp_size if cp_size == 1 else 2 * cp_size * tp_size) == 0).all()
    real = np.zeros(padded[-1], bool)
    for i, n in enumerate(lengths):
        real[padded[i] : padded[i] + n] = True
    for indices, rank_cu, whole in parts:
        assert len(indices) == padded[-1] // cp_size and np.array_equal(whole, padded)
        segment = np.searchsorted(padded, indices, side="right") - 1
        counts = np.bincount(segment[real[indices]], minlength=len(lengths))
        assert rank_cu.tolist() == cu(counts).tolist()
    for i, n in enumerate(lengths):  # the rows as they lie give the same
        assert padded[i + 1] - padded[i] >= n
    again = attention.context_parallel(
        offsets, cp_size, cp_size - 1, tp_size, cu_seqlens_padded=padded
    )
    for a, b in zip(again, parts[-1], strict=True):
        assert a.tolist() == b.tolist()


def test_context_parallel_takes_ends_that_repeat():
    own, filled = [0, 3, 5, 9], [0, 3, 5, 9, 9, 9]
    for cp_size, rank in ((1, 0), (2, 0), (2, 1)):
        indices, *offsets = attention.context_parallel(own, cp_size, rank)
        again, *more = attention.context_parallel(filled, cp_size, rank)
        assert np.array_equal(indices, again)
        for a, b in zip(offsets, more, strict=True):
            assert b.tolist() == [*a.tolist(), a[-1], a[-1]]


def test_context_parallel_refuses_segments_that_lie_on_other_multiples_and_ranks_out_of_range():
    with pytest.raises(ArgumentError, match="segment 1 has 6 positions, .*\n.*pad_seq_to_mult = 4"):
        attention.context_parallel([0, 3, 5], 2, 0, cu_seqlens_padded=[0, 4, 10])
    for cp_size, rank in ((2, 2), (2, -1), (0, 0)):
        with pytest.raises(ArgumentError, match="rank"):
            attention.context_parallel([0, 4], cp_size, rank)


# flatten


@given(st.lists(layouts(), min_size=1, max_size=4), st.sampled_from(["segment", "drop"]))
def test_flatten_makes_one_row_in_which_rows_stay_apart(rows, tail):
    total = max(row[3] for row in rows)
    ids = np.stack([np.pad(row[4], (0, total - row[3])) for row in rows])
    tokens = np.arange(ids.size).reshape(ids.shape)
    ends = np.zeros(ids.shape, np.int32)
    for b, (lengths, offsets, padded, n, _) in enumerate(rows):
        ends[b, :n] = attention.prefix_ends(offsets, [x // 2 for x in lengths], n, padded)
    batch = {
        "tokens": tokens,
        "segment_ids": ids,
        "prefix_ends": ends,
        "more": np.stack([tokens] * 3, axis=-1),
    }
    flat, offsets, longest = attention.flatten(batch, tail)
    kept = (ids != 0).ravel() if tail == "drop" else np.ones(ids.size, bool)
    assert flat["tokens"].tolist() == tokens.ravel()[kept].tolist()
    assert flat["more"].shape == (kept.sum(), 3)
    assert offsets.dtype == np.int32 and offsets[0] == 0 and offsets[-1] == kept.sum()
    assert (np.diff(offsets) > 0).all() and longest == np.diff(offsets).max(initial=0)
    n_segments = sum(len(row[0]) for row in rows)
    assert flat["segment_ids"].max(initial=0) == n_segments
    if tail == "drop":
        assert np.diff(offsets).tolist() == [n for row in rows for n in row[0]]
    # Flat attention is the rows' own, and nothing between rows.
    where = {int(token): i for i, token in enumerate(flat["tokens"])}
    expected = np.zeros((kept.sum(),) * 2, bool)
    for b in range(len(rows)):
        for q, k in zip(*np.nonzero(attention.dense_mask(ids[b], ends[b])), strict=True):
            if ids[b, q]:
                expected[where[int(tokens[b, q])], where[int(tokens[b, k])]] = True
    mask = attention.dense_mask(flat["segment_ids"], flat["prefix_ends"])
    real = flat["segment_ids"] != 0
    assert np.array_equal(mask[real], expected[real])


def test_flatten_keeps_the_prefix_ends_of_block_diffusion():
    ids = np.array([[0, 1, 1, 2, 2], [1, 1, 2, 2, 0]])
    ends = np.array([[0, 2, 2, -1, -1], [-1, -1, 3, 3, 0]])
    for tail, expected in (
        ("segment", [0, 2, 2, -1, -1, -1, -1, 8, 8, 0]),
        ("drop", [1, 1, -1, -1, -1, -1, 7, 7]),
    ):
        columns, _, _ = attention.flatten({"segment_ids": ids, "prefix_ends": ends}, tail)
        assert columns["prefix_ends"].tolist() == expected


def test_flatten_to_a_fixed_number_of_segments():
    ids = np.array([[1, 1, 2, 0], [1, 0, 2, 0], [0, 0, 0, 0]])
    for tail, starts in (("segment", [0, 2, 3, 4, 5, 6, 7, 8]), ("drop", [0, 2, 3, 4])):
        _, offsets, longest = attention.flatten({"segment_ids": ids}, tail, max_segments=4)
        total = 12 if tail == "segment" else 5
        assert offsets.tolist() == [*starts, *[total] * (13 - len(starts))] and longest == 4
    with pytest.raises(ArgumentError, match="row 1 of the batch has 4 segments.*= 3\nhint:.* = 4"):
        attention.flatten({"segment_ids": ids}, max_segments=3)
    assert len(attention.flatten({"segment_ids": ids}, "drop", max_segments=2)[1]) == 7


def test_flatten_of_a_full_batch():
    ids = np.array([[1, 1, 2, 0], [1, 1, 1, 1]])
    flat, offsets, longest = attention.flatten({"segment_ids": ids, "tokens": ids * 10})
    assert offsets.tolist() == [0, 2, 3, 4, 8] and longest == 4 and type(longest) is int
    assert flat["segment_ids"].tolist() == [1, 1, 2, 0, 3, 3, 3, 3]
    _, offsets, _ = attention.flatten({"segment_ids": ids}, "drop")
    assert offsets.tolist() == [0, 2, 3, 7]
    with pytest.raises(ArgumentError):
        attention.flatten({"segment_ids": ids}, "keep")


def test_flatten_leaves_what_has_one_number_a_row():
    ids = np.array([[1, 1, 0], [1, 2, 2]], np.uint16)
    for tail in ("segment", "drop"):
        columns, _, _ = attention.flatten(
            {"segment_ids": ids, "n_trained": np.array([1, 2], np.int32)}, tail
        )
        assert columns["n_trained"].tolist() == [1, 2]
