"""`@kernel`, the one way to compile a function.

Flags are set once here: no fast-math (IEEE results are part of the law), numpy's error model, the GIL released,
no threads (processes scale, and forking after a thread pool hangs).
Numba keys its cache by the one file of a function, so that a changed callee in another file would go unnoticed.
The folder of `packprep.cache` is another one after any change.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from packprep.cache import cache_folder


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
