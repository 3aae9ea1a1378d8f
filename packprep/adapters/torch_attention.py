"""Compute attention arguments from a torch batch: dense masks, FlexAttention and varlen kernels.

An attention pattern (`packprep.dataset.attention.RULES`) gives the keys of each query as one range,
or as two ranges under block diffusion.

    rule             keys of query q, which lies in a segment [begin, end)
    causal           [begin, q + 1)
    prefix           [begin, max(q + 1, prefix_ends[q])), bidirectional if prefix = segment
    block diffusion  q in x_t: its own block, and x_0 before that block
                     q in x_0: x_0 up to the end of its block

Each run of padding is a causal segment, so that every query has a key. Ranges are exact, so a mask
compares one slot index with two or four bounds and never reads a key's segment.

A batch encodes its pattern in segment_ids and prefix_ends. If the dataset has block diffusion,
position_ids and block_lengths are needed too, or block_starts if blocks start at the answers of
supervised documents. A batch without prefix_ends is refused unless
prefix_bidirectional=False asks for causal attention.

The arrays of an encoder and a decoder (`packprep.dataset.encoder_decoder`) have three patterns,
selected by `part`. "decoder" is causal. In "cross", the decoder's queries attend to all inputs of
their segment. In "encoder", these inputs attend to each other. In "encoder" and "cross", padding
attends to the row's first segment.

Varlen kernels support only causal and fully bidirectional attention. If a batch or a dataset needs
another pattern, the error names the segment or the task.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from packprep.adapters import datasets_of
from packprep.dataset import boundaries
from packprep.dataset.attention import RULES, in_blocks, with_block_ends
from packprep.dataset.loader import Dataset
from packprep.dataset.mixture import Mixture
from packprep.dataset.rows import BLOCK_COLUMNS
from packprep.errors import ArgumentError

PARTS = ("encoder", "decoder", "cross")


class KeyRanges(NamedTuple):
    """The keys of each query, as one or two ranges of slots in the row.

    The ranges are [begin, end) and [more_begin, more_end). All bounds are int64[B, T].

    Attributes:
        begin: Start of the first range.
        end: End of the first range.
        n_keys: Number of slots in a row of keys. In cross attention it may differ from the number
            of slots in a row of queries.
        more_begin: Start of the second range, or None if the batch has no column of blocks.
        more_end: End of the second range, or None if the batch has no column of blocks.
    """

    begin: torch.Tensor
    end: torch.Tensor
    n_keys: int
    more_begin: torch.Tensor | None = None
    more_end: torch.Tensor | None = None


def _column(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    values = torch.as_tensor(batch[name]).long()
    return values[None] if values.ndim == 1 else values


def _runs(segment_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each slot the bounds (begin, end) of its run of equal ids, int64[B, T] each."""
    return boundaries.runs(
        segment_ids, _slots(segment_ids), torch, lambda values: values.cummax(-1).values
    )


def _in_blocks(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which slots have block diffusion, bool[B, T]; None without a column of blocks."""
    names = [name for name in BLOCK_COLUMNS if name in batch]
    return in_blocks({name: _column(batch, name) for name in names}) if names else None


def _slots(segment_ids: torch.Tensor) -> torch.Tensor:
    """Return 0 … T − 1 for every row, int64[B, T]."""
    return torch.arange(segment_ids.shape[-1], device=segment_ids.device).expand(segment_ids.shape)


def key_ranges(
    batch: Mapping[str, Any], prefix_bidirectional: bool = True, part: str | None = None
) -> KeyRanges:
    """Return the keys of every query of a batch, in O(T) per row.

    The module's docstring has the table of patterns.

    Args:
        batch: Columns [B, T] or [T].
        prefix_bidirectional: Pass False for causal attention also in prefixes and in segments of
            same-position tasks, such as masked diffusion. Block diffusion keeps its pattern.
        part: "encoder", "decoder" or "cross", for the arrays of an encoder and a decoder.

    Returns:
        The ranges, int64[B, T] each.

    Raises:
        ArgumentError: If `part` is unknown, or if the batch has no prefix_ends or no column of
            blocks where they are needed.
    """
    if part is not None:
        return _ranges_of_part(batch, part)
    segment_ids = _column(batch, "segment_ids")
    columns = {
        name: _column(batch, name) for name in RULES["block_diffusion"].columns if name in batch
    }
    columns = with_block_ends(columns, _slots(segment_ids), _runs, torch.where)
    of_query = (_slots(segment_ids), *_runs(segment_ids), columns, torch.where)
    rule = RULES["causal"]
    if prefix_bidirectional:
        if "prefix_ends" not in batch:
            raise ArgumentError(
                "the batch has no prefix_ends, so bidirectional prefixes are unknown\n"
                "hint: ask the loader for that column, or read every segment causally with"
                " prefix_bidirectional=False"
            )
        # Causal segments have an empty prefix, and bidirectional segments are all prefix. So this
        # pattern covers both.
        rule = RULES["prefix"]
    ((begin, end),) = rule.keys(*of_query)
    has_block = _in_blocks(batch)
    if has_block is None:
        if "prefix_ends" in batch and (columns["prefix_ends"] < 0).any():
            raise ArgumentError(
                "prefix_ends is -1, for block diffusion, but the batch has no block_lengths and no"
                " block_starts"
            )
        return KeyRanges(begin, end, segment_ids.shape[1])
    # Slots without blocks get an empty second range.
    own_block, clean = RULES["block_diffusion"].keys(*of_query)
    return KeyRanges(
        torch.where(has_block, own_block[0], begin),
        torch.where(has_block, own_block[1], end),
        segment_ids.shape[1],
        torch.where(has_block, clean[0], 0),
        torch.where(has_block, clean[1], 0),
    )


def _ranges_of_part(batch: Mapping[str, Any], part: str) -> KeyRanges:
    if part not in PARTS:
        raise ArgumentError(f"part is {part!r} and should be one of {', '.join(map(repr, PARTS))}")
    queries = _column(batch, "encoder_segment_ids" if part == "encoder" else "decoder_segment_ids")
    if part == "decoder":
        return KeyRanges(_runs(queries)[0], _slots(queries) + 1, queries.shape[1])
    keys = _column(batch, "encoder_segment_ids")
    return KeyRanges(
        *boundaries.meetings(queries, keys, torch.where, torch.searchsorted), keys.shape[1]
    )


def _sees(ranges: KeyRanges, index: Any, key: Any) -> torch.Tensor:
    """Return whether the queries at index `index` of the ranges attend to `key`, as bool."""
    seen = (key >= ranges.begin[index]) & (key < ranges.end[index])
    if ranges.more_begin is not None and ranges.more_end is not None:
        seen = seen | ((key >= ranges.more_begin[index]) & (key < ranges.more_end[index]))
    return seen


def sdpa_mask(
    batch: Mapping[str, Any], prefix_bidirectional: bool = True, part: str | None = None
) -> torch.Tensor:
    """Return the attn_mask argument of scaled_dot_product_attention, with O(T²) memory.

    Args:
        batch: As in `key_ranges`.
        prefix_bidirectional: As in `key_ranges`.
        part: As in `key_ranges`.

    Returns:
        bool[B, 1, T, T], indexed [q, k], True where the query attends to the key.

    Raises:
        ArgumentError: As in `key_ranges`.

    Example:
        mask = sdpa_mask(batch)
        scaled_dot_product_attention(query, key, value, attn_mask=mask)
    """
    ranges = key_ranges(batch, prefix_bidirectional, part)
    key = torch.arange(ranges.n_keys, device=ranges.begin.device)
    return _sees(ranges, (slice(None), None, slice(None), None), key)


def flex_mask_mod(
    batch: Mapping[str, Any], prefix_bidirectional: bool = True, part: str | None = None
):
    """Return a function mask_mod(b, h, q, k) for FlexAttention. It supports every pattern.

    Args:
        batch: As in `key_ranges`. The function's tensors are on the device of the batch.
        prefix_bidirectional: As in `key_ranges`.
        part: As in `key_ranges`.

    Returns:
        The function.

    Raises:
        ArgumentError: As in `key_ranges`.
    """
    return _mask_mod(key_ranges(batch, prefix_bidirectional, part))


def _mask_mod(ranges: KeyRanges):
    def mask_mod(b, h, q, k):
        return _sees(ranges, (b, q), k)

    return mask_mod


def flex_block_mask(
    batch: Mapping[str, Any],
    block_size: int = 128,
    prefix_bidirectional: bool = True,
    part: str | None = None,
):
    """Return a BlockMask for FlexAttention. It supports every pattern.

    The result equals the result of create_block_mask, but the mask is never evaluated over all T²
    pairs. The cost is O(T + (T / block_size)²). This works because a query's keys are one or two
    ranges. The key blocks that overlap a range are consecutive, and so are the key blocks that are
    completely in a range.

    Args:
        batch: As in `key_ranges`.
        block_size: Slots per block.
        prefix_bidirectional: As in `key_ranges`.
        part: As in `key_ranges`.

    Returns:
        The BlockMask, on the device of the batch.

    Raises:
        ArgumentError: As in `key_ranges`.

    Example:
        flex_attention(query, key, value, block_mask=flex_block_mask(batch))
    """
    from torch.nn.attention.flex_attention import BlockMask

    ranges = key_ranges(batch, prefix_bidirectional, part)
    n_rows, length = ranges.begin.shape
    n = -(-ranges.n_keys // block_size)
    # A query block touches the key blocks that a query's range overlaps. A key block is whole if
    # each query of the query block has a range that covers it.
    size = n_rows, -(-length // block_size), n
    overlaps, covers = (
        torch.zeros(size, dtype=torch.int64, device=ranges.begin.device) for _ in range(2)
    )
    for begin, end in _disjoint(ranges):
        touched_end = torch.where(end > begin, -(-end // block_size), 0)
        overlaps += _counts(begin // block_size, touched_end, block_size, n)
        covers += _counts(-(-begin // block_size), end // block_size, block_size, n)
    is_full = covers == block_size
    return BlockMask.from_kv_blocks(
        *_table((overlaps > 0) & ~is_full),
        *_table(is_full),
        BLOCK_SIZE=block_size,
        mask_mod=_mask_mod(ranges),
        seq_lengths=(length, ranges.n_keys),
    )


def _disjoint(ranges: KeyRanges) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the (begin, end) of each range, where two ranges that touch are joined to the first.

    At most one range of a query then covers a key block.
    """
    if ranges.more_begin is None or ranges.more_end is None:
        return [(ranges.begin, ranges.end)]
    # In block diffusion, the last block of x_t ends where x_0 begins.
    is_joined = ranges.more_begin == ranges.end
    return [
        (ranges.begin, torch.where(is_joined, ranges.more_end, ranges.end)),
        (torch.where(is_joined, ranges.more_end, ranges.more_begin), ranges.more_end),
    ]


def _table(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key blocks of each query block in the form that BlockMask takes.

    Args:
        blocks: bool[B, q, n], True if the query block uses the key block.

    Returns:
        For each query block, the number of key blocks that it uses, int32[B, 1, q], and the indices
        of all n key blocks, int32[B, 1, q, n]. The used key blocks come first.
    """
    key_blocks = blocks.int().sort(dim=-1, descending=True, stable=True).indices
    return blocks.sum(-1, dtype=torch.int32)[:, None], key_blocks.int()[:, None].contiguous()


def _counts(begin: torch.Tensor, end: torch.Tensor, block_size: int, n: int) -> torch.Tensor:
    """Count, for each query block and key block, the queries whose range has the key block.

    Only queries of the query block are counted. The key blocks begin … end − 1 are the range of a
    query.

    Args:
        begin: int64[B, T], first key block of each query.
        end: int64[B, T], end of the key blocks of each query.
        block_size: Queries per block.
        n: Number of key blocks.

    Returns:
        int64[B, q, n].
    """
    n_rows, length = begin.shape
    n_queries = -(-length // block_size)
    # A range adds 1 at its first key block, and −1 after its last one. The running sum counts
    # ranges.
    counts = torch.zeros(n_rows, n_queries * (n + 1), dtype=torch.int64, device=begin.device)
    row = torch.arange(length, device=begin.device) // block_size * (n + 1)
    has_keys = (end > begin).long()  # An empty range counts nowhere.
    counts.scatter_add_(1, row + begin.clamp(max=n), has_keys)
    counts.scatter_add_(1, row + end.clamp(0, n), -has_keys)
    return counts.view(n_rows, n_queries, n + 1).cumsum(-1)[..., :n]


# Varlen kernels take concatenated segments, and one pattern for all segments: causal or
# bidirectional.


def varlen_causal(dataset: Dataset | Mixture, prefix_bidirectional: bool = True) -> bool:
    """Return the `causal` flag that a varlen kernel needs for this dataset.

    Call it once, before training. All datasets of a mixture must need the same flag. Only tasks
    that have segments in the ledger count. This includes the implicit task too_short, which is
    causal.

    Args:
        dataset: The dataset or mixture.
        prefix_bidirectional: Pass False for causal attention also in prefixes and in segments of
            same-position tasks, such as masked diffusion.

    Returns:
        True for causal attention, False for bidirectional attention.

    Raises:
        ArgumentError: If varlen kernels cannot compute the pattern of a task. The message names the
            tasks.
    """
    rules: dict[str, dict[str, None]] = {}  # names of the tasks of each pattern, in order
    for member in datasets_of(dataset):
        drawn = member.manifest["ledger"].get("tasks", {})
        for task in member.tasks:
            if drawn.get(task["name"], {}).get("segments", 1):
                rules.setdefault(task["attention"], {})[task["name"]] = None
    ahead = {RULES[rule].ahead for rule in rules}
    if "blocks" in ahead:
        raise ArgumentError(
            f"task {', '.join(rules['block_diffusion'])} has the attention pattern of block"
            " diffusion, which no varlen kernel supports\n"
            "hint: use flex_block_mask or sdpa_mask"
        )
    if not prefix_bidirectional or ahead <= {"never"}:
        return True
    if ahead == {"segment"}:
        return False
    names = dict.fromkeys(
        name for rule, tasks in rules.items() if RULES[rule].ahead != "never" for name in tasks
    )
    raise ArgumentError(
        f"task {', '.join(names)} attends bidirectionally in part of a row, but a varlen kernel"
        " is causal either everywhere or nowhere\n"
        "hint: use flex_block_mask or sdpa_mask, or prefix_bidirectional=False to read prefixes"
        " causally"
    )


def _causal(
    batch: Mapping[str, Any], segment_ids: torch.Tensor, prefix_bidirectional: bool
) -> bool:
    """Return the `causal` flag that a varlen kernel needs for this batch.

    Raises:
        ArgumentError: If varlen kernels cannot compute a segment's pattern. The message has the row
            and the segment.
    """
    has_block = _in_blocks(batch)
    if has_block is not None and has_block.any():
        row, slot = _first(has_block)
        raise ArgumentError(
            f"row {row} of the batch, segment {int(segment_ids[row, slot])} has the attention"
            " pattern of block diffusion (prefix -1), which no varlen kernel supports\n"
            "hint: use flex_block_mask or sdpa_mask"
        )
    if not prefix_bidirectional:
        return True
    ranges = key_ranges(batch)
    begin, end = _runs(segment_ids)
    real, key_end = segment_ids > 0, ranges.end
    # A prefix of one slot is causal anyway.
    ahead = real & (end - begin > 1) & (_column(batch, "prefix_ends") > begin + 1)
    if not ahead.any():
        return True
    # The other flag is right only if every segment sees itself completely.
    short = real & (end - begin > 1) & (key_end < end)
    if not short.any():
        return False
    row, slot = _first(ahead)
    raise ArgumentError(
        f"row {row} of the batch, segment {int(segment_ids[row, slot])} (positions"
        f" {int(begin[row, slot])} to {int(end[row, slot])}) has a bidirectional prefix of"
        f" {int(_column(batch, 'prefix_ends')[row, slot] - begin[row, slot])} positions, but a"
        " varlen kernel is causal either everywhere in a batch or nowhere\n"
        "hint: use flex_block_mask or sdpa_mask, or prefix_bidirectional=False to read prefixes"
        " causally"
    )


def _first(where: torch.Tensor) -> tuple[int, int]:
    row, slot = (int(i) for i in where.nonzero()[0])
    return row, slot


def _varlen(batch: Mapping[str, Any], prefix_bidirectional: bool) -> tuple[torch.Tensor, int, bool]:
    """Return (cu_seqlens as int32, max_seqlen, causal) for the joined rows of a batch."""
    segment_ids = _column(batch, "segment_ids")
    causal = _causal(batch, segment_ids, prefix_bidirectional)
    if "cu_seqlens" in batch:
        return torch.as_tensor(batch["cu_seqlens"]), int(batch["max_seqlen"]), causal
    begin, _ = _runs(segment_ids)
    # Each run of equal ids is a sequence, also each run of padding, so the kernel writes every
    # slot.
    starts = (begin == _slots(segment_ids)).flatten().nonzero()[:, 0]
    cu_seqlens = torch.cat((starts, starts.new_tensor([segment_ids.numel()]))).int()
    return cu_seqlens, int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0, causal


def flash_varlen(batch: Mapping[str, Any], prefix_bidirectional: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of flash_attn_varlen_func(q, k, v, …) for a batch.

    q, k and v have shape [slots, heads, head_dim] and hold the rows in order. Each run of padding
    is a segment, including gaps of pad_seq_to_mult, so that the kernel writes every slot. Call this
    function before the batch moves to a GPU, because it reads values of the batch.

    Args:
        batch: A batch of layout "bshd" or "thd".
        prefix_bidirectional: As in `varlen_causal`.

    Returns:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k and causal.

    Raises:
        ArgumentError: If varlen kernels cannot compute the pattern of a segment.

    Example:
        flash_attn_varlen_func(query, key, value, **flash_varlen(batch))
    """
    cu_seqlens, longest, causal = _varlen(batch, prefix_bidirectional)
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": causal,
    }


def torch_varlen(batch: Mapping[str, Any], prefix_bidirectional: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of torch.nn.attention.varlen.varlen_attn(q, k, v, …).

    Args:
        batch: As in `flash_varlen`.
        prefix_bidirectional: As in `varlen_causal`.

    Returns:
        cu_seq_q, cu_seq_k, max_q, max_k and window_size.

    Raises:
        ArgumentError: If varlen kernels cannot compute the pattern of a segment.
    """
    cu_seqlens, longest, causal = _varlen(batch, prefix_bidirectional)
    return {
        "cu_seq_q": cu_seqlens,
        "cu_seq_k": cu_seqlens,
        "max_q": longest,
        "max_k": longest,
        "window_size": (-1, 0) if causal else (-1, -1),
    }


def transformers_kwargs(
    batch: Mapping[str, Any], prefix_bidirectional: bool = True
) -> dict[str, Any]:
    """Return Transformers' FlashAttentionKwargs and position_ids, for a model with flash attention.

    Such a model is causal. Its input_ids must be one row, as in layout "thd".

    Args:
        batch: As in `flash_varlen`.
        prefix_bidirectional: As in `varlen_causal`.

    Returns:
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, and position_ids [1, slots].

    Raises:
        ArgumentError: If the batch needs bidirectional attention, or if varlen kernels cannot
            compute the pattern of a segment.
    """
    cu_seqlens, longest, causal = _varlen(batch, prefix_bidirectional)
    if not causal:
        raise ArgumentError(
            "every segment of the batch attends bidirectionally, which the flash attention of a"
            " causal Transformers model does not support\n"
            "hint: use sdpa_mask, or prefix_bidirectional=False to read segments causally"
        )
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
        "position_ids": _column(batch, "position_ids").reshape(1, -1),
    }
