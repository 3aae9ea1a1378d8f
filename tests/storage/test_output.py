"""Output on object storage: the bytes of a local build, whatever stopped it in between, and the
same checks of them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from packprep.building.commit import commit_shard, done_receipt, missing_shards
from packprep.building.distributed import status_of
from packprep.building.plan import open_plan
from packprep.building.work import make_shard
from packprep.errors import BuildError, PlanError, StorageError
from packprep.format.digests import digest_of
from packprep.format.json_files import (
    FIRST_SEEN_NAME,
    MANIFEST_NAME,
    decode,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.storage import Remote, folder_at
from tests import command_line, made
from tests.crash import disturbed
from tests.storage.conftest import BUCKET


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> disturbed.Project:
    """Three shards, one of them with rejects, and the bytes of their local build."""
    return disturbed.project(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> disturbed.Project:
    """The token store of the same corpus: three shards, too."""
    return disturbed.project(tmp_path_factory.mktemp("tokens"), name="tokenize")


@pytest.fixture(params=["build", "tokenize"])
def either(request, plain, tokens) -> disturbed.Project:
    """Of a dataset, or of a token store."""
    return plain if request.param == "build" else tokens


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path}/bucket/out"


def objects(url: str) -> dict[str, bytes]:
    """Name → bytes of all objects below a URL."""
    remote = Remote(url)
    return {name: remote.read(name) for name, _ in remote.list()}


def check_truth(plain: disturbed.Project, url: str) -> int:
    """What stands is of the undisturbed build, and `status` says what is true of it; gives the
    number of done shards."""
    there = objects(url)
    there.pop(FIRST_SEEN_NAME, None)  # no part of what is published
    assert there.items() <= plain.expected.items()
    said = command_line.inside("status", url, "--json")
    if "plan.json" not in there:
        assert said.status == 2 and "no build was started here" in said.err
        return 0
    done = {b for b in range(said.json["shards"]) if receipt_name(b) in there}
    for b in done:
        receipt = decode(there[receipt_name(b)], "receipt")
        assert digest_of(there[shard_name(b)]) == receipt["digest"]
    assert said.json["missing"] == sorted(set(range(said.json["shards"])) - done)
    assert said.json["published"] == (MANIFEST_NAME in there) and said.status == (
        0 if MANIFEST_NAME in there else 1
    )
    return len(done)


def finish(plain: disturbed.Project, url: str, workers: int = 1, **changes: str) -> None:
    """The same command finishes, and all objects are those of the local build."""
    run = command_line.inside if workers == 1 else command_line.packprep
    said = run(*plain.command(url, workers), **changes)
    assert said.status == 0, said.err
    assert objects(url) == plain.expected


# In the same process, and in a folder behind a URL


@pytest.mark.parametrize("workers", [1, 2])
def test_a_build_into_a_url_has_the_bytes_of_a_local_one(plain, url, workers):
    finish(plain, url, workers)
    assert check_truth(plain, url) == 3
    said = command_line.inside(*plain.command(url, workers), "--json")
    assert (
        said.json["made"] == 0 and said.json["directory"] == url and objects(url) == plain.expected
    )


@pytest.mark.long
def test_datasets_of_several_lengths_at_a_url_are_the_local_ones(tmp_path, url):
    several = disturbed.project(tmp_path, seq_lengths=[128, 512], seq_length=128)
    several.recipe.write_text(several.recipe.read_text().replace("seq_length = 128\n", ""))
    for out in (tmp_path / "here", url):
        said = command_line.inside(*several.command(out))
        assert said.status == 0, said.err
    assert objects(url) == made.contents(tmp_path / "here")
    assert (
        command_line.inside("verify", url, "--replay", "all").out.count("every invariant holds")
        == 3
    )
    assert [one["published"] for one in command_line.inside("status", url, "--json").json] == [
        True,
        True,
    ]


def test_a_build_into_the_memory_of_this_process(plain):
    pytest.importorskip("fsspec")
    url = "memory://bucket/out"
    said = command_line.inside(*plain.command(url))
    assert said.status == 0 and f"{url}: " in said.out, said.err
    assert objects(url) == plain.expected and check_truth(plain, url) == 3


def test_a_url_and_its_trailing_slash_are_one_folder(plain, url):
    finish(plain, url + "/")
    assert status_of(url)["published"] and objects(url) == plain.expected


@pytest.mark.long
def test_verify_replays_on_a_url_and_leaves_no_copies(plain, url, tmp_path):
    finish(plain, url)
    copies = tmp_path / "copies"
    copies.mkdir()
    for more in ([], ["--replay", "all"], ["--workers", "2", "--replay", "5"]):
        said = command_line.packprep("verify", url, *more, "--json", TMPDIR=str(copies))
        assert (said.status, said.json["faults"], said.json["shards"]) == (0, 0, 3), said
        assert said.json["directory"] == url and not list(copies.iterdir())
        assert (said.json["replayed"] > 0) == ("--replay" in more)


def test_verify_has_no_more_than_a_shard_here_for_each_worker(plain, url, monkeypatch):
    finish(plain, url)
    most = 0
    read = Remote.read

    def watched(self, name, begin=0, end=None):
        nonlocal most
        lying = [
            path
            for path in Path(os.environ["TMPDIR"]).rglob("*.safetensors")
            if path.stat().st_size
        ]
        most = max(most, len(lying))
        return read(self, name, begin, end)

    monkeypatch.setattr(Remote, "read", watched)
    folder = Path(url.removeprefix("file://")).parent / "copies"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert command_line.inside("verify", url, "--workers", 1, TMPDIR=str(folder)).status == 0
    assert most == 1


def test_verify_names_faults_by_the_url_and_not_by_the_copy(plain, url):
    finish(plain, url)
    remote = Remote(url)
    damaged = {
        shard_name(1): (
            plain.expected[shard_name(1)][:-1] + bytes([plain.expected[shard_name(1)][-1] ^ 1])
        ),
        shard_name(0): plain.expected[shard_name(0)][:4000],
        "shards/000/odd": b"?",
    }
    for name, data in damaged.items():
        remote.write(name, [data])
    remote.remove(receipt_name(2))
    said = command_line.inside("verify", url, "--json")
    assert said.status == 1
    found = {(fault["promise"], fault["file"]): fault["message"] for fault in said.json["listed"]}
    assert {("P1", name) for name in (*damaged, receipt_name(2))} <= found.keys()
    assert "does not belong to a dataset" in found["P1", "shards/000/odd"]
    assert all("packprep-" not in message for message in found.values())
    assert found["P3", shard_name(0)].startswith(f"{url}/{shard_name(0)}")


def test_verify_of_a_url_without_a_dataset_says_so(plain, url):
    said = command_line.refused("verify", url)
    assert f"{url}/dataset.json does not exist" in said and f"packprep status {url}" in said


@pytest.mark.parametrize("more", [[], ["--row", "0"], ["--row", "-1"]])
def test_inspect_says_of_a_url_what_it_says_of_the_folder(plain, url, more):
    finish(plain, url)
    here, there = (
        command_line.inside("inspect", out, *more, "--json").json
        for out in (plain.base / "out", url)
    )
    assert here.pop("directory") == str(plain.base / "out") and there.pop("directory") == url
    assert here == there


# Order and commits


def test_a_receipt_is_written_after_its_shard_and_the_manifest_last(plain, url, monkeypatch):
    written = []
    write, create = Remote.write, Remote.create
    monkeypatch.setattr(
        Remote, "write", lambda self, name, data: (written.append(name), write(self, name, data))[1]
    )
    monkeypatch.setattr(
        Remote,
        "create",
        lambda self, name, data: (written.append(name), create(self, name, data))[1],
    )
    assert command_line.inside(*plain.command(url)).status == 0
    expected = ["tokenizer.json", "plan.json", FIRST_SEEN_NAME]
    for b in range(3):
        expected += [
            name
            for name in (shard_name(b), rejects_name(b), receipt_name(b))
            if name in plain.expected
        ]
    assert written == [*expected, MANIFEST_NAME]


def test_a_build_that_fails_at_any_write_tells_the_truth_and_goes_on(plain, url, monkeypatch):
    write, create = Remote.write, Remote.create
    at = 0
    while True:
        calls = 0

        def fail(name, at=at):
            nonlocal calls
            calls += 1
            if calls > at:
                raise StorageError(f"{url}/{name}: the store is gone; run the same command again")

        monkeypatch.setattr(
            Remote, "write", lambda self, name, data: (fail(name), write(self, name, data))[1]
        )
        monkeypatch.setattr(
            Remote, "create", lambda self, name, data: (fail(name), create(self, name, data))[1]
        )
        said = command_line.inside(*plain.command(url))
        monkeypatch.setattr(Remote, "write", write)
        monkeypatch.setattr(Remote, "create", create)
        check_truth(plain, url)
        if said.status == 0:
            break
        assert said.status == 2 and "the store is gone" in said.err and "disk" not in said.err
        for _ in range(at % 2):  # half of them begin anew
            shutil.rmtree(url.removeprefix("file://"))
        at += 1
    assert at >= 5
    finish(plain, url)


def test_an_object_without_its_receipt_or_of_another_size_is_no_shard(plain, url):
    finish(plain, url)
    remote, output = Remote(url), folder_at(url)
    digest = open_plan(url).digest
    remote.remove(MANIFEST_NAME)
    remote.remove(receipt_name(0))
    remote.write(shard_name(1), [plain.expected[shard_name(1)][:-1]])
    assert missing_shards(output, digest, range(3)) == status_of(url)["missing"] == [0, 1]
    assert [done_receipt(output, b, digest) is None for b in range(3)] == [True, True, False]
    finish(plain, url)


def test_stale_rejects_are_removed_where_there_are_none(plain, url):
    without = next(b for b in range(3) if rejects_name(b) not in plain.expected)
    Remote(url).write(rejects_name(without), [b"{}\n"])
    finish(plain, url)


def test_a_build_that_was_slower_than_another_changes_nothing_but_stops_where_they_differ(
    plain, url
):
    finish(plain, url)
    plan, output = open_plan(url), folder_at(url)
    Remote(url).remove(receipt_name(0))

    class Slow(Remote):
        """Another build commits the shard while this one uploads it."""

        def write(self, name, buffers):
            super().write(name, buffers)
            if name == shard_name(0):
                Remote(url).write(receipt_name(0), [plain.expected[receipt_name(0)]])

    shard = make_shard(plan, 0)
    commit_shard(Slow(url), plan, 0, shard)
    assert objects(url) == plain.expected
    Remote(url).remove(receipt_name(0))
    shard.arrays["tokens"][0, 0] ^= 1
    with pytest.raises(BuildError, match="made again with digest [0-9a-f]+, but .* has [0-9a-f]+"):
        commit_shard(Slow(url), plan, 0, shard)
    with pytest.raises(BuildError, match="made again with digest"):
        commit_shard(output, plan, 0, shard)
    assert objects(url)[receipt_name(0)] == plain.expected[receipt_name(0)]


def test_another_manifest_that_stands_there_stops_the_build(plain, url):
    finish(plain, url)
    Remote(url).write(MANIFEST_NAME, [b"{}\n"])
    said = command_line.refused(*plain.command(url))
    assert f"{url}/{MANIFEST_NAME} exists and differs" in said


def test_files_of_a_build_without_a_plan_are_refused(plain, url):
    finish(plain, url)
    Remote(url).remove("plan.json")
    assert f"{url} has files of a build, but no plan.json" in command_line.refused(
        *plain.command(url)
    )
    Remote(url).remove(MANIFEST_NAME)
    assert f"{url} has files of a build, but no plan.json" in command_line.refused(
        *plain.command(url)
    )


def test_a_plan_that_was_changed_is_refused_by_its_url(plain, url):
    finish(plain, url)
    Remote(url).write(
        "plan.json", [plain.expected["plan.json"].replace(b'"shards":3', b'"shards":4')]
    )
    with pytest.raises(
        PlanError, match=f"{url}/plan.json: changed or damaged, because it has the digest"
    ):
        status_of(url)


# Requests


class Counted(Remote):
    """Counts its requests by kind; objects lie in the memory of this process."""

    def __init__(self, objects: dict[str, bytes]):
        self.url, self.objects = "mock://bucket", objects
        self.asked = {"list": 0, "size": 0, "read": 0}

    def list(self, below=""):
        self.asked["list"] += 1
        return sorted(
            (name, len(data)) for name, data in self.objects.items() if name.startswith(f"{below}/")
        )

    def size(self, name):
        self.asked["size"] += 1
        return len(self.objects[name]) if name in self.objects else None

    def read(self, name, begin=0, end=None):
        self.asked["read"] += 1
        return self.objects[name][begin:end]


def test_missing_shards_are_found_by_listings_and_one_read_of_each_receipt(plain):
    digest = digest_of(plain.expected["plan.json"])
    shards, receipt = 3000, json.loads(plain.expected[receipt_name(0)])
    there = {}
    for b in range(0, shards, 2):
        own = {**receipt, "shard": b, "file": shard_name(b), "bytes": 3}
        there |= {receipt_name(b): made_receipt(own), shard_name(b): b"abc"}
    there[shard_name(4)] = b"ab"
    remote = Counted(there)
    found = missing_shards(remote, digest, range(shards))
    assert found == sorted({*range(1, shards, 2), 4})
    assert remote.asked["size"] == 0 and remote.asked["read"] == shards // 2
    assert remote.asked["list"] <= 3 * 3  # receipts, shards and rejects, a thousand at a time
    one = Counted(there)
    assert missing_shards(one, digest, range(2000, 2003)) == [2001]
    assert one.asked["list"] <= 3 and one.asked["read"] == 2


def made_receipt(receipt):
    from packprep.format.json_files import encode

    return encode({**receipt, "rejects": None})


# A real store, by S3


@pytest.fixture
def bucket(s3, request) -> str:
    """A folder of the test's own, in a bucket that this process and those that it starts reach."""
    return f"s3://{BUCKET}/output/{request.node.name.translate(str.maketrans('[]', '--'))}"


class Slow:
    """A way to a store that lets so many bytes a second pass towards it; `sent` counts them."""

    def __init__(self, port: int, bytes_per_s: float):
        self._to, self.rate, self.sent = port, bytes_per_s, 0
        self._answers: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._pass, args=(client, there, True), daemon=True).start()
            self._answers.append(
                threading.Thread(target=self._pass, args=(there, client, False), daemon=True)
            )
            self._answers[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, slowly: bool) -> None:
        try:
            while data := source.recv(4096 if slowly else 1 << 16):
                target.sendall(data)
                if slowly:
                    self.sent += len(data)
                    time.sleep(len(data) / self.rate)
        except OSError:
            pass  # one end is gone; so is the other soon
        try:
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def wait(self) -> None:
        """Waits until the store has answered what was under way when its sender died."""
        for answer in self._answers:
            answer.join(60)
            assert not answer.is_alive()

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def slow(server) -> Iterator[Slow]:
    """A way to the store of 150 kB a second."""
    way = Slow(server.port, 150e3)
    yield way
    way.close()


@pytest.mark.long
@pytest.mark.alike(2)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_build_on_s3_has_the_bytes_of_a_local_one_and_verifies(either, bucket, workers, tmp_path):
    plain = either
    said = command_line.packprep(*plain.command(bucket, workers))
    assert said.status == 0 and f"{bucket}: " in said.out, said.err
    assert objects(bucket) == plain.expected and check_truth(plain, bucket) == 3
    verified = command_line.packprep(
        "verify", bucket, "--replay", "all", "--workers", workers, "--json", TMPDIR=str(tmp_path)
    )
    assert (
        verified.status == 0
        and verified.json["replayed" if plain.name == "build" else "tokens"] > 100
    ), verified
    assert not list(tmp_path.iterdir())
    Remote(bucket).write("shards/000/odd", [b"?"])
    data = plain.expected[shard_name(2)]
    Remote(bucket).write(shard_name(2), [data[:-1] + bytes([data[-1] ^ 1])])
    verified = command_line.packprep("verify", bucket, "--workers", workers, "--json")
    assert verified.status == 1
    assert {("P1", "shards/000/odd"), ("P1", shard_name(2))} <= {
        (f["promise"], f["file"]) for f in verified.json["listed"]
    }
    assert (
        command_line.packprep(
            "inspect", bucket, *(["--row", 0] if plain.name == "build" else [])
        ).status
        == 0
    )


@pytest.mark.long
def test_a_dataset_on_s3_is_built_of_a_token_store_there(plain, tokens, bucket, tmp_path):
    assert command_line.packprep(*tokens.command(f"{bucket}/store")).status == 0
    of_text = 'paths = ["*.jsonl*"]'
    text = plain.recipe.read_text().replace(
        of_text, f'format = "store"\npaths = ["{bucket}/store"]'
    )
    recipe = made.write(tmp_path / "of-store.toml", text.encode())
    for index in (1, 0):
        build = (
            "build",
            recipe,
            "--out",
            f"{bucket}/out",
            "--array-index",
            index,
            "--array-count",
            2,
        )
        said = command_line.packprep(*build)
        assert said.status == 0, said
    found = objects(f"{bucket}/out")
    for name, data in plain.expected.items():
        assert name.startswith(("receipts/", "dataset.json", "plan.json")) or found[name] == data, (
            name
        )
    verified = command_line.packprep("verify", f"{bucket}/out", "--replay", "all", "--json")
    assert (verified.status, verified.json["faults"]) == (0, 0) and verified.json["replayed"] > 100


@pytest.mark.long
@pytest.mark.alike(1)
def test_array_tasks_on_s3_share_a_build_and_the_last_publishes(either, bucket):
    plain, tasks = either, []
    for index in range(3):
        arguments = [*plain.command(bucket), "--array-index", index, "--array-count", 3]
        command = [sys.executable, "-m", "packprep", *map(str, arguments)]
        environment = made.environment()
        tasks.append(
            subprocess.Popen(
                command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
        )
    said = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], said
    assert objects(bucket) == plain.expected
    Remote(bucket).remove(receipt_name(1))
    Remote(bucket).remove(MANIFEST_NAME)
    status = command_line.packprep("status", bucket, "--array-count", 3, "--json").json
    assert (status["missing"], status["array"], status["published"]) == ([1], "1", False)
    redone = command_line.packprep(*plain.command(bucket), "--array-index", 1, "--array-count", 3)
    assert redone.status == 0 and objects(bucket) == plain.expected


@pytest.mark.long
@pytest.mark.alike(1)
def test_two_builds_at_once_on_s3_give_the_bytes_of_one(either, bucket):
    plain, commands = either, []
    for workers in (1, 2):
        command = [sys.executable, "-m", "packprep", *map(str, plain.command(bucket, workers))]
        environment = made.environment()
        commands.append(
            subprocess.Popen(
                command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
        )
    said = [command.communicate(timeout=120)[1] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], said
    assert objects(bucket) == plain.expected


def kill_when_sent(plain, slow, url: str, sent: int, workers: int = 1) -> None:
    """A build by the slow way, killed with all its processes when so many bytes were sent."""
    command = [sys.executable, "-m", "packprep", *map(str, plain.command(url, workers))]
    environment = made.environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{slow.port}")
    build = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + 100
    while slow.sent < sent:
        assert build.poll() is None and time.monotonic() < end, (build.returncode, slow.sent)
        time.sleep(0.01)
    os.killpg(build.pid, signal.SIGKILL)
    assert build.wait() == -signal.SIGKILL
    slow.wait()


@pytest.mark.long
@pytest.mark.alike(2)
@pytest.mark.parametrize(
    "sent, workers", [(20_000, 1), (60_000, 1), (130_000, 2), (110_000, 1), (170_000, 1)]
)
def test_fault_23_a_build_killed_while_it_uploads_tells_the_truth_and_goes_on(
    plain, bucket, slow, sent, workers
):
    kill_when_sent(plain, slow, bucket, sent, workers)
    assert check_truth(plain, bucket) < 3
    said = command_line.packprep(*plain.command(bucket, workers))
    assert said.status == 0 and objects(bucket) == plain.expected, said.err


@pytest.mark.long
@pytest.mark.alike(1)
@pytest.mark.parametrize("sent, workers", [(8_000, 1), (40_000, 2), (60_000, 1)])
def test_a_token_store_killed_while_it_uploads_tells_the_truth_and_goes_on(
    tokens, bucket, slow, sent, workers
):
    test_fault_23_a_build_killed_while_it_uploads_tells_the_truth_and_goes_on(
        tokens, bucket, slow, sent, workers
    )


@pytest.mark.long
def test_fault_23_a_build_killed_amid_an_upload_in_parts_leaves_no_shard(bucket, slow, tmp_path):
    large = disturbed.project(tmp_path, 28_000, 3_500_000)
    sizes = [len(data) for name, data in large.expected.items() if name.startswith("shards/")]
    assert max(sizes) > 12 << 20
    slow.rate = 8e6
    kill_when_sent(large, slow, bucket, 11 << 20)
    assert check_truth(large, bucket) == 0
    assert not any(name.startswith("shards/") for name in objects(bucket))
    said = command_line.packprep(*large.command(bucket))
    assert said.status == 0 and objects(bucket) == large.expected, said.err


@pytest.mark.long
@pytest.mark.parametrize("command", ["build", "status", "verify", "inspect"])
def test_wrong_credentials_and_no_such_bucket_are_one_clear_error(plain, bucket, command):
    def refused(url: str, **changes: str) -> str:
        arguments = plain.command(url) if command == "build" else [command, url]
        said = command_line.packprep(*arguments, **changes)
        assert said.status == 2 and said.err.count("error:") == 1, said
        assert "disk" not in said.err and url.split("//")[1].split("/")[0] in said.err
        return said.err

    assert "credentials" in refused(bucket, AWS_SECRET_ACCESS_KEY="wrong")
    assert "credentials" in refused(bucket, AWS_ACCESS_KEY_ID="nobody")
    assert "bucket nowhere" in refused("s3://nowhere/out")
