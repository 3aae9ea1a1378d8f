"""Philox4x32-10 and the draws made from it, those of in-place noise too, in plain Python
integers."""

import functools
import hashlib
from fractions import Fraction
from math import floor, frexp, ldexp, sqrt
from typing import NamedTuple

SEGMENT_KEY, TASK, SEGMENT_LENGTH, ROLL, PIVOT, NOISE_SPANS, TEXT_SPANS = 1, 2, 3, 4, 5, 6, 7
SEGMENT_ORDER, ROW_ORDER, SAMPLE, REPEAT, PIECE_ORDER = 8, 9, 10, 11, 12
PASSES = 32
NOISE_LEVEL, NOISE, REPLACEMENT, STRATUM, CUT_POINTS, NOISE_LOW = 16, 17, 18, 19, 20, 21
IN_LATER_EPOCHS = {ROLL: 26, PIVOT: 27, NOISE_SPANS: 28, TEXT_SPANS: 29, CUT_POINTS: 30}
"""What next-token kinds draw these under in every epoch but 0."""

TWO_32 = 2**32
TWO_64 = 2**64
LOW_32 = TWO_32 - 1


def philox(key, counter):
    """Four 32-bit words of one block. key: below 2⁶⁴, its low half is Philox's first key word.
    counter: four words."""
    return list(_block(key, *counter))


@functools.lru_cache(maxsize=1 << 14)  # neighbouring numbers lie in one block
def _block(key, x0, x1, x2, x3):
    k0, k1 = key % TWO_32, key // TWO_32
    for _ in range(10):
        product0, product1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1 = (product1 >> 32) ^ x1 ^ k0, product1 & LOW_32
        x2, x3 = (product0 >> 32) ^ x3 ^ k1, product0 & LOW_32
        k0, k1 = (k0 + 0x9E3779B9) & LOW_32, (k1 + 0xBB67AE85) & LOW_32
    return x0, x1, x2, x3


def words(key, purpose, index, epoch=0, attempt=0):
    """Number `index` of `purpose` under `key`: 32 bits."""
    return _block(key, index // 4, attempt, purpose, epoch)[index % 4]


def bits64(key, purpose, index=0, epoch=0):
    """The first two words of block `index`, the first one low: 64 bits."""
    block = philox(key, [index, 0, purpose, epoch])
    return block[0] + TWO_32 * block[1]


def uniforms(key, purpose, index=0, epoch=0):
    """A multiple of 2⁻²⁴ in [0, 1)."""
    return (words(key, purpose, index, epoch) // 256) / 2**24


def integers(key, purpose, index, bound, epoch=0):
    """Exactly uniform over 0 … bound − 1: Lemire's multiplication with rejection."""
    attempt = 0
    while True:
        high, low = divmod(words(key, purpose, index, epoch, attempt) * bound, TWO_32)
        if low >= TWO_32 % bound:
            return high
        attempt += 1


def text_key(*parts):
    """BLAKE2b-64 of the parts (strings and integers) as a JSON list in ASCII without spaces, read
    as little-endian."""
    text = (
        "["
        + ",".join(_json_string(part) if isinstance(part, str) else str(part) for part in parts)
        + "]"
    )
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "little")


def _json_string(text):
    short = {
        '"': '\\"',
        "\\": "\\\\",
        "\n": "\\n",
        "\r": "\\r",
        "\t": "\\t",
        "\b": "\\b",
        "\f": "\\f",
    }
    result = '"'
    for character in text:
        code = ord(character)
        if character in short:
            result += short[character]
        elif 32 <= code <= 126:
            result += character
        elif code < 0x10000:
            result += f"\\u{code:04x}"
        else:
            code -= 0x10000
            result += f"\\u{0xD800 + code // 1024:04x}\\u{0xDC00 + code % 1024:04x}"
    return result + '"'


def segment_key(file_key, document, repeat, start):
    """64-bit key of the segment that begins with content token `start` of the document at position
    `document`."""
    low, high = document % TWO_32, document // TWO_32
    block = philox(file_key, [low, high, start, repeat * 256 + SEGMENT_KEY])
    return block[0] + TWO_32 * block[1]


def permute(index, size, key):
    """Where the keyed permutation of range(size) takes `index`: a Feistel network over 4ᵏ ≥ size,
    cycle-walked."""
    half = 1
    while 4**half < size:
        half += 1
    while True:
        left, right = divmod(index, 2**half)
        for number in range(8):
            left, right = right, left ^ (_splitmix(right ^ bits64(key, 0, number)) % 2**half)
        index = left * 2**half + right
        if index < size:
            return index


def _splitmix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % TWO_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % TWO_64
    return x ^ (x >> 31)


class CandidateSlots(NamedTuple):
    """A segment's candidates among flat slots."""

    key: int
    first: int  # the slot of the first of them
    size: int
    row: int = 0
    before: int = 0  # slots of a copy of the segment before its candidates
    copy_slots: int = 0  # of one copy


def uniform40(key, i, epoch):
    """Candidate i's 40 bits: byte i % 16 of block i // 16, words little-endian, and below it the
    low word number i."""
    block = philox(key, [i // 16, 0, NOISE, epoch])
    high = b"".join(word.to_bytes(4, "little") for word in block)[i % 16]
    return high * 2**32 + words(key, NOISE_LOW, i, epoch)


def purpose_in(epoch, purpose):
    """What an epoch draws, of what next-token kinds draw under `purpose` in epoch 0."""
    return IN_LATER_EPOCHS[purpose] if epoch else purpose


def threshold(probability):
    return floor(Fraction(probability) * 2**40)


def quantised(level):
    """Cut to a multiple of 2⁻²⁴."""
    return floor(Fraction(level) * 2**24) / 2**24


def exponential(word):
    """−ln((2 · word + 1) / 2³³), by the series of ln((1 + z) / (1 − z)) in a fixed order."""
    mantissa, exponent = frexp(2.0 * word + 1.0)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    series = 0.0
    for n in range(21, 0, -2):
        series = series * (z * z) + 1.0 / n
    return (33 - exponent) * 0.6931471805599453 - 2.0 * z * series


def power_of_half(x):
    """2⁻ˣ, of x ≥ 0 in binary to 32 places: a product of roots of ½."""
    whole = floor(x)
    rest, root, result = x - whole, 0.5, 1.0
    for _ in range(32):
        rest, root = 2.0 * rest, sqrt(root)
        if rest >= 1.0:
            rest, result = rest - 1.0, result * root
    return ldexp(result, -whole)
