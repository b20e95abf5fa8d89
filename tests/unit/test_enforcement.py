"""On which rungs leases stand: noted at the launch, kept, and never said without ground."""

from dataclasses import replace

import pytest

from fakes import (
    NOON,
    FakeClock,
    G,
    MemoryStore,
    granted_job,
    order,
)
from goldens import sentence
from gpulease.domain.enforcement import (
    AppliedEnforcement,
    in_level_order,
    with_enforcement,
)
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.service import jobs
from gpulease.service.jobs import note_enclosed
from gpulease.service.ports import WorkerStarted

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")


def granted() -> Job:
    job = order(gpus=2).queued(JobId(1), NOON)
    return granted_job(job, A, B)


def test_rungs_stand_in_their_order_and_each_once() -> None:
    assert in_level_order(["devices", "watch", "driver", "watch"]) == ("driver", "watch", "devices")
    assert in_level_order(["of a later release", "framework"]) == (
        "framework",
        "of a later release",
    )
    assert in_level_order([]) == ()


def test_a_lease_stands_on_the_drivers_rung_only_where_the_driver_keeps_a_limit() -> None:
    enclosed = AppliedEnforcement(devices=True, limits={A: 3 * G})
    first, second = with_enforcement(granted(), ["framework"], enclosed).leases
    assert first.enforced_by == ("driver", "framework", "devices")
    assert first.driver_limit == 3 * G
    assert second.enforced_by == ("framework", "devices")
    assert second.driver_limit is None


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    with made.write() as tx:
        job = tx.add(order(gpus=2), NOON)
        tx.save(replace(granted(), id=job.id), event="granted")  # type: ignore[arg-type]
    return made


def test_what_was_put_around_a_job_is_noted_before_it_starts_and_stays(store: MemoryStore) -> None:
    note_enclosed(store, JobId(1), ("framework",), AppliedEnforcement(limits={A: G}), FakeClock())
    started = WorkerStarted(1, 2, NOON, levels=("watch",))
    job = jobs.note_started(store, JobId(1), started)
    assert [lease.enforced_by for lease in job.leases] == [("driver", "framework"), ("framework",)]
    assert store.events(JobId(1))[1].kind == "enclosed"


def test_what_could_not_be_had_is_told_in_the_jobs_history(store: MemoryStore) -> None:
    enclosed = AppliedEnforcement(
        devices=True, missing=("no limit by the driver on GPU-a: it hangs",)
    )
    note_enclosed(store, JobId(1), (), enclosed, FakeClock())
    sentence("enclosed-devices", store.events(JobId(1))[1].detail)
    note_enclosed(store, JobId(1), (), AppliedEnforcement(), FakeClock())
    sentence("enclosed-nothing", store.events(JobId(1))[2].detail)
