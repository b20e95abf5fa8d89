"""What was on the GPUs and when, by the machine's clock, as those know it who put it there."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf


@dataclass
class Span:
    """Something that was so for a time; each end lies between two instants."""

    begun_at: tuple[float, float]
    ended_at: tuple[float, float] = (inf, inf)

    def surely_from(self, since: float, until: float) -> bool:
        """Say whether it was so at every moment from `since` to `until`."""
        return self.begun_at[1] <= since and until <= self.ended_at[0]

    def maybe_after(self, since: float) -> bool:
        """Say whether it may have begun after `since`."""
        return self.begun_at[1] > since


@dataclass
class Stranger(Span):
    """Memory on one GPU that a process without a lease holds."""

    gpu: str = ""
    memory: int = 0
    pid: int = 0


@dataclass
class Loss(Span):
    """One GPU that could not be reached."""

    gpu: str = ""


@dataclass(frozen=True)
class Listed:
    """One process on a GPU, as the daemon shows it; `job` is None for a stranger."""

    pid: int
    memory: int | None
    job: int | None


@dataclass(frozen=True)
class Shown:
    """One GPU as one answer to GET /status had it."""

    state: str
    allocatable: int | None
    leased: int
    committed: int
    unmanaged: int | None
    headroom: int | None
    leased_by_jobs: int
    """The same as `leased`, summed over the jobs in that answer."""
    used: int | None = None
    processes: tuple[Listed, ...] = ()


@dataclass(frozen=True)
class Poll:
    """One answer to GET /status, asked for and received at these times."""

    asked_at: float
    answered_at: float
    gpus: dict[str, Shown]
    jobs: int = 0
    """How many wait or hold a lease."""


@dataclass
class Truth:
    """All that is known from outside."""

    totals: dict[str, int]
    strangers: list[Stranger] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)
    readings: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """When the daemon was told of the memory in use, and how much, by GPU, in order."""

    def strangers_on(self, gpu: str) -> list[Stranger]:
        return [each for each in self.strangers if each.gpu == gpu]

    def is_lost(self, gpu: str, since: float, until: float) -> bool:
        """Say whether a GPU was out of reach for all of that time."""
        return any(each.surely_from(since, until) for each in self.losses if each.gpu == gpu)

    def told_before(self, gpu: str, at: float) -> float:
        """Return when the daemon was last told of a GPU's memory before `at`."""
        times = self.readings.get(gpu, [])
        place = bisect_right(times, at, key=lambda reading: reading[0])
        return times[place - 1][0] if place else -inf

    def shown_since(self, gpu: str, shown: Shown, since: float, until: float) -> float:
        """Return the earliest time between these at which what is shown may have been read.

        Not all that is read is shown: the memory in use tells the readings apart.
        """
        read = self.readings.get(gpu, [])
        times = (at for at, used in read if since <= at <= until and used == shown.used)
        return min(times, default=since)

    def longest_gap(self, since: float, until: float) -> float:
        """Return for how long nothing was answered between two instants: the machine is busy."""
        first = bisect_right(self.polls, since, key=lambda poll: poll.answered_at)
        last = bisect_left(self.polls, until, key=lambda poll: poll.answered_at)
        times = [since, *(poll.answered_at for poll in self.polls[first:last]), until]
        return max(later - earlier for earlier, later in pairwise(times))


def memory_of(strangers: Iterable[Stranger]) -> int:
    """Return what they hold together."""
    return sum(each.memory for each in strangers)
