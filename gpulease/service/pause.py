"""The pause of the whole queue by an admin: no job starts, and running jobs continue."""

from collections.abc import Callable

from gpulease.domain.queue_options import QueuePause
from gpulease.service.ports import Clock, InThread, Store


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
