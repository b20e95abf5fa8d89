"""Put a lease into force in an interpreter that runs already, and lift it again.

The other way in is sitecustomize, at the start of a job's interpreter; what it does there is done
here for what has been imported since.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any, Callable


def enforce(site: Any, raw: str) -> Callable[[], None]:
    """Hold this interpreter to the lease `raw`; what is returned lifts it.

    `site` is our sitecustomize, loaded as _gpulease_site. The lease's variables stand in
    os.environ by now.
    """
    plain = os.environ.__class__
    finder = site.hold(raw)
    for name in site.HOOKS:
        if _is_a_framework(sys.modules.get(name)):
            # One that another thread is importing at this moment is waited for.
            finder.hook(importlib.import_module(name), name)

    def lift() -> None:
        sys.meta_path[:] = [each for each in sys.meta_path if each is not finder]
        os.environ.__class__ = plain
        while finder.lifts:
            finder.lifts.pop()()

    return lift


def _is_a_framework(module: Any) -> bool:
    """Tell a package from a folder or a file of the user's that happens to have its name."""
    spec = getattr(module, "__spec__", None)
    return (
        isinstance(module, ModuleType)
        and spec is not None
        and spec.origin is not None
        and spec.submodule_search_locations is not None
    )
