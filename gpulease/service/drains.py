"""What admins order: GPUs that take no more leases, and a queue that starts no more jobs.

Running jobs continue. Each order is one transaction.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gpulease.domain.gpu import GpuReading, JobId
from gpulease.domain.health import Drain, GpuAvailability, GpuEvent
from gpulease.domain.queue_options import QueuePause
from gpulease.service.ports import Clock, InThread, Store, Transaction

NotifyAdmins = Callable[[Transaction, str, GpuAvailability, GpuAvailability], None]
"""Stores a message about the availability of a GPU, named as people know it, before and after."""


def no_notification(_: object, __: object, ___: object, ____: object) -> None:
    """Notify nobody."""


@dataclass(frozen=True, slots=True)
class DrainResult:
    """The availability of a GPU after drain or resume, and whether that changed it."""

    gpu: GpuReading
    availability: GpuAvailability
    changed: bool
    jobs: tuple[JobId, ...]
    """Jobs with a lease on the GPU, which continue."""


class Drains:
    """Drains and resumes GPUs, and wakes the scheduler."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        in_writer: InThread,
        wake: Callable[[], None],
        notify_admins: NotifyAdmins = no_notification,
    ) -> None:
        self._notify_admins = notify_admins
        self._store = store
        self._clock = clock
        self._in_writer = in_writer
        self._wake = wake

    async def drain(self, gpu: GpuReading, by: str, why: str) -> DrainResult:
        """Stop granting leases on `gpu`; its jobs continue. A repetition changes nothing."""
        return await self._change(gpu, by, lambda before, drain: before.drained(drain), why)

    async def resume(self, gpu: GpuReading, by: str) -> DrainResult:
        """Grant leases on `gpu` again, also if gpulease drained it for a fault."""
        return await self._change(gpu, by, lambda before, _: before.resumed())

    async def _change(
        self,
        gpu: GpuReading,
        by: str,
        change: Callable[[GpuAvailability, Drain], GpuAvailability],
        why: str = "",
    ) -> DrainResult:
        done = await self._in_writer(lambda: self._store_change(gpu, Drain(by, why), change))
        self._wake()
        return done

    def _store_change(
        self,
        gpu: GpuReading,
        drain: Drain,
        change: Callable[[GpuAvailability, Drain], GpuAvailability],
    ) -> DrainResult:
        with self._store.write() as tx:
            at = self._clock.now()
            before = tx.availabilities().get(gpu.uuid, GpuAvailability())
            after = change(before, Drain(drain.by, drain.why, at))
            changed = after.reason != before.reason
            if changed:
                tx.add_gpus([gpu], at)
                tx.set_availability(gpu.uuid, after)
                is_drained = after.drain is not None
                kind = "drained" if is_drained else "resumed"
                what = str(after.drain) if is_drained else f"resumed by {drain.by}"
                tx.note_gpu(GpuEvent(gpu.uuid, at, kind, what))
                self._notify_admins(tx, gpu.label, before, after)
            jobs = tuple(
                job.id
                for job in tx.live()
                if job.holds_memory and any(lease.gpu == gpu.uuid for lease in job.leases)
            )
        return DrainResult(gpu, after, changed, jobs)


class Pauses:
    """Pauses the queue and ends the pause, and wakes the scheduler."""

    def __init__(
        self, store: Store, clock: Clock, in_writer: InThread, wake: Callable[[], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._in_writer = in_writer
        self._wake = wake

    async def pause(self, by: str, why: str) -> tuple[QueuePause, bool]:
        """Start no more jobs; return the pause, and whether this request changed it.

        A repetition changes nothing, unless it gives another reason.
        """

        def store() -> tuple[QueuePause, bool]:
            with self._store.write() as tx:
                before = tx.pause()
                if before is not None and why in ("", before.why):
                    return before, False
                pause = QueuePause(by, why, self._clock.now())
                tx.set_pause(pause)
                return pause, True

        done = await self._in_writer(store)
        self._wake()
        return done

    async def unpause(self) -> bool:
        """Start jobs again; return whether the queue was paused."""

        def store() -> bool:
            with self._store.write() as tx:
                was_paused = tx.pause() is not None
                tx.set_pause(None)
                return was_paused

        was_paused = await self._in_writer(store)
        self._wake()
        return was_paused
