"""Apply a lease to this process: its environment, and the hooks of the frameworks.

The only module that writes to os.environ. The hooks are those of the daemon, which wrote the
variable that they read: they are loaded by path from the directory that the daemon put first on
PYTHONPATH, which is not added to sys.path here. Child processes inherit the variables.
"""

import os
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from gpulease.errors import GpuleaseError
from gpulease.wire.jobs import EnvironmentView
from gpulease.wire.requests import from_wire

_LEASE = "GPULEASE_HOOK"
_SITE = "_gpulease_site"
"""Loaded under this name, the sitecustomize of the hooks does nothing by itself."""

Undo = Callable[[], None]


def variables(view: EnvironmentView) -> dict[str, str]:
    """Return the variables that the lease sets, as the operating system's strings."""
    return {from_wire(name): from_wire(value) for name, value in view.set.items()}


def activate(view: EnvironmentView) -> Undo:
    """Set the variables of a lease and install its hooks; return what undoes both.

    Raises:
        GpuleaseError: the hooks cannot be loaded; nothing has been changed.
    """
    new = variables(view)
    # The view has only the variables that change.
    path = new.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    site, running = _hooks(Path(path.split(os.pathsep)[0]))
    unset = [from_wire(name) for name in view.unset]
    before = {name: os.environ.get(name) for name in (*new, *unset)}
    for name in unset:
        os.environ.pop(name, None)
    os.environ.update(new)
    remove_hooks = running.enforce(site, new[_LEASE])

    def undo() -> None:
        # The hooks first: while they are installed, os.environ keeps the variables of the lease.
        remove_hooks()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return undo


def _hooks(folder: Path) -> tuple[Any, Any]:
    """Load the hooks for the start of an interpreter, and those for a running one."""
    try:
        spec = spec_from_file_location(_SITE, folder / "sitecustomize.py")
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        site: Any = module_from_spec(spec)
        spec.loader.exec_module(site)
        return site, site.hooks_module("running")
    except (OSError, ImportError, AttributeError) as error:
        raise GpuleaseError(
            f"cannot apply the lease: the hooks in {folder} cannot be loaded: {error}",
            "the daemon may be of another version than this gpulease: restart the daemon",
        ) from error
