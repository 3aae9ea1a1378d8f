"""`@kernel`, the one way to compile a function.

Flags are set once here: no fast-math (IEEE results are part of the law), numpy's error model, the
GIL released, no threads (processes scale, and forking after a thread pool hangs). What is compiled
is kept by `packprep.cache`, and not by numba: numba looks at the one file of a function, so that a
changed callee in another would go unnoticed, takes whatever lies in its folder, and ends with an
error where that is damaged.
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
"""What a command compiles takes about so long; who compiles more says so."""
COUNTS: Counter[str] = Counter()
"""Kernels that this process has "compiled", "kept" of these, and "loaded"."""


class Kernel:
    """A function that is compiled when it is first called, or met in another that is compiled. Only
    then is numba imported.

    function: the function itself, which gives the same in plain Python, slowly. inline: LLVM merges
    it into its callers.
    """

    def __init__(self, function: Callable, inline: bool):
        self.function, self._inline = function, inline
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(*arguments)

    @lazy
    def compiled(self) -> Any:
        """numba's dispatcher."""
        if "numba" not in sys.modules and not is_kept(
            f"{self.function.__module__}.{self.function.__qualname__}"
        ):
            self._say_compiling()  # before an import that takes a second
        with unforked():
            if "packprep.kernel.overloads" not in sys.modules:
                from numba.core.compiler_lock import global_compiler_lock

                # what numba is told of kernel/memory.py
                importlib.import_module("packprep.kernel.overloads")
                hold_at_forks(global_compiler_lock)
        import numba

        decorate: Any = numba.njit(nogil=True, error_model="numpy", forceinline=self._inline)
        dispatcher = decorate(self.function)
        # Kernels take numbers and arrays alone: numba need not import what teaches it other types,
        # as awkward, .3 s, which gigatoken brings.
        dispatcher._compilation_chain_init_hook = lambda: None
        # no file shows what a closure holds
        if not self._inline and self.function.__closure__ is None:
            with contextlib.suppress(OSError):  # a function of no file
                code = self.function.__code__
                self._what = f"{self.function.__module__}.{self.function.__qualname__}"
                self._code = (
                    f"{code_digest(code.co_filename)} {code_digest(__file__)} {code.co_firstlineno}"
                )
                dispatcher._cache = self
        return dispatcher

    @property
    def _numba_type_(self) -> Any:
        """What numba asks of an object that a compiled function names."""
        return self.compiled._numba_type_

    # What numba asks for what was compiled before, in place of a cache of its own.

    @property
    def cache_path(self) -> str | None:
        """Where it is kept."""
        return cache_folders().own

    def load_overload(self, signature: Any, target: Any) -> Any:
        """What was compiled for a signature; None where nothing is kept, and numba compiles.

        What is loaded does without what numba prepares to compile others: .08 s in every process.
        """
        from numba.core.compiler import CompileResult
        from numba.core.runtime import rtsys

        rtsys.initialize(target)  # what compiled functions allocate arrays with
        data = kept(self._what, self._depends_on(signature, target.codegen()), self._code)
        COUNTS["compiled" if data is None else "loaded"] += 1
        if data is None:
            self._say_compiling()
            of = str(getattr(signature[0], "dtype", signature[0])) if signature else "nothing"
            say(f"compiling {self._what.removeprefix('packprep.')} of {of}", once=True)
            return None
        return CompileResult._rebuild(target, *pickle.loads(data))

    def _say_compiling(self) -> None:
        folder = cache_folders().own
        kept = f" that {folder} lacks, up to {seconds} s: they are kept there"
        say(
            f"compiling kernels{kept if folder else f', about {seconds} s: none is kept'}",
            once=True,
        )

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what was compiled, but for what holds addresses of this process."""
        from numba.core.serialize import dumps

        if not compiled.library.has_dynamic_globals and all(
            lifted.can_cache for lifted in compiled.lifted
        ):
            depends_on = self._depends_on(signature, compiled.codegen)
            COUNTS["kept"] += keep(self._what, depends_on, self._code, dumps(compiled._reduce()))

    def _depends_on(self, signature: Any, codegen: Any) -> bytes:
        """signature: types, whose names say all of them. codegen: of a processor and what it can
        do."""
        import numba

        tags = sys.implementation.cache_tag, numba.__version__
        return repr((signature, codegen.magic_tuple(), *tags)).encode()


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written: for arrays of the two kinds a kernel is compiled twice."""
    view = array.view()
    view.flags.writeable = False
    return view


def kernel(function: Any = None, *, inline: bool = False) -> Any:
    """Compile `function` at its first call; keep the result on disk for the other processes.

    inline=True is for small functions that kernels call: LLVM merges them into their callers.
    """
    return (
        functools.partial(Kernel, inline=inline) if function is None else Kernel(function, inline)
    )
