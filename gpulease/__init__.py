"""gpulease: leases of GPU memory on shared machines.

The public names are `lease`, `Lease`, `Executor`, `Client`, `errors` and `__version__`. Each is
loaded when it is first used, so that importing the package costs little.
"""

TYPE_CHECKING = False  # `typing` takes as long to import as the interpreter to start
if TYPE_CHECKING:
    from typing import Any

    from gpulease import errors as errors
    from gpulease.client import Client as Client
    from gpulease.lease_api import Lease as Lease
    from gpulease.lease_api import lease as lease
    from gpulease.lease_api.executor import Executor as Executor

__version__ = "0.1.0"
__all__ = ["Client", "Executor", "Lease", "__version__", "errors", "lease"]

_HOMES = {
    "errors": "gpulease.errors",
    "Client": "gpulease.client",
    "Executor": "gpulease.lease_api.executor",
    "Lease": "gpulease.lease_api",
    "lease": "gpulease.lease_api",
    # For IPython: %load_ext gpulease.
    "load_ipython_extension": "gpulease.lease_api.magic",
}


if not TYPE_CHECKING:  # for type checkers, every name would exist

    def __getattr__(name: str) -> "Any":
        """Load a public name when it is first used."""
        # `from gpulease import config` asks here first, before it imports the module.
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        if name == "errors":
            return import_module("gpulease.errors")
        found = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
