"""A job: its owner, its claim, its state and its outcome.

Only the functions at the end change the state of a job, by the table in `lease`. They return the
changed job, or None where the event changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from fractions import Fraction
from typing import Final, Literal

from gpulease.domain.array_values import Grid
from gpulease.domain.gpu import GpuUuid, JobId, LedgerEntry, job_title
from gpulease.domain.lease import HOLDS_MEMORY, Claim, Lease, State, Trigger, next_state
from gpulease.domain.placement import Placement
from gpulease.domain.queue_options import NO_OPTIONS, QueueOptions
from gpulease.fingerprint import CommandFingerprint as CommandFingerprint  # noqa: PLC0414  a re-export


@dataclass(frozen=True, slots=True)
class JobUsage:
    """What is known about a job's size: its fingerprint, its retries, its end."""

    fingerprint: CommandFingerprint | None = None
    size_reason: str | None = None
    """Why gpulease chose this size, if the user gave none."""
    retry_factor: Fraction | None = None
    """The factor for the memory of a retry after an out-of-memory end; None for no retry."""
    attempt: int = 0
    """The number of earlier attempts."""
    retry_of: JobId | None = None
    """The job that this one continues: it failed, ran out of memory, or was queued again."""
    retried_as: JobId | None = None
    """The job that continues this one."""
    out_of_memory: bool = False
    """It ended because its lease was too small."""


NO_USAGE = JobUsage()
"""For a lease without a command."""


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """How good the predictions for ended jobs were: medians of absolute errors, in seconds."""

    starts: int
    """The jobs that waited with a prediction of their start."""
    start_error: float | None
    runs: int
    """The jobs with a predicted run time whose end shows how long they run."""
    run_error: float | None
    ranges: int = 0
    """The jobs that waited with a range for their start."""
    in_range: int = 0
    """Those that started in it."""


class UsageBy(StrEnum):
    """What jobs that held memory are summed up by."""

    USER = "user"
    GROUP = "group"
    """The group under which the job was submitted: the user's primary one, or newgrp(1)'s."""
    WEEK = "week"
    """In which the job ended, from Monday, in the time zone of the daemon."""
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """Memory that some jobs leased and used; those that hold memory count up to now."""

    key: str
    """The user, the gid, or the first day."""
    jobs: int
    out_of_memory: int
    """The jobs that ran out of GPU memory."""
    seconds: float
    """Seconds for which leases were held, summed over GPUs."""
    asked: float
    """Leased byte-seconds."""
    used: float
    """Byte-seconds of the memory needed at peak, where that is known."""
    unused: float
    """Leased byte-seconds that were never needed, where that is known."""
    mean_wait: float | None
    """Seconds from the submission to the grant, of the jobs that got memory in the time that
    counts; None if there are none."""
    longest_wait: float | None
    measured: float
    """Leased byte-seconds where the use is known."""
    measured_seconds: float
    """Seconds for which these leases were held."""
    cpu_seconds: float | None = None
    """CPU time of the jobs that ended, where that is known."""
    ram_peak: int | None = None
    """The most bytes of RAM that one of them used."""


@dataclass(frozen=True, slots=True)
class UserWaits:
    """How long the jobs of a user waited for memory."""

    started: int
    """The jobs that got memory."""
    mean_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Process:
    """Identifies one process, and no later one with the same pid."""

    pid: int
    started: int
    """Clock ticks from boot to its start, field 22 of proc_pid_stat(5)."""
    boot: str
    """The kernel's boot id."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The processes behind a lease without a command."""

    process: Process | None
    """The lease is released when it ends; None: held until the time limit."""
    waiting_client: Process | None
    """The process that waits for the grant; if it ends first, the lease is cancelled."""
    adopted: bool = False
    """The process used its GPUs before it had the lease, so no hook limits its frameworks."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The job of Slurm behind a lease: Slurm starts its processes, and ends them."""

    id: int
    node: str
    """The name of this machine in Slurm."""
    restarts: int = 0
    """How often Slurm has started it before: it keeps its id when it is queued again."""


class Outcome(StrEnum):
    """Why a job ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    RELEASED = "released"
    """For a lease without a command: released by its owner, or at the end of its process."""
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    OVER_LEASE = "over_lease"
    """It used more memory than its lease for longer than allowed."""
    IDLE = "idle"
    """It was idle while other jobs waited for the memory."""
    GAVE_UP = "gave_up"
    PREEMPTED = "preempted"
    """It made way for another job."""
    REQUEUED = "requeued"
    """It was stopped to be queued again."""
    DEPENDENCY_FAILED = "dependency_failed"
    """A job that it waited for ended in another way than it asked for."""
    LAUNCH_FAILED = "launch_failed"
    LOST = "lost"


QUEUED_AGAIN = frozenset({Outcome.PREEMPTED, Outcome.REQUEUED})
"""After these, a job is always queued again."""
AT_A_LIMIT = frozenset({Outcome.TIME_LIMIT, Outcome.OVER_LEASE, Outcome.IDLE})
"""Ends that gpulease caused, whatever exit code the job chose when it was asked to end."""
NOT_FAILED = QUEUED_AGAIN | {Outcome.RELEASED, Outcome.CANCELLED}
"""Ends that somebody asked for: no failure, whatever the exit code."""
SHOWS_NO_RUN_TIME = QUEUED_AGAIN | {
    Outcome.GAVE_UP,
    Outcome.LAUNCH_FAILED,
    Outcome.LOST,
    Outcome.DEPENDENCY_FAILED,
}
"""Ends that the machine caused, or that came before the start. After all others (also a time
limit, or a cancel) the next run of the same command may well hold its memory for as long."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The user who owns the job, as reported by the kernel."""

    uid: int
    gid: int
    user: str
    """The user name, or the uid in digits if there is none."""

    @property
    def has_name(self) -> bool:
        """Whether the uid has a user name on this machine; container uids often have none."""
        return self.user != str(self.uid)


@dataclass(frozen=True, slots=True)
class TerminalSettings:
    """The pseudo-terminal of a job."""

    rows: int
    columns: int
    attributes: tuple[int, ...] | None = None
    """As in termios(3): iflag, oflag, cflag, lflag, ispeed, ospeed, then control characters."""
    stderr: bool = True
    """Whether standard error is the terminal too."""


@dataclass(frozen=True, slots=True)
class EarlySignal:
    """A signal to send to a job before its time limit."""

    signal: int
    before: timedelta


@dataclass(frozen=True, slots=True)
class Invocation:
    """Everything needed to start the command as its owner would; read at launch only.

    Arguments, paths and environment are strings of the operating system (PEP 383).
    """

    argv: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str] = field(repr=False)
    umask: int = 0o022
    soft_limits: Mapping[str, int] = field(default_factory=dict)
    nice: int = 0
    attached: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    """Options for the frameworks; see worker.environment.WorkerOptions."""
    groups: tuple[int, ...] | None = None
    """Supplementary groups of the caller; None: those of the user database."""
    terminal: TerminalSettings | None = None
    early_signal: EarlySignal | None = None
    grace: timedelta | None = None
    """Time between SIGTERM and SIGKILL; None: the daemon's setting."""
    ends_with_client: bool = False
    """The job ends when the attached client exits or is killed."""
    grid: Grid = field(default_factory=dict)
    """The values of which each element of an array has one combination."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How the worker's main process ended: exit code or signal; both None if unknown."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"ended by signal {self.signal}"
        return "ended" if self.code is None else f"exit status {self.code}"

    @property
    def verb(self) -> str:
        """How it ended, after the name of the job."""
        return str(self) if self.code is None else f"exited with {self.code}"

    @property
    def status(self) -> int | None:
        """The exit status as a shell shows it; None if it is unknown."""
        return self.code if self.signal is None else 128 + self.signal


@dataclass(frozen=True, slots=True)
class JobActivity:
    """What a job did with its GPUs, as far as its frameworks or the driver report it."""

    first_use_at: datetime | None = None
    steps: int | None = None
    """Training steps; known after its end, like the rate."""
    steps_per_second: float | None = None


NO_ACTIVITY: Final = JobActivity()


@dataclass(frozen=True, slots=True)
class HostUse:
    """What a job used of the machine beside its GPUs; known after its end, None if unknown."""

    ram_peak: int | None = None
    """The most bytes of RAM, of all processes together."""
    cpu_for: timedelta | None = None
    """CPU time of all processes together."""


NO_HOST_USE: Final = HostUse()


@dataclass(frozen=True, slots=True)
class Job:
    """A job and its state."""

    id: JobId
    owner: Owner
    name: str
    command: str
    """The command as typed; displayed only, never executed."""
    claim: Claim
    submitted_at: datetime
    gives_up_at: datetime | None = None
    """When it leaves the queue if it has not started."""
    state: State = State.QUEUED
    leases: tuple[Lease, ...] = ()
    """The leases that it holds, or for an ended job, held."""
    granted_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    pid: int | None = None
    shim_pid: int | None = None
    outcome: Outcome | None = None
    detail: str | None = None
    """Details of how it ended, for people."""
    exit: Exit | None = None
    """Known once the main process has ended."""
    main_exited_at: datetime | None = None
    """When the main process ended while others of the job still ran."""
    terminal: bool = False
    """It runs on a pseudo-terminal."""
    grace: timedelta | None = None
    """Time between SIGTERM and SIGKILL; None: the daemon's setting."""
    holder: Holder | None = None
    """For a lease without a command: the processes behind it."""
    slurm: SlurmJob | None = None
    """For a lease that belongs to a job of Slurm."""
    notify: tuple[str, ...] = ()
    """The events of which its owner is notified."""
    kept_until_at: datetime | None = None
    """Until when idleness has no consequences."""
    usage: JobUsage = NO_USAGE
    queue: QueueOptions = NO_OPTIONS
    predicted_run_for: timedelta | None = None
    """The run time that was expected when it was granted."""
    predicted_start_at: datetime | None = None
    """The start that was expected first."""
    predicted_from_at: datetime | None = None
    predicted_until_at: datetime | None = None
    """The range that was said then."""
    utilization: int | None = None
    """Percent, the mean over its run and its GPUs; known after its end."""
    activity: JobActivity = NO_ACTIVITY
    host_use: HostUse = NO_HOST_USE

    @property
    def label(self) -> str:
        """The id as people see it: 17, or 17_3 for the element of an array with index 3.

        A job of Slurm has the number of Slurm.
        """
        if self.slurm is not None:
            return str(self.slurm.id)
        array = self.queue.array
        return str(self.id) if array is None else f"{array.job}_{array.index}"

    @property
    def title(self) -> str:
        """The job in messages for its owner and others: job 17, or job 7 of Slurm."""
        return job_title(self.label, None if self.slurm is None else self.slurm.id)

    @property
    def kind(self) -> Literal["run", "hold", "slurm"]:
        """What stands behind its lease: a command, a process or nobody, or a job of Slurm."""
        if self.slurm is not None:
            return "slurm"
        return "run" if self.holder is None else "hold"

    @property
    def has_shim(self) -> bool:
        """Whether gpulease starts its processes, below a shim, and has its output."""
        return self.holder is None and self.slurm is None

    @property
    def holds_memory(self) -> bool:
        return self.state in HOLDS_MEMORY

    def is_kept(self, at: datetime) -> bool:
        """Return whether idleness has no consequences then."""
        return self.kept_until_at is not None and at < self.kept_until_at

    @property
    def expires_at(self) -> datetime | None:
        """When its time limit ends it; None if it has not started or has no limit."""
        if self.started_at is None or self.claim.time_limit is None:
            return None
        return self.started_at + self.claim.time_limit

    def ledger_entry(self, lease: Lease) -> LedgerEntry:
        """Return the entry of `lease` for the ledger of its GPU."""
        running = self.state in (State.ACTIVE, State.RELEASING)
        return LedgerEntry(
            self.id, lease.memory, self.claim.exclusive, running, bound=lease.memory_bound
        )


def grant(job: Job, placement: Placement, at: datetime) -> Job:
    """Grant `placement` to `job`; the memory counts as leased from now on."""
    state = next_state(job.state, Trigger.GRANT)
    assert state is not None, "a grant is never ignored"
    bounds = dict(placement.bounds)
    leases = tuple(
        Lease(gpu, memory, at, memory_bound=bounds.get(gpu))
        for gpu, memory in placement.allocations
    )
    return replace(job, state=state, leases=leases, granted_at=at)


def back_in_queue(job: Job) -> Job:
    """Return `job` to the queue: no worker was started for this grant, and none will be."""
    state = next_state(job.state, Trigger.LAUNCH_DEFERRED)
    assert state is not None, "going back is never ignored"
    return replace(job, state=state, leases=(), granted_at=None)


def worker_started(job: Job, pid: int | None, shim_pid: int | None, at: datetime) -> Job | None:
    """Note that the worker of `job` runs, or that the lease without a command is held."""
    state = next_state(job.state, Trigger.WORKER_STARTED)
    if state is None and job.started_at is not None:
        return None
    return replace(job, state=state or job.state, pid=pid, shim_pid=shim_pid, started_at=at)


def main_exited(job: Job, exit_: Exit, at: datetime) -> Job | None:
    """Note that the main process of `job` has ended while others still run."""
    if not job.holds_memory or job.main_exited_at is not None:
        return None
    return replace(job, exit=exit_, main_exited_at=at)


def with_time_limit(job: Job, limit: timedelta) -> Job:
    """Return `job` with another time limit, counted from its start."""
    return replace(job, claim=replace(job.claim, time_limit=limit))


def with_over_for(job: Job, gpu: GpuUuid, over_for: timedelta | None) -> Job:
    """Return `job` with the time for which it has used more than its lease of `gpu`."""
    leases = (
        replace(lease, over_for=over_for) if lease.gpu == gpu else lease for lease in job.leases
    )
    return replace(job, leases=tuple(leases))


def aging(job: Job, since: datetime | None) -> Job:
    """Return a queued job with its age counted since then; None: it has no age."""
    return replace(job, queue=replace(job.queue, aging_since_at=since))


def shifted(job: Job, by: timedelta) -> Job:
    """Return `job` with all instants shifted after the clock was set; spans stay the same."""

    def at(instant: datetime | None) -> datetime | None:
        return None if instant is None else instant + by

    return replace(
        job,
        submitted_at=job.submitted_at + by,
        leases=tuple(replace(each, granted_at=each.granted_at + by) for each in job.leases),
        gives_up_at=at(job.gives_up_at),
        granted_at=at(job.granted_at),
        started_at=at(job.started_at),
        main_exited_at=at(job.main_exited_at),
        kept_until_at=at(job.kept_until_at),
        queue=replace(
            job.queue,
            begin_at=at(job.queue.begin_at),
            aging_since_at=at(job.queue.aging_since_at),
        ),
        predicted_start_at=at(job.predicted_start_at),
        predicted_from_at=at(job.predicted_from_at),
        predicted_until_at=at(job.predicted_until_at),
    )


def asked_to_end(
    job: Job, trigger: Trigger, outcome: Outcome, detail: str, at: datetime
) -> Job | None:
    """Cancel, expire or revoke `job`: a queued job ends, a running one is asked to end.

    Raises:
        IllegalTransition: the job has ended.
    """
    state = next_state(job.state, trigger)
    if state is None:
        return None
    if state is State.ENDED:
        return _ended(job, outcome, detail, None, at)
    return replace(job, state=state, outcome=outcome, detail=detail)


def not_queued_again(job: Job, outcome: Outcome, detail: str) -> Job | None:
    """Return a job that is being stopped to be queued again, as one that only ends."""
    if job.state is not State.RELEASING or job.outcome not in QUEUED_AGAIN:
        return None
    return replace(job, outcome=outcome, detail=detail)


def worker_gone(
    job: Job,
    trigger: Trigger,
    outcome: Outcome,
    detail: str | None,
    exit_: Exit | None,
    at: datetime,
) -> Job | None:
    """Note that no process of `job` is left or was ever started; its memory is free."""
    if next_state(job.state, trigger) is None:
        return None
    return _ended(job, outcome, detail, exit_, at)


def _ended(job: Job, outcome: Outcome, detail: str | None, exit_: Exit | None, at: datetime) -> Job:
    leases = tuple(replace(lease, released_at=at) for lease in job.leases)
    return replace(
        job,
        state=State.ENDED,
        leases=leases,
        ended_at=at,
        outcome=outcome,
        detail=detail,
        exit=exit_,
    )


def wait_has_expired(job: Job, at: datetime) -> bool:
    """Tell whether `job` is still queued when its longest wait is over."""
    return job.state is State.QUEUED and job.gives_up_at is not None and job.gives_up_at <= at


def until(at: datetime, span: timedelta | None) -> datetime | None:
    """Return the instant `span` after `at`; None for no span."""
    return None if span is None else at + span


LONGEST = 500
"""Characters of a notice."""


def one_line(text: str) -> str:
    """Return `text` as one line without control characters, of at most `LONGEST` characters."""
    spaced = " ".join(text.split())
    clean = "".join(char if char.isprintable() else "?" for char in spaced)
    return clean if len(clean) <= LONGEST else clean[: LONGEST - 3] + "..."
