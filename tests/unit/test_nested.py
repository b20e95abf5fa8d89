"""What a process of a job may have of the lease that it runs under."""

from dataclasses import replace

import pytest

from fakes import ALICE, NOON, FakeFinder, G, reading
from goldens import sentence
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Holder, Invocation, Job
from gpulease.domain.lease import Claim, Lease, State
from gpulease.errors import AlreadyLeased, BadValue
from gpulease.server.auth import Caller
from gpulease.server.nested import invocation_of, job_around, part_of
from gpulease.server.validation import Defaults, options_of
from gpulease.wire.requests import ClaimRequest, NestedRequest, WorkerOptionsRequest

FIRST, SECOND = GpuUuid("GPU-1"), GpuUuid("GPU-2")
ALLOCATABLE = {FIRST: 8 * G, SECOND: 8 * G}
GPUS = {
    FIRST: reading(FIRST, 0, name="NVIDIA T4"),
    SECOND: reading(SECOND, 1, name="NVIDIA A100"),
}
CALLER = Caller(4711, ALICE.uid, ALICE.gid)
JOB = Job(
    id=JobId(7),
    owner=ALICE,
    name="train",
    command="train.py",
    claim=Claim(4 * G, 2),
    submitted_at=NOON,
    state=State.ACTIVE,
    leases=(Lease(FIRST, 4 * G, NOON), Lease(SECOND, 4 * G, NOON)),
)


def part(environment: dict[str, str] | None = None, **claim: object) -> list[tuple[str, int]]:
    """Return the GPUs and bytes that a caller gets who asks for this."""
    by_index = bool(claim.pop("by_index", False))
    asked = NestedRequest({}, ClaimRequest(**claim))  # type: ignore[arg-type]
    found = part_of(
        JOB, asked, environment or {}, Defaults(G), ALLOCATABLE, GPUS, by_index=by_index
    )
    return [(lease.gpu, lease.memory) for lease in found.leases]


@pytest.mark.parametrize("named", ["", FIRST, "0", "0,1", f"{FIRST},{SECOND}", "2,3"])
def test_gpus_are_given_by_index_from_the_first_on(named: str) -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": named}
    assert part(chosen, memory=G, by_index=True) == [(FIRST, G)]


@pytest.mark.parametrize("named", [SECOND, "1", "3"])
def test_a_gpu_that_cannot_be_given_by_index_is_refused_and_no_other_given(named: str) -> None:
    with pytest.raises(AlreadyLeased, match="GPU"):
        part({"CUDA_VISIBLE_DEVICES": named}, memory=G, by_index=True)


def test_a_part_may_be_of_the_gpus_that_are_asked_for() -> None:
    assert part(named=["1"]) == [(SECOND, 4 * G)]
    assert part(model="a100") == [(SECOND, 4 * G)]
    for asked in ({"named": ["1"], "gpus": 2}, {"model": "H100"}, {"gpus": 2, "same_model": True}):
        with pytest.raises(AlreadyLeased, match="asked for"):
            part(**asked)
    with pytest.raises(AlreadyLeased, match="NVLink"):
        part(gpus=2, linked=True)
    with pytest.raises(AlreadyLeased, match="index"):
        part(named=["1"], by_index=True)


def test_a_part_of_a_range_is_at_most_its_bound() -> None:
    ranged = replace(JOB, leases=(Lease(FIRST, 2 * G, NOON, memory_bound=6 * G),))

    def sizes(environment: dict[str, str], **claim: int) -> list[str]:
        asked = NestedRequest({}, ClaimRequest(**claim))
        found = part_of(ranged, asked, environment, Defaults(G), ALLOCATABLE, GPUS, by_index=False)
        return [lease.size for lease in found.leases]

    assert sizes({}) == ["2G..6G"]
    assert sizes({}, memory=5 * G) == ["2G..5G"]
    assert sizes({}, memory=G, memory_bound=3 * G) == ["2G..3G"]
    assert sizes({}, memory=G) == ["1G"]
    within = {"GPULEASE_JOB": "7", "GPULEASE_MEMORY": str(3 * G)}
    assert sizes(within) == ["2G..3G"]
    with pytest.raises(AlreadyLeased, match="3G"):
        sizes(within, memory=4 * G)


def test_without_a_size_it_is_all_of_the_lease_on_so_many_gpus() -> None:
    assert part() == [(FIRST, 4 * G)]
    assert part(gpus=2) == [(FIRST, 4 * G), (SECOND, 4 * G)]


def test_a_share_is_of_the_gpu_and_not_of_the_lease() -> None:
    assert part(share=25.0) == [(FIRST, 2 * G)]
    with pytest.raises(AlreadyLeased, match="4G"):
        part(share=60.0)


def test_the_gpu_that_the_caller_chose_is_taken_where_it_is_chosen_by_uuid() -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": SECOND}
    assert part(chosen, memory=G) == [(SECOND, G)]
    assert part({"CUDA_VISIBLE_DEVICES": "GPU-of-another"}, memory=G) == [(FIRST, G)]
    with pytest.raises(AlreadyLeased, match=r"1 GPU .* 2"):
        part(chosen, memory=G, gpus=2)


@pytest.mark.parametrize(
    ("job", "told"), [("7", ""), ("7", "much"), ("7", "-1"), ("7", "9" * 5000), ("6", "1")]
)
def test_a_size_in_the_environment_that_is_none_does_not_count(job: str, told: str) -> None:
    assert part({"GPULEASE_JOB": job, "GPULEASE_MEMORY": told}) == [(FIRST, 4 * G)]


def test_options_are_those_of_the_job_but_for_what_is_given() -> None:
    whole = {"visible": "uuid", "growth": True, "split": 2}
    asked = NestedRequest({}, options=WorkerOptionsRequest(split=3, strict=True))
    options = invocation_of(Invocation(("x",), "/", {}, options=whole), asked, {}).options
    assert options == {
        "visible": "uuid",
        "growth": True,
        "split": 3,
        "split_sizes": [],
        "strict": True,
    }


def test_a_split_replaces_that_of_the_job_whether_equal_or_not() -> None:
    parts = {"split": 2, "split_sizes": [G, 2 * G]}
    for job, asked, found in (
        (parts, WorkerOptionsRequest(), parts),
        (parts, WorkerOptionsRequest(split=3), {"split": 3, "split_sizes": []}),
        ({"split": 3}, WorkerOptionsRequest(split_sizes=[G, 2 * G]), parts),
    ):
        request = NestedRequest({}, options=asked)
        assert invocation_of(Invocation(("x",), "/", {}, options=job), request, {}).options == found


def test_parts_above_the_lease_are_refused() -> None:
    asked = WorkerOptionsRequest(split_sizes=[2 * G, 3 * G])

    assert options_of(asked, 5 * G)["split"] == 2
    assert options_of(asked)["split_sizes"] == [2 * G, 3 * G]
    with pytest.raises(BadValue) as refused:
        options_of(asked, 4 * G)
    sentence("split-too-large", refused.value.text())


def test_the_job_around_is_the_one_that_the_callers_process_belongs_to() -> None:
    finder = FakeFinder(jobs={4711: JOB.id})
    # Whatever the environment says.
    for environment in ({}, {"GPULEASE_JOB": "7"}, {"GPULEASE_JOB": "6"}):
        assert job_around(CALLER, environment, [JOB], finder.jobs_of) is JOB
    other = replace(CALLER, pid=4712)
    assert job_around(other, {"GPULEASE_JOB": "7"}, [JOB], finder.jobs_of) is None


def test_no_job_is_around_a_caller_whom_the_daemon_cannot_see() -> None:
    finder = FakeFinder(jobs={0: JOB.id})
    assert job_around(replace(CALLER, pid=0), {"GPULEASE_JOB": "7"}, [JOB], finder.jobs_of) is None


def test_a_hold_is_around_a_process_only_if_its_environment_names_it() -> None:
    finder = FakeFinder(jobs={4711: JOB.id})
    hold = replace(JOB, holder=Holder(None, None))
    assert job_around(CALLER, {}, [hold], finder.jobs_of) is None
    assert job_around(CALLER, {"GPULEASE_JOB": "7"}, [hold], finder.jobs_of) is hold
