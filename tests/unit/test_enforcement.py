"""Which levels hold a lease, and which processes of a job the framework hook holds."""

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
    HOOK,
    PATH,
    AppliedEnforcement,
    ProcessStart,
    UncoveredProcess,
    in_level_order,
    why_uncovered,
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


# How a process was started decides.


HOOKS = "/opt/gpulease/hooks"
JOB = {HOOK: "{}", PATH: f"{HOOKS}:/home/alice/lib"}


def why(command: str, environment: dict[str, str] | None = JOB, **changes: object) -> str | None:
    given = {"is_python": True, **changes}
    return why_uncovered(ProcessStart(command.split(), environment, **given), HOOKS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        "python3 -u -O train.py -I",
        "python -c -I",
        "python -m trainer -S",
        "python -um trainer -E",
        "python -W error train.py -E",
        "python -X importtime -Wignore train.py",
        "python -W -E train.py",
        "python --check-hash-based-pycs -I train.py",
        "python - -I",
        "python",
        "",
    ],
)
def test_a_python_started_in_the_jobs_environment_is_held(command: str) -> None:
    assert why(command) is None


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("python -I train.py", "-I"),
        ("python3 -uE train.py", "-E"),
        ("python -Sc pass", "-S"),
        ("python -W error -I -m trainer", "-I"),
        ("python -Wignore -X dev -sS x.py", "-S"),
        ("python --check-hash-based-pycs never -E x.py", "-E"),
    ],
)
def test_a_python_that_shuts_the_hook_out_is_not(command: str, flag: str) -> None:
    assert flag in (why(command) or "")


def test_who_has_dropped_the_environment_is_not_held_whatever_it_is() -> None:
    dropped = why("python train.py", {})
    sentence("unhooked-environment", dropped)
    assert why("./solver", {}, is_python=False) == dropped
    elsewhere = why("python train.py", {HOOK: "{}", PATH: "/lib"})
    sentence("unhooked-path", elsewhere)
    assert why("python train.py", {HOOK: "{}"}) == elsewhere


def test_a_program_that_is_no_python_is_not_held() -> None:
    sentence("unhooked-other-language", why("./solver", is_python=False))


def test_a_container_is_held_if_it_has_the_environment_of_the_job() -> None:
    assert "3f2a" in (why("python train.py", {}, container="3f2a") or "")
    assert why("python train.py", container="3f2a") is None
    assert why("python -I train.py", container="3f2a") == why("python -I train.py")


def test_of_what_cannot_be_read_nothing_is_said() -> None:
    assert why("python -I train.py", None) is None
    assert why("./solver", None, is_python=False) is None


def test_a_process_that_has_written_a_title_over_its_command_shows_no_flags() -> None:
    assert why_uncovered(ProcessStart(("ray::worker -I x",), JOB, is_python=True), HOOKS) is None


def test_it_is_told_in_a_sentence() -> None:
    said = str(
        UncoveredProcess(1234, "python3 -I x.py", "it runs with -I, which ignores PYTHONPATH")
    )
    sentence("unhooked", said)
