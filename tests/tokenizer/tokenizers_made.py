"""Small tokenizer.json files with the traits of real families, made on the spot."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SENTENCES = (
    "the quick brown fox jumps over the lazy dog and then it jumps over the other dog",
    "a reserved word is unused until somebody uses it; placeholder words are dummy words",
    "corpora become training rows once and offline so that a trainer only maps files and reads",
    "ünïcödé tëxt, numbers 12345 67890, (brackets) [and] <angles>, tabs\tand\nlines",
)


def added(id: int, text: str, special: bool = True) -> dict:
    return {
        "id": id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


@cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=sorted(alphabet), show_progress=False),
    )
    return tokenizer.to_str()


def byte_level(*special_texts: str, **top_level) -> dict:
    """A trained byte-level BPE with 320 tokens, and the special tokens from id 320 upward."""
    parsed = json.loads(_byte_level())
    parsed["added_tokens"] = [added(320 + k, text) for k, text in enumerate(special_texts)]
    return {**parsed, **top_level}


def gpt2_like() -> dict:
    """<|endoftext|> (320) and nothing else."""
    return byte_level("<|endoftext|>")


def llama3_like(n_reserved: int = 12) -> dict:
    """Llama 3's names, reserved tokens 0 and 1 apart from the rest, a post-processor that puts bos
    in front.

    320 <|begin_of_text|>   321 <|end_of_text|>      322, 323 reserved 0, 1
    324 <|finetune_right_pad_id|>   325 <|eot_id|>   326 … reserved 2 …
    """
    reserved = [f"<|reserved_special_token_{k}|>" for k in range(n_reserved)]
    parsed = byte_level(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *reserved[:2],
        "<|finetune_right_pad_id|>",
        "<|eot_id|>",
        *reserved[2:],
    )
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 320)]
    )
    return json.loads(tokenizer.to_str())


def llama3_sized(texts: Iterable[str]) -> dict:
    """The size of Llama 3.1's: 128,000 tokens, and the names and ids of its 256 special ones.

    4000 tokens are trained on `texts`; the others are pairs of them, and follow all that was
    trained in the merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    )
    parsed = json.loads(tokenizer.to_str())
    vocab, merges = parsed["model"]["vocab"], parsed["model"]["merges"]
    trained = sorted(vocab, key=vocab.__getitem__)
    for first, second in ((a, b) for a in reversed(trained) for b in reversed(trained)):
        if len(vocab) == 128_000:
            break
        if first + second not in vocab:
            vocab[first + second] = len(vocab)
            merges.append([first, second])
    named = {
        0: "begin_of_text",
        1: "end_of_text",
        4: "finetune_right_pad_id",
        6: "start_header_id",
        7: "end_header_id",
    }
    named |= {8: "eom_id", 9: "eot_id", 10: "python_tag"}
    reserved = (f"reserved_special_token_{k}" for k in range(256 - len(named)))
    parsed["added_tokens"] = [
        added(128_000 + k, f"<|{named.get(k) or next(reserved)}|>") for k in range(256)
    ]
    return parsed


def bert_like() -> dict:
    """WordPiece: [PAD] 0, [unused0…4] 1…5 in the model alone, [UNK] 6, [CLS] 7, [SEP] 8, [MASK]
    9."""
    words = sorted(
        {
            word
            for sentence in SENTENCES
            for word in sentence.split()
            if word.isalpha() and word.isascii()
        }
    )
    pieces = [
        "[PAD]",
        *(f"[unused{k}]" for k in range(5)),
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *words,
    ]
    pieces += [
        *"abcdefghijklmnopqrstuvwxyz[]<>/",
        *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
    ]
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    return {
        "version": "1.0",
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        "added_tokens": [
            added(vocab[text], text) for text in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 8], "cls": ["[CLS]", 7]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


def t5_like(n_extra: int = 10) -> dict:
    """Unigram: <pad> 0, </s> 1, <unk> 2, pieces, and at the end <extra_id_{n-1}> … <extra_id_0>,
    all pieces too."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -8.0) for word in words]
    pieces += [(chr(c), -10.5) for c in range(0x21, 0x7F)]
    extra = [f"<extra_id_{k}>" for k in reversed(range(n_extra))]
    special = [(text, pieces.index((text, 0.0))) for text in ("<pad>", "</s>", "<unk>")]
    special += [(text, len(pieces) + k) for k, text in enumerate(extra)]
    pieces += [(text, 0.0) for text in extra]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(id, text) for text, id in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": True,
        },
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": [list(piece) for piece in pieces],
            "byte_fallback": False,
        },
    }


SPACE_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


@cache
def _sentencepiece() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    ascii = [chr(code) for code in range(0x21, 0x7F)]
    tokenizer.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=200, initial_alphabet=ascii, show_progress=False)
    )
    return tokenizer.to_str()


def llama2_like(**top_level) -> dict:
    """SentencePiece's BPE: <unk> 0, <s> 1, </s> 2, a token for each byte, what is trained on
    SENTENCES."""
    model = json.loads(_sentencepiece())["model"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = [
        {**SPACE_TO_MARK, "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(id, text) for id, text in enumerate(texts[:3])],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACE_TO_MARK],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*steps, strip]},
        "model": {
            **model,
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: id for id, text in enumerate(texts)},
        },
    } | top_level


def gemma_like() -> dict:
    """As `llama2_like`, but nothing is put in front, and split after spaces; its <0x09> is the tab
    itself."""
    after = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    parsed = llama2_like(normalizer=SPACE_TO_MARK, pre_tokenizer=after)
    vocabulary = parsed["model"]["vocab"]
    assert "\t" in vocabulary
    vocabulary["<unused0>"] = vocabulary.pop("<0x09>")
    return parsed


def mistral_like() -> dict:
    """As `llama2_like`, but by Metaspace, which puts ▁ in front of the text alone."""
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return llama2_like(normalizer=None, pre_tokenizer=step)


def with_hole() -> dict:
    """The file says that <|endoftext|> is 322, after a vocabulary that ends at 319; `tokenizers`
    makes it 320."""
    parsed = byte_level()
    parsed["added_tokens"] = [added(322, "<|endoftext|>")]
    return parsed


def write(folder: Path, tokenizer: dict, **beside: dict) -> Path:
    """Writes tokenizer.json into folder, and NAME.json for each NAME in `beside`; gives the
    folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"tokenizer": tokenizer, **beside}.items():
        (folder / f"{name}.json").write_text(
            json.dumps(content, ensure_ascii=False), encoding="utf-8"
        )
    return folder
