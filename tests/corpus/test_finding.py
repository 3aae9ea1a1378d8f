"""Files at URLs are the files that the same patterns find locally."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.corpus.files import File
from packprep.corpus.finding import find_files
from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.storage import Remote
from tests import made

NAMES = (
    "a.jsonl", "b.jsonl.gz", "x/a.jsonl", "x/B.txt", "x/y/a.jsonl", "x/y/[1].txt", "x/.hidden.jsonl", ".h/a.jsonl",
    "x/y/z/w.txt", "é.txt",
)  # fmt: skip
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


def outcome(source: Source, prefix: str | None = None) -> list[File] | None:
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
    assert {file.name.rsplit(".", 1)[1] for file in local} == {"jsonl", "zst", "gz", "parquet", "arrow", "txt"}
    assert find_files(source_of("memory://finding/corpus/**"), 0, Path("/"), None) == (remote.url, local)
    # and moved, there and back
    assert find_files(source_of(f"{tmp_path}/**"), 0, Path("/"), remote.url + "/") == (remote.url, local)
    assert find_files(source_of("memory://finding/corpus/**"), 0, Path("/"), str(tmp_path)) == (str(tmp_path), local)


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
        ((f"{url}/x",), "is a folder; say which files"),
        (("s3://one/x", "s3://two/x"), "has files in s3://one, s3://two; make a source for each"),
    ]:
        with pytest.raises(SourceError, match=message):
            find_files(source_of(*paths), 0, tmp_path, None)
