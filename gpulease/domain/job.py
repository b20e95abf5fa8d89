"""A job: who asked, what for, where it stands, and how it ended.

The functions at the end are the only ones that move a job from state to state; each does so by
the table of `lease.py`. They return the job as it is afterwards, or None where the news changes
nothing.

What a job is remembered by: its likes, what it took, and that it was tried again.

Who holds a lease without a job, and who asked for it.

A notice: one line that gpulease has to say to the owner of a job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from fractions import Fraction

from gpulease.domain.gpu import GpuUuid, JobId, LedgerEntry
from gpulease.domain.lease import HOLDS_MEMORY, Claim, Lease, State, Trigger, next_state
from gpulease.domain.placement import Placement


@dataclass(frozen=True, slots=True)
class CommandFingerprint:
    """By what the runs of one script are recognised; each is a digest, and tells nobody what ran.

    Made by `shape.shape_of`.
    """

    similar_key: str
    """Of all runs of this script with options of the same names."""
    exact_key: str
    """Of those with the same words all along."""


@dataclass(frozen=True, slots=True)
class JobUsage:
    """What is kept of a job beside its leases, to size the next one like it."""

    fingerprint: CommandFingerprint | None = None
    size_reason: str | None = None
    """Why its lease is as large as it is, if nobody said how large it was to be."""
    retry_factor: Fraction | None = None
    """How much more memory it gets if it runs out; None: it is not tried again."""
    attempt: int = 0
    """How often it was tried before."""
    retry_of: JobId | None = None
    """The job that ran out of memory, and that this one tries again."""
    retried_as: JobId | None = None
    out_of_memory: bool = False
    """It ended because the GPU memory of its lease did not do."""


NO_USAGE = JobUsage()
"""Of a job that nothing is kept of, such as a lease without a job."""


@dataclass(frozen=True, slots=True)
class UserUsage:
    """What the ended jobs of one user asked for and used, where the use is known."""

    user: str
    jobs: int
    out_of_memory: int
    """How many of them ended for want of GPU memory."""
    seconds: float
    """How long they held their leases, added up over GPUs."""
    asked: float
    """Bytes leased, times the seconds for which they were."""
    used: float
    """The same of what they needed at most."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process, and never a later one that was given its pid."""

    pid: int
    started: int
    """Clock ticks from the machine's boot to its start, field 22 of proc_pid_stat(5)."""
    boot: str
    """Which boot of the machine, as the kernel names it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Whom a lease without a job is for."""

    process: Process | None
    """The lease is released when it ends; None: it is held until its time is over."""
    waiting_client: Process | None
    """Who waits for the grant; the lease is not wanted any more if it ends before."""


class Outcome(StrEnum):
    """Why a job ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    RELEASED = "released"
    """Of a lease without a job: given back by its owner, or at the end of its holder."""
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    OVER_LEASE = "over_lease"
    """It held more memory than it was granted, for longer than is let be."""
    IDLE = "idle"
    """It did nothing with its lease while others waited for the memory."""
    GAVE_UP = "gave_up"
    LAUNCH_FAILED = "launch_failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Owner:
    """The user whose job it is, as the kernel says."""

    uid: int
    gid: int
    user: str
    """The name; the uid in digits where the machine knows none."""

    @property
    def has_name(self) -> bool:
        """Whether the machine knows this user: not so of uids that somebody has to give away."""
        return self.user != str(self.uid)


@dataclass(frozen=True, slots=True)
class TerminalSettings:
    """The pseudo-terminal that a job wants to run on."""

    rows: int
    columns: int
    attributes: tuple[int, ...] | None = None
    """As termios(3) has them: iflag, oflag, cflag, lflag, ispeed, ospeed, then the control
    characters."""
    stderr: bool = True
    """Whether standard error is the terminal as well."""


@dataclass(frozen=True, slots=True)
class EarlySignal:
    """A signal that a job wants so long before its time is over."""

    signal: int
    before: timedelta


@dataclass(frozen=True, slots=True)
class Invocation:
    """All that is needed to start the command as its owner would have; read at launch alone.

    Arguments, paths and environment are the operating system's strings (PEP 383).
    """

    argv: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str] = field(repr=False)
    umask: int = 0o022
    soft_limits: Mapping[str, int] = field(default_factory=dict)
    nice: int = 0
    attached: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    """How the GPUs are presented to the frameworks; the worker's side knows what they mean."""
    groups: tuple[int, ...] | None = None
    """Supplementary groups of whoever asked; None: those that the user database gives."""
    terminal: TerminalSettings | None = None
    early_signal: EarlySignal | None = None
    grace: timedelta | None = None
    """Between SIGTERM and SIGKILL; None: as the daemon is configured."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How the worker's main process ended: a code, or the signal that ended it; else unknown."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"ended by signal {self.signal}"
        return "ended" if self.code is None else f"exit status {self.code}"


@dataclass(frozen=True, slots=True)
class Job:
    """What a user asked to run, and where it stands."""

    id: JobId
    owner: Owner
    name: str
    command: str
    """As a person would type it; shown, never executed."""
    claim: Claim
    submitted_at: datetime
    gives_up_at: datetime | None = None
    """Until when it is willing to wait for a grant."""
    state: State = State.QUEUED
    leases: tuple[Lease, ...] = ()
    """Of a job that holds memory, the leases it holds; of an ended one, those that it held."""
    granted_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    pid: int | None = None
    shim_pid: int | None = None
    outcome: Outcome | None = None
    detail: str | None = None
    """More about how it ended, for people."""
    exit: Exit | None = None
    """Known from the end of the main process on."""
    main_exited_at: datetime | None = None
    """When the main process ended and left others of the job behind."""
    terminal: bool = False
    """It runs on a pseudo-terminal."""
    grace: timedelta | None = None
    """Between SIGTERM and SIGKILL; None: as the daemon is configured."""
    holder: Holder | None = None
    """Whom the lease is for, if there is nothing to run under it."""
    kept_until_at: datetime | None = None
    """Until when nobody minds that nothing happens under its lease."""
    usage: JobUsage = NO_USAGE

    @property
    def holds_memory(self) -> bool:
        return self.state in HOLDS_MEMORY

    @property
    def expires_at(self) -> datetime | None:
        """When its time limit ends it; None while it does not run or has no limit."""
        if self.started_at is None or self.claim.time_limit is None:
            return None
        return self.started_at + self.claim.time_limit

    def ledger_entry(self, lease: Lease) -> LedgerEntry:
        """Return what `lease` counts for in the ledger of its GPU."""
        running = self.state in (State.ACTIVE, State.RELEASING)
        return LedgerEntry(self.id, lease.memory, self.claim.exclusive, running)


def grant(job: Job, placement: Placement, at: datetime) -> Job:
    """Give `job` the GPUs of `placement`; from here their memory is taken."""
    state = next_state(job.state, Trigger.GRANT)
    assert state is not None, "a grant is never ignored"
    leases = tuple(Lease(gpu, memory, at) for gpu, memory in placement.allocations)
    return replace(job, state=state, leases=leases, granted_at=at)


def back_in_queue(job: Job) -> Job:
    """Take back what was granted to `job`, of which no worker was started, nor will be for it."""
    state = next_state(job.state, Trigger.LAUNCH_DEFERRED)
    assert state is not None, "going back is never ignored"
    return replace(job, state=state, leases=(), granted_at=None)


def worker_started(job: Job, pid: int | None, shim_pid: int | None, at: datetime) -> Job | None:
    """Note that the worker of `job` runs, or that the holder of a lease has it."""
    state = next_state(job.state, Trigger.WORKER_STARTED)
    if state is None and job.started_at is not None:
        return None
    return replace(job, state=state or job.state, pid=pid, shim_pid=shim_pid, started_at=at)


def main_exited(job: Job, exit_: Exit, at: datetime) -> Job | None:
    """Note that the main process of `job` has ended, and that others of it have not."""
    if not job.holds_memory or job.main_exited_at is not None:
        return None
    return replace(job, exit=exit_, main_exited_at=at)


def with_time_limit(job: Job, limit: timedelta) -> Job:
    """Return `job` with another limit to its time, which counts from its start as before."""
    return replace(job, claim=replace(job.claim, time_limit=limit))


def with_over_for(job: Job, gpu: GpuUuid, over_for: timedelta | None) -> Job:
    """Return `job` with for how long its lease of `gpu` has been over."""
    leases = (
        replace(lease, over_for=over_for) if lease.gpu == gpu else lease for lease in job.leases
    )
    return replace(job, leases=tuple(leases))


def moved(job: Job, by: timedelta) -> Job:
    """Return `job` as it stands after the clock was set by so much: all spans are as they were."""

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
    )


def asked_to_go(
    job: Job, trigger: Trigger, outcome: Outcome, detail: str, at: datetime
) -> Job | None:
    """Cancel or expire `job`: a waiting one ends, a running one is on its way out.

    Raises:
        IllegalTransition: the job has ended.
    """
    state = next_state(job.state, trigger)
    if state is None:
        return None
    if state is State.ENDED:
        return _ended(job, outcome, detail, None, at)
    return replace(job, state=state, outcome=outcome, detail=detail)


def worker_gone(
    job: Job,
    trigger: Trigger,
    outcome: Outcome,
    detail: str | None,
    exit_: Exit | None,
    at: datetime,
) -> Job | None:
    """Note that no process of `job` is left, or that none ever came; its memory is free."""
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
    """Tell whether `job` is still queued at the moment at which it would rather give up."""
    return job.state is State.QUEUED and job.gives_up_at is not None and job.gives_up_at <= at


def until(at: datetime, span: timedelta | None) -> datetime | None:
    """Return the moment `span` after `at`, or None for no span."""
    return None if span is None else at + span


LONGEST = 500
"""Characters."""


def one_line(text: str) -> str:
    """Return `text` as a line that is harmless on any terminal: no control characters, not long."""
    spaced = " ".join(text.split())
    clean = "".join(char if char.isprintable() else "?" for char in spaced)
    return clean if len(clean) <= LONGEST else clean[: LONGEST - 3] + "..."
