"""Values of every key of a recipe: such as are taken, and such as are not."""

import copy
import math

LEAST = {"tokenizer": "bytes", "sources": [{"paths": ["x.jsonl"]}]}


def in_section(section, key, value):
    """The recipe's table with one key changed."""
    table = copy.deepcopy(LEAST)
    if section == "":
        table[key] = value
    elif section == "sources":
        table["sources"][0] |= {"group_by": "repo"} if key in ("order_by", "between") else {}
        table["sources"][0][key] = value
    elif section == "tasks":
        table["tasks"] = [{"objective": "causal", key: value}]
    else:
        table[section] = {key: value}
    return table


NUMBERS = ["1", None, [1], {}, True, math.nan, math.inf, -math.inf]
TEXTS = [1, 1.5, True, None, ["x"], {}]
ROLES = (["</s>", 0, 7], ["", -1, 1.5, True, [1], {}])

# (section, key) → (values that are taken, with what they become where that is another; values that
# are not)
VALUES = {
    ("", "seq_length"): ([8, 4096, 1 << 24], [0, 7, 12, -8, 8.0, (1 << 24) + 8, *NUMBERS]),
    ("", "seq_lengths"): (
        [([2048, 4096], (2048, 4096))],
        [[], [4096], [8192, 4096], [4096, 4096], [4, 4096], [4096, 8193], 4096, "2048", None, True],
    ),
    ("", "seed"): ([0, 2**63 - 1], [-1, 2**63, 1.0, *NUMBERS]),
    ("", "tokenizer"): (["bytes", "a/b.json"], TEXTS),
    ("", "engine"): (["auto", "reference"], TEXTS),
    ("", "total_tokens"): ([0], [-1, 1.0, *NUMBERS]),
    ("sources", "name"): (["web", "ünï"], ["a\0", "a\nb", "\x7f", "\ud800", *TEXTS]),
    ("sources", "paths"): (
        [("x", ("x",)), (["x", "y*"], ("x", "y*"))],
        ["", [], [""], [1], 1, True, {}],
    ),
    ("sources", "format"): (
        [
            "auto",
            "jsonl",
            "parquet",
            "arrow",
            "text",
            "megatron",
            "tokens",
            "datatrove",
            "token_stream",
        ],
        TEXTS,
    ),
    ("sources", "text_key"): (["body"], TEXTS),
    ("sources", "token_dtype"): (
        ["auto", "uint8", "uint16", "uint32", "uint64"],
        ["", "int32", "UINT16", *TEXTS],
    ),
    ("sources", "messages_key"): (["dialog", "data.messages"], ["", *TEXTS]),
    ("sources", "tools_key"): (["functions", "data.tools"], ["", *TEXTS]),
    ("sources", "messages_format"): (
        ["auto", "messages", "sharegpt", "prompt_completion", "alpaca"],
        ["", "chosen", "Alpaca", *TEXTS],
    ),
    ("sources", "repeat"): (
        [(2, 2.0), 0.001, 1e-9, (1000, 1000.0), "clip(score - 1, 0, 4)"],
        [0, 1e-300, -1, 1000.5, "", *(value for value in NUMBERS if not isinstance(value, str))],
    ),
    ("sources", "keep"): (
        [("score", ("score",)), (["score", "a.b"], ("score", "a.b"))],
        [[], [""], 5],
    ),
    ("sources", "where"): (["score >= 3"], ["", *TEXTS]),
    ("sources", "max_repeat"): ([(2, 2.0), 0.5], [0, -1, 1000.5, *NUMBERS]),
    ("sources", "share"): ([(1, 1.0), 0.5, 1e-9], [0, 0.0, 1e-300, 1.5, -1, *NUMBERS]),
    ("sources", "sample"): (
        [([0, 1], (0.0, 1.0)), ([0.1, 0.9], (0.1, 0.9))],
        [
            0.5,
            [0.5],
            [0.5, 0.5],
            [0.9, 0.1],
            [-0.1, 1],
            [0, 1.1],
            [0, "1"],
            [0, True],
            [0, 0.5, 1],
            [0, math.nan],
            "ab",
        ],
    ),
    ("sources", "group_by"): (["repo", "meta.repo"], TEXTS),
    ("sources", "order_by"): (["path", "meta.path"], TEXTS),
    ("sources", "between"): (
        [("", ()), ("<sep>", ("<sep>",)), (5, (5,)), (["<sep>", 5], ("<sep>", 5)), ([], ())],
        [-1, [""], [-1], 1.5, True, {}],
    ),
    ("sources", "tasks"): (
        [("causal", ("causal",)), (["causal"], ("causal",))],
        [[], "", [1], 1, True, {}],
    ),
    ("documents", "append_eos"): ([True, False, "segment"], [1, 0, "true", "document", None]),
    ("documents", "prepend_bos"): ([True, False], [1, 0, "true", None]),
    ("documents", "long"): (["split", "truncate", "drop"], ["cut", 1, True, []]),
    ("documents", "max_tokens"): ([0, 1, 500], [-1, 1.0, *NUMBERS]),
    ("documents", "min_tokens"): ([1, 5], [0, -1, 1.0, *NUMBERS]),
    ("documents", "chat_template"): (["", "chat.jinja"], [1, True, []]),
    ("documents", "chat_template_kwargs"): (
        [{"enable_thinking": False, "level": "low", "parts": [1, 2.5, {"a": "b"}]}, {}],
        [
            1,
            "a",
            [],
            {"messages": []},
            {"tools": 1},
            {"a b": 1},
            {"a": None},
            {"a": float("nan")},
            {"a": [float("inf")]},
        ],
    ),
    ("documents", "trained_turns"): (["all", "last", "each"], ["first", 1, True, []]),
    ("documents", "trained_roles"): (
        [("assistant", ("assistant",)), (["user", "tool"], ("user", "tool"))],
        [1, True, [], [""], ""],
    ),
    ("documents", "train_on_tool_calls"): ([True, False], [1, 0, "true", None]),
    ("documents", "train_reasoning"): ([True, False], [1, 0, "true", None]),
    ("documents", "train_empty_reasoning"): ([True, False], [1, 0, "true", None]),
    ("documents", "template_date"): (
        ["", "2026-01-01", "0001-12-31"],
        ["today", "2026-02-30", "2026-1-1", "20260101", 1, True, []],
    ),
    ("documents", "special_text"): (["text", "special", "reject"], ["no", 1, True, []]),
    ("documents", "long_answers"): (["continue", "untrained"], ["no", 1, True, []]),
    ("documents", "loss_weighting"): (["token", "document", "turn"], ["no", 1, True, []]),
    ("documents", "loss_spans"): (["use", "ignore"], ["no", 1, True, []]),
    ("documents", "bad_documents"): (["reject", "fail"], ["no", 1, True, []]),
    ("documents", "max_bad_fraction"): ([(0, 0.0), (1, 1.0), 0.5], [-0.1, 1.1, *NUMBERS]),
    ("packing", "algorithm"): (
        ["best_fit", "first_fit", "next_fit", "concat"],
        ["ffd", 1, True, []],
    ),
    ("packing", "max_segments_per_row"): ([0, 65535], [-1, 65536, 1.0, *NUMBERS]),
    ("packing", "encoder_length"): (
        [0],
        [-8, 12, 1 << 24, 1.0, 64, *NUMBERS],
    ),  # alone; both in building/test_sides.py
    ("packing", "decoder_length"): ([0], [-8, 12, 1 << 24, 1.0, 64, *NUMBERS]),
    ("packing", "pad_seq_to_mult"): ([1, 16], [0, -1, 3, 1.0, *NUMBERS]),
    ("specials", "missing"): (["error", "add"], ["no", 1, True, []]),
    **{
        ("specials", role): ROLES
        for role in ("eos", "bos", "pad", "mask", "fim_prefix", "fim_middle", "fim_suffix")
    },
    ("specials", "sentinels"): (
        ["auto", "<extra_id_{}>", {"first": 266, "count": 5}, (["<a>", 7], ("<a>", 7))],
        [
            "<extra_id>",
            "",
            [],
            [""],
            [-1],
            1,
            True,
            {"first": 1},
            {"first": 1, "count": 0},
            {"first": 1, "count": 2, "x": 1},
            {"first": 1, "count": 10**9},
            {"first": 1 << 31, "count": 1},
            list(range(2**20 + 1)),
        ],
    ),
    ("specials", "media"): (
        [
            ({"image": "<|image|>"}, {"image": ("", "<|image|>", "")}),
            ({"b": ["<b>", 7, ""], "a": 9}, {"a": ("", 9, ""), "b": ("<b>", 7, "")}),
        ],
        [
            {},
            {"": "x"},
            {"a": ""},
            {"a": ["x"]},
            {"a": ["x", "y", -1]},
            {"a": -1},
            {"a": None},
            "x",
            1,
            [],
        ],
    ),
    ("specials", "vocab_size"): ([0, 50_000], [-1, 1 << 31, 1.0, *NUMBERS]),
    ("tasks", "name"): (["a"], ["a\0", "a\nb", *TEXTS]),
    ("tasks", "objective"): (["causal"], TEXTS),
    ("tasks", "weight"): ([(2, 2.0), 0.001], [0, -1, 2e9, *NUMBERS]),
    ("tasks", "mode_token"): (["[NLU]"], TEXTS),
    ("output", "shard_text_bytes"): (
        ["auto", 1, ("64MiB", 64 << 20), ("1 kB", 1000)],
        [0, -1, 1.5, "", "many", "5 XB", "0", True, None, []],
    ),
    ("output", "token_dtype"): (["auto", "uint16", "int32"], ["uint32", "int64", 1, True, []]),
    ("output", "columns"): (["full", "compact", "least"], ["some", 1, True, []]),
}
