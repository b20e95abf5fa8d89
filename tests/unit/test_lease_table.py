"""The table of a lease's life, spoken about as a whole."""

import pytest

from gpulease.domain.lease import (
    HOLDS_MEMORY,
    IGNORED,
    TRANSITIONS,
    IllegalTransition,
    State,
    Trigger,
    next_state,
)


def test_memory_is_never_returned_while_a_worker_may_live() -> None:
    gone = {Trigger.WORKER_EXITED, Trigger.LAUNCH_FAILED, Trigger.LAUNCH_DEFERRED}
    for (state, trigger), target in TRANSITIONS.items():
        if state in HOLDS_MEMORY and target not in HOLDS_MEMORY:
            assert trigger in gone, (state, trigger)


def test_memory_is_only_ever_taken_by_a_grant() -> None:
    for (state, trigger), target in TRANSITIONS.items():
        if state not in HOLDS_MEMORY and target in HOLDS_MEMORY:
            assert trigger is Trigger.GRANT, (state, trigger)


def test_what_has_ended_stays_ended() -> None:
    assert not [state for state, _ in TRANSITIONS if state is State.ENDED]


def test_no_pair_both_moves_and_is_ignored() -> None:
    assert not IGNORED & set(TRANSITIONS)


def test_every_state_can_be_reached_and_every_life_can_end() -> None:
    assert {State.QUEUED, *TRANSITIONS.values()} == set(State)
    for state in set(State) - {State.ENDED}:
        reached = {state}
        while new := {b for (a, _), b in TRANSITIONS.items() if a in reached} - reached:
            reached |= new
        assert State.ENDED in reached, state


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("trigger", Trigger)
def test_every_pair_moves_or_is_ignored_or_is_refused_by_name(
    state: State, trigger: Trigger
) -> None:
    if (state, trigger) in IGNORED:
        assert next_state(state, trigger) is None
    elif (state, trigger) in TRANSITIONS:
        assert next_state(state, trigger) is TRANSITIONS[state, trigger]
    else:
        with pytest.raises(IllegalTransition) as refused:
            next_state(state, trigger)
        assert (refused.value.state, refused.value.trigger) == (state, trigger)


@pytest.mark.parametrize("state", sorted(HOLDS_MEMORY))
def test_news_of_the_end_is_welcome_in_every_state_that_holds_memory(state: State) -> None:
    assert next_state(state, Trigger.WORKER_EXITED) is State.ENDED
