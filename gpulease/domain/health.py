"""The health of a GPU: findings, their cause, and whether the GPU takes new leases.

Pure rules over reports of the driver. A figure that the driver does not report counts neither for
nor against a GPU.

A GPU is drained by a person or by gpulease for a hardware fault; the two are separate. Only a
person resumes a GPU that a person drained. A GPU that gpulease drained is resumed when the fault is
over, or by a person.
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
    """A person's order to grant no new leases on a GPU."""

    by: str | None
    """The user name; None in old records."""
    why: str = ""
    at: datetime | None = None

    def __str__(self) -> str:
        said = f"drained by {self.by}" if self.by else "drained"
        return f"{said}: {self.why}" if self.why else said


@dataclass(frozen=True, slots=True)
class HardwareFault:
    """A hardware fault for which gpulease grants no new leases on a GPU."""

    kind: str
    """The fault as one word; the same fault seen again has the same kind."""
    why: str
    at: datetime
    """When it was last seen."""

    def __str__(self) -> str:
        return f"drained by gpulease: {self.why}"


@dataclass(frozen=True, slots=True)
class GpuAvailability:
    """Why one GPU takes no new leases, apart from its readings."""

    drain: Drain | None = None
    hardware_fault: HardwareFault | None = None
    accepted_fault: str | None = None
    """The kind of a lasting fault that a person accepted by resuming the GPU."""

    @property
    def reason(self) -> str | None:
        """Why it takes no new leases, as a sentence; None if it takes them."""
        if self.drain is not None:
            return str(self.drain)
        return None if self.hardware_fault is None else str(self.hardware_fault)

    def drained(self, drain: Drain) -> "GpuAvailability":
        """Return this after a person drained the GPU; the first drain stays."""
        return self if self.drain is not None else replace(self, drain=drain)

    def resumed(self) -> "GpuAvailability":
        """Return this after a person resumed the GPU."""
        accepted = self.accepted_fault if self.hardware_fault is None else self.hardware_fault.kind
        return GpuAvailability(accepted_fault=accepted)

    def shifted(self, by: timedelta) -> "GpuAvailability":
        """Return this with all instants shifted after the clock was set; ages stay the same.

        The time without a fault counts from the instant of the hardware fault.
        """
        drain, fault = self.drain, self.hardware_fault
        if drain is not None and drain.at is not None:
            drain = replace(drain, at=drain.at + by)
        if fault is not None:
            fault = replace(fault, at=fault.at + by)
        return replace(self, drain=drain, hardware_fault=fault)


class HealthAction(StrEnum):
    """What to do about a fault: the setting `health`."""

    DRAIN = "drain"
    TELL = "tell"
    OFF = "off"


_RECOVERY = MappingProxyType(
    {
        1: "a reset of the GPU",
        2: "a reboot of the machine",
        4: "a reset of the GPU and its peers",
        6: "a reset of its bus",
        7: "a reboot of the machine",
    }
)
"""What nvmlDeviceGpuRecoveryAction_t asks for before the GPU is used again. The GPU stays usable
with 3, which drains peer-to-peer traffic, and 5, which concerns other machines."""


@dataclass(frozen=True, slots=True)
class HealthFigures:
    """Memory errors and recovery action of a GPU; None for what the driver does not report."""

    uncorrectable: int | None = None
    """The number of uncorrectable memory errors since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_pending: bool | None = None
    recovery: int | None = None
    """nvmlDeviceGpuRecoveryAction_t; 0 for none."""


@dataclass(frozen=True, slots=True)
class GpuModes:
    """The driver modes of a GPU; None for what the driver does not report."""

    ecc: bool | None = None
    persistence: bool | None = None
    compute: int | None = None
    """nvmlComputeMode_t: 0 default, 2 prohibited, 3 exclusive process."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What the driver reported about one GPU since the last report."""

    gpu: GpuUuid
    xids: tuple[int, ...] = ()
    figures: HealthFigures | None = None
    """None if not read this time."""
    listens: bool | None = None
    """Whether the driver reports its XIDs; None while that is not known."""
    modes: GpuModes | None = None
    """Read together with the figures."""


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
    """One finding about a GPU, and its cause."""

    kind: str
    what: str
    blame: Blame
    count: int = 1
    lasts: bool = False
    """A state that lasts until the driver reports its end, not an event."""


def xid(number: int, count: int = 1) -> Finding:
    """Return the finding for an XID; an unknown one is for an admin to look up."""
    known = XIDS.get(number, NOT_LISTED)
    return Finding(f"xid {number}", f"XID {number}, {known.what}", known.blame, count)


def needs_an_admin(kind: str) -> bool:
    """Tell whether an entry in a GPU's history is an XID for an admin to investigate."""
    word, _, number = kind.partition(" ")
    return word == "xid" and number.isdecimal() and xid(int(number)).blame is Blame.ADMIN


_ENDS_JOBS = frozenset({Blame.CONTAINED, Blame.HARDWARE, Blame.GONE})


def ends_jobs(kind: str) -> bool:
    """Tell whether an entry in a GPU's history is a fault that ends the jobs on it."""
    word, _, number = kind.partition(" ")
    if word == "xid" and number.isdecimal():
        return xid(int(number)).blame in _ENDS_JOBS
    return kind in ("lost", "ecc")


def lasting(figures: HealthFigures) -> Finding | None:
    """Return the worst lasting fault that the figures show; None for none.

    A pending row remapping leaves the GPU usable (nvml.h, nvmlDeviceGetRemappedRows).
    """
    recovery = _RECOVERY.get(figures.recovery or 0)
    for is_so, kind, what in (
        (figures.remap_failed, "remap_failed", "a bad memory row could not be remapped"),
        (recovery, "recovery", f"the driver asks for {recovery}"),
        (figures.pages_pending, "pages_pending", "a bad memory page will be retired at a reset"),
    ):
        if is_so:
            return Finding(kind, what, Blame.HARDWARE, lasts=True)
    if figures.remap_pending:
        what = "a bad memory row will be remapped at a reset"
        return Finding("remap_pending", what, Blame.AVOIDED, lasts=True)
    return None


_NOTICES = MappingProxyType(
    {
        Blame.APPLICATION: "GPU {gpu}: {what}: caused by a program on it, possibly this job",
        Blame.CONTAINED: "GPU {gpu}: {what}: the driver ended programs on it, possibly of this job",
        Blame.HARDWARE: (
            "GPU {gpu}: {what}: a hardware fault; this job may fail or compute wrong results"
        ),
        Blame.AVOIDED: "GPU {gpu}: {what}; the driver avoids that memory until a reset",
        Blame.GONE: "GPU {gpu} is lost ({what}): this job will fail on it",
    }
)


def notice(gpu: str, found: Finding) -> str | None:
    """Return the notice to the owner of a job on the GPU labelled `gpu`; None for none."""
    text = _NOTICES.get(found.blame)
    return None if text is None else text.format(gpu=gpu, what=found.what)


def findings(report: HealthReport, before: HealthFigures | None) -> tuple[Finding, ...]:
    """Return what is new in a report about a GPU with the figures `before`."""
    found = [xid(number, count) for number, count in Counter(report.xids).items()]
    if report.figures is not None:
        found += _new_errors(report, before, found)
        now, then = lasting(report.figures), lasting(before) if before is not None else None
        if now is not None and now != then:
            found.append(now)
    return tuple(found)


def _new_errors(
    report: HealthReport, before: HealthFigures | None, found: list[Finding]
) -> list[Finding]:
    """Return new memory errors that no XID has reported."""
    then = None if before is None else before.uncorrectable
    now = None if report.figures is None else report.figures.uncorrectable
    if then is None or now is None or now <= then:
        # The first figures do not show when errors happened; a reset restarts the count.
        return []
    if any(each.blame in (Blame.HARDWARE, Blame.CONTAINED) for each in found):
        return []
    what = "uncorrectable memory errors"
    return [Finding("ecc", what, Blame.HARDWARE, now - then)]


def after_findings(
    availability: GpuAvailability, found: tuple[Finding, ...], at: datetime
) -> GpuAvailability:
    """Return the availability of a GPU after these findings: hardware faults drain it."""
    bad = [
        each
        for each in found
        if each.blame is Blame.HARDWARE
        and not (each.lasts and each.kind == availability.accepted_fault)
    ]
    if not bad:
        return availability
    # Lasting faults come last: a person who resumes the GPU accepts that one.
    why = "; ".join(each.what for each in bad)
    return replace(availability, hardware_fault=HardwareFault(bad[-1].kind, why, at))


def without_stale_acceptance(
    availability: GpuAvailability, figures: HealthFigures
) -> GpuAvailability:
    """Return `availability` without the acceptance of a fault that is over."""
    now = lasting(figures)
    if availability.accepted_fault is None or (
        now is not None and now.kind == availability.accepted_fault
    ):
        return availability
    return replace(availability, accepted_fault=None)


def is_over(
    availability: GpuAvailability,
    figures: HealthFigures | None,
    well_for: timedelta,
    quiet_for: timedelta,
) -> bool:
    """Tell whether the hardware fault of a drained GPU is over.

    Args:
        availability: with the fault.
        figures: the latest; None if none were read yet.
        well_for: how long the GPU has been readable without a new fault.
        quiet_for: how long that has to be.
    """
    if figures is None or well_for < quiet_for:
        return False
    still = lasting(figures)
    return (
        still is None or still.blame is Blame.AVOIDED or still.kind == availability.accepted_fault
    )


LONGEST_QUIET = timedelta(days=1)


def quiet_after(first: timedelta, relapses: int) -> timedelta:
    """Return how long a GPU must be without a fault, doubled for each recent relapse."""
    return min(first * (1 << min(relapses, 20)), max(first, LONGEST_QUIET))
