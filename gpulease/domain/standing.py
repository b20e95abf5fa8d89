"""Whether a GPU takes new leases: drained by hand, or held back for its health.

The two are kept apart. What a person has drained only a person resumes; what gpulease held back for
a fault comes back by itself when the fault is over, or when a person says so.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class Drain:
    """Somebody has said that nothing more is to be granted on a GPU."""

    by: str | None
    """Their name; None in a record that did not keep it."""
    why: str = ""
    at: datetime | None = None

    def __str__(self) -> str:
        said = f"drained by {self.by}" if self.by else "drained"
        return f"{said}: {self.why}" if self.why else said


@dataclass(frozen=True, slots=True)
class Ailment:
    """A fault of a GPU's hardware for which gpulease grants nothing more on it."""

    kind: str
    """What is wrong, as one word: the same fault seen again is of the same kind."""
    why: str
    at: datetime
    """When it was last seen."""

    def __str__(self) -> str:
        return f"drained by gpulease: {self.why}"


@dataclass(frozen=True, slots=True)
class Standing:
    """All that keeps new leases off one GPU, but what its readings say."""

    drain: Drain | None = None
    ailment: Ailment | None = None
    excused: str | None = None
    """The kind of a lasting fault with which a person wants the GPU used all the same."""

    @property
    def closed(self) -> str | None:
        """Why nothing more may be granted, as a sentence; None if nothing stands against it."""
        if self.drain is not None:
            return str(self.drain)
        return None if self.ailment is None else str(self.ailment)

    def drained(self, drain: Drain) -> "Standing":
        """Return this after a person drained the GPU; who drained it first has drained it."""
        return self if self.drain is not None else replace(self, drain=drain)

    def resumed(self) -> "Standing":
        """Return this after a person said that the GPU is to be used again."""
        excused = self.excused if self.ailment is None else self.ailment.kind
        return Standing(excused=excused)

    def moved(self, by: timedelta) -> "Standing":
        """Return this as it stands after the clock was set by so much: all ages are as they were.

        How long a GPU has been quiet is counted from its ailment.
        """
        drain, ailment = self.drain, self.ailment
        if drain is not None and drain.at is not None:
            drain = replace(drain, at=drain.at + by)
        if ailment is not None:
            ailment = replace(ailment, at=ailment.at + by)
        return replace(self, drain=drain, ailment=ailment)
