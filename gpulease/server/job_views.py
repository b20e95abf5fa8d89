"""What the API shows: jobs, GPUs and the queue as wire objects, as far as the caller may see.

What a user is shown of others where the admin hides commands: that they run, and not what.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from datetime import datetime
from itertools import takewhile

import msgspec

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job, UserUsage
from gpulease.domain.lease import Claim, State
from gpulease.domain.plan import Plan, WaitReason, why_waiting
from gpulease.errors import split_hint
from gpulease.server.lease_views import (
    LeaseViews,
    Machine,
    Told,
    Watches,
    claim_view,
    exit_status,
    instant,
    reason,
    seconds,
)
from gpulease.server.machine_views import MachineViews
from gpulease.service.ports import Event, ProcessFinder
from gpulease.service.scheduler import Scheduler
from gpulease.service.usage import PoolSeen
from gpulease.wire.views import (
    EventView,
    GpuView,
    JobList,
    JobView,
    ReportView,
    StatusView,
    UnheldView,
    UseView,
)


class Views:
    """Draws wire objects from the keeper's latest plan and look."""

    def __init__(
        self, keeper: Scheduler, processes: ProcessFinder, machine: Machine, watches: Watches
    ) -> None:
        self._keeper = keeper
        self._processes = processes
        self._machine = machine
        self._of_machine = MachineViews(keeper, processes, machine)
        self._of_leases = LeaseViews(keeper, machine, watches)
        self._line: tuple[Plan | None, list[JobId]] = (None, [])
        self._behind: tuple[Plan | None, dict[Claim, WaitReason]] = (None, {})
        self._told = Told(None)

    def live(self) -> Sequence[Job]:
        """Return the jobs that wait or hold memory."""
        return self._keeper.store.live()

    def machine(self, live: Sequence[Job], now: datetime) -> StatusView:
        """Return one look at the whole machine, without the jobs."""
        return self._of_machine.status(live, now)

    def allocatable(self) -> Mapping[GpuUuid, int]:
        """Return the bytes that each GPU has to lease, as of the latest look."""
        return self._of_machine.allocatable()

    def job(
        self,
        job: Job,
        *,
        to_owner: bool = False,
        events: Sequence[Event] = (),
        pools: Sequence[PoolSeen] | None = None,
    ) -> JobView:
        """Return a job as anyone may see it, or with what only its owner may.

        `pools` are those of its frameworks, None: what is known of a running one.
        """
        waiting = self.waiting(job)
        told = self._told.of(job.claim, waiting) if waiting else None
        why = (told and told.why) or reason(job, waiting) or ""
        why, hint = split_hint(why)
        idle_since_at, idle_ends_at = self._of_leases.idle(job)
        has_directory = to_owner and job.granted_at is not None and job.holder is None
        return JobView(
            id=job.id,
            name=job.name,
            user=job.owner.user,
            state=job.state.value,
            reason=why or None,
            hint=hint or None,
            outcome=job.outcome.value if job.outcome else None,
            position=self.position(job),
            expected_start_at=instant(waiting.expected_start_at) if waiting else None,
            command=job.command,
            claim=told.claim if told else claim_view(job.claim),
            leases=self._of_leases.of(job, self._machine.pools_of(job) if pools is None else pools),
            submitted_at=instant(job.submitted_at) or "",
            granted_at=instant(job.granted_at),
            started_at=instant(job.started_at),
            ended_at=instant(job.ended_at),
            expires_at=instant(job.expires_at) if job.holds_memory else None,
            exit_status=exit_status(job),
            pid=job.pid,
            directory=str(self._machine.directory_of(job.id)) if has_directory else None,
            kind="run" if job.holder is None else "hold",
            terminal=job.terminal,
            main_exited_at=instant(job.main_exited_at),
            suspended=self._is_suspended(job),
            grace=seconds(self._keeper.grace(job)),
            gives_up_at=instant(job.gives_up_at) if job.state is State.QUEUED else None,
            kept_until_at=instant(job.kept_until_at) if job.holds_memory else None,
            idle_since_at=idle_since_at,
            idle_ends_at=idle_ends_at,
            refusals=told.refusals if told else [],
            waits_for=told.waits_for if told else [],
            unheld=[
                UnheldView(each.pid, each.command, each.why)
                for each in self._machine.unheld(job.id)
            ],
            sized=job.usage.size_reason,
            out_of_memory=job.usage.out_of_memory,
            retry_of=job.usage.retry_of,
            retried_as=job.usage.retried_as,
            events=[EventView(instant(each.at) or "", each.kind, each.detail) for each in events],
        )

    def _is_suspended(self, job: Job) -> bool:
        """Tell whether the main process of a job, or the holder of a lease, is stopped."""
        if job.state is not State.ACTIVE or job.main_exited_at is not None or job.pid is None:
            return False
        try:
            return self._processes.is_stopped(job.pid)
        except OSError:
            return False  # it cannot be seen at this moment

    def waiting(self, job: Job) -> WaitReason | None:
        """Return why a job waits; the same object as long as nothing of it has changed."""
        plan = self._keeper.plan
        if job.state is not State.QUEUED or plan is None:
            return None
        if self._told.plan is not plan:
            self._told = Told(plan, self._told)
        found = plan.waiting.get(job.id)
        return self._told.settled(job.claim, found or self._waiting_behind(plan, job))

    def _waiting_behind(self, plan: Plan, job: Job) -> WaitReason:
        if self._behind[0] is not plan:
            self._behind = plan, {}
        behind = self._behind[1]
        if job.claim not in behind:
            behind[job.claim] = why_waiting(plan, job)
        return behind[job.claim]

    def position(self, job: Job) -> int | None:
        """Return the place of a waiting job in the line, as of the latest plan."""
        if job.state is not State.QUEUED:
            return None
        if self._line[0] is not self._keeper.plan:
            self._line = self._keeper.plan, []
        line = self._line[1]
        if not line or job.id > line[-1]:
            line.extend(self._who_came_after(line[-1] if line else JobId(0)))
        place = bisect_left(line, job.id)
        return place + 1 if place < len(line) and line[place] == job.id else None

    def _who_came_after(self, last: JobId) -> list[JobId]:
        newer = takewhile(lambda each: each.id > last, reversed(self._keeper.store.live()))
        return [each.id for each in newer if each.state is State.QUEUED][::-1]


def report_view(uses: Sequence[UserUsage], since: datetime | None) -> ReportView:
    """Return what users asked for and used as a wire object."""
    return ReportView(instant(since), [UseView(*astuple(use)) for use in uses])


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
