"""Changes of bytes and of JSON values that a careless or hostile writer would make; each is a
function of its chance."""

import copy
import json
import random
import re
from typing import Any

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    10**12,
    10**18,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**400,
    -(10**18),
    0.0,
    -0.5,
    0.5,
    1.0,
    1e18,
    1e308,
    "",
    "a",
    "/etc/passwd",
    "../../etc/passwd",
    "a\0b",
    "x" * 5000,
    "é🙂",
    "0" * 32,
    [],
    [0],
    [[]],
    [1.5],
    [-1],
    [10**18],
    ["a"],
    [None],
    {},
    {"a": 1},
    {"file": "../x"},
]
"""What a value of a JSON file is replaced by."""
PIECES = [
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"[" * 3000,
    b'{"a":' * 2000,
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b"Infinity",
    b"-0",
    b"\\ud800",
    b"\\u0000",
    b"true",
    b"null",
    b"0x" + b"f" * 4000,
    b"\n",
    b"'''",
    b'"',
    b"]",
    b"}",
    b"[[",
    b"..",
    b"inf",
]
EXPRESSIONS = [
    b"{% for m in messages %}",
    b"{% endfor %}",
    b"{% generation %}",
    b"{% endgeneration %}",
    b"{{ raise_exception('no') }}",
    b"{% set x = messages %}",
    b"{{ messages }}",
    b"{{ self }}",
    b"{{ loop }}",
    b"{{ x.__class__ }}",
    b"{% break %}",
    b"{{ range(10**9) | list }}",
    b"{{ 'x' * 10**9 }}",
    b"{{ 9 ** 9 ** 9 }}",
    b"{% if %}",
    b"{% else %}",
    b"{% endif %}",
    b"{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    b"{% include 'x' %}",
    b"{% import 'x' as y %}",
    b"{% block b %}",
    b"{{ strftime_now('%Y') }}",
    b"{{ cycler(1).next() }}",
    b"{{ joiner('x')() }}",
    b"{{ dict(a=1) | tojson }}",
    b"{#",
    b"{% raw %}",
    b"{% set messages = [] %}",
    b"{{ messages.append(1) }}",
    b"{{ namespace(a=messages).a | string }}",
    b"'%99999999s'",
    b"'{:>999999999}'",
    b"messages",
    b"m",
    b"content",
    b"none",
    b"1e308",
    b"-1",
    b"loop.index0",
    b"(",
    b"[",
    b"| sort",
    b"| unique",
    b"| groupby('role')",
    b"| map('upper')",
    b"| join",
    b"| int",
    b"| float",
    b"| round(400)",
    b"| sum",
    b"| random",
    b"| xmlattr",
    b"| format(1, 2)",
    b"| striptags",
    b"| urlize",
    b"| filesizeformat",
    b"| wordcount",
    b"| slice(3)",
    b"| dictsort",
    b"| pprint",
    b"| attr('format')",
    b"| reject",
    b"| selectattr('role', 'equalto', 'user')",
    b"| list | last",
    b"\xef\xb7\x90",
    b"\xff",
    b"\0",
    b"{%- call f() -%}",
    b"{% filter upper %}",
    b"{% autoescape true %}",
    b"{% with a = 1 %}",
    b"is iterable",
    b"is divisibleby 0",
    b".format(m)",
    b".format_map(m)",
    b".encode()",
    b".split('')",
    b".translate(m)",
    b"[::-1]",
    b"[::0]",
    b"~",
    b"**",
    b"//",
    b"%",
    b"* 1000000",
]
"""What parts of a template are replaced by."""
TOKENS = [
    "",
    " ",
    "\n",
    "a",
    "the",
    "x" * 5000,
    "é",
    "🙂",
    "▁",
    "##",
    "<pad>",
    "</s>",
    "<unk>",
    "<0x0A>",
    "<0xFF>",
    "\0",
    "\ufffd",
    "Ġ",
    "Ã",
    "[MASK]",
    "<extra_id_0>",
    "<|endoftext|>",
    "[NLU]",
    "th e",
    "ſ",
    "\u0301",
    "\ue000",
]

STEPS: dict[str, list[Any]] = {
    "normalizer": [
        {"type": "NFC"},
        {"type": "NFD"},
        {"type": "NFKC"},
        {"type": "NFKD"},
        {"type": "Lowercase"},
        {"type": "Nmt"},
        {"type": "StripAccents"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "ByteLevel"},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Prepend", "prepend": ""},
        {"type": "Precompiled"},
        {"type": "Precompiled", "precompiled_charsmap": ""},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
        {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": ""},
        {"type": "Replace", "pattern": {"Regex": "(?=)"}, "content": "ab"},
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
    ],
    "pre_tokenizer": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Whitespace"},
        {"type": "WhitespaceSplit"},
        {"type": "BertPreTokenizer"},
        {"type": "UnicodeScripts"},
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "Digits", "individual_digits": True},
        {"type": "CharDelimiterSplit", "delimiter": " "},
        {"type": "CharDelimiterSplit", "delimiter": ""},
        {"type": "FixedLength", "length": 3},
        {"type": "FixedLength", "length": 0},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        {
            "type": "Split",
            "pattern": {"Regex": "(\\s|a|aa)+$"},
            "behavior": "Isolated",
            "invert": False,
        },
        {
            "type": "Split",
            "pattern": {"Regex": "(?i:'s|'t)|\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}]+"},
            "behavior": "MergedWithPrevious",
            "invert": True,
        },
        {
            "type": "Split",
            "pattern": {"Regex": "(?<!a)(x+x+)+y|(?<n>a\\g<n>?b)|\\1"},
            "behavior": "Removed",
            "invert": False,
        },
        {"type": "Split", "pattern": {"String": ""}, "behavior": "MergedWithNext", "invert": False},
        {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Contiguous", "invert": True},
    ],
    "decoder": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "ByteFallback"},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "BPEDecoder", "suffix": ""},
        {"type": "Fuse"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "Strip", "content": " ", "start": 1 << 40, "stop": 2},
        {"type": "Replace", "pattern": {"Regex": "(.*)*"}, "content": "x"},
    ],
    "post_processor": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "BertProcessing", "sep": ["[SEP]", 8], "cls": ["[CLS]", 7]},
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
    ],
}
"""Steps of a tokenizer.json, by the key under which they stand."""


def bytes_changed(data: bytes, chance: random.Random) -> bytes:
    """Some flips, cuts, copies, and pieces that parsers stumble over."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = chance.randrange(256)
        elif kind == 2:
            del changed[at : at + chance.choice([1, 2, 8, 100, 5000])]
        elif kind == 3:
            changed[at:at] = chance.choice(PIECES)
        elif kind == 4:
            other = chance.randrange(len(changed) + 1)
            changed[at:at] = changed[other : other + chance.choice([1, 8, 64])]
        else:
            number = chance.choice([0, 1, 255, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]).to_bytes(
                8, "little"
            )
            changed[at : at + 8] = number[: len(changed) - at]
    return bytes(changed)


def bytes_replaced(data: bytes, chance: random.Random) -> bytes:
    """Other bytes and numbers at the places of some, so that what points to others still does; one
    time in four any change."""
    if chance.random() < 0.25:
        return bytes_changed(data, chance)
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        at, kind = chance.randrange(len(changed) + 1), chance.randrange(4)
        if kind == 0:
            new = bytes([chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])])
        elif kind == 1:
            number = chance.choice(
                [
                    0,
                    1,
                    2,
                    255,
                    1 << 20,
                    (1 << 31) - 1,
                    1 << 31,
                    1 << 40,
                    (1 << 63) - 1,
                    (1 << 64) - 1,
                ]
            )
            new = number.to_bytes(8, "little")[: chance.choice([2, 4, 8])]
        elif kind == 2:
            new = (
                bytes([(changed[at] + chance.choice([-2, -1, 1, 2])) % 256])
                if at < len(changed)
                else b""
            )
        else:
            other = chance.randrange(len(changed) + 1)
            new = changed[other : other + chance.choice([1, 4, 8, 32])]
        changed[at : at + len(new)] = new[: len(changed) - at]
    return bytes(changed)


def _places(value: Any, of: Any = None, key: Any = None) -> list[tuple[Any, Any]]:
    """(container, key) of the values inside; of long lists a few."""
    found = [] if of is None else [(of, key)]
    if isinstance(value, dict):
        inside = list(value.items())
        inside = inside if len(inside) <= 40 else inside[:4] + inside[-4:]
    elif isinstance(value, list):
        inside = list(enumerate(value))
        inside = inside if len(inside) <= 8 else inside[:4] + inside[-4:]
    else:
        inside = []
    for name, item in inside:
        found += _places(item, value, name)
    return found


def value_changed(value: Any, chance: random.Random) -> Any:
    """A JSON value with one of its parts replaced, left out, added or doubled."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        places = _places(value)
        if not places:
            return chance.choice(VALUES)
        of, key = chance.choice(places)
        kind = chance.randrange(10)
        if kind < 6:
            of[key] = copy.deepcopy(chance.choice(VALUES))
        elif kind == 6 and type(of[key]) in (int, float):
            of[key] += chance.choice([-1, 1, 8])
        elif kind == 7 and isinstance(of, dict):
            of[chance.choice(["a", "", "shards", "é"])] = of.pop(key)
        elif kind == 8 and isinstance(of, list):
            of.insert(key, copy.deepcopy(of[key]))
        else:
            del of[key]
    return value


def encoded(value: Any) -> bytes:
    """Canonical JSON of a value, infinities included, so that a file is refused for what it says
    and not for its form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def json_changed(data: bytes, chance: random.Random) -> bytes:
    """A JSON file with a changed value, or, one time in four, with changed bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return bytes_changed(data, chance)
    if chance.random() < 0.25:
        return bytes_changed(data, chance)
    return encoded(value_changed(value, chance))


def lines_changed(data: bytes, chance: random.Random) -> bytes:
    """Lines of JSON, of which some are changed, left out or doubled, or of which bytes are."""
    if chance.random() < 0.5:
        return bytes_changed(data, chance)
    lines = data.split(b"\n")
    for _ in range(chance.choice([1, 1, 3])):
        i = chance.randrange(len(lines))
        lines[i : i + 1] = chance.choice(
            [[json_changed(lines[i], chance)], [], [lines[i]] * 2, [b"", lines[i] + b"\r"]]
        )
        lines = lines or [b""]
    return b"\n".join(lines)


def template_changed(data: bytes, chance: random.Random) -> bytes:
    """A template with some of its expressions and blocks exchanged, left out, doubled or put inside
    another, or its bytes."""
    if chance.random() < 0.3:
        return bytes_changed(data, chance)
    parts = re.split(rb"(\{[{%#].*?[}%#]\}|'[^']*'|\b\w+\b|[|~+*])", data, flags=re.DOTALL)
    for _ in range(chance.choice([1, 1, 2, 4])):
        i, k = chance.randrange(len(parts)), chance.randrange(len(parts))
        if chance.random() < 0.5:
            parts[i] = chance.choice(EXPRESSIONS)
        else:
            parts[i : i + 1] = chance.choice(
                [[parts[k]], [], [parts[i], parts[k]], [parts[i]] * chance.choice([2, 50])]
            )
        parts = parts or [b""]
    return b"".join(parts)


def tokenizer_changed(data: bytes, chance: random.Random) -> bytes:
    """A tokenizer.json with other steps, tokens or merges, or changed as any JSON."""
    try:
        parsed = json.loads(data)
        model = parsed["model"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return json_changed(data, chance)
    if not isinstance(model, dict) or chance.random() < 0.4:
        return json_changed(data, chance)
    for _ in range(chance.choice([1, 1, 2, 3])):
        kind = chance.randrange(5)
        if kind < 2:
            key, steps = chance.choice(list(STEPS.items()))
            chosen = [
                copy.deepcopy(chance.choice(steps)) for _ in range(chance.choice([1, 1, 2, 4]))
            ]
            old = parsed.get(key)
            chosen = chosen + [old] if old and chance.random() < 0.5 else chosen
            of = {
                "normalizer": "normalizers",
                "pre_tokenizer": "pretokenizers",
                "decoder": "decoders",
            }.get(key, "processors")
            parsed[key] = chosen[0] if len(chosen) == 1 else {"type": "Sequence", of: chosen}
        elif kind == 2:
            vocab, text = model.get("vocab"), chance.choice(TOKENS)
            if isinstance(vocab, dict):
                vocab[text] = chance.choice([len(vocab), 0, len(vocab) + 1, 70_000])
            elif isinstance(vocab, list):
                vocab.insert(
                    chance.randrange(len(vocab) + 1),
                    [text, chance.choice([0.0, -1e308, 1e308, 5, -8.5])],
                )
        elif kind == 3 and isinstance(model.get("vocab"), dict) and model["vocab"]:
            texts = list(model["vocab"])
            pair = [str(chance.choice(texts)), str(chance.choice([*texts, *TOKENS]))]
            model.setdefault("merges", [])
            if isinstance(model["merges"], list):
                model["merges"].append(chance.choice([pair, " ".join(pair)]))
                if chance.random() < 0.7:
                    model["vocab"].setdefault("".join(pair), len(model["vocab"]))
        elif isinstance(parsed.get("added_tokens"), list):
            flags = {
                key: chance.random() < 0.3
                for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            count = len(model["vocab"]) if isinstance(model.get("vocab"), dict | list) else 0
            at = count + len(parsed["added_tokens"])
            parsed["added_tokens"].append(
                {
                    "id": chance.choice([at, 0, count, at + 1]),
                    "content": chance.choice(TOKENS),
                    **flags,
                }
            )
    return encoded(parsed)
