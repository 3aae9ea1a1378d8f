"""Inspect the start of a few files of a source before a plan is made.

The inspection checks that the files match their names and contain text. It finds sources that are
unusable as a whole, because of a wrong text_key or a different kind of file. A single bad document
is not an error here, because it becomes a reject. If all inspected files are unusable, an error is
raised before anything is written, so the user can correct the recipe and use the same output
folder.
"""

import codecs
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from packprep.errors import SourceError
from packprep.format import LFS_POINTER
from packprep.messages import say
from packprep.recipe import Source, as_toml
from packprep.sources.files import Files
from packprep.sources.formats import FORMATS
from packprep.sources.formats.batch import LOSS_SPANS, MEDIA, open_source
from packprep.sources.formats.compressed import decompressed
from packprep.sources.formats.fields import (
    OF_PLACE,
    UNREAD_MEDIA,
    Fields,
    Layout,
    field_at,
    instead_of_text,
    is_message,
)
from packprep.sources.formats.jsonl import BOM
from packprep.sources.formats.token_masks import MASKS
from packprep.sources.formats.token_rows import COLUMNS
from packprep.sources.unread_fields import UnreadFields
from packprep.storage import is_url

_KINDS_OF_VALUES: dict[type, str] = {
    list: "a list",
    dict: "an object",
    int: "a number",
    float: "a number",
    bool: "true or false",
}
FILES = 8
BYTES = 64 << 10
LINE_BYTES = 4 << 20
"""Maximum bytes that are read to find the end of a long first line, such as one with token ids."""
LINES = 200
_STEP_BYTES = 16 << 10
_KINDS = {
    b"PAR1": 'a Parquet file\nhint: name it .parquet, or set format = "parquet"',
    b"ARROW1": 'an Arrow file\nhint: name it .arrow, or set format = "arrow"',
    b"\x1f\x8b": "a gzip file\nhint: let its name end in .gz, as in .jsonl.gz",
    b"\x28\xb5\x2f\xfd": "a zstd file\nhint: let its name end in .zst, as in .jsonl.zst",
    b"PK\x03\x04": "a zip archive\nhint: unpack it",
    b"BZh": "a bzip2 file\nhint: decompress it, or compress it with gzip or zstd",
    b"\xfd7zXZ\x00": "an xz file\nhint: decompress it, or compress it with gzip or zstd",
    b"%PDF-": "a PDF\nhint: extract its text",
    b"SQLite format 3\x00": "an SQLite database\nhint: export its text as JSONL or Parquet",
    LFS_POINTER: (
        "a Git LFS pointer, which only refers to the file\nhint: fetch the file with git lfs pull"
    ),
}
_TABLES = (".csv", ".tsv")
_NO_TEXT = frozenset((*range(9), *range(14, 27)))
"""Control characters that do not occur in text."""
_OF_MESSAGES = {
    "role",
    "name",
    "id",
    "type",
    "tool_call_id",
    "reasoning_content",
    "thinking",
    "tool_calls",
}
"""Keys of a message other than its content."""
_OWN_FILES = (
    (
        {"law_version", "fingerprint"},
        (
            "a file of a packprep dataset, which trainers open\n"
            "hint: name the texts that it was built from"
        ),
    ),
    (
        {"reason", "source", "detail"},
        "packprep's list of rejects\nhint: name the files that were rejected",
    ),
    (
        {"model", "pre_tokenizer"},
        "a tokenizer\nhint: give it as tokenizer (--tokenizer), and give texts here",
    ),
)
"""(keys, description) pairs. A JSON object with all of the keys indicates a file of this kind."""
_MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""Byte order marks, longer ones first, because both UTF-16LE and UTF-32LE start with FF FE."""
_OTHER_KEY = (
    "set text_key (--text-key) to the key that holds the text; lists of token ids are read with"
    ' format = "tokens"'
)
IN_MESSAGES = "special_text in messages"
"""The key of _ADVICE for the reject reason `special_text` in conversations instead of texts."""
_ADVICE = {
    "missing_text": "set text_key (--text-key) to the key that holds the text",
    "not_a_string": _OTHER_KEY,
    "bad_messages": (
        "write messages with a role and a content each, or set messages_key to their key and"
        " messages_format to the layout of the documents"
    ),
    "too_large": "cut its documents",
    "bad_weight": (
        "write weights as numbers of at least 0, rename the field, or set documents.loss_spans ="
        ' "ignore" to read only the texts'
    ),
    "not_tokens": "give lists of token ids without nulls, or name their key in text_key",
    "id_out_of_range": "give the tokenizer of these ids",
    "tokenizer_error": (
        "give a tokenizer that supports any text: one with an unknown token, or of bytes"
    ),
    "template_error": "correct the chat template, or give another in documents.chat_template",
    "special_text": 'set documents.special_text = "text"',
    IN_MESSAGES: (
        'set documents.special_text = "special", which turns the text of a special token in a'
        " message into that token, as in Transformers"
    ),
    "sentinel_in_text": (
        "take these tokens out of its documents, or the tasks that write them out of its tasks"
    ),
    "untrained": 'correct its loss_spans or roles, or set documents.loss_spans = "ignore"',
    "empty": "if another key holds the text, name it as text_key (--text-key)",
    "below_min_tokens": "lower documents.min_tokens",
    "too_long": 'set documents.long = "split"',
}


def advice_on(reason: str, path: str, begin: bytes) -> str:
    """Return advice for a source whose documents are all rejected for the same reason.

    Args:
        reason: The reject reason.
        path: Path or URL of one of the files.
        begin: First bytes of this file's decompressed data.
    """
    if encoding := encoding_of(begin):
        return encoding_advice(encoding, path, begin)
    if reason == "invalid_utf8":
        if _NO_TEXT.intersection(begin):
            return "leave this binary data out of the paths, or extract its text"
        return f"if it is Latin-1, convert it: {_converted('latin1', path)}"
    if reason == "malformed_json":
        return _advice_on_lines(begin.removeprefix(BOM).lstrip())
    return _ADVICE.get(reason, "correct its documents")


def _advice_on_lines(begin: bytes) -> str:
    """Return advice for lines that are not JSON objects.

    `begin` is the start of the file. If the first line may be prose, the result also advises to
    read the file as text.
    """
    first_line, line_feed, _ = begin.partition(b"\n")
    if begin.startswith(LFS_POINTER):
        return "fetch the file with git lfs pull, since this is a Git LFS pointer"
    if not line_feed and b"\r" in begin.rstrip():
        return "separate the lines by LF, not by CR: tr '\\r' '\\n' < FILE > FILE.jsonl"
    if begin.startswith(b"{'"):
        return "write each Python dict as JSON, with json.dumps"
    if begin.startswith(b"{") and b"}{" in first_line.replace(b" ", b""):
        return "write one object per line, as with jq -c . FILE > FILE.jsonl"
    if begin[:1] in (b"<", b"{", b"[", b'"') or b"," in first_line or b"\t" in first_line:
        return 'write one JSON object per line, with the text at a key, as {"text": "…"}'
    return 'write one JSON object per line, or set format = "text" if each file is one text'


def encoding_of(begin: bytes) -> str:
    """Return the encoding that the first bytes of a file indicate, such as "UTF-16LE".

    If they indicate UTF-8 or no encoding, the result is an empty string.
    """
    marked = next((encoding for mark, encoding in _MARKS.items() if begin.startswith(mark)), "")
    even, odd = begin[:64:2], begin[1:64:2]
    if marked or len(odd) < 4:
        return marked
    return (
        "UTF-16LE"
        if not any(odd) and all(even)
        else "UTF-16BE"
        if not any(even) and all(odd)
        else ""
    )


def encoding_advice(encoding: str, path: str, begin: bytes) -> str:
    """Return advice for a file with an encoding other than UTF-8."""
    return (
        f"convert it from {encoding} (it starts with {begin[:2].hex(' ').upper()}) to UTF-8:"
        f" {_converted(encoding, path)}"
    )


def _converted(encoding: str, path: str) -> str:
    """Return a shell command that converts a file to UTF-8.

    The converted copy of `a/b.txt` is `a/utf8-b.txt`.
    """
    folder, name = os.path.split(path)
    return f"iconv -f {encoding} -t UTF-8 {path} > {os.path.join(folder, f'utf8-{name}')}"


class _Look(NamedTuple):
    """A file to inspect, with the settings of its source."""

    source: Source
    messages: bool  # whether documents may contain messages instead of a text
    template: str  # the chat template of the messages
    kinds: tuple[str, ...]  # names of the media kinds
    path: str  # path or URL of the file
    settings: dict[str, str]  # receives the recommended recipe settings, as key → value
    beyond: "_Beyond"  # counts documents with positions after the end of their text
    unread: UnreadFields  # counts fields that say something about training, but are not read

    @property
    def fields(self) -> Fields:
        """Return the source's settings for the fields of its records, without media."""
        return Fields.of(self.source)


def first_look(
    source: Source, files: Files, messages: bool, template: str = "", kinds: tuple[str, ...] = ()
) -> None:
    """Inspect at most FILES files of a source for known mistakes.

    If only some of the inspected files are faulty, the function prints a warning.

    Args:
        source: The source's settings in the recipe.
        files: The files of the source.
        messages: Whether documents may contain messages instead of a text.
        template: The chat template. If a message has no "content" but a text at another key, this
            is a mistake unless the template contains that key.
        kinds: Names of the media kinds.

    Raises:
        SourceError: If all inspected files are faulty.
    """
    # Empty files show nothing. The other files are inspected at even distances.
    filled = np.flatnonzero(files.sizes)
    chosen = filled[np.linspace(0, len(filled) - 1, min(FILES, len(filled))).astype(np.int64)]
    first_mistake, count, beyond = None, 0, _Beyond()
    unread = UnreadFields(source)
    looked_at = list(dict.fromkeys(chosen.tolist()))
    for i in looked_at:
        path, settings = os.path.join(files.root, files.names[i]), dict[str, str]()
        look = _Look(source, messages, template, kinds, path, settings, beyond, unread)
        mistake = _mistake(look, files, i)
        if not mistake and is_url(files.root):
            unread.report()
            return beyond.report(source.name)  # One file suffices, because each one needs requests.
        if mistake:
            first_mistake, count = first_mistake or (f"{path}: {mistake}", settings), count + 1
    # A build rejects single documents, so only a mistake in every file is an error.
    if first_mistake and count == len(looked_at):
        raise SourceError(f"source {source.name!r}: {first_mistake[0]}", first_mistake[1])
    beyond.report(source.name)
    unread.report()
    for i in looked_at[:1]:
        format, path = FORMATS[files.formats[i][0]], os.path.join(files.root, files.names[i])
        if format.notes and (tokenizer := format.module.tokenizer_in_notes(path)):
            # Only a person can compare this name with the tokenizer of the recipe.
            say(f"source {source.name!r}: {path} has ids of the tokenizer {tokenizer[:200]!r}")
    if first_mistake:
        say(
            f"warning: source {source.name!r}: {count} of {len(looked_at)} inspected files"
            " cannot be read as the others are. A build would reject or misread their documents,"
            f" unless they get a separate source. {first_mistake[0]}"
        )


def _mistake(look: _Look, files: Files, i: int) -> str:
    """Return a message about a mistake in the source's file `i`, with a remedy if there is one.

    Return "" if no mistake is found.
    """
    format, compression = files.formats[i]
    is_text = FORMATS[format].position == "whole"
    path = look.path
    # Such files are compared with their notes. The reader finds all other mistakes.
    if FORMATS[format].notes:
        return FORMATS[format].module.mistake_of_notes(path)
    if not (is_text or FORMATS[format].json):
        schema_of = getattr(FORMATS[format].module, "schema_of", None)
        if look.messages and schema_of is not None and not is_url(path):
            with contextlib.suppress(SourceError):  # The file's reader reports a damaged file.
                look.unread.add_columns(format, schema_of(path).names)
        return ""  # The file's reader reports a missing column.
    begin, is_whole = begin_of(path, int(files.sizes[i]), compression, has_lines=not is_text)
    # The checks go from the file to its lines, because a wrong encoding confuses later checks.
    if encoding := encoding_of(begin):
        return f"it is not UTF-8\nhint: {encoding_advice(encoding, path, begin)}"
    kind = next((kind for magic, kind in _KINDS.items() if begin.startswith(magic)), None)
    if kind:
        return f"it is read as {format}, but it is {kind}"
    if is_text:
        if look.source.format == "auto" and files.names[i].lower().endswith(_TABLES):
            return (
                "a table would be read as one document with all its rows\n"
                'hint: write it as JSONL or Parquet, or set format = "text" to read it as one'
                " document"
            )
        try:
            codecs.getincrementaldecoder("utf-8")().decode(begin, is_whole)
        except UnicodeDecodeError:
            return f"it is not UTF-8\nhint: {advice_on('invalid_utf8', path, begin)}"
        if look.source.format == "auto" and _are_objects(begin.removeprefix(BOM), is_whole):
            look.settings["format"] = "jsonl"
            return (
                "its lines are JSON objects, and would be read as one document with braces and"
                " keys\n"
                'hint: name it .jsonl or set format = "jsonl", or set format = "text" to read it'
                " as one document"
            )
        return ""
    lines = begin.removeprefix(BOM).lstrip()
    if mistake := _mistake_of_line_ends(lines):
        return mistake
    if look.messages:
        split = lines.split(b"\n")
        look.unread.add_lines(format, split if is_whole else split[:-1])
    if FORMATS[format].holds == "tokens":
        return _mistake_of_token_lines(look, lines, is_whole)
    return _mistake_of_lines(look, lines, is_whole)


def _are_objects(begin: bytes, is_whole: bool) -> bool:
    """Return whether the start of a file has at least one line and only lines with JSON objects.

    Only the first LINES lines are checked. `is_whole` says whether `begin` is the whole file.
    Otherwise, the last line may be incomplete and is not checked.
    """
    lines = [
        line
        for line in (begin.split(b"\n") if is_whole else begin.split(b"\n")[:-1])
        if line.strip()
    ][:LINES]
    try:
        return bool(lines) and all(
            line.lstrip()[:1] == b"{" and isinstance(json.loads(line), dict) for line in lines
        )
    except (ValueError, RecursionError):
        return False


def begin_of(path: str, size: int, compression: str, has_lines: bool = False) -> tuple[bytes, bool]:
    """Return (data, whole): the first bytes of a file, and whether they are the whole file.

    Compressed files are decompressed. `data` has BYTES bytes, or fewer if the file is smaller. If
    `has_lines` is True and the first line is longer than BYTES, `data` is extended until it
    contains this line, up to about LINE_BYTES.
    """

    def is_enough(data: bytes) -> bool:
        return not has_lines or b"\n" in data or len(data) >= LINE_BYTES

    if not compression:
        with open_source(path, size) as file:
            data = file.read(BYTES)
            while not is_enough(data) and len(data) < size:
                data += file.read(len(data))
            return data, size <= len(data)
    data, most_bytes = b"", BYTES
    for block in decompressed(path, size, compression, _STEP_BYTES):
        data += block.data
        while len(data) > most_bytes:
            if is_enough(data[:most_bytes]):
                return data[:most_bytes], False
            most_bytes *= 2
    return data, True


def _value(document: dict[str, Any], text_key: str, key: str) -> Any:
    return None if key == text_key else field_at(document, key)


def _values(document: dict[str, Any], depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for each key of a document that could be the recipe's `text_key`.

    For {"a": {"b": 1}}, the result is ("a.b", 1). Objects that are nested deeper than `depth` are
    yielded as values.
    """
    for key, value in document.items():
        if depth and isinstance(value, dict) and value and "." not in key:
            yield from ((f"{key}.{name}", leaf) for name, leaf in _values(value, depth - 1))
        else:
            yield key, value


def _messages_in(document: dict[str, Any]) -> dict[str, str]:
    """Find messages and tools in a document, and return the recipe settings that name their keys.

    For {"chat": {"messages": […], "tools": […]}}, the result is {"messages_key": "chat.messages",
    "tools_key": "chat.tools"}. The result is empty if the document has no messages.
    """
    for key, value in document.items():
        inner_key = next(
            (
                name
                for name in ("messages", "conversations")
                if isinstance(field_at(value, name), list)
            ),
            None,
        )
        if inner_key and "." not in key:
            tools = {"tools_key": f"{key}.tools"} if field_at(value, "tools") is not None else {}
            return {"messages_key": f"{key}.{inner_key}", **tools}
        if (
            isinstance(value, list)
            and value
            and all(isinstance(entry, dict) and is_message(entry) for entry in value)
        ):
            return {"messages_key": key}
    return {}


def _unknown_dialogue(document: dict[str, Any]) -> str:
    """Return the key of the longest list of objects in a document, or "" if there is no such list.

    Such a list is usually a conversation in an unknown form.
    """
    lists = [
        key
        for key, value in document.items()
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value)
    ]
    return max(lists, key=lambda key: len(str(document[key])), default="")


def _of_layout(layout: Layout, fields: Fields, messages: bool, looked_at: int) -> str:
    """Return a message about documents that packprep cannot read because of their layout.

    The message contains a remedy.

    Args:
        layout: The layout of the documents.
        fields: The source's settings for the fields of its records.
        messages: Whether documents may contain messages instead of a text.
        looked_at: Number of inspected documents.
    """
    if layout.advice or not messages:
        return f"its documents are not texts but {instead_of_text(layout)}"
    wanted_keys = " and ".join(repr(fields.key_of(field)) for field in layout.needs)
    return (
        f"none of its first {looked_at} documents has {wanted_keys}, which messages_format ="
        f" {layout.name!r} requires\n"
        "hint: set messages_key to the key of the messages, or messages_format to the layout of"
        " the documents"
    )


def _instead_of_content(messages: Any, template: str) -> str:
    """Find a text that the template would ignore in a message, and return the key of the text.

    Only messages without content and without tool calls are searched. The template ignores a text
    if it does not contain the text's key. If no such text is found, the result is "".
    """
    for message in messages if isinstance(messages, list) else ():
        if (
            isinstance(message, dict)
            and "role" in message
            and not message.keys() & {"content", "tool_calls"}
        ):
            for key, value in message.items():
                if (
                    isinstance(value, str)
                    and value
                    and key not in _OF_MESSAGES
                    and key not in template
                ):
                    return key
    return ""


class _Beyond:
    """Counters of documents with loss_spans or media, and of those with a position beyond the text.

    Such a position is usually a mistake: it counts bytes, but positions must count characters.
    """

    def __init__(self) -> None:
        self.documents: Counter[str] = Counter()  # field → number of documents with this field
        self.beyond: Counter[str] = Counter()  # field → number of these documents to warn about
        self.first: dict[str, str] = {}  # field → description of the first document to warn about

    def add(self, field: str, end: Any, text: str, path: str) -> None:
        """Count a document with loss_spans or media.

        The document also counts in `beyond` if `end` exceeds the text's number of characters by
        more than 1, but does not exceed its number of bytes.

        Args:
            field: Name of the field, LOSS_SPANS or MEDIA.
            end: Largest position in the field's value.
            text: Text of the document.
            path: Path or URL of the file, for messages.
        """
        size = len(text.encode())
        self.documents[field] += 1
        if isinstance(end, int | float) and len(text) + 1 < end <= size:
            self.beyond[field] += 1
            reach = (
                f"{path}: its {field} reach {end:.0f}, but its text has {len(text)} characters"
                f" ({size} bytes)"
            )
            self.first.setdefault(field, reach)

    def report(self, source: str) -> None:
        """Print a warning for each field with documents in `beyond`.

        `source` is the name of the source, for the messages.

        Raises:
            SourceError: If all documents with media are in `beyond`.
        """
        for field, count in self.beyond.items():
            name, note = ("end", ", and each begin likewise") if field == LOSS_SPANS else ("at", "")
            fate = (
                "are cut to the end of the text"
                if field == LOSS_SPANS
                else "are rejected as bad_media"
            )
            warning = (
                f"source {source!r}: {field} of {count} of {self.documents[field]} inspected"
                f" documents reach beyond their text. The first is {self.first[field]}. If"
                f" {field} count bytes, set each {name} to len(text[:{name}].decode()) of the"
                f" bytes{note}"
            )
            if field == MEDIA and count == self.documents[field]:
                raise SourceError(warning)
            say(f"warning: {warning}. Otherwise they {fate}")


def _mistake_beside_texts(lines: Sequence[bytes], look: _Look) -> str:
    """Return a message if a line has media and the recipe has no media kinds, otherwise "".

    Without media kinds, the media would be ignored. In addition, `look.beyond` counts the documents
    with loss_spans or media.
    """
    text_key, kinds = look.source.text_key, look.kinds
    # Most lines have neither field, so only lines with a field's name are decoded.
    beside = LOSS_SPANS.encode(), MEDIA.encode()
    for line in islice((line for line in lines if any(key in line for key in beside)), LINES):
        try:
            document = json.loads(line)
            text, spans, media = (
                field_at(document, text_key),
                document.get(LOSS_SPANS),
                document.get(MEDIA),
            )
            if (
                not kinds
                and text_key != MEDIA
                and media
                and all(entry.keys() >= OF_PLACE for entry in media)
            ):
                return UNREAD_MEDIA
            if spans:
                look.beyond.add(LOSS_SPANS, max(span[1] for span in spans), text, look.path)
            if media and kinds:
                look.beyond.add(MEDIA, max(entry["at"] for entry in media), text, look.path)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            continue
    return ""


def _mistake_of_line_ends(begin: bytes) -> str:
    """Return a message if a file is one JSON array, or if its objects take several lines.

    Otherwise, return "". `begin` is the start of the file.
    """
    if begin[:1] == b"[" and begin[1:].lstrip()[:1] == b"{":
        return (
            "it is one JSON array, but JSONL has one object per line\n"
            "hint: convert it, as with jq -c '.[]' FILE > FILE.jsonl"
        )
    if begin.split(b"\n", 1)[0].strip() == b"{":
        return (
            "its objects take several lines, but JSONL has one object per line\n"
            "hint: convert it, as with jq -c . FILE > FILE.jsonl"
        )
    return ""


def _mistake_of_token_lines(look: _Look, begin: bytes, is_whole: bool) -> str:
    """Return a message about a mistake in a file of token ids, or "" without a mistake.

    `begin` is the start of the file, and `is_whole` says whether it is the whole file.
    """
    lines = begin.split(b"\n")
    first_document: dict[str, Any] = {}
    kinds: Counter[str] = Counter()  # kinds of values found instead of the ids
    looked_at = malformed = 0
    text_key = look.source.text_key
    names = COLUMNS if text_key == "text" else (text_key,)
    for line in islice(filter(bytes.strip, lines if is_whole else lines[:-1]), LINES):
        document, is_counted = _object_of(line)
        looked_at += is_counted
        if document is None:
            malformed += is_counted
            continue
        first_document = first_document or document
        ids = next((document[name] for name in names if name in document), None)
        # A single list of ids shows that the key is right.
        if isinstance(ids, list):
            return ""
        kinds[_KINDS_OF_VALUES.get(type(ids), "a string")] += ids is not None
    if looked_at and malformed == looked_at:
        return (
            f"none of its first {looked_at} lines is a JSON object\n"
            f"hint: {advice_on('malformed_json', look.path, begin)}"
        )
    wanted_keys = " or ".join(map(repr, names))
    if kinds.total():
        return (
            f"in its first {looked_at} documents the value of {wanted_keys} is"
            f" {' or '.join(+kinds)}, not a list of token ids\n"
            "hint: set text_key (--text-key) to the key that holds them,"
            ' or format = "auto" for text'
        )
    # Among malformed lines, a missing key may have another cause.
    if not first_document or malformed:
        return ""
    likely = next((key for key, value in first_document.items() if _are_ids(key, value)), "")
    if likely:
        look.settings["text_key"] = likely
    example = f", as in text_key = {as_toml(likely)}" if likely else ""
    return (
        f"none of its first {looked_at} documents has the key {wanted_keys}; their keys are:"
        f" {', '.join(map(repr, list(first_document)[:20]))}\n"
        f"hint: set text_key (--text-key) to the key with the lists of token ids{example}"
    )


def _object_of(line: bytes) -> tuple[dict[str, Any] | None, bool]:
    """Return (object, is_counted) for a line. `object` is None if the line is not a JSON object.

    `is_counted` says whether the line counts in the search for mistakes. It is False for a long
    line that Python's decoder refuses. The cause may be a huge number or deep lists, which are not
    always a mistake. The build reads such a line, or rejects it with an exact reason.
    """
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None, len(line) <= BYTES
    return (document if isinstance(document, dict) else None), True


def _are_ids(key: str, value: Any) -> bool:
    """Return whether `value`, at the key `key` of a record, may be a list of token ids.

    It must be a non-empty list of integers, and `key` must not be the name of a mask.
    """
    is_list = isinstance(value, list) and bool(value) and key not in MASKS
    return is_list and all(type(entry) is int for entry in value)


class _LineCounts:
    """Counters of the mistakes in a file's first lines, up to a line with a usable document."""

    def __init__(self) -> None:
        self.looked_at = self.undecodable = self.malformed = 0
        self.first: dict[str, Any] = {}  # the first document
        self.layouts: list[Layout] = []  # layouts of documents that are neither texts nor readable
        self.instead: list[str] = []  # keys found instead of a message's content
        self.kinds: Counter[str] = Counter()  # kinds of values found instead of a text
        self.characters: Counter[str] = Counter()  # characters of texts, by key
        self.ids = 0  # number of token ids

    @property
    def is_mixed(self) -> bool:
        """Return whether one of the mistakes occurs in some of the counted lines, but not in all.

        The result is also True if no line was counted.
        """
        counts = self.undecodable, self.malformed, self.kinds.total(), len(self.instead)
        return not self.looked_at or any(0 < count < self.looked_at for count in counts)

    def add(self, line: bytes, look: _Look) -> bool:
        """Count a line and its mistake, and return whether the line contains a usable document."""
        try:
            line.decode()
        except UnicodeDecodeError:
            self.looked_at += 1
            self.undecodable += 1
            return False
        document, is_counted = _object_of(line)
        self.looked_at += is_counted
        if document is None:
            self.malformed += is_counted
            return False
        self.first = self.first or document
        return self._add_document(document, look)

    def _add_document(self, document: dict[str, Any], look: _Look) -> bool:
        text_key, fields = look.source.text_key, look.fields
        text, value = field_at(document, text_key), partial(_value, document, text_key)
        layout = fields.layout_of(value, text is not None)
        if layout:
            record = fields.of_layout(layout, None, None, value).record
            is_complete = record.keys() >= set(layout.needs)
            if layout.advice or not look.messages or not is_complete:
                self.layouts.append(layout)
            elif key := _instead_of_content(value(fields.messages_key), look.template):
                self.instead.append(key)
            else:
                return True
        if text is not None or text_key in document:
            kind = _KINDS_OF_VALUES.get(type(text))
            if kind is None and (fields.format == "auto" or not look.messages):
                return True
            if kind is not None:
                self.kinds[kind] += 1
        # Count texts and ids at all other keys, to suggest one of the keys.
        for key, value_of_key in _values(document):
            self.characters[key] += len(value_of_key) if isinstance(value_of_key, str) else 0
            is_ids = key in COLUMNS and _are_ids(key, value_of_key)
            self.ids += len(value_of_key) if is_ids else 0
        return False


def _mistake_of_lines(look: _Look, begin: bytes, is_whole: bool) -> str:
    """Return a message about a mistake in a file of texts or messages, or "" without a mistake.

    `begin` is the start of the file, and `is_whole` says whether it is the whole file.
    """
    lines, text_key = begin.split(b"\n"), look.source.text_key
    lines = lines if is_whole else lines[:-1]
    if look.messages and (mistake := _mistake_beside_texts(lines, look)):
        return mistake
    counts = _LineCounts()
    # A single usable document shows that the recipe fits the file.
    for line in islice(lines, LINES):
        if line.strip() and counts.add(line, look):
            return ""
    # Mistakes in some lines are bad documents, and not a wrong setting.
    if counts.is_mixed:
        return ""
    in_documents = f"in all of its first {counts.looked_at} documents"
    if counts.malformed:
        return (
            f"none of its first {counts.looked_at} lines is a JSON object\n"
            f"hint: {advice_on('malformed_json', look.path, begin)}"
        )
    if counts.instead:
        return (
            f"{in_documents} a message has no content, but a text at"
            f" {counts.instead[0]!r}, which would be ignored\n"
            "hint: rename that key to content, or give a chat template that reads it"
        )
    if counts.undecodable:
        return (
            f"none of its first {counts.looked_at} lines is UTF-8\n"
            f"hint: {advice_on('invalid_utf8', look.path, begin)}"
        )
    if counts.layouts and len(counts.layouts) == counts.looked_at:
        return _of_layout(counts.layouts[0], look.fields, look.messages, counts.looked_at)
    if counts.kinds:
        return (
            f"{in_documents} the value of {text_key!r} is {' or '.join(counts.kinds)}, not a text\n"
            f"hint: {_OTHER_KEY}"
        )
    keys_and_files = (text for keys, text in _OWN_FILES if keys <= counts.first.keys())
    if own_file := next(keys_and_files, ""):
        return f"it is {own_file}"
    return _mistake_of_keys(look, counts)


def _mistake_of_keys(look: _Look, counts: _LineCounts) -> str:
    """Return a message about documents without the source's text key.

    The message suggests another key or setting, which is also stored in `look.settings`.
    """
    lacks_key = (
        f"none of its first {counts.looked_at} documents has the key {look.source.text_key!r}"
    )
    if look.messages and (settings := _messages_in(counts.first)):
        look.settings.update(settings)
        advised = " and ".join(f"{key} = {as_toml(value)}" for key, value in settings.items())
        return f"{lacks_key}\nhint: set {advised}"
    characters = counts.characters
    keys = ", ".join(map(repr, list(characters)[:20])) or "none"
    likely = max(characters, key=characters.__getitem__, default="")
    # A value with fewer characters than there are ids, such as a name, is not the tokenized text.
    if counts.ids > characters[likely]:
        look.settings["format"] = "tokens"
        return (
            f"{lacks_key}; their keys are: {keys}\n"
            'hint: for these lists of token ids, set format = "tokens", and the tokenizer that'
            " made them"
        )
    dialogue = _unknown_dialogue(counts.first)
    if look.messages and dialogue and len(str(counts.first[dialogue])) > characters[likely]:
        return (
            f"{lacks_key}; their keys are: {keys}\n"
            f"hint: write the objects of {dialogue!r} as messages with a role and a content each"
        )
    example = ""
    if characters[likely]:
        look.settings["text_key"] = likely
        example = f", as in text_key = {as_toml(likely)}"
    return (
        f"{lacks_key}; their keys are: {keys}\n"
        f"hint: set text_key (--text-key) to the key that holds the text{example}"
    )
