"""What scope the daemon asks for, and how long a shutdown may have to wait for it."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fakes import ALICE, NOON, FakeClock
from gpulease.daemon.enclosure import enclose
from gpulease.daemon.workers import Surroundings, Workers
from gpulease.domain.claim import Claim
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import Lease
from gpulease.domain.memory import GpuUuid, JobId
from gpulease.process import scopes
from gpulease.process.launcher import Launch

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
TRUE = Invocation(argv=("true",), cwd="/", environment={})
ONE_GPU = (Lease(GpuUuid("GPU-0"), 1, NOON),)


class Noted:
    """A launcher that starts nothing, and a state directory that is always the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.launches: list[Launch] = []

    async def launch(self, launch: Launch) -> None:
        self.launches.append(launch)

    def job(self, job: int) -> Path:
        return self.path


def launched(path: Path, wanted: timedelta | None, usual: timedelta) -> Launch:
    """Return what is launched for a job that asked for a grace, by a daemon with one of its own."""
    noted, nothing = Noted(path), dict[Any, Any]()
    around = Surroundings(
        installation="x",
        as_other_users=False,
        simulated=True,
        driver=lambda: None,
        readings=lambda: nothing,
        hooks=path,
        grace=MINUTE,
        log_limit=1,
    )
    workers = Workers(noted, None, noted, around, FakeClock())  # type: ignore[arg-type]
    workers.adopt(usual, 1)
    job = Job(JobId(1), ALICE, "", "true", Claim(memory=1), NOON, leases=ONE_GPU, grace=wanted)
    asyncio.run(workers.launch(job, TRUE))
    return noted.launches[0]


@pytest.mark.parametrize(
    ("wanted", "usual", "told"),
    [(DAY, MINUTE, MINUTE), (MINUTE, DAY, MINUTE), (None, MINUTE, MINUTE), (None, DAY, DAY)],
)
def test_a_shutdown_waits_for_what_the_user_asked_for_but_no_longer_than_the_admin_says(
    tmp_path: Path, wanted: timedelta | None, usual: timedelta, told: timedelta
) -> None:
    launch = launched(tmp_path, wanted, usual)
    assert launch.grace_at_shutdown == told
    assert launch.grace == (wanted or usual), "a cancel waits as long as the user asked for"


def test_the_scope_has_the_grace_of_a_shutdown_and_some_time_for_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[scopes.Scope] = []

    async def note(pid: int, scope: scopes.Scope) -> None:
        asked.append(scope)

    monkeypatch.setattr(scopes, "enclose", note)
    launch = launched(tmp_path, DAY, MINUTE)
    for each in (launch, replace(launch, grace_at_shutdown=None)):
        asyncio.run(enclose(1, each))
    assert MINUTE < asked[0].grace < 2 * MINUTE
    assert asked[1].grace > DAY, "where nothing is said of a shutdown"
