"""How healthy a GPU is: what its driver tells, whose fault each thing is, and when it is over.

Pure rules over what was heard. A figure that the driver does not tell speaks neither for a GPU nor
against it.

Whether a GPU takes new leases: drained by hand, or held back for its health.

The two are kept apart. What a person has drained only a person resumes; what gpulease held back for
a fault comes back by itself when the fault is over, or when a person says so.
"""

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType

from gpulease.domain.gpu import GpuUuid
from gpulease.domain.xid import NOT_LISTED, XIDS, Blame


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
class HardwareFault:
    """A fault of a GPU's hardware for which gpulease grants nothing more on it."""

    kind: str
    """What is wrong, as one word: the same fault seen again is of the same kind."""
    why: str
    at: datetime
    """When it was last seen."""

    def __str__(self) -> str:
        return f"drained by gpulease: {self.why}"


@dataclass(frozen=True, slots=True)
class GpuAvailability:
    """All that keeps new leases off one GPU, but what its readings say."""

    drain: Drain | None = None
    hardware_fault: HardwareFault | None = None
    accepted_fault: str | None = None
    """The kind of a lasting fault with which a person wants the GPU used all the same."""

    @property
    def reason(self) -> str | None:
        """Why nothing more may be granted, as a sentence; None if nothing stands against it."""
        if self.drain is not None:
            return str(self.drain)
        return None if self.hardware_fault is None else str(self.hardware_fault)

    def drained(self, drain: Drain) -> "GpuAvailability":
        """Return this after a person drained the GPU; who drained it first has drained it."""
        return self if self.drain is not None else replace(self, drain=drain)

    def resumed(self) -> "GpuAvailability":
        """Return this after a person said that the GPU is to be used again."""
        excused = self.accepted_fault if self.hardware_fault is None else self.hardware_fault.kind
        return GpuAvailability(accepted_fault=excused)

    def moved(self, by: timedelta) -> "GpuAvailability":
        """Return this as it stands after the clock was set by so much: all ages are as they were.

        How long a GPU has been quiet is counted from its ailment.
        """
        drain, ailment = self.drain, self.hardware_fault
        if drain is not None and drain.at is not None:
            drain = replace(drain, at=drain.at + by)
        if ailment is not None:
            ailment = replace(ailment, at=ailment.at + by)
        return replace(self, drain=drain, hardware_fault=ailment)


class HealthAction(StrEnum):
    """What is done about a fault: the setting `health`."""

    DRAIN = "drain"
    TELL = "tell"
    OFF = "off"


_RECOVERY = MappingProxyType(
    {
        1: "a reset of the GPU",
        2: "a reboot of the machine",
        4: "a reset of the GPU, and of those that it talks to",
        6: "a reset of its bus",
        7: "a reboot of the machine",
    }
)
"""What nvmlDeviceGpuRecoveryAction_t asks for before the GPU is used again. 3, to quiet what GPUs
say to each other, and 5, about the machines beside this one, leave it usable."""


@dataclass(frozen=True, slots=True)
class HealthFigures:
    """What a driver tells of a GPU's memory cells; None for what it does not tell."""

    uncorrectable: int | None = None
    """Memory errors that could not be corrected, since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_pending: bool | None = None
    recovery: int | None = None
    """What the driver asks for to have it well again, as NVML counts: 0 is nothing."""


@dataclass(frozen=True, slots=True)
class GpuModes:
    """How an admin has set a GPU up; None for what its driver does not tell."""

    ecc: bool | None = None
    persistence: bool | None = None
    compute: int | None = None
    """As NVML counts: 0 is for everyone, 2 for nobody, 3 for one process at a time."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What was heard of one GPU since the last time."""

    gpu: GpuUuid
    xids: tuple[int, ...] = ()
    figures: HealthFigures | None = None
    """None where they were not read this time."""
    listens: bool | None = None
    """Whether its XIDs can be heard at all; None while that is not known."""
    modes: GpuModes | None = None
    """Read whenever the figures are."""


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """One entry in the history of a GPU's health."""

    gpu: GpuUuid
    at: datetime
    kind: str
    detail: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found about a GPU, and whose fault it is."""

    kind: str
    what: str
    blame: Blame
    count: int = 1
    lasts: bool = False
    """It is a state, which ends when the driver says so, rather than something that happened."""


def xid(number: int, count: int = 1) -> Finding:
    """Return what an XID is; one that is not in the table is for an admin to look up."""
    known = XIDS.get(number, NOT_LISTED)
    return Finding(f"xid {number}", f"XID {number}, {known.what}", known.blame, count)


def needs_an_admin(kind: str) -> bool:
    """Tell whether an entry in a GPU's history is an XID that an admin has to look into."""
    word, _, number = kind.partition(" ")
    return word == "xid" and number.isdecimal() and xid(int(number)).blame is Blame.ADMIN


def lasting(figures: HealthFigures) -> Finding | None:
    """Return the worst thing that is wrong with a GPU for as long as these figures hold.

    A row that waits to be replaced keeps nobody from the GPU (nvml.h, nvmlDeviceGetRemappedRows).
    """
    recovery = _RECOVERY.get(figures.recovery or 0)
    for is_so, kind, what in (
        (figures.remap_failed, "remap_failed", "a bad row of its memory could not be replaced"),
        (recovery, "recovery", f"its driver asks for {recovery}"),
        (figures.pages_pending, "pages_pending", "a bad page of its memory is retired at a reset"),
    ):
        if is_so:
            return Finding(kind, what, Blame.HARDWARE, lasts=True)
    if figures.remap_pending:
        what = "a bad row of its memory is replaced at a reset"
        return Finding("remap_pending", what, Blame.AVOIDED, lasts=True)
    return None


_TOLD = MappingProxyType(
    {
        Blame.APPLICATION: "GPU {gpu}: {what}: the fault of a program there, which may be this job",
        Blame.CONTAINED: "GPU {gpu}: {what}: programs there were ended, which may be this job's",
        Blame.HARDWARE: (
            "GPU {gpu}: {what}: a fault of the hardware; this job may fail, or compute nonsense"
        ),
        Blame.AVOIDED: "GPU {gpu}: {what}; its driver keeps programs off it until it is reset",
        Blame.GONE: "GPU {gpu} is lost ({what}): what this job does there will fail",
    }
)


def notice(gpu: str, found: Finding) -> str | None:
    """Return what the owner of a job on the GPU called `gpu` is told; None: nothing to tell."""
    text = _TOLD.get(found.blame)
    return None if text is None else text.format(gpu=gpu, what=found.what)


def findings(heard: HealthReport, before: HealthFigures | None) -> tuple[Finding, ...]:
    """Return what is new about a GPU, whose figures were `before`."""
    found = [xid(number, count) for number, count in Counter(heard.xids).items()]
    if heard.figures is not None:
        found += _new_errors(heard, before, found)
        now, then = lasting(heard.figures), lasting(before) if before is not None else None
        if now is not None and now != then:
            found.append(now)
    return tuple(found)


def _new_errors(
    heard: HealthReport, before: HealthFigures | None, found: list[Finding]
) -> list[Finding]:
    """Return the memory errors that no XID speaks of already."""
    then = None if before is None else before.uncorrectable
    now = None if heard.figures is None else heard.figures.uncorrectable
    if then is None or now is None or now <= then:
        # Of the first look nobody knows when they were; a reset begins the count anew.
        return []
    if any(each.blame in (Blame.HARDWARE, Blame.CONTAINED) for each in found):
        return []
    what = "memory errors that could not be corrected"
    return [Finding("ecc", what, Blame.HARDWARE, now - then)]


def after(standing: GpuAvailability, found: tuple[Finding, ...], at: datetime) -> GpuAvailability:
    """Return the standing of a GPU after these findings: the hardware's faults hold it back."""
    bad = [
        each
        for each in found
        if each.blame is Blame.HARDWARE
        and not (each.lasts and each.kind == standing.accepted_fault)
    ]
    if not bad:
        return standing
    # What lasts comes last: that is what a person who resumes the GPU has to excuse.
    why = "; ".join(each.what for each in bad)
    return replace(standing, hardware_fault=HardwareFault(bad[-1].kind, why, at))


def without_stale_acceptance(standing: GpuAvailability, figures: HealthFigures) -> GpuAvailability:
    """Return a standing without the excuse for a fault that is over."""
    now = lasting(figures)
    if standing.accepted_fault is None or (now is not None and now.kind == standing.accepted_fault):
        return standing
    return replace(standing, accepted_fault=None)


def is_over(
    standing: GpuAvailability,
    figures: HealthFigures | None,
    well_for: timedelta,
    quiet_for: timedelta,
) -> bool:
    """Tell whether the fault that a GPU is held back for is over.

    Args:
        standing: with the fault.
        figures: the latest; None where none were read yet.
        well_for: how long the GPU has been readable, without a new fault.
        quiet_for: how long that has to be.
    """
    if figures is None or well_for < quiet_for:
        return False
    still = lasting(figures)
    return still is None or still.blame is Blame.AVOIDED or still.kind == standing.accepted_fault


LONGEST_QUIET = timedelta(days=1)


def quiet_after(first: timedelta, relapses: int) -> timedelta:
    """Return how long a GPU must be without a fault: twice as long for each relapse of late."""
    return min(first * (1 << min(relapses, 20)), max(first, LONGEST_QUIET))
