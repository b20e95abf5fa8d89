"""Why jobs wait and how they ended, as users read it."""

from dataclasses import replace

import pytest

from fakes import NOON, hold_order, order
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Exit, Job, Outcome
from gpulease.domain.lease import State
from gpulease.errors import with_hint
from gpulease.server.reasons import exit_status, reason

JOB = order().queued(JobId(1), NOON)


def ended(outcome: Outcome, exit_: Exit | None = None, detail: str | None = None) -> Job:
    return replace(JOB, state=State.ENDED, outcome=outcome, exit=exit_, detail=detail)


def test_a_reason_and_its_hint_are_separate_fields() -> None:
    stopped = ended(Outcome.OVER_LEASE, detail=with_hint("over its lease", "ask for more"))
    assert reason(stopped) == ("over its lease", "ask for more")
    releasing = replace(stopped, state=State.RELEASING)
    why, hint = reason(releasing)
    assert why is not None and why.startswith("over its lease; ")
    assert hint == "ask for more"


def test_a_hold_has_no_processes_to_wait_for() -> None:
    hold = replace(
        hold_order().queued(JobId(1), NOON), state=State.RELEASING, detail="cancelled by alice"
    )
    assert reason(hold) == ("cancelled by alice", None)


@pytest.mark.parametrize(
    ("job", "status"),
    [
        (JOB, None),
        (ended(Outcome.EXITED, Exit(3, None)), 3),
        (ended(Outcome.SIGNALED, Exit(None, 9)), 137),
        (ended(Outcome.TIME_LIMIT, Exit(0, None)), 124),
        (ended(Outcome.LAUNCH_FAILED), None),
    ],
    ids=["queued", "exited", "signaled", "time limit", "never ran"],
)
def test_the_exit_status_is_that_of_a_shell(job: Job, status: int | None) -> None:
    assert exit_status(job) == status
