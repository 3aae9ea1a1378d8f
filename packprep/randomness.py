"""Generate all random numbers, each as a pure function of a 64-bit key and a purpose.

The generator is Philox4x32-10, the counter-based generator of TensorFlow, PyTorch and cuRAND. See
Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. It is tested
with its authors' test vectors. A 64-bit key is Philox's key. The 128-bit counter selects the
number:

    counter word    0            1          2          3
                    index // 4   attempt    purpose    epoch

A key and a counter give a block of four 32-bit words. Number `index` is word `index % 4` of its
block. The generator has no state, so any number can be computed at any time, in any order.
`kernel/chance.py` has compiled versions of these functions.
"""

import hashlib
import json

import numpy as np

# These are the purposes of random numbers. Each purpose has an independent stream under each key.
# The values must not change within a format version.
SEGMENT_KEY = 1  # the key of a segment
TASK = 2  # the task of a segment
SEGMENT_LENGTH = 3  # the random length of a segment (random_length)
ROLL = 4  # rotation of a span mask
PIVOT = 5  # the end of a prefix
NOISE_SPANS = 6  # lengths of noise spans
TEXT_SPANS = 7  # lengths of the spans between noise spans
SEGMENT_ORDER = 8  # order of segments inside a row
ROW_ORDER = 9  # order of rows inside a shard
SAMPLE = 10  # documents that `sample` keeps
REPEAT = 11  # documents that the fraction of `repeat` keeps
PIECE_ORDER = 12  # order of a source's splits in one pass
SHUFFLE = 13  # the loader's order of rows in one epoch
CALIBRATION = 14  # splits of the calibration sample
REPLAY = 15  # segments that `verify --replay N` rebuilds
NOISE_LEVEL = 16  # t of a segment or a block
NOISE = 17  # slots that are noised
REPLACEMENT = 18  # the replacement of a noised slot
STRATUM = 19  # a row's shift and order of levels
CUT_POINTS = 20  # cut points of fill-in-the-middle
NOISE_LOW = 21  # the low words of NOISE
PROOF = 22  # documents for comparing an engine with the reference
MIXTURE_CYCLE = 24  # the dataset of each sample of a mixture's cycle
MIXTURE_SEED = 25  # the seed of each dataset of a mixture except the first
REDRAWN_ROLL = 26  # like ROLL, PIVOT, NOISE_SPANS, TEXT_SPANS and CUT_POINTS in later epochs
REDRAWN_PIVOT = 27
REDRAWN_NOISE_SPANS = 28
REDRAWN_TEXT_SPANS = 29
REDRAWN_CUT_POINTS = 30
BALANCED_GROUPS = 31  # order of a window's groups of rows, if steps are balanced
PASSES = 32  # whether a document is in the pass of a fraction, if `repeat` is an expression

_MUL_0, _MUL_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


_BLOCKS_AT_ONCE = 1 << 13  # The words of this many blocks fit in the processor's cache.


def philox(key, c0, c1, c2, c3):
    """Compute one Philox4x32-10 block for each element.

    Args:
        key: uint64, broadcast against the counter words.
        c0: Counter word 0. All counter words are below 2³².
        c1: Counter word 1.
        c2: Counter word 2.
        c3: Counter word 3.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    inputs = np.broadcast_arrays(
        *(np.asarray(x).astype(np.uint64, copy=False) for x in (key, c0, c1, c2, c3))
    )
    shape, flat = inputs[0].shape, [x.reshape(-1) for x in inputs]
    out = np.empty((4, flat[0].size), np.uint32)
    for begin in range(0, out.shape[1], _BLOCKS_AT_ONCE):
        block = slice(begin, begin + _BLOCKS_AT_ONCE)
        for words_of, word in zip(out, _rounds(*(x[block] for x in flat)), strict=True):
            words_of[block] = word  # the low half
    return tuple(out.reshape(4, *shape))


def _rounds(key, *counter):
    """Compute `philox` of flat arrays, with few temporary arrays.

    The results are four uint64 arrays. The low 32 bits of their elements are the words.
    """
    x0, x1, x2, x3 = (x.copy() for x in counter)
    k0, k1 = key & _LOW, key >> _32
    p0, p1 = np.empty_like(x0), np.empty_like(x0)
    # Each round makes words 0 and 2 from the high halves of two products, and words 1 and 3 from
    # the low.
    for _ in range(10):
        np.multiply(x0, _MUL_0, out=p0)
        np.multiply(x2, _MUL_1, out=p1)
        for x, p, other_word, k in ((x0, p1, x1, k0), (x2, p0, x3, k1)):
            np.right_shift(p, _32, out=x)
            x ^= other_word
            x ^= k
            x &= _LOW  # The high halves of p, x1, x3 and k are cut here or never used.
        # The products become words 1 and 3, and the old words become the buffers of the next round.
        x1, p1, x3, p0 = p1, x1, p0, x3
        k0 += _KEY_STEP_0
        k1 += _KEY_STEP_1
    return x0, x1, x2, x3


def words(key, purpose, index, epoch=0, attempt=0):
    """Return uniform uint32 random numbers for a purpose.

    Element i is random number index[i] of the stream of `purpose` and `key`. `index` has values
    below 2³⁴.
    """
    index = np.asarray(index).astype(np.uint64)
    block = np.stack(
        np.broadcast_arrays(*philox(key, index >> np.uint64(2), attempt, purpose, epoch))
    )
    lane = np.broadcast_to((index & np.uint64(3)).astype(np.intp), block.shape[1:])
    return np.take_along_axis(block, lane[None], axis=0)[0]


def bits64(key, purpose, index=0, epoch=0):
    """Return uniform uint64 random numbers for a purpose.

    Element i has words 0 and 1 of block index[i]. `index` has values below 2³².
    """
    w0, w1, _, _ = philox(key, index, 0, purpose, epoch)
    return w0.astype(np.uint64) | (w1.astype(np.uint64) << _32)


def uniforms(key, purpose, index=0, epoch=0):
    """Return float64 in [0, 1): the high 24 bits of `words` times 2⁻²⁴, exact in float32 too."""
    return (words(key, purpose, index, epoch) >> np.uint32(8)).astype(np.float64) * 2.0**-24


def integers(key, purpose, index, bound, epoch=0):
    """Return int64, exactly uniform over 0 … bound − 1.

    `bound` is in 1 … 2³² − 1, and arrays broadcast. The method is Lemire, "Fast random integer
    generation in an interval" (2019). The result is the high half of word · bound. The word is
    drawn again (`attempt` + 1) while the low half of this product is below 2³² mod bound.
    """
    key, index, bound = np.broadcast_arrays(
        np.asarray(key, np.uint64), np.asarray(index), np.asarray(bound)
    )
    bound = bound.astype(np.uint64)
    product = np.asarray(words(key, purpose, index, epoch).astype(np.uint64) * bound)
    threshold = (np.uint64(1) << _32) % bound
    is_rejected = np.asarray((product & _LOW) < threshold)
    attempt = 0
    # Draw again only where the result would be biased.
    while is_rejected.any():
        attempt += 1
        drawn = (
            words(key[is_rejected], purpose, index[is_rejected], epoch, attempt).astype(np.uint64)
            * bound[is_rejected]
        )
        product[is_rejected] = drawn
        is_rejected[is_rejected] = (drawn & _LOW) < threshold[is_rejected]
    return (product >> _32).astype(np.int64)


def text_key(*parts):
    """Return a uint64 key of names and numbers, such as (seed, source name, file name).

    It is the BLAKE2b-64 hash of their JSON list.
    """
    encoded = json.dumps(parts, ensure_ascii=True, separators=(",", ":")).encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little"))


def segment_key(file_key, document, repeat, start):
    """Return the uint64 key of a document's segment.

    The counter is (document's low and high word, start, repeat · 2⁸ + purpose), so that different
    segments never use the same block.

    Args:
        file_key: uint64, `text_key(seed, source name, file name)`.
        document: The document's position in its file.
        repeat: The pass over the document.
        start: Index in the document of the segment's first content token.
    """
    document = np.asarray(document).astype(np.uint64)
    w0, w1, _, _ = philox(
        file_key,
        document & _LOW,
        document >> _32,
        start,
        np.asarray(repeat).astype(np.uint64) * 256 + SEGMENT_KEY,
    )
    return w0.astype(np.uint64) | (w1.astype(np.uint64) << _32)


def _mix(x):
    """Apply a bijection of uint64: the finaliser of SplitMix64.

    See Steele, Lea and Flood (2014); the constants are Stafford's variant 13.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


PERMUTATION_ROUNDS = 8
_POWERS_OF_4 = np.array([4**k for k in range(1, 32)], np.uint64)


def permute(index, size, key, inverse=False):
    """Return the image of `index` under a keyed permutation of range(size), int64, in O(1) memory.

    The permutation is a balanced Feistel network over the smallest 4ᵏ ≥ size. It is repeated until
    the result is below `size` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002),
    with fewer than 4 steps on average. Round keys are `bits64(key, 0, round)`.

    Args:
        index: Array of values 0 … size − 1.
        size: Size of the permutation: one number, or an array that broadcasts to `index` and has
            the same number of dimensions as `index`.
        key: Key of the permutation, in the same form as `size`.
        inverse: Whether to return the index of each image instead.
    """
    index = np.atleast_1d(np.asarray(index)).astype(np.uint64)
    size, key = np.asarray(size).astype(np.uint64), np.asarray(key).astype(np.uint64)
    # The domain has all numbers of 2 · `half` bits. Each side of the network has `half` bits.
    half = np.asarray(np.searchsorted(_POWERS_OF_4, size) + 1).astype(np.uint64)
    round_keys = bits64(key, 0, np.arange(PERMUTATION_ROUNDS).reshape(-1, *[1] * key.ndim))

    def step(x, half, round_keys):
        low = (np.uint64(1) << half) - np.uint64(1)
        left, right = x >> half, x & low
        if inverse:
            for round_key in round_keys[::-1]:
                left, right = right ^ (_mix(left ^ round_key) & low), left
            return (left << half) | right
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & low)
        return (left << half) | right

    # The repetition ends, because a permutation leads from an index below `size` back to it.
    result = step(index, half, round_keys)
    outside = result >= size
    while outside.any():
        outside_keys = [
            np.broadcast_to(x, outside.shape)[outside] if x.ndim else x for x in (half, *round_keys)
        ]
        result[outside] = step(result[outside], outside_keys[0], outside_keys[1:])
        outside = result >= size
    return result.astype(np.int64)


LN_2 = 0.6931471805599453


def exponentials(words: np.ndarray) -> np.ndarray:
    """Return −ln((2 w + 1) / 2³³) of 32-bit words w as float64, with an error below 1e-11.

    Only + − × ÷ are used, so that every machine gives the same result.
    """
    mantissa, exponent = np.frexp(2.0 * words + 1.0)
    z = (mantissa - 1.0) / (mantissa + 1.0)  # ln m = 2 (z + z³/3 + z⁵/5 + …), |z| ≤ 1/3
    square, series = z * z, np.zeros(len(z))
    for n in range(21, 0, -2):
        series = series * square + 1.0 / n
    return (33 - exponent) * LN_2 - 2.0 * z * series


def _roots_of_half() -> np.ndarray:
    roots = np.sqrt(np.full(32, 0.5))
    for i in range(1, 32):
        roots[i] = np.sqrt(roots[i - 1])
    return roots


ROOTS_OF_HALF = _roots_of_half()
"""float64[32]: √½, ⁴√½, ⁸√½, …"""


def power_of_half(x: np.ndarray) -> np.ndarray:
    """Return 2⁻ˣ as float64, for x ≥ 0 truncated to multiples of 2⁻³².

    Only √ and × are used, so that every machine gives the same result.
    """
    whole_part = np.floor(x)
    fraction, result = x - whole_part, np.ones(len(x))
    # Multiply by the k-th root for each bit 2⁻ᵏ of the fraction.
    for root in ROOTS_OF_HALF:
        fraction = 2.0 * fraction
        bit = fraction >= 1.0
        result = np.where(bit, result * root, result)
        fraction = fraction - bit
    return np.ldexp(result, -whole_part.astype(np.int64))
