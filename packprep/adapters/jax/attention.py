"""Attention over packed rows in JAX: one rule, as a dense mask and as splash attention.

allowed(q, k) = same segment and (k ≤ q or k < prefix_ends[q]), which is causal (prefix 0), prefix
LM, and fully both ways (prefix = the segment). Since k ≤ q is k < q + 1, a slot sees the keys of
its segment below one number:

    slot          0  1  2  3  4  5  6        a prefix of 2 in segment 1, segment 2 causal, padding at 6
    segment_ids   1  1  1  1  2  2  0
    prefix_ends   2  2  2  2  4  4  0
    reach         2  2  3  4  5  6  7        max(q + 1, prefix_ends[q])

Cross attention, whose keys have ids of their own (key_segment_ids), lets a query see all keys of
its segment, and padding those of the row's first. An encoder's attention to itself, both ways in
each segment, is that of its ids to themselves.

Block diffusion follows another rule, which dense_mask can do and splash attention cannot.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from packprep.dataset import boundaries
from packprep.dataset.attention import RULES
from packprep.errors import ArgumentError

_EMPTY, _PARTIAL, _FULL = 0, 1, 2  # what splash attention's block_mask says


def dense_mask(
    segment_ids: jax.Array,
    prefix_ends: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    block_lengths: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
) -> jax.Array:
    """bool[B, 1, T, T], [q, k], for jax.nn.dot_product_attention; O(T²).

    All [B, T]; without prefix_ends causal. key_segment_ids: [B, K], for cross attention, bool[B, 1,
    T, K]. Block diffusion needs position_ids and block_lengths. Padding attends padding, so that no
    query is without a key.
    """
    if (position_ids is None) != (block_lengths is None):
        raise ArgumentError(
            "position_ids and block_lengths say together where block diffusion's blocks lie: give"
            " both"
        )
    if key_segment_ids is not None:
        if prefix_ends is not None or block_lengths is not None:
            raise ArgumentError(
                "prefix_ends and blocks are of a row that attends to itself: leave them out of"
                " cross attention"
            )
        begin, end = _meetings(segment_ids, key_segment_ids)
        keys = jnp.arange(key_segment_ids.shape[-1])
        return ((begin[..., None] <= keys) & (keys < end[..., None]))[..., None, :, :]
    keys = jnp.arange(segment_ids.shape[-1])
    allowed = keys < _reach(segment_ids, prefix_ends)[..., None]
    if position_ids is not None and block_lengths is not None:
        columns = {"position_ids": position_ids, "block_lengths": block_lengths}
        ranges = RULES["block_diffusion"].keys(keys, *_runs(segment_ids), columns, jnp.where)
        own, clean = [(begin[..., None] <= keys) & (keys < end[..., None]) for begin, end in ranges]
        allowed = jnp.where(block_lengths[..., None] > 0, own | clean, allowed)
    return (allowed & (segment_ids[..., :, None] == segment_ids[..., None, :]))[..., None, :, :]


def _runs(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(begin, end), shaped as the ids: the run of one id in which each slot lies. Each run of
    padding is a segment here: it sees itself, and blocks of padding far apart need not meet."""
    slots = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    return boundaries.runs(
        segment_ids, slots, jnp, lambda values: jax.lax.cummax(values, axis=values.ndim - 1)
    )


def _meetings(segment_ids: jax.Array, key_segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(begin, end), shaped as segment_ids: the keys that cross attention lets each query see."""
    by_row = jnp.vectorize(jnp.searchsorted, signature="(k),(q)->(q)")
    return boundaries.meetings(segment_ids, key_segment_ids, jnp.where, by_row)


def _reach(
    segment_ids: jax.Array, prefix_ends: jax.Array | None, key_segment_ids: jax.Array | None = None
) -> jax.Array:
    """int32[…, T]: the first slot that each slot does not see, if its segment went on so far."""
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
    """int8[T/block, T/block], [q, k], of one row: 0 no pair of the two blocks is allowed, 2 the
    rule by slots allows all of them, 1 otherwise. O(T + (T/block)²).

    segment_ids, prefix_ends: [T]. key_segment_ids: [K], for cross attention: [T/block, K/block]. A
    2 says nothing of segments, which splash attention compares by itself.
    """
    ids = splash_segment_ids(segment_ids, key_segment_ids)
    queries, keys = ids.q.reshape(-1, block), ids.kv.reshape(-1, block)
    reach = _reach(segment_ids, prefix_ends, key_segment_ids).reshape(-1, block)
    begin = jnp.arange(len(keys)) * block  # of each block of keys
    meet = (queries.min(axis=1)[:, None] <= keys[:, -1]) & (
        keys[:, 0] <= queries.max(axis=1)[:, None]
    )
    some = meet & (begin < reach.max(axis=1)[:, None])
    every = begin + block <= reach.min(axis=1)[:, None]
    return jnp.where(some, jnp.where(every, _FULL, _PARTIAL), _EMPTY).astype(jnp.int8)


def _next_to_load(needed: jax.Array, width: int) -> jax.Array:
    """Shaped as `needed` (bool, in the order of the grid): the place, modulo `width`, of the next
    block that is needed, so that it is on its way while empty ones are passed over; after the last
    one the first. As narrow as can be: it lies in a TPU's scalar memory, of which there is
    little."""
    flat = needed.ravel()
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
    """Splash attention's kernel of one row, made inside jit: its block masks are arrays of that
    row.

    segment_ids, prefix_ends: [T]; key_segment_ids: [K], for cross attention. Call it with [heads,
    T, head_dim], keys [heads, K, head_dim], and the row's `splash_segment_ids`. Inside a block the
    mask is computed from the row's reach, so no partial block is stored: O(T + (T/block)²) memory.
    """
    masks = block_masks(segment_ids, prefix_ends, block, key_segment_ids)
    needed = masks != _EMPTY
    # MaskInfo is declared to take numpy arrays, but JAX makes such too.
    reach: Any = _reach(segment_ids, prefix_ends, key_segment_ids)
    by_query = MaskInfo(
        data_next=_next_to_load(needed, needed.shape[1])[None],
        mask_next=None,
        block_mask=masks[None],
        partial_mask_blocks=None,
        q_sequence=reach,
    )
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
    """One row's ids as the kernel wants them, int32[T] each, every run of padding a segment of its
    own; with key_segment_ids, int32[K], those of cross attention."""
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
    """[B, T, heads, head_dim]: what jax.nn.dot_product_attention gives with `dense_mask`, without a
    mask of T².

    query, key, value: [B, T, heads, head_dim]; keys and values may have fewer heads, a divisor.
    segment_ids,
    prefix_ends: [B, T]; without prefix_ends causal. key_segment_ids: [B, K], of keys and values [B,
    K, …], for cross attention.
    scale: 1/√head_dim by default. block: a multiple of 128 that
    divides T. interpret: run without a TPU, slowly (default: wherever there is none). Outputs at
    padding are finite and mean nothing; where prefix_ends is −1 they are NaN, since the kernel
    cannot do block diffusion, which the loader refuses by name. Raises ArgumentError if T is no
    multiple of `block`.
    """
    if prefix_ends is not None and key_segment_ids is not None:
        raise ArgumentError(
            "prefix_ends are of a row that attends to itself: leave them out of cross attention"
        )
    head_dim = query.shape[3]
    for length in (query.shape[1], key.shape[1]):
        if block % 128 or block < 128 or length % block:
            raise ArgumentError(
                "splash attention works on blocks of a multiple of 128 slots that divides the row:"
                f" block is {block} and a row has {length}"
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
