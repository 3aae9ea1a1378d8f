"""Files at URLs are the files that the same patterns find locally."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.errors import RecipeError, SourceError
from packprep.recipe import Source
from packprep.sources.files import Files, SourceFile, find_files, match_below, named_twice
from packprep.storage import Remote
from tests import made
from tests.tokens_made import save_dataset

NAMES = (
    "a.jsonl",
    "b.jsonl.gz",
    "x/a.jsonl",
    "x/B.txt",
    "x/y/a.jsonl",
    "x/y/[1].txt",
    "x/.hidden.jsonl",
    ".h/a.jsonl",
    "x/y/z/w.txt",
    "é.txt",
)
PARTS = (
    "*",
    "**",
    "a.jsonl",
    "*.jsonl",
    "*.jsonl*",
    "x",
    "?",
    "[x-z]",
    "[!x]",
    ".*",
    "*l",
    "[1].txt",
    "é*",
    "x/y",
    "a**l",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for name in NAMES:
        made.write(folder / name, name.encode())
    return folder


def source_of(*paths: str) -> Source:
    return Source(paths=tuple(paths), name="web")


def outcome(source: Source, prefix: str | None = None) -> list[SourceFile] | None:
    try:
        return find_files(source, 0, Path("/"), prefix)[1]
    except SourceError:
        return None


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("/".join))
def test_patterns_find_the_same_files(tree, pattern):
    assert outcome(source_of(f"file://{tree}/{pattern}")) == outcome(source_of(f"{tree}/{pattern}"))


def test_files_of_all_formats_are_the_same_at_a_url(tmp_path):
    made.mixed_corpus(tmp_path)
    made.write_arrow(tmp_path / "more" / "e.arrow", made.texts(120))
    remote = Remote("memory://finding/corpus")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            remote.write(path.relative_to(tmp_path).as_posix(), [path.read_bytes()])
    local = find_files(source_of(f"{tmp_path}/**"), 0, Path("/"), None)[1]
    assert {file.name.rsplit(".", 1)[1] for file in local} == {
        "jsonl",
        "zst",
        "gz",
        "parquet",
        "arrow",
        "txt",
    }
    assert find_files(source_of("memory://finding/corpus/**"), 0, Path("/"), None) == (
        remote.url,
        local,
    )
    # and moved, there and back
    assert find_files(source_of(f"{tmp_path}/**"), 0, Path("/"), remote.url + "/") == (
        remote.url,
        local,
    )
    assert find_files(source_of("memory://finding/corpus/**"), 0, Path("/"), str(tmp_path)) == (
        str(tmp_path),
        local,
    )


def test_the_prefix_is_the_common_folder(tmp_path):
    made.mixed_corpus(tmp_path)
    paths = [f"file://{tmp_path}/web/a.jsonl", f"file://{tmp_path}//notes/./*.txt"]
    prefix, files = find_files(source_of(*paths), 0, Path("/"), None)
    assert prefix == f"file://{tmp_path}" and files[-1].name == "web/a.jsonl"


def test_what_cannot_be_found_is_said(tmp_path):
    shutil.rmtree(tmp_path)
    url = f"file://{tmp_path}"
    made.write_lines(tmp_path / "x" / "a.jsonl", ["x"])
    for paths, message in [
        ((f"{url}/x/b.jsonl",), "b.jsonl matches no file"),
        ((f"{url}/x/*.parquet",), r"\*.parquet matches no file"),
        ((f"{url}/x",), "is a folder\nhint: give its files"),
        (
            ("s3://one/x", "s3://two/x"),
            "has files in s3://one, s3://two\nhint: write a separate source for each",
        ),
    ]:
        with pytest.raises(SourceError, match=message):
            find_files(source_of(*paths), 0, tmp_path, None)


def pair(folder: Path, name: str, bin_bytes: int = 10, idx_bytes: int = 5) -> None:
    made.write(folder / f"{name}.bin", bytes(bin_bytes))
    made.write(folder / f"{name}.idx", bytes(idx_bytes))


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    "patterns", [("*",), ("*.bin",), ("*.idx",), ("*.bin", "a.idx"), ("a.idx", "a.bin", "b.idx")]
)
@pytest.mark.parametrize("format", ["auto", "megatron"])
def test_a_pair_is_one_file_whichever_of_the_two_a_pattern_finds(
    tmp_path, patterns, format, remote
):
    pair(tmp_path, "a", 10, 5)
    pair(tmp_path, "b", 20, 7)
    paths = tuple(f"file://{tmp_path}/{pattern}" if remote else pattern for pattern in patterns)
    _, files = find_files(Source(paths=paths, name="web", format=format), 0, tmp_path, None)
    assert (list(files.names), files.sizes.tolist()) == (["a.bin", "b.bin"], [15, 27])
    assert files.kinds == [("megatron", "")]


@pytest.mark.parametrize("there, missing", [("a.bin", "a.idx"), ("a.idx", "a.bin")])
def test_one_of_a_pair_without_the_other_is_an_error(tmp_path, there, missing):
    made.write(tmp_path / there, b"x")
    for path in (there, f"file://{tmp_path}/{there}"):
        with pytest.raises(
            SourceError, match=rf"{missing} is missing, and megatron files are pairs of a"
        ):
            find_files(Source(paths=(path,), name="web"), 0, tmp_path, None)
    _, files = find_files(Source(paths=(there,), name="web", format="text"), 0, tmp_path, None)
    assert (files.names, files.kinds) == ([there], [("text", "")])


@pytest.mark.parametrize(
    "name, format, said",
    [
        ("a.csv", "tokens", 'a.csv: format = "tokens" only reads JSON Lines (.jsonl'),
        ("a.txt", "tokens", "folders of Hugging Face datasets"),
        ("a.bin", "tokens", 'for Megatron\'s files, set format = "megatron"'),
        (
            "a.jsonl",
            "megatron",
            'a.jsonl: format = "megatron" only reads pairs of a .bin and an .idx file',
        ),
        ("a.parquet", "megatron", "name one file of the pair"),
        ("a.parquet.gz", "tokens", "compressed as a whole"),
        ("a.bin.gz", "auto", "megatron files cannot be read if they are compressed as a whole"),
    ],
)
def test_a_file_that_holds_no_tokens_by_its_name_is_refused(tmp_path, name, format, said):
    made.write(tmp_path / name, b"x")
    with pytest.raises(SourceError) as error:
        find_files(Source(paths=(name,), name="web", format=format), 0, tmp_path, None)
    assert said in str(error.value)


def test_a_saved_dataset_is_named_by_its_folder(tmp_path):
    save_dataset(tmp_path / "saved", [[1], [2], [3]], 2)
    names = [f"saved/data-0000{i}-of-00002.arrow" for i in range(2)]
    for format, kind in (("tokens", "arrow_tokens"), ("auto", "arrow")):
        for path in ("saved", "saved/"):
            prefix, files = find_files(
                Source(paths=(path,), name="web", format=format), 0, tmp_path, None
            )
            assert (prefix, files.names, files.kinds) == (str(tmp_path), names, [(kind, "")])


@pytest.fixture
def linked(tmp_path):
    """Two files; one has a symbolic link and a hard link, and the folder has a link that leads out
    of it."""
    for name in ("in/a.jsonl", "in/b.jsonl", "in/p.json", "in/1/2/3/d.jsonl", "else/e.jsonl"):
        made.write(tmp_path / name, name.encode())
    (tmp_path / "in/l.jsonl").symlink_to("a.jsonl")
    (tmp_path / "in/h.jsonl").hardlink_to(tmp_path / "in/b.jsonl")
    (tmp_path / "in/link").symlink_to("../else")
    return tmp_path


def twice(folder, *sources, url=False):
    """What is said of sources of (paths, sample)."""
    base = f"file://{folder}" if url else folder
    made_of = [
        Source(name=f"s{i}", paths=tuple(f"{base}/{p}" for p in paths), sample=s)
        for i, (paths, s) in enumerate(sources)
    ]
    return named_twice(
        made_of, [find_files(source, i, folder, None)[1] for i, source in enumerate(made_of)]
    )


ALL, LOW, HIGH = (0.0, 1.0), (0.0, 0.5), (0.5, 1.0)


def test_a_file_that_is_read_twice_is_named(linked):
    a, b = linked / "in/a.jsonl", linked / "in/b.jsonl"
    assert twice(linked, (["in/[ab].jsonl", "in/a.jsonl", "in/../in/b.jsonl"], ALL)) == ""
    said = twice(linked, (["in/*.jsonl"], ALL))
    assert f"{a} (as 'a.jsonl' of source 's0' and 'l.jsonl' of source 's0')" in said
    assert (
        f"{b} (as 'b.jsonl' of source 's0' and 'h.jsonl' of source 's0')" in said
        and "more;" not in said
    )
    both = [(["in/[ab].jsonl"], ALL), (["in/a.jsonl"], ALL)]
    for url in (False, True):
        said = twice(linked, *both, url=url)
        assert (
            f"{a} (as 'a.jsonl' of source 's0' and 'a.jsonl' of source 's1')" in said
            and "b.jsonl" not in said
        )
    for i in range(9):
        made.write(linked / f"in/x{i}.txt", b"x")
    assert (
        "x2.txt" in (said := twice(linked, (["in/*.txt"], ALL), (["in/*.txt"], ALL)))
        and " and 6 more." in said
    )


def test_sources_of_other_documents_of_a_file_are_not_warned_of(linked):
    assert twice(linked, (["in/a.jsonl"], LOW), (["in/a.jsonl"], HIGH)) == ""
    assert (
        twice(linked, (["in/a.jsonl"], LOW), (["in/a.jsonl"], HIGH), (["in/a.jsonl"], (0.4, 0.6)))
        != ""
    )
    # `sample` goes by the name
    assert twice(linked, (["in/a.jsonl"], LOW), (["in/l.jsonl"], HIGH)) != ""


REJECTS = "rejects/000/000000.jsonl"


@pytest.mark.parametrize(
    "pattern, out, expected",
    [
        ("in/**/*.jsonl", "in/out", REJECTS),
        ("in/**", "in/x/y/out", "plan.json"),
        ("**/*.json", "in/out", "plan.json"),
        ("in/*.jsonl", "in/out", None),
        ("in/**/*.jsonl", "out", None),
        ("in/**/*.jsonl", "else/out", REJECTS),  # by the link
        ("else/**/*.jsonl", "in/link/out", REJECTS),
        ("in/*.jsonl", "else", None),
        ("in/**/*.jsonl", "in/.out", None),
        ("in/*/*/*/*.jsonl", "in/out", REJECTS),
        ("**/*.jsonl", ".", REJECTS),
    ],
)
@pytest.mark.parametrize("url", [False, True])
def test_an_output_that_a_pattern_reaches_is_found(linked, pattern, out, expected, url):
    root = f"file://{linked}" if url else str(linked)
    source = Source(name="s", paths=(f"{root}/{pattern}",))
    files = find_files(source, 0, linked, None)[1]
    if url and out == "else/out":
        expected = None  # no link to a folder is followed there
    assert match_below(source, linked, files, str(linked / out), ["plan.json", REJECTS]) == expected
    assert (
        match_below(source, linked, files, f"file://{linked / out}", ["plan.json", REJECTS])
        == expected
    )
    assert match_below(source, linked, files, "s3://bucket/in/out", ["plan.json", REJECTS]) is None


def test_an_output_in_a_bucket_that_a_pattern_reaches_is_found():
    files = Files(0, ["a.jsonl"], np.ones(1, np.int64), "auto", "s3://b/in", np.ones(1, np.int64))
    source = Source(name="s", paths=("s3://b/in/**/*.jsonl",))
    assert match_below(source, Path("/"), files, "s3://b/in/out", [REJECTS]) == REJECTS
    for out in ("s3://b/out", "s3://c/in/out", "/in/out"):
        assert match_below(source, Path("/"), files, out, [REJECTS]) is None


def test_a_format_that_is_not_registered_is_refused_with_the_known_ones(tmp_path):
    made.write(tmp_path / "a.jsonl", b"")
    source = Source(name="s", paths=("a.jsonl",), format="jsonll")
    with pytest.raises(
        RecipeError, match=r"sources\[3\].format = 'jsonll': expected auto \| jsonl .*mean 'jsonl'"
    ) as caught:
        find_files(source, 3, tmp_path, None)
    assert caught.value.key == ("sources", 3, "format")
