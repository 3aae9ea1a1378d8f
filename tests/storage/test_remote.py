"""What a folder of a file system does, whichever kind it is; and what it does while connections
break."""

import json
import multiprocessing
import os
import pickle
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import obstore
import pytest

from packprep import messages
from packprep.errors import StorageError
from packprep.storage import Remote, is_url
from packprep.storage.remote import _may_pass
from packprep.storage.stores import _keys_of_profile, _put_if_none
from tests.made import run_python
from tests.storage.conftest import ACCESS_KEY, BUCKET, SECRET_KEY, reach, reaching

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
    assert folder.create("claim", b"mine") is True
    assert folder.create("claim", b"theirs") is False
    assert folder.read("claim") == b"mine"


def wins(folders: list[Remote], times: int) -> list[list[int]]:
    """By round, which of the folders wrote a new file, where all of them write it in the same
    moment."""
    barrier = threading.Barrier(len(folders), timeout=60)
    won: list[list[int]] = [[] for _ in range(times)]

    def run(which: int) -> None:
        for i in range(times):
            barrier.wait()
            if folders[which].create(f"claims/{i}", b"of %d" % which):
                won[i].append(which)

    threads = [threading.Thread(target=run, args=(which,)) for which in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


@pytest.mark.parametrize("times", [20, pytest.param(1000, marks=pytest.mark.campaign)])
def test_of_two_publishers_at_once_one_wins_each_time(folder, times):
    folders = [folder, Remote(folder.url)]
    for i, one in enumerate(wins(folders, times)):
        assert len(one) == 1 and folder.read(f"claims/{i}") == b"of %d" % one[0]


def test_a_store_that_passes_the_condition_over_is_asked_first(s3, tmp_path, monkeypatch):
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda store, path, data, mode: put(store, path, data))
    assert folder.create("claim", b"mine") and not folder.create("claim", b"theirs")
    assert folder.read("claim") == b"mine"


class Google(BaseHTTPRequestHandler):
    """What Google's store does of a PUT whose object is to be the first of its name."""

    objects: dict[str, bytes] = {}

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        first = (
            self.headers["x-goog-if-generation-match"] != "0"
            or unquote(self.path) not in self.objects
        )
        self.objects.update({unquote(self.path): data} if first else {})
        self.send_response(200 if first else 412)
        for header in (("ETag", '"1"'), ("x-goog-generation", "1"), ("Content-Length", "0")):
            self.send_header(*header)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


def test_google_s_store_is_given_its_condition():
    with ThreadingHTTPServer(("127.0.0.1", 0), Google) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        account = {"gcs_base_url": f"http://127.0.0.1:{server.server_port}", "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        put_if_none = _put_if_none(
            "GCSStore", "bucket/folder", service_account_key=json.dumps(account)
        )
        assert put_if_none is not None
        assert [put_if_none("bucket/folder/claim", data) for data in (b"mine", b"theirs")] == [
            True,
            False,
        ]
        server.shutdown()
    assert Google.objects == {"/bucket/folder/claim": b"mine"}


def test_a_forked_process_is_asked_first_and_waits_for_no_thread_of_another(s3, tmp_path):
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    assert folder.create("claim", b"mine")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(
        target=lambda: results.put([folder.create(name, b"theirs") for name in ("claim", "new")])
    )
    process.start()
    assert results.get(timeout=60) == [False, True]
    process.join(60)
    assert folder.read("claim") == b"mine" and folder.read("new") == b"theirs"


PROFILES = {
    "config": "[default]\nregion = x\n[profile work]\nregion = x\n[profile sso]\nsso_session = s\n",
    "credentials": (
        f"[work]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    ),
}


@pytest.fixture
def profiles(s3, tmp_path, monkeypatch):
    """The server, and files of AWS's profiles, of which `work` has its keys."""
    for name, variable in (
        ("config", "AWS_CONFIG_FILE"),
        ("credentials", "AWS_SHARED_CREDENTIALS_FILE"),
    ):
        (tmp_path / name).write_text(PROFILES[name])
        monkeypatch.setenv(variable, str(tmp_path / name))
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    return tmp_path


def test_a_profile_gives_keys_for_all_that_is_asked(profiles, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "work")
    folder = Remote(f"s3://{BUCKET}/{profiles.name}")
    put, seen = obstore.put, []
    monkeypatch.setattr(
        obstore, "put", lambda *given, **how: (seen.append(how), put(*given, **how))[1]
    )
    assert folder.create("claim", b"mine") and not folder.create("claim", b"theirs")
    assert (
        folder.list() == [("claim", 4)]
        and folder.read("claim") == b"mine"
        and seen == [{"mode": "create"}]
    )
    assert all(len(one) == 1 for one in wins([folder, Remote(folder.url)], 5))


@pytest.mark.parametrize(
    "profile, keys", [(None, {}), ("sso", None), ("nobody", None), ("work", ACCESS_KEY)]
)
def test_which_profiles_have_their_keys_in_files(profiles, monkeypatch, profile, keys):
    monkeypatch.setenv("AWS_PROFILE", profile or "default")
    found = _keys_of_profile()
    assert (found or {}).get("access_key_id") == keys if isinstance(keys, str) else found == keys
    (profiles / "config").write_text("no section")
    with pytest.raises(StorageError, match="config cannot be read"):
        _keys_of_profile()


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
        assert (
            file.seek(-5, os.SEEK_END) == len(DATA) - 5
            and file.read() == DATA[-5:]
            and file.read(1) == b""
        )
        file.seek(0)
        assert file.read() == DATA
    with pytest.raises(StorageError, match="has 21000001 bytes, but should have 7"):
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


@pytest.mark.long
def test_a_process_that_ends_in_an_upload_publishes_nothing(s3, tmp_path):
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    ended = run_python(
        "from packprep.storage import Remote\ndef stop(number, frame): raise"
        f" KeyboardInterrupt\nfolder = Remote({folder.url!r}); folder.list()\nimport signal;"
        " signal.signal(signal.SIGALRM, stop); signal.setitimer(signal.ITIMER_REAL,"
        " 0.5)\nfolder.write('f', [bytes(64)] * (1 << 24))\n"
    )
    assert "KeyboardInterrupt" in ended.stderr and ended.returncode != 0
    assert folder.list() == []


@pytest.mark.long
@pytest.mark.alike(2)
@pytest.mark.parametrize("after", [0, 100_000, 3_000_000])
def test_reads_go_on_after_lost_connections(s3, breaking, tmp_path, after):
    Remote(f"s3://{BUCKET}/{tmp_path.name}").write("f", PARTS)
    proxy = breaking("download", after, 4)
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    assert folder.read("f") == DATA
    with folder.open("f", len(DATA)) as file:
        assert file.read() == DATA
    assert proxy.cut == 4


@pytest.mark.long
@pytest.mark.parametrize("after", [0, 3_000_000])
def test_writes_go_on_after_lost_connections(s3, breaking, tmp_path, after):
    proxy = breaking("upload", after, 4)
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    folder.write("f", PARTS)
    folder.write("small", [b"small"])
    assert proxy.cut == 4
    assert folder.list() == [("f", len(DATA)), ("small", 5)] and folder.read("f") == DATA


@pytest.mark.long
@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_claim_goes_on_after_lost_connections(
    s3, breaking, tmp_path, monkeypatch, capsys, direction
):
    """What was lost may be the answer of a store that wrote it."""
    monkeypatch.setattr(messages, "_said", set())
    proxy = breaking(direction, 0, 4)
    folder = Remote(f"s3://{BUCKET}/{tmp_path.name}")
    assert folder.create("claim", b"mine") and not folder.create("claim", b"theirs")
    assert proxy.cut == 4 and folder.read("claim") == b"mine"
    assert f"s3://{BUCKET}/{tmp_path.name}: writing failed 2 times (" in capsys.readouterr().err


@pytest.mark.long
def test_what_stays_broken_is_given_up_and_publishes_nothing(s3, breaking, tmp_path, monkeypatch):
    monkeypatch.setattr("packprep.storage.remote._TRIES", 2)
    breaking("upload", 3_000_000, 1 << 30)
    with pytest.raises(
        StorageError, match=r"writing failed: .* \(after 2 tries\)\nhint: check the network"
    ):
        Remote(f"s3://{BUCKET}/{tmp_path.name}").write("f", PARTS)
    reach(monkeypatch, s3.environment)
    assert Remote(f"s3://{BUCKET}/{tmp_path.name}").list() == []


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_one_message_at_once(s3, monkeypatch, variable):
    monkeypatch.setenv(variable, "wrong")
    monkeypatch.setattr(time, "sleep", None)  # nothing is tried again
    folder = Remote(f"s3://{BUCKET}/x")
    for call in (
        folder.list,
        lambda: folder.read("f"),
        lambda: folder.write("f", [b""]),
        lambda: folder.size("f"),
    ):
        with pytest.raises(
            StorageError, match=r"The store refused the credentials\nhint: .*AWS_SECRET_ACCESS_KEY"
        ):
            call()


def test_no_bucket_is_named(s3):
    with pytest.raises(StorageError, match="bucket nobody-has-it does not exist"):
        Remote("s3://nobody-has-it/x").list()


def test_what_cannot_be_a_store_is_refused(monkeypatch):
    with pytest.raises(StorageError, match="/local is not a valid URL"):
        Remote("/local")
    with pytest.raises(StorageError, match="nosuchscheme:// cannot be read"):
        Remote("nosuchscheme://x").list()
    reach(monkeypatch, {**reaching(1), "AWS_ENDPOINT_URL": "localhost:9000"})
    with pytest.raises(StorageError, match="use the form https://host:port"):
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
        (OSError("GenericError: Error performing PUT in 1ms - Server returned non-2xx status code: 503 Slow down"), True),
        (OSError("GenericError: Error performing PUT in 1ms - Server returned non-2xx status code: 409 Conflict"), True),
        (OSError("GenericError: Error performing PUT in 1ms - Server returned non-2xx status code: 400 Bad"), False),
        (OSError("GenericError: Error performing PUT in 1ms - HTTP error: error sending request"), True),
        (OSError("PermissionDeniedError: The operation lacked the necessary privileges"), False),
        (OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body."), False),
        (OSError("AWS Error EXPIRED_TOKEN during GetObject"), False),
        (OSError("AWS Error NO_SUCH_BUCKET during CreateMultipartUpload"), False),
        (OSError(28, "No space left on device"), False), (PermissionError(13, "no"), False), (TypeError("no"), False),
    ],
)  # fmt: skip
def test_what_may_pass_is_tried_again(error, passes):
    assert _may_pass(error) is passes


@pytest.mark.parametrize("failures", [1, 3])
def test_it_is_said_that_a_store_is_tried_again_after_the_second_failure_before_the_wait(
    monkeypatch, capsys, failures
):
    monkeypatch.setattr(messages, "_said", set())
    folder, waits, left = Remote("s3://bucket/x"), [], iter([ConnectTimeout()] * failures)
    monkeypatch.setattr(time, "sleep", lambda seconds: waits.append(capsys.readouterr().err))

    def action(store):
        for error in left:
            raise error
        return "done"

    monkeypatch.setattr(Remote, "_store", lambda folder: None)
    assert folder._tried("reading", "f", action) == "done"
    said = [
        f"packprep: s3://bucket/x: reading failed {n} times (ConnectTimeout): trying again\n"
        for n in (2, 3)
    ]
    assert waits == ["", *said][:failures]
