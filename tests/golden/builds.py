"""Builds over tests/golden/sources whose results are frozen: builds.json holds digests of all that
they write.

    python tests/golden/builds.py

writes the sources and builds.json. Run by hand, once for each law; afterwards no change of the code
changes a byte of them. Frozen are each shard and each file of rejects, the ledger, the fingerprint,
and every key of the plan but those that name installed versions or places.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a command, of which Python knows the folder alone
    sys.path.insert(0, str(Path(__file__).parents[2]))

from packprep.building import distributed
from packprep.building.run import build
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import MANIFEST_NAME, encode
from packprep.recipe import load_recipe, read_recipe
from packprep.tokenizer.file import bytes_tokenizer_json
from tests import made, tokens_made
from tests.golden.make_datasets import (
    CHAT,
    conversations,
    lines,
    media,
    recipe,
    source,
    spans,
    task,
    texts,
)
from tests.tokenizer import tokenizers_made

HERE = Path(__file__).parent
SOURCES = HERE / "sources"
FROZEN = HERE / "builds.json"
DUO_PLAN = HERE / "duo_plan.json"
"""The plan of `duo`: the last bits of its thresholds are those of a library's functions, so the
build begins from it."""

_ROLES = ("<pad>", "<eos>", *(f"<extra_id_{k}>" for k in range(100)))
# sources are frozen key by key, without their prefix
_PLACES = ("digest", "made_with", "engine", "sources")

_WEB, _BPE = source("web", "web.jsonl"), 'tokenizer = "sources/bpe.json"\n'
_T5 = task("span_corruption", "noise_density = 0.15\nmean_span_length = 3.0\nrandom_roll = true\n")
_MASKED = [
    '[[tasks]]\npreset = "mlm"\n',
    '[[tasks]]\npreset = "llada"\n',
    '[[tasks]]\npreset = "mdlm"\n',
    '[[tasks]]\npreset = "dllm"\n',
    task(
        "masked_diffusion",
        'name = "many"\nexact_count = true\nnoise_range = [0.2, 0.8]\nweighting = "1/p"\n',
    ),
]
_BLOCKS = [
    f'[[tasks]]\npreset = "{name}"\n'
    for name in ("fast_dllm", "i_dlm", "diffusion_gemma", "nemotron_diffusion")
]
_SHARES = [
    source("gz", "web.jsonl.gz", "share = 0.5\n"),
    source("zst", "web.jsonl.zst", "share = 0.3\n"),
    source("arrow", "web.arrow", "share = 0.2\nsample = [0.1, 0.9]\n"),
]
_SEGMENT_EOS = '[documents]\nappend_eos = "segment"\n'
_REPEATS = [
    source("web", "web.jsonl"),
    source("books", "books.parquet", "repeat = 2.5\n"),
    source("notes", "notes/*.txt", "repeat = 0.5\n"),
]

BUILDS = {
    "ul2r": recipe(_WEB, '[[tasks]]\npreset = "ul2r"\n', length=256),
    "t5_reference": (
        recipe(_WEB, _T5, length=256).replace(
            'tokenizer = "bytes"\n', _BPE + 'engine = "reference"\n'
        )
    ),
    "t5_fast": (
        recipe(_WEB, _T5, length=256).replace(
            'tokenizer = "bytes"\n', _BPE + 'engine = "fastokens"\n'
        )
    ),
    "causal_concat": recipe(
        _WEB, '[packing]\nalgorithm = "concat"\n[documents]\nprepend_bos = true\n'
    ),
    "fim_next_fit": recipe(_WEB, task("fill_in_the_middle"), '[packing]\nalgorithm = "next_fit"\n'),
    "masked": recipe(_WEB, *_MASKED),
    "duo": recipe(_WEB, '[[tasks]]\npreset = "duo"\n'),
    "bd3_compact": (
        recipe(_WEB, task("block_diffusion", "block_length = 16\n")).rstrip()
        + '\ncolumns = "compact"\n'
    ),
    "supervised": recipe(
        source("spans", "spans.jsonl"),
        source("chats", "chats.jsonl"),
        task("causal"),
        task("prefix_lm"),
        task("masked_diffusion"),
        '[documents]\nchat_template = "sources/chat.jinja"\n',
    ),
    "tokens": recipe(
        source("pair", "pair.bin"),
        source("rows", "rows.parquet", 'format = "tokens"\n'),
        task("causal"),
        task("prefix_lm"),
        length=96,
        shard=20_000,
    ),
    "shares": recipe(
        *_SHARES, '[[tasks]]\npreset = "ul2"\n', "[packing]\npad_seq_to_mult = 8\n", length=256
    ),
    "repeats": recipe(
        *_REPEATS, task("prefix_lm"), task("span_corruption"), length=256, shard=7000
    ),
    "blocks": recipe(_WEB, *_BLOCKS, length=256).rstrip() + '\ncolumns = "least"\n',
    "sides": (
        recipe(
            _WEB,
            '[[tasks]]\npreset = "ul2"\n',
            "[packing]\nencoder_length = 128\ndecoder_length = 64\n",
        ).replace("seq_length = 128\n", "")
    ),
    "media": (
        recipe(
            source("media", "media.jsonl"),
            task("causal"),
            task("masked_diffusion"),
            '[specials]\nmissing = "add"\nmedia = {image = ["<extra_id_90>", "<extra_id_91>",'
            ' "<extra_id_92>"]}\n',
        ).replace('tokenizer = "bytes"\n', _BPE)
    ),
    "ul2r_segment_eos": recipe(_WEB, '[[tasks]]\npreset = "ul2r"\n', _SEGMENT_EOS, length=256),
    "t5_segment_eos": (
        recipe(
            _WEB,
            task("span_corruption", "eos_after_inputs = true\n"),
            "[packing]\nencoder_length = 128\ndecoder_length = 64\n",
            _SEGMENT_EOS,
        ).replace("seq_length = 128\n", "")
    ),
    "concat_segment_eos": recipe(
        _WEB, '[packing]\nalgorithm = "concat"\n', _SEGMENT_EOS + "prepend_bos = true\n"
    ),
    "chats_segment_eos": recipe(  # rows that hold a part of a conversation each
        source("chats", "chats.jsonl"),
        task("causal"),
        task("masked_diffusion"),
        _SEGMENT_EOS + 'chat_template = "sources/chat.jinja"\n',
        length=64,
    ),
    "chats_each_turn": recipe(
        source("chats", "chats.jsonl"),
        task("causal"),
        task("prefix_lm"),
        '[documents]\ntrained_turns = "each"\nchat_template = "sources/forgetting.jinja"\n',
        length=64,
    ),
}
FORGETTING = CHAT.replace(
    "{{ m.content }}",
    "{% if loop.last and m.role == 'assistant' %}now: {% endif %}{{ m.content }}",
)
"""A chat template that writes a last answer otherwise than an earlier one."""


def write_sources(folder: Path) -> None:
    """All sources: some 40 kB of text in every format, a few bad documents, and a byte-level
    BPE."""
    web = [*texts("frozen web", 60, 30), *texts("frozen long", 3, 400), "ab", "", "é" * 300]
    bad = [b'{"text": 7}\n', b'{"text": "\\ud800"}\n', b"no JSON\n"]
    made.write(folder / "web.jsonl", lines(web) + b"".join(bad))
    for suffix in (".gz", ".zst"):
        made.write_lines(
            folder / f"web.jsonl{suffix}", [f"{suffix} {text}" for text in web if text]
        )
    made.write_arrow(folder / "web.arrow", [f"arrow {text}" for text in web], 16)
    made.write_parquet(folder / "books.parquet", texts("frozen books", 40, 50), 16)
    made.write_texts(folder / "notes", ["", *texts("frozen notes", 6, 40)])
    made.write(folder / "spans.jsonl", lines(spans("frozen spans")))
    made.write(folder / "chats.jsonl", lines(conversations("frozen chats")))
    made.write(folder / "media.jsonl", lines(media("frozen media")))
    (folder / "chat.jinja").write_text(CHAT)
    (folder / "forgetting.jinja").write_text(FORGETTING)
    tokens_made.write_megatron(
        folder / "pair.bin", tokens_made.ids_of(texts("frozen pair", 30, 20))
    )
    tokens_made.write_parquet(
        folder / "rows.parquet", tokens_made.ids_of(texts("frozen rows", 30, 20), False), 16
    )
    bpe = tokenizers_made.llama3_like()
    bpe["added_tokens"] = [tokenizers_made.added(320 + k, text) for k, text in enumerate(_ROLES)]
    bpe["post_processor"] = None
    made.write(folder / "bpe.json", json.dumps(bpe, ensure_ascii=False).encode())


def make(name: str, folder: Path) -> Path:
    """The build `name`, made in `folder` from copied sources; gives its dataset."""
    base, out = folder / name, folder / name / "dataset"
    shutil.copytree(SOURCES, base / "sources")
    (base / "recipe.toml").write_text(BUILDS[name], "utf-8")
    if name == "duo" and DUO_PLAN.exists():
        out.mkdir()
        shutil.copy(DUO_PLAN, out / "plan.json")
        made.write(out / "tokenizer.json", bytes_tokenizer_json())
        for number in range(json.loads(DUO_PLAN.read_bytes())["shards"]):
            distributed.build_shard(out, number, {"web": str(base / "sources")})
        distributed.finish(out)
    else:
        build(read_recipe(load_recipe(base / "recipe.toml"), base), out, made.Silent())
    return out


def frozen(out: Path) -> dict[str, Any]:
    """What is frozen of a dataset: digests, and what is small itself."""
    manifest, plan = (
        json.loads((out / file).read_bytes()) for file in (MANIFEST_NAME, "plan.json")
    )
    named = {key: value for key, value in plan.items() if key not in _PLACES}
    for one in plan["sources"]:
        named[f"sources {one['name']}"] = {
            key: value for key, value in one.items() if key != "prefix"
        }
    return {
        "files": {
            name: digest_of(data)
            for kind in ("shards", "rejects")
            for name, data in made.contents(out, kind).items()
        },
        "ledger": digest_of(encode(manifest["ledger"])),
        "fingerprint": manifest["fingerprint"],
        "plan": {key: digest_of(encode(value)) for key, value in sorted(named.items())},
    }


def freeze() -> None:
    shutil.rmtree(SOURCES, ignore_errors=True)
    DUO_PLAN.unlink(missing_ok=True)
    write_sources(SOURCES)
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name in BUILDS:
            out = make(name, Path(folder))
            found[name] = frozen(out)
            if name == "duo":
                plan = json.loads((out / "plan.json").read_bytes())
                plan["sources"][0]["prefix"] = "/golden/sources"
                DUO_PLAN.write_bytes(encode({**plan, "digest": own_digest(plan)}))
    FROZEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    freeze()
