"""What daemons write for people, and for the command, into the AdminComment of a job.

Such as `gpulease: stopped (over_lease): n1: it held 3G of GPU 0`. Only admins and nodes write this
field; what admins wrote stays in front.
"""

import re
from typing import Final, NamedTuple

OURS: Final = "gpulease: "
"""The begin of all that gpulease writes for people in Slurm's fields."""
CANCELLED: Final = "cancelled"
_STOPPED = re.compile(r"stopped \(([a-z_]+)\): (.*)", re.DOTALL)


class Stop(NamedTuple):
    """Why a daemon had Slurm stop a job."""

    reason: str
    """A word of the daemon, such as over_lease, idle or CANCELLED."""
    text: str
    """The node, and why."""


def note_in(comment: str) -> str | None:
    """Return what gpulease wrote into a job's AdminComment; None if nothing."""
    return comment.partition(OURS)[2] or None


def with_note(comment: str, text: str) -> str:
    """Return a job's AdminComment with a note for its owner, and with what admins wrote before."""
    kept = "" if comment.strip() == "(null)" else comment.partition(OURS)[0]
    return f"{kept}{OURS}{text}"


def stop_note(stop: Stop) -> str:
    """Return the note for a job that is stopped."""
    return f"stopped ({stop.reason}): {stop.text}"


def stop_in(note: str | None) -> Stop | None:
    """Return why a daemon stopped a job, by its note; None if none did."""
    found = _STOPPED.fullmatch(note or "")
    return found and Stop(found[1], found[2])
