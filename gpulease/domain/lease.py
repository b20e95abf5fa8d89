"""The states of a lease, the triggers, and the table of transitions; the claim of a job.

A state says whether memory is held; why a lease ended is a field of the job. All leases of a job
change together, so the state is the job's.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType

from gpulease.domain.gpu import GpuUuid
from gpulease.units import Share, format_size


class State(StrEnum):
    """The state of a lease."""

    QUEUED = "queued"
    GRANTED = "granted"
    ACTIVE = "active"
    RELEASING = "releasing"
    ENDED = "ended"


class Trigger(StrEnum):
    """What happened to a lease."""

    GRANT = "grant"
    WORKER_STARTED = "worker_started"
    LAUNCH_FAILED = "launch_failed"
    LAUNCH_DEFERRED = "launch_deferred"
    CANCEL = "cancel"
    EXPIRE = "expire"
    REVOKE = "revoke"
    WORKER_EXITED = "worker_exited"


_S, _T = State, Trigger

TRANSITIONS: Mapping[tuple[State, Trigger], State] = MappingProxyType(
    {
        (_S.QUEUED, _T.GRANT): _S.GRANTED,
        (_S.QUEUED, _T.CANCEL): _S.ENDED,
        # Its longest wait is over.
        (_S.QUEUED, _T.EXPIRE): _S.ENDED,
        (_S.GRANTED, _T.WORKER_STARTED): _S.ACTIVE,
        (_S.GRANTED, _T.LAUNCH_FAILED): _S.ENDED,
        # The machine restarted before the worker started: the grant may not fit any more.
        (_S.GRANTED, _T.LAUNCH_DEFERRED): _S.QUEUED,
        # A worker may be starting now: the memory is free only when the worker is known to be gone.
        (_S.GRANTED, _T.CANCEL): _S.RELEASING,
        (_S.GRANTED, _T.REVOKE): _S.RELEASING,
        # After a restart of the daemon, the start and the end may arrive together.
        (_S.GRANTED, _T.WORKER_EXITED): _S.ENDED,
        (_S.ACTIVE, _T.CANCEL): _S.RELEASING,
        (_S.ACTIVE, _T.EXPIRE): _S.RELEASING,
        # It used more than its lease, was idle while others waited, makes way, or is requeued.
        (_S.ACTIVE, _T.REVOKE): _S.RELEASING,
        (_S.ACTIVE, _T.WORKER_EXITED): _S.ENDED,
        (_S.RELEASING, _T.LAUNCH_FAILED): _S.ENDED,
        (_S.RELEASING, _T.WORKER_EXITED): _S.ENDED,
    }
)

IGNORED: frozenset[tuple[State, Trigger]] = frozenset(
    {
        # The same event twice: from the shim, and from its record after a restart.
        (_S.ACTIVE, _T.WORKER_STARTED),
        (_S.ENDED, _T.WORKER_EXITED),
        (_S.ENDED, _T.LAUNCH_FAILED),
        (_S.ENDED, _T.WORKER_STARTED),
        (_S.ENDED, _T.EXPIRE),
        (_S.ENDED, _T.REVOKE),
        # It was asked to end already; a worker that was just starting reports that it runs.
        (_S.RELEASING, _T.CANCEL),
        (_S.RELEASING, _T.EXPIRE),
        (_S.RELEASING, _T.REVOKE),
        (_S.RELEASING, _T.WORKER_STARTED),
    }
)

HOLDS_MEMORY: frozenset[State] = frozenset({_S.GRANTED, _S.ACTIVE, _S.RELEASING})


class IllegalTransition(Exception):
    """A trigger that is not defined in a state: a bug, or a request to refuse."""

    def __init__(self, state: State, trigger: Trigger) -> None:
        super().__init__(f"{trigger} in state {state}")
        self.state = state
        self.trigger = trigger


def next_state(state: State, trigger: Trigger) -> State | None:
    """Return the state that `trigger` leads to, or None where it is ignored on purpose.

    Raises:
        IllegalTransition: the pair is neither in the table nor ignored.
    """
    if (state, trigger) in IGNORED:
        return None
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise IllegalTransition(state, trigger) from None


@dataclass(frozen=True, slots=True)
class Lease:
    """A job's right to `memory` bytes of one GPU, from `granted_at` to `released_at`."""

    gpu: GpuUuid
    memory: int
    granted_at: datetime
    released_at: datetime | None = None
    peak: int | None = None
    """The highest use observed, in bytes, as last recorded."""
    over_for: timedelta | None = None
    """How long the job has used more than this, as last recorded."""
    enforced_by: tuple[str, ...] | None = None
    """Its levels of enforcement.EnforcementLevel; None: not noted yet."""
    driver_limit: int | None = None
    """The driver's own limit in bytes, as read back."""
    used: int | None = None
    """For an ended lease: the bytes that were needed, which is the peak less what a framework
    allocated in advance and did not fill."""
    memory_bound: int | None = None
    """The bytes that the job may use while no other needs them; None: no more than `memory`."""

    @property
    def most(self) -> int:
        """The bytes that the job may use while no other job needs those above `memory`."""
        return self.memory if self.memory_bound is None else self.memory_bound

    @property
    def size(self) -> str:
        """The memory as people write it: 4G, 4G..10G."""
        return _written(self.memory, self.memory_bound)


LONGEST_TIME = timedelta(days=3650)
"""The longest time limit, even after extensions."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a job asks for: memory on each of a number of GPUs, for a time."""

    memory: int | Share
    """Bytes on each GPU, or a share of a GPU's allocatable memory."""
    gpus: int = 1
    exclusive: bool = False
    """No other lease on these GPUs, and no unmanaged process."""
    time_limit: timedelta | None = None
    named: tuple[GpuUuid, ...] = ()
    """The only suitable GPUs; empty for any."""
    model: str | None = None
    """Only GPUs with these words in the name, see `choice.is_model`."""
    min_vram: int | None = None
    """Only GPUs of at least this size in bytes, see `choice`."""
    same_model: bool = False
    """All GPUs have the same name."""
    memory_bound: int | Share | None = None
    """With a range: what the job may use while no other job needs it; `memory` is guaranteed."""
    # Not hashed: few claims have them, and the plan looks up all of them often.
    ram: int | None = field(default=None, hash=False)
    """Bytes of the machine's RAM; None: no lease of RAM."""
    cpus: int | None = field(default=None, hash=False)
    """CPU cores of the machine; None: no lease of cores."""
    linked: bool = field(default=False, hash=False)
    """Each two of its GPUs are linked by NVLink."""

    @property
    def choice(self) -> Hashable:
        """What decides which GPUs are suitable, whatever is free on them; None for any."""
        if not (self.is_choosy or self.same_model or self.linked):
            return None
        return self.named, self.model, self.min_vram, self.same_model, self.linked

    @property
    def leases_host(self) -> bool:
        """Whether it is for RAM or cores of the server, besides the memory of GPUs."""
        return self.ram is not None or self.cpus is not None

    @property
    def is_choosy(self) -> bool:
        """Whether only some GPUs are suitable."""
        return bool(self.named) or self.model is not None or self.min_vram is not None

    def memory_on(self, allocatable: int) -> int:
        """Return the claimed bytes on a GPU with `allocatable` bytes."""
        return _size_on(self.memory, allocatable)

    def bound_on(self, allocatable: int) -> int | None:
        """Return the bound in bytes on a GPU, which has at most `allocatable`; None: no range."""
        if self.memory_bound is None:
            return None
        bound = min(_size_on(self.memory_bound, allocatable), allocatable)
        return bound if bound > self.memory_on(allocatable) else None

    @property
    def size(self) -> str:
        """The memory as people write it: 4G, 40%, 4G..10G."""
        return _written(self.memory, self.memory_bound)

    @property
    def in_full(self) -> str:
        """What it asks for of the machine: 4G, ram 32G, cpus 8."""
        ram = [] if self.ram is None else [f"ram {format_size(self.ram)}"]
        return ", ".join([str(self), *ram, *([] if self.cpus is None else [f"cpus {self.cpus}"])])

    def __str__(self) -> str:
        if self.gpus > 1:
            gpus = "of the GPUs asked for" if self.is_choosy else "GPUs"
            alike = " of one model" if self.same_model else ""
            linked = "linked " if self.linked else ""
            each = f"{self.size} on each of {self.gpus} {linked}{gpus}{alike}"
        else:
            each = f"{self.size} on a GPU asked for" if self.is_choosy else self.size
        return f"{each}, exclusive" if self.exclusive else each


def _size_on(size: int | Share, allocatable: int) -> int:
    return size.of(allocatable) if isinstance(size, Share) else size


def _written(*ends: int | Share | None) -> str:
    known = (end for end in ends if end is not None)
    return "..".join(str(end) if isinstance(end, Share) else format_size(end) for end in known)
