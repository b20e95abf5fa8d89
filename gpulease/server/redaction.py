"""What users see of each other's jobs where the admin hides commands: that they run, not what."""

from dataclasses import replace

from gpulease.wire.jobs import JobView
from gpulease.wire.machine import GpuView, StatusView

HIDDEN = "(hidden)"
"""Stands for a command, and for a name, which by default is part of the command."""


def redact_job(view: JobView, viewer: str) -> JobView:
    """Return a job as the user `viewer` may see it."""
    if view.user == viewer:
        return view
    return replace(
        view,
        command=HIDDEN,
        name=HIDDEN,
        # A failed launch names the program; reports of frameworks and uncovered processes do too.
        reason=None if view.outcome == "launch_failed" else view.reason,
        sized=None,
        leases=[replace(each, pools=[]) for each in view.leases],
        unheld=[],
        hooks=[],
        events=[replace(each, detail=None) for each in view.events],
    )


def redact_machine(status: StatusView, viewer: str) -> StatusView:
    """Return a status without jobs as the user `viewer` may see it."""
    return replace(status, gpus=[_redact_gpu(each, viewer) for each in status.gpus])


def _redact_gpu(gpu: GpuView, viewer: str) -> GpuView:
    processes = [
        each if each.user == viewer else replace(each, command=HIDDEN, name=HIDDEN, container=None)
        for each in gpu.processes
    ]
    return replace(gpu, processes=processes)
