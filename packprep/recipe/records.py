"""The recipe as frozen records: the one home of every key, its type, default, range and meaning.

The docs' table of keys is made from them. What an objective reads (`[[tasks]]`) is declared by the objective and checked in
`objectives/tasks.py`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from packprep.recipe import kinds
from packprep.recipe.kinds import BOOLEAN, NAME, ROLE, STRINGS, TEXT, Kind, choice, number, whole

_REQUIRED: Any = object()
MOST_TASKS = MOST_SOURCES = 65_535  # a segment's header has their numbers in 16 bits, and one more task, too_short
MOST_DRAWS = 1 << 22  # pairs of a source and a task: each has its threshold


def _key(default: Any, kind: Kind, meaning: str, later: bool = False) -> Any:
    """later: it joined after datasets had been written, which are without it: stored only where it differs."""
    return field(default=default, metadata={"kind": kind, "meaning": meaning, "later": later})


@dataclass(frozen=True)
class Source:
    """One `[[sources]]`: files whose documents share a format and a use."""

    name: str = _key("", NAME, "default source0, source1, … by position")
    paths: tuple[str, ...] = _key(
        _REQUIRED, STRINGS, "files, patterns or URLs, relative to the recipe; ** crosses folders"
    )
    format: str = _key(
        "auto",
        choice("auto", "jsonl", "parquet", "arrow", "text", "megatron", "tokens"),
        "auto: by the file's suffix, as text; megatron and tokens: token ids",
    )
    text_key: str = _key(
        "text",
        TEXT,
        "the field or column that holds the text; of tokens, the ids: by default input_ids, or else tokens",
    )
    repeat: float = _key(
        1.0,
        number("a number, 1e-9 … 1000", 1e-9, 1000),
        "uses of each document; each use has its own order and chance; 2.5: all twice, half of them a third time",
    )
    share: float | None = _key(
        None,
        number("a number, 1e-9 … 1", 1e-9, 1),
        "instead of repeat, then in every source: share of the document tokens",
    )
    sample: tuple[float, float] = _key(
        (0.0, 1.0),
        Kind("two numbers [low, high], 0 ≤ low < high ≤ 1", kinds.accept_interval),
        "keep the documents whose u(file, position) lies in [low, high): held-out sets without overlap",
    )
    tasks: tuple[str, ...] | None = _key(
        None, STRINGS, "which tasks its segments draw from, by name; NAME also stands for all NAME-…; all by default"
    )


@dataclass(frozen=True)
class DocumentKeys:
    """`[documents]`: what becomes of a document on its way to segments."""

    append_eos: bool = _key(True, BOOLEAN, "eos after the last token of a document")
    prepend_bos: bool = _key(False, BOOLEAN, "bos before the first token of a document")
    long: str = _key(
        "split", choice("split", "truncate", "drop"), "documents beyond a row or max_tokens; what is cut is counted"
    )
    max_tokens: int = _key(0, whole(0), "the most content tokens of a segment; 0: no limit beyond the row")
    min_tokens: int = _key(1, whole(1), "shorter documents are dropped, and counted")
    special_text: str = _key(
        "text",
        choice("text", "special", "reject"),
        'what "<pad>" in a document\'s text is: text, the special token, a reject',
    )
    loss_spans: str = _key(
        "use", choice("use", "ignore"), "whether a document's loss_spans and messages limit its loss"
    )
    chat_template: str = _key(
        "",
        TEXT,
        "a Jinja file that makes text of messages; by default the one in the tokenizer's tokenizer_config.json",
    )
    bad_documents: str = _key("reject", choice("reject", "fail"), "reject: counted and logged; fail: the build stops")
    max_bad_fraction: float = _key(
        0.001,
        number("a number, 0 … 1", 0, 1),
        "at publication: fail if bad documents are more than this · read, and more than 100 or than a tenth of the used ones",
    )


@dataclass(frozen=True)
class Packing:
    """`[packing]`: segments → rows."""

    algorithm: str = _key(
        "best_fit",
        choice("best_fit", "first_fit", "next_fit", "concat"),
        "next_fit keeps document order; concat cuts at row ends, only for tasks whose law is n + constant",
    )
    max_segments_per_row: int = _key(0, whole(0, 65535), "0: 65 535, the format's limit")
    pad_seq_to_mult: int = _key(
        1, whole(1), "each segment's physical length is a multiple of this; it divides seq_length"
    )


@dataclass(frozen=True)
class Specials:
    """`[specials]`: which token plays which role."""

    missing: str = _key(
        "error",
        choice("error", "add"),
        "error: list unused reserved tokens and the lines to paste; add: extend the vocabulary",
    )
    eos: str | int | None = _key(None, ROLE, "end of a document")
    bos: str | int | None = _key(None, ROLE, "begin of a document")
    pad: str | int | None = _key(None, ROLE, "padding; a tokenizer without one pads with eos")
    mask: str | int | None = _key(None, ROLE, "the mask of masked and block diffusion")
    fim_prefix: str | int | None = _key(None, ROLE, "fill-in-the-middle: before the prefix")
    fim_middle: str | int | None = _key(None, ROLE, "fill-in-the-middle: before the middle")
    fim_suffix: str | int | None = _key(None, ROLE, "fill-in-the-middle: before the suffix")
    sentinels: Any = _key(
        None,
        Kind(
            'a pattern with {}, a list of tokens or ids, {first = ID, count = N}, or "auto"; at most 1 048 576',
            kinds.accept_sentinels,
        ),
        'the sentinels of span corruption, "<extra_id_{}>" by default; "auto" with missing = "add": as many as needed; ≤ 2²⁰',
    )
    mode_tokens: Mapping[str, str | int] = _key(
        None, ROLE, 'quoted, a mode token as a task writes it = the token that plays it: "[NLU]" = "<|reserved_1|>"'
    )
    vocab_size: int = _key(
        0, whole(0, 2**31 - 1), "ceiling that no id may reach: the embedding's rows; 0: the tokenizer's"
    )


@dataclass(frozen=True)
class TaskEntry:
    """One task of `[[tasks]]`, presets expanded. `parameters` are the objective's own keys; of those that joined later
    `later` has the defaults, once the objective is known."""

    name: str = _key("", NAME, "default: the objective's name")
    objective: str = _key(_REQUIRED, TEXT, "which objective")
    weight: float = _key(
        1.0, number("a number above 0", 0, 1e9, low_open=True), "relative probability that a segment gets this task"
    )
    mode_token: str | None = _key(None, TEXT, "a token in front of the body that tells the task; none by default")
    parameters: Mapping[str, Any] = field(default_factory=dict)
    later: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class OutputKeys:
    """`[output]`: how the shards are written."""

    shard_text_bytes: int | str = _key(
        "auto",
        Kind('a size such as "64MiB", or "auto"', kinds.accept_auto_size),
        "input text per shard; auto: 64MiB, less where few shards then split evenly over workers, more for long rows "
        "(≥ 2000 rows) and to stay under 50 000 shards, at most 512MiB",
    )
    token_dtype: str = _key("auto", choice("auto", "uint16", "int32"), "auto: uint16 where every id fits")
    columns: str = _key("full", choice("full", "compact"), "compact: without what the header determines")


@dataclass(frozen=True)
class Recipe:
    """The whole recipe; `base` is the folder that relative paths start from."""

    seq_length: int = _key(4096, whole(8, 1 << 24), "slots per row; a multiple of 8")
    seed: int = _key(0, whole(0, 2**63 - 1), "the seed of all chance")
    tokenizer: str = _key(_REQUIRED, TEXT, 'a file, a directory with tokenizer.json, a Hub name, or "bytes"')
    engine: str = _key("auto", TEXT, "auto | reference | an engine's name; never changes bytes")
    total_tokens: int = _key(0, whole(0), "with share: the document tokens to use; 0: as many as use no source twice")
    sources: tuple[Source, ...] = ()
    documents: DocumentKeys = field(default_factory=DocumentKeys)
    packing: Packing = field(default_factory=Packing)
    specials: Specials = field(default_factory=Specials)
    tasks: tuple[TaskEntry, ...] = ()
    output: OutputKeys = field(default_factory=OutputKeys)
    base: Path = Path()

    @property
    def min_tail(self) -> int:
        """The fewest content tokens of a segment that is not a whole document."""
        return max(3, self.documents.min_tokens)


SECTIONS: dict[str, type] = {
    "": Recipe,
    "sources": Source,
    "documents": DocumentKeys,
    "packing": Packing,
    "specials": Specials,
    "tasks": TaskEntry,
    "output": OutputKeys,
}


def keys_of(record: type) -> dict[str, Any]:
    """name → dataclass field of the keys that a section takes."""
    return {f.name: f for f in fields(record) if "kind" in f.metadata}


def later_keys() -> dict[str, dict[str, Any]]:
    """section → the defaults of its keys that joined later."""
    return {
        section: {name: key.default for name, key in keys_of(record).items() if key.metadata["later"]}
        for section, record in SECTIONS.items()
    }


def default_of(key: Any) -> Any:
    """The default of a key; `...` if the recipe has to give it."""
    return ... if key.default is _REQUIRED or key.default is MISSING else key.default
