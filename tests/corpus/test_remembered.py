import pytest

from packprep import cache
from packprep.corpus.remembered import remembered


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "cache_folder", lambda: str(tmp_path))
    return tmp_path


def counted(answer):
    """(a function that gives the answer, the list of its calls)."""
    calls = []

    def find():
        calls.append(1)
        return answer

    return find, calls


def test_what_was_found_is_found_once(folder):
    find, calls = counted({"a": [1, 2]})
    for _ in range(3):
        assert remembered("thing", ("x", 1), dict, find) == {"a": [1, 2]}
    assert len(calls) == 1 and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("other", [("x", 2), ("y", 1), ("x", 1, None)])
def test_it_depends_on_all_that_it_is_said_to_depend_on(folder, other):
    find, calls = counted(True)
    remembered("thing", ("x", 1), bool, find)
    remembered("thing", other, bool, find)
    assert len(calls) == 2


def test_a_damaged_file_is_found_out_again(folder):
    find, calls = counted([1, 2, 3])
    remembered("thing", (), list, find)
    [path] = folder.iterdir()
    kept = path.read_bytes()
    for damaged in (b"", kept[:-1], bytes([kept[0] ^ 1]) + kept[1:], b"x" * len(kept)):
        path.write_bytes(damaged)
        assert remembered("thing", (), list, find) == [1, 2, 3]
        assert path.read_bytes() == kept
    assert len(calls) == 5


def test_what_is_of_another_type_is_found_out_again(folder):
    remembered("thing", (), list, lambda: [1])
    assert remembered("thing", (), dict, lambda: {"a": 1}) == {"a": 1}


def test_an_error_is_not_remembered(folder):
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        remembered("thing", (), bool, fails)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("place", [None, "/dev/null/nowhere"])
def test_without_a_folder_it_is_found_out_each_time(monkeypatch, place):
    monkeypatch.setattr(cache, "cache_folder", lambda: place)
    find, calls = counted(7)
    assert [remembered("thing", (), int, find) for _ in range(2)] == [7, 7] and len(calls) == 2
