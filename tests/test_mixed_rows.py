"""Every objective in one row: what a mixed dataset holds, computed again from its sources' text
alone.

The tokenizer is bytes and special-token text is text, so that a document's tokens are the bytes of
its text. What is checked here is worked out from the corpus and the arrays; of the package it uses
only what opens a dataset.
"""

import json
import random
from typing import NamedTuple

import numpy as np
import pytest

from packprep import open_dataset
from packprep.building.forecast import forecast
from packprep.building.planning import look_up, make_plan
from packprep.errors import RecipeError
from packprep.recipe import read_recipe
from packprep.verification import verify_dataset
from tests import made

PAD, BOS, EOS, MASK, FIM = 256, 257, 258, 259, (263, 264, 265)
FIRST_SENTINEL = 266
WORDS = ["hello", "wörld", "日本", "<mask>", "<eos>", "foo", "bar\n", "<fim_middle>", "🙂", "x"]
PLAIN_WORDS = [word for word in WORDS if not word.startswith("<")]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PRESETS = ("ul2r", "fim", "llada", "mdlm", "mlm", "dllm", "duo", "bd3", "causal", "prefix_lm")
SUPERVISED = {"causal", "prefix_lm", "masked_diffusion"}


class Document(NamedTuple):
    """What a line of the corpus says, in bytes."""

    text: bytes
    trained: list[bool] | None  # None: nothing is said
    boundaries: tuple[int, ...] = ()  # where messages after the first begin
    system: bytes = b""  # a leading system message, dressed


def words(chance, most, choice=WORDS):
    return " ".join(chance.choice(choice) for _ in range(chance.randint(1, most)))


def of_spans(text, spans):
    """A byte is trained iff its character lies inside a span."""
    inside = [any(a <= i < b for a, b in spans) for i in range(len(text))]
    return [t for c, t in zip(text, inside, strict=True) for _ in c.encode()]


def conversation(chance):
    """(messages, the document): the template by hand."""
    messages = [("system", words(chance, 12, PLAIN_WORDS))] if chance.random() < 0.6 else []
    for _ in range(chance.randint(1, 10)):
        messages += [
            ("user", words(chance, 18, PLAIN_WORDS)),
            ("assistant", words(chance, 18, PLAIN_WORDS)),
        ]
    text, trained, begins = b"", [], []
    for role, content in messages:
        begins.append(len(text))
        head, body = f"<|im_start|>{role}\n".encode(), f"{content}<|im_end|>\n".encode()
        text += head + body
        trained += [False] * len(head) + [role == "assistant"] * len(body)
    system = text[: begins[1]] if messages[0][0] == "system" else b""
    return [{"role": r, "content": c} for r, c in messages], Document(
        text, trained, tuple(begins[1:]), system
    )


def write_corpus(folder):
    """Three sources of one file each; gives (source, position) → Document."""
    chance, documents = random.Random(3), {}
    lines = {"web": [], "spans": [], "chats": []}
    for i in range(180):
        text = words(chance, chance.choice([15, 50, 150]))
        lines["web"].append(({"text": text}, Document(text.encode(), None)))
        text = words(chance, chance.choice([15, 50, 120]))
        if i % 5 and len(text) >= 4:
            marks = sorted(chance.sample(range(len(text) + 1), 4))
            spans = [marks[:2], marks[2:]]
            if i % 5 == 4:
                spans[1][1] = len(text)
            given = {"text": text, "loss_spans": spans}
            lines["spans"].append((given, Document(text.encode(), of_spans(text, spans))))
        else:
            lines["spans"].append(({"text": text}, Document(text.encode(), None)))
        if i % 3 == 0:
            messages, document = conversation(chance)
            lines["chats"].append(({"messages": messages}, document))
    for name, records in lines.items():
        at = 0
        with open(folder / f"{name}.jsonl", "wb") as file:
            for record, document in records:
                documents[name, at] = document
                at += file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    (folder / "chat.jinja").write_text(TEMPLATE)
    return documents


def recipe(changes=None, **more):
    changes = changes or {}
    tasks = [{"preset": preset, "weight": 4 if preset == "ul2r" else 1} for preset in PRESETS]
    tasks.append({"name": "ps", "objective": "prefix_lm", "sentinel": True})
    tasks.append(
        {
            "name": "quiet",
            "objective": "masked_diffusion",
            "noise_eos": False,
            "mode_token": "[NLU]",
        }
    )
    exact = {"exact_count": True, "noise_range": [0.05, 0.9]}
    tasks.append({"name": "counted", "objective": "masked_diffusion", **exact})
    chats = ["causal", "ps", "prefix_lm", "mdlm", "mlm", "quiet", "counted"]
    return {
        "tokenizer": "bytes",
        "seq_length": 512,
        "tasks": tasks,
        "sources": [
            {"name": "web", "paths": ["web.jsonl"]},
            {"name": "spans", "paths": ["spans.jsonl"]},
            {"name": "chats", "paths": ["chats.jsonl"], "tasks": chats},
        ],
        "documents": {"chat_template": "chat.jinja", **changes.get("documents", {})},
        "packing": changes.get("packing", {}),
        "output": {"shard_text_bytes": 40_000},
        **more,
    }


VARIANTS = {
    "plain": {},
    "truncate": {"documents": {"long": "truncate"}},
    "drop": {"documents": {"long": "drop"}},
    "bos": {"documents": {"prepend_bos": True}},
    "no_eos": {"documents": {"prepend_bos": True, "append_eos": False}},
    "segment_eos": {"documents": {"append_eos": "segment"}},
    "padded": {"packing": {"pad_seq_to_mult": 8}},
    "next_fit": {"packing": {"algorithm": "next_fit"}, "documents": {"prepend_bos": True}},
}


class Mixed(NamedTuple):
    out: object
    dataset: object
    documents: dict
    recipe: dict


@pytest.fixture(scope="module", params=VARIANTS)
def mixed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    documents, table = write_corpus(folder), recipe(VARIANTS[request.param])
    outcome = made.build(table, folder, folder / "out")
    assert outcome.manifest is not None and len(outcome.manifest["shards"]) >= 2
    return Mixed(folder / "out", open_dataset(folder / "out"), documents, table)


class Segment(NamedTuple):
    """A stored segment beside what its document says of it."""

    row: object
    number: int
    begin: int
    end: int
    task: dict
    prefix: int
    document: Document
    start: int
    n: int
    # its slots before any objective: bos, mode, a repeated system message, content, eos
    original: list[int]
    trainable: list[bool]  # which of them may be trained
    head: int  # bos and mode
    copied: int

    def column(self, name):
        return getattr(self.row, name)[self.begin : self.end].tolist()


def rows_of(dataset):
    return [dataset.row(i) for i in range(len(dataset))]


def segments_of(mixed):
    bos_on = mixed.recipe["documents"].get("prepend_bos", False)
    eos_on = mixed.recipe["documents"].get("append_eos", True)
    sources = [source["name"] for source in mixed.recipe["sources"]]
    for row in rows_of(mixed.dataset):
        columns = row.segments
        for i in range(len(columns["task"])):
            task = mixed.dataset.tasks[int(columns["task"][i])]
            start, n = int(columns["start"][i]), int(columns["tokens"][i])
            document = mixed.documents[sources[int(columns["source"][i])], int(columns["doc"][i])]
            text, trained = document.text, document.trained
            head = [BOS] * (bos_on and start == 0) + [task["mode_token"]] * (
                task["mode_token"] is not None
            )
            copied = document.system if start and trained else b""
            eos = [EOS] * (eos_on == "segment" or (eos_on and start + n == len(text)))
            said = [True] * n if trained is None else trained[start : start + n]
            eos_trained = [said[-1]] * len(eos)
            if not task["parameters"].get("noise_eos", True):
                eos_trained = [False] * len(eos)
            yield Segment(
                row,
                i + 1,
                int(columns["begin"][i]),
                int(columns["end"][i]),
                task,
                int(columns["prefix"][i]),
                document,
                start,
                n,
                [*head, *copied, *text[start : start + n], *eos],
                [False] * (len(head) + len(copied)) + said + eos_trained,
                len(head),
                len(copied),
            )


def test_nothing_is_wrong_with_it(mixed):
    for replay in (-1, 50):
        report = verify_dataset(mixed.out, replay, {}, (0, 1), 0, made.Silent())
        assert report["listed"] == [] and report["replayed"] == (
            report["segments"] if replay < 0 else 50
        )


def test_all_objectives_and_kinds_of_documents_meet_in_rows(mixed):
    segments = list(segments_of(mixed))
    assert len({s.task["objective"] for s in segments}) == 7
    assert {s.task["name"] for s in segments} | {"too_short"} == {
        task["name"] for task in mixed.dataset.tasks
    }
    assert {s.task["objective"] for s in segments if s.document.trained} == SUPERVISED
    kinds = [
        {s.task["label_alignment"] for s in segments if s.row is row}
        for row in {s.row for s in segments}
    ]
    assert sum(len(kind) == 2 for kind in kinds) > len(kinds) / 6
    assert any(s.copied for s in segments) == (
        mixed.recipe["documents"].get("long", "split") == "split"
    )


def test_what_is_no_segment_is_not_trained(mixed):
    for row in rows_of(mixed.dataset):
        padding = np.ones(512, np.bool_)
        for number, (begin, end) in enumerate(
            zip(row.segments["begin"], row.segments["end"], strict=True), 1
        ):
            padding[begin:end] = False
            assert (row.segment_ids[begin:end] == number).all()
        assert (row.segment_ids[padding] == 0).all() and not row.loss_mask[padding].any()
        assert (row.tokens[padding] == PAD).all() and (row.labels[padding] == PAD).all()


def test_next_token_segments_have_their_labels_and_their_loss(mixed):
    """A slot is trained iff the next one is a target that may be trained; no label crosses a
    segment."""
    seen = set()
    for s in segments_of(mixed):
        if s.task["label_alignment"] == "same_slot":
            continue
        tokens, objective = s.column("tokens"), s.task["objective"]
        assert s.column("labels") == tokens[1:] + [PAD]
        if objective == "causal":
            slots, targets = s.original, s.trainable
        elif objective == "prefix_lm":
            slots, targets = of_prefix_lm(s)
        else:
            assert s.document.trained is None
            undo = of_spans_corrupted if objective == "span_corruption" else of_fill_in_the_middle
            assert undo(s) == s.original
            slots, targets = tokens, [False] * s.head + [True] * (len(tokens) - s.head)
        assert tokens == slots
        if objective in ("causal", "fill_in_the_middle"):
            assert s.prefix == 0
            targets = [True] * len(targets) if s.document.trained is None else targets
        wanted = [int(targets[t + 1] and t + 1 >= s.prefix) for t in range(len(tokens) - 1)] + [0]
        assert s.column("loss_mask") == wanted
        assert s.column("loss_weights") == wanted  # such tasks weigh 1
        seen.add((objective, s.document.trained is None))
    assert len(seen) == 6


def of_prefix_lm(s):
    """(slots, targets): the original, with the sentinel at the pivot, which is the first trained
    token where ranges are."""
    assert s.head < s.prefix < s.head + s.copied + s.n
    body = s.trainable[s.head : s.head + s.copied + s.n]
    if not all(body):
        assert s.prefix == s.head + max(body.index(True), 1)
    sentinel = [FIRST_SENTINEL] * s.task["parameters"]["sentinel"]
    slots = s.original[: s.prefix] + sentinel + s.original[s.prefix :]
    return slots, s.trainable[: s.prefix] + [True] * len(sentinel) + s.trainable[s.prefix :]


def of_spans_corrupted(s):
    """Inputs and targets put together again."""
    tokens = s.column("tokens")
    inputs, targets = tokens[s.head : s.prefix], tokens[s.prefix :]
    eos = [targets.pop()] if targets[-1] == EOS else []
    spans, sentinel = {}, None
    for token in targets:
        if token >= FIRST_SENTINEL:
            assert token not in spans
            spans[sentinel := token] = []
        else:
            spans[sentinel].append(token)
    out = []
    for token in inputs:
        out += spans.pop(token) if token >= FIRST_SENTINEL else [token]
    assert not spans
    return tokens[: s.head] + out + eos


def of_fill_in_the_middle(s):
    tokens = s.column("tokens")
    prefix, middle, suffix = FIM
    if prefix not in tokens:
        return tokens
    body = tokens[s.head :]
    eos = [body.pop()] if body[-1] == EOS else []
    a, b = body.index(suffix), body.index(middle)
    assert body[0] == prefix and b > a and len(body) == s.n + 3
    if a == 1:  # suffix first
        return tokens[: s.head] + body[b + 1 :] + body[2:b] + eos
    return tokens[: s.head] + body[1:a] + body[b + 1 :] + body[a + 1 : b] + eos


def test_in_place_segments_have_their_labels_and_no_prompt_is_noised_or_trained(mixed):
    seen, masked, flipped = set(), 0, 0
    for s in segments_of(mixed):
        if s.task["label_alignment"] != "same_slot":
            continue
        objective, copies = s.task["objective"], 1 + (s.task["objective"] == "block_diffusion")
        original, may = np.array(s.original * copies), np.array(s.trainable)
        # x_0 is never noised
        may = np.concatenate((may, np.zeros(len(may), np.bool_))) if copies == 2 else may
        tokens, loss = np.array(s.column("tokens")), np.array(s.column("loss_mask")) == 1
        assert s.column("labels") == original.tolist()
        assert s.prefix == (-1 if copies == 2 else len(tokens))
        assert not (loss & ~may).any() and (tokens == original)[~loss].all()
        if objective == "uniform_diffusion":
            assert np.array_equal(loss, may) and (tokens[tokens != original] < PAD).all()
            flipped += int((tokens != original).sum())
        elif s.task["name"] != "mlm":
            assert (tokens[loss] == MASK).all()
            masked += int(loss.sum())
        else:
            assert ((tokens[loss] == MASK) | (tokens[loss] < PAD)).all()
        if s.task["name"] == "dllm":
            assert loss.sum() >= 1
        weights = np.array(s.column("loss_weights"))
        assert (
            np.allclose(weights[loss], weight_of(s, tokens)[loss], rtol=1e-6)
            and not weights[~loss].any()
        )
        seen.add((s.task["name"], s.document.trained is None))
    assert seen >= {
        (name, True) for name in ("llada", "mdlm", "mlm", "dllm", "duo", "bd3", "quiet", "counted")
    }
    assert seen >= {(name, False) for name in ("llada", "mdlm", "mlm", "dllm", "quiet", "counted")}
    assert masked > 1000 and flipped > 50


def weight_of(s, tokens):
    """The weight of each slot's segment, or of its block."""
    level = float(s.row.segments["noise"][s.number - 1])
    parameters = s.task["parameters"]
    if s.task["objective"] == "masked_diffusion":
        if parameters["weighting"] == "none":
            return np.ones(len(tokens))
        if parameters["exact_count"]:
            candidates = np.array(s.trainable) & (np.array(s.original) != MASK)
            many = int(np.array(s.column("loss_mask")).sum())
            return np.full(len(tokens), candidates.sum() / many if many else 1.0)
        return np.full(
            len(tokens), 1 / ((1 - parameters["epsilon"]) * level + parameters["epsilon"])
        )
    if s.task["objective"] == "uniform_diffusion":
        return np.ones(len(tokens))
    arrays = s.row._shard.arrays
    g = int(arrays["row_offsets"][s.row._row]) + s.number - 1
    levels = arrays["block_noise"][slice(*arrays["block_offsets"][g : g + 2])]
    half = len(tokens) // 2
    assert len(levels) == -(-half // 32) and (levels >= 0.3).all() and (levels <= 0.8).all()
    return np.concatenate((np.repeat(1 / levels.astype(np.float64), 32)[:half], np.zeros(half)))


def test_conversations_are_cut_at_messages_and_repeat_their_system_message(mixed):
    later = repeated = 0
    for s in segments_of(mixed):
        if not s.document.boundaries or not s.start:
            continue
        later += 1
        assert s.start in s.document.boundaries
        given = s.column("labels" if s.task["label_alignment"] == "same_slot" else "tokens")
        assert bytes(given[s.head : s.head + len(s.document.system)]) == s.document.system
        repeated += bool(s.document.system)
    if mixed.recipe["documents"].get("long", "split") == "split":
        assert later > repeated > 5
    else:
        assert later == 0


def test_no_trained_token_is_lost_and_none_is_there_twice(mixed):
    if mixed.recipe["documents"].get("long", "split") != "split":
        return
    used: dict[int, list] = {}
    for s in segments_of(mixed):
        assert any(s.trainable[s.head :])
        used.setdefault(id(s.document), []).append((s.start, s.start + s.n))
    for document in mixed.documents.values():
        covered = [0] * len(document.text)
        for begin, end in used.get(id(document), []):
            for i in range(begin, end):
                covered[i] += 1
        assert all(
            c == 1 or (c == 0 and document.trained and not document.trained[i])
            for i, c in enumerate(covered)
        )


@pytest.mark.long
def test_workers_do_not_show(mixed, tmp_path):
    # one variant is enough
    if mixed.recipe["documents"].get("prepend_bos") or not mixed.recipe["packing"]:
        return
    made.build(mixed.recipe, mixed.out.parent, tmp_path / "again", 2)
    assert made.contents(tmp_path / "again") == made.contents(mixed.out)


@pytest.mark.parametrize("preset", ["llada", "mlm", "dllm", "bd3"])
def test_a_genuine_mask_in_the_text_is_not_trained_on(tmp_path, preset):
    """Masked slots are told by position: a mask that the text itself has is never one of them."""
    made.write_lines(
        tmp_path / "a.jsonl", ["ab<mask>cd" * 20, "<mask>" * 40, "x<mask>y<eos>z" * 9] * 8
    )
    table = {"tokenizer": "bytes", "seq_length": 512, "sources": [{"paths": ["a.jsonl"]}]}
    table |= {"tasks": [{"preset": preset}], "documents": {"special_text": "special"}}
    made.build(table, tmp_path, tmp_path / "out")
    assert verify_dataset(tmp_path / "out", -1, {}, (0, 1), 0, made.Silent())["listed"] == []
    genuine = trained = 0
    for row in rows_of(open_dataset(tmp_path / "out")):
        of_text = row.labels == MASK
        assert not (row.loss_mask[of_text] != 0).any() and (row.tokens[of_text] == MASK).all()
        genuine, trained = genuine + int(of_text.sum()), trained + int(row.loss_mask.sum())
    assert genuine > 500 and trained > 100


def test_spans_without_a_task_for_them_are_refused_before_work_starts(tmp_path):
    write_corpus(tmp_path)
    table = recipe()
    table["sources"][1]["tasks"] = ["fim", "duo", "bd3"]
    with pytest.raises(
        RecipeError,
        match="source 'spans' has documents with loss_spans or messages but no task that",
    ):
        made.build(table, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    table["documents"]["loss_spans"] = "ignore"
    table["sources"].pop()  # whose messages would have no text
    made.build(table, tmp_path, tmp_path / "out")
    assert verify_dataset(tmp_path / "out", -1, {}, (0, 1), 0, made.Silent())["listed"] == []


@pytest.mark.parametrize("weighting, warned", [("view_scale", True), ("none", False)])
def test_a_build_warns_of_a_task_that_weighs_next_to_nothing(tmp_path, weighting, warned):
    made.write_lines(tmp_path / "a.jsonl", made.texts(20))
    progress = made.Silent()
    tasks = [{"preset": "causal"}, {"preset": "duo", "weighting": weighting}]
    tasks[1] = {"name": "duo", "objective": "uniform_diffusion", "weighting": weighting}
    made.build(made.table("a.jsonl", tasks=tasks), tmp_path, tmp_path / "out", progress=progress)
    assert (
        any(
            "warning: the loss weight of a trained token is 1 in task causal and " in line
            for line in progress.said
        )
        == warned
    )


def test_the_plan_says_the_flip_rate(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(20))
    tasks = [
        {
            "name": "d",
            "objective": "uniform_diffusion",
            "schedule": "flip",
            "noise_range": [0.1, 0.3],
        }
    ]
    inputs, samples = look_up(read_recipe(made.table("a.jsonl", tasks=tasks), tmp_path), {}), []
    figures = forecast(make_plan(inputs, samples=samples), inputs, samples)["tasks"][0]["figures"]
    assert {name: round(figure["realised"], 3) for name, figure in figures.items()} == {
        "flip_rate": 0.2
    }
