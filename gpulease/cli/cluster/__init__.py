"""Whether a command acts on the jobs of Slurm, or on this machine alone.

The modules of this package are the verbs on a cluster; they are imported only there. Every command
imports this file.
"""

from __future__ import annotations

from gpulease.cluster_choice import SLURM, cluster
from gpulease.locations import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

_LEASE, _SLURM_JOB = "GPULEASE_JOB", "SLURM_JOB_ID"
VERBS = frozenset({
    "run", "status", "list", "show", "logs", "cancel", "attach", "extend", "wait",
})  # fmt: skip
"""The verbs that can act on Slurm; the others are for the daemon of this machine."""


def acts_on_slurm(socket: Path | str | None, *, new_lease: bool | None = None) -> bool:
    """Return whether Slurm is meant; `socket` is the value of --socket.

    With a socket, it is the daemon of this machine. So it is within a lease, for the verb that
    takes one (`new_lease` is its option), and for all others unless the lease is that of a job of
    Slurm: they name the job by Slurm's number.

    Raises:
        BadConfiguration: a file that names a cluster cannot be used.
        BadUsage: the variable cannot be used.
    """
    variables = environment()
    if socket is not None or variables.get("GPULEASE_SOCKET"):
        return False
    if new_lease is None:
        new_lease = bool(variables.get(_SLURM_JOB))
    if variables.get(_LEASE) and not new_lease:
        return False
    return cluster(variables) == SLURM
