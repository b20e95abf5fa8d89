"""Past jobs as the API shows them, and what others do not see of them."""

from dataclasses import replace

from fakes import ALICE, NOON, G, reading
from gpulease.domain.gpu import JobId
from gpulease.domain.job import CommandFingerprint, Exit, Job, JobUsage, Outcome, grant, worker_gone
from gpulease.domain.job import worker_started as started
from gpulease.domain.lease import Claim, Trigger
from gpulease.domain.placement import Placement
from gpulease.server.history import history_view
from gpulease.units import Share

SECRET = "secret"


def ended(number: int, claim: Claim | None = None) -> Job:
    usage = JobUsage(CommandFingerprint("similar", "exact"))
    claim = claim or Claim(2 * G)
    job = Job(JobId(number), ALICE, SECRET, SECRET, claim, NOON, usage=usage)
    running = started(grant(job, Placement(((reading().uuid, 3 * G),)), NOON), 1, 1, NOON)
    assert running is not None
    done = worker_gone(running, Trigger.WORKER_EXITED, Outcome.EXITED, None, Exit(3), NOON)
    assert done is not None
    return done


def test_the_newest_is_first_and_a_full_page_says_what_follows() -> None:
    jobs = [ended(4), ended(5)]

    assert [job.id for job in history_view(jobs, 2, None).jobs] == [5, 4]
    assert history_view(jobs, 2, None).before == 4
    assert history_view(jobs, 3, None).before is None
    assert history_view([], 3, None).before is None


def test_what_was_leased_is_shown_also_for_a_share() -> None:
    (view,) = history_view([ended(4, Claim(Share(50)))], 9, None).jobs  # type: ignore[arg-type]

    assert (view.memory, view.exit_status, view.command) == (3 * G, 3, "similar exact")


def test_a_job_that_never_held_memory_has_no_grant() -> None:
    job = replace(ended(4), granted_at=None, leases=())

    (view,) = history_view([job], 9, None).jobs

    assert (view.granted_at, view.memory) == (None, 2 * G)


def test_where_commands_are_hidden_others_see_neither_name_nor_digest() -> None:
    hidden = history_view([ended(4)], 9, "bob")

    assert SECRET not in repr(hidden)
    assert hidden.jobs[0].command is None
    assert history_view([ended(4)], 9, ALICE.user).jobs[0].name == SECRET
