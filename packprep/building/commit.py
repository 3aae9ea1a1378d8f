"""Files that appear whole or not at all, and the receipts that say which shards are done.

A temporary is `.NAME.HOST-PID-RANDOM.tmp` beside its file: written, flushed to disk, renamed; then the folder is flushed.
A shard is done iff its receipt parses, carries the plan's digest, and the shard and rejects files have its sizes; the receipt
is written last. A second commit of a shard compares digests and changes nothing.
"""

import contextlib
import errno
import glob
import os
import re
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packprep.building.plan import Job
from packprep.building.work import Made
from packprep.dataset import shard as shard_format
from packprep.dataset.manifest import FORMAT, VERSION, decode, encode, receipt_name, rejects_name, shard_name
from packprep.dataset.opening import read_file
from packprep.digests import digest_of, digest_of_buffers, digest_of_file
from packprep.errors import BuildError, DatasetError, PackprepError

TEMPORARIES = ".*.tmp"
_HINTS = {
    errno.ENOSPC: "the disk is full: make room",
    errno.EDQUOT: "the quota is used up: make room",
    errno.EFBIG: "the file would be larger than this process may write (ulimit -f): raise the limit",
    errno.EROFS: "the folder cannot be written: choose another --out",
    errno.EACCES: "the folder cannot be written: choose another --out, or its permissions",
    errno.EIO: "the disk reports an error: see to it",
}


def write_error(path: str | Path, error: OSError) -> BuildError:
    """The BuildError of a failed write: what, where, what to do."""
    hint = _HINTS.get(error.errno or 0, "see to it")
    return BuildError(
        f"{path}: {error.strerror or error}; {hint}, and run the same command again: what is committed stays"
    )


def _owner(process: int) -> str:
    """The part of a temporary's name that says whose it is."""
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname()) or "host"
    return f".{host}-{process}-"


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{_owner(os.getpid())}{secrets.token_hex(4)}.tmp")


def _write_temporary(path: Path, buffers: Iterable) -> Path:
    temporary = _temporary(path)
    try:
        _make_folder(path.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                while len(view):
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise write_error(path, error) from error
    return temporary


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, each with its entry in the one above on disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # what may be written and not listed cannot be flushed
        _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folders_last(path: Path, top: Path) -> None:
    """Flush the folders from a file's own up to `top`, so that their entries survive a power cut too."""
    folder = path.parent
    while True:
        _flush_folder(folder)
        if folder == top or folder == folder.parent:
            return
        folder = folder.parent


def flush_output(out: Path) -> None:
    """Flush all folders of an output: what any process renamed into them or removed is so after a power cut too."""
    try:
        for kind in ("shards", "receipts", "rejects"):
            for folder in (*(out / kind).glob("*/"), out / kind):
                if folder.is_dir():
                    _flush_folder(folder)
        _flush_folder(out)
    except OSError as error:
        raise write_error(out, error) from error


def write_whole(path: Path, buffers: Sequence, top: Path) -> None:
    """Write a file, replacing one that stands; the file and the folders up to `top` are on disk when this returns.

    BuildError if it cannot be written, or if somebody else removed the temporary and left another file than this.
    """
    temporary = _write_temporary(path, buffers)
    try:
        os.rename(temporary, path)
        _make_folders_last(path, top)
    except FileNotFoundError:
        # another committer of the same file was faster and tidied up
        ours = digest_of_buffers(buffers)
        if not path.exists() or digest_of_file(path) != ours:
            raise BuildError(
                f"{path}: its temporary {temporary.name} was removed while this process wrote it; run the same command again"
            ) from None
        _make_folders_last(path, top)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise write_error(path, error) from error
    remove_temporaries(path.parent, path.name)


def write_first(path: Path, data: bytes) -> bool:
    """Write a file unless there is one already, whole or not at all; whether it was this process that wrote it.

    The file is on disk when this returns, also one that another process wrote.
    """
    first = not path.exists() and _write_if_missing(path, data)
    try:
        _flush_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    return first


def _write_if_missing(path: Path, data: bytes) -> bool:
    temporary = _write_temporary(path, [data])
    try:
        return _give_name(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _give_name(temporary: Path, path: Path) -> bool:
    """Give a temporary's file its name, unless that is taken; whether it got it."""
    try:
        os.link(temporary, path)
        return True
    except OSError as error:
        if path.exists():  # taken; or whoever took it has also removed the temporary
            return False
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
    os.rename(temporary, path)  # a file system without hard links
    return True


def remove_temporaries(folder: Path, name: str | None = None, of_process: int | None = None) -> None:
    """Remove the temporaries in a folder: all, or those of one file, or those of one process of this host."""
    pattern = f".{glob.escape(name)}.*.tmp" if name else TEMPORARIES
    for temporary in folder.glob(pattern):
        if of_process is None or _owner(of_process) in temporary.name:
            with contextlib.suppress(OSError):
                temporary.unlink()


def remove_all_temporaries(out: Path, of_process: int | None = None) -> None:
    """Remove the temporaries of a whole output: its top folder and those of shards, receipts and rejects."""
    remove_temporaries(out, of_process=of_process)
    for kind in ("shards", "receipts", "rejects"):
        for folder in (out / kind).glob("*/"):
            remove_temporaries(folder, of_process=of_process)


_RECEIPT_KEYS = {
    "format", "version", "plan_digest", "shard", "file", "rows", "segments", "tokens", "bytes", "digest",
    "rejects", "text_digests", "ledger",
}  # fmt: skip


REJECTS_KEYS = {"file", "bytes", "digest", "documents"}


def read_receipt(out: Path, shard: int) -> tuple[dict[str, Any], bytes] | None:
    """(receipt, its bytes) as it stands; None if there is none or it does not parse."""
    path = out / receipt_name(shard)
    try:
        data = read_file(path)
        receipt = decode(data, str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DatasetError:
        return None
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}; see to it and run the same command again") from None
    if not isinstance(receipt, dict) or set(receipt) != _RECEIPT_KEYS:
        return None
    if receipt["format"] != FORMAT or receipt["version"] != VERSION or receipt["shard"] != shard:
        return None
    return receipt, data


def _can_be_gone_on_with(receipt: dict[str, Any]) -> bool:
    """Whether what publication reads of a receipt has its types; who damaged it may have left it canonical."""
    rejects = receipt["rejects"]
    return (
        all(type(receipt[key]) is int and receipt[key] >= 0 for key in ("rows", "segments", "tokens", "bytes"))
        and (rejects is None or (isinstance(rejects, dict) and rejects.keys() == REJECTS_KEYS))
        and isinstance(receipt["ledger"], dict)
    )


def done_receipt(out: Path, shard: int, plan_digest: str) -> tuple[dict[str, Any], bytes] | None:
    """(receipt, its bytes) of a shard that is done; None if it is not."""
    found = read_receipt(out, shard)
    if found is None or found[0]["plan_digest"] != plan_digest:
        return None
    receipt = found[0]
    rejects = receipt["rejects"]
    if not _can_be_gone_on_with(receipt):
        return None
    sizes = [(shard_name(shard), receipt["bytes"])] + ([(rejects_name(shard), rejects["bytes"])] if rejects else [])
    for name, size in sizes:
        try:
            if os.path.getsize(out / name) != size:
                return None
        except OSError:
            return None
    return found


def encode_rejects(made: Made) -> bytearray:
    """The rejects file of a shard: one JSON record a line; empty if all documents were used."""
    data = bytearray()
    for record in made.reading.rejected.in_order():
        data += encode(record)
    return data


def commit_shard(out: Path, job: Job, shard: int, made: Made) -> dict[str, Any]:
    """Write a shard, its rejects, then its receipt; gives the receipt.

    If the shard is done already, nothing is written: BuildError with both digests where they differ.
    """
    try:
        buffers = shard_format.encode(made.arrays)
        rejects = encode_rejects(made)
        receipt = {
            "format": FORMAT,
            "version": VERSION,
            "plan_digest": job.digest,
            "shard": shard,
            "file": shard_name(shard),
            "rows": len(made.arrays["row_offsets"]) - 1,
            "segments": len(made.arrays["segment_key"]),
            "tokens": sum(source["tokens"]["used"] for source in made.ledger["sources"].values()),
            "bytes": sum(memoryview(buffer).nbytes for buffer in buffers),
            "digest": digest_of_buffers(buffers),
            "rejects": None,
            "text_digests": made.reading.text_digests,
            "ledger": made.ledger,
        }
        if rejects:
            receipt["rejects"] = {
                "file": rejects_name(shard),
                "bytes": len(rejects),
                "digest": digest_of(rejects),
                "documents": len(made.reading.rejected),
            }
        standing = done_receipt(out, shard, job.digest)
        if standing is not None:
            if standing[0] != receipt:
                raise BuildError(
                    f"{shard_name(shard)}: made again with digest {receipt['digest']} and it stands with "
                    f"{standing[0]['digest']}: the input files changed under the build, or two builds differ; "
                    "begin anew in another folder and compare"
                )
            return receipt
        write_whole(out / shard_name(shard), buffers, out)
        if rejects:
            write_whole(out / rejects_name(shard), [rejects], out)
        else:
            (out / rejects_name(shard)).unlink(missing_ok=True)
        write_whole(out / receipt_name(shard), [encode(receipt)], out)
        return receipt
    except PackprepError:
        raise
    except OSError as error:
        raise write_error(out / shard_name(shard), error) from error
