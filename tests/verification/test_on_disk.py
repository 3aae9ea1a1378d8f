"""Files of a dataset that are damaged, missing, too many, or another's: `verify` says so, or
refuses by name."""

import os
import random
import shutil

import pytest

from packprep.errors import DatasetError, PlanError
from packprep.format.json_files import receipt_name, rejects_name, shard_name
from tests.verification.damage import (
    copied,
    faults_of,
    made,
    manifest_of,
    promises_of,
    read_json,
    report_of,
    sign,
)

POSITIONS = [50, 160]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return made(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="module")
def scratch(dataset, tmp_path_factory):
    """A copy that every test leaves as it found it."""
    return copied(dataset, tmp_path_factory.mktemp("scratch"))


@pytest.fixture
def directory(dataset, tmp_path):
    return copied(dataset, tmp_path)


def files_of(directory):
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


def names(faults):
    return {(fault["promise"], fault["file"]) for fault in faults}


def outcome_of(directory, replay=None):
    """The faults, or the error that `verify` raised on purpose; any other exception is the test's
    failure."""
    try:
        return faults_of(directory, replay)
    except (DatasetError, PlanError) as error:
        return error


def found(outcome, name):
    """Whether the outcome tells of the file."""
    if isinstance(outcome, list):
        return any(fault["file"] == name for fault in outcome)
    return name in str(outcome)


def test_the_files_are_those_of_the_format(dataset):
    manifest = manifest_of(dataset)
    shards = range(len(manifest["shards"]))
    wanted = {"dataset.json", "plan.json", "tokenizer.json"} | {
        f(b) for b in shards for f in (shard_name, receipt_name)
    }
    assert (
        set(files_of(dataset)) - wanted
        == {rejects_name(b) for b in shards} & set(files_of(dataset))
        != set()
    )


@pytest.mark.parametrize("positions", POSITIONS)
def test_one_changed_byte_in_any_file_is_found(dataset, scratch, positions):
    """Keyed places all over every file, the first and last bytes and the headers among them."""
    chance = random.Random(20)
    files = files_of(dataset)
    places = []
    for name in files:
        size = (dataset / name).stat().st_size
        count = -(-positions // len(files))
        places += [
            (name, at) for at in {0, size - 1, *(chance.randrange(size) for _ in range(count - 2))}
        ]
        if name.endswith(".safetensors"):
            places += [(name, chance.randrange(900)) for _ in range(4)]
    assert len(places) >= positions - 10
    for name, at in places:
        path = scratch / name
        good = path.read_bytes()
        bad = bytearray(good)
        bad[at] ^= 1 << chance.randrange(8) if chance.random() < 0.5 else chance.randrange(1, 256)
        path.write_bytes(bad)
        try:
            outcome = outcome_of(scratch)
            assert found(outcome, name), (name, at, good[at], bad[at], outcome)
        finally:
            path.write_bytes(good)
    assert faults_of(scratch) == []


@pytest.mark.long
def test_a_digit_for_a_digit_in_json_is_found(dataset, scratch):
    """A change that stays canonical JSON with all its keys: nothing but a digest can tell."""
    chance = random.Random(21)
    for name in (n for n in files_of(dataset) if n.endswith(".json") or n.endswith(".jsonl")):
        path = scratch / name
        good = path.read_bytes()
        digits = [i for i in range(1, len(good)) if good[i - 1 : i + 1].isdigit()]
        for at in chance.sample(digits, min(12, len(digits))):
            bad = bytearray(good)
            bad[at] = ord("0") + (bad[at] - ord("0") + chance.randrange(1, 10)) % 10
            path.write_bytes(bad)
            try:
                assert found(outcome_of(scratch), name), (name, at)
            finally:
                path.write_bytes(good)


def test_a_key_that_is_renamed_is_found(dataset, scratch):
    """One letter of every key of plan, manifest and a receipt, in turn."""
    for name in ("plan.json", "dataset.json", receipt_name(0)):
        path = scratch / name
        good = path.read_bytes()
        for key in sorted(read_json(path)):
            path.write_bytes(good.replace(f'"{key}":'.encode(), f'"{key[:-1]}~":'.encode()))
            try:
                assert found(outcome_of(scratch), name), (name, key)
            finally:
                path.write_bytes(good)


@pytest.mark.parametrize("keep", [0, 1, 7, 100, 4096, -1])
def test_a_truncated_file_is_found(dataset, scratch, keep):
    for name in files_of(dataset):
        path = scratch / name
        good = path.read_bytes()
        path.write_bytes(good[:keep])
        try:
            if len(good) > abs(keep):
                assert found(outcome_of(scratch), name), name
        finally:
            path.write_bytes(good)


@pytest.mark.long
def test_a_longer_file_is_found(dataset, scratch):
    for name in files_of(dataset):
        path = scratch / name
        good = path.read_bytes()
        for more in (b"\n", b" ", b"\0" * 64, b"{}\n"):
            path.write_bytes(good + more)
            assert found(outcome_of(scratch), name), (name, more)
        path.write_bytes(good)


@pytest.mark.long
def test_swapped_shards(directory):
    first, second = directory / shard_name(0), directory / shard_name(1)
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    assert {("P1", shard_name(0)), ("P1", shard_name(1))} <= names(faults_of(directory))


def test_swapped_shards_with_their_receipts(directory):
    """Everything moves but the numbers: a receipt knows its shard."""
    for name in (shard_name, receipt_name, rejects_name):
        first, second = directory / name(0), directory / name(1)
        other = directory / "other"
        first.rename(other)
        second.rename(first)
        other.rename(second)
    assert {("P1", receipt_name(0)), ("P1", receipt_name(1))} <= names(faults_of(directory))


@pytest.mark.long
def test_an_old_shard_under_a_new_manifest(dataset, tmp_path):
    shutil.copytree(dataset.parent / "in", tmp_path / "in")
    other = made(tmp_path, seed=9)
    for name in (shard_name, receipt_name):
        shutil.copy(dataset / name(0), other / name(0))
    assert {("P1", shard_name(0)), ("P1", receipt_name(0))} <= names(faults_of(other))
    assert not {f["file"] for f in faults_of(other)} & {shard_name(1), receipt_name(1)}


def test_an_old_shard_that_was_signed_for_the_new_manifest(dataset, tmp_path):
    """Digests fit, so the receipt's plan and the keys of the segments tell."""
    shutil.copytree(dataset.parent / "in", tmp_path / "in")
    other = made(tmp_path, seed=9)
    for name in (shard_name, receipt_name, rejects_name):
        shutil.copy(dataset / name(0), other / name(0))
    receipt = read_json(other / receipt_name(0))
    manifest = manifest_of(other)
    manifest["shards"][0].update(
        {key: receipt[key] for key in ("rows", "segments", "tokens", "bytes", "digest")}
    )
    from packprep.format.json_files import encode

    (other / "dataset.json").write_bytes(encode(manifest))
    sign(other)
    faults = faults_of(other)
    assert ("P2", receipt_name(0)) in names(faults) and ("P11", shard_name(0)) in names(faults)


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "shards/000/000099.safetensors",
        "shards/000/000000.safetensors.bak",
        "shards/001/000000.safetensors",
        "receipts/000/000099.json",
        "rejects/001/001000.jsonl",
        ".hidden",
        "new folder/file",
    ],
)
def test_a_file_that_the_dataset_does_not_name(directory, name):
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(b"")
    (fault,) = faults_of(directory)
    assert (fault["promise"], fault["file"]) == (
        "P1",
        name,
    ) and "does not belong to a dataset" in fault["message"]


def test_a_file_whose_name_is_not_utf8(directory):
    with open(os.fsencode(directory) + b"/\xff", "wb"):
        pass
    (fault,) = faults_of(directory)
    assert fault["file"] == "\\xff" and fault["file"].encode()


@pytest.mark.parametrize("folder", ["", "shards/000", "receipts/000", "rejects/000"])
def test_a_temporary_that_was_left(directory, folder):
    name = os.path.join(folder, ".000000.safetensors.host-1-ab12cd34.tmp")
    (directory / name).write_bytes(b"x")
    (fault,) = faults_of(directory)
    assert fault["file"] == name and "left from a build that was killed" in fault["message"]


def test_rejects_that_no_receipt_names(dataset, tmp_path):
    shutil.copytree(dataset.parent / "in", tmp_path / "in")
    for path in (tmp_path / "in/web").iterdir():  # good lines only
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    out = made(tmp_path, output={"shard_text_bytes": 4000})
    assert not (out / "rejects").exists() and faults_of(out) == []
    (out / rejects_name(0)).parent.mkdir(parents=True)
    (out / rejects_name(0)).write_bytes(b"")
    (fault,) = faults_of(out)
    assert fault["promise"] == "P1" and "the receipt names no rejects" in fault["message"]


@pytest.mark.parametrize(
    "name", ["shards/000/000001.safetensors", "receipts/000/000001.json", "tokenizer.json"]
)
def test_a_symbolic_link_to_a_good_file(directory, name):
    path = directory / name
    target = directory.parent / path.name
    path.rename(target)
    path.symlink_to(target)
    (fault,) = faults_of(directory)
    assert (fault["promise"], fault["file"]) == ("P1", name) and "symbolic link" in fault["message"]


def test_a_symbolic_link_to_a_folder(directory):
    (directory / "shards").rename(directory.parent / "elsewhere")
    (directory / "shards").symlink_to(directory.parent / "elsewhere")
    (fault,) = faults_of(directory)
    assert (fault["promise"], fault["file"]) == ("P1", "shards")


def test_a_missing_shard(directory):
    (directory / shard_name(1)).unlink()
    (fault,) = faults_of(directory)
    assert (fault["promise"], fault["file"]) == ("P1", shard_name(1)) and "No such file" in fault[
        "message"
    ]


def test_a_folder_in_the_place_of_a_shard(directory):
    (directory / shard_name(1)).unlink()
    (directory / shard_name(1)).mkdir()
    assert names(faults_of(directory)) == {("P1", shard_name(1))}


@pytest.mark.long
def test_an_empty_shard(directory):
    (directory / shard_name(1)).write_bytes(b"")
    assert names(faults_of(directory)) == {("P1", shard_name(1)), ("P3", shard_name(1))}


def test_a_missing_receipt(directory):
    (directory / receipt_name(2)).unlink()
    (fault,) = faults_of(directory)
    assert (fault["promise"], fault["file"]) == ("P1", receipt_name(2))


@pytest.mark.long
def test_missing_rejects(directory):
    (directory / rejects_name(0)).unlink()
    assert names(faults_of(directory)) == {("P1", rejects_name(0))}


def test_all_receipts_missing(directory):
    shutil.rmtree(directory / "receipts")
    faults = faults_of(directory)
    assert promises_of(faults) == {"P1"} and len(faults) == len(manifest_of(directory)["shards"])


@pytest.mark.parametrize("name", ["plan.json", "tokenizer.json"])
def test_what_the_shards_are_checked_by_is_damaged(directory, name):
    """A report with one fault, and no shard looked at: whatever they are compared with would be
    wrong."""
    path = directory / name
    data = path.read_bytes()
    path.write_bytes(data[:-2] + b" " + data[-2:])
    report = report_of(directory)
    assert [(f["promise"], f["file"]) for f in report["listed"]] == [("P1", name)] and report[
        "shards"
    ] == 0


def test_no_manifest_is_no_dataset(directory):
    (directory / "dataset.json").unlink()
    with pytest.raises(
        DatasetError, match=r"the build of .* is not finished\nhint: run its command again"
    ):
        faults_of(directory)


def test_no_plan(directory):
    (directory / "plan.json").unlink()
    with pytest.raises(PlanError, match=r"plan\.json is missing.*\nhint: restore the file"):
        faults_of(directory)


def test_no_tokenizer(directory):
    (directory / "tokenizer.json").unlink()
    (fault,) = faults_of(directory)
    assert (fault["promise"], fault["file"]) == (
        "P1",
        "tokenizer.json",
    ) and "No such file" in fault["message"]


def test_not_a_directory_at_all(tmp_path):
    with pytest.raises(DatasetError, match="does not exist"):
        faults_of(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DatasetError):
        faults_of(tmp_path / "file")
