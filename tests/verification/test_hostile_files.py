"""Files made to harm: pipes and devices in a file's place, numbers to allocate by, names that lead
out of the folder.

Each is signed, so that nothing but what it says can give it away. The loader reads or refuses it,
`verify` names a promise or refuses it; neither crashes, hangs, or takes memory by a number that it
found (`in_child` limits both).
"""

import os
import random
import shutil
import socket

import pytest

from packprep.errors import PackprepError
from packprep.format.digests import digest_of
from packprep.format.json_files import encode, receipt_name, rejects_name, shard_name
from packprep.verification import PROMISES
from tests import test_removing
from tests.fuzz.mutations import value_changed
from tests.verification import test_coverage, test_plan, test_promises
from tests.verification.damage import (
    copied,
    edit_manifest,
    edit_receipt,
    made,
    manifest_of,
    read_json,
    report_of,
    sign,
)
from tests.verification.hostile import in_child, read_all

FILES = [
    "dataset.json",
    "plan.json",
    "tokenizer.json",
    shard_name(1),
    receipt_name(1),
    rejects_name(0),
]
LOADED = {"dataset.json", shard_name(1)}
SMALL = 1 << 28


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """In-place and next-token tasks."""
    presets = ("mlm", "duo", "bd3", "causal")
    return made(
        tmp_path_factory.mktemp("dataset"), tasks=[{"preset": preset} for preset in presets]
    )


@pytest.fixture
def directory(dataset, tmp_path):
    return copied(dataset, tmp_path)


def outcome(directory, replay=None, load=True):
    """(what `verify` comes to: "good", "error: …" or its promises; calls that the loader refused),
    in a limited child.

    load: whether the loader reads the dataset too, in both of its ways.
    """

    def work():
        try:
            report = report_of(directory, replay)
            found = " ".join(sorted({fault["promise"] for fault in report["listed"]})) or "good"
        except PackprepError as error:
            found = f"error: {error}"
        return [found, *(read_all(directory, io) for io in ("mmap", "pread") if load)]

    return in_child(work, more=SMALL)


def sign_plan(directory, plan):
    """Write a plan and put its digest wherever one stands."""
    data = encode(plan)
    (directory / "plan.json").write_bytes(data)
    for b in range(len(manifest_of(directory)["shards"])):
        edit_receipt(directory, lambda receipt: receipt.update(plan_digest=digest_of(data)), b)
    edit_manifest(directory, lambda manifest: manifest["plan"].update(digest=digest_of(data)))


def test_every_promise_has_a_hostile_file_of_its_own():
    tests = [
        name.split("_")
        for name in (
            *vars(test_promises),
            *vars(test_coverage),
            *vars(test_plan),
            *vars(test_removing),
        )
        if name.startswith("test_")
    ]
    assert {
        number for number in PROMISES if any(number.lower() in words for words in tests)
    } == set(PROMISES)


@pytest.mark.alike(14)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "kind", ["fifo", "folder", "device", "endless", "socket", "link to itself", "link out"]
)
def test_what_is_no_regular_file_is_refused_without_waiting(directory, name, kind, monkeypatch):
    path = directory / name
    data = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/tty")
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        monkeypatch.chdir(path.parent)  # names of sockets are short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    elif kind == "link to itself":
        path.symlink_to(path)
    else:
        (directory.parent / "elsewhere").write_bytes(data)
        path.symlink_to(directory.parent / "elsewhere")
    found, *_ = outcome(directory, load=name in LOADED)
    assert name in found or "P1" in found.split(), found


MANIFESTS = {
    "rows that no disk holds": lambda m: m["shards"][0].update(rows=10**18),
    "segments that no disk holds": lambda m: m["shards"][0].update(segments=10**18),
    "counts beyond 64 bits": (
        lambda m: m["shards"][0].update(segments=10**30, tokens=10**30, bytes=10**30)
    ),
    "counts that overflow in sum": lambda m: [
        entry.update(segments=1 << 61) for entry in m["shards"]
    ],
    "a count as a float": lambda m: m["shards"][0].update(rows=5.0),
    "a count as a flag": lambda m: m["shards"][0].update(rows=True),
    "a count as a text": lambda m: m["shards"][0].update(rows="5"),
    "a negative count": lambda m: m["shards"][0].update(rows=-5),
    "a number of shards": lambda m: m.update(shards=10**12),
    "a name that leads out": lambda m: m["shards"][0].update(file="../../etc/passwd"),
    "an absolute name": lambda m: m["shards"][0].update(file="/etc/passwd"),
    "a NUL in a name": lambda m: m["shards"][0].update(file="shards/000/000000.safetensors\0"),
    "a tokenizer elsewhere": lambda m: m["tokenizer"].update(file="/etc/passwd"),
    "the widest row": lambda m: m.update(seq_length=(1 << 31) - 8),
    "the largest vocabulary": lambda m: m.update(vocab_size=(1 << 31) - 1, token_dtype="int32"),
    "an output that is a list": lambda m: m["recipe"].update(output=[]),
    "documents that are a number": lambda m: m["recipe"].update(documents=1),
    "a parameter beyond floats": (
        lambda m: m["tasks"][0]["parameters"].update(noise_density=10**400)
    ),
    "a mode token beyond ids": lambda m: m["tasks"][0].update(mode_token=10**400),
    "an endless block": lambda m: [
        t["parameters"].update(block_length=(1 << 62)) for t in m["tasks"]
    ],
    "levels that are texts": lambda m: [
        t["parameters"].update(noise_range=["a", "b"]) for t in m["tasks"]
    ],
    "levels below 0": lambda m: [
        t["parameters"].update(noise_range=[-1.0, 2.0]) for t in m["tasks"]
    ],
    "no parameters": lambda m: [t.update(parameters={}) for t in m["tasks"]],
    "no thresholds": lambda m: [t.update(resolved={}) for t in m["tasks"]],
    "few thresholds": lambda m: [t.update(resolved={"flip_thresholds": [1]}) for t in m["tasks"]],
    "masks": lambda m: m["specials"].update(mask=[1, 2]),
    "a mask beyond the vocabulary": lambda m: m["specials"].update(mask=1 << 30),
    "special ids beyond the vocabulary": lambda m: m["specials"].update(special_ids=[1 << 30]),
    "only special ids": lambda m: m["specials"].update(special_ids=list(range(m["vocab_size"]))),
    "no task": lambda m: m.update(tasks=[]),
    "one task": lambda m: m.update(tasks=m["tasks"][:1]),
    "no source": lambda m: m.update(sources=[]),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_hostile_manifest(directory, case):
    edit_manifest_unread(directory, MANIFESTS[case])
    found, mapped, read = outcome(directory, replay=5)
    assert found != "good" and ("dataset.json" in found or "P" in found) and mapped == read


def edit_manifest_unread(directory, change):
    """Change the manifest and its digest, and look at nothing that it says."""
    manifest = manifest_of(directory)
    change(manifest)
    del manifest["digest"]
    (directory / "dataset.json").write_bytes(
        encode({**manifest, "digest": digest_of(encode(manifest))})
    )


TEXTS = {
    "deeply nested": b"[" * 100_000,
    "deeply nested objects": b'{"a":' * 100_000,
    "a byte order mark": b"\xef\xbb\xbf{}\n",
    "no UTF-8": b'{"format":"\xff"}\n',
    "NaN": b'{"weight":NaN}\n',
    "an infinity": b'{"weight":1e999}\n',
    "a key twice": b'{"format":"packprep","format":"packprep"}\n',
    "nothing": b"",
    "a list": b"[]\n",
    "half a character": b'{"a":"\\ud800"}\n',
    "a number of 5000 digits": b"9" * 5000 + b"\n",
    "64 MiB of spaces": b" " * (64 << 20),
}


@pytest.mark.alike(16)
@pytest.mark.parametrize("name", ["dataset.json", "plan.json", receipt_name(0), rejects_name(0)])
@pytest.mark.parametrize("case", TEXTS)
def test_json_that_is_none(directory, name, case):
    """For plan and rejects also with a digest that fits."""
    (directory / name).write_bytes(TEXTS[case])
    if name == "plan.json":
        edit_manifest_unread(directory, lambda m: m["plan"].update(digest=digest_of(TEXTS[case])))
    if name == rejects_name(0):
        entry = {"bytes": len(TEXTS[case]), "digest": digest_of(TEXTS[case])}
        edit_receipt(directory, lambda receipt: receipt["rejects"].update(entry))
    if name == receipt_name(0):
        sign(directory)
    found, *_ = outcome(directory, load=name in LOADED)
    assert name in found or set(found.split()) & {"P1", "P2", "P16"}, found


PLANS = {
    "shards without number": lambda p: p.update(shards=10**12),
    "pieces without number": lambda p: p["files"][0].update(pieces=10**15),
    "many pieces": lambda p: p["files"][0].update(pieces=1 << 25),
    "a file beyond all disks": lambda p: p["files"][0].update(size=10**18),
    "uses without number": lambda p: p["sources"][0].update(repeat=1e12),
    "a file that leads out": lambda p: p["files"][0].update(name="../../../etc/passwd"),
    "an absolute file": lambda p: p["files"][0].update(name="/etc/passwd"),
    "a NUL in a file's name": lambda p: p["files"][0].update(name="a\0.jsonl"),
    "a NUL in a prefix": lambda p: p["sources"][0].update(prefix="/a\0"),
    "a file of no source": lambda p: p["files"][0].update(source=7),
    "a vocabulary beyond int32": lambda p: p["vocabulary"].update(vocab_size=1 << 40),
    "a vocabulary smaller than its ids": lambda p: p["vocabulary"].update(vocab_size=3),
    "a role beyond the vocabulary": lambda p: p["vocabulary"]["roles"].update(mask=1 << 30),
    "a role that is a text": lambda p: p["vocabulary"]["roles"].update(mask="x"),
    "no pad": lambda p: p["vocabulary"].update(roles={}),
    "a row of no slots": lambda p: p["recipe"].update(seq_length=0),
    "a row of all slots": lambda p: p["recipe"].update(seq_length=1 << 40),
    "a format that is none": lambda p: p["recipe"]["sources"][0].update(format="x"),
    "an objective that is none": lambda p: p["recipe"]["tasks"][0].update(objective="x"),
    "a parameter that is none": lambda p: p["recipe"]["tasks"][0]["parameters"].update(x=1),
    "another task": lambda p: p["tasks"].pop(),
    "thresholds that are none": lambda p: [
        t.update(resolved={"flip_thresholds": "x"}) for t in p["tasks"]
    ],
    "a tokenizer elsewhere": lambda p: p["tokenizer"].update(file="/etc/passwd"),
    "ratios that are none": lambda p: p["sources"][0].update(ratios={}),
    "no step": lambda p: p["sources"][0].update(step_bytes=0),
    "no engine": lambda p: p.update(engine={}),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_hostile_plan(directory, case):
    plan = read_json(directory / "plan.json")
    PLANS[case](plan)
    sign_plan(directory, plan)
    assert outcome(directory, load=False) != ["good"]


@pytest.mark.long
@pytest.mark.parametrize("count", [60, pytest.param(150, marks=pytest.mark.campaign)])
def test_any_value_changed_in_a_signed_json_file_is_seen_or_without_effect(directory, count):
    """Whatever a value of plan, manifest or a receipt is replaced by, `verify` and the loader end
    well."""
    good = {
        name: (directory / name).read_bytes()
        for name in ("plan.json", "dataset.json", receipt_name(0))
    }
    receipts = {receipt_name(b) for b in range(len(manifest_of(directory)["shards"]))}
    good |= {name: (directory / name).read_bytes() for name in receipts}

    def work():
        chance, seen = random.Random(3), 0
        for i in range(count):
            name = ("plan.json", "dataset.json", receipt_name(0))[i % 3]
            value = value_changed(read_json(directory / name), chance)
            try:
                try:
                    if name == "plan.json":
                        sign_plan(directory, value)
                    else:
                        (directory / name).write_bytes(encode(value))
                        if name == receipt_name(0):
                            sign(directory)
                except PackprepError:
                    continue  # no JSON of a dataset: nothing that could be signed
                try:
                    seen += bool(report_of(directory)["faults"])
                except PackprepError as error:
                    assert str(error)
                    seen += 1
                if name == "dataset.json":
                    read_all(directory)
            except Exception as error:
                raise AssertionError(f"{i} {name}: {str(value)[:3000]}") from error
            finally:
                for each, data in good.items():
                    (directory / each).write_bytes(data)
        return seen

    assert in_child(work, seconds=300) > count * 2 / 3


def test_swapped_and_old_shards_that_were_signed_again_are_seen(dataset, directory, tmp_path):
    """Two shards change places, sizes and digests with them: their receipts' ledgers count other
    segments."""
    entries = manifest_of(directory)["shards"]
    data = [(directory / shard_name(b)).read_bytes() for b in (0, 1)]
    for b in (0, 1):
        (directory / shard_name(b)).write_bytes(data[1 - b])
        other = {
            key: entries[1 - b][key] for key in ("rows", "segments", "tokens", "bytes", "digest")
        }
        edit_receipt(directory, lambda receipt, other=other: receipt.update(other), b)
        edit_manifest(
            directory, lambda manifest, b=b, other=other: manifest["shards"][b].update(other)
        )
    assert outcome(directory)[0] == "P16 P21"


def test_a_dataset_in_which_a_folder_leads_out_is_named(directory):
    shutil.move(directory / "receipts", directory.parent / "elsewhere")
    (directory / "receipts").symlink_to(directory.parent / "elsewhere")
    assert outcome(directory)[0] == "P1"
