"""Put a lease into force in this process: its environment, and the hooks of the frameworks.

The one place that writes to os.environ. The hooks are the daemon's, since it wrote the variable
that they read; they are loaded by path from the folder that it put first on PYTHONPATH, so that the
folder is on no sys.path of ours. Processes that are started from here inherit all of it.
"""

import os
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from gpulease.errors import GpuleaseError
from gpulease.wire.requests import from_wire
from gpulease.wire.views import EnvironmentView

_LEASE = "GPULEASE_HOOK"
_SITE = "_gpulease_site"
"""Under this name the hooks' sitecustomize does nothing of its own accord."""

Lift = Callable[[], None]


def variables(view: EnvironmentView) -> dict[str, str]:
    """Return what the lease sets, as the operating system's strings."""
    return {from_wire(name): from_wire(value) for name, value in view.set.items()}


def put_into_force(view: EnvironmentView) -> Lift:
    """Set the variables of a lease here and install its hooks; what is returned undoes both.

    Raises:
        GpuleaseError: the hooks cannot be loaded; nothing has been changed then.
    """
    new = variables(view)
    # What is as it was before is not in the view.
    path = new.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    site, running = _hooks(Path(path.split(os.pathsep)[0]))
    before = _change(new, [from_wire(name) for name in view.unset])
    lift_hooks = running.enforce(site, new[_LEASE])

    def lift() -> None:
        # The hooks first: under them os.environ gives nothing of the lease away.
        lift_hooks()
        _restore(before)

    return lift


def _hooks(folder: Path) -> tuple[Any, Any]:
    """Load what the hooks do at the start of an interpreter, and what in one that runs already."""
    try:
        spec = spec_from_file_location(_SITE, folder / "sitecustomize.py")
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        site: Any = module_from_spec(spec)
        spec.loader.exec_module(site)
        return site, site.hooks_module("running")
    except (OSError, ImportError, AttributeError) as error:
        raise GpuleaseError(
            f"cannot put the lease into force: the hooks in {folder} cannot be loaded: {error}",
            "the daemon and this gpulease may be of different versions: restart the daemon",
        ) from error


def _change(new: Mapping[str, str], unset: list[str]) -> dict[str, str | None]:
    before = {name: os.environ.get(name) for name in (*new, *unset)}
    for name in unset:
        os.environ.pop(name, None)
    os.environ.update(new)
    return before


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
