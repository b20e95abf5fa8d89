"""What keeps new leases off a GPU: a person, or its health; and how a GPU is named."""

from datetime import timedelta

import pytest

from fakes import NOON, reading
from goldens import sentence
from gpulease.domain.gpu import GpuUuid
from gpulease.domain.health import Drain, GpuAvailability, HardwareFault
from gpulease.errors import NoSuchGpu
from gpulease.service.health import named

FAN = Drain("alice", "fan", NOON)
OFF = HardwareFault("xid 79", "XID 79, the GPU has fallen off the bus", NOON)


def test_a_drain_says_who_and_why() -> None:
    assert GpuAvailability().reason is None
    sentence("drained-why", GpuAvailability(FAN).reason)
    sentence("drained", GpuAvailability(Drain("alice")).reason)
    # As a record of before 0004 has it.
    sentence("drained-by-unknown", GpuAvailability(Drain(None, "fan")).reason)
    sentence("drained-by-health", GpuAvailability(None, OFF).reason)


def test_who_drained_first_has_drained_and_a_fault_is_kept_beside_it() -> None:
    both = GpuAvailability(None, OFF).drained(FAN)
    assert (both.drain, both.hardware_fault) == (FAN, OFF)
    assert both.reason == GpuAvailability(FAN).reason
    assert both.drained(Drain("bob", "dust", NOON + timedelta(hours=1))) == both


def test_a_person_resumes_both_and_excuses_the_fault() -> None:
    assert GpuAvailability(FAN, OFF).resumed() == GpuAvailability(accepted_fault="xid 79")
    assert GpuAvailability(FAN, accepted_fault="remap_failed").resumed() == GpuAvailability(
        accepted_fault="remap_failed"
    )


GPUS = (
    reading("GPU-5f3a0000-1", 0),
    reading("GPU-5f3b0000-2", 1),
    reading("MIG-5f3c0000-3", 1, parent=GpuUuid("GPU-5f3b0000-2"), mig_index=0),
)


@pytest.mark.parametrize(
    ("text", "index"),
    [("0", 0), ("1", 1), ("1:0", 2), ("GPU-5f3a0000-1", 0), ("GPU-5f3b", 1), ("mig-5", 2)],
)
def test_a_gpu_is_named_by_index_uuid_or_the_beginning_of_that(text: str, index: int) -> None:
    assert named(text, GPUS) == GPUS[index]


@pytest.mark.parametrize("text", ["2", "1:1", "GPU-6", "GPU", "", "GPU-5f3a0000-1x", "G", "-1"])
def test_a_name_that_no_gpu_has_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(NoSuchGpu) as refused:
        named(text, GPUS)
    assert "0, 1, 1:0" in (refused.value.hint or "")


def test_the_beginning_of_several_names_is_refused() -> None:
    with pytest.raises(NoSuchGpu, match="GPU-5f3a0000-1, GPU-5f3b0000-2"):
        named("GPU-5f", GPUS)
