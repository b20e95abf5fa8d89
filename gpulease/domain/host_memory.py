"""The RAM and the cores of the server: what claims lease of both, and what is left.

It is one pool beside those of the GPUs. Jobs without --ram and --cpus lease nothing of it: what
they use is use by others, like that of any other process.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.placement import Shortage
from gpulease.units import Share, counted, format_size


@dataclass(frozen=True, slots=True)
class HostReading:
    """One look at the server; sizes in bytes."""

    ram: int | None
    """All of it; None, like `available`, if it cannot be read."""
    available: int | None
    """What programs could allocate without swapping, as the kernel estimates it."""
    cores: int
    used: Mapping[JobId, int] = field(default_factory=dict)
    """By jobs that lease RAM: what the kernel could not take back from them."""

    @property
    def used_by_others(self) -> int | None:
        """What is used outside leases of RAM; None if unknown.

        Use of a job that is unknown counts here, besides its lease: nothing is promised twice.
        """
        if self.ram is None or self.available is None:
            return None
        return max(0, self.ram - self.available - sum(self.used.values()))


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """The admin's settings: what is never leased."""

    reserved_ram: int | Share = Share(Fraction(5))  # noqa: RUF009  it is immutable
    """For the system; as much as systemd keeps from all jobs together."""
    reserved_cpus: int = 0

    def ram_of(self, reading: HostReading) -> int | None:
        """Return the bytes that may be leased in all; None if unknown."""
        if reading.ram is None:
            return None
        kept = self.reserved_ram
        return max(0, reading.ram - (kept.of(reading.ram) if isinstance(kept, Share) else kept))

    def cores_of(self, reading: HostReading) -> int:
        """Return the cores that may be leased in all."""
        return max(0, reading.cores - self.reserved_cpus)


DEFAULT_HOST_POLICY = HostPolicy()


class HostMemory:
    """What the server has free, now or later; it takes and releases jobs in constant time."""

    __slots__ = ("cores", "ram")

    def __init__(self, ram: int | None, cores: int) -> None:
        self.ram = ram
        """Bytes that may be leased, below 0 if others use too much; None if unknown."""
        self.cores = cores

    @classmethod
    def of(
        cls, reading: HostReading | None, policy: HostPolicy, holding: Iterable[Job]
    ) -> "HostMemory":
        """Return what is left beside the jobs that hold leases."""
        if reading is None:
            return cls(None, 0)
        whole, others = policy.ram_of(reading), reading.used_by_others
        left = cls(
            None if whole is None or others is None else whole - others, policy.cores_of(reading)
        )
        for job in holding:
            if job.claim.leases_host:
                left.take(job.claim, reading.used.get(job.id, 0))
        return left

    def copy(self) -> "HostMemory":
        """Return a copy that may change by itself."""
        return HostMemory(self.ram, self.cores)

    def take(self, claim: Claim, used: int = 0) -> None:
        """Add a job, which may use more than it leases."""
        if self.ram is not None and claim.ram is not None:
            self.ram -= max(claim.ram, used)
        self.cores -= claim.cpus or 0

    def release(self, claim: Claim) -> None:
        """Remove a job."""
        if self.ram is not None:
            self.ram += claim.ram or 0
        self.cores += claim.cpus or 0

    def fits(self, claim: Claim) -> bool:
        """Tell whether a claim fits."""
        if claim.ram is not None and (self.ram is None or claim.ram > self.ram):
            return False
        return claim.cpus is None or claim.cpus <= self.cores

    def shortage(self, claim: Claim, holding: Sequence[Job] = ()) -> Shortage | None:
        """Return why a claim does not fit beside the jobs that hold leases; None if it does."""
        if self.fits(claim):
            return None
        if claim.ram is not None and self.ram is None:
            return Shortage("the RAM of this machine cannot be read")
        why, holders = [], dict[JobId, str]()
        if claim.ram is not None and claim.ram > (left := self.ram or 0):
            free = f"at most {format_size(left)}" if left > 0 else "nothing"
            why.append(f"needs {format_size(claim.ram)} of RAM, and {free} is free")
            holders |= {job.id: job.label for job in holding if job.claim.ram}
        if claim.cpus is not None and claim.cpus > self.cores:
            free = f"at most {self.cores}" if self.cores > 0 else "none"
            why.append(f"needs {counted(claim.cpus, 'core')}, and {free} is free")
            holders |= {job.id: job.label for job in holding if job.claim.cpus}
        return Shortage("; ".join(why), tuple(sorted(holders)), holders)
