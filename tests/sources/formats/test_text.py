"""packprep.sources.formats.text: a file is a document."""

import pytest

from packprep.errors import SourceError
from packprep.sources.formats import batch as limits
from tests.sources.formats.parts import COMPRESS, part_of, pieces_of, read_all, write

ENDINGS = [("", ""), ("gzip", ".gz"), ("zstd", ".zst")]


@pytest.mark.parametrize("compression, ending", ENDINGS)
@pytest.mark.parametrize(
    "text", ["", "a\r\n\nb ", "é\U0001f600" * 1000, "\ufeff in the middle \ufeff"]
)
def test_a_text_file_is_one_document(tmp_path, compression, ending, text):
    path = write(tmp_path, "a.txt" + ending, COMPRESS[compression](text.encode()))
    assert pieces_of(path) == 1
    assert read_all(part_of(path)) == ([(0, text.removeprefix("\ufeff"))], [])


@pytest.mark.parametrize("compression, ending", ENDINGS)
def test_a_text_file_is_in_one_part_only(tmp_path, compression, ending):
    path = write(tmp_path, "a.txt" + ending, COMPRESS[compression](b"a"))
    found = [read_all(part_of(path, 0, lo, lo + 1, 5))[0] for lo in range(5)]
    assert sum(found, []) == [(0, "a")]
    assert read_all(part_of(path), keep=lambda file, positions: positions > 0) == ([], [])


@pytest.mark.parametrize("compression, ending", ENDINGS)
def test_a_bad_text_file_is_a_reject(tmp_path, compression, ending, monkeypatch):
    path = write(tmp_path, "a.txt" + ending, COMPRESS[compression](b"a\xff"))
    assert read_all(part_of(path)) == ([], [(0, "invalid_utf8")])
    monkeypatch.setattr(limits, "MAX_DOCUMENT_BYTES", 100)
    for n, rejects in [(100, []), (101, [(0, "too_large")])]:
        path = write(tmp_path, "a.txt" + ending, COMPRESS[compression](b"a" * n))
        assert read_all(part_of(path))[1] == rejects


@pytest.mark.parametrize("compression, ending", ENDINGS)
def test_a_text_file_that_changed_its_size_stops_the_build(tmp_path, compression, ending):
    path = write(tmp_path, "a.txt" + ending, COMPRESS[compression](b"abc"))
    with pytest.raises(SourceError, match="bytes, but had"):
        read_all(part_of(path)._replace(size=2))
