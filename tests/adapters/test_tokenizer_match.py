"""What tells two tokenizers apart, and what does not."""

import copy
import json
import shutil

import pytest
from tokenizers import AddedToken, Tokenizer

from packprep import open_dataset
from packprep.adapters import tokenizer_match
from packprep.adapters.tokenizer_match import TEXTS, check_tokenizer
from packprep.errors import ArgumentError, DatasetError, TokenizerMismatch
from packprep.sources.formats import FORMATS
from tests import made, tokens_made
from tests.tokenizer import tokenizers_made

LOWERCASE = {"type": "Lowercase"}
DIGITS = {"type": "Digits", "individual_digits": True}
KINDS = {
    "byte_level": lambda: tokenizers_made.byte_level("<|endoftext|>", "<|im_end|>"),
    "wordpiece": tokenizers_made.bert_like,
    "unigram": lambda: tokenizers_made.t5_like(300),
    "sentencepiece": tokenizers_made.llama2_like,
}


def split(parsed, step):
    own = parsed["pre_tokenizer"]
    parsed["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, *([own] if own else [])]}


def normalize(parsed, step):
    own = parsed["normalizer"]
    parsed["normalizer"] = {"type": "Sequence", "normalizers": [*([own] if own else []), step]}


def swap_ids(parsed, a, b):
    vocab = parsed["model"]["vocab"]
    if isinstance(vocab, list):
        vocab[a], vocab[b] = vocab[b], vocab[a]
    else:
        texts = {id: text for text, id in vocab.items()}
        vocab[texts[a]], vocab[texts[b]] = b, a


def add(parsed, text, **flags):
    ids = [entry["id"] for entry in parsed["added_tokens"]]
    vocab = parsed["model"]["vocab"]
    ids += vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    parsed["added_tokens"].append({**tokenizers_made.added(max(ids) + 1, text), **flags})


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Kind → its dataset."""
    folder = tmp_path_factory.mktemp("match")
    made.write_lines(folder / "a.jsonl", [*tokenizers_made.SENTENCES] * 40)
    datasets = {}
    for kind, tokenizer in KINDS.items():
        tokenizers_made.write(folder / kind, tokenizer())
        recipe = made.table("a.jsonl", tokenizer=kind, tasks=[{"preset": "causal"}], seq_length=128)
        datasets[kind] = folder / f"{kind}.packed"
        made.build(recipe, folder, datasets[kind])
    return datasets


def stored(directory):
    return json.loads((directory / "tokenizer.json").read_text("utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokenizer_matches_in_every_form(built, kind, tmp_path):
    directory = built[kind]
    check_tokenizer(directory, directory)
    check_tokenizer(open_dataset(directory), str(directory / "tokenizer.json"))
    loaded = Tokenizer.from_file(str(directory / "tokenizer.json"))
    loaded.enable_truncation(3)
    loaded.enable_padding(length=9)
    before = loaded.to_str()
    check_tokenizer(directory, loaded)
    assert loaded.to_str() == before
    tokenizers_made.write(tmp_path, stored(directory))
    check_tokenizer(directory, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokenizer_of_transformers_matches(built, kind):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install '.[trainers]'"
    )
    huggingface = pytest.importorskip(
        "packprep.adapters.huggingface", reason="torch is not installed"
    )
    given = transformers.PreTrainedTokenizerFast(tokenizer_file=str(built[kind] / "tokenizer.json"))
    huggingface.check_tokenizer(built[kind], given)
    given.add_tokens([AddedToken("<|im_start|>", special=True)])
    huggingface.check_tokenizer(built[kind], given)
    with pytest.raises(TokenizerMismatch, match="id 0 is .*, but '<pad>' in the given"):
        check_tokenizer(built["byte_level"], transformers.ByT5Tokenizer())


@pytest.mark.parametrize("kind", KINDS)
def test_chat_tokens_that_were_appended_are_no_mismatch(built, kind, tmp_path):
    parsed = stored(built[kind])
    add(parsed, "<|im_start|>")
    check_tokenizer(built[kind], tokenizers_made.write(tmp_path, parsed))


CHANGES = {
    "swapped ids": lambda parsed: swap_ids(parsed, 30, 40),
    "an added token fewer": lambda parsed: parsed["added_tokens"].pop(),
    "another normalizer": lambda parsed: normalize(parsed, LOWERCASE),
    "composed characters": lambda parsed: normalize(parsed, {"type": "NFC"}),
    "digits by themselves": lambda parsed: split(parsed, DIGITS),
    "a token that takes spaces": lambda parsed: parsed["added_tokens"][-1].update(lstrip=True),
    "a token that takes spaces behind it": (
        lambda parsed: parsed["added_tokens"][-1].update(rstrip=True)
    ),
    "a token only as a word": lambda parsed: parsed["added_tokens"][-1].update(single_word=True),
    "a word that was appended": lambda parsed: add(parsed, "Hello"),
    "another merge order": lambda parsed: parsed["model"]["merges"].reverse(),
    "merges fewer": lambda parsed: parsed["model"]["merges"].pop(-2),
    "scores": lambda parsed: parsed["model"]["vocab"][10].__setitem__(1, -90.0),
    "no space in front": lambda parsed: parsed.update(
        normalizer={**parsed["normalizer"], "normalizers": parsed["normalizer"]["normalizers"][1:]}
    ),
    "no accents": lambda parsed: parsed["normalizer"].update(strip_accents=False),
}
ALONE = {  # change → the kinds that can have it
    "another merge order": ("byte_level", "sentencepiece"),
    "merges fewer": ("byte_level", "sentencepiece"),
    "scores": ("unigram",),
    "a token that takes spaces": ("byte_level", "sentencepiece"),
    "a token that takes spaces behind it": ("byte_level", "sentencepiece"),
    "no space in front": ("sentencepiece",),
    "no accents": ("wordpiece",),
    "composed characters": ("byte_level", "sentencepiece"),
    "digits by themselves": ("byte_level", "sentencepiece"),
    "another normalizer": ("byte_level", "sentencepiece", "unigram"),
}
CASES = [(kind, change) for change in CHANGES for kind in KINDS if kind in ALONE.get(change, KINDS)]


@pytest.mark.parametrize("kind, change", CASES)
def test_another_tokenizer_is_told(built, kind, change, tmp_path):
    parsed = copy.deepcopy(stored(built[kind]))
    CHANGES[change](parsed)
    with pytest.raises(
        TokenizerMismatch,
        match=f"{kind}.packed: its ids are not from the given tokenizer: (id|text) [0-9]",
    ):
        check_tokenizer(built[kind], tokenizers_made.write(tmp_path, parsed))


def test_the_first_id_or_text_is_named(built, tmp_path):
    parsed = stored(built["byte_level"])
    swap_ids(parsed, 7, 9)
    with pytest.raises(
        TokenizerMismatch, match=r"id 7 is '\(', but '\*' in the given tokenizer, .* is 9"
    ):
        check_tokenizer(built["byte_level"], tokenizers_made.write(tmp_path, parsed))


@pytest.mark.long
def test_each_dataset_of_a_mixture_is_checked(built):
    same = [built["unigram"], built["unigram"]]
    check_tokenizer(open_dataset(same, shares=[1, 1]), built["unigram"])


def test_the_texts_are_as_many_and_hold_every_token(built):
    own = Tokenizer.from_file(str(built["unigram"] / "tokenizer.json"))
    texts = list(tokenizer_match._texts(own))
    assert len(texts) == TEXTS and texts == list(tokenizer_match._texts(own))
    found = {id for text in texts for id in own.encode(text, add_special_tokens=False).ids}
    assert found == set(own.get_vocab().values())


def test_ids_of_an_unknown_tokenizer_are_refused_by_name(tmp_path):
    lists = tokens_made.ids_of(made.texts(40, 3))
    files = {
        "megatron": tokens_made.write_megatron(tmp_path / "a.bin", lists),
        "datatrove": tokens_made.write_datatrove(tmp_path / "b.ds", lists),
        "token_stream": tokens_made.write_stream(tmp_path / "c.npy", sum(lists, []), head="numpy"),
        "jsonl_tokens": tokens_made.write_lines(tmp_path / "d.jsonl.gz", lists),
        "parquet_tokens": tokens_made.write_parquet(tmp_path / "e.parquet", lists),
        "arrow_tokens": tokens_made.write_arrow(tmp_path / "f.arrow", lists),
    }
    assert {*files} == {name for name, format in FORMATS.items() if format.holds == "tokens"}
    sources = [
        {"paths": [path.name], "name": f"of_{name}", "format": FORMATS[name].asked or "auto"}
        for name, path in files.items()
    ]
    made.write_lines(tmp_path / "texts.jsonl", made.texts(40, 3))
    sources.append({"paths": ["texts.jsonl"], "name": "of_texts"})
    recipe = made.table(sources, tasks=[{"preset": "causal"}])
    made.build(recipe, tmp_path, tmp_path / "packed")
    names = ", ".join(f"of_{name}" for name in files)
    with pytest.raises(DatasetError, match=f"the documents of {names} were read as ids"):
        check_tokenizer(tmp_path / "packed", tmp_path / "packed")


def test_damaged_files_and_what_is_no_tokenizer_are_named(built, tmp_path):
    directory = shutil.copytree(built["byte_level"], tmp_path / "packed")
    given = Tokenizer.from_file(str(directory / "tokenizer.json"))
    with pytest.raises(
        ArgumentError, match="none: No such file or directory\nhint: give a tokenizer.json"
    ):
        check_tokenizer(directory, tmp_path / "none")
    with pytest.raises(ArgumentError, match="a dict is not a tokenizer"):
        check_tokenizer(directory, {})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArgumentError, match="`tokenizers` cannot load"):
        check_tokenizer(directory, tmp_path)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(DatasetError, match="hint: restore the right file"):
        check_tokenizer(directory, given)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(
        DatasetError, match="tokenizer.json: No such file or directory.*\nhint: restore the file"
    ):
        check_tokenizer(directory, given)
