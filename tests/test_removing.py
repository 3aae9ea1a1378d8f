"""Documents that are removed: nothing of them is left, no other slot moves, and it can be proven as of a build."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from packprep.building.commit import done_receipt
from packprep.building.plan import open_plan, open_store
from packprep.dataset.loader import open_dataset
from packprep.dataset.shard import shard_in
from packprep.errors import DatasetError, PackprepError, PlanError, RecipeError, StateError
from packprep.exporting.export import export_dataset
from packprep.removing import remove_documents
from packprep.verification import verify_dataset
from tests import made
from tests.command_line import inside, refused
from tests.golden.builds import BUILDS, make
from tests.verification.damage import resigned

ALL = -1


@pytest.fixture(autouse=True)
def forgotten():
    open_store.cache_clear()


def shards_of(folder):
    """(shard, its arrays) of each shard of a dataset."""
    dataset = open_dataset(folder)
    for number in range(len(dataset.manifest["shards"])):
        shard = shard_in(folder, dataset.manifest, number)
        yield shard, shard.arrays


def documents_of(folder):
    """The documents that a dataset's segments name, as a list names them; those in several segments first."""
    plan, counts = open_plan(folder), {}
    files = [(source.name, file.name) for source in plan.sources for file in source.files]
    for _, arrays in shards_of(folder):
        for file, doc in zip(arrays["segment_file"].tolist(), arrays["segment_doc"].tolist(), strict=True):
            counts[*files[file], doc] = counts.get((*files[file], doc), 0) + 1
    ordered = sorted(counts, key=lambda document: (-counts[document], document))
    return [dict(zip(("source", "file", "doc"), document, strict=True)) for document in ordered]


def write_list(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def sound(folder, replay=ALL, moved=None, twin=False, epoch=0):
    """Whether every promise of a dataset holds."""
    report = verify_dataset(folder, replay, moved or {}, (0, 1), 0, made.Silent(), twin=twin, epoch=epoch)
    assert not report["faults"], report["listed"]
    return report


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The golden builds, made when they are asked for: name → folder."""
    folder, found = tmp_path_factory.mktemp("removing"), {}

    def of(name):
        if name not in found:
            found[name] = make(name, folder)
        return found[name]

    return of


SHORT = ("ul2r", "bd3_compact")


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in BUILDS])
def test_a_dataset_loses_documents_and_no_other_slot_moves(built, tmp_path, name):
    old, new = built(name), tmp_path / "new"
    documents = documents_of(old)
    gone = [documents[0], *random.Random(name).sample(documents[1:], 3)]
    result = remove_documents(old, write_list(tmp_path / "list", [*gone, gone[0]]), new, made.Silent())
    assert (result["listed"], result["removed"], result["elsewhere"]) == (4, 4, 0)
    plan = open_plan(new)
    for b, ((before, arrays), (after, without)) in enumerate(zip(shards_of(old), shards_of(new), strict=True)):
        listed = plan.removed.segments(arrays)
        if b not in result["changed"]:
            assert not listed.any() and os.path.samefile(before.path, after.path)
            assert done_receipt(plan_folder(new), b, plan.digests)[0]["plan_digest"] != plan.digest
            continue
        assert listed.any() and (without["segment_removed"] == listed).all()
        ids = segment_numbers(arrays)
        away = np.isin(ids, np.flatnonzero(listed))
        for name_of, array in arrays.items():
            if array.shape == away.shape:
                assert (without[name_of] == array)[~away].all()
                if name_of != "segment_ids":
                    assert (without[name_of][away] == (0 if name_of == "loss_mask" else plan.vocabulary.roles["pad"])).all()
            elif name_of != "segment_prefix":
                assert (without[name_of] == array).all(), name_of
    moved = {"web": str(old.parent / "sources")} if name == "duo" else {}  # whose plan is of another place
    for epoch in (0, 2):
        assert sound(new, moved=moved, twin=True, epoch=epoch)["replayed"] > 0
        before, after = (sum(int(ds.row(i, epoch).loss_mask.sum()) for i in range(len(ds))) for ds in map(open_dataset, (old, new)))
        assert 0 < after < before


def plan_folder(folder):
    from packprep.storage import folder_at

    return folder_at(folder)


def segment_numbers(arrays):
    """int64[rows, seq_length]: which of the shard's segments has each slot; −1: none."""
    numbers = np.full(arrays["tokens"].shape, -1)
    physical = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"])
    for r in range(len(numbers)):
        first, last = arrays["row_offsets"][r : r + 2].tolist()
        for g in range(first, last):
            begin, real = int(physical[g + r]), int(arrays["cu_seqlens"][g + r + 1] - arrays["cu_seqlens"][g + r])
            numbers[r, begin : begin + real] = g
    return numbers
