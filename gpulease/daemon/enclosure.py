"""Where a job's processes belong: in a scope of systemd's, or, if none is to be had, here."""

import asyncio
import logging
import subprocess
from datetime import timedelta
from pathlib import Path

from gpulease.process import scopes
from gpulease.process.launcher import Launch

_log = logging.getLogger(__name__)

_LONGER_THAN_THE_GRACE = timedelta(seconds=10)
"""For the shim to write its record, and to hand on the last of the output."""
_UVM = Path("/dev/nvidia-uvm")
_MAKE_UVM = ("/usr/bin/nvidia-modprobe", "-u", "-c=0")
_MAKES_WITHIN_S = 30


async def enclose(pid: int, launch: Launch) -> None:
    """Put the shim of `launch`, whose pid this is, into a scope; a job without one is told of."""
    user = launch.identity.user if launch.identity is not None else "root"
    gpus = launch.gpus
    if gpus is not None and not await asyncio.to_thread(_uvm_is_there):
        _log.warning("job %s may open every GPU: there is no %s to allow it", launch.job, _UVM)
        gpus = None
    grace = launch.grace_at_shutdown
    grace = (launch.grace if grace is None else grace) + _LONGER_THAN_THE_GRACE
    scope = scopes.Scope(launch.job, user, grace, gpus)
    try:
        await scopes.enclose(pid, scope)
    except scopes.NoScope as error:
        _log.warning("job %s runs without a scope, and may open every GPU: %s", launch.job, error)


def _uvm_is_there() -> bool:
    """See to it that the node exists: CUDA makes it when first used, too late to be allowed then.

    Its major number is known only when its module has been loaded.
    """
    if not _UVM.exists() and Path(_MAKE_UVM[0]).exists():
        try:
            subprocess.run(_MAKE_UVM, check=False, capture_output=True, timeout=_MAKES_WITHIN_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.warning("%s: %s", " ".join(_MAKE_UVM), error)
    return _UVM.exists()
