"""The life of a lease: its states, its triggers, and the one table that moves it.

A state says who holds memory; why a lease ended is the job's reason. All leases of one job move
together, so the state is the job's.

What a job asks for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType

from gpulease.domain.gpu import GpuUuid
from gpulease.units import Share, format_size


class State(StrEnum):
    """Where a lease stands."""

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
        # Its time to wait is over.
        (_S.QUEUED, _T.EXPIRE): _S.ENDED,
        (_S.GRANTED, _T.WORKER_STARTED): _S.ACTIVE,
        (_S.GRANTED, _T.LAUNCH_FAILED): _S.ENDED,
        # The machine was restarted before its worker was: what was granted then need not fit now.
        (_S.GRANTED, _T.LAUNCH_DEFERRED): _S.QUEUED,
        # A worker may be starting at this moment: its memory is free only when it is seen gone.
        (_S.GRANTED, _T.CANCEL): _S.RELEASING,
        # News of the start and of the end may arrive together after a restart.
        (_S.GRANTED, _T.WORKER_EXITED): _S.ENDED,
        (_S.ACTIVE, _T.CANCEL): _S.RELEASING,
        (_S.ACTIVE, _T.EXPIRE): _S.RELEASING,
        # It held more than it was granted, or did nothing with it while others waited.
        (_S.ACTIVE, _T.REVOKE): _S.RELEASING,
        (_S.ACTIVE, _T.WORKER_EXITED): _S.ENDED,
        (_S.RELEASING, _T.LAUNCH_FAILED): _S.ENDED,
        (_S.RELEASING, _T.WORKER_EXITED): _S.ENDED,
    }
)

IGNORED: frozenset[tuple[State, Trigger]] = frozenset(
    {
        # The same news twice: once from the shim, once from its record after a restart.
        (_S.ACTIVE, _T.WORKER_STARTED),
        (_S.ENDED, _T.WORKER_EXITED),
        (_S.ENDED, _T.LAUNCH_FAILED),
        (_S.ENDED, _T.WORKER_STARTED),
        (_S.ENDED, _T.EXPIRE),
        (_S.ENDED, _T.REVOKE),
        # Asked to go already; a worker that was just starting reports that it runs.
        (_S.RELEASING, _T.CANCEL),
        (_S.RELEASING, _T.EXPIRE),
        (_S.RELEASING, _T.REVOKE),
        (_S.RELEASING, _T.WORKER_STARTED),
    }
)

HOLDS_MEMORY: frozenset[State] = frozenset({_S.GRANTED, _S.ACTIVE, _S.RELEASING})


class IllegalTransition(Exception):
    """A trigger met a state where it makes no sense: a bug, or a request that must be refused."""

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
    """A job's right to `memory` bytes of one GPU, from `granted_at` until `released_at`."""

    gpu: GpuUuid
    memory: int
    granted_at: datetime
    released_at: datetime | None = None
    peak: int | None = None
    """The most bytes that were seen in use under it, as far as has been recorded."""
    over_for: timedelta | None = None
    """For how long more than was granted has been in use, as far as has been recorded."""
    enforced_by: tuple[str, ...] | None = None
    """The rungs of enforcement.Rung that it stands on; None: nobody has noted them yet."""
    driver_limit: int | None = None
    """The bytes to which the driver itself keeps it, as the driver says."""
    used: int | None = None
    """Of an ended one, the most that it needed: its peak, less what a framework took in advance
    and never filled."""


LONGEST_TIME = timedelta(days=3650)
"""The longest time limit, also after it was extended."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job's wish: so much memory on each of so many GPUs, for so long."""

    memory: int | Share
    """Bytes on each GPU, or a share of what a GPU has to lease."""
    gpus: int = 1
    exclusive: bool = False
    """Nobody else's lease on these GPUs, and no unmanaged process."""
    time_limit: timedelta | None = None

    def memory_on(self, allocatable: int) -> int:
        """Return the bytes asked for on a GPU that has `allocatable` bytes to lease."""
        return self.memory.of(allocatable) if isinstance(self.memory, Share) else self.memory

    def __str__(self) -> str:
        memory = str(self.memory) if isinstance(self.memory, Share) else format_size(self.memory)
        each = f"{memory} on each of {self.gpus} GPUs" if self.gpus > 1 else memory
        return f"{each}, exclusive" if self.exclusive else each
