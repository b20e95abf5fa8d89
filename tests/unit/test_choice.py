"""Claims for particular GPUs: by name, model and size, and several of one model."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import (
    ALICE,
    BOB,
    NOON,
    FakeClock,
    G,
    MemoryStore,
    order,
    reading,
    running_job,
)
from goldens import sentence
from gpulease.domain.choice import is_model, suits
from gpulease.domain.explain import suggestions
from gpulease.domain.gpu import Fault, GpuMemory, GpuReading, GpuUuid, JobId, LedgerEntry
from gpulease.domain.gpu import build_ledger as ledger
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.placement import ObstacleKind, Placement, Refusal, place
from gpulease.domain.plan import Plan, plan
from gpulease.domain.queue_options import QueueOptions
from gpulease.domain.snapshot import Snapshot
from gpulease.errors import CannotLease, NoSuchGpu
from gpulease.service.observation import Observation
from gpulease.service.ports import Policy
from gpulease.service.submission import submit

MODELS = ("NVIDIA T4", "NVIDIA A100 80GB PCIe", "NVIDIA A10")
T4, A100, OTHER = (
    reading("GPU-0", 0, name=MODELS[0]),
    reading("GPU-1", 1, name=MODELS[1], total=80 * G),
    reading("GPU-2", 2, name=MODELS[0]),
)


@pytest.mark.parametrize(
    ("wanted", "name", "found"),
    [
        ("A100", "NVIDIA A100-SXM4-40GB", True),
        ("a100 80gb", "NVIDIA A100 80GB PCIe", True),
        ("A10", "NVIDIA A100 80GB PCIe", False),
        ("L4", "NVIDIA L40S", False),
        ("4090", "NVIDIA GeForce RTX 4090", True),
        ("nvidia", "NVIDIA T4", True),
        ("T4", "Tesla T4", True),
        (".*", "Tesla T4", False),
    ],
)
def test_a_model_is_named_by_whole_words_of_its_name(wanted: str, name: str, found: bool) -> None:
    assert is_model(wanted, name) is found


@pytest.mark.parametrize(
    ("size", "mib", "suited"),
    [
        (80, 81559, True),  # H100 80GB
        (40, 40536, True),  # A100 40GB
        (24, 22731, True),  # A10 24GB, with ECC
        (16, 15109, True),  # T4 16GB, with ECC
        (12, 11264, False),  # RTX 2080 Ti 11GB
        (24, 20475, False),  # RTX 4000 Ada 20GB
        (40, None, True),
    ],
)
def test_the_size_is_that_in_the_name_of_the_card(size: int, mib: int | None, suited: bool) -> None:
    card = reading(total=None if mib is None else mib * 1024**2)
    assert suits(Claim(G, min_vram=size * G), card) is suited


def test_the_name_of_a_divided_gpu_stands_for_its_mig_devices() -> None:
    part = reading("MIG-1", 0, parent=GpuUuid("GPU-0"), mig_index=1)
    assert suits(Claim(G, named=(GpuUuid("GPU-0"),)), part)
    assert not suits(Claim(G, named=(GpuUuid("GPU-1"),)), part)


# Placement.

claims = st.builds(
    Claim,
    memory=st.integers(1, 8).map(lambda size: size * G),
    gpus=st.integers(1, 3),
    named=st.lists(st.integers(0, 4), max_size=3, unique=True).map(
        lambda indices: tuple(GpuUuid(f"GPU-{index}") for index in indices)
    ),
    model=st.sampled_from([None, "T4", "A100", "A10", "H100"]),
    min_vram=st.sampled_from([None, 8 * G, 40 * G]),
    same_model=st.booleans(),
)
cards = st.lists(
    st.tuples(
        st.sampled_from(MODELS),
        st.sampled_from([8 * G, 80 * G]),
        st.integers(0, 8),
        st.sampled_from([None, "drained"]),
    ),
    min_size=1,
    max_size=5,
).map(
    lambda each: [
        ledger(
            reading(f"GPU-{index}", index, name=name, total=total),
            [LedgerEntry(JobId(index + 1), leased * G)] if leased else [],
            {},
            drained=drained,
        )
        for index, (name, total, leased, drained) in enumerate(each)
    ]
)


def refuse_violations(claim: Claim, uuids: list[GpuUuid], gpus: dict[GpuUuid, GpuReading]) -> None:
    assert len(uuids) == claim.gpus == len(set(uuids))
    assert all(suits(claim, gpus[uuid]) for uuid in uuids)
    assert not claim.named or set(uuids) <= set(claim.named)
    if claim.same_model:
        assert len({gpus[uuid].name for uuid in uuids}) == 1


@given(claims, cards)
def test_no_placement_violates_the_choice_and_a_refusal_has_a_reason_for_each_gpu(
    claim: Claim, gpus: list[GpuMemory]
) -> None:
    answer = place(claim, gpus)
    readings = {gpu.uuid: gpu.reading for gpu in gpus}
    if isinstance(answer, Placement):
        refuse_violations(claim, [uuid for uuid, _ in answer.allocations], readings)
        return
    assert {each.gpu for each in answer.obstacles} | set(answer.fits) == readings.keys()
    assert all(each.why for each in answer.obstacles)
    unsuited = {uuid for uuid, gpu in readings.items() if not suits(claim, gpu)}
    kinds = {each.gpu for each in answer.obstacles if each.kind is ObstacleKind.NOT_ASKED_FOR}
    assert kinds == unsuited


def test_each_wish_has_its_own_reason() -> None:
    wishes = (Claim(G, named=(A100.uuid,)), Claim(G, model="A100"), Claim(G, min_vram=40 * G))
    for claim, words in zip(wishes, ("not one of", "not A100", "less than 40G"), strict=True):
        refused = place(claim, [ledger(T4, [], {})])
        assert isinstance(refused, Refusal)
        assert words in refused.obstacles[0].why
        sentence(f"not-asked-for-{words.replace(' ', '-')}", refused.obstacles[0].why)


# Plans.


def waiting(number: int, memory: int, options: QueueOptions | None = None, **claim: object) -> Job:
    made = Job(JobId(number), ALICE, "job", "true", Claim(memory, **claim), NOON)  # type: ignore[arg-type]
    return made if options is None else replace(made, queue=options)


def running(
    number: int, memory: int, *gpus: GpuReading, options: QueueOptions | None = None
) -> Job:
    job = waiting(number, memory, options, gpus=len(gpus))
    return replace(running_job(job, *(gpu.uuid for gpu in gpus)), owner=BOB)


def decide(*jobs: Job, gpus: tuple[GpuReading, ...] = (T4, A100, OTHER)) -> Plan:
    return plan(Snapshot(jobs, gpus, NOON + timedelta(minutes=1)))


def places(decided: Plan) -> dict[int, list[str]]:
    return {job: [uuid for uuid, _ in place.allocations] for job, place in decided.grants}


@given(st.lists(st.tuples(claims, st.booleans(), st.integers(0, 48)), max_size=12), cards)
def test_no_plan_violates_a_choice(
    asked: list[tuple[Claim, bool, int]], gpus: list[GpuMemory]
) -> None:
    readings = {gpu.uuid: gpu.reading for gpu in gpus}
    jobs = []
    for number, (claim, preemptible, hours) in enumerate(asked, 1):
        since = NOON - timedelta(hours=hours)
        options = QueueOptions(preemptible=preemptible, aging_since_at=since)
        jobs.append(replace(waiting(number, G, options), claim=claim))
    decided = decide(*jobs, gpus=tuple(readings.values()))
    by_id = {job.id: job for job in jobs}
    for job, placed in decided.grants:
        refuse_violations(by_id[job].claim, [uuid for uuid, _ in placed.allocations], readings)
    kept = [uuid for each in decided.reservations for uuid in each.memory]
    assert len(kept) == len(set(kept)), "no GPU is reserved twice"
    for each in decided.reservations:
        refuse_violations(by_id[each.job].claim, list(each.memory), readings)


def test_a_gang_of_one_model_is_not_mixed() -> None:
    pair = waiting(2, 4 * G, gpus=2, same_model=True)
    assert places(decide(pair)) == {2: ["GPU-0", "GPU-2"]}
    held = running(1, 6 * G, OTHER)
    assert places(decide(held, pair)) == {}
    assert places(decide(held, waiting(2, 4 * G, gpus=2))) == {2: ["GPU-0", "GPU-1"]}


def test_gpus_of_one_model_are_reserved_for_a_gang_that_waits_long() -> None:
    old = QueueOptions(aging_since_at=NOON - timedelta(hours=30))
    pair = waiting(2, 4 * G, old, gpus=2, same_model=True)
    decided = decide(running(1, 6 * G, OTHER), pair)
    assert set(decided.reserved) == {"GPU-0", "GPU-2"}


def test_only_jobs_on_the_gpus_asked_for_make_way() -> None:
    spare = QueueOptions(preemptible=True)
    jobs = [running(1, 8 * G, T4, options=spare), running(2, 80 * G, A100, options=spare)]
    held = running(3, 8 * G, OTHER)
    decided = decide(*jobs, held, waiting(4, 4 * G, model="T4"))
    assert decided.preempts == ((1, 4),)


def test_other_gpus_are_suggested_and_less_memory_only_on_those_asked_for() -> None:
    wish = waiting(2, 6 * G, named=(T4.uuid,), model="T4")
    found = suggestions(decide(running(1, 4 * G, T4), wish), wish, G)
    assert [each.options for each in found] == ["--mem 4G", "no --gpu"]
    assert found[0].claim.named == (T4.uuid,)


# Submission.


def send(*names: str, here: tuple[GpuReading, ...] = (T4, A100, OTHER), **claim: object) -> Job:
    wanted = order(4 * G)
    wanted = replace(wanted, named=names, claim=replace(wanted.claim, **claim))  # type: ignore[arg-type]
    return submit(MemoryStore(), wanted, Observation(here, {}, NOON), Policy(), FakeClock())


def test_names_are_resolved_as_those_of_a_drain() -> None:
    assert send("1", "GPU-1").claim.named == ("GPU-1",)
    assert send("gpu-2", "0").claim.named == ("GPU-0", "GPU-2")
    with pytest.raises(NoSuchGpu, match="9"):
        send("9")


@pytest.mark.parametrize(
    ("names", "claim", "words"),
    [
        (["1"], {"gpus": 2}, "names 1"),
        ([], {"model": "H100"}, "--gpu-model H100"),
        ([], {"min_vram": 100 * G}, "--min-vram 100G"),
        ([], {"gpus": 2, "model": "A100"}, "has 1"),
        ([], {"gpus": 3, "same_model": True}, "--same-model"),
        (["0"], {"model": "A100"}, "--gpu 0 --gpu-model A100"),
        (["0"], {"memory": 40 * G}, "offers 8G"),
        (["0", "1"], {"gpus": 2, "memory": 40 * G}, "only 1 asked for can"),
    ],
)
def test_what_no_gpu_here_can_satisfy_is_refused_at_once(
    names: list[str], claim: dict[str, object], words: str
) -> None:
    with pytest.raises(CannotLease, match=words) as caught:
        send(*names, **claim)
    assert caught.value.hint
    option = words.split(maxsplit=1)[0].strip("-")
    sentence(f"choice-{option}-{len(claim)}", f"{caught.value.message}\n{caught.value.hint}")


def test_a_gpu_that_may_come_back_is_waited_for() -> None:
    away = replace(A100, fault=Fault.LOST, total=None)
    assert send("1", here=(T4, away), memory=40 * G).claim.named == ("GPU-1",)
    assert send(here=(T4, away), model="A100", min_vram=40 * G).claim.model == "A100"
