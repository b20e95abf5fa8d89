"""The users of the queue side by side: what they used, hold and wait for, and who goes next."""

from collections import Counter
from dataclasses import dataclass

from gpulease.domain.job import Job
from gpulease.domain.plan import Plan, order_of
from gpulease.domain.queue import Order, Queue
from gpulease.domain.snapshot import capacity, ledgers


@dataclass(frozen=True, slots=True)
class UserStanding:
    """One user in the queue."""

    user: str
    use: float
    """Byte-seconds of leases that have ended and that are held, decayed."""
    share: float
    """The part of all use that counts for the order, 0 to 1: held leases count for longer."""
    factor: float
    """The share relative to an equal one, which the cost of the user's jobs is multiplied by."""
    held: int
    """Bytes leased now, over all GPUs."""
    running: int
    """Jobs and holds that hold memory."""
    waiting: int
    """Jobs and holds that wait."""
    turn: int | None
    """The place of the user's next job among those of all users, from 1; None: nothing can start
    however much memory is free."""
    next_job: Job | None
    """That job."""


def standings(plan: Plan) -> list[UserStanding]:
    """Return every user with recent use or jobs; those with a turn first, in that order."""
    snapshot = plan.snapshot
    now_s = snapshot.at.timestamp()
    past = snapshot.use.at(now_s)
    largest = capacity(ledgers(snapshot))
    queue = snapshot.queue or Queue.of(snapshot.jobs, largest)
    order = Order(queue, now_s, snapshot.policy, snapshot.history, past)
    # The job of each user that goes next, in the order of the queue.
    first: dict[str, Job] = {}
    for job in order_of(snapshot, plan.reservations):
        if job.owner.user not in first and plan.limits.exceeded_by(job) is None:
            first[job.owner.user] = job
    turns = {user: (place, job) for place, (user, job) in enumerate(first.items(), 1)}
    waiting = Counter(job.owner.user for job in snapshot.jobs if not job.holds_memory)
    held: dict[str, list[Job]] = {}
    for job in snapshot.jobs:
        if job.holds_memory:
            held.setdefault(job.owner.user, []).append(job)
    found = [
        UserStanding(
            user=user,
            use=order.used.get(user, 0.0) * largest,
            share=order.shares.share(user),
            factor=order.shares.factor(user),
            held=sum(lease.memory for job in held.get(user, ()) for lease in job.leases),
            running=len(held.get(user, ())),
            waiting=waiting[user],
            turn=turns[user][0] if user in turns else None,
            next_job=turns[user][1] if user in turns else None,
        )
        for user in order.used.keys() | waiting.keys() | held.keys()
    ]
    return sorted(found, key=lambda each: (each.turn is None, each.turn or 0, each.user))
