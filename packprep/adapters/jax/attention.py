"""Compute attention over packed rows in JAX, with a dense mask or with splash attention.

Both implement one pattern:

    allowed(q, k) = same segment and (k ≤ q or k < prefix_ends[q])

It covers causal attention (prefix 0), prefix LM, and bidirectional attention (prefix = the
segment). Since k ≤ q is the same as k < q + 1, a slot attends to the keys of its segment that are
below one number. This number is the slot's reach:

    slot          0  1  2  3  4  5  6    segment 1 has a prefix of 2, segment 2 is causal
    segment_ids   1  1  1  1  2  2  0
    prefix_ends   2  2  2  2  4  4  0
    reach         2  2  3  4  5  6  7        max(q + 1, prefix_ends[q])

In cross attention, keys have separate ids (key_segment_ids). A query attends to all keys of its
segment, and a padding query to all keys of the row's first segment. The bidirectional
self-attention of an encoder is cross attention with the same ids for queries and keys.

Block diffusion follows another pattern, which dense_mask can compute and splash attention cannot.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from packprep.dataset import boundaries
from packprep.dataset.attention import RULES, in_blocks, with_block_ends
from packprep.errors import ArgumentError

_EMPTY, _PARTIAL, _FULL = 0, 1, 2  # values of splash attention's block_mask


def dense_mask(
    segment_ids: jax.Array,
    prefix_ends: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    block_lengths: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    block_starts: jax.Array | None = None,
) -> jax.Array:
    """Return a mask for jax.nn.dot_product_attention, with O(T²) memory.

    Padding attends to padding, so that every query has a key.

    Args:
        segment_ids: int[B, T].
        prefix_ends: int[B, T], or None for causal attention.
        position_ids: int[B, T], needed for block diffusion.
        block_lengths: int[B, T], needed for block diffusion, unless `block_starts` is given.
        key_segment_ids: int[B, K], segment ids of the keys in cross attention.
        block_starts: int[B, T], the positions at which blocks begin, for blocks that start at the
            answers of supervised documents.

    Returns:
        bool[B, 1, T, T], indexed [q, k]; bool[B, 1, T, K] for cross attention.

    Raises:
        ArgumentError: If position_ids is given without one of block_lengths and block_starts, or
            one of these without position_ids. Also if key_segment_ids is combined with prefix_ends,
            block_lengths or block_starts.

    Example:
        mask = dense_mask(batch["segment_ids"], batch["prefix_ends"])
        jax.nn.dot_product_attention(query, key, value, mask=mask)
    """
    block_columns = {"block_lengths": block_lengths, "block_starts": block_starts}
    blocks = {name: column for name, column in block_columns.items() if column is not None}
    if (position_ids is None) != (len(blocks) != 1):
        raise ArgumentError(
            "the blocks of block diffusion need position_ids and either block_lengths or"
            " block_starts\n"
            "hint: give the columns of the batch"
        )
    if key_segment_ids is not None:
        if prefix_ends is not None or blocks:
            raise ArgumentError(
                "prefix_ends and blocks require a row that attends to itself\n"
                "hint: leave them out of cross attention"
            )
        begin, end = _meetings(segment_ids, key_segment_ids)
        keys = jnp.arange(key_segment_ids.shape[-1])
        return ((begin[..., None] <= keys) & (keys < end[..., None]))[..., None, :, :]
    keys = jnp.arange(segment_ids.shape[-1])
    # A reach may be beyond the end of the segment, so ids are compared at the end.
    allowed = keys < _reach(segment_ids, prefix_ends)[..., None]
    if position_ids is not None:
        columns = {"position_ids": position_ids, **blocks}
        columns = with_block_ends(columns, keys, _runs, jnp.where)
        ranges = RULES["block_diffusion"].keys(keys, *_runs(segment_ids), columns, jnp.where)
        own_block, clean = [
            (begin[..., None] <= keys) & (keys < end[..., None]) for begin, end in ranges
        ]
        allowed = jnp.where(in_blocks(columns)[..., None], own_block | clean, allowed)
    return (allowed & (segment_ids[..., :, None] == segment_ids[..., None, :]))[..., None, :, :]


def _runs(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return for each slot the bounds of the run of equal ids that contains it.

    The arrays (begin, end) have the shape of `segment_ids`.

    Each run of padding is a segment here, and attends only to itself. So a query block and a key
    block in distant runs of padding have no pairs to compute.
    """
    slots = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    return boundaries.runs(
        segment_ids, slots, jnp, lambda values: jax.lax.cummax(values, axis=values.ndim - 1)
    )


def _meetings(segment_ids: jax.Array, key_segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return for each query of cross attention its first key, and the key after its last key.

    Both arrays have the shape of `segment_ids`.
    """
    by_row = jnp.vectorize(jnp.searchsorted, signature="(k),(q)->(q)")
    return boundaries.meetings(segment_ids, key_segment_ids, jnp.where, by_row)


def _reach(
    segment_ids: jax.Array, prefix_ends: jax.Array | None, key_segment_ids: jax.Array | None = None
) -> jax.Array:
    """Return the reach of each slot, int32[…, T]: it attends only to keys below this number.

    A reach may be beyond the end of the slot's segment, because the segment ids forbid such keys.
    In cross attention, the reach is the number of keys.
    """
    if key_segment_ids is not None:
        return jnp.full(segment_ids.shape, key_segment_ids.shape[-1], jnp.int32)
    queries = jnp.broadcast_to(
        jnp.arange(segment_ids.shape[-1], dtype=jnp.int32), segment_ids.shape
    )
    if prefix_ends is None:
        return queries + 1
    columns = {"prefix_ends": prefix_ends.astype(jnp.int32)}
    ((_, reach),) = RULES["prefix"].keys(queries, None, None, columns, jnp.where)
    return reach


def block_masks(
    segment_ids: jax.Array,
    prefix_ends: jax.Array | None = None,
    block: int = 128,
    key_segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Return a number for each pair (query block, key block) of one row: 0, 1 or 2.

    0 means that no query of the query block attends to a key of the key block. 2 means that all
    keys of the key block are below the reach of all queries of the query block. Segment ids may
    still forbid some of these pairs, and splash attention compares the ids separately. 1 means any
    other case. The cost is O(T + (T/block)²).

    Args:
        segment_ids: int[T].
        prefix_ends: int[T], or None for causal attention.
        block: Slots per block.
        key_segment_ids: int[K], for cross attention.

    Returns:
        int8[T/block, T/block], indexed [q, k]; int8[T/block, K/block] for cross attention.
    """
    ids = splash_segment_ids(segment_ids, key_segment_ids)
    queries, keys = ids.q.reshape(-1, block), ids.kv.reshape(-1, block)
    reach = _reach(segment_ids, prefix_ends, key_segment_ids).reshape(-1, block)
    begin = jnp.arange(len(keys)) * block  # first slot of each block of keys
    # Ids ascend along a row. So two blocks have a common id if their ranges of ids overlap.
    meet = (queries.min(axis=1)[:, None] <= keys[:, -1]) & (
        keys[:, 0] <= queries.max(axis=1)[:, None]
    )
    has_pairs = meet & (begin < reach.max(axis=1)[:, None])
    has_all_pairs = begin + block <= reach.min(axis=1)[:, None]
    return jnp.where(has_pairs, jnp.where(has_all_pairs, _FULL, _PARTIAL), _EMPTY).astype(jnp.int8)


def _next_to_load(needed: jax.Array, width: int) -> jax.Array:
    """Return, for each block of the kernel's grid, the needed block that the kernel loads next.

    For a needed block, this is the block itself. For any other block, it is the next needed block
    in the order of the grid, or the first needed block of the grid if none follows. The kernel
    prefetches it while it skips blocks that are not needed. The result contains the block's column
    in the grid, which is its index modulo `width`. The dtype is as narrow as possible, because the
    result occupies the small scalar memory of a TPU.

    Args:
        needed: bool, True for the blocks that are needed, in the order of the grid.
        width: Blocks per grid row.

    Returns:
        int8, int16 or int32, shaped as `needed`.
    """
    flat = needed.ravel()
    # A running minimum from the right gives each block the next needed block.
    places = jnp.where(flat, jnp.arange(flat.size, dtype=jnp.int32), flat.size)
    following = jax.lax.cummin(places, reverse=True)
    following = jnp.where(following < flat.size, following, following[0]) % width
    return following.astype(
        jnp.int8 if width <= 128 else jnp.int16 if width <= 32768 else jnp.int32
    ).reshape(needed.shape)


def _below_reach(reach, key):
    return key < reach


def splash_kernel(
    segment_ids: jax.Array,
    prefix_ends: jax.Array | None = None,
    *,
    block: int = 128,
    interpret: bool = False,
    key_segment_ids: jax.Array | None = None,
) -> splash_attention_kernel.SplashAttentionKernel:
    """Return splash attention's kernel for one row. Its block masks are arrays for this row.

    Create it inside jit. Call it with queries [heads, T, head_dim], keys and values [heads, K,
    head_dim], and the row's `splash_segment_ids`. The mask inside a block is computed from the
    row's reach, so no partial block is stored and memory is O(T + (T/block)²).

    Args:
        segment_ids: int[T].
        prefix_ends: int[T], or None for causal attention.
        block: Slots per block.
        interpret: Whether to run the slow interpreter instead of a TPU kernel.
        key_segment_ids: int[K], for cross attention.

    Returns:
        The kernel.
    """
    masks = block_masks(segment_ids, prefix_ends, block, key_segment_ids)
    needed = masks != _EMPTY
    # MaskInfo is declared with NumPy arrays, but it takes JAX arrays too.
    reach: Any = _reach(segment_ids, prefix_ends, key_segment_ids)
    by_query = MaskInfo(
        data_next=_next_to_load(needed, needed.shape[1])[None],
        mask_next=None,
        block_mask=masks[None],
        partial_mask_blocks=None,
        q_sequence=reach,
    )
    # The gradient of keys and values visits the grid column by column, so it loads blocks in
    # another order.
    by_key = by_query._replace(data_next=_next_to_load(needed.T, needed.shape[0]).T[None])
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash_attention_kernel.SplashAttentionKernel(
        by_query,
        by_query,
        by_key,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=_below_reach,
        interpret=interpret,
    )


def splash_segment_ids(
    segment_ids: jax.Array, key_segment_ids: jax.Array | None = None
) -> splash_attention_kernel.SegmentIds:
    """Return one row's segment ids in the form that the splash kernel reads.

    Each run of padding becomes a separate segment.

    Args:
        segment_ids: int[T].
        key_segment_ids: int[K], for cross attention.

    Returns:
        SegmentIds of int32[T] queries and int32[T] keys, or int32[K] keys for cross attention.
    """
    begin, _ = _runs(segment_ids if key_segment_ids is None else key_segment_ids)
    queries = (
        begin
        if key_segment_ids is None
        else _meetings(segment_ids, key_segment_ids)[0].astype(begin.dtype)
    )
    return splash_attention_kernel.SegmentIds(q=queries, kv=begin)


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    prefix_ends: jax.Array | None = None,
    *,
    scale: float | None = None,
    block: int = 128,
    interpret: bool | None = None,
    key_segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Compute jax.nn.dot_product_attention with `dense_mask`, without storing a mask of T².

    Outputs at padding are finite and meaningless. Outputs are NaN where prefix_ends is −1, because
    the kernel cannot compute block diffusion. The loader refuses such tasks.

    Args:
        query: float[B, T, heads, head_dim].
        key: float[B, T, key_heads, head_dim], where key_heads divides heads. [B, K, …] for cross
            attention.
        value: Shaped as `key`.
        segment_ids: int[B, T].
        prefix_ends: int[B, T], or None for causal attention.
        scale: Factor of the logits, by default 1/√head_dim.
        block: Slots per block, a multiple of 128 that divides T and K.
        interpret: Whether to run the slow interpreter instead of a TPU kernel. The default is True
            unless the backend is a TPU.
        key_segment_ids: int[B, K], for cross attention.

    Returns:
        float[B, T, heads, head_dim].

    Raises:
        ArgumentError: If `block` is not a multiple of 128 that divides T and K, or if prefix_ends
            and key_segment_ids are both given.

    Example:
        output = splash_attention(query, key, value, batch["segment_ids"], batch["prefix_ends"])
    """
    if prefix_ends is not None and key_segment_ids is not None:
        raise ArgumentError(
            "prefix_ends require a row that attends to itself\n"
            "hint: leave them out of cross attention"
        )
    head_dim = query.shape[3]
    for length in (query.shape[1], key.shape[1]):
        if block % 128 or block < 128 or length % block:
            raise ArgumentError(
                "splash attention needs a block size that is a multiple of 128 and divides the"
                f" row, but block is {block} and a row has {length} positions"
            )
    if interpret is None:
        interpret = jax.default_backend() != "tpu"
    query = query * (head_dim**-0.5 if scale is None else scale)

    def of_row(query, key, value, ids, ends, key_ids):
        kernel = splash_kernel(ids, ends, block=block, interpret=interpret, key_segment_ids=key_ids)
        heads_first = (jnp.swapaxes(array, 0, 1) for array in (query, key, value))
        output: Any = kernel(*heads_first, splash_segment_ids(ids, key_ids))
        output = jnp.swapaxes(output, 0, 1)
        return output if ends is None else jnp.where(ends[:, None, None] < 0, jnp.nan, output)

    return jax.vmap(of_row)(query, key, value, segment_ids, prefix_ends, key_segment_ids)
