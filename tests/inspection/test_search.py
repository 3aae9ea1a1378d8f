import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from packprep import open_dataset
from packprep.dataset.shard import open_shard
from packprep.errors import ArgumentError, DatasetError
from packprep.inspection import search
from packprep.inspection.search import describe_matches, print_matches
from tests import command_line, made
from tests.inspection import datasets_made
from tests.tokenizer import tokenizers_made


def counted(text, needle):
    """Where a needle begins in a text, one match after the other."""
    found, at = [], text.find(needle)
    while at >= 0:
        found.append(at)
        at = text.find(needle, at + len(needle))
    return found


@pytest.mark.alike(16)
@pytest.mark.parametrize("needle", ["foo", "本 ", "wörld 日", "(read) ünïcödé", "e" * 30])
def test_what_is_found_is_what_the_documents_hold(known, needle):
    """Every segment's own bytes of its document, read from the source, are searched by
    themselves."""
    expected = []
    for segment in datasets_made.segments(known):
        for at in counted(segment["text"], needle.encode()):
            begin = segment["tokens"][0] + at
            expected.append(
                (segment["row"], segment["segment"], [begin, begin + len(needle.encode())])
            )
    found = describe_matches(known.out, needle, 200)
    assert [(m["row"], m["segment"], m["tokens"]) for m in found["matches"]] == expected[:200]
    assert found["found"] == len(expected)
    assert found["matching_segments"] == len({place[:2] for place in expected})
    assert found["matching_rows"] == len({place[0] for place in expected})
    assert found["segments"] == sum(
        known.dataset.row(r).n_segments for r in range(len(known.dataset))
    )
    assert found["tokens"] == sum(len(segment["text"]) for segment in datasets_made.segments(known))


def test_the_slots_of_a_match_hold_it(known):
    for match in describe_matches(known.out, "o", 400)["matches"]:
        row = known.dataset.row(match["row"])
        task = next(task for task in known.dataset.tasks if task["name"] == match["task"])
        ids = row.labels if task["label_alignment"] == "same_slot" else row.tokens
        assert bytes(ids[slot] for a, b in match["slots"] for slot in range(a, b)) == b"o"
        assert all((row.segment_ids[a:b] == match["segment"]).all() for a, b in match["slots"])


def test_a_snippet_is_what_stands_around_it(known):
    by_place = {(s["row"], s["segment"]): s for s in datasets_made.segments(known)}
    for match in describe_matches(known.out, "o", 200)["matches"]:
        segment = by_place[match["row"], match["segment"]]
        at = match["tokens"][0] - segment["tokens"][0]
        before = segment["text"][:at].decode(errors="backslashreplace")
        after = segment["text"][at + 1 :].decode(errors="backslashreplace")
        assert before.endswith(match["before"]) and after.startswith(match["after"])
        assert len(match["before"]) == min(search.SNIPPET, len(before)) or not before.isascii()


def test_of_many_matches_the_first_are_listed_and_the_others_counted(known, capsys):
    whole, some = describe_matches(known.out, "o", 9), describe_matches(known.out, "o", 3)
    assert some == {**whole, "matches": whole["matches"][:3]} and whole["found"] > 9
    print_matches(json.loads(json.dumps(some)))
    out = capsys.readouterr().out
    assert f"… and {whole['found'] - 3:,} more" in out and f"found {whole['found']:,} times" in out
    assert out.count("»o«") == 3 and "\x1b" not in out
    print_matches(describe_matches(known.out, "no such text", 3))
    assert "not found; searched: " in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.alike(5)
@pytest.mark.parametrize("at_once", [1, 1000])
def test_how_many_tokens_are_decoded_at_once_changes_nothing(known, monkeypatch, at_once):
    whole = describe_matches(known.out, "foo", 50)
    monkeypatch.setattr(search, "TOKENS_AT_ONCE", at_once)
    assert describe_matches(known.out, "foo", 50) == whole


def test_a_match_across_two_segments_is_none_and_hides_none(tmp_path):
    """baa and aaab one after the other hold aaa three times, of which one lies inside of a
    segment."""
    made.write_lines(tmp_path / "a.jsonl", ["baa", "aaab"] * 20)
    made.build(made.table("a.jsonl", tasks=[{"preset": "causal"}]), tmp_path, tmp_path / "o")
    found = describe_matches(tmp_path / "o", "aaa", 100)
    assert found["found"] == 20 and {tuple(match["tokens"]) for match in found["matches"]} == {
        (0, 3)
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "parsed",
    [tokenizers_made.byte_level("<|end|>", "<|pad|>"), tokenizers_made.t5_like(60)],
    ids=["byte level", "unigram"],
)
def test_of_other_vocabularies_it_finds_what_their_library_decodes(tmp_path, parsed):
    tokenizers_made.write(tmp_path / "tok", parsed)
    texts = ["the quick brown fox", "a lazy dog jumps over the quick fox", *made.texts(40, 5)]
    made.write_lines(tmp_path / "a.jsonl", texts)
    specials = (
        {"eos": "<|end|>", "pad": "<|pad|>"}
        if "Byte" in json.dumps(parsed["decoder"])
        else {"eos": "</s>"}
    )
    recipe = made.table("a.jsonl", tokenizer="tok", tasks=[{"preset": "causal"}], specials=specials)
    made.build(recipe, tmp_path, tmp_path / "o")
    tokenizer = Tokenizer.from_file(str(tmp_path / "o" / "tokenizer.json"))
    dataset = open_dataset(tmp_path / "o")
    for needle in ("quick", "the", "fox", "corpus b", "o"):
        found = {
            (m["row"], m["segment"]): 0
            for m in describe_matches(tmp_path / "o", needle, 10**6)["matches"]
        }
        for match in describe_matches(tmp_path / "o", needle, 10**6)["matches"]:
            found[match["row"], match["segment"]] += 1
        expected = {}
        for r in range(len(dataset)):
            row = dataset.row(r)
            for i in range(row.n_segments):
                begin, n = int(row.segments["begin"][i]), int(row.segments["tokens"][i])
                text = tokenizer.decode(
                    row.tokens[begin : begin + n].tolist(), skip_special_tokens=False
                )
                if count := text.count(needle):
                    expected[r, i + 1] = count
        assert found == expected and expected


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    made.write_lines(folder / "a.jsonl", made.texts(60))
    made.build(made.table("a.jsonl", tasks=[{"preset": "causal"}]), folder, folder / "o")
    return folder / "o"


def test_an_empty_text_is_refused(small):
    with pytest.raises(ArgumentError, match="the text is empty"):
        describe_matches(small, "", 10)
    with pytest.raises(ArgumentError, match="not valid Unicode"):
        describe_matches(small, "\udc80", 10)


@pytest.mark.parametrize(
    ("column", "dtype", "value", "message"),
    [
        ("segment_tokens", "<i4", 400, "its slots do not match its task's length formula"),
        ("segment_tokens", "<i4", -1, "segment_tokens is out of range"),
        ("segment_task", "<u2", 999, "beyond the manifest's"),
        ("cu_seqlens", "<i4", 9999, "The file is damaged"),
        ("tokens", "<u2", 60_000, "token 60000 is not below the vocabulary size"),
    ],
)
def test_a_damaged_shard_is_named(small, tmp_path, column, dtype, value, message):
    shutil.copytree(small, tmp_path / "copy")
    path = tmp_path / "copy" / "shards" / "000" / "000000.safetensors"
    shard, data = open_shard(path, 512, "uint16"), bytearray(path.read_bytes())
    begin, size = shard.begins[column], np.dtype(dtype).itemsize
    count = 512 * shard.rows if column == "tokens" else 4
    data[begin : begin + size * count] = np.full(count, value, dtype).tobytes()
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=rf"(?s)000000\.safetensors.*{message}.*packprep verify"):
        describe_matches(tmp_path / "copy", "the", 10)


@pytest.mark.long
def test_as_it_is_typed(small):
    said = command_line.packprep("inspect", small, "--grep", "corpus", "--limit", 1)
    assert (
        said.status == 0
        and said.out.count("»corpus«") == 1
        and "--limit shows more than 1" in said.out
    )
    assert command_line.inside("inspect", small, "--grep", "corpus", "--json").json["found"] > 1
    assert "the text is empty" in command_line.refused("inspect", small, "--grep", "")
