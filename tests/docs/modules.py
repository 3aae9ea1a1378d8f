"""The modules of docs/, which is no package."""

import importlib.util
import sys
from typing import Any

from tests.made import ROOT

DOCS = ROOT / "docs"


def module(name: str) -> Any:
    """A file of docs/ as a module, once a process, so that those which import one another find
    it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
