"""block_diffusion: candidates of the first copy give way to the mask, each with its block's level; the second is clean.

`parameters` of a segment: noise_range, block_length.
"""

from packprep.twin.chance import NOISE_LEVEL, quantised, threshold, uniform40, uniforms

COPIES = 2


def law(n, facts):
    return n


def noise(task, ids, segments, trainable, tokens, loss_mask, epoch):
    parameters, (mask_id, _) = task["parameters"], ids
    low, high = parameters["noise_range"]
    result = []
    for key, at, count, _, skipped, half in segments:
        blocks = []
        for block in range(-(-half // parameters["block_length"])):
            level = quantised(low + (high - low) * uniforms(key, NOISE_LEVEL, block, epoch))
            blocks.append((level, 1.0 / level))
        for i in range(count):
            level = blocks[(skipped + i) // parameters["block_length"]][0]
            if tokens[at + i] != mask_id and uniform40(key, i, epoch) < threshold(level):
                tokens[at + i] = mask_id
                loss_mask[at + i] = 1
        result.append((0.0, 1.0, blocks))
    return result
