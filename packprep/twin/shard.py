"""A shard once more: documents, segments, rows, arrays. `Twin` is a plan made ready for that."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packprep.errors import PlanError
from packprep.twin import (
    chance,
    concat,
    cutting,
    given,
    noise,
    objectives,
    packing,
    pieces,
    rows,
    supervised,
    texts,
    tokens,
)
from packprep.twin.texts import TextReader
from packprep.twin.tokens import Tokenizer, Trained

TOO_SHORT: dict[str, Any] = {"objective": "causal", "parameters": {}}


class Document(NamedTuple):
    """A token document: its source and file (their numbers in the plan), position, use, ids and what is trained."""

    source: int
    file: int
    position: int
    use: int
    tokens: list[int]
    trained: Trained | None
    file_key: int

    def place(self) -> tuple[int, int, int, int]:
        """What tells it from all others."""
        return self.source, self.file, self.position, self.use


class Segment(NamedTuple):
    """A range of a document's tokens with its task; `copy` tokens of the document's begin are repeated before it."""

    document: Document
    start: int
    n: int
    task: int
    bos: bool
    eos: bool
    copy: int
    first_trained: int | None
    key: int


class Rendered(NamedTuple):
    """A segment's slots and header."""

    slots: list[int]
    loss: list[int]
    labels: list[int]
    prefix: int
    level: float
    weight: float
    blocks: list[tuple[float, float]]  # level and weight of each
    may: list[tuple[int, int]]  # ranges of slots that may be trained


class Twin:
    """A plan as the twin reads it.

    conversation: messages → their text, as texts.TextReader. PlanError for an objective that has no twin.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        tokenizer_json: bytes,
        prefixes: Sequence[str],
        conversation: Callable[[Any], Any],
    ):
        check(plan)
        recipe, vocabulary = plan["recipe"], plan["vocabulary"]
        self.plan, self.recipe = plan, recipe
        self.shards, self.seq_length = plan["shards"], recipe["seq_length"]
        documents, self.packing = recipe["documents"], recipe["packing"]
        self.roles: dict[str, int] = vocabulary["roles"]
        special = set(vocabulary["special_ids"])
        self.ordinary = [i for i in range(vocabulary["vocab_size"]) if i not in special]
        self.vocab_size: int = vocabulary["vocab_size"]
        self.tokenizer = Tokenizer(
            tokenizer_json, vocabulary["special_ids"], documents["special_text"], plan["engine"]["name"]
        )
        self.reader = TextReader(documents["loss_spans"] == "use", conversation)
        self.tasks = [self._task(task) for task in plan["tasks"][:-1]]
        self.in_place = any(task["objective"] in objectives.IN_PLACE for task in self.tasks)
        self.with_blocks = any(task["objective"] == "block_diffusion" for task in self.tasks)
        self.cutting = {
            **{name: documents[name] for name in ("min_tokens", "max_tokens", "long", "append_eos", "prepend_bos")},
            "seq_length": self.seq_length,
            "tasks": self.tasks,
            "max_segments": self.packing["max_segments_per_row"],
            "pad": self.packing["pad_seq_to_mult"],
            "capacities": {},
        }
        self.sources = [self._source(i, prefix) for i, prefix in enumerate(prefixes)]

    def _task(self, task: Mapping[str, Any]) -> dict[str, Any]:
        parameters = {**task["parameters"], "sentinels": self.plan["vocabulary"]["sentinels"]}
        if task["objective"] == "fill_in_the_middle":
            parameters["fim"] = [self.roles[f"fim_{part}"] for part in ("prefix", "middle", "suffix")]
            parameters["inside"] = self.tokenizer.continuing()
        return {
            "name": task["name"],
            "objective": task["objective"],
            "weight": task["weight"],
            "mode": task["mode_token"],
            "parameters": parameters,
            "resolved": task["resolved"],
        }

    def _source(self, i: int, prefix: str) -> dict[str, Any]:
        given, resolved = self.recipe["sources"][i], self.plan["sources"][i]
        files = [file for file in self.plan["files"] if file["source"] == i]
        named = given["tasks"]
        allowed = {
            t
            for t, task in enumerate(self.tasks)
            if named is None or any(task["name"] == name or task["name"].startswith(name + "-") for name in named)
        }
        return {
            **{key: given[key] for key in ("name", "sample", "format", "text_key")},
            **{key: resolved[key] for key in ("repeat", "ratios", "step_bytes")},
            "seed": self.recipe["seed"],
            "prefix": prefix,
            "files": [(file["name"], file["size"], file["pieces"]) for file in files],
            "piece_bytes": {f: file["piece_bytes"] for f, file in enumerate(files) if file.get("piece_bytes")},
            "first_file": next((f for f, file in enumerate(self.plan["files"]) if file["source"] == i), 0),
            "allowed": allowed,
            "supervised": {t for t in allowed if self.tasks[t]["objective"] in supervised.OBJECTIVES},
        }


def check(plan: Mapping[str, Any]) -> None:
    """PlanError unless the twin has every objective and format of the plan."""
    known = {*objectives.NEXT_TOKEN, *objectives.IN_PLACE}
    for task in plan["tasks"]:
        if task["objective"] not in known:
            raise PlanError(
                f"task {task['name']!r}: objective {task['objective']!r} has no twin in packprep; it has "
                f"{', '.join(sorted(known))}. Verify without --twin"
            )
    for source in plan["recipe"]["sources"]:
        if source["format"] not in ("auto", "jsonl", "parquet", "arrow", "text", "megatron", "tokens"):
            raise PlanError(
                f"source {source['name']!r}: format {source['format']!r} has no twin; verify without --twin"
            )


def documents_of(twin: Twin, shard: int, places: set[tuple[int, int, int, int]] | None) -> list[Document]:
    """The documents of a shard, in its order, that can be used. places: only these (source, file, position, use); None: all."""
    found = []
    for s, source in enumerate(twin.sources):
        listed = _listed(twin, source)
        for extent in pieces.extents(source, shard, twin.shards):
            file = source["first_file"] + extent.file
            if places is not None and not any(place[:2] == (s, file) and place[3] == extent.use for place in places):
                continue

            def wanted(position: int) -> bool:
                if places is not None and (s, file, position, extent.use) not in places:  # noqa: B023
                    return False
                return pieces.is_kept(source, extent, position, listed)  # noqa: B023

            key = pieces.file_key(source, extent.file)
            for position, ids, trained in _token_documents(twin, source, extent, wanted):
                if len(ids) >= max(1, twin.cutting["min_tokens"]) and (trained is None or trained.spans):
                    found.append(Document(s, file, position, extent.use, ids, trained, key))
    return found


def _listed(twin: Twin, source: dict[str, Any]) -> pieces.Listed:
    """How the sizes of a source's documents are found, by which a part of them is chosen."""

    def listed(file: int, part: int) -> list[tuple[int, int]]:
        if pieces.format_of(source, source["files"][file][0])[0] in given.FORMATS:
            return given.sizes(source, file, part)
        return texts.sizes(source, file, part, twin.reader)

    return listed


def _token_documents(
    twin: Twin, source: dict[str, Any], extent: pieces.Extent, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int], Trained | None]]:
    """(position, content ids, what is trained) of an extent's wanted documents that are not turned away."""
    name = source["files"][extent.file][0]
    if pieces.format_of(source, name)[0] in given.FORMATS:
        forbidden = twin.tokenizer.forbidden_ids if twin.recipe["documents"]["special_text"] == "reject" else set()
        eos, bos = (
            twin.roles[role] if twin.cutting[key] else None
            for role, key in (("eos", "append_eos"), ("bos", "prepend_bos"))
        )
        for position, ids in given.documents(source, extent, wanted):
            content = given.content(ids, twin.vocab_size, forbidden, eos, bos)
            if content is not None:
                yield position, content, None
        return
    for position, text in texts.documents(source, extent, twin.reader, wanted):
        encoded = twin.tokenizer.encode(text)
        if encoded is not None:
            yield position, *encoded


def segments_of(twin: Twin, document: Document) -> list[Segment]:
    """Where a document is cut, other than by `concat`."""
    source = twin.sources[document.source]

    def key(start: int) -> int:
        return chance.segment_key(document.file_key, document.position, document.use, start)

    if document.trained is None:
        recipe = {**twin.cutting, "allowed": source["allowed"], "key": key}
        found: list[tuple] = [(*segment, 0, None) for segment in cutting.cut(len(document.tokens), recipe)]
    else:
        recipe = {**twin.cutting, "allowed": source["supervised"], "key": key}
        found = supervised.cut(len(document.tokens), document.trained, recipe)
    return [
        Segment(document, start, n, task, bool(bos), bool(eos), copy, first_trained, key(start))
        for start, n, task, bos, eos, copy, first_trained in found
    ]


def laid_out(twin: Twin, documents: Sequence[Document]) -> list[list[Segment]]:
    """The shard's rows in their order, each with its segments in theirs."""
    if twin.packing["algorithm"] == "concat":
        segments, row = _laid_end_to_end(twin, documents)
    else:
        segments = [segment for document in documents for segment in segments_of(twin, document)]
        multiple = twin.packing["pad_seq_to_mult"]
        lengths = [-(-slots_of(twin, segment) // multiple) * multiple for segment in segments]
        row, _ = packing.pack(lengths, twin.seq_length, twin.packing["algorithm"], twin.packing["max_segments_per_row"])
    keys = [segment.key for segment in segments]
    return [[segments[i] for i in members] for members in rows.ordered_rows(row, keys, twin.packing["algorithm"])]


def _laid_end_to_end(twin: Twin, documents: Sequence[Document]) -> tuple[list[Segment], list[int]]:
    keys = [_keys_of(document) for document in documents]
    segments, row = [], []
    # Each source has its own mix, and concat.lay asks for one of all: it is told by the document.
    recipe = {**twin.cutting, "keys": keys, "allowed_of": [twin.sources[d.source]["allowed"] for d in documents]}
    for d, start, n, task, bos, eos, r, _ in concat.lay([len(document.tokens) for document in documents], recipe):
        segments.append(Segment(documents[d], start, n, task, bool(bos), bool(eos), 0, None, keys[d](start)))
        row.append(r)
    return segments, row


def _keys_of(document: Document) -> Callable[[int], int]:
    return lambda start: chance.segment_key(document.file_key, document.position, document.use, start)


def facts_of(twin: Twin, segment: Segment) -> dict[str, Any]:
    """What objectives.py wants to know of a segment."""
    bos = twin.roles["bos"] if segment.bos else None
    eos = twin.roles["eos"] if segment.eos else None
    pad = twin.roles["pad"]
    if segment.task == len(twin.tasks):
        return {"objective": "too_short", "bos": bos, "eos": eos, "pad": pad}
    facts = cutting.segment_facts(twin.tasks[segment.task], bos, eos, segment.key, pad)
    return {**facts, "first_trained": segment.first_trained}


def slots_of(twin: Twin, segment: Segment) -> int:
    """The length law."""
    facts = facts_of(twin, segment)
    return objectives.law(facts["objective"], segment.n + segment.copy, facts)


def render(twin: Twin, segment: Segment, in_row: Sequence[int], place: int, marked: bool) -> Rendered:
    """A segment's slots.

    in_row: the keys of its row's segments of its task, in row order, of which it is number `place`. marked: whether the
    shard has a document that says what of it is trained.
    """
    facts, document = facts_of(twin, segment), segment.document
    content = document.tokens[segment.start : segment.start + segment.n]
    body = document.tokens[: segment.copy] + content
    head, tail = objectives.head_and_tail(facts)
    task = twin.tasks[segment.task] if segment.task < len(twin.tasks) else TOO_SHORT
    eos = segment.eos and task["parameters"].get("noise_eos", True)
    if task["objective"] in objectives.IN_PLACE:
        slots, prefix = objectives.in_place(body, facts)
        loss, labels = [0] * len(slots), list(slots)
    else:
        slots, prefix, loss, labels = objectives.segment(body, facts)
    may = None
    if marked:
        shift = mode = 0
        if task["objective"] not in objectives.IN_PLACE:
            shift = len(slots) - len(head) - len(tail) - len(body)
            mode = 0 if facts.get("mode") is None else 1
        of_document = (segment.start, segment.copy, document.trained)
        may = supervised.trainable(
            len(slots), len(head), mode, len(body), eos, of_document, prefix - len(head) if shift else 0, shift
        )
    level, weight = 0.0, 1.0
    blocks: list[tuple[float, float]] = []
    if task["objective"] in objectives.IN_PLACE:
        count = len(body) + (1 if eos else 0)
        own = (segment.key, len(head), count, 0)
        level, weight, blocks = _noised(twin, segment.task, own, in_row, place, len(head), may, slots, loss)
    elif may is not None:
        loss = [1 if loss[t] and may[t + 1] else 0 for t in range(len(slots))]
    return Rendered(slots, loss, labels, prefix, level, weight, blocks, tokens.runs(may) if may is not None else [])


def _noised(
    twin: Twin,
    number: int,
    own: tuple[int, int, int, int],
    in_row: Sequence[int],
    place: int,
    before: int,
    may: list[bool] | None,
    slots: list[int],
    loss: list[int],
) -> tuple[float, float, list[tuple[float, float]]]:
    """(level, weight, blocks); writes slots and loss."""
    task = twin.tasks[number]
    parameters, mask = task["parameters"], twin.roles.get("mask", -1)
    if task["objective"] == "masked_diffusion":
        # Stratified levels are of all the row's segments; the others have no candidates here.
        row = [own if i == place else (key, 0, 0, 0) for i, key in enumerate(in_row)]
        found = noise.masked_diffusion(number, parameters, mask, twin.ordinary, row, may, slots, loss, 0)
        return (*found[place], [])
    if task["objective"] == "uniform_diffusion":
        thresholds = task["resolved"]["flip_thresholds"]
        found = noise.uniform_diffusion(parameters, thresholds, twin.ordinary, [own], may, slots, loss, 0)
        return (*found[0], [])
    found = noise.block_diffusion(parameters, mask, [own], [before], [len(slots) // 2], slots, loss, 0)
    return 0.0, 1.0, found[0]


def rendered_row(twin: Twin, row: Sequence[Segment], marked: bool) -> list[Rendered]:
    """A row's segments."""
    of_task: dict[int, list[int]] = {}
    result = []
    for segment in row:
        of_task.setdefault(segment.task, []).append(segment.key)
    seen = dict.fromkeys(of_task, 0)
    for segment in row:
        result.append(render(twin, segment, of_task[segment.task], seen[segment.task], marked))
        seen[segment.task] += 1
    return result
