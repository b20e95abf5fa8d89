"""How many jobs on several GPUs get linked ones, what that costs, and whether others wait for it.

Jobs on one, two and four GPUs arrive at random on a machine of eight, and start in their order as
far as they fit. The same arrivals are placed with and without the links.
"""

import heapq
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.timing import paired
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId, LedgerEntry, build_ledger
from gpulease.domain.lease import Claim
from gpulease.domain.links import fewest_nvlinks
from gpulease.domain.placement import Placement, granted, place
from gpulease.units import GIB

_TESTS = Path(__file__).parents[1] / "tests"
ARRIVALS = 4000
_APART_S, _LENGTH_S = 1500.0, 3600.0
"""Means of exponential distributions; the machine is busy for about two thirds."""
_WIDTHS, _SHARES = (1, 2, 4), (50, 30, 20)
_SIZES = (80 * GIB, 80 * GIB, 40 * GIB, 20 * GIB)
_GOAL, _GOAL_COST = 1.1, 8.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job."""

    at_s: float
    length_s: float
    claim: Claim


@dataclass(slots=True)
class Result:
    """What became of the arrivals."""

    waits_s: list[float] = field(default_factory=list)
    linked: dict[int, list[bool]] = field(default_factory=dict)
    """Of each job, by its number of GPUs, whether each two of them are linked by NVLink."""


def arrivals(seed: int) -> list[Arrival]:
    """Return the jobs, the earliest first."""
    chance, at_s, found = random.Random(seed), 0.0, []
    for _ in range(ARRIVALS):
        at_s += chance.expovariate(1 / _APART_S)
        claim = Claim(chance.choice(_SIZES), chance.choices(_WIDTHS, _SHARES)[0])
        found.append(Arrival(at_s, chance.expovariate(1 / _LENGTH_S), claim))
    return found


def simulate(jobs: Sequence[Arrival], gpus: Sequence[GpuReading], known: bool) -> Result:
    """Run all jobs; the links decide where they run if they are `known`."""
    shown = gpus if known else [replace(gpu, links=()) for gpu in gpus]
    readings = {gpu.uuid: gpu for gpu in gpus}
    ledgers = {gpu.uuid: build_ledger(gpu, (), {}) for gpu in shown}
    result, waiting = Result(), list[tuple[JobId, Arrival]]()
    ends: list[tuple[float, JobId, Placement]] = []
    coming = [(JobId(number), each) for number, each in enumerate(jobs, 1)][::-1]
    while coming or ends:
        if not ends or (coming and coming[-1][1].at_s <= ends[0][0]):
            now_s = coming[-1][1].at_s
            waiting.append(coming.pop())
        else:
            now_s, ended, placement = heapq.heappop(ends)
            for uuid, _ in placement.allocations:
                left = tuple(each for each in ledgers[uuid].entries if each.job != ended)
                ledgers[uuid] = build_ledger(ledgers[uuid].reading, left, {})
        for job in [*waiting]:
            found = place(job[1].claim, [*ledgers.values()])
            if isinstance(found, Placement):
                waiting.remove(job)
                for uuid, memory in found.allocations:
                    ledgers[uuid] = granted(job[0], job[1].claim, memory, ledgers[uuid])
                heapq.heappush(ends, (now_s + job[1].length_s, job[0], found))
                result.waits_s.append(now_s - job[1].at_s)
                some = [readings[uuid] for uuid, _ in found.allocations]
                result.linked.setdefault(len(some), []).append(fewest_nvlinks(some) > 0)
    return result


def _share(result: Result, width: int) -> float:
    return 100 * statistics.fmean(result.linked[width])


def _cost_ms(gpus: Sequence[GpuReading]) -> tuple[float, float]:
    """Return the milliseconds of placing four GPUs with the links and without."""
    claim = Claim(GIB, 4)
    used = [GIB * (1 + index % 3) for index in range(len(gpus))]

    def ledgers(shown: Sequence[GpuReading]) -> list[object]:
        return [
            build_ledger(gpu, [LedgerEntry(JobId(1), size)], {})
            for gpu, size in zip(shown, used, strict=True)
        ]

    linked, bare = ledgers(gpus), ledgers([replace(gpu, links=()) for gpu in gpus])
    seconds = paired(lambda: place(claim, linked), lambda: place(claim, bare), 200)
    return seconds[0] * 1e3, seconds[1] * 1e3


def _twice(gpus: Sequence[GpuReading]) -> list[GpuReading]:
    """Return a machine with two such boards, which nothing links."""
    second = [
        replace(
            gpu,
            uuid=GpuUuid(f"{gpu.uuid}-b"),
            index=gpu.index + len(gpus),
            links=tuple(replace(link, gpu=GpuUuid(f"{link.gpu}-b")) for link in gpu.links),
        )
        for gpu in gpus
    ]
    return [*gpus, *second]


def run() -> Iterator[Figure | str]:
    sys.path.insert(0, str(_TESTS))
    from topologies import TOPOLOGIES, readings

    for name in TOPOLOGIES:
        gpus, jobs = readings(name), arrivals(1)
        before, after = simulate(jobs, gpus, known=False), simulate(jobs, gpus, known=True)
        waits = [statistics.fmean(each.waits_s) / 60 for each in (after, before)]
        yield Figure(f"{name}, mean wait", waits[0], "min", _GOAL, waits[1], "without links")
        shares = [f"{_share(each, n):.0f}" for n in (2, 4) for each in (after, before)]
        late = [sum(wait > 0 for wait in each.waits_s) for each in (after, before)]
        yield (
            f"all GPUs linked, with and without regard to links: of pairs {shares[0]} and "
            f"{shares[1]} %, of fours {shares[2]} and {shares[3]} %; jobs that wait: "
            f"{late[0]} and {late[1]}"
        )
    mesh = readings("DGX-1 mesh")
    for gpus in (mesh, _twice(mesh)):
        linked_ms, bare_ms = _cost_ms(gpus)
        yield Figure(
            f"placing 4 of {len(gpus)} GPUs", linked_ms, "ms", _GOAL_COST, bare_ms, "without links"
        )
