"""Verbs that ask the daemon of a machine, on a cluster: what cannot be done, and what does it."""

from gpulease.errors import BadValue, NoDaemon, WrongState

_ON_A_NODE = "gpulease {verb} works on the nodes of the cluster, which gpulease status lists"
_INSTEAD = {
    "adopt": "a lease comes with the job: gpulease run COMMAND",
    "again": "gpulease run COMMAND submits it again",
    "drain": "scontrol update nodename=NODE state=drain reason=WHY, or gpulease drain on the node",
    "edit": "scontrol update jobid=JOB changes a job of Slurm",
    "hold": "gpulease run --shell starts a shell with a lease",
    "keep": "leases of jobs of Slurm are not released while idle",
    "move": "scontrol update jobid=JOB nice=N moves a job of Slurm in the queue",
    "plot": "gpulease plot on the node of the job: its daemon recorded the memory",
    "requeue": "scontrol requeue JOB",
    "reserve": "scontrol create reservation sets nodes apart",
    "resume": "scontrol update nodename=NODE state=resume, or gpulease resume on the node",
}
"""What does the same for a job of Slurm."""
_WHAT = {
    "adopt": "lease the memory of a process",
    "again": "run a job of Slurm again",
    "doctor": "check the daemon",
    "drain": "drain a GPU",
    "edit": "edit a job of Slurm",
    "hold": "hold a lease",
    "keep": "keep the lease of a job of Slurm",
    "move": "move a job of Slurm",
    "notify": "read notifications",
    "pause": "pause the queue",
    "plot": "draw memory over time",
    "report": "compare what jobs asked for and used",
    "requeue": "requeue a job of Slurm",
    "reserve": "reserve GPUs",
    "resume": "resume a GPU",
    "top": "show GPUs live",
    "unpause": "start jobs again",
}
"""What verbs do, as it reads after "cannot"; of others, their name."""


def no_daemon_here(verb: str | None) -> NoDaemon:
    """Return the error for a verb; no personal daemon is started for it."""
    hint = _INSTEAD.get(verb or "") or (verb and _ON_A_NODE.format(verb=verb))
    return NoDaemon(
        f"cannot {_WHAT.get(verb or '', verb) or 'reach a daemon'}: no gpuleased runs on this "
        "machine, which uses the GPUs of a Slurm cluster",
        "; ".join(filter(None, (hint, "for GPUs of this machine, set GPULEASE_CLUSTER=none"))),
    )


def not_for_slurm(verb: str) -> WrongState:
    """Return the error for a verb on the jobs of a machine's own queue, where Slurm has the jobs.

    The daemon counts its jobs by itself: a number of Slurm would mean another job there.
    """
    return WrongState(
        f"cannot {_WHAT[verb]}: gpulease {verb} is for the queue of one machine",
        f"{_INSTEAD[verb]}; for a job of the local queue: GPULEASE_CLUSTER=none gpulease {verb}",
    )


def no_plot(job: str) -> BadValue:
    """Return the error for a plot of a job of Slurm: the daemon of its node knows its memory."""
    return BadValue(
        f"cannot plot job {job[:80]!r} of Slurm: the daemon of its node recorded its memory",
        f"on that node: GPULEASE_CLUSTER=none gpulease plot {job[:80]}",
    )
