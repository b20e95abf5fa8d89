"""What a user is shown of others where the admin hides commands: that they run, and not what."""

from collections.abc import Sequence
from dataclasses import replace

from gpulease.wire import GpuView, JobView, StatusView

HIDDEN = "(hidden)"
"""In the place of a command, and of a name, which is by default made of the command."""


def conceal(view: JobView, viewer: str) -> JobView:
    """Return a job as the user `viewer` may see it."""
    if view.user == viewer:
        return view
    # Why a launch failed names what could not be launched.
    reason = None if view.outcome == "launch_failed" else view.reason
    events = [replace(each, detail=None) for each in view.events]
    return replace(view, command=HIDDEN, name=HIDDEN, reason=reason, events=events)


def conceal_all(views: Sequence[JobView], viewer: str) -> list[JobView]:
    """Return jobs as the user `viewer` may see them."""
    return [conceal(each, viewer) for each in views]


def conceal_status(view: StatusView, viewer: str) -> StatusView:
    """Return the state of the machine as the user `viewer` may see it."""
    gpus = [_conceal_processes(each, viewer) for each in view.gpus]
    return replace(view, jobs=conceal_all(view.jobs, viewer), gpus=gpus)


def _conceal_processes(gpu: GpuView, viewer: str) -> GpuView:
    shown = [
        each if each.user == viewer else replace(each, command=HIDDEN, name=HIDDEN)
        for each in gpu.processes
    ]
    return replace(gpu, processes=shown)
