"""Warn about fields of records that say what a model reads or trains, but that are not read.

The fields of a conversation are those that other tools read, or that datasets use instead of
`system` and `chat_template_kwargs`. The fields of token ids are lists that may be masks, and lists
that divide a row into documents.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from packprep.messages import NEAREST, listed, say
from packprep.recipe import Source
from packprep.sources.formats import FORMATS
from packprep.sources.formats.fields import Fields, field_at
from packprep.sources.formats.token_masks import MASKS
from packprep.sources.formats.token_rows import COLUMNS
from packprep.sources.passes import Passes

UNREAD_FIELDS = (
    *("label", "kto_tag", "chosen", "rejected", "rejected_response", "mask"),
    *("system_prompt", "system_message", "enable_thinking", "reasoning_effort", "reasoning"),
    *("thinking", "documents"),
)
"""Names of fields next to messages, or next to a prompt and an answer."""
_MASK = re.compile("mask|label|weight")
_DIVIDING = {
    *("position_ids", "seq_lengths", "sequence_lengths", "seq_lens", "cu_seqlens", "cu_seq_lens"),
    *("seq_idx", "segment_ids", "sequence_ids"),
}
_READ = {*COLUMNS, *MASKS, "weight"}
_MOST_LINES = 200


class UnreadFields:
    """Counts the unread fields of the inspected records of a source."""

    def __init__(self, source: Source):
        self.records = 0
        self.fields: Counter[str] = Counter()  # field → inspected records with a value
        self.columns: dict[str, None] = {}  # unread columns of tables
        self._source = source
        self._fields = Fields.of(source)
        passes = Passes.of(source, 0)
        used_keys = [source.messages_key, source.tools_key, source.text_key]
        used_keys += passes.fields if passes else ()
        self._used = {name for key in used_keys for name in (key, key.split(".")[0])}

    def add_lines(self, format: str, lines: Sequence[bytes]) -> None:
        """Count the fields of JSON lines of a format."""
        for line in islice(filter(bytes.strip, lines), _MOST_LINES):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                self.records += 1
                self.fields.update(self._unread(format, record))

    def add_columns(self, format: str, names: Sequence[str]) -> None:
        """Note the unread columns of a table of a format."""
        value = [0, 0, 1] if FORMATS[format].holds == "tokens" else "x"
        record = dict.fromkeys(names, value)
        self.columns |= dict.fromkeys(self._unread(format, record))

    def _unread(self, format: str, record: Mapping[str, Any]) -> list[str]:
        """Return the unread fields of a record."""
        if FORMATS[format].holds == "tokens":
            found = [key for key, value in record.items() if _affects_tokens(key, value)]
        else:
            found = self._beside_messages(record)
        return [key for key in found if key not in self._used]

    def _beside_messages(self, record: Mapping[str, Any]) -> list[str]:
        """Return the unread fields of a record with a layout.

        If the record also has a text, only the text is read. The layout's fields are then unread.
        """
        fields, text_key = self._fields, self._source.text_key
        value_of = partial(_value, record, text_key)
        has_text = fields.format == "auto" and field_at(record, text_key) is not None
        layout, beside_text = (fields.layout_of(value_of, own) for own in (has_text, False))
        if layout is None and has_text and beside_text and not beside_text.advice:
            return list(beside_text.needs)
        if layout is None or layout.advice:
            return []
        read = {*layout.needs, *layout.may_have}
        return [
            key
            for key in UNREAD_FIELDS
            if key not in read and record.get(key) not in (None, "", [], {})
        ]

    def report(self) -> None:
        """Print a warning with the counts, if there are unread fields."""
        ordered = sorted(self.fields.items(), key=lambda item: (-item[1], item[0]))
        parts = [
            f"{ascii(key[:40])} ({n:,} of {self.records:,} inspected records)" for key, n in ordered
        ]
        parts += [f"{ascii(key[:40])} (a column)" for key in sorted(self.columns)]
        if parts:
            say(
                f"warning: source {self._source.name!r}: fields that may affect training are not"
                f" read: {listed(parts, NEAREST)}. Write them as docs/records.md describes, or"
                " remove them"
            )


def _value(record: Mapping[str, Any], text_key: str, key: str) -> Any:
    return None if key == text_key else field_at(record, key)


def _affects_tokens(key: str, value: Any) -> bool:
    """Return whether a list next to token ids may be a mask, or may divide the ids."""
    if key in _READ or not isinstance(value, list):
        return False
    if key == "position_ids":
        return value.count(0) > 1
    if key in _DIVIDING:
        return len({*map(str, value)}) > 1 or (len(value) > 1 and "len" in key)
    return bool(_MASK.search(key.lower()))
