"""The folder in which one run of packprep keeps for the next what takes long to make: compiled kernels, facts of tokenizers.

It is named by the digest of all of packprep's sources: any change starts a new one.
"""

import contextlib
import functools
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator

from packprep.dataset.opening import read_file
from packprep.digests import digest_of_buffers

KEPT_FOLDERS, KEPT_DAYS = 8, 30
"""Of the folders of compiled kernels: how many stay however old they are, and how long the others stay after their last use."""


def _sources(folder: str) -> Iterator[str]:
    """The paths of the Python files in a folder, at any depth."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sources(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path


def _sources_digest() -> str:
    root = os.path.dirname(__file__)
    names = sorted(os.path.relpath(path, root) for path in _sources(root))
    return digest_of_buffers(part for name in names for part in (name.encode(), read_file(os.path.join(root, name))))


@functools.cache
def cache_folder() -> str | None:
    """The folder for what is kept: the first of $NUMBA_CACHE_DIR, $XDG_CACHE_HOME, ~/.cache and the folder of
    temporaries that can be written; None if none can."""
    candidates = [
        os.environ.get("NUMBA_CACHE_DIR"),
        os.environ.get("XDG_CACHE_HOME"),
        os.path.join(os.path.expanduser("~"), ".cache"),
        own := os.path.join(tempfile.gettempdir(), f"packprep-{os.getuid()}"),
    ]
    for candidate in candidates:
        if not candidate or not os.path.isabs(candidate):
            continue
        try:
            folder = os.path.join(candidate, "packprep", "kernels-" + _sources_digest()[:16])
            if candidate == own:
                _refuse_foreign(own)
            is_new = not os.path.isdir(folder)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.utime(folder)  # when it was used last
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        if is_new:
            _remove_old_folders(os.path.dirname(folder))
        return folder
    return None


def _remove_old_folders(parent: str) -> None:
    """Remove the folders of other sources that nobody used for long, but for the last KEPT_FOLDERS: each holds megabytes.

    One that is used again while it is removed is put back; what cannot be removed stays. A name with a dot is what was left
    by a process that was killed here.
    """
    used: list[tuple[float, str]] = []
    left: list[str] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(".kernels-"):
                left.append(entry.path)
            elif entry.name.startswith("kernels-") and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    used.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    oldest = time.time() - KEPT_DAYS * 86400
    for folder in left + [path for _, path in sorted(used, reverse=True)[KEPT_FOLDERS:]]:
        aside = os.path.join(parent, f".{os.path.basename(folder).lstrip('.')}-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            if os.stat(folder).st_mtime >= oldest:
                continue
            os.rename(folder, aside)
            if os.stat(aside).st_mtime >= oldest:
                os.rename(aside, folder)
            else:
                shutil.rmtree(aside, ignore_errors=True)


def _refuse_foreign(folder: str) -> None:
    """PermissionError if somebody else can write there: a compiled kernel in the cache is code that will run."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others")
