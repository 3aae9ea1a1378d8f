import json
import re
import shutil

import numpy as np
import pytest
from rich.cells import cell_len

from packprep.dataset.loader import open_dataset
from packprep.dataset.shard import open_shard
from packprep.errors import ArgumentError, DatasetError, PackprepError, RecipeError
from packprep.format.digests import digest_of
from packprep.inspection.row import describe_row, describe_segment, print_row, print_segment
from packprep.inspection.terminal import WIDTH
from packprep.tokenizer.file import bytes_tokenizer_json
from tests import command_line
from tests.conversations import chats_made
from tests.dataset.synthetic import make_dataset, replace_in_manifest
from tests.inspection import datasets_made
from tests.inspection.conftest import built, write_corpus
from tests.tokenizer import tokenizers_made
from tests.weights_made import TASKS, build


def ids_and_loss(segment, name=None):
    pieces = [
        piece
        for part in segment["parts"]
        if name in (None, part["name"])
        for piece in part["pieces"]
    ]
    return [id for piece in pieces for id in piece["ids"]], [
        bit for piece in pieces for bit in piece["loss"]
    ]


def test_every_token_of_every_row_is_shown_with_its_loss(dataset):
    ds = open_dataset(dataset)
    for r in range(len(ds)):
        shown, row = describe_row(dataset, r, {}, True), ds.row(r)
        assert (
            shown["row"] == r
            and shown["rows"] == len(ds)
            and len(shown["segments"]) == row.n_segments
        )
        assert shown["slots"] + shown["padding"] == ds.seq_length and shown[
            "slots"
        ] == np.count_nonzero(row.segment_ids)
        assert (
            shown["trained"]
            == row.loss_mask.sum()
            == sum(segment["trained"] for segment in shown["segments"])
        )
        for i, segment in enumerate(shown["segments"]):
            own = row.segment_ids == i + 1
            ids, loss = ids_and_loss(segment)
            assert ids == row.tokens[own].tolist() and loss == row.loss_mask[own].tolist()
            assert segment["slots"] == own.sum() and segment["begin"] == np.flatnonzero(own)[0]


def test_a_row_in_an_epoch_is_what_redraw_gives(tmp_path, capsys):
    write_corpus(tmp_path)
    built(tmp_path, "out", tasks=[{"objective": "span_corruption"}])
    out = tmp_path / "out"
    row = open_dataset(out).row(0, epoch=2)
    shown, stored = describe_row(out, 0, {}, epoch=2), describe_row(out, 0, {})
    assert (
        shown["epoch"] == 2
        and shown["trained"] == row.loss_mask.sum()
        and shown["segments"] != stored["segments"]
    )
    for i, segment in enumerate(shown["segments"]):
        assert ids_and_loss(segment)[0] == row.tokens[row.segment_ids == i + 1].tolist()
    print_row(shown)
    assert "· epoch 2" in capsys.readouterr().out.splitlines()[0]
    print_segment(describe_segment(out, 0, 1, {}, epoch=2))
    assert "· epoch 2" in capsys.readouterr().out.splitlines()[0]
    print_row(stored)
    assert "epoch" not in capsys.readouterr().out


def test_a_segment_says_where_it_comes_from(dataset):
    ds = open_dataset(dataset)
    plan = json.loads((dataset / "plan.json").read_text())
    for r in range(len(ds)):
        row = ds.row(r)
        for i, segment in enumerate(describe_row(dataset, r, {}, True)["segments"]):
            header = {name: values[i].item() for name, values in row.segments.items()}
            assert segment["task"] == ds.tasks[header["task"]]["name"]
            assert segment["source"] == ds.manifest["sources"][header["source"]]["name"]
            assert segment["file"] == plan["files"][header["file"]]["name"]
            assert segment["document"] == header["doc"]
            assert (segment["start"], segment["tokens"]) == (header["start"], header["tokens"])
            assert (segment["prefix"], segment["repeat"]) == (header["prefix"], header["repeat"])
            assert int(segment["key"], 16) == header["key"]


def test_the_text_of_a_causal_segment_is_the_documents(folder):
    documents = {}
    for name in "ab":
        data = (folder / "corpus" / f"{name}.jsonl").read_bytes()
        at = 0
        for line in data.splitlines(keepends=True):
            documents[name, at] = json.loads(line).get("text", "").encode()
            at += len(line)
    seen = 0
    for r in range(len(open_dataset(folder / "causal"))):
        for segment in describe_row(folder / "causal", r, {}, True)["segments"]:
            content = bytes(id for id in ids_and_loss(segment)[0] if id < 256)
            document = documents[segment["source"], segment["document"]]
            assert content == document[segment["start"] : segment["start"] + segment["tokens"]]
            kinds = [
                piece["text"]
                for piece in segment["parts"][0]["pieces"]
                if piece["kind"] == "special"
            ]
            starts, ends = (
                segment["start"] == 0,
                segment["start"] + segment["tokens"] == len(document),
            )
            assert kinds == ["<bos>"] * starts + ["<eos>"] * ends
            if starts and ends:
                texts = [
                    piece["text"]
                    for piece in segment["parts"][0]["pieces"]
                    if piece["kind"] == "text"
                ]
                assert "".join(texts).encode() == document
            seen += 1
    assert seen > 40


def test_inputs_and_targets_are_apart(folder):
    names = set()
    for r in range(len(open_dataset(folder / "ul2r"))):
        for segment in describe_row(folder / "ul2r", r, {}, True)["segments"]:
            parts = [part["name"] for part in segment["parts"]]
            names.add((segment["objective"], *parts))
            if len(parts) == 2:
                ids, loss = ids_and_loss(segment, parts[0])
                assert len(ids) == segment["prefix"]
                assert loss == [0] * (segment["prefix"] - 1) + [1]
                assert ids_and_loss(segment, parts[1])[1][-1] == 0
    assert names >= {
        ("span_corruption", "inputs", "targets"),
        ("prefix_lm", "prefix", "continuation"),
    }


@pytest.mark.long
def test_the_padding_inside_and_after_segments_is_counted(folder):
    inside = 0
    for r in range(len(open_dataset(folder / "causal"))):
        row = describe_row(folder / "causal", r, {}, True)
        for segment, following in zip(row["segments"], row["segments"][1:], strict=False):
            assert following["begin"] == segment["begin"] + segment["slots"] + segment["padding"]
            assert following["begin"] % 8 == 0
            inside += segment["padding"]
    assert inside


@pytest.mark.long
def test_minus_one_is_the_first_row_that_shows_the_most_tasks(folder):
    ds = open_dataset(folder / "ul2r")
    declared = {task["name"] for task in ds.tasks if task["weight"]}
    of_row = [
        {ds.tasks[t]["name"] for t in ds.row(r).segments["task"]} & declared for r in range(len(ds))
    ]
    most = max(map(len, of_row))
    row = describe_row(folder / "ul2r", -1, {}, True)
    assert row["row"] == [len(tasks) for tasks in of_row].index(most)
    assert set(row["lacks"]) == declared - of_row[row["row"]]
    assert describe_row(folder / "ul2r", row["row"], {}, True)["lacks"] == []


def test_a_row_is_plain_json(dataset):
    row = describe_row(dataset, 0, {}, True)
    assert json.loads(json.dumps(row)) == row


@pytest.mark.long
def test_print_row_prints_what_json_has_gone_through(dataset, capsys):
    row = describe_row(dataset, 0, {}, True)
    print_row(row)
    first = capsys.readouterr().out
    print_row(json.loads(json.dumps(row)))
    assert capsys.readouterr().out == first and "\x1b" not in first


PICTURES = str.maketrans(
    {
        10: "↵",
        9: "⇥",
        13: "⇤",
        0: "\\u{0}",
        127: "\\u{7f}",
        0x200B: "\\u{200b}",
        0x200D: "\\u{200d}",
    }
)


def printed_parts(row, out):
    """[(name, text, marks)] of the parts that were printed, their lines joined, a mark for each
    cell of the text."""
    wanted = [part["name"] for segment in row["segments"] for part in segment["parts"]]
    gutter = max(map(len, wanted)) + 4
    parts, lines = [], out.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        name = line[:gutter].strip()
        if len(parts) < len(wanted) and name == wanted[len(parts)] and line.startswith("  "):
            parts.append([name, "", ""])
        elif not parts or name or not line or is_marks(line):
            continue
        marks = following[gutter:] if is_marks(following) else ""
        assert cell_len(line) <= WIDTH
        assert len(marks) <= cell_len(line) - gutter
        parts[-1][1] += line[gutter:]
        parts[-1][2] += marks.ljust(cell_len(line) - gutter)
    return [tuple(part) for part in parts]


def is_marks(line):
    return re.fullmatch(r" *[\^.+~ ]+", line) is not None


def expected_part(part):
    """(text, marks) of a part that is not shortened."""
    drawn = []  # [text, loss, kind] of what a terminal draws in one place
    for piece in part["pieces"]:
        special = piece["kind"] == "special"
        shown = f"‹{piece['text'][1:-1]}›" if special else piece["text"].translate(PICTURES)
        before = drawn[-1][0] if drawn else ""
        if cell_len(shown[0]) == 0 or (
            not shown.isascii() and cell_len(before + shown) < cell_len(before) + cell_len(shown)
        ):
            if drawn and drawn[-1][2] == piece["kind"]:
                drawn[-1][0] += shown
                drawn[-1][1] += piece["loss"]
                continue
            if cell_len(shown[0]) == 0:
                shown = f"\\u{{{ord(shown):x}}}"
        drawn.append([shown, list(piece["loss"]), piece["kind"]])
    marks = ""
    for shown, loss, _ in drawn:
        mark = "^" if all(loss) else "+" if any(loss) else "."
        marks += mark + (" " if mark == "." else "~") * (cell_len(shown) - 1)
    return "".join(shown for shown, _, _ in drawn), marks


def test_marks_stand_under_the_right_characters(dataset, capsys):
    seen = ""
    for r in range(len(open_dataset(dataset))):
        row = describe_row(dataset, r, {}, True)
        print_row(row)
        printed = printed_parts(row, capsys.readouterr().out)
        parts = [part for segment in row["segments"] for part in segment["parts"]]
        assert [name for name, _, _ in printed] == [part["name"] for part in parts]
        for (_, text, marks), part in zip(printed, parts, strict=True):
            if "tokens …" not in text:
                assert (text, marks) == expected_part(part)
                seen += text
    assert {"日", "ż", "👍", "한", "↵", "e\u0301"} <= set(seen) | {
        seen[i : i + 2] for i in range(len(seen))
    }


def test_long_segments_are_shortened_and_the_count_is_right(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    text = "abcdefghi " * 150
    (tmp_path / "corpus" / "long.jsonl").write_text(json.dumps({"text": text}) + "\n")
    built(tmp_path, "long", seq_length=2048, tasks=[{"preset": "causal"}])
    row = describe_row(tmp_path / "long", 0, {}, True)
    print_row(row)
    [(_, printed, _)] = printed_parts(row, capsys.readouterr().out)
    head, left_out, tail = re.fullmatch(r"(.*?)… ([\d,]+) tokens …(.*)‹eos›", printed).groups()
    assert len(head) + int(left_out.replace(",", "")) + len(tail) == len(text)
    assert text.startswith(head) and text.endswith(tail) and len(head) == 3 * (WIDTH - 8)
    assert len(ids_and_loss(row["segments"][0])[0]) == len(text) + 1


@pytest.mark.parametrize("objective", ["causal", "prefix_lm"])
def test_of_a_conversation_its_calls_results_and_what_is_trained_are_shown(
    tmp_path, capsys, objective
):
    city = "A city in Ελλάδα, or any other place on Earth that has weather. " * 20
    function = {
        "name": "get_weather",
        "description": city,
        "parameters": {"type": "object", "properties": {}},
    }
    messages = [
        {"role": "system", "content": "Answer in one sentence. " * 30},
        *chats_made.turns("Athens, and is it warm? " * 20),
        chats_made.calls(("get_weather", {"city": "Αθήνα"}), ("get_weather", {"city": "Rome"})),
        chats_made.result('{"degrees": 31}'),
        chats_made.result('{"degrees": 24}'),
        {"role": "assistant", "content": "It is 31 degrees in Athens. " * 20},
    ]
    record = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "chats.jsonl").write_text(json.dumps(record) + "\n", "utf-8")
    (tmp_path / "chat.jinja").write_text(chats_made.THINKING, "utf-8")
    documents = {"chat_template": "chat.jinja", "append_eos": False}
    built(tmp_path, "chats", seq_length=4096, tasks=[{"preset": objective}], documents=documents)
    row = describe_row(tmp_path / "chats", 0, {}, True)
    print_row(row)
    out = capsys.readouterr().out
    parts = printed_parts(row, out)
    text, marks = ("".join(part[k] for part in parts) for k in (1, 2))
    first, *others = (text[m.start() + 1 : m.end() + 1] for m in re.finditer(r"[\^~+]+", marks))
    calls = (
        f'{{"name": "get_weather", "arguments": {{"city": "{name}"}}}}'
        for name in ("Αθήνα", "Rome")
    )
    assert first == "↵".join(f"<tool_call>↵{call}↵</tool_call>" for call in calls) + "<|im_end|>↵"
    assert others[0].startswith("<think>↵↵</think>↵↵It is 31") and others[-1].endswith(
        "in Athens. <|im_end|>↵"
    )
    assert (
        '<tool_response>↵{"degrees": 31}↵</tool_response>↵<tool_response>↵{"degrees": 24}' in text
    )
    assert "--segment K shows a complete segment" in out


def test_of_many_segments_the_first_are_printed_and_one_of_each_task(folder, capsys):
    row = describe_row(folder / "ul2r", -1, {}, True)
    tasks = {segment["task"] for segment in row["segments"]}
    first = next(
        segment for segment in row["segments"] if segment["task"] != row["segments"][-1]["task"]
    )
    print_row({**row, "segments": [first] * 50 + row["segments"]})
    out = capsys.readouterr().out
    assert (
        f"… and {50 + len(row['segments']) - 24 - len(tasks - {first['task']})} more segments;"
        " --json lists all" in out
    )
    assert all(f"  {task}" in out for task in tasks)


def test_rows_are_rebuilt_from_their_source(dataset):
    for r in range(len(open_dataset(dataset))):
        assert {
            segment["rebuilt"] for segment in describe_row(dataset, r, {}, True)["segments"]
        } == {"identical"}


@pytest.fixture
def apart(folder, tmp_path):
    """A copy of a dataset whose sources are not where its plan says, and the folder where they
    are."""
    here = tmp_path / "here"
    shutil.copytree(folder / "corpus", here / "corpus")
    built(here, "causal", tasks=[{"preset": "causal"}])
    (here / "corpus").rename(tmp_path / "moved")
    return here / "causal", tmp_path / "moved"


def test_sources_that_moved_are_found_by_their_name(apart, capsys):
    dataset, moved = apart
    row = describe_row(dataset, 0, {}, True)
    assert all(
        segment["rebuilt"].startswith("not rebuilt: ") and "missing" in segment["rebuilt"]
        for segment in row["segments"]
    )
    print_row(row)
    assert "not rebuilt: " in capsys.readouterr().out
    row = describe_row(dataset, 0, {"source0": str(moved)})
    assert {segment["rebuilt"] for segment in row["segments"]} == {"identical"}
    print_row(row)
    assert "rebuilt from source: identical" in capsys.readouterr().out


@pytest.mark.long
def test_one_missing_file_leaves_the_segments_of_others(apart):
    dataset, moved = apart
    (moved / "b.jsonl").unlink()
    for r in range(len(open_dataset(dataset))):
        for segment in describe_row(dataset, r, {"source0": str(moved)})["segments"]:
            assert (segment["rebuilt"] == "identical") == (segment["file"] == "a.jsonl")


def test_a_source_that_changed_differs(apart):
    dataset, moved = apart
    for file in moved.iterdir():
        file.write_bytes(
            file.read_bytes().replace(b"The", b"Tha").replace(b"combining", b"cambining")
        )
    rebuilt = {
        segment["rebuilt"].split(":")[0]
        for r in range(len(open_dataset(dataset)))
        for segment in describe_row(dataset, r, {"source0": str(moved)})["segments"]
    }
    assert rebuilt == {"identical", "differs"}


def test_an_unknown_source_is_refused(dataset):
    with pytest.raises(RecipeError, match="no source of that name; it has (source0|a, b)$"):
        describe_row(dataset, 0, {"web": "/nowhere"})


@pytest.mark.parametrize("row", [-2, 10**6])
def test_a_row_that_there_is_not_is_refused(folder, row):
    with pytest.raises(ArgumentError, match=rf"row {row}: .* rows\nhint: give 0 … \d+, or −1"):
        describe_row(folder / "ul2r", row, {}, True)


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="is not a dataset, or its build is not finished"):
        describe_row(tmp_path, 0, {}, True)


@pytest.mark.parametrize("change", ["missing", "other"])
def test_a_tokenizer_that_is_not_the_datasets_is_refused(folder, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(folder / "causal", copy)
    path = copy / "tokenizer.json"
    path.unlink() if change == "missing" else path.write_text("{}")
    with pytest.raises(PackprepError, match=r"(?s)tokenizer\.json.*\nhint: restore the "):
        describe_row(copy, 0, {}, True)


def test_without_a_plan_rows_are_shown_and_not_rebuilt(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder / "causal", copy)
    (copy / "plan.json").unlink()
    segment = describe_row(copy, 0, {}, True)["segments"][0]
    assert segment["file"].startswith("file ") and segment["rebuilt"].startswith("not rebuilt: ")


def with_tokenizer(directory, **options):
    """A synthetic dataset with the bytes' tokenizer."""
    make_dataset(directory, **options)
    data = bytes_tokenizer_json()
    (directory / "tokenizer.json").write_bytes(data)
    replace_in_manifest(directory, tokenizer={"file": "tokenizer.json", "digest": digest_of(data)})
    return open_dataset(directory)


def test_segments_that_predict_in_place_show_inputs_and_labels(tmp_path, capsys):
    ds = with_tokenizer(tmp_path, in_place=True, blocks=True, pad_to=4)
    seen = {}
    for r in range(len(ds)):
        shown, row = describe_row(tmp_path, r, {}, True), ds.row(r)
        assert json.loads(json.dumps(shown)) == shown
        for i, segment in enumerate(shown["segments"]):
            own = row.segment_ids == i + 1
            names = seen[segment["task"]] = [part["name"] for part in segment["parts"]]
            assert segment["noise"] == row.segments["noise"][i]
            if segment["task"] == "masked":
                assert names == ["inputs", "labels"] and segment["predicts"] == "in place"
                assert ids_and_loss(segment, "inputs") == (
                    row.tokens[own].tolist(),
                    row.loss_mask[own].tolist(),
                )
                assert ids_and_loss(segment, "labels") == (
                    row.labels[own].tolist(),
                    row.loss_mask[own].tolist(),
                )
            else:
                assert ids_and_loss(segment) == (
                    row.tokens[own].tolist(),
                    row.loss_mask[own].tolist(),
                )
    assert seen["bd3"] == ["x_t", "x_0"] and seen["causal"] == ["text"]
    print_row(describe_row(tmp_path, 0, {}, True))
    assert "loss weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("array", "value", "match"),
    [
        ("segment_task", 9, r"segment_task 9 is (beyond|out of range)"),
        ("segment_source", 9, r"segment_source 9 is out of range: the manifest has 3"),
        ("row_offsets", 999, "row_offsets"),
        ("cu_seqlens", 999, "cu_seqlens"),
    ],
)
@pytest.mark.parametrize("row", [0, -1])
def test_a_damaged_header_is_refused_and_not_indexed_with(tmp_path, array, value, match, row):
    ds = with_tokenizer(tmp_path)
    shard = ds.row(0)._shard
    at = shard.data_begin
    for name, (dtype, shape) in shard.layout.items():
        if name == array:
            break
        at += dtype.itemsize * int(np.prod(shape))
    with open(shard.path, "r+b") as file:
        file.seek(at + dtype.itemsize * (1 if array in ("row_offsets", "cu_seqlens") else 0))
        file.write(np.array([value], dtype).tobytes())
    with pytest.raises(DatasetError, match=match):
        describe_row(tmp_path, row, {}, True)
        describe_row(tmp_path, 0, {}, True)


def test_colour_is_for_terminals(dataset, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    row = describe_row(dataset, 0, {}, True)
    print_row(row)
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    print_row(row)
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured and re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


@pytest.mark.long
def test_rows_of_other_tokenizers_are_shown(folder, tmp_path):
    write_corpus(tmp_path)
    tokenizers_made.write(tmp_path / "tok", tokenizers_made.byte_level("<|end|>", "<|pad|>"))
    built(
        tmp_path,
        "bpe",
        tokenizer="tok",
        tasks=[{"preset": "t5"}],
        specials={"missing": "add", "sentinels": "auto", "eos": "<|end|>", "pad": "<|pad|>"},
    )
    ds = open_dataset(tmp_path / "bpe")
    texts = ""
    for r in range(len(ds)):
        for i, segment in enumerate(describe_row(tmp_path / "bpe", r, {}, True)["segments"]):
            assert (
                ids_and_loss(segment)[0]
                == ds.row(r).tokens[ds.row(r).segment_ids == i + 1].tolist()
            )
            assert segment["rebuilt"] == "identical"
            texts += "".join(piece["text"] for part in segment["parts"] for piece in part["pieces"])
    assert "<extra_id_0>" in texts and "<|end|>" in texts and " mat" in texts and "漢" in texts


def some_segments(known, most=40):
    """Segments of every task."""
    every = datasets_made.segments(known)
    first = {segment["task"]["name"]: segment for segment in reversed(every)}
    return [*first.values(), *every[:: max(1, len(every) // most)]]


@pytest.mark.alike(12)
@pytest.mark.parametrize("epoch", [0, (1 << 32) + 5, 3])
def test_the_original_is_the_documents_text_and_its_slots_hold_it(known, epoch):
    seen = set()
    for segment in some_segments(known):
        described = describe_segment(known.out, segment["row"], segment["segment"], {}, True, epoch)
        own = described["segment"]
        ids = [id for piece in own["original"] for id in piece["ids"]]
        slots = [slot for piece in own["original"] for slot in piece["slots"]]
        assert bytes(ids) == segment["text"] and own["fits"] is True and own["not_restored"] is None
        row = known.dataset.row(segment["row"], epoch)
        values = row.labels if own["predicts"] == "in place" else row.tokens
        assert values[slots].tolist() == ids and len(set(slots)) == len(slots)
        assert segment["slots"][0] <= min(slots) and max(slots) < segment["slots"][1]
        assert own["rebuilt"] == "identical" and described["segments"] == row.n_segments
        seen.add(own["objective"])
    assert seen == {
        task["objective"] for s in datasets_made.segments(known) for task in [s["task"]]
    }


@pytest.mark.long
@pytest.mark.alike(5)
@pytest.mark.parametrize("epoch", [0, 3])
def test_a_segment_of_its_row_is_the_same_but_for_the_original(known, epoch):
    row = describe_row(known.out, 0, {}, True, epoch)
    for number, segment in enumerate(row["segments"], 1):
        described = describe_segment(known.out, 0, number, {}, True, epoch)
        assert {key: described["segment"][key] for key in segment} == segment and described[
            "epoch"
        ] == epoch


@pytest.mark.alike(5)
@pytest.mark.parametrize("epoch", [0, 3])
def test_each_sentinel_stands_for_its_span(known, epoch):
    spans = 0
    for segment in [
        s for s in datasets_made.segments(known) if s["task"]["objective"] == "span_corruption"
    ][:40]:
        own = describe_segment(known.out, segment["row"], segment["segment"], {}, True, epoch)[
            "segment"
        ]
        tokens = known.dataset.row(segment["row"], epoch).tokens
        begin, end = segment["slots"]
        targets = begin + own["prefix"]
        sentinels = [slot for slot in range(targets, end) if tokens[slot] >= 266]
        assert sorted(span["target_slot"] for span in own["spans"]) == sentinels
        for span in own["spans"]:
            assert tokens[span["input_slot"]] == tokens[span["target_slot"]] >= 266
            assert span["sentinel"] == f"<extra_id_{tokens[span['target_slot']] - 266}>"
            assert begin <= span["input_slot"] < targets
            a, b = (at - segment["tokens"][0] for at in span["tokens"])
            held = tokens[span["target_slot"] + 1 : span["target_slot"] + 1 + b - a]
            assert bytes(held.tolist()) == segment["text"][a:b]
            spans += 1
    assert spans or known.recipe["packing" if "packing" in known.recipe else "tasks"] == {
        "algorithm": "concat"
    }


@pytest.mark.long
def test_it_is_printed_whole(known, capsys):
    """Nothing is left out, however long it is."""
    longest = max(datasets_made.segments(known), key=lambda s: s["slots"][1] - s["slots"][0])
    described = describe_segment(known.out, longest["row"], longest["segment"], {}, True)
    assert json.loads(json.dumps(described)) == described
    print_segment(json.loads(json.dumps(described)))
    out = capsys.readouterr().out
    assert (
        not re.search(r"… [\d,]+ tokens …", out)
        and "rebuilt from source: identical" in out
        and "\x1b" not in out
    )
    assert f"segment {longest['segment']} of {described['segments']}" in out


@pytest.mark.long
@pytest.mark.alike(4)
def test_what_the_original_is_shows_only_where_the_slots_do_not(known, capsys):
    for segment in some_segments(known, 10):
        described = describe_segment(known.out, segment["row"], segment["segment"], {}, True)
        print_segment(described)
        shown = "  original" in capsys.readouterr().out
        if segment["task"]["objective"] == "span_corruption":
            assert shown
        if segment["task"]["objective"] in (
            "causal",
            "masked_diffusion",
            "block_diffusion",
            "uniform_diffusion",
        ):
            assert not shown


@pytest.mark.parametrize("number", [0, -1, 10_000])
def test_a_segment_that_there_is_not_is_refused(folder, number):
    with pytest.raises(
        ArgumentError, match=rf"segment {number}: row 0 of .* has \d+ segments\nhint: give 1 … \d+"
    ):
        describe_segment(folder / "ul2r", 0, number, {}, True)


@pytest.mark.long
def test_without_a_plan_it_is_shown_and_not_restored(folder, tmp_path, capsys):
    shutil.copytree(folder / "ul2r", tmp_path / "copy")
    (tmp_path / "copy" / "plan.json").unlink()
    described = describe_segment(tmp_path / "copy", 0, 1, {}, True)
    assert (
        described["segment"]["original"] is None
        and "no plan.json" in described["segment"]["not_restored"]
    )
    print_segment(described)
    assert "original: not restored: " in capsys.readouterr().out


def test_a_sentinel_that_is_not_there_is_said(folder, tmp_path, capsys):
    shutil.copytree(folder / "ul2r", tmp_path / "copy")
    copy = tmp_path / "copy"
    row, number, slot = next(
        (r, segment["number"], described["segment"]["spans"][0]["target_slot"])
        for r in range(8)
        for segment in describe_row(copy, r, {}, True)["segments"]
        if segment["objective"] == "span_corruption"
        for described in [describe_segment(copy, r, segment["number"], {}, True)]
    )
    shards = json.loads((copy / "dataset.json").read_text())["shards"]
    shard = 0
    while row >= shards[shard]["rows"]:
        row, shard = row - shards[shard]["rows"], shard + 1
    whole = row + sum(entry["rows"] for entry in shards[:shard])
    path = copy / shards[shard]["file"]
    data = bytearray(path.read_bytes())
    at = open_shard(path, 256, "uint16").begins["tokens"] + 2 * (row * 256 + slot)
    data[at : at + 2] = b"a\0"
    path.write_bytes(data)
    described = describe_segment(copy, whole, number, {}, True)
    assert described["segment"]["fits"] is False and described["segment"]["rebuilt"].startswith(
        "differs"
    )
    print_segment(described)
    assert "its sentinels do not match its header" in capsys.readouterr().out


@pytest.mark.long
def test_as_it_is_typed(folder):
    said = command_line.packprep("inspect", folder / "ul2r", "--row", 0, "--segment", 1)
    assert said.status == 0 and said.out.startswith("row 0 of ")
    assert (
        command_line.inside("inspect", folder / "ul2r", "--row", -1, "--segment", 1, "--json").json[
            "segment"
        ]["number"]
        == 1
    )
    assert "give --row R too" in command_line.refused("inspect", folder / "ul2r", "--segment", 1)


def test_weights_of_what_is_trained_are_shown_where_they_are_not_1(tmp_path, capsys):
    spans = [[12, 20, 0.5], [20, 30, 2], [30, 36]]
    lines = [
        {"text": "What is it? It is a test of weights.", "loss_spans": spans},
        {"text": "abc", "loss_spans": [[1, 2]]},
    ]
    build(tmp_path, lines, [TASKS["causal"]], seq_length=64)
    row = describe_row(tmp_path / "out", 0, {})
    assert [segment["weights"] for segment in row["segments"]] == [
        [[12, 20, 0.5], [20, 30, 2.0]],
        [],
    ]
    print_row(row)
    (line,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "weights" in line and "slots" in line
    ]
    assert line == "  weights 0.5 in slots 12 … 19, 2 in slots 20 … 29; otherwise 1"
    many = [[i, i + 1, 2 + i] for i in range(11)]
    build(
        tmp_path / "many",
        [{"text": "a" * 40, "loss_spans": many}],
        [TASKS["causal"]],
        seq_length=64,
    )
    print_row(describe_row(tmp_path / "many" / "out", 0, {}))
    assert ", and 3 more; otherwise 1" in " ".join(capsys.readouterr().out.split())
