"""Numbers that decide which documents a dataset has, and how it is planned."""

from packprep.documents import (
    calibration,
    reading,
    sample,
    sampled_passes,
    store,
    store_estimates,
    tally,
)
from packprep.sources import files, first_look, passes, patterns, slices
from packprep.sources.formats import arrow, batch, compressed, jsonl, parquet, table
from packprep.sources.formats.token_masks import UNTRAINED

OF_THE_LAW = {
    batch: {
        "PIECE_BYTES": 4 << 20,
        "MAX_DOCUMENT_BYTES": 8 << 20,
        "MAX_LINE_BYTES": 32 << 20,
        "MAX_DOCUMENT_TOKENS": 8 << 20,
        "TOKEN_TEXT_BYTES": 4,
        "MAX_DETAIL": 200,
    },
    jsonl: {"MAX_NESTING": 256, "_MAX_DIGITS": 4000},
    table: {"MAX_BLOCK_BYTES": 256 << 20, "REPEATED_BYTES": 128 << 20},
    arrow: {"_MAX_HEADER_BYTES": 1 << 28, "_MOST_BYTES": 64 << 20},
    compressed: {"_MAX_WINDOW": 1 << 31},
    parquet: {"_MOST_SKIPPED_ROWS": 1 << 28, "_MAX_DEPTH": 8},
    passes: {"MOST_PASSES": 1000},
    slices: {
        "_WEIGHT_BITS": 16,
        "MOST_PIECES": 1 << 26,
        "PIECES_OF_A_USE": 256,
        "ALL": (0, 1 << 53),
    },
    reading: {"MOST_DOCUMENTS": 1 << 22},
    sample: {
        "WINDOWS": 128,
        "WINDOW_BYTES": 32 << 10,
        "PLACES": 4,
        "REMOTE_WINDOWS": 16,
        "REMOTE_WINDOW_BYTES": 128 << 10,
        "REMOTE_PLACES": 32,
        "ROUNDS": 16,
        "ENOUGH": 0.0015,
        "WHOLE_BYTES": 1 << 20,
        "PRECISE_WHOLE_BYTES": 8 << 20,
        "PIECES": 6,
        "PIECE_TEXT_BYTES": 256 << 10,
        "READ_BYTES": 128 << 20,
        "SPACING": 2048,
        "HELD_BYTES": 64 << 20,
        "HELD_DOCUMENTS": 1 << 20,
        "_ALL": 1 << 20,
        "_STEP_BYTES": 4 << 10,
    },
    sampled_passes: {"FEW_KEPT": 200},
    store: {"STEP_BYTES": 1 << 14, "DOCUMENT_BYTES": 28},
    store_estimates: {"MOST_LENGTHS": 1 << 16},
    calibration: {
        "TOKENIZED_CHARACTERS": 4096,
        "FIRST_CHARACTERS": 131_072,
        "MAX_RATIO": 1 << 24,
    },
}
"""By them, a plan divides sources and estimates them, and documents are rejected."""
OF_MESSAGES = {
    first_look: {"FILES": 8, "BYTES": 64 << 10, "LINE_BYTES": 4 << 20, "LINES": 200},
    calibration: {"MOST_FIELDS": 50},
    files: {"_SHOWN_TWICE": 3},
    patterns: {"_LOOKED_AT": 10_000, "_SHOWN": 6},
    table: {"_MOST_TEXT_KEYS": 100},
    tally: {"UNLIKELY": 1e-4},
}


def test_numbers_that_decide_what_a_dataset_has_change_only_with_the_law_version():
    for module, numbers in [*OF_THE_LAW.items(), *OF_MESSAGES.items()]:
        assert {name: getattr(module, name) for name in numbers} == numbers, module.__name__
    assert UNTRAINED == -100
