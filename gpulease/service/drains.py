"""Draining a GPU by hand, and resuming it: two verbs, a transaction each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpulease.domain.health import GpuEvent
from gpulease.domain.memory import GpuReading, GpuUuid, JobId
from gpulease.domain.standing import Drain, Standing
from gpulease.errors import NoSuchGpu
from gpulease.service.ports import Clock, InThread, Store

_SHORTEST_PREFIX = 4
"""Characters of a UUID: all of them begin with GPU- or MIG-."""


@dataclass(frozen=True, slots=True)
class Drained:
    """A GPU as it stands after a verb, and whether the verb changed that."""

    gpu: GpuReading
    standing: Standing
    changed: bool
    jobs: tuple[JobId, ...]
    """Those that hold a lease on it, and go on."""


def named(text: str, gpus: Sequence[GpuReading]) -> GpuReading:
    """Return the GPU that somebody means by its index, its UUID, or the beginning of that.

    Raises:
        NoSuchGpu: there is none, or more than one.
    """
    found = [gpu for gpu in gpus if text in (gpu.label, gpu.uuid)]
    if len(found) == 1:
        return found[0]
    if len(text) >= _SHORTEST_PREFIX:
        found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(text.lower())]
    if len(found) == 1 and len(text) > _SHORTEST_PREFIX:
        return found[0]
    known = ", ".join(gpu.label for gpu in gpus[:32]) or "none"
    if not found:
        raise NoSuchGpu(
            f"cannot find a GPU {text[:80]!r}: there is none of that name",
            f"name it by its index ({known}) or by its UUID; gpulease status --json shows both"
            + ("; several have spaces between them: 0 1" if len(gpus) > 1 else ""),
        )
    raise NoSuchGpu(
        f"cannot tell which GPU {text[:80]!r} is: "
        f"it may be {' or '.join(gpu.uuid for gpu in found)}",
        "write more of the UUID",
    )


class Drains:
    """Drains and resumes GPUs, and has the loop look at the queue again."""

    def __init__(
        self, store: Store, clock: Clock, writing: InThread, wake: Callable[[], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._writing = writing
        self._wake = wake

    async def drain(self, gpu: GpuReading, by: str, why: str) -> Drained:
        """Grant nothing more on `gpu`; what runs there goes on. Done twice it changes nothing."""
        return await self._change(gpu, by, lambda before, drain: before.drained(drain), why)

    async def resume(self, gpu: GpuReading, by: str) -> Drained:
        """Grant on `gpu` again, also where it was gpulease that held it back."""
        return await self._change(gpu, by, lambda before, _: before.resumed())

    async def _change(
        self,
        gpu: GpuReading,
        by: str,
        change: Callable[[Standing, Drain], Standing],
        why: str = "",
    ) -> Drained:
        done = await self._writing(lambda: self._store_change(gpu, Drain(by, why), change))
        self._wake()
        return done

    def _store_change(
        self, gpu: GpuReading, drain: Drain, change: Callable[[Standing, Drain], Standing]
    ) -> Drained:
        with self._store.write() as tx:
            at = self._clock.now()
            before = tx.standings().get(gpu.uuid, Standing())
            after = change(before, Drain(drain.by, drain.why, at))
            changed = after.closed != before.closed
            if changed:
                tx.know([gpu], at)
                tx.set_standing(gpu.uuid, after)
                tx.note_gpu(_event(gpu.uuid, after, drain, at))
            jobs = tuple(
                job.id
                for job in tx.live()
                if job.holds_memory and any(lease.gpu == gpu.uuid for lease in job.leases)
            )
        return Drained(gpu, after, changed, jobs)


def _event(gpu: GpuUuid, after: Standing, drain: Drain, at: datetime) -> GpuEvent:
    if after.drain is not None:
        return GpuEvent(gpu, at, "drained", str(after.drain))
    return GpuEvent(gpu, at, "resumed", f"resumed by {drain.by}")
