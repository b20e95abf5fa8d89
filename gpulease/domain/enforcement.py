"""The enforcement levels of a lease, and what is known of the framework hook in a job.

Levels range from limits of the driver to hooks that a program could evade. Other modules find out
which levels a machine has; this one orders them and notes them on leases. How a process was started
decides whether the hook covers it.

The daemon gives every job the hooks. Only a report of a hook shows that it limits anything: a
program may use no framework, a framework of an unknown version, or start a Python that loads no
hook. So a lease counts as limited by its framework from the first such report on, until something
contradicts it. Users control the reports of their own jobs. They affect what is shown, and whether
a bounded excess over a lease counts as overhead (domain/overuse.py).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Final

from gpulease.domain.gpu import GpuUuid
from gpulease.domain.job import Job


class EnforcementLevel(StrEnum):
    """A mechanism that keeps a job within its lease; listed in this order everywhere."""

    DRIVER = "driver"
    """The driver's memory limit on the job's cgroup: an allocation beyond it fails."""
    FRAMEWORK = "framework"
    """The framework hooks in the job's processes: programs that do not evade them stay inside."""
    WATCH = "watch"
    """gpulease compares the memory in use with the lease, and warns or stops the job."""
    DEVICES = "devices"
    """The device rules of the job's scope: it cannot open a GPU that it did not lease."""


@dataclass(frozen=True, slots=True)
class AppliedEnforcement:
    """The enforcement set up for a job before its first process started."""

    devices: bool = False
    """The device rules of its scope are in force."""
    limits: Mapping[GpuUuid, int] = field(default_factory=dict)
    """The driver's limit in bytes by GPU, as read back."""
    missing: tuple[str, ...] = ()
    """The levels that this machine has and the job did not get: a sentence each."""


_NOTHING = AppliedEnforcement()


def in_level_order(levels: Iterable[str]) -> tuple[str, ...]:
    """Return each level once, in the order of `EnforcementLevel`; unknown names come last."""
    given = dict.fromkeys(levels)
    known = [level.value for level in EnforcementLevel if level.value in given]
    return (*known, *(name for name in given if name not in known))


def with_watch_level(levels: Iterable[str], *, stops: bool) -> tuple[str, ...]:
    """Return `levels` with WATCH if the watch `stops` jobs, else without it.

    The levels were noted at the launch for all users, and settings may have changed since.
    """
    others = (level for level in levels if level != EnforcementLevel.WATCH)
    return in_level_order((*others, EnforcementLevel.WATCH.value) if stops else others)


def with_enforcement(
    job: Job, everywhere: Collection[str], applied: AppliedEnforcement = _NOTHING
) -> Job:
    """Return `job` with the levels of each lease noted.

    `everywhere` are the levels of all leases on this machine.
    """
    leases = []
    for lease in job.leases:
        limit = applied.limits.get(lease.gpu)
        levels = set(everywhere)
        if limit is not None:
            levels.add(EnforcementLevel.DRIVER)
        if applied.devices:
            levels.add(EnforcementLevel.DEVICES)
        leases.append(replace(lease, enforced_by=in_level_order(levels), driver_limit=limit))
    return replace(job, leases=tuple(leases))


def with_driver_limits(job: Job, limits: Mapping[GpuUuid, int | None]) -> Job:
    """Return `job` with the driver's limits of some leases, in bytes by GPU; None for no limit."""
    leases = []
    for lease in job.leases:
        if lease.gpu not in limits:
            leases.append(lease)
            continue
        levels = set(lease.enforced_by or ()) - {EnforcementLevel.DRIVER}
        limit = limits[lease.gpu]
        found = levels | {EnforcementLevel.DRIVER} if limit is not None else levels
        leases.append(replace(lease, enforced_by=in_level_order(found), driver_limit=limit))
    return replace(job, leases=tuple(leases))


HOOK: Final = "GPULEASE_HOOK"
PATH: Final = "PYTHONPATH"
UNCOVERED: Final = "is not limited by the framework hook"
"""A part of every sentence about an uncovered process."""
_WITHOUT_HOOK: Final = {
    "I": "it runs with -I, which ignores PYTHONPATH",
    "E": "it runs with -E, which ignores PYTHONPATH",
    "S": "it runs with -S, without the site module that loads the hook",
}
_TAKES_A_VALUE: Final = ("W", "X")
_BEGINS_THE_PROGRAM: Final = ("c", "m")
_LONG_WITH_A_VALUE: Final = "--check-hash-based-pycs"


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """How a process was started, as far as the hook depends on it."""

    command: Sequence[str]
    environment: Mapping[str, str] | None
    """HOOK and PATH, as far as they are set; None if the environment cannot be read."""
    is_python: bool
    container: str | None = None


@dataclass(frozen=True, slots=True)
class UncoveredProcess:
    """A process of a job that uses a GPU and is not covered by the hook."""

    pid: int
    command: str
    why: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}) {UNCOVERED}: {self.why}"


def why_uncovered(start: ProcessStart, hooks: str) -> str | None:
    """Return why the hook in the folder `hooks` does not cover a process.

    None if it does, or if that is not known.
    """
    if start.environment is None:
        return None
    if start.container is not None and HOOK not in start.environment:
        return f"it is in container {start.container}, which does not have the job's environment"
    if HOOK not in start.environment:
        return "it was started without the job's environment (env -i, sudo and the like)"
    if not start.is_python:
        return "it is not Python"
    if hooks not in start.environment.get(PATH, "").split(":"):
        return "its PYTHONPATH does not contain the hook"
    return next(
        (_WITHOUT_HOOK[flag] for flag in _flags(start.command) if flag in _WITHOUT_HOOK), None
    )


def _flags(command: Sequence[str]) -> str:
    """Return the letters of Python's options before the program; see python(1)."""
    flags, words = "", iter(command[1:])
    for word in words:
        if word.startswith("--"):
            if word == _LONG_WITH_A_VALUE:
                next(words, None)
            continue
        letters, rest = _letters(word)
        flags += letters
        if rest is None or rest.startswith(_BEGINS_THE_PROGRAM):
            break
        if rest in _TAKES_A_VALUE:
            next(words, None)  # the value is the next word
    return flags


def _letters(word: str) -> tuple[str, str | None]:
    """Return the flags in a word and the rest after them; None as the rest for no option."""
    if not word.startswith("-") or word == "-":
        return "", None
    for place, letter in enumerate(word[1:], 1):
        if letter in (*_TAKES_A_VALUE, *_BEGINS_THE_PROGRAM):
            return word[1:place], word[place:]
    return word[1:], ""


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
