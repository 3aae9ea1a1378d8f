"""Compile functions with numba by `@kernel`, the only way to compile in packprep.

This module sets all compiler flags. Fast-math is off, because the format defines IEEE results.
NumPy's error model applies and the GIL is released. Kernels use a single thread, because packprep
scales with processes, and forking after a thread pool hangs.

`packprep.cache` keeps compiled kernels. Numba's own cache does not notice a changed function in
another file, trusts every file in its folder, and fails on damaged files.
"""

import contextlib
import functools
import importlib
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from packprep.cache import cache_folders, code_digest, is_kept, keep, kept
from packprep.forking import hold_at_forks, lazy, unforked
from packprep.messages import say

seconds = 10
"""Approximate seconds that compiling takes in a command.

Commands with more kernels set another value.
"""
COUNTS: Counter[str] = Counter()
"""Numbers of kernels that this process compiled, wrote to the cache ("kept") or loaded from it."""


class Kernel:
    """A function that is compiled when Python or another kernel first calls it.

    The first call of any kernel imports numba. `function` is the uncompiled Python function. It
    gives the same results, but more slowly. If `inline` is true, LLVM merges the kernel into its
    callers.
    """

    def __init__(self, function: Callable, inline: bool):
        self.function, self._inline = function, inline
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(*arguments)

    @lazy
    def compiled(self) -> Any:
        """Return numba's dispatcher for the function."""
        if "numba" not in sys.modules and not is_kept(
            f"{self.function.__module__}.{self.function.__qualname__}"
        ):
            # This message comes before the import of numba, which takes a second.
            self._say_compiling()
        with unforked():
            if "packprep.kernel.overloads" not in sys.modules:
                from numba.core.compiler_lock import global_compiler_lock

                # This tells numba how to compile the functions in kernel/memory.py.
                importlib.import_module("packprep.kernel.overloads")
                hold_at_forks(global_compiler_lock)
        import numba

        decorate: Any = numba.njit(nogil=True, error_model="numpy", forceinline=self._inline)
        dispatcher = decorate(self.function)
        # Kernels take only numbers and arrays. So numba need not import support for other types,
        # such as awkward, which gigatoken installs. That import takes 0.3 s.
        dispatcher._compilation_chain_init_hook = lambda: None
        # A cached kernel cannot depend on a closure, because no file shows its contents.
        if not self._inline and self.function.__closure__ is None:
            with contextlib.suppress(OSError):  # The function is not from a file.
                code = self.function.__code__
                self._what = f"{self.function.__module__}.{self.function.__qualname__}"
                self._code = (
                    f"{code_digest(code.co_filename)} {code_digest(__file__)} {code.co_firstlineno}"
                )
                dispatcher._cache = self
        return dispatcher

    @property
    def _numba_type_(self) -> Any:
        """Return this kernel's numba type.

        Numba reads this attribute to compile a kernel that calls this kernel.
        """
        return self.compiled._numba_type_

    # The following methods are the interface that numba expects from a cache.

    @property
    def cache_path(self) -> str | None:
        """Return the folder that keeps compiled kernels, or None without a cache."""
        return cache_folders().own

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the cached compiled kernel for a signature, or None to make numba compile it.

        If the kernel is cached, numba does not prepare for compiling. This saves 0.08 s per
        process.
        """
        from numba.core.compiler import CompileResult
        from numba.core.runtime import rtsys

        rtsys.initialize(target)  # Compiled functions use this runtime to allocate arrays.
        data = kept(self._what, self._depends_on(signature, target.codegen()), self._code)
        COUNTS["compiled" if data is None else "loaded"] += 1
        if data is None:
            self._say_compiling()
            say(
                f"compiling {self._what.removeprefix('packprep.')} of {_subject(signature)}",
                once=True,
            )
            return None
        return CompileResult._rebuild(target, *pickle.loads(data))

    def _say_compiling(self) -> None:
        folder = cache_folders().own
        cache_note = f" that {folder} lacks, up to {seconds} s: they are kept there"
        say(
            f"compiling kernels{cache_note if folder else f', about {seconds} s: none is kept'}",
            once=True,
        )

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Write a compiled kernel to the cache, unless it has memory addresses of this process."""
        from numba.core.serialize import dumps

        if not compiled.library.has_dynamic_globals and all(
            lifted.can_cache for lifted in compiled.lifted
        ):
            depends_on = self._depends_on(signature, compiled.codegen)
            COUNTS["kept"] += keep(self._what, depends_on, self._code, dumps(compiled._reduce()))

    def _depends_on(self, signature: Any, codegen: Any) -> bytes:
        """Return bytes with the signature, the processor and the versions of Python and numba.

        A cached kernel is used only if these bytes are the same as when the kernel was compiled.
        """
        import numba

        tags = sys.implementation.cache_tag, numba.__version__
        return repr((signature, codegen.magic_tuple(), *tags)).encode()


def _subject(signature: Any) -> str:
    """Return the type of a kernel's first argument as a word for messages.

    The word is the dtype of an array, the name of a NamedTuple, or "nothing" for a kernel without
    arguments.
    """
    if not signature:
        return "nothing"
    record = getattr(signature[0], "instance_class", None)
    return record.__name__ if record else str(getattr(signature[0], "dtype", signature[0]))


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view of an array.

    Numba compiles a kernel once for read-only arrays and once for writable arrays. If all callers
    pass read-only views, it compiles the kernel only once.
    """
    view = array.view()
    view.flags.writeable = False
    return view


def kernel(function: Any = None, *, inline: bool = False) -> Any:
    """Return `function` as a `Kernel`, which is compiled at its first call.

    The compiled kernel is cached on disk for other processes. Use inline=True for small functions
    that kernels call. LLVM merges these functions into their callers.
    """
    return (
        functools.partial(Kernel, inline=inline) if function is None else Kernel(function, inline)
    )
