"""Conversations longer than a row: where they are cut, and that no piece trains an answer whose
question lies in another."""

import json
import random

import numpy as np
import pytest

import packprep
from tests import made
from tests.twin.check import verify_with_twin

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHAPES = [  # what follows a system message or none: u user, a assistant, t tool
    "uaua" * 8,
    "uatata" * 5,
    "ua",
    "uaauua" * 4,
    "auauttaua",
]


def conversation(shape, chance, words):
    """Messages of that shape, of as many letters as `words` says, times a random number."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    sizes = [1 + int(words * chance.random() ** 3) for _ in shape]
    return [
        {"role": roles[role], "content": "".join(chance.choices("abcdef ", k=size)).strip() or "-"}
        for role, size in zip(shape, sizes, strict=True)
    ]


def parts(messages):
    """(role, first byte, first byte that is trained, end) of each message in the text that CHAT
    makes of all."""
    found, at = [], 0
    for message in messages:
        text = f"<{message['role']}>{message['content']}</{message['role']}>\n"
        found.append((message["role"], at, at + len(f"<{message['role']}>"), at + len(text)))
        at += len(text)
    return found


def trained_here(of, start, n, rest):
    """The bytes that a piece [start, start + n) may train, and all that the template marks
    there."""
    may, marked = set(), set()
    for k, (role, _, first, end) in enumerate(of):
        here = set(range(max(first, start), min(end, start + n)))
        if role != "assistant" or not here:
            continue
        marked |= here
        asked = [(begin, stop) for role, begin, _, stop in of[:k] if role in ("user", "tool")][-1:]
        if all(stop > start and begin < start + n for begin, stop in asked) or (
            rest and first < start
        ):
            may |= here
    return may, marked


def pieces(dataset):
    """(line's byte, start, n, copy, bytes trained, row) of each segment of a dataset of bytes with
    the task causal."""
    eos = dataset.manifest["specials"]["eos"]
    for row in map(dataset.row, range(len(dataset))):
        for begin, end, doc, start, n in zip(
            *(row.segments[name].tolist() for name in ("begin", "end", "doc", "start", "tokens")),
            strict=True,
        ):
            copy = end - begin - n - int(row.tokens[end - 1] == eos)
            targets = np.flatnonzero(row.loss_mask[begin : end - 1]) + 1
            assert not (targets < copy).any()
            yield doc, start, n, copy, {int(t) - copy + start for t in targets if t < copy + n}


def built(folder, conversations, **changes):
    """(dataset, manifest's ledger of the one source, byte → messages) of conversations with CHAT,
    verified all through."""
    lines = [json.dumps({"messages": messages}).encode() + b"\n" for messages in conversations]
    made.write(folder / "a.jsonl", b"".join(lines))
    (folder / "chat.jinja").write_text(CHAT)
    documents = {"chat_template": "chat.jinja", **changes.pop("documents", {})}
    recipe = made.table(
        "a.jsonl", documents=documents, **{"tasks": [{"objective": "causal"}], **changes}
    )
    outcome = made.build(recipe, folder, folder / "out")
    report = verify_with_twin(folder / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] > 0
    places = np.cumsum([0, *map(len, lines)])[:-1].tolist()
    ledger = outcome.manifest["ledger"]["sources"]["source0"]
    return (
        packprep.open_dataset(folder / "out"),
        ledger,
        dict(zip(places, conversations, strict=True)),
    )


@pytest.mark.parametrize("long_answers", ["continue", "untrained"])
def test_no_piece_trains_an_answer_whose_question_is_not_in_it(tmp_path, long_answers):
    chance = random.Random(long_answers)
    shapes = [chance.choice(["", "s", "s"]) + chance.choice(SHAPES) for _ in range(60)]
    conversations = [conversation(shape, chance, chance.choice([40, 200, 900])) for shape in shapes]
    dataset, ledger, messages = built(
        tmp_path, conversations, seq_length=256, documents={"long_answers": long_answers}
    )
    rest, apart, seen = long_answers == "continue", 0, 0
    covered = dict.fromkeys(messages, 0)
    for doc, start, n, copy, trained in pieces(dataset):
        may, marked = trained_here(parts(messages[doc]), start, n, rest)
        # nothing predicts a row's first token
        assert trained == may - ({start} if copy == 0 else set())
        apart, seen, covered[doc] = apart + len(marked - may), seen + (start > 0), covered[doc] + n
    left_out = ledger["tokens"]["dropped"]["untrained_segment"]
    assert left_out == sum(parts(messages[doc])[-1][3] for doc in messages) - sum(covered.values())
    assert seen > 100 and apart < ledger["tokens"]["answers_apart"] <= apart + left_out


@pytest.mark.long
def test_a_mix_of_tasks_is_recomputed_by_the_twin(tmp_path):
    chance = random.Random("mix")
    conversations = [conversation(f"s{chance.choice(SHAPES)}", chance, 300) for _ in range(20)]
    tasks = [{"objective": name} for name in ("causal", "prefix_lm", "masked_diffusion")]
    dataset, ledger, _ = built(tmp_path, conversations, seq_length=128, tasks=tasks)
    assert ledger["tokens"]["answers_apart"] and {
        t["objective"] for t in dataset.manifest["tasks"][:3]
    }


def said(role, size):
    """A message whose part of the text has `size` bytes."""
    return {"role": role, "content": "x" * (size - len(f"<{role}></{role}>\n"))}


def cuts(folder, messages, **changes):
    """[(start, n, bytes trained)] of the pieces of one conversation in rows of 256 tokens."""
    folder.mkdir()
    dataset, ledger, _ = built(folder, [messages], seq_length=256, **changes)
    found = sorted((start, n, len(trained)) for _, start, n, _, trained in pieces(dataset))
    return found, ledger["tokens"].get("answers_apart", 0)


def test_a_cut_is_at_the_last_users_message_in_reach_before_any_other(tmp_path):
    a, u, t = (
        (lambda n: said("assistant", n)),
        (lambda n: said("user", n)),
        (lambda n: said("tool", n)),
    )
    found, _ = cuts(tmp_path / "1", [u(40), a(50), u(40), a(50), t(40), a(50), u(40)])
    assert [start for start, _, _ in found] == [0, 90]  # not at 180, the tool's
    found, apart = cuts(tmp_path / "2", [u(40), a(60), t(60), a(60), t(60), a(60)])
    assert [start for start, _, _ in found] == [
        0,
        220,
    ] and not apart  # the tool's, not at 160, the assistant's before
    found, apart = cuts(tmp_path / "3", [said("system", 30), u(40), a(400)])  # not at 30, not at 70
    assert found[0][:2] == (0, 256) and not apart
    found, apart = cuts(tmp_path / "4", [u(40), a(400)], documents={"long_answers": "untrained"})
    header = len("<assistant>")
    assert found == [(0, 256, 216 - header)] and apart == 440 - 256


def test_a_question_that_fills_a_piece_leaves_its_answer_untrained(tmp_path):
    """The cut falls between them, or into what opens the answer, which is longer than a row,
    too."""
    for size in (256, 252):
        messages = [said("user", size), said("assistant", 300)]
        found, apart = cuts(
            tmp_path / str(size), [*messages, said("user", 30), said("assistant", 30)]
        )
        of = parts(messages)
        assert [start for start, _, _ in found][0] >= 256
        assert apart == min(512, of[1][3]) - of[1][2]


def test_a_document_all_of_whose_answers_are_apart_is_a_reject(tmp_path):
    conversations = [
        [said("user", 256), said("assistant", 100)],
        [said("user", 40), said("assistant", 40)],
    ]
    _, ledger, _ = built(tmp_path, conversations, seq_length=256)
    assert ledger["documents"]["rejected"] == {"untrained": 1} and ledger["documents"]["used"] == 1
    assert ledger["tokens"]["dropped"] == {"untrained_segment": 356}
    assert ledger["tokens"]["answers_apart"] == 100 - len("<assistant>")
