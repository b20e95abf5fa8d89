"""What a user is shown of others where the admin hides commands: that they run, and not what."""

from dataclasses import replace

import msgspec

from gpulease.wire import GpuView, JobList, JobView, StatusView

HIDDEN = "(hidden)"
"""In the place of a command, and of a name, which is by default made of the command."""


def conceal(view: JobView, viewer: str) -> JobView:
    """Return a job as the user `viewer` may see it."""
    if view.user == viewer:
        return view
    # Why a launch failed names what could not be launched.
    reason = None if view.outcome == "launch_failed" else view.reason
    events = [replace(each, detail=None) for each in view.events]
    # Which framework reports, and why a hook is not reached, tell what is run.
    leases = [replace(each, pools=[]) for each in view.leases]
    return replace(
        view,
        command=HIDDEN,
        name=HIDDEN,
        reason=reason,
        sized=None,
        leases=leases,
        unheld=[],
        events=events,
    )


def conceal_list(drawn: bytes, viewer: str) -> bytes:
    """Return an encoded `JobList` as the user `viewer` may see it."""
    view = msgspec.json.decode(drawn, type=JobList)
    return msgspec.json.encode(JobList([conceal(each, viewer) for each in view.jobs]))


def conceal_status(drawn: bytes, viewer: str) -> bytes:
    """Return an encoded `StatusView` as the user `viewer` may see it."""
    view = msgspec.json.decode(drawn, type=StatusView)
    gpus = [_conceal_processes(each, viewer) for each in view.gpus]
    jobs = [conceal(each, viewer) for each in view.jobs]
    return msgspec.json.encode(replace(view, jobs=jobs, gpus=gpus))


def _conceal_processes(gpu: GpuView, viewer: str) -> GpuView:
    shown = [
        each if each.user == viewer else replace(each, command=HIDDEN, name=HIDDEN, container=None)
        for each in gpu.processes
    ]
    return replace(gpu, processes=shown)
