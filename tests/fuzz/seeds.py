"""Good files of the kinds that a build reads, made on the spot: tokenizers, chat templates, corpora
in every format."""

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from packprep.tokenizer.proof import nasty_texts
from tests.conversations import chats_made
from tests.fuzz.mutations import STEPS
from tests.tokenizer import tokenizers_made
from tests.tokens_made import EOS

TEXTS = [
    text
    for text in nasty_texts(1, 0, 24)
    if not any("\ud800" <= character <= "\udfff" for character in text)
] + [
    "one good line",
    "",
    "the quick brown fox " * 30,
    "<pad> [MASK] <0x0A> [UNK]",
    "a" * 3000,
    "é" * 300 + "\n\t ",
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    chats_made.turns("2+2?", "4", "and 3?", "7", system="Be brief."),
    chats_made.turns("Hi", "Hello <|im_end|>", "", ""),
    chats_made.turns("ünïcödé 🙂\n\n", "x" * 3000),
    [
        {
            "role": "assistant",
            "content": "first",
            "name": "a",
            "tool_calls": [{"f": {"n": 10**20, "x": 1e300}}, None, [[]]],
        }
    ],
    [
        {"role": role, "content": role * 9}
        for role in ("system", "system", "user", "tool", "assistant", "user")
    ],
    chats_made.turns(*(f"turn {i}" for i in range(9))),
]
MESSAGES: list[Any] = [
    None,
    [],
    [{}],
    [{"role": "user"}],
    [{"role": "assistant", "content": None}],
    {},
    "x",
    [None],
    *CONVERSATIONS,
]
SPANS: list[Any] = [None, [], [[0, 2]], [[0, 10**12]], [[2, 1]], [[0, 1, 1.0]], [1], "x", [[-1, 2]]]

TOOLS = """\
{%- macro call(tool) -%}<tool>{{ tool | tojson(indent=2) }}</tool>{%- endmacro -%}
{%- set ns = namespace(found=false, n=0) -%}
{{- bos_token if bos_token is defined else '' -}}
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}
{%- for m in messages -%}
    {%- if m.role == 'system' and not loop.first %}{% continue %}{% endif -%}
    {%- set ns.n = ns.n + (m.content | length) % 7 -%}
    {%- if m.tool_calls is defined and m.tool_calls is not none -%}
        {%- for tool in m.tool_calls %}{{ call(tool) }}{% endfor -%}{%- set ns.found = true -%}
    {%- elif m.content is string -%}
        {{- m.role | upper ~ ': ' ~ (m.content | replace('<', '&lt;') | trim) ~ '\\n' -}}
    {%- else -%}
        {{- m.content | map(attribute='text') | select('string') | join(', ') | indent(2) -}}
    {%- endif -%}
    {%- if m.content.startswith('x') or 'quick' in m.content %}{{ m.content[:10].split()[-1] }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif -%}
"""
FORMATTED = """\
{%- set names = {'user': '%-8s', 'assistant': '%8s'} -%}
{%- for group in messages | groupby('role') %}{# sorted #}{{ group.grouper | center(20, ) }}{% endfor -%}
{%- for i in range(messages | length) -%}
    {%- set m = messages[i] -%}
    {{- names.get(m['role'], '%s') % m['role'] }} {{ '{:>10}|{!r}'.format(i * 2 ** 3, m.content[:5]) -}}
    {%- for line in m.content.splitlines() | batch(2, '-') | list %}{{ line | join(' ') | wordwrap(20) }}{% endfor -%}
    {{- m.content | urlencode | truncate(30) ~ m.content.zfill(12) * 2 }}{% filter lower %}{{ m.role }}{% endfilter -%}
    {%- call(x) later(m) -%}{{ x }}{%- endcall -%}
{%- else %}nothing{% endfor -%}
{%- macro later(m) %}{{ caller(m.content | first | default('-', true)) }}{% endmacro -%}
"""
TEMPLATES = [
    chats_made.CHATML,
    chats_made.LLAMA3,
    chats_made.GENERATION,
    chats_made.HOISTED,
    chats_made.FORGETTING,
    TOOLS,
    FORMATTED,
]

CONFIGS: list[Any] = [
    {
        "eos_token": {"content": "<|endoftext|>", "special": True},
        "bos_token": None,
        "pad_token": "<pad>",
        "sep_token": 7,
        "chat_template": [
            {"name": "default", "template": chats_made.CHATML},
            {"name": "tool_use", "template": TOOLS},
        ],
    },
    {
        "eos_token": "</s>",
        "cls_token": "<s>",
        "mask_token": {"content": "<mask>"},
        "chat_template": chats_made.LLAMA3,
    },
]


def tokenizer_files() -> list[bytes]:
    """Of every model: with and without normalizers, pre-tokenizers and added tokens."""
    words = {
        "<unk>": 0,
        "<pad>": 1,
        "</s>": 2,
        "the": 3,
        "quick": 4,
        "brown": 5,
        "▁the": 6,
        "one": 7,
        "": 8,
    }
    word_level = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    word_level.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.StripAccents()]
    )
    word_level.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.UnicodeScripts(), pre_tokenizers.Whitespace()]
    )
    word_level.add_special_tokens(["<unk>", "<pad>", "</s>"])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["<unk>", "<s>", "</s>", *bytes_, *"▁abcdefghijklmnopqrstuvwxyz", "th", "▁th", "▁the"]
    fallback = Tokenizer(
        models.BPE(
            {text: i for i, text in enumerate(letters)}, [("t", "h"), ("▁", "th"), ("▁th", "e")],
            unk_token="<unk>", byte_fallback=True, fuse_unk=True, ignore_merges=False, dropout=0.1,
        )
    )  # fmt: skip
    fallback.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fallback.add_special_tokens(["<unk>", "<s>", "</s>"])
    of_words = {"<unk>": 0, "a": 1, "b</w>": 2, "ab</w>": 3, "b": 4}
    suffixed = Tokenizer(
        models.BPE(of_words, [("a", "b</w>")], unk_token="<unk>", end_of_word_suffix="</w>")
    )
    made = [
        tokenizers_made.gpt2_like(),
        tokenizers_made.llama3_like(),
        tokenizers_made.bert_like(),
        tokenizers_made.t5_like(),
        *(json.loads(tokenizer.to_str()) for tokenizer in (word_level, fallback, suffixed)),
    ]
    patterned = tokenizers_made.byte_level("<|endoftext|>", "<|im_start|>")
    steps = [
        STEPS["pre_tokenizer"][13],
        {**STEPS["pre_tokenizer"][0], "use_regex": False, "add_prefix_space": False},
    ]
    patterned["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    patterned["normalizer"] = {"type": "NFC"}
    patterned["added_tokens"][1] |= {
        "special": False,
        "normalized": True,
        "lstrip": True,
        "single_word": True,
    }
    return [json.dumps(tokenizer, ensure_ascii=False).encode() for tokenizer in (*made, patterned)]


def lines() -> bytes:
    """JSON lines: documents, spans, conversations, and lines that are none."""
    found = [
        json.dumps({"text": text, "id": i, "meta": {"a": [1, "é"]}}) for i, text in enumerate(TEXTS)
    ]
    found += [json.dumps({"text": "some words to train", "loss_spans": spans}) for spans in SPANS]
    found += [json.dumps({"messages": messages}) for messages in MESSAGES]
    found += [
        "",
        '{"text": 1}',
        "[]",
        '{"text": "no end',
        '{"t": "x"}',
        '{"text": "\\ud800"}',
        '{"text": "a", "text": "b"}',
    ]
    return "\n".join(found).encode()


def _table(**more: pa.Array) -> pa.Table:
    """Texts, spans and conversations, as a data set's table has them."""
    count = len(TEXTS)
    chats = [
        [{key: message[key] for key in ("role", "content")} for message in chat]
        for chat in CONVERSATIONS
    ]
    messages = [chats[i % len(chats)] if i % 9 == 0 else None for i in range(count)]
    columns = {
        "text": pa.array([None if i % 9 == 0 else text for i, text in enumerate(TEXTS)]),
        "loss_spans": pa.array([[[0, 4]] if i % 5 == 1 else None for i in range(count)]),
        "messages": pa.array(messages),
        "id": pa.array(range(count)),
    }
    return pa.table({**columns, **more})


def _texts(kind: Any) -> pa.Table:
    texts = (
        TEXTS
        if pa.types.is_string(kind) or pa.types.is_large_string(kind)
        else [text.encode() for text in TEXTS]
    )
    return pa.table(
        {"text": pa.array(texts, kind) if "view" not in str(kind) else pa.array(TEXTS).cast(kind)}
    )


def _repeated() -> pa.Table:
    return pa.table(
        {"text": pa.array([TEXTS[i % 5] or None for i in range(60)]).dictionary_encode()}
    )


def _tokens() -> list[pa.Table]:
    lists = [[1, 2, 3], [], None, list(range(200)), [527, 0], [255] * 50] * 4
    with_null, sized = [*lists, [1, None, 3]], [[1, 2, 3, 4], None, [5, 6, 7, 8]]
    return [
        pa.table(
            {"input_ids": pa.array(lists, pa.list_(pa.int32())), "id": pa.array(range(len(lists)))}
        ),
        pa.table({"tokens": pa.array(with_null, pa.large_list(pa.uint16()))}),
        pa.table({"input_ids": pa.array(sized, pa.list_(pa.int64(), 4))}),
        pa.table({"tokens": pa.nulls(5, pa.list_(pa.null()))}),
    ]


def parquet_files(tables: Sequence[pa.Table] | None = None) -> list[bytes]:
    """Parquet files of texts, or of other tables: by encodings, compressions, versions of pages,
    and types."""
    tables = tables or [
        _table(),
        _texts(pa.large_binary()),
        _repeated(),
        _texts(pa.string()),
        pa.table({"text": pa.nulls(9)}),
    ]
    options: list[dict[str, Any]] = [
        {"compression": "snappy", "row_group_size": 20},
        {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
        {
            "compression": "zstd",
            "data_page_size": 200,
            "write_batch_size": 5,
            "write_page_checksum": True,
        },
        {
            "compression": "gzip",
            "use_dictionary": False,
            "column_encoding": {"text": "DELTA_BYTE_ARRAY"},
        },
        {"compression": "lz4", "version": "1.0"},
        {
            "compression": "brotli",
            "use_dictionary": False,
            "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"},
        },
    ]
    found = []
    for i in range(max(len(tables), len(options))):
        table, chosen = tables[i % len(tables)], dict(options[i % len(options)])
        encoded = chosen.get("column_encoding")
        if (
            not encoded
            or "text" not in table.schema.names
            or not pa.types.is_string(table.schema.field("text").type)
        ):
            chosen.pop("column_encoding", None)
        sink = io.BytesIO()
        pq.write_table(table, sink, store_schema=i == 0, **chosen)
        found.append(sink.getvalue())
    return found


def arrow_files(tables: Sequence[pa.Table] | None = None) -> list[bytes]:
    """Arrow IPC files and streams, compressed and not, of texts or of other tables."""
    tables = tables or [_table(), _texts(pa.string_view()), _repeated(), _texts(pa.large_string())]
    found = []
    for i, table in enumerate((*tables, *tables)):
        options = pa.ipc.IpcWriteOptions(
            compression=[None, "lz4", None, "zstd"][(i + i // len(tables)) % 4],
            emit_dictionary_deltas=i % 2 == 0,
        )
        new: Callable[..., Any] = pa.ipc.new_file if i < len(tables) else pa.ipc.new_stream
        sink = io.BytesIO()
        with new(sink, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=20)
        found.append(sink.getvalue())
    return found


def token_tables() -> tuple[list[bytes], list[bytes]]:
    """(Parquet files, Arrow files) of lists of ids."""
    return parquet_files(_tokens()), arrow_files(_tokens())


def megatron_pairs() -> list[bytes]:
    """Pairs of files, each as one: the .idx, its length in 8 bytes, the .bin."""
    found = []
    for code, dtype, modes in ((8, "<u2", False), (4, "<i4", True), (1, "u1", False)):
        lengths = [3, 0, 70, 5, 1, 9]
        ids = np.arange(sum(lengths)) % 200
        pointers = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
        index = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code])
        index += len(lengths).to_bytes(8, "little") + (5).to_bytes(8, "little")
        index += np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes()
        index += np.array([0, 1, 3, 4, 6], "<i8").tobytes() + (
            bytes(len(lengths)) if modes else b""
        )
        found.append(with_length(index) + ids.astype(dtype).tobytes())
    return found


def datatrove_pairs() -> list[bytes]:
    """Pairs of files, each as one: the .ds.index, its length in 8 bytes, the .ds."""
    ends = np.cumsum([3, 0, 70, 5, 1, 9])
    ids = np.arange(ends[-1]) % 200
    index = with_length(ends.astype("<u8").tobytes())
    return [index + ids.astype(dtype).tobytes() for dtype in ("<u2", "<u4")]


def token_streams() -> list[bytes]:
    """Arrays of ids with each header and without one."""
    ids = np.where(np.arange(400) % 50, np.arange(400) % 200, EOS)
    found = [ids.astype("<u2").tobytes()]
    for magic, version, dtype in ((20240520, 1, "<u2"), (20240801, 7, "<u4")):
        header = np.array([magic, version, len(ids), *[0] * 253], "<i4")
        found.append(header.tobytes() + ids.astype(dtype).tobytes())
    sink = io.BytesIO()
    np.save(sink, ids.astype("<i4"))
    return [*found, sink.getvalue()]


def with_length(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def first_of_two(data: bytes) -> tuple[bytes, bytes]:
    """What `with_length` begins, and the rest."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]
