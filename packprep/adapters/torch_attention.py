"""Attention arguments from a batch of packprep.adapters.torch: dense masks, FlexAttention, varlen
kernels.

A rule (`packprep.dataset.attention.RULES`) says for each query which slots it sees: one range of
keys, or two under block diffusion.

    rule             keys of query q, which lies in a segment [begin, end)
    causal           [begin, q + 1)
    prefix           [begin, max(q + 1, prefix_ends[q]))              prefix = the whole segment: both ways everywhere
    block diffusion  q in x_t: its own block, and x_0 before that block;   q in x_0: x_0 up to the end of its block

Padding is a segment of its own in each run, and causal, so that no query is without keys. Ranges
are exact, so masks compare one slot number with two or four bounds and never look at a key's
segment. A batch says its rule by segment_ids, prefix_ends and, where block diffusion is in the
dataset, position_ids and block_lengths. A batch without prefix_ends is refused unless
prefix_bidirectional=False asks for the causal reading.

The arrays of an encoder and a decoder (`packprep.dataset.encoder_decoder`) have three rules, by
`part`: "decoder" is causal; in "cross" the decoder's queries see all inputs of their segment, and
in "encoder" those see each other; padding sees the row's first segment there.

Varlen kernels know causal and both ways only. A batch, or a dataset, that needs more is refused by
name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from packprep.adapters import datasets_of
from packprep.dataset import boundaries
from packprep.dataset.attention import RULES
from packprep.dataset.loader import Dataset
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError

PARTS = ("encoder", "decoder", "cross")


class KeyRanges(NamedTuple):
    """The keys that each query sees, in slots of its row: [begin, end) and [more_begin, more_end);
    int64[B, T] each.

    n_keys: slots of a row of keys, which under cross attention differ from those of a row of
    queries.
    """

    begin: torch.Tensor
    end: torch.Tensor
    n_keys: int
    more_begin: torch.Tensor | None = None  # None: block diffusion is not in the batch's dataset
    more_end: torch.Tensor | None = None


def _column(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    values = torch.as_tensor(batch[name]).long()
    return values[None] if values.ndim == 1 else values


def _runs(segment_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(begin, end) int64[B, T] of the run of equal ids in which each slot lies."""
    return boundaries.runs(
        segment_ids, _slots(segment_ids), torch, lambda values: values.cummax(-1).values
    )


def _slots(segment_ids: torch.Tensor) -> torch.Tensor:
    """int64[B, T]: 0 … T − 1 in every row."""
    return torch.arange(segment_ids.shape[-1], device=segment_ids.device).expand(segment_ids.shape)


def key_ranges(
    batch: Mapping[str, Any], prefix_bidirectional: bool = True, part: str | None = None
) -> KeyRanges:
    """The keys of every query of a batch, [B, T] or [T], in O(T); the table at the top says them.

    prefix_bidirectional False: prefixes and in-place segments are read causally; block diffusion
    keeps its rule.
    part: "encoder", "decoder" or "cross" of the arrays of an encoder and a decoder.
    """
    if part is not None:
        return _ranges_of_part(batch, part)
    segment_ids = _column(batch, "segment_ids")
    columns = {
        name: _column(batch, name) for name in RULES["block_diffusion"].columns if name in batch
    }
    of_query = (_slots(segment_ids), *_runs(segment_ids), columns, torch.where)
    rule = RULES["causal"]
    if prefix_bidirectional:
        if "prefix_ends" not in batch:
            raise ArgumentError(
                "the batch has no prefix_ends, so which slots see ahead is not known; ask the"
                " loader for that column, or read every segment causally with"
                " prefix_bidirectional=False"
            )
        rule = RULES["prefix"]
    ((begin, end),) = rule.keys(*of_query)
    if "block_lengths" not in batch:
        if "prefix_ends" in batch and (columns["prefix_ends"] < 0).any():
            raise ArgumentError(
                "prefix_ends is -1, which is block diffusion, but the batch has no block_lengths"
            )
        return KeyRanges(begin, end, segment_ids.shape[1])
    in_blocks = columns["block_lengths"] > 0
    own, clean = RULES["block_diffusion"].keys(*of_query)
    return KeyRanges(
        torch.where(in_blocks, own[0], begin),
        torch.where(in_blocks, own[1], end),
        segment_ids.shape[1],
        torch.where(in_blocks, clean[0], 0),
        torch.where(in_blocks, clean[1], 0),
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


def _sees(ranges: KeyRanges, at: Any, key: Any) -> torch.Tensor:
    """bool: whether the queries at the index `at` of the ranges see `key`."""
    seen = (key >= ranges.begin[at]) & (key < ranges.end[at])
    if ranges.more_begin is not None and ranges.more_end is not None:
        seen = seen | ((key >= ranges.more_begin[at]) & (key < ranges.more_end[at]))
    return seen


def sdpa_mask(
    batch: Mapping[str, Any], prefix_bidirectional: bool = True, part: str | None = None
) -> torch.Tensor:
    """bool[B, 1, T, T], [q, k], O(T²): attn_mask of scaled_dot_product_attention; True: the key is
    seen."""
    ranges = key_ranges(batch, prefix_bidirectional, part)
    key = torch.arange(ranges.n_keys, device=ranges.begin.device)
    return _sees(ranges, (slice(None), None, slice(None), None), key)


def flex_mask_mod(
    batch: Mapping[str, Any], prefix_bidirectional: bool = True, part: str | None = None
):
    """mask_mod(b, h, q, k) of FlexAttention for any rule; tensors lie where the batch's do."""
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
    """The BlockMask of FlexAttention for any rule: what create_block_mask gives, in O(T + (T /
    block_size)²).

    The mask is never evaluated over all T² pairs: a query's keys are ranges, so the blocks that it
    touches and those that it sees whole are ranges too.
    """
    from torch.nn.attention.flex_attention import BlockMask

    ranges = key_ranges(batch, prefix_bidirectional, part)
    n_rows, length = ranges.begin.shape
    n = -(-ranges.n_keys // block_size)
    touched = torch.zeros(
        n_rows, -(-length // block_size), n, dtype=torch.bool, device=ranges.begin.device
    )
    whole = torch.zeros_like(touched)
    pairs = [(ranges.begin, ranges.end)]
    if ranges.more_begin is not None and ranges.more_end is not None:
        pairs.append((ranges.more_begin, ranges.more_end))
    for begin, end in pairs:
        touched |= (
            _counts(
                begin // block_size,
                torch.where(end > begin, -(-end // block_size), 0),
                block_size,
                n,
            )
            > 0
        )
        whole |= _counts(-(-begin // block_size), end // block_size, block_size, n) == block_size
    return BlockMask.from_kv_blocks(
        *_table(touched & ~whole),
        *_table(whole),
        BLOCK_SIZE=block_size,
        mask_mod=_mask_mod(ranges),
        seq_lengths=(length, ranges.n_keys),
    )


def _table(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(how many int32[B, 1, q], which int32[B, 1, q, n]) key blocks of each query block, those that
    are set first."""
    which = blocks.int().sort(dim=-1, descending=True, stable=True).indices
    return blocks.sum(-1, dtype=torch.int32)[:, None], which.int()[:, None].contiguous()


def _counts(first: torch.Tensor, end: torch.Tensor, block_size: int, n: int) -> torch.Tensor:
    """int64[B, q, n]: how many queries of a block have the key block, of n, in their [first,
    end)."""
    n_rows, length = first.shape
    n_queries = -(-length // block_size)
    counts = torch.zeros(n_rows, n_queries * (n + 1), dtype=torch.int64, device=first.device)
    row = torch.arange(length, device=first.device) // block_size * (n + 1)
    some = (end > first).long()  # an empty range counts nowhere
    counts.scatter_add_(1, row + first.clamp(max=n), some)
    counts.scatter_add_(1, row + end.clamp(0, n), -some)
    return counts.view(n_rows, n_queries, n + 1).cumsum(-1)[..., :n]


# Varlen kernels: segments one after another, causal in all or in none


def varlen_causal(dataset: Dataset | Mixture, prefix_bidirectional: bool = True) -> bool:
    """Whether a varlen kernel takes this dataset with causal=True (False: both ways); else refused
    by the tasks' names.

    Ask it once, before training; a mixture is asked for the tasks of all of its datasets. A task
    without a segment does not count; the implicit task too_short, which is causal, counts where the
    ledger has segments of it.
    """
    rules: dict[str, dict[str, None]] = {}  # attention rule → names of tasks, in order
    for each in datasets_of(dataset):
        drawn = each.manifest["ledger"].get("tasks", {})
        for task in each.tasks:
            if drawn.get(task["name"], {}).get("segments", 1):
                rules.setdefault(task["attention"], {})[task["name"]] = None
    ahead = {RULES[rule].ahead for rule in rules}
    if "blocks" in ahead:
        raise ArgumentError(
            f"task {', '.join(rules['block_diffusion'])} has block diffusion's rule, which no"
            " varlen kernel has; use flex_block_mask or sdpa_mask"
        )
    if not prefix_bidirectional or ahead <= {"never"}:
        return True
    if ahead == {"segment"}:
        return False
    names = dict.fromkeys(
        name for rule, tasks in rules.items() if RULES[rule].ahead != "never" for name in tasks
    )
    raise ArgumentError(
        f"task {', '.join(names)} sees ahead in part of a row, and a varlen kernel is causal in all"
        " of it or in none; use flex_block_mask or sdpa_mask, or prefix_bidirectional=False for"
        " the causal reading"
    )


def _causal(
    batch: Mapping[str, Any], segment_ids: torch.Tensor, prefix_bidirectional: bool
) -> bool:
    """varlen_causal of one batch, refused by row and segment."""
    if "block_lengths" in batch and (_column(batch, "block_lengths") > 0).any():
        row, slot = _first(_column(batch, "block_lengths") > 0)
        raise ArgumentError(
            f"row {row} of the batch, segment {int(segment_ids[row, slot])} has block diffusion's"
            " rule (prefix -1), which no varlen kernel has; use flex_block_mask or sdpa_mask"
        )
    if not prefix_bidirectional:
        return True
    ranges = key_ranges(batch)
    begin, end = _runs(segment_ids)
    real, last = segment_ids > 0, ranges.end
    ahead = real & (end - begin > 1) & (_column(batch, "prefix_ends") > begin + 1)
    if not ahead.any():
        return True
    short = real & (end - begin > 1) & (last < end)
    if not short.any():
        return False
    row, slot = _first(ahead)
    raise ArgumentError(
        f"row {row} of the batch, segment {int(segment_ids[row, slot])} (slots"
        f" {int(begin[row, slot])} to {int(end[row, slot])}) has a prefix of"
        f" {int(_column(batch, 'prefix_ends')[row, slot] - begin[row, slot])} slots that see each"
        " other both ways, and a varlen kernel is causal in all of a batch or in none; use"
        " flex_block_mask or sdpa_mask, or prefix_bidirectional=False for the causal reading"
    )


def _first(where: torch.Tensor) -> tuple[int, int]:
    row, slot = (int(i) for i in where.nonzero()[0])
    return row, slot


def _varlen(batch: Mapping[str, Any], prefix_bidirectional: bool) -> tuple[torch.Tensor, int, bool]:
    """(cu_seqlens int32, max_seqlen, causal) of a batch's slots, rows one after another."""
    segment_ids = _column(batch, "segment_ids")
    causal = _causal(batch, segment_ids, prefix_bidirectional)
    if "cu_seqlens" in batch:
        return torch.as_tensor(batch["cu_seqlens"]), int(batch["max_seqlen"]), causal
    begin, _ = _runs(segment_ids)
    starts = (begin == _slots(segment_ids)).flatten().nonzero()[:, 0]
    cu_seqlens = torch.cat((starts, starts.new_tensor([segment_ids.numel()]))).int()
    if segment_ids.numel() == 0:
        cu_seqlens = cu_seqlens[:1]
    return cu_seqlens, int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0, causal


def flash_varlen(batch: Mapping[str, Any], prefix_bidirectional: bool = True) -> dict[str, Any]:
    """Keywords of flash_attn_varlen_func(q, k, v, …), whose q, k, v are [slots, heads, head_dim],
    rows one after another.

    Takes a batch of either layout. Every run of padding is a segment, a gap of pad_seq_to_mult too,
    so that no slot is left unwritten. Call it before the batch goes to a GPU: it looks at values.
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
    """Keywords of torch.nn.attention.varlen.varlen_attn(q, k, v, …); as flash_varlen."""
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
    """Transformers' FlashAttentionKwargs and position_ids [1, slots], for a model with flash
    attention.

    Such a model is causal: a batch that is both ways is refused. Its input_ids have to be one row,
    as layout "thd" is.
    """
    cu_seqlens, longest, causal = _varlen(batch, prefix_bidirectional)
    if not causal:
        raise ArgumentError(
            "every segment of the batch sees itself both ways, and a causal Transformers model has"
            " no such flash path; give it sdpa_mask, or prefix_bidirectional=False for the causal"
            " reading"
        )
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
        "position_ids": _column(batch, "position_ids").reshape(1, -1),
    }
