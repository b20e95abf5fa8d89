"""GPUs are their UUIDs, whatever index they have and whether or not they answer."""

from hypothesis import given
from hypothesis import strategies as st

from gpulease.domain.gpu import Fault, GpuUuid
from gpulease.gpu.devices import Device, match
from gpulease.gpu.nvml_binding import Handle


def gpu(name: str, index: int) -> Device:
    return Device(GpuUuid(f"GPU-{name}"), index, f"card {name}", Handle(object()))


def silent(index: int) -> Device:
    uuid = GpuUuid(f"unknown-{index}")
    return Device(uuid, index, "unknown GPU", fault=Fault.LOST, detail="GPU is lost")


def test_a_gpu_that_does_not_tell_its_uuid_is_the_one_known_at_its_place() -> None:
    first, second = match((gpu("a", 0), gpu("b", 1)), (silent(0), gpu("b", 1)))

    assert (first.uuid, first.name, first.handle) == ("GPU-a", "card a", None)
    assert (first.fault, first.detail) == (Fault.LOST, "GPU is lost")
    assert second.fault is None


def test_a_gpu_that_does_not_tell_its_uuid_is_not_one_that_is_found_elsewhere() -> None:
    matched = match((gpu("a", 0), gpu("b", 1)), (silent(0), gpu("a", 1)))

    assert [device.uuid for device in matched] == ["unknown-0", "GPU-a", "GPU-b"]


@st.composite
def listings(draw: st.DrawFn) -> tuple[Device, ...]:
    """Return what a driver may list: GPUs in any order, some without an answer."""
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=6))
    answers = [draw(st.booleans()) for _ in names]
    return tuple(
        gpu(name, index) if answer else silent(index)
        for index, (name, answer) in enumerate(zip(names, answers, strict=True))
    )


@given(st.lists(listings(), max_size=5))
def test_no_gpu_is_ever_forgotten_or_listed_twice(history: list[tuple[Device, ...]]) -> None:
    known: tuple[Device, ...] = ()
    for found in history:
        before = {device.uuid for device in known if device.is_identified}
        known = match(known, found)
        assert {gpu for gpu in found if gpu.handle} <= set(known), "as they were found"
        uuids = [device.uuid for device in known]
        assert len(set(uuids)) == len(uuids)
        assert before <= set(uuids)
