"""Acts on the health of GPUs: records faults, drains faulty GPUs, and notifies owners of jobs."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from gpulease.domain.gpu import Fault, GpuReading, GpuUuid, JobId
from gpulease.domain.health import (
    Finding,
    GpuAvailability,
    GpuEvent,
    GpuModes,
    HealthAction,
    HealthFigures,
    HealthReport,
    after_findings,
    findings,
    is_over,
    notice,
    quiet_after,
    without_stale_acceptance,
)
from gpulease.domain.xid import Blame
from gpulease.service.drains import NotifyAdmins, no_notification
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock, GpuProbe, InThread, Store, Transaction

NotifyOwner = Callable[[JobId, str], Awaitable[None]]
_log = logging.getLogger(__name__)

_RELAPSE_WITHIN = timedelta(days=1)
_MOST_EVENTS = 10_000
_NOTIFY_AGAIN_AFTER = timedelta(minutes=10)
"""The shortest time between two notices of one kind of fault to the owner of a job."""
_STORE_AGAIN_AFTER = timedelta(seconds=10)
"""Repetitions of a stored kind of fault are stored no more often, unless they drain a GPU."""
FAULTY, RECOVERED = "faulty", "recovered"
"""Kinds of events in the history of a GPU."""


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """The admin's settings for hardware faults."""

    act: HealthAction = HealthAction.DRAIN
    quiet_for: timedelta = timedelta(minutes=10)
    """Time without a fault before a drained GPU resumes."""


@dataclass(frozen=True, slots=True)
class _NewFindings:
    """New findings about one GPU, to be stored."""

    gpu: GpuReading
    found: tuple[Finding, ...]
    at: datetime

    def then(self, later: "_NewFindings") -> "_NewFindings":
        """Return these and later findings; equal ones are counted."""
        counts: Counter[Finding] = Counter()
        for each in (*self.found, *later.found):
            counts[replace(each, count=0)] += each.count
        found = tuple(replace(each, count=count) for each, count in counts.items())
        return _NewFindings(later.gpu, found, later.at)


class HealthWatch:
    """Watches the health of the GPUs.

    Gets each observation of the sampling timer, reads memory faults and XIDs from the probe, which
    never blocks, and writes only if something is new.
    """

    def __init__(
        self,
        store: Store,
        probe: GpuProbe,
        clock: Clock,
        policy: HealthPolicy,
        notify_owner: NotifyOwner,
        *,
        wake: Callable[[], None],
        in_writer: InThread,
        in_observer: InThread,
        notify_admins: NotifyAdmins = no_notification,
    ) -> None:
        self._notify_admins = notify_admins
        self.policy = policy
        self.figures: dict[GpuUuid, HealthFigures] = {}
        """The latest figures of each GPU."""
        self.listens: dict[GpuUuid, bool] = {}
        """Whether the driver reports XID events of each GPU."""
        self.modes: dict[GpuUuid, GpuModes] = {}
        self.faults: Counter[tuple[GpuUuid, str, Blame]] = Counter()
        """How often each kind of fault was stored."""
        self._store = store
        self._probe = probe
        self._clock = clock
        self._notify_owner = notify_owner
        self._wake = wake
        self._in_writer = in_writer
        self._in_observer = in_observer
        self._lost: set[GpuUuid] = set()
        self._well_since: dict[GpuUuid, timedelta] = {}
        self._unwritten: dict[GpuUuid, _NewFindings] = {}
        self._stored_at: dict[tuple[GpuUuid, str], timedelta] = {}
        self._notified_at: dict[tuple[JobId, str], timedelta] = {}

    async def observe(self, seen: Observation) -> None:
        """Act on what was reported since the last observation.

        Raises:
            RecordUnwritable: it cannot be stored now; the next observation is a new attempt.
        """
        is_off = self.policy.act is HealthAction.OFF
        heard, availabilities = await self._in_observer(
            lambda: (() if is_off else self._probe.health(), self._store.availabilities())
        )
        there = {reading.uuid: reading for reading in seen.readings}
        for each in () if is_off else self._new_in(there, heard, seen.at):
            before = self._unwritten.get(each.gpu.uuid)
            self._unwritten[each.gpu.uuid] = each if before is None else before.then(each)
        moves = any(self._next(*each, seen.at) != each[1] for each in availabilities.items())
        if not moves and not self._has_due():
            return
        news = list(self._unwritten.values())
        await self._in_writer(partial(self._store_news, news, seen.at))
        self._unwritten.clear()
        self._note_stored(news)
        self._wake()
        for each in news:
            await self._notify(each, there)

    def _has_due(self) -> bool:
        """Return whether findings must be stored now.

        A program can cause thousands of XIDs a minute. Repetitions are stored after a while, so
        that many of them do not cause a transaction at each observation.
        """
        now = self._clock.steady()
        recent = {key for key, at in self._stored_at.items() if now - at < _STORE_AGAIN_AFTER}
        return any(
            each.blame is Blame.HARDWARE or (gpu, each.kind) not in recent
            for gpu, news in self._unwritten.items()
            for each in news.found
        )

    def _note_stored(self, news: Sequence[_NewFindings]) -> None:
        now = self._clock.steady()
        self._stored_at = {
            key: at for key, at in self._stored_at.items() if now - at < _STORE_AGAIN_AFTER
        }
        for each in news:
            for found in each.found:
                if found.blame is not Blame.UNKNOWN:
                    self.faults[each.gpu.uuid, found.kind, found.blame] += found.count
            self._stored_at |= {(each.gpu.uuid, found.kind): now for found in each.found}

    def _new_in(
        self, there: Mapping[GpuUuid, GpuReading], heard: Sequence[HealthReport], at: datetime
    ) -> list[_NewFindings]:
        found: dict[GpuUuid, tuple[Finding, ...]] = {}
        for each in heard:
            found[each.gpu] = found.get(each.gpu, ()) + findings(each, self.figures.get(each.gpu))
            if each.figures is not None:
                self.figures[each.gpu] = each.figures
            if each.modes is not None:
                self.modes[each.gpu] = each.modes
            if each.listens is not None:
                self.listens[each.gpu] = each.listens
        for uuid, reading in there.items():
            found[uuid] = self._bus(reading) + found.get(uuid, ())
        return [
            _NewFindings(there[uuid], new, at)
            for uuid, new in found.items()
            if new and uuid in there
        ]

    def _bus(self, reading: GpuReading) -> tuple[Finding, ...]:
        """Note whether a GPU is on the bus, and return what is new about that."""
        if reading.fault is None:
            self._well_since.setdefault(reading.uuid, self._clock.steady())
            if reading.uuid in self._lost:
                self._lost.discard(reading.uuid)
                return (Finding("back", "it can be read again", Blame.UNKNOWN),)
            return ()
        self._well_since.pop(reading.uuid, None)
        if reading.fault is Fault.LOST and reading.uuid not in self._lost:
            self._lost.add(reading.uuid)
            return (Finding("lost", reading.detail or "it fell off the bus", Blame.GONE),)
        return ()

    def _store_news(self, news: Sequence[_NewFindings], at: datetime) -> None:
        with self._store.write() as tx:
            before = tx.availabilities()
            availabilities = dict(before)
            tx.add_gpus([each.gpu for each in news], at)
            for each in news:
                self._store_one(tx, each, availabilities)
            for gpu, availability in availabilities.items():
                fresh = self._next(gpu, availability, at)
                if fresh != availability:
                    tx.set_availability(gpu, fresh)
                label = next((each.gpu.label for each in news if each.gpu.uuid == gpu), gpu)
                self._notify_admins(tx, label, before.get(gpu, GpuAvailability()), fresh)
                if fresh.hardware_fault is not availability.hardware_fault:
                    self._note_recovered(tx, gpu, at)

    def _store_one(
        self, tx: Transaction, news: _NewFindings, availabilities: dict[GpuUuid, GpuAvailability]
    ) -> None:
        gpu = news.gpu.uuid
        for each in news.found:
            tx.note_gpu(GpuEvent(gpu, news.at, each.kind, each.what, each.count))
            times = f", {each.count} times" if each.count > 1 else ""
            _log.warning("GPU %s (%s): %s%s", news.gpu.label, gpu, each.what, times)
        before = availabilities.get(gpu, GpuAvailability())
        availability = after_findings(before, news.found, news.at)
        if self.policy.act is not HealthAction.DRAIN or availability == before:
            return
        availabilities[gpu] = availability
        tx.set_availability(gpu, availability)
        if before.hardware_fault is None and availability.hardware_fault is not None:
            tx.note_gpu(GpuEvent(gpu, news.at, FAULTY, str(availability.hardware_fault)))
            _log.warning("GPU %s is drained: %s", news.gpu.label, availability.hardware_fault.why)

    def _next(self, gpu: GpuUuid, availability: GpuAvailability, at: datetime) -> GpuAvailability:
        """Return the availability after the end of faults, and of exemptions from them."""
        figures = self.figures.get(gpu)
        if figures is not None:
            availability = without_stale_acceptance(availability, figures)
        return (
            replace(availability, hardware_fault=None)
            if self._is_over(gpu, availability, at)
            else availability
        )

    def _is_over(self, gpu: GpuUuid, availability: GpuAvailability, at: datetime) -> bool:
        """Return whether a GPU need not be drained for a fault any more."""
        well_since, figures = self._well_since.get(gpu), self.figures.get(gpu)
        if availability.hardware_fault is None or self.policy.act is not HealthAction.DRAIN:
            return True
        if well_since is None:
            return False
        well_for = min(at - availability.hardware_fault.at, self._clock.steady() - well_since)
        # Read the history, which may lengthen the time, only after the shortest time.
        return is_over(availability, figures, well_for, self.policy.quiet_for) and is_over(
            availability, figures, well_for, self._quiet_for(gpu, at)
        )

    def _quiet_for(self, gpu: GpuUuid, at: datetime) -> timedelta:
        past = self._store.gpu_events(at - _RELAPSE_WITHIN, _MOST_EVENTS)
        faults = sum(each.count for each in past if (each.gpu, each.kind) == (gpu, FAULTY))
        return quiet_after(self.policy.quiet_for, max(0, faults - 1))

    def _note_recovered(self, tx: Transaction, gpu: GpuUuid, at: datetime) -> None:
        drains = self.policy.act is HealthAction.DRAIN
        why = "no new fault for a while" if drains else f"the setting health is {self.policy.act}"
        tx.note_gpu(GpuEvent(gpu, at, RECOVERED, f"no longer drained by gpulease: {why}"))
        _log.warning("GPU %s is no longer drained by gpulease: %s", gpu, why)

    async def _notify(self, news: _NewFindings, there: Mapping[GpuUuid, GpuReading]) -> None:
        """Notify the owners of the jobs on a GPU and its MIG devices."""
        mig_devices = {
            reading.uuid for reading in there.values() if reading.parent == news.gpu.uuid
        }
        affected = {news.gpu.uuid, *mig_devices}
        jobs = [
            job.id
            for job in self._store.holding()
            if any(lease.gpu in affected for lease in job.leases)
        ]
        now = self._clock.steady()
        self._notified_at = {
            key: at for key, at in self._notified_at.items() if now - at < _NOTIFY_AGAIN_AFTER
        }
        for each in news.found:
            text = notice(news.gpu.label, each)
            for job in jobs if text is not None else ():
                if (job, each.kind) not in self._notified_at:
                    self._notified_at[job, each.kind] = now
                    await self._notify_owner(job, text or "")
