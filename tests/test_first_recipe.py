"""`packprep init`: a first recipe that builds, of data and a tokenizer that need keys."""

import json
import tomllib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packprep.recipe import presets
from tests.command_line import inside, refused
from tests.made import texts, write, write_lines
from tests.tokenizer import tokenizers_made


def init(folder, *arguments):
    """The recipe that it writes, which builds without a warning, but for those that it repeats."""
    said = inside("init", *arguments, "--out", folder / "recipe.toml")
    assert said.status == 0 and "warning" not in said.err, said
    text = (folder / "recipe.toml").read_text()
    build = "build", folder / "recipe.toml", "--out", folder / "out", "--json"
    built = inside(*build, "--workers", 1)
    assert built.status == 0 and built.json["made"] > 0, built
    warnings = [
        line.removeprefix("packprep: ") for line in built.err.splitlines() if "warning: " in line
    ]
    assert all(f"# {warning}\n" in text for warning in warnings), warnings
    return text, tomllib.loads(text)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chats(path, count=20):
    """Conversations as JSON lines."""
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    write(path, (json.dumps({"messages": talk}) + "\n").encode() * count)
    return path


def chat_tokenizer(folder):
    """A tokenizer whose eos ends each turn of its chat template."""
    config = {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML}
    parsed = tokenizers_made.byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return tokenizers_made.write(folder / "chat", parsed, tokenizer_config=config)


def llama_tokenizer(folder, **config):
    """A tokenizer whose post-processor puts bos before a text."""
    return tokenizers_made.write(
        folder / "llama", tokenizers_made.llama3_like(), tokenizer_config=config
    )


def test_a_template_that_ends_in_eos_gets_no_second_one(tmp_path):
    text, table = init(
        tmp_path, chats(tmp_path / "a.jsonl"), "--tokenizer", chat_tokenizer(tmp_path)
    )
    assert table["documents"] == {"append_eos": False}
    assert (
        "append_eos = false  # the chat template writes <|im_end|> itself\n" in text
        and "warning" not in text
    )


@pytest.mark.parametrize("kind", ["texts", "conversations", "conversations with bos", "both"])
def test_bos_is_put_where_the_post_processor_puts_it_unless_a_template_does(tmp_path, kind):
    template = LLAMA if kind == "conversations with bos" else LLAMA.replace("{{ bos_token }}", "")
    config = {
        "eos_token": "<|eot_id|>",
        "bos_token": "<|begin_of_text|>",
        "chat_template": template,
    }
    if kind == "both":
        config["eos_token"] = "<|end_of_text|>"
    paths = [chats(tmp_path / "a.jsonl")] if kind != "texts" else []
    if kind in ("texts", "both"):
        write_lines(tmp_path / "b.jsonl", texts(30))
        paths.append(tmp_path / "b.jsonl")
    _, table = init(tmp_path, *paths, "--tokenizer", llama_tokenizer(tmp_path, **config))
    expected = {"prepend_bos": True} if kind in ("texts", "both") else {"append_eos": False}
    assert table["documents"] == expected


def test_conversations_and_texts_that_need_other_ends_are_not_in_one_recipe(tmp_path):
    write_lines(tmp_path / "b.jsonl", texts(30))
    out = ("--out", tmp_path / "r.toml")
    given = (chats(tmp_path / "a.jsonl"), tmp_path / "b.jsonl", *out)
    message = refused("init", *given, "--tokenizer", chat_tokenizer(tmp_path))
    assert "the chat template writes <|im_end|>" in message and "sources 'a' and 'b'" in message
    config = {
        "eos_token": "<|end_of_text|>",
        "bos_token": "<|begin_of_text|>",
        "chat_template": LLAMA,
    }
    message = refused("init", *given, "--tokenizer", llama_tokenizer(tmp_path, **config))
    assert "writes <|begin_of_text|>" in message and "documents.prepend_bos" in message
    assert not (tmp_path / "r.toml").exists()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_of_several_columns_of_strings_the_longest_is_the_text(tmp_path, kind):
    table = pa.table({"path": ["a.txt"] * 30, "blob": [b"x" * 9999] * 30, "content": texts(30)})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as file:
            file.write_table(table)
    text, recipe = init(tmp_path, path)
    assert recipe["sources"][0]["text_key"] == "content"
    assert 'text_key = "content"  # one of path, blob, content\n' in text


def test_a_given_text_key_is_of_the_sources_that_have_it(tmp_path):
    write(
        tmp_path / "a.jsonl",
        b"".join(json.dumps({"body": text}).encode() + b"\n" for text in texts(30)),
    )
    pq.write_table(pa.table({"path": ["a"] * 30, "content": texts(30, 1)}), tmp_path / "b.parquet")
    both = (tmp_path / "a.jsonl", tmp_path / "b.parquet")
    _, recipe = init(tmp_path, *both, "--text-key", "body")
    assert [source["text_key"] for source in recipe["sources"]] == ["body", "content"]
    out = ("--out", tmp_path / "r.toml")
    assert "the key 'boddy'" in refused("init", *both, "--text-key", "boddy", *out)
    assert "no column named 'boddy'" in refused("init", both[1], "--text-key", "boddy", *out)


def test_lists_of_token_ids_are_read_as_such(tmp_path):
    pq.write_table(pa.table({"input_ids": [[104, 105]] * 30}), tmp_path / "a.parquet")
    write(tmp_path / "b.jsonl", (json.dumps({"tokens": [104, 105] * 9000}) + "\n").encode() * 3)
    _, recipe = init(tmp_path, tmp_path / "a.parquet", tmp_path / "b.jsonl")
    assert [source["format"] for source in recipe["sources"]] == ["tokens", "tokens"]


def test_a_folder_gives_a_source_of_each_format_with_the_keys_that_find_its_texts(tmp_path):
    records = [{"id": str(i), "content": text, "url": "here"} for i, text in enumerate(texts(30))]
    write(
        tmp_path / "data/a.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode()
    )
    (tmp_path / "data/deep").mkdir()
    pq.write_table(
        pa.table({"number": list(range(20)), "body": texts(20, 1)}),
        tmp_path / "data/deep/b.parquet",
    )
    write(tmp_path / "data/notes.md", b"# Notes\n")
    write(tmp_path / "data/picture.png", b"\x89PNG")
    text, table = init(tmp_path, tmp_path / "data")
    assert (
        f"# warning: {tmp_path}/data: files of unknown formats are left out: 1 .png; to read"
        in text
    )
    assert [(s["name"], s["paths"], s.get("text_key")) for s in table["sources"]] == [
        ("data-jsonl", ["data/**/*.jsonl"], "content"),
        ("data-parquet", ["data/**/*.parquet"], "body"),
        ("data-text", ["data/**/*.md"], None),
    ]
    assert 'text_key = "content"  # one of id, content, url\n' in text
    assert table["tokenizer"] == "bytes" and table["tasks"] == [{"preset": "causal"}]
    first, *_ = text.splitlines()
    assert first == "#:schema ./recipe.schema.json"
    assert (
        json.loads((tmp_path / "recipe.schema.json").read_text())["properties"].keys()
        >= table.keys()
    )


@pytest.mark.parametrize("preset", ["t5", "ul2r", "llada"])
def test_roles_that_a_tokenizer_lacks_are_given(tmp_path, preset):
    folder = write_tokenizer(tmp_path)
    write_lines(tmp_path / "a.jsonl", texts(30))
    text, table = init(tmp_path, tmp_path / "a.jsonl", "--tokenizer", folder, "--tasks", preset)
    assert (
        table["tokenizer"] == folder.name
        and table["tasks"] == [{"preset": preset}]
        and table["specials"]
    )
    assert all(name in text for name in presets())


def write_tokenizer(folder):
    """A byte-level tokenizer without reserved tokens."""
    return tokenizers_made.write(folder / "tok", tokenizers_made.gpt2_like())


def test_rows_are_longer_where_short_ones_would_stay_emptier(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["x" * 300] * 99)
    text, table = init(tmp_path, tmp_path / "a.jsonl")
    assert (
        table["seq_length"] == 8192
        and "rows of 512 would have more padding" in text
        and "warning" not in text
    )


def test_a_folder_with_brackets_in_its_name_is_found_again(tmp_path):
    write_lines(tmp_path / "run [v1]/a.jsonl", texts(30))
    _, table = init(tmp_path, tmp_path / "run [v1]")
    assert table["sources"][0]["paths"] == ["run [[]v1]/**/*.jsonl"]


def test_the_suggested_rows_hold_most_documents_whole(tmp_path):
    lengths = [300] * 19 + [5000]
    write_lines(tmp_path / "a.jsonl", ["x" * n for n in lengths])
    text, table = init(tmp_path, tmp_path / "a.jsonl")
    assert table["seq_length"] == 512 and "90 % at most 300; about 95% fit in a row" in text
    write_lines(tmp_path / "b.jsonl", ["x" * n for n in (100_000, 200_000)])
    assert (
        inside("init", tmp_path / "b.jsonl", "--out", tmp_path / "b.toml", "--json").json[
            "seq_length"
        ]
        == 4096
    )


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
    lines = [
        json.dumps({"id": i, "data": {"lang": "en", "body": text}})
        for i, text in enumerate(texts(30))
    ]
    write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    text, table = init(tmp_path, tmp_path / "a.jsonl")
    assert (
        table["sources"][0]["text_key"] == "data.body"
        and "# one of id, data.lang, data.body\n" in text
    )


def test_nothing_is_overwritten_and_what_no_key_mends_is_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl", texts(10))
    (tmp_path / "recipe.toml").write_text("mine")
    out = ("--out", tmp_path / "recipe.toml")
    assert "already exists and is not overwritten" in refused("init", tmp_path / "a.jsonl", *out)
    assert (tmp_path / "recipe.toml").read_text() == "mine" and not (
        tmp_path / "recipe.schema.json"
    ).exists()
    out = ("--out", tmp_path / "other.toml")
    assert "no such file" in refused("init", tmp_path / "none.jsonl", *out)
    (tmp_path / "empty").mkdir()
    assert "no file in this folder has a known extension (.jsonl, " in refused(
        "init", tmp_path / "empty", *out
    )
    assert "no such folder" in refused(
        "init", tmp_path / "a.jsonl", "--out", tmp_path / "no/r.toml"
    )
    assert "unknown preset 'casual'; did you mean 'causal'?" in refused(
        "init", tmp_path / "a.jsonl", "--tasks", "casual", *out
    )
    write(tmp_path / "pairs.jsonl", b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    assert "preference data" in refused("init", tmp_path / "pairs.jsonl", *out)
    assert not (tmp_path / "other.toml").exists()
