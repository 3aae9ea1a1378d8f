"""Bad documents of a sample, and what they let expect of all."""

import numpy as np
import pytest

from packprep.documents.tally import UNLIKELY, Tally, lower_bound
from packprep.sources.formats import Reject


def test_a_bound_holds_but_seldom_and_comes_near_with_many():
    rng, times = np.random.default_rng(0), 4000
    for part, count in ((0.01, 128), (0.09, 128), (0.5, 10)):
        bounds = [lower_bound(n / count, count) for n in rng.binomial(count, part, times)]
        assert sum(bound > part for bound in bounds) <= times * UNLIKELY * 5
    assert lower_bound(0.0, 1e6) == 0 and 0.98 < lower_bound(1.0, 1e6) <= 1
    assert lower_bound(0.09, 1e7) == pytest.approx(0.09, rel=0.01) and lower_bound(0.09, 1) < 1e-4


def tally_of(units, is_whole=False):
    tally = Tally(is_whole=is_whole)
    for places, bad in units:
        tally.count(
            places,
            [Reject(0, 5, "malformed_json", "detail"), Reject(0, 7, "empty", "")][: bad + 1],
            "a.jsonl",
        )
        tally.add_unit(places, bad, places, bad)
    return tally


def test_a_tally_of_all_documents_is_exact_unless_chance_decides_which_are_read():
    tally = tally_of([(10, 1)] * 40, is_whole=True)
    assert (tally.totals, tally.least_bad(False), tally.reasons) == (
        (400, 40),
        40,
        {"malformed_json": 40},
    )
    assert (
        tally.example == "a.jsonl: document at 5: malformed_json: detail"
        and tally.first_path == "a.jsonl"
    )
    assert 0 < tally.least_bad(True) < 40


def test_windows_and_not_documents_count_as_independent():
    spread, together = tally_of([(100, 1)] * 100), tally_of([(100, 1)] * 2 + [(100, 0)] * 98)
    assert spread.least_bad(True) > together.least_bad(True)
    assert tally_of([(100, 0)] * 9).least_bad(True) == 0 == Tally().least_bad(False)
    one = tally_of([(1000, 1)])  # the begin of one file tells what was met, and nothing of the rest
    assert one.least_bad(False) == 0.5 and one.least_bad(True) < 1e-3


def test_kinds_of_files_are_joined_by_the_documents_that_they_stand_for():
    all_of_it, some = tally_of([(10, 1)], is_whole=True), tally_of([(10, 1)])
    tally = Tally()
    tally.join(all_of_it, 9)
    assert tally.is_whole and tally.totals == (10, 1)
    tally.join(some, 900)
    assert not tally.is_whole and tally.totals == (1010, 101) and tally.looked_at == 20


@pytest.mark.long
def test_an_example_names_the_document_unless_the_file_has_no_documents():
    for position, place in ((0, ": document at 0"), (-1, "")):
        tally = Tally()
        tally.count(1, [Reject(0, position, "malformed_json", "why")], "a.jsonl")
        tally.count(1, [Reject(0, 9, "malformed_json", "later")], "b.jsonl")
        assert tally.example == f"a.jsonl{place}: malformed_json: why"
        assert tally.first_path == "a.jsonl"
