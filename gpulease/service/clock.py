"""When the machine's clock is set: spans stay as long as they are, and so instants move."""

from datetime import timedelta

from gpulease.domain.job import moved
from gpulease.service.ports import Clock, Event, Store
from gpulease.units import format_span

_A_STEP = timedelta(seconds=1)
"""What is less is the clock being kept right (adjtime(3)), and moves nothing."""


def follow_clock(store: Store, clock: Clock) -> timedelta | None:
    """Follow the machine's clock; return by how much it was set, or None if it was not.

    Whoever waits for an hour at most goes on to wait for what is left of it, and an age is never
    below zero. A GPU that is held back for a fault comes back as soon as it would have.

    Raises:
        RecordUnwritable: nothing has changed, the clock included.
    """
    by = clock.set_by()
    if abs(by) < _A_STEP:
        clock.follow()
        return None
    back = "back" if by < timedelta(0) else "forward"
    event = Event(clock.now() + by, "clock_set", f"{back} by {format_span(abs(by))}")
    with store.write() as tx:
        for job in tx.live():
            tx.save(moved(job, by), event)
        for gpu, standing in tx.availabilities().items():
            tx.set_availability(gpu, standing.moved(by))
    clock.follow()
    return by
