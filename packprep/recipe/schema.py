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

# A shard stores the indices of a segment's source and task in 16 bits each. The task too_short,
# which a recipe does not list, needs an index too.
MOST = {"sources": 65_535, "tasks": 65_535}
MOST_DRAWS = 1 << 22  # Maximum number of (source, task) pairs. Each pair has a threshold.
MOST_SENTINELS = 1 << 20
_LARGEST = 2**63 - 1  # the largest integer in TOML
_MOST_BYTES = 2**62 - 1  # A plan stores sizes below 2**62 only.


# The msgspec types of recipe values follow. A `title` describes the accepted values in words. If
# the stored value has another type than the recipe's value, `given` is the type in the recipe.
# `read` converts the recipe's value to the stored value, or raises ValueError.


def parse_size(value: int | str) -> int:
    """Return the number of bytes that a size such as 1048576, "1MiB" or "64 MB" names.

    Raises:
        ValueError: If the value is not a size, or is 4 EiB or more.
    """
    if type(value) is int and 0 < value <= _MOST_BYTES:
        return value
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if type(value) is str else None
    )
    if not match or match[2].upper() not in _UNITS:
        raise ValueError
    size = float(match[1]) * _UNITS[match[2].upper()]
    if not 0 < size <= _MOST_BYTES:
        raise ValueError
    return max(1, round(size))


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

    first: Annotated[int, Meta(description="the id of the first sentinel", ge=0, lt=1 << 31)]
    count: Annotated[int, Meta(description="the number of sentinels", ge=1, le=MOST_SENTINELS)]


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
PassCount = Annotated[
    float | str,
    Meta(
        title="a number, 1e-9 … 1000, or an expression over the fields of a record",
        extra={"given": Annotated[float, Meta(ge=1e-9, le=1000)] | Text},
    ),
]
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
        title='a size below 4 EiB such as "64MiB", or "auto"',
        extra={
            "given": (
                Annotated[int, Meta(ge=1, le=_MOST_BYTES)]
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
    """Return {kind of media: (start token, position token, end token)}, sorted by kind.

    The start token and the end token are "" if the kind has none. The order of the kinds defines
    their numbers.

    Raises:
        ValueError: If a kind is named "text", or if its position token is "" or equal to its start
            or end token.
    """
    tokens_by_kind = {
        kind: ("", slot_token, "") if isinstance(slot_token, str | int) else slot_token
        for kind, slot_token in sorted(value.items())
    }
    if "text" in tokens_by_kind or any(
        slot == "" or slot in (begin, end) for begin, slot, end in tokens_by_kind.values()
    ):
        raise ValueError
    return tokens_by_kind


_Tokens = Annotated[tuple[str | Annotated[int, Meta(ge=0)], ...], Meta(min_length=3, max_length=3)]
_Kinds = Annotated[
    dict[Annotated[Name, Meta(min_length=1)], Role | _Tokens], Meta(min_length=1, max_length=64)
]
_MEANT = 'a table: a kind and its [begin, slot, end] tokens, "" for none, or only its slot token'
Media = Annotated[Any, Meta(title=_MEANT, extra={"given": _Kinds, "read": _read_media})]


Between = Annotated[
    tuple[str | int, ...],
    Meta(
        title="a token's text or its id, or a list of them",
        extra={
            "given": str | Annotated[int, Meta(ge=0)] | tuple[Role, ...],
            "read": lambda given: given if isinstance(given, tuple) else (given,) * (given != ""),
        },
    ),
]


def _key(meaning: str, kind: str | None = None, *, later: bool = False, **limits: Any) -> Meta:
    """Return the metadata of a key: its meaning, accepted values and limits.

    Args:
        meaning: The meaning of the key.
        kind: The accepted values in words, if the type and the limits do not describe them.
        later: True for a key that was added after datasets had been written without it. Such a key
            is stored only if its value differs from the default.
        limits: Limits, as in `msgspec.Meta`.
    """
    return Meta(description=meaning, title=kind, extra={"later": later}, **limits)


@dataclass(frozen=True, kw_only=True)
class Source:
    """An entry of `[[sources]]`: files whose documents share a format and settings."""

    name: Annotated[Name, _key("default source0, source1, … by position")] = ""
    paths: Annotated[
        Strings, _key("files, patterns or URLs, relative to the recipe; ** also matches subfolders")
    ]
    format: Annotated[
        str,
        _key(
            "auto: by file suffix, otherwise text; jsonl, parquet, arrow, text; megatron,"
            " datatrove, token_stream, tokens: ids; store: a token store"
        ),
    ] = "auto"
    text_key: Annotated[
        str,
        _key(
            'the field or column of the text; "a.b" is b in a. For tokens, the ids: input_ids or'
            " tokens by default"
        ),
    ] = "text"
    token_dtype: Annotated[
        Literal["auto", "uint8", "uint16", "uint32", "uint64"],
        _key(
            "dtype of the ids in token streams without a header; auto: uint16, or in .npy the"
            " smallest dtype for the vocabulary",
            later=True,
        ),
    ] = "auto"
    messages_key: Annotated[
        Text,
        _key('the field or column of a conversation\'s messages; "a.b" is b in a', later=True),
    ] = "messages"
    tools_key: Annotated[
        Text,
        _key("the field or column of the tools that a conversation may call", later=True),
    ] = "tools"
    messages_format: Annotated[
        Literal["auto", "messages", "sharegpt", "prompt_completion", "alpaca"],
        _key(
            "the document layout; auto: a text if there is one, otherwise by its fields",
            later=True,
        ),
    ] = "auto"
    where: (
        Annotated[
            Text,
            _key(
                'a condition on the fields of a record, such as "score >= 3"; other documents are'
                " left out and counted as filtered",
                later=True,
            ),
        ]
        | None
    ) = None
    repeat: Annotated[
        PassCount,
        _key(
            "number of passes per document, each with its own order and randomness; 2.5:"
            ' all twice, half of them a third time; an expression such as "clip(score - 1, 0, 4)":'
            " by the fields of each record",
        ),
    ] = 1.0
    max_repeat: (
        Annotated[
            float,
            _key(
                "upper limit for a repeat that is an expression; necessary if no limit follows"
                " from the expression",
                "a number, 1e-9 … 1000",
                later=True,
                ge=1e-9,
                le=1000,
            ),
        ]
        | None
    ) = None
    keep: (
        Annotated[
            Strings,
            _key(
                "fields that a token store keeps, for where and repeat of datasets that are built"
                " from it; not used without a store",
                later=True,
            ),
        ]
        | None
    ) = None
    share: (
        Annotated[
            float,
            _key(
                "share of the document tokens; replaces repeat, and must then be set in every"
                " source",
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
            "keep documents with u(file, position) in [low, high); gives held-out sets without"
            " overlap"
        ),
    ] = (0.0, 1.0)
    group_by: Annotated[
        str,
        _key(
            "join neighbouring records of a file with the same value of this field to one document,"
            ' such as "repo"; "a.b" is b in a',
            later=True,
        ),
    ] = ""
    order_by: Annotated[
        str,
        _key(
            "with group_by: the field that sorts the records of a document; default: file order",
            later=True,
        ),
    ] = ""
    between: Annotated[
        Between,
        _key("with group_by: the tokens between the records of a document", later=True),
    ] = ()
    tasks: (
        Annotated[
            Strings,
            _key(
                "names of the tasks for its segments; NAME also selects all NAME-…; default: all"
                " tasks"
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
            "add eos after the last token of each document; segment: of each segment",
            'true or false, or "segment"',
        ),
    ] = True
    prepend_bos: Annotated[bool, _key("add bos before the first token of a document")] = False
    long: Annotated[
        Literal["split", "truncate", "drop", "decompose"],
        _key(
            "documents longer than a row or max_tokens; cut tokens are counted; decompose, with"
            " seq_lengths: split into chunks that fill rows, longest first"
        ),
    ] = "split"
    max_tokens: Annotated[
        Whole, _key("maximum content tokens of a segment; 0: limited only by the row", ge=0)
    ] = 0
    min_tokens: Annotated[Whole, _key("shorter documents are dropped and counted", ge=1)] = 1
    special_text: Annotated[
        Literal["text", "special", "reject"],
        _key(
            'how to read "<pad>" in a document\'s text: as text, as the special token, or as a'
            " reject"
        ),
    ] = "text"
    loss_spans: Annotated[
        Literal["use", "ignore"],
        _key("whether loss_spans, messages and weight of a document determine its loss"),
    ] = "use"
    chat_template: Annotated[
        str,
        _key(
            "a Jinja file that converts messages to text; default: the template next to the"
            " tokenizer"
        ),
    ] = ""
    chat_template_kwargs: (
        Annotated[
            Variables,
            _key(
                "other variables of the chat template; a record's own chat_template_kwargs take"
                " precedence",
                later=True,
            ),
        ]
        | None
    ) = None
    template_date: Annotated[
        Date,
        _key(
            "the date that a chat template gets as today; without it, a template that asks for"
            " the date is refused",
            later=True,
        ),
    ] = ""
    trained_turns: Annotated[
        Literal["all", "last", "each"],
        _key(
            "all: train all messages of the trained roles; last: only the last; each: all, each"
            " after its history as the template writes it",
            later=True,
        ),
    ] = "all"
    trained_roles: Annotated[Strings, _key("roles whose messages are trained", later=True)] = (
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
            "whether to train the rest of a cut answer in a row without its question",
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
        Literal["reject", "fail"], _key("reject: count and log them; fail: stop the build")
    ] = "reject"
    max_bad_fraction: Annotated[
        Fraction,
        _key(
            "fail at publication if bad documents exceed this × read, and exceed 100 or a tenth"
            " of the used documents",
            "a number, 0 … 1",
        ),
    ] = 0.001

    @property
    def eos_after_document(self) -> bool:
        """Return whether eos follows the last token of a document."""
        return self.append_eos is not False

    @property
    def eos_after_segment(self) -> bool:
        """Return whether eos follows every segment of a document, not only its last segment."""
        return self.append_eos == "segment"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The keys of `[packing]`, which control how segments become rows."""

    algorithm: Annotated[
        Literal["best_fit", "first_fit", "next_fit", "concat"],
        _key(
            "next_fit keeps document order; concat cuts at row ends, only for tasks with n +"
            " constant tokens"
        ),
    ] = "best_fit"
    max_segments_per_row: Annotated[
        int, _key("maximum segments per row; 0: 65 535, the format's limit", ge=0, le=65535)
    ] = 0
    pad_seq_to_mult: Annotated[
        Whole,
        _key(
            "round each segment's physical length up to a multiple of this; must divide seq_length",
            ge=1,
        ),
    ] = 1
    encoder_length: Annotated[
        Side,
        _key(
            "for encoder-decoder models: maximum positions of a row's prefixes (inputs);"
            " requires decoder_length",
            later=True,
        ),
    ] = 0
    decoder_length: Annotated[
        Side,
        _key(
            "maximum positions after the prefixes (targets); seq_length is the sum of both",
            later=True,
        ),
    ] = 0

    @property
    def sides(self) -> tuple[int, int] | None:
        """Return (encoder_length, decoder_length), or None if rows have a single sequence."""
        return (self.encoder_length, self.decoder_length) if self.encoder_length else None


@dataclass(frozen=True, kw_only=True)
class Specials:
    """The keys of `[specials]`, which assign a token to each special function, such as eos."""

    missing: Annotated[
        Literal["error", "add"],
        _key("error: list unused reserved tokens and lines to paste; add: extend the vocabulary"),
    ] = "error"
    eos: Annotated[Role, _key("end of a document")] | None = None
    bos: Annotated[Role, _key("start of a document")] | None = None
    pad: Annotated[Role, _key("padding; default without such a token: eos")] | None = None
    mask: Annotated[Role, _key("the mask of masked and block diffusion")] | None = None
    fim_prefix: Annotated[Role, _key("fill-in-the-middle: before the prefix")] | None = None
    fim_middle: Annotated[Role, _key("fill-in-the-middle: before the middle")] | None = None
    fim_suffix: Annotated[Role, _key("fill-in-the-middle: before the suffix")] | None = None
    sentinels: Annotated[
        Sentinels,
        _key(
            'sentinels of span corruption, default "<extra_id_{}>"; "auto" with missing = "add":'
            " as many as needed; at most 2²⁰"
        ),
    ] = None
    media: Annotated[Media, _key("kinds of media in texts and message parts", later=True)] = None
    mode_tokens: Annotated[
        Mapping[str, str | int] | None,
        Meta(
            title="a token's text or its id", extra={"given": Role}
        ),  # This applies to each key of [specials] that is not declared here.
        _key(
            'a mode token of a task, in quotes = its vocabulary token: "[NLU]" = "<|reserved_1|>"'
        ),
    ] = None
    vocab_size: Annotated[
        int,
        _key(
            "number of the embedding's rows, above all ids; 0: from the tokenizer",
            ge=0,
            le=2**31 - 1,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """A task of `[[tasks]]`, with presets expanded.

    `parameters` has the keys of this entry that belong to the objective. `later` has the defaults
    of the parameters that were added later. It is filled when the objective is looked up.
    """

    name: Annotated[Name, _key("default: the objective's name")] = ""
    objective: Annotated[str, _key("the objective's name")]
    weight: Annotated[
        float,
        _key(
            "relative probability that a segment gets this task", "a number above 0", gt=0, le=1e9
        ),
    ] = 1.0
    mode_token: (
        Annotated[str, _key("a mode token before the body that identifies the task; default: none")]
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
            "input text per shard; auto: 64MiB, less to split few shards evenly over workers,"
            " more for long rows (≥ 2000 rows) and to stay under 50 000 shards, at most 512MiB;"
            " an eighth of 64MiB, and 250 rows, for conversations"
        ),
    ] = "auto"
    token_dtype: Annotated[
        Literal["auto", "uint16", "int32"], _key("auto: uint16 where every id fits")
    ] = "auto"
    columns: Annotated[
        Literal["full", "compact", "least"],
        _key(
            "compact: omit what the header determines; least: also store x_0 of block diffusion"
            " only once"
        ),
    ] = "full"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The whole recipe. `base` is the folder that relative paths start from."""

    seq_length: Annotated[
        int,
        _key(
            "positions per row; a multiple of 8",
            ge=8,
            le=1 << 24,
            extra_json_schema={"multipleOf": 8},
        ),
    ] = 4096
    seq_lengths: (
        Annotated[
            Lengths,
            _key(
                "write a dataset per row length, in DIR/seq_N, and a mixture.json. Each document"
                " goes to the first dataset whose rows fit it, otherwise most of it. With"
                " seq_length, only that dataset is written",
                later=True,
            ),
        ]
        | None
    ) = None
    seed: Annotated[Whole, _key("random seed", ge=0)] = 0
    tokenizer: Annotated[
        str, _key('a file, a directory with tokenizer.json, a Hub name, or "bytes"')
    ]
    engine: Annotated[
        str, _key("auto | reference | an engine's name; never changes the output bytes")
    ] = "auto"
    total_tokens: Annotated[
        Whole,
        _key(
            "with share: number of document tokens to use; 0: as many as possible without"
            " repeating a source",
            ge=0,
        ),
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
        """Return the row lengths of all datasets that the recipe defines, ascending."""
        return self.seq_lengths or (self.seq_length,)

    def by_length(self) -> tuple["Recipe", ...]:
        """Return one recipe per dataset to build, each with its own seq_length.

        A recipe with a seq_length gives only itself. Otherwise each entry of seq_lengths gives a
        copy with this entry as seq_length.
        """
        return (
            (self,) if self.seq_length else tuple(replace(self, seq_length=n) for n in self.lengths)
        )

    @property
    def min_tail(self) -> int:
        """Return the minimum number of content tokens of a segment that is not a whole document."""
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
        later: True for a key that was added after datasets had been written without it.
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
            ValueError: If the key does not accept the value.
        """
        # msgspec treats a set as a list, but a set has no order.
        if isinstance(value, set | frozenset):
            raise ValueError
        value = msgspec.convert(value, self.given)
        return value if self.read is None else self.read(value)


def _keys_of(record: type) -> dict[str, Key]:
    hints, keys = get_type_hints(record, include_extras=True), {}
    for f in fields(record):
        hint = hints[f.name]
        # The type is a union with None, but a recipe cannot contain None.
        if get_origin(hint) in (Union, UnionType):
            hint = get_args(hint)[0]
        metas = getattr(hint, "__metadata__", ())
        if metas:
            # The type and the key both have metadata, and the key's come last.
            extra = {name: value for meta in metas for name, value in (meta.extra or {}).items()}
            kind = next((meta.title for meta in metas if meta.title), None) or _kind_of(
                hint.__origin__, metas
            )
            default = ... if f.default is MISSING else f.default
            keys[f.name] = Key(
                kind,
                metas[-1].description,
                default,
                extra.get("given", hint),
                extra.get("read"),
                extra["later"],
            )
    return keys


def _kind_of(value: Any, metas: Sequence[Meta]) -> str:
    """Return a description of the values that a type and its limits allow."""
    if value is int:
        low = next(meta.ge for meta in metas if meta.ge is not None)
        high = next(meta.le for meta in metas if meta.le is not None)
        return f"a whole number, {low}{' or more' if high == _LARGEST else f' … {high}'}"
    return {bool: "true or false", str: "a text"}.get(value) or " | ".join(get_args(value))


KEYS: dict[str, dict[str, Key]] = {
    section: _keys_of(record) for section, record in SECTIONS.items()
}
"""{section: {name: key}}."""
LATER: Later = {
    section: {name: key.default for name, key in keys.items() if key.later}
    for section, keys in KEYS.items()
}
"""{section: {name: default}}, for the keys that later versions added."""
