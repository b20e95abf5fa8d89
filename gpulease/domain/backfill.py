"""The reservation for a job that has waited for long: particular GPUs, from a particular instant.

The GPUs are those on which the job fits first if running jobs use their whole time limit. This
choice is stable: predictions change with each end of a job, and with each change of the choice, the
GPUs that were kept free so far would be lost. The instant is when the jobs on these GPUs are
expected to have ended. Another job may start if it ends before, or if the reserved job fits beside
it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from gpulease.domain.choice import PlannedGpu, fits
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.host_memory import HostMemory
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.past_jobs import RunTimes
from gpulease.domain.preemption import Wanted
from gpulease.domain.queue import Holding, Need
from gpulease.domain.queue_options import QueuePolicy


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is kept for one waiting job."""

    job: JobId
    at_s: float
    """When the job is expected to fit, in seconds."""
    hard: bool
    """Whether jobs count with their time limits, not with their predicted run times."""
    memory: Mapping[GpuUuid, int]
    """The bytes that it needs, on each of its GPUs."""
    gpus: Mapping[GpuUuid, PlannedGpu]
    """What these GPUs will have free at that instant, beside the job."""
    host: HostMemory | None = None
    """The same of the server, for a job that leases some of it."""

    def is_outlasted_by(
        self, need: Need, now_s: float, history: RunTimes, policy: QueuePolicy
    ) -> bool:
        """Tell whether a job that starts now may run into the reservation."""
        if self.hard:
            unlimited = policy.unlimited_run_time.total_seconds()
            span = unlimited if need.limit_s is None else need.limit_s
        else:
            span = policy.backfill_factor * need.run_time(history)
            span = span if need.limit_s is None else min(span, need.limit_s)
        return now_s + span > self.at_s

    def leaves(self, gpu: GpuUuid, claim: Claim, utilization: float, policy: QueuePolicy) -> bool:
        """Tell whether a claim fits beside the reserved job, on one GPU."""
        later = self.gpus.get(gpu)
        if later is None:
            return True
        return fits(claim, later) and later.shares(utilization, policy)

    def leaves_host(self, claim: Claim) -> bool:
        """Tell whether a claim fits beside the reserved job, on the server."""
        return self.host is None or self.host.fits(claim)


@dataclass(frozen=True, slots=True)
class End:
    """The expected end of a job that holds memory."""

    at_s: float
    latest_s: float
    """The same if it uses its whole time limit."""
    memory: Sequence[tuple[GpuUuid, int]]
    claim: Claim
    utilization: float


def expected_end(held: Holding, now_s: float, history: RunTimes) -> float:
    """Return when a job is expected to end, in seconds.

    A job that has run for half of its predicted time or longer is expected to run as long again:
    the longer a job has run, the longer it will.
    """
    elapsed = max(0.0, now_s - held.start_s)
    left = max(held.need.run_time(history) - elapsed, elapsed)
    limit = held.need.limit_s
    return now_s + left if limit is None else min(now_s + left, max(held.start_s + limit, now_s))


def latest_end(held: Holding, now_s: float, policy: QueuePolicy) -> float:
    """Return when a job ends if it uses its whole time limit, in seconds."""
    elapsed = max(0.0, now_s - held.start_s)
    if held.need.limit_s is not None:
        # Past its limit it is about to end.
        return max(held.start_s + held.need.limit_s, now_s)
    assumed = policy.unlimited_run_time.total_seconds()
    return held.start_s + assumed if elapsed < assumed else now_s + elapsed


def grace_to_make_way(job: Job, policy: QueuePolicy) -> float:
    """Return the seconds that a preempted job takes to end: what it asked for, within bounds.

    A job that asked for none is expected to end at once.
    """
    asked = timedelta(0) if job.grace is None else job.grace
    return min(asked, policy.preemption_grace).total_seconds()


def reserve(
    job: JobId,
    wanted: Wanted,
    gpus: Iterable[PlannedGpu],
    ends: Iterable[End],
    *,
    hard: bool,
    latest_starts: Mapping[GpuUuid, float],
    host: HostMemory | None = None,
) -> Reservation | None:
    """Reserve GPUs for a claim that does not fit now; None if no end of a job makes it fit.

    `ends` are in the order of their latest instants. The job must not start on a GPU after the
    instant in `latest_starts`, in seconds. `host` is what the server has free now, for a claim that
    leases some of it; it changes.
    """
    later = {gpu.uuid: gpu.copy() for gpu in gpus}
    servers = _by_server(later.values())
    free_at, host_free_at = dict.fromkeys(later, 0.0), 0.0
    for end in ends:
        touched = set()
        for uuid, memory in end.memory:
            if uuid in later:
                later[uuid].release(end.claim, memory, end.utilization)
                touched.add(later[uuid].server)
                free_at[uuid] = max(free_at[uuid], end.at_s)
        if host is not None and end.claim.leases_host:
            host.release(end.claim)
            # GPUs that are free already may have waited for it.
            host_free_at, touched = max(host_free_at, end.at_s), set(servers)
        for server in touched if host is None or host.fits(wanted.claim) else ():
            chosen = wanted.choose(_in_time(servers[server], end.at_s, latest_starts))
            if chosen is not None:
                at_s = max(host_free_at, *(free_at[gpu.uuid] for gpu in chosen))
                needed = {gpu.uuid: gpu.take(wanted.claim, wanted.utilization) for gpu in chosen}
                if host is not None:
                    host.take(wanted.claim)
                return Reservation(job, at_s, hard, needed, {gpu.uuid: gpu for gpu in chosen}, host)
    return None


def _in_time(
    gpus: Sequence[PlannedGpu], at_s: float, latest_starts: Mapping[GpuUuid, float]
) -> Sequence[PlannedGpu]:
    if not latest_starts:
        return gpus
    return [gpu for gpu in gpus if at_s <= latest_starts.get(gpu.uuid, math.inf)]


def _by_server(gpus: Iterable[PlannedGpu]) -> Mapping[str, Sequence[PlannedGpu]]:
    found: dict[str, list[PlannedGpu]] = {}
    for gpu in gpus:
        found.setdefault(gpu.server, []).append(gpu)
    return found
