"""Why jobs wait and how they ended, as users read it."""

from dataclasses import replace

import pytest

from fakes import NOON, G, hold_order, order, reading
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Exit, Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.plan import plan, why_waiting
from gpulease.domain.queue_options import ArrayElement, QueueOptions
from gpulease.domain.snapshot import Snapshot
from gpulease.errors import with_hint
from gpulease.server.reasons import exit_status, explanation, reason

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


def test_a_job_on_several_gpus_is_told_on_how_many_it_fits() -> None:
    gpus = [reading("GPU-a", 0), reading("GPU-b", 1)]
    first = order(5 * G).queued(JobId(1), NOON)
    wide = order(5 * G, gpus=2).queued(JobId(2), NOON)
    decided = plan(Snapshot([first, wide], gpus, NOON))
    waiting = explanation(wide.claim, why_waiting(decided, wide), 2)
    assert waiting.why == "needs 5G on each of 2 GPUs, and 1 GPU has that free now"


@pytest.mark.parametrize("passes", [1, 2], ids=["as it starts", "while it runs"])
@pytest.mark.parametrize("exclusive", [False, True])
def test_reasons_name_elements_of_arrays_as_people_see_them(passes: int, exclusive: bool) -> None:
    """The id of an element stands nowhere else."""
    jobs = [
        replace(
            order(5 * G, exclusive=exclusive).queued(JobId(place + 1), NOON),
            queue=QueueOptions(array=ArrayElement(JobId(1), place)),
        )
        for place in range(4)
    ]
    decided = plan(Snapshot(jobs, [reading("GPU-a", 0), reading("GPU-b", 1)], NOON))
    for _ in range(passes - 1):
        decided = plan(replace(decided.after, gpus=None))
    waiting = explanation(jobs[3].claim, why_waiting(decided, jobs[3]), 2)
    assert waiting.waits_for[:2] == [1, 2]
    assert waiting.waits_for_labels[:2] == ["1_0", "1_1"]
    missing = (
        "needs a GPU without other jobs"
        if exclusive
        else "needs 5G, and at most 3G is free on a GPU now"
    )
    assert waiting.why == missing
    if exclusive:
        assert [each.why.split()[:2] for each in waiting.refusals] == [
            ["job", "1_0"], ["job", "1_1"]
        ]  # fmt: skip
