"""A look at the begin of a source's files: what spoils them all is an error, what spoils some of
them is not."""

import gzip
import json
import random

import numpy as np
import pytest

from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.sources.files import Files
from packprep.sources.first_look import (
    BYTES,
    FILES,
    LINE_BYTES,
    _values,
    advice_on,
    begin_of,
    encoding_of,
    first_look,
)
from tests.made import write
from tests.sources.formats.parts import COMPRESS


def look(folder, files, messages=True, kinds=(), **source):
    """The message of a first look at files of these bytes; "" if it finds nothing."""
    paths = [write(folder / name, data) for name, data in files.items()]
    sizes = np.array([path.stat().st_size for path in paths], np.int64)
    given = Source(name="web", paths=("*",), **source)
    try:
        first_look(
            given, Files(0, list(files), sizes, given.format, str(folder)), messages, "", kinds
        )
    except SourceError as error:
        return str(error)
    return ""


def line(**document):
    return json.dumps(document).encode() + b"\n"


@pytest.mark.parametrize(
    "data",
    [
        line(text="one"),
        line(text=None),
        b"\xef\xbb\xbf" + line(text="one"),
        line(messages=[]),
        line(body="x") + line(text="one"),
        line(body="x") + b"no JSON\n",
        line(text="one") + b"no JSON\n",
        b"[1, 2]\n" + line(text="one"),
        b"\n\n" + line(text="one"),
        b"",
        b"\n",
        b"[" * 100_000,
    ],
)
def test_what_documents_alone_spoil_is_left_to_the_rejects(tmp_path, data):
    assert look(tmp_path, {"a.jsonl": data}) == ""


@pytest.mark.parametrize(
    "data, words",
    [
        (b"Once upon a time.\n", 'set format = "text" if each file is one text'),
        (b"id,text\n1,one\n", "write one JSON object per line, with the text at a key"),
        (b'<html lang="en">\n', "write one JSON object per line, with the text at a key"),
        (b'"one"\n', "write one JSON object per line, with the text at a key"),
        (b"{'text': 'one'}\n", "json.dumps"),
        (b'{"text": "one"}\r{"text": "two"}\r', "not by CR"),
        (b'{"text": "one"}{"text": "two"}', "jq -c ."),
    ],
)
def test_lines_that_are_no_json_are_called_text_only_where_they_may_be(tmp_path, data, words):
    said = look(tmp_path, {"a.jsonl": data})
    assert (
        "none of its first" in said
        and words in said
        and ("Once" in data.decode() or "format" not in said)
    )
    assert (
        look(
            tmp_path,
            {"a.jsonl": data + line(text="one") * 3 if b"\n" in data else line(text="one")},
        )
        == ""
    )


def test_lists_of_token_ids_lead_to_their_format_and_key(tmp_path):
    ids, asked = line(input_ids=[1, 2, 3, 4], source="web"), {"format": "tokens"}
    long_row, read_both = line(tokens=[7] * 30_000), "lists of token ids are read with"
    cases = (
        (ids, {}, 'set format = "tokens", and the tokenizer that made them'),
        (long_row, {}, 'set format = "tokens", and the tokenizer that made them'),
        (line(input_ids=[1], body="a text"), {}, 'as in text_key = "body"'),
        (ids, {"text_key": "input_ids"}, read_both),
        (ids, asked, ""),
        (long_row, asked, ""),
        (line(input_ids=None) + ids, asked, ""),
        (line(labels=[1], ids=[1, 2]), asked, 'token ids, as in text_key = "ids"'),
        (line(x=1), asked, "none of its first 1 documents has the key 'input_ids' or 'tokens'"),
        (line(input_ids="1 2"), asked, "is a string, not a list of token ids"),
        (b"1 2 3\n", asked, "none of its first 1 lines is a JSON object"),
        (b"[" + ids + b"]", asked, "it is one JSON array"),
    )
    for name, compress in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)):
        for data, source, words in cases:
            said = look(tmp_path, {name: compress(data)}, **source)
            assert words in said and bool(words) == bool(said), (data[:80], source, said)


def test_json_lines_by_the_name_of_a_text(tmp_path):
    lines = line(text="one") + line(text="two")
    said = look(tmp_path, {"a.txt": lines})
    assert "one document with braces and keys" in said and 'format = "jsonl"' in said
    assert (
        look(tmp_path, {"a.txt": lines}, format="text")
        == look(tmp_path, {"a.txt": lines + b"one\n"})
        == ""
    )
    assert (
        look(tmp_path, {"a.txt": lines, "b.txt": b"prose"})
        == look(tmp_path, {"a.txt": b"{}, a set\n"})
        == ""
    )


def test_binary_data_is_not_guessed_to_be_latin_1(tmp_path):
    assert "leave this binary data out of the paths" in look(
        tmp_path, {"a.bin.txt": b"\x07\xff\x00\x80model"}
    )


def test_a_message_s_text_at_another_key_than_content(tmp_path):
    def messages(**answer):
        return line(messages=[{"role": "user", "content": "a"}, {"role": "assistant", **answer}])

    assert "a text at 'text'" in look(tmp_path, {"a.jsonl": messages(text="b") * 3})
    for sound in (
        messages(content="b"),
        messages(tool_calls=[{"name": "f"}], text="b"),
        messages(name="b"),
    ):
        assert (
            look(tmp_path, {"a.jsonl": sound + messages(text="b") * 3})
            == look(tmp_path, {"a.jsonl": sound})
            == ""
        )
    size = write(tmp_path / "a.jsonl", messages(text="b")).stat().st_size
    files = Files(0, ["a.jsonl"], np.array([size], np.int64), "auto", str(tmp_path))
    first_look(Source(name="web", paths=("*",)), files, True, "{{ message.text }}")


def test_loss_spans_that_seem_to_count_bytes_are_warned_of_once_with_a_count(tmp_path, capsys):
    of_bytes = [line(text="äöüß", loss_spans=[[2, 8]]), line(text="one", loss_spans=[[0, 1]])] * 3
    assert look(tmp_path, {name: b"".join(of_bytes) for name in ("a.jsonl", "b.jsonl")}) == ""
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "loss_spans of 6 of 12 inspected documents" in said
    assert (
        f"{tmp_path}/a.jsonl: its loss_spans reach 8, but its text has 4 characters (8 bytes)"
        in said
    )
    for end in (4, 5, 9, 1 << 40):  # all of it, eos too, or all there may be
        assert look(tmp_path, {"a.jsonl": line(text="äöüß", loss_spans=[[0, end]])}) == ""
    assert capsys.readouterr().err == ""


def test_media_that_count_bytes_in_all_documents_or_that_no_kind_reads(tmp_path, capsys):
    media = [{"at": at, "tokens": 3, "ref": "r", "kind": "image"} for at in (2, 8)]
    of_bytes = {"a.jsonl": line(text="one") + line(text="äöüß", media=media)}
    assert "its media reach 8, but its text has 4 characters" in look(
        tmp_path, of_bytes, kinds=("image",)
    )
    assert (
        look(
            tmp_path, {**of_bytes, "b.jsonl": line(text="äöüß", media=media[:1])}, kinds=("image",)
        )
        == ""
    )
    assert "media of 1 of 2 inspected documents" in capsys.readouterr().err
    of_characters = {"a.jsonl": line(text="one") + line(text="äöüß", media=media[:1])}
    assert look(tmp_path, of_characters, kinds=("image",)) == ""
    assert "which would be ignored\nhint: name their kinds in specials.media" in look(
        tmp_path, of_characters
    )
    assert look(tmp_path, of_characters, False) == ""
    # fields of another's own
    for other in ("print", ["web"], [], [{"kind": "image", "url": "x"}], {}):
        assert look(tmp_path, {"a.jsonl": line(text="one", media=other)}) == ""


def test_a_key_that_no_document_has(tmp_path):
    said = look(tmp_path, {"a.jsonl": line(id="7", body="a longer text")})
    assert (
        'text_key = "body"' in said
        and "'id', 'body'" in said
        and said.startswith(f"source 'web': {tmp_path}/a.jsonl")
    )
    turns = [{"role": "ai", "text": "an answer"}, {"input": "a question"}]
    said = look(tmp_path, {"a.jsonl": line(id="7", trajectory=turns)})
    assert "hint: write the objects of 'trajectory' as messages" in said and "text_key" not in said
    said = look(tmp_path, {"a.jsonl": line(tags=[{"a": 1}], body="a text of more characters")})
    assert 'text_key = "body"' in said
    assert look(tmp_path, {"a.jsonl": line(body="x")}, text_key="body") == ""
    assert "messages" in look(tmp_path, {"a.jsonl": line(messages=[])}, messages=False)


@pytest.mark.parametrize(
    "encoding, begin, named",
    [
        ("utf-16", "FF FE", "UTF-16"),
        ("utf-16-le", "7B 00", "UTF-16LE"),
        ("utf-16-be", "00 7B", "UTF-16BE"),
        ("utf-32", "FF FE", "UTF-32"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_in_another_encoding_is_named_with_the_way_out(
    tmp_path, encoding, begin, named, name
):
    data = (line(text="é") * 9).decode().encode(encoding)
    said = look(tmp_path, {name: data})
    assert f"convert it from {named} (it starts with {begin}) to UTF-8: iconv" in said
    assert said.endswith(f"iconv -f {named} -t UTF-8 {tmp_path}/{name} > {tmp_path}/utf8-{name}")
    assert said.endswith(advice_on("malformed_json", str(tmp_path / name), data))


def test_latin_1_is_guessed_where_nothing_is_utf8(tmp_path):
    bad, good = '{"text": "é"}\n'.encode("latin1"), '{"text": "é"}\n'.encode()
    assert "is UTF-8\nhint: if it is Latin-1, convert it: iconv -f latin1" in look(
        tmp_path, {"a.jsonl": bad * 3}
    )
    assert "if it is Latin-1" in look(tmp_path, {"a.txt": bad})
    for begin, encoding in (
        (b"a\0b\0c\0d\0", "UTF-16LE"),
        (b"a\0b\0c\0", ""),
        (b"a\0" * 32 + b"ab", "UTF-16LE"),
        (b"\0a" * 31 + b"ab", ""),
    ):
        assert encoding_of(begin) == encoding
    # cut in a character
    assert (
        look(tmp_path, {"a.jsonl": bad * 3 + good})
        == look(tmp_path, {"a.txt": "é".encode() * 100_001})
        == ""
    )


@pytest.mark.parametrize(
    "value, words",
    [([1, 2], "a list"), ({"a": 1}, "an object"), (7, "a number"), (True, "true or")],
)
def test_a_value_that_is_no_text(tmp_path, value, words):
    said = look(tmp_path, {"a.jsonl": line(text=value) * 3})
    assert f"all of its first 3 documents the value of 'text' is {words}" in said
    assert "set text_key" in said and 'format = "tokens"' in said
    for other in (line(text="x"), line(text=None), line(body="x")):
        assert look(tmp_path, {"a.jsonl": line(text=value) * 3 + other}) == ""


def test_one_good_file_is_enough_and_the_others_are_warned_of(tmp_path, capsys):
    bad = {f"a{i}.jsonl": line(body="x") for i in range(FILES - 1)}
    assert look(tmp_path, bad) and not capsys.readouterr().err
    assert look(tmp_path, {"b.jsonl": line(text="x"), **bad}) == ""
    said = capsys.readouterr().err
    assert (
        f"warning: source 'web': {FILES - 1} of {FILES} inspected files" in said
        and f"{tmp_path}/a0.jsonl: none of" in said
    )
    assert look(tmp_path, {"b.jsonl": line(text="x")}) == capsys.readouterr().err == ""


def test_a_text_in_an_object_is_found_by_its_whole_key(tmp_path):
    said = look(
        tmp_path,
        {"a.jsonl": line(id=1, data={"title": "x", "body": {"raw": "a longer text"}, "none": {}})},
    )
    assert "their keys are: 'id', 'data.title', 'data.body.raw', 'data.none'\n" in said
    assert said.endswith('text_key = "data.body.raw"')
    assert (
        look(tmp_path, {"a.jsonl": line(data={"body": {"raw": "x"}})}, text_key="data.body.raw")
        == ""
    )
    assert "'a.b'" in look(tmp_path, {"a.jsonl": line(**{"a.b": {"c": "no key names this"}})})


@pytest.mark.parametrize(
    "begin, words",
    [(b"PAR1", "Parquet"), (b"\x1f\x8b\x08", "gzip"), (b"BZh9", "bzip2"), (b"%PDF-1.7", "PDF")],
)
def test_a_file_of_another_kind(tmp_path, begin, words):
    assert words in look(tmp_path, {"a.jsonl": begin + bytes(20)}) and words in look(
        tmp_path, {"a.txt": begin + bytes(20)}
    )


def test_a_table_as_text_may_be_meant(tmp_path):
    assert "one document" in look(tmp_path, {"a.csv": b"a,b\n"})
    assert look(tmp_path, {"a.csv": b"a,b\n"}, format="text") == ""


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("size", [10, BYTES, BYTES + 1])
def test_what_is_seen_of_a_file_is_its_begin_and_whether_that_is_all(tmp_path, ending, size):
    data = b"x" * size
    path = write(tmp_path / f"a{ending}", gzip.compress(data) if ending else data)
    compression = "gzip" if ending else ""
    assert begin_of(str(path), path.stat().st_size, compression) == (data[:BYTES], size <= BYTES)


PAIR = line(prompt="q", chosen="a", rejected="b")


@pytest.mark.parametrize(
    "data, options, words",
    [
        (PAIR * 2, {}, ["its documents are not texts but preference data (chosen, rejected): packprep trains on one answer"]),
        (line(question="q", answer="a"), {}, ["question and answer", "name them prompt and completion"]),
        (line(conversations=[]), {"messages": False}, ["but sharegpt (conversations): set documents.loss_spans = \"use\""]),
        (line(messages=[]), {"messages": False}, ["but messages: set documents.loss_spans = \"use\""]),
        (line(x=1), {"messages_format": "alpaca"}, ["has 'instruction' and 'output'", "or messages_format to the layout"]),
        (line(x=1), {"messages_format": "sharegpt", "messages_key": "d"}, ["has 'd', which messages_format = 'sharegpt'"]),
        (line(id=1, data={"messages": [], "tools": []}), {}, ['set messages_key = "data.messages" and tools_key = "data.tools"']),
        (line(id=1, data={"conversations": []}), {}, ['set messages_key = "data.conversations"']),
        (line(id=1, dialog=[{"role": "user", "content": "q"}]), {}, ['set messages_key = "dialog"']),
        (line(id=1, turns=[{"from": "human", "value": "q"}]), {}, ['set messages_key = "turns"']),
    ],
)  # fmt: skip
def test_records_of_a_layout_are_told_and_never_advised_to_be_read_as_text(
    tmp_path, data, options, words
):
    found = look(tmp_path, {"a.jsonl": data}, **options)
    assert found and all(word in found for word in words) and "text_key (" not in found, found


@pytest.mark.parametrize(
    "data, options",
    [
        (PAIR + line(messages=[]), {}),
        (PAIR + line(text="t"), {}),
        (line(conversations=[]), {}),
        (line(prompt="q", completion="a"), {}),
        (line(dialog=[]), {"messages_key": "dialog"}),
        (line(data={"messages": []}), {"messages_key": "data.messages"}),
        (line(data={"text": "t"}), {"text_key": "data.text"}),
        (line(instruction="q", output="a", text="t"), {"messages_format": "alpaca"}),
    ],
)
def test_records_of_which_some_can_be_read_are_looked_at_by_the_reader(tmp_path, data, options):
    assert look(tmp_path, {"a.jsonl": data}, **options) == ""


@pytest.mark.parametrize("compression", ["gzip", ""])
@pytest.mark.parametrize("line_bytes", [BYTES, 10, BYTES - 1, BYTES + 1, 3 * BYTES])
def test_a_first_look_has_the_first_line_and_says_whether_it_has_the_whole_file(
    tmp_path, compression, line_bytes
):
    line = random.Random(0).randbytes(line_bytes).replace(b"\n", b"-") + b"\n"
    for content in (line, line + b"x" * (2 * BYTES), line[:-1]):
        data = COMPRESS[compression](content) if compression else content
        path = write(tmp_path / "a", data)
        begin, is_whole = begin_of(str(path), len(data), compression, has_lines=True)
        assert content.startswith(begin) and is_whole == (begin == content)
        assert is_whole or b"\n" in begin
        assert len(begin) >= min(BYTES, len(content))
        text, _ = begin_of(str(path), len(data), compression)
        assert text == content[:BYTES]


@pytest.mark.long
def test_a_file_without_an_end_of_line_is_looked_at_up_to_a_limit(tmp_path):
    content = b"x" * (2 * LINE_BYTES + BYTES)
    path = write(tmp_path / "a", content)
    begin, is_whole = begin_of(str(path), len(content), "", has_lines=True)
    assert LINE_BYTES <= len(begin) < 2 * LINE_BYTES and not is_whole


@pytest.mark.long
def test_keys_inside_objects_are_offered_three_objects_deep():
    document = {"a": {"b": {"c": {"d": {"e": 1}}}}, "x.y": {"z": 2}, "none": {}, "text": "t"}
    assert list(_values(document)) == [
        ("a.b.c.d", {"e": 1}),
        ("x.y", {"z": 2}),
        ("none", {}),
        ("text", "t"),
    ]
