"""What a job gets of the machine beside its GPUs: its cores, and its share where others want them.

A job that leases cores runs on these alone. A job that leases none has a share that only counts
when the machine is full: the part of the machine that belongs to its GPUs, times the part of them
that it leases.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_HIGHEST_WEIGHT: Final = 10_000
"""Of cpu.weight, see linux/Documentation/admin-guide/cgroup-v2.rst; 1 is the lowest."""
_OF_A_CORE: Final = 100
_OF_A_LEASED_CORE: Final = 1000
"""Jobs that lease no cores run on these as well, and get about a tenth of them."""


@dataclass(frozen=True, slots=True)
class HostShare:
    """What a job gets of the CPUs and of the RAM when others want all of them."""

    weight: int
    """Of its cgroup among those of other jobs."""
    protected: int
    """Bytes of RAM that the kernel takes back last."""


def host_share(
    parts: Iterable[float],
    gpus: int,
    machine: tuple[int, int],
    leased: tuple[int | None, int | None],
) -> HostShare:
    """Return the share of a job.

    Args:
        parts: the leased part of each of its GPUs, 0 to 1.
        gpus: how many GPUs the machine has.
        machine: its cores, and the bytes of its RAM.
        leased: the cores and the bytes of RAM that the job leases; None for none.
    """
    (cores, ram), (own_cores, own_ram) = machine, leased
    part = min(1.0, sum(parts) / max(gpus, 1))
    scale = min(1.0, _HIGHEST_WEIGHT / (_OF_A_CORE * cores))
    weight = _OF_A_CORE * part * cores * scale
    if own_cores is not None:
        weight = _OF_A_LEASED_CORE * own_cores * scale
    protected = round(part * ram) if own_ram is None else own_ram
    return HostShare(min(max(round(weight), 1), _HIGHEST_WEIGHT), protected)


def choose_cores(
    count: int,
    online: Collection[int],
    near: Collection[int],
    others: Iterable[Collection[int]],
    siblings: Mapping[int, int],
) -> tuple[int, ...]:
    """Return `count` of the `online` CPUs in ascending order, or all if there are no more.

    CPUs that few of the `others`, the sets of running jobs, have come first; then those `near` the
    GPUs of the job; then those whose physical core no other job uses. `siblings` has the first CPU
    of the core of each: hardware threads of a core are given together.
    """
    holders: dict[int, int] = dict.fromkeys(online, 0)
    busy: dict[int, int] = {}
    for held in others:
        for cpu in held:
            holders[cpu] = holders.get(cpu, 0) + 1
            core = siblings.get(cpu, cpu)
            busy[core] = busy.get(core, 0) + 1

    def rank(cpu: int) -> tuple[int, bool, int, int, int]:
        core = siblings.get(cpu, cpu)
        return holders[cpu], cpu not in near, busy.get(core, 0), core, cpu

    return tuple(sorted(sorted(online, key=rank)[:count]))
