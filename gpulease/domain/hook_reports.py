"""What the framework hooks of a job limit, and what they could not.

The daemon gives every job the hooks. Only a report of a hook shows that it limits anything: a
program may use no framework, a framework of an unknown version, or start a Python that loads no
hook. So a lease counts as limited by its framework from the first such report on, until something
contradicts it. Users control the reports of their own jobs. They affect what is shown, and whether
a bounded excess over a lease counts as overhead (domain/overuse.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from gpulease.domain.enforcement import EnforcementLevel, in_level_order
from gpulease.domain.gpu import GpuUuid

MOST_REPORTS = 128
"""Reports kept for one job."""


class HookState(StrEnum):
    """What a hook did about one framework in one process."""

    LIMITED = "limited"
    FAILED = "failed"
    """It could not limit the framework."""
    ABSENT = "absent"
    """The process uses a GPU without the hook."""


@dataclass(frozen=True, slots=True)
class HookReport:
    """The state of the hook for one framework in one process."""

    pid: int
    framework: str
    """Empty if that is unknown, or for all frameworks."""
    version: str
    state: HookState
    at: datetime
    limits: tuple[tuple[GpuUuid, int | None], ...] = ()
    """Bytes of the pool by GPU; None: the pool has no size, as on simulated GPUs."""
    why: str | None = None
    """What failed, or why the hook is absent."""


Reports = tuple[HookReport, ...]


def with_report(known: Reports, new: HookReport, leased: Sequence[GpuUuid]) -> Reports:
    """Return the reports of a job with another one; the same object if it changes nothing.

    A process that was once not limited keeps that state. Each framework of a process has one
    report, which bounds what a user can add: the GPUs of `leased`, and `MOST_REPORTS` reports.
    Beyond that, only a failure is added, in place of a success.
    """
    limits = tuple((gpu, limit) for gpu, limit in new.limits if gpu in leased)
    new = replace(new, limits=tuple(dict(limits).items()))
    key = new.pid, new.framework
    for place, old in enumerate(known):
        if (old.pid, old.framework) == key:
            changed = _merged(old, new)
            return known if changed == old else (*known[:place], changed, *known[place + 1 :])
    if len(known) < MOST_REPORTS:
        return (*known, new)
    dropped = next((each for each in known if each.state is HookState.LIMITED), None)
    if new.state is HookState.LIMITED or dropped is None:
        return known
    return (*(each for each in known if each is not dropped), new)


def _merged(old: HookReport, new: HookReport) -> HookReport:
    if old.state is not HookState.LIMITED:
        return old
    if new.state is not HookState.LIMITED:
        return replace(new, limits=())
    # The first limit of a pool is the one that applies; other GPUs may follow.
    added = tuple(each for each in new.limits if each[0] not in dict(old.limits))
    return replace(old, limits=(*old.limits, *added))


def pool_limits(reports: Reports, gpu: GpuUuid) -> Mapping[int, Mapping[str, int]]:
    """Return the limit of each pool on a GPU in bytes, by process and framework.

    Leaves out a process in which a hook failed or is absent.
    """
    failed = {each.pid for each in reports if each.state is not HookState.LIMITED}
    found: dict[int, dict[str, int]] = {}
    for report in reports:
        limit = dict(report.limits).get(gpu)
        if limit is not None and report.pid not in failed:
            found.setdefault(report.pid, {})[report.framework] = limit
    return found


def is_limited(reports: Reports, gpu: GpuUuid, users: Iterable[int] = ()) -> bool:
    """Return whether the frameworks of a job are known to be limited on a GPU.

    `users` are the processes of the job that are on it.
    """
    limited = {each.pid for each in reports if gpu in dict(each.limits)}
    sound = all(each.state is HookState.LIMITED for each in reports)
    return bool(limited) and sound and limited.issuperset(users)


def as_reported(
    levels: Sequence[str], reports: Reports, gpu: GpuUuid, users: Iterable[int] = ()
) -> tuple[str, ...]:
    """Return the enforcement levels of a lease; FRAMEWORK only if a hook reported its limit.

    `users` are as in `is_limited`.
    """
    if is_limited(reports, gpu, users):
        return in_level_order(levels)
    return tuple(each for each in levels if each != EnforcementLevel.FRAMEWORK)


def summary(reports: Reports) -> str:
    """Return the state of the hooks of a job in one word: that of the report that matters most."""
    for state in (HookState.FAILED, HookState.ABSENT, HookState.LIMITED):
        if any(each.state is state for each in reports):
            return state.value
    return "none"
