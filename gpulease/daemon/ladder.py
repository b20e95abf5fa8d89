"""Which rungs of the ladder this machine has, and for each that it has not, why."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpulease.domain.enforcement import Rung, ladder
from gpulease.domain.memory import GpuReading
from gpulease.process import cgroups, device_rules, scopes
from gpulease.service.limiting import MemoryLimiter, NotLimited
from gpulease.service.look import Look
from gpulease.wire import RungView

FOREIGN_PIDS = (
    "this daemon has a pid namespace of its own, and the processes that the driver lists are not "
    "known to be of it"
)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What decides on the rungs and does not change while the daemon runs."""

    simulated: bool
    no_scopes: str | None
    """Why jobs are not put into scopes of their own; None: they are."""
    hooks_closed_at: Path | None
    """The directory that keeps users from the hooks."""


class Ladder:
    """Knows the rungs; asks the driver about its own when it is another driver than before."""

    def __init__(
        self,
        around: Circumstances,
        limiter: MemoryLimiter | None,
        driver: Callable[[], str | None],
        *,
        driver_limits: bool = True,
        watch: Callable[[], bool] = lambda: False,
        watch_varies: Callable[[], bool] = lambda: False,
    ) -> None:
        """`limiter` is that of the real driver; `driver_limits` whether it is to be used."""
        self.driver_limits = driver_limits
        self.watch = watch
        self.watch_varies = watch_varies
        self.watch_is_blind: Callable[[], bool] = lambda: False
        self._around = around
        self._limiter = limiter
        self._driver = driver
        self._asked: tuple[str | None, dict[str, str | None]] | None = None
        """Of which driver, and by the label of each GPU its obstacle to limits."""

    @property
    def everywhere(self) -> tuple[str, ...]:
        """The rungs on which all leases stand that are granted now."""
        has = {
            Rung.FRAMEWORK: self._framework()[0],
            Rung.WATCH: self.watch() and not self.watch_is_blind(),
        }
        return ladder(rung for rung, there in has.items() if there)

    def limiter(self) -> MemoryLimiter | None:
        """Return what sets the driver's limits, or None if there is no use in trying."""
        return self._limiter if self._no_driver_limit() is None else None

    async def ask(self, seen: Look) -> None:
        """Find out what the driver can do, if that is not known of this one."""
        if self._limiter is None or not self._is_worth_asking(seen):
            return
        version, cgroup = self._driver(), cgroups.own_directory()
        if cgroup is None:
            return
        answers: dict[str, str | None] = {}
        for reading in _leasable(seen):
            with suppress(NotLimited):  # no answer now: there is another look
                answers[reading.label] = await asyncio.to_thread(
                    self._limiter.obstacle, reading.uuid, cgroup
                )
        self._asked = version, answers

    def _is_worth_asking(self, seen: Look) -> bool:
        there = {reading.label for reading in _leasable(seen)}
        if self._asked is None or self._asked[0] != self._driver():
            return bool(there)
        return not there <= self._asked[1].keys()

    def rungs(self) -> list[RungView]:
        """Return each rung, and what there is to say of it."""
        said = {
            Rung.DRIVER: self._driver_rung(),
            Rung.FRAMEWORK: self._framework(),
            Rung.WATCH: self._watch_rung(),
            Rung.DEVICES: self._devices(),
        }
        varies = {Rung.WATCH} if self.watch_varies() else set()
        return [RungView(rung.value, *said[rung], varies=rung in varies) for rung in Rung]

    def _driver_rung(self) -> tuple[bool, str]:
        why = self._no_driver_limit()
        if why is not None:
            return False, why
        if not self._answers():
            return False, "the driver has not said yet whether it has memory limits"
        refusing = {label: each for label, each in self._answers().items() if each is not None}
        but = "".join(f", but not on GPU {label}: {each}" for label, each in refusing.items())
        return True, f"an allocation beyond the lease fails, in whatever program{but}"

    def _no_driver_limit(self) -> str | None:
        """Return why there are no limits by the driver; None also where some GPU has them."""
        no_scopes = self._around.no_scopes
        obstacles = {
            "simulated GPUs have no driver": self._limiter is None,
            "turned off by driver_limits": not self.driver_limits,
            "only root can set them": os.geteuid() != 0,
            f"no scope, so no driver limit: {no_scopes}": no_scopes is not None,
            "there are no cgroups of version 2 here": not cgroups.has_version_2(),
        }
        for why, stands in obstacles.items():
            if stands:
                return why
        answers = [each for each in self._answers().values() if each is not None]
        all_refuse = len(answers) == len(self._answers())
        return "; ".join(dict.fromkeys(answers)) if answers and all_refuse else None

    def _answers(self) -> dict[str, str | None]:
        return self._asked[1] if self._asked is not None else {}

    def _framework(self) -> tuple[bool, str]:
        if self._around.simulated:
            return False, "on simulated GPUs the hooks limit nothing"
        if self._around.hooks_closed_at is not None:
            return False, f"users cannot read the hooks: {self._around.hooks_closed_at} is closed"
        return True, "hooks keep honest programs in; not every framework and process is reached"

    def _watch_rung(self) -> tuple[bool, str]:
        but = ", unless a table in the settings says otherwise" if self.watch_varies() else ""
        if self.watch_is_blind():
            return False, f"what a job uses is not known: {FOREIGN_PIDS}"
        if self.watch():
            return True, f"a job that stays over its lease is told so, and then stopped{but}"
        why = "a job that is over its lease is told so, and not stopped (overuse = warn)"
        return False, f"{why}{but}"

    def _devices(self) -> tuple[bool, str]:
        if self._around.simulated:
            return False, "simulated GPUs have no devices"
        if self._around.no_scopes is not None:
            return False, f"a job can open every GPU: {self._around.no_scopes}"
        own = cgroups.own_directory()
        if own is not None and device_rules.kernel_has_them(own) is False:
            return False, "a job can open every GPU: this kernel has no CONFIG_CGROUP_BPF"
        return True, "a job can open its own GPUs alone"


def _leasable(seen: Look) -> list[GpuReading]:
    """Return the GPUs that can be read, and of one that MIG divides its MIG devices alone."""
    return [each for each in seen.readings if each.fault is None and not each.divided]


def why_no_scopes(confined: bool) -> str | None:
    """Return why jobs are not put into scopes of their own, or None if they are.

    `confined` says that this is the system's service.
    """
    if not scopes.is_to_be_had():
        return "systemd does not run here"
    if os.geteuid() != 0:
        return "a personal daemon makes no scopes"
    return None if confined else "gpuleased was not started by its systemd unit"
