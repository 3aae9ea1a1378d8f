import numpy as np
import pytest

from packprep.building.plan import open_plan
from packprep.building.work import make_shard
from packprep.restoring.segments import restore, slots_of_tokens, stored_segments
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
        assert len(set(ids[r, b : b + n])) == 1 and ids[r, b] > 0 and (b + n == 512 or ids[r, b + n] != ids[r, b])


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
    assert found.fits.all() and (slots >= 0).all() and np.array_equal(arrays["tokens"][row, slots], found.ids)
