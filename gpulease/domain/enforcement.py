"""What holds a job to its leases: the rungs of a ladder, from a wall down to an agreement.

Which rungs a machine has is found out by others; here is what they are called, in their order, and
how a job's leases come to stand on them.

Whether the framework hook has reached a process, by how the process was started.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from gpulease.domain.gpu import GpuUuid
from gpulease.domain.job import Job


class EnforcementLevel(StrEnum):
    """One of the things that hold a job to its lease; in this order wherever they are shown."""

    DRIVER = "driver"
    """The driver's limit on the job's cgroup: an allocation beyond it fails."""
    FRAMEWORK = "framework"
    """The hooks in the job's own processes: honest programs stay inside."""
    WATCH = "watch"
    """What is used is compared with the lease, and something is done about it."""
    DEVICES = "devices"
    """The scope's device rules: a GPU that was not leased cannot be opened."""


@dataclass(frozen=True, slots=True)
class AppliedEnforcement:
    """What was put around a job before the first of its processes."""

    devices: bool = False
    """Its scope's device rules are in force."""
    limits: Mapping[GpuUuid, int] = field(default_factory=dict)
    """The bytes to which the driver keeps it, by GPU, as read back."""
    missing: tuple[str, ...] = ()
    """What this machine has and the job has not, a sentence each."""


_NOTHING = AppliedEnforcement()


def in_level_order(rungs: Iterable[str]) -> tuple[str, ...]:
    """Return each rung once, in the order of the ladder; what has another name comes last."""
    given = dict.fromkeys(rungs)
    known = [rung.value for rung in EnforcementLevel if rung.value in given]
    return (*known, *(name for name in given if name not in known))


def with_watch_level(rungs: Iterable[str], *, stops: bool) -> tuple[str, ...]:
    """Return `rungs` with the watch among them if it `stops` jobs, and without it if not.

    What was noted at the launch holds for all users, and the settings may have changed since.
    """
    others = (rung for rung in rungs if rung != EnforcementLevel.WATCH)
    return in_level_order((*others, EnforcementLevel.WATCH.value) if stops else others)


def with_enforcement(
    job: Job, everywhere: Collection[str], enclosed: AppliedEnforcement = _NOTHING
) -> Job:
    """Return `job` with what holds each of its leases noted.

    `everywhere` are the rungs that all leases of this machine stand on.
    """
    leases = []
    for lease in job.leases:
        limit = enclosed.limits.get(lease.gpu)
        rungs = set(everywhere)
        if limit is not None:
            rungs.add(EnforcementLevel.DRIVER)
        if enclosed.devices:
            rungs.add(EnforcementLevel.DEVICES)
        leases.append(replace(lease, enforced_by=in_level_order(rungs), driver_limit=limit))
    return replace(job, leases=tuple(leases))


def with_driver_limits(job: Job, limits: Mapping[GpuUuid, int | None]) -> Job:
    """Return `job` with the limits by the driver that some of its leases have now; None: none."""
    leases = []
    for lease in job.leases:
        if lease.gpu not in limits:
            leases.append(lease)
            continue
        rungs = set(lease.enforced_by or ()) - {EnforcementLevel.DRIVER}
        limit = limits[lease.gpu]
        held = rungs | {EnforcementLevel.DRIVER} if limit is not None else rungs
        leases.append(replace(lease, enforced_by=in_level_order(held), driver_limit=limit))
    return replace(job, leases=tuple(leases))


HOOK: Final = "GPULEASE_HOOK"
PATH: Final = "PYTHONPATH"
SAID: Final = "is not held by the framework hook"
"""What each sentence about a process that is not held has in it."""
_SHUT_OUT: Final = {
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
    """What it was given of HOOK and PATH; None where that cannot be read."""
    is_python: bool
    container: str | None = None


@dataclass(frozen=True, slots=True)
class UncoveredProcess:
    """A process of a job that uses a GPU, and that the hook does not hold."""

    pid: int
    command: str
    why: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}) {SAID}: {self.why}"


def why_uncovered(start: ProcessStart, hooks: str) -> str | None:
    """Return why the hook in the folder `hooks` has not reached a process; None: it has.

    None as well where there is no telling.
    """
    if start.environment is None:
        return None
    if start.container is not None:
        return f"it is in container {start.container}, where the hook is not known to be"
    if HOOK not in start.environment:
        return "it was started without the job's environment (env -i, sudo and the like)"
    if not start.is_python:
        return "it is not Python"
    if hooks not in start.environment.get(PATH, "").split(":"):
        return "its PYTHONPATH does not lead to the hook"
    return next((_SHUT_OUT[flag] for flag in _flags(start.command) if flag in _SHUT_OUT), None)


def _flags(command: Sequence[str]) -> str:
    """Return the letters of Python's own options: those before the program; see python(1)."""
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
            next(words, None)  # the value is a word of its own
    return flags


def _letters(word: str) -> tuple[str, str | None]:
    """Return the plain options in a word, and what ends them; None there: it is no option."""
    if not word.startswith("-") or word == "-":
        return "", None
    for place, letter in enumerate(word[1:], 1):
        if letter in (*_TAKES_A_VALUE, *_BEGINS_THE_PROGRAM):
            return word[1:place], word[place:]
    return word[1:], ""
