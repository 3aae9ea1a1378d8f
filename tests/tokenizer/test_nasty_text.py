import sys
import unicodedata

from packprep.format.digests import digest_of
from packprep.tokenizer import proof
from packprep.tokenizer.proof import NASTY_TEXTS, characters, nasty_texts

ADDED, PIECES = ["<|endoftext|>", "<pad>"], ["Ġthe?", " dog", "ing"]


def suite(key=0):
    return nasty_texts(key, 0, NASTY_TEXTS, ADDED, PIECES)


def test_a_text_is_a_function_of_key_and_number():
    assert suite() == suite() != suite(1)
    assert nasty_texts(0, 7, 9, ADDED, PIECES) == suite()[7:9]
    assert nasty_texts(0, 0, 0) == [] and len(nasty_texts(0, 3, 10)) == 7


def test_the_texts_of_a_proof_stay_the_same_so_that_kept_proofs_are_of_these_texts(monkeypatch):
    """With fixed characters, because each version of Python knows others."""
    monkeypatch.setattr(proof, "characters", lambda: "aB9 \u00e9\u0301\u6c34\U0001f600")
    found = "\0".join(suite()).encode("utf-8", "surrogatepass")
    assert digest_of(found) == "1644b696f5ba5c63b3083b2cd5174fe4"


def test_every_category_and_script_is_there():
    found = "".join(suite())
    assert {unicodedata.category(c) for c in found} == {
        unicodedata.category(chr(c)) for c in range(sys.maxunicode + 1)
    }

    def scripts(text):
        letters = (c for c in text if unicodedata.category(c)[0] == "L")
        return {unicodedata.name(c, "").partition(" ")[0] for c in letters}

    every = scripts(map(chr, range(sys.maxunicode + 1)))
    assert scripts(characters()) == every and len(scripts(found) & every) > 0.9 * len(every)


def test_what_trips_tokenizers_is_there():
    found = "".join(suite())
    wanted = [
        *ADDED,
        *PIECES,
        " " * 50,
        "\r\n",
        "\ud800",
        "\udfff",
        "\u200d",
        "👍🏽",
        "🇩🇪",
        "\u0301",
        "'ll",
        "'ſ",
        "\0",
    ]
    assert [text for text in wanted if text not in found] == []
    assert 150_000 < len(found) < 400_000  # the reference needs a tenth of a second for it


def test_no_text_is_very_long_and_some_are_empty():
    lengths = [len(text) for text in suite()]
    assert max(lengths) < 20_000 and 0 in lengths
