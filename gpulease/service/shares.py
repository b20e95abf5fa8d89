"""What each user has used, holds and waits for, as the next pass over the queue sees it."""

from collections.abc import Sequence

from gpulease.domain.plan import plan
from gpulease.domain.standing import UserStanding, standings
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock, Policy, Store
from gpulease.service.queue_state import QueueState


def shares(
    store: Store, seen: Observation, policy: Policy, clock: Clock, state: QueueState
) -> Sequence[UserStanding]:
    """Return the users of the queue, in the order of their turns. Nothing is granted.

    Call it in the thread that writes to the database, which owns `state`.
    """
    snapshot = state.snapshot(store.live(), seen, policy, store.drained(), clock.now())
    return standings(plan(snapshot))
