from types import SimpleNamespace

import numpy as np
import pytest

from packprep.building.plan import open_plan
from packprep.building.work import make_shard
from packprep.errors import DatasetError, SourceError
from packprep.restoring import (
    documents_at,
    replay_segments,
    restore,
    slots_of_tokens,
    sound_segments,
    stored_segments,
)
from tests import made


@pytest.fixture(scope="module")
def plan(built):
    return open_plan(built.out)


def test_restore_gives_the_content_tokens_of_chosen_segments(plan):
    arrays = make_shard(plan, 1).arrays
    chosen = np.arange(0, len(arrays["segment_key"]), 3)
    tokens, offsets, fits = restore(plan, arrays, stored_segments(plan, arrays), chosen)
    assert fits.all() and np.array_equal(np.diff(offsets), arrays["segment_tokens"][chosen])
    assert tokens.max() < 256  # bytes: no sentinel, mode token, bos or eos is left


def test_stored_segments_tell_row_begin_and_length(plan):
    arrays = make_shard(plan, 0).arrays
    stored = stored_segments(plan, arrays)
    row, begin, slots = stored.row, stored.first_slot, stored.slots
    ids = arrays["segment_ids"]
    for r, b, n in zip(row, begin, slots, strict=True):
        assert (
            len(set(ids[r, b : b + n])) == 1
            and ids[r, b] > 0
            and (b + n == 512 or ids[r, b + n] != ids[r, b])
        )


@pytest.mark.parametrize("epoch", [0, 2])
def test_slots_of_tokens_are_known_where_cuts_keep_characters_whole(tmp_path, epoch):
    made.write_lines(tmp_path / "a.jsonl", ["漢字🙂é" * 20 for _ in range(20)])
    made.build(made.table("a.jsonl", tasks=[{"preset": "fim"}]), tmp_path, tmp_path / "out")
    plan = open_plan(tmp_path / "out")
    assert plan.tasks[0].parameters["text_safe"]
    arrays = make_shard(plan, 0, epoch=epoch).arrays
    stored, chosen = stored_segments(plan, arrays), np.arange(len(arrays["segment_key"]))
    found = restore(plan, arrays, stored, chosen, epoch)
    slots = slots_of_tokens(plan, arrays, stored, chosen, found.ids, epoch)
    row = np.repeat(stored.row, arrays["segment_tokens"])
    assert (
        found.fits.all()
        and (slots >= 0).all()
        and np.array_equal(arrays["tokens"][row, slots], found.ids)
    )


def test_damaged_offsets_of_trained_ranges_are_refused_by_name(plan):
    for offsets, said in (
        ([5], "trained_offsets is 5 … 5, but should be 0 … 2"),
        ([1, 1, 2], "trained_offsets is 1 … 2, but should be 0 … 2"),
        ([0, 1, 3], "trained_offsets is 0 … 3, but should be 0 … 2"),
        ([0, 2, 1, 2], "segment 1 cannot be inverted: trained_offsets descends"),
        ([0, 2**63 - 1, -2, 2], "segment 1 cannot be inverted: trained_offsets descends"),
    ):
        arrays = {
            "segment_tokens": np.zeros(len(offsets) - 1, np.int32),
            "trained_offsets": np.array(offsets, np.int64),
            "trained_ranges": np.zeros((2, 2), np.int32),
        }
        shard = SimpleNamespace(arrays=arrays, path="a.safetensors", seq_length=512)
        with pytest.raises(DatasetError, match=f"^a.safetensors: {said}.*\nhint: find all damage"):
            sound_segments(plan, shard)


def writable(plan, shard):
    return {name: array.copy() for name, array in make_shard(plan, shard).arrays.items()}


def test_every_segment_of_a_dataset_can_be_built_again_from_its_source(plan):
    for shard in range(plan.shards):
        arrays = make_shard(plan, shard).arrays
        assert set(replay_segments(plan, arrays, np.arange(len(arrays["segment_key"])))) == {""}


@pytest.mark.parametrize("mult, algorithm", [(8, "best_fit"), (1, "concat")])
def test_replay_of_padded_and_concatenated_segments(built, tmp_path, mult, algorithm):
    tasks = [{"preset": "prefix_lm"}]
    table = {
        **built.table,
        "tasks": tasks,
        "packing": {"pad_seq_to_mult": mult, "algorithm": algorithm},
    }
    plan = made.build(table, built.base, tmp_path / "out").plan
    arrays = make_shard(plan, 0).arrays
    assert set(replay_segments(plan, arrays, np.arange(len(arrays["segment_key"])))) == {""}


@pytest.mark.parametrize(
    "name, change, said",
    [
        (
            "tokens",
            lambda a, k, place: a["tokens"].__setitem__(place, a["tokens"][place] ^ 1),
            "tokens at slot",
        ),
        (
            "loss_mask",
            lambda a, k, place: a["loss_mask"].__setitem__(place, 1 - a["loss_mask"][place]),
            "loss_mask at",
        ),
        (
            "key",
            lambda a, k, place: a["segment_key"].__setitem__(k, 5),
            "segment_key is 5, but should be",
        ),
        (
            "prefix",
            lambda a, k, place: a["segment_prefix"].__setitem__(k, 1),
            "segment_prefix is 1, but should be",
        ),
        # another use is cut elsewhere, or drawn another task, or at least has another key
        (
            "repeat",
            lambda a, k, place: a["segment_repeat"].__setitem__(k, 7),
            (
                "segment_key is .*, but should be|its document has no cut at token|slots, but should"
                " have"
            ),
        ),
    ],
)
def test_a_changed_segment_is_found_and_said(plan, name, change, said):
    import re

    arrays = writable(plan, 0)
    stored = stored_segments(plan, arrays)
    row, begin, slots = stored.row, stored.first_slot, stored.slots
    k = int(np.argmax(slots * (arrays["segment_prefix"] > 3)))
    change(arrays, k, (row[k], begin[k] + slots[k] // 2))
    found = replay_segments(plan, arrays, np.arange(len(row)))
    assert re.search(said, found[k]) and [i for i, text in enumerate(found) if text] == [k]


def test_a_segment_that_claims_more_than_its_document_is_found(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["x" * 50, "y" * 70])
    plan = made.build(
        made.table("a.jsonl", tasks=[{"preset": "causal"}]), tmp_path, tmp_path / "out"
    ).plan
    arrays = writable(plan, 0)
    arrays["segment_tokens"] += 1  # and its eos would be a token
    found = replay_segments(plan, arrays, np.arange(2))
    assert found == [
        "segment_tokens is 51, but should be 50",
        "segment_tokens is 71, but should be 70",
    ]


def test_a_document_that_is_not_there_any_more_is_a_source_error(built, plan):
    with pytest.raises(
        SourceError, match="source 'web': a.jsonl no longer has a usable document at 3"
    ):
        documents_at(plan, plan.sources[0], 0, 0, np.array([0, 3]))
    found = documents_at(plan, plan.sources[0], 0, 0, np.array([0]))
    assert bytes(found.ids.astype(np.uint8)).decode() == made.texts(250, 0)[0]


def test_a_text_file_in_a_shared_piece_is_found_by_its_name(built, plan):
    notes = plan.sources[2]
    for i in (1, 7, 30):
        found = documents_at(plan, notes, notes.first_file + i, 0, np.array([0]))
        assert (
            bytes(found.ids.astype(np.uint8))
            == (built.base / "notes" / notes.files[i].name).read_bytes()
        )
