import numpy as np

from packprep.audit.copies import HashTable


def table(hashes: np.ndarray, most_in_memory: int, first_row: int = 0) -> HashTable:
    made = HashTable(most_in_memory)
    for first in range(0, len(hashes), 100):
        own = hashes[first : first + 100]
        rows = np.arange(first, first + len(own)) + first_row
        made.add(own, rows, np.zeros_like(rows), own[:, 0])
    return made


def hashes(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1 << 64, (count, 2), np.uint64)


def test_copies_are_counted_and_placed_the_same_in_memory_and_on_disk():
    some = hashes(1000)
    some[500], some[900], some[901] = some[3], some[3], some[2]
    some[910], some[920], some[930] = (some[4, 0], 1), some[4], (some[4, 0], 1)
    for most_in_memory in (10_000, 350):
        made = table(some, most_in_memory)
        copies = made.copies(5)
        assert copies.number == 5
        assert made.copies(2).pairs == copies.pairs[:2]
        firsts = {500: 3, 900: 3, 901: 2, 920: 4, 930: 910}
        assert copies.pairs == [((row, 0), (first, 0)) for row, first in firsts.items()]
        assert (made.spilled_bytes > 0) == (most_in_memory < 1000)


def test_records_that_another_table_lacks_are_found_if_only_one_of_both_spilled():
    some = hashes(1000)
    # Halves of a hash alone do not make a copy.
    some[500:502, 0], some[981], some[995, 0] = some[981, 0], some[501], some[501, 0]
    other = table(some[:990], 350)
    absent = present = 0
    for lost, kept in table(some[980:], 10_000).divided_by(other):
        absent, present = absent + len(lost), present + len(kept)
    assert (absent, present) == (10, 10)
