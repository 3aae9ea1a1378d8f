"""Documents that are removed: nothing of them is left, no other slot moves, and it can be proven as
of a build."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from itertools import cycle

import numpy as np
import pytest

from packprep.building.commit import done_receipt
from packprep.building.plan import open_plan
from packprep.building.removal import REMOVED
from packprep.dataset.loader import open_dataset
from packprep.dataset.shard import shard_in
from packprep.documents.store import encode, open_arrays
from packprep.errors import DatasetError, PackprepError, PlanError, RecipeError, StateError
from packprep.exporting.export import export_dataset
from packprep.format.json_files import shard_name
from packprep.removing import remove_documents
from packprep.storage import folder_at
from packprep.verification import verify_dataset
from tests import made, media_made
from tests.command_line import inside, refused
from tests.golden.builds import BUILDS, make
from tests.twin.check import verify_with_twin
from tests.verification.damage import edit_plan, put_shard, resigned

ALL = -1
ERASED = {f"segment_{name}" for name in ("tokens", "prefix", "noise", "loss_weight")}


def shards_of(folder):
    """(shard, its arrays) of each shard of a dataset."""
    dataset = open_dataset(folder)
    for number in range(len(dataset.manifest["shards"])):
        shard = shard_in(folder, dataset.manifest, number)
        yield shard, shard.arrays


def documents_of(folder):
    """The documents that a dataset's segments name, as a list names them; those in several segments
    first."""
    counts = Counter(
        tuple(document.values())
        for _, arrays in shards_of(folder)
        for document in named_in(folder, arrays)
    )
    ordered = sorted(counts, key=lambda document: (-counts[document], document))
    return [dict(zip(("source", "file", "doc"), document, strict=True)) for document in ordered]


def named_in(folder, arrays):
    """The document of each segment of a shard, as a list names it."""
    sources = open_plan(folder).sources
    files = [
        {"source": source.name, "file": file.name} for source in sources for file in source.files
    ]
    places = zip(arrays["segment_file"].tolist(), arrays["segment_doc"].tolist(), strict=True)
    return [{**files[file], "doc": doc} for file, doc in places]


def write_list(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def sound(folder, replay=ALL, moved=None, twin=False, epoch=0):
    """Whether every promise of a dataset holds."""
    if twin:
        report = verify_with_twin(folder, replay, moved, epoch)
    else:
        report = verify_dataset(folder, replay, moved or {}, (0, 1), 0, made.Silent(), epoch=epoch)
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


@pytest.mark.parametrize(
    "name", [n if n == "ul2r" else pytest.param(n, marks=pytest.mark.long) for n in BUILDS]
)
def test_a_dataset_loses_documents_and_no_other_slot_moves(built, tmp_path, name):
    old, new = built(name), tmp_path / "new"
    documents = documents_of(old)
    gone = [documents[0], *random.Random(name).sample(documents[1:], 3)]
    result = remove_documents(
        old, write_list(tmp_path / "list", [*gone, gone[0]]), new, made.Silent()
    )
    assert (result["listed"], result["removed"], result["elsewhere"]) == (4, 4, 0)
    plan = open_plan(new)
    for b, ((before, arrays), (after, without)) in enumerate(
        zip(shards_of(old), shards_of(new), strict=True)
    ):
        listed = np.array([document in gone for document in named_in(old, arrays)])
        if b not in result["changed"]:
            assert not listed.any() and os.path.samefile(before.path, after.path)
            assert done_receipt(folder_at(new), b, plan.digests)[0]["plan_digest"] != plan.digest
            continue
        assert listed.any() and ((without["segment_tokens"] == 0) == listed).all()
        ids = segment_numbers(arrays)
        away = np.isin(ids, np.flatnonzero(listed))
        for name_of, array in arrays.items():
            if array.shape == away.shape:
                assert (without[name_of] == array)[~away].all()
                if name_of != "segment_ids":
                    assert (
                        without[name_of][away]
                        == (0 if name_of == "loss_mask" else plan.vocabulary.roles["pad"])
                    ).all()
            elif name_of in ERASED:
                assert (without[name_of] == array)[~listed].all(), name_of
            elif not name_of.startswith("media_"):
                assert (without[name_of] == array).all(), name_of
    # whose plan is of another place
    moved = {"web": str(old.parent / "sources")} if name == "duo" else {}
    for epoch in (0, 2):
        assert sound(new, moved=moved, twin=True, epoch=epoch)["replayed"] > 0
        before, after = (
            sum(int(ds.row(i, epoch).loss_mask.sum()) for i in range(len(ds)))
            for ds in map(open_dataset, (old, new))
        )
        assert 0 < after < before


def segment_numbers(arrays):
    """int64[rows, seq_length]: which of the shard's segments has each slot; −1: none."""
    numbers = np.full(arrays["tokens"].shape, -1)
    physical = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"])
    for r in range(len(numbers)):
        first, last = arrays["row_offsets"][r : r + 2].tolist()
        for g in range(first, last):
            begin, real = (
                int(physical[g + r]),
                int(arrays["cu_seqlens"][g + r + 1] - arrays["cu_seqlens"][g + r]),
            )
            numbers[r, begin : begin + real] = g
    return numbers


def test_removing_twice_is_removing_once_and_loader_states_stay_good(built, tmp_path):
    old = built("ul2r")
    documents = documents_of(old)[:5]
    first, both = (
        write_list(tmp_path / "first", documents[:2]),
        write_list(tmp_path / "both", documents[::-1]),
    )
    rest = write_list(tmp_path / "rest", documents[1:])
    remove_documents(old, first, tmp_path / "once", made.Silent())
    remove_documents(tmp_path / "once", rest, tmp_path / "twice", made.Silent())
    remove_documents(old, both, tmp_path / "together", made.Silent())
    sound(tmp_path / "twice", twin=True)
    for under in ("shards", "rejects", "removed.json"):
        assert made.contents(tmp_path / "twice", under) == made.contents(
            tmp_path / "together", under
        )
    manifests = [
        open_dataset(folder).manifest
        for folder in (old, tmp_path / "once", tmp_path / "twice", tmp_path / "together")
    ]
    assert (
        manifests[2]["ledger"] == manifests[3]["ledger"]
        and manifests[2]["fingerprint"] == manifests[3]["fingerprint"]
    )
    replaced = [entry["fingerprint"] for entry in manifests[2]["removed"]["replaces"]]
    assert replaced == [manifest["fingerprint"] for manifest in manifests[:2]]

    def batches(folder):
        return open_dataset(folder).batches(2, seed=3, redraw=True)

    before, after = batches(old), batches(tmp_path / "twice")
    next(before)
    after.load_state_dict(before.state_dict())
    assert (next(after)["segment_ids"] == next(before)["segment_ids"]).all()
    assert after.state_dict()["fingerprint"] == manifests[2]["fingerprint"]
    with pytest.raises(StateError, match="fingerprint"):
        batches(old).load_state_dict(after.state_dict())
    mixed = [
        open_dataset([folder, folder], shares=[1, 2]).batches(2)
        for folder in (old, tmp_path / "once")
    ]
    next(mixed[0])
    mixed[1].load_state_dict(mixed[0].state_dict())
    with pytest.raises(
        RecipeError, match="none of its documents has a segment .*rejected or removed before"
    ):
        remove_documents(tmp_path / "once", first, tmp_path / "again", made.Silent())


def test_compact_shards_train_nothing_of_a_removed_document(tmp_path):
    """Their loss follows from the header."""
    made.write_lines(tmp_path / "a.jsonl", made.texts(60, 3))
    tasks, masks = [{"objective": "causal"}, {"objective": "prefix_lm"}], []
    for columns in ("full", "compact"):
        old, new = tmp_path / columns, tmp_path / f"{columns} without"
        made.build(made.table("a.jsonl", tasks=tasks, output={"columns": columns}), tmp_path, old)
        remove_documents(
            old, write_list(tmp_path / "list", documents_of(old)[:9]), new, made.Silent()
        )
        sound(new, twin=True, epoch=1)
        dataset = open_dataset(new)
        masks.append(dataset.batch(range(len(dataset)), columns=["loss_mask"])["loss_mask"])
    assert (masks[0] == masks[1]).all()


@pytest.mark.parametrize("name", ["masked", pytest.param("blocks", marks=pytest.mark.long)])
def test_both_ways_to_resample_skip_removed_documents(built, tmp_path, name):
    """Of rows in which all segments, or only one, lost their documents."""
    old, documents = built(name), documents_of(built(name))
    gone = write_list(tmp_path / "list", documents[: len(documents) // 2])
    remove_documents(old, gone, tmp_path / "new", made.Silent())
    dataset, names = open_dataset(tmp_path / "new"), ["tokens", "loss_mask", "loss_weights"]
    rows = [
        dataset.batch(range(20), columns=names, epochs=[2] * 20, accelerate=how)
        for how in ("numpy", "numba")
    ]
    assert all((rows[0][column] == rows[1][column]).all() for column in rows[0])
    sound(tmp_path / "new", twin=True, epoch=3)


def test_exports_have_no_removed_document(built, tmp_path):
    old = built("ul2r")
    gone = documents_of(old)[:2]
    remove_documents(old, write_list(tmp_path / "list", gone), tmp_path / "new", made.Silent())
    for folder, name in ((old, "before"), (tmp_path / "new", "after")):
        export_dataset(folder, "jsonl", tmp_path / name, made.Silent(), what="documents")
    lines = {
        name: [
            line
            for data in made.contents(tmp_path / name).values()
            for line in data.splitlines()
            if b'"text"' in line
        ]
        for name in ("before", "after")
    }
    assert len(lines["before"]) - len(lines["after"]) == 2 and set(lines["after"]) < set(
        lines["before"]
    )


@pytest.mark.long
def test_a_token_store_loses_documents_and_datasets_of_it_are_those_that_lose_them(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(120, 1))
    made.write_parquet(tmp_path / "b.parquet", made.texts(80, 2))
    sources = [
        {"name": "a", "paths": ["a.jsonl"]},
        {"name": "b", "paths": ["b.parquet"], "repeat": 1.5},
    ]
    table = made.table(sources, output={"shard_text_bytes": 15_000})
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    of_store = {**table, "sources": [{**s, "paths": ["store"], "format": "store"} for s in sources]}
    made.build(of_store, tmp_path, tmp_path / "old")
    gone = write_list(
        tmp_path / "list",
        [*documents_of(tmp_path / "old")[:3], {"source": "b", "file": "b.parquet", "doc": 7}],
    )
    result = remove_documents(tmp_path / "store", gone, tmp_path / "less", made.Silent())
    assert result["removed"] == 4 and 0 < len(result["changed"]) < result["shards"]
    sound(tmp_path / "less")
    again = verify_dataset(tmp_path / "less", ALL, {}, (0, 1), 0, made.Silent())
    assert again["replayed"] == 200
    remove_documents(tmp_path / "old", gone, tmp_path / "new", made.Silent())
    store = {source["name"]: f"store:{tmp_path}/less" for source in sources}
    made.build(
        {**of_store, "sources": [{**s, "paths": ["less"]} for s in of_store["sources"]]},
        tmp_path,
        tmp_path / "built",
    )
    for under in ("shards", "rejects", "removed.json"):
        assert made.contents(tmp_path / "new", under) == made.contents(tmp_path / "built", under)
    new, fresh = (open_dataset(tmp_path / name).manifest for name in ("new", "built"))
    assert new["ledger"] == fresh["ledger"] and new["fingerprint"] == fresh["fingerprint"]
    for folder in ("new", "built"):
        sound(tmp_path / folder)
        sound(tmp_path / folder, moved=store)
        sound(tmp_path / folder, moved={name: str(tmp_path) for name in store}, twin=True)
    more = write_list(tmp_path / "more", documents_of(tmp_path / "built")[4:6])
    remove_documents(tmp_path / "built", more, tmp_path / "fewer", made.Silent())
    sound(tmp_path / "fewer")
    with pytest.raises(PlanError, match="the removed documents differ"):
        made.build(of_store, tmp_path, tmp_path / "built")
    faults = verify_dataset(tmp_path / "old", ALL, store, (0, 1), 0, made.Silent())["listed"]
    assert {fault["promise"] for fault in faults} == {"P17"}  # which is to lose them too


@pytest.mark.long
def test_media_of_a_removed_document_go_with_it(tmp_path):
    """From a dataset, from a store, and from what is built of that: its places and refs, and its
    slots in the ledger."""
    media_made.corpus(tmp_path)
    records, at, gone, refs = media_made.texts(60), 0, [], []
    for i, record in enumerate(records):
        for entry in record["media"]:
            entry["ref"] = f"picture {i}."
        if record["media"] and 7 < i < 20:
            gone.append({"source": "texts", "file": "a.jsonl", "doc": at})
            refs.append(f"picture {i}.".encode())
        at += len(json.dumps(record, ensure_ascii=False).encode()) + 1
    media_made.write(tmp_path, "a.jsonl", records)
    table = media_made.table(tokenizer="bpe", output={"shard_text_bytes": 4000})
    of_store = [{**source, "paths": ["store"], "format": "store"} for source in table["sources"]]
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    made.build({**table, "sources": of_store}, tmp_path, tmp_path / "old")
    changed = {}
    for name, out in (("store", "less"), ("old", "new")):
        result = remove_documents(
            tmp_path / name, write_list(tmp_path / "list", gone), tmp_path / out, made.Silent()
        )
        assert result["removed"] > 5
        changed[out] = result["changed"]
        before, after = (
            b"".join(made.contents(tmp_path / folder, "shards").values()) for folder in (name, out)
        )
        assert sum(ref in before for ref in refs) > 5 and not any(ref in after for ref in refs)
    of_less = [{**source, "paths": ["less"]} for source in of_store]
    made.build({**table, "sources": of_less}, tmp_path, tmp_path / "built")
    assert made.contents(tmp_path / "new", "shards") == made.contents(tmp_path / "built", "shards")
    manifests = [open_dataset(tmp_path / name).manifest for name in ("old", "new", "built")]
    assert manifests[1]["ledger"] == manifests[2]["ledger"]
    slots = [manifest["ledger"]["sources"]["texts"]["slots"]["media"] for manifest in manifests]
    assert 0 < slots[1] < slots[0]
    old, new = open_dataset(tmp_path / "old"), open_dataset(tmp_path / "new")
    removed = {document["doc"] for document in gone}
    for i in range(len(old)):
        was, row = old.row(i), new.row(i)
        segment = was.segment_ids[was.media.slot].astype(int) - 1
        is_text = was.segments["source"][segment] == 0
        stays = ~(is_text & np.isin(was.segments["doc"][segment], list(removed)))
        assert row.media.slot.tolist() == was.media.slot[stays].tolist()
        assert row.media.refs == [
            ref for ref, kept in zip(was.media.refs, stays, strict=True) if kept
        ]
    moved = {name: str(tmp_path) for name in ("texts", "chats")}
    sound(tmp_path / "less")
    for name in ("new", "built"):
        sound(tmp_path / name, moved={source: f"store:{tmp_path}/less" for source in moved})
        sound(tmp_path / name, moved=moved, twin=True, epoch=2 * (name == "new"))
    number = changed["less"][0]
    paths = [tmp_path / name / shard_name(number) for name in ("store", "less")]
    before, after = (open_arrays(path.read_bytes(), str(path)) for path in paths)
    for names, left in (
        (("tokens",), "tokens"),
        (("place_ref_offsets", "place_refs"), "refs of media"),
    ):
        put_shard(
            tmp_path / "less",
            b"".join(encode({**after, **{name: before[name] for name in names}})),
            number,
        )
        (fault,) = verify_dataset(tmp_path / "less", None, {}, (0, 1), 0, made.Silent())["listed"]
        assert (fault["promise"], fault["message"]) == (
            "P23",
            f"a removed document has {left}",
        )
    every = documents_of(tmp_path / "new")
    remove_documents(
        tmp_path / "new", write_list(tmp_path / "list", every), tmp_path / "none", made.Silent()
    )
    sound(tmp_path / "none", moved=moved, twin=True)
    assert (
        "media"
        not in open_dataset(tmp_path / "none").manifest["ledger"]["sources"]["texts"]["slots"]
    )
    assert not any(
        name.startswith("media_") for _, arrays in shards_of(tmp_path / "none") for name in arrays
    )


def test_rows_of_two_sides_lose_pieces_of_which_all_is_trained(tmp_path):
    """Their prefix stays, whose law asks for how many tokens there are, and so for eos, which is
    gone."""
    spans = [{"text": text, "loss_spans": [[0, len(text)]]} for text in made.texts(30, 4, 300)]
    media_made.write(tmp_path, "a.jsonl", spans)
    packing, task = {"encoder_length": 64, "decoder_length": 64}, {"objective": "prefix_lm"}
    table = made.table("a.jsonl", packing=packing, tasks=[task])
    made.build(
        {key: value for key, value in table.items() if key != "seq_length"},
        tmp_path,
        tmp_path / "old",
    )
    gone = documents_of(tmp_path / "old")[:8]
    remove_documents(
        tmp_path / "old", write_list(tmp_path / "list", gone), tmp_path / "new", made.Silent()
    )
    for epoch in (0, 3):
        sound(tmp_path / "new", twin=True, epoch=epoch)


@pytest.mark.parametrize("place", ["file", "memory"])
def test_at_urls_files_are_copied(built, tmp_path, place):
    old = built("ul2r")
    gone, url = write_list(tmp_path / "list", documents_of(old)[:1]), f"{place}://{tmp_path}/new"
    remove_documents(old, gone, url, made.Silent())
    sound(url)
    result = remove_documents(
        url, write_list(tmp_path / "more", documents_of(old)[1:2]), tmp_path / "back", made.Silent()
    )
    sound(tmp_path / "back")
    assert result["removed"] == 1


KILLED = """
import os, sys
from packprep import removing
from packprep.building import commit
from packprep.storage import local
from tests import made
left = [int(sys.argv[4])]
def counted(do):
    def call(*arguments, **named):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return do(*arguments, **named)
    return call
for name in ("write", "create", "link"):
    setattr(local.LocalFolder, name, counted(getattr(local.LocalFolder, name)))
removing.remove_documents(sys.argv[1], sys.argv[2], sys.argv[3], made.Silent())
"""


@pytest.mark.long
def test_a_removal_that_is_killed_at_any_write_opens_as_nothing_and_goes_on(built, tmp_path):
    old = built("repeats")
    gone = write_list(tmp_path / "list", documents_of(old)[:2])
    remove_documents(old, gone, tmp_path / "whole", made.Silent())
    wanted, new = made.contents(tmp_path / "whole"), tmp_path / "new"
    kills = 0
    for calls in cycle((0, 2, 4, 3, 5)):
        command = [sys.executable, "-c", KILLED, *map(str, (old, gone, new, calls))]
        status = subprocess.run(command, env=made.environment(), timeout=60).returncode
        if status != 9:
            break
        kills += 1
        with pytest.raises(PackprepError, match="does not exist"):
            open_dataset(new)
        if (new / "plan.json").exists():
            with pytest.raises(PlanError, match="was started with another list"):
                remove_documents(
                    old, write_list(tmp_path / "other", documents_of(old)[:3]), new, made.Silent()
                )
    assert status == 0 and kills > 3
    assert made.contents(new) == wanted
    # once more changes nothing
    assert inside("remove", old, "--documents", gone, "--out", new).status == 0
    assert made.contents(new) == wanted


def test_what_cannot_be_removed_is_refused_and_nothing_is_written(built, tmp_path):
    old, good = built("repeats"), json.dumps(documents_of(built("repeats"))[0])
    for line, message in (
        ("{", "line 2: "),
        ('{"doc": 1}', "line 2: source is None, but should be one of web, books, notes"),
        ('{"source": "wep", "file": "a", "doc": 1}', "source is 'wep'"),
        (
            '{"source": "web", "file": "other.jsonl", "doc": 1}',
            "source 'web' has no file 'other.jsonl'",
        ),
        ('{"source": "notes", "doc": 0}', "so the line must name one in file"),
        ('{"source": "web", "doc": -1}', "expected POSITION or FILE:POSITION"),
        ('{"source": "web", "doc": true}', "doc is True"),
        ('{"source": "web", "doc": 1, "why": "x"}', "expected an object with source, file and doc"),
        ("[]", "expected an object with source, file and doc"),
    ):
        (tmp_path / "list").write_text(f"{good}\n{line}\n")
        assert message in refused(
            "remove", old, "--documents", tmp_path / "list", "--out", tmp_path / "new"
        ), line
    (tmp_path / "list").write_text("\n")
    assert "the list is empty" in refused(
        "remove", old, "--documents", tmp_path / "list", "--out", tmp_path / "new"
    )
    (tmp_path / "list").write_text('{"source": "web", "doc": 3}\n')
    assert "nothing to remove" in refused(
        "remove", old, "--documents", tmp_path / "list", "--out", tmp_path / "new"
    )
    assert not (tmp_path / "new").exists()
    (tmp_path / "list").write_text(good)
    for out in (old, old / "inner"):
        assert "is inside the dataset" in refused(
            "remove", old, "--documents", tmp_path / "list", "--out", out
        )
    assert "has files that packprep did not write" in refused(
        "remove", old, "--documents", tmp_path / "list", "--out", tmp_path
    )
    half = tmp_path / "half"
    shutil.copytree(old, half)
    (half / "dataset.json").unlink()
    assert "is not finished" in refused(
        "remove", half, "--documents", tmp_path / "list", "--out", tmp_path / "new"
    )
    assert "No such file" in refused(
        "remove", old, "--documents", tmp_path / "none", "--out", tmp_path / "new"
    )
    assert not (tmp_path / "new").exists()


def test_a_damaged_shard_is_not_signed_again(built, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(built("repeats"), old)
    gone = write_list(tmp_path / "list", documents_of(old)[:1])
    number = remove_documents(old, gone, tmp_path / "new", made.Silent())["changed"][0]
    path = old / f"shards/000/{number:06d}.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatasetError, match="verify"):
        remove_documents(old, gone, tmp_path / "again", made.Silent())
    assert not (tmp_path / "again" / "dataset.json").exists()


def test_what_is_said_of_a_removed_document(built, tmp_path):
    old, new = built("ul2r"), tmp_path / "new"
    gone, *_ = documents_of(old)
    lines = [{"doc": f"{gone['file']}:{gone['doc']}"}, {"doc": 1}]
    said = inside("remove", old, "--documents", write_list(tmp_path / "list", lines), "--out", new)
    assert said.status == 0 and "removed 1 document with" in said.out
    assert (
        "without content here: 1 not selected by sample, where or repeat, or not documents: web web.jsonl:1"
        in said.out
    )
    shown = inside("inspect", new, "--doc", f"{gone['file']}:{gone['doc']}", "--json").json
    assert [use["outcome"] for use in shown["files"][0]["uses"]] == [REMOVED]
    assert "rejected: " in inside("inspect", new).out and "removed 1" in inside("inspect", new).out
    number = next(
        (i, int(k))
        for b, (_, arrays) in enumerate(shards_of(new))
        for i, k in [found(new, b, arrays)]
        if i is not None
    )
    shown = inside("inspect", new, "--row", number[0], "--segment", number[1], "--from-plan")
    assert "its document was removed" in shown.out
    assert inside("inspect", new, "--html", tmp_path / "report.html", "--from-plan").status == 0
    assert verify_with_twin(new, 20)["faults"] == 0


def found(folder, number, arrays):
    """(row of the dataset, number from 1) of the first removed segment of a shard; None, 0 if there
    is none."""
    removed = np.flatnonzero(arrays["segment_tokens"] == 0)
    if not len(removed):
        return None, 0
    row = int(np.searchsorted(arrays["row_offsets"], removed[0], "right")) - 1
    before = sum(entry["rows"] for entry in open_dataset(folder).manifest["shards"][:number])
    return before + row, int(removed[0] - arrays["row_offsets"][row]) + 1


@pytest.mark.parametrize("name, value", [("tokens", 65), ("segment_tokens", 1), ("loss_mask", 1)])
def test_p23_finds_what_is_left_of_a_removed_document(built, tmp_path, name, value):
    old, new = built("ul2r"), tmp_path / "new"
    result = remove_documents(
        old, write_list(tmp_path / "list", documents_of(old)[:1]), new, made.Silent()
    )
    number = result["changed"][0]
    with resigned(new, number) as arrays:
        removed = int(np.flatnonzero(arrays["segment_tokens"] == 0)[0])
        if name == "segment_tokens":
            arrays[name][removed] = value
        else:
            row, slot = np.argwhere(segment_numbers(arrays) == removed)[0]
            arrays[name][row, slot] = value
    faults = verify_dataset(new, None, {}, (0, 1), 0, made.Silent())["listed"]
    assert "P23" in {fault["promise"] for fault in faults}


@pytest.fixture(scope="module")
def twice(built, tmp_path_factory):
    """A dataset that lost documents twice."""
    folder = tmp_path_factory.mktemp("twice")
    documents = documents_of(built("ul2r"))
    remove_documents(
        built("ul2r"), write_list(folder / "first", documents[:1]), folder / "once", made.Silent()
    )
    remove_documents(
        folder / "once",
        write_list(folder / "next", documents[1:2]),
        folder / "twice",
        made.Silent(),
    )
    return folder / "twice"


@pytest.mark.parametrize("number", [0, 1])
def test_a_foreign_dataset_among_those_that_are_replaced_is_found(twice, tmp_path, number):
    """Its loader states would be taken."""
    new = shutil.copytree(twice, tmp_path / "new")
    made.write_lines(tmp_path / "a.jsonl", made.texts(20))
    made.build(made.table("a.jsonl"), tmp_path, tmp_path / "foreign")
    own = open_dataset(new).manifest["removed"]["replaces"][number]
    foreign = open_dataset(tmp_path / "foreign").manifest
    named = {
        "fingerprint": foreign["fingerprint"],
        "digest": foreign["digest"],
        "plan": foreign["plan"]["digest"],
    }
    assert sound(new, None) and own.keys() - named.keys() == ({"removed"} if number else set())
    edit_plan(new, lambda plan: plan["removed"]["replaces"][number].update(named))
    faults = verify_dataset(new, None, {}, (0, 1), 0, made.Silent())["listed"]
    for key in ("fingerprint", "plan", "digest"):
        assert ("P2", named[key]) in {(fault["promise"], fault["value"]) for fault in faults}
