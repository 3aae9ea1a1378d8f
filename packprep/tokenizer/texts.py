"""Decode token ids into pieces of text, or into bytes, exactly as the tokenizer.json defines.

```
ids     99 97 102 195 169 266            of the built-in vocabulary of bytes
pieces  c  a  f   é       <extra_id_0>
bytes   63 61 66  c3  a9  "<extra_id_0>"
```
A piece is one token, or several tokens that share a character. The bytes of a special token are its
own text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.manifest import Manifest
from packprep.errors import DatasetError
from packprep.format import read_file
from packprep.format.digests import digest_of
from packprep.tokenizer.file import bytes_tokenizer_json, outline_of, steps_of, tokens_in_file

MOST_CHARACTERS = 1 << 16
"""Maximum number of characters that a decoder may make of a token.

A "Replace" step that may exceed this limit is skipped.
"""
TEXT, SPECIAL, BYTES = "text", "special", "bytes"


class TextPiece(NamedTuple):
    """A token, or consecutive tokens that share a character and can only be shown together.

    Attributes:
        text: For the kind TEXT, the decoded text. For SPECIAL, the text of the special token. For
            BYTES, escaped bytes such as "\\xe2\\x82", because the bytes are not valid UTF-8.
        ids: The token ids.
        kind: TEXT, SPECIAL or BYTES.
    """

    text: str
    ids: list[int]
    kind: str


class TokenTexts:
    """The text that each token of a tokenizer.json has in the middle of a document.

    At the start of a document, a decoder trims a space from the text of the first token. These
    texts keep that space.

    `tokens` maps each id that will be requested to its token as written in the tokenizer.json.
    Without `tokens`, all tokens are read from the file.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        special_ids: Iterable[int] = (),
        tokens: Mapping[int, str] | None = None,
    ):
        outline = outline_of(tokenizer_json)
        added = outline.added_tokens or []
        self._texts = (
            tokens_in_file(tokenizer_json, "tokenizer.json").texts if tokens is None else tokens
        )
        self._added = {entry["id"]: entry["content"] for entry in added}
        self._special = {entry["id"] for entry in added if entry.get("special")} | set(special_ids)
        # `tokenizers` also accepts a step without a type. Such a step has no effect here.
        self._steps = [step for step in steps_of(outline.decoder, "decoders") if "type" in step]
        kinds = {step["type"] for step in self._steps}
        steps_before = [
            *steps_of(outline.normalizer, "normalizers"),
            *steps_of(outline.pre_tokenizer, "pretokenizers"),
        ]
        self._space_prepended = any(step.get("type") == "Prepend" for step in steps_before)
        self._space_added = "WordPiece" in kinds or any(
            step.get("prepend_scheme", "never") != "never" or step.get("add_prefix_space")
            for step in steps_before
        )
        # The built-in vocabulary defines the characters of all byte-level vocabularies.
        alphabet = (
            json.loads(bytes_tokenizer_json())["model"]["vocab"] if "ByteLevel" in kinds else {}
        )
        self._byte_of: dict[str, int] = alphabet
        self._byte_fallback = "ByteFallback" in kinds
        self._known: dict[int, str | bytes] = {}

    def meaning(self, id: int) -> str | bytes:
        """Return the bytes of an ordinary token, or the text of a special token.

        The bytes may end inside a character. Return "#" and the id for an unknown id.
        """
        if id not in self._known:
            text = self._added.get(id, self._texts.get(id))
            if text is None:
                self._known[id] = f"#{id}"
            else:
                self._known[id] = text if id in self._special else self._bytes_of(id, text)
        return self._known[id]

    def _bytes_of(self, id: int, token: str) -> bytes:
        if id in self._added:
            return token.encode()
        if self._byte_of and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        if (
            self._byte_fallback
            and len(token) == 6
            and token.startswith("<0x")
            and token.endswith(">")
        ):
            return int(token[3:5], 16).to_bytes()
        for step in self._steps:
            token = _decoded(step, token)
        return token.encode()

    def pieces(self, ids: Iterable[int]) -> list[TextPiece]:
        """Split ids into pieces, in order. Every id is in exactly one piece."""
        text_pieces: list[TextPiece] = []
        run: list[int] = []  # the tokens of an unfinished character
        pending = b""
        for id in map(int, ids):
            meaning = self.meaning(id)
            if isinstance(meaning, str):
                # A special token ends an unfinished character, whose tokens are then shown as
                # bytes.
                text_pieces += map(self._alone, run)
                run, pending = [], b""
                text_pieces.append(TextPiece(meaning, [id], SPECIAL))
                continue
            state = _state(pending + meaning)
            # This token does not continue the character before it, so it is judged by itself.
            if state == "broken" and run:
                text_pieces += map(self._alone, run)
                run, pending = [], b""
                state = _state(meaning)
            if state == "open":
                run.append(id)
                pending += meaning
            elif state == "broken":
                text_pieces.append(self._alone(id))
            else:
                text_pieces.append(TextPiece((pending + meaning).decode(), [*run, id], TEXT))
                run, pending = [], b""
        return text_pieces + [self._alone(id) for id in run]

    def without_added_space(self, text: str) -> str:
        """Return the decoded start of a document without the space that the tokenizer added.

        Encoding the result gives the same ids as encoding the document.
        """
        # Only Prepend adds a space before another space.
        alone = text.startswith(" ") and not text.startswith("  ")
        return (
            text[1:]
            if alone and self._space_added or text.startswith(" ") and self._space_prepended
            else text
        )

    def one_by_one(self, ids: Sequence[int]) -> list[TextPiece]:
        """Return a separate piece for each id."""
        return [piece for id in ids for piece in self.pieces([id])]

    def _alone(self, id: int) -> TextPiece:
        data = self.meaning(id)
        assert isinstance(data, bytes)
        return TextPiece(data.decode("utf-8", "backslashreplace"), [id], BYTES)


def _state(data: bytes) -> str:
    """Return "whole" for valid UTF-8 and "open" if only the last character is incomplete.

    Return "broken" for other bytes.
    """
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return "open" if error.reason == "unexpected end of data" else "broken"
    return "whole"


def _decoded(step: dict[str, Any], token: str) -> str:
    """Return the output of one decoder step for a token in the middle of a text.

    Steps that only trim the ends of a text do nothing.
    """
    if step["type"] == "Metaspace":
        return token.replace(step.get("replacement", "▁"), " ")
    if step["type"] == "Replace" and "String" in step["pattern"]:
        old, new = step["pattern"]["String"], step["content"]
        return token.replace(old, new) if token.count(old) * len(new) <= MOST_CHARACTERS else token
    if step["type"] == "WordPiece":
        return (
            token.removeprefix(step["prefix"]) if token.startswith(step["prefix"]) else f" {token}"
        )
    if step["type"] == "BPEDecoder":
        return token.replace(step["suffix"], " ") if step["suffix"] else token
    return token


class ByteTable:
    """A table with the bytes of each token of a vocabulary, for fast decoding.

    The bytes of a special token are its own text.
    """

    def __init__(self, texts: TokenTexts, vocab_size: int):
        means = [texts.meaning(id) for id in range(vocab_size)]
        data = [mean.encode() if isinstance(mean, str) else mean for mean in means]
        self.size = vocab_size
        self._sizes = np.array([len(token_bytes) for token_bytes in data], np.int32)
        self._begins = np.concatenate((np.zeros(1, np.int64), np.cumsum(self._sizes)[:-1]))
        self._bytes = np.frombuffer(b"".join(data), np.uint8)

    def decode(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated bytes of ids, uint8[n], and offsets, int64[len(ids) + 1]."""
        sizes = self._sizes[ids]
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        byte_indices = np.repeat(self._begins[ids] - offsets[:-1], sizes)
        byte_indices += np.arange(len(byte_indices))
        return self._bytes[byte_indices], offsets


def texts_of_dataset(directory: Path, manifest: Manifest) -> TokenTexts:
    """Return a `TokenTexts` for the tokenizer of the dataset in `directory`.

    Raises:
        DatasetError: If the tokenizer file is missing, or its digest is not the manifest's.
    """
    path = directory / manifest["tokenizer"]["file"]
    try:
        data = read_file(path)
    except OSError as error:
        raise DatasetError(
            f"{path}: {error.strerror}. Rows cannot be decoded without it\nhint: restore the file"
        ) from None
    actual_digest, digest = digest_of(data), manifest["tokenizer"]["digest"]
    if actual_digest != digest:
        raise DatasetError(
            f"{path}: its digest is {actual_digest}, but the manifest has {digest}\n"
            "hint: restore the right file"
        )
    roles = manifest["specials"].values()
    return TokenTexts(
        data, [id for ids in roles for id in (ids if isinstance(ids, list) else [ids])]
    )
