"""P6 to P10 slot by slot, as `docs/format.md` says them; the twin of `verification/slots.py`."""

P6, PAD_TOKEN, PAD_LABEL, PAD_LOSS, P8_TOKEN, P8_LABEL, P9, P10_NEXT, P10_IN_PLACE = range(9)


def slot_faults(tokens, labels, segment_ids, loss_mask, may, segments, next_token, pad, vocab_size):
    """[(code, row, slot, value)] of lists of rows; labels, may: None where there are none.

    segments: for each row its (begin, slots, prefix); next_token: for each row a flag a segment.
    """
    found = []
    for r, row in enumerate(tokens):
        owner = {
            t: g
            for g, (begin, slots, _) in enumerate(segments[r])
            for t in range(begin, begin + slots)
        }
        for t, token in enumerate(row):
            label = None if labels is None else labels[r][t]
            if t not in owner:
                wrong = [
                    (P6, segment_ids[r][t] != 0, segment_ids[r][t]),
                    (PAD_TOKEN, token != pad, token),
                    (PAD_LABEL, label is not None and label != pad, label),
                    (PAD_LOSS, loss_mask[r][t] != 0, loss_mask[r][t]),
                ]
            else:
                g = owner[t]
                begin, slots, prefix = segments[r][g]
                is_last = t == begin + slots - 1
                plain = next_token[r][g]
                follows = (
                    not is_last and t + 1 >= begin + prefix and (may is None or may[r][t + 1] != 0)
                )
                target = pad if is_last else row[t + 1]
                wrong = [
                    (P6, segment_ids[r][t] != g + 1, segment_ids[r][t]),
                    (P8_TOKEN, not 0 <= token < vocab_size, token),
                    (P9, plain and loss_mask[r][t] != int(follows), loss_mask[r][t]),
                    (P8_LABEL, label is not None and not 0 <= label < vocab_size, label),
                    (P10_NEXT, label is not None and plain and label != target, label),
                    (
                        P10_IN_PLACE,
                        label is not None and not plain and label != token and loss_mask[r][t] == 0,
                        token,
                    ),
                ]
            found += [(code, r, t, value) for code, is_wrong, value in wrong if is_wrong]
    return found
