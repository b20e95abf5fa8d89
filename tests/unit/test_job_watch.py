"""Streams that follow jobs are woken for their own job alone."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Claim
from gpulease.server.jobs import JobWatch
from gpulease.service.job_supervisor import Changes

LONG_S = 60.0


class Jobs:
    """A store of live jobs."""

    def __init__(self, count: int) -> None:
        self.jobs = {number: _job(number) for number in range(1, count + 1)}

    def live_job(self, number: int) -> Job | None:
        return self.jobs.get(number)


class Scheduler:
    def __init__(self, store: Jobs) -> None:
        self.store = store
        self.changes = Changes()

    @property
    def next_change(self) -> asyncio.Event:
        return self.changes.next


def _job(number: int) -> Job:
    return Job(
        id=JobId(number),
        owner=Owner(1001, 1001, "owner"),
        name="job",
        command="true",
        claim=Claim(1 << 30),
        submitted_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_change_of_one_job_wakes_its_streams_and_no_others() -> None:
    async def check() -> None:
        scheduler = Scheduler(Jobs(2))
        store = scheduler.store
        context: Any = SimpleNamespace(scheduler=scheduler)
        watch = JobWatch(context)
        own = [asyncio.create_task(watch.change_of(store.jobs[1], LONG_S)) for _ in range(100)]
        other = asyncio.create_task(watch.change_of(store.jobs[2], LONG_S))
        await _settle()
        store.jobs[1] = replace(store.jobs[1], name="another")
        scheduler.changes.notify()
        await asyncio.wait(own)
        await _settle()
        assert not other.done()
        del store.jobs[2]
        scheduler.changes.notify()
        await other

    asyncio.run(check())


def test_a_job_that_has_changed_already_is_not_waited_for() -> None:
    async def check() -> None:
        store = Jobs(1)
        context: Any = SimpleNamespace(scheduler=SimpleNamespace(store=store))
        await JobWatch(context).change_of(_job(1), LONG_S)

    asyncio.run(check())
