"""The form of a plan: what its keys must be before anything is computed, opened or allocated from them."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from packprep.corpus.planning import MOST_PIECES
from packprep.dataset.json_files import FORMAT, LAW_VERSION, TOKENIZER_NAME, VERSION, Later, other_law, unknown_key
from packprep.dataset.manifest import is_count, is_digest, is_id
from packprep.errors import PlanError

MOST_SHARDS = 1 << 20
"""Who asks how far a build is has a look at each."""
MOST_USES = 1 << 16
"""segment_repeat is 16-bit."""

Test = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def _is_repeat(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= MOST_USES


def _is_name(value: Any) -> bool:
    """Whether it is a relative path that stays below the folder that it is relative to."""
    return _is_text(value) and value != "" and not os.path.isabs(value) and ".." not in value.split(os.sep)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _ids_by_text(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_id, value.values()))


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_id, value))


def _counts_by_text(value: Any) -> bool:
    return isinstance(value, dict) and all(type(v) is int and 0 <= v < 1 << 31 for v in value.values())


def _is_beside(value: Any) -> bool:
    form = {"file": _is_name, "digest": is_digest, "roles": _texts}
    return isinstance(value, dict) and value.keys() == form.keys() and all(form[k](v) for k, v in value.items())


_PLAN: dict[str, Test] = {
    "format": lambda v: v == FORMAT,
    "version": lambda v: type(v) is int and v == VERSION,
    "law_version": _is_positive,
    "fingerprint": is_digest,
    "recipe": _is_object,
    "engine": lambda v: _texts(v) and {"name", "version"} <= v.keys() <= {"name", "version", "reference"},
    "made_with": _texts,
    "tokenizer": lambda v: _is_object(v) and v.keys() == {"file", "digest"} and v["file"] == TOKENIZER_NAME,
    "vocabulary": _is_object,
    "chat_template": lambda v: v is None or isinstance(v, str),
    "token_dtype": lambda v: v in ("uint16", "int32"),
    "tasks": _is_list,
    "shards": lambda v: _is_positive(v) and v <= MOST_SHARDS,
    "shard_text_bytes": _is_positive,
    "sources": _is_list,
    "files": _is_list,
    "beside_tokenizer": lambda v: v is None or (isinstance(v, list) and all(map(_is_beside, v))),
    "digest": is_digest,
}
_VOCABULARY: dict[str, Test] = {
    "vocab_size": lambda v: is_id(v) and v > 0,
    "roles": lambda v: _ids_by_text(v) and "pad" in v,
    "sentinels": _ids,
    "mode_tokens": _ids_by_text,
    "added_tokens": _is_list,
    "special_ids": _ids,
}
_SOURCE: dict[str, Test] = {
    "name": _is_text,
    "prefix": _is_text,
    "repeat": _is_repeat,
    "ratios": _counts_by_text,
    "step_bytes": lambda v: _is_positive(v) and v < 1 << 31,
    "text_bytes": is_count,
    "tokens": is_count,
    "documents": is_count,
    "relative_error": lambda v: v is None or type(v) in (int, float),
    "tokens_per_byte": lambda v: v is None or (type(v) in (int, float) and 0 < v < 1 << 31),
    "patterns": lambda v: v is None or (isinstance(v, list) and v != [] and all(map(_is_name, v))),
}
_FILE: dict[str, Test] = {
    "source": is_count,
    "name": _is_name,
    "size": is_count,
    "pieces": is_count,
    "piece_bytes": lambda v: isinstance(v, list) and all(is_count(n) and n < 1 << 47 for n in v),
}

LATER: Later = {
    "": {"beside_tokenizer": None},
    "vocabulary": {},
    "sources": {"tokens_per_byte": None, "patterns": None},
    "files": {"piece_bytes": None},
}
"""Those of the keys above that joined later."""

_RESTORE = "put the file back as it was, or begin anew in another folder"


def _check(where: str, value: Any, form: Mapping[str, Test], later: Mapping[str, Any], made_with: Any) -> None:
    if not isinstance(value, dict):
        raise PlanError(f"{where}: is no object; {_RESTORE}")
    if value.keys() - form.keys():
        raise PlanError(f"{where}: {unknown_key(min(value.keys() - form.keys()), made_with)}")
    if missing := form.keys() - value.keys() - later.keys():
        raise PlanError(f"{where}: key {min(missing)!r} is missing; {_RESTORE}")
    for key, good in form.items():
        if key in value and not good(value[key]):
            raise PlanError(f"{where}: {key} is {value[key]!r:.200}, which no plan has; {_RESTORE}")


def check_plan(plan: Any, where: str) -> None:
    """PlanError unless a value has the form of a plan; its recipe and tasks are for those who read them to check."""
    made_with, law = plan.get("made_with"), plan.get("law_version")
    if type(law) is int and law > LAW_VERSION:
        raise PlanError(f"{where} has {other_law(law, made_with)}")
    _check(where, plan, _PLAN, LATER[""], made_with)
    _check(f"{where}: vocabulary", plan["vocabulary"], _VOCABULARY, LATER["vocabulary"], made_with)
    vocabulary = plan["vocabulary"]
    listed = [*vocabulary["roles"].values(), *vocabulary["sentinels"], *vocabulary["mode_tokens"].values()]
    if max([*listed, *vocabulary["special_ids"]]) >= vocabulary["vocab_size"]:
        raise PlanError(f"{where}: vocabulary: an id is not below vocab_size {vocabulary['vocab_size']}; {_RESTORE}")
    if plan["token_dtype"] == "uint16" and vocabulary["vocab_size"] > 1 << 16:
        raise PlanError(f"{where}: vocab_size {vocabulary['vocab_size']} does not fit token_dtype uint16; {_RESTORE}")
    for i, source in enumerate(plan["sources"]):
        _check(f"{where}: sources[{i}]", source, _SOURCE, LATER["sources"], made_with)
    for i, file in enumerate(plan["files"]):
        _check(f"{where}: files[{i}]", file, _FILE, LATER["files"], made_with)
        if "piece_bytes" in file and len(file["piece_bytes"]) != file["pieces"]:
            raise PlanError(f"{where}: files[{i}]: piece_bytes are not of its {file['pieces']} pieces; {_RESTORE}")
        if not (plan["files"][i - 1]["source"] if i else 0) <= file["source"] < len(plan["sources"]):
            raise PlanError(f"{where}: files[{i}]: source {file['source']} is none, or out of order; {_RESTORE}")
    if sum(file["pieces"] for file in plan["files"]) > MOST_PIECES:
        raise PlanError(f"{where}: files: more than {MOST_PIECES} pieces, which no corpus has; {_RESTORE}")
