"""Enforces a lease in an interpreter that already runs, and stops enforcing it again.

At the start of a job's interpreter, sitecustomize does this. Here the frameworks that were imported
since then are hooked as well.
"""

import importlib
import os
import sys
from types import ModuleType
from typing import Any, Callable


def enforce(site: Any, raw: str) -> Callable[[], None]:
    """Enforce the lease `raw` in this interpreter; return a function that ends that.

    `site` is our sitecustomize, loaded as _gpulease_site. The variables of the lease are in
    os.environ.
    """
    original = os.environ.__class__
    finder = site.enforce(raw)
    for name in (*site.HOOKS, *getattr(site, "COUNTERS", ())):
        if _is_framework(sys.modules.get(name)):
            # Waits if another thread is importing it.
            finder.install_hook(importlib.import_module(name), name)

    def lift() -> None:
        sys.meta_path[:] = [each for each in sys.meta_path if each is not finder]
        os.environ.__class__ = original
        finder.lease = ""
        while finder.undos:
            finder.undos.pop()()

    return lift


def _is_framework(module: Any) -> bool:
    """Distinguish a package from a folder or a file of the user's with the same name."""
    # Not by __spec__: the module that TensorFlow 1.14 puts in its own place has none.
    return (
        isinstance(module, ModuleType)
        and getattr(module, "__file__", None) is not None
        and getattr(module, "__path__", None) is not None
    )
