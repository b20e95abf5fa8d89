"""Runs a trace through the daemon's `plan` on a virtual clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpulease.domain.placement import Score, best_fit
from gpulease.domain.plan import Plan, Snapshot
from gpulease.domain.queue_policy import QueuePolicy
from gpulease.replay.trace import Run, Server, TraceJob


class Contention(StrEnum):
    """How much jobs that share a GPU slow each other down.

    The speed of a job depends on the busiest of its GPUs. With n jobs there, it is:
    """

    NONE = "none"
    """1."""
    PAIRS = "pairs"
    """0.929 to the power of n - 1, as measured for pairs of training jobs. Where utilizations are
    known: 0.97 over their sum, at most 1."""
    SLICES = "slices"
    """1 / n, the worst case. Where utilizations are known, the same as `pairs`."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of a replay: what was known, and what was decided."""

    at_s: float
    snapshot: Snapshot
    plan: Plan


def replay(
    trace: Sequence[TraceJob],
    servers: Sequence[Server],
    policy: QueuePolicy,
    *,
    whole_gpus: bool = False,
    contention: Contention = Contention.NONE,
    placement: Score = best_fit,
    observe: Callable[[Moment], None] | None = None,
) -> list[Run]:
    """Return when and where each job of `trace` ran, in the order of the trace.

    Args:
        trace: the jobs, in any order.
        servers: a job runs on GPUs of one of them.
        policy: the settings of the queue.
        whole_gpus: every job gets whole GPUs, whatever memory it asks for.
        contention: how much jobs on a GPU slow each other down.
        placement: the score of a GPU for a claim; the highest wins.
        observe: called after each decision.
    """
    raise NotImplementedError
