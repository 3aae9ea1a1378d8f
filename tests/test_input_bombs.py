"""Inputs made to hurt: small files that expand a thousandfold, lines and numbers without end,
footers that lie, what is no file.

Memory stays bounded, the rest of the file is read, and what cannot be used is a counted reject or
an error that names the file. Memory is what a process of its own took at its peak, beside that of
reading an ordinary file.
"""

import gzip
import json
import os
import re
import socket
import struct
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from packprep.building import planning, work
from packprep.building.planning import look_up, make_plan
from packprep.documents import reading
from packprep.documents import sample as sampling
from packprep.documents.reading import Rejected
from packprep.recipe import read_recipe
from tests.command_line import inside
from tests.made import run_python, table, texts, write, write_lines
from tests.test_bad_input import assert_good, build, command, rejects_of, stopped
from tests.tokenizer.engines_made import prefer_fast_engines
from tests.tokenizer.tokenizers_made import gpt2_like
from tests.twin.check import verify_with_twin

GOOD = b'{"text": "one good line"}\n'
MIB = 1 << 20
ROOM = 200 * MIB
"""What reading a bomb may take beyond an ordinary file: a document, its parts and copies, blocks of
16 MiB."""

READ = """
import json, os
from packprep.sources import formats as readers
from packprep.errors import SourceError
path = {path!r}
format, compression = readers.detect_format(path)
size = os.path.getsize(path)
found = dict(documents=0, text=0, rejects={{}})
try:
    for piece in range(readers.count_pieces(path, format, compression, size)):
        part = readers.Slice(path, 0, size, format, compression, piece, 0, 1, 1, 1 << 20)
        for batch in readers.read(part, "text"):
            found["documents"] += len(batch.texts)
            found["text"] += sum(map(len, batch.texts))
            for reject in batch.rejects:
                found["rejects"][reject.reason] = found["rejects"].get(reject.reason, 0) + 1
except SourceError as error:
    found["error"] = str(error)
(peak,) = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps(dict(found, peak=peak)))
"""


def read(path):
    """What reading a file gives, or the error by which it is refused, and the peak of memory of the
    process that did it."""
    done = run_python(READ.format(path=str(path)))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """The peak of reading an ordinary file, by format."""
    folder = tmp_path_factory.mktemp("ordinary")
    some = texts(2000, mean_bytes=3000)
    pyarrow.parquet.write_table(pyarrow.table({"text": some}), folder / "in.parquet")
    write_lines(folder / "in.jsonl", some)
    return {name: read(folder / f"in.{name}")["peak"] for name in ("jsonl", "parquet")}


def compress(path, parts, **parameters):
    """A compressed file of parts, written as they come."""
    if path.suffix == ".gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.writelines(parts)
    else:
        compressor = zstandard.ZstdCompressor(**parameters)
        with open(path, "wb") as file, compressor.stream_writer(file) as writer:
            for part in parts:
                writer.write(part)
    return path


# Compressed files


@pytest.mark.long
@pytest.mark.alike(2)
@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("byte", [b'{"text": "', b"\0", b"0"])
def test_one_line_without_end(tmp_path, ordinary, ending, byte):
    parts = [GOOD, *[byte * (MIB // len(byte))] * 200, b"\n", GOOD]
    path = compress(tmp_path / f"in.jsonl.{ending}", parts)
    assert path.stat().st_size < 4 * MIB
    found = read(path)
    assert (found["documents"], found["rejects"]) == (2, {"too_large": 1})
    assert found["peak"] < ordinary["jsonl"] + ROOM


@pytest.mark.long
@pytest.mark.parametrize("line, documents", [(b"\n", 0), (b'{"text":""}\n', 800_000)])
def test_lines_without_number(tmp_path, ordinary, line, documents):
    parts = [line * 100_000] * (documents // 100_000 or 300)
    found = read(compress(tmp_path / "in.jsonl.zst", [GOOD, *parts, GOOD]))
    assert (found["documents"], found["rejects"]) == (documents + 2, {})
    assert found["peak"] < ordinary["jsonl"] + ROOM


def test_a_compressed_text_file_without_end(tmp_path, ordinary):
    found = read(compress(tmp_path / "in.txt.zst", [bytes(MIB)] * 1000))
    assert (found["documents"], found["rejects"]) == (0, {"too_large": 1})
    assert found["peak"] < ordinary["jsonl"] + ROOM


def test_a_frame_that_asks_for_a_window_of_2_gib(tmp_path, ordinary):
    """A window is memory only as far as it is filled."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=31, hash_log=10, chain_log=10, write_content_size=False, compression_level=1
    )
    found = read(compress(tmp_path / "in.jsonl.zst", [GOOD] * 10, compression_params=parameters))
    assert found["documents"] == 10 and found["peak"] < ordinary["jsonl"] + ROOM


@pytest.mark.parametrize("descriptor, window", [(0b11000000, b"\xa8"), (0b11100000, b"")])
@pytest.mark.parametrize("size", [1 << 31, 1 << 60, (1 << 64) - 2])
def test_a_frame_that_declares_a_huge_content(tmp_path, descriptor, window, size):
    """Its one block says that it is the last."""
    head = struct.pack("<IB", 0xFD2FB528, descriptor) + window + struct.pack("<Q", size)
    write(tmp_path / "in.jsonl.zst", head + struct.pack("<I", 1 | len(GOOD) << 3)[:3] + GOOD)
    message = stopped(tmp_path, "in.jsonl.zst")
    assert str(tmp_path / "in.jsonl.zst") in message and "corrupt zstd data" in message


# Lines


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "x", "o": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"text": "x", "o": ' + b'{"o":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"text": ' + b'{"text":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"text": "x", "o": ' + b"[" * 100_000,
        b"[" * 1_000_000,
    ],
)
def test_a_line_nested_100_000_deep_is_a_reject(tmp_path, line):
    write(tmp_path / "in.jsonl", GOOD + line + b"\n" + GOOD)
    said = build(tmp_path)
    assert said.status == 0 and said.json["documents"]["rejected"] == {"malformed_json": 1}, said
    assert (
        said.json["documents"]["used"] == 2
        and "nested deeper than 256 levels" in rejects_of(tmp_path / "out")[0]["detail"]
    )
    assert_good(tmp_path / "out")


@pytest.mark.parametrize(
    "digits",
    [b"-" + b"7" * 1_000_000, b"1e" + b"7" * 1_000_000, b"0." + b"7" * 1_000_000, b"7" * 1_000_000],
)
def test_a_number_of_a_million_digits(tmp_path, digits):
    """It is not read where it is not asked for; as a text it is none; as a bound it lies beyond the
    text, if it is whole."""
    lines = [
        b'{"text": "good", "n": %s}',
        b'{"text": %s}',
        b'{"text": "a", "loss_spans": [[0, %s]]}',
    ]
    write(tmp_path / "in.jsonl", b"".join(line % digits + b"\n" for line in lines) + GOOD)
    said = build(tmp_path)
    assert said.status == 0, said
    assert said.json["documents"]["rejected"] == {
        "not_a_string": 1,
        **({} if digits.isdigit() else {"bad_loss_spans": 1}),
    }
    assert_good(tmp_path / "out")


@pytest.mark.long
def test_a_line_of_a_gibibyte(tmp_path, ordinary):
    """Uncompressed: with a hole for its middle."""
    with open(tmp_path / "in.jsonl", "wb") as file:
        file.write(GOOD + b'{"text": "')
        file.seek(1 << 30, os.SEEK_CUR)
        file.write(b'"}\n' + GOOD)
    found = read(tmp_path / "in.jsonl")
    assert (found["documents"], found["rejects"]) == (2, {"too_large": 1})
    assert found["peak"] < ordinary["jsonl"] + ROOM


@pytest.mark.long
@pytest.mark.parametrize(
    "record, rejected",
    [
        ({"messages": [{"role": "user", "content": "a"}] * 1_000_000}, {"too_large": 1}),
        ({"messages": [{"role": "user", "content": "a"}] * 100_000}, {"bad_messages": 1}),
        ({"messages": [1] * 1_000_000}, {"bad_messages": 1}),
        ({"text": "a" * 65536, "loss_spans": [[i, i + 1] for i in range(0, 65536, 2)] * 2}, {}),
        ({"text": "a", "loss_spans": [[0, 1]] * 65536 + [[1, 0]]}, {"bad_loss_spans": 1}),
        ({"text": "a", "loss_spans": [[0, 1]] * 65536 + [[0, 1]]}, {"bad_loss_spans": 1}),
        pytest.param(
            {"text": "ab " * 300_000, "loss_spans": [[3 * i, 3 * i + 1] for i in range(300_000)]},
            {"bad_loss_spans": 1},
            marks=pytest.mark.campaign,
        ),
        ({"text": "a", "keys": {f"{i}": i for i in range(100_000)}}, {}),
    ],
)
def test_lists_of_very_many_entries(tmp_path, record, rejected):
    write(tmp_path / "in.jsonl", GOOD + json.dumps(record).encode() + b"\n" + GOOD)
    said = build(tmp_path, **{"output.shard_text_bytes": '"40MB"'})
    assert said.status == 0 and said.json["documents"]["rejected"] == rejected, said


# Tables


def repeated(value, rows):
    """A column of one value, by a dictionary."""
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(rows, np.int32)), pyarrow.array([value])
    )


@pytest.mark.long
def test_a_dictionary_that_repeats_a_long_text(tmp_path, ordinary):
    column = pyarrow.table({"text": repeated("z" * (4 * MIB), 300)})
    pyarrow.parquet.write_table(column, tmp_path / "in.parquet", row_group_size=300)
    assert (tmp_path / "in.parquet").stat().st_size < MIB
    found = read(tmp_path / "in.parquet")
    assert (found["documents"], found["text"]) == (300, 300 * 4 * MIB)
    # the rows read at once, and copies of them
    assert found["peak"] < ordinary["parquet"] + 4 * 256 * MIB


@pytest.mark.long
def test_an_arrow_file_whose_dictionary_repeats_a_long_text(tmp_path, ordinary):
    column = pyarrow.table({"text": repeated("z" * (4 * MIB), 300)})
    with pyarrow.ipc.new_file(tmp_path / "in.arrow", column.schema) as file:
        file.write_table(column)
    found = read(tmp_path / "in.arrow")
    assert (found["documents"], found["text"]) == (300, 300 * 4 * MIB)
    assert found["peak"] < ordinary["parquet"] + 4 * 256 * MIB


@pytest.mark.long
@pytest.mark.parametrize("text", ["ab", ""])
def test_a_row_group_of_millions_of_rows(tmp_path, ordinary, text):
    pyarrow.parquet.write_table(
        pyarrow.table({"text": repeated(text, 2_000_000)}),
        tmp_path / "in.parquet",
        row_group_size=2_000_000,
    )
    found = read(tmp_path / "in.parquet")
    assert found["documents"] == 2_000_000 and found["peak"] < ordinary["parquet"] + ROOM


def test_more_documents_than_a_shard_may_have_are_refused(tmp_path, monkeypatch):
    """Empty ones, which no number of text bytes keeps apart; short ones before anything is made."""
    monkeypatch.setattr(reading, "MOST_DOCUMENTS", 1000)
    column = [*["text"] * 100, *[""] * 5000]
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "in.parquet")
    message = stopped(tmp_path, "in.parquet")
    assert "in.parquet" in message and "more than 1000 documents" in message
    monkeypatch.setattr(planning, "MOST_DOCUMENTS", 1000)
    short = tmp_path / "short"
    short.mkdir()
    write_lines(short / "in.jsonl", ["a few"] * 5000)
    message = stopped(short, "in.jsonl", **{"output.shard_text_bytes": 20_000})
    assert re.search(
        "each of 2 shards would have about 2[45].. documents, but the maximum is 1000", message
    )
    least = re.search("output.shard_text_bytes to ([0-9]+) or less", message)
    assert least
    said = build(short, "in.jsonl", **{"output.shard_text_bytes": int(least[1])})
    assert said.status == 0 and said.json["documents"]["used"] == 5000, said


@pytest.mark.long
@pytest.mark.alike(3)  # each form, and each kind
@pytest.mark.parametrize("form", ["arrow", "parquet", "stream"])
@pytest.mark.parametrize("kind", ["plain", "dictionary"])
def test_a_gibibyte_in_forty_texts(tmp_path, ordinary, form, kind):
    """Compressed to some kilobytes. Each text is beyond what a document may have; where all are one
    page, the file is."""
    long = "z" * (25 * MIB)
    column = (
        repeated(long, 40)
        if kind == "dictionary"
        else pyarrow.array([long] * 40, pyarrow.large_string())
    )
    path = write_compressed(tmp_path, pyarrow.table({"text": column}), form)
    assert path.stat().st_size < 2 * MIB
    found = read(path)
    assert found["peak"] < ordinary["parquet"] + 2 * ROOM
    assert (
        found["rejects"] == {"too_large": 40}
        if kind == "dictionary"
        else "bytes after decompression" in found["error"]
    )


@pytest.mark.long
@pytest.mark.parametrize("size", [512 * MIB, pytest.param(1024 * MIB, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("form", ["parquet", "arrow", "stream"])
def test_one_text_of_half_a_gibibyte_or_more(tmp_path, ordinary, form, size):
    column = pyarrow.array(["good", "z" * size, "good, too"], pyarrow.large_string())
    path = write_compressed(tmp_path, pyarrow.table({"text": column}), form)
    assert path.stat().st_size < MIB
    found = read(path)
    assert str(path) in found["error"] and "bytes after decompression" in found["error"]
    assert found["peak"] < ordinary["parquet"] + ROOM


def write_compressed(folder, table, form):
    """A table as a Parquet file, an Arrow file or an Arrow stream, compressed."""
    path = folder / ("in.parquet" if form == "parquet" else "in.arrow")
    if form == "parquet":
        pyarrow.parquet.write_table(
            table, path, compression="zstd", use_dictionary=["text"] if _repeats(table) else False
        )
        return path
    new = pyarrow.ipc.new_file if form == "arrow" else pyarrow.ipc.new_stream
    with new(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(table)
    return path


def _repeats(table):
    return pyarrow.types.is_dictionary(table.schema.field("text").type)


def varint(value):
    """A number as Thrift's compact protocol writes it."""
    value, out = value << 1, b""
    while value > 127:
        value, out = value >> 7, out + bytes([value & 127 | 128])
    return out + bytes([value])


@pytest.mark.parametrize("rows", [1, 4_999, 5_001, 2**31, 2**62, 2**63 - 1])
def test_a_footer_that_lies_of_its_rows(tmp_path, rows):
    """Every number 5000 of the footer, rows and values of columns and row groups, becomes another.
    One that is less is
    believed: then these are the rows."""
    path = tmp_path / "in.parquet"
    column = [f"row {i}" for i in range(5000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=5000)
    data = path.read_bytes()
    (length,) = struct.unpack("<I", data[-8:-4])
    footer = data[-8 - length : -8]
    assert footer.count(varint(5000)) >= 3
    footer = footer.replace(varint(5000), varint(rows))
    write(path, data[: -8 - length] + footer + struct.pack("<I", len(footer)) + b"PAR1")
    if rows < 5000:
        said = build(tmp_path, "in.parquet", **{"output.shard_text_bytes": 50_000})
        assert said.json["documents"]["used"] == rows
        assert_good(tmp_path / "out")
    else:
        assert str(path) in stopped(tmp_path, "in.parquet")


def test_statistics_that_lie_are_not_looked_at(tmp_path):
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["aaaaaaaa", "zzzzzzzz"]}), path, compression="none"
    )
    data = path.read_bytes()
    at = data.rindex(b"zzzzzzzz")
    assert data.count(b"zzzzzzzz") >= 2
    write(path, data[:at] + b"AAAAAAAA" + data[at + 8 :])
    assert build(tmp_path, "in.parquet").json["documents"]["used"] == 2


# Tokenizers and templates that make much of little

BUILD = """
import sys
from packprep.cli import main
sys.argv = ["packprep", *{arguments!r}]
try:
    main()
finally:
    (peak,) = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(peak, file=sys.stderr)
"""


def build_measured(folder, *options):
    """(what a build's --json says, its peak of memory) of a build in a process of its own."""
    arguments = [*command(folder, "in.jsonl", **{"documents.max_bad_fraction": 1.0}), *options]
    done = run_python(BUILD.format(arguments=list(map(str, arguments))), RUST_BACKTRACE="0")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout), int(done.stderr.split()[-1])


@pytest.fixture(scope="module")
def ordinary_build(tmp_path_factory):
    """The peak of an ordinary build by the reference engine."""
    folder = tmp_path_factory.mktemp("ordinary_build")
    write_lines(folder / "in.jsonl", texts(200))
    write(folder / "tokenizer.json", json.dumps(gpt2_like()).encode())
    return build_measured(
        folder, "--tokenizer", folder / "tokenizer.json", "--set", "engine=reference"
    )[1]


def replacing(kind, *pairs):
    return {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {kind: old}, "content": new} for old, new in pairs
        ],
    }


@pytest.mark.long
@pytest.mark.alike(1)
@pytest.mark.parametrize(
    "normalizer",
    [
        replacing("String", ("a", "b" * 1000), ("b", "c" * 1000), ("c", "d" * 1000)),
        replacing("Regex", ("[ad]", "b" * 1000), ("b", "c" * 10_000)),
    ],
)
def test_a_normalizer_that_makes_a_gigabyte_of_a_word(tmp_path, ordinary_build, normalizer):
    write_lines(tmp_path / "in.jsonl", [*["a word of a few"] * 150, *["the one"] * 50])
    write(
        tmp_path / "tokenizer.json", json.dumps({**gpt2_like(), "normalizer": normalizer}).encode()
    )
    said, peak = build_measured(tmp_path, "--tokenizer", tmp_path / "tokenizer.json")
    assert (
        said["documents"]["rejected"] == {"tokenizer_error": 150}
        and said["documents"]["used"] == 50
    )
    assert peak < ordinary_build + ROOM
    assert verify_with_twin(tmp_path / "out")["faults"] == 0


def test_a_decoder_that_makes_a_gigabyte_of_a_token(tmp_path, ordinary_build):
    """It is asked for the tokens' texts, to prove an engine on and to show."""
    steps = replacing("String", ("a", "b" * 1000), ("b", "c" * 1000), ("c", "d" * 1000))[
        "normalizers"
    ]
    tokenizer = {
        **gpt2_like(),
        "decoder": {"type": "Sequence", "decoders": [gpt2_like()["decoder"], *steps]},
    }
    write_lines(tmp_path / "in.jsonl", ["a word of a few"] * 50)
    write(tmp_path / "tokenizer.json", json.dumps(tokenizer).encode())
    said, peak = build_measured(tmp_path, "--tokenizer", tmp_path / "tokenizer.json")
    assert said["documents"]["used"] == 50 and peak < ordinary_build + ROOM
    for view in ("--row=0", "--grep=word"):
        assert inside("inspect", tmp_path / "out", view).status == 0


def test_a_decoder_that_fails_proves_no_engine(tmp_path, monkeypatch):
    """It panics at a token shorter than what it cuts off."""
    prefer_fast_engines(monkeypatch)
    tokenizer = {**gpt2_like(), "decoder": {"type": "Strip", "content": "t", "start": 9, "stop": 9}}
    write_lines(tmp_path / "in.jsonl", texts(50))
    write(tmp_path / "tokenizer.json", json.dumps(tokenizer).encode())
    said = inside(*command(tmp_path), "--tokenizer", tmp_path / "tokenizer.json")
    assert said.status == 0 and "engine fastokens is not used: it cannot be checked" in said.err


@pytest.mark.long
@pytest.mark.alike(1)
@pytest.mark.parametrize(
    "bomb",
    [
        "{{ [[1] * 99999] | tojson(indent=99999) }}",
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ raise_exception }}",
    ],
)
def test_a_template_that_makes_much_of_a_long_conversation(tmp_path, ordinary_build, bomb):
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages | length > 2 %}"
        + bomb
        + "{% endif %}"
    )
    write(tmp_path / "chat.jinja", template.encode())
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]
    lines = [{"messages": turns}, {"messages": turns * 2}] * 2
    write(tmp_path / "in.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    said, peak = build_measured(
        tmp_path, "--set", f"documents.chat_template={tmp_path / 'chat.jinja'}"
    )
    assert said["documents"]["rejected"] == {"template_error": 2} and said["documents"]["used"] == 2
    assert peak < ordinary_build + ROOM


# What is no file


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "txt", "jsonl.gz"])
def test_a_source_that_is_no_file(tmp_path, monkeypatch, kind, ending):
    path = tmp_path / f"in.{ending}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(tmp_path)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    message = stopped(tmp_path, path.name)
    assert (
        str(path) in message and "is not a regular file but a pipe, a device or a socket" in message
    )


def test_what_is_no_file_among_what_a_pattern_matches_is_passed_over(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("/dev/zero")
    write(tmp_path / "c.jsonl", GOOD)
    assert build(tmp_path, "*.jsonl").json["documents"]["used"] == 1


# The rest of a build


def test_a_shard_that_expands_beyond_measure_is_refused(tmp_path, monkeypatch):
    """As one whose compressed file holds in one step many times what the plan gives a shard."""
    monkeypatch.setattr(work, "LEAST_BOUND", 1 << 20)
    monkeypatch.setattr(work, "BEYOND_PLAN", 1)
    path = compress(
        tmp_path / "in.jsonl.zst",
        [GOOD, *[json.dumps({"text": "0" * 99_000}).encode() + b"\n"] * 40],
    )
    message = stopped(tmp_path, path.name, **{"output.shard_text_bytes": 500_000})
    assert (
        str(path) in message
        and "has more than 1048576 bytes of text" in message
        and "shard_text_bytes" in message
    )


def test_a_sample_of_what_expands_is_counted_and_not_held(tmp_path, monkeypatch):
    path = compress(
        tmp_path / "in.jsonl.zst",
        [json.dumps({"text": text}).encode() + b"\n" for text in texts(3000)] * 30,
    )
    assert path.stat().st_size < sampling.PIECE_TEXT_BYTES * 4
    recipe = read_recipe(table("in.jsonl.zst"), tmp_path)
    whole = make_plan(look_up(recipe, {}))["sources"][0]
    monkeypatch.setattr(sampling, "HELD_BYTES", 1 << 20)
    held = make_plan(look_up(recipe, {}))["sources"][0]
    assert held["ratios"] == whole["ratios"] and held["documents"] == whole["documents"]
    assert held["tokens"] == whole["tokens"]


def test_a_reject_costs_the_bytes_of_its_line_and_few_more():
    class Named:
        files = type("F", (), {"names": ["a"]})
        first_file, name = 0, "s"

    rejected = Rejected()
    tracemalloc.start()
    for i in range(50_000):
        rejected.add(Named, 0, 0, i, "malformed_json", f"not JSON; the line begins '{i:08}'")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (
        held < 50_000 * 120
        and len(rejected) == 50_000
        and rejected.counts("s") == {"malformed_json": 50_000}
    )
