"""The JSON shapes and the frames that the daemon and its clients exchange.

Programs that use `gpulease.Client` import the shapes from here. Each is loaded when it is first
used: the shim imports `gpulease.wire.frames` and must stay small.
"""

TYPE_CHECKING = False  # `typing` takes as long to import as the interpreter to start
if TYPE_CHECKING:
    from typing import Any

    from gpulease.wire.frames import *
    from gpulease.wire.jobs import *
    from gpulease.wire.machine import *
    from gpulease.wire.requests import *
    from gpulease.wire.usage import *

_MODULES = ("requests", "jobs", "machine", "usage", "frames")

if not TYPE_CHECKING:  # for type checkers, every name would exist

    def __getattr__(name: str) -> "Any":
        """Load a public name when it is first used."""
        from importlib import import_module

        for module in _MODULES if not name.startswith("_") else ():
            found = getattr(import_module(f"gpulease.wire.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
