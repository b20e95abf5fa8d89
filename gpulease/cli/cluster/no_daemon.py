"""Verbs that ask the daemon of a machine, on a machine of a cluster that has none."""

from gpulease.errors import BadValue, NoDaemon

_ON_A_NODE = "gpulease {verb} works on the nodes of the cluster, which gpulease status lists"
_INSTEAD = {
    "adopt": "a lease comes with the job: gpulease run COMMAND",
    "drain": "scontrol update nodename=NODE state=drain reason=WHY, or gpulease drain on the node",
    "edit": "scontrol update jobid=JOB changes a job of Slurm",
    "history": "sacct lists past jobs, and gpulease list --all those that Slurm still knows",
    "hold": "gpulease run --shell starts a shell with a lease",
    "move": "scontrol update jobid=JOB nice=N moves a job of Slurm in the queue",
    "plot": "gpulease plot on the node of the job: its daemon recorded the memory",
    "requeue": "scontrol requeue JOB",
    "reserve": "scontrol create reservation sets nodes apart",
    "resume": "scontrol update nodename=NODE state=resume, or gpulease resume on the node",
}
"""What does the same for a job of Slurm."""


def no_daemon_here(verb: str | None) -> NoDaemon:
    """Return the error for a verb; no personal daemon is started for it."""
    hint = _INSTEAD.get(verb or "") or (verb and _ON_A_NODE.format(verb=verb))
    return NoDaemon(
        f"cannot {verb or 'reach a daemon'}: no gpuleased runs on this machine, which uses "
        "the GPUs of a Slurm cluster",
        "; ".join(filter(None, (hint, "for GPUs of this machine, set GPULEASE_CLUSTER=none"))),
    )


def no_plot(job: str) -> BadValue:
    """Return the error for a plot of a job of Slurm: the daemon of its node knows its memory."""
    return BadValue(
        f"cannot plot job {job[:80]!r} of Slurm: the daemon of its node recorded its memory",
        "on that node, gpulease history has the number of its lease, and "
        "gpulease plot --socket /run/gpulease/gpuleased.sock NUMBER plots it",
    )
