"""How the daemon stands, in the one line that `systemctl status` shows."""

from gpulease.daemon.assembly import Parts
from gpulease.domain.lease import State


def standing(parts: Parts) -> str:
    """Return what is granted, what waits and what cannot be read, in a line."""
    seen, live = parts.keeper.seen, parts.store.live()
    readings = seen.readings if seen is not None else ()
    unread = sum(reading.fault is not None for reading in readings)
    waiting = sum(job.state is State.QUEUED for job in live)
    gpus = _count(len(readings), "simulated GPU" if parts.settings.simulate else "GPU")
    if unread:
        gpus += f" ({unread} cannot be read)"
    return f"{gpus}; {_count(len(live) - waiting, 'job')} running, {waiting} waiting"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
