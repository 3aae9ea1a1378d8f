"""Audit a packed dataset, and describe the result as values and as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packprep.audit.checks import LEAST_COMPARED, MOST_UNFINISHED, Audit, Place
from packprep.audit.copies import HashTable
from packprep.audit.kinds import KINDS
from packprep.audit.markup import Search, chat_specials, prompt_search, reasoning_search
from packprep.audit.readers import open_packed
from packprep.audit.rows import NEXT, SAME, Choices, PackedData
from packprep.audit.source_documents import compare_source, plan_source
from packprep.audit.special_ids import ChosenIds, read_vocabulary
from packprep.building.plan import Plan
from packprep.conversations.chat_template import find_template
from packprep.errors import RecipeError, SourceError
from packprep.inspection.terminal import DIM, Page, page
from packprep.messages import counted, visible
from packprep.tokenizer.roles import Vocabulary

FINDING, CLEAN, BELOW, UNCHECKED = "finding", "clean", "below_threshold", "not_checked"
"""States of a check. BELOW has findings, but not more than sound data have too."""


class Request(NamedTuple):
    """What to audit, and what is known about it.

    Attributes:
        path: The dataset.
        tokenizer: The tokenizer of the data, or None.
        chat_template: File of the chat template, or None for the template next to the tokenizer.
        source: Path or pattern of the documents that the data should contain, or None.
        special_ids: Name among eos, bos, pad, unk and vocab_size → id.
        choices: How to read the data.
        limits: Kind → the share that it must not exceed.
    """

    path: Path
    tokenizer: str | None = None
    chat_template: str | None = None
    source: str | None = None
    special_ids: Mapping[str, int] = {}
    choices: Choices = Choices()
    limits: Mapping[str, float] = {}


def describe_audit(request: Request) -> dict[str, Any]:
    """Audit a packed dataset.

    Returns:
        JSON-compatible values: the format, the counts, the ids with their places, one entry of
        `checks` per kind, and `failed`, the kinds that exceed their limits.

    Raises:
        RecipeError: If an option lacks another one, or a limit names an unknown kind.
        SourceError: If the data cannot be read.
        VocabularyError: If the tokenizer cannot be read.
    """
    _check(request)
    try:
        return _audited(request)
    except SourceError as error:
        message, _, hint = str(error).partition("\nhint: ")
        # The readers of sources also serve builds, so their hints may be about a recipe.
        hint = "fetch the data again, or write them again" if "recipe" in hint else hint
        raise SourceError(f"{message}\nhint: {hint}" if hint else message) from None


def _audited(request: Request) -> dict[str, Any]:
    """Audit the data of a request; see `describe_audit`."""
    data = open_packed(request.path, request.choices)
    # The user's tokenizer wins over a tokenizer that is stored with the data.
    tokenizer = request.tokenizer or data.tokenizer
    vocabulary = None if tokenizer is None else read_vocabulary(tokenizer)
    chosen = ChosenIds(request.special_ids, data.special_ids, vocabulary)
    template = _template(request, data)
    searches, reasons = _searches(request, data, vocabulary, template)
    source = heads = None
    if request.source is not None:
        assert request.tokenizer is not None  # `_check` refuses a source without it.
        source = plan_source(request.source, request.tokenizer, request.chat_template or "")
        heads = HashTable()
    chat = None
    if template is not None and vocabulary is not None:
        chat = chat_specials(template, vocabulary, chosen.ids.eos, chosen.ids.bos)
    # In chats, eos may end each turn. It then ends documents only if the user says so.
    ends = chat is None or not chat.inner_eos or "eos" in request.special_ids
    audit = Audit(data, chosen.ids, searches, heads, ends)
    # A reason of the data wins over a missing option, because the option would not help.
    audit.unchecked = reasons | audit.unchecked
    notes = [*data.notes, *chosen.notes]
    if chat is not None:
        audit.end, audit.after_end = chat.end, chat.after_end
        reason = "the chat template writes {} more than once per conversation"
        if chat.inner_eos:
            audit.unchecked.setdefault("inner_eos", reason.format("eos"))
        if chat.several_bos:
            audit.unchecked.setdefault("two_bos", reason.format("bos"))
    audit.add_all()
    if not audit.tokens:
        raise SourceError(f"{request.path}: the data have no tokens\nhint: write them again")
    audit.finish()
    wholes = {"tokens": audit.tokens, "documents": audit.documents, "rows": audit.rows}
    if source is not None and audit.has_documents:
        wholes["source documents"] = _look_up_source(source, audit, notes)
    checks = [_described(kind, audit, wholes, request.limits) for kind in KINDS]
    return {
        "path": str(request.path),
        "format": data.format,
        "columns": dict(data.columns),
        "tokens": audit.tokens,
        "rows": audit.rows if data.has_rows else None,
        "documents": audit.documents if audit.has_documents else None,
        "documents_from": _origin_of_documents(audit, data),
        "labels": _origin_of_labels(audit, data),
        "ids": audit.ids,
        "special_ids": {
            name: {"id": id, "from": place} for name, (id, place) in chosen.places.items()
        },
        "lengths": _lengths(audit),
        "trained_tokens": audit.loss_tokens if _has_loss(data) else None,
        "checks": checks,
        "failed": [check["kind"] for check in checks if check["failed"]],
        "notes": [*notes, *_notes(audit)],
    }


def _look_up_source(source: Plan, audit: Audit, notes: list[str]) -> int:
    """Count the documents of --source that the data lack, and return the number of documents."""
    assert audit.heads is not None
    comparison = compare_source(source, audit.special, audit.of_documents, audit.heads)
    for kind, count, places in (
        ("missing_documents", comparison.missing, comparison.missing_places),
        ("cut_documents", comparison.cut, comparison.cut_places),
    ):
        audit.tallies[kind].count = count
        audit.tallies[kind].places = [Place(-1, -1, place) for place in places]
    if comparison.rejected:
        notes.append(
            f"{counted(comparison.rejected, 'document')} of the source cannot be tokenized and were"
            " not looked up"
        )
    return comparison.documents


def _check(request: Request) -> None:
    """Check the options.

    Raises:
        RecipeError: If an option lacks another one or its file, or a limit names an unknown kind.
    """
    for option, value in (
        ("--source", request.source),
        ("--chat-template", request.chat_template),
    ):
        if value is not None and request.tokenizer is None:
            raise RecipeError(f"{option} needs --tokenizer\nhint: give the tokenizer of the data")
    template = request.chat_template
    if template is not None and not Path(template).is_file():
        raise RecipeError(f"--chat-template {template}: no such file\nhint: give a Jinja file")
    for kind in request.limits:
        if kind not in KINDS:
            raise RecipeError(
                f"--fail-on {kind}: no such kind\nhint: the kinds are {', '.join(KINDS)}"
            )


def _template(request: Request, data: PackedData) -> str | None:
    """Return the text of the chat template, or None."""
    if request.tokenizer is None:
        return data.chat_template
    name = "" if request.chat_template is None else str(Path(request.chat_template).resolve())
    return find_template(name, Path.cwd(), request.tokenizer)


def _searches(
    request: Request, data: PackedData, vocabulary: Vocabulary | None, template: str | None
) -> tuple[dict[str, Search], dict[str, str]]:
    """Return the searches in texts, and the reasons for absent ones."""
    reasons = {}
    if request.source is None:
        reasons = dict.fromkeys(("missing_documents", "cut_documents"), "no --source is given")
    if vocabulary is None:
        needed = dict.fromkeys(("trained_prompts", "empty_reasoning"), "no --tokenizer is given")
        return {}, reasons | needed
    if not _has_loss(data):
        return {}, reasons
    results: dict[str, Search | str] = {
        "trained_prompts": "no chat template is known. Give --chat-template"
        if template is None
        else prompt_search(template, vocabulary),
        "empty_reasoning": reasoning_search(vocabulary),
    }
    searches = {kind: search for kind, search in results.items() if not isinstance(search, str)}
    return searches, reasons | {k: v for k, v in results.items() if isinstance(v, str)}


def _has_loss(data: PackedData) -> bool:
    return "labels" in data.columns or "trained" in data.columns


def _origin_of_documents(audit: Audit, data: PackedData) -> str | None:
    """Return where the boundaries of documents come from."""
    if audit.by_eos:
        return "eos"
    return data.columns.get("segments") or data.columns.get("document_starts")


def _origin_of_labels(audit: Audit, data: PackedData) -> dict[str, Any] | None:
    """Return the alignment of labels, and whether it was detected."""
    if not _has_loss(data) or audit.labels_at is None:
        return None
    return {"predict": audit.labels_at, "detected": data.labels_at is None}


def _lengths(audit: Audit) -> dict[str, Any]:
    lengths = {"documents": audit.document_lengths if audit.has_documents else None}
    if audit.data.has_rows:
        lengths["rows"] = audit.row_lengths
        lengths["documents_per_row"] = audit.per_row if audit.has_documents else None
    return {
        name: statistics.described()
        for name, statistics in lengths.items()
        if statistics is not None
    }


def _notes(audit: Audit) -> list[str]:
    """Return sentences about how the checks were made."""
    notes = []
    if audit.special.eos >= 0 and not audit.eos_tokens:
        notes.append(f"no document has eos {audit.special.eos}, so the data may have another eos")
    if audit.labels_seem == NEXT and audit.labels_at == SAME:
        notes.append(
            "the labels equal the next token, so they are already shifted. Transformers shifts them"
            " again. A trainer that does not shift them needs no change"
        )
    if "duplicate_documents" not in audit.unchecked:
        spilled = audit.of_documents.spilled_bytes + audit.of_rows.spilled_bytes
        storage = f"with {spilled:,} bytes in a temporary folder" if spilled else "in memory"
        notes.append(f"copies were counted exactly, by hashes of 128 bits, {storage}")
    if audit.uncompared:
        notes.append(
            f"{counted(audit.uncompared, 'document')} of less than {LEAST_COMPARED} tokens were not"
            " compared, because short texts repeat"
        )
    if audit.cut_at_end:
        notes.append(
            "documents without eos at the end of a full row, which may have cut them:"
            f" {audit.cut_at_end:,}"
        )
    if audit.divided:
        notes.append(
            f"{counted(audit.divided, 'document')} of more than {MOST_UNFINISHED:,} tokens were"
            " divided for the audit"
        )
    return notes


def _described(
    kind: str, audit: Audit, wholes: Mapping[str, int], limits: Mapping[str, float]
) -> dict[str, Any]:
    """Return the entry of a kind in `checks`."""
    about, tally = KINDS[kind], audit.tallies[kind]
    limit = limits.get(kind)
    common = {"kind": kind, "unit": about.unit, "title": about.title, "limit": limit}
    if kind in audit.unchecked:
        # A limit that cannot be checked fails, so that a script does not pass without the check.
        why = audit.unchecked[kind]
        return {**common, "state": UNCHECKED, "why": why, "failed": limit is not None}
    total = wholes[about.unit]
    share = tally.count / total if total else 0.0
    state = CLEAN if not tally.count else FINDING if share > about.most else BELOW
    return {
        **common,
        "state": state,
        "count": tally.count,
        "of": total,
        "share": share,
        "threshold": about.most,
        "means": about.means,
        "places": [_place(place, audit.data.has_rows) for place in tally.places],
        "failed": limit is not None and share > limit,
    }


def _place(place: Place, has_rows: bool) -> dict[str, Any]:
    if place.row < 0:
        return {"document": place.detail}
    name = "row" if has_rows else "document"
    return {name: place.row, "position": place.position, "detail": place.detail}


def print_audit(described: Mapping[str, Any]) -> None:
    """Print an audit as text."""
    with page() as drawn:
        drawn.facts(facts_of(described))
        drawn.put()
        _print_checks(drawn, described["checks"])
        unchecked = [check for check in described["checks"] if check["state"] == UNCHECKED]
        if unchecked:
            drawn.put()
            drawn.put("Not checked:")
            for why, kinds in unchecked_by_reason(described["checks"]):
                drawn.wrap(f"  {', '.join(kinds)}: {why}", indent=4)
        for note in described["notes"]:
            drawn.wrap(f"note: {visible(note)}", DIM, indent=6)
        drawn.put()
        for line in verdict_of(described):
            drawn.wrap(line)


def facts_of(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) pairs about the data as a whole."""
    counts = [
        counted(described[name], name[:-1])
        for name in ("rows", "documents", "tokens")
        if described[name] is not None
    ]
    facts = [("data", described["format"]), ("content", ", ".join(counts))]
    names = {
        "rows": "row lengths",
        "documents_per_row": "documents per row",
        "documents": "document lengths",
    }
    for name, title in names.items():
        if entry := described["lengths"].get(name):
            facts.append((title, f"{entry['min']:,} … {entry['max']:,}, mean {entry['mean']:,.1f}"))
    if described["documents_from"]:
        facts.append(("documents from", described["documents_from"]))
    if labels := described["labels"]:
        meaning = {"same": "the token at their own position", "next": "the next token"}
        origin = "detected" if labels["detected"] else "defined by the format"
        facts.append(("labels", f"for {meaning[labels['predict']]} ({origin})"))
    if described["trained_tokens"] is not None and described["tokens"]:
        share = described["trained_tokens"] / described["tokens"]
        facts.append(("trained", f"{described['trained_tokens']:,} tokens, {share:.2%}"))
    ids = [
        f"{name} {entry['id']} ({entry['from']})"
        for name, entry in described["special_ids"].items()
    ]
    facts.append(("ids", "{} … {}".format(*described["ids"])))
    facts.append(
        ("special ids", ", ".join(ids) or "none known: give --tokenizer, or --eos-id and others")
    )
    return facts


def _print_checks(drawn: Page, checks: list[dict[str, Any]]) -> None:
    lines = [
        (
            check["kind"],
            STATE_WORDS[check["state"]] + (" ✗" if check["failed"] else ""),
            "".join(place_in_words(place) for place in check["places"][:1]),
            f"{check['count']:,}",
            f"{check['of']:,}",
            share_in_words(check["share"]),
        )
        for check in checks
        if check["state"] != UNCHECKED
    ]
    if lines:
        drawn.table(("kind", "result", "first place", "count", "of", "share"), lines, 3)


STATE_WORDS = {FINDING: "FOUND", CLEAN: "ok", BELOW: "ok, few", UNCHECKED: "not checked"}


def share_in_words(share: float) -> str:
    """Return a share as text, such as "0.25%" or "< 0.01%"."""
    return "< 0.01%" if 0 < share < 0.0001 else f"{share:.2%}"


def place_in_words(place: Mapping[str, Any]) -> str:
    """Return a place as text, such as "row 3, 17 (label 5 for token 6)"."""
    if "row" not in place and "position" not in place:
        return str(place["document"])
    where = f"row {place['row']:,}" if "row" in place else f"document {place['document']:,}"
    position = f":{place['position']:,}" if place["position"] else ""
    return f"{where}{position}" + (f" ({place['detail']})" if place["detail"] else "")


def unchecked_by_reason(checks: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (reason, kinds) pairs of the checks that were not possible."""
    reasons: dict[str, list[str]] = {}
    for check in checks:
        if check["state"] == UNCHECKED:
            reasons.setdefault(check["why"], []).append(check["kind"])
    return list(reasons.items())


def verdict_of(described: Mapping[str, Any]) -> list[str]:
    """Return sentences that sum up the audit."""
    findings = [check for check in described["checks"] if check["state"] == FINDING]
    lines = [f"{check['kind']}: {check['title']}. {check['means']}" for check in findings]
    checked = sum(check["state"] != UNCHECKED for check in described["checks"])
    total = f"{counted(len(findings), 'finding')} in {counted(checked, 'check')}"
    states = {check["kind"]: check["state"] for check in described["checks"]}
    for words, is_unchecked in (
        ("over the limits of", False),
        ("not checked in spite of", True),
    ):
        failed = [k for k in described["failed"] if (states[k] == UNCHECKED) == is_unchecked]
        if failed:
            total += f"; {words} --fail-on: {', '.join(failed)}"
    return [*lines, total]
