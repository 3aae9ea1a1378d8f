"""`packprep init`: a first recipe that builds, of data and a tokenizer that need keys."""

import json
import tomllib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packprep.recipe import presets
from tests.command_line import inside, packprep, refused
from tests.made import texts, write, write_lines
from tests.tokenizer import tokenizers_made


def init(folder, *arguments):
    """The recipe that it writes, which builds."""
    said = inside("init", *arguments, "--out", folder / "recipe.toml")
    assert said.status == 0, said
    text = (folder / "recipe.toml").read_text()
    built = packprep("build", folder / "recipe.toml", "--out", folder / "out", "--json")
    assert built.status == 0 and built.json["made"] > 0, built
    return text, tomllib.loads(text)


def test_a_folder_gives_a_source_of_each_format_with_the_keys_that_find_its_texts(tmp_path):
    records = [{"id": str(i), "content": text, "url": "here"} for i, text in enumerate(texts(30))]
    write(tmp_path / "data/a.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
    (tmp_path / "data/deep").mkdir()
    pq.write_table(pa.table({"number": list(range(20)), "body": texts(20, 1)}), tmp_path / "data/deep/b.parquet")
    write(tmp_path / "data/notes.md", b"# Notes\n")
    write(tmp_path / "data/picture.png", b"\x89PNG")
    text, table = init(tmp_path, tmp_path / "data")
    assert f"# warning: {tmp_path}/data: left out, as their names say no format: 1 .png; to read" in text
    assert [(s["name"], s["paths"], s.get("text_key")) for s in table["sources"]] == [
        ("data-jsonl", ["data/**/*.jsonl"], "content"),
        ("data-parquet", ["data/**/*.parquet"], "body"),
        ("data-text", ["data/**/*.md"], None),
    ]
    assert 'text_key = "content"  # of id, content, url\n' in text
    assert table["tokenizer"] == "bytes" and table["tasks"] == [{"preset": "causal"}]
    first, *_ = text.splitlines()
    assert first == "#:schema ./recipe.schema.json"
    assert json.loads((tmp_path / "recipe.schema.json").read_text())["properties"].keys() >= table.keys()


@pytest.mark.long(beyond=1)
@pytest.mark.parametrize("preset", ["t5", "ul2r", "llada"])
def test_roles_that_a_tokenizer_lacks_are_given(tmp_path, preset):
    folder = write_tokenizer(tmp_path)
    write_lines(tmp_path / "a.jsonl", texts(30))
    text, table = init(tmp_path, tmp_path / "a.jsonl", "--tokenizer", folder, "--tasks", preset)
    assert table["tokenizer"] == folder.name and table["tasks"] == [{"preset": preset}] and table["specials"]
    assert all(name in text for name in presets())


def write_tokenizer(folder):
    """A byte-level tokenizer without reserved tokens."""
    return tokenizers_made.write(folder / "tok", tokenizers_made.gpt2_like())


def test_the_suggested_rows_hold_most_documents_whole(tmp_path):
    lengths = [300] * 19 + [5000]
    write_lines(tmp_path / "a.jsonl", ["x" * n for n in lengths])
    text, table = init(tmp_path, tmp_path / "a.jsonl")
    assert table["seq_length"] == 512 and "90 % up to 300; about 95% stay whole" in text
    write_lines(tmp_path / "b.jsonl", ["x" * n for n in (100_000, 200_000)])
    assert inside("init", tmp_path / "b.jsonl", "--out", tmp_path / "b.toml", "--json").json["seq_length"] == 4096


def test_files_that_were_left_out_of_a_folder_are_read_by_the_pattern_that_it_names(tmp_path):
    for i in range(3):
        write(tmp_path / f"data/{i}.py", b"x = 1\n" * 50)
        write(tmp_path / f"data/{i}.md", b"# Notes\n" * 50)
    given = (tmp_path / "data", "--out", tmp_path / "first.toml", "--json")
    (warning,) = [w for w in inside("init", *given).json["warnings"] if "left out" in w]
    assert "3 .py; to read them as text, name data/**/*.py" in warning
    _, table = init(tmp_path, tmp_path / "data", tmp_path / warning.rpartition(" ")[2])
    assert [s["paths"] for s in table["sources"]] == [["data/**/*.md"], ["data/**/*.py"]]


def test_a_text_in_an_object_is_found(tmp_path):
    lines = [json.dumps({"id": i, "data": {"lang": "en", "body": text}}) for i, text in enumerate(texts(30))]
    write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    text, table = init(tmp_path, tmp_path / "a.jsonl")
    assert table["sources"][0]["text_key"] == "data.body" and "# of id, data.lang, data.body\n" in text


def test_nothing_is_overwritten_and_what_no_key_mends_is_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl", texts(10))
    (tmp_path / "recipe.toml").write_text("mine")
    out = ("--out", tmp_path / "recipe.toml")
    assert "is there, and is not overwritten" in refused("init", tmp_path / "a.jsonl", *out)
    assert (tmp_path / "recipe.toml").read_text() == "mine" and not (tmp_path / "recipe.schema.json").exists()
    out = ("--out", tmp_path / "other.toml")
    assert "no such file" in refused("init", tmp_path / "none.jsonl", *out)
    (tmp_path / "empty").mkdir()
    assert "a folder without files that are known by their names (.jsonl, " in refused("init", tmp_path / "empty", *out)
    assert "there is no folder" in refused("init", tmp_path / "a.jsonl", "--out", tmp_path / "no/r.toml")
    assert "unknown preset 'casual'; did you mean 'causal'?" in refused(
        "init", tmp_path / "a.jsonl", "--tasks", "casual", *out
    )
    write(tmp_path / "pairs.jsonl", b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    assert "preference data" in refused("init", tmp_path / "pairs.jsonl", *out)
    assert not (tmp_path / "other.toml").exists()
