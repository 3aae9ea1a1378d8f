"""Compiled kernels from disk, without what numba needs only to compile others. Imported with the first kernel."""

from typing import Any

from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys


class KernelCache(FunctionCache):
    """numba's cache of a function. numba itself prepares to compile before it looks here: .08 s in every process."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What is kept for a signature; None where there is nothing, and numba compiles, for which it prepares by itself."""
        rtsys.initialize(target_context)  # what compiled functions allocate arrays with
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)
