"""A shard once more: documents, segments, rows in their keyed order, arrays. `Twin` is a plan made
ready for that."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packprep.errors import PlanError
from tests.twin import chance, cutting, groups, objectives, reading, tokens
from tests.twin.chance import CandidateSlots
from tests.twin.reading import Text, TextReader
from tests.twin.records import Keys, Talk
from tests.twin.tokens import Spot, Tokenizer, Trained
from tests.twin.turns import (
    Template,
    text_of_talk,
    texts_of_talk,
)

TOO_SHORT: dict[str, Any] = {"objective": "causal", "parameters": {}}


_CUTTING = ("min_tokens", "max_tokens", "long", "append_eos", "prepend_bos", "long_answers")


class Document(NamedTuple):
    """A token document: its source and file (their numbers in the plan), position, use, ids and
    what is trained."""

    source: int
    file: int
    position: int
    use: int
    tokens: list[int]
    trained: Trained | None
    file_key: int
    weight: float = 1.0  # of all of it, where `trained` is None
    base: int = 0  # tokens of the same document that stand in earlier texts
    document_weight: float = 1.0  # the record's, which is multiplied into the others
    texts: Sequence["Document"] = ()  # all texts of the same document, in order
    records: Sequence[tuple[int, int, int]] = ()  # position, first token, tokens of each

    def location(self) -> tuple[int, int, int, int]:
        """What tells it from all others."""
        return self.source, self.file, self.position, self.use

    def has_ranges(self) -> bool:
        """Return whether its shard stores trained ranges because of it."""
        return self.trained is not None or self.weight != 1


class Segment(NamedTuple):
    """A range of a document's tokens with its task; `copy` tokens of the document's begin are
    repeated before it."""

    document: Document
    start: int
    n: int
    task: int
    bos: bool
    eos: bool
    copy: int
    first_trained: int | None
    key: int
    fill: int = 0  # eos behind it that make its last block whole


class Rendered(NamedTuple):
    """A segment's slots and header."""

    slots: list[int]
    loss: list[int]
    labels: list[int]
    prefix: int
    level: float
    weight: float
    blocks: list[tuple[float, float]]  # level and weight of each
    trainable: list[tuple[int, int, float]]  # ranges of slots that may be trained, and their weight
    media: list[tuple[int, Spot]]  # places of media: the slot at which each begins, and what it is
    n: int  # tokens of its document; 0 where that was removed


class Twin:
    """A plan as the twin reads it.

    template: of the plan's chats. turns_taken: of how many places in them the build's word was
    taken. PlanError for an objective that has no twin.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        tokenizer_json: bytes,
        prefixes: Sequence[str],
        template: Template,
    ):
        check(plan)
        recipe, vocabulary = plan["recipe"], plan["vocabulary"]
        self.plan, self.recipe = plan, recipe
        self.shards, self.seq_length = plan["shards"], recipe["seq_length"]
        documents, self.packing = recipe["documents"], recipe["packing"]
        both = [self.packing.get(f"{side}_length", 0) for side in ("encoder", "decoder")]
        self.sides = both if both[0] else None
        self.roles: dict[str, int] = vocabulary["roles"]
        special = set(vocabulary["special_ids"])
        self.ordinary = [i for i in range(vocabulary["vocab_size"]) if i not in special]
        self.vocab_size: int = vocabulary["vocab_size"]
        self.media: dict[str, Sequence[int]] = vocabulary.get("media") or {}
        how = documents["special_text"], plan["engine"]["name"], self.media
        self.tokenizer = Tokenizer(tokenizer_json, vocabulary["special_ids"], *how)
        self.template, self.turns_taken = template, 0
        self.loss_weighting = documents.get("loss_weighting", "token")
        self.totals: dict[tuple[int, int, int, int], dict[float, float]] = {}  # by location
        self.reader = TextReader(documents["loss_spans"] == "use", self._conversation)
        self.tasks = [self._task(t, task) for t, task in enumerate(plan["tasks"][:-1])]
        self.in_place = any(objectives.is_in_place(task["objective"]) for task in self.tasks)
        self.with_blocks = any(objectives.copies(task["objective"]) > 1 for task in self.tasks)
        # then the copy that is clean gives the labels of both
        least = recipe["output"]["columns"] == "least"
        self.with_labels = any(
            objectives.is_in_place(task["objective"])
            and not (least and objectives.copies(task["objective"]) > 1)
            for task in self.tasks
        )
        self.cutting = {
            **{name: documents[name] for name in _CUTTING},
            "seq_length": self.seq_length,
            "tasks": self.tasks,
            "max_segments": self.packing["max_segments_per_row"],
            "pad": self.packing["pad_seq_to_mult"],
            "sides": self.sides,
            "capacities": {},
            "lengths": recipe.get("seq_lengths") or [self.seq_length],
            "capacities_of": {},
        }
        self.sources = [self._source(i, prefix) for i, prefix in enumerate(prefixes)]
        self.removed = {
            (source, file, position)
            for source, files in plan["removed_documents"].items()
            for file, positions in files.items()
            for position in positions
        }

    def is_removed(self, document: "Document") -> bool:
        """Whether a document is among those that were removed from the dataset."""
        source = self.sources[document.source]
        return (
            source["name"],
            self.plan["files"][document.file]["name"],
            document.position,
        ) in self.removed

    def _conversation(self, talk: Talk) -> Text | None:
        each = self.recipe["documents"].get("trained_turns") == "each"
        found = (texts_of_talk if each else text_of_talk)(talk, self.template)
        if found is None:
            return None
        text, taken = found
        self.turns_taken += taken
        return text

    def _task(self, number: int, task: Mapping[str, Any]) -> dict[str, Any]:
        parameters = {**task["parameters"], "sentinels": self.plan["vocabulary"]["sentinels"]}
        if parameters.get("eos_after_inputs"):
            parameters["input_eos"] = [self.roles["eos"]]
        kind = objectives.of(task["objective"])
        if hasattr(kind, "with_ids"):
            parameters = kind.with_ids(parameters, self.roles, self.tokenizer)
        return {
            "number": number,
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
            if named is None
            or any(task["name"] == name or task["name"].startswith(name + "-") for name in named)
        }
        supervised = {t for t in allowed if objectives.is_supervised(self.tasks[t])}
        return {
            **{key: given[key] for key in ("name", "sample", "format")},
            "where": given.get("where"),
            "by": given["repeat"] if isinstance(given["repeat"], str) else None,
            "pass_shares": resolved.get("pass_shares"),
            "keys": Keys(
                given["text_key"],
                given["messages_key"],
                given["tools_key"],
                given["messages_format"],
                tuple(self.recipe["documents"]["trained_roles"]),
                tuple(self.media),
            ),
            **{key: resolved[key] for key in ("repeat", "ratios", "step_bytes")},
            "group": (given["group_by"], given["order_by"], given["between"]),
            "stream": (given["token_dtype"], self.vocab_size, self.roles.get("eos")),
            "seed": self.recipe["seed"],
            "prefix": prefix,
            "files": [(file["name"], file["size"], file["pieces"]) for file in files],
            "piece_bytes": {
                f: file["piece_bytes"] for f, file in enumerate(files) if file.get("piece_bytes")
            },
            "first_file": next(
                (f for f, file in enumerate(self.plan["files"]) if file["source"] == i), 0
            ),
            "allowed": allowed,
            "supervised": supervised,
            "marks": self._marks(allowed),
            "supervised_marks": self._marks(supervised),
        }

    def _marks(self, tasks: set[int]) -> set[int]:
        """The ids that tasks write between tokens, of which no document that may draw them has
        one."""
        found: set[int] = set()
        for task in (self.tasks[t] for t in tasks):
            kind = objectives.of(task["objective"])
            if task["weight"] > 0 and hasattr(kind, "marks"):
                found |= set(kind.marks(task["parameters"]))
        return found


def check(plan: Mapping[str, Any]) -> None:
    """PlanError unless the twin has every objective and format of the plan."""
    for task in plan["tasks"]:
        if task["objective"] not in objectives.NAMES:
            raise PlanError(
                f"task {task['name']!r}: objective {task['objective']!r} has no twin;"
                f" there are {', '.join(objectives.NAMES)}"
            )
    for source in plan["recipe"]["sources"]:
        if source["format"] not in (
            "auto",
            "jsonl",
            "parquet",
            "arrow",
            "text",
            "megatron",
            "datatrove",
            "token_stream",
            "tokens",
        ):
            raise PlanError(f"source {source['name']!r}: format {source['format']!r} has no twin")


def documents_of(
    twin: Twin, shard: int, locations: set[tuple[int, int, int, int]] | None
) -> list[Document]:
    """The documents of a shard, in its order, that can be used. locations: only these, (source,
    file, position, use); None: all."""
    found = []
    for s, source in enumerate(twin.sources):

        def listed(file: int, part: int) -> list[tuple[int, int]]:
            if source["group"][0]:  # noqa: B023
                return groups.sizes(twin, source, file, part)  # noqa: B023
            return reading.sizes(source, file, part, twin.reader)  # noqa: B023

        for part in reading.slices(source, shard, twin.shards):
            file = source["first_file"] + part.file
            if locations is not None and not any(
                location[:2] == (s, file) and location[3] == part.use for location in locations
            ):
                continue

            def wanted(position: int) -> bool:
                if locations is not None and (s, file, position, part.use) not in locations:  # noqa: B023
                    return False
                return reading.is_kept(source, part, position, listed)  # noqa: B023

            key = reading.file_key(source, part.file)
            if source["group"][0]:
                found += _joined_documents(twin, s, part, wanted)
                continue
            for position, texts, weight, of_all in _token_documents(twin, source, part, wanted):
                if twin.loss_weighting != "token":  # then each document is supervised
                    texts = [
                        (own, trained or _trained_whole(len(own), weight)) for own, trained in texts
                    ]
                ids = [i for own, _ in texts for i in own]
                marks = source["marks" if texts[0][1] is None else "supervised_marks"]
                if not marks.isdisjoint(ids):
                    continue
                is_trained = any(
                    weight > 0 if trained is None else trained.spans for _, trained in texts
                )
                if len(ids) < max(1, twin.cutting["min_tokens"]) or not is_trained:
                    continue
                base, of_document = 0, list[Document]()
                for own, trained in _with_one_system(texts):
                    of_text = (own, trained, key, weight, base, of_all, of_document)
                    of_document.append(Document(s, file, position, part.use, *of_text))
                    base += len(own)
                found += of_document
    return found


def _joined_documents(
    twin: Twin, s: int, part: reading.Slice, wanted: Callable[[int], bool]
) -> Iterator[Document]:
    """The documents of a slice of a source with group_by."""
    source = twin.sources[s]
    file, key = source["first_file"] + part.file, reading.file_key(source, part.file)
    for position, ids, of_records in groups.token_documents(twin, source, part, wanted):
        if len(ids) >= max(1, twin.cutting["min_tokens"]):
            given = (s, file, position, part.use, ids, None, key)
            yield Document(*given, records=of_records)


def _trained_whole(n: int, weight: float) -> Trained:
    """What is trained of a document of n tokens, all of one weight."""
    spans = [(0, n)] if n and weight else []
    return Trained(spans, [weight] * len(spans), [], 0, weight)


def _with_one_system(
    texts: list[tuple[list[int], Trained | None]],
) -> list[tuple[list[int], Trained | None]]:
    """The texts of a document: later pieces of them repeat a system message if all begin with the
    same."""
    if len(texts) == 1:
        return texts
    systems = {tuple(ids[: trained.system]) for ids, trained in texts if trained is not None}
    if len(systems) == 1:
        return texts
    return [(ids, trained and trained._replace(system=0)) for ids, trained in texts]


def _token_documents(
    twin: Twin, source: dict[str, Any], part: reading.Slice, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[tuple[list[int], Trained | None]], float, float]]:
    """(position; of each of its texts the content ids and what is trained; the weight of all of it
    where this is None; the record's weight) of a slice's wanted documents that are not turned
    away."""
    name = source["files"][part.file][0]
    if reading.format_of(source, name)[0] in reading.TOKEN_FORMATS:
        forbidden = (
            twin.tokenizer.forbidden_ids
            if twin.recipe["documents"]["special_text"] == "reject"
            else set()
        )
        forbidden = forbidden | twin.tokenizer.slots
        eos, bos = (
            twin.roles[role] if twin.cutting[key] else None
            for role, key in (("eos", "append_eos"), ("bos", "prepend_bos"))
        )
        weights = twin.reader.supervision
        lists = reading.token_documents(source, part, weights, wanted)
        for position, ids, of_tokens, of_all in lists:
            content = tokens.content(ids, twin.vocab_size, forbidden, eos, bos)
            if content is not None:
                trained, weight = tokens.trained_ids(ids, of_tokens, content, eos)
                yield position, [(content, trained)], weight, of_all
        return
    for position, text in reading.documents(source, part, twin.reader, wanted):
        encoded = [twin.tokenizer.encode(one) for one in (text, *text.later)]
        if all(one is not None for one in encoded):
            found = [one for one in encoded if one is not None]
            yield position, found, text.weight, text.document_weight


def segments_of(twin: Twin, document: Document) -> list[Segment]:
    """Where a document is cut, other than by `concat`."""
    source = twin.sources[document.source]

    def key(start: int) -> int:
        start += document.base
        return chance.segment_key(document.file_key, document.position, document.use, start)

    allowed = source["allowed" if document.trained is None else "supervised"]
    recipe = {**twin.cutting, "allowed": allowed, "key": key}
    if cutting.is_elsewhere(len(document.tokens), recipe, document.trained is not None):
        return []
    if document.trained is None:
        found: list[tuple] = [
            (*segment, 0, None, 0) for segment in cutting.cut(len(document.tokens), recipe)
        ]
    else:
        found = cutting.cut_supervised(len(document.tokens), document.trained, recipe)
    return [
        Segment(document, start, n, task, bool(bos), bool(eos), copy, first, key(start), fill)
        for start, n, task, bos, eos, copy, first, fill in found
    ]


def laid_out(twin: Twin, documents: Sequence[Document]) -> list[list[Segment]]:
    """The shard's rows in their order, each with its segments in theirs."""
    if twin.packing["algorithm"] == "concat":
        segments, row = _laid_end_to_end(twin, documents)
    else:
        segments = [segment for document in documents for segment in segments_of(twin, document)]
        row = _packed(twin, segments)
    keys = [segment.key for segment in segments]
    return [
        [segments[i] for i in members]
        for members in ordered_rows(row, keys, twin.packing["algorithm"])
    ]


def _packed(twin: Twin, segments: Sequence[Segment]) -> list[int]:
    slots, most = (
        [slots_of(twin, segment) for segment in segments],
        twin.packing["max_segments_per_row"],
    )
    if twin.sides:
        inputs = [inputs_of(twin, segment) for segment in segments]
        return cutting.pack_sides(
            inputs, [a - b for a, b in zip(slots, inputs, strict=True)], twin.sides, most
        )
    multiple = twin.packing["pad_seq_to_mult"]
    lengths = [-(-n // multiple) * multiple for n in slots]
    return cutting.pack(lengths, twin.seq_length, twin.packing["algorithm"], most)[0]


def _laid_end_to_end(twin: Twin, documents: Sequence[Document]) -> tuple[list[Segment], list[int]]:
    keys = [_keys_of(document) for document in documents]
    segments, row = [], []
    # Each source has its own mix, and cutting.lay asks for one of all: it is told by the document.
    recipe = {
        **twin.cutting,
        "keys": keys,
        "allowed_of": [twin.sources[d.source]["allowed"] for d in documents],
    }
    for d, start, n, task, bos, eos, r, _ in cutting.lay(
        [len(document.tokens) for document in documents], recipe
    ):
        segments.append(
            Segment(documents[d], start, n, task, bool(bos), bool(eos), 0, None, keys[d](start))
        )
        row.append(r)
    return segments, row


def _keys_of(document: Document) -> Callable[[int], int]:
    return lambda start: chance.segment_key(
        document.file_key, document.position, document.use, start
    )


def facts_of(twin: Twin, segment: Segment) -> dict[str, Any]:
    """What objectives wants to know of a segment."""
    bos = twin.roles["bos"] if segment.bos else None
    eos = twin.roles["eos"] if segment.eos else None
    pad = twin.roles["pad"]
    if segment.task == len(twin.tasks):
        return {"objective": "too_short", "bos": bos, "eos": eos, "pad": pad}
    facts = cutting.segment_facts(twin.tasks[segment.task], bos, eos, segment.key, pad)
    if segment.fill:
        facts["fill"] = [twin.roles["eos"]] * segment.fill
    return {**facts, "first_trained": segment.first_trained}


def slots_of(twin: Twin, segment: Segment) -> int:
    """The length law."""
    facts = facts_of(twin, segment)
    return objectives.law(facts["objective"], segment.n + segment.copy, facts)


def inputs_of(twin: Twin, segment: Segment) -> int:
    """The slots of its prefix."""
    facts = facts_of(twin, segment)
    _, inputs = objectives.of(facts["objective"]).body([0] * (segment.n + segment.copy), facts)
    return len(objectives.head_and_tail(facts)[0]) + inputs


def render(
    twin: Twin,
    segment: Segment,
    in_row: Sequence[int],
    number_in_row: int,
    supervised: bool,
    epoch: int,
) -> Rendered:
    """A segment's slots in an epoch, which hold nothing where its document was removed. Arguments
    as of `_render`."""
    one = _render(twin, segment, in_row, number_in_row, supervised, epoch)
    if not twin.is_removed(segment.document):
        return one
    nothing, in_place = (
        [twin.roles["pad"]] * len(one.slots),
        objectives.is_in_place(facts_of(twin, segment)["objective"]),
    )
    return one._replace(
        slots=nothing,
        labels=nothing,
        loss=[0] * len(nothing),
        prefix=one.prefix if in_place or twin.sides else 0,
        level=0.0,
        weight=1.0,
        media=[],
        n=0,
    )


def _render(
    twin: Twin,
    segment: Segment,
    in_row: Sequence[int],
    number_in_row: int,
    supervised: bool,
    epoch: int,
) -> Rendered:
    """A segment's slots in an epoch.

    in_row: the keys of its row's segments of its task, in row order, of which it is number
    `number_in_row`. supervised: whether the shard has trained ranges.
    """
    facts, document = facts_of(twin, segment), segment.document
    if twin.sides and hasattr(objectives.of(facts["objective"]), "PREFIX_MOVES"):
        epoch = 0
    facts["epoch"] = epoch
    content = document.tokens[segment.start : segment.start + segment.n]
    body = document.tokens[: segment.copy] + content
    head, tail = objectives.head_and_tail(facts)
    task = twin.tasks[segment.task] if segment.task < len(twin.tasks) else TOO_SHORT
    eos = segment.eos and task["parameters"].get("noise_eos", True)
    in_place = objectives.is_in_place(task["objective"])
    if in_place:
        slots, prefix = objectives.in_place(body, facts)
        loss, labels = [0] * len(slots), objectives.labels(slots, task, facts)
    else:
        slots, prefix, loss, labels = objectives.segment(body, facts)
    trainable = None
    if supervised:
        trainable = scaled_weights(twin, segment, epoch)
    level, weight = 0.0, 1.0
    blocks: list[tuple[float, float]] = []
    if in_place:
        candidates = CandidateSlots(
            segment.key, len(head), len(body) + (1 if eos else 0) + segment.fill, 0, len(head),
            len(slots) // objectives.copies(task["objective"]),
        )  # fmt: skip
        # Levels may be of all the row's segments; the others have no candidates here.
        members = [
            candidates if i == number_in_row else CandidateSlots(key, 0, 0)
            for i, key in enumerate(in_row)
        ]
        ids = twin.roles.get("mask", -1), twin.ordinary
        found = objectives.of(task["objective"]).noise(
            task, ids, members, trainable, slots, loss, epoch
        )
        level, weight, blocks = found[number_in_row]
    elif trainable is not None:
        loss = [1 if loss[t] and trainable[t + 1] else 0 for t in range(len(slots))]
    media, added, pivot = [], 0, 0
    if not in_place:
        added = len(slots) - len(head) - len(tail) - len(body)
        pivot = prefix - len(head) - len(task["parameters"].get("input_eos", ()))
    for place in places_in(segment):
        i = segment.copy + place.first - segment.start
        media.append((len(head) + i + (added if i >= pivot else 0), place))
    ranges = tokens.runs(trainable) if trainable is not None else []
    return Rendered(slots, loss, labels, prefix, level, weight, blocks, ranges, media, segment.n)


def own_weights(twin: Twin, segment: Segment, epoch: int) -> tuple[list[float], list[float], int]:
    """(the weight of each of a segment's slots as a target, 0 where its token may be none; a number
    that tells its turn from the document's others; the first slot that is predicted)."""
    facts, document = {**facts_of(twin, segment), "epoch": epoch}, segment.document
    body = document.tokens[: segment.copy]
    body = body + document.tokens[segment.start : segment.start + segment.n]
    head, tail = objectives.head_and_tail(facts)
    task = twin.tasks[segment.task] if segment.task < len(twin.tasks) else TOO_SHORT
    eos = segment.eos and task["parameters"].get("noise_eos", True)
    in_place = objectives.is_in_place(task["objective"])
    slots, prefix, *_ = (objectives.in_place if in_place else objectives.segment)(body, facts)
    shift = mode = 0
    first = int(bool(task["parameters"].get("shift")))
    if not in_place:
        shift = len(slots) - len(head) - len(tail) - len(body)
        mode = 0 if facts.get("mode") is None else 1
        first = max(prefix, 1)
    pivot = prefix - len(head) - len(task["parameters"].get("input_eos", ())) if shift else 0

    def of_slots(spans: list[tuple[int, int, float]] | None, of_end: float) -> list[float]:
        of_document = (segment.start, segment.copy, spans)
        has_prefix = not in_place and prefix > 0
        sizes = len(slots), len(head), mode, len(body)
        end = len(head) + len(body) + len(tail)
        behind = range(end - segment.fill, end)
        return cutting.trainable(*sizes, of_end, of_document, pivot, shift, has_prefix, behind)

    if document.trained is None:
        weights = of_slots(None, float(eos))
        return [document.weight * weight for weight in weights], weights, first
    trained, rest = document.trained, twin.cutting["long_answers"] == "continue"
    spans = cutting.trained_in(trained, segment.start, segment.n, rest)
    piece = segment.start, segment.n, len(document.tokens)
    of_end = cutting.eos_weight(trained, spans, *piece, rest) if eos else 0.0
    is_last = segment.start + segment.n == len(document.tokens)
    last = trained.spans[-1] if is_last else spans[-1] if spans else (0, 1)

    def turn(token: int) -> float:
        return 2.0 + document.base + cutting.message_of(trained, token)

    turns = [(begin, end, turn(begin)) for begin, end, _ in spans]
    return of_slots(spans, of_end), of_slots(turns, turn(last[1] - 1) if of_end else 0.0), first


def scaled_weights(twin: Twin, segment: Segment, epoch: int) -> list[float]:
    """The weight of each of a segment's slots as a target, as the recipe's loss_weighting has
    it."""
    weights, turns, _ = own_weights(twin, segment, epoch)
    if twin.loss_weighting == "token":
        return weights
    document = segment.document
    if document.location() not in twin.totals:
        totals: dict[float, float] = {}
        for text in document.texts:
            for other in segments_of(twin, text):
                theirs, groups, first = own_weights(twin, other, epoch)
                for t in range(first, len(theirs)):
                    group = groups[t] if twin.loss_weighting == "turn" else 0.0
                    totals[group] = totals.get(group, 0.0) + theirs[t]
        twin.totals[document.location()] = totals
    scaled = []
    for weight, turn in zip(weights, turns, strict=True):
        total = twin.totals[document.location()].get(
            turn if twin.loss_weighting == "turn" else 0.0, 0.0
        )
        if weight and total:
            weight = max(nearest(document.document_weight * weight / total), 2.0**-126)
        scaled.append(weight)
    return scaled


def places_in(segment: Segment) -> list[Spot]:
    """A segment's places of media."""
    trained, end = segment.document.trained, segment.start + segment.n
    return (
        [place for place in trained.media if segment.start <= place.first < end]
        if trained is not None
        else []
    )


def rendered_row(
    twin: Twin, row: Sequence[Segment], supervised: bool, epoch: int
) -> list[Rendered]:
    """A row's segments in an epoch."""
    of_task: dict[int, list[int]] = {}
    result = []
    for segment in row:
        of_task.setdefault(segment.task, []).append(segment.key)
    seen = dict.fromkeys(of_task, 0)
    for segment in row:
        result.append(
            render(twin, segment, of_task[segment.task], seen[segment.task], supervised, epoch)
        )
        seen[segment.task] += 1
    return result


def loss_weights(twin: Twin, segment: Segment, one: Rendered, supervised: bool) -> list[float]:
    """What each slot's loss counts: nothing, or its segment's or block's weight times that of what
    the slot predicts."""
    facts = facts_of(twin, segment)
    ahead = 1
    if objectives.is_in_place(facts["objective"]):
        ahead = int(bool(facts["parameters"].get("shift")))
    found, block_of_slot = [], []
    if one.blocks:
        half = len(one.slots) // 2
        flags = [0] * half
        for begin, end, _ in one.trainable:
            flags[begin:end] = [1] * (end - begin)
        before, parameters = len(objectives.head_and_tail(facts)[0]), facts["parameters"]
        block_of_slot = objectives.of(facts["objective"]).numbers(
            half, before, flags if supervised else None, parameters
        )
        if parameters["shift"]:
            block_of_slot = [*block_of_slot[1:], None]
    for t, trained in enumerate(one.loss):
        weight = one.weight
        if one.blocks:
            block = block_of_slot[t] if t < len(block_of_slot) else None
            weight = 0.0 if block is None else one.blocks[block][1]
        for begin, end, of_range in one.trainable:
            if begin <= t + ahead < end:
                weight = nearest(nearest(weight) * nearest(of_range))
        found.append(nearest(weight) if trained else 0.0)
    return found


def nearest(number: float) -> float:
    """The nearest number of 32 bits."""
    return struct.unpack("f", struct.pack("f", number))[0]


def row_arrays(segments, seq_length, pad_id, pad_seq_to_mult=1):
    """dict of lists. segments: (slots, loss, labels) each, in row order. cu_seqlens_padded is None
    without padding."""
    tokens, labels = [pad_id] * seq_length, [pad_id] * seq_length
    segment_ids, loss_mask, position_ids = [0] * seq_length, [0] * seq_length, [0] * seq_length
    cu_seqlens, cu_seqlens_padded = [0], [0]
    for number, (slots, loss, segment_labels) in enumerate(segments, start=1):
        begin = cu_seqlens_padded[-1]
        physical = len(slots)
        while physical % pad_seq_to_mult:
            physical += 1
        if begin + physical > seq_length:
            raise ValueError(f"segment {number} ends at slot {begin + physical} of {seq_length}")
        for t, token in enumerate(slots):
            tokens[begin + t] = token
            labels[begin + t] = segment_labels[t]
            loss_mask[begin + t] = loss[t]
            segment_ids[begin + t] = number
            position_ids[begin + t] = t
        cu_seqlens.append(cu_seqlens[-1] + len(slots))
        cu_seqlens_padded.append(begin + physical)
    return {
        "tokens": tokens,
        "labels": labels,
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_padded": cu_seqlens_padded if pad_seq_to_mult > 1 else None,
    }


def ordered_rows(row_of_segment, keys, algorithm):
    """[[table index, …], …]: the shard's rows in their order, each with its segments in theirs.

    row_of_segment: packing's row of each segment of the table. keys: their 64-bit keys. next_fit
    keeps all order.
    """
    members: list[list[int]] = [[] for _ in range(max(row_of_segment, default=-1) + 1)]
    for index, row in enumerate(row_of_segment):
        members[row].append(index)
    if algorithm == "next_fit":
        return members
    members = [
        sorted(row, key=lambda i: (chance.bits64(keys[i], chance.SEGMENT_ORDER), i))
        for row in members
    ]
    order = sorted(
        range(len(members)), key=lambda r: (chance.bits64(keys[members[r][0]], chance.ROW_ORDER), r)
    )
    return [members[r] for r in order]
