"""One damage for each promise, signed again, that breaks it alone: `verify` names that promise and
the place."""

import json
import shutil

import numpy as np
import pytest

from packprep.building import plan as plans
from packprep.building.plan import open_plan
from packprep.format.digests import digest_of
from packprep.format.json_files import rejects_name, shard_name
from packprep.randomness import segment_key, text_key
from packprep.restoring import stored_segments
from packprep.verification import PROMISES
from packprep.verification.arrays import check_arrays, check_layout
from packprep.verification.faults import MAX_LISTED, Faults
from tests import made as builds
from tests import media_made
from tests.golden.datasets import LAW3
from tests.verification.damage import (
    arrays_of,
    copied,
    edit_manifest,
    edit_receipt,
    faults_of,
    made,
    manifest_of,
    places_of,
    promises_of,
    put_shard,
    resigned,
    segments_of,
    write_corpus,
)

SHARD, RECEIPT = "shards/000/000000.safetensors", "receipts/000/000000.json"
PAD, BOS, EOS, NLU, FIRST_SENTINEL = 256, 257, 258, 260, 266
VOCAB_SIZE = 528


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """No bos, no padding inside segments; with rejects."""
    return made(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """With bos, and segments padded to a multiple of 8."""
    return made(
        tmp_path_factory.mktemp("padded"),
        packing={"pad_seq_to_mult": 8},
        documents={"prepend_bos": True},
        seed=3,
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """In-place tasks beside next-token ones, and a source of documents with loss_spans."""
    folder = tmp_path_factory.mktemp("mixed")
    write_corpus(folder / "in")
    records = [
        {
            "text": "ask " * (3 + i % 40) + "answer " * 9,
            "loss_spans": [[12 + i, 19 + i], [30 + i, 40 + i]],
        }
        for i in range(60)
    ]
    (folder / "in/spans.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    paths = {"web": "web/*.jsonl", "books": "books.jsonl.zst", "spans": "spans.jsonl"}
    presets = ("mlm", "mdlm", "duo", "bd3", "fim", "prefix_lm", "causal")
    return made(
        folder,
        sources=[{"name": name, "paths": [path]} for name, path in paths.items()],
        tasks=[{"preset": preset} for preset in presets],
    )


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Block diffusion of documents with answers; eos fill up the last block of each."""
    folder = tmp_path_factory.mktemp("filled")
    write_corpus(folder / "in")
    write_answers(folder / "in/spans.jsonl")
    blocks = {
        "objective": "block_diffusion",
        "block_length": 8,
        "block_origin": "answer",
        "eos_fill": "block",
    }
    return made(
        folder,
        sources=[{"name": "spans", "paths": ["spans.jsonl"]}],
        tasks=[
            {"name": "answers", **blocks},
            {"name": "grid", **blocks, "block_origin": "segment"},
            {"name": "unfilled", **blocks, "eos_fill": "none"},
            {"name": "all", **blocks, "noise": "all"},
        ],
        documents={"prepend_bos": True},
        output={"shard_text_bytes": 6000},
    )


def write_answers(path):
    """Documents of 42 to 71 bytes with two answers, of which the second ends the document."""
    records = []
    for i in range(300):
        text = "ask " * (3 + i % 8) + "answer." + " and ask" + " so answer."
        end = 12 + i % 8 * 4
        records.append({"text": text, "loss_spans": [[end, end + 7], [end + 15, len(text)]]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def filled_directory(filled, tmp_path):
    return copied(filled, tmp_path)


@pytest.fixture
def mixed_directory(mixed, tmp_path):
    return copied(mixed, tmp_path)


@pytest.fixture
def directory(plain, tmp_path):
    return copied(plain, tmp_path)


@pytest.fixture
def padded_directory(padded, tmp_path):
    return copied(padded, tmp_path)


def assert_only(faults, promise, file=SHARD, row=None, slot=None, value=None, words=""):
    """There is one fault: of this promise, in this place."""
    assert [(f["promise"], f["file"], f["row"], f["slot"], f["value"]) for f in faults] == [
        (promise, file, row, slot, value)
    ], faults
    assert words in faults[0]["message"]


def long_segment(directory, arrays, *tasks, row=None):
    """(segment, row, begin, end) of the first segment of the tasks with at least 20 slots."""
    rows, begin, end = places_of(arrays)
    for g in segments_of(directory, arrays, *tasks):
        if end[g] - begin[g] >= 20 and row in (None, rows[g]):
            return int(g), int(rows[g]), int(begin[g]), int(end[g])
    raise AssertionError("no such segment in this shard")


def padding_of(arrays):
    """(row, slot) of the first slot of padding."""
    row, slot = np.argwhere(arrays["segment_ids"] == 0)[0]
    return int(row), int(slot)


def test_a_good_dataset_has_no_faults(plain, padded, mixed, filled):
    for dataset in (plain, padded, mixed, filled):
        assert faults_of(dataset) == []
        assert faults_of(dataset, replay=-1) == []


def test_a_signed_copy_has_no_faults(directory):
    with resigned(directory):
        pass
    assert faults_of(directory) == []


def test_every_promise_has_a_number_and_words():
    assert list(PROMISES) == [f"P{i + 1}" for i in range(25)]


# P1, P2


def test_p1_a_file_with_another_digest(directory):
    path = directory / rejects_name(0)
    path.write_bytes(path.read_bytes().replace(b"missing_text", b"missing_tixt"))
    (fault,) = [f for f in faults_of(directory) if f["promise"] == "P1"]
    assert fault["file"] == "rejects/000/000000.jsonl" and "its digest is" in fault["message"]


def test_p2_manifest_and_receipt_disagree(directory):
    edit_manifest(directory, lambda manifest: manifest["shards"][0].update(tokens=5))
    assert_only(
        faults_of(directory),
        "P2",
        RECEIPT,
        value=_tokens_of(directory),
        words="tokens should be 5",
    )


def _tokens_of(directory):
    return int(arrays_of(directory)["segment_tokens"].sum())


@pytest.mark.parametrize(
    "key, value",
    [
        ("pad_id", 255),
        ("vocab_size", 529),
        ("seq_length", 512),
        ("specials", {"eos": 0}),
        ("added_tokens", [{"id": 5, "text": "x", "role": None}]),
        ("fingerprint", "0" * 32),
        ("engine", {"name": "other"}),
        ("made_with", {}),
        ("recipe", {}),
        ("token_dtype", "int32"),
    ],
)
def test_p2_manifest_and_plan_disagree(directory, key, value):
    edit_manifest(directory, lambda manifest: manifest.update({key: value}))
    assert_only(faults_of(directory), "P2", "dataset.json", words=f"{key} differs from the plan")


def test_p2_a_task_table_that_is_not_the_plans(directory):
    edit_manifest(directory, lambda manifest: manifest["tasks"][0].update(name="q"))
    assert_only(faults_of(directory), "P2", "dataset.json", words="tasks differs")


def test_p2_a_receipt_of_another_plan(directory):
    edit_receipt(directory, lambda receipt: receipt.update(plan_digest="0" * 32))
    assert_only(faults_of(directory), "P2", RECEIPT, value="0" * 32)


def test_p2_a_receipt_that_counts_other_rejects(directory):
    edit_receipt(directory, lambda receipt: receipt["rejects"].update(documents=99))
    assert_only(faults_of(directory), "P2", rejects_name(0), value=99)


@pytest.mark.parametrize("key", ["rejects", "text_digests"])
@pytest.mark.parametrize("value", [[], 3, {"web": 1}, "x"])
def test_p2_a_receipt_whose_parts_are_none(directory, key, value):
    edit_receipt(directory, lambda receipt: receipt.update({key: value}))
    for replay in (None, 5, -1):
        assert_only(faults_of(directory, replay), "P2", RECEIPT, words="rejects or text_digests")


# P3


def test_p3_an_array_too_many(directory):
    with resigned(directory) as arrays:
        arrays["labels"] = np.array(arrays["tokens"])
    assert_only(faults_of(directory), "P3", words="array 'labels' is present")


def test_p3_an_array_too_few(padded_directory):
    with resigned(padded_directory) as arrays:
        del arrays["cu_seqlens_padded"]
    assert_only(faults_of(padded_directory), "P3", words="array 'cu_seqlens_padded' is missing")


def test_p3_padded_offsets_in_a_dataset_without(directory):
    with resigned(directory) as arrays:
        arrays["cu_seqlens_padded"] = np.array(arrays["cu_seqlens"])
    assert_only(faults_of(directory), "P3", words="array 'cu_seqlens_padded' is present")


@pytest.mark.parametrize("name", ["labels", "block_offsets"])
def test_p3_what_an_in_place_task_brings_is_missing(mixed_directory, name):
    with resigned(mixed_directory) as arrays:
        for part in (name,) if name == "labels" else (name, "block_noise", "block_loss_weight"):
            del arrays[part]
    assert_only(faults_of(mixed_directory), "P3", words=f"array '{name}' is missing")


def with_whole_ranges(directory, arrays):
    """Trained ranges of all that any document would train: body and eos."""
    tasks = manifest_of(directory)["tasks"]
    mode = np.array([task["mode_token"] is not None for task in tasks])[arrays["segment_task"]]
    _, begin, end = places_of(arrays)
    arrays["trained_offsets"] = np.arange(len(begin) + 1)
    arrays["trained_ranges"] = np.stack((mode, end - begin), axis=1).astype(np.int32)


def test_p17_trained_ranges_that_no_document_asked_for(directory):
    """Which documents have loss_spans only the source tells: the arrays agree with each other."""
    with resigned(directory) as arrays:
        with_whole_ranges(directory, arrays)
    assert faults_of(directory) == []
    faults = faults_of(directory, replay=-1)
    assert promises_of(faults) == {"P17"}
    assert {
        "array 'trained_offsets' is not in the rebuilt shard",
        "array 'trained_ranges' is not in the rebuilt shard",
    } == {f["message"] for f in faults}


def test_p9_trained_ranges_that_are_not_those_of_the_loss(directory):
    with resigned(directory) as arrays:
        arrays["trained_offsets"] = np.zeros(len(arrays["segment_key"]) + 1, np.int64)
        arrays["trained_ranges"] = np.zeros((0, 2), np.int32)
    assert promises_of(faults_of(directory)) == {"P9"}


def test_p3_another_dtype(directory):
    with resigned(directory) as arrays:
        arrays["tokens"] = arrays["tokens"].astype(np.int32)
    assert_only(faults_of(directory), "P3", words="dtype is 'I32' and should be 'U16'")


def test_p3_a_header_that_does_not_fit_the_file(directory):
    path = directory / shard_name(0)
    put_shard(directory, path.read_bytes() + b"\0" * 64)
    assert_only(faults_of(directory), "P3", words="the file at")


# P4, P5


def test_p4_row_offsets_that_do_not_start_at_0(directory):
    with resigned(directory) as arrays:
        arrays["row_offsets"][0] = 1
    assert_only(faults_of(directory), "P4", row=0, value=1)


def test_p4_row_offsets_that_do_not_end_at_the_segments(directory):
    with resigned(directory) as arrays:
        arrays["row_offsets"][-1] += 1
        rows, value = len(arrays["row_offsets"]) - 1, int(arrays["row_offsets"][-1])
    assert_only(faults_of(directory), "P4", row=rows, value=value)


def test_p4_row_offsets_that_fall(directory):
    with resigned(directory) as arrays:
        arrays["row_offsets"][5] = arrays["row_offsets"][4] - 2
    assert_only(faults_of(directory), "P4", row=4, value=-2, words="decreases")


@pytest.mark.parametrize("value", [2**62, -(2**62), 2**63 - 1, -(2**63)])
def test_p4_row_offsets_of_any_size_are_refused_before_they_are_used(directory, value):
    with resigned(directory) as arrays:
        arrays["row_offsets"][3:-3] = value
    assert promises_of(faults_of(directory)) == {"P4"}


def first_of_row(arrays, row):
    """Where a row's part of cu_seqlens begins."""
    return int(arrays["row_offsets"][row]) + row


def test_fault_15_p5_cu_seqlens_that_does_not_start_at_0(directory):
    with resigned(directory) as arrays:
        arrays["cu_seqlens"][first_of_row(arrays, 3)] = 1
    assert_only(faults_of(directory), "P5", row=3, value=1, words="does not start at 0")


def test_p5_cu_seqlens_that_does_not_increase(directory):
    with resigned(directory) as arrays:
        row = int(np.flatnonzero(np.diff(arrays["row_offsets"]) >= 2)[0])
        at = first_of_row(arrays, row)
        arrays["cu_seqlens"][at + 2] = value = int(arrays["cu_seqlens"][at + 1])
    assert_only(
        faults_of(directory), "P5", row=row, value=value, words="does not strictly increase"
    )


@pytest.mark.parametrize("beyond", [1, 2**31 - 1 - 256])
def test_p5_cu_seqlens_that_ends_beyond_the_row(directory, beyond):
    with resigned(directory) as arrays:
        at = first_of_row(arrays, 2) - 1
        arrays["cu_seqlens"][at] = 256 + beyond
    assert_only(faults_of(directory), "P5", row=1, value=256 + beyond, words="ends after the row")


def test_p5_padded_offsets_that_are_not_the_lengths_rounded_up(padded_directory):
    with resigned(padded_directory) as arrays:
        ends = arrays["cu_seqlens_padded"][
            arrays["row_offsets"][1:] + np.arange(len(arrays["row_offsets"]) - 1)
        ]
        row = int(np.flatnonzero(ends <= 240)[0])
        at = first_of_row(arrays, row + 1) - 1
        arrays["cu_seqlens_padded"][at] += 8
        value = int(arrays["cu_seqlens_padded"][at])
    assert_only(faults_of(padded_directory), "P5", row=row, value=value, words="rounded up to 8")


# P6, P7, P8


def test_p6_a_segment_id_inside_a_segment(directory):
    with resigned(directory) as arrays:
        _, row, begin, _ = long_segment(directory, arrays, "causal")
        arrays["segment_ids"][row, begin + 3] += 1
        value = int(arrays["segment_ids"][row, begin + 3])
    assert_only(faults_of(directory), "P6", row=row, slot=begin + 3, value=value)


def test_p6_a_segment_id_on_padding(directory):
    with resigned(directory) as arrays:
        row, slot = padding_of(arrays)
        arrays["segment_ids"][row, slot] = 9
    assert_only(faults_of(directory), "P6", row=row, slot=slot, value=9)


def test_fault_1_p6_padding_inside_a_segment(padded_directory):
    with resigned(padded_directory) as arrays:
        _, row, begin, end = long_segment(padded_directory, arrays, "causal")
        arrays["segment_ids"][row, end - 1] = 0
    assert_only(faults_of(padded_directory), "P6", row=row, slot=end - 1, value=0)


@pytest.mark.parametrize("name, value", [("tokens", 7), ("loss_mask", 1), ("tokens", 0)])
def test_p7_padding_that_is_something_else(directory, name, value):
    with resigned(directory) as arrays:
        row, slot = padding_of(arrays)
        arrays[name][row, slot] = value
    assert_only(faults_of(directory), "P7", row=row, slot=slot, value=value)


def test_p7_padding_between_padded_segments(padded_directory):
    with resigned(padded_directory) as arrays:
        rows, begin, end = places_of(arrays)
        g = int(np.flatnonzero(((end - begin) % 8 > 0) & (np.diff(rows, append=-1) == 0))[0])
        row, slot = int(rows[g]), int(end[g])
        arrays["loss_mask"][row, slot] = 1
    assert_only(
        faults_of(padded_directory), "P7", row=row, slot=slot, value=1, words="padding is trained"
    )


@pytest.mark.parametrize("value", [VOCAB_SIZE, 65535])
def test_fault_28_p8_an_id_beyond_the_vocabulary(directory, value):
    with resigned(directory) as arrays:
        _, row, begin, _ = long_segment(directory, arrays, "causal")
        arrays["tokens"][row, begin + 4] = value
    assert_only(faults_of(directory), "P8", row=row, slot=begin + 4, value=value)


# P9, P10


@pytest.mark.parametrize(
    "task, at, value", [("causal", 4, 0), ("causal", -1, 1), ("s", 1, 1), ("r", 2, 1), ("r", -3, 0)]
)
def test_p9_loss_where_it_does_not_belong(directory, task, at, value):
    with resigned(directory) as arrays:
        g, row, begin, end = long_segment(directory, arrays, task)
        assert at < 0 or task == "causal" or arrays["segment_prefix"][g] > at + 1
        slot = end + at if at < 0 else begin + at
        assert arrays["loss_mask"][row, slot] != value
        arrays["loss_mask"][row, slot] = value
    assert_only(faults_of(directory), "P9", row=row, slot=slot, value=value)


def test_fault_11_p9_the_last_slot_never_predicts_the_next_segment(directory):
    with resigned(directory) as arrays:
        rows, _, end = places_of(arrays)
        g = int(np.flatnonzero(np.diff(rows, append=-1) == 0)[0])
        row, slot = int(rows[g]), int(end[g]) - 1
        arrays["loss_mask"][row, slot] = 1
    assert_only(faults_of(directory), "P9", row=row, slot=slot, value=1)


def with_labels(arrays):
    """Labels as a mixed recipe would store them: the next slot's token of the same segment, else
    pad."""
    labels = np.full_like(arrays["tokens"], PAD)
    for row, begin, end in zip(*places_of(arrays), strict=True):
        labels[row, begin : end - 1] = arrays["tokens"][row, begin + 1 : end]
    return {**arrays, "labels": labels}


def faults_of_arrays(plan, arrays):
    faults = Faults()
    check_arrays(plan, arrays, SHARD, faults)
    return faults.listed


def test_p10_a_label_that_is_not_the_next_token(plain):
    plan, arrays = open_plan(plain), with_labels(arrays_of(plain))
    assert faults_of_arrays(plan, arrays) == []
    _, row, begin, _ = long_segment(plain, arrays, "causal")
    arrays["labels"][row, begin + 2] ^= 1
    value = int(arrays["labels"][row, begin + 2])
    assert_only(faults_of_arrays(plan, arrays), "P10", row=row, slot=begin + 2, value=value)


def test_fault_11_p10_a_label_across_a_boundary(plain):
    plan, arrays = open_plan(plain), with_labels(arrays_of(plain))
    rows, _, end = places_of(arrays)
    g = int(np.flatnonzero(np.diff(rows, append=-1) == 0)[0])
    row, slot = int(rows[g]), int(end[g]) - 1
    arrays["labels"][row, slot] = value = int(arrays["tokens"][row, slot + 1])
    assert_only(faults_of_arrays(plan, arrays), "P10", row=row, slot=slot, value=value)


def test_p7_and_p8_hold_for_labels_too(plain):
    plan, arrays = open_plan(plain), with_labels(arrays_of(plain))
    row, slot = padding_of(arrays)
    arrays["labels"][row, slot] = 3
    assert_only(
        faults_of_arrays(plan, arrays), "P7", row=row, slot=slot, value=3, words="label of padding"
    )
    arrays["labels"][row, slot] = PAD
    _, row, begin, _ = long_segment(plain, arrays, "causal")
    arrays["labels"][row, begin] = VOCAB_SIZE
    assert promises_of(faults_of_arrays(plan, arrays)) == {"P8", "P10"}


def test_faults_of_many_slots_are_counted_at_once(plain, monkeypatch):
    plan, arrays = open_plan(plain), arrays_of(plain)
    arrays["loss_mask"] = 1 - arrays["loss_mask"]
    n_padding = int((arrays["segment_ids"] == 0).sum())
    added = []
    add = Faults.add
    monkeypatch.setattr(Faults, "add", lambda self, *fault: added.append(add(self, *fault)))
    faults = Faults()
    check_arrays(plan, arrays, SHARD, faults)
    assert faults.counts == {
        f"P7 {SHARD}": n_padding,
        f"P9 {SHARD}": arrays["loss_mask"].size - n_padding,
    }
    assert min(faults.counts.values()) > MAX_LISTED == len(added) / 2 == len(faults.listed) / 2


def test_p3_labels_belong_to_recipes_that_predict_in_place(plain):
    faults = Faults()
    assert not check_layout(open_plan(plain), with_labels(arrays_of(plain)), SHARD, faults)
    assert promises_of(faults.listed) == {"P3"}


# P11


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("segment_task", 6, "is not one of the plan's 6 tasks"),
        ("segment_source", 2, "is not one of the plan's 2 sources"),
        ("segment_source", 65535, "is not one of the plan's 2 sources"),
        ("segment_file", 3, "is not one of the plan's 3 files"),
        ("segment_file", 2**32 - 1, "is not one of the plan's 3 files"),
        ("segment_tokens", -(2**31), "is negative"),
        ("segment_start", -1, "is negative"),
        ("segment_doc", -(2**63), "is negative"),
    ],
)
def test_p11_a_header_that_names_nothing_there_is(directory, name, value, words):
    with resigned(directory) as arrays:
        g, row, _, _ = long_segment(directory, arrays, "causal")
        arrays[name][g] = value
    assert_only(
        faults_of(directory), "P11", row=row, value=value, words=f"segment {g}: {name} {words}"
    )


def test_p23_a_segment_without_tokens_whose_document_was_not_removed(directory):
    with resigned(directory) as arrays:
        g, *_ = long_segment(directory, arrays, "causal")
        arrays["segment_tokens"][g] = 0
    said = [f["message"] for f in faults_of(directory) if f["promise"] == "P23"]
    assert f"segment {g}: it has no tokens, but is not of a removed document" in said


def test_p11_a_file_of_another_source(directory):
    with resigned(directory) as arrays:
        g, row, _, _ = long_segment(directory, arrays, "causal")
        arrays["segment_source"][g] = 1 - arrays["segment_source"][g]
        value = int(arrays["segment_file"][g])
    faults = faults_of(directory)
    assert_only(faults, "P11", row=row, value=value, words="belongs to another source")


@pytest.mark.parametrize("name", ["segment_doc", "segment_start", "segment_key"])
def test_p11_a_key_that_is_not_of_its_place(directory, name):
    with resigned(directory) as arrays:
        g, row, _, _ = long_segment(directory, arrays, "causal")
        arrays[name][g] += 1
        value = int(arrays["segment_key"][g])
    faults = faults_of(directory)
    assert ("P11", row, value) in [(f["promise"], f["row"], f["value"]) for f in faults]
    assert promises_of(faults) == {"P11"}


def test_p11_a_use_that_the_plan_does_not_have(directory):
    with resigned(directory) as arrays:
        g, row, _, _ = long_segment(directory, arrays, "causal")
        arrays["segment_repeat"][g] = 1
    faults = faults_of(directory)
    assert (
        promises_of(faults) == {"P11"}
        and faults[0]["row"] == row
        and "is not a pass of the plan" in faults[0]["message"]
    )


def test_p11_a_task_that_the_key_does_not_draw(directory):
    """Prefix language modelling that is said to be causal: each slot obeys its task, and the mix is
    not the recipe's."""
    with resigned(directory) as arrays:
        g, row, begin, end = long_segment(directory, arrays, "causal")
        arrays["segment_task"][g] = 5  # too_short has causal's law
    assert_only(
        faults_of(directory), "P11", row=row, value=5, words="is not the task that its key selects"
    )


# P12, P13, P14


@pytest.mark.parametrize(
    "task, at, value, words", [("causal", -1, 65, "no eos"), ("r", 0, NLU + 1, "no mode token")]
)
def test_p12_a_special_token_that_is_not_in_its_place(directory, task, at, value, words):
    with resigned(directory) as arrays:
        rows, begin, end = places_of(arrays)
        g = next(
            g
            for g in segments_of(directory, arrays, task)
            if arrays["tokens"][rows[g], end[g] - 1] == EOS
        )
        row, slot = int(rows[g]), int(end[g] - 1 if at else begin[g])
        arrays["tokens"][row, slot] = value
    assert_only(faults_of(directory), "P12", row=row, slot=slot, value=value, words=words)


def test_p12_no_bos(padded_directory):
    with resigned(padded_directory) as arrays:
        rows, begin, _ = places_of(arrays)
        g = int(np.flatnonzero(arrays["segment_start"] == 0)[0])
        row, slot = int(rows[g]), int(begin[g])
        assert arrays["tokens"][row, slot] == BOS
        arrays["tokens"][row, slot] = 0
    assert_only(faults_of(padded_directory), "P12", row=row, slot=slot, value=0, words="no bos")


@pytest.mark.parametrize("more", [-2, 2, 2**31 - 300])
def test_p12_another_length_than_the_law(directory, more):
    with resigned(directory) as arrays:
        g, row, begin, end = long_segment(directory, arrays, "causal")
        arrays["segment_tokens"][g] = min(int(arrays["segment_tokens"][g]) + more, 2**31 - 1)
    assert_only(
        faults_of(directory),
        "P12",
        row=row,
        slot=begin,
        value=end - begin,
        words="than its task's length formula",
    )


def test_p12_the_last_segment_of_a_document_has_its_eos(directory):
    """An eos that is counted as a token: the length law holds, and the end of the document does
    not."""
    with resigned(directory) as arrays:
        rows, begin, end = places_of(arrays)
        causal = segments_of(directory, arrays, "causal")
        g = next(g for g in causal if arrays["tokens"][rows[g], end[g] - 1] == EOS)
        arrays["segment_tokens"][g] += 1
    # the ledger counts one token less
    faults = [f for f in faults_of(directory) if f["promise"] != "P16"]
    assert_only(
        faults,
        "P12",
        row=int(rows[g]),
        slot=int(end[g]) - 1,
        value=EOS,
        words="ends its document, but has no eos",
    )


def test_p12_a_segment_inside_a_document_has_no_eos(tmp_path):
    """The first of two segments gives its last token to the second and takes an eos instead: all
    lengths hold."""
    directory = made(tmp_path, tasks=[{"preset": "causal"}])
    with resigned(directory) as arrays:
        rows, begin, end = places_of(arrays)
        last_of_row = np.diff(rows, append=-1) != 0
        document = np.stack(
            [arrays[f"segment_{name}"].astype(np.int64) for name in ("file", "doc")], 1
        )
        g, h = next(
            (g, h)
            for g in range(len(rows))
            for h in np.flatnonzero(last_of_row & (end < 256) & (document == document[g]).all(1))
            if arrays["segment_start"][h]
            == arrays["segment_start"][g] + arrays["segment_tokens"][g]
        )
        tokens, row, slot = arrays["tokens"], rows[h], int(end[g]) - 1
        tokens[row, begin[h] + 1 : end[h] + 1] = tokens[row, begin[h] : end[h]].copy()
        tokens[row, begin[h]], tokens[rows[g], slot] = tokens[rows[g], slot], EOS
        arrays["segment_ids"][row, end[h]] = arrays["segment_ids"][row, begin[h]]
        arrays["loss_mask"][row, end[h] - 1] = 1
        arrays["cu_seqlens"][h + row + 1] += 1
        arrays["segment_tokens"][[g, h]] += [-1, 1]
        moved_to(directory, arrays, h, int(arrays["segment_start"][h]) - 1)
    # the ledger counts one eos less
    faults = [f for f in faults_of(directory) if f["promise"] != "P16"]
    words = "has an eos, but its document continues"
    assert_only(faults, "P12", row=int(rows[g]), slot=slot, value=EOS, words=words)


def test_p12_with_eos_after_each_segment_one_inside_a_document_without_it_is_found(tmp_path):
    """Its eos counts as a token: nothing else of the slots changes."""
    directory = made(tmp_path, tasks=[{"preset": "causal"}], documents={"append_eos": "segment"})
    assert not faults_of(directory)
    with resigned(directory) as arrays:
        rows, begin, end = places_of(arrays)
        g = int(np.flatnonzero(arrays["segment_start"] > 0)[0])
        arrays["segment_tokens"][g] += 1
    words = "0 more than its task's length formula without eos"
    slots = int(end[g] - begin[g])
    assert_only(
        faults_of(directory), "P12", row=int(rows[g]), slot=int(begin[g]), value=slots, words=words
    )


@pytest.mark.parametrize("task, change", [("causal", 1), ("causal", 2**31 - 1), ("too_short", -1)])
def test_p13_a_prefix_that_is_not_the_tasks(directory, task, change):
    with resigned(directory) as arrays:
        rows, begin, _ = places_of(arrays)
        g = int(segments_of(directory, arrays, task)[0])
        arrays["segment_prefix"][g] = change
    # a longer prefix is not trained
    faults = [f for f in faults_of(directory) if f["promise"] != "P9"]
    assert_only(
        faults,
        "P13",
        row=int(rows[g]),
        slot=int(begin[g]),
        value=change,
        words="segment_prefix should be 0",
    )


def test_fault_7_p13_a_pivot_that_was_not_drawn(directory):
    """Prefix and loss agree with each other, and not with the key."""
    with resigned(directory) as arrays:
        g, row, begin, end = long_segment(directory, arrays, "s")
        arrays["segment_prefix"][g] = value = int(arrays["segment_prefix"][g]) - 1
        arrays["loss_mask"][row, begin + value - 1] = 1
    assert_only(faults_of(directory), "P13", row=row, slot=begin, value=value)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("segment_noise", np.nan, "nan"),
        ("segment_noise", 1.5, 1.5),
        ("segment_noise", 0.5, 0.5),
        ("segment_loss_weight", np.inf, "inf"),
        ("segment_loss_weight", -1, -1.0),
        ("segment_loss_weight", 2, 2.0),
    ],
)
def test_p13_a_noise_level_or_weight_that_cannot_be(directory, name, value, said):
    with resigned(directory) as arrays:
        g, row, _, _ = long_segment(directory, arrays, "causal")
        arrays[name][g] = value
    assert_only(faults_of(directory), "P13", row=row, value=said, words=f"segment {g}: {name}")


def sentinels_of(directory, arrays, task):
    """(segment, row, slots of its sentinels, in the inputs and before the targets)."""
    g, row, begin, end = long_segment(directory, arrays, task)
    slots = begin + np.flatnonzero(arrays["tokens"][row, begin:end] >= FIRST_SENTINEL)
    assert len(slots) % 2 == 0 and len(slots) >= 2
    return g, row, begin, slots


@pytest.mark.parametrize("task", ["r", "x-dense"])
@pytest.mark.parametrize("which", [0, -1])
def test_fault_6_p14_a_sentinel_that_is_missing(directory, task, which):
    with resigned(directory) as arrays:
        g, row, begin, slots = sentinels_of(directory, arrays, task)
        arrays["tokens"][row, slots[which]] = 65
    assert_only(
        faults_of(directory),
        "P14",
        row=row,
        slot=begin,
        words=f"segment {g}: a sentinel is missing",
    )


def test_fault_8_p14_a_sentinel_used_twice(directory):
    with resigned(directory) as arrays:
        g, row, begin, slots = sentinels_of(directory, arrays, "x-dense")
        half = len(slots) // 2
        for slot in (slots[1], slots[half + 1]):
            arrays["tokens"][row, slot] = FIRST_SENTINEL
    assert_only(faults_of(directory), "P14", row=row, slot=begin)


@pytest.mark.parametrize(
    "task", [{"preset": "t5"}, {"objective": "fill_in_the_middle", "rate": 1.0}]
)
def test_p14_a_text_with_a_sentinel_or_role_token_of_its_own(tmp_path, monkeypatch, task):
    builds.write_lines(
        tmp_path / "a.jsonl",
        ["number <extra_id_0> has <fim_suffix> here", "this one has none of them"],
    )
    table = builds.table(
        "a.jsonl", tasks=[task], seq_length=64, documents={"special_text": "special"}
    )
    none = np.zeros(0, np.int64)
    monkeypatch.setattr(plans, "marks_of_sources", lambda recipe, tasks: [(none, none)])
    builds.build(table, tmp_path, tmp_path / "out")
    (fault,) = faults_of(tmp_path / "out")
    assert (
        fault["promise"] == "P14"
        and "sentinels or special tokens, but its task writes" in fault["message"]
    )


# P15, P16, P17


def moved_to(directory, arrays, g, start):
    """Let segment g begin with another token of its document, with the key of that place."""
    plan = open_plan(directory)
    source = plan.sources[int(arrays["segment_source"][g])]
    name = source.files[int(arrays["segment_file"][g]) - source.first_file].name
    arrays["segment_start"][g] = start
    arrays["segment_key"][g] = segment_key(
        text_key(source.seed, source.name, name),
        int(arrays["segment_doc"][g]),
        int(arrays["segment_repeat"][g]),
        start,
    )


def test_fault_21_p15_a_document_that_does_not_begin_at_its_first_token(directory):
    with resigned(directory) as arrays:
        rows, _, _ = places_of(arrays)
        # whose slots do not depend on its key
        g = int(segments_of(directory, arrays, "too_short")[0])
        moved_to(directory, arrays, g, 5)
    assert_only(
        faults_of(directory), "P15", row=int(rows[g]), value=5, words="but should start with 0"
    )


def test_p15_pieces_without_a_trained_token_are_left_out_and_others_are_not(tmp_path):
    lines = [
        {"text": "abcdefghijklmnopqrstu", "loss_spans": [[12, 21]]},
        *({"text": "z" * 60} for _ in range(9)),
    ]
    builds.write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)).encode())
    tasks = [{"objective": "masked_diffusion"}, {"preset": "t5"}]
    documents = {"max_tokens": 7, "append_eos": False}
    builds.build(
        builds.table("a.jsonl", tasks=tasks, documents=documents), tmp_path, tmp_path / "out"
    )
    # of the first document what begins at 12, all of it trained
    assert faults_of(tmp_path / "out") == []
    with resigned(tmp_path / "out") as arrays:
        others = arrays["segment_doc"][arrays["segment_task"] == 1]
        first = np.flatnonzero(
            (arrays["segment_start"] == 0) & np.isin(arrays["segment_doc"], others)
        )
        g = int(first[arrays["segment_task"][first] == 0][0])
        moved_to(tmp_path / "out", arrays, g, 2)
    messages = [
        fault["message"] for fault in faults_of(tmp_path / "out") if fault["promise"] == "P15"
    ]
    assert f"segment {g}: starts with token 2 of its document, but should start with 0" in messages


def test_fault_17_p15_a_document_that_is_there_twice(directory):
    with resigned(directory) as arrays:
        rows, begin, end = places_of(arrays)
        short = segments_of(directory, arrays, "too_short")
        g, h = next(
            (g, h)
            for g in short
            for h in short
            if g < h and arrays["segment_file"][g] == arrays["segment_file"][h]
        )
        for name in ("doc", "key", "start", "source", "file"):
            arrays[f"segment_{name}"][h] = arrays[f"segment_{name}"][g]
    lost, fault = faults_of(directory)  # by file
    assert fault["promise"] == "P15" and fault["row"] in (rows[g], rows[h]) and fault["value"] == 0
    assert (lost["promise"], lost["file"]) == ("P21", RECEIPT)  # the document whose place it took


@pytest.mark.parametrize(
    "path",
    [
        ("documents", "read"), ("documents", "used"), ("tokens", "read"), ("tokens", "truncated"), ("slots", "total"),
        ("slots", "padding"), ("slots", "added", "mode"), ("slots", "added", "eos"), ("tokens", "used"),
    ],
)  # fmt: skip
def test_p16_a_ledger_that_does_not_balance(directory, path):
    def change(receipt):
        part = receipt["ledger"]["sources"]["web"]
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] += 1

    edit_receipt(directory, change)
    faults = faults_of(directory)
    assert promises_of(faults) == ({"P16", "P21"} if path == ("documents", "used") else {"P16"})
    assert {f["file"] for f in faults} == {RECEIPT, "dataset.json"}


def test_p16_a_ledger_that_balances_and_is_wrong(directory):
    def change(receipt):
        source = receipt["ledger"]["sources"]["web"]
        for part in (source["tokens"], source["slots"]):
            part["used"] += 1
        source["tokens"]["read"] += 1
        source["slots"]["total"] += 1
        receipt["ledger"]["row_padding"] -= 1

    edit_receipt(directory, change)
    faults = faults_of(directory)
    assert promises_of(faults) == {"P16"}
    assert any(
        "source web: the ledger's counts differ from the counts of the arrays" in f["message"]
        for f in faults
    )


@pytest.mark.parametrize("task, key", [("causal", "segments"), ("s", "tokens"), ("r", "slots")])
def test_p16_a_task_that_is_counted_wrongly(directory, task, key):
    def change(receipt):
        receipt["ledger"]["tasks"][task][key] += 1

    edit_receipt(directory, change)
    faults = faults_of(directory)
    assert promises_of(faults) == {"P16"}
    assert any(f"task {task}: the ledger has" in f["message"] for f in faults)


def test_p16_a_manifest_whose_ledger_is_not_the_sum(directory):
    edit_manifest(directory, lambda manifest: manifest["ledger"].update(rows=1))
    assert_only(
        faults_of(directory), "P16", "dataset.json", words="not the sum of the receipts' ledgers"
    )


def test_p16_tokens_that_both_receipt_and_manifest_count_wrongly(directory):
    tokens = _tokens_of(directory)
    edit_manifest(directory, lambda manifest: manifest["shards"][0].update(tokens=tokens + 1))
    edit_receipt(directory, lambda receipt: receipt.update(tokens=tokens + 1))
    assert_only(
        faults_of(directory),
        "P16",
        RECEIPT,
        value=tokens + 1,
        words=f"the arrays have {tokens} tokens",
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: ledger.pop("tasks"),
        lambda ledger: ledger["sources"].pop("web"),
        lambda ledger: ledger["sources"]["web"].update(slots=3),
        lambda ledger: ledger["sources"]["web"]["tokens"].update(used="5"),
        lambda ledger: ledger["sources"]["web"]["documents"].update(rejected={"empty": [1]}),
        lambda ledger: ledger["tasks"].update(r=None),
        lambda ledger: ledger.update(rows=True),
    ],
)
def test_p16_a_ledger_that_is_none(directory, change):
    edit_receipt(directory, lambda receipt: change(receipt["ledger"]))
    assert_only(
        faults_of(directory), "P16", RECEIPT, words="does not have the keys and counts of a ledger"
    )


def test_a_receipt_with_what_a_newer_version_wrote_names_it(directory):
    newer = "key 'more' is unknown to packprep"
    edit_receipt(directory, lambda receipt: receipt["ledger"].update(more=1))
    assert_only(faults_of(directory), "P16", RECEIPT, words=newer)
    edit_receipt(directory, lambda receipt: receipt.update(more=receipt["ledger"].pop("more")))
    assert_only(faults_of(directory), "P1", RECEIPT, words=newer)


def test_p16_rejects_that_the_ledger_does_not_count(directory):
    path = directory / rejects_name(0)
    lines = path.read_bytes().splitlines(keepends=True)
    data = b"".join(lines[1:] + lines[1:2])
    path.write_bytes(data)
    edit_receipt(
        directory,
        lambda receipt: receipt["rejects"].update(bytes=len(data), digest=digest_of(data)),
    )
    fault, twice = faults_of(directory)
    assert_only([fault], "P16", RECEIPT, words="differ from the rejects file")
    assert_only([twice], "P21", rejects_name(0), words="is listed twice")


def test_p17_a_token_that_the_document_does_not_have(directory):
    """Nothing in the dataset can tell; the source can."""
    with resigned(directory) as arrays:
        _, row, begin, _ = long_segment(directory, arrays, "causal")
        arrays["tokens"][row, begin + 1] ^= 1
        value = int(arrays["tokens"][row, begin + 1])
    assert faults_of(directory) == []
    faults = faults_of(directory, replay=-1)
    assert promises_of(faults) == {"P17"}
    assert [(f["row"], f["slot"], f["value"]) for f in faults if f["slot"] is not None] == [
        (row, begin + 1, value)
    ]


# In-place segments, trained ranges and blocks: P9, P10, P18, P19, P20


def slot_of(directory, arrays, task, trained):
    """(row, slot) that is trained or not, in a segment of the task, not its first or last slot, of
    an ordinary token."""
    rows, begin, end = places_of(arrays)
    for g in segments_of(directory, arrays, task):
        inside = slice(begin[g] + 1, end[g] - 1)
        found = np.flatnonzero(
            (arrays["loss_mask"][rows[g], inside] == trained)
            & (arrays["tokens"][rows[g], inside] < 256)
        )
        if len(found):
            return int(rows[g]), int(begin[g]) + 1 + int(found[0])
    raise AssertionError("no such slot in this shard")


def limited_segment(directory, arrays, *tasks):
    """(segment, row, begin, end) of a segment with more than one trained range."""
    rows, begin, end = places_of(arrays)
    ranges = np.diff(arrays["trained_offsets"])
    g = next(int(g) for g in segments_of(directory, arrays, *tasks) if ranges[g] >= 2)
    return g, int(rows[g]), int(begin[g]), int(end[g])


def test_p9_a_prompt_is_not_trained(mixed_directory):
    with resigned(mixed_directory) as arrays:
        g, row, begin, _ = limited_segment(mixed_directory, arrays, "causal", "prefix_lm")
        ranges = arrays["trained_ranges"][arrays["trained_offsets"][g] :]
        # it would predict the token after the first one that is not trained any more
        slot = begin + int(ranges[0, 1])
        assert ranges[1, 0] > ranges[0, 1] + 1 and arrays["loss_mask"][row, slot] == 0
        arrays["loss_mask"][row, slot] = 1
    assert_only(faults_of(mixed_directory), "P9", row=row, slot=slot, value=1)


@pytest.mark.parametrize("task", ["mlm", "mdlm", "bd3"])
def test_p10_in_place_a_token_that_is_not_trained_is_its_label(mixed_directory, task):
    with resigned(mixed_directory) as arrays:
        row, slot = slot_of(mixed_directory, arrays, task, 0)
        arrays["tokens"][row, slot] = value = int(arrays["tokens"][row, slot]) ^ 1
    faults = faults_of(mixed_directory)
    assert promises_of(faults) == {"P10", "P18"}  # nor is it what the key noises
    assert_only(
        [f for f in faults if f["promise"] == "P10"], "P10", row=row, slot=slot, value=value
    )


def test_p10_a_next_token_label_in_a_mixed_dataset(mixed_directory):
    with resigned(mixed_directory) as arrays:
        _, row, begin, _ = long_segment(mixed_directory, arrays, "fim")
        arrays["labels"][row, begin + 2] = value = int(arrays["labels"][row, begin + 2]) ^ 1
    assert_only(faults_of(mixed_directory), "P10", row=row, slot=begin + 2, value=value)


def test_p18_another_token_than_the_key_flips_to(mixed_directory):
    with resigned(mixed_directory) as arrays:
        row, slot = slot_of(mixed_directory, arrays, "duo", 1)
        should = int(arrays["tokens"][row, slot])
        arrays["tokens"][row, slot] = value = should ^ 1
    assert_only(
        faults_of(mixed_directory),
        "P18",
        row=row,
        slot=slot,
        value=value,
        words=f"recomputed tokens is {should}",
    )


@pytest.mark.parametrize("task", ["mlm", "mdlm", "bd3"])
def test_p18_loss_on_a_slot_that_was_not_chosen(mixed_directory, task):
    """Where the token is its label, only the key tells that the slot was not chosen."""
    with resigned(mixed_directory) as arrays:
        row, slot = slot_of(mixed_directory, arrays, task, 0)
        arrays["loss_mask"][row, slot] = 1
    assert_only(
        faults_of(mixed_directory),
        "P18",
        row=row,
        slot=slot,
        value=1,
        words="recomputed loss_mask is 0",
    )


@pytest.mark.parametrize("task", ["mdlm", "duo"])
@pytest.mark.parametrize("name, value", [("segment_noise", 0.5), ("segment_loss_weight", 3.25)])
def test_p18_a_level_or_weight_that_was_not_drawn(mixed_directory, task, name, value):
    with resigned(mixed_directory) as arrays:
        g, row, _, _ = long_segment(mixed_directory, arrays, task)
        assert arrays[name][g] != value
        arrays[name][g] = value
    assert_only(
        faults_of(mixed_directory),
        "P18",
        row=row,
        value=value,
        words=f"segment {g}: {name} should be",
    )


@pytest.mark.parametrize("name, value", [("block_noise", 0.625), ("block_loss_weight", 2.5)])
def test_p18_a_block_whose_level_was_not_drawn(mixed_directory, name, value):
    with resigned(mixed_directory) as arrays:
        assert arrays[name][1] != value
        arrays[name][1] = value
    assert_only(faults_of(mixed_directory), "P18", value=value, words=f"block 1: {name} should be")


@pytest.mark.parametrize(
    "column, value, words",
    [(1, 10**6, "outside"), (1, 0, "is empty"), (0, -1, "out of order"), (1, -(2**31), "")],
)
def test_p19_a_range_outside_its_segment(mixed_directory, column, value, words):
    with resigned(mixed_directory) as arrays:
        g, row, _, _ = limited_segment(
            mixed_directory, arrays, "causal", "mlm", "prefix_lm", "mdlm"
        )
        arrays["trained_ranges"][arrays["trained_offsets"][g], column] = value
    faults = faults_of(mixed_directory)
    assert promises_of(faults) == {"P19"} and {f["row"] for f in faults} == {row}
    assert f"segment {g}: trained range" in faults[0]["message"] and words in faults[0]["message"]


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, np.nan, np.inf])
def test_p19_a_weight_that_is_no_finite_number_above_0(mixed_directory, value):
    with resigned(mixed_directory) as arrays:
        arrays["trained_weights"] = np.full(len(arrays["trained_ranges"]), 2, np.float32)
        arrays["trained_weights"][3] = value
    (fault,) = faults_of(mixed_directory)
    assert fault["promise"] == "P19" and "has no finite weight above 0" in fault["message"]


def test_p19_weights_that_are_all_1(mixed_directory):
    with resigned(mixed_directory) as arrays:
        arrays["trained_weights"] = np.ones(len(arrays["trained_ranges"]), np.float32)
    assert_only(faults_of(mixed_directory), "P19", words="every weight in trained_weights is 1")


def test_p16_weights_that_the_ledger_does_not_count(mixed_directory):
    with resigned(mixed_directory) as arrays:
        arrays["trained_weights"] = np.ones(len(arrays["trained_ranges"]), np.float32)
        arrays["trained_weights"][0] = 2
    (fault,) = faults_of(mixed_directory)
    assert (
        fault["promise"] == "P16"
        and "the ledger's counts differ from the counts of the arrays" in fault["message"]
    )


@pytest.mark.parametrize(
    "at, value", [(slice(5, 7), [2**63 - 1, -2]), (0, 1), (-1, 10**9), (5, -1), (5, 2**62)]
)
def test_p19_offsets_of_ranges_that_do_not_ascend(mixed_directory, at, value):
    with resigned(mixed_directory) as arrays:
        arrays["trained_offsets"][at] = value
    (fault,) = faults_of(mixed_directory)
    assert fault["promise"] == "P19" and "trained_offsets does not ascend" in fault["message"]


def test_p19_what_a_later_piece_repeats_is_trained(tmp_path):
    shutil.copytree(LAW3 / "chats" / "dataset", tmp_path / "d")
    with resigned(tmp_path / "d") as arrays:
        stored = stored_segments(open_plan(tmp_path / "d"), arrays)
        g = int(np.flatnonzero((stored.repeated > 1) & (stored.task == 0))[0])
        copy, row, begin = (
            int(column[g]) for column in (stored.repeated, stored.row, stored.first_slot)
        )
        which = arrays["trained_offsets"][g]
        assert arrays["trained_ranges"][which, 0] >= copy
        arrays["loss_mask"][
            row, begin + copy - 2 : begin + arrays["trained_ranges"][which, 0] - 1
        ] = 1
        arrays["trained_ranges"][which, 0] = copy - 1
    faults = [fault for fault in faults_of(tmp_path / "d") if fault["promise"] == "P19"]
    assert [(fault["row"], fault["slot"]) for fault in faults] == [(row, begin + copy - 1)]
    assert (
        f"segment {g}: a trained range starts in the {copy} repeated tokens" in faults[0]["message"]
    )


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, np.nan, np.inf])
def test_p20_a_block_whose_level_cannot_be(mixed_directory, value):
    with resigned(mixed_directory) as arrays:
        arrays["block_noise"][1] = value
    assert_only(
        faults_of(mixed_directory),
        "P20",
        value=str(np.float32(value)),
        words="block 1: its level or weight",
    )


def test_p20_a_block_that_belongs_to_the_neighbour(mixed_directory):
    with resigned(mixed_directory) as arrays:
        g, row, _, _ = long_segment(mixed_directory, arrays, "bd3")
        arrays["block_offsets"][g + 1] -= 1
    faults = faults_of(mixed_directory)
    assert promises_of(faults) == {"P20"} and len(faults) == 2
    assert faults[0]["row"] == row and f"segment {g}: has" in faults[0]["message"]


@pytest.mark.parametrize("at, value", [(0, 1), (-1, 10**9), (5, -1)])
def test_p20_offsets_of_blocks_that_do_not_ascend(mixed_directory, at, value):
    with resigned(mixed_directory) as arrays:
        arrays["block_offsets"][at] = value
    (fault,) = faults_of(mixed_directory)
    assert fault["promise"] == "P20" and "block_offsets does not ascend" in fault["message"]


def filled_segment(directory, arrays, *tasks, least=2):
    """(segment, row, begin, end, fill) of the first segment of the tasks with at least so many
    filling eos."""
    row, begin, end = places_of(arrays)
    for g in segments_of(directory, arrays, *tasks):
        fill = int(arrays["segment_fill"][g])
        if fill >= least:
            return int(g), int(row[g]), int(begin[g]), int(end[g]), fill
    raise AssertionError("no such segment in this shard")


@pytest.mark.parametrize("task", ["answers", "grid", "all"])
@pytest.mark.parametrize("change, promise", [(1, "P12"), (-1, "P12"), (8, "P20"), (2**15, "P20")])
def test_p20_another_number_of_eos_than_fills_the_block(filled_directory, task, change, promise):
    with resigned(filled_directory) as arrays:
        g, row, *_, fill = filled_segment(filled_directory, arrays, task)
        arrays["segment_fill"][g] = fill + change
    faults = faults_of(filled_directory)
    assert {(fault["promise"], fault["row"]) for fault in faults} == {(promise, row)}, faults
    assert f"segment {g}: " in faults[0]["message"]


@pytest.mark.parametrize("task", ["answers", "grid", "all"])
def test_p12_no_eos_fills_the_block(filled_directory, task):
    with resigned(filled_directory) as arrays:
        g, row, *_ = filled_segment(filled_directory, arrays, task)
        arrays["segment_fill"][g] = 0
    faults = faults_of(filled_directory)
    assert {(fault["promise"], fault["row"]) for fault in faults} == {("P12", row)}, faults


def test_p20_a_fill_of_a_task_without_eos_fill(filled_directory):
    with resigned(filled_directory) as arrays:
        g = int(segments_of(filled_directory, arrays, "unfilled")[0])
        arrays["segment_fill"][g] = 1
        row = int(places_of(arrays)[0][g])
    faults = faults_of(filled_directory)
    assert_only(faults, "P20", row=row, value=1, words="but its task has no eos_fill")


def test_p20_a_fill_that_is_not_trained(filled_directory):
    with resigned(filled_directory) as arrays:
        g, row, *_, fill = filled_segment(filled_directory, arrays, "grid")
        arrays["trained_ranges"][arrays["trained_offsets"][g + 1] - 1, 1] -= 1
    faults = faults_of(filled_directory)
    assert_only(faults, "P20", row=row, value=fill, words="but these slots are not trained")


def test_p20_an_answer_whose_last_block_is_not_whole(filled_directory):
    """Blocks count from another token, and there are as many of them as before."""
    with resigned(filled_directory) as arrays:
        g, row, begin, end, fill = filled_segment(filled_directory, arrays, "answers", "all")
        which = arrays["trained_offsets"][g + 1] - 1
        arrays["trained_ranges"][which, 0] += 1
    faults = faults_of(filled_directory)
    assert_only(faults, "P20", row=row, value=fill, words="but its last block is not whole")


def test_p20_no_segment_is_filled_up(mixed_directory):
    with resigned(mixed_directory) as arrays:
        arrays["segment_fill"] = np.zeros(len(arrays["segment_key"]), np.uint16)
    assert_only(faults_of(mixed_directory), "P20", words="every number in segment_fill is 0")


@pytest.mark.parametrize("task", ["answers", "grid", "all"])
def test_p12_a_block_is_filled_up_with_another_token(filled_directory, task):
    """In x_t, in x_0 and in the labels."""
    with resigned(filled_directory) as arrays:
        g, row, begin, end, fill = filled_segment(filled_directory, arrays, task)
        slot = end - fill + 1
        for name, at in (("tokens", slot), ("labels", slot), ("labels", slot - (end - begin) // 2)):
            assert arrays[name][row, at] == EOS
            arrays[name][row, at] = 65
        if arrays["tokens"][row, slot - (end - begin) // 2] == EOS:
            arrays["tokens"][row, slot - (end - begin) // 2] = 65
    words = "should be eos, because it fills up a block"
    assert_only(faults_of(filled_directory), "P12", row=row, slot=slot, value=65, words=words)


def test_p19_a_range_in_the_clean_half(filled_directory):
    with resigned(filled_directory) as arrays:
        g, row, begin, end, _ = filled_segment(filled_directory, arrays, "grid", least=0)
        which = arrays["trained_offsets"][g + 1] - 1
        arrays["trained_ranges"][which, 1] = (end - begin) // 2 + 3
    faults = faults_of(filled_directory)
    assert_only(faults, "P19", row=row, words="outside its")


def test_p24_a_segment_in_a_row_whose_encoder_has_no_room_for_it(tmp_path):
    """The first segment of a row stands behind the last one of the row before, where the decoder's
    side has room."""
    directory = builds.two_sided(tmp_path, 64, 64)
    with resigned(directory) as arrays:
        _, begin, end = places_of(arrays)
        first, cu = arrays["row_offsets"], arrays["cu_seqlens"]
        used = [int(end[g - 1]) for g in first[1:]]
        r = next(
            r
            for r in range(1, len(first) - 2)
            if used[r - 1] + end[first[r]] <= 128 and first[r + 1] - first[r] > 1
        )
        g, n, at = int(first[r]), int(end[first[r]]), used[r - 1]
        for name, padding in (("tokens", PAD), ("segment_ids", 0), ("loss_mask", 0)):
            before, own = arrays[name][r - 1], arrays[name][r]
            before[at : at + n] = own[:n]
            own[:] = [*own[n:], *[padding] * n]
        arrays["segment_ids"][r - 1, at : at + n] = g - first[r - 1] + 1
        arrays["segment_ids"][r][arrays["segment_ids"][r] > 0] -= 1
        cu[g + r] = at + n  # where the row's 0 stood
        cu[g + r + 1 : first[r + 1] + r + 1] -= n
        first[r] += 1
        inputs = int(arrays["segment_prefix"][first[r - 1] : g + 1].sum())
    assert_only(
        faults_of(directory),
        "P24",
        row=r - 1,
        value=inputs,
        words="more than the 64 encoder slots",
    )


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Texts and chats with places of media."""
    folder = tmp_path_factory.mktemp("media")
    media_made.corpus(folder)
    builds.build(media_made.table(), folder, folder / "out")
    return folder / "out"


@pytest.fixture
def media_directory(media, tmp_path):
    return copied(media, tmp_path)


def test_p25_offsets_of_places_that_do_not_ascend(media_directory):
    with resigned(media_directory) as arrays:
        arrays["media_ref_offsets"][3] = 10**9
    (fault,) = faults_of(media_directory)
    assert fault["promise"] == "P25" and "media_ref_offsets does not ascend" in fault["message"]


@pytest.mark.parametrize(
    "name, value", [("slot", 127), ("slot", -1), ("tokens", 0), ("tokens", 128), ("kind", 7)]
)
def test_p25_a_place_beyond_its_segment(media_directory, name, value):
    with resigned(media_directory) as arrays:
        i = int(np.argmax(arrays["media_tokens"] > 1))
        arrays[f"media_{name}"][i] = value
        g = int(np.searchsorted(arrays["media_offsets"], i, "right")) - 1
    # its slots are counted
    faults = [fault for fault in faults_of(media_directory) if fault["promise"] != "P16"]
    assert (
        promises_of(faults) == {"P25"} and f"segment {g}: a media span of" in faults[0]["message"]
    )


def test_p25_a_place_of_another_kind(media_directory):
    with resigned(media_directory) as arrays:
        arrays["media_kind"][0] ^= 1
        slot = int(arrays["media_slot"][0])
    faults = faults_of(media_directory)
    assert (
        promises_of(faults) == {"P25"}
        and faults[0]["slot"] == slot
        and "not a slot token" in faults[0]["message"]
    )


def test_p25_a_place_that_is_left_out(media_directory):
    with resigned(media_directory) as arrays:
        slot, last = int(arrays["media_slot"][-1]), int(arrays["media_ref_offsets"][-2])
        for name in ("slot", "tokens", "kind"):
            arrays[f"media_{name}"] = arrays[f"media_{name}"][:-1].copy()
        arrays["media_ref"], arrays["media_ref_offsets"] = (
            arrays["media_ref"][:last].copy(),
            arrays["media_ref_offsets"][:-1].copy(),
        )
        arrays["media_offsets"] = np.minimum(arrays["media_offsets"], len(arrays["media_slot"]))
    faults = [fault for fault in faults_of(media_directory) if fault["promise"] != "P16"]
    assert (
        promises_of(faults) == {"P25"}
        and faults[0]["slot"] == slot
        and "outside a media span" in faults[0]["message"]
    )


def test_p25_a_ref_that_is_no_text(media_directory):
    with resigned(media_directory) as arrays:
        arrays["media_ref"][0] = 0xFF
    assert_only(
        [{**fault, "row": None, "slot": None} for fault in faults_of(media_directory)],
        "P25",
        words="a ref is not valid UTF-8",
    )


def test_p25_a_slot_of_media_that_may_be_trained(media_directory):
    """A range that grows into the place behind it, and the loss with it."""
    with resigned(media_directory) as arrays:
        causal = segments_of(media_directory, arrays, "causal")
        rows, begins, _ = places_of(arrays)
        for i in range(len(arrays["media_slot"])):
            g = int(np.searchsorted(arrays["media_offsets"], i, "right")) - 1
            slot, row = int(arrays["media_slot"][i]), int(rows[g])
            which = slice(*arrays["trained_offsets"][g : g + 2])
            ends = np.flatnonzero(arrays["trained_ranges"][which, 1] == slot - begins[g])
            if (
                g in causal
                and arrays["media_kind"][i] == 0
                and len(ends)
                and arrays["media_tokens"][i] > 1
            ):
                arrays["trained_ranges"][which.start + ends[0], 1] += 1
                arrays["loss_mask"][row, slot - 1] = 1
                break
    assert_only(
        faults_of(media_directory),
        "P25",
        row=row,
        slot=slot,
        words="a slot of media is trainable",
    )


def test_p17_another_ref_is_found_by_replay(media, media_directory):
    with resigned(media_directory) as arrays:
        arrays["media_ref"][0] ^= 1
    for replay in (-1, 10**6):
        (fault,) = faults_of(media_directory, replay, texts=media.parent, chats=media.parent)
        assert fault["promise"] == "P17" and (
            "media_ref" in fault["message"] or "its media spans are" in fault["message"]
        )
