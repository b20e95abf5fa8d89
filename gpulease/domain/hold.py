"""Who holds a lease without a job, and who asked for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """One process, and never a later one that was given its pid."""

    pid: int
    started: int
    """Clock ticks from the machine's boot to its start, field 22 of proc_pid_stat(5)."""
    boot: str
    """Which boot of the machine, as the kernel names it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Whom a lease without a job is for."""

    process: Process | None
    """The lease is released when it ends; None: it is held until its time is over."""
    asker: Process | None
    """Who waits for the grant; the lease is not wanted any more if it ends before."""
