"""Users of a cluster read the numbers and options of Slurm."""

from dataclasses import replace
from datetime import timedelta

import pytest

from fakes import NOON, G, order, reading
from goldens import mentions, sentence
from gpulease.domain.gpu import GpuUuid, JobId, LedgerEntry, ProcessReading, build_ledger
from gpulease.domain.idle import IdleAction, IdlePolicy, IdleState, Release
from gpulease.domain.job import SlurmJob
from gpulease.domain.lease import Claim, Lease
from gpulease.domain.overuse import Consequence, OveruseAction, OverusePolicy, OveruseState
from gpulease.domain.placement import find_obstacle
from gpulease.service.enforcement import (
    idle_warning,
    overuse_stop,
    overuse_warning,
    size_to_ask_for,
)
from gpulease.service.idleness import IdleFinding
from gpulease.service.overuse import Finding

OVER = OveruseState(over_for=timedelta(seconds=1))
JOB = replace(
    order().queued(JobId(3), NOON), slurm=SlurmJob(7, "n1"),
    leases=(Lease(GpuUuid("GPU-a"), 2 * G, NOON),),
)  # fmt: skip
POLICY = OverusePolicy(Consequence.STOP, G // 4, timedelta(seconds=40))


def over(gpu: str = "GPU-a") -> Finding:
    lease = replace(JOB.leases[0], gpu=GpuUuid(gpu))
    return Finding(JOB, lease, "0", 3 * G, POLICY, False, OveruseAction.WARN, OVER)


def test_notices_name_the_number_and_the_options_of_slurm() -> None:
    ask = size_to_ask_for(over(), 3 * G, 0, G // 4)
    sentence("slurm over-lease", overuse_warning(over(), ask))
    sentence("slurm over-lease stop", "\n".join(overuse_stop(over(), 3 * G, ask)))
    sentence("slurm without-lease", overuse_warning(over("GPU-b"), ask))
    policy = IdlePolicy(release=Release.WARN)
    idle = IdleFinding(JOB, policy, IdleAction.WARN, timedelta(hours=1), IdleState())
    sentence("slurm idle", idle_warning(idle))


@pytest.mark.parametrize(
    ("holders", "slurm", "name"),
    [
        ((3,), {3: 7}, "job 7 of Slurm holds"),
        ((3, 4), {3: 7, 4: 9}, "2 jobs hold"),
    ],
)
def test_obstacles_name_a_job_by_its_number_in_slurm_and_count_several(
    holders: tuple[int, ...], slurm: dict[int, int], name: str
) -> None:
    entries = [LedgerEntry(JobId(job), G) for job in holders]
    numbers = {JobId(job): number for job, number in slurm.items()}
    gpu = build_ledger(reading(), entries, {}, slurm=numbers)
    found = find_obstacle(Claim(G, exclusive=True), gpu)
    assert found is not None
    assert found.why == f"{name} a lease on it"


def test_a_job_without_a_lease_there_is_named_too() -> None:
    seen = reading(used=6 * G, processes=(ProcessReading(5, 6 * G),))
    gpu = build_ledger(seen, [], {5: JobId(3)}, slurm={JobId(3): 7})
    found = find_obstacle(Claim(G, exclusive=True), gpu)
    assert mentions(found and found.why, "job 7 of Slurm")
