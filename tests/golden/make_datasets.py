"""Writes the golden datasets of the law that this packprep has, with their recipes and sources:
tests/golden/lawN/NAME.

    python tests/golden/make_datasets.py [NAME ...]

Run by hand once per law_version, when it is final. Afterwards the datasets are never made again:
they show that what an earlier version wrote stays readable, which is promised from version 1.0 on.
A name can be given to write one dataset more. NAME/recipe.toml,
NAME/sources and NAME/dataset; of `half` some shards have no receipt, or nothing. The plans name
/tmp/golden as where the sources lay.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from packprep.building.run import build
from packprep.format.json_files import LAW_VERSION, MANIFEST_NAME, receipt_name, shard_name
from packprep.messages import Bar
from packprep.recipe import load_recipe, read_recipe

HERE = Path(__file__).parent
PLACE = Path("/tmp/golden")

TEXT = (
    "the of a in rain falls slowly over hills and nobody counts its drops; ünter Brücken 雨 が降る"
    " 🙂 mill wheel turns"
)
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLING = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}{% for m in messages %}<{{"
    " m.role }}>{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content"
    " }}</think>{% endif %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}<call>{{"
    " call.function | tojson }}</call>{% endfor %}</{{ m.role }}>\n{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)


def texts(name: str, count: int, words: int) -> list[str]:
    """`count` texts of some `words` words each, some of them short."""
    chance = random.Random(name)
    return [
        " ".join(chance.choices(TEXT.split(), k=1 + int(words * chance.random() * 2)))
        for _ in range(count)
    ]


def lines(records: list) -> bytes:
    """JSON lines; a text stands for a document of it."""
    made = [
        json.dumps({"text": r} if isinstance(r, str) else r, ensure_ascii=False) for r in records
    ]
    return "".join(f"{line}\n" for line in made).encode()


def spans(name: str) -> list[dict]:
    """Documents of which two ranges are trained."""
    return [
        {"text": t + " : " + t, "loss_spans": [[3, 9], [len(t), 2 * len(t)]]}
        for t in texts(name, 12, 12)
    ]


def media(name: str) -> list[dict]:
    """Documents with up to three pictures of a few slots each; every fourth has none."""
    found = []
    for i, text in enumerate(texts(name, 40, 20)):
        places = [
            {"at": len(text) * k // 3, "tokens": 1 + (5 * i + 7 * k) % 23} for k in range(i % 4)
        ]
        found.append(
            {
                "text": text,
                "media": [
                    {**p, "ref": f"{i}/{k}.png", "kind": "image"} for k, p in enumerate(places)
                ],
            }
        )
    return found


def conversations(name: str) -> list[dict]:
    """Short conversations, every second with a system message."""
    found, said = [], texts(name, 60, 4)
    for i in range(10):
        system = [{"role": "system", "content": "Answer briefly."}] * (i % 2)
        turns = [
            {"role": ("user", "assistant")[k % 2], "content": said[6 * i + k]}
            for k in range(2 + i % 3 * 2)
        ]
        found.append({"messages": system + turns})
    return found


def long_conversations(name: str) -> list[dict]:
    """Conversations longer than a row, with results of tools; a capital is a message that may be
    longer than a row itself."""
    roles, found = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}, []
    for i, shape in enumerate(("uataUata", "suAuaTa", "suA", "uAaua", "saTtAua", "UAua")):
        said = [
            texts(f"{name} {i} {k}", 1, 30 if role.isupper() else 4)[0]
            for k, role in enumerate(shape)
        ]
        found.append(
            {
                "messages": [
                    {"role": roles[r], "content": t}
                    for r, t in zip(shape.lower(), said, strict=True)
                ]
            }
        )
    return found


def calling_conversations(name: str) -> list[dict]:
    """Records of each layout; of those with messages some have tools, calls of one or two of them,
    thoughts, and weights of the record or of messages, or say of a message whether it is
    trained."""
    found: list[dict] = []
    function = {
        "name": "rain",
        "parameters": {"type": "object", "properties": {"hills": {"type": "integer"}}},
    }
    for i in range(12):
        said = texts(f"{name} {i}", 8, 5)
        calls = [
            {"type": "function", "function": {"name": "rain", "arguments": {"hills": n}}}
            for n in range(1 + i % 2)
        ]
        messages: list[dict] = [
            {"role": "user", "content": said[0]},
            {"role": "assistant", "content": None if i % 3 else said[1], "tool_calls": calls},
            *({"role": "tool", "content": text} for text in said[2 : 2 + len(calls)]),
            {"role": "assistant", "content": said[4], "reasoning_content": said[5]},
            {"role": "user", "content": said[6]},
            {"role": "assistant", "content": said[7], "reasoning_content": said[1]},
        ]
        messages[1] |= {"weight": (0.5, 2, 0)[i % 3]} if i % 2 else {}
        messages[-1] |= {"train": False} if i % 5 == 4 else {}
        tools = {"tools": [{"type": "function", "function": function}]} if i % 4 else {}
        found.append({"messages": messages, **tools, **({"weight": 0.25} if i % 4 == 3 else {})})
    for asked, answered in zip(
        texts(f"{name} asked", 3, 6), texts(f"{name} answered", 3, 6), strict=True
    ):
        user, assistant = (
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
        )
        found += [
            {
                "conversations": [
                    {"from": "human", "value": asked},
                    {"from": "gpt", "value": answered},
                ]
            },
            {"prompt": [user], "completion": [{**assistant, "weight": 1.5}]},
            {"prompt": f"{asked}: ", "completion": answered, "weight": 3},
            {"instruction": asked, "input": "", "output": answered},
        ]
    return found


def recipe(*parts: str, length: int = 128, shard: int = 3000) -> str:
    """A recipe of bytes; parts: tables, tasks as the values of [[tasks]]."""
    return "\n".join(
        [f'seq_length = {length}\nseed = 7\ntokenizer = "bytes"\n', *parts, _output(shard)]
    )


def _output(shard: int) -> str:
    return f"[output]\nshard_text_bytes = {shard}\n"


def source(name: str, file: str, more: str = "") -> str:
    return f'[[sources]]\nname = "{name}"\npaths = ["sources/{file}"]\n{more}'


def task(objective: str, more: str = "") -> str:
    return f'[[tasks]]\nobjective = "{objective}"\n{more}'


WEB, BOOKS = source("web", "web.jsonl"), source("books", "books.parquet", "repeat = 1.5\n")
SPAN = (
    'name = "{}"\nnoise_density = {}\nmean_span_length = {}\nrandom_roll = true\nmode_token ='
    ' "{}"\n'
)
ROLLED = [
    task("span_corruption", SPAN.format("r", 0.15, 3.0, "[NLU]")),
    task("span_corruption", SPAN.format("x", 0.5, 8.0, "[NLG]")),
    task("prefix_lm", 'mode_token = "[S2S]"\n'),
]
IN_PLACE = [
    task("masked_diffusion", 'exact_count = true\nnoise_range = [0.15, 0.9]\nweighting = "1/p"\n'),
    task("uniform_diffusion", 'weighting = "view_scale"\n'),
]
HALF = recipe(WEB, *ROLLED, shard=900)
TURNS = '[documents]\nchat_template = "sources/chat.jinja"\n'

DATASETS = {
    "causal": recipe(WEB, source("notes", "notes/*.txt"), "[documents]\nprepend_bos = true\n"),
    "ul2r": recipe(WEB, BOOKS, *ROLLED, "[packing]\npad_seq_to_mult = 4\n"),
    "in_place": recipe(
        source("web", "web.jsonl.zst"), *IN_PLACE, task("block_diffusion", "block_length = 8\n")
    ),
    "supervised": recipe(
        source("spans", "spans.jsonl"),
        source("chats", "chats.jsonl"),
        task("causal"),
        task("prefix_lm"),
        task("masked_diffusion", "noise_eos = false\n"),
        '[documents]\nchat_template = "sources/chat.jinja"\n',
    ),
    "compact": (
        recipe(WEB, task("causal"), task("fill_in_the_middle"), shard=9000).rstrip()
        + '\ncolumns = "compact"\n'
    ),
    "shares": recipe(
        source("web", "web.jsonl", "share = 0.7\n"),
        source("books", "books.parquet", "share = 0.3\n"),
    ),
    "half": HALF,
    "chats": recipe(
        source("chats", "long.jsonl"),
        source("spans", "spans.jsonl"),
        task("causal"),
        task("prefix_lm"),
        TURNS,
    ),
    "untrained": recipe(
        source("chats", "long.jsonl"),
        task("causal"),
        task("masked_diffusion"),
        f'{TURNS}long_answers = "untrained"\n',
    ),
    "calls": recipe(
        source("calls", "calls.jsonl"),
        task("causal"),
        task("prefix_lm"),
        task("masked_diffusion"),
        '[documents]\nchat_template = "sources/calling.jinja"\n',
        length=512,
    ),
}


def write_sources(folder: Path) -> None:
    """All sources that a recipe may name."""
    (folder / "notes").mkdir(parents=True)
    (folder / "web.jsonl").write_bytes(
        lines([*texts("web", 36, 14), "ab", "", *texts("long", 2, 120)])
    )
    (folder / "web.jsonl.zst").write_bytes(
        zstandard.ZstdCompressor().compress(lines(texts("zst", 36, 14)))
    )
    pq.write_table(
        pa.table({"text": texts("books", 24, 16)}), folder / "books.parquet", row_group_size=8
    )
    for i, text in enumerate(texts("notes", 5, 20)):
        (folder / "notes" / f"{i}.txt").write_text(text, "utf-8")
    (folder / "spans.jsonl").write_bytes(lines(spans("spans")))
    (folder / "chats.jsonl").write_bytes(lines(conversations("chats")))
    (folder / "long.jsonl").write_bytes(lines(long_conversations("long")))
    (folder / "calls.jsonl").write_bytes(lines(calling_conversations("calls")))
    (folder / "chat.jinja").write_text(CHAT)
    (folder / "calling.jinja").write_text(CALLING)


def write(name: str, text: str, folder: Path) -> None:
    """One dataset with what it was made of, written at PLACE and moved to `folder`."""
    place = PLACE / name
    write_sources(place / "sources")
    (place / "recipe.toml").write_text(text, "utf-8")
    for path in [path for path in (place / "sources").rglob("*") if path.is_file()]:
        if f'{path.name}"' not in text and f"{path.parent.name}/*" not in text:
            path.unlink()
    if not any((place / "sources" / "notes").iterdir()):
        (place / "sources" / "notes").rmdir()
    build(read_recipe(load_recipe(place / "recipe.toml"), place), place / "dataset", Bar(), 1)
    if name == "half":
        shards = len(list((place / "dataset").glob("receipts/*/*")))
        for number in range(1, shards, 2):
            (place / "dataset" / receipt_name(number)).unlink()
        (
            place / "dataset" / shard_name(1)
        ).unlink()  # the others stand as after a kill between shard and receipt
        (place / "dataset" / MANIFEST_NAME).unlink()
    shutil.move(place, folder)


if __name__ == "__main__":
    for name in sys.argv[1:] or DATASETS:
        shutil.rmtree(PLACE, ignore_errors=True)
        write(name, DATASETS[name], HERE / f"law{LAW_VERSION}" / name)
    shutil.rmtree(PLACE)
