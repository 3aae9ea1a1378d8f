"""packprep.sources.formats: formats, pieces, and files that cannot be read."""

import errno
import os
import subprocess
import sys

import pytest

from packprep.errors import SourceError
from packprep.sources.formats import Slice, count_pieces, detect_format, read
from tests.sources.formats.parts import part_of, read_all, write


@pytest.mark.parametrize(
    "name, expected",
    [
        ("a.jsonl", ("jsonl", "")),
        ("x/b.c/a.JSONL.GZ", ("jsonl", "gzip")),
        ("a.ndjson.zst", ("jsonl", "zstd")),
        ("a.json.zstd", ("jsonl", "zstd")),
        ("a.parquet", ("parquet", "")),
        ("a.pq", ("parquet", "")),
        ("a.arrow", ("arrow", "")),
        ("a.feather", ("arrow", "")),
        ("a.ipc", ("arrow", "")),
        ("a.txt", ("text", "")),
        ("a.md.gz", ("text", "gzip")),
        ("README", ("text", "")),
        ("a.gz.txt", ("text", "")),
        ("jsonl", ("text", "")),
    ],
)
def test_formats_are_told_by_the_ending(name, expected):
    assert detect_format(name) == expected


def test_a_parquet_file_compressed_as_a_whole_is_refused():
    with pytest.raises(SourceError, match=r"a\.parquet\.gz: .*\nhint: decompress"):
        detect_format("a.parquet.gz")


def test_pieces_of_line_files_are_arithmetic():
    assert [count_pieces("none", "jsonl", "", size) for size in (0, 1, 4 << 20, (4 << 20) + 1)] == [
        0,
        1,
        1,
        2,
    ]
    assert [count_pieces("none", "jsonl", "gzip", size) for size in (0, 1, 1 << 40)] == [0, 1, 1]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.txt.gz", "a.parquet", "a.arrow"]
)
def test_a_file_that_is_missing_is_an_error_that_names_it(tmp_path, name):
    path = write(tmp_path, name, b"abc")
    part = part_of(path)
    path.unlink()
    with pytest.raises(SourceError, match=rf"{path}: the file is missing\nhint: restore it"):
        read_all(part)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet", "a.arrow"])
@pytest.mark.parametrize(
    "code, words", [(errno.EACCES, "no permission"), (errno.EIO, "cannot be read.*Input/output")]
)
def test_an_error_of_the_operating_system_names_the_file(tmp_path, monkeypatch, name, code, words):
    path = write(tmp_path, name, b"abc")
    part = part_of(path)

    def fail(*args, **options):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr("pathlib.Path.open", fail)
    with pytest.raises(SourceError, match=rf"{path}: {words}"):
        list(read(part, "text"))


def test_a_part_is_exact_for_large_numbers():
    part = Slice("a", 0, 0, "jsonl", "", 0, 3**40, 3**40 + 1, 3**41, 0)
    assert part.range(2**62) == (3**40 * 2**62 // 3**41, (3**40 + 1) * 2**62 // 3**41)


def test_line_files_need_no_pyarrow():
    code = "import sys, packprep.sources.formats; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
