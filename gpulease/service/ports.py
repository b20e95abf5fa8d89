"""What the use cases need from outside, as Protocols. Adapters and fakes have the same names."""

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol, TypeVar

from gpulease.domain.calendar import Window, WindowId
from gpulease.domain.enforcement import Reports
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId, NeighbourLease
from gpulease.domain.health import GpuAvailability, GpuEvent, HealthReport
from gpulease.domain.host_memory import DEFAULT_HOST_POLICY, HostPolicy, HostReading
from gpulease.domain.job import (
    NO_HOST_USE,
    NO_USAGE,
    CommandFingerprint,
    Exit,
    Holder,
    HostUse,
    Invocation,
    Job,
    JobUsage,
    Outcome,
    Owner,
    Process,
    SlurmJob,
    until,
)
from gpulease.domain.lease import Claim
from gpulease.domain.limits import UserLimits, no_limits
from gpulease.domain.memory_estimate import PastRun
from gpulease.domain.memory_series import GpuSeries, Grid, JobSeries
from gpulease.domain.notifications import Message
from gpulease.domain.queue_options import (
    NO_OPTIONS,
    Indices,
    QueueOptions,
    QueuePause,
    QueuePolicy,
    WantedDependency,
)
from gpulease.service.job_list import EndedPage, JobPage, JobQuery
from gpulease.units import MIB

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a job's history."""

    at: datetime
    kind: str
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that was submitted and has no id yet."""

    owner: Owner
    name: str
    command: str
    claim: Claim
    invocation: Invocation
    wait_for: timedelta | None = None
    """The longest wait for a grant; None is without end, zero is no wait."""
    holder: Holder | None = None
    """The process that a lease without a job is for."""
    slurm: SlurmJob | None = None
    """The job of Slurm that a lease is for."""
    only_lease: bool = False
    """Refused if that process has a lease."""
    key: str | None = None
    """The owner's key for this submission; a second one with the same key adds no job."""
    usage: JobUsage = NO_USAGE
    sizes_itself: bool = False
    """The request names no size: the use of similar jobs decides, or else the claim."""
    queue: QueueOptions = NO_OPTIONS
    after: tuple[WantedDependency, ...] = ()
    """What it waits for, before `queue.after` is known."""
    indices: Indices | None = None
    """Of an array of jobs; None for a single job."""
    named: tuple[str, ...] = ()
    """The GPUs that it asks for, before `claim.named` is known."""
    notify: tuple[str, ...] = ()
    """The events of which its owner is notified."""

    def queued(self, number: JobId, at: datetime) -> Job:
        """Return the job in its first state."""
        return Job(
            id=number,
            owner=self.owner,
            name=self.name,
            command=self.command,
            claim=self.claim,
            submitted_at=at,
            gives_up_at=until(at, self.wait_for),
            terminal=self.invocation.terminal is not None,
            grace=self.invocation.grace,
            holder=self.holder,
            slurm=self.slurm,
            notify=self.notify,
            usage=self.usage,
            queue=self.queue,
        )


@dataclass(frozen=True, slots=True)
class PastJob:
    """A job that has let go of its memory: what the queue learns from it."""

    job: JobId
    owner: Owner
    claim: Claim
    fingerprint: CommandFingerprint | None
    eligible_at: datetime
    """When it could start at the earliest: its submission, its begin, or when the last of its
    dependencies was met or it was held no longer, as far as that is stored."""
    granted_at: datetime
    started_at: datetime | None
    released_at: datetime
    memory: int
    """Bytes of all its leases."""
    outcome: Outcome | None
    utilization: int | None = None
    """Percent."""

    @classmethod
    def of(cls, job: Job, outcome: Outcome | None, at: datetime) -> "PastJob | None":
        """Return what is learnt from `job`, which held memory until `at`; None if it held none."""
        if job.granted_at is None or not job.leases:
            return None
        return cls(
            job=job.id,
            owner=job.owner,
            claim=job.claim,
            fingerprint=job.usage.fingerprint,
            eligible_at=max(job.submitted_at, job.queue.begin_at or job.submitted_at),
            granted_at=job.granted_at,
            started_at=job.started_at,
            released_at=max(at, job.granted_at),
            memory=sum(lease.memory for lease in job.leases),
            outcome=outcome,
            utilization=job.utilization,
        )


@dataclass(frozen=True, slots=True)
class UserCount:
    """The current counts of one user, to compare with the quotas."""

    waiting: int = 0
    """Queued jobs and leases."""
    waiting_bytes: int = 0
    """Size of their invocations in the database."""
    holds: int = 0
    """Leases without a job, queued or held."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """The limits of each user."""

    waiting_bytes: int = 256 * MIB
    """Size of the arguments and environments of queued jobs in the database."""
    holds: int = 100
    """Leases without a job, queued or held."""
    exempt: frozenset[int] = field(default=frozenset({0}))
    """The uids without limits: root, and the daemon's own user."""


@dataclass(frozen=True, slots=True)
class SlurmPolicy:
    """The admin's settings about Slurm, which assigns the GPUs of this machine."""

    shard: int
    """Bytes of one shard."""
    local_gpus: tuple[str, ...] = ()
    """The GPUs that Slurm does not know, by index or UUID: they belong to the daemon's queue."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The admin's settings about leasing; sizes in bytes."""

    margin: int = 0
    """Memory of each GPU that is never leased."""
    smallest_lease: int = 0
    """Less than this cannot hold a CUDA context."""
    quotas: Quotas = field(default_factory=Quotas)
    queue: QueuePolicy = field(default_factory=QueuePolicy)
    limits_of: Callable[[Owner], UserLimits] = no_limits
    """The limits of a user, from the settings."""
    slurm: SlurmPolicy | None = None
    """None where the daemon's queue has all GPUs."""
    host: HostPolicy = DEFAULT_HOST_POLICY

    def limits(self, owner: Owner) -> UserLimits:
        """Return the limits of a user; those who are exempt keep the default time only."""
        limits = self.limits_of(owner)
        if owner.uid in self.quotas.exempt:
            return UserLimits(default_time=limits.default_time)
        return limits


class Records(Protocol):
    """What is known: by a transaction with its own changes, by the store as last committed."""

    def live(self) -> Sequence[Job]:
        """Return every job that is queued or holds memory, by id."""

    def job(self, job: JobId) -> Job | None:
        """Return one job, in any state."""

    def invocation(self, job: JobId) -> Invocation:
        """Return how to start a job; not known any more when it has ended."""

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return the GPUs that take no new leases, and why."""

    def availabilities(self) -> Mapping[GpuUuid, GpuAvailability]:
        """Return the availability of each GPU that is or was restricted."""

    def pause(self) -> QueuePause | None:
        """Return the pause of the queue; None if it is not paused."""

    def windows(self) -> Sequence[Window]:
        """Return the windows, in the order in which they were made."""


class Transaction(Records, Protocol):
    """Changes that are committed to disk together, or not at all."""

    def dependents(self) -> Sequence[Job]:
        """Return the queued jobs that wait for others, by id."""

    def user_count(self, uid: int) -> UserCount:
        """Return the counts of a user, including the changes of this transaction."""

    def add_gpus(self, readings: Sequence[GpuReading], at: datetime) -> None:
        """Store GPUs that are not known yet; a lease can only be on a known GPU."""

    def job_by_key(self, uid: int, key: str) -> Job | None:
        """Return the job that a user submitted with this key, in any state."""

    def past_runs(
        self, uid: int, fingerprint: CommandFingerprint, gpus: int, most: int
    ) -> Sequence[PastRun]:
        """Return the latest similar runs with known use, the latest first.

        Returns those of the same command, or if there are none, those of similar ones.
        """

    def add(self, order: Submission, at: datetime) -> Job:
        """Store a new job, QUEUED, with its invocation."""

    def add_array(self, order: Submission, indices: Indices, at: datetime) -> Sequence[Job]:
        """Store a new job for each index, QUEUED, with one invocation for all."""

    def element(self, array: JobId, index: int) -> Job | None:
        """Return the element of an array with this index, in any state, or its latest retry."""

    def live_elements(self, array: JobId) -> int:
        """Return how many elements of an array have not ended."""

    def failed_element(self, array: JobId) -> Job | None:
        """Return an element that has ended without success and is not retried, or None."""

    def save(self, job: Job, event: Event | None) -> None:
        """Store a changed job, and why it changed; None: not worth a line in its history."""

    def save_all(
        self, jobs: Sequence[Job], event: Event, details: Mapping[JobId, str | None] = {}
    ) -> None:
        """Store many queued jobs that changed or ended at once; `details` replaces the event's."""

    def note(self, job: JobId, event: Event) -> None:
        """Add to the history of an unchanged job, which may have ended."""

    def ended(self) -> Sequence[Job]:
        """Return the jobs that have ended in this transaction."""

    def changed(self) -> Sequence[tuple[Job | None, Job]]:
        """Return the jobs with notifications before and after each change."""

    def add_messages(self, messages: Sequence[tuple[Message, datetime]]) -> None:
        """Store notifications that are to be sent, each with its time."""

    def array_result(self, array: JobId) -> tuple[int, Sequence[str]]:
        """Return how many elements an array has, and the labels of those without success."""

    def has_message(self, job: Job, event: str, since: datetime | None = None) -> bool:
        """Return whether a notification of this event of a job or its array is stored."""

    def save_hooks(self, job: JobId, reports: Reports) -> None:
        """Store the reports of the hooks of a job in place of its former ones."""

    def note_over(self, job: JobId, gpu: GpuUuid, over_for: timedelta | None) -> None:
        """Store for how long a held lease has been exceeded."""

    def note_aging(self, jobs: Sequence[JobId], since: datetime | None) -> None:
        """Store since when the age of these queued jobs counts; None: they have no age."""

    def set_availability(self, gpu: GpuUuid, availability: GpuAvailability) -> None:
        """Store the availability of a known GPU."""

    def note_gpu(self, event: GpuEvent) -> None:
        """Store an event about the health of a known GPU."""

    def set_pause(self, pause: QueuePause | None) -> None:
        """Store the pause of the queue, or its end."""

    def add_window(self, window: Window) -> Window:
        """Store a new window, and return it with its id."""

    def remove_window(self, window: WindowId) -> None:
        """Remove a window."""


class Store(Records, Protocol):
    """The database of jobs and leases."""

    def past_invocation(self, job: Job) -> Invocation:
        """Return how a job that has ended was started, without its environment.

        Raises:
            NoSuchJob: it is not known any more.
        """

    def write(self) -> AbstractContextManager[Transaction]:
        """Open the only write transaction.

        It is on disk when the context ends, and in a call of `InThread` when that is answered.
        """

    def flush(self) -> None:
        """Commit what has been written so far, also in a call of `InThread`."""

    def trouble(self) -> str | None:
        """Return why the latest write failed; None: it was stored."""

    def holding(self) -> Sequence[Job]:
        """Return every job that holds memory, by id, as last committed."""

    def live_job(self, job: JobId) -> Job | None:
        """Return one job that is queued or holds memory; nothing is read."""

    def jobs(self, query: JobQuery) -> JobPage:
        """Return a page of a listing."""

    def ended_jobs(self, query: JobQuery) -> EndedPage:
        """Return a page of a listing of ended jobs, in brief."""

    def events(self, job: JobId) -> Sequence[Event]:
        """Return the history of a job, oldest first."""

    def hook_reports(self, job: JobId) -> Reports:
        """Return what the hooks of a job reported, oldest first."""

    def past_jobs(self, since: datetime) -> Sequence[PastJob]:
        """Return the jobs that let go of their memory since then, in that order."""

    def take_released(self) -> Sequence[PastJob]:
        """Return the jobs that let go of their memory since the last call, in that order."""

    def gpu_events(self, since: datetime, most: int) -> Sequence[GpuEvent]:
        """Return the latest events about the health of all GPUs, the oldest first."""

    def gpu(self, uuid: GpuUuid) -> GpuReading:
        """Return the identity of a known GPU, without a reading."""


class Neighbours(Protocol):
    """Announces leases to the personal daemons of other users."""

    def announce(self, leases: tuple[NeighbourLease, ...]) -> None:
        """Have the others see what this daemon leases."""

    def leases(self) -> Sequence[NeighbourLease]:
        """Return what the others lease."""


class HostProbe(Protocol):
    """Reads the RAM and the cores of the machine."""

    def read(self, holding: Iterable[Job]) -> HostReading:
        """Return a reading, given the jobs that hold leases."""


class GpuProbe(Protocol):
    """Reads the GPUs."""

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading of every GPU, by index; a faulty GPU does not hide the others."""

    def driver(self) -> str | None:
        """Return the driver's version."""

    def library(self) -> str | None:
        """Return the version of NVML."""

    def health(self) -> Sequence[HealthReport]:
        """Return the health reports since the last call; never blocks."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """The identity of a process, for display."""

    user: str
    """The uid in digits if it has no name."""
    name: str
    command: str | None
    """None for a kernel thread and for a process that hides it."""
    started_at: datetime
    container: str | None
    """The short id of its container."""


@dataclass(frozen=True, slots=True)
class LivingProcess:
    """A process that exists, and its owner."""

    process: Process
    uid: int
    """The real uid."""
    name: str


@dataclass(frozen=True, slots=True)
class ListedProcesses:
    """What is known of the processes that the driver lists."""

    jobs: Mapping[int, JobId]
    """The job of each that belongs to one. A pid that another process has by now is in none."""
    servers: frozenset[int]
    """The pids of servers of CUDA MPS."""
    programs: Mapping[int, Hashable]
    """A value for each living process, which changes with an exec and with the reuse of its pid."""


class ProcessFinder(Protocol):
    """Finds processes, and the jobs that they belong to."""

    def living(self, pid: int) -> LivingProcess | None:
        """Return the process with this pid now, or None."""

    def is_above_daemon(self, pid: int) -> bool:
        """Return whether the daemon is this process or runs below it."""

    def is_stopped(self, pid: int) -> bool:
        """Return whether a signal, such as that of Ctrl-Z, has stopped the process."""

    def pids_of(self, job: Job) -> set[int] | None:
        """Return the processes of a job; None if they are unknown. Slow."""

    def identify(self, pid: int) -> ProcessIdentity | None:
        """Return the identity of a process, or None if it has ended."""

    def jobs_of(self, pids: Iterable[int], jobs: Sequence[Job]) -> Mapping[int, JobId]:
        """Return the job of each pid that belongs to one of `jobs`."""

    def listed(self, pids: Collection[int], jobs: Sequence[Job]) -> ListedProcesses | None:
        """Return what is known of the processes that the driver lists, and which are of `jobs`.

        None if these pids are those of another pid namespace.
        """


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The worker of a job runs, or a process holds a lease without a job."""

    pid: int | None
    shim_pid: int | None
    at: datetime
    levels: tuple[str, ...] = ()
    """Its enforcement levels, unless they were stored at its launch."""


@dataclass(frozen=True, slots=True)
class WorkerExpired:
    """The shim is stopping the worker at its time limit."""


@dataclass(frozen=True, slots=True)
class MainExited:
    """The main process has ended; others of the job are still running."""

    exit: Exit
    at: datetime


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """No process of the job is left."""

    outcome: Outcome
    exit: Exit | None
    at: datetime
    detail: str | None = None
    by_shutdown: bool = False
    """A shutdown of the machine ended it."""
    started: WorkerStarted | None = None
    """Its start, if that is news too."""
    interrupted: bool = False
    """Somebody sent it a signal that ends programs: a command attached to it, or a shutdown."""
    host_use: HostUse = NO_HOST_USE
    ram_limit: int | None = None
    """The limit for its RAM, in bytes, if the kernel killed processes because of it."""


WorkerNews = WorkerStarted | WorkerExpired | MainExited | WorkerExited


class JobLauncher(Protocol):
    """Starts workers and follows them, also those that an earlier daemon started."""

    async def launch(self, job: Job, invocation: Invocation) -> None:
        """Start the worker of `job`, at most once in its life.

        Raises:
            RecordUnwritable: it cannot be started now.
            GpuleaseError: it cannot be started at all.
        """

    async def forbid(self, job: Job) -> bool:
        """Prevent any launch of `job`, also by an earlier daemon; False if one has begun.

        Raises:
            RecordUnwritable: that is impossible now.
        """

    def was_launched(self, job: Job) -> bool:
        """Return whether a launch of `job` has begun, by this daemon or an earlier one."""

    def follow(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield what happens to the worker of `job`, from its start to WorkerExited."""

    async def stop(self, job: Job, reason: str, grace: timedelta | None = None) -> None:
        """Send SIGTERM to the worker, and SIGKILL after a grace; return when that is certain.

        `grace` may shorten the job's own. After several calls, the shortest applies.
        """

    def grace(self, job: Job) -> timedelta | None:
        """Return the time between SIGTERM and SIGKILL; None if there is no process to stop."""

    async def set_time_limit(self, job: Job, limit: timedelta) -> None:
        """Let the worker run for `limit` from its start; a repetition changes nothing."""

    async def notify(self, job: Job, text: str) -> None:
        """Write a line into the job's output, if it has one."""


class InThread(Protocol):
    """Runs a blocking call away from the event loop.

    What it writes, perhaps in one commit with other calls, is on disk when the result is there.
    """

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return the result of `call`, awaited."""


class Clock(Protocol):
    """Returns the time; follows a change of the machine's clock only at `follow`."""

    def now(self) -> datetime:
        """Return the current time, in UTC."""

    def steady(self) -> timedelta:
        """Return the time since a fixed moment."""

    def set_by(self) -> timedelta:
        """Return how far the machine's clock is ahead of `now`."""

    def thread_s(self) -> float:
        """Return the CPU time of the calling thread, in seconds."""

    def follow(self, by: timedelta) -> None:
        """Move on by what `set_by` returned: the clock may have been set again since then."""


class LocalTime(Protocol):
    """The machine's time zone: begins of recurring windows, and instants as text."""

    def next(self, cron: str, at: datetime) -> datetime | None:
        """Return the first begin at or after `at`; None: there is none.

        Raises:
            BadValue: `cron` is not five fields of crontab(5).
        """

    def text(self, at: datetime, now: datetime) -> str:
        """Return an instant for people, without the day if that is today."""


class MemoryReader(Protocol):
    """The memory of GPUs and jobs over time."""

    def gpu(self, gpu: GpuUuid, grid: Grid) -> GpuSeries:
        """Return the series of a GPU.

        Raises:
            RecordUnwritable: the database cannot be read now.
        """

    def job(self, job: JobId, gpu: GpuUuid, grid: Grid) -> JobSeries:
        """Return the series of a job on a GPU. Raises as `gpu` does."""


class NotLimited(Exception):
    """The driver does not limit a cgroup; the text says why, for display."""


class MemoryLimiter(Protocol):
    """The driver's memory limits on version 2 cgroups; each call blocks for a while."""

    def why_unavailable(self, gpu: GpuUuid, cgroup: Path) -> str | None:
        """Return why the driver cannot limit a cgroup on this GPU; None if it can.

        Raises:
            NotLimited: that is unknown now.
        """

    def set_limit(self, gpu: GpuUuid, cgroup: Path, memory: int) -> int:
        """Limit the processes of a cgroup to `memory` bytes; return the limit in force.

        Raises:
            NotLimited: the limit is not in force.
        """

    def current_limit(self, gpu: GpuUuid, cgroup: Path) -> int | None:
        """Return the limit of a cgroup in bytes, or None.

        Raises:
            NotLimited: that is unknown now.
        """

    def remove_limit(self, gpu: GpuUuid, cgroup: Path) -> None:
        """Remove the limits of a cgroup.

        Raises:
            NotLimited: they could not be removed.
        """
