"""Forgeries of mixture.json, removed.json, and the arrays of media and block noise: how many
`verify` finds.

Each is drawn by its number, changes, leaves out, adds or swaps something, and signs everything
again. `verify` is asked first, then `verify --replay all`. What neither finds has to be of a kind
that NOT_FOUND names, with the reason.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packprep.building.plan import datasets_in, open_plan, stored_plan
from packprep.building.replaced import with_removed
from packprep.errors import PackprepError
from packprep.format.digests import digest_of
from packprep.format.json_files import encode
from packprep.removing import remove_documents
from packprep.verification import verify_dataset
from packprep.verification.lengths import verify_lengths
from tests import made, media_made
from tests.verification.damage import (
    arrays_of,
    edit_manifest,
    edit_plan,
    edit_receipt,
    faults_of,
    read_json,
    resigned,
)

ALL = -1
NOT_FOUND = {
    "removed: a document without segments": (
        "`remove` lists such documents too, and the rows are the same"
    ),
}


# Datasets


def build_lengths(folder: Path) -> Path:
    made.write_lines(folder / "a.jsonl", made.texts(60, 1))
    table = made.table("a.jsonl", seq_lengths=[64, 128, 256], tasks=[{"preset": "causal"}])
    made.build_lengths(
        {k: v for k, v in table.items() if k != "seq_length"}, folder, folder / "out"
    )
    shutil.copytree(folder / "out/seq_128", folder / "other")
    return folder / "out"


def build_removed(folder: Path) -> Path:
    """A dataset of two sources and some shards that lost documents twice."""
    made.write_lines(folder / "a.jsonl", ["", *made.texts(50, 1, 200)])
    made.write_lines(folder / "b.jsonl", made.texts(30, 2, 200))
    sources = [{"name": "web", "paths": ["a.jsonl"]}, {"name": "books", "paths": ["b.jsonl"]}]
    table = made.table(
        sources, documents={"max_bad_fraction": 1}, output={"shard_text_bytes": 4000}
    )
    made.build(table, folder, folder / "whole")
    positions = {name: positions_of(folder / name) for name in ("a.jsonl", "b.jsonl")}
    for out, before, chosen in (
        ("once", "whole", [("web", "a.jsonl", 4), ("web", "a.jsonl", 9), ("books", "b.jsonl", 3)]),
        (
            "out",
            "once",
            [("web", "a.jsonl", 21), ("books", "b.jsonl", 8), ("books", "b.jsonl", 20)],
        ),
    ):
        lines = [{"source": s, "file": f, "doc": positions[f][i]} for s, f, i in chosen]
        (folder / "list").write_bytes(b"".join(map(encode, lines)))
        remove_documents(folder / before, folder / "list", folder / out, made.Silent())
    return folder / "out"


def positions_of(path: Path) -> list[int]:
    lines = path.read_bytes().splitlines(keepends=True)
    return [sum(map(len, lines[:i])) for i in range(len(lines))]


def build_media(folder: Path) -> Path:
    media_made.write(folder, "a.jsonl", media_made.texts(40, 3, most=20))
    tasks = [{"objective": "causal"}, {"objective": "masked_diffusion"}]
    sources = [{"name": "texts", "paths": ["a.jsonl"]}]
    changes = {"documents": {"max_bad_fraction": 1.0}, "tasks": tasks}
    made.build(media_made.table(sources=sources, **changes), folder, folder / "out")
    return folder / "out"


def build_blocks(folder: Path) -> Path:
    made.write_lines(folder / "a.jsonl", made.texts(30, 4))
    tasks = [{"preset": "bd3"}, {"preset": "causal"}]
    made.build(made.table("a.jsonl", seq_length=256, tasks=tasks), folder, folder / "out")
    return folder / "out"


# Forgeries: (what is done to the dataset, its kind)

Forgery = tuple[str, Callable[[], None]]


def forge_mixture(out: Path, chance: random.Random) -> Forgery:
    """A change of mixture.json."""
    path = out / "mixture.json"
    value = read_json(path)
    names, slots = value["datasets"], value["shares"][0][1]
    i, j = chance.sample(range(3), 2)
    kind = chance.choice(["change", "leave out", "add", "swap", "form"])
    if kind == "change":
        what = chance.randrange(5)
        if what == 0:
            slots[i] += chance.choice([-1, 1, 64, slots[i]])
        elif what == 1:
            names[i] = chance.choice(
                ["../other", f"./{names[i]}", f"{names[i]}/", f"../out/{names[i]}", names[j]]
            )
        elif what == 2:
            value["shares"] = chance.choice(
                [slots, [[0, [1, 1, 1]]], [[0, [slots[0], 0, slots[2]]]]]
            )
        elif what == 3:
            slots[i] = chance.choice([float(slots[i]), slots[i] * 2, 0.5])
        else:
            value["shares"][0][0] = chance.choice([1, 64, 0.0, False])
    elif kind == "leave out":
        for part in chance.choice([[names], [slots], [names, slots]]):
            del part[i]
    elif kind == "add":
        what = chance.randrange(4)
        if what == 0:
            names.append(chance.choice(["../other", names[i]]))
            slots.append(slots[i])
        elif what == 1:
            value["shares"].append([chance.randrange(1, 1000), [1, 1, 1]])
        elif what == 2:
            value["interpolate"] = chance.choice(["step", "linear"])
        else:
            value["max_epochs"] = chance.choice([[1, 1, 1], [None, 1, None], [None, None, None]])
    elif kind == "swap":
        of = chance.choice([names, slots])
        of[i], of[j] = of[j], of[i]
    else:
        value.update(chance.choice([{"version": 2}, {"format": "packprep"}, {"note": "x"}]))
    return f"mixture: {kind}", lambda: put(path, encode(value))


def forge_removed(out: Path, chance: random.Random) -> Forgery:
    """A change of removed.json, or of what the dataset says that it replaces."""
    value = read_json(out / "removed.json")
    documents = value["documents"]
    stored, plan = stored_plan(out), open_plan(out)
    replaces = [dict(entry) for entry in stored["removed"]["replaces"]]
    source = chance.choice(sorted(documents))
    (file,) = documents[source]
    positions = documents[source][file]
    number = [one.name for one in plan.sources].index(source)
    here = set[int]()  # documents of this file that have segments
    for b in range(plan.shards):
        arrays = arrays_of(out, b)
        here.update(arrays["segment_doc"][arrays["segment_source"] == number].tolist())
    every = sorted(here)
    kind = chance.choice(["change", "leave out", "add", "swap", "form", "replaced", "replaced"])
    if kind == "change":
        positions[chance.randrange(3)] = chance.choice([*every, positions[0] + 1, 1 << 40])
    elif kind == "leave out":
        what = chance.randrange(3)
        del (positions, documents[source], documents)[what][
            (chance.randrange(3), file, source)[what]
        ]
    elif kind == "add":
        positions.append(chance.choice([*every, 0, 7, 1 << 50]))
        if positions[-1] not in here:
            kind = "a document without segments"
    elif kind == "swap":
        other = next(name for name in documents if name != source)
        (others,) = documents[other]
        mine, theirs = documents[source][file], documents[other][others]
        what = chance.randrange(2)
        if what:
            mine[0], theirs[0] = theirs[0], mine[0]
        else:
            documents[source], documents[other] = {file: theirs}, {others: mine}
    elif kind == "form":
        what = chance.randrange(5)
        if what == 0:
            positions.reverse()
        elif what == 1:
            positions.append(positions[-1])
        elif what == 2:
            value.update(chance.choice([{"version": 2}, {"format": "packprep"}, {"note": 1}]))
        else:
            positions[0] = chance.choice(
                [float(positions[0]), True, [positions[0]], str(positions[0])]
            )
    elif kind == "replaced":
        what, i = chance.randrange(6), chance.randrange(2)
        if what == 0:
            del replaces[i]
        elif what == 1:
            replaces.reverse()
        elif what == 2:
            replaces.insert(i, dict(chance.choice(replaces)))
        elif what == 3:
            shards = dict(replaces[i]["shards"])
            number = chance.choice(sorted(shards))
            entry = shards.pop(number)
            if chance.random() < 0.5:
                shards[number] = {**entry, "tokens": entry["tokens"] + 1}
            replaces[i]["shards"] = shards
        elif what == 4:
            replaces[i]["ledger"] = {**replaces[i]["ledger"], "rows": 1}
        else:
            key = chance.choice(["fingerprint", "digest", "plan", "removed"][: 3 + i])
            replaces[i][key] = f"{chance.getrandbits(128):032x}"
    for files in documents.values() if kind not in ("form", "leave out") else ():
        for name in files:
            files[name] = sorted(set(files[name]))
    data = encode(value)

    def forge() -> None:
        put(out / "removed.json", data)
        removed = {"digest": digest_of(data), "replaces": replaces}
        edit_plan(out, lambda _: with_removed(stored, plan, removed))

    return f"removed: {kind}", forge


def forge_media(out: Path, chance: random.Random) -> Forgery:
    """A change of the arrays of media of a shard, and of the ledger where the places are others."""
    arrays = arrays_of(out)
    slots = media_slots(arrays)
    names = sorted(name for name in arrays if name.startswith("media_"))
    places, kind = (
        len(arrays["media_slot"]),
        chance.choice(["element", "element", "leave out", "add", "swap", "move"]),
    )
    k = chance.randrange(places)
    if kind == "element":
        name = chance.choice(names)
        change_element(arrays[name], chance)
        kind = f"element of {name}"
    elif kind == "leave out":
        with_tokens = chance.random() < 0.5
        if with_tokens:  # the slots become text
            fill_slots(arrays, k, 65)
            kind = "leave out, with its slots as text"
        take(arrays, np.delete(np.arange(places), k))
        arrays["media_offsets"][segment_of(arrays, k) + 1 :] -= 1
    elif kind == "add":
        take(arrays, np.insert(np.arange(places), k, k))
        arrays["media_offsets"][segment_of(arrays, k) + 1 :] += 1
        arrays["media_slot"][k + 1] += chance.choice([0, 1, arrays["media_tokens"][k]])
    elif kind == "swap":
        order = np.arange(places)
        other = chance.choice([i for i in range(places) if i != k])
        order[[k, other]] = order[[other, k]]
        what = chance.choice(["refs", "kinds", "all"])
        before = {
            name: arrays[name].copy() for name in ("media_slot", "media_tokens", "media_kind")
        }
        take(arrays, order)
        kept = {
            "refs": ("media_slot", "media_tokens", "media_kind"),
            "kinds": ("media_slot", "media_tokens"),
            "all": (),
        }
        arrays.update({name: before[name] for name in kept[what]})
        kind = f"swap {what}"
    else:  # a place belongs to the segment before or after its own
        inner = arrays["media_offsets"][1:-1]
        inner[chance.randrange(len(inner))] += chance.choice([-1, 1])
    difference = media_slots(arrays) - slots
    return f"media: {kind}", lambda: put_arrays(out, arrays, difference)


def media_slots(arrays: dict[str, np.ndarray]) -> int:
    return int(arrays["media_tokens"].sum(dtype=np.int64))


def segment_of(arrays: dict[str, np.ndarray], k: int) -> int:
    """The segment of a place."""
    return int(np.searchsorted(arrays["media_offsets"], k, "right")) - 1


def fill_slots(arrays: dict[str, np.ndarray], k: int, token: int) -> None:
    """Put a token into the slots of a place."""
    row = int(np.searchsorted(arrays["row_offsets"], segment_of(arrays, k), "right")) - 1
    begin = int(arrays["media_slot"][k])
    for name in ("tokens", "labels"):
        if name in arrays:
            arrays[name][row, begin : begin + int(arrays["media_tokens"][k])] = token


def take(arrays: dict[str, np.ndarray], order: np.ndarray) -> None:
    """Put places in another order, or fewer or more of them, with their refs."""
    offsets, refs = arrays["media_ref_offsets"], arrays["media_ref"]
    parts = [refs[offsets[i] : offsets[i + 1]] for i in order]
    for name in ("media_slot", "media_tokens", "media_kind"):
        arrays[name] = arrays[name][order]
    arrays["media_ref"] = np.concatenate([refs[:0], *parts])
    arrays["media_ref_offsets"] = np.cumsum([0, *map(len, parts)]).astype(np.int64)


def forge_blocks(out: Path, chance: random.Random) -> Forgery:
    """A change of the arrays of blocks of a shard."""
    arrays = arrays_of(out)
    blocks = len(arrays["block_noise"])
    kind, k = (
        chance.choice(["element", "element", "leave out", "add", "swap", "move"]),
        chance.randrange(blocks),
    )
    both = ("block_noise", "block_loss_weight")
    segment = int(np.searchsorted(arrays["block_offsets"], k, "right")) - 1
    if kind == "element":
        name = chance.choice(["block_offsets", *both])
        change_element(arrays[name], chance)
        kind = f"element of {name}"
    elif kind in ("leave out", "add"):
        order = (
            np.delete(np.arange(blocks), k)
            if kind == "leave out"
            else np.insert(np.arange(blocks), k, k)
        )
        arrays.update({name: arrays[name][order] for name in both})
        arrays["block_offsets"][segment + 1 :] += len(order) - blocks
    elif kind == "swap":
        other = chance.choice(
            [i for i in range(blocks) if arrays["block_noise"][i] != arrays["block_noise"][k]]
        )
        for name in chance.choice([both, both[:1], both[1:]]):
            arrays[name][[k, other]] = arrays[name][[other, k]]
    else:
        inner = arrays["block_offsets"][1:-1]
        inner[chance.randrange(len(inner))] += chance.choice([-1, 1])
    return f"blocks: {kind}", lambda: put_arrays(out, arrays, 0)


def change_element(array: np.ndarray, chance: random.Random) -> None:
    """Change one element by one, or a bit of it, or to another of the array's."""
    flat = array.reshape(-1)
    i, before = chance.randrange(len(flat)), array.tobytes()
    how = chance.choice(["+1", "-1", "bit", "other"])
    if how in ("+1", "-1"):
        flat[i] += flat.dtype.type(1 if how == "+1" else flat.dtype.type(0) - flat.dtype.type(1))
    elif how == "other":
        flat[i] = chance.choice(flat.tolist())
    if flat.tobytes() == before:
        flat.view(np.uint8)[i * flat.itemsize + chance.randrange(flat.itemsize)] ^= np.uint8(
            1 << chance.randrange(8)
        )


def put_arrays(out: Path, arrays: dict[str, np.ndarray], media: int) -> None:
    """Write a shard's arrays, with so many slots of media more in the ledgers, and sign all."""
    with resigned(out) as stored:
        stored.update(arrays)

    def count(ledger: dict[str, Any]) -> None:
        for source in ledger["sources"].values():
            if source["slots"].get("media"):
                source["slots"]["media"] += media
                return

    edit_receipt(out, lambda receipt: count(receipt["ledger"]))
    edit_manifest(out, lambda manifest: count(manifest["ledger"]))


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


# Which are found


def verified(out: Path, replay: int | None) -> bool:
    """Whether `verify` finds a fault, or refuses."""
    try:
        if not (out / "mixture.json").exists():
            return bool(faults_of(out, replay))
        reports = [
            verify_dataset(one, None, {}, (0, 1), 0, made.Silent()) for one in datasets_in(out)
        ]
        return bool(verify_lengths(str(out), reports, (0, 1), 0)["faults"])
    except PackprepError:
        return True


KINDS = {
    "mixture": (build_lengths, forge_mixture),
    "removed": (build_removed, forge_removed),
    "media": (build_media, forge_media),
    "blocks": (build_blocks, forge_blocks),
}


def forgeries(folder: Path, name: str, numbers: range) -> Iterator[tuple[str, str]]:
    """Make forgeries of one kind of file: what each is, and by what it is found, "" where by
    nothing."""
    build, forge = KINDS[name]
    folder.mkdir()
    out = build(folder)
    assert not verified(out, ALL)
    before = made.contents(out)
    for number in numbers:
        kind, apply = forge(out, random.Random(f"{name} {number}"))
        apply()
        changed = {file: data for file, data in made.contents(out).items() if data != before[file]}
        if changed:
            how = (
                "verify"
                if verified(out, None)
                else "verify --replay all"
                if verified(out, ALL)
                else ""
            )
            yield f"{kind} ({number})", how
        for file in changed:
            (out / file).write_bytes(before[file])


def count_found(folder: Path, count: int) -> tuple[int, Counter, list[str]]:
    """Forge each kind of file so often: (how many, how many are found by what, what is not
    found)."""
    found, missed = Counter[str](), []
    for name in KINDS:
        for kind, how in forgeries(folder / name, name, range(count)):
            found[how] += 1
            if not how:
                missed.append(kind)
    return sum(found.values()), found, missed


def check(folder: Path, count: int) -> None:
    total, found, missed = count_found(folder, count)
    print(f"{total} forgeries: {dict(found)}; not found: {missed}")
    assert total > 3 * count
    assert [kind for kind in missed if kind.rpartition(" (")[0] not in NOT_FOUND] == []


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("count", [2, 4])
def test_some_forgeries_are_found(tmp_path, count):
    check(tmp_path, count)


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_forgeries_are_found(tmp_path):
    """PACKPREP_FORGERIES: how many of each kind of file."""
    check(tmp_path, int(os.environ.get("PACKPREP_FORGERIES", "50")))
