"""What a folder of a file system does, whichever kind it is; and what it does while connections break."""

import multiprocessing
import os
import pickle
import random
import time

import pytest

from packprep.errors import StorageError
from packprep.storage import Remote, is_url
from packprep.storage.remote import _may_pass
from tests.made import run_python
from tests.storage.conftest import BUCKET, reach, reaching

pytestmark = pytest.mark.xdist_group("s3")

DATA = random.Random(0).randbytes(21_000_001)
PARTS = [DATA[:1000], bytearray(DATA[1000:7_000_000]), memoryview(DATA)[7_000_000:]]


@pytest.fixture(params=["file", "memory", "s3"])
def folder(request, tmp_path) -> Remote:
    if request.param == "s3":
        request.getfixturevalue("s3")
    below = {"file": str(tmp_path), "memory": tmp_path.name, "s3": f"{BUCKET}/{tmp_path.name}"}
    return Remote(f"{request.param}://{below[request.param]}/some folder")


def test_what_is_a_url():
    assert [is_url(p) for p in ("s3://b/x", "file:///x", "hf://datasets/a/b")] == [True] * 3
    assert not any(is_url(p) for p in ("x", "/x", "a/b://c", "c:/x", "simplecache::s3://x", "://x"))


def test_a_folder_that_is_not_there_has_no_files(folder):
    assert folder.list() == [] and folder.list("x") == []
    assert folder.size("x") is None
    folder.remove("x")
    for read in (lambda: folder.read("x"), lambda: folder.open("x", 1)):
        with pytest.raises(FileNotFoundError):
            read()


def test_what_was_written_is_read(folder):
    folder.write("a/ünï b.bin", PARTS)
    assert folder.size("a/ünï b.bin") == len(DATA) and folder.size("a") is None
    assert folder.read("a/ünï b.bin") == DATA
    assert folder.read("a/ünï b.bin", 5, 50_000) == DATA[5:50_000]
    assert folder.read("a/ünï b.bin", len(DATA) - 3, len(DATA) + 10) == DATA[-3:]
    assert folder.read("a/ünï b.bin", len(DATA) + 1) == b""


@pytest.mark.parametrize("ending", ["gz", "zst", "bz2", "lz4", "parquet", "arrow"])
def test_no_ending_of_a_name_changes_the_bytes(folder, ending):
    folder.write(f"f.{ending}", [b"as they are"])
    assert folder.read(f"f.{ending}") == b"as they are"


def test_a_file_is_replaced_whole_and_removed(folder):
    folder.write("a", [b"one, longer"])
    folder.write("a", [b"two"])
    assert folder.read("a") == b"two"
    folder.remove("a")
    assert folder.size("a") is None and folder.list() == []


def test_files_are_listed_bytewise_below_a_folder(folder):
    names = ["b", "a/z", "a/é", "a/Z/q", "a.txt", "empty"]
    for name in names:
        folder.write(name, [] if name == "empty" else [name.encode()])
    sizes = {name: 0 if name == "empty" else len(name.encode()) for name in names}
    listed = folder.list()
    assert dict(listed) == sizes
    assert [name for name, _ in listed] == sorted(names, key=lambda name: name.encode())
    assert folder.list("a") == [(name, size) for name, size in listed if name.startswith("a/")]


def test_a_file_is_written_only_if_there_is_none(folder):
    assert folder.write_new("claim", b"mine") is True
    assert folder.write_new("claim", b"theirs") is False
    assert folder.read("claim") == b"mine"


def test_an_open_file_is_any_file(folder):
    folder.write("f", PARTS)
    chance = random.Random(1)
    with folder.open("f", len(DATA)) as file:
        assert file.read(10) == DATA[:10] and file.tell() == 10
        for _ in range(60):
            at = chance.randrange(len(DATA))
            count = chance.choice([1, 100, 70_000, 2 << 20, 9 << 20])
            file.seek(at)
            assert file.read(count) == DATA[at : at + count]
        assert file.seek(-5, os.SEEK_END) == len(DATA) - 5 and file.read() == DATA[-5:] and file.read(1) == b""
        file.seek(0)
        assert file.read() == DATA
    with pytest.raises(StorageError, match="has 21000001 bytes and should have 7"):
        folder.open("f", 7)


def test_it_may_be_pickled_and_forked(folder):
    folder.write("f", [b"inside"])
    assert pickle.loads(pickle.dumps(folder)).url == folder.url
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=lambda: results.put(folder.read("f")))
    process.start()
    assert results.get(timeout=60) == b"inside"
    process.join(60)
    assert process.exitcode == 0


def test_no_partial_local_file_shows_its_name(tmp_path):
    folder = Remote(f"file://{tmp_path}")
    with pytest.raises(StorageError):
        folder.write("f", [b"some", "no bytes"])  # type: ignore[list-item]
    assert list(tmp_path.rglob("*")) == []


def test_no_partial_object_shows_its_name(s3, tmp_path):
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    folder.write("f", [b"before"])
    for name in ("f", "g"):
        with pytest.raises(StorageError):
            folder.write(name, [DATA, "no bytes"])  # type: ignore[list-item]
    assert folder.list() == [("f", 6)] and folder.read("f") == b"before"


def test_a_process_that_ends_in_an_upload_publishes_nothing(s3, tmp_path):
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    ended = run_python(
        "from packprep.storage import Remote\n"
        "def stop(number, frame): raise KeyboardInterrupt\n"
        f"folder = Remote({folder.url!r}); folder.list()\n"
        "import signal; signal.signal(signal.SIGALRM, stop); signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "folder.write('f', [bytes(64)] * (1 << 24))\n"
    )
    assert "KeyboardInterrupt" in ended.stderr and ended.returncode != 0
    assert folder.list() == []


@pytest.mark.parametrize("after", [0, 100_000, 3_000_000])
def test_reads_go_on_after_lost_connections(s3, breaking, tmp_path, after):
    Remote(f"s3://{BUCKET}/{tmp_path.name}").write("f", PARTS)
    proxy = breaking("download", after, 4)
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    assert folder.read("f") == DATA
    with folder.open("f", len(DATA)) as file:
        assert file.read() == DATA
    assert proxy.cut == 4


@pytest.mark.parametrize("after", [0, 3_000_000])
def test_writes_go_on_after_lost_connections(s3, breaking, tmp_path, after):
    proxy = breaking("upload", after, 4)
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    folder.write("f", PARTS)
    folder.write("small", [b"small"])
    assert proxy.cut == 4
    assert folder.list() == [("f", len(DATA)), ("small", 5)] and folder.read("f") == DATA


def test_what_stays_broken_is_given_up_and_publishes_nothing(s3, breaking, tmp_path, monkeypatch):
    monkeypatch.setattr("packprep.storage.remote._TRIES", 2)
    breaking("upload", 3_000_000, 1 << 30)
    with pytest.raises(StorageError, match="writing failed: .* It was tried 2 times. Check the network"):
        Remote(f"s3://{BUCKET}/{tmp_path.name}").write("f", PARTS)
    reach(monkeypatch, s3.environment)
    assert Remote(f"s3://{BUCKET}/{tmp_path.name}").list() == []


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_one_message_at_once(s3, monkeypatch, variable):
    monkeypatch.setenv(variable, "wrong")
    monkeypatch.setattr(time, "sleep", None)  # nothing is tried again
    folder = Remote(f"s3://{BUCKET}/x")
    for call in (folder.list, lambda: folder.read("f"), lambda: folder.write("f", [b""]), lambda: folder.size("f")):
        with pytest.raises(StorageError, match="The store refused the credentials.*AWS_SECRET_ACCESS_KEY"):
            call()


def test_no_bucket_is_named(s3):
    with pytest.raises(StorageError, match="there is no bucket nobody-has-it"):
        Remote("s3://nobody-has-it/x").list()


def test_what_cannot_be_a_store_is_refused(monkeypatch):
    with pytest.raises(StorageError, match="/local is no URL"):
        Remote("/local")
    with pytest.raises(StorageError, match="nosuchscheme:// cannot be read"):
        Remote("nosuchscheme://x").list()
    reach(monkeypatch, {**reaching(1), "AWS_ENDPOINT_URL": "localhost:9000"})
    with pytest.raises(StorageError, match="should be like https://host:port"):
        Remote("s3://x").list()


class _Answer(Exception):
    def __init__(self, status: int):
        super().__init__("the server said something")
        self.status = status


class ConnectTimeout(Exception):
    """As httpx and requests call theirs: no OSError."""


@pytest.mark.parametrize(
    "error, passes",
    [
        (_Answer(500), True), (_Answer(503), True), (_Answer(429), True), (_Answer(408), True),
        (_Answer(400), False), (_Answer(403), False), (_Answer(401), False), (_Answer(301), False),
        (ConnectTimeout(), True), (ConnectionResetError(104, "reset"), True), (TimeoutError(), True),
        (OSError("AWS Error SLOW_DOWN during GetObject operation: slow down"), True),
        (OSError("AWS Error UNKNOWN (HTTP status 500) during HeadBucket"), True),
        (OSError("AWS Error UNKNOWN (HTTP status 400) during HeadObject"), False),
        (OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body."), False),
        (OSError("AWS Error EXPIRED_TOKEN during GetObject"), False),
        (OSError("AWS Error NO_SUCH_BUCKET during CreateMultipartUpload"), False),
        (OSError(28, "No space left on device"), False), (PermissionError(13, "no"), False), (TypeError("no"), False),
    ],
)  # fmt: skip
def test_what_may_pass_is_tried_again(error, passes):
    assert _may_pass(error) is passes
