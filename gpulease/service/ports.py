"""What the use cases need from outside, as Protocols; adapters and fakes mirror their names.

What the use cases need of the driver's own memory limits, as a Protocol.
"""

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol, TypeVar

from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.health import GpuAvailability, GpuEvent, HealthReport
from gpulease.domain.job import (
    NO_USAGE,
    CommandFingerprint,
    Exit,
    Holder,
    Invocation,
    Job,
    JobUsage,
    Outcome,
    Owner,
    Process,
    until,
)
from gpulease.domain.lease import Claim
from gpulease.domain.memory_estimate import PastRun
from gpulease.units import MIB

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a job's history: what happened, and what more there is to say."""

    at: datetime
    kind: str
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that was asked for and has no id yet."""

    owner: Owner
    name: str
    command: str
    claim: Claim
    invocation: Invocation
    wait_for: timedelta | None = None
    """How long it is willing to wait for a grant; None is without end, zero is not at all."""
    holder: Holder | None = None
    """Whom the lease is for, if there is nothing to run."""
    key: str | None = None
    """The owner's name for this order: given again with the same one, it is no new order."""
    usage: JobUsage = NO_USAGE
    sizes_itself: bool = False
    """Nobody said how much memory: what its likes used decides, or else the claim as it is."""

    def queued(self, number: JobId, at: datetime) -> Job:
        """Return the job that was asked for, as it begins."""
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
            usage=self.usage,
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

    waiting: int = 10_000
    """Queued jobs and leases."""
    waiting_bytes: int = 256 * MIB
    """Size of their arguments and environments in the database."""
    holds: int = 100
    """Leases without a job, queued or held."""
    exempt: frozenset[int] = field(default=frozenset({0}))
    """The uids without limits: root, and the daemon's own user."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The admin's settings about leasing; sizes in bytes."""

    margin: int = 0
    """Memory of each GPU that is never leased."""
    smallest_lease: int = 0
    """Less than this cannot hold a CUDA context."""
    quotas: Quotas = field(default_factory=Quotas)


class Transaction(Protocol):
    """Changes that become true together, on disk, or not at all."""

    def live(self) -> Sequence[Job]:
        """Return every job that waits or holds memory, by id."""

    def user_count(self, uid: int) -> UserCount:
        """Return what a user has, with what this transaction has changed."""

    def job(self, job: JobId) -> Job | None:
        """Return one job, whatever its state."""

    def add_gpus(self, readings: Sequence[GpuReading], at: datetime) -> None:
        """Store the GPUs that were not known yet; a lease can only be on a known one."""

    def job_by_key(self, uid: int, key: str) -> Job | None:
        """Return the job that a user has ordered under this key, whatever its state."""

    def invocation(self, job: JobId) -> Invocation:
        """Return how a job was started; it is dropped when the job ends."""

    def past_runs(
        self, uid: int, shape: CommandFingerprint, gpus: int, most: int
    ) -> Sequence[PastRun]:
        """Return the latest runs like this one of which the use is known, latest first.

        Those that are the same in every word, or if there are none those that are alike.
        """

    def add(self, order: Submission, at: datetime) -> Job:
        """Store a new job, QUEUED, with its invocation."""

    def save(self, job: Job, event: Event) -> None:
        """Store a job as it is now, and why."""

    def note(self, job: JobId, event: Event) -> None:
        """Add to the history of a job that stays as it is; it may have ended."""

    def note_over(self, job: JobId, gpu: GpuUuid, over_for: timedelta | None) -> None:
        """Store for how long a lease has been over; nothing of one that is not held any more."""

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return the GPUs on which nothing more may be granted, and why."""

    def availabilities(self) -> Mapping[GpuUuid, GpuAvailability]:
        """Return the standing of each GPU that has more to it than nothing."""

    def set_availability(self, gpu: GpuUuid, standing: GpuAvailability) -> None:
        """Store what keeps new leases off a GPU that is known."""

    def note_gpu(self, event: GpuEvent) -> None:
        """Store something that happened to the health of a known GPU."""


class Store(Protocol):
    """The record of jobs and leases."""

    def write(self) -> AbstractContextManager[Transaction]:
        """Open the one write transaction; what it did is on disk when the context ends."""

    def live(self) -> Sequence[Job]:
        """Return every job that waits or holds memory, by id, as last committed."""

    def job(self, job: JobId) -> Job | None:
        """Return one job, whatever its state."""

    def jobs(self, user: str | None, state: str | None, limit: int) -> Sequence[Job]:
        """Return the latest jobs in whatever state, oldest first."""

    def invocation(self, job: JobId) -> Invocation:
        """Return how to start a job."""

    def events(self, job: JobId) -> Sequence[Event]:
        """Return the history of a job, oldest first."""

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return the GPUs on which nothing more may be granted, and why."""

    def availabilities(self) -> Mapping[GpuUuid, GpuAvailability]:
        """Return the standing of each GPU that has more to it than nothing."""

    def gpu_events(self, since: datetime, most: int) -> Sequence[GpuEvent]:
        """Return the latest entries about the health of all GPUs, oldest first."""

    def gpu(self, uuid: GpuUuid) -> GpuReading:
        """Return the identity of a GPU that was seen once, and nothing else of it."""


class GpuProbe(Protocol):
    """Reads the GPUs."""

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading of every GPU, by index; one bad GPU does not hide the others."""

    def driver(self) -> str | None:
        """Return the driver's version."""

    def library(self) -> str | None:
        """Return the version of the library that reads the GPUs, NVML."""

    def health(self) -> Sequence[HealthReport]:
        """Return what was heard of the GPUs' health since the last call; waits for nothing."""


class ProcessIdentity(Protocol):
    """Who a process is, for people."""

    @property
    def user(self) -> str | None: ...
    @property
    def name(self) -> str | None: ...
    @property
    def command(self) -> str | None: ...
    @property
    def started_at(self) -> datetime | None: ...
    @property
    def container(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class LivingProcess:
    """A process that is there, and whose it is."""

    process: Process
    uid: int
    """The real one."""
    name: str


class ProcessFinder(Protocol):
    """Tells who processes are, and which job they belong to."""

    def living(self, pid: int) -> LivingProcess | None:
        """Return the process that has this pid now, or None if there is none."""

    def is_stopped(self, pid: int) -> bool:
        """Tell whether a signal has stopped the process with this pid, as Ctrl-Z does."""

    def count(self, job: Job) -> int | None:
        """Return how many processes a job has; None where there is no telling. Takes its time."""

    def inherited(self, pids: Iterable[int]) -> frozenset[int]:
        """Take in what the driver lists; return the pids that others had when it began to."""

    def mps_servers(self, pids: Iterable[int]) -> frozenset[int]:
        """Return those of `pids` that are servers of CUDA's MPS."""

    def identify(self, pid: int) -> ProcessIdentity | None:
        """Return who a process is, or None for one that is gone."""

    def jobs_of(self, pids: Iterable[int], jobs: Sequence[Job]) -> Mapping[int, JobId]:
        """Return the job of each pid that belongs to one of `jobs`."""

    def knows_pids(self, pids: Iterable[int], found: Collection[int]) -> bool:
        """Tell whether the pids that a driver lists are those that processes have here.

        `found` are those of them that belong to jobs.
        """


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The worker of a job runs, or the holder of a lease has it."""

    pid: int | None
    shim_pid: int | None
    at: datetime
    rungs: tuple[str, ...] = ()
    """What holds it to its leases, if nothing was noted at its launch; see enforcement.Rung."""


@dataclass(frozen=True, slots=True)
class WorkerExpired:
    """The shim has asked the worker to go, since its time is over."""


@dataclass(frozen=True, slots=True)
class MainExited:
    """The main process has ended; others of the job are still there."""

    exit: Exit
    at: datetime


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """No process of the job is left."""

    outcome: Outcome
    exit: Exit | None
    at: datetime
    detail: str | None = None


WorkerNews = WorkerStarted | WorkerExpired | MainExited | WorkerExited


class Launcher(Protocol):
    """Starts workers and brings news of them, also of those that were started before a restart."""

    async def launch(self, job: Job, invocation: Invocation) -> None:
        """Start the worker of `job`, at most once in its life; news come by `follow`.

        Raises:
            RecordUnwritable: it could not be started at this moment.
            GpuleaseError: it could not be started, and never will be.
        """

    async def forbid(self, job: Job) -> bool:
        """See that no launch of `job` can begin any more; False if one has begun.

        Not even one that a daemon before this one has asked for.

        Raises:
            RecordUnwritable: that cannot be had at this moment.
        """

    def was_launched(self, job: Job) -> bool:
        """Tell whether a launch of `job` has begun, by this daemon or one before it."""

    def follow(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield what happens to the worker of `job`, from its start on; ends with WorkerExited."""

    async def stop(self, job: Job, reason: str, grace: timedelta | None = None) -> None:
        """Ask the worker to go, and after a grace make it go; returns when it is known to go.

        `grace` may be shorter than the job's own, which is what counts otherwise; asked again, the
        shorter one counts.
        """

    def grace(self, job: Job) -> timedelta | None:
        """Return how long the worker has between the two; None: nothing is there to be ended."""

    async def set_time_limit(self, job: Job, limit: timedelta) -> None:
        """Let the worker run for `limit` from its start; hearing it twice does no harm."""

    async def notify(self, job: Job, text: str) -> None:
        """Write a line into the job's output, if it has one."""


class InThread(Protocol):
    """Runs a blocking call away from the event loop."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return the result of `call`, awaited."""


class Clock(Protocol):
    """Tells the time; when the machine's clock is set, it follows only when it is told to."""

    def now(self) -> datetime:
        """Return the present moment, in UTC."""

    def steady(self) -> timedelta:
        """Return the time since some moment that nobody can move."""

    def set_by(self) -> timedelta:
        """Return how far the machine's clock is ahead of `now`."""

    def follow(self) -> None:
        """Tell the machine's time from now on."""


class NotLimited(Exception):
    """The driver keeps no limit of ours on a cgroup; the text says why, for people."""


class MemoryLimiter(Protocol):
    """The driver's own memory limits, on cgroups of version 2; each call blocks for a while."""

    def why_unavailable(self, gpu: GpuUuid, cgroup: Path) -> str | None:
        """Return why no limit can be had on this GPU, asking about any cgroup; None: it can.

        Raises:
            NotLimited: there is no telling now.
        """

    def set_limit(self, gpu: GpuUuid, cgroup: Path, memory: int) -> int:
        """Let the processes of a cgroup hold at most `memory` bytes; return what is kept to.

        Raises:
            NotLimited: it is not in force.
        """

    def current_limit(self, gpu: GpuUuid, cgroup: Path) -> int | None:
        """Return the limit that the driver keeps a cgroup to now, in bytes; None: to none.

        Raises:
            NotLimited: there is no telling.
        """

    def remove_limit(self, gpu: GpuUuid, cgroup: Path) -> None:
        """Take the limits of a cgroup away.

        Raises:
            NotLimited: they could not be.
        """
