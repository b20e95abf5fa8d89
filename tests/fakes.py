"""Fakes made of plain values, which a test may change; they mirror the ports name for name."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from gpulease.domain.calendar import Window, WindowId
from gpulease.domain.eligibility import succeeded
from gpulease.domain.enforcement import Reports
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId, ProcessReading
from gpulease.domain.health import GpuAvailability, GpuEvent, HealthReport
from gpulease.domain.job import (
    CommandFingerprint,
    Exit,
    Holder,
    Invocation,
    Job,
    Outcome,
    Owner,
    Process,
    SlurmJob,
    aging,
    grant,
    with_over_for,
    worker_gone,
    worker_started,
)
from gpulease.domain.lease import Claim, State, Trigger
from gpulease.domain.memory_estimate import PastRun
from gpulease.domain.placement import Placement
from gpulease.domain.plan import Plan, WaitReason
from gpulease.domain.queue_options import ArrayElement, Indices, QueuePause
from gpulease.errors import GpuleaseError, RecordUnwritable, SlurmFailed
from gpulease.service.job_list import EndedPage, JobPage, JobQuery
from gpulease.service.ports import (
    Event,
    ListedProcesses,
    LivingProcess,
    PastJob,
    Store,
    Submission,
    UserCount,
    WorkerExited,
    WorkerNews,
    WorkerStarted,
)
from gpulease.slurm.allocations import NodeAllocation
from gpulease.slurm.node.controller import SlurmController
from gpulease.units import GIB

G = GIB
NOON = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
ALICE = Owner(1000, 1000, "alice")
BOB = Owner(1001, 1001, "bob")


@dataclass
class FakeClock:
    """A clock that stands still until it is moved."""

    at: datetime = NOON
    ahead: timedelta = timedelta(0)
    """How far the machine's clock was set ahead of it."""
    moved: timedelta = timedelta(0)

    def now(self) -> datetime:
        return self.at

    def steady(self) -> timedelta:
        return self.at - NOON - self.moved

    def set_by(self) -> timedelta:
        return self.ahead

    def thread_s(self) -> float:
        return 0.0

    def follow(self, by: timedelta) -> None:
        self.at += by
        self.moved += by
        self.ahead -= by

    def forward(self, **span: float) -> None:
        self.at += timedelta(**span)


@dataclass
class FakeGpus:
    """GPUs of plain numbers: sizes, bytes used by strangers, and bytes used by processes."""

    sizes: dict[str, int]
    unmanaged: dict[str, int] = field(default_factory=dict)
    processes: dict[str, dict[int, int]] = field(default_factory=dict)
    broken: dict[str, GpuReading] = field(default_factory=dict)
    heard: list[HealthReport] = field(default_factory=list)
    utilization: dict[str, int] = field(default_factory=dict)

    def read(self) -> tuple[GpuReading, ...]:
        return tuple(
            self.broken.get(uuid) or self._reading(uuid, index)
            for index, uuid in enumerate(self.sizes)
        )

    def _reading(self, uuid: str, index: int) -> GpuReading:
        held = self.processes.get(uuid, {})
        return GpuReading(
            GpuUuid(uuid),
            index,
            "Fake",
            total=self.sizes[uuid],
            used=sum(each or 0 for each in held.values()) + self.unmanaged.get(uuid, 0),
            reserved=0,
            processes=tuple(ProcessReading(pid, used) for pid, used in held.items()),
            utilization=self.utilization.get(uuid),
        )

    def driver(self) -> str | None:
        return "0.0"

    def library(self) -> str | None:
        return None

    def health(self) -> Sequence[HealthReport]:
        heard, self.heard = self.heard, []
        return heard


@dataclass
class FakeFinder:
    """Knows whose a pid is because the test said so."""

    jobs: dict[int, JobId] = field(default_factory=dict)
    processes: dict[int, LivingProcess] = field(default_factory=dict)

    servers: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    reused: frozenset[int] = frozenset()

    foreign: bool = False

    def listed(self, pids: Collection[int], jobs: Sequence[Job]) -> ListedProcesses | None:
        if self.foreign:
            return None
        known = set(pids) - self.reused
        return ListedProcesses(self.jobs_of(known, jobs), self.servers & known, {})

    def identify(self, pid: int) -> None:
        return None

    def living(self, pid: int) -> LivingProcess | None:
        return self.processes.get(pid)

    def is_above_daemon(self, pid: int) -> bool:
        return pid == 1

    def is_stopped(self, pid: int) -> bool:
        return pid in self.stopped

    def pids_of(self, job: Job) -> set[int] | None:
        return {pid for pid, of in self.jobs.items() if of == job.id}

    def jobs_of(self, pids: Iterable[int], jobs: Sequence[Job]) -> Mapping[int, JobId]:
        living = {job.id for job in jobs}
        return {pid: self.jobs[pid] for pid in pids if self.jobs.get(pid) in living}


class MemoryStore:
    """The store's promises, kept in dictionaries."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, Job] = {}
        self._live: tuple[Job, ...] = ()
        self._events: list[tuple[JobId, Event]] = []
        self._invocations: dict[JobId, Invocation] = {}
        self.standing: dict[GpuUuid, GpuAvailability] = {}
        self.noted: list[GpuEvent] = []
        self.reserved: dict[WindowId, Window] = {}
        self._ordered: dict[tuple[int, str], JobId] = {}
        self.known_runs: list[PastRun] = []
        self.writes = 0
        self.is_full = False
        """Nothing can be written, as on a full disk."""
        self.paused: QueuePause | None = None
        self._ended: list[Job] = []
        self._released: list[PastJob] = []
        self.hooks: dict[JobId, Reports] = {}

    @contextmanager
    def write(self) -> Iterator["MemoryStore"]:
        if self.is_full:
            raise RecordUnwritable("cannot write: the disk is full")
        self.writes += 1
        before = dict(self._jobs), list(self._events), dict(self._invocations)
        self._ended.clear()
        try:
            yield self
        except BaseException:
            self._jobs, self._events, self._invocations = before
            raise

    def ended(self) -> Sequence[Job]:
        return tuple(self._ended)

    def changed(self) -> Sequence[tuple[Job | None, Job]]:
        return ()

    def flush(self) -> None:
        pass

    def trouble(self) -> str | None:
        return None

    def live(self) -> Sequence[Job]:
        found = tuple(job for job in self._jobs.values() if job.state is not State.ENDED)
        # The same object until one changes, as in the store.
        if found != self._live:
            self._live = found
        return self._live

    def dependents(self) -> Sequence[Job]:
        return [job for job in self.live() if job.queue.after and job.state is State.QUEUED]

    def holding(self) -> Sequence[Job]:
        return [job for job in self.live() if job.holds_memory]

    def live_job(self, job: JobId) -> Job | None:
        found = self._jobs.get(job)
        return None if found is None or found.state is State.ENDED else found

    def user_count(self, uid: int) -> UserCount:
        mine = [job for job in self.live() if job.owner.uid == uid]
        waiting = [job.id for job in mine if job.state is State.QUEUED]
        return UserCount(
            len(waiting),
            sum(len(str(self._invocations[job].environment)) for job in waiting),
            sum(job.holder is not None for job in mine),
        )

    def job(self, job: JobId) -> Job | None:
        return self._jobs.get(job)

    def jobs(self, query: JobQuery) -> JobPage:
        known = [*self._jobs.values()] if query.has_ended else self.live()
        return JobPage(known, len(known), None)

    def ended_jobs(self, query: JobQuery) -> EndedPage:
        return EndedPage((), None)

    def invocation(self, job: JobId) -> Invocation:
        return self._invocations[job]

    def past_invocation(self, job: Job) -> Invocation:
        return replace(self._invocations[job.id], environment={})

    def events(self, job: JobId) -> Sequence[Event]:
        return [event for of, event in self._events if of == job]

    def hook_reports(self, job: JobId) -> Reports:
        return self.hooks.get(job, ())

    def drained(self) -> Mapping[GpuUuid, str]:
        return {gpu: each.reason for gpu, each in self.standing.items() if each.reason}

    def availabilities(self) -> Mapping[GpuUuid, GpuAvailability]:
        return self.standing

    def set_availability(self, gpu: GpuUuid, standing: GpuAvailability) -> None:
        self.standing[gpu] = standing

    def note_gpu(self, event: GpuEvent) -> None:
        self.noted.append(event)

    def pause(self) -> QueuePause | None:
        return self.paused

    def set_pause(self, pause: QueuePause | None) -> None:
        self.paused = pause

    def gpu_events(self, since: datetime, most: int) -> Sequence[GpuEvent]:
        return [each for each in self.noted if each.at >= since][-most:]

    def windows(self) -> Sequence[Window]:
        return list(self.reserved.values())

    def add_window(self, window: Window) -> Window:
        number = WindowId(max(self.reserved, default=0) + 1)
        self.reserved[number] = replace(window, id=number)
        return self.reserved[number]

    def remove_window(self, window: WindowId) -> None:
        del self.reserved[window]

    def gpu(self, uuid: GpuUuid) -> GpuReading:
        return GpuReading(uuid, 0, "Fake")

    def add_gpus(self, readings: Sequence[GpuReading], at: datetime) -> None:
        pass

    def job_by_key(self, uid: int, key: str) -> Job | None:
        number = self._ordered.get((uid, key))
        return None if number is None else self._jobs[number]

    def past_runs(
        self, uid: int, shape: CommandFingerprint, gpus: int, most: int
    ) -> Sequence[PastRun]:
        return self.known_runs[:most]

    def add(self, order: Submission, at: datetime) -> Job:
        job = order.queued(JobId(len(self._jobs) + 1), at)
        if order.key is not None:
            self._ordered[order.owner.uid, order.key] = job.id
        self._jobs[job.id] = job
        self._invocations[job.id] = order.invocation
        return job

    def add_array(self, order: Submission, indices: Indices, at: datetime) -> Sequence[Job]:
        first = JobId(len(self._jobs) + 1)
        return [
            self.add(
                replace(
                    order,
                    key=order.key if place == 0 else None,
                    queue=replace(
                        order.queue, array=ArrayElement(first, index, indices.most_running)
                    ),
                ),
                at,
            )
            for place, index in enumerate(indices.indices)
        ]

    def elements(self, array: JobId, index: int | None = None) -> Sequence[Job]:
        places = ((job, job.queue.array) for job in self._jobs.values())
        return [
            job
            for job, place in places
            if place is not None and place.job == array and index in (None, place.index)
        ]

    def element(self, array: JobId, index: int) -> Job | None:
        found = self.elements(array, index)
        return found[-1] if found else None

    def live_elements(self, array: JobId) -> int:
        return sum(job.state is not State.ENDED for job in self.elements(array))

    def array_result(self, array: JobId) -> tuple[int, Sequence[str]]:
        jobs = [job for job in self.elements(array) if job.usage.retried_as is None]
        return len(jobs), [job.label for job in jobs if not succeeded(job)]

    def failed_element(self, array: JobId) -> Job | None:
        for job in self.elements(array):
            is_final = job.state is State.ENDED and job.usage.retried_as is None
            if is_final and not succeeded(job):
                return job
        return None

    def save(self, job: Job, event: Event | None) -> None:
        before = self._jobs[job.id]
        self._jobs[job.id] = job
        if event is not None:
            self._events.append((job.id, event))
            if before.holds_memory and not job.holds_memory:
                past = PastJob.of(job if job.leases else before, job.outcome, event.at)
                self._released += [past] if past is not None else []
        if job.state is State.ENDED:
            self._ended.append(job)

    def save_all(
        self, jobs: Sequence[Job], event: Event, details: Mapping[JobId, str | None] = {}
    ) -> None:
        for job in jobs:
            self.save(job, replace(event, detail=details.get(job.id, event.detail)))

    def past_jobs(self, since: datetime) -> Sequence[PastJob]:
        found = (PastJob.of(job, job.outcome, job.ended_at or since) for job in self._jobs.values())
        return [past for past in found if past is not None and past.released_at > since]

    def take_released(self) -> Sequence[PastJob]:
        released, self._released = self._released, []
        return released

    def save_hooks(self, job: JobId, reports: Reports) -> None:
        self.hooks[job] = reports

    def note_over(self, job: JobId, gpu: GpuUuid, over_for: timedelta | None) -> None:
        self._jobs[job] = with_over_for(self._jobs[job], gpu, over_for)

    def note_aging(self, jobs: Sequence[JobId], since: datetime | None) -> None:
        for job in jobs:
            self._jobs[job] = aging(self._jobs[job], since)

    def note(self, job: JobId, event: Event) -> None:
        self._events.append((job, event))


class FakeLauncher:
    """Starts nothing: the test says what becomes of each worker."""

    def __init__(self) -> None:
        self.begun: list[JobId] = []
        """Jobs whose launch has begun."""
        self.launched: list[JobId] = []
        self.stopped: list[JobId] = []
        self.told: list[tuple[JobId, timedelta]] = []
        """The time limits that workers were told."""
        self.refuse: dict[JobId, GpuleaseError] = {}
        self.may_launch = asyncio.Event()
        """Cleared, a launch takes until it is set."""
        self.may_launch.set()
        self.may_stop = asyncio.Event()
        """Cleared, a stop takes until it is set."""
        self.may_stop.set()
        self.may_tell: dict[timedelta, asyncio.Event] = {}
        """Telling a worker one of these limits takes until its event is set."""
        self.forbidden: list[JobId] = []
        self.notices: list[tuple[JobId, str]] = []
        self.reasons: list[str] = []
        """Why workers were asked to go."""
        self.graces: list[timedelta | None] = []
        """With what grace."""
        self._news: dict[JobId, asyncio.Queue[WorkerNews]] = {}

    def _of(self, job: JobId) -> asyncio.Queue[WorkerNews]:
        return self._news.setdefault(job, asyncio.Queue())

    def was_launched(self, job: Job) -> bool:
        return job.id in self.launched

    async def forbid(self, job: Job) -> bool:
        if job.id in self.launched:
            return False
        self.forbidden.append(job.id)
        return True

    async def launch(self, job: Job, invocation: Invocation) -> None:
        self.begun.append(job.id)
        await self.may_launch.wait()
        if job.id in self.refuse:
            raise self.refuse[job.id]
        self.launched.append(job.id)
        self._of(job.id).put_nowait(WorkerStarted(100 + job.id, 200 + job.id, NOON))

    async def follow(self, job: Job) -> AsyncIterator[WorkerNews]:
        while True:
            news = await self._of(job.id).get()
            yield news
            if isinstance(news, WorkerExited):
                return

    async def stop(self, job: Job, reason: str, grace: timedelta | None = None) -> None:
        self.stopped.append(job.id)
        self.reasons.append(reason)
        self.graces.append(grace)
        await self.may_stop.wait()

    def grace(self, job: Job) -> timedelta | None:
        return job.grace

    async def set_time_limit(self, job: Job, limit: timedelta) -> None:
        if limit in self.may_tell:
            await self.may_tell[limit].wait()
        self.told.append((job.id, limit))

    async def notify(self, job: Job, text: str) -> None:
        self.notices.append((job.id, text))

    def hears(self, job: int, news: WorkerNews) -> None:
        """Let something happen to the worker of `job`."""
        self._of(JobId(job)).put_nowait(news)

    def exits(self, job: int, code: int = 0, outcome: Outcome = Outcome.EXITED) -> None:
        """Let the worker of `job` end."""
        self._of(JobId(job)).put_nowait(WorkerExited(outcome, Exit(code), NOON))


class FakeSlurm(SlurmController):
    """Slurm, whose jobs have what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations: dict[int, NodeAllocation] = {}
        self.refused: list[tuple[SlurmJob, str]] = []
        self.asked = 0
        self.is_away = False
        self.exits: dict[int, Exit] = {}

    def give(self, job: int, shards: int, *gpus: int) -> None:
        self.allocations[job] = NodeAllocation("train.py", True, gpus or (0,), shards)

    async def allocation(self, job: SlurmJob) -> NodeAllocation:
        self.asked += 1
        if self.is_away:
            raise SlurmFailed("slurmctld does not answer")
        return self.allocations[job.id]

    async def exit_of(self, job: SlurmJob) -> Exit | None:
        return self.exits.get(job.id)

    async def refuse(self, job: SlurmJob, why: str, *, counts: bool = True) -> None:
        if self.is_away:
            raise SlurmFailed("slurmctld does not answer")
        self.refused.append((job, why))


def waits(decided: Plan | None, number: int) -> WaitReason:
    """Return why a job of a plan waits."""
    assert decided is not None
    return decided.reason(next(job for job in decided.snapshot.jobs if job.id == number))


def order(
    memory: int = G,
    *,
    gpus: int = 1,
    exclusive: bool = False,
    owner: Owner = ALICE,
    wait_for: timedelta | None = None,
    time_limit: timedelta | None = None,
) -> Submission:
    """Return an order for a job that would run `true`."""
    return Submission(
        owner,
        "test",
        "true",
        Claim(memory, gpus, exclusive, time_limit),
        Invocation(("true",), "/", {"PATH": "/usr/bin:/bin"}),
        wait_for,
    )


def granted_job(job: Job, *gpus: str, memory: int | None = None, at: datetime = NOON) -> Job:
    """Return a queued job with a lease of each GPU: of what it claims, or of so many bytes."""
    size = job.claim.memory_on(8 * G) if memory is None else memory
    names, bound = gpus or ("GPU-a",), job.claim.bound_on(8 * G)
    bounds = tuple((GpuUuid(gpu), bound) for gpu in names if bound is not None)
    return grant(job, Placement(tuple((GpuUuid(gpu), size) for gpu in names), bounds), at)


def running_job(job: Job, *gpus: str, memory: int | None = None, at: datetime = NOON) -> Job:
    """Return a queued job that was granted such leases and has started."""
    started = worker_started(granted_job(job, *gpus, memory=memory, at=at), 1, 2, at)
    assert started is not None
    return started


def ended_job(
    job: Job,
    outcome: Outcome = Outcome.EXITED,
    code: int | None = 0,
    at: datetime = NOON,
    detail: str | None = None,
) -> Job:
    """Return a job whose last process has ended; None as the code: it is not known."""
    known = None if code is None else Exit(code)
    ended = worker_gone(job, Trigger.WORKER_EXITED, outcome, detail, known, at)
    assert ended is not None
    return ended


def kept(store: Store, job: JobId | None) -> Job:
    """Return a job of a store as it is now."""
    assert job is not None
    found = store.job(job)
    assert found is not None
    return found


def started(store: Store, job: Job) -> Job:
    """Grant and start a queued job."""
    with store.write() as tx:
        tx.save(now := running_job(job), Event(NOON, "worker_started"))
    return now


HOLDER = Process(4711, 100, "this boot")
ASKER = Process(4712, 101, "this boot")


def hold_order(
    memory: int = G,
    *,
    process: Process | None = HOLDER,
    owner: Owner = ALICE,
    time_limit: timedelta | None = None,
) -> Submission:
    """Return an order for a lease without a job."""
    return Submission(
        owner,
        "hold",
        "held by pid 4711 (bash)",
        Claim(memory, time_limit=time_limit),
        Invocation((), "/", {"PATH": "/usr/bin:/bin"}),
        holder=Holder(process, ASKER),
    )


def reading(uuid: str = "GPU-a", index: int = 0, **fields: object) -> GpuReading:
    """Return a reading of an empty 8 GiB GPU, changed by `fields`."""
    whole = GpuReading(GpuUuid(uuid), index, "Fake", 8 * G, 0, 0, ())
    return replace(whole, **fields)  # type: ignore[arg-type]
