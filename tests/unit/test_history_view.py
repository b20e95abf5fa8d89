"""Past jobs as the API shows them, and what others do not see of them."""

from dataclasses import MISSING, fields
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from fakes import ALICE, NOON, G
from gpulease.cli.job_table import past_page
from gpulease.cli.list_page import TRACE, trace_of
from gpulease.cli.tables import Table
from gpulease.client.light_client import read
from gpulease.domain.job import Outcome
from gpulease.replay.trace import read_trace
from gpulease.server.job_list import past_job_view
from gpulease.service.job_list import EndedJob
from gpulease.units import MIB
from gpulease.wire.usage import PastJobView

SECRET = "secret"


def ended(number: int, **changes: Any) -> EndedJob:
    job = EndedJob(
        id=number, array=None, array_index=None, name=SECRET, user=ALICE.user, is_hold=False,
        slurm_job=None, outcome=Outcome.EXITED, exit_code=3, exit_signal=None,
        submitted_at=NOON, granted_at=NOON, ended_at=NOON, gpus=1, asked=2 * G, leased=3 * G,
        used=G, utilization=None, time_limit_us=None, alike="similar", same="exact",
    )  # fmt: skip
    return job._replace(**changes)


def test_what_was_leased_is_shown_also_for_a_share() -> None:
    view = past_job_view(ended(4, asked=None))

    assert (view.memory, view.exit_status, view.command) == (3 * G, 3, "similar exact")
    never = past_job_view(ended(4, granted_at=None, leased=None))
    assert (never.granted_at, never.memory) == (None, 2 * G)


def test_a_job_stopped_at_a_limit_has_the_status_of_timeout() -> None:
    jobs = [
        ended(1, outcome=Outcome.TIME_LIMIT, exit_code=0),
        ended(2, outcome=Outcome.SIGNALED, exit_code=None, exit_signal=9),
        ended(3, outcome=Outcome.LOST, exit_code=None),
    ]

    assert [past_job_view(job).exit_status for job in jobs] == [124, 137, None]


def test_the_jobs_of_an_older_daemon_are_shown_without_what_it_does_not_send() -> None:
    sent = msgspec.to_builtins(past_job_view(ended(4)))
    for each in fields(PastJobView):
        if each.default is not MISSING:
            del sent[each.name]

    (table,) = past_page([read(msgspec.json.encode(sent))], NOON)
    assert isinstance(table, Table)
    (row,) = table.rows

    assert "4" in str(row[0])


def test_a_view_says_what_kind_of_job_it_was() -> None:
    jobs = [
        ended(1),
        ended(2, is_hold=True),
        ended(3, slurm_job=7),
        ended(9, array=5, array_index=4),
    ]

    views = [past_job_view(job) for job in jobs]
    assert [job.kind for job in views] == ["run", "hold", "slurm", "run"]
    assert [job.label for job in views] == ["1", "2", "7", "5_4"]


def test_where_commands_are_hidden_others_see_neither_name_nor_digest() -> None:
    hidden = past_job_view(ended(4), "bob")

    assert SECRET not in repr(hidden)
    assert hidden.command is None
    assert past_job_view(ended(4), ALICE.user).name == SECRET


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
    path.write_text(",".join(TRACE) + "\n" + trace_of(jobs))
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
