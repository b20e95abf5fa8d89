"""Past jobs as the API shows them, and what others do not see of them."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fakes import ALICE, NOON, G, reading
from gpulease.cli.history import COLUMNS, trace_of
from gpulease.domain.gpu import JobId
from gpulease.domain.job import CommandFingerprint, Exit, Job, JobUsage, Outcome, grant, worker_gone
from gpulease.domain.job import worker_started as started
from gpulease.domain.lease import Claim, Trigger
from gpulease.domain.placement import Placement
from gpulease.replay.trace_file import read_trace
from gpulease.server.history import history_view
from gpulease.units import MIB, Share
from gpulease.wire.usage import PastJobView

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


INSTANTS = some.integers(0, 3 * 10**11).map(
    lambda ms: (NOON + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds")
)


@given(
    some.lists(
        some.builds(
            PastJobView,
            id=some.integers(1, 1 << 40),
            label=some.from_regex(r"\d{1,9}(_\d{1,4})?", fullmatch=True),
            name=some.text(),
            user=some.from_regex(r"[a-z][a-z0-9-]{0,30}", fullmatch=True),
            submitted_at=INSTANTS,
            granted_at=some.none() | INSTANTS,
            ended_at=INSTANTS,
            gpus=some.integers(1, 64),
            memory=some.none() | some.integers(1, 1 << 40),
            utilization=some.none() | some.integers(0, 100),
            time_limit=some.none() | some.floats(0.01, 3e8),
            command=some.none() | some.just("0a1b 2c3d"),
        ),
        unique_by=lambda job: job.label,
    )
)
def test_every_export_is_a_trace(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[PastJobView]
) -> None:
    path = tmp_path_factory.getbasetemp() / "export.csv"
    path.write_text("\n".join((",".join(COLUMNS), trace_of(jobs))) + "\n")
    held = {job.label: job for job in jobs if job.granted_at and job.memory}
    if not held:
        return

    trace = read_trace(path)

    read = {trace.names[job.id]: job for job in trace.jobs}
    assert read.keys() == held.keys()
    for label, job in read.items():
        past = held[label]
        assert (job.gpus, job.user) == (past.gpus, past.user)
        assert past.memory is not None
        assert past.memory <= job.memory < past.memory + MIB
        submitted = datetime.fromisoformat(past.submitted_at).timestamp()
        assert job.submit_s == pytest.approx(submitted, abs=0.001)
        assert (job.time_limit_s is None) == (past.time_limit is None)
        assert job.utilization == (None if past.utilization is None else past.utilization / 100)
