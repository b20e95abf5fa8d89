"""Judges what the daemon did by what it could have seen, and says how far a claim reaches.

A stranger that comes after the daemon has looked is nobody's fault. So a grant is judged by the
strangers that were surely there when the daemon was last told of that GPU's memory, and had been
for `Bounds.fresh_s`: the daemon may begin a look while it acts on the one before.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chaos.jobs import Honest
from chaos.truth import Poll, Shown, Truth, memory_of

OVER, STALE, AWAY = "granted too much", "granted on an old look", "granted on a lost GPU"
HIDDEN, SUMS, EXCESS = "stranger not counted", "sums do not add up", "more than there is"
LOST = "lost and shown as there"


SAMPLE_S = 5.0
"""Between the looks of the daemon's timer."""


@dataclass(frozen=True)
class Bounds:
    """How old what the daemon knows may be, in seconds, where the machine is not busy."""

    fresh_s: float = 1.5
    """Of a grant: from the look to the commit."""
    shown_s: float = SAMPLE_S + 1.5
    """Of a status, which shows the latest look."""


@dataclass(frozen=True)
class Grant:
    """One lease on one GPU, as the record has it."""

    job: int
    gpu: str
    memory: int
    granted_at: float
    released_at: float | None
    exclusive: bool = False

    def is_held(self, at: float) -> bool:
        return self.granted_at <= at and (self.released_at is None or at < self.released_at)


@dataclass
class Tally:
    """What one round found."""

    seed: int
    jobs: int = 0
    grants: int = 0
    polls: int = 0
    strangers: int = 0
    losses: int = 0
    failed_calls: int = 0
    beside_strangers: int = 0
    """Grants on a GPU where a stranger surely was."""
    oldest_look_s: float = 0.0
    settled_in_s: float | None = None
    overstated: int = 0
    """Answers that show more unmanaged memory than there was: safe, and not a fault."""
    counted_twice: int = 0
    """Answers in which a job's process that just ended is a stranger beside the job's lease.

    The driver's list and the processes cannot be read at one instant, and it errs on the safe side.
    So it is a fault only if it is still so at the next look.
    """
    faults: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    def fault(self, kind: str, sentence: str) -> None:
        """Count a fault."""
        self.faults[kind] += 1
        self.told.append(f"{kind}: {sentence}")


def judge(
    tally: Tally, truth: Truth, jobs: Sequence[Honest], grants: Sequence[Grant], bounds: Bounds
) -> None:
    """Judge every grant on record and every answer to a poll."""
    tally.jobs, tally.grants, tally.polls = len(jobs), len(grants), len(truth.polls)
    tally.strangers, tally.losses = len(truth.strangers), len(truth.losses)
    for moment in sorted({(grant.granted_at, grant.gpu) for grant in grants}):
        _judge_grants(tally, truth, grants, bounds, *moment)
    strays: dict[tuple[str, int], float] = {}
    for poll in truth.polls:
        for gpu, shown in poll.gpus.items():
            _judge_sums(tally, gpu, shown, poll)
            _judge_shown(tally, truth, bounds, gpu, shown, poll)
            known = _passing(truth, bounds, strays, gpu, shown, poll)
            _judge_excess(tally, truth, grants, bounds, gpu, shown, poll, known)


def _judge_grants(
    tally: Tally, truth: Truth, grants: Iterable[Grant], bounds: Bounds, at: float, gpu: str
) -> None:
    """Judge what was granted on one GPU in one transaction."""
    held = [grant for grant in grants if grant.gpu == gpu and grant.is_held(at)]
    told_at = truth.told_before(gpu, at)
    busy_s = truth.longest_gap(min(told_at, at - bounds.fresh_s), at)
    known_at = min(told_at, at - bounds.fresh_s - busy_s)
    known = [each for each in truth.strangers_on(gpu) if each.surely_from(known_at, at)]
    committed, unmanaged = sum(grant.memory for grant in held), memory_of(known)
    jobs = ", ".join(str(each.job) for each in held if each.granted_at == at)
    named = f"job {jobs} on {gpu[:10]}"
    tally.beside_strangers += bool(known)
    tally.oldest_look_s = max(tally.oldest_look_s, at - told_at)
    if committed + unmanaged > truth.totals[gpu]:
        tally.fault(OVER, f"{named} at {at:.3f}: {_sizes(committed, unmanaged, truth.totals[gpu])}")
    if any(grant.exclusive for grant in held) and (len(held) > 1 or known):
        tally.fault(OVER, f"{named} at {at:.3f}: exclusive, beside {len(held) - 1} and {known}")
    if at - told_at > bounds.fresh_s + busy_s:
        tally.fault(STALE, f"{named} at {at:.3f}: the look was {at - told_at:.2f} s old")
    if truth.is_lost(gpu, at - bounds.fresh_s - busy_s, at):
        tally.fault(AWAY, f"{named} at {at:.3f}")


def _judge_sums(tally: Tally, gpu: str, shown: Shown, poll: Poll) -> None:
    """Judge the figures of one answer by each other."""
    named = f"{gpu[:10]} at {poll.answered_at:.3f}: {shown}"
    if shown.leased != shown.leased_by_jobs or shown.committed < shown.leased:
        tally.fault(SUMS, named)
    if shown.state != "available":
        return
    known = (shown.allocatable, shown.committed, shown.unmanaged)
    if None in known or shown.headroom is None or shown.headroom > max(0, _left(shown)):
        tally.fault(SUMS, named)


def _left(shown: Shown) -> int:
    """Return what is neither leased nor a stranger's, which may be below zero."""
    return (shown.allocatable or 0) - shown.committed - (shown.unmanaged or 0)


def _judge_shown(
    tally: Tally, truth: Truth, bounds: Bounds, gpu: str, shown: Shown, poll: Poll
) -> None:
    """Judge what one answer says is unmanaged by what surely was there, or surely was not."""
    if shown.state != "available" or shown.unmanaged is None:
        return
    oldest = _oldest(truth, bounds, poll)
    since = truth.shown_since(gpu, shown, oldest, poll.answered_at)
    there = [each for each in truth.strangers_on(gpu) if each.surely_from(since, poll.answered_at)]
    maybe = [
        each
        for each in truth.strangers_on(gpu)
        if each.begun_at[0] < poll.answered_at and each.ended_at[1] > since
    ]
    if shown.unmanaged < memory_of(there):
        tally.fault(HIDDEN, f"{gpu[:10]} at {poll.answered_at:.3f}: {memory_of(there)} in {shown}")
    tally.overstated += shown.unmanaged > memory_of(maybe)
    if truth.is_lost(gpu, oldest, poll.answered_at):
        tally.fault(LOST, f"{gpu[:10]} at {poll.answered_at:.3f}: {shown}")


def _oldest(truth: Truth, bounds: Bounds, poll: Poll) -> float:
    """Return when the look that an answer shows was taken at the earliest."""
    before = poll.asked_at - bounds.shown_s
    return before - truth.longest_gap(before, poll.answered_at)


def _passing(
    truth: Truth,
    bounds: Bounds,
    strays: dict[tuple[str, int], float],
    gpu: str,
    shown: Shown,
    poll: Poll,
) -> int:
    """Return the memory of jobs' processes that one look alone takes for strangers.

    `strays` keeps when each was first taken for one.
    """
    strangers = {each.pid for each in truth.strangers_on(gpu)}
    oldest = _oldest(truth, bounds, poll)
    memory, since = 0, truth.shown_since(gpu, shown, oldest, poll.answered_at)
    for process in shown.processes:
        if process.job is None and process.pid not in strangers:
            first = strays.setdefault((gpu, process.pid), poll.answered_at)
            if since <= first:
                memory += process.memory or 0
    return memory


def _judge_excess(
    tally: Tally,
    truth: Truth,
    grants: Iterable[Grant],
    bounds: Bounds,
    gpu: str,
    shown: Shown,
    poll: Poll,
    passing: int,
) -> None:
    """Judge whether leases and strangers fit, but for strangers that came after the last grant."""
    if shown.unmanaged is None or shown.allocatable is None:
        return
    over = -_left(shown)
    earlier = [each.granted_at for each in grants if each.gpu == gpu]
    last = max((at for at in earlier if at < poll.answered_at), default=None)
    if over <= 0 or last is None:
        return
    known_at = min(truth.told_before(gpu, last), last - bounds.fresh_s)
    shown_since = truth.shown_since(gpu, shown, _oldest(truth, bounds, poll), poll.answered_at)
    late = [
        each
        for each in truth.strangers_on(gpu)
        if each.maybe_after(known_at)
        if each.begun_at[0] < poll.answered_at and each.ended_at[1] > shown_since
    ]
    tally.counted_twice += 0 < over - memory_of(late) <= passing
    if over > memory_of(late) + passing:
        tally.fault(EXCESS, f"{gpu[:10]} at {poll.answered_at:.3f}: {over} over in {shown}")


def _sizes(committed: int, unmanaged: int, total: int) -> str:
    return f"{committed >> 30}G leased, {unmanaged >> 30}G of strangers, on {total >> 30}G"


def table(tallies: Sequence[Tally]) -> str:
    """Return the figures of all rounds, a row each."""
    head = (
        "seed", "jobs", "grants", "beside", "oldest", "looks", "twice", "strangers", "lost",
        "failed", "settled", "faults",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [head]
    for tally in tallies:
        figures = (
            tally.seed, tally.jobs, tally.grants, tally.beside_strangers,
            f"{tally.oldest_look_s:.2f}s", tally.polls, tally.counted_twice, tally.strangers,
            tally.losses, tally.failed_calls,
            "never" if tally.settled_in_s is None else f"{tally.settled_in_s:.0f}s",
            sum(tally.faults.values()),
        )  # fmt: skip
        lines.append(tuple(str(figure) for figure in figures))
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
