"""The single declaration of the recipe: every key with its type, range, default and meaning.

Checked values are stored in frozen records. Messages, the key tables of the docs and the JSON
schema for editors are generated from this declaration. The keys that an objective reads in
`[[tasks]]` are declared by the objective and checked in `objectives/tasks.py`.
"""

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from packprep.format.json_files import Later

# The header of a segment stores these numbers in 16 bits. One more task, too_short, is added.
MOST = {"sources": 65_535, "tasks": 65_535}
MOST_DRAWS = 1 << 22  # Number of (source, task) pairs. Each has its own threshold.
MOST_SENTINELS = 1 << 20
_LARGEST = 2**63 - 1  # the largest integer in TOML


# The types of recipe values follow, as types of msgspec. A title describes a type in words if the
# type does not. If the stored value has another type, `given` is the type of the recipe's value.
# `read` then converts that value or raises ValueError.


def parse_size(value: int | str) -> int:
    """Return the bytes of a size such as 1048576, "1MiB" or "64 MB".

    Raises:
        ValueError: If it is not a size.
    """
    if type(value) is int and 0 < value < 2**63:
        return value
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if type(value) is str else None
    )
    if not match or match[2].upper() not in _UNITS or not 0 < float(match[1]) < 2**63:
        raise ValueError
    return max(1, round(float(match[1]) * _UNITS[match[2].upper()]))


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def _read_interval(value: tuple[float, ...]) -> tuple[float, ...]:
    if not value[0] < value[1]:
        raise ValueError
    return value


def _read_lengths(value: tuple[int, ...]) -> tuple[int, ...]:
    if any(length % 8 for length in value) or list(value) != sorted(set(value)):
        raise ValueError
    return value


class SentinelRange(msgspec.Struct, forbid_unknown_fields=True):
    """A range of sentinels with consecutive ids."""

    first: Annotated[int, Meta(description="the id of the first", ge=0, lt=1 << 31)]
    count: Annotated[int, Meta(description="how many there are", ge=1, le=MOST_SENTINELS)]


def _read_sentinels(value: Any) -> Any:
    if isinstance(value, str) and value != "auto" and "{}" not in value:
        raise ValueError
    return msgspec.structs.asdict(value) if isinstance(value, SentinelRange) else value


OF_PACKPREP = ("messages", "tools", "add_generation_prompt", "packprep_generation")
"""The variables of a chat template that packprep always sets itself.

Neither a recipe nor a record can override them.
"""


def _read_variables(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not all(name.isidentifier() and name not in OF_PACKPREP for name in value) or not _is_json(
        value
    ):
        raise ValueError
    return value


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(_is_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


Text = Annotated[str, Meta(min_length=1)]
Whole = Annotated[int, Meta(le=_LARGEST)]
Name = Annotated[
    str,
    Meta(
        title="a text of one line, without control characters",
        pattern=r"^[^\x00-\x1f\x7f\ud800-\udfff]*$(?!\n)",
    ),
]
Role = Annotated[Text | Annotated[int, Meta(ge=0)], Meta(title="a token's text or its id")]
Strings = Annotated[
    tuple[str, ...],
    Meta(
        title="a text or a list of texts",
        extra={
            "given": Text | Annotated[tuple[Text, ...], Meta(min_length=1)],
            "read": lambda given: (given,) if isinstance(given, str) else given,
        },
    ),
]
Date = Annotated[
    str,
    Meta(
        title='a date such as "2026-01-01"',
        extra={
            "given": Annotated[str, Meta(pattern=r"^$|^\d{4}-\d{2}-\d{2}$")],
            "read": lambda given: given and datetime.date.fromisoformat(given).isoformat(),
        },
    ),
]
Variables = Annotated[
    Any,
    Meta(
        title="a table: a name and its value, such as enable_thinking = false",
        extra={"given": dict[str, Any], "read": _read_variables},
    ),
]
Lengths = Annotated[
    tuple[int, ...],
    Meta(
        title="a list of two or more multiples of 8, ascending",
        extra={
            "given": Annotated[
                tuple[
                    Annotated[int, Meta(ge=8, le=1 << 24, extra_json_schema={"multipleOf": 8})], ...
                ],
                Meta(min_length=2),
            ],
            "read": _read_lengths,
        },
    ),
]
Side = Annotated[
    int,
    Meta(
        title="a multiple of 8, 0 or more",
        extra={"given": Annotated[int, Meta(ge=0, le=1 << 23, multiple_of=8)]},
    ),
]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Interval = Annotated[
    tuple[Fraction, Fraction],
    Meta(
        title="two numbers [low, high], 0 ≤ low < high ≤ 1",
        extra={
            "given": Annotated[tuple[Fraction, ...], Meta(min_length=2, max_length=2)],
            "read": _read_interval,
        },
    ),
]
Size = Annotated[
    int | str,
    Meta(
        title='a size such as "64MiB", or "auto"',
        extra={
            "given": (
                Annotated[int, Meta(ge=1, le=_LARGEST)]
                | Annotated[
                    str,
                    Meta(
                        extra_json_schema={
                            "pattern": r"^auto$|^\s*\d+(\.\d+)?\s*([KkMmGg][Ii]?[Bb]|[Bb])?\s*$"
                        }
                    ),
                ]
            ),
            "read": lambda given: given if given == "auto" else parse_size(given),
        },
    ),
]
Sentinels = Annotated[
    Any,
    Meta(
        title=(
            'a pattern with {}, a list of tokens or ids, {first = ID, count = N}, or "auto"; at'
            " most 1 048 576"
        ),
        extra={
            "given": (
                Annotated[str, Meta(extra_json_schema={"pattern": r"^auto$|\{\}"})]
                | SentinelRange
                | Annotated[tuple[Role, ...], Meta(min_length=1, max_length=MOST_SENTINELS)]
            ),
            "read": _read_sentinels,
        },
    ),
]


def _read_media(value: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """Return kind → its start, position and end token, sorted by kind.

    The start or end token is "" if the kind has none. The order of the kinds defines their numbers.
    """
    made = {
        kind: ("", own, "") if isinstance(own, str | int) else own
        for kind, own in sorted(value.items())
    }
    if "text" in made or any(
        slot == "" or slot in (begin, end) for begin, slot, end in made.values()
    ):
        raise ValueError
    return made


_Tokens = Annotated[tuple[str | Annotated[int, Meta(ge=0)], ...], Meta(min_length=3, max_length=3)]
_Kinds = Annotated[
    dict[Annotated[Name, Meta(min_length=1)], Role | _Tokens], Meta(min_length=1, max_length=64)
]
_MEANT = 'a table: a kind and its [begin, slot, end] tokens, "" for none, or its slot token alone'
Media = Annotated[Any, Meta(title=_MEANT, extra={"given": _Kinds, "read": _read_media})]


def _key(meaning: str, kind: str | None = None, *, later: bool = False, **limits: Any) -> Meta:
    """Return the declaration of a key, in addition to its type.

    Args:
        meaning: The meaning of the key.
        kind: The accepted values in words, if the type and the limits do not describe them.
        later: Whether the key was added after datasets had been written without it. Such a key is
            stored only if it differs from its default.
        limits: Limits, as in `msgspec.Meta`.
    """
    return Meta(description=meaning, title=kind, extra={"later": later}, **limits)


@dataclass(frozen=True, kw_only=True)
class Source:
    """An entry of `[[sources]]`: files whose documents share a format and settings."""

    name: Annotated[Name, _key("default source0, source1, … by position")] = ""
    paths: Annotated[
        Strings, _key("files, patterns or URLs, relative to the recipe; ** crosses folders")
    ]
    format: Annotated[
        str,
        _key(
            "auto: by the file's suffix, as text; or jsonl, parquet, arrow, text; megatron and"
            " tokens: ids; store: a token store"
        ),
    ] = "auto"
    text_key: Annotated[
        str,
        _key(
            'the field or column that holds the text, "a.b" is b in a; of tokens, the ids: by'
            " default input_ids, or else tokens"
        ),
    ] = "text"
    messages_key: Annotated[
        Text,
        _key(
            'the field or column that holds a conversation\'s messages; "a.b" is b in a', later=True
        ),
    ] = "messages"
    tools_key: Annotated[
        Text,
        _key("the field or column that holds the tools that a conversation may call", later=True),
    ] = "tools"
    messages_format: Annotated[
        Literal["auto", "messages", "sharegpt", "prompt_completion", "alpaca"],
        _key(
            "what each document is; auto: a text where there is one, else what its fields show",
            later=True,
        ),
    ] = "auto"
    repeat: Annotated[
        float,
        _key(
            "uses of each document; each use has its own order and chance; 2.5: all twice, half of"
            " them a third time",
            "a number, 1e-9 … 1000",
            ge=1e-9,
            le=1000,
        ),
    ] = 1.0
    share: (
        Annotated[
            float,
            _key(
                "instead of repeat, then in every source: share of the document tokens",
                "a number, 1e-9 … 1",
                ge=1e-9,
                le=1,
            ),
        ]
        | None
    ) = None
    sample: Annotated[
        Interval,
        _key(
            "keep the documents whose u(file, position) lies in [low, high): held-out sets without"
            " overlap"
        ),
    ] = (0.0, 1.0)
    tasks: (
        Annotated[
            Strings,
            _key(
                "which tasks its segments draw from, by name; NAME also stands for all NAME-…; all"
                " by default"
            ),
        ]
        | None
    ) = None


@dataclass(frozen=True, kw_only=True)
class DocumentKeys:
    """The keys of `[documents]`, which control how documents become segments."""

    append_eos: Annotated[
        bool | Literal["segment"],
        _key(
            "eos after the last token of each document; segment: of each segment",
            'true or false, or "segment"',
        ),
    ] = True
    prepend_bos: Annotated[bool, _key("bos before the first token of a document")] = False
    long: Annotated[
        Literal["split", "truncate", "drop", "decompose"],
        _key(
            "documents beyond a row or max_tokens; what is cut is counted; decompose, with"
            " seq_lengths: all, into pieces that fill a row, the longest first"
        ),
    ] = "split"
    max_tokens: Annotated[
        Whole, _key("the most content tokens of a segment; 0: no limit beyond the row", ge=0)
    ] = 0
    min_tokens: Annotated[Whole, _key("shorter documents are dropped, and counted", ge=1)] = 1
    special_text: Annotated[
        Literal["text", "special", "reject"],
        _key('what "<pad>" in a document\'s text is: text, the special token, a reject'),
    ] = "text"
    loss_spans: Annotated[
        Literal["use", "ignore"],
        _key("whether a document's loss_spans, messages and weight decide its loss"),
    ] = "use"
    chat_template: Annotated[
        str,
        _key("a Jinja file that makes text of messages; by default the one beside the tokenizer"),
    ] = ""
    chat_template_kwargs: (
        Annotated[
            Variables,
            _key(
                "what the chat template reads beside messages and tools; a record's own"
                " chat_template_kwargs go before it",
                later=True,
            ),
        ]
        | None
    ) = None
    template_date: Annotated[
        Date,
        _key(
            "the day that a chat template takes for today's; without one, a template that asks is"
            " refused",
            later=True,
        ),
    ] = ""
    trained_turns: Annotated[
        Literal["all", "last", "each"],
        _key(
            "of the messages that are trained: all, or the last one alone; each: all, each behind"
            " the history that the template gives it",
            later=True,
        ),
    ] = "all"
    trained_roles: Annotated[Strings, _key("whose messages are trained", later=True)] = (
        "assistant",
    )
    train_on_tool_calls: Annotated[
        bool, _key("whether messages with tool_calls are trained", later=True)
    ] = True
    train_reasoning: Annotated[
        bool,
        _key("whether the reasoning of an assistant's trained turn is trained", later=True),
    ] = True
    train_empty_reasoning: Annotated[
        bool,
        _key("whether the tags of an empty reasoning are trained", later=True),
    ] = True
    long_answers: Annotated[
        Literal["continue", "untrained"],
        _key(
            "whether the rest of an answer that was cut inside is trained, in a row without its"
            " question",
            later=True,
        ),
    ] = "continue"
    loss_weighting: Annotated[
        Literal["token", "document", "turn"],
        _key(
            "token: own weights; document, turn: scaled to sum to the document's weight",
            later=True,
        ),
    ] = "token"
    bad_documents: Annotated[
        Literal["reject", "fail"], _key("reject: counted and logged; fail: the build stops")
    ] = "reject"
    max_bad_fraction: Annotated[
        Fraction,
        _key(
            "at publication: fail if bad documents are more than this · read, and more than 100 or"
            " than a tenth of the used ones",
            "a number, 0 … 1",
        ),
    ] = 0.001

    @property
    def eos_after_document(self) -> bool:
        """Whether eos follows the last token of a document."""
        return self.append_eos is not False

    @property
    def eos_after_segment(self) -> bool:
        """Whether eos follows every segment of a document, not only its last."""
        return self.append_eos == "segment"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The keys of `[packing]`, which control how segments become rows."""

    algorithm: Annotated[
        Literal["best_fit", "first_fit", "next_fit", "concat"],
        _key(
            "next_fit keeps document order; concat cuts at row ends, only for tasks whose law is n"
            " + constant"
        ),
    ] = "best_fit"
    max_segments_per_row: Annotated[int, _key("0: 65 535, the format's limit", ge=0, le=65535)] = 0
    pad_seq_to_mult: Annotated[
        Whole,
        _key("each segment's physical length is a multiple of this; it divides seq_length", ge=1),
    ] = 1
    encoder_length: Annotated[
        Side,
        _key(
            "rows for encoder-decoder models: the most slots of a row's prefixes, the inputs; with"
            " decoder_length",
            later=True,
        ),
    ] = 0
    decoder_length: Annotated[
        Side,
        _key(
            "the most slots of what follows the prefixes, the targets; seq_length is the sum of"
            " both",
            later=True,
        ),
    ] = 0

    @property
    def sides(self) -> tuple[int, int] | None:
        """The encoder and decoder lengths, or None for rows with a single sequence."""
        return (self.encoder_length, self.decoder_length) if self.encoder_length else None


@dataclass(frozen=True, kw_only=True)
class Specials:
    """The keys of `[specials]`, which assign tokens to roles."""

    missing: Annotated[
        Literal["error", "add"],
        _key(
            "error: list unused reserved tokens and the lines to paste; add: extend the vocabulary"
        ),
    ] = "error"
    eos: Annotated[Role, _key("end of a document")] | None = None
    bos: Annotated[Role, _key("begin of a document")] | None = None
    pad: Annotated[Role, _key("padding; a tokenizer without one pads with eos")] | None = None
    mask: Annotated[Role, _key("the mask of masked and block diffusion")] | None = None
    fim_prefix: Annotated[Role, _key("fill-in-the-middle: before the prefix")] | None = None
    fim_middle: Annotated[Role, _key("fill-in-the-middle: before the middle")] | None = None
    fim_suffix: Annotated[Role, _key("fill-in-the-middle: before the suffix")] | None = None
    sentinels: Annotated[
        Sentinels,
        _key(
            'the sentinels of span corruption, "<extra_id_{}>" by default; "auto" with missing ='
            ' "add": as many as needed; ≤ 2²⁰'
        ),
    ] = None
    media: Annotated[
        Media, _key("kinds of media in texts and in parts of messages", later=True)
    ] = None
    mode_tokens: Annotated[
        Mapping[str, str | int] | None,
        Meta(
            title="a token's text or its id", extra={"given": Role}
        ),  # This applies to each key of [specials] that is not declared here.
        _key(
            'quoted, a mode token as a task writes it = the token that plays it: "[NLU]" ='
            ' "<|reserved_1|>"'
        ),
    ] = None
    vocab_size: Annotated[
        int,
        _key(
            "ceiling that no id may reach: the embedding's rows; 0: the tokenizer's",
            ge=0,
            le=2**31 - 1,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """A task of `[[tasks]]`, with presets expanded.

    `parameters` are the objective's own keys. Once the objective is known, `later` has the defaults
    of the parameters that were added later.
    """

    name: Annotated[Name, _key("default: the objective's name")] = ""
    objective: Annotated[str, _key("which objective")]
    weight: Annotated[
        float,
        _key(
            "relative probability that a segment gets this task", "a number above 0", gt=0, le=1e9
        ),
    ] = 1.0
    mode_token: (
        Annotated[str, _key("a token in front of the body that tells the task; none by default")]
        | None
    ) = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    later: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True)
class OutputKeys:
    """The keys of `[output]`, which control how shards are written."""

    shard_text_bytes: Annotated[
        Size,
        _key(
            "input text per shard; auto: 64MiB, less where few shards then split evenly over"
            " workers, more for long rows (≥ 2000 rows) and to stay under 50 000 shards, at most"
            " 512MiB; an eighth of 64MiB, and 250 rows, for conversations"
        ),
    ] = "auto"
    token_dtype: Annotated[
        Literal["auto", "uint16", "int32"], _key("auto: uint16 where every id fits")
    ] = "auto"
    columns: Annotated[
        Literal["full", "compact", "least"],
        _key(
            "compact: without what the header determines; least: x_0 of block diffusion once, too"
        ),
    ] = "full"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The whole recipe. `base` is the folder that relative paths start from."""

    seq_length: Annotated[
        int,
        _key(
            "slots per row; a multiple of 8", ge=8, le=1 << 24, extra_json_schema={"multipleOf": 8}
        ),
    ] = 4096
    seq_lengths: (
        Annotated[
            Lengths,
            _key(
                "a dataset of each of these row lengths, in DIR/seq_N, and a mixture.json: a"
                " document is in the first whose rows hold it, else most of it; with seq_length"
                " that one alone",
                later=True,
            ),
        ]
        | None
    ) = None
    seed: Annotated[Whole, _key("the seed of all chance", ge=0)] = 0
    tokenizer: Annotated[
        str, _key('a file, a directory with tokenizer.json, a Hub name, or "bytes"')
    ]
    engine: Annotated[str, _key("auto | reference | an engine's name; never changes bytes")] = (
        "auto"
    )
    total_tokens: Annotated[
        Whole,
        _key("with share: the document tokens to use; 0: as many as use no source twice", ge=0),
    ] = 0
    sources: tuple[Source, ...] = ()
    documents: DocumentKeys = field(default_factory=DocumentKeys)
    packing: Packing = field(default_factory=Packing)
    specials: Specials = field(default_factory=Specials)
    tasks: tuple[TaskEntry, ...] = ()
    output: OutputKeys = field(default_factory=OutputKeys)
    base: Path = Path()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The row lengths of all datasets that share the documents, ascending."""
        return self.seq_lengths or (self.seq_length,)

    def by_length(self) -> tuple["Recipe", ...]:
        """Return the recipe of each dataset to build.

        With seq_lengths and without seq_length, which is then 0, return a recipe per length.
        """
        return (
            (self,) if self.seq_length else tuple(replace(self, seq_length=n) for n in self.lengths)
        )

    @property
    def min_tail(self) -> int:
        """The minimum number of content tokens of a segment that is not a whole document."""
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


@dataclass(frozen=True)
class Key:
    """A key of a section, as declared above.

    Attributes:
        kind: The accepted values, in words.
        meaning: The meaning of the key.
        default: The default, or `...` if the recipe must set the key.
        given: The type of the recipe's value.
        read: Converts the recipe's value to the stored value. None stores it unchanged.
        later: Whether the key was added after datasets had been written.
    """

    kind: str
    meaning: str
    default: Any
    given: Any
    read: Callable[[Any], Any] | None
    later: bool

    def accept(self, value: Any) -> Any:
        """Return the stored value for a recipe's value.

        Raises:
            ValueError: If the value is not of this kind.
        """
        # msgspec treats a set as a list, but a set has no order.
        if isinstance(value, set | frozenset):
            raise ValueError
        value = msgspec.convert(value, self.given)
        return value if self.read is None else self.read(value)


def _keys_of(record: type) -> dict[str, Key]:
    hints, found = get_type_hints(record, include_extras=True), {}
    for f in fields(record):
        hint = hints[f.name]
        # a union with None, which a recipe cannot contain
        if get_origin(hint) in (Union, UnionType):
            hint = get_args(hint)[0]
        metas = getattr(hint, "__metadata__", ())
        if metas:
            extra = {name: value for meta in metas for name, value in (meta.extra or {}).items()}
            kind = next((meta.title for meta in metas if meta.title), None) or _kind_of(
                hint.__origin__, metas
            )
            default = ... if f.default is MISSING else f.default
            found[f.name] = Key(
                kind,
                metas[-1].description,
                default,
                extra.get("given", hint),
                extra.get("read"),
                extra["later"],
            )
    return found


def _kind_of(value: Any, metas: Sequence[Meta]) -> str:
    """Describe the values of a type with limits, in words."""
    if value is int:
        low = next(meta.ge for meta in metas if meta.ge is not None)
        high = next(meta.le for meta in metas if meta.le is not None)
        return f"a whole number, {low}{' or more' if high == _LARGEST else f' … {high}'}"
    return {bool: "true or false", str: "a text"}.get(value) or " | ".join(get_args(value))


KEYS: dict[str, dict[str, Key]] = {
    section: _keys_of(record) for section, record in SECTIONS.items()
}
"""Maps section → name → key."""
LATER: Later = {
    section: {name: key.default for name, key in keys.items() if key.later}
    for section, keys in KEYS.items()
}
"""Maps section → the defaults of the keys that were added later."""
