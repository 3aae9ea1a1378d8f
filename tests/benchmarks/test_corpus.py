"""The corpus: the text of pages and dictionaries, each once, in one order; and a tokenizer with the
ranks as ids."""

import gzip
import json

import corpus
import pytest
from tokenizers import Tokenizer

pytestmark = pytest.mark.long


def test_the_text_of_a_page():
    page = (
        "<html><head><title>no</title></head><!-- no --><body><h1>One</h1>\n\n\n<p>two <b>three</b>"
        " &amp; four</p><script>no()</script></body></html>"
    )
    assert corpus.text_of_html(page).strip().split("\n") == ["One", "", "two three & four"]


def test_a_dictionary_gives_its_entries(tmp_path):
    first, second = "one: the first\n", "two: ü\n" + "x" * 70
    (tmp_path / "d.dict.dz").write_bytes(gzip.compress((first + second).encode()))
    size = len(second.encode())  # 79 = B·64 + P
    (tmp_path / "d.index").write_text(f"one\tA\tP\ntwo\tP\tB{chr(ord('A') + size - 64)}\n")
    assert list(corpus.dictionary_entries(tmp_path / "d.index")) == [first, second]


def test_documents_come_once_and_in_the_order_of_their_names_hashes(tmp_path):
    texts = [f"document number {i} " * 5 for i in range(20)]
    files = []
    for order in (texts, texts[::-1]):
        collection = corpus.Collection()
        collection.add("a", ((text[:18], text) for text in order))
        collection.add("b", iter([("again", texts[0]), ("short", "x")]))
        files.append(tmp_path / f"{len(files)}.jsonl")
        collection.write(files[-1])
    assert files[0].read_bytes() == files[1].read_bytes()
    lines = [json.loads(line) for line in files[0].read_text("utf-8").splitlines()]
    assert sorted(line["text"] for line in lines) == sorted(text.strip("\n") for text in texts)
    assert [line["text"] for line in lines] != texts


def test_the_cap_ends_a_package():
    collection = corpus.Collection()
    taken = collection.add("a", ((str(i), str(i) * 100) for i in range(10)), cap=250)
    assert taken == 300 and len(collection.documents) == 3


def test_the_tokenizer_has_the_ranks_as_ids_and_eos_behind_them():
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {b"th": 256, b"the": 257, b" the": 258, "é".encode(): 259}
    tokenizer = Tokenizer.from_str(json.dumps(corpus.tokenizer_json(ranks)))
    assert tokenizer.encode("the théé", add_special_tokens=False).ids == [257, 32, 256, 259, 259]
    assert tokenizer.encode("x the", add_special_tokens=False).ids == [ord("x"), 258]
    assert tokenizer.token_to_id(corpus.EOS) == 260
    assert tokenizer.decode([257, 258, 259]) == "the theé"


def test_a_tokens_halves_are_its_last_merge():
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"bc": 257, b"abc": 258}
    assert corpus.halves(b"abc", ranks) == (b"ab", b"c")
