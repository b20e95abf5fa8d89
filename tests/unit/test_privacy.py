"""Where commands are hidden, nothing else of a job tells others what it runs."""

from dataclasses import fields, replace

from daemon_stand_in import views
from gpulease.server.view_sources import redact_job, redact_row
from gpulease.wire.jobs import JobRowView, JobView, PoolView, UnheldView

SECRET = "secret"


def test_no_field_of_anothers_job_tells_what_is_run() -> None:
    job = views.running(user="alice", name=SECRET, command=SECRET, sized=f"as {SECRET} did")
    job.unheld = [UnheldView(7, SECRET, f"it is in the container {SECRET}")]
    job.leases[0].pools = [PoolView(SECRET, "1", 1, 1, 1, 1)]
    told = repr(redact_job(job, "bob"))
    assert SECRET not in told
    assert redact_job(job, "alice") == job
    failed = replace(job, outcome="launch_failed", reason=f"cannot run {SECRET}")
    assert SECRET not in repr(redact_job(failed, "bob"))


def test_no_line_of_a_listing_tells_it_either() -> None:
    job = views.running(user="alice", name=SECRET, command=SECRET)
    assert SECRET not in repr(redact_row(_row(job), "bob"))
    assert redact_row(_row(job), "alice") == redact_row(_row(job), None) == _row(job)
    failed = replace(job, outcome="launch_failed", reason=f"cannot run {SECRET}")
    assert SECRET not in repr(redact_row(_row(failed), "bob"))


def _row(job: JobView) -> JobRowView:
    return JobRowView(**{each.name: getattr(job, each.name) for each in fields(JobRowView)})
