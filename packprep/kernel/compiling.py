"""`@kernel`, the one way to compile a function, and the folder in which what is compiled is kept.

Flags are set once here: no fast-math (IEEE results are part of the law), numpy's error model, the GIL released,
no threads (processes scale, and forking after a thread pool hangs).
Numba keys its cache by the one file of a function, so that a changed callee in another file would go unnoticed.
Here the cache's folder is named by the digest of all of packprep's sources instead: any change starts a new one.
"""

import contextlib
import functools
import importlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packprep.digests import digest_of_buffers

KEPT_FOLDERS, KEPT_DAYS = 8, 30
"""Of the folders of compiled kernels: how many stay however old they are, and how long the others stay after their last use."""


def _sources_digest() -> str:
    root = Path(__file__).parents[1]
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    return digest_of_buffers(part for name in names for part in (name.encode(), (root / name).read_bytes()))


@functools.cache
def cache_folder() -> str | None:
    """The folder for compiled kernels: the first of $NUMBA_CACHE_DIR, $XDG_CACHE_HOME, ~/.cache and the folder of
    temporaries that can be written; None (kernels are compiled in every process) if none can."""
    candidates = [
        os.environ.get("NUMBA_CACHE_DIR"),
        os.environ.get("XDG_CACHE_HOME"),
        os.path.join(os.path.expanduser("~"), ".cache"),
        own := os.path.join(tempfile.gettempdir(), f"packprep-{os.getuid()}"),
    ]
    for candidate in candidates:
        if not candidate or not os.path.isabs(candidate):
            continue
        folder = os.path.join(candidate, "packprep", "kernels-" + _sources_digest()[:16])
        try:
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


class Kernel:
    """A function that is compiled when it is first called, or met in another that is compiled. Only then is numba imported.

    function: the function itself, which gives the same in plain Python, slowly. inline: LLVM merges it into its callers.
    """

    def __init__(self, function: Callable, inline: bool):
        self.function, self._inline = function, inline
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(*arguments)

    @functools.cached_property
    def compiled(self) -> Any:
        """numba's dispatcher."""
        import numba

        importlib.import_module("packprep.kernel.overloads")  # what numba is told of kernel/memory.py
        cached: Any = importlib.import_module("packprep.kernel.cached")
        decorate: Any = numba.njit(nogil=True, error_model="numpy", forceinline=self._inline)
        folder = None if self._inline else cache_folder()
        if folder is None:
            return decorate(self.function)
        settings: Any = numba.config
        before, settings.CACHE_DIR = settings.CACHE_DIR, folder
        try:
            dispatcher = decorate(self.function)
            dispatcher._cache = cached.KernelCache(self.function)
            return dispatcher
        finally:
            settings.CACHE_DIR = before

    @property
    def _numba_type_(self) -> Any:
        """What numba asks of an object that a compiled function names."""
        return self.compiled._numba_type_


def kernel(function: Any = None, *, inline: bool = False) -> Any:
    """Compile `function` at its first call; keep the result on disk for the other processes.

    inline=True is for small functions that kernels call: LLVM merges them into their callers.
    """
    return functools.partial(Kernel, inline=inline) if function is None else Kernel(function, inline)
