"""Which files patterns find where there are links, and advice on patterns that find none."""

from pathlib import Path

import pytest

from packprep.errors import SourceError
from packprep.sources.files import find_files, named_twice
from packprep.sources.patterns import nearby
from tests import made
from tests.sources.test_finding import source_of


def test_advice_on_a_pattern_with_the_brackets_of_a_name_finds_the_file(tmp_path):
    made.write(tmp_path / "run [v1]/part[0].jsonl", b"{}")
    assert len(find_files(source_of("run [v1]/part[0].jsonl"), 0, tmp_path, None)[1]) == 1
    with pytest.raises(SourceError, match=r"\[ starts a character class in a pattern") as caught:
        find_files(source_of("run [v1]/*.jsonl"), 0, tmp_path, None)
    advised = str(caught.value).partition("as in ")[2].partition("\nhint: ")[0]
    assert find_files(source_of(advised), 0, tmp_path, None)[1].names == ["run [v1]/part[0].jsonl"]
    with pytest.raises(SourceError) as caught:
        find_files(source_of("part[0-9].jsonl"), 0, tmp_path, None)
    assert "character class" not in str(caught.value)


@pytest.mark.parametrize("name", [".cache/x/a.jsonl", "data/.a.jsonl"])
def test_advice_on_a_pattern_that_passes_over_hidden_names_finds_the_file(tmp_path, name):
    made.write(tmp_path / name, b"{}")
    with pytest.raises(
        SourceError, match=f"ignore names that start with a dot, as {name}"
    ) as caught:
        find_files(source_of("**/*.jsonl"), 0, tmp_path, None)
    advised = str(caught.value).partition("as in ")[2].partition("\nhint: ")[0]
    _, files = find_files(source_of(advised), 0, tmp_path, None)
    assert len(files) == 1 and name.endswith(files.names[0])


def names_found(folder: Path, *patterns: str) -> list[str]:
    return list(find_files(source_of(*patterns), 0, folder, None)[1].names)


def test_a_folder_that_links_lead_to_is_read_once(tmp_path):
    made.write(tmp_path / "data/b/a.jsonl", b"{}")
    made.write(tmp_path / "data/b/c/a.jsonl", b"{} ")
    for name, target in (
        ("data/a", "b"),
        ("data/latest", "."),
        ("data/also", "."),
        ("data/b/c/up", "../.."),
    ):
        (tmp_path / name).symlink_to(target)
    expected = ["b/a.jsonl", "b/c/a.jsonl"]
    assert names_found(tmp_path, "data/**/*.jsonl") == expected
    assert names_found(tmp_path, "data/**") == expected
    assert names_found(tmp_path, "data/*/a.jsonl", "data/b/**/*.jsonl") == expected
    assert names_found(tmp_path, "data/a/*.jsonl", "data/latest/b/c/*.jsonl") == [
        "a/a.jsonl",
        "latest/b/c/a.jsonl",
    ]


def test_links_to_folders_elsewhere_are_followed_once(tmp_path):
    made.write(tmp_path / "disk/a.jsonl", b"{}")
    made.write(tmp_path / "data/b.jsonl", b"{} ")
    for name in ("y", "x"):
        (tmp_path / "data" / name).symlink_to("../disk")
    assert names_found(tmp_path, "data/**/*.jsonl") == ["b.jsonl", "x/a.jsonl"]
    assert names_found(tmp_path, "data/**/y/*.jsonl") == ["y/a.jsonl"]


def test_links_to_files_are_files_of_their_own_that_are_named_twice(tmp_path):
    made.write(tmp_path / "data/a.jsonl", b"{}")
    (tmp_path / "data/b.jsonl").symlink_to("a.jsonl")
    _, files = find_files(source_of("data/**/*.jsonl"), 0, tmp_path, None)
    assert files.names == ["a.jsonl", "b.jsonl"]
    assert "a.jsonl" in named_twice([source_of("data/**/*.jsonl")], [files])


@pytest.mark.long
def test_advice_lists_six_entries_of_a_folder_and_counts_the_others(tmp_path):
    for count, more in ((5, ""), (6, ""), (7, " and 1 more"), (9, " and 3 more")):
        folder = tmp_path / str(count)
        folder.mkdir()
        names = [f"{i}.txt" for i in range(count - 1)]
        for name in names:
            (folder / name).write_text("")
        (folder / "z").mkdir()
        shown = ", ".join([*names, "z/"][:6])
        assert nearby(f"{folder}/*.jsonl") == f"; {folder} contains {shown}{more}"
    missing = f"{folder}/x/0.txd"
    assert nearby(missing).startswith(f"; there is no folder {folder}/x; {folder} contains 0.txt, ")
    assert nearby(f"{folder}/00.txt").endswith(" and 3 more; did you mean 0.txt?")
    (tmp_path / "none").mkdir()
    assert nearby(f"{tmp_path}/none/a") == f"; {tmp_path}/none contains nothing"
