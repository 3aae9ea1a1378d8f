"""Tests of removed.json as a build and a verification read it."""

from types import SimpleNamespace

import numpy as np
import pytest

from packprep.building.removal import Removed, encode_removed
from packprep.errors import PlanError
from packprep.format.digests import digest_of
from packprep.format.json_files import encode

SOURCES = [
    SimpleNamespace(name="web", first_file=0, files=SimpleNamespace(names=["a", "b"])),
    SimpleNamespace(name="books", first_file=2, files=SimpleNamespace(names=["a", "c"])),
]


def test_a_list_names_documents_by_source_file_and_position():
    """The same position in another file, or in a file of the same name, is another document."""
    data = encode_removed({"web": {"b": [7, 3, 7]}, "books": {"a": [4], "c": [5]}})
    removed = Removed(SOURCES, data, digest_of(data))
    files, positions = np.divmod(np.arange(4 * 9), 9)
    listed = removed.at(files, positions)
    found = zip(files[listed].tolist(), positions[listed].tolist(), strict=True)
    assert removed and list(found) == [(1, 3), (1, 7), (2, 4), (3, 5)]
    assert removed.documents["web"] == {"b": [3, 7]}
    assert not Removed(SOURCES) and not Removed(SOURCES).at(files, positions).any()


def test_a_list_of_other_documents_than_the_plan_has_is_refused():
    good = encode_removed({"web": {"a": [1]}})
    with pytest.raises(PlanError, match="has digest .* but the plan names"):
        Removed(SOURCES, good, digest_of(good + b"\n"))
    for documents in (
        {"mail": {"a": [1]}},
        {"web": {"c": [1]}},
        {"web": {"a": [-1]}},
        {"web": {"a": [True]}},
        {"web": {"a": 1}},
        {"web": ["a"]},
        ["web"],
    ):
        data = encode({"documents": documents})
        with pytest.raises(PlanError, match="does not list documents of this plan"):
            Removed(SOURCES, data, digest_of(data))
