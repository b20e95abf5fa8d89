"""What daemons write for people, for the command, and for each other into a job's AdminComment.

Such as `gpulease: {"why":"n1: it held 3G of GPU 0","stopped":"over_lease"}`. Only admins and nodes
write this field; what admins wrote stays in front. What is no JSON, as the notes of earlier
versions, is shown as it is.
"""

import json
from collections.abc import Sequence
from typing import Final

from gpulease.record import record
from gpulease.slurm.node_summary import known_fields

OURS: Final = "gpulease: "
"""The begin of all that gpulease writes in Slurm's fields."""
MOST_ROUNDS: Final = 3
"""The rounds of refusals after which a job is held."""


@record(frozen=True)
class Note:
    """Why a job was refused, or stopped."""

    why: str = ""
    """For its owner: the node, and the reason."""
    stopped: str = ""
    """Why a daemon had Slurm stop it: a word such as over_lease, idle or cancelled."""
    refused: int = 0
    """How often nodes refused it."""
    nodes: str = ""
    """Those that refused it in this round, separated by spaces; the latest last."""
    rounds: int = 0
    """How often all of its nodes refused it."""
    for_leases: bool = False
    """In this round, leases were in the way on one of them."""

    @property
    def refused_by(self) -> Sequence[str]:
        """The nodes that refused it in this round."""
        return self.nodes.split()

    def __str__(self) -> str:
        if self.stopped:
            return f"stopped ({self.stopped}): {self.why}"
        if not self.refused:
            return self.why
        times = "time" if self.refused == 1 else "times"
        leases = "; waits for leases" if self.for_leases else ""
        rounds = f"; by all nodes {self.rounds} of {MOST_ROUNDS} times" if self.rounds else ""
        return f"refused {self.refused} {times} ({self.nodes}{leases}{rounds}): {self.why}"


def note_in(comment: str) -> Note | None:
    """Return what gpulease wrote into a job's AdminComment; None if nothing."""
    text = comment.partition(OURS)[2]
    try:
        return Note(**known_fields(Note, json.loads(text)))
    except (ValueError, TypeError, RecursionError):
        return Note(text) if text else None


def with_note(comment: str, note: Note) -> str:
    """Return a job's AdminComment with a note, and with what admins wrote before."""
    kept = "" if comment.strip() == "(null)" else comment.partition(OURS)[0]
    fields = {name: value for name, value in vars(note).items() if value}
    return f"{kept}{OURS}{json.dumps(fields, separators=(',', ':'), ensure_ascii=False)}"
