"""What a replay reads and returns: the jobs of a trace, the servers, and when each job ran."""

from dataclasses import dataclass

from gpulease.domain.job import CommandFingerprint


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace. Times are seconds from the beginning of the trace."""

    id: int
    """Ascending in the order of submission, as the daemon gives them."""
    submit_s: float
    duration_s: float
    """How long it runs when it shares no GPU."""
    gpus: int
    memory: int
    """Bytes on each GPU."""
    user: str
    time_limit_s: float | None = None
    utilization: float | None = None
    """The part of the time, 0 to 1, in which it keeps each of its GPUs busy; None if unknown."""
    command: CommandFingerprint | None = None
    """Runs of the same command have the same; None if unknown."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server of the replay."""

    gpus: int
    memory: int
    """Bytes of each GPU that can be leased."""


@dataclass(frozen=True, slots=True)
class Run:
    """When and where a job ran. Times are seconds from the beginning of the trace."""

    job: TraceJob
    start_s: float
    end_s: float
    server: int
    """Its position in the sequence of servers."""
    gpus: tuple[int, ...]
    """Their numbers on that server, from 0."""

    @property
    def wait_s(self) -> float:
        """Seconds from its submission to its start."""
        return self.start_s - self.job.submit_s

    @property
    def completion_s(self) -> float:
        """Seconds from its submission to its end."""
        return self.end_s - self.job.submit_s
