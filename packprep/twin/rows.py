"""A row's arrays from its segments, and the keyed orders of segments and rows."""

from packprep.twin import chance


def row_arrays(segments, seq_length, pad_id, pad_seq_to_mult=1):
    """dict of lists. segments: (slots, loss, labels) each, in row order. cu_seqlens_padded is None without padding."""
    tokens, labels = [pad_id] * seq_length, [pad_id] * seq_length
    segment_ids, loss_mask, position_ids = [0] * seq_length, [0] * seq_length, [0] * seq_length
    cu_seqlens, cu_seqlens_padded = [0], [0]
    for number, (slots, loss, segment_labels) in enumerate(segments, start=1):
        begin = cu_seqlens_padded[-1]
        physical = len(slots)
        while physical % pad_seq_to_mult:
            physical += 1
        if begin + physical > seq_length:
            raise ValueError(f"segment {number} ends at slot {begin + physical} of {seq_length}")
        for t, token in enumerate(slots):
            tokens[begin + t] = token
            labels[begin + t] = segment_labels[t]
            loss_mask[begin + t] = loss[t]
            segment_ids[begin + t] = number
            position_ids[begin + t] = t
        cu_seqlens.append(cu_seqlens[-1] + len(slots))
        cu_seqlens_padded.append(begin + physical)
    return {
        "tokens": tokens,
        "labels": labels,
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_padded": cu_seqlens_padded if pad_seq_to_mult > 1 else None,
    }


def ordered_rows(row_of_segment, keys, algorithm):
    """[[table index, …], …]: the shard's rows in their order, each with its segments in theirs.

    row_of_segment: packing's row of each segment of the table. keys: their 64-bit keys. next_fit keeps all order.
    """
    members: list[list[int]] = [[] for _ in range(max(row_of_segment, default=-1) + 1)]
    for index, row in enumerate(row_of_segment):
        members[row].append(index)
    if algorithm == "next_fit":
        return members
    members = [sorted(row, key=lambda i: (chance.bits64(keys[i], chance.SEGMENT_ORDER), i)) for row in members]
    order = sorted(range(len(members)), key=lambda r: (chance.bits64(keys[members[r][0]], chance.ROW_ORDER), r))
    return [members[r] for r in order]
