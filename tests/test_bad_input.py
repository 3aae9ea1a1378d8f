"""Inputs as they come: what one document spoils is a counted reject, what a file or a recipe spoils
ends with exit status 2 and a message that names the place and the remedy. Nothing is lost, nothing
is half written, no traceback is seen.
"""

import base64
import gzip
import json
import os
import shutil

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pyarrow.parquet.encryption
import pytest
import zstandard

from packprep.verification import verify_dataset
from tests.command_line import inside, packprep, refused
from tests.made import Silent, contents, temporaries, texts, write, write_lines
from tests.twin.check import verify_with_twin

GOOD = [b'{"text": "one good line"}', b'{"text": "and another one, longer than the first"}']


def build(folder, *inputs, **settings):
    """Build inputs of a folder into its `out`, whatever part of the documents is bad; gives what
    was said."""
    return inside(*command(folder, *inputs, **{"documents.max_bad_fraction": 1.0, **settings}))


def command(folder, *inputs, **settings):
    options = {"output.shard_text_bytes": 2000, **settings}
    given = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    paths = [folder / name for name in inputs or ["in.jsonl"]]
    return ["build", *paths, "--out", folder / "out", "--seq-length", 128, "--json", *given]


def stopped(folder, *inputs, **settings):
    """The message of a build that must fail, whose output is whole as far as it goes."""
    message = refused(*command(folder, *inputs, **settings))
    assert_whole(folder / "out")
    return message


def assert_whole(out):
    """No partial shard, no temporary, no manifest; every receipt has its files."""
    assert not (out / "dataset.json").exists() and temporaries(out) == []
    for path in out.glob("receipts/*/*.json"):
        receipt = json.loads(path.read_text())
        for entry in (receipt, receipt["rejects"]):
            assert entry is None or (out / entry["file"]).stat().st_size == entry["bytes"]


def rejects_of(out):
    """All records of the rejects files."""
    return [
        json.loads(line)
        for path in sorted(out.glob("rejects/*/*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


def assert_good(out):
    assert verify_dataset(out, -1, {}, (0, 1), 0, Silent())["listed"] == []


# Documents that cannot be used


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "no end', "malformed_json"),
        (b"not json at all", "malformed_json"),
        (b'{"text": "a"} {"text": "b"}', "malformed_json"),
        (b"[1, 2]", "malformed_json"),
        (b'"just a text"', "malformed_json"),
        (b"\x00\x01\x02\x00", "malformed_json"),
        (b'{"text": "nested", "x": ' + b"[" * 400 + b"]" * 400 + b"}", "malformed_json"),
        (b'{"body": "another key"}', "missing_text"),
        (b"{}", "missing_text"),
        (b'{"text": 5}', "not_a_string"),
        (b'{"text": null}', "not_a_string"),
        (b'{"text": ["a", "b"]}', "not_a_string"),
        (b'{"text": {"text": "deeper"}}', "not_a_string"),
        (b'{"text": "\xff\xfe"}', "invalid_utf8"),
        (b'{"text": "cut \xe2\x82"}', "invalid_utf8"),
        (b'{"text": "good", "other": "\xff"}', "invalid_utf8"),
        (b'{"text": "\\ud800"}', "lone_surrogate"),
        (b'{"text": "a\\udc00b"}', "lone_surrogate"),
        (b'{"text": ""}', "empty"),
    ],
)
def test_a_document_that_cannot_be_used_is_a_counted_reject(tmp_path, line, reason):
    write(tmp_path / "in.jsonl", b"\n".join([GOOD[0], line, GOOD[1]]) + b"\n")
    said = build(tmp_path)
    assert said.status == 0, said
    documents = said.json["documents"]
    assert (documents["read"], documents["used"], documents["rejected"]) == (3, 2, {reason: 1})
    (record,) = rejects_of(tmp_path / "out")
    assert record["reason"] == reason and record["detail"]
    assert (record["source"], record["file"], record["position"]) == (
        "source0",
        "in.jsonl",
        len(GOOD[0]) + 1,
    )
    ledger = json.loads((tmp_path / "out/dataset.json").read_text())["ledger"]
    assert ledger["sources"]["source0"]["documents"]["rejected"] == {reason: 1}
    assert_good(tmp_path / "out")


def test_blank_lines_and_a_last_line_without_end_are_no_documents(tmp_path):
    write(tmp_path / "in.jsonl", b"\n\n" + GOOD[0] + b"\r\n  \n\n" + GOOD[1])
    documents = build(tmp_path).json["documents"]
    assert documents["used"] == 2 and documents["rejected"] == {}
    assert_good(tmp_path / "out")


def test_a_byte_order_mark_is_no_part_of_the_first_document(tmp_path):
    write(tmp_path / "in.jsonl", b"\xef\xbb\xbf" + b"\n".join(GOOD) + b"\n")
    documents = build(tmp_path).json["documents"]
    assert documents["used"] + sum(documents["rejected"].values()) == 2
    assert_good(tmp_path / "out")


def test_a_line_of_50_mb_is_one_reject(tmp_path):
    with open(tmp_path / "in.jsonl", "wb") as file:
        file.write(GOOD[0] + b'\n{"text": "')
        for _ in range(50):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + GOOD[1] + b"\n")
    said = build(tmp_path, **{"output.shard_text_bytes": '"30MB"'})
    assert said.status == 0 and said.json["documents"]["rejected"] == {"too_large": 1}, said
    assert said.json["documents"]["used"] == 2
    (record,) = rejects_of(tmp_path / "out")
    assert (
        record["reason"] == "too_large" and record["detail"] == "a line of more than 33554432 bytes"
    )
    assert_good(tmp_path / "out")


def test_too_many_bad_documents_stop_the_build_before_it_begins(tmp_path):
    write(tmp_path / "in.jsonl", b"\n".join(GOOD + [b"bad"] * 101 + GOOD) + b"\n")
    message = stopped(tmp_path)
    assert "101 of 105 documents are bad (malformed_json 101)" in message
    assert (
        "documents.max_bad_fraction = 0.001" in message
        and f"{tmp_path / 'in.jsonl'}: document at" in message
    )
    assert "101 of 105" in inside("plan", tmp_path / "in.jsonl").out


def test_too_many_bad_documents_stop_the_build_before_it_is_published(tmp_path):
    """Of special text the sample does not tell."""
    write(tmp_path / "in.jsonl", b"\n".join(GOOD + [b'{"text": "a <pad> b"}'] * 101 + GOOD) + b"\n")
    settings = {"documents.special_text": "reject"}
    message = stopped(tmp_path, **settings)
    assert (
        "101 of 105 documents are bad (special_text 101)" in message
        and str(tmp_path / "out/rejects") in message
    )
    before = contents(tmp_path / "out")
    assert len(rejects_of(tmp_path / "out")) == 101
    status = inside("status", tmp_path / "out")
    assert (
        status.status == 1
        and "complete, but not published: 101 of 105 documents are bad" in status.out
    )
    assert "101 of 105" in stopped(tmp_path, **settings) and contents(tmp_path / "out") == before
    said = inside(*command(tmp_path, **settings, **{"documents.max_bad_fraction": 1.0}))
    assert said.status == 0 and said.json["documents"]["rejected"] == {"special_text": 101}


def test_bad_documents_may_be_allowed(tmp_path):
    write(tmp_path / "in.jsonl", b"\n".join(GOOD + [b"bad"] * 101) + b"\n")
    said = build(tmp_path)
    assert said.status == 0 and said.json["documents"]["rejected"] == {"malformed_json": 101}


def test_empty_documents_are_not_bad(tmp_path):
    write(tmp_path / "in.jsonl", b"\n".join(GOOD + [b'{"text": ""}'] * 300) + b"\n")
    said = build(tmp_path)
    assert said.status == 0 and said.json["documents"]["rejected"] == {"empty": 300}


def test_bad_documents_can_be_made_to_fail(tmp_path):
    write(tmp_path / "in.jsonl", b"\n".join([GOOD[0], b'{"text": 7}']) + b"\n")
    message = stopped(tmp_path, **{"documents.bad_documents": "fail"})
    place = f"{tmp_path / 'in.jsonl'}: document at {len(GOOD[0]) + 1}: not_a_string"
    assert place in message and 'documents.bad_documents = "reject"' in message


def test_special_text_can_be_made_a_reject(tmp_path):
    write(tmp_path / "in.jsonl", b"\n".join([*GOOD, b'{"text": "a <pad> b"}']) + b"\n")
    said = build(tmp_path, **{"documents.special_text": "reject"})
    assert said.json["documents"]["rejected"] == {"special_text": 1}
    assert_good(tmp_path / "out")


def test_the_advice_on_special_tokens_in_messages_lets_them_be_built(tmp_path):
    talk = [{"role": "user", "content": "a <pad> b"}, {"role": "assistant", "content": "4"}]
    write(tmp_path / "in.jsonl", (json.dumps({"messages": talk}) + "\n").encode() * 3)
    write(tmp_path / "chat.jinja", b"{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    options = {"documents.chat_template": tmp_path / "chat.jinja", "documents.append_eos": "false"}
    message = stopped(tmp_path, **options)
    assert '<pad> in a message\n  hint: set documents.special_text = "special"' in message
    shutil.rmtree(tmp_path / "out")
    said = build(tmp_path, **options, **{"documents.special_text": "special"})
    assert said.status == 0 and said.json["documents"]["used"] == 3


def test_inputs_without_one_document_that_can_be_used(tmp_path):
    write(tmp_path / "in.jsonl", b'{"text": ""}\n' + b"bad\n" * 20)
    message = stopped(tmp_path)
    assert "20 of 21 documents are bad (malformed_json 20)" in message
    assert f"{tmp_path / 'in.jsonl'}: document at 13" in message and "Nothing was built" in message
    message = stopped(tmp_path, **{"documents.max_bad_fraction": 1.0})
    assert "21 documents were read, but none can be used (malformed_json 20, empty 1)" in message
    assert (
        f"{tmp_path / 'in.jsonl'}: document at 13" in message
        and "build into another folder" in message
    )
    assert len(rejects_of(tmp_path / "out")) == 21
    assert inside("plan", tmp_path / "in.jsonl").status == 0


# Files that cannot be read


def compressed(kind, data):
    return gzip.compress(data) if kind == "gz" else zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("kind", ["zst", "gz"])
@pytest.mark.parametrize("keep", [0.1, 0.6, 0.99])
def test_a_truncated_compressed_file(tmp_path, kind, keep):
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts(400))
    data = compressed(kind, lines)
    path = write(tmp_path / f"in.jsonl.{kind}", data[: int(len(data) * keep)])
    message = stopped(tmp_path, path.name)
    assert str(path) in message and "truncated" in message and "fetch the file again" in message


@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_a_corrupt_compressed_file(tmp_path, kind):
    path = write(
        tmp_path / f"in.jsonl.{kind}", b"this is no compressed data at all, and long enough"
    )
    message = stopped(tmp_path, path.name)
    assert str(path) in message and "corrupt" in message and "fetch the file again" in message


@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_what_was_committed_before_a_truncated_file_was_met_stays(tmp_path, kind):
    """The truncation lies at the file's end, so the first shards are made; then the build stops, as
    often as it is tried."""
    lines = b"".join(
        json.dumps({"text": text}).encode() + b"\n" for text in texts(6000, mean_bytes=400)
    )
    path = write(tmp_path / f"in.jsonl.{kind}", compressed(kind, lines)[:-30])
    settings = {"output.shard_text_bytes": 200_000}
    assert "truncated" in stopped(tmp_path, path.name, **settings)
    committed = contents(tmp_path / "out")
    assert any(name.startswith("receipts/") for name in committed)
    assert "truncated" in stopped(tmp_path, path.name, **settings)
    assert contents(tmp_path / "out") == committed
    said = inside("status", tmp_path / "out", "--json")
    assert said.status == 1 and 0 < said.json["done"] < said.json["shards"]


def test_an_empty_file_among_others_is_no_fault(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt"):
        write(tmp_path / "in" / name, b"")
    write(tmp_path / "in/d.jsonl", b"\n".join(GOOD))
    said = build(tmp_path, "in/*")
    assert said.status == 0 and said.json["documents"]["used"] == 2, said
    assert_good(tmp_path / "out")


def test_nothing_but_empty_files(tmp_path):
    write(tmp_path / "in.jsonl", b"")
    assert "the inputs are empty" in stopped(tmp_path)


def test_an_empty_parquet_file_is_a_broken_one(tmp_path):
    write(tmp_path / "in.parquet", b"")
    write_lines(tmp_path / "in.jsonl", texts(3))
    message = stopped(tmp_path, "in.parquet", "in.jsonl")
    assert str(tmp_path / "in.parquet") in message


def test_a_pattern_that_matches_nothing(tmp_path):
    message = stopped(tmp_path, "*.jsonl")
    assert "matches no file (looked for" in message and str(tmp_path / "*.jsonl") in message


def test_a_file_that_is_not_there(tmp_path):
    message = stopped(tmp_path, "absent.jsonl")
    assert f"{tmp_path / 'absent.jsonl'}: no such file" in message


def test_a_folder_instead_of_files(tmp_path):
    write(tmp_path / "data/in.jsonl", GOOD[0])
    message = stopped(tmp_path, "data")
    assert (
        f"{tmp_path / 'data'} is a folder\n  hint: give its files, as in {tmp_path / 'data'}/**/*.jsonl"
        in message
    )


def test_a_folder_among_what_a_pattern_matches_is_passed_over(tmp_path):
    write(tmp_path / "in/a.jsonl", b"\n".join(GOOD))
    (tmp_path / "in/b.jsonl").mkdir()
    assert build(tmp_path, "in/*").json["documents"]["used"] == 2


def test_a_file_that_may_not_be_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    write(tmp_path / "in.jsonl", GOOD[0]).chmod(0)
    message = stopped(tmp_path)
    assert str(tmp_path / "in.jsonl") in message and "no permission" in message


def test_a_name_that_is_not_utf8(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.jsonl", "wb") as file:
        file.write(GOOD[0])
    message = stopped(tmp_path, "*.jsonl")
    assert "is not valid UTF-8\n  hint: rename the file" in message and message.encode()


def test_a_file_that_changed_its_size_under_the_build(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", texts(30))
    assert build(tmp_path).status == 0
    for name in ("dataset.json", "receipts/000/000000.json"):
        (tmp_path / "out" / name).unlink()
    path.write_bytes(path.read_bytes() + GOOD[0] + b"\n")
    message = stopped(tmp_path)
    assert "input 'in.jsonl' of source 'source0'" in message and "another folder" in message


def test_a_file_whose_text_changed_between_two_commits_of_one_shard(tmp_path):
    """The size is the same, so only a second commit of a shard that stands can tell: here there is
    none, and replay tells."""
    path = write_lines(tmp_path / "in.jsonl", texts(30))
    assert build(tmp_path).status == 0
    path.write_bytes(path.read_bytes().replace(b"corpus", b"CORPUS"))
    said = inside("verify", tmp_path / "out", "--replay", "all")
    assert said.status == 1 and "source 'source0' changed since the build" in said.out


@pytest.mark.long
def test_a_parquet_footer_that_contradicts_its_schema_does_not_end_the_process(tmp_path):
    """A column that may be null is said to be none that may; pyarrow's metadata would end the
    process by SIGABRT."""
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path, store_schema=False)
    optional, required = (b"\x25" + bytes([repetition]) + b"\x18\x04text" for repetition in (2, 0))
    assert path.read_bytes().count(optional) == 1
    path.write_bytes(path.read_bytes().replace(optional, required))
    said = packprep(*command(tmp_path, "in.parquet"))
    assert said.status == 2 and f"{path}: not a readable Parquet file" in said.err, said


class KeysInTheClear(pyarrow.parquet.encryption.KmsClient):
    def wrap_key(self, key, master):
        return base64.b64encode(key)

    def unwrap_key(self, key, master):
        return base64.b64decode(key)


@pytest.mark.parametrize("readable_footer", [True, False])
def test_an_encrypted_parquet_file_does_not_end_the_process(tmp_path, readable_footer):
    settings = pyarrow.parquet.encryption.EncryptionConfiguration(
        footer_key="one", column_keys={"other": ["text"]}, plaintext_footer=readable_footer
    )
    factory = pyarrow.parquet.encryption.CryptoFactory(lambda configuration: KeysInTheClear())
    keys = factory.file_encryption_properties(
        pyarrow.parquet.encryption.KmsConnectionConfig(), settings
    )
    table = pyarrow.table({"text": ["secret"] * 9})
    with pyarrow.parquet.ParquetWriter(
        tmp_path / "in.parquet", table.schema, encryption_properties=keys
    ) as writer:
        writer.write_table(table)
    said = packprep(*command(tmp_path, "in.parquet"))
    assert (
        said.status == 2
        and f"{tmp_path / 'in.parquet'}: " in said.err
        and "write it without encryption" in said.err
    ), said


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_without_the_text_column(tmp_path, kind):
    table = pyarrow.table({"id": [1, 2], "body": ["a", "b"]})
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    message = stopped(tmp_path, path.name)
    assert str(path) in message and "text" in message and "body" in message


def test_a_text_column_that_holds_numbers(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "in.parquet")
    message = stopped(tmp_path, "in.parquet")
    assert str(tmp_path / "in.parquet") in message and "text" in message


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("keep", [3, 200, -10])
def test_a_truncated_table(tmp_path, kind, keep):
    table = pyarrow.table({"text": texts(100)})
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in stopped(tmp_path, path.name)


def test_nulls_in_a_text_column_are_rejects(tmp_path):
    table = pyarrow.table({"text": ["good", None, "also good"]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    said = build(tmp_path, "in.parquet")
    assert (
        said.json["documents"]["used"] == 2
        and sum(said.json["documents"]["rejected"].values()) == 1
    )
    assert rejects_of(tmp_path / "out")[0]["position"] == 1


def test_a_compressed_table(tmp_path):
    write(tmp_path / "in.parquet.gz", gzip.compress(b"x"))
    assert "hint: decompress the file" in stopped(tmp_path, "in.parquet.gz")


def test_a_binary_file_that_is_called_jsonl(tmp_path):
    data = bytes(byte for byte in range(256) if byte not in b"\r\n") * 20
    write(tmp_path / "in.jsonl", data + b"\n" + GOOD[0])
    said = build(tmp_path)
    assert said.status == 0 and said.json["documents"]["used"] == 1


# Tokenizers


def test_a_tokenizer_without_the_roles_that_the_recipe_needs(tmp_path):
    tokenizer = word_tokenizer(tmp_path)
    write_lines(tmp_path / "in.jsonl", texts(3))
    message = refused(*command(tmp_path), "--tokenizer", tokenizer, "--tasks", "ul2r")
    assert "lacks" in message and "eos" in message and 'missing = "add"' in message
    assert not (tmp_path / "out").exists()


def word_tokenizer(folder):
    """A tokenizer.json with three words and no special token."""
    vocabulary = {"[UNK]": 0, "one": 1, "two": 2}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    return write(folder / "words.json", json.dumps(table).encode())


def without_unknown(folder):
    """word_tokenizer without its [UNK]: it fails on any other word."""
    table = json.loads(word_tokenizer(folder).read_bytes())
    table["model"]["vocab"] = {"<s>": 0, "one": 1, "two": 2}
    table["added_tokens"] = [
        {
            "id": 0,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ]
    return write(folder / "words.json", json.dumps(table).encode())


@pytest.mark.parametrize("supervised", [False, True])
def test_a_document_on_which_the_tokenizer_fails_is_a_counted_reject(tmp_path, supervised):
    spans = {"loss_spans": [[4, 7]]} if supervised else {}
    lines = [json.dumps({"text": text, **spans}).encode() for text in ["one two one"] * 40]
    lines.insert(20, json.dumps({"text": "one three", **spans}).encode())
    write(tmp_path / "in.jsonl", b"\n".join(lines) + b"\n")
    tokenizer = without_unknown(tmp_path)
    options = {"specials.eos": '"<s>"', "specials.pad": '"<s>"', "documents.min_tokens": 1}
    said = inside(*command(tmp_path, **options), "--tokenizer", tokenizer)
    assert said.status == 0 and said.json["documents"]["rejected"] == {"tokenizer_error": 1}, said
    (record,) = rejects_of(tmp_path / "out")
    assert record["position"] == 20 * (len(lines[0]) + 1) and record["file"] == "in.jsonl"
    assert_good(tmp_path / "out")
    assert verify_with_twin(tmp_path / "out")["faults"] == 0


def test_a_tokenizer_that_fails_on_everything_is_one_error(tmp_path):
    write_lines(tmp_path / "in.jsonl", texts(30))
    options = {"specials.eos": '"<s>"', "specials.pad": '"<s>"'}
    message = refused(*command(tmp_path, **options), "--tokenizer", without_unknown(tmp_path))
    assert (
        "30 documents were read, but none can be used" in message
        and "give a tokenizer that supports any text" in message.lower()
    )


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"not json", b"\xff\xfe\x00", b'{"model": {"type": "BPE"}}']
)
def test_a_file_that_is_no_tokenizer(tmp_path, data):
    write_lines(tmp_path / "in.jsonl", texts(3))
    path = write(tmp_path / "tokenizer.json", data)
    message = refused(*command(tmp_path), "--tokenizer", path)
    assert str(path) in message and not (tmp_path / "out").exists()


def test_a_folder_without_a_tokenizer(tmp_path):
    write_lines(tmp_path / "in.jsonl", texts(3))
    (tmp_path / "model").mkdir()
    message = refused(*command(tmp_path), "--tokenizer", tmp_path / "model")
    assert str(tmp_path / "model") in message and "tokenizer.json" in message


# Lengths


@pytest.mark.parametrize("length", [1, 100, 4095])
def test_a_seq_length_that_is_no_multiple_of_8(tmp_path, length):
    write(tmp_path / "in.jsonl", GOOD[0])
    message = refused(
        "build", tmp_path / "in.jsonl", "--out", tmp_path / "out", "--seq-length", length
    )
    assert f"seq_length = {length}" in message and (
        "a multiple of 8" in message or "whole number" in message
    )


@pytest.mark.parametrize(
    "length, tasks",
    [(8, "ul2r"), (8, "prefix_lm"), (8, "t5"), (0, "causal"), (2**31, "causal"), (-8, "causal")],
)
def test_a_seq_length_that_is_too_small_or_too_large_for_the_task(tmp_path, length, tasks):
    write(tmp_path / "in.jsonl", GOOD[0])
    settings = ["--set", "documents.min_tokens=3", "--set", "documents.prepend_bos=true"]
    arguments = [
        "build",
        tmp_path / "in.jsonl",
        "--out",
        tmp_path / "out",
        "--seq-length",
        length,
        "--tasks",
        tasks,
    ]
    said = inside(*arguments, *settings)
    if said.status == 0:  # 8 slots are enough for some
        assert_good(tmp_path / "out")
    else:
        assert said.status == 2 and "seq_length" in said.err and not (tmp_path / "out").exists()


def test_a_row_that_cannot_hold_a_cut_of_its_task(tmp_path):
    write(tmp_path / "in.jsonl", GOOD[0])
    message = refused(*command(tmp_path, **{"documents.min_tokens": 80}), "--tasks", "ul2r")
    assert "task 'r'" in message and "raise seq_length" in message


def test_pad_seq_to_mult_that_does_not_divide_the_row(tmp_path):
    write(tmp_path / "in.jsonl", GOOD[0])
    message = stopped(tmp_path, **{"packing.pad_seq_to_mult": 24})
    assert "packing.pad_seq_to_mult = 24 does not divide seq_length = 128" in message


# Output that cannot be written


def test_an_output_in_a_folder_that_cannot_be(tmp_path):
    write(tmp_path / "in.jsonl", GOOD[0])
    write(tmp_path / "file", b"")
    message = refused(
        "build", tmp_path / "in.jsonl", "--out", tmp_path / "file/out", "--seq-length", 128
    )
    assert str(tmp_path / "file") in message


def test_a_message_is_what_a_user_sees_of_all_this(tmp_path):
    """Once in a process of its own, with workers: the same message, and no traceback of any of
    them."""
    lines = b"".join(
        json.dumps({"text": text}).encode() + b"\n" for text in texts(6000, mean_bytes=400)
    )
    write(tmp_path / "in.jsonl.gz", gzip.compress(lines)[:-30])
    said = packprep(
        *command(tmp_path, "in.jsonl.gz", **{"output.shard_text_bytes": 200_000}), "--workers", 2
    )
    assert said.status == 2 and said.out == "" and "the gzip data is truncated" in said.err
    begins = ("packprep: ", "  hint: ")
    assert [line for line in said.err.splitlines() if not line.startswith(begins)] == []
    assert_whole(tmp_path / "out")
    assert list(tmp_path.glob("out/receipts/*/*.json"))
